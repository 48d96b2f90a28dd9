//! The file of one log: its beginning, a mark that says how many lines were left out, and its end.
//!
//! A log grows by appending. One that has grown past its bounds and as much again as its end may take is
//! written anew beside itself without its middle and renamed into place; so a line is copied about once.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::Path;

use super::Options;

/// Begins a mark. No line holds it: lines have their control characters escaped.
const MARK: char = '\u{1e}';

/// What is kept of a log.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Kept {
    /// Its lines, the oldest first, with one that says how many were left out where some were.
    pub lines: Vec<String>,
    /// How many were left out, by the bounds or by `tail`.
    pub left_out: u64,
}

/// A line that says that lines are missing here.
pub fn mark(left_out: u64) -> String {
    format!("{MARK}{left_out} lines were left out\n")
}

fn left_out(line: &str) -> Option<u64> {
    let (number, _) = line.strip_prefix(MARK)?.split_once(' ')?;
    number.parse().ok()
}

/// Appends text to a log and returns its size afterwards.
pub fn append(path: &Path, text: &str, options: &Options) -> io::Result<u64> {
    let mut file = OpenOptions::new().create(true).append(true).open(path)?;
    let before = file.metadata()?.len();
    if let Err(error) = file.write_all(text.as_bytes()) {
        // Half a line would run into the next one.
        file.set_len(before)?;
        return Err(error);
    }
    let size = before.saturating_add(u64::try_from(text.len()).unwrap_or(u64::MAX));
    let bound = options.head_bytes.saturating_add(options.tail_bytes);
    if size <= bound.saturating_add(options.tail_bytes) {
        return Ok(size);
    }
    drop(file);
    shorten(path, options)
}

/// Writes a log anew without its middle.
fn shorten(path: &Path, options: &Options) -> io::Result<u64> {
    let text = read_text(path)?;
    let (head, missing, tail) = parts(&text, options);
    let short = match missing {
        0 => format!("{head}{tail}"),
        _ => format!("{head}{}{tail}", mark(missing)),
    };
    let beside = path.with_extension("part");
    fs::write(&beside, &short)?;
    fs::rename(&beside, path)?;
    Ok(u64::try_from(short.len()).unwrap_or(u64::MAX))
}

/// The last `tail` lines, or all with 0.
pub fn read(path: &Path, tail: usize, options: &Options) -> io::Result<Kept> {
    let text = match read_text(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Kept::default()),
        Err(error) => return Err(error),
    };
    let (head, missing, end) = parts(&text, options);
    let mut kept = Kept::default();
    take(&mut kept, head);
    if missing > 0 {
        kept.left_out = kept.left_out.saturating_add(missing);
        kept.lines.push(said(missing));
    }
    take(&mut kept, end);
    if tail > 0 && kept.lines.len() > tail {
        let cut = kept.lines.len() - tail;
        kept.left_out = kept
            .left_out
            .saturating_add(u64::try_from(cut).unwrap_or(u64::MAX));
        kept.lines.drain(..cut);
    }
    Ok(kept)
}

fn take(kept: &mut Kept, text: &str) {
    for line in text.lines() {
        match left_out(line) {
            Some(missing) => {
                kept.left_out = kept.left_out.saturating_add(missing);
                kept.lines.push(said(missing));
            }
            None => kept.lines.push(line.to_owned()),
        }
    }
}

fn said(missing: u64) -> String {
    format!("… {missing} lines were left out here")
}

fn read_text(path: &Path) -> io::Result<String> {
    let mut bytes = Vec::new();
    File::open(path)?.read_to_end(&mut bytes)?;
    Ok(String::from_utf8(bytes)
        .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned()))
}

/// Its beginning, how many lines are missing after it, and its end, all in whole lines.
fn parts<'a>(text: &'a str, options: &Options) -> (&'a str, u64, &'a str) {
    let limit = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
    let (head, tail) = (limit(options.head_bytes), limit(options.tail_bytes));
    if text.len() <= head.saturating_add(tail) {
        return (text, 0, "");
    }
    let head = line_end(text, head);
    let tail = line_start(text, text.len().saturating_sub(tail)).max(head);
    let middle = text.get(head..tail).unwrap_or_default();
    let missing = middle
        .lines()
        .map(|line| left_out(line).unwrap_or(1))
        .fold(0, u64::saturating_add);
    (
        text.get(..head).unwrap_or_default(),
        missing,
        text.get(tail..).unwrap_or_default(),
    )
}

/// The end of the last whole line that ends no later.
fn line_end(text: &str, at: usize) -> usize {
    let before = text.as_bytes().get(..at).unwrap_or_default();
    before
        .iter()
        .rposition(|byte| *byte == b'\n')
        .map_or(0, |end| end + 1)
}

/// The start of the first line that starts no earlier.
fn line_start(text: &str, at: usize) -> usize {
    let Some(before) = at.checked_sub(1) else { return 0 };
    let rest = text.as_bytes().get(before..).unwrap_or_default();
    rest.iter()
        .position(|byte| *byte == b'\n')
        .map_or(text.len(), |end| before + end + 1)
}
