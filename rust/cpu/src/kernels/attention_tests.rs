//! Attention against float64, and the same bits for any batch, chunk, page size and split.

use std::sync::Mutex;

use crate::attention_step::{AttendPlan, AttendRow};
use crate::kernels::Kernels;
use crate::kernels::attention::{
    AttendContext, MAX_QUERIES, SPLIT, Scratch, partial_stride, query_scale,
};
use crate::kernels::rotate::{HeadShape, Layer, RotateTask};
use crate::kv::{KvPool, KvSpec};
use crate::memory::Region;
use crate::pool::ThreadPool;
use crate::testing::{Random, bf16, bytes, every_kernel};
use crate::weights::{Element, Norm, Rotary, Source};

struct Model {
    heads: HeadShape,
    window: Option<usize>,
    page_size: usize,
    norm: Option<Norm>,
    soft_cap: Option<f32>,
    sinks: Option<Vec<f32>>,
}

impl Model {
    fn plain(heads: HeadShape, window: Option<usize>, page_size: usize) -> Model {
        Model { heads, window, page_size, norm: None, soft_cap: None, sinks: None }
    }
}

struct Sequence {
    qkv: Vec<f32>, // [tokens][width]
    len: usize,
}

const HEADS: HeadShape = HeadShape { num_heads: 6, num_kv_heads: 2, head_dim: 24 };

fn sequence(random: &mut Random, heads: HeadShape, len: usize) -> Sequence {
    let width = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim;
    Sequence { qkv: (0..len * width).map(|_| random.normal()).collect(), len }
}

fn rotary(half: usize, positions: usize) -> Rotary {
    let angle = |i: usize| (i / half) as f32 * 10_f32.powf(-((i % half) as f32) / half as f32);
    let cos = (0..half * positions).map(|i| angle(i).cos()).collect();
    let sin = (0..half * positions).map(|i| angle(i).sin()).collect();
    Rotary::new(half, cos, sin).unwrap()
}

/// Everything that lives between steps.
struct Harness<'a> {
    kernels: Kernels,
    model: &'a Model,
    sequences: &'a [Sequence],
    kv: KvPool,
    pages: Vec<u32>, // [sequence][table_len]
    table_len: usize,
    pool: ThreadPool,
    scratch: Vec<Mutex<Scratch>>,
    rotary: Rotary,
    computed: Vec<usize>,
}

impl Harness<'_> {
    fn new<'a>(
        kernels: Kernels,
        model: &'a Model,
        sequences: &'a [Sequence],
        num_threads: usize,
    ) -> Harness<'a> {
        let heads = model.heads;
        let longest = sequences.iter().map(|s| s.len).max().unwrap();
        let table_len = longest.div_ceil(model.page_size);
        let count = sequences.len();
        let spec = KvSpec {
            num_layers: 2,
            num_kv_heads: heads.num_kv_heads,
            head_dim: heads.head_dim,
            num_pages: 1 + table_len * count,
            page_size: model.page_size,
        };
        let mut kv = KvPool::new(spec, kernels.element).unwrap();
        let words = kv.layout.layer_words() * 2;
        // Leftovers of earlier owners: infinities and NaN must never show.
        // SAFETY: the pool has two layers and nobody else uses it.
        unsafe { std::slice::from_raw_parts_mut(kv.layer(0), words) }.fill(0x7f80_ffff);
        Harness {
            kernels,
            model,
            sequences,
            kv,
            pages: (0..count)
                .flat_map(|s| (0..table_len).map(move |i| 1 + (i * count + s) as u32))
                .collect(),
            table_len,
            pool: ThreadPool::new(num_threads),
            scratch: (0..num_threads).map(|_| Mutex::new(Scratch::new())).collect(),
            rotary: rotary(heads.head_dim / 2 - 2, longest),
            computed: vec![0; count],
        }
    }

    /// Rows, positions, pages and projections of a step's tokens.
    fn inputs(&self, step: &[(usize, usize)]) -> (Vec<AttendRow>, Vec<u32>, Vec<u32>, Region) {
        let width = width(self.model.heads);
        let (mut rows, mut positions, mut pages) = (Vec::new(), Vec::new(), Vec::new());
        let mut values = Vec::new();
        for &(s, count) in step {
            let table = self.pages[s * self.table_len..(s + 1) * self.table_len].to_vec();
            let start = self.computed[s];
            let tokens = positions.len()..positions.len() + count;
            for position in start..start + count {
                positions.push(position as u32);
                pages.push(table[position / self.model.page_size]);
            }
            values.extend(&self.sequences[s].qkv[start * width..(start + count) * width]);
            rows.push(AttendRow { tokens, computed_len: start, table });
        }
        let mut qkv = Region::new(values.len());
        let words = qkv.as_mut_slice().iter_mut();
        words.zip(&values).for_each(|(word, value): (_, &f32)| *word = value.to_bits());
        (rows, positions, pages, qkv)
    }

    fn step(&mut self, step: &[(usize, usize)]) -> Region {
        let heads = self.model.heads;
        let (rows, positions, pages, mut qkv) = self.inputs(step);
        let layout = self.kv.layout;
        let layer = Layer(self.kv.layer(1));
        let stride = heads.num_heads * layout.dim_words;
        let mut queries = Region::new(positions.len() * stride);
        self.kernels.rotate(&RotateTask {
            heads,
            qkv: qkv.rows(width(heads)),
            queries: queries.rows(stride),
            query_scale: query_scale((heads.head_dim as f32).powf(-0.5), self.model.soft_cap),
            rotary: &self.rotary,
            query_norm: self.model.norm.as_ref(),
            key_norm: self.model.norm.as_ref(),
            layout,
            layer,
            positions: &positions,
            pages: &pages,
            tokens: 0..positions.len(),
        });
        let plan = AttendPlan::new(&rows, layout.page_size, heads, self.model.window);
        let mut output = Region::new(positions.len() * out_words(self.kernels, heads));
        let mut partials = Region::new(plan.num_partials.max(1) * partial_stride(layout));
        let context = AttendContext {
            heads,
            window: self.model.window,
            soft_cap: self.model.soft_cap,
            sinks: self.model.sinks.as_deref(),
            layout,
            layer,
            queries: queries.rows(stride),
            output: output.rows(out_words(self.kernels, heads)),
            partials: partials.rows(partial_stride(layout)),
            rows: &rows,
            members: &plan.members,
            parts: &plan.parts,
        };
        plan.run(&self.pool, self.kernels, &context, &self.scratch);
        for &(s, count) in step {
            self.computed[s] += count;
        }
        output
    }
}

fn width(heads: HeadShape) -> usize {
    (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
}

fn out_words(kernels: Kernels, heads: HeadShape) -> usize {
    (heads.num_heads * heads.head_dim).next_multiple_of(16) / kernels.element.per_word()
}

/// Compute sequences in the given chunks (per step: (sequence, tokens) rows); `[seq][token][out]`.
fn run(
    kernels: Kernels,
    model: &Model,
    sequences: &[Sequence],
    steps: &[Vec<(usize, usize)>],
    num_threads: usize,
) -> Vec<Vec<u32>> {
    let mut harness = Harness::new(kernels, model, sequences, num_threads);
    let mut outputs = vec![Vec::new(); sequences.len()];
    for step in steps {
        let output = harness.step(step);
        let mut from = output.as_slice();
        for &(s, count) in step {
            let (row, rest) = from.split_at(count * out_words(kernels, model.heads));
            outputs[s].extend_from_slice(row);
            from = rest;
        }
    }
    outputs
}

fn alone(sequences: &[Sequence], chunk: usize) -> Vec<Vec<(usize, usize)>> {
    let mut steps = Vec::new();
    for (s, sequence) in sequences.iter().enumerate() {
        for start in (0..sequence.len).step_by(chunk) {
            steps.push(vec![(s, chunk.min(sequence.len - start))]);
        }
    }
    steps
}

/// All sequences together, in random chunks.
fn together(sequences: &[Sequence], random: &mut Random) -> Vec<Vec<(usize, usize)>> {
    let mut left: Vec<usize> = sequences.iter().map(|s| s.len).collect();
    let mut steps = Vec::new();
    while left.iter().any(|&left| left > 0) {
        let mut step = Vec::new();
        for (s, left) in left.iter_mut().enumerate() {
            let count = (*left).min([1, 1 + random.below(40), random.below(300)][random.below(3)]);
            if count > 0 {
                step.push((s, count));
                *left -= count;
            }
        }
        steps.push(step);
    }
    steps.retain(|step| !step.is_empty());
    steps
}

fn expected(model: &Model, sequence: &Sequence, position: usize, head: usize) -> Vec<f64> {
    let HeadShape { num_heads, num_kv_heads, head_dim } = model.heads;
    let width = (num_heads + 2 * num_kv_heads) * head_dim;
    let half = head_dim / 2 - 2;
    let table = rotary(half, position + 1);
    let turned = |position: usize, index: usize| {
        let at = position * width + index * head_dim;
        let mut x: Vec<f64> =
            sequence.qkv[at..at + head_dim].iter().map(|&x| f64::from(x)).collect();
        if let Some(norm) = &model.norm {
            let mean = x.iter().map(|x| x * x).sum::<f64>() / head_dim as f64;
            let scale = (mean + f64::from(norm.epsilon)).sqrt().recip();
            x.iter_mut().zip(&norm.weight).for_each(|(x, &w)| *x *= scale * f64::from(w));
        }
        for i in 0..half {
            let cos = f64::from(table.cos[position * half + i]);
            let sin = f64::from(table.sin[position * half + i]);
            let (a, b) = (x[i], x[half + i]);
            x[i] = a * cos - b * sin;
            x[half + i] = b * cos + a * sin;
        }
        x
    };
    let kv_head = head / (num_heads / num_kv_heads);
    let query = turned(position, head);
    let first = model.window.map_or(0, |window| (position + 1).saturating_sub(window));
    let scores: Vec<f64> = (first..=position)
        .map(|key| {
            let key = turned(key, num_heads + kv_head);
            let dot: f64 = query.iter().zip(key).map(|(q, k)| q * k).sum();
            let score = dot / (head_dim as f64).sqrt();
            let cap = model.soft_cap.map(f64::from);
            cap.map_or(score, |cap| cap * (score / cap).tanh()).exp()
        })
        .collect();
    let sink = model.sinks.as_ref().map_or(0.0, |sinks| f64::from(sinks[head]).exp());
    let total = scores.iter().sum::<f64>() + sink;
    let value_at = (num_heads + num_kv_heads + kv_head) * head_dim;
    (0..head_dim)
        .map(|dim| {
            let values =
                (first..=position).map(|key| f64::from(sequence.qkv[key * width + value_at + dim]));
            scores.iter().zip(values).map(|(p, v)| p * v).sum::<f64>() / total
        })
        .collect()
}

fn element(kernels: Kernels, words: &[u32], index: usize) -> f64 {
    f64::from(match kernels.element {
        Element::F32 => f32::from_bits(words[index]),
        Element::Bf16 => f32::from_bits((words[index / 2] >> (index % 2 * 16) & 0xffff) << 16),
    })
}

#[test]
fn attention_agrees_with_float64() {
    let mut random = Random::new(3);
    for kernels in every_kernel() {
        for (window, page_size, normed, soft_cap, has_sinks) in [
            (None, 16, false, None, false),
            (None, 32, true, Some(1.5), false),
            (Some(40), 16, false, None, true),
            (Some(7), 5, true, Some(0.7), true),
        ] {
            let mut norm = Norm::new(kernels.element, HEADS.head_dim, 1e-5, 0.0);
            let weight: Vec<f32> = (0..HEADS.head_dim).map(|_| bf16(random.normal())).collect();
            norm.load(Source::new(Element::F32, &bytes(&weight))).unwrap();
            let sinks: Vec<f32> = (0..HEADS.num_heads).map(|_| 3.0 * random.normal()).collect();
            let model = Model {
                norm: normed.then_some(norm),
                soft_cap,
                sinks: has_sinks.then_some(sinks),
                ..Model::plain(HEADS, window, page_size)
            };
            let sequences = [sequence(&mut random, HEADS, 300)];
            let out = run(kernels, &model, &sequences, &alone(&sequences, 300), 1);
            let out_words = out_words(kernels, HEADS);
            let tolerance = if kernels.element == Element::Bf16 { 0.04 } else { 3e-5 };
            for position in [0, 1, 15, 16, 63, 64, 100, 255, 256, 299] {
                for head in 0..HEADS.num_heads {
                    let expected = expected(&model, &sequences[0], position, head);
                    for (dim, expected) in expected.iter().enumerate() {
                        let words = &out[0][position * out_words..];
                        let got = element(kernels, words, head * HEADS.head_dim + dim);
                        assert!(
                            (got - expected).abs() < tolerance,
                            "{:?} {:?} position {position} head {head}: {got} {expected}",
                            kernels.isa,
                            kernels.element
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn bits_do_not_depend_on_batch_chunk_page_size_or_threads() {
    let mut random = Random::new(5);
    for kernels in every_kernel() {
        for (window, head_dim, soft_cap) in
            [(None, 24, None), (Some(100), 16, None), (None, 64, Some(0.9))]
        {
            let heads = HeadShape { head_dim, ..HEADS };
            let sequences: Vec<Sequence> =
                [600, 1, 17, 320].map(|len| sequence(&mut random, heads, len)).into();
            let sinks = soft_cap.map(|cap: f32| vec![cap; heads.num_heads]);
            let model = |page_size| Model {
                soft_cap,
                sinks: sinks.clone(),
                ..Model::plain(heads, window, page_size)
            };
            let reference = run(kernels, &model(16), &sequences, &alone(&sequences, 1000), 1);
            let singly = run(kernels, &model(16), &sequences, &alone(&sequences, 1), 2);
            assert!(reference == singly, "{:?} one token at a time", kernels.isa);
            for (page_size, num_threads) in [(16, 1), (16, 2), (1, 1), (48, 2), (10, 1)] {
                let steps = together(&sequences, &mut random);
                let out = run(kernels, &model(page_size), &sequences, &steps, num_threads);
                assert!(reference == out, "{:?} page size {page_size}", kernels.isa);
            }
        }
    }
}

/// Outputs of steps after all sequences have come by the first one's first `shared` tokens: in the
/// same pages, or in copies.
fn after_prefix(
    kernels: Kernels,
    model: &Model,
    sequences: &[Sequence],
    (shared, is_copied): (usize, bool),
    steps: &[Vec<(usize, usize)>],
) -> Vec<Vec<u32>> {
    let mut harness = Harness::new(kernels, model, sequences, 2);
    harness.step(&[(0, shared)]);
    let whole = shared / model.page_size;
    for s in 1..sequences.len() {
        for index in 0..whole {
            let (from, to) = (harness.pages[index], s * harness.table_len + index);
            if is_copied {
                harness.kv.move_page(from as usize, harness.pages[to] as usize, model.page_size);
            } else {
                harness.pages[to] = from;
            }
        }
    }
    harness.computed.fill(shared);
    steps.iter().map(|step| harness.step(step).as_slice().to_vec()).collect()
}

#[test]
fn rows_that_share_pages_have_the_bits_of_rows_that_do_not() {
    let mut random = Random::new(8);
    for kernels in every_kernel() {
        for (num_heads, window, page_size) in
            [(6, None, 16), (6, Some(600), 16), (4, None, 48), (6, None, 10)]
        {
            let heads = HeadShape { num_heads, ..HEADS };
            // More rows than one item takes, of several lengths beyond the prefix.
            let count = MAX_QUERIES / (num_heads / 2) + 3;
            let shared = (2 * SPLIT + 200) / page_size * page_size;
            let lens = (0..count).map(|i| shared + 3 + i * 37 % 100);
            let sequences: Vec<Sequence> =
                lens.map(|len| sequence(&mut random, heads, len)).collect();
            let model = Model::plain(heads, window, page_size);
            let own = |s: usize| sequences[s].len - shared;
            // Chunks, some of them short enough to share, then two times one token.
            let chunks = (0..count).map(|s| (s, own(s) - 2)).collect();
            let single: Vec<(usize, usize)> = (0..count).map(|s| (s, 1)).collect();
            let steps = [chunks, single.clone(), single];
            let [together, apart] = [false, true].map(|is_copied| {
                after_prefix(kernels, &model, &sequences, (shared, is_copied), &steps)
            });
            assert!(together == apart, "{:?} page size {page_size}", kernels.isa);
        }
    }
}

#[test]
fn shared_pages_are_read_once_per_group_of_rows() {
    let heads = HEADS;
    let table = |own: u32| (1..=32).chain([own]).collect::<Vec<u32>>();
    let rows: Vec<AttendRow> = (0..5)
        .map(|i| AttendRow { tokens: i..i + 1, computed_len: 520, table: table(40 + i as u32) })
        .collect();
    let plan = AttendPlan::new(&rows, 16, heads, None);
    // Two splits of five rows, and each row's own rest, for two kv heads.
    assert_eq!(plan.num_items(), 2 * (2 + 5));
    let other: Vec<AttendRow> = rows
        .iter()
        .map(|row| AttendRow {
            table: (100 * row.tokens.end as u32..).take(33).collect(),
            ..row.clone()
        })
        .collect();
    let plan =
        AttendPlan::new(&other, 16, HeadShape { num_heads: 8, num_kv_heads: 8, ..heads }, None);
    assert_eq!((plan.num_items(), plan.num_partials), (8 * 5, 0));
}

#[test]
fn moved_pages_hold_the_leading_tokens() {
    for element in [Element::Bf16, Element::F32] {
        for page_size in [16, 32, 5] {
            let spec =
                KvSpec { num_layers: 2, num_kv_heads: 2, head_dim: 8, num_pages: 4, page_size };
            let mut kv = KvPool::new(spec, element).unwrap();
            let words = kv.layout.layer_words() * 2;
            // SAFETY: the pool has two layers and nobody else uses it.
            let all = unsafe { std::slice::from_raw_parts_mut(kv.layer(0), words) };
            all.iter_mut().enumerate().for_each(|(i, word)| *word = i as u32);
            let before = all.to_vec();
            kv.move_page(1, 3, 3);
            let layout = kv.layout;
            let unit = if layout.is_grouped() { 16 } else { 1 };
            let copied = 3_usize.next_multiple_of(unit) * 2 * layout.dim_words;
            for layer in 0..2 {
                for head in 0..2 {
                    let base = layer * layout.layer_words();
                    let from = base + layout.head_start(1, head);
                    let to = base + layout.head_start(3, head);
                    assert_eq!(all[to..to + copied], before[from..from + copied]);
                    let end = to + layout.head_words();
                    assert_eq!(all[to + copied..end], before[to + copied..end]);
                }
            }
        }
    }
}
