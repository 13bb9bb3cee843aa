//! Settings of the choice.

use serde::Deserialize;

use super::breaker::BreakerConfig;
use super::error::RouterError;

/// How a worker is chosen among those that may be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Policy {
    /// The least cost in tokens: what waits there, plus what of the prompt is not in its cache.
    /// Prompts that nobody has go to one of two workers that their beginning names.
    #[default]
    CacheAware,
    /// One after the other.
    RoundRobin,
    /// Any.
    Random,
    /// The less loaded of two random ones.
    PowerOfTwo,
    /// The least loaded one, by tokens.
    LeastLoad,
    /// The one with the fewest requests.
    LeastRequests,
    /// The one that the session's name names, unless it is overloaded; without a session, the least
    /// loaded one.
    Session,
    /// The one that the prompt's beginning names, unless it is overloaded.
    PrefixHash,
}

/// Settings of a [`super::Router`].
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// The policy.
    pub policy: Policy,
    /// Seed of the random policies and of ties.
    pub seed: u64,
    /// Prompt tokens that a request is worth besides its own, in a cost: it generates, or will.
    pub decode_weight: f64,
    /// Prompt tokens that a half-full KV pool is worth, in a cost; a full one a hundred times that.
    pub kv_weight: f64,
    /// A token of the prompt that is not in the cache costs one token, and so many more for each request
    /// that waits at the mean worker (but one more than wait at this one): those behind it wait for it
    /// too.
    pub contention_weight: f64,
    /// A prompt that nobody has goes where its beginning sends it as long as that costs at most this
    /// many times its tokens more than the cheapest worker.
    pub placement_slack: f64,
    /// `session` and `prefix_hash` pass over a worker with more than this many times the mean
    /// number of requests.
    pub load_bound: f64,
    /// Blocks of the prompt's beginning that `prefix_hash` and the placement of cold prompts read.
    pub head_blocks: usize,
    /// Requests that a worker may have at once; 0 is no limit.
    pub max_in_flight: u64,
    /// Seconds after which an engine's report no longer counts.
    pub report_max_age_s: f64,
    /// The circuit breakers.
    pub breaker: BreakerConfig,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            policy: Policy::CacheAware,
            seed: 0,
            decode_weight: 64.0,
            kv_weight: 64.0,
            contention_weight: 8.0,
            placement_slack: 0.5,
            load_bound: 1.25,
            head_blocks: 2,
            max_in_flight: 0,
            report_max_age_s: 2.0,
            breaker: BreakerConfig::default(),
        }
    }
}

impl Config {
    /// Reads settings; what is left out has its default.
    ///
    /// # Errors
    /// Not JSON, an unknown name, or a value of another type or range.
    pub fn from_json(text: &[u8]) -> Result<Self, RouterError> {
        let config: Self =
            serde_json::from_slice(text).map_err(|error| RouterError::Config(error.to_string()))?;
        config.check()?;
        Ok(config)
    }

    /// Checks the ranges.
    ///
    /// # Errors
    /// The message names the setting and its range.
    pub fn check(&self) -> Result<(), RouterError> {
        let at_least = |name: &str, value: f64, least: f64| {
            if value.is_finite() && value >= least {
                return Ok(());
            }
            Err(RouterError::Config(format!("{name} is {value}; it must be at least {least}")))
        };
        at_least("decode_weight", self.decode_weight, 0.0)?;
        at_least("kv_weight", self.kv_weight, 0.0)?;
        at_least("contention_weight", self.contention_weight, 0.0)?;
        at_least("placement_slack", self.placement_slack, 0.0)?;
        at_least("load_bound", self.load_bound, 1.0)?;
        at_least("head_blocks", self.head_blocks as f64, 1.0)?;
        at_least("report_max_age_s", self.report_max_age_s, 0.0)?;
        at_least("breaker.failures", f64::from(self.breaker.failures), 1.0)?;
        at_least("breaker.open_s", self.breaker.open_s, 0.0)?;
        at_least("breaker.max_open_s", self.breaker.max_open_s, self.breaker.open_s)
    }
}
