//! The kernels, and the table of their forms per instruction set and element type.

pub(crate) mod attention;
#[cfg(test)]
mod attention_tests;
mod block_linear;
#[cfg(test)]
mod block_linear_tests;
pub(crate) mod linear;
#[cfg(test)]
mod linear_tests;
pub(crate) mod quantise;
pub(crate) mod rotate;
pub(crate) mod rows;
pub(crate) mod scan;
mod streamed;
mod table;
mod tiles;

pub(crate) use table::Kernels;
