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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampling::philox::{gumbel, philox};
    use crate::testing::{Random, every_kernel};

    fn noise(id: usize, position: u32, seed: u64) -> f32 {
        gumbel(philox(id as u32 / 4, position, seed)[id % 4][0])
    }

    /// The rules by sorting everything.
    fn naive(logits: &[f32], selection: &Selection<'_>) -> u32 {
        let slot = selection.slot;
        let mut row = logits.to_vec();
        adjust(&mut row, selection);
        let highest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let scaled: Vec<f32> = row.iter().map(|x| (x - highest) / slot.temperature).collect();
        let mut ids: Vec<usize> = (0..row.len()).collect();
        ids.sort_by(|&a, &b| scaled[b].total_cmp(&scaled[a]).then(a.cmp(&b)));
        if slot.top_k > 0 {
            ids.truncate(slot.top_k as usize);
        }
        let total: f64 = ids.iter().map(|&id| f64::from(scaled[id]).exp()).sum();
        let mut kept = Vec::new();
        let mut mass = 0.0;
        for id in ids {
            if !kept.is_empty() && slot.top_p < 1.0 && mass >= f64::from(slot.top_p) * total {
                break;
            }
            mass += f64::from(scaled[id]).exp();
            kept.push(id);
        }
        if slot.min_p > 0.0 {
            kept.retain(|&id| scaled[id] >= slot.min_p.ln());
        }
        kept.sort_unstable();
        let score = |id: usize| scaled[id] + noise(id, selection.position, slot.seed);
        let mut best = kept[0];
        for &id in &kept {
            if score(id) > score(best) {
                best = id;
            }
        }
        best as u32
    }

    #[test]
    fn draws_are_those_of_sorting_everything() {
        let mut random = Random::new(11);
        for kernels in every_kernel() {
            let mut work = Vec::new();
            for round in 0..300 {
                let vocabulary = [5, 199, 1003][round % 3];
                let spread = [0.1, 2.0, 10.0][round / 3 % 3];
                let coarse = round % 7 == 0; // many equal logits
                let logits: Vec<f32> = (0..vocabulary)
                    .map(|_| random.normal() * spread)
                    .map(|x| if coarse { x.round() + 0.0 } else { x })
                    .collect();
                let mut slot = SlotSampling {
                    temperature: 0.3 + random.uniform(),
                    top_p: if random.below(2) == 0 { 1.0 } else { random.uniform() },
                    top_k: random.below(2) as i32 * (1 + random.below(vocabulary - 1)) as i32,
                    min_p: if random.below(3) == 0 { random.uniform() * 0.2 } else { 0.0 },
                    repetition_penalty: 1.0,
                    seed: round as u64 * 77 + 3,
                    ..SlotSampling::default()
                };
                if random.below(2) == 0 {
                    slot.bias = vec![(random.below(vocabulary) as u32, 3.0)];
                    slot.repetition_penalty = 1.3;
                    slot.frequency_penalty = 0.5;
                    slot.count(1);
                    slot.count(1);
                    slot.count(3);
                }
                let selection =
                    Selection { slot: &slot, position: round as u32, mask: None, raw_best: None };
                let drawn = draw(kernels, &logits, &selection, &mut work);
                assert_eq!(drawn.token, naive(&logits, &selection), "{:?} {slot:?}", kernels.isa);
            }
        }
    }

    #[test]
    fn a_mask_that_allows_nothing_is_reported() {
        let kernels = every_kernel()[0];
        let slot = SlotSampling { repetition_penalty: 1.0, ..SlotSampling::default() };
        let mut work = Vec::new();
        let mut mask = [0; 2];
        for allowed in [None, Some(37)] {
            if let Some(id) = allowed {
                mask[id / 32] |= 1 << (id % 32);
            }
            let selection =
                Selection { slot: &slot, position: 0, mask: Some(&mask), raw_best: None };
            let drawn = draw(kernels, &[0.5; 50], &selection, &mut work);
            assert_eq!(drawn.possible, allowed.is_some());
            if let Some(id) = allowed {
                assert_eq!(drawn.token as usize, id);
            }
        }
    }

    #[test]
    fn low_ids_win_ties_and_low_temperatures_overflow_nothing() {
        let kernels = every_kernel()[0];
        let mut work = Vec::new();
        for temperature in [0.0, 1e-5, 2e-6] {
            let slot = SlotSampling {
                temperature,
                repetition_penalty: 1.0,
                top_p: 1.0,
                ..Default::default()
            };
            let selection = Selection { slot: &slot, position: 3, mask: None, raw_best: None };
            let logits = [0.0, -3e38, 7.0, 5.0, 3.0];
            assert_eq!(draw(kernels, &logits, &selection, &mut work).token, 2);
        }
        let slot = SlotSampling { repetition_penalty: 1.0, ..SlotSampling::default() };
        let selection = Selection { slot: &slot, position: 3, mask: None, raw_best: None };
        assert_eq!(draw(kernels, &[1.0, 2.0, 2.0], &selection, &mut work).token, 1);
    }
}
