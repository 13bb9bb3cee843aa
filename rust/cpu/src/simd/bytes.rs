//! Dot products of bytes on every instruction set. Their sums are exact, so that what is computed
//! with them has the same bits on all.

use super::Simd;

/// Integer lanes beside the float32 lanes of `Simd`.
pub(crate) trait Bytes: Simd {
    /// Sixteen 32-bit sums.
    type I: Copy;
    /// Sixteen words of four unsigned bytes, ready to be multiplied.
    type Codes: Copy;
    /// One word of four signed bytes for all lanes, ready to be multiplied with codes.
    type Signed: Copy;
    /// The low and the high halves of sixteen words' bytes, ready to be multiplied.
    type Nibbles: Copy;
    /// As `Signed`, ready to be multiplied with nibbles.
    type SignedForNibbles: Copy;

    fn splat_int(self, x: i32) -> Self::I;
    fn splat_signed(self, word: u32) -> Self::Signed;
    /// Add the products of a word's bytes to `sums`, lane by lane.
    fn dot_bytes(self, sums: Self::I, codes: Self::Codes, signed: Self::Signed) -> Self::I;
    fn splat_for_nibbles(self, word: u32) -> Self::SignedForNibbles;
    /// As above: low halves with the first word, high halves with the second.
    fn dot_nibbles(
        self,
        sums: Self::I,
        nibbles: Self::Nibbles,
        signed: [Self::SignedForNibbles; 2],
    ) -> Self::I;
    /// As float32, rounded to nearest.
    fn to_float(self, x: Self::I) -> Self::F;
    /// `a * b + c`, rounded once on every instruction set.
    fn exact_fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// # Safety
    /// Sixteen words must be readable at `from`.
    unsafe fn load_codes(self, from: *const u32) -> Self::Codes;
    /// # Safety
    /// Sixteen words must be readable at `from`.
    unsafe fn load_nibbles(self, from: *const u32) -> Self::Nibbles;
    /// Sixteen float16 values.
    ///
    /// # Safety
    /// Eight words must be readable at `from`.
    unsafe fn load_halves(self, from: *const u32) -> Self::F;
    /// Store whole numbers in -127..=127 as bytes; what they become otherwise is unspecified.
    ///
    /// # Safety
    /// Four words must be writable at `to`.
    unsafe fn store_signed(self, to: *mut u32, x: Self::F);
}
