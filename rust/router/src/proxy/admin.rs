//! The router's own endpoints: workers, health, and what goes to every worker.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::{Method, Request, Response, StatusCode};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::{sleep, timeout};

use super::body::AnswerBody;
use super::errors::{Refusal, json_response};
use super::forward::{HttpClient, Job};
use super::handle::has_key;
use super::request_body::RequestBody;
use super::state::{Endpoint, Shared, state_name};
use crate::core::{BreakerState, Worker, WorkerId, WorkerState};

const MAX_ADMIN_BODY: usize = 1 << 16;
const DEFAULT_DRAIN_S: f64 = 30.0;
const DRAIN_LOOK: Duration = Duration::from_millis(50);
const EVERYWHERE_TIME: Duration = Duration::from_secs(30);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NewWorker {
    url: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NewState {
    state: String,
}

/// 200 while a worker can be chosen and the router is not stopping.
pub(super) fn health(shared: &Shared) -> Response<AnswerBody> {
    let now = shared.now();
    let ready = shared
        .router()
        .workers()
        .filter(|worker| worker.state == WorkerState::Ready && worker.breaker.allows(now))
        .count();
    let stopping = *shared.stopping.borrow();
    let healthy = ready > 0 && !stopping;
    let status = if healthy { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    json_response(status, &json!({"ready_workers": ready, "stopping": stopping}))
}

/// `/workers` and `/workers/{id}`.
pub(super) async fn workers(
    shared: &Arc<Shared>,
    request: Request<RequestBody>,
) -> Result<Response<AnswerBody>, Refusal> {
    check_admin(shared, &request)?;
    let path = request.uri().path().trim_end_matches('/').to_owned();
    let query = request.uri().query().unwrap_or("").to_owned();
    let id = path.strip_prefix("/workers/");
    match (request.method().clone(), id) {
        (Method::GET, None) => Ok(json_response(StatusCode::OK, &json!({"workers": list(shared)}))),
        (Method::POST, None) => {
            let new: NewWorker = read(request).await?;
            let endpoint = shared.add_worker(&new.url)?;
            super::health::watch(shared, Arc::clone(&endpoint));
            Ok(json_response(StatusCode::CREATED, &view(shared, endpoint.id)?))
        }
        (Method::GET, Some(id)) => {
            let endpoint = find(shared, id)?;
            Ok(json_response(StatusCode::OK, &view(shared, endpoint.id)?))
        }
        (Method::PUT, Some(id)) => {
            let endpoint = find(shared, id)?;
            let new: NewState = read(request).await?;
            change(shared, &endpoint, &new.state)?;
            Ok(json_response(StatusCode::OK, &view(shared, endpoint.id)?))
        }
        (Method::DELETE, Some(id)) => {
            let endpoint = find(shared, id)?;
            let time = drain_time(&query)?;
            let answer = view(shared, endpoint.id)?;
            drain(shared, endpoint, time);
            Ok(json_response(StatusCode::ACCEPTED, &answer))
        }
        _ => Err(Refusal::new(
            StatusCode::METHOD_NOT_ALLOWED,
            "method_not_allowed",
            "/workers takes GET and POST, /workers/{id} takes GET, PUT and DELETE",
        )),
    }
}

/// Reading needs the admin key or the clients' key if there is one; changing, the admin key.
fn check_admin(shared: &Shared, request: &Request<RequestBody>) -> Result<(), Refusal> {
    let (config, headers) = (&shared.config, request.headers());
    let admin = config.admin_api_key.as_deref().is_some_and(|key| has_key(headers, key));
    if admin {
        return Ok(());
    }
    if request.method() == Method::GET {
        let client = config.api_key.as_deref().is_some_and(|key| has_key(headers, key));
        if client || (config.api_key.is_none() && config.admin_api_key.is_none()) {
            return Ok(());
        }
    } else if config.admin_api_key.is_none() {
        return Err(Refusal::new(
            StatusCode::FORBIDDEN,
            "no_admin_key",
            "workers can be changed only by who knows the admin key; start with --admin-api-key",
        ));
    }
    Err(Refusal::new(StatusCode::UNAUTHORIZED, "invalid_api_key", "the admin key is needed"))
}

async fn read<T: for<'a> Deserialize<'a>>(request: Request<RequestBody>) -> Result<T, Refusal> {
    let body = Limited::new(request.into_body(), MAX_ADMIN_BODY);
    let bytes = match body.collect().await {
        Ok(collected) => collected.to_bytes(),
        Err(error) => {
            return Err(Refusal::bad_request(format!("the body cannot be read: {error}")));
        }
    };
    serde_json::from_slice(&bytes).map_err(|error| Refusal::bad_request(error.to_string()))
}

fn find(shared: &Shared, id: &str) -> Result<Arc<Endpoint>, Refusal> {
    let known = id.parse().ok().and_then(|id| shared.endpoint(WorkerId(id)));
    known.ok_or_else(|| {
        Refusal::new(StatusCode::NOT_FOUND, "no_such_worker", format!("there is no worker {id:?}"))
    })
}

fn list(shared: &Shared) -> Vec<Value> {
    let ids: Vec<_> = shared.endpoints().iter().map(|endpoint| endpoint.id).collect();
    ids.into_iter().filter_map(|id| view(shared, id).ok()).collect()
}

fn view(shared: &Shared, id: WorkerId) -> Result<Value, Refusal> {
    let now = shared.now();
    let router = shared.router();
    let worker: &Worker = router.worker(id).map_err(|error| {
        Refusal::new(StatusCode::NOT_FOUND, "no_such_worker", error.to_string())
    })?;
    let breaker = match worker.breaker.state(now) {
        BreakerState::Closed => "closed",
        BreakerState::Open => "open",
        BreakerState::HalfOpen => "half_open",
    };
    let report = worker.load.fresh_report(now, router.config().report_max_age_s);
    Ok(json!({
        "id": worker.id.0,
        "url": worker.name,
        "state": state_name(worker.state),
        "breaker": breaker,
        "in_flight": worker.load.in_flight(),
        "running": worker.load.running(),
        "outstanding_prefill_tokens": worker.load.prefill_tokens(),
        "selected": worker.selected,
        "index_blocks": router.num_blocks(id).unwrap_or(0),
        "reported": report.map(|report| json!({
            "running": report.running,
            "waiting": report.waiting,
            "waiting_uncached_tokens": report.waiting_uncached_tokens,
            "kv_used": report.kv_used,
        })),
    }))
}

fn change(shared: &Shared, endpoint: &Endpoint, state: &str) -> Result<(), Refusal> {
    let draining = match state {
        "draining" => true,
        "ready" => false,
        _ => {
            let text = format!("state is {state:?}; it can be set to \"ready\" or \"draining\"");
            return Err(Refusal::bad_request(text));
        }
    };
    endpoint.draining.store(draining, Ordering::Relaxed);
    let serves = [WorkerState::Ready, WorkerState::Draining];
    if shared.state(endpoint.id).is_some_and(|now| serves.contains(&now)) {
        shared
            .set_state(endpoint, if draining { WorkerState::Draining } else { WorkerState::Ready });
    }
    Ok(())
}

/// `?drain_s=N` of a removal.
fn drain_time(query: &str) -> Result<Duration, Refusal> {
    let mut seconds = DEFAULT_DRAIN_S;
    for field in query.split('&').filter(|field| !field.is_empty()) {
        let value = field.strip_prefix("drain_s=").and_then(|text| text.parse().ok());
        seconds = value.filter(|seconds| (0.0..=86_400.0).contains(seconds)).ok_or_else(|| {
            Refusal::bad_request(format!("{field:?} is no drain_s=SECONDS between 0 and 86400"))
        })?;
    }
    Ok(Duration::from_secs_f64(seconds))
}

/// Removes a worker once its requests have ended, or the time is up.
fn drain(shared: &Arc<Shared>, endpoint: Arc<Endpoint>, time: Duration) {
    endpoint.draining.store(true, Ordering::Relaxed);
    if shared.state(endpoint.id) == Some(WorkerState::Ready) {
        shared.set_state(&endpoint, WorkerState::Draining);
    }
    let shared = Arc::clone(shared);
    let task = async move {
        let begun = Instant::now();
        while begun.elapsed() < time && in_flight(&shared, &endpoint) > 0 {
            sleep(DRAIN_LOOK).await;
        }
        shared.remove_worker(&endpoint);
    };
    tokio::spawn(task);
}

fn in_flight(shared: &Shared, endpoint: &Endpoint) -> u64 {
    shared.router().worker(endpoint.id).map_or(0, |worker| worker.load.in_flight())
}

/// Sends a request to every worker. The answer has each worker's status; its own is the worst.
pub(super) async fn everywhere(
    shared: &Arc<Shared>,
    client: &HttpClient,
    job: &Job,
) -> Response<AnswerBody> {
    let mut answers = serde_json::Map::new();
    let mut worst = StatusCode::OK;
    let sent: Vec<_> = shared
        .endpoints()
        .into_iter()
        .filter(|endpoint| !endpoint.is_down())
        .map(|endpoint| {
            (Arc::clone(&endpoint), tokio::spawn(ask(client.clone(), copy(job, &endpoint))))
        })
        .collect();
    for (endpoint, task) in sent {
        let status = task.await.ok().flatten().unwrap_or(StatusCode::BAD_GATEWAY);
        if status.is_success() && job.path_and_query.starts_with("/flush_cache") {
            let _ = shared.router().forget_cache(endpoint.id);
        }
        worst = worst.max(status);
        answers.insert(endpoint.url.clone(), json!(status.as_u16()));
    }
    json_response(worst, &json!({"workers": answers}))
}

fn copy(job: &Job, endpoint: &Endpoint) -> Request<Full<Bytes>> {
    let mut request = Request::new(Full::new(job.body.clone()));
    *request.method_mut() = job.method.clone();
    *request.headers_mut() = job.headers.clone();
    let uri = format!("{}{}", endpoint.url, job.path_and_query);
    *request.uri_mut() = uri.parse().unwrap_or_default();
    request
}

async fn ask(client: HttpClient, request: Request<Full<Bytes>>) -> Option<StatusCode> {
    let response = timeout(EVERYWHERE_TIME, client.request(request)).await.ok()?.ok()?;
    let status = response.status();
    timeout(EVERYWHERE_TIME, response.into_body().collect()).await.ok()?.ok()?;
    Some(status)
}
