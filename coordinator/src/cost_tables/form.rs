//! The form of a cost table's file, and what makes a text none.

use std::fs;
use std::io;
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use super::KeptTable;
use crate::spec::{COST_TABLE_SCHEMA, CostTableFile, OLDEST_SCHEMA};

/// A larger file is no cost table: the search spaces of the largest models have a few thousand rows.
pub(super) const LARGEST_FILE: u64 = 64 << 20;

/// Why a text is no cost table.
#[derive(Debug)]
pub(super) enum Wrong {
    /// A newer version wrote it, which has a use for it.
    Newer(String),
    /// Anything else.
    Damaged(String),
}

/// What every file of a cost table begins with, and what only one of the two forms has.
#[derive(Deserialize)]
struct Written {
    schema: u32,
    #[serde(default)]
    profile: Option<Value>,
}

impl KeptTable {
    /// Reads a table: one that is kept or was exported, or the `cost-table.json` of a finished job.
    ///
    /// # Errors
    /// What is wrong with the file, and what would be right; one line.
    pub fn read(path: &Path) -> Result<Self, String> {
        let shown = path.display();
        let text =
            text(path).map_err(|error| format!("{shown} cannot be read: {error}; give a file that can"))?;
        Self::parse(&text).map_err(|reason| format!("{shown} {reason}"))
    }

    /// Reads a table from its text.
    ///
    /// # Errors
    /// What is wrong with it, and what would be right; one line that begins with its verb.
    pub fn parse(text: &str) -> Result<Self, String> {
        table(text).map_err(|wrong| match wrong {
            Wrong::Newer(reason) | Wrong::Damaged(reason) => reason,
        })
    }
}

/// A file's text, where it may be a table.
pub(super) fn text(path: &Path) -> io::Result<String> {
    let length = fs::metadata(path)?.len();
    if length > LARGEST_FILE {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("it has {length} bytes, expected a cost table of at most {LARGEST_FILE}"),
        ));
    }
    fs::read_to_string(path)
}

/// Reads a table from its text.
pub(super) fn table(text: &str) -> Result<KeptTable, Wrong> {
    let no_table = |error: serde_json::Error| {
        Wrong::Damaged(format!(
            "is no cost table: {error}; give one that `espalier profile export` wrote, or the cost-table.json of a \
             finished job"
        ))
    };
    // Before anything else of it: what another version wrote may have the same form and mean something else.
    let Written { schema, profile } = serde_json::from_str(text).map_err(no_table)?;
    if !(OLDEST_SCHEMA..=COST_TABLE_SCHEMA).contains(&schema) {
        let reason = format!(
            "has schema {schema}, expected {OLDEST_SCHEMA} to {COST_TABLE_SCHEMA}; give a file that this version wrote, \
             or an older one did"
        );
        return Err(if schema > COST_TABLE_SCHEMA {
            Wrong::Newer(reason)
        } else {
            Wrong::Damaged(reason)
        });
    }
    // Told by the form that it has, so that an error is of that one.
    let table = match profile {
        Some(_) => KeptTable::from(serde_json::from_str::<CostTableFile>(text).map_err(no_table)?),
        None => serde_json::from_str(text).map_err(no_table)?,
    };
    match table
        .rows
        .iter()
        .find(|row| !(is_time(row.median_ms) && is_time(row.spread_ms)))
    {
        Some(row) => Err(Wrong::Damaged(format!(
            "has {} ± {} ms for {} at {}, expected finite times of at least 0; measure it again",
            row.median_ms, row.spread_ms, row.subject, row.point
        ))),
        None => Ok(table),
    }
}

fn is_time(milliseconds: f64) -> bool {
    milliseconds.is_finite() && milliseconds >= 0.0
}
