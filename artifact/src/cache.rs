//! Files of a remote store on this machine: a bounded cache, safe to share between processes.
//!
//! ```text
//! artifacts/<first 2 digits>/<name>   whole files, checked whenever they are handed out; modified = last used
//! locks/<first 2 digits>              held by whoever downloads; several processes fetch a file once
//! scratch/                            what is being written or downloaded
//! ```

use std::fmt;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use futures::TryStreamExt;

use crate::objects::Objects;
pub(crate) use crate::scratch::unused_path;
use crate::store::off_the_loop;
use crate::{Error, Name, Options, Result, hash_file};

/// A file handed out this recently is not evicted: its reader may not have opened it yet.
const IN_USE: Duration = Duration::from_secs(600);
/// Scratch files this old belong to nobody.
pub(crate) const LEFTOVER: Duration = Duration::from_secs(24 * 3600);
/// How often a lock that another process holds is tried.
const LOCK_PAUSE: Duration = Duration::from_millis(100);
/// A holder that has not got on for this long is not waited for: longer than one part may take, and shorter than an
/// attempt may do nothing. Whoever waits for one that gets on is told so each time.
const LOCK_PATIENCE: Duration = Duration::from_secs(240);

#[derive(Debug, Clone)]
pub(crate) struct Cache {
    directory: PathBuf,
    limit_bytes: u64,
    /// Told while this process waits for another one's download that gets on.
    pub waits: Listener,
}

/// Told of something again and again; nobody by default.
#[derive(Clone, Default)]
pub(crate) struct Listener(Option<Arc<dyn Fn() + Send + Sync>>);

impl Listener {
    pub fn new(tell: impl Fn() + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(tell)))
    }

    fn tell(&self) {
        if let Some(tell) = &self.0 {
            tell();
        }
    }
}

impl fmt::Debug for Listener {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Listener")
    }
}

/// Names an operation's file in its error.
pub(crate) fn io_error(path: &Path) -> impl Fn(std::io::Error) -> Error + use<> {
    let path = path.to_owned();
    move |source| Error::Io {
        path: path.clone(),
        source,
    }
}

/// Removes plain files in a directory that are older than [`LEFTOVER`] and that `doomed` points at; gives
/// their number. Directories are left alone.
pub(crate) fn sweep(directory: &Path, doomed: impl Fn(&str) -> bool) -> Result<u64> {
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(0),
        Err(error) => return Err(io_error(directory)(error)),
    };
    let mut removed = 0_u64;
    for entry in entries {
        let Ok(entry) = entry else { continue };
        let Ok(metadata) = entry.metadata() else { continue };
        let old = metadata
            .modified()
            .ok()
            .and_then(|modified| SystemTime::now().duration_since(modified).ok())
            .is_some_and(|age| age >= LEFTOVER);
        let named = entry.file_name().to_str().is_some_and(&doomed);
        if metadata.is_file() && old && named && fs::remove_file(entry.path()).is_ok() {
            removed = removed.saturating_add(1);
        }
    }
    Ok(removed)
}

/// Whether a file is one that the object store stages beside an object before it is promoted: no key has a `#`.
pub(crate) fn is_staged(name: &str) -> bool {
    name.rsplit_once('#')
        .is_some_and(|(_, suffix)| !suffix.is_empty() && suffix.bytes().all(|byte| byte.is_ascii_digit()))
}

/// As [`sweep`], of staged files at any depth below a directory.
pub(crate) fn sweep_staged(directory: &Path) -> Result<u64> {
    let mut removed = sweep(directory, is_staged)?;
    let Ok(entries) = fs::read_dir(directory) else {
        return Ok(removed);
    };
    for entry in entries.flatten() {
        // Not through links: what they lead to is not the store's.
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            removed = removed.saturating_add(sweep_staged(&entry.path())?);
        }
    }
    Ok(removed)
}

impl Cache {
    pub fn open(options: &Options) -> Result<Self> {
        let cache = Self {
            directory: options.cache_dir.clone(),
            limit_bytes: options.cache_bytes,
            waits: Listener::default(),
        };
        for room in ["artifacts", "locks", "scratch"] {
            let room = cache.directory.join(room);
            fs::create_dir_all(&room).map_err(io_error(&room))?;
        }
        sweep(&cache.scratch(), |_| true)?;
        Ok(cache)
    }

    pub fn scratch(&self) -> PathBuf {
        self.directory.join("scratch")
    }

    fn path(&self, name: &Name) -> PathBuf {
        self.directory.join("artifacts").join(name.key())
    }

    /// The file, downloaded where it is not here yet or no longer sound.
    pub async fn file(&self, objects: &Objects, name: &Name) -> Result<PathBuf> {
        self.file_within(LOCK_PATIENCE, objects, name).await
    }

    async fn file_within(&self, patience: Duration, objects: &Objects, name: &Name) -> Result<PathBuf> {
        if let Some(path) = self.look(name).await? {
            return Ok(path);
        }
        // Without the lock the file may be fetched twice, which costs time: it is moved into place whole.
        let lock = self.lock(patience, name).await?;
        if let Some(path) = self.look(name).await? {
            return Ok(path);
        }
        let temporary = unused_path(&self.scratch());
        let downloaded = self.download(objects, name, &temporary, lock.as_ref()).await;
        if downloaded.is_err() {
            // The error that matters is the one above.
            let _ = fs::remove_file(&temporary);
        }
        drop(lock);
        downloaded
    }

    /// Each part is noted on the lock, so that who waits for it sees that it gets on.
    async fn download(
        &self,
        objects: &Objects,
        name: &Name,
        temporary: &Path,
        lock: Option<&File>,
    ) -> Result<PathBuf> {
        let key = object_store::path::Path::from(name.key());
        let meta = objects.head(&key).await?.ok_or_else(|| Error::NotFound {
            name: name.to_string(),
            location: objects.location().to_owned(),
        })?;
        let failed = io_error(temporary);
        let mut file = File::create_new(temporary).map_err(&failed)?;
        let mut hasher = blake3::Hasher::new();
        let mut parts = std::pin::pin!(objects.parts(&key, meta.size));
        while let Some(part) = parts.try_next().await? {
            if let Some(Err(error)) = lock.map(|lock| lock.set_modified(SystemTime::now())) {
                tracing::debug!(%error, "a download's progress cannot be noted on its lock");
            }
            let failed = io_error(temporary);
            (file, hasher) = off_the_loop(move || {
                std::io::Write::write_all(&mut file, &part).map_err(failed)?;
                hasher.update(&part);
                Ok((file, hasher))
            })
            .await?;
        }
        let found = Name::from_hash(hasher.finalize());
        if *name != found {
            return Err(Error::Damaged {
                name: name.to_string(),
                found: found.to_string(),
            });
        }
        drop(file);
        let (cache, name, temporary) = (self.clone(), name.clone(), temporary.to_owned());
        off_the_loop(move || {
            let path = cache.adopt(&temporary, &name)?;
            cache.make_room()?;
            Ok(path)
        })
        .await
    }

    /// Moves a file whose content has this name into the cache.
    pub fn adopt(&self, file: &Path, name: &Name) -> Result<PathBuf> {
        let path = self.path(name);
        if let Some(directory) = path.parent() {
            fs::create_dir_all(directory).map_err(io_error(directory))?;
        }
        used(file);
        fs::rename(file, &path).map_err(io_error(&path))?;
        Ok(path)
    }

    /// The file where it is here and sound.
    async fn look(&self, name: &Name) -> Result<Option<PathBuf>> {
        let (path, name) = (self.path(name), name.clone());
        off_the_loop(move || {
            if !path.is_file() {
                return Ok(None);
            }
            // Said before it is read, so that nobody evicts it meanwhile.
            used(&path);
            match hash_file(&path) {
                Ok(found) if found == name => {
                    // To read it may have taken longer than it counts as in use, and somebody have evicted it meanwhile.
                    used(&path);
                    Ok(path.is_file().then_some(path))
                }
                Ok(_) => {
                    tracing::warn!(%name, "a cached artifact is damaged: it is fetched again");
                    fs::remove_file(&path).or_else(gone).map_err(io_error(&path))?;
                    Ok(None)
                }
                // Evicted by another process just now.
                Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => Ok(None),
                Err(error) => Err(error),
            }
        })
        .await
    }

    /// Waits until no other process downloads a file of this fan. A process that dies lets go; one that is stopped
    /// or hangs does not, and after `patience` without progress there is no lock.
    async fn lock(&self, patience: Duration, name: &Name) -> Result<Option<File>> {
        let fan = name.as_str().get(..2).unwrap_or_default();
        let path = self.directory.join("locks").join(fan);
        let file = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .map_err(io_error(&path))?;
        let noted = || file.metadata().and_then(|metadata| metadata.modified()).ok();
        let mut holder = Holder::seen(noted(), Instant::now());
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Some(file)),
                Err(fs::TryLockError::WouldBlock) => {}
                Err(fs::TryLockError::Error(source)) => return Err(io_error(&path)(source)),
            }
            let now = Instant::now();
            if holder.has_got_on(noted(), now) {
                self.waits.tell();
            }
            if holder.stood_still(now) >= patience {
                tracing::warn!(%name, "whoever downloads for this machine does not get on: downloading beside it");
                return Ok(None);
            }
            tokio::time::sleep(LOCK_PAUSE.min(patience)).await;
        }
    }

    /// Evicts what was not used for longest until the rest is within the limit.
    pub fn make_room(&self) -> Result<()> {
        let artifacts = self.directory.join("artifacts");
        let mut files = Vec::new();
        for fan in fs::read_dir(&artifacts).map_err(io_error(&artifacts))?.flatten() {
            let Ok(entries) = fs::read_dir(fan.path()) else {
                continue;
            };
            for entry in entries.flatten() {
                let Ok(metadata) = entry.metadata() else { continue };
                let last_used = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                files.push((last_used, metadata.len(), entry.path()));
            }
        }
        let mut total: u64 = files.iter().map(|(_, bytes, _)| bytes).sum();
        files.sort();
        for (last_used, bytes, path) in files {
            let fresh = SystemTime::now()
                .duration_since(last_used)
                .map_or(true, |age| age < IN_USE);
            if total <= self.limit_bytes || fresh {
                break;
            }
            fs::remove_file(&path).or_else(gone).map_err(io_error(&path))?;
            total = total.saturating_sub(bytes);
        }
        Ok(())
    }
}

/// Who holds a lock, as others see it.
struct Holder {
    /// When it last noted its progress.
    noted: Option<SystemTime>,
    /// When that was first seen.
    seen: Instant,
}

impl Holder {
    fn seen(noted: Option<SystemTime>, seen: Instant) -> Self {
        Self { noted, seen }
    }

    /// Whether it has noted progress since it was last looked at.
    fn has_got_on(&mut self, noted: Option<SystemTime>, now: Instant) -> bool {
        let has = noted != self.noted;
        if has {
            *self = Self::seen(noted, now);
        }
        has
    }

    fn stood_still(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.seen)
    }
}

/// Notes that a file was used; only eviction looks at it, so a failure costs at most a download.
fn used(path: &Path) {
    let noted = File::options()
        .append(true)
        .open(path)
        .and_then(|file| file.set_modified(SystemTime::now()));
    if let Err(error) = noted {
        tracing::debug!(%error, "the use of a cached file cannot be noted");
    }
}

fn gone(error: std::io::Error) -> std::io::Result<()> {
    if error.kind() == std::io::ErrorKind::NotFound {
        Ok(())
    } else {
        Err(error)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn aged(cache: &Cache, content: &[u8], age: Duration) -> PathBuf {
        let file = unused_path(&cache.scratch());
        fs::write(&file, content).unwrap();
        let path = cache.adopt(&file, &Name::of(content)).unwrap();
        let file = File::options().append(true).open(&path).unwrap();
        file.set_modified(SystemTime::now() - age).unwrap();
        path
    }

    #[test]
    fn what_was_not_used_for_longest_is_evicted_and_what_is_fresh_stays_though_it_is_too_much() {
        let directory = tempfile::tempdir().unwrap();
        let options = Options {
            cache_dir: directory.path().to_owned(),
            cache_bytes: 25,
        };
        let cache = Cache::open(&options).unwrap();
        let oldest = aged(&cache, b"ten bytes.", Duration::from_secs(9000));
        let older = aged(&cache, b"ten more..", Duration::from_secs(8000));
        let old = aged(&cache, b"and ten...", Duration::from_secs(7000));
        cache.make_room().unwrap();
        assert_eq!(
            [oldest.exists(), older.exists(), old.exists()],
            [false, true, true]
        );
        let fresh = aged(&cache, &[7; 100], Duration::from_secs(1));
        cache.make_room().unwrap();
        assert_eq!(
            [older.exists(), old.exists(), fresh.exists()],
            [false, false, true]
        );
    }

    #[test]
    fn scratch_of_yesterday_is_swept_when_a_cache_is_opened_and_that_of_today_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let options = Options {
            cache_dir: directory.path().to_owned(),
            cache_bytes: 25,
        };
        let cache = Cache::open(&options).unwrap();
        let (old, new) = (cache.scratch().join("old"), cache.scratch().join("new"));
        fs::write(&new, b"new").unwrap();
        let file = File::create(&old).unwrap();
        file.set_modified(SystemTime::now() - LEFTOVER * 2).unwrap();
        Cache::open(&options).unwrap();
        assert_eq!([old.exists(), new.exists()], [false, true]);
    }

    #[tokio::test]
    async fn a_lock_whose_holder_does_not_get_on_is_not_waited_for() {
        let directory = tempfile::tempdir().unwrap();
        let options = Options {
            cache_dir: directory.path().to_owned(),
            cache_bytes: 1 << 20,
        };
        let cache = Cache::open(&options).unwrap();
        let objects = Objects::new(
            std::sync::Arc::new(object_store::memory::InMemory::new()),
            "memory",
            "",
            crate::identity::Known::at(None),
        );
        let name = Name::of(b"weights");
        let key = object_store::path::Path::from(name.key());
        objects.put(&key, "weights".into()).await.unwrap();
        // As a process would that is stopped in the middle of a download.
        let fan = directory.path().join("locks").join(&name.as_str()[..2]);
        let held = File::create(&fan).unwrap();
        held.try_lock().unwrap();
        let fetched = cache.file_within(Duration::from_millis(50), &objects, &name);
        let path = tokio::time::timeout(Duration::from_secs(60), fetched)
            .await
            .expect("it does not wait for ever")
            .unwrap();
        assert_eq!(fs::read(path).unwrap(), b"weights");
    }

    #[test]
    fn a_holder_stands_still_from_when_it_was_last_seen_to_get_on() {
        let (start, noted) = (Instant::now(), SystemTime::now());
        let after = |seconds| start + Duration::from_secs(seconds);
        let mut holder = Holder::seen(Some(noted), start);
        assert!(!holder.has_got_on(Some(noted), after(5)));
        assert_eq!(holder.stood_still(after(5)), Duration::from_secs(5));
        let later = Some(noted + Duration::from_millis(1));
        assert!(holder.has_got_on(later, after(7)));
        assert_eq!(holder.stood_still(after(7)), Duration::ZERO);
        assert!(!holder.has_got_on(later, after(9)));
        assert_eq!(holder.stood_still(after(9)), Duration::from_secs(2));
    }

    #[tokio::test]
    async fn who_waits_for_a_holder_that_gets_on_is_told_so_each_time_and_gets_its_lock() {
        let directory = tempfile::tempdir().unwrap();
        let options = Options {
            cache_dir: directory.path().to_owned(),
            cache_bytes: 1 << 20,
        };
        let told = Arc::new(AtomicUsize::new(0));
        let tell = Arc::clone(&told);
        let waits = Listener::new(move || {
            tell.fetch_add(1, Ordering::SeqCst);
        });
        let cache = Cache {
            waits,
            ..Cache::open(&options).unwrap()
        };
        let name = Name::of(b"weights");
        let fan = directory.path().join("locks").join(&name.as_str()[..2]);
        let held = File::create(&fan).unwrap();
        held.try_lock().unwrap();
        // Longer than the test takes on a busy machine.
        let lock = cache.lock(Duration::from_secs(600), &name);
        tokio::pin!(lock);
        let early = tokio::time::timeout(Duration::ZERO, &mut lock).await;
        assert!(early.is_err());
        for times in 1..=3 {
            let noted = SystemTime::UNIX_EPOCH + Duration::from_secs(3600) * times;
            held.set_modified(noted).unwrap();
            while told.load(Ordering::SeqCst) < times as usize {
                let early = tokio::time::timeout(LOCK_PAUSE, &mut lock).await;
                assert!(early.is_err(), "a holder that gets on is waited for");
            }
        }
        let early = tokio::time::timeout(3 * LOCK_PAUSE, &mut lock).await;
        assert!(early.is_err());
        assert_eq!(told.load(Ordering::SeqCst), 3, "it does not get on any more");
        drop(held);
        let lock = tokio::time::timeout(Duration::from_secs(60), lock).await;
        assert!(lock.expect("nobody holds it").unwrap().is_some());
    }
}
