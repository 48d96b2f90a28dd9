//! sled as an ordered map that knows whether it is whole.
//!
//! Everything lies in one tree, so that a batch is atomic. Beside the position lies a sum over all rows: what
//! sled loses or changes without noticing is noticed when the tables are opened.

use std::collections::BTreeMap;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sled::Batch;

use super::keys;
use super::rows::TaskRange;
use crate::scheduler::{JobId, TaskId};

/// The newest form of keys and rows. Tables of any other are built anew.
pub const SCHEMA: u32 = 2;

/// Rows of a change, about. sled frees nothing of what a batch replaces before it ends, and each row replaces the
/// page it falls into: some 50 KiB.
const CHANGE_ROWS: usize = 64;
/// How often collecting is asked for after a change: what was replaced is free once the epoch has moved on twice.
const COLLECTIONS: usize = 3;

/// Where the tables stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Meta {
    /// [`SCHEMA`] of who wrote them.
    pub schema: u32,
    /// The last frame they reflect.
    pub position: u64,
    /// Sum over all rows.
    pub digest: u64,
}

/// Open tables.
#[derive(Debug)]
pub struct Store {
    database: sled::Db,
    meta: Meta,
}

impl Store {
    /// Takes a database that was just opened, after looking at every row of it.
    ///
    /// # Errors
    /// When it is of another build, or not what was written.
    pub fn of(database: sled::Db) -> Result<Self, String> {
        let mut digest: u64 = 0;
        let mut rows: u64 = 0;
        for row in database.iter() {
            let (key, value) = row.map_err(|error| error.to_string())?;
            if *key != *keys::META {
                rows = rows.saturating_add(1);
                digest = digest.wrapping_add(digest_of(&key, &value));
            }
        }
        let stored = database.get(keys::META).map_err(|error| error.to_string())?;
        let meta = match stored {
            Some(json) => serde_json::from_slice(&json).map_err(|error| error.to_string())?,
            None if rows == 0 => Meta {
                schema: SCHEMA,
                position: 0,
                digest: 0,
            },
            None => return Err("rows without a position".to_owned()),
        };
        if meta.schema != SCHEMA {
            return Err(format!(
                "of schema {}, where this build has {SCHEMA}",
                meta.schema
            ));
        }
        if meta.digest != digest {
            return Err(format!("{rows} rows that are not the ones that were written"));
        }
        Ok(Self { database, meta })
    }

    /// The last frame they reflect.
    pub fn position(&self) -> u64 {
        self.meta.position
    }

    /// For those who ask.
    pub fn database(&self) -> &sled::Db {
        &self.database
    }

    /// Begins a change.
    pub fn change(&mut self) -> Change<'_> {
        Change {
            store: self,
            pending: BTreeMap::new(),
        }
    }

    /// Lets go of the files once they hold everything.
    pub fn close(self) {
        if let Err(error) = self.database.flush() {
            tracing::warn!(%error, "the tables are not on disk: what is missing is read from the journal again");
        }
    }
}

/// Rows that are written together, or not at all.
#[derive(Debug)]
pub struct Change<'a> {
    store: &'a mut Store,
    pending: BTreeMap<Vec<u8>, Option<Vec<u8>>>,
}

impl Change<'_> {
    /// A row as this change has it.
    pub fn get<T: DeserializeOwned>(&self, key: &[u8]) -> Result<Option<T>, String> {
        let json = match self.pending.get(key) {
            Some(pending) => pending.clone(),
            None => self.stored(key)?,
        };
        json.map(|json| serde_json::from_slice(&json).map_err(|error| error.to_string()))
            .transpose()
    }

    /// Sets a row.
    pub fn put<T: Serialize>(&mut self, key: Vec<u8>, row: &T) -> Result<(), String> {
        let json = serde_json::to_vec(row).map_err(|error| error.to_string())?;
        self.pending.insert(key, Some(json));
        Ok(())
    }

    /// Removes a row, if it is there.
    pub fn remove(&mut self, key: Vec<u8>) {
        self.pending.insert(key, None);
    }

    /// The range that a task is in, and its first task.
    pub fn range_of(&self, task: TaskId) -> Result<Option<(TaskId, TaskRange)>, String> {
        let (from, up_to) = (keys::before_tasks(), keys::tasks(task));
        let own = self.pending.range(from..=up_to).next_back();
        let own = own.and_then(|(key, row)| Some((key.clone(), row.clone()?)));
        let stored = range_before(&self.store.database, task)?;
        let Some((key, json)) = own.max(stored) else {
            return Ok(None);
        };
        let range: TaskRange = serde_json::from_slice(&json).map_err(|error| error.to_string())?;
        let first = keys::number(&key, 0).map(TaskId).unwrap_or_default();
        Ok((task <= range.last).then_some((first, range)))
    }

    /// Whether a task is one of a job that is not archived.
    pub fn is_live(&self, task: TaskId) -> Result<bool, String> {
        let Some((first, range)) = self.range_of(task)? else {
            return Ok(false);
        };
        Ok(self.get::<()>(&keys::tasks_of(range.job, first))?.is_some())
    }

    /// Removes every row whose key begins with this.
    pub fn remove_prefix(&mut self, prefix: &[u8]) -> Result<(), String> {
        self.write(self.store.meta.position)?;
        let tree = self.store.database.clone();
        self.remove_all(tree.scan_prefix(prefix))
    }

    /// Removes every row from this key up to that one, which stays.
    pub fn remove_between(&mut self, from: &[u8], up_to: &[u8]) -> Result<(), String> {
        self.write(self.store.meta.position)?;
        let tree = self.store.database.clone();
        self.remove_all(tree.range(from..up_to))
    }

    fn remove_all(&mut self, rows: sled::Iter) -> Result<(), String> {
        for key in rows.keys() {
            self.remove(key.map_err(|error| error.to_string())?.to_vec());
            self.ease()?;
        }
        Ok(())
    }

    /// Keys that begin with this, those of this change too.
    pub fn keys(&self, prefix: &[u8]) -> Result<Vec<Vec<u8>>, String> {
        let mut found = BTreeMap::new();
        for key in self.store.database.scan_prefix(prefix).keys() {
            found.insert(key.map_err(|error| error.to_string())?.to_vec(), true);
        }
        let own = self.pending.range(prefix.to_vec()..);
        for (key, row) in own.take_while(|(key, _)| key.starts_with(prefix)) {
            found.insert(key.clone(), row.is_some());
        }
        Ok(found
            .into_iter()
            .filter(|(_, there)| *there)
            .map(|(key, _)| key)
            .collect())
    }

    /// Whether it has grown so large that it should be committed before more is added: sled keeps in memory
    /// all that a batch touches.
    pub fn is_enough(&self) -> bool {
        self.pending.len() >= CHANGE_ROWS
    }

    fn stored(&self, key: &[u8]) -> Result<Option<Vec<u8>>, String> {
        let stored = self.store.database.get(key).map_err(|error| error.to_string())?;
        Ok(stored.map(|value| value.to_vec()))
    }

    /// Writes what there is when it is enough, and leaves the change empty to go on with. The position stays
    /// where it was: what is written so is written again after a crash, to the same end.
    pub fn ease(&mut self) -> Result<(), String> {
        if self.is_enough() {
            self.write(self.store.meta.position)?;
        }
        Ok(())
    }

    /// Writes it all, with the frame it reflects.
    pub fn commit(mut self, position: u64) -> Result<(), String> {
        self.write(position)
    }

    fn write(&mut self, position: u64) -> Result<(), String> {
        let pending = std::mem::take(&mut self.pending);
        let mut batch = Batch::default();
        let mut digest = self.store.meta.digest;
        for (key, row) in &pending {
            if let Some(before) = self.stored(key)? {
                digest = digest.wrapping_sub(digest_of(key, &before));
            }
            match row {
                Some(json) => {
                    digest = digest.wrapping_add(digest_of(key, json));
                    batch.insert(key.as_slice(), json.as_slice());
                }
                None => batch.remove(key.as_slice()),
            }
        }
        let meta = Meta {
            schema: SCHEMA,
            position,
            digest,
        };
        batch.insert(
            keys::META,
            serde_json::to_vec(&meta).map_err(|error| error.to_string())?,
        );
        self.store
            .database
            .apply_batch(batch)
            .map_err(|error| error.to_string())?;
        self.store.meta = meta;
        // sled collects only every 128 operations of a thread, which is megabytes of pages later.
        for _ in 0..COLLECTIONS {
            crossbeam_epoch::pin().flush();
        }
        Ok(())
    }
}

/// FNV-1a, 64 bits, over a row (<http://www.isthe.com/chongo/tech/comp/fnv/>).
fn digest_of(key: &[u8], value: &[u8]) -> u64 {
    const BASIS: u64 = 0xcbf2_9ce4_8422_2325;
    const PRIME: u64 = 0x0000_0100_0000_01b3;
    let fold = |digest: u64, byte: &u8| (digest ^ u64::from(*byte)).wrapping_mul(PRIME);
    value
        .iter()
        .fold(key.iter().fold(BASIS, fold).wrapping_mul(PRIME), fold)
}

/// Rows whose key begins with this, in order, at most so many.
pub fn scan<T: DeserializeOwned>(database: &sled::Db, prefix: &[u8], limit: usize) -> Result<Vec<T>, String> {
    rows_of(database.scan_prefix(prefix).take(limit))
}

/// Rows from this key up to that one, which is not among them.
pub fn scan_between<T: DeserializeOwned>(
    database: &sled::Db,
    from: &[u8],
    up_to: &[u8],
) -> Result<Vec<T>, String> {
    rows_of(database.range(from..up_to))
}

fn rows_of<T: DeserializeOwned>(
    stored: impl Iterator<Item = sled::Result<(sled::IVec, sled::IVec)>>,
) -> Result<Vec<T>, String> {
    let mut rows = Vec::new();
    for row in stored {
        let (_, json) = row.map_err(|error| error.to_string())?;
        rows.push(serde_json::from_slice(&json).map_err(|error| error.to_string())?);
    }
    Ok(rows)
}

/// The tasks of a job that is not archived, as ranges with their first.
pub fn ranges_of(database: &sled::Db, job: JobId) -> Result<Vec<(TaskId, TaskRange)>, String> {
    let mut ranges = Vec::new();
    for key in database.scan_prefix(keys::all_tasks_of(job)).keys() {
        let key = key.map_err(|error| error.to_string())?;
        let Some(first) = keys::number(&key, 1).map(TaskId) else {
            continue;
        };
        let json = database
            .get(keys::tasks(first))
            .map_err(|error| error.to_string())?;
        if let Some(json) = json {
            let range = serde_json::from_slice(&json).map_err(|error| error.to_string())?;
            ranges.push((first, range));
        }
    }
    Ok(ranges)
}

/// The archived job that a task belonged to.
pub fn archived_job_of(database: &sled::Db, task: TaskId) -> Result<Option<JobId>, String> {
    let Some((key, json)) = range_before(database, task)? else {
        return Ok(None);
    };
    let range: TaskRange = serde_json::from_slice(&json).map_err(|error| error.to_string())?;
    let first = keys::number(&key, 0).map(TaskId).unwrap_or_default();
    let is_live = database
        .contains_key(keys::tasks_of(range.job, first))
        .map_err(|error| error.to_string())?;
    Ok((task <= range.last && !is_live).then_some(range.job))
}

/// The last range that begins with this task or before it.
fn range_before(database: &sled::Db, task: TaskId) -> Result<Option<RawRow>, String> {
    let found = database
        .range(keys::before_tasks()..=keys::tasks(task))
        .next_back();
    let row = found.transpose().map_err(|error| error.to_string())?;
    Ok(row.map(|(key, json)| (key.to_vec(), json.to_vec())))
}

/// A row as it is stored: key and JSON.
pub type RawRow = (Vec<u8>, Vec<u8>);

/// Every row but the position.
pub fn dump(database: &sled::Db) -> Result<Vec<RawRow>, String> {
    let mut rows = Vec::new();
    for row in database.iter() {
        let (key, value) = row.map_err(|error| error.to_string())?;
        if *key != *keys::META {
            rows.push((key.to_vec(), value.to_vec()));
        }
    }
    Ok(rows)
}
