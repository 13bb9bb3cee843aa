//! The body of a request: read to its end even where the answer does not depend on it.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::Request;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::header::EXPECT;
use tokio::runtime::Handle;
use tokio::time::timeout;

/// Time in which a client that is still sending may finish and see that it was refused.
const LINGER: Duration = Duration::from_secs(30);

/// What a client sends.
///
/// Dropped before its end, it is read on and thrown away for `LINGER`. Closing a socket with unread
/// bytes resets the connection, and most clients read nothing before they have sent everything:
/// they would see a broken connection instead of the answer that says why.
pub(super) struct RequestBody {
    incoming: Option<Incoming>,
    /// The client sends nothing before it is told to, which reading it does.
    waits: bool,
}

impl RequestBody {
    /// The request with its body wrapped.
    pub(super) fn wrap(request: Request<Incoming>) -> Request<Self> {
        let waits = request.headers().contains_key(EXPECT);
        request.map(|incoming| Self { incoming: Some(incoming), waits })
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        self.waits = false;
        let Some(incoming) = &mut self.incoming else { return Poll::Ready(None) };
        let frame = Pin::new(incoming).poll_frame(context);
        if matches!(frame, Poll::Ready(None | Some(Err(_)))) {
            self.incoming = None;
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.incoming.as_ref().is_none_or(Incoming::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.incoming.as_ref().map_or_else(|| SizeHint::with_exact(0), Incoming::size_hint)
    }
}

impl Drop for RequestBody {
    fn drop(&mut self) {
        let Some(mut incoming) = self.incoming.take() else { return };
        if self.waits || incoming.is_end_stream() {
            return;
        }
        // Without a runtime the router is stopping, and its connections with it.
        let Ok(runtime) = Handle::try_current() else { return };
        runtime.spawn(timeout(
            LINGER,
            async move { while let Some(Ok(_)) = incoming.frame().await {} },
        ));
    }
}
