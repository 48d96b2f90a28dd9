//! From accepted choices to the outcome: recover, evaluate, export, verify.

mod summary;

use espalier_arch::{Architecture, Variant};
use espalier_proto::task::{
    ArtifactId, Evaluate, Export, Exported, Ingested, MeasuredPair, ParentRef, Profiled, Quality, Recipe,
    Recover, Recovered, Student, TaskOutput, TaskSpec, Verify,
};

use super::context::Context;
use super::fit::{Accepted, Fitted};
use super::outcome::LimitReport;
use super::tasks::{offer, task};
use super::{Decision, MOST_NOISY, Plan, PlanError, PlannedStage, PlannedTask, Results, Stage, Winner};
use crate::spec::JobSpec;

/// Alternations of the last measurement.
const VERIFY_REPEATS: usize = 9;

/// Plans what comes after the checks; the outcome once the export is verified.
pub(super) fn advance(
    context: &Context<'_>,
    ingested: &Ingested,
    profiled: &Profiled,
    parent: &ParentRef,
    fitted: &Fitted<'_>,
    plan: &mut Plan,
) -> Result<(), PlanError> {
    let tail = Tail {
        context: *context,
        ingested,
        profiled,
        parent,
        accepted: &fitted.accepted,
    };
    let trains = tail.recovery_tokens() > 0;
    if trains {
        offer(plan, context.results, Stage::Recover, || tail.recover())?;
    }
    let recovered = tail.recovered()?;
    if trains && recovered.is_empty() {
        return Ok(());
    }
    offer(plan, context.results, Stage::Evaluate, || {
        Ok(tail.evaluate(&recovered))
    })?;
    let Some(qualities) = tail.qualities(!recovered.is_empty())? else {
        return Ok(());
    };
    if !context.results.planned(Stage::Export) {
        plan.stages.push(tail.export(&qualities, &recovered)?);
        return Ok(());
    }
    let Some(exported) = tail.exported()? else {
        return Ok(());
    };
    if let Some((pair, mut notes)) = tail.verified(exported, plan)? {
        notes.splice(..0, fitted.notes.iter().cloned());
        plan.finished = Some(Box::new(
            tail.outcome(&qualities, &recovered, exported, pair, notes)?,
        ));
    }
    Ok(())
}

/// Refuses more pipeline stages than a model that is to be cut into them has blocks.
pub(super) fn refuse_stages(spec: &JobSpec, whose: &str, blocks: usize) -> Result<(), PlanError> {
    let stages = spec.recovery.pipeline_stages;
    let fit = stages == 1 || usize::try_from(stages).is_ok_and(|stages| stages <= blocks);
    if spec.budget.recovery_tokens == 0 || fit {
        return Ok(());
    }
    Err(PlanError::Invalid(format!(
        "recovery.pipeline_stages: found {stages}, expected at most {blocks}, the blocks of {whose}: a stage needs one of \
         its own"
    )))
}

/// The parent's quality, and each strategy's before and after.
struct Qualities<'a> {
    parent: &'a Quality,
    each: Vec<(&'a Quality, Option<&'a Quality>)>,
}

struct Tail<'a> {
    context: Context<'a>,
    ingested: &'a Ingested,
    profiled: &'a Profiled,
    parent: &'a ParentRef,
    accepted: &'a [Accepted<'a>],
}

impl<'a> Tail<'a> {
    fn architecture(&self) -> &'a Architecture {
        &self.ingested.architecture
    }

    /// What was asked, or all that the data gave.
    fn recovery_tokens(&self) -> u64 {
        let there: u64 = self.ingested.recovery.iter().map(shard_tokens).sum();
        self.context.spec.budget.recovery_tokens.min(there)
    }

    /// One task a strategy, all with the same tokens in the same order.
    fn recover(&self) -> Result<Vec<PlannedTask>, PlanError> {
        for accepted in self.accepted {
            let variants = &accepted.chosen.candidate.variants;
            let kept = variants
                .iter()
                .filter(|variant| **variant != Variant::Skip)
                .count();
            let whose = format!("the {} choice", accepted.chosen.strategy);
            refuse_stages(self.context.spec, &whose, kept)?;
        }
        let recovery = &self.context.spec.recovery;
        let recipe = Recipe {
            tokens: self.recovery_tokens(),
            batch_sequences: recovery.batch_sequences,
            learning_rate: recovery.learning_rate,
            warmup: recovery.warmup,
            final_share: recovery.final_share,
            clip: recovery.clip,
            betas: recovery.betas,
            weight_decay: recovery.weight_decay,
            checkpoint_steps: recovery.checkpoint_steps,
            seed: self.context.spec.seed,
            ranks: recovery.ranks,
            pipeline_stages: recovery.pipeline_stages,
        };
        let each = self.accepted.iter().map(|accepted| {
            let recover = Recover {
                parent: self.parent.clone(),
                candidate: accepted.chosen.candidate.clone(),
                shards: self.ingested.recovery.clone(),
                recipe: recipe.clone(),
                resume: None,
            };
            task(accepted.chosen.strategy.to_string(), TaskSpec::Recover(recover))
        });
        Ok(each.collect())
    }

    /// One for each strategy, or none at all.
    fn recovered(&self) -> Result<Vec<&'a Recovered>, PlanError> {
        let each = self.context.each(Stage::Recover, |output| match output {
            TaskOutput::Recover(recovered) => Some(recovered),
            _ => None,
        })?;
        let Some(each) = each else { return Ok(Vec::new()) };
        expect_count(Stage::Recover, each.len(), self.accepted.len())?;
        Ok(each)
    }

    /// The parent, then each strategy before recovery, and after it where it was trained.
    fn evaluate(&self, recovered: &[&Recovered]) -> Vec<PlannedTask> {
        let evaluate = |name: String, student: Option<Student>| {
            let spec = Evaluate {
                parent: self.parent.clone(),
                student,
                validation: self.ingested.validation.clone(),
                benchmarks: self.context.spec.evaluate.benchmarks.clone(),
                benchmark_examples: self.context.spec.evaluate.examples,
            };
            task(name, TaskSpec::Evaluate(spec))
        };
        let mut tasks = vec![evaluate("parent".to_owned(), None)];
        for (index, accepted) in self.accepted.iter().enumerate() {
            let strategy = accepted.chosen.strategy;
            tasks.push(evaluate(
                format!("{strategy}-before"),
                Some(student(accepted, None)),
            ));
            if let Some(recovered) = recovered.get(index) {
                let weights = Some(recovered.weights.clone());
                tasks.push(evaluate(
                    format!("{strategy}-after"),
                    Some(student(accepted, weights)),
                ));
            }
        }
        tasks
    }

    fn qualities(&self, trained: bool) -> Result<Option<Qualities<'a>>, PlanError> {
        let each = self.context.each(Stage::Evaluate, |output| match output {
            TaskOutput::Evaluate(quality) => Some(quality),
            _ => None,
        })?;
        let Some(each) = each else { return Ok(None) };
        let of_each = if trained { 2 } else { 1 };
        expect_count(Stage::Evaluate, each.len(), 1 + of_each * self.accepted.len())?;
        let mut qualities = each.into_iter();
        let (Some(parent), mut pairs) = (qualities.next(), Vec::new()) else {
            return Ok(None);
        };
        while let Some(before) = qualities.next() {
            let after = if trained { qualities.next() } else { None };
            pairs.push((before, after));
        }
        Ok(Some(Qualities { parent, each: pairs }))
    }

    /// Exports the strategy, trained or not, that is nearest to the parent on held-out text.
    fn export(&self, qualities: &Qualities<'_>, recovered: &[&Recovered]) -> Result<PlannedStage, PlanError> {
        let Some(output) = &self.context.spec.output else {
            let message = "output: missing, expected the directory to write the outcome to";
            return Err(PlanError::Invalid(message.to_owned()));
        };
        let best = qualities
            .each
            .iter()
            .zip(self.accepted)
            .enumerate()
            .min_by(|(_, (a, _)), (_, (b, _))| best_of(a).0.total_cmp(&best_of(b).0));
        let Some((index, (quality, accepted))) = best else {
            return Err(PlanError::Mismatch {
                stage: Stage::Evaluate,
                reason: "no strategy was evaluated".to_owned(),
            });
        };
        let (_, is_recovered) = best_of(quality);
        let weights = recovered
            .get(index)
            .filter(|_| is_recovered)
            .map(|recovered| recovered.weights.clone());
        let export = Export {
            parent: self.parent.clone(),
            student: student(accepted, weights),
            directory: format!("{}/checkpoint", output.trim_end_matches('/')),
        };
        let winner = Winner {
            strategy: accepted.chosen.strategy,
            recovered: is_recovered,
        };
        Ok(PlannedStage {
            stage: Stage::Export,
            tasks: vec![task("export", TaskSpec::Export(export))],
            decision: Some(Decision::Winner(winner)),
            reason: None,
        })
    }

    fn exported(&self) -> Result<Option<&'a Exported>, PlanError> {
        let each = self.context.each(Stage::Export, |output| match output {
            TaskOutput::Export(exported) => Some(exported),
            _ => None,
        })?;
        Ok(each.and_then(|each| each.into_iter().next()))
    }

    /// The last measurement, once it is quiet and inside the limits; plans it, or plans it again. The last quiet one
    /// stands as it is, or the last where none was quiet: what was trained is not thrown away because it missed or nobody
    /// can tell, it is reported. By an imported table the first round is the last.
    fn verified(
        &self,
        exported: &Exported,
        plan: &mut Plan,
    ) -> Result<Option<(&'a MeasuredPair, Vec<String>)>, PlanError> {
        let imported = self.context.imported()?.is_some();
        let mut notes = Vec::new();
        let mut quiet = None;
        for round in 1..=MOST_NOISY {
            let stage = Stage::Verify { round };
            if !self.context.results.planned(stage) {
                let verify = Verify {
                    parent: self.parent.clone(),
                    directory: exported.written_to(),
                    workload: self.context.workload(),
                    running: self.winner()?.1.chosen.running,
                    repeats: VERIFY_REPEATS,
                    engine: self.context.spec.target.task_engine(),
                };
                return offer(plan, self.context.results, stage, || {
                    Ok(vec![task("verify", TaskSpec::Verify(verify))])
                })
                .map(|()| None);
            }
            let Some(pair) = self.context.measured(stage)? else {
                return Ok(None);
            };
            let last = imported || round == MOST_NOISY;
            let noise = self.context.noise(pair);
            if noise.is_some() && imported {
                notes.push(format!("{stage} was noisy and says little"));
            } else if let (Some(reason), true) = (&noise, last) {
                notes.push(match quiet {
                    Some(_) => format!("{stage} was noisy: the last quiet measurement stands"),
                    None => format!(
                        "{stage} was noisy, as all before it, and does not show that every limit is met: {reason}"
                    ),
                });
                return Ok(Some((quiet.unwrap_or(pair), notes)));
            } else if noise.is_some() {
                notes.push(format!("{stage} was noisy and was measured again"));
                continue;
            }
            quiet = Some(pair);
            let missed = LimitReport::missed(&self.limits(self.winner()?.1, pair)?);
            if missed.is_empty() {
                return Ok(Some((pair, notes)));
            }
            if last {
                notes.push(format!("{stage} was outside the limits: {missed}"));
                return Ok(Some((pair, notes)));
            }
            notes.push(format!(
                "{stage} was outside the limits ({missed}) and was measured again"
            ));
        }
        Ok(None)
    }

    fn winner(&self) -> Result<(usize, &'a Accepted<'a>), PlanError> {
        let stage = Stage::Export;
        let strategy = match self.context.results.decision(stage) {
            Some(Decision::Winner(winner)) => winner.strategy,
            _ => {
                let reason = "its decision is missing from the results".to_owned();
                return Err(PlanError::Mismatch { stage, reason });
            }
        };
        let found = self
            .accepted
            .iter()
            .enumerate()
            .find(|(_, accepted)| accepted.chosen.strategy == strategy);
        let reason = || format!("its winner, {strategy}, is not among the strategies");
        found.ok_or_else(|| PlanError::Mismatch {
            stage,
            reason: reason(),
        })
    }
}

/// The lesser of KL before and after, and whether it is the one after.
fn best_of((before, after): &(&Quality, Option<&Quality>)) -> (f64, bool) {
    match after {
        Some(after) if after.divergence <= before.divergence => (after.divergence, true),
        _ => (before.divergence, false),
    }
}

fn student(accepted: &Accepted<'_>, weights: Option<ArtifactId>) -> Student {
    Student {
        candidate: accepted.chosen.candidate.clone(),
        weights,
    }
}

fn expect_count(stage: Stage, found: usize, expected: usize) -> Result<(), PlanError> {
    if found == expected {
        return Ok(());
    }
    Err(PlanError::Mismatch {
        stage,
        reason: format!("{found} outputs came, expected {expected}"),
    })
}

fn shard_tokens(shard: &espalier_proto::task::Shard) -> u64 {
    u64::try_from(shard.sequences.saturating_mul(shard.sequence_tokens)).unwrap_or(u64::MAX)
}
