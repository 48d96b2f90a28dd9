//! What can go wrong with artifacts.

use std::io::ErrorKind;
use std::path::PathBuf;
use std::time::Duration;

/// What can go wrong with artifacts.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A name that no artifact can have.
    #[error("artifact name {name:?} is not 64 lower-case hexadecimal digits")]
    Name {
        /// What was given.
        name: String,
    },
    /// A location that cannot be opened as given.
    #[error(
        "artifact store {location:?}: {reason}; give a directory, file:///DIRECTORY, s3://BUCKET/PREFIX, \
         gs://BUCKET/PREFIX or az://CONTAINER/PREFIX"
    )]
    Location {
        /// What was given.
        location: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The environment does not say how to reach the store, or says it wrongly.
    #[error("artifact store {location}: {reason}: {remedy}")]
    Access {
        /// The store.
        location: String,
        /// What is missing or refused.
        reason: String,
        /// The variables to set, or what else would be right.
        remedy: String,
    },
    /// No store where there should be one, as when a directory is not mounted.
    #[error(
        "artifact store {location}: {reason}: mount the coordinator's directory there, or start the coordinator with a \
         --store that every worker reaches"
    )]
    Away {
        /// The store.
        location: String,
        /// What was found and what was expected.
        reason: String,
    },
    /// Not the store that was meant: another.
    #[error(
        "artifact store {location}: {reason}: mount the coordinator's directory there (of a bucket, name the same \
         server in this host's environment), or start the coordinator with a --store that every worker reaches"
    )]
    Foreign {
        /// The store.
        location: String,
        /// What was found and what was expected.
        reason: String,
    },
    /// A setting of the environment that is not understood.
    #[error("{variable} is {value:?}, expected {expected}")]
    Setting {
        /// The variable.
        variable: &'static str,
        /// Its value.
        value: String,
        /// What would be right.
        expected: &'static str,
    },
    /// No artifact of that name.
    #[error("artifact {name} is not in the store at {location}")]
    NotFound {
        /// The name asked for.
        name: String,
        /// The store.
        location: String,
    },
    /// Bytes that do not match their name.
    #[error(
        "artifact {name} is damaged: its content hashes to {found}; restore it from a copy of the store, or submit the job again"
    )]
    Damaged {
        /// The name asked for.
        name: String,
        /// The hash of what is there.
        found: String,
    },
    /// A record or an object of an area that does not match the hash in its first line.
    #[error("object {key} in the store at {location} is damaged: its content does not match its hash")]
    DamagedObject {
        /// Where it lies below the store's root.
        key: String,
        /// The store.
        location: String,
    },
    /// A file whose content changed while it was uploaded. Nothing of it is in the store.
    #[error("{} changed while it was stored: nobody may write it then", path.display())]
    Changed {
        /// The file.
        path: PathBuf,
    },
    /// A file that could not be read or written.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The object store refused.
    #[error("{key} in the store at {location}: {source}")]
    Store {
        /// Where the object lies below the store's root.
        key: String,
        /// The store.
        location: String,
        /// What the object store said.
        source: object_store::Error,
    },
    /// The object store did not answer in time.
    #[error("{key}: the store at {location} did not answer within {} s: is it reachable?", deadline.as_secs())]
    Late {
        /// Where the object lies below the store's root.
        key: String,
        /// The store.
        location: String,
        /// How long was waited, retries included.
        deadline: Duration,
    },
    /// A worker thread of the runtime ended without an answer.
    #[error("artifact task ended early: {reason}")]
    Interrupted {
        /// What the runtime said.
        reason: String,
    },
}

impl Error {
    /// Whether what holds the store, or what may be taken of it, is full.
    pub fn is_full(&self) -> bool {
        let full = |kind| matches!(kind, ErrorKind::StorageFull | ErrorKind::QuotaExceeded);
        said_by_the_system(self).is_some_and(full)
    }

    /// Whether the same call may succeed later though nobody asks otherwise: the store is full, mounted for reading only,
    /// not mounted, or does not answer.
    pub fn may_pass(&self) -> bool {
        match (self, said_by_the_system(self)) {
            (_, Some(kind)) => passes(kind),
            (Self::Late { .. } | Self::Away { .. }, None) => true,
            // What HTTP stores give up with after trying again.
            (Self::Store { source, .. }, None) => matches!(source, object_store::Error::Generic { .. }),
            (_, None) => false,
        }
    }
}

/// What the operating system said, somewhere below an error.
fn said_by_the_system(error: &(dyn std::error::Error + 'static)) -> Option<ErrorKind> {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if let Some(error) = error.downcast_ref::<std::io::Error>() {
            return Some(error.kind());
        }
        cause = error.source();
    }
    None
}

/// Whether a disk or a network that says this may say otherwise later.
pub fn passes(kind: ErrorKind) -> bool {
    matches!(
        kind,
        ErrorKind::StorageFull
            | ErrorKind::QuotaExceeded
            | ErrorKind::ReadOnlyFilesystem
            | ErrorKind::TimedOut
            | ErrorKind::ConnectionRefused
            | ErrorKind::ConnectionReset
            | ErrorKind::ConnectionAborted
            | ErrorKind::NotConnected
            | ErrorKind::HostUnreachable
            | ErrorKind::NetworkUnreachable
            | ErrorKind::NetworkDown
            | ErrorKind::StaleNetworkFileHandle
    )
}

/// A result whose error is this crate's.
pub type Result<T> = std::result::Result<T, Error>;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use super::*;

    fn store(source: Box<dyn std::error::Error + Send + Sync>) -> Error {
        Error::Store {
            key: "aa/bb".to_owned(),
            location: "s3://bucket".to_owned(),
            source: object_store::Error::Generic { store: "S3", source },
        }
    }

    #[test]
    fn a_store_that_is_full_read_only_or_away_may_take_it_later_and_one_that_forbids_it_does_not() {
        let of_disk = |kind: ErrorKind| store(Box::new(std::io::Error::from(kind)));
        for kind in [
            ErrorKind::StorageFull,
            ErrorKind::ReadOnlyFilesystem,
            ErrorKind::ConnectionRefused,
        ] {
            assert!(of_disk(kind).may_pass(), "{kind:?}");
        }
        assert!(store("503 Slow Down".into()).may_pass());
        assert!(of_disk(ErrorKind::StorageFull).is_full());
        assert!(!of_disk(ErrorKind::ReadOnlyFilesystem).is_full());
        assert!(!of_disk(ErrorKind::PermissionDenied).may_pass());
        let damaged = Error::Damaged {
            name: "aa".to_owned(),
            found: "bb".to_owned(),
        };
        assert!(!damaged.may_pass());
        let (location, reason) = ("/store".to_owned(), "it has no STORE-ID".to_owned());
        assert!(Error::Away { location, reason }.may_pass());
        let (location, reason) = ("/store".to_owned(), "its STORE-ID is 1".to_owned());
        assert!(!Error::Foreign { location, reason }.may_pass());
    }
}
