//! What can go wrong with artifacts.

use std::path::PathBuf;

/// What can go wrong with artifacts.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A name that no artifact can have.
    #[error("artifact name {name:?} is not 64 lower-case hexadecimal digits")]
    Name {
        /// What was given.
        name: String,
    },
    /// A location that this build cannot open.
    #[error("artifact store {location:?}: {reason}; give a directory or a file:// URL")]
    Location {
        /// What was given.
        location: String,
        /// What is wrong with it.
        reason: String,
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
    #[error("artifact {name} is damaged: its content hashes to {found}; delete it so that it is made again")]
    Damaged {
        /// The name asked for.
        name: String,
        /// The hash of what is there.
        found: String,
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
    #[error("artifact {name}: {source}")]
    Store {
        /// The artifact.
        name: String,
        /// What the object store said.
        source: object_store::Error,
    },
    /// A worker thread of the runtime ended without an answer.
    #[error("artifact task ended early: {reason}")]
    Interrupted {
        /// What the runtime said.
        reason: String,
    },
}

/// A result whose error is this crate's.
pub type Result<T> = std::result::Result<T, Error>;
