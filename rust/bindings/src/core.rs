//! `Core`: the scheduler behind one lock.

use std::sync::{Mutex, MutexGuard};

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use scheduler::{Config, Scheduler, Target, Unready};

use crate::buffers;
use crate::error::Error;

/// One engine's scheduler. `_core.pyi` documents it.
#[pyclass(frozen, module = "trunkline._core")]
pub(crate) struct Core(Mutex<Scheduler>);

impl Core {
    /// The scheduler. Nobody waits for the GIL while holding the lock.
    fn lock(&self) -> MutexGuard<'_, Scheduler> {
        self.0.lock().expect("the core is unusable: it panicked in an earlier call")
    }
}

#[pymethods]
impl Core {
    #[new]
    fn new(py: Python<'_>, config: &[u8]) -> Result<Self, Error> {
        let build = || Config::from_json(config).and_then(Scheduler::new);
        Ok(Self(Mutex::new(py.detach(build)?)))
    }

    fn submit(
        &self,
        py: Python<'_>,
        client: i64,
        message: &[u8],
        now: f64,
    ) -> Result<Option<u64>, Error> {
        Ok(py.detach(|| self.lock().submit(client, message, now))?)
    }

    #[pyo3(signature = (request, error=None, *, is_fault=false))]
    fn ready(&self, py: Python<'_>, request: u64, error: Option<&str>, is_fault: bool) {
        let kind = if is_fault { Unready::Unavailable } else { Unready::Invalid };
        py.detach(|| self.lock().ready(request, error.map(kind)));
    }

    fn is_live(&self, py: Python<'_>, request: u64) -> bool {
        py.detach(|| self.lock().is_live(request))
    }

    fn abort(
        &self,
        py: Python<'_>,
        client: Option<i64>,
        key: Option<u64>,
        rid: Option<&str>,
    ) -> Result<usize, Error> {
        let target = match (client, key, rid) {
            (Some(client), Some(key), None) => Target::Key(client, key),
            (Some(client), None, None) => Target::Client(client),
            (None, None, Some(rid)) => Target::Rid(rid),
            (None, None, None) => Target::All,
            _ => return Err(Error::Selection),
        };
        Ok(py.detach(|| self.lock().abort(target)))
    }

    fn plan(&self, now: f64, arena: &Bound<'_, PyAny>) -> Result<Option<u64>, Error> {
        Ok(buffers::write(arena, |bytes| self.lock().plan(now, bytes))??)
    }

    fn commit(&self, now: f64, result: &Bound<'_, PyAny>) -> Result<(), Error> {
        Ok(buffers::read(result, |bytes| self.lock().commit(now, bytes))??)
    }

    fn take_events<'py>(&self, py: Python<'py>) -> Vec<(i64, Bound<'py, PyBytes>)> {
        let events = py.detach(|| self.lock().take_events());
        events.into_iter().map(|(client, bytes)| (client, PyBytes::new(py, &bytes))).collect()
    }

    fn take_entered(&self, py: Python<'_>) -> Vec<(i64, u64)> {
        py.detach(|| self.lock().take_entered())
    }

    fn has_work(&self, py: Python<'_>) -> bool {
        py.detach(|| self.lock().has_work())
    }

    fn next_deadline(&self, py: Python<'_>) -> Option<f64> {
        py.detach(|| self.lock().next_deadline())
    }

    fn flush_cache(&self, py: Python<'_>) -> bool {
        py.detach(|| self.lock().flush_cache())
    }

    fn set_weight_epoch(&self, py: Python<'_>, epoch: u64) -> bool {
        py.detach(|| self.lock().set_weight_epoch(epoch))
    }

    fn stats<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyDict>, Error> {
        let stats = py.detach(|| self.lock().stats());
        let dict = PyDict::new(py);
        for (name, value) in stats {
            dict.set_item(name, value)?;
        }
        Ok(dict)
    }

    fn check_integrity(&self, py: Python<'_>) -> Result<(), Error> {
        Ok(py.detach(|| self.lock().check_integrity())?)
    }
}
