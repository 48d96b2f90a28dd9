//! Snapshots: the state after a frame, so that what came before it need not be read again.
//!
//! Two are kept, and the segments back to the older of them: when one cannot be used, the other can. Nothing
//! here knows what a state is.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Serialize;

use super::disk::Disk;
use super::sealed::{Fault, Seal};
use super::{Error, io_error, segment};

/// What a snapshot looks like on disk.
const SEAL: Seal = Seal {
    magic: *b"ESPSNAP\0",
    version: 1,
};

/// Snapshots that are kept.
const KEPT: usize = 2;

/// What is put before the name of a snapshot that cannot be used.
pub const DAMAGED: &str = "damaged-";

/// The right to take one snapshot, of the state as it was when this was given.
#[derive(Debug)]
pub struct Due {
    pub(super) disk: Arc<dyn Disk>,
    pub(super) directory: PathBuf,
    /// The last frame that the state reflects.
    pub sequence: u64,
}

impl Due {
    /// Writes the snapshot, then removes what no start needs any more. Slow: for a thread beside the loop.
    /// Gives the bytes of its JSON.
    ///
    /// # Errors
    /// When it cannot be written. The snapshots before it still stand.
    pub fn take(&self, state: &impl Serialize) -> Result<u64, Error> {
        let path = self.directory.join(name(self.sequence));
        let (bytes, json_bytes) = SEAL
            .close(self.sequence, state)
            .map_err(io_error("encode", &path))?;
        self.disk
            .write_whole(&path, &bytes)
            .map_err(io_error("write", &path))?;
        prune(self.disk.as_ref(), &self.directory)?;
        Ok(json_bytes)
    }
}

/// The name of the snapshot of the state after this frame.
pub fn name(sequence: u64) -> String {
    format!("snapshot-{sequence:020}.snap")
}

/// Snapshots with the frame they were taken after, the newest first.
pub fn list(disk: &dyn Disk, directory: &Path) -> Result<Vec<(u64, PathBuf)>, Error> {
    let mut snapshots = super::numbered(disk, directory, "snapshot-", ".snap")?;
    snapshots.reverse();
    Ok(snapshots)
}

/// The JSON of a state.
///
/// # Errors
/// [`Error::DamagedSnapshot`] when another may do, any other when none should be tried.
pub fn read(disk: &dyn Disk, path: &Path, sequence: u64) -> Result<Vec<u8>, Error> {
    let bytes = disk.read(path).map_err(io_error("read", path))?;
    SEAL.open(sequence, &bytes).map_err(|fault| unusable(path, fault))
}

/// Whether these are the bytes of a sound snapshot, whose file this is.
///
/// # Errors
/// As [`read`].
pub fn check(path: &Path, sequence: u64, bytes: &[u8]) -> Result<(), Error> {
    let checked = SEAL.check(sequence, bytes);
    checked.map(drop).map_err(|fault| unusable(path, fault))
}

fn unusable(path: &Path, fault: Fault) -> Error {
    match fault {
        Fault::Damaged(what) => Error::DamagedSnapshot {
            path: path.to_owned(),
            what: what.to_owned(),
        },
        Fault::TooNew(found) => Error::TooNew {
            path: path.to_owned(),
            offset: 0,
            found,
            known: SEAL.version,
        },
    }
}

/// Removes snapshots but the newest two, and segments that end before the older of them.
fn prune(disk: &dyn Disk, directory: &Path) -> Result<(), Error> {
    let snapshots = list(disk, directory)?;
    let Some((older, _)) = snapshots.get(KEPT.saturating_sub(1)) else {
        return Ok(());
    };
    let segments = segment::list(disk, directory)?;
    let ends = segments.iter().skip(1).map(|(first, _)| first.saturating_sub(1));
    let gone = segments
        .iter()
        .zip(ends)
        .filter(|(_, end)| end <= older)
        .map(|((_, path), _)| path);
    for path in gone.chain(snapshots.iter().skip(KEPT).map(|(_, path)| path)) {
        disk.remove(path).map_err(io_error("remove", path))?;
    }
    disk.sync_directory(directory)
        .map_err(io_error("sync", directory))
}
