//! Requests with their arrival times, and which parts of their prompts are equal.

use std::collections::HashSet;

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use super::config::FleetConfig;
use super::error::SimError;
use crate::core::Prompt;

/// Token ids of prompts are below this, those of outputs are not.
pub(super) const PROMPT_IDS: u32 = 1 << 30;

/// One request. Serialised, it is a line of Mooncake's format.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub struct Request {
    /// Milliseconds since the beginning.
    pub timestamp: f64,
    /// Tokens of the prompt.
    pub input_length: u32,
    /// Tokens that it generates.
    pub output_length: u32,
    /// Names of the prompt's blocks: equal names in equal places after equal ones are equal tokens. What
    /// comes after the last named block is like no other prompt.
    #[serde(default)]
    pub hash_ids: Vec<u64>,
}

/// Requests in the order of their arrival.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trace {
    /// The requests.
    pub requests: Vec<Request>,
    /// Tokens of a block.
    pub block_tokens: u32,
}

impl Trace {
    /// Reads one request per line.
    ///
    /// # Errors
    /// A line is not a request, or one that no engine would take.
    pub fn parse(text: &str, block_tokens: u32) -> Result<Self, SimError> {
        let mut requests = Vec::new();
        for (index, line) in text.lines().enumerate() {
            if line.trim().is_empty() {
                continue;
            }
            let unusable = |reason: String| SimError::Trace { line: index + 1, reason };
            let request: Request =
                serde_json::from_str(line).map_err(|error| unusable(error.to_string()))?;
            if request.input_length == 0 || request.output_length == 0 {
                return Err(unusable("input_length and output_length must be at least 1".into()));
            }
            if !request.timestamp.is_finite() || request.timestamp < 0.0 {
                return Err(unusable("timestamp must be at least 0".to_owned()));
            }
            requests.push(request);
        }
        requests.sort_by(|one, two| one.timestamp.total_cmp(&two.timestamp));
        Ok(Self { requests, block_tokens })
    }

    /// One request per line, as [`Trace::parse`] reads them.
    pub fn to_lines(&self) -> String {
        let line = |request: &Request| {
            serde_json::to_string(request).expect("broken invariant: fields are numbers") + "\n"
        };
        self.requests.iter().map(line).collect()
    }

    /// The trace as a fleet sees it: cut, spread, copied and sped up.
    #[must_use]
    pub fn arranged(&self, config: &FleetConfig) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(config.seed ^ 0x7472_6163);
        let most = if config.max_requests == 0 { usize::MAX } else { config.max_requests };
        let mut requests = Vec::new();
        for request in self.requests.iter().take(most) {
            for copy in 0..u64::from(config.copies) {
                let late_ms = 1e3 * config.spread_s * rng.random_range(0.0..1.0);
                let name = |name: &u64| if copy == 0 { *name } else { mix(name ^ mix(copy)) };
                requests.push(Request {
                    timestamp: (request.timestamp + late_ms) / config.speed,
                    hash_ids: request.hash_ids.iter().map(name).collect(),
                    ..*request
                });
            }
        }
        requests.sort_by(|one, two| one.timestamp.total_cmp(&two.timestamp));
        Self { requests, block_tokens: self.block_tokens }
    }

    /// The prompt as a router sees it: its whole named blocks.
    pub(super) fn prompt(&self, index: usize) -> Prompt {
        let request = &self.requests[index];
        let whole = (request.input_length / self.block_tokens) as usize;
        let names = &request.hash_ids[..whole.min(request.hash_ids.len())];
        Prompt::from_block_names(names, u64::from(request.input_length), self.block_tokens)
    }

    /// The prompt as an engine sees it.
    pub(super) fn tokens(&self, index: usize) -> Vec<u32> {
        let request = &self.requests[index];
        let mut tokens = Vec::with_capacity(request.input_length as usize);
        let mut block = 0;
        while tokens.len() < request.input_length as usize {
            let left = request.input_length - tokens.len() as u32;
            let own = (1 << 63) | ((index as u64) << 24) | block as u64;
            let first = mix(request.hash_ids.get(block).copied().unwrap_or(own)) as u32;
            let ids = (0..left.min(self.block_tokens)).map(|step| first.wrapping_add(step));
            tokens.extend(ids.map(|id| id % PROMPT_IDS));
            block += 1;
        }
        tokens
    }

    /// The part of all prompt tokens that one cache without limit, which all requests share, would
    /// hold.
    pub fn ideal_hit_rate(&self) -> f64 {
        let mut known: HashSet<u64> = HashSet::new();
        let (mut hits, mut all) = (0_u64, 0_u64);
        for index in 0..self.requests.len() {
            let prompt = self.prompt(index);
            let met = prompt.hashes().iter().take_while(|hash| known.contains(*hash)).count();
            hits += prompt.tokens_of(met as u32).min(prompt.num_tokens() - 1);
            all += prompt.num_tokens();
            known.extend(prompt.hashes());
        }
        if all == 0 { 0.0 } else { hits as f64 / all as f64 }
    }

    /// Seconds from the first arrival to the last.
    pub fn duration_s(&self) -> f64 {
        match (self.requests.first(), self.requests.last()) {
            (Some(first), Some(last)) => (last.timestamp - first.timestamp) / 1e3,
            _ => 0.0,
        }
    }
}

/// The finaliser of `SplitMix64`: neighbours become strangers.
pub(super) fn mix(value: u64) -> u64 {
    let mut mixed = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}
