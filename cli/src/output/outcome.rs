//! What a finished job has to tell.

use std::fmt::Write as _;

use anyhow::Context;
use espalier_coordinator::cost_tables::KeptTable;
use espalier_coordinator::pipeline::outcome::{LimitReport, Outcome, ProfileOutcome};

use super::table::table;
use super::{print, print_json, table_rows, yaml};
use crate::args::{Format, How};

/// Writes what a finished job has to tell.
pub(crate) fn print_outcome(outcome_json: &str, format: Format) -> anyhow::Result<()> {
    let value = || serde_json::from_str(outcome_json).context("the outcome is no JSON");
    match format {
        Format::Json => print_json(&value()?),
        Format::Yaml => print(&yaml(&value()?)?),
        Format::Table | Format::Wide => {
            if let Some(profiled) = ProfileOutcome::read(outcome_json) {
                return table_rows(&KeptTable::from(profiled.cost_table)).print(How { format, quiet: false });
            }
            let outcome: Outcome =
                serde_json::from_str(outcome_json).context("the outcome cannot be read")?;
            print(&outcome_table(&outcome))
        }
    }
}

/// The limits that the exported model was not measured inside of; empty when it meets all of them, or when
/// nothing is told of the outcome.
pub(crate) fn missed_limits(outcome_json: &str) -> anyhow::Result<String> {
    if outcome_json.is_empty() || ProfileOutcome::read(outcome_json).is_some() {
        return Ok(String::new());
    }
    let outcome: Outcome = serde_json::from_str(outcome_json).context("the outcome cannot be read")?;
    Ok(LimitReport::missed(&outcome.limits))
}

fn outcome_table(outcome: &Outcome) -> String {
    let limits = outcome.limits.iter().map(|limit| {
        let reading = &limit.verified;
        vec![
            limit.metric.to_string(),
            outcome.parent_figure(limit),
            limit.metric.display(reading.limit),
            limit.metric.display(reading.predicted),
            limit.metric.display(reading.value),
            reading.verdict().to_owned(),
        ]
    });
    let mut text = table(
        &["LIMIT", "PARENT", "ALLOWED", "PREDICTED", "MEASURED", ""],
        limits.collect(),
    );
    let parent = &outcome.parent.quality;
    let mut rows = vec![quality_row("parent", outcome.parent.parameters, parent)];
    for report in &outcome.strategies {
        let name = |stage: &str| format!("{} {stage}", report.strategy);
        rows.push(quality_row(
            &name("before recovery"),
            report.parameters,
            &report.before,
        ));
        if let Some(after) = &report.after {
            rows.push(quality_row(&name("after recovery"), report.parameters, after));
        }
    }
    text.push('\n');
    text.push_str(&table(
        &["MODEL", "PARAMETERS", "KL TO PARENT", "PERPLEXITY"],
        rows,
    ));
    if !outcome.notes.is_empty() {
        text.push('\n');
    }
    for note in &outcome.notes {
        let _ = writeln!(text, "note  {note}");
    }
    text
}

fn quality_row(name: &str, parameters: u64, quality: &espalier_proto::task::Quality) -> Vec<String> {
    vec![
        name.to_owned(),
        parameters.to_string(),
        format!("{:.4} ± {:.4}", quality.divergence, quality.divergence_error),
        format!("{:.2}", quality.perplexity),
    ]
}
