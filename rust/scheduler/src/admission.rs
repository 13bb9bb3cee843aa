//! Letting waiting sequences in: slots, memory, and waiting for others that compute the same.

use crate::estimate::Load;
use crate::memory::{Claim, Kv};
use crate::queue::cacheable;
use crate::sequence::{Phase, SequenceId};
use crate::state::State;
use crate::step::Step;

/// What became of an attempt to admit a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Admission {
    /// It runs. If it has a donor, this page must be copied first.
    Admitted(Option<PageCopy>),
    /// It waits for another that computes the same prefix.
    Follows,
    /// There is not enough memory now.
    NoMemory,
}

/// Leading tokens of a page to copy to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageCopy {
    pub(crate) from: u32,
    pub(crate) to: u32,
    pub(crate) tokens: u32,
}

/// Tries to admit a waiting sequence; `load` is that of all that run. There must be a free slot.
pub(crate) fn admit(
    state: &mut State,
    step: &mut Step,
    load: &mut Load,
    id: SequenceId,
    now: f64,
) -> Admission {
    let sequence = &state.sequences[id];
    let key = cacheable(sequence);
    if state.config.prefix_cache {
        let cached = state.memory.peek(sequence.namespace, key).num_tokens as u32;
        let leader = state.sharing.find_leader(sequence.namespace, key, cached, &state.sequences);
        if let Some((leader, common)) = leader {
            state.queue.remove(id);
            state.sequences[id].phase = Phase::Following(leader);
            state.sharing.follow(id, leader, common);
            return Admission::Follows;
        }
    }
    let claim = Claim {
        namespace: sequence.namespace,
        key,
        total_pages: state.config.pages_for(sequence.known_len()),
        reserve_pages: reserve_pages(state, *load, id),
    };
    let Some(granted) = state.memory.admit(&claim) else { return Admission::NoMemory };
    let copy = granted.donor.map(|donor| {
        step.donors.push((donor.node, donor.page));
        let fresh = granted.kv.private_pages()[0];
        PageCopy { from: donor.page.0, to: fresh.0, tokens: donor.num_tokens }
    });
    state.queue.admitted(id, state.last_step);
    state.queue.remove(id);
    enter(state, id, granted.kv, granted.cached_tokens, now);
    load.add(&state.sequences[id]);
    Admission::Admitted(copy)
}

/// Pages that must be left over for those that run, and for the newcomer's own output.
fn reserve_pages(state: &State, mut load: Load, id: SequenceId) -> u64 {
    if state.running.is_empty() {
        return 0;
    }
    let sequence = &state.sequences[id];
    load.add(sequence);
    let page_size = u64::from(state.config.page_size);
    let pages = (state.estimate.reserve(&load) + page_size).div_ceil(page_size);
    // What was retracted once comes back only when every row can have another page.
    if sequence.timing.num_retractions > 0 { pages + state.running.len() as u64 + 1 } else { pages }
}

/// Makes a sequence with memory a running one.
fn enter(state: &mut State, id: SequenceId, kv: Kv, cached_tokens: u32, now: f64) {
    let slot = state.slots.take().expect("broken invariant: a slot is free");
    let sequence = &mut state.sequences[id];
    if sequence.tokens.is_empty() {
        let outputs = sequence.bounds.limit - sequence.bounds.prompt_len;
        let expected = sequence.params.prompt.len() + outputs.min(EXPECTED_OUTPUTS) as usize;
        sequence.tokens.reserve_exact(expected);
        sequence.tokens.extend(&sequence.params.prompt);
    }
    sequence.phase = Phase::Running;
    sequence.kv = kv;
    sequence.computed = cached_tokens;
    sequence.planned = cached_tokens;
    sequence.fill_target = sequence.tokens.len() as u32;
    sequence.slot = slot;
    sequence.must_open = true;
    sequence.timing.queue_time += now - sequence.timing.waiting_since;
    let first = !sequence.timing.admitted;
    if first {
        sequence.timing.admitted = true;
        sequence.timing.forward_entry_time = now;
        sequence.timing.cached_tokens = cached_tokens.min(sequence.bounds.prompt_len);
        state.counters.admitted += 1;
        state.counters.cached_tokens += u64::from(sequence.timing.cached_tokens);
    }
    if state.config.prefix_cache {
        sequence.leads = true;
        state.sharing.lead(id, sequence);
    }
    state.running.push(id);
    let index = sequence.request;
    let request = state.requests.get(index);
    if !request.started {
        state.entered.push(request.to);
    }
    state.requests.mark_started(index);
    if first {
        state.activate_next(index);
    }
}

/// Outputs that a sequence has room for before its tokens must be moved.
const EXPECTED_OUTPUTS: u32 = 1024;
