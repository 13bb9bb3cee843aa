//! Figures for Prometheus.

use prometheus::core::Collector;
use prometheus::{
    Encoder, Gauge, GaugeVec, Histogram, HistogramOpts, IntCounter, IntCounterVec, Opts, Registry,
    TextEncoder,
};

use super::state::{Shared, state_name};
use crate::core::BreakerState;

/// Counters and histograms of one router. Gauges are read from the router when it is asked.
pub(super) struct Metrics {
    registry: Registry,
    pub(super) requests: IntCounterVec,
    pub(super) selections: IntCounterVec,
    pub(super) retries: IntCounterVec,
    pub(super) worker_failures: IntCounterVec,
    pub(super) broken_streams: IntCounter,
    pub(super) refused: IntCounterVec,
    pub(super) predicted_cached_tokens: IntCounter,
    pub(super) reported_cached_tokens: IntCounter,
    pub(super) select_seconds: Histogram,
    pub(super) queue_seconds: Histogram,
    pub(super) first_byte_seconds: Histogram,
    gauges: Gauges,
}

struct Gauges {
    in_flight: Gauge,
    queued: Gauge,
    index_bytes: Gauge,
    worker_in_flight: GaugeVec,
    worker_prefill: GaugeVec,
    worker_running: GaugeVec,
    worker_blocks: GaugeVec,
    worker_state: GaugeVec,
    worker_breaker: GaugeVec,
    worker_selected: GaugeVec,
}

const STATES: [&str; 4] = ["joining", "ready", "draining", "down"];
const MICROSECONDS: [f64; 8] = [1e-6, 2.5e-6, 5e-6, 1e-5, 2.5e-5, 1e-4, 1e-3, 1e-2];
const SECONDS: [f64; 12] = [0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0, 120.0];

/// Registers what is written down in this file.
struct Registrar(Registry);

impl Registrar {
    fn add<T: Collector + Clone + 'static>(&self, made: prometheus::Result<T>) -> T {
        let collector = made.expect("names and labels are well-formed");
        self.0.register(Box::new(collector.clone())).expect("names are distinct");
        collector
    }

    fn counters(&self, name: &str, help: &str, labels: &[&str]) -> IntCounterVec {
        self.add(IntCounterVec::new(opts(name, help), labels))
    }

    fn counter(&self, name: &str, help: &str) -> IntCounter {
        self.add(IntCounter::with_opts(opts(name, help)))
    }

    fn gauge(&self, name: &str, help: &str) -> Gauge {
        self.add(Gauge::with_opts(opts(name, help)))
    }

    fn gauges(&self, name: &str, help: &str, labels: &[&str]) -> GaugeVec {
        self.add(GaugeVec::new(opts(name, help), labels))
    }

    fn histogram(&self, name: &str, help: &str, buckets: &[f64]) -> Histogram {
        let opts = HistogramOpts::from(opts(name, help)).buckets(buckets.to_vec());
        self.add(Histogram::with_opts(opts))
    }
}

fn opts(name: &str, help: &str) -> Opts {
    Opts::new(format!("engine_router_{name}"), help)
}

impl Metrics {
    pub(super) fn new() -> Self {
        let add = Registrar(Registry::new());
        Self {
            requests: add.counters(
                "requests_total",
                "Requests answered, by the path's family and the status.",
                &["route", "code"],
            ),
            selections: add.counters(
                "selections_total",
                "Choices of a worker, by reason.",
                &["reason"],
            ),
            retries: add.counters(
                "retries_total",
                "Further attempts, by what failed.",
                &["reason"],
            ),
            worker_failures: add.counters(
                "worker_failures_total",
                "Failures of a worker, by kind.",
                &["worker", "reason"],
            ),
            broken_streams: add
                .counter("broken_streams_total", "Streams that ended with an error event."),
            refused: add.counters(
                "refused_total",
                "Requests that the router refused, by reason.",
                &["reason"],
            ),
            predicted_cached_tokens: add.counter(
                "predicted_cached_tokens_total",
                "Cached prompt tokens expected, of answers that report theirs.",
            ),
            reported_cached_tokens: add.counter(
                "reported_cached_tokens_total",
                "Cached prompt tokens that workers reported.",
            ),
            select_seconds: add.histogram(
                "select_seconds",
                "Time to choose a worker.",
                &MICROSECONDS,
            ),
            queue_seconds: add.histogram(
                "queue_seconds",
                "Time that requests waited here.",
                &SECONDS,
            ),
            first_byte_seconds: add.histogram(
                "first_byte_seconds",
                "Time from a request's arrival to the first byte of its answer.",
                &SECONDS,
            ),
            gauges: Gauges::new(&add),
            registry: add.0,
        }
    }

    /// Drops the series of a worker that has left.
    pub(super) fn forget_worker(&self, url: &str) {
        for reason in ["connect", "transport", "status", "timeout", "lost", "broken"] {
            let _ = self.worker_failures.remove_label_values(&[url, reason]);
        }
    }

    /// The figures as text.
    pub(super) fn render(&self, shared: &Shared) -> Vec<u8> {
        self.gauges.fill(shared);
        let mut text = Vec::new();
        TextEncoder::new()
            .encode(&self.registry.gather(), &mut text)
            .expect("text is written to memory");
        text
    }
}

impl Gauges {
    fn new(add: &Registrar) -> Self {
        let worker = ["worker"];
        Self {
            in_flight: add.gauge("requests_in_flight", "Requests being answered or waiting."),
            queued: add.gauge("queue_depth", "Requests waiting for a worker."),
            index_bytes: add.gauge("index_bytes", "Memory of the prefix index."),
            worker_in_flight: add.gauges(
                "worker_requests_in_flight",
                "Requests at a worker.",
                &worker,
            ),
            worker_prefill: add.gauges(
                "worker_outstanding_prefill_tokens",
                "Uncached prompt tokens at a worker whose answers have not begun.",
                &worker,
            ),
            worker_running: add.gauges(
                "worker_requests_running",
                "Requests whose answers have begun.",
                &worker,
            ),
            worker_blocks: add.gauges(
                "worker_index_blocks",
                "Blocks expected in a worker's cache.",
                &worker,
            ),
            worker_state: add.gauges(
                "worker_state",
                "1 for the state that a worker is in.",
                &["worker", "state"],
            ),
            worker_breaker: add.gauges(
                "worker_breaker_open",
                "1 while a worker's circuit breaker is open, 0.5 half-open.",
                &worker,
            ),
            worker_selected: add.gauges(
                "worker_selected",
                "Requests that a worker was chosen for since it was added.",
                &worker,
            ),
        }
    }

    fn fill(&self, shared: &Shared) {
        use std::sync::atomic::Ordering::Relaxed;
        let per_worker = [
            &self.worker_in_flight,
            &self.worker_prefill,
            &self.worker_running,
            &self.worker_blocks,
            &self.worker_state,
            &self.worker_breaker,
            &self.worker_selected,
        ];
        for gauge in per_worker {
            gauge.reset();
        }
        self.in_flight.set(shared.in_flight.load(Relaxed) as f64);
        self.queued.set(shared.queued.load(Relaxed) as f64);
        let now = shared.now();
        let router = shared.router();
        self.index_bytes.set(router.index().num_bytes() as f64);
        for worker in router.workers() {
            let name = [worker.name.as_str()];
            let set = |gauge: &GaugeVec, value: f64| gauge.with_label_values(&name).set(value);
            set(&self.worker_in_flight, worker.load.in_flight() as f64);
            set(&self.worker_prefill, worker.load.prefill_tokens() as f64);
            set(&self.worker_running, worker.load.running() as f64);
            set(&self.worker_blocks, router.num_blocks(worker.id).unwrap_or(0) as f64);
            set(&self.worker_selected, worker.selected as f64);
            let open = match worker.breaker.state(now) {
                BreakerState::Closed => 0.0,
                BreakerState::HalfOpen => 0.5,
                BreakerState::Open => 1.0,
            };
            set(&self.worker_breaker, open);
            for state in STATES {
                let value = f64::from(state == state_name(worker.state));
                self.worker_state.with_label_values(&[name[0], state]).set(value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::state::tests::config;
    use super::*;

    #[test]
    fn every_figure_has_help_and_leaves_with_its_worker() {
        let shared = Shared::new(config());
        let endpoint = shared.add_worker("http://127.0.0.1:1").expect("a good address");
        shared.metrics.worker_failures.with_label_values(&[&endpoint.url, "connect"]).inc();
        let text =
            |shared: &Shared| String::from_utf8(shared.metrics.render(shared)).expect("text");
        let before = text(&shared);
        assert!(before.contains(
            "engine_router_worker_state{state=\"joining\",worker=\"http://127.0.0.1:1\"} 1"
        ));
        for line in before.lines().filter(|line| line.starts_with("# TYPE")) {
            let name = line.split(' ').nth(2).expect("a name");
            assert!(before.contains(&format!("# HELP {name} ")), "{name}");
        }
        shared.remove_worker(&endpoint);
        assert!(!text(&shared).contains("127.0.0.1:1\""));
    }
}
