//! Measurements for the benchmarks: how fast memory streams, how fast linears and attention run.

use std::hint::black_box;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use crate::attention_step::{AttendPlan, AttendRow};
use crate::blocks::BlockKind;
use crate::error::CpuError;
use crate::isa::Isa;
use crate::kernels::Kernels;
use crate::kernels::attention::{AttendContext, Scratch, partial_stride};
use crate::kernels::linear::Epilogue;
use crate::kernels::quantise::{QuantiseTask, quantised_words};
use crate::kernels::rotate::{HeadShape, Layer};
use crate::kv::{KvPool, KvSpec};
use crate::memory::{Region, Slabs};
use crate::packed_linear::{PackedLinear, Storage};
use crate::pool::ThreadPool;
use crate::schedule::{run_linear, run_quantise};
use crate::simd::LANES;
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

/// Sizes of a model's attention.
#[derive(Clone, Copy, Debug)]
pub struct AttentionShape {
    /// Layers, each with keys and values of its own.
    pub num_layers: usize,
    /// Heads of queries.
    pub num_heads: usize,
    /// Heads of keys and values.
    pub num_kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
}

/// Attention of whole steps, all layers one after another.
pub struct AttentionBench {
    pool: ThreadPool,
    kernels: Kernels,
    shape: AttentionShape,
    kv: KvPool,
    scratch: Vec<Mutex<Scratch>>,
}

const PAGE_SIZE: usize = 16;

impl AttentionBench {
    /// Allocate a pool of `num_tokens` positions.
    ///
    /// # Errors
    /// The kernels do not take the shape.
    ///
    /// # Panics
    /// If the processor lacks the instruction set.
    pub fn new(
        isa: Isa,
        element: Element,
        num_threads: usize,
        shape: AttentionShape,
        num_tokens: usize,
    ) -> Result<AttentionBench, CpuError> {
        let spec = KvSpec {
            num_layers: shape.num_layers,
            num_kv_heads: shape.num_kv_heads,
            head_dim: shape.head_dim,
            num_pages: num_tokens.div_ceil(PAGE_SIZE) + 1,
            page_size: PAGE_SIZE,
        };
        let mut kv = KvPool::new(spec, element)?;
        kv.fill(0x3c00_3c00);
        let scratch = (0..num_threads).map(|_| Mutex::new(Scratch::new())).collect();
        let kernels = Kernels::new(isa, element);
        Ok(AttentionBench { pool: ThreadPool::new(num_threads), kernels, shape, kv, scratch })
    }

    /// Seconds to attend once in every layer.
    ///
    /// # Errors
    /// The pool has not as many positions.
    ///
    /// # Panics
    /// If a kernel does.
    pub fn attend(
        &mut self,
        rows: &[(usize, usize)],
        shared_tokens: usize,
    ) -> Result<f64, CpuError> {
        let AttentionShape { num_heads, num_kv_heads, head_dim, .. } = self.shape;
        let heads = HeadShape { num_heads, num_kv_heads, head_dim };
        let rows = self.rows(rows, shared_tokens)?;
        let num_tokens = rows.last().map_or(0, |row| row.tokens.end);
        let layout = self.kv.layout;
        let query_words = num_heads * layout.dim_words;
        let mut queries = Region::new(num_tokens * query_words);
        queries.as_mut_slice().fill(0x3c00_3c00);
        let output_words = num_heads * head_dim.next_multiple_of(LANES);
        let mut output = Region::new(num_tokens * output_words);
        let stride = partial_stride(layout);
        // Steps keep theirs, so taking it is not measured.
        let plan = AttendPlan::new(&rows, PAGE_SIZE, heads, None);
        let mut partials = Region::new(plan.num_partials * stride);
        partials.as_mut_slice().fill(0);
        let start = Instant::now();
        let plan = AttendPlan::new(&rows, PAGE_SIZE, heads, None);
        for layer in 0..self.shape.num_layers {
            let context = AttendContext {
                heads,
                window: None,
                soft_cap: None,
                sinks: None,
                layout,
                layer: Layer(self.kv.layer(layer)),
                queries: queries.rows(query_words),
                output: output.rows(output_words),
                partials: partials.rows(stride),
                rows: &rows,
                members: &plan.members,
                parts: &plan.parts,
            };
            plan.run(&self.pool, self.kernels, &context, &self.scratch);
        }
        Ok(start.elapsed().as_secs_f64())
    }

    /// Rows of (scheduled, computed) tokens; the first `shared_tokens` of all lie in the same pages.
    fn rows(&self, rows: &[(usize, usize)], shared: usize) -> Result<Vec<AttendRow>, CpuError> {
        let mut first_token = 0;
        let mut next_page = 1 + (shared / PAGE_SIZE) as u32;
        let mut result = Vec::new();
        for &(scheduled, computed_len) in rows {
            let mut table: Vec<u32> = (1..=(shared / PAGE_SIZE) as u32).collect();
            table.truncate(computed_len / PAGE_SIZE);
            while table.len() * PAGE_SIZE < computed_len + scheduled {
                table.push(next_page);
                next_page += 1;
            }
            let tokens = first_token..first_token + scheduled;
            first_token = tokens.end;
            result.push(AttendRow { tokens, computed_len, table });
        }
        if next_page as usize > self.kv.layout.num_pages {
            return Err(CpuError::invalid("the rows need more positions than the pool has"));
        }
        Ok(result)
    }
}
