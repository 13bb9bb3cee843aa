//! What the unit tests share.

use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::isa::Isa;
use crate::kernels::Kernels;
use crate::memory::{Region, Rows};
use crate::simd::bf16_from_f32;
use crate::weights::Element;

pub(crate) struct Random(ChaCha8Rng);

impl Random {
    pub(crate) fn new(seed: u64) -> Random {
        Random(ChaCha8Rng::seed_from_u64(seed))
    }

    pub(crate) fn uniform(&mut self) -> f32 {
        self.0.random::<f32>()
    }

    pub(crate) fn normal(&mut self) -> f32 {
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        radius * (std::f32::consts::TAU * self.uniform()).cos()
    }

    pub(crate) fn below(&mut self, limit: usize) -> usize {
        (self.0.next_u64() % limit as u64) as usize
    }
}

pub(crate) fn bf16(x: f32) -> f32 {
    f32::from_bits(u32::from(bf16_from_f32(x)) << 16)
}

pub(crate) fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// The kernels that this processor can run; those that it cannot are named on stderr.
pub(crate) fn every_kernel() -> Vec<Kernels> {
    let (available, missing): (Vec<Isa>, Vec<Isa>) =
        Isa::ALL.into_iter().partition(|isa| isa.is_available());
    for isa in missing {
        eprintln!("NOT RUN: this processor does not have {isa}");
    }
    available
        .into_iter()
        .flat_map(|isa| [Element::Bf16, Element::F32].map(|element| Kernels::new(isa, element)))
        .collect()
}

/// Rows of a region without its first and last row, which stay as canaries.
pub(crate) fn inner_rows(region: &mut Region, stride: usize, num_rows: usize) -> Rows<f32> {
    assert_eq!(region.len(), (num_rows + 2) * stride);
    region.rows::<f32>(stride).sub_rows(1, num_rows)
}
