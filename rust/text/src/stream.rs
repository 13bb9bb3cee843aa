//! The text of one sequence while it grows.

use std::sync::Arc;

use crate::decoder::Decoder;
use crate::stops::{StopState, Stops};

/// What a request says about its text.
#[derive(Clone, Debug, Default)]
pub struct StreamOptions {
    /// Leave out tokens marked special in the tokenizer.
    pub skip_special_tokens: bool,
    /// Keep the stop that ended the text: cut after it, not before.
    pub no_stop_trim: bool,
    /// Stop strings and patterns; `None` when there are none.
    pub stops: Option<Arc<Stops>>,
}

/// The text of one sequence: push tokens, drain what is released.
///
/// The pieces drained, joined, are the text of all tokens pushed, cut at the first stop, for every
/// way of splitting it into tokens and drains. A token that ends the sequence by its id is not
/// pushed, unless its text is wanted. A clone continues on its own.
#[derive(Clone, Debug)]
pub struct Stream {
    decoder: Arc<Decoder>,
    skip_special_tokens: bool,
    /// Whether a token precedes the next one.
    started: bool,
    partial: Partial,
    text: Text,
}

/// The beginning of a character, waiting for the rest of it.
#[derive(Clone, Copy, Debug, Default)]
struct Partial {
    bytes: [u8; 4],
    len: usize,
    /// It ended the prompt: if nothing completes it, its U+FFFD is the prompt's, not the output's.
    from_prompt: bool,
}

/// Decoded text with its stop rule.
#[derive(Clone, Debug)]
struct Text {
    stops: Option<Arc<Stops>>,
    no_stop_trim: bool,
    /// Occurrences of `strip_content` that may still be removed at the start.
    strip_count: usize,
    strip_content: char,
    /// What was not drained yet; the last `held` bytes may become a stop.
    buffer: String,
    held: usize,
    state: StopState,
    /// The last byte of the text so far.
    previous: Option<u8>,
    matched: Option<usize>,
    delivered: u64,
}

impl Stream {
    /// An empty text. Without [`prime`](Self::prime) the first token pushed is the first of all.
    pub fn new(decoder: Arc<Decoder>, options: StreamOptions) -> Self {
        let leading = decoder.leading();
        Self {
            decoder,
            skip_special_tokens: options.skip_special_tokens,
            started: false,
            partial: Partial::default(),
            text: Text {
                stops: options.stops.filter(|stops| !stops.is_empty()),
                no_stop_trim: options.no_stop_trim,
                strip_count: leading.map_or(0, |strip| strip.count),
                strip_content: leading.map_or('\0', |strip| strip.content),
                buffer: String::new(),
                held: 0,
                state: StopState::after(None),
                previous: None,
                matched: None,
                delivered: 0,
            },
        }
    }

    /// Makes the text a continuation of `prompt`; call it once, before the first push.
    ///
    /// The text is then `decode(prompt + output)` without its beginning `decode(prompt)`. A prompt
    /// that ends inside a character is not part of the text, but if the output completes that
    /// character, the text begins with the whole character. Stops are looked for in the output
    /// only. Costs a few tokens at each end of the prompt, whatever its length.
    pub fn prime(&mut self, prompt: &[u32]) {
        let stops = self.text.stops.take();
        let mut rest = prompt;
        while let [token, tail @ ..] = rest {
            if self.started && self.text.strip_count == 0 {
                break;
            }
            self.append(*token);
            rest = tail;
        }
        // Four bytes hold the beginning of any character that is not complete.
        let mut bytes = 0;
        let mut tail = rest.len();
        while tail > 0 && bytes < 4 {
            tail -= 1;
            bytes += self
                .decoder
                .visible(rest[tail], false, self.skip_special_tokens)
                .map_or(0, <[u8]>::len);
        }
        if tail > 0 {
            self.partial = Partial::default();
        }
        for &token in &rest[tail..] {
            self.append(token);
        }
        self.partial.from_prompt = self.partial.len > 0;
        self.text.restart();
        self.text.stops = stops;
    }

    /// Looks for these stops from here on: only text that follows can complete or begin one.
    pub fn set_stops(&mut self, stops: Option<Arc<Stops>>) {
        self.text.stops = stops.filter(|stops| !stops.is_empty());
        self.text.state = StopState::after(self.text.previous);
        self.text.held = 0;
    }

    /// Appends a token's text.
    ///
    /// Returns the index of the stop that the text contains now, if any: the text is then
    /// complete, cut and released as a whole, and further tokens are ignored with the same answer.
    pub fn push(&mut self, token: u32) -> Option<usize> {
        if self.text.matched.is_none() {
            self.append(token);
        }
        self.text.matched
    }

    /// Brings a new stream to where an earlier one was: pushes `output` and takes the first
    /// `delivered_chars` characters of its text for drained (as many as there are, if fewer).
    pub fn resume(&mut self, output: &[u32], delivered_chars: u64) -> Option<usize> {
        for &token in output {
            self.push(token);
        }
        let released = self.text.released();
        let characters = usize::try_from(delivered_chars).unwrap_or(usize::MAX);
        let cut = released.char_indices().nth(characters).map_or(released.len(), |(at, _)| at);
        self.text.drain(cut);
        self.text.matched
    }

    /// Releases all that is held back: no token follows. The beginning of a character that was not
    /// completed becomes U+FFFD. Returns the stop that the text contains, if any.
    pub fn finish(&mut self) -> Option<usize> {
        if self.text.matched.is_none() {
            replace_partial(&mut self.partial, &mut self.text);
        }
        self.text.held = 0;
        self.text.state = StopState::after(self.text.previous);
        self.text.matched
    }

    /// Text that is released and was not drained yet.
    pub fn released(&self) -> &str {
        self.text.released()
    }

    /// Appends the released text to `out` and forgets it. Returns its offset: the number of
    /// characters (code points) drained before it.
    pub fn drain_into(&mut self, out: &mut String) -> u64 {
        let released = self.text.released();
        out.push_str(released);
        let offset = self.text.delivered;
        self.text.drain(released.len());
        offset
    }

    /// Number of characters (code points) drained so far.
    pub fn delivered(&self) -> u64 {
        self.text.delivered
    }

    fn append(&mut self, token: u32) {
        let Some(bytes) = self.decoder.visible(token, !self.started, self.skip_special_tokens)
        else {
            return;
        };
        self.started = true;
        if self.partial.len == 0
            && let Ok(text) = std::str::from_utf8(bytes)
        {
            self.text.append(text);
        } else {
            append_bytes(&mut self.partial, &mut self.text, bytes);
        }
    }
}

const REPLACEMENT: &str = "\u{FFFD}";

/// Gives up waiting for the rest of a character.
fn replace_partial(partial: &mut Partial, text: &mut Text) {
    if partial.from_prompt {
        // The prompt's text ends with U+FFFD, so the output is not at the start.
        text.strip_count = 0;
    } else if partial.len > 0 {
        text.append(REPLACEMENT);
    }
    *partial = Partial::default();
}

/// Appends bytes of which some are not UTF-8, or only with what precedes or follows them.
fn append_bytes(partial: &mut Partial, text: &mut Text, mut bytes: &[u8]) {
    while partial.len > 0
        && let [byte, rest @ ..] = bytes
    {
        partial.bytes[partial.len] = *byte;
        match std::str::from_utf8(&partial.bytes[..=partial.len]) {
            Ok(character) => {
                text.append(character);
                *partial = Partial::default();
                bytes = rest;
            }
            Err(error) if error.error_len().is_none() => {
                partial.len += 1;
                bytes = rest;
            }
            // The new byte does not continue the character: it is looked at again on its own.
            Err(_) => replace_partial(partial, text),
        }
    }
    while !bytes.is_empty() {
        let error = match std::str::from_utf8(bytes) {
            Ok(valid) => return text.append(valid),
            Err(error) => error,
        };
        let (valid, rest) = bytes.split_at(error.valid_up_to());
        text.append(std::str::from_utf8(valid).expect("checked by the call before"));
        let Some(invalid) = error.error_len() else {
            partial.bytes[..rest.len()].copy_from_slice(rest);
            partial.len = rest.len();
            return;
        };
        text.append(REPLACEMENT);
        bytes = &rest[invalid..];
    }
}

impl Text {
    fn append(&mut self, mut piece: &str) {
        if self.matched.is_some() {
            return;
        }
        if self.strip_count > 0 {
            piece = self.strip(piece);
        }
        let start = self.buffer.len();
        self.buffer.push_str(piece);
        self.previous = piece.as_bytes().last().copied().or(self.previous);
        let Some(stops) = &self.stops else { return };
        match stops.scan(&mut self.state, piece.as_bytes()) {
            None => self.held = stops.held_bytes(&self.state),
            Some(found) => {
                let end = start + found.end;
                self.buffer.truncate(if self.no_stop_trim { end } else { end - found.length });
                self.held = 0;
                self.matched = Some(found.index);
            }
        }
    }

    fn strip<'a>(&mut self, mut piece: &'a str) -> &'a str {
        while self.strip_count > 0 && !piece.is_empty() {
            match piece.strip_prefix(self.strip_content) {
                Some(rest) => {
                    piece = rest;
                    self.strip_count -= 1;
                }
                None => self.strip_count = 0,
            }
        }
        piece
    }

    /// Forgets what was not drained and any beginning of a stop.
    fn restart(&mut self) {
        self.buffer.clear();
        self.held = 0;
        self.previous = None;
        self.state = StopState::after(None);
    }

    fn released(&self) -> &str {
        &self.buffer[..self.buffer.len() - self.held]
    }

    fn drain(&mut self, bytes: usize) {
        self.delivered += self.buffer[..bytes].chars().count() as u64;
        if bytes == self.buffer.len() {
            self.buffer.clear();
        } else {
            self.buffer.drain(..bytes);
        }
    }
}
