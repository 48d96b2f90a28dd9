//! The documents of one file, streamed.
//!
//! A text file's documents are separated by blank lines. A JSONL file has one document a line: `text`, or
//! chat `messages`. Which of the two a file is follows from its name (`.txt`, `.jsonl`, before any `.gz`,
//! `.xz`, `.zst`), and for other names from its first character.

use std::io::{BufRead, Read};
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::chat::ChatTemplate;
use super::open::open;
use crate::{Error, Result};

/// A line longer than this is refused: it is no text that a person or a tool wrote one document a line.
const LINE_LIMIT_BYTES: u64 = 64 << 20;

/// Some editors begin a UTF-8 file with it; it is no text.
const BYTE_ORDER_MARK: char = '\u{feff}';

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    Text,
    Jsonl,
}

/// An iterator over one file's documents. Empty documents come as empty strings, to be counted.
pub struct Documents<'a> {
    path: PathBuf,
    reader: Box<dyn BufRead + Send>,
    format: Format,
    template: &'a ChatTemplate,
    line: usize,
    ended: bool,
}

impl<'a> Documents<'a> {
    /// Opens a file; `template` renders its chats.
    ///
    /// # Errors
    /// When the file cannot be opened, is empty or is damaged at its start.
    pub fn open(path: &Path, template: &'a ChatTemplate) -> Result<Self> {
        let mut reader = open(path)?;
        let format = format_of(path, &mut *reader)?;
        Ok(Self {
            path: path.to_owned(),
            reader,
            format,
            template,
            line: 0,
            ended: false,
        })
    }

    fn refused(&self, reason: String) -> Error {
        Error::Data {
            path: self.path.clone(),
            line: Some(self.line),
            reason,
        }
    }

    /// The next line without its end; none at the end of the file.
    fn next_line(&mut self) -> Result<Option<String>> {
        let mut bytes = Vec::new();
        self.line += 1;
        let read = (&mut *self.reader)
            .take(LINE_LIMIT_BYTES)
            .read_until(b'\n', &mut bytes)
            .map_err(|source| self.refused(format!("cannot be read on: {source}")))?;
        if read == 0 {
            return Ok(None);
        }
        if read as u64 == LINE_LIMIT_BYTES {
            return Err(self.refused(format!("the line is longer than {LINE_LIMIT_BYTES} bytes")));
        }
        if let Some(position) = bytes.iter().position(|byte| *byte == 0) {
            return Err(self.refused(format!(
                "byte {position} is 0: this is a binary file, expected UTF-8 text or JSONL"
            )));
        }
        let mut line = String::from_utf8(bytes).map_err(|error| {
            let position = error.utf8_error().valid_up_to();
            self.refused(format!(
                "byte {position} is not UTF-8: expected UTF-8 text or JSONL"
            ))
        })?;
        line.truncate(line.trim_end_matches(['\n', '\r']).len());
        if self.line == 1 && line.starts_with(BYTE_ORDER_MARK) {
            line.remove(0);
        }
        Ok(Some(line))
    }

    fn next_paragraphs(&mut self) -> Result<Option<String>> {
        let mut document = String::new();
        while let Some(line) = self.next_line()? {
            if !line.trim().is_empty() {
                document.push_str(&line);
                document.push('\n');
            } else if !document.is_empty() {
                break;
            }
        }
        Ok((!document.is_empty()).then_some(document))
    }

    fn next_object(&mut self) -> Result<Option<String>> {
        loop {
            let Some(line) = self.next_line()? else {
                return Ok(None);
            };
            if line.trim().is_empty() {
                continue;
            }
            let value: Value = serde_json::from_str(&line).map_err(|error| {
                self.refused(format!(
                    "not valid JSON ({error}), expected an object with text or messages"
                ))
            })?;
            return self.text_of(&value).map(Some);
        }
    }

    fn text_of(&self, value: &Value) -> Result<String> {
        match (value.get("text"), value.get("messages")) {
            (Some(Value::String(text)), _) => Ok(text.clone()),
            (None, Some(messages)) => self
                .template
                .render(messages)
                .map_err(|reason| self.refused(reason)),
            (Some(other), _) => Err(self.refused(format!(
                "text is {}, expected a string",
                shortened(&other.to_string())
            ))),
            (None, None) => Err(self.refused(format!(
                "neither text nor messages in {}, expected one of them",
                shortened(&value.to_string())
            ))),
        }
    }
}

impl Iterator for Documents<'_> {
    type Item = Result<String>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let document = match self.format {
            Format::Text => self.next_paragraphs(),
            Format::Jsonl => self.next_object(),
        };
        self.ended = !matches!(document, Ok(Some(_)));
        document.transpose()
    }
}

fn format_of(path: &Path, reader: &mut dyn BufRead) -> Result<Format> {
    let name = path
        .file_name()
        .map(|name| name.to_string_lossy().to_lowercase())
        .unwrap_or_default();
    let stem = [".gz", ".xz", ".zst", ".zstd"]
        .iter()
        .find_map(|end| name.strip_suffix(end))
        .unwrap_or(&name);
    if stem.ends_with(".txt") || stem.ends_with(".md") {
        return Ok(Format::Text);
    }
    if stem.ends_with(".jsonl") || stem.ends_with(".json") || stem.ends_with(".ndjson") {
        return Ok(Format::Jsonl);
    }
    let start = reader.fill_buf().map_err(|source| Error::Io {
        path: path.to_owned(),
        source,
    })?;
    let first = start.iter().find(|byte| !byte.is_ascii_whitespace());
    Ok(if first == Some(&b'{') {
        Format::Jsonl
    } else {
        Format::Text
    })
}

fn shortened(text: &str) -> String {
    const SHOWN: usize = 60;
    if text.chars().count() <= SHOWN {
        return text.to_owned();
    }
    text.chars().take(SHOWN).chain("...".chars()).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_byte_order_mark_is_no_part_of_the_first_document() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("marked.jsonl");
        std::fs::write(&path, "\u{feff}{\"text\": \"one\"}\r\n{\"text\": \"two\"}\n").unwrap();
        let template = ChatTemplate::chat_ml();
        let documents = Documents::open(&path, &template).unwrap();
        let texts: Vec<String> = documents.map(Result::unwrap).collect();
        assert_eq!(texts, ["one", "two"]);
    }
}
