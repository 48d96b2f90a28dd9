//! A disk in memory that knows what is durable: it can fill up, fail, and crash.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use crate::journal::disk::{Disk, DiskFile};

type Content = Arc<Mutex<File>>;

#[derive(Debug, Default)]
struct File {
    bytes: Vec<u8>,
    durable: Vec<u8>,
}

/// What the files are called now, what they would be called after a crash, and what goes wrong when.
#[derive(Debug, Default)]
struct Inner {
    names: BTreeMap<PathBuf, Content>,
    durable_names: BTreeMap<PathBuf, Content>,
    /// Operations that change something, so far.
    writes: usize,
    /// From this operation on, everything fails, the operation itself half-way.
    crash_at: Option<usize>,
    /// Bytes that still fit.
    room: Option<usize>,
    sync_fails: bool,
}

#[derive(Debug, Default, Clone)]
pub struct FaultyDisk(Arc<Mutex<Inner>>);

impl FaultyDisk {
    pub fn writes(&self) -> usize {
        self.0.lock().unwrap().writes
    }

    pub fn crash_at(&self, write: usize) {
        self.0.lock().unwrap().crash_at = Some(write);
    }

    pub fn set_room(&self, room: Option<usize>) {
        self.0.lock().unwrap().room = room;
    }

    pub fn fail_syncs(&self) {
        self.0.lock().unwrap().sync_fails = true;
    }

    /// What the machine finds after its power was cut: of what was not synced, `kept` bytes of each file
    /// reached the disk, and after them blocks of zeros if `zeros`.
    pub fn after_power_cut(&self, kept: usize, zeros: bool) -> Self {
        let inner = self.0.lock().unwrap();
        let survive = |content: &Content| {
            let file = content.lock().unwrap();
            let mut bytes = file.durable.clone();
            if file.bytes.starts_with(&bytes) {
                let torn: Vec<u8> = file.bytes.iter().skip(bytes.len()).copied().collect();
                bytes.extend(torn.iter().take(kept));
                if zeros {
                    bytes.extend(torn.iter().skip(kept).map(|_| 0));
                }
            }
            Arc::new(Mutex::new(File {
                durable: bytes.clone(),
                bytes,
            }))
        };
        let names: BTreeMap<_, _> = inner
            .durable_names
            .iter()
            .map(|(path, content)| (path.clone(), survive(content)))
            .collect();
        Self(Arc::new(Mutex::new(Inner {
            durable_names: names.clone(),
            names,
            ..Inner::default()
        })))
    }

    pub fn paths(&self) -> Vec<PathBuf> {
        self.0.lock().unwrap().names.keys().cloned().collect()
    }

    pub fn overwrite(&self, path: &Path, bytes: &[u8]) {
        let inner = self.0.lock().unwrap();
        let mut file = inner.names.get(path).unwrap().lock().unwrap();
        file.bytes = bytes.to_vec();
        file.durable = bytes.to_vec();
    }

    /// Counts a change; fails when it is the one to crash at, or after it.
    fn change(&self) -> io::Result<()> {
        let mut inner = self.0.lock().unwrap();
        inner.writes += 1;
        match inner.crash_at {
            Some(at) if inner.writes >= at => Err(io::Error::other("the power was cut")),
            _ => Ok(()),
        }
    }

    fn find(&self, path: &Path) -> io::Result<Content> {
        let inner = self.0.lock().unwrap();
        inner
            .names
            .get(path)
            .cloned()
            .ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

impl Disk for FaultyDisk {
    fn list(&self, directory: &Path) -> io::Result<Vec<PathBuf>> {
        let inner = self.0.lock().unwrap();
        let within = |path: &&PathBuf| path.parent() == Some(directory);
        Ok(inner.names.keys().filter(within).cloned().collect())
    }

    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        Ok(self.find(path)?.lock().unwrap().bytes.clone())
    }

    fn open(&self, path: &Path, length: u64) -> io::Result<Box<dyn DiskFile>> {
        let mut file = FaultyFile {
            disk: self.clone(),
            content: self.find(path)?,
        };
        file.cut(length)?;
        Ok(Box::new(file))
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        self.change()?;
        let mut inner = self.0.lock().unwrap();
        if inner.names.contains_key(path) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let content = Content::default();
        inner.names.insert(path.to_owned(), Arc::clone(&content));
        Ok(Box::new(FaultyFile {
            disk: self.clone(),
            content,
        }))
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.find(path)?;
        self.change()?;
        self.0.lock().unwrap().names.remove(path);
        Ok(())
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let content = self.find(from)?;
        self.change()?;
        let mut inner = self.0.lock().unwrap();
        inner.names.remove(from);
        inner.names.insert(to.to_owned(), content);
        Ok(())
    }

    fn sync_directory(&self, _directory: &Path) -> io::Result<()> {
        self.change()?;
        let mut inner = self.0.lock().unwrap();
        inner.durable_names = inner.names.clone();
        Ok(())
    }

    fn create_directory(&self, _directory: &Path) -> io::Result<()> {
        Ok(())
    }
}

#[derive(Debug)]
struct FaultyFile {
    disk: FaultyDisk,
    content: Content,
}

impl DiskFile for FaultyFile {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        let changed = self.disk.change();
        let mut file = self.content.lock().unwrap();
        let mut inner = self.disk.0.lock().unwrap();
        let room = inner.room.unwrap_or(usize::MAX);
        let fits = if changed.is_ok() {
            bytes.len().min(room)
        } else {
            bytes.len() / 2
        };
        file.bytes.extend(bytes.iter().take(fits));
        inner.room = inner.room.map(|room| room - fits);
        changed?;
        if fits < bytes.len() {
            return Err(io::ErrorKind::StorageFull.into());
        }
        Ok(())
    }

    fn sync(&mut self) -> io::Result<()> {
        self.disk.change()?;
        if self.disk.0.lock().unwrap().sync_fails {
            return Err(io::Error::other("the disk did not answer"));
        }
        let mut file = self.content.lock().unwrap();
        file.durable = file.bytes.clone();
        Ok(())
    }

    fn cut(&mut self, length: u64) -> io::Result<()> {
        self.disk.change()?;
        let mut file = self.content.lock().unwrap();
        let length = usize::try_from(length).unwrap();
        let freed = file.bytes.len().saturating_sub(length);
        file.bytes.truncate(length);
        let mut inner = self.disk.0.lock().unwrap();
        inner.room = inner.room.map(|room| room + freed);
        Ok(())
    }
}
