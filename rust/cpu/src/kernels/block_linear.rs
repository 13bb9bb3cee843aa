//! Products of quantised rows with panels of blocks.
//!
//! A block's products are summed in integers, exactly; the blocks' sums, scaled, are added in ascending
//! order, each rounded once. So the bits of an output depend on its own row and column alone, and are
//! the same on every instruction set.

use crate::blocks::BlockFormat;
use crate::kernels::quantise::{EIGHT_BIT_ZERO, FOUR_BIT_ZERO, OPERAND_BLOCK_WORDS, SCALE, SUM};
use crate::packed_linear::PANEL;
use crate::simd::{Bytes, Kernel, LANES, Simd, Vector};

/// Rows of an operand.
#[derive(Clone, Copy)]
pub(super) struct Operand {
    pub(super) start: *const u32,
    pub(super) stride: usize,
}

/// A panel's columns from a vector on.
#[derive(Clone, Copy)]
pub(super) struct Columns {
    pub(super) panel: *const u32,
    pub(super) num_blocks: usize,
    pub(super) first: usize,
}

/// What is fetched meanwhile of that which is multiplied next.
#[derive(Clone, Copy)]
pub(super) enum Ahead {
    /// Nothing.
    Nothing,
    /// Some quarters of each block or word of the next panel, since this panel is used again first.
    Quarters { panel: *const u32, first: usize, count: usize },
    /// What lies a little ahead, then the next panel, since this panel is used once.
    Stream { next: *const u32 },
}

/// Words between what is multiplied and what is fetched, in whole blocks: a core that waits for one
/// block's sums does not look that far ahead by itself.
const WORDS_AHEAD: usize = 1152;

/// Add the products of `R` rows and `V` vectors of columns to `sums`.
///
/// # Safety
/// The operand has `R` rows of as many blocks as the panel, which is of that format.
#[inline(always)]
pub(super) unsafe fn product<K: Kernel, const R: usize, const V: usize>(
    k: K,
    format: BlockFormat,
    x: Operand,
    columns: Columns,
    ahead: Ahead,
    sums: &mut [[Vector<K>; V]; R],
) {
    // SAFETY: the caller's promise.
    unsafe {
        match (format.nibbles, format.has_offset) {
            (false, false) => strips::<K, R, V, false, false>(k, x, columns, ahead, sums),
            (false, true) => strips::<K, R, V, false, true>(k, x, columns, ahead, sums),
            (true, false) => strips::<K, R, V, true, false>(k, x, columns, ahead, sums),
            (true, true) => strips::<K, R, V, true, true>(k, x, columns, ahead, sums),
        }
    }
}

const fn format(nibbles: bool, has_offset: bool) -> BlockFormat {
    BlockFormat { nibbles, has_offset }
}

/// Sums in both integers and float32 leave room for two vectors of columns when there are many rows:
/// a panel's halves are then multiplied one after the other.
///
/// # Safety
/// As `product`.
#[inline(always)]
unsafe fn strips<K: Kernel, const R: usize, const V: usize, const N: bool, const O: bool>(
    k: K,
    x: Operand,
    columns: Columns,
    ahead: Ahead,
    sums: &mut [[Vector<K>; V]; R],
) {
    if V != 4 || R <= 3 {
        // SAFETY: the caller's promise.
        unsafe { strip::<K, R, V, N, O>(k, x, columns, ahead, sums) };
        return;
    }
    for half in 0..2 {
        let mut part = [[k.simd().splat(0.0); 2]; R];
        for row in 0..R {
            part[row] = [sums[row][2 * half], sums[row][2 * half + 1]];
        }
        let first = columns.first + 2 * half;
        let ahead = if half == 0 { ahead } else { Ahead::Nothing };
        // SAFETY: the caller's promise.
        unsafe { strip::<K, R, 2, N, O>(k, x, Columns { first, ..columns }, ahead, &mut part) };
        for row in 0..R {
            sums[row][2 * half] = part[row][0];
            sums[row][2 * half + 1] = part[row][1];
        }
    }
}

/// # Safety
/// As `product`.
#[inline(always)]
unsafe fn strip<K: Kernel, const R: usize, const V: usize, const N: bool, const O: bool>(
    k: K,
    x: Operand,
    columns: Columns,
    ahead: Ahead,
    sums: &mut [[Vector<K>; V]; R],
) {
    let words = format(N, O).words();
    let mut local = *sums;
    for block in 0..columns.num_blocks {
        fetch::<K, N, O>(k, ahead, columns, block);
        // SAFETY: the caller's promise; a panel's block has the format's words.
        unsafe {
            let x = Operand { start: x.start.add(block * OPERAND_BLOCK_WORDS), ..x };
            let codes = columns.panel.add(block * words);
            add_block::<K, R, V, N, O>(k, x, codes, columns.first, &mut local);
        }
    }
    *sums = local;
}

/// Fetch what belongs to a block's share of the time.
#[inline(always)]
fn fetch<K: Kernel, const N: bool, const O: bool>(
    k: K,
    ahead: Ahead,
    columns: Columns,
    block: usize,
) {
    let words = format(N, O).words();
    let lines = words / LANES;
    let (from, lines) = match ahead {
        Ahead::Nothing => return,
        Ahead::Quarters { panel, first, count } => {
            (panel.wrapping_add(block * words), first * lines / 4..(first + count) * lines / 4)
        }
        Ahead::Stream { next } => {
            let block = block + WORDS_AHEAD / words;
            let from = if block < columns.num_blocks {
                columns.panel.wrapping_add(block * words)
            } else {
                next.wrapping_add((block - columns.num_blocks) * words)
            };
            (from, 0..lines)
        }
    };
    for line in lines {
        k.prefetch(from.wrapping_add(line * LANES));
    }
}

/// Add one block's products.
///
/// # Safety
/// A block of `R` rows must be readable at `x`, a panel's block at `codes`.
#[inline(always)]
unsafe fn add_block<K: Kernel, const R: usize, const V: usize, const N: bool, const O: bool>(
    k: K,
    x: Operand,
    codes: *const u32,
    first: usize,
    sums: &mut [[Vector<K>; V]; R],
) {
    let s = k.simd();
    let code_words = format(N, O).code_words();
    // SAFETY: within the blocks, see above.
    unsafe {
        let mut products = [[s.splat_int(0); V]; R];
        if !O {
            let zero = if N { FOUR_BIT_ZERO } else { EIGHT_BIT_ZERO };
            for (row, products) in products.iter_mut().enumerate() {
                *products = [s.splat_int(*x.start.add(row * x.stride + zero) as i32); V];
            }
        }
        for word in 0..code_words {
            let from = codes.add(word * PANEL + first * LANES);
            if N {
                let mut b = [s.load_nibbles(from); V];
                for vector in 1..V {
                    b[vector] = s.load_nibbles(from.add(vector * LANES));
                }
                for row in 0..R {
                    let at = x.start.add(row * x.stride + word);
                    let high = s.splat_for_nibbles(*at.add(code_words));
                    let a = [s.splat_for_nibbles(*at), high];
                    for vector in 0..V {
                        products[row][vector] = s.dot_nibbles(products[row][vector], b[vector], a);
                    }
                }
            } else {
                let mut b = [s.load_codes(from); V];
                for vector in 1..V {
                    b[vector] = s.load_codes(from.add(vector * LANES));
                }
                for row in 0..R {
                    let a = s.splat_signed(*x.start.add(row * x.stride + word));
                    for vector in 0..V {
                        products[row][vector] = s.dot_bytes(products[row][vector], b[vector], a);
                    }
                }
            }
        }
        let halves = codes.add(code_words * PANEL + first * LANES / 2);
        for vector in 0..V {
            let scales = s.load_halves(halves.add(vector * LANES / 2));
            for row in 0..R {
                let scale = s.splat(f32::from_bits(*x.start.add(row * x.stride + SCALE)));
                let product = s.to_float(products[row][vector]);
                let sum = sums[row][vector];
                sums[row][vector] = s.exact_fma(product, s.mul(scale, scales), sum);
            }
            if O {
                let offsets = s.load_halves(halves.add(PANEL / 2 + vector * LANES / 2));
                for row in 0..R {
                    let sum = s.splat(f32::from_bits(*x.start.add(row * x.stride + SUM)));
                    sums[row][vector] = s.exact_fma(sum, offsets, sums[row][vector]);
                }
            }
        }
    }
}
