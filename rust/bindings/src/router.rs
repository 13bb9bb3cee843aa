//! `Router`: the choice of a worker, behind one lock.

use std::sync::{Mutex, MutexGuard};

use pyo3::prelude::*;
use pyo3::types::PyDict;
use router::core as choice;
use router::core::{Outcome, Prompt, RouterError, Selection, TicketId, WorkerId, WorkerState};

use router::proxy;

use crate::buffers;
use crate::error::Error;

/// `engine-router` from its settings to its end. `_core.pyi` documents it.
#[pyfunction]
pub(crate) fn serve_router(py: Python<'_>, config: &[u8]) -> Result<(), Error> {
    let serve = || proxy::Server::bind(proxy::Config::from_json(config)?)?.run();
    Ok(py.detach(serve)?)
}

/// Chooses workers. `_core.pyi` documents it.
#[pyclass(frozen, module = "trunkline._core")]
pub(crate) struct Router {
    router: Mutex<choice::Router>,
    block_tokens: usize,
}

impl Router {
    /// The router. Nobody waits for the GIL while holding the lock.
    fn lock(&self) -> MutexGuard<'_, choice::Router> {
        self.router.lock().expect("the router is unusable: it panicked in an earlier call")
    }

    fn shape(&self) -> choice::BlockShape {
        choice::BlockShape { bytes: 4 * self.block_tokens, tokens: self.block_tokens as u32 }
    }
}

#[pymethods]
impl Router {
    #[new]
    #[pyo3(signature = (config, block_tokens=16))]
    fn new(config: &[u8], block_tokens: usize) -> Result<Self, Error> {
        if block_tokens == 0 {
            return Err(RouterError::Config("block_tokens must be at least 1".to_owned()).into());
        }
        let config = choice::Config::from_json(config)?;
        Ok(Self { router: Mutex::new(choice::Router::new(config)), block_tokens })
    }

    fn add_worker(&self, name: &str, capacity_tokens: usize) -> Result<u32, Error> {
        let options = choice::WorkerOptions {
            name,
            capacity_blocks: capacity_tokens / self.block_tokens,
            state: WorkerState::Ready,
        };
        Ok(self.lock().add_worker(&options)?.0)
    }

    fn remove_worker(&self, worker: u32) -> Result<(), Error> {
        Ok(self.lock().remove_worker(WorkerId(worker))?)
    }

    fn set_ready(&self, worker: u32, ready: bool) -> Result<(), Error> {
        let state = if ready { WorkerState::Ready } else { WorkerState::Down };
        Ok(self.lock().set_state(WorkerId(worker), state)?)
    }

    fn forget_cache(&self, worker: u32) -> Result<(), Error> {
        Ok(self.lock().forget_cache(WorkerId(worker))?)
    }

    #[pyo3(signature = (token_ids, now, *, namespace=None, only=None, exclude=Vec::new(), session=None))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python method")]
    fn select(
        &self,
        token_ids: &Bound<'_, PyAny>,
        now: f64,
        namespace: Option<&[u8]>,
        only: Option<Vec<u32>>,
        exclude: Vec<u32>,
        session: Option<&[u8]>,
    ) -> Result<(u32, u64, u64), Error> {
        let exclude: Vec<_> = exclude.into_iter().map(WorkerId).collect();
        let only: Option<Vec<_>> = only.map(|ids| ids.into_iter().map(WorkerId).collect());
        let selection = Selection { exclude: &exclude, only: only.as_deref(), session };
        let chosen = buffers::read(token_ids, |bytes| {
            let num_tokens = bytes.len() as u64 / 4;
            let prompt =
                Prompt::new(bytes, num_tokens, self.shape(), namespace.unwrap_or_default());
            self.lock().select(&prompt, &selection, now)
        })??;
        Ok((chosen.worker.0, chosen.ticket.0, chosen.cached_tokens))
    }

    fn started(&self, ticket: u64) {
        self.lock().started(TicketId(ticket));
    }

    fn finished(&self, ticket: u64, outcome: &str, now: f64) -> Result<(), Error> {
        let outcome = Outcome::from_name(outcome)?;
        self.lock().finished(TicketId(ticket), outcome, now);
        Ok(())
    }

    #[pyo3(signature = (worker, now, *, running, waiting, waiting_uncached_tokens, kv_used))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python method")]
    fn report(
        &self,
        worker: u32,
        now: f64,
        running: u64,
        waiting: u64,
        waiting_uncached_tokens: u64,
        kv_used: f64,
    ) -> Result<(), Error> {
        let report = choice::Report { running, waiting, waiting_uncached_tokens, kv_used };
        Ok(self.lock().report(WorkerId(worker), report, now)?)
    }

    fn loads<'py>(&self, py: Python<'py>) -> Result<Vec<Bound<'py, PyDict>>, Error> {
        let router = self.lock();
        let view = |worker: &choice::Worker| {
            let dict = PyDict::new(py);
            dict.set_item("worker", worker.id.0)?;
            dict.set_item("ready", worker.state == WorkerState::Ready)?;
            dict.set_item("in_flight", worker.load.in_flight())?;
            dict.set_item("running", worker.load.running())?;
            dict.set_item("prefill_tokens", worker.load.prefill_tokens())?;
            dict.set_item("selected", worker.selected)?;
            Ok(dict)
        };
        router.workers().map(view).collect::<PyResult<_>>().map_err(Error::from)
    }
}
