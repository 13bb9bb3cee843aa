//! The model that the fake runner runs, and what a request should give when it is alone.

use scheduler::Config;

use super::messages::{Matched, Submit};
use super::text_of;

/// KV of a position: a digest of all tokens up to it. 0 stands for none.
pub type Digest = u64;

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The digest after one more token.
pub fn extend(digest: Digest, token: u32) -> Digest {
    mix(digest.wrapping_mul(31).wrapping_add(u64::from(token) + 1)) | 1
}

pub fn digest(tokens: &[u32]) -> Digest {
    tokens.iter().fold(0, |digest, &token| extend(digest, token))
}

/// The token sampled after the tokens of `context`, by a slot with these outputs.
pub fn sample(
    context: Digest,
    seed: u64,
    outputs: &[u32],
    position: u32,
    suppressed: &[u32],
    vocab_size: u32,
) -> u32 {
    let counts = digest(outputs);
    let noise = mix(context ^ mix(seed ^ mix(counts ^ u64::from(position))));
    let mut token = (noise % u64::from(vocab_size)) as u32;
    while suppressed.contains(&token) {
        token = (token + 1) % vocab_size;
    }
    token
}

/// Log-prob of a token after a context.
pub fn logprob(context: Digest, token: u32) -> f32 {
    -((mix(context ^ (u64::from(token) << 32)) % 10_000) as f32) / 1000.0
}

/// The `n` best tokens after a context.
pub fn top(context: Digest, n: usize, vocab_size: u32) -> Vec<(f64, u32)> {
    let mut all: Vec<_> = (0..vocab_size).map(|id| (f64::from(logprob(context, id)), id)).collect();
    all.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    all.truncate(n);
    all
}

/// Seed of a sample, as `docs/plan.md` defines it.
pub fn seed(submit: &Submit, sample: usize) -> u64 {
    match sample as u64 {
        0 => submit.sampling.seed,
        k => mix(submit.sampling.seed.wrapping_add(k.wrapping_mul(0x9e37_79b9_7f4a_7c15))),
    }
}

/// How a sample goes when its request is alone on an engine.
#[derive(Clone, Debug)]
pub struct Solo {
    pub outputs: Vec<u32>,
    pub text: String,
    pub reason: &'static str,
    pub matched: Matched,
}

pub fn limit(submit: &Submit, config: &Config) -> usize {
    let pool = (config.num_pages - 1) as usize * config.page_size as usize;
    let most = (config.max_context_len as usize).min(pool + 1);
    let max_new = submit.sampling.max_new_tokens.map_or(usize::MAX, |max| max as usize);
    submit.prompt.len().saturating_add(max_new).min(most)
}

pub fn solo(submit: &Submit, k: usize, config: &Config) -> Solo {
    let sampling = &submit.sampling;
    let min_new = sampling.min_new_tokens as usize;
    let mut stop_ids = sampling.stop_token_ids.clone();
    if !sampling.ignore_eos {
        stop_ids.extend(&config.eos_token_ids);
    }
    let limit = limit(submit, config) - submit.prompt.len();
    let mut context = digest(&submit.prompt);
    let mut outputs = Vec::new();
    let finish = |outputs: Vec<u32>, text, reason, matched| Solo { outputs, text, reason, matched };
    while outputs.len() < limit {
        let suppressed = if outputs.len() < min_new { &stop_ids[..] } else { &[] };
        let position = (submit.prompt.len() + outputs.len()) as u32;
        let token =
            sample(context, seed(submit, k), &outputs, position, suppressed, config.vocab_size);
        context = extend(context, token);
        outputs.push(token);
        if outputs.len() > min_new && stop_ids.contains(&token) {
            let shown = outputs.len() - usize::from(!sampling.no_stop_trim);
            let text = text_of(&outputs[..shown]);
            return finish(outputs, text, "stop", Matched::Token(token));
        }
        // Stop strings are looked for from the output on that may end the sequence.
        let free = min_new.saturating_sub(1).min(outputs.len());
        let tail = text_of(&outputs[free..]);
        let found = sampling.stop.iter().filter_map(|stop| Some((tail.find(stop)?, stop)));
        let first = found.min_by_key(|(at, stop)| (at + stop.len(), *at));
        if let Some((at, stop)) = first {
            let end = if sampling.no_stop_trim { at + stop.len() } else { at };
            let text = text_of(&outputs[..free]) + &tail[..end];
            return finish(outputs, text, "stop", Matched::Text(stop.clone()));
        }
    }
    let text = text_of(&outputs);
    finish(outputs, text, "length", Matched::No)
}
