//! A start with a store: the journal is built from it where the disk holds none, and a term made ready to claim.

use std::path::Path;
use std::sync::Arc;

use espalier_artifact::{ArtifactStore, ObjectArea};

use super::{Options, Progress, Shipper, beside, file_error, restore};
use crate::journal;
use crate::journal::disk::{Disk, SystemDisk};
use crate::service::surroundings::Clock;
use crate::term::claims::{Claimant, store_error};
use crate::term::{Claims, Keeper};
use crate::{Error, Result};

/// Names the data directory in claims of terms; there once a coordinator with a store has run on it.
pub const CLAIMANT_FILE: &str = "claimant";
/// Says which file the name was written to: a copy of the directory has another.
const ORIGIN_FILE: &str = "claimant-origin";
/// There while a journal is being built from the store, until its term is claimed.
pub(super) const RESTORING_FILE: &str = "restoring";

/// What [`prepare`] makes ready.
#[derive(Debug)]
pub struct Prepared {
    /// Claims the term, and then keeps it.
    pub keeper: Arc<Keeper>,
    /// Where the shipper works.
    pub area: ObjectArea,
    options: Options,
}

/// Builds the journal from the store where the data directory holds none, and makes ready to claim a term.
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
    let data_dir = options.data_dir.clone();
    let claimant = Claimant {
        host: host(),
        claimant: beside(move || claimant(&data_dir)).await?,
        start: random(),
        lease: options.lease,
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
    /// The term is claimed and the journal says so: from here on the directory goes on by itself. Blocks on the
    /// disk.
    ///
    /// # Errors
    /// When the directory cannot be written.
    pub fn settled(&self) -> Result<()> {
        unmark(&SystemDisk, &self.options.data_dir)
    }

    /// The shipper of this term.
    pub fn shipper(&self, term: u64, progress: Progress) -> Shipper {
        Shipper::new(self.area.clone(), &self.options, term, progress)
    }
}

/// The highest term as the journal was built from the store; none when it was not.
async fn restore_where_empty(data_dir: &Path, area: &ObjectArea, claims: &Claims) -> Result<Option<u64>> {
    let marker = data_dir.join(RESTORING_FILE);
    let journal = data_dir.join("journal");
    let (interrupted, empty) =
        beside(move || Ok((marker.exists(), journal::is_empty(&SystemDisk, &journal)?))).await?;
    if !interrupted && (!empty || claims.highest_term().await?.is_none()) {
        return Ok(None);
    }
    let marked = data_dir.to_owned();
    beside(move || mark(&SystemDisk, &marked)).await?;
    let restored = restore(area, claims, data_dir).await?;
    tracing::info!(
        snapshot = restored.snapshot,
        last_frame = restored.last,
        archives = restored.archives,
        "the journal was built from the store"
    );
    Ok(Some(restored.term))
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

/// The name of this data directory in claims. One that was copied gets a name of its own: the directory it was
/// copied from may still be served from, or go on later.
pub(super) fn claimant(data_dir: &Path) -> Result<String> {
    let (path, origin) = (data_dir.join(CLAIMANT_FILE), data_dir.join(ORIGIN_FILE));
    if let Some(name) = read_if_there(&path)? {
        if read_if_there(&origin)?.as_deref() == Some(birth(&path)?.as_str()) {
            return Ok(name);
        }
        tracing::warn!(
            data_dir = %data_dir.display(),
            "the data directory is a copy of another: it takes part under a name of its own"
        );
    }
    let name = random();
    SystemDisk
        .write_whole(&path, name.as_bytes())
        .map_err(file_error("write", &path))?;
    SystemDisk
        .write_whole(&origin, birth(&path)?.as_bytes())
        .map_err(file_error("write", &origin))?;
    Ok(name)
}

fn read_if_there(path: &Path) -> Result<Option<String>> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text.trim().to_owned()).filter(|text| !text.is_empty())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(file_error("read", path)(error)),
    }
}

/// What no copy of a file keeps: its number in the file system and when it was made, where that is known. Both
/// outlast remounts and changes of owner.
fn birth(path: &Path) -> Result<String> {
    use std::os::unix::fs::MetadataExt;
    let known = std::fs::metadata(path).map_err(file_error("look at", path))?;
    let made = known.created().ok();
    let made = made.and_then(|made| made.duration_since(std::time::UNIX_EPOCH).ok());
    Ok(format!(
        "{} {}",
        known.ino(),
        made.map_or(0, |made| made.as_nanos())
    ))
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
pub(super) fn mark(disk: &dyn Disk, data_dir: &Path) -> Result<()> {
    let marker = data_dir.join(RESTORING_FILE);
    disk.write_whole(&marker, b"the journal is being built from the store\n")
        .map_err(file_error("write", &marker))
}

/// Takes that back for good: a marker that came back when the power went would have the next start throw away
/// what was acknowledged since.
pub(super) fn unmark(disk: &dyn Disk, data_dir: &Path) -> Result<()> {
    let marker = data_dir.join(RESTORING_FILE);
    match disk.remove(&marker) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(file_error("remove", &marker)(error)),
        Ok(()) => disk
            .sync_directory(data_dir)
            .map_err(file_error("sync", data_dir)),
    }
}
