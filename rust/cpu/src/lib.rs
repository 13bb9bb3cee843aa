//! SIMD kernels for the CPU backend: packed linears, paged attention, norms, sampling.
//!
//! It executes a recorded program of operations on a plan block. It knows no Python and no model.

mod error;
mod isa;
mod kernels;
mod memory;
mod pool;
mod simd;
#[cfg(test)]
mod testing;
mod weights;

pub use error::CpuError;
pub use isa::Isa;
pub use pool::ThreadPool;
pub use weights::{Element, Embedding, Norm, PackedLinear, Rotary, Source};
