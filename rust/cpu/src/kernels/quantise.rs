//! Operands of linears whose weights are blocks: quantised row by row, in the same blocks of 32.
//!
//! Every step is exact or rounded once, in an order of its own per row: the bits depend neither on
//! the batch nor on the instruction set.

use std::ops::Range;

use crate::blocks::BLOCK;
use crate::memory::Rows;
use crate::simd::{Bytes, Kernel, LANES, Simd, Vector};

/// Words of a row's block: 32 codes from -127 to 127, then what follows.
pub(crate) const OPERAND_BLOCK_WORDS: usize = 12;
/// The scale, float32.
pub(crate) const SCALE: usize = 8;
/// The sum of the codes times -128, for codes of weights whose zero is 128.
pub(crate) const EIGHT_BIT_ZERO: usize = 9;
/// The sum of the codes times -8, for codes of weights whose zero is 8.
pub(crate) const FOUR_BIT_ZERO: usize = 10;
/// The sum of the codes times the scale, float32, for weights with offsets.
pub(crate) const SUM: usize = 11;

/// Below it a block counts as zeros: the inverse of its scale might be infinite.
const LOWEST: f32 = 1e-30;

/// Words of a quantised row.
pub(crate) fn quantised_words(width: usize) -> usize {
    width.div_ceil(BLOCK) * OPERAND_BLOCK_WORDS
}

/// Some rows of elements.
#[derive(Clone)]
pub(crate) struct QuantiseTask {
    pub(crate) input: Rows<u32>,
    pub(crate) output: Rows<u32>,
    pub(crate) rows: Range<usize>,
    pub(crate) width: usize,
}

/// Compute a task.
#[inline(always)]
pub(crate) fn quantise<K: Kernel>(k: K, task: &QuantiseTask) {
    let blocks = task.width.div_ceil(BLOCK);
    assert!(task.input.stride() * K::PER_WORD >= task.width.next_multiple_of(LANES));
    assert!(task.output.stride() >= blocks * OPERAND_BLOCK_WORDS);
    for row in task.rows.clone() {
        let from = task.input.row(row);
        let to = task.output.row(row);
        for block in 0..blocks {
            // SAFETY: operand rows are whole vectors, and quantised rows whole blocks.
            unsafe {
                let left = task.width - block * BLOCK;
                let x = [0, LANES].map(|offset| {
                    elements(k, from.add((block * BLOCK + offset) / K::PER_WORD), left, offset)
                });
                quantise_block(k, x, to.add(block * OPERAND_BLOCK_WORDS));
            }
        }
    }
}

/// Sixteen elements; zeros from the row's end on.
///
/// # Safety
/// If `offset < left`, sixteen elements must be readable at `from`.
#[inline(always)]
unsafe fn elements<K: Kernel>(k: K, from: *const u32, left: usize, offset: usize) -> Vector<K> {
    let s = k.simd();
    if offset >= left {
        return s.splat(0.0);
    }
    // SAFETY: the caller's promise.
    let x = unsafe { k.load_elements(from) };
    if left - offset >= LANES {
        return x;
    }
    s.select((1 << (left - offset)) - 1, x, s.splat(0.0))
}

/// # Safety
/// A block must be writable at `to`.
#[inline(always)]
unsafe fn quantise_block<K: Kernel>(k: K, x: [Vector<K>; 2], to: *mut u32) {
    let s = k.simd();
    let zero = s.splat(0.0);
    let magnitudes = x.map(|x| s.max(x, s.sub(zero, x)));
    let highest = s.highest(s.max(magnitudes[0], magnitudes[1]));
    // Zero, or NaN where an element is infinite or NaN: such a row must not end in numbers.
    let poison = s.sum(s.fma(x[0], zero, s.mul(x[1], zero)));
    let scale = if poison == 0.0 { highest / 127.0 } else { f32::NAN };
    let inverse = if highest > LOWEST && poison == 0.0 { 127.0 / highest } else { 0.0 };
    let codes = x.map(|x| s.round(s.mul(x, s.splat(inverse))));
    // Small whole numbers: exact in any order.
    let sum = if poison == 0.0 { s.sum(s.add(codes[0], codes[1])) } else { 0.0 };
    // SAFETY: the caller's promise.
    unsafe {
        s.store_signed(to, codes[0]);
        s.store_signed(to.add(LANES / 4), codes[1]);
        *to.add(SCALE) = scale.to_bits();
        *to.add(EIGHT_BIT_ZERO) = (sum as i32 * -128) as u32;
        *to.add(FOUR_BIT_ZERO) = (sum as i32 * -8) as u32;
        *to.add(SUM) = (scale * sum).to_bits();
    }
}
