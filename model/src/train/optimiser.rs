//! Masters, moments and the update of a stage's weights: all on one rank, or shared out between those that hold
//! the same stage (`sharded`).

use std::ops::Range;

use espalier_arch::Role;

use super::grid::Grid;
use super::sharded::Sharded;
use super::stage::{Stage, Written};
use crate::ops::{AdamWParameter, AdamWStep, Operations, Pending};
use crate::weights::StageWeights;
use crate::{Error, Result, Tensor};

/// How a stage's weights are updated.
#[derive(Debug)]
#[allow(clippy::large_enum_variant)] // one a trainer
pub(super) enum Optimiser {
    Whole(Whole),
    Sharded(Sharded),
}

/// A stretch of one tensor that this rank keeps: value, first and second moment, f32 without gaps.
#[derive(Debug)]
pub(super) struct Kept {
    /// Which of the stage's tensors.
    pub(super) tensor: usize,
    /// Elements of it.
    pub(super) range: Range<usize>,
    pub(super) state: [Tensor; 3],
}

/// Everything of every tensor.
#[derive(Debug)]
pub(super) struct Whole {
    /// The weights in f32, where blocks read them in a type of less precision.
    masters: Option<StageWeights>,
    first_moments: StageWeights,
    second_moments: StageWeights,
}

impl Optimiser {
    /// Told of every piece of the last backward of a step whose gradients are final.
    pub(super) fn written(
        &mut self,
        operations: &dyn Operations,
        what: Written,
        gradients: &mut StageWeights,
    ) -> Result<()> {
        match self {
            Self::Whole(_) => Ok(()),
            Self::Sharded(sharded) => sharded.written(operations, what, gradients),
        }
    }

    /// One step with the gradients there are, which are left at zero.
    pub(super) fn update(
        &mut self,
        stage: &mut Stage,
        grid: Option<&Grid>,
        step: AdamWStep,
        losses: &[Tensor],
    ) -> Result<Box<dyn Pending>> {
        match self {
            Self::Whole(whole) => whole.update(stage, grid, step, losses),
            Self::Sharded(sharded) => sharded.update(stage, grid, step, losses),
        }
    }

    /// Drops the gradients of a step that are under way.
    pub(super) fn forget(&mut self) {
        match self {
            Self::Whole(_) => {}
            Self::Sharded(sharded) => sharded.forget(),
        }
    }

    /// What this rank keeps; views, nothing is copied.
    pub(super) fn kept(&self, stage: &Stage) -> Result<Vec<Kept>> {
        match self {
            Self::Whole(whole) => whole.kept(stage),
            Self::Sharded(sharded) => sharded.kept(),
        }
    }
}

/// Every rank's measures, a row each.
pub(super) fn gathered(measured: Tensor, grid: Option<&Grid>) -> Result<Tensor> {
    match grid {
        Some(grid) if grid.all.size() > 1 => grid.all.all_gather(measured)?.wait(),
        _ => Ok(measured),
    }
}

/// Whether a tensor of this stage is also held, and counted, by the first.
pub(super) fn is_counted_elsewhere(weights: &StageWeights, role: Role) -> bool {
    role == Role::Embedding && !weights.is_first()
}

impl Whole {
    /// Of f32 weights and their moments, and what blocks read of the weights.
    pub(super) fn new(
        operations: &dyn Operations,
        masters: StageWeights,
        [first_moments, second_moments]: [StageWeights; 2],
    ) -> Result<(Self, StageWeights)> {
        let (masters, weights) = match masters.working_copy(operations)? {
            None => (None, masters),
            Some(working) => (Some(masters), working),
        };
        let whole = Self {
            masters,
            first_moments,
            second_moments,
        };
        Ok((whole, weights))
    }

    fn update(
        &mut self,
        stage: &mut Stage,
        grid: Option<&Grid>,
        step: AdamWStep,
        losses: &[Tensor],
    ) -> Result<Box<dyn Pending>> {
        if let Some(ends) = grid.and_then(|grid| grid.ends.as_ref())
            && let Some(gradient) = stage
                .gradients
                .embedding_mut()
                .take_if(|_| stage.weights.architecture().tied_embedding)
        {
            let sum = ends.all_reduce(gradient)?.wait()?;
            *stage.gradients.embedding_mut() = Some(sum);
        }
        let counted = stage.gradients.tensors().into_iter();
        let counted: Vec<&Tensor> = counted
            .filter(|(role, _)| !is_counted_elsewhere(&stage.weights, *role))
            .map(|(_, gradient)| gradient)
            .collect();
        let measured = gathered(stage.operations.measure(&counted, losses)?, grid)?;
        let (values, mut working) = match &mut self.masters {
            Some(masters) => (masters.tensors_mut(), stage.weights.tensors_mut()),
            None => (stage.weights.tensors_mut(), Vec::new()),
        };
        working.reverse();
        let values = values.into_iter().zip(stage.gradients.tensors_mut());
        let first_moments = self.first_moments.tensors_mut().into_iter();
        let moments = first_moments.zip(self.second_moments.tensors_mut());
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
        stage.operations.update(&mut parameters, step, &measured)
    }

    fn kept(&self, stage: &Stage) -> Result<Vec<Kept>> {
        let values = self.masters.as_ref().unwrap_or(&stage.weights).tensors();
        let moments = self.first_moments.tensors().into_iter();
        let moments = moments.zip(self.second_moments.tensors());
        let mut kept = Vec::with_capacity(values.len());
        for (tensor, ((_, value), ((_, first), (_, second)))) in values.into_iter().zip(moments).enumerate() {
            kept.push(Kept {
                tensor,
                range: 0..value.len(),
                state: [value.clone(), first.clone(), second.clone()],
            });
        }
        Ok(kept)
    }
}

/// The error of a tensor that a layout names and a stage has not.
pub(super) fn no_tensor(index: usize, count: usize) -> Error {
    Error::OutOfRange {
        what: "tensor of a stage",
        value: index,
        expected: format!("below {count}"),
    }
}
