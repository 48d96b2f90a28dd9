//! Shipping: what the coordinator's disk holds goes to the artifact store every few seconds, so that another
//! machine can go on from there.
//!
//! ```text
//! coordinator/<cluster>/terms/<term>                    who claimed it, and from which frame on
//! coordinator/<cluster>/journal/<term>/<first>-<last>   frames as they lie in the journal
//! coordinator/<cluster>/snapshots/<term>/<sequence>     snapshots as they lie beside it
//! coordinator/<cluster>/archive/<term>/job-<n>-<mark>   archives of ended jobs
//! ```
//!
//! Only durable frames are shipped, beside the loop: a slow or failing store delays shipping and nothing else.
//! What is shipped is never changed, and everything is under the term that shipped it: which of it counts when two
//! terms overlap is [`chain`]'s to say, from the claims. Losing the disk costs what was acknowledged since the last
//! shipping: the interval, while the store answers. A coordinator that still runs when another takes over loses
//! what it acknowledges after the other has read the store, until it has seen the other's term. Nothing here knows
//! what an event means.

pub mod chain;
mod frames;
mod listing;
mod prune;
mod restore;
mod shipper;
mod start;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use espalier_artifact::ObjectArea;

pub use restore::{Restored, restore};
pub use shipper::Shipper;
pub use start::{CLAIMANT_FILE, Prepared, prepare};

use crate::scheduler::JobId;
use crate::term::Claim;
use crate::term::claims::store_error;
use crate::{Error, Result};

/// How often what is new goes to the store, unless told otherwise.
pub const SHIP_INTERVAL: Duration = Duration::from_secs(5);

/// What a coordinator with a store of its own for itself and its successors runs with.
#[derive(Debug, Clone)]
pub struct Options {
    /// The data directory.
    pub data_dir: PathBuf,
    /// The cluster's name: coordinators of one cluster follow one another.
    pub cluster: String,
    /// See [`SHIP_INTERVAL`].
    pub interval: Duration,
    /// See [`crate::term::TERM_LEASE`].
    pub lease: Duration,
}

/// How far shipping has come. Clones are the same.
#[derive(Debug, Clone)]
pub struct Progress(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    started: Instant,
    /// The last durable frame, as the loop says.
    durable: AtomicU64,
    /// Milliseconds after `started` at which all that was durable had been shipped, plus one; 0 before the first.
    up_to_date: AtomicU64,
}

impl Default for Progress {
    fn default() -> Self {
        Self(Arc::new(Inner {
            started: Instant::now(),
            durable: AtomicU64::new(0),
            up_to_date: AtomicU64::new(0),
        }))
    }
}

impl Progress {
    /// The loop has made the journal durable up to this frame.
    pub fn durable(&self, frame: u64) {
        self.0.durable.store(frame, Ordering::Release);
    }

    /// How long ago all that was durable was in the store: what losing the disk now would cost at most.
    pub fn lag(&self) -> Duration {
        let elapsed = self.0.started.elapsed();
        let at = self.0.up_to_date.load(Ordering::Acquire).saturating_sub(1);
        elapsed.saturating_sub(Duration::from_millis(at))
    }

    fn last_durable(&self) -> u64 {
        self.0.durable.load(Ordering::Acquire)
    }

    /// All that was durable at this moment is in the store.
    fn up_to_date_at(&self, moment: Instant) {
        let since = moment.saturating_duration_since(self.0.started).as_millis();
        let since = u64::try_from(since).unwrap_or(u64::MAX).saturating_add(1);
        self.0.up_to_date.store(since, Ordering::Release);
    }
}

/// The last frame that a start from the store would know, as the claims are.
pub(crate) async fn reach(area: &ObjectArea, claims: &[Claim]) -> Result<u64> {
    let listed = listing::list(area).await?;
    Ok(chain::reach(claims, &listed.pieces, &listed.snapshots))
}

/// The archive of a job as it was shipped; none when there is none that is sound.
///
/// # Errors
/// When the store cannot be read.
pub async fn fetch_archive(area: &ObjectArea, job: JobId) -> Result<Option<Bytes>> {
    let Some(shipped) = listing::archives(area).await?.remove(&job.to_string()) else {
        return Ok(None);
    };
    match area.get(&shipped.key).await {
        Ok(bytes) => Ok(bytes),
        Err(espalier_artifact::Error::DamagedObject { .. }) => Ok(None),
        Err(error) => Err(store_error(error)),
    }
}

/// Work on the disk, away from the threads that must not wait for it.
async fn beside<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|error| Error::Internal(error.to_string()))?
}

pub(super) fn file_error(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::File { action, path, source }
}
