//! AVX-512: one register per vector, bfloat16 pairs multiplied by one instruction.

#![cfg(target_arch = "x86_64")]

use std::arch::x86_64::{
    __m256bh, __m256i, __m512, __m512bh, __m512i, _CMP_LT_OQ, _MM_HINT_T0, _MM_HINT_T1,
    _mm_prefetch, _mm_storeu_si128, _mm256_loadu_si256, _mm256_storeu_si256, _mm512_add_epi32,
    _mm512_add_ps, _mm512_and_si512, _mm512_castsi512_ps, _mm512_cmp_ps_mask, _mm512_cvtepi32_ps,
    _mm512_cvtepu16_epi32, _mm512_cvtneps_pbh, _mm512_cvtph_ps, _mm512_cvtps_epi32,
    _mm512_cvtsepi32_epi8, _mm512_div_ps, _mm512_dpbf16_ps, _mm512_dpbusd_epi32, _mm512_fmadd_ps,
    _mm512_loadu_ps, _mm512_loadu_si512, _mm512_mask_blend_ps, _mm512_max_ps, _mm512_min_ps,
    _mm512_mul_ps, _mm512_reduce_add_ps, _mm512_reduce_max_ps, _mm512_roundscale_ps,
    _mm512_scalef_ps, _mm512_set1_epi32, _mm512_set1_ps, _mm512_slli_epi32, _mm512_srli_epi32,
    _mm512_storeu_ps, _mm512_sub_ps,
};

use super::{Bytes, Kernel, Simd};

/// Sixteen lanes in one register.
#[derive(Clone, Copy)]
pub(crate) struct Avx512(());

impl Avx512 {
    /// # Safety
    /// The processor must have `Isa::Avx512Bf16`.
    #[inline(always)]
    pub(crate) unsafe fn assume() -> Avx512 {
        Avx512(())
    }
}

// SAFETY of all blocks below: a value of the type exists only where `assume` was sound; pointers
// are the caller's promise, as the trait says, and the unaligned forms need no alignment.
macro_rules! op {
    ($call:expr) => {{
        // SAFETY: see above.
        unsafe { $call }
    }};
}

impl Simd for Avx512 {
    type F = __m512;

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        op!(_mm512_set1_ps(x))
    }
    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_div_ps(a, b))
    }
    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        op!(_mm512_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_max_ps(a, b))
    }
    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_min_ps(a, b))
    }
    #[inline(always)]
    fn round(self, a: __m512) -> __m512 {
        op!(_mm512_roundscale_ps::<0>(a))
    }
    #[inline(always)]
    fn power_of_two(self, n: __m512) -> __m512 {
        op!({
            let biased = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased))
        })
    }
    #[inline(always)]
    fn scale_by_power(self, a: __m512, n: __m512) -> __m512 {
        op!(_mm512_scalef_ps(a, n))
    }
    #[inline(always)]
    fn select(self, bits: u16, kept: __m512, other: __m512) -> __m512 {
        op!(_mm512_mask_blend_ps(bits, other, kept))
    }
    #[inline(always)]
    fn less(self, a: __m512, b: __m512) -> u16 {
        op!(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b))
    }
    #[inline(always)]
    fn sum(self, a: __m512) -> f32 {
        op!(_mm512_reduce_add_ps(a))
    }
    #[inline(always)]
    fn highest(self, a: __m512) -> f32 {
        op!(_mm512_reduce_max_ps(a))
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> __m512 {
        op!(_mm512_loadu_ps(from))
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, x: __m512) {
        op!(_mm512_storeu_ps(to, x));
    }
}

/// float32 elements.
impl Kernel for Avx512 {
    type S = Avx512;
    type W = __m512;
    const PER_WORD: usize = 1;
    const TILE_VECTORS: usize = 4;

    #[inline(always)]
    fn simd(self) -> Avx512 {
        self
    }
    #[inline(always)]
    fn prefetch(self, from: *const u32) {
        op!(_mm_prefetch::<_MM_HINT_T1>(from.cast()));
    }
    #[inline(always)]
    fn prefetch_near(self, from: *const u32) {
        op!(_mm_prefetch::<_MM_HINT_T0>(from.cast()));
    }
    #[inline(always)]
    fn splat_word(self, word: u32) -> __m512 {
        op!(_mm512_castsi512_ps(_mm512_set1_epi32(word as i32)))
    }
    #[inline(always)]
    fn dot(self, sums: __m512, a: __m512, b: __m512) -> __m512 {
        self.fma(a, b, sums)
    }
    #[inline(always)]
    unsafe fn load_words(self, from: *const u32) -> __m512 {
        op!(_mm512_loadu_ps(from.cast()))
    }
    #[inline(always)]
    unsafe fn load_elements(self, from: *const u32) -> __m512 {
        op!(_mm512_loadu_ps(from.cast()))
    }
    #[inline(always)]
    unsafe fn store_elements(self, to: *mut u32, x: __m512) {
        op!(_mm512_storeu_ps(to.cast(), x));
    }
}

impl Bytes for Avx512 {
    type I = __m512i;
    type Codes = __m512i;
    type Signed = __m512i;
    type Nibbles = [__m512i; 2];
    type SignedForNibbles = __m512i;

    #[inline(always)]
    fn splat_int(self, x: i32) -> __m512i {
        op!(_mm512_set1_epi32(x))
    }
    #[inline(always)]
    fn splat_signed(self, word: u32) -> __m512i {
        op!(_mm512_set1_epi32(word as i32))
    }
    #[inline(always)]
    fn dot_bytes(self, sums: __m512i, codes: __m512i, signed: __m512i) -> __m512i {
        op!(_mm512_dpbusd_epi32(sums, codes, signed))
    }
    #[inline(always)]
    fn splat_for_nibbles(self, word: u32) -> __m512i {
        self.splat_signed(word)
    }
    #[inline(always)]
    fn dot_nibbles(self, sums: __m512i, nibbles: [__m512i; 2], signed: [__m512i; 2]) -> __m512i {
        self.dot_bytes(self.dot_bytes(sums, nibbles[0], signed[0]), nibbles[1], signed[1])
    }
    #[inline(always)]
    fn to_float(self, x: __m512i) -> __m512 {
        op!(_mm512_cvtepi32_ps(x))
    }
    #[inline(always)]
    fn exact_fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        self.fma(a, b, c)
    }
    #[inline(always)]
    unsafe fn load_codes(self, from: *const u32) -> __m512i {
        op!(_mm512_loadu_si512(from.cast()))
    }
    #[inline(always)]
    unsafe fn load_nibbles(self, from: *const u32) -> [__m512i; 2] {
        op!({
            let mask = _mm512_set1_epi32(0x0f0f_0f0f);
            let both = _mm512_loadu_si512(from.cast());
            [_mm512_and_si512(both, mask), _mm512_and_si512(_mm512_srli_epi32::<4>(both), mask)]
        })
    }
    #[inline(always)]
    unsafe fn load_halves(self, from: *const u32) -> __m512 {
        op!(_mm512_cvtph_ps(_mm256_loadu_si256(from.cast())))
    }
    #[inline(always)]
    unsafe fn store_signed(self, to: *mut u32, x: __m512) {
        op!(_mm_storeu_si128(to.cast(), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x))));
    }
}

/// bfloat16 elements.
#[derive(Clone, Copy)]
pub(crate) struct Avx512Bf16(Avx512);

impl Avx512Bf16 {
    /// # Safety
    /// The processor must have `Isa::Avx512Bf16`.
    #[inline(always)]
    pub(crate) unsafe fn assume() -> Avx512Bf16 {
        Avx512Bf16(Avx512(()))
    }
}

impl Kernel for Avx512Bf16 {
    type S = Avx512;
    type W = __m512i;
    const PER_WORD: usize = 2;
    const TILE_VECTORS: usize = 4;

    #[inline(always)]
    fn simd(self) -> Avx512 {
        self.0
    }
    #[inline(always)]
    fn prefetch(self, from: *const u32) {
        op!(_mm_prefetch::<_MM_HINT_T1>(from.cast()));
    }
    #[inline(always)]
    fn prefetch_near(self, from: *const u32) {
        op!(_mm_prefetch::<_MM_HINT_T0>(from.cast()));
    }
    #[inline(always)]
    fn splat_word(self, word: u32) -> __m512i {
        op!(_mm512_set1_epi32(word as i32))
    }
    #[inline(always)]
    fn dot(self, sums: __m512, a: __m512i, b: __m512i) -> __m512 {
        op!({
            let a = std::mem::transmute::<__m512i, __m512bh>(a);
            let b = std::mem::transmute::<__m512i, __m512bh>(b);
            _mm512_dpbf16_ps(sums, a, b)
        })
    }
    #[inline(always)]
    unsafe fn load_words(self, from: *const u32) -> __m512i {
        op!(_mm512_loadu_si512(from.cast()))
    }
    #[inline(always)]
    unsafe fn load_elements(self, from: *const u32) -> __m512 {
        op!({
            let elements = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(elements))
        })
    }
    #[inline(always)]
    unsafe fn store_elements(self, to: *mut u32, x: __m512) {
        op!({
            let elements = std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(x));
            _mm256_storeu_si256(to.cast(), elements);
        });
    }
}
