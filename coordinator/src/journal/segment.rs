//! Segment files: their names, and reading them back in order.

use std::fs;
use std::path::{Path, PathBuf};

use super::frame::{self, SCHEMA_VERSION, Tail};
use super::{Error, writer::io_error};

/// Where a journal goes on.
#[derive(Debug, PartialEq, Eq)]
pub struct End {
    /// The last segment, if any.
    pub last: Option<PathBuf>,
    /// Bytes of it that are whole frames.
    pub length: u64,
    /// The sequence of the next frame.
    pub next: u64,
}

/// The name of the segment whose first frame has this sequence.
pub fn name(first: u64) -> String {
    format!("journal-{first:020}.log")
}

/// Segments with the sequence of their first frame, in order.
pub fn list(directory: &Path) -> Result<Vec<(u64, PathBuf)>, Error> {
    let entries = fs::read_dir(directory).map_err(io_error("list", directory))?;
    let mut segments = Vec::new();
    for entry in entries {
        let path = entry.map_err(io_error("list", directory))?.path();
        let first = path.file_name().and_then(|name| {
            name.to_str()?
                .strip_prefix("journal-")?
                .strip_suffix(".log")?
                .parse::<u64>()
                .ok()
        });
        if let Some(first) = first {
            segments.push((first, path));
        }
    }
    segments.sort();
    Ok(segments)
}

/// Reads every frame in order, cutting nothing yet.
pub fn read(directory: &Path, visit: &mut dyn FnMut(&[u8]) -> Result<(), String>) -> Result<End, Error> {
    let segments = list(directory)?;
    let mut end = End {
        last: None,
        length: 0,
        next: 1,
    };
    for (index, (first, path)) in segments.iter().enumerate() {
        if *first != end.next {
            let what = format!("frames {} to {} are missing before it", end.next, first);
            return Err(Error::Damaged {
                path: path.clone(),
                offset: 0,
                what,
            });
        }
        let is_last = index.saturating_add(1) == segments.len();
        let bytes = fs::read(path).map_err(io_error("read", path))?;
        let length = read_segment(path, &bytes, is_last, &mut end.next, visit)?;
        end.last = Some(path.clone());
        end.length = length;
    }
    Ok(end)
}

fn read_segment(
    path: &Path,
    bytes: &[u8],
    is_last: bool,
    next: &mut u64,
    visit: &mut dyn FnMut(&[u8]) -> Result<(), String>,
) -> Result<u64, Error> {
    let mut at = 0;
    loop {
        let offset = u64::try_from(at).unwrap_or(u64::MAX);
        let damaged = |what: String| Error::Damaged {
            path: path.to_owned(),
            offset,
            what,
        };
        let frame = match frame::decode(bytes.get(at..).unwrap_or_default()) {
            Ok(frame) => frame,
            Err(Tail::Clean) => return Ok(offset),
            Err(Tail::Torn) if is_last => return Ok(offset),
            Err(Tail::Torn) => return Err(damaged("it ends in the middle of a frame".to_owned())),
            Err(Tail::Damaged(what)) => return Err(damaged(what)),
        };
        if frame.version > SCHEMA_VERSION {
            return Err(Error::TooNew {
                path: path.to_owned(),
                offset,
                found: frame.version,
                known: SCHEMA_VERSION,
            });
        }
        if frame.sequence != *next {
            return Err(damaged(format!(
                "frame {} stands where {next} should",
                frame.sequence
            )));
        }
        visit(frame.payload).map_err(|what| damaged(format!("the events do not parse: {what}")))?;
        *next = next.saturating_add(1);
        at = at.saturating_add(frame.bytes);
    }
}
