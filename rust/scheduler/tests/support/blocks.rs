//! The two step blocks, read and written from `docs/plan.md` alone.

use std::ops::Range;

fn word(bytes: &[u8], index: usize) -> i64 {
    i64::from_le_bytes(bytes[8 * index..8 * index + 8].try_into().unwrap())
}

/// A plan, parsed.
#[derive(Clone, Debug)]
pub struct Plan {
    pub step: u64,
    pub weight_epoch: i64,
    bytes: Vec<u8>,
}

/// Section numbers.
pub mod section {
    pub const CLOSED_SLOTS: usize = 0;
    pub const OPENED_SLOTS: usize = 1;
    pub const OPENED_FLOAT: usize = 2;
    pub const OPENED_INT: usize = 3;
    pub const OPENED_SEED: usize = 4;
    pub const BIAS_OFFSETS: usize = 5;
    pub const SUPPRESSED_OFFSETS: usize = 8;
    pub const SUPPRESSED_IDS: usize = 9;
    pub const OUTPUT_OFFSETS: usize = 10;
    pub const OUTPUT_IDS: usize = 11;
    pub const ROW_SLOT: usize = 12;
    pub const ROW_QUERY_LEN: usize = 13;
    pub const ROW_COMPUTED_LEN: usize = 14;
    pub const ROW_TOKEN_SOURCE: usize = 15;
    pub const TOKEN_IDS: usize = 16;
    pub const POSITIONS: usize = 17;
    pub const PAGE_WRITES: usize = 18;
    pub const PAGE_MOVES: usize = 19;
    pub const LOGIT_TOKENS: usize = 20;
    pub const LOGIT_TOP_N: usize = 21;
    pub const LOGIT_FLAGS: usize = 22;
    pub const SCORE_OFFSETS: usize = 23;
    pub const SCORE_IDS: usize = 24;
    pub const SAMPLE_LOGIT: usize = 25;
    pub const SAMPLE_SLOT: usize = 26;
    pub const SAMPLE_POSITION: usize = 27;
    pub const SAMPLE_FLAGS: usize = 28;
}

impl Plan {
    pub fn parse(arena: &[u8]) -> Self {
        assert_eq!(&arena[..8], b"TRNKPLAN");
        assert_eq!(word(arena, 1), 1);
        let total = word(arena, 4) as usize;
        let plan = Self {
            step: word(arena, 2) as u64,
            weight_epoch: word(arena, 3),
            bytes: arena[..total].to_vec(),
        };
        let mut end = 1024;
        for index in 0..29 {
            let (offset, count) = plan.place(index);
            assert_eq!(offset, end, "sections are contiguous");
            end = (offset + count * if index == section::OPENED_SEED { 8 } else { 4 })
                .next_multiple_of(8);
        }
        assert_eq!(end, total);
        assert_eq!(word(arena, 5) as usize, plan.ints(section::ROW_SLOT).len());
        assert_eq!(word(arena, 6) as usize, plan.ints(section::TOKEN_IDS).len());
        plan
    }

    fn place(&self, index: usize) -> (usize, usize) {
        (word(&self.bytes, 8 + 2 * index) as usize, word(&self.bytes, 9 + 2 * index) as usize)
    }

    pub fn ints(&self, index: usize) -> Vec<i32> {
        let (offset, count) = self.place(index);
        let bytes = &self.bytes[offset..offset + 4 * count];
        bytes.chunks(4).map(|bytes| i32::from_le_bytes(bytes.try_into().unwrap())).collect()
    }

    pub fn seeds(&self) -> Vec<u64> {
        let (offset, count) = self.place(section::OPENED_SEED);
        let bytes = &self.bytes[offset..offset + 8 * count];
        bytes.chunks(8).map(|bytes| u64::from_le_bytes(bytes.try_into().unwrap())).collect()
    }

    /// The lists of an offset section and its ids.
    pub fn lists(&self, offsets: usize, ids: usize) -> Vec<Vec<u32>> {
        let (offsets, ids) = (self.ints(offsets), self.ints(ids));
        let ranges = offsets.windows(2).map(|pair| pair[0] as usize..pair[1] as usize);
        ranges.map(|range: Range<usize>| ids[range].iter().map(|&id| id as u32).collect()).collect()
    }

    pub fn num_rows(&self) -> usize {
        self.ints(section::ROW_SLOT).len()
    }

    pub fn num_tokens(&self) -> usize {
        self.ints(section::TOKEN_IDS).len()
    }
}

/// A result, to be written.
#[derive(Clone, Debug, Default)]
pub struct StepResult {
    pub step: u64,
    pub sample_counts: Vec<i32>,
    pub token_ids: Vec<i32>,
    pub row_computed: Vec<i32>,
    pub row_errors: Vec<i32>,
    pub sampled_logprobs: Vec<f32>,
    pub score_logprobs: Vec<f32>,
    pub top_ids: Vec<i32>,
    pub top_logprobs: Vec<f32>,
    /// The bits of the elements.
    pub pooled_states: Vec<i32>,
}

impl StepResult {
    pub fn encode(&self) -> Vec<u8> {
        let floats = |values: &[f32]| values.iter().map(|v| v.to_bits() as i32).collect::<Vec<_>>();
        let sections = [
            self.sample_counts.clone(),
            self.token_ids.clone(),
            self.row_computed.clone(),
            self.row_errors.clone(),
            floats(&self.sampled_logprobs),
            floats(&self.score_logprobs),
            self.top_ids.clone(),
            floats(&self.top_logprobs),
            self.pooled_states.clone(),
        ];
        let mut bytes = vec![0; 256];
        bytes[..8].copy_from_slice(b"TRNKRSLT");
        bytes[8..16].copy_from_slice(&1_i64.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.step.to_le_bytes());
        for (index, section) in sections.iter().enumerate() {
            let place = 8 * (8 + 2 * index);
            let (offset, count) = (bytes.len() as i64, section.len() as i64);
            bytes[place..place + 8].copy_from_slice(&offset.to_le_bytes());
            bytes[place + 8..place + 16].copy_from_slice(&count.to_le_bytes());
            bytes.extend(section.iter().flat_map(|value| value.to_le_bytes()));
            bytes.resize(bytes.len().next_multiple_of(8), 0);
        }
        let total = bytes.len() as i64;
        bytes[32..40].copy_from_slice(&total.to_le_bytes());
        bytes
    }
}
