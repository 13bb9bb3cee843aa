//! Cumulative counters, and the names under which gauges and counters are reported.

use crate::state::State;

/// Counted since the scheduler was made.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counters {
    /// Steps planned.
    pub(crate) steps: u64,
    /// Sequences admitted for the first time.
    pub(crate) admitted: u64,
    /// Prompt tokens of first admissions that came from the cache.
    pub(crate) cached_tokens: u64,
    /// Prompt tokens computed, before any retraction of their sequence.
    pub(crate) prompt_tokens: u64,
    /// Tokens computed again after a retraction or a resubmission.
    pub(crate) recomputed_tokens: u64,
    pub(crate) generated_tokens: u64,
    pub(crate) retracted: u64,
    pub(crate) retracted_input_tokens: u64,
    pub(crate) retracted_output_tokens: u64,
    /// Sequences that ended by stop or length.
    pub(crate) finished: u64,
    /// Sequences that ended by abort.
    pub(crate) aborted: u64,
    /// Sequences that ended by an error.
    pub(crate) failed: u64,
    /// Requests refused.
    pub(crate) refused: u64,
}

/// Every gauge and counter by name.
///
/// Tokens of memory: `total_tokens` is the pool; `free_tokens` nobody uses; `evictable_tokens` are
/// cached and unused; `used_tokens` are the rest.
pub(crate) fn collect(state: &State) -> Vec<(&'static str, f64)> {
    let counters = &state.counters;
    let page_size = u64::from(state.config.page_size);
    let free = state.memory.free_pages() as u64 * page_size;
    let evictable = state.memory.evictable_pages() as u64 * page_size;
    let total = state.config.pool_tokens();
    let count = |value: u64| value as f64;
    vec![
        ("num_running", count(state.running.len() as u64)),
        ("num_waiting", count(state.num_waiting() as u64)),
        ("num_waiting_uncached_tokens", count(state.queue.uncached_tokens())),
        ("num_requests", count(state.requests.len() as u64)),
        ("num_steps_in_flight", count(state.in_flight.len() as u64)),
        ("max_running", f64::from(state.config.max_running())),
        ("used_tokens", count(total - free - evictable)),
        ("free_tokens", count(free)),
        ("evictable_tokens", count(evictable)),
        ("total_tokens", count(total)),
        ("new_token_ratio", state.estimate.ratio()),
        ("steps_total", count(counters.steps)),
        ("admitted_sequences_total", count(counters.admitted)),
        ("prompt_tokens_total", count(counters.prompt_tokens)),
        ("recomputed_tokens_total", count(counters.recomputed_tokens)),
        ("cached_tokens_total", count(counters.cached_tokens)),
        ("generated_tokens_total", count(counters.generated_tokens)),
        ("retracted_requests_total", count(counters.retracted)),
        ("retracted_input_tokens_total", count(counters.retracted_input_tokens)),
        ("retracted_output_tokens_total", count(counters.retracted_output_tokens)),
        ("finished_sequences_total", count(counters.finished)),
        ("aborted_sequences_total", count(counters.aborted)),
        ("failed_sequences_total", count(counters.failed)),
        ("refused_requests_total", count(counters.refused)),
        ("evicted_tokens_total", count(state.memory.evicted_tokens())),
    ]
}
