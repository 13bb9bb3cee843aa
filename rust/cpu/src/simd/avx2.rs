//! AVX2 and FMA: two registers per vector, bfloat16 pairs widened to two float32 vectors.

#![cfg(target_arch = "x86_64")]

use std::arch::x86_64::{
    __m256, __m256i, _CMP_LT_OQ, _CMP_UNORD_Q, _MM_FROUND_NO_EXC, _MM_FROUND_TO_NEAREST_INT,
    _MM_HINT_T1, _mm_add_ps, _mm_loadu_si128, _mm_max_ps, _mm_packs_epi16, _mm_prefetch,
    _mm_storeu_si128, _mm256_add_epi16, _mm256_add_epi32, _mm256_add_ps, _mm256_and_si256,
    _mm256_blendv_ps, _mm256_castps_si256, _mm256_castps256_ps128, _mm256_castsi256_ps,
    _mm256_castsi256_si128, _mm256_cmp_ps, _mm256_cmpeq_epi32, _mm256_cvtepi32_ps,
    _mm256_cvtepu16_epi32, _mm256_cvtph_ps, _mm256_cvtps_epi32, _mm256_div_ps,
    _mm256_extractf128_ps, _mm256_extracti128_si256, _mm256_fmadd_ps, _mm256_loadu_ps,
    _mm256_loadu_si256, _mm256_madd_epi16, _mm256_maddubs_epi16, _mm256_max_ps, _mm256_min_ps,
    _mm256_movemask_ps, _mm256_mul_ps, _mm256_or_si256, _mm256_packs_epi32, _mm256_packus_epi32,
    _mm256_permute4x64_epi64, _mm256_round_ps, _mm256_set1_epi8, _mm256_set1_epi16,
    _mm256_set1_epi32, _mm256_set1_ps, _mm256_setr_epi32, _mm256_slli_epi16, _mm256_slli_epi32,
    _mm256_srai_epi16, _mm256_srli_epi16, _mm256_srli_epi32, _mm256_storeu_ps, _mm256_sub_ps,
};

use super::{Bytes, Kernel, Simd};

/// Sixteen lanes in two registers.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(());

impl Avx2 {
    /// # Safety
    /// The processor must have `Isa::Avx2`.
    #[inline(always)]
    pub(crate) unsafe fn assume() -> Avx2 {
        Avx2(())
    }
}

/// Two registers of eight lanes.
type Pair = [__m256; 2];

// SAFETY of all blocks below: a value of the type exists only where `assume` was sound; pointers
// are the caller's promise, as the trait says, and the unaligned forms need no alignment.
macro_rules! op {
    ($call:expr) => {{
        // SAFETY: see above.
        unsafe { $call }
    }};
}

impl Simd for Avx2 {
    type F = Pair;

    #[inline(always)]
    fn splat(self, x: f32) -> Pair {
        op!([_mm256_set1_ps(x); 2])
    }
    #[inline(always)]
    fn add(self, a: Pair, b: Pair) -> Pair {
        op!([_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn sub(self, a: Pair, b: Pair) -> Pair {
        op!([_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn mul(self, a: Pair, b: Pair) -> Pair {
        op!([_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn div(self, a: Pair, b: Pair) -> Pair {
        op!([_mm256_div_ps(a[0], b[0]), _mm256_div_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn fma(self, a: Pair, b: Pair, c: Pair) -> Pair {
        op!([_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])])
    }
    #[inline(always)]
    fn max(self, a: Pair, b: Pair) -> Pair {
        op!([_mm256_max_ps(a[0], b[0]), _mm256_max_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn min(self, a: Pair, b: Pair) -> Pair {
        op!([_mm256_min_ps(a[0], b[0]), _mm256_min_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn round(self, a: Pair) -> Pair {
        const MODE: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        op!([_mm256_round_ps::<MODE>(a[0]), _mm256_round_ps::<MODE>(a[1])])
    }
    #[inline(always)]
    fn power_of_two(self, n: Pair) -> Pair {
        op!({
            let bias = _mm256_set1_epi32(127);
            let low = _mm256_add_epi32(_mm256_cvtps_epi32(n[0]), bias);
            let high = _mm256_add_epi32(_mm256_cvtps_epi32(n[1]), bias);
            [
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(low)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(high)),
            ]
        })
    }
    #[inline(always)]
    fn scale_by_power(self, a: Pair, n: Pair) -> Pair {
        self.mul(a, self.power_of_two(self.max(self.splat(-127.0), n)))
    }
    #[inline(always)]
    fn select(self, bits: u16, kept: Pair, other: Pair) -> Pair {
        op!({
            let lanes = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
            let mut result = other;
            for (half, out) in result.iter_mut().enumerate() {
                let wanted = _mm256_set1_epi32(i32::from(bits >> (8 * half)));
                let mask = _mm256_cmpeq_epi32(_mm256_and_si256(wanted, lanes), lanes);
                *out = _mm256_blendv_ps(other[half], kept[half], _mm256_castsi256_ps(mask));
            }
            result
        })
    }
    #[inline(always)]
    fn less(self, a: Pair, b: Pair) -> u16 {
        op!({
            let low = _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(a[0], b[0]));
            let high = _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(a[1], b[1]));
            (low | high << 8) as u16
        })
    }
    #[inline(always)]
    fn sum(self, a: Pair) -> f32 {
        op!({
            let eight = _mm256_add_ps(a[0], a[1]);
            let high = _mm256_extractf128_ps::<1>(eight);
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), high);
            let lanes = std::mem::transmute::<std::arch::x86_64::__m128, [f32; 4]>(four);
            (lanes[0] + lanes[2]) + (lanes[1] + lanes[3])
        })
    }
    #[inline(always)]
    fn highest(self, a: Pair) -> f32 {
        op!({
            let eight = _mm256_max_ps(a[0], a[1]);
            let high = _mm256_extractf128_ps::<1>(eight);
            let four = _mm_max_ps(_mm256_castps256_ps128(eight), high);
            let lanes = std::mem::transmute::<std::arch::x86_64::__m128, [f32; 4]>(four);
            lanes[0].max(lanes[1]).max(lanes[2].max(lanes[3]))
        })
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> Pair {
        op!([_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))])
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, x: Pair) {
        op!({
            _mm256_storeu_ps(to, x[0]);
            _mm256_storeu_ps(to.add(8), x[1]);
        });
    }
}

/// float32 elements.
impl Kernel for Avx2 {
    type S = Avx2;
    type W = Pair;
    const PER_WORD: usize = 1;
    const TILE_VECTORS: usize = 1;

    #[inline(always)]
    fn simd(self) -> Avx2 {
        self
    }
    #[inline(always)]
    fn prefetch(self, from: *const u32) {
        op!(_mm_prefetch::<_MM_HINT_T1>(from.cast()));
    }
    #[inline(always)]
    fn splat_word(self, word: u32) -> Pair {
        self.splat(f32::from_bits(word))
    }
    #[inline(always)]
    fn dot(self, sums: Pair, a: Pair, b: Pair) -> Pair {
        self.fma(a, b, sums)
    }
    #[inline(always)]
    unsafe fn load_words(self, from: *const u32) -> Pair {
        op!(self.load(from.cast()))
    }
    #[inline(always)]
    unsafe fn load_elements(self, from: *const u32) -> Pair {
        op!(self.load(from.cast()))
    }
    #[inline(always)]
    unsafe fn store_elements(self, to: *mut u32, x: Pair) {
        op!(self.store(to.cast(), x));
    }
}

/// Codes widened to 16 bits: the even and the odd bytes of eight words, twice.
type Widened = [[__m256i; 2]; 2];

impl Bytes for Avx2 {
    type I = [__m256i; 2];
    // `maddubs` would saturate at the sum of two products of eight bits.
    type Codes = Widened;
    type Signed = [__m256i; 2];
    type Nibbles = [[__m256i; 2]; 2];
    type SignedForNibbles = __m256i;

    #[inline(always)]
    fn splat_int(self, x: i32) -> [__m256i; 2] {
        op!([_mm256_set1_epi32(x); 2])
    }
    #[inline(always)]
    fn splat_signed(self, word: u32) -> [__m256i; 2] {
        op!({
            let all = _mm256_set1_epi32(word as i32);
            [_mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(all)), _mm256_srai_epi16::<8>(all)]
        })
    }
    #[inline(always)]
    fn dot_bytes(self, sums: [__m256i; 2], codes: Widened, signed: [__m256i; 2]) -> [__m256i; 2] {
        op!({
            let mut result = sums;
            for (sums, codes) in result.iter_mut().zip(codes) {
                let even = _mm256_madd_epi16(codes[0], signed[0]);
                let odd = _mm256_madd_epi16(codes[1], signed[1]);
                *sums = _mm256_add_epi32(*sums, _mm256_add_epi32(even, odd));
            }
            result
        })
    }
    #[inline(always)]
    fn splat_for_nibbles(self, word: u32) -> __m256i {
        op!(_mm256_set1_epi32(word as i32))
    }
    #[inline(always)]
    fn dot_nibbles(
        self,
        sums: [__m256i; 2],
        nibbles: [[__m256i; 2]; 2],
        signed: [__m256i; 2],
    ) -> [__m256i; 2] {
        op!({
            let ones = _mm256_set1_epi16(1);
            let mut result = sums;
            for half in 0..2 {
                // Four products below 2^11 each: sixteen bits hold their sum.
                let low = _mm256_maddubs_epi16(nibbles[half][0], signed[0]);
                let high = _mm256_maddubs_epi16(nibbles[half][1], signed[1]);
                let pairs = _mm256_madd_epi16(_mm256_add_epi16(low, high), ones);
                result[half] = _mm256_add_epi32(result[half], pairs);
            }
            result
        })
    }
    #[inline(always)]
    fn to_float(self, x: [__m256i; 2]) -> Pair {
        op!([_mm256_cvtepi32_ps(x[0]), _mm256_cvtepi32_ps(x[1])])
    }
    #[inline(always)]
    fn exact_fma(self, a: Pair, b: Pair, c: Pair) -> Pair {
        self.fma(a, b, c)
    }
    #[inline(always)]
    unsafe fn load_codes(self, from: *const u32) -> Widened {
        op!({
            let low = _mm256_set1_epi16(0xff);
            let both = [_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(8).cast())];
            [
                [_mm256_and_si256(both[0], low), _mm256_srli_epi16::<8>(both[0])],
                [_mm256_and_si256(both[1], low), _mm256_srli_epi16::<8>(both[1])],
            ]
        })
    }
    #[inline(always)]
    unsafe fn load_nibbles(self, from: *const u32) -> [[__m256i; 2]; 2] {
        op!({
            let mask = _mm256_set1_epi8(15);
            let both = [_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(8).cast())];
            let mut result = [[mask; 2]; 2];
            for half in 0..2 {
                let high = _mm256_srli_epi16::<4>(both[half]);
                result[half] = [_mm256_and_si256(both[half], mask), _mm256_and_si256(high, mask)];
            }
            result
        })
    }
    #[inline(always)]
    unsafe fn load_halves(self, from: *const u32) -> Pair {
        op!({
            let second = from.add(4);
            [
                _mm256_cvtph_ps(_mm_loadu_si128(from.cast())),
                _mm256_cvtph_ps(_mm_loadu_si128(second.cast())),
            ]
        })
    }
    #[inline(always)]
    unsafe fn store_signed(self, to: *mut u32, x: Pair) {
        op!({
            let words = _mm256_packs_epi32(_mm256_cvtps_epi32(x[0]), _mm256_cvtps_epi32(x[1]));
            let ordered = _mm256_permute4x64_epi64::<0b11_01_10_00>(words);
            let low = _mm256_castsi256_si128(ordered);
            let high = _mm256_extracti128_si256::<1>(ordered);
            _mm_storeu_si128(to.cast(), _mm_packs_epi16(low, high));
        });
    }
}

/// bfloat16 elements.
#[derive(Clone, Copy)]
pub(crate) struct Avx2Bf16(Avx2);

impl Avx2Bf16 {
    /// # Safety
    /// The processor must have `Isa::Avx2`.
    #[inline(always)]
    pub(crate) unsafe fn assume() -> Avx2Bf16 {
        Avx2Bf16(Avx2(()))
    }
}

/// Round eight lanes to bfloat16 in the low half of each; NaN stays NaN.
#[inline(always)]
fn rounded(x: __m256) -> __m256i {
    op!({
        let bits = _mm256_castps_si256(x);
        let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        let half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
        let near = _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, half));
        let quiet = _mm256_or_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(0x40));
        let nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(x, x);
        _mm256_castps_si256(_mm256_blendv_ps(
            _mm256_castsi256_ps(near),
            _mm256_castsi256_ps(quiet),
            nan,
        ))
    })
}

impl Kernel for Avx2Bf16 {
    type S = Avx2;
    /// The first and the second element of each word.
    type W = [Pair; 2];
    const PER_WORD: usize = 2;
    const TILE_VECTORS: usize = 1;

    #[inline(always)]
    fn simd(self) -> Avx2 {
        self.0
    }
    #[inline(always)]
    fn prefetch(self, from: *const u32) {
        op!(_mm_prefetch::<_MM_HINT_T1>(from.cast()));
    }
    #[inline(always)]
    fn splat_word(self, word: u32) -> [Pair; 2] {
        op!({
            let all = _mm256_set1_epi32(word as i32);
            let low = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(all));
            let mask = _mm256_set1_epi32(0xffff_0000_u32 as i32);
            let high = _mm256_castsi256_ps(_mm256_and_si256(all, mask));
            [[low; 2], [high; 2]]
        })
    }
    #[inline(always)]
    fn dot(self, sums: Pair, a: [Pair; 2], b: [Pair; 2]) -> Pair {
        self.0.fma(a[1], b[1], self.0.fma(a[0], b[0], sums))
    }
    #[inline(always)]
    unsafe fn load_words(self, from: *const u32) -> [Pair; 2] {
        op!({
            let mask = _mm256_set1_epi32(0xffff_0000_u32 as i32);
            let bits = [_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(8).cast())];
            let low = [
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits[0])),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits[1])),
            ];
            let high = [
                _mm256_castsi256_ps(_mm256_and_si256(bits[0], mask)),
                _mm256_castsi256_ps(_mm256_and_si256(bits[1], mask)),
            ];
            [low, high]
        })
    }
    #[inline(always)]
    unsafe fn load_elements(self, from: *const u32) -> Pair {
        op!({
            let from = from.cast::<u16>();
            let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.add(8).cast()));
            [
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
            ]
        })
    }
    #[inline(always)]
    unsafe fn store_elements(self, to: *mut u32, x: Pair) {
        op!({
            for (half, part) in x.into_iter().enumerate() {
                let wide = rounded(part);
                let packed = _mm256_permute4x64_epi64::<0b1000>(_mm256_packus_epi32(wide, wide));
                let to = to.cast::<u16>().add(8 * half);
                _mm_storeu_si128(to.cast(), _mm256_castsi256_si128(packed));
            }
        });
    }
}
