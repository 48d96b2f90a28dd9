//! What a trainer is taught in a step: the next token, or a parent, whose forward is then part of the step.

use anyhow::Result;
use espalier_model::ops::Layout;
use espalier_model::runner::Runner;
use espalier_model::train::{MicroBatch, Objective, Trainer};

/// What is taught.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Cross-entropy.
    NextToken,
    /// KL from the parent.
    Distil,
}

impl Kind {
    /// By a request's name.
    pub(crate) fn of(request: &str) -> Self {
        if request.ends_with("distil") {
            Self::Distil
        } else {
            Self::NextToken
        }
    }
}

/// One batch.
#[derive(Debug)]
pub(crate) struct Lesson<'a> {
    tokens: Vec<u32>,
    layout: Layout,
    parent: Option<&'a Runner>,
}

impl<'a> Lesson<'a> {
    pub(crate) fn new(tokens: Vec<u32>, layout: Layout, parent: Option<&'a Runner>) -> Self {
        Self {
            tokens,
            layout,
            parent,
        }
    }

    fn batch<'b>(&'b self, objective: Objective<'b>) -> MicroBatch<'b> {
        MicroBatch {
            tokens: &self.tokens,
            layout: self.layout,
            objective,
        }
    }

    /// Positions that have a loss.
    pub(crate) fn predictions(&self) -> usize {
        match self.parent {
            Some(_) => self.layout.rows(),
            None => self.batch(Objective::NextToken).predictions(),
        }
    }

    /// The parent's forward if there is one, then the student's forward and backward.
    pub(crate) fn accumulate(&self, trainer: &mut Trainer) -> Result<()> {
        let predictions = self.predictions();
        let Some(parent) = self.parent else {
            return Ok(trainer.accumulate(&self.batch(Objective::NextToken), predictions)?);
        };
        let hidden = parent.hidden_states(&self.tokens, self.layout)?;
        let objective = Objective::Distil {
            hidden: &hidden,
            head: parent.model().head(),
        };
        Ok(trainer.accumulate(&self.batch(objective), predictions)?)
    }
}
