//! Token ids to text, incrementally: the decoder section of a Hugging Face `tokenizer.json`,
//! stops and UTF-8 safety.
//!
//! This crate knows nothing of requests, prompts as text, encoding, or when a sequence ends by
//! token or length. A [`Decoder`] is built once per tokenizer and shared; a [`Stream`] is the state
//! of one sequence; [`Stops`] are compiled once per request and shared by its samples.
//!
//! # Rules
//!
//! * **Text.** The text of a sequence is what `tokenizers`' `decode(ids, skip_special_tokens)`
//!   returns for the whole of it, with two exceptions. Bytes that are not UTF-8 become one U+FFFD
//!   per maximal invalid part, as in [`String::from_utf8_lossy`]: `tokenizers` does the same for
//!   `ByteLevel`, but for `ByteFallback` it replaces every byte of a run of byte tokens, also the
//!   valid ones, which no incremental decoder can do. And under `ByteLevel` an added token is its
//!   own literal text, whereas `tokenizers` maps it through the byte alphabet if all its characters
//!   happen to be in it (`ü` would become the byte 0xFC).
//! * **UTF-8.** A character split over tokens is released when it is complete; U+FFFD appears only
//!   once later tokens can no longer complete it.
//! * **Unknown ids** (padding rows of the model's vocabulary) are no tokens: they have no text and
//!   are not the first token of anything.
//! * **Stops** are strings and regular expressions. The sequence stops at the first character that
//!   completes any stop, at any place in the text: inside a token, or across several. Of several
//!   completed there, the one that starts first wins, and of equal ones the first given, strings
//!   before expressions. The text is cut where the match starts, or with `no_stop_trim` where it
//!   ends. This rule sees characters, not tokens, so the result is the same for every way of
//!   splitting a text into tokens, and no stop is ever delayed because a longer one might still
//!   complete: `a+` stops at the first `a`.
//! * **Expressions** are those of the `regex` crate, without what depends on text to come (`$`, ``
//!   and their like) and without those that match the empty text. `^` is the start of the output.
//! * **Hold-back.** Exactly the longest suffix of the text that is a proper prefix of a stop is held
//!   back; all before it is released.
//! * **Start.** Some decoders treat the first token differently (`Metaspace`, `WordPiece`, `Strip`
//!   after `Fuse`). Output continues its prompt: with [`Stream::prime`], the text is
//!   `decode(prompt + output)` without its beginning `decode(prompt)`.
//!
//! # Example
//!
//! ```
//! use std::sync::Arc;
//! use text::{Decoder, Stops, Stream, StreamOptions};
//!
//! let decoder = Arc::new(Decoder::from_tokenizer_json(
//!     r#"{"decoder": {"type": "ByteLevel"},
//!         "model": {"type": "BPE", "vocab": {"Hello": 0, "Ġwor": 1, "ld": 2, "!Ċ": 3}}}"#,
//! )?);
//! let stops = Some(Arc::new(Stops::new(["\n"], [r"\d\d"])?));
//! let mut stream = Stream::new(decoder, StreamOptions { stops, ..StreamOptions::default() });
//! stream.prime(&[0]);
//! let mut text = String::new();
//! assert_eq!(stream.push(1), None);
//! assert_eq!(stream.drain_into(&mut text), 0);
//! assert_eq!(stream.push(2), None);
//! assert_eq!(stream.push(3), Some(0));
//! assert_eq!(stream.drain_into(&mut text), 4);
//! assert_eq!(text, " world!");
//! # Ok::<(), text::Error>(())
//! ```

mod decoder;
mod pattern;
mod pipeline;
mod stop;
mod stops;
mod stream;

pub use decoder::Decoder;
pub use stops::Stops;
pub use stream::{Stream, StreamOptions};

/// Why a decoder or a set of stops could not be built.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Not JSON, or a field that this crate reads has another type.
    #[error("tokenizer.json cannot be read: {0}")]
    Json(#[from] serde_json::Error),
    /// A decoder kind that this crate does not interpret.
    #[error(
        "tokenizer.json has a decoder of kind {kind:?}; known are ByteLevel, ByteFallback, Fuse, \
         Metaspace, Replace, Sequence, Strip and WordPiece"
    )]
    UnknownDecoder {
        /// The `type` of the decoder.
        kind: String,
    },
    /// A known decoder kind with a setting, or at a place, that cannot be decoded incrementally.
    #[error("decoder {kind} of tokenizer.json is not supported here: {reason}")]
    UnsupportedDecoder {
        /// The `type` of the decoder.
        kind: String,
        /// What about it is not supported.
        reason: String,
    },
    /// A model kind whose vocabulary this crate cannot read.
    #[error(
        "tokenizer.json has a model of kind {kind:?}; known are BPE, Unigram, WordPiece and \
         WordLevel"
    )]
    UnknownModel {
        /// The `type` of the model.
        kind: String,
    },
    /// A token id so large that the table would not fit in memory.
    #[error("token {token:?} of tokenizer.json has id {id}; the limit is {limit}")]
    TokenIdTooLarge {
        /// Text of the token.
        token: String,
        /// Its id.
        id: u32,
        /// The largest id allowed.
        limit: u32,
    },
    /// The tokens of the vocabulary are longer than the table can address.
    #[error("the vocabulary of tokenizer.json has {bytes} bytes of text; the limit is {limit}")]
    VocabularyTooLarge {
        /// Sum of the lengths of all tokens.
        bytes: usize,
        /// The largest sum allowed.
        limit: usize,
    },
    /// An empty stop string would match everywhere.
    #[error("stop string {index} is empty; leave it out or give at least one character")]
    EmptyStopString {
        /// Its place in the list.
        index: usize,
    },
    /// A stop pattern that cannot be served.
    #[error("stop pattern {index} cannot be used: {reason}")]
    StopPattern {
        /// Its place in the list.
        index: usize,
        /// What about it.
        reason: String,
    },
    /// The automaton of the stop patterns is larger than its limit.
    #[error(
        "the stop patterns compile to more than the limit of {limit} bytes; give fewer or simpler \
         ones, with smaller repetition counts or (?-u) for ASCII classes"
    )]
    StopPatternsTooLarge {
        /// The limit, in bytes.
        limit: usize,
    },
}
