//! Paged causal attention, the same for prompts and for decoding.
//!
//! Keys are cut into splits of `SPLIT` tokens at fixed absolute positions. A query's result for a
//! split (softmax with the split's own maximum) depends on the query and the split's keys alone;
//! results are merged in ascending order. So a query's bits do not depend on its neighbours, and
//! splits may be computed by different threads, for queries of several rows at once where those
//! share the split's pages.
//!
//! Within a split: scores of all queries with all tiles of 64 keys, then weights, then weights times
//! values. Scores are in units of log 2. A hidden key has weight exactly 0, so it makes no
//! difference whether a tile that a query does not see is skipped or computed for its neighbours'
//! sake.

use std::f32::consts::LOG2_E;
use std::ops::Range;

use super::rotate::{HeadShape, Layer};
use super::tiles::{Copies, Keys, TILE, TILES, Tile};
use crate::attention_step::AttendRow;
use crate::kv::{KvLayout, MAX_HEAD_DIM};
use crate::memory::Rows;
use crate::simd::{Kernel, LANES, Simd, Vector, exp, exp2};

/// Tokens after which a partial result is merged.
pub(crate) const SPLIT: usize = 256;
/// Queries (tokens times heads that share keys) of one item.
pub(crate) const MAX_QUERIES: usize = 96;
/// Below every score, and finite, so that differences are numbers.
const LOWEST: f32 = -1e30;
/// Values of a partial result beside the output: maximum and sum, in a vector of their own.
const PARTIAL_EXTRA: usize = LANES;

/// A query token of an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Member {
    pub(crate) token: usize, // flat
    pub(crate) position: usize,
}

/// What all items of one layer share.
pub(crate) struct AttendContext<'a> {
    pub(crate) heads: HeadShape,
    pub(crate) window: Option<usize>,
    pub(crate) soft_cap: Option<f32>,
    pub(crate) sinks: Option<&'a [f32]>, // [heads]
    pub(crate) layout: KvLayout,
    pub(crate) layer: Layer,
    pub(crate) queries: Rows<u32>, // [tokens][heads][padded_dim] elements
    pub(crate) output: Rows<u32>,  // [tokens][heads * head_dim] elements
    pub(crate) partials: Rows<f32>, // [partial queries][padded_dim + PARTIAL_EXTRA]
    pub(crate) rows: &'a [AttendRow],
    pub(crate) members: &'a [Member],
    pub(crate) parts: &'a [usize], // rows of `partials`
}

/// Some query tokens, one kv head, some splits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AttendItem {
    /// Whose pages are read; every member's are the same where it sees them.
    pub(crate) row: usize,
    pub(crate) kv_head: usize,
    pub(crate) members: Range<usize>,
    pub(crate) splits: Range<usize>,
    /// First row of `partials`, `[splits][members][heads that share keys]`; None: the output is
    /// written.
    pub(crate) partial: Option<usize>,
}

/// One token, one kv head: the partial results of its splits, in their order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MergeItem {
    pub(crate) token: usize,
    pub(crate) kv_head: usize,
    /// Of `AttendContext::parts`: where the first of the heads that share keys lies.
    pub(crate) parts: Range<usize>,
}

/// Running results of an item's queries, one per thread.
pub(crate) struct Scratch {
    part: State,
    total: State,
    scores: Vec<f32>, // [queries][SPLIT]; then weights, as elements, at the start of each row
    copies: Copies,
}

struct State {
    maximum: Vec<f32>,
    sum: Vec<f32>,
    output: Vec<f32>, // [queries][padded_dim]
}

impl State {
    fn new() -> State {
        State {
            maximum: vec![LOWEST; MAX_QUERIES],
            sum: vec![0.0; MAX_QUERIES],
            output: vec![0.0; MAX_QUERIES * MAX_HEAD_DIM],
        }
    }

    fn reset(&mut self, queries: usize, padded_dim: usize) {
        self.maximum[..queries].fill(LOWEST);
        self.sum[..queries].fill(0.0);
        self.output[..queries * padded_dim].fill(0.0);
    }
}

impl Scratch {
    pub(crate) fn new() -> Scratch {
        Scratch {
            part: State::new(),
            total: State::new(),
            scores: vec![0.0; MAX_QUERIES * SPLIT],
            copies: Copies::new(),
        }
    }
}

/// Floats of one partial result.
pub(crate) fn partial_stride(layout: KvLayout) -> usize {
    layout.padded_dim + PARTIAL_EXTRA
}

/// Splits that hold keys visible to positions `first..=last`.
pub(crate) fn visible_splits(first: usize, last: usize, window: Option<usize>) -> Range<usize> {
    first_visible(first, window) / SPLIT..last / SPLIT + 1
}

/// The first key that a position sees.
pub(crate) fn first_visible(position: usize, window: Option<usize>) -> usize {
    window.map_or(0, |window| (position + 1).saturating_sub(window))
}

/// What queries' scores are scaled by, given the layer's own scale.
pub(crate) fn query_scale(scale: f32, soft_cap: Option<f32>) -> f32 {
    if soft_cap.is_some() { scale } else { scale * LOG2_E }
}

/// One item being computed.
struct Work<'a> {
    context: &'a AttendContext<'a>,
    keys: Keys<'a>,
    num_queries: usize,
    queries: [*const u32; MAX_QUERIES],
    visible: [(usize, usize); MAX_QUERIES], // first and last key
}

impl<'a> Work<'a> {
    #[inline(always)]
    fn new(context: &'a AttendContext<'a>, item: &AttendItem) -> Work<'a> {
        let shared = context.heads.num_heads / context.heads.num_kv_heads;
        let num_queries = item.members.len() * shared;
        let mut queries = [std::ptr::null(); MAX_QUERIES];
        let mut visible = [(0, 0); MAX_QUERIES];
        let members = &context.members[item.members.clone()];
        let slots = queries[..num_queries].chunks_exact_mut(shared);
        let ranges = visible[..num_queries].chunks_exact_mut(shared);
        for (member, (slots, ranges)) in members.iter().zip(slots.zip(ranges)) {
            let row = context.queries.row(member.token);
            for (offset, query) in slots.iter_mut().enumerate() {
                let head = item.kv_head * shared + offset;
                // SAFETY: the row holds every head.
                *query = unsafe { row.add(head * context.layout.dim_words) };
            }
            ranges.fill((first_visible(member.position, context.window), member.position));
        }
        Work { context, keys: Keys::new(context, item), num_queries, queries, visible }
    }

    /// The tiles of a split that some of a few queries see, and those that all of them see wholly.
    #[inline(always)]
    fn tiles(&self, queries: Range<usize>, split: usize) -> (Range<usize>, Range<usize>) {
        let (mut some, mut all) = ((usize::MAX, 0), (0, usize::MAX));
        for &(first, last) in &self.visible[queries] {
            some = (some.0.min(first), some.1.max(last));
            all = (all.0.max(first), all.1.min(last));
        }
        let start = split * SPLIT;
        let down = |position: usize| position.saturating_sub(start) / TILE;
        let end = |position: usize| position.saturating_sub(start).div_ceil(TILE).min(TILES);
        let whole = end(all.0)..down(all.1 + 1).min(TILES);
        (down(some.0).min(TILES)..end(some.1 + 1), whole)
    }

    /// Which of 16 tokens from `start` on a query sees.
    #[inline(always)]
    fn visible(&self, query: usize, start: usize) -> u16 {
        let (first, last) = self.visible[query];
        let end = (last + 1).saturating_sub(start).min(LANES);
        let begin = first.saturating_sub(start).min(LANES);
        (((1_u32 << end) - 1) & !((1_u32 << begin) - 1)) as u16
    }
}

/// Call a function generic over a number of queries, as many as registers have room for.
macro_rules! by_height {
    ($kernel:ty, $count:expr, $function:ident($($argument:expr),*)) => {
        match (<$kernel>::TILE_VECTORS, $count) {
            (4, 1) => $function::<$kernel, 1, 4>($($argument),*),
            (4, 2) => $function::<$kernel, 2, 4>($($argument),*),
            (4, 3) => $function::<$kernel, 3, 4>($($argument),*),
            (4, 4) => $function::<$kernel, 4, 4>($($argument),*),
            (4, 5) => $function::<$kernel, 5, 4>($($argument),*),
            (4, _) => $function::<$kernel, 6, 4>($($argument),*),
            (_, 1) => $function::<$kernel, 1, 1>($($argument),*),
            (_, 2) => $function::<$kernel, 2, 1>($($argument),*),
            (_, 3) => $function::<$kernel, 3, 1>($($argument),*),
            (_, _) => $function::<$kernel, 4, 1>($($argument),*),
        }
    };
}

/// Compute an item.
#[inline(always)]
pub(crate) fn attend<K: Kernel>(
    k: K,
    context: &AttendContext<'_>,
    item: &AttendItem,
    scratch: &mut Scratch,
) {
    let work = Work::new(context, item);
    let queries = work.num_queries;
    let padded_dim = context.layout.padded_dim;
    scratch.total.reset(queries, padded_dim);
    for split in item.splits.clone() {
        let place = (split == item.splits.start, split + 1 == item.splits.end);
        attend_split(k, &work, split, place, scratch);
        if let Some(first) = item.partial {
            let first = first + (split - item.splits.start) * queries;
            store_partials(context, first, &scratch.part, queries);
            continue;
        }
        for query in 0..queries {
            let part = partial_of(&scratch.part, query, padded_dim);
            merge(k, &mut scratch.total, query, part);
        }
    }
    if item.partial.is_some() {
        return;
    }
    let shared = context.heads.num_heads / context.heads.num_kv_heads;
    for (index, member) in context.members[item.members.clone()].iter().enumerate() {
        for offset in 0..shared {
            let head = item.kv_head * shared + offset;
            finish(k, context, (member.token, head), (&mut scratch.total, index * shared + offset));
        }
    }
}

/// Results of all queries for one split, in `scratch.part`.
#[inline(always)]
fn attend_split<K: Kernel>(
    k: K,
    work: &Work<'_>,
    split: usize,
    (is_first, is_last): (bool, bool),
    scratch: &mut Scratch,
) {
    let (part, scores) = (&mut scratch.part, scratch.scores.as_mut_slice());
    let height = if K::TILE_VECTORS == 4 { 6 } else { 4 };
    let (seen, _) = work.tiles(0..work.num_queries, split);
    let mut tiles = [Tile::EMPTY; TILES];
    for index in seen.clone() {
        let start = split * SPLIT + index * TILE;
        let tile = work.keys.tile::<K>(start, index, &mut scratch.copies);
        let fetch = |is_wanted, start| {
            if is_wanted { work.keys.keys_to_fetch(start) } else { None }
        };
        tiles[index] = Tile {
            fetches: true,
            // A split before has fetched them otherwise.
            next_keys: fetch(is_first && index + 1 < seen.end, start + TILE),
            later_keys: fetch(!is_last, start + SPLIT),
            ..tile
        };
    }
    for query in (0..work.num_queries).step_by(height) {
        let count = (work.num_queries - query).min(height);
        by_height!(K, count, weigh(k, work, (split, &tiles), query, (part, scores)));
        for tile in &mut tiles {
            tile.fetches = false;
        }
    }
    for query in (0..work.num_queries).step_by(height) {
        let count = (work.num_queries - query).min(height);
        for tile in &mut tiles {
            tile.fetches = query == 0;
        }
        by_height!(K, count, add_values(k, work, (split, &tiles), query, (part, scores)));
    }
}

/// Scores of `R` queries, and what they become: weights, maxima and sums.
#[inline(always)]
fn weigh<K: Kernel, const R: usize, const V: usize>(
    k: K,
    work: &Work<'_>,
    (split, tiles): (usize, &[Tile; TILES]),
    first: usize,
    (part, scores): (&mut State, &mut [f32]),
) {
    let mut queries = [std::ptr::null(); R];
    queries.copy_from_slice(&work.queries[first..first + R]);
    let (seen, whole) = work.tiles(first..first + R, split);
    let scores = &mut scores[first * SPLIT..(first + R) * SPLIT];
    for index in seen.clone() {
        let tile = &tiles[index];
        for group in (0..4).step_by(V) {
            let sums = dot_keys::<K, R, V>(k, queries, tile, group, work.context.layout);
            for (row, sums) in sums.iter().enumerate() {
                for (offset, &sum) in sums.iter().enumerate() {
                    let lane = (group + offset) * LANES;
                    let mut score = capped(k, sum, work.context.soft_cap);
                    if !whole.contains(&index) {
                        let visible = work.visible(first + row, tile.start + lane);
                        score = k.simd().select(visible, score, k.simd().splat(f32::NEG_INFINITY));
                    }
                    let at = row * SPLIT + index * TILE + lane;
                    // SAFETY: bounds are checked by the slice.
                    unsafe { k.simd().store(scores[at..at + LANES].as_mut_ptr(), score) };
                }
            }
        }
    }
    for row in 0..R {
        let scores = &mut scores[row * SPLIT..(row + 1) * SPLIT];
        let (maximum, sum) = soften(k, scores, seen.start * TILE..seen.end * TILE);
        part.maximum[first + row] = maximum;
        part.sum[first + row] = sum;
    }
}

/// A score after the soft cap, in units of log 2.
#[inline(always)]
fn capped<K: Kernel>(k: K, score: Vector<K>, soft_cap: Option<f32>) -> Vector<K> {
    let Some(cap) = soft_cap else { return score };
    let s = k.simd();
    // tanh x = 1 - 2 / (e^2x + 1)
    let one = s.splat(1.0);
    let power = exp(s, s.mul(score, s.splat(2.0 / cap)));
    let rest = s.div(s.splat(2.0), s.add(power, one));
    s.mul(s.sub(one, rest), s.splat(cap * LOG2_E))
}

/// Scores of `R` queries with `V` groups from `group` on.
#[inline(always)]
fn dot_keys<K: Kernel, const R: usize, const V: usize>(
    k: K,
    queries: [*const u32; R],
    tile: &Tile,
    group: usize,
    layout: KvLayout,
) -> [[Vector<K>; V]; R] {
    let mut sums = [[k.simd().splat(0.0); V]; R];
    let mut keys = [tile.keys[group]; V];
    keys.copy_from_slice(&tile.keys[group..group + V]);
    for word in 0..layout.dim_words {
        if tile.fetches {
            for offset in 0..V {
                k.prefetch(tile.values[group + offset].wrapping_add(word * LANES));
                if let Some(next) = tile.next_keys {
                    k.prefetch(next[group + offset].wrapping_add(word * LANES));
                }
            }
        }
        // SAFETY: queries and groups hold `dim_words` words per token.
        unsafe {
            let mut b = [k.load_words(keys[0].add(word * LANES)); V];
            for offset in 1..V {
                b[offset] = k.load_words(keys[offset].add(word * LANES));
            }
            for row in 0..R {
                let a = k.splat_word(*queries[row].add(word));
                for offset in 0..V {
                    sums[row][offset] = k.dot(sums[row][offset], a, b[offset]);
                }
            }
        }
    }
    sums
}

/// Turn the scores in a range of a split (whole tiles) into weights; their maximum and sum.
#[inline(always)]
fn soften<K: Kernel>(k: K, scores: &mut [f32], range: Range<usize>) -> (f32, f32) {
    let s = k.simd();
    let mut highest = [s.splat(LOWEST); 4];
    for at in range.clone().step_by(TILE) {
        for (group, highest) in highest.iter_mut().enumerate() {
            let at = at + group * LANES;
            // SAFETY: bounds are checked by the slice.
            *highest = s.max(*highest, unsafe { s.load(scores[at..at + LANES].as_ptr()) });
        }
    }
    let [a, b, c, d] = highest;
    let maximum = s.highest(s.max(s.max(a, b), s.max(c, d)));
    let shift = s.splat(maximum);
    let mut sums = [s.splat(0.0); 4];
    for at in range.step_by(TILE) {
        for (group, sum) in sums.iter_mut().enumerate() {
            let at = at + group * LANES;
            // SAFETY: bounds are checked by the slices; elements take no more room than scores, so
            // none is written that is still to be read.
            unsafe {
                let score = s.load(scores[at..at + LANES].as_ptr());
                let weight = exp2(s, s.sub(score, shift));
                *sum = s.add(*sum, weight);
                let to = scores[at / K::PER_WORD..][..LANES / K::PER_WORD].as_mut_ptr();
                k.store_elements(to.cast(), weight);
            }
        }
    }
    let [a, b, c, d] = sums;
    (maximum, s.sum(s.add(s.add(a, b), s.add(c, d))))
}

/// Weights of `R` queries times values.
#[inline(always)]
fn add_values<K: Kernel, const R: usize, const V: usize>(
    k: K,
    work: &Work<'_>,
    (split, tiles): (usize, &[Tile; TILES]),
    first: usize,
    (part, weights): (&mut State, &mut [f32]),
) {
    let padded_dim = work.context.layout.padded_dim;
    let (seen, _) = work.tiles(first..first + R, split);
    let mut rows = [std::ptr::null(); R];
    for (row, start) in rows.iter_mut().enumerate() {
        *start = weights[(first + row) * SPLIT..(first + row + 1) * SPLIT].as_ptr().cast();
    }
    let output = &mut part.output[first * padded_dim..(first + R) * padded_dim];
    let mut column = 0;
    while column + V * LANES <= padded_dim {
        add_columns::<K, R, V>(k, (tiles, seen.clone()), rows, output, (column, padded_dim));
        column += V * LANES;
    }
    while column < padded_dim {
        add_columns::<K, R, 1>(k, (tiles, seen.clone()), rows, output, (column, padded_dim));
        column += LANES;
    }
}

/// `V` vectors of columns of the outputs of `R` queries.
#[inline(always)]
fn add_columns<K: Kernel, const R: usize, const V: usize>(
    k: K,
    (tiles, seen): (&[Tile; TILES], Range<usize>),
    weights: [*const u32; R],
    output: &mut [f32],
    (column, padded_dim): (usize, usize),
) {
    let s = k.simd();
    let mut sums = [[s.splat(0.0); V]; R];
    let group_rows = LANES / K::PER_WORD;
    for index in seen {
        let tile = &tiles[index];
        for (group, &values) in tile.values.iter().enumerate() {
            let at = (index * 4 + group) * group_rows;
            for word in 0..group_rows {
                if let (true, Some(later)) = (tile.fetches, tile.later_keys) {
                    for vector in 0..V {
                        let line = word * padded_dim + column + vector * LANES;
                        k.prefetch(later[group].wrapping_add(line));
                    }
                }
                // SAFETY: a group holds `group_rows * padded_dim` words, `weights` a split each.
                unsafe {
                    let from = values.add(word * padded_dim + column);
                    let mut b = [k.load_words(from); V];
                    for vector in 1..V {
                        b[vector] = k.load_words(from.add(vector * LANES));
                    }
                    for row in 0..R {
                        let a = k.splat_word(*weights[row].add(at + word));
                        for vector in 0..V {
                            sums[row][vector] = k.dot(sums[row][vector], a, b[vector]);
                        }
                    }
                }
            }
        }
    }
    for (row, sums) in sums.iter().enumerate() {
        for (vector, &sum) in sums.iter().enumerate() {
            let at = row * padded_dim + column + vector * LANES;
            // SAFETY: bounds are checked by the slice.
            unsafe { s.store(output[at..at + LANES].as_mut_ptr(), sum) };
        }
    }
}

/// A partial result: output, maximum, sum.
type Partial<'a> = (&'a [f32], f32, f32);

fn partial_of(state: &State, query: usize, padded_dim: usize) -> Partial<'_> {
    let output = &state.output[query * padded_dim..(query + 1) * padded_dim];
    (output, state.maximum[query], state.sum[query])
}

/// Add a later split's result to the total.
#[inline(always)]
fn merge<K: Kernel>(k: K, total: &mut State, query: usize, part: Partial<'_>) {
    let s = k.simd();
    let (output, maximum, sum) = part;
    let before = total.maximum[query];
    let highest = if maximum > before { maximum } else { before };
    let mut scales = [0.0; LANES];
    scales[0] = before - highest;
    scales[1] = maximum - highest;
    // SAFETY: the array is a vector long.
    unsafe { s.store(scales.as_mut_ptr(), exp2(s, s.load(scales.as_ptr()))) };
    total.maximum[query] = highest;
    total.sum[query] = total.sum[query] * scales[0] + sum * scales[1];
    let (old, new) = (s.splat(scales[0]), s.splat(scales[1]));
    let to = &mut total.output[query * output.len()..(query + 1) * output.len()];
    for (to, from) in to.chunks_exact_mut(LANES).zip(output.chunks_exact(LANES)) {
        // SAFETY: chunks are a vector long.
        unsafe {
            let scaled = s.mul(s.load(to.as_ptr()), old);
            s.store(to.as_mut_ptr(), s.fma(s.load(from.as_ptr()), new, scaled));
        }
    }
}

fn store_partials(context: &AttendContext<'_>, first: usize, state: &State, queries: usize) {
    let padded_dim = context.layout.padded_dim;
    for query in 0..queries {
        let (output, maximum, sum) = partial_of(state, query, padded_dim);
        let to = context.partials.row(first + query);
        // SAFETY: rows of `partials` have room for output and extra, and this one is ours alone.
        unsafe {
            std::ptr::copy_nonoverlapping(output.as_ptr(), to, padded_dim);
            *to.add(padded_dim) = maximum;
            *to.add(padded_dim + 1) = sum;
        }
    }
}

/// Merge the partial results of a token's splits and store them.
#[inline(always)]
pub(crate) fn merge_partials<K: Kernel>(
    k: K,
    context: &AttendContext<'_>,
    item: &MergeItem,
    scratch: &mut Scratch,
) {
    let shared = context.heads.num_heads / context.heads.num_kv_heads;
    let padded_dim = context.layout.padded_dim;
    scratch.total.reset(shared, padded_dim);
    for query in 0..shared {
        for &part in &context.parts[item.parts.clone()] {
            let row = context.partials.row(part + query).cast_const();
            // SAFETY: an item wrote this row in the job before.
            let part = unsafe {
                let output = std::slice::from_raw_parts(row, padded_dim);
                (output, *row.add(padded_dim), *row.add(padded_dim + 1))
            };
            merge(k, &mut scratch.total, query, part);
        }
        let head = item.kv_head * shared + query;
        finish(k, context, (item.token, head), (&mut scratch.total, query));
    }
}

static NO_VALUES: [f32; MAX_HEAD_DIM] = [0.0; MAX_HEAD_DIM];

/// Add the sink, divide by the sum and store one head of one token.
#[inline(always)]
fn finish<K: Kernel>(
    k: K,
    context: &AttendContext<'_>,
    (token, head): (usize, usize),
    (total, query): (&mut State, usize),
) {
    let s = k.simd();
    let KvLayout { head_dim, padded_dim, .. } = context.layout;
    if let Some(sinks) = context.sinks {
        merge(k, total, query, (&NO_VALUES[..padded_dim], sinks[head] * LOG2_E, 1.0));
    }
    let (output, _, sum) = partial_of(total, query, padded_dim);
    let sum = s.splat(sum);
    let row = context.output.row(token);
    for (index, chunk) in output.chunks_exact(LANES).enumerate() {
        let at = index * LANES;
        // SAFETY: the row holds every head; whole vectors are stored only where they fit, and
        // elsewhere elements one by one, as a neighbouring head's may share a word.
        unsafe {
            // Adding zero makes -0 and 0, which hidden tiles may turn into one another, the same.
            let x = s.add(s.div(s.load(chunk.as_ptr()), sum), s.splat(0.0));
            if head_dim.is_multiple_of(LANES) {
                k.store_elements(row.add((head * head_dim + at) / K::PER_WORD), x);
                continue;
            }
            let mut elements = [0_u32; LANES];
            k.store_elements(elements.as_mut_ptr(), x);
            let count = (head_dim - at).min(LANES);
            let bytes = 4 / K::PER_WORD;
            let to = row.cast::<u8>().add((head * head_dim + at) * bytes);
            std::ptr::copy_nonoverlapping(elements.as_ptr().cast(), to, count * bytes);
        }
    }
}
