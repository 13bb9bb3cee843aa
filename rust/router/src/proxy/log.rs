//! Lines on standard error.

use std::fmt::Display;
use std::io::Write;

use jiff::Zoned;

/// Writes one line with the local time, as the server's log does. That standard error may be closed is nobody's concern.
pub(super) fn line(text: impl Display) {
    let now = Zoned::now().strftime("%Y-%m-%d %H:%M:%S");
    let _ = writeln!(std::io::stderr().lock(), "[{now}] engine-router: {text}");
}
