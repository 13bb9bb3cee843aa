//! The written rules of the crate, one small case each.

use serde_json::{Value, json};
use text::{Decoder, Error, Stops, Stream, StreamOptions};

use crate::vocabulary::{NONE, build, byte_level, bytes, drain, push_bytes, stop_strings, stream};

#[test]
fn a_character_is_released_when_it_is_complete() {
    let mut stream = stream(&bytes(), &[]);
    push_bytes(&mut stream, &"🌶".as_bytes()[..3]);
    assert_eq!(stream.released(), "");
    push_bytes(&mut stream, &"🌶".as_bytes()[3..]);
    assert_eq!(stream.released(), "🌶");
}

#[test]
fn an_incomplete_end_becomes_one_replacement() {
    let mut stream = stream(&bytes(), &[]);
    push_bytes(&mut stream, b"a\xF0\x9F\x8C");
    assert_eq!(drain(&mut stream), "a");
    stream.finish();
    assert_eq!(drain(&mut stream), "\u{FFFD}");
}

#[test]
fn a_stop_string_is_held_back_and_cut() {
    let mut stream = stream(&bytes(), &["never", "END"]);
    assert_eq!(push_bytes(&mut stream, b"a EN"), None);
    assert_eq!(drain(&mut stream), "a ");
    assert_eq!(push_bytes(&mut stream, b"EN"), None);
    assert_eq!(drain(&mut stream), "EN");
    assert_eq!(push_bytes(&mut stream, b"Dz"), Some(1));
    assert_eq!(stream.finish(), Some(1));
    assert_eq!(drain(&mut stream), "");
    assert_eq!(stream.delivered(), 4);
}

#[test]
fn what_was_held_back_is_released_at_the_end() {
    let mut stream = stream(&bytes(), &["abc"]);
    push_bytes(&mut stream, b"xab");
    assert_eq!(drain(&mut stream), "x");
    assert_eq!(stream.finish(), None);
    assert_eq!(drain(&mut stream), "ab");
}

#[test]
fn a_stop_string_inside_a_token_is_seen() {
    let decoder = byte_level(&[b"wonderful".to_vec(), b" day".to_vec()]);
    for (stops, text) in [(["der"], "won"), (["ul d"], "wonderf"), (["day"], "wonderful ")] {
        let mut stream = stream(&decoder, &stops);
        let matched = [0, 1, 0].iter().fold(None, |_, &token| stream.push(token));
        assert_eq!((matched, stream.released()), (Some(0), text));
    }
}

#[test]
fn no_stop_trim_cuts_after_the_stop_string() {
    let options = StreamOptions {
        no_stop_trim: true,
        stops: Some(stop_strings(["der"])),
        ..Default::default()
    };
    let mut stream = Stream::new(byte_level(&[b"wonderful".to_vec()]), options);
    assert_eq!(stream.push(0), Some(0));
    assert_eq!(stream.released(), "wonder");
}

#[test]
fn the_first_stop_string_to_complete_wins_then_the_longest_then_the_first() {
    let cases: [(&[&str], &str, usize, &str); 5] = [
        (&["abcd", "bc"], "abcd", 1, "a"),
        (&["b", "ab"], "ab", 1, ""),
        (&["ab", "abc"], "abc", 0, ""),
        (&["x", "ab", "ab"], "zab", 1, "z"),
        (&["aab", "ab"], "aaab", 0, "a"),
    ];
    for (stops, text, matched, cut) in cases {
        let mut by_byte = stream(&bytes(), stops);
        assert_eq!(push_bytes(&mut by_byte, text.as_bytes()), Some(matched));
        assert_eq!(by_byte.released(), cut);
        let mut at_once = stream(&byte_level(&[text.as_bytes().to_vec()]), stops);
        assert_eq!(at_once.push(0), Some(matched));
        assert_eq!(at_once.released(), cut);
    }
}

#[test]
fn a_replacement_at_the_end_can_complete_a_stop_string() {
    let mut stream = stream(&bytes(), &["\u{FFFD}"]);
    assert_eq!(push_bytes(&mut stream, b"a\xE2\x82"), None);
    assert_eq!(stream.finish(), Some(0));
    assert_eq!(stream.released(), "a");
}

#[test]
fn an_empty_stop_string_is_refused() {
    let error = Stops::new(["x", ""], NONE).unwrap_err();
    assert!(matches!(error, Error::EmptyStopString { index: 1 }));
    assert!(Stops::new(NONE, NONE).unwrap().is_empty());
}

#[test]
fn long_and_many_stop_strings_match() {
    let strings: Vec<String> = (0..32).map(|k| format!("{}{k}!", "ab".repeat(2_000))).collect();
    let options = StreamOptions { stops: Some(stop_strings(strings)), ..Default::default() };
    let mut stream = Stream::new(bytes(), options);
    assert_eq!(push_bytes(&mut stream, "ab".repeat(3_000).as_bytes()), None);
    assert_eq!(drain(&mut stream).len(), 2_000);
    assert_eq!(push_bytes(&mut stream, b"17!"), Some(17));
    assert_eq!(drain(&mut stream), "");
}

#[test]
fn offsets_count_code_points() {
    let mut stream = stream(&bytes(), &[]);
    let mut text = String::new();
    push_bytes(&mut stream, "日🌶️".as_bytes());
    assert_eq!(stream.drain_into(&mut text), 0);
    push_bytes(&mut stream, b"a");
    assert_eq!(stream.drain_into(&mut text), 3);
    assert_eq!((stream.delivered(), text.as_str()), (4, "日🌶️a"));
}

#[test]
fn resuming_skips_what_was_delivered() {
    let output: Vec<u32> = "añ日x".bytes().map(u32::from).collect();
    let mut stream = stream(&bytes(), &["xy"]);
    assert_eq!(stream.resume(&output, 2), None);
    let mut text = String::new();
    assert_eq!(stream.drain_into(&mut text), 2);
    assert_eq!(text, "日");
    assert_eq!(stream.push(u32::from(b'y')), Some(0));
    assert_eq!(drain(&mut stream), "");
}

#[test]
fn added_tokens_are_literal_and_special_ones_skipped() {
    let added = json!([
        {"id": 1, "content": "<s>", "special": true},
        {"id": 2, "content": "ü", "special": false},
        {"id": 9, "content": "two words", "special": false},
    ]);
    let decoder = build(&json!({"type": "ByteLevel"}), ["Ġa"], &added).unwrap();
    let text = |skip_special_tokens| {
        let options = StreamOptions { skip_special_tokens, ..Default::default() };
        let mut stream = Stream::new(decoder.clone(), options);
        for token in [1, 0, 2, 5, 9, 1, 10, u32::MAX] {
            stream.push(token);
        }
        drain(&mut stream)
    };
    assert_eq!(text(true), " aütwo words");
    assert_eq!(text(false), "<s> aütwo words<s>");
    assert_eq!(decoder.token_bytes(0), b" a");
    assert_eq!(decoder.token_bytes(1), b"<s>");
    assert_eq!(decoder.token_bytes(5), b"");
    assert!(decoder.is_special(1) && !decoder.is_special(2) && !decoder.is_special(5));
    assert_eq!(decoder.vocab_size(), 10);
}

#[test]
fn an_added_token_of_the_vocabulary_has_its_id_there() {
    let added = json!([{"id": 7, "content": "</s>", "special": true}]);
    let decoder = build(&json!({"type": "Fuse"}), ["a", "</s>"], &added).unwrap();
    assert!(decoder.is_special(1));
    assert_eq!(decoder.vocab_size(), 2);
}

#[test]
fn a_skipped_token_is_not_the_first() {
    let added = json!([{"id": 1, "content": "<s>", "special": true}]);
    let metaspace = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first"});
    let decoder = build(&metaspace, ["▁a"], &added).unwrap();
    let mut after_bos = stream(&decoder, &[]);
    after_bos.prime(&[1, 99]);
    after_bos.push(0);
    assert_eq!(after_bos.released(), "a");
    let mut after_text = stream(&decoder, &[]);
    after_text.prime(&[1, 0]);
    after_text.push(0);
    assert_eq!(after_text.released(), " a");
}

#[test]
fn a_long_prompt_is_read_only_at_its_ends() {
    let mut stream = stream(&bytes(), &["日"]);
    let mut prompt = vec![u32::from(b'x'); 1 << 20];
    prompt.extend([0xE6, 0x97]);
    stream.prime(&prompt);
    assert_eq!(stream.released(), "");
    assert_eq!(stream.push(0xA5), Some(0));
}

#[test]
fn decoders_that_cannot_be_decoded_incrementally_are_refused() {
    let replace = json!({"type": "Replace", "pattern": {"String": "_"}, "content": " "});
    let strip_end = json!({"type": "Strip", "content": " ", "start": 0, "stop": 1});
    let strip = json!({"type": "Strip", "content": " ", "start": 1, "stop": 0});
    let regex = json!({"type": "Replace", "pattern": {"Regex": "_+"}, "content": " "});
    let empty = json!({"type": "Replace", "pattern": {"String": ""}, "content": " "});
    let contradiction = json!({"type": "Metaspace", "replacement": "▁", "add_prefix_space": false,
        "prepend_scheme": "always"});
    let fuse = json!({"type": "Fuse"});
    let fallback = json!({"type": "ByteFallback"});
    let level = json!({"type": "ByteLevel"});
    let refused: [(Vec<&Value>, &str); 10] = [
        (vec![&regex], "Replace"),
        (vec![&empty], "Replace"),
        (vec![&contradiction], "Metaspace"),
        (vec![&fuse, &replace], "Replace"),
        (vec![&fallback, &replace], "Replace"),
        (vec![&fallback, &strip], "Strip"),
        (vec![&fuse, &strip_end], "Strip"),
        (vec![&fuse, &strip, &strip], "Strip"),
        (vec![&fuse, &level], "ByteLevel"),
        (vec![&level, &fallback], "ByteFallback"),
    ];
    for (decoders, name) in refused {
        let section = json!({"type": "Sequence", "decoders": decoders});
        match build(&section, ["a"], &json!([])) {
            Err(Error::UnsupportedDecoder { kind, .. }) => assert_eq!(kind, name),
            other => panic!("{section} gave {other:?}"),
        }
    }
}

#[test]
fn unknown_kinds_are_named() {
    for kind in ["CTC", "BPEDecoder", "Hieroglyphs"] {
        let section =
            json!({"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": kind, "x": 1}]});
        let error = build(&section, ["a"], &json!([])).unwrap_err();
        assert!(matches!(&error, Error::UnknownDecoder { kind: named } if named == kind));
        assert!(error.to_string().contains(kind));
    }
    let file = json!({"decoder": null, "model": {"type": "Abacus", "vocab": {}}}).to_string();
    let error = Decoder::from_tokenizer_json(&file).unwrap_err();
    assert!(matches!(error, Error::UnknownModel { kind } if kind == "Abacus"));
}

#[test]
fn a_huge_id_is_refused() {
    let added = json!([{"id": u32::MAX, "content": "x"}]);
    let error = build(&json!({"type": "Fuse"}), ["a"], &added).unwrap_err();
    assert!(matches!(error, Error::TokenIdTooLarge { id: u32::MAX, .. }));
}
