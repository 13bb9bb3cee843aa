//! What ends a text by what it says: stop strings and stop patterns under one rule.

use crate::Error;
use crate::pattern::{PatternState, StopPatterns};
use crate::stop::{ROOT, State, StopStrings};

/// The stops of a request. Immutable; share it in an `Arc`.
///
/// Without any it never matches. Stop strings cost memory (24 bytes per byte) and time to build in
/// proportion to the sum of their lengths; limits on lengths and numbers are the caller's to set. The
/// automaton of the patterns has a limit of its own, which bounds the time per character.
#[derive(Debug)]
pub struct Stops {
    strings: StopStrings,
    patterns: Option<StopPatterns>,
}

/// How far a text has come towards its stops.
#[derive(Clone, Debug)]
pub(crate) struct StopState {
    strings: State,
    patterns: PatternState,
}

/// A stop that was completed while scanning.
pub(crate) struct StopMatch {
    pub(crate) index: usize,
    /// Bytes scanned up to and including the last of the match.
    pub(crate) end: usize,
    /// Bytes of the match, which may have begun in text that was scanned before.
    pub(crate) length: usize,
}

impl StopState {
    /// The state at a place of a text that follows the byte `previous`; `None` at its start.
    pub(crate) fn after(previous: Option<u8>) -> Self {
        Self { strings: ROOT, patterns: PatternState::after(previous) }
    }
}

impl Stops {
    /// Compiles strings and regular expressions, in the caller's order.
    ///
    /// # Errors
    ///
    /// For an empty string, and a pattern that is malformed, matches the empty text, is too large, or
    /// asserts something of the text that follows.
    pub fn new<S: Into<String>, P: Into<String>>(
        strings: impl IntoIterator<Item = S>,
        patterns: impl IntoIterator<Item = P>,
    ) -> Result<Self, Error> {
        let strings = StopStrings::new(strings.into_iter().map(Into::into).collect())?;
        let patterns: Vec<String> = patterns.into_iter().map(Into::into).collect();
        let patterns = if patterns.is_empty() { None } else { Some(StopPatterns::new(patterns)?) };
        Ok(Self { strings, patterns })
    }

    /// Text of the stop that [`Stream::push`](crate::Stream::push) reported: strings come first.
    pub fn get(&self, index: usize) -> Option<&str> {
        self.strings.get(index).or_else(|| {
            let patterns = self.patterns.as_ref()?;
            patterns.get(index - self.strings.len())
        })
    }

    /// Number of strings and patterns.
    pub fn len(&self) -> usize {
        self.strings.len() + self.patterns.as_ref().map_or(0, StopPatterns::len)
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of bytes at the end of the text that may be the beginning of a stop.
    pub(crate) fn held_bytes(&self, state: &StopState) -> usize {
        self.strings.held_bytes(state.strings).max(state.patterns.held_bytes())
    }

    /// Moves `state` over `bytes`, up to the first that completes a stop.
    pub(crate) fn scan(&self, state: &mut StopState, bytes: &[u8]) -> Option<StopMatch> {
        let string = self.strings.scan(&mut state.strings, bytes).map(|found| {
            let length = self.strings.get(found.index).map_or(0, str::len);
            StopMatch { index: found.index, end: found.end, length }
        });
        let Some(patterns) = &self.patterns else { return string };
        let end = string.as_ref().map_or(bytes.len(), |found| found.end);
        let pattern = patterns.scan(&mut state.patterns, &bytes[..end]).map(|found| StopMatch {
            index: self.strings.len() + found.index,
            end: found.end,
            length: found.length,
        });
        match (string, pattern) {
            (Some(string), Some(pattern)) => {
                let earlier = pattern.end < string.end || pattern.length > string.length;
                Some(if earlier { pattern } else { string })
            }
            (string, pattern) => string.or(pattern),
        }
    }
}
