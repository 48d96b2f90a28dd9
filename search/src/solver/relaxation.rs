//! The linear relaxation of a node, by Dantzig–Wolfe decomposition.
//!
//! The master problem mixes whole choices (columns): minimise Σ y·cost subject to Σ y·uses ≤ capacity and
//! Σ y = 1. It has one row for each limit and one for the mixture, so its basis is tiny and its inverse is
//! kept dense. Its duals are Lagrangian multipliers λ; pricing is the Lagrangian subproblem, which falls apart
//! into the cheapest item of each group at cost + λ·uses. Any λ ≥ 0 gives a lower bound, so stopping early,
//! or rounding in the master, costs tightness and never correctness.

use std::rc::Rc;

use super::reduce::Reduced;

const MOST_ROUNDS: usize = 400;
/// A reduced cost above this share of the objective's scale does not count as an improvement.
const OPTIMAL: f64 = 1e-11;

/// What a basic column is.
#[derive(Debug, Clone)]
enum Column {
    /// Unused capacity of one limit.
    Slack(usize),
    /// Stands in until a choice is found that is allowed here; costs more than any choice can.
    Artificial,
    /// A whole choice.
    Choice(Rc<[u32]>),
}

/// Basic columns with the inverse of their matrix; rows are the limits, then the mixture.
#[derive(Debug, Clone)]
pub(super) struct Basis {
    columns: Vec<Column>,
    costs: Vec<f64>,
    inverse: Vec<f64>,
    /// The value of each basic column.
    values: Vec<f64>,
}

/// What the relaxation of a node says.
#[derive(Debug, Default)]
pub(super) struct Relaxed {
    /// No allowed choice inside the limits costs less.
    pub(super) bound: f64,
    /// The multipliers that gave the bound.
    pub(super) multipliers: Vec<f64>,
    /// (group, item, weight) of every group that the mixture splits.
    pub(super) split: Vec<(usize, u32, f64)>,
    /// The choice that gave the bound.
    pub(super) choice: Vec<u32>,
}

/// Prices and pivots; holds scratch space so that nodes allocate little.
#[derive(Debug)]
pub(super) struct Relaxation<'a> {
    reduced: &'a Reduced,
    penalty: f64,
    scale: f64,
    /// Items priced so far: the unit of work.
    pub(super) work: u64,
}

impl<'a> Relaxation<'a> {
    pub(super) fn new(reduced: &'a Reduced) -> Self {
        let mut scale = 0.0;
        for group in reduced.starts.windows(2) {
            let items = &reduced.items[group[0]..group[1]];
            scale += items
                .iter()
                .fold(0.0_f64, |largest, item| largest.max(item.cost.abs()));
        }
        let scale = if scale > 0.0 { scale } else { 1.0 };
        Self {
            reduced,
            penalty: 1e5 * scale,
            scale,
            work: 0,
        }
    }

    /// The basis to begin with: all capacity unused, nothing chosen.
    pub(super) fn first_basis(&self) -> Basis {
        let rows = self.reduced.limits + 1;
        let mut inverse = vec![0.0; rows * rows];
        for row in 0..rows {
            inverse[row * rows + row] = 1.0;
        }
        let mut columns: Vec<Column> = (0..self.reduced.limits).map(Column::Slack).collect();
        columns.push(Column::Artificial);
        let mut costs = vec![0.0; rows];
        costs[rows - 1] = self.penalty;
        let mut values = self.reduced.capacity.clone();
        values.push(1.0);
        Basis {
            columns,
            costs,
            inverse,
            values,
        }
    }

    /// Solves a node's relaxation from `basis`, which is left optimal. Stops as soon as the bound reaches
    /// `cutoff`. `offer` is shown every choice met on the way, with its cost and uses.
    pub(super) fn solve(
        &mut self,
        allowed: &[(u32, u32)],
        basis: &mut Basis,
        cutoff: f64,
        mut offer: impl FnMut(&[u32], f64, &[f64]),
    ) -> Relaxed {
        self.forbid(allowed, basis);
        let limits = self.reduced.limits;
        let mut best = Relaxed {
            bound: f64::NEG_INFINITY,
            multipliers: vec![0.0; limits],
            ..Relaxed::default()
        };
        let mut multipliers = vec![0.0; limits];
        let mut uses = vec![0.0; limits];
        for _ in 0..MOST_ROUNDS {
            let duals = basis.duals();
            let entering_slack = (0..limits)
                .filter(|&row| duals[row] > OPTIMAL * self.scale)
                .max_by(|&a, &b| duals[a].total_cmp(&duals[b]));
            if let Some(row) = entering_slack
                && !basis.has_slack(row)
            {
                let mut entry = vec![0.0; limits + 1];
                entry[row] = 1.0;
                if !basis.enter(Column::Slack(row), 0.0, &entry) {
                    break;
                }
                continue;
            }
            for (multiplier, dual) in multipliers.iter_mut().zip(&duals) {
                *multiplier = (-dual).max(0.0);
            }
            let mut choice = Vec::with_capacity(allowed.len());
            let (cost, priced) = self.price(allowed, &multipliers, &mut choice, &mut uses);
            offer(&choice, cost, &uses);
            let bound = priced
                - multipliers
                    .iter()
                    .zip(&self.reduced.capacity)
                    .map(|(value, capacity)| value * capacity)
                    .sum::<f64>();
            if bound > best.bound {
                best.bound = bound;
                best.multipliers.clone_from(&multipliers);
                best.choice.clone_from(&choice);
            }
            let improvement = duals[limits] - priced;
            if best.bound >= cutoff || improvement <= OPTIMAL * self.scale {
                break;
            }
            let mut entry = uses.clone();
            entry.push(1.0);
            if !basis.enter(Column::Choice(choice.into()), cost, &entry) {
                break;
            }
        }
        best.split = split(allowed, basis);
        best
    }

    /// The cheapest item of each group at cost + λ·uses: gives the choice's own cost, and its priced cost.
    fn price(
        &mut self,
        allowed: &[(u32, u32)],
        multipliers: &[f64],
        choice: &mut Vec<u32>,
        uses: &mut [f64],
    ) -> (f64, f64) {
        let reduced = self.reduced;
        uses.fill(0.0);
        let mut cost = 0.0;
        let mut priced = 0.0;
        for &(first, end) in allowed {
            let mut best = (f64::INFINITY, first);
            for item in first..end {
                let value = reduced.priced(item, multipliers);
                if value < best.0 {
                    best = (value, item);
                }
            }
            self.work += u64::from(end - first);
            priced += best.0;
            cost += reduced.items[best.1 as usize].cost;
            for (sum, amount) in uses.iter_mut().zip(reduced.uses_of(best.1 as usize)) {
                *sum += amount;
            }
            choice.push(best.1);
        }
        (cost, priced)
    }

    /// Basic choices that the node forbids become artificial: they may stay for a while, but never for free.
    fn forbid(&self, allowed: &[(u32, u32)], basis: &mut Basis) {
        for (column, cost) in basis.columns.iter().zip(&mut basis.costs) {
            if let Column::Choice(choice) = column
                && !choice
                    .iter()
                    .zip(allowed)
                    .all(|(item, (first, end))| (first..end).contains(&item))
            {
                *cost = self.penalty;
            }
        }
    }
}

impl Basis {
    fn rows(&self) -> usize {
        self.columns.len()
    }

    fn has_slack(&self, row: usize) -> bool {
        self.columns
            .iter()
            .any(|column| matches!(column, Column::Slack(slack) if *slack == row))
    }

    fn duals(&self) -> Vec<f64> {
        let rows = self.rows();
        let mut duals = vec![0.0; rows];
        for (cost, row) in self.costs.iter().zip(self.inverse.chunks_exact(rows)) {
            for (dual, entry) in duals.iter_mut().zip(row) {
                *dual += cost * entry;
            }
        }
        duals
    }

    /// Brings a column in; false when numbers do not allow it.
    fn enter(&mut self, column: Column, cost: f64, entry: &[f64]) -> bool {
        let rows = self.rows();
        let direction: Vec<f64> = self
            .inverse
            .chunks_exact(rows)
            .map(|row| row.iter().zip(entry).map(|(a, b)| a * b).sum())
            .collect();
        let mut leaving: Option<(usize, f64)> = None;
        for (row, &step) in direction.iter().enumerate() {
            if step <= 1e-10 {
                continue;
            }
            let ratio = self.values[row].max(0.0) / step;
            let better = match leaving {
                None => true,
                Some((other, least)) => {
                    ratio < least - 1e-13 || (ratio <= least + 1e-13 && step > direction[other])
                }
            };
            if better {
                leaving = Some((row, ratio));
            }
        }
        let Some((pivot, ratio)) = leaving else {
            return false;
        };
        for (row, value) in self.values.iter_mut().enumerate() {
            *value = if row == pivot {
                ratio
            } else {
                *value - ratio * direction[row]
            };
        }
        let pivot_row: Vec<f64> = self.inverse[pivot * rows..(pivot + 1) * rows]
            .iter()
            .map(|entry| entry / direction[pivot])
            .collect();
        for (row, entries) in self.inverse.chunks_exact_mut(rows).enumerate() {
            if row == pivot {
                entries.copy_from_slice(&pivot_row);
                continue;
            }
            for (value, pivot_value) in entries.iter_mut().zip(&pivot_row) {
                *value -= direction[row] * pivot_value;
            }
        }
        self.columns[pivot] = column;
        self.costs[pivot] = cost;
        true
    }
}

/// The groups in which the mixture uses more than one item.
fn split(allowed: &[(u32, u32)], basis: &Basis) -> Vec<(usize, u32, f64)> {
    let mut split = Vec::new();
    let choices: Vec<(&Rc<[u32]>, f64)> = basis
        .columns
        .iter()
        .zip(&basis.values)
        .filter_map(|(column, &value)| match column {
            Column::Choice(choice) if value > 1e-9 => Some((choice, value)),
            _ => None,
        })
        .collect();
    for group in 0..allowed.len() {
        let mut weights: Vec<(u32, f64)> = Vec::with_capacity(choices.len());
        for (choice, value) in &choices {
            match weights.iter_mut().find(|(item, _)| *item == choice[group]) {
                Some((_, weight)) => *weight += value,
                None => weights.push((choice[group], *value)),
            }
        }
        if weights.len() > 1 {
            split.extend(weights.into_iter().map(|(item, weight)| (group, item, weight)));
        }
    }
    split
}
