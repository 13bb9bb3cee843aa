//! Tiny tokenizers and shorthands for the tests.

use std::sync::Arc;

use serde_json::{Value, json};
use text::{Decoder, Error, Stops, Stream, StreamOptions};

/// GPT-2's character of every byte.
fn byte_characters() -> Vec<char> {
    let mut hidden = (0x100_u32..).map(|code| char::from_u32(code).unwrap());
    let is_printable = |byte| matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    (0..=255_u8)
        .map(|byte| if is_printable(byte) { byte.into() } else { hidden.next().unwrap() })
        .collect()
}

/// A byte-level tokenizer whose token `i` is `tokens[i]`.
pub(crate) fn byte_level(tokens: &[Vec<u8>]) -> Arc<Decoder> {
    let characters = byte_characters();
    let spell = |token: &Vec<u8>| -> String {
        token.iter().map(|&byte| characters[usize::from(byte)]).collect()
    };
    build(&json!({"type": "ByteLevel"}), tokens.iter().map(spell), &json!([])).unwrap()
}

/// Token `i` is byte `i`.
pub(crate) fn bytes() -> Arc<Decoder> {
    byte_level(&(0..=255).map(|byte| vec![byte]).collect::<Vec<_>>())
}

/// Token `i` is byte `i` of a byte-fallback tokenizer; the text loses one leading space.
pub(crate) fn fallback_bytes() -> Arc<Decoder> {
    let decoder = json!({"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]});
    build(&decoder, (0..=255).map(|byte| format!("<0x{byte:02X}>")), &json!([])).unwrap()
}

/// A tokenizer with this decoder section, and `tokens[i]` as token `i`.
pub(crate) fn build(
    decoder: &Value,
    tokens: impl IntoIterator<Item = impl Into<String>>,
    added: &Value,
) -> Result<Arc<Decoder>, Error> {
    let vocabulary: Vec<Value> =
        tokens.into_iter().map(|token| json!([token.into(), 0.0])).collect();
    let file = json!({
        "added_tokens": added,
        "decoder": decoder,
        "model": {"type": "Unigram", "vocab": vocabulary},
    });
    Decoder::from_tokenizer_json(&file.to_string()).map(Arc::new)
}

/// No stop strings, or no patterns.
pub(crate) const NONE: [&str; 0] = [];

pub(crate) fn stop_strings<S: Into<String>>(strings: impl IntoIterator<Item = S>) -> Arc<Stops> {
    Arc::new(Stops::new(strings, NONE).unwrap())
}

/// A stream that skips special tokens and has these stop strings.
pub(crate) fn stream(decoder: &Arc<Decoder>, stops: &[&str]) -> Stream {
    let stops = Some(stop_strings(stops.iter().copied()));
    let options = StreamOptions { skip_special_tokens: true, no_stop_trim: false, stops };
    Stream::new(Arc::clone(decoder), options)
}

/// All that can be drained now.
pub(crate) fn drain(stream: &mut Stream) -> String {
    let mut text = String::new();
    stream.drain_into(&mut text);
    text
}

/// Pushes the bytes as tokens of [`bytes`].
pub(crate) fn push_bytes(stream: &mut Stream, bytes: &[u8]) -> Option<usize> {
    bytes.iter().fold(None, |_, &byte| stream.push(u32::from(byte)))
}
