//! The waiting sequences and who of them is next.
//!
//! Order: class, priority, retracted before new, under `lpm` the longest cached prefix, arrival.
//! Starvation bound: once the oldest has waited `aging_steps` steps, every
//! [`OVERDUE_INTERVAL`]th admission is the oldest one's, whatever its rank. So the sequence with `p`
//! older ones before it is admitted after at most `aging_steps` steps and
//! `OVERDUE_INTERVAL x (p + 1)` admissions.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Bound::{Excluded, Unbounded};

use radix_tree::Peek;

use crate::config::{Config, Policy};
use crate::memory::Memory;
use crate::request::Rank;
use crate::sequence::{Sequence, SequenceId};
use crate::slab::{Slab, SlabId};

/// Of so many admissions, one is the oldest sequence's once that is overdue.
const OVERDUE_INTERVAL: u32 = 8;

/// Kept matches that are looked at per plan: all of a long queue within a few steps.
const REFRESHED_PER_PLAN: usize = 64;

/// Place in the order of policy; smaller is next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    rank: Rank,
    fresh: bool,
    cached: Reverse<u32>,
    arrival: Arrival,
}

/// Order of arrival: of requests, and of the samples of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Arrival {
    request: u64,
    sample: u32,
}

/// What is kept of a waiting sequence.
#[derive(Debug)]
struct Entry {
    key: Key,
    since_step: u64,
    /// Its measured match, under `lpm`.
    peek: Option<Peek>,
    /// Known tokens that are not cached, as far as is known.
    uncached: u32,
}

#[derive(Debug)]
pub(crate) struct Queue {
    policy: Policy,
    aging_steps: u64,
    entries: Vec<Option<Entry>>,
    by_policy: BTreeMap<Key, SequenceId>,
    by_arrival: BTreeMap<Arrival, SequenceId>,
    /// Where the last round of refreshing ended.
    refreshed_to: Option<Arrival>,
    admissions_since_overdue: u32,
    batch: Vec<SequenceId>,
    uncached_tokens: u64,
}

impl Queue {
    pub(crate) fn new(config: &Config) -> Self {
        let policy = if config.prefix_cache { config.policy } else { Policy::Fcfs };
        Self {
            policy,
            aging_steps: u64::from(config.aging_steps),
            entries: Vec::new(),
            by_policy: BTreeMap::new(),
            by_arrival: BTreeMap::new(),
            refreshed_to: None,
            admissions_since_overdue: 0,
            batch: Vec::new(),
            uncached_tokens: 0,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.by_arrival.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.by_arrival.is_empty()
    }

    /// Known tokens of waiting sequences that are not cached, as last measured.
    pub(crate) fn uncached_tokens(&self) -> u64 {
        self.uncached_tokens
    }

    pub(crate) fn push(&mut self, id: SequenceId, sequence: &Sequence, memory: &Memory) {
        let peek = (self.policy == Policy::Lpm)
            .then(|| memory.peek(sequence.namespace, cacheable(sequence)));
        let cached = peek.map_or(0, |peek| peek.num_tokens as u32);
        let arrival = Arrival { request: sequence.arrival, sample: sequence.sample };
        let key = Key {
            rank: sequence.params.rank,
            fresh: sequence.timing.num_retractions == 0,
            cached: Reverse(cached),
            arrival,
        };
        let uncached = sequence.known_len() - cached;
        self.uncached_tokens += u64::from(uncached);
        self.by_policy.insert(key, id);
        self.by_arrival.insert(arrival, id);
        if self.entries.len() <= id.index() {
            self.entries.resize_with(id.index() + 1, || None);
        }
        let entry = Entry { key, since_step: sequence.since_step, peek, uncached };
        self.entries[id.index()] = Some(entry);
    }

    pub(crate) fn remove(&mut self, id: SequenceId) {
        let entry = self.entries[id.index()].take().expect("broken invariant: it is in the queue");
        self.by_policy.remove(&entry.key);
        self.by_arrival.remove(&entry.key.arrival);
        self.uncached_tokens -= u64::from(entry.uncached);
    }

    /// Brings some of the kept matches up to date, in turn.
    pub(crate) fn refresh_some(&mut self, sequences: &Slab<SequenceId, Sequence>, memory: &Memory) {
        if self.policy != Policy::Lpm {
            return;
        }
        let last = self.refreshed_to.unwrap_or(Arrival { request: 0, sample: 0 });
        // After the last one, from the start again.
        let later = self.by_arrival.range((Excluded(last), Unbounded));
        let round = later.chain(self.by_arrival.range(..=last)).take(REFRESHED_PER_PLAN);
        let mut batch = std::mem::take(&mut self.batch);
        for (&arrival, &id) in round {
            self.refreshed_to = Some(arrival);
            batch.push(id);
        }
        for id in batch.drain(..) {
            self.refresh(id, sequences, memory);
        }
        self.batch = batch;
    }

    /// Who is next, at this step. Its kept match is up to date.
    pub(crate) fn head(
        &mut self,
        step: u64,
        sequences: &Slab<SequenceId, Sequence>,
        memory: &Memory,
    ) -> Option<SequenceId> {
        if let Some(id) = self.overdue(step) {
            return Some(id);
        }
        loop {
            let (_, &id) = self.by_policy.first_key_value()?;
            if !self.refresh(id, sequences, memory) {
                return Some(id);
            }
        }
    }

    /// A sequence that ranks behind `rank` and of whose request nothing has run: of these, the last.
    pub(crate) fn last_behind(
        &self,
        rank: Rank,
        unstarted: impl Fn(SequenceId) -> bool,
    ) -> Option<SequenceId> {
        let behind = self.by_policy.iter().rev().take_while(|(key, _)| key.rank > rank);
        behind.map(|(_, &id)| id).find(|&id| unstarted(id))
    }

    /// Counts an admission of whom `head` named.
    pub(crate) fn admitted(&mut self, id: SequenceId, step: u64) {
        if self.overdue(step) == Some(id) {
            self.admissions_since_overdue = 0;
        } else {
            self.admissions_since_overdue += 1;
        }
    }

    /// The oldest sequence, if it is its turn whatever its rank.
    fn overdue(&self, step: u64) -> Option<SequenceId> {
        if self.admissions_since_overdue + 1 < OVERDUE_INTERVAL {
            return None;
        }
        let (_, &id) = self.by_arrival.first_key_value()?;
        let entry = self.entries[id.index()].as_ref()?;
        (step >= entry.since_step + self.aging_steps).then_some(id)
    }

    /// Measures a kept match again if the tree changed on its path. Returns whether its place in the
    /// queue changed.
    fn refresh(
        &mut self,
        id: SequenceId,
        sequences: &Slab<SequenceId, Sequence>,
        memory: &Memory,
    ) -> bool {
        let Some(entry) = &mut self.entries[id.index()] else { return false };
        let Some(peek) = &mut entry.peek else { return false };
        if memory.is_current(peek) {
            return false;
        }
        let sequence = &sequences[id];
        memory.refresh(sequence.namespace, cacheable(sequence), peek);
        let cached = peek.num_tokens as u32;
        if Reverse(cached) == entry.key.cached {
            return false;
        }
        self.by_policy.remove(&entry.key);
        entry.key.cached = Reverse(cached);
        self.by_policy.insert(entry.key, id);
        self.uncached_tokens -= u64::from(entry.uncached);
        entry.uncached = sequence.known_len() - cached;
        self.uncached_tokens += u64::from(entry.uncached);
        true
    }

    /// Waiting sequences, oldest first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = SequenceId> {
        self.by_arrival.values().copied()
    }
}

/// The known tokens that may come from the cache.
pub(crate) fn cacheable(sequence: &Sequence) -> &[u32] {
    &sequence.known()[..sequence.max_cached() as usize]
}
