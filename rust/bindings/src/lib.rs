//! `trunkline._core`: the only crate that knows Python.

mod buffers;
mod core;
mod cpu;
mod error;
mod fleet;
mod router;

/// The extension module.
#[pyo3::pymodule(gil_used = false)]
mod _core {
    #[pymodule_export]
    use crate::core::Core;
    #[pymodule_export]
    use crate::cpu::{
        CpuAttentionBench, CpuLinearBench, CpuModel, CpuPopulation, cpu_block_kinds, cpu_isas,
    };
    #[pymodule_export]
    use crate::error::{CoreError, IntegrityError, RouterError};
    #[pymodule_export]
    use crate::fleet::{shared_prefix_trace, simulate_fleet};
    #[pymodule_export]
    use crate::router::{Router, serve_router};

    #[pymodule_export]
    /// Version of the Rust core, equal to the wheel's.
    const VERSION: &str = env!("CARGO_PKG_VERSION");
}
