//! The outcome: what a finished job has to tell, gathered from its results. Nothing is decided here.

use espalier_arch::{Architecture, BlockShape, Variant};
use espalier_proto::task::{Exported, MeasuredPair, Quality, Recovered, Shard, TaskOutput, one_each};
use espalier_search::{Corrections, Metric, Score};

use super::{Accepted, Decision, PlanError, Qualities, Results, Stage, Tail, best_of, shard_tokens};
use crate::pipeline::compare::reading;
use crate::pipeline::context::{all_parameters, block_parameters, is_hidden_by_noise};
use crate::pipeline::import;
use crate::pipeline::outcome::{
    BlockReport, LimitReport, OUTCOME_SCHEMA, Outcome, ParentReport, RankedPoint, StageCost, StrategyReport,
};
use crate::spec::{CostTableSource, JobSpec, Strategy};

impl Tail<'_> {
    pub(super) fn outcome(
        &self,
        qualities: &Qualities<'_>,
        recovered: &[&Recovered],
        exported: &Exported,
        verified: &MeasuredPair,
        mut notes: Vec<String>,
    ) -> Result<Outcome, PlanError> {
        let (index, winner) = self.winner()?;
        let limits = self.limits(winner, verified)?;
        let scores = self.context.scores()?.unwrap_or_default();
        let mut strategies = Vec::with_capacity(self.accepted.len());
        for (position, (accepted, quality)) in self.accepted.iter().zip(&qualities.each).enumerate() {
            let report = self.strategy(accepted, *quality, recovered.get(position).copied(), &scores)?;
            notes.extend(accepted.notes.iter().cloned());
            notes.extend(worsened(&report));
            strategies.push(report);
        }
        // The winner first, the others in their order.
        if let Some(first) = strategies.get_mut(..=index) {
            first.rotate_right(1);
        }
        notes.extend(self.alone(index, verified));
        notes.extend(self.shortfalls());
        if self.profiled.disturbed {
            notes.push(
                "others kept using the machine while blocks were timed: predictions may be too high, and the times are \
                 not kept for other jobs"
                    .to_owned(),
            );
        }
        let all = &self.context.spec.target.limits;
        let front_metric = all.iter().next().map_or(Metric::Latency, |limit| limit.metric);
        Ok(Outcome {
            schema: OUTCOME_SCHEMA,
            spec: self.spec(),
            parent: self.parent_report(qualities.parent)?,
            target: self.profiled.key.clone(),
            cost_table: Some(import::exported(
                &self.context,
                self.architecture(),
                self.profiled,
            )),
            corrections: self.corrections(),
            limits,
            winner: winner.chosen.strategy,
            strategies,
            scores,
            front_metric,
            front: self.front(),
            grid: self.ranked()?,
            export: exported.clone(),
            serving: verified.serving.clone(),
            serve_command: None,
            stages: self.costs(),
            notes,
        })
    }

    /// What was asked; an imported table by its name, for its content stands beside.
    fn spec(&self) -> JobSpec {
        let mut spec = self.context.spec.clone();
        if let Some(CostTableSource::Table(table)) = &spec.target.cost_table {
            spec.target.cost_table = Some(CostTableSource::File(table.name().to_owned()));
        }
        spec
    }

    /// Why the candidate was measured without the parent, where it was.
    fn alone(&self, winner: usize, verified: &MeasuredPair) -> Option<String> {
        if let Some(shortage) = self.profiled.parent.shortage() {
            return Some(format!(
                "the parent does not fit this device ({shortage}): its figures are predicted, and candidates were measured \
                 alone"
            ));
        }
        let checked = self.accepted.get(winner).map(|accepted| &accepted.pair.parent);
        let shortage = verified.parent.shortage().or(checked?.shortage())?;
        Some(format!(
            "the parent does not fit beside the candidate ({shortage}), which was measured alone; shares are of the parent \
             as profiled"
        ))
    }

    /// Budgets that the data could not fill.
    fn shortfalls(&self) -> Vec<String> {
        let (budget, ingested) = (&self.context.spec.budget, self.ingested);
        let all = |shards: &[Shard]| shards.iter().map(shard_tokens).sum::<u64>();
        let train = "data.train";
        let validation = if self.context.spec.data.validation.is_empty() {
            train
        } else {
            "data.validation"
        };
        let scoring = budget.scoring_tokens.max(budget.depth_tokens);
        let roles = [
            (
                "calibration",
                budget.calibration_tokens,
                all(&ingested.calibration),
                train,
            ),
            ("scoring", scoring, shard_tokens(&ingested.scoring), train),
            ("recovery", budget.recovery_tokens, all(&ingested.recovery), train),
            (
                "validation",
                budget.validation_tokens,
                shard_tokens(&ingested.validation),
                validation,
            ),
        ];
        // Budgets are filled with whole sequences.
        let sequence = u64::try_from(budget.sequence_tokens.max(1)).unwrap_or(1);
        let short = roles
            .into_iter()
            .filter(|(_, asked, there, _)| *there < asked / sequence * sequence);
        short
            .map(|(role, asked, there, files)| {
                format!("{role} had {there} of the {asked} tokens asked for: {files} holds no more")
            })
            .collect()
    }

    /// Every limit as the verification reads it. Where that was too noisy, those on time are not shown to be met; by an
    /// imported table, which no clock decides about, they are read as they are.
    pub(super) fn limits(
        &self,
        winner: &Accepted<'_>,
        verification: &MeasuredPair,
    ) -> Result<Vec<LimitReport>, PlanError> {
        let candidate = self.architecture().with_candidate(&winner.chosen.candidate)?;
        let parameters = (
            block_parameters(self.architecture()),
            block_parameters(&candidate),
        );
        let parent = espalier_search::Figures::of_parent(&self.profiled.parent, parameters.0);
        let prediction = &winner.chosen.prediction;
        let imported = self.context.imported()?.is_some();
        let mut reports = Vec::new();
        for limit in self.context.spec.target.limits.iter() {
            let metric = limit.metric;
            let read = |pair| reading(&limit, pair, parameters, &self.profiled.parent, prediction);
            let (Some(checked), Some(mut verified)) = (read(winner.pair), read(verification)) else {
                continue;
            };
            if !imported && is_hidden_by_noise(&limit, verification) {
                verified = verified.too_noisy();
            }
            let fitted = winner.chosen.limits.iter().find(|fitted| fitted.metric == metric);
            let fitted = match fitted {
                Some(fitted) => *fitted,
                None => limit.resolve(&parent)?,
            };
            reports.push(LimitReport {
                metric,
                asked: limit.bound,
                limit: fitted.value,
                parent: parent.get(metric),
                predicted: prediction.figures.get(metric).unwrap_or(verified.predicted),
                predicted_error: prediction.errors.get(metric).unwrap_or(0.0),
                checked,
                verified,
            });
        }
        Ok(reports)
    }

    fn parent_report(&self, quality: &Quality) -> Result<ParentReport, PlanError> {
        let architecture = self.architecture();
        let model = self
            .context
            .cost_model(architecture, self.profiled, &Corrections::default())?
            .by_sums()?;
        Ok(ParentReport {
            source: self.parent.source.clone(),
            fingerprint: self.parent.fingerprint.clone(),
            architecture: architecture.clone(),
            parameters: all_parameters(architecture),
            block_parameters: block_parameters(architecture),
            measurement: self.profiled.parent.clone(),
            prediction: model.predict(architecture)?,
            quality: quality.clone(),
        })
    }

    fn strategy(
        &self,
        accepted: &Accepted<'_>,
        quality: (&Quality, Option<&Quality>),
        recovered: Option<&Recovered>,
        scores: &[Score],
    ) -> Result<StrategyReport, PlanError> {
        let chosen = accepted.chosen;
        let architecture = self.architecture().with_candidate(&chosen.candidate)?;
        Ok(StrategyReport {
            strategy: chosen.strategy,
            candidate: chosen.candidate.clone(),
            blocks: blocks(self.architecture(), &chosen.candidate.variants, scores),
            parameters: all_parameters(&architecture),
            block_parameters: block_parameters(&architecture),
            running: chosen.running,
            prediction: chosen.prediction,
            checked: accepted.pair.candidate.clone(),
            rounds: accepted.round,
            solved: chosen.solved,
            before: quality.0.clone(),
            after: quality.1.cloned(),
            losses: recovered
                .map(|recovered| recovered.losses.clone())
                .unwrap_or_default(),
            steps_per_loss: recovered.map_or_else(one_each, |recovered| recovered.steps_per_loss),
            recovery_tokens: recovered.map_or(0, |recovered| recovered.tokens),
            recovery_seconds: recovered.map_or(0.0, |recovered| recovered.seconds),
            kept_untrained: recovered
                .is_some_and(|recovered| recovered.kept_untrained || !best_of(&quality).1),
            weights: recovered.map(|recovered| recovered.weights.clone()),
        })
    }

    /// The front that the accepted choice is on: by the same costs, corrected alike.
    fn front(&self) -> Vec<espalier_search::heterogeneous::FrontPoint> {
        let chosen = self.accepted.iter().map(|accepted| accepted.chosen);
        chosen.flat_map(|chosen| chosen.front.clone()).collect()
    }

    /// What the accepted heterogeneous choice was predicted with.
    fn corrections(&self) -> Corrections {
        let mut chosen = self.accepted.iter().map(|accepted| accepted.chosen);
        let heterogeneous = chosen.find(|chosen| chosen.strategy == Strategy::Heterogeneous);
        heterogeneous
            .map(|chosen| chosen.corrections.clone())
            .unwrap_or_default()
    }

    fn ranked(&self) -> Result<Vec<RankedPoint>, PlanError> {
        let mut all = Vec::new();
        for (stage, result) in &self.context.results.stages {
            let (Stage::Rank { round }, Some(Decision::Grid(points))) = (stage, &result.decision) else {
                continue;
            };
            let divergences = self.context.ranked(*round)?.unwrap_or_default();
            let points = points.iter().cloned().zip(divergences);
            all.extend(points.map(|(point, divergence)| RankedPoint {
                point,
                divergence: *divergence,
            }));
        }
        Ok(all)
    }

    fn costs(&self) -> Vec<StageCost> {
        let finished = self.context.results.stages.iter();
        let finished = finished.filter_map(|(stage, result)| Some((*stage, result.finished.as_ref()?)));
        finished
            .map(|(stage, finished)| StageCost {
                stage,
                tasks: finished.outputs.len(),
                tokens: self.tokens(stage, finished.outputs.len(), self.context.results),
                seconds: finished.seconds,
                ended_seconds: finished.ended_seconds,
            })
            .collect()
    }

    fn tokens(&self, stage: Stage, tasks: usize, results: &Results) -> u64 {
        let tasks = u64::try_from(tasks).unwrap_or(u64::MAX);
        match stage {
            Stage::Calibrate => self.ingested.calibration.iter().map(shard_tokens).sum(),
            Stage::Score => {
                let outputs = results.outputs(stage).unwrap_or_default().iter();
                let blocks: u64 = outputs.map(scored_blocks).sum();
                shard_tokens(&self.ingested.scoring).saturating_mul(blocks)
            }
            Stage::Rank { .. } => shard_tokens(&self.ingested.scoring).saturating_mul(tasks),
            Stage::DepthOrder => self.context.spec.budget.depth_tokens,
            Stage::Evaluate => shard_tokens(&self.ingested.validation).saturating_mul(tasks),
            Stage::Recover => {
                let outputs = results.outputs(stage).unwrap_or_default().iter();
                outputs
                    .map(|output| {
                        if let TaskOutput::Recover(recovered) = output {
                            recovered.tokens
                        } else {
                            0
                        }
                    })
                    .sum()
            }
            _ => 0,
        }
    }
}

/// How many blocks a task has scored, whose scores follow each other.
fn scored_blocks(output: &TaskOutput) -> u64 {
    match output {
        TaskOutput::Score { scores } => {
            let blocks = scores.chunk_by(|one, next| one.block == next.block).count();
            u64::try_from(blocks).unwrap_or(u64::MAX)
        }
        _ => 0,
    }
}

/// What to say where training made the model worse on held-out text.
fn worsened(report: &StrategyReport) -> Option<String> {
    let after = report.after.as_ref().filter(|_| report.kept_untrained)?;
    Some(format!(
        "recovery did not bring the {} model nearer to the parent (KL {:.4} on held-out text, {:.4} before): it counts, and \
         is exported where it wins, with its untrained weights",
        report.strategy, after.divergence, report.before.divergence
    ))
}

/// What is left of each block.
fn blocks(parent: &Architecture, variants: &[Variant], scores: &[Score]) -> Vec<BlockReport> {
    let each = parent.blocks.iter().zip(variants).enumerate();
    each.map(|(index, (block, variant))| {
        let whole = size(&block.shape);
        let left = block.shape.with_variant(variant).ok().flatten();
        let score = scores
            .iter()
            .find(|score| score.block == index && score.variant == *variant);
        BlockReport {
            block: index,
            layer: block.layer,
            kind: block.shape.kind(),
            variant: variant.clone(),
            size: left.as_ref().map_or(0, size),
            whole,
            score: score.map(|score| score.divergence),
        }
    })
    .collect()
}

/// The axis that variants of the block are prefixes along.
fn size(shape: &BlockShape) -> usize {
    match shape {
        BlockShape::Attention(attention) => attention.kv_groups,
        BlockShape::Mlp(mlp) => mlp.channels,
        BlockShape::Mamba2(mamba) => mamba.heads,
        BlockShape::Moe(moe) => moe.experts,
    }
}
