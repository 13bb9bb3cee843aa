//! Workers that misbehave on command, and a router in a thread.
#![allow(dead_code, reason = "each test file uses some of it")]

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper::{Method, Request, StatusCode};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use router::proxy::{Config, Server};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::task::JoinHandle as Task;
use tokio::time::sleep;

pub(crate) const CHUNK: &str = "data: {\"choices\":[{\"delta\":{\"content\":\"hi\"}}]}\n\n";

/// What a worker does with a request that is no probe.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Behaviour {
    /// A small JSON answer after a time.
    Answer(Duration),
    /// A small JSON answer with this status and these headers.
    Status(u16, &'static str),
    /// 200 for what it keeps under this path, 404 for everything else that has one.
    Keeps(&'static str),
    /// Nothing, ever.
    Hang,
    /// Closes the connection without an answer.
    Close,
    /// Headers of a stream, then a reset.
    ResetAfterHead,
    /// So many events, a time apart, then `[DONE]`.
    Stream(usize, Duration),
    /// Three events and a half, then this.
    Half(Ending),
    /// Events without end, as fast as they are taken.
    Flood,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Ending {
    Close,
    CleanChunk,
    Reset,
    Stall,
}

#[derive(Debug)]
struct Inner {
    behaviour: Mutex<Behaviour>,
    health: Mutex<Option<u16>>,
    requests: AtomicUsize,
    bodies: Mutex<Vec<Vec<u8>>>,
    left: AtomicUsize,
    sent_bytes: AtomicUsize,
    connections: Mutex<Vec<Task<()>>>,
}

/// One mock worker.
pub(crate) struct Worker {
    pub(crate) address: SocketAddr,
    inner: Arc<Inner>,
    listening: Option<Task<()>>,
}

impl Worker {
    pub(crate) async fn start(behaviour: Behaviour) -> Self {
        let mut worker = Self {
            address: "127.0.0.1:0".parse().expect("an address"),
            inner: Arc::new(Inner {
                behaviour: Mutex::new(behaviour),
                health: Mutex::new(Some(200)),
                requests: AtomicUsize::new(0),
                bodies: Mutex::default(),
                left: AtomicUsize::new(0),
                sent_bytes: AtomicUsize::new(0),
                connections: Mutex::default(),
            }),
            listening: None,
        };
        worker.revive().await;
        worker
    }

    /// Listens, at the same address if it did before.
    pub(crate) async fn revive(&mut self) {
        let listener = TcpListener::bind(self.address).await.expect("the address is free");
        self.address = listener.local_addr().expect("it is bound");
        let inner = Arc::clone(&self.inner);
        self.listening = Some(tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let task = tokio::spawn(connection(stream, Arc::clone(&inner)));
                inner.connections.lock().expect("no panic").push(task);
            }
        }));
    }

    /// Dies: nobody listens, and all connections are closed.
    pub(crate) async fn kill(&mut self) {
        if let Some(task) = self.listening.take() {
            task.abort();
            let _ = task.await;
        }
        let tasks: Vec<_> = self.inner.connections.lock().expect("no panic").drain(..).collect();
        for task in tasks {
            task.abort();
            let _ = task.await;
        }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(crate) fn behave(&self, behaviour: Behaviour) {
        *self.inner.behaviour.lock().expect("no panic") = behaviour;
    }

    /// The status of `/health`; none: no answer.
    pub(crate) fn set_health(&self, status: Option<u16>) {
        *self.inner.health.lock().expect("no panic") = status;
    }

    /// Requests that were no probes.
    pub(crate) fn requests(&self) -> usize {
        self.inner.requests.load(Ordering::SeqCst)
    }

    pub(crate) fn bodies(&self) -> Vec<Vec<u8>> {
        self.inner.bodies.lock().expect("no panic").clone()
    }

    /// Requests whose sender went away before the answer was out.
    pub(crate) fn left(&self) -> usize {
        self.inner.left.load(Ordering::SeqCst)
    }

    pub(crate) fn sent_bytes(&self) -> usize {
        self.inner.sent_bytes.load(Ordering::SeqCst)
    }
}

async fn connection(mut stream: TcpStream, inner: Arc<Inner>) {
    let _ = stream.set_nodelay(true);
    let mut buffer = Vec::new();
    while let Some((path, body)) = read_request(&mut stream, &mut buffer).await {
        if path == "/health" {
            let health = *inner.health.lock().expect("no panic");
            match health {
                Some(status) => answer(&mut stream, status, "", "{}").await,
                None => std::future::pending().await,
            }
            continue;
        }
        inner.requests.fetch_add(1, Ordering::SeqCst);
        inner.bodies.lock().expect("no panic").push(body);
        let behaviour = inner.behaviour.lock().expect("no panic").clone();
        if !behave(&mut stream, behaviour, &path, &inner).await {
            return;
        }
    }
}

/// Does as told; false when the connection is over.
async fn behave(stream: &mut TcpStream, behaviour: Behaviour, path: &str, inner: &Inner) -> bool {
    match behaviour {
        Behaviour::Keeps(kept) => keeps(stream, kept, path).await,
        Behaviour::Answer(time) => {
            if client_leaves(stream, time, inner).await {
                return false;
            }
            answer(stream, 200, "", r#"{"usage":{"cached_tokens":7}}"#).await;
            true
        }
        Behaviour::Status(status, headers) => {
            answer(stream, status, headers, "{\"status\":true}").await;
            true
        }
        Behaviour::Hang => {
            client_leaves(stream, Duration::from_secs(3_600), inner).await;
            false
        }
        Behaviour::Close => false,
        Behaviour::ResetAfterHead => {
            head(stream).await;
            reset(stream);
            false
        }
        Behaviour::Stream(events, gap) => {
            head(stream).await;
            for _ in 0..events {
                if client_leaves(stream, gap, inner).await || !chunk(stream, CHUNK).await {
                    return false;
                }
            }
            chunk(stream, "data: [DONE]\n\n").await && stream.write_all(b"0\r\n\r\n").await.is_ok()
        }
        Behaviour::Half(ending) => {
            head(stream).await;
            for text in [CHUNK, CHUNK, CHUNK, "data: {\"choices\":[{\"del"] {
                chunk(stream, text).await;
                sleep(Duration::from_millis(5)).await;
            }
            match ending {
                Ending::Close => {}
                Ending::CleanChunk => drop(stream.write_all(b"0\r\n\r\n").await),
                Ending::Reset => reset(stream),
                Ending::Stall => {
                    client_leaves(stream, Duration::from_secs(3_600), inner).await;
                }
            }
            false
        }
        Behaviour::Flood => {
            head(stream).await;
            let event = format!("data: {}\n\n", "x".repeat(60_000));
            while chunk(stream, &event).await {
                inner.sent_bytes.fetch_add(event.len(), Ordering::SeqCst);
            }
            inner.left.fetch_add(1, Ordering::SeqCst);
            false
        }
    }
}

/// 404 for what it does not keep.
async fn keeps(stream: &mut TcpStream, kept: &str, path: &str) -> bool {
    let is_collection = path.matches('/').count() == 2;
    let status = if is_collection || path.starts_with(kept) { 200 } else { 404 };
    answer(stream, status, "", kept).await;
    true
}

/// Waits, and counts a client that leaves meanwhile.
async fn client_leaves(stream: &mut TcpStream, time: Duration, inner: &Inner) -> bool {
    let mut byte = [0];
    tokio::select! {
        () = sleep(time) => false,
        read = stream.read(&mut byte) => {
            assert!(!matches!(read, Ok(1..)), "nobody pipelines");
            inner.left.fetch_add(1, Ordering::SeqCst);
            true
        }
    }
}

fn reset(stream: &TcpStream) {
    stream.set_zero_linger().expect("a TCP socket");
}

async fn head(stream: &mut TcpStream) {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-worker: yes\r\n\
                transfer-encoding: chunked\r\n\r\n";
    let _ = stream.write_all(head.as_bytes()).await;
}

async fn chunk(stream: &mut TcpStream, text: &str) -> bool {
    let chunk = format!("{:x}\r\n{text}\r\n", text.len());
    stream.write_all(chunk.as_bytes()).await.is_ok()
}

async fn answer(stream: &mut TcpStream, status: u16, headers: &str, body: &str) {
    let text = format!(
        "HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n{headers}content-length: {}\r\n\r\n{body}",
        body.len()
    );
    let _ = stream.write_all(text.as_bytes()).await;
}

async fn read_request(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> Option<(String, Vec<u8>)> {
    loop {
        if let Some(end) = buffer.windows(4).position(|bytes| bytes == b"\r\n\r\n") {
            let head = String::from_utf8_lossy(&buffer[..end]).to_string();
            let length = head
                .lines()
                .find_map(|line| {
                    line.to_ascii_lowercase().strip_prefix("content-length:")?.trim().parse().ok()
                })
                .unwrap_or(0);
            if buffer.len() >= end + 4 + length {
                let path = head.split(' ').nth(1)?.to_owned();
                let body = buffer[end + 4..end + 4 + length].to_vec();
                buffer.drain(..end + 4 + length);
                return Some((path, body));
            }
        }
        if stream.read_buf(buffer).await.ok()? == 0 {
            return None;
        }
    }
}

/// A router in a thread of its own.
pub(crate) struct Router {
    pub(crate) address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    pub(crate) client: Client<HttpConnector, Full<Bytes>>,
}

/// Settings for tests, with short times; `changes` replaces some.
pub(crate) fn settings(workers: &[&Worker], changes: &Value) -> Config {
    let mut settings = json!({
        "host": "127.0.0.1", "port": 0,
        "workers": workers.iter().map(|worker| worker.url()).collect::<Vec<_>>(),
        "choice": {}, "api_key": null, "admin_api_key": "admin", "worker_api_key": null,
        "max_body_bytes": 1_000_000, "max_in_flight": 0, "queue_size": 100, "queue_timeout_s": 10.0,
        "max_attempts": 3, "retry_budget": 0.1, "connect_timeout_s": 1.0,
        "first_byte_timeout_s": 30.0, "idle_timeout_s": 30.0, "health_path": "/health",
        "health_interval_s": 0.2, "health_timeout_s": 0.3, "health_failures": 2, "load_poll": false,
        "cache_tokens": 100_000, "block_bytes": 128, "bytes_per_token": 4.0,
        "keep_alive_timeout_s": 65.0, "shutdown_grace_s": 5.0, "threads": 2, "reuse_port": false,
    });
    for (name, value) in changes.as_object().expect("an object") {
        settings[name] = value.clone();
    }
    Config::from_json(settings.to_string().as_bytes()).expect("good settings")
}

impl Router {
    /// Starts, and waits until `ready` workers are.
    pub(crate) async fn start(workers: &[&Worker], ready: usize, changes: Value) -> Self {
        let server = Server::bind(settings(workers, &changes)).expect("it starts");
        let address = server.address();
        let (stop, stopped) = oneshot::channel::<()>();
        let thread = std::thread::spawn(move || {
            server.run_until(async { drop(stopped.await) }).expect("it runs");
        });
        let client = Client::builder(TokioExecutor::new()).build_http();
        let router = Self { address, stop: Some(stop), thread: Some(thread), client };
        router.wait_ready(ready).await;
        router
    }

    pub(crate) async fn wait_ready(&self, ready: usize) {
        let count = |view: Value| {
            let workers = view["workers"].as_array().expect("a list").clone();
            workers.iter().filter(|worker| worker["state"] == "ready").count()
        };
        until(async || count(self.workers().await) == ready).await;
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// A request with the admin key; status, headers as text, body.
    pub(crate) async fn ask(&self, method: Method, path: &str, body: &str) -> (StatusCode, String) {
        let request = Request::builder()
            .method(method)
            .uri(self.url(path))
            .header("authorization", "Bearer admin")
            .header("content-type", "application/json")
            .body(Full::new(Bytes::from(body.to_owned())))
            .expect("a request");
        let response = self.client.request(request).await.expect("the router answers");
        let status = response.status();
        let body = response.into_body().collect().await.expect("a whole answer").to_bytes();
        (status, String::from_utf8(body.to_vec()).expect("text"))
    }

    pub(crate) async fn post(&self, path: &str, body: &str) -> (StatusCode, String) {
        self.ask(Method::POST, path, body).await
    }

    pub(crate) async fn workers(&self) -> Value {
        let (_, body) = self.ask(Method::GET, "/workers", "").await;
        serde_json::from_str(&body).expect("JSON")
    }

    /// The value of the first figure whose line begins so, 0 if there is none. All are whole.
    pub(crate) async fn metric(&self, line_begins: &str) -> u64 {
        let (_, text) = self.ask(Method::GET, "/metrics", "").await;
        let line = text.lines().find(|line| line.starts_with(line_begins));
        line.map_or(0, |line| {
            let value = line.rsplit(' ').next().expect("a value");
            value.parse::<u64>().expect("a whole number")
        })
    }

    /// Nothing is in flight anywhere.
    pub(crate) async fn assert_idle(&self) {
        let idle = async || {
            let view = self.workers().await;
            let workers = view["workers"].as_array().expect("a list");
            workers.iter().all(|worker| {
                ["in_flight", "running", "outstanding_prefill_tokens"]
                    .iter()
                    .all(|name| worker[*name] == 0)
            }) && self.metric("engine_router_queue_depth").await == 0
                && self.metric("engine_router_requests_in_flight").await <= 1
        };
        until(idle).await;
    }

    /// Asks it to stop; [`Router::join`] waits.
    pub(crate) fn stop(&mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
    }

    pub(crate) async fn join(mut self) {
        self.stop();
        let thread = self.thread.take().expect("it was started");
        tokio::task::spawn_blocking(move || thread.join())
            .await
            .expect("a thread")
            .expect("no panic");
    }
}

/// Waits until something is so; panics after ten seconds.
pub(crate) async fn until(mut condition: impl AsyncFnMut() -> bool) {
    let begun = Instant::now();
    while !condition().await {
        assert!(begun.elapsed() < Duration::from_secs(10), "it did not come about");
        sleep(Duration::from_millis(10)).await;
    }
}

/// A chat request whose prompt has `group` as its beginning.
pub(crate) fn chat(group: &str, tail: &str) -> String {
    let text = format!("{}{tail}", group.repeat(600 / group.len().max(1)));
    json!({"messages": [{"role": "user", "content": text}], "stream": true}).to_string()
}
