//! Opening the tables, which may fail in ways that nothing else may fail in: sled can panic, or hang, on files
//! that an abrupt stop left. So it is opened on a thread of its own, with a deadline.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use super::store::Store;

/// How long opening and looking at every row may take.
const DEADLINE: Duration = Duration::from_secs(60);
/// Pages that sled keeps in memory, as they are on disk; in memory they take three times as much. The coordinator
/// is small.
const CACHE_BYTES: u64 = 4 << 20;
/// How often sled syncs: what it loses is read from the journal again, whose own syncs it would slow down.
const FLUSH_MS: u64 = 10_000;
/// Broken tables that are kept for who wants to know why.
const KEPT: usize = 2;

/// Opens tables and looks at every row.
///
/// # Errors
/// When they cannot be opened, are of another build, or are not what was written.
pub fn open(directory: &Path) -> Result<Store, String> {
    let (answer, answered) = mpsc::sync_channel(1);
    let directory = directory.to_owned();
    let opening = move || {
        let opened = catch_unwind(AssertUnwindSafe(|| {
            let config = sled::Config::new()
                .path(directory)
                .cache_capacity(CACHE_BYTES)
                .flush_every_ms(Some(FLUSH_MS))
                .mode(sled::Mode::LowSpace);
            Store::of(config.open().map_err(|error| error.to_string())?)
        }));
        let opened = opened.unwrap_or_else(|_| Err("opening them failed".to_owned()));
        // Nobody waits any more when the deadline has passed.
        let _ = answer.send(opened);
    };
    thread::Builder::new()
        .name("espalier-tables-open".to_owned())
        .spawn(opening)
        .map_err(|error| error.to_string())?;
    // A thread that hangs in there cannot be ended: it is left alone with files that nobody uses any more.
    answered
        .recv_timeout(DEADLINE)
        .unwrap_or_else(|_| Err(format!("they were not open after {} s", DEADLINE.as_secs())))
}

/// Moves tables out of the way, and removes the oldest of those moved before.
///
/// # Errors
/// When they cannot be moved.
pub fn set_aside(directory: &Path, unix_ms: u128) -> std::io::Result<PathBuf> {
    let aside = directory.with_file_name(format!("{}.broken-{unix_ms}", super::DIRECTORY));
    std::fs::rename(directory, &aside)?;
    let mut broken = Vec::new();
    for entry in std::fs::read_dir(directory.parent().unwrap_or_else(|| Path::new(".")))? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let prefix = format!("{}.broken-", super::DIRECTORY);
        if let Some(since) = name
            .strip_prefix(&prefix)
            .and_then(|since| since.parse::<u128>().ok())
        {
            broken.push((since, entry.path()));
        }
    }
    broken.sort();
    for (_, old) in broken.iter().rev().skip(KEPT) {
        std::fs::remove_dir_all(old)?;
    }
    Ok(aside)
}
