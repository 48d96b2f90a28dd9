//! A virtual disk: it keeps apart what was written from what is durable, fails when told to, and at a crash
//! keeps, drops or tears what was not synced.
//!
//! A file is an inode; names are entries of their own. Both have a journal of changes that no sync has
//! covered: a crash takes all of them back and then lets each survive or not, as its seed will have it.

mod crash;
mod platter;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use espalier_coordinator::journal::disk::{Disk, DiskFile};

use crate::clock::MachineClock;
use crate::dice::Dice;
use platter::{lost_power, missing};

/// What a disk can be told to do badly.
#[derive(Debug, Clone, Copy, Default)]
pub struct Orders {
    /// The power goes before so many more changes reach it: 0 is the next one.
    pub power_off_after: Option<u32>,
    /// The next write fails, having written a part.
    pub fail_write: bool,
    /// The next sync fails, and what it would have covered may be gone.
    pub fail_sync: bool,
    /// There is no room for more bytes.
    pub full: bool,
}

/// A disk; clones are the same one.
#[derive(Debug, Clone)]
pub struct VirtualDisk(Arc<Mutex<Platter>>);

#[derive(Debug)]
struct Platter {
    dice: Dice,
    clock: Arc<MachineClock>,
    orders: Orders,
    off: bool,
    next_inode: u64,
    files: BTreeMap<u64, Bytes>,
    names: BTreeMap<PathBuf, u64>,
    directories: Vec<PathBuf>,
    unsynced_names: Vec<NameChange>,
    /// Inodes that somebody copied last: their bytes are there although their names go.
    copied: BTreeSet<u64>,
    figures: Figures,
    failed: bool,
}

/// So many first bytes of each file, which were durable when somebody copied them.
#[derive(Debug, Clone, Default)]
pub struct Copied(BTreeMap<PathBuf, (u64, usize)>);

/// How often each thing went wrong.
#[derive(Debug, Clone, Copy, Default)]
pub struct Figures {
    /// Syncs of files that were done.
    pub syncs: u64,
    /// Writes that failed.
    pub failed_writes: u64,
    /// Syncs that failed.
    pub failed_syncs: u64,
    /// Writes refused for want of room.
    pub refused: u64,
    /// Changes that a crash dropped whole.
    pub dropped: u64,
    /// Changes that a crash tore.
    pub torn: u64,
    /// Snapshots that were put in place.
    pub snapshots: u64,
}

impl std::ops::AddAssign for Figures {
    fn add_assign(&mut self, other: Self) {
        self.syncs += other.syncs;
        self.failed_writes += other.failed_writes;
        self.failed_syncs += other.failed_syncs;
        self.refused += other.refused;
        self.dropped += other.dropped;
        self.torn += other.torn;
        self.snapshots += other.snapshots;
    }
}

#[derive(Debug, Default)]
struct Bytes {
    live: Vec<u8>,
    /// What would take each unsynced change back, the oldest first.
    unsynced: Vec<Change>,
}

/// A change of a file's bytes: from `at` on there was `old`, and then the end.
#[derive(Debug, Clone)]
struct Change {
    at: usize,
    old: Vec<u8>,
}

/// A name was given to an inode, or taken away; before, it was that of `old`.
#[derive(Debug, Clone)]
struct NameChange {
    name: PathBuf,
    old: Option<u64>,
    new: Option<u64>,
}

impl VirtualDisk {
    /// An empty disk, whose syncs take time on this clock.
    pub fn new(dice: Dice, clock: Arc<MachineClock>) -> Self {
        Self(Arc::new(Mutex::new(Platter {
            dice,
            clock,
            orders: Orders::default(),
            off: false,
            next_inode: 0,
            files: BTreeMap::new(),
            names: BTreeMap::new(),
            directories: Vec::new(),
            unsynced_names: Vec::new(),
            copied: BTreeSet::new(),
            figures: Figures::default(),
            failed: false,
        })))
    }

    /// Changes what it is told to do badly.
    pub fn order(&self, change: impl FnOnce(&mut Orders)) {
        change(&mut self.platter().orders);
    }

    /// Whether the power went, as it was ordered to.
    pub fn is_off(&self) -> bool {
        self.platter().off
    }

    /// What is durable now, in place of what was copied before.
    pub fn copied(&self) -> Copied {
        let mut platter = self.platter();
        let named = platter.names.iter().filter_map(|(name, inode)| {
            let file = platter.files.get(inode)?;
            let unsynced = file.unsynced.iter().map(|change| change.at).min();
            Some((name.clone(), (*inode, unsynced.unwrap_or(file.live.len()))))
        });
        let copied = Copied(named.collect());
        platter.copied = copied.0.values().map(|(inode, _)| *inode).collect();
        copied
    }

    /// Another disk gets what was copied last, all of it durable.
    pub fn copy(&self, copied: &Copied, onto: &Self) {
        let from = self.platter();
        let mut to = onto.platter();
        to.directories.clone_from(&from.directories);
        for (name, (inode, length)) in &copied.0 {
            let Some(bytes) = from.files.get(inode) else {
                continue;
            };
            let live = bytes.live.get(..*length).unwrap_or(&bytes.live).to_vec();
            to.next_inode += 1;
            let inode = to.next_inode;
            to.names.insert(name.clone(), inode);
            to.files.insert(
                inode,
                Bytes {
                    live,
                    unsynced: Vec::new(),
                },
            );
        }
    }

    /// Whether the power is to go and has not gone yet.
    pub fn is_ordered_off(&self) -> bool {
        let platter = self.platter();
        platter.orders.power_off_after.is_some() && !platter.off
    }

    /// The power goes now, if it has not gone before, and comes back: unsynced changes are kept, dropped or torn.
    pub fn crash(&self) {
        self.platter().crash();
    }

    /// The process ends but the machine goes on: everything that was written is still there.
    pub fn let_go(&self) {
        let mut platter = self.platter();
        platter.orders.power_off_after = None;
        platter.off = false;
    }

    /// Whether anything was refused or failed since it was last asked.
    pub fn take_failed(&self) -> bool {
        std::mem::take(&mut self.platter().failed)
    }

    /// How often each thing went wrong.
    pub fn figures(&self) -> Figures {
        self.platter().figures
    }

    /// All bytes of all files.
    pub fn used(&self) -> usize {
        self.platter().files.values().map(|file| file.live.len()).sum()
    }

    fn platter(&self) -> MutexGuard<'_, Platter> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl Disk for VirtualDisk {
    fn list(&self, directory: &Path) -> io::Result<Vec<PathBuf>> {
        let platter = self.platter();
        if !platter.directories.iter().any(|known| known == directory) {
            return Err(missing(directory));
        }
        let inside = platter
            .names
            .keys()
            .filter(|name| name.parent() == Some(directory));
        Ok(inside.cloned().collect())
    }

    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        let platter = self.platter();
        if platter.off {
            return Err(lost_power());
        }
        let inode = platter.inode(path)?;
        Ok(platter
            .files
            .get(&inode)
            .map(|file| file.live.clone())
            .unwrap_or_default())
    }

    fn open(&self, path: &Path, length: u64) -> io::Result<Box<dyn DiskFile>> {
        let mut platter = self.platter();
        let inode = platter.inode(path)?;
        platter.cut(inode, length)?;
        Ok(Box::new(VirtualFile {
            disk: self.clone(),
            inode,
        }))
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        let mut platter = self.platter();
        platter.live()?;
        if platter.orders.full {
            platter.figures.refused += 1;
            platter.failed = true;
            return Err(io::ErrorKind::StorageFull.into());
        }
        if platter.names.contains_key(path) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        platter.next_inode += 1;
        let inode = platter.next_inode;
        platter.files.insert(inode, Bytes::default());
        platter.rename_entry(path, Some(inode));
        Ok(Box::new(VirtualFile {
            disk: self.clone(),
            inode,
        }))
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        let mut platter = self.platter();
        platter.inode(path)?;
        platter.live()?;
        platter.rename_entry(path, None);
        Ok(())
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut platter = self.platter();
        let inode = platter.inode(from)?;
        platter.live()?;
        let name = to.file_name().unwrap_or_default().to_string_lossy();
        platter.figures.snapshots += u64::from(name.starts_with("snapshot-"));
        // Both or neither, in this order: a crash between leaves the file under both names, never under none.
        platter.rename_entry(to, Some(inode));
        platter.rename_entry(from, None);
        Ok(())
    }

    fn sync_directory(&self, directory: &Path) -> io::Result<()> {
        self.platter().sync_directory(directory)
    }

    fn create_directory(&self, directory: &Path) -> io::Result<()> {
        let mut platter = self.platter();
        platter.live()?;
        for above in directory.ancestors() {
            if !platter.directories.iter().any(|known| known == above) {
                platter.directories.push(above.to_owned());
            }
        }
        Ok(())
    }
}

#[derive(Debug)]
struct VirtualFile {
    disk: VirtualDisk,
    inode: u64,
}

impl DiskFile for VirtualFile {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.disk.platter().append(self.inode, bytes)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.disk.platter().sync(self.inode)
    }

    fn cut(&mut self, length: u64) -> io::Result<()> {
        self.disk.platter().cut(self.inode, length)
    }
}
