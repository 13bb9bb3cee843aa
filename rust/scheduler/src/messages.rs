//! `Submit`, decoded from the positional msgpack that `python/engine/messages.py` writes.
//!
//! Only the shape is checked here; `validation.rs` checks the values.

use rmp_serde::Deserializer;
use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::error::Result;

/// How a request's tokens are chosen.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct SamplingParams {
    pub(crate) temperature: f32,
    pub(crate) top_p: f32,
    pub(crate) top_k: u32,
    pub(crate) min_p: f32,
    pub(crate) frequency_penalty: f32,
    pub(crate) presence_penalty: f32,
    pub(crate) repetition_penalty: f32,
    pub(crate) max_new_tokens: Option<u64>,
    pub(crate) min_new_tokens: u64,
    pub(crate) stop: Vec<String>,
    pub(crate) stop_token_ids: Vec<u32>,
    pub(crate) ignore_eos: bool,
    pub(crate) skip_special_tokens: bool,
    pub(crate) no_stop_trim: bool,
    pub(crate) seed: u64,
    pub(crate) logit_bias: Vec<(u32, f32)>,
    pub(crate) stop_regex: Vec<String>,
}

/// Which log-probs a request wants.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct LogprobRequest {
    pub(crate) prompt_start: Option<u64>,
    pub(crate) top_n: u32,
    pub(crate) ids: Vec<u32>,
    /// Of the distribution that the token was drawn from, not of the model's own.
    pub(crate) processed: bool,
}

/// What a sample has already when its request is submitted again.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Resume {
    pub(crate) output_ids: Vec<u32>,
    pub(crate) delivered_chars: u64,
}

/// One request, as its client sent it.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Submit {
    pub(crate) key: u64,
    pub(crate) rid: String,
    pub(crate) prompt: Vec<u32>,
    pub(crate) sampling: SamplingParams,
    pub(crate) n: u64,
    pub(crate) stream_interval: u32,
    pub(crate) priority: i64,
    pub(crate) namespace: String,
    pub(crate) request_class: u8,
    pub(crate) logprobs: Option<LogprobRequest>,
    /// Wants the pooled state: the final hidden state of the prompt's last token.
    pub(crate) pooled: bool,
    pub(crate) resume: Vec<Resume>,
    pub(crate) must_prepare: bool,
    /// What the output must be: its caller's to read. Here it only matters that there is one.
    pub(crate) grammar: Option<IgnoredAny>,
}

impl Submit {
    /// Decodes one message, which must end where `bytes` ends.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self> {
        let mut deserializer = Deserializer::new(bytes);
        let submit = Self::deserialize(&mut deserializer)?;
        if deserializer.get_ref().is_empty() {
            Ok(submit)
        } else {
            Err(rmp_serde::decode::Error::Syntax("bytes follow the message".into()).into())
        }
    }
}
