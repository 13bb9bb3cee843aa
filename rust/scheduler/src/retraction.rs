//! Finding memory for a row when the pool is exhausted and nothing can be evicted.
//!
//! Sequences are ordered by what they are worth: interactive before batch, by priority, by outputs
//! so far, by arrival. Only sequences worth less than the one in need give way, so the most worthy
//! that runs is never a victim: its request was refused unless it fits into the pool alone, so once
//! all others are retracted it gets its page. It keeps its place until it has the next output,
//! hence every step either produces outputs or is followed by one that does: no deadlock, and no
//! ring of sequences that retract each other.

use std::cmp::Reverse;

use crate::sequence::SequenceId;
use crate::state::State;

/// What was done for a sequence that needs a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Relief {
    /// Memory may have become free: try again.
    TryAgain,
    /// Nothing can be freed before the next commit: leave its row out of this step.
    LeaveOut,
}

/// Rows left out of one step for want of memory.
#[derive(Debug, Default)]
pub(crate) struct Shortage {
    /// Pages that rows left out still need.
    missing: u64,
    /// Pages that sequences ending or retracted at the next commits will give back.
    expected: u64,
    pub(crate) retracted: bool,
}

impl Shortage {
    /// Looks at what will be freed anyway.
    fn measure(state: &State) -> u64 {
        let sequences = state.sequences.iter().map(|(_, sequence)| sequence);
        let leaving = sequences.filter(|sequence| {
            sequence.in_flight > 0 && (!sequence.is_schedulable() || sequence.uncomputed() == 0)
        });
        leaving.map(|sequence| sequence.kv.private_pages().len() as u64).sum()
    }

    /// Makes room for one more page of `id`, at the cost of sequences worth less.
    pub(crate) fn relieve(&mut self, state: &mut State, id: SequenceId, now: f64) -> Relief {
        if self.missing == 0 {
            self.expected = Self::measure(state);
        }
        if self.missing < self.expected {
            self.missing += 1;
            return Relief::LeaveOut;
        }
        let victim = victim(state);
        let Some(victim) = victim.filter(|&victim| victim != id) else {
            self.missing += 1;
            return Relief::LeaveOut;
        };
        if state.sequences[victim].in_flight == 0 {
            state.retract(victim, now);
            self.retracted = true;
            return Relief::TryAgain;
        }
        let sequence = &mut state.sequences[victim];
        sequence.retract = true;
        self.expected += sequence.kv.private_pages().len() as u64;
        self.missing += 1;
        Relief::LeaveOut
    }
}

/// The running sequence that is worth least.
fn victim(state: &State) -> Option<SequenceId> {
    let candidates = state.running.iter().copied().filter(|&id| {
        let sequence = &state.sequences[id];
        sequence.is_schedulable() && sequence.uncomputed() > 0
    });
    candidates.max_by_key(|&id| {
        let sequence = &state.sequences[id];
        (sequence.params.rank, Reverse(sequence.num_outputs()), sequence.arrival, sequence.sample)
    })
}
