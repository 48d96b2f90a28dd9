//! Files that are being written or downloaded, and belong to nobody once their process is gone. A child is killed
//! in the middle of a checkpoint as a matter of course, and checkpoints are large: waiting a day for their age to
//! tell would fill the disk.
//!
//! A name says whose a file is: `<machine>-<process>-<when it started>-<random>`. Directories of scratch may be
//! shared by machines, so a machine (a boot of it, and a set of process ids) judges its own files only.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use crate::cache::io_error;
use crate::{Options, Result};

/// Where process ids mean what they mean here; none where the system does not tell.
static MACHINE: LazyLock<Option<String>> = LazyLock::new(|| {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let processes = fs::read_link("/proc/self/ns/pid").ok()?;
    let both = format!("{}{}", boot.trim(), processes.display());
    let hash = blake3::hash(both.as_bytes()).to_hex();
    hash.get(..16).map(str::to_owned)
});

/// A path that no process has used before.
pub(crate) fn unused_path(directory: &Path) -> PathBuf {
    use std::hash::{BuildHasher, Hasher};
    // RandomState is seeded from the system: two processes never agree, nor two machines.
    let random = || std::hash::RandomState::new().build_hasher().finish();
    directory.join(format!("{}-{:016x}{:016x}", owner(), random(), random()))
}

fn owner() -> String {
    let process = std::process::id();
    match (MACHINE.as_ref(), started(process)) {
        (Some(machine), Some(started)) => format!("{machine}-{process}-{started}"),
        _ => process.to_string(),
    }
}

/// When a process started, in the system's ticks; none when it is gone.
fn started(process: u32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name before the last parenthesis may hold anything.
    let mut fields = text.rsplit_once(')')?.1.split_whitespace();
    fields.nth(19)?.parse().ok()
}

/// Whether the process that a file is named after was one of this machine and is gone.
fn is_orphaned(name: &str) -> bool {
    let mut parts = name.split('-');
    let machine = parts.next();
    if machine.is_none() || machine != MACHINE.as_deref() {
        return false;
    }
    let process = parts.next().and_then(|part| part.parse::<u32>().ok());
    let start = parts.next().and_then(|part| part.parse::<u64>().ok());
    match (process, start) {
        (Some(process), Some(start)) => started(process) != Some(start),
        _ => false,
    }
}

/// Removes what processes of this machine that are gone had begun to write below the store at `location`, or below
/// the cache for a store that is elsewhere; gives the number of files. Makes nothing, and speaks to no store.
///
/// # Errors
/// When the directory is there and cannot be read, or a variable of the environment is wrong.
pub fn sweep_scratch(location: &str) -> Result<u64> {
    let root = match location.split_once("://") {
        None => PathBuf::from(location),
        Some(("file", path)) => PathBuf::from(path),
        Some(_) => Options::from_env()?.cache_dir,
    };
    sweep_orphaned(&root.join("scratch"))
}

fn sweep_orphaned(directory: &Path) -> Result<u64> {
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(0),
        Err(error) => return Err(io_error(directory)(error)),
    };
    let mut removed = 0_u64;
    for entry in entries.flatten() {
        let is_orphan = entry.file_name().to_str().is_some_and(is_orphaned);
        let is_file = entry.file_type().is_ok_and(|kind| kind.is_file());
        if is_orphan && is_file && fs::remove_file(entry.path()).is_ok() {
            removed = removed.saturating_add(1);
        }
    }
    Ok(removed)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used)]
    use super::*;

    #[test]
    fn what_a_killed_process_was_writing_is_removed_and_what_anybody_else_writes_is_not() {
        let store = tempfile::tempdir().unwrap();
        let scratch = store.path().join("scratch");
        fs::create_dir(&scratch).unwrap();
        let mut writer = std::process::Command::new("sleep").arg("3600").spawn().unwrap();
        let machine = MACHINE.clone().expect("a Linux machine tells");
        let of =
            |machine: &str, process: u32, start: u64| scratch.join(format!("{machine}-{process}-{start}-0"));
        let start = started(writer.id()).unwrap();
        let killed = of(&machine, writer.id(), start);
        // Its own writer may stage beside it.
        let staged = scratch.join(format!(
            "{}.7.partial",
            killed.file_name().unwrap().to_str().unwrap()
        ));
        let kept = [
            unused_path(&scratch),
            of("0123456789abcdef", writer.id(), start),
            scratch.join("12345-00000000000000000000000000000000"),
            scratch.join("somebody's"),
        ];
        for path in kept.iter().chain([&killed, &staged]) {
            fs::write(path, "weights").unwrap();
        }
        let location = store.path().to_str().unwrap();
        assert_eq!(sweep_scratch(location).unwrap(), 0, "it is alive");
        writer.kill().unwrap();
        writer.wait().unwrap();
        assert_eq!(sweep_scratch(&format!("file://{location}")).unwrap(), 2);
        assert!(!killed.exists() && !staged.exists());
        for path in &kept {
            assert!(path.exists(), "{}", path.display());
        }
        assert_eq!(sweep_scratch("/nowhere/at/all").unwrap(), 0);
        assert!(!Path::new("/nowhere").exists());
    }
}
