//! Tensors: operations, checkpoints, blocks forward and backward, decoding, importance, losses, export.

mod error;
pub mod ops;
mod tensor;

pub use error::{Error, Result};
pub use tensor::{Device, Tensor};
