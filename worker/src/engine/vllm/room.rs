//! The room that a helper has on disk: what vLLM compiles there stays for the next one of the device, what it writes in
//! passing goes with it.
//!
//! vLLM writes its caches in place and reads them without a doubt, so no two processes may have the same. A device has
//! rooms `0`, `1` and so on, and a helper takes the first that is free; the system gives a room back however its holder
//! ends.

use std::fs::{self, File};
use std::io;
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
/// What is written in passing.
const PASSING: (&str, &str) = ("TMPDIR", "tmp");

/// A room, as long as this value lives.
#[derive(Debug)]
pub(super) struct Room {
    directory: PathBuf,
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
            let room = Self {
                directory: device.join(number.to_string()),
                _held: held,
            };
            room.prepare(MOST_BYTES)?;
            return Ok(room);
        }
        Err(io::Error::other(format!("all {ROOMS} rooms are taken")))
    }

    /// Makes its directories; what was left in passing goes, and what was compiled once it is too much.
    fn prepare(&self, most_bytes: u64) -> io::Result<()> {
        remove(&self.directory.join(PASSING.1))?;
        if bytes_below(&self.directory) > most_bytes {
            let room = self.directory.display();
            tracing::info!(%room, "what vLLM has compiled was too much, and is compiled anew");
            remove(&self.directory)?;
        }
        for (_, name) in KEPT.into_iter().chain([PASSING]) {
            fs::create_dir_all(self.directory.join(name))?;
        }
        Ok(())
    }

    /// Tells a helper where it is.
    pub fn variables(&self) -> impl Iterator<Item = (&'static str, PathBuf)> {
        let of = |(variable, name)| (variable, self.directory.join(name));
        KEPT.into_iter().chain([PASSING]).map(of)
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        // What somebody writes to it still is removed by whoever takes it next.
        let _ = remove(&self.directory.join(PASSING.1));
    }
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

    fn file(room: &Room, name: &str) -> PathBuf {
        room.directory.join(name)
    }

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
        fs::write(file(&first, "vllm/compiled"), "x").unwrap();
        fs::write(file(&first, "tmp/passing"), "x").unwrap();
        drop(first);
        let again = Room::take(device.path()).unwrap();
        assert!(file(&again, "vllm/compiled").exists());
        assert!(!file(&again, "tmp/passing").exists());
    }

    #[test]
    fn what_a_killed_holder_left_in_passing_goes_and_what_is_too_much_is_compiled_anew() {
        let device = tempfile::tempdir().unwrap();
        let room = Room::take(device.path()).unwrap();
        fs::write(file(&room, "triton/large"), "12345678").unwrap();
        fs::write(file(&room, "tmp/left"), "x").unwrap();
        room.prepare(8).unwrap();
        assert!(file(&room, "triton/large").exists());
        assert!(!file(&room, "tmp/left").exists());
        room.prepare(7).unwrap();
        assert!(!file(&room, "triton/large").exists());
        assert!(file(&room, "triton").is_dir());
    }
}
