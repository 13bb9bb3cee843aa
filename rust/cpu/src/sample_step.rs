//! The second half of a step: logits where they are wanted, draws and log-probs.

use std::ops::Range;
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::error::CpuError;
use crate::kernels::linear::Epilogue;
use crate::kernels::scan::Extent;
use crate::memory::{Region, Rows};
use crate::model::Weights;
use crate::packed_linear::PackedLinear;
use crate::plan::{Plan, StepResult, list};
use crate::sampling::{Drawn, Selection, SlotSampling, SlotStates, draw, process, top};
use crate::schedule::run_linear;

/// Logit positions computed at once: their logits should stay in cache until they are read.
const CHUNK: usize = 32;
/// Ids that one task scans.
const SEGMENT: usize = 8192;
const SAMPLE_LOGPROB: u32 = 1;

/// Memory that is used again in the next step.
pub(crate) struct LogitScratch {
    logits: Region,
    work: Vec<Mutex<Vec<f32>>>, // per thread
}

impl LogitScratch {
    pub(crate) fn new(num_threads: usize) -> LogitScratch {
        let work = (0..num_threads).map(|_| Mutex::new(Vec::new())).collect();
        LogitScratch { logits: Region::new(0), work }
    }
}

/// What sampling yields.
pub(crate) struct Outcome {
    pub(crate) result: StepResult,
    /// By sample: a token was left.
    pub(crate) possible: Vec<bool>,
    /// By logit position.
    pub(crate) finite: Vec<bool>,
}

/// One step's sampling.
pub(crate) struct Sampler<'a> {
    pub(crate) weights: &'a Weights,
    pub(crate) head: &'a PackedLinear,
    pub(crate) states: &'a SlotStates,
    pub(crate) plan: &'a Plan<'a>,
    pub(crate) masks: Option<&'a [u32]>,
    pub(crate) vocab_size: usize,
    /// Limit that logits approach.
    pub(crate) soft_cap: Option<f32>,
}

/// What is known of one logit position.
#[derive(Clone, Debug)]
struct Position {
    extent: Extent,
    normaliser: f32,
    top: Vec<(u32, f32)>,
    scores: Vec<f32>,
}

impl Sampler<'_> {
    fn mask_words(&self) -> usize {
        self.vocab_size.div_ceil(32)
    }

    /// Check that every sample's slot is open and every grammar has its mask.
    pub(crate) fn check(&self) -> Result<(), CpuError> {
        let slots = self.plan.sample_slot();
        let closed: Vec<u32> =
            slots.iter().copied().filter(|&slot| self.states.get(slot).is_none()).collect();
        if !closed.is_empty() {
            return Err(CpuError::invalid(format!(
                "the plan samples for slots {closed:?}, which are not open"
            )));
        }
        let masked: Vec<usize> = (0..slots.len())
            .filter(|&sample| self.states.get(slots[sample]).is_some_and(|slot| slot.has_grammar))
            .collect();
        let expected = slots.len() * self.mask_words();
        if !masked.is_empty() && self.masks.is_none_or(|masks| masks.len() != expected) {
            return Err(CpuError::invalid(format!(
                "samples {masked:?} have a grammar and need a mask each"
            )));
        }
        Ok(())
    }

    /// Compute all logits, some positions at a time, and what is wanted of them.
    pub(crate) fn run(&self, input: Rows<u32>, scratch: &mut LogitScratch) -> Outcome {
        let plan = self.plan;
        let num_logits = plan.logit_tokens().len();
        let mut drawn = vec![Drawn::default(); plan.sample_logit().len()];
        let mut logprobs = vec![0.0; drawn.len()];
        let mut positions = Vec::with_capacity(num_logits);
        let needed = num_logits.min(CHUNK) * self.vocab_size;
        if scratch.logits.len() < needed {
            scratch.logits = Region::new(needed);
        }
        for start in (0..num_logits).step_by(CHUNK) {
            let chunk = start..(start + CHUNK).min(num_logits);
            let inputs = input.sub_rows(start, chunk.len());
            let logits = scratch.logits.rows::<f32>(self.vocab_size);
            let matrices = (inputs, Epilogue::Store(logits));
            let (pool, kernels) = (&self.weights.pool, self.weights.kernels);
            run_linear(pool, kernels, self.head, matrices, 0..chunk.len());
            if let Some(cap) = self.soft_cap {
                self.cap_softly(logits, chunk.len(), cap);
            }
            let values: Vec<&[f32]> =
                scratch.logits.as_floats().chunks_exact(self.vocab_size).collect();
            let mut found = self.scan(chunk.clone(), &values);
            self.draw_chunk(chunk.clone(), (&values, &found), &scratch.work, &mut drawn);
            for (sample, &logit) in plan.sample_logit().iter().enumerate() {
                let at = (logit as usize).wrapping_sub(start);
                let wanted = plan.sample_flags()[sample] & SAMPLE_LOGPROB != 0;
                if !wanted || at >= chunk.len() || !found[at].extent.finite {
                    continue;
                }
                let token = drawn[sample].token as usize;
                logprobs[sample] = if self.slot(sample).processed {
                    let mut work = scratch.work[0].lock().unwrap_or_else(PoisonError::into_inner);
                    self.processed(sample, values[at], &mut found[at], &mut work);
                    if drawn[sample].possible { work[token] - found[at].normaliser } else { 0.0 }
                } else {
                    values[at][token] - found[at].normaliser
                };
            }
            positions.extend(found);
        }
        self.outcome(&drawn, logprobs, &positions)
    }

    fn cap_softly(&self, logits: Rows<f32>, num_rows: usize, cap: f32) {
        let segments = self.vocab_size.div_ceil(SEGMENT);
        self.weights.pool.run(num_rows * segments, |task, _| {
            let first = task % segments * SEGMENT;
            let count = SEGMENT.min(self.vocab_size - first);
            let start = logits.row(task / segments).wrapping_add(first);
            // SAFETY: the segment is a part of its row, and this task's alone.
            let segment = unsafe { std::slice::from_raw_parts_mut(start, count) };
            self.weights.kernels.soft_cap(segment, cap);
        });
    }

    fn outcome(&self, drawn: &[Drawn], logprobs: Vec<f32>, positions: &[Position]) -> Outcome {
        let asked = self.plan.sample_flags().iter().any(|flags| flags & SAMPLE_LOGPROB != 0);
        let top = positions.iter().flat_map(|position| &position.top);
        Outcome {
            result: StepResult {
                token_ids: drawn.iter().map(|drawn| drawn.token).collect(),
                row_errors: Vec::new(),
                sampled_logprobs: if asked { logprobs } else { Vec::new() },
                score_logprobs: positions.iter().flat_map(|p| p.scores.clone()).collect(),
                top_ids: top.clone().map(|&(id, _)| id).collect(),
                top_logprobs: top.map(|&(_, logprob)| logprob).collect(),
                pooled_states: Vec::new(),
            },
            possible: drawn.iter().map(|drawn| drawn.possible).collect(),
            finite: positions.iter().map(|position| position.extent.finite).collect(),
        }
    }

    /// Best, finiteness and log-probs of some positions.
    fn scan(&self, chunk: Range<usize>, values: &[&[f32]]) -> Vec<Position> {
        let segments = self.vocab_size.div_ceil(SEGMENT);
        let extents: Vec<OnceLock<Extent>> =
            (0..chunk.len() * segments).map(|_| OnceLock::new()).collect();
        self.weights.pool.run(extents.len(), |task, _| {
            let first = task % segments * SEGMENT;
            let last = (first + SEGMENT).min(self.vocab_size);
            let extent = self.weights.kernels.extent(&values[task / segments][first..last], first);
            let _ = extents[task].set(extent);
        });
        let positions: Vec<OnceLock<Position>> = chunk.clone().map(|_| OnceLock::new()).collect();
        let wanted: Vec<bool> = chunk.clone().map(|logit| self.wants_logprobs(logit)).collect();
        let compute = |task: usize| {
            let parts = extents[task * segments..(task + 1) * segments].iter();
            let extent = parts
                .filter_map(OnceLock::get)
                .copied()
                .reduce(Extent::followed_by)
                .expect("every segment was scanned");
            let logit = chunk.start + task;
            self.position(logit, values[task], extent, wanted[task])
        };
        if wanted.iter().any(|&wanted| wanted) {
            self.weights.pool.run(chunk.len(), |task, _| {
                let _ = positions[task].set(compute(task));
            });
        }
        positions
            .into_iter()
            .enumerate()
            .map(|(task, position)| position.into_inner().unwrap_or_else(|| compute(task)))
            .collect()
    }

    fn wants_logprobs(&self, logit: usize) -> bool {
        let plan = self.plan;
        let mut samples = plan.sample_logit().iter().zip(plan.sample_flags());
        plan.logit_top_n()[logit] > 0
            || !list(plan.score_offsets(), plan.score_ids(), logit).is_empty()
            || samples.any(|(&at, flags)| at as usize == logit && flags & SAMPLE_LOGPROB != 0)
    }

    fn position(&self, logit: usize, values: &[f32], extent: Extent, wanted: bool) -> Position {
        let mut position =
            Position { extent, normaliser: 0.0, top: Vec::new(), scores: Vec::new() };
        if !wanted {
            return position;
        }
        let plan = self.plan;
        let ids = list(plan.score_offsets(), plan.score_ids(), logit);
        let count = plan.logit_top_n()[logit] as usize;
        if !extent.finite {
            // The row has failed; its numbers mean nothing, but there must be as many as asked.
            position.scores = vec![0.0; ids.len()];
            position.top = (0..count.min(values.len())).map(|id| (id as u32, 0.0)).collect();
            return position;
        }
        self.score(logit, values, &mut position);
        position
    }

    /// Log-probs of what is wanted at a position whose highest logit is known.
    fn score(&self, logit: usize, values: &[f32], position: &mut Position) {
        let plan = self.plan;
        let sum = self.weights.kernels.exp_sum(values, position.extent.highest);
        let normaliser = position.extent.highest + sum.ln();
        let ids = list(plan.score_offsets(), plan.score_ids(), logit);
        let count = plan.logit_top_n()[logit] as usize;
        position.normaliser = normaliser;
        position.scores = ids.iter().map(|&id| values[id as usize] - normaliser).collect();
        position.top =
            top(values, count).into_iter().map(|(id, logit)| (id, logit - normaliser)).collect();
    }

    /// Log-probs at a sample's position of what the sample is drawn from, which `work` holds then.
    fn processed(
        &self,
        sample: usize,
        logits: &[f32],
        position: &mut Position,
        work: &mut Vec<f32>,
    ) {
        let selection = self.selection(sample, None);
        if process(self.weights.kernels, logits, &selection, work) {
            position.extent.highest = 0.0;
            self.score(self.plan.sample_logit()[sample] as usize, work, position);
        }
    }

    fn slot(&self, sample: usize) -> &SlotSampling {
        self.states.get(self.plan.sample_slot()[sample]).expect("checked to be open")
    }

    fn selection(&self, sample: usize, raw_best: Option<u32>) -> Selection<'_> {
        let slot = self.slot(sample);
        let words = self.mask_words();
        let mask = self.masks.filter(|_| slot.has_grammar);
        Selection {
            slot,
            position: self.plan.sample_position()[sample],
            mask: mask.map(|masks| &masks[sample * words..(sample + 1) * words]),
            raw_best,
        }
    }

    fn draw_chunk(
        &self,
        chunk: Range<usize>,
        (values, positions): (&[&[f32]], &[Position]),
        work: &[Mutex<Vec<f32>>],
        drawn: &mut [Drawn],
    ) {
        let plan = self.plan;
        let samples: Vec<usize> = (0..drawn.len())
            .filter(|&sample| chunk.contains(&(plan.sample_logit()[sample] as usize)))
            .collect();
        let results: Vec<OnceLock<Drawn>> = samples.iter().map(|_| OnceLock::new()).collect();
        let compute = |task: usize, thread: usize| {
            let sample = samples[task];
            let at = plan.sample_logit()[sample] as usize - chunk.start;
            let extent = positions[at].extent;
            if !extent.finite {
                return Drawn { token: 0, possible: true };
            }
            let selection = self.selection(sample, Some(extent.best));
            let mut work = work[thread].lock().unwrap_or_else(PoisonError::into_inner);
            draw(self.weights.kernels, values[at], &selection, &mut work)
        };
        self.weights.pool.run(samples.len(), |task, thread| {
            let _ = results[task].set(compute(task, thread));
        });
        for (&sample, result) in samples.iter().zip(results) {
            drawn[sample] = result.into_inner().expect("every sample was drawn");
        }
    }
}
