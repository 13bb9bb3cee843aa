//! The loop over events.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::chooser::{Chooser, Production};
use super::config::{FleetConfig, FleetPolicy};
use super::engine::{Arrived, Engine, Shared};
use super::error::SimError;
use super::messages::Event as EngineEvent;
use super::summary::{Engines, Gauges, Summary};
use super::threshold::{Miss, Threshold, Thresholds};
use super::trace::Trace;
use crate::core::{Outcome, Report};

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// It has all that it asked for.
    Completed,
    /// Its worker died when the answer had begun: nobody may hide that.
    Broken,
    /// Every attempt failed, or no worker could be chosen.
    Lost,
    /// The engine would not take it: it is longer than the context or the pool.
    Refused,
}

/// What became of one request. Times are in seconds.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// When it came.
    pub arrival_s: f64,
    /// When its first token was there.
    pub first_token_s: Option<f64>,
    /// When it ended.
    pub end_s: f64,
    /// How it ended; none while it is under way.
    pub end: Option<End>,
    /// Tokens of its prompt.
    pub prompt_tokens: u64,
    /// Tokens that it asked for.
    pub output_tokens: u64,
    /// Prompt tokens that came from the cache.
    pub cached_tokens: u64,
    /// Prompt tokens that its router expected to.
    pub expected_tokens: u64,
    /// Its last worker.
    pub worker: usize,
    /// Workers that it was sent to.
    pub attempts: usize,
    router: usize,
    ticket: u64,
}

/// Something that happens at a time.
enum Event {
    Arrival(usize),
    StepEnd { worker: usize, life: u32 },
    Report { router: usize, worker: usize, report: Report },
    Reports(Vec<(usize, Report)>),
    Poll,
    Death { worker: usize, down_s: f64 },
    Return { worker: usize, life: u32 },
    Found { worker: usize, ready: bool },
}

struct Scheduled {
    at_s: f64,
    order: u64,
    event: Event,
}

impl PartialEq for Scheduled {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Scheduled {}

impl PartialOrd for Scheduled {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Scheduled {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.at_s.total_cmp(&other.at_s).then(self.order.cmp(&other.order))
    }
}

/// Engines behind routers.
pub struct Fleet {
    config: FleetConfig,
    trace: Trace,
    shared: Shared,
    engines: Vec<Engine>,
    routers: Vec<Box<dyn Chooser>>,
    records: Vec<Record>,
    gauges: Gauges,
    unended: usize,
    events: BinaryHeap<Reverse<Scheduled>>,
    order: u64,
    now_s: f64,
    rng: ChaCha8Rng,
}

impl Fleet {
    /// A fleet that is going to serve a trace.
    ///
    /// # Errors
    /// The settings of routers or engines are out of range.
    pub fn new(config: FleetConfig, trace: &Trace) -> Result<Self, SimError> {
        let shared = Shared::new(&config.engine, config.step_time)?;
        let routers = (0..config.routers).map(|router| chooser(&config, router));
        let routers = routers.collect::<Result<Vec<_>, _>>()?;
        let trace = trace.arranged(&config);
        let records: Vec<Record> = trace
            .requests
            .iter()
            .map(|request| Record {
                arrival_s: request.timestamp / 1e3,
                first_token_s: None,
                end_s: f64::NAN,
                end: None,
                prompt_tokens: u64::from(request.input_length),
                output_tokens: u64::from(request.output_length),
                cached_tokens: 0,
                expected_tokens: 0,
                worker: 0,
                attempts: 0,
                router: 0,
                ticket: 0,
            })
            .collect();
        let mut fleet = Self {
            engines: (0..config.workers).map(|_| Engine::new()).collect(),
            rng: ChaCha8Rng::seed_from_u64(config.seed ^ 0x666c_6565),
            unended: records.len(),
            gauges: Gauges::default(),
            events: BinaryHeap::new(),
            order: 0,
            now_s: 0.0,
            config,
            trace,
            shared,
            routers,
            records,
        };
        fleet.schedule_all();
        Ok(fleet)
    }

    fn schedule_all(&mut self) {
        if !self.records.is_empty() {
            self.schedule(self.records[0].arrival_s, Event::Arrival(0));
            self.schedule(self.config.reports.poll_s, Event::Poll);
        }
        for failure in self.config.failures.clone() {
            let event = Event::Death { worker: failure.worker, down_s: failure.down_s };
            self.schedule(failure.at_s, event);
        }
    }

    fn schedule(&mut self, at_s: f64, event: Event) {
        assert!(at_s >= self.now_s, "broken invariant: time goes forward");
        self.order += 1;
        self.events.push(Reverse(Scheduled { at_s, order: self.order, event }));
    }

    /// Serves every request of the trace to its end.
    pub fn run(mut self) -> Outcomes {
        while self.unended > 0 {
            let Reverse(next) = self.events.pop().expect("broken invariant: something goes on");
            self.now_s = next.at_s;
            self.handle(next.event);
        }
        let busy_s: Vec<f64> = self.engines.iter().map(|engine| engine.busy_s).collect();
        let steps: u64 = self.engines.iter().map(|engine| engine.steps).sum();
        let engines = Engines { busy_s: &busy_s, steps, step_time: &self.config.step_time };
        let summary = Summary::new(&self.records, &self.trace, &self.gauges, &engines);
        Outcomes { records: self.records, summary, engines: self.engines, routers: self.routers }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Arrival(request) => {
                if let Some(next) = self.records.get(request + 1) {
                    self.schedule(next.arrival_s, Event::Arrival(request + 1));
                }
                self.records[request].router = self.rng.random_range(0..self.routers.len());
                self.dispatch(request, Vec::new());
            }
            Event::StepEnd { worker, life } if self.engines[worker].life == life => {
                let events = self.engines[worker].end_step(&mut self.shared, self.now_s);
                self.take(events);
                self.begin_step(worker);
            }
            Event::Report { router, worker, report } => {
                self.routers[router].report(worker, report, self.now_s);
            }
            Event::Reports(reports) => {
                for router in &mut self.routers {
                    for (worker, report) in &reports {
                        router.report(*worker, *report, self.now_s);
                    }
                }
            }
            Event::Poll => self.poll(),
            Event::Death { worker, down_s } => self.kill(worker, down_s),
            Event::Return { worker, life } if self.engines[worker].life == life => {
                self.engines[worker].alive = true;
                let found = Event::Found { worker, ready: true };
                self.schedule(self.now_s + self.config.detect_s, found);
            }
            Event::Found { worker, ready } => {
                if self.engines[worker].alive == ready {
                    for router in &mut self.routers {
                        router.set_ready(worker, ready);
                    }
                }
            }
            // Of an engine that has died since.
            Event::StepEnd { .. } | Event::Return { .. } => {}
        }
    }

    /// Sends a request to a worker, and to others if that one is dead.
    fn dispatch(&mut self, request: usize, mut tried: Vec<usize>) {
        let prompt = self.trace.prompt(request);
        let router = self.records[request].router;
        while self.records[request].attempts < self.config.max_attempts {
            let chosen = self.routers[router].select(&prompt, &tried, self.now_s);
            let Some(chosen) = chosen else { break };
            let record = &mut self.records[request];
            record.attempts += 1;
            record.worker = chosen.worker;
            record.ticket = chosen.ticket;
            record.expected_tokens = chosen.expected_tokens;
            if self.engines[chosen.worker].alive {
                self.engines[chosen.worker].submit(Arrived {
                    key: request as u64,
                    prompt: self.trace.tokens(request),
                    max_new_tokens: self.trace.requests[request].output_length,
                });
                if !self.engines[chosen.worker].is_computing() {
                    self.begin_step(chosen.worker);
                }
                return;
            }
            self.routers[router].finished(chosen.ticket, Outcome::Failed, self.now_s);
            tried.push(chosen.worker);
        }
        self.end(request, End::Lost);
    }

    fn begin_step(&mut self, worker: usize) {
        let begun = self.engines[worker].begin_step(&mut self.shared, self.now_s);
        if !begun.accepted.is_empty() && self.config.reports.enabled {
            let report = self.engines[worker].report();
            for key in begun.accepted {
                let router = self.records[key as usize].router;
                let at_s = self.now_s + self.config.reports.delay_s;
                self.schedule(at_s, Event::Report { router, worker, report });
            }
        }
        self.take(begun.events);
        if let Some(seconds) = begun.seconds {
            let life = self.engines[worker].life;
            self.schedule(self.now_s + seconds, Event::StepEnd { worker, life });
        }
    }

    fn take(&mut self, events: Vec<EngineEvent>) {
        for event in events {
            match event {
                EngineEvent::Started { key, cached_tokens } => {
                    let record = &mut self.records[key as usize];
                    record.first_token_s = Some(self.now_s);
                    record.cached_tokens = cached_tokens;
                    self.routers[record.router].started(record.ticket);
                }
                EngineEvent::Ended { key, complete } => {
                    let record = &self.records[key as usize];
                    let router = &mut self.routers[record.router];
                    router.finished(record.ticket, Outcome::Completed, self.now_s);
                    self.end(key as usize, if complete { End::Completed } else { End::Refused });
                }
                EngineEvent::Other => {}
            }
        }
    }

    fn end(&mut self, request: usize, end: End) {
        let record = &mut self.records[request];
        assert!(record.end.is_none(), "broken invariant: a request ends once");
        record.end = Some(end);
        record.end_s = self.now_s;
        self.unended -= 1;
    }

    /// Looks at the queues, and tells the routers of every engine that has something to do.
    fn poll(&mut self) {
        let mut reports = Vec::new();
        for (worker, engine) in self.engines.iter().enumerate() {
            let report = if engine.is_computing() { engine.report() } else { Report::default() };
            self.gauges.add(&report);
            if engine.alive {
                reports.push((worker, report));
            }
        }
        self.gauges.end_look();
        if self.config.reports.enabled {
            let at_s = self.now_s + self.config.reports.delay_s;
            self.schedule(at_s, Event::Reports(reports));
        }
        self.schedule(self.now_s + self.config.reports.poll_s, Event::Poll);
    }

    /// A worker dies: what it had is tried elsewhere if nothing of the answer was seen.
    fn kill(&mut self, worker: usize, down_s: f64) {
        if !self.engines[worker].alive {
            return;
        }
        self.engines[worker].die();
        let life = self.engines[worker].life;
        self.schedule(self.now_s + down_s, Event::Return { worker, life });
        let found = Event::Found { worker, ready: false };
        self.schedule(self.now_s + self.config.detect_s, found);
        for request in 0..self.records.len() {
            let record = &self.records[request];
            if record.worker != worker || record.attempts == 0 || record.end.is_some() {
                continue;
            }
            self.routers[record.router].finished(record.ticket, Outcome::Failed, self.now_s);
            if record.first_token_s.is_some() {
                self.end(request, End::Broken);
            } else {
                self.dispatch(request, vec![worker]);
            }
        }
    }
}

/// What a simulation leaves behind.
pub struct Outcomes {
    /// One per request, in the order of arrival.
    pub records: Vec<Record>,
    /// The figures.
    pub summary: Summary,
    engines: Vec<Engine>,
    routers: Vec<Box<dyn Chooser>>,
}

impl Outcomes {
    /// Checks that nothing is left: no request in a router's account, sound schedulers and trees.
    ///
    /// # Errors
    /// The message says what is.
    pub fn check_integrity(&self) -> Result<(), String> {
        for (number, router) in self.routers.iter().enumerate() {
            let left = router.num_in_flight();
            if left > 0 {
                return Err(format!("router {number} still has {left} requests in flight"));
            }
        }
        self.engines.iter().try_for_each(Engine::check_integrity)
    }
}

fn chooser(config: &FleetConfig, router: usize) -> Result<Box<dyn Chooser>, SimError> {
    if let Some(name) = config.policy.production() {
        let capacity_blocks = (config.engine.pool_tokens / config.block_tokens).max(1) as usize;
        let settings = config.core_config(name, router)?;
        return Ok(Box::new(Production::new(settings, config.workers, capacity_blocks)?));
    }
    if !config.router.is_empty() {
        let message = "router settings are of production's policies; this one has none";
        return Err(SimError::Config(message.to_owned()));
    }
    let thresholds = if config.policy == FleetPolicy::SglangThreshold {
        Thresholds {
            cache: 0.3,
            balance_absolute: 64,
            balance_relative: 1.5,
            miss: Miss::FewestRequests,
        }
    } else {
        Thresholds {
            cache: 0.5,
            balance_absolute: 32,
            balance_relative: 1.1,
            miss: Miss::SmallestTree,
        }
    };
    let seed = config.seed.wrapping_add(router as u64);
    Ok(Box::new(Threshold::new(thresholds, config.workers, config.block_tokens, seed)))
}
