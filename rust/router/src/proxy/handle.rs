//! The way of a request through the router: who may, what for, and where to.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::Incoming;
use hyper::header::{AUTHORIZATION, CONTENT_LENGTH, CONTENT_TYPE, HeaderMap, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use tokio::time::timeout;

use super::admin;
use super::body::AnswerBody;
use super::errors::Refusal;
use super::events::Dialect;
use super::forward::{self, HttpClient, Job};
use super::keeper::Kept;
use super::parse::Asked;
use super::request_body::RequestBody;
use super::state::{Counted, Shared};

const REQUEST_ID: &str = "x-request-id";
const MAX_ID_CHARACTERS: usize = 128;
const SESSION_HEADERS: [&str; 3] = ["x-session-id", "x-smg-routing-key", "x-user-id"];
/// Time in which a client must have sent its body.
const BODY_TIME: Duration = Duration::from_secs(300);

/// Paths that generate: sent twice, they do nothing twice but compute.
const GENERATING: [&str; 15] = [
    "/generate",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
    "/v1/tokenize",
    "/v1/detokenize",
    "/tokenize",
    "/detokenize",
    "/rerank",
    "/completion",
    "/encode",
];

/// Answers one request.
pub(super) async fn handle(
    shared: Arc<Shared>,
    client: HttpClient,
    request: Request<Incoming>,
) -> Response<AnswerBody> {
    let counted = Counted::new(&shared);
    let route = route_of(request.uri().path());
    let id = request_id(&shared, request.headers());
    let mut response = match dispatch(&shared, &client, RequestBody::wrap(request), &id).await {
        Ok(response) => response,
        Err(refusal) => refusal.response(),
    };
    shared.metrics.requests.with_label_values(&[route, response.status().as_str()]).inc();
    response.headers_mut().entry(REQUEST_ID).or_insert(id);
    response.map(|body| body.counted(counted))
}

async fn dispatch(
    shared: &Arc<Shared>,
    client: &HttpClient,
    request: Request<RequestBody>,
    id: &HeaderValue,
) -> Result<Response<AnswerBody>, Refusal> {
    let path = request.uri().path();
    if let Some(response) = open_path(shared, path) {
        return Ok(response);
    }
    if path == "/workers" || path.starts_with("/workers/") {
        return admin::workers(shared, request).await;
    }
    check_key(shared, request.method(), request.headers())?;
    let everywhere = matches!(path, "/flush_cache" | "/abort_request");
    let job = read(shared, request, id).await?;
    if everywhere {
        return Ok(admin::everywhere(shared, client, &job).await);
    }
    Ok(forward::forward(shared, client, &job).await)
}

/// What monitors ask for; needs no key.
fn open_path(shared: &Shared, path: &str) -> Option<Response<AnswerBody>> {
    match path {
        "/health" | "/ready" | "/readiness" => Some(admin::health(shared)),
        "/liveness" => Some(Response::new(AnswerBody::whole("alive\n"))),
        "/metrics" => {
            let mut response = Response::new(AnswerBody::whole(shared.metrics.render(shared)));
            let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
            response.headers_mut().insert(CONTENT_TYPE, kind);
            Some(response)
        }
        _ => None,
    }
}

fn check_key(shared: &Shared, method: &Method, headers: &HeaderMap) -> Result<(), Refusal> {
    match &shared.config.api_key {
        Some(key) if method != Method::OPTIONS && !has_key(headers, key) => Err(Refusal::new(
            StatusCode::UNAUTHORIZED,
            "invalid_api_key",
            "a valid API key is needed: send it as Authorization: Bearer KEY",
        )),
        _ => Ok(()),
    }
}

/// Whether the bearer token is this key. Takes the same time wherever they differ.
pub(super) fn has_key(headers: &HeaderMap, key: &str) -> bool {
    let sent = headers.get(AUTHORIZATION).map_or(&b""[..], HeaderValue::as_bytes);
    let Some((scheme, token)) = sent.split_at_checked(7) else { return false };
    let differences = token.iter().zip(key.as_bytes()).fold(0, |sum, (one, two)| sum | (one ^ two));
    scheme.eq_ignore_ascii_case(b"bearer ") && token.len() == key.len() && differences == 0
}

/// The client's id if it is usable, else a new one.
fn request_id(shared: &Shared, headers: &HeaderMap) -> HeaderValue {
    let usable = |value: &&HeaderValue| {
        let bytes = value.as_bytes();
        (1..=MAX_ID_CHARACTERS).contains(&bytes.len())
            && bytes.iter().all(|byte| (b' '..=b'~').contains(byte))
    };
    headers.get(REQUEST_ID).filter(usable).cloned().unwrap_or_else(|| {
        HeaderValue::from_str(&shared.new_request_id()).expect("hexadecimal digits")
    })
}

/// Reads the body and what the choice needs of it.
async fn read(
    shared: &Shared,
    request: Request<RequestBody>,
    id: &HeaderValue,
) -> Result<Job, Refusal> {
    let arrived = Instant::now();
    let (head, body) = request.into_parts();
    let body = collect(shared, &head.headers, body).await?;
    let path = head.uri.path();
    let is_get = matches!(head.method, Method::GET | Method::HEAD | Method::OPTIONS);
    let generates = GENERATING.contains(&path) || path == "/v1/responses";
    let asked = if generates { Asked::of(&body, &shared.config) } else { Asked::default() };
    let session = SESSION_HEADERS.iter().find_map(|name| head.headers.get(*name));
    let mut headers =
        forward::worker_headers(head.headers.clone(), shared.config.worker_api_key.as_deref())?;
    headers.insert(REQUEST_ID, id.clone());
    Ok(Job {
        session: session.map(|value| value.as_bytes().to_vec()).or_else(|| asked.session.clone()),
        dialect: Dialect::of_path(path),
        repeatable: is_get || GENERATING.contains(&path),
        kept: Kept::of(path, &body),
        path_and_query: head.uri.path_and_query().map_or("/", |path| path.as_str()).to_owned(),
        method: head.method,
        headers,
        body,
        asked,
        arrived,
    })
}

async fn collect(
    shared: &Shared,
    headers: &HeaderMap,
    body: RequestBody,
) -> Result<Bytes, Refusal> {
    let limit = shared.config.max_body_bytes;
    let too_large = || {
        let text = format!("the body is larger than {limit} bytes; see --max-body-bytes");
        Refusal::new(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", text)
    };
    let told = headers.get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
    if told.is_some_and(|length: usize| length > limit) {
        return Err(too_large());
    }
    match timeout(BODY_TIME, Limited::new(body, limit).collect()).await {
        Ok(Ok(collected)) => Ok(collected.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(too_large()),
        Ok(Err(error)) => Err(Refusal::bad_request(format!("the body cannot be read: {error}"))),
        Err(_) => Err(Refusal::new(
            StatusCode::REQUEST_TIMEOUT,
            "body_timeout",
            format!("the body did not come within {} s", BODY_TIME.as_secs()),
        )),
    }
}

/// The label of a path: few, whatever clients ask for.
fn route_of(path: &str) -> &'static str {
    let known = GENERATING.iter().chain(&["/v1/responses", "/v1/models", "/workers", "/metrics"]);
    known.copied().find(|known| *known == path).unwrap_or("other")
}
