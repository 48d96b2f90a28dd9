//! What is known of one parent on one target, as the solver's problem.

use std::collections::HashMap;

use espalier_arch::{Architecture, Candidate, Variant};

use super::margin::{margin, share_of};
use super::{Choice, Fitted, FrontPoint, Reachable};
use crate::predict::Prices;
use crate::solver::{self, Item, Options, Problem, Solved};
use crate::{AbsoluteLimit, CostModel, Costs, Error, Metric, Result, Score};

/// How often a choice whose errors turned out larger than was thought is made anew.
const MOST_ROUNDS: usize = 6;

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
        let mut prices = Prices::new(model);
        for (block, (shape, variants)) in parent.blocks.iter().zip(&variants).enumerate() {
            let mut block_scores = Vec::with_capacity(variants.len());
            let mut block_costs = Vec::with_capacity(variants.len());
            for variant in variants {
                block_scores.push(score_of(&known, block, variant)?);
                let left = shape.shape.with_variant(variant).map_err(Error::Shape)?;
                block_costs.push(prices.of(left.as_ref())?);
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
    /// A timed limit that asks for a confidence is kept with that. The others are aimed at with a margin: two standard
    /// errors of the prediction, but at least [`super::LEAST_MARGIN`] and at most [`super::MOST_MARGIN`] of the limit;
    /// where only the bare limit can be met, it is aimed at without margin, and the check decides.
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
        let coarse = Options {
            relative_gap: 1e-3,
            ..*options
        };
        let none = vec![0.0; limits.len()];
        let first = match solver::solve(&self.aimed(limits, &none), &coarse)? {
            Solved::Found(solution) => self.choice(&solution, 0.0)?,
            Solved::Infeasible(reach) => {
                return Ok(Fitted::Impossible(self.reachable(limits, &none, &reach)));
            }
        };
        let spare = margin(&first.prediction, limits);
        for spare in [spare, 0.0] {
            let choices = self.confident(limits, &first, spare, |problem| {
                solver::top(problem, count, distance, options)
            })?;
            if !choices.is_empty() {
                return Ok(Fitted::Found(choices));
            }
        }
        let margins = self.margins(limits, &first, 0.0);
        match solver::solve(&self.aimed(limits, &margins), &coarse)? {
            Solved::Infeasible(reach) => Ok(Fitted::Impossible(self.reachable(limits, &margins, &reach))),
            Solved::Found(_) if limits.iter().any(|limit| limit.confidence.is_some()) => {
                Ok(Fitted::Impossible(doubtful(limits, &first)))
            }
            Solved::Found(_) => Ok(Fitted::Found(vec![first])),
        }
    }

    /// Choices that keep every limit with the confidence it asks for, the others with `spare` as their margin. What the
    /// errors of a choice are is known only once it is made, so it is made again with what they turned out to be.
    fn confident(
        &self,
        limits: &[AbsoluteLimit],
        first: &Choice,
        spare: f64,
        solve: impl Fn(&Problem) -> Result<Vec<solver::Solution>>,
    ) -> Result<Vec<Choice>> {
        let mut margins = self.margins(limits, first, spare);
        for _ in 0..MOST_ROUNDS {
            let most = margins.iter().copied().fold(0.0, f64::max);
            let solutions = solve(&self.aimed(limits, &margins))?;
            let choices = solutions.iter().map(|solution| self.choice(solution, most));
            let choices: Vec<Choice> = choices.collect::<Result<_>>()?;
            let Some(best) = choices.first() else { break };
            let kept = |choice: &Choice| {
                let mut confident = limits.iter().filter(|limit| limit.confidence.is_some());
                confident.all(|limit| limit.admits_prediction(&choice.prediction))
            };
            if kept(best) {
                return Ok(choices.into_iter().filter(kept).collect());
            }
            let needed = self.margins(limits, best, spare);
            for (margin, needed) in margins.iter_mut().zip(needed) {
                *margin = margin.max(needed);
            }
        }
        Ok(Vec::new())
    }

    /// What to leave of each limit, by the errors of a choice.
    fn margins(&self, limits: &[AbsoluteLimit], choice: &Choice, spare: f64) -> Vec<f64> {
        let each = limits.iter().map(|limit| match limit.confidence {
            Some(_) => share_of(&choice.prediction, limit),
            None if limit.metric.is_timed() => spare,
            None => 0.0,
        });
        each.collect()
    }

    /// The least score inside `others` at `count` values of one metric, evenly from the best that can be reached to the
    /// parent's own; points no better than a cheaper one are left out.
    ///
    /// # Errors
    /// When the problem is not well formed.
    #[allow(clippy::cast_precision_loss)] // a handful of points
    pub fn front(
        &self,
        metric: Metric,
        others: &[AbsoluteLimit],
        count: usize,
        options: &Options,
    ) -> Result<Vec<FrontPoint>> {
        let whole = self
            .model
            .predict(self.parent)?
            .figures
            .get(metric)
            .unwrap_or(0.0);
        let own = self.model.sum_limit(&AbsoluteLimit::new(metric, whole));
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
            let limit = AbsoluteLimit::new(metric, self.figure(metric, sum));
            let problem = self.problem(&[others, &[limit]].concat(), 0.0);
            let Solved::Found(solution) = solver::solve(&problem, options)? else {
                continue;
            };
            let choice = self.choice(&solution, 0.0)?;
            let value = choice.prediction.figures.get(metric).unwrap_or(sum);
            let better = front.last().is_none_or(|last| choice.score < last.score);
            if better {
                front.push(FrontPoint {
                    value,
                    error: choice.prediction.errors.get(metric).unwrap_or(0.0),
                    score: choice.score,
                });
            }
        }
        Ok(front)
    }

    /// The knapsack: one group for each block; limits less `margin` of the timed ones, and the base.
    pub fn problem(&self, limits: &[AbsoluteLimit], margin: f64) -> Problem {
        let timed = |limit: &AbsoluteLimit| if limit.metric.is_timed() { margin } else { 0.0 };
        let margins: Vec<f64> = limits.iter().map(timed).collect();
        self.aimed(limits, &margins)
    }

    fn aimed(&self, limits: &[AbsoluteLimit], margins: &[f64]) -> Problem {
        self.sum_problem(&self.constraints(limits, margins).concat())
    }

    /// Each limit less its margin as bounds on sums, the limit's own sum first.
    fn constraints(&self, limits: &[AbsoluteLimit], margins: &[f64]) -> Vec<Vec<(Metric, f64)>> {
        let each = limits.iter().zip(margins).map(|(limit, margin)| {
            let kept = 1.0 - margin;
            let value = if limit.metric.more_is_better() {
                limit.value / kept
            } else {
                limit.value * kept
            };
            self.model.constraints(&AbsoluteLimit { value, ..*limit })
        });
        each.collect()
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
            running: self.model.running(),
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

    fn reachable(&self, limits: &[AbsoluteLimit], margins: &[f64], reach: &solver::Reach) -> Vec<Reachable> {
        let mut place = 0;
        let constraints = self.constraints(limits, margins);
        let each = limits.iter().zip(&constraints).map(|(limit, constraints)| {
            let back = |sums: &[f64]| {
                let sum = sums.get(place).copied().unwrap_or(0.0) + self.base.get(limit.metric);
                self.figure(limit.metric, sum)
            };
            let reachable = Reachable {
                limit: *limit,
                alone: back(&reach.least),
                together: back(&reach.closest_uses),
            };
            place += constraints.len();
            reachable
        });
        each.collect()
    }

    /// The figure that a sum over blocks and base comes to: no less than the host's floor, and for throughput the
    /// inverse.
    fn figure(&self, metric: Metric, sum: f64) -> f64 {
        let sum = sum.max(self.model.floor_of(metric));
        self.model.sum_limit(&AbsoluteLimit::new(metric, sum))
    }
}

/// Limits that the best choice is inside of by its prediction, and not with the confidence asked for.
fn doubtful(limits: &[AbsoluteLimit], first: &Choice) -> Vec<Reachable> {
    let each = limits.iter().map(|limit| {
        let value = limit.value_at_confidence(&first.prediction).unwrap_or(0.0);
        Reachable {
            limit: *limit,
            alone: value,
            together: value,
        }
    });
    each.collect()
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
