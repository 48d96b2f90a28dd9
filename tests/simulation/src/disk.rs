//! A virtual disk: it keeps apart what was written from what is durable, fails when told to, and at a crash
//! keeps, drops or tears what was not synced.
//!
//! A file is an inode; names are entries of their own. Both have a journal of changes that no sync has
//! covered: a crash takes all of them back and then lets each survive or not, as its seed will have it.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use espalier_coordinator::journal::disk::{Disk, DiskFile};

use crate::clock::MachineClock;
use crate::dice::Dice;

/// What a disk keeps together, whatever a crash does to it: bytes of one sector.
const SECTOR: usize = 512;

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

/// What is left of an unsynced change after a crash.
enum Fate {
    Kept,
    Dropped,
    Torn,
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

fn lost_power() -> io::Error {
    io::Error::other("the power is gone")
}

fn missing(path: &Path) -> io::Error {
    io::Error::new(
        io::ErrorKind::NotFound,
        format!("`{}` is not there", path.display()),
    )
}

impl Platter {
    /// Counts down to the loss of power; each change passes here first.
    fn live(&mut self) -> io::Result<()> {
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

    fn inode(&self, path: &Path) -> io::Result<u64> {
        self.names.get(path).copied().ok_or_else(|| missing(path))
    }

    fn rename_entry(&mut self, name: &Path, new: Option<u64>) {
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

    fn append(&mut self, inode: u64, bytes: &[u8]) -> io::Result<()> {
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

    fn cut(&mut self, inode: u64, length: u64) -> io::Result<()> {
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

    fn sync(&mut self, inode: u64) -> io::Result<()> {
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

    fn sync_directory(&mut self, directory: &Path) -> io::Result<()> {
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

    fn crash(&mut self) {
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

/// Takes every unsynced change back and lets each survive or not; `tearing`, some survive in part.
fn survive(file: &mut Bytes, dice: &mut Dice, figures: &mut Figures, tearing: bool) {
    let changes = std::mem::take(&mut file.unsynced);
    // What each change wrote, before anything is taken back.
    let mut after = Vec::with_capacity(changes.len());
    for change in changes.iter().rev() {
        let new = file.live.split_off(change.at.min(file.live.len()));
        file.live.extend_from_slice(&change.old);
        after.push(new);
    }
    // Mostly all of one kind, as when nothing had been written back or everything had.
    let mood = dice.below(4);
    for (change, new) in changes.iter().zip(after.into_iter().rev()) {
        let fate = match (mood, dice.below(3)) {
            (0, _) | (2 | 3, 0) => Fate::Kept,
            (1, _) | (2 | 3, 1) => Fate::Dropped,
            _ if tearing && change.old.is_empty() => Fate::Torn,
            _ => Fate::Dropped,
        };
        match fate {
            Fate::Kept => {
                file.live.resize(change.at, 0);
                file.live.extend_from_slice(&new);
            }
            Fate::Dropped => {
                figures.dropped += 1;
                // A later change cannot survive one that it was laid upon.
                break;
            }
            Fate::Torn => {
                figures.torn += 1;
                file.live.resize(change.at, 0);
                file.live.extend_from_slice(&tear(new, change.at, dice));
                break;
            }
        }
    }
}

/// A write at a place of a file of which a part arrived: its beginning, or some of the file's sectors with
/// nothing between them.
fn tear(mut new: Vec<u8>, at: usize, dice: &mut Dice) -> Vec<u8> {
    if dice.chance(0.5) {
        new.truncate(dice.below(new.len() + 1));
        return new;
    }
    let shared = (SECTOR - at % SECTOR).min(new.len());
    let (first, others) = new.split_at_mut(shared);
    for sector in std::iter::once(first).chain(others.chunks_mut(SECTOR)) {
        if dice.chance(0.5) {
            sector.fill(0);
        }
    }
    new
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn disk(seed: u64) -> VirtualDisk {
        let disk = VirtualDisk::new(Dice::new(seed, "disk"), Arc::default());
        disk.create_directory(Path::new("/d")).unwrap();
        disk
    }

    #[test]
    fn what_was_synced_survives_every_crash_and_what_was_not_some_of_them() {
        let path = Path::new("/d/file");
        let mut lengths = Vec::new();
        for seed in 0..40 {
            let disk = disk(seed);
            let mut file = disk.create(path).unwrap();
            file.append(b"synced").unwrap();
            file.sync().unwrap();
            disk.sync_directory(Path::new("/d")).unwrap();
            file.append(b" and not").unwrap();
            disk.crash();
            let left = disk.read(path).unwrap();
            assert!(left.starts_with(b"synced"), "seed {seed}: {left:?}");
            lengths.push(left.len());
        }
        assert!(lengths.contains(&6) && lengths.contains(&14), "{lengths:?}");
        assert!(
            lengths.iter().any(|length| (7..14).contains(length)),
            "none was torn: {lengths:?}"
        );
    }

    #[test]
    fn a_name_that_was_not_synced_may_be_gone() {
        let gone = (0..20).filter(|seed| {
            let disk = disk(*seed);
            disk.create(Path::new("/d/file")).unwrap().sync().unwrap();
            disk.crash();
            disk.list(Path::new("/d")).unwrap().is_empty()
        });
        let gone = gone.count();
        assert!((1..20).contains(&gone), "{gone} of 20 were gone");
    }

    #[test]
    fn what_was_copied_is_there_for_another_disk_after_its_name_is_gone_here() {
        let (here, there) = (disk(1), disk(2));
        let path = Path::new("/d/file");
        let mut file = here.create(path).unwrap();
        file.append(b"shipped").unwrap();
        file.sync().unwrap();
        file.append(b" and not").unwrap();
        let copied = here.copied();
        here.remove(path).unwrap();
        here.sync_directory(Path::new("/d")).unwrap();
        here.copy(&copied, &there);
        assert_eq!(there.read(path).unwrap(), b"shipped");
        here.copied();
        here.sync_directory(Path::new("/d")).unwrap();
        assert_eq!(here.used(), 0);
    }

    #[test]
    fn power_goes_at_the_change_it_was_ordered_at_and_nothing_after_it_is_done() {
        let disk = disk(1);
        let mut file = disk.create(Path::new("/d/file")).unwrap();
        disk.order(|orders| orders.power_off_after = Some(1));
        file.append(b"one").unwrap();
        assert!(file.sync().is_err() && disk.is_off() && file.append(b"two").is_err());
    }
}
