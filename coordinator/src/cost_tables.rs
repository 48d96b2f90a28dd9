//! Cost tables that stay: a directory with a file for each device, engine, version, precision, parallelism, mode,
//! environment and hidden width, kept across jobs.
//!
//! What a profile measured is put there once, when its stage is done, and the next job on such a target measures only
//! what is missing. A file that is lost or cannot be read costs a measurement and nothing else, so nothing here fails a
//! job. Here are the tables and their files' form; [`CostTables`] is the directory.

mod directory;
mod form;
#[cfg(test)]
mod tests;

pub use directory::{CostTables, write_whole};

use espalier_arch::Architecture;
use espalier_proto::task::{Profile, Profiled};
use espalier_search::{
    CostKey, CostRow, CostTable, EngineMemory, Kept, Subject, WholeParent, Workload, merged, telling,
};
use serde::{Deserialize, Serialize};

use crate::spec::{COST_TABLE_SCHEMA, CostTableFile};

/// Their directory in a data directory.
pub const DIRECTORY: &str = "cost-tables";
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
    /// Whether others used the machine meanwhile, so that no other job should go by it. What is kept never is.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub disturbed: bool,
}

/// A model that was measured whole, or was too large for that.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeptParent {
    /// Which, by [`digest`]; none in tables from before it was told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub architecture: Option<String>,
    /// Parameters of its blocks.
    pub block_parameters: u64,
    /// Under which workload.
    pub workload: Workload,
    /// What was measured, or why nothing was.
    pub measurement: WholeParent,
}

/// A table without its rows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// [`KeptTable::id`].
    pub id: String,
    /// What it is true for.
    pub key: CostKey,
    /// How many rows it has.
    pub rows: usize,
    /// How many models were measured whole, or one model under how many workloads.
    pub parents: usize,
    /// What the engine needs and rounds, where it was measured.
    pub memory: Option<EngineMemory>,
}

impl Summary {
    /// Of a table.
    pub fn of(table: &KeptTable) -> Self {
        Self {
            id: table.id(),
            key: table.key.clone(),
            rows: table.rows.len(),
            parents: table
                .parents
                .iter()
                .filter(|parent| parent.was_measured())
                .count(),
            memory: table.memory,
        }
    }
}

/// Tells a model's shape from every other: BLAKE3 of its JSON.
pub fn digest(architecture: &Architecture) -> String {
    // A shape is plain data: it always has a JSON form.
    let json = serde_json::to_vec(architecture).unwrap_or_default();
    blake3::hash(&json).to_hex().to_string()
}

impl KeptParent {
    /// Whether it is this model. One that is not told by its digest is known by the parameters of its blocks, which
    /// other models may have too.
    pub(crate) fn is(&self, architecture: &Architecture) -> bool {
        match &self.architecture {
            Some(known) => *known == digest(architecture),
            None => self.block_parameters == architecture.parameters().in_blocks(),
        }
    }

    /// Whether it had room.
    fn was_measured(&self) -> bool {
        self.measurement.measured().is_some()
    }

    fn replaces(&self, other: &Self) -> bool {
        self.workload == other.workload
            && self.block_parameters == other.block_parameters
            && self.architecture == other.architecture
    }
}

impl From<CostTableFile> for KeptTable {
    fn from(file: CostTableFile) -> Self {
        let CostTableFile {
            workload,
            block_parameters,
            architecture,
            profile,
            parents,
            ..
        } = file;
        let parent = KeptParent {
            architecture,
            block_parameters,
            workload,
            measurement: profile.parent,
        };
        Self {
            schema: COST_TABLE_SCHEMA,
            key: profile.key,
            rows: profile.rows,
            memory: profile.memory,
            parents: [vec![parent], parents].concat(),
            disturbed: profile.disturbed,
        }
    }
}

impl KeptTable {
    /// What one profile found out that no other job had; none where that is nothing, or nothing that others should go by.
    pub fn of(profiled: &Profiled, workload: Workload, architecture: &Architecture) -> Option<Self> {
        let rows = profiled.rows.get(profiled.reused_rows..)?;
        if rows.is_empty() || profiled.disturbed {
            return None;
        }
        Some(Self {
            schema: COST_TABLE_SCHEMA,
            key: profiled.key.clone(),
            rows: rows.to_vec(),
            memory: profiled.memory,
            parents: vec![KeptParent {
                architecture: Some(digest(architecture)),
                block_parameters: architecture.parameters().in_blocks(),
                workload,
                measurement: profiled.parent.clone(),
            }],
            disturbed: false,
        })
    }

    /// A name that tells its key from others.
    pub fn id(&self) -> String {
        // A key is plain data: it always has a JSON form.
        let key = serde_json::to_vec(&self.key).unwrap_or_default();
        let mut digits = blake3::hash(&key).to_hex().to_string();
        digits.truncate(ID_DIGITS);
        digits
    }

    /// The rows as a cost model takes them.
    pub fn cost_table(&self) -> CostTable {
        CostTable {
            key: self.key.clone(),
            rows: self.rows.clone(),
            memory: self.memory,
        }
    }

    /// This model measured under this workload, or else under another.
    pub fn parent(&self, architecture: &Architecture, workload: &Workload) -> Option<&KeptParent> {
        let is_it = |parent: &&KeptParent| parent.was_measured() && parent.is(architecture);
        let alike = || self.parents.iter().filter(is_it);
        let under = |parent: &&KeptParent| parent.workload == *workload;
        let told = |parent: &&KeptParent| parent.architecture.is_some();
        alike()
            .filter(told)
            .find(under)
            .or_else(|| alike().find(under))
            .or_else(|| alike().find(told))
            .or_else(|| alike().next())
    }

    /// This table with what `newer` says anew; `newer` alone where the target runs at another pace now: the rows of two
    /// paces make no one table.
    fn merged(&self, newer: &Self) -> Self {
        if self.disturbed || self.rows_told().other_pace(&newer.rows).is_some() {
            return Self {
                memory: newer.memory.or(self.memory),
                ..newer.clone()
            };
        }
        // What was measured stays where there is less room now.
        let is_known = |new: &KeptParent| {
            let mut kept = self.parents.iter();
            !new.was_measured() && kept.any(|kept| kept.was_measured() && new.replaces(kept))
        };
        let new: Vec<&KeptParent> = newer.parents.iter().filter(|new| !is_known(new)).collect();
        let again = |parent: &KeptParent| new.iter().any(|new| new.replaces(parent));
        let left = self.parents.iter().filter(|parent| !again(parent));
        Self {
            schema: COST_TABLE_SCHEMA,
            key: self.key.clone(),
            rows: merged(&self.rows, &newer.rows),
            memory: newer.memory.or(self.memory),
            parents: left.chain(new.iter().copied()).cloned().collect(),
            disturbed: newer.disturbed,
        }
    }

    /// All its rows, as a profile is told those that it asks for.
    fn rows_told(&self) -> Kept {
        Kept {
            key: self.key.clone(),
            rows: self.rows.clone(),
            parent: None,
            memory: self.memory,
        }
    }

    /// Whether it says the same, in whatever order.
    fn says_the_same(&self, other: &Self) -> bool {
        self.rows.len() == other.rows.len()
            && self.rows.iter().all(|row| other.rows.contains(row))
            && self.memory == other.memory
            && self.parents.len() == other.parents.len()
            && self.parents.iter().all(|parent| other.parents.contains(parent))
    }

    /// What a profile has use for, or what tells it whether all this still holds; none where there is nothing. A parent that
    /// is not surely this one is measured again.
    fn useful(&self, profile: &Profile) -> Option<Kept> {
        let wanted = |row: &&CostRow| {
            let subject = match &row.subject {
                Subject::Block(shape) => profile.shapes.contains(shape),
                Subject::Base { vocab_size } => *vocab_size == profile.architecture.vocab_size,
                Subject::HostFloor | Subject::HostBlock | Subject::HostAlone => true,
            };
            subject && profile.points.contains(&row.point)
        };
        let mut rows: Vec<CostRow> = self.rows.iter().filter(wanted).cloned().collect();
        if !rows.iter().any(|row| matches!(row.subject, Subject::Block(_))) {
            rows.extend(telling(&self.rows, &profile.shapes, &profile.points));
        }
        let parent = self.parents.iter().find(|parent| {
            parent.architecture.is_some()
                && parent.is(&profile.architecture)
                && parent.workload == profile.workload
        });
        (!rows.is_empty()).then(|| Kept {
            key: self.key.clone(),
            rows,
            parent: parent.and_then(|parent| parent.measurement.measured().cloned()),
            memory: self.memory,
        })
    }
}
