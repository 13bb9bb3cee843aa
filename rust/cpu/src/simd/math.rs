//! Functions of vectors that are the same on every instruction set.

use super::{LANES, Simd};

const LOG2_E: f32 = std::f32::consts::LOG2_E;
/// ln 2 in two parts; products of the first with whole numbers below 2^8 are exact.
const LN_2_HIGH: f32 = 0.693_359_4;
const LN_2_LOW: f32 = -2.121_944_4e-4;
/// Here the power of two becomes 0, and so does the result.
const LOWEST: f32 = -127.0 * std::f32::consts::LN_2;
const HIGHEST: f32 = 88.0;

/// `e^x` within 2 units in the last place; 0 below -88, `e^88` above; NaN stays NaN.
#[inline(always)]
pub(crate) fn exp<S: Simd>(s: S, x: S::F) -> S::F {
    let x = s.min(s.splat(HIGHEST), s.max(s.splat(LOWEST), x));
    let n = s.round(s.mul(x, s.splat(LOG2_E)));
    let r = s.fma(n, s.splat(-LN_2_HIGH), x);
    let r = s.fma(n, s.splat(-LN_2_LOW), r);
    // Taylor's series: |r| <= 0.35, so the first term left out is below 6e-9.
    let mut sum = s.splat(1.0 / 5040.0);
    for factor in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        sum = s.fma(sum, r, s.splat(factor));
    }
    s.mul(sum, s.power_of_two(n))
}

/// `2^x` within 2 units in the last place for x up to 127; 0 below -200; NaN stays NaN.
///
/// `2^0` is 1 exactly.
#[inline(always)]
#[expect(clippy::approx_constant, reason = "a fitted coefficient that is near ln 2")]
pub(crate) fn exp2<S: Simd>(s: S, x: S::F) -> S::F {
    let x = s.max(s.splat(-200.0), x);
    let n = s.round(x);
    let r = s.sub(x, n);
    // The polynomial of degree 5 with p(0) = 1 whose relative error on [-0.5, 0.5] is least, 9.2e-8
    // (Lawson's iteration in float64).
    let mut sum = s.splat(1.326_472_7e-3);
    for factor in [9.671_513e-3, 5.550_733_6e-2, 0.240_222_42, 0.693_147, 1.0] {
        sum = s.fma(sum, r, s.splat(factor));
    }
    s.scale_by_power(sum, n)
}

/// The first `count` values, the other lanes 0.
///
/// # Safety
/// `count` values, at most sixteen, must be readable at `from`.
#[inline(always)]
pub(crate) unsafe fn load_prefix<S: Simd>(s: S, from: *const f32, count: usize) -> S::F {
    // SAFETY: the copy stays within the caller's values and the array.
    unsafe {
        if count >= LANES {
            return s.load(from);
        }
        let mut values = [0.0; LANES];
        std::ptr::copy_nonoverlapping(from, values.as_mut_ptr(), count);
        s.load(values.as_ptr())
    }
}

/// Store the first `count` lanes.
///
/// # Safety
/// `count` values, at most sixteen, must be writable at `to`.
#[inline(always)]
pub(crate) unsafe fn store_prefix<S: Simd>(s: S, to: *mut f32, x: S::F, count: usize) {
    // SAFETY: the copy stays within the caller's values and the array.
    unsafe {
        if count >= LANES {
            s.store(to, x);
            return;
        }
        let mut values = [0.0; LANES];
        s.store(values.as_mut_ptr(), x);
        std::ptr::copy_nonoverlapping(values.as_ptr(), to, count);
    }
}
