//! The one way to standard output: tables for people, JSON and YAML for programs.
//!
//! [`Listing`] is what every listing and every single thing is shown as; [`table`] renders. One module a kind of
//! thing says which columns it has.

mod device;
mod estimate;
mod job;
mod outcome;
mod plan;
mod shapes;
mod table;
mod tables;
mod task;
mod worker;

use std::io::{ErrorKind, Write};

use anyhow::Context;
use serde_json::Value;

use crate::args::{Format, How};

pub(crate) use device::devices;
pub(crate) use estimate::estimate;
pub(crate) use job::{at, events, has_ended, job, jobs};
pub(crate) use outcome::{missed_limits, print_outcome};
pub(crate) use plan::plans;
pub(crate) use shapes::shapes;
pub(crate) use table::plain;
pub(crate) use tables::{table_rows, tables};
pub(crate) use task::{task, tasks};
pub(crate) use worker::{worker, workers};

/// Things to show, one a row.
pub(crate) struct Listing {
    /// The heads of the columns; the first column is the id.
    pub heads: Vec<&'static str>,
    /// How many columns a table has; the rest is for `-o wide`.
    pub narrow: usize,
    /// What stands in them.
    pub rows: Vec<Vec<String>>,
    /// The same for programs.
    pub values: Vec<Value>,
    /// What a table of a single thing says below it.
    pub below: Option<Box<Listing>>,
}

impl Listing {
    /// As text, in the form asked for. `single` is one thing rather than a list of them.
    pub(crate) fn text(&self, how: How, single: bool) -> anyhow::Result<String> {
        if how.quiet {
            // Of what has none, as an event that is about no task, there is nothing to print.
            let ids = self.rows.iter().filter_map(|row| row.first());
            let ids = ids.filter(|id| !id.is_empty());
            return Ok(ids.map(|id| format!("{}\n", plain(id))).collect());
        }
        let whole = || match (single, self.values.first()) {
            (true, Some(value)) => value.clone(),
            _ => Value::Array(self.values.clone()),
        };
        match how.format {
            Format::Json => Ok(format!("{:#}\n", whole())),
            Format::Yaml => yaml(&whole()),
            Format::Table => Ok(self.table(self.narrow, false)),
            Format::Wide => Ok(self.table(self.heads.len(), true)),
        }
    }

    fn table(&self, columns: usize, wide: bool) -> String {
        let heads = self.heads.get(..columns).unwrap_or(&self.heads);
        let rows = self
            .rows
            .iter()
            .map(|row| row.iter().take(columns).cloned().collect());
        let mut text = table::table(heads, rows.collect());
        if let Some(below) = &self.below
            && !below.rows.is_empty()
        {
            let columns = if wide { below.heads.len() } else { below.narrow };
            text.push('\n');
            text.push_str(&below.table(columns, wide));
        }
        text
    }

    /// Writes a list.
    pub(crate) fn print(&self, how: How) -> anyhow::Result<()> {
        print(&self.text(how, false)?)
    }

    /// Writes a single thing.
    pub(crate) fn print_one(&self, how: How) -> anyhow::Result<()> {
        print(&self.text(how, true)?)
    }
}

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

/// Writes one value of a stream for programs: a line of JSON, or a document of YAML.
pub(crate) fn print_value(value: &Value, format: Format) -> anyhow::Result<()> {
    match format {
        Format::Yaml => print(&format!("---\n{}", yaml(value)?)),
        _ => print(&format!("{value}\n")),
    }
}

/// YAML, its end of line included.
pub(crate) fn yaml(value: &Value) -> anyhow::Result<String> {
    let text = serde_saphyr::to_string(value).context("cannot be written as YAML")?;
    Ok(format!("{}\n", text.trim_end()))
}

/// Says a line to people. Nobody may be listening any more: that is no reason to end a job.
pub(crate) fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{}", plain(line));
}

/// `12.3 s`.
fn seconds(milliseconds: u64) -> String {
    format!("{}.{} s", milliseconds / 1000, milliseconds % 1000 / 100)
}

#[cfg(test)]
mod tests;
