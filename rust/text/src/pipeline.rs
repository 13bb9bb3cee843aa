//! The decoder section of a `tokenizer.json` as steps on one token.
//!
//! Every supported decoder is a function of one token's text and of whether that token is the first
//! of the sequence, then perhaps a rule that turns it into bytes, then perhaps a cut at the start of
//! the whole text. So a vocabulary can be decoded once, when the engine starts. What does not have
//! this form is refused.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::Error;

/// One decoder that works on each token alone.
#[derive(Debug)]
enum Step {
    Replace { pattern: String, content: String },
    Strip { content: char, start: usize, stop: usize },
    Metaspace { replacement: char, trims_first: bool },
    WordPiece { prefix: String, cleanup: bool },
    SpaceBefore,
}

/// How a token's text becomes bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum ByteRule {
    Utf8,
    Alphabet,
    Fallback,
}

/// Characters to remove at the start of the whole text.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LeadingStrip {
    pub(crate) content: char,
    pub(crate) count: usize,
}

/// What the decoders before one have done to the list of tokens.
#[derive(Clone, Copy, PartialEq)]
enum Stage {
    Tokens,
    BytesMerged,
    Fused,
}

#[derive(Debug)]
pub(crate) struct Pipeline {
    steps: Vec<Step>,
    bytes: ByteRule,
    leading: Option<LeadingStrip>,
}

#[derive(Deserialize)]
struct ReplaceFields {
    pattern: Pattern,
    content: String,
}

#[derive(Deserialize)]
enum Pattern {
    String(String),
    Regex(String),
}

#[derive(Deserialize)]
struct StripFields {
    content: char,
    start: usize,
    stop: usize,
}

#[derive(Clone, Copy, Deserialize, PartialEq)]
#[serde(rename_all = "snake_case")]
enum PrependScheme {
    First,
    Never,
    Always,
}

#[derive(Deserialize)]
struct MetaspaceFields {
    replacement: char,
    prepend_scheme: Option<PrependScheme>,
    add_prefix_space: Option<bool>,
}

#[derive(Deserialize)]
struct WordPieceFields {
    prefix: String,
    cleanup: bool,
}

#[derive(Deserialize)]
struct SequenceFields {
    decoders: Vec<Map<String, Value>>,
}

impl Pipeline {
    /// Reads the decoder section; `None` joins tokens with spaces, as `tokenizers` does.
    pub(crate) fn new(section: Option<Map<String, Value>>) -> Result<Self, Error> {
        let mut pipeline = Self { steps: Vec::new(), bytes: ByteRule::Utf8, leading: None };
        match section {
            None => pipeline.steps.push(Step::SpaceBefore),
            Some(section) => {
                pipeline.add(section, Stage::Tokens)?;
            }
        }
        Ok(pipeline)
    }

    pub(crate) fn leading(&self) -> Option<LeadingStrip> {
        self.leading
    }

    fn add(&mut self, section: Map<String, Value>, stage: Stage) -> Result<Stage, Error> {
        let kind = section.get("type").and_then(Value::as_str).unwrap_or_default().to_owned();
        let section = Value::Object(section);
        let per_token = |step: Step| {
            if stage == Stage::Tokens {
                Ok(step)
            } else {
                Err(unsupported(&kind, "it follows a decoder that merges tokens"))
            }
        };
        match kind.as_str() {
            "Sequence" => {
                let fields: SequenceFields = serde_json::from_value(section)?;
                return fields.decoders.into_iter().try_fold(stage, |stage, d| self.add(d, stage));
            }
            "Fuse" => return Ok(Stage::Fused),
            "ByteLevel" | "ByteFallback" => return self.add_bytes(&kind, stage),
            "Strip" if stage == Stage::Fused => {
                self.add_leading(&serde_json::from_value(section)?)?;
            }
            "Strip" => {
                let StripFields { content, start, stop } = serde_json::from_value(section)?;
                self.steps.push(per_token(Step::Strip { content, start, stop })?);
            }
            "Replace" => self.steps.push(per_token(replace(serde_json::from_value(section)?)?)?),
            "Metaspace" => {
                self.steps.push(per_token(metaspace(&serde_json::from_value(section)?)?)?);
            }
            "WordPiece" => {
                let WordPieceFields { prefix, cleanup } = serde_json::from_value(section)?;
                self.steps.push(per_token(Step::WordPiece { prefix, cleanup })?);
            }
            _ => return Err(Error::UnknownDecoder { kind }),
        }
        Ok(stage)
    }

    fn add_bytes(&mut self, kind: &str, stage: Stage) -> Result<Stage, Error> {
        if stage != Stage::Tokens {
            return Err(unsupported(kind, "it follows a decoder that merges tokens"));
        }
        if kind == "ByteLevel" {
            self.bytes = ByteRule::Alphabet;
            Ok(Stage::Fused)
        } else {
            self.bytes = ByteRule::Fallback;
            Ok(Stage::BytesMerged)
        }
    }

    fn add_leading(&mut self, fields: &StripFields) -> Result<(), Error> {
        if fields.stop > 0 {
            return Err(unsupported("Strip", "`stop` must be 0 after the tokens are fused"));
        }
        if fields.start > 0 {
            if self.leading.is_some() {
                return Err(unsupported(
                    "Strip",
                    "there is another one after the tokens are fused",
                ));
            }
            self.leading = Some(LeadingStrip { content: fields.content, count: fields.start });
        }
        Ok(())
    }

    /// Whether the first token of a sequence may be decoded differently from the others.
    pub(crate) fn treats_first_differently(&self) -> bool {
        self.steps.iter().any(|step| match step {
            Step::Metaspace { trims_first, .. } => *trims_first,
            Step::WordPiece { .. } | Step::SpaceBefore => true,
            Step::Replace { .. } | Step::Strip { .. } => false,
        })
    }

    /// Bytes of a token. `first`: no token of the sequence precedes it. `added`: it is one of the
    /// added tokens, whose text is literal under `ByteLevel`.
    pub(crate) fn decode(&self, token: &str, first: bool, added: bool) -> Vec<u8> {
        let text =
            self.steps.iter().fold(Cow::Borrowed(token), |text, step| step.apply(text, first));
        match self.bytes {
            ByteRule::Alphabet if !added => {
                from_alphabet(&text).unwrap_or_else(|| text.into_owned().into_bytes())
            }
            ByteRule::Fallback => match byte_token(&text) {
                Some(byte) => vec![byte],
                None => text.into_owned().into_bytes(),
            },
            ByteRule::Alphabet | ByteRule::Utf8 => text.into_owned().into_bytes(),
        }
    }
}

impl Step {
    fn apply<'a>(&self, text: Cow<'a, str>, first: bool) -> Cow<'a, str> {
        match self {
            Self::Replace { pattern, content } => {
                if text.contains(pattern.as_str()) {
                    text.replace(pattern, content).into()
                } else {
                    text
                }
            }
            Self::Strip { content, start, stop } => {
                strip(&text, *content, *start, *stop).to_owned().into()
            }
            Self::Metaspace { replacement, trims_first } => {
                let space = if first && *trims_first { "" } else { " " };
                text.replace(*replacement, space).into()
            }
            Self::WordPiece { prefix, cleanup } => {
                let spaced = match text.strip_prefix(prefix.as_str()) {
                    _ if first => text,
                    Some(rest) => rest.to_owned().into(),
                    None => format!(" {text}").into(),
                };
                if *cleanup { clean_up(&spaced).into() } else { spaced }
            }
            Self::SpaceBefore if first => text,
            Self::SpaceBefore => format!(" {text}").into(),
        }
    }
}

fn unsupported(kind: &str, reason: &str) -> Error {
    Error::UnsupportedDecoder { kind: kind.to_owned(), reason: reason.to_owned() }
}

fn replace(fields: ReplaceFields) -> Result<Step, Error> {
    match fields.pattern {
        Pattern::String(pattern) if pattern.is_empty() => {
            Err(unsupported("Replace", "its pattern is empty"))
        }
        Pattern::String(pattern) => Ok(Step::Replace { pattern, content: fields.content }),
        Pattern::Regex(regex) => Err(unsupported(
            "Replace",
            &format!("its pattern is the regular expression {regex:?}; only a string is"),
        )),
    }
}

fn metaspace(fields: &MetaspaceFields) -> Result<Step, Error> {
    let scheme = match (fields.prepend_scheme, fields.add_prefix_space) {
        (None | Some(PrependScheme::Never), Some(false)) => PrependScheme::Never,
        (Some(_), Some(false)) => {
            return Err(unsupported(
                "Metaspace",
                "`add_prefix_space` is false, which contradicts its `prepend_scheme`",
            ));
        }
        (scheme, _) => scheme.unwrap_or(PrependScheme::Always),
    };
    Ok(Step::Metaspace {
        replacement: fields.replacement,
        trims_first: scheme != PrependScheme::Never,
    })
}

/// Removes up to `start` leading and `stop` trailing occurrences of `content`.
fn strip(mut text: &str, content: char, start: usize, stop: usize) -> &str {
    for _ in 0..start {
        match text.strip_prefix(content) {
            Some(rest) => text = rest,
            None => break,
        }
    }
    for _ in 0..stop {
        match text.strip_suffix(content) {
            Some(rest) => text = rest,
            None => break,
        }
    }
    text
}

/// The artefacts of English word pieces that `WordPiece` with `cleanup` removes from each token.
fn clean_up(text: &str) -> String {
    const ARTEFACTS: [(&str, &str); 11] = [
        (" .", "."),
        (" ?", "?"),
        (" !", "!"),
        (" ,", ","),
        (" ' ", "'"),
        (" n't", "n't"),
        (" 'm", "'m"),
        (" do not", " don't"),
        (" 's", "'s"),
        (" 've", "'ve"),
        (" 're", "'re"),
    ];
    ARTEFACTS.iter().fold(text.to_owned(), |text, (from, to)| text.replace(from, to))
}

/// The byte that a token like `<0x0A>` stands for.
fn byte_token(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() == 2 { u8::from_str_radix(digits, 16).ok() } else { None }
}

/// Bytes of a token written in GPT-2's byte alphabet; `None` if a character is not of it.
fn from_alphabet(token: &str) -> Option<Vec<u8>> {
    token.chars().map(alphabet_byte).collect()
}

/// GPT-2 writes a printable Latin-1 byte as itself and the 68 others, in order, as U+0100 onwards.
fn alphabet_byte(character: char) -> Option<u8> {
    // Byte ranges that are not printable, and the number of such bytes before each.
    const HIDDEN: [(u32, u32, u32); 3] = [(0x00, 0x20, 0), (0x7F, 0xA0, 33), (0xAD, 0xAD, 67)];
    let code = u32::from(character);
    let is_hidden = |byte: u32| HIDDEN.iter().any(|&(low, high, _)| (low..=high).contains(&byte));
    if code < 0x100 {
        return if is_hidden(code) { None } else { u8::try_from(code).ok() };
    }
    let rank = code - 0x100;
    HIDDEN
        .iter()
        .find(|&&(low, high, before)| rank <= before + (high - low))
        .and_then(|&(low, _, before)| u8::try_from(low + (rank - before)).ok())
}
