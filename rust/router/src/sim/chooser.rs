//! A router of the fleet, whatever its policy.

use crate::core::{
    Config, Outcome, Prompt, Report, Router, RouterError, Selection, TicketId, WorkerId,
    WorkerOptions, WorkerState,
};

/// A chosen worker, and how to speak of the request from now on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chosen {
    pub(super) worker: usize,
    pub(super) ticket: u64,
    /// Prompt tokens that the router expects in the worker's cache.
    pub(super) expected_tokens: u64,
}

/// What the fleet asks and tells. Workers are 0, 1, ...
pub(super) trait Chooser {
    /// None: nobody may be chosen.
    fn select(&mut self, prompt: &Prompt, exclude: &[usize], now: f64) -> Option<Chosen>;
    /// The answer has begun.
    fn started(&mut self, ticket: u64);
    /// The request has ended.
    fn finished(&mut self, ticket: u64, outcome: Outcome, now: f64);
    /// A worker told its load.
    fn report(&mut self, worker: usize, report: Report, now: f64);
    /// A worker was found dead, or alive again with an empty cache.
    fn set_ready(&mut self, worker: usize, ready: bool);
    /// Requests that are under way, in its opinion.
    fn num_in_flight(&self) -> usize;
}

/// Production's.
pub(super) struct Production {
    router: Router,
    exclude: Vec<WorkerId>,
}

impl Production {
    pub(super) fn new(
        config: Config,
        workers: usize,
        capacity_blocks: usize,
    ) -> Result<Self, RouterError> {
        let mut router = Router::new(config);
        for worker in 0..workers {
            let name = name(worker);
            let options =
                WorkerOptions { name: &name, capacity_blocks, ..WorkerOptions::default() };
            let id = router.add_worker(&options)?;
            debug_assert_eq!(id, WorkerId(worker as u32));
        }
        Ok(Self { router, exclude: Vec::new() })
    }
}

fn name(worker: usize) -> String {
    format!("http://worker-{worker}:30000")
}

const KNOWN: &str = "broken invariant: the fleet's workers are the router's";

impl Chooser for Production {
    fn select(&mut self, prompt: &Prompt, exclude: &[usize], now: f64) -> Option<Chosen> {
        self.exclude.clear();
        self.exclude.extend(exclude.iter().map(|worker| WorkerId(*worker as u32)));
        let selection = Selection { exclude: &self.exclude, ..Selection::default() };
        match self.router.select(prompt, &selection, now) {
            Ok(choice) => Some(Chosen {
                worker: choice.worker.0 as usize,
                ticket: choice.ticket.0,
                expected_tokens: choice.cached_tokens,
            }),
            Err(RouterError::Unavailable | RouterError::Busy(_)) => None,
            Err(error) => unreachable!("broken invariant: {error}"),
        }
    }

    fn started(&mut self, ticket: u64) {
        self.router.started(TicketId(ticket));
    }

    fn finished(&mut self, ticket: u64, outcome: Outcome, now: f64) {
        self.router.finished(TicketId(ticket), outcome, now);
    }

    fn report(&mut self, worker: usize, report: Report, now: f64) {
        self.router.report(WorkerId(worker as u32), report, now).expect(KNOWN);
    }

    fn set_ready(&mut self, worker: usize, ready: bool) {
        let id = WorkerId(worker as u32);
        let state = if ready { WorkerState::Ready } else { WorkerState::Down };
        self.router.set_state(id, state).expect(KNOWN);
        self.router.forget_cache(id).expect(KNOWN);
    }

    fn num_in_flight(&self) -> usize {
        self.router.num_tickets()
    }
}
