//! Solving under limits that are no linear ones: a confidence is a second-order cone, and an engine may need attention.
//!
//! The cones are approached from outside. The solver is given linear constraints that every candidate inside keeps. What
//! it finds is the best there is if it is inside itself; if not, the constraint along its own errors is added, which it
//! fails and no candidate inside does, and the problem is solved again (Duran and Grossmann 1986). So no candidate is
//! missed, and where the solver finds nothing, there is nothing.

use super::Library;
use super::sums::{Row, Sum};
use crate::Result;
use crate::solver::{self, Item, Options, Problem, Reach, Solution, Solved};

/// Rounds in which what is found is proven to be the best, or that there is nothing.
const EXACT_ROUNDS: i32 = 24;
/// In the rounds after these the constraints are tightened, to find what is inside near the best, and not to prove it:
/// by this share of them at first, by twice as much in each further round.
const TIGHTENED: f64 = 1e-4;
const MOST_ROUNDS: i32 = EXACT_ROUNDS + 10;

/// Constraints that were found to be needed; they hold for every problem of one library and the same confident limits.
#[derive(Debug, Default)]
pub(super) struct Learnt {
    rows: Vec<Row>,
    /// Whether the best would have had no attention, which the engine needs.
    pub(super) attention: bool,
}

impl Learnt {
    /// Where to begin: the constraints along the errors of the whole model.
    pub(super) fn new(sums: &[Sum], whole: &[usize]) -> Self {
        let doubted = sums.iter().filter(|sum| sum.is_doubted());
        Self {
            rows: doubted.map(|sum| sum.row(whole)).collect(),
            attention: false,
        }
    }
}

/// How many candidates, and in how many blocks they differ.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wanted {
    pub(super) count: usize,
    pub(super) distance: usize,
}

impl Wanted {
    pub(super) const ONE: Self = Self {
        count: 1,
        distance: 1,
    };
}

/// What settling came to.
#[derive(Debug)]
pub(super) enum Settled {
    /// Candidates inside every limit, the best first; at least one.
    Found(Vec<Solution>),
    /// None was found.
    Nothing {
        /// A choice that comes near.
        closest: Vec<usize>,
        /// Whether it is proven that there is none.
        proven: bool,
    },
}

impl Library<'_> {
    /// The best candidates inside every sum, each an index into a block's variants.
    pub(super) fn settle(
        &self,
        sums: &[Sum],
        learnt: &mut Learnt,
        wanted: Wanted,
        options: &Options,
    ) -> Result<Settled> {
        let linear = sums.iter().filter(|sum| !sum.is_doubted());
        let linear: Vec<Row> = linear.map(|sum| sum.row(&[])).collect();
        let mut bound = f64::NEG_INFINITY;
        let mut closest = Vec::new();
        for round in 0..MOST_ROUNDS {
            let is_exact = round < EXACT_ROUNDS;
            let tightened = if is_exact {
                0.0
            } else {
                TIGHTENED * f64::from(round - EXACT_ROUNDS).exp2()
            };
            let problem = self.problem(&linear, learnt, tightened);
            let mut solutions = match attempt(&problem, wanted, options)? {
                Ok(solutions) => solutions,
                Err(reach) => {
                    return Ok(Settled::Nothing {
                        closest: reach.closest,
                        proven: reach.proven && is_exact,
                    });
                }
            };
            if let Some(best) = solutions.first() {
                closest.clone_from(&best.chosen);
                if is_exact {
                    bound = bound.max(best.lower_bound);
                }
            }
            let found = solutions.len();
            solutions.retain(|solution| self.learn(sums, learnt, &solution.chosen));
            if solutions.len() == found || !(is_exact || solutions.is_empty()) {
                for solution in &mut solutions {
                    solution.prove(bound);
                }
                return Ok(Settled::Found(solutions));
            }
        }
        Ok(Settled::Nothing {
            closest,
            proven: false,
        })
    }

    /// Whether a choice is inside; where it is not, learns a constraint that it fails.
    fn learn(&self, sums: &[Sum], learnt: &mut Learnt, chosen: &[usize]) -> bool {
        let before = learnt.rows.len();
        let rows = sums.iter().filter(|sum| sum.is_doubted());
        let refusing = rows.map(|sum| sum.row(chosen)).filter(|row| row.refuses(chosen));
        learnt.rows.extend(refusing);
        if learnt.rows.len() > before {
            return false;
        }
        let lacking = self.lacks_attention(chosen);
        learnt.attention |= lacking;
        !lacking
    }

    /// The knapsack: one group for each block. Without scores, a candidate costs the shares of the limits that it uses, so
    /// that what is found lies far inside.
    fn problem(&self, linear: &[Row], learnt: &Learnt, tightened: f64) -> Problem {
        let attention = learnt.attention.then(|| self.attention_row());
        let rows: Vec<&Row> = linear.iter().chain(&learnt.rows).chain(&attention).collect();
        let mut groups = Vec::with_capacity(self.variants.len());
        for (block, variants) in self.variants.iter().enumerate() {
            let item = |variant: usize| {
                let uses = rows.iter().map(|row| at(&row.uses, block, variant)).collect();
                let cost = match &self.scores {
                    Some(scores) => at(scores, block, variant),
                    None => {
                        let shares = rows.iter().map(|row| {
                            let used = at(&row.uses, block, variant);
                            if row.limit > 0.0 { used / row.limit } else { used }
                        });
                        shares.sum()
                    }
                };
                Item { cost, uses }
            };
            groups.push((0..variants.len()).map(item).collect());
        }
        let plain = linear.iter().map(|row| row.limit);
        let doubted = learnt.rows.iter();
        let doubted = doubted.map(|row| row.limit - tightened * row.limit.abs());
        let limits = plain
            .chain(doubted)
            .chain(attention.as_ref().map(|row| row.limit));
        Problem {
            groups,
            limits: limits.collect(),
        }
    }

    /// At least one block of attention stays.
    fn attention_row(&self) -> Row {
        let kept = |block: usize, variant: usize| {
            if self.keeps_attention(block, variant) {
                -1.0
            } else {
                0.0
            }
        };
        let blocks = self.variants.iter().enumerate();
        Row {
            uses: blocks
                .map(|(block, variants)| (0..variants.len()).map(|variant| kept(block, variant)).collect())
                .collect(),
            limit: -1.0,
        }
    }
}

fn at(values: &[Vec<f64>], block: usize, variant: usize) -> f64 {
    values
        .get(block)
        .and_then(|values| values.get(variant))
        .copied()
        .unwrap_or(0.0)
}

fn attempt(
    problem: &Problem,
    wanted: Wanted,
    options: &Options,
) -> Result<std::result::Result<Vec<Solution>, Reach>> {
    if wanted.count > 1 {
        let solutions = solver::top(problem, wanted.count, wanted.distance, options)?;
        if !solutions.is_empty() {
            return Ok(Ok(solutions));
        }
    }
    Ok(match solver::solve(problem, options)? {
        Solved::Found(solution) => Ok(vec![solution]),
        Solved::Infeasible(reach) => Err(reach),
    })
}
