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
use super::tiles::{Copies, Keys, TILE, TILE_GROUPS, TILES, Tile};
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
    scores: Vec<f32>, // [TILES][MAX_QUERIES][TILE]; weights, as elements, at the start of each row
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

/// Where a query's scores with a tile are in `Scratch::scores`.
#[inline(always)]
fn scores_at(query: usize, tile: usize) -> usize {
    (tile * MAX_QUERIES + query) * TILE
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

/// What a few queries see of a split.
struct Seen {
    /// Tiles that some of them see.
    tiles: Range<usize>,
    /// Tiles that all of them see wholly.
    whole: Range<usize>,
    /// Groups before the last that some of them see, and itself.
    end_group: usize,
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

    /// What some queries see of a split.
    #[inline(always)]
    fn seen(&self, queries: Range<usize>, split: usize) -> Seen {
        let (mut some, mut all) = ((usize::MAX, 0), (0, usize::MAX));
        for &(first, last) in &self.visible[queries] {
            some = (some.0.min(first), some.1.max(last));
            all = (all.0.max(first), all.1.min(last));
        }
        let start = split * SPLIT;
        let down = |position: usize| position.saturating_sub(start) / TILE;
        let end = |position: usize| position.saturating_sub(start).div_ceil(TILE).min(TILES);
        let end_group = (some.1 + 1).saturating_sub(start).div_ceil(LANES).min(SPLIT / LANES);
        Seen {
            tiles: down(some.0).min(TILES)..end_group.div_ceil(TILE / LANES),
            whole: end(all.0)..down(all.1 + 1).min(TILES),
            end_group,
        }
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
    let Scratch { part, total, scores, copies } = scratch;
    for split in item.splits.clone() {
        let is_first = split == item.splits.start;
        let state = if is_first || item.partial.is_some() { &mut *total } else { &mut *part };
        attend_split(k, &work, split, (state, scores, copies));
        if let Some(first) = item.partial {
            let first = first + (split - item.splits.start) * queries;
            store_partials(context, first, total, queries);
        } else if !is_first {
            merge_all(k, total, part, queries, padded_dim);
        }
    }
    if item.partial.is_some() {
        return;
    }
    let shared = context.heads.num_heads / context.heads.num_kv_heads;
    for (index, member) in context.members[item.members.clone()].iter().enumerate() {
        for offset in 0..shared {
            let head = item.kv_head * shared + offset;
            finish(k, context, (member.token, head), (total, index * shared + offset));
        }
    }
}

/// Results of all queries for one split.
#[inline(always)]
fn attend_split<K: Kernel>(
    k: K,
    work: &Work<'_>,
    split: usize,
    (state, scores, copies): (&mut State, &mut [f32], &mut Copies),
) {
    let height = if K::TILE_VECTORS == 4 { 6 } else { 4 };
    let Seen { tiles: seen, .. } = work.seen(0..work.num_queries, split);
    let mut tiles = [Tile::EMPTY; TILES];
    for index in seen {
        let start = split * SPLIT + index * TILE;
        tiles[index] = work.keys.tile::<K>(start, index, copies);
    }
    for query in (0..work.num_queries).step_by(height) {
        let count = (work.num_queries - query).min(height);
        by_height!(K, count, weigh(k, work, (split, &tiles), query, (state, scores)));
    }
    for query in (0..work.num_queries).step_by(height) {
        let count = (work.num_queries - query).min(height);
        by_height!(K, count, add_values(k, work, (split, &tiles), query, (state, scores)));
    }
}

/// Scores of `R` queries, and what they become: weights, maxima and sums.
#[inline(always)]
fn weigh<K: Kernel, const R: usize, const V: usize>(
    k: K,
    work: &Work<'_>,
    (split, tiles): (usize, &[Tile; TILES]),
    first: usize,
    (state, scores): (&mut State, &mut [f32]),
) {
    let s = k.simd();
    let seen = work.seen(first..first + R, split);
    let mut queries = [std::ptr::null(); R];
    queries.copy_from_slice(&work.queries[first..first + R]);
    for index in seen.tiles.clone() {
        let (tile, left) = (&tiles[index], seen.end_group - index * TILE_GROUPS);
        let scores = &mut scores[scores_at(first, index)..scores_at(first + R, index)];
        if V == TILE_GROUPS && left <= 2 {
            score::<K, R, 2>(k, queries, (tile, 0), work.context.layout.dim_words, scores);
        } else {
            for group in (0..left.min(TILE_GROUPS)).step_by(V) {
                score::<K, R, V>(k, queries, (tile, group), work.context.layout.dim_words, scores);
            }
        }
        if work.context.soft_cap.is_some() || !seen.whole.contains(&index) {
            for (row, scores) in scores.chunks_exact_mut(TILE).enumerate() {
                finish_scores(k, work, (first + row, tile.start), scores);
            }
        }
    }
    // One kind of step for all queries before the next: their latencies overlap.
    let groups = (seen.tiles.start, seen.end_group);
    let mut maxima = [s.splat(0.0); R];
    for row in 0..R {
        maxima[row] = highest(k, scores, first + row, groups);
    }
    for row in 0..R {
        let maximum = s.highest(maxima[row]);
        state.maximum[first + row] = maximum;
    }
    let mut sums = [s.splat(0.0); R];
    for row in 0..R {
        let shift = s.splat(state.maximum[first + row]);
        sums[row] = soften(k, scores, first + row, groups, shift);
    }
    for row in 0..R {
        state.sum[first + row] = s.sum(sums[row]);
    }
}

/// Scores, before any cap, of `R` queries with `V` groups of a tile.
#[inline(always)]
fn score<K: Kernel, const R: usize, const V: usize>(
    k: K,
    queries: [*const u32; R],
    (tile, group): (&Tile, usize),
    dim_words: usize,
    scores: &mut [f32],
) {
    let s = k.simd();
    let mut sums = [[s.splat(0.0); V]; R];
    let mut keys = [tile.keys[group]; V];
    keys.copy_from_slice(&tile.keys[group..group + V]);
    for word in 0..dim_words {
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
    assert!(scores.len() == R * TILE && group + V <= TILE_GROUPS);
    for row in 0..R {
        for offset in 0..V {
            let at = row * TILE + (group + offset) * LANES;
            // SAFETY: just checked.
            unsafe { s.store(scores.as_mut_ptr().add(at), sums[row][offset]) };
        }
    }
}

/// Cap a query's scores with the tile at `start`, and make those of keys that it does not see
/// infinitely low.
#[inline(always)]
fn finish_scores<K: Kernel>(
    k: K,
    work: &Work<'_>,
    (query, start): (usize, usize),
    scores: &mut [f32],
) {
    let s = k.simd();
    for (group, scores) in scores.chunks_exact_mut(LANES).enumerate() {
        let visible = work.visible(query, start + group * LANES);
        // SAFETY: a chunk is a vector long.
        unsafe {
            let score = capped(k, s.load(scores.as_ptr()), work.context.soft_cap);
            let score = s.select(visible, score, s.splat(f32::NEG_INFINITY));
            s.store(scores.as_mut_ptr(), score);
        }
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

/// The largest of a query's scores with some groups of a split, from a tile on.
#[inline(always)]
fn highest<K: Kernel>(
    k: K,
    scores: &[f32],
    query: usize,
    (first_tile, end_group): (usize, usize),
) -> Vector<K> {
    let s = k.simd();
    let mut highest = [s.splat(LOWEST); TILE_GROUPS];
    for tile in first_tile..end_group / TILE_GROUPS {
        let scores = &scores[scores_at(query, tile)..scores_at(query + 1, tile)];
        for group in 0..TILE_GROUPS {
            // SAFETY: a query has as many groups of scores with a tile.
            let score = unsafe { s.load(scores.as_ptr().add(group * LANES)) };
            highest[group] = s.max(highest[group], score);
        }
    }
    let tile = (end_group / TILE_GROUPS).max(first_tile);
    for group in 0..end_group.saturating_sub(tile * TILE_GROUPS) {
        let at = scores_at(query, tile) + group * LANES;
        // SAFETY: bounds are checked by the slice.
        let score = unsafe { s.load(scores[at..at + LANES].as_ptr()) };
        highest[0] = s.max(highest[0], score);
    }
    let [a, b, c, d] = highest;
    s.max(s.max(a, b), s.max(c, d))
}

/// Turn a query's scores with some groups of a split, from a tile on, into weights; their sums.
#[inline(always)]
fn soften<K: Kernel>(
    k: K,
    scores: &mut [f32],
    query: usize,
    (first_tile, end_group): (usize, usize),
    shift: Vector<K>,
) -> Vector<K> {
    let s = k.simd();
    let mut sums = [s.splat(0.0); TILE_GROUPS];
    for tile in first_tile..end_group / TILE_GROUPS {
        let scores = &mut scores[scores_at(query, tile)..scores_at(query + 1, tile)];
        for group in 0..TILE_GROUPS {
            sums[group] = s.add(sums[group], soften_group(k, scores, group, shift));
        }
    }
    let tile = (end_group / TILE_GROUPS).max(first_tile);
    for group in 0..end_group.saturating_sub(tile * TILE_GROUPS) {
        let scores = &mut scores[scores_at(query, tile)..scores_at(query + 1, tile)];
        sums[group] = s.add(sums[group], soften_group(k, scores, group, shift));
    }
    let [a, b, c, d] = sums;
    s.add(s.add(a, b), s.add(c, d))
}

/// Weights of a query for a group of a tile.
#[inline(always)]
fn soften_group<K: Kernel>(k: K, scores: &mut [f32], group: usize, shift: Vector<K>) -> Vector<K> {
    let s = k.simd();
    let at = group * LANES;
    // SAFETY: bounds are checked by the slices; elements take no more room than scores, so none is
    // written that is still to be read.
    unsafe {
        let score = s.load(scores[at..at + LANES].as_ptr());
        let weight = exp2(s, s.sub(score, shift));
        let to = scores[at / K::PER_WORD..][..LANES / K::PER_WORD].as_mut_ptr();
        k.store_elements(to.cast(), weight);
        weight
    }
}

/// Weights of `R` queries times values.
#[inline(always)]
fn add_values<K: Kernel, const R: usize, const V: usize>(
    k: K,
    work: &Work<'_>,
    (split, tiles): (usize, &[Tile; TILES]),
    first: usize,
    (state, weights): (&mut State, &[f32]),
) {
    let padded_dim = work.context.layout.padded_dim;
    let seen = work.seen(first..first + R, split);
    let weights = &weights[scores_at(first, 0)..];
    let output = &mut state.output[first * padded_dim..(first + R) * padded_dim];
    let mut column = 0;
    while column + V * LANES <= padded_dim {
        add_columns::<K, R, V>(k, (tiles, &seen), weights, output, (column, padded_dim));
        column += V * LANES;
    }
    while column < padded_dim {
        add_columns::<K, R, 1>(k, (tiles, &seen), weights, output, (column, padded_dim));
        column += LANES;
    }
}

/// `V` vectors of columns of the outputs of `R` queries.
#[inline(always)]
fn add_columns<K: Kernel, const R: usize, const V: usize>(
    k: K,
    (tiles, seen): (&[Tile; TILES], &Seen),
    weights: &[f32],
    output: &mut [f32],
    (column, padded_dim): (usize, usize),
) {
    let s = k.simd();
    let mut sums = [[s.splat(0.0); V]; R];
    for index in seen.tiles.clone() {
        let tile = &tiles[index];
        let weights = &weights[scores_at(0, index)..][..R * TILE];
        let place = (column, padded_dim);
        match seen.end_group - index * TILE_GROUPS {
            0..TILE_GROUPS => {
                let groups = seen.end_group - index * TILE_GROUPS;
                add_tile::<K, R, V>(k, (tile, groups), weights, &mut sums, place);
            }
            _ => add_tile::<K, R, V>(k, (tile, TILE_GROUPS), weights, &mut sums, place),
        }
    }
    assert!(output.len() == R * padded_dim && column + V * LANES <= padded_dim);
    for row in 0..R {
        for vector in 0..V {
            let at = row * padded_dim + column + vector * LANES;
            // SAFETY: just checked.
            unsafe { s.store(output.as_mut_ptr().add(at), sums[row][vector]) };
        }
    }
}

/// Add weights times values of a tile's leading groups: the first words of all groups, then the
/// next, as memory is faster where several streams are read at once.
#[inline(always)]
fn add_tile<K: Kernel, const R: usize, const V: usize>(
    k: K,
    (tile, groups): (&Tile, usize),
    weights: &[f32],
    sums: &mut [[Vector<K>; V]; R],
    (column, padded_dim): (usize, usize),
) {
    let group_rows = LANES / K::PER_WORD;
    assert!(weights.len() == R * TILE && groups <= TILE_GROUPS);
    for word in 0..group_rows {
        for group in 0..groups {
            // SAFETY: a group holds `group_rows * padded_dim` words, a query's weights are within
            // its scores with the tile.
            unsafe {
                let from = tile.values[group].add(word * padded_dim + column);
                let mut b = [k.load_words(from); V];
                for vector in 1..V {
                    b[vector] = k.load_words(from.add(vector * LANES));
                }
                let at = group * group_rows + word;
                for row in 0..R {
                    let a = k.splat_word(*weights.as_ptr().cast::<u32>().add(row * TILE + at));
                    for vector in 0..V {
                        sums[row][vector] = k.dot(sums[row][vector], a, b[vector]);
                    }
                }
            }
        }
    }
}

/// A partial result: output, maximum, sum.
type Partial<'a> = (&'a [f32], f32, f32);

fn partial_of(state: &State, query: usize, padded_dim: usize) -> Partial<'_> {
    let output = &state.output[query * padded_dim..(query + 1) * padded_dim];
    (output, state.maximum[query], state.sum[query])
}

/// Add the results of a later split to the totals of all queries.
#[inline(always)]
fn merge_all<K: Kernel>(k: K, total: &mut State, part: &State, queries: usize, padded_dim: usize) {
    let s = k.simd();
    let mut scales = [[0.0; LANES]; 2];
    for first in (0..queries).step_by(LANES) {
        let lanes = first..first + LANES;
        let totals = (&mut total.maximum[lanes.clone()], &mut total.sum[lanes.clone()]);
        // SAFETY: slices and arrays are a vector long.
        unsafe {
            let before = s.load(totals.0.as_ptr());
            let maximum = s.load(part.maximum[lanes.clone()].as_ptr());
            let highest = s.max(maximum, before);
            let (old, new) = (exp2(s, s.sub(before, highest)), exp2(s, s.sub(maximum, highest)));
            let sum = s.mul(s.load(totals.1.as_ptr()), old);
            let sum = s.add(sum, s.mul(s.load(part.sum[lanes].as_ptr()), new));
            s.store(totals.0.as_mut_ptr(), highest);
            s.store(totals.1.as_mut_ptr(), sum);
            s.store(scales[0].as_mut_ptr(), old);
            s.store(scales[1].as_mut_ptr(), new);
        }
        for lane in 0..LANES.min(queries - first) {
            let at = (first + lane) * padded_dim;
            let to = &mut total.output[at..at + padded_dim];
            let from = &part.output[at..at + padded_dim];
            add_scaled(k, to, from, [s.splat(scales[0][lane]), s.splat(scales[1][lane])]);
        }
    }
}

/// `to * old + from * new`, rounded twice, in whole vectors.
#[inline(always)]
fn add_scaled<K: Kernel>(k: K, to: &mut [f32], from: &[f32], [old, new]: [Vector<K>; 2]) {
    let s = k.simd();
    assert!(to.len() == from.len() && to.len().is_multiple_of(LANES));
    for at in (0..to.len()).step_by(LANES) {
        // SAFETY: both are as many whole vectors long.
        unsafe {
            let (to, from) = (to.as_mut_ptr().add(at), from.as_ptr().add(at));
            let scaled = s.mul(s.load(to), old);
            s.store(to, s.fma(s.load(from), new, scaled));
        }
    }
}

/// Add a later split's result to the total.
#[inline(always)]
fn merge<K: Kernel>(k: K, total: &mut State, query: usize, part: Partial<'_>) {
    let s = k.simd();
    let (output, maximum, sum) = part;
    let before = total.maximum[query];
    let highest = if maximum > before { maximum } else { before };
    // Vectors of equal lanes: nothing waits for a value to go through memory.
    let (old, new) = (exp2(s, s.splat(before - highest)), exp2(s, s.splat(maximum - highest)));
    let sum = s.add(s.mul(s.splat(total.sum[query]), old), s.mul(s.splat(sum), new));
    let mut sums = [0.0; LANES];
    // SAFETY: the array is a vector long.
    unsafe { s.store(sums.as_mut_ptr(), sum) };
    total.maximum[query] = highest;
    total.sum[query] = sums[0];
    let to = &mut total.output[query * output.len()..(query + 1) * output.len()];
    add_scaled(k, to, output, [old, new]);
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
