//! Which items a step's attention consists of, and running them.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use crate::kernels::Kernels;
use crate::kernels::attention::{
    AttendContext, AttendItem, MAX_QUERIES, Member, MergeItem, SPLIT, Scratch, first_visible,
    visible_splits,
};
use crate::kernels::rotate::HeadShape;
use crate::pool::ThreadPool;
use crate::schedule::SHARED_PRODUCTS;

/// Items that keep all threads busy.
const ENOUGH_ITEMS: usize = 16;
/// Fewest tokens that a row is cut into: fewer would use the kernels' registers badly.
const MIN_TOKENS: usize = 8;
/// Merges that are worth waking other threads for.
const SHARED_MERGES: usize = 16;

/// One row of a step.
#[derive(Clone, Debug)]
pub(crate) struct AttendRow {
    pub(crate) tokens: Range<usize>, // flat; rows follow one another from 0 on
    pub(crate) computed_len: usize,
    pub(crate) table: Vec<u32>, // pages of its positions
}

/// Where the partial results of a row's tokens for one split are: `[kv head][token][head]`.
#[derive(Clone, Copy)]
struct Part {
    split: usize,
    first: usize,
    head_stride: usize,
}

/// The items of one step for one shape of attention, shared by all layers that have it.
pub(crate) struct AttendPlan {
    items: Vec<AttendItem>,
    merges: Vec<MergeItem>,
    pub(crate) members: Vec<Member>,
    pub(crate) parts: Vec<usize>,
    /// Rows of `AttendContext::partials` that `run` needs.
    pub(crate) num_partials: usize,
    is_worth_sharing: bool,
}

impl AttendPlan {
    /// Cut a step's rows.
    ///
    /// Rows that share the pages of a split attend to it together. Where rows are few, one of one
    /// token is cut by its splits too.
    pub(crate) fn new(
        rows: &[AttendRow],
        page_size: usize,
        heads: HeadShape,
        window: Option<usize>,
    ) -> AttendPlan {
        let shared_heads = heads.num_heads / heads.num_kv_heads;
        let mut builder =
            Builder { rows, page_size, heads, window, shared_heads, ..Builder::EMPTY };
        builder.row_parts = vec![Vec::new(); rows.len()];
        for row in rows {
            builder.members.extend(row.tokens.clone().map(|token| Member {
                token,
                position: row.computed_len + token - row.tokens.start,
            }));
        }
        builder.add_groups();
        let num_tokens = builder.members.len();
        let most = MAX_QUERIES / shared_heads;
        let even = (num_tokens * heads.num_kv_heads).div_ceil(ENOUGH_ITEMS);
        let height = even.clamp(MIN_TOKENS.min(most), most);
        for row in 0..rows.len() {
            builder.add_row(row, height);
        }
        builder.add_merges();
        builder.finish()
    }

    #[cfg(test)]
    pub(crate) fn num_items(&self) -> usize {
        self.items.len()
    }

    /// Attend; `scratch` has one entry per thread.
    pub(crate) fn run(
        &self,
        pool: &ThreadPool,
        kernels: Kernels,
        context: &AttendContext<'_>,
        scratch: &[Mutex<Scratch>],
    ) {
        let scratch =
            |thread: usize| scratch[thread].lock().unwrap_or_else(PoisonError::into_inner);
        pool.run_shared(self.is_worth_sharing, self.items.len(), |task, thread| {
            kernels.attend(context, &self.items[task], &mut scratch(thread));
        });
        let is_worth_sharing = self.merges.len() > SHARED_MERGES;
        pool.run_shared(is_worth_sharing, self.merges.len(), |task, thread| {
            kernels.merge_partials(context, &self.merges[task], &mut scratch(thread));
        });
    }
}

/// A plan in the making.
struct Builder<'a> {
    rows: &'a [AttendRow],
    page_size: usize,
    heads: HeadShape,
    window: Option<usize>,
    shared_heads: usize,
    items: Vec<AttendItem>,
    merges: Vec<MergeItem>,
    members: Vec<Member>,
    parts: Vec<usize>,
    row_parts: Vec<Vec<Part>>, // by row; empty: the row's items write its output
    num_partials: usize,
}

impl Builder<'_> {
    const EMPTY: Builder<'static> = Builder {
        rows: &[],
        page_size: 0,
        heads: HeadShape { num_heads: 0, num_kv_heads: 0, head_dim: 0 },
        window: None,
        shared_heads: 0,
        items: Vec::new(),
        merges: Vec::new(),
        members: Vec::new(),
        parts: Vec::new(),
        row_parts: Vec::new(),
        num_partials: 0,
    };

    /// Pages of a split.
    fn pages(&self, row: usize, split: usize) -> &[u32] {
        let first = split * SPLIT / self.page_size;
        let end = ((split + 1) * SPLIT).div_ceil(self.page_size);
        &self.rows[row].table[first..end]
    }

    /// Splits all of whose keys all tokens of a row see, if it is short enough to have company.
    fn whole_splits(&self, row: usize) -> Range<usize> {
        let AttendRow { tokens, computed_len, .. } = &self.rows[row];
        if 2 * tokens.len() * self.shared_heads > MAX_QUERIES || tokens.is_empty() {
            return 0..0;
        }
        let last = computed_len + tokens.len() - 1;
        first_visible(last, self.window).div_ceil(SPLIT)..(computed_len + 1) / SPLIT
    }

    /// Find rows that share a split's pages, and give each such group its items.
    fn add_groups(&mut self) {
        // By the last page: equal prefixes end in the same page, and where they do not, the pages
        // are compared.
        let mut groups: HashMap<(usize, u32), Vec<usize>> = HashMap::new();
        for row in 0..self.rows.len() {
            for split in self.whole_splits(row) {
                let pages = self.pages(row, split);
                let group = groups.entry((split, pages[pages.len() - 1])).or_default();
                if group.first().is_none_or(|&first| self.pages(first, split) == pages) {
                    group.push(row);
                }
            }
        }
        let mut groups: Vec<((usize, u32), Vec<usize>)> =
            groups.into_iter().filter(|(_, rows)| rows.len() > 1).collect();
        groups.sort_unstable();
        for ((split, _), rows) in groups {
            self.add_group(split, &rows);
        }
    }

    fn add_group(&mut self, split: usize, rows: &[usize]) {
        let most = MAX_QUERIES / self.shared_heads;
        let mut start = 0;
        while start < rows.len() {
            let mut count = 0;
            let end = rows[start..].iter().position(|&row| {
                count += self.rows[row].tokens.len();
                count > most
            });
            let end = end.map_or(rows.len(), |end| start + end);
            let first = self.members.len();
            for &row in &rows[start..end] {
                self.members.extend_from_within(self.rows[row].tokens.clone());
            }
            let members = first..self.members.len();
            let base = self.add_items(rows[start], members.clone(), split..split + 1, true);
            let mut at = base;
            for &row in &rows[start..end] {
                let head_stride = members.len() * self.shared_heads;
                self.row_parts[row].push(Part { split, first: at, head_stride });
                at += self.rows[row].tokens.len() * self.shared_heads;
            }
            start = end;
        }
    }

    /// One item per kv head; where its partial results start, if it has any.
    fn add_items(
        &mut self,
        row: usize,
        members: Range<usize>,
        splits: Range<usize>,
        is_partial: bool,
    ) -> usize {
        let base = self.num_partials;
        let results = members.len() * self.shared_heads * splits.len();
        for kv_head in 0..self.heads.num_kv_heads {
            self.items.push(AttendItem {
                row,
                kv_head,
                members: members.clone(),
                splits: splits.clone(),
                partial: is_partial.then_some(base + kv_head * results),
            });
        }
        if is_partial {
            self.num_partials += self.heads.num_kv_heads * results;
        }
        base
    }

    /// Items of what a row has for itself.
    fn add_row(&mut self, row: usize, height: usize) {
        let AttendRow { tokens, computed_len, .. } = &self.rows[row];
        let (tokens, computed_len) = (tokens.clone(), *computed_len);
        let is_few = self.rows.len() * self.heads.num_kv_heads < ENOUGH_ITEMS;
        if self.row_parts[row].is_empty() && !(is_few && tokens.len() == 1) {
            for first in tokens.clone().step_by(height) {
                let members = first..tokens.end.min(first + height);
                let position = |token: usize| computed_len + token - tokens.start;
                let (first, last) = (position(members.start), position(members.end - 1));
                self.add_items(row, members, visible_splits(first, last, self.window), false);
            }
            return;
        }
        let last = computed_len + tokens.len() - 1;
        let splits = visible_splits(computed_len, last, self.window);
        if self.row_parts[row].is_empty() && splits.len() == 1 {
            self.add_items(row, tokens, splits, false);
            return;
        }
        for split in splits {
            if self.row_parts[row].iter().any(|part| part.split == split) {
                continue;
            }
            let first = self.add_items(row, tokens.clone(), split..split + 1, true);
            let head_stride = tokens.len() * self.shared_heads;
            self.row_parts[row].push(Part { split, first, head_stride });
        }
    }

    fn add_merges(&mut self) {
        let mut row_parts = std::mem::take(&mut self.row_parts);
        for (row, parts) in self.rows.iter().zip(&mut row_parts) {
            parts.sort_unstable_by_key(|part| part.split);
            if parts.is_empty() {
                continue;
            }
            for (offset, token) in row.tokens.clone().enumerate() {
                for kv_head in 0..self.heads.num_kv_heads {
                    let first = self.parts.len();
                    self.parts.extend(parts.iter().map(|part| {
                        part.first + kv_head * part.head_stride + offset * self.shared_heads
                    }));
                    let parts = first..self.parts.len();
                    self.merges.push(MergeItem { token, kv_head, parts });
                }
            }
        }
    }

    fn finish(mut self) -> AttendPlan {
        let work = |item: &AttendItem| item.members.len() * item.splits.len();
        let keys = self.items.iter().map(work).sum::<usize>() * SPLIT;
        let products = keys * self.shared_heads * self.heads.head_dim;
        // Long ones first: the threads finish together.
        self.items.sort_by_key(|item| std::cmp::Reverse(work(item)));
        AttendPlan {
            items: self.items,
            merges: self.merges,
            members: self.members,
            parts: self.parts,
            num_partials: self.num_partials,
            is_worth_sharing: products >= 4 * SHARED_PRODUCTS,
        }
    }
}

/// Whether a step's keys are many enough to share the work of turning heads among threads.
pub(crate) fn rotate_chunk(num_tokens: usize, num_threads: usize) -> usize {
    if num_tokens <= 4 { num_tokens.max(1) } else { num_tokens.div_ceil(4 * num_threads).max(2) }
}
