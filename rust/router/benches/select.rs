//! Speed of hashing a prompt, of the decision, and of a whole request's bookkeeping.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use router::core::{
    BlockShape, Config, Outcome, Prompt, Router, Selection, WorkerId, WorkerOptions,
};

const SEED: u64 = 1;
const PROMPT_TOKENS: usize = 4_096;
/// Of these, a group of requests shares the first three quarters.
const SHARED_TOKENS: usize = 3_072;
const GROUPS: usize = 64;
const WORKERS: [usize; 4] = [4, 64, 1_024, 4_096];
const BLOCK_TOKENS: [usize; 2] = [16, 32];

fn token_bytes(rng: &mut ChaCha8Rng, count: usize) -> Vec<u8> {
    (0..count).flat_map(|_| rng.random_range(0..150_000_u32).to_le_bytes()).collect()
}

fn prompt(bytes: &[u8], block_tokens: usize) -> Prompt {
    let shape = BlockShape { bytes: 4 * block_tokens, tokens: block_tokens as u32 };
    Prompt::new(bytes, (bytes.len() / 4) as u64, shape, b"model")
}

/// Prompts of groups with a common beginning, and a router that has served them.
fn warm_router(workers: usize, block_tokens: usize) -> (Router, Vec<Prompt>) {
    let mut rng = ChaCha8Rng::seed_from_u64(SEED);
    let mut router = Router::new(Config::default());
    for number in 0..workers {
        let name = format!("http://10.0.0.{number}:30000");
        let options = WorkerOptions { name: &name, ..WorkerOptions::default() };
        router.add_worker(&options).expect("room");
    }
    let mut prompts = Vec::new();
    for _ in 0..GROUPS {
        let shared = token_bytes(&mut rng, SHARED_TOKENS);
        for member in 0..4 {
            let tail = token_bytes(&mut rng, PROMPT_TOKENS - SHARED_TOKENS);
            let prompt = prompt(&[&shared[..], &tail].concat(), block_tokens);
            let only = [WorkerId((member * 7 + prompts.len()) as u32 % workers as u32)];
            serve(&mut router, &prompt, &Selection { only: Some(&only), ..Selection::default() });
            prompts.push(prompt);
        }
    }
    (router, prompts)
}

fn serve(router: &mut Router, prompt: &Prompt, selection: &Selection<'_>) {
    let choice = router.select(prompt, selection, 0.0).expect("there are workers");
    router.started(choice.ticket);
    router.finished(choice.ticket, Outcome::Completed, 0.0);
}

fn hash(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("hash");
    let bytes = token_bytes(&mut ChaCha8Rng::seed_from_u64(SEED), PROMPT_TOKENS);
    group.throughput(Throughput::Elements(PROMPT_TOKENS as u64));
    for block_tokens in BLOCK_TOKENS {
        group.bench_function(BenchmarkId::from_parameter(block_tokens), |bencher| {
            bencher.iter(|| prompt(black_box(&bytes), block_tokens));
        });
    }
    group.finish();
}

/// The decision for hashed prompts, each seen before.
fn decide(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("decide");
    for workers in WORKERS {
        for block_tokens in BLOCK_TOKENS {
            let (mut router, prompts) = warm_router(workers, block_tokens);
            let mut next = (0..prompts.len()).cycle();
            group.bench_function(BenchmarkId::new(workers.to_string(), block_tokens), |bencher| {
                bencher.iter(|| {
                    let prompt = &prompts[next.next().expect("a cycle has no end")];
                    router.peek(black_box(prompt), &Selection::default(), 0.0)
                });
            });
        }
    }
    group.finish();
}

/// Decision, load account, index update and the request's end.
fn request(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("request");
    for workers in WORKERS {
        for block_tokens in BLOCK_TOKENS {
            let (mut router, prompts) = warm_router(workers, block_tokens);
            let mut next = (0..prompts.len()).cycle();
            group.bench_function(BenchmarkId::new(workers.to_string(), block_tokens), |bencher| {
                bencher.iter(|| {
                    let prompt = &prompts[next.next().expect("a cycle has no end")];
                    serve(&mut router, black_box(prompt), &Selection::default());
                });
            });
        }
    }
    group.finish();
}

criterion_group!(benches, hash, decide, request);
criterion_main!(benches);
