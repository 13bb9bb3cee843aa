//! The written rules of the crate, one small case each.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

use std::sync::Arc;

use text::{Decoder, Error, StopStrings, Stream, StreamOptions};

/// A byte-level vocabulary: ids 0..=255 are the bytes, then a few longer tokens.
fn byte_level(longer: &[&str]) -> Arc<Decoder> {
    let mut vocabulary = serde_json::Map::new();
    let mut hidden = 0x100;
    for byte in 0..=255_u8 {
        let printable = matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
        let character = if printable {
            char::from(byte)
        } else {
            hidden += 1;
            char::from_u32(hidden - 1).unwrap()
        };
        vocabulary.insert(character.to_string(), byte.into());
    }
    for (index, token) in longer.iter().enumerate() {
        vocabulary.insert((*token).to_owned(), (256 + index).into());
    }
    let file = serde_json::json!({
        "added_tokens": [], "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    });
    Arc::new(Decoder::from_tokenizer_json(&file.to_string()).unwrap())
}

fn stream(decoder: &Arc<Decoder>, stops: &[&str], no_stop_trim: bool) -> Stream {
    let stops = Some(Arc::new(StopStrings::new(stops.iter().copied()).unwrap()));
    let options = StreamOptions { skip_special_tokens: true, no_stop_trim, stops };
    Stream::new(Arc::clone(decoder), options)
}

fn push_bytes(stream: &mut Stream, bytes: &[u8]) -> Option<usize> {
    bytes.iter().fold(None, |_, &byte| stream.push(u32::from(byte)))
}

#[test]
fn a_character_is_released_when_it_is_complete() {
    let decoder = byte_level(&[]);
    let mut stream = stream(&decoder, &[], false);
    for &byte in &"🌶".as_bytes()[..3] {
        stream.push(u32::from(byte));
        assert_eq!(stream.released(), "");
    }
    stream.push(u32::from("🌶".as_bytes()[3]));
    assert_eq!(stream.released(), "🌶");
}

#[test]
fn a_stop_string_is_held_back_and_cut() {
    let decoder = byte_level(&[]);
    let mut stream = stream(&decoder, &["never", "END"], false);
    assert_eq!(push_bytes(&mut stream, b"a EN"), None);
    assert_eq!(stream.released(), "a ");
    assert_eq!(push_bytes(&mut stream, b"EN"), None);
    assert_eq!(stream.released(), "a EN");
    assert_eq!(push_bytes(&mut stream, b"Dz"), Some(1));
    assert_eq!(stream.released(), "a EN");
}

#[test]
fn an_empty_stop_string_is_refused() {
    let error = StopStrings::new(["x", ""]).unwrap_err();
    assert!(matches!(error, Error::EmptyStopString { index: 1 }));
}
