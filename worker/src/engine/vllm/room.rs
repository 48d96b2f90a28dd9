//! The room that a helper has on disk: what vLLM compiles there stays for the next one of the device, what it writes in
//! passing goes with it.
//!
//! vLLM writes its caches in place and reads them without a doubt, so no two processes may have the same. A device has
//! rooms `0`, `1` and so on, and a helper takes the first that is free; the system gives a room back however its holder
//! ends. What is written in passing lies among the machine's temporary files, since a cache may be on a disk far away,
//! and the room says where, for whoever comes after a holder that was killed.

use std::fs::{self, DirBuilder, File};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// Rooms of one device at the most: workers of one machine that share it.
const ROOMS: usize = 64;
/// What may stay in a room: each stack of a profile is compiled by itself, and some never come again.
const MOST_BYTES: u64 = 4 << 30;
/// What is compiled, below a room, and the variables that say so.
const KEPT: [(&str, &str); 3] = [
    ("VLLM_CACHE_ROOT", "vllm"),
    ("TORCHINDUCTOR_CACHE_DIR", "inductor"),
    ("TRITON_CACHE_DIR", "triton"),
];
/// What says where files are written in passing, to a helper and in a room, and how such places are named.
const PASSING_VARIABLE: &str = "TMPDIR";
const PASSING: &str = "passing";
const PASSING_NAME: &str = "espalier-vllm-";

/// A room, as long as this value lives.
#[derive(Debug)]
pub(super) struct Room {
    directory: PathBuf,
    passing: PathBuf,
    /// Locked.
    _held: File,
}

impl Room {
    /// The first free room below `device`, a directory that is made where it is not there.
    ///
    /// # Errors
    /// When nothing can be written there, or all rooms are taken.
    pub fn take(device: &Path) -> io::Result<Self> {
        fs::create_dir_all(device)?;
        for number in 0..ROOMS {
            let held = File::create(device.join(format!("{number}.lock")))?;
            match held.try_lock() {
                Ok(()) => {}
                Err(fs::TryLockError::WouldBlock) => continue,
                Err(fs::TryLockError::Error(error)) => return Err(error),
            }
            let directory = device.join(number.to_string());
            return Ok(Self {
                passing: prepare(&directory, MOST_BYTES)?,
                directory,
                _held: held,
            });
        }
        Err(io::Error::other(format!("all {ROOMS} rooms are taken")))
    }

    /// Tells a helper where it is.
    pub fn variables(&self) -> impl Iterator<Item = (&'static str, PathBuf)> {
        let of = |(variable, name)| (variable, self.directory.join(name));
        KEPT.into_iter()
            .map(of)
            .chain([(PASSING_VARIABLE, self.passing.clone())])
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        // What somebody writes there still is removed by whoever takes the room next.
        if remove(&self.passing).is_ok() {
            let _ = fs::remove_file(self.directory.join(PASSING));
        }
    }
}

/// Makes a room's directories, and gives that for what is written in passing. What an earlier holder left there goes,
/// and what was compiled once it is too much.
fn prepare(room: &Path, most_bytes: u64) -> io::Result<PathBuf> {
    let says = room.join(PASSING);
    if let Ok(left) = fs::read_to_string(&says) {
        let left = Path::new(&left);
        let name = left.file_name().and_then(|name| name.to_str());
        if name.is_some_and(|name| name.starts_with(PASSING_NAME)) {
            // Where it cannot be removed it stays.
            let _ = remove(left);
        }
    }
    if bytes_below(room) > most_bytes {
        tracing::info!(room = %room.display(), "what vLLM has compiled was too much, and is compiled anew");
        remove(room)?;
    }
    for (_, name) in KEPT {
        fs::create_dir_all(room.join(name))?;
    }
    let random = RandomState::new().build_hasher().finish();
    let passing = std::env::temp_dir().join(format!("{PASSING_NAME}{random:016x}"));
    fs::write(says, passing.as_os_str().as_encoded_bytes())?;
    DirBuilder::new().mode(0o700).create(&passing)?;
    Ok(passing)
}

fn remove(directory: &Path) -> io::Result<()> {
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn bytes_below(directory: &Path) -> u64 {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let of = |entry: fs::DirEntry| match entry.file_type() {
        Ok(kind) if kind.is_dir() => bytes_below(&entry.path()),
        _ => entry.metadata().map_or(0, |metadata| metadata.len()),
    };
    entries.map(of).sum()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn helpers_that_run_together_have_rooms_of_their_own_and_the_next_finds_what_was_compiled() {
        let device = tempfile::tempdir().unwrap();
        let (first, second) = (
            Room::take(device.path()).unwrap(),
            Room::take(device.path()).unwrap(),
        );
        let of = |room: &Room| room.variables().collect::<Vec<_>>();
        for ((variable, path), (_, other)) in of(&first).into_iter().zip(of(&second)) {
            assert!(path.is_dir() && other.is_dir() && path != other, "{variable}");
        }
        let passing = first.passing.clone();
        fs::write(first.directory.join("vllm/compiled"), "x").unwrap();
        fs::write(passing.join("passing"), "x").unwrap();
        drop(first);
        assert!(!passing.exists());
        let again = Room::take(device.path()).unwrap();
        assert!(again.directory.join("vllm/compiled").exists());
    }

    #[test]
    fn what_a_killed_holder_left_in_passing_goes_and_what_is_too_much_is_compiled_anew() {
        let device = tempfile::tempdir().unwrap();
        let room = device.path().join("0");
        let left = prepare(&room, 8).unwrap();
        fs::write(left.join("left"), "x").unwrap();
        fs::write(room.join("triton/large"), vec![0; 4096]).unwrap();
        let next = prepare(&room, 8192).unwrap();
        assert!(!left.exists() && next.is_dir());
        assert!(room.join("triton/large").exists());
        let last = prepare(&room, 4095).unwrap();
        assert!(!room.join("triton/large").exists() && room.join("triton").is_dir());
        // Whatever the file says, nothing else is removed.
        fs::write(room.join(PASSING), device.path().as_os_str().as_encoded_bytes()).unwrap();
        fs::remove_dir(last).unwrap();
        fs::remove_dir(prepare(&room, 4095).unwrap()).unwrap();
        assert!(device.path().exists());
    }
}
