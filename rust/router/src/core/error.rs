//! What a caller of the router can get wrong, or find.

use thiserror::Error;

/// Why a call did nothing.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum RouterError {
    /// No worker is ready and trusted.
    #[error("no worker is available")]
    Unavailable,
    /// Every worker that could serve has as many requests as it may.
    #[error("every worker is at its limit of {0} requests")]
    Busy(u64),
    /// There is no such worker.
    #[error("there is no worker {0}")]
    UnknownWorker(u32),
    /// The name is taken.
    #[error("there is already a worker named {0}")]
    DuplicateWorker(String),
    /// The registry is full.
    #[error("there are already {0} workers, the most that can be")]
    TooManyWorkers(usize),
    /// There is no such outcome.
    #[error("{0:?} is no outcome: completed, failed, refused or cancelled")]
    UnknownOutcome(String),
    /// The settings cannot be read.
    #[error("the router's settings are unusable: {0}")]
    Config(String),
}
