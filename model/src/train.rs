//! Trains a student: distillation from its parent, or plain next-token prediction.
//!
//! The backward is explicit. Every block's input is kept; of the activations inside blocks only as much as
//! the activation budget allows, from the last block down, and the other blocks are run once more when
//! their turn comes. Both ways give the same bits. Data, batches and when to save are the caller's affair.
//!
//! A step asks the device for nothing until [`Step::read`]: losses stay where they are made, and the update
//! decides by itself whether it may be applied.

use std::path::Path;
use std::sync::Arc;

use espalier_arch::Architecture;
use serde_json::json;

use crate::block::{self, Context, RopeTables, Saved};
use crate::ops::{
    AdamWParameter, AdamWStep, Head, HeadGradient, Layout, Losses, Operations, Pending, RopeTable, TokenBatch,
};
use crate::runner::{block_parts, check_layout, next_token_targets};
use crate::weights::file::{TensorFile, save_tensors};
use crate::{Error, Model, Result, Tensor};

mod schedule;

pub use schedule::Schedule;

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
            Objective::Distil { .. } => self.layout.rows(),
            Objective::NextToken => self.layout.sequences * self.layout.tokens.saturating_sub(1),
        }
    }
}

/// AdamW and clipping, for one step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Hyperparameters {
    /// Learning rate of this step.
    pub learning_rate: f64,
    /// Decays of the first and second moment.
    pub betas: (f64, f64),
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Decoupled decay of every parameter.
    pub weight_decay: f64,
    /// The global gradient norm is clipped to this.
    pub clip: f64,
}

impl Default for Hyperparameters {
    fn default() -> Self {
        Self {
            learning_rate: 4e-4,
            betas: (0.9, 0.95),
            epsilon: 1e-8,
            weight_decay: 0.0,
            clip: 1.0,
        }
    }
}

/// What a step did.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepReport {
    /// Mean loss before the update, nats a prediction.
    pub loss: f64,
    /// Norm of the mean loss's gradient over all parameters, before clipping.
    pub gradient_norm: f64,
}

/// A step on its way.
#[derive(Debug)]
#[must_use = "whether the step was applied is not known before it is read"]
pub struct Step {
    pending: Box<dyn Pending>,
    predictions: usize,
}

impl Step {
    /// Whether [`Step::read`] would not wait.
    pub fn is_ready(&self) -> bool {
        self.pending.is_ready()
    }

    /// Waits for the device.
    ///
    /// # Errors
    /// When loss or gradient were not finite: then the student is as it was before the step.
    pub fn read(self) -> Result<StepReport> {
        let updated = self.pending.read()?;
        if !updated.is_applied() {
            let what = if updated.loss.is_finite() {
                "the gradient's norm"
            } else {
                "the loss"
            };
            return Err(Error::NotFinite {
                what: what.to_owned(),
            });
        }
        Ok(StepReport {
            loss: updated.loss / self.predictions as f64,
            gradient_norm: updated.gradient_norm,
        })
    }
}

/// A student with its gradients and AdamW moments.
#[derive(Debug)]
pub struct Trainer {
    operations: Arc<dyn Operations>,
    /// The weights in f32.
    model: Model,
    /// What the blocks read, where the backend computes in a type of less precision.
    working: Option<Model>,
    gradients: Model,
    first_moments: Model,
    second_moments: Model,
    steps: u32,
    /// Of every batch since the last update.
    losses: Vec<Tensor>,
    activation_bytes: usize,
    rope: RopeTables,
}

impl Trainer {
    /// A trainer of a copy of `student`. Activations inside blocks are kept up to `activation_bytes` in all;
    /// 0 keeps none, `usize::MAX` all.
    ///
    /// # Errors
    /// When the backend runs out of memory.
    pub fn new(operations: Arc<dyn Operations>, student: &Model, activation_bytes: usize) -> Result<Self> {
        let model = student.to_owned_weights(operations.as_ref())?;
        let zeros = || model.zeros_like(operations.as_ref());
        let moments = (zeros()?, zeros()?);
        Self::from_parts(operations, model, moments, 0, activation_bytes)
    }

    fn from_parts(
        operations: Arc<dyn Operations>,
        model: Model,
        (first_moments, second_moments): (Model, Model),
        steps: u32,
        activation_bytes: usize,
    ) -> Result<Self> {
        operations.prepare(&model.architecture)?;
        Ok(Self {
            working: model.working_copy(operations.as_ref())?,
            gradients: model.zeros_like(operations.as_ref())?,
            operations,
            model,
            first_moments,
            second_moments,
            steps,
            losses: Vec::new(),
            activation_bytes,
            rope: RopeTables::default(),
        })
    }

    /// The student as the blocks see it. A clone shares its weights, and must be dropped before the next step.
    pub fn model(&self) -> &Model {
        self.working.as_ref().unwrap_or(&self.model)
    }

    /// The student, done with training, as the blocks see it.
    pub fn into_model(self) -> Model {
        self.working.unwrap_or(self.model)
    }

    /// Gradients accumulated since the last update, in the student's own shape.
    pub fn gradients(&self) -> &Model {
        &self.gradients
    }

    /// Updates so far.
    pub fn steps(&self) -> u32 {
        self.steps
    }

    /// One step over `batches` together: the gradient of their mean loss, clipped, then AdamW. Waits for the
    /// device; when it fails the student is as it was before.
    ///
    /// # Errors
    /// When there is nothing to predict, shapes disagree, or loss or gradient are not finite.
    pub fn step(
        &mut self,
        batches: &[MicroBatch<'_>],
        hyperparameters: &Hyperparameters,
    ) -> Result<StepReport> {
        let predictions: usize = batches.iter().map(MicroBatch::predictions).sum();
        for batch in batches {
            self.accumulate(batch, predictions)?;
        }
        let before = self.steps;
        let report = self.update(hyperparameters, predictions)?.read();
        if report.is_err() {
            self.steps = before;
        }
        report
    }

    /// Adds the gradient of `batch`'s summed loss, divided by the whole step's `predictions`. On an error the
    /// gradients accumulated so far are dropped.
    ///
    /// # Errors
    /// When there is nothing to predict or shapes disagree.
    pub fn accumulate(&mut self, batch: &MicroBatch<'_>, predictions: usize) -> Result<()> {
        let accumulated = self.forward_backward(batch, predictions);
        match accumulated {
            Ok(losses) => self.losses.push(losses),
            Err(error) => {
                self.losses.clear();
                self.gradients = self.model.zeros_like(self.operations.as_ref())?;
                return Err(error);
            }
        }
        Ok(())
    }

    /// Summed loss of the batches accumulated since the last update, nats. Waits for the device.
    ///
    /// # Errors
    /// When the device fails.
    pub fn summed_loss(&self) -> Result<f64> {
        let mut sum = 0.0;
        for losses in &self.losses {
            let losses = self.operations.download(losses)?;
            sum += losses.into_iter().map(f64::from).sum::<f64>();
        }
        Ok(sum)
    }

    fn forward_backward(&mut self, batch: &MicroBatch<'_>, predictions: usize) -> Result<Tensor> {
        check_layout(batch.tokens, batch.layout)?;
        if batch.predictions() == 0 || predictions == 0 {
            return Err(Error::OutOfRange {
                what: "tokens to predict",
                value: 0,
                expected: "at least one in every batch".to_owned(),
            });
        }
        let operations = Arc::clone(&self.operations);
        let targets = match batch.objective {
            Objective::Distil { .. } => None,
            Objective::NextToken => Some(next_token_targets(batch.tokens, batch.layout)),
        };
        let tokens = operations.tokens(batch.tokens, targets.as_deref())?;
        let (inputs, mut saved, hidden) = self.forward(&tokens, batch.layout)?;
        let (losses, mut grad) = self.loss(batch, &tokens, &hidden, predictions)?;
        drop(hidden);
        for (index, input) in inputs.into_iter().enumerate().rev() {
            let model = self.working.as_ref().unwrap_or(&self.model);
            let (shape, weights) = block_parts(model, index)?;
            let table = self.rope.get(operations.as_ref(), shape, batch.layout.tokens)?;
            let context = self.context(&*operations, batch.layout, table.as_deref());
            let kept = match saved.pop().flatten() {
                Some(kept) => kept,
                None => block::forward_saving(context, shape, weights, &input)?.1,
            };
            if let Some(gradients) = self.gradients.blocks.get_mut(index) {
                grad = block::backward(context, shape, weights, &input, kept, grad, gradients)?;
            }
        }
        operations.embedding_backward(&grad, &tokens, &mut self.gradients.embedding)?;
        Ok(losses)
    }

    /// Each block's input, what of its inside is kept, and the last block's output.
    fn forward(
        &self,
        tokens: &TokenBatch,
        layout: Layout,
    ) -> Result<(Vec<Tensor>, Vec<Option<Saved>>, Tensor)> {
        let (operations, model) = (self.operations.as_ref(), self.model());
        let first_kept = self.first_kept_block(layout);
        let blocks = model.blocks.len();
        let (mut inputs, mut saved) = (Vec::with_capacity(blocks), Vec::with_capacity(blocks));
        let mut hidden = operations.embedding(&model.embedding, tokens)?;
        for index in 0..blocks {
            let (shape, weights) = block_parts(model, index)?;
            let table = self.rope.get(operations, shape, layout.tokens)?;
            let context = self.context(operations, layout, table.as_deref());
            let (output, kept) = block::forward_saving(context, shape, weights, &hidden)?;
            inputs.push(hidden);
            saved.push((index >= first_kept).then_some(kept));
            hidden = output;
        }
        Ok((inputs, saved, hidden))
    }

    /// The last blocks are kept, because theirs are the activations that go first: when an earlier block is
    /// run again, they are gone.
    fn first_kept_block(&self, layout: Layout) -> usize {
        let architecture = &self.model.architecture;
        let mut left = self.activation_bytes;
        for (index, block) in architecture.blocks.iter().enumerate().rev() {
            let entry = self.operations.activation_bytes();
            let bytes = block::saved_bytes(&block.shape, architecture.hidden, layout.rows(), entry);
            match left.checked_sub(bytes) {
                Some(rest) => left = rest,
                None => return index + 1,
            }
        }
        0
    }

    /// The losses, a row each, and the gradient of the last block's output.
    fn loss(
        &mut self,
        batch: &MicroBatch<'_>,
        tokens: &TokenBatch,
        hidden: &Tensor,
        predictions: usize,
    ) -> Result<(Tensor, Tensor)> {
        let operations = self.operations.as_ref();
        let model = self.working.as_ref().unwrap_or(&self.model);
        let epsilon = model.architecture.norm_epsilon;
        let (normed, reciprocal) = operations.rms_norm(hidden, &model.final_norm, epsilon)?;
        let head = Head {
            hidden: &normed,
            weight: model.head(),
        };
        let tied = &mut self.gradients.embedding;
        #[allow(clippy::cast_possible_truncation)] // a factor needs no more than f32
        let gradient = HeadGradient {
            weight: self.gradients.head.as_mut().unwrap_or(tied),
            scale: (1.0 / predictions as f64) as f32,
        };
        let Losses {
            rows,
            hidden_gradient,
        } = match batch.objective {
            Objective::Distil { hidden, head: weight } => {
                operations.distillation(head, Head { hidden, weight }, Some(gradient))?
            }
            Objective::NextToken => operations.cross_entropy(head, tokens, Some(gradient))?,
        };
        let grad_normed = hidden_gradient.ok_or_else(|| Error::Shape {
            operation: "loss",
            expected: "the gradient that was asked for".to_owned(),
            found: "none".to_owned(),
        })?;
        let grad_norm = &mut self.gradients.final_norm;
        let weight = &model.final_norm;
        let grad =
            operations.rms_norm_backward(&grad_normed, hidden, weight, &reciprocal, None, grad_norm)?;
        Ok((rows, grad))
    }

    /// One AdamW update with the gradients accumulated for a step of so many `predictions`. Does not wait for
    /// the device: what came of it is in the [`Step`]. Where loss or gradient are not finite nothing is
    /// updated. The gradients are left at zero either way.
    ///
    /// # Errors
    /// When a clone of the student still shares its weights.
    pub fn update(&mut self, hyperparameters: &Hyperparameters, predictions: usize) -> Result<Step> {
        let step = self.steps.saturating_add(1);
        let gradients = self.gradients.tensors_mut();
        let moments = self
            .first_moments
            .tensors_mut()
            .into_iter()
            .zip(self.second_moments.tensors_mut());
        let mut working = self.working.as_mut().map(Model::tensors_mut).unwrap_or_default();
        working.reverse();
        let values = self.model.tensors_mut().into_iter().zip(gradients);
        let mut parameters = Vec::new();
        for ((value, gradient), (first_moment, second_moment)) in values.zip(moments) {
            // Vectors have no copy: the blocks read the value itself.
            let working = working.pop().filter(|copy| !copy.shares_storage_with(value));
            parameters.push(AdamWParameter {
                value,
                gradient,
                first_moment,
                second_moment,
                working,
            });
        }
        let pending = self
            .operations
            .update(&mut parameters, hyperparameters.at(step), &self.losses)?;
        self.losses.clear();
        self.steps = step;
        Ok(Step { pending, predictions })
    }

    /// Writes weights, moments and the count of steps, exact to the bit, whole or not at all.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn save(&self, path: &Path) -> Result<()> {
        let parts = [
            ("weight/", &self.model),
            ("first_moment/", &self.first_moments),
            ("second_moment/", &self.second_moments),
        ];
        let mut tensors = Vec::new();
        for (prefix, model) in parts {
            let named = model.named_tensors().into_iter();
            tensors.extend(named.map(|(spec, tensor)| (format!("{prefix}{}", spec.name), tensor)));
        }
        let metadata = json!({ "architecture": self.model.architecture, "steps": self.steps });
        save_tensors(path, &tensors, &metadata, self.operations.as_ref())
    }

    /// Goes on from what [`Trainer::save`] wrote: the next step is what it would have been.
    ///
    /// # Errors
    /// When the file cannot be read or is cut.
    pub fn load(operations: Arc<dyn Operations>, path: &Path, activation_bytes: usize) -> Result<Self> {
        let file = TensorFile::open(path)?;
        let architecture: Architecture = file.field("architecture")?;
        let part = |prefix| file.model(prefix, &architecture, operations.as_ref());
        let (model, moments) = (
            part("weight/")?,
            (part("first_moment/")?, part("second_moment/")?),
        );
        Self::from_parts(operations, model, moments, file.field("steps")?, activation_bytes)
    }

    fn context<'a>(
        &self,
        operations: &'a dyn Operations,
        layout: Layout,
        rope: Option<&'a RopeTable>,
    ) -> Context<'a> {
        Context {
            operations,
            layout,
            epsilon: self.model.architecture.norm_epsilon,
            rope,
        }
    }
}

impl Hyperparameters {
    #[allow(clippy::cast_possible_truncation)] // hyperparameters need no more than f32
    fn at(&self, step: u32) -> AdamWStep {
        AdamWStep {
            learning_rate: self.learning_rate as f32,
            beta1: self.betas.0 as f32,
            beta2: self.betas.1 as f32,
            epsilon: self.epsilon as f32,
            weight_decay: self.weight_decay as f32,
            step,
            clip: self.clip,
        }
    }
}
