//! The settings of a scheduler, resolved and checked; mirrors `python/engine/core_config.py`.

use serde::Deserialize;

use crate::error::{Error, Result};

/// How waiting requests of equal priority are ordered.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Policy {
    /// By arrival.
    Fcfs,
    /// Longest cached prefix first, then by arrival.
    Lpm,
}

/// How long steps may take in which some sequences decode and others compute prompts. Fields as in
/// `MixedSteps`, where they are explained.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the Python dataclass of the same fields documents them")]
pub struct MixedSteps {
    pub target_s: f64,
    pub fixed_s: f64,
    pub token_s: f64,
    pub least_prompt_tokens: u32,
}

/// Everything a scheduler needs to know. Fields as in `CoreConfig`, where they are explained.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the Python dataclass of the same fields documents them")]
pub struct Config {
    pub page_size: u32,
    pub num_pages: u32,
    pub max_running_requests: u32,
    pub max_queued_requests: Option<u32>,
    pub max_queued_batch_requests: Option<u32>,
    pub max_batch_tokens: u32,
    pub mixed_steps: Option<MixedSteps>,
    pub max_chunk_tokens: Option<u32>,
    pub max_context_len: u32,
    pub vocab_size: u32,
    pub eos_token_ids: Vec<u32>,
    pub policy: Policy,
    pub priority_scheduling: bool,
    pub low_priority_first: bool,
    pub aging_steps: u32,
    pub prefix_cache: bool,
    pub overlap_depth: u32,
    pub waiting_timeout_s: Option<f64>,
    pub new_token_ratio_init: f64,
    pub new_token_ratio_min: f64,
    pub new_token_ratio_decay_steps: u32,
    pub max_samples: u32,
    pub arena_bytes: usize,
    pub tokenizer_json: Option<String>,
}

/// Of every this many tokens of budget, one is kept from decoding rows for prompts.
const PROMPT_SHARE: u32 = 8;

/// Largest value that the i32 columns of a plan can hold.
const MAX_INDEX: u32 = i32::MAX as u32;

impl Config {
    /// Reads and checks the JSON that `CoreConfig.to_json` writes.
    ///
    /// # Errors
    ///
    /// [`Error::ConfigJson`] if it cannot be read, [`Error::Config`] if a value is out of range.
    pub fn from_json(json: &[u8]) -> Result<Self> {
        let config: Self = serde_json::from_slice(json)?;
        config.check()?;
        Ok(config)
    }

    /// Checks every range that the scheduler relies on.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] names the first field that is out of range.
    pub fn check(&self) -> Result<()> {
        at_least("page_size", self.page_size, 1)?;
        at_least("num_pages", self.num_pages, 2)?;
        at_least("max_running_requests", self.max_running_requests, 1)?;
        at_least("max_batch_tokens", self.max_batch_tokens, 2)?;
        at_least("max_context_len", self.max_context_len, 2)?;
        at_least("vocab_size", self.vocab_size, 1)?;
        at_least("max_samples", self.max_samples, 1)?;
        at_least("aging_steps", self.aging_steps, 1)?;
        at_least("new_token_ratio_decay_steps", self.new_token_ratio_decay_steps, 1)?;
        for (field, value) in [
            ("max_queued_requests", self.max_queued_requests),
            ("max_queued_batch_requests", self.max_queued_batch_requests),
            ("max_chunk_tokens", self.max_chunk_tokens),
        ] {
            at_least(field, value.unwrap_or(1), 1)?;
        }
        for (field, value) in [
            ("num_pages", self.num_pages),
            ("page_size", self.page_size),
            ("max_context_len", self.max_context_len),
            ("max_batch_tokens", self.max_batch_tokens),
            ("max_running_requests", self.max_running_requests),
            ("vocab_size", self.vocab_size),
        ] {
            check(value <= MAX_INDEX, field, &value, || format!("must be at most {MAX_INDEX}"))?;
        }
        self.check_ratios()?;
        self.check_mixed_steps()?;
        let required = self.min_arena_bytes();
        check(self.arena_bytes >= required, "arena_bytes", &self.arena_bytes, || {
            format!("a step of these settings needs up to {required}; raise arena_bytes")
        })
    }

    fn check_ratios(&self) -> Result<()> {
        let (init, min) = (self.new_token_ratio_init, self.new_token_ratio_min);
        check((0.0..=1.0).contains(&init), "new_token_ratio_init", &init, || {
            "must be in [0, 1]".into()
        })?;
        check((0.0..=init).contains(&min), "new_token_ratio_min", &min, || {
            format!("must be in [0, new_token_ratio_init = {init}]")
        })?;
        let timeout = self.waiting_timeout_s.unwrap_or(1.0);
        check(timeout > 0.0, "waiting_timeout_s", &timeout, || {
            "must be positive; leave it out for no time-out".into()
        })
    }

    fn check_mixed_steps(&self) -> Result<()> {
        let Some(mixed) = self.mixed_steps else { return Ok(()) };
        at_least("mixed_steps.least_prompt_tokens", mixed.least_prompt_tokens, 1)?;
        for (field, value) in
            [("mixed_steps.target_s", mixed.target_s), ("mixed_steps.token_s", mixed.token_s)]
        {
            check(value.is_finite() && value > 0.0, field, &value, || "must be positive".into())?;
        }
        let fixed_s = mixed.fixed_s;
        check(fixed_s.is_finite() && fixed_s >= 0.0, "mixed_steps.fixed_s", &fixed_s, || {
            "must not be negative".into()
        })
    }

    /// Sequences that may run at once.
    ///
    /// One token in eight of the budget is out of reach of decoding rows, so that a prompt always
    /// progresses by that much; no more sequences run than leaves every one of them its next token.
    pub fn max_running(&self) -> u32 {
        self.max_running_requests.min(self.max_batch_tokens - self.prompt_share())
    }

    /// Tokens of every step that prompts may have, whatever decodes; less where steps are to be short.
    pub(crate) fn prompt_share(&self) -> u32 {
        self.max_batch_tokens.div_ceil(PROMPT_SHARE)
    }

    /// Pages that can hold KV: all but page 0.
    pub fn usable_pages(&self) -> u32 {
        self.num_pages - 1
    }

    /// Tokens whose KV fits into the pool.
    pub fn pool_tokens(&self) -> u64 {
        u64::from(self.usable_pages()) * u64::from(self.page_size)
    }

    /// Pages that `tokens` tokens occupy.
    pub fn pages_for(&self, tokens: u32) -> u32 {
        tokens.div_ceil(self.page_size)
    }

    /// Bytes of the arena beyond what any step needs: room for the lists that requests may bring.
    pub(crate) fn spare_arena_bytes(&self) -> usize {
        self.arena_bytes.saturating_sub(self.min_arena_bytes())
    }

    /// Bytes that any step without log-probs, bias or stop ids may need: every running sequence's
    /// row, a full budget of tokens, and one sequence entering with a full context.
    fn min_arena_bytes(&self) -> usize {
        use crate::plan;
        let longest = u64::from(self.max_context_len).min(self.pool_tokens()) as usize;
        plan::OVERHEAD_BYTES
            + self.max_running() as usize * plan::RUNNING_ROW_BYTES
            + 4 * self.max_running_requests as usize
            + self.max_batch_tokens as usize * plan::TOKEN_BYTES
            + plan::OPENED_BYTES
            + 4 * longest
            + plan::PAGE_WRITE_BYTES * (longest / self.page_size as usize + 1)
            + plan::PAGE_MOVE_BYTES
    }
}

fn at_least(field: &'static str, value: u32, minimum: u32) -> Result<()> {
    check(value >= minimum, field, &value, || format!("must be at least {minimum}"))
}

fn check(
    holds: bool,
    field: &'static str,
    value: &impl ToString,
    rule: impl FnOnce() -> String,
) -> Result<()> {
    if holds {
        Ok(())
    } else {
        Err(Error::Config { field, value: value.to_string(), rule: rule() })
    }
}
