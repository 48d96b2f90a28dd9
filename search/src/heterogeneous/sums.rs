//! One combination of a limit over the variants of every block: what a choice comes to, and linear constraints that hold
//! wherever it does.

use std::rc::Rc;

use crate::predict::{Cone, Coordinate, Priced, Share};
use crate::solver::TOLERANCE;

/// A [`Cone`] over the variants of every block.
#[derive(Debug)]
pub(super) struct Sum {
    deviations: f64,
    bound: f64,
    /// Coordinates of the vector of errors.
    coordinates: usize,
    base: Entry,
    groups: Vec<Vec<Entry>>,
}

/// What the base or one variant adds.
#[derive(Debug, Default)]
struct Entry {
    value: f64,
    /// (coordinate, error), each coordinate at most once.
    errors: Vec<(usize, f64)>,
}

/// A linear constraint: what each variant of each block uses, and the most that a choice may use.
#[derive(Debug, Clone)]
pub(super) struct Row {
    pub(super) uses: Vec<Vec<f64>>,
    pub(super) limit: f64,
}

impl Row {
    /// Whether the solver, which forgives rounding, would refuse this choice for this row alone.
    pub(super) fn refuses(&self, chosen: &[usize]) -> bool {
        let picked = self.uses.iter().zip(chosen);
        let used: f64 = picked.filter_map(|(group, &item)| group.get(item)).sum();
        let largest = self
            .uses
            .iter()
            .flatten()
            .fold(self.limit.abs(), |largest, amount| largest.max(amount.abs()));
        used - self.limit > 1.01 * TOLERANCE * largest
    }
}

impl Sum {
    pub(super) fn new(cone: &Cone, base: &Priced, groups: &[Vec<Rc<Priced>>]) -> Self {
        let mut known: Vec<Coordinate> = Vec::new();
        let mut entry = |priced: &Priced| {
            let Share { value, errors } = cone.share(priced);
            let mut placed = Vec::with_capacity(errors.len());
            for (coordinate, error) in errors {
                let place = known.iter().position(|other| *other == coordinate);
                let place = place.unwrap_or_else(|| {
                    known.push(coordinate);
                    known.len() - 1
                });
                placed.push((place, error));
            }
            Entry {
                value,
                errors: placed,
            }
        };
        let base = entry(base);
        let groups = groups
            .iter()
            .map(|group| group.iter().map(|priced| entry(priced)).collect())
            .collect();
        Self {
            deviations: cone.deviations,
            bound: cone.bound,
            coordinates: known.len(),
            base,
            groups,
        }
    }

    /// Whether errors count, so that the sum is no linear one.
    pub(super) fn is_doubted(&self) -> bool {
        self.deviations > 0.0
    }

    fn parts<'a>(&'a self, chosen: &'a [usize]) -> impl Iterator<Item = &'a Entry> {
        let picked = self.groups.iter().zip(chosen);
        std::iter::once(&self.base).chain(picked.filter_map(|(group, &item)| group.get(item)))
    }

    /// Errors by coordinate, and their norm.
    fn errors(&self, chosen: &[usize]) -> (Vec<f64>, f64) {
        let mut errors = vec![0.0; self.coordinates];
        for (place, error) in self.parts(chosen).flat_map(|entry| &entry.errors) {
            if let Some(sum) = errors.get_mut(*place) {
                *sum += error;
            }
        }
        let norm = errors.iter().map(|error| error * error).sum::<f64>().sqrt();
        (errors, norm)
    }

    /// The sum at confidence: values and as many standard errors as are asked for.
    pub(super) fn worth(&self, chosen: &[usize]) -> f64 {
        let value: f64 = self.parts(chosen).map(|entry| entry.value).sum();
        if self.is_doubted() {
            value + self.deviations * self.errors(chosen).1
        } else {
            value
        }
    }

    /// Share of the bound that the sum at confidence is.
    pub(super) fn share(&self, chosen: &[usize]) -> f64 {
        self.worth(chosen) / self.bound.max(f64::MIN_POSITIVE)
    }

    /// What one variant adds if no other adds to its errors: never less than what it adds.
    pub(super) fn alone(&self, group: usize, item: usize) -> f64 {
        let entry = self.groups.get(group).and_then(|items| items.get(item));
        entry.map_or(0.0, |entry| {
            let squares = entry.errors.iter().map(|(_, error)| error * error);
            entry.value + self.deviations * squares.sum::<f64>().sqrt()
        })
    }

    /// The constraint along the errors of `chosen`: every choice inside the cone keeps it, and `chosen` exactly if it is
    /// inside.
    pub(super) fn row(&self, chosen: &[usize]) -> Row {
        let direction = if self.is_doubted() {
            let (mut errors, norm) = self.errors(chosen);
            for error in &mut errors {
                *error = if norm > 0.0 { *error / norm } else { 0.0 };
            }
            errors
        } else {
            Vec::new()
        };
        let along = |entry: &Entry| -> f64 {
            let each = entry.errors.iter();
            let errors: f64 = each
                .filter_map(|(place, error)| Some(direction.get(*place)? * error))
                .sum();
            entry.value + self.deviations * errors
        };
        Row {
            uses: self
                .groups
                .iter()
                .map(|group| group.iter().map(along).collect())
                .collect(),
            limit: self.bound - along(&self.base),
        }
    }
}
