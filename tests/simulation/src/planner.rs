//! Jobs that mean nothing: stages of tasks in a graph, drawn from a seed, whose tasks carry how long they
//! take and how they fail. The planner that names their stages is the only part of the coordinator that the
//! simulation brings itself.

use std::path::Path;
use std::time::Duration;

use espalier_coordinator::scheduler::{Needs, Payload, StagePlan, TaskPlan};
use espalier_coordinator::service::{Planned, Planner, StageSnapshot};
use espalier_proto::task::{ArtifactId, Calibrate, FailureKind, ParentRef, Shard, TaskOutput, TaskSpec};
use espalier_proto::v1::Lease;
use serde::{Deserialize, Serialize};

use crate::dice::Dice;

/// A job as it is submitted.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct JobShape {
    /// Names its parent: tasks of one parent like to share a device's child.
    pub parent: String,
    /// Its stages; each comes after those before it that it names.
    pub stages: Vec<StageShape>,
}

/// A stage.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct StageShape {
    /// Indices of the stages it waits for, all of them before it.
    pub after: Vec<usize>,
    /// How many tasks it has.
    pub tasks: usize,
    /// Whether each wants its host for itself.
    pub exclusive: bool,
    /// Ranks of each task.
    pub ranks: u32,
    /// A usual task's duration, seconds.
    pub seconds: u64,
    /// Whether what it makes lies in the job's output, so that a retry of the job makes it again.
    pub in_output: bool,
    /// Attempts in a thousand that fail, in ways that a retry mends.
    pub failing: u64,
}

/// What a device has to know of a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Nature {
    /// How long it usually takes.
    pub usual: Duration,
    /// Attempts in a thousand that fail.
    pub failing: u64,
}

impl JobShape {
    /// A job of about so many tasks, each of about so many seconds, gangs of at most so many ranks.
    pub fn draw(dice: &mut Dice, tasks: usize, seconds: u64, most_ranks: u32) -> Self {
        let count = 2 + dice.below(5);
        let mut stages: Vec<StageShape> = Vec::with_capacity(count);
        for index in 0..count {
            // Some stages run side by side: they wait for what the one before them waits for.
            let after = match stages.last() {
                Some(before) if dice.chance(0.3) => before.after.clone(),
                Some(_) => vec![index - 1],
                None => Vec::new(),
            };
            let gang = most_ranks > 1 && dice.chance(0.4);
            let exclusive = !gang && dice.chance(0.2);
            let few = gang || exclusive;
            let share = (tasks / count).max(1);
            stages.push(StageShape {
                after,
                tasks: if few {
                    1 + dice.below(4)
                } else {
                    1 + dice.below(2 * share)
                },
                exclusive,
                ranks: if gang {
                    2 + u32::try_from(dice.below(most_ranks as usize - 1)).unwrap_or(0)
                } else {
                    1
                },
                in_output: index + 1 == count,
                // Training takes the longest, so that gangs see most of what happens.
                seconds: (1 + dice.between(seconds / 4, seconds)) * if gang { 4 } else { 1 },
                failing: if dice.chance(0.5) { 0 } else { dice.between(1, 40) },
            });
        }
        // The last stage waits for all that nothing else waits for, as an outcome does.
        let loose = |index: &usize| !stages.iter().any(|stage| stage.after.contains(index));
        let ends: Vec<usize> = (0..count - 1).filter(loose).collect();
        if let Some(last) = stages.last_mut() {
            last.after = ends;
        }
        Self {
            parent: format!("parent-{}", dice.below(5)),
            stages,
        }
    }

    /// Tasks of all stages.
    pub fn tasks(&self) -> usize {
        self.stages.iter().map(|stage| stage.tasks).sum()
    }
}

/// The task's spec, with its nature in fields that a device child would read otherwise.
fn spec(job: &JobShape, stage: &StageShape, name: &str) -> TaskSpec {
    TaskSpec::Calibrate(Calibrate {
        parent: ParentRef {
            source: job.parent.clone(),
            fingerprint: job.parent.clone(),
            permutation: None,
        },
        shard: Shard {
            artifact: ArtifactId(name.to_owned()),
            sequences: usize::try_from(stage.seconds).unwrap_or(1),
            sequence_tokens: usize::try_from(stage.failing).unwrap_or(0),
        },
    })
}

/// The nature of a task, from its spec.
pub fn nature(spec: &TaskSpec) -> Option<Nature> {
    let TaskSpec::Calibrate(task) = spec else {
        return None;
    };
    Some(Nature {
        usual: Duration::from_secs(u64::try_from(task.shard.sequences).unwrap_or(1)),
        failing: u64::try_from(task.shard.sequence_tokens).unwrap_or(0),
    })
}

/// The output of an attempt: it names it, so that everybody can see whose result was promoted.
pub fn output(lease: &Lease) -> TaskOutput {
    TaskOutput::Calibrate {
        importance: ArtifactId(format!("{}-{}", lease.term, lease.attempt)),
        streamed: false,
    }
}

/// Term and number of the attempt that made an output.
pub fn made_by(output: &Payload) -> Option<(u64, u64)> {
    let TaskOutput::Calibrate { importance, .. } = serde_json::from_str(output.as_str()).ok()? else {
        return None;
    };
    let (term, attempt) = importance.0.split_once('-')?;
    Some((term.parse().ok()?, attempt.parse().ok()?))
}

/// How an attempt fails that does.
pub fn failure(dice: &mut Dice) -> FailureKind {
    match dice.below(20) {
        0..9 => FailureKind::Error,
        9..14 => FailureKind::Crashed,
        14..17 => FailureKind::OutOfMemory,
        17..19 => FailureKind::Hung,
        _ => FailureKind::TooNoisy,
    }
}

/// Names stages as their predecessors end, and an outcome at the end.
#[derive(Debug, Clone, Copy)]
pub struct SimulatedPlanner;

impl Planner for SimulatedPlanner {
    fn plan(&self, spec_json: &str, snapshots: &[StageSnapshot]) -> Result<Planned, String> {
        let job: JobShape = serde_json::from_str(spec_json).map_err(|error| error.to_string())?;
        let known = |index: usize| snapshots.iter().find(|known| known.name == stage_name(index));
        let ended = |index: &usize| known(*index).is_some_and(|known| known.outputs.is_some());
        if (0..job.stages.len()).all(|index| ended(&index)) {
            return Ok(Planned::Outcome(Payload::from("{}")));
        }
        let mut stages = Vec::new();
        for (index, stage) in job.stages.iter().enumerate() {
            if known(index).is_none() && stage.after.iter().all(ended) {
                stages.push(plan_stage(&job, stage, index)?);
            }
        }
        Ok(Planned::Stages(stages))
    }

    fn write_report(&self, _outcome: &str, _directory: &Path) -> Result<(), String> {
        Ok(())
    }

    fn finish(&self, _outcome: &str, _output: &Path) -> Result<(), String> {
        Ok(())
    }

    fn remove_partial(&self, _output: &Path) -> Result<(), String> {
        Ok(())
    }
}

fn stage_name(index: usize) -> String {
    format!("stage-{index}")
}

fn plan_stage(job: &JobShape, stage: &StageShape, index: usize) -> Result<StagePlan, String> {
    let tasks = (0..stage.tasks).map(|task| {
        let name = format!("task {task}");
        let payload = serde_json::to_string(&spec(job, stage, &name)).map_err(|error| error.to_string())?;
        Ok(TaskPlan {
            name,
            payload: payload.into(),
            exclusive: stage.exclusive,
            needs: Needs {
                ranks: stage.ranks,
                // Some form with fewer, some only whole.
                rank_multiple: match stage.ranks % 3 {
                    0 => stage.ranks,
                    1 => 1,
                    _ => 2.min(stage.ranks),
                },
                ..Needs::default()
            },
        })
    });
    Ok(StagePlan {
        name: stage_name(index),
        kind: "calibrate".to_owned(),
        decision: None,
        note: String::new(),
        in_output: stage.in_output,
        tasks: tasks.collect::<Result<_, String>>()?,
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn every_job_reaches_its_outcome_when_its_stages_end() {
        for seed in 0..50 {
            let job = JobShape::draw(&mut Dice::new(seed, "jobs"), 60, 300, 4);
            let spec = serde_json::to_string(&job).unwrap();
            let mut ended: Vec<StageSnapshot> = Vec::new();
            let planned = loop {
                match SimulatedPlanner.plan(&spec, &ended).unwrap() {
                    Planned::Stages(stages) if stages.is_empty() => break "stuck",
                    Planned::Stages(stages) => ended.extend(stages.iter().map(|stage| StageSnapshot {
                        name: stage.name.clone(),
                        decision: None,
                        outputs: Some(Vec::new()),
                        seconds: 0.0,
                        ended_seconds: 0.0,
                    })),
                    Planned::Outcome(_) => break "outcome",
                }
            };
            assert_eq!(planned, "outcome", "seed {seed}");
            assert_eq!(ended.len(), job.stages.len());
        }
    }
}
