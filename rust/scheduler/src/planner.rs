//! What the next step computes.
//!
//! There are no phases: every sequence has known tokens, of which some are computed, and a step
//! computes more of them. Two bounds hold, whatever the load:
//!
//! * Every running sequence that lacks one token before its next output has a row in the step (if
//!   there is a page for it): rows for prompts come from what is left of the budget.
//! * At least one token in eight of the budget is left for prompts (`Config::max_running`), and the
//!   first prompt in order always gets it; where `Config::mixed_steps` makes steps in which sequences
//!   decode shorter than the others (`pace.rs`), that or `least_prompt_tokens` if these are fewer. A
//!   prompt passed over for `aging_steps` steps is first.

use crate::admission::{self, Admission, PageCopy};
use crate::estimate::Load;
use crate::pace::Crowd;
use crate::plan::{
    LOGIT_BYTES, OPENED_BYTES, Opened, PAGE_MOVE_BYTES, PAGE_WRITE_BYTES, PlanWriter, ROW_BYTES,
    Row, SAMPLE_BYTES, Sample, TOKEN_BYTES,
};
use crate::request::{INTERACTIVE, Params, Rank};
use crate::retraction::{Relief, Shortage};
use crate::sequence::{Sequence, SequenceId};
use crate::state::State;
use crate::step::{Step, StepRow};

/// Waiting sequences that may be found to share a running one's prefix in one plan: it keeps plans
/// short.
const MAX_FOLLOWS_PER_PLAN: u32 = 256;

/// Prompt tokens whose log-probs one step computes: each takes a row of logits, as wide as the
/// vocabulary.
const MAX_PROMPT_SCORES: u32 = 512;

/// Makes plans; holds only memory that is reused from step to step.
#[derive(Debug, Default)]
pub(crate) struct Planner {
    writer: PlanWriter,
    /// Sequences that lack one token.
    ready: Vec<SequenceId>,
    /// Running sequences that lack more, in the order in which they get them.
    partial: Vec<SequenceId>,
    /// Prompt tokens that the plan scores so far.
    num_prompt_scores: u32,
    spare_steps: Vec<Step>,
}

impl Planner {
    /// Decides on the next step and writes it to `arena`, which is large enough. `None` if nothing
    /// can be computed now.
    pub(crate) fn plan(&mut self, state: &mut State, now: f64, arena: &mut [u8]) -> Option<u64> {
        let id = state.last_step + 1;
        let mut step = self.spare_steps.pop().unwrap_or_default();
        step.reset(id, state.config.vocab_size);
        self.writer.clear();
        self.num_prompt_scores = 0;
        let (load, crowd) = self.sort_running(state);
        let shortage = self.give_pages(state, now);
        for index in 0..self.ready.len() {
            let sequence = self.ready[index];
            if self.fits(state, sequence) {
                self.emit(state, &mut step, sequence, 1);
            }
        }
        let decoding = self.writer.num_tokens() as u32;
        self.plan_prompts(state, &mut step, load, shortage.is_none(), now);
        let tokens = self.writer.num_tokens() as u32;
        step.paced = state.pace.paced(decoding, tokens, crowd);
        if self.writer.num_rows() == 0 {
            self.spare_steps.push(step);
            if state.running.is_empty() {
                state.estimate.idle();
            }
            return None;
        }
        for slot in state.slots.take_closed() {
            self.writer.close(slot);
        }
        if shortage.is_none() && !self.ready.is_empty() {
            state.estimate.step_went_well();
        }
        self.writer.write(id, state.memory.namespaces.epoch(), arena);
        step.expected.num_rows = self.writer.num_rows();
        step.expected.num_samples = self.writer.num_samples();
        step.expected.num_scores = self.writer.num_scores();
        state.in_flight.push_back(step);
        state.last_step = id;
        state.counters.steps += 1;
        Some(id)
    }

    /// Takes back the record of a committed step.
    pub(crate) fn recycle(&mut self, step: Step) {
        self.spare_steps.push(step);
    }

    /// Sorts the running sequences into `ready` and `partial`. Also returns what they take, and who
    /// waits, of those that run and those that do not yet.
    fn sort_running(&mut self, state: &State) -> (Load, Crowd) {
        self.ready.clear();
        self.partial.clear();
        let mut load = Load::default();
        let mut crowd = Crowd { waiting: state.num_impatient(), decoding: 0 };
        for &id in &state.running {
            let sequence = &state.sequences[id];
            load.add(sequence);
            if sequence.is_schedulable() {
                let hurries = u32::from(sequence.params.rank.class == INTERACTIVE);
                match sequence.uncomputed() {
                    0 => {}
                    1 => {
                        crowd.decoding += hurries;
                        self.ready.push(id);
                    }
                    _ => {
                        crowd.waiting += hurries * u32::from(sequence.num_outputs() == 0);
                        self.partial.push(id);
                    }
                }
            }
        }
        // Stable: within a rank, in order of admission.
        self.partial.sort_by_key(|&id| {
            let sequence = &state.sequences[id];
            (!is_overdue(state, sequence), sequence.params.rank)
        });
        (load, crowd)
    }

    /// Gives every sequence the page that its next token needs, and takes those that cannot have one
    /// out of the lists. Returns the shortage if there was one.
    fn give_pages(&mut self, state: &mut State, now: f64) -> Option<Shortage> {
        let mut shortage: Option<Shortage> = None;
        for index in 0..self.ready.len() + self.partial.len() {
            let ready = self.ready.get(index);
            let id = *ready.unwrap_or_else(|| &self.partial[index - self.ready.len()]);
            while !has_page(state, id)
                && !state.memory.allocate(1, &mut state.sequences[id].kv.pages)
                && shortage.get_or_insert_default().relieve(state, id, now) == Relief::TryAgain
            {
            }
        }
        if let Some(shortage) = &shortage {
            for list in [&mut self.ready, &mut self.partial] {
                list.retain(|&id| state.sequences[id].is_schedulable() && has_page(state, id));
            }
            state.sweep();
            if shortage.retracted {
                let left = state.load();
                state.estimate.retracted(&left);
            }
        }
        shortage
    }

    /// Gives what is left of the budget to prompts: those that run and those that wait, by rank, the
    /// former first among equals.
    fn plan_prompts(
        &mut self,
        state: &mut State,
        step: &mut Step,
        mut load: Load,
        mut admitting: bool,
        now: f64,
    ) {
        let decoding = self.writer.num_tokens() as u32;
        let mut budget = state.pace.prompt_budget(&state.config, decoding);
        admitting &= !state.queue.is_empty() && has_room(state);
        if admitting {
            state.queue.refresh_some(&state.sequences, &state.memory);
        }
        let mut next = 0;
        let mut follows = 0;
        while budget > 0 {
            let partial = self.partial.get(next).copied();
            let waiting = if admitting && has_room(state) {
                state.queue.head(state.last_step, &state.sequences, &state.memory)
            } else {
                None
            };
            let id = match (partial, waiting) {
                (Some(partial), waiting) if !precedes(state, waiting, partial) => {
                    next += 1;
                    partial
                }
                (_, Some(waiting)) => {
                    match self.admit(state, step, &mut load, waiting, now) {
                        Some(Admission::Admitted(copy)) => {
                            if let Some(PageCopy { from, to, tokens }) = copy {
                                self.writer.page_move(from, to, tokens);
                            }
                        }
                        Some(Admission::Follows) => {
                            follows += 1;
                            admitting = follows < MAX_FOLLOWS_PER_PLAN;
                            continue;
                        }
                        Some(Admission::NoMemory) | None => {
                            admitting = false;
                            continue;
                        }
                    }
                    waiting
                }
                (_, None) => return,
            };
            let most = budget.min(state.config.max_chunk_tokens.unwrap_or(budget));
            let query_len = give_more_pages(state, id, self.chunk(state, id, most));
            if query_len == 0 {
                if self.waits_for_scores(&state.sequences[id]) {
                    continue;
                }
                return;
            }
            self.emit(state, step, id, query_len);
            budget -= query_len;
        }
    }

    /// Admits a waiting sequence if its records fit into the arena; `None` if they do not.
    fn admit(
        &self,
        state: &mut State,
        step: &mut Step,
        load: &mut Load,
        id: SequenceId,
        now: f64,
    ) -> Option<Admission> {
        let sequence = &state.sequences[id];
        let pages = state.config.pages_for(sequence.known_len()) as usize;
        let bytes = opened_bytes(&sequence.params, sequence.num_outputs())
            + PAGE_MOVE_BYTES
            + PAGE_WRITE_BYTES * pages
            + row_bytes(&sequence.params, 1)
            + logit_bytes(&sequence.params);
        let spare = state.config.spare_arena_bytes();
        if self.waits_for_scores(sequence) {
            return None;
        }
        let lists_fit = load.rows == 0 || load.list_bytes + sequence.params.list_bytes() <= spare;
        (lists_fit && bytes <= self.room(state))
            .then(|| admission::admit(state, step, load, id, now))
    }

    /// Whether a sequence scores its prompt, and the step does so much of that already that the
    /// sequence's next token may have to wait.
    fn waits_for_scores(&self, sequence: &Sequence) -> bool {
        let scored = sequence.output.next_prompt_score(&sequence.params);
        scored.is_some() && self.num_prompt_scores >= MAX_PROMPT_SCORES
    }

    /// Bytes of the arena that are left.
    fn room(&self, state: &State) -> usize {
        // Every slot may have to be closed.
        let closing = 4 * state.config.max_running_requests as usize;
        state.config.arena_bytes.saturating_sub(self.writer.bytes() + closing)
    }

    /// Whether a row of one token fits into the arena. Plain ones do: the configuration and admission
    /// see to that.
    fn fits(&self, state: &State, id: SequenceId) -> bool {
        let sequence = &state.sequences[id];
        let kv = &sequence.kv;
        let plain = kv.rewritten.is_empty() && kv.pages.len() <= kv.written as usize + 1;
        (plain && !sequence.must_open) || self.chunk(state, id, 1) == 1
    }

    /// How many of a sequence's next tokens, at most `most`, fit into the arena.
    fn chunk(&self, state: &State, id: SequenceId, most: u32) -> u32 {
        let sequence = &state.sequences[id];
        let mut most = most.min(sequence.uncomputed());
        let scored = sequence.output.next_prompt_score(&sequence.params);
        if let Some(next) = scored {
            let unscored = next.saturating_sub(sequence.planned + 1);
            most = most.min(unscored + MAX_PROMPT_SCORES.saturating_sub(self.num_prompt_scores));
        }
        let kv = &sequence.kv;
        let pages = state.config.pages_for(sequence.planned + most) as usize;
        let mut fixed = row_bytes(&sequence.params, 0)
            + PAGE_WRITE_BYTES
                * (pages.max(kv.pages.len()) - kv.written as usize + kv.rewritten.len());
        if sequence.must_open {
            fixed += opened_bytes(&sequence.params, sequence.num_outputs())
                + PAGE_WRITE_BYTES * kv.written as usize;
        }
        let per_token =
            TOKEN_BYTES + if scored.is_some() { logit_bytes(&sequence.params) } else { 0 };
        let room = self.room(state).saturating_sub(fixed) / per_token;
        most.min(u32::try_from(room).unwrap_or(most))
    }

    /// Writes a row of the sequence's next tokens, which have pages.
    fn emit(&mut self, state: &mut State, step: &mut Step, id: SequenceId, query_len: u32) {
        let sequence = &mut state.sequences[id];
        if sequence.must_open {
            self.open(sequence);
        }
        self.write_pages(sequence);
        let known = sequence.tokens.len() as u32;
        let (start, end) = (sequence.planned, sequence.planned + query_len);
        let token_ids = &sequence.tokens[start.min(known) as usize..end.min(known) as usize];
        let first = self.writer.row(&Row {
            slot: sequence.slot,
            computed_len: start,
            token_ids,
            last_sampled: end > known,
        });
        let mut row = StepRow {
            sequence: id,
            run: sequence.run,
            start,
            query_len,
            sample: None,
            pooled: None,
            num_prompt_scores: 0,
            first_prompt_score: 0,
            first_score: self.writer.num_scores() as u32,
            first_top: step.expected.num_top as u32,
        };
        let params = &*sequence.params;
        if sequence.bounds.logprobs {
            self.want_prompt_scores(sequence, first, &mut row);
        }
        let known_len = sequence.known_len();
        if end == known_len && known_len < sequence.bounds.limit {
            let logprob = sequence.bounds.logprobs;
            let (top_n, ids) =
                if logprob { (params.top_n(), params.scored_ids()) } else { (0, &[][..]) };
            let ids = ids.iter().copied();
            let logit = self.writer.logit(first + query_len - 1, top_n, ids);
            row.sample = Some(self.writer.num_samples() as u32);
            step.expected.sampled_logprobs |= logprob;
            self.writer.sample(&Sample {
                logit,
                slot: sequence.slot,
                position: known_len,
                logprob,
            });
            sequence.sampled_in_flight += 1;
        }
        if sequence.bounds.pooled && end == sequence.bounds.prompt_len {
            row.pooled = Some(self.want_pooled_state(step, first + query_len - 1));
        }
        if sequence.bounds.logprobs {
            let logits = row.num_prompt_scores + u32::from(row.sample.is_some());
            step.expected.num_top += (logits * params.top_n()) as usize;
        }
        sequence.planned = end;
        sequence.in_flight += 1;
        sequence.last_step = step.id;
        step.rows.push(row);
    }

    /// Wants the pooled state at a flat token; returns which of the step's it is.
    fn want_pooled_state(&mut self, step: &mut Step, token: u32) -> u32 {
        self.writer.pooled(token);
        step.expected.num_pooled += 1;
        step.expected.num_pooled as u32 - 1
    }

    /// Tells the runner who is in the slot, anew if it is to forget what it knows.
    fn open(&mut self, sequence: &mut Sequence) {
        if sequence.kv.written > 0 {
            self.writer.close(sequence.slot);
        }
        let params = &sequence.params;
        let sampling = &params.sampling;
        self.writer.open(&Opened {
            slot: sequence.slot,
            floats: [
                sampling.temperature,
                sampling.top_p,
                sampling.min_p,
                sampling.frequency_penalty,
                sampling.presence_penalty,
                sampling.repetition_penalty,
            ],
            top_k: sampling.top_k,
            prompt_len: params.bounds.prompt_len,
            min_new_tokens: params.bounds.min_new_tokens,
            flags: params.slot_flags(),
            grammar_of: params.grammar.then_some(sequence.arrival),
            seed: params.seed(sequence.sample),
            bias: &sampling.logit_bias,
            suppressed: params.suppressed_ids(),
            output_ids: &sequence.tokens[params.prompt.len()..],
        });
        sequence.must_open = false;
        sequence.kv.written = 0;
        sequence.kv.rewritten.clear();
    }

    /// Brings the device's page table up to date.
    fn write_pages(&mut self, sequence: &mut Sequence) {
        let kv = &mut sequence.kv;
        for index in kv.rewritten.drain(..) {
            self.writer.page_write(sequence.slot, index, kv.pages[index as usize].0);
        }
        for index in kv.written..kv.pages.len() as u32 {
            self.writer.page_write(sequence.slot, index, kv.pages[index as usize].0);
        }
        kv.written = kv.pages.len() as u32;
    }

    /// Wants the log-prob of every prompt token that the row's logits precede and that is not scored.
    fn want_prompt_scores(&mut self, sequence: &Sequence, first: u32, row: &mut StepRow) {
        let params = &sequence.params;
        let Some(next) = sequence.output.next_prompt_score(params) else { return };
        let from = next.max(row.start + 1);
        let to = (row.start + row.query_len + 1).min(params.bounds.prompt_len);
        for position in from..to {
            let own = std::iter::once(params.prompt[position as usize]);
            let ids = own.chain(params.scored_ids().iter().copied());
            self.writer.logit(first + position - 1 - row.start, params.top_n(), ids);
        }
        row.first_prompt_score = from;
        row.num_prompt_scores = to.saturating_sub(from);
        self.num_prompt_scores += row.num_prompt_scores;
    }
}

/// Whether the next token of a sequence has a page; true for one that gets no row.
fn has_page(state: &State, id: SequenceId) -> bool {
    let sequence = &state.sequences[id];
    let index = (sequence.planned / state.config.page_size) as usize;
    sequence.kv.pages.len() > index || !sequence.is_schedulable()
}

/// Gives a sequence pages for so many of its next tokens, and returns how many have pages then. The
/// tokens known at admission have pages; others may have come in the meantime.
fn give_more_pages(state: &mut State, id: SequenceId, tokens: u32) -> u32 {
    let sequence = &mut state.sequences[id];
    let page_size = state.config.page_size;
    let needed = state.config.pages_for(sequence.planned + tokens) as usize;
    while sequence.kv.pages.len() < needed {
        if !state.memory.allocate(1, &mut sequence.kv.pages) {
            break;
        }
    }
    tokens.min(sequence.kv.pages.len() as u32 * page_size - sequence.planned)
}

/// Whether one more sequence may run.
fn has_room(state: &State) -> bool {
    state.slots.num_free() > 0 && state.running.len() < state.config.max_running() as usize
}

/// Whether a running sequence was passed over for so long that it is first now.
fn is_overdue(state: &State, sequence: &Sequence) -> bool {
    state.last_step >= sequence.last_step + u64::from(state.config.aging_steps)
}

/// Whether a waiting sequence goes before a partial one.
fn precedes(state: &State, waiting: Option<SequenceId>, partial: SequenceId) -> bool {
    let Some(waiting) = waiting else { return false };
    let overdue = is_overdue(state, &state.sequences[partial]);
    let rank = |id: SequenceId| -> Rank { state.sequences[id].params.rank };
    !overdue && rank(waiting) < rank(partial)
}

fn opened_bytes(params: &Params, num_outputs: u32) -> usize {
    OPENED_BYTES
        + 8 * params.sampling.logit_bias.len()
        + 4 * params.suppressed_ids().len()
        + 4 * num_outputs as usize
}

/// Bytes of a logit position that scores a prompt token.
fn logit_bytes(params: &Params) -> usize {
    LOGIT_BYTES + 4 + 4 * params.scored_ids().len()
}

/// Bytes of a row of so many tokens that leads to a sample.
fn row_bytes(params: &Params, tokens: usize) -> usize {
    ROW_BYTES + TOKEN_BYTES * tokens + logit_bytes(params) + SAMPLE_BYTES
}
