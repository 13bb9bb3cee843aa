//! Measurements for the benchmarks: how fast memory streams, how fast linears run.

use std::hint::black_box;
use std::time::Instant;

use crate::isa::Isa;
use crate::kernels::Kernels;
use crate::kernels::linear::Epilogue;
use crate::memory::{Region, Slabs};
use crate::pool::ThreadPool;
use crate::schedule::run_linear;
use crate::weights::{Element, PackedLinear};

/// Sizes of one linear: output and input features.
pub type Shape = (usize, usize);

/// Linears of a model, one after another, on operands of their own.
pub struct LinearBench {
    pool: ThreadPool,
    kernels: Kernels,
    weights: Vec<PackedLinear>,
    input: Region,
    output: Region,
}

impl LinearBench {
    /// Allocate weights of these shapes.
    ///
    /// # Panics
    /// If the processor lacks the instruction set.
    pub fn new(isa: Isa, element: Element, num_threads: usize, shapes: &[Shape]) -> LinearBench {
        let slabs = Slabs::new();
        let weights = shapes
            .iter()
            .map(|&(outputs, inputs)| {
                let mut weight = PackedLinear::new(&slabs, element, inputs, &[outputs], false);
                weight.fill(0x3c00_3c00);
                weight
            })
            .collect();
        LinearBench {
            pool: ThreadPool::new(num_threads),
            kernels: Kernels::new(isa, element),
            weights,
            input: Region::new(0),
            output: Region::new(0),
        }
    }

    /// Bytes of all weights.
    pub fn num_bytes(&self) -> usize {
        self.weights.iter().map(PackedLinear::num_bytes).sum()
    }

    /// Seconds to compute every linear once on `num_rows` rows.
    pub fn linears(&mut self, num_rows: usize) -> f64 {
        let widest = self.weights.iter().map(|w| w.in_features.next_multiple_of(16)).max();
        let input_stride = widest.unwrap_or(16) / self.kernels.element.per_word();
        let output_stride = self.weights.iter().map(|w| w.out_features).max().unwrap_or(1);
        if self.input.len() < num_rows * input_stride {
            self.input = Region::new(num_rows * input_stride);
            self.input.as_mut_slice().fill(0x3c00_3c00);
            self.output = Region::new(num_rows * output_stride);
        }
        let input = self.input.rows(input_stride);
        let epilogue = Epilogue::Store(self.output.rows(output_stride));
        let start = Instant::now();
        for weight in &self.weights {
            run_linear(&self.pool, self.kernels, weight, (input, epilogue), 0..num_rows);
        }
        start.elapsed().as_secs_f64()
    }

    /// Seconds to read every weight once, in chunks as the linears do.
    pub fn streaming_read(&self) -> f64 {
        const CHUNK_WORDS: usize = 1 << 16;
        let start = Instant::now();
        for weight in &self.weights {
            let chunks: Vec<&[u32]> = weight.stream().chunks(CHUNK_WORDS).collect();
            self.pool.run(chunks.len(), |task, _| {
                black_box(self.kernels.checksum(chunks[task]));
            });
        }
        start.elapsed().as_secs_f64()
    }
}
