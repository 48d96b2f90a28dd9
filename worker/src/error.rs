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
    /// A device with too little memory for a task, whatever is done a part at a time.
    #[error(
        "{what} needs {} MiB of the device's memory, and {} MiB are free: end what else runs on it, choose a device \
         with more, or raise --device-memory",
        needed.div_ceil(1 << 20), free >> 20
    )]
    NoRoom {
        /// What was asked.
        what: &'static str,
        /// Bytes that it takes at the least.
        needed: u64,
        /// Bytes that further tensors may take.
        free: u64,
    },
    /// vLLM, or the process that it runs in.
    #[error(transparent)]
    Vllm(#[from] crate::engine::vllm::Error),
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
    /// Whether it tells only that another rank of the gang is gone.
    pub(crate) fn is_of_another_rank(&self) -> bool {
        self.failure().kind == FailureKind::RankLost
    }

    /// Whether it tells that a model has no room on the device, and not that somebody else has taken it.
    pub(crate) fn is_want_of_room(&self) -> bool {
        use espalier_model::ops::cuda::Error as Cuda;
        matches!(
            self,
            Self::NoRoom { .. }
                | Self::Model(espalier_model::Error::Cuda(Cuda::OutOfMemory { .. }))
                | Self::Vllm(crate::engine::vllm::Error::OutOfMemory { .. })
        )
    }

    /// What this means for trying again.
    pub fn failure(&self) -> Failure {
        let kind = match self {
            error if is_of_storage(error) => FailureKind::Storage,
            Self::Data { .. }
            | Self::Invalid { .. }
            | Self::ChatTemplate { .. }
            | Self::Tokenizer { .. }
            | Self::Architecture(_) => FailureKind::Invalid,
            Self::Io { source, .. } if is_permanent(source.kind()) => FailureKind::Invalid,
            Self::Io { source, .. } if source.kind() == std::io::ErrorKind::OutOfMemory => {
                FailureKind::OutOfMemory
            }
            Self::NoRoom { .. } => FailureKind::OutOfMemory,
            Self::TooNoisy { .. } => FailureKind::TooNoisy,
            Self::Model(error) => model_failure(error),
            Self::Vllm(error) => error.failure_kind(),
            _ => FailureKind::Error,
        };
        Failure {
            kind,
            message: self.to_string(),
        }
    }
}

/// Whether it is what holds artifacts or files, and may be over by itself: no room, mounted for reading only, away.
fn is_of_storage(error: &Error) -> bool {
    match error {
        Error::Artifact(error) => error.may_pass(),
        Error::Io { source, .. } | Error::Model(espalier_model::Error::Io { source, .. }) => {
            espalier_artifact::passes(source.kind())
        }
        _ => false,
    }
}

fn model_failure(error: &espalier_model::Error) -> FailureKind {
    use espalier_model::Error as Model;
    match error {
        Model::Gang(error) => gang_failure(error),
        Model::Cuda(error) => device_failure(error),
        Model::Io { source, .. } if !is_permanent(source.kind()) => FailureKind::Error,
        Model::Hub { .. } | Model::Reader { .. } => FailureKind::Error,
        _ => FailureKind::Invalid,
    }
}

/// Whether another rank is at fault, or this one.
fn gang_failure(error: &espalier_model::collective::Error) -> FailureKind {
    use espalier_model::collective::Error as Gang;
    match error {
        Gang::RankLost { .. }
        | Gang::GivenUp { .. }
        | Gang::Away { .. }
        | Gang::NotFormed { .. }
        | Gang::Aborted
        | Gang::Deadline { .. } => FailureKind::RankLost,
        _ => FailureKind::Error,
    }
}

/// A machine or a device that cannot do it is not tried again; one that was full or failed is.
fn device_failure(error: &espalier_model::ops::cuda::Error) -> FailureKind {
    use espalier_model::ops::cuda::Error as Cuda;
    match error {
        Cuda::DeviceFull { .. } | Cuda::OutOfMemory { .. } => FailureKind::OutOfMemory,
        Cuda::Deadline { .. } => FailureKind::Hung,
        Cuda::Driver { .. } | Cuda::Matmul { .. } | Cuda::Nccl { .. } | Cuda::Lost => FailureKind::Error,
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use std::io;

    use super::*;

    #[test]
    fn a_full_or_read_only_disk_is_no_fault_of_the_task_wherever_it_is_met() {
        let path = || PathBuf::from("/store/scratch/a");
        let of_kind = |kind: io::ErrorKind| {
            let source = || io::Error::from(kind);
            let here = Error::Io {
                path: path(),
                source: source(),
            };
            let in_a_model = Error::Model(espalier_model::Error::Io {
                path: path(),
                source: source(),
            });
            [here, in_a_model].map(|error| error.failure().kind)
        };
        for kind in [io::ErrorKind::StorageFull, io::ErrorKind::ReadOnlyFilesystem] {
            assert_eq!(of_kind(kind), [FailureKind::Storage; 2], "{kind:?}");
        }
        assert_eq!(of_kind(io::ErrorKind::NotFound), [FailureKind::Invalid; 2]);
    }

    #[test]
    fn what_a_gpu_refuses_is_tried_again_only_where_that_can_mend_it() {
        use espalier_model::ops::cuda::Error as Cuda;
        let kind = |error: Cuda| Error::Model(error.into()).failure().kind;
        assert_eq!(kind(Cuda::NoDriver), FailureKind::Invalid);
        assert_eq!(
            kind(Cuda::DeviceNotThere { index: 3, count: 1 }),
            FailureKind::Invalid
        );
        let (asked, in_use, held, limit, free) = (1, 2, 3, 4, 5);
        let full = Cuda::OutOfMemory {
            asked,
            in_use,
            held,
            limit,
            free,
        };
        assert_eq!(kind(full), FailureKind::OutOfMemory);
        assert_eq!(kind(Cuda::Lost), FailureKind::Error);
        let (call, reason) = ("ncclGetUniqueId", "unhandled system error".to_owned());
        assert_eq!(kind(Cuda::Nccl { call, reason }), FailureKind::Error);
        let waited = std::time::Duration::from_secs(60);
        let operation = "a step";
        assert_eq!(kind(Cuda::Deadline { operation, waited }), FailureKind::Hung);
    }
}
