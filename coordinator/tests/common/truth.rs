//! A data directory of a past that was told, and the tables that are built of it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, dead_code)]

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use espalier_coordinator::journal::Options;
use espalier_coordinator::journal::disk::{Disk, SystemDisk};
use espalier_coordinator::scheduler::{Event, State, apply};
use espalier_coordinator::tables::Tables;

use super::past::Past;

/// Longer than anything here takes on a busy machine; only a failure waits for it.
pub const DEADLINE: Duration = Duration::from_secs(120);

/// In memory where there is such a place: these tests write and sync thousands of times.
pub fn scratch() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() {
        tempfile::tempdir_in(memory).unwrap()
    } else {
        tempfile::tempdir().unwrap()
    }
}

pub fn disk() -> Arc<dyn Disk> {
    Arc::new(SystemDisk)
}

/// A data directory and everything that happened in it.
pub struct Truth {
    pub directory: tempfile::TempDir,
    pub told: Vec<(u64, Event)>,
    pub last: u64,
}

impl Truth {
    pub fn build(segment_bytes: u64, tell: impl FnOnce(&mut Past)) -> Self {
        let directory = scratch();
        let mut past = Past::open(&disk(), directory.path(), Options { segment_bytes });
        tell(&mut past);
        Self {
            last: past.last_frame(),
            told: past.told,
            directory,
        }
    }

    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    pub fn files(&self, part: &str) -> Vec<PathBuf> {
        let mut files: Vec<PathBuf> = fs::read_dir(self.path().join("journal"))
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.file_name().unwrap().to_string_lossy().starts_with(part))
            .collect();
        files.sort();
        files
    }

    /// The state after a frame.
    pub fn state_after(&self, frame: u64) -> State {
        let mut state = State::default();
        for (_, event) in self.told.iter().take_while(|(told, _)| *told <= frame) {
            apply(&mut state, event);
        }
        state
    }
}

/// Lets the tables catch up with the journal; gives all they hold.
pub fn tables_of(data_dir: &Path, last: u64) -> Vec<(Vec<u8>, Vec<u8>)> {
    let (tables, position) = (Tables::default(), Arc::new(AtomicU64::new(last)));
    let writer = tables.start(disk(), data_dir, position).unwrap();
    let began = Instant::now();
    let dump = loop {
        if tables.reflects() == last
            && let Ok(dump) = tables.dump()
        {
            break dump;
        }
        assert!(
            began.elapsed() < DEADLINE,
            "the tables do not catch up: {}",
            tables.reflects()
        );
        std::thread::sleep(Duration::from_millis(5));
    };
    writer.stop();
    dump
}

pub fn broken(data_dir: &Path) -> usize {
    let names = fs::read_dir(data_dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name());
    names
        .filter(|name| name.to_string_lossy().starts_with("tables.broken-"))
        .count()
}
