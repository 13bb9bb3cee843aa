//! What a caller can do wrong.

use crate::isa::Isa;

/// Why the backend refuses.
#[derive(Debug, thiserror::Error)]
pub enum CpuError {
    /// The name of the instruction set is unknown.
    #[error("instruction set {0:?} is unknown; use avx512_bf16, avx2 or portable")]
    UnknownIsa(String),
    /// The processor lacks the instruction set.
    #[error("this processor does not have {0}; unset TRUNKLINE_CPU_ISA to use what it has")]
    MissingIsa(Isa),
    /// A value does not fit the model or the program.
    #[error("{0}")]
    Invalid(String),
}

impl CpuError {
    pub(crate) fn invalid(message: impl Into<String>) -> CpuError {
        CpuError::Invalid(message.into())
    }
}
