//! Tensors: operations, checkpoints, blocks forward and backward, decoding, importance, losses, export.

pub mod block;
pub mod checkpoint;
pub mod collective;
pub mod decode;
mod error;
pub mod export;
mod files;
pub mod importance;
pub mod ops;
pub mod runner;
pub mod sort;
mod tensor;
pub mod tokenizer;
pub mod train;
pub mod weights;

pub use error::{Error, Result};
pub use tensor::{Device, ElementType, Elements, Tensor};
pub use weights::{AttentionWeights, BlockWeights, MlpWeights, Model, StageWeights};
