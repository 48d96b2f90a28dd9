//! Reading a journal from its newest sound snapshot on.

use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;

use super::disk::Disk;
use super::segment::{self, End};
use super::{Error, snapshot};

/// What a journal is read into.
pub trait Fold {
    /// What happens to it.
    type Event: DeserializeOwned;

    /// Takes a state from its JSON in place of what it had.
    ///
    /// # Errors
    /// What is wrong with the JSON; then the snapshot before is tried, or the first frame.
    fn restore(&mut self, json: &[u8]) -> Result<(), String>;

    /// Takes an event of the frame with this sequence, after all of those before.
    fn event(&mut self, sequence: u64, event: Self::Event);
}

/// What was read.
#[derive(Debug)]
pub struct Found {
    /// Where the journal ends.
    pub end: End,
    /// Bytes of the snapshot's JSON.
    pub base_bytes: u64,
    /// Snapshots that could not be used.
    pub damaged: Vec<PathBuf>,
}

/// Reads all of a journal, changing nothing.
///
/// # Errors
/// When a frame that is needed is damaged, missing or too new.
pub fn read<F: Fold>(disk: &dyn Disk, directory: &Path, fold: &mut F) -> Result<Found, Error> {
    let snapshots = snapshot::list(disk, directory)?;
    let mut damaged = Vec::new();
    let (mut base, mut base_bytes) = (0, 0);
    for (sequence, path) in snapshots {
        match restore(disk, &path, sequence, fold) {
            Ok(bytes) => {
                (base, base_bytes) = (sequence, bytes);
                break;
            }
            Err(error @ Error::DamagedSnapshot { .. }) => {
                tracing::warn!(%error, "the snapshot before it is used");
                damaged.push(path);
            }
            Err(error) => return Err(error),
        }
    }
    let first = segment::list(disk, directory)?.first().map(|(first, _)| *first);
    if base == 0 && first.map_or(!damaged.is_empty(), |first| first > 1) {
        return Err(Error::NoBase {
            directory: directory.to_owned(),
        });
    }
    let end = segment::read(disk, directory, base, &mut |sequence, payload| {
        let events: Vec<F::Event> = serde_json::from_slice(payload).map_err(|error| error.to_string())?;
        for event in events {
            fold.event(sequence, event);
        }
        Ok(())
    })?;
    Ok(Found {
        end,
        base_bytes,
        damaged,
    })
}

fn restore<F: Fold>(disk: &dyn Disk, path: &Path, sequence: u64, fold: &mut F) -> Result<u64, Error> {
    let json = snapshot::read(disk, path, sequence)?;
    fold.restore(&json).map_err(|what| Error::DamagedSnapshot {
        path: path.to_owned(),
        what: format!("the state does not parse: {what}"),
    })?;
    Ok(u64::try_from(json.len()).unwrap_or(u64::MAX))
}
