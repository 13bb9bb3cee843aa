//! The scheduler as its caller sees it.

use std::sync::Arc;

use text::Decoder;

use crate::committer;
use crate::config::Config;
use crate::error::{Error, IntegrityError, Result};
use crate::integrity;
use crate::messages::Submit;
use crate::planner::Planner;
use crate::request::{Found, Rank, Request, RequestIndex, SampleState};
use crate::state::State;
use crate::stats;
use crate::validation::{self, invalid};
use crate::wire::{Address, Finish, Refusal};

/// Which requests an abort is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target<'a> {
    /// Every request.
    All,
    /// Every request of a client.
    Client(i64),
    /// A client's request by its key.
    Key(i64, u64),
    /// The request with exactly this rid, or one sample of it as `rid_k`.
    Rid(&'a str),
}

/// Why a request cannot be prepared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unready<'a> {
    /// It asks for what cannot be (400).
    Invalid(&'a str),
    /// What prepares it has failed; another time it may work (503).
    Unavailable(&'a str),
}

impl Unready<'_> {
    fn refusal(self) -> Refusal {
        match self {
            Self::Invalid(message) => invalid(None, message),
            Self::Unavailable(message) => Refusal {
                status: 503,
                kind: "engine_unavailable",
                message: message.to_owned(),
                param: None,
            },
        }
    }
}

/// One engine's scheduler.
///
/// It has no clock and does no I/O: times come in as unix seconds, plans and results as bytes,
/// events go out as bytes. The same calls give the same answers.
#[derive(Debug)]
pub struct Scheduler {
    state: State,
    planner: Planner,
}

impl Scheduler {
    /// Builds a scheduler.
    ///
    /// # Errors
    ///
    /// If the configuration is out of range or its tokenizer cannot be interpreted.
    pub fn new(mut config: Config) -> Result<Self> {
        config.check()?;
        let json = config.tokenizer_json.take();
        let decoder = json.map(|json| Decoder::from_tokenizer_json(&json)).transpose()?;
        let state = State::new(config, decoder.map(Arc::new));
        Ok(Self { state, planner: Planner::default() })
    }

    /// Queues a request, or refuses it; an event says which. Returns the request's id if it must be
    /// prepared: it then waits, and its event too, for [`ready`](Self::ready).
    ///
    /// # Errors
    ///
    /// If the message is malformed; nothing is queued then and no event follows.
    pub fn submit(&mut self, client: i64, message: &[u8], now: f64) -> Result<Option<u64>> {
        let submit = Submit::decode(message)?;
        let to = Address { client, key: submit.key };
        if self.state.requests.by_key(client, to.key).is_some() {
            return Err(Error::DuplicateKey { client, key: to.key });
        }
        match self.accept(to, submit, now) {
            Ok(id) => Ok(id),
            Err(refusal) => {
                self.state.events.refused(to, &refusal);
                self.state.counters.refused += 1;
                Ok(None)
            }
        }
    }

    fn accept(
        &mut self,
        to: Address,
        mut submit: Submit,
        now: f64,
    ) -> std::result::Result<Option<u64>, Refusal> {
        let state = &mut self.state;
        if state.requests.has_rid(&submit.rid) {
            let message = format!("Duplicate request ID detected: {}", submit.rid);
            return Err(invalid(Some("rid"), message));
        }
        let params = validation::params(&state.config, state.decoder.is_some(), &mut submit)?;
        // Whoever was let in once stays in: a request that another engine had is not counted.
        if submit.resume.is_empty() {
            self.make_room_in_queue(params.rank)?;
        }
        let state = &mut self.state;
        let id = state.requests.next_id();
        let preparing = submit.must_prepare;
        let index = state.requests.insert(Request {
            id,
            to,
            rid: submit.rid,
            params: Arc::new(params),
            samples: vec![SampleState::Pending; submit.n as usize],
            unfinished: submit.n as u32,
            resume: submit.resume,
            submitted: now,
            since_step: state.last_step,
            accepted: false,
            preparing,
            started: false,
        });
        if !preparing {
            state.accept(index);
        }
        state.activate_next(index);
        Ok(preparing.then_some(id))
    }

    /// Refuses a request when as many of its class are waiting as may, unless one of them ranks behind
    /// it: with priorities, that one is ended instead.
    fn make_room_in_queue(&mut self, rank: Rank) -> std::result::Result<(), Refusal> {
        let state = &mut self.state;
        let most = match rank.class {
            0 => state.config.max_queued_requests,
            _ => state.config.max_queued_batch_requests,
        };
        if most.is_none_or(|most| state.requests.num_unstarted(rank.class) < most) {
            return Ok(());
        }
        let behind = state.queue.last_behind(rank, |id| {
            let sequence = &state.sequences[id];
            sequence.params.rank.class == rank.class
                && !state.requests.get(sequence.request).started
        });
        if let Some(id) = behind {
            let message = "The request was aborted by a higher priority request.";
            let index = state.sequences[id].request;
            state.finish_request(index, &Finish::error(503, message));
            return Ok(());
        }
        let message = "The request queue is full.".to_owned();
        Err(Refusal { status: 503, kind: "queue_full", message, param: None })
    }

    /// Releases a request that had to be prepared, or refuses it. Unknown ids are ignored: the request
    /// may have ended meanwhile.
    pub fn ready(&mut self, request: u64, error: Option<Unready>) {
        let state = &mut self.state;
        let Some(index) = state.requests.by_id(request) else { return };
        if !state.requests.get(index).preparing {
            return;
        }
        if let Some(error) = error {
            self.refuse(index, &error.refusal());
            return;
        }
        state.accept(index);
        let request = state.requests.get_mut(index);
        request.preparing = false;
        let held = request.samples.iter().find_map(|&sample| match sample {
            SampleState::Live(id) => Some(id),
            SampleState::Pending | SampleState::Finished => None,
        });
        if let Some(id) = held {
            state.prepared(id);
        }
    }

    /// Whether the request has not ended. Ids are those of [`submit`](Self::submit).
    pub fn is_live(&self, request: u64) -> bool {
        self.state.requests.by_id(request).is_some()
    }

    /// Refuses a request that is in the tables already; one that was accepted ends with an error.
    fn refuse(&mut self, index: RequestIndex, refusal: &Refusal) {
        let request = self.state.requests.get(index);
        let to = request.to;
        if request.accepted {
            let finish = Finish::error(refusal.status, refusal.message.as_str());
            self.state.finish_request(index, &finish);
            return;
        }
        self.state.discard_request(index);
        self.state.events.refused(to, refusal);
        self.state.counters.refused += 1;
    }

    /// Ends requests: at once what waits, at the commit of the oldest step in flight that names it
    /// what runs. Returns how many requests it met.
    pub fn abort(&mut self, target: Target) -> usize {
        let requests = &self.state.requests;
        let mut met = Vec::new();
        match target {
            Target::All => met = requests.all(),
            Target::Client(client) => {
                met = requests.all();
                met.retain(|&index| requests.get(index).to.client == client);
            }
            Target::Key(client, key) => met.extend(requests.by_key(client, key)),
            Target::Rid(rid) => match requests.by_rid(rid) {
                Some(Found::Request(index)) => met.push(index),
                Some(Found::Sample(index, sample)) => return self.abort_sample(index, sample),
                None => {}
            },
        }
        for &index in &met {
            self.state.accept(index);
            self.state.finish_request(index, &Finish::abort());
        }
        self.state.sweep();
        met.len()
    }

    fn abort_sample(&mut self, index: RequestIndex, sample: u32) -> usize {
        let state = self.state.requests.get(index).samples[sample as usize];
        if state == SampleState::Finished {
            return 0;
        }
        self.state.accept(index);
        self.state.finish_sample(index, sample as usize, &Finish::abort());
        self.state.sweep();
        1
    }

    /// Writes the next step's plan to the start of `arena`. `None` if nothing can be computed now.
    ///
    /// # Errors
    ///
    /// If more steps are in flight than the configured depth, or the arena is smaller than
    /// configured.
    pub fn plan(&mut self, now: f64, arena: &mut [u8]) -> Result<Option<u64>> {
        let (in_flight, depth) = (self.state.in_flight.len(), self.state.config.overlap_depth);
        if in_flight > depth as usize {
            return Err(Error::TooManySteps { in_flight, depth });
        }
        let required = self.state.config.arena_bytes;
        if arena.len() < required {
            return Err(Error::ArenaTooSmall { actual: arena.len(), required });
        }
        self.expire(now);
        Ok(self.planner.plan(&mut self.state, now, arena))
    }

    /// Takes the result of the oldest step in flight.
    ///
    /// # Errors
    ///
    /// If the block is malformed or of another step; nothing is committed then.
    pub fn commit(&mut self, now: f64, result: &[u8]) -> Result<()> {
        let step = committer::commit(&mut self.state, now, result)?;
        self.planner.recycle(step);
        Ok(())
    }

    /// Events since the last call: client and msgpack array each.
    pub fn take_events(&mut self) -> Vec<(i64, Vec<u8>)> {
        self.state.events.take()
    }

    /// Requests that have entered their first plan since the last call: client and key each.
    pub fn take_entered(&mut self) -> Vec<(i64, u64)> {
        self.state.entered.drain(..).map(|to| (to.client, to.key)).collect()
    }

    /// Whether a request waits or runs or a step is in flight.
    pub fn has_work(&self) -> bool {
        self.state.requests.len() > 0 || !self.state.in_flight.is_empty()
    }

    /// When the next waiting request times out, in unix seconds.
    pub fn next_deadline(&mut self) -> Option<f64> {
        let timeout = self.state.config.waiting_timeout_s?;
        let index = self.state.requests.oldest_unstarted()?;
        Some(self.state.requests.get(index).submitted + timeout)
    }

    /// Ends the requests that have waited too long.
    fn expire(&mut self, now: f64) {
        while self.next_deadline().is_some_and(|deadline| deadline <= now) {
            let Some(index) = self.state.requests.oldest_unstarted() else { return };
            let message = "Request waiting timeout reached.".to_owned();
            let refusal = Refusal { status: 503, kind: "queue_timeout", message, param: None };
            self.refuse(index, &refusal);
        }
    }

    /// Forgets every cached prefix. False, and nothing done, while requests run or wait.
    pub fn flush_cache(&mut self) -> bool {
        if self.has_work() {
            return false;
        }
        self.state.memory.forget_unused();
        true
    }

    /// Marks new weights: cached prefixes of older epochs never match again, and what running
    /// sequences have computed with them does not enter the cache. False, and nothing done, while a
    /// step is in flight.
    pub fn set_weight_epoch(&mut self, epoch: u64) -> bool {
        if !self.state.in_flight.is_empty() {
            return false;
        }
        self.state.start_epoch(epoch);
        true
    }

    /// Gauges and cumulative counters by name.
    pub fn stats(&self) -> Vec<(&'static str, f64)> {
        stats::collect(&self.state)
    }

    /// Checks every invariant of scheduler and prefix tree.
    ///
    /// # Errors
    ///
    /// The message says which invariant does not hold: a bug.
    pub fn check_integrity(&self) -> std::result::Result<(), IntegrityError> {
        integrity::check(&self.state).map_err(IntegrityError)
    }
}
