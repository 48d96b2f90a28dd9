//! Looking after a data directory while no coordinator runs on it: what is wrong, mending it, getting events
//! out. Nothing is ever thrown away: what a repair cuts or replaces lies in `repaired-<unix_ms>` first.

mod check;
mod export;
mod repair;

use std::path::{Path, PathBuf};

use serde::Serialize;

pub use check::{check, check_on};
pub use export::{Exported, export, export_from};
pub use repair::{repair, repair_on};

/// What was found, and what was done about it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    /// The data directory.
    pub data_dir: PathBuf,
    /// Whether a coordinator would start on it.
    pub starts: bool,
    /// The last frame such a start would know; 0 without any.
    pub last_frame: u64,
    /// Snapshots that are sound.
    pub snapshots: usize,
    /// Segments there are.
    pub segments: usize,
    /// Archives that are sound.
    pub archives: usize,
    /// What is wrong, the worst first.
    pub findings: Vec<Finding>,
    /// What was done, in order.
    pub mended: Vec<String>,
    /// Where copies of what was cut or replaced lie.
    pub copies: Option<PathBuf>,
}

/// Something that is not as it was written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The file or directory.
    pub path: PathBuf,
    /// One line: what is wrong, and what it leads to.
    pub problem: String,
    /// Whether it keeps a coordinator from starting.
    pub fatal: bool,
}

impl Report {
    fn of(data_dir: &Path) -> Self {
        Self {
            data_dir: data_dir.to_owned(),
            ..Self::default()
        }
    }

    fn find(&mut self, path: &Path, problem: impl Into<String>, fatal: bool) {
        self.findings.push(Finding {
            path: path.to_owned(),
            problem: problem.into(),
            fatal,
        });
    }
}
