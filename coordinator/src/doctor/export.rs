//! Getting events out of a journal, a damaged one too.

use std::io::Write;
use std::path::Path;

use serde::Serialize;
use serde_json::Value;

use crate::journal;
use crate::journal::disk::{Disk, SystemDisk};
use crate::lock::DirectoryLock;
use crate::{Error, Result};

/// What came out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Exported {
    /// Events written.
    pub events: u64,
    /// The first frame that is still there; 0 without any.
    pub first_frame: u64,
    /// The last frame that was written; 0 without any.
    pub last_frame: u64,
    /// What kept the rest from being read; none when all was.
    pub damage: Option<String>,
}

#[derive(Serialize)]
struct Line<'a> {
    frame: u64,
    event: &'a Value,
}

/// Writes every event that can be read as a line of JSON, in order, up to the first damage.
///
/// # Errors
/// When the directory is missing, in use, or cannot be read, or the lines cannot be written.
pub fn export(data_dir: &Path, out: &mut dyn Write) -> Result<Exported> {
    let _lock = DirectoryLock::to_look_at(data_dir)?;
    export_from(&SystemDisk, data_dir, out)
}

/// The same from another disk; whoever calls sees to it that nobody else uses the directory.
///
/// # Errors
/// As [`export`].
pub fn export_from(disk: &dyn Disk, data_dir: &Path, out: &mut dyn Write) -> Result<Exported> {
    let directory = data_dir.join("journal");
    let segments = journal::segments(disk, &directory)?;
    let first_frame = segments.first().map_or(0, |(first, _)| *first);
    let mut exported = Exported {
        events: 0,
        first_frame,
        last_frame: 0,
        damage: None,
    };
    let mut unwritten = None;
    let read = journal::read_frames(
        disk,
        &directory,
        first_frame.saturating_sub(1),
        &mut |frame, payload| {
            let events: Vec<Value> = serde_json::from_slice(payload).map_err(|error| error.to_string())?;
            for event in &events {
                let line =
                    serde_json::to_string(&Line { frame, event }).map_err(|error| error.to_string())?;
                if let Err(error) = writeln!(out, "{line}") {
                    unwritten = Some(error);
                    return Err("the lines cannot be written".to_owned());
                }
                exported.events = exported.events.saturating_add(1);
            }
            exported.last_frame = frame;
            Ok(())
        },
    );
    if let Some(error) = unwritten {
        return Err(Error::File {
            action: "write events to",
            path: "the output".into(),
            source: error,
        });
    }
    match read {
        Ok(_) => {}
        Err(error @ journal::Error::Io { .. }) => return Err(error.into()),
        Err(error) => exported.damage = Some(error.to_string()),
    }
    Ok(exported)
}
