//! The journal: an append-only log of frames in segment files, the only truth a restart knows.
//!
//! ```text
//! frame   = header, payload
//! header  = payload length u32 | schema version u32 | sequence u64 | payload CRC32C u32 | header CRC32C u32
//! payload = JSON list of events that happened together
//! ```
//!
//! All integers are little-endian. The header has a checksum of its own so that a torn tail (which is cut)
//! and a damaged length (which is refused) can be told apart: see [`Tail`]. Nothing here knows what an event
//! means.

mod frame;
mod segment;
#[cfg(test)]
mod tests;
mod writer;

use std::io;
use std::path::PathBuf;

pub use frame::{SCHEMA_VERSION, Tail};
pub use writer::{Journal, Options};

/// What can go wrong with a journal.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Reading or writing failed.
    #[error("cannot {action} journal {}: {source}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The disk is full. Nothing of the batch was kept.
    #[error("no room to append to journal {}: free some space", path.display())]
    Full {
        /// The file.
        path: PathBuf,
    },
    /// A frame that was durable is damaged.
    #[error(
        "journal {} is damaged at byte {offset} ({what}): restore the file from a backup, or give up what \
         came after by `truncate -s {offset} {}` and removing later segments, keeping a copy of both",
        path.display(), path.display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Where the frame begins.
        offset: u64,
        /// What is wrong with it.
        what: String,
    },
    /// Written by a newer build.
    #[error(
        "journal {} has schema version {found} at byte {offset}, this build knows up to {known}: start the \
         newer build",
        path.display()
    )]
    TooNew {
        /// The file.
        path: PathBuf,
        /// Where the frame begins.
        offset: u64,
        /// Its version.
        found: u32,
        /// The newest this build reads.
        known: u32,
    },
    /// An event is too large to be a frame.
    #[error("a batch of events takes {bytes} bytes, more than the {limit} a frame may have")]
    TooLarge {
        /// Its size.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// The journal failed before and must be opened anew.
    #[error("the journal failed before: restart the coordinator")]
    Failed,
}
