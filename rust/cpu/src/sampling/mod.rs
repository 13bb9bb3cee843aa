//! Drawing tokens and computing log-probs, by the reference backend's rules.

mod draw;
mod logprobs;
mod philox;
mod slots;

pub(crate) use draw::{Drawn, Selection, draw, process};
pub(crate) use logprobs::top;
pub(crate) use philox::{MAX_NOISE, Noise, gumbel, philox};
pub(crate) use slots::{SlotSampling, SlotStates};
