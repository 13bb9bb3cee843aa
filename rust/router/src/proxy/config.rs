//! Settings of the proxy. Their defaults, flags and help stand with the command line.

use serde::Deserialize;

use super::serve::ServeError;
use crate::core;

/// All settings; every one must be given.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Address to listen on.
    pub host: String,
    /// Port to listen on; 0 takes a free one.
    pub port: u16,
    /// Base addresses of the workers at start.
    pub workers: Vec<String>,
    /// Settings of the choice.
    pub choice: core::Config,
    /// What clients must send as a bearer token.
    pub api_key: Option<String>,
    /// What whoever changes the workers must send as a bearer token.
    pub admin_api_key: Option<String>,
    /// Sent to the workers in place of the client's own `Authorization`.
    pub worker_api_key: Option<String>,
    /// Largest request body.
    pub max_body_bytes: usize,
    /// Requests in flight at once; 0 is no limit.
    pub max_in_flight: usize,
    /// Requests that may wait.
    pub queue_size: usize,
    /// How long one may wait.
    pub queue_timeout_s: f64,
    /// Times that a request may reach a worker.
    pub max_attempts: usize,
    /// Part of the requests that may be tried again after a worker's refusal.
    pub retry_budget: f64,
    /// Longest time to connect to a worker.
    pub connect_timeout_s: f64,
    /// Longest time until a worker's answer begins.
    pub first_byte_timeout_s: f64,
    /// Longest time between two parts of an answer.
    pub idle_timeout_s: f64,
    /// Path that tells a worker's health.
    pub health_path: String,
    /// Time between two probes of a worker.
    pub health_interval_s: f64,
    /// Longest time that a probe may take.
    pub health_timeout_s: f64,
    /// Failed probes in a row that make a worker down.
    pub health_failures: u32,
    /// Whether idle workers are asked for their load.
    pub load_poll: bool,
    /// Tokens that a worker's cache holds, unless it tells.
    pub cache_tokens: usize,
    /// Bytes of a prompt's blocks.
    pub block_bytes: usize,
    /// Bytes of text that make a token, roughly.
    pub bytes_per_token: f64,
    /// Longest idle time of a client's connection.
    pub keep_alive_timeout_s: f64,
    /// Time that requests in flight get after a signal.
    pub shutdown_grace_s: f64,
    /// Threads that serve.
    pub threads: usize,
    /// Whether another process may listen on the same port, for a restart without a gap.
    pub reuse_port: bool,
}

impl Config {
    /// Reads settings from JSON.
    ///
    /// # Errors
    /// A setting is missing, unknown or out of range; the message names it.
    pub fn from_json(text: &[u8]) -> Result<Self, ServeError> {
        let config: Self =
            serde_json::from_slice(text).map_err(|error| ServeError::Config(error.to_string()))?;
        config.choice.check().map_err(|error| ServeError::Config(error.to_string()))?;
        for (name, value) in [
            ("max_attempts", config.max_attempts),
            ("block_bytes", config.block_bytes),
            ("threads", config.threads),
            ("health_failures", config.health_failures as usize),
        ] {
            if value == 0 {
                return Err(ServeError::Config(format!("{name} is 0; it must be at least 1")));
            }
        }
        let above_zero = [
            ("queue_timeout_s", config.queue_timeout_s),
            ("connect_timeout_s", config.connect_timeout_s),
            ("first_byte_timeout_s", config.first_byte_timeout_s),
            ("idle_timeout_s", config.idle_timeout_s),
            ("health_interval_s", config.health_interval_s),
            ("health_timeout_s", config.health_timeout_s),
            ("keep_alive_timeout_s", config.keep_alive_timeout_s),
            ("bytes_per_token", config.bytes_per_token),
        ];
        for (name, value) in above_zero {
            if !(value > 0.0 && value <= 1e9) {
                return Err(ServeError::Config(format!("{name} is {value}; it must be above 0")));
            }
        }
        if !(0.0..=1e9).contains(&config.shutdown_grace_s)
            || !(0.0..=1.0).contains(&config.retry_budget)
        {
            let text = "shutdown_grace_s must be at least 0, retry_budget between 0 and 1";
            return Err(ServeError::Config(text.to_owned()));
        }
        Ok(config)
    }

    /// Blocks that a cache of so many tokens holds.
    pub(super) fn blocks_of(&self, tokens: usize) -> usize {
        (tokens as f64 * self.bytes_per_token / self.block_bytes as f64) as usize
    }
}
