//! What a caller of the scheduler can do wrong.

/// Why the scheduler could not do what it was asked to.
///
/// Nothing was changed when one of these is returned.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The configuration is not JSON, lacks a field or has an unknown one.
    #[error("the core configuration cannot be read: {0}")]
    ConfigJson(#[from] serde_json::Error),
    /// A value of the configuration is out of range.
    #[error("{field} is {value}: {rule}")]
    Config {
        /// Name of the field.
        field: &'static str,
        /// Its value, as text.
        value: String,
        /// What is allowed, and what to do about it.
        rule: String,
    },
    /// The tokenizer cannot be used to make text.
    #[error("tokenizer: {0}")]
    Tokenizer(#[from] text::Error),
    /// A `Submit` that is not what `engine/messages.py` describes.
    #[error("malformed submit message: {0}")]
    Message(#[from] rmp_serde::decode::Error),
    /// A client used the key of one of its live requests again.
    #[error("client {client} has a live request with key {key} already")]
    DuplicateKey {
        /// The client.
        client: i64,
        /// Its key.
        key: u64,
    },
    /// A plan was asked for while too many steps are in flight.
    #[error("{in_flight} steps are in flight; overlap_depth {depth} allows no further plan")]
    TooManySteps {
        /// Steps planned and not committed.
        in_flight: usize,
        /// The configured depth.
        depth: u32,
    },
    /// The arena is smaller than configured.
    #[error("the plan arena has {actual} bytes; arena_bytes is {required}")]
    ArenaTooSmall {
        /// Bytes given.
        actual: usize,
        /// Bytes configured.
        required: usize,
    },
    /// A result came while no step is in flight.
    #[error("no step is in flight")]
    NoStepInFlight,
    /// The result belongs to another step than the oldest in flight.
    #[error("the result is of step {actual}; the oldest step in flight is {expected}")]
    WrongStep {
        /// Step that the block names.
        actual: i64,
        /// Step that is due.
        expected: u64,
    },
    /// The result block is malformed.
    #[error("malformed step result: {0}")]
    Result(String),
}

/// An invariant that does not hold: a bug of this crate or of the prefix tree.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct IntegrityError(pub(crate) String);

/// `Result` with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;
