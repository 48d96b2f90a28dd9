//! The candidate of least total score inside every limit: a size of its own for each block.
//!
//! [`choose`] is the way in: it knows when one problem is not enough. [`Library`] is one problem's worth: what is known of
//! a parent on a target at one running batch.

mod library;
mod margin;
mod reachable;
mod settle;
mod sums;
#[cfg(test)]
mod tests;

pub use library::Library;
pub use margin::{LEAST_MARGIN, MOST_MARGIN, margin};
pub use reachable::{Impossible, Reachable};

use espalier_arch::{Architecture, Candidate, Variant};
use serde::{Deserialize, Serialize};

use crate::running::batches;
use crate::solver::Options;
use crate::{AbsoluteLimit, CostModel, Error, Prediction, Result, Score};

/// A candidate as the solver chose it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Choice {
    /// One variant for each block.
    pub candidate: Candidate,
    /// Sum of the variants' scores, nats a token.
    pub score: f64,
    /// No candidate inside the limits has a lower sum.
    pub score_bound: f64,
    /// (score − bound) / score, proven.
    pub gap: f64,
    /// What it will cost.
    pub prediction: Prediction,
    /// The largest share of a timed limit that was left as margin.
    pub margin: f64,
    /// Sequences that run together.
    pub running: usize,
    /// Whether a block of attention is kept only because the engine serves no model without.
    #[serde(default)]
    pub attention_kept: bool,
}

/// Why attention stays where nothing else asks for it.
const ATTENTION: &str = "one block of attention is kept only because vllm serves no model without";

impl Choice {
    /// What should be known of it.
    pub fn notes(&self) -> Vec<String> {
        self.attention_kept
            .then(|| ATTENTION.to_owned())
            .into_iter()
            .collect()
    }
}

/// What fitting ended with.
#[derive(Debug, Clone, PartialEq)]
pub enum Fitted {
    /// Candidates inside every limit, the best first.
    Found(Vec<Choice>),
    /// There is none.
    Impossible(Impossible),
}

/// One point of the trade-off between a metric and quality.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FrontPoint {
    /// The metric's value, predicted.
    pub value: f64,
    /// Its standard error.
    #[serde(default)]
    pub error: f64,
    /// Least sum of scores at that value, nats a token.
    pub score: f64,
}

/// What a choice is made from.
#[derive(Debug, Clone, Copy)]
pub struct Question<'a> {
    /// The model that is compressed.
    pub parent: &'a Architecture,
    /// The variants of each block.
    pub variants: &'a [Vec<Variant>],
    /// What each loses; none asks only for what can be reached.
    pub scores: Option<&'a [Score]>,
    /// What must be kept.
    pub limits: &'a [AbsoluteLimit],
    /// Candidates wanted.
    pub count: usize,
    /// Blocks in which they differ from each other at the least.
    pub distance: usize,
}

/// The best candidates inside every limit.
///
/// Throughput of an engine that batches continuously is one problem for each number of sequences that may run together
/// ([`batches`]). Each is solved and the best taken; those beyond what the table measured are left out. `model` is left at
/// the batch of the answer.
///
/// # Errors
/// When a variant has no score or no cost, or the problem is not well formed.
pub fn choose(question: &Question<'_>, model: &mut CostModel, options: &Options) -> Result<Fitted> {
    let mut best: Option<(usize, Vec<Choice>)> = None;
    let mut impossible: Option<Impossible> = None;
    let mut unmeasured = None;
    for batch in batches(model, question.limits) {
        match fit_running(question, model, batch, options) {
            Ok(Fitted::Found(choices)) => {
                let score = |choices: &[Choice]| choices.first().map_or(f64::INFINITY, |choice| choice.score);
                if best
                    .as_ref()
                    .is_none_or(|(_, known)| score(&choices) < score(known))
                {
                    best = Some((batch, choices));
                }
            }
            Ok(Fitted::Impossible(here)) => {
                impossible = Some(match impossible {
                    Some(known) => known.or(here),
                    None => here,
                });
            }
            Err(error @ (Error::MissingRow { .. } | Error::Extrapolation { .. })) => {
                unmeasured = Some((batch, error));
            }
            Err(error) => return Err(error),
        }
    }
    match (best, impossible, unmeasured) {
        (Some((batch, choices)), _, _) => {
            model.run_together(batch)?;
            Ok(Fitted::Found(choices))
        }
        (None, Some(impossible), unmeasured) => Ok(Fitted::Impossible(Impossible {
            unmeasured: unmeasured
                .map(|(batch, error)| format!("{batch} sequences together were not considered: {error}")),
            ..impossible
        })),
        (None, None, Some((_, error))) => Err(error),
        (None, None, None) => Ok(Fitted::Impossible(Impossible::of(Vec::new()))),
    }
}

fn fit_running(
    question: &Question<'_>,
    model: &mut CostModel,
    batch: usize,
    options: &Options,
) -> Result<Fitted> {
    model.run_together(batch)?;
    let (parent, variants) = (question.parent, question.variants.to_vec());
    let library = match question.scores {
        Some(scores) => Library::new(parent, variants, scores, model)?,
        None => Library::unscored(parent, variants, model)?,
    };
    library.fit(question.limits, question.count, question.distance, options)
}
