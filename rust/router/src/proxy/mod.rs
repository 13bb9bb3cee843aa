//! `engine-router`: an HTTP proxy in front of workers, choosing by [`crate::core`].
//!
//! It reads of a request what the choice needs, forwards the client's own bytes, and hands the
//! worker's answer on frame by frame: no relay task, no channel, so a slow client slows the worker
//! and a client that leaves closes the worker's connection. It does not know tokens, templates or
//! what is in an answer, beyond the boundaries of server-sent events and the usage figures.

mod admin;
mod body;
mod config;
mod errors;
mod events;
mod forward;
mod handle;
mod health;
mod keeper;
mod log;
mod metrics;
mod parse;
mod reports;
mod request_body;
mod serve;
mod state;

pub use config::Config;
pub use serve::{ServeError, Server};
