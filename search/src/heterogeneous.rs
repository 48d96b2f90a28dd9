//! The candidate of least total score inside every limit: a size of its own for each block.

use std::collections::HashMap;

use espalier_arch::{Architecture, Candidate, Variant};
use serde::{Deserialize, Serialize};

use crate::solver::{self, Item, Options, Problem, Solved};
use crate::{AbsoluteLimit, CostModel, Costs, Error, Metric, Prediction, Result, Score};

/// A timed limit is aimed at with at least this share to spare.
pub const LEAST_MARGIN: f64 = 0.01;
/// However scattered the table, no more than this share is given away.
pub const MOST_MARGIN: f64 = 0.05;

/// What is known of one parent on one target.
#[derive(Debug)]
pub struct Library<'a> {
    parent: &'a Architecture,
    variants: Vec<Vec<Variant>>,
    scores: Vec<Vec<f64>>,
    costs: Vec<Vec<Costs>>,
    base: Costs,
    model: &'a CostModel,
}

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
    /// The share of each timed limit that was left as margin.
    pub margin: f64,
}

/// The most that can be reached of one limit.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reachable {
    /// The limit that was asked for.
    pub limit: AbsoluteLimit,
    /// The best value that any candidate has of this metric alone.
    pub alone: f64,
    /// The value of the candidate that comes nearest to all limits together.
    pub together: f64,
}

/// What fitting ended with.
#[derive(Debug, Clone, PartialEq)]
pub enum Fitted {
    /// Candidates inside every limit, the best first.
    Found(Vec<Choice>),
    /// There is none.
    Impossible(Vec<Reachable>),
}

/// One point of the trade-off between a metric and quality.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FrontPoint {
    /// The metric's value, predicted.
    pub value: f64,
    /// Least sum of scores at that value, nats a token.
    pub score: f64,
}

impl<'a> Library<'a> {
    /// `variants` are those of each block; the whole block scores 0 unless it was scored.
    ///
    /// # Errors
    /// When a variant has no score or no cost.
    pub fn new(
        parent: &'a Architecture,
        variants: Vec<Vec<Variant>>,
        scores: &[Score],
        model: &'a CostModel,
    ) -> Result<Self> {
        let known: HashMap<(usize, &Variant), f64> = scores
            .iter()
            .map(|score| ((score.block, &score.variant), score.divergence))
            .collect();
        let mut score_rows = Vec::with_capacity(variants.len());
        let mut cost_rows = Vec::with_capacity(variants.len());
        for (block, (shape, variants)) in parent.blocks.iter().zip(&variants).enumerate() {
            let mut block_scores = Vec::with_capacity(variants.len());
            let mut block_costs = Vec::with_capacity(variants.len());
            for variant in variants {
                block_scores.push(score_of(&known, block, variant)?);
                let left = shape.shape.with_variant(variant).map_err(Error::Shape)?;
                block_costs.push(model.block_costs(left.as_ref())?);
            }
            score_rows.push(block_scores);
            cost_rows.push(block_costs);
        }
        let base = model.base_costs(parent)?;
        Ok(Self {
            parent,
            variants,
            scores: score_rows,
            costs: cost_rows,
            base,
            model,
        })
    }

    /// The same without scores: every variant scores 0. Only for asking what can be reached.
    ///
    /// # Errors
    /// When a variant has no cost.
    pub fn unscored(
        parent: &'a Architecture,
        variants: Vec<Vec<Variant>>,
        model: &'a CostModel,
    ) -> Result<Self> {
        let scores: Vec<Score> = variants
            .iter()
            .enumerate()
            .flat_map(|(block, variants)| {
                variants.iter().map(move |variant| Score {
                    block,
                    variant: variant.clone(),
                    divergence: 0.0,
                    standard_error: 0.0,
                    tokens: 0,
                })
            })
            .collect();
        Self::new(parent, variants, &scores, model)
    }

    /// Up to `count` candidates that differ from each other in at least `distance` blocks, the best first.
    ///
    /// Timed limits are aimed at with a margin: two standard errors of the prediction, but at least
    /// [`LEAST_MARGIN`] and at most [`MOST_MARGIN`] of the limit. Where only the bare limit can be met, it is
    /// aimed at without margin, and the check decides.
    ///
    /// # Errors
    /// When the problem is not well formed.
    pub fn fit(
        &self,
        limits: &[AbsoluteLimit],
        count: usize,
        distance: usize,
        options: &Options,
    ) -> Result<Fitted> {
        let bare = self.problem(limits, 0.0);
        let first = match solver::solve(
            &bare,
            &Options {
                relative_gap: 1e-3,
                ..*options
            },
        )? {
            Solved::Found(solution) => self.choice(&solution, 0.0)?,
            Solved::Infeasible(reach) => return Ok(Fitted::Impossible(self.reachable(limits, &reach))),
        };
        let margin = margin(&first.prediction, limits);
        for margin in [margin, 0.0] {
            let solutions = solver::top(&self.problem(limits, margin), count, distance, options)?;
            if !solutions.is_empty() {
                let choices = solutions.iter().map(|solution| self.choice(solution, margin));
                return Ok(Fitted::Found(choices.collect::<Result<_>>()?));
            }
        }
        Ok(Fitted::Found(vec![first]))
    }

    /// The least score at `count` values of one metric, evenly from the best that can be reached to the
    /// parent's own; points no better than a cheaper one are left out.
    ///
    /// # Errors
    /// When the problem is not well formed.
    #[allow(clippy::cast_precision_loss)] // a handful of points
    pub fn front(&self, metric: Metric, count: usize, options: &Options) -> Result<Vec<FrontPoint>> {
        let whole = self
            .model
            .predict(self.parent)?
            .figures
            .get(metric)
            .unwrap_or(0.0);
        let own = self.model.sum_limit(&AbsoluteLimit { metric, value: whole });
        let least = self.base.get(metric)
            + self
                .costs
                .iter()
                .map(|block| least(block.iter().map(|costs| costs.get(metric))))
                .sum::<f64>();
        let mut front: Vec<FrontPoint> = Vec::with_capacity(count);
        for step in 0..count {
            let share = (step as f64 + 1.0) / count as f64;
            let sum = least + (own - least) * share;
            let problem = self.sum_problem(&[(metric, sum)]);
            let Solved::Found(solution) = solver::solve(&problem, options)? else {
                continue;
            };
            let choice = self.choice(&solution, 0.0)?;
            let value = choice.prediction.figures.get(metric).unwrap_or(sum);
            let better = front.last().is_none_or(|last| choice.score < last.score);
            if better {
                front.push(FrontPoint {
                    value,
                    score: choice.score,
                });
            }
        }
        Ok(front)
    }

    /// The knapsack: one group for each block; limits less the margin and the base.
    pub fn problem(&self, limits: &[AbsoluteLimit], margin: f64) -> Problem {
        let sums: Vec<(Metric, f64)> = limits
            .iter()
            .map(|limit| {
                let kept = if limit.metric.is_timed() {
                    1.0 - margin
                } else {
                    1.0
                };
                (limit.metric, self.model.sum_limit(limit) * kept)
            })
            .collect();
        self.sum_problem(&sums)
    }

    fn sum_problem(&self, sums: &[(Metric, f64)]) -> Problem {
        let groups = self
            .scores
            .iter()
            .zip(&self.costs)
            .map(|(scores, costs)| {
                let items = scores.iter().zip(costs);
                items
                    .map(|(score, costs)| Item {
                        cost: *score,
                        uses: sums.iter().map(|(metric, _)| costs.get(*metric)).collect(),
                    })
                    .collect()
            })
            .collect();
        let limits = sums
            .iter()
            .map(|(metric, sum)| sum - self.base.get(*metric))
            .collect();
        Problem { groups, limits }
    }

    fn choice(&self, solution: &solver::Solution, margin: f64) -> Result<Choice> {
        let candidate = self.candidate(&solution.chosen);
        let prediction = self.model.predict(&self.parent.with_candidate(&candidate)?)?;
        Ok(Choice {
            candidate,
            score: solution.cost,
            score_bound: solution.lower_bound,
            gap: solution.gap,
            prediction,
            margin,
        })
    }

    fn candidate(&self, chosen: &[usize]) -> Candidate {
        let variants = self.variants.iter().zip(chosen);
        Candidate {
            variants: variants
                .map(|(block, &index)| block.get(index).cloned().unwrap_or(Variant::Whole))
                .collect(),
        }
    }

    fn reachable(&self, limits: &[AbsoluteLimit], reach: &solver::Reach) -> Vec<Reachable> {
        let sums = limits.iter().zip(&reach.least).zip(&reach.closest_uses);
        sums.map(|((limit, alone), together)| {
            // A floor on throughput is a ceiling on latency, and back.
            let back = |sum: f64| {
                let sum = sum + self.base.get(limit.metric);
                self.model.sum_limit(&AbsoluteLimit {
                    metric: limit.metric,
                    value: sum,
                })
            };
            Reachable {
                limit: *limit,
                alone: back(*alone),
                together: back(*together),
            }
        })
        .collect()
    }
}

/// Two standard errors of the worst timed limit, as a share of it, within the documented bounds; 0 when
/// nothing timed is limited.
pub fn margin(prediction: &Prediction, limits: &[AbsoluteLimit]) -> f64 {
    let timed = limits.iter().filter(|limit| limit.metric.is_timed());
    let shares = timed.map(|limit| {
        let value = prediction.figures.get(limit.metric).unwrap_or(0.0);
        let error = prediction.errors.get(limit.metric).unwrap_or(0.0);
        if value > 0.0 { 2.0 * error / value } else { 0.0 }
    });
    shares
        .fold(None, |worst: Option<f64>, share| {
            Some(worst.unwrap_or(0.0).max(share))
        })
        .map_or(0.0, |worst| worst.clamp(LEAST_MARGIN, MOST_MARGIN))
}

fn least(values: impl Iterator<Item = f64>) -> f64 {
    values.fold(f64::INFINITY, f64::min)
}

fn score_of(known: &HashMap<(usize, &Variant), f64>, block: usize, variant: &Variant) -> Result<f64> {
    match known.get(&(block, variant)) {
        Some(score) => Ok(*score),
        None if *variant == Variant::Whole => Ok(0.0),
        None => Err(Error::MissingScore {
            block,
            variant: variant.to_string(),
        }),
    }
}
