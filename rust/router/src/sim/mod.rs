//! A fleet of engines behind routers, in simulated time.
//!
//! Everything that decides is the production code: [`crate::core`] chooses workers, and each worker
//! is a whole [`scheduler::Scheduler`] with its prefix tree, page pool, admission and eviction. Only
//! the duration of a step is a model ([`StepTime`]). Baselines that production does not have
//! ([`FleetPolicy::SglangThreshold`], [`FleetPolicy::VllmRouter`]) exist here alone.
//!
//! The same configuration and trace give the same [`Summary`], bit for bit: there is no clock, no
//! thread and no randomness but the seed's.

mod chooser;
mod config;
mod engine;
mod error;
mod fleet;
mod messages;
mod step_time;
mod summary;
mod threshold;
mod trace;
mod workload;

pub use config::{EngineConfig, Failure, FleetConfig, FleetPolicy, Reports};
pub use error::SimError;
pub use fleet::{End, Fleet, Outcomes, Record};
pub use step_time::{StepTime, Work};
pub use summary::{Quantiles, Summary, Window};
pub use trace::{Request, Trace};
pub use workload::SharedPrefix;
