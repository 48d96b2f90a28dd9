//! The parent of a profile, beside the stacks that are timed.

use espalier_arch::{Architecture, Block};
use espalier_proto::task::Profile;
use espalier_search::{EngineMemory, Shortage, WholeParent};

use super::InVllm;
use super::contention::What;
use super::profile::{LEAST_ROUNDS, LONGER};
use crate::Result;
use crate::engine::{Engine, Opened, Series, Subject};

/// The parent, which is timed beside the stacks while there is room for both; of one that never has it, a model of one
/// block of each of its kinds stays long enough to show what the engine needs.
pub(super) struct Beside {
    open: Option<Opened>,
    /// Why it never was.
    shortage: Option<Shortage>,
    series: Series,
    memory_bytes: u64,
    /// What the engine needs beside weights, keys and values.
    pub memory: Option<EngineMemory>,
}

impl Beside {
    /// Opens it, if there is room.
    pub fn open(engine: &mut InVllm<'_>, task: &Profile) -> Result<Self> {
        let (architecture, workload) = (&task.architecture, &task.workload);
        let all = workload.concurrency;
        let whole = engine.open_where_it_fits(&Subject::Shape(architecture), workload, all)?;
        let shown = match whole {
            Ok(opened) => opened,
            Err(_) => engine.open(&Subject::Shape(&one_of_each(architecture)), workload, all)?,
        };
        let mut beside = Self {
            open: Some(shown),
            shortage: whole.err(),
            series: Series::new(workload),
            memory_bytes: engine.memory_bytes(shown),
            memory: engine.memory_of(shown),
        };
        if beside.shortage.is_some() {
            beside.leave(engine, 0)?;
        }
        Ok(beside)
    }

    pub fn had_room(&self) -> bool {
        self.shortage.is_none()
    }

    pub fn is_open(&self) -> bool {
        self.open.is_some()
    }

    /// Runs it once, where it is open.
    pub fn run(&mut self, engine: &mut InVllm<'_>) -> Result<()> {
        if let Some(open) = self.open {
            let sample = engine.run(open)?;
            if !sample.disturbed {
                self.series.push(sample);
            }
        }
        Ok(())
    }

    /// Whether it is open and its time not known yet.
    pub fn is_unknown(&self) -> bool {
        self.is_open() && self.series.runs() < LEAST_ROUNDS
    }

    /// Runs it alone as often as is missing of so many times, and closes it.
    pub fn leave(&mut self, engine: &mut InVllm<'_>, rounds: usize) -> Result<()> {
        let mut tries = rounds * LONGER;
        while self.series.runs() < rounds && tries > 0 {
            self.run(engine)?;
            tries -= 1;
        }
        if rounds > 0 && self.is_unknown() {
            return Err(engine.contention.too_noisy(What::Workload));
        }
        match self.open.take() {
            Some(open) => engine.release(open),
            None => Ok(()),
        }
    }

    /// What was measured of it, or why nothing was.
    pub fn told(self) -> WholeParent {
        match self.shortage {
            Some(shortage) => WholeParent::TooLarge(shortage),
            None => WholeParent::Measured(self.series.measurement(self.memory_bytes)),
        }
    }
}

/// The same with each shape of block once, in their order.
fn one_of_each(whole: &Architecture) -> Architecture {
    let mut blocks: Vec<Block> = Vec::new();
    for block in &whole.blocks {
        if blocks.iter().all(|known| known.shape != block.shape) {
            blocks.push(Block {
                layer: blocks.len(),
                shape: block.shape.clone(),
            });
        }
    }
    Architecture {
        layers: blocks.len(),
        blocks,
        ..whole.clone()
    }
}
