//! What a caller of the simulator can get wrong.

use thiserror::Error;

/// Why there is no simulation.
#[derive(Debug, Error)]
pub enum SimError {
    /// The settings cannot be read, or one is out of range.
    #[error("the fleet's settings are unusable: {0}")]
    Config(String),
    /// A line of the trace cannot be read.
    #[error("line {line} of the trace is unusable: {reason}")]
    Trace {
        /// Counted from 1.
        line: usize,
        /// What is wrong with it.
        reason: String,
    },
    /// The router refused its settings.
    #[error(transparent)]
    Router(#[from] crate::core::RouterError),
    /// The scheduler refused its settings.
    #[error("the engine's settings are unusable: {0}")]
    Engine(#[from] scheduler::Error),
}
