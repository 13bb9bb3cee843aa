//! One simulated engine: the production scheduler, and a clock for its steps.

use scheduler::{Policy, Scheduler, Target};

use super::config::EngineConfig;
use super::error::SimError;
use super::messages::{self, Event};
use super::step_time::StepTime;
use super::trace::PROMPT_IDS;
use crate::core::Report;

/// An engine. Its scheduler is made when the first request comes.
pub(super) struct Engine {
    scheduler: Option<Scheduler>,
    /// Came during the step under way: the loop reads its messages between steps.
    inbox: Vec<Arrived>,
    /// The step under way and how many tokens it samples.
    step: Option<(u64, usize)>,
    next_id: u32,
    pub(super) alive: bool,
    /// Counts deaths: events of an earlier life mean nothing.
    pub(super) life: u32,
    pub(super) busy_s: f64,
    pub(super) steps: u64,
}

/// A request at the engine's door.
pub(super) struct Arrived {
    pub(super) key: u64,
    pub(super) prompt: Vec<u32>,
    pub(super) max_new_tokens: u32,
}

/// What all engines share.
pub(super) struct Shared {
    config: scheduler::Config,
    step_time: StepTime,
    arena: Vec<u8>,
    result: Vec<u8>,
}

impl Shared {
    pub(super) fn new(engine: &EngineConfig, step_time: StepTime) -> Result<Self, SimError> {
        let policy = match engine.policy.as_str() {
            "fcfs" => Policy::Fcfs,
            "lpm" => Policy::Lpm,
            other => return Err(SimError::Config(format!("engine.policy {other:?}: fcfs or lpm"))),
        };
        let arena_bytes = (4 << 20)
            + 16 * engine.max_context_len as usize
            + 64 * engine.max_batch_tokens as usize
            + 1024 * engine.max_running_requests as usize;
        let config = scheduler::Config {
            page_size: engine.page_size,
            num_pages: engine.pool_tokens / engine.page_size + 1,
            max_running_requests: engine.max_running_requests,
            max_queued_requests: None,
            max_queued_batch_requests: None,
            max_batch_tokens: engine.max_batch_tokens,
            mixed_steps: None,
            max_chunk_tokens: None,
            max_context_len: engine.max_context_len,
            vocab_size: 2 * PROMPT_IDS - 1,
            eos_token_ids: Vec::new(),
            policy,
            priority_scheduling: false,
            low_priority_first: false,
            aging_steps: 256,
            prefix_cache: true,
            overlap_depth: 0,
            waiting_timeout_s: None,
            new_token_ratio_init: 0.7,
            new_token_ratio_min: 0.1,
            new_token_ratio_decay_steps: 600,
            max_samples: 1,
            arena_bytes,
            tokenizer_json: None,
        };
        config.check()?;
        Ok(Self { config, step_time, arena: vec![0; arena_bytes], result: Vec::new() })
    }
}

impl Engine {
    pub(super) fn new() -> Self {
        Self {
            scheduler: None,
            inbox: Vec::new(),
            step: None,
            next_id: 0,
            alive: true,
            life: 0,
            busy_s: 0.0,
            steps: 0,
        }
    }

    pub(super) fn submit(&mut self, arrived: Arrived) {
        self.inbox.push(arrived);
    }

    pub(super) fn is_computing(&self) -> bool {
        self.step.is_some()
    }

    /// Reads the messages that came and begins a step, if there is something to compute. Returns how
    /// long it takes, the keys that were read, and events that did not wait for the step.
    pub(super) fn begin_step(&mut self, shared: &mut Shared, now: f64) -> Begun {
        let mut begun = Begun::default();
        let scheduler = match &mut self.scheduler {
            Some(scheduler) => scheduler,
            None if self.inbox.is_empty() => return begun,
            empty => {
                let made = Scheduler::new(shared.config.clone());
                empty.insert(made.expect("broken invariant: the settings were checked"))
            }
        };
        for Arrived { key, prompt, max_new_tokens } in self.inbox.drain(..) {
            let message = messages::submit(key, &prompt, max_new_tokens);
            scheduler.submit(0, &message, now).expect("broken invariant: a well-formed message");
            begun.accepted.push(key);
        }
        let planned = scheduler.plan(now, &mut shared.arena);
        begun.events = take_events(scheduler);
        scheduler.take_entered(); // nobody asks who ran when a worker is lost
        if let Some(step) = planned.expect("broken invariant: one step at a time") {
            let (work, num_samples) = messages::read_plan(&shared.arena);
            let seconds = shared.step_time.seconds(&work);
            self.step = Some((step, num_samples));
            self.busy_s += seconds;
            self.steps += 1;
            begun.seconds = Some(seconds);
        }
        begun
    }

    /// Ends the step under way.
    pub(super) fn end_step(&mut self, shared: &mut Shared, now: f64) -> Vec<Event> {
        let (step, num_samples) = self.step.take().expect("broken invariant: a step is under way");
        let scheduler = self.scheduler.as_mut().expect("broken invariant: it planned the step");
        messages::result(step, num_samples, &mut self.next_id, &mut shared.result);
        let committed = scheduler.commit(now, &shared.result);
        committed.expect("broken invariant: a well-formed result");
        take_events(scheduler)
    }

    /// Loses everything.
    pub(super) fn die(&mut self) {
        if let Some(mut scheduler) = self.scheduler.take() {
            scheduler.abort(Target::All);
        }
        self.inbox.clear();
        self.step = None;
        self.alive = false;
        self.life += 1;
    }

    /// What it would say of itself.
    pub(super) fn report(&self) -> Report {
        let Some(scheduler) = &self.scheduler else { return Report::default() };
        let mut report = Report::default();
        let (mut used, mut total) = (0.0, 1.0);
        for (name, value) in scheduler.stats() {
            match name {
                "num_running" => report.running = value as u64,
                "num_waiting" => report.waiting = value as u64,
                "num_waiting_uncached_tokens" => report.waiting_uncached_tokens = value as u64,
                "used_tokens" => used = value,
                "total_tokens" => total = value,
                _ => {}
            }
        }
        report.kv_used = used / total;
        report
    }

    /// Checks the invariants of its scheduler and tree.
    pub(super) fn check_integrity(&self) -> Result<(), String> {
        let Some(scheduler) = &self.scheduler else { return Ok(()) };
        scheduler.check_integrity().map_err(|error| error.to_string())
    }
}

/// What came of [`Engine::begin_step`].
#[derive(Default)]
pub(super) struct Begun {
    pub(super) seconds: Option<f64>,
    pub(super) accepted: Vec<u64>,
    pub(super) events: Vec<Event>,
}

fn take_events(scheduler: &mut Scheduler) -> Vec<Event> {
    let blobs = scheduler.take_events();
    blobs.iter().flat_map(|(_, bytes)| messages::events(bytes)).collect()
}
