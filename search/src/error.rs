//! What can be wrong with limits, cost tables and searches.

use crate::{Metric, Point};

/// What can be wrong with limits, cost tables and searches.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    /// A limit that cannot be read.
    #[error("{metric}: `{value}` {reason}")]
    LimitText {
        /// Which limit.
        metric: Metric,
        /// What stands there.
        value: String,
        /// Why it is wrong and what would be right.
        reason: String,
    },
    /// No limit at all.
    #[error("no limit is given, expected at least one of {}", Metric::NAMES)]
    NoLimit,
    /// A limit relative to a figure of the parent that is not known.
    #[error(
        "{metric}: the parent's own figure is not known yet, so a share of it has no meaning here: give an absolute limit"
    )]
    NoParentFigure {
        /// Which limit.
        metric: Metric,
    },
    /// A workload that asks for nothing.
    #[error("workload: {field} is 0, expected at least 1")]
    EmptyWorkload {
        /// Which field.
        field: &'static str,
    },
    /// Requests that the parent has no positions for.
    #[error(
        "workload: prompt_tokens + output_tokens is {longest}, expected at most {most}, the positions the parent was made for"
    )]
    Positions {
        /// Tokens of a request.
        longest: usize,
        /// Positions of the parent.
        most: usize,
    },
    /// A shape that was not timed.
    #[error("the cost table has no row for {subject} at {point}: profile it first")]
    MissingRow {
        /// What was looked up.
        subject: String,
        /// Under which load.
        point: Point,
    },
    /// A load or a size outside those measured.
    #[error(
        "the cost table has {subject} at {axis} {least} to {most}, but {asked} is asked for: profile it there; times \
         are extrapolated only where that is asked for"
    )]
    Extrapolation {
        /// What was looked up.
        subject: String,
        /// What it was measured at: `contexts`, `sequences`, `channels`.
        axis: &'static str,
        /// What is asked for.
        asked: usize,
        /// The least measured.
        least: usize,
        /// The most measured.
        most: usize,
    },
    /// A row that is no time.
    #[error("the cost table has {value} ms for {subject} at {point}, expected a finite time of at least 0")]
    BadRow {
        /// What was timed.
        subject: String,
        /// Under which load.
        point: Point,
        /// What stands there.
        value: f64,
    },
    /// A table measured at another hidden width.
    #[error(
        "the cost table was measured at hidden width {table}, but the model's is {model}: give a table of this model, or \
         profile it"
    )]
    HiddenWidth {
        /// The table's.
        table: usize,
        /// The model's.
        model: usize,
    },
    /// A search space that does not fit the parent.
    #[error("{field}: {reason}")]
    Space {
        /// The field of the search space.
        field: &'static str,
        /// What is wrong and what would be right.
        reason: String,
    },
    /// A variant without a score.
    #[error("block {block} has no score for {variant}: score it first")]
    MissingScore {
        /// Index into the parent's list of blocks.
        block: usize,
        /// The variant.
        variant: String,
    },
    /// A problem whose rows do not agree with each other, or that holds what is no number.
    #[error("solver: {0}")]
    Problem(String),
    /// What the shapes themselves refuse.
    #[error("{0}")]
    Shape(String),
}

impl From<espalier_arch::Error> for Error {
    fn from(error: espalier_arch::Error) -> Self {
        Self::Shape(error.to_string())
    }
}

/// A result whose error is this crate's.
pub type Result<T> = std::result::Result<T, Error>;
