//! What a finished job leaves for people: `report.json`, `report.html` and `cost-table.json`, all from one [`Outcome`].
//!
//! [`html`] composes the page, [`chart`] draws its pictures as inline SVG, [`format`](mod@format) writes
//! figures and escapes text. The page is self-contained: it loads nothing, so it can be mailed. Nothing is
//! computed here that the outcome does not already say.

mod chart;
pub(crate) mod format;
mod html;
#[cfg(test)]
mod sample;
mod table;
#[cfg(test)]
mod tests;

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use crate::pipeline::Outcome;

/// Writes `report.json`, `report.html` and the cost table into `directory`, each whole or not at all.
///
/// # Errors
/// When a file cannot be written, for example on a full disk.
pub fn write(outcome: &Outcome, directory: &Path) -> io::Result<()> {
    let mut json = serde_json::to_vec_pretty(outcome).map_err(io::Error::other)?;
    json.push(b'\n');
    write_whole(directory, "report.json", &json)?;
    if let Some(table) = &outcome.cost_table {
        let mut json = serde_json::to_vec_pretty(table).map_err(io::Error::other)?;
        json.push(b'\n');
        write_whole(directory, "cost-table.json", &json)?;
    }
    write_whole(directory, "report.html", html::page(outcome).as_bytes())
}

/// The HTML report, self-contained.
pub fn html(outcome: &Outcome) -> String {
    html::page(outcome)
}

fn write_whole(directory: &Path, name: &str, content: &[u8]) -> io::Result<()> {
    let partial = directory.join(format!(".{name}.partial"));
    let written = File::create(&partial)
        .and_then(|mut file| file.write_all(content).and_then(|()| file.sync_all()))
        .and_then(|()| fs::rename(&partial, directory.join(name)));
    if written.is_err() {
        // The first error is the one to tell; what is left of the file must not stay.
        let _ = fs::remove_file(&partial);
    }
    written
}
