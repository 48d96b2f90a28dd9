//! One subject's rows by load, and its time at any load between them.

use super::CONTEXT_STEP;
use super::sampled::{Outside, Sampled, Source, across, between, share};
use crate::{CostRow, Error, Point, Result, Subject};

/// What a time is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Load {
    /// `sequences` prompts of `tokens` each, at once.
    Prefill { tokens: usize, sequences: usize },
    /// `steps` decode steps from `context` on, one token more of context at each.
    Decode {
        context: usize,
        steps: usize,
        sequences: usize,
    },
}

impl Load {
    /// The first point of it, for messages.
    pub(super) fn point(self) -> Point {
        match self {
            Self::Prefill { tokens, sequences } => Point::Prefill { tokens, sequences },
            Self::Decode {
                context, sequences, ..
            } => Point::Decode { context, sequences },
        }
    }

    /// What its axes are called.
    pub(super) fn axis(self, axis: usize) -> &'static str {
        match (self, axis) {
            (Self::Prefill { .. }, 0) => "prompts of tokens",
            (Self::Decode { .. }, 0) => "contexts",
            _ => "sequences",
        }
    }
}

/// The rows of one subject.
#[derive(Debug)]
pub(super) struct Measured {
    index: usize,
    prefill: Vec<Row>,
    decode: Vec<Row>,
}

/// Sorted by sequences, then by tokens or context.
#[derive(Debug, Clone, Copy)]
struct Row {
    sequences: usize,
    at: usize,
    median: f64,
    error: f64,
}

impl Measured {
    pub(super) fn new(index: usize) -> Self {
        Self {
            index,
            prefill: Vec::new(),
            decode: Vec::new(),
        }
    }

    /// Takes a row.
    ///
    /// # Errors
    /// When it holds what is no time.
    pub(super) fn insert(&mut self, row: &CostRow) -> Result<()> {
        for value in [row.median_ms, row.spread_ms] {
            if !value.is_finite() || value < 0.0 {
                return Err(Error::BadRow {
                    subject: row.subject.to_string(),
                    point: row.point,
                    value,
                });
            }
        }
        let (rows, at, sequences) = match row.point {
            Point::Prefill { tokens, sequences } => (&mut self.prefill, tokens, sequences),
            Point::Decode { context, sequences } => (&mut self.decode, context, sequences),
        };
        let row = Row {
            sequences,
            at,
            median: row.median_ms,
            error: row.error_ms(),
        };
        let place = rows.partition_point(|known| (known.sequences, known.at) < (sequences, at));
        match rows.get_mut(place) {
            // The first of two rows at one point counts.
            Some(known) if (known.sequences, known.at) == (sequences, at) => {}
            _ => rows.insert(place, row),
        }
        Ok(())
    }

    /// Whether there is any row of this kind of load.
    pub(super) fn has(&self, load: Load) -> bool {
        !self.rows(load).is_empty()
    }

    fn rows(&self, load: Load) -> &[Row] {
        match load {
            Load::Prefill { .. } => &self.prefill,
            Load::Decode { .. } => &self.decode,
        }
    }

    /// The time under `load`: measured there, or on straight lines between the tokens or contexts and between the
    /// numbers of sequences that were.
    pub(super) fn at(&self, load: Load, extrapolate: bool) -> std::result::Result<Sampled, Outside> {
        let between_loads = Source::Loads(self.index);
        let each = self
            .rows(load)
            .chunk_by(|one, other| one.sequences == other.sequences);
        let ways = each.map(|rows| {
            let time = match load {
                Load::Prefill { tokens, .. } => {
                    let points: Vec<_> = rows.iter().map(|row| (row.at, self.sampled(row))).collect();
                    between(&points, tokens, between_loads, extrapolate)
                }
                Load::Decode { context, steps, .. } => self.run(rows, context, steps, extrapolate),
            };
            (rows.first().map_or(0, |row| row.sequences), time)
        });
        let (Load::Prefill { sequences, .. } | Load::Decode { sequences, .. }) = load;
        across(ways.collect(), sequences, between_loads, extrapolate)
    }

    fn sampled(&self, row: &Row) -> Sampled {
        Sampled::new(row.median, Source::Rows(self.index), row.error)
    }

    /// Total of `steps` decode steps from `context` on. Time is linear in context between measured ones. Each row
    /// enters with the sum of its weights, so that its error does too; different rows were timed apart.
    fn run(
        &self,
        rows: &[Row],
        context: usize,
        steps: usize,
        extrapolate: bool,
    ) -> std::result::Result<Sampled, Outside> {
        let last = context.saturating_add(steps.saturating_sub(1));
        let shortest = rows.first().map_or(0, |row| row.at);
        let longest = rows.last().map_or(0, |row| row.at);
        let mut asked = [context, last].into_iter();
        if let Some(asked) = asked.find(|end| *end < shortest || *end > longest)
            && (!extrapolate || rows.len() < 2)
        {
            return Err(Outside {
                axis: 0,
                asked,
                least: shortest,
                most: longest,
            });
        }
        let total = |weights: &[f64]| -> f64 {
            rows.iter()
                .zip(weights)
                .map(|(row, weight)| row.median * weight)
                .sum()
        };
        let weights = weights(rows, context, last);
        let squares = rows
            .iter()
            .zip(&weights)
            .map(|(row, weight)| (row.error * weight).powi(2));
        let value = total(&weights).max(0.0);
        let mut found = Sampled::new(value, Source::Rows(self.index), squares.sum::<f64>().sqrt());
        found.add_error(Source::Loads(self.index), unseen(rows, context, last));
        if context < shortest || last > longest {
            // What lies beyond is in doubt by all that it adds to standing still at the end.
            let inner = weights_clamped(rows, context, last);
            found.add_error(Source::Loads(self.index), (value - total(&inner)).abs());
        }
        Ok(found)
    }
}

/// Sums of the linear interpolation weights of every context from `first` to `last`, for each row.
#[allow(clippy::cast_precision_loss)] // contexts are far below 2^53
fn weights(rows: &[Row], first: usize, last: usize) -> Vec<f64> {
    let mut weights = vec![0.0; rows.len()];
    if rows.len() == 1 {
        weights.fill((last - first + 1) as f64);
        return weights;
    }
    for (index, pair) in rows.windows(2).enumerate() {
        let [low, high] = pair else { continue };
        // A context that was measured belongs to the line that begins there; the ends reach beyond.
        let from = if index == 0 { first } else { first.max(low.at) };
        let to = if index + 2 == rows.len() {
            last
        } else {
            last.min(high.at - 1)
        };
        if from > to {
            continue;
        }
        let count = (to - from + 1) as f64;
        // The mean of evenly spaced shares is that of the first and the last.
        let mean = (share(low.at, high.at, from) + share(low.at, high.at, to)) / 2.0;
        for (place, weight) in [(index, 1.0 - mean), (index + 1, mean)] {
            if let Some(sum) = weights.get_mut(place) {
                *sum += count * weight;
            }
        }
    }
    weights
}

/// How far the steps from `first` to `last` may lie off the lines that span more than [`CONTEXT_STEP`], as the rows of
/// workloads far apart do. A line between a and b that bends by κ is off by κ·(x − a)·(b − x) at x, which is at most
/// half of the ends' difference where times lie between these. κ is the largest that a row shows against its neighbours.
#[allow(clippy::cast_precision_loss)] // contexts are far below 2^53
fn unseen(rows: &[Row], first: usize, last: usize) -> f64 {
    let bends = rows.windows(3).filter_map(|window| match window {
        [low, row, high] => {
            let share = share(low.at, high.at, row.at);
            let off = row.median - low.median * (1.0 - share) - high.median * share;
            let reach = (row.at - low.at) as f64 * (high.at - row.at) as f64;
            Some(off.abs() / reach)
        }
        _ => None,
    });
    let bend = bends.reduce(f64::max).unwrap_or(f64::INFINITY);
    let gaps = rows.windows(2).filter_map(|pair| match pair {
        [low, high] => {
            let (from, to) = (first.max(low.at), last.min(high.at));
            (high.at - low.at > CONTEXT_STEP && from <= to).then_some((low, high, from, to))
        }
        _ => None,
    });
    let off = gaps.map(|(low, high, from, to)| {
        let width = (high.at - low.at) as f64;
        let count = (to - from + 1) as f64;
        // Shares s evenly spaced: the mean of s·(1 − s) by their mean and variance.
        let mean = (share(low.at, high.at, from) + share(low.at, high.at, to)) / 2.0;
        let variance = (count * count - 1.0) / (12.0 * width * width);
        let parabolas = count * (mean - mean * mean - variance);
        let most = 2.0 * (high.median - low.median).abs();
        (bend * width * width).min(most) * parabolas.max(0.0)
    });
    off.sum()
}

/// The same with every context beyond the measured ones counted as the nearest measured.
#[allow(clippy::cast_precision_loss)] // contexts are far below 2^53
fn weights_clamped(rows: &[Row], first: usize, last: usize) -> Vec<f64> {
    let (Some(low), Some(high)) = (rows.first(), rows.last()) else {
        return Vec::new();
    };
    let (from, to) = (first.max(low.at), last.min(high.at));
    let mut inner = if from <= to {
        weights(rows, from, to)
    } else {
        vec![0.0; rows.len()]
    };
    let below = low.at.min(last + 1).saturating_sub(first);
    let above = (last + 1).saturating_sub((high.at + 1).max(first));
    if let Some(weight) = inner.first_mut() {
        *weight += below as f64;
    }
    if let Some(weight) = inner.last_mut() {
        *weight += above as f64;
    }
    inner
}

/// A name that tells subjects apart wherever their time could differ.
pub(super) fn key(subject: &Subject) -> String {
    match subject {
        Subject::Base { vocab_size } => format!("base of {vocab_size} entries"),
        Subject::Block(shape) => block_key(shape),
        Subject::HostFloor | Subject::HostBlock | Subject::HostAlone => subject.to_string(),
    }
}

/// [`key`] of a block.
pub(super) fn block_key(shape: &espalier_arch::BlockShape) -> String {
    format!("{shape:?}")
}
