//! Compiled kernels on disk, by what decides them (source, macros, architecture, compiler).
//!
//! An entry is a file written aside and renamed: a line that says what it is, the BLAKE3 of the machine code,
//! and the machine code. Whatever is wrong with an entry or the disk costs a compilation and a warning at most.

use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const HEADER: &[u8] = b"espalier kernel\n";
const SUM: usize = blake3::OUT_LEN;

/// A directory of compiled kernels.
#[derive(Debug)]
pub(super) struct Cache {
    /// None when there is nowhere to keep anything.
    directory: Option<PathBuf>,
    warned: AtomicBool,
}

/// Where the cache lies unless told otherwise: `$XDG_CACHE_HOME/espalier/kernels`, else `~/.cache/..`.
pub(super) fn default_directory() -> Option<PathBuf> {
    let absolute = |variable: &str| {
        std::env::var_os(variable)
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
    };
    let base = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")))?;
    Some(base.join("espalier").join("kernels"))
}

impl Cache {
    pub(super) fn new(directory: Option<PathBuf>) -> Self {
        Self {
            directory,
            warned: AtomicBool::new(false),
        }
    }

    fn path(&self, key: &blake3::Hash) -> Option<PathBuf> {
        Some(self.directory.as_ref()?.join(format!("{}.cubin", key.to_hex())))
    }

    /// What was stored under `key`; none when it is not there, not readable, damaged, or another user's.
    pub(super) fn load(&self, key: &blake3::Hash) -> Option<Vec<u8>> {
        let path = self.path(key)?;
        let content = match read_own(&path) {
            Ok(content) => content,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
            Err(error) => {
                self.warn("read", &path, &error);
                return None;
            }
        };
        let machine_code = verified(&content);
        if machine_code.is_none() {
            tracing::warn!(path = %path.display(), "a damaged kernel in the cache is compiled again");
        }
        machine_code
    }

    /// Stores `cubin` under `key`, whole or not at all. A failure costs a warning.
    pub(super) fn store(&self, key: &blake3::Hash, cubin: &[u8]) {
        let Some(path) = self.path(key) else {
            return;
        };
        if let Err(error) = write(&path, cubin) {
            self.warn("write", &path, &error);
        }
    }

    /// Once, not for every kernel.
    fn warn(&self, what: &str, path: &Path, error: &io::Error) {
        if !self.warned.swap(true, Ordering::Relaxed) {
            tracing::warn!(path = %path.display(), %error,
                "cannot {what} the cache of compiled kernels: they are compiled anew in every process");
        }
    }
}

/// A file's content, unless others could have written it: it becomes code of this process's device.
fn read_own(path: &Path) -> io::Result<Vec<u8>> {
    let mut file = fs::File::open(path)?;
    let about = file.metadata()?;
    // SAFETY: a system call without arguments that cannot fail.
    let user = unsafe { libc::geteuid() };
    if ![user, 0].contains(&about.uid()) || about.mode() & 0o022 != 0 {
        return Err(io::Error::other(format!(
            "it is user {}'s with mode {:o}, and others than user {user} could have written it: remove it",
            about.uid(),
            about.mode() & 0o777,
        )));
    }
    let mut content = Vec::new();
    file.read_to_end(&mut content)?;
    Ok(content)
}

fn verified(content: &[u8]) -> Option<Vec<u8>> {
    let rest = content.strip_prefix(HEADER)?;
    let (sum, cubin) = rest.split_at_checked(SUM)?;
    (blake3::hash(cubin).as_bytes() == sum).then(|| cubin.to_vec())
}

fn write(path: &Path, cubin: &[u8]) -> io::Result<()> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let directory = path.parent().unwrap_or_else(|| Path::new("."));
    fs::create_dir_all(directory)?;
    // Of its own in every thread of every process, so that two who compile the same do not meet.
    let unique = COUNT.fetch_add(1, Ordering::Relaxed);
    let partial = path.with_extension(format!("{}.{unique}.partial", std::process::id()));
    // Nobody else may write it, whatever the process's mask.
    let mut options = fs::OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o644);
    let written = options.open(&partial).and_then(|mut file| {
        file.write_all(HEADER)?;
        file.write_all(blake3::hash(cubin).as_bytes())?;
        file.write_all(cubin)
        // No sync: an entry that a power failure tears is found by its sum and compiled again.
    });
    let result = written.and_then(|()| fs::rename(&partial, path));
    if result.is_err() {
        // The error that matters is the one above; a leftover is the lesser harm.
        let _ = fs::remove_file(&partial);
    }
    result
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use super::*;

    fn key(of: &str) -> blake3::Hash {
        blake3::hash(of.as_bytes())
    }

    fn only_file(directory: &Path) -> PathBuf {
        let mut files: Vec<PathBuf> = fs::read_dir(directory)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .collect();
        assert_eq!(files.len(), 1, "{files:?}");
        files.remove(0)
    }

    #[test]
    fn what_is_stored_is_loaded_and_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::new(Some(directory.path().join("deep/kernels")));
        assert_eq!(cache.load(&key("a")), None);
        cache.store(&key("a"), b"machine code");
        assert_eq!(cache.load(&key("a")).unwrap(), b"machine code");
        assert_eq!(cache.load(&key("b")), None);
        only_file(&directory.path().join("deep/kernels"));
    }

    #[test]
    fn every_damaged_byte_and_every_cut_is_noticed_and_mended_by_storing_again() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::new(Some(directory.path().to_owned()));
        cache.store(&key("a"), b"machine code");
        let path = only_file(directory.path());
        let whole = fs::read(&path).unwrap();
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 0x10;
            fs::write(&path, &damaged).unwrap();
            assert_eq!(cache.load(&key("a")), None, "byte {at}");
            fs::write(&path, &whole[..at]).unwrap();
            assert_eq!(cache.load(&key("a")), None, "cut at {at}");
        }
        cache.store(&key("a"), b"machine code");
        assert_eq!(cache.load(&key("a")).unwrap(), b"machine code");
    }

    #[test]
    fn an_entry_that_others_could_have_written_is_not_used_and_replaced() {
        use std::os::unix::fs::{PermissionsExt, chown};

        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::new(Some(directory.path().to_owned()));
        cache.store(&key("a"), b"machine code");
        let path = only_file(directory.path());
        let is_used = || cache.load(&key("a")).is_some();
        for (mode, expected) in [(0o644, true), (0o444, true), (0o664, false), (0o646, false)] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(is_used(), expected, "{mode:o}");
        }
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        // Only root may give a file away.
        if chown(&path, Some(54321), None).is_ok() {
            assert!(!is_used(), "another user's");
        }
        cache.store(&key("a"), b"machine code");
        assert!(is_used());
    }

    #[test]
    fn a_directory_that_cannot_be_written_costs_a_warning_only() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("kernels");
        fs::write(&file, "not a directory").unwrap();
        let cache = Cache::new(Some(file.clone()));
        cache.store(&key("a"), b"machine code");
        assert_eq!(cache.load(&key("a")), None);
        assert!(cache.warned.load(Ordering::Relaxed));
        assert_eq!(fs::read(&file).unwrap(), b"not a directory");
    }

    #[test]
    fn a_full_disk_leaves_nothing_behind() {
        // The one device that is always full, where the system has it.
        if !Path::new("/dev/full").exists() {
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::new(Some(directory.path().to_owned()));
        let path = cache.path(&key("a")).unwrap();
        // The next partial file of this process, made to lead to the full device.
        let names =
            (0..64).map(|count| path.with_extension(format!("{}.{count}.partial", std::process::id())));
        for name in names {
            std::os::unix::fs::symlink("/dev/full", name).unwrap();
        }
        cache.store(&key("a"), &vec![7; 1 << 20]);
        assert!(cache.warned.load(Ordering::Relaxed));
        assert_eq!(cache.load(&key("a")), None);
        assert!(!path.exists());
    }

    #[test]
    fn many_who_store_and_load_at_once_see_whole_entries() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::new(Some(directory.path().to_owned()));
        let code: Vec<u8> = (0..100_000_u32).map(|i| i.to_le_bytes()[0]).collect();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        cache.store(&key("a"), &code);
                        assert!(cache.load(&key("a")).unwrap() == code);
                    }
                });
            }
        });
        only_file(directory.path());
    }
}
