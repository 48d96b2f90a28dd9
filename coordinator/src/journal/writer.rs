//! Appending: batches are buffered, then written and fsynced together.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;

use super::disk::{Disk, DiskFile, PARTIAL};
use super::replay::{self, Fold, Found};
use super::snapshot::{self, Due};
use super::{Error, frame, io_error, segment};

/// What [`Journal::check_room`] asks for.
const ROOM_BYTES: u64 = 64 << 10;

/// How a journal is kept.
#[derive(Debug, Clone)]
pub struct Options {
    /// A segment that is larger is closed and a new one begun. A snapshot is due then, unless the state is so
    /// large that taking one would cost more than reading the segments again.
    pub segment_bytes: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            segment_bytes: 16 << 20,
        }
    }
}

/// A journal that is open for appending. One process at a time: the owner of the directory sees to it.
#[derive(Debug)]
pub struct Journal {
    disk: Arc<dyn Disk>,
    directory: PathBuf,
    options: Options,
    file: Box<dyn DiskFile>,
    path: PathBuf,
    /// Bytes of the segment that are durable.
    durable: u64,
    /// The sequence of the next frame in the file.
    next: u64,
    /// Frames that are not written yet.
    buffer: Vec<u8>,
    buffered: u64,
    snapshots: Snapshots,
    /// The last durable frame, for those who read along.
    position: Arc<AtomicU64>,
    failed: bool,
}

/// When the next snapshot is worth taking.
#[derive(Debug, Default)]
struct Snapshots {
    /// Whether the last commit closed a segment.
    rolled: bool,
    under_way: bool,
    /// Bytes of frames since the newest.
    bytes_since: u64,
    /// Bytes of the newest one's JSON; taking the next will cost about as much as that.
    newest_bytes: u64,
}

impl Journal {
    /// Opens the journal in a directory and reads it into `fold`: the newest sound snapshot, then every event
    /// after it in order. Cuts a torn tail.
    ///
    /// # Errors
    /// When the directory cannot be used, or a frame that is needed is damaged, missing or too new.
    pub fn open<F: Fold>(
        disk: Arc<dyn Disk>,
        directory: &Path,
        options: Options,
        fold: &mut F,
    ) -> Result<Self, Error> {
        make_directory(disk.as_ref(), directory)?;
        let found = replay::read(disk.as_ref(), directory, fold)?;
        tidy(disk.as_ref(), directory, &found)?;
        let end = found.end;
        if end.torn > 0 {
            tracing::warn!(
                bytes = end.torn,
                after_frame = end.next.saturating_sub(1),
                "the end of the journal was not finished when the coordinator stopped: it is cut"
            );
        }
        let (path, mut file) = if let Some(last) = end.last {
            let file = disk.open(&last, end.length).map_err(io_error("open", &last))?;
            (last, file)
        } else {
            let first = directory.join(segment::name(end.next));
            let file = disk.create(&first).map_err(io_error("begin", &first))?;
            (first, file)
        };
        file.sync().map_err(io_error("sync", &path))?;
        disk.sync_directory(directory)
            .map_err(io_error("sync", directory))?;
        Ok(Self {
            disk,
            directory: directory.to_owned(),
            options,
            file,
            path,
            durable: end.length,
            next: end.next,
            buffer: Vec::new(),
            buffered: 0,
            snapshots: Snapshots {
                bytes_since: end.read,
                newest_bytes: found.base_bytes,
                ..Snapshots::default()
            },
            position: Arc::new(AtomicU64::new(end.next.saturating_sub(1))),
            failed: false,
        })
    }

    /// Whether there is room for more than a few frames: writes a file beside them and removes it again.
    ///
    /// # Errors
    /// [`Error::Full`] when there is none, any other when the disk cannot be written.
    pub fn check_room(&self) -> Result<(), Error> {
        check_room(self.disk.as_ref(), &self.directory)
    }

    /// Whether the disk says that it has little room left, without being tried: only [`Journal::check_room`] knows.
    pub fn seems_full(&self) -> bool {
        let free = self.disk.free_bytes(&self.directory);
        free.is_ok_and(|free| free < ROOM_BYTES)
    }

    /// The last frame that is durable; 0 before the first.
    pub fn last(&self) -> u64 {
        self.next.saturating_sub(1)
    }

    /// The frame that what is appended next will be.
    pub fn next(&self) -> u64 {
        self.next.saturating_add(self.buffered)
    }

    /// The last durable frame, for those who read along beside the loop: grows with every commit.
    pub fn position(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.position)
    }

    /// Buffers events that happened together. Nothing is durable before [`Journal::commit`].
    ///
    /// # Errors
    /// When they are too large for a frame, which then is not kept.
    pub fn append<E: Serialize>(&mut self, events: &[E]) -> Result<(), Error> {
        if events.is_empty() {
            return Ok(());
        }
        let at = frame::begin(&mut self.buffer);
        let sequence = self.next();
        let appended = serde_json::to_writer(&mut self.buffer, events)
            .map_err(|error| io_error("encode events for", &self.path)(error.into()))
            .and_then(|()| {
                frame::finish(&mut self.buffer, at, sequence, at == 0).map_err(|bytes| Error::TooLarge {
                    bytes,
                    limit: frame::PAYLOAD_LIMIT_BYTES,
                })
            });
        match appended {
            Ok(()) => self.buffered = self.buffered.saturating_add(1),
            Err(_) => self.buffer.truncate(at),
        }
        appended
    }

    /// Writes what is buffered and returns once it is durable.
    ///
    /// # Errors
    /// [`Error::Full`]: nothing of the batch was kept, and the journal can go on when there is room; the
    /// caller's state is ahead of it and must be replayed. Any other error: the journal must not be used again.
    pub fn commit(&mut self) -> Result<(), Error> {
        if self.failed {
            return Err(Error::Failed);
        }
        if self.buffer.is_empty() {
            return Ok(());
        }
        if let Err(source) = self.file.append(&self.buffer) {
            return Err(self.undo(source));
        }
        if let Err(source) = self.sync() {
            // What an fsync failed on may never reach the disk, whatever a second one says.
            self.failed = true;
            return Err(io_error("sync", &self.path)(source));
        }
        let written = u64::try_from(self.buffer.len()).unwrap_or(u64::MAX);
        self.durable = self.durable.saturating_add(written);
        self.snapshots.bytes_since = self.snapshots.bytes_since.saturating_add(written);
        self.next = self.next.saturating_add(self.buffered);
        self.position.store(self.last(), Ordering::Release);
        self.forget_buffer();
        self.snapshots.rolled = false;
        if self.durable >= self.options.segment_bytes {
            self.roll()?;
        }
        Ok(())
    }

    fn sync(&mut self) -> io::Result<()> {
        #[cfg(feature = "planted-bugs")]
        if super::planted::skips_fsync() {
            return Ok(());
        }
        self.file.sync()
    }

    fn forget_buffer(&mut self) {
        /// A batch that was larger than this is rare; its room is given back.
        const KEPT_BYTES: usize = 4 << 20;
        self.buffer.clear();
        self.buffer.shrink_to(KEPT_BYTES);
        self.buffered = 0;
    }

    fn undo(&mut self, source: io::Error) -> Error {
        self.forget_buffer();
        let full = is_full(&source);
        let cut = self.file.cut(self.durable).and_then(|()| self.file.sync());
        if full && cut.is_ok() {
            return Error::Full {
                path: self.path.clone(),
            };
        }
        self.failed = true;
        io_error("append to", &self.path)(source)
    }

    fn roll(&mut self) -> Result<(), Error> {
        let path = self.directory.join(segment::name(self.next));
        let file = match self.disk.create(&path) {
            Ok(file) => file,
            // A full disk is found again by the next append; until then this segment grows.
            Err(error) if is_full(&error) => return Ok(()),
            Err(source) => {
                self.failed = true;
                return Err(io_error("begin", &path)(source));
            }
        };
        if let Err(source) = self.disk.sync_directory(&self.directory) {
            self.failed = true;
            return Err(io_error("sync", &self.directory)(source));
        }
        self.file = file;
        self.path = path;
        self.durable = 0;
        self.snapshots.rolled = true;
        Ok(())
    }

    /// The right to take a snapshot of the state as the last commit left it, when one is worth it. One at a
    /// time: say [`Journal::snapshot_ended`] when it is over.
    pub fn snapshot_due(&mut self) -> Option<Due> {
        let snapshots = &mut self.snapshots;
        let worth = snapshots.bytes_since >= snapshots.newest_bytes / 2;
        if !snapshots.rolled || snapshots.under_way || !worth || !self.buffer.is_empty() {
            return None;
        }
        snapshots.under_way = true;
        snapshots.rolled = false;
        snapshots.bytes_since = 0;
        Some(Due {
            disk: Arc::clone(&self.disk),
            directory: self.directory.clone(),
            sequence: self.last(),
        })
    }

    /// The snapshot was taken, its JSON so many bytes; or was not: then a later one will be.
    pub fn snapshot_ended(&mut self, taken: Result<u64, Error>) {
        self.snapshots.under_way = false;
        match taken {
            Ok(bytes) => self.snapshots.newest_bytes = bytes,
            Err(error) => tracing::warn!(%error, "no snapshot was taken: the ones before it stand"),
        }
    }

    /// Reads what is durable into `fold`, as [`Journal::open`] does.
    ///
    /// # Errors
    /// As [`Journal::open`].
    pub fn replay<F: Fold>(&self, fold: &mut F) -> Result<(), Error> {
        replay::read(self.disk.as_ref(), &self.directory, fold).map(drop)
    }
}

/// As [`Journal::check_room`], of a journal that nobody has opened.
///
/// # Errors
/// As [`Journal::check_room`].
pub fn check_room(disk: &dyn Disk, directory: &Path) -> Result<(), Error> {
    let mut path = directory.join("room").into_os_string();
    // Removed at the next start, should this one end in between.
    path.push(PARTIAL);
    let path = PathBuf::from(path);
    let refused = |source| match is_full(&source) {
        true => Error::Full {
            path: directory.to_owned(),
        },
        false => io_error("write", &path)(source),
    };
    // One that could not be removed is in the way.
    let _ = disk.remove(&path);
    let mut file = disk.create(&path).map_err(refused)?;
    let room = vec![b' '; usize::try_from(ROOM_BYTES).unwrap_or(usize::MAX)];
    let written = file.append(&room).and_then(|()| file.sync());
    drop(file);
    let removed = disk.remove(&path);
    written.and(removed).map_err(refused)
}

/// Whether this says that there is no room, on the disk or in what one may take of it.
pub fn is_full(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge
    )
}

fn make_directory(disk: &dyn Disk, directory: &Path) -> Result<(), Error> {
    disk.create_directory(directory)
        .map_err(io_error("create", directory))?;
    let Some(above) = directory.parent().filter(|above| *above != Path::new("")) else {
        return Ok(());
    };
    disk.sync_directory(above).map_err(io_error("sync", above))
}

/// Removes what a stop left half-written, and puts snapshots that cannot be used out of the way.
fn tidy(disk: &dyn Disk, directory: &Path, found: &Found) -> Result<(), Error> {
    let paths = disk.list(directory).map_err(io_error("list", directory))?;
    let partial = |path: &&PathBuf| path.to_string_lossy().ends_with(PARTIAL);
    for path in paths.iter().filter(partial) {
        disk.remove(path).map_err(io_error("remove", path))?;
    }
    for path in &found.damaged {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let aside = directory.join(format!("{}{name}", snapshot::DAMAGED));
        disk.rename(path, &aside).map_err(io_error("set aside", path))?;
    }
    Ok(())
}
