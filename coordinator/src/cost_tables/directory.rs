//! The directory of kept tables, which several processes read, add to and empty at once.
//!
//! Whoever changes it holds a lock on `.lock` in it. Readers need none, as files are written whole or not at all, and
//! files may be copied and removed by hand at any time. `.taken` lists the profiles whose measurements were taken in: each
//! is taken once, so that a job that goes on for long does not put its rows back over newer ones, nor bring back what was
//! removed meanwhile.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use espalier_proto::task::Profile;
use espalier_search::{CostKey, Kept};

use super::KeptTable;
use super::form::{self, LARGEST_FILE, Wrong};
use crate::{Error, Result};

const LOCK: &str = ".lock";
const TAKEN: &str = ".taken";
/// Profiles that are remembered to have been taken in.
const MOST_TAKEN: usize = 4096;
/// How long another process may change the directory before it is given up.
const PATIENCE: Duration = Duration::from_secs(10);
const BETWEEN_TRIES: Duration = Duration::from_millis(20);
/// A profile is told no more than this: it travels in a task's spec and lies in the journal.
const MOST_TOLD_BYTES: usize = 2 << 20;
/// Names to try for a file that is not whole yet.
const MOST_NAMES: usize = 100;

/// The directory. Cheap to copy; its calls read the disk: not for the loop.
#[derive(Debug, Clone)]
pub struct CostTables {
    directory: PathBuf,
}

/// What the directory holds of one target, in one file or, where some were copied there by hand, in several.
struct Entry {
    paths: Vec<PathBuf>,
    table: KeptTable,
    /// When the last of the files was written.
    modified: SystemTime,
}

impl CostTables {
    /// Tables in `directory`, which is made when the first is kept.
    pub fn at(directory: impl Into<PathBuf>) -> Self {
        Self {
            directory: directory.into(),
        }
    }

    /// Every table that can be read, by key, and what is wrong with the others.
    ///
    /// # Errors
    /// When the directory is there and cannot be listed.
    pub fn list(&self) -> Result<(Vec<KeptTable>, Vec<String>)> {
        let (entries, wrong) = self.entries()?;
        Ok((entries.into_iter().map(|entry| entry.table).collect(), wrong))
    }

    /// The one table whose id begins with `digits`.
    ///
    /// # Errors
    /// [`Error::NotFound`] when there is none, [`Error::Invalid`] when there are several.
    pub fn find(&self, digits: &str) -> Result<KeptTable> {
        self.found(digits).map(|entry| entry.table)
    }

    /// Removes the one table whose id begins with `digits`, and returns it: its target is measured anew.
    ///
    /// # Errors
    /// As [`Self::find`], and when it cannot be removed.
    pub fn remove(&self, digits: &str) -> Result<KeptTable> {
        self.found(digits)?;
        let _lock = self.lock()?;
        let entry = self.found(digits)?;
        for path in &entry.paths {
            fs::remove_file(path).map_err(cannot("remove", path))?;
        }
        Ok(entry.table)
    }

    /// Adds what a table says to what is kept of its target. Returns whether that was anything new.
    ///
    /// # Errors
    /// When it was measured while others used the machine, cannot be written, or a newer version keeps that target's table.
    pub fn keep(&self, newer: &KeptTable) -> Result<bool> {
        if newer.disturbed {
            return Err(Error::Invalid(format!(
                "the table of {} was measured while others used the machine, and is not kept for other jobs; measure it \
                 again on a quiet one, or name its file in a job's target.cost_table",
                newer.key.device
            )));
        }
        let _lock = self.lock()?;
        self.add(newer)
    }

    /// The same of what a profile has measured, where it was not taken in before.
    ///
    /// # Errors
    /// As [`Self::keep`].
    pub fn take(&self, measured: &KeptTable) -> Result<bool> {
        let _lock = self.lock()?;
        let path = self.directory.join(TAKEN);
        let json = serde_json::to_vec(measured).map_err(|error| Error::Internal(error.to_string()))?;
        let digest = blake3::hash(&json).to_hex().to_string();
        // A list that is lost costs no more than taking a profile in again.
        let list = fs::read_to_string(&path).unwrap_or_default();
        let mut taken: Vec<&str> = list.lines().collect();
        if taken.contains(&digest.as_str()) {
            return Ok(false);
        }
        let news = self.add(measured)?;
        taken.push(&digest);
        let latest = taken
            .get(taken.len().saturating_sub(MOST_TAKEN)..)
            .unwrap_or_default();
        write_whole(&path, format!("{}\n", latest.join("\n")).as_bytes()).map_err(cannot("write", &path))?;
        Ok(news)
    }

    /// What is known of targets that a profile may run on: its engine, precision and hidden width, on any device. Where
    /// that is more than a task can be told, the tables that were written last.
    pub fn known(&self, profile: &Profile, precision: &str, engine: &str) -> Vec<Kept> {
        let entries = match self.entries() {
            Ok((entries, _)) => entries,
            Err(error) => {
                tracing::warn!(%error, "kept cost tables cannot be read");
                return Vec::new();
            }
        };
        let fits = |key: &CostKey| {
            // What an older version kept of vLLM is true for no environment that is known.
            let is_known = key.engine == "builtin" || !key.environment.is_empty();
            is_known
                && key.engine == engine
                && key.precision == precision
                && key.hidden == profile.architecture.hidden
        };
        let is_told = |table: &KeptTable| fits(&table.key) && !table.disturbed;
        let fitting = entries.into_iter().filter(|entry| is_told(&entry.table));
        let useful = fitting.filter_map(|entry| Some((entry.table.useful(profile)?, entry.modified)));
        within(MOST_TOLD_BYTES, useful.collect())
    }

    fn entries(&self) -> Result<(Vec<Entry>, Vec<String>)> {
        let listing = match fs::read_dir(&self.directory) {
            Ok(listing) => listing,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok((Vec::new(), Vec::new())),
            Err(error) => return Err(cannot("list", &self.directory)(error)),
        };
        let (mut read, mut wrong) = (Vec::new(), Vec::new());
        for file in listing {
            let path = file.map_err(cannot("list", &self.directory))?.path();
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            match KeptTable::read(&path) {
                Ok(table) => read.push(Entry {
                    modified: modified(&path),
                    paths: vec![path],
                    table,
                }),
                Err(reason) => wrong.push(reason),
            }
        }
        let mut entries = of_targets(read);
        entries.sort_by_cached_key(|entry| {
            let key = &entry.table.key;
            let words = [&key.device, &key.engine, &key.engine_version, &key.precision];
            let rest = (key.hidden, key.parallelism, key.mode, key.environment.clone());
            (words.map(Clone::clone), rest)
        });
        wrong.sort();
        Ok((entries, wrong))
    }

    fn found(&self, digits: &str) -> Result<Entry> {
        let (mut alike, _) = self.entries()?;
        alike.retain(|entry| entry.table.id().starts_with(digits));
        if alike.len() > 1 {
            return Err(Error::Invalid(format!(
                "{digits} is how {} tables begin; give more digits",
                alike.len()
            )));
        }
        alike.pop().ok_or_else(|| {
            Error::NotFound(format!(
                "there is no table {digits}; `espalier profile list` shows what there is"
            ))
        })
    }

    fn add(&self, newer: &KeptTable) -> Result<bool> {
        let path = self.directory.join(format!("{}.json", newer.id()));
        let kept = self.kept(&path, &newer.key)?;
        let whole = kept
            .as_ref()
            .map_or_else(|| newer.clone(), |kept| kept.merged(newer));
        if kept.is_some_and(|kept| kept.says_the_same(&whole)) {
            return Ok(false);
        }
        let mut json =
            serde_json::to_vec_pretty(&whole).map_err(|error| Error::Internal(error.to_string()))?;
        json.push(b'\n');
        if u64::try_from(json.len()).is_ok_and(|length| length > LARGEST_FILE) {
            return Err(Error::Exhausted(format!(
                "{} would have {} bytes, expected at most {LARGEST_FILE}; remove it by `espalier profile remove`, and \
                 what is still asked for is measured anew",
                path.display(),
                json.len()
            )));
        }
        write_whole(&path, &json).map_err(cannot("write", &path))?;
        Ok(true)
    }

    /// What lies in a table's place. What is no table is moved aside, and what a newer version wrote is left alone.
    fn kept(&self, path: &Path, key: &CostKey) -> Result<Option<KeptTable>> {
        let read = match form::text(path) {
            Ok(text) => form::table(&text),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            // No text, or far too much of it.
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                Err(Wrong::Damaged(error.to_string()))
            }
            Err(error) => return Err(cannot("read", path)(error)),
        };
        let reason = match read {
            Ok(kept) if kept.key == *key => return Ok(Some(kept)),
            Ok(_) => "is of another target".to_owned(),
            Err(Wrong::Newer(reason)) => return Err(Error::Conflict(format!("{} {reason}", path.display()))),
            Err(Wrong::Damaged(reason)) => reason,
        };
        let aside = set_aside(path).map_err(cannot("move aside", path))?;
        tracing::warn!(path = %path.display(), reason, aside = %aside.display(), "a cost table was moved aside");
        Ok(None)
    }

    /// Keeps others from changing the directory, which is made where it is missing.
    fn lock(&self) -> Result<File> {
        fs::create_dir_all(&self.directory).map_err(cannot("create", &self.directory))?;
        let path = self.directory.join(LOCK);
        let mut options = File::options();
        let opened = options.create(true).truncate(false).write(true).open(&path);
        let file = opened.map_err(cannot("open", &path))?;
        let began = Instant::now();
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(file),
                Err(TryLockError::WouldBlock) if began.elapsed() < PATIENCE => thread::sleep(BETWEEN_TRIES),
                Err(TryLockError::WouldBlock) => {
                    return Err(Error::Conflict(format!(
                        "another process has been changing {} for {} s; end it, or try again",
                        self.directory.display(),
                        PATIENCE.as_secs()
                    )));
                }
                Err(TryLockError::Error(error)) => return Err(cannot("lock", &path)(error)),
            }
        }
    }
}

/// What these files hold of each target, those that were written last over the others.
fn of_targets(mut files: Vec<Entry>) -> Vec<Entry> {
    files.sort_by(|one, other| (one.modified, &one.paths).cmp(&(other.modified, &other.paths)));
    let mut entries: Vec<Entry> = Vec::new();
    for file in files {
        match entries.iter_mut().find(|entry| entry.table.key == file.table.key) {
            Some(entry) => {
                entry.table = entry.table.merged(&file.table);
                entry.paths.extend(file.paths);
                entry.modified = file.modified;
            }
            None => entries.push(file),
        }
    }
    entries
}

fn cannot(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error + use<> {
    let path = path.to_owned();
    move |source| Error::File { action, path, source }
}

/// The newest of these, as many as have room, in the order given.
fn within(most_bytes: usize, mut known: Vec<(Kept, SystemTime)>) -> Vec<Kept> {
    let mut newest: Vec<(usize, SystemTime)> = known.iter().map(|(_, at)| *at).enumerate().collect();
    newest.sort_by_key(|(place, at)| (std::cmp::Reverse(*at), *place));
    let (mut room, mut told) = (most_bytes, BTreeSet::new());
    for (place, _) in newest {
        let Some((kept, _)) = known.get(place) else {
            continue;
        };
        let bytes = serde_json::to_vec(kept).map_or(usize::MAX, |json| json.len());
        match room.checked_sub(bytes) {
            Some(left) => {
                room = left;
                told.insert(place);
            }
            None => tracing::warn!(
                device = kept.key.device,
                rows = kept.rows.len(),
                bytes,
                "a kept cost table is too large to be told to a task beside others, and is measured again where it is needed"
            ),
        }
    }
    let mut place = 0;
    known.retain(|_| {
        place += 1;
        told.contains(&(place - 1))
    });
    known.into_iter().map(|(kept, _)| kept).collect()
}

fn modified(path: &Path) -> SystemTime {
    let metadata = fs::metadata(path).and_then(|metadata| metadata.modified());
    metadata.unwrap_or(SystemTime::UNIX_EPOCH)
}

/// Moves a file to a name beside it that nothing has.
fn set_aside(path: &Path) -> io::Result<PathBuf> {
    for count in 1..=MOST_NAMES {
        let mut name = path.as_os_str().to_owned();
        name.push(format!(".unreadable-{count}"));
        let aside = PathBuf::from(name);
        if aside.symlink_metadata().is_err() {
            return fs::rename(path, &aside).map(|()| aside);
        }
    }
    Err(io::Error::other(format!(
        "{MOST_NAMES} were moved aside before; remove them"
    )))
}

/// Writes a file beside its place, under a name that nobody else has, and moves it there.
///
/// # Errors
/// When it cannot be written, for example on a full disk.
pub fn write_whole(path: &Path, content: &[u8]) -> io::Result<()> {
    let (mut file, partial) = partial(path)?;
    let written = file
        .write_all(content)
        .and_then(|()| file.sync_all())
        .and_then(|()| fs::rename(&partial, path));
    if written.is_err() {
        // The first error is the one to tell; what is left of the file must not stay.
        let _ = fs::remove_file(&partial);
    }
    written
}

fn partial(path: &Path) -> io::Result<(File, PathBuf)> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let mut taken = None;
    for _ in 0..MOST_NAMES {
        let mut name = OsString::from(".");
        name.push(path.file_name().unwrap_or_default());
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        name.push(format!(".{}-{count}.partial", std::process::id()));
        let partial = path.with_file_name(name);
        match File::create_new(&partial) {
            Ok(file) => return Ok((file, partial)),
            // Of a process in another container, or one that was killed.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => taken = Some(error),
            Err(error) => return Err(error),
        }
    }
    Err(taken.unwrap_or_else(|| io::Error::other("there is no name for it")))
}
