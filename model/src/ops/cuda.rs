//! The CUDA backend: devices, memory, kernels and matrix products of NVIDIA GPUs from Ampere on.
//!
//! Nothing of CUDA is needed to build this or to start a program that holds it: the driver, the compiler and
//! cuBLASLt are opened when a device is. Kernels are our own (`kernels/`), compiled for the device that is there
//! and kept on disk; matrix products are cuBLASLt's. Activations and the weights that products read are bf16,
//! sums, statistics, gradients of weights, master weights and moments f32.
//!
//! [`CudaOperations`] is the operation set: it makes the results and calls the methods of [`CudaDevice`]. Each of
//! those checks its operands, queues its kernels on the device's compute stream and returns; only downloads and
//! [`CudaDevice::wait`] wait, with a deadline, after which the device is given up. No kernel uses atomics: the same
//! operands give the same bits.

mod arena;
mod attention;
mod beside;
mod cache;
mod catalogue;
mod columns;
mod cublas;
mod decode;
mod device;
mod driver;
mod elementwise;
mod embedding;
mod error;
mod graph;
mod kernel;
mod launch;
mod library;
mod loss;
mod matmul;
mod matrix;
mod memory;
mod nccl;
mod norm;
mod nvrtc;
mod operations;
mod optimiser;
mod rope;
mod self_check;
mod source;
mod stream;
mod transfer;

pub use arena::Usage;
pub use attention::{AttentionGradients, AttentionInputs, AttentionShape, CachedKeys};
pub(crate) use beside::Beside;
pub use catalogue::{KernelNeeds, KernelReport, compile_all};
pub use decode::{DecodeCache, FewRows};
pub use device::{CudaDevice, DeviceInfo, Options, Survey, Surveyed, discover};
pub use embedding::DeviceTokens;
pub use error::{Error, Result, Version};
pub use graph::Graph;
pub use library::{REQUIRED, SEARCH_VARIABLE};
pub use loss::LogitGradient;
pub use matmul::Onto;
pub use matrix::{Element, Matrix};
pub use nccl::nccl_version;
pub(crate) use nccl::{Id, Link};
pub use norm::NormResidual;
pub use operations::CudaOperations;
pub use optimiser::{CudaParameter, CudaStep, Optimiser};
pub use rope::{RopeAngles, Rotation};
pub use stream::{Mark, Stream};

/// 8 where every operand allows accesses of 8 elements, else 1: what kernels call VECTOR.
fn vector_width(operands: &[Option<&Matrix>]) -> u32 {
    if operands.iter().flatten().all(|operand| operand.allows_vectors()) {
        8
    } else {
        1
    }
}

/// Blocks of 256 threads for one thread each.
fn blocks_of(threads: usize) -> usize {
    threads.div_ceil(256)
}
