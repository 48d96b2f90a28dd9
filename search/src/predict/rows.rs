//! The cost table's rows by subject and point, with interpolation in context.

use std::collections::HashMap;

use espalier_arch::BlockShape;

use crate::{CostTable, Error, Point, Result, Subject};

/// A time and how sure it is, both in milliseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Time {
    pub(super) median: f64,
    /// Standard error of the median.
    pub(super) error: f64,
}

/// For a normal distribution: σ is 1.4826 of the median absolute deviation, and the median of n has a
/// standard error of √(π/2)·σ/√n.
const ERROR_OF_MEDIAN: f64 = 1.4826 * 1.253_314_137_315_5;

/// Every subject's times.
#[derive(Debug)]
pub(super) struct Rows {
    times: HashMap<String, Vec<(Point, Time)>>,
}

impl Rows {
    /// # Errors
    /// When a row holds what is no time.
    pub(super) fn new(table: &CostTable) -> Result<Self> {
        let mut times: HashMap<String, Vec<(Point, Time)>> = HashMap::new();
        for row in &table.rows {
            let subject = key(&row.subject);
            for value in [row.median_ms, row.spread_ms] {
                if !value.is_finite() || value < 0.0 {
                    return Err(Error::BadRow {
                        subject,
                        point: row.point,
                        value,
                    });
                }
            }
            #[allow(clippy::cast_precision_loss)] // a handful of repeats
            let repeats = row.repeats.max(1) as f64;
            let error = ERROR_OF_MEDIAN * row.spread_ms / repeats.sqrt();
            times.entry(subject).or_default().push((
                row.point,
                Time {
                    median: row.median_ms,
                    error,
                },
            ));
        }
        for rows in times.values_mut() {
            rows.sort_by_key(|(point, _)| *point);
        }
        Ok(Self { times })
    }

    /// Time at exactly this point.
    pub(super) fn at(&self, subject: &str, point: Point) -> Result<Time> {
        self.times
            .get(subject)
            .and_then(|rows| rows.iter().find(|(measured, _)| *measured == point))
            .map(|(_, time)| *time)
            .ok_or_else(|| Error::MissingRow {
                subject: subject.to_owned(),
                point,
            })
    }

    /// Total of `steps` decode steps from `context` on, one token more of context at each.
    ///
    /// Each measured row enters with the sum of its interpolation weights, so that its error does too.
    pub(super) fn decode(
        &self,
        subject: &str,
        context: usize,
        steps: usize,
        sequences: usize,
    ) -> Result<Time> {
        let rows: Vec<(usize, Time)> = self
            .times
            .get(subject)
            .into_iter()
            .flatten()
            .filter_map(|(point, time)| match point {
                Point::Decode {
                    context,
                    sequences: measured,
                } if *measured == sequences => Some((*context, *time)),
                _ => None,
            })
            .collect();
        let (Some(&(shortest, _)), Some(&(longest, _))) = (rows.first(), rows.last()) else {
            return Err(Error::MissingRow {
                subject: subject.to_owned(),
                point: Point::Decode { context, sequences },
            });
        };
        let last = context + steps.saturating_sub(1);
        for end in [context, last] {
            if end < shortest || end > longest {
                return Err(Error::Extrapolation {
                    subject: subject.to_owned(),
                    context: end,
                    shortest,
                    longest,
                });
            }
        }
        let mut weights = vec![0.0; rows.len()];
        for step in context..=last {
            spread_weight(&rows, step, &mut weights);
        }
        let median = rows
            .iter()
            .zip(&weights)
            .map(|((_, time), weight)| time.median * weight)
            .sum();
        let variance: f64 = rows
            .iter()
            .zip(&weights)
            .map(|((_, time), weight)| (time.error * weight).powi(2))
            .sum();
        Ok(Time {
            median,
            error: variance.sqrt(),
        })
    }
}

/// Adds the linear interpolation weights of `context` to its two neighbours' (one, where it was measured).
#[allow(clippy::cast_precision_loss)] // contexts are far below 2^53
fn spread_weight(rows: &[(usize, Time)], context: usize, weights: &mut [f64]) {
    let above = rows.partition_point(|(measured, _)| *measured < context);
    let Some(&(high, _)) = rows.get(above) else { return };
    let share = match above.checked_sub(1).and_then(|below| rows.get(below)) {
        Some(&(low, _)) if high > context => (context - low) as f64 / (high - low) as f64,
        _ => 1.0,
    };
    if let Some(weight) = weights.get_mut(above) {
        *weight += share;
    }
    if let Some(weight) = above.checked_sub(1).and_then(|below| weights.get_mut(below)) {
        *weight += 1.0 - share;
    }
}

/// A name that tells shapes apart wherever their time could differ.
pub(super) fn key(subject: &Subject) -> String {
    match subject {
        Subject::Base { vocab_size } => format!("base of {vocab_size} entries"),
        Subject::Block(shape) => block_key(shape),
        Subject::HostFloor => "the host's floor".to_owned(),
    }
}

/// [`key`] of a block.
pub(super) fn block_key(shape: &BlockShape) -> String {
    format!("{shape:?}")
}
