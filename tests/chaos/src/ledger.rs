//! What happened, written by the processes it happened to: one JSON line an entry, each appended with one
//! `write`, so that entries of several processes do not mix and a kill loses none that was made.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// Where the ledger of a run lies, for the processes of the run.
pub const VARIABLE: &str = "ESPALIER_CHAOS_LEDGER";

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum What {
    /// A child began an errand.
    Began {
        /// Its name.
        errand: String,
    },
    /// A child ended an errand well and is about to say so.
    Ended {
        /// Its name.
        errand: String,
    },
    /// The agent was told that the end of the attempt is durable.
    Acknowledged,
}

/// One entry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Nanoseconds since 1970, on the one machine that all this runs on.
    pub at: u64,
    /// The agent's process: two workers may hold attempts of one number, when a successor gives numbers again.
    pub worker: u32,
    /// The attempt it is about.
    pub attempt: u64,
    /// What happened.
    pub what: What,
}

/// Appends an entry to the ledger of this run, about an attempt of this agent's.
///
/// # Errors
/// When there is no ledger or it cannot be written.
pub fn note(worker: u32, attempt: u64, what: What) -> Result<()> {
    let path = std::env::var_os(VARIABLE).map(PathBuf::from);
    let path = path.with_context(|| format!("{VARIABLE} is not set"))?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?;
    let entry = Entry {
        at: u64::try_from(now.as_nanos())?,
        worker,
        attempt,
        what,
    };
    let mut line = serde_json::to_vec(&entry)?;
    line.push(b'\n');
    let mut file = OpenOptions::new().create(true).append(true).open(&path)?;
    Ok(file.write_all(&line)?)
}

/// Every entry, in the order of their times.
///
/// # Errors
/// When the ledger cannot be read.
pub fn read(path: &Path) -> Result<Vec<Entry>> {
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error.into()),
    };
    let mut entries = Vec::new();
    for line in text.lines() {
        let entry: Entry = serde_json::from_str(line).with_context(|| format!("the ledger has `{line}`"))?;
        entries.push(entry);
    }
    entries.sort_by_key(|entry| entry.at);
    Ok(entries)
}
