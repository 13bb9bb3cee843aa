//! Measurements for the benchmarks: how fast memory streams, how fast linears run.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use crate::blocks::BlockKind;
use crate::error::CpuError;
use crate::isa::Isa;
use crate::kernels::Kernels;
use crate::kernels::linear::Epilogue;
use crate::kernels::quantise::{QuantiseTask, quantised_words};
use crate::memory::{Region, Slabs};
use crate::packed_linear::{PackedLinear, Storage};
use crate::pool::ThreadPool;
use crate::schedule::{run_linear, run_quantise};
use crate::weights::Element;

/// Sizes of one linear: output and input features.
pub type Shape = (usize, usize);

/// Linears of a model, one after another, on operands of their own.
pub struct LinearBench {
    pool: ThreadPool,
    kernels: Kernels,
    weights: Vec<PackedLinear>,
    input: Region,
    quantised: Region,
    output: Region,
}

impl LinearBench {
    /// Allocate weights of these shapes, of elements or of blocks.
    ///
    /// # Errors
    /// A shape has no whole blocks.
    ///
    /// # Panics
    /// If the processor lacks the instruction set.
    pub fn new(
        isa: Isa,
        (element, blocks): (Element, Option<BlockKind>),
        num_threads: usize,
        shapes: &[Shape],
    ) -> Result<LinearBench, CpuError> {
        let slabs = Arc::new(Slabs::new());
        let storage = if blocks.is_some() { Storage::Blocks } else { Storage::Dense };
        let mut weights = Vec::new();
        for &(outputs, inputs) in shapes {
            let form = (element, storage);
            let mut weight = PackedLinear::new(&slabs, form, inputs, &[outputs], false);
            if let Some(kind) = blocks {
                let (elements, bytes) = kind.stored_block();
                weight.load_blocks(0, kind, &vec![0; outputs * (inputs / elements) * bytes])?;
            }
            weight.fill(0x3c00_3c00);
            weights.push(weight);
        }
        Ok(LinearBench {
            pool: ThreadPool::new(num_threads),
            kernels: Kernels::new(isa, element),
            weights,
            input: Region::new(0),
            quantised: Region::new(0),
            output: Region::new(0),
        })
    }

    /// Bytes of all weights.
    pub fn num_bytes(&self) -> usize {
        self.weights.iter().map(PackedLinear::num_bytes).sum()
    }

    /// Seconds to compute every linear once on `num_rows` rows, which are quantised if need be.
    pub fn linears(&mut self, num_rows: usize) -> f64 {
        let widest = self.weights.iter().map(|w| w.in_features.next_multiple_of(16)).max();
        let widest = widest.unwrap_or(16);
        let input_stride = widest / self.kernels.element.per_word();
        let output_stride = self.weights.iter().map(|w| w.out_features).max().unwrap_or(1);
        if self.input.len() < num_rows * input_stride {
            self.input = Region::new(num_rows * input_stride);
            self.input.as_mut_slice().fill(0x3c00_3c00);
            self.quantised = Region::new(num_rows * quantised_words(widest));
            self.output = Region::new(num_rows * output_stride);
        }
        let dense = self.input.rows(input_stride);
        let quantised = self.quantised.rows(quantised_words(widest));
        let epilogue = Epilogue::Store(self.output.rows(output_stride));
        let start = Instant::now();
        for weight in &self.weights {
            let (rows, width) = (0..num_rows, weight.in_features);
            let input = match weight.storage {
                Storage::Dense => dense,
                Storage::Blocks => {
                    let task = QuantiseTask { input: dense, output: quantised, rows, width };
                    run_quantise(&self.pool, self.kernels, &task);
                    quantised
                }
            };
            run_linear(&self.pool, self.kernels, weight, (input, epilogue), 0..num_rows);
        }
        start.elapsed().as_secs_f64()
    }

    /// Seconds to read every weight once, in chunks as the linears do.
    pub fn streaming_read(&self) -> f64 {
        const CHUNK_WORDS: usize = 1 << 16;
        let start = Instant::now();
        for weight in &self.weights {
            let chunks: Vec<&[u32]> =
                weight.streams().flat_map(|stream| stream.chunks(CHUNK_WORDS)).collect();
            self.pool.run(chunks.len(), |task, _| {
                black_box(self.kernels.checksum(chunks[task]));
            });
        }
        start.elapsed().as_secs_f64()
    }
}
