//! An imported cost table: the file that stands in place of the profile stage.
//!
//! A spec names the file; before a job is taken the file is read and stands in the spec whole
//! ([`JobSpec::import_files`]), so that a job never depends on a file that may change or lie on another machine.
//! Every finished job leaves its own table as such a file. Whether the table covers what the search needs is
//! the pipeline's business, which knows the parent.

use std::path::Path;

use espalier_proto::task::Profiled;
use espalier_search::Workload;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

use super::{JobSpec, SpecError, Target};
use crate::cost_tables::KeptTable;

/// Version of [`CostTableFile`]'s form. 2 tells parallelism, mode and the engine's memory, and may have the host's
/// floor among its rows; files of 1 are read as what they were: one rank, eager, every row by the clock.
pub const COST_TABLE_SCHEMA: u32 = 2;
/// The oldest that is still read.
pub const OLDEST_SCHEMA: u32 = 1;
const FIELD: &str = "target.cost_table";

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
    /// Parameters of the measured parent's blocks, which tell it from others.
    pub block_parameters: u64,
    /// The rows, what they are true for, and the parent measured whole.
    pub profile: Profiled,
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

/// A finished job's table, or what is kept of a target and the one model that was measured whole under the workload.
fn read(file: &str, workload: &Workload) -> Result<CostTableFile, SpecError> {
    let wrong = |reason: String| SpecError::new(FIELD, reason);
    let kept = KeptTable::read(Path::new(file)).map_err(wrong)?;
    let measured = kept.parents.iter().find(|parent| parent.workload == *workload);
    let Some(parent) = measured.or_else(|| kept.parents.first()) else {
        return Err(wrong(format!(
            "{file} has no model measured whole, expected the parent under the workload; give the cost-table.json of a \
             finished job"
        )));
    };
    Ok(CostTableFile {
        schema: kept.schema,
        file: file.to_owned(),
        workload: parent.workload,
        block_parameters: parent.block_parameters,
        profile: Profiled {
            key: kept.key.clone(),
            rows: kept.rows.clone(),
            parent: parent.measurement.clone(),
            memory: kept.memory,
        },
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
    let word = |value: Value| value.as_str().unwrap_or_default().to_owned();
    let compared = [
        (
            "engine",
            key.engine.clone(),
            word(serde_json::json!(target.engine)),
        ),
        (
            "precision",
            key.precision.clone(),
            word(serde_json::json!(target.precision())),
        ),
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
