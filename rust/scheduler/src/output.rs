//! What a sequence has produced and its client has not been told: text, log-probs, stops.

use std::sync::Arc;

use text::{Decoder, Stream, StreamOptions};

use crate::request::{Bounds, Params};
use crate::wire::{self, Logprobs, Reason};

/// Output side of one sequence.
#[derive(Debug)]
pub(crate) struct Output {
    /// `None` without a tokenizer.
    stream: Option<Stream>,
    /// Outputs that the client has.
    delivered_tokens: u32,
    /// Log-probs of outputs that the client does not have.
    logprobs: Option<Box<Logprobs>>,
    /// Log-probs of the prompt, until the first event that carries them.
    prompt_logprobs: Option<Box<Logprobs>>,
    num_prompt_scores: u32,
    /// The bytes of the pooled state, once it is known.
    pub(crate) pooled_state: Option<Box<[u8]>>,
    pub(crate) started: bool,
}

impl Output {
    pub(crate) fn new(params: &Params, decoder: Option<&Arc<Decoder>>) -> Self {
        let stream = decoder.map(|decoder| {
            let options = StreamOptions {
                skip_special_tokens: params.sampling.skip_special_tokens,
                no_stop_trim: params.sampling.no_stop_trim,
                stops: None,
            };
            let mut stream = Stream::new(Arc::clone(decoder), options);
            stream.prime(&params.prompt);
            if params.bounds.min_new_tokens <= 1 {
                stream.set_stops(params.stops.clone());
            }
            stream
        });
        let logprobs = params.logprobs.is_some().then(Box::default);
        let prompt_logprobs = params.prompt_scores_from().map(|start| {
            let mut logprobs = Box::<Logprobs>::default();
            if start == 0 {
                // Nothing precedes the first token of a prompt.
                logprobs.push(params, f32::NAN, std::iter::empty(), std::iter::empty());
            }
            logprobs
        });
        let num_prompt_scores = u32::from(params.prompt_scores_from() == Some(0));
        Self {
            stream,
            delivered_tokens: 0,
            logprobs,
            prompt_logprobs,
            num_prompt_scores,
            pooled_state: None,
            started: false,
        }
    }

    /// Takes outputs that the client has already, with so many characters of their text.
    ///
    /// Returns why the sequence is over, if it is.
    pub(crate) fn resume(
        &mut self,
        params: &Params,
        outputs: &[u32],
        delivered_chars: u64,
    ) -> Option<Reason> {
        let mut ended = None;
        for (index, &token) in (1..).zip(outputs) {
            ended = self.push(params, &params.bounds, token, index);
            if ended.is_some() {
                break;
            }
        }
        if let Some(stream) = &mut self.stream {
            stream.resume(&[], delivered_chars);
        }
        self.delivered_tokens = outputs.len() as u32;
        ended
    }

    /// Takes a sequence's next output, the `num_outputs`th, and returns why it ends the sequence, if
    /// it does: by its id, by a stop that its text completes, or by length, in this order.
    pub(crate) fn push(
        &mut self,
        params: &Params,
        bounds: &Bounds,
        token: u32,
        num_outputs: u32,
    ) -> Option<Reason> {
        let stop_id = bounds.may_stop(token)
            && (num_outputs > bounds.min_new_tokens || params.ends_grammar(token))
            && params.stop_ids.binary_search(&token).is_ok();
        if let Some(stream) = &mut self.stream
            && (!stop_id || params.sampling.no_stop_trim)
        {
            let matched = stream.push(token);
            if let (Some(index), false) = (matched, stop_id) {
                let stops = params.stops.as_ref();
                let matched = stops.and_then(|stops| stops.get(index)).unwrap_or_default();
                return Some(Reason::StopText(matched.to_owned()));
            }
            if num_outputs + 1 == bounds.min_new_tokens {
                stream.set_stops(params.stops.clone());
            }
        }
        if stop_id {
            return Some(Reason::StopToken(token));
        }
        (bounds.prompt_len + num_outputs >= bounds.limit).then_some(Reason::Length)
    }

    /// Log-probs of the output pushed next or last.
    pub(crate) fn push_logprobs(
        &mut self,
        params: &Params,
        value: f32,
        top: impl Iterator<Item = (u32, f32)>,
        ids: impl Iterator<Item = (u32, f32)>,
    ) {
        if let Some(logprobs) = &mut self.logprobs {
            logprobs.push(params, value, top, ids);
        }
    }

    /// Log-probs of the next prompt position.
    pub(crate) fn push_prompt_logprobs(
        &mut self,
        params: &Params,
        value: f32,
        top: impl Iterator<Item = (u32, f32)>,
        ids: impl Iterator<Item = (u32, f32)>,
    ) {
        if let Some(logprobs) = &mut self.prompt_logprobs {
            logprobs.push(params, value, top, ids);
            self.num_prompt_scores += 1;
        }
    }

    /// The first prompt position whose log-prob is wanted and not known.
    pub(crate) fn next_prompt_score(&self, params: &Params) -> Option<u32> {
        let position = params.prompt_scores_from()? + self.num_prompt_scores;
        (position < params.bounds.prompt_len).then_some(position)
    }

    /// Whether so many outputs are worth a delta now: the first at once, then every interval.
    pub(crate) fn is_due(&self, bounds: &Bounds, num_outputs: u32) -> bool {
        let interval = bounds.stream_interval;
        let pending = num_outputs - self.delivered_tokens;
        interval > 0 && pending > 0 && (self.delivered_tokens == 0 || pending >= interval)
    }

    /// Hands everything undelivered to `write`; with `last`, also what is held back.
    pub(crate) fn deliver(
        &mut self,
        sample: u32,
        outputs: &[u32],
        last: bool,
        scratch: &mut String,
        write: impl FnOnce(&wire::Output),
    ) {
        scratch.clear();
        let mut text_offset = 0;
        if let Some(stream) = &mut self.stream {
            if last {
                stream.finish();
            }
            text_offset = stream.drain_into(scratch);
        }
        let prompt_logprobs = self.prompt_logprobs.take();
        write(&wire::Output {
            sample,
            token_offset: self.delivered_tokens,
            token_ids: &outputs[self.delivered_tokens as usize..],
            text_offset,
            text: scratch,
            logprobs: self.logprobs.as_deref(),
            prompt_logprobs: prompt_logprobs.as_deref(),
            pooled_state: self.pooled_state.as_deref(),
        });
        self.delivered_tokens = outputs.len() as u32;
        if let Some(logprobs) = &mut self.logprobs {
            logprobs.clear();
        }
    }
}

impl Logprobs {
    fn push(
        &mut self,
        params: &Params,
        value: f32,
        top: impl Iterator<Item = (u32, f32)>,
        ids: impl Iterator<Item = (u32, f32)>,
    ) {
        self.values.push(value);
        if params.top_n() > 0 {
            self.top.push(top);
        }
        if !params.scored_ids().is_empty() {
            self.ids.push(ids);
        }
    }
}
