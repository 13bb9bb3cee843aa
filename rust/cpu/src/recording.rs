//! Programs as plain data, as the bindings receive them.

use crate::error::CpuError;
use crate::kernels::rows::Activation;
use crate::program::{Attend, Buffer, Head, Operation, Output};

/// A name and its numbers; None is "no such thing".
pub type Record = (String, Vec<Option<usize>>);

/// A recorded program.
///
/// Buffers are `("wide", "operand" or "quantised", width)`; operations a name and the numbers of
/// weights and buffers in the order in which `operation` reads them, with activations as 0 (silu) or 1
/// (gelu by tanh) and floats as the bits of a float32.
#[derive(Clone, Debug)]
pub struct Recording {
    /// Buffers by number.
    pub buffers: Vec<(String, usize)>,
    /// Operations in their order.
    pub operations: Vec<Record>,
    /// Buffer of the hidden states, norm and linear of the head; the soft cap of its logits.
    pub head: (usize, usize, usize, Option<usize>),
}

impl Recording {
    pub(crate) fn parse(&self) -> Result<(Vec<Buffer>, Vec<Operation>, Head), CpuError> {
        let buffers = self.buffers.iter().map(|(kind, width)| match kind.as_str() {
            "wide" => Ok(Buffer::Wide(*width)),
            "operand" => Ok(Buffer::Operand(*width)),
            "quantised" => Ok(Buffer::Quantised(*width)),
            _ => Err(CpuError::invalid(format!("a program has no {kind:?} buffers"))),
        });
        let operations = self.operations.iter().map(operation);
        let (hidden, norm, linear, soft_cap) = self.head;
        Ok((
            buffers.collect::<Result<_, _>>()?,
            operations.collect::<Result<_, _>>()?,
            Head { hidden, norm, linear, soft_cap: soft_cap.map(float) },
        ))
    }
}

fn float(bits: usize) -> f32 {
    f32::from_bits(bits as u32)
}

fn activation(kind: usize) -> Result<Activation, CpuError> {
    match kind {
        0 => Ok(Activation::Silu),
        1 => Ok(Activation::GeluTanh),
        _ => Err(CpuError::invalid(format!("a program has no activation {kind}"))),
    }
}

fn operation((name, numbers): &Record) -> Result<Operation, CpuError> {
    match (name.as_str(), numbers.as_slice()) {
        ("embed", &[Some(table), Some(to)]) => Ok(Operation::Embed { table, to }),
        ("norm", &[Some(from), Some(norm), Some(to)]) => Ok(Operation::Norm { from, norm, to }),
        ("round", &[Some(from), Some(to)]) => Ok(Operation::Round { from, to }),
        ("quantise", &[Some(from), Some(to)]) => Ok(Operation::Quantise { from, to }),
        ("norm_add", &[Some(from), Some(norm), Some(to)]) => {
            Ok(Operation::NormAdd { from, norm, to })
        }
        ("gated", &[Some(from), Some(kind), Some(to)]) => {
            Ok(Operation::Gated { from, to, activation: activation(kind)? })
        }
        ("linear", &[Some(from), Some(weight), Some(to)]) => {
            Ok(Operation::Linear { from, weight, output: Output::Store(to) })
        }
        ("linear_add", &[Some(from), Some(weight), Some(to)]) => {
            Ok(Operation::Linear { from, weight, output: Output::Add(to) })
        }
        ("linear_gated", &[Some(from), Some(weight), Some(kind), Some(to)]) => {
            Ok(Operation::Linear { from, weight, output: Output::Gated(to, activation(kind)?) })
        }
        (
            "attend",
            &[
                Some(qkv),
                Some(to),
                Some(layer),
                Some(num_heads),
                Some(num_kv_heads),
                Some(head_dim),
                window,
                Some(scale),
                soft_cap,
                sinks,
                Some(rotary),
                query_norm,
                key_norm,
            ],
        ) if query_norm.is_some() == key_norm.is_some() => Ok(Operation::Attend(Attend {
            qkv,
            to,
            layer,
            num_heads,
            num_kv_heads,
            head_dim,
            window,
            scale: float(scale),
            soft_cap: soft_cap.map(float),
            sinks,
            rotary,
            norms: query_norm.zip(key_norm),
        })),
        _ => Err(CpuError::invalid(format!("a program has no operation {name} of {numbers:?}"))),
    }
}
