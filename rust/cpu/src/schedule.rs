//! How operations are cut into tasks. Cuts never change a result, only who computes it.

use std::ops::Range;

use crate::kernels::Kernels;
use crate::kernels::linear::{Epilogue, LinearTask};
use crate::kernels::quantise::QuantiseTask;
use crate::kernels::rows::RowsTask;
use crate::memory::Rows;
use crate::packed_linear::{PANEL, PackedLinear};
use crate::pool::ThreadPool;

/// Work of a task, in products: long enough to pay for its claim, short enough that a thread that
/// loses its core holds up the others for some microseconds only.
const TASK_PRODUCTS: usize = 1 << 20;
/// Products that take the time of some synchronisations: what is less is not shared.
pub(crate) const SHARED_PRODUCTS: usize = 1 << 16;
/// Tasks per thread below which cuts are made smaller.
const TASKS_PER_THREAD: usize = 6;
/// Rows that one task takes at most: their operands should stay in cache beside a panel.
const TASK_ROWS: usize = 192;

/// Compute a linear for some rows.
pub(crate) fn run_linear(
    pool: &ThreadPool,
    kernels: Kernels,
    weight: &PackedLinear,
    (input, epilogue): (Rows<u32>, Epilogue),
    rows: Range<usize>,
) {
    let gated = matches!(epilogue, Epilogue::Gated(_));
    let num_panels = weight.panels.len() / if gated { 2 } else { 1 };
    let panel_products = PANEL * weight.in_features * if gated { 2 } else { 1 };
    let height = rows.len().min(TASK_ROWS);
    let wanted = TASK_PRODUCTS.div_ceil(panel_products * height.max(1));
    let even = num_panels.div_ceil(TASKS_PER_THREAD * pool.num_threads());
    let panels = wanted.min(even).max(1);
    let across = num_panels.div_ceil(panels);
    let down = rows.len().div_ceil(height.max(1));
    let shared = panel_products * num_panels * rows.len() >= SHARED_PRODUCTS;
    let compute = |task: usize, _: usize| {
        // All rows of a panel, then the next panel: weights are read from memory once.
        let panel = task / down * panels;
        let row = rows.start + task % down * height;
        kernels.linear(&LinearTask {
            input,
            weight,
            epilogue,
            panels: panel..(panel + panels).min(num_panels),
            rows: row..(row + height).min(rows.end),
        });
    };
    if shared {
        pool.run_in_ranges(across * down, compute);
    } else {
        (0..across * down).for_each(|task| compute(task, 0));
    }
}

/// Quantise operands, sharing it where it is much.
pub(crate) fn run_quantise(pool: &ThreadPool, kernels: Kernels, task: &QuantiseTask) {
    let rows = task.rows.clone();
    let height = (TASK_ELEMENTS / task.width.max(1)).max(1);
    pool.run(rows.len().div_ceil(height), |index, _| {
        let start = rows.start + index * height;
        let rows = start..(start + height).min(rows.end);
        kernels.quantise(&QuantiseTask { rows, ..task.clone() });
    });
}

/// Elements of a task of row-wise work.
const TASK_ELEMENTS: usize = 1 << 13;

/// Compute row-wise work, sharing it where it is much.
pub(crate) fn run_rows(pool: &ThreadPool, kernels: Kernels, task: &RowsTask<'_>) {
    let rows = task.rows.clone();
    let height = (TASK_ELEMENTS / task.width.max(1)).max(1);
    pool.run(rows.len().div_ceil(height), |index, _| {
        let start = rows.start + index * height;
        kernels.rows(&RowsTask { rows: start..(start + height).min(rows.end), ..*task });
    });
}
