//! Behaviour of the crate: its written rules, the `tokenizers` library's own results, and random
//! streams against a naive model.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

mod fixtures;
mod patterns;
mod properties;
mod rules;
mod vocabulary;
