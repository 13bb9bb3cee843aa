//! Who computes what and when: budget, order, sharing, memory.

mod support;

use scheduler::{Config, MixedSteps, Policy};
use support::blocks::{Plan, section as s};
use support::engine::Engine;
use support::messages::{Submit, submit};
use support::oracle::solo;
use support::{config, mixed_steps};

/// Tokens of every row of a plan, by slot.
fn rows(plan: &Plan) -> Vec<(i32, i32)> {
    plan.ints(s::ROW_SLOT).into_iter().zip(plan.ints(s::ROW_QUERY_LEN)).collect()
}

fn prompt(seed: u32, length: u32) -> Vec<u32> {
    (0..length).map(|position| (position * position + seed * 7 + position * seed) % 19).collect()
}

fn cached(engine: &Engine, key: u64, sample: usize) -> u32 {
    engine.sample(key, sample).started.as_ref().expect("it ran").cached_device
}

fn assert_all_as_solo(engine: &Engine) {
    for (key, sent) in &engine.client.requests {
        for sample in 0..sent.samples.len() {
            let expected = solo(&sent.submit, sample, &engine.config).outputs;
            assert_eq!(engine.sample(*key, sample).token_ids, expected, "request {key}");
        }
    }
}

/// Keys in the order in which they got their first token.
fn order_of_start(engine: &Engine) -> Vec<u64> {
    let mut started: Vec<_> = engine
        .client
        .requests
        .iter()
        .filter_map(|(key, sent)| {
            let started = sent.samples[0].started.as_ref()?;
            Some((started.forward_entry_time, *key))
        })
        .collect();
    started.sort_by(|a, b| a.0.total_cmp(&b.0));
    started.into_iter().map(|(_, key)| key).collect()
}

#[test]
fn a_prompt_is_computed_in_chunks_that_fill_the_budget() {
    let mut engine = Engine::new(config());
    engine.submit(&submit(1, &prompt(1, 70), 2));
    let lengths: Vec<_> = (0..3)
        .map(|_| {
            let plan = engine.plan().expect("there is work");
            engine.commit();
            plan.num_tokens()
        })
        .collect();
    assert_eq!(lengths, [32, 32, 6]);
    engine.drain();
    let mut engine = Engine::new(Config { max_chunk_tokens: Some(10), ..config() });
    engine.submit(&submit(1, &prompt(1, 70), 2));
    engine.submit(&submit(2, &prompt(2, 70), 2));
    let plan = engine.plan().expect("there is work");
    assert_eq!(rows(&plan), [(0, 10), (1, 10)]);
    engine.commit();
    engine.drain();
    assert_all_as_solo(&engine);
}

#[test]
fn steps_in_which_sequences_decode_may_be_shorter() {
    for (mixed, least, chunk) in [(20, 9, 19), (3, 9, 4), (3, 2, 2), (32, 9, 31), (99, 9, 31)] {
        let mixed_steps = Some(mixed_steps(mixed, least));
        let mut engine = Engine::new(Config { mixed_steps, ..config() });
        engine.submit(&submit(1, &prompt(1, 5), 30));
        engine.submit(&submit(2, &prompt(2, 60), 2));
        let plan = engine.plan().expect("there is work");
        assert_eq!(rows(&plan), [(0, 5), (1, 27)], "nobody decodes yet");
        engine.commit();
        let plan = engine.plan().expect("there is work");
        // An eighth of the whole budget is the least that prompts get, or what was said to be.
        assert_eq!(rows(&plan), [(0, 1), (1, chunk)]);
        engine.commit();
        engine.drain();
        assert_all_as_solo(&engine);
    }
}

/// Many sequences at once, whose pages nothing else keeps.
fn roomy(running: u32) -> Config {
    Config { max_running_requests: running, num_pages: 1000, prefix_cache: false, ..config() }
}

#[test]
fn long_prompts_never_starve_decoding_nor_the_other_way_round() {
    let cases = [
        (16, 14, None),
        (9, 8, None),
        (2, 1, None),
        (64, 8, None),
        (16, 14, Some((1, 9))),
        (2, 1, Some((1, 9))),
        (64, 8, Some((20, 9))),
        (64, 8, Some((20, 3))),
    ];
    for ((budget, running, mixed), timed) in
        cases.into_iter().flat_map(|case| [(case, false), (case, true)])
    {
        let mixed_steps = mixed.map(|(tokens, least)| mixed_steps(tokens, least));
        let load = Config { max_batch_tokens: budget, mixed_steps, ..roomy(running) };
        let share = budget.div_ceil(8);
        let most = load.max_running() as usize;
        let mut engine = Engine::new(load);
        let mut key = 0;
        let mut decoding = std::collections::BTreeSet::new();
        for step in 0..400 {
            while engine.stat("num_waiting") < 3 {
                key += 1;
                engine.submit(&submit(key, &prompt(key as u32, 1 + (key as u32 * 37) % 120), 9));
            }
            let plan = engine.plan().expect("there is work");
            let rows = rows(&plan);
            assert!(rows.len() <= most);
            // Every sequence that had a token in the last step and goes on has a row.
            let closed = plan.ints(s::CLOSED_SLOTS);
            for slot in &decoding {
                let planned = rows.contains(&(*slot, 1));
                assert!(planned || closed.contains(slot), "slot {slot} was left out");
            }
            let single = rows.iter().filter(|(_, length)| *length == 1).count() as u32;
            let is_mixed = decoding.iter().any(|slot| !closed.contains(slot));
            // A prompt that lacks one token may make a step mixed, too.
            let share = mixed.map_or(share, |(_, least)| share.min(least));
            let mixed = mixed.filter(|_| is_mixed);
            // With measured times the target may allow any number of tokens.
            let limit =
                mixed.filter(|_| !timed).map_or(budget, |(most, _)| most.max(single + share));
            assert!(plan.num_tokens() <= limit as usize, "{rows:?}");
            let full = plan.num_tokens() == budget as usize;
            let prompts: i32 = rows
                .iter()
                .filter(|(slot, _)| !decoding.contains(slot) || closed.contains(slot))
                .map(|(_, length)| length)
                .sum();
            let room = most > engine.stat("num_running") as usize;
            assert!(full || !room || prompts >= share as i32, "{rows:?}");
            let sampled = plan.ints(s::SAMPLE_SLOT);
            if timed {
                // From much shorter than expected to much longer, and a clock that goes back.
                engine.now += f64::from(step * step % 97) * f64::from(step % 11 - 1);
            }
            engine.commit();
            decoding = sampled.into_iter().collect();
        }
        engine.abort(scheduler::Target::All);
        engine.drain();
    }
}

#[test]
fn steps_in_which_sequences_decode_grow_while_somebody_waits_for_seconds() {
    for (class, least, most) in [(0, 49, 50), (1, 20, 20)] {
        let steps =
            MixedSteps { target_s: 0.04, fixed_s: 0.0, token_s: 0.002, ..mixed_steps(1, 2) };
        let load = Config { max_batch_tokens: 64, mixed_steps: Some(steps), ..roomy(8) };
        let mut engine = Engine::new(load);
        for decoding in 1001..1004 {
            engine.submit(&submit(decoding, &prompt(decoding as u32, 1), 199));
        }
        let (mut key, mut width) = (0, 0);
        for _ in 0..190 {
            while engine.stat("num_waiting") < 3 {
                key += 1;
                let waiting = submit(key, &prompt(key as u32, 150), 1);
                engine.submit(&Submit { request_class: class, ..waiting });
            }
            width = engine.plan().expect("there is work").num_tokens();
            engine.now += width as f64 * steps.token_s;
            engine.commit();
        }
        assert!((least..=most).contains(&width), "requests of class {class}: {width}");
        engine.abort(scheduler::Target::All);
        engine.drain();
    }
}

#[test]
fn steps_in_which_sequences_decode_follow_what_such_steps_take() {
    let load = Config {
        mixed_steps: Some(mixed_steps(20, 2)),
        num_pages: 1000,
        prefix_cache: false,
        overlap_depth: 1,
        ..config()
    };
    let mut engine = Engine::new(load);
    // Three sequences decode; beside them there are always prompts.
    for decoding in 1001..1004 {
        engine.submit(&submit(decoding, &prompt(decoding as u32, 1), 199));
    }
    let mut widths = Vec::new();
    let mut key = 0;
    for step in 0..190 {
        while engine.stat("num_waiting") < 3 {
            key += 1;
            engine.submit(&submit(key, &prompt(key as u32, 150), 1));
        }
        let plan = engine.plan().expect("there is work");
        widths.push(plan.num_tokens());
        if engine.in_flight() > 1 {
            // Twice as long as was expected for each token, and four at once; one step in between
            // is held up.
            let held_up = if step == 150 { 5000.0 } else { 0.0 };
            engine.now += 4.0 + 2.0 * widths[step - 1] as f64 + held_up;
            engine.commit();
        }
    }
    assert!(widths[5..].iter().all(|width| (6..=20).contains(width)), "{widths:?}");
    assert!(widths[40..150].iter().all(|width| (7..=9).contains(width)), "{widths:?}");
    assert!(widths[152..].iter().all(|width| (6..=9).contains(width)), "{widths:?}");
    assert!(widths[175..].iter().all(|width| (7..=9).contains(width)), "{widths:?}");
}

#[test]
fn identical_prompts_are_cached_but_for_one_token() {
    let mut engine = Engine::new(Config { page_size: 16, ..config() });
    for (key, length) in [(1, 50), (2, 48), (3, 17), (4, 16), (5, 1)] {
        for again in [0, 100] {
            engine.submit(&submit(key + again, &prompt(key as u32, length), 5));
            engine.drain();
        }
        assert_eq!(cached(&engine, key + 100, 0), length - 1);
    }
    assert_all_as_solo(&engine);
}

#[test]
fn prompts_that_share_21_tokens_share_21_at_page_size_16() {
    let mut engine = Engine::new(Config { page_size: 16, ..config() });
    let mut second = prompt(1, 40);
    second[21] = (second[21] + 1) % 19;
    engine.submit(&submit(1, &prompt(1, 40), 5));
    engine.drain();
    engine.submit(&submit(2, &second, 5));
    let plan = engine.plan().expect("there is work");
    let moves = plan.ints(s::PAGE_MOVES);
    assert_eq!((moves.len(), moves[4]), (6, 5), "five tokens are copied from the donor");
    engine.commit();
    engine.drain();
    assert_eq!(cached(&engine, 2, 0), 21);
    // A conversation's next turn finds prompt and output; the last output has no KV.
    let outputs = engine.sample(1, 0).token_ids.clone();
    let turn = [&prompt(1, 40)[..], &outputs, &[3, 3]].concat();
    engine.submit(&submit(3, &turn, 5));
    engine.drain();
    assert_eq!(cached(&engine, 3, 0), 44);
    assert_all_as_solo(&engine);
}

#[test]
fn namespaces_and_weight_epochs_do_not_share() {
    let mut engine = Engine::new(config());
    let request = |key| submit(key, &prompt(1, 30), 4);
    engine.submit(&request(1));
    engine.drain();
    engine.submit(&Submit { namespace: "tenant".into(), ..request(2) });
    engine.drain();
    assert_eq!(cached(&engine, 2, 0), 0);
    engine.submit(&request(3));
    engine.plan();
    assert!(!engine.scheduler.set_weight_epoch(7), "a step is in flight");
    engine.commit();
    assert!(engine.scheduler.set_weight_epoch(7));
    engine.submit(&request(4));
    let plan = engine.plan().expect("there is work");
    assert_eq!(plan.weight_epoch, 7);
    engine.commit();
    engine.drain();
    assert_eq!((cached(&engine, 3, 0), cached(&engine, 4, 0)), (29, 0));
    engine.submit(&request(5));
    engine.drain();
    assert_eq!(cached(&engine, 5, 0), 29);
    engine.submit(&request(6));
    assert!(!engine.scheduler.flush_cache(), "a request waits");
    engine.drain();
    assert!(engine.scheduler.flush_cache());
    engine.submit(&request(7));
    engine.drain();
    assert_eq!(cached(&engine, 7, 0), 0);
}

#[test]
fn followers_wait_for_the_prefix_that_a_leader_computes() {
    let shared = prompt(1, 90);
    let mut engine =
        Engine::new(Config { max_batch_tokens: 64, max_chunk_tokens: Some(32), ..config() });
    for key in 1..=4 {
        let own = [&shared[..], &[key as u32]].concat();
        engine.submit(&submit(key, &own, 6));
    }
    engine.submit(&submit(5, &prompt(9, 20), 6));
    let plan = engine.plan().expect("there is work");
    assert_eq!(rows(&plan), [(0, 32), (1, 20)], "the leader and the one that has another prompt");
    engine.commit();
    assert_eq!(engine.stat("num_waiting"), 3);
    assert_eq!(engine.stat("num_waiting_uncached_tokens"), 0, "they wait outside the queue");
    engine.plan();
    engine.commit();
    assert_eq!(engine.stat("num_waiting_uncached_tokens"), 3 * 91, "they are back in it");
    engine.drain();
    for key in 2..=4 {
        // They start when less than 32 shared tokens are left: two chunks of 32 are in the cache.
        assert!(cached(&engine, key, 0) >= 64, "request {key}");
    }
    assert_all_as_solo(&engine);
}

#[test]
fn followers_find_another_leader_when_theirs_is_aborted() {
    let shared = prompt(1, 90);
    let mut engine = Engine::new(Config {
        overlap_depth: 1,
        max_batch_tokens: 64,
        max_chunk_tokens: Some(32),
        ..config()
    });
    for key in 1..=3 {
        let own = [&shared[..], &[key as u32]].concat();
        engine.submit(&submit(key, &own, 6));
    }
    engine.plan();
    assert_eq!(engine.stat("num_waiting_uncached_tokens"), 0, "both follow");
    assert_eq!(engine.abort(scheduler::Target::Rid("r1")), 1);
    engine.commit();
    assert_eq!(engine.stat("num_running"), 0);
    let plan = engine.plan().expect("another leader computes");
    assert_eq!(plan.num_rows(), 1);
    engine.commit();
    engine.drain();
    assert!(cached(&engine, 3, 0) >= 64);
    assert_eq!(engine.sample(1, 0).finished.as_ref().expect("it ended").reason, "abort");
}

#[test]
fn lpm_serves_the_longest_cached_prefix_first() {
    for (policy, order) in [(Policy::Fcfs, [1, 2, 3, 4, 5]), (Policy::Lpm, [1, 2, 5, 4, 3])] {
        let mut engine = Engine::new(Config { policy, max_running_requests: 1, ..config() });
        engine.submit(&submit(1, &prompt(1, 60), 2));
        engine.drain();
        engine.now += 1.0;
        engine.submit(&submit(2, &prompt(7, 30), 20));
        engine.turn();
        engine.submit(&submit(3, &prompt(9, 60), 2));
        engine.submit(&submit(4, &[&prompt(1, 20)[..], &prompt(4, 20)].concat(), 2));
        engine.submit(&submit(5, &[&prompt(1, 40)[..], &prompt(4, 20)].concat(), 2));
        engine.drain();
        assert_eq!(order_of_start(&engine), order);
    }
}

#[test]
fn lpm_learns_of_prefixes_that_are_cached_while_a_request_waits() {
    let mut engine =
        Engine::new(Config { policy: Policy::Lpm, max_running_requests: 1, ..config() });
    engine.submit(&submit(1, &prompt(1, 60), 5));
    engine.submit(&submit(2, &prompt(9, 60), 2));
    engine.submit(&submit(3, &prompt(1, 58), 2));
    engine.drain();
    assert_eq!(order_of_start(&engine), [1, 3, 2]);
}

#[test]
fn priorities_and_classes_order_the_queue() {
    let with = |key, priority, class| Submit {
        priority,
        request_class: class,
        ..submit(key, &prompt(key as u32, 10), 3)
    };
    let table = [
        (false, false, [1, 2, 3, 4, 5]),
        (true, false, [1, 4, 2, 3, 5]),
        (true, true, [1, 3, 2, 4, 5]),
    ];
    for (priority_scheduling, low_priority_first, order) in table {
        let mut engine = Engine::new(Config {
            priority_scheduling,
            low_priority_first,
            max_running_requests: 1,
            ..config()
        });
        engine.submit(&with(1, 0, 0));
        engine.turn();
        engine.submit(&with(5, 9, 1));
        for (key, priority) in [(2, 1), (3, 0), (4, 2)] {
            engine.submit(&with(key, priority, 0));
        }
        engine.drain();
        assert_eq!(order_of_start(&engine), order);
    }
}

#[test]
fn aging_lets_the_lowest_through() {
    let mut engine = Engine::new(Config {
        priority_scheduling: true,
        max_running_requests: 1,
        aging_steps: 20,
        ..config()
    });
    engine.submit(&Submit { request_class: 1, priority: -5, ..submit(1, &prompt(1, 10), 2) });
    let mut key = 1;
    let mut admitted_before = 0;
    while engine.sample(1, 0).started.is_none() {
        while engine.stat("num_waiting") < 4 {
            key += 1;
            engine.submit(&Submit { priority: 5, ..submit(key, &prompt(key as u32, 10), 2) });
        }
        engine.turn();
        admitted_before = engine.stat("admitted_sequences_total");
    }
    // Two steps each: ten before it is overdue, and its turn comes within eight admissions.
    assert!((8..=20).contains(&admitted_before), "{admitted_before}");
    engine.abort(scheduler::Target::All);
    engine.drain();
}

#[test]
fn a_full_pool_retracts_and_everything_still_ends_as_alone() {
    for overlap_depth in 0..3 {
        let mut engine = Engine::new(Config {
            page_size: 2,
            num_pages: 31,
            overlap_depth,
            eos_token_ids: vec![19],
            new_token_ratio_init: 0.0,
            new_token_ratio_min: 0.0,
            ..config()
        });
        for key in 1..=12 {
            let mut request = submit(key, &prompt(key as u32, 3 + key as u32 % 5), 40);
            request.sampling.min_new_tokens = 30;
            engine.submit(&request);
        }
        engine.drain();
        assert_all_as_solo(&engine);
        assert!(engine.stat("retracted_requests_total") > 0);
        let retractions = engine
            .client
            .requests
            .values()
            .map(|sent| sent.samples[0].finished.as_ref().expect("it ended").num_retractions);
        let total = u64::from(retractions.sum::<u32>());
        assert_eq!(total, engine.stat("retracted_requests_total"));
        let mut samples = engine.client.requests.values().map(|sent| &sent.samples[0]);
        assert!(samples.any(|sample| sample.num_retractions > 0), "told before the end");
        assert_eq!(engine.stat("free_tokens") + engine.stat("evictable_tokens"), 60);
    }
}

#[test]
fn the_new_token_ratio_falls_while_all_goes_well_and_starts_anew() {
    let mut engine = Engine::new(config());
    let ratio = |engine: &Engine| {
        let stats = engine.scheduler.stats();
        stats.iter().find(|(name, _)| *name == "new_token_ratio").expect("a known name").1
    };
    let init = ratio(&engine);
    engine.submit(&submit(1, &prompt(1, 5), 50));
    for _ in 0..20 {
        engine.turn();
    }
    assert!((ratio(&engine) - (init - 19.0 * 0.006)).abs() < 1e-9);
    engine.drain();
    engine.plan();
    assert!((ratio(&engine) - init).abs() < 1e-9);
}

#[test]
fn retraction_takes_batch_before_interactive() {
    let mut engine = Engine::new(Config {
        page_size: 1,
        num_pages: 41,
        eos_token_ids: vec![19],
        new_token_ratio_init: 0.0,
        new_token_ratio_min: 0.0,
        ..config()
    });
    for (key, class) in [(1, 1), (2, 0)] {
        let mut request =
            Submit { request_class: class, ..submit(key, &prompt(key as u32, 5), 30) };
        request.sampling.min_new_tokens = 30;
        engine.submit(&request);
        engine.turn();
    }
    engine.drain();
    let retractions =
        |key| engine.sample(key, 0).finished.as_ref().expect("it ended").num_retractions;
    assert_eq!(retractions(2), 0);
    assert!(retractions(1) > 0);
    assert_all_as_solo(&engine);
}

#[test]
fn overlapped_steps_take_their_token_from_the_device() {
    let mut engine = Engine::new(Config { overlap_depth: 2, ..config() });
    engine.submit(&submit(1, &prompt(1, 5), 4));
    let sources: Vec<_> = std::iter::from_fn(|| engine.plan())
        .take(3)
        .map(|plan| (plan.ints(s::ROW_TOKEN_SOURCE), plan.ints(s::POSITIONS)))
        .collect();
    assert_eq!(sources[0], (vec![0], vec![0, 1, 2, 3, 4]));
    assert_eq!(sources[1], (vec![1], vec![5]));
    assert_eq!(sources[2], (vec![1], vec![6]));
    engine.commit();
    // The fourth and last token is sampled by the row of position 7; none is planned after it.
    let plan = engine.plan().expect("one more token");
    assert_eq!(plan.ints(s::POSITIONS), [7]);
    engine.commit();
    assert!(engine.plan().is_none(), "the length is known in advance");
    engine.drain();
    assert_all_as_solo(&engine);
}
