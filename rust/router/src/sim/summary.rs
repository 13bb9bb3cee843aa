//! The figures of a simulation.

use serde::Serialize;

use super::fleet::{End, Record};
use super::step_time::{StepTime, Work};
use super::trace::Trace;
use crate::core::Report;

/// Parts of the requests' span that [`Summary::windows`] tells of.
const NUM_WINDOWS: usize = 40;
const CURVE_POINTS: usize = 100;

/// Of a set of durations, in seconds; all 0 if it is empty.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Quantiles {
    /// Arithmetic mean.
    pub mean: f64,
    /// Median.
    pub p50: f64,
    /// 90th percentile.
    pub p90: f64,
    /// 99th percentile.
    pub p99: f64,
    /// Largest.
    pub max: f64,
    /// Percentiles 0 to 100.
    pub curve: Vec<f64>,
}

impl Quantiles {
    fn new(mut values: Vec<f64>) -> Self {
        if values.is_empty() {
            return Self::default();
        }
        values.sort_by(f64::total_cmp);
        let at = |part: f64| values[(part * (values.len() - 1) as f64).round() as usize];
        Self {
            mean: values.iter().sum::<f64>() / values.len() as f64,
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            max: at(1.0),
            curve: (0..=CURVE_POINTS).map(|point| at(point as f64 / 100.0)).collect(),
        }
    }
}

/// What was seen of the queues, look by look.
#[derive(Clone, Debug, Default)]
pub(super) struct Gauges {
    looks: u64,
    engines: u64,
    waiting: u64,
    most_waiting: u64,
    running: u64,
    kv_used: f64,
}

impl Gauges {
    pub(super) fn add(&mut self, report: &Report) {
        self.engines += 1;
        self.waiting += report.waiting;
        self.most_waiting = self.most_waiting.max(report.waiting);
        self.running += report.running;
        self.kv_used += report.kv_used;
    }

    pub(super) fn end_look(&mut self) {
        self.looks += 1;
    }
}

/// Requests that came in one part of the time.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Window {
    /// Where it begins, in seconds.
    pub start_s: f64,
    /// Requests that came.
    pub requests: u64,
    /// Those of them that were completed.
    pub completed: u64,
    /// Part of their prompt tokens that came from the cache.
    pub hit_rate: f64,
    /// Mean time to their first token.
    pub ttft_mean_s: f64,
}

/// Figures of one simulation. Hit rates and times are those of completed requests.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Requests of the trace.
    pub requests: u64,
    /// Completed ones.
    pub completed: u64,
    /// Those whose worker died under their answer.
    pub broken: u64,
    /// Those that no worker could be found for.
    pub lost: u64,
    /// Those that the engine refused.
    pub refused: u64,
    /// Attempts beyond the first.
    pub retries: u64,
    /// Part of the prompt tokens that came from a cache.
    pub hit_rate: f64,
    /// Part of the prompt tokens that the routers expected to.
    pub expected_hit_rate: f64,
    /// Part that one unlimited cache of whole blocks would hold; engines match parts of blocks too.
    pub ideal_hit_rate: f64,
    /// From arrival to the first token.
    pub ttft_s: Quantiles,
    /// From arrival to the last token.
    pub end_to_end_s: Quantiles,
    /// Mean time between tokens, by request.
    pub inter_token_s: Quantiles,
    /// Requests per second that came.
    pub offered_rate: f64,
    /// Prompt tokens per second that came.
    pub offered_prompt_tokens_s: f64,
    /// Engine seconds that the prompts would take without any cache, each computed alone, per engine
    /// and second of arrivals: the load that was offered, whatever the policy made of it.
    pub offered_load: f64,
    /// Part of the time until the last arrival that engines computed.
    pub utilisation: f64,
    /// The busiest engine's time over the mean.
    pub busy_imbalance: f64,
    /// Mean number of waiting requests per engine.
    pub queue_mean: f64,
    /// Most waiting requests that an engine was seen with.
    pub queue_max: u64,
    /// Mean number of running requests per engine.
    pub running_mean: f64,
    /// Mean part of the KV pools in use by running requests.
    pub kv_used_mean: f64,
    /// Steps of all engines.
    pub steps: u64,
    /// From the first arrival to the last token.
    pub duration_s: f64,
    /// The same over time.
    pub windows: Vec<Window>,
}

/// What was seen of the engines.
#[derive(Clone, Copy)]
pub(super) struct Engines<'a> {
    pub(super) busy_s: &'a [f64],
    pub(super) steps: u64,
    pub(super) step_time: &'a StepTime,
}

impl Summary {
    /// As JSON.
    pub fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("broken invariant: names are strings, figures are numbers")
    }

    pub(super) fn new(
        records: &[Record],
        trace: &Trace,
        gauges: &Gauges,
        engines: &Engines<'_>,
    ) -> Self {
        let Engines { busy_s, steps, step_time } = *engines;
        let alone_s = |record: &Record| {
            let mut work = Work::default();
            work.add_row(record.prompt_tokens, 0);
            step_time.seconds(&work)
        };
        let offered_s: f64 = records.iter().map(alone_s).sum();
        let count = |end| records.iter().filter(|record| record.end == Some(end)).count() as u64;
        let completed: Vec<&Record> = completed(records).collect();
        let span_s = trace.duration_s().max(f64::MIN_POSITIVE);
        let start_s = records.first().map_or(0.0, |record| record.arrival_s);
        let last_s = records.iter().map(|record| record.end_s).fold(start_s, f64::max);
        let all_tokens: u64 = records.iter().map(|record| record.prompt_tokens).sum();
        let busy_mean = busy_s.iter().sum::<f64>() / busy_s.len() as f64;
        let busiest = busy_s.iter().copied().fold(0.0, f64::max);
        let per_engine = |value: f64| value / gauges.engines.max(1) as f64;
        let times = |of: fn(&Record) -> Option<f64>| {
            Quantiles::new(completed.iter().filter_map(|record| of(record)).collect())
        };
        Self {
            requests: records.len() as u64,
            completed: completed.len() as u64,
            broken: count(End::Broken),
            lost: count(End::Lost),
            refused: count(End::Refused),
            retries: records.iter().map(|record| record.attempts.saturating_sub(1) as u64).sum(),
            hit_rate: share(&completed, |record| record.cached_tokens),
            expected_hit_rate: share(&completed, |record| record.expected_tokens),
            ideal_hit_rate: trace.ideal_hit_rate(),
            ttft_s: times(Record::ttft_s),
            end_to_end_s: times(|record| Some(record.end_s - record.arrival_s)),
            inter_token_s: times(Record::inter_token_s),
            offered_rate: records.len() as f64 / span_s,
            offered_prompt_tokens_s: all_tokens as f64 / span_s,
            offered_load: offered_s / (busy_s.len() as f64 * span_s),
            utilisation: busy_mean / (last_s - start_s).max(f64::MIN_POSITIVE),
            busy_imbalance: if busy_mean > 0.0 { busiest / busy_mean } else { 1.0 },
            queue_mean: per_engine(gauges.waiting as f64),
            queue_max: gauges.most_waiting,
            running_mean: per_engine(gauges.running as f64),
            kv_used_mean: per_engine(gauges.kv_used),
            steps,
            duration_s: last_s - start_s,
            windows: windows(records, start_s, span_s),
        }
    }
}

impl Record {
    /// Seconds until the first token.
    pub fn ttft_s(&self) -> Option<f64> {
        Some(self.first_token_s? - self.arrival_s)
    }

    fn inter_token_s(&self) -> Option<f64> {
        let gaps = self.output_tokens.checked_sub(1).filter(|gaps| *gaps > 0)?;
        Some((self.end_s - self.first_token_s?) / gaps as f64)
    }
}

fn completed(records: &[Record]) -> impl Iterator<Item = &Record> {
    records.iter().filter(|record| record.end == Some(End::Completed))
}

fn share(records: &[&Record], tokens: fn(&Record) -> u64) -> f64 {
    let all: u64 = records.iter().map(|record| record.prompt_tokens).sum();
    let some: u64 = records.iter().map(|record| tokens(record)).sum();
    if all == 0 { 0.0 } else { some as f64 / all as f64 }
}

fn windows(records: &[Record], start_s: f64, span_s: f64) -> Vec<Window> {
    let width_s = span_s / NUM_WINDOWS as f64;
    let mut windows = Vec::with_capacity(NUM_WINDOWS);
    let mut rest = records;
    for number in 0..NUM_WINDOWS {
        let end_s = start_s + width_s * (number + 1) as f64;
        let last = number + 1 == NUM_WINDOWS;
        let here = rest.partition_point(|record| last || record.arrival_s < end_s);
        let came;
        (came, rest) = rest.split_at(here);
        let done: Vec<&Record> = completed(came).collect();
        let ttft_s: f64 = done.iter().filter_map(|record| record.ttft_s()).sum();
        windows.push(Window {
            start_s: start_s + width_s * number as f64,
            requests: came.len() as u64,
            completed: done.len() as u64,
            hit_rate: share(&done, |record| record.cached_tokens),
            ttft_mean_s: ttft_s / done.len().max(1) as f64,
        });
    }
    windows
}
