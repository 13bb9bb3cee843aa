//! The circuit breaker of one worker.

use serde::Deserialize;

/// When a breaker opens, and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct BreakerConfig {
    /// Failures in a row that open it.
    pub failures: u32,
    /// Seconds it stays open the first time; doubled whenever its probe fails.
    pub open_s: f64,
    /// Longest time it stays open.
    pub max_open_s: f64,
}

impl Default for BreakerConfig {
    fn default() -> Self {
        Self { failures: 5, open_s: 1.0, max_open_s: 30.0 }
    }
}

/// Whether a worker may be chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BreakerState {
    /// It may.
    Closed,
    /// It may not.
    Open,
    /// One request may, to see whether it works again.
    HalfOpen,
}

/// Counts failures in a row. What a client caused (4xx, a disconnect) is neither success nor failure.
#[derive(Clone, Debug, Default)]
pub struct Breaker {
    failures: u32,
    /// Since when it is open, and for how long.
    open: Option<(f64, f64)>,
    probing: bool,
}

impl Breaker {
    /// The state at `now`.
    pub fn state(&self, now: f64) -> BreakerState {
        match self.open {
            None => BreakerState::Closed,
            Some((since, duration)) if now < since + duration => BreakerState::Open,
            Some(_) => BreakerState::HalfOpen,
        }
    }

    /// Whether a request may go to the worker.
    pub fn allows(&self, now: f64) -> bool {
        match self.state(now) {
            BreakerState::Closed => true,
            BreakerState::HalfOpen => !self.probing,
            BreakerState::Open => false,
        }
    }

    /// A request goes there; true if it is the probe of a half-open breaker.
    pub(super) fn enter(&mut self, now: f64) -> bool {
        let probe = self.state(now) == BreakerState::HalfOpen && !self.probing;
        self.probing |= probe;
        probe
    }

    pub(super) fn succeed(&mut self) {
        *self = Self::default();
    }

    /// A request failed. While the breaker is open, only the probe's failure counts.
    pub(super) fn fail(&mut self, probe: bool, now: f64, config: &BreakerConfig) {
        match self.open {
            None => {
                self.failures += 1;
                if self.failures >= config.failures {
                    self.open = Some((now, config.open_s));
                }
            }
            Some((_, duration)) if probe => {
                self.open = Some((now, (duration * 2.0).min(config.max_open_s)));
                self.probing = false;
            }
            Some(_) => {}
        }
    }

    /// A request ended without telling anything about the worker.
    pub(super) fn pass(&mut self, probe: bool) {
        if probe {
            self.probing = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: BreakerConfig = BreakerConfig { failures: 3, open_s: 1.0, max_open_s: 3.0 };

    fn open_at(now: f64) -> Breaker {
        let mut breaker = Breaker::default();
        for _ in 0..3 {
            assert!(breaker.allows(now));
            let probe = breaker.enter(now);
            breaker.fail(probe, now, &CONFIG);
        }
        breaker
    }

    #[test]
    fn opens_after_failures_in_a_row_only() {
        let mut breaker = Breaker::default();
        for _ in 0..10 {
            breaker.fail(false, 0.0, &CONFIG);
            breaker.fail(false, 0.0, &CONFIG);
            breaker.pass(false);
            breaker.succeed();
        }
        assert!(breaker.allows(0.0));
        assert!(!open_at(0.0).allows(0.9));
    }

    #[test]
    fn half_open_admits_one_and_closes_on_its_success() {
        let mut breaker = open_at(0.0);
        assert!(breaker.allows(1.0));
        assert!(breaker.enter(1.0));
        assert!(!breaker.allows(1.0));
        breaker.pass(true); // the client went away: somebody else may try
        assert!(breaker.enter(1.0));
        breaker.succeed();
        assert_eq!(breaker.state(1.0), BreakerState::Closed);
    }

    #[test]
    fn each_failed_probe_doubles_the_time_up_to_the_limit() {
        let mut breaker = open_at(0.0);
        let mut now = 0.0;
        for duration in [1.0, 2.0, 3.0, 3.0] {
            assert!(!breaker.allows(now + duration - 0.01));
            now += duration;
            assert!(breaker.enter(now));
            breaker.fail(false, now, &CONFIG); // one that was under way before
            assert!(!breaker.allows(now));
            breaker.fail(true, now, &CONFIG);
        }
    }
}
