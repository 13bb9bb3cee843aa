//! What the tests drive the scheduler with: messages, blocks, a fake runner and an oracle.
#![allow(dead_code, unreachable_pub, reason = "every test binary uses another part")]
#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

pub mod blocks;
pub mod client;
pub mod engine;
pub mod messages;
pub mod oracle;
pub mod runner;

use scheduler::{Config, MixedSteps, Policy};

/// Token ids 0, 1, 2, ... are the texts a, b, c, ...
pub fn tokenizer_json(vocab_size: u32) -> String {
    let vocab: Vec<String> =
        (0..vocab_size).map(|id| format!("\"{}\": {id}", letter(id))).collect();
    format!(
        r#"{{"added_tokens": [], "decoder": {{"type": "ByteLevel", "add_prefix_space": true,
        "trim_offsets": true, "use_regex": true}}, "model": {{"type": "BPE", "vocab": {{{}}},
        "merges": []}}}}"#,
        vocab.join(", ")
    )
}

pub fn letter(id: u32) -> char {
    char::from_u32('a' as u32 + id).expect("a small vocabulary")
}

pub fn text_of(ids: &[u32]) -> String {
    ids.iter().map(|&id| letter(id)).collect()
}

/// Steps that are to take one second for each of so many tokens, and are expected to.
pub fn mixed_steps(tokens: u32, least_prompt_tokens: u32) -> MixedSteps {
    let target_s = f64::from(tokens);
    MixedSteps { target_s, fixed_s: 0.0, token_s: 1.0, least_prompt_tokens }
}

/// A small engine; tests change what they are about.
pub fn config() -> Config {
    Config {
        page_size: 4,
        num_pages: 65,
        max_running_requests: 8,
        max_queued_requests: None,
        max_queued_batch_requests: None,
        max_batch_tokens: 32,
        mixed_steps: None,
        max_chunk_tokens: None,
        max_context_len: 200,
        vocab_size: 20,
        eos_token_ids: vec![],
        policy: Policy::Fcfs,
        priority_scheduling: false,
        low_priority_first: false,
        aging_steps: 64,
        prefix_cache: true,
        overlap_depth: 0,
        waiting_timeout_s: None,
        new_token_ratio_init: 0.7,
        new_token_ratio_min: 0.1,
        new_token_ratio_decay_steps: 100,
        max_samples: 8,
        arena_bytes: 1 << 16,
        tokenizer_json: Some(tokenizer_json(20)),
    }
}
