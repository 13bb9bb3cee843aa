//! How long a step takes: the only part of the fleet that is modelled.

use serde::{Deserialize, Serialize};

/// What one step computes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// Tokens of rows that compute more than one.
    pub prompt_tokens: u64,
    /// Rows that compute one token.
    pub decode_rows: u64,
    /// Tokens that the decode rows attend to.
    pub decode_context: u64,
    /// Pairs of a prompt token and a token that it attends to.
    pub prompt_pairs: f64,
}

impl Work {
    /// Adds a row of `query_len` tokens after `computed_len` others.
    pub fn add_row(&mut self, query_len: u64, computed_len: u64) {
        if query_len == 1 {
            self.decode_rows += 1;
            self.decode_context += computed_len + 1;
        } else {
            let (query, computed) = (query_len as f64, computed_len as f64);
            self.prompt_tokens += query_len;
            self.prompt_pairs += query * (computed + f64::midpoint(query, 1.0));
        }
    }
}

/// Seconds of a step, linear in its [`Work`].
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct StepTime {
    /// Of every step.
    pub fixed_s: f64,
    /// Per prompt token.
    pub prompt_token_s: f64,
    /// Per decoding row.
    pub decode_row_s: f64,
    /// Per token of a decoding row's context.
    pub decode_context_s: f64,
    /// Per pair of a prompt token and a token that it attends to.
    pub prompt_pair_s: f64,
}

impl Default for StepTime {
    /// An 8B model in 16 bits on one H200, from its data sheet and not measured: 16 GB of weights
    /// and 128 KiB of KV per token read at 4 TB/s, 16 and 0.0005 GFLOP per token and pair at
    /// 400 TFLOP/s, 2 ms of launches.
    fn default() -> Self {
        Self {
            fixed_s: 6e-3,
            prompt_token_s: 40e-6,
            decode_row_s: 15e-6,
            decode_context_s: 33e-9,
            prompt_pair_s: 1.3e-9,
        }
    }
}

impl StepTime {
    /// How long a step of this work takes.
    pub fn seconds(&self, work: &Work) -> f64 {
        self.fixed_s
            + self.prompt_token_s * work.prompt_tokens as f64
            + self.decode_row_s * work.decode_rows as f64
            + self.decode_context_s * work.decode_context as f64
            + self.prompt_pair_s * work.prompt_pairs
    }

    pub(super) fn is_usable(&self) -> bool {
        let all = [
            self.fixed_s,
            self.prompt_token_s,
            self.decode_row_s,
            self.decode_context_s,
            self.prompt_pair_s,
        ];
        all.iter().all(|value| value.is_finite() && *value >= 0.0) && self.fixed_s > 0.0
    }
}
