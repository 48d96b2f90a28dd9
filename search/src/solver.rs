//! The multiple-choice knapsack under several limits, solved exactly.
//!
//! Choose one item from each group so that the sum of costs is least and, for each limit, the sum of uses
//! stays within it. The way there:
//!
//! 1. drop dominated items (`reduce`);
//! 2. solve the linear relaxation by Dantzig–Wolfe decomposition, which is the best Lagrangian bound
//!    (Geoffrion 1974) and gives its multipliers (`relaxation`);
//! 3. find good choices by rounding, mending and exchanging (`primal`);
//! 4. look at every choice whose reduced costs still let it win, by meeting in the middle, in rooms that grow
//!    until one holds a choice (`meet`): for a hundred groups and three limits this mostly finds the optimum and
//!    proves it;
//! 5. where that is too much, branch and bound, splitting a fractional group's items in two and closing nodes
//!    in the same way (`branch`).
//!
//! The proof never rests on the search for good choices: a bound is a Lagrangian one, or says that everything
//! below it has been looked at. Work is counted in items priced and part-choices looked at, never in seconds,
//! so that the same problem always gives the same answer.

mod branch;
mod diverse;
mod halves;
mod meet;
mod primal;
mod reach;
mod reduce;
mod relaxation;

pub use diverse::top;
pub use reach::Reach;
pub(crate) use reduce::TOLERANCE;

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// One thing that a group may contribute.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Item {
    /// What choosing it adds to the objective.
    pub cost: f64,
    /// What choosing it uses of each limit.
    pub uses: Vec<f64>,
}

/// A multiple-choice knapsack problem under several limits.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Problem {
    /// The groups; exactly one item of each is chosen.
    pub groups: Vec<Vec<Item>>,
    /// The most that the chosen items may use together, for each limit.
    pub limits: Vec<f64>,
}

/// How far to go.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Options {
    /// Stop once (cost − lower bound) / |cost| is proven to be at most this; 0 asks for the optimum.
    pub relative_gap: f64,
    /// Stop after about so many items priced and part-choices looked at, with whatever gap is proven then.
    pub work: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            relative_gap: 1e-6,
            work: 300_000_000,
        }
    }
}

/// The best choice found, and how good it is proven to be.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Solution {
    /// Index of the chosen item in each group.
    pub chosen: Vec<usize>,
    /// Sum of the chosen items' costs.
    pub cost: f64,
    /// Sum of the chosen items' uses, for each limit.
    pub uses: Vec<f64>,
    /// No choice inside the limits costs less than this.
    pub lower_bound: f64,
    /// (cost − lower bound) / |cost|.
    pub gap: f64,
    /// Nodes of the search tree.
    pub nodes: u64,
}

impl Solution {
    /// States a lower bound, and the gap that follows.
    pub(crate) fn prove(&mut self, lower_bound: f64) {
        self.lower_bound = lower_bound.min(self.cost);
        self.gap = gap(self.cost, self.lower_bound);
    }
}

/// How far a cost may lie above the least, as a share of it, where none is below `lower_bound`.
pub(crate) fn gap(cost: f64, lower_bound: f64) -> f64 {
    if lower_bound < cost {
        (cost - lower_bound) / cost.abs().max(f64::MIN_POSITIVE)
    } else {
        0.0
    }
}

/// What a search ended with.
#[derive(Debug, Clone, PartialEq)]
pub enum Solved {
    /// A choice inside every limit.
    Found(Solution),
    /// There is none (or, where `proven` is false, none was found within the work allowed): what can be reached.
    Infeasible(Reach),
}

impl Solved {
    /// The solution, if there is one.
    pub fn found(self) -> Option<Solution> {
        match self {
            Self::Found(solution) => Some(solution),
            Self::Infeasible(_) => None,
        }
    }
}

impl Problem {
    /// # Errors
    /// When a group is empty, an item has another number of uses than there are limits, or a number is not
    /// finite.
    pub fn validate(&self) -> Result<()> {
        for (index, group) in self.groups.iter().enumerate() {
            if group.is_empty() {
                return Err(Error::Problem(format!(
                    "group {index} is empty, expected at least one item"
                )));
            }
            for (item, Item { cost, uses }) in group.iter().enumerate() {
                if uses.len() != self.limits.len() {
                    return Err(Error::Problem(format!(
                        "item {item} of group {index} has {} uses, expected {}: one for each limit",
                        uses.len(),
                        self.limits.len()
                    )));
                }
                if let Some(value) = uses.iter().chain([cost]).find(|value| !value.is_finite()) {
                    return Err(Error::Problem(format!(
                        "item {item} of group {index} has a cost or use of {value}, expected a finite number"
                    )));
                }
            }
        }
        match self.limits.iter().find(|limit| !limit.is_finite()) {
            Some(limit) => Err(Error::Problem(format!(
                "a limit is {limit}, expected a finite number"
            ))),
            None => Ok(()),
        }
    }

    /// Cost and uses of a choice; an index out of range counts as nothing.
    pub fn totals(&self, chosen: &[usize]) -> (f64, Vec<f64>) {
        let mut cost = 0.0;
        let mut uses = vec![0.0; self.limits.len()];
        for item in self
            .groups
            .iter()
            .zip(chosen)
            .filter_map(|(group, &index)| group.get(index))
        {
            cost += item.cost;
            for (sum, amount) in uses.iter_mut().zip(&item.uses) {
                *sum += amount;
            }
        }
        (cost, uses)
    }
}

/// The choice of least cost inside every limit.
///
/// # Errors
/// When the problem is not well formed ([`Problem::validate`]).
pub fn solve(problem: &Problem, options: &Options) -> Result<Solved> {
    problem.validate()?;
    let reduced = reduce::Reduced::new(problem);
    let found = branch::search(&reduced, options, branch::Effort::default());
    let Some(best) = found.best else {
        return Ok(Solved::Infeasible(reach::reach(problem, found.exhausted)));
    };
    let chosen = best;
    let (cost, uses) = problem.totals(&chosen);
    let is_optimal = found.exhausted && options.relative_gap == 0.0;
    let lower_bound = if is_optimal {
        cost
    } else {
        found.lower_bound.min(cost)
    };
    Ok(Solved::Found(Solution {
        chosen,
        cost,
        uses,
        lower_bound,
        gap: gap(cost, lower_bound),
        nodes: found.nodes,
    }))
}
