//! A runner that keeps its own KV pages, checks every row that it reads, and samples
//! deterministically from what the KV really holds.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use rand::{Rng, RngExt};
use scheduler::Config;

use super::blocks::{Plan, StepResult, section as s};
use super::oracle::{self, Digest};

/// State of a slot.
#[derive(Clone, Debug, Default)]
struct Slot {
    prompt_len: u32,
    min_new_tokens: u32,
    seed: u64,
    suppressed: Vec<u32>,
    outputs: Vec<u32>,
    last_sampled: Option<u32>,
    pages: BTreeMap<usize, usize>,
}

/// How often the runner does something out of the ordinary, in percent per row.
#[derive(Clone, Copy, Debug, Default)]
pub struct Mischief {
    pub row_error: u32,
    pub cut_row: u32,
    pub no_token: u32,
    pub more_tokens: u32,
}

pub struct Runner {
    page_size: usize,
    vocab_size: u32,
    pages: Vec<Vec<Digest>>,
    slots: BTreeMap<i32, Slot>,
    /// Pages that each step in flight reads, and for which slot (-1: to copy from).
    reading: VecDeque<BTreeSet<(usize, i32)>>,
    pub mischief: Mischief,
    /// Rows planned for a continuation that did not come may read what is not there.
    pub lenient: bool,
}

/// Written to KV rows that the runner did not compute.
const GARBAGE: Digest = 0xdead_beef;

/// One row of a plan.
struct Row {
    slot: i32,
    start: usize,
    tokens: Vec<u32>,
    first: usize,
}

impl Runner {
    pub fn new(config: &Config) -> Self {
        Self {
            page_size: config.page_size as usize,
            vocab_size: config.vocab_size,
            pages: vec![vec![0; config.page_size as usize]; config.num_pages as usize],
            slots: BTreeMap::new(),
            reading: VecDeque::new(),
            mischief: Mischief::default(),
            lenient: false,
        }
    }

    pub fn execute(&mut self, plan: &Plan, rng: &mut impl Rng) -> StepResult {
        self.close_and_open(plan);
        self.write_page_table(plan);
        self.reading.push_back(BTreeSet::new());
        self.move_pages(plan);
        let rows = self.rows(plan);
        let mut result = StepResult { step: plan.step, ..StepResult::default() };
        let mut contexts: Vec<Digest> = Vec::new();
        for row in &rows {
            let computed = self.compute(row, rng, &mut contexts);
            result.row_computed.push(computed as i32);
            let error = rng.random_range(0..100) < self.mischief.row_error;
            result.row_errors.push(if error { rng.random_range(1..=3) } else { 0 });
        }
        self.score(plan, &contexts, &mut result);
        self.draw(plan, &rows, &contexts, &mut result, rng);
        if self.mischief.cut_row == 0 && rng.random_bool(0.5) {
            result.row_computed.clear();
        }
        if result.row_errors.iter().all(|&error| error == 0) && rng.random_bool(0.5) {
            result.row_errors.clear();
        }
        result
    }

    /// The oldest step's result was committed.
    pub fn committed(&mut self) {
        self.reading.pop_front();
    }

    /// A page that a step in flight reads must not change under it.
    fn assert_unread(&self, page: usize, writer: i32) {
        let in_flight = self.reading.iter().flatten();
        let reader = in_flight.copied().find(|&(read, slot)| read == page && slot != writer);
        assert!(reader.is_none(), "slot {writer} writes to page {page}, in use by {reader:?}");
    }

    fn close_and_open(&mut self, plan: &Plan) {
        for slot in plan.ints(s::CLOSED_SLOTS) {
            assert!(self.slots.remove(&slot).is_some(), "slot {slot} is closed and was not open");
        }
        let ints = plan.ints(s::OPENED_INT);
        let suppressed = plan.lists(s::SUPPRESSED_OFFSETS, s::SUPPRESSED_IDS);
        let outputs = plan.lists(s::OUTPUT_OFFSETS, s::OUTPUT_IDS);
        for (index, slot) in plan.ints(s::OPENED_SLOTS).into_iter().enumerate() {
            let state = Slot {
                prompt_len: ints[8 * index + 1] as u32,
                min_new_tokens: ints[8 * index + 2] as u32,
                seed: plan.seeds()[index],
                suppressed: suppressed[index].clone(),
                outputs: outputs[index].clone(),
                ..Slot::default()
            };
            assert!(self.slots.insert(slot, state).is_none(), "slot {slot} is opened twice");
        }
    }

    fn write_page_table(&mut self, plan: &Plan) {
        for write in plan.ints(s::PAGE_WRITES).chunks(4) {
            let [group, slot, index, page] = write else { unreachable!() };
            assert_eq!(*group, 0);
            assert!(*page > 0 && (*page as usize) < self.pages.len(), "page {page}");
            let slot = self.slots.get_mut(slot).expect("a page is written to an open slot");
            slot.pages.insert(*index as usize, *page as usize);
        }
    }

    fn move_pages(&mut self, plan: &Plan) {
        let mut sources = BTreeSet::new();
        let mut targets = BTreeSet::new();
        for copy in plan.ints(s::PAGE_MOVES).chunks(6) {
            let [0, from, 0, to, tokens, 0] = *copy else { panic!("page move {copy:?}") };
            sources.insert(from);
            assert!(targets.insert(to), "page {to} is the target of two moves");
            let (from, to, tokens) = (from as usize, to as usize, tokens as usize);
            assert!(tokens > 0 && tokens <= self.page_size);
            self.pages[to].fill(GARBAGE);
            self.assert_unread(to, -1);
            self.reading.back_mut().expect("this step").insert((from, -1));
            let rows = self.pages[from][..tokens].to_vec();
            self.pages[to][..tokens].copy_from_slice(&rows);
        }
        assert!(sources.is_disjoint(&targets), "a page is source and target in one step");
    }

    fn rows(&self, plan: &Plan) -> Vec<Row> {
        let (slots, lengths) = (plan.ints(s::ROW_SLOT), plan.ints(s::ROW_QUERY_LEN));
        let (starts, sources) = (plan.ints(s::ROW_COMPUTED_LEN), plan.ints(s::ROW_TOKEN_SOURCE));
        let (ids, positions) = (plan.ints(s::TOKEN_IDS), plan.ints(s::POSITIONS));
        let distinct: BTreeSet<_> = slots.iter().collect();
        assert_eq!(distinct.len(), slots.len(), "a slot has two rows");
        let mut first = 0;
        let mut rows = Vec::new();
        for index in 0..slots.len() {
            let (start, length) = (starts[index] as usize, lengths[index] as usize);
            assert!(length >= 1);
            let mut tokens: Vec<u32> =
                ids[first..first + length].iter().map(|&id| id as u32).collect();
            for (offset, &position) in positions[first..first + length].iter().enumerate() {
                assert_eq!(position as usize, start + offset);
            }
            if sources[index] == 1 {
                assert_eq!(tokens[length - 1], 0);
                let slot = &self.slots[&slots[index]];
                tokens[length - 1] = slot.last_sampled.unwrap_or_else(|| {
                    assert!(self.lenient, "the slot has sampled nothing");
                    0
                });
            }
            rows.push(Row { slot: slots[index], start, tokens, first });
            first += length;
        }
        assert_eq!(first, ids.len());
        rows
    }

    /// Writes the row's KV and appends the digest after each of its tokens to `contexts`. Returns how
    /// many tokens it computed.
    fn compute(&mut self, row: &Row, rng: &mut impl Rng, contexts: &mut Vec<Digest>) -> usize {
        let slot = &self.slots[&row.slot];
        let place = |position: usize| {
            let page = slot.pages.get(&(position / self.page_size));
            (*page.expect("every position has a page"), position % self.page_size)
        };
        let mut context = 0;
        for position in 0..row.start {
            let (page, index) = place(position);
            let stored = self.pages[page][index];
            // The vocabulary is small: the token that the row was computed from can be found.
            let follows =
                (0..self.vocab_size).any(|token| oracle::extend(context, token) == stored);
            assert!(
                follows || self.lenient,
                "position {position} of slot {} holds another prefix's KV (page {page})",
                row.slot
            );
            context = stored;
        }
        let cut = rng.random_range(0..100) < self.mischief.cut_row;
        let computed = if cut { rng.random_range(0..row.tokens.len()) } else { row.tokens.len() };
        let mut writes = Vec::new();
        for (offset, &token) in row.tokens.iter().enumerate() {
            context = oracle::extend(context, token);
            contexts.push(context);
            writes.push((
                place(row.start + offset),
                if offset < computed { context } else { GARBAGE },
            ));
        }
        let all = row.start + row.tokens.len();
        let pages: Vec<_> = (0..all).map(|position| (place(position).0, row.slot)).collect();
        for ((page, index), value) in writes {
            if self.pages[page][index] != value {
                self.assert_unread(page, row.slot);
            }
            self.pages[page][index] = value;
        }
        self.reading.back_mut().expect("this step").extend(pages);
        computed
    }

    fn score(&self, plan: &Plan, contexts: &[Digest], result: &mut StepResult) {
        let tokens = plan.ints(s::LOGIT_TOKENS);
        assert!(tokens.is_sorted_by(|a, b| a < b), "logit positions ascend");
        let scored = plan.lists(s::SCORE_OFFSETS, s::SCORE_IDS);
        let flags = plan.ints(s::LOGIT_FLAGS);
        assert_eq!(flags.len(), tokens.len());
        for (index, top_n) in plan.ints(s::LOGIT_TOP_N).into_iter().enumerate() {
            let context = contexts[tokens[index] as usize];
            for &id in &scored[index] {
                result.score_logprobs.push(oracle::logprob(context, id));
            }
            for (logprob, id) in oracle::top(context, top_n as usize, self.vocab_size) {
                result.top_ids.push(id as i32);
                result.top_logprobs.push(logprob as f32);
            }
            if flags[index] & 1 != 0 {
                result.pooled_states.extend([context as i32, (context >> 32) as i32]);
            }
        }
    }

    fn draw(
        &mut self,
        plan: &Plan,
        rows: &[Row],
        contexts: &[Digest],
        result: &mut StepResult,
        rng: &mut impl Rng,
    ) {
        let logit_tokens = plan.ints(s::LOGIT_TOKENS);
        let positions = plan.ints(s::SAMPLE_POSITION);
        let wanted = plan.ints(s::SAMPLE_FLAGS).contains(&1);
        for (index, &slot_id) in plan.ints(s::SAMPLE_SLOT).iter().enumerate() {
            let flat = logit_tokens[plan.ints(s::SAMPLE_LOGIT)[index] as usize] as usize;
            let row_index = rows.iter().position(|row| row.slot == slot_id).expect("a row");
            let row = &rows[row_index];
            assert_eq!(flat, row.first + row.tokens.len() - 1, "the row's last token");
            assert_eq!(positions[index] as usize, row.start + row.tokens.len());
            let complete = result.row_computed[row_index] as usize == row.tokens.len();
            let mut count = 1;
            if !complete || rng.random_range(0..100) < self.mischief.no_token {
                count = 0;
            } else if rng.random_range(0..100) < self.mischief.more_tokens {
                count = rng.random_range(2..=4);
            }
            result.sample_counts.push(count);
            let slot = self.slots.get_mut(&slot_id).expect("an open slot");
            let mut context = contexts[flat];
            for position in (positions[index] as u32..).take(count as usize) {
                let held = position - slot.prompt_len < slot.min_new_tokens;
                let suppressed = if held { &slot.suppressed[..] } else { &[] };
                let token = oracle::sample(
                    context,
                    slot.seed,
                    &slot.outputs,
                    position,
                    suppressed,
                    self.vocab_size,
                );
                result.token_ids.push(token as i32);
                if wanted {
                    result.sampled_logprobs.push(oracle::logprob(context, token));
                }
                slot.outputs.push(token);
                slot.last_sampled = Some(token);
                context = oracle::extend(context, token);
            }
        }
    }
}
