//! Trains a student: distillation from its parent, or plain next-token prediction, on one rank or on many.
//!
//! The backward is explicit (`stage`). Data, batches and when to save are the caller's affair. On several ranks
//! the student may be cut into stages (`pipeline`), and each stage held by several that see other data and share
//! out its optimiser (`sharded`).
//!
//! A step asks the device for nothing until [`Step::read`]: losses stay where they are made, and the update
//! decides by itself whether it may be applied.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::collective::Communicator;
use crate::ops::{Layout, Operations};
use crate::weights::StageWeights;
use crate::{Error, Model, Result, Tensor};

mod grid;
mod optimiser;
mod order;
mod parts;
mod pipeline;
mod saved;
mod schedule;
mod sharded;
mod shards;
pub mod split;
mod stage;
mod step;

pub use grid::{Grid, Layers};
pub use parts::Parts;
pub use saved::{Checkpoint, SavedFile, Writing};
pub use schedule::Schedule;
pub use step::{Hyperparameters, Step, StepReport};

use optimiser::{Optimiser, Whole};
use pipeline::Line;
use sharded::Sharded;
use stage::{Stage, Taught};

/// What the student is taught on a batch.
#[derive(Debug, Clone, Copy)]
pub enum Objective<'a> {
    /// Forward KL at temperature 1 from the parent at every position.
    Distil {
        /// The parent's final-normed hidden states, `(tokens, parent hidden)`.
        hidden: &'a Tensor,
        /// The parent's head, `(vocabulary, parent hidden)`.
        head: &'a Tensor,
    },
    /// The same from the parent that the trainer holds, whose forward is run first.
    FromParent,
    /// Cross-entropy of the next token within each sequence.
    NextToken,
}

/// A part of a step that fits in memory.
#[derive(Debug, Clone, Copy)]
pub struct MicroBatch<'a> {
    /// Sequence after sequence.
    pub tokens: &'a [u32],
    /// How they are divided.
    pub layout: Layout,
    /// What is taught.
    pub objective: Objective<'a>,
}

impl MicroBatch<'_> {
    /// Positions that have a loss.
    pub fn predictions(&self) -> usize {
        match self.objective {
            Objective::Distil { .. } | Objective::FromParent => self.layout.rows(),
            Objective::NextToken => self.layout.sequences * self.layout.tokens.saturating_sub(1),
        }
    }
}

/// A student, or a stage of one, with its gradients and AdamW moments.
#[derive(Debug)]
pub struct Trainer {
    stage: Stage,
    optimiser: Optimiser,
    grid: Option<Grid>,
    parent: Option<Taught>,
    steps: u32,
    /// Of every batch since the last update.
    losses: Vec<Tensor>,
    /// Whether this rank's gradients of the step are complete, and perhaps under way.
    complete: bool,
    activation_bytes: usize,
}

impl Trainer {
    /// A trainer of a copy of `student` on one rank. Activations inside blocks are kept up to `activation_bytes`
    /// in all; 0 keeps none, `usize::MAX` all.
    ///
    /// # Errors
    /// When the backend runs out of memory.
    pub fn new(operations: Arc<dyn Operations>, student: &Model, activation_bytes: usize) -> Result<Self> {
        let student = StageWeights::whole(student)?;
        Self::begin(operations, &student, None, activation_bytes)
    }

    /// This rank's share in training a copy of a student of which `student` is the rank's stage, the same on all
    /// replicas. Every rank of the grid must join. Activations inside blocks are kept up to `activation_bytes`
    /// on this rank.
    ///
    /// # Errors
    /// When the stage is not the one that the grid has here, the backend runs out of memory, or a rank was lost.
    /// Other ranks are then told to stop.
    pub fn join(
        operations: Arc<dyn Operations>,
        student: &StageWeights,
        grid: Grid,
        activation_bytes: usize,
    ) -> Result<Self> {
        Self::begin(operations, student, Some(grid), activation_bytes)
    }

    fn begin(
        operations: Arc<dyn Operations>,
        student: &StageWeights,
        grid: Option<Grid>,
        activation_bytes: usize,
    ) -> Result<Self> {
        grid::or_end_all(grid, |grid| {
            Self::begun(operations, student, grid, activation_bytes)
        })
    }

    fn begun(
        operations: Arc<dyn Operations>,
        student: &StageWeights,
        grid: Option<Grid>,
        activation_bytes: usize,
    ) -> Result<Self> {
        if let Some(grid) = &grid {
            grid.expect_stage(&student.range(), student.architecture())?;
        }
        let (optimiser, stage) = match grid.as_ref().and_then(Grid::shared) {
            None => {
                let masters = student.to_owned_weights(operations.as_ref())?;
                let zeros = || masters.zeros_like(operations.as_ref());
                let moments = [zeros()?, zeros()?];
                whole(operations, masters, moments)?
            }
            Some((grid, replicas)) => {
                let mut fresh = |bucket: &shards::Bucket| {
                    sharded::fresh_state(operations.as_ref(), bucket, student, replicas.as_ref())
                };
                shared(&operations, student, grid, Arc::clone(&replicas), &mut fresh)?
            }
        };
        Self::from_parts(stage, optimiser, grid, 0, activation_bytes)
    }

    fn from_parts(
        stage: Stage,
        optimiser: Optimiser,
        grid: Option<Grid>,
        steps: u32,
        activation_bytes: usize,
    ) -> Result<Self> {
        stage.operations.prepare(stage.weights.architecture())?;
        Ok(Self {
            stage,
            optimiser,
            grid,
            parent: None,
            steps,
            losses: Vec::new(),
            complete: false,
            activation_bytes,
        })
    }

    /// The same with a parent to distil from, whose forward is run for every batch of
    /// [`Objective::FromParent`]. On several stages it is cut into as many, wherever that suits it.
    ///
    /// # Errors
    /// When the stage is not the one that the grid has here, or its vocabulary is not the student's.
    pub fn with_parent(self, parent: StageWeights) -> Result<Self> {
        self.expect_parent(&parent).inspect_err(|_| self.end_others())?;
        Ok(Self {
            parent: Some(Taught::new(parent)),
            ..self
        })
    }

    fn expect_parent(&self, parent: &StageWeights) -> Result<()> {
        if let Some(grid) = &self.grid {
            grid.expect_stage(&parent.range(), parent.architecture())?;
        }
        let (given, own) = (parent.architecture(), self.stage.weights.architecture());
        if given.vocab_size != own.vocab_size {
            return Err(Error::OutOfRange {
                what: "the parent's vocabulary",
                value: given.vocab_size,
                expected: format!("{}, the student's", own.vocab_size),
            });
        }
        self.stage.operations.prepare(given)
    }

    /// The student's weights as the blocks see them: the stage of it that is here. A clone shares them, and must be
    /// dropped before the next step.
    pub fn weights(&self) -> &StageWeights {
        &self.stage.weights
    }

    /// The student as the blocks see it. It shares its weights, and must be dropped before the next step.
    ///
    /// # Errors
    /// When only a stage of it is here.
    pub fn model(&self) -> Result<Model> {
        self.stage.weights.clone().into_model()
    }

    /// The student, done with training, as the blocks see it.
    ///
    /// # Errors
    /// When only a stage of it is here.
    pub fn into_model(self) -> Result<Model> {
        self.stage.weights.into_model()
    }

    /// Gradients accumulated on this rank since the last update, in the shape of the weights.
    pub fn gradients(&self) -> &StageWeights {
        &self.stage.gradients
    }

    /// Updates so far. One that the device refused counts, too, but for [`Trainer::step`]'s: that is known only when
    /// its [`Step`] is read, which ranks may do at different times, and AdamW must count alike on all of them.
    pub fn steps(&self) -> u32 {
        self.steps
    }

    /// One step over `batches` together: the gradient of their mean loss, clipped, then AdamW. Waits for the
    /// device; when it fails the student is as it was before. On one rank, or stages without replicas, which all
    /// have the same batches.
    ///
    /// # Errors
    /// When there is nothing to predict, shapes disagree, or loss or gradient are not finite; also where there are
    /// replicas, whose predictions count, too.
    pub fn step(
        &mut self,
        batches: &[MicroBatch<'_>],
        hyperparameters: &Hyperparameters,
    ) -> Result<StepReport> {
        if let Some((grid, _)) = self.grid.as_ref().and_then(Grid::shared) {
            return Err(Error::OutOfRange {
                what: "replicas of a step that counts its own predictions",
                value: grid.layers().replicas,
                expected: "1; else Trainer::accumulate_all, with those of all replicas".to_owned(),
            });
        }
        let predictions: usize = batches.iter().map(MicroBatch::predictions).sum();
        self.accumulate_all(batches, predictions)?;
        let before = self.steps;
        let report = self.update(hyperparameters, predictions)?.read();
        if report.is_err() {
            self.steps = before;
        }
        report
    }

    /// Adds the gradient of `batch`'s summed loss, divided by the whole step's `predictions`, those of all ranks.
    /// On an error the gradients accumulated so far are dropped, and other ranks are told to stop.
    ///
    /// # Errors
    /// When there is nothing to predict, shapes disagree, or a rank was lost.
    pub fn accumulate(&mut self, batch: &MicroBatch<'_>, predictions: usize) -> Result<()> {
        self.run(std::slice::from_ref(batch), predictions, false)
    }

    /// As [`Trainer::accumulate`] with all batches of this rank's step that are left, so that stages work on
    /// several at a time, and what other ranks need of the gradients is under way before the last is written.
    /// Stages of one replica must be given the same batches; replicas need not have as many.
    ///
    /// # Errors
    /// As [`Trainer::accumulate`].
    pub fn accumulate_all(&mut self, batches: &[MicroBatch<'_>], predictions: usize) -> Result<()> {
        self.run(batches, predictions, true)
    }

    fn run(&mut self, batches: &[MicroBatch<'_>], predictions: usize, ends_step: bool) -> Result<()> {
        let accumulated = self.expect_open(batches.len()).and_then(|()| {
            self.complete = ends_step;
            let operations = Arc::clone(&self.stage.operations);
            let (mut line, optimiser) = self.line();
            line.run(batches, predictions, &mut |what, gradients| match ends_step {
                true => optimiser.written(operations.as_ref(), what, gradients),
                false => Ok(()),
            })
        });
        let losses = accumulated.inspect_err(|_| self.drop_step())?;
        self.losses.extend(losses);
        Ok(())
    }

    /// An error if gradients of the step are under way to other ranks.
    fn expect_open(&self, batches: usize) -> Result<()> {
        if !self.complete || self.grid.is_none() {
            return Ok(());
        }
        Err(Error::OutOfRange {
            what: "batches after the last of a step",
            value: batches,
            expected: "an update first: the gradients are under way to other ranks".to_owned(),
        })
    }

    /// Other ranks wait for what this one will not send.
    fn end_others(&self) {
        if let Some(grid) = &self.grid {
            grid.all.abort();
        }
    }

    /// After an error, which is what the caller is told: forgets what there is of the step.
    fn drop_step(&mut self) {
        self.end_others();
        self.losses.clear();
        self.complete = false;
        self.optimiser.forget();
        let operations = self.stage.operations.as_ref();
        let gradients = &mut self.stage.gradients;
        if operations.clear(&mut gradients.tensors_mut()).is_ok() {
            return;
        }
        // Somebody holds a clone of them, or the device is lost.
        match gradients.zeros_like(operations) {
            Ok(zeros) => *gradients = zeros,
            Err(error) => tracing::error!(%error, "gradients of a step that failed cannot be dropped"),
        }
    }

    /// Summed loss of this rank's batches accumulated since the last update, nats; 0 but on the last stage. Waits
    /// for the device.
    ///
    /// # Errors
    /// When the device fails.
    pub fn summed_loss(&self) -> Result<f64> {
        self.sum(&self.losses)
    }

    /// Summed loss of `batches`, nats, without a gradient; 0 but on the last stage. Stages of one replica must be
    /// given the same batches. Waits for the device.
    ///
    /// # Errors
    /// When there is nothing to predict, shapes disagree, or a rank was lost.
    pub fn losses(&mut self, batches: &[MicroBatch<'_>]) -> Result<f64> {
        let (mut line, _) = self.line();
        let rows = line.losses(batches).inspect_err(|_| self.end_others())?;
        self.sum(&rows)
    }

    fn line(&mut self) -> (Line<'_>, &mut Optimiser) {
        let line = Line {
            stage: &mut self.stage,
            parent: self.parent.as_ref(),
            stages: self.grid.as_ref().and_then(|grid| grid.stages.as_deref()),
            activation_bytes: self.activation_bytes,
            sent: VecDeque::new(),
        };
        (line, &mut self.optimiser)
    }

    fn sum(&self, losses: &[Tensor]) -> Result<f64> {
        let mut sum = 0.0;
        for rows in losses {
            let rows = self.stage.operations.download(rows)?;
            sum += rows.into_iter().map(f64::from).sum::<f64>();
        }
        Ok(sum)
    }

    /// One AdamW update with the gradients accumulated, on all ranks, for a step of so many `predictions`. Does not
    /// wait for the device: what came of it is in the [`Step`], the same on every rank. Where loss or gradient are
    /// not finite nothing is updated. The gradients are left at zero whatever comes of it, an error included.
    ///
    /// # Errors
    /// When there were no predictions, a clone of the student still shares its weights, or a rank was lost.
    pub fn update(&mut self, hyperparameters: &Hyperparameters, predictions: usize) -> Result<Step> {
        let step = self.steps.saturating_add(1);
        let updated = expect_predictions(predictions).and_then(|()| {
            let (optimiser, grid) = (&mut self.optimiser, self.grid.as_ref());
            optimiser.update(&mut self.stage, grid, hyperparameters.at(step), &self.losses)
        });
        let pending = updated.inspect_err(|_| self.drop_step())?;
        self.losses.clear();
        self.complete = false;
        self.steps = step;
        Ok(Step {
            pending,
            predictions,
            ranks: self.grid.as_ref().map(|grid| Arc::clone(&grid.all)),
        })
    }
}

/// An error for a step that predicts nothing.
fn expect_predictions(predictions: usize) -> Result<()> {
    if predictions > 0 {
        return Ok(());
    }
    Err(Error::OutOfRange {
        what: "tokens to predict",
        value: 0,
        expected: "at least one in every step".to_owned(),
    })
}

/// The optimiser of one rank that has a stage to itself.
fn whole(
    operations: Arc<dyn Operations>,
    masters: StageWeights,
    moments: [StageWeights; 2],
) -> Result<(Optimiser, Stage)> {
    let gradients = masters.zeros_like(operations.as_ref())?;
    let (whole, weights) = Whole::new(operations.as_ref(), masters, moments)?;
    let stage = Stage::new(operations, weights, gradients);
    Ok((Optimiser::Whole(whole), stage))
}

/// A share in the optimiser of a stage shaped as `shape`; `state` gives this rank's part of a bucket.
fn shared(
    operations: &Arc<dyn Operations>,
    shape: &StageWeights,
    grid: &Grid,
    replicas: Arc<dyn Communicator>,
    state: &mut dyn FnMut(&shards::Bucket) -> Result<[Tensor; 3]>,
) -> Result<(Optimiser, Stage)> {
    let gradients = shape.zeros_like(operations.as_ref())?;
    let sharded = Sharded::new(operations.as_ref(), shape, grid, replicas, state)?;
    let mut stage = Stage::new(Arc::clone(operations), shape.clone(), gradients);
    sharded.spread(&mut stage)?;
    Ok((Optimiser::Sharded(sharded), stage))
}
