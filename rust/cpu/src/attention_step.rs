//! Which items a step's attention consists of, and running them.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use crate::kernels::Kernels;
use crate::kernels::attention::{
    AttendContext, AttendItem, MAX_QUERIES, SPLIT, Scratch, visible_splits,
};
use crate::kernels::rotate::HeadShape;
use crate::pool::ThreadPool;
use crate::schedule::SHARED_PRODUCTS;

/// Items that keep all threads busy.
const ENOUGH_ITEMS: usize = 16;

/// One row of a step.
#[derive(Clone, Debug)]
pub(crate) struct AttendRow {
    pub(crate) tokens: Range<usize>, // flat
    pub(crate) computed_len: usize,
    pub(crate) table: Vec<u32>, // pages of its positions
}

/// The items of one step for one shape of attention, shared by all layers that have it.
pub(crate) struct AttendPlan {
    items: Vec<AttendItem>,
    merges: Vec<AttendItem>,
    num_partials: usize,
    is_worth_sharing: bool,
    cuts_splits: bool,
}

impl AttendPlan {
    /// Cut a step's rows; where they are few, a row of one token is cut by its splits too.
    pub(crate) fn new(rows: &[AttendRow], heads: HeadShape, window: Option<usize>) -> AttendPlan {
        let shared = heads.num_heads / heads.num_kv_heads;
        let most = (MAX_QUERIES / shared).max(1);
        let mut plan = AttendPlan {
            items: Vec::new(),
            merges: Vec::new(),
            num_partials: 0,
            is_worth_sharing: false,
            cuts_splits: rows.len() * heads.num_kv_heads < ENOUGH_ITEMS,
        };
        for (index, row) in rows.iter().enumerate() {
            let kv_len = row.computed_len + row.tokens.len();
            for first_token in row.tokens.clone().step_by(most) {
                let num_tokens = most.min(row.tokens.end - first_token);
                let first_position = row.computed_len + first_token - row.tokens.start;
                let last = first_position + num_tokens - 1;
                for kv_head in 0..heads.num_kv_heads {
                    plan.add(AttendItem {
                        row: index,
                        kv_head,
                        first_token,
                        num_tokens,
                        first_position,
                        kv_len,
                        splits: visible_splits(first_position, last, window),
                        partial: None,
                    });
                }
            }
        }
        let keys = |item: &AttendItem| item.num_tokens * item.splits.len() * SPLIT;
        let products: usize = plan.items.iter().map(keys).sum::<usize>() * shared * heads.head_dim;
        plan.is_worth_sharing = products >= 4 * SHARED_PRODUCTS;
        // Long ones first: the threads finish together.
        plan.items.sort_by_key(|item| std::cmp::Reverse(item.splits.len() * item.num_tokens));
        plan
    }

    fn add(&mut self, item: AttendItem) {
        if !self.cuts_splits || item.num_tokens > 1 || item.splits.len() <= 1 {
            self.items.push(item);
            return;
        }
        let first = self.num_partials;
        self.merges.push(AttendItem { partial: Some(first), ..item.clone() });
        for (index, split) in item.splits.clone().enumerate() {
            self.items.push(AttendItem {
                splits: split..split + 1,
                partial: Some(first + index),
                ..item.clone()
            });
        }
        self.num_partials += item.splits.len();
    }

    /// Rows of `AttendContext::partials` that `run` needs.
    pub(crate) fn partial_rows(&self, heads: HeadShape) -> usize {
        self.num_partials * (heads.num_heads / heads.num_kv_heads)
    }

    /// Attend; `scratch` has one entry per thread.
    pub(crate) fn run(
        &self,
        pool: &ThreadPool,
        kernels: Kernels,
        context: &AttendContext<'_>,
        scratch: &[Mutex<Scratch>],
    ) {
        let shared = context.heads.num_heads / context.heads.num_kv_heads;
        let in_rows = |item: &AttendItem| AttendItem {
            partial: item.partial.map(|partial| partial * shared),
            ..item.clone()
        };
        pool.run_shared(self.is_worth_sharing, self.items.len(), |task, thread| {
            let mut scratch = scratch[thread].lock().unwrap_or_else(PoisonError::into_inner);
            kernels.attend(context, &in_rows(&self.items[task]), &mut scratch);
        });
        pool.run_shared(self.merges.len() > 16, self.merges.len(), |task, thread| {
            let mut scratch = scratch[thread].lock().unwrap_or_else(PoisonError::into_inner);
            kernels.merge_partials(context, &in_rows(&self.merges[task]), &mut scratch);
        });
    }
}

/// Whether a step's keys are many enough to share the work of turning heads among threads.
pub(crate) fn rotate_chunk(num_tokens: usize, num_threads: usize) -> usize {
    if num_tokens <= 4 { num_tokens.max(1) } else { num_tokens.div_ceil(4 * num_threads).max(2) }
}

const _: () = assert!(SPLIT.is_multiple_of(64));
