//! Philox4x32-10, and the Gumbel noise that it gives every (seed, position, token id).
//!
//! Key = the seed's 64 bits, counter = (token id / 4, position, 0, 0), lane = token id % 4.

const MULTIPLIERS: [u32; 2] = [0xd251_1f53, 0xcd9e_8d57];
const WEYL: [u32; 2] = [0x9e37_79b9, 0xbb67_ae85];
const ROUNDS: usize = 10;
/// Largest noise there is, rounded up: `25 ln 2`.
pub(crate) const MAX_NOISE: f32 = 17.33;

/// What the noise of a draw depends on, besides the id.
#[derive(Clone, Copy)]
pub(crate) struct Noise {
    pub(crate) seed: u64,
    pub(crate) position: u32,
}

impl Noise {
    /// Noise of an id.
    pub(crate) fn of(self, id: u32) -> f32 {
        let words = philox::<1>(id / 4, self.position, self.seed);
        gumbel(words[(id % 4) as usize][0])
    }
}

/// Four words per block, `[word][block]`, of consecutive blocks from `first` on.
#[inline(always)]
pub(crate) fn philox<const BLOCKS: usize>(
    first: u32,
    position: u32,
    seed: u64,
) -> [[u32; BLOCKS]; 4] {
    let mut c = [[0_u32; BLOCKS]; 4];
    for block in 0..BLOCKS {
        c[0][block] = first.wrapping_add(block as u32);
        c[1][block] = position;
    }
    let mut key = [seed as u32, (seed >> 32) as u32];
    for _ in 0..ROUNDS {
        for block in 0..BLOCKS {
            let a = u64::from(c[0][block]) * u64::from(MULTIPLIERS[0]);
            let b = u64::from(c[2][block]) * u64::from(MULTIPLIERS[1]);
            c[0][block] = (b >> 32) as u32 ^ c[1][block] ^ key[0];
            c[2][block] = (a >> 32) as u32 ^ c[3][block] ^ key[1];
            c[1][block] = b as u32;
            c[3][block] = a as u32;
        }
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    c
}

/// Noise of a word: `-ln(-ln u)`, `u = (word / 256 + 0.5) / 2^24`.
pub(crate) fn gumbel(word: u32) -> f32 {
    let uniform = (f64::from(word >> 8) + 0.5) * 2_f64.powi(-24);
    -(-uniform.ln()).ln() as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_answers() {
        // From the generator's published test vectors: counter and key all zero, all ones.
        let zero = philox::<16>(0, 0, 0);
        let words: Vec<u32> = zero.iter().map(|word| word[0]).collect();
        assert_eq!(words, [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
    }

    #[test]
    fn noise_is_finite_at_both_ends() {
        assert!((gumbel(0) + 2.852).abs() < 1e-2);
        assert!((gumbel(u32::MAX) - 17.33).abs() < 1e-2);
    }
}
