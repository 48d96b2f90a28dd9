//! Recover: a student is distilled from its parent, forward KL at temperature 1.
//!
//! The order of the sequences follows from the recipe's seed alone; a checkpoint (weights, moments, losses)
//! is written every so many steps and recorded under the task's own hash and the attempt's number, so that
//! another attempt goes on where the furthest one ended, to the bit. Distillation can make a model worse: when the loss on a fixed slice of
//! the training data is higher after than before, the untrained weights are kept.

use std::sync::Arc;
use std::time::Instant;

use espalier_artifact::Name;
use espalier_model::ops::{Head, Layout};
use espalier_model::runner::Runner;
use espalier_model::train::{Hyperparameters, MicroBatch, Objective, Schedule, Step, Trainer};
use espalier_model::{Model, Tensor};
use espalier_proto::task::{ArtifactId, Recipe, Recover, Recovered};
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use super::caches::{Sequence, finals};
use super::divergence::mean;
use super::plan::Training;
use super::{Caches, Context, Resident};
use crate::data::shard::{self, Sequences};
use crate::{Error, Result};

/// Sequences whose loss before and after guards against training that harms.
const GUARD_SEQUENCES: usize = 4;

/// What an attempt leaves for the next.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Checkpoint {
    trainer: ArtifactId,
    losses: Vec<f32>,
    seconds: f64,
}

/// Every sequence of every shard, addressed in order.
struct Corpus<'a> {
    shards: Vec<(&'a ArtifactId, Sequences)>,
    places: Vec<(usize, usize)>,
    sequence_tokens: usize,
}

/// The work of one attempt.
struct Attempt<'a, 'b> {
    context: &'a Context<'b>,
    task: &'a Recover,
    corpus: Corpus<'a>,
    resident: Arc<Resident>,
    about: Name,
    steps: usize,
    /// How much of it the device takes at a time.
    training: Training,
}

pub(super) fn run(context: &Context<'_>, caches: &mut Caches, task: &Recover) -> Result<Recovered> {
    validate(&task.recipe)?;
    let resident = caches.parent(context, &task.parent)?;
    caches.clear_batches();
    let corpus = Corpus::read(context, task, resident.model.architecture.vocab_size)?;
    let step_tokens = task.recipe.batch_sequences.saturating_mul(corpus.sequence_tokens);
    let tokens = usize::try_from(task.recipe.tokens).unwrap_or(usize::MAX);
    let steps = (tokens / step_tokens.max(1)).max(1);
    let about = question(task)?;
    let parent = &resident.model.architecture;
    let student = parent.with_candidate(&task.candidate)?;
    let batch = task.recipe.batch_sequences;
    // States that an earlier recovery left stay where there is room for them.
    let plan = context.plan().with_more(caches.state_bytes());
    let training = plan.training(parent, &student, corpus.sequence_tokens, batch)?;
    caches.shrink_states(training.state_bytes);
    tracing::debug!(?training, "how much the device takes at a time");
    let attempt = Attempt {
        context,
        task,
        corpus,
        resident,
        about,
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

/// The hash of everything that decides the result; not of where an attempt starts from.
fn question(task: &Recover) -> Result<Name> {
    let asked = Recover {
        resume: None,
        ..task.clone()
    };
    let json = serde_json::to_vec(&asked).map_err(|error| Error::Invalid {
        reason: error.to_string(),
    })?;
    Ok(Name::of(&json))
}

impl Attempt<'_, '_> {
    fn train(&self, caches: &mut Caches) -> Result<Recovered> {
        let untrained = self.resident.model.slice(&self.task.candidate)?;
        let before = self.guard_loss(caches, Arc::new(untrained.clone()))?;
        let (mut trainer, mut losses, earlier_seconds) = self.begin(&untrained)?;
        let mut own: Option<Checkpoint> = None;
        let start = Instant::now();
        let order = Order::new(self.corpus.places.len(), self.task.recipe.seed);
        self.context.leave_checkpoints();
        // On a device that computes by itself a step is read when the next one is on its way.
        let mut unread: Option<Step> = None;
        for begun in losses.len() + 1..=self.steps {
            let step = self.step(caches, &mut trainer, &order, begun - 1)?;
            if let Some(previous) = unread.replace(step) {
                self.note(&mut losses, previous)?;
            }
            let every = self.task.recipe.checkpoint_steps;
            let last = begun == self.steps;
            let asked = !last && self.context.is_checkpoint_asked();
            let due = asked || (!last && every > 0 && (begun as u64).is_multiple_of(every));
            if let Some(step) = unread.take_if(|step| last || due || step.is_ready()) {
                self.note(&mut losses, step)?;
            }
            if due {
                let seconds = earlier_seconds + start.elapsed().as_secs_f64();
                let previous = own.replace(self.save(&trainer, &losses, seconds)?);
                self.discard(previous.as_ref(), own.as_ref());
            }
            if asked {
                tracing::info!(step = losses.len(), "a checkpoint was asked for and is written");
                return Err(Error::Cancelled);
            }
        }
        let seconds = earlier_seconds + start.elapsed().as_secs_f64();
        let trained = Arc::new(trainer.into_model()?);
        let after = self.guard_loss(caches, Arc::clone(&trained))?;
        let kept_untrained = after.is_nan() || after > before;
        if kept_untrained {
            tracing::warn!(
                before,
                after,
                "training made the held-in loss worse; the untrained weights are kept"
            );
        }
        let kept: &Model = if kept_untrained { &untrained } else { &trained };
        let weights = self
            .context
            .put_written(|path| kept.save(path, &*self.context.operations))?;
        Ok(Recovered {
            weights,
            losses,
            tokens: (self.steps * self.step_tokens()) as u64,
            kept_untrained,
            seconds,
        })
    }

    /// Reads a step's loss and tells how far the training has come.
    fn note(&self, losses: &mut Vec<f32>, step: Step) -> Result<()> {
        #[allow(clippy::cast_possible_truncation)] // a loss to look at
        let loss = step.read()?.loss as f32;
        losses.push(loss);
        let (done, total) = (losses.len(), self.steps);
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

    /// A fresh trainer, or the one that an earlier attempt left, with its losses and the seconds it took.
    fn begin(&self, untrained: &Model) -> Result<(Trainer, Vec<f32>, f64)> {
        for (checkpoint, whose) in self.earlier()? {
            match self.load(&checkpoint, untrained) {
                Ok(trainer) => {
                    let step = checkpoint.losses.len();
                    tracing::info!(step, whose, "going on from a checkpoint");
                    return Ok((trainer, checkpoint.losses, checkpoint.seconds));
                }
                // Its attempt may be at work yet and have replaced it, or somebody may have damaged it.
                Err(error) => tracing::warn!(%error, whose, "a checkpoint cannot be used"),
            }
        }
        let operations = Arc::clone(&self.context.operations);
        Ok((
            Trainer::new(operations, untrained, self.training.activation_bytes)?,
            Vec::new(),
            0.0,
        ))
    }

    fn load(&self, checkpoint: &Checkpoint, untrained: &Model) -> Result<Trainer> {
        let path = self.context.store.get_file(&checkpoint.trainer.0)?;
        let operations = Arc::clone(&self.context.operations);
        let trainer = Trainer::load(operations, &path, self.training.activation_bytes)?;
        if *trainer.weights().architecture() != untrained.architecture {
            let reason = "it is of a model of another shape".to_owned();
            let artifact = checkpoint.trainer.to_string();
            return Err(Error::Content { artifact, reason });
        }
        Ok(trainer)
    }

    /// The checkpoint that the task names, else those that attempts at the same question have recorded, the one
    /// with the most steps first; each with whose it is.
    fn earlier(&self) -> Result<Vec<(Checkpoint, String)>> {
        let recorded = match &self.task.resume {
            Some(artifact) => {
                let bytes = self.context.store.get_bytes(&artifact.0)?;
                vec![("named by the task".to_owned(), bytes)]
            }
            None => {
                let records = self.context.store.records(&self.about)?;
                let records = records.into_iter();
                records
                    .map(|(attempt, bytes)| (format!("of attempt {attempt}"), bytes))
                    .collect()
            }
        };
        let mut checkpoints = Vec::with_capacity(recorded.len());
        for (whose, bytes) in recorded {
            match serde_json::from_slice::<Checkpoint>(&bytes) {
                Ok(checkpoint) if checkpoint.losses.len() <= self.steps => {
                    checkpoints.push((checkpoint, whose))
                }
                Ok(_) | Err(_) => tracing::warn!(whose, "the record of a checkpoint cannot be read"),
            }
        }
        checkpoints.sort_by_key(|(checkpoint, _)| std::cmp::Reverse(checkpoint.losses.len()));
        Ok(checkpoints)
    }

    fn save(&self, trainer: &Trainer, losses: &[f32], seconds: f64) -> Result<Checkpoint> {
        let trainer = self.context.put_written(|path| trainer.save(path))?;
        let checkpoint = Checkpoint {
            trainer,
            losses: losses.to_vec(),
            seconds,
        };
        let json = serde_json::to_vec(&checkpoint).map_err(|error| Error::Invalid {
            reason: error.to_string(),
        })?;
        let attempt = self.context.attempt;
        self.context.store.set_record(&self.about, attempt, &json)?;
        Ok(checkpoint)
    }

    /// Checkpoints are large, and only the last one matters. An attempt removes only what it wrote itself, and
    /// only while no other's record names it: at the same step every attempt writes the same bytes, which are
    /// stored once.
    fn discard(&self, previous: Option<&Checkpoint>, current: Option<&Checkpoint>) {
        let Some(previous) = previous else { return };
        if current.is_some_and(|current| current.trainer == previous.trainer) {
            return;
        }
        let removed = self.context.store.records(&self.about).and_then(|records| {
            if is_anothers(&records, self.context.attempt, &previous.trainer) {
                // Whoever goes on from there removes it, or it is collected as garbage.
                return Ok(());
            }
            self.context.store.remove(&previous.trainer.0)
        });
        if let Err(error) = removed {
            tracing::warn!(%error, "an old checkpoint cannot be removed");
        }
    }

    fn step(&self, caches: &mut Caches, trainer: &mut Trainer, order: &Order, step: usize) -> Result<Step> {
        let batch = self.task.recipe.batch_sequences;
        let chosen: Vec<usize> = (step * batch..(step + 1) * batch)
            .map(|place| order.at(place))
            .collect();
        let together = (self.training.rows / self.corpus.sequence_tokens.max(1)).max(1);
        let predictions = batch * self.corpus.sequence_tokens;
        for micro in chosen.chunks(together) {
            self.context.check_cancelled()?;
            let (tokens, hidden, layout) = self.parent_states(caches, micro)?;
            let objective = Objective::Distil {
                hidden: &hidden,
                head: self.resident.model.head(),
            };
            trainer.accumulate(
                &MicroBatch {
                    tokens: &tokens,
                    layout,
                    objective,
                },
                predictions,
            )?;
        }
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

    /// Tokens of some sequences, and the parent's final hidden states for them.
    fn parent_states(&self, caches: &mut Caches, chosen: &[usize]) -> Result<(Vec<u32>, Tensor, Layout)> {
        let layout = Layout {
            sequences: chosen.len(),
            tokens: self.corpus.sequence_tokens,
        };
        let mut sequences = Vec::with_capacity(chosen.len());
        for place in chosen {
            sequences.push(self.corpus.sequence(*place)?);
        }
        let states = caches.final_states(self.context, &self.task.parent, &sequences, &self.training)?;
        let tokens = sequences.iter().flat_map(|sequence| sequence.tokens).copied();
        Ok((tokens.collect(), states, layout))
    }

    /// Mean KL to the parent on the first sequences of the training data.
    fn guard_loss(&self, caches: &mut Caches, model: Arc<Model>) -> Result<f64> {
        let runner = Runner::new(Arc::clone(&self.context.operations), model);
        let mut losses = Vec::new();
        for place in 0..GUARD_SEQUENCES.min(self.corpus.places.len()) {
            let (tokens, parent, layout) = self.parent_states(caches, &[place])?;
            let student = finals(&runner, &tokens, layout)?;
            let parent = Head {
                hidden: &parent,
                weight: self.resident.model.head(),
            };
            let operations = &self.context.operations;
            let rows = operations.distillation(runner.head(&student), parent, None)?.rows;
            losses.extend(operations.download(&rows)?.into_iter().map(f64::from));
        }
        Ok(mean(&losses).mean)
    }
}

/// Whether the record of another attempt names this artifact; what the record says of it does not matter.
fn is_anothers<R: AsRef<[u8]>>(records: &[(u64, R)], own: u64, artifact: &ArtifactId) -> bool {
    let name = artifact.0.as_bytes();
    let names = |record: &[u8]| record.windows(name.len().max(1)).any(|window| window == name);
    records
        .iter()
        .any(|(attempt, record)| *attempt != own && names(record.as_ref()))
}

impl<'a> Corpus<'a> {
    fn read(context: &Context<'_>, task: &'a Recover, vocab_size: usize) -> Result<Self> {
        let mut shards = Vec::with_capacity(task.shards.len());
        let mut places = Vec::new();
        let sequence_tokens = task.shards.first().map_or(0, |shard| shard.sequence_tokens);
        for described in &task.shards {
            if described.sequence_tokens != sequence_tokens {
                let reason =
                    "recovery shards have sequences of different lengths, expected one length".to_owned();
                return Err(Error::Invalid { reason });
            }
            let sequences = shard::read(context.store, described, vocab_size)?;
            places.extend((0..sequences.len()).map(|index| (shards.len(), index)));
            shards.push((&described.artifact, sequences));
        }
        if places.is_empty() || sequence_tokens == 0 {
            return Err(Error::Invalid {
                reason: "recovery has no sequence to train on".to_owned(),
            });
        }
        Ok(Self {
            shards,
            places,
            sequence_tokens,
        })
    }

    fn sequence(&self, place: usize) -> Result<Sequence<'_>> {
        let found = self.places.get(place).and_then(|(shard, index)| {
            let (artifact, sequences) = self.shards.get(*shard)?;
            let start = index * self.sequence_tokens;
            Some(Sequence {
                shard: artifact,
                index: *index,
                tokens: sequences.tokens.get(start..start + self.sequence_tokens)?,
            })
        });
        found.ok_or_else(|| Error::Invalid {
            reason: format!("there is no training sequence {place}"),
        })
    }
}

/// Which sequence comes when: every sequence once an epoch, each epoch in an order of its own.
struct Order {
    sequences: usize,
    seed: u64,
    epochs: std::cell::RefCell<(usize, Vec<usize>)>,
}

impl Order {
    fn new(sequences: usize, seed: u64) -> Self {
        Self {
            sequences,
            seed,
            epochs: std::cell::RefCell::new((usize::MAX, Vec::new())),
        }
    }

    fn at(&self, place: usize) -> usize {
        let (epoch, index) = (place / self.sequences.max(1), place % self.sequences.max(1));
        let mut current = self.epochs.borrow_mut();
        if current.0 != epoch {
            let mut order: Vec<usize> = (0..self.sequences).collect();
            let seed = self
                .seed
                .wrapping_add((epoch as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
            order.shuffle(&mut ChaCha8Rng::seed_from_u64(seed));
            *current = (epoch, order);
        }
        current.1.get(index).copied().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use espalier_proto::task::ArtifactId;

    use super::{Order, is_anothers};

    #[test]
    fn a_checkpoint_is_anothers_while_the_record_of_another_attempt_names_it() {
        let (ours, theirs) = (ArtifactId("ab".repeat(32)), ArtifactId("cd".repeat(32)));
        let record = |trainer: &ArtifactId| format!("{{\"trainer\":\"{trainer}\",\"losses\":[]}}");
        let alone = [(7, record(&ours)), (3, record(&theirs))];
        assert!(!is_anothers(&alone, 7, &ours));
        let equal_steps = [(7, record(&ours)), (3, record(&ours))];
        assert!(is_anothers(&equal_steps, 7, &ours));
        assert!(!is_anothers(&equal_steps, 7, &theirs));
    }

    #[test]
    fn every_sequence_comes_once_an_epoch_in_an_order_that_the_seed_gives() {
        let order = Order::new(10, 7);
        let mut first: Vec<usize> = (0..10).map(|place| order.at(place)).collect();
        let second: Vec<usize> = (10..20).map(|place| order.at(place)).collect();
        assert_ne!(first, second);
        assert_eq!(
            first,
            (0..10)
                .map(|place| Order::new(10, 7).at(place))
                .collect::<Vec<_>>()
        );
        first.sort_unstable();
        assert_eq!(first, (0..10).collect::<Vec<_>>());
    }
}
