//! Server-sent events: whole ones only, and an error event at a broken stream's end.

use bytes::{Bytes, BytesMut};
use memchr::memmem;
use serde_json::json;

use super::errors::error_object;

/// A part of an event beyond this is passed on without waiting for its end.
const MAX_HELD_BYTES: usize = 1 << 20;

/// What an API's clients understand as an error in a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dialect {
    OpenAi,
    Responses,
    Anthropic,
}

impl Dialect {
    pub(super) fn of_path(path: &str) -> Self {
        match path {
            "/v1/messages" => Self::Anthropic,
            "/v1/responses" => Self::Responses,
            _ => Self::OpenAi,
        }
    }

    /// The last event of a stream that its worker did not finish.
    pub(super) fn error_event(self, message: &str) -> Bytes {
        let text = match self {
            Self::OpenAi => format!("data: {}\n\n", error_object(502, "worker_failed", message)),
            Self::Responses => {
                let error = json!({"type": "error", "code": "worker_failed", "message": message, "param": null});
                format!("event: error\ndata: {error}\n\n")
            }
            Self::Anthropic => {
                let error = json!({"type": "api_error", "message": message});
                format!("event: error\ndata: {}\n\n", json!({"type": "error", "error": error}))
            }
        };
        Bytes::from(text)
    }
}

/// Cuts a stream after whole events, so that an error event never lands inside another.
///
/// Frames that end with an event, as almost all do, pass through untouched.
#[derive(Debug, Default)]
pub(super) struct EventCutter {
    held: BytesMut,
    /// A held event grew too long and was passed on in part.
    cut: bool,
}

impl EventCutter {
    /// The whole events that are there now; empty if there is none.
    pub(super) fn push(&mut self, mut frame: Bytes) -> Bytes {
        let end = self.end_of_events(&frame);
        if self.held.is_empty() && end == Some(frame.len()) {
            self.cut = false;
            return frame;
        }
        let Some(end) = end else {
            self.held.extend_from_slice(&frame);
            if self.held.len() > MAX_HELD_BYTES {
                self.cut = true;
                return self.held.split().freeze();
            }
            return Bytes::new();
        };
        self.cut = false;
        let rest = frame.split_off(end);
        let whole = if self.held.is_empty() {
            frame
        } else {
            self.held.extend_from_slice(&frame);
            self.held.split().freeze()
        };
        self.held.extend_from_slice(&rest);
        whole
    }

    /// Where in the frame its last whole event ends, given what is held.
    fn end_of_events(&self, frame: &[u8]) -> Option<usize> {
        if frame.ends_with(b"\n\n") {
            return Some(frame.len());
        }
        let inside = [&b"\n\n"[..], b"\r\n\r\n", b"\r\r"]
            .iter()
            .filter_map(|end| Some(memmem::rfind(frame, end)? + end.len()))
            .max();
        inside.or_else(|| {
            // The end of an event may be split between what is held and the frame.
            let tail = &self.held[self.held.len().saturating_sub(3)..];
            let head = &frame[..frame.len().min(3)];
            let seam = [tail, head].concat();
            let found = [&b"\n\n"[..], b"\r\n\r\n", b"\r\r"]
                .iter()
                .filter_map(|end| Some(memmem::rfind(&seam, end)? + end.len()))
                .max()?;
            (found > tail.len()).then(|| found - tail.len())
        })
    }

    /// Whether the stream stopped inside an event.
    pub(super) fn is_inside(&self) -> bool {
        self.cut || self.held.iter().any(|byte| !byte.is_ascii_whitespace())
    }

    /// What must stand before an error event: nothing, or the end of an event passed on in part.
    pub(super) fn close(&mut self) -> &'static [u8] {
        self.held.clear();
        if self.cut { b"\n\n" } else { b"" }
    }

    /// What is left at a good end.
    pub(super) fn rest(&mut self) -> Bytes {
        self.held.split().freeze()
    }
}

#[cfg(test)]
mod tests {
    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;

    #[test]
    fn any_chunking_gives_the_same_bytes_in_whole_events() {
        for seed in 0..300 {
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            let end = ["\n\n", "\r\n\r\n", "\r\r"][seed as usize % 3];
            let texts: Vec<String> =
                (0..8).map(|n| format!("data: {n} \u{e9}{}{end}", "x".repeat(n))).collect();
            let stream = texts.concat();
            let mut cutter = EventCutter::default();
            let (mut out, mut left) = (Vec::new(), stream.as_bytes());
            while !left.is_empty() {
                let (now, later) = left.split_at(rng.random_range(1..=left.len().min(9)));
                let whole = cutter.push(Bytes::copy_from_slice(now));
                assert!(whole.is_empty() || whole.ends_with(end.as_bytes()), "{whole:?}");
                out.extend_from_slice(&whole);
                left = later;
            }
            assert!(!cutter.is_inside());
            assert_eq!(out, stream.as_bytes());
        }
    }

    #[test]
    fn a_half_event_is_dropped_before_an_error() {
        let mut cutter = EventCutter::default();
        assert_eq!(cutter.push(Bytes::from("data: 1\n\ndata: 2")), "data: 1\n\n");
        assert!(cutter.is_inside());
        assert_eq!(cutter.close(), b"");
        assert!(!cutter.is_inside());
    }

    #[test]
    fn an_endless_event_is_passed_on_and_then_closed() {
        let mut cutter = EventCutter::default();
        let chunk = Bytes::from(vec![b'x'; MAX_HELD_BYTES / 2 + 1]);
        assert!(cutter.push(chunk.clone()).is_empty());
        assert_eq!(cutter.push(chunk).len(), MAX_HELD_BYTES + 2);
        assert!(cutter.is_inside());
        assert_eq!(cutter.close(), b"\n\n");
    }
}
