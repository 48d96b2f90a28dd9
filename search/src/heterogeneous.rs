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
use crate::solver::{Options, gap};
use crate::uniform::aim;
use crate::{AbsoluteLimit, CostModel, Error, Prediction, Result, Score};

/// A candidate as the solver chose it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Choice {
    /// One variant for each block.
    pub candidate: Candidate,
    /// Sum of the variants' scores, nats a token.
    pub score: f64,
    /// No candidate inside the limits has a lower sum, of the variants that have a price.
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
    /// What was not looked at for want of measurements.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unmeasured: Option<String>,
}

/// Why attention stays where nothing else asks for it.
const ATTENTION: &str = "one block of attention is kept only because vllm serves no model without";

impl Choice {
    /// What should be known of it.
    pub fn notes(&self) -> Vec<String> {
        let attention = self.attention_kept.then(|| ATTENTION.to_owned());
        attention.into_iter().chain(self.unmeasured.clone()).collect()
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
/// ([`batches`]). Each is solved and the best taken: one that keeps the margin before one that does not, then that of least
/// score. Numbers that the table did not measure are left out, as are at each number the variants that have no time there.
/// What is proven is proven of all numbers. `model` is left at the batch of the answer.
///
/// # Errors
/// When a variant has no score, nothing has a cost, or the problem is not well formed.
pub fn choose(question: &Question<'_>, model: &mut CostModel, options: &Options) -> Result<Fitted> {
    let least = least_sum(question);
    let mut best: Option<Vec<Choice>> = None;
    let mut bound = f64::INFINITY;
    let mut impossible: Option<Impossible> = None;
    let mut unmeasured = Unmeasured::default();
    for batch in batches(model, question.limits.iter().map(|limit| limit.metric)) {
        let fitted = match fit_running(question, model, batch, options, &mut unmeasured) {
            Ok(fitted) => fitted,
            Err(error @ (Error::MissingRow { .. } | Error::Extrapolation { .. })) => {
                bound = bound.min(least);
                unmeasured.batches.push(batch);
                unmeasured.error.get_or_insert(error);
                continue;
            }
            Err(error) => return Err(error),
        };
        match fitted {
            Fitted::Found(choices) => {
                bound = bound.min(choices.first().map_or(least, |choice| choice.score_bound));
                let rank = |choices: &[Choice]| {
                    choices.first().map_or((true, f64::INFINITY), |choice| {
                        (!keeps_margin(choice, question.limits), choice.score)
                    })
                };
                if best.as_ref().is_none_or(|known| rank(&choices) < rank(known)) {
                    best = Some(choices);
                }
            }
            Fitted::Impossible(here) => {
                if !here.proven {
                    bound = bound.min(least);
                }
                impossible = Some(match impossible {
                    Some(known) => known.or(here),
                    None => here,
                });
            }
        }
    }
    if let Some(mut choices) = best {
        if let Some(choice) = choices.first_mut() {
            model.run_together(choice.running)?;
            choice.score_bound = bound.min(choice.score);
            choice.gap = gap(choice.score, choice.score_bound);
            choice.unmeasured = unmeasured.note();
        }
        return Ok(Fitted::Found(choices));
    }
    match (impossible, unmeasured.error.clone()) {
        (Some(impossible), _) => Ok(Fitted::Impossible(Impossible {
            proven: impossible.proven && unmeasured.is_empty(),
            unmeasured: unmeasured.note(),
            ..impossible
        })),
        (None, Some(error)) => Err(error),
        (None, None) => Ok(Fitted::Impossible(Impossible::of(Vec::new()))),
    }
}

/// What was not looked at for want of measurements.
#[derive(Debug, Default)]
struct Unmeasured {
    /// Numbers of sequences together at which the parent itself has no price.
    batches: Vec<usize>,
    /// What the first of these lacked.
    error: Option<Error>,
    /// Numbers of sequences together at which so many variants have none.
    variants: Vec<(usize, usize)>,
}

impl Unmeasured {
    fn is_empty(&self) -> bool {
        self.batches.is_empty() && self.variants.is_empty()
    }

    fn note(&self) -> Option<String> {
        let mut notes = Vec::new();
        if let Some(error) = &self.error {
            let batches: Vec<String> = self.batches.iter().map(usize::to_string).collect();
            notes.push(format!(
                "{} sequences together were not considered: {error}",
                batches.join(", ")
            ));
        }
        let variants = self.variants.iter();
        notes.extend(variants.map(|(batch, unpriced)| {
            format!("{unpriced} variants have no time at {batch} sequences together and are left out there")
        }));
        (!notes.is_empty()).then(|| notes.join("; "))
    }
}

/// Whether the least margin is left of every timed limit that asks for no confidence.
fn keeps_margin(choice: &Choice, limits: &[AbsoluteLimit]) -> bool {
    limits
        .iter()
        .all(|limit| aim(limit, LEAST_MARGIN).admits_prediction(&choice.prediction))
}

/// What no candidate scores less than, whatever its cost.
fn least_sum(question: &Question<'_>) -> f64 {
    let mut least = vec![0.0_f64; question.parent.blocks.len()];
    for score in question.scores.unwrap_or_default() {
        if let Some(least) = least.get_mut(score.block) {
            *least = least.min(score.divergence);
        }
    }
    least.iter().sum()
}

fn fit_running(
    question: &Question<'_>,
    model: &mut CostModel,
    batch: usize,
    options: &Options,
    unmeasured: &mut Unmeasured,
) -> Result<Fitted> {
    model.run_together(batch)?;
    let parent = question.parent;
    let library = match question.scores {
        Some(scores) => Library::new(parent, question.variants, scores, model)?,
        None => Library::unscored(parent, question.variants, model)?,
    };
    let fitted = library.fit(question.limits, question.count, question.distance, options)?;
    if library.unpriced > 0 {
        unmeasured.variants.push((batch, library.unpriced));
    }
    Ok(fitted)
}
