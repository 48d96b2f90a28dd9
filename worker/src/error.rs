//! What can go wrong on a worker, and what that means for trying again.

use std::path::PathBuf;

use espalier_proto::task::{Failure, FailureKind};

/// What can go wrong on a worker.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A data file that is not what it should be.
    #[error("{}{}: {reason}", path.display(), line.map(|line| format!(", line {line}")).unwrap_or_default())]
    Data {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: Option<usize>,
        /// What is wrong and what was expected.
        reason: String,
    },
    /// A file that could not be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A task that no retry can mend.
    #[error("{reason}")]
    Invalid {
        /// What is wrong and what would be right.
        reason: String,
    },
    /// A chat template that cannot be parsed.
    #[error("the parent's chat template cannot be parsed: {reason}")]
    ChatTemplate {
        /// What the template engine said.
        reason: String,
    },
    /// A text that the tokenizer refuses.
    #[error("the tokenizer failed: {reason}")]
    Tokenizer {
        /// What it said.
        reason: String,
    },
    /// A shard that is not what it should be.
    #[error("shard {artifact}: {reason}")]
    Shard {
        /// Its name.
        artifact: String,
        /// What is wrong.
        reason: String,
    },
    /// Another artifact that is not what it should be.
    #[error("artifact {artifact}: {reason}")]
    Content {
        /// Its name.
        artifact: String,
        /// What is wrong.
        reason: String,
    },
    /// The attempt was cancelled.
    #[error("cancelled")]
    Cancelled,
    /// Measurements that were disturbed again and again.
    #[error("too noisy to measure: {evidence}")]
    TooNoisy {
        /// What disturbed them and how often.
        evidence: String,
    },
    /// Tensors or checkpoints.
    #[error(transparent)]
    Model(#[from] espalier_model::Error),
    /// A shape that does not follow from its parent's.
    #[error(transparent)]
    Architecture(#[from] espalier_arch::Error),
    /// The artifact store.
    #[error(transparent)]
    Artifact(#[from] espalier_artifact::Error),
    /// A device child that cannot be started or spoken to.
    #[error("device child: {reason}")]
    Child {
        /// What is wrong.
        reason: String,
    },
    /// A coordinator that refuses this worker.
    #[error("coordinator {address}: {reason}")]
    Coordinator {
        /// Its address.
        address: String,
        /// What it said, and what to do.
        reason: String,
    },
}

/// A result whose error is this crate's.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// What this means for trying again.
    pub fn failure(&self) -> Failure {
        let kind = match self {
            Self::Data { .. }
            | Self::Invalid { .. }
            | Self::ChatTemplate { .. }
            | Self::Tokenizer { .. }
            | Self::Architecture(_) => FailureKind::Invalid,
            Self::Io { source, .. } if is_permanent(source.kind()) => FailureKind::Invalid,
            Self::Io { source, .. } if source.kind() == std::io::ErrorKind::OutOfMemory => {
                FailureKind::OutOfMemory
            }
            Self::TooNoisy { .. } => FailureKind::TooNoisy,
            Self::Model(error) => model_failure(error),
            _ => FailureKind::Error,
        };
        Failure {
            kind,
            message: self.to_string(),
        }
    }
}

fn model_failure(error: &espalier_model::Error) -> FailureKind {
    use espalier_model::Error as Model;
    match error {
        Model::Io { source, .. } if !is_permanent(source.kind()) => FailureKind::Error,
        Model::Hub { .. } => FailureKind::Error,
        _ => FailureKind::Invalid,
    }
}

/// Whether the same call would meet the same answer on another try.
fn is_permanent(kind: std::io::ErrorKind) -> bool {
    use std::io::ErrorKind as Kind;
    matches!(
        kind,
        Kind::NotFound
            | Kind::PermissionDenied
            | Kind::IsADirectory
            | Kind::NotADirectory
            | Kind::InvalidData
    )
}
