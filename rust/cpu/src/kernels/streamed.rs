//! Products of a few rows with dense panels, as fast as memory delivers the panels.
//!
//! A panel is multiplied with several tiles of rows. If each of them passed over the whole panel,
//! memory would idle in all passes but the first. So the tiles take turns at *chunks* of a panel,
//! and each fetches its share of the chunk that comes next: chunk, next chunk and the sums, which
//! rest meanwhile, fit the first-level cache together. A sum is still one accumulator in ascending
//! order of K, only put down between chunks.

use std::mem::MaybeUninit;

use super::block_linear::Operand;
use crate::packed_linear::PANEL;
use crate::simd::{Kernel, LANES, Simd, Vector};

const PANEL_VECTORS: usize = PANEL / LANES;
/// Words of K in a chunk: 12 KiB of a panel.
const CHUNK_WORDS: usize = 48;
/// Rows of a tile at most: their sums, a word's columns and an operand fill the registers.
const TILE_ROWS: usize = 6;
/// Rows at most: more keep the processor busy for longer than memory takes to deliver a panel.
pub(super) const MOST_ROWS: usize = 32;

/// Sums of a panel: `[row][vector]`.
pub(super) type Sums<K> = [[MaybeUninit<Vector<K>>; PANEL_VECTORS]; MOST_ROWS];

/// Sums that hold nothing yet.
#[inline(always)]
pub(super) fn no_sums<K: Kernel>() -> Sums<K> {
    [const { [const { MaybeUninit::uninit() }; PANEL_VECTORS] }; MOST_ROWS]
}

/// A panel, and the one that is multiplied next, of which any address will do.
#[derive(Clone, Copy)]
pub(super) struct Panel {
    pub(super) start: *const u32,
    pub(super) next: *const u32,
    pub(super) row_words: usize,
}

/// What a tile multiplies at its turn.
#[derive(Clone, Copy)]
struct Turn {
    chunk: *const u32,
    next: *const u32, // the first line that the tile fetches of a word
    words: usize,
    is_first: bool,
}

/// Set the first `num_rows` of `sums` to the products of as many rows with a panel.
///
/// # Safety
/// The operand has `num_rows <= MOST_ROWS` rows of as many words as the panel.
#[inline(always)]
pub(super) unsafe fn product<K: Kernel>(
    k: K,
    x: Operand,
    num_rows: usize,
    panel: Panel,
    sums: &mut Sums<K>,
) {
    let num_tiles = num_rows.div_ceil(TILE_ROWS);
    let mut word = 0;
    loop {
        let words = (panel.row_words - word).min(CHUNK_WORDS);
        let end = word + words;
        let chunk = panel.start.wrapping_add(word * PANEL);
        let is_last = end == panel.row_words;
        let next = if is_last { panel.next } else { chunk.wrapping_add(words * PANEL) };
        let mut row = 0;
        for tile in 0..num_tiles {
            let height = (num_rows - row).div_ceil(num_tiles - tile);
            let lines = tile * PANEL_VECTORS / num_tiles;
            let num_lines = (tile + 1) * PANEL_VECTORS / num_tiles - lines;
            let next = next.wrapping_add(lines * LANES);
            let turn = Turn { chunk, next, words, is_first: word == 0 };
            let x = Operand { start: x.start.wrapping_add(row * x.stride + word), ..x };
            let sums = &mut sums[row..row + height];
            // SAFETY: the caller's promise; rows and words are within it.
            unsafe {
                match num_lines {
                    0 => tile_of::<K, 0>(k, x, turn, sums),
                    1 => tile_of::<K, 1>(k, x, turn, sums),
                    2 => tile_of::<K, 2>(k, x, turn, sums),
                    _ => tile_of::<K, 4>(k, x, turn, sums),
                }
            }
            row += height;
        }
        word = end;
        if is_last {
            return;
        }
    }
}

/// A tile's turn, with as many rows as sums and `L` lines to fetch at each word.
///
/// # Safety
/// As `product`; all but a first turn add to sums that are set.
#[inline(always)]
unsafe fn tile_of<K: Kernel, const L: usize>(
    k: K,
    x: Operand,
    turn: Turn,
    sums: &mut [[MaybeUninit<Vector<K>>; PANEL_VECTORS]],
) {
    // SAFETY: the caller's promise.
    unsafe {
        match sums.len() {
            1 => tile::<K, 1, L>(k, x, turn, sums),
            2 => tile::<K, 2, L>(k, x, turn, sums),
            3 => tile::<K, 3, L>(k, x, turn, sums),
            4 => tile::<K, 4, L>(k, x, turn, sums),
            5 => tile::<K, 5, L>(k, x, turn, sums),
            _ => tile::<K, 6, L>(k, x, turn, sums),
        }
    }
}

/// # Safety
/// As `tile_of`, of `R` rows.
#[inline(always)]
unsafe fn tile<K: Kernel, const R: usize, const L: usize>(
    k: K,
    x: Operand,
    turn: Turn,
    sums: &mut [[MaybeUninit<Vector<K>>; PANEL_VECTORS]],
) {
    let mut local = [[k.simd().splat(0.0); PANEL_VECTORS]; R];
    if !turn.is_first {
        for row in 0..R {
            for vector in 0..PANEL_VECTORS {
                // SAFETY: the first turn has set it.
                local[row][vector] = unsafe { sums[row][vector].assume_init() };
            }
        }
    }
    for word in 0..turn.words {
        for line in 0..L {
            k.prefetch_near(turn.next.wrapping_add(word * PANEL + line * LANES));
        }
        // SAFETY: an operand has `R` rows of the panel's words.
        unsafe {
            let from = turn.chunk.add(word * PANEL);
            let mut b = [k.load_words(from); PANEL_VECTORS];
            for vector in 1..PANEL_VECTORS {
                b[vector] = k.load_words(from.add(vector * LANES));
            }
            for row in 0..R {
                let a = k.splat_word(*x.start.add(row * x.stride + word));
                for vector in 0..PANEL_VECTORS {
                    local[row][vector] = k.dot(local[row][vector], a, b[vector]);
                }
            }
        }
    }
    for row in 0..R {
        for vector in 0..PANEL_VECTORS {
            sums[row][vector].write(local[row][vector]);
        }
    }
}
