//! Recover: a student is distilled from its parent, forward KL at temperature 1, by one rank or by a gang.
//!
//! The order of the sequences follows from the recipe's seed alone, whatever the number of ranks; a checkpoint is
//! written every so many steps, so that another attempt goes on where the furthest one ended, to the bit where it has as
//! many ranks. Distillation can make a model worse: when the loss on a fixed slice of the training data is higher after
//! than before, the untrained weights are kept.
//!
//! Rooms: [`begin`] has what an attempt goes on from, [`corpus`] has the sequences and their order, [`team`] what ranks
//! tell each other, [`teacher`] what a rank holds of the parent, [`checkpoint`] what an attempt leaves for the next,
//! [`losses`] how few numbers tell how it went.

mod begin;
mod checkpoint;
mod corpus;
mod losses;
mod teacher;
mod team;

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use espalier_arch::Architecture;
use espalier_model::ops::Layout;
use espalier_model::train::{Hyperparameters, MicroBatch, Objective, Schedule, Step, Trainer};
use espalier_model::{Model, Tensor};
use espalier_proto::task::{ArtifactId, Recipe, Recover, Recovered};

use super::plan::Training;
use super::{Caches, Context};
use crate::{Error, Result};
use checkpoint::{Begun, Checkpoint, Checkpoints};
use corpus::{Corpus, Order};
use losses::Losses;
use teacher::Teacher;
use team::Team;

/// Sequences whose loss before and after guards against training that harms.
const GUARD_SEQUENCES: usize = 4;

/// The work of one attempt, or of one rank of it.
struct Attempt<'a, 'b> {
    context: &'a Context<'b>,
    task: &'a Recover,
    corpus: Corpus<'a>,
    teacher: Teacher,
    /// The shape of what is trained.
    student: Architecture,
    team: Team,
    steps: usize,
    /// How much of it the device takes at a time.
    training: Training,
}

/// How far it has come.
struct Course {
    trainer: Trainer,
    /// The guard's loss before the first step.
    before: f64,
    losses: Losses,
    /// What earlier attempts spent.
    earlier_seconds: f64,
    begun: Instant,
}

impl Course {
    fn seconds(&self) -> f64 {
        self.earlier_seconds + self.begun.elapsed().as_secs_f64()
    }
}

pub(super) fn run(context: &Context<'_>, caches: &mut Caches, task: &Recover) -> Result<Recovered> {
    validate(&task.recipe)?;
    let team = Team::of(context, &task.recipe)?;
    let teacher = Teacher::load(context, caches, task, &team)?;
    caches.clear_batches();
    let parent = teacher.architecture();
    let corpus = Corpus::read(context, task, parent.vocab_size)?;
    let step_tokens = task.recipe.batch_sequences.saturating_mul(corpus.sequence_tokens);
    let tokens = usize::try_from(task.recipe.tokens).unwrap_or(usize::MAX);
    let steps = (tokens / step_tokens.max(1)).max(1);
    let student = parent.with_candidate(&task.candidate)?;
    let batch = task.recipe.batch_sequences.div_ceil(team.layers().replicas);
    // States that an earlier recovery left stay where there is room for them.
    let plan = context.plan().with_more(caches.state_bytes());
    let training = plan.training(parent, &student, corpus.sequence_tokens, batch, team.layers())?;
    // Of what is free on this rank's device; stages must take the same micro-batches.
    let training = Training {
        rows: team.least(training.rows)?,
        ..training
    };
    caches.shrink_states(training.state_bytes);
    tracing::debug!(?training, "how much the device takes at a time");
    let attempt = Attempt {
        context,
        task,
        corpus,
        teacher,
        student,
        team,
        steps,
        training,
    };
    attempt.train(caches)
}

fn validate(recipe: &Recipe) -> Result<()> {
    let invalid = |reason: String| Err(Error::Invalid { reason });
    if recipe.batch_sequences == 0 {
        return invalid("recovery.batch_sequences is 0, expected at least 1".to_owned());
    }
    if !(recipe.learning_rate.is_finite() && recipe.learning_rate > 0.0) {
        return invalid(format!(
            "recovery.learning_rate is {}, expected above 0",
            recipe.learning_rate
        ));
    }
    Ok(())
}

impl Attempt<'_, '_> {
    fn train(&self, caches: &mut Caches) -> Result<Recovered> {
        // Outlives what goes wrong: a share on its way is waited for, but not by the other ranks.
        let mut leaving = None;
        let trained = self.train_on(caches, &mut leaving);
        // One that is stopped has left a checkpoint with the others, or is stopped with them.
        trained.inspect_err(|error| {
            if !matches!(error, Error::Cancelled) {
                self.team.give_up();
            }
        })
    }

    fn train_on(&self, caches: &mut Caches, leaving: &mut Option<Begun>) -> Result<Recovered> {
        let mut checkpoints = Checkpoints::of(self.context, &self.team, self.task)?;
        let mut course = self.begin(caches, &checkpoints)?;
        self.context.leave_checkpoints();
        let order = Order::new(self.corpus.len(), self.task.recipe.seed);
        // On a device that computes by itself a step is read when the next one is on its way.
        let mut unread: Option<Step> = None;
        for begun in course.losses.steps() + 1..=self.steps {
            let step = self.step(caches, &mut course.trainer, &order, begun - 1)?;
            if let Some(previous) = unread.replace(step) {
                self.note(&mut course.losses, previous)?;
            }
            let every = self.task.recipe.checkpoint_steps;
            let last = begun == self.steps;
            let asked = !last && self.team.any(self.context.is_checkpoint_asked())?;
            let due = asked || (!last && every > 0 && (begun as u64).is_multiple_of(every));
            if let Some(step) = unread.take_if(|step| last || due || step.is_ready()) {
                self.note(&mut course.losses, step)?;
            }
            self.keep(&mut checkpoints, leaving, &course, due, asked)?;
            if asked {
                tracing::info!(
                    step = course.losses.steps(),
                    "a checkpoint was asked for and is written"
                );
                return Err(Error::Cancelled);
            }
        }
        // On its way on all ranks or on none. Unless it is recorded nobody goes on from it, should the end fail.
        if let Some(begun) = leaving.take() {
            checkpoints.finish(begun)?;
        }
        self.conclude(caches, &checkpoints, course)
    }

    /// Finishes the checkpoint that is being written, when every rank has written its share or another one is due,
    /// and begins that one. With `now` it is finished, too.
    fn keep(
        &self,
        checkpoints: &mut Checkpoints<'_, '_>,
        leaving: &mut Option<Begun>,
        course: &Course,
        due: bool,
        now: bool,
    ) -> Result<()> {
        if let Some(begun) = leaving.as_ref() {
            // Asked of all at every step, so that all finish it at the same one.
            let is_slow = self.team.any(!begun.is_written())?;
            if (due || !is_slow)
                && let Some(begun) = leaving.take()
            {
                checkpoints.finish(begun)?;
            }
        }
        if due {
            let seconds = course.seconds();
            *leaving = Some(checkpoints.begin(&course.trainer, course.before, &course.losses, seconds)?);
        }
        let writes_at_once = self.context.operations.accelerator().is_none();
        if (now || writes_at_once)
            && let Some(begun) = leaving.take()
        {
            checkpoints.finish(begun)?;
        }
        Ok(())
    }

    /// Judges the trained student and writes the better one of it and the untrained.
    fn conclude(
        &self,
        caches: &mut Caches,
        checkpoints: &Checkpoints<'_, '_>,
        mut course: Course,
    ) -> Result<Recovered> {
        let seconds = course.seconds();
        let (before, after) = (course.before, self.guard_loss(caches, &mut course.trainer)?);
        let kept_untrained = after.is_nan() || after > before;
        if kept_untrained {
            tracing::warn!(
                before,
                after,
                "training made the held-in loss worse; the untrained weights are kept"
            );
        }
        let weights = match (kept_untrained, self.team.layers().stages) {
            (true, _) => {
                self.write_once(|| self.teacher.write_untrained(self.context, &self.task.candidate))?
            }
            (false, 1) => {
                let trained = course.trainer.into_model()?;
                self.write_once(|| self.write(&trained))?
            }
            (false, _) => self.write_from_stages(checkpoints, &course.trainer)?,
        };
        let (losses, steps_per_loss) = course.losses.into_means();
        Ok(Recovered {
            weights,
            losses,
            steps_per_loss: steps_per_loss as u64,
            tokens: (self.steps * self.step_tokens()) as u64,
            kept_untrained,
            seconds,
        })
    }

    /// What the first rank writes; the others wait for it.
    fn write_once(&self, write: impl FnOnce() -> Result<ArtifactId>) -> Result<ArtifactId> {
        let written = self.team.is_first().then(write).transpose()?;
        self.team.first(written)
    }

    fn write(&self, model: &Model) -> Result<ArtifactId> {
        let operations = &*self.context.operations;
        self.context.put_written(|path| model.save(path, operations))
    }

    /// No device may hold the whole student: the first rank puts its file together, a tensor at a time, of what all write.
    fn write_from_stages(&self, checkpoints: &Checkpoints<'_, '_>, trainer: &Trainer) -> Result<ArtifactId> {
        let own = checkpoints.write(trainer)?;
        let shares = self.team.gather(own.clone())?;
        let weights = self.write_once(|| {
            let whole = Checkpoint {
                shares,
                before: 0.0,
                losses: Losses::default(),
                seconds: 0.0,
            };
            let all = 0..self.student.blocks.len();
            let parts = checkpoints.open(&whole, &all)?;
            self.context.put_written(|path| parts.save_model(path))
        })?;
        // All is done but this, and what stays is collected as garbage.
        if let Err(error) = self.context.store.remove(&own.0) {
            tracing::warn!(%error, "a share of the student cannot be removed");
        }
        Ok(weights)
    }

    /// Reads a step's loss and tells how far the training has come.
    fn note(&self, losses: &mut Losses, step: Step) -> Result<()> {
        #[allow(clippy::cast_possible_truncation)] // a loss to look at
        let loss = step.read()?.loss as f32;
        losses.push(loss);
        let (done, total) = (losses.steps(), self.steps);
        self.context.progress(
            done * self.step_tokens(),
            total * self.step_tokens(),
            "tokens",
            || format!("step {done} of {total}, loss {loss:.4}"),
        )
    }

    fn step_tokens(&self) -> usize {
        self.task.recipe.batch_sequences * self.corpus.sequence_tokens
    }

    /// The student's blocks that are this rank's.
    fn blocks(&self) -> Result<Range<usize>> {
        self.team.blocks(&self.student, self.corpus.sequence_tokens)
    }

    fn operations(&self) -> Arc<dyn espalier_model::ops::Operations> {
        Arc::clone(&self.context.operations)
    }

    fn step(&self, caches: &mut Caches, trainer: &mut Trainer, order: &Order, step: usize) -> Result<Step> {
        let batch = self.task.recipe.batch_sequences;
        let chosen: Vec<usize> = (step * batch..(step + 1) * batch)
            .map(|place| order.at(place))
            .collect();
        let together = (self.training.rows / self.corpus.sequence_tokens.max(1)).max(1);
        let predictions = batch * self.corpus.sequence_tokens;
        let micro_batches: Vec<&[usize]> = self.team.share(&chosen).chunks(together).collect();
        // Stages work on several at a time. A rank that has the parent's states computes them one by one.
        let (first, rest) = match self.team.layers().stages {
            1 => micro_batches.split_at(micro_batches.len().saturating_sub(1)),
            _ => micro_batches.split_at(0),
        };
        for sequences in first {
            self.context.check_cancelled()?;
            let lesson = self.lesson(caches, sequences)?;
            trainer.accumulate(&lesson.batch(self), predictions)?;
        }
        self.context.check_cancelled()?;
        let lessons = rest.iter().map(|sequences| self.lesson(caches, sequences));
        let lessons: Vec<Lesson> = lessons.collect::<Result<_>>()?;
        let batches: Vec<MicroBatch<'_>> = lessons.iter().map(|lesson| lesson.batch(self)).collect();
        trainer.accumulate_all(&batches, predictions)?;
        Ok(trainer.update(&self.hyperparameters(step), predictions)?)
    }

    fn hyperparameters(&self, step: usize) -> Hyperparameters {
        let recipe = &self.task.recipe;
        let schedule = Schedule {
            steps: self.steps as u64,
            peak: recipe.learning_rate,
            warmup: recipe.warmup,
            final_share: recipe.final_share,
        };
        Hyperparameters {
            learning_rate: schedule.learning_rate(step as u64),
            betas: recipe.betas,
            weight_decay: recipe.weight_decay,
            clip: recipe.clip,
            ..Hyperparameters::default()
        }
    }

    /// Some sequences with what the parent makes of them, where this rank has all of it.
    fn lesson(&self, caches: &mut Caches, chosen: &[usize]) -> Result<Lesson> {
        let layout = Layout {
            sequences: chosen.len(),
            tokens: self.corpus.sequence_tokens,
        };
        let mut sequences = Vec::with_capacity(chosen.len());
        for place in chosen {
            sequences.push(self.corpus.sequence(*place)?);
        }
        let states = match &self.teacher {
            Teacher::Whole(_) => {
                Some(caches.final_states(self.context, &self.task.parent, &sequences, &self.training)?)
            }
            Teacher::Stage(_) => None,
        };
        let tokens = sequences.iter().flat_map(|sequence| sequence.tokens).copied();
        Ok(Lesson {
            tokens: tokens.collect(),
            states,
            layout,
        })
    }

    /// Mean KL to the parent on the first sequences of the training data, the same on every rank.
    fn guard_loss(&self, caches: &mut Caches, trainer: &mut Trainer) -> Result<f64> {
        let sequences: Vec<usize> = (0..GUARD_SEQUENCES.min(self.corpus.len())).collect();
        let lessons = sequences.iter().map(|place| self.lesson(caches, &[*place]));
        let lessons: Vec<Lesson> = lessons.collect::<Result<_>>()?;
        let batches: Vec<MicroBatch<'_>> = lessons.iter().map(|lesson| lesson.batch(self)).collect();
        let own = trainer.losses(&batches)?;
        // Every replica's last stage has all of it. Bits, for JSON has no word for what is not a number.
        let all = self.team.gather(own.to_bits())?;
        let all: f64 = all.into_iter().map(f64::from_bits).sum();
        let predictions = sequences.len() * self.corpus.sequence_tokens * self.team.layers().replicas;
        Ok(all / predictions as f64)
    }
}

/// A micro-batch, with the parent's final hidden states where they are here.
struct Lesson {
    tokens: Vec<u32>,
    states: Option<Tensor>,
    layout: Layout,
}

impl Lesson {
    fn batch<'a>(&'a self, attempt: &'a Attempt<'_, '_>) -> MicroBatch<'a> {
        let objective = match (&self.states, &attempt.teacher) {
            (Some(hidden), Teacher::Whole(resident)) => Objective::Distil {
                hidden,
                head: resident.model.head(),
            },
            _ => Objective::FromParent,
        };
        MicroBatch {
            tokens: &self.tokens,
            layout: self.layout,
            objective,
        }
    }
}
