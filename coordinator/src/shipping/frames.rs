//! Reading durable frames out of the journal's segments, a piece at a time.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use super::file_error;
use crate::journal::frame::{self, HEADER_BYTES, PAYLOAD_LIMIT_BYTES, Tail};
use crate::{Error, Result};

/// A piece is about this large at the most, unless one frame alone is larger.
const PIECE_BYTES: usize = 8 << 20;

/// Where to read on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cursor {
    /// The frame to read next.
    pub next: u64,
    /// The segment (by its first frame) and the place in it where that is known to begin.
    place: Option<(u64, u64)>,
}

/// Whole frames, one after another.
#[derive(Debug, PartialEq, Eq)]
pub struct Frames {
    pub first: u64,
    pub last: u64,
    pub bytes: Vec<u8>,
}

impl Cursor {
    /// Before this frame.
    pub fn at(next: u64) -> Self {
        Self { next, place: None }
    }
}

fn segments(directory: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let entries = std::fs::read_dir(directory).map_err(file_error("list", directory))?;
    let mut segments = Vec::new();
    for entry in entries {
        let path = entry.map_err(file_error("list", directory))?.path();
        let first = path.file_name().and_then(|name| {
            let name = name.to_str()?;
            name.strip_prefix("journal-")?.strip_suffix(".log")?.parse().ok()
        });
        segments.extend(first.map(|first: u64| (first, path)));
    }
    segments.sort();
    Ok(segments)
}

/// The next frames, up to and with `through`, which is durable; moves the cursor after them. None when there is
/// none. Frames that the journal has let go (a snapshot stands for them) are skipped.
///
/// # Errors
/// When a segment cannot be read or a frame is damaged.
pub fn read(directory: &Path, cursor: &mut Cursor, through: u64) -> Result<Option<Frames>> {
    loop {
        if cursor.next > through {
            return Ok(None);
        }
        let segments = segments(directory)?;
        let Some(index) = segments.iter().rposition(|(first, _)| *first <= cursor.next) else {
            let Some((oldest, _)) = segments.first() else {
                return Ok(None);
            };
            *cursor = Cursor::at(*oldest);
            continue;
        };
        let Some((first, path)) = segments.get(index) else {
            return Ok(None);
        };
        let offset = match cursor.place {
            Some((segment, offset)) if segment == *first => offset,
            Some(_) | None => 0,
        };
        let frames = piece(path, offset, cursor, through, PIECE_BYTES)?;
        if let Some((frames, end)) = frames {
            *cursor = Cursor {
                next: frames.last.saturating_add(1),
                place: Some((*first, end)),
            };
            return Ok(Some(frames));
        }
        // The segment ends before the frame: after a restart the next one may begin later than where it ended.
        match segments.get(index.saturating_add(1)) {
            Some((first, _)) if *first <= through => *cursor = Cursor::at(*first),
            Some(_) | None => return Ok(None),
        }
    }
}

/// The frames of one segment from the cursor on, and the place after them.
fn piece(
    path: &Path,
    offset: u64,
    cursor: &Cursor,
    through: u64,
    limit: usize,
) -> Result<Option<(Frames, u64)>> {
    let mut bytes = Vec::new();
    let mut file = File::open(path).map_err(file_error("open", path))?;
    file.seek(SeekFrom::Start(offset))
        .and_then(|_| file.take(limit as u64).read_to_end(&mut bytes))
        .map_err(file_error("read", path))?;
    let (mut at, mut begin, mut last) = (0, None, 0);
    loop {
        let frame = match frame::decode(&bytes, at) {
            Ok(frame) => frame,
            Err(Tail::Clean | Tail::Torn) => break,
            // What is sound goes first; the damage is said when there is nothing else.
            Err(Tail::Damaged(_)) if begin.is_some() => break,
            Err(Tail::Damaged(what)) => {
                return Err(Error::Internal(format!(
                    "the journal's {} cannot be shipped: {what} near byte {offset}",
                    path.display()
                )));
            }
        };
        if frame.sequence > through {
            break;
        }
        if frame.sequence >= cursor.next {
            begin.get_or_insert((frame.sequence, at));
            last = frame.sequence;
        }
        at = at.saturating_add(frame.bytes);
    }
    let Some((first, begin)) = begin else {
        let skipped = u64::try_from(at).unwrap_or(u64::MAX);
        if at > 0 && bytes.len() == limit {
            // All of it lies before the cursor: on behind it.
            return piece(path, offset.saturating_add(skipped), cursor, through, limit);
        }
        let largest = PAYLOAD_LIMIT_BYTES.saturating_add(HEADER_BYTES);
        if bytes.len() == limit && limit < largest {
            return piece(path, offset, cursor, through, largest);
        }
        return Ok(None);
    };
    let end = offset.saturating_add(u64::try_from(at).unwrap_or(u64::MAX));
    let bytes = bytes.get(begin..at).unwrap_or_default().to_vec();
    Ok(Some((Frames { first, last, bytes }, end)))
}

/// Those of the frames in `bytes` with sequences from `first` to `last`; none when they are not all there.
pub fn cut(bytes: &[u8], first: u64, last: u64) -> Option<&[u8]> {
    let (mut at, mut begin, mut next) = (0, 0, first);
    while next <= last {
        let frame = frame::decode(bytes, at).ok()?;
        if frame.sequence == first {
            begin = at;
        }
        if frame.sequence >= first {
            if frame.sequence != next {
                return None;
            }
            next = next.checked_add(1)?;
        }
        at = at.checked_add(frame.bytes)?;
    }
    bytes.get(begin..at)
}
