//! Matrix products with packed panels.
//!
//! Every output element is summed over K in ascending order in one accumulator, whatever the number
//! of rows, the tile or the thread: so its bits depend on its own row and column alone.
//!
//! How a panel is passed over follows from what is scarce. One row: two panels are streamed at once.
//! A few rows: memory and multipliers are, and tiles share chunks of a panel (`streamed`). More rows:
//! multipliers alone are, and each tile passes over the whole panel.

use std::mem::MaybeUninit;
use std::ops::Range;

use super::block_linear::{self, Ahead, Columns, Operand};
use super::rows::{Activation, gated};
use super::streamed::{self, Panel};
use crate::memory::Rows;
use crate::packed_linear::{PANEL, PackedLinear, PanelColumns, PanelFormat};
use crate::simd::{Kernel, LANES, Simd, Vector, store_prefix};

const PANEL_VECTORS: usize = PANEL / LANES;

/// What becomes of a product.
#[derive(Clone, Copy)]
pub(crate) enum Epilogue {
    /// `out = product + bias`.
    Store(Rows<f32>),
    /// `out += product + bias`.
    Add(Rows<f32>),
    /// `out = act(gate) * up`, where the weight's panels are those of gate, then those of up.
    Gated(GatedRows),
}

/// Where gated products go, and what gates them.
#[derive(Clone, Copy)]
pub(crate) struct GatedRows {
    pub(crate) rows: Rows<u32>,
    pub(crate) activation: Activation,
}

/// Some rows and panels of a linear; with `Gated`, panels are counted among those of gate. The input
/// is quantised where the weight is stored in blocks.
pub(crate) struct LinearTask<'a> {
    pub(crate) input: Rows<u32>,
    pub(crate) weight: &'a PackedLinear,
    pub(crate) epilogue: Epilogue,
    pub(crate) panels: Range<usize>,
    pub(crate) rows: Range<usize>,
}

/// Compute a task.
#[inline(always)]
pub(crate) fn linear<K: Kernel>(k: K, task: &LinearTask<'_>) {
    let gated = matches!(task.epilogue, Epilogue::Gated(_));
    if task.rows.len() == 1 {
        if gated {
            // A closure would not have the target features, and every intrinsic would be a call.
            for panel in task.panels.clone() {
                gated_row(k, task, panel);
            }
        } else {
            one_row(k, task);
        }
    } else if K::TILE_VECTORS == 4 {
        for panel in task.panels.clone() {
            if task.rows.len() <= streamed::MOST_ROWS && is_dense(task, panel, gated) {
                stream::<K>(k, task, panel);
            } else {
                tiles_of_six::<K>(k, task, panel, gated);
            }
        }
    } else {
        for panel in task.panels.clone() {
            narrow_tiles::<K>(k, task, panel, gated);
        }
    }
}

/// One row: two dense panels at a time keep enough loads in flight; blocks are fetched ahead.
#[inline(always)]
fn one_row<K: Kernel>(k: K, task: &LinearTask<'_>) {
    let x = task.input.rows_from(task.rows.start, 1);
    let mut panel = task.panels.start;
    while panel + 2 <= task.panels.end {
        let sums = two_panels(k, x, task.weight, [panel, panel + 1, panel + 2]);
        finish_row(k, task, panel, &sums[0]);
        finish_row(k, task, panel + 1, &sums[1]);
        panel += 2;
    }
    if panel < task.panels.end {
        let sums = one_panel(k, x, task.weight, [panel, panel + 1]);
        finish_row(k, task, panel, &sums);
    }
}

#[inline(always)]
fn gated_row<K: Kernel>(k: K, task: &LinearTask<'_>, panel: usize) {
    let Epilogue::Gated(out) = task.epilogue else { return };
    let x = task.input.rows_from(task.rows.start, 1);
    let half = task.weight.panels.len() / 2;
    let sums = two_panels(k, x, task.weight, [panel, panel + half, panel + 1]);
    for vector in 0..PANEL_VECTORS {
        let gate = biased(k, task.weight, panel, vector, sums[0][vector]);
        let up = biased(k, task.weight, panel + half, vector, sums[1][vector]);
        store_gated(k, (task, out), panel, (task.rows.start, vector), [gate, up]);
    }
}

/// A panel, before another.
#[inline(always)]
fn one_panel<K: Kernel>(
    k: K,
    x: *const u32,
    weight: &PackedLinear,
    [panel, next]: [usize; 2],
) -> [Vector<K>; PANEL_VECTORS] {
    let ahead = Ahead::Stream { next: weight.panel(next.min(weight.panels.len() - 1)) };
    let [sums] = product::<K, 1, PANEL_VECTORS>(k, (x, 0), weight, (panel, 0), ahead);
    sums
}

/// Two panels, before a third.
#[inline(always)]
fn two_panels<K: Kernel>(
    k: K,
    x: *const u32,
    weight: &PackedLinear,
    [panel, other, next]: [usize; 3],
) -> [[Vector<K>; PANEL_VECTORS]; 2] {
    if [panel, other].map(|panel| weight.format(panel)) != [PanelFormat::Dense; 2] {
        let first = one_panel(k, x, weight, [panel, other]);
        return [first, one_panel(k, x, weight, [other, next])];
    }
    let mut sums = [[k.simd().splat(0.0); PANEL_VECTORS]; 2];
    let [first, second] = [panel, other].map(|panel| weight.panel(panel));
    for word in 0..weight.row_words() {
        // SAFETY: an input row holds `row_words` words, a panel `row_words * PANEL`.
        unsafe {
            let a = k.splat_word(*x.add(word));
            let first = first.add(word * PANEL);
            for vector in 0..PANEL_VECTORS {
                let b = k.load_words(first.add(vector * LANES));
                sums[0][vector] = k.dot(sums[0][vector], a, b);
            }
            let second = second.add(word * PANEL);
            for vector in 0..PANEL_VECTORS {
                let b = k.load_words(second.add(vector * LANES));
                sums[1][vector] = k.dot(sums[1][vector], a, b);
            }
        }
    }
    sums
}

/// `R` rows times `V` vectors of columns of a panel, from vector `first` on.
#[inline(always)]
fn product<K: Kernel, const R: usize, const V: usize>(
    k: K,
    (x, stride): (*const u32, usize),
    weight: &PackedLinear,
    (panel, first): (usize, usize),
    ahead: Ahead,
) -> [[Vector<K>; V]; R] {
    let from = weight.panel(panel);
    match weight.format(panel) {
        PanelFormat::Dense => {
            let from = from.wrapping_add(first * LANES);
            let mut sums = MaybeUninit::uninit();
            let x = (x, stride);
            *dense_product::<K, R, V>(k, x, weight.row_words(), from, ahead, &mut sums)
        }
        PanelFormat::Blocks(format) => {
            let x = Operand { start: x, stride };
            let columns = Columns { panel: from, num_blocks: weight.num_blocks(), first };
            let mut sums = [[k.simd().splat(0.0); V]; R];
            // SAFETY: input rows have the weight's blocks, and the panel is of that format.
            unsafe { block_linear::product(k, format, x, columns, ahead, &mut sums) };
            sums
        }
    }
}

#[inline(always)]
fn dense_product<K: Kernel, const R: usize, const V: usize>(
    k: K,
    (x, stride): (*const u32, usize),
    row_words: usize,
    columns: *const u32,
    ahead: Ahead,
    sums: &mut MaybeUninit<[[Vector<K>; V]; R]>,
) -> &[[Vector<K>; V]; R] {
    // Not where they go at last: that is memory, and they would be stored there at every word.
    let mut local = [[k.simd().splat(0.0); V]; R];
    for word in 0..row_words {
        // SAFETY: `x` points to `R` rows of `row_words` words, and a panel holds `row_words * PANEL`.
        unsafe {
            let from = columns.add(word * PANEL);
            if let Ahead::Quarters { panel, first, .. } = ahead {
                let next = panel.wrapping_add(word * PANEL + first * LANES);
                // `count` is this number, too, which must be a constant here.
                k.prefetch(next);
                if V > 1 {
                    k.prefetch(next.wrapping_add(LANES));
                }
            }
            let mut b = [k.load_words(from); V];
            for vector in 1..V {
                b[vector] = k.load_words(from.add(vector * LANES));
            }
            for row in 0..R {
                let a = k.splat_word(*x.add(row * stride + word));
                for vector in 0..V {
                    local[row][vector] = k.dot(local[row][vector], a, b[vector]);
                }
            }
        }
    }
    sums.write(local)
}

/// Whether a panel, and the one of up if it is of gate, holds elements.
#[inline(always)]
fn is_dense(task: &LinearTask<'_>, panel: usize, gated: bool) -> bool {
    let weight = task.weight;
    let other = if gated { panel + weight.panels.len() / 2 } else { panel };
    [weight.format(panel), weight.format(other)] == [PanelFormat::Dense; 2]
}

/// All rows of a task times a dense panel, and that of up if it is of gate.
#[inline(always)]
fn stream<K: Kernel>(k: K, task: &LinearTask<'_>, panel: usize) {
    let (weight, row, num_rows) = (task.weight, task.rows.start, task.rows.len());
    let start = task.input.rows_from(row, num_rows).cast_const();
    let x = Operand { start, stride: task.input.stride() };
    let from = |panel: usize| weight.panel(panel.min(weight.panels.len() - 1));
    let up = panel + weight.panels.len() / 2;
    let gated = matches!(task.epilogue, Epilogue::Gated(_));
    let order = if gated { [panel, up, panel + 1] } else { [panel, panel + 1, panel + 1] };
    let mut sums = [streamed::no_sums::<K>(), streamed::no_sums::<K>()];
    for index in 0..if gated { 2 } else { 1 } {
        let [start, next] = [from(order[index]), from(order[index + 1])];
        let panel = Panel { start, next, row_words: weight.row_words() };
        // SAFETY: input rows have the words of the weight's panels.
        unsafe { streamed::product(k, x, num_rows, panel, &mut sums[index]) };
    }
    for index in 0..num_rows {
        for vector in 0..PANEL_VECTORS {
            let at = (row + index, vector);
            // SAFETY: the product has set the sums of all rows.
            let sum = unsafe { sums[0][index][vector].assume_init() };
            let Epilogue::Gated(out) = task.epilogue else {
                finish(k, task, panel, at, sum);
                continue;
            };
            // SAFETY: as above; there were two products.
            let up_sum = unsafe { sums[1][index][vector].assume_init() };
            let gate = biased(k, weight, panel, vector, sum);
            let up = biased(k, weight, up, vector, up_sum);
            store_gated(k, (task, out), panel, at, [gate, up]);
        }
    }
}

/// Tiles of at most six rows, as even as possible: a low tile would wait for its own sums.
#[inline(always)]
fn tiles_of_six<K: Kernel>(k: K, task: &LinearTask<'_>, panel: usize, gated: bool) {
    let mut row = task.rows.start;
    while row < task.rows.end {
        let left = task.rows.end - row;
        let height = left.div_ceil(left.div_ceil(6));
        match height {
            1 => tile::<K, 1, 4>(k, task, panel, (row, 0), gated),
            2 => tile::<K, 2, 4>(k, task, panel, (row, 0), gated),
            3 => tile::<K, 3, 4>(k, task, panel, (row, 0), gated),
            4 => tile::<K, 4, 4>(k, task, panel, (row, 0), gated),
            5 => tile::<K, 5, 4>(k, task, panel, (row, 0), gated),
            _ => tile::<K, 6, 4>(k, task, panel, (row, 0), gated),
        }
        row += height;
    }
}

/// As above where registers are few: tiles of at most four rows and a vector or two.
#[inline(always)]
fn narrow_tiles<K: Kernel>(k: K, task: &LinearTask<'_>, panel: usize, gated: bool) {
    let mut row = task.rows.start;
    while row < task.rows.end {
        let left = task.rows.end - row;
        let height = left.div_ceil(left.div_ceil(4));
        let step = if height <= 2 { 2 } else { 1 };
        for vector in (0..PANEL_VECTORS).step_by(step) {
            match height {
                1 => tile::<K, 1, 2>(k, task, panel, (row, vector), gated),
                2 => tile::<K, 2, 2>(k, task, panel, (row, vector), gated),
                3 => tile::<K, 3, 1>(k, task, panel, (row, vector), gated),
                _ => tile::<K, 4, 1>(k, task, panel, (row, vector), gated),
            }
        }
        row += height;
    }
}

/// What a tile of `V` vectors and `height` rows fetches while it multiplies `panel`. Where other tiles
/// use the panel again, the first of them fetch a share of the next one each, so that memory is busy
/// meanwhile; a tile alone streams `panel`, then `following`.
#[inline(always)]
fn ahead_of<const V: usize>(
    task: &LinearTask<'_>,
    [panel, following]: [usize; 2],
    (row, vector): (usize, usize),
    height: usize,
) -> Ahead {
    let index = (row - task.rows.start) / height;
    let is_alone = V == PANEL_VECTORS && task.rows.len() <= height;
    let next = if is_alone { following } else { panel + 1 };
    let next = task.weight.panel(next.min(task.weight.panels.len() - 1));
    match (is_alone, index) {
        (true, _) => Ahead::Stream { next },
        (false, 0 | 1) if V == PANEL_VECTORS => {
            Ahead::Quarters { panel: next, first: 2 * index, count: 2 }
        }
        (false, 0) => Ahead::Quarters { panel: next, first: vector, count: V },
        _ => Ahead::Nothing,
    }
}

/// `R` rows and `V` vectors from `(row, vector)` on.
#[inline(always)]
fn tile<K: Kernel, const R: usize, const V: usize>(
    k: K,
    task: &LinearTask<'_>,
    panel: usize,
    (row, vector): (usize, usize),
    gated: bool,
) {
    let x = (task.input.rows_from(row, R).cast_const(), task.input.stride());
    let half = task.weight.panels.len() / 2;
    let following = if gated { panel + half } else { panel + 1 };
    let ahead = ahead_of::<V>(task, [panel, following], (row, vector), R);
    let sums = product::<K, R, V>(k, x, task.weight, (panel, vector), ahead);
    if !gated {
        for (index, sums) in sums.iter().enumerate() {
            for (offset, &sum) in sums.iter().enumerate() {
                let at = (row + index, vector + offset);
                finish(k, task, panel, at, sum);
            }
        }
        return;
    }
    let Epilogue::Gated(out) = task.epilogue else { return };
    let ahead = ahead_of::<V>(task, [panel + half, panel + 1], (row, vector), R);
    let ups = product::<K, R, V>(k, x, task.weight, (panel + half, vector), ahead);
    for index in 0..R {
        for offset in 0..V {
            let at = (row + index, vector + offset);
            let gate = biased(k, task.weight, panel, at.1, sums[index][offset]);
            let up = biased(k, task.weight, panel + half, at.1, ups[index][offset]);
            store_gated(k, (task, out), panel, at, [gate, up]);
        }
    }
}

#[inline(always)]
fn finish_row<K: Kernel>(
    k: K,
    task: &LinearTask<'_>,
    panel: usize,
    sums: &[Vector<K>; PANEL_VECTORS],
) {
    for (vector, &sum) in sums.iter().enumerate() {
        finish(k, task, panel, (task.rows.start, vector), sum);
    }
}

#[inline(always)]
fn biased<K: Kernel>(
    k: K,
    weight: &PackedLinear,
    panel: usize,
    vector: usize,
    sum: Vector<K>,
) -> Vector<K> {
    match weight.panel_bias(panel) {
        None => sum,
        // SAFETY: a panel's bias has 64 values.
        Some(bias) => unsafe { k.simd().add(sum, k.simd().load(bias.add(vector * LANES))) },
    }
}

/// Add the bias and store or add sixteen columns.
#[inline(always)]
fn finish<K: Kernel>(
    k: K,
    task: &LinearTask<'_>,
    panel: usize,
    (row, vector): (usize, usize),
    sum: Vector<K>,
) {
    let s = k.simd();
    let PanelColumns { start, width } = task.weight.panels[panel];
    let count = width.saturating_sub(vector * LANES).min(LANES);
    if count == 0 {
        return;
    }
    let sum = biased(k, task.weight, panel, vector, sum);
    // SAFETY: the columns lie within the output's row, and are this task's alone.
    unsafe {
        match task.epilogue {
            Epilogue::Store(out) => {
                store_prefix(s, out.row(row).add(start + vector * LANES), sum, count);
            }
            Epilogue::Add(out) => {
                let at = out.row(row).add(start + vector * LANES);
                let before = crate::simd::load_prefix(s, at, count);
                store_prefix(s, at, s.add(before, sum), count);
            }
            Epilogue::Gated(_) => {}
        }
    }
}

/// Store `act(gate) * up`; lanes beyond the width are zero, as both are.
#[inline(always)]
fn store_gated<K: Kernel>(
    k: K,
    (task, out): (&LinearTask<'_>, GatedRows),
    panel: usize,
    (row, vector): (usize, usize),
    [gate, up]: [Vector<K>; 2],
) {
    let PanelColumns { start, width } = task.weight.panels[panel];
    if vector * LANES < width {
        let value = gated(k.simd(), out.activation, gate, up);
        // SAFETY: operand rows are whole vectors; a panel starts at a multiple of 64 columns.
        unsafe {
            let at = out.rows.row(row).add((start + vector * LANES) / K::PER_WORD);
            k.store_elements(at, value);
        }
    }
}
