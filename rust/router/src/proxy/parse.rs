//! What the choice needs of a request's body, found without copying or decoding it.

use std::borrow::Cow;
use std::fmt;

use memchr::memchr_iter;
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::config::Config;
use crate::core::{BlockShape, Prompt};

/// What is known of a request.
#[derive(Debug, Default)]
pub(super) struct Asked {
    pub(super) prompt: Prompt,
    /// The session's name as it stands in the body, quotes included.
    pub(super) session: Option<Vec<u8>>,
}

impl Asked {
    /// Reads a body. One that is not a JSON object has no prompt: the worker says what is wrong.
    pub(super) fn of(body: &[u8], config: &Config) -> Self {
        let Ok(found) = serde_json::from_slice::<Found<'_>>(body) else {
            return Self { prompt: Prompt::of_length(0), session: None };
        };
        let text = found.prompt();
        let num_tokens = found.num_tokens(&text, config.bytes_per_token);
        let per_block = config.block_bytes as f64 * num_tokens as f64 / text.len().max(1) as f64;
        let shape =
            BlockShape { bytes: config.block_bytes, tokens: per_block.round().max(1.0) as u32 };
        let prompt = Prompt::new(&text, num_tokens, shape, &found.namespace());
        Self { prompt, session: found.session.map(|raw| raw.get().as_bytes().to_vec()) }
    }
}

/// Values as they stand in the body. The last of equal keys counts, as in most parsers.
#[derive(Default)]
struct Found<'a> {
    /// `messages`, `prompt`, `text`, `input_ids` or `input`.
    prompt: Option<&'a RawValue>,
    /// What templates put before the messages: `tools`, `system`, `instructions`.
    before: [Option<&'a RawValue>; 3],
    /// `model`, `lora_path`, `cache_salt`, `extra_key`.
    namespace: [Option<&'a RawValue>; 4],
    session: Option<&'a RawValue>,
}

enum Key {
    Prompt,
    Before(usize),
    Namespace(usize),
    Session,
    Other,
}

impl<'a> Found<'a> {
    fn prompt(&self) -> Cow<'a, [u8]> {
        let bytes = |raw: &'a RawValue| raw.get().as_bytes();
        let prompt = self.prompt.map_or(&b""[..], bytes);
        if self.before.iter().all(Option::is_none) {
            return Cow::Borrowed(prompt);
        }
        let before = self.before.iter().flatten().flat_map(|raw| bytes(raw));
        Cow::Owned(before.chain(prompt).copied().collect())
    }

    /// Ids are counted, text is estimated.
    fn num_tokens(&self, text: &[u8], bytes_per_token: f64) -> u64 {
        let is_ids = |raw: &RawValue| {
            let mut head =
                raw.get().bytes().filter(|byte| !byte.is_ascii_whitespace() && *byte != b'[');
            raw.get().starts_with('[') && head.next().is_some_and(|byte| byte.is_ascii_digit())
        };
        if self.prompt.is_some_and(is_ids) {
            return memchr_iter(b',', text).count() as u64 + 1;
        }
        (text.len() as f64 / bytes_per_token).ceil() as u64
    }

    fn namespace(&self) -> Vec<u8> {
        let mut namespace = Vec::new();
        for raw in &self.namespace {
            namespace.extend_from_slice(raw.map_or(&b""[..], |raw| raw.get().as_bytes()));
            namespace.push(0);
        }
        namespace
    }

    fn set(&mut self, key: &Key, value: &'a RawValue) {
        let value = Some(value).filter(|raw| raw.get() != "null");
        match key {
            Key::Prompt => self.prompt = value.or(self.prompt),
            Key::Before(place) => self.before[*place] = value,
            Key::Namespace(place) => self.namespace[*place] = value,
            Key::Session => self.session = value.or(self.session),
            Key::Other => {}
        }
    }
}

impl<'de> Deserialize<'de> for Key {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Name;
        impl Visitor<'_> for Name {
            type Value = Key;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a key")
            }

            fn visit_str<E>(self, name: &str) -> Result<Key, E> {
                Ok(match name {
                    "messages" | "prompt" | "text" | "input_ids" | "input" => Key::Prompt,
                    "tools" => Key::Before(0),
                    "system" => Key::Before(1),
                    "instructions" => Key::Before(2),
                    "model" => Key::Namespace(0),
                    "lora_path" => Key::Namespace(1),
                    "cache_salt" => Key::Namespace(2),
                    "extra_key" => Key::Namespace(3),
                    "session_id" | "routing_key" | "prompt_cache_key" | "user" => Key::Session,
                    _ => Key::Other,
                })
            }
        }
        deserializer.deserialize_str(Name)
    }
}

impl<'de> Deserialize<'de> for Found<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Object;
        impl<'de> Visitor<'de> for Object {
            type Value = Found<'de>;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Found<'de>, A::Error> {
                let mut found = Found::default();
                while let Some(key) = map.next_key::<Key>()? {
                    match key {
                        Key::Other => drop(map.next_value::<IgnoredAny>()?),
                        _ => found.set(&key, map.next_value()?),
                    }
                }
                Ok(found)
            }
        }
        deserializer.deserialize_map(Object)
    }
}

#[cfg(test)]
mod tests {
    use super::super::state::tests::config;
    use super::*;

    fn asked(body: &str) -> Asked {
        Asked::of(body.as_bytes(), &config())
    }

    fn shared_blocks(one: &str, two: &str) -> usize {
        let (one, two) = (asked(one).prompt, asked(two).prompt);
        one.hashes().iter().zip(two.hashes()).take_while(|(one, two)| one == two).count()
    }

    #[test]
    fn a_longer_conversation_continues_the_shorter_one() {
        let turn = |text: &str| format!(r#"{{"role":"user","content":"{}"}}"#, text.repeat(300));
        let one = format!(r#"{{"messages":[{}],"stream":true}}"#, turn("a"));
        let two = format!(
            r#"{{"temperature":0, "messages": [{},{}], "model":null}}"#,
            turn("a"),
            turn("b")
        );
        assert_eq!(shared_blocks(&one, &two), 2);
        let three = two.replace("null", "\"other\"");
        assert_eq!(shared_blocks(&one, &three), 0);
    }

    #[test]
    fn tokens_are_counted_or_estimated() {
        assert_eq!(asked(r#"{"text":"12345678"}"#).prompt.num_tokens(), 3); // with its quotes
        assert_eq!(asked(r#"{"input_ids":[1, 22,333]}"#).prompt.num_tokens(), 3);
        assert_eq!(asked(r#"{"prompt":[[1,2],[3]]}"#).prompt.num_tokens(), 3);
        assert_eq!(asked(r#"{"prompt":["1,2"]}"#).prompt.num_tokens(), 2);
    }

    #[test]
    fn what_templates_put_first_is_part_of_the_prompt() {
        let long = "x".repeat(400);
        let one = format!(r#"{{"system":"{long}","messages":[1]}}"#);
        let two = format!(r#"{{"messages":[2],"system":"{long}"}}"#);
        assert_eq!(shared_blocks(&one, &two), 3);
    }

    #[test]
    fn what_is_no_object_has_no_prompt() {
        for body in ["", "[1]", "{\"text\":", "\u{0}", r#"{"text":"a"} x"#] {
            assert_eq!(asked(body).prompt, Prompt::of_length(0), "{body}");
        }
        let deep = format!(r#"{{"x":{}{},"text":"abcd"}}"#, "[".repeat(50_000), "]".repeat(50_000));
        assert_eq!(asked(&deep).prompt.num_tokens(), 2);
    }

    #[test]
    fn sessions_and_repeated_keys() {
        let found = asked(r#"{"text":"a","te\u0078t":"abcdabcd","user":"u","session_id":null}"#);
        assert_eq!(found.session.as_deref(), Some(&b"\"u\""[..]));
        assert_eq!(found.prompt.num_tokens(), 3);
    }
}
