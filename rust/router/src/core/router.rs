//! The router: registry, load, index and policy under one roof.

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use xxhash_rust::xxh3::xxh3_64;

use super::blocks::Prompt;
use super::breaker::Breaker;
use super::config::{Config, Policy};
use super::error::RouterError;
use super::index::{PrefixIndex, Slot};
use super::load::Report;
use super::policy::{self, Candidate, Question};
use super::registry::{Registry, Worker, WorkerId, WorkerOptions, WorkerState};
use super::tickets::{Outcome, Ticket, TicketId, Tickets};

/// What narrows a choice.
#[derive(Clone, Copy, Debug, Default)]
pub struct Selection<'a> {
    /// Workers that were tried already.
    pub exclude: &'a [WorkerId],
    /// If given, only these may be chosen.
    pub only: Option<&'a [WorkerId]>,
    /// What the `session` policy goes by.
    pub session: Option<&'a [u8]>,
}

/// Why a worker was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// It has the longest cached prefix.
    Hit,
    /// Nobody has the prefix; its beginning named the worker.
    Cold,
    /// Those that have the prefix, or would be given it, have too much to do.
    Spill,
    /// Too little is known of the prompt; the least loaded one.
    Load,
    /// A policy without a reason to give.
    Policy,
    /// The session's or the prefix's home.
    Affinity,
    /// There was one to choose from.
    Pinned,
}

/// A chosen worker. The request is in its load until [`Router::finished`] is told of the ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The worker.
    pub worker: WorkerId,
    /// The request.
    pub ticket: TicketId,
    /// Prompt tokens that its cache probably holds.
    pub cached_tokens: u64,
    /// Why.
    pub reason: Reason,
}

/// Chooses workers and keeps account of what they have to do.
pub struct Router {
    config: Config,
    workers: Registry,
    index: PrefixIndex,
    tickets: Tickets,
    rng: ChaCha8Rng,
    turn: u64,
    /// Scratch of one choice.
    cached_blocks: Vec<u32>,
    seen: Vec<u64>,
    candidates: Vec<Candidate>,
}

impl Router {
    /// A router without workers.
    pub fn new(config: Config) -> Self {
        Self {
            rng: ChaCha8Rng::seed_from_u64(config.seed),
            config,
            workers: Registry::default(),
            index: PrefixIndex::new(),
            tickets: Tickets::default(),
            turn: 0,
            cached_blocks: Vec::new(),
            seen: Vec::new(),
            candidates: Vec::new(),
        }
    }

    /// Adds a worker.
    ///
    /// # Errors
    /// Its name is taken, or there are too many.
    pub fn add_worker(&mut self, options: &WorkerOptions<'_>) -> Result<WorkerId, RouterError> {
        let (id, slot) = self.workers.add(options)?;
        self.index.add(slot, options.capacity_blocks);
        Ok(id)
    }

    /// Forgets a worker at once; its tickets end without effect.
    ///
    /// # Errors
    /// There is no such worker.
    pub fn remove_worker(&mut self, id: WorkerId) -> Result<(), RouterError> {
        let (_, slot) = self.workers.remove(id).ok_or(RouterError::UnknownWorker(id.0))?;
        self.index.remove(slot);
        Ok(())
    }

    /// Changes whether a worker gets requests. One that was down begins with a closed breaker.
    ///
    /// # Errors
    /// There is no such worker.
    pub fn set_state(&mut self, id: WorkerId, state: WorkerState) -> Result<(), RouterError> {
        let slot = self.workers.slot(id)?;
        let worker = self.workers.at_mut(slot);
        if worker.state == WorkerState::Down && state != WorkerState::Down {
            worker.breaker = Breaker::default();
        }
        worker.state = state;
        Ok(())
    }

    /// Changes how many blocks a worker's cache holds.
    ///
    /// # Errors
    /// There is no such worker.
    pub fn set_capacity(&mut self, id: WorkerId, blocks: usize) -> Result<(), RouterError> {
        self.index.resize(self.workers.slot(id)?, blocks);
        Ok(())
    }

    /// Notes that a worker's cache was lost: it was restarted or flushed.
    ///
    /// # Errors
    /// There is no such worker.
    pub fn forget_cache(&mut self, id: WorkerId) -> Result<(), RouterError> {
        self.index.clear(self.workers.slot(id)?);
        Ok(())
    }

    /// Notes what a worker said about its load.
    ///
    /// # Errors
    /// There is no such worker.
    pub fn report(&mut self, id: WorkerId, report: Report, now: f64) -> Result<(), RouterError> {
        let slot = self.workers.slot(id)?;
        self.workers.at_mut(slot).load.report(report, now);
        Ok(())
    }

    /// Chooses a worker, counts the request in its load, and expects the prompt in its cache.
    ///
    /// # Errors
    /// Nobody may be chosen: [`RouterError::Busy`] if only limits are in the way, otherwise
    /// [`RouterError::Unavailable`].
    pub fn select(
        &mut self,
        prompt: &Prompt,
        selection: &Selection<'_>,
        now: f64,
    ) -> Result<Choice, RouterError> {
        let (candidate, reason) = self.choose(prompt, selection, now)?;
        let Candidate { slot, cached_blocks, cached_tokens, .. } = candidate;
        let indexed = self.config.policy == Policy::CacheAware;
        let id = self.tickets.upcoming();
        let worker = self.workers.at_mut(slot);
        worker.selected += 1;
        let uncached_tokens = prompt.num_tokens() - cached_tokens;
        let ticket = Ticket {
            worker: worker.id,
            share: worker.load.select(uncached_tokens),
            probe: worker.breaker.enter(now),
            started: false,
            chain: if indexed { prompt.hashes().to_vec() } else { Vec::new() },
            cached_blocks: cached_blocks as usize,
        };
        let choice = Choice { worker: worker.id, ticket: id, cached_tokens, reason };
        self.index.touch(slot, &ticket.chain, id.0);
        self.tickets.insert(ticket);
        Ok(choice)
    }

    /// The decision alone: what [`Router::select`] would choose, with no effect but on the order of
    /// turns and of random numbers.
    ///
    /// # Errors
    /// As [`Router::select`].
    pub fn peek(
        &mut self,
        prompt: &Prompt,
        selection: &Selection<'_>,
        now: f64,
    ) -> Result<WorkerId, RouterError> {
        let (candidate, _) = self.choose(prompt, selection, now)?;
        Ok(self.workers.at(candidate.slot).id)
    }

    fn choose(
        &mut self,
        prompt: &Prompt,
        selection: &Selection<'_>,
        now: f64,
    ) -> Result<(Candidate, Reason), RouterError> {
        let common_blocks = self.match_prefix(prompt);
        self.gather(prompt, selection, now)?;
        let question = Question {
            hashes: prompt.hashes(),
            num_tokens: prompt.num_tokens(),
            common_blocks,
            session: selection.session.map(xxh3_64),
        };
        if self.candidates.len() == 1 && selection.only.is_some_and(|only| only.len() == 1) {
            return Ok((self.candidates[0], Reason::Pinned));
        }
        let (candidate, reason) = policy::choose(
            &self.config,
            &question,
            &self.candidates,
            &mut self.turn,
            &mut self.rng,
        );
        Ok((*candidate, reason))
    }

    /// Fills in how many leading blocks each slot has; returns how many most workers have.
    fn match_prefix(&mut self, prompt: &Prompt) -> usize {
        self.cached_blocks.clear();
        self.cached_blocks.resize(self.workers.num_slots(), 0);
        self.seen.clear();
        self.seen.resize(self.workers.num_slots().div_ceil(64), 0);
        let mut steps = Vec::new();
        self.index.steps(prompt.hashes(), &mut steps);
        for step in steps.iter().rev() {
            let matched = &mut self.cached_blocks;
            step.owners.visit_new(&mut self.seen, |slot| matched[usize::from(slot)] = step.depth);
        }
        let most = (self.workers.len() / 2 + 1).max(2);
        let common = steps.iter().rev().find(|step| step.owners.count() >= most);
        common.map_or(0, |step| step.depth as usize)
    }

    fn gather(
        &mut self,
        prompt: &Prompt,
        selection: &Selection<'_>,
        now: f64,
    ) -> Result<(), RouterError> {
        let mut busy = false;
        self.candidates.clear();
        for (slot, worker) in self.workers.iter() {
            let wanted = selection.only.is_none_or(|only| only.contains(&worker.id))
                && !selection.exclude.contains(&worker.id);
            if !wanted || worker.state != WorkerState::Ready || !worker.breaker.allows(now) {
                continue;
            }
            let limit = self.config.max_in_flight;
            if limit != 0 && worker.load.in_flight() >= limit {
                busy = true;
                continue;
            }
            let cached_blocks = self.cached_blocks[usize::from(slot)];
            let requests = worker.load.requests(now, self.config.report_max_age_s);
            let decoding = worker.load.decoding(now, self.config.report_max_age_s);
            self.candidates.push(Candidate {
                slot,
                key: worker.key,
                backlog: self.config.backlog(worker, now),
                requests,
                waiting: requests.saturating_sub(decoding),
                selected: worker.selected,
                cached_blocks,
                cached_tokens: prompt.tokens_of(cached_blocks),
            });
        }
        match (self.candidates.is_empty(), busy) {
            (false, _) => Ok(()),
            (true, true) => Err(RouterError::Busy(self.config.max_in_flight)),
            (true, false) => Err(RouterError::Unavailable),
        }
    }

    /// The answer has begun: the prompt is computed. A second call, or one for an unknown ticket,
    /// changes nothing.
    pub fn started(&mut self, ticket: TicketId) {
        let Some(ticket) = self.tickets.get_mut(ticket).filter(|ticket| !ticket.started) else {
            return;
        };
        ticket.started = true;
        ticket.chain = Vec::new();
        if let Ok(slot) = self.workers.slot(ticket.worker) {
            self.workers.at_mut(slot).load.start(ticket.share);
        }
    }

    /// The request has ended and leaves the load. If the worker broke or refused before the answer
    /// began, the prompt is not expected in its cache either. Unknown tickets change nothing.
    pub fn finished(&mut self, ticket: TicketId, outcome: Outcome, now: f64) {
        let Some(ended) = self.tickets.take(ticket) else { return };
        let Ok(slot) = self.workers.slot(ended.worker) else { return };
        let worker = self.workers.at_mut(slot);
        worker.load.finish(ended.share, ended.started);
        match outcome {
            Outcome::Completed => worker.breaker.succeed(),
            Outcome::Failed => worker.breaker.fail(ended.probe, now, &self.config.breaker),
            Outcome::Refused | Outcome::Cancelled => worker.breaker.pass(ended.probe),
        }
        if matches!(outcome, Outcome::Failed | Outcome::Refused) {
            self.index.undo(slot, &ended.chain, ended.cached_blocks, ticket.0);
        }
    }

    /// How many leading tokens of the prompt a worker probably has.
    ///
    /// # Errors
    /// There is no such worker.
    pub fn cached_tokens(&self, id: WorkerId, prompt: &Prompt) -> Result<u64, RouterError> {
        let slot: Slot = self.workers.slot(id)?;
        Ok(prompt.tokens_of(self.index.depth(slot, prompt.hashes()) as u32))
    }

    /// The settings.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The index.
    pub fn index(&self) -> &PrefixIndex {
        &self.index
    }

    /// One worker.
    ///
    /// # Errors
    /// There is no such worker.
    pub fn worker(&self, id: WorkerId) -> Result<&Worker, RouterError> {
        Ok(self.workers.at(self.workers.slot(id)?))
    }

    /// All workers.
    pub fn workers(&self) -> impl Iterator<Item = &Worker> {
        self.workers.iter().map(|(_, worker)| worker)
    }

    /// Blocks that are expected in a worker's cache.
    ///
    /// # Errors
    /// There is no such worker.
    pub fn num_blocks(&self, id: WorkerId) -> Result<usize, RouterError> {
        Ok(self.index.num_blocks(self.workers.slot(id)?))
    }

    /// Requests selected and not finished, also those of removed workers.
    pub fn num_tickets(&self) -> usize {
        self.tickets.len()
    }
}

impl Config {
    /// What waits at a worker, in prompt tokens: its prompts, its decoding requests, its full pool.
    fn backlog(&self, worker: &Worker, now: f64) -> f64 {
        let (load, max_age_s) = (&worker.load, self.report_max_age_s);
        let kv_used = load.fresh_report(now, max_age_s).map_or(0.0, |report| report.kv_used);
        let kv_used = kv_used.clamp(0.0, 100.0 / 101.0);
        load.outstanding_tokens(now, max_age_s) as f64
            + self.decode_weight * load.requests(now, max_age_s) as f64
            + self.kv_weight * kv_used / (1.0 - kv_used)
    }
}
