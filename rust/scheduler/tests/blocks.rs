//! The plan's records, and what is refused as a result.

mod support;

use scheduler::{Config, Error, Scheduler};
use support::blocks::{Plan, StepResult, section as s};
use support::config;
use support::engine::Engine;
use support::messages::{LogprobRequest, submit};

#[test]
fn an_opened_slot_carries_the_request() {
    let mut engine = Engine::new(Config { eos_token_ids: vec![3], ..config() });
    let mut request = submit(1, &[1, 2, 3, 4, 5], 9);
    request.sampling.temperature = 0.5;
    request.sampling.top_p = 0.25;
    request.sampling.min_p = 0.125;
    request.sampling.frequency_penalty = 1.5;
    request.sampling.presence_penalty = -1.5;
    request.sampling.repetition_penalty = 1.25;
    request.sampling.top_k = 7;
    request.sampling.min_new_tokens = 4;
    request.sampling.stop_token_ids = vec![9, 3];
    request.sampling.seed = u64::MAX;
    request.sampling.logit_bias = vec![(2, 0.5), (4, -2.0)];
    request.logprobs = Some(LogprobRequest(None, 3, vec![7, 8], true));
    request.must_prepare = true;
    request.grammar = Some(("regex", "a+", vec![]));
    let id = engine.submit(&request).expect("it must be prepared");
    engine.scheduler.ready(id, None);
    let plan = engine.plan().expect("there is work");
    let floats = [0.5_f32, 0.25, 0.125, 1.5, -1.5, 1.25, 0.0, 0.0].map(|v| v.to_bits() as i32);
    assert_eq!(plan.ints(s::OPENED_SLOTS), [0]);
    assert_eq!(plan.ints(s::OPENED_FLOAT), floats);
    assert_eq!(plan.ints(s::OPENED_INT), [7, 5, 0, 0, 1 | 2, 4, id as i32, 0]);
    assert_eq!(plan.seeds(), [u64::MAX]);
    assert_eq!(plan.lists(s::BIAS_OFFSETS, s::BIAS_OFFSETS + 1), [[2, 4]]);
    let bias = [0.5_f32, -2.0].map(|value| value.to_bits() as i32);
    assert_eq!(plan.ints(s::BIAS_OFFSETS + 2), bias);
    assert_eq!(plan.lists(s::SUPPRESSED_OFFSETS, s::SUPPRESSED_IDS), [[3, 9]]);
    assert_eq!(plan.lists(s::OUTPUT_OFFSETS, s::OUTPUT_IDS), [[0_u32; 0]]);
    assert_eq!(plan.ints(s::PAGE_WRITES), [0, 0, 0, 1, 0, 0, 1, 2]);
    assert_eq!(plan.ints(s::LOGIT_TOKENS), [4]);
    assert_eq!(plan.ints(s::LOGIT_TOP_N), [3]);
    assert_eq!(plan.lists(s::SCORE_OFFSETS, s::SCORE_IDS), [[7, 8]]);
    assert_eq!(plan.ints(s::SAMPLE_LOGIT), [0]);
    assert_eq!(plan.ints(s::SAMPLE_POSITION), [5]);
    assert_eq!(plan.ints(s::SAMPLE_FLAGS), [1]);
    engine.commit();
    engine.drain();
}

type Change = fn(&mut StepResult);

/// A scheduler with one step in flight, of one row with log-probs.
fn one_step() -> (Scheduler, StepResult) {
    let mut scheduler = Scheduler::new(config()).expect("a good configuration");
    let mut request = submit(1, &[1, 2, 3], 9);
    request.logprobs = Some(LogprobRequest(Some(2), 2, vec![5], false));
    scheduler.submit(0, &request.encode(), 0.0).expect("a good message");
    let mut arena = vec![0; config().arena_bytes];
    let step = scheduler.plan(0.0, &mut arena).expect("nothing in flight").expect("work");
    let plan = Plan::parse(&arena);
    assert_eq!(plan.lists(s::SCORE_OFFSETS, s::SCORE_IDS), [vec![3, 5], vec![5]]);
    let result = StepResult {
        step,
        sample_counts: vec![1],
        token_ids: vec![4],
        sampled_logprobs: vec![-1.0],
        score_logprobs: vec![-1.0, -2.0, -3.0],
        top_ids: vec![1, 2, 3, 4],
        top_logprobs: vec![-0.5; 4],
        ..StepResult::default()
    };
    (scheduler, result)
}

#[test]
fn pooled_states_are_as_many_as_the_step_wants() {
    let mut scheduler = Scheduler::new(config()).expect("a good configuration");
    let mut arena = vec![0; config().arena_bytes];
    for key in 1..=2 {
        let mut request = submit(key, &[1, 2, key as u32], 0);
        request.pooled = true;
        scheduler.submit(0, &request.encode(), 0.0).expect("a good message");
    }
    let step = scheduler.plan(0.0, &mut arena).expect("nothing in flight").expect("work");
    let plan = Plan::parse(&arena);
    assert_eq!(plan.ints(s::LOGIT_FLAGS), [1, 1]);
    assert_eq!(plan.ints(s::LOGIT_TOKENS), [2, 5]);
    assert_eq!(plan.ints(s::SAMPLE_SLOT), [0; 0]);
    let result = |states: &[i32]| {
        StepResult { step, pooled_states: states.to_vec(), ..StepResult::default() }.encode()
    };
    for states in [&[][..], &[1], &[1, 2, 3]] {
        assert!(matches!(scheduler.commit(0.0, &result(states)), Err(Error::Result(_))));
    }
    scheduler.commit(0.0, &result(&[1, 2, 3, 4])).expect("two states of two elements");
    assert!(!scheduler.has_work());
}

#[test]
fn a_wrong_result_is_an_error_and_commits_nothing() {
    let (mut scheduler, good) = one_step();
    scheduler.take_events();
    let changes: &[Change] = &[
        |result| result.step += 1,
        |result| result.sample_counts.clear(),
        |result| result.sample_counts = vec![2],
        |result| result.sample_counts = vec![-1],
        |result| result.token_ids = vec![20],
        |result| result.token_ids = vec![-1],
        |result| result.token_ids.clear(),
        |result| result.row_computed = vec![4],
        |result| result.row_computed = vec![-1],
        |result| result.row_computed = vec![2],
        |result| result.row_computed = vec![3, 3],
        |result| result.row_errors = vec![5],
        |result| result.row_errors = vec![0, 0],
        |result| result.sampled_logprobs.clear(),
        |result| result.score_logprobs.truncate(2),
        |result| result.top_ids.truncate(3),
        |result| result.top_logprobs.push(0.0),
        |result| result.pooled_states.push(0),
    ];
    for (index, change) in changes.iter().enumerate() {
        let mut bad = good.clone();
        change(&mut bad);
        let error = scheduler.commit(0.0, &bad.encode()).expect_err("a wrong result");
        assert!(matches!(error, Error::Result(_) | Error::WrongStep { .. }), "{index}: {error}");
    }
    let bytes = good.encode();
    for end in [0, 8, 255, 256, bytes.len() - 1] {
        assert!(scheduler.commit(0.0, &bytes[..end]).is_err(), "{end} bytes");
    }
    for (word, value) in [(0, 1_i64), (1, 2), (8, -8), (8, i64::MAX), (9, i64::MAX), (9, -1)] {
        let mut bad = bytes.clone();
        bad[8 * word..8 * word + 8].copy_from_slice(&value.to_le_bytes());
        assert!(scheduler.commit(0.0, &bad).is_err(), "word {word} = {value}");
    }
    assert!(scheduler.take_events().is_empty());
    scheduler.check_integrity().expect("nothing was committed");
    scheduler.commit(0.0, &bytes).expect("a good result");
    assert!(matches!(scheduler.commit(0.0, &bytes), Err(Error::NoStepInFlight)));
}

#[test]
fn a_step_that_failed_as_a_whole_needs_no_log_probs() {
    let (mut scheduler, good) = one_step();
    let failed = StepResult {
        step: good.step,
        sample_counts: vec![0],
        row_errors: vec![3],
        ..StepResult::default()
    };
    scheduler.commit(0.0, &failed.encode()).expect("every row failed");
    scheduler.check_integrity().expect("its requests have ended");
    assert!(!scheduler.has_work());
}

#[test]
fn planning_too_far_ahead_or_into_too_little_is_an_error() {
    let (mut scheduler, _) = one_step();
    let mut arena = vec![0; config().arena_bytes];
    let error = scheduler.plan(0.0, &mut arena).expect_err("one step is in flight");
    assert!(matches!(error, Error::TooManySteps { in_flight: 1, depth: 0 }), "{error}");
    let mut scheduler = Scheduler::new(config()).expect("a good configuration");
    let error = scheduler.plan(0.0, &mut arena[1..]).expect_err("a small arena");
    assert!(matches!(error, Error::ArenaTooSmall { .. }), "{error}");
}

/// A small configuration with one field replaced.
fn configured(field: &str, value: &str) -> Result<Config, Error> {
    let mut fields = std::collections::BTreeMap::from([
        ("page_size", "16"),
        ("num_pages", "100"),
        ("max_running_requests", "8"),
        ("max_queued_requests", "null"),
        ("max_queued_batch_requests", "null"),
        ("max_batch_tokens", "64"),
        ("mixed_steps", "null"),
        ("max_chunk_tokens", "null"),
        ("max_context_len", "100"),
        ("vocab_size", "10"),
        ("eos_token_ids", "[]"),
        ("policy", "\"lpm\""),
        ("priority_scheduling", "false"),
        ("low_priority_first", "false"),
        ("aging_steps", "16"),
        ("prefix_cache", "true"),
        ("overlap_depth", "0"),
        ("waiting_timeout_s", "null"),
        ("new_token_ratio_init", "0.7"),
        ("new_token_ratio_min", "0.1"),
        ("new_token_ratio_decay_steps", "600"),
        ("max_samples", "8"),
        ("arena_bytes", "65536"),
        ("tokenizer_json", "null"),
    ]);
    fields.insert(field, value);
    let fields: Vec<_> =
        fields.iter().map(|(name, value)| format!("\"{name}\": {value}")).collect();
    Config::from_json(format!("{{{}}}", fields.join(", ")).as_bytes())
}

#[test]
fn configurations_are_checked() {
    assert_eq!(configured("page_size", "16").expect("good").max_running(), 8);
    assert_eq!(configured("max_batch_tokens", "8").expect("good").max_running(), 7);
    for (field, value) in [
        ("page_size", "0"),
        ("num_pages", "1"),
        ("num_pages", "4294967295"),
        ("max_running_requests", "0"),
        ("max_batch_tokens", "1"),
        ("max_chunk_tokens", "0"),
        ("max_queued_requests", "0"),
        ("max_samples", "0"),
        ("aging_steps", "0"),
        ("new_token_ratio_init", "1.5"),
        ("new_token_ratio_min", "0.8"),
        ("waiting_timeout_s", "0"),
        ("arena_bytes", "1024"),
    ] {
        let error = configured(field, value).expect_err(field);
        assert!(error.to_string().starts_with(field), "{error}");
    }
    for (field, value) in [("policy", "\"random\""), ("page_size", "-1"), ("unknown", "1")] {
        assert!(matches!(configured(field, value), Err(Error::ConfigJson(_))), "{field}");
    }
}

#[test]
fn what_mixed_steps_take_is_checked() {
    let mixed = |target: &str, fixed: &str, token: &str, least: u32| {
        let value = format!(
            r#"{{"target_s": {target}, "fixed_s": {fixed}, "token_s": {token},
            "least_prompt_tokens": {least}}}"#
        );
        configured("mixed_steps", &value)
    };
    mixed("0.04", "0", "0.001", 1).expect("good");
    for (field, outcome) in [
        ("mixed_steps.target_s", mixed("0", "0", "0.001", 1)),
        ("mixed_steps.fixed_s", mixed("0.04", "-0.1", "0.001", 1)),
        ("mixed_steps.token_s", mixed("0.04", "0", "0", 1)),
        ("mixed_steps.least_prompt_tokens", mixed("0.04", "0", "0.001", 0)),
    ] {
        let error = outcome.expect_err(field);
        assert!(error.to_string().starts_with(field), "{error}");
    }
}

#[test]
fn lists_that_would_fill_the_arena_are_refused() {
    let mut engine = Engine::new(Config { arena_bytes: 6000, ..config() });
    let mut request = submit(1, &[1], 2);
    request.sampling.logit_bias = vec![(1, 0.5); 1000];
    engine.submit(&request);
    let (status, message) = engine.refusal(1).expect("it is refused");
    assert_eq!(status, 400);
    assert!(message.contains("8000 bytes") && message.contains("arena_bytes"), "{message}");
    // Long lists that fit one after another are served one after another.
    for key in 2..8 {
        let mut request = submit(key, &[key as u32; 40], 4);
        request.logprobs = Some(LogprobRequest(Some(0), 0, vec![3; 80], false));
        engine.submit(&request);
    }
    engine.drain();
    assert_eq!(engine.stat("finished_sequences_total"), 6);
}
