//! The candidate of least total score inside every limit: a size of its own for each block.

use std::collections::HashMap;

use espalier_arch::{Architecture, Candidate, Variant};
use serde::{Deserialize, Serialize};

use crate::solver::{self, Item, Options, Problem, Solved};
use crate::{AbsoluteLimit, CostModel, Costs, Error, Metric, Prediction, Result, Score};

/// A timed limit is aimed at with at least this share to spare.
pub const LEAST_MARGIN: f64 = 0.02;
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic, clippy::cast_precision_loss)]
    use super::*;
    use crate::fixtures::{f32, prompts, small};
    use crate::{Figures, Space};

    fn latency(value: f64) -> AbsoluteLimit {
        AbsoluteLimit {
            metric: Metric::Latency,
            value,
        }
    }

    fn figures(latency_ms: f64, first_token_ms: f64) -> Figures {
        Figures {
            latency_ms: Some(latency_ms),
            first_token_ms: Some(first_token_ms),
            memory_bytes: Some(1.0),
            ..Figures::default()
        }
    }

    #[test]
    fn the_margin_is_two_standard_errors_of_the_worst_timed_limit_within_bounds() {
        let memory = AbsoluteLimit {
            metric: Metric::Memory,
            value: 1.0,
        };
        let first = AbsoluteLimit {
            metric: Metric::FirstToken,
            value: 10.0,
        };
        let of = |latency_error, first_error, limits: &[AbsoluteLimit]| {
            let prediction = Prediction {
                figures: figures(100.0, 10.0),
                errors: figures(latency_error, first_error),
            };
            margin(&prediction, limits)
        };
        assert_eq!(of(1.0, 0.2, &[latency(90.0)]), 0.02);
        assert_eq!(of(1.0, 0.2, &[latency(90.0), first, memory]), 0.04);
        assert_eq!(of(0.1, 0.2, &[latency(90.0)]), LEAST_MARGIN);
        assert_eq!(of(9.0, 0.2, &[latency(90.0)]), MOST_MARGIN);
        assert_eq!(of(9.0, 9.0, &[memory]), 0.0);
    }

    /// Fits [`small`], whose block `b` loses `b + 1` for each size it goes down.
    fn fit(limit: f64, count: usize) -> Fitted {
        let (workload, table) = prompts();
        let parent = small();
        let model = CostModel::new(&table, &workload, &parent, f32(), None).unwrap();
        let space = Space {
            mlp_grid: Some(32),
            ..Space::default()
        };
        let variants = space.all_variants(&parent).unwrap();
        let mut scores = Vec::new();
        for (block, variants) in variants.iter().enumerate() {
            for (step, variant) in variants.iter().enumerate() {
                scores.push(Score {
                    block,
                    variant: variant.clone(),
                    divergence: (block as f64 + 1.0) * step as f64,
                    standard_error: 0.0,
                    tokens: 1,
                });
            }
        }
        let library = Library::new(&parent, variants, &scores, &model).unwrap();
        library
            .fit(&[latency(limit)], count, 2, &Options::default())
            .unwrap()
    }

    #[test]
    fn the_least_score_inside_the_limit_and_its_margin_is_found() {
        // 8 ms and the margin have to go from 31: skipping the first MLP and halving the first attention lose
        // 2 · 2 + 1 for 8 ms, which the margin makes too little; skipping both loses 2 · 2 + 2 · 1 for 10.
        let Fitted::Found(choices) = fit(23.0, 2) else {
            panic!("31 ms can be made 23")
        };
        let best = &choices[0];
        assert_eq!(best.margin, LEAST_MARGIN);
        assert_eq!(best.score, 6.0);
        assert!(best.prediction.figures.latency_ms.unwrap() <= 23.0 * 0.99);
        let (first, second) = (&best.candidate.variants, &choices[1].candidate.variants);
        assert!(first.iter().zip(second).filter(|(a, b)| a != b).count() >= 2);
        assert!(choices[1].score >= best.score);
    }

    #[test]
    fn a_limit_that_only_the_bare_value_admits_is_aimed_at_without_margin() {
        // Everything skipped leaves the base of 1 ms.
        let Fitted::Found(choices) = fit(1.0, 1) else {
            panic!("1 ms is the base's")
        };
        assert_eq!(choices[0].margin, 0.0);
        assert_eq!(choices[0].candidate.variants, vec![Variant::Skip; 6]);
    }

    #[test]
    fn an_impossible_limit_is_answered_with_the_best_that_can_be_reached() {
        let Fitted::Impossible(reachable) = fit(0.5, 1) else {
            panic!("the base alone takes 1 ms")
        };
        assert_eq!(reachable[0].alone, 1.0);
        assert_eq!(reachable[0].together, 1.0);
    }
}
