//! Cost tables that stay: a directory with a file for each device, engine, version, precision, parallelism, mode and
//! hidden width, kept across jobs.
//!
//! What a profile measured is put there once its stage is done, and the next job on such a target measures only what is
//! missing. A file that is lost or cannot be read costs a measurement and nothing else, so nothing here fails a job.
//! Files are written whole or not at all, and may be read, copied and removed while a coordinator runs.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use espalier_proto::task::{Profile, Profiled};
use espalier_search::{
    CostKey, CostRow, CostTable, EngineMemory, Kept, Subject, WholeParent, Workload, merged,
};
use serde::{Deserialize, Serialize};

use crate::spec::{COST_TABLE_SCHEMA, CostTableFile, OLDEST_SCHEMA};

/// Their directory in a data directory.
pub const DIRECTORY: &str = "cost-tables";
/// A larger file is no cost table: the search spaces of the largest models have a few thousand rows.
const LARGEST_FILE: u64 = 64 << 20;
/// Digits of a table's id.
const ID_DIGITS: usize = 12;

/// Everything that was measured of one target.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeptTable {
    /// [`COST_TABLE_SCHEMA`].
    pub schema: u32,
    /// What it is true for.
    pub key: CostKey,
    /// Each subject at each point at most once.
    pub rows: Vec<CostRow>,
    /// What the engine needs and rounds, where it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<EngineMemory>,
    /// Models measured whole, or found to have no room.
    #[serde(default)]
    pub parents: Vec<KeptParent>,
}

/// A model that was measured whole, or was too large for that.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeptParent {
    /// Parameters of its blocks, which tell it from others.
    pub block_parameters: u64,
    /// Under which workload.
    pub workload: Workload,
    /// What was measured, or why nothing was.
    pub measurement: WholeParent,
}

/// What every file of a cost table begins with.
#[derive(Deserialize)]
struct Written {
    schema: u32,
}

impl From<CostTableFile> for KeptTable {
    fn from(file: CostTableFile) -> Self {
        Self::of(file.profile, file.workload, file.block_parameters)
    }
}

impl KeptTable {
    /// What one profile found out.
    pub fn of(profiled: Profiled, workload: Workload, block_parameters: u64) -> Self {
        Self {
            schema: COST_TABLE_SCHEMA,
            key: profiled.key,
            rows: profiled.rows,
            memory: profiled.memory,
            parents: vec![KeptParent {
                block_parameters,
                workload,
                measurement: profiled.parent,
            }],
        }
    }

    /// A name that tells its key from others.
    pub fn id(&self) -> String {
        // A key is plain data: it always has a JSON form.
        let key = serde_json::to_vec(&self.key).unwrap_or_default();
        let mut digits = blake3::hash(&key).to_hex().to_string();
        digits.truncate(ID_DIGITS);
        digits
    }

    /// Reads a table: one that is kept or was exported, or the `cost-table.json` of a finished job.
    ///
    /// # Errors
    /// What is wrong with the file, and what would be right; one line.
    pub fn read(path: &Path) -> Result<Self, String> {
        let wrong = |reason: String| format!("{} {reason}", path.display());
        let length = fs::metadata(path).map_or(0, |metadata| metadata.len());
        if length > LARGEST_FILE {
            return Err(wrong(format!(
                "has {length} bytes, expected a cost table of at most {LARGEST_FILE}"
            )));
        }
        let text = fs::read_to_string(path)
            .map_err(|error| wrong(format!("cannot be read: {error}; give a file that can")))?;
        let no_table = |error: serde_json::Error| {
            wrong(format!(
                "is no cost table: {error}; give one that `espalier profile export` wrote, or the cost-table.json of \
                 a finished job"
            ))
        };
        // Before anything else of it: what another version wrote may have the same form and mean something else.
        let Written { schema } = serde_json::from_str(&text).map_err(no_table)?;
        if !(OLDEST_SCHEMA..=COST_TABLE_SCHEMA).contains(&schema) {
            return Err(wrong(format!(
                "has schema {schema}, expected {OLDEST_SCHEMA} to {COST_TABLE_SCHEMA}; give a file that this version \
                 wrote, or an older one did"
            )));
        }
        let job: Result<CostTableFile, _> = serde_json::from_str(&text);
        match job {
            Ok(file) => Ok(Self::from(file)),
            Err(_) => serde_json::from_str(&text).map_err(no_table),
        }
    }

    /// The rows as a cost model takes them.
    pub fn cost_table(&self) -> CostTable {
        CostTable {
            key: self.key.clone(),
            rows: self.rows.clone(),
            memory: self.memory,
        }
    }

    /// A model of so many parameters in its blocks, measured under this workload, or else under another.
    pub fn parent(&self, block_parameters: u64, workload: &Workload) -> Option<&KeptParent> {
        let mut alike = self.parents.iter().filter(|parent| {
            parent.block_parameters == block_parameters && parent.measurement.measured().is_some()
        });
        let first = alike.clone().next();
        alike.find(|parent| parent.workload == *workload).or(first)
    }

    /// This table with what `newer` says anew.
    fn merged(&self, newer: &Self) -> Self {
        let same = |one: &KeptParent, other: &KeptParent| {
            one.block_parameters == other.block_parameters && one.workload == other.workload
        };
        // What was measured stays where there is less room now.
        let is_known = |new: &KeptParent| {
            let mut kept = self.parents.iter();
            new.measurement.measured().is_none()
                && kept.any(|kept| same(kept, new) && kept.measurement.measured().is_some())
        };
        let new: Vec<&KeptParent> = newer.parents.iter().filter(|new| !is_known(new)).collect();
        let again = |parent: &KeptParent| new.iter().any(|new| same(new, parent));
        let left = self.parents.iter().filter(|parent| !again(parent));
        Self {
            schema: COST_TABLE_SCHEMA,
            key: self.key.clone(),
            rows: merged(&self.rows, &newer.rows),
            memory: newer.memory.or(self.memory),
            parents: left.chain(new.iter().copied()).cloned().collect(),
        }
    }

    /// What a profile has use for; none where there is nothing.
    fn useful(&self, profile: &Profile) -> Option<Kept> {
        let wanted = |row: &&CostRow| {
            let subject = match &row.subject {
                Subject::Block(shape) => profile.shapes.contains(shape),
                Subject::Base { vocab_size } => *vocab_size == profile.architecture.vocab_size,
                Subject::HostFloor | Subject::HostBlock | Subject::HostAlone => true,
            };
            subject && profile.points.contains(&row.point)
        };
        let rows: Vec<CostRow> = self.rows.iter().filter(wanted).cloned().collect();
        let block_parameters = profile.architecture.parameters().in_blocks();
        let parent = self.parents.iter().find(|parent| {
            parent.block_parameters == block_parameters && parent.workload == profile.workload
        });
        (!rows.is_empty()).then(|| Kept {
            key: self.key.clone(),
            rows,
            parent: parent.and_then(|parent| parent.measurement.measured().cloned()),
            memory: self.memory,
        })
    }
}

/// The directory. Cheap to copy; its calls read the disk: not for the loop.
#[derive(Debug, Clone)]
pub struct CostTables {
    directory: PathBuf,
    writing: Arc<Mutex<()>>,
}

impl CostTables {
    /// Tables in `directory`, which is made when the first is kept.
    pub fn at(directory: impl Into<PathBuf>) -> Self {
        Self {
            directory: directory.into(),
            writing: Arc::default(),
        }
    }

    /// Every table that can be read, by key, and what is wrong with the others.
    ///
    /// # Errors
    /// When the directory is there and cannot be listed.
    pub fn list(&self) -> io::Result<(Vec<KeptTable>, Vec<String>)> {
        let entries = match fs::read_dir(&self.directory) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok((Vec::new(), Vec::new())),
            Err(error) => return Err(error),
        };
        let (mut tables, mut wrong) = (Vec::new(), Vec::new());
        for entry in entries {
            let path = entry?.path();
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            match KeptTable::read(&path) {
                Ok(table) => tables.push(table),
                Err(reason) => wrong.push(reason),
            }
        }
        tables.sort_by_cached_key(|table| {
            let key = &table.key;
            let words = [&key.device, &key.engine, &key.engine_version, &key.precision];
            (words.map(Clone::clone), key.hidden, key.parallelism, key.mode)
        });
        wrong.sort();
        Ok((tables, wrong))
    }

    /// Adds what a table says to what is kept of its target. Returns whether that was anything new.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn keep(&self, newer: &KeptTable) -> io::Result<bool> {
        let _one_at_a_time = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let path = self.directory.join(format!("{}.json", newer.id()));
        let kept = KeptTable::read(&path).ok().filter(|kept| kept.key == newer.key);
        let whole = kept
            .as_ref()
            .map_or_else(|| newer.clone(), |kept| kept.merged(newer));
        // What is said again is put in another place, and is nothing new.
        let alike = |kept: &KeptTable| kept.rows.iter().all(|row| whole.rows.contains(row));
        let known = kept.as_ref().is_some_and(|kept| {
            kept.rows.len() == whole.rows.len()
                && alike(kept)
                && kept.memory == whole.memory
                && kept.parents.len() == whole.parents.len()
                && kept.parents.iter().all(|parent| whole.parents.contains(parent))
        });
        if known {
            return Ok(false);
        }
        fs::create_dir_all(&self.directory)?;
        let mut json = serde_json::to_vec_pretty(&whole).map_err(io::Error::other)?;
        json.push(b'\n');
        write_whole(&path, &json)?;
        Ok(true)
    }

    /// What is known of targets that a profile may run on: its engine, precision and hidden width, on any device.
    pub fn known(&self, profile: &Profile, precision: &str, engine: &str) -> Vec<Kept> {
        let tables = match self.list() {
            Ok((tables, _)) => tables,
            Err(error) => {
                tracing::warn!(%error, directory = %self.directory.display(), "kept cost tables cannot be read");
                return Vec::new();
            }
        };
        let fits = |table: &&KeptTable| {
            let key = &table.key;
            key.engine == engine && key.precision == precision && key.hidden == profile.architecture.hidden
        };
        let tables = tables.iter().filter(fits);
        tables.filter_map(|table| table.useful(profile)).collect()
    }
}

/// Writes a file beside its place and moves it there.
///
/// # Errors
/// When it cannot be written, for example on a full disk.
pub fn write_whole(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut name = std::ffi::OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(".partial");
    let partial = path.with_file_name(name);
    let written = fs::File::create(&partial)
        .and_then(|mut file| file.write_all(content).and_then(|()| file.sync_all()))
        .and_then(|()| fs::rename(&partial, path));
    if written.is_err() {
        // The first error is the one to tell; what is left of the file must not stay.
        let _ = fs::remove_file(&partial);
    }
    written
}

#[cfg(test)]
mod tests;
