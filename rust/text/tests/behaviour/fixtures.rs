//! Tiny tokenizers with texts that the `tokenizers` library decoded (`fixtures/make_fixtures.py`).

use std::sync::Arc;

use serde::Deserialize;
use text::{Decoder, Stream, StreamOptions};

use crate::vocabulary::drain;

#[derive(Deserialize)]
struct Fixture {
    tokenizer: serde_json::Value,
    cases: Vec<Case>,
}

/// `skipped[k]` and `kept[k]` are the texts of the first k ids.
#[derive(Deserialize)]
struct Case {
    ids: Vec<u32>,
    skipped: Vec<String>,
    kept: Vec<String>,
}

macro_rules! fixtures {
    ($($name:ident),*) => {
        $(
            #[test]
            fn $name() {
                check(include_str!(concat!("../fixtures/", stringify!($name), ".json")));
            }
        )*

        #[test]
        fn no_damaged_file_panics() {
            $(damage(include_str!(concat!("../fixtures/", stringify!($name), ".json")));)*
        }
    };
}

fixtures!(
    byte_level,
    gemma,
    llama,
    metaspace_fallback,
    strip_tokens,
    unigram_always,
    unigram_first,
    unigram_never,
    word_level,
    word_piece,
    word_piece_cleanup
);

fn check(content: &str) {
    let fixture: Fixture = serde_json::from_str(content).unwrap();
    let decoder = Decoder::from_tokenizer_json(&fixture.tokenizer.to_string()).unwrap();
    let decoder = Arc::new(decoder);
    let is_byte_level = fixture.tokenizer["decoder"]["type"] == "ByteLevel";
    let mut compared = 0;
    for case in &fixture.cases {
        for (skip_special_tokens, texts) in [(true, &case.skipped), (false, &case.kept)] {
            let options = StreamOptions { skip_special_tokens, ..StreamOptions::default() };
            let new = || Stream::new(Arc::clone(&decoder), options.clone());
            for (length, text) in texts.iter().enumerate() {
                // The library replaces each byte of a run of byte tokens that is not complete.
                if is_byte_level || !text.contains('\u{FFFD}') {
                    assert_eq!(&decode(new(), &case.ids[..length]), text, "{:?}", case.ids);
                    compared += 1;
                }
            }
            let whole = texts.last().unwrap();
            for (length, prompt_text) in texts.iter().enumerate() {
                if !prompt_text.contains('\u{FFFD}') {
                    let (prompt, output) = case.ids.split_at(length);
                    let mut stream = new();
                    stream.prime(prompt);
                    let text = whole.strip_prefix(prompt_text.as_str()).unwrap();
                    assert_eq!(decode(stream, output), text, "{prompt:?} {output:?}");
                }
            }
        }
    }
    assert!(compared > 100);
}

fn decode(mut stream: Stream, ids: &[u32]) -> String {
    let mut text = String::new();
    for &id in ids {
        stream.push(id);
        text += &drain(&mut stream);
    }
    stream.finish();
    text + &drain(&mut stream)
}

/// Cuts the file short, and removes each field in turn.
fn damage(content: &str) {
    let fixture: Fixture = serde_json::from_str(content).unwrap();
    let json = fixture.tokenizer.to_string();
    for length in (0..json.len()).step_by(97).filter(|&length| json.is_char_boundary(length)) {
        assert!(Decoder::from_tokenizer_json(&json[..length]).is_err());
    }
    for section in ["added_tokens", "decoder", "model"] {
        for replacement in [serde_json::json!(7), serde_json::json!({"type": "?"})] {
            let mut tokenizer = fixture.tokenizer.clone();
            tokenizer[section] = replacement;
            assert!(Decoder::from_tokenizer_json(&tokenizer.to_string()).is_err(), "{section}");
        }
    }
}
