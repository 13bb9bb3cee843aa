//! What must be remembered of a step until its result comes.

use radix_tree::{NodeId, PageId};

use crate::pace::Paced;
use crate::result::Expected;
use crate::sequence::SequenceId;

/// A planned step.
#[derive(Debug, Default)]
pub(crate) struct Step {
    pub(crate) id: u64,
    pub(crate) rows: Vec<StepRow>,
    /// Pages that the step copies from, and the locked nodes that protect them.
    pub(crate) donors: Vec<(NodeId, PageId)>,
    pub(crate) expected: Expected,
    pub(crate) paced: Paced,
}

/// A row of a planned step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepRow {
    pub(crate) sequence: SequenceId,
    /// `Sequence::run` when it was planned.
    pub(crate) run: u32,
    /// First position computed.
    pub(crate) start: u32,
    pub(crate) query_len: u32,
    /// Sample entry that the row leads to.
    pub(crate) sample: Option<u32>,
    /// Which of the step's pooled states is the row's.
    pub(crate) pooled: Option<u32>,
    /// Prompt positions whose log-prob the row yields, the first of these, and where the scores and
    /// top entries of the row's logit positions begin.
    pub(crate) num_prompt_scores: u32,
    pub(crate) first_prompt_score: u32,
    pub(crate) first_score: u32,
    pub(crate) first_top: u32,
}

impl Step {
    /// Makes the record ready for another step.
    pub(crate) fn reset(&mut self, id: u64, vocab_size: u32) {
        self.id = id;
        self.rows.clear();
        self.donors.clear();
        self.paced = Paced::default();
        self.expected = Expected { step: id, vocab_size, ..Expected::default() };
    }
}
