//! A disk so small that it can be filled.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// Enough for the journal of the tiny job, with its tables and logs.
const MEBIBYTES: u32 = 32;
/// What takes up the room.
const FILLER: &str = "filler";

/// A disk in memory, mounted at a directory; unmounted when dropped.
#[derive(Debug)]
pub struct SmallDisk {
    directory: PathBuf,
}

impl SmallDisk {
    /// Mounts one at a directory, which is made.
    ///
    /// # Errors
    /// When this process may not mount.
    pub fn mount(directory: &Path) -> Result<Self> {
        fs::create_dir_all(directory)?;
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={MEBIBYTES}m"), "tmpfs"])
            .arg(directory)
            .output()
            .context("there is no `mount`")?;
        ensure!(
            mounted.status.success(),
            "a disk that can be filled cannot be mounted: run as root, or under `unshare --user --map-root-user \
             --mount`: {}",
            String::from_utf8_lossy(&mounted.stderr).trim()
        );
        Ok(Self {
            directory: directory.to_owned(),
        })
    }

    /// Fills it to the last byte.
    ///
    /// # Errors
    /// When it takes more than it holds, or another error than that it is full.
    pub fn fill(&self) -> Result<()> {
        let mut filler = File::create(self.directory.join(FILLER))?;
        let mut length = 1 << 20;
        for _ in 0..u64::from(MEBIBYTES) * 4 {
            match filler.write_all(&vec![0; length]) {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::StorageFull && length == 1 => return Ok(()),
                Err(error) if error.kind() == ErrorKind::StorageFull => length = (length / 16).max(1),
                Err(error) => return Err(error).context("the disk cannot be filled"),
            }
        }
        anyhow::bail!("{} takes more than it holds", self.directory.display())
    }

    /// Gives the room back.
    ///
    /// # Errors
    /// When the filler cannot be removed.
    pub fn free(&self) -> Result<()> {
        Ok(fs::remove_file(self.directory.join(FILLER))?)
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Lazily: a process that was killed just now may still hold a file.
        let unmounted = Command::new("umount").arg("--lazy").arg(&self.directory).status();
        if !unmounted.is_ok_and(|status| status.success()) {
            eprintln!("{} is still mounted", self.directory.display());
        }
    }
}
