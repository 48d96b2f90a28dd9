//! Mean KL to the parent with its standard error over sequences.

use espalier_model::Tensor;
use espalier_model::ops::{Head, Layout, Operations};

use crate::Result;

/// Sums of several students' divergences, sequence by sequence.
#[derive(Debug)]
pub(super) struct Divergences {
    means: Vec<Vec<f64>>,
    tokens: u64,
}

/// A mean over sequences.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Mean {
    /// The mean.
    pub mean: f64,
    /// Standard error of the mean; 0 for one sequence.
    pub error: f64,
}

impl Divergences {
    /// For as many students.
    pub fn new(students: usize) -> Self {
        Self {
            means: vec![Vec::new(); students],
            tokens: 0,
        }
    }

    /// Adds a batch: each student's final hidden states against the parent's.
    pub fn add(
        &mut self,
        operations: &dyn Operations,
        students: &[Tensor],
        student_head: &Tensor,
        parent: Head<'_>,
        layout: Layout,
    ) -> Result<()> {
        let heads: Vec<Head<'_>> = students
            .iter()
            .map(|hidden| Head {
                hidden,
                weight: student_head,
            })
            .collect();
        let losses = operations.distillation_many(&heads, parent)?;
        for (means, losses) in self.means.iter_mut().zip(losses) {
            means.extend(sequence_means(&operations.download(&losses)?, layout));
        }
        self.tokens += layout.rows() as u64;
        Ok(())
    }

    /// Tokens of every student.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Each student's mean.
    pub fn means(&self) -> Vec<Mean> {
        self.means.iter().map(|means| mean(means)).collect()
    }
}

/// The mean over each sequence's rows.
pub(super) fn sequence_means(losses: &[f32], layout: Layout) -> Vec<f64> {
    losses
        .chunks(layout.tokens.max(1))
        .map(|rows| rows.iter().map(|loss| f64::from(*loss)).sum::<f64>() / count(rows.len()))
        .collect()
}

/// Mean and its standard error.
pub(super) fn mean(values: &[f64]) -> Mean {
    let n = count(values.len().max(1));
    let mean = values.iter().sum::<f64>() / n;
    if values.len() < 2 {
        return Mean { mean, error: 0.0 };
    }
    let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (n - 1.0);
    Mean {
        mean,
        error: (variance / n).sqrt(),
    }
}

#[allow(clippy::cast_precision_loss)] // counts of rows and sequences, far below 2^53
pub(super) fn count(value: usize) -> f64 {
    value as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_standard_error_is_that_of_the_mean() {
        let found = mean(&[1.0, 2.0, 3.0, 4.0]);
        assert!((found.mean - 2.5).abs() < 1e-12);
        assert!((found.error - (5.0_f64 / 3.0 / 4.0).sqrt()).abs() < 1e-12);
    }
}
