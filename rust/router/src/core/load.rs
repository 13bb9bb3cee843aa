//! What a worker has to do, in tokens.

/// What an engine said about itself: it also counts what others than this router sent it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Report {
    /// Requests that run.
    pub running: u64,
    /// Requests that wait.
    pub waiting: u64,
    /// Prompt tokens of waiting requests that are not in its cache.
    pub waiting_uncached_tokens: u64,
    /// Part of the KV pool that is in use, 0 to 1.
    pub kv_used: f64,
}

/// Own account of one worker, corrected by its latest [`Report`].
///
/// Prompt tokens count from the moment of selection until the answer begins; an engine's report is
/// topped up with what was sent since, so that no two requests see the same idle worker, and lowered
/// by what was begun since, so that no idle worker looks busy.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Load {
    prefill_tokens: u64,
    in_flight: u64,
    running: u64,
    report: Option<(f64, Report)>,
    generation: u64,
    since_report_tokens: u64,
}

/// What one request adds to a load.
#[derive(Clone, Copy, Debug)]
pub(super) struct Share {
    pub(super) uncached_tokens: u64,
    generation: u64,
}

impl Load {
    pub(super) fn select(&mut self, uncached_tokens: u64) -> Share {
        self.prefill_tokens += uncached_tokens;
        self.since_report_tokens += uncached_tokens;
        self.in_flight += 1;
        Share { uncached_tokens, generation: self.generation }
    }

    pub(super) fn start(&mut self, share: Share) {
        self.running += 1;
        self.take_prefill(share);
    }

    pub(super) fn finish(&mut self, share: Share, started: bool) {
        self.in_flight -= 1;
        if started {
            self.running -= 1;
        } else {
            self.take_prefill(share);
        }
    }

    fn take_prefill(&mut self, share: Share) {
        self.prefill_tokens -= share.uncached_tokens;
        if share.generation == self.generation {
            self.since_report_tokens -= share.uncached_tokens;
        } else if let Some((_, report)) = &mut self.report {
            // It was among those that the report counted.
            let waiting = &mut report.waiting_uncached_tokens;
            *waiting = waiting.saturating_sub(share.uncached_tokens);
        }
    }

    pub(super) fn report(&mut self, report: Report, now: f64) {
        self.report = Some((now, report));
        self.generation += 1;
        self.since_report_tokens = 0;
    }

    /// Own requests that were selected and have not ended.
    pub fn in_flight(&self) -> u64 {
        self.in_flight
    }

    /// Own requests whose answer has begun.
    pub fn running(&self) -> u64 {
        self.running
    }

    /// Uncached prompt tokens of own requests whose answer has not begun.
    pub fn prefill_tokens(&self) -> u64 {
        self.prefill_tokens
    }

    /// The latest report, if it is at most `max_age_s` old.
    pub fn fresh_report(&self, now: f64, max_age_s: f64) -> Option<&Report> {
        let (at, report) = self.report.as_ref()?;
        (now - at <= max_age_s).then_some(report)
    }

    /// Prompt tokens that a new request waits for.
    pub fn outstanding_tokens(&self, now: f64, max_age_s: f64) -> u64 {
        let reported = self.fresh_report(now, max_age_s).map_or(0, |report| {
            report.waiting_uncached_tokens.saturating_add(self.since_report_tokens)
        });
        self.prefill_tokens.max(reported)
    }

    /// Requests that generate.
    pub fn decoding(&self, now: f64, max_age_s: f64) -> u64 {
        let reported = self.fresh_report(now, max_age_s).map_or(0, |report| report.running);
        self.running.max(reported)
    }

    /// Requests that are there, in whatever state.
    pub fn requests(&self, now: f64, max_age_s: f64) -> u64 {
        let reported = self
            .fresh_report(now, max_age_s)
            .map_or(0, |report| report.running.saturating_add(report.waiting));
        self.in_flight.max(reported)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPORT: Report =
        Report { running: 3, waiting: 2, waiting_uncached_tokens: 500, kv_used: 0.5 };

    #[test]
    fn counts_from_selection_to_the_end() {
        let mut load = Load::default();
        let (one, two) = (load.select(100), load.select(50));
        assert_eq!((load.outstanding_tokens(0.0, 1.0), load.in_flight()), (150, 2));
        load.start(one);
        assert_eq!((load.outstanding_tokens(0.0, 1.0), load.running()), (50, 1));
        load.finish(one, true);
        load.finish(two, false);
        assert_eq!(load, Load::default());
    }

    #[test]
    fn a_report_counts_what_others_sent_until_it_is_old() {
        let mut load = Load::default();
        let before = load.select(100);
        load.report(REPORT, 10.0);
        assert_eq!(load.outstanding_tokens(10.0, 1.0), 500);
        let after = load.select(30);
        assert_eq!(load.outstanding_tokens(10.5, 1.0), 530);
        assert_eq!((load.decoding(10.5, 1.0), load.requests(10.5, 1.0)), (3, 5));
        assert_eq!((load.outstanding_tokens(11.5, 1.0), load.requests(11.5, 1.0)), (130, 2));
        load.start(before);
        assert_eq!(load.outstanding_tokens(10.5, 1.0), 430);
        load.start(after);
        assert_eq!(load.outstanding_tokens(10.5, 1.0), 400);
    }
}
