//! Ingest: the parent is opened and checked, and the data becomes shards, one set for each role.
//!
//! Roles are disjoint by document: validation (from files of its own, in their order, or held out from the
//! training files), then calibration, scoring and recovery from the training files in the sample's order.
//! A training document that also stands in the validation set is left out.

use std::collections::HashSet;
use std::path::Path;

use espalier_model::checkpoint::Parent;
use espalier_proto::task::{Ingest, Ingested, ParentRef, Shard};

use super::{Caches, Context};
use crate::data::chat::ChatTemplate;
use crate::data::documents::Documents;
use crate::data::pack::{Packer, separator};
use crate::data::sample::{Key, Sample};
use crate::data::shard::{self, Sequences};
use crate::{Error, Result};

/// Text kept for each token wanted: several times what any tokenizer needs.
const BYTES_PER_TOKEN: usize = 16;
/// Text kept at the least.
const SLACK_BYTES: usize = 4 << 20;
/// Tokens of a calibration shard: one task each.
const CALIBRATION_SHARD_TOKENS: usize = 16_384;
/// Tokens of a recovery shard.
const RECOVERY_SHARD_TOKENS: usize = 1 << 20;

pub(super) fn run(context: &Context<'_>, caches: &mut Caches, task: &Ingest) -> Result<Ingested> {
    validate(task)?;
    context.progress(0, 4, "steps", || format!("opening {}", task.parent))?;
    caches.clear();
    let parent = Parent::open(&task.parent)?;
    if task.sequence_tokens > parent.architecture.max_positions {
        let reason = format!(
            "budget.sequence_tokens is {}, expected at most {}: the parent was made for no longer sequences",
            task.sequence_tokens, parent.architecture.max_positions
        );
        return Err(Error::Invalid { reason });
    }
    let template = chat_template(&parent)?;
    context.progress(1, 4, "steps", || "reading documents".to_owned())?;
    let mut reader = Reader {
        context,
        template: &template,
        documents: 0,
        empty: 0,
    };
    let held_out = task.validation.is_empty();
    let validation_text = reader.in_order(task)?;
    let before = reader.documents;
    let train = reader.sample(task, &validation_text, held_out)?;
    let train_read = reader.documents - before;
    let (documents, empty_documents) = (reader.documents, reader.empty);

    context.progress(2, 4, "steps", || format!("tokenising {documents} documents"))?;
    let roles = tokenise(context, &parent, task, validation_text, train, train_read)?;
    context.progress(3, 4, "steps", || "storing shards".to_owned())?;
    let store = |sequences: &Sequences| shard::write(context.store, sequences);
    let pieces = |sequences: &Sequences, tokens: usize| -> Result<Vec<Shard>> {
        sequences
            .pieces(tokens / task.sequence_tokens)
            .iter()
            .map(store)
            .collect()
    };
    let ingested = Ingested {
        parent: ParentRef {
            source: task.parent.clone(),
            fingerprint: parent.fingerprint()?,
            permutation: None,
        },
        architecture: parent.architecture,
        calibration: pieces(&roles.calibration, CALIBRATION_SHARD_TOKENS)?,
        scoring: store(&roles.scoring)?,
        recovery: pieces(&roles.recovery, RECOVERY_SHARD_TOKENS)?,
        validation: store(&roles.validation)?,
        documents,
        empty_documents,
    };
    context.progress(4, 4, "steps", String::new)?;
    Ok(ingested)
}

fn validate(task: &Ingest) -> Result<()> {
    if task.train.is_empty() {
        return Err(Error::Invalid {
            reason: "data.train is empty, expected at least one file".to_owned(),
        });
    }
    if task.sequence_tokens < 2 {
        let reason = format!(
            "budget.sequence_tokens is {}, expected at least 2",
            task.sequence_tokens
        );
        return Err(Error::Invalid { reason });
    }
    Ok(())
}

fn chat_template(parent: &Parent) -> Result<ChatTemplate> {
    let side = parent.side_files();
    let text = |key: &str| side.token_text(key).unwrap_or_default();
    match side.chat_template() {
        Some(template) => ChatTemplate::parse(&template, text("bos_token"), text("eos_token")),
        None => Ok(ChatTemplate::chat_ml()),
    }
}

struct Reader<'a, 'b> {
    context: &'a Context<'b>,
    template: &'a ChatTemplate,
    documents: u64,
    empty: u64,
}

impl Reader<'_, '_> {
    /// Documents of the validation files, in order, until there are enough.
    fn in_order(&mut self, task: &Ingest) -> Result<Vec<String>> {
        let enough = text_bytes(task.validation_tokens);
        let mut bytes = 0;
        let mut texts = Vec::new();
        for file in &task.validation {
            self.each(file, |text| {
                bytes += text.len();
                texts.push(text);
                bytes < enough
            })?;
            if bytes >= enough {
                break;
            }
        }
        Ok(texts)
    }

    /// A seeded sample of the training files, without what stands in the validation set.
    fn sample(&mut self, task: &Ingest, validation: &[String], held_out: bool) -> Result<Vec<String>> {
        let train_tokens = [task.calibration_tokens, task.scoring_tokens, task.recovery_tokens];
        let mut tokens: u64 = train_tokens
            .iter()
            .fold(0, |sum, tokens| sum.saturating_add(*tokens));
        if held_out {
            tokens = tokens.saturating_add(task.validation_tokens);
        }
        let mut sample = Sample::new(task.seed, text_bytes(tokens));
        let excluded: HashSet<Key> = validation.iter().map(|text| sample.key(text)).collect();
        for file in &task.train {
            self.each(file, |text| {
                if excluded.is_empty() || !excluded.contains(&sample.key(&text)) {
                    sample.offer(text);
                }
                true
            })?;
        }
        Ok(sample.into_documents())
    }

    fn each(&mut self, file: &str, mut take: impl FnMut(String) -> bool) -> Result<()> {
        for document in Documents::open(Path::new(file), self.template)? {
            let text = document?;
            self.documents += 1;
            if self.documents.is_multiple_of(1024) {
                self.context
                    .progress(1, 4, "steps", || format!("{} documents read", self.documents))?;
            }
            if text.trim().is_empty() {
                self.empty += 1;
            } else if !take(text) {
                break;
            }
        }
        Ok(())
    }
}

fn text_bytes(tokens: u64) -> usize {
    usize::try_from(tokens)
        .unwrap_or(usize::MAX)
        .saturating_mul(BYTES_PER_TOKEN)
        .saturating_add(SLACK_BYTES)
}

struct Roles {
    validation: Sequences,
    calibration: Sequences,
    scoring: Sequences,
    recovery: Sequences,
}

fn tokenise(
    context: &Context<'_>,
    parent: &Parent,
    task: &Ingest,
    validation: Vec<String>,
    train: Vec<String>,
    train_read: u64,
) -> Result<Roles> {
    let kept = train.len();
    let separator = separator(parent)?;
    let tokenizer = parent.tokenizer()?;
    let count = |tokens: u64| {
        usize::try_from(tokens)
            .unwrap_or(usize::MAX)
            .checked_div(task.sequence_tokens)
            .unwrap_or(0)
            .max(1)
    };
    // Each document is a chance to stop.
    let each = |text: String| context.check_cancelled().map(|()| text);
    let mut train = Packer::new(tokenizer, separator, train.into_iter().map(each));
    let length = task.sequence_tokens;
    let held_out = if task.validation.is_empty() {
        train.take(count(task.validation_tokens), length)?
    } else {
        let mut packer = Packer::new(tokenizer, separator, validation.into_iter().map(each));
        packer.take(count(task.validation_tokens), length)?
    };
    let roles = Roles {
        validation: held_out,
        calibration: train.take(count(task.calibration_tokens), length)?,
        scoring: train.take(count(task.scoring_tokens), length)?,
        recovery: train.take(count(task.recovery_tokens), length)?,
    };
    let validation_from = if task.validation.is_empty() {
        "train"
    } else {
        "validation"
    };
    for (role, files, sequences) in [
        ("validation", validation_from, &roles.validation),
        ("calibration", "train", &roles.calibration),
        ("scoring", "train", &roles.scoring),
        ("recovery", "train", &roles.recovery),
    ] {
        if sequences.is_empty() {
            return Err(Error::Invalid {
                reason: format!(
                    "data.{files} has too little text: nothing is left for {role} (each of validation, calibration, \
                     scoring and recovery needs at least {length} tokens of documents of its own, and of the \
                     {train_read} documents of data.train {kept} are not empty, not in the validation text and not \
                     equal to another); add text, split long documents, or lower the budget"
                ),
            });
        }
    }
    Ok(roles)
}
