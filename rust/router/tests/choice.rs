//! The router's choices, by policy, and its accounts under random histories.

use std::collections::HashMap;

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use router::core::{
    BlockShape, BreakerConfig, Choice, Config, Outcome, Policy, Prompt, Reason, Report, Router,
    RouterError, Selection, TicketId, WorkerId, WorkerOptions, WorkerState,
};

const SHAPE: BlockShape = BlockShape { bytes: 1, tokens: 10 };

fn router(policy: Policy, workers: usize) -> Router {
    with_config(Config { policy, ..Config::default() }, workers)
}

fn with_config(config: Config, workers: usize) -> Router {
    let mut router = Router::new(config);
    for number in 0..workers {
        let name = format!("worker {number}");
        router
            .add_worker(&WorkerOptions { name: &name, ..WorkerOptions::default() })
            .expect("allowed");
    }
    router
}

fn prompt(text: &str) -> Prompt {
    Prompt::new(text.as_bytes(), text.len() as u64 * 10, SHAPE, b"")
}

fn select(router: &mut Router, text: &str) -> Choice {
    router.select(&prompt(text), &Selection::default(), 0.0).expect("allowed")
}

fn serve(router: &mut Router, text: &str) -> Choice {
    let choice = select(router, text);
    router.started(choice.ticket);
    router.finished(choice.ticket, Outcome::Completed, 0.0);
    choice
}

fn pinned(router: &mut Router, worker: u32, text: &str) -> Choice {
    let only = [WorkerId(worker)];
    let selection = Selection { only: Some(&only), ..Selection::default() };
    router.select(&prompt(text), &selection, 0.0).expect("allowed")
}

#[test]
fn a_prefix_goes_where_it_was_served() {
    let mut router = router(Policy::CacheAware, 8);
    for group in ["aaaaaaaa", "bbbbbbbb", "cccccccc"] {
        let home = serve(&mut router, &format!("{group}0")).worker;
        for turn in 1..20 {
            let choice = serve(&mut router, &format!("{group}{turn}"));
            assert_eq!((choice.worker, choice.cached_tokens >= 80), (home, true));
            assert_eq!(choice.reason, Reason::Hit);
        }
    }
}

#[test]
fn a_busy_home_is_left_when_computing_again_is_cheaper() {
    let config = Config { contention_weight: 0.0, decode_weight: 0.0, ..Config::default() };
    let mut router = with_config(config, 2);
    let home = serve(&mut router, "abcdefgh").worker;
    let other = WorkerId(1 - home.0);
    // The prefix is worth 80 tokens; 79 waiting at its home do not outweigh it, 81 do.
    let mut busy = pinned(&mut router, home.0, "0000000");
    let stays = select(&mut router, "abcdefgh");
    assert_eq!((stays.worker, stays.reason), (home, Reason::Hit));
    router.finished(stays.ticket, Outcome::Cancelled, 0.0);
    router.finished(busy.ticket, Outcome::Cancelled, 0.0);
    busy = pinned(&mut router, home.0, "1111111111111111");
    let leaves = select(&mut router, "abcdefgh");
    assert_eq!((leaves.worker, leaves.reason), (other, Reason::Spill));
    // Now both have it: the less loaded one is taken, and it is a hit for both.
    assert_eq!(select(&mut router, "abcdefgh").cached_tokens, 80);
    router.finished(busy.ticket, Outcome::Completed, 0.0);
}

/// The more wait everywhere, the longer a prefix stays where it is; but never without bound.
#[test]
fn contention_makes_computing_again_dearer_within_bounds() {
    let leaves_at = |contention_weight| {
        let config = Config { contention_weight, decode_weight: 0.0, ..Config::default() };
        let mut router = with_config(config, 2);
        let home = serve(&mut router, "abcdefgh").worker;
        let moved = |router: &mut Router| {
            let choice = select(router, "abcdefgh");
            router.finished(choice.ticket, Outcome::Cancelled, 0.0);
            choice.worker != home
        };
        let mut waiting_tokens = 0_u16;
        while !moved(&mut router) {
            let letter = char::from(b'A' + (waiting_tokens / 40) as u8);
            pinned(&mut router, home.0, &String::from(letter).repeat(4));
            waiting_tokens += 40;
        }
        waiting_tokens
    };
    assert_eq!(leaves_at(0.0), 80);
    // At most one request's worth is charged where nobody waits.
    assert_eq!((leaves_at(1.0), leaves_at(8.0)), (160, 720));
}

/// A hundred requests at once with one prefix must not all go to its home.
#[test]
fn load_counts_from_the_moment_of_selection() {
    for policy in [Policy::CacheAware, Policy::LeastLoad, Policy::PowerOfTwo, Policy::PrefixHash] {
        let mut router = router(policy, 2);
        let mut counts = [0, 0];
        for number in 0..100 {
            let text = format!("shared prefix {number:020}");
            counts[select(&mut router, &text).worker.0 as usize] += 1;
        }
        assert!(counts.iter().all(|count| *count >= 30), "{policy:?}: {counts:?}");
    }
}

#[test]
fn the_fewest_requests_go_before_the_fewest_tokens() {
    let mut router = router(Policy::LeastRequests, 2);
    let long = select(&mut router, &"long prompt ".repeat(100));
    let short = select(&mut router, "short");
    assert_ne!(long.worker, short.worker);
    router.finished(long.ticket, Outcome::Completed, 0.0);
    assert_eq!(select(&mut router, &"another ".repeat(100)).worker, long.worker);
}

fn named(router: &mut Router, names: &[u64]) -> Choice {
    let prompt = Prompt::from_block_names(names, names.len() as u64 * 10, 10);
    let choice = router.select(&prompt, &Selection::default(), 0.0).expect("allowed");
    router.finished(choice.ticket, Outcome::Completed, 0.0);
    choice
}

#[test]
fn cold_prompts_are_placed_alike_by_routers_that_share_nothing() {
    let mut one = router(Policy::CacheAware, 16);
    let mut two = with_config(Config { seed: 99, ..Config::default() }, 16);
    let mut used = HashMap::new();
    for group in 0..400 {
        let home = named(&mut one, &[group, 7, 8]);
        *used.entry(home.worker).or_insert(0) += 1;
        assert_eq!(home.worker, named(&mut two, &[group, 7, 8]).worker);
        assert_eq!(home.reason, Reason::Cold);
    }
    assert_eq!(used.len(), 16, "{used:?}");
}

/// When every prompt begins alike, the common head must not name the worker.
#[test]
fn a_head_that_most_workers_have_does_not_attract() {
    let mut router = router(Policy::CacheAware, 8);
    for worker in 0..8 {
        let prompt = Prompt::from_block_names(&[1, 2, 3], 30, 10);
        let only = [WorkerId(worker)];
        let selection = Selection { only: Some(&only), ..Selection::default() };
        let choice = router.select(&prompt, &selection, 0.0).expect("allowed");
        router.finished(choice.ticket, Outcome::Completed, 0.0);
    }
    let mut used = HashMap::new();
    for group in 100..300 {
        let choice = named(&mut router, &[1, 2, 3, group]);
        *used.entry(choice.worker).or_insert(0) += 1;
        assert_eq!((choice.cached_tokens, choice.reason), (30, Reason::Cold));
    }
    assert!(used.len() == 8 && used.values().all(|count| *count < 60), "{used:?}");
}

#[test]
fn sessions_and_prefixes_have_homes_within_a_bound() {
    let mut router = router(Policy::Session, 4);
    let ask = |router: &mut Router, session: &'static [u8]| {
        let selection = Selection { session: Some(session), ..Selection::default() };
        router.select(&Prompt::of_length(10), &selection, 0.0).expect("allowed")
    };
    let home = ask(&mut router, b"ada");
    router.finished(home.ticket, Outcome::Completed, 0.0);
    let mut counts = HashMap::new();
    let again = ask(&mut router, b"ada");
    assert_eq!((again.worker, again.reason), (home.worker, Reason::Affinity));
    *counts.entry(again.worker).or_insert(0) += 1;
    for _ in 1..100 {
        *counts.entry(ask(&mut router, b"ada").worker).or_insert(0) += 1;
    }
    assert!(counts.values().all(|count| *count <= 33), "{counts:?}");
}

#[test]
fn round_robin_takes_turns_and_random_reaches_all() {
    let mut router = router(Policy::RoundRobin, 3);
    let turns: Vec<_> = (0..6).map(|_| serve(&mut router, "x").worker.0).collect();
    assert_eq!(turns, [0, 1, 2, 0, 1, 2]);
    for policy in [Policy::Random, Policy::PowerOfTwo] {
        let mut router = self::router(policy, 3);
        let mut used: Vec<_> = (0..60).map(|_| serve(&mut router, "x").worker.0).collect();
        used.sort_unstable();
        used.dedup();
        assert_eq!(used, [0, 1, 2]);
    }
}

#[test]
fn equal_seeds_make_equal_choices() {
    for policy in [Policy::Random, Policy::PowerOfTwo, Policy::CacheAware] {
        let run = || {
            let mut router = router(policy, 5);
            (0..50).map(|n| select(&mut router, &format!("{}", n % 7)).worker).collect::<Vec<_>>()
        };
        assert_eq!(run(), run());
    }
}

#[test]
fn what_an_engine_reports_counts() {
    let mut router = router(Policy::CacheAware, 2);
    let home = serve(&mut router, "abcdefgh").worker;
    let report = Report { waiting_uncached_tokens: 500, ..Report::default() };
    router.report(home, report, 0.0).expect("allowed");
    assert_ne!(select(&mut router, "abcdefgh").worker, home);
    let late = router.select(&prompt("abcdefgh_"), &Selection::default(), 100.0).expect("allowed");
    assert_eq!(late.worker, home, "an old report no longer counts");
}

#[test]
fn only_workers_that_may_are_chosen() {
    let mut router = router(Policy::CacheAware, 4);
    router.set_state(WorkerId(0), WorkerState::Draining).expect("allowed");
    router.set_state(WorkerId(1), WorkerState::Down).expect("allowed");
    router.remove_worker(WorkerId(2)).expect("allowed");
    for number in 0..50 {
        assert_eq!(select(&mut router, &number.to_string()).worker, WorkerId(3));
    }
    let exclude = [WorkerId(3)];
    let selection = Selection { exclude: &exclude, ..Selection::default() };
    let refused = router.select(&prompt("x"), &selection, 0.0);
    assert_eq!(refused, Err(RouterError::Unavailable));
    assert_eq!(router.remove_worker(WorkerId(2)), Err(RouterError::UnknownWorker(2)));
    let name = WorkerOptions { name: "worker 3", ..WorkerOptions::default() };
    assert!(matches!(router.add_worker(&name), Err(RouterError::DuplicateWorker(_))));
    let again = WorkerOptions { name: "worker 2", ..WorkerOptions::default() };
    assert_eq!(router.add_worker(&again), Ok(WorkerId(4)), "ids are not used twice");
}

#[test]
fn a_limit_makes_busy_and_an_end_makes_room() {
    let config = Config { max_in_flight: 2, ..Config::default() };
    let mut router = with_config(config, 2);
    let choices: Vec<_> = (0..4).map(|_| select(&mut router, "same")).collect();
    let busy = router.select(&prompt("same"), &Selection::default(), 0.0);
    assert_eq!(busy, Err(RouterError::Busy(2)));
    router.finished(choices[1].ticket, Outcome::Completed, 0.0);
    assert_eq!(select(&mut router, "same").worker, choices[1].worker);
}

#[test]
fn a_failing_worker_is_left_alone_and_probed_by_one() {
    let breaker = BreakerConfig { failures: 3, open_s: 1.0, max_open_s: 4.0 };
    let mut router = with_config(Config { breaker, ..Config::default() }, 1);
    let ask = |router: &mut Router, now| router.select(&prompt("abc"), &Selection::default(), now);
    for _ in 0..3 {
        let choice = ask(&mut router, 0.0).expect("allowed");
        router.finished(choice.ticket, Outcome::Failed, 0.0);
    }
    assert_eq!(ask(&mut router, 0.5), Err(RouterError::Unavailable));
    let probe = ask(&mut router, 1.0).expect("allowed");
    assert_eq!(ask(&mut router, 1.0), Err(RouterError::Unavailable));
    router.finished(probe.ticket, Outcome::Completed, 1.1);
    assert!(ask(&mut router, 1.1).is_ok() && ask(&mut router, 1.1).is_ok());
}

#[test]
fn a_prompt_that_was_never_computed_is_not_expected_in_the_cache() {
    let mut router = router(Policy::CacheAware, 1);
    serve(&mut router, "abcd");
    for (outcome, expected) in
        [(Outcome::Failed, 40), (Outcome::Refused, 40), (Outcome::Cancelled, 80)]
    {
        let choice = select(&mut router, "abcdefgh");
        router.finished(choice.ticket, outcome, 0.0);
        assert_eq!(router.cached_tokens(WorkerId(0), &prompt("abcdefgh")), Ok(expected));
    }
    router.forget_cache(WorkerId(0)).expect("allowed");
    assert_eq!(router.cached_tokens(WorkerId(0), &prompt("abcdefgh")), Ok(0));
}

/// What a request adds to the accounts, kept naively.
struct Open {
    ticket: TicketId,
    worker: WorkerId,
    uncached: u64,
    started: bool,
}

#[test]
fn accounts_agree_with_a_list_of_open_requests_and_return_to_zero() {
    let policies = [
        Policy::CacheAware,
        Policy::RoundRobin,
        Policy::Random,
        Policy::PowerOfTwo,
        Policy::LeastLoad,
        Policy::LeastRequests,
        Policy::Session,
        Policy::PrefixHash,
    ];
    for seed in 0..160 {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let policy = policies[seed as usize % policies.len()];
        let mut router = router(policy, 3);
        let mut open: Vec<Open> = Vec::new();
        for step in 0..300 {
            let now = f64::from(step) / 10.0;
            random_step(&mut router, &mut open, &mut rng, now);
            check_accounts(&router, &open);
        }
        for request in open.drain(..) {
            router.finished(request.ticket, Outcome::Cancelled, 0.0);
        }
        check_accounts(&router, &open);
        assert_eq!(router.num_tickets(), 0);
    }
}

fn random_step(router: &mut Router, open: &mut Vec<Open>, rng: &mut ChaCha8Rng, now: f64) {
    let ids: Vec<_> = router.workers().map(|worker| worker.id).collect();
    let worker = ids[rng.random_range(0..ids.len())];
    match rng.random_range(0..20) {
        0 if ids.len() > 1 => router.remove_worker(worker).expect("allowed"),
        1 => {
            let name = format!("new at {now}");
            router
                .add_worker(&WorkerOptions { name: &name, ..WorkerOptions::default() })
                .expect("allowed");
        }
        2 => {
            let states = [WorkerState::Ready, WorkerState::Down, WorkerState::Draining];
            router.set_state(worker, states[rng.random_range(0..3)]).expect("allowed");
        }
        3 => router.forget_cache(worker).expect("allowed"),
        4 => {
            let report = Report { waiting_uncached_tokens: 77, ..Report::default() };
            router.report(worker, report, now).expect("allowed");
        }
        5..12 => {
            let length = rng.random_range(0..9);
            let text: String = (0..length).map(|_| ['a', 'b'][rng.random_range(0..2)]).collect();
            let asked = prompt(&text);
            if let Ok(choice) = router.select(&asked, &Selection::default(), now) {
                assert!(choice.cached_tokens <= asked.num_tokens());
                let uncached = asked.num_tokens() - choice.cached_tokens;
                let (ticket, worker) = (choice.ticket, choice.worker);
                open.push(Open { ticket, worker, uncached, started: false });
            }
        }
        12..15 if !open.is_empty() => {
            let place = rng.random_range(0..open.len());
            open[place].started = true;
            router.started(open[place].ticket);
        }
        _ if !open.is_empty() => {
            let outcomes =
                [Outcome::Completed, Outcome::Failed, Outcome::Refused, Outcome::Cancelled];
            let ended = open.swap_remove(rng.random_range(0..open.len()));
            router.finished(ended.ticket, outcomes[rng.random_range(0..4)], now);
            router.finished(ended.ticket, Outcome::Completed, now); // a second end changes nothing
        }
        _ => {}
    }
}

fn check_accounts(router: &Router, open: &[Open]) {
    router.index().check_integrity().expect("sound");
    assert_eq!(router.num_tickets(), open.len());
    for worker in router.workers() {
        let own = || open.iter().filter(|request| request.worker == worker.id);
        let waiting: u64 =
            own().filter(|request| !request.started).map(|request| request.uncached).sum();
        assert_eq!(worker.load.in_flight(), own().count() as u64);
        assert_eq!(worker.load.running(), own().filter(|one| one.started).count() as u64);
        assert_eq!(worker.load.prefill_tokens(), waiting);
    }
}
