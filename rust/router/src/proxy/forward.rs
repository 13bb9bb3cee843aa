//! One request: choose a worker, send it, and try another one as long as the client saw nothing.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::header::{
    AUTHORIZATION, CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, EXPECT, HOST, HeaderMap, HeaderName,
    HeaderValue, TE, TRAILER, TRANSFER_ENCODING, UPGRADE,
};
use hyper::{Method, Request, Response, StatusCode, Uri};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use tokio::time::{Instant as TokioInstant, sleep_until, timeout};

use super::body::{AnswerBody, WorkerBody};
use super::errors::Refusal;
use super::events::Dialect;
use super::keeper::{self, Home, Kept};
use super::parse::Asked;
use super::reports;
use super::state::{Endpoint, Flight, Shared};
use crate::core::{Choice, Reason, RouterError, Selection, WorkerId};

/// Connections to the workers, of one thread.
pub(super) type HttpClient = Client<HttpConnector, Full<Bytes>>;

/// How long a waiting request goes without looking whether a breaker has become half-open.
const LOOK: Duration = Duration::from_millis(250);
const HOP_HEADERS: [HeaderName; 5] = [CONNECTION, TE, TRAILER, TRANSFER_ENCODING, UPGRADE];

/// A request, read and checked.
pub(super) struct Job {
    pub(super) method: Method,
    pub(super) path_and_query: String,
    /// What workers get, but for `Host`.
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
    pub(super) asked: Asked,
    pub(super) session: Option<Vec<u8>>,
    pub(super) arrived: Instant,
    pub(super) dialect: Dialect,
    /// Sending it twice does no harm.
    pub(super) repeatable: bool,
    pub(super) kept: Kept,
}

/// What came of sending a request to a worker.
enum Attempt {
    /// An answer for the client.
    Answer(Response<AnswerBody>),
    /// The worker would not, or a gateway before it could not; another one may.
    Rejected(Response<AnswerBody>),
    /// Nothing that a client could get. `reached`: the worker may have begun.
    Broken { reason: &'static str, reached: bool },
}

/// A place in the queue.
struct Place<'a>(&'a Shared);

impl<'a> Place<'a> {
    fn take(shared: &'a Shared, busy: bool) -> Result<Self, Refusal> {
        let limit = shared.config.queue_size;
        if shared.queued.fetch_add(1, Ordering::Relaxed) >= limit {
            shared.queued.fetch_sub(1, Ordering::Relaxed);
            return Err(full(shared, busy, &format!("{limit} requests wait already")));
        }
        Ok(Self(shared))
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.queued.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Nobody can serve: 429 if the workers have too much to do, 503 if there are none.
fn full(shared: &Shared, busy: bool, why: &str) -> Refusal {
    let (status, code, text) = if busy {
        (StatusCode::TOO_MANY_REQUESTS, "queue_full", "every worker is at its limit")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "no_worker", "no worker is available")
    };
    shared.metrics.refused.with_label_values(&[code]).inc();
    Refusal::new(status, code, format!("{text}: {why}; try again later")).retry_after(1)
}

/// Forwards a request until there is an answer.
pub(super) async fn forward(
    shared: &Arc<Shared>,
    client: &HttpClient,
    job: &Job,
) -> Response<AnswerBody> {
    shared.earn_retry();
    let home = match keeper::home(shared, client, job).await {
        Ok(home) => home,
        Err(refusal) => return refusal.response(),
    };
    let mut tried = Vec::new();
    let mut reached_workers = 0;
    loop {
        let flight = match choose(shared, job, home, &mut tried).await {
            Ok(flight) => flight,
            Err(refusal) => return refusal.response(),
        };
        tried.push(flight.choice.worker);
        match attempt(client, job, flight).await {
            Attempt::Answer(response) => return response,
            Attempt::Rejected(response) => {
                reached_workers += 1;
                let spent = reached_workers >= shared.config.max_attempts;
                let repeatable = job.repeatable && !spent && another(shared, job, home, &tried);
                if !repeatable || !shared.spend_retry() {
                    return response;
                }
                shared.metrics.retries.with_label_values(&["status"]).inc();
            }
            Attempt::Broken { reason, reached } => {
                reached_workers += usize::from(reached);
                let spent = reached_workers >= shared.config.max_attempts;
                if reached && (spent || !job.repeatable) {
                    return gave_up(reason, reached_workers).response();
                }
                shared.metrics.retries.with_label_values(&[reason]).inc();
            }
        }
    }
}

fn gave_up(reason: &str, attempts: usize) -> Refusal {
    let (status, what) = match reason {
        "timeout" => (StatusCode::GATEWAY_TIMEOUT, "did not answer in time"),
        _ => (StatusCode::BAD_GATEWAY, "broke off before it answered"),
    };
    let message = format!("the worker {what} (attempts: {attempts})");
    Refusal::new(status, "worker_failed", message).retry_after(1)
}

/// Whether a worker that was not tried would take the request now.
fn another(shared: &Shared, job: &Job, home: Home, tried: &[WorkerId]) -> bool {
    let selection = Selection { exclude: tried, ..Selection::default() };
    let now = shared.now();
    home == Home::Anywhere && shared.router().peek(&job.asked.prompt, &selection, now).is_ok()
}

/// Chooses a worker, waiting for one if need be. Once all were tried, each may be tried again.
async fn choose(
    shared: &Arc<Shared>,
    job: &Job,
    home: Home,
    tried: &mut Vec<WorkerId>,
) -> Result<Flight, Refusal> {
    let mut place = None;
    let deadline = TokioInstant::now() + Duration::from_secs_f64(shared.config.queue_timeout_s);
    let deadline = deadline
        - job.arrived.elapsed().min(Duration::from_secs_f64(shared.config.queue_timeout_s));
    loop {
        let mut freed = pin!(shared.freed.notified());
        freed.as_mut().enable();
        let busy = match select(shared, job, home, tried) {
            Ok(choice) => {
                if place.is_some() {
                    shared.metrics.queue_seconds.observe(job.arrived.elapsed().as_secs_f64());
                }
                if let Some(endpoint) = shared.endpoint(choice.worker) {
                    return Ok(Flight::new(Arc::clone(shared), endpoint, choice));
                }
                continue; // it has left this moment; its ticket went with it
            }
            Err(error) => matches!(error, RouterError::Busy(_)),
        };
        tried.clear();
        if place.is_none() {
            place = Some(Place::take(shared, busy)?);
        }
        let now = TokioInstant::now();
        if now >= deadline {
            let waited = format!("waited {:.1} s", job.arrived.elapsed().as_secs_f64());
            return Err(full(shared, busy, &waited));
        }
        tokio::select! {
            () = freed => {}
            () = sleep_until(deadline.min(now + LOOK)) => {}
        }
    }
}

fn select(
    shared: &Shared,
    job: &Job,
    home: Home,
    tried: &[WorkerId],
) -> Result<Choice, RouterError> {
    let home = match home {
        Home::Anywhere => None,
        Home::First => shared.first_ready().map(|id| [id]),
        Home::Only(id) => Some([id]),
    };
    let selection = Selection {
        exclude: tried,
        only: home.as_ref().map(|ids| &ids[..]),
        session: job.session.as_deref(),
    };
    let limit = shared.config.max_in_flight;
    let begun = Instant::now();
    let choice = {
        let mut router = shared.router();
        if limit != 0 && router.num_tickets() >= limit {
            return Err(RouterError::Busy(limit as u64));
        }
        router.select(&job.asked.prompt, &selection, shared.now())?
    };
    shared.metrics.select_seconds.observe(begun.elapsed().as_secs_f64());
    shared.metrics.selections.with_label_values(&[reason_name(choice.reason)]).inc();
    Ok(choice)
}

fn reason_name(reason: Reason) -> &'static str {
    match reason {
        Reason::Hit => "hit",
        Reason::Cold => "cold",
        Reason::Spill => "spill",
        Reason::Load => "load",
        Reason::Policy => "policy",
        Reason::Affinity => "affinity",
        Reason::Pinned => "pinned",
    }
}

/// Sends the request to one worker and waits for the first bytes of its answer.
///
/// Ends early when the worker is found dead meanwhile. Dropping it closes the connection.
async fn attempt(client: &HttpClient, job: &Job, mut flight: Flight) -> Attempt {
    let endpoint = Arc::clone(&flight.endpoint);
    let mut lost = pin!(endpoint.lost.notified());
    lost.as_mut().enable();
    if endpoint.is_down() {
        flight.refuse();
        return Attempt::Broken { reason: "lost", reached: false };
    }
    let limit = Duration::from_secs_f64(flight.shared.config.first_byte_timeout_s);
    let answered = tokio::select! {
        answered = timeout(limit, first_bytes(client, job, &endpoint)) => answered,
        () = lost => {
            flight.fail("lost");
            return Attempt::Broken { reason: "lost", reached: true };
        }
    };
    match answered {
        Ok(Ok(answer)) => judge(job, flight, answer),
        Ok(Err(reached)) => {
            let reason = if reached { "transport" } else { "connect" };
            flight.fail(reason);
            Attempt::Broken { reason, reached }
        }
        Err(_) => {
            flight.fail("timeout");
            Attempt::Broken { reason: "timeout", reached: true }
        }
    }
}

/// The head of an answer, its first data if it has any, and the rest.
struct Answer {
    response: Response<Incoming>,
    first: Option<Bytes>,
}

/// The beginning of an answer; otherwise whether the worker was reached.
async fn first_bytes(client: &HttpClient, job: &Job, endpoint: &Endpoint) -> Result<Answer, bool> {
    let request = request_to(job, endpoint).map_err(|()| false)?;
    let mut response = client.request(request).await.map_err(|error| !error.is_connect())?;
    let body = response.body_mut();
    while let Some(frame) = body.frame().await {
        if let Ok(data) = frame.map_err(|_| true)?.into_data()
            && !data.is_empty()
        {
            return Ok(Answer { response, first: Some(data) });
        }
    }
    Ok(Answer { response, first: None })
}

fn request_to(job: &Job, endpoint: &Endpoint) -> Result<Request<Full<Bytes>>, ()> {
    let uri: Uri = format!("{}{}", endpoint.url, job.path_and_query).parse().map_err(drop)?;
    let mut request = Request::new(Full::new(job.body.clone()));
    *request.method_mut() = job.method.clone();
    *request.uri_mut() = uri;
    *request.headers_mut() = job.headers.clone();
    request.headers_mut().insert(HOST, endpoint.host.clone());
    Ok(request)
}

fn judge(job: &Job, mut flight: Flight, answer: Answer) -> Attempt {
    let shared = Arc::clone(&flight.shared);
    let (mut head, incoming) = answer.response.into_parts();
    shared.heard(&flight.endpoint);
    note_report(&shared, &flight, &head.headers);
    flight.started();
    let waited = job.arrived.elapsed().as_secs_f64();
    shared.metrics.first_byte_seconds.observe(waited);
    let rejected = matches!(head.status.as_u16(), 429 | 502..=504);
    match head.status.as_u16() {
        429 => flight.refuse(),
        503 => flight.refuse_unready(),
        500.. => flight.fail("status"),
        _ => {}
    }
    let is_events = head
        .headers
        .get(CONTENT_TYPE)
        .is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"));
    strip_hop_headers(&mut head.headers);
    if is_events {
        head.headers.remove(CONTENT_LENGTH);
    }
    head.headers.insert("x-router-worker", HeaderValue::from(flight.choice.worker.0));
    let body = WorkerBody::new(answer.first, incoming, flight, is_events.then_some(job.dialect));
    let mut response = Response::new(AnswerBody::worker(body));
    *response.status_mut() = head.status;
    *response.headers_mut() = head.headers;
    if rejected { Attempt::Rejected(response) } else { Attempt::Answer(response) }
}

fn note_report(shared: &Shared, flight: &Flight, headers: &HeaderMap) {
    let report = {
        let router = shared.router();
        let Ok(worker) = router.worker(flight.choice.worker) else { return };
        reports::from_header(headers, &worker.load)
    };
    if let Some(report) = report {
        shared.report(&flight.endpoint, report);
    }
}

/// The headers that a worker gets.
pub(super) fn worker_headers(
    mut headers: HeaderMap,
    worker_key: Option<&str>,
) -> Result<HeaderMap, Refusal> {
    strip_hop_headers(&mut headers);
    for name in [HOST, CONTENT_LENGTH, EXPECT] {
        headers.remove(name);
    }
    if let Some(key) = worker_key {
        let value = HeaderValue::from_str(&format!("Bearer {key}")).map_err(|_| {
            Refusal::new(
                StatusCode::INTERNAL_SERVER_ERROR,
                "bad_key",
                "the workers' key is unusable",
            )
        })?;
        headers.insert(AUTHORIZATION, value);
    }
    Ok(headers)
}

/// Takes out what concerns one connection only.
fn strip_hop_headers(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|names| names.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    for name in named.iter().chain(&HOP_HEADERS) {
        headers.remove(name);
    }
    for name in ["keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection"] {
        headers.remove(name);
    }
}
