//! Random streams against a naive model that decodes everything from the start.

use std::sync::Arc;

use rand::seq::IndexedRandom;
use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use text::{Decoder, Stream, StreamOptions};

use crate::vocabulary::{byte_level, bytes, drain, fallback_bytes, stop_strings};

const STREAMS: u64 = 4_000;

/// Emoji with joiners and selectors, CJK, combining marks, letters: split anywhere.
const PIECES: [&str; 9] = ["👨‍👩‍👧", "🌶️", "日本", "é", "e\u{301}", "a", "b", " ", "\u{FFFD}"];
/// Bytes that make UTF-8 invalid in different ways.
const GARBAGE: [&[u8]; 8] = [
    b"\x80",
    b"\xC3",
    b"\xE2\x82",
    b"\xF0\x9F",
    b"\xED\xA0\x80",
    b"\xC0\xAF",
    b"\xFF",
    b"\xF4\x90\x80\x80",
];

/// Text of the bytes if none follow, or the part of it that none can change.
fn naive_text(bytes: &[u8], complete: bool) -> String {
    let mut end = bytes.len();
    if !complete {
        let is_open = |start: &usize| {
            std::str::from_utf8(&bytes[*start..])
                .is_err_and(|error| error.valid_up_to() == 0 && error.error_len().is_none())
        };
        end = (bytes.len().saturating_sub(3)..bytes.len()).find(is_open).unwrap_or(end);
    }
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

/// The stop rule as it is written: first place where any string is complete, the longest, the first.
fn naive_stop(text: &str, stops: &[String], no_stop_trim: bool) -> Option<(usize, String)> {
    let ends = text.char_indices().map(|(at, character)| at + character.len_utf8());
    for end in ends {
        let complete = (0..stops.len()).filter(|&stop| text[..end].ends_with(&stops[stop]));
        if let Some(stop) = complete.max_by_key(|&stop| (stops[stop].len(), usize::MAX - stop)) {
            let cut = if no_stop_trim { end } else { end - stops[stop].len() };
            return Some((stop, text[..cut].to_owned()));
        }
    }
    None
}

/// Number of bytes at the end of the text that may be the beginning of a stop string.
fn naive_hold_back(text: &str, stops: &[String]) -> usize {
    let is_prefix = |start: &usize| {
        stops
            .iter()
            .any(|stop| stop.len() > text.len() - start && stop.starts_with(&text[*start..]))
    };
    (0..text.len())
        .filter(|&at| text.is_char_boundary(at))
        .find(is_prefix)
        .map_or(0, |start| text.len() - start)
}

fn random_bytes(random: &mut impl Rng, garbage: bool) -> Vec<u8> {
    let mut result = Vec::new();
    for _ in 0..random.random_range(0..12) {
        if garbage && random.random_bool(0.3) {
            result.extend_from_slice(GARBAGE.choose(random).unwrap());
        } else {
            result.extend_from_slice(PIECES.choose(random).unwrap().as_bytes());
        }
    }
    result
}

/// Up to four strings over few characters, so that they overlap each other and the text.
fn random_stops(random: &mut impl Rng) -> Vec<String> {
    const ALPHABET: [&str; 5] = ["a", "b", "日", "👩", "\u{FFFD}"];
    let letters = random.random_range(1..=3);
    let letters: Vec<&str> = ALPHABET.sample(random, letters).copied().collect();
    (0..random.random_range(0..=4))
        .map(|_| {
            (0..random.random_range(1..=4)).map(|_| *letters.choose(random).unwrap()).collect()
        })
        .collect()
}

/// A random stream's vocabulary: the spans of `text` between random cuts, as tokens 0, 1, 2, ...
fn random_tokens(random: &mut impl Rng, text: &[u8]) -> Vec<Vec<u8>> {
    let mut tokens = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let (token, tail) = rest.split_at(random.random_range(1..=rest.len().min(9)));
        tokens.push(token.to_vec());
        rest = tail;
    }
    tokens
}

#[test]
fn every_step_releases_exactly_what_the_model_does() {
    for seed in 0..STREAMS {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let text = random_bytes(&mut random, seed % 2 == 0);
        let tokens = random_tokens(&mut random, &text);
        let stops = random_stops(&mut random);
        let no_stop_trim = random.random_bool(0.5);
        let options = StreamOptions {
            skip_special_tokens: true,
            no_stop_trim,
            stops: Some(stop_strings(stops.iter().cloned())),
        };
        let mut stream = Stream::new(byte_level(&tokens), options);
        let mut seen = String::new();
        let mut pushed = Vec::new();
        for (id, token) in tokens.iter().enumerate() {
            pushed.extend_from_slice(token);
            let matched = stream.push(id as u32);
            let certain = naive_text(&pushed, false);
            let (expected_match, expected) = match naive_stop(&certain, &stops, no_stop_trim) {
                Some((stop, text)) => (Some(stop), text),
                None => {
                    (None, certain[..certain.len() - naive_hold_back(&certain, &stops)].to_owned())
                }
            };
            assert_eq!(matched.map(|stop| &stops[stop]), expected_match.map(|stop| &stops[stop]));
            assert_eq!(matched, expected_match, "{stops:?}");
            assert_eq!(seen.clone() + stream.released(), expected, "seed {seed}, {stops:?}");
            check_finish(&stream, &seen, &naive_text(&pushed, true), (&stops, no_stop_trim));
            if random.random_bool(0.4) {
                let offset = stream.drain_into(&mut seen);
                assert!(offset <= stream.delivered());
                assert_eq!(stream.delivered(), seen.chars().count() as u64);
            }
        }
    }
}

fn check_finish(stream: &Stream, seen: &str, text: &str, (stops, trim): (&[String], bool)) {
    let mut stream = stream.clone();
    let matched = stream.finish();
    let (stop, expected) = match naive_stop(text, stops, trim) {
        Some((stop, text)) => (Some(stop), text),
        None => (None, text.to_owned()),
    };
    assert_eq!(matched, stop);
    assert_eq!(seen.to_owned() + &drain(&mut stream), expected);
}

#[test]
fn every_chunking_gives_the_same_text_and_stop() {
    for seed in 0..150 {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let length = random.random_range(1..=5);
        let text: String =
            (0..length).map(|_| *["a", "b", "ab", "é"].choose(&mut random).unwrap()).collect();
        let text = text.as_bytes();
        let mut spans: Vec<Vec<u8>> = Vec::new();
        for start in 0..text.len() {
            spans.extend((start + 1..=text.len()).map(|end| text[start..end].to_vec()));
        }
        spans.sort();
        spans.dedup();
        let decoder = byte_level(&spans);
        let stops: Vec<String> = (0..3)
            .map(|_| {
                (0..random.random_range(1..=3))
                    .map(|_| *["a", "b", "é"].choose(&mut random).unwrap())
                    .collect()
            })
            .collect();
        let options = StreamOptions {
            skip_special_tokens: true,
            no_stop_trim: seed % 2 == 0,
            stops: Some(stop_strings(stops.iter().cloned())),
        };
        let whole = naive_text(text, true);
        let expected = naive_stop(&whole, &stops, options.no_stop_trim)
            .map_or((None, whole), |(stop, text)| (Some(stop), text));
        for cuts in 0..1_usize << (text.len() - 1) {
            let ids = chunks(text, cuts).map(|chunk| spans.binary_search(&chunk).unwrap() as u32);
            let mut stream = Stream::new(Arc::clone(&decoder), options.clone());
            let mut joined = String::new();
            for id in ids {
                stream.push(id);
                joined += &drain(&mut stream);
            }
            let matched = stream.finish();
            joined += &drain(&mut stream);
            assert_eq!((matched, joined), expected, "{stops:?}, cuts {cuts:b}");
        }
    }
}

/// The text cut after byte i where bit i of `cuts` is set.
fn chunks(text: &[u8], cuts: usize) -> impl Iterator<Item = Vec<u8>> {
    let mut start = 0;
    (0..text.len()).filter_map(move |at| {
        let is_end = at + 1 == text.len() || cuts >> at & 1 == 1;
        is_end.then(|| text[std::mem::replace(&mut start, at + 1)..=at].to_vec())
    })
}

#[test]
fn complete_characters_never_become_replacements() {
    for (index, decoder) in [bytes(), fallback_bytes()].iter().enumerate() {
        for seed in 0..STREAMS / 8 {
            let mut random = ChaCha8Rng::seed_from_u64(seed);
            let text: String = (0..9).map(|_| *PIECES[..8].choose(&mut random).unwrap()).collect();
            let mut stream = Stream::new(Arc::clone(decoder), StreamOptions::default());
            let mut joined = String::new();
            for byte in text.bytes() {
                stream.push(u32::from(byte));
                let piece = drain(&mut stream);
                assert!(!piece.contains('\u{FFFD}'));
                joined += &piece;
            }
            assert_eq!(stream.finish(), None);
            assert_eq!(stream.released(), "");
            let expected = if index == 0 { &text } else { text.strip_prefix(' ').unwrap_or(&text) };
            assert_eq!(&joined, expected);
        }
    }
}

/// Text of `prompt + output`, without the text of the prompt up to its last complete character.
fn primed(decoder: &Arc<Decoder>, prompt: &[u8], output: &[u8]) -> String {
    let mut stream = Stream::new(Arc::clone(decoder), StreamOptions::default());
    let ids: Vec<u32> = prompt.iter().map(|&byte| u32::from(byte)).collect();
    stream.prime(&ids);
    for &byte in output {
        stream.push(u32::from(byte));
    }
    stream.finish();
    drain(&mut stream)
}

#[test]
fn output_continues_any_prompt() {
    for decoder in [bytes(), fallback_bytes()] {
        for seed in 0..STREAMS {
            let mut random = ChaCha8Rng::seed_from_u64(seed);
            let text = random_bytes(&mut random, seed % 2 == 0);
            if text.windows(3).any(|bytes| bytes == "\u{FFFD}".as_bytes()) {
                continue; // it looks like a part of the prompt that is not a character
            }
            let (prompt, output) = text.split_at(random.random_range(0..=text.len()));
            let whole = primed(&decoder, b"", &text);
            let before = primed(&decoder, b"", prompt);
            // A character begun in the prompt belongs to the output only if the output completes it.
            let expected = match whole.strip_prefix(&before) {
                Some(rest) => rest,
                None => &whole[before.len() - '\u{FFFD}'.len_utf8()..],
            };
            assert_eq!(primed(&decoder, prompt, output), expected, "{prompt:?} {output:?}");
        }
    }
}

#[test]
fn a_resumed_stream_goes_on_as_the_first_would_have() {
    for seed in 0..STREAMS / 4 {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let text = random_bytes(&mut random, seed % 2 == 0);
        let tokens = random_tokens(&mut random, &text);
        let stops = Some(stop_strings(random_stops(&mut random)));
        let options = StreamOptions { stops, ..StreamOptions::default() };
        let ids: Vec<u32> = (0..tokens.len() as u32).collect();
        let (before, after) = ids.split_at(random.random_range(0..=ids.len()));
        let decoder = byte_level(&tokens);
        let mut first = Stream::new(Arc::clone(&decoder), options.clone());
        for (index, &id) in before.iter().enumerate() {
            first.push(id);
            if index + 1 < before.len() {
                drain(&mut first);
            }
        }
        let mut second = Stream::new(decoder, options);
        second.resume(before, first.delivered());
        for &id in after {
            assert_eq!(first.push(id), second.push(id));
        }
        assert_eq!(first.delivered(), second.delivered());
        assert_eq!(first.finish(), second.finish());
        assert_eq!(drain(&mut first), drain(&mut second));
    }
}

#[test]
fn nothing_pushed_in_any_order_panics() {
    const TOKENS: [u32; 6] = [0x61, 0x61, 0x62, 0xE6, 0x97, 0xA5];
    for seed in 0..STREAMS / 4 {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let options = StreamOptions {
            skip_special_tokens: random.random_bool(0.5),
            no_stop_trim: random.random_bool(0.5),
            stops: Some(stop_strings(random_stops(&mut random))),
        };
        let decoder = if seed % 2 == 0 { bytes() } else { fallback_bytes() };
        let mut stream = Stream::new(decoder, options);
        let mut joined = String::new();
        for _ in 0..60 {
            match random.random_range(0..20) {
                0 => _ = stream.finish(),
                1 => stream.prime(&[random.random_range(0..300), 0xE2]),
                2 => _ = stream.resume(&[0x61, 0xE6, 0x97], random.random_range(0..4)),
                3 => _ = stream.push(u32::MAX),
                4..8 => _ = stream.drain_into(&mut joined),
                _ => _ = stream.push(*TOKENS.choose(&mut random).unwrap()),
            }
        }
    }
}
