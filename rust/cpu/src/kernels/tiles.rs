//! Where the keys and values of a split lie: groups of 16 tokens, four to a tile.

use super::attention::{AttendContext, AttendItem, SPLIT};
use super::rotate::put_lane;
use crate::attention_step::AttendRow;
use crate::kv::{KvLayout, MAX_HEAD_DIM};
use crate::simd::{Kernel, LANES};

/// Tokens of a tile: four groups.
pub(crate) const TILE: usize = 4 * LANES;
/// Groups of a tile.
pub(crate) const TILE_GROUPS: usize = TILE / LANES;
/// Tiles of a split.
pub(crate) const TILES: usize = SPLIT / TILE;

/// The groups of a tile.
#[derive(Clone, Copy)]
pub(crate) struct Tile {
    pub(crate) start: usize,
    pub(crate) keys: [*const u32; 4],
    pub(crate) values: [*const u32; 4],
}

impl Tile {
    pub(crate) const EMPTY: Tile =
        Tile { start: 0, keys: [std::ptr::null(); 4], values: [std::ptr::null(); 4] };
}

/// Groups brought together for tiles that cannot be used as they lie, one per thread.
pub(crate) struct Copies(Vec<u32>);

impl Copies {
    pub(crate) fn new() -> Copies {
        // Memory is taken only where it is written, and few layouts need any.
        Copies(vec![0; 4 * TILES * 2 * LANES * MAX_HEAD_DIM])
    }
}

static ZEROS: [u32; 2 * MAX_HEAD_DIM] = [0; 2 * MAX_HEAD_DIM];

/// One row's pages in one layer, seen by one kv head.
pub(crate) struct Keys<'a> {
    context: &'a AttendContext<'a>,
    row: &'a AttendRow,
    kv_head: usize,
    kv_len: usize,
}

impl<'a> Keys<'a> {
    pub(crate) fn new(context: &'a AttendContext<'a>, item: &AttendItem) -> Keys<'a> {
        let row = &context.rows[item.row];
        Keys { context, row, kv_head: item.kv_head, kv_len: row.computed_len + row.tokens.len() }
    }

    /// Page and offset of a position.
    #[inline(always)]
    fn place(&self, position: usize) -> (usize, usize) {
        let size = self.context.layout.page_size;
        // A constant divisor for the usual size: this is done for every group.
        let (index, offset) = if size == LANES {
            (position / LANES, position % LANES)
        } else {
            (position / size, position % size)
        };
        (self.row.table[index] as usize, offset)
    }

    /// The group at a position, where pages consist of groups.
    #[inline(always)]
    fn group(&self, position: usize) -> *const u32 {
        let (page, offset) = self.place(position);
        let start = self.context.layout.group_start(page, self.kv_head, offset);
        // SAFETY: pages in the table lie within the layer.
        unsafe { self.context.layer.0.add(start) }
    }

    /// Find the tile at `start`, number `index` of its split.
    #[inline(always)]
    pub(crate) fn tile<K: Kernel>(&self, start: usize, index: usize, copies: &mut Copies) -> Tile {
        let layout = self.context.layout;
        let group_words = layout.group_words();
        let mut tile = Tile { start, ..Tile::EMPTY };
        for group in 0..4 {
            let position = start + group * LANES;
            if position >= self.kv_len {
                // No query sees it: any readable group will do.
                (tile.keys[group], tile.values[group]) = (tile.keys[0], tile.values[0]);
                continue;
            }
            let valid = (self.kv_len - position).min(LANES);
            let at = (index * 4 + group) * 2 * group_words;
            assert!(at + 2 * group_words <= copies.0.len());
            // SAFETY: the copy was just checked to fit; no reference is made of what earlier groups'
            // pointers point to. A group's values follow its keys, in the pool as in the copy.
            unsafe {
                let copy = copies.0.as_mut_ptr().add(at);
                let copied = [copy, copy.add(group_words)];
                if !layout.is_grouped() {
                    self.collect::<K>(position, valid, copied);
                    (tile.keys[group], tile.values[group]) = (copied[0], copied[1]);
                    continue;
                }
                tile.keys[group] = self.group(position);
                tile.values[group] = tile.keys[group].add(group_words);
                if valid < LANES {
                    copy_values::<K>(layout, tile.values[group], copied[1], valid);
                    tile.values[group] = copied[1];
                }
            }
        }
        tile
    }

    /// Bring 16 tokens of plain pages together, zeros where there are fewer.
    ///
    /// # Safety
    /// `to` are the keys and values of a group.
    #[inline(always)]
    unsafe fn collect<K: Kernel>(&self, position: usize, valid: usize, to: [*mut u32; 2]) {
        let layout = self.context.layout;
        for lane in 0..LANES {
            // SAFETY: pages in the table lie within the layer; `ZEROS` is as long as any token.
            unsafe {
                let from = if lane < valid {
                    let (page, offset) = self.place(position + lane);
                    let start = layout.plain_start(page, self.kv_head, offset);
                    self.context.layer.0.add(start).cast_const()
                } else {
                    ZEROS.as_ptr()
                };
                put_lane::<K>(layout, to, lane, [from, from.add(layout.dim_words)]);
            }
        }
    }
}

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
