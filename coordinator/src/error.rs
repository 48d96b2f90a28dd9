//! What can go wrong in a coordinator or in talking to one.

use std::io;
use std::path::{Path, PathBuf};

use crate::journal;

/// The crate's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can go wrong.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file or directory could not be used.
    #[error("cannot {action} {}: {source}", path.display())]
    File {
        /// What was tried, as in `create`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The journal cannot be used as it is.
    #[error(transparent)]
    Journal(#[from] journal::Error),
    /// The data directory belongs to another coordinator.
    #[error("data directory {} is in use by another coordinator: stop it, or choose another directory", path.display())]
    InUse {
        /// The directory.
        path: PathBuf,
    },
    /// What should name the artifact store names none.
    #[error(
        "{} is damaged: it holds no id of an artifact store: set it aside by `espalier doctor repair --data-dir {}`, \
         and the store that the coordinator is started with is taken for the right one",
        path.display(), path.parent().unwrap_or_else(|| Path::new(".")).display()
    )]
    StoreId {
        /// The file.
        path: PathBuf,
    },
    /// The address cannot be listened on.
    #[error("cannot listen on {address}: {source}: choose another with --listen")]
    Listen {
        /// The address.
        address: std::net::SocketAddr,
        /// Why not.
        source: io::Error,
    },
    /// An endpoint cannot be understood.
    #[error("`{endpoint}` is not a coordinator's address: one looks like http://127.0.0.1:7474")]
    Endpoint {
        /// As given.
        endpoint: String,
    },
    /// Nobody answers.
    #[error("no coordinator answers at {endpoint}: {message}")]
    Unreachable {
        /// Where.
        endpoint: String,
        /// Why, as far as known.
        message: String,
    },
    /// No answer in time.
    #[error("the coordinator did not answer {call} in time")]
    Timeout {
        /// The call.
        call: &'static str,
    },
    /// The thing asked for does not exist.
    #[error("{0}")]
    NotFound(String),
    /// The request is wrong.
    #[error("{0}")]
    Invalid(String),
    /// The request does not fit the state of things.
    #[error("{0}")]
    Conflict(String),
    /// Not allowed.
    #[error("{0}")]
    Denied(String),
    /// No room: disk or queues.
    #[error("{0}")]
    Exhausted(String),
    /// The artifact store is full.
    #[error("{0}")]
    StoreFull(String),
    /// Another coordinator has taken over.
    #[error("this coordinator (term {own}) has been succeeded by one of term {term}: it stops")]
    Succeeded {
        /// Its own term.
        own: u64,
        /// The other's.
        term: u64,
    },
    /// The coordinator stops.
    #[error("the coordinator is stopping")]
    Stopping,
    /// Anything else.
    #[error("{0}")]
    Internal(String),
}

impl Error {
    /// Whether nobody answers, or one who has not begun: as while a coordinator is restarted.
    pub fn is_away(&self) -> bool {
        matches!(self, Self::Unreachable { .. } | Self::Timeout { .. })
    }

    /// Whether room is all that is missing, on a disk or in a store: later it may be there.
    pub(crate) fn is_full(&self) -> bool {
        match self {
            Self::File { source, .. } | Self::Journal(journal::Error::Io { source, .. }) => {
                journal::is_full(source)
            }
            Self::Journal(journal::Error::Full { .. }) | Self::StoreFull(_) => true,
            _ => false,
        }
    }
}
