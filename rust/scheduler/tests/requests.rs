//! What a request gets: refusals, stops, limits, log-probs, aborts, resumption.
#![allow(clippy::float_cmp, reason = "times pass through unchanged")]

mod support;

use scheduler::{Config, Error, Scheduler, Target, Unready};
use support::config;
use support::engine::{CLIENT, Engine};
use support::messages::{Event, LogprobRequest, Matched, Resume, Submit, decode, submit};
use support::oracle::{self, solo};

fn engine() -> Engine {
    Engine::new(config())
}

/// Runs one request alone and returns the engine.
fn run(config: Config, request: &Submit) -> Engine {
    let mut engine = Engine::new(config);
    engine.submit(request);
    engine.drain();
    engine
}

fn assert_as_solo(engine: &Engine, request: &Submit, sample: usize) {
    let expected = solo(request, sample, &engine.config);
    let actual = engine.sample(request.key, sample);
    let finished = actual.finished.as_ref().expect("it ended");
    assert_eq!(actual.token_ids, expected.outputs);
    assert_eq!(actual.text, expected.text);
    assert_eq!(finished.reason, expected.reason);
    assert_eq!(finished.matched, expected.matched);
}

#[test]
fn events_come_in_order() {
    let mut engine = engine();
    engine.submit(&submit(1, &[1, 2, 3], 2));
    engine.now += 1.0;
    engine.plan();
    engine.now += 1.0;
    engine.commit();
    engine.drain();
    let [
        Event::Accepted { key: 1 },
        Event::Started { key: 1, started },
        Event::Delta { key: 1, sample: 0, output: delta, num_retractions: 0 },
        Event::Finished { key: 1, sample: 0, output: last, finished },
    ] = &engine.log[..]
    else {
        panic!("{:?}", engine.log)
    };
    assert_eq!(started.cached_device, 0);
    assert_eq!(started.queue_time, 1.0);
    assert_eq!(started.prefill_finished_time - started.forward_entry_time, 1.0);
    assert_eq!((delta.token_offset, delta.text_offset), (0, 0));
    assert_eq!((last.token_offset, last.text_offset), (1, 1));
    assert_eq!((finished.reason.as_str(), finished.status), ("length", 0));
    assert_eq!((finished.completion_tokens, finished.num_retractions), (2, 0));
    assert_eq!(finished.queue_time, 1.0);
}

#[test]
fn refusals_say_why() {
    let long: Vec<u32> = vec![1; 200];
    let mut table: Vec<(Submit, u16, &[&str])> = vec![
        (submit(1, &[], 5), 400, &["no tokens"]),
        (submit(2, &[1, 20], 5), 400, &["20", "vocabulary"]),
        (submit(3, &long, 1), 400, &["200", "longer than the model's context length"]),
        (Submit { n: 9, ..submit(4, &[1], 1) }, 400, &["n must be in [1, 8], got 9"]),
        (Submit { n: 0, ..submit(5, &[1], 1) }, 400, &["n must be in [1, 8], got 0"]),
        (Submit { request_class: 2, ..submit(6, &[1], 1) }, 400, &["request_class", "got 2"]),
        (Submit { resume: vec![Resume(vec![], 0); 2], ..submit(7, &[1], 1) }, 400, &["resume"]),
        (
            Submit {
                logprobs: Some(LogprobRequest(Some(2), 0, vec![], false)),
                ..submit(8, &[1], 1)
            },
            400,
            &["prompt_start 2", "1 tokens"],
        ),
        (
            Submit {
                logprobs: Some(LogprobRequest(None, 0, vec![20], false)),
                ..submit(9, &[1], 1)
            },
            400,
            &["logprobs", "20"],
        ),
    ];
    let words: &[&str] = &["pooled state", "n must be 1"];
    table.push((Submit { pooled: true, ..submit(13, &[1], 1) }, 400, words));
    table.push((Submit { pooled: true, n: 2, ..submit(14, &[1], 0) }, 400, words));
    let mut biased = submit(10, &[1], 1);
    biased.sampling.logit_bias = vec![(99_999, 5.0)];
    table.push((biased, 400, &["logit_bias", "99999"]));
    let mut infinite = submit(11, &[1], 1);
    infinite.sampling.temperature = f64::NAN;
    table.push((infinite, 400, &["temperature", "finite"]));
    let mut empty_stop = submit(12, &[1], 1);
    empty_stop.sampling.stop = vec![String::new()];
    table.push((empty_stop, 400, &["stop", "empty"]));
    let mut engine = engine();
    for (request, status, words) in table {
        engine.submit(&request);
        let (actual, message) = engine.refusal(request.key).expect("it is refused");
        assert_eq!(actual, status, "{message}");
        for word in words {
            assert!(message.contains(word), "{word:?} is not in {message:?}");
        }
    }
    assert!(!engine.scheduler.has_work());
}

#[test]
fn a_prompt_larger_than_the_pool_is_refused_at_once_and_blocks_nobody() {
    let config = Config { num_pages: 9, max_context_len: 1000, ..config() };
    let mut engine = Engine::new(config);
    engine.submit(&submit(1, &[1; 33], 4));
    let (status, message) = engine.refusal(1).expect("it is refused");
    assert_eq!(status, 400);
    assert!(message.contains("33 tokens") && message.contains("32 tokens"), "{message}");
    engine.submit(&submit(2, &[1; 10], 4));
    engine.drain();
    assert_eq!(engine.sample(2, 0).token_ids.len(), 4);
}

#[test]
fn outputs_beyond_pool_or_context_are_clipped() {
    let config = Config { num_pages: 9, max_context_len: 1000, ..config() };
    let engine = run(config, &submit(1, &[1; 30], 100));
    // The pool holds 32 tokens, and the last output needs no KV.
    assert_eq!(engine.sample(1, 0).token_ids.len(), 3);
    let mut request = submit(1, &[1; 30], 0);
    request.sampling.max_new_tokens = None;
    let engine = run(Config { max_context_len: 40, ..support::config() }, &request);
    assert_eq!(engine.sample(1, 0).token_ids.len(), 10);
    let finished = engine.sample(1, 0).finished.as_ref();
    assert_eq!(finished.expect("it ended").reason, "length");
}

#[test]
fn no_new_tokens_means_prompt_only() {
    let mut request = submit(1, &[1, 2, 3, 4, 5], 0);
    request.logprobs = Some(LogprobRequest(Some(0), 1, vec![], false));
    let engine = run(config(), &request);
    let sample = engine.sample(1, 0);
    assert!(sample.token_ids.is_empty() && sample.started.is_some());
    assert_eq!(sample.finished.as_ref().expect("it ended").reason, "length");
    assert_eq!(sample.prompt_logprobs.as_ref().expect("they were asked for").values.len(), 5);
    // The whole context may be prompt.
    let engine = run(config(), &submit(1, &[1; 200], 0));
    assert_eq!(engine.stat("finished_sequences_total"), 1);
}

#[test]
fn one_new_token_is_exactly_one() {
    let engine = run(config(), &submit(1, &[1, 2, 3], 1));
    assert_eq!(engine.sample(1, 0).token_ids.len(), 1);
    assert_eq!(engine.stat("steps_total"), 1);
}

/// A request whose solo run is long enough for its own text to be used as a stop.
fn with_stop(make: impl Fn(&[u32], &mut Submit)) -> Submit {
    let mut request = submit(1, &[3, 1, 4, 1, 5], 40);
    let outputs = solo(&request, 0, &config()).outputs;
    make(&outputs, &mut request);
    request
}

#[test]
fn stop_strings_and_ids_cut_the_text() {
    let across = with_stop(|outputs, request| {
        request.sampling.stop = vec!["never".into(), support::text_of(&outputs[5..9])];
    });
    let id = with_stop(|outputs, request| request.sampling.stop_token_ids = vec![outputs[7]]);
    for mut request in [across, id] {
        for (no_stop_trim, stream_interval) in [(false, 1), (true, 1), (false, 0), (true, 3)] {
            request.sampling.no_stop_trim = no_stop_trim;
            request.stream_interval = stream_interval;
            let engine = run(config(), &request);
            assert_as_solo(&engine, &request, 0);
            let reason = &engine.sample(1, 0).finished.as_ref().expect("it ended").reason;
            assert_eq!(reason, "stop");
        }
    }
}

#[test]
fn ignore_eos_ignores_eos_ids_only() {
    let plain = with_stop(|_, _| {});
    let outputs = solo(&plain, 0, &config()).outputs;
    let eos = Config { eos_token_ids: vec![outputs[3]], ..config() };
    let engine = run(eos.clone(), &plain);
    let finished = engine.sample(1, 0).finished.as_ref().expect("it ended");
    assert_eq!(finished.matched, Matched::Token(outputs[3]));
    let mut ignoring = plain.clone();
    ignoring.sampling.ignore_eos = true;
    let engine = run(eos.clone(), &ignoring);
    assert_eq!(engine.sample(1, 0).token_ids.len(), 40);
    let other = *outputs[4..].iter().find(|id| !outputs[..4].contains(id)).expect("another id");
    ignoring.sampling.stop_token_ids = vec![other];
    let engine = run(eos, &ignoring);
    let finished = engine.sample(1, 0).finished.as_ref().expect("it ended");
    assert_eq!(finished.matched, Matched::Token(other));
}

#[test]
fn nothing_stops_a_sequence_before_min_new_tokens() {
    for min_new_tokens in 0..12 {
        let mut request = with_stop(|outputs, request| {
            request.sampling.stop = vec![support::text_of(&outputs[2..3])];
            request.sampling.stop_token_ids = vec![outputs[4]];
        });
        request.sampling.min_new_tokens = min_new_tokens;
        let engine = run(config(), &request);
        assert_as_solo(&engine, &request, 0);
        assert!(engine.sample(1, 0).token_ids.len() >= min_new_tokens as usize);
    }
}

#[test]
fn the_end_of_a_grammar_stops_a_sequence_whatever_it_ignores() {
    let outputs = run(config(), &submit(1, &[5], 40)).sample(1, 0).token_ids.clone();
    let last = *outputs[4..].iter().find(|id| !outputs[..4].contains(id)).expect("a new id");
    let eos = Config { eos_token_ids: vec![last], ..config() };
    let mut request = submit(1, &[5], 40);
    request.sampling.ignore_eos = true;
    request.sampling.min_new_tokens = 30;
    let mut engine = Engine::new(eos.clone());
    request.must_prepare = true;
    request.grammar = Some(("regex", "a+", vec![]));
    let id = engine.submit(&request).expect("it must be prepared");
    assert!(engine.scheduler.is_live(id));
    engine.scheduler.ready(id, None);
    engine.drain();
    assert!(!engine.scheduler.is_live(id));
    let finished = engine.sample(1, 0).finished.as_ref().expect("it ended");
    assert_eq!(finished.matched, Matched::Token(last));
}

#[test]
fn samples_have_seeds_of_their_own_and_share_the_prompt() {
    let prompt: Vec<u32> = (0..60).map(|token| token % 17).collect();
    let request = Submit { n: 4, ..submit(1, &prompt, 10) };
    let engine = run(Config { max_batch_tokens: 80, ..config() }, &request);
    for sample in 0..4 {
        assert_as_solo(&engine, &request, sample);
        let started = engine.sample(1, sample).started.as_ref().expect("it ran");
        assert_eq!(started.cached_device, if sample == 0 { 0 } else { 59 });
    }
    assert_eq!(engine.stat("prompt_tokens_total"), 60 + 3);
    assert_ne!(engine.sample(1, 0).token_ids, engine.sample(1, 1).token_ids);
}

#[test]
fn deltas_come_at_the_interval() {
    for (interval, deltas) in [(0, 0), (1, 9), (3, 3), (7, 2), (100, 1)] {
        let request = Submit { stream_interval: interval, ..submit(1, &[1, 2], 10) };
        let engine = run(config(), &request);
        assert_eq!(engine.sample(1, 0).num_deltas, deltas, "interval {interval}");
    }
}

#[test]
fn prompt_logprobs_limit_the_cache_and_are_whole() {
    let prompt: Vec<u32> = (0..70).map(|token| token % 19).collect();
    let mut engine = engine();
    engine.submit(&submit(1, &prompt, 3));
    engine.drain();
    for (key, start, cached) in [(2, 0, 0), (3, 1, 0), (4, 40, 39), (5, 69, 68), (6, 70, 69)] {
        let mut request = submit(key, &prompt, 3);
        request.logprobs = Some(LogprobRequest(Some(start), 2, vec![7], false));
        engine.submit(&request);
        engine.drain();
        let sample = engine.sample(key, 0);
        assert_eq!(sample.started.as_ref().expect("it ran").cached_device, cached);
        let scores = sample.prompt_logprobs.as_ref().expect("they were asked for");
        assert_eq!(scores.values.len(), 70 - start as usize);
        for (index, position) in (start as usize..70).enumerate().skip(usize::from(start == 0)) {
            let context = oracle::digest(&prompt[..position]);
            let expected = f64::from(oracle::logprob(context, prompt[position]));
            assert_eq!(scores.values[index], expected);
            assert_eq!(scores.top[index], oracle::top(context, 2, 20));
        }
    }
}

#[test]
fn a_step_scores_a_bounded_number_of_prompt_tokens() {
    let config = Config {
        max_context_len: 2000,
        num_pages: 2000,
        max_batch_tokens: 4096,
        arena_bytes: 1 << 20,
        ..config()
    };
    // 512 in a step; what precedes the first that is scored is free.
    for (starts, steps) in [
        (vec![0], 3),
        (vec![1100], 1),
        (vec![800], 2),
        (vec![0, 0], 6),
        (vec![900, 900, 1000], 4),
        (vec![1500, 1500], 1),
    ] {
        let mut engine = Engine::new(config.clone());
        for (key, &start) in (1..).zip(&starts) {
            let prompt: Vec<u32> = (0..1500).map(|at| (at * key as u32) % 19).collect();
            let mut request = submit(key, &prompt, 1);
            request.logprobs = Some(LogprobRequest(Some(start), 0, vec![], false));
            engine.submit(&request);
        }
        let plain = submit(9, &[1, 2, 3], 1);
        engine.submit(&plain);
        engine.drain();
        assert_eq!(engine.stat("steps_total"), steps, "{starts:?}");
        assert_as_solo(&engine, &plain, 0);
        for (key, &start) in (1..).zip(&starts) {
            let scores = engine.sample(key, 0).prompt_logprobs.as_ref().expect("asked for");
            assert_eq!(scores.values.len(), 1500 - start as usize);
        }
    }
}

#[test]
fn a_live_rid_is_taken_and_free_again_after_the_last_event() {
    let mut engine = engine();
    engine.submit(&submit(1, &[1, 2], 5));
    let twin = Submit { rid: "r1".into(), ..submit(2, &[1, 2], 5) };
    engine.submit(&twin);
    assert_eq!(engine.refusal(2), Some((400, "Duplicate request ID detected: r1")));
    engine.plan();
    engine.commit();
    engine.abort(Target::Rid("r1"));
    engine.submit(&Submit { key: 3, ..twin.clone() });
    engine.drain();
    engine.submit(&Submit { key: 4, ..twin });
    engine.drain();
    for key in [3, 4] {
        assert_eq!(engine.sample(key, 0).token_ids.len(), 5);
    }
}

#[test]
fn aborts_meet_exactly_what_they_name() {
    let mut engine = Engine::new(Config { max_running_requests: 2, ..config() });
    for (key, rid) in [(1, "x"), (2, "x_1"), (3, "xy"), (4, "z")] {
        let n = if rid == "z" { 3 } else { 1 };
        engine.submit(&Submit { rid: rid.into(), n, ..submit(key, &[key as u32], 8) });
    }
    engine.plan();
    engine.commit();
    assert_eq!(engine.abort(Target::Rid("x")), 1);
    assert_eq!(engine.abort(Target::Rid("x")), 0);
    assert_eq!(engine.abort(Target::Rid("z_01")), 0);
    assert_eq!(engine.abort(Target::Rid("z_3")), 0);
    assert_eq!(engine.abort(Target::Rid("z_1")), 1);
    assert_eq!(engine.abort(Target::Rid("z_1")), 0);
    assert_eq!(engine.abort(Target::Key(CLIENT + 1, 2)), 0);
    assert_eq!(engine.abort(Target::Client(CLIENT + 1)), 0);
    engine.drain();
    let reason =
        |key, sample| engine.sample(key, sample).finished.clone().expect("it ended").reason;
    assert_eq!(reason(1, 0), "abort");
    assert_eq!(engine.sample(1, 0).token_ids.len(), 1);
    assert_eq!((reason(2, 0), reason(3, 0)), ("length".into(), "length".into()));
    assert_eq!(
        (reason(4, 0), reason(4, 1), reason(4, 2)),
        ("length".into(), "abort".into(), "length".into())
    );
    assert_eq!(engine.stat("aborted_sequences_total"), 2);
}

#[test]
fn an_abort_of_what_runs_is_answered_at_the_next_commit() {
    let mut engine = Engine::new(Config { overlap_depth: 1, ..config() });
    engine.submit(&submit(1, &[1, 2, 3], 50));
    engine.turn();
    engine.plan();
    assert_eq!(engine.abort(Target::All), 1);
    assert!(engine.sample(1, 0).finished.is_none());
    engine.commit();
    assert!(engine.sample(1, 0).finished.is_some());
    assert!(engine.stat("used_tokens") > 0, "a step in flight still names its pages");
    engine.drain();
}

#[test]
fn queues_are_limited_by_class() {
    let limits = Config {
        max_running_requests: 1,
        max_queued_requests: Some(2),
        max_queued_batch_requests: Some(1),
        ..config()
    };
    let mut engine = Engine::new(limits);
    let batch = |key| Submit { request_class: 1, ..submit(key, &[1], 3) };
    engine.submit(&submit(1, &[1], 20));
    engine.plan();
    engine.commit();
    for request in [submit(2, &[2], 3), submit(3, &[3], 3), submit(4, &[4], 3), batch(5), batch(6)]
    {
        engine.submit(&request);
    }
    for key in [4, 6] {
        assert_eq!(engine.refusal(key), Some((503, "The request queue is full.")));
    }
    // What another engine had let in is not counted again.
    engine.submit(&Submit { resume: vec![Resume(vec![], 0)], ..submit(7, &[7], 3) });
    assert_eq!(engine.refusal(7), None);
    engine.drain();
    assert_eq!(engine.stat("finished_sequences_total"), 5);
}

#[test]
fn a_full_queue_gives_way_to_higher_priority() {
    let priorities = Config {
        max_running_requests: 1,
        max_queued_requests: Some(2),
        priority_scheduling: true,
        ..config()
    };
    let mut engine = Engine::new(priorities);
    engine.submit(&submit(1, &[1], 20));
    engine.plan();
    engine.commit();
    let with = |key, priority| Submit { priority, ..submit(key, &[2], 3) };
    for request in [with(2, 1), with(3, 0), with(4, 0), with(5, 2)] {
        engine.submit(&request);
    }
    assert_eq!(engine.refusal(4), Some((503, "The request queue is full.")));
    let ended = engine.sample(3, 0).finished.clone().expect("it made room");
    assert_eq!((ended.reason.as_str(), ended.status), ("error", 503));
    engine.drain();
    assert_eq!(engine.stat("finished_sequences_total"), 3);
}

#[test]
fn waiting_times_out_but_what_has_begun_does_not() {
    let timeout = Config { max_running_requests: 1, waiting_timeout_s: Some(5.0), ..config() };
    let mut engine = Engine::new(timeout);
    engine.submit(&submit(1, &[1], 30));
    engine.submit(&submit(2, &[2], 3));
    engine.submit(&Submit { must_prepare: true, ..submit(3, &[3], 3) });
    engine.plan();
    engine.commit();
    assert_eq!(engine.scheduler.next_deadline(), Some(engine.now + 5.0));
    engine.now += 5.0;
    engine.plan();
    engine.commit();
    let finished = engine.sample(2, 0).finished.clone().expect("it timed out");
    assert_eq!((finished.reason.as_str(), finished.status), ("error", 503));
    assert_eq!(finished.message.as_deref(), Some("Request waiting timeout reached."));
    assert_eq!(engine.refusal(3), Some((503, "Request waiting timeout reached.")));
    assert_eq!(engine.scheduler.next_deadline(), None);
    engine.drain();
    assert_eq!(engine.sample(1, 0).token_ids.len(), 30);
}

#[test]
fn a_request_waits_for_its_preparation_and_nobody_else_does() {
    let mut engine = engine();
    let id = engine.submit(&Submit { must_prepare: true, ..submit(1, &[1], 3) });
    let id = id.expect("it must be prepared");
    let bad = engine.submit(&Submit { must_prepare: true, ..submit(2, &[1], 3) });
    let unlucky = engine.submit(&Submit { must_prepare: true, ..submit(4, &[1], 3) });
    engine.submit(&submit(3, &[1], 3));
    assert_eq!(engine.log.len(), 1, "its first event comes with ready");
    while engine.sample(3, 0).finished.is_none() {
        assert!(engine.turn());
    }
    assert!(engine.plan().is_none() && engine.scheduler.has_work());
    engine
        .scheduler
        .ready(bad.expect("it must be prepared"), Some(Unready::Invalid("the grammar is empty")));
    let fault = Some(Unready::Unavailable("the compiler has died"));
    engine.scheduler.ready(unlucky.expect("it must be prepared"), fault);
    engine.scheduler.ready(id, None);
    engine.scheduler.ready(id, None);
    engine.scheduler.ready(12345, None);
    engine.drain();
    assert_eq!(engine.refusal(2), Some((400, "the grammar is empty")));
    assert_eq!(engine.refusal(4), Some((503, "the compiler has died")));
    assert_eq!(engine.sample(1, 0).token_ids.len(), 3);
}

#[test]
fn a_resubmitted_request_continues_where_it_was() {
    let mut request = submit(1, &[5, 6, 7], 20);
    request.n = 2;
    request.sampling.stop = vec!["zzz".into()];
    let whole = run(config(), &request);
    for (known, chars) in [(0, 0), (1, 1), (7, 5), (19, 19), (20, 20)] {
        let mut again = request.clone();
        again.resume = (0..2)
            .map(|sample| Resume(whole.sample(1, sample).token_ids[..known].to_vec(), chars))
            .collect();
        let engine = run(config(), &again);
        for sample in 0..2 {
            assert_as_solo(&engine, &request, sample);
        }
        let ended = engine.sample(1, 1).finished.as_ref().expect("it ended");
        assert_eq!(ended.completion_tokens, 20);
        assert_eq!(engine.stat("generated_tokens_total"), 2 * (20 - known as u64));
    }
}

#[test]
fn a_failed_row_ends_its_request_alone() {
    let mut engine = engine();
    engine.submit(&submit(1, &[1, 2], 10));
    engine.plan();
    engine.commit();
    engine.submit(&submit(2, &[3, 4], 10));
    engine.runner.mischief.row_error = 100;
    engine.plan();
    engine.runner.mischief.row_error = 0;
    engine.commit();
    engine.submit(&submit(3, &[3, 4], 10));
    engine.drain();
    for key in [1, 2] {
        let finished = engine.sample(key, 0).finished.clone().expect("it failed");
        assert_eq!((finished.reason.as_str(), finished.status), ("error", 500));
        assert!(finished.message.is_some());
    }
    assert_as_solo(&engine, &submit(3, &[3, 4], 10), 0);
    assert_eq!(engine.stat("failed_sequences_total"), 2);
}

#[test]
fn malformed_messages_are_errors_and_leave_no_trace() {
    let mut scheduler = Scheduler::new(config()).expect("a good configuration");
    let good = submit(1, &[1], 1).encode();
    let mut longer = good.clone();
    longer.push(0);
    for bad in [&b""[..], b"x", &good[..good.len() - 1], &longer] {
        assert!(matches!(scheduler.submit(0, bad, 0.0), Err(Error::Message(_))));
    }
    assert!(scheduler.take_events().is_empty() && !scheduler.has_work());
    scheduler.submit(0, &good, 0.0).expect("a good message");
    assert!(matches!(scheduler.submit(0, &good, 0.0), Err(Error::DuplicateKey { .. })));
    let same_key = Submit { rid: "other".into(), ..submit(1, &[1], 1) };
    scheduler.submit(1, &same_key.encode(), 0.0).expect("another client's key");
    let events = scheduler.take_events();
    assert_eq!(events.iter().map(|(client, _)| *client).collect::<Vec<_>>(), [0, 1]);
    assert_eq!(decode(&events[1].1), [Event::Accepted { key: 1 }]);
}

#[test]
fn without_a_tokenizer_there_are_ids_and_no_text() {
    let bare = Config { tokenizer_json: None, ..config() };
    let engine = run(bare.clone(), &submit(1, &[1], 3));
    assert_eq!(engine.sample(1, 0).token_ids.len(), 3);
    assert_eq!(engine.sample(1, 0).text, "");
    let mut stopping = submit(1, &[1], 3);
    stopping.sampling.stop = vec!["a".into()];
    let engine = run(bare, &stopping);
    assert!(engine.refusal(1).expect("it is refused").1.contains("tokenizer"));
}

#[test]
fn a_request_enters_once_with_its_first_row() {
    let mut engine = Engine::new(Config { max_running_requests: 1, ..config() });
    engine.submit(&Submit { n: 2, ..submit(1, &[1], 2) });
    engine.submit(&submit(2, &[2], 2));
    assert_eq!(engine.scheduler.take_entered(), []);
    engine.plan();
    assert_eq!(engine.scheduler.take_entered(), [(CLIENT, 1)]);
    assert_eq!(engine.scheduler.take_entered(), []);
    engine.drain();
    assert_eq!(engine.scheduler.take_entered(), [(CLIENT, 2)], "its second sample is no entry");
}
