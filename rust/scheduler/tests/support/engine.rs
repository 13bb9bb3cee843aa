//! Scheduler, runner and client, wired as the engine's loop does it.

use std::collections::VecDeque;

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use scheduler::{Config, Scheduler, Target};

use super::blocks::{Plan, StepResult};
use super::client::{Client, Sample, Sent};
use super::messages::{self, Event, Submit};
use super::runner::Runner;

pub const CLIENT: i64 = 5;

pub struct Engine {
    pub scheduler: Scheduler,
    pub config: Config,
    pub runner: Runner,
    pub client: Client,
    /// Events of every kind, in order, since the test looked last.
    pub log: Vec<Event>,
    pub now: f64,
    pub rng: ChaCha8Rng,
    results: VecDeque<StepResult>,
    arena: Vec<u8>,
}

impl Engine {
    pub fn new(config: Config) -> Self {
        Self::seeded(config, 0)
    }

    pub fn seeded(config: Config, seed: u64) -> Self {
        Self {
            scheduler: Scheduler::new(config.clone()).unwrap(),
            runner: Runner::new(&config),
            arena: vec![0; config.arena_bytes],
            config,
            client: Client::default(),
            log: Vec::new(),
            now: 1000.0,
            rng: ChaCha8Rng::seed_from_u64(seed),
            results: VecDeque::new(),
        }
    }

    /// Sends a request; returns its id if it must be prepared.
    pub fn submit(&mut self, submit: &Submit) -> Option<u64> {
        self.client.sent(submit);
        let id = self.scheduler.submit(CLIENT, &submit.encode(), self.now).unwrap();
        self.settle();
        id
    }

    pub fn abort(&mut self, target: Target) -> usize {
        let met = self.scheduler.abort(target);
        self.settle();
        met
    }

    /// Plans a step and executes it; its result waits to be committed.
    pub fn plan(&mut self) -> Option<Plan> {
        let step = self.scheduler.plan(self.now, &mut self.arena).unwrap();
        self.settle();
        let plan = Plan::parse(step.map(|_| &self.arena[..])?);
        assert_eq!(Some(plan.step), step);
        assert!(plan.num_tokens() <= self.config.max_batch_tokens as usize, "the token budget");
        let result = self.runner.execute(&plan, &mut self.rng);
        self.results.push_back(result);
        Some(plan)
    }

    pub fn in_flight(&self) -> usize {
        self.results.len()
    }

    pub fn commit(&mut self) {
        let result = self.results.pop_front().expect("a step is in flight");
        self.scheduler.commit(self.now, &result.encode()).unwrap();
        self.runner.committed();
        self.settle();
    }

    /// One turn of the loop: plans while the depth allows, then commits the oldest step. False if
    /// there was nothing to do.
    pub fn turn(&mut self) -> bool {
        while self.in_flight() <= self.config.overlap_depth as usize && self.plan().is_some() {}
        let any = self.in_flight() > 0;
        if any {
            self.commit();
        }
        self.now += 0.01;
        any
    }

    /// Runs until nothing is left.
    pub fn drain(&mut self) {
        let mut turns = 0;
        while self.scheduler.has_work() {
            let progressed = self.turn() || !self.scheduler.has_work();
            assert!(progressed, "deadlock: {:?}", self.scheduler.stats());
            turns += 1;
            assert!(turns < 20_000, "no end: {:?}", self.scheduler.stats());
        }
        assert!(self.client.requests.values().all(Sent::is_over));
        assert_eq!(self.stat("used_tokens"), 0, "all memory is given back");
        assert_eq!(self.stat("num_waiting"), 0);
        assert_eq!(self.stat("num_running"), 0);
    }

    /// A gauge or counter that is a whole number.
    pub fn stat(&self, name: &str) -> u64 {
        let stats = self.scheduler.stats();
        stats.iter().find(|(known, _)| *known == name).expect("a known name").1 as u64
    }

    pub fn sample(&self, key: u64, sample: usize) -> &Sample {
        &self.client.requests[&key].samples[sample]
    }

    pub fn refusal(&self, key: u64) -> Option<(u16, &str)> {
        let refused = self.client.requests[&key].refused.as_ref();
        refused.map(|(status, message)| (*status, message.as_str()))
    }

    /// Delivers events, and checks every invariant.
    pub fn settle(&mut self) {
        for (client, bytes) in self.scheduler.take_events() {
            assert_eq!(client, CLIENT);
            for event in messages::decode(&bytes) {
                self.log.push(event.clone());
                self.client.apply(event);
            }
        }
        self.scheduler.check_integrity().unwrap();
    }
}
