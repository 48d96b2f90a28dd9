//! What a finished job leaves for people: `report.json`, `report.html` and `cost-table.json`, all from one [`Outcome`].
//!
//! [`html`] composes the page, [`chart`] draws its pictures as inline SVG, [`format`](mod@format) writes
//! figures and escapes text. The page is self-contained: it loads nothing, so it can be mailed. Nothing is
//! computed here that the outcome does not already say.

mod chart;
pub(crate) mod format;
mod html;
mod plans;
#[cfg(test)]
mod sample;
mod serving;
mod table;
#[cfg(test)]
mod tests;

use std::io;
use std::path::Path;

use espalier_search::plan::Answer;
use serde::Serialize;

use crate::cost_tables::write_whole;
use crate::pipeline::{Outcome, ProfileOutcome};

/// Writes `report.json`, `report.html` and the cost table into `directory`, and beside the exported weights a `README.md` that
/// says how to serve them, each whole or not at all.
///
/// # Errors
/// When a file cannot be written, for example on a full disk.
pub fn write(outcome: &Outcome, directory: &Path) -> io::Result<()> {
    write_json(directory, "report.json", outcome)?;
    if let Some(table) = &outcome.cost_table {
        write_json(directory, "cost-table.json", table)?;
    }
    if let Some(readme) = serving::readme(outcome) {
        let exported = Path::new(&outcome.export.directory).file_name();
        let exported = exported.map(|name| directory.join(name));
        // It lies there unless it was exported on another machine.
        if let Some(exported) = exported.filter(|exported| exported.is_dir()) {
            write_whole(&exported.join("README.md"), readme.as_bytes())?;
        }
    }
    write_whole(&directory.join("report.html"), html::page(outcome).as_bytes())
}

/// Writes what a job leaves that was to measure its target and nothing else: `report.json` and the cost table.
///
/// # Errors
/// As [`write`].
pub fn write_profile(outcome: &ProfileOutcome, directory: &Path) -> io::Result<()> {
    write_json(directory, "report.json", outcome)?;
    write_json(directory, "cost-table.json", &outcome.cost_table)
}

/// The HTML report, self-contained.
pub fn html(outcome: &Outcome) -> String {
    html::page(outcome)
}

/// Answers to other questions as a page, self-contained; each, or the reason why there is none, under its name.
pub fn plans(title: &str, answers: &[(String, Result<Answer, String>)]) -> String {
    html::document(title, &plans::sections(answers))
}

fn write_json(directory: &Path, name: &str, value: &impl Serialize) -> io::Result<()> {
    let mut json = serde_json::to_vec_pretty(value).map_err(io::Error::other)?;
    json.push(b'\n');
    write_whole(&directory.join(name), &json)
}
