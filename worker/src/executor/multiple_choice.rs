//! Benchmarks as JSONL: `query`, `choices`, `gold` (the choice with the highest log-likelihood a token) or
//! `context`, `continuation` (right when every token of the continuation is the likeliest).
//!
//! A query that begins with `Question:` is answered after `\nAnswer:`, as the files' makers do; a choice
//! follows after a space. Sequences are padded on the right, which causal attention cannot see.

use std::path::{Path, PathBuf};

use espalier_model::Tensor;
use espalier_model::checkpoint::Parent;
use espalier_model::ops::{Axis, Head, Layout};
use espalier_model::runner::Runner;
use espalier_proto::task::Benchmark;
use serde::Deserialize;
use std::io::BufRead;

use super::Context;
use super::divergence::count;
use super::evaluate::Subject;
use super::streams::{Part, Unit, finals};
use crate::data::open::open;
use crate::{Error, Result};

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Line {
    Choice {
        query: String,
        choices: Vec<String>,
        gold: usize,
    },
    LastWord {
        context: String,
        continuation: String,
    },
}

/// One text to score: where its continuation begins.
struct Item {
    example: usize,
    tokens: Vec<u32>,
    prefix: usize,
}

/// What a continuation got.
#[derive(Debug, Clone, Copy)]
struct Scored {
    mean_log_likelihood: f64,
    greedy: bool,
}

/// Texts that run together.
struct Batch {
    /// Which of the items, by their place.
    items: Vec<usize>,
    layout: Layout,
    /// Filled up to the longest.
    tokens: Vec<u32>,
}

/// Accuracy on one file, whose part of the progress it is.
pub(super) fn run(
    context: &Context<'_>,
    parent: &Parent,
    subject: Subject<'_>,
    (file, part): (&str, Part<'_>),
    examples: usize,
) -> Result<Benchmark> {
    let path = PathBuf::from(file);
    let lines = read(&path, examples)?;
    let longest = subject.blocks.architecture().max_positions;
    let mut items = Vec::new();
    for (example, line) in lines.iter().enumerate() {
        context.check_cancelled()?;
        items.extend(items_of(parent, example, line, longest)?);
    }
    let scored = score(context, subject, part, &items)?;
    let right = lines.iter().enumerate().filter(|(example, line)| {
        let own: Vec<Scored> = items
            .iter()
            .zip(&scored)
            .filter(|(item, _)| item.example == *example)
            .map(|(_, scored)| *scored)
            .collect();
        is_right(line, &own)
    });
    let n = count(lines.len());
    let accuracy = count(right.count()) / n;
    Ok(Benchmark {
        name: path
            .file_stem()
            .map(|stem| stem.to_string_lossy().into_owned())
            .unwrap_or_default(),
        accuracy,
        accuracy_error: (accuracy * (1.0 - accuracy) / n).sqrt(),
        examples: lines.len(),
    })
}

fn read(path: &Path, examples: usize) -> Result<Vec<Line>> {
    let mut lines = Vec::new();
    for (index, line) in open(path)?.lines().enumerate() {
        let refused = |reason: String| Error::Data {
            path: path.to_owned(),
            line: Some(index + 1),
            reason,
        };
        let line = line.map_err(|error| refused(format!("cannot be read: {error}")))?;
        if line.trim().is_empty() {
            continue;
        }
        if lines.len() == examples {
            break;
        }
        let parsed: Line = serde_json::from_str(&line).map_err(|error| {
            refused(format!(
                "{error}; expected query, choices and gold, or context and continuation"
            ))
        })?;
        if let Line::Choice { choices, gold, .. } = &parsed
            && *gold >= choices.len()
        {
            return Err(refused(format!(
                "gold is {gold}, expected below {} choices",
                choices.len()
            )));
        }
        lines.push(parsed);
    }
    if lines.is_empty() {
        return Err(Error::Data {
            path: path.to_owned(),
            line: None,
            reason: "no example in it".to_owned(),
        });
    }
    Ok(lines)
}

fn items_of(parent: &Parent, example: usize, line: &Line, longest: usize) -> Result<Vec<Item>> {
    let tokenizer = parent.tokenizer()?;
    let encode = |text: &str| {
        tokenizer
            .encode_fast(text, false)
            .map(|encoding| encoding.get_ids().to_vec())
            .map_err(|error| Error::Tokenizer {
                reason: error.to_string(),
            })
    };
    let item = |before: &str, after: &str| -> Result<Item> {
        let mut tokens = encode(before)?;
        let continuation = encode(&format!(" {}", after.trim_start()))?;
        let prefix = tokens.len();
        tokens.extend(continuation);
        // A text longer than the model's positions loses its beginning.
        let cut = tokens.len().saturating_sub(longest).min(prefix.saturating_sub(1));
        tokens.drain(..cut);
        Ok(Item {
            example,
            tokens,
            prefix: prefix - cut,
        })
    };
    match line {
        Line::Choice { query, choices, .. } => {
            let answer = if query.starts_with("Question:") {
                "\nAnswer:"
            } else {
                ""
            };
            let before = format!("{}{answer}", query.trim_end());
            choices.iter().map(|choice| item(&before, choice)).collect()
        }
        Line::LastWord {
            context,
            continuation,
        } => Ok(vec![item(context.trim_end(), continuation)?]),
    }
}

fn is_right(line: &Line, scored: &[Scored]) -> bool {
    match line {
        Line::LastWord { .. } => scored.first().is_some_and(|scored| scored.greedy),
        Line::Choice { gold, .. } => {
            let ranked = scored.iter().map(|scored| scored.mean_log_likelihood).enumerate();
            // The first of equals wins, so that a model that knows nothing gets no credit for order.
            let best = ranked.reduce(|best, next| if next.1 > best.1 { next } else { best });
            best.is_some_and(|(index, _)| index == *gold)
        }
    }
}

/// Scores texts in batches of similar length.
fn score(context: &Context<'_>, subject: Subject<'_>, part: Part<'_>, items: &[Item]) -> Result<Vec<Scored>> {
    let mut scored = vec![
        Scored {
            mean_log_likelihood: f64::NEG_INFINITY,
            greedy: false
        };
        items.len()
    ];
    let plan = subject.blocks.plan(context);
    let batches = batches(items, plan.rows(subject.blocks.architecture()));
    let units: Vec<Unit<'_>> = batches
        .iter()
        .map(|batch| subject.unit(&batch.tokens, batch.layout))
        .collect();
    finals(context, subject.blocks, units, part, |index, normed| {
        let (Some(batch), Some(normed)) = (batches.get(index), normed.first()) else {
            return Ok(());
        };
        let own: Vec<&Item> = batch.items.iter().map(|place| &items[*place]).collect();
        let results = judge(
            subject.blocks.runner(),
            &own,
            batch.layout,
            normed,
            plan.logit_rows(),
        )?;
        for (place, result) in batch.items.iter().zip(results) {
            scored[*place] = result;
        }
        Ok(())
    })?;
    Ok(scored)
}

/// The items by length, as many together as have at most so many rows when they are filled up.
fn batches(items: &[Item], rows: usize) -> Vec<Batch> {
    let mut order: Vec<usize> = (0..items.len()).collect();
    order.sort_by_key(|index| items[*index].tokens.len());
    let mut batches = Vec::new();
    let mut rest = order.as_slice();
    while let Some(first) = rest.first() {
        let mut together = 1;
        let mut length = items[*first].tokens.len();
        while let Some(next) = rest.get(together) {
            let longer = items[*next].tokens.len();
            if longer.saturating_mul(together + 1) > rows {
                break;
            }
            (together, length) = (together + 1, longer);
        }
        let (own, left) = rest.split_at(together);
        let layout = Layout {
            sequences: own.len(),
            tokens: length.max(1),
        };
        let mut tokens = Vec::with_capacity(layout.rows());
        for (sequence, index) in own.iter().enumerate() {
            tokens.extend_from_slice(&items[*index].tokens);
            tokens.resize((sequence + 1) * layout.tokens, 0);
        }
        batches.push(Batch {
            items: own.to_vec(),
            layout,
            tokens,
        });
        rest = left;
    }
    batches
}

/// What each item's continuation gets by the final-normed states of its batch.
fn judge(
    runner: &Runner,
    items: &[&Item],
    layout: Layout,
    normed: &Tensor,
    logit_rows: usize,
) -> Result<Vec<Scored>> {
    // The head is only asked about rows that predict a token of a continuation.
    let (mut rows, mut targets) = (Vec::new(), Vec::new());
    for (sequence, item) in items.iter().enumerate() {
        for (place, target) in item.tokens.iter().enumerate().skip(item.prefix.max(1)) {
            rows.push(sequence * layout.tokens + place - 1);
            targets.push(Some(*target));
        }
    }
    let operations = runner.operations().as_ref();
    let wanted = operations.gather(normed, &rows, Axis::Rows)?;
    let head = runner.head(&wanted);
    let losses = operations.cross_entropy(head, &operations.tokens(&[], Some(&targets))?, None)?;
    let losses = operations.download(&losses.rows)?;
    let greedy = likeliest(runner, &wanted, logit_rows)?;
    let mut results = Vec::with_capacity(items.len());
    let mut at = 0;
    for item in items {
        let continuation = item.tokens.len() - item.prefix.max(1).min(item.tokens.len());
        let own = at..at + continuation;
        let sum: f64 = losses[own.clone()].iter().map(|loss| f64::from(*loss)).sum();
        let all = greedy[own.clone()]
            .iter()
            .zip(&targets[own])
            .all(|(guess, target)| Some(*guess) == *target);
        results.push(Scored {
            mean_log_likelihood: -sum / count(continuation.max(1)),
            greedy: all,
        });
        at += continuation;
    }
    Ok(results)
}

/// The likeliest next token of each row, a few rows at a time.
fn likeliest(runner: &Runner, hidden: &Tensor, rows: usize) -> Result<Vec<u32>> {
    let operations = runner.operations().as_ref();
    let mut found = Vec::with_capacity(hidden.rows());
    let mut start = 0;
    while start < hidden.rows() {
        let part = hidden.narrow_rows(start, rows.min(hidden.rows() - start))?;
        let logits = operations.logits(Head {
            hidden: &part,
            weight: runner.model().head(),
        })?;
        found.extend(operations.likeliest(&logits)?);
        start += part.rows();
    }
    Ok(found)
}
