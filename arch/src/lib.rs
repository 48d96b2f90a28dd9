//! What a model is made of: families, blocks, variants, and how they are counted.
//!
//! A model is an embedding, a flat list of residual [`Block`]s, a final norm and a head. A Llama layer
//! is two blocks; a Nemotron-H layer is one. Here live the shapes and everything that follows from
//! shapes alone: tensors and their names, parameters, bytes, state, FLOPs, and the Hugging Face config
//! in and out. No tensors, no runtime, and no I/O but config text that the caller has read.

mod architecture;
mod block;
mod candidate;
mod config;
mod count;
mod error;
mod rope;
mod share;
mod tensors;

pub use architecture::{Architecture, Family};
pub use block::{Activation, Attention, Block, BlockKind, BlockShape, Mamba2, Mlp, Moe};
pub use candidate::{Candidate, Variant};
pub use count::{Component, ComponentWeights, Parameters, Precision, Storage, WeightFormat};
pub use error::{Error, Result};
pub use rope::{Rope, RopeScaling};
pub use tensors::{Part, Role, TensorSpec};
