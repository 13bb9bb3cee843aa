//! Settings of a simulation.

use serde::Deserialize;
use serde_json::{Map, Value};

use super::error::SimError;
use super::step_time::StepTime;
use crate::core;

/// How the routers choose: every policy of production that needs no session, and two baselines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FleetPolicy {
    /// [`core::Policy::CacheAware`].
    #[default]
    CacheAware,
    /// [`core::Policy::RoundRobin`].
    RoundRobin,
    /// [`core::Policy::Random`].
    Random,
    /// [`core::Policy::PowerOfTwo`].
    PowerOfTwo,
    /// [`core::Policy::LeastLoad`].
    LeastLoad,
    /// [`core::Policy::PrefixHash`].
    PrefixHash,
    /// The rule of SGLang's router as documented: a match of more than 0.3 of the prompt goes to the
    /// worker that has it, anything else to the one with the fewest requests; so does everything
    /// while the numbers of requests differ by more than 64 and by more than 1.5 times.
    SglangThreshold,
    /// The same rule as vLLM's router has it: 0.5, 32 and 1.1; prompts that nobody has go where the
    /// least is remembered.
    VllmRouter,
}

impl FleetPolicy {
    /// Production's name of it; none for a baseline.
    pub(super) fn production(self) -> Option<&'static str> {
        match self {
            Self::CacheAware => Some("cache_aware"),
            Self::RoundRobin => Some("round_robin"),
            Self::Random => Some("random"),
            Self::PowerOfTwo => Some("power_of_two"),
            Self::LeastLoad => Some("least_load"),
            Self::PrefixHash => Some("prefix_hash"),
            Self::SglangThreshold | Self::VllmRouter => None,
        }
    }
}

/// What every engine has.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EngineConfig {
    /// Tokens per page.
    pub page_size: u32,
    /// Tokens whose KV fits into the pool.
    pub pool_tokens: u32,
    /// Token budget of a step.
    pub max_batch_tokens: u32,
    /// Sequences that run at once.
    pub max_running_requests: u32,
    /// Tokens of a sequence.
    pub max_context_len: u32,
    /// Order of waiting requests: `fcfs` or `lpm`.
    pub policy: String,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            page_size: 16,
            pool_tokens: 840_000,
            max_batch_tokens: 8_192,
            max_running_requests: 256,
            max_context_len: 262_144,
            policy: "fcfs".to_owned(),
        }
    }
}

/// What routers hear of engines, besides their own requests.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Reports {
    /// Whether they hear anything: with each answer's header, and by polling.
    pub enabled: bool,
    /// Seconds between two polls of a worker; also between two looks at the queues.
    pub poll_s: f64,
    /// How old a report is when it arrives.
    pub delay_s: f64,
}

impl Default for Reports {
    fn default() -> Self {
        Self { enabled: true, poll_s: 1.0, delay_s: 0.02 }
    }
}

/// A worker dies, and comes back with an empty cache.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Failure {
    /// Which one.
    pub worker: usize,
    /// When, in simulated seconds.
    pub at_s: f64,
    /// For how long.
    pub down_s: f64,
}

/// Settings of a [`super::Fleet`].
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FleetConfig {
    /// Number of engines.
    pub workers: usize,
    /// Number of routers; each gets a random share of the requests and knows only these.
    pub routers: usize,
    /// How they choose.
    pub policy: FleetPolicy,
    /// Other settings of [`core::Config`]; the policy and the seed are given by the fleet.
    pub router: Map<String, Value>,
    /// The engines.
    pub engine: EngineConfig,
    /// The model of step time.
    pub step_time: StepTime,
    /// What the routers hear.
    pub reports: Reports,
    /// Who dies when.
    pub failures: Vec<Failure>,
    /// Seconds until the routers know of a death or a return.
    pub detect_s: f64,
    /// How many workers a request is sent to at most, as long as its answer has not begun.
    pub max_attempts: usize,
    /// Tokens of a block of the trace.
    pub block_tokens: u32,
    /// The trace's time runs this much faster.
    pub speed: f64,
    /// The trace's times are moved forward by up to so many of its seconds, at random: some are
    /// rounded to multiples of that.
    pub spread_s: f64,
    /// The trace is replayed so many times at once, with prompts that have nothing in common.
    pub copies: u32,
    /// Only so many first requests of the trace; 0 means all.
    pub max_requests: usize,
    /// Seed of everything that is random.
    pub seed: u64,
}

impl Default for FleetConfig {
    fn default() -> Self {
        Self {
            workers: 16,
            routers: 1,
            policy: FleetPolicy::default(),
            router: Map::new(),
            engine: EngineConfig::default(),
            step_time: StepTime::default(),
            reports: Reports::default(),
            failures: Vec::new(),
            detect_s: 5.0,
            max_attempts: 3,
            block_tokens: 512,
            speed: 1.0,
            spread_s: 0.0,
            copies: 1,
            max_requests: 0,
            seed: 0,
        }
    }
}

impl FleetConfig {
    /// Reads settings; what is left out has its default.
    ///
    /// # Errors
    /// Not JSON, an unknown name, or a value of another type or range.
    pub fn from_json(text: &[u8]) -> Result<Self, SimError> {
        let config: Self =
            serde_json::from_slice(text).map_err(|error| SimError::Config(error.to_string()))?;
        config.check()?;
        Ok(config)
    }

    fn check(&self) -> Result<(), SimError> {
        let require = |holds: bool, rule: &str| {
            if holds { Ok(()) } else { Err(SimError::Config(rule.to_owned())) }
        };
        require((1..=1 << 14).contains(&self.workers), "workers must be 1 to 16384")?;
        require((1..=64).contains(&self.routers), "routers must be 1 to 64")?;
        require(self.copies >= 1, "copies must be at least 1")?;
        require(self.block_tokens >= 1, "block_tokens must be at least 1")?;
        require(self.max_attempts >= 1, "max_attempts must be at least 1")?;
        require(
            self.step_time.is_usable(),
            "step_time must be finite, not negative, fixed_s above 0",
        )?;
        require(self.engine.page_size >= 1, "engine.page_size must be at least 1")?;
        let positive = |value: f64| value.is_finite() && value > 0.0;
        require(positive(self.speed), "speed must be above 0")?;
        require(positive(self.reports.poll_s), "reports.poll_s must be above 0")?;
        let not_negative = |value: f64| value.is_finite() && value >= 0.0;
        require(not_negative(self.reports.delay_s), "reports.delay_s must be at least 0")?;
        require(not_negative(self.spread_s), "spread_s must be at least 0")?;
        require(not_negative(self.detect_s), "detect_s must be at least 0")?;
        for failure in &self.failures {
            require(failure.worker < self.workers, "failures name workers from 0 to workers - 1")?;
            require(
                not_negative(failure.at_s) && not_negative(failure.down_s),
                "failures need at_s and down_s of at least 0",
            )?;
        }
        Ok(())
    }

    /// Settings of one router's core.
    pub(super) fn core_config(&self, name: &str, router: usize) -> Result<core::Config, SimError> {
        let mut settings = self.router.clone();
        for (key, value) in [
            ("policy", Value::from(name)),
            ("seed", Value::from(self.seed.wrapping_add(router as u64))),
        ] {
            if settings.insert(key.to_owned(), value).is_some() {
                return Err(SimError::Config(format!(
                    "router.{key} is given by the fleet's {key}"
                )));
            }
        }
        Ok(core::Config::from_json(Value::from(settings).to_string().as_bytes())?)
    }
}
