//! Plain Rust: what the other instruction sets are compared with.

use half::f16;

use super::{Bytes, Kernel, LANES, Simd};

/// Sixteen lanes in an array.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

impl Portable {
    /// # Safety
    /// None; other kernels need instructions.
    #[inline(always)]
    pub(crate) unsafe fn assume() -> Portable {
        Portable
    }
}

macro_rules! lanes {
    ($index:ident => $value:expr) => {{
        let mut result = [0.0_f32; LANES];
        for $index in 0..LANES {
            result[$index] = $value;
        }
        result
    }};
}

impl Simd for Portable {
    type F = [f32; LANES];

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        [x; LANES]
    }
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        lanes!(i => a[i] + b[i])
    }
    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        lanes!(i => a[i] - b[i])
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        lanes!(i => a[i] * b[i])
    }
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        lanes!(i => a[i] / b[i])
    }
    // Without the instruction `mul_add` is a library call; two roundings are precise enough.
    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        lanes!(i => a[i] * b[i] + c[i])
    }
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        lanes!(i => if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        lanes!(i => if a[i] < b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn round(self, a: Self::F) -> Self::F {
        // Adding 1.5 * 2^23 leaves no fraction bits.
        const MAGIC: f32 = 12_582_912.0;
        lanes!(i => if a[i].abs() < 4_194_304.0 { (a[i] + MAGIC) - MAGIC } else { a[i] })
    }
    #[inline(always)]
    fn power_of_two(self, n: Self::F) -> Self::F {
        lanes!(i => f32::from_bits(((n[i] as i32 + 127) as u32) << 23))
    }
    #[inline(always)]
    fn scale_by_power(self, a: Self::F, n: Self::F) -> Self::F {
        self.mul(a, self.power_of_two(self.max(self.splat(-127.0), n)))
    }
    #[inline(always)]
    fn select(self, bits: u16, kept: Self::F, other: Self::F) -> Self::F {
        lanes!(i => if bits >> i & 1 == 1 { kept[i] } else { other[i] })
    }
    #[inline(always)]
    fn less(self, a: Self::F, b: Self::F) -> u16 {
        let mut bits = 0;
        for i in 0..LANES {
            bits |= u16::from(a[i] < b[i]) << i;
        }
        bits
    }
    #[inline(always)]
    fn sum(self, a: Self::F) -> f32 {
        let mut sum = 0.0;
        for lane in a {
            sum += lane;
        }
        sum
    }
    #[inline(always)]
    fn highest(self, a: Self::F) -> f32 {
        let mut highest = a[0];
        for lane in a {
            highest = if lane > highest { lane } else { highest };
        }
        highest
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> Self::F {
        // SAFETY: the caller vouches for sixteen values; the read needs no alignment.
        unsafe { from.cast::<Self::F>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, x: Self::F) {
        // SAFETY: the caller vouches for sixteen values; the write needs no alignment.
        unsafe { to.cast::<Self::F>().write_unaligned(x) };
    }
}

/// float32 elements.
impl Kernel for Portable {
    type S = Portable;
    type W = [f32; LANES];
    const PER_WORD: usize = 1;
    const TILE_VECTORS: usize = 1;

    #[inline(always)]
    fn simd(self) -> Portable {
        self
    }
    #[inline(always)]
    fn prefetch(self, _from: *const u32) {}
    #[inline(always)]
    fn splat_word(self, word: u32) -> Self::W {
        [f32::from_bits(word); LANES]
    }
    #[inline(always)]
    fn dot(self, sums: [f32; LANES], a: Self::W, b: Self::W) -> [f32; LANES] {
        self.fma(a, b, sums)
    }
    #[inline(always)]
    unsafe fn load_words(self, from: *const u32) -> Self::W {
        // SAFETY: sixteen words are sixteen values.
        unsafe { self.load(from.cast()) }
    }
    #[inline(always)]
    unsafe fn load_elements(self, from: *const u32) -> [f32; LANES] {
        // SAFETY: as the caller's.
        unsafe { self.load(from.cast()) }
    }
    #[inline(always)]
    unsafe fn store_elements(self, to: *mut u32, x: [f32; LANES]) {
        // SAFETY: as the caller's.
        unsafe { self.store(to.cast(), x) };
    }
}

impl Bytes for Portable {
    type I = [i32; LANES];
    type Codes = [u32; LANES];
    type Signed = u32;
    type Nibbles = [[u32; LANES]; 2];
    type SignedForNibbles = u32;

    #[inline(always)]
    fn splat_int(self, x: i32) -> [i32; LANES] {
        [x; LANES]
    }
    #[inline(always)]
    fn splat_signed(self, word: u32) -> u32 {
        word
    }
    #[inline(always)]
    fn dot_bytes(self, sums: [i32; LANES], codes: [u32; LANES], signed: u32) -> [i32; LANES] {
        let mut result = sums;
        for byte in 0..4 {
            let signed = i32::from((signed >> (8 * byte)) as i8);
            for lane in 0..LANES {
                result[lane] += (codes[lane] >> (8 * byte) & 255) as i32 * signed;
            }
        }
        result
    }
    #[inline(always)]
    fn splat_for_nibbles(self, word: u32) -> u32 {
        word
    }
    #[inline(always)]
    fn dot_nibbles(
        self,
        sums: [i32; LANES],
        nibbles: [[u32; LANES]; 2],
        signed: [u32; 2],
    ) -> [i32; LANES] {
        self.dot_bytes(self.dot_bytes(sums, nibbles[0], signed[0]), nibbles[1], signed[1])
    }
    #[inline(always)]
    fn to_float(self, x: [i32; LANES]) -> [f32; LANES] {
        lanes!(i => x[i] as f32)
    }
    #[inline(always)]
    fn exact_fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        lanes!(i => a[i].mul_add(b[i], c[i]))
    }
    #[inline(always)]
    unsafe fn load_codes(self, from: *const u32) -> [u32; LANES] {
        // SAFETY: the caller vouches for sixteen words; the read needs no alignment.
        unsafe { from.cast::<[u32; LANES]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn load_nibbles(self, from: *const u32) -> [[u32; LANES]; 2] {
        // SAFETY: as the caller's.
        let both = unsafe { self.load_codes(from) };
        [both.map(|codes| codes & 0x0f0f_0f0f), both.map(|codes| codes >> 4 & 0x0f0f_0f0f)]
    }
    #[inline(always)]
    unsafe fn load_halves(self, from: *const u32) -> [f32; LANES] {
        // SAFETY: the caller vouches for eight words; the read needs no alignment.
        let bits = unsafe { from.cast::<[u16; LANES]>().read_unaligned() };
        bits.map(|bits| f16::from_bits(bits).to_f32())
    }
    #[inline(always)]
    unsafe fn store_signed(self, to: *mut u32, x: [f32; LANES]) {
        // SAFETY: the caller vouches for four words; the write needs no alignment.
        unsafe { to.cast::<[i8; LANES]>().write_unaligned(x.map(|x| x as i8)) };
    }
}

/// bfloat16 elements.
#[derive(Clone, Copy)]
pub(crate) struct PortableBf16;

impl PortableBf16 {
    /// # Safety
    /// None; other kernels need instructions.
    #[inline(always)]
    pub(crate) unsafe fn assume() -> PortableBf16 {
        PortableBf16
    }
}

impl Kernel for PortableBf16 {
    type S = Portable;
    type W = [u32; LANES];
    const PER_WORD: usize = 2;
    const TILE_VECTORS: usize = 1;

    #[inline(always)]
    fn simd(self) -> Portable {
        Portable
    }
    #[inline(always)]
    fn prefetch(self, _from: *const u32) {}
    #[inline(always)]
    fn splat_word(self, word: u32) -> Self::W {
        [word; LANES]
    }
    #[inline(always)]
    fn dot(self, sums: [f32; LANES], a: Self::W, b: Self::W) -> [f32; LANES] {
        lanes!(i => {
            let low = sums[i] + f32::from_bits(a[i] << 16) * f32::from_bits(b[i] << 16);
            low + f32::from_bits(a[i] & 0xffff_0000) * f32::from_bits(b[i] & 0xffff_0000)
        })
    }
    #[inline(always)]
    unsafe fn load_words(self, from: *const u32) -> Self::W {
        // SAFETY: the caller vouches for sixteen words.
        unsafe { from.cast::<Self::W>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn load_elements(self, from: *const u32) -> [f32; LANES] {
        // SAFETY: the caller vouches for sixteen elements of two bytes.
        let elements = unsafe { from.cast::<[u16; LANES]>().read_unaligned() };
        lanes!(i => f32::from_bits(u32::from(elements[i]) << 16))
    }
    #[inline(always)]
    unsafe fn store_elements(self, to: *mut u32, x: [f32; LANES]) {
        let mut elements = [0_u16; LANES];
        for i in 0..LANES {
            elements[i] = bf16_from_f32(x[i]);
        }
        // SAFETY: the caller vouches for sixteen elements of two bytes.
        unsafe { to.cast::<[u16; LANES]>().write_unaligned(elements) };
    }
}

/// Round to bfloat16, ties to even; NaN stays NaN.
#[inline(always)]
pub(crate) fn bf16_from_f32(x: f32) -> u16 {
    let bits = x.to_bits();
    if x.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}
