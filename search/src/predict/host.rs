//! What the host needs for steps, where the table tells it apart from the device's time.
//!
//! The host schedules a step, launches its blocks and takes its tokens while the device computes; for what it cannot do
//! meanwhile the device waits. With n blocks a step takes
//!
//! > max(Σ device + alone, floor + n · block)
//!
//! by the clock. Both sides are sums over blocks and a base, so that limits stay linear (`cone`).
//!
//! A step that a prompt joins costs the host what the prompt's own step does, whose launches no recorded graph saves, and
//! what the sequences that decode in it add over a single one. Which steps those are is `model`'s to say.

use super::model::CostModel;
use super::rows::Load;
use super::sampled::Sampled;
use super::timed::{Joining, Timed};
use crate::{Error, Result, Subject};

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
        // The host works once for a step that a prompt joins, and looks after all the sequences in it.
        let mut floors = self.timed(floor, Joining::Replaces)?;
        floors.joined.add(&self.sequences_beside(&floor)?, 1.0);
        let block = self.timed(known(Subject::HostBlock), Joining::Replaces)?;
        // A prompt that joins finds the device busy.
        let alone = self.timed(known(Subject::HostAlone), Joining::IsHidden)?;
        Ok(Some(Host {
            floor: self.left_of(floors),
            block: self.left_of(block),
            alone: self.left_of(alone),
        }))
    }

    /// What the sequences that run add to the host's steps that a prompt joins: as much as to those in which they only decode,
    /// over a single one's. Nothing where the table does not tell a single one's.
    fn sequences_beside(&self, floor: &impl Fn(Load) -> Result<Option<Sampled>>) -> Result<Sampled> {
        if !self.batches_continuously() {
            return Ok(Sampled::default());
        }
        let alone = match self.decode_at(1, floor) {
            Ok(alone) => alone,
            Err(Error::MissingRow { .. } | Error::Extrapolation { .. }) => return Ok(Sampled::default()),
            Err(error) => return Err(error),
        };
        let mut added = self.decode_at(self.running(), floor)?;
        added.add(&alone, -1.0);
        added.value = added.value.max(0.0);
        Ok(added.times(self.joined_steps() / self.steps() * self.turnover_correction()))
    }
}
