//! The journal: an append-only log of frames in segment files, the only truth a restart knows.
//!
//! ```text
//! frame   = header, payload
//! header  = payload length u32 | schema version u16 | flags u16 | sequence u64 | payload CRC32C u32
//!           | header CRC32C u32
//! payload = JSON list of events that happened together
//! ```
//!
//! All integers are little-endian. The header has a checksum of its own and says where commits begin, so
//! that a torn tail (which is cut) and a damaged frame (which is refused) can be told apart: see [`Tail`].
//! Beside the segments lie snapshots of the state ([`snapshot`]). Every byte goes through a [`disk::Disk`].
//! Nothing here knows what an event means.

pub mod disk;
mod follow;
pub(crate) mod frame;
#[cfg(feature = "planted-bugs")]
pub mod planted;
mod replay;
mod sealed;
pub(crate) mod segment;
pub(crate) mod snapshot;
#[cfg(test)]
pub(crate) mod tests;
mod writer;

use std::io;
use std::path::{Path, PathBuf};

use disk::Disk;
pub use follow::{Step, Tailing};
pub use frame::{SCHEMA_VERSION, Tail};
pub use replay::{Fold, Found, read};
pub use sealed::{Fault, Seal};
pub use segment::{End, Visit, list as segments, read as read_frames};
pub use snapshot::{DAMAGED, Due, list as snapshots, read as read_snapshot};
pub use writer::{Journal, Options, check_room, is_full};

/// Whether a journal holds no snapshot and no frame. A start that failed may have left the file for its first.
///
/// # Errors
/// When the directory cannot be read.
pub fn is_empty(disk: &dyn Disk, directory: &Path) -> Result<bool, Error> {
    if matches!(disk.list(directory), Err(error) if error.kind() == io::ErrorKind::NotFound) {
        return Ok(true);
    }
    if !snapshots(disk, directory)?.is_empty() {
        return Ok(false);
    }
    for (_, path) in segments(disk, directory)? {
        let bytes = disk.read(&path).map_err(io_error("read", &path))?;
        match frame::decode(&bytes, 0) {
            Err(Tail::Clean | Tail::Torn) => {}
            Ok(_) | Err(Tail::Damaged(_)) => return Ok(false),
        }
    }
    Ok(true)
}

/// What can go wrong with a journal.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Reading or writing failed.
    #[error("cannot {action} {}: {source}", path.display())]
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
        "journal {} is damaged at byte {offset} ({what}): with a --store, which holds what was shipped, start on \
         an empty data directory; else restore it from a backup, or give up what came after by `{}`, which keeps a \
         copy",
        path.display(), remedy(path.parent())
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Where the frame begins.
        offset: u64,
        /// What is wrong with it.
        what: String,
    },
    /// A snapshot is damaged.
    #[error(
        "snapshot {} is damaged ({what}): the one before it is used where it can be, else run `{}`",
        path.display(), remedy(path.parent())
    )]
    DamagedSnapshot {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// Neither a snapshot nor the first frames are there to begin with.
    #[error(
        "journal {} has no snapshot that can be used and does not go back to its first frame: with a --store, \
         which holds what was shipped, start on an empty data directory; else restore it from a backup, or set it \
         aside by `{}` and start anew",
        directory.display(), remedy(Some(directory))
    )]
    NoBase {
        /// The journal's directory.
        directory: PathBuf,
    },
    /// Written by a newer build.
    #[error(
        "{} has schema version {found} at byte {offset}, this build knows up to {known}: start the newer build",
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

/// The command that mends what lies in a journal's directory.
fn remedy(directory: Option<&Path>) -> String {
    let data_dir = directory.and_then(Path::parent).unwrap_or_else(|| Path::new("."));
    format!("espalier doctor repair --data-dir {}", data_dir.display())
}

fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::Io { action, path, source }
}

/// Files of a directory named by a number, in its order.
fn numbered(
    disk: &dyn Disk,
    directory: &Path,
    before: &str,
    after: &str,
) -> Result<Vec<(u64, PathBuf)>, Error> {
    let number = |path: &PathBuf| {
        let name = path.file_name()?.to_str()?;
        name.strip_prefix(before)?.strip_suffix(after)?.parse().ok()
    };
    let paths = disk.list(directory).map_err(io_error("list", directory))?;
    let mut files: Vec<(u64, PathBuf)> = paths
        .into_iter()
        .filter_map(|path| Some((number(&path)?, path)))
        .collect();
    files.sort();
    Ok(files)
}
