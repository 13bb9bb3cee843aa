//! A workload of groups that share prefixes, for where no trace is at hand.

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::Deserialize;

use super::error::SimError;
use super::trace::{Request, Trace, mix};

/// Conversations in groups: all of a group begin with its system prompt, and every turn repeats the
/// turns before it. Requests come at random times (a Poisson process); popular groups come more
/// often (Zipf).
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SharedPrefix {
    /// Number of requests.
    pub requests: usize,
    /// Requests per second.
    pub rate: f64,
    /// Number of groups.
    pub groups: usize,
    /// Group k is chosen with a weight of `1 / (k + 1) ^ skew`.
    pub skew: f64,
    /// Tokens of a group's system prompt.
    pub system_tokens: u32,
    /// Tokens that each turn adds, half to one and a half times.
    pub turn_tokens: u32,
    /// Turns of a conversation.
    pub turns: usize,
    /// Conversations of a group that go on at a time.
    pub conversations: usize,
    /// Tokens of an answer, half to one and a half times.
    pub output_tokens: u32,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// Seed.
    pub seed: u64,
}

impl Default for SharedPrefix {
    fn default() -> Self {
        Self {
            requests: 2_000,
            rate: 10.0,
            groups: 32,
            skew: 0.8,
            system_tokens: 2_048,
            turn_tokens: 512,
            turns: 6,
            conversations: 4,
            output_tokens: 128,
            block_tokens: 64,
            seed: 0,
        }
    }
}

/// A conversation so far.
struct Conversation {
    blocks: Vec<u64>,
    tokens: u32,
    turns: usize,
}

impl SharedPrefix {
    /// Reads settings; what is left out has its default.
    ///
    /// # Errors
    /// Not JSON, an unknown name, or a value of another type or range.
    pub fn from_json(text: &[u8]) -> Result<Self, SimError> {
        let workload: Self =
            serde_json::from_slice(text).map_err(|error| SimError::Config(error.to_string()))?;
        let least = workload
            .groups
            .min(workload.turns)
            .min(workload.conversations)
            .min(workload.block_tokens as usize)
            .min(workload.turn_tokens as usize)
            .min(workload.output_tokens as usize);
        let rate = workload.rate.is_finite() && workload.rate > 0.0 && workload.skew.is_finite();
        if least == 0 || !rate {
            let rule = "groups, turns, conversations and tokens must be at least 1, rate above 0";
            return Err(SimError::Config(rule.to_owned()));
        }
        Ok(workload)
    }

    /// The requests.
    pub fn trace(&self) -> Trace {
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        let mut weights: Vec<f64> =
            (0..self.groups).map(|group| ((group + 1) as f64).powf(-self.skew)).collect();
        for group in 1..weights.len() {
            weights[group] += weights[group - 1];
        }
        let total = weights.last().copied().unwrap_or(0.0);
        let slots = self.groups * self.conversations;
        let mut open: Vec<Option<Conversation>> = (0..slots).map(|_| None).collect();
        let mut requests = Vec::with_capacity(self.requests);
        let (mut now_s, mut next_name) = (0.0, self.seed << 32);
        for _ in 0..self.requests {
            now_s -= (1.0 - rng.random_range(0.0..1.0_f64)).ln() / self.rate;
            let point = rng.random_range(0.0..total);
            let group = weights.partition_point(|weight| *weight < point).min(self.groups - 1);
            let slot = group * self.conversations + rng.random_range(0..self.conversations);
            let talk = open[slot].get_or_insert_with(|| self.begin(group as u64));
            talk.turns += 1;
            talk.tokens += around(&mut rng, self.turn_tokens);
            while talk.blocks.len() < talk.tokens.div_ceil(self.block_tokens) as usize {
                next_name += 1;
                talk.blocks.push(mix(next_name));
            }
            requests.push(Request {
                timestamp: 1e3 * now_s,
                input_length: talk.tokens,
                output_length: around(&mut rng, self.output_tokens),
                hash_ids: talk.blocks.clone(),
            });
            if talk.turns >= self.turns {
                open[slot] = None;
            }
        }
        Trace { requests, block_tokens: self.block_tokens }
    }

    fn begin(&self, group: u64) -> Conversation {
        let blocks = u64::from(self.system_tokens / self.block_tokens);
        let name = |block| mix(mix(self.seed ^ 0x6772_6f75) ^ (group << 32 | block));
        Conversation {
            blocks: (0..blocks).map(name).collect(),
            tokens: self.system_tokens,
            turns: 0,
        }
    }
}

fn around(rng: &mut ChaCha8Rng, tokens: u32) -> u32 {
    rng.random_range(tokens.div_ceil(2)..=tokens + tokens / 2)
}
