//! A recorded program: a model's operations on numbered buffers, run once per step.

use std::ops::Range;
use std::sync::Mutex;

use crate::attention_step::{AttendPlan, AttendRow, rotate_chunk};
use crate::error::CpuError;
use crate::kernels::attention::{AttendContext, MAX_QUERIES, Scratch, partial_stride, query_scale};
use crate::kernels::linear::{Epilogue, GatedRows};
use crate::kernels::quantise::{QuantiseTask, quantised_words};
use crate::kernels::rotate::{HeadShape, Layer, RotateTask};
use crate::kernels::rows::{Activation, EmbedTask, FiniteTask, RowChange, RowsTask, embed_outputs};
use crate::kv::KvPool;
use crate::memory::{Region, Rows};
use crate::model::{Weights, missing};
use crate::packed_linear::Storage;
use crate::schedule::{run_linear, run_quantise, run_rows};
use crate::simd::LANES;
use crate::weights::{Embedding, Table};

/// What a buffer holds per token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Buffer {
    /// float32 values.
    Wide(usize),
    /// Elements, rounded to the model's type, ready to be multiplied.
    Operand(usize),
    /// Elements quantised in blocks, ready to be multiplied with weights in blocks.
    Quantised(usize),
}

/// What becomes of a linear's product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Output {
    /// Stored in a wide buffer.
    Store(usize),
    /// Added to a wide buffer.
    Add(usize),
    /// `act(first half) * second half`, stored in an operand buffer.
    Gated(usize, Activation),
}

/// One layer's attention.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Attend {
    /// Wide buffer of `[query | key | value]`.
    pub(crate) qkv: usize,
    /// Operand buffer of the result.
    pub(crate) to: usize,
    /// Layer of the KV pool.
    pub(crate) layer: usize,
    /// Heads of queries.
    pub(crate) num_heads: usize,
    /// Heads of keys and values.
    pub(crate) num_kv_heads: usize,
    /// Elements of a head.
    pub(crate) head_dim: usize,
    /// Keys that a query sees, itself included; None: all.
    pub(crate) window: Option<usize>,
    /// Of the scores.
    pub(crate) scale: f32,
    /// Limit that scores approach.
    pub(crate) soft_cap: Option<f32>,
    /// Sinks.
    pub(crate) sinks: Option<usize>,
    /// Rotary tables.
    pub(crate) rotary: usize,
    /// Norms of queries and keys.
    pub(crate) norms: Option<(usize, usize)>,
}

/// One operation. Numbers are those of weights and buffers.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Operation {
    /// Look up the tokens.
    Embed {
        /// Embedding.
        table: usize,
        /// Wide buffer.
        to: usize,
    },
    /// RMS norm, rounded.
    Norm {
        /// Wide buffer.
        from: usize,
        /// Norm.
        norm: usize,
        /// Operand buffer.
        to: usize,
    },
    /// Rounding to an operand.
    Round {
        /// Wide buffer.
        from: usize,
        /// Operand buffer.
        to: usize,
    },
    /// Quantisation of an operand.
    Quantise {
        /// Operand buffer.
        from: usize,
        /// Quantised buffer.
        to: usize,
    },
    /// `act(first half) * second half`, rounded.
    Gated {
        /// Wide buffer.
        from: usize,
        /// Operand buffer of half its width.
        to: usize,
        /// Of the first half.
        activation: Activation,
    },
    /// RMS norm, added to another buffer.
    NormAdd {
        /// Wide buffer.
        from: usize,
        /// Norm.
        norm: usize,
        /// Another wide buffer.
        to: usize,
    },
    /// A packed linear.
    Linear {
        /// Operand buffer; quantised buffer if the weight is stored in blocks.
        from: usize,
        /// Linear.
        weight: usize,
        /// Where the product goes.
        output: Output,
    },
    /// Attention.
    Attend(Attend),
}

/// Where the logits come from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Head {
    /// Wide buffer of the final hidden states.
    pub(crate) hidden: usize,
    /// Norm before the head.
    pub(crate) norm: usize,
    /// Linear over the vocabulary.
    pub(crate) linear: usize,
    /// Limit that logits approach.
    pub(crate) soft_cap: Option<f32>,
}

/// A step's tokens, as the operations need them.
pub(crate) struct StepTokens {
    pub(crate) token_ids: Vec<u32>,
    pub(crate) positions: Vec<u32>,
    pub(crate) pages: Vec<u32>,
    pub(crate) rows: Vec<AttendRow>,
}

/// Attention plans of one step by shape and window.
type Plans = Vec<(HeadShape, Option<usize>, AttendPlan)>;

/// The operations with their buffers.
pub(crate) struct Program {
    buffers: Vec<Buffer>,
    operations: Vec<Operation>,
    pub(crate) head: Head,
    capacity: usize,
    regions: Vec<Region>,
    queries: Region,
    partials: Region,
    head_operand: Region,
    scratch: Vec<Mutex<Scratch>>,
}

impl Program {
    /// Check that every number exists and every width fits.
    ///
    /// # Errors
    /// One does not.
    pub(crate) fn new(
        weights: &Weights,
        kv: &KvPool,
        buffers: Vec<Buffer>,
        operations: Vec<Operation>,
        head: Head,
    ) -> Result<Program, CpuError> {
        let check = Check { weights, kv, buffers: &buffers };
        for &operation in &operations {
            check.operation(operation).map_err(|error| {
                CpuError::invalid(format!("operation {operation:?} of the program: {error}"))
            })?;
        }
        let width = check.wide(head.hidden)?;
        check.linear(head.linear, width, check.storage(head.linear)?)?;
        check.norm(head.norm, check.wide(head.hidden)?)?;
        check_soft_cap(head.soft_cap)?;
        let scratch = (0..weights.num_threads()).map(|_| Mutex::new(Scratch::new())).collect();
        Ok(Program {
            buffers,
            operations,
            head,
            capacity: 0,
            regions: Vec::new(),
            queries: Region::new(0),
            partials: Region::new(0),
            head_operand: Region::new(0),
            scratch,
        })
    }

    fn stride(&self, weights: &Weights, buffer: usize) -> usize {
        match self.buffers[buffer] {
            Buffer::Wide(width) => width,
            Buffer::Operand(width) => operand_words(weights, width),
            Buffer::Quantised(width) => quantised_words(width),
        }
    }

    fn rows<T>(&mut self, weights: &Weights, buffer: usize) -> Rows<T> {
        let stride = self.stride(weights, buffer);
        self.regions[buffer].rows(stride)
    }

    fn width(&self, buffer: usize) -> usize {
        match self.buffers[buffer] {
            Buffer::Wide(width) | Buffer::Operand(width) | Buffer::Quantised(width) => width,
        }
    }

    fn reserve(&mut self, weights: &Weights, kv: &KvPool, num_tokens: usize) {
        if num_tokens <= self.capacity && !self.regions.is_empty() {
            return;
        }
        self.capacity = num_tokens.next_power_of_two().max(16);
        self.regions = (0..self.buffers.len())
            .map(|buffer| Region::new(self.capacity * self.stride(weights, buffer)))
            .collect();
        let heads = self.operations.iter().filter_map(|operation| match operation {
            Operation::Attend(attend) => Some(attend.num_heads),
            _ => None,
        });
        let most = heads.max().unwrap_or(0);
        self.queries = Region::new(self.capacity * most * kv.layout.dim_words);
    }

    /// Run all operations.
    pub(crate) fn run(&mut self, weights: &Weights, kv: &mut KvPool, step: &StepTokens) {
        let num_tokens = step.token_ids.len();
        self.reserve(weights, kv, num_tokens);
        let mut plans = Plans::new();
        for index in 0..self.operations.len() {
            match self.operations[index] {
                Operation::Embed { table, to } => {
                    self.embed(weights, &step.token_ids, (table, to));
                }
                Operation::Norm { from, norm, to } => {
                    let change = RowChange::Norm(&weights.norms[norm]);
                    self.change_rows(weights, (from, to), 0..num_tokens, change);
                }
                Operation::Round { from, to } => {
                    self.change_rows(weights, (from, to), 0..num_tokens, RowChange::Round);
                }
                Operation::Quantise { from, to } => {
                    let task = QuantiseTask {
                        input: self.rows(weights, from),
                        output: self.rows(weights, to),
                        rows: 0..num_tokens,
                        width: self.width(from),
                    };
                    run_quantise(&weights.pool, weights.kernels, &task);
                }
                Operation::Gated { from, to, activation } => {
                    let change = RowChange::Gated(activation);
                    self.change_rows(weights, (from, to), 0..num_tokens, change);
                }
                Operation::NormAdd { from, norm, to } => {
                    let change = RowChange::NormAdd(&weights.norms[norm]);
                    self.change_rows(weights, (from, to), 0..num_tokens, change);
                }
                Operation::Linear { from, weight, output } => {
                    let epilogue = match output {
                        Output::Store(to) => Epilogue::Store(self.rows(weights, to)),
                        Output::Add(to) => Epilogue::Add(self.rows(weights, to)),
                        Output::Gated(to, activation) => {
                            let rows = self.rows(weights, to);
                            Epilogue::Gated(GatedRows { rows, activation })
                        }
                    };
                    let weight = &weights.linears[weight];
                    let matrices = (self.rows(weights, from), epilogue);
                    let (pool, kernels) = (&weights.pool, weights.kernels);
                    run_linear(pool, kernels, weight, matrices, 0..num_tokens);
                }
                Operation::Attend(attend) => self.attend(weights, kv, (step, &mut plans), attend),
            }
        }
    }

    fn embed(&mut self, weights: &Weights, tokens: &[u32], (table, to): (usize, usize)) {
        let output = self.rows(weights, to);
        let Embedding { width, scale, table, .. } = &weights.embeddings[table];
        let (width, scale) = (*width, *scale);
        match table {
            Table::Rows(table) => {
                weights.kernels.embed(&EmbedTask { table, tokens, width, scale, output });
            }
            Table::Linear(linear) => {
                embed_outputs(&weights.linears[*linear], tokens, scale, output);
            }
        }
    }

    fn change_rows(
        &mut self,
        weights: &Weights,
        (from, to): (usize, usize),
        rows: Range<usize>,
        change: RowChange<'_>,
    ) {
        let task = RowsTask {
            input: self.rows(weights, from),
            output: self.rows(weights, to),
            rows,
            input_row: None,
            width: self.width(to),
            change,
        };
        run_rows(&weights.pool, weights.kernels, &task);
    }

    fn attend(
        &mut self,
        weights: &Weights,
        kv: &mut KvPool,
        (step, plans): (&StepTokens, &mut Plans),
        attend: Attend,
    ) {
        let heads = HeadShape {
            num_heads: attend.num_heads,
            num_kv_heads: attend.num_kv_heads,
            head_dim: attend.head_dim,
        };
        let known = plans.iter().position(|(h, window, _)| (*h, *window) == (heads, attend.window));
        let plan = known.unwrap_or_else(|| {
            let plan = AttendPlan::new(&step.rows, kv.layout.page_size, heads, attend.window);
            plans.push((heads, attend.window, plan));
            plans.len() - 1
        });
        let plan = &plans[plan].2;
        let layout = kv.layout;
        let layer = Layer(kv.layer(attend.layer));
        let queries = self.queries.rows(heads.num_heads * layout.dim_words);
        let num_tokens = step.token_ids.len();
        let qkv = self.rows(weights, attend.qkv);
        let norms = attend.norms.map(|(query, key)| (&weights.norms[query], &weights.norms[key]));
        let chunk = rotate_chunk(num_tokens, weights.num_threads());
        weights.pool.run(num_tokens.div_ceil(chunk), |task, _| {
            weights.kernels.rotate(&RotateTask {
                heads,
                qkv,
                queries,
                query_scale: query_scale(attend.scale, attend.soft_cap),
                rotary: &weights.rotaries[attend.rotary],
                query_norm: norms.map(|norms| norms.0),
                key_norm: norms.map(|norms| norms.1),
                layout,
                layer,
                positions: &step.positions,
                pages: &step.pages,
                tokens: task * chunk..((task + 1) * chunk).min(num_tokens),
            });
        });
        let stride = partial_stride(layout);
        self.partials.grow(plan.num_partials * stride);
        let context = AttendContext {
            heads,
            window: attend.window,
            soft_cap: attend.soft_cap,
            sinks: attend.sinks.map(|sinks| weights.sinks[sinks].scores()),
            layout,
            layer,
            queries,
            output: self.rows(weights, attend.to),
            partials: self.partials.rows(stride),
            rows: &step.rows,
            members: &plan.members,
            parts: &plan.parts,
        };
        plan.run(&weights.pool, weights.kernels, &context, &self.scratch);
    }

    /// Norm the hidden states of some tokens, one row each, for the head.
    pub(crate) fn head_input(&mut self, weights: &Weights, tokens: &[u32], output: Rows<u32>) {
        let norm = &weights.norms[self.head.norm];
        let storage = weights.linears[self.head.linear].storage;
        let operands = match storage {
            Storage::Dense => output,
            Storage::Blocks => {
                let stride = operand_words(weights, norm.width);
                self.head_operand.grow(tokens.len() * stride);
                self.head_operand.rows(stride)
            }
        };
        let task = RowsTask {
            input: self.rows(weights, self.head.hidden),
            output: operands,
            rows: 0..tokens.len(),
            input_row: Some(tokens),
            width: norm.width,
            change: RowChange::Norm(norm),
        };
        run_rows(&weights.pool, weights.kernels, &task);
        if storage == Storage::Blocks {
            let rows = 0..tokens.len();
            let task = QuantiseTask { input: operands, output, rows, width: norm.width };
            run_quantise(&weights.pool, weights.kernels, &task);
        }
    }

    /// Words of a row of `head_input`.
    pub(crate) fn head_words(&self, weights: &Weights) -> usize {
        let linear = &weights.linears[self.head.linear];
        match linear.storage {
            Storage::Dense => operand_words(weights, linear.in_features),
            Storage::Blocks => quantised_words(linear.in_features),
        }
    }

    /// The final hidden states of some tokens after the last norm, not rounded to the model's type.
    pub(crate) fn pooled_states(&mut self, weights: &Weights, tokens: &[u32]) -> Vec<f32> {
        let norm = &weights.norms[self.head.norm];
        let hidden: Rows<f32> = self.rows(weights, self.head.hidden);
        let mut states = Vec::with_capacity(tokens.len() * norm.width);
        for &token in tokens {
            // SAFETY: the buffer holds the step's tokens, each of the norm's width; nothing writes.
            let row = unsafe { std::slice::from_raw_parts(hidden.row(token as usize), norm.width) };
            norm.extend_normed(row, &mut states);
        }
        states
    }

    /// Which tokens' final hidden states are finite.
    pub(crate) fn finite_tokens(&mut self, weights: &Weights, num_tokens: usize) -> Vec<bool> {
        let mut finite = vec![false; num_tokens];
        let hidden = self.head.hidden;
        let mut task = FiniteTask {
            input: self.rows(weights, hidden),
            width: self.width(hidden),
            finite: &mut finite,
        };
        weights.kernels.finite(&mut task);
        finite
    }
}

/// Words of a row of operands.
fn operand_words(weights: &Weights, width: usize) -> usize {
    width.next_multiple_of(LANES) / weights.kernels.element.per_word()
}

/// Checks of a program's numbers and widths.
struct Check<'a> {
    weights: &'a Weights,
    kv: &'a KvPool,
    buffers: &'a [Buffer],
}

fn fits(what: &str, actual: usize, expected: usize) -> Result<(), CpuError> {
    if actual == expected {
        return Ok(());
    }
    Err(CpuError::invalid(format!("{what} is {actual}, not {expected}")))
}

fn check_soft_cap(cap: Option<f32>) -> Result<(), CpuError> {
    if cap.is_none_or(|cap| cap > 0.0 && cap.is_finite()) {
        return Ok(());
    }
    Err(CpuError::invalid("a soft cap must be above 0"))
}

impl Check<'_> {
    fn wide(&self, buffer: usize) -> Result<usize, CpuError> {
        match self.buffers.get(buffer) {
            Some(&Buffer::Wide(width)) => Ok(width),
            _ => Err(missing("wide buffer", buffer)),
        }
    }

    fn operand(&self, buffer: usize) -> Result<usize, CpuError> {
        match self.buffers.get(buffer) {
            Some(&Buffer::Operand(width)) => Ok(width),
            _ => Err(missing("operand buffer", buffer)),
        }
    }

    fn norm(&self, norm: usize, width: usize) -> Result<(), CpuError> {
        let norm = self.weights.norms.get(norm).ok_or_else(|| missing("norm", norm))?;
        fits("the norm's width", norm.width, width)
    }

    fn quantised(&self, buffer: usize) -> Result<usize, CpuError> {
        match self.buffers.get(buffer) {
            Some(&Buffer::Quantised(width)) => Ok(width),
            _ => Err(missing("quantised buffer", buffer)),
        }
    }

    fn storage(&self, linear: usize) -> Result<Storage, CpuError> {
        let weight = self.weights.linears.get(linear).ok_or_else(|| missing("linear", linear))?;
        Ok(weight.storage)
    }

    /// Outputs of a linear that reads rows of this width and kind.
    fn linear(&self, linear: usize, width: usize, storage: Storage) -> Result<usize, CpuError> {
        let weight = self.weights.linears.get(linear).ok_or_else(|| missing("linear", linear))?;
        fits("the linear's input", width, weight.in_features)?;
        if storage != weight.storage {
            return Err(CpuError::invalid("the linear reads another kind of buffer"));
        }
        if !weight.is_loaded() {
            return Err(CpuError::invalid(format!("linear {linear} has not been loaded")));
        }
        Ok(weight.out_features)
    }

    fn operation(&self, operation: Operation) -> Result<(), CpuError> {
        match operation {
            Operation::Embed { table, to } => {
                let tables = &self.weights.embeddings;
                let table = tables.get(table).ok_or_else(|| missing("embedding", table))?;
                if table.linear().is_some_and(|linear| !self.weights.linears[linear].is_loaded()) {
                    return Err(CpuError::invalid("the embedding has not been loaded"));
                }
                fits("the output's width", self.wide(to)?, table.width)
            }
            Operation::Norm { from, norm, to } => {
                self.norm(norm, self.wide(from)?)?;
                fits("the output's width", self.operand(to)?, self.wide(from)?)
            }
            Operation::Round { from, to } => {
                fits("the output's width", self.operand(to)?, self.wide(from)?)
            }
            Operation::Quantise { from, to } => {
                fits("the output's width", self.quantised(to)?, self.operand(from)?)
            }
            Operation::NormAdd { from, norm, to } => {
                if from == to {
                    return Err(CpuError::invalid("a buffer is normed and added to"));
                }
                self.norm(norm, self.wide(from)?)?;
                fits("the output's width", self.wide(to)?, self.wide(from)?)
            }
            Operation::Gated { from, to, .. } => {
                fits("twice the output's width", 2 * self.operand(to)?, self.wide(from)?)
            }
            Operation::Linear { from, weight, output } => {
                let storage = self.storage(weight)?;
                let from = match storage {
                    Storage::Dense => self.operand(from)?,
                    Storage::Blocks => self.quantised(from)?,
                };
                let width = self.linear(weight, from, storage)?;
                match output {
                    Output::Store(to) | Output::Add(to) => {
                        fits("the output's width", self.wide(to)?, width)
                    }
                    Output::Gated(to, _) => {
                        if !self.weights.linears[weight].halves_are_panels() {
                            return Err(CpuError::invalid("gate and up share a panel"));
                        }
                        fits("twice the output's width", 2 * self.operand(to)?, width)
                    }
                }
            }
            Operation::Attend(attend) => self.attend(attend),
        }
    }

    fn attend(&self, attend: Attend) -> Result<(), CpuError> {
        let Attend { num_heads, num_kv_heads, head_dim, .. } = attend;
        let layout = self.kv.layout;
        fits("head_dim", head_dim, layout.head_dim)?;
        fits("the number of kv heads", num_kv_heads, layout.num_kv_heads)?;
        fits("heads per kv head", num_heads % num_kv_heads, 0)?;
        if num_heads / num_kv_heads > MAX_QUERIES {
            return Err(CpuError::invalid(format!(
                "{num_heads} heads share {num_kv_heads} kv heads; the CPU kernels take at most \
                 {MAX_QUERIES} for each; use the torch backend"
            )));
        }
        check_soft_cap(attend.soft_cap)?;
        if let Some(sinks) = attend.sinks {
            let sinks = self.weights.sinks.get(sinks).ok_or_else(|| missing("sinks", sinks))?;
            fits("the number of sinks", sinks.scores().len(), num_heads)?;
        }
        fits("qkv", self.wide(attend.qkv)?, (num_heads + 2 * num_kv_heads) * head_dim)?;
        fits("the output's width", self.operand(attend.to)?, num_heads * head_dim)?;
        if attend.layer >= self.kv.num_layers() {
            return Err(missing("layer", attend.layer));
        }
        if attend.window == Some(0) {
            return Err(CpuError::invalid("a window of 0 keys sees nothing"));
        }
        if let Some((query, key)) = attend.norms {
            self.norm(query, head_dim)?;
            self.norm(key, head_dim)?;
        }
        let rotary = attend.rotary;
        let rotary = self.weights.rotaries.get(rotary).ok_or_else(|| missing("rotary", rotary))?;
        if 2 * rotary.half > head_dim {
            return Err(CpuError::invalid("the rotary encoding is wider than a head"));
        }
        Ok(())
    }
}

/// Positions that a program's rotary tables have.
pub(crate) fn num_positions(weights: &Weights) -> usize {
    weights.rotaries.iter().map(|rotary| rotary.num_positions).min().unwrap_or(usize::MAX)
}
