//! Evaluate: KL to the parent and perplexity on held-out sequences, and accuracy on benchmark files.

use std::sync::Arc;

use espalier_model::ops::Head;
use espalier_model::runner::{Runner, next_token_targets};
use espalier_proto::task::{Evaluate, Quality};

use super::caches::finals;
use super::divergence::{count, mean, sequence_means};
use super::{Caches, Context, multiple_choice, student};
use crate::Result;

pub(super) fn run(context: &Context<'_>, caches: &mut Caches, task: &Evaluate) -> Result<Quality> {
    let resident = caches.parent(context, &task.parent)?;
    let batches = caches.batches(context, &task.parent, &task.validation, false)?;
    let operations = &*context.operations;
    let model = match &task.student {
        Some(asked) => Some(Arc::new(student::load(context, &resident, asked)?)),
        None => None,
    };
    let runner = model.map(|model| Runner::new(Arc::clone(&context.operations), model));
    let total = batches.len() + task.benchmarks.len();
    let (mut divergences, mut nats, mut predictions) = (Vec::new(), 0.0, 0);
    for (index, batch) in batches.iter().enumerate() {
        context.progress(index, total, "batches", || "held-out text".to_owned())?;
        let parent = Head {
            hidden: &batch.finals,
            weight: resident.model.head(),
        };
        let own = runner
            .as_ref()
            .map(|runner| finals(runner, &batch.tokens, batch.layout))
            .transpose()?;
        let head = match (&runner, &own) {
            (Some(runner), Some(own)) => {
                let head = runner.head(own);
                let losses = operations.distillation(head, parent, None)?;
                divergences.extend(sequence_means(&operations.download(&losses.rows)?, batch.layout));
                head
            }
            _ => {
                divergences.extend(vec![0.0; batch.layout.sequences]);
                parent
            }
        };
        let targets = next_token_targets(&batch.tokens, batch.layout);
        let losses = operations.cross_entropy(head, &operations.tokens(&[], Some(&targets))?, None)?;
        nats += operations
            .download(&losses.rows)?
            .into_iter()
            .map(f64::from)
            .sum::<f64>();
        predictions += targets.iter().flatten().count();
    }
    let mut benchmarks = Vec::with_capacity(task.benchmarks.len());
    for (index, file) in task.benchmarks.iter().enumerate() {
        context.progress(batches.len() + index, total, "batches", || file.clone())?;
        let runner = runner.as_ref().unwrap_or(&resident.runner);
        benchmarks.push(multiple_choice::run(
            context,
            &resident.parent,
            runner,
            file,
            task.benchmark_examples,
        )?);
    }
    context.progress(total, total, "batches", String::new)?;
    let divergence = mean(&divergences);
    Ok(Quality {
        divergence: divergence.mean,
        divergence_error: divergence.error,
        perplexity: (nats / count(predictions.max(1))).exp(),
        benchmarks,
    })
}
