//! Both ends of `bench/router.py`: workers that answer at once, and clients that ask as fast as they
//! are answered.
//!
//! ```text
//! bench_peer worker PORT EVENTS GAP_MS
//! bench_peer load URL CONNECTIONS SECONDS GROUPS PROMPT_BYTES json|stream
//! ```
#![allow(clippy::print_stdout, reason = "a command")]

use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Bytes, Frame, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::json;
use tokio::time::{Sleep, sleep};

const EVENT: &str = "data: {\"id\":\"cmpl-0123456789abcdef\",\"object\":\"chat.completion.chunk\",\"created\":1790000000,\"model\":\"m\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" word\"},\"finish_reason\":null}]}\n\n";
const DONE: &str = "data: [DONE]\n\n";
const ANSWER: &str = "{\"id\":\"cmpl-0123456789abcdef\",\"object\":\"chat.completion\",\"created\":1790000000,\"model\":\"m\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"word\"},\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":10,\"completion_tokens\":1,\"total_tokens\":11}}";

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        ["worker", port, events, gap_ms] => {
            worker(number(port) as u16, number(events), Duration::from_millis(number(gap_ms)))
                .await;
        }
        ["load", url, connections, seconds, groups, prompt_bytes, kind] => {
            let load = Load {
                url: url.to_owned(),
                groups: number(groups),
                prompt_bytes: number(prompt_bytes) as usize,
                stream: kind == "stream",
                until: Instant::now() + Duration::from_secs(number(seconds)),
            };
            run(load, number(connections)).await;
        }
        _ => panic!("bench_peer worker ... or bench_peer load ...: see the source"),
    }
}

fn number(text: &str) -> u64 {
    text.parse().expect("a number")
}

async fn worker(port: u16, events: u64, gap: Duration) {
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    let listener = tokio::net::TcpListener::bind(address).await.expect("the port is free");
    loop {
        let (stream, _) = listener.accept().await.expect("connections");
        let _ = stream.set_nodelay(true);
        let service = service_fn(move |request| answer(request, events, gap));
        tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
    }
}

async fn answer(
    request: Request<Incoming>,
    events: u64,
    gap: Duration,
) -> Result<Response<Reply>, Infallible> {
    let asks = request.method() == hyper::Method::POST;
    let body = request
        .into_body()
        .collect()
        .await
        .map_or_else(|_| Bytes::new(), http_body_util::Collected::to_bytes);
    let streams = asks && memchr::memmem::find(&body, b"\"stream\":true").is_some();
    let (reply, kind) = if streams {
        (Reply::Events { left: events + 1, gap, timer: None }, "text/event-stream")
    } else {
        (Reply::Whole(Some(Bytes::from_static(ANSWER.as_bytes()))), "application/json")
    };
    Ok(Response::builder().header("content-type", kind).body(reply).expect("an answer"))
}

/// A whole answer, or events a time apart.
enum Reply {
    Whole(Option<Bytes>),
    Events { left: u64, gap: Duration, timer: Option<Pin<Box<Sleep>>> },
}

impl Body for Reply {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let next = match &mut *self {
            Self::Whole(bytes) => bytes.take(),
            Self::Events { left: 0, .. } => None,
            Self::Events { left, gap, timer } => {
                if !gap.is_zero() {
                    let waiting = timer.get_or_insert_with(|| Box::pin(sleep(*gap)));
                    ready!(waiting.as_mut().poll(context));
                    *timer = None;
                }
                *left -= 1;
                Some(Bytes::from_static(if *left == 0 { DONE } else { EVENT }.as_bytes()))
            }
        };
        Poll::Ready(next.map(|bytes| Ok(Frame::data(bytes))))
    }

    fn size_hint(&self) -> hyper::body::SizeHint {
        match self {
            Self::Whole(Some(bytes)) => hyper::body::SizeHint::with_exact(bytes.len() as u64),
            _ => hyper::body::SizeHint::default(),
        }
    }
}

#[derive(Clone)]
struct Load {
    url: String,
    groups: u64,
    prompt_bytes: usize,
    stream: bool,
    until: Instant,
}

#[derive(Default)]
struct Counts {
    seconds: Vec<f64>,
    first_byte_s: Vec<f64>,
    errors: u64,
}

async fn run(load: Load, connections: u64) {
    let begun = Instant::now();
    let tasks: Vec<_> =
        (0..connections).map(|number| tokio::spawn(ask(load.clone(), number))).collect();
    let mut all = Counts::default();
    for task in tasks {
        let counts = task.await.expect("no panic");
        all.seconds.extend(counts.seconds);
        all.first_byte_s.extend(counts.first_byte_s);
        all.errors += counts.errors;
    }
    let elapsed = begun.elapsed().as_secs_f64();
    let requests = all.seconds.len();
    println!(
        "{}",
        json!({
            "requests": requests,
            "errors": all.errors,
            "requests_per_s": requests as f64 / elapsed,
            "p50_ms": percentile(&mut all.seconds, 0.5) * 1e3,
            "p99_ms": percentile(&mut all.seconds, 0.99) * 1e3,
            "first_byte_p50_ms": percentile(&mut all.first_byte_s, 0.5) * 1e3,
        })
    );
}

/// One connection's requests, one after the other.
async fn ask(load: Load, number: u64) -> Counts {
    let client: Client<HttpConnector, Full<Bytes>> =
        Client::builder(TokioExecutor::new()).build_http();
    let mut counts = Counts::default();
    let mut turn = number;
    while Instant::now() < load.until {
        turn = turn.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let body = body(&load, turn >> 33);
        let request = Request::post(&load.url)
            .header("content-type", "application/json")
            .body(Full::new(Bytes::from(body)))
            .expect("a request");
        let sent = Instant::now();
        match whole(&client, request).await {
            Some(first_byte) => {
                counts.first_byte_s.push((first_byte - sent).as_secs_f64());
                counts.seconds.push(sent.elapsed().as_secs_f64());
            }
            None => counts.errors += 1,
        }
    }
    counts
}

/// When the first byte came, if all came.
async fn whole(
    client: &Client<HttpConnector, Full<Bytes>>,
    request: Request<Full<Bytes>>,
) -> Option<Instant> {
    let mut response = client.request(request).await.ok()?;
    let mut first = None;
    while let Some(frame) = response.body_mut().frame().await {
        frame.ok()?;
        first.get_or_insert_with(Instant::now);
    }
    first.filter(|_| response.status().is_success())
}

/// A chat whose beginning its group shares; with no groups, every prompt is new from its first byte.
fn body(load: &Load, turn: u64) -> String {
    let group = if load.groups == 0 { turn } else { turn % load.groups };
    let shared = format!("group {group:012} ").repeat(load.prompt_bytes / 20);
    format!(
        "{{\"model\":\"m\",\"stream\":{},\"messages\":[{{\"role\":\"user\",\"content\":\"{shared}{turn}\"}}]}}",
        load.stream
    )
}

fn percentile(values: &mut [f64], part: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let last = values.len().saturating_sub(1);
    values.get((last as f64 * part) as usize).copied().unwrap_or(f64::NAN)
}
