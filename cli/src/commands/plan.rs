//! Answers to other questions from what a job measured.

use std::path::Path;

use espalier_arch::Storage;
use espalier_coordinator::cost_tables::{KeptTable, write_whole};
use espalier_coordinator::pipeline::Findings;
use espalier_coordinator::report;
use espalier_search::plan::{Answer, Known, Target, answer};
use espalier_search::solver::Options;
use espalier_search::{Corrections, CostTable, Limits, MemoryModel, Whole, Workload};

use super::{connect, shapes};
use crate::args::Plan;
use crate::{failure, output};

/// A plan and its name: the table, the workload and the limits.
pub(crate) type Named = (String, Result<Answer, String>);

pub(crate) async fn run(asked: &Plan) -> anyhow::Result<()> {
    if asked.shapes {
        return shapes::run(asked).await;
    }
    let findings = find(asked).await?;
    let tables = tables(asked, &findings)?;
    let known = findings
        .known()
        .map_err(|reason| failure::usage(format!("{}: {reason}", asked.source)))?;
    let answers = answers(asked, &findings, &known, &tables);
    if let Some(page) = &asked.html {
        let html = report::plans(&asked.source, &answers);
        write_whole(page, html.as_bytes())
            .map_err(|error| failure::machine(format!("cannot write {}: {error}", page.display())))?;
    }
    output::plans(&answers).print(asked.remote.how)?;
    let wrong = answers
        .iter()
        .find_map(|(name, answer)| Some((name, answer.as_ref().err()?)));
    match wrong {
        None => Ok(()),
        Some((name, reason)) => Err(failure::usage(format!("{name}: {reason}"))),
    }
}

pub(super) async fn find(asked: &Plan) -> anyhow::Result<Findings> {
    let path = Path::new(&asked.source);
    let file = if path.is_dir() {
        path.join("report.json")
    } else {
        path.to_owned()
    };
    if !file.is_file() && asked.source.starts_with("job-") {
        let mut client = connect(&asked.remote).await?;
        return Ok(serde_json::from_str(&client.findings(&asked.source).await?)?);
    }
    let shown = file.display();
    let text = std::fs::read_to_string(&file).map_err(|error| {
        failure::usage(format!(
            "{shown} cannot be read: {error}; give the outcome directory of a finished job, or a job's id"
        ))
    })?;
    let findings = Findings::of_outcome(&text).or_else(|reason| {
        // What a coordinator tells of a job may be kept as a file too.
        serde_json::from_str(&text).map_err(|_| reason)
    });
    findings.map_err(|reason| failure::usage(format!("{shown} {reason}")))
}

/// The tables to answer by, each with its name.
pub(super) fn tables(asked: &Plan, findings: &Findings) -> anyhow::Result<Vec<(String, KeptTable)>> {
    if asked.table.is_empty() {
        let own = findings.cost_table.clone().ok_or_else(|| {
            failure::usage(format!(
                "{} holds no cost table: its costs are not measured yet, or an older version finished it; give one with \
                 --table",
                asked.source
            ))
        })?;
        return Ok(vec![("own".to_owned(), KeptTable::from(own))]);
    }
    given(asked)
}

/// The tables that were named on the command line.
pub(super) fn given(asked: &Plan) -> anyhow::Result<Vec<(String, KeptTable)>> {
    let read = asked.table.iter().map(|file| {
        let table = KeptTable::read(file).map_err(failure::usage)?;
        let name = file.file_stem().unwrap_or(file.as_os_str());
        Ok((name.to_string_lossy().into_owned(), table))
    });
    read.collect()
}

fn answers(asked: &Plan, findings: &Findings, known: &Known, tables: &[(String, KeptTable)]) -> Vec<Named> {
    let spec = &findings.spec.target;
    let or = |given: &[Workload]| match given {
        [] => vec![spec.workload],
        given => given.to_vec(),
    };
    let limits: Vec<&Limits> = match &asked.limits[..] {
        [] => vec![&spec.limits],
        given => given.iter().collect(),
    };
    // Checks correct the table that they chose by, and no other.
    let corrections = if asked.table.is_empty() {
        findings.corrections.clone()
    } else {
        Corrections::default()
    };
    let mut answers = Vec::new();
    for (name, kept) in tables {
        let table = kept.cost_table();
        for workload in or(&asked.workload) {
            for limits in &limits {
                let named = format!(
                    "{name}, {} × {} + {} tokens, {}",
                    workload.concurrency,
                    workload.prompt_tokens,
                    workload.output_tokens,
                    written(limits)
                );
                let answer = one(asked, known, kept, &table, &corrections, workload, limits);
                answers.push((named, answer));
            }
        }
    }
    answers
}

fn one(
    asked: &Plan,
    known: &Known,
    kept: &KeptTable,
    table: &CostTable,
    corrections: &Corrections,
    workload: Workload,
    limits: &Limits,
) -> Result<Answer, String> {
    let storage: Storage = table.key.precision.parse()?;
    let parent = kept.parent(&known.parent, &workload);
    let target = Target {
        table,
        memory: MemoryModel::unpaged(storage),
        whole: parent.and_then(|parent| {
            let measurement = parent.measurement.measured()?;
            Some(Whole {
                measurement,
                workload: &parent.workload,
            })
        }),
        workload,
        limits,
        extrapolate: asked.extrapolate,
        corrections: corrections.clone(),
        disturbed: kept.disturbed,
    };
    answer(known, &target, usize::from(asked.front), &Options::default()).map_err(|error| error.to_string())
}

fn written(limits: &Limits) -> String {
    let each = limits
        .iter()
        .map(|limit| format!("{} {}", limit.metric, limit.to_text()));
    each.collect::<Vec<_>>().join(", ")
}
