//! One draw: adjust the logits, cut to the likely ids, add noise, take the best.
//!
//! The rules and their order are the reference backend's; a draw depends on its own logits and slot
//! alone.

use super::philox::{MAX_NOISE, Noise};
use super::slots::SlotSampling;
use crate::kernels::Kernels;
use crate::kernels::scan::{self, NoiseTask};

/// Below this temperature a draw is greedy.
const MIN_TEMPERATURE: f32 = 1e-6;
/// How far below the best (scaled) logit candidates are looked for, until they are enough.
const DEPTHS: [f32; 4] = [8.0, 16.0, 32.0, f32::INFINITY];

/// Candidates whose noise is computed one by one; more are computed side by side.
const FEW: usize = 128;
/// Cells of the histogram that finds where a probability is reached, and their number per unit.
const CELLS: usize = 2048;
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
    let noise = Noise { seed: selection.slot.seed, position: selection.position };
    let limit = limit(selection.slot, work.len());
    if limit < work.len() || selection.slot.top_p < 1.0 {
        let kept = cut(kernels, work, limit, selection.slot);
        if kept.0.len() <= FEW {
            return Drawn { token: kept.best(noise), possible };
        }
        work.fill(f32::NEG_INFINITY);
        for &entry in &kept.0 {
            work[entry as u32 as usize] = -distance(entry);
        }
    } else {
        let lowest = lowest(selection.slot);
        for value in work.iter_mut().filter(|value| **value < lowest) {
            *value = f32::NEG_INFINITY;
        }
    }
    let token = kernels.noisy_best(&NoiseTask { scaled: work, noise, likeliest: best });
    Drawn { token, possible }
}

/// Finite raw logits as a draw sees them before it cuts to the likely ids: adjusted, the best of them
/// 0, and divided by the temperature unless it is greedy. `work` is overwritten.
///
/// Returns whether a token is left.
pub(crate) fn process(
    kernels: Kernels,
    logits: &[f32],
    selection: &Selection<'_>,
    work: &mut Vec<f32>,
) -> bool {
    work.clear();
    work.extend_from_slice(logits);
    if selection.changes_logits() {
        adjust(work, selection);
    }
    let highest = scan::argmax(work).1;
    if !highest.is_finite() {
        return false;
    }
    let temperature = selection.slot.temperature;
    kernels.scale(work, highest, if temperature < MIN_TEMPERATURE { 1.0 } else { temperature });
    true
}

/// `top_k` as a number of ids.
fn limit(slot: &SlotSampling, vocabulary: usize) -> usize {
    match usize::try_from(slot.top_k) {
        Ok(0) | Err(_) => vocabulary,
        Ok(top_k) => top_k.min(vocabulary),
    }
}

/// Scaled logit below which `min_p` leaves nothing.
fn lowest(slot: &SlotSampling) -> f32 {
    if slot.min_p > 0.0 { slot.min_p.max(1e-38).ln() } else { f32::NEG_INFINITY }
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

/// Ids that survive a cut, in any order.
///
/// An entry holds the bits of the scaled logit's distance from the best, which ascend with it, above
/// the id: sorted, the most likely come first, and the lower id among equals.
struct Candidates(Vec<u64>);

fn distance(entry: u64) -> f32 {
    f32::from_bits((entry >> 32) as u32)
}

impl Candidates {
    /// All ids whose scaled logit is at least `-depth`.
    fn within(kernels: Kernels, scaled: &[f32], depth: f32) -> Candidates {
        let mut entries = Vec::new();
        kernels.visit_above(scaled, -depth, &mut |id, value| {
            entries.push(u64::from((0.0 - value).to_bits()) << 32 | u64::from(id));
        });
        Candidates(entries)
    }

    fn values(&self) -> Vec<f32> {
        self.0.iter().map(|&entry| -distance(entry)).collect()
    }

    fn mass(&self, kernels: Kernels) -> f64 {
        kernels.sum_of_exp(&self.values())
    }

    /// The id whose value plus noise is the largest; the lowest among equals.
    fn best(&self, noise: Noise) -> u32 {
        let mut best = (0, f32::NEG_INFINITY);
        for &entry in &self.0 {
            let value = -distance(entry);
            if value + MAX_NOISE < best.1 {
                continue;
            }
            let id = entry as u32;
            let score = value + noise.of(id);
            if score > best.1 || (score == best.1 && id < best.0) {
                best = (id, score);
            }
        }
        best.0
    }
}

/// The `limit` largest, of them the fewest whose probability reaches `top_p`, of those what `min_p`
/// leaves.
fn cut(kernels: Kernels, scaled: &[f32], limit: usize, slot: &SlotSampling) -> Candidates {
    let all = limit == scaled.len();
    let total = if all { kernels.sum_of_exp(scaled) } else { 0.0 };
    let top_p = f64::from(slot.top_p);
    let mut found = Candidates(Vec::new());
    for depth in DEPTHS {
        found = Candidates::within(kernels, scaled, depth);
        let enough = if all {
            // Mass in another order of summing may fall short by a little of what it has.
            found.mass(kernels) >= top_p * total * (1.0 + 1e-9)
        } else {
            found.0.len() >= limit
        };
        if enough {
            break;
        }
    }
    if found.0.len() > limit {
        found.0.select_nth_unstable(limit - 1);
        found.0.truncate(limit);
    }
    if top_p < 1.0 {
        let total = if all { total } else { found.mass(kernels) };
        found = reach(kernels, &found, top_p * total);
    }
    let lowest = lowest(slot);
    found.0.retain(|&entry| -distance(entry) >= lowest);
    found
}

/// The fewest of the most likely candidates whose mass reaches `target`; at least one.
///
/// A histogram finds the cell in which it is reached; only that cell is sorted.
fn reach(kernels: Kernels, found: &Candidates, target: f64) -> Candidates {
    let cell = |entry: u64| ((distance(entry) * CELLS_PER_UNIT) as usize).min(CELLS - 1);
    let mut masses = Vec::new();
    kernels.exp_each(&found.values(), &mut masses);
    let mut cells = vec![0.0; CELLS];
    for (&entry, &mass) in found.0.iter().zip(&masses) {
        cells[cell(entry)] += mass;
    }
    let mut running = 0.0;
    let mut boundary = 0;
    while boundary + 1 < CELLS && running + cells[boundary] < target {
        running += cells[boundary];
        boundary += 1;
    }
    let mut kept = Vec::with_capacity(found.0.len());
    let mut last = Vec::new();
    for &entry in &found.0 {
        let at = cell(entry);
        if at < boundary {
            kept.push(entry);
        } else if at == boundary {
            last.push(entry);
        }
    }
    last.sort_unstable();
    for entry in last {
        if running >= target && !kept.is_empty() {
            break;
        }
        running += f64::from(-distance(entry)).exp();
        kept.push(entry);
    }
    Candidates(kept)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Random, every_kernel};

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
        let noise = Noise { seed: slot.seed, position: selection.position };
        let score = |id: usize| scaled[id] + noise.of(id as u32);
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
