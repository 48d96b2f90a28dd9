//! The shipper: a task beside the loop that brings what is new on the disk to the store.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use espalier_artifact::ObjectArea;
use tokio_util::sync::CancellationToken;

use super::chain::{self, Piece, Snapshot};
use super::frames::{self, Cursor};
use super::restore::list;
use super::{Options, Progress, file_error};
use crate::metrics::Metrics;
use crate::term::claims::store_error;
use crate::term::{Claim, Claims};
use crate::{Error, Result};

/// How long the last shipping may take when the coordinator stops.
const LAST: Duration = Duration::from_secs(5);
/// Snapshots that stay in the store.
const KEPT: usize = 2;

/// Ships one term's journal, snapshots and archives.
#[derive(Debug)]
pub struct Shipper {
    area: ObjectArea,
    claims: Claims,
    data_dir: PathBuf,
    interval: Duration,
    term: u64,
    progress: Progress,
    metrics: Metrics,
    /// Where to read on; none before the store was asked what it has.
    cursor: Option<Cursor>,
    /// Files that are in the store, by key, with what they looked like.
    shipped: BTreeMap<String, (u64, SystemTime)>,
}

impl Shipper {
    pub(super) fn new(
        area: ObjectArea,
        options: &Options,
        term: u64,
        progress: Progress,
        metrics: Metrics,
    ) -> Self {
        Self {
            claims: Claims::new(area.clone(), &options.cluster),
            area,
            data_dir: options.data_dir.clone(),
            interval: options.interval,
            term,
            progress,
            metrics,
            cursor: None,
            shipped: BTreeMap::new(),
        }
    }

    /// Ships at every interval until told to stop, and then once more, as far as that goes quickly.
    pub async fn run(mut self, stop: CancellationToken) {
        loop {
            tokio::select! {
                () = stop.cancelled() => break,
                () = tokio::time::sleep(self.interval) => {}
            }
            tokio::select! {
                () = stop.cancelled() => break,
                shipped = self.ship() => note(shipped),
            }
            self.metrics.set_ship_lag(Some(self.progress.lag()));
        }
        match tokio::time::timeout(LAST, self.ship()).await {
            Ok(shipped) => note(shipped),
            Err(_) => tracing::warn!("the store was too slow to ship the last of the journal"),
        }
    }

    /// Brings everything that is durable now to the store.
    ///
    /// # Errors
    /// When the disk or the store cannot be used; what was shipped before stays shipped.
    pub async fn ship(&mut self) -> Result<()> {
        let begun = Instant::now();
        let through = self.progress.last_durable();
        let claims = self.first_claims().await?;
        // First, so that no frame or snapshot in the store says of a job that it is archived and its archive is not.
        // One that cannot be read must not keep the journal from being shipped, though.
        let archived = self.ship_archives().await;
        self.ship_snapshots(&claims, through).await?;
        self.ship_frames(&claims, through).await?;
        self.progress.up_to_date_at(begun);
        archived
    }

    /// The claims, as far as they are needed: for finding out where to begin. What a coordinator that was
    /// superseded goes on shipping is void, so nobody needs to look each time.
    async fn first_claims(&self) -> Result<Vec<Claim>> {
        if self.cursor.is_some() {
            return Ok(Vec::new());
        }
        self.claims.all().await
    }

    async fn ship_frames(&mut self, claims: &[Claim], through: u64) -> Result<()> {
        let mut cursor = match &self.cursor {
            Some(cursor) => cursor.clone(),
            None => {
                let listed = list(&self.area).await?;
                let reached = chain::reach(claims, &listed.pieces, &listed.snapshots);
                Cursor::at(reached.saturating_add(1))
            }
        };
        let directory = self.data_dir.join("journal");
        loop {
            let (directory, mut ahead) = (directory.clone(), cursor.clone());
            let read = move || frames::read(&directory, &mut ahead, through).map(|found| (found, ahead));
            let (found, ahead) = beside(read).await?;
            let Some(found) = found else { break };
            let key = Piece::key(self.term, found.first, found.last);
            self.area.put(&key, &found.bytes).await.map_err(store_error)?;
            self.progress.shipped(found.last);
            cursor = ahead;
            self.cursor = Some(cursor.clone());
        }
        self.cursor = Some(cursor);
        Ok(())
    }

    async fn ship_snapshots(&mut self, claims: &[Claim], through: u64) -> Result<()> {
        let directory = self.data_dir.join("journal");
        let mut new = false;
        for (path, looks) in files(&directory)? {
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
            let key = Snapshot::key(self.term, sequence);
            new |= self.ship_file(&path, &key, looks).await?;
        }
        if new { self.prune(claims).await } else { Ok(()) }
    }

    async fn ship_archives(&mut self) -> Result<()> {
        for (path, looks) in files(&self.data_dir.join("archive"))? {
            let name = path
                .file_name()
                .and_then(|name| name.to_str()?.strip_suffix(".archive"));
            let Some(name) = name else { continue };
            let key = format!("archive/{name}");
            self.ship_file(&path, &key, looks).await?;
        }
        Ok(())
    }

    /// Ships a file that is written whole, unless it is there already. Whether it was new.
    async fn ship_file(&mut self, path: &Path, key: &str, looks: (u64, SystemTime)) -> Result<bool> {
        if self.shipped.get(key) == Some(&looks) {
            return Ok(false);
        }
        let owned = path.to_owned();
        let bytes = match beside(move || Ok(std::fs::read(owned))).await? {
            Ok(bytes) => bytes,
            // The journal lets old snapshots go.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(false),
            Err(error) => return Err(file_error("read", path)(error)),
        };
        self.area.put(key, &bytes).await.map_err(store_error)?;
        self.shipped.insert(key.to_owned(), looks);
        Ok(true)
    }

    /// Removes what no start needs any more: all but two snapshots, and frames before the older of them.
    async fn prune(&mut self, claims: &[Claim]) -> Result<()> {
        let claims = if claims.is_empty() {
            self.claims.all().await?
        } else {
            claims.to_vec()
        };
        if claims.iter().any(|claim| claim.term > self.term) {
            return Err(Error::Conflict(
                "another coordinator has taken over: nothing is removed".to_owned(),
            ));
        }
        let listed = list(&self.area).await?;
        let sound = chain::sound(&claims, &listed.snapshots);
        let mut kept: Vec<u64> = sound.iter().map(|snapshot| snapshot.sequence).collect();
        kept.dedup();
        kept.truncate(KEPT);
        let (Some(older), true) = (kept.last().copied(), kept.len() == KEPT) else {
            return Ok(());
        };
        let snapshots = listed
            .snapshots
            .iter()
            .filter(|snapshot| snapshot.sequence < older)
            .map(|snapshot| &snapshot.key);
        let pieces = listed
            .pieces
            .iter()
            .filter(|piece| piece.last <= older)
            .map(|piece| &piece.key);
        for key in snapshots.chain(pieces) {
            self.area.delete(key).await.map_err(store_error)?;
            self.shipped.remove(key);
        }
        Ok(())
    }
}

fn note(shipped: Result<()>) {
    if let Err(error) = shipped {
        tracing::warn!(%error, "the journal cannot be shipped; it is tried again");
    }
}

async fn beside<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|error| Error::Internal(error.to_string()))?
}

/// The files of a directory with their size and age; none where there is no directory.
fn files(directory: &Path) -> Result<Vec<(PathBuf, (u64, SystemTime))>> {
    let entries = match std::fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(file_error("list", directory)(error)),
    };
    let mut files = Vec::new();
    for entry in entries {
        let entry = entry.map_err(file_error("list", directory))?;
        // Gone meanwhile is as never there.
        let Ok(metadata) = entry.metadata() else { continue };
        let modified = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
        files.push((entry.path(), (metadata.len(), modified)));
    }
    files.sort();
    Ok(files)
}
