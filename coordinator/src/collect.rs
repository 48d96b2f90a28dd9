//! Garbage collection: artifacts that no job can need any more are removed from the store.
//!
//! Conservative by rule. An artifact goes only where nothing names it ([`needed`]), it was last put longer ago
//! than [`Options::collect_after`], and before the oldest attempt that is still open began: what a long attempt
//! has put and not reported yet is younger than the attempt. What is named is gathered, then the store is
//! listed, then it is gathered again, as the journal may have grown; and right before an artifact goes its age
//! is read again and the term's authority must hold, as a successor's jobs are not known here. A store that
//! another cluster uses is left alone for the same reason. An archive that is damaged or missing is fetched from
//! the store again, where it was shipped; while that cannot be, whatever was put before its job ended stays. What is
//! left to luck: the same bytes put again between the last look and the removal, which are next to each other;
//! and bytes that only such an archive names, put again since by an attempt that never reported them. What an
//! artifact's own bytes name is not followed: no task is given one that names others.

mod needed;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use espalier_artifact::{ArtifactStore, Name};
use tokio_util::sync::CancellationToken;

use crate::archive::Archives;
use crate::journal::disk::SystemDisk;
use crate::metrics::Metrics;
use crate::scheduler::JobId;
use crate::service::surroundings::Clock;
use crate::shipping;
use crate::term::claims::store_error;
use crate::term::{Fence, Standing};
use crate::{Error, Result};
use needed::Needed;

/// How often garbage is collected; the first time this long after the start.
pub const COLLECT_INTERVAL: Duration = Duration::from_secs(3600);
/// Younger artifacts stay, unless told otherwise.
pub const COLLECT_AFTER: Duration = Duration::from_secs(24 * 3600);

/// What is collected where.
#[derive(Debug, Clone)]
pub struct Options {
    /// The data directory of the coordinator.
    pub data_dir: PathBuf,
    /// The name of its cluster; none when the store lies in the data directory and nobody else uses it.
    pub cluster: Option<String>,
    /// See [`COLLECT_AFTER`].
    pub collect_after: Duration,
}

/// What was removed.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Collected {
    /// Artifacts.
    pub artifacts: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Records of attempts.
    pub records: u64,
    /// Files that were begun over a day ago and never finished.
    pub leftovers: u64,
}

/// How a collection ended that nothing went wrong in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// It went to its end.
    Done(Collected),
    /// Another cluster uses the store: nothing was removed.
    Shared,
}

/// Collects the garbage of one coordinator's store, beside the loop.
pub struct Collector {
    store: ArtifactStore,
    options: Options,
    fence: Arc<dyn Fence>,
    clock: Arc<dyn Clock>,
    metrics: Metrics,
}

impl Collector {
    /// A collector; the clock is the loop's.
    pub fn new(
        store: ArtifactStore,
        options: Options,
        fence: Arc<dyn Fence>,
        clock: Arc<dyn Clock>,
        metrics: Metrics,
    ) -> Self {
        Self {
            store,
            options,
            fence,
            clock,
            metrics,
        }
    }

    /// Collects at every interval until told to stop. What goes wrong is said in the log and tried again.
    pub async fn run(self, stop: CancellationToken) {
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(COLLECT_INTERVAL) => {}
            }
            match self.collect(&stop).await {
                Ok(Ended::Done(collected)) => {
                    tracing::info!(
                        artifacts = collected.artifacts,
                        bytes = collected.bytes,
                        records = collected.records,
                        leftovers = collected.leftovers,
                        "garbage was collected"
                    );
                }
                Ok(Ended::Shared) => {
                    tracing::warn!("another cluster uses the store: no garbage is collected");
                }
                Err(Error::Stopping) => return,
                Err(error) => {
                    self.metrics.collection_failed();
                    tracing::warn!(%error, "garbage could not be collected; it is tried again");
                }
            }
        }
    }

    /// Removes what nobody needs.
    ///
    /// # Errors
    /// When the journal, an archive or the store cannot be read, or the term's authority does not hold: then
    /// nothing more is removed. [`Error::Stopping`] when told to stop.
    pub async fn collect(&self, stop: &CancellationToken) -> Result<Ended> {
        if self.is_shared(stop).await? {
            return Ok(Ended::Shared);
        }
        let mut collected = Collected::default();
        let needed = self.needed(stop).await?;
        let doomed = self.doomed(&needed, stop).await?;
        // A job may have been submitted meanwhile that names one of them.
        let needed = self.needed(stop).await?;
        for name in doomed {
            self.remove(&name, &needed, &mut collected, stop).await?;
        }
        self.remove_records(&needed, &mut collected, stop).await?;
        collected.leftovers = unless(stop, self.store.remove_leftovers()).await?;
        Ok(Ended::Done(collected))
    }

    async fn is_shared(&self, stop: &CancellationToken) -> Result<bool> {
        let clusters = self.store.area("coordinator");
        let listed = unless(stop, clusters.list("")).await?;
        let own = self.options.cluster.as_deref();
        Ok(listed.iter().any(|object| object.key.split('/').next() != own))
    }

    /// Artifacts that may go, as things stand now.
    async fn doomed(&self, needed: &Needed, stop: &CancellationToken) -> Result<Vec<Name>> {
        let mut doomed = Vec::new();
        for first in 0..=u8::MAX {
            let found = unless(stop, self.store.artifacts(first)).await?;
            let now = self.clock.unix_ms();
            let idle = found
                .into_iter()
                .filter(|artifact| needed.lets_go(artifact, self.options.collect_after, now));
            doomed.extend(idle.map(|artifact| artifact.name));
        }
        Ok(doomed)
    }

    async fn remove(
        &self,
        name: &Name,
        needed: &Needed,
        collected: &mut Collected,
        stop: &CancellationToken,
    ) -> Result<()> {
        let Some(artifact) = unless(stop, self.store.stat(name.as_str())).await? else {
            return Ok(());
        };
        if !needed.lets_go(&artifact, self.options.collect_after, self.clock.unix_ms()) {
            return Ok(());
        }
        self.check_authority()?;
        unless(stop, self.store.remove(name.as_str())).await?;
        collected.artifacts = collected.artifacts.saturating_add(1);
        collected.bytes = collected.bytes.saturating_add(artifact.bytes);
        self.metrics.artifact_collected(artifact.bytes);
        Ok(())
    }

    async fn remove_records(
        &self,
        needed: &Needed,
        collected: &mut Collected,
        stop: &CancellationToken,
    ) -> Result<()> {
        for (about, attempt, set_at) in unless(stop, self.store.all_records()).await? {
            if needed.keeps_record(set_at, self.options.collect_after, self.clock.unix_ms()) {
                continue;
            }
            self.check_authority()?;
            unless(stop, self.store.remove_record(&about, attempt)).await?;
            collected.records = collected.records.saturating_add(1);
        }
        Ok(())
    }

    /// Whether no other coordinator has taken over, whose jobs would not be known here.
    fn check_authority(&self) -> Result<()> {
        match self.fence.standing(self.clock.elapsed()) {
            Standing::Holds => Ok(()),
            Standing::Waits | Standing::Superseded { .. } => Err(Error::Conflict(
                "the term's authority does not hold: nothing more is removed".to_owned(),
            )),
        }
    }

    async fn needed(&self, stop: &CancellationToken) -> Result<Needed> {
        let mut needed = self.on_disk(stop).await?;
        let mut healed = false;
        for job in needed.unreadable().collect::<Vec<_>>() {
            healed |= self.heal(job, stop).await?;
        }
        if healed {
            needed = self.on_disk(stop).await?;
        }
        self.metrics.archives_unreadable(needed.unreadable().count());
        let mut abouts: Vec<Name> = unless(stop, self.store.all_records())
            .await?
            .into_iter()
            .map(|(about, ..)| about)
            .collect();
        abouts.dedup();
        for about in abouts {
            for (_, record) in unless(stop, self.store.records(&about)).await? {
                needed.names_in(&record);
            }
        }
        Ok(needed)
    }

    async fn on_disk(&self, stop: &CancellationToken) -> Result<Needed> {
        let (data_dir, told) = (self.options.data_dir.clone(), stop.clone());
        // Waited for though told to stop: it looks by itself, and nothing may outlive this.
        tokio::task::spawn_blocking(move || Needed::on_disk(&data_dir, &told))
            .await
            .map_err(|error| Error::Internal(error.to_string()))?
    }

    /// Fetches an archive that was shipped in place of one that cannot be read. Whether there is a sound one.
    async fn heal(&self, job: JobId, stop: &CancellationToken) -> Result<bool> {
        let Some(cluster) = &self.options.cluster else {
            return Ok(false);
        };
        let area = self.store.area(&format!("coordinator/{cluster}"));
        let fetched = tokio::select! {
            biased;
            () = stop.cancelled() => return Err(Error::Stopping),
            fetched = shipping::fetch_archive(&area, job) => fetched?,
        };
        let Some(bytes) = fetched else {
            return Ok(false);
        };
        let archives = Archives::new(Arc::new(SystemDisk), &self.options.data_dir);
        let replaced = tokio::task::spawn_blocking(move || archives.replace(job, &bytes))
            .await
            .map_err(|error| Error::Internal(error.to_string()))?;
        match replaced {
            Ok(()) => tracing::info!(%job, "a damaged archive was replaced by the one that was shipped"),
            Err(error) => {
                tracing::warn!(%job, %error, "the archive that was shipped is of no use");
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// Waits for the store, unless told to stop before.
async fn unless<T>(
    stop: &CancellationToken,
    call: impl Future<Output = espalier_artifact::Result<T>>,
) -> Result<T> {
    tokio::select! {
        biased;
        () = stop.cancelled() => Err(Error::Stopping),
        answer = call => answer.map_err(store_error),
    }
}
