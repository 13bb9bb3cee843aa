//! Random requests on tiny engines: everything ends exactly once, with the outputs of its solo run,
//! whatever is evicted, retracted, aborted, cut or overlapped.

#![allow(clippy::float_cmp, reason = "log-probs pass through unchanged")]

mod support;

use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use scheduler::{Config, MixedSteps, Policy, Target, Unready};
use support::engine::{CLIENT, Engine};
use support::messages::{LogprobRequest, Matched, Submit, submit};
use support::oracle::{self, Solo};
use support::runner::Mischief;

/// What a run is about.
#[derive(Clone, Copy, Debug)]
struct Setup {
    seed: u64,
    overlap_depth: u32,
    mischief: bool,
}

fn random_config(rng: &mut ChaCha8Rng, setup: Setup) -> Config {
    let page_size = *[1, 2, 4, 16].choose(rng).expect("there is a choice");
    // Prompts are made of two or three ids; the others keep outputs from stopping at once.
    let vocab_size = rng.random_range(2..=12);
    let usable = rng.random_range(20..80_u32).div_ceil(page_size);
    let max_batch_tokens = rng.random_range(2..24);
    Config {
        page_size,
        num_pages: usable + 1,
        max_running_requests: rng.random_range(1..9),
        max_queued_requests: rng.random_bool(0.3).then(|| rng.random_range(3..10)),
        max_queued_batch_requests: None,
        max_batch_tokens,
        mixed_steps: rng.random_bool(0.4).then(|| MixedSteps {
            target_s: rng.random_range(0.001..0.2),
            fixed_s: rng.random_range(0.0..0.02),
            token_s: rng.random_range(0.0001..0.02),
            least_prompt_tokens: rng.random_range(1..4),
        }),
        max_chunk_tokens: rng.random_bool(0.4).then(|| rng.random_range(1..=max_batch_tokens)),
        max_context_len: rng.random_range(60..120),
        vocab_size,
        eos_token_ids: if rng.random_bool(0.8) { vec![vocab_size - 1] } else { vec![] },
        policy: if rng.random_bool(0.5) { Policy::Lpm } else { Policy::Fcfs },
        priority_scheduling: rng.random_bool(0.5),
        low_priority_first: rng.random_bool(0.5),
        aging_steps: rng.random_range(1..40),
        prefix_cache: rng.random_bool(0.85),
        overlap_depth: setup.overlap_depth,
        new_token_ratio_init: *[0.0, 0.0, 0.0, 0.2, 0.7].choose(rng).expect("there is a choice"),
        new_token_ratio_min: 0.0,
        new_token_ratio_decay_steps: rng.random_range(1..6),
        waiting_timeout_s: rng.random_bool(0.3).then_some(2.0),
        tokenizer_json: Some(support::tokenizer_json(vocab_size)),
        ..support::config()
    }
}

fn random_tokens(rng: &mut ChaCha8Rng, vocab_size: u32, count: usize) -> Vec<u32> {
    (0..count).map(|_| rng.random_range(0..vocab_size.min(3))).collect()
}

fn random_submit(rng: &mut ChaCha8Rng, config: &Config, key: u64, stems: &[Vec<u32>]) -> Submit {
    let vocab_size = config.vocab_size;
    let mut prompt = Vec::new();
    if rng.random_bool(0.7) {
        let stem = stems.choose(rng).expect("there is a choice");
        prompt.extend(&stem[..rng.random_range(0..=stem.len())]);
    }
    let own = rng.random_range(1..6);
    prompt.extend(random_tokens(rng, vocab_size, own));
    let most = if rng.random_bool(0.3) { 8 } else { 60 };
    let mut request = submit(key, &prompt, rng.random_range(0..most));
    let sampling = &mut request.sampling;
    if rng.random_bool(0.1) {
        sampling.max_new_tokens = None;
    }
    if rng.random_bool(0.2) {
        sampling.min_new_tokens = rng.random_range(0..6);
    }
    if rng.random_bool(0.2) {
        for _ in 0..rng.random_range(1..3) {
            let length = rng.random_range(1..5);
            sampling.stop.push(support::text_of(&random_tokens(rng, vocab_size, length)));
        }
    }
    if rng.random_bool(0.2) {
        sampling.stop_token_ids.push(0);
    }
    sampling.ignore_eos = rng.random_bool(0.3);
    sampling.no_stop_trim = rng.random_bool(0.3);
    // Every id suppressed leaves nothing to sample.
    if sampling.stop_token_ids.len() + config.eos_token_ids.len() >= vocab_size as usize {
        sampling.min_new_tokens = 0;
    }
    request.n = if rng.random_bool(0.2) { rng.random_range(2..4) } else { 1 };
    request.stream_interval = rng.random_range(0..4);
    request.priority = rng.random_range(-2..3);
    request.request_class = u8::from(rng.random_bool(0.2));
    if rng.random_bool(0.2) {
        request.namespace = "other".into();
    }
    if rng.random_bool(0.25) {
        let start = rng.random_bool(0.6).then(|| rng.random_range(0..=prompt.len() as u32));
        let ids = if rng.random_bool(0.5) { vec![1] } else { vec![] };
        request.logprobs = Some(LogprobRequest(start, rng.random_range(0..3), ids, false));
    }
    request.must_prepare = rng.random_bool(0.1);
    request.pooled = rng.random_bool(0.1);
    if request.pooled {
        request.n = 1;
        request.sampling.max_new_tokens = Some(0);
    }
    request
}

/// An engine under random operations.
struct Driver {
    rng: ChaCha8Rng,
    engine: Engine,
    /// Beginnings that prompts have in common.
    stems: Vec<Vec<u32>>,
    /// Key of the last request.
    key: u64,
    preparing: Vec<u64>,
}

impl Driver {
    fn new(setup: Setup) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(setup.seed);
        let config = random_config(&mut rng, setup);
        let stems = (0..3).map(|_| {
            let length = rng.random_range(1..48);
            random_tokens(&mut rng, config.vocab_size, length)
        });
        let stems = stems.collect();
        let mut engine = Engine::seeded(config, setup.seed);
        if setup.mischief {
            engine.runner.mischief = Mischief {
                row_error: rng.random_range(0..3),
                cut_row: rng.random_range(0..10),
                no_token: rng.random_range(0..10),
                more_tokens: rng.random_range(0..10),
            };
            engine.runner.lenient = setup.overlap_depth > 0;
        }
        Self { rng, engine, stems, key: 0, preparing: Vec::new() }
    }

    fn operation(&mut self) {
        let engine = &mut self.engine;
        match self.rng.random_range(0..100) {
            0..16 => {
                self.key += 1;
                let request = random_submit(&mut self.rng, &engine.config, self.key, &self.stems);
                self.preparing.extend(engine.submit(&request));
            }
            16..18 => self.abort_one(),
            18 if self.rng.random_bool(0.1) => {
                let all = self.rng.random_bool(0.5);
                engine.abort(if all { Target::All } else { Target::Client(CLIENT) });
            }
            19 => {
                if let Some(id) = self.preparing.pop() {
                    let error =
                        self.rng.random_bool(0.3).then_some(Unready::Invalid("bad grammar"));
                    engine.scheduler.ready(id, error);
                }
            }
            20 => {
                engine.scheduler.flush_cache();
            }
            21 => engine.now += 0.5,
            22..62 => {
                if engine.in_flight() <= engine.config.overlap_depth as usize {
                    engine.plan();
                }
            }
            _ => {
                if engine.in_flight() > 0 {
                    engine.commit();
                }
            }
        }
        self.engine.settle();
    }

    fn abort_one(&mut self) {
        let key = self.rng.random_range(1..=self.key.max(1));
        let sample = self.rng.random_range(0..3);
        match self.rng.random_range(0..3) {
            0 => self.engine.abort(Target::Rid(&format!("r{key}"))),
            1 => self.engine.abort(Target::Rid(&format!("r{key}_{sample}"))),
            _ => self.engine.abort(Target::Key(CLIENT, key)),
        };
    }
}

/// Runs one engine through random operations and returns it, drained.
fn run(setup: Setup, operations: usize) -> Engine {
    let mut driver = Driver::new(setup);
    for _ in 0..operations {
        driver.operation();
    }
    let mut engine = driver.engine;
    for id in driver.preparing {
        engine.scheduler.ready(id, None);
    }
    engine.settle();
    engine.drain();
    engine
}

/// Every request of the engine ended as its solo run says.
fn check_outcomes(engine: &Engine) {
    for sent in engine.client.requests.values() {
        if sent.refused.is_some() {
            continue;
        }
        for (k, sample) in sent.samples.iter().enumerate() {
            let solo = oracle::solo(&sent.submit, k, &engine.config);
            check_sample(&sent.submit, sample, &solo);
            check_logprobs(&sent.submit, sample, engine.config.vocab_size);
            check_pooled_state(&sent.submit, sample);
        }
    }
}

fn check_sample(request: &Submit, sample: &support::client::Sample, solo: &Solo) {
    let finished = sample.finished.as_ref().expect("it ended");
    let context = format!("{request:?}\n{sample:?}\n{solo:?}");
    assert_eq!(finished.completion_tokens as usize, sample.token_ids.len(), "{context}");
    match finished.reason.as_str() {
        "abort" | "error" => {
            assert!(solo.outputs.starts_with(&sample.token_ids), "{context}");
            assert_eq!(sample.text, support::text_of(&sample.token_ids), "{context}");
            assert_eq!(finished.status == 0, finished.reason == "abort", "{context}");
        }
        reason => {
            assert_eq!(reason, solo.reason, "{context}");
            assert_eq!(sample.token_ids, solo.outputs, "{context}");
            assert_eq!(sample.text, solo.text, "{context}");
            assert_eq!(finished.matched, solo.matched, "{context}");
            assert!(sample.started.is_some(), "{context}");
        }
    }
    if request.stream_interval == 0 {
        assert_eq!(sample.num_deltas, 0);
    }
    let names_stop = !matches!(finished.matched, Matched::No);
    assert_eq!(names_stop, finished.reason == "stop", "{context}");
}

fn check_pooled_state(request: &Submit, sample: &support::client::Sample) {
    let finished = sample.finished.as_ref().expect("it ended");
    let wanted = request.pooled && finished.reason == "length";
    let state = wanted.then(|| oracle::digest(&request.prompt).to_le_bytes().to_vec());
    assert_eq!(finished.pooled_state, state, "{request:?}");
}

fn check_logprobs(request: &Submit, sample: &support::client::Sample, vocab_size: u32) {
    let Some(LogprobRequest(start, top_n, ids, _)) = &request.logprobs else { return };
    let expected = |context: u64, token: u32| f64::from(oracle::logprob(context, token));
    let mut context = oracle::digest(&request.prompt);
    assert_eq!(sample.logprobs.values.len(), sample.token_ids.len());
    for (index, &token) in sample.token_ids.iter().enumerate() {
        assert_eq!(sample.logprobs.values[index], expected(context, token));
        if *top_n > 0 {
            let top = &sample.logprobs.top[index];
            // Alternatives are known for the first token of a sample entry.
            assert!(top.is_empty() || *top == oracle::top(context, *top_n as usize, vocab_size));
        }
        if !ids.is_empty() {
            let scored = &sample.logprobs.ids[index];
            let all: Vec<_> = ids.iter().map(|&id| (expected(context, id), id)).collect();
            assert!(scored.is_empty() || *scored == all);
        }
        context = oracle::extend(context, token);
    }
    let complete = sample.started.is_some();
    let (Some(start), Some(scores), true) = (start, &sample.prompt_logprobs, complete) else {
        return;
    };
    let start = *start as usize;
    assert_eq!(scores.values.len(), request.prompt.len() - start);
    for (index, position) in (start..request.prompt.len()).enumerate() {
        let context = oracle::digest(&request.prompt[..position]);
        if position == 0 {
            assert!(scores.values[index].is_nan());
            continue;
        }
        assert_eq!(scores.values[index], expected(context, request.prompt[position]));
        if *top_n > 0 {
            assert_eq!(scores.top[index], oracle::top(context, *top_n as usize, vocab_size));
        }
        if !ids.is_empty() {
            let all: Vec<_> = ids.iter().map(|&id| (expected(context, id), id)).collect();
            assert_eq!(scores.ids[index], all);
        }
    }
}

fn run_seeds(seeds: std::ops::Range<u64>, operations: usize, overlap_depth: u32, mischief: bool) {
    let mut retracted = 0;
    let mut evicted = 0;
    for seed in seeds {
        let setup = Setup { seed, overlap_depth, mischief };
        let engine = std::panic::catch_unwind(|| {
            let engine = run(setup, operations);
            check_outcomes(&engine);
            engine
        });
        let engine = engine.unwrap_or_else(|_| panic!("failed: {setup:?}"));
        retracted += engine.stat("retracted_requests_total");
        evicted += engine.stat("evicted_tokens_total");
    }
    assert!(retracted > 0 && evicted > 0, "the pools are small enough to be short");
}

#[test]
fn random_requests_end_as_alone() {
    run_seeds(0..60, 300, 0, false);
}

#[test]
fn random_requests_end_as_alone_with_overlap() {
    run_seeds(0..40, 300, 1, false);
    run_seeds(40..80, 300, 2, false);
}

#[test]
fn random_requests_end_as_alone_on_a_mischievous_runner() {
    run_seeds(0..40, 300, 0, true);
    run_seeds(40..70, 300, 1, true);
    run_seeds(70..100, 300, 2, true);
}

#[test]
#[ignore = "minutes long"]
fn random_requests_end_as_alone_for_long() {
    for depth in 0..4 {
        run_seeds(1000..1600, 1500, depth, false);
        run_seeds(1000..1600, 1500, depth, true);
    }
}
