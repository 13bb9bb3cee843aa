//! Reading plan blocks and writing result blocks; `docs/plan.md` is the contract.

use crate::error::CpuError;

const PLAN_MAGIC: u64 = u64::from_le_bytes(*b"TRNKPLAN");
const RESULT_MAGIC: u64 = u64::from_le_bytes(*b"TRNKRSLT");
const VERSION: u64 = 1;
const SECTION_TABLE_WORD: usize = 8;
const PLAN_HEADER_BYTES: usize = 1024;
const RESULT_HEADER_BYTES: usize = 256;
const NUM_SECTIONS: usize = 29;
const NUM_RESULT_SECTIONS: usize = 9;

const HEADER_WORDS: usize = PLAN_HEADER_BYTES / 4;

/// Number and record width (in 32-bit words) of the plan's sections, in their order.
macro_rules! sections {
    ($($name:ident $index:literal $width:literal;)*) => {
        impl<'a> Plan<'a> {
            $(
                #[doc = concat!("Section ", $index, ".")]
                pub(crate) fn $name(&self) -> &'a [u32] {
                    self.section($index)
                }
            )*

            fn check_widths(&self) -> Result<(), CpuError> {
                $(
                    if !self.section($index).len().is_multiple_of($width) {
                        let name = stringify!($name);
                        return Err(CpuError::invalid(format!("{name} of the plan is cut off")));
                    }
                )*
                Ok(())
            }
        }
    };
}

sections! {
    closed_slots 0 1;
    opened_slots 1 1;
    opened_float 2 8;
    opened_int 3 8;
    opened_seed 4 2;
    bias_offsets 5 1;
    bias_ids 6 1;
    bias_values 7 1;
    suppressed_offsets 8 1;
    suppressed_ids 9 1;
    output_offsets 10 1;
    output_ids 11 1;
    row_slot 12 1;
    row_query_len 13 1;
    row_computed_len 14 1;
    row_token_source 15 1;
    token_ids 16 1;
    positions 17 1;
    page_writes 18 4;
    page_moves 19 6;
    logit_tokens 20 1;
    logit_top_n 21 1;
    logit_flags 22 1;
    score_offsets 23 1;
    score_ids 24 1;
    sample_logit 25 1;
    sample_slot 26 1;
    sample_position 27 1;
    sample_flags 28 1;
}

/// A plan block, checked to lie within its words and to be consistent in itself.
#[derive(Clone)]
pub(crate) struct Plan<'a> {
    words: &'a [u32],
    ranges: [(usize, usize); NUM_SECTIONS],
    pub(crate) step: u64,
}

fn long(words: &[u32], index: usize) -> u64 {
    u64::from(words[2 * index]) | u64::from(words[2 * index + 1]) << 32
}

/// Little-endian words.
pub(crate) fn le_words(bytes: &[u8]) -> Vec<u32> {
    let (words, _) = bytes.as_chunks::<4>();
    words.iter().map(|&word| u32::from_le_bytes(word)).collect()
}

/// The words of the block at the start of an arena.
///
/// # Errors
/// It is no plan of this layout version, or cut off.
pub(crate) fn plan_words(arena: &[u8]) -> Result<Vec<u32>, CpuError> {
    let header = le_words(&arena[..arena.len().min(PLAN_HEADER_BYTES)]);
    check_header(&header)?;
    let total = long(&header, 4) as usize;
    if total > arena.len() || total < PLAN_HEADER_BYTES {
        return Err(CpuError::invalid("the plan is cut off"));
    }
    Ok(le_words(&arena[..total]))
}

fn check_header(words: &[u32]) -> Result<(), CpuError> {
    if words.len() < HEADER_WORDS || long(words, 0) != PLAN_MAGIC || long(words, 1) != VERSION {
        return Err(CpuError::invalid(format!("not a plan of layout version {VERSION}")));
    }
    Ok(())
}

impl<'a> Plan<'a> {
    /// Check a block.
    ///
    /// # Errors
    /// It is malformed.
    pub(crate) fn new(words: &'a [u32]) -> Result<Plan<'a>, CpuError> {
        check_header(words)?;
        let mut ranges = [(0, 0); NUM_SECTIONS];
        for (index, range) in ranges.iter_mut().enumerate() {
            let start = long(words, SECTION_TABLE_WORD + 2 * index) as usize / 4;
            let count = long(words, SECTION_TABLE_WORD + 2 * index + 1) as usize;
            let count = if index == 4 { 2 * count } else { count };
            let end = start.checked_add(count).filter(|&end| end <= words.len());
            let end = end.ok_or_else(|| CpuError::invalid("a section of the plan is cut off"))?;
            *range = (start, end);
        }
        let plan = Plan { words, ranges, step: long(words, 2) };
        plan.check_widths()?;
        plan.check_counts()?;
        Ok(plan)
    }

    fn section(&self, index: usize) -> &'a [u32] {
        let (start, end) = self.ranges[index];
        &self.words[start..end]
    }

    /// Sections that belong together have as many records as each other.
    fn check_counts(&self) -> Result<(), CpuError> {
        let opened = self.opened_slots().len();
        let rows = self.row_slot().len();
        let tokens = self.token_ids().len();
        let logits = self.logit_tokens().len();
        let samples = self.sample_logit().len();
        let total: usize = self.row_query_len().iter().map(|&count| count as usize).sum();
        let consistent = self.opened_float().len() == 8 * opened
            && self.opened_int().len() == 8 * opened
            && self.opened_seed().len() == 2 * opened
            && is_offsets(self.bias_offsets(), opened, self.bias_ids().len())
            && self.bias_values().len() == self.bias_ids().len()
            && is_offsets(self.suppressed_offsets(), opened, self.suppressed_ids().len())
            && is_offsets(self.output_offsets(), opened, self.output_ids().len())
            && self.row_query_len().len() == rows
            && self.row_query_len().iter().all(|&count| (1..1 << 24).contains(&count))
            && self.row_computed_len().len() == rows
            && self.row_token_source().len() == rows
            && tokens == total
            && self.positions().len() == tokens
            && self.logit_tokens().iter().all(|&token| (token as usize) < tokens)
            && self.logit_top_n().len() == logits
            && self.logit_flags().len() == logits
            && is_offsets(self.score_offsets(), logits, self.score_ids().len())
            && self.sample_logit().iter().all(|&logit| (logit as usize) < logits)
            && self.sample_slot().len() == samples
            && self.sample_position().len() == samples
            && self.sample_flags().len() == samples;
        if consistent {
            return Ok(());
        }
        Err(CpuError::invalid("the sections of the plan contradict one another"))
    }
}

/// Whether offsets are `[0, ..., end]`, ascending, one more than there are lists. Without lists they
/// may be absent.
fn is_offsets(offsets: &[u32], lists: usize, end: usize) -> bool {
    if offsets.is_empty() {
        return lists == 0 && end == 0;
    }
    offsets.len() == lists + 1
        && offsets[0] == 0
        && offsets[lists] as usize == end
        && offsets.windows(2).all(|pair| pair[0] <= pair[1])
}

/// Entries of list `index` between offsets.
pub(crate) fn list<'a>(offsets: &[u32], items: &'a [u32], index: usize) -> &'a [u32] {
    &items[offsets[index] as usize..offsets[index + 1] as usize]
}

/// The sections of a result.
#[derive(Default)]
pub(crate) struct StepResult {
    pub(crate) token_ids: Vec<u32>,
    pub(crate) row_errors: Vec<u32>,
    pub(crate) sampled_logprobs: Vec<f32>,
    pub(crate) score_logprobs: Vec<f32>,
    pub(crate) top_ids: Vec<u32>,
    pub(crate) top_logprobs: Vec<f32>,
    pub(crate) pooled_states: Vec<f32>,
}

impl StepResult {
    /// The block.
    pub(crate) fn encode(&self, step: u64) -> Vec<u8> {
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect();
        let sections: [Vec<u32>; NUM_RESULT_SECTIONS] = [
            vec![1; self.token_ids.len()],
            self.token_ids.clone(),
            Vec::new(),
            self.row_errors.clone(),
            bits(&self.sampled_logprobs),
            bits(&self.score_logprobs),
            self.top_ids.clone(),
            bits(&self.top_logprobs),
            bits(&self.pooled_states),
        ];
        let mut header = [0_u64; RESULT_HEADER_BYTES / 8];
        header[..3].copy_from_slice(&[RESULT_MAGIC, VERSION, step]);
        let mut offset = RESULT_HEADER_BYTES;
        for (index, section) in sections.iter().enumerate() {
            header[SECTION_TABLE_WORD + 2 * index] = offset as u64;
            header[SECTION_TABLE_WORD + 2 * index + 1] = section.len() as u64;
            offset += (4 * section.len()).next_multiple_of(8);
        }
        header[4] = offset as u64;
        let mut block = Vec::with_capacity(offset);
        block.extend(header.iter().flat_map(|word| word.to_le_bytes()));
        for section in &sections {
            block.extend(section.iter().flat_map(|word| word.to_le_bytes()));
            block.resize(block.len().next_multiple_of(8), 0);
        }
        block
    }
}

#[cfg(test)]
pub(crate) fn build_plan(step: u64, sections: &[(usize, Vec<u32>)]) -> Vec<u32> {
    let mut words = vec![0_u32; HEADER_WORDS];
    let put = |words: &mut Vec<u32>, index: usize, value: u64| {
        words[2 * index] = value as u32;
        words[2 * index + 1] = (value >> 32) as u32;
    };
    for index in 0..NUM_SECTIONS {
        let empty = Vec::new();
        let section = sections.iter().find(|(i, _)| *i == index).map_or(&empty, |(_, s)| s);
        let offset = 4 * words.len() as u64;
        put(&mut words, SECTION_TABLE_WORD + 2 * index, offset);
        let count = if index == 4 { section.len() / 2 } else { section.len() };
        put(&mut words, SECTION_TABLE_WORD + 2 * index + 1, count as u64);
        words.extend_from_slice(section);
        words.resize(words.len().next_multiple_of(2), 0);
    }
    put(&mut words, 0, PLAN_MAGIC);
    put(&mut words, 1, VERSION);
    put(&mut words, 2, step);
    let total = 4 * words.len() as u64;
    put(&mut words, 4, total);
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_are_found() {
        let words = build_plan(
            7,
            &[
                (12, vec![3]),
                (13, vec![2]),
                (14, vec![0]),
                (15, vec![0]),
                (16, vec![5, 6]),
                (17, vec![0, 1]),
            ],
        );
        let plan = Plan::new(&words).unwrap();
        assert_eq!((plan.step, plan.row_slot(), plan.token_ids()), (7, &[3][..], &[5, 6][..]));
    }

    #[test]
    fn contradictions_and_damage_are_errors() {
        let words = build_plan(7, &[(12, vec![3]), (13, vec![2])]);
        assert!(Plan::new(&words).is_err());
        let good = build_plan(7, &[]);
        assert!(Plan::new(&good).is_ok());
        let arena = |words: &[u32]| -> Vec<u8> {
            words.iter().flat_map(|word| word.to_le_bytes()).collect()
        };
        assert_eq!(plan_words(&arena(&good)).unwrap(), good);
        assert!(plan_words(&arena(&good)[..1000]).is_err());
        for index in [0, 2, 8] {
            let mut bad = good.clone();
            bad[index] ^= 0x7fff_ff00;
            bad[index + 1] ^= 0x7fff_ffff;
            assert!(plan_words(&arena(&bad)).is_err(), "word {index}");
        }
        let mut bad = good;
        bad[18] ^= 0x7fff_ff00;
        assert!(Plan::new(&bad).is_err());
    }

    #[test]
    fn results_are_aligned_blocks() {
        let result = StepResult { token_ids: vec![1, 2, 3], ..StepResult::default() };
        let block = result.encode(9);
        assert_eq!(block.len(), RESULT_HEADER_BYTES + 16 + 16);
        assert_eq!(&block[..8], b"TRNKRSLT");
        assert_eq!(block[16], 9);
    }
}
