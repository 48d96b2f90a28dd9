//! What can go wrong with tensors and checkpoints.

use std::path::PathBuf;

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
    /// A shape that does not follow from its parent's.
    #[error(transparent)]
    Architecture(#[from] espalier_arch::Error),
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
