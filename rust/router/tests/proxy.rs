//! What the proxy does with requests and workers when nothing is broken.

mod support;

use std::time::Duration;

use hyper::{Method, StatusCode};
use serde_json::{Value, json};
use support::{Behaviour, CHUNK, Router, Worker, chat, until};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::sleep;

const NOW: Duration = Duration::ZERO;
const CHAT: &str = "/v1/chat/completions";

#[tokio::test]
async fn bytes_pass_through_as_they_are() {
    let worker = Worker::start(Behaviour::Stream(3, NOW)).await;
    let router = Router::start(&[&worker], 1, json!({})).await;
    for body in [
        "{\"messages\": [ ],\"messages\":[1],  \"x\":1.0e2, \"\\u0061\":\"\u{e9}\u{1f600}\"}",
        "{not json",
        "",
    ] {
        let (status, answer) = router.post(CHAT, body).await;
        assert_eq!(
            (status, answer),
            (StatusCode::OK, format!("{}data: [DONE]\n\n", CHUNK.repeat(3)))
        );
        assert_eq!(worker.bodies().pop().expect("one came"), body.as_bytes());
    }
    let large = router.post(CHAT, &"x".repeat(1_000_001)).await;
    assert_eq!(large.0, StatusCode::PAYLOAD_TOO_LARGE);
    assert_eq!(worker.requests(), 3);
    router.assert_idle().await;
    router.join().await;
}

/// Forty requests at once with one prefix: no path may leave them uncounted.
#[tokio::test]
async fn load_counts_on_every_route_and_returns_to_zero() {
    for path in [CHAT, "/v1/completions", "/generate", "/v1/responses", "/v1/messages"] {
        for behaviour in [
            Behaviour::Answer(Duration::from_millis(300)),
            Behaviour::Stream(3, Duration::from_millis(100)),
        ] {
            let one = Worker::start(behaviour.clone()).await;
            let two = Worker::start(behaviour).await;
            let router = Router::start(&[&one, &two], 2, json!({})).await;
            let mut tasks = Vec::new();
            for number in 0..40 {
                let (client, url) = (router.client.clone(), router.url(path));
                let body = chat("shared", &format!("{number:0200}"));
                tasks.push(tokio::spawn(async move {
                    let request = hyper::Request::post(url)
                        .body(http_body_util::Full::from(body))
                        .expect("a request");
                    let answer = client.request(request).await.expect("an answer");
                    let status = answer.status();
                    let _ = http_body_util::BodyExt::collect(answer.into_body()).await;
                    status
                }));
            }
            for task in tasks {
                assert_eq!(task.await.expect("no panic"), StatusCode::OK);
            }
            let (most, least) =
                (one.requests().max(two.requests()), one.requests().min(two.requests()));
            assert!(most + least == 40 && least >= 12, "{path}: {most} and {least}");
            router.assert_idle().await;
            router.join().await;
        }
    }
}

#[tokio::test]
async fn workers_come_and_go_while_it_runs() {
    let first = Worker::start(Behaviour::Answer(NOW)).await;
    let second = Worker::start(Behaviour::Stream(30, Duration::from_millis(10))).await;
    let router = Router::start(&[&first], 1, json!({})).await;
    let new = json!({"url": second.url()}).to_string();
    let (status, body) = router.post("/workers", &new).await;
    assert_eq!(status, StatusCode::CREATED, "{body}");
    assert_eq!(
        router.post("/workers", &new).await.0,
        StatusCode::BAD_REQUEST,
        "it is there already"
    );
    router.wait_ready(2).await;
    let (status, _) = router.ask(Method::DELETE, "/workers/0?drain_s=0", "").await;
    assert_eq!(status, StatusCode::ACCEPTED);
    until(async || router.workers().await["workers"].as_array().expect("a list").len() == 1).await;
    let before = first.requests();
    let body = chat("a", "");
    let (stream, ()) = tokio::join!(router.post(CHAT, &body), async {
        until(async || second.requests() == 1).await;
        let (status, _) = router.ask(Method::DELETE, "/workers/1?drain_s=5", "").await;
        assert_eq!(status, StatusCode::ACCEPTED);
        let view = router.workers().await;
        assert_eq!(view["workers"][0]["state"], "draining");
    });
    assert!(stream.1.ends_with("data: [DONE]\n\n"), "what runs may end");
    assert_eq!(first.requests(), before, "a removed worker gets nothing");
    until(async || router.workers().await["workers"] == json!([])).await;
    assert_eq!(router.ask(Method::DELETE, "/workers/1", "").await.0, StatusCode::NOT_FOUND);
    router.join().await;
}

#[tokio::test]
async fn a_draining_worker_can_be_taken_back() {
    let worker = Worker::start(Behaviour::Answer(NOW)).await;
    let router = Router::start(&[&worker], 1, json!({"queue_timeout_s": 0.2})).await;
    let put = async |state: &str| {
        router.ask(Method::PUT, "/workers/0", &json!({"state": state}).to_string()).await.0
    };
    assert_eq!(put("draining").await, StatusCode::OK);
    sleep(Duration::from_millis(500)).await;
    assert_eq!(router.post(CHAT, "{}").await.0, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(put("ready").await, StatusCode::OK);
    assert_eq!(router.post(CHAT, "{}").await.0, StatusCode::OK);
    assert_eq!(put("fast").await, StatusCode::BAD_REQUEST);
    router.join().await;
}

#[tokio::test]
async fn limits_queue_requests_and_refuse_what_is_too_much() {
    let worker = Worker::start(Behaviour::Answer(Duration::from_millis(200))).await;
    let limits = json!({"choice": {"max_in_flight": 2}, "queue_size": 3});
    let router = Router::start(&[&worker], 1, limits).await;
    let mut tasks = Vec::new();
    for _ in 0..8 {
        let request = hyper::Request::post(router.url(CHAT))
            .body(http_body_util::Full::from("{}"))
            .expect("a request");
        tasks.push(tokio::spawn(router.client.request(request)));
    }
    let mut counts = [0, 0];
    for task in tasks {
        let answer = task.await.expect("no panic").expect("an answer");
        match answer.status() {
            StatusCode::OK => counts[0] += 1,
            StatusCode::TOO_MANY_REQUESTS => {
                assert!(answer.headers().contains_key("retry-after"));
                counts[1] += 1;
            }
            other => panic!("{other}"),
        }
    }
    assert_eq!(counts, [5, 3]);
    router.assert_idle().await;
    router.join().await;
}

#[tokio::test]
async fn keys_are_asked_for() {
    let worker = Worker::start(Behaviour::Answer(NOW)).await;
    let router = Router::start(&[&worker], 1, json!({"api_key": "data"})).await;
    let status = async |method: Method, path: &str, key: &str| {
        let request = hyper::Request::builder()
            .method(method)
            .uri(router.url(path))
            .header("authorization", format!("Bearer {key}"))
            .body(http_body_util::Full::from("{\"url\": \"http://127.0.0.1:1\"}"))
            .expect("a request");
        router.client.request(request).await.expect("an answer").status().as_u16()
    };
    assert_eq!(status(Method::POST, CHAT, "data").await, 200);
    assert_eq!(status(Method::POST, CHAT, "dat").await, 401);
    assert_eq!(status(Method::POST, CHAT, "admin").await, 401);
    assert_eq!(status(Method::GET, "/workers", "data").await, 200);
    assert_eq!(status(Method::POST, "/workers", "data").await, 401);
    assert_eq!(status(Method::POST, "/workers", "admin").await, 201);
    for path in ["/health", "/ready", "/metrics", "/liveness"] {
        assert_eq!(status(Method::GET, path, "").await, 200, "{path}");
    }
    router.join().await;
    let open = Router::start(&[&worker], 1, json!({"admin_api_key": null})).await;
    let (refused, body) = open.post("/workers", "{\"url\": \"http://127.0.0.1:1\"}").await;
    assert_eq!(refused, StatusCode::FORBIDDEN);
    assert!(body.contains("start with --admin-api-key"));
    open.join().await;
}

#[tokio::test]
async fn cached_tokens_are_compared() {
    let worker = Worker::start(Behaviour::Answer(NOW)).await;
    let router = Router::start(&[&worker], 1, json!({})).await;
    for _ in 0..2 {
        router.post(CHAT, &chat("a", "")).await;
    }
    router.assert_idle().await;
    assert_eq!(router.metric("engine_router_reported_cached_tokens_total").await, 14);
    // The prompt is 600 characters and some: four whole blocks of 32 tokens, seen once before.
    let predicted = router.metric("engine_router_predicted_cached_tokens_total").await;
    assert!((120..=165).contains(&predicted), "{predicted}");
    assert_eq!(router.metric("engine_router_selections_total{reason=\"hit\"}").await, 1);
    let (status, _) = router.post("/flush_cache", "").await;
    assert_eq!(status, StatusCode::OK);
    let view: Value = router.workers().await;
    assert_eq!(view["workers"][0]["index_blocks"], 0);
    router.join().await;
}

#[tokio::test]
async fn a_stop_lets_streams_end() {
    let worker = Worker::start(Behaviour::Stream(50, Duration::from_millis(10))).await;
    let mut router = Router::start(&[&worker], 1, json!({})).await;
    let request = hyper::Request::post(router.url(CHAT))
        .body(http_body_util::Full::from(chat("a", "")))
        .expect("a request");
    let answer = router.client.request(request).await.expect("an answer");
    router.stop();
    let body =
        http_body_util::BodyExt::collect(answer.into_body()).await.expect("whole").to_bytes();
    assert!(body.ends_with(b"data: [DONE]\n\n"));
    let refused = TcpStream::connect(router.address);
    assert!(refused.await.is_err(), "nobody listens any more");
    router.join().await;
}

/// The new router is started before the old one is stopped.
#[tokio::test]
async fn a_restart_under_load_loses_nothing() {
    let worker = Worker::start(Behaviour::Stream(5, Duration::from_millis(10))).await;
    let mut old = Router::start(&[&worker], 1, json!({"reuse_port": true})).await;
    let port = old.address.port();
    let url = old.url(CHAT);
    let load = tokio::spawn(async move {
        let mut whole = 0;
        for number in 0..60 {
            // A connection for each, as the old router closes those that it has.
            let client =
                hyper_util::client::legacy::Client::builder(hyper_util::rt::TokioExecutor::new())
                    .pool_max_idle_per_host(0)
                    .build_http::<http_body_util::Full<hyper::body::Bytes>>();
            let request = hyper::Request::post(&url)
                .body(http_body_util::Full::from(chat("a", &number.to_string())))
                .expect("a request");
            let answer = client.request(request).await.expect("an answer");
            let body = http_body_util::BodyExt::collect(answer.into_body()).await.expect("whole");
            whole += usize::from(body.to_bytes().ends_with(b"data: [DONE]\n\n"));
        }
        whole
    });
    sleep(Duration::from_millis(300)).await;
    let new = Router::start(&[&worker], 1, json!({"reuse_port": true, "port": port})).await;
    old.stop();
    old.join().await;
    assert_eq!(load.await.expect("no panic"), 60);
    new.assert_idle().await;
    new.join().await;
}

/// Files, batches and stored answers are found wherever they are.
#[tokio::test]
async fn what_one_worker_keeps_is_found_there() {
    let mut one = Worker::start(Behaviour::Keeps("/v1/files/file-1")).await;
    let two = Worker::start(Behaviour::Keeps("/v1/responses/resp-2")).await;
    let router = Router::start(&[&one, &two], 2, json!({})).await;
    let ask = async |method: Method, path: &str, body: Value| {
        router.ask(method, path, &body.to_string()).await
    };
    let (file, stored) = ("/v1/files/file-1".to_owned(), "/v1/responses/resp-2".to_owned());
    for _ in 0..4 {
        let none = Value::Null;
        let content = ask(Method::GET, "/v1/files/file-1/content", none.clone()).await;
        assert_eq!(content, (StatusCode::OK, file.clone()));
        let batch = ask(Method::POST, "/v1/batches", json!({"input_file_id": "file-1"})).await;
        assert_eq!(batch, (StatusCode::OK, file.clone()));
        let deleted = ask(Method::DELETE, "/v1/responses/resp-2", none.clone()).await;
        assert_eq!(deleted, (StatusCode::OK, stored.clone()));
        let next = json!({"previous_response_id": "resp-2", "input": "go on"});
        let next = ask(Method::POST, "/v1/responses", next).await;
        assert_eq!(next, (StatusCode::OK, stored.clone()));
        let listed = ask(Method::GET, "/v1/files", none.clone()).await;
        assert_eq!(listed, (StatusCode::OK, file.clone()), "the first worker's");
        assert_eq!(ask(Method::GET, "/v1/files/file-9", none).await.0, StatusCode::NOT_FOUND);
    }
    one.kill().await;
    router.wait_ready(1).await;
    let (status, text) = ask(Method::GET, "/v1/files/file-1", Value::Null).await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "it may be at the worker that is down");
    assert!(text.contains("1 of them cannot be asked now"), "{text}");
    assert_eq!(ask(Method::GET, "/v1/responses/resp-2", Value::Null).await.0, StatusCode::OK);
    let listed = ask(Method::GET, "/v1/files", Value::Null).await;
    assert_eq!(listed, (StatusCode::OK, stored));
    router.assert_idle().await;
    router.join().await;
}

/// Clients that send everything before they read anything must see why they were refused.
#[tokio::test]
async fn an_answer_before_the_end_of_a_body_arrives() {
    const LENGTH: usize = 24 << 20; // more than the sockets' buffers hold
    let worker = Worker::start(Behaviour::Answer(NOW)).await;
    let router = Router::start(&[&worker], 1, json!({})).await;
    let known = "authorization: Bearer admin\r\n";
    for (line, headers, status) in [
        ("POST /v1/chat/completions", format!("{known}content-length: {LENGTH}\r\n"), 413),
        ("POST /v1/chat/completions", format!("{known}transfer-encoding: chunked\r\n"), 413),
        ("POST /workers", format!("content-length: {LENGTH}\r\n"), 401),
        ("PATCH /workers", format!("{known}content-length: {LENGTH}\r\n"), 405),
        ("POST /workers", format!("{known}content-length: {LENGTH}\r\n"), 400),
        ("GET /health", format!("content-length: {LENGTH}\r\n"), 200),
    ] {
        let mut stream = TcpStream::connect(router.address).await.expect("it accepts");
        let host = "host: here\r\ncontent-type: application/json\r\n";
        let head = format!("{line} HTTP/1.1\r\n{host}{headers}\r\n");
        let body = if headers.contains("chunked") {
            format!("{LENGTH:x}\r\n{}\r\n0\r\n\r\n", "x".repeat(LENGTH))
        } else {
            "x".repeat(LENGTH)
        };
        stream.write_all(head.as_bytes()).await.expect("the head is taken");
        stream.write_all(body.as_bytes()).await.expect("the body is taken");
        let next = format!("GET /liveness HTTP/1.1\r\n{host}connection: close\r\n\r\n");
        stream.write_all(next.as_bytes()).await.expect("the connection lives");
        let mut answers = String::new();
        stream.read_to_string(&mut answers).await.expect("it closes after the second");
        assert!(answers.starts_with(&format!("HTTP/1.1 {status} ")), "{line}: {answers}");
        assert!(answers.ends_with("alive\n"), "{line}: {answers}");
    }
    router.assert_idle().await;
    router.join().await;
}

/// A client that asks before it sends is told no, and sends nothing.
#[tokio::test]
async fn a_refused_client_that_waits_is_not_told_to_send() {
    let worker = Worker::start(Behaviour::Answer(NOW)).await;
    let router = Router::start(&[&worker], 1, json!({})).await;
    let mut stream = TcpStream::connect(router.address).await.expect("it accepts");
    let head = "POST /generate HTTP/1.1\r\nhost: here\r\nauthorization: Bearer admin\r\n\
                content-length: 99000000\r\nexpect: 100-continue\r\n\r\n";
    stream.write_all(head.as_bytes()).await.expect("the head is taken");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.expect("it closes");
    assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
    router.join().await;
}
