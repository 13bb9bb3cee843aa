//! A model's weights by number, in the order in which they were added.

use std::sync::Arc;

use crate::error::CpuError;
use crate::isa::Isa;
use crate::kernels::Kernels;
use crate::memory::Slabs;
use crate::packed_linear::{PackedLinear, Storage};
use crate::pool::ThreadPool;
use crate::weights::{Element, Embedding, Norm, Rotary, Sinks, Table, floats};

/// Weights of one model, and the threads and kernels that compute with them.
///
/// Weights may be loaded at any time. They start as zeros; those stored in blocks must be loaded once
/// before a program is made of them.
pub struct Weights {
    pub(crate) pool: ThreadPool,
    pub(crate) kernels: Kernels,
    slabs: Arc<Slabs>,
    storage: Storage,
    pub(crate) embeddings: Vec<Embedding>,
    pub(crate) norms: Vec<Norm>,
    pub(crate) linears: Vec<PackedLinear>,
    pub(crate) rotaries: Vec<Rotary>,
    pub(crate) sinks: Vec<Sinks>,
}

impl Weights {
    /// No weights yet.
    ///
    /// # Panics
    /// If the processor lacks the instruction set.
    pub fn new(isa: Isa, element: Element, storage: Storage, num_threads: usize) -> Weights {
        Weights {
            pool: ThreadPool::new(num_threads),
            kernels: Kernels::new(isa, element),
            slabs: Arc::new(Slabs::new()),
            storage,
            embeddings: Vec::new(),
            norms: Vec::new(),
            linears: Vec::new(),
            rotaries: Vec::new(),
            sinks: Vec::new(),
        }
    }

    /// What the kernels are compiled for.
    pub fn isa(&self) -> Isa {
        self.kernels.isa
    }

    /// Threads that compute, the caller's included.
    pub fn num_threads(&self) -> usize {
        self.pool.num_threads()
    }

    /// Add a token embedding whose rows are multiplied by `scale` when they are looked up; its number.
    /// Stored in blocks, it is the weight of a linear.
    pub fn add_embedding(&mut self, num_rows: usize, width: usize, scale: f32) -> usize {
        let element = self.kernels.element;
        let embedding = match self.storage {
            Storage::Dense => Embedding::new(&self.slabs, element, (num_rows, width), scale),
            Storage::Blocks => {
                let linear = self.add_linear(width, &[num_rows], false);
                Embedding { num_rows, width, scale, table: Table::Linear(linear) }
            }
        };
        self.embeddings.push(embedding);
        self.embeddings.len() - 1
    }

    /// Add an RMS norm, which multiplies by its weight plus `offset`; its number.
    pub fn add_norm(&mut self, width: usize, epsilon: f32, offset: f32) -> usize {
        self.norms.push(Norm::new(self.kernels.element, width, epsilon, offset));
        self.norms.len() - 1
    }

    /// Add a linear whose parts have these many outputs; its number.
    pub fn add_linear(&mut self, in_features: usize, parts: &[usize], has_bias: bool) -> usize {
        let form = (self.kernels.element, self.storage);
        self.linears.push(PackedLinear::new(&self.slabs, form, in_features, parts, has_bias));
        self.linears.len() - 1
    }

    /// Add attention sinks, one per head; their number.
    pub fn add_sinks(&mut self, num_heads: usize) -> usize {
        self.sinks.push(Sinks::new(self.kernels.element, num_heads));
        self.sinks.len() - 1
    }

    /// Add tables of cos and sin, `[positions, half]` float32, little-endian; their number.
    ///
    /// # Errors
    /// The tables do not fit each other.
    pub fn add_rotary(&mut self, half: usize, cos: &[u8], sin: &[u8]) -> Result<usize, CpuError> {
        self.rotaries.push(Rotary::new(half, floats(cos), floats(sin))?);
        Ok(self.rotaries.len() - 1)
    }

    /// An embedding, to be loaded or measured.
    ///
    /// # Errors
    /// There is none of this number.
    pub fn embedding(&mut self, index: usize) -> Result<&mut Embedding, CpuError> {
        self.embeddings.get_mut(index).ok_or_else(|| missing("embedding", index))
    }

    /// A norm, to be loaded or measured.
    ///
    /// # Errors
    /// There is none of this number.
    pub fn norm(&mut self, index: usize) -> Result<&mut Norm, CpuError> {
        self.norms.get_mut(index).ok_or_else(|| missing("norm", index))
    }

    /// Sinks, to be loaded or measured.
    ///
    /// # Errors
    /// There are none of this number.
    pub fn sinks(&mut self, index: usize) -> Result<&mut Sinks, CpuError> {
        self.sinks.get_mut(index).ok_or_else(|| missing("sinks", index))
    }

    /// A linear, to be loaded or measured.
    ///
    /// # Errors
    /// There is none of this number.
    pub fn linear(&mut self, index: usize) -> Result<&mut PackedLinear, CpuError> {
        self.linears.get_mut(index).ok_or_else(|| missing("linear", index))
    }
}

pub(crate) fn missing(what: &str, index: usize) -> CpuError {
    CpuError::invalid(format!("there is no {what} {index}"))
}
