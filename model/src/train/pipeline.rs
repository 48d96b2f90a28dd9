//! One rank's micro-batches of a step, forward and back through its stage, in the order of `order`; what crosses
//! from stage to stage is sent and received here. A model on one rank is a pipeline of one stage.
//!
//! The parent of a distillation has its own split over the same ranks: its forward of a micro-batch goes before the
//! student's, and what it ends with stays on the last stage, where the heads are.

use std::collections::VecDeque;
use std::sync::Arc;

use super::order::{Action, actions, most_alive};
use super::stage::{Kept, Lesson, Stage, Taught, Written};
use super::{MicroBatch, Objective};
use crate::collective::{Communicator, InFlight};
use crate::ops::{Head, Operations, TokenBatch};
use crate::runner::{check_layout, next_token_targets};
use crate::weights::StageWeights;
use crate::{Error, Result, Tensor};

/// A rank's place in its pipeline.
pub(super) struct Line<'a> {
    pub(super) stage: &'a mut Stage,
    pub(super) parent: Option<&'a Taught>,
    /// The stages, none where there is one.
    pub(super) stages: Option<&'a dyn Communicator>,
    /// For activations inside blocks, of all micro-batches that are alive together.
    pub(super) activation_bytes: usize,
    /// What is on its way to other stages.
    pub(super) sent: VecDeque<InFlight>,
}

/// A micro-batch between its forward and its backward.
struct Alive {
    tokens: TokenBatch,
    kept: Kept,
    /// Of the stage's output: on the last stage alone.
    grad: Option<Tensor>,
}

/// Told of each piece of a stage whose gradients the last micro-batch has written.
pub(super) type OnWritten<'a> = dyn FnMut(Written, &mut StageWeights) -> Result<()> + 'a;

impl<'a> Line<'a> {
    /// Takes every batch forward and back. Gives their losses, a row each; none but on the last stage. Gradients
    /// are of the summed losses divided by `predictions`.
    pub(super) fn run(
        &mut self,
        batches: &[MicroBatch<'_>],
        predictions: usize,
        written: &mut OnWritten<'_>,
    ) -> Result<Vec<Tensor>> {
        batches
            .iter()
            .try_for_each(|batch| self.check(batch, predictions))?;
        let mut alive = VecDeque::new();
        let mut losses = Vec::new();
        for action in actions(self.count(), self.index(), batches.len()) {
            match action {
                Action::Forward(index) => {
                    let Some(batch) = batches.get(index) else { continue };
                    alive.push_back(self.forward(batch, predictions, &mut losses)?);
                }
                Action::Backward(index) => {
                    let (Some(batch), Some(back)) = (batches.get(index), alive.pop_front()) else {
                        continue;
                    };
                    let is_last = index + 1 == batches.len();
                    let mut nothing = |_: Written, _: &mut StageWeights| Ok(());
                    let written: &mut OnWritten<'_> = if is_last { written } else { &mut nothing };
                    self.backward(batch, back, written)?;
                }
            }
        }
        self.wait_for_sent()?;
        Ok(losses)
    }

    /// Takes every batch forward and no further. Gives their losses, a row each; none but on the last stage.
    pub(super) fn losses(&mut self, batches: &[MicroBatch<'_>]) -> Result<Vec<Tensor>> {
        batches.iter().try_for_each(|batch| self.check(batch, 1))?;
        let operations = Arc::clone(&self.stage.operations);
        let student = Taught::new(self.stage.weights.clone());
        let mut losses = Vec::new();
        for batch in batches {
            let (tokens, taught) = self.enter(batch)?;
            let before = self.arrival(operations.as_ref(), batch, student.weights.architecture().hidden)?;
            let output = student.forward(operations.as_ref(), &tokens, batch.layout, before)?;
            if !self.is_last() {
                self.send(output, self.index() + 1)?;
                continue;
            }
            let head = Head {
                hidden: &output,
                weight: student.weights.head()?,
            };
            let of = match self.lesson(batch, taught.as_ref())? {
                Lesson::Parent(parent) => operations.distillation(head, parent, None)?,
                Lesson::Targets => operations.cross_entropy(head, &tokens, None)?,
            };
            losses.push(of.rows);
        }
        self.wait_for_sent()?;
        Ok(losses)
    }

    fn wait_for_sent(&mut self) -> Result<()> {
        while let Some(sent) = self.sent.pop_front() {
            sent.wait()?;
        }
        Ok(())
    }

    /// A batch's tokens on the device, and what the parent makes of them where it is asked and this is the last
    /// stage.
    fn enter(&mut self, batch: &MicroBatch<'_>) -> Result<(TokenBatch, Option<Tensor>)> {
        let operations = Arc::clone(&self.stage.operations);
        let targets = match batch.objective {
            Objective::Distil { .. } | Objective::FromParent => None,
            Objective::NextToken => Some(next_token_targets(batch.tokens, batch.layout)),
        };
        let tokens = operations.tokens(batch.tokens, targets.as_deref())?;
        let taught = match (batch.objective, self.parent) {
            (Objective::FromParent, Some(parent)) => {
                self.parent_forward(operations.as_ref(), parent, &tokens, batch)?
            }
            _ => None,
        };
        Ok((tokens, taught))
    }

    /// What the last stage teaches, where `taught` are the parent's final-normed hidden states.
    fn lesson<'b>(&self, batch: &MicroBatch<'b>, taught: Option<&'b Tensor>) -> Result<Lesson<'b>>
    where
        'a: 'b,
    {
        Ok(match (batch.objective, taught, self.parent) {
            (Objective::Distil { hidden, head: weight }, ..) => Lesson::Parent(Head { hidden, weight }),
            (Objective::FromParent, Some(hidden), Some(parent)) => Lesson::Parent(Head {
                hidden,
                weight: parent.weights.head()?,
            }),
            _ => Lesson::Targets,
        })
    }

    fn forward(
        &mut self,
        batch: &MicroBatch<'_>,
        predictions: usize,
        losses: &mut Vec<Tensor>,
    ) -> Result<Alive> {
        let operations = Arc::clone(&self.stage.operations);
        let (tokens, taught) = self.enter(batch)?;
        let width = self.stage.weights.architecture().hidden;
        let before = self.arrival(operations.as_ref(), batch, width)?;
        let share = self.activation_bytes / most_alive(self.count(), self.index());
        let (kept, output) = self.stage.forward(&tokens, batch.layout, before, share)?;
        if !self.is_last() {
            self.send(output, self.index() + 1)?;
            return Ok(Alive {
                tokens,
                kept,
                grad: None,
            });
        }
        let lesson = self.lesson(batch, taught.as_ref())?;
        let (rows, grad) = self.stage.loss(lesson, &tokens, &output, predictions)?;
        losses.push(rows);
        Ok(Alive {
            tokens,
            kept,
            grad: Some(grad),
        })
    }

    /// The parent's final-normed hidden states; none but on the last stage.
    fn parent_forward(
        &mut self,
        operations: &dyn Operations,
        parent: &Taught,
        tokens: &TokenBatch,
        batch: &MicroBatch<'_>,
    ) -> Result<Option<Tensor>> {
        let before = self.arrival(operations, batch, parent.weights.architecture().hidden)?;
        let output = parent.forward(operations, tokens, batch.layout, before)?;
        if self.is_last() {
            return Ok(Some(output));
        }
        self.send(output, self.index() + 1)?;
        Ok(None)
    }

    fn backward(&mut self, batch: &MicroBatch<'_>, back: Alive, written: &mut OnWritten<'_>) -> Result<()> {
        let Alive { tokens, kept, grad } = back;
        let grad = match (grad, self.stages) {
            (Some(grad), _) => grad,
            (None, Some(stages)) => {
                let (rows, width) = (batch.layout.rows(), self.stage.weights.architecture().hidden);
                let element_type = self.stage.operations.activation_type();
                stages
                    .receive(rows, width, element_type, self.index() + 1)?
                    .wait()?
            }
            (None, None) => return Err(no_gradient()),
        };
        match self.stage.backward(&tokens, kept, grad, written)? {
            Some(before) => self.send(before, self.index().saturating_sub(1)),
            None => Ok(()),
        }
    }

    /// What the stage before makes of a batch; none on the first.
    fn arrival(
        &self,
        operations: &dyn Operations,
        batch: &MicroBatch<'_>,
        width: usize,
    ) -> Result<Option<Tensor>> {
        let (Some(stages), Some(before)) = (self.stages, self.index().checked_sub(1)) else {
            return Ok(None);
        };
        let arriving = stages.receive(batch.layout.rows(), width, operations.activation_type(), before)?;
        arriving.wait().map(Some)
    }

    /// Does not wait: the receiver may be waiting for what this stage sends it another way. What was sent two
    /// rounds ago was asked for, because what came since depends on it.
    fn send(&mut self, tensor: Tensor, to: usize) -> Result<()> {
        let Some(stages) = self.stages else { return Ok(()) };
        self.sent.push_back(stages.send(tensor, to)?);
        let most = 4 * (self.count() + 1);
        while self.sent.len() > most {
            if let Some(sent) = self.sent.pop_front() {
                sent.wait()?;
            }
        }
        Ok(())
    }

    fn check(&self, batch: &MicroBatch<'_>, predictions: usize) -> Result<()> {
        check_layout(batch.tokens, batch.layout)?;
        if batch.predictions() == 0 || predictions == 0 {
            return Err(Error::OutOfRange {
                what: "tokens to predict",
                value: 0,
                expected: "at least one in every batch".to_owned(),
            });
        }
        if matches!(batch.objective, Objective::FromParent) && self.parent.is_none() {
            return Err(Error::OutOfRange {
                what: "parents of a trainer",
                value: 0,
                expected: "one to distil from, given with Trainer::with_parent".to_owned(),
            });
        }
        Ok(())
    }

    fn count(&self) -> usize {
        self.stages.map_or(1, Communicator::size)
    }

    fn index(&self) -> usize {
        self.stages.map_or(0, Communicator::rank)
    }

    fn is_last(&self) -> bool {
        self.index() + 1 == self.count()
    }
}

fn no_gradient() -> Error {
    Error::Shape {
        operation: "backward",
        expected: "the gradient of the last stage's loss".to_owned(),
        found: "none".to_owned(),
    }
}
