//! What a job has found out that later questions are answered from: its scores, and what its blocks cost.

use espalier_arch::Architecture;
use espalier_search::plan::Known;
use espalier_search::{Corrections, Score};
use serde::{Deserialize, Serialize};

use super::context::Context;
use super::{Outcome, ProfileOutcome, Results, fit, import};
use crate::spec::{CostTableFile, JobSpec, Strategy};

/// What a job has found out so far.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Findings {
    /// What was asked.
    pub spec: JobSpec,
    /// The parent's shape.
    pub architecture: Architecture,
    /// Score of every variant that was scored.
    pub scores: Vec<Score>,
    /// What blocks cost on its target; none while that is not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost_table: Option<CostTableFile>,
    /// What checks of heterogeneous choices taught of that table; nothing in what an older version told.
    #[serde(default, skip_serializing_if = "Corrections::are_none")]
    pub corrections: Corrections,
}

impl Findings {
    /// Of a job that has not ended.
    ///
    /// # Errors
    /// When its blocks are not scored yet, one line.
    pub fn of_results(spec: &JobSpec, results: &Results) -> Result<Self, String> {
        let context = Context { spec, results };
        let told = |error: super::PlanError| error.to_string();
        let ingested = context.ingested().map_err(told)?;
        let scores = context.scores().map_err(told)?;
        // Only the heterogeneous search scores.
        let none = (!context.strategies().contains(&Strategy::Heterogeneous)).then(Vec::new);
        let (Some(ingested), Some(scores)) = (ingested, scores.or(none)) else {
            return Err("it has no scores yet: ask again once its stage score is done".to_owned());
        };
        let spec = &*import::settled(spec, &ingested.architecture);
        let context = Context { spec, results };
        let profiled = context.profiled().map_err(told)?;
        let cost_table =
            profiled.map(|profiled| import::exported(&context, &ingested.architecture, profiled));
        let corrections = profiled.map(|profiled| fit::taught(&context, ingested, profiled));
        Ok(Self {
            spec: spec.clone(),
            architecture: ingested.architecture.clone(),
            scores,
            cost_table,
            corrections: corrections.unwrap_or_default(),
        })
    }

    /// Of a job that has ended.
    ///
    /// # Errors
    /// What is wrong with its outcome, one line that begins with its verb.
    pub fn of_outcome(outcome: &str) -> Result<Self, String> {
        let wrong = match serde_json::from_str::<Outcome>(outcome) {
            Ok(outcome) => return Ok(Self::from(outcome)),
            Err(wrong) => wrong,
        };
        if ProfileOutcome::read(outcome).is_some() {
            return Err(
                "is of a job that measured its target and scored nothing; give the outcome of a job that scored, and this \
                 one's cost-table.json with --table"
                    .to_owned(),
            );
        }
        Err(format!("is no report of a job: {wrong}"))
    }

    /// What the search knows of it.
    ///
    /// # Errors
    /// When it scored no variants, one line: nothing but the whole parent could be answered with.
    pub fn known(&self) -> Result<Known, String> {
        if self.scores.is_empty() {
            return Err(
                "it scored no variants, as heterogeneous is not among its search.strategies; ask of a job that has it"
                    .to_owned(),
            );
        }
        Ok(Known::new(self.architecture.clone(), self.scores.clone()))
    }
}

impl From<Outcome> for Findings {
    fn from(outcome: Outcome) -> Self {
        Self {
            spec: outcome.spec,
            architecture: outcome.parent.architecture,
            scores: outcome.scores,
            cost_table: outcome.cost_table,
            corrections: outcome.corrections,
        }
    }
}
