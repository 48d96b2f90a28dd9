//! What can be reached when no choice is inside every limit.

use serde::{Deserialize, Serialize};

use super::Problem;
use super::reduce::least_use;

/// What can be reached when no choice is inside every limit.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reach {
    /// The least that any choice uses of each limit, each taken alone.
    pub least: Vec<f64>,
    /// A choice that comes near all limits together.
    pub closest: Vec<usize>,
    /// What that choice uses of each limit.
    pub closest_uses: Vec<f64>,
    /// Whether it is proven that no choice is inside every limit.
    pub proven: bool,
}

/// Each limit's least use, and a choice whose largest relative excess is small: every item is taken at its
/// least weighted use, and the weights of the limits most exceeded grow (multiplicative weights).
pub(super) fn reach(problem: &Problem, proven: bool) -> Reach {
    let limits = problem.limits.len();
    let least: Vec<f64> = (0..limits)
        .map(|limit| problem.groups.iter().map(|group| least_use(group, limit)).sum())
        .collect();
    // A limit below zero cannot be scaled by itself: the spread above what is least stands in.
    let scale: Vec<f64> = problem
        .limits
        .iter()
        .zip(&least)
        .map(|(limit, least)| {
            if *limit > 0.0 {
                *limit
            } else {
                least.abs().max(1.0)
            }
        })
        .collect();
    let mut weights = vec![1.0; limits];
    let mut best: Option<(f64, Vec<usize>, Vec<f64>)> = None;
    for _ in 0..200 {
        let chosen: Vec<usize> = problem
            .groups
            .iter()
            .map(|group| lightest(group, &weights, &scale))
            .collect();
        let (_, uses) = problem.totals(&chosen);
        let excess: Vec<f64> = uses
            .iter()
            .zip(&problem.limits)
            .zip(&scale)
            .map(|((amount, limit), scale)| (amount - limit) / scale)
            .collect();
        let worst = excess.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        if best.as_ref().is_none_or(|(other, ..)| worst < *other) {
            best = Some((worst, chosen, uses));
        }
        for (weight, excess) in weights.iter_mut().zip(&excess) {
            *weight *= (0.5 * (excess - worst).max(-20.0)).exp();
            *weight = weight.max(1e-9);
        }
    }
    let (_, closest, closest_uses) = best.unwrap_or_default();
    Reach {
        least,
        closest,
        closest_uses,
        proven,
    }
}

fn lightest(group: &[super::Item], weights: &[f64], scale: &[f64]) -> usize {
    let weigh = |item: &super::Item| -> f64 {
        item.uses
            .iter()
            .zip(weights)
            .zip(scale)
            .map(|((amount, weight), scale)| amount * weight / scale)
            .sum()
    };
    let weighed = group.iter().map(weigh).enumerate();
    weighed
        .min_by(|a, b| a.1.total_cmp(&b.1))
        .map_or(0, |(index, _)| index)
}
