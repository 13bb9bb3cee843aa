//! In-batch prefix sharing: who computes a prefix that others wait for.
//!
//! A sequence that computes known tokens is a *leader*. Another that has at least
//! [`MIN_SHARED_TOKENS`] of these ahead of it, not yet computed, *follows*: it waits until the
//! leader's committed part leaves less than that, then takes it from the prefix tree.

use radix_tree::NamespaceId;
use rustc_hash::{FxHashMap, FxHasher};
use std::hash::{Hash, Hasher};

use crate::sequence::{Sequence, SequenceId};
use crate::slab::Slab;

/// Waiting for fewer tokens than these costs more than computing them.
pub(crate) const MIN_SHARED_TOKENS: u32 = 32;

#[derive(Debug, Default)]
pub(crate) struct Sharing {
    /// Leaders by their namespace and first tokens.
    leaders: FxHashMap<u64, Vec<SequenceId>>,
    followers: FxHashMap<SequenceId, Vec<Follower>>,
    num_followers: usize,
}

#[derive(Clone, Copy, Debug)]
struct Follower {
    sequence: SequenceId,
    /// Length of the common prefix.
    common: u32,
}

impl Sharing {
    /// Notes that a sequence computes its tokens from here on.
    pub(crate) fn lead(&mut self, id: SequenceId, sequence: &Sequence) {
        if let Some(hash) = hash(sequence.namespace, &sequence.tokens) {
            self.leaders.entry(hash).or_default().push(id);
        }
    }

    /// Notes that a sequence leads no more, and returns who followed it.
    pub(crate) fn stop_leading(&mut self, id: SequenceId, sequence: &Sequence) -> Vec<SequenceId> {
        let head = &sequence.tokens[..sequence.fill_target as usize];
        if let Some(hash) = hash(sequence.namespace, head)
            && let Some(leaders) = self.leaders.get_mut(&hash)
        {
            leaders.retain(|&leader| leader != id);
            if leaders.is_empty() {
                self.leaders.remove(&hash);
            }
        }
        let followers = self.followers.remove(&id).unwrap_or_default();
        self.num_followers -= followers.len();
        followers.into_iter().map(|follower| follower.sequence).collect()
    }

    /// The leader that computes the longest prefix of `key` beyond the `cached` tokens, if it is
    /// worth waiting for; and the length of that prefix.
    pub(crate) fn find_leader(
        &self,
        namespace: NamespaceId,
        key: &[u32],
        cached: u32,
        sequences: &Slab<SequenceId, Sequence>,
    ) -> Option<(SequenceId, u32)> {
        let leaders = self.leaders.get(&hash(namespace, key)?)?;
        let mut best = None;
        let mut longest = cached + MIN_SHARED_TOKENS - 1;
        for &id in leaders {
            let leader = &sequences[id];
            let tokens = &leader.tokens[..leader.fill_target as usize];
            let most = key.len().min(tokens.len());
            let last = longest as usize;
            // The token that most leaders differ in first, then all before it.
            if most <= last || key[last] != tokens[last] || key[..last] != tokens[..last] {
                continue;
            }
            let differs = key[..most].iter().zip(&tokens[..most]).position(|(a, b)| a != b);
            let common = differs.unwrap_or(most) as u32;
            if common > longest && common >= leader.computed + MIN_SHARED_TOKENS {
                longest = common;
                best = Some((id, common));
            }
        }
        best
    }

    /// Lets a sequence follow a leader with which it has `common` tokens in common.
    pub(crate) fn follow(&mut self, sequence: SequenceId, leader: SequenceId, common: u32) {
        self.followers.entry(leader).or_default().push(Follower { sequence, common });
        self.num_followers += 1;
    }

    /// Takes back `follow`.
    pub(crate) fn unfollow(&mut self, sequence: SequenceId, leader: SequenceId) {
        if let Some(followers) = self.followers.get_mut(&leader) {
            let before = followers.len();
            followers.retain(|follower| follower.sequence != sequence);
            self.num_followers -= before - followers.len();
        }
    }

    /// Takes out the followers for which a leader with so many computed tokens has done enough.
    pub(crate) fn wake(&mut self, leader: SequenceId, computed: u32) -> Vec<SequenceId> {
        let Some(followers) = self.followers.get_mut(&leader) else { return Vec::new() };
        let woken: Vec<_> = followers
            .extract_if(.., |follower| follower.common < computed + MIN_SHARED_TOKENS)
            .map(|follower| follower.sequence)
            .collect();
        self.num_followers -= woken.len();
        woken
    }

    pub(crate) fn num_followers(&self) -> usize {
        self.num_followers
    }
}

fn hash(namespace: NamespaceId, tokens: &[u32]) -> Option<u64> {
    let head = tokens.get(..MIN_SHARED_TOKENS as usize)?;
    let mut hasher = FxHasher::default();
    (namespace.0, head).hash(&mut hasher);
    Some(hasher.finish())
}
