//! Stop patterns: rules, limits, and random streams against a naive model.

use std::sync::Arc;

use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use regex::Regex;
use text::{Error, Stops, Stream, StreamOptions};

use crate::vocabulary::{NONE, byte_level, bytes, drain, push_bytes};

const LETTERS: [&str; 3] = ["a", "b", "é"];
/// From every beginning of a match of these, at most three letters complete one.
const PATTERNS: [&str; 10] =
    ["ab", "a+b", "a.*b", "(?:ab|b{2})a", "[^a]{2}", "é", "a.{2}", "(?i)AB", "b(?:a|é)b", "a?b?é"];

fn stream(strings: &[&str], patterns: &[&str]) -> Stream {
    let stops = Stops::new(strings.iter().copied(), patterns.iter().copied()).unwrap();
    let options = StreamOptions {
        skip_special_tokens: true,
        no_stop_trim: false,
        stops: Some(Arc::new(stops)),
    };
    Stream::new(bytes(), options)
}

fn reason(pattern: &str) -> String {
    Stops::new(NONE, [pattern]).unwrap_err().to_string()
}

#[test]
fn the_text_ends_before_what_a_pattern_matches() {
    let mut stream = stream(&[], &[r"\n\s*\d+\."]);
    assert_eq!(push_bytes(&mut stream, b"one\n two\n  1"), None);
    assert_eq!(stream.released(), "one\n two");
    assert_eq!(push_bytes(&mut stream, b"2.3"), Some(0));
    assert_eq!(stream.released(), "one\n two");
}

#[test]
fn what_no_longer_can_match_is_released() {
    let mut stream = stream(&[], &["ab+c"]);
    push_bytes(&mut stream, b"xabbb");
    assert_eq!(stream.released(), "x");
    push_bytes(&mut stream, b"a");
    assert_eq!(stream.released(), "xabbb");
    assert_eq!(stream.finish(), None);
    assert_eq!(stream.released(), "xabbba");
}

#[test]
fn strings_and_patterns_follow_one_rule() {
    for (strings, patterns, text, stop, left) in [
        (["cd"], ["bcd"], "abcd", 1, "a"), // begins first
        (["bcd"], ["cd"], "abcd", 0, "a"),
        (["cd"], ["c."], "abcd", 0, "ab"), // equal: strings first
        (["cd"], ["b"], "abcd", 1, "a"),   // ends first
        (["b"], ["cd"], "abcd", 0, "a"),
    ] {
        let mut stream = stream(&strings, &patterns);
        assert_eq!(
            push_bytes(&mut stream, text.as_bytes()),
            Some(stop),
            "{strings:?} {patterns:?}"
        );
        assert_eq!(stream.released(), left);
    }
}

#[test]
fn a_caret_is_the_start_of_the_output_or_of_a_line() {
    let mut start = stream(&[], &["^ab"]);
    assert_eq!(push_bytes(&mut start, b"ab"), Some(0));
    let mut start = stream(&[], &["^ab"]);
    assert_eq!(push_bytes(&mut start, b"xab\nab"), None);
    assert_eq!(start.released(), "xab\nab");
    let mut line = stream(&[], &["(?m)^ab"]);
    assert_eq!(push_bytes(&mut line, b"xab\nab"), Some(0));
    assert_eq!(line.released(), "xab\n");
}

#[test]
fn stops_that_are_set_later_know_what_precedes() {
    for (pattern, found) in [("^b", None), ("(?m)^b", Some(0))] {
        let mut stream = stream(&[], &[pattern]);
        let stops = Stops::new(NONE, [pattern]).map(Arc::new).ok();
        stream.set_stops(None);
        push_bytes(&mut stream, b"a\n");
        stream.set_stops(stops);
        assert_eq!(push_bytes(&mut stream, b"b"), found, "{pattern}");
    }
}

#[test]
fn what_cannot_be_served_is_refused_with_a_reason() {
    assert_eq!(reason("(["), "stop pattern 0 cannot be used: unclosed character class");
    assert!(reason("*a").contains("repetition operator missing expression"));
    assert!(reason("(?=a)b").contains("look-around"));
    assert!(reason(r"(a)\1").contains("backreferences are not supported"));
    for pattern in ["", "a*", "^", "(?:a|)"] {
        assert!(reason(pattern).contains("matches the empty text"), "{pattern}");
    }
    for pattern in ["a$", r"\bab", r"a\z", r"(?Rm)^a"] {
        assert!(reason(pattern).contains("assertions"), "{pattern}");
    }
    let error = Stops::new(["x"], ["a", "b("]).unwrap_err();
    assert!(matches!(error, Error::StopPattern { index: 1, .. }));
    assert!(Stops::new(NONE, ["\0"]).is_ok());
}

#[test]
fn large_patterns_are_refused() {
    for pattern in [r"\w{1000}", "(?:(?:a{100}){100}){100}", r"(?:\p{L}{9}\d{9}){99}"] {
        let error = Stops::new(NONE, [pattern]).unwrap_err();
        assert!(matches!(error, Error::StopPatternsTooLarge { .. }), "{pattern}");
    }
    assert!(Stops::new(NONE, vec![r"\w{40}"; 32]).is_err());
}

/// The stop rule as it is written, for patterns.
fn naive_stop(text: &str, whole: &[Regex]) -> Option<(usize, String)> {
    let ends = text.char_indices().map(|(at, character)| at + character.len_utf8());
    for end in ends {
        for (start, _) in text[..end].char_indices() {
            if let Some(index) = whole.iter().position(|one| one.is_match(&text[start..end])) {
                return Some((index, text[..start].to_owned()));
            }
        }
    }
    None
}

fn extensions() -> Vec<String> {
    let mut all = vec![String::new()];
    let mut from = 0;
    for _ in 0..3 {
        let upto = all.len();
        for index in from..upto {
            all.extend(LETTERS.map(|letter| all[index].clone() + letter));
        }
        from = upto;
    }
    all
}

/// Where a beginning of a match at the end of the text starts.
fn naive_held_from(text: &str, whole: &[Regex], extensions: &[String]) -> usize {
    let begins = |start: &usize| {
        extensions.iter().any(|more| {
            let candidate = text[*start..].to_owned() + more;
            whole.iter().any(|one| one.is_match(&candidate))
        })
    };
    text.char_indices().map(|(at, _)| at).find(begins).unwrap_or(text.len())
}

#[test]
fn every_step_releases_exactly_what_the_model_does() {
    let extensions = extensions();
    for seed in 0..400 {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let patterns: Vec<&str> = (0..random.random_range(1..=3))
            .map(|_| *PATTERNS.choose(&mut random).unwrap())
            .collect();
        let whole: Vec<Regex> =
            patterns.iter().map(|one| Regex::new(&format!(r"\A(?:{one})\z")).unwrap()).collect();
        let tokens: Vec<Vec<u8>> = (0..random.random_range(1..9))
            .map(|_| {
                let letters = random.random_range(1..3);
                (0..letters).flat_map(|_| LETTERS.choose(&mut random).unwrap().bytes()).collect()
            })
            .collect();
        let options = StreamOptions {
            skip_special_tokens: true,
            no_stop_trim: false,
            stops: Some(Arc::new(Stops::new(NONE, patterns.clone()).unwrap())),
        };
        let mut stream = Stream::new(byte_level(&tokens), options);
        let (mut pushed, mut seen) = (String::new(), String::new());
        for (id, token) in tokens.iter().enumerate() {
            pushed += std::str::from_utf8(token).unwrap();
            let found = stream.push(id as u32);
            let expected = naive_stop(&pushed, &whole);
            assert_eq!(found, expected.as_ref().map(|stop| stop.0), "{patterns:?} {pushed:?}");
            seen += &drain(&mut stream);
            if let Some((_, text)) = expected {
                assert_eq!(seen, text, "{patterns:?} {pushed:?}");
                break;
            }
            let held_from = naive_held_from(&pushed, &whole, &extensions);
            assert_eq!(seen, pushed[..held_from], "{patterns:?} {pushed:?}");
        }
    }
}
