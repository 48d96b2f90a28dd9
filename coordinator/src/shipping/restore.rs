//! Building a journal from what was shipped, on an empty disk.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

use espalier_artifact::ObjectArea;

use super::chain::{self, Piece, Snapshot};
use super::{file_error, frames};
use crate::journal::disk::{Disk, SystemDisk};
use crate::journal::{segment, snapshot};
use crate::term::Claim;
use crate::term::claims::store_error;
use crate::{Error, Result};

/// What was built.
#[derive(Debug, PartialEq, Eq)]
pub struct Restored {
    /// The last frame that the snapshot reflects; 0 without one.
    pub snapshot: u64,
    /// The last frame.
    pub last: u64,
    /// Archives of ended jobs.
    pub archives: usize,
}

/// What was shipped, as listed.
pub(super) struct Listed {
    pub pieces: Vec<Piece>,
    pub snapshots: Vec<Snapshot>,
}

pub(super) async fn list(area: &ObjectArea) -> Result<Listed> {
    let journal = area.list("journal").await.map_err(store_error)?;
    let snapshots = area.list("snapshots").await.map_err(store_error)?;
    Ok(Listed {
        pieces: journal
            .iter()
            .filter_map(|object| Piece::parse(&object.key))
            .collect(),
        snapshots: snapshots
            .iter()
            .filter_map(|object| Snapshot::parse(&object.key))
            .collect(),
    })
}

/// Builds the journal and the archives in a data directory from the newest sound snapshot and the frames after
/// it. A journal that is there already is one whose building was interrupted, and goes.
///
/// # Errors
/// When the store or the directory cannot be used, or frames that are needed are damaged.
pub async fn restore(area: &ObjectArea, claims: &[Claim], data_dir: &Path) -> Result<Restored> {
    let journal = data_dir.join("journal");
    if journal.exists() {
        fs::remove_dir_all(&journal).map_err(file_error("remove", &journal))?;
    }
    fs::create_dir_all(&journal).map_err(file_error("create", &journal))?;
    let listed = list(area).await?;
    let base = restore_snapshot(area, claims, &listed.snapshots, &journal).await?;
    let last = restore_frames(area, claims, &listed.pieces, base, &journal).await?;
    let archives = restore_archives(area, data_dir).await?;
    for directory in [&journal, data_dir] {
        SystemDisk
            .sync_directory(directory)
            .map_err(file_error("sync", directory))?;
    }
    Ok(Restored {
        snapshot: base,
        last,
        archives,
    })
}

async fn restore_snapshot(
    area: &ObjectArea,
    claims: &[Claim],
    snapshots: &[Snapshot],
    journal: &Path,
) -> Result<u64> {
    for found in chain::sound(claims, snapshots) {
        let bytes = match area.get(&found.key).await {
            Ok(Some(bytes)) => bytes,
            Ok(None) => continue,
            Err(error @ espalier_artifact::Error::DamagedObject { .. }) => {
                tracing::warn!(%error, "a shipped snapshot is damaged: the one before it is taken");
                continue;
            }
            Err(error) => return Err(store_error(error)),
        };
        let path = journal.join(snapshot::name(found.sequence));
        SystemDisk
            .write_whole(&path, &bytes)
            .map_err(file_error("write", &path))?;
        return Ok(found.sequence);
    }
    Ok(0)
}

async fn restore_frames(
    area: &ObjectArea,
    claims: &[Claim],
    pieces: &[Piece],
    base: u64,
    journal: &Path,
) -> Result<u64> {
    let steps = chain::after(claims, pieces, base);
    let Some(last) = steps.last().map(|step| step.last) else {
        return Ok(base);
    };
    let path = journal.join(segment::name(base.saturating_add(1)));
    let mut file = File::create_new(&path).map_err(file_error("create", &path))?;
    for step in steps {
        let bytes = area.get(&step.key).await.map_err(store_error)?;
        let bytes = bytes.as_deref().unwrap_or_default();
        let taken = frames::cut(bytes, step.first, step.last).ok_or_else(|| {
            Error::Invalid(format!(
                "store: {} does not hold the frames {} to {}: delete it to go on from before them",
                step.key, step.first, step.last
            ))
        })?;
        file.write_all(taken).map_err(file_error("write", &path))?;
    }
    file.sync_all().map_err(file_error("sync", &path))?;
    Ok(last)
}

async fn restore_archives(area: &ObjectArea, data_dir: &Path) -> Result<usize> {
    let directory = data_dir.join("archive");
    let listed = area.list("archive").await.map_err(store_error)?;
    if listed.is_empty() {
        return Ok(0);
    }
    fs::create_dir_all(&directory).map_err(file_error("create", &directory))?;
    let mut restored = 0_usize;
    for object in listed {
        let Some(name) = object
            .key
            .strip_prefix("archive/")
            .filter(|name| is_archive(name))
        else {
            continue;
        };
        let bytes = match area.get(&object.key).await {
            Ok(Some(bytes)) => bytes,
            Ok(None) => continue,
            Err(error @ espalier_artifact::Error::DamagedObject { .. }) => {
                tracing::warn!(%error, "a shipped archive is damaged: the job's past is lost, its summary is not");
                continue;
            }
            Err(error) => return Err(store_error(error)),
        };
        let path = directory.join(format!("{name}.archive"));
        SystemDisk
            .write_whole(&path, &bytes)
            .map_err(file_error("write", &path))?;
        restored = restored.saturating_add(1);
    }
    Ok(restored)
}

fn is_archive(name: &str) -> bool {
    name.strip_prefix("job-")
        .is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
}
