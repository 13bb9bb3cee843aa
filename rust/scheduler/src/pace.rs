//! How many tokens a step may have in which some sequences decode and others compute prompts, so that
//! it takes the target time: those that decode wait for it.
//!
//! A first estimate says how a step's time grows with its tokens. What steps really take (longer
//! contexts, other processes, the work between steps) is a multiple of that, which is followed.

use crate::config::{Config, MixedSteps};

/// How far one step moves the multiple towards what it took.
const GAIN: f64 = 0.2;
/// A step that took more than this many times what was expected counts as if it took so long, and
/// one that took less than the same part likewise: one step alone changes little.
const LIMIT: f64 = 2.0;
/// The multiple and its inverse stay below this, so that it can always come back.
const MAX_FACTOR: f64 = 100.0;

#[derive(Debug)]
pub(crate) struct Pace {
    steps: Option<MixedSteps>,
    /// Steps take so many times the first estimate.
    factor: f64,
    last_commit: Option<f64>,
}

impl Pace {
    pub(crate) fn new(config: &Config) -> Self {
        Self { steps: config.mixed_steps, factor: 1.0, last_commit: None }
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

    /// Whether the time of such a step tells what the target allows: it is no mere remainder.
    pub(crate) fn is_telling(&self, decoding: u32, tokens: u32) -> bool {
        self.steps.as_ref().is_some_and(|steps| {
            decoding > 0 && tokens > decoding && tokens >= self.target_tokens(steps) / 2
        })
    }

    /// A step is committed. Time counts from the last commit, as those count it that decode;
    /// `tokens` are those of a telling step.
    pub(crate) fn committed(&mut self, now: f64, tokens: Option<u32>) {
        let since = self.last_commit.replace(now);
        if let (Some(steps), Some(since), Some(tokens)) = (&self.steps, since, tokens)
            && now > since
        {
            let expected = steps.fixed_s + steps.token_s * f64::from(tokens);
            let factor = (now - since) / expected;
            let bounded = factor.clamp(self.factor / LIMIT, self.factor * LIMIT);
            let moved = self.factor + GAIN * (bounded - self.factor);
            self.factor = moved.clamp(1.0 / MAX_FACTOR, MAX_FACTOR);
        }
    }

    fn target_tokens(&self, steps: &MixedSteps) -> u32 {
        // As a cast saturates: what is negative becomes 0.
        ((steps.target_s / self.factor - steps.fixed_s) / steps.token_s) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEPS: MixedSteps =
        MixedSteps { target_s: 0.04, fixed_s: 0.004, token_s: 0.0003, least_prompt_tokens: 64 };

    fn pace() -> Pace {
        Pace { steps: Some(STEPS), factor: 1.0, last_commit: Some(100.0) }
    }

    /// Commits steps as wide as the target allows, each of which takes what `seconds` says of its
    /// tokens; returns the seconds of the last.
    fn run(pace: &mut Pace, count: usize, seconds: impl Fn(f64) -> f64) -> f64 {
        let mut last = 0.0;
        for _ in 0..count {
            let tokens = pace.target_tokens(&STEPS).max(1);
            last = seconds(f64::from(tokens));
            let now = pace.last_commit.expect("set") + last;
            pace.committed(now, Some(tokens));
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
        pace.committed(100.0, Some(120));
        pace.committed(50.0, Some(120));
        pace.committed(50.0 + STEPS.fixed_s + 120.0 * STEPS.token_s, Some(120));
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
}
