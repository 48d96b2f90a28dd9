//! The one way to standard output: tables for people, JSON for programs.

use std::io::{ErrorKind, Write};

use anyhow::Context;
use espalier_coordinator::pipeline::outcome::{LimitReport, Outcome};
use espalier_proto::v1::{Job, JobState, Stage, StageState, Task};
use serde_json::{Value, json};

use crate::args::Format;

/// Writes text to standard output. A reader that went away has what it wanted: that is no error.
pub(crate) fn print(text: &str) -> anyhow::Result<()> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => std::process::exit(0),
        written => written.context("cannot write to standard output"),
    }
}

/// Writes indented JSON.
pub(crate) fn print_json(value: &Value) -> anyhow::Result<()> {
    print(&format!("{value:#}\n"))
}

/// Writes jobs, one a row.
pub(crate) fn print_jobs(jobs: &[Job], format: Format) -> anyhow::Result<()> {
    if format == Format::Json {
        return print_json(&Value::Array(jobs.iter().map(job_json).collect()));
    }
    let rows = jobs.iter().map(|job| {
        vec![
            job.id.clone(),
            state(job.state()).to_owned(),
            job.parent.clone(),
            job.output.clone(),
            job.message.clone(),
        ]
    });
    print(&table(
        &["JOB", "STATE", "PARENT", "OUTPUT", "MESSAGE"],
        rows.collect(),
    ))
}

/// Writes one job and its stages.
pub(crate) fn print_job(job: &Job, format: Format) -> anyhow::Result<()> {
    if format == Format::Json {
        return print_json(&job_json(job));
    }
    print_jobs(std::slice::from_ref(job), format)?;
    if job.stages.is_empty() {
        return Ok(());
    }
    let rows = job.stages.iter().map(|stage| {
        vec![
            stage.name.clone(),
            stage_state(stage.state()).to_owned(),
            format!("{}/{}", stage.tasks_done, stage.tasks),
            seconds(stage.elapsed_ms),
            stage.decision.clone(),
        ]
    });
    print(&format!(
        "\n{}",
        table(&["STAGE", "STATE", "TASKS", "TIME", "DECISION"], rows.collect())
    ))
}

/// Writes what a finished job has to tell.
pub(crate) fn print_outcome(outcome_json: &str, format: Format) -> anyhow::Result<()> {
    if format == Format::Json {
        return print_json(&serde_json::from_str(outcome_json).context("the outcome is no JSON")?);
    }
    let outcome: Outcome = serde_json::from_str(outcome_json).context("the outcome cannot be read")?;
    print(&outcome_table(&outcome))
}

/// Says a line to people. Nobody may be listening any more: that is no reason to end a job.
pub(crate) fn say(line: &str) {
    use std::io::Write as _;
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// The limits that the exported model was measured outside of; empty when it meets all of them, or when
/// nothing is told of the outcome.
pub(crate) fn missed_limits(outcome_json: &str) -> anyhow::Result<String> {
    if outcome_json.is_empty() {
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
            limit.metric.display(reading.parent),
            limit.metric.display(reading.limit),
            limit.metric.display(reading.predicted),
            limit.metric.display(reading.value),
            if reading.inside { "met" } else { "missed" }.to_owned(),
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

/// Columns as wide as they need, two spaces between them, nothing after the last.
fn table(heads: &[&str], rows: Vec<Vec<String>>) -> String {
    let head = heads.iter().map(|head| (*head).to_owned()).collect::<Vec<_>>();
    let rows: Vec<Vec<String>> = std::iter::once(head).chain(rows).collect();
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..heads.len()).map(width).collect();
    let mut text = String::new();
    for row in &rows {
        let cells = row
            .iter()
            .zip(&widths)
            .map(|(cell, width)| format!("{cell:width$}"));
        text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
        text.push('\n');
    }
    text
}

pub(crate) fn job_json(job: &Job) -> Value {
    let embedded = |text: &str| serde_json::from_str::<Value>(text).unwrap_or(Value::Null);
    json!({
        "id": job.id,
        "request_id": job.request_id,
        "state": state(job.state()),
        "message": job.message,
        "revision": job.revision,
        "submitted_unix_ms": job.submitted_unix_ms,
        "started_unix_ms": job.started_unix_ms,
        "finished_unix_ms": job.finished_unix_ms,
        "parent": job.parent,
        "output": job.output,
        "stages": job.stages.iter().map(stage_json).collect::<Vec<_>>(),
        "spec": embedded(&job.spec_json),
        "outcome": embedded(&job.outcome_json),
    })
}

fn stage_json(stage: &Stage) -> Value {
    json!({
        "name": stage.name,
        "kind": stage.kind,
        "state": stage_state(stage.state()),
        "tasks": stage.tasks,
        "tasks_done": stage.tasks_done,
        "active": stage.active.iter().map(task_json).collect::<Vec<_>>(),
        "decision": stage.decision,
        "elapsed_ms": stage.elapsed_ms,
    })
}

fn task_json(task: &Task) -> Value {
    json!({
        "id": task.id,
        "name": task.name,
        "worker": task.worker,
        "device": task.device,
        "attempt": task.attempt,
        "failures": task.failures,
        "last_failure": task.last_failure,
        "done": task.done,
        "total": task.total,
        "unit": task.unit,
        "note": task.note,
        "elapsed_ms": task.elapsed_ms,
    })
}

/// A job's state in one word.
pub(crate) fn state(state: JobState) -> &'static str {
    match state {
        JobState::Unspecified => "unknown",
        JobState::Queued => "queued",
        JobState::Running => "running",
        JobState::Succeeded => "succeeded",
        JobState::Failed => "failed",
        JobState::Cancelled => "cancelled",
        JobState::Paused => "paused",
    }
}

/// A stage's state in one word.
pub(crate) fn stage_state(state: StageState) -> &'static str {
    match state {
        StageState::Unspecified => "unknown",
        StageState::Waiting => "waiting",
        StageState::Running => "running",
        StageState::Done => "done",
        StageState::Stopped => "stopped",
    }
}

/// Whether a job can still change.
pub(crate) fn has_ended(job: &Job) -> bool {
    matches!(
        job.state(),
        JobState::Succeeded | JobState::Failed | JobState::Cancelled
    )
}

fn seconds(milliseconds: u64) -> String {
    format!("{}.{} s", milliseconds / 1000, milliseconds % 1000 / 100)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_and_lines_end_without_spaces() {
        let rows = vec![
            vec!["job-1".into(), "running".into(), String::new()],
            vec!["job-10".into(), "é".into(), "x".into()],
        ];
        assert_eq!(
            table(&["JOB", "STATE", "M"], rows),
            "JOB     STATE    M\njob-1   running\njob-10  é        x\n"
        );
    }
}
