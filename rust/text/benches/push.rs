//! Time to push a token and drain its text, with different stop strings.

use std::sync::Arc;

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use text::{Decoder, Stops, Stream, StreamOptions};

const SEED: u64 = 7;
const VOCABULARY: usize = 150_000;
const TOKENS: usize = 1_000_000;
/// Tokens between two drains, as a stream interval of 1 and of 50 has it.
const INTERVALS: [usize; 2] = [1, 50];

/// Words of 1 to 9 letters, most with a space before; one of 16 ends or begins inside a character.
fn tokenizer_json() -> String {
    let mut random = ChaCha8Rng::seed_from_u64(SEED);
    let vocabulary: serde_json::Map<_, _> = (0..VOCABULARY)
        .map(|id| {
            let length = random.random_range(1..=9);
            let letters: String = (0..length).map(|_| random.random_range('a'..='z')).collect();
            let token = match id % 16 {
                0 => format!("ðŁ{letters}"),
                1..12 => format!("Ġ{letters}"),
                _ => letters,
            };
            (format!("{token}{}", id % 10), id.into())
        })
        .collect();
    serde_json::json!({
        "added_tokens": [{"id": VOCABULARY, "content": "<|end|>", "special": true}],
        "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "vocab": vocabulary},
    })
    .to_string()
}

const NONE: [&str; 0] = [];

fn stops(strings: &[&str]) -> Option<Arc<Stops>> {
    Stops::new(strings.iter().copied(), NONE).ok().map(Arc::new)
}

fn push(criterion: &mut Criterion) {
    let json = tokenizer_json();
    let Ok(decoder) = Decoder::from_tokenizer_json(&json).map(Arc::new) else { return };
    let mut random = ChaCha8Rng::seed_from_u64(SEED);
    let known: Vec<u32> = (0..VOCABULARY as u32).collect();
    let ids: Vec<u32> = (0..TOKENS).filter_map(|_| known.choose(&mut random).copied()).collect();
    let many: Vec<String> = (0..32).map(|k| format!("stop string number {k}")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    let sets: [(&str, &[&str]); 4] = [
        ("none", &[]),
        ("newlines", &["\n\n"]),
        ("four", &["\nUser:", " END", "```", " the stop"]),
        ("32", &many),
    ];
    let mut group = criterion.benchmark_group("push");
    group.throughput(Throughput::Elements(TOKENS as u64)).sample_size(20);
    for (name, strings) in sets {
        for interval in INTERVALS {
            let options = StreamOptions { stops: stops(strings), ..StreamOptions::default() };
            group.bench_function(format!("stops {name}, drain every {interval}"), |bencher| {
                bencher.iter_batched(
                    || (Stream::new(Arc::clone(&decoder), options.clone()), String::new()),
                    |(mut stream, mut text)| {
                        for ids in ids.chunks(interval) {
                            for &id in ids {
                                assert_eq!(stream.push(id), None);
                            }
                            text.clear();
                            stream.drain_into(&mut text);
                        }
                        stream.delivered()
                    },
                    BatchSize::PerIteration,
                );
            });
        }
    }
    group.finish();
    criterion.bench_function("build the decoder of 150k tokens", |bencher| {
        bencher.iter(|| Decoder::from_tokenizer_json(&json).map(|decoder| decoder.vocab_size()));
    });
    criterion.bench_function("compile 32 stop strings", |bencher| bencher.iter(|| stops(&many)));
}

criterion_group!(benches, push);
criterion_main!(benches);
