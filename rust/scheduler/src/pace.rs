//! How many tokens a step may have in which some sequences decode and others compute prompts, so that
//! it takes the target time: those that decode wait for it.
//!
//! A first estimate says how a step's time grows with its tokens. What steps really take (longer
//! contexts, other processes, the work between steps) is a multiple of that, which is followed.
//!
//! The target is for a few prompts beside many that decode. Where for seconds a good part of the
//! requests waits for a first token, it is stretched: longer steps compute more tokens per second, and
//! more requests decode at once.

use crate::config::{Config, MixedSteps};

/// How far one step moves the multiple towards what it took.
const GAIN: f64 = 0.2;
/// A step that took more than this many times what was expected counts as if it took so long, and
/// one that took less than the same part likewise: one step alone changes little.
const LIMIT: f64 = 2.0;
/// The multiple and its inverse stay below this, so that it can always come back.
const MAX_FACTOR: f64 = 100.0;
/// The target is stretched to at most so many times itself.
const MAX_STRETCH: f64 = 2.5;
/// Seconds in which the stretch changes e-fold. The prompts of a burst are computed before it has
/// grown much.
const STRETCH_S: f64 = 4.0;
/// Between commits that are further apart than this nothing was computed for a while.
const IDLE_S: f64 = 1.0;

/// Interactive sequences by what they wait for: a batch's are in no hurry.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Crowd {
    /// For a first token.
    pub(crate) waiting: u32,
    /// For their next one.
    pub(crate) decoding: u32,
}

/// What a planned step says of the next ones' size, once it is known how long it took.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Paced {
    /// Its tokens, if its time tells what the target allows: it is no mere remainder.
    telling_tokens: Option<u32>,
    stretching: Stretching,
}

/// Where the stretch goes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Stretching {
    More,
    #[default]
    Stay,
    Less,
}

#[derive(Debug)]
pub(crate) struct Pace {
    steps: Option<MixedSteps>,
    /// Steps take so many times the first estimate.
    factor: f64,
    /// And may take so many times the target: 1 to `MAX_STRETCH`.
    stretch: f64,
    last_commit: Option<f64>,
}

impl Pace {
    pub(crate) fn new(config: &Config) -> Self {
        Self { steps: config.mixed_steps, factor: 1.0, stretch: 1.0, last_commit: None }
    }

    /// Tokens that prompts may have in a step that has rows of `decoding` tokens in all.
    pub(crate) fn prompt_budget(&self, config: &Config, decoding: u32) -> u32 {
        let left = config.max_batch_tokens - decoding;
        match (&self.steps, decoding) {
            (None, _) | (_, 0) => left,
            (Some(steps), _) => {
                let least = config.prompt_share().min(steps.least_prompt_tokens);
                left.min(self.target_tokens(steps).saturating_sub(decoding).max(least))
            }
        }
    }

    /// What is to be remembered of a planned step.
    ///
    /// # Arguments
    ///
    /// * `decoding` - its tokens of rows that decode.
    /// * `tokens` - all its tokens.
    /// * `crowd` - who was there when it was planned.
    pub(crate) fn paced(&self, decoding: u32, tokens: u32, crowd: Crowd) -> Paced {
        let Some(steps) = &self.steps else { return Paced::default() };
        let is_telling =
            decoding > 0 && tokens > decoding && tokens >= self.target_tokens(steps) / 2;
        let stretching = match decoding {
            0 => Stretching::Stay, // nobody is held up
            _ if crowd.waiting > crowd.decoding / 3 => Stretching::More,
            _ if crowd.waiting <= crowd.decoding / 7 => Stretching::Less,
            _ => Stretching::Stay,
        };
        Paced { telling_tokens: is_telling.then_some(tokens), stretching }
    }

    /// A step is committed. Time counts from the last commit, as those count it that decode.
    pub(crate) fn committed(&mut self, now: f64, paced: Paced) {
        let since = self.last_commit.replace(now);
        let (Some(steps), Some(since)) = (&self.steps, since) else { return };
        let elapsed = now - since;
        if elapsed.is_nan() || elapsed <= 0.0 {
            return;
        }
        if let Some(tokens) = paced.telling_tokens {
            let expected = steps.fixed_s + steps.token_s * f64::from(tokens);
            let factor = elapsed / expected;
            let bounded = factor.clamp(self.factor / LIMIT, self.factor * LIMIT);
            let moved = self.factor + GAIN * (bounded - self.factor);
            self.factor = moved.clamp(1.0 / MAX_FACTOR, MAX_FACTOR);
        }
        let busy = elapsed.min(IDLE_S);
        let change = match paced.stretching {
            Stretching::More => busy,
            Stretching::Stay => 0.0,
            Stretching::Less => -busy,
        };
        let change = change - (elapsed - busy);
        self.stretch = (self.stretch * (change / STRETCH_S).exp()).clamp(1.0, MAX_STRETCH);
    }

    fn target_tokens(&self, steps: &MixedSteps) -> u32 {
        let target_s = steps.target_s * self.stretch;
        // As a cast saturates: what is negative becomes 0.
        ((target_s / self.factor - steps.fixed_s) / steps.token_s) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEPS: MixedSteps =
        MixedSteps { target_s: 0.04, fixed_s: 0.004, token_s: 0.0003, least_prompt_tokens: 64 };

    fn pace() -> Pace {
        Pace { steps: Some(STEPS), factor: 1.0, stretch: 1.0, last_commit: Some(100.0) }
    }

    fn telling(tokens: u32) -> Paced {
        Paced { telling_tokens: Some(tokens), stretching: Stretching::Stay }
    }

    /// Commits steps as wide as the target allows, each of which takes what `seconds` says of its
    /// tokens; returns the seconds of the last.
    fn run(pace: &mut Pace, count: usize, seconds: impl Fn(f64) -> f64) -> f64 {
        let mut last = 0.0;
        for _ in 0..count {
            let tokens = pace.target_tokens(&STEPS).max(1);
            last = seconds(f64::from(tokens));
            let now = pace.last_commit.expect("set") + last;
            pace.committed(now, telling(tokens));
        }
        last
    }

    #[test]
    fn steps_come_to_take_the_target_whatever_they_cost() {
        for (fixed, token) in [(0.004, 0.0003), (0.0, 0.0006), (0.02, 0.0003), (0.001, 0.00005)] {
            let mut pace = pace();
            let last = run(&mut pace, 80, |tokens| fixed + token * tokens);
            assert!((last / STEPS.target_s - 1.0).abs() < 0.02, "{last}");
        }
    }

    #[test]
    fn a_single_step_changes_little() {
        for seconds in [30.0, 1e-6] {
            let mut pace = pace();
            let before = pace.target_tokens(&STEPS);
            run(&mut pace, 1, |_| seconds);
            let after = pace.target_tokens(&STEPS);
            assert!(after * 10 >= before * 8 && after * 8 <= before * 10, "{before} {after}");
            run(&mut pace, 15, |tokens| STEPS.fixed_s + STEPS.token_s * tokens);
            assert!(pace.target_tokens(&STEPS).abs_diff(before) <= 2);
        }
    }

    #[test]
    fn clocks_that_stand_still_or_go_back_tell_nothing() {
        let mut pace = pace();
        pace.committed(100.0, telling(120));
        pace.committed(f64::NAN, telling(120));
        pace.committed(100.0, telling(120));
        pace.committed(50.0, telling(120));
        pace.committed(50.0 + STEPS.fixed_s + 120.0 * STEPS.token_s, telling(120));
        assert!((pace.factor - 1.0).abs() < 1e-9);
    }

    #[test]
    fn it_recovers_from_any_run_of_extremes() {
        for extreme in [1e-9, 1e9] {
            let mut pace = pace();
            run(&mut pace, 10_000, |_| extreme);
            let last = run(&mut pace, 1000, |tokens| STEPS.fixed_s + STEPS.token_s * tokens);
            assert!((last / STEPS.target_s - 1.0).abs() < 0.02, "{last}");
        }
    }

    /// Commits steps of 40 ms in which `waiting` requests wait beside `decoding`; the stretch after.
    fn crowded(pace: &mut Pace, seconds: f64, decoding: u32, waiting: u32) -> f64 {
        let until = pace.last_commit.expect("set") + seconds;
        while pace.last_commit.expect("set") < until {
            let paced = pace.paced(decoding, decoding + 40, Crowd { waiting, decoding });
            pace.committed(pace.last_commit.expect("set") + 0.04, paced);
        }
        pace.stretch
    }

    #[test]
    fn a_lasting_crowd_stretches_the_target_and_a_burst_hardly_does() {
        let mut pace = pace();
        assert!(crowded(&mut pace, 1.0, 8, 8) < 1.3);
        assert!(crowded(&mut pace, 1.5, 15, 1) < 1.01, "few wait: it goes back");
        assert!((crowded(&mut pace, 6.0, 40, 20) - MAX_STRETCH).abs() < 1e-9);
        let stretched = pace.target_tokens(&STEPS);
        pace.stretch = 1.0;
        assert!(stretched > 2 * pace.target_tokens(&STEPS));
    }

    #[test]
    fn the_stretch_stays_where_as_many_wait_as_should() {
        let mut pace = pace();
        let stretch = crowded(&mut pace, 2.0, 9, 9);
        assert!((crowded(&mut pace, 5.0, 20, 5) - stretch).abs() < 1e-9);
        assert!((crowded(&mut pace, 5.0, 0, 5) - stretch).abs() < 1e-9, "nobody is held up");
    }

    #[test]
    fn the_stretch_is_forgotten_while_nothing_runs() {
        let mut pace = pace();
        crowded(&mut pace, 6.0, 4, 4);
        let paced = pace.paced(0, 40, Crowd { waiting: 4, decoding: 0 });
        pace.committed(pace.last_commit.expect("set") + 60.0, paced);
        assert!((pace.stretch - 1.0).abs() < 1e-9);
    }
}
