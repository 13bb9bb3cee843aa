//! How errors of the core crates become Python exceptions.

use pyo3::PyErr;
use pyo3::create_exception;
use pyo3::exceptions::{PyException, PyValueError};

create_exception!(
    trunkline._core,
    CoreError,
    PyException,
    "The core was given something it cannot use (a malformed message, a wrong step)."
);
create_exception!(
    trunkline._core,
    IntegrityError,
    CoreError,
    "An invariant of the scheduler or the prefix tree does not hold: a bug."
);

create_exception!(
    trunkline._core,
    RouterError,
    PyException,
    "The router cannot choose or start, or knows no such worker or setting."
);

/// Any error of a method of this module.
pub(crate) enum Error {
    Scheduler(scheduler::Error),
    Integrity(scheduler::IntegrityError),
    Cpu(cpu::CpuError),
    Router(router::core::RouterError),
    Serve(router::proxy::ServeError),
    Fleet(router::sim::SimError),
    Python(PyErr),
    /// An abort that selects neither by client, nor by client and key, nor by rid, nor everything.
    Selection,
}

impl From<scheduler::Error> for Error {
    fn from(error: scheduler::Error) -> Self {
        Self::Scheduler(error)
    }
}

impl From<scheduler::IntegrityError> for Error {
    fn from(error: scheduler::IntegrityError) -> Self {
        Self::Integrity(error)
    }
}

impl From<cpu::CpuError> for Error {
    fn from(error: cpu::CpuError) -> Self {
        Self::Cpu(error)
    }
}

impl From<router::core::RouterError> for Error {
    fn from(error: router::core::RouterError) -> Self {
        Self::Router(error)
    }
}

impl From<router::proxy::ServeError> for Error {
    fn from(error: router::proxy::ServeError) -> Self {
        Self::Serve(error)
    }
}

impl From<router::sim::SimError> for Error {
    fn from(error: router::sim::SimError) -> Self {
        Self::Fleet(error)
    }
}

impl From<PyErr> for Error {
    fn from(error: PyErr) -> Self {
        Self::Python(error)
    }
}

impl From<Error> for PyErr {
    fn from(error: Error) -> Self {
        match error {
            Error::Scheduler(error) => CoreError::new_err(error.to_string()),
            Error::Integrity(error) => IntegrityError::new_err(error.to_string()),
            Error::Cpu(error) => PyValueError::new_err(error.to_string()),
            Error::Router(error) => RouterError::new_err(error.to_string()),
            Error::Serve(error) => RouterError::new_err(error.to_string()),
            Error::Fleet(error) => PyValueError::new_err(error.to_string()),
            Error::Python(error) => error,
            Error::Selection => CoreError::new_err(
                "abort takes a client, a client and a key, a rid, or nothing (everything)",
            ),
        }
    }
}
