//! The rule of SGLang's router, and of vLLM's, which is a fork of it: thresholds on the matched part
//! of a prompt and on numbers of requests. Written from their documentation, as baselines.

use std::collections::HashMap;

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::chooser::{Chooser, Chosen};
use crate::core::{Outcome, PrefixIndex, Prompt, Report, Slot};

/// Characters that their tree remembers of a worker.
const TREE_CHARACTERS: usize = 1 << 26;
const CHARACTERS_PER_TOKEN: usize = 4;

/// Where a prompt goes that matches too little.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Miss {
    /// To the worker with the fewest requests.
    FewestRequests,
    /// To the worker of which the least is remembered.
    SmallestTree,
}

/// The thresholds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Thresholds {
    pub(super) cache: f64,
    pub(super) balance_absolute: u64,
    pub(super) balance_relative: f64,
    pub(super) miss: Miss,
}

/// A router of this kind. It knows nothing but its own requests.
pub(super) struct Threshold {
    thresholds: Thresholds,
    index: PrefixIndex,
    workers: Vec<Known>,
    tickets: HashMap<u64, usize>,
    next: u64,
    rng: ChaCha8Rng,
}

#[derive(Clone, Copy)]
struct Known {
    ready: bool,
    requests: u64,
}

impl Threshold {
    pub(super) fn new(
        thresholds: Thresholds,
        workers: usize,
        block_tokens: u32,
        seed: u64,
    ) -> Self {
        let capacity = TREE_CHARACTERS / CHARACTERS_PER_TOKEN / block_tokens as usize;
        let mut index = PrefixIndex::new();
        for worker in 0..workers {
            index.add(worker as Slot, capacity);
        }
        Self {
            thresholds,
            index,
            workers: vec![Known { ready: true, requests: 0 }; workers],
            tickets: HashMap::new(),
            next: 0,
            rng: ChaCha8Rng::seed_from_u64(seed),
        }
    }

    fn least(&mut self, candidates: &[usize], rank: impl Fn(&Self, usize) -> u64) -> usize {
        let best = candidates.iter().map(|worker| rank(self, *worker)).min();
        let ties = candidates.iter().filter(|worker| Some(rank(self, **worker)) == best);
        let ties: Vec<usize> = ties.copied().collect();
        ties[self.rng.random_range(0..ties.len())]
    }

    fn choose(&mut self, prompt: &Prompt, candidates: &[usize]) -> (usize, u64) {
        let matches: Vec<u64> = candidates
            .iter()
            .map(|worker| {
                let blocks = self.index.depth(*worker as Slot, prompt.hashes());
                prompt.tokens_of(blocks as u32)
            })
            .collect();
        let requests = |router: &Self, worker: usize| router.workers[worker].requests;
        let loads = candidates.iter().map(|worker| requests(self, *worker));
        let (least, most) =
            loads.fold((u64::MAX, 0), |(low, high), load| (low.min(load), high.max(load)));
        let Thresholds { cache, balance_absolute, balance_relative, miss } = self.thresholds;
        let unbalanced =
            most - least > balance_absolute && most as f64 > balance_relative * least as f64;
        let longest = matches.iter().copied().max().unwrap_or(0);
        let worker = if unbalanced {
            self.least(candidates, requests)
        } else if longest as f64 > cache * prompt.num_tokens() as f64 {
            let holders = candidates.iter().zip(&matches).filter(|(_, tokens)| **tokens == longest);
            let holders: Vec<usize> = holders.map(|(worker, _)| *worker).collect();
            holders[self.rng.random_range(0..holders.len())]
        } else if miss == Miss::FewestRequests {
            self.least(candidates, requests)
        } else {
            self.least(candidates, |router, worker| router.index.num_blocks(worker as Slot) as u64)
        };
        let place = candidates.iter().position(|candidate| *candidate == worker);
        (worker, matches[place.expect("chosen from these")])
    }
}

impl Chooser for Threshold {
    fn select(&mut self, prompt: &Prompt, exclude: &[usize], _now: f64) -> Option<Chosen> {
        let candidates: Vec<usize> = (0..self.workers.len())
            .filter(|worker| self.workers[*worker].ready && !exclude.contains(worker))
            .collect();
        if candidates.is_empty() {
            return None;
        }
        let (worker, expected_tokens) = self.choose(prompt, &candidates);
        let ticket = self.next;
        self.next += 1;
        self.tickets.insert(ticket, worker);
        self.workers[worker].requests += 1;
        self.index.touch(worker as Slot, prompt.hashes(), ticket);
        Some(Chosen { worker, ticket, expected_tokens })
    }

    fn started(&mut self, _ticket: u64) {}

    fn finished(&mut self, ticket: u64, _outcome: Outcome, _now: f64) {
        if let Some(worker) = self.tickets.remove(&ticket) {
            self.workers[worker].requests -= 1;
        }
    }

    fn report(&mut self, _worker: usize, _report: Report, _now: f64) {}

    fn set_ready(&mut self, worker: usize, ready: bool) {
        self.workers[worker].ready = ready;
        self.index.clear(worker as Slot);
    }

    fn num_in_flight(&self) -> usize {
        self.tickets.len()
    }
}
