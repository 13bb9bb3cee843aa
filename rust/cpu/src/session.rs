//! Executing plans: what lives between steps, and the two halves of one step.

use std::ops::Range;

use crate::attention_step::AttendRow;
use crate::error::CpuError;
use crate::kv::{KvPool, KvSpec};
use crate::memory::Region;
use crate::model::Weights;
use crate::plan::{Plan, StepResult, le_words, plan_words};
use crate::populate::Population;
use crate::program::{Program, StepTokens, num_positions};
use crate::recording::Recording;
use crate::sample_step::{LogitScratch, Sampler};
use crate::sampling::SlotStates;

const SOURCE_LAST_SAMPLED: u32 = 1;
const LOGIT_POOLED: u32 = 1;
const ROW_NOT_FINITE: u32 = 1;
const ROW_FAILED: u32 = 3;

/// Sizes of what lives between steps.
#[derive(Clone, Copy, Debug)]
pub struct SessionSizes {
    /// The KV pool.
    pub kv: KvSpec,
    /// Rows of the page table.
    pub num_slots: usize,
    /// Longest sequence.
    pub max_context_len: usize,
}

/// Between the two halves of a step.
struct Pending {
    block: Vec<u32>,
    row_errors: Vec<u32>,
    logit_rows: Vec<u32>,
    pooled_states: Vec<f32>,
}

/// A recorded program with all its state.
pub struct Session {
    weights: Weights,
    program: Program,
    sizes: SessionSizes,
    kv: KvPool,
    vocab_size: usize,
    page_tables: Vec<u32>, // [slots][table_len]
    table_len: usize,
    last_tokens: Vec<u32>,
    states: SlotStates,
    logit_input: Region,
    logits: LogitScratch,
    pending: Option<Pending>,
}

impl Session {
    /// Put a program together.
    ///
    /// # Errors
    /// Numbers or widths of its operations do not fit, or the pool is too large for the kernels.
    pub fn new(
        weights: Weights,
        sizes: SessionSizes,
        recording: &Recording,
    ) -> Result<Session, CpuError> {
        let (buffers, operations, head) = recording.parse()?;
        let kv = KvPool::new(sizes.kv, weights.kernels.element)?;
        let program = Program::new(&weights, &kv, buffers, operations, head)?;
        if num_positions(&weights) < sizes.max_context_len {
            return Err(CpuError::invalid(format!(
                "rotary tables have {} positions, max_context_len is {}",
                num_positions(&weights),
                sizes.max_context_len
            )));
        }
        let table_len = sizes.max_context_len.div_ceil(sizes.kv.page_size);
        Ok(Session {
            vocab_size: weights.linears[head.linear].out_features,
            program,
            sizes,
            kv,
            page_tables: vec![0; sizes.num_slots * table_len],
            table_len,
            last_tokens: vec![0; sizes.num_slots],
            states: SlotStates::default(),
            logit_input: Region::new(0),
            logits: LogitScratch::new(weights.num_threads()),
            pending: None,
            weights,
        })
    }

    /// The weights, to be loaded again.
    pub fn weights(&mut self) -> &mut Weights {
        &mut self.weights
    }

    /// Bytes of one page over all layers.
    pub fn page_bytes(&self) -> usize {
        self.kv.page_bytes()
    }

    /// The pool's memory that may be taken ahead.
    pub fn population(&self) -> Population {
        self.kv.population()
    }

    /// Bytes of the KV pool.
    pub fn pool_bytes(&self) -> usize {
        self.kv.num_bytes()
    }

    /// Apply the plan's records, write KV and compute hidden states; `sample` must follow.
    ///
    /// # Errors
    /// The plan is malformed or contradicts the session's sizes. Nothing has changed then.
    pub fn forward(&mut self, arena: &[u8]) -> Result<(), CpuError> {
        let block = plan_words(arena)?;
        let plan = Plan::new(&block)?;
        self.check(&plan)
            .map_err(|error| CpuError::invalid(format!("step {}: {error}", plan.step)))?;
        self.states.update(&plan);
        for write in plan.page_writes().chunks_exact(4) {
            self.page_tables[write[1] as usize * self.table_len + write[2] as usize] = write[3];
        }
        for moved in plan.page_moves().chunks_exact(6) {
            self.kv.move_page(moved[1] as usize, moved[3] as usize, moved[4] as usize);
        }
        let (step, mut row_errors) = self.tokens(&plan);
        self.kv.usage().begin(&step.pages);
        self.program.run(&self.weights, &mut self.kv, &step);
        let finite = self.program.finite_tokens(&self.weights, step.token_ids.len());
        for (row, error) in step.rows.iter().zip(&mut row_errors) {
            if *error == 0 && !finite[row.tokens.clone()].iter().all(|&finite| finite) {
                *error = ROW_NOT_FINITE;
            }
        }
        let stride = self.logit_stride();
        let tokens = plan.logit_tokens();
        self.logit_input.grow(tokens.len() * stride);
        let output = self.logit_input.rows(stride);
        self.program.head_input(&self.weights, tokens, output);
        let flagged = tokens.iter().zip(plan.logit_flags());
        let pooled: Vec<u32> = flagged
            .filter_map(|(&token, flags)| (flags & LOGIT_POOLED != 0).then_some(token))
            .collect();
        let pooled_states = self.program.pooled_states(&self.weights, &pooled);
        let row_of =
            |token: u32| step.rows.partition_point(|row| row.tokens.end <= token as usize) as u32;
        let logit_rows = tokens.iter().map(|&token| row_of(token)).collect();
        self.pending = Some(Pending { block, row_errors, logit_rows, pooled_states });
        Ok(())
    }

    fn logit_stride(&self) -> usize {
        self.program.head_words(&self.weights)
    }

    /// Draw the tokens of the plan that `forward` took last, and encode the step's result.
    ///
    /// # Errors
    /// The plan has another step id, a slot is not open, or a grammar's mask is missing. No slot has
    /// changed then.
    pub fn sample(&mut self, step: u64, masks: Option<&[u8]>) -> Result<Vec<u8>, CpuError> {
        let unknown =
            || CpuError::invalid(format!("step {step} is to be sampled before its forward pass"));
        let pending = self.pending.as_ref().ok_or_else(unknown)?;
        let plan = Plan::new(&pending.block)?;
        if plan.step != step {
            return Err(unknown());
        }
        let stride = self.logit_stride();
        let masks = masks.map(le_words);
        let sampler = Sampler {
            weights: &self.weights,
            head: &self.weights.linears[self.program.head.linear],
            states: &self.states,
            plan: &plan,
            masks: masks.as_deref(),
            vocab_size: self.vocab_size,
            soft_cap: self.program.head.soft_cap,
        };
        sampler.check()?;
        let outcome = sampler.run(self.logit_input.rows(stride), &mut self.logits);
        let mut errors = pending.row_errors.clone();
        for (index, &logit) in plan.sample_logit().iter().enumerate() {
            if !outcome.possible[index] {
                let error = &mut errors[pending.logit_rows[logit as usize] as usize];
                *error = (*error).max(ROW_FAILED);
            }
        }
        for (&row, &finite) in pending.logit_rows.iter().zip(&outcome.finite) {
            if !finite {
                errors[row as usize] = ROW_NOT_FINITE;
            }
        }
        let mut result: StepResult = outcome.result;
        result.pooled_states.clone_from(&pending.pooled_states);
        for (&slot, &token) in plan.sample_slot().iter().zip(&result.token_ids) {
            self.last_tokens[slot as usize] = token;
            self.states.count(slot, token);
        }
        if errors.iter().any(|&error| error != 0) {
            result.row_errors = errors;
        }
        self.pending = None;
        self.kv.usage().end();
        Ok(result.encode(step))
    }

    /// The step's tokens, and which rows hold ids that the vocabulary does not have.
    fn tokens(&self, plan: &Plan<'_>) -> (StepTokens, Vec<u32>) {
        let mut step = StepTokens {
            token_ids: plan.token_ids().to_vec(),
            positions: plan.positions().to_vec(),
            pages: Vec::with_capacity(plan.token_ids().len()),
            rows: Vec::with_capacity(plan.row_slot().len()),
        };
        let mut errors = vec![0; plan.row_slot().len()];
        for (row, tokens) in row_tokens(plan).enumerate() {
            let slot = plan.row_slot()[row] as usize;
            for token in tokens.clone() {
                let id = &mut step.token_ids[token];
                if *id as usize >= self.vocab_size {
                    *id = 0;
                    errors[row] = ROW_FAILED;
                }
                let index = step.positions[token] as usize / self.sizes.kv.page_size;
                step.pages.push(self.page_tables[slot * self.table_len + index]);
            }
            if plan.row_token_source()[row] == SOURCE_LAST_SAMPLED {
                step.token_ids[tokens.end - 1] = self.last_tokens[slot];
            }
            let computed_len = plan.row_computed_len()[row] as usize;
            let num_pages = (computed_len + tokens.len()).div_ceil(self.sizes.kv.page_size);
            step.rows.push(AttendRow {
                table: self.page_tables[slot * self.table_len..][..num_pages].to_vec(),
                computed_len,
                tokens,
            });
        }
        (step, errors)
    }

    fn check(&self, plan: &Plan<'_>) -> Result<(), CpuError> {
        let fail = |message: String| Err(CpuError::Invalid(message));
        SlotStates::check(plan, self.vocab_size)?;
        let SessionSizes { num_slots, max_context_len, kv } = self.sizes;
        let pages = 1..kv.num_pages;
        if plan.opened_int().chunks_exact(8).any(|record| record[3] != 0) {
            return fail("adapters are not supported".into());
        }
        if plan.page_moves().chunks_exact(6).any(|m| m[0] != 0 || m[2] != 0 || m[5] != 0) {
            return fail("page moves between tiers are not supported".into());
        }
        if plan.page_writes().chunks_exact(4).any(|write| write[0] != 0) {
            return fail("only cache group 0 exists".into());
        }
        let outside = |slot: &u32| *slot as usize >= num_slots;
        if plan.row_slot().iter().any(outside) {
            return fail(format!("row slots must be below {num_slots}"));
        }
        if plan.sample_slot().iter().any(outside) {
            return fail(format!("sample slots must be below {num_slots}"));
        }
        if plan.page_writes().chunks_exact(4).any(|write| outside(&write[1])) {
            return fail(format!("slots must be below {num_slots}"));
        }
        if plan.page_writes().chunks_exact(4).any(|write| !pages.contains(&(write[3] as usize))) {
            return fail(format!("pages must be in 1..{}", kv.num_pages));
        }
        if plan.page_writes().chunks_exact(4).any(|write| write[2] as usize >= self.table_len) {
            return fail(format!("page index beyond max_context_len {max_context_len}"));
        }
        for moved in plan.page_moves().chunks_exact(6) {
            if [moved[1], moved[3]].iter().any(|&page| !pages.contains(&(page as usize))) {
                return fail(format!("moved pages must be in 1..{}", kv.num_pages));
            }
            if moved[4] as usize > kv.page_size {
                return fail("a move exceeds its page".into());
            }
        }
        self.check_rows(plan)
    }

    fn check_rows(&self, plan: &Plan<'_>) -> Result<(), CpuError> {
        let limit = self.sizes.max_context_len;
        let page_size = self.sizes.kv.page_size;
        let mut written = std::collections::HashSet::new();
        for write in plan.page_writes().chunks_exact(4) {
            written.insert((write[1] as usize, write[2] as usize));
        }
        for (row, tokens) in row_tokens(plan).enumerate() {
            let slot = plan.row_slot()[row] as usize;
            let computed = plan.row_computed_len()[row] as usize;
            let kv_len = computed.saturating_add(tokens.len());
            if kv_len > limit {
                return Err(CpuError::invalid(format!("a row exceeds max_context_len {limit}")));
            }
            let positions = &plan.positions()[tokens];
            if positions.iter().enumerate().any(|(i, &p)| p as usize != computed + i) {
                return Err(CpuError::invalid(format!(
                    "row {row} has other positions than its own"
                )));
            }
            for index in 0..kv_len.div_ceil(page_size) {
                let page = self.page_tables[slot * self.table_len + index];
                if page == 0 && !written.contains(&(slot, index)) {
                    return Err(CpuError::invalid(format!(
                        "slot {slot} has no page for a token it computes"
                    )));
                }
            }
        }
        Ok(())
    }
}

/// Flat tokens of each row.
fn row_tokens<'a>(plan: &Plan<'a>) -> impl Iterator<Item = Range<usize>> + use<'a> {
    let mut start = 0;
    plan.row_query_len().iter().map(move |&count| {
        let tokens = start..start + count as usize;
        start = tokens.end;
        tokens
    })
}
