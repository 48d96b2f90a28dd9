//! What the checks of one strategy say so far: which choice stands, or what comes next.

use std::fmt::Display;

use espalier_proto::task::MeasuredPair;
use espalier_search::{Corrections, Metric};

use super::{Accepted, Fit};
use crate::pipeline::compare::{corrections, missed, reading};
use crate::pipeline::context::block_parameters;
use crate::pipeline::outcome::Reading;
use crate::pipeline::{
    Chosen, Decision, MOST_CORRECTIONS, MOST_DOUBT, MOST_DRIFT, MOST_MISPREDICTION, MOST_NOISY, PlanError,
    Stage,
};
use crate::spec::Strategy;

/// What the checks of one strategy say so far.
pub(super) enum Standing<'a> {
    Accepted(Box<Accepted<'a>>),
    /// A stage that was planned is still running, or waits for one that is.
    Waiting,
    /// Choose, with what was learnt, and check in this round.
    Choose {
        learnt: Learnt<'a>,
        round: u32,
        /// What stands where there is no other choice.
        last: Option<Last<'a>>,
        notes: Vec<String>,
    },
    /// Measure the same choice again in this round.
    Repeat {
        chosen: &'a Chosen,
        round: u32,
        notes: Vec<String>,
    },
}

/// What a check has taught; nothing before the first.
#[derive(Debug, Clone, Default)]
pub(super) struct Learnt<'a> {
    /// Of the cost model, whatever the machine's pace is.
    pub(super) corrections: Corrections,
    /// The check, which tells that pace.
    pub(super) beside: Option<&'a MeasuredPair>,
}

/// The last choice that a quiet check measured inside the limits, though not as predicted or with much to spare.
#[derive(Debug, Clone, Copy)]
pub(super) struct Last<'a> {
    stage: Stage,
    pub(super) chosen: &'a Chosen,
    pair: &'a MeasuredPair,
    as_predicted: bool,
}

impl<'a> Last<'a> {
    /// Whether it is known to be inside as surely as another choice would be, and at least as good as that.
    pub(super) fn is_as_good_as(&self, other: &Chosen) -> bool {
        let score = |chosen: &Chosen| chosen.solved.map_or(f64::INFINITY, |solved| solved.score);
        self.as_predicted && score(self.chosen) <= score(other)
    }

    /// Lets it stand after `round` checks, because of `reason` there is no other.
    pub(super) fn stands(self, round: u32, mut notes: Vec<String>, reason: &impl Display) -> Accepted<'a> {
        notes.push(format!(
            "the choice of {} stands, which was inside the limits: {reason}",
            self.stage
        ));
        notes.extend(self.chosen.notes.iter().cloned());
        Accepted {
            chosen: self.chosen,
            pair: self.pair,
            round,
            notes,
        }
    }
}

impl<'a> Fit<'a> {
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
    pub(super) fn standing(&self, strategy: Strategy) -> Result<Standing<'a>, PlanError> {
        let mut notes = Vec::new();
        let mut learnt = Learnt::default();
        let mut misses: Vec<String> = Vec::new();
        let mut last: Option<Last<'a>> = None;
        let mut noisy = 0;
        let ended = |last: Option<Last<'a>>, round, notes, reason| match last {
            Some(last) => Ok(Standing::Accepted(Box::new(last.stands(round, notes, &reason)))),
            None => Err(reason),
        };
        for round in 1.. {
            let stage = Stage::Check { strategy, round };
            if !self.context.results.planned(stage) {
                return Ok(match self.last_chosen(strategy, round) {
                    Some(chosen) if noisy > 0 => Standing::Repeat { chosen, round, notes },
                    _ => Standing::Choose {
                        learnt,
                        round,
                        last,
                        notes,
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
                    let reason = self.context.noisy(stage, pair, noisy);
                    return ended(last, round, notes, reason);
                }
                notes.push(format!("{stage} was noisy and was measured again"));
                continue;
            }
            noisy = 0;
            let readings = self.readings(chosen, pair)?;
            let inside = readings.iter().all(|(_, reading)| reading.inside);
            // A time that drifted is clear of its limit, and says little of its prediction.
            let drifted = |metric: Metric| metric.is_timed() && pair.drift > MOST_DRIFT;
            let predicted = readings
                .iter()
                .all(|(metric, reading)| drifted(*metric) || reading.error.abs() <= MOST_MISPREDICTION);
            // A choice after a check stands with what doubt is left; of a time that drifted there is little to learn.
            let doubted = chosen.margin > MOST_DOUBT
                && chosen.corrections.checked.is_none()
                && pair.drift <= MOST_DRIFT;
            if inside && (predicted && !doubted || misses.len() >= MOST_CORRECTIONS) {
                notes.extend(chosen.notes.iter().cloned());
                return Ok(Standing::Accepted(Box::new(Accepted {
                    chosen,
                    pair,
                    round,
                    notes,
                })));
            }
            if inside {
                last = Some(Last {
                    stage,
                    chosen,
                    pair,
                    as_predicted: predicted,
                });
            }
            learnt = self.learnt(chosen, pair);
            if inside && predicted {
                notes.push(format!(
                    "the choice of {stage} was inside the limits with {:.0}% to spare for doubts of its prediction; its check \
                     told most of them{}",
                    100.0 * chosen.margin,
                    self.choice_after(chosen, strategy, round)
                ));
                continue;
            }
            let figures = missed(&readings);
            misses.push(format!("{stage}: {figures}"));
            if misses.len() > MOST_CORRECTIONS {
                return ended(last, round, notes, PlanError::Missed { strategy, misses });
            }
            let what = if inside {
                "was predicted wrongly"
            } else {
                "missed a limit"
            };
            notes.push(format!(
                "the choice of {stage} {what} ({figures}); the cost table was corrected{}",
                self.choice_after(chosen, strategy, round)
            ));
        }
        Ok(Standing::Waiting)
    }

    /// The corrections of a choice's prediction that would have met what was measured.
    fn learnt(&self, chosen: &Chosen, pair: &'a MeasuredPair) -> Learnt<'a> {
        let workload = self.context.workload();
        Learnt {
            corrections: corrections(chosen, pair, &self.profiled.parent, workload),
            beside: Some(pair),
        }
    }

    /// What was chosen after this one, in words; empty where nothing was.
    fn choice_after(&self, chosen: &Chosen, strategy: Strategy, round: u32) -> &'static str {
        let next = Stage::Check {
            strategy,
            round: round + 1,
        };
        match self.context.results.decision(next) {
            Some(Decision::Chosen(next))
                if next.candidate == chosen.candidate && next.running == chosen.running =>
            {
                " and gave the same choice again"
            }
            Some(_) => " and a new choice made",
            None => "",
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
}
