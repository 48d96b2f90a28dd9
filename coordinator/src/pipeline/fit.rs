//! Choosing and checking, for each strategy until its choice is measured inside the limits.
//!
//! Heterogeneous: solve → check. Uniform: grid → rank → check. A check that misses a limit, or shows the
//! prediction wrong, corrects the cost model by the measured ratio, and the strategy chooses anew. A noisy check
//! is repeated as it is. An imported cost table is believed: its one check is read, and corrects nothing.

use espalier_arch::Architecture;
use espalier_proto::task::{Check, Ingested, MeasuredPair, ParentRef, Profiled, Rank, TaskSpec};
use espalier_search::heterogeneous::{self, Choice, LEAST_MARGIN, Library, Question, choose};
use espalier_search::running::{roomiest, waits};
use espalier_search::solver::Options;
use espalier_search::uniform::{GridPoint, aim, grid};
use espalier_search::{AbsoluteLimit, Corrections, CostModel, Metric};

use super::compare::{corrections, missed, reading};
use super::context::{Context, block_parameters};
use super::outcome::Reading;
use super::tasks::task;
use super::{
    Chosen, Decision, MOST_CORRECTIONS, MOST_MISPREDICTION, MOST_NOISY, Plan, PlanError, PlannedStage,
    SolverProof, Stage,
};
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
    /// The check that accepted it.
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

/// What the checks of one strategy say so far.
enum Standing<'a> {
    Accepted(Box<Accepted<'a>>),
    /// A stage that was planned is still running, or waits for one that is.
    Waiting,
    /// Choose, with what was learnt, and check in this round.
    Choose {
        corrections: Corrections,
        round: u32,
    },
    /// Measure the same choice again in this round.
    Repeat {
        chosen: &'a Chosen,
        round: u32,
    },
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

struct Fit<'a> {
    context: Context<'a>,
    ingested: &'a Ingested,
    profiled: &'a Profiled,
}

impl<'a> Fit<'a> {
    fn architecture(&self) -> &'a Architecture {
        &self.ingested.architecture
    }

    /// The strategy's accepted choice; where it has none yet, plans what that needs next.
    fn advance(
        &self,
        strategy: Strategy,
        parent: &ParentRef,
        plan: &mut Plan,
    ) -> Result<Option<Accepted<'a>>, PlanError> {
        let (chosen, round) = match self.standing(strategy)? {
            Standing::Accepted(choice) => return Ok(Some(*choice)),
            Standing::Waiting => return Ok(None),
            Standing::Repeat { chosen, round } => (Some(chosen.clone()), round),
            Standing::Choose { corrections, round } => match strategy {
                Strategy::Heterogeneous => (self.solve(corrections)?, round),
                Strategy::Uniform => (self.uniform(corrections, parent, plan)?, round),
            },
        };
        if let Some(chosen) = chosen {
            plan.stages.push(self.check(chosen, round)?);
        }
        Ok(None)
    }

    /// The choice by an imported table, whatever its check says; what it says is noted.
    fn believed(&self, stage: Stage, round: u32, pair: &'a MeasuredPair) -> Result<Accepted<'a>, PlanError> {
        let chosen = self.chosen(stage)?;
        let mut notes = chosen.notes.clone();
        if self.context.too_noisy(pair) {
            notes.push(format!("{stage} was noisy and says little"));
        }
        for (metric, reading) in self.readings(chosen, pair)? {
            if reading.inside && reading.error.abs() <= MOST_MISPREDICTION {
                continue;
            }
            notes.push(format!(
                "by the imported cost table {metric} would be {} here, {stage} measured {} where {} is allowed; \
                 an imported table is not corrected",
                metric.display(reading.predicted),
                metric.display(reading.value),
                metric.display(reading.limit)
            ));
        }
        Ok(Accepted {
            chosen,
            pair,
            round,
            notes,
        })
    }

    /// Goes through the strategy's checks in order.
    fn standing(&self, strategy: Strategy) -> Result<Standing<'a>, PlanError> {
        let mut notes = Vec::new();
        let mut learnt = Corrections::default();
        let mut misses: Vec<String> = Vec::new();
        let mut noisy = 0;
        for round in 1.. {
            let stage = Stage::Check { strategy, round };
            if !self.context.results.planned(stage) {
                return Ok(match self.last_chosen(strategy, round) {
                    Some(chosen) if noisy > 0 => Standing::Repeat { chosen, round },
                    _ => Standing::Choose {
                        corrections: learnt,
                        round,
                    },
                });
            }
            let Some(pair) = self.context.measured(stage)? else {
                return Ok(Standing::Waiting);
            };
            if self.context.imported()?.is_some() {
                return Ok(Standing::Accepted(Box::new(self.believed(stage, round, pair)?)));
            }
            let chosen = self.chosen(stage)?;
            if self.context.too_noisy(pair) {
                noisy += 1;
                if noisy >= MOST_NOISY {
                    return Err(PlanError::TooNoisy {
                        stage,
                        drift: pair.drift,
                        disturbed: pair.disturbed,
                        measurements: noisy,
                    });
                }
                notes.push(format!("{stage} was noisy and was measured again"));
                continue;
            }
            noisy = 0;
            let readings = self.readings(chosen, pair)?;
            let inside = readings.iter().all(|(_, reading)| reading.inside);
            let predicted = readings
                .iter()
                .all(|(_, reading)| reading.error.abs() <= MOST_MISPREDICTION);
            if inside && (predicted || misses.len() >= MOST_CORRECTIONS) {
                notes.extend(chosen.notes.iter().cloned());
                return Ok(Standing::Accepted(Box::new(Accepted {
                    chosen,
                    pair,
                    round,
                    notes,
                })));
            }
            misses.push(missed(stage, &readings));
            if misses.len() > MOST_CORRECTIONS {
                return Err(PlanError::Missed { strategy, misses });
            }
            learnt = self.learnt(chosen, pair);
            let what = if inside {
                "was predicted wrongly"
            } else {
                "missed a limit"
            };
            notes.push(format!(
                "the choice of {stage} {what}; the cost table was corrected and {}",
                self.choice_after(chosen, strategy, round)
            ));
        }
        Ok(Standing::Waiting)
    }

    /// The corrections of a choice's prediction that would have met what was measured.
    fn learnt(&self, chosen: &Chosen, pair: &MeasuredPair) -> Corrections {
        let concurrency = self.context.workload().concurrency;
        corrections(
            chosen.corrections,
            &self.context.spec.target.limits,
            pair,
            &self.profiled.parent,
            &chosen.prediction,
            waits(concurrency, chosen.running.unwrap_or(concurrency)),
        )
    }

    /// What was chosen after this one, in words.
    fn choice_after(&self, chosen: &Chosen, strategy: Strategy, round: u32) -> &'static str {
        let next = Stage::Check {
            strategy,
            round: round + 1,
        };
        match self.context.results.decision(next) {
            Some(Decision::Chosen(next))
                if next.candidate == chosen.candidate && next.running == chosen.running =>
            {
                "gave the same choice again"
            }
            _ => "a new choice made",
        }
    }

    fn last_chosen(&self, strategy: Strategy, round: u32) -> Option<&'a Chosen> {
        let stage = Stage::Check {
            strategy,
            round: round.checked_sub(1)?,
        };
        match self.context.results.decision(stage) {
            Some(Decision::Chosen(chosen)) => Some(chosen),
            _ => None,
        }
    }

    fn chosen(&self, stage: Stage) -> Result<&'a Chosen, PlanError> {
        match self.context.results.decision(stage) {
            Some(Decision::Chosen(chosen)) => Ok(chosen),
            _ => Err(PlanError::Mismatch {
                stage,
                reason: "its decision is missing from the results".to_owned(),
            }),
        }
    }

    /// Every limit as a check reads it.
    fn readings(&self, chosen: &Chosen, pair: &MeasuredPair) -> Result<Vec<(Metric, Reading)>, PlanError> {
        let candidate = self.architecture().with_candidate(&chosen.candidate)?;
        let parameters = (
            block_parameters(self.architecture()),
            block_parameters(&candidate),
        );
        let limits = self.context.spec.target.limits.iter();
        Ok(limits
            .filter_map(|limit| {
                let reading = reading(
                    &limit,
                    pair,
                    parameters,
                    &self.profiled.parent,
                    &chosen.prediction,
                )?;
                Some((limit.metric, reading))
            })
            .collect())
    }

    fn model(&self, corrections: Corrections) -> Result<(CostModel, Vec<AbsoluteLimit>), PlanError> {
        let model = self
            .context
            .cost_model(self.architecture(), self.profiled, corrections)?;
        Ok((model, self.context.limits(self.architecture(), self.profiled)?))
    }

    /// The heterogeneous choice, once scores are there.
    fn solve(&self, corrections: Corrections) -> Result<Option<Chosen>, PlanError> {
        let Some(scores) = self.context.scores()? else {
            return Ok(None);
        };
        let (mut model, limits) = self.model(corrections)?;
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
                return Err(PlanError::Impossible(Box::new(impossible)));
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
            chosen_of(choice, limits, corrections, front, running)
        }))
    }

    /// Sequences that run together, where fewer than the workload's requests do.
    fn fewer(&self, running: usize) -> Option<usize> {
        (running < self.context.workload().concurrency).then_some(running)
    }

    /// The uniform choice, once depth order and ranks are there; plans a ranking where one is needed.
    fn uniform(
        &self,
        corrections: Corrections,
        parent: &ParentRef,
        plan: &mut Plan,
    ) -> Result<Option<Chosen>, PlanError> {
        let Some(order) = self.context.depth_order()? else {
            return Ok(None);
        };
        let (mut model, limits) = self.model(corrections)?;
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
            if let Some(chosen) = self.best_ranked(points, divergences, &mut model, &limits, corrections)? {
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
        corrections: Corrections,
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
                    corrections,
                    solved: None,
                    divergence: Some(divergence),
                    front: Vec::new(),
                }));
            }
        }
        Ok(None)
    }

    fn check(&self, chosen: Chosen, round: u32) -> Result<PlannedStage, PlanError> {
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
