//! Which worker serves a request, and the HTTP proxy that asks.
//!
//! [`core`] is the decision: workers, their load in tokens, the index of cached prefixes, the
//! policies, the circuit breakers. It knows no clock, no I/O and no threads. [`proxy`] is
//! `engine-router`, which stands in front of workers and asks it. [`sim`] is a fleet of engines in
//! simulated time.

pub mod core;
pub mod proxy;
pub mod sim;
