//! Scans of a row of logits: the best, sums of exponentials, the best with Gumbel noise.

use crate::sampling::{MAX_NOISE, Noise, gumbel, philox};
use crate::simd::{Kernel, LANES, Simd, exp, load_prefix, store_prefix};

/// Philox blocks computed side by side.
const BLOCKS: usize = 16;

/// The largest value and the lowest id that has it.
pub(crate) fn argmax(row: &[f32]) -> (u32, f32) {
    let mut best = (0, row.first().copied().unwrap_or(f32::NEG_INFINITY));
    for (id, &value) in row.iter().enumerate() {
        if value > best.1 {
            best = (id as u32, value);
        }
    }
    best
}

/// What a stretch of raw logits holds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    pub(crate) best: u32,
    pub(crate) highest: f32,
    pub(crate) finite: bool,
}

impl Extent {
    /// Of this stretch and the one after it.
    pub(crate) fn followed_by(self, next: Extent) -> Extent {
        let better = if next.highest > self.highest { next } else { self };
        Extent { finite: self.finite && next.finite, ..better }
    }
}

/// Best of `row`, whose first id is `first`; all ids are valid.
#[inline(always)]
pub(crate) fn extent<K: Kernel>(k: K, row: &[f32], first: usize) -> Extent {
    let s = k.simd();
    let mut highest = s.splat(f32::NEG_INFINITY);
    let mut zeros = s.splat(0.0);
    let whole = row.len() / LANES * LANES;
    for at in (0..whole).step_by(LANES) {
        // SAFETY: within the slice.
        let x = unsafe { s.load(row.as_ptr().add(at)) };
        highest = s.max(x, highest);
        zeros = s.fma(x, s.splat(0.0), zeros);
    }
    let mut best = s.highest(highest);
    let mut finite = s.sum(zeros) == 0.0;
    for &x in &row[whole..] {
        best = if x > best { x } else { best };
        finite &= x.is_finite();
    }
    let at = row.iter().position(|&x| x == best).unwrap_or(0);
    Extent { best: (first + at) as u32, highest: best, finite }
}

/// `x = cap * tanh(x / cap)`; NaN stays NaN.
#[inline(always)]
pub(crate) fn soft_cap<K: Kernel>(k: K, row: &mut [f32], cap: f32) {
    let s = k.simd();
    let (one, two) = (s.splat(1.0), s.splat(2.0));
    let (factor, cap) = (s.splat(2.0 / cap), s.splat(cap));
    for at in (0..row.len()).step_by(LANES) {
        let count = LANES.min(row.len() - at);
        // SAFETY: `count` values from `at` on are the row's.
        unsafe {
            let from = row.as_mut_ptr().add(at);
            let power = exp(s, s.mul(load_prefix(s, from, count), factor));
            // tanh x = 1 - 2 / (e^2x + 1)
            let tangent = s.sub(one, s.div(two, s.add(power, one)));
            store_prefix(s, from, s.mul(tangent, cap), count);
        }
    }
}

/// Sum of `e^(x - highest)` in a fixed order.
#[inline(always)]
pub(crate) fn exp_sum<K: Kernel>(k: K, row: &[f32], highest: f32) -> f32 {
    let s = k.simd();
    let shift = s.splat(highest);
    let mut sums = [s.splat(0.0); 4];
    let chunks = row.chunks_exact(4 * LANES);
    let tail = chunks.remainder();
    for chunk in chunks {
        for (index, sum) in sums.iter_mut().enumerate() {
            // SAFETY: the chunk has four vectors.
            let x = unsafe { s.load(chunk.as_ptr().add(index * LANES)) };
            *sum = s.add(*sum, exp(s, s.sub(x, shift)));
        }
    }
    let mut values = [f32::NEG_INFINITY; 4 * LANES];
    values[..tail.len()].copy_from_slice(tail);
    for (index, sum) in sums.iter_mut().enumerate() {
        // SAFETY: the array has four vectors.
        let x = unsafe { s.load(values.as_ptr().add(index * LANES)) };
        *sum = s.add(*sum, exp(s, s.sub(x, shift)));
    }
    s.sum(s.add(s.add(sums[0], sums[1]), s.add(sums[2], sums[3])))
}

/// `x = (x - highest) / temperature`.
#[inline(always)]
pub(crate) fn scale(row: &mut [f32], highest: f32, temperature: f32) {
    for x in row {
        *x = (*x - highest) / temperature;
    }
}

/// `e^x` in float64 for `x <= 0`, within some 1e-15; loops over it become vectors.
#[inline(always)]
fn exp_wide(x: f64) -> f64 {
    const MAGIC: f64 = 6_755_399_441_055_744.0; // 1.5 * 2^52: adding it rounds to whole numbers
    const LN_2_HIGH: f64 = 0.693_147_180_369_123_8;
    const LN_2_LOW: f64 = 1.908_214_929_270_587_7e-10;
    let x = if x > -708.0 { x } else { -708.0 };
    let shifted = x * std::f64::consts::LOG2_E + MAGIC;
    let n = shifted - MAGIC;
    let r = (x - n * LN_2_HIGH) - n * LN_2_LOW;
    let mut sum = 1.0 / 6_227_020_800.0;
    let factorials = [
        479_001_600.0,
        39_916_800.0,
        3_628_800.0,
        362_880.0,
        40_320.0,
        5_040.0,
        720.0,
        120.0,
        24.0,
        6.0,
        2.0,
        1.0,
        1.0,
    ];
    for factorial in factorials {
        sum = sum * r + 1.0 / factorial;
    }
    let exponent = (shifted.to_bits().wrapping_add(1023)) << 52;
    sum * f64::from_bits(exponent)
}

/// Sum of `e^x` of a row whose best is 0, in float64 and a fixed order.
#[inline(always)]
pub(crate) fn sum_of_exp(row: &[f32]) -> f64 {
    let mut sums = [0.0_f64; LANES];
    let chunks = row.chunks_exact(LANES);
    let tail = chunks.remainder();
    for chunk in chunks {
        for (sum, &x) in sums.iter_mut().zip(chunk) {
            *sum += exp_wide(f64::from(x));
        }
    }
    let rest: f64 = tail.iter().map(|&x| exp_wide(f64::from(x))).sum();
    sums.iter().sum::<f64>() + rest
}

/// `e^x` of each value.
#[inline(always)]
pub(crate) fn exp_each(row: &[f32], results: &mut Vec<f64>) {
    results.clear();
    results.resize(row.len(), 0.0);
    for (result, &x) in results.iter_mut().zip(row) {
        *result = exp_wide(f64::from(x));
    }
}

/// Call `visit` with id and value of everything that is at least `lowest`, ids ascending.
#[inline(always)]
pub(crate) fn visit_above<K: Kernel>(
    k: K,
    row: &[f32],
    lowest: f32,
    visit: &mut dyn FnMut(u32, f32),
) {
    let s = k.simd();
    let whole = row.len() / LANES * LANES;
    for at in (0..whole).step_by(LANES) {
        // SAFETY: within the slice.
        let x = unsafe { s.load(row.as_ptr().add(at)) };
        let mut above = !s.less(x, s.splat(lowest));
        while above != 0 {
            let id = at + above.trailing_zeros() as usize;
            visit(id as u32, row[id]);
            above &= above - 1;
        }
    }
    for (id, &x) in row.iter().enumerate().skip(whole) {
        if x >= lowest {
            visit(id as u32, x);
        }
    }
}

/// A draw from probabilities proportional to `e^scaled`, whose best is 0.
pub(crate) struct NoiseTask<'a> {
    pub(crate) scaled: &'a [f32],
    pub(crate) noise: Noise,
    pub(crate) likeliest: u32,
}

/// The id whose value plus noise is the largest; the lowest among equals.
///
/// Exact noise is computed only where a bound says that the id may win: with `d` what the noise must
/// exceed, `u > exp(-exp(-d))` and so `1 - u < exp(-d)`.
#[inline(always)]
pub(crate) fn noisy_best<K: Kernel>(k: K, task: &NoiseTask<'_>) -> u32 {
    const IDS: usize = 4 * BLOCKS;
    let s = k.simd();
    let Noise { seed, position } = task.noise;
    let likeliest = task.scaled[task.likeliest as usize];
    let mut best = (task.likeliest, likeliest + task.noise.of(task.likeliest));
    for (index, chunk) in task.scaled.chunks(IDS).enumerate() {
        let mut values = [f32::NEG_INFINITY; IDS];
        values[..chunk.len()].copy_from_slice(chunk);
        let mut alive = 0_u64;
        for vector in 0..IDS / LANES {
            // SAFETY: the array has four vectors.
            let x = unsafe { s.load(values.as_ptr().add(vector * LANES)) };
            let dead = s.less(x, s.splat(best.1 - MAX_NOISE));
            alive |= u64::from(!dead) << (vector * LANES);
        }
        if alive == 0 {
            continue;
        }
        let words = philox::<BLOCKS>((index * BLOCKS) as u32, position, seed);
        let mut need = [0.0_f32; IDS];
        for vector in 0..IDS / LANES {
            // SAFETY: both arrays have four vectors.
            unsafe {
                let x = s.load(values.as_ptr().add(vector * LANES));
                let bound = exp(s, s.sub(x, s.splat(best.1)));
                s.store(need.as_mut_ptr().add(vector * LANES), bound);
            }
        }
        for id in 0..IDS {
            let word = words[id % 4][id / 4];
            let above = ((1 << 24) - (word >> 8)) as f32 * (1.0 / 16_777_216.0);
            if alive >> id & 1 == 0 || above > need[id] * 1.001 + 1e-6 {
                continue;
            }
            let score = values[id] + gumbel(word);
            let id = (index * IDS + id) as u32;
            if score > best.1 || (score == best.1 && id < best.0) {
                best = (id, score);
            }
        }
    }
    best.0
}

#[cfg(test)]
mod tests {
    use crate::testing::{Random, every_kernel};

    #[test]
    fn sums_of_exponentials_agree_with_the_library() {
        let mut random = Random::new(2);
        for kernels in every_kernel() {
            for len in [1, 16, 63, 64, 1003] {
                let row: Vec<f32> = (0..len).map(|_| -random.uniform() * 90.0).collect();
                let expected: f64 = row.iter().map(|&x| f64::from(x).exp()).sum();
                let wide = kernels.sum_of_exp(&row);
                assert!((wide - expected).abs() <= 1e-14 * expected, "{wide} {expected}");
                let narrow = f64::from(kernels.exp_sum(&row, 0.0));
                assert!((narrow - expected).abs() <= 1e-5 * expected, "{narrow} {expected}");
            }
        }
    }

    #[test]
    fn soft_caps_agree_with_the_library_wherever_a_row_is_cut() {
        let mut random = Random::new(3);
        for kernels in every_kernel() {
            for len in [1, 16, 63, 1003] {
                let row: Vec<f32> = (0..len).map(|_| random.normal() * 40.0).collect();
                let mut capped = row.clone();
                kernels.soft_cap(&mut capped, 30.0);
                for (&x, &value) in row.iter().zip(&capped) {
                    let expected = 30.0 * (f64::from(x) / 30.0).tanh();
                    assert!((f64::from(value) - expected).abs() < 1e-5, "{x}: {value} {expected}");
                }
                let mut parts = row.clone();
                for part in parts.chunks_mut(21) {
                    kernels.soft_cap(part, 30.0);
                }
                assert_eq!(parts, capped);
            }
            let mut row = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e30, -1e30, 0.0];
            kernels.soft_cap(&mut row, 30.0);
            assert!(row[0].is_nan());
            assert_eq!(row[1..], [30.0, -30.0, 30.0, -30.0, 0.0]);
        }
    }

    #[test]
    fn extents_find_the_first_best_and_what_is_not_finite() {
        for kernels in every_kernel() {
            for len in [1, 15, 16, 17, 100] {
                let mut row = vec![-1.0_f32; len];
                row[len / 2] = 4.0;
                row[len - 1] = 4.0;
                let extent = kernels.extent(&row, 1000);
                assert_eq!((extent.best as usize, extent.finite), (1000 + len / 2, true));
                for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    for at in [0, len - 1] {
                        let mut row = row.clone();
                        row[at] = bad;
                        assert!(!kernels.extent(&row, 0).finite, "{bad} at {at} of {len}");
                    }
                }
            }
        }
    }
}
