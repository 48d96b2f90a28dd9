//! Building a journal from what was shipped, on an empty disk.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use espalier_artifact::ObjectArea;
use futures::{StreamExt, stream};

use super::chain::{self, Snapshot, Step};
use super::listing::{self, Listed, list};
use super::{beside, file_error, frames};
use crate::journal::disk::{Disk, DiskFile, PARTIAL, SystemDisk};
use crate::journal::{segment, snapshot};
use crate::term::claims::store_error;
use crate::term::{Claim, Claims};
use crate::{Error, Result};

/// Objects that are fetched at a time.
const FETCHED_AT_ONCE: usize = 4;
/// Beginnings, where a coordinator that still runs removes what is needed, or another claims a term.
const BEGINNINGS: usize = 20;
/// Times that the store is listed again, where a coordinator that still runs ships more and more.
const LISTINGS: usize = 20;
const PAUSE: Duration = Duration::from_millis(200);

/// What was built.
#[derive(Debug, PartialEq, Eq)]
pub struct Restored {
    /// The last frame that the snapshot reflects; 0 without one.
    pub snapshot: u64,
    /// The last frame.
    pub last: u64,
    /// Archives of ended jobs.
    pub archives: usize,
    /// The highest term that was claimed then; 0 for none.
    pub term: u64,
}

/// Builds the journal and the archives in a data directory from the newest sound snapshot and the frames after
/// it, until the store holds no more of them. A journal that is there already is one without a frame, or one
/// whose building was interrupted, and goes.
///
/// # Errors
/// When the store or the directory cannot be used, or frames that are needed are damaged.
pub async fn restore(area: &ObjectArea, claims: &Claims, data_dir: &Path) -> Result<Restored> {
    for _ in 0..BEGINNINGS {
        let claimed = claims.all().await?;
        let listed = list(area).await?;
        let mut building = Building::begin(area, &claimed, data_dir).await?;
        if building.follow(claims, listed).await? {
            return building.finish().await;
        }
        tokio::time::sleep(PAUSE).await;
    }
    Err(Error::Conflict(format!(
        "store {}: what was shipped changes faster than it can be read: stop the other coordinators of the cluster",
        area.location()
    )))
}

fn highest(claims: &[Claim]) -> u64 {
    claims.iter().map(|claim| claim.term).max().unwrap_or(0)
}

/// A journal that is being built.
pub(super) struct Building<'a> {
    area: &'a ObjectArea,
    claimed: &'a [Claim],
    data_dir: &'a Path,
    journal: PathBuf,
    /// The last frame that the snapshot reflects, and the snapshots that could not be read.
    base: Option<u64>,
    damaged: Vec<String>,
    last: u64,
    file: Option<Box<dyn DiskFile>>,
    /// Archives that are there, by job, with their mark.
    archives: BTreeMap<String, String>,
}

impl<'a> Building<'a> {
    pub(super) async fn begin(
        area: &'a ObjectArea,
        claimed: &'a [Claim],
        data_dir: &'a Path,
    ) -> Result<Self> {
        let journal = data_dir.join("journal");
        let directory = journal.clone();
        beside(move || clear(&directory)).await?;
        Ok(Self {
            area,
            claimed,
            data_dir,
            journal,
            base: None,
            damaged: Vec::new(),
            last: 0,
            file: None,
            archives: BTreeMap::new(),
        })
    }

    /// Takes what was listed, and lists again until that is all. False when it has to begin anew: somebody has
    /// claimed a term, or removed what was listed.
    pub(super) async fn follow(&mut self, claims: &Claims, mut listed: Listed) -> Result<bool> {
        for _ in 0..LISTINGS {
            if self.base.is_none() && !self.take_snapshot(&listed.snapshots).await? {
                return Ok(false);
            }
            let steps = chain::after(self.claimed, &listed.pieces, self.last);
            if !self.take_frames(steps).await? || !self.take_archives().await? {
                return Ok(false);
            }
            let now = claims.all().await?;
            if now != self.claimed {
                return Ok(false);
            }
            listed = list(self.area).await?;
            if chain::after(&now, &listed.pieces, self.last).is_empty() {
                break;
            }
        }
        let reach = chain::reach(self.claimed, &listed.pieces, &listed.snapshots);
        if reach <= self.last {
            return Ok(true);
        }
        if self.damaged.is_empty() {
            // There is a newer snapshot, and frames before it have gone.
            return Ok(false);
        }
        // To go on from here would make void what may be whole.
        Err(Error::Invalid(format!(
            "store {}: frames {} to {reach} cannot be reached, as {} is damaged: restore it, or delete it to go on \
             from before them",
            self.area.location(),
            self.last.saturating_add(1),
            self.damaged.join(" and ")
        )))
    }

    /// The newest snapshot that can be read. False when one is gone.
    async fn take_snapshot(&mut self, snapshots: &[Snapshot]) -> Result<bool> {
        for found in chain::sound(self.claimed, snapshots) {
            let bytes = match self.area.get(&found.key).await {
                Ok(Some(bytes)) => bytes,
                Ok(None) => return Ok(false),
                Err(error @ espalier_artifact::Error::DamagedObject { .. }) => {
                    tracing::warn!(%error, "a shipped snapshot is damaged: the one before it is taken");
                    self.damaged.push(found.key.clone());
                    continue;
                }
                Err(error) => return Err(store_error(error)),
            };
            let path = self.journal.join(snapshot::name(found.sequence));
            let (sequence, checked, whole) = (found.sequence, path.clone(), bytes.clone());
            let checked = beside(move || Ok(snapshot::check(&checked, sequence, &whole))).await?;
            if let Err(error @ crate::journal::Error::DamagedSnapshot { .. }) = checked {
                tracing::warn!(%error, "it was shipped as it is: the one before it is taken");
                self.damaged.push(found.key.clone());
                continue;
            }
            write(path, bytes).await?;
            (self.base, self.last) = (Some(found.sequence), found.sequence);
            return Ok(true);
        }
        self.base = Some(0);
        Ok(true)
    }

    /// False when a piece is gone.
    async fn take_frames(&mut self, steps: Vec<Step>) -> Result<bool> {
        let area = self.area;
        let fetched = stream::iter(steps).map(|step| async move {
            let bytes = area.get(&step.key).await;
            (step, bytes)
        });
        let mut fetched = std::pin::pin!(fetched.buffered(FETCHED_AT_ONCE));
        while let Some((step, bytes)) = fetched.next().await {
            let Some(bytes) = bytes.map_err(store_error)? else {
                return Ok(false);
            };
            let file = self.file.take();
            let path = self
                .journal
                .join(segment::name(self.base.unwrap_or(0).saturating_add(1)));
            let last = step.last;
            let appended = move || append(file, &path, &bytes, &step);
            self.file = Some(beside(appended).await?);
            self.last = last;
        }
        Ok(true)
    }

    /// False when one is gone.
    async fn take_archives(&mut self) -> Result<bool> {
        let wanted: Vec<_> = listing::archives(self.area)
            .await?
            .into_iter()
            .filter(|(job, shipped)| self.archives.get(job) != Some(&shipped.mark))
            .collect();
        let area = self.area;
        let fetched = stream::iter(wanted).map(|(job, shipped)| async move {
            let bytes = area.get(&shipped.key).await;
            (job, shipped, bytes)
        });
        let mut fetched = std::pin::pin!(fetched.buffered(FETCHED_AT_ONCE));
        let directory = self.data_dir.join("archive");
        while let Some((job, shipped, bytes)) = fetched.next().await {
            match bytes {
                Ok(Some(bytes)) => {
                    write(directory.join(format!("{job}.archive")), bytes).await?;
                    self.archives.insert(job, shipped.mark);
                }
                Ok(None) => return Ok(false),
                Err(error @ espalier_artifact::Error::DamagedObject { .. }) => {
                    tracing::warn!(%error, "a shipped archive is damaged: the job's past is lost, its summary is not");
                }
                Err(error) => return Err(store_error(error)),
            }
        }
        Ok(true)
    }

    pub(super) async fn finish(self) -> Result<Restored> {
        let restored = Restored {
            snapshot: self.base.unwrap_or(0),
            last: self.last,
            archives: self.archives.len(),
            term: highest(self.claimed),
        };
        let (file, journal, data_dir) = (self.file, self.journal, self.data_dir.to_owned());
        beside(move || {
            if let Some(mut file) = file {
                file.sync().map_err(file_error("sync a segment in", &journal))?;
            }
            for directory in [&journal, &data_dir] {
                SystemDisk
                    .sync_directory(directory)
                    .map_err(file_error("sync", directory))?;
            }
            Ok(restored)
        })
        .await
    }
}

/// Makes room for a journal: segments and snapshots go, what was set aside stays.
fn clear(journal: &Path) -> Result<()> {
    let disk = SystemDisk;
    disk.create_directory(journal)
        .map_err(file_error("create", journal))?;
    for path in disk.list(journal).map_err(file_error("list", journal))? {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let is_segment = name.starts_with("journal-") && name.ends_with(".log");
        let is_snapshot = name.starts_with("snapshot-") && name.ends_with(".snap");
        if is_segment || is_snapshot || name.ends_with(PARTIAL) {
            disk.remove(&path).map_err(file_error("remove", &path))?;
        }
    }
    Ok(())
}

/// Appends the frames of a step to a segment, which is begun with the first.
fn append(
    file: Option<Box<dyn DiskFile>>,
    path: &Path,
    bytes: &[u8],
    step: &Step,
) -> Result<Box<dyn DiskFile>> {
    let taken = frames::cut(bytes, step.first, step.last).ok_or_else(|| {
        Error::Invalid(format!(
            "store: {} does not hold the frames {} to {}: restore it, or delete it to go on from before them",
            step.key, step.first, step.last
        ))
    })?;
    let mut file = match file {
        Some(file) => file,
        None => SystemDisk.create(path).map_err(file_error("create", path))?,
    };
    file.append(taken).map_err(file_error("write", path))?;
    Ok(file)
}

/// Writes a file whole, and the directory before it.
async fn write(path: PathBuf, bytes: Bytes) -> Result<()> {
    beside(move || {
        if let Some(directory) = path.parent() {
            SystemDisk
                .create_directory(directory)
                .map_err(file_error("create", directory))?;
        }
        SystemDisk
            .write_whole(&path, &bytes)
            .map_err(file_error("write", &path))
    })
    .await
}
