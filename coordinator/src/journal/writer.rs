//! Appending: batches are buffered, then written and fsynced together.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{Error, frame, segment};

/// How a journal is kept.
#[derive(Debug, Clone)]
pub struct Options {
    /// A segment that is larger is closed and a new one begun.
    pub segment_bytes: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            segment_bytes: 64 << 20,
        }
    }
}

/// A journal that is open for appending. One process at a time: the owner of the directory sees to it.
#[derive(Debug)]
pub struct Journal {
    directory: PathBuf,
    options: Options,
    file: File,
    path: PathBuf,
    /// Bytes of the segment that are durable.
    durable: u64,
    /// The sequence of the next frame in the file.
    next: u64,
    /// Frames that are not written yet.
    buffer: Vec<u8>,
    buffered: u64,
    failed: bool,
}

pub(super) fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::Io { action, path, source }
}

impl Journal {
    /// Opens the journal in a directory, giving every event to `visit` in order; cuts a torn tail.
    ///
    /// # Errors
    /// When the directory cannot be used, or a frame is damaged or too new.
    pub fn open<E: DeserializeOwned>(
        directory: &Path,
        options: Options,
        visit: &mut dyn FnMut(E),
    ) -> Result<Self, Error> {
        fs::create_dir_all(directory).map_err(io_error("create", directory))?;
        let end = segment::read(directory, &mut |payload| {
            let events: Vec<E> = serde_json::from_slice(payload).map_err(|error| error.to_string())?;
            events.into_iter().for_each(&mut *visit);
            Ok(())
        })?;
        let path = end
            .last
            .unwrap_or_else(|| directory.join(segment::name(end.next)));
        let mut file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .map_err(io_error("open", &path))?;
        file.set_len(end.length).map_err(io_error("cut", &path))?;
        file.seek(SeekFrom::End(0)).map_err(io_error("seek in", &path))?;
        file.sync_all().map_err(io_error("sync", &path))?;
        sync_directory(directory)?;
        Ok(Self {
            directory: directory.to_owned(),
            options,
            file,
            path,
            durable: end.length,
            next: end.next,
            buffer: Vec::new(),
            buffered: 0,
            failed: false,
        })
    }

    /// Buffers events that happened together. Nothing is durable before [`Journal::commit`].
    ///
    /// # Errors
    /// When they are too large for a frame.
    pub fn append<E: Serialize>(&mut self, events: &[E]) -> Result<(), Error> {
        if events.is_empty() {
            return Ok(());
        }
        let payload = serde_json::to_vec(events).map_err(|source| Error::Io {
            action: "encode events for",
            path: self.path.clone(),
            source: source.into(),
        })?;
        let too_large = Error::TooLarge {
            bytes: payload.len(),
            limit: frame::PAYLOAD_LIMIT_BYTES,
        };
        if payload.len() > frame::PAYLOAD_LIMIT_BYTES {
            return Err(too_large);
        }
        let sequence = self.next.saturating_add(self.buffered);
        frame::encode(&mut self.buffer, sequence, &payload).ok_or(too_large)?;
        self.buffered = self.buffered.saturating_add(1);
        Ok(())
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
        if let Err(source) = self.file.write_all(&self.buffer) {
            return Err(self.undo(source));
        }
        if let Err(source) = self.file.sync_data() {
            // What an fsync failed on may never reach the disk, whatever a second one says.
            self.failed = true;
            return Err(Error::Io {
                action: "sync",
                path: self.path.clone(),
                source,
            });
        }
        let written = u64::try_from(self.buffer.len()).unwrap_or(u64::MAX);
        self.durable = self.durable.saturating_add(written);
        self.next = self.next.saturating_add(self.buffered);
        self.buffer.clear();
        self.buffered = 0;
        if self.durable >= self.options.segment_bytes {
            self.roll()?;
        }
        Ok(())
    }

    pub(super) fn undo(&mut self, source: io::Error) -> Error {
        self.buffer.clear();
        self.buffered = 0;
        let full = matches!(
            source.kind(),
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge
        );
        let cut = self
            .file
            .set_len(self.durable)
            .and_then(|()| self.file.seek(SeekFrom::Start(self.durable)))
            .and_then(|_| self.file.sync_data());
        if full && cut.is_ok() {
            return Error::Full {
                path: self.path.clone(),
            };
        }
        self.failed = true;
        Error::Io {
            action: "append to",
            path: self.path.clone(),
            source,
        }
    }

    fn roll(&mut self) -> Result<(), Error> {
        let path = self.directory.join(segment::name(self.next));
        let created = OpenOptions::new().create_new(true).write(true).open(&path);
        let file = match created {
            Ok(file) => file,
            // A full disk is found again by the next append; until then this segment grows.
            Err(error) if error.kind() == io::ErrorKind::StorageFull => return Ok(()),
            Err(source) => {
                self.failed = true;
                return Err(Error::Io {
                    action: "begin",
                    path,
                    source,
                });
            }
        };
        if let Err(error) = sync_directory(&self.directory) {
            self.failed = true;
            return Err(error);
        }
        self.file = file;
        self.path = path;
        self.durable = 0;
        Ok(())
    }

    /// Reads the durable events back, from the first on.
    ///
    /// # Errors
    /// As [`Journal::open`].
    pub fn replay<E: DeserializeOwned>(&self, visit: &mut dyn FnMut(E)) -> Result<(), Error> {
        segment::read(&self.directory, &mut |payload| {
            let events: Vec<E> = serde_json::from_slice(payload).map_err(|error| error.to_string())?;
            events.into_iter().for_each(&mut *visit);
            Ok(())
        })
        .map(drop)
    }
}

/// Makes names in a directory durable.
fn sync_directory(directory: &Path) -> Result<(), Error> {
    File::open(directory)
        .and_then(|directory| directory.sync_all())
        .map_err(io_error("sync", directory))
}
