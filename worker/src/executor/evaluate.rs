//! Evaluate: KL to the parent and perplexity on held-out sequences, and accuracy on benchmark files.

use espalier_model::Tensor;
use espalier_model::ops::{Head, Layout};
use espalier_model::runner::next_token_targets;
use espalier_proto::task::{Evaluate, Quality};

use super::caches::Batch;
use super::divergence::{count, mean, sequence_means};
use super::parent::Blocks;
use super::streams::{Form, Part, Start, Unit, finals};
use super::student::Trained;
use super::{Caches, Context, multiple_choice};
use crate::Result;

/// A model that is evaluated: the form that blocks are run in.
#[derive(Debug, Clone, Copy)]
pub(super) struct Subject<'a> {
    /// Its blocks, or its parent's.
    pub blocks: Blocks<'a>,
    /// Its form.
    pub form: &'a Form,
}

/// Sums over held-out text.
#[derive(Default)]
struct HeldOut {
    divergences: Vec<f64>,
    nats: f64,
    predictions: usize,
}

pub(super) fn run(context: &Context<'_>, caches: &mut Caches, task: &Evaluate) -> Result<Quality> {
    let held = caches.held(context, &task.parent)?;
    let batches = caches.batches(context, (&task.parent, &held), &task.validation)?;
    let architecture = held.architecture();
    let trained = match &task.student {
        Some(asked) => Trained::load(context, architecture, asked)?,
        None => None,
    };
    let form = match (&task.student, &trained) {
        (_, Some(trained)) => Form::whole(trained.blocks().architecture()),
        (Some(asked), None) => Form::of(architecture, &asked.candidate)?,
        (None, None) => Form::whole(architecture),
    };
    let subject = Subject {
        blocks: trained.as_ref().map_or_else(|| held.blocks(), Trained::blocks),
        form: &form,
    };
    let parts = 1 + task.benchmarks.len();
    let mut held_out = HeldOut::default();
    let parent_head = held.blocks().runner().model().head();
    let mut take = |batch: &Batch, own: Option<&Tensor>| {
        let parent = Head {
            hidden: &batch.finals,
            weight: parent_head,
        };
        let own = own.map(|own| subject.blocks.runner().head(own));
        held_out.add(context, batch, parent, own)
    };
    if task.student.is_some() {
        let units: Vec<Unit<'_>> = batches
            .iter()
            .map(|batch| subject.unit(&batch.tokens, batch.layout))
            .collect();
        let part = Part {
            index: 0,
            of: parts,
            note: "held-out text",
        };
        finals(context, subject.blocks, units, part, |index, own| {
            batches
                .get(index)
                .map_or(Ok(()), |batch| take(batch, own.first()))
        })?;
    } else {
        for batch in batches.iter() {
            context.check_cancelled()?;
            take(batch, None)?;
        }
    }
    let mut benchmarks = Vec::with_capacity(task.benchmarks.len());
    for (index, file) in task.benchmarks.iter().enumerate() {
        let part = Part {
            index: 1 + index,
            of: parts,
            note: file,
        };
        benchmarks.push(multiple_choice::run(
            context,
            held.parent(),
            subject,
            (file, part),
            task.benchmark_examples,
        )?);
    }
    context.progress(parts, parts, "blocks", String::new)?;
    let divergence = mean(&held_out.divergences);
    Ok(Quality {
        divergence: divergence.mean,
        divergence_error: divergence.error,
        perplexity: (held_out.nats / count(held_out.predictions.max(1))).exp(),
        benchmarks,
    })
}

impl<'a> Subject<'a> {
    /// A batch of its texts.
    pub fn unit(self, tokens: &'a [u32], layout: Layout) -> Unit<'a> {
        Unit {
            forms: std::slice::from_ref(self.form),
            layout,
            start: Start::Tokens(tokens),
            own: None,
        }
    }
}

impl HeldOut {
    /// Adds a batch; `own` is the student's head, none for the parent itself.
    fn add(
        &mut self,
        context: &Context<'_>,
        batch: &Batch,
        parent: Head<'_>,
        own: Option<Head<'_>>,
    ) -> Result<()> {
        let operations = &*context.operations;
        match own {
            Some(own) => {
                let losses = operations.distillation(own, parent, None)?;
                let rows = operations.download(&losses.rows)?;
                self.divergences.extend(sequence_means(&rows, batch.layout));
            }
            None => self.divergences.extend(vec![0.0; batch.layout.sequences]),
        }
        let targets = next_token_targets(&batch.tokens, batch.layout);
        let tokens = operations.tokens(&[], Some(&targets))?;
        let losses = operations.cross_entropy(own.unwrap_or(parent), &tokens, None)?;
        let rows = operations.download(&losses.rows)?.into_iter();
        self.nats += rows.map(f64::from).sum::<f64>();
        self.predictions += targets.iter().flatten().count();
        Ok(())
    }
}
