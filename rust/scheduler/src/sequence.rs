//! One sequence: its tokens, how far they are computed, and where it is in its life.

use std::sync::Arc;

use radix_tree::NamespaceId;

use crate::memory::Kv;
use crate::output::Output;
use crate::request::{Bounds, Params, RequestIndex};
use crate::slab::SlabId;
use crate::wire::{Address, Finish};

/// A sequence of the scheduler; stays valid while a step in flight names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct SequenceId(u32);

impl SlabId for SequenceId {
    fn new(index: u32) -> Self {
        Self(index)
    }

    fn index(self) -> usize {
        self.0 as usize
    }
}

/// Where a sequence is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Held back by its request until `ready`.
    Preparing,
    /// In the queue.
    Waiting,
    /// Out of the queue while this leader computes a prefix that both have.
    Following(SequenceId),
    /// Has a slot and pages.
    Running,
    /// Its last event is out; it keeps slot and pages until no step in flight names it.
    Draining,
}

/// One sample of a request.
#[derive(Debug)]
pub(crate) struct Sequence {
    pub(crate) request: RequestIndex,
    pub(crate) to: Address,
    pub(crate) sample: u32,
    pub(crate) params: Arc<Params>,
    pub(crate) bounds: Bounds,
    pub(crate) namespace: NamespaceId,
    pub(crate) phase: Phase,
    /// Order of arrival.
    pub(crate) arrival: u64,
    /// Step counter when it began to wait.
    pub(crate) since_step: u64,
    /// Prompt and output. Empty before the first admission, unless resumed: the prompt is in `params`.
    pub(crate) tokens: Vec<u32>,
    /// Tokens whose KV is in the pool, by committed steps.
    pub(crate) computed: u32,
    /// The same, once every step in flight is committed.
    pub(crate) planned: u32,
    /// Tokens that steps in flight will append.
    pub(crate) sampled_in_flight: u32,
    /// Steps in flight that have a row of it.
    pub(crate) in_flight: u32,
    /// Rows planned under an earlier run are void: the sequence went on differently.
    pub(crate) run: u32,
    /// Step of its last row.
    pub(crate) last_step: u64,
    /// Its tokens at the last admission: up to there it computes what was known before.
    pub(crate) fill_target: u32,
    /// Others may wait for what it computes.
    pub(crate) leads: bool,
    /// Its place in the device's tables, while `Running` or `Draining`.
    pub(crate) slot: u32,
    /// The slot's per-sequence state must be written (again) before the next row.
    pub(crate) must_open: bool,
    pub(crate) kv: Kv,
    pub(crate) output: Output,
    /// End it like this as soon as no step that is due speaks against it.
    pub(crate) ending: Option<Finish>,
    /// Take its memory away once no step in flight names it.
    pub(crate) retract: bool,
    pub(crate) timing: Timing,
}

/// Times and counts for the client.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Timing {
    pub(crate) waiting_since: f64,
    pub(crate) queue_time: f64,
    pub(crate) forward_entry_time: f64,
    pub(crate) cached_tokens: u32,
    pub(crate) num_retractions: u32,
    pub(crate) admitted: bool,
}

impl Sequence {
    /// The known tokens, wherever they are.
    pub(crate) fn known(&self) -> &[u32] {
        if self.tokens.is_empty() { &self.params.prompt } else { &self.tokens }
    }

    /// How many they are.
    pub(crate) fn committed_len(&self) -> u32 {
        if self.tokens.is_empty() { self.bounds.prompt_len } else { self.tokens.len() as u32 }
    }

    /// Known tokens, those of steps in flight included.
    pub(crate) fn known_len(&self) -> u32 {
        self.committed_len() + self.sampled_in_flight
    }

    /// Outputs committed so far.
    pub(crate) fn num_outputs(&self) -> u32 {
        self.committed_len() - self.bounds.prompt_len
    }

    /// Outputs that may still come.
    pub(crate) fn remaining_outputs(&self) -> u32 {
        self.bounds.limit - self.committed_len()
    }

    /// Tokens that the next steps must compute before the sequence can have another token (or, for
    /// one that is to have none, before it is done). 0 if the steps in flight finish it.
    pub(crate) fn uncomputed(&self) -> u32 {
        let Bounds { prompt_len, limit, .. } = self.bounds;
        let known_len = self.known_len();
        if known_len < limit || limit == prompt_len { known_len - self.planned } else { 0 }
    }

    /// Leading tokens that may come from the cache: one must be computed for its logits, and those
    /// whose successor in the prompt is still to be scored must be, too.
    pub(crate) fn max_cached(&self) -> u32 {
        let all_but_one = self.known_len() - 1;
        match self.output.next_prompt_score(&self.params) {
            Some(position) => all_but_one.min(position.saturating_sub(1)),
            None => all_but_one,
        }
    }

    /// Whether the next row of the sequence may be planned.
    pub(crate) fn is_schedulable(&self) -> bool {
        self.phase == Phase::Running && self.ending.is_none() && !self.retract
    }
}
