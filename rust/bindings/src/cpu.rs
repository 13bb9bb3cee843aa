//! `CpuModel`: weights, and then a recorded program, of the CPU kernels behind one lock.

use std::sync::{Mutex, MutexGuard};

use cpu::measure::{AttentionBench, AttentionShape, LinearBench};
use cpu::{
    BlockKind, CpuError, Element, Isa, KvSpec, Population, Record, Recording, Session,
    SessionSizes, Source, Storage, ThreadPool, Weights,
};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::buffers;
use crate::error::Error;

/// What a model is at the moment.
enum State {
    Building(Box<Weights>),
    Running(Box<Session>),
    /// Its program was refused.
    Unusable,
}

impl State {
    fn weights(&mut self) -> Result<&mut Weights, CpuError> {
        match self {
            State::Building(weights) => Ok(weights),
            State::Running(session) => Ok(session.weights()),
            State::Unusable => Err(CpuError::Invalid("the model's program was refused".into())),
        }
    }

    fn session(&mut self) -> Result<&mut Session, CpuError> {
        match self {
            State::Running(session) => Ok(session),
            _ => Err(CpuError::Invalid("the model has no program yet".into())),
        }
    }
}

/// A model on the CPU. `_core.pyi` documents it.
#[pyclass(frozen, module = "trunkline._core")]
pub(crate) struct CpuModel(Mutex<State>, Element);

fn element(dtype: &str) -> Result<Element, CpuError> {
    match dtype {
        "bfloat16" => Ok(Element::Bf16),
        "float32" => Ok(Element::F32),
        _ => Err(CpuError::Invalid(format!(
            "the CPU kernels do not compute in {dtype}; use bfloat16 or float32"
        ))),
    }
}

fn isa(name: Option<&str>) -> Result<Isa, CpuError> {
    name.map_or_else(|| Ok(Isa::best()), str::parse)
}

impl CpuModel {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("the model is unusable: it panicked in an earlier call")
    }

    fn with<T>(&self, work: impl FnOnce(&mut Weights) -> Result<T, CpuError>) -> Result<T, Error> {
        Ok(self.lock().weights().and_then(work)?)
    }

    fn load(
        &self,
        tensor: &Bound<'_, PyAny>,
        work: impl FnOnce(&mut Weights, Source<'_>) -> Result<(), CpuError> + Send,
    ) -> Result<(), Error> {
        let load = |bytes: &[u8]| {
            self.lock().weights().and_then(|weights| work(weights, Source::new(self.1, bytes)))
        };
        Ok(buffers::read(tensor, load)??)
    }
}

#[pymethods]
impl CpuModel {
    #[new]
    #[pyo3(signature = (dtype, isa=None, num_threads=None, quantised=false))]
    fn new(
        dtype: &str,
        isa: Option<&str>,
        num_threads: Option<usize>,
        quantised: bool,
    ) -> Result<Self, Error> {
        let (element, isa) = (element(dtype)?, self::isa(isa)?);
        let num_threads = num_threads.unwrap_or_else(ThreadPool::available_threads);
        let storage = if quantised { Storage::Blocks } else { Storage::Dense };
        let weights = Weights::new(isa, element, storage, num_threads);
        Ok(Self(Mutex::new(State::Building(Box::new(weights))), element))
    }

    #[getter]
    fn isa(&self) -> Result<String, Error> {
        self.with(|weights| Ok(weights.isa().to_string()))
    }

    #[getter]
    fn num_threads(&self) -> Result<usize, Error> {
        self.with(|weights| Ok(weights.num_threads()))
    }

    #[pyo3(signature = (num_rows, width, scale=1.0))]
    fn add_embedding(&self, num_rows: usize, width: usize, scale: f32) -> Result<usize, Error> {
        self.with(|weights| Ok(weights.add_embedding(num_rows, width, scale)))
    }

    #[pyo3(signature = (width, epsilon, offset=0.0))]
    fn add_norm(&self, width: usize, epsilon: f32, offset: f32) -> Result<usize, Error> {
        self.with(|weights| Ok(weights.add_norm(width, epsilon, offset)))
    }

    fn add_sinks(&self, num_heads: usize) -> Result<usize, Error> {
        self.with(|weights| Ok(weights.add_sinks(num_heads)))
    }

    #[expect(clippy::needless_pass_by_value, reason = "a list cannot be borrowed from Python")]
    fn add_linear(
        &self,
        in_features: usize,
        parts: Vec<usize>,
        bias: bool,
    ) -> Result<usize, Error> {
        self.with(|weights| Ok(weights.add_linear(in_features, &parts, bias)))
    }

    fn add_rotary(&self, half: usize, cos: &[u8], sin: &[u8]) -> Result<usize, Error> {
        self.with(|weights| weights.add_rotary(half, cos, sin))
    }

    fn load_embedding(&self, index: usize, tensor: &Bound<'_, PyAny>) -> Result<(), Error> {
        self.load(tensor, |weights, source| weights.embedding(index)?.load(source))
    }

    fn load_norm(&self, index: usize, tensor: &Bound<'_, PyAny>) -> Result<(), Error> {
        self.load(tensor, |weights, source| weights.norm(index)?.load(source))
    }

    fn load_sinks(&self, index: usize, tensor: &Bound<'_, PyAny>) -> Result<(), Error> {
        self.load(tensor, |weights, source| weights.sinks(index)?.load(source))
    }

    #[pyo3(signature = (index, part, tensor, kind=None))]
    fn load_linear(
        &self,
        index: usize,
        part: usize,
        tensor: &Bound<'_, PyAny>,
        kind: Option<&str>,
    ) -> Result<(), Error> {
        let load = |weights: &mut Weights, bytes: &[u8]| {
            let linear = weights.linear(index)?;
            match kind.map(element) {
                None => linear.load_weight(part, Source::new(self.1, bytes)),
                Some(Ok(element)) => linear.load_weight(part, Source::new(element, bytes)),
                Some(Err(_)) => {
                    linear.load_blocks(part, BlockKind::named(kind.unwrap_or_default())?, bytes)
                }
            }
        };
        Ok(buffers::read(tensor, |bytes| {
            self.lock().weights().and_then(|weights| load(weights, bytes))
        })??)
    }

    fn load_bias(&self, index: usize, part: usize, tensor: &Bound<'_, PyAny>) -> Result<(), Error> {
        self.load(tensor, |weights, source| weights.linear(index)?.load_bias(part, source))
    }

    fn embedding_linear(&self, index: usize) -> Result<Option<usize>, Error> {
        self.with(|weights| Ok(weights.embedding(index)?.linear()))
    }

    fn embedding_bytes(&self, index: usize) -> Result<usize, Error> {
        self.with(|weights| Ok(weights.embedding(index)?.num_bytes()))
    }

    fn norm_bytes(&self, index: usize) -> Result<usize, Error> {
        self.with(|weights| Ok(weights.norm(index)?.num_bytes()))
    }

    fn sinks_bytes(&self, index: usize) -> Result<usize, Error> {
        self.with(|weights| Ok(weights.sinks(index)?.num_bytes()))
    }

    fn linear_bytes(&self, index: usize) -> Result<usize, Error> {
        self.with(|weights| Ok(weights.linear(index)?.num_bytes()))
    }

    fn can_fuse_gate(&self, index: usize) -> Result<bool, Error> {
        self.with(|weights| Ok(weights.linear(index)?.halves_are_panels()))
    }

    fn start(
        &self,
        buffers: Vec<(String, usize)>,
        operations: Vec<Record>,
        head: (usize, usize, usize, Option<usize>),
        kv: (usize, usize, usize, usize, usize),
        limits: (usize, usize),
    ) -> Result<(), Error> {
        let (num_layers, num_kv_heads, head_dim, num_pages, page_size) = kv;
        let kv = KvSpec { num_layers, num_kv_heads, head_dim, num_pages, page_size };
        let sizes = SessionSizes { kv, num_slots: limits.0, max_context_len: limits.1 };
        let mut state = self.lock();
        let State::Building(weights) = std::mem::replace(&mut *state, State::Unusable) else {
            return Err(CpuError::Invalid("the model has a program already".into()).into());
        };
        let recording = Recording { buffers, operations, head };
        *state = State::Running(Box::new(Session::new(*weights, sizes, &recording)?));
        Ok(())
    }

    #[getter]
    fn page_bytes(&self) -> Result<usize, Error> {
        Ok(self.lock().session()?.page_bytes())
    }

    #[getter]
    fn pool_bytes(&self) -> Result<usize, Error> {
        Ok(self.lock().session()?.pool_bytes())
    }

    fn population(&self) -> Result<CpuPopulation, Error> {
        Ok(CpuPopulation(Mutex::new(self.lock().session()?.population())))
    }

    fn forward(&self, arena: &Bound<'_, PyAny>) -> Result<(), Error> {
        Ok(buffers::read(arena, |bytes| self.lock().session().and_then(|s| s.forward(bytes)))??)
    }

    #[pyo3(signature = (step, masks=None))]
    fn sample<'py>(
        &self,
        py: Python<'py>,
        step: u64,
        masks: Option<&Bound<'py, PyAny>>,
    ) -> Result<Bound<'py, PyBytes>, Error> {
        let draw = |masks: Option<&[u8]>| self.lock().session().and_then(|s| s.sample(step, masks));
        let block = match masks {
            None => py.detach(|| draw(None)),
            Some(masks) => buffers::read(masks, |bytes| draw(Some(bytes)))?,
        };
        Ok(PyBytes::new(py, &block?))
    }
}

/// Memory of a KV pool, taken ahead. `_core.pyi` documents it.
#[pyclass(frozen, module = "trunkline._core")]
pub(crate) struct CpuPopulation(Mutex<Population>);

#[pymethods]
impl CpuPopulation {
    #[getter]
    fn num_bytes(&self) -> usize {
        self.lock().num_bytes()
    }

    #[getter]
    fn bytes_ahead(&self) -> usize {
        self.lock().bytes_ahead()
    }

    #[getter]
    fn idle_s(&self) -> f64 {
        self.lock().idle_time().map_or(f64::INFINITY, |time| time.as_secs_f64())
    }

    fn advance(&self, py: Python<'_>, num_bytes: usize) -> PyResult<bool> {
        Ok(py.detach(|| self.lock().advance(num_bytes))?)
    }
}

impl CpuPopulation {
    fn lock(&self) -> MutexGuard<'_, Population> {
        self.0.lock().expect("the population is unusable: it panicked in an earlier call")
    }
}

/// Measurements of the packed linears. `_core.pyi` documents it.
#[pyclass(frozen, module = "trunkline._core")]
pub(crate) struct CpuLinearBench(Mutex<LinearBench>);

#[pymethods]
impl CpuLinearBench {
    #[new]
    #[pyo3(signature = (dtype, shapes, isa=None, num_threads=None, blocks=None))]
    #[expect(clippy::needless_pass_by_value, reason = "a list cannot be borrowed from Python")]
    fn new(
        dtype: &str,
        shapes: Vec<(usize, usize)>,
        isa: Option<&str>,
        num_threads: Option<usize>,
        blocks: Option<&str>,
    ) -> Result<Self, Error> {
        let num_threads = num_threads.unwrap_or_else(ThreadPool::available_threads);
        let form = (element(dtype)?, blocks.map(BlockKind::named).transpose()?);
        let bench = LinearBench::new(self::isa(isa)?, form, num_threads, &shapes)?;
        Ok(Self(Mutex::new(bench)))
    }

    #[getter]
    fn num_bytes(&self) -> usize {
        self.lock().num_bytes()
    }

    fn linears(&self, py: Python<'_>, num_rows: usize) -> f64 {
        py.detach(|| self.lock().linears(num_rows))
    }

    fn streaming_read(&self, py: Python<'_>) -> f64 {
        py.detach(|| self.lock().streaming_read())
    }
}

impl CpuLinearBench {
    fn lock(&self) -> MutexGuard<'_, LinearBench> {
        self.0.lock().expect("the bench is unusable: it panicked in an earlier call")
    }
}

/// GGUF types that are packed as they are stored.
#[pyfunction]
pub(crate) fn cpu_block_kinds() -> Vec<&'static str> {
    BlockKind::names().collect()
}

/// Measurements of attention. `_core.pyi` documents it.
#[pyclass(frozen, module = "trunkline._core")]
pub(crate) struct CpuAttentionBench(Mutex<AttentionBench>);

#[pymethods]
impl CpuAttentionBench {
    #[new]
    #[pyo3(signature = (dtype, shape, num_tokens, isa=None, num_threads=None))]
    fn new(
        dtype: &str,
        shape: (usize, usize, usize, usize),
        num_tokens: usize,
        isa: Option<&str>,
        num_threads: Option<usize>,
    ) -> Result<Self, Error> {
        let (num_layers, num_heads, num_kv_heads, head_dim) = shape;
        let shape = AttentionShape { num_layers, num_heads, num_kv_heads, head_dim };
        let num_threads = num_threads.unwrap_or_else(ThreadPool::available_threads);
        let (isa, element) = (self::isa(isa)?, element(dtype)?);
        let bench = AttentionBench::new(isa, element, num_threads, shape, num_tokens)?;
        Ok(Self(Mutex::new(bench)))
    }

    #[expect(clippy::needless_pass_by_value, reason = "a list cannot be borrowed from Python")]
    fn attend(
        &self,
        py: Python<'_>,
        rows: Vec<(usize, usize)>,
        shared_tokens: usize,
    ) -> Result<f64, Error> {
        let lock = || self.0.lock().expect("the bench is unusable: it panicked in an earlier call");
        Ok(py.detach(|| lock().attend(&rows, shared_tokens))?)
    }
}

/// Instruction sets that this processor has, fastest first.
#[pyfunction]
pub(crate) fn cpu_isas() -> Vec<String> {
    Isa::ALL.into_iter().filter(|isa| isa.is_available()).map(|isa| isa.to_string()).collect()
}
