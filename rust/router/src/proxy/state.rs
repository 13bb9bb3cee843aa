//! What all connections share: workers, the choice, the queue, the figures.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, RwLock};
use std::time::{Duration, Instant};

use hyper::header::HeaderValue;
use tokio::sync::{Notify, watch};

use super::config::Config;
use super::errors::Refusal;
use super::log;
use super::metrics::Metrics;
use crate::core::{Choice, Outcome, Report, Router, WorkerId, WorkerOptions, WorkerState};

/// One worker, as far as HTTP is concerned.
pub(super) struct Endpoint {
    pub(super) id: WorkerId,
    /// `http://host:port`, with a path in front of all paths if it has one, without a last slash.
    pub(super) url: String,
    pub(super) host: HeaderValue,
    /// Wakes whoever waits for an answer when the worker is found dead.
    pub(super) lost: Notify,
    /// Wakes the health task: somebody had trouble with the worker.
    pub(super) suspected: Notify,
    down: AtomicBool,
    /// Once healthy, it finishes what it has.
    pub(super) draining: AtomicBool,
    /// When it last sent something, in milliseconds since the start.
    heard_ms: AtomicU64,
    /// It has left; its health task ends.
    pub(super) removed: watch::Sender<bool>,
}

/// See the module.
pub(super) struct Shared {
    pub(super) config: Config,
    pub(super) metrics: Metrics,
    router: Mutex<Router>,
    endpoints: RwLock<HashMap<WorkerId, Arc<Endpoint>>>,
    /// Wakes waiting requests when a worker may have become free.
    pub(super) freed: Notify,
    pub(super) queued: AtomicUsize,
    pub(super) in_flight: AtomicUsize,
    /// Hundredths of retries that may still be made.
    budget: AtomicI64,
    pub(super) stopping: watch::Sender<bool>,
    started: Instant,
    next_id: AtomicU64,
    boot: u64,
}

const BUDGET_MOST: i64 = 2_000;
const BUDGET_RETRY: i64 = 100;

impl Shared {
    pub(super) fn new(config: Config) -> Self {
        let boot = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(0, |time| time.as_nanos() as u64);
        Self {
            router: Mutex::new(Router::new(config.choice.clone())),
            config,
            metrics: Metrics::new(),
            endpoints: RwLock::default(),
            freed: Notify::new(),
            queued: AtomicUsize::new(0),
            in_flight: AtomicUsize::new(0),
            budget: AtomicI64::new(BUDGET_MOST),
            stopping: watch::Sender::new(false),
            started: Instant::now(),
            next_id: AtomicU64::new(0),
            boot,
        }
    }

    /// Seconds since the start.
    pub(super) fn now(&self) -> f64 {
        self.started.elapsed().as_secs_f64()
    }

    fn now_ms(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }

    /// The choice. Never held across an await.
    pub(super) fn router(&self) -> MutexGuard<'_, Router> {
        self.router.lock().expect("the router is unusable: it panicked in an earlier call")
    }

    /// An id for a request that brings none.
    pub(super) fn new_request_id(&self) -> String {
        format!("{:x}-{:x}", self.boot, self.next_id.fetch_add(1, Ordering::Relaxed))
    }

    pub(super) fn endpoint(&self, id: WorkerId) -> Option<Arc<Endpoint>> {
        self.endpoints.read().expect("no writer panics").get(&id).cloned()
    }

    /// All workers, by id.
    pub(super) fn endpoints(&self) -> Vec<Arc<Endpoint>> {
        let endpoints = self.endpoints.read().expect("no writer panics");
        let mut all: Vec<_> = endpoints.values().cloned().collect();
        all.sort_by_key(|endpoint| endpoint.id);
        all
    }

    /// The ready worker with the lowest id; with none, the one with the lowest id.
    pub(super) fn first_ready(&self) -> Option<WorkerId> {
        let all = self.endpoints();
        let router = self.router();
        let is_ready = |id| router.worker(id).is_ok_and(|it| it.state == WorkerState::Ready);
        all.iter().find(|one| is_ready(one.id)).or(all.first()).map(|one| one.id)
    }

    /// Adds a worker, which gets requests once it is seen healthy.
    pub(super) fn add_worker(&self, url: &str) -> Result<Arc<Endpoint>, Refusal> {
        let (url, host) = parse_url(url)?;
        let options = WorkerOptions {
            name: &url,
            capacity_blocks: self.config.blocks_of(self.config.cache_tokens),
            state: WorkerState::Joining,
        };
        let added = self.router().add_worker(&options);
        let id = added.map_err(|error| Refusal::bad_request(error.to_string()))?;
        let endpoint = Arc::new(Endpoint {
            id,
            url,
            host,
            lost: Notify::new(),
            suspected: Notify::new(),
            down: AtomicBool::new(false),
            draining: AtomicBool::new(false),
            heard_ms: AtomicU64::new(0),
            removed: watch::Sender::new(false),
        });
        self.endpoints.write().expect("no writer panics").insert(id, Arc::clone(&endpoint));
        log::line(format_args!("worker {} added: {}", id.0, endpoint.url));
        Ok(endpoint)
    }

    /// Forgets a worker. Answers that it is sending go on.
    pub(super) fn remove_worker(&self, endpoint: &Endpoint) {
        if self.endpoints.write().expect("no writer panics").remove(&endpoint.id).is_some() {
            let _ = self.router().remove_worker(endpoint.id);
            endpoint.removed.send_replace(true);
            self.metrics.forget_worker(&endpoint.url);
            log::line(format_args!("worker {} removed: {}", endpoint.id.0, endpoint.url));
        }
    }

    /// The state of a worker, if it is still there.
    pub(super) fn state(&self, id: WorkerId) -> Option<WorkerState> {
        self.router().worker(id).ok().map(|worker| worker.state)
    }

    /// Changes a worker's state and tells those whom it concerns.
    pub(super) fn set_state(&self, endpoint: &Endpoint, state: WorkerState) {
        if self.router().set_state(endpoint.id, state).is_err() {
            return;
        }
        endpoint.down.store(state == WorkerState::Down, Ordering::Relaxed);
        match state {
            WorkerState::Down => {
                // Whatever comes back at this address may have an empty cache.
                let _ = self.router().forget_cache(endpoint.id);
                endpoint.lost.notify_waiters();
            }
            WorkerState::Joining => drop(self.router().forget_cache(endpoint.id)),
            WorkerState::Ready => self.freed.notify_waiters(),
            WorkerState::Draining => {}
        }
        let id = endpoint.id.0;
        log::line(format_args!("worker {id} is {}: {}", state_name(state), endpoint.url));
    }

    pub(super) fn report(&self, endpoint: &Endpoint, report: Report) {
        let _ = self.router().report(endpoint.id, report, self.now());
    }

    /// Notes that a worker sent something.
    pub(super) fn heard(&self, endpoint: &Endpoint) {
        endpoint.heard_ms.store(self.now_ms(), Ordering::Relaxed);
    }

    /// Whether a worker sent something lately.
    pub(super) fn heard_within(&self, endpoint: &Endpoint, time: Duration) -> bool {
        let heard = endpoint.heard_ms.load(Ordering::Relaxed);
        heard > 0 && self.now_ms().saturating_sub(heard) < time.as_millis() as u64
    }

    /// Every request adds its part of a retry.
    pub(super) fn earn_retry(&self) {
        let earned = (self.config.retry_budget * BUDGET_RETRY as f64) as i64;
        let _ = self.budget.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
            Some((left + earned).min(BUDGET_MOST))
        });
    }

    /// Takes a retry from the budget, if there is one.
    pub(super) fn spend_retry(&self) -> bool {
        self.config.retry_budget > 0.0
            && self
                .budget
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
                    (left >= BUDGET_RETRY).then_some(left - BUDGET_RETRY)
                })
                .is_ok()
    }
}

impl Endpoint {
    pub(super) fn is_down(&self) -> bool {
        self.down.load(Ordering::Relaxed)
    }
}

/// One request at one worker. Dropped early, it counts as left by its client.
pub(super) struct Flight {
    pub(super) shared: Arc<Shared>,
    pub(super) endpoint: Arc<Endpoint>,
    pub(super) choice: Choice,
    outcome: Outcome,
}

impl Flight {
    pub(super) fn new(shared: Arc<Shared>, endpoint: Arc<Endpoint>, choice: Choice) -> Self {
        Self { shared, endpoint, choice, outcome: Outcome::Cancelled }
    }

    /// The answer has begun.
    pub(super) fn started(&self) {
        self.shared.router().started(self.choice.ticket);
    }

    /// It was answered.
    pub(super) fn complete(&mut self) {
        if self.outcome == Outcome::Cancelled {
            self.outcome = Outcome::Completed;
        }
    }

    /// The worker would not take it.
    pub(super) fn refuse(&mut self) {
        self.outcome = Outcome::Refused;
    }

    /// It would not, and may not be ready for anybody.
    pub(super) fn refuse_unready(&mut self) {
        self.outcome = Outcome::Refused;
        self.endpoint.suspected.notify_one();
    }

    /// The worker broke.
    pub(super) fn fail(&mut self, why: &str) {
        self.outcome = Outcome::Failed;
        self.shared.metrics.worker_failures.with_label_values(&[&self.endpoint.url, why]).inc();
        self.endpoint.suspected.notify_one();
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        let now = self.shared.now();
        self.shared.router().finished(self.choice.ticket, self.outcome, now);
        if self.shared.queued.load(Ordering::Relaxed) > 0 {
            self.shared.freed.notify_one();
        }
    }
}

/// Counts one request for as long as it lives.
pub(super) struct Counted(pub(super) Arc<Shared>);

impl Counted {
    pub(super) fn new(shared: &Arc<Shared>) -> Self {
        shared.in_flight.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(shared))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
        if self.0.queued.load(Ordering::Relaxed) > 0 {
            self.0.freed.notify_one();
        }
    }
}

pub(super) fn state_name(state: WorkerState) -> &'static str {
    match state {
        WorkerState::Joining => "joining",
        WorkerState::Ready => "ready",
        WorkerState::Draining => "draining",
        WorkerState::Down => "down",
    }
}

/// A worker's address, brought into one form, and its `Host` header.
fn parse_url(text: &str) -> Result<(String, HeaderValue), Refusal> {
    let bad = |why: &str| {
        Refusal::bad_request(format!(
            "{text:?} is no worker's address: {why}; give http://host:port"
        ))
    };
    let url = text.trim().trim_end_matches('/');
    let uri: hyper::Uri = url.parse().map_err(|_| bad("it cannot be read"))?;
    match uri.scheme_str() {
        Some("http") => {}
        Some("https") => return Err(bad("TLS to workers is not supported")),
        _ => return Err(bad("it must begin with http://")),
    }
    if uri.query().is_some() {
        return Err(bad("it has a query"));
    }
    let authority = uri.authority().ok_or_else(|| bad("it names no host"))?;
    if authority.as_str().contains('@') {
        return Err(bad("it has a user name"));
    }
    let host =
        HeaderValue::from_str(authority.as_str()).map_err(|_| bad("its host is unusable"))?;
    Ok((url.to_owned(), host))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Settings for tests.
    pub(in crate::proxy) fn config() -> Config {
        Config {
            host: "127.0.0.1".to_owned(),
            port: 0,
            workers: Vec::new(),
            choice: crate::core::Config::default(),
            api_key: None,
            admin_api_key: None,
            worker_api_key: None,
            max_body_bytes: 1 << 20,
            max_in_flight: 0,
            queue_size: 10,
            queue_timeout_s: 1.0,
            max_attempts: 3,
            retry_budget: 0.1,
            connect_timeout_s: 1.0,
            first_byte_timeout_s: 10.0,
            idle_timeout_s: 10.0,
            health_path: "/health".to_owned(),
            health_interval_s: 1.0,
            health_timeout_s: 1.0,
            health_failures: 3,
            load_poll: false,
            cache_tokens: 100_000,
            block_bytes: 128,
            bytes_per_token: 4.0,
            keep_alive_timeout_s: 65.0,
            shutdown_grace_s: 1.0,
            threads: 1,
            reuse_port: false,
        }
    }

    #[test]
    fn addresses_have_one_form() {
        let good = parse_url(" http://a:1/base/ ").expect("a good one");
        assert_eq!((good.0.as_str(), good.1.as_bytes()), ("http://a:1/base", &b"a:1"[..]));
        for bad in ["", "a:1", "https://a", "http://", "http://u:p@a", "http://a/?q", "ftp://a"] {
            let refusal = parse_url(bad).expect_err(bad);
            assert!(refusal.message.contains("give http://host:port"), "{}", refusal.message);
        }
    }

    #[test]
    fn retries_are_a_part_of_the_requests() {
        let shared = Shared::new(config());
        let spent = || (0..1_000).take_while(|_| shared.spend_retry()).count();
        assert_eq!(spent(), 20);
        for _ in 0..50 {
            shared.earn_retry();
        }
        assert_eq!(spent(), 5);
    }
}
