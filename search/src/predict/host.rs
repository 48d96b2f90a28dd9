//! What the host needs for steps, where the table tells it apart from the device's time.
//!
//! The host schedules a step, launches its blocks and takes its tokens while the device computes; for what it cannot do
//! meanwhile the device waits. With n blocks a step takes
//!
//! > max(Σ device + alone, floor + n · block)
//!
//! by the clock. Both sides are sums over blocks and a base, so that limits stay linear (`cone`).

use super::model::CostModel;
use super::rows::Load;
use super::timed::{Joining, Timed};
use crate::{Result, Subject};

/// The host's time under a model's loads.
#[derive(Debug)]
pub(super) struct Host {
    /// Of steps without blocks.
    pub(super) floor: Timed,
    /// For each block.
    pub(super) block: Timed,
    /// What the device waits for.
    pub(super) alone: Timed,
}

impl Host {
    /// The host's side of a model of so many blocks.
    #[allow(clippy::cast_precision_loss)] // far below 2^53
    pub(super) fn of(&self, blocks: usize) -> Timed {
        let mut time = self.floor.clone();
        time.add(&self.block, blocks as f64);
        time
    }
}

impl CostModel {
    /// None where the table's rows are what the clock said.
    ///
    /// # Errors
    /// When a table that tells it does not tell it at one of the loads.
    pub(super) fn told_host(&self) -> Result<Option<Host>> {
        if !self.times.knows(&Subject::HostFloor) {
            return Ok(None);
        }
        let known = |subject: Subject| move |load: Load| self.times.subject(&subject, load);
        let floor = |load: Load| self.needed(&Subject::HostFloor, load);
        Ok(Some(Host {
            // The host works once for a step that a prompt joins, whatever else the step computes.
            floor: self.timed(floor, Joining::Replaces)?,
            block: self.timed(known(Subject::HostBlock), Joining::Replaces)?,
            // A prompt that joins finds the device busy.
            alone: self.timed(known(Subject::HostAlone), Joining::IsHidden)?,
        }))
    }
}
