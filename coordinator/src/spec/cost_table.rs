//! An imported cost table: the file that stands in place of the profile stage.
//!
//! A spec names the file; before a job is taken the file is read and stands in the spec whole
//! ([`JobSpec::import_files`]), so that a job never depends on a file that may change or lie on another machine.
//! Every finished job leaves its own table as such a file. Whether the table covers what the search needs is
//! the pipeline's business, which knows the parent.

use std::path::Path;

use espalier_arch::Architecture;
use espalier_proto::task::Profiled;
use espalier_search::Workload;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

use super::{JobSpec, SpecError, Target, word};
use crate::cost_tables::{KeptParent, KeptTable};

/// Version of [`CostTableFile`]'s form. 2 tells parallelism, mode and the engine's memory, and may have the host's
/// floor among its rows; files of 1 are read as what they were: one rank, eager, every row by the clock. 3 tells the
/// environment and which models were measured whole; of older ones neither is known.
pub const COST_TABLE_SCHEMA: u32 = 3;
/// The oldest that is still read.
pub const OLDEST_SCHEMA: u32 = 1;
const FIELD: &str = "target.cost_table";
/// A larger file makes no job's table: the whole of it stands in the spec.
const LARGEST_IMPORT: u64 = 8 << 20;

/// What a profile found out, as a file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CostTableFile {
    /// [`COST_TABLE_SCHEMA`].
    pub schema: u32,
    /// The file it was read from, for display; empty in a file.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub file: String,
    /// What the parent was measured under.
    pub workload: Workload,
    /// Parameters of the measured parent's blocks.
    pub block_parameters: u64,
    /// Which parent was measured, by its [`digest`](crate::cost_tables::digest); none in files from before it was told, where its parameters have to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub architecture: Option<String>,
    /// The rows, what they are true for, and the parent measured whole.
    pub profile: Profiled,
    /// Other models that were measured whole on this target: of a job, the one that is its parent is taken.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parents: Vec<KeptParent>,
}

/// A cost table: named in a spec, and read by the time a job is taken.
#[derive(Debug, Clone, PartialEq)]
pub enum CostTableSource {
    /// The file's name.
    File(String),
    /// Its content.
    Table(Box<CostTableFile>),
}

impl Serialize for CostTableSource {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::File(file) => serializer.serialize_str(file),
            Self::Table(table) => table.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for CostTableSource {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match Value::deserialize(deserializer)? {
            Value::String(file) => Ok(Self::File(file)),
            table => serde_json::from_value(table)
                .map(|table| Self::Table(Box::new(table)))
                .map_err(|error| serde::de::Error::custom(format!("{FIELD}: {error}"))),
        }
    }
}

impl JobSpec {
    /// Reads the cost table that the spec names, so that it stands in the spec whole.
    ///
    /// # Errors
    /// When the file cannot be read, is no cost table, or was measured for another target.
    pub fn import_files(&mut self) -> Result<(), SpecError> {
        let Some(CostTableSource::File(file)) = &self.target.cost_table else {
            return Ok(());
        };
        let table = read(file, &self.target.workload)?;
        fits(&table, &self.target)?;
        self.target.cost_table = Some(CostTableSource::Table(Box::new(table)));
        Ok(())
    }
}

/// A finished job's table, or what is kept of a target and the models that were measured whole under the workload. Which of
/// them is the job's parent is not known yet.
fn read(file: &str, workload: &Workload) -> Result<CostTableFile, SpecError> {
    let wrong = |reason: String| SpecError::new(FIELD, format!("{file} {reason}"));
    let length = std::fs::metadata(file).map_or(0, |metadata| metadata.len());
    if length > LARGEST_IMPORT {
        return Err(wrong(format!(
            "has {length} bytes, expected a cost table of at most {LARGEST_IMPORT}: it travels in the job's spec"
        )));
    }
    let kept = KeptTable::read(Path::new(file)).map_err(|reason| SpecError::new(FIELD, reason))?;
    let (mut under, others): (Vec<KeptParent>, Vec<KeptParent>) = kept
        .parents
        .into_iter()
        .partition(|parent| parent.workload == *workload);
    if under.is_empty() {
        let found = match others.first() {
            Some(other) => format!("only under the workload {}", load(&other.workload)),
            None => "under none".to_owned(),
        };
        return Err(wrong(format!(
            "has models measured whole {found}, expected the parent under the workload {}; give a table that was measured \
             for this target",
            load(workload)
        )));
    }
    let parent = under.remove(0);
    Ok(CostTableFile {
        schema: kept.schema,
        file: file.to_owned(),
        workload: parent.workload,
        block_parameters: parent.block_parameters,
        architecture: parent.architecture,
        profile: Profiled {
            key: kept.key,
            rows: kept.rows,
            parent: parent.measurement,
            memory: kept.memory,
            reused_rows: 0,
            disturbed: kept.disturbed,
        },
        parents: under,
    })
}

/// Refuses a table that was measured for another target than the spec's.
pub(super) fn fits(table: &CostTableFile, target: &Target) -> Result<(), SpecError> {
    let refused = |reason: String| SpecError::new(FIELD, format!("{} has {reason}", table.name()));
    if !(OLDEST_SCHEMA..=COST_TABLE_SCHEMA).contains(&table.schema) {
        return Err(refused(format!(
            "schema {}, expected {OLDEST_SCHEMA} to {COST_TABLE_SCHEMA}; give a file that this version wrote, or an \
             older one did",
            table.schema
        )));
    }
    let key = &table.profile.key;
    let compared = [
        ("engine", key.engine.clone(), word(&target.engine)),
        ("precision", key.precision.clone(), word(&target.precision())),
        ("workload", load(&table.workload), load(&target.workload)),
    ];
    match compared.into_iter().find(|(_, found, wanted)| found != wanted) {
        Some((what, found, wanted)) => Err(refused(format!(
            "{what} {found}, expected {wanted}; give a table that was measured for this target"
        ))),
        None => Ok(()),
    }
}

impl CostTableFile {
    /// The model that was measured whole, as it is kept.
    pub(crate) fn parent(&self) -> KeptParent {
        KeptParent {
            architecture: self.architecture.clone(),
            block_parameters: self.block_parameters,
            workload: self.workload,
            measurement: self.profile.parent.clone(),
        }
    }

    /// The same with this model as the one that was measured whole, where it is among the others.
    pub(crate) fn of(&self, architecture: &Architecture) -> Option<Self> {
        let is = |parent: &KeptParent| parent.is(architecture);
        let own = self.parent();
        // One that is surely it goes before one that has as many parameters.
        let sure = |parent: &&KeptParent| parent.architecture.is_some();
        let mut all = std::iter::once(&own)
            .chain(&self.parents)
            .filter(|parent| is(parent));
        let first = all.clone().find(sure).or_else(|| all.next())?;
        Some(Self {
            block_parameters: first.block_parameters,
            architecture: first.architecture.clone(),
            profile: Profiled {
                parent: first.measurement.clone(),
                ..self.profile.clone()
            },
            parents: Vec::new(),
            ..self.clone()
        })
    }

    /// The file's name, for messages.
    pub fn name(&self) -> &str {
        if self.file.is_empty() {
            "the table"
        } else {
            &self.file
        }
    }
}

fn load(workload: &Workload) -> String {
    format!(
        "of {} × {} prompt and {} output tokens",
        workload.concurrency, workload.prompt_tokens, workload.output_tokens
    )
}
