//! One draw: adjust the logits, cut to the likely ids, add noise, take the best.
//!
//! The rules and their order are the reference backend's; a draw depends on its own logits and slot
//! alone.

use super::slots::SlotSampling;
use crate::kernels::Kernels;
use crate::kernels::scan::{self, NoiseTask};

/// Below this temperature a draw is greedy.
const MIN_TEMPERATURE: f32 = 1e-6;
/// Cells of the histogram that finds a cut without sorting.
const CELLS: usize = 2048;
/// Cells per unit of scaled logit.
const CELLS_PER_UNIT: f32 = 64.0;

/// What a draw needs besides its logits.
pub(crate) struct Selection<'a> {
    pub(crate) slot: &'a SlotSampling,
    pub(crate) position: u32,
    /// Bit `id % 32` of word `id / 32` is set where an id is allowed.
    pub(crate) mask: Option<&'a [u32]>,
    /// Arg-max of the raw logits, if it is known.
    pub(crate) raw_best: Option<u32>,
}

/// The result of a draw.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Drawn {
    pub(crate) token: u32,
    /// A token was left after masks and suppression.
    pub(crate) possible: bool,
}

impl Selection<'_> {
    fn changes_logits(&self) -> bool {
        !self.slot.counts.is_empty()
            || !self.slot.bias.is_empty()
            || self.mask.is_some()
            || (!self.slot.suppressed.is_empty() && self.slot.suppresses(self.position))
    }
}

/// Draw from finite raw logits; `work` is overwritten.
pub(crate) fn draw(
    kernels: Kernels,
    logits: &[f32],
    selection: &Selection<'_>,
    work: &mut Vec<f32>,
) -> Drawn {
    let greedy = selection.slot.temperature < MIN_TEMPERATURE;
    let changes = selection.changes_logits();
    if greedy && !changes {
        let token = selection.raw_best.unwrap_or_else(|| scan::argmax(logits).0);
        return Drawn { token, possible: true };
    }
    work.clear();
    work.extend_from_slice(logits);
    if changes {
        adjust(work, selection);
    }
    let (best, highest) = match selection.raw_best {
        Some(best) if !changes => (best, logits[best as usize]),
        _ => scan::argmax(work),
    };
    let possible = highest.is_finite();
    if greedy || !possible {
        return Drawn { token: best, possible };
    }
    kernels.scale(work, highest, selection.slot.temperature);
    cut(kernels, work, selection.slot);
    let token = kernels.noisy_best(&NoiseTask {
        scaled: work,
        seed: selection.slot.seed,
        position: selection.position,
        likeliest: best,
    });
    Drawn { token, possible }
}

/// Apply penalties, suppression, grammar mask and bias, in this order.
fn adjust(row: &mut [f32], selection: &Selection<'_>) {
    let slot = selection.slot;
    for (&id, &count) in &slot.counts {
        row[id as usize] -= count as f32 * slot.frequency_penalty + slot.presence_penalty;
    }
    if slot.suppresses(selection.position) {
        for &id in &slot.suppressed {
            row[id as usize] = f32::NEG_INFINITY;
        }
    }
    for &id in slot.counts.keys() {
        let value = &mut row[id as usize];
        let factor = slot.repetition_penalty;
        *value = if *value > 0.0 { *value / factor } else { *value * factor };
    }
    if let Some(mask) = selection.mask {
        for (ids, &word) in row.chunks_mut(32).zip(mask) {
            for (bit, value) in ids.iter_mut().enumerate() {
                if word >> bit & 1 == 0 {
                    *value = f32::NEG_INFINITY;
                }
            }
        }
    }
    for &(id, bias) in &slot.bias {
        row[id as usize] += bias;
    }
}

/// Set everything but the most likely ids to -inf: top-k, then top-p of those, then min-p.
fn cut(kernels: Kernels, scaled: &mut [f32], slot: &SlotSampling) {
    let vocabulary = scaled.len();
    let limit = usize::try_from(slot.top_k).unwrap_or(0);
    let limit = if limit == 0 { vocabulary } else { limit.min(vocabulary) };
    if limit < vocabulary || slot.top_p < 1.0 {
        let (threshold, equals) = threshold(kernels, scaled, limit, slot.top_p);
        keep_above(scaled, threshold, equals);
    }
    if slot.min_p > 0.0 {
        let lowest = slot.min_p.max(1e-38).ln();
        for value in scaled.iter_mut().filter(|value| **value < lowest) {
            *value = f32::NEG_INFINITY;
        }
    }
}

/// Keep what exceeds `threshold` and the first `equals` that equal it.
fn keep_above(scaled: &mut [f32], threshold: f32, mut equals: usize) {
    for value in scaled {
        if *value > threshold {
            continue;
        }
        if *value == threshold && equals > 0 {
            equals -= 1;
            continue;
        }
        *value = f32::NEG_INFINITY;
    }
}

fn cell(value: f32) -> usize {
    // The best is 0; the last cell takes the rest.
    ((-value * CELLS_PER_UNIT) as usize).min(CELLS - 1)
}

/// Value of the least likely id that is kept, and how many ids of that value are.
///
/// Kept are the `limit` largest, and of them the fewest whose probability reaches `top_p`.
fn threshold(kernels: Kernels, scaled: &[f32], limit: usize, top_p: f32) -> (f32, usize) {
    let all = limit == scaled.len();
    let total = if all { kernels.sum_of_exp(scaled) } else { 0.0 };
    let mut sorted = candidates(scaled, limit, all.then_some(f64::from(top_p) * total));
    sorted.sort_unstable_by(|a, b| b.total_cmp(a));
    sorted.truncate(limit);
    let mut mass: Vec<f64> = sorted.iter().map(|&value| f64::from(value).exp()).collect();
    let total = if all { total } else { mass.iter().sum() };
    let target = f64::from(top_p) * total;
    let mut kept = sorted.len();
    if target < total {
        let mut running = 0.0;
        kept = 0;
        for mass in &mut mass {
            if running >= target {
                break;
            }
            running += *mass;
            kept += 1;
        }
    }
    let kept = kept.max(1);
    let threshold = sorted[kept - 1];
    let first = sorted.partition_point(|&value| value > threshold);
    (threshold, kept - first)
}

/// A superset of the ids that can be kept, as values: those of the first cells of a histogram that
/// together hold `limit` ids, or probability mass `target`.
fn candidates(scaled: &[f32], limit: usize, target: Option<f64>) -> Vec<f32> {
    let mut counts = vec![0_usize; CELLS];
    for &value in scaled {
        counts[cell(value)] += 1;
    }
    let mut last = 0;
    let mut ids = counts[0];
    // Bounds of the mass from below: every id of a cell counts as its least likely.
    let mut mass = lowest_mass(0) * counts[0] as f64;
    while last + 1 < CELLS && ids < limit && target.is_none_or(|target| mass < target) {
        last += 1;
        ids += counts[last];
        mass += lowest_mass(last) * counts[last] as f64;
    }
    scaled.iter().copied().filter(|&value| cell(value) <= last).collect()
}

/// Probability mass, against the best id's 1, that an id of a cell has at least.
fn lowest_mass(cell: usize) -> f64 {
    if cell == CELLS - 1 {
        return 0.0;
    }
    (-(cell as f64 + 1.0) / f64::from(CELLS_PER_UNIT)).exp()
}
