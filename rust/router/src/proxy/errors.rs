//! The router's own error answers.

use hyper::header::{CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use hyper::{Response, StatusCode};
use serde_json::json;

use super::body::AnswerBody;

/// Why the router itself answers with an error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) status: StatusCode,
    pub(super) code: &'static str,
    pub(super) message: String,
    pub(super) retry_after_s: Option<u64>,
}

impl Refusal {
    pub(super) fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self { status, code, message: message.into(), retry_after_s: None }
    }

    pub(super) fn retry_after(mut self, seconds: u64) -> Self {
        self.retry_after_s = Some(seconds);
        self
    }

    pub(super) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "bad_request", message)
    }

    /// The answer, in the shape of the server's own errors.
    pub(super) fn response(&self) -> Response<AnswerBody> {
        let body = error_object(self.status.as_u16(), self.code, &self.message);
        let mut response = json_response(self.status, &body);
        if let Some(seconds) = self.retry_after_s {
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}

/// OpenAI's nested error, and the same at the top level for older clients.
pub(super) fn error_object(status: u16, code: &str, message: &str) -> serde_json::Value {
    let kind = match status {
        401 | 403 => "authentication_error",
        400..=499 => "invalid_request_error",
        _ => "server_error",
    };
    json!({
        "error": {"message": message, "type": kind, "param": null, "code": code},
        "object": "error", "message": message, "type": kind, "param": null, "code": status,
    })
}

pub(super) fn json_response(status: StatusCode, body: &serde_json::Value) -> Response<AnswerBody> {
    let mut response = Response::new(AnswerBody::whole(body.to_string()));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}
