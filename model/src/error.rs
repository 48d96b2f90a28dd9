//! What can go wrong with tensors and checkpoints.

use std::path::PathBuf;

use crate::tensor::{Device, ElementType};

/// What can go wrong with tensors and checkpoints.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Operands whose shapes disagree.
    #[error("{operation}: expected {expected}, found {found}")]
    Shape {
        /// The operation that was asked for.
        operation: &'static str,
        /// What would be right.
        expected: String,
        /// What was given.
        found: String,
    },
    /// A write to storage that another handle reads.
    #[error("the tensor's storage is shared with another handle and cannot be written")]
    SharedTensor,
    /// Elements that the host cannot read where they are.
    #[error(
        "the elements are {element_type} on {device}, expected f32 in the host's memory: download them first"
    )]
    NotOnHost {
        /// Where they are.
        device: Device,
        /// What they are.
        element_type: ElementType,
    },
    /// Elements that a GPU cannot read where they are.
    #[error("the elements are in the host's memory, expected on a CUDA device: upload them first")]
    NotOnDevice,
    /// A device that there is no backend for.
    #[error("there is no device {given:?}: expected cpu, cuda or cuda:0, cuda:1 and so on")]
    UnknownDevice {
        /// As given.
        given: String,
    },
    /// What went wrong on a GPU.
    #[error(transparent)]
    Cuda(#[from] crate::ops::cuda::Error),
    /// What went wrong between ranks.
    #[error(transparent)]
    Gang(#[from] crate::collective::Error),
    /// Elements that a backend has no room for.
    #[error("the CPU backend holds f32 only, not {element_type}")]
    ElementType {
        /// What was asked for.
        element_type: ElementType,
    },
    /// A shape that does not follow from its parent's.
    #[error(transparent)]
    Architecture(#[from] espalier_arch::Error),
    /// A kind of block whose tensors are not implemented.
    #[error("{kind:?} blocks can be counted but not run yet")]
    UnsupportedBlock {
        /// The kind.
        kind: espalier_arch::BlockKind,
    },
    /// Weights of one kind used with a shape of another.
    #[error("a block of kind {expected:?} cannot take a shape of kind {found:?}")]
    BlockKind {
        /// Of the weights.
        expected: espalier_arch::BlockKind,
        /// Of the shape.
        found: espalier_arch::BlockKind,
    },
    /// A tensor that the architecture needs and nobody gave.
    #[error("the {role:?} tensor is missing")]
    MissingTensor {
        /// What it is for.
        role: espalier_arch::Role,
    },
    /// A tensor of another shape than the architecture says.
    #[error("tensor {name}: expected shape {expected:?}, found {found:?}")]
    TensorShape {
        /// Its name in the checkpoint.
        name: String,
        /// By the architecture.
        expected: Vec<usize>,
        /// As given.
        found: Vec<usize>,
    },
    /// A computation that overflowed or was fed nonsense.
    #[error("{what} is not finite; the weights or the learning rate are out of range")]
    NotFinite {
        /// Which quantity.
        what: String,
    },
    /// A request that the model's shape cannot serve.
    #[error("{what} is {value}, expected {expected}")]
    OutOfRange {
        /// Which quantity.
        what: &'static str,
        /// As given.
        value: usize,
        /// What would be right.
        expected: String,
    },
    /// Training state that no file of a checkpoint has.
    #[error(
        "{tensor}: elements {from} to {to} are in none of the checkpoint's {files} files: one is missing, or it is of other blocks"
    )]
    MissingState {
        /// State and tensor.
        tensor: String,
        /// The first element that is missing.
        from: usize,
        /// Where what was asked for ends.
        to: usize,
        /// How many were given.
        files: usize,
    },
    /// A file that is not what it should be.
    #[error("{path}: {reason}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong and what was expected.
        reason: String,
    },
    /// A tensor of a checkpoint that is missing, superfluous, cut short or of another shape.
    #[error("{path}: tensor {tensor}: expected {expected}, found {found}")]
    CheckpointTensor {
        /// The file.
        path: PathBuf,
        /// Its name in the checkpoint.
        tensor: String,
        /// What would be right.
        expected: String,
        /// What is there.
        found: String,
    },
    /// A repository that a hub does not give.
    #[error("{source_name}: {reason}")]
    Hub {
        /// As given: `hf://org/name`.
        source_name: String,
        /// What is wrong and what to do.
        reason: String,
    },
    /// A directory that an export would overwrite.
    #[error("{path} exists already: give the export a directory that does not exist yet")]
    OutputExists {
        /// The directory.
        path: PathBuf,
    },
    /// A model that no checkpoint format of ours expresses.
    #[error("the model cannot be exported: {reason}")]
    NotExportable {
        /// What stands in the way.
        reason: String,
    },
    /// A weight that half precision does not hold.
    #[error("{tensor}: has a weight of {value}, expected at most 65504 where it is written in float16")]
    BeyondF16 {
        /// Its tensor.
        tensor: String,
        /// The weight.
        value: f32,
    },
    /// A thread that reads weights ahead and could not begin, or ended early.
    #[error("the thread that reads weights: {source}")]
    Reader {
        /// What the system said.
        source: std::io::Error,
    },
    /// A file that could not be read or written.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
}

/// A result whose error is this crate's.
pub type Result<T> = std::result::Result<T, Error>;
