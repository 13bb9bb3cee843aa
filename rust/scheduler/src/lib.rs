//! Requests, queue policies, plans and commits.
//!
//! A [`Scheduler`] decides what every step of the engine computes: it takes requests
//! (`engine/messages.py`), writes a plan for each step into the caller's memory and takes the step's
//! result (`docs/plan.md`), and answers with events. It is pure and deterministic: no clock, no
//! randomness, no I/O, no Python; it knows nothing of models, devices or HTTP.
//!
//! How it is made: `scheduler` is the facade; `state` what there is and how a sequence moves through
//! it; `planner`, `admission` and `retraction` make plans, `committer` takes results; `queue`,
//! `sharing`, `estimate`, `pace`, `memory`, `slots`, `request`, `sequence` and `output` each own one kind of
//! state; `messages`, `validation`, `plan`, `result` and `wire` are the edges.

mod admission;
mod committer;
mod config;
mod error;
mod estimate;
mod integrity;
mod memory;
mod messages;
mod namespaces;
mod output;
mod pace;
mod plan;
mod planner;
mod queue;
mod request;
mod result;
mod retraction;
mod scheduler;
mod sequence;
mod sharing;
mod slab;
mod slots;
mod state;
mod stats;
mod step;
mod validation;
mod wire;

pub use config::{Config, MixedSteps, Policy};
pub use error::{Error, IntegrityError, Result};
pub use scheduler::{Scheduler, Target, Unready};
