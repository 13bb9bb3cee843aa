//! The policies, over a table of candidates.

use rand::RngExt;
use rand_chacha::ChaCha8Rng;

use super::config::{Config, Policy};
use super::index::Slot;
use super::rendezvous;
use super::router::Reason;

/// A worker that may be chosen.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    pub(super) slot: Slot,
    /// What rendezvous hashing knows it by.
    pub(super) key: u64,
    /// What waits there, in prompt tokens.
    pub(super) backlog: f64,
    pub(super) requests: u64,
    /// Those of them whose answer has not begun.
    pub(super) waiting: u64,
    pub(super) selected: u64,
    pub(super) cached_blocks: u32,
    pub(super) cached_tokens: u64,
}

/// What the policies ask about the request.
pub(super) struct Question<'a> {
    pub(super) hashes: &'a [u64],
    pub(super) num_tokens: u64,
    /// Leading blocks that most workers have: they say nothing about where a prompt belongs.
    pub(super) common_blocks: usize,
    pub(super) session: Option<u64>,
}

/// Chooses one of the candidates, of which there is at least one.
pub(super) fn choose<'a>(
    config: &Config,
    question: &Question<'_>,
    candidates: &'a [Candidate],
    turn: &mut u64,
    rng: &mut ChaCha8Rng,
) -> (&'a Candidate, Reason) {
    match config.policy {
        Policy::CacheAware => cache_aware(config, question, candidates, rng),
        Policy::RoundRobin => {
            *turn += 1;
            (&candidates[(*turn - 1) as usize % candidates.len()], Reason::Policy)
        }
        Policy::Random => (&candidates[rng.random_range(0..candidates.len())], Reason::Policy),
        Policy::PowerOfTwo => (power_of_two(candidates, rng), Reason::Policy),
        Policy::LeastLoad => (least(candidates, rng, |one| one.backlog), Reason::Policy),
        Policy::LeastRequests => {
            (least(candidates, rng, |one| one.requests as f64), Reason::Policy)
        }
        Policy::Session => match question.session {
            Some(key) => (bounded(config, key, candidates), Reason::Affinity),
            None => (least(candidates, rng, |one| one.backlog), Reason::Policy),
        },
        Policy::PrefixHash => match head_key(question.hashes, 0, config.head_blocks) {
            Some(key) => (bounded(config, key, candidates), Reason::Affinity),
            None => (least(candidates, rng, |one| one.backlog), Reason::Policy),
        },
    }
}

fn cache_aware<'a>(
    config: &Config,
    question: &Question<'_>,
    candidates: &'a [Candidate],
    rng: &mut ChaCha8Rng,
) -> (&'a Candidate, Reason) {
    let num_tokens = question.num_tokens;
    let waiting: u64 = candidates.iter().map(|one| one.waiting).sum();
    let mean_waiting = waiting as f64 / candidates.len() as f64;
    let cost = |one: &Candidate| {
        let uncached = num_tokens.saturating_sub(one.cached_tokens) as f64;
        // Bounded by what waits here, lest one crowded worker keep its prefixes from idle ones.
        let behind = mean_waiting.min(one.waiting as f64 + 1.0);
        one.backlog + uncached * (1.0 + config.contention_weight * behind)
    };
    let cheapest = least(candidates, rng, cost);
    let longest = candidates.iter().map(|one| one.cached_blocks as usize).max().unwrap_or(0);
    if longest > question.common_blocks {
        let hit = cheapest.cached_blocks as usize == longest;
        return (cheapest, if hit { Reason::Hit } else { Reason::Spill });
    }
    let Some(key) = head_key(question.hashes, question.common_blocks, config.head_blocks) else {
        return (cheapest, Reason::Load);
    };
    let ranked = candidates.iter().map(|one| (one, rendezvous::weight(key, one.key)));
    let placed = match rendezvous::top_two(ranked) {
        (Some(first), Some(second)) if cost(second) < cost(first) => second,
        (Some(first), _) => first,
        (None, _) => cheapest,
    };
    let limit = cost(cheapest) + config.placement_slack * num_tokens as f64;
    if cost(placed) <= limit { (placed, Reason::Cold) } else { (cheapest, Reason::Spill) }
}

/// The hash of the first blocks past the common ones; none if there are none.
fn head_key(hashes: &[u64], common_blocks: usize, head_blocks: usize) -> Option<u64> {
    let past = hashes.len().checked_sub(common_blocks + 1)?;
    Some(hashes[common_blocks + past.min(head_blocks.saturating_sub(1))])
}

/// The best in rendezvous order that is not overloaded: consistent hashing with bounded loads.
fn bounded<'a>(config: &Config, key: u64, candidates: &'a [Candidate]) -> &'a Candidate {
    let total: u64 = candidates.iter().map(|one| one.requests + 1).sum();
    let limit = (config.load_bound * total as f64 / candidates.len() as f64).ceil();
    let fits = candidates.iter().filter(|one| ((one.requests + 1) as f64) <= limit);
    fits.max_by_key(|one| rendezvous::weight(key, one.key)).unwrap_or(&candidates[0])
}

fn power_of_two<'a>(candidates: &'a [Candidate], rng: &mut ChaCha8Rng) -> &'a Candidate {
    let first = rng.random_range(0..candidates.len());
    let step = rng.random_range(1..candidates.len().max(2));
    let (one, two) = (&candidates[first], &candidates[(first + step) % candidates.len()]);
    let rank = |candidate: &Candidate| (candidate.backlog, candidate.requests as f64);
    if rank(two) < rank(one) { two } else { one }
}

/// The least by `cost`, then by requests, then by how often it was chosen, then any.
fn least<'a>(
    candidates: &'a [Candidate],
    rng: &mut ChaCha8Rng,
    cost: impl Fn(&Candidate) -> f64,
) -> &'a Candidate {
    let rank = |one: &Candidate| (cost(one), one.requests as f64, one.selected as f64);
    let mut best = &candidates[0];
    let (mut best_rank, mut ties) = (rank(best), 1);
    for candidate in &candidates[1..] {
        let candidate_rank = rank(candidate);
        if candidate_rank < best_rank {
            (best, best_rank, ties) = (candidate, candidate_rank, 1);
        } else if candidate_rank == best_rank {
            ties += 1;
            if rng.random_range(0..ties) == 0 {
                best = candidate;
            }
        }
    }
    best
}
