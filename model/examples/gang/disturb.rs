//! A rank that ends or stands still in the middle of a training, and a gang that goes on from the last checkpoint.

use std::path::PathBuf;
use std::time::Instant;

use crate::Result;
use crate::launch::Running;
use crate::plan::Plan;

/// What the others noticed.
pub(crate) struct Disturbed {
    /// From the signal until every other rank had ended.
    pub(crate) seconds: f64,
    /// What each said.
    pub(crate) said: Vec<String>,
    /// The last checkpoint.
    pub(crate) record: PathBuf,
    pub(crate) at: Instant,
}

/// Trains by `plan`, which writes checkpoints, and sends `signal` to rank `victim` after step `after`.
pub(crate) fn disturb(plan: &Plan, victim: usize, signal: &str, after: u32) -> Result<Disturbed> {
    let mut running = Running::start(plan)?;
    let before = running.listen(|told| {
        let reached = told.losses.last().is_some_and(|(step, _)| *step >= after);
        !told.failures.is_empty() || (reached && !told.records.is_empty())
    })?;
    running.signal(victim, signal)?;
    let at = Instant::now();
    let told = running.listen(|told| told.failures.len() + 1 == plan.ranks())?;
    let seconds = at.elapsed().as_secs_f64();
    let records = told.records.last().or_else(|| before.records.last());
    let failures = before.failures.into_iter().chain(told.failures);
    Ok(Disturbed {
        seconds,
        said: failures.map(|(_, how)| how).collect(),
        record: records.cloned().ok_or("no checkpoint was written")?,
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
