//! Lines on standard error.

use std::fmt::Display;
use std::io::Write;
use std::time::{SystemTime, UNIX_EPOCH};

/// Writes one line with the unix time. That standard error may be closed is nobody's concern.
pub(super) fn line(text: impl Display) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64());
    let _ = writeln!(std::io::stderr().lock(), "[{now:.3}] engine-router: {text}");
}
