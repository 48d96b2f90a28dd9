//! A rank that ends or stands still in the middle of a training, and a gang that goes on from the last checkpoint.

use std::path::PathBuf;
use std::time::Instant;

use crate::Result;
use crate::launch::Running;
use crate::plan::{Fall, Plan};

/// What the others noticed.
pub(crate) struct Disturbed {
    /// From the rank's last word until every other one had ended.
    pub(crate) seconds: f64,
    /// What each said.
    pub(crate) said: Vec<String>,
    /// The last checkpoint.
    pub(crate) record: PathBuf,
    pub(crate) at: Instant,
}

/// Trains by `plan`, which writes checkpoints and lets a rank fall after the first of them.
pub(crate) fn disturb(plan: &Plan, fall: Fall) -> Result<Disturbed> {
    let plan = Plan {
        fall: Some(fall),
        ..plan.clone()
    };
    let mut running = Running::start(&plan)?;
    let told = running.listen(|told| told.fell.is_some() && told.failures.len() + 1 == plan.ranks())?;
    let at = told
        .fell
        .ok_or_else(|| format!("no rank fell: {:?}", told.failures))?;
    Ok(Disturbed {
        seconds: at.elapsed().as_secs_f64(),
        said: told.failures.into_iter().map(|(_, how)| how).collect(),
        record: told.records.last().cloned().ok_or("no checkpoint was written")?,
        at,
    })
}

impl Disturbed {
    /// Whether every other rank knew whom it had lost.
    pub(crate) fn is_known(&self, victim: usize, ranks: usize) -> bool {
        self.said.len() + 1 == ranks
            && self
                .said
                .iter()
                .all(|said| said.contains(&format!("rank {victim}")))
    }
}
