//! Which worker keeps what a request names: files, batches and stored answers live in one of them.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::header::{CONTENT_TYPE, HOST};
use hyper::{HeaderMap, Method, Request};
use serde::Deserialize;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::errors::Refusal;
use super::forward::{HttpClient, Job};
use super::state::{Endpoint, Shared};
use crate::core::{WorkerId, WorkerState};

/// What a request names that not every worker has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Kept {
    Nothing,
    /// It makes or lists such things: all at one worker, so that lists are whole.
    Collection,
    /// The thing at this path: who answers a GET of it with anything but 404 has it.
    At(String),
}

/// The workers that may serve a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Home {
    Anywhere,
    /// The ready worker with the lowest id.
    First,
    Only(WorkerId),
}

const COLLECTIONS: [&str; 4] = ["/v1/files", "/v1/batches", "/v1/responses", "/v1/conversations"];

/// Fields that name something kept, beside the path.
#[derive(Default, Deserialize)]
struct Named {
    previous_response_id: Option<String>,
    input_file_id: Option<String>,
    conversation: Option<Conversation>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Conversation {
    Id(String),
    Object { id: String },
}

impl Kept {
    pub(super) fn of(path: &str, body: &[u8]) -> Self {
        let Some(collection) = COLLECTIONS.into_iter().find(|one| path.starts_with(one)) else {
            return Self::Nothing;
        };
        match path[collection.len()..].strip_prefix('/') {
            Some(rest) => {
                let id = rest.split('/').next().unwrap_or_default();
                Self::At(format!("{collection}/{id}"))
            }
            None if path.len() > collection.len() => Self::Nothing,
            None => Self::named_in(collection, body),
        }
    }

    fn named_in(collection: &str, body: &[u8]) -> Self {
        let named: Named = serde_json::from_slice(body).unwrap_or_default();
        let thing = match (collection, named) {
            ("/v1/responses", Named { previous_response_id: Some(id), .. }) => {
                Some(("/v1/responses", id))
            }
            ("/v1/responses", Named { conversation: Some(named), .. }) => {
                let (Conversation::Id(id) | Conversation::Object { id }) = named;
                Some(("/v1/conversations", id))
            }
            ("/v1/batches", Named { input_file_id: Some(id), .. }) => Some(("/v1/files", id)),
            _ => None,
        };
        match thing {
            // An id that is no plain word is nobody's: the worker says so.
            Some((collection, id)) if is_word(&id) => Self::At(format!("{collection}/{id}")),
            _ if collection == "/v1/responses" => Self::Nothing,
            _ => Self::Collection,
        }
    }
}

fn is_word(id: &str) -> bool {
    !id.is_empty() && id.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
}

/// What asking one worker told.
enum Found {
    Here(WorkerId),
    Elsewhere,
    /// It gave no usable answer.
    Unknown,
}

/// Finds the worker that may serve a request, by asking all if need be.
pub(super) async fn home(
    shared: &Arc<Shared>,
    client: &HttpClient,
    job: &Job,
) -> Result<Home, Refusal> {
    let path = match &job.kept {
        Kept::Nothing => return Ok(Home::Anywhere),
        Kept::Collection => return Ok(Home::First),
        Kept::At(path) => path,
    };
    let all = shared.endpoints();
    if let [only] = &all[..] {
        return Ok(Home::Only(only.id));
    }
    let limit = Duration::from_secs_f64(shared.config.health_timeout_s);
    let mut asking = JoinSet::new();
    let mut unknown = 0;
    for endpoint in all {
        if shared.state(endpoint.id) == Some(WorkerState::Ready) {
            asking.spawn(ask(client.clone(), endpoint, path.clone(), job.headers.clone(), limit));
        } else {
            unknown += 1;
        }
    }
    while let Some(found) = asking.join_next().await {
        match found {
            Ok(Found::Here(id)) => return Ok(Home::Only(id)),
            Ok(Found::Elsewhere) => {}
            Ok(Found::Unknown) | Err(_) => unknown += 1,
        }
    }
    if unknown == 0 {
        return Ok(Home::First); // it says what is wrong
    }
    let message = format!(
        "no worker that answers has {path:?}, and {unknown} of them cannot be asked now; try again \
         later"
    );
    Err(Refusal::new(hyper::StatusCode::SERVICE_UNAVAILABLE, "keeper_unavailable", message)
        .retry_after(1))
}

async fn ask(
    client: HttpClient,
    endpoint: Arc<Endpoint>,
    path: String,
    mut headers: HeaderMap,
    limit: Duration,
) -> Found {
    let Ok(uri) = format!("{}{path}", endpoint.url).parse() else { return Found::Elsewhere };
    headers.remove(CONTENT_TYPE);
    headers.insert(HOST, endpoint.host.clone());
    let mut request = Request::new(Full::new(Bytes::new()));
    *request.method_mut() = Method::GET;
    *request.uri_mut() = uri;
    *request.headers_mut() = headers;
    match timeout(limit, client.request(request)).await {
        Ok(Ok(response)) => match response.status().as_u16() {
            404 => Found::Elsewhere,
            500.. => Found::Unknown,
            _ => Found::Here(endpoint.id),
        },
        _ => Found::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(path: &str) -> Kept {
        Kept::At(path.to_owned())
    }

    #[test]
    fn paths_and_bodies_name_what_is_kept() {
        for (path, body, kept) in [
            ("/v1/chat/completions", r#"{"input_file_id":"f"}"#, Kept::Nothing),
            ("/v1/responses", r#"{"input":"x"}"#, Kept::Nothing),
            ("/v1/responses", "no json", Kept::Nothing),
            ("/v1/responses", r#"{"previous_response_id":7}"#, Kept::Nothing),
            ("/v1/responses", r#"{"previous_response_id":"../x"}"#, Kept::Nothing),
            ("/v1/responses", r#"{"previous_response_id":"resp_1"}"#, at("/v1/responses/resp_1")),
            ("/v1/responses", r#"{"conversation":"c"}"#, at("/v1/conversations/c")),
            ("/v1/responses", r#"{"conversation":{"id":"c"}}"#, at("/v1/conversations/c")),
            ("/v1/responses/resp_1", "", at("/v1/responses/resp_1")),
            ("/v1/responses/resp_1/cancel", "{}", at("/v1/responses/resp_1")),
            ("/v1/files", "", Kept::Collection),
            ("/v1/files/file-1/content", "", at("/v1/files/file-1")),
            ("/v1/batches", r#"{"input_file_id":"file-1"}"#, at("/v1/files/file-1")),
            ("/v1/batches", "", Kept::Collection),
            ("/v1/batches/batch_1", "", at("/v1/batches/batch_1")),
            ("/v1/filesystem", "", Kept::Nothing),
        ] {
            assert_eq!(Kept::of(path, body.as_bytes()), kept, "{path} {body}");
        }
    }
}
