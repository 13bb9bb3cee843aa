//! Whether the workers live: one task for each.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Empty, Limited};
use hyper::header::{AUTHORIZATION, HOST};
use hyper::{Request, StatusCode};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use tokio::time::{sleep, timeout};

use super::reports;
use super::state::{Endpoint, Shared};
use crate::core::WorkerState;

/// A worker that is not ready is looked at this often, or as often as the others if that is more.
const EAGER: Duration = Duration::from_secs(1);
const SPACING: Duration = Duration::from_millis(50);
const MAX_ANSWER_BYTES: usize = 1 << 20;

type Prober = Client<HttpConnector, Empty<Bytes>>;

/// What a probe found.
enum Probe {
    Healthy,
    /// It answers, and says that it is not ready.
    NotReady,
    /// Nobody listens there.
    Refused,
    /// It does not answer, or breaks off.
    Silent,
}

/// Watches a worker until it is removed. Must be called inside a runtime.
pub(super) fn watch(shared: &Arc<Shared>, endpoint: Arc<Endpoint>) {
    let shared = Arc::clone(shared);
    tokio::spawn(async move { Watch::new(shared, endpoint).run().await });
}

struct Watch {
    shared: Arc<Shared>,
    endpoint: Arc<Endpoint>,
    prober: Prober,
    failures: u32,
    tells_load: bool,
}

impl Watch {
    fn new(shared: Arc<Shared>, endpoint: Arc<Endpoint>) -> Self {
        let mut connector = HttpConnector::new();
        connector
            .set_connect_timeout(Some(Duration::from_secs_f64(shared.config.health_timeout_s)));
        // A connection of its own each time: a probe also tells whether there is somebody to connect to.
        let prober = Client::builder(TokioExecutor::new())
            .pool_max_idle_per_host(0)
            .pool_timer(TokioTimer::new())
            .build(connector);
        let tells_load = shared.config.load_poll;
        Self { shared, endpoint, prober, failures: 0, tells_load }
    }

    async fn run(mut self) {
        let mut removed = self.endpoint.removed.subscribe();
        let mut suspected = false;
        loop {
            if *removed.borrow() {
                return;
            }
            let busy = self.shared.heard_within(&self.endpoint, self.interval());
            if suspected || !busy || !self.is_serving() {
                self.look(suspected).await;
                // However many requests have trouble, the worker is not swamped with probes.
                sleep(SPACING).await;
            } else {
                self.failures = 0;
            }
            suspected = tokio::select! {
                () = sleep(self.interval()) => false,
                () = self.endpoint.suspected.notified() => true,
                _ = removed.changed() => return,
            };
        }
    }

    fn interval(&self) -> Duration {
        let interval = Duration::from_secs_f64(self.shared.config.health_interval_s);
        if self.failures == 0 && self.is_serving() { interval } else { interval.min(EAGER) }
    }

    fn is_serving(&self) -> bool {
        let state = self.shared.state(self.endpoint.id);
        matches!(state, Some(WorkerState::Ready | WorkerState::Draining))
    }

    async fn look(&mut self, suspected: bool) {
        let probe = self.probe().await;
        let Some(state) = self.shared.state(self.endpoint.id) else { return };
        match probe {
            Probe::Healthy => {
                self.failures = 0;
                if !self.is_serving() {
                    let draining = self.endpoint.draining.load(Ordering::Relaxed);
                    let next = if draining { WorkerState::Draining } else { WorkerState::Ready };
                    self.shared.set_state(&self.endpoint, next);
                }
                if self.tells_load {
                    self.tells_load = self.poll_load().await;
                }
            }
            Probe::NotReady => {
                self.failures = 0;
                if state != WorkerState::Joining {
                    self.shared.set_state(&self.endpoint, WorkerState::Joining);
                }
            }
            Probe::Refused | Probe::Silent => {
                self.failures += 1;
                let gone = suspected && matches!(probe, Probe::Refused);
                let over = gone || self.failures >= self.shared.config.health_failures;
                if over && state != WorkerState::Down {
                    self.shared.set_state(&self.endpoint, WorkerState::Down);
                }
            }
        }
    }

    async fn probe(&self) -> Probe {
        match self.get(&self.shared.config.health_path).await {
            Ok((status, _)) if status.is_success() => Probe::Healthy,
            Ok(_) => Probe::NotReady,
            Err(true) => Probe::Refused,
            Err(false) => Probe::Silent,
        }
    }

    /// Asks an idle worker for its load; false if it does not know the question.
    async fn poll_load(&self) -> bool {
        let Ok((status, body)) = self.get("/v1/loads").await else { return true };
        if let Some((report, cache_tokens)) = reports::from_loads(&body) {
            self.shared.report(&self.endpoint, report);
            if let Some(tokens) = cache_tokens {
                let blocks = self.shared.config.blocks_of(tokens);
                let _ = self.shared.router().set_capacity(self.endpoint.id, blocks);
            }
            return true;
        }
        status.is_server_error()
    }

    /// The answer to a GET; otherwise whether the connection was refused.
    async fn get(&self, path: &str) -> Result<(StatusCode, Bytes), bool> {
        let mut request =
            Request::get(format!("{}{path}", self.endpoint.url)).header(HOST, &self.endpoint.host);
        if let Some(key) = &self.shared.config.worker_api_key {
            request = request.header(AUTHORIZATION, format!("Bearer {key}"));
        }
        let request = request.body(Empty::new()).map_err(|_| false)?;
        let asked = async {
            let response =
                self.prober.request(request).await.map_err(|error| error.is_connect())?;
            let status = response.status();
            let body = Limited::new(response.into_body(), MAX_ANSWER_BYTES).collect().await;
            Ok((status, body.map_err(|_| false)?.to_bytes()))
        };
        let limit = Duration::from_secs_f64(self.shared.config.health_timeout_s);
        timeout(limit, asked).await.unwrap_or(Err(false))
    }
}
