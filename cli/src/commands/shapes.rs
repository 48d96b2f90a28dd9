//! What a table says of models with equally many parameters, and of equally fast ones.

use std::path::Path;

use espalier_arch::{Architecture, Storage};
use espalier_coordinator::cost_tables::KeptTable;
use espalier_search::shapes::{Shapes, shapes};
use espalier_search::{MemoryModel, Workload};

use super::{estimate, plan};
use crate::args::Plan;
use crate::{failure, output};

pub(crate) async fn run(asked: &Plan) -> anyhow::Result<()> {
    let source = Path::new(&asked.source);
    let is_config =
        source.file_name().is_some_and(|name| name == "config.json") || source.join("config.json").is_file();
    let (parent, own, tables) = if is_config {
        if asked.table.is_empty() {
            return Err(failure::usage(format!(
                "{} says nothing of costs; give a table with --table",
                source.display()
            )));
        }
        (estimate::read(source)?, None, plan::given(asked)?)
    } else {
        let findings = plan::find(asked).await?;
        let tables = plan::tables(asked, &findings)?;
        (findings.architecture, Some(findings.spec.target.workload), tables)
    };
    let mut found = Vec::new();
    for (name, kept) in &tables {
        for workload in workloads(asked, own, kept, name)? {
            found.push(
                one(&parent, kept, &workload, asked)
                    .map_err(|reason| failure::usage(format!("{name}: {reason}")))?,
            );
        }
    }
    output::shapes(&found).print(asked.remote.how)
}

/// Those that were asked for; else the job's own, or the one that the table's first model was measured under.
fn workloads(
    asked: &Plan,
    own: Option<Workload>,
    kept: &KeptTable,
    name: &str,
) -> anyhow::Result<Vec<Workload>> {
    if !asked.workload.is_empty() {
        return Ok(asked.workload.clone());
    }
    let first = own.or_else(|| kept.parents.first().map(|parent| parent.workload));
    let missing = || failure::usage(format!("{name} names no workload; give one with --workload"));
    Ok(vec![first.ok_or_else(missing)?])
}

fn one(parent: &Architecture, kept: &KeptTable, workload: &Workload, asked: &Plan) -> Result<Shapes, String> {
    let storage: Storage = kept.key.precision.parse()?;
    let memory = MemoryModel::unpaged(storage);
    shapes(parent, &kept.cost_table(), workload, memory, asked.extrapolate).map_err(|error| error.to_string())
}
