//! Shipping: what the coordinator's disk holds goes to the artifact store every few seconds, so that another
//! machine can go on from there.
//!
//! ```text
//! coordinator/<cluster>/terms/<term>                    who claimed it, and from which frame on
//! coordinator/<cluster>/journal/<term>/<first>-<last>   frames as they lie in the journal
//! coordinator/<cluster>/snapshots/<term>/<sequence>     snapshots as they lie beside it
//! coordinator/<cluster>/archive/job-<n>                 archives of ended jobs
//! ```
//!
//! Only durable frames are shipped, beside the loop: a slow or failing store delays shipping and nothing else.
//! What is shipped is never changed; which frames count when two terms overlap is [`chain`]'s to say, from the
//! claims. Losing the disk costs what was acknowledged since the last shipping: the interval, while the store
//! answers. Nothing here knows what an event means.

pub mod chain;
mod frames;
mod restore;
mod shipper;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use espalier_artifact::{ArtifactStore, ObjectArea};

pub use restore::{Restored, restore};
pub use shipper::Shipper;

use crate::journal::disk::{Disk, SystemDisk};
use crate::metrics::Metrics;
use crate::service::surroundings::Clock;
use crate::term::claims::{Claimant, store_error};
use crate::term::{Claims, Keeper};
use crate::{Error, Result};

/// How often what is new goes to the store, unless told otherwise.
pub const SHIP_INTERVAL: Duration = Duration::from_secs(5);

/// Names the data directory in claims of terms.
const CLAIMANT_FILE: &str = "claimant";
/// There while a journal is being built from the store, until its term is claimed.
const RESTORING_FILE: &str = "restoring";

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
    /// The last shipped frame.
    shipped: AtomicU64,
    /// Milliseconds after `started` at which all that was durable had been shipped, plus one; 0 before the first.
    up_to_date: AtomicU64,
}

impl Default for Progress {
    fn default() -> Self {
        Self(Arc::new(Inner {
            started: Instant::now(),
            durable: AtomicU64::new(0),
            shipped: AtomicU64::new(0),
            up_to_date: AtomicU64::new(0),
        }))
    }
}

impl Progress {
    /// The loop has made the journal durable up to this frame.
    pub fn durable(&self, frame: u64) {
        self.0.durable.store(frame, Ordering::Release);
    }

    /// Durable frames that are not in the store.
    pub fn frames_behind(&self) -> u64 {
        let shipped = self.0.shipped.load(Ordering::Acquire);
        self.0.durable.load(Ordering::Acquire).saturating_sub(shipped)
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

    fn shipped(&self, frame: u64) {
        self.0.shipped.store(frame, Ordering::Release);
    }

    /// All that was durable at this moment is in the store.
    fn up_to_date_at(&self, moment: Instant) {
        let since = moment.saturating_duration_since(self.0.started).as_millis();
        let since = u64::try_from(since).unwrap_or(u64::MAX).saturating_add(1);
        self.0.up_to_date.store(since, Ordering::Release);
    }
}

/// What [`prepare`] makes ready.
#[derive(Debug)]
pub struct Prepared {
    /// Claims the term, and then keeps it.
    pub keeper: Arc<Keeper>,
    /// Where the shipper works.
    pub area: ObjectArea,
    options: Options,
}

/// Builds the journal from the store where the data directory is empty, and makes ready to claim a term.
/// The data directory must be locked.
///
/// # Errors
/// When the store or the directory cannot be used, or what was shipped is damaged.
pub async fn prepare(store: &ArtifactStore, options: Options, clock: Arc<dyn Clock>) -> Result<Prepared> {
    check_cluster(&options.cluster)?;
    store.check().await.map_err(store_error)?;
    let area = store.area(&format!("coordinator/{}", options.cluster));
    let claims = Claims::new(area.clone(), &options.cluster);
    let restored = restore_where_empty(&options.data_dir, &area, &claims).await?;
    let claimant = Claimant {
        host: host(),
        claimant: claimant(&options.data_dir)?,
        start: random(),
        restored,
    };
    let runtime = tokio::runtime::Handle::current();
    let keeper = Keeper::new(claims, claimant, options.lease, clock, runtime);
    Ok(Prepared {
        keeper: Arc::new(keeper),
        area,
        options,
    })
}

impl Prepared {
    /// The term is claimed and the journal says so: from here on the directory goes on by itself.
    ///
    /// # Errors
    /// When the directory cannot be written.
    pub fn settled(&self) -> Result<()> {
        unmark(&SystemDisk, &self.options.data_dir)
    }

    /// The shipper of this term.
    pub fn shipper(&self, term: u64, progress: Progress, metrics: Metrics) -> Shipper {
        Shipper::new(self.area.clone(), &self.options, term, progress, metrics)
    }
}

async fn restore_where_empty(data_dir: &Path, area: &ObjectArea, claims: &Claims) -> Result<bool> {
    let marker = data_dir.join(RESTORING_FILE);
    let interrupted = marker.exists();
    if !interrupted && !is_empty(&data_dir.join("journal"))? {
        return Ok(false);
    }
    let claims = claims.all().await?;
    if claims.is_empty() && !interrupted {
        return Ok(false);
    }
    mark(&SystemDisk, data_dir)?;
    let restored = restore(area, &claims, data_dir).await?;
    tracing::info!(
        snapshot = restored.snapshot,
        last_frame = restored.last,
        archives = restored.archives,
        "the journal was built from the store"
    );
    Ok(true)
}

fn check_cluster(cluster: &str) -> Result<()> {
    let sound = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    if (1..=63).contains(&cluster.len()) && cluster.bytes().all(sound) {
        return Ok(());
    }
    Err(Error::Invalid(format!(
        "cluster is {cluster:?}, expected 1 to 63 of a-z, 0-9 and -, as in \"espalier\""
    )))
}

fn is_empty(directory: &Path) -> Result<bool> {
    match std::fs::read_dir(directory) {
        Ok(mut entries) => Ok(entries.next().is_none()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(true),
        Err(source) => Err(file_error("list", directory)(source)),
    }
}

fn claimant(data_dir: &Path) -> Result<String> {
    let path = data_dir.join(CLAIMANT_FILE);
    match std::fs::read_to_string(&path) {
        Ok(name) if !name.trim().is_empty() => return Ok(name.trim().to_owned()),
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(file_error("read", &path)(error));
        }
        Ok(_) | Err(_) => {}
    }
    let name = random();
    SystemDisk
        .write_whole(&path, name.as_bytes())
        .map_err(file_error("write", &path))?;
    Ok(name)
}

/// 128 bits that no other start has.
fn random() -> String {
    use std::hash::{BuildHasher, Hasher};
    let random = || std::hash::RandomState::new().build_hasher().finish();
    format!("{:016x}{:016x}", random(), random())
}

fn host() -> String {
    let named = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let named = named.trim();
    if named.is_empty() { "unknown host" } else { named }.to_owned()
}

/// Says, before anything else is written, that the journal is being built.
fn mark(disk: &dyn Disk, data_dir: &Path) -> Result<()> {
    let marker = data_dir.join(RESTORING_FILE);
    disk.write_whole(&marker, b"the journal is being built from the store\n")
        .map_err(file_error("write", &marker))
}

/// Takes that back for good: a marker that came back when the power went would have the next start throw away
/// what was acknowledged since.
fn unmark(disk: &dyn Disk, data_dir: &Path) -> Result<()> {
    let marker = data_dir.join(RESTORING_FILE);
    match disk.remove(&marker) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(file_error("remove", &marker)(error)),
        Ok(()) => disk
            .sync_directory(data_dir)
            .map_err(file_error("sync", data_dir)),
    }
}

pub(super) fn file_error(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::File { action, path, source }
}
