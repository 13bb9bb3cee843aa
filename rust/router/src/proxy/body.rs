//! The body of an answer: the router's own, or the worker's handed on frame by frame.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use tokio::time::{Sleep, sleep};

use super::events::{Dialect, EventCutter};
use super::reports;
use super::state::{Counted, Flight};

/// Longest time between two looks at whether a silent worker is down.
const LOOK: Duration = Duration::from_secs(1);

/// What is sent to the client.
pub(super) struct AnswerBody {
    source: Source,
    /// In the count of requests until the answer is out.
    counted: Option<Counted>,
}

enum Source {
    Whole(Option<Bytes>),
    Worker(Box<WorkerBody>),
}

/// An error inside a worker's answer that is no event stream: the client's connection is closed.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct BrokenAnswer(String);

impl AnswerBody {
    pub(super) fn whole(bytes: impl Into<Bytes>) -> Self {
        let bytes = bytes.into();
        Self { source: Source::Whole(Some(bytes).filter(|bytes| !bytes.is_empty())), counted: None }
    }

    pub(super) fn worker(body: WorkerBody) -> Self {
        Self { source: Source::Worker(Box::new(body)), counted: None }
    }

    pub(super) fn counted(mut self, counted: Counted) -> Self {
        self.counted = Some(counted);
        self
    }
}

impl Body for AnswerBody {
    type Data = Bytes;
    type Error = BrokenAnswer;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BrokenAnswer>>> {
        match &mut self.source {
            Source::Whole(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Source::Worker(body) => body.poll(context),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.source {
            Source::Whole(bytes) => bytes.is_none(),
            Source::Worker(body) => body.ended,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.source {
            Source::Whole(bytes) => {
                SizeHint::with_exact(bytes.as_ref().map_or(0, Bytes::len) as u64)
            }
            Source::Worker(body) => body.size_hint(),
        }
    }
}

/// A worker's answer, which owns its place in the worker's load.
pub(super) struct WorkerBody {
    /// The frame that was waited for before the client got its headers.
    first: Option<Bytes>,
    incoming: Incoming,
    flight: Flight,
    /// For an event stream.
    events: Option<(Dialect, EventCutter)>,
    heard: Instant,
    timer: Pin<Box<Sleep>>,
    idle: Duration,
    cached_tokens: Option<u64>,
    ended: bool,
}

impl WorkerBody {
    pub(super) fn new(
        first: Option<Bytes>,
        incoming: Incoming,
        flight: Flight,
        events: Option<Dialect>,
    ) -> Self {
        let idle = Duration::from_secs_f64(flight.shared.config.idle_timeout_s);
        let ended = first.is_none() && incoming.is_end_stream();
        let mut body = Self {
            first,
            incoming,
            flight,
            events: events.map(|dialect| (dialect, EventCutter::default())),
            heard: Instant::now(),
            timer: Box::pin(sleep(idle.min(LOOK))),
            idle,
            cached_tokens: None,
            ended,
        };
        if ended {
            body.complete();
        }
        body
    }

    fn size_hint(&self) -> SizeHint {
        match (&self.events, &self.first) {
            (Some(_), _) => SizeHint::default(),
            (None, first) => {
                let first = first.as_ref().map_or(0, Bytes::len) as u64;
                let hint = self.incoming.size_hint();
                hint.exact()
                    .map_or_else(SizeHint::default, |rest| SizeHint::with_exact(rest + first))
            }
        }
    }

    fn poll(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BrokenAnswer>>> {
        loop {
            if self.ended {
                return Poll::Ready(None);
            }
            if let Some(first) = self.first.take() {
                if let Some(out) = self.pass(first) {
                    return Poll::Ready(Some(Ok(Frame::data(out))));
                }
                continue;
            }
            match Pin::new(&mut self.incoming).poll_frame(context) {
                Poll::Ready(Some(Ok(frame))) => {
                    self.heard = Instant::now();
                    self.flight.shared.heard(&self.flight.endpoint);
                    match frame.into_data() {
                        Ok(data) => {
                            if let Some(out) = self.pass(data) {
                                return Poll::Ready(Some(Ok(Frame::data(out))));
                            }
                        }
                        Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
                    }
                }
                Poll::Ready(Some(Err(_))) => {
                    return self.break_off("broken", "the worker broke off its answer");
                }
                Poll::Ready(None) => return self.end(),
                Poll::Pending => {
                    ready!(self.timer.as_mut().poll(context));
                    let silent = self.heard.elapsed();
                    if silent >= self.idle {
                        return self.break_off("timeout", "the worker has stopped sending");
                    }
                    if self.flight.endpoint.is_down() && silent >= LOOK.min(self.idle) {
                        return self.break_off("lost", "the worker no longer answers");
                    }
                    let next =
                        tokio::time::Instant::now() + self.idle.saturating_sub(silent).min(LOOK);
                    self.timer.as_mut().reset(next);
                }
            }
        }
    }

    /// What of a frame the client gets now.
    fn pass(&mut self, data: Bytes) -> Option<Bytes> {
        if let Some(cached) = reports::cached_tokens(&data) {
            self.cached_tokens = Some(cached);
        }
        let out = match &mut self.events {
            Some((_, cutter)) => cutter.push(data),
            None => data,
        };
        if self.events.is_none() && self.incoming.is_end_stream() {
            self.complete();
        }
        Some(out).filter(|out| !out.is_empty())
    }

    /// The worker closed its answer properly, as far as HTTP goes.
    fn end(&mut self) -> Poll<Option<Result<Frame<Bytes>, BrokenAnswer>>> {
        if self.events.as_ref().is_some_and(|(_, cutter)| cutter.is_inside()) {
            return self.break_off("broken", "the worker broke off its answer");
        }
        let rest = self.events.as_mut().map(|(_, cutter)| cutter.rest());
        self.complete();
        let rest = rest.filter(|rest| !rest.is_empty());
        Poll::Ready(rest.map(|rest| Ok(Frame::data(rest))))
    }

    fn complete(&mut self) {
        self.ended = true;
        self.flight.complete();
        if let Some(reported) = self.cached_tokens.take() {
            let metrics = &self.flight.shared.metrics;
            metrics.reported_cached_tokens.inc_by(reported);
            metrics.predicted_cached_tokens.inc_by(self.flight.choice.cached_tokens);
        }
    }

    /// The worker failed after the client got its headers: nothing can be tried again.
    fn break_off(
        &mut self,
        reason: &str,
        message: &str,
    ) -> Poll<Option<Result<Frame<Bytes>, BrokenAnswer>>> {
        self.ended = true;
        self.flight.fail(reason);
        let Some((dialect, cutter)) = &mut self.events else {
            return Poll::Ready(Some(Err(BrokenAnswer(message.to_owned()))));
        };
        self.flight.shared.metrics.broken_streams.inc();
        let event = [cutter.close(), &dialect.error_event(message)].concat();
        Poll::Ready(Some(Ok(Frame::data(Bytes::from(event)))))
    }
}
