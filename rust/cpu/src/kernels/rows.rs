//! Row-wise operations: norm, rounding to operands, gated activation, embedding lookup.

use std::ops::Range;

use crate::blocks::BLOCK;
use crate::memory::Rows;
use crate::packed_linear::PackedLinear;
use crate::simd::{Kernel, LANES, Simd, exp, load_prefix, store_prefix};
use crate::weights::{Norm, TableRows};

/// `x / (1 + e^-x)`.
#[inline(always)]
pub(crate) fn silu<S: Simd>(s: S, x: S::F) -> S::F {
    let one = s.splat(1.0);
    s.div(x, s.add(one, exp(s, s.sub(s.splat(0.0), x))))
}

/// Rows from float32 to operands.
pub(crate) struct RowsTask<'a> {
    pub(crate) input: Rows<f32>,
    pub(crate) output: Rows<u32>,
    /// Output row of each computed row, less the difference of `input_row`s: see `input_row`.
    pub(crate) rows: Range<usize>,
    /// Input row of output row r; None: the same.
    pub(crate) input_row: Option<&'a [u32]>,
    pub(crate) width: usize,
    pub(crate) change: RowChange<'a>,
}

/// What happens on the way.
#[derive(Clone, Copy)]
pub(crate) enum RowChange<'a> {
    /// `x / rms(x) * weight`.
    Norm(&'a Norm),
    /// Rounding only.
    Round,
    /// `silu(first half) * second half`; `width` is that of a half.
    Gated,
}

/// Compute a task.
#[inline(always)]
pub(crate) fn rows<K: Kernel>(k: K, task: &RowsTask<'_>) {
    for row in task.rows.clone() {
        let from = task.input_row.map_or(row, |rows| rows[row] as usize);
        let from: *const f32 = task.input.row(from);
        let to = task.output.row(row);
        // SAFETY: the rows hold `width` values (twice that when gated), operand rows whole vectors.
        unsafe {
            match task.change {
                RowChange::Norm(norm) => norm_row(k, from, to, norm),
                RowChange::Round => round_row(k, from, to, task.width),
                RowChange::Gated => gated_row(k, from, to, task.width),
            }
        }
    }
}

/// # Safety
/// `from` holds the norm's width, `to` whole vectors of elements.
#[inline(always)]
pub(crate) unsafe fn norm_row<K: Kernel>(k: K, from: *const f32, to: *mut u32, norm: &Norm) {
    let s = k.simd();
    let width = norm.width;
    let mut sums = [s.splat(0.0); 4];
    // SAFETY: the caller's promise; tails are loaded as prefixes.
    unsafe {
        let mut at = 0;
        while at + 4 * LANES <= width {
            for (offset, sum) in sums.iter_mut().enumerate() {
                let x = s.load(from.add(at + offset * LANES));
                *sum = s.fma(x, x, *sum);
            }
            at += 4 * LANES;
        }
        while at < width {
            let x = load_prefix(s, from.add(at), width - at);
            sums[0] = s.fma(x, x, sums[0]);
            at += LANES;
        }
        let total = s.sum(s.add(s.add(sums[0], sums[1]), s.add(sums[2], sums[3])));
        let scale = s.splat(1.0 / (total / width as f32 + norm.epsilon).sqrt());
        for at in (0..width).step_by(LANES) {
            let x = load_prefix(s, from.add(at), width - at);
            let weight = s.load(norm.weight.as_ptr().add(at));
            k.store_elements(to.add(at / K::PER_WORD), s.mul(s.mul(x, scale), weight));
        }
    }
}

/// # Safety
/// `from` holds `width` values, `to` whole vectors of elements.
#[inline(always)]
unsafe fn round_row<K: Kernel>(k: K, from: *const f32, to: *mut u32, width: usize) {
    for at in (0..width).step_by(LANES) {
        // SAFETY: the caller's promise.
        unsafe {
            let x = load_prefix(k.simd(), from.add(at), width - at);
            k.store_elements(to.add(at / K::PER_WORD), x);
        }
    }
}

/// # Safety
/// `from` holds `2 * width` values, `to` whole vectors of elements.
#[inline(always)]
unsafe fn gated_row<K: Kernel>(k: K, from: *const f32, to: *mut u32, width: usize) {
    let s = k.simd();
    for at in (0..width).step_by(LANES) {
        // SAFETY: the caller's promise.
        unsafe {
            let gate = load_prefix(s, from.add(at), width - at);
            let up = load_prefix(s, from.add(width + at), width - at);
            k.store_elements(to.add(at / K::PER_WORD), s.mul(silu(s, gate), up));
        }
    }
}

/// Look up rows of a table.
pub(crate) struct EmbedTask<'a> {
    pub(crate) table: &'a TableRows,
    pub(crate) tokens: &'a [u32],
    pub(crate) width: usize,
    pub(crate) output: Rows<f32>,
}

/// Compute a task.
#[inline(always)]
pub(crate) fn embed<K: Kernel>(k: K, task: &EmbedTask<'_>) {
    let width = task.width;
    for (row, &token) in task.tokens.iter().enumerate() {
        let from = task.table.row(token as usize);
        let to = task.output.row(row);
        for at in (0..width).step_by(LANES) {
            // SAFETY: table rows are whole vectors, output rows hold `width` values.
            unsafe {
                let x = k.load_elements(from.add(at / K::PER_WORD));
                store_prefix(k.simd(), to.add(at), x, width - at);
            }
        }
    }
}

/// Look up outputs of a linear that is stored in blocks; the same bits on every instruction set.
pub(crate) fn embed_outputs(linear: &PackedLinear, tokens: &[u32], output: Rows<f32>) {
    for (row, &token) in tokens.iter().enumerate() {
        let to: *mut f32 = output.row(row);
        for block in 0..linear.num_blocks() {
            let values = linear.block(token as usize, block);
            let count = BLOCK.min(linear.in_features - block * BLOCK);
            // SAFETY: output rows hold `in_features` values.
            unsafe { to.add(block * BLOCK).copy_from_nonoverlapping(values.as_ptr(), count) };
        }
    }
}

/// Whether every value of some rows is finite.
pub(crate) struct FiniteTask<'a> {
    pub(crate) input: Rows<f32>,
    pub(crate) width: usize,
    pub(crate) finite: &'a mut [bool],
}

/// Compute a task.
#[inline(always)]
pub(crate) fn finite<K: Kernel>(k: K, task: &mut FiniteTask<'_>) {
    let s = k.simd();
    for (row, finite) in task.finite.iter_mut().enumerate() {
        let from: *const f32 = task.input.row(row);
        let mut sum = s.splat(0.0);
        for at in (0..task.width).step_by(LANES) {
            // SAFETY: the row holds `width` values.
            let x = unsafe { load_prefix(s, from.add(at), task.width - at) };
            // Infinity and NaN times zero are NaN, which stays.
            sum = s.fma(x, s.splat(0.0), sum);
        }
        *finite = s.sum(sum) == 0.0;
    }
}

/// Read words as fast as memory gives them.
#[inline(always)]
pub(crate) fn checksum<K: Kernel>(k: K, words: &[u32]) -> f32 {
    let s = k.simd();
    let mut sums = [s.splat(0.0); 8];
    for chunk in words.chunks_exact(8 * LANES) {
        for (index, sum) in sums.iter_mut().enumerate() {
            // SAFETY: the chunk has eight vectors.
            *sum = s.add(*sum, unsafe { s.load(chunk.as_ptr().add(index * LANES).cast()) });
        }
    }
    sums.iter().map(|&sum| s.sum(sum)).sum()
}
