//! sled as an ordered map that knows whether it is whole.
//!
//! Everything lies in one tree, so that a batch is atomic. Beside the position lies a sum over all rows: what
//! sled loses or changes without noticing is noticed when the tables are opened.

use std::collections::BTreeMap;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sled::Batch;

use super::keys;
use super::rows::ArchivedRange;
use crate::scheduler::{JobId, TaskId};

/// The newest form of keys and rows. Tables of any other are built anew.
pub const SCHEMA: u32 = 1;

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
    scan_from(database, prefix, prefix, limit)
}

/// The same, from this key on.
pub fn scan_from<T: DeserializeOwned>(
    database: &sled::Db,
    prefix: &[u8],
    from: &[u8],
    limit: usize,
) -> Result<Vec<T>, String> {
    let mut rows = Vec::new();
    for row in database.range(from.to_vec()..).take(limit) {
        let (key, json) = row.map_err(|error| error.to_string())?;
        if !key.starts_with(prefix) {
            break;
        }
        rows.push(serde_json::from_slice(&json).map_err(|error| error.to_string())?);
    }
    Ok(rows)
}

/// Tasks of a job that is not archived.
pub fn tasks_of(database: &sled::Db, job: JobId) -> Result<Vec<TaskId>, String> {
    let mut tasks = Vec::new();
    for key in database.scan_prefix(keys::tasks_of(job)).keys() {
        let key = key.map_err(|error| error.to_string())?;
        tasks.extend(keys::number(&key, 1).map(TaskId));
    }
    Ok(tasks)
}

/// The archived job that a task belonged to.
pub fn archived_job_of(database: &sled::Db, task: TaskId) -> Result<Option<JobId>, String> {
    let up_to = keys::archived(task);
    let Some(row) = database.range(keys::all_archived()..=up_to).next_back() else {
        return Ok(None);
    };
    let (_, json) = row.map_err(|error| error.to_string())?;
    let range: ArchivedRange = serde_json::from_slice(&json).map_err(|error| error.to_string())?;
    Ok((task <= range.last).then_some(range.job))
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
