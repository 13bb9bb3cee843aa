//! SIMD kernels for the CPU backend: packed linears, paged attention, norms, sampling.
//!
//! It executes a recorded program of operations on a plan block. It knows no Python and no model.

mod attention_step;
mod blocks;
mod error;
mod isa;
mod kernels;
mod kv;
pub mod measure;
mod memory;
mod model;
mod packed_linear;
mod plan;
mod pool;
mod populate;
mod program;
mod recording;
mod sample_step;
mod sampling;
mod schedule;
mod session;
mod simd;
#[cfg(test)]
mod testing;
mod weights;

pub use blocks::BlockKind;
pub use error::CpuError;
pub use isa::Isa;
pub use kv::{KvSpec, MAX_HEAD_DIM};
pub use model::Weights;
pub use packed_linear::{PackedLinear, Storage};
pub use pool::ThreadPool;
pub use populate::Population;
pub use recording::{Record, Recording};
pub use session::{Session, SessionSizes};
pub use weights::{Element, Embedding, Norm, Rotary, Sinks, Source};
