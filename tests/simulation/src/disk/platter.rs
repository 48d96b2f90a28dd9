//! What lies on a disk, and each change of it: where power goes, room ends and syncs fail.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::crash::survive;
use super::{Change, NameChange, Orders, Platter};

pub(super) fn lost_power() -> io::Error {
    io::Error::other("the power is gone")
}

pub(super) fn missing(path: &Path) -> io::Error {
    io::Error::new(
        io::ErrorKind::NotFound,
        format!("`{}` is not there", path.display()),
    )
}

impl Platter {
    /// Counts down to the loss of power; each change passes here first.
    pub(super) fn live(&mut self) -> io::Result<()> {
        if self.off {
            return Err(lost_power());
        }
        match self.orders.power_off_after.as_mut() {
            Some(0) => {
                self.off = true;
                return Err(lost_power());
            }
            Some(left) => *left -= 1,
            None => {}
        }
        Ok(())
    }

    pub(super) fn inode(&self, path: &Path) -> io::Result<u64> {
        self.names.get(path).copied().ok_or_else(|| missing(path))
    }

    pub(super) fn rename_entry(&mut self, name: &Path, new: Option<u64>) {
        let old = match new {
            Some(inode) => self.names.insert(name.to_owned(), inode),
            None => self.names.remove(name),
        };
        self.unsynced_names.push(NameChange {
            name: name.to_owned(),
            old,
            new,
        });
    }

    pub(super) fn append(&mut self, inode: u64, bytes: &[u8]) -> io::Result<()> {
        self.live()?;
        if self.orders.full && !bytes.is_empty() {
            self.figures.refused += 1;
            self.failed = true;
            return Err(io::ErrorKind::StorageFull.into());
        }
        let failing = std::mem::take(&mut self.orders.fail_write);
        let written = if failing {
            self.figures.failed_writes += 1;
            self.failed = true;
            self.dice.below(bytes.len())
        } else {
            bytes.len()
        };
        let file = self.files.entry(inode).or_default();
        file.unsynced.push(Change {
            at: file.live.len(),
            old: Vec::new(),
        });
        file.live.extend_from_slice(bytes.get(..written).unwrap_or(bytes));
        if failing {
            return Err(io::Error::other("the disk has failed to write"));
        }
        Ok(())
    }

    pub(super) fn cut(&mut self, inode: u64, length: u64) -> io::Result<()> {
        self.live()?;
        let file = self.files.entry(inode).or_default();
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        if length < file.live.len() {
            let old = file.live.split_off(length);
            file.unsynced.push(Change { at: length, old });
        } else {
            file.live.resize(length, 0);
        }
        Ok(())
    }

    pub(super) fn sync(&mut self, inode: u64) -> io::Result<()> {
        self.live()?;
        // Mostly milliseconds; once in a while a disk thinks for longer than any lease.
        let slowest = if self.dice.chance(0.0005) { 20_000 } else { 20 };
        let takes = self
            .dice
            .scale(Duration::from_micros(300), Duration::from_millis(slowest));
        self.clock.advance(takes);
        if std::mem::take(&mut self.orders.fail_sync) {
            self.figures.failed_syncs += 1;
            self.failed = true;
            // As Linux does it: the pages count as clean from here on, and may never have been written.
            if self.dice.chance(0.5)
                && let Some(file) = self.files.get_mut(&inode)
            {
                survive(file, &mut self.dice, &mut self.figures, false);
            }
            return Err(io::Error::other("the disk has failed to sync"));
        }
        self.figures.syncs += 1;
        if let Some(file) = self.files.get_mut(&inode) {
            file.unsynced.clear();
        }
        Ok(())
    }

    pub(super) fn sync_directory(&mut self, directory: &Path) -> io::Result<()> {
        self.live()?;
        self.unsynced_names
            .retain(|change| change.name.parent() != Some(directory));
        self.forget_unnamed();
        Ok(())
    }

    /// Inodes that no name leads to, nor could after a crash, are freed.
    fn forget_unnamed(&mut self) {
        let (names, unsynced, copied) = (&self.names, &self.unsynced_names, &self.copied);
        self.files.retain(|inode, _| {
            copied.contains(inode)
                || names.values().any(|named| named == inode)
                || unsynced.iter().any(|change| change.old == Some(*inode))
        });
    }

    pub(super) fn crash(&mut self) {
        self.off = false;
        self.orders = Orders {
            full: self.orders.full,
            ..Orders::default()
        };
        for file in self.files.values_mut() {
            survive(file, &mut self.dice, &mut self.figures, true);
        }
        // A filesystem's own journal keeps names in order: some first ones survive.
        let changes = std::mem::take(&mut self.unsynced_names);
        for change in changes.iter().rev() {
            set_name(&mut self.names, &change.name, change.old);
        }
        let survivors = self.dice.below(changes.len() + 1);
        for change in changes.iter().take(survivors) {
            set_name(&mut self.names, &change.name, change.new);
        }
        self.forget_unnamed();
    }
}

fn set_name(names: &mut BTreeMap<PathBuf, u64>, name: &Path, inode: Option<u64>) {
    match inode {
        Some(inode) => names.insert(name.to_owned(), inode),
        None => names.remove(name),
    };
}
