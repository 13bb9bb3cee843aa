//! Taking a step's result: new tokens, stops, memory, events.

use std::ops::Range;

use crate::error::{Error, Result};
use crate::request::Params;
use crate::result::StepResult;
use crate::sequence::{Phase, SequenceId};
use crate::state::State;
use crate::step::{Step, StepRow};
use crate::wire::{Finish, Reason, Started};

/// HTTP status of a request whose row failed.
const ROW_FAILED_STATUS: u16 = 500;

/// Takes the result of the oldest step in flight, and returns that step's record.
///
/// # Errors
///
/// If the block is malformed or of another step; nothing has changed then.
pub(crate) fn commit(state: &mut State, now: f64, block: &[u8]) -> Result<Step> {
    let step = state.in_flight.front().ok_or(Error::NoStepInFlight)?;
    let result = StepResult::parse(block, &step.expected)?;
    check_rows(step, &result)?;
    let step = state.in_flight.pop_front().ok_or(Error::NoStepInFlight)?;
    state.pace.committed(now, step.paced);
    let retracted_before = state.counters.retracted;
    let mut next_token = 0;
    for (index, row) in step.rows.iter().enumerate() {
        let tokens = next_token..next_token + row.num_tokens(&result);
        next_token = tokens.end;
        Commit { state, result: &result, row, index, now }.row(tokens);
    }
    for &(node, _) in &step.donors {
        state.memory.unlock(node);
    }
    state.memory.step_committed(step.id);
    state.sweep();
    if state.counters.retracted > retracted_before {
        let left = state.load();
        state.estimate.retracted(&left);
    }
    Ok(step)
}

/// A row that was cut short cannot have led to a token.
fn check_rows(step: &Step, result: &StepResult) -> Result<()> {
    for (index, row) in step.rows.iter().enumerate() {
        let computed = result.row_computed(index, row.query_len).ok_or_else(|| {
            Error::Result(format!("row {index} has {} tokens; row_computed differs", row.query_len))
        })?;
        let failed = result.row_error(index).is_some();
        if computed < row.query_len && !failed && row.num_tokens(result) > 0 {
            return Err(Error::Result(format!(
                "row {index} computed {computed} of {} tokens, yet has a sampled one",
                row.query_len
            )));
        }
    }
    Ok(())
}

impl StepRow {
    fn num_tokens(&self, result: &StepResult) -> usize {
        self.sample.map_or(0, |sample| result.sample_count(sample as usize))
    }

    /// The best tokens and the requested ids, with their log-probs, at one of the row's logit
    /// positions: those of prompt scores come first, then that of the sample.
    fn alternatives<'a>(
        &self,
        result: &'a StepResult<'_>,
        params: &'a Params,
        logit: u32,
    ) -> (impl Iterator<Item = (u32, f32)> + 'a, impl Iterator<Item = (u32, f32)> + 'a) {
        let ids = params.scored_ids();
        let first_top = (self.first_top + logit * params.top_n()) as usize;
        let top = (first_top..first_top + params.top_n() as usize).map(|index| result.top(index));
        let own = u32::from(logit < self.num_prompt_scores);
        let first_id = self.first_score + logit * (1 + ids.len() as u32) + own;
        let scores = (first_id as usize..).map(|index| result.score(index));
        (top, ids.iter().copied().zip(scores))
    }
}

/// The result of one row, being taken.
struct Commit<'a> {
    state: &'a mut State,
    result: &'a StepResult<'a>,
    row: &'a StepRow,
    /// Of the row in its step.
    index: usize,
    now: f64,
}

impl Commit<'_> {
    /// Takes the row; `tokens` are those of the result that it led to.
    fn row(&mut self, tokens: Range<usize>) {
        let id = self.row.sequence;
        let sequence = &mut self.state.sequences[id];
        sequence.in_flight -= 1;
        if sequence.phase == Phase::Draining {
            if sequence.in_flight == 0 {
                self.state.release(id);
            }
            return;
        }
        if sequence.run == self.row.run {
            if let Some(error) = self.result.row_error(self.index) {
                // Its KV cannot be trusted: nothing of it stays in the cache but what was there.
                sequence.computed = 0;
                let finish = Finish::error(ROW_FAILED_STATUS, error.message());
                self.state.finish(id, &finish);
                return;
            }
            if let Some(reason) = self.advance(tokens) {
                self.state.finish(id, &Finish::normal(reason));
                return;
            }
        }
        self.settle(id);
    }

    /// Moves the sequence on by what the row computed. Returns why that ends it, if it does.
    fn advance(&mut self, tokens: Range<usize>) -> Option<Reason> {
        let id = self.row.sequence;
        let computed = self.result.row_computed(self.index, self.row.query_len).unwrap_or_default();
        self.count_computed(computed);
        let end = self.row.start + computed;
        self.take_prompt_scores(computed);
        let expected_tokens = u32::from(self.row.sample.is_some());
        let num_tokens = tokens.len() as u32;
        let sequence = &mut self.state.sequences[id];
        if let Some(index) = self.row.pooled
            && computed == self.row.query_len
        {
            let bytes = self.result.pooled_state(index as usize);
            sequence.output.pooled_state = Some(bytes.into());
        }
        sequence.computed = end;
        sequence.sampled_in_flight -= expected_tokens;
        let was_started = sequence.output.started;
        let reason = self.append(tokens);
        let sequence = &mut self.state.sequences[id];
        // At least one token is left to compute: its logits lead to the next.
        let known = sequence.tokens.len() as u32;
        if num_tokens == 0 && self.row.sample.is_some() {
            sequence.computed = end.min(known - 1);
        }
        if computed < self.row.query_len || num_tokens != expected_tokens {
            self.diverge();
        }
        let sequence = &self.state.sequences[id];
        let prompt_only = sequence.bounds.limit == sequence.bounds.prompt_len;
        let reason = match reason {
            None if prompt_only && sequence.computed == sequence.bounds.prompt_len => {
                Some(Reason::Length)
            }
            reason => reason,
        };
        if !was_started && (num_tokens > 0 || reason.is_some()) {
            self.start();
        }
        reason
    }

    /// Steps in flight were planned for another continuation: their rows are void.
    fn diverge(&mut self) {
        let sequence = &mut self.state.sequences[self.row.sequence];
        if sequence.in_flight > 0 {
            sequence.run += 1;
            // The runner has counted samples that are void.
            sequence.must_open = true;
        }
        sequence.planned = sequence.computed;
        sequence.sampled_in_flight = 0;
    }

    /// Appends tokens up to the first that ends the sequence.
    fn append(&mut self, tokens: Range<usize>) -> Option<Reason> {
        let sequence = &mut self.state.sequences[self.row.sequence];
        let params = &sequence.params;
        let first = tokens.start;
        for index in tokens {
            let token = self.result.token(index);
            sequence.tokens.push(token);
            self.state.counters.generated_tokens += 1;
            if sequence.bounds.logprobs {
                let value = self.result.sampled_logprob(index);
                if index == first {
                    let (top, ids) =
                        self.row.alternatives(self.result, params, self.row.num_prompt_scores);
                    sequence.output.push_logprobs(params, value, top, ids);
                } else {
                    // Alternatives are those of a logit position, and the tokens of one share it.
                    let none = || std::iter::empty();
                    sequence.output.push_logprobs(params, value, none(), none());
                }
            }
            let num_outputs = sequence.tokens.len() as u32 - sequence.bounds.prompt_len;
            let reason = sequence.output.push(params, &sequence.bounds, token, num_outputs);
            if reason.is_some() {
                return reason;
            }
        }
        None
    }

    /// Takes the log-probs of the prompt tokens that follow what the row computed.
    fn take_prompt_scores(&mut self, computed: u32) {
        let row = self.row;
        if row.num_prompt_scores == 0 {
            return;
        }
        let sequence = &mut self.state.sequences[row.sequence];
        let params = &sequence.params;
        for logit in 0..row.num_prompt_scores {
            let position = row.first_prompt_score + logit;
            let known = position <= row.start + computed;
            if known && sequence.output.next_prompt_score(params) == Some(position) {
                let own = row.first_score + logit * (1 + params.scored_ids().len() as u32);
                let value = self.result.score(own as usize);
                let (top, ids) = row.alternatives(self.result, params, logit);
                sequence.output.push_prompt_logprobs(params, value, top, ids);
            }
        }
    }

    /// Tells the client that the sample has its first token.
    fn start(&mut self) {
        let sequence = &mut self.state.sequences[self.row.sequence];
        sequence.output.started = true;
        let timing = &sequence.timing;
        let started = Started {
            sample: sequence.sample,
            cached_tokens: timing.cached_tokens,
            forward_entry_time: timing.forward_entry_time,
            prefill_finished_time: self.now,
            queue_time: timing.queue_time,
        };
        self.state.events.started(sequence.to, &started);
    }

    /// Counts known tokens that were computed.
    fn count_computed(&mut self, computed: u32) {
        let sequence = &self.state.sequences[self.row.sequence];
        let start = self.row.start;
        if start >= sequence.fill_target {
            return;
        }
        let end = (start + computed).min(sequence.fill_target);
        let new_until = match sequence.timing.num_retractions {
            0 => sequence.bounds.prompt_len.clamp(start, end),
            _ => start,
        };
        self.state.counters.prompt_tokens += u64::from(new_until - start);
        self.state.counters.recomputed_tokens += u64::from(end - new_until);
    }

    /// What follows from a row whose sequence goes on: sharing, deltas, and what was to happen to it
    /// once the step is committed.
    fn settle(&mut self, id: SequenceId) {
        let sequence = &mut self.state.sequences[id];
        if let Some(finish) = sequence.ending.take() {
            self.state.finish(id, &finish);
            return;
        }
        if self.row.start < sequence.fill_target {
            self.share(id);
        }
        let sequence = &self.state.sequences[id];
        if sequence.output.is_due(&sequence.bounds, sequence.num_outputs()) {
            self.state.deliver(id);
        }
        let sequence = &self.state.sequences[id];
        if sequence.retract && sequence.in_flight == 0 {
            self.state.retract(id, self.now);
        }
    }

    /// Puts what was computed of the known tokens into the cache, for those that wait for it.
    fn share(&mut self, id: SequenceId) {
        let state = &mut *self.state;
        let sequence = &mut state.sequences[id];
        let tokens = &sequence.tokens[..sequence.computed as usize];
        state.memory.publish(sequence.namespace, &mut sequence.kv, tokens, state.last_step);
        if !sequence.leads {
            return;
        }
        if sequence.computed >= sequence.fill_target {
            state.stop_leading(id);
            return;
        }
        for follower in state.sharing.wake(id, sequence.computed) {
            state.enqueue(follower);
        }
    }
}
