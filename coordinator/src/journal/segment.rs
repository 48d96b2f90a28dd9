//! Segment files: their names, and reading them back in order.

use std::path::{Path, PathBuf};

use super::disk::Disk;
use super::frame::{self, SCHEMA_VERSION, Tail};
use super::{Error, io_error};

/// Where a journal goes on.
#[derive(Debug, PartialEq, Eq)]
pub struct End {
    /// The segment to go on in; none when a new one has to be begun.
    pub last: Option<PathBuf>,
    /// Bytes of it that are whole frames.
    pub length: u64,
    /// Bytes after them, of a commit that never ended.
    pub torn: u64,
    /// The sequence of the next frame.
    pub next: u64,
    /// Bytes of frames after the base.
    pub read: u64,
}

/// Takes the sequence and the payload of a frame, or says what is wrong with it.
pub type Visit<'a> = dyn FnMut(u64, &[u8]) -> Result<(), String> + 'a;

/// The name of the segment whose first frame has this sequence.
pub fn name(first: u64) -> String {
    format!("journal-{first:020}.log")
}

/// Segments with the sequence of their first frame, in order.
pub fn list(disk: &dyn Disk, directory: &Path) -> Result<Vec<(u64, PathBuf)>, Error> {
    super::numbered(disk, directory, "journal-", ".log")
}

/// Reads every frame after `base` in order, cutting nothing yet.
pub fn read(disk: &dyn Disk, directory: &Path, base: u64, visit: &mut Visit<'_>) -> Result<End, Error> {
    let segments = list(disk, directory)?;
    let mut end = End {
        last: None,
        length: 0,
        torn: 0,
        next: base.saturating_add(1),
        read: 0,
    };
    // Everything before the last segment that begins with or before the next frame is not needed.
    let begin = segments.iter().rposition(|(first, _)| *first <= end.next);
    let needed = segments.get(begin.unwrap_or(0)..).unwrap_or_default();
    let mut expected = needed
        .first()
        .map_or(end.next, |(first, _)| (*first).min(end.next));
    for (index, (first, path)) in needed.iter().enumerate() {
        if *first != expected {
            return Err(Error::Damaged {
                path: path.clone(),
                offset: 0,
                what: format!(
                    "frames {expected} to {} are missing before it",
                    first.saturating_sub(1)
                ),
            });
        }
        let is_last = index.saturating_add(1) == needed.len();
        let bytes = disk.read(path).map_err(io_error("read", path))?;
        let segment = Segment {
            path,
            bytes: &bytes,
            is_last,
        };
        let length = segment.read(base, &mut expected, visit)?;
        let all = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        end.last = Some(path.clone());
        end.length = length;
        end.torn = all.saturating_sub(length);
        end.read = end.read.saturating_add(length);
    }
    if expected < end.next {
        // The journal ends before the snapshot, which knows what the rest said.
        end.last = None;
        end.length = 0;
    } else {
        end.next = expected;
    }
    Ok(end)
}

struct Segment<'a> {
    path: &'a Path,
    bytes: &'a [u8],
    is_last: bool,
}

impl Segment<'_> {
    /// Gives the bytes that are whole frames.
    fn read(&self, base: u64, next: &mut u64, visit: &mut Visit<'_>) -> Result<u64, Error> {
        let mut at = 0;
        loop {
            let offset = u64::try_from(at).unwrap_or(u64::MAX);
            let damaged = |what: String| Error::Damaged {
                path: self.path.to_owned(),
                offset,
                what,
            };
            let frame = match frame::decode(self.bytes, at) {
                Ok(frame) => frame,
                Err(Tail::Clean) => return Ok(offset),
                Err(Tail::Torn) if self.is_last => return Ok(offset),
                Err(Tail::Torn) => return Err(damaged("it ends in the middle of a frame".to_owned())),
                Err(Tail::Damaged(what)) => return Err(damaged(what.to_owned())),
            };
            if frame.version > SCHEMA_VERSION {
                return Err(Error::TooNew {
                    path: self.path.to_owned(),
                    offset,
                    found: frame.version.into(),
                    known: SCHEMA_VERSION.into(),
                });
            }
            if frame.sequence != *next {
                return Err(damaged(format!(
                    "frame {} stands where {next} should",
                    frame.sequence
                )));
            }
            if frame.sequence > base {
                visit(frame.sequence, frame.payload)
                    .map_err(|what| damaged(format!("the events do not parse: {what}")))?;
            }
            *next = next.saturating_add(1);
            at = at.saturating_add(frame.bytes);
        }
    }
}
