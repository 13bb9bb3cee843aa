//! The `StepResult` block of `docs/plan.md`, parsed and checked against the step it answers.

use crate::error::{Error, Result};
use crate::plan::{TABLE_WORD, VERSION};

const MAGIC: i64 = i64::from_le_bytes(*b"TRNKRSLT");
const HEADER_BYTES: usize = 256;
const SECTIONS: [&str; 9] = [
    "sample_counts",
    "token_ids",
    "row_computed",
    "row_errors",
    "sampled_logprobs",
    "score_logprobs",
    "top_ids",
    "top_logprobs",
    "pooled_states",
];

/// Why a row of a step failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowError {
    NotFinite,
    GrammarViolated,
    Failed,
    GrammarTooSlow,
}

impl RowError {
    /// What the client is told.
    pub(crate) fn message(self) -> &'static str {
        match self {
            Self::NotFinite => "The model's logits were not finite for this request.",
            Self::GrammarViolated => "The output left the grammar of this request.",
            Self::Failed => "The model runner failed on this request.",
            Self::GrammarTooSlow => {
                "Matching the output against the grammar of this request takes too long: \
                 the grammar is too ambiguous. Give it fewer ways to derive the same text."
            }
        }
    }
}

/// What a result must look like to be the answer to a step.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Expected {
    pub(crate) step: u64,
    pub(crate) num_rows: usize,
    pub(crate) num_samples: usize,
    pub(crate) num_scores: usize,
    pub(crate) num_top: usize,
    pub(crate) num_pooled: usize,
    /// Whether any sample asked for its log-prob.
    pub(crate) sampled_logprobs: bool,
    pub(crate) vocab_size: u32,
}

/// A checked result: elements are read from the caller's bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepResult<'a> {
    sample_counts: Words<'a>,
    token_ids: Words<'a>,
    row_computed: Words<'a>,
    row_errors: Words<'a>,
    sampled_logprobs: Words<'a>,
    score_logprobs: Words<'a>,
    top_ids: Words<'a>,
    top_logprobs: Words<'a>,
    pooled_states: Words<'a>,
    /// Elements of one pooled state.
    pooled_width: usize,
}

/// A section of four-byte elements.
#[derive(Clone, Copy, Debug, Default)]
struct Words<'a>(&'a [[u8; 4]]);

impl Words<'_> {
    fn len(self) -> usize {
        self.0.len()
    }

    fn i32(self, index: usize) -> i32 {
        i32::from_le_bytes(self.0[index])
    }

    fn f32(self, index: usize) -> f32 {
        f32::from_le_bytes(self.0[index])
    }

    fn i32s(self) -> impl Iterator<Item = i32> {
        self.0.iter().map(|bytes| i32::from_le_bytes(*bytes))
    }
}

impl<'a> StepResult<'a> {
    /// Reads the block, and checks all that does not depend on what the rows are.
    pub(crate) fn parse(bytes: &'a [u8], expected: &Expected) -> Result<Self> {
        let words = bytes.get(..HEADER_BYTES).map(|header| header.as_chunks::<8>().0);
        let words = words.ok_or_else(|| {
            Error::Result(format!("{} bytes are less than its header", bytes.len()))
        })?;
        let word = |index: usize| i64::from_le_bytes(words[index]);
        if word(0) != MAGIC || word(1) != VERSION {
            return Err(Error::Result(format!(
                "magic {:#x} and version {} are not those of layout version {VERSION}",
                word(0),
                word(1)
            )));
        }
        if word(2) != expected.step as i64 {
            return Err(Error::WrongStep { actual: word(2), expected: expected.step });
        }
        let mut sections = [Words::default(); SECTIONS.len()];
        for (index, name) in SECTIONS.iter().enumerate() {
            let (offset, count) = (word(TABLE_WORD + 2 * index), word(TABLE_WORD + 2 * index + 1));
            sections[index] = section(bytes, offset, count).ok_or_else(|| {
                Error::Result(format!(
                    "section {name} at byte {offset} with {count} elements is not in the {} bytes",
                    bytes.len()
                ))
            })?;
        }
        let [
            sample_counts,
            token_ids,
            row_computed,
            row_errors,
            sampled_logprobs,
            score_logprobs,
            top_ids,
            top_logprobs,
            pooled_states,
        ] = sections;
        let result = Self {
            sample_counts,
            token_ids,
            row_computed,
            row_errors,
            sampled_logprobs,
            score_logprobs,
            top_ids,
            top_logprobs,
            pooled_states,
            pooled_width: pooled_states.len().checked_div(expected.num_pooled).unwrap_or(0),
        };
        result.check(expected)?;
        Ok(result)
    }

    fn check(&self, expected: &Expected) -> Result<()> {
        length("sample_counts", self.sample_counts.len(), expected.num_samples)?;
        let mut total = 0_usize;
        for count in self.sample_counts.i32s() {
            total += usize::try_from(count)
                .map_err(|_| Error::Result(format!("sample_counts has {count}")))?;
        }
        length("token_ids", self.token_ids.len(), total)?;
        if let Some(id) =
            self.token_ids.i32s().find(|&id| id < 0 || id as u32 >= expected.vocab_size)
        {
            return Err(Error::Result(format!(
                "token id {id} is not in a vocabulary of {}",
                expected.vocab_size
            )));
        }
        for (name, section) in
            [("row_computed", self.row_computed), ("row_errors", self.row_errors)]
        {
            if section.len() > 0 {
                length(name, section.len(), expected.num_rows)?;
            }
        }
        if let Some(error) = self.row_errors.i32s().find(|error| !(0..=4).contains(error)) {
            return Err(Error::Result(format!("row_errors has {error}; 0 to 4 are known")));
        }
        if expected.sampled_logprobs || self.sampled_logprobs.len() > 0 {
            length("sampled_logprobs", self.sampled_logprobs.len(), total)?;
        }
        if self.is_all_failed() {
            return Ok(());
        }
        length("score_logprobs", self.score_logprobs.len(), expected.num_scores)?;
        length("top_ids", self.top_ids.len(), expected.num_top)?;
        length("top_logprobs", self.top_logprobs.len(), expected.num_top)?;
        if expected.num_pooled > 0 && self.pooled_width == 0 {
            return Err(Error::Result("pooled_states is empty, this step expects some".into()));
        }
        let expected_elements = expected.num_pooled * self.pooled_width;
        length("pooled_states", self.pooled_states.len(), expected_elements)
    }

    /// Whether no row has a result: log-probs may then be left out.
    fn is_all_failed(&self) -> bool {
        self.row_errors.len() > 0 && self.row_errors.i32s().all(|error| error != 0)
    }

    /// Tokens that a sample entry yields.
    pub(crate) fn sample_count(&self, sample: usize) -> usize {
        self.sample_counts.i32(sample) as usize
    }

    pub(crate) fn token(&self, index: usize) -> u32 {
        self.token_ids.i32(index) as u32
    }

    /// Tokens that a row really computed, of those scheduled; `None` for another number than it can.
    pub(crate) fn row_computed(&self, row: usize, scheduled: u32) -> Option<u32> {
        if self.row_computed.len() == 0 {
            return Some(scheduled);
        }
        u32::try_from(self.row_computed.i32(row)).ok().filter(|&computed| computed <= scheduled)
    }

    pub(crate) fn row_error(&self, row: usize) -> Option<RowError> {
        if self.row_errors.len() == 0 {
            return None;
        }
        match self.row_errors.i32(row) {
            0 => None,
            1 => Some(RowError::NotFinite),
            2 => Some(RowError::GrammarViolated),
            4 => Some(RowError::GrammarTooSlow),
            _ => Some(RowError::Failed),
        }
    }

    pub(crate) fn sampled_logprob(&self, token: usize) -> f32 {
        self.sampled_logprobs.f32(token)
    }

    pub(crate) fn score(&self, index: usize) -> f32 {
        self.score_logprobs.f32(index)
    }

    /// The bytes of a pooled state: little-endian float32.
    pub(crate) fn pooled_state(&self, index: usize) -> &'a [u8] {
        let start = index * self.pooled_width;
        self.pooled_states.0[start..start + self.pooled_width].as_flattened()
    }

    pub(crate) fn top(&self, index: usize) -> (u32, f32) {
        (self.top_ids.i32(index) as u32, self.top_logprobs.f32(index))
    }
}

fn section(bytes: &[u8], offset: i64, count: i64) -> Option<Words<'_>> {
    let count = usize::try_from(count).ok()?;
    if count == 0 {
        return Some(Words::default());
    }
    let start = usize::try_from(offset).ok()?;
    let end = start.checked_add(count.checked_mul(4)?)?;
    Some(Words(bytes.get(start..end)?.as_chunks::<4>().0))
}

fn length(name: &str, actual: usize, expected: usize) -> Result<()> {
    if actual == expected {
        Ok(())
    } else {
        Err(Error::Result(format!("{name} has {actual} elements, this step expects {expected}")))
    }
}
