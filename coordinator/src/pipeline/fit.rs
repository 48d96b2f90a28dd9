//! Choosing and checking, for each strategy until its choice is measured inside the limits.
//!
//! Heterogeneous: solve → check. Uniform: grid → rank → check. A check that misses a limit, or shows the
//! prediction wrong, corrects the cost model by the measured ratio, and the strategy chooses anew; where that leads to
//! nothing, the last choice stands that was measured inside the limits, however wrongly it was predicted. So does a first
//! choice that doubts had give much away, where what its check told leads to none better. A noisy check is repeated as it
//! is. An imported cost table is believed: its one check is read, and corrects nothing.
//! [`standing`] reads the checks; here is what follows from them.

mod standing;

use espalier_arch::Architecture;
use espalier_proto::task::{Check, Ingested, MeasuredPair, ParentRef, Profiled, Rank, TaskSpec};
use espalier_search::heterogeneous::{self, Choice, Impossible, LEAST_MARGIN, Library, Question, choose};
use espalier_search::running::roomiest;
use espalier_search::solver::Options;
use espalier_search::uniform::{GridPoint, aim, grid};
use espalier_search::{AbsoluteLimit, Bound, Corrections, CostModel, Metric};
use standing::{Learnt, Standing};

use super::compare::pace;
use super::context::Context;
use super::tasks::task;
use super::{Chosen, Decision, Plan, PlanError, PlannedStage, SolverProof, Stage};
use crate::spec::Strategy;

/// Alternations of a check.
const CHECK_REPEATS: usize = 7;
/// Points of the uniform grid that are ranked by KL.
const RANKED_POINTS: usize = 12;
/// Points of the Pareto front.
const FRONT_POINTS: usize = 15;

/// A choice that was measured inside the limits.
pub(super) struct Accepted<'a> {
    pub(super) chosen: &'a Chosen,
    pub(super) pair: &'a MeasuredPair,
    /// Checks that there were.
    pub(super) round: u32,
    /// What the reader should know.
    pub(super) notes: Vec<String>,
}

/// What choosing and checking came to.
pub(super) struct Fitted<'a> {
    /// The choices, heterogeneous first; at least one.
    pub(super) accepted: Vec<Accepted<'a>>,
    /// Why there is no baseline, where it could not meet the limits.
    pub(super) notes: Vec<String>,
}

/// Plans what choosing and checking need next; every strategy's accepted choice once all have one. A baseline
/// that cannot have one is left out.
pub(super) fn advance<'a>(
    context: &Context<'a>,
    ingested: &'a Ingested,
    profiled: &'a Profiled,
    parent: &ParentRef,
    plan: &mut Plan,
) -> Result<Option<Fitted<'a>>, PlanError> {
    let fit = Fit {
        context: *context,
        ingested,
        profiled,
    };
    let mut fitted = Fitted {
        accepted: Vec::new(),
        notes: Vec::new(),
    };
    let strategies = context.strategies();
    for &strategy in &strategies {
        match fit.advance(strategy, parent, plan) {
            Ok(Some(accepted)) => fitted.accepted.push(accepted),
            Ok(None) => {}
            Err(reason @ (PlanError::NoUniform | PlanError::Missed { .. } | PlanError::TooNoisy { .. }))
                if strategy == Strategy::Uniform && strategies.len() > 1 =>
            {
                fitted
                    .notes
                    .push(format!("there is no uniform baseline: {reason}"));
            }
            Err(error) => return Err(error),
        }
    }
    let settled = fitted.accepted.len() + fitted.notes.len() == strategies.len();
    Ok(settled.then_some(fitted))
}

/// What checks of heterogeneous choices have taught so far. It stands also where it left nothing to choose.
pub(super) fn taught(context: &Context<'_>, ingested: &Ingested, profiled: &Profiled) -> Corrections {
    let fit = Fit {
        context: *context,
        ingested,
        profiled,
    };
    match fit.standing(Strategy::Heterogeneous) {
        Ok(Standing::Choose { last: Some(last), .. }) if fit.has_gone_on() => {
            return last.chosen.corrections.clone();
        }
        Ok(Standing::Choose { learnt, .. }) => return learnt.corrections,
        _ => {}
    }
    let stages = context.results.stages.values().rev();
    let mut decisions = stages.filter_map(|stage| stage.decision.as_ref());
    let last = decisions.find_map(|decision| match decision {
        Decision::Chosen(chosen) if chosen.strategy == Strategy::Heterogeneous => {
            Some(chosen.corrections.clone())
        }
        _ => None,
    });
    last.unwrap_or_default()
}

struct Fit<'a> {
    context: Context<'a>,
    ingested: &'a Ingested,
    profiled: &'a Profiled,
}

impl<'a> Fit<'a> {
    fn architecture(&self) -> &'a Architecture {
        &self.ingested.architecture
    }

    /// Whether the stages after every check are planned.
    fn has_gone_on(&self) -> bool {
        let planned = |stage| self.context.results.planned(stage);
        planned(Stage::Recover) || planned(Stage::Evaluate)
    }

    /// The strategy's accepted choice; where it has none yet, plans what that needs next.
    fn advance(
        &self,
        strategy: Strategy,
        parent: &ParentRef,
        plan: &mut Plan,
    ) -> Result<Option<Accepted<'a>>, PlanError> {
        let (chosen, round, notes) = match self.standing(strategy)? {
            Standing::Accepted(choice) => return Ok(Some(*choice)),
            Standing::Waiting => return Ok(None),
            Standing::Repeat { chosen, round, notes } => (Some(chosen.clone()), round, notes),
            Standing::Choose {
                learnt,
                round,
                last,
                notes,
            } => {
                let chosen = match strategy {
                    Strategy::Heterogeneous => self.solve(&learnt),
                    Strategy::Uniform => self.uniform(&learnt, parent, plan),
                };
                match (chosen, last) {
                    (Err(reason @ (PlanError::Impossible(_) | PlanError::NoUniform)), Some(last)) => {
                        return Ok(Some(last.stands(round - 1, notes, &reason)));
                    }
                    (Ok(Some(other)), Some(last)) if last.is_as_good_as(&other) => {
                        let reason = "no better one was found with what its check told";
                        return Ok(Some(last.stands(round - 1, notes, &reason)));
                    }
                    // Results of a version that chose by other rules: the student that is trained stays the one.
                    (Ok(Some(_)), Some(last)) if self.has_gone_on() => {
                        let reason = "what follows was planned for it";
                        return Ok(Some(last.stands(round - 1, notes, &reason)));
                    }
                    (chosen, _) => (chosen?, round, notes),
                }
            }
        };
        if let Some(chosen) = chosen {
            plan.stages
                .push(self.check(chosen, round, notes.last().cloned())?);
        }
        Ok(None)
    }

    /// Prices and limits, on the machine as it was when profiled. An absolute limit on time is for the machine as it is
    /// now, so it is brought there by the pace.
    fn model(&self, learnt: &Learnt<'_>) -> Result<(CostModel, Vec<AbsoluteLimit>), PlanError> {
        let model = self
            .context
            .cost_model(self.architecture(), self.profiled, &learnt.corrections)?;
        let mut limits = self.context.limits(self.architecture(), self.profiled)?;
        for (limit, asked) in limits.iter_mut().zip(self.context.spec.target.limits.iter()) {
            if matches!(asked.bound, Bound::Absolute(_)) {
                limit.value /= self.pace(limit.metric, learnt);
            }
        }
        Ok((model, limits))
    }

    /// The machine's, by the last check; 1 before the first.
    fn pace(&self, metric: Metric, learnt: &Learnt<'_>) -> f64 {
        learnt
            .beside
            .map_or(1.0, |pair| pace(metric, pair, &self.profiled.parent))
    }

    /// What can be reached, on the machine as it is now.
    fn now(&self, mut impossible: Impossible, learnt: &Learnt<'_>) -> Impossible {
        for reach in &mut impossible.limits {
            let pace = self.pace(reach.limit.metric, learnt);
            for value in [&mut reach.limit.value, &mut reach.alone, &mut reach.together] {
                *value *= pace;
            }
        }
        impossible
    }

    /// The heterogeneous choice, once scores are there.
    fn solve(&self, learnt: &Learnt<'_>) -> Result<Option<Chosen>, PlanError> {
        let Some(scores) = self.context.scores()? else {
            return Ok(None);
        };
        let (mut model, limits) = self.model(learnt)?;
        let variants = self.context.space().all_variants(self.architecture())?;
        let question = Question {
            parent: self.architecture(),
            variants: &variants,
            scores: Some(&scores),
            limits: &limits,
            count: 1,
            distance: 1,
        };
        let choices = match choose(&question, &mut model, &Options::default())? {
            heterogeneous::Fitted::Found(choices) => choices,
            heterogeneous::Fitted::Impossible(impossible) => {
                return Err(PlanError::Impossible(Box::new(self.now(impossible, learnt))));
            }
        };
        let front = match limits.first() {
            Some(limit) => {
                let coarse = Options {
                    relative_gap: 1e-3,
                    work: 20_000_000,
                };
                let library = Library::new(self.architecture(), &variants, &scores, &model)?;
                library.front(limit.metric, &[], FRONT_POINTS, &coarse)?
            }
            None => Vec::new(),
        };
        Ok(choices.into_iter().next().map(|choice| {
            let running = self.fewer(choice.running);
            chosen_of(choice, limits, learnt.corrections.clone(), front, running)
        }))
    }

    /// Sequences that run together, where fewer than the workload's requests do.
    fn fewer(&self, running: usize) -> Option<usize> {
        (running < self.context.workload().concurrency).then_some(running)
    }

    /// The uniform choice, once depth order and ranks are there; plans a ranking where one is needed.
    fn uniform(
        &self,
        learnt: &Learnt<'_>,
        parent: &ParentRef,
        plan: &mut Plan,
    ) -> Result<Option<Chosen>, PlanError> {
        let Some(order) = self.context.depth_order()? else {
            return Ok(None);
        };
        let (mut model, limits) = self.model(learnt)?;
        let mut round = 1;
        while self.context.results.planned(Stage::Rank { round }) {
            let Some(divergences) = self.context.ranked(round)? else {
                return Ok(None);
            };
            let points = self.grid_of(round)?;
            if points.len() != divergences.len() {
                let reason = format!(
                    "{} divergences came, expected {}",
                    divergences.len(),
                    points.len()
                );
                return Err(PlanError::Mismatch {
                    stage: Stage::Rank { round },
                    reason,
                });
            }
            let best = self.best_ranked(points, divergences, &mut model, &limits, &learnt.corrections)?;
            if let Some(chosen) = best {
                return Ok(Some(chosen));
            }
            round += 1;
        }
        let space = self.context.space();
        let points = grid(
            self.architecture(),
            &space,
            order,
            &mut model,
            &limits,
            LEAST_MARGIN,
            RANKED_POINTS,
        )?;
        if points.is_empty() {
            return Err(PlanError::NoUniform);
        }
        let candidates = points.iter().map(|point| point.candidate.clone()).collect();
        let rank = Rank {
            parent: parent.clone(),
            candidates,
            shard: self.ingested.scoring.clone(),
        };
        plan.stages.push(PlannedStage {
            stage: Stage::Rank { round },
            tasks: vec![task("rank", TaskSpec::Rank(rank))],
            decision: Some(Decision::Grid(points)),
            reason: None,
        });
        Ok(None)
    }

    fn grid_of(&self, round: u32) -> Result<&'a [GridPoint], PlanError> {
        let stage = Stage::Rank { round };
        match self.context.results.decision(stage) {
            Some(Decision::Grid(points)) => Ok(points),
            _ => Err(PlanError::Mismatch {
                stage,
                reason: "its decision is missing from the results".to_owned(),
            }),
        }
    }

    /// The ranked point of least KL that the model, as corrected, still predicts inside.
    fn best_ranked(
        &self,
        points: &[GridPoint],
        divergences: &[f64],
        model: &mut CostModel,
        limits: &[AbsoluteLimit],
        corrections: &Corrections,
    ) -> Result<Option<Chosen>, PlanError> {
        let mut order: Vec<(&GridPoint, f64)> = points.iter().zip(divergences.iter().copied()).collect();
        order.sort_by(|a, b| a.1.total_cmp(&b.1));
        let aimed: Vec<AbsoluteLimit> = limits.iter().map(|limit| aim(limit, LEAST_MARGIN)).collect();
        for (point, divergence) in order {
            let architecture = self.architecture().with_candidate(&point.candidate)?;
            if let Some((running, prediction)) = roomiest(model, &architecture, &aimed)? {
                return Ok(Some(Chosen {
                    strategy: Strategy::Uniform,
                    candidate: point.candidate.clone(),
                    prediction,
                    limits: limits.to_vec(),
                    margin: LEAST_MARGIN,
                    running: self.fewer(running),
                    notes: Vec::new(),
                    corrections: corrections.clone(),
                    solved: None,
                    divergence: Some(divergence),
                    front: Vec::new(),
                }));
            }
        }
        Ok(None)
    }

    fn check(&self, chosen: Chosen, round: u32, reason: Option<String>) -> Result<PlannedStage, PlanError> {
        let check = Check {
            parent: self.architecture().clone(),
            architecture: self.architecture().with_candidate(&chosen.candidate)?,
            workload: self.context.workload(),
            running: chosen.running,
            repeats: CHECK_REPEATS,
            engine: self.context.spec.target.task_engine(),
        };
        Ok(PlannedStage {
            stage: Stage::Check {
                strategy: chosen.strategy,
                round,
            },
            tasks: vec![task("check", TaskSpec::Check(check))],
            decision: Some(Decision::Chosen(Box::new(chosen))),
            reason,
        })
    }
}

fn chosen_of(
    choice: Choice,
    limits: Vec<AbsoluteLimit>,
    corrections: Corrections,
    front: Vec<heterogeneous::FrontPoint>,
    running: Option<usize>,
) -> Chosen {
    Chosen {
        strategy: Strategy::Heterogeneous,
        notes: choice.notes(),
        candidate: choice.candidate,
        prediction: choice.prediction,
        limits,
        margin: choice.margin,
        running,
        corrections,
        solved: Some(SolverProof {
            score: choice.score,
            bound: choice.score_bound,
            gap: choice.gap,
        }),
        divergence: None,
        front,
    }
}
