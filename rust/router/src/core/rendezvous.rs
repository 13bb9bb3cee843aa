//! Highest-random-weight hashing: every router that knows the same names ranks them alike.

/// The weight of a worker for a key. The worker with the highest one wins; when it leaves, only its
/// keys move.
pub(super) fn weight(key: u64, worker: u64) -> u64 {
    // The finaliser of SplitMix64 over both.
    let mut mixed = key ^ worker.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}

/// The two highest of `(slot, weight)`, best first.
pub(super) fn top_two<T: Copy>(ranked: impl Iterator<Item = (T, u64)>) -> (Option<T>, Option<T>) {
    let mut first: Option<(T, u64)> = None;
    let mut second: Option<(T, u64)> = None;
    for candidate in ranked {
        if first.is_none_or(|best| candidate.1 > best.1) {
            second = first.replace(candidate);
        } else if second.is_none_or(|best| candidate.1 > best.1) {
            second = Some(candidate);
        }
    }
    (first.map(|one| one.0), second.map(|one| one.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_spread_and_only_those_of_a_lost_worker_move() {
        let workers: Vec<u64> = (0..8).map(|n| n * 77 + 5).collect();
        let best = |key, without: Option<u64>| {
            let left = workers.iter().copied().filter(|worker| Some(*worker) != without);
            top_two(left.map(|worker| (worker, weight(key, worker)))).0.expect("there are some")
        };
        let mut counts = std::collections::HashMap::new();
        for key in 0..8_000 {
            let home = best(key, None);
            *counts.entry(home).or_insert(0) += 1;
            let moved = best(key, Some(workers[3]));
            assert_eq!(moved == home, home != workers[3]);
        }
        assert!(counts.values().all(|count| (850..1_150).contains(count)), "{counts:?}");
    }
}
