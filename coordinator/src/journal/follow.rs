//! Reading a journal while it grows, from beside the loop.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::disk::Disk;
use super::frame::{self, Tail};
use super::{Error, io_error, segment};

/// Bytes that are read at once; more only for a frame that is larger.
const STEP_BYTES: usize = 1 << 20;

/// Reads frames one after another. Only those the journal's owner calls durable may be asked for.
#[derive(Debug)]
pub struct Tailing {
    disk: Arc<dyn Disk>,
    directory: PathBuf,
    /// The next frame.
    next: u64,
    /// Where it lies, once that is known.
    place: Option<(PathBuf, u64)>,
}

/// How far one step came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// There may be more.
    Read,
    /// The next frame is not there any more: its segment went with the snapshots that needed it.
    Gone,
}

impl Tailing {
    /// Begins after this frame.
    pub fn after(disk: Arc<dyn Disk>, directory: &Path, frame: u64) -> Self {
        Self {
            disk,
            directory: directory.to_owned(),
            next: frame.saturating_add(1),
            place: None,
        }
    }

    /// The last frame that was read.
    pub fn last(&self) -> u64 {
        self.next.saturating_sub(1)
    }

    /// Reads some of the frames up to this one, which must be durable.
    ///
    /// # Errors
    /// When a frame cannot be read, or `visit` says what is wrong with it.
    pub fn step(&mut self, up_to: u64, visit: &mut segment::Visit<'_>) -> Result<Step, Error> {
        let mut limit = STEP_BYTES;
        while self.next <= up_to {
            let Some((path, offset)) = self.place.clone() else {
                if !self.find()? {
                    return Ok(Step::Gone);
                }
                continue;
            };
            let bytes = match self.disk.read_from(&path, offset, limit) {
                Ok(bytes) => bytes,
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                    self.place = None;
                    continue;
                }
                Err(source) => return Err(io_error("read", &path)(source)),
            };
            let was = self.next;
            let read = self.read(&path, offset, &bytes, up_to, visit)?;
            let read_bytes = u64::try_from(read).unwrap_or(u64::MAX);
            if self.next > was {
                self.place = Some((path, offset.saturating_add(read_bytes)));
                return Ok(Step::Read);
            }
            if read > 0 {
                // Frames before the first that is wanted.
                self.place = Some((path, offset.saturating_add(read_bytes)));
            } else if bytes.len() < limit {
                // The segment ends here: the next one begins with the frame.
                self.place = None;
                if !self.begins_segment()? {
                    return Ok(Step::Gone);
                }
            } else {
                limit = limit.saturating_mul(4);
            }
        }
        Ok(Step::Read)
    }

    /// Reads whole frames from the beginning of `bytes`; gives how many bytes they take.
    fn read(
        &mut self,
        path: &Path,
        offset: u64,
        bytes: &[u8],
        up_to: u64,
        visit: &mut segment::Visit<'_>,
    ) -> Result<usize, Error> {
        let mut at = 0;
        while self.next <= up_to {
            let damaged = |what: String| Error::Damaged {
                path: path.to_owned(),
                offset: offset.saturating_add(u64::try_from(at).unwrap_or(u64::MAX)),
                what,
            };
            let frame = match frame::decode(bytes, at) {
                Ok(frame) => frame,
                Err(Tail::Clean | Tail::Torn) => break,
                Err(Tail::Damaged(what)) => return Err(damaged(what.to_owned())),
            };
            if frame.sequence > self.next {
                return Err(damaged(format!(
                    "frame {} stands where {} should",
                    frame.sequence, self.next
                )));
            }
            if frame.sequence == self.next {
                visit(frame.sequence, frame.payload).map_err(damaged)?;
                self.next = self.next.saturating_add(1);
            }
            at = at.saturating_add(frame.bytes);
        }
        Ok(at)
    }

    /// Finds the segment that holds the next frame.
    fn find(&mut self) -> Result<bool, Error> {
        let segments = segment::list(self.disk.as_ref(), &self.directory)?;
        let holder = segments.into_iter().rfind(|(first, _)| *first <= self.next);
        self.place = holder.map(|(_, path)| (path, 0));
        Ok(self.place.is_some())
    }

    fn begins_segment(&mut self) -> Result<bool, Error> {
        let segments = segment::list(self.disk.as_ref(), &self.directory)?;
        let found = segments.into_iter().find(|(first, _)| *first == self.next);
        self.place = found.map(|(_, path)| (path, 0));
        Ok(self.place.is_some())
    }
}
