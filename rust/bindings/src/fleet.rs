//! The fleet simulator: JSON in, JSON out.

use pyo3::prelude::*;
use router::sim::{Fleet, FleetConfig, SharedPrefix, SimError, Trace};

use crate::error::Error;

/// Serves a trace with a simulated fleet. `_core.pyi` documents it.
#[pyfunction]
pub(crate) fn simulate_fleet(py: Python<'_>, config: &[u8], trace: &str) -> Result<Vec<u8>, Error> {
    let simulate = || -> Result<Vec<u8>, SimError> {
        let config = FleetConfig::from_json(config)?;
        let trace = Trace::parse(trace, config.block_tokens)?;
        Ok(Fleet::new(config, &trace)?.run().summary.to_json())
    };
    Ok(py.detach(simulate)?)
}

/// Makes a trace. `_core.pyi` documents it.
#[pyfunction]
pub(crate) fn shared_prefix_trace(py: Python<'_>, config: &[u8]) -> Result<String, Error> {
    Ok(py.detach(|| SharedPrefix::from_json(config).map(|made| made.trace().to_lines()))?)
}
