//! Paged causal attention, the same for prompts and for decoding.
//!
//! A query's keys are taken in ascending order, in tiles of 64 tokens at fixed absolute positions,
//! with a running maximum (online softmax). Every `SPLIT` tokens, also at fixed positions, the
//! partial result is merged into the total and a new one begun. So a query's bits depend on its own
//! keys alone, whatever its neighbours, and splits may be computed by different threads.
//!
//! A hidden key has weight exactly 0, so it makes no difference whether a tile that a query does not
//! see is skipped or computed for its neighbours' sake.

use std::ops::Range;

use super::rotate::{HeadShape, Layer, put_lane};
use crate::attention_step::AttendRow;
use crate::kv::{KvLayout, MAX_HEAD_DIM};
use crate::memory::Rows;
use crate::simd::{Kernel, LANES, Simd, Vector, exp};

/// Tokens of a tile: four groups.
const TILE: usize = 4 * LANES;
/// Tokens after which a partial result is merged.
pub(crate) const SPLIT: usize = 256;
/// Queries (tokens times heads that share keys) of one item.
pub(crate) const MAX_QUERIES: usize = 64;
/// Below every score, and finite, so that differences are numbers.
const LOWEST: f32 = -1e30;
/// Values of a partial result beside the output: maximum and sum, in a vector of their own.
const PARTIAL_EXTRA: usize = LANES;

/// What all items of one layer share.
pub(crate) struct AttendContext<'a> {
    pub(crate) heads: HeadShape,
    pub(crate) window: Option<usize>,
    pub(crate) layout: KvLayout,
    pub(crate) layer: Layer,
    pub(crate) queries: Rows<u32>, // [tokens][heads][padded_dim] elements
    pub(crate) output: Rows<u32>,  // [tokens][heads * head_dim] elements
    pub(crate) partials: Rows<f32>, // [partial queries][padded_dim + PARTIAL_EXTRA]
    pub(crate) rows: &'a [AttendRow],
}

/// Consecutive tokens of one row, one kv head, some splits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AttendItem {
    pub(crate) row: usize, // of the step
    pub(crate) kv_head: usize,
    pub(crate) first_token: usize, // flat
    pub(crate) num_tokens: usize,
    pub(crate) first_position: usize,
    pub(crate) kv_len: usize,
    pub(crate) splits: Range<usize>,
    /// First row of `partials`; None: the output is written.
    pub(crate) partial: Option<usize>,
}

/// Running results of an item's queries, one per thread.
pub(crate) struct Scratch {
    part: State,
    total: State,
    weights: Vec<u32>, // [6][TILE] elements, at most
    groups: Vec<u32>,  // [4][keys, values]
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
            weights: vec![0; 6 * TILE],
            groups: vec![0; 4 * 2 * LANES * MAX_HEAD_DIM],
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

fn first_visible(position: usize, window: Option<usize>) -> usize {
    window.map_or(0, |window| (position + 1).saturating_sub(window))
}

/// One item being computed.
struct Work<'a> {
    context: &'a AttendContext<'a>,
    item: &'a AttendItem,
    shared: usize, // heads that share keys
}

/// The groups of a tile.
struct Tile {
    start: usize,
    keys: [*const u32; 4],
    values: [*const u32; 4],
    /// Where the next tile's groups lie, to be fetched from memory meanwhile.
    next: Option<[*const u32; 4]>,
}

impl Work<'_> {
    fn num_queries(&self) -> usize {
        self.item.num_tokens * self.shared
    }

    /// Position of a query; queries of one token are neighbours.
    #[inline(always)]
    fn position(&self, query: usize) -> usize {
        self.item.first_position + query / self.shared
    }

    #[inline(always)]
    fn query(&self, query: usize) -> *const u32 {
        let token = self.item.first_token + query / self.shared;
        let head = self.item.kv_head * self.shared + query % self.shared;
        let row = self.context.queries.row(token);
        // SAFETY: the row holds every head.
        unsafe { row.add(head * self.context.layout.dim_words) }
    }

    /// Which of 16 tokens from `start` on a query sees.
    #[inline(always)]
    fn visible(&self, query: usize, start: usize) -> u16 {
        let position = self.position(query);
        let end = (position + 1).saturating_sub(start).min(LANES);
        let begin = first_visible(position, self.context.window).saturating_sub(start).min(LANES);
        (((1_u32 << end) - 1) & !((1_u32 << begin) - 1)) as u16
    }
}

/// Compute an item.
#[inline(always)]
pub(crate) fn attend<K: Kernel>(
    k: K,
    context: &AttendContext<'_>,
    item: &AttendItem,
    scratch: &mut Scratch,
) {
    let shared = context.heads.num_heads / context.heads.num_kv_heads;
    let work = Work { context, item, shared };
    let queries = work.num_queries();
    assert!(queries <= MAX_QUERIES);
    let padded_dim = context.layout.padded_dim;
    scratch.total.reset(queries, padded_dim);
    let last = item.first_position + item.num_tokens - 1;
    let first_tile = first_visible(item.first_position, context.window) / TILE;
    for split in item.splits.clone() {
        scratch.part.reset(queries, padded_dim);
        let tiles = split * (SPLIT / TILE)..(split + 1) * (SPLIT / TILE);
        for index in tiles.start.max(first_tile)..tiles.end.min(last / TILE + 1) {
            let mut tile = gather_tile::<K>(&work, index * TILE, &mut scratch.groups);
            if index < last / TILE {
                tile.next = next_groups(&work, (index + 1) * TILE);
            }
            all_queries(k, &work, &tile, (&mut scratch.part, &mut scratch.weights));
        }
        if let Some(first) = item.partial {
            store_partials(context, first, &scratch.part, queries);
            return;
        }
        for query in 0..queries {
            let part = partial_of(&scratch.part, query, padded_dim);
            merge(k, &mut scratch.total, query, part);
        }
    }
    for query in 0..queries {
        let token = item.first_token + query / shared;
        let head = item.kv_head * shared + query % shared;
        let output = &scratch.total.output[query * padded_dim..][..padded_dim];
        store_output(k, context, (token, head), (output, scratch.total.sum[query]));
    }
}

/// Find a tile's groups; those that cannot be used as they lie are copied.
#[inline(always)]
fn gather_tile<K: Kernel>(work: &Work<'_>, start: usize, copies: &mut [u32]) -> Tile {
    let context = work.context;
    let layout = context.layout;
    let (item, group_words) = (work.item, layout.group_words());
    let table = &context.rows[item.row].table;
    let mut tile =
        Tile { start, keys: [std::ptr::null(); 4], values: [std::ptr::null(); 4], next: None };
    for index in 0..4 {
        let position = start + index * LANES;
        if position >= item.kv_len {
            // No query sees it: any readable group will do.
            (tile.keys[index], tile.values[index]) = (tile.keys[0], tile.values[0]);
            continue;
        }
        let valid = (item.kv_len - position).min(LANES);
        let copy = copies[index * 2 * group_words..][..2 * group_words].as_mut_ptr();
        // SAFETY: pages in the table lie within the pool; copies have room for a group.
        unsafe {
            let copied = [copy, copy.add(group_words)];
            if !layout.is_grouped() {
                for lane in 0..LANES {
                    let from = if lane < valid {
                        let page = table[(position + lane) / layout.page_size] as usize;
                        let offset = (position + lane) % layout.page_size;
                        context.layer.0.add(layout.plain_start(page, item.kv_head, offset))
                    } else {
                        ZEROS.as_ptr().cast_mut()
                    };
                    let from = [from.cast_const(), from.add(layout.dim_words).cast_const()];
                    put_lane::<K>(layout, copied, lane, from);
                }
                (tile.keys[index], tile.values[index]) = (copied[0], copied[1]);
                continue;
            }
            let page = table[position / layout.page_size] as usize;
            let offset = position % layout.page_size;
            let group: *const u32 =
                context.layer.0.add(layout.group_start(page, item.kv_head, offset));
            tile.keys[index] = group;
            tile.values[index] = group.add(group_words);
            if valid < LANES {
                copy_values::<K>(layout, group.add(group_words), copied[1], valid);
                tile.values[index] = copied[1];
            }
        }
    }
    tile
}

/// Groups of the tile at `start` where they can be used as they lie.
#[inline(always)]
fn next_groups(work: &Work<'_>, start: usize) -> Option<[*const u32; 4]> {
    let context = work.context;
    let layout = context.layout;
    let mut groups = [std::ptr::null(); 4];
    for (index, group) in groups.iter_mut().enumerate() {
        let position = (start + index * LANES).min(work.item.kv_len - 1);
        let page = context.rows[work.item.row].table[position / layout.page_size] as usize;
        let at = layout.group_start(page, work.item.kv_head, position % layout.page_size);
        *group = context.layer.0.wrapping_add(at).cast_const();
    }
    layout.is_grouped().then_some(groups)
}

static ZEROS: [u32; 2 * MAX_HEAD_DIM] = [0; 2 * MAX_HEAD_DIM];

/// Copy a group's values without what an earlier owner of the page left behind: weight 0 times
/// infinity would be NaN.
///
/// # Safety
/// Both are a group's values.
#[inline(always)]
unsafe fn copy_values<K: Kernel>(layout: KvLayout, from: *const u32, to: *mut u32, valid: usize) {
    let per_row = layout.padded_dim;
    for row in 0..LANES / K::PER_WORD {
        let kept = valid.saturating_sub(row * K::PER_WORD);
        let mask = match (K::PER_WORD, kept) {
            (_, 0) => 0,
            (2, 1) => 0xffff,
            _ => u32::MAX,
        };
        for word in row * per_row..(row + 1) * per_row {
            // SAFETY: the caller's promise.
            unsafe { *to.add(word) = *from.add(word) & mask };
        }
    }
}

#[inline(always)]
fn all_queries<K: Kernel>(
    k: K,
    work: &Work<'_>,
    tile: &Tile,
    (state, weights): (&mut State, &mut Vec<u32>),
) {
    let queries = work.num_queries();
    let height = if K::TILE_VECTORS == 4 { 6 } else { 4 };
    let mut query = 0;
    let fetched = Tile { next: None, ..*tile };
    let mut tile = tile;
    while query < queries {
        let count = (queries - query).min(height);
        if work.position(query + count - 1) >= tile.start {
            let to = (&mut *state, &mut *weights);
            match (K::TILE_VECTORS, count) {
                (4, 1) => some_queries::<K, 1, 4>(k, work, tile, query, to),
                (4, 2) => some_queries::<K, 2, 4>(k, work, tile, query, to),
                (4, 3) => some_queries::<K, 3, 4>(k, work, tile, query, to),
                (4, 4) => some_queries::<K, 4, 4>(k, work, tile, query, to),
                (4, 5) => some_queries::<K, 5, 4>(k, work, tile, query, to),
                (4, _) => some_queries::<K, 6, 4>(k, work, tile, query, to),
                (_, 1) => some_queries::<K, 1, 1>(k, work, tile, query, to),
                (_, 2) => some_queries::<K, 2, 1>(k, work, tile, query, to),
                (_, 3) => some_queries::<K, 3, 1>(k, work, tile, query, to),
                (_, _) => some_queries::<K, 4, 1>(k, work, tile, query, to),
            }
        }
        query += count;
        tile = &fetched;
    }
}

/// Take one tile's keys and values for `R` queries.
#[inline(always)]
fn some_queries<K: Kernel, const R: usize, const V: usize>(
    k: K,
    work: &Work<'_>,
    tile: &Tile,
    first: usize,
    (state, weights): (&mut State, &mut Vec<u32>),
) {
    let s = k.simd();
    let mut queries = [std::ptr::null(); R];
    for (row, query) in queries.iter_mut().enumerate() {
        *query = work.query(first + row);
    }
    let mut scores = [[s.splat(0.0); 4]; R];
    for group in (0..4).step_by(V) {
        let sums = dot_keys::<K, R, V>(k, queries, tile, group, work.context.layout.dim_words);
        for row in 0..R {
            for offset in 0..V {
                let seen = work.visible(first + row, tile.start + (group + offset) * LANES);
                let hidden = s.splat(f32::NEG_INFINITY);
                scores[row][group + offset] = s.select(seen, sums[row][offset], hidden);
            }
        }
    }
    let scales = raise_maxima::<K, R>(k, &scores, &mut state.maximum[first..first + R]);
    let padded_dim = work.context.layout.padded_dim;
    for row in 0..R {
        let maximum = s.splat(state.maximum[first + row]);
        let mut summed = s.splat(0.0);
        for group in 0..4 {
            let weight = exp(s, s.sub(scores[row][group], maximum));
            summed = s.add(summed, weight);
            let at = (row * TILE + group * LANES) / K::PER_WORD;
            // SAFETY: `weights` holds six rows of a tile.
            unsafe { k.store_elements(weights[at..at + LANES].as_mut_ptr(), weight) };
        }
        state.sum[first + row] = state.sum[first + row] * scales[row] + s.sum(summed);
    }
    let output = &mut state.output[first * padded_dim..(first + R) * padded_dim];
    let mut column = 0;
    while column + V * LANES <= padded_dim {
        add_values::<K, R, V>(k, tile, weights, (output, &scales), (column, padded_dim));
        column += V * LANES;
    }
    while column < padded_dim {
        add_values::<K, R, 1>(k, tile, weights, (output, &scales), (column, padded_dim));
        column += LANES;
    }
}

/// Scores of `R` queries with `V` groups from `group` on.
#[inline(always)]
fn dot_keys<K: Kernel, const R: usize, const V: usize>(
    k: K,
    queries: [*const u32; R],
    tile: &Tile,
    group: usize,
    dim_words: usize,
) -> [[Vector<K>; V]; R] {
    let mut sums = [[k.simd().splat(0.0); V]; R];
    let mut keys = [tile.keys[group]; V];
    keys.copy_from_slice(&tile.keys[group..group + V]);
    for word in 0..dim_words {
        if let Some(next) = tile.next {
            for offset in 0..V {
                k.prefetch(next[group + offset].wrapping_add(word * LANES));
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

/// Raise the maxima to those of new scores; what older results are to be scaled by.
#[inline(always)]
fn raise_maxima<K: Kernel, const R: usize>(
    k: K,
    scores: &[[Vector<K>; 4]; R],
    maxima: &mut [f32],
) -> [f32; LANES] {
    let s = k.simd();
    let mut differences = [0.0; LANES];
    for row in 0..R {
        let [a, b, c, d] = scores[row];
        let highest = s.highest(s.max(s.max(a, b), s.max(c, d)));
        let before = maxima[row];
        if highest > before {
            maxima[row] = highest;
            differences[row] = before - highest;
        }
    }
    let mut scales = [0.0; LANES];
    // SAFETY: both arrays are a vector long.
    unsafe { s.store(scales.as_mut_ptr(), exp(s, s.load(differences.as_ptr()))) };
    scales
}

/// Scale the outputs of `R` queries and add weights times values, `V` vectors of columns.
#[inline(always)]
fn add_values<K: Kernel, const R: usize, const V: usize>(
    k: K,
    tile: &Tile,
    weights: &[u32],
    (output, scales): (&mut [f32], &[f32; LANES]),
    (column, padded_dim): (usize, usize),
) {
    let s = k.simd();
    let mut sums = [[s.splat(0.0); V]; R];
    for row in 0..R {
        let scale = s.splat(scales[row]);
        for vector in 0..V {
            let at = row * padded_dim + column + vector * LANES;
            // SAFETY: bounds are checked by the slice.
            let before = unsafe { s.load(output[at..at + LANES].as_ptr()) };
            sums[row][vector] = s.mul(before, scale);
        }
    }
    let rows = LANES / K::PER_WORD;
    let row_weights = TILE / K::PER_WORD;
    assert!(weights.len() >= R * row_weights);
    for (group, &values) in tile.values.iter().enumerate() {
        for word in 0..rows {
            if let Some(next) = tile.next {
                let at = LANES * padded_dim / K::PER_WORD + word * padded_dim + column;
                for vector in 0..V {
                    k.prefetch(next[group].wrapping_add(at + vector * LANES));
                }
            }
            // SAFETY: a group holds `rows * padded_dim` words, `weights` R rows of a tile.
            unsafe {
                let from = values.add(word * padded_dim + column);
                let mut b = [k.load_words(from); V];
                for vector in 1..V {
                    b[vector] = k.load_words(from.add(vector * LANES));
                }
                for row in 0..R {
                    let weight = *weights.as_ptr().add(row * row_weights + group * rows + word);
                    let a = k.splat_word(weight);
                    for vector in 0..V {
                        sums[row][vector] = k.dot(sums[row][vector], a, b[vector]);
                    }
                }
            }
        }
    }
    for row in 0..R {
        for vector in 0..V {
            let at = row * padded_dim + column + vector * LANES;
            // SAFETY: bounds are checked by the slice.
            unsafe { s.store(output[at..at + LANES].as_mut_ptr(), sums[row][vector]) };
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
    unsafe { s.store(scales.as_mut_ptr(), exp(s, s.load(scales.as_ptr()))) };
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

/// Merge the partial results of an item's splits, `num_splits` times its queries, and store them.
#[inline(always)]
pub(crate) fn merge_partials<K: Kernel>(
    k: K,
    context: &AttendContext<'_>,
    item: &AttendItem,
    scratch: &mut Scratch,
) {
    let shared = context.heads.num_heads / context.heads.num_kv_heads;
    let queries = item.num_tokens * shared;
    let padded_dim = context.layout.padded_dim;
    let Some(first) = item.partial else { return };
    scratch.total.reset(queries, padded_dim);
    for query in 0..queries {
        for split in 0..item.splits.len() {
            let row = context.partials.row(first + split * queries + query).cast_const();
            // SAFETY: an item wrote this row in the job before.
            let part = unsafe {
                let output = std::slice::from_raw_parts(row, padded_dim);
                (output, *row.add(padded_dim), *row.add(padded_dim + 1))
            };
            merge(k, &mut scratch.total, query, part);
        }
        let token = item.first_token + query / shared;
        let head = item.kv_head * shared + query % shared;
        let output = &scratch.total.output[query * padded_dim..][..padded_dim];
        store_output(k, context, (token, head), (output, scratch.total.sum[query]));
    }
}

/// Divide by the sum and store one head of one token.
#[inline(always)]
fn store_output<K: Kernel>(
    k: K,
    context: &AttendContext<'_>,
    (token, head): (usize, usize),
    (output, sum): (&[f32], f32),
) {
    let s = k.simd();
    let head_dim = context.layout.head_dim;
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
