//! The shipper: a task beside the loop that brings what is new on the disk to the store.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use espalier_artifact::ObjectArea;
use tokio_util::sync::CancellationToken;

use super::chain::{self, Piece, Snapshot};
use super::frames::{self, Cursor};
use super::listing::{self, list};
use super::prune::Pruner;
use super::{Options, Progress, beside, file_error};
use crate::Result;
use crate::archive::Archives;
use crate::journal::disk::SystemDisk;
use crate::journal::snapshot;
use crate::scheduler::JobId;
use crate::term::Claims;
use crate::term::claims::store_error;

/// How long the last shipping may take when the coordinator stops.
const LAST: Duration = Duration::from_secs(5);

/// What a file looked like: its size and when it was last written.
type Looks = (u64, SystemTime);

/// Ships one term's journal, snapshots and archives.
#[derive(Debug)]
pub struct Shipper {
    route: Route,
    interval: Duration,
    progress: Progress,
    /// What the store has; none before it was asked.
    stored: Option<Stored>,
}

/// From where to where.
#[derive(Debug)]
struct Route {
    data_dir: PathBuf,
    area: ObjectArea,
    claims: Claims,
    pruner: Pruner,
    term: u64,
}

/// What the store has of what is shipped here.
#[derive(Debug)]
struct Stored {
    /// Where to read on in the journal.
    cursor: Cursor,
    /// Frames after which a sound snapshot was taken, whichever term shipped it.
    snapshots: BTreeSet<u64>,
    /// The marks of archives by job, whichever term shipped them.
    archives: BTreeMap<String, String>,
    /// Archives on the disk that are in the store, with what they looked like.
    seen: BTreeMap<PathBuf, Looks>,
}

impl Shipper {
    pub(super) fn new(area: ObjectArea, options: &Options, term: u64, progress: Progress) -> Self {
        let claims = Claims::new(area.clone(), &options.cluster);
        Self {
            route: Route {
                data_dir: options.data_dir.clone(),
                pruner: Pruner::new(area.clone(), claims.clone(), term),
                area,
                claims,
                term,
            },
            interval: options.interval,
            progress,
            stored: None,
        }
    }

    /// Ships at every interval until told to stop, and then once more, as far as that goes quickly.
    pub async fn run(mut self, stop: CancellationToken) {
        let pruner = self.route.pruner.clone();
        tokio::select! {
            () = pruner.run() => {}
            () = self.ship_always(&stop) => {}
        }
        match tokio::time::timeout(LAST, self.ship()).await {
            Ok(shipped) => note(shipped),
            Err(_) => tracing::warn!("the store was too slow to ship the last of the journal"),
        }
    }

    async fn ship_always(&mut self, stop: &CancellationToken) {
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(self.interval) => {}
            }
            tokio::select! {
                () = stop.cancelled() => return,
                shipped = self.ship() => note(shipped),
            }
        }
    }

    /// Brings everything that is durable now to the store.
    ///
    /// # Errors
    /// When the disk or the store cannot be used; what was shipped before stays shipped.
    pub async fn ship(&mut self) -> Result<()> {
        let begun = Instant::now();
        let through = self.progress.last_durable();
        let stored = match &mut self.stored {
            Some(stored) => stored,
            unknown @ None => unknown.insert(self.route.stored().await?),
        };
        // First, so that no frame or snapshot in the store says of a job that it is archived and its archive is not.
        // One that cannot be brought there must not keep the journal from being shipped, though.
        let archived = self.route.ship_archives(stored).await;
        let shipped = self.route.ship_frames(stored, through).await;
        if shipped.is_ok() {
            self.progress.up_to_date_at(begun);
        }
        let pictured = self.route.ship_snapshots(stored, through).await;
        shipped.and(pictured).and(archived)
    }
}

impl Route {
    /// What the store has. What a coordinator that was superseded goes on shipping is void, so nobody needs to
    /// look each time.
    async fn stored(&self) -> Result<Stored> {
        let claims = self.claims.all().await?;
        let listed = list(&self.area).await?;
        let reached = chain::reach(&claims, &listed.pieces, &listed.snapshots);
        let sound = chain::sound(&claims, &listed.snapshots);
        let archives = listing::archives(&self.area).await?;
        Ok(Stored {
            cursor: Cursor::at(reached.saturating_add(1)),
            snapshots: sound.iter().map(|snapshot| snapshot.sequence).collect(),
            archives: archives
                .into_iter()
                .map(|(job, shipped)| (job, shipped.mark))
                .collect(),
            seen: BTreeMap::new(),
        })
    }

    async fn ship_frames(&self, stored: &mut Stored, through: u64) -> Result<()> {
        let directory = self.data_dir.join("journal");
        loop {
            let (directory, mut ahead) = (directory.clone(), stored.cursor.clone());
            let read = move || frames::read(&directory, &mut ahead, through).map(|found| (found, ahead));
            let (found, ahead) = beside(read).await?;
            if let Some(found) = &found {
                let key = Piece::key(self.term, found.first, found.last);
                self.area.put(&key, &found.bytes).await.map_err(store_error)?;
            }
            stored.cursor = ahead;
            if found.is_none() {
                return Ok(());
            }
        }
    }

    async fn ship_snapshots(&self, stored: &mut Stored, through: u64) -> Result<()> {
        for (path, _) in files(self.data_dir.join("journal")).await? {
            let sequence = path.file_name().and_then(|name| {
                let name = name.to_str()?;
                name.strip_prefix("snapshot-")?
                    .strip_suffix(".snap")?
                    .parse()
                    .ok()
            });
            let Some(sequence) = sequence.filter(|sequence| *sequence <= through) else {
                continue;
            };
            if stored.snapshots.contains(&sequence) {
                continue;
            }
            // The journal lets old snapshots go.
            let Some(bytes) = read(&path).await? else { continue };
            let checked = beside(move || Ok((snapshot::check(&path, sequence, &bytes), bytes))).await?;
            match checked {
                (Ok(()), bytes) => {
                    let key = Snapshot::key(self.term, sequence);
                    self.area.put(&key, &bytes).await.map_err(store_error)?;
                    self.pruner.is_due();
                }
                // A start from the store would have nothing else to begin with.
                (Err(error), _) => tracing::warn!(%error, "the snapshot is not shipped"),
            }
            stored.snapshots.insert(sequence);
        }
        Ok(())
    }

    /// Ships every archive that can be; gives the first error.
    async fn ship_archives(&self, stored: &mut Stored) -> Result<()> {
        let mut first = Ok(());
        for (path, looks) in files(self.data_dir.join("archive")).await? {
            if stored.seen.get(&path) == Some(&looks) {
                continue;
            }
            match self.ship_archive(stored, &path).await {
                Ok(()) => {
                    stored.seen.insert(path, looks);
                }
                Err(error) => first = first.and(Err(error)),
            }
        }
        first
    }

    /// Ships an archive unless the store has it.
    async fn ship_archive(&self, stored: &mut Stored, path: &Path) -> Result<()> {
        let name = path
            .file_name()
            .and_then(|name| name.to_str()?.strip_suffix(".archive"));
        let Some((name, job)) = name.and_then(|name| Some((name, name.parse::<JobId>().ok()?))) else {
            return Ok(());
        };
        if stored.archives.get(name) == Some(&mark(path).await?) {
            return Ok(());
        }
        let Some(bytes) = read(path).await? else {
            return Ok(());
        };
        let archives = Archives::new(Arc::new(SystemDisk), &self.data_dir);
        let (checked, bytes) = beside(move || Ok((archives.check(job, &bytes), bytes))).await?;
        if let Err(error) = checked {
            // It may be whole in the store, and must not take that one's place.
            tracing::warn!(%error, "the archive is not shipped");
            return Ok(());
        }
        let mark = listing::mark(&bytes);
        let key = listing::archive_key(self.term, name, &mark);
        self.area.put(&key, &bytes).await.map_err(store_error)?;
        stored.archives.insert(name.to_owned(), mark);
        Ok(())
    }
}

fn note(shipped: Result<()>) {
    if let Err(error) = shipped {
        tracing::warn!(%error, "not everything can be shipped; it is tried again");
    }
}

/// All of a file; none when it is gone.
async fn read(path: &Path) -> Result<Option<Vec<u8>>> {
    let path = path.to_owned();
    beside(move || match std::fs::read(&path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(file_error("read", &path)(error)),
    })
    .await
}

/// The mark of an archive on the disk.
async fn mark(path: &Path) -> Result<String> {
    let path = path.to_owned();
    beside(move || {
        let mut head = Vec::new();
        std::fs::File::open(&path)
            .and_then(|file| file.take(listing::HEAD_BYTES as u64).read_to_end(&mut head))
            .map_err(file_error("read", &path))?;
        Ok(listing::mark(&head))
    })
    .await
}

/// The files of a directory with what they look like; none where there is no directory.
async fn files(directory: PathBuf) -> Result<Vec<(PathBuf, Looks)>> {
    beside(move || {
        let entries = match std::fs::read_dir(&directory) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(file_error("list", &directory)(error)),
        };
        let mut files = Vec::new();
        for entry in entries {
            let entry = entry.map_err(file_error("list", &directory))?;
            // Gone meanwhile is as never there.
            let Ok(metadata) = entry.metadata() else { continue };
            let modified = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            files.push((entry.path(), (metadata.len(), modified)));
        }
        files.sort();
        Ok(files)
    })
    .await
}
