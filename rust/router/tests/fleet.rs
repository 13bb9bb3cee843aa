//! The simulated fleet: what must hold whatever the workload, the policy and who dies.

use router::sim::{End, Failure, Fleet, FleetConfig, FleetPolicy, Outcomes, SharedPrefix, Trace};

const POLICIES: [FleetPolicy; 8] = [
    FleetPolicy::CacheAware,
    FleetPolicy::RoundRobin,
    FleetPolicy::Random,
    FleetPolicy::PowerOfTwo,
    FleetPolicy::LeastLoad,
    FleetPolicy::PrefixHash,
    FleetPolicy::SglangThreshold,
    FleetPolicy::VllmRouter,
];

fn workload(seed: u64) -> Trace {
    let workload = SharedPrefix {
        requests: 300,
        rate: 30.0,
        groups: 8,
        conversations: 2,
        output_tokens: 24,
        seed,
        ..SharedPrefix::default()
    };
    workload.trace()
}

fn config(policy: FleetPolicy, seed: u64) -> FleetConfig {
    let mut config =
        FleetConfig { policy, seed, workers: 4, block_tokens: 64, ..Default::default() };
    config.engine.pool_tokens = 40_000;
    config.engine.max_batch_tokens = 2_048;
    config.engine.max_running_requests = 16;
    config.engine.max_context_len = 16_384;
    config
}

fn run(config: FleetConfig, trace: &Trace) -> Outcomes {
    let outcomes = Fleet::new(config, trace).expect("usable settings").run();
    outcomes.check_integrity().expect("nothing is left");
    outcomes
}

/// What holds of every run: each request ended once, in order of time, with possible figures.
fn check(outcomes: &Outcomes) {
    for record in &outcomes.records {
        assert!(record.end.is_some());
        assert!(record.end_s >= record.arrival_s);
        assert!(record.cached_tokens < record.prompt_tokens);
        if let Some(first_token_s) = record.first_token_s {
            assert!(first_token_s > record.arrival_s && record.end_s >= first_token_s);
        }
        assert!(record.end != Some(End::Completed) || record.first_token_s.is_some());
    }
    let summary = &outcomes.summary;
    let ended = summary.completed + summary.broken + summary.lost + summary.refused;
    assert_eq!(ended, summary.requests);
    assert_eq!(summary.requests, outcomes.records.len() as u64);
    let in_windows: u64 = summary.windows.iter().map(|window| window.requests).sum();
    assert_eq!(in_windows, summary.requests);
}

#[test]
fn every_request_ends_once_whatever_happens() {
    for (number, policy) in POLICIES.into_iter().enumerate() {
        let mut config = config(policy, number as u64);
        config.routers = 1 + number % 3;
        config.detect_s = 0.5;
        config.failures = [(0, 2.0, 3.0), (1, 2.5, 1.0), (0, 7.0, 0.1), (2, 7.0, 100.0)]
            .map(|(worker, at_s, down_s)| Failure { worker, at_s, down_s })
            .to_vec();
        let outcomes = run(config, &workload(number as u64));
        check(&outcomes);
        assert!(outcomes.summary.retries > 0, "{policy:?}");
        assert!(outcomes.summary.completed > 250, "{policy:?}: {:?}", outcomes.summary);
    }
}

#[test]
fn without_failures_everything_is_completed_at_the_first_attempt() {
    for policy in POLICIES {
        let outcomes = run(config(policy, 1), &workload(1));
        check(&outcomes);
        assert_eq!((outcomes.summary.completed, outcomes.summary.retries), (300, 0));
        assert!(outcomes.summary.hit_rate <= outcomes.summary.ideal_hit_rate + 0.02);
    }
}

#[test]
fn with_one_worker_all_policies_agree() {
    let alone = |policy| {
        let outcomes = run(FleetConfig { workers: 1, ..config(policy, 3) }, &workload(3));
        let times = outcomes.records.iter().map(|record| (record.first_token_s, record.end_s));
        times.collect::<Vec<_>>()
    };
    let expected = alone(FleetPolicy::CacheAware);
    for policy in POLICIES {
        assert_eq!(alone(policy), expected, "{policy:?}");
    }
}

#[test]
fn the_same_seed_gives_the_same_bits() {
    for policy in [FleetPolicy::CacheAware, FleetPolicy::SglangThreshold, FleetPolicy::Random] {
        let settings = FleetConfig { routers: 2, spread_s: 0.2, copies: 2, ..config(policy, 5) };
        let one = run(settings.clone(), &workload(5));
        let two = run(settings.clone(), &workload(5));
        assert_eq!(one.summary.to_json(), two.summary.to_json());
        let other = run(FleetConfig { seed: 6, ..settings }, &workload(5));
        assert_ne!(one.summary.to_json(), other.summary.to_json());
    }
}

#[test]
fn a_cache_aware_fleet_beats_a_blind_one() {
    let trace = workload(7);
    let ttft = |policy| run(config(policy, 7), &trace).summary;
    let (aware, blind) = (ttft(FleetPolicy::CacheAware), ttft(FleetPolicy::RoundRobin));
    assert!(aware.hit_rate > blind.hit_rate + 0.1, "{} {}", aware.hit_rate, blind.hit_rate);
    assert!(aware.ttft_s.mean < blind.ttft_s.mean);
}

#[test]
fn what_no_engine_can_hold_is_refused() {
    let line = r#"{"timestamp": 0, "input_length": 30000, "output_length": 5}"#;
    let trace = Trace::parse(line, 64).expect("a request");
    let outcomes = run(config(FleetPolicy::CacheAware, 0), &trace);
    check(&outcomes);
    assert_eq!(outcomes.records[0].end, Some(End::Refused));
}

#[test]
fn a_trace_survives_its_lines_and_copies_share_nothing() {
    let trace = workload(9);
    let read = Trace::parse(&trace.to_lines(), 64).expect("its own lines");
    assert_eq!(read.requests.len(), trace.requests.len());
    for (one, two) in read.requests.iter().zip(&trace.requests) {
        assert!((one.timestamp - two.timestamp).abs() < 1e-6);
        assert_eq!((one.input_length, one.output_length), (two.input_length, two.output_length));
        assert!(one.hash_ids == two.hash_ids);
    }
    let doubled = trace.arranged(&FleetConfig { copies: 2, speed: 2.0, ..FleetConfig::default() });
    assert_eq!(doubled.requests.len(), 600);
    assert!((doubled.duration_s() - trace.duration_s() / 2.0).abs() < 1e-6);
    assert!((doubled.ideal_hit_rate() - trace.ideal_hit_rate()).abs() < 1e-9);
}

#[test]
fn unusable_input_is_named() {
    let error = |json: &str| FleetConfig::from_json(json.as_bytes()).expect_err("unusable");
    assert!(error(r#"{"workers": 0}"#).to_string().contains("workers must be 1 to 16384"));
    assert!(error(r#"{"policy": "best"}"#).to_string().contains("unknown variant `best`"));
    let line = r#"{"timestamp": 0, "input_length": 0, "output_length": 5}"#;
    let error = Trace::parse(line, 64).expect_err("no prompt");
    assert!(error.to_string().starts_with("line 1 of the trace"));
    for (policy, setting, message) in [
        (FleetPolicy::CacheAware, "policy", "is given by the fleet's policy"),
        (FleetPolicy::CacheAware, "no_such", "unknown field `no_such`"),
        (FleetPolicy::VllmRouter, "decode_weight", "this one has none"),
    ] {
        let mut config = config(policy, 0);
        config.router.insert(setting.to_owned(), 1.into());
        let error = Fleet::new(config, &Trace::default()).err().expect("unusable").to_string();
        assert!(error.contains(message), "{error}");
    }
}
