//! Matrix products with packed panels.
//!
//! Every output element is summed over K in ascending order in one accumulator, whatever the number
//! of rows, the tile or the thread: so its bits depend on its own row and column alone.

use std::ops::Range;

use super::block_linear::{self, Ahead, Columns, Operand};
use super::rows::{Activation, gated};
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
            tiles_of_six::<K>(k, task, panel, gated);
        }
    } else {
        for panel in task.panels.clone() {
            tiles_of_four::<K>(k, task, panel, gated);
        }
    }
}

/// One row: two panels at a time keep enough loads in flight.
#[inline(always)]
fn one_row<K: Kernel>(k: K, task: &LinearTask<'_>) {
    let x = task.input.rows_from(task.rows.start, 1);
    let mut panel = task.panels.start;
    while panel + 2 <= task.panels.end {
        let sums = two_panels(k, x, task.weight, [panel, panel + 1]);
        finish_row(k, task, panel, &sums[0]);
        finish_row(k, task, panel + 1, &sums[1]);
        panel += 2;
    }
    if panel < task.panels.end {
        let mut sums = [[k.simd().splat(0.0); PANEL_VECTORS]; 1];
        product::<K, 1, PANEL_VECTORS>(k, (x, 0), task.weight, (panel, 0), None, &mut sums);
        finish_row(k, task, panel, &sums[0]);
    }
}

#[inline(always)]
fn gated_row<K: Kernel>(k: K, task: &LinearTask<'_>, panel: usize) {
    let Epilogue::Gated(out) = task.epilogue else { return };
    let x = task.input.rows_from(task.rows.start, 1);
    let half = task.weight.panels.len() / 2;
    let sums = two_panels(k, x, task.weight, [panel, panel + half]);
    for vector in 0..PANEL_VECTORS {
        let gate = biased(k, task.weight, panel, vector, sums[0][vector]);
        let up = biased(k, task.weight, panel + half, vector, sums[1][vector]);
        store_gated(k, (task, out), panel, (task.rows.start, vector), [gate, up]);
    }
}

#[inline(always)]
fn two_panels<K: Kernel>(
    k: K,
    x: *const u32,
    weight: &PackedLinear,
    panels: [usize; 2],
) -> [[Vector<K>; PANEL_VECTORS]; 2] {
    let formats = panels.map(|panel| weight.format(panel));
    if let PanelFormat::Blocks(format) = formats[0]
        && formats[0] == formats[1]
    {
        let panels = panels.map(|panel| weight.panel(panel));
        // SAFETY: an input row has the weight's blocks, and both panels are of that format.
        return unsafe { block_linear::pair(k, format, x, panels, weight.num_blocks()) };
    }
    if formats != [PanelFormat::Dense; 2] {
        let mut sums = [[[k.simd().splat(0.0); PANEL_VECTORS]; 1]; 2];
        for (sums, panel) in sums.iter_mut().zip(panels) {
            product::<K, 1, PANEL_VECTORS>(k, (x, 0), weight, (panel, 0), None, sums);
        }
        return [sums[0][0], sums[1][0]];
    }
    let mut sums = [[k.simd().splat(0.0); PANEL_VECTORS]; 2];
    let [first, second] = panels.map(|panel| weight.panel(panel));
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
    ahead: Option<Ahead>,
    sums: &mut [[Vector<K>; V]; R],
) {
    let from = weight.panel(panel);
    match weight.format(panel) {
        PanelFormat::Dense => {
            let from = from.wrapping_add(first * LANES);
            dense_product::<K, R, V>(k, (x, stride), weight.row_words(), from, ahead, sums);
        }
        PanelFormat::Blocks(format) => {
            let x = Operand { start: x, stride };
            let columns = Columns { panel: from, num_blocks: weight.num_blocks(), first };
            // SAFETY: input rows have the weight's blocks, and the panel is of that format.
            unsafe { block_linear::product(k, format, x, columns, ahead, sums) };
        }
    }
}

#[inline(always)]
fn dense_product<K: Kernel, const R: usize, const V: usize>(
    k: K,
    (x, stride): (*const u32, usize),
    row_words: usize,
    columns: *const u32,
    ahead: Option<Ahead>,
    sums: &mut [[Vector<K>; V]; R],
) {
    let mut local = *sums;
    for word in 0..row_words {
        // SAFETY: `x` points to `R` rows of `row_words` words, and a panel holds `row_words * PANEL`.
        unsafe {
            let from = columns.add(word * PANEL);
            if V == PANEL_VECTORS
                && let Some(ahead) = ahead
            {
                let next = ahead.panel.wrapping_add(word * PANEL + ahead.half * PANEL / 2);
                k.prefetch(next);
                k.prefetch(next.wrapping_add(LANES));
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
    *sums = local;
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

#[inline(always)]
fn tiles_of_four<K: Kernel>(k: K, task: &LinearTask<'_>, panel: usize, gated: bool) {
    let mut row = task.rows.start;
    while row < task.rows.end {
        let rows = (task.rows.end - row).min(4);
        for vector in 0..PANEL_VECTORS {
            match rows {
                1 => tile::<K, 1, 1>(k, task, panel, (row, vector), gated),
                2 => tile::<K, 2, 1>(k, task, panel, (row, vector), gated),
                3 => tile::<K, 3, 1>(k, task, panel, (row, vector), gated),
                _ => tile::<K, 4, 1>(k, task, panel, (row, vector), gated),
            }
        }
        row += rows;
    }
}

/// What the tile at `row` fetches of the next panel: the first two of several tiles fetch a half each,
/// so that memory is busy while a panel is used again. A single tile leaves it to the processor.
#[inline(always)]
fn half_of_next(task: &LinearTask<'_>, panel: usize, row: usize, height: usize) -> Option<Ahead> {
    let half = (row - task.rows.start) / height;
    if task.rows.len() <= height || half >= 2 || panel + 1 >= task.weight.panels.len() {
        return None;
    }
    Some(Ahead { panel: task.weight.panel(panel + 1), half })
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
    let mut sums = [[k.simd().splat(0.0); V]; R];
    let next = half_of_next(task, panel, row, R);
    product::<K, R, V>(k, x, task.weight, (panel, vector), next, &mut sums);
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
    let half = task.weight.panels.len() / 2;
    let mut ups = [[k.simd().splat(0.0); V]; R];
    let next = half_of_next(task, panel + half, row, R);
    product::<K, R, V>(k, x, task.weight, (panel + half, vector), next, &mut ups);
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
