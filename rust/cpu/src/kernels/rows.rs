//! Row-wise operations: norm, rounding to operands, gated activations, embedding lookup.

use std::ops::Range;

use crate::blocks::BLOCK;
use crate::memory::Rows;
use crate::packed_linear::PackedLinear;
use crate::simd::{Kernel, LANES, Simd, exp, load_prefix, store_prefix};
use crate::weights::{Norm, TableRows};

/// What a gate goes through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Activation {
    /// `x / (1 + e^-x)`.
    Silu,
    /// `x / 2 * (1 + tanh u)` with `u = sqrt(2 / pi) * (x + 0.044715 x^3)`.
    GeluTanh,
}

const GELU_CUBIC: f32 = 0.044_715;
/// `-2 sqrt(2 / pi)`.
const GELU_SCALE: f32 = -1.595_769;

/// `act(gate) * up`.
#[inline(always)]
pub(crate) fn gated<S: Simd>(s: S, activation: Activation, gate: S::F, up: S::F) -> S::F {
    let exponent = match activation {
        Activation::Silu => s.sub(s.splat(0.0), gate),
        // 1 + tanh u = 2 / (1 + e^-2u)
        Activation::GeluTanh => {
            let cube = s.mul(s.mul(gate, gate), gate);
            s.mul(s.fma(cube, s.splat(GELU_CUBIC), gate), s.splat(GELU_SCALE))
        }
    };
    s.mul(s.div(gate, s.add(s.splat(1.0), exp(s, exponent))), up)
}

/// Rows from float32 to operands, or to float32 where the change says so.
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
    /// `act(first half) * second half`; `width` is that of a half.
    Gated(Activation),
    /// `x / rms(x) * weight`, added to the output, which is float32.
    NormAdd(&'a Norm),
}

/// Compute a task.
#[inline(always)]
pub(crate) fn rows<K: Kernel>(k: K, task: &RowsTask<'_>) {
    for row in task.rows.clone() {
        let from = task.input_row.map_or(row, |rows| rows[row] as usize);
        let from: *const f32 = task.input.row(from);
        let to = task.output.row(row);
        // SAFETY: the rows hold `width` values (twice that when gated), operand rows whole vectors;
        // a row to be added to holds float32, which are words.
        unsafe {
            match task.change {
                RowChange::Norm(norm) => norm_row(k, from, to, norm),
                RowChange::Round => round_row(k, from, to, task.width),
                RowChange::Gated(activation) => gated_row(k, activation, from, to, task.width),
                RowChange::NormAdd(norm) => add_normed_row(k, from, to.cast(), norm),
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
    // SAFETY: the caller's promise; tails are loaded as prefixes.
    unsafe {
        let scale = s.splat(inverse_rms(k, from, norm));
        for at in (0..width).step_by(LANES) {
            let x = load_prefix(s, from.add(at), width - at);
            let weight = s.load(norm.weight.as_ptr().add(at));
            k.store_elements(to.add(at / K::PER_WORD), s.mul(s.mul(x, scale), weight));
        }
    }
}

/// # Safety
/// `from` and `to` hold the norm's width, and do not overlap.
#[inline(always)]
unsafe fn add_normed_row<K: Kernel>(k: K, from: *const f32, to: *mut f32, norm: &Norm) {
    let s = k.simd();
    let width = norm.width;
    // SAFETY: the caller's promise; tails are loaded and stored as prefixes.
    unsafe {
        let scale = s.splat(inverse_rms(k, from, norm));
        for at in (0..width).step_by(LANES) {
            let x = load_prefix(s, from.add(at), width - at);
            let weight = s.load(norm.weight.as_ptr().add(at));
            let before = load_prefix(s, to.add(at), width - at);
            let normed = s.mul(s.mul(x, scale), weight);
            store_prefix(s, to.add(at), s.add(before, normed), width - at);
        }
    }
}

/// `1 / rms(x)`, summed in one order.
///
/// # Safety
/// `from` holds the norm's width.
#[inline(always)]
unsafe fn inverse_rms<K: Kernel>(k: K, from: *const f32, norm: &Norm) -> f32 {
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
        1.0 / (total / width as f32 + norm.epsilon).sqrt()
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
unsafe fn gated_row<K: Kernel>(
    k: K,
    activation: Activation,
    from: *const f32,
    to: *mut u32,
    width: usize,
) {
    let s = k.simd();
    for at in (0..width).step_by(LANES) {
        // SAFETY: the caller's promise.
        unsafe {
            let gate = load_prefix(s, from.add(at), width - at);
            let up = load_prefix(s, from.add(width + at), width - at);
            k.store_elements(to.add(at / K::PER_WORD), gated(s, activation, gate, up));
        }
    }
}

/// Look up rows of a table.
pub(crate) struct EmbedTask<'a> {
    pub(crate) table: &'a TableRows,
    pub(crate) tokens: &'a [u32],
    pub(crate) width: usize,
    /// Of every element.
    pub(crate) scale: f32,
    pub(crate) output: Rows<f32>,
}

/// Compute a task.
#[inline(always)]
pub(crate) fn embed<K: Kernel>(k: K, task: &EmbedTask<'_>) {
    let width = task.width;
    let scale = k.simd().splat(task.scale);
    for (row, &token) in task.tokens.iter().enumerate() {
        let from = task.table.row(token as usize);
        let to = task.output.row(row);
        for at in (0..width).step_by(LANES) {
            // SAFETY: table rows are whole vectors, output rows hold `width` values.
            unsafe {
                let x = k.simd().mul(k.load_elements(from.add(at / K::PER_WORD)), scale);
                store_prefix(k.simd(), to.add(at), x, width - at);
            }
        }
    }
}

/// Look up outputs of a linear that is stored in blocks; the same bits on every instruction set.
pub(crate) fn embed_outputs(linear: &PackedLinear, tokens: &[u32], scale: f32, output: Rows<f32>) {
    for (row, &token) in tokens.iter().enumerate() {
        let to: *mut f32 = output.row(row);
        for block in 0..linear.num_blocks() {
            let values = linear.block(token as usize, block).map(|value| value * scale);
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

#[cfg(test)]
mod tests {
    use super::{Activation, EmbedTask, RowChange, RowsTask};
    use crate::memory::{Region, Slabs};
    use crate::testing::{Random, bytes, every_kernel, inner_rows};
    use crate::weights::{Element, Embedding, Norm, Source, Table};

    fn region(values: &[f32]) -> Region {
        let mut region = Region::new(values.len());
        for (word, x) in region.as_mut_slice().iter_mut().zip(values) {
            *word = x.to_bits();
        }
        region
    }

    #[test]
    fn gelu_by_tanh_agrees_with_float64() {
        let inputs: Vec<f32> = (-640..640).map(|step| step as f32 / 32.0).collect();
        for kernels in every_kernel().into_iter().filter(|k| k.element == Element::F32) {
            let width = inputs.len();
            let mut input = region(&[&inputs[..], &vec![1.5; width]].concat());
            let mut output = Region::new(width);
            kernels.rows(&RowsTask {
                input: input.rows(2 * width),
                output: output.rows(width),
                rows: 0..1,
                input_row: None,
                width,
                change: RowChange::Gated(Activation::GeluTanh),
            });
            for (&x, &value) in inputs.iter().zip(output.as_floats()) {
                let wide = f64::from(x);
                let inner = (2.0 / std::f64::consts::PI).sqrt() * (wide + 0.044_715 * wide.powi(3));
                let expected = 1.5 * 0.5 * wide * (1.0 + inner.tanh());
                let error = (f64::from(value) - expected).abs();
                assert!(error <= 1e-6 * expected.abs() + 1e-9, "{x}: {value} {expected}");
            }
        }
    }

    #[test]
    fn normed_rows_are_added_and_nothing_else_is_written() {
        for width in [5, 16, 64, 100] {
            let mut random = Random::new(width as u64);
            let mut values = || (0..3 * width).map(|_| random.normal()).collect::<Vec<f32>>();
            let (x, before, weight) = (values(), values(), values());
            for kernels in every_kernel() {
                let mut norm = Norm::new(Element::F32, width, 1e-5, 1.0);
                norm.load(Source::new(Element::F32, &bytes(&weight[..width]))).unwrap();
                let mut output =
                    region(&[&vec![7.0; width], &before[..], &vec![7.0; width]].concat());
                let mut input = region(&x);
                kernels.rows(&RowsTask {
                    input: input.rows(width),
                    output: output.rows(width).sub_rows(1, 3),
                    rows: 0..3,
                    input_row: None,
                    width,
                    change: RowChange::NormAdd(&norm),
                });
                let mut expected = Vec::new();
                for row in x.chunks_exact(width) {
                    norm.extend_normed(row, &mut expected);
                }
                let found = output.as_floats();
                assert_eq!(found[..width], vec![7.0; width]);
                assert_eq!(found[4 * width..], vec![7.0; width]);
                for ((normed, before), found) in expected.iter().zip(&before).zip(&found[width..]) {
                    assert!((normed + before - found).abs() < 1e-5, "{found} {normed} {before}");
                }
            }
        }
    }

    #[test]
    fn the_offset_of_a_norm_is_not_rounded_to_the_element() {
        let mut norm = Norm::new(Element::Bf16, 1, 0.0, 1.0);
        norm.load(Source::new(Element::F32, &bytes(&[0.001_001]))).unwrap();
        // 0.001001 is rounded to 131 / 2^17.
        assert_eq!(norm.weight[0].to_bits(), (1.0_f32 + 131.0 / 131_072.0).to_bits());
        assert!(norm.weight[1..].iter().all(|&weight| weight == 0.0));
    }

    #[test]
    fn embedded_rows_are_scaled() {
        for kernels in every_kernel() {
            let width = 20;
            let slabs = std::sync::Arc::new(Slabs::new());
            let mut embedding = Embedding::new(&slabs, kernels.element, (3, width), 2.5);
            let values: Vec<f32> = (0..60).map(|value| value as f32).collect();
            embedding.load(Source::new(Element::F32, &bytes(&values))).unwrap();
            let Table::Rows(table) = &embedding.table else { panic!("the table is dense") };
            let mut output = region(&vec![7.0; 4 * width]);
            let inner = inner_rows(&mut output, width, 2);
            let tokens = [2, 1];
            let scale = embedding.scale;
            kernels.embed(&EmbedTask { table, tokens: &tokens, width, scale, output: inner });
            let found = output.as_floats();
            for (row, token) in tokens.into_iter().enumerate() {
                let expected = values[token as usize * width..][..width].iter().map(|x| x * 2.5);
                assert!(found[(row + 1) * width..][..width].iter().copied().eq(expected));
            }
            assert_eq!(found[3 * width..], vec![7.0; width]);
        }
    }
}
