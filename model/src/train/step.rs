//! What one step is made with, and what came of it.

use std::sync::Arc;

use crate::collective::Communicator;
use crate::ops::{AdamWStep, Pending};
use crate::{Error, Result};

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
    pub(super) pending: Box<dyn Pending>,
    pub(super) predictions: usize,
    /// Every rank that had a share in it.
    pub(super) ranks: Option<Arc<dyn Communicator>>,
}

impl Step {
    /// Whether [`Step::read`] would not wait.
    pub fn is_ready(&self) -> bool {
        self.pending.is_ready()
    }

    /// Waits for the device.
    ///
    /// # Errors
    /// When loss or gradient were not finite: then the student is as it was before the step. When a rank was lost
    /// meanwhile: then the student may be anything.
    pub fn read(self) -> Result<StepReport> {
        let updated = self.pending.read()?;
        self.ranks.map_or(Ok(()), |ranks| ranks.check())?;
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

impl Hyperparameters {
    #[allow(clippy::cast_possible_truncation)] // hyperparameters need no more than f32
    pub(super) fn at(&self, step: u32) -> AdamWStep {
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
