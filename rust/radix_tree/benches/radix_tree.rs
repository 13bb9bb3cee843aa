//! Speed of matching, inserting and evicting, in tokens.

use std::hint::black_box;

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use radix_tree::{NamespaceId, NodeId, PageId, RadixTree};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

const SEED: u64 = 1;
const NAMESPACE: NamespaceId = NamespaceId(0);
const PAGE_SIZE: usize = 16;
const VOCABULARY: u32 = 150_000;
/// Cached tokens, in one sequence.
const CACHED_TOKENS: [usize; 4] = [1_024, 10_240, 102_400, 1_048_576];
/// Nodes of the bushy tree: sequences that share a system prompt.
const NODES: usize = 10_000;
const SYSTEM_TOKENS: usize = 1_024;
const TAIL_TOKENS: usize = 100 * PAGE_SIZE;
/// Tokens per insert when a sequence is inserted chunk by chunk.
const CHUNK_TOKENS: usize = 512;
const WAITING: usize = 4_096;

fn random_tokens(rng: &mut ChaCha8Rng, count: usize) -> Vec<u32> {
    (0..count).map(|_| rng.random_range(0..VOCABULARY)).collect()
}

fn pages(first: usize, num_tokens: usize) -> Vec<PageId> {
    (first..first + num_tokens.div_ceil(PAGE_SIZE)).map(|page| PageId(page as u32)).collect()
}

/// One long sequence, cut into `num_nodes` nodes.
fn chain(num_tokens: usize, num_nodes: usize) -> (RadixTree, Vec<u32>) {
    let mut tree = RadixTree::new(PAGE_SIZE);
    let key = random_tokens(&mut ChaCha8Rng::seed_from_u64(SEED), num_tokens);
    let chunk_tokens = (num_tokens / num_nodes).next_multiple_of(PAGE_SIZE);
    let mut node = NodeId::ROOT;
    for (index, chunk) in key.chunks(chunk_tokens).enumerate() {
        let chunk_pages = pages(index * chunk_tokens / PAGE_SIZE, chunk.len());
        node = tree.insert_below(NAMESPACE, node, chunk, &chunk_pages).expect("fresh pages").node;
    }
    (tree, key)
}

/// Keys with a common system prompt, each with a tail of its own.
fn bushy_keys() -> Vec<Vec<u32>> {
    let mut rng = ChaCha8Rng::seed_from_u64(SEED);
    let system = random_tokens(&mut rng, SYSTEM_TOKENS);
    (0..NODES).map(|_| [&system[..], &random_tokens(&mut rng, TAIL_TOKENS)].concat()).collect()
}

fn bushy_tree(keys: &[Vec<u32>]) -> RadixTree {
    let mut tree = RadixTree::new(PAGE_SIZE);
    for (index, key) in keys.iter().enumerate() {
        let key_pages = pages(index * key.len() / PAGE_SIZE, key.len());
        tree.insert(NAMESPACE, key, &key_pages).expect("fresh pages");
    }
    tree
}

fn bench_match(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("match");
    for num_tokens in CACHED_TOKENS {
        group.throughput(Throughput::Elements(num_tokens as u64));
        let (mut tree, key) = chain(num_tokens, 1);
        group.bench_function(BenchmarkId::new("one_edge", num_tokens), |bencher| {
            bencher.iter(|| tree.match_prefix(NAMESPACE, black_box(&key)).num_tokens);
        });
        let (mut tree, key) = chain(num_tokens, num_tokens / CHUNK_TOKENS);
        group.bench_function(BenchmarkId::new("chunks", num_tokens), |bencher| {
            bencher.iter(|| tree.match_prefix(NAMESPACE, black_box(&key)).num_tokens);
        });
        group.bench_function(BenchmarkId::new("chunks_peek", num_tokens), |bencher| {
            bencher.iter(|| tree.peek(NAMESPACE, black_box(&key)).num_tokens);
        });
        let (mut tree, key) = chain(num_tokens, num_tokens / PAGE_SIZE);
        group.bench_function(BenchmarkId::new("node_per_page", num_tokens), |bencher| {
            bencher.iter(|| tree.match_prefix(NAMESPACE, black_box(&key)).num_tokens);
        });
    }
    let keys = bushy_keys();
    let mut tree = bushy_tree(&keys);
    group.throughput(Throughput::Elements(keys[0].len() as u64));
    let mut order = (0..NODES).map(|index| index * 7_919 % NODES).cycle();
    group.bench_function(BenchmarkId::new("bushy", NODES), |bencher| {
        bencher.iter(|| {
            let key = &keys[order.next().expect("endless")];
            tree.match_prefix(NAMESPACE, black_box(key)).num_tokens
        });
    });
    group.finish();
}

fn bench_insert(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("insert");
    for num_tokens in CACHED_TOKENS {
        group.throughput(Throughput::Elements(num_tokens as u64));
        let key = random_tokens(&mut ChaCha8Rng::seed_from_u64(SEED), num_tokens);
        let key_pages = pages(0, num_tokens);
        group.bench_function(BenchmarkId::new("one_edge", num_tokens), |bencher| {
            bencher.iter_batched_ref(
                || RadixTree::new(PAGE_SIZE),
                |tree| tree.insert(NAMESPACE, black_box(&key), &key_pages),
                BatchSize::LargeInput,
            );
        });
        group.bench_function(BenchmarkId::new("chunks", num_tokens), |bencher| {
            bencher.iter_batched_ref(
                || RadixTree::new(PAGE_SIZE),
                |tree| {
                    let mut node = NodeId::ROOT;
                    for (chunk, chunk_pages) in
                        key.chunks(CHUNK_TOKENS).zip(key_pages.chunks(CHUNK_TOKENS / PAGE_SIZE))
                    {
                        node = tree
                            .insert_below(NAMESPACE, node, black_box(chunk), chunk_pages)
                            .expect("fresh pages")
                            .node;
                    }
                },
                BatchSize::LargeInput,
            );
        });
    }
    let keys = bushy_keys();
    let full = bushy_tree(&keys[1..]);
    let key_pages = pages(NODES * keys[0].len() / PAGE_SIZE, keys[0].len());
    group.throughput(Throughput::Elements(keys[0].len() as u64));
    group.bench_function(BenchmarkId::new("into_bushy", NODES), |bencher| {
        bencher.iter_batched_ref(
            || full.clone(),
            |tree| tree.insert(NAMESPACE, black_box(&keys[0]), &key_pages),
            BatchSize::PerIteration,
        );
    });
    group.finish();
}

fn bench_evict(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("evict");
    group.sample_size(20);
    for num_tokens in CACHED_TOKENS {
        group.throughput(Throughput::Elements(num_tokens as u64));
        for (shape, num_nodes) in [("one_edge", 1), ("node_per_page", num_tokens / PAGE_SIZE)] {
            let (full, _) = chain(num_tokens, num_nodes);
            group.bench_function(BenchmarkId::new(shape, num_tokens), |bencher| {
                bencher.iter_batched_ref(
                    || (full.clone(), Vec::with_capacity(num_tokens / PAGE_SIZE)),
                    |(tree, freed)| tree.evict(usize::MAX, freed),
                    BatchSize::LargeInput,
                );
            });
        }
    }
    let full = bushy_tree(&bushy_keys());
    let num_tokens = full.num_pages() * PAGE_SIZE;
    group.throughput(Throughput::Elements(num_tokens as u64));
    for (shape, step) in [("bushy_at_once", usize::MAX), ("bushy_by_8_pages", 8)] {
        group.bench_function(BenchmarkId::new(shape, NODES), |bencher| {
            bencher.iter_batched_ref(
                || (full.clone(), Vec::with_capacity(num_tokens / PAGE_SIZE)),
                |(tree, freed)| while tree.evict(step, freed) > 0 {},
                BatchSize::PerIteration,
            );
        });
    }
    group.finish();
}

/// What one step costs with many requests waiting under longest-prefix-match order.
fn bench_waiting(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("waiting");
    let keys = bushy_keys();
    let tree = bushy_tree(&keys[WAITING..]);
    let waiting = &keys[..WAITING];
    let peeks: Vec<_> = waiting.iter().map(|key| tree.peek(NAMESPACE, key)).collect();
    group.throughput(Throughput::Elements(WAITING as u64));
    group.bench_function(BenchmarkId::new("peek_all", WAITING), |bencher| {
        bencher
            .iter(|| waiting.iter().map(|key| tree.peek(NAMESPACE, key).num_tokens).sum::<usize>());
    });
    group.bench_function(BenchmarkId::new("refresh_unchanged", WAITING), |bencher| {
        bencher.iter_batched_ref(
            || peeks.clone(),
            |peeks| refresh_all(&tree, waiting, peeks),
            BatchSize::LargeInput,
        );
    });
    let mut changed = tree.clone();
    let key_pages = pages(NODES * keys[0].len() / PAGE_SIZE, keys[0].len());
    changed.insert(NAMESPACE, &keys[0], &key_pages).expect("fresh pages");
    group.bench_function(BenchmarkId::new("refresh_after_insert", WAITING), |bencher| {
        bencher.iter_batched_ref(
            || peeks.clone(),
            |peeks| refresh_all(&changed, waiting, peeks),
            BatchSize::LargeInput,
        );
    });
    group.finish();
}

fn refresh_all(tree: &RadixTree, keys: &[Vec<u32>], peeks: &mut [radix_tree::Peek]) -> usize {
    keys.iter().zip(peeks).map(|(key, peek)| usize::from(tree.refresh(NAMESPACE, key, peek))).sum()
}

criterion_group!(benches, bench_match, bench_insert, bench_evict, bench_waiting);
criterion_main!(benches);
