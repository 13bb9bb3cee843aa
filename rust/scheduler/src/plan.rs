//! The `Plan` block of `docs/plan.md`: sections are collected here and written into a caller's bytes.
//!
//! This module knows the layout and counts bytes; what a step computes is decided in `planner.rs`.

const MAGIC: i64 = i64::from_le_bytes(*b"TRNKPLAN");
/// Version of the layout of both blocks.
pub(crate) const VERSION: i64 = 1;
/// First word of the table of `(offset, count)` in both blocks.
pub(crate) const TABLE_WORD: usize = 8;
const HEADER_BYTES: usize = 1024;
const NUM_SECTIONS: usize = 29;

/// Header, padding of every section, and the closing offset of each offset section.
pub(crate) const OVERHEAD_BYTES: usize = HEADER_BYTES + 8 * NUM_SECTIONS + 4 * 4;
/// A scheduled token: id and position.
pub(crate) const TOKEN_BYTES: usize = 8;
/// An entering sequence, without its bias, suppressed and output ids.
pub(crate) const OPENED_BYTES: usize = 4 + 32 + 32 + 8 + 3 * 4;
/// Page table entry.
pub(crate) const PAGE_WRITE_BYTES: usize = 16;
/// Copy of a page.
pub(crate) const PAGE_MOVE_BYTES: usize = 24;
/// A row without its tokens.
pub(crate) const ROW_BYTES: usize = 16;
/// A logit position without the ids scored there.
pub(crate) const LOGIT_BYTES: usize = 16;
/// A sample entry.
pub(crate) const SAMPLE_BYTES: usize = 16;
/// A running sequence that gets its next token.
pub(crate) const RUNNING_ROW_BYTES: usize =
    ROW_BYTES + TOKEN_BYTES + PAGE_WRITE_BYTES + LOGIT_BYTES + 4 + SAMPLE_BYTES;

/// Bit of the flags column of `opened_int`: the sequence has a grammar.
pub(crate) const FLAG_GRAMMAR: i32 = 1;
/// The same: its samples' log-probs are those of the distribution that they are drawn from.
pub(crate) const FLAG_PROCESSED: i32 = 2;
/// Bit of `logit_flags`: the pooled state is wanted.
const LOGIT_POOLED: i32 = 1;
/// Bit of `sample_flags`: the sampled token's log-prob is wanted.
const SAMPLE_LOGPROB: i32 = 1;

/// Static parameters of a sequence that enters a slot.
#[derive(Debug)]
pub(crate) struct Opened<'a> {
    pub(crate) slot: u32,
    /// temperature, `top_p`, `min_p`, frequency, presence and repetition penalty.
    pub(crate) floats: [f32; 6],
    pub(crate) top_k: u32,
    pub(crate) prompt_len: u32,
    pub(crate) min_new_tokens: u32,
    pub(crate) flags: i32,
    /// Id of the request whose grammar holds, if one does.
    pub(crate) grammar_of: Option<u64>,
    pub(crate) seed: u64,
    pub(crate) bias: &'a [(u32, f32)],
    pub(crate) suppressed: &'a [u32],
    pub(crate) output_ids: &'a [u32],
}

impl Opened<'_> {
    /// Bytes that the records of this sequence take.
    pub(crate) fn bytes(&self) -> usize {
        OPENED_BYTES + 8 * self.bias.len() + 4 * (self.suppressed.len() + self.output_ids.len())
    }
}

/// Tokens of one sequence that a step computes.
#[derive(Debug)]
pub(crate) struct Row<'a> {
    pub(crate) slot: u32,
    pub(crate) computed_len: u32,
    /// Ids known to the host.
    pub(crate) token_ids: &'a [u32],
    /// One more token follows: the slot's last sampled one, which is on the device.
    pub(crate) last_sampled: bool,
}

impl Row<'_> {
    pub(crate) fn query_len(&self) -> u32 {
        self.token_ids.len() as u32 + u32::from(self.last_sampled)
    }
}

/// A draw from the distribution at one logit position.
#[derive(Debug)]
pub(crate) struct Sample {
    pub(crate) logit: u32,
    pub(crate) slot: u32,
    pub(crate) position: u32,
    pub(crate) logprob: bool,
}

/// The sections of the plan that is being made; reused from step to step.
#[derive(Debug, Default)]
pub(crate) struct PlanWriter {
    closed_slots: Vec<i32>,
    opened_slots: Vec<i32>,
    opened_float: Vec<f32>,
    opened_int: Vec<i32>,
    opened_seed: Vec<i64>,
    bias: Lists,
    bias_values: Vec<f32>,
    suppressed: Lists,
    outputs: Lists,
    row_slot: Vec<i32>,
    row_query_len: Vec<i32>,
    row_computed_len: Vec<i32>,
    row_token_source: Vec<i32>,
    token_ids: Vec<i32>,
    positions: Vec<i32>,
    page_writes: Vec<i32>,
    page_moves: Vec<i32>,
    logit_tokens: Vec<i32>,
    logit_top_n: Vec<i32>,
    logit_flags: Vec<i32>,
    scores: Lists,
    sample_logit: Vec<i32>,
    sample_slot: Vec<i32>,
    sample_position: Vec<i32>,
    sample_flags: Vec<i32>,
    bytes: usize,
}

/// Lists of ids, one per record, as the block stores them: `offsets[i]..offsets[i + 1]` of `ids`.
#[derive(Debug, Default)]
struct Lists {
    offsets: Vec<i32>,
    ids: Vec<i32>,
}

impl Lists {
    fn clear(&mut self) {
        self.offsets.clear();
        self.offsets.push(0);
        self.ids.clear();
    }

    fn push(&mut self, ids: impl Iterator<Item = u32>) {
        self.ids.extend(ids.map(|id| id as i32));
        self.offsets.push(self.ids.len() as i32);
    }
}

impl PlanWriter {
    /// Starts the next plan.
    pub(crate) fn clear(&mut self) {
        for section in [
            &mut self.closed_slots,
            &mut self.opened_slots,
            &mut self.opened_int,
            &mut self.row_slot,
            &mut self.row_query_len,
            &mut self.row_computed_len,
            &mut self.row_token_source,
            &mut self.token_ids,
            &mut self.positions,
            &mut self.page_writes,
            &mut self.page_moves,
            &mut self.logit_tokens,
            &mut self.logit_top_n,
            &mut self.logit_flags,
            &mut self.sample_logit,
            &mut self.sample_slot,
            &mut self.sample_position,
            &mut self.sample_flags,
        ] {
            section.clear();
        }
        self.opened_float.clear();
        self.bias_values.clear();
        self.opened_seed.clear();
        for lists in [&mut self.bias, &mut self.suppressed, &mut self.outputs, &mut self.scores] {
            lists.clear();
        }
        self.bytes = OVERHEAD_BYTES;
    }

    /// Upper bound of the block's size as collected so far.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn num_rows(&self) -> usize {
        self.row_slot.len()
    }

    pub(crate) fn num_tokens(&self) -> usize {
        self.token_ids.len()
    }

    pub(crate) fn num_samples(&self) -> usize {
        self.sample_slot.len()
    }

    pub(crate) fn num_scores(&self) -> usize {
        self.scores.ids.len()
    }

    pub(crate) fn close(&mut self, slot: u32) {
        self.closed_slots.push(slot as i32);
        self.bytes += 4;
    }

    pub(crate) fn open(&mut self, opened: &Opened) {
        self.opened_slots.push(opened.slot as i32);
        self.opened_float.extend(opened.floats);
        self.opened_float.extend([0.0; 2]);
        let (min_sampled, min_masked, request) = match opened.grammar_of {
            None => (opened.min_new_tokens, 0, 0),
            Some(request) => (0, opened.min_new_tokens, request),
        };
        self.opened_int.extend([
            opened.top_k as i32,
            opened.prompt_len as i32,
            min_sampled as i32,
            0,
            opened.flags,
            min_masked as i32,
            request as i32,
            (request >> 32) as i32,
        ]);
        self.opened_seed.push(opened.seed as i64);
        self.bias.push(opened.bias.iter().map(|&(id, _)| id));
        self.bias_values.extend(opened.bias.iter().map(|&(_, value)| value));
        self.suppressed.push(opened.suppressed.iter().copied());
        self.outputs.push(opened.output_ids.iter().copied());
        self.bytes += opened.bytes();
    }

    /// Adds a row and returns the flat index of its first token.
    pub(crate) fn row(&mut self, row: &Row) -> u32 {
        let first = self.token_ids.len();
        let query_len = row.query_len();
        self.row_slot.push(row.slot as i32);
        self.row_query_len.push(query_len as i32);
        self.row_computed_len.push(row.computed_len as i32);
        self.row_token_source.push(i32::from(row.last_sampled));
        self.token_ids.extend(row.token_ids.iter().map(|&id| id as i32));
        if row.last_sampled {
            self.token_ids.push(0);
        }
        self.positions.extend((row.computed_len..row.computed_len + query_len).map(|p| p as i32));
        self.bytes += ROW_BYTES + TOKEN_BYTES * query_len as usize;
        first as u32
    }

    pub(crate) fn page_write(&mut self, slot: u32, index: u32, page: u32) {
        self.page_writes.extend([0, slot as i32, index as i32, page as i32]);
        self.bytes += PAGE_WRITE_BYTES;
    }

    /// Copies the first `tokens` tokens of a page to another, both on the device.
    pub(crate) fn page_move(&mut self, from: u32, to: u32, tokens: u32) {
        self.page_moves.extend([0, from as i32, 0, to as i32, tokens as i32, 0]);
        self.bytes += PAGE_MOVE_BYTES;
    }

    /// Wants logits at a flat token, and returns the logit position.
    pub(crate) fn logit(
        &mut self,
        token: u32,
        top_n: u32,
        scored: impl Iterator<Item = u32>,
    ) -> u32 {
        self.logit_tokens.push(token as i32);
        self.logit_top_n.push(top_n as i32);
        self.logit_flags.push(0);
        let before = self.scores.ids.len();
        self.scores.push(scored);
        self.bytes += LOGIT_BYTES + 4 * (self.scores.ids.len() - before);
        self.logit_tokens.len() as u32 - 1
    }

    /// Wants the pooled state at a flat token, and nothing else there.
    pub(crate) fn pooled(&mut self, token: u32) {
        self.logit(token, 0, std::iter::empty());
        self.logit_flags.pop();
        self.logit_flags.push(LOGIT_POOLED);
    }

    pub(crate) fn sample(&mut self, sample: &Sample) {
        self.sample_logit.push(sample.logit as i32);
        self.sample_slot.push(sample.slot as i32);
        self.sample_position.push(sample.position as i32);
        self.sample_flags.push(if sample.logprob { SAMPLE_LOGPROB } else { 0 });
        self.bytes += SAMPLE_BYTES;
    }

    /// Writes the block to the start of `out`, which must hold `bytes()`.
    pub(crate) fn write(&self, step: u64, weight_epoch: u64, out: &mut [u8]) {
        let sections: [Section; NUM_SECTIONS] = [
            Section::I32(&self.closed_slots),
            Section::I32(&self.opened_slots),
            Section::F32(&self.opened_float),
            Section::I32(&self.opened_int),
            Section::I64(&self.opened_seed),
            Section::I32(&self.bias.offsets),
            Section::I32(&self.bias.ids),
            Section::F32(&self.bias_values),
            Section::I32(&self.suppressed.offsets),
            Section::I32(&self.suppressed.ids),
            Section::I32(&self.outputs.offsets),
            Section::I32(&self.outputs.ids),
            Section::I32(&self.row_slot),
            Section::I32(&self.row_query_len),
            Section::I32(&self.row_computed_len),
            Section::I32(&self.row_token_source),
            Section::I32(&self.token_ids),
            Section::I32(&self.positions),
            Section::I32(&self.page_writes),
            Section::I32(&self.page_moves),
            Section::I32(&self.logit_tokens),
            Section::I32(&self.logit_top_n),
            Section::I32(&self.logit_flags),
            Section::I32(&self.scores.offsets),
            Section::I32(&self.scores.ids),
            Section::I32(&self.sample_logit),
            Section::I32(&self.sample_slot),
            Section::I32(&self.sample_position),
            Section::I32(&self.sample_flags),
        ];
        let mut header = [0_i64; HEADER_BYTES / 8];
        header[0] = MAGIC;
        header[1] = VERSION;
        header[2] = step as i64;
        header[3] = weight_epoch as i64;
        header[5] = self.num_rows() as i64;
        header[6] = self.num_tokens() as i64;
        let mut offset = HEADER_BYTES;
        for (index, section) in sections.iter().enumerate() {
            header[TABLE_WORD + 2 * index] = offset as i64;
            header[TABLE_WORD + 2 * index + 1] = section.len() as i64;
            offset += section.write(&mut out[offset..]);
        }
        header[4] = offset as i64;
        Section::I64(&header).write(out);
    }
}

/// Elements of one section.
enum Section<'a> {
    I32(&'a [i32]),
    F32(&'a [f32]),
    I64(&'a [i64]),
}

impl Section<'_> {
    fn len(&self) -> usize {
        match self {
            Self::I32(values) => values.len(),
            Self::F32(values) => values.len(),
            Self::I64(values) => values.len(),
        }
    }

    /// Writes the elements and returns their size, rounded up to 8 bytes.
    fn write(&self, out: &mut [u8]) -> usize {
        match self {
            Self::I32(values) => copy(values, out, i32::to_le_bytes),
            Self::F32(values) => copy(values, out, f32::to_le_bytes),
            Self::I64(values) => copy(values, out, i64::to_le_bytes),
        }
    }
}

fn copy<T: Copy, const N: usize>(
    values: &[T],
    out: &mut [u8],
    bytes: impl Fn(T) -> [u8; N],
) -> usize {
    let (chunks, _) = out[..values.len() * N].as_chunks_mut::<N>();
    for (chunk, &value) in chunks.iter_mut().zip(values) {
        *chunk = bytes(value);
    }
    (values.len() * N).next_multiple_of(8)
}
