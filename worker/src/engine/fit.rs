//! What blocks and bases cost, from the times of whole models: weighted least squares.
//!
//! A model's time is taken to be its base and the sum of its blocks, `T = base + Σ copies · cost`. Each model that was
//! timed is an equation, weighted by how sure its time is; unknowns are the costs. So a base is fitted over all models,
//! and no shape's error falls on it alone. No cost is below zero: one that noise would have there is none, and the
//! others are fitted without it, so that sums still meet the times.

/// One model's composition and time.
#[derive(Debug, Clone, PartialEq)]
pub struct Equation {
    /// How often each unknown is in it.
    pub counts: Vec<f64>,
    /// Milliseconds.
    pub time: f64,
    /// Its standard error.
    pub error: f64,
}

/// A fitted cost, milliseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cost {
    /// The value; not below zero, though differences of noisy times may be.
    pub value: f64,
    /// Its standard error, larger where the equations contradict each other.
    pub error: f64,
}

/// The costs under which the equations hold best; none where they do not tell the unknowns apart.
pub fn solve(equations: &[Equation]) -> Option<Vec<Cost>> {
    let unknowns = equations.first()?.counts.len();
    let mut normal = vec![vec![0.0; unknowns]; unknowns];
    let mut right = vec![0.0; unknowns];
    for equation in equations {
        let weight = equation.error.powi(-2);
        for (row, count) in equation.counts.iter().enumerate() {
            *right.get_mut(row)? += weight * count * equation.time;
            for (column, other) in equation.counts.iter().enumerate() {
                *normal.get_mut(row)?.get_mut(column)? += weight * count * other;
            }
        }
    }
    let values = not_below_zero(&normal, &right)?;
    let disagreement = disagreement(equations, &values);
    // Of all unknowns, those without a cost too: it may be above zero by as much.
    let inverse = inverse(normal)?;
    let costs = values.iter().enumerate().map(|(index, value)| {
        let variance = inverse.get(index).and_then(|row| row.get(index)).copied()?;
        Some(Cost {
            value: *value,
            error: (variance * disagreement).max(0.0).sqrt(),
        })
    });
    costs.collect()
}

/// The unknowns that solve the normal equations. While one is below zero the lowest is left out, with 0 as its value,
/// and the others are solved for anew.
fn not_below_zero(normal: &[Vec<f64>], right: &[f64]) -> Option<Vec<f64>> {
    let mut kept: Vec<usize> = (0..right.len()).collect();
    loop {
        let of = |row: &Vec<f64>| kept.iter().map(|column| row.get(*column).copied()).collect();
        let part: Option<Vec<Vec<f64>>> = kept.iter().map(|row| normal.get(*row).and_then(of)).collect();
        let inverse = inverse(part?)?;
        let right_of = |(index, entry): (&usize, &f64)| right.get(*index).map_or(0.0, |value| entry * value);
        let solved: Vec<f64> = inverse
            .iter()
            .map(|row| kept.iter().zip(row).map(right_of).sum())
            .collect();
        let lowest = solved
            .iter()
            .enumerate()
            .filter(|(_, value)| **value < 0.0)
            .min_by(|(_, a), (_, b)| a.total_cmp(b));
        if let Some((place, _)) = lowest {
            kept.remove(place);
            continue;
        }
        let mut values = vec![0.0; right.len()];
        for (index, value) in kept.iter().zip(solved) {
            *values.get_mut(*index)? = value;
        }
        return Some(values);
    }
}

/// By how much squared residuals exceed what the equations' own errors explain; at least 1.
fn disagreement(equations: &[Equation], values: &[f64]) -> f64 {
    let squares: f64 = equations
        .iter()
        .map(|equation| {
            let predicted: f64 = equation.counts.iter().zip(values).map(|(a, b)| a * b).sum();
            ((equation.time - predicted) / equation.error).powi(2)
        })
        .sum();
    let freedom = equations.len().saturating_sub(values.len());
    if freedom == 0 {
        return 1.0;
    }
    (squares / super::lossless(freedom)).max(1.0)
}

/// The inverse of a symmetric positive definite matrix, by Gauss and Jordan with its diagonal scaled to 1.
fn inverse(mut matrix: Vec<Vec<f64>>) -> Option<Vec<Vec<f64>>> {
    /// A pivot below this, of 1 at first, tells nothing.
    const LEAST_PIVOT: f64 = 1e-10;
    let size = matrix.len();
    let diagonal = (0..size).map(|index| matrix.get(index)?.get(index).copied());
    let scales: Vec<f64> = diagonal
        .collect::<Option<Vec<f64>>>()?
        .into_iter()
        .map(f64::sqrt)
        .collect();
    if scales.iter().any(|scale| !scale.is_normal()) {
        return None;
    }
    for (row, scale) in matrix.iter_mut().zip(&scales) {
        row.iter_mut()
            .zip(&scales)
            .for_each(|(entry, other)| *entry /= scale * other);
        row.resize(2 * size, 0.0);
    }
    for (index, row) in matrix.iter_mut().enumerate() {
        *row.get_mut(size + index)? = 1.0;
    }
    for pivot in 0..size {
        let mut pivot_row = matrix.get(pivot)?.clone();
        let head = *pivot_row.get(pivot)?;
        if head < LEAST_PIVOT {
            return None;
        }
        pivot_row.iter_mut().for_each(|entry| *entry /= head);
        for (index, row) in matrix.iter_mut().enumerate() {
            if index == pivot {
                row.clone_from(&pivot_row);
                continue;
            }
            let factor = *row.get(pivot)?;
            row.iter_mut()
                .zip(&pivot_row)
                .for_each(|(entry, other)| *entry -= factor * other);
        }
    }
    let unscaled = matrix.into_iter().zip(&scales).map(|(row, scale)| {
        let entries = row.into_iter().skip(size).zip(&scales);
        entries.map(|(entry, other)| entry / (scale * other)).collect()
    });
    Some(unscaled.collect())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn equation(counts: &[f64], time: f64, error: f64) -> Equation {
        Equation {
            counts: counts.to_vec(),
            time,
            error,
        }
    }

    #[test]
    fn costs_of_exact_times_come_out_exactly_whatever_the_weights() {
        let truth = [0.3, 0.02, 5.0];
        let counts = [
            [4.0, 0.0, 1.0],
            [12.0, 0.0, 1.0],
            [1.0, 4.0, 1.0],
            [1.0, 12.0, 1.0],
            [30.0, 30.0, 1.0],
        ];
        let equations: Vec<Equation> = counts
            .iter()
            .enumerate()
            .map(|(index, counts)| {
                let time = counts.iter().zip(truth).map(|(a, b)| a * b).sum();
                equation(counts, time, 0.01 * (index as f64 + 1.0))
            })
            .collect();
        for (cost, true_cost) in solve(&equations).unwrap().iter().zip(truth) {
            assert!((cost.value - true_cost).abs() < 1e-9, "{cost:?} for {true_cost}");
        }
    }

    #[test]
    fn a_surer_time_moves_costs_more_and_contradictions_widen_errors() {
        let with = |last: f64, error: f64| {
            let equations = [
                equation(&[1.0, 1.0], 2.0, 0.1),
                equation(&[5.0, 1.0], 6.0, 0.1),
                equation(&[9.0, 1.0], last, error),
            ];
            solve(&equations).unwrap()[0]
        };
        let (agreed, sure, unsure) = (with(10.0, 0.1), with(12.0, 0.1), with(12.0, 1.0));
        assert!((agreed.value - 1.0).abs() < 1e-9);
        assert!(
            sure.value > unsure.value && unsure.value > 1.0,
            "{sure:?} {unsure:?}"
        );
        assert!(sure.error > 2.0 * agreed.error, "{sure:?} {agreed:?}");
    }

    #[test]
    fn equations_that_do_not_tell_unknowns_apart_have_no_solution_and_no_cost_is_below_zero() {
        assert_eq!(solve(&[]), None);
        let alike = [equation(&[1.0, 2.0], 3.0, 0.1), equation(&[2.0, 4.0], 6.0, 0.1)];
        assert_eq!(solve(&alike), None);
        let falling = [equation(&[1.0, 1.0], 3.0, 0.1), equation(&[2.0, 1.0], 2.9, 0.1)];
        assert!((solve(&falling).unwrap()[0].value).abs() < f64::EPSILON);
    }

    #[test]
    fn where_one_cost_would_be_below_zero_the_others_still_meet_the_times() {
        // A base of -0.3, which all models would be too slow by if it were only cut off.
        let depths = [2.0, 10.0, 20.0];
        let equations = depths.map(|depth| equation(&[depth, 1.0], depth - 0.3, 0.1));
        let [block, base] = solve(&equations).unwrap()[..] else {
            unreachable!("two unknowns");
        };
        assert!(base.value.abs() < f64::EPSILON && base.error > 0.1, "{base:?}");
        // The best line through the origin.
        let expected = (2.0 * 1.7 + 10.0 * 9.7 + 20.0 * 19.7) / (4.0 + 100.0 + 400.0);
        assert!((block.value - expected).abs() < 1e-9, "{block:?}");
        assert_eq!(
            not_below_zero(&[vec![1.0]], &[-1.0]),
            Some(vec![0.0]),
            "nothing is left to fit"
        );
    }
}
