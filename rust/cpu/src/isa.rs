//! Which instructions the kernels use: chosen once, by what the processor has.

use std::fmt;
use std::str::FromStr;

use crate::error::CpuError;

/// An instruction set that the kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// AVX-512 with its dot products of bfloat16 and of bytes.
    Avx512Bf16,
    /// AVX2, FMA and F16C.
    Avx2,
    /// Plain Rust, whatever the processor.
    Portable,
}

impl Isa {
    /// All of them, fastest first.
    pub const ALL: [Isa; 3] = [Isa::Avx512Bf16, Isa::Avx2, Isa::Portable];

    /// Whether this processor has the instructions.
    pub fn is_available(self) -> bool {
        match self {
            Isa::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512bf16")
                    && is_x86_feature_detected!("avx512vnni")
            }
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        }
    }

    /// The fastest that this processor has.
    pub fn best() -> Isa {
        Isa::ALL.into_iter().find(|isa| isa.is_available()).unwrap_or(Isa::Portable)
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Isa::Avx512Bf16 => "avx512_bf16",
            Isa::Avx2 => "avx2",
            Isa::Portable => "portable",
        })
    }
}

impl FromStr for Isa {
    type Err = CpuError;

    /// Parse a name and check that the processor has the instructions.
    fn from_str(name: &str) -> Result<Isa, CpuError> {
        let isa = Isa::ALL
            .into_iter()
            .find(|isa| isa.to_string() == name)
            .ok_or_else(|| CpuError::UnknownIsa(name.to_owned()))?;
        if isa.is_available() { Ok(isa) } else { Err(CpuError::MissingIsa(isa)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_unknown_ones_are_refused() {
        for isa in Isa::ALL {
            match isa.to_string().parse::<Isa>() {
                Ok(parsed) => assert_eq!(parsed, isa),
                Err(error) => assert!(!isa.is_available(), "{error}"),
            }
        }
        assert!("sse9".parse::<Isa>().is_err());
        assert!(Isa::best().is_available());
    }
}
