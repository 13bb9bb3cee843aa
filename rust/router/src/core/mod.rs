//! The choice of a worker: synchronous, deterministic, without clock or I/O.
//!
//! A [`Router`] holds the registry of workers, what each has to do ([`Load`], in tokens), what each
//! probably has in its cache ([`PrefixIndex`]) and whether it may be trusted ([`Breaker`]). All time
//! enters as seconds (`now`), all randomness comes from the configured seed. The proxy, data
//! parallelism inside one server, tests and the simulator all use this one implementation.
//!
//! ```
//! use router::core::{BlockShape, Config, Outcome, Prompt, Router, Selection, WorkerOptions};
//!
//! let mut router = Router::new(Config::default());
//! for name in ["http://a:30000", "http://b:30000"] {
//!     router.add_worker(&WorkerOptions { name, ..WorkerOptions::default() })?;
//! }
//! let shape = BlockShape { bytes: 4, tokens: 1 };
//! let prompt = Prompt::new(b"the same long prompt", 5, shape, b"");
//!
//! let first = router.select(&prompt, &Selection::default(), 0.0)?;
//! router.started(first.ticket);
//! router.finished(first.ticket, Outcome::Completed, 0.2);
//!
//! let second = router.select(&prompt, &Selection::default(), 1.0)?;
//! assert_eq!((second.worker, second.cached_tokens), (first.worker, 5));
//! # Ok::<(), router::core::RouterError>(())
//! ```

mod blocks;
mod breaker;
mod config;
mod error;
mod index;
mod load;
mod owners;
mod policy;
mod registry;
mod rendezvous;
mod router;
mod tickets;

pub use blocks::{BlockShape, Prompt};
pub use breaker::{Breaker, BreakerConfig, BreakerState};
pub use config::{Config, Policy};
pub use error::RouterError;
pub use index::{PrefixIndex, Slot};
pub use load::{Load, Report};
pub use registry::{Worker, WorkerId, WorkerOptions, WorkerState};
pub use router::{Choice, Reason, Router, Selection};
pub use tickets::{Outcome, TicketId};
