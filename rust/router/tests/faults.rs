//! What clients see when workers fail.

mod support;

use std::time::{Duration, Instant};

use hyper::{Method, StatusCode};
use serde_json::{Value, json};
use support::{Behaviour, CHUNK, Ending, Router, Worker, chat, until};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

const NOW: Duration = Duration::ZERO;
const CHAT: &str = "/v1/chat/completions";

/// One worker is dead from the start, one is killed while its prefixes are asked for.
#[tokio::test]
async fn no_client_sees_a_dead_worker() {
    let mut workers = Vec::new();
    for _ in 0..3 {
        workers.push(Worker::start(Behaviour::Answer(NOW)).await);
    }
    workers[0].kill().await;
    let router = Router::start(&workers.iter().collect::<Vec<_>>(), 2, json!({})).await;
    for group in ["a", "b", "c", "d", "e", "f"] {
        assert_eq!(router.post(CHAT, &chat(group, "")).await.0, StatusCode::OK);
    }
    assert_eq!(router.ask(Method::GET, "/v1/models", "").await.0, StatusCode::OK);
    let victim = usize::from(workers[2].requests() > workers[1].requests()) + 1;
    workers[victim].kill().await;
    for round in 0..20 {
        for group in ["a", "b", "c", "d", "e", "f"] {
            let (status, body) = router.post(CHAT, &chat(group, &round.to_string())).await;
            assert_eq!(status, StatusCode::OK, "{body}");
        }
        assert_eq!(router.ask(Method::GET, "/v1/models", "").await.0, StatusCode::OK);
    }
    assert_eq!(workers[0].requests(), 0);
    router.wait_ready(1).await;
    workers[victim].revive().await;
    let before = workers[victim].requests();
    router.wait_ready(2).await;
    for group in 0..50 {
        router.post(CHAT, &chat(&format!("new {group}"), "")).await;
    }
    assert!(workers[victim].requests() > before, "a worker that is back is used");
    router.assert_idle().await;
    router.join().await;
}

/// It accepts, and answers neither requests nor probes.
#[tokio::test]
async fn a_worker_that_never_answers_is_left_for_another() {
    let (silent, good) =
        (Worker::start(Behaviour::Hang).await, Worker::start(Behaviour::Answer(NOW)).await);
    let router = Router::start(&[&silent, &good], 2, json!({})).await;
    silent.set_health(None);
    let asked = (0..20).map(|group| {
        let body = chat(&format!("group {group}"), "");
        let router = &router;
        async move { router.post(CHAT, &body).await.0 }
    });
    let begun = Instant::now();
    for status in join_all(asked).await {
        assert_eq!(status, StatusCode::OK);
    }
    assert!(silent.requests() > 0, "it was tried");
    assert!(begun.elapsed() < Duration::from_secs(5));
    until(async || silent.left() == silent.requests()).await;
    router.assert_idle().await;
    router.join().await;
}

async fn join_all<T>(tasks: impl Iterator<Item = impl Future<Output = T>>) -> Vec<T> {
    let mut pinned: Vec<_> = tasks.map(|task| (Box::pin(task), None)).collect();
    std::future::poll_fn(|context| {
        let mut pending = false;
        for (task, result) in &mut pinned {
            if result.is_none() {
                match task.as_mut().poll(context) {
                    std::task::Poll::Ready(value) => *result = Some(value),
                    std::task::Poll::Pending => pending = true,
                }
            }
        }
        if pending { std::task::Poll::Pending } else { std::task::Poll::Ready(()) }
    })
    .await;
    pinned.into_iter().map(|(_, result)| result.expect("it is ready")).collect()
}

/// Before the first byte, every way of breaking is hidden by another worker.
#[tokio::test]
async fn what_breaks_before_the_first_byte_is_tried_elsewhere() {
    for behaviour in [
        Behaviour::Close,
        Behaviour::ResetAfterHead,
        Behaviour::Status(503, ""),
        Behaviour::Status(502, ""),
        Behaviour::Status(429, ""),
    ] {
        let broken = Worker::start(behaviour.clone()).await;
        let good = Worker::start(Behaviour::Stream(2, NOW)).await;
        let router = Router::start(&[&broken, &good], 2, json!({})).await;
        for group in 0..12 {
            let (status, body) = router.post(CHAT, &chat(&format!("{group} "), "")).await;
            assert_eq!((status, body), (StatusCode::OK, format!("{CHUNK}{CHUNK}data: [DONE]\n\n")));
        }
        assert!(broken.requests() > 0, "{behaviour:?} was met");
        router.assert_idle().await;
        router.join().await;
    }
}

/// What a client caused, and what it may have caused, is not tried again and is not held against
/// the worker.
#[tokio::test]
async fn answers_of_a_worker_reach_the_client_as_they_are() {
    let worker = Worker::start(Behaviour::Status(400, "x-own: 1\r\n")).await;
    let other = Worker::start(Behaviour::Status(400, "x-own: 1\r\n")).await;
    let router = Router::start(&[&worker, &other], 2, json!({})).await;
    for _ in 0..30 {
        let (status, body) = router.post(CHAT, "{}").await;
        assert_eq!((status.as_u16(), body.as_str()), (400, "{\"status\":true}"));
    }
    assert_eq!(worker.requests() + other.requests(), 30);
    assert!(router.workers().await["workers"][0]["breaker"] == "closed");
    for one in [&worker, &other] {
        one.behave(Behaviour::Status(500, ""));
    }
    assert_eq!(router.post(CHAT, "{}").await.0.as_u16(), 500);
    assert_eq!(worker.requests() + other.requests(), 31);
    for one in [&worker, &other] {
        one.behave(Behaviour::Status(503, "retry-after: 9\r\n"));
    }
    assert_eq!(router.post(CHAT, "{}").await.0.as_u16(), 503);
    assert_eq!(worker.requests() + other.requests(), 33, "each was asked once");
    router.join().await;
}

/// A worker's refusal is an attempt, like an answer that broke.
#[tokio::test]
async fn no_request_reaches_more_workers_than_it_may() {
    for behaviour in [Behaviour::Status(503, ""), Behaviour::Status(429, ""), Behaviour::Close] {
        let mut workers = Vec::new();
        for _ in 0..4 {
            workers.push(Worker::start(behaviour.clone()).await);
        }
        let all: Vec<&Worker> = workers.iter().collect();
        let router = Router::start(&all, 4, json!({"max_attempts": 2, "retry_budget": 1.0})).await;
        let (status, _) = router.post(CHAT, "{}").await;
        assert!(!status.is_success());
        let reached: usize = workers.iter().map(Worker::requests).sum();
        assert_eq!(reached, 2, "{behaviour:?}");
        router.join().await;
    }
}

#[tokio::test]
async fn a_stream_that_dies_ends_with_an_error_event() {
    for ending in [Ending::Close, Ending::CleanChunk, Ending::Reset, Ending::Stall] {
        let worker = Worker::start(Behaviour::Half(ending)).await;
        let other = Worker::start(Behaviour::Answer(NOW)).await;
        let router = Router::start(&[&worker], 1, json!({"idle_timeout_s": 0.5})).await;
        let (status, body) = router.post(CHAT, &chat("a", "")).await;
        assert_eq!(status, StatusCode::OK);
        let events: Vec<&str> = body.split_terminator("\n\n").collect();
        assert_eq!(events.len(), 4, "{ending:?}: {body}");
        assert!(events[..3].iter().all(|event| *event == CHUNK.trim_end()), "{body}");
        let error = events[3].strip_prefix("data: ").expect("an event of data");
        let error: Value = serde_json::from_str(error).expect("JSON");
        assert_eq!(error["error"]["type"], "server_error");
        assert!(body.ends_with("\n\n") && !body.contains("[DONE]"));
        assert_eq!((worker.requests(), other.requests()), (1, 0), "no replay");
        assert_eq!(router.metric("engine_router_broken_streams_total").await, 1);
        assert_eq!(router.metric("engine_router_worker_failures_total").await, 1);
        router.assert_idle().await;
        router.join().await;
    }
}

#[tokio::test]
async fn other_apis_get_errors_in_their_own_words() {
    let worker = Worker::start(Behaviour::Half(Ending::Reset)).await;
    let router = Router::start(&[&worker], 1, json!({})).await;
    let (_, body) = router.post("/v1/messages", &chat("a", "")).await;
    assert!(body.contains("\n\nevent: error\ndata: {\"error\":{\"message\""), "{body}");
    let (_, body) = router.post("/v1/responses", &chat("a", "")).await;
    assert!(body.contains("\n\nevent: error\ndata: {\"code\":\"worker_failed\""), "{body}");
    router.join().await;
}

#[tokio::test]
async fn a_worker_killed_in_mid_stream_breaks_its_streams_only() {
    let mut victim = Worker::start(Behaviour::Stream(1_000, Duration::from_millis(5))).await;
    let good = Worker::start(Behaviour::Stream(60, Duration::from_millis(5))).await;
    let router = Router::start(&[&victim, &good], 2, json!({})).await;
    let streams = (0..10).map(|group| {
        let body = chat(&format!("{group}-"), "");
        let router = &router;
        async move { router.post(CHAT, &body).await.1 }
    });
    let (bodies, ()) = tokio::join!(join_all(streams), async {
        sleep(Duration::from_millis(150)).await;
        victim.kill().await;
    });
    let broken = bodies.iter().filter(|body| body.contains("worker_failed")).count();
    let whole = bodies.iter().filter(|body| body.ends_with("data: [DONE]\n\n")).count();
    assert!(broken > 0 && whole > 0 && broken + whole == 10, "{broken} {whole}");
    router.assert_idle().await;
    router.join().await;
}

#[tokio::test]
async fn requests_wait_for_the_first_worker_to_come_back() {
    let mut worker = Worker::start(Behaviour::Answer(NOW)).await;
    let mut other = Worker::start(Behaviour::Answer(NOW)).await;
    let router = Router::start(&[&worker, &other], 2, json!({})).await;
    worker.kill().await;
    other.kill().await;
    let asked = (0..5).map(|_| router.post(CHAT, "{\"messages\":[]}"));
    let (answers, ()) = tokio::join!(join_all(asked), async {
        sleep(Duration::from_millis(700)).await;
        assert_eq!(router.ask(Method::GET, "/health", "").await.0.as_u16(), 503);
        worker.revive().await;
    });
    for (status, body) in answers {
        assert_eq!(status, StatusCode::OK, "{body}");
    }
    router.assert_idle().await;
    router.join().await;
}

#[tokio::test]
async fn without_a_worker_the_wait_ends() {
    let router = Router::start(&[], 0, json!({"queue_timeout_s": 0.3, "queue_size": 2})).await;
    let asked = (0..5).map(|_| router.post(CHAT, "{}"));
    let begun = Instant::now();
    for (status, body) in join_all(asked).await {
        assert_eq!(status.as_u16(), 503);
        assert!(body.contains("\"code\":\"no_worker\""), "{body}");
    }
    assert!(begun.elapsed() >= Duration::from_millis(300));
    assert_eq!(router.metric("engine_router_refused_total").await, 5);
    router.assert_idle().await;
    router.join().await;
}

/// A worker that says it is not ready gets nothing new, and its streams go on.
#[tokio::test]
async fn a_worker_that_stops_finishes_its_streams() {
    let leaving = Worker::start(Behaviour::Stream(100, Duration::from_millis(10))).await;
    let router = Router::start(&[&leaving], 1, json!({})).await;
    let body = chat("a", "");
    let (stream, ()) = tokio::join!(router.post(CHAT, &body), async {
        until(async || leaving.requests() == 1).await;
        leaving.set_health(Some(503));
    });
    assert!(stream.1.ends_with("data: [DONE]\n\n"));
    router.wait_ready(0).await;
    leaving.set_health(Some(200));
    router.wait_ready(1).await;
    router.join().await;
}

async fn raw_request(router: &Router, body: &str) -> TcpStream {
    let mut stream = TcpStream::connect(router.address).await.expect("it listens");
    let head = format!("POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", body.len());
    stream.write_all(format!("{head}{body}").as_bytes()).await.expect("it reads");
    stream
}

#[tokio::test]
async fn a_client_that_leaves_is_gone_at_the_worker_too() {
    let worker = Worker::start(Behaviour::Hang).await;
    let router = Router::start(&[&worker], 1, json!({})).await;
    let left_within = async |count| {
        timeout(Duration::from_millis(500), until(async || worker.left() == count)).await
    };
    // Before the answer has begun, and in a stream.
    let client = raw_request(&router, &chat("a", "")).await;
    until(async || worker.requests() == 1).await;
    drop(client);
    left_within(1).await.expect("at once");
    worker.behave(Behaviour::Stream(1_000, Duration::from_secs(3)));
    let client = raw_request(&router, &chat("a", "")).await;
    until(async || worker.requests() == 2).await;
    drop(client);
    left_within(2).await.expect("at once");
    worker.behave(Behaviour::Stream(1_000, Duration::from_millis(200)));
    let mut client = raw_request(&router, &chat("a", "")).await;
    client.read_u8().await.expect("the stream begins");
    drop(client);
    left_within(3).await.expect("at once");
    router.assert_idle().await;
    let view = router.workers().await;
    assert_eq!(view["workers"][0]["breaker"], "closed", "that says nothing of the worker");
    router.join().await;
}

/// The worker is slowed down by a client that does not read; nothing piles up in between.
#[tokio::test]
async fn a_slow_reader_slows_the_worker() {
    let worker = Worker::start(Behaviour::Flood).await;
    let router = Router::start(&[&worker], 1, json!({})).await;
    let client = raw_request(&router, &chat("a", "")).await;
    let mut sent = 0;
    until(async || {
        sleep(Duration::from_millis(300)).await;
        std::mem::replace(&mut sent, worker.sent_bytes()) == worker.sent_bytes() && sent > 0
    })
    .await;
    assert!(sent < 32 << 20, "{sent} bytes were taken");
    drop(client);
    until(async || worker.left() == 1).await;
    router.assert_idle().await;
    router.join().await;
}

/// Far more requests than the retry budget meet a worker that is shutting down.
#[tokio::test]
async fn a_worker_that_refuses_and_is_not_ready_is_left_at_once() {
    let leaving = Worker::start(Behaviour::Status(503, "")).await;
    let good = Worker::start(Behaviour::Answer(NOW)).await;
    let slow_probes = json!({"health_interval_s": 60.0});
    let router = Router::start(&[&leaving, &good], 2, slow_probes).await;
    leaving.set_health(Some(503));
    for group in 0..200 {
        let (status, body) = router.post(CHAT, &chat(&format!("{group} "), "")).await;
        assert_eq!(status, StatusCode::OK, "{body}");
        sleep(Duration::from_millis(2)).await;
    }
    assert!(leaving.requests() < 20, "{} requests", leaving.requests());
    router.join().await;
}
