//! The prefix tree: token sequences to KV pages.
