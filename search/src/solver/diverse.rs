//! The best few choices that differ from each other.

use super::{Item, Options, Problem, Solution, Solved, solve};
use crate::Result;

/// Up to `count` choices, the best first, each differing from every earlier one in at least `distance`
/// groups. That a choice differs is itself a limit on a sum (how many groups agree), so each is exact.
///
/// # Errors
/// When the problem is not well formed ([`Problem::validate`]).
pub fn top(problem: &Problem, count: usize, distance: usize, options: &Options) -> Result<Vec<Solution>> {
    let mut widened = problem.clone();
    let mut solutions = Vec::new();
    while solutions.len() < count {
        let Solved::Found(mut solution) = solve(&widened, options)? else {
            break;
        };
        solution.uses.truncate(problem.limits.len());
        if solutions.len() + 1 < count {
            differ(&mut widened, &solution.chosen, distance.max(1));
        }
        solutions.push(solution);
    }
    Ok(solutions)
}

/// Adds the limit that at most `groups − distance` groups agree with `chosen`.
#[allow(clippy::cast_precision_loss)] // group counts
fn differ(problem: &mut Problem, chosen: &[usize], distance: usize) {
    for (group, &chosen) in problem.groups.iter_mut().zip(chosen) {
        for (index, Item { uses, .. }) in group.iter_mut().enumerate() {
            uses.push(if index == chosen { 1.0 } else { 0.0 });
        }
    }
    problem.limits.push(problem.groups.len() as f64 - distance as f64);
}
