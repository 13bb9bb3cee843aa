//! Sixteen float32 lanes, and dot products of 32-bit words, on every instruction set.
//!
//! A *word* is the unit that weights, operands and KV are stored in: two bfloat16 elements, or one
//! float32. So one packed layout and one set of kernels serve both element types.
//!
//! Kernels are generic and `#[inline(always)]`; the functions in `kernels::table` that enable the
//! instructions are what they end up in.

mod avx2;
mod avx512;
mod bytes;
mod math;
mod portable;

#[cfg(target_arch = "x86_64")]
pub(crate) use avx2::{Avx2, Avx2Bf16};
#[cfg(target_arch = "x86_64")]
pub(crate) use avx512::{Avx512, Avx512Bf16};
pub(crate) use bytes::Bytes;
pub(crate) use math::{exp, exp2, load_prefix, store_prefix};
pub(crate) use portable::{Portable, PortableBf16, bf16_from_f32};

/// Lanes of a vector, and tokens of a KV group.
pub(crate) const LANES: usize = 16;

/// Sixteen float32 lanes. A value of the type proves that the processor has the instructions.
pub(crate) trait Simd: Copy {
    /// The vector.
    type F: Copy;

    fn splat(self, x: f32) -> Self::F;
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// The larger; `b` if either is NaN.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// The smaller; `b` if either is NaN.
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    /// To the nearest whole number, ties to even.
    fn round(self, a: Self::F) -> Self::F;
    /// `2^n` for whole n in -126..=127; 0 for -127.
    fn power_of_two(self, n: Self::F) -> Self::F;
    /// `a * 2^n` for whole n up to 127; 0 where n is -200.
    fn scale_by_power(self, a: Self::F, n: Self::F) -> Self::F;
    /// Lanes of `kept` where the bit is set, of `other` elsewhere.
    fn select(self, bits: u16, kept: Self::F, other: Self::F) -> Self::F;
    /// Which lanes of `a` are less than those of `b`.
    fn less(self, a: Self::F, b: Self::F) -> u16;
    /// Sum of the lanes, in a fixed order.
    fn sum(self, a: Self::F) -> f32;
    /// The largest lane; unspecified if a lane is NaN.
    fn highest(self, a: Self::F) -> f32;

    /// # Safety
    /// Sixteen values must be readable at `from`.
    unsafe fn load(self, from: *const f32) -> Self::F;
    /// # Safety
    /// Sixteen values must be writable at `to`.
    unsafe fn store(self, to: *mut f32, x: Self::F);
}

/// How words are multiplied: the element type on an instruction set.
pub(crate) trait Kernel: Copy {
    /// The float32 vectors.
    type S: Bytes;
    /// Sixteen words, ready to be multiplied.
    type W: Copy;
    /// Elements in a word.
    const PER_WORD: usize;
    /// Vectors of sixteen columns that a tile of a matrix product spans: 4, or 1 where registers
    /// are few.
    const TILE_VECTORS: usize;

    fn simd(self) -> Self::S;
    /// Fetch a cache line into the second level; any address will do.
    fn prefetch(self, from: *const u32);
    /// Fetch a cache line into the first level, where kernels gain by it.
    #[inline(always)]
    fn prefetch_near(self, from: *const u32) {
        self.prefetch(from);
    }
    fn splat_word(self, word: u32) -> Self::W;
    /// Add the products of the words' elements to `sums`, lane by lane.
    fn dot(self, sums: Vector<Self>, a: Self::W, b: Self::W) -> Vector<Self>;
    /// # Safety
    /// Sixteen words must be readable at `from`.
    unsafe fn load_words(self, from: *const u32) -> Self::W;
    /// # Safety
    /// Sixteen elements must be readable at `from`.
    unsafe fn load_elements(self, from: *const u32) -> Vector<Self>;
    /// Round to sixteen elements.
    ///
    /// # Safety
    /// Sixteen elements must be writable at `to`.
    unsafe fn store_elements(self, to: *mut u32, x: Vector<Self>);
}

/// The float32 vector of a kernel.
pub(crate) type Vector<K> = <<K as Kernel>::S as Simd>::F;
