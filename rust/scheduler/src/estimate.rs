//! How much memory running sequences will probably still need: the new-token ratio.
//!
//! A sequence may produce as many tokens as its limit allows, but most stop earlier. Admission
//! reserves this share of what is left. It falls with every step that goes well, and rises when
//! sequences had to be retracted.

use crate::config::Config;
use crate::sequence::Sequence;

/// Remaining tokens beyond this are not reserved for: they are far away, and many requests set no
/// limit.
const MAX_RESERVED_TOKENS: u32 = 4096;

/// Tokens that every running sequence is sure to get after a retraction.
const TOKENS_AFTER_RETRACTION: u32 = 20;

#[derive(Debug)]
pub(crate) struct Estimate {
    ratio: f64,
    init: f64,
    min: f64,
    decay_steps: f64,
    /// What it falls by with each step: from where it was set it reaches `min` after `decay_steps`.
    decay: f64,
}

/// Sums over the running sequences.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Load {
    pub(crate) rows: u64,
    pub(crate) outputs: u64,
    /// Remaining tokens of sequences that will use them all, and of the others.
    sure: u64,
    possible: u64,
    /// Bytes of a plan that rows of these sequences take for their lists of scored ids.
    pub(crate) list_bytes: usize,
}

impl Load {
    pub(crate) fn add(&mut self, sequence: &Sequence) {
        let remaining = u64::from(sequence.remaining_outputs().min(MAX_RESERVED_TOKENS));
        self.rows += 1;
        self.outputs += u64::from(sequence.num_outputs());
        if sequence.bounds.logprobs {
            self.list_bytes += 4 * sequence.params.scored_ids().len();
        }
        if sequence.bounds.stop_mask == 0 {
            self.sure += remaining;
        } else {
            self.possible += remaining;
        }
    }
}

impl Estimate {
    pub(crate) fn new(config: &Config) -> Self {
        let (init, min) = (config.new_token_ratio_init, config.new_token_ratio_min);
        let decay_steps = f64::from(config.new_token_ratio_decay_steps);
        Self { ratio: init, init, min, decay_steps, decay: (init - min) / decay_steps }
    }

    pub(crate) fn ratio(&self) -> f64 {
        self.ratio
    }

    /// Tokens to keep free for these sequences.
    pub(crate) fn reserve(&self, load: &Load) -> u64 {
        load.sure + (self.ratio * load.possible as f64).ceil() as u64
    }

    /// A step was planned without running out of memory.
    pub(crate) fn step_went_well(&mut self) {
        self.ratio = (self.ratio - self.decay).max(self.min);
    }

    /// Nothing runs any more.
    pub(crate) fn idle(&mut self) {
        self.set(self.init);
    }

    /// Sequences were retracted; these are left.
    pub(crate) fn retracted(&mut self, left: &Load) {
        let certain = left.outputs + u64::from(TOKENS_AFTER_RETRACTION) * left.rows;
        let all = left.outputs + left.sure + left.possible + 1;
        self.set((certain as f64 / all as f64).clamp(self.min, 1.0));
    }

    fn set(&mut self, ratio: f64) {
        self.ratio = ratio;
        self.decay = (ratio - self.min) / self.decay_steps;
    }
}
