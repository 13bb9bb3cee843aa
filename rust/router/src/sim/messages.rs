//! What client and runner say to the production scheduler, and what it answers.
//!
//! The layouts are those of `python/engine/messages.py` and `docs/plan.md`.

use std::fmt;

use serde::de::{IgnoredAny, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use super::step_time::Work;
use super::trace::PROMPT_IDS;

/// `SamplingParams`: greedy, ended by length alone.
#[derive(Serialize)]
struct Sampling {
    temperature: f32,
    top_p: f32,
    top_k: u32,
    min_p: f32,
    frequency_penalty: f32,
    presence_penalty: f32,
    repetition_penalty: f32,
    max_new_tokens: Option<u32>,
    min_new_tokens: u32,
    stop: [&'static str; 0],
    stop_token_ids: [u32; 0],
    ignore_eos: bool,
    skip_special_tokens: bool,
    no_stop_trim: bool,
    seed: u64,
    logit_bias: [(u32, f32); 0],
    stop_regex: [&'static str; 0],
}

/// `Submit`.
#[derive(Serialize)]
struct Submit<'a> {
    key: u64,
    rid: String,
    prompt: &'a [u32],
    sampling: Sampling,
    n: u32,
    stream_interval: u32,
    priority: i64,
    namespace: &'static str,
    request_class: u8,
    logprobs: Option<()>,
    pooled: bool,
    resume: [(); 0],
    must_prepare: bool,
    grammar: Option<()>,
}

/// The message that submits a prompt.
pub(super) fn submit(key: u64, prompt: &[u32], max_new_tokens: u32) -> Vec<u8> {
    let sampling = Sampling {
        temperature: 0.0,
        top_p: 1.0,
        top_k: 0,
        min_p: 0.0,
        frequency_penalty: 0.0,
        presence_penalty: 0.0,
        repetition_penalty: 1.0,
        max_new_tokens: Some(max_new_tokens),
        min_new_tokens: 0,
        stop: [],
        stop_token_ids: [],
        ignore_eos: true,
        skip_special_tokens: true,
        no_stop_trim: false,
        seed: key,
        logit_bias: [],
        stop_regex: [],
    };
    let submit = Submit {
        key,
        rid: key.to_string(),
        prompt,
        sampling,
        n: 1,
        stream_interval: u32::MAX, // the first token and the last are all that is looked at
        priority: 0,
        namespace: "",
        request_class: 0,
        logprobs: None,
        pooled: false,
        resume: [],
        must_prepare: false,
        grammar: None,
    };
    rmp_serde::to_vec(&submit).expect("broken invariant: these types are msgpack's")
}

/// An event, as far as it matters here.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Event {
    /// The first token is there.
    Started {
        /// The request.
        key: u64,
        /// Prompt tokens that came from the cache.
        cached_tokens: u64,
    },
    /// The request has ended, or never began.
    Ended {
        /// The request.
        key: u64,
        /// Whether with all that it asked for.
        complete: bool,
    },
    /// Anything else.
    Other,
}

/// Reads what `take_events` gave for one client.
pub(super) fn events(bytes: &[u8]) -> Vec<Event> {
    rmp_serde::from_slice(bytes).expect("broken invariant: the scheduler writes events")
}

impl<'de> Deserialize<'de> for Event {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(EventVisitor)
    }
}

struct EventVisitor;

impl<'de> Visitor<'de> for EventVisitor {
    type Value = Event;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an event of engine/messages.py")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut fields: A) -> Result<Event, A::Error> {
        fn next<'de, T: Deserialize<'de>, A: SeqAccess<'de>>(
            fields: &mut A,
        ) -> Result<T, A::Error> {
            fields.next_element()?.ok_or_else(|| serde::de::Error::custom("the event is cut"))
        }
        let (tag, key): (u8, u64) = (next(&mut fields)?, next(&mut fields)?);
        let event = match tag {
            2 => Event::Ended { key, complete: false },
            3 => {
                let _sample: u32 = next(&mut fields)?;
                Event::Started { key, cached_tokens: next(&mut fields)? }
            }
            5 => {
                // Sample, token offset, ids, text offset, text, two kinds of log-probs.
                for _ in 0..7 {
                    let _: IgnoredAny = next(&mut fields)?;
                }
                let reason: &str = next(&mut fields)?;
                Event::Ended { key, complete: reason == "length" }
            }
            _ => Event::Other,
        };
        while fields.next_element::<IgnoredAny>()?.is_some() {}
        Ok(event)
    }
}

/// Sections of a plan that tell how much it computes.
const ROW_QUERY_LEN: usize = 13;
const ROW_COMPUTED_LEN: usize = 14;
const SAMPLE_LOGIT: usize = 25;

fn word(block: &[u8], index: usize) -> u64 {
    let bytes = &block[8 * index..8 * index + 8];
    u64::from_le_bytes(bytes.try_into().expect("eight bytes"))
}

fn section(plan: &[u8], index: usize) -> &[[u8; 4]] {
    let (offset, count) = (word(plan, 8 + 2 * index) as usize, word(plan, 9 + 2 * index) as usize);
    plan[offset..offset + 4 * count].as_chunks().0
}

/// How much a plan computes, and how many tokens it samples.
pub(super) fn read_plan(plan: &[u8]) -> (Work, usize) {
    let mut work = Work::default();
    let rows = section(plan, ROW_QUERY_LEN).iter().zip(section(plan, ROW_COMPUTED_LEN));
    for (query_len, computed_len) in rows {
        let [query_len, computed_len] =
            [query_len, computed_len].map(|bytes| u64::from(u32::from_le_bytes(*bytes)));
        work.add_row(query_len, computed_len);
    }
    (work, section(plan, SAMPLE_LOGIT).len())
}

/// The result of a step whose samples yield one new token each, like no other token so far.
pub(super) fn result(step: u64, num_samples: usize, next_id: &mut u32, block: &mut Vec<u8>) {
    const HEADER_BYTES: usize = 256;
    let ids_at = (HEADER_BYTES + 4 * num_samples).next_multiple_of(8);
    let total = ids_at + 4 * num_samples;
    block.clear();
    block.resize(HEADER_BYTES, 0);
    let mut put = |index: usize, value: u64| {
        block[8 * index..8 * index + 8].copy_from_slice(&value.to_le_bytes());
    };
    put(0, u64::from_le_bytes(*b"TRNKRSLT"));
    put(1, 1);
    put(2, step);
    put(4, total as u64);
    for (section, offset) in [(0, HEADER_BYTES), (1, ids_at)] {
        put(8 + 2 * section, offset as u64);
        put(9 + 2 * section, num_samples as u64);
    }
    block.extend(std::iter::repeat_n(1_i32.to_le_bytes(), num_samples).flatten());
    block.resize(ids_at, 0);
    for _ in 0..num_samples {
        block.extend((PROMPT_IDS + *next_id).to_le_bytes());
        *next_id = (*next_id + 1) % (PROMPT_IDS - 1);
    }
}
