//! Why a job cannot go on.

use espalier_search::heterogeneous::{Impossible, Reachable};

use super::Stage;
use crate::spec::Strategy;

/// Why a job cannot go on.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum PlanError {
    /// A field of the spec does not fit the parent or the data.
    #[error("{0}")]
    Invalid(String),
    /// No variant of the parent is inside the limits.
    #[error("target.limits: no model of the search space is inside {}", describe(.0))]
    Impossible(Box<Impossible>),
    /// No point of the uniform grid is inside the limits.
    #[error(
        "target.limits: no uniform model of the grid is inside them; loosen a limit, give a finer search.mlp_grid or \
         smaller search.kv_groups, or leave uniform out of search.strategies"
    )]
    NoUniform,
    /// Every choice that was checked missed a limit or its prediction.
    #[error(
        "none of {} checks of the {strategy} choice was inside the limits and as predicted ({}); loosen the limit or use a \
         quieter machine",
        misses.len(),
        misses.join("; ")
    )]
    Missed {
        /// Whose.
        strategy: Strategy,
        /// What each check measured.
        misses: Vec<String>,
    },
    /// Measurements that cannot tell whether the limits are met.
    #[error("{stage}: too noisy, {measurements} times in a row: {reason}")]
    TooNoisy {
        /// Which measurement.
        stage: Stage,
        /// How often it was measured.
        measurements: u32,
        /// What was wrong with the last one, and what to do.
        reason: String,
    },
    /// A stage gave another kind or number of outputs than it was asked for.
    #[error("{stage}: {reason}")]
    Mismatch {
        /// Which stage.
        stage: Stage,
        /// What was expected, and what came.
        reason: String,
    },
    /// What the search itself refuses.
    #[error(transparent)]
    Search(#[from] espalier_search::Error),
}

impl From<espalier_arch::Error> for PlanError {
    fn from(error: espalier_arch::Error) -> Self {
        Self::Search(error.into())
    }
}

/// Each limit with the best that can be reached, and what should be known beside.
fn describe(impossible: &Impossible) -> String {
    let limits = Reachable::describe(&impossible.limits);
    std::iter::once(limits)
        .chain(impossible.notes())
        .collect::<Vec<_>>()
        .join("; ")
}
