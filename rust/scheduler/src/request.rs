//! Requests: what their samples have in common, and how they are found.

use std::collections::VecDeque;
use std::sync::Arc;

use rustc_hash::FxHashMap;
use text::Stops;

use crate::messages::{LogprobRequest, Resume, SamplingParams};
use crate::plan;
use crate::sequence::SequenceId;
use crate::slab::{Slab, SlabId};
use crate::wire::Address;

/// A request in the tables below.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RequestIndex(u32);

impl SlabId for RequestIndex {
    fn new(index: u32) -> Self {
        Self(index)
    }

    fn index(self) -> usize {
        self.0 as usize
    }
}

/// The class of requests that somebody waits for.
pub(crate) const INTERACTIVE: u8 = 0;

/// Order between requests: smaller goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rank {
    /// `INTERACTIVE`, or 1: a batch's.
    pub(crate) class: u8,
    /// The request's priority, turned so that smaller goes first.
    pub(crate) priority: i64,
}

/// What every step asks of a request; sequences hold a copy, so that a step touches little memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    pub(crate) prompt_len: u32,
    /// Tokens, prompt included, at which a sequence ends by length.
    pub(crate) limit: u32,
    /// Outputs before which nothing but the length, or a grammar's end, ends a sequence.
    pub(crate) min_new_tokens: u32,
    pub(crate) stream_interval: u32,
    /// Bit `id % 64` is set for every id that ends a sequence.
    pub(crate) stop_mask: u64,
    /// Whether any log-prob is wanted.
    pub(crate) logprobs: bool,
    /// Whether the pooled state is wanted; there are no outputs then.
    pub(crate) pooled: bool,
}

impl Bounds {
    /// False for most ids that do not end a sequence, true for all that do.
    pub(crate) fn may_stop(&self, id: u32) -> bool {
        self.stop_mask >> (id % 64) & 1 == 1
    }
}

/// What does not change during a request's life, shared by its sequences.
#[derive(Debug)]
pub(crate) struct Params {
    pub(crate) prompt: Vec<u32>,
    pub(crate) sampling: SamplingParams,
    /// Sorted ids that end a sequence: EOS unless ignored, and the request's own.
    pub(crate) stop_ids: Vec<u32>,
    pub(crate) stops: Option<Arc<Stops>>,
    pub(crate) logprobs: Option<LogprobRequest>,
    pub(crate) bounds: Bounds,
    pub(crate) rank: Rank,
    pub(crate) namespace: String,
    pub(crate) grammar: bool,
    /// Ids that only come where the request's grammar ends.
    pub(crate) grammar_end_ids: Vec<u32>,
}

impl Params {
    /// First prompt position whose log-prob is wanted.
    pub(crate) fn prompt_scores_from(&self) -> Option<u32> {
        self.logprobs.as_ref()?.prompt_start.map(|start| start as u32)
    }

    /// Ids that are scored at every logit position.
    pub(crate) fn scored_ids(&self) -> &[u32] {
        self.logprobs.as_ref().map_or(&[], |logprobs| &logprobs.ids)
    }

    pub(crate) fn top_n(&self) -> u32 {
        self.logprobs.as_ref().map_or(0, |logprobs| logprobs.top_n)
    }

    /// Flags of the slots of its sequences.
    pub(crate) fn slot_flags(&self) -> i32 {
        let processed = self.logprobs.as_ref().is_some_and(|logprobs| logprobs.processed);
        let grammar = if self.grammar { plan::FLAG_GRAMMAR } else { 0 };
        grammar | if processed { plan::FLAG_PROCESSED } else { 0 }
    }

    /// Whether the id says that the request's grammar has ended: nothing can follow it then.
    pub(crate) fn ends_grammar(&self, id: u32) -> bool {
        self.grammar_end_ids.contains(&id)
    }

    /// Ids that the runner holds back while a sequence has fewer than `min_new_tokens` outputs.
    pub(crate) fn suppressed_ids(&self) -> &[u32] {
        if self.bounds.min_new_tokens > 0 { &self.stop_ids } else { &[] }
    }

    /// Bytes of a plan that the request's lists take when a sequence of it enters and has a row.
    pub(crate) fn list_bytes(&self) -> usize {
        let score = self.logprobs.as_ref().map_or(0, |_| plan::LOGIT_BYTES + 4);
        8 * self.sampling.logit_bias.len()
            + 4 * self.suppressed_ids().len()
            + 8 * self.scored_ids().len()
            + score
    }

    /// Seed of a sample: the request's own for the first, a `SplitMix64` hash of it for the others.
    pub(crate) fn seed(&self, sample: u32) -> u64 {
        if sample == 0 {
            return self.sampling.seed;
        }
        let mut z =
            self.sampling.seed.wrapping_add(u64::from(sample).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

/// Where a sample of a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SampleState {
    /// Not in the queue yet: samples enter it one after another.
    Pending,
    Live(SequenceId),
    Finished,
}

/// A request that was accepted and has not ended.
#[derive(Debug)]
pub(crate) struct Request {
    /// Number given to the caller, never used twice.
    pub(crate) id: u64,
    pub(crate) to: Address,
    pub(crate) rid: String,
    pub(crate) params: Arc<Params>,
    pub(crate) samples: Vec<SampleState>,
    /// Samples that have not finished.
    pub(crate) unfinished: u32,
    pub(crate) resume: Vec<Resume>,
    pub(crate) submitted: f64,
    /// Step counter when it was submitted: its age is counted from there.
    pub(crate) since_step: u64,
    /// Its client knows that it was accepted.
    pub(crate) accepted: bool,
    /// Held back until the caller calls `ready`.
    pub(crate) preparing: bool,
    /// Whether any of its samples has ever run.
    pub(crate) started: bool,
}

/// Live requests by index, by client and key, by id and by rid.
#[derive(Debug)]
pub(crate) struct Requests {
    slab: Slab<RequestIndex, Request>,
    by_key: FxHashMap<(i64, u64), RequestIndex>,
    by_id: FxHashMap<u64, RequestIndex>,
    by_rid: FxHashMap<String, RequestIndex>,
    next_id: u64,
    /// Requests of each class none of whose samples has ever run.
    unstarted: [u32; 2],
    /// The same with their ids, in order of arrival; those that have started are dropped late.
    arrivals: VecDeque<u64>,
}

/// What an abort by rid means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    Request(RequestIndex),
    Sample(RequestIndex, u32),
}

impl Requests {
    pub(crate) fn new() -> Self {
        Self {
            slab: Slab::new(),
            by_key: FxHashMap::default(),
            by_id: FxHashMap::default(),
            by_rid: FxHashMap::default(),
            next_id: 1,
            unstarted: [0; 2],
            arrivals: VecDeque::new(),
        }
    }

    /// Id of the next request inserted.
    pub(crate) fn next_id(&self) -> u64 {
        self.next_id
    }

    pub(crate) fn insert(&mut self, request: Request) -> RequestIndex {
        let (id, key) = (request.id, (request.to.client, request.to.key));
        let (rid, class) = (request.rid.clone(), request.params.rank.class);
        let index = self.slab.insert(request);
        self.by_key.insert(key, index);
        self.by_id.insert(id, index);
        self.by_rid.insert(rid, index);
        self.next_id = id + 1;
        self.unstarted[usize::from(class)] += 1;
        self.arrivals.push_back(id);
        index
    }

    /// Forgets a request; its key and rid are free again.
    pub(crate) fn remove(&mut self, index: RequestIndex) {
        self.mark_started(index);
        let request = self.slab.remove(index);
        self.by_key.remove(&(request.to.client, request.to.key));
        self.by_id.remove(&request.id);
        self.by_rid.remove(&request.rid);
    }

    /// Notes that a request no longer counts as queued.
    pub(crate) fn mark_started(&mut self, index: RequestIndex) {
        let request = &mut self.slab[index];
        if !request.started {
            request.started = true;
            self.unstarted[usize::from(request.params.rank.class)] -= 1;
        }
    }

    /// The request that has been queued for longest, of those of which nothing has run.
    pub(crate) fn oldest_unstarted(&mut self) -> Option<RequestIndex> {
        while let Some(id) = self.arrivals.front() {
            match self.by_id.get(id) {
                Some(&index) if !self.slab[index].started => return Some(index),
                _ => self.arrivals.pop_front(),
            };
        }
        None
    }

    /// Requests of a class of which nothing has run.
    pub(crate) fn num_unstarted(&self, class: u8) -> u32 {
        self.unstarted[usize::from(class)]
    }

    pub(crate) fn by_key(&self, client: i64, key: u64) -> Option<RequestIndex> {
        self.by_key.get(&(client, key)).copied()
    }

    pub(crate) fn by_id(&self, id: u64) -> Option<RequestIndex> {
        self.by_id.get(&id).copied()
    }

    pub(crate) fn has_rid(&self, rid: &str) -> bool {
        self.by_rid.contains_key(rid)
    }

    /// The request with exactly this rid, or else the sample `k` of a request if it is `rid_k`.
    pub(crate) fn by_rid(&self, rid: &str) -> Option<Found> {
        if let Some(&index) = self.by_rid.get(rid) {
            return Some(Found::Request(index));
        }
        let (base, digits) = rid.rsplit_once('_')?;
        let index = *self.by_rid.get(base)?;
        let sample: u32 = digits.parse().ok()?;
        let exact = sample.to_string() == digits;
        let exists = (sample as usize) < self.slab[index].samples.len();
        (exact && exists).then_some(Found::Sample(index, sample))
    }

    /// All requests, oldest first.
    pub(crate) fn all(&self) -> Vec<RequestIndex> {
        let mut all: Vec<_> =
            self.slab.iter().map(|(index, request)| (request.id, index)).collect();
        all.sort_unstable_by_key(|&(id, _)| id);
        all.into_iter().map(|(_, index)| index).collect()
    }

    pub(crate) fn get(&self, index: RequestIndex) -> &Request {
        &self.slab[index]
    }

    pub(crate) fn get_mut(&mut self, index: RequestIndex) -> &mut Request {
        &mut self.slab[index]
    }

    pub(crate) fn len(&self) -> usize {
        self.slab.len()
    }
}
