//! Tokenizers: from tokenizer.json, or rebuilt from what a GGUF file says.
//!
//! The encoder itself is Hugging Face's `tokenizers`; here live the rebuilding ([`gguf`]) and the rule that
//! says when a tokenizer fits a vocabulary. No model and no file access here.

pub mod gguf;

use std::collections::HashSet;

use espalier_arch::{Architecture, Family};

pub use tokenizers::Tokenizer;

/// Rows of padding that a vocabulary may carry beyond the tokenizer's entries, for alignment.
const PADDING: usize = 256;
/// Qwen's vocabularies are rounded far beyond their tokenizers: 152,064 rows for 151,665 tokens.
const QWEN_PADDING: usize = 1024;

/// Checks that a tokenizer and a vocabulary belong together.
///
/// Every id must have a row. Rows without an id are padding: fewer than 256 (1,024 in Qwen's families), in a
/// vocabulary that is a multiple of 64 and at least 64 times larger than its padding. More than that means
/// that the tokenizer is another model's or has been cut.
///
/// # Errors
/// What was found and what was expected.
pub fn check_vocabulary(tokenizer: &Tokenizer, architecture: &Architecture) -> Result<(), String> {
    let rows = architecture.vocab_size;
    let vocabulary = tokenizer.get_vocab(true);
    let ids: HashSet<u32> = vocabulary.values().copied().collect();
    let beyond = vocabulary
        .iter()
        .filter(|(_, id)| **id as usize >= rows)
        .max_by_key(|(_, id)| **id);
    if let Some((token, id)) = beyond {
        return Err(format!(
            "token {token:?} has id {id}, expected ids below {rows}, the rows of the embedding: the tokenizer has \
             more entries than the model's vocabulary"
        ));
    }
    let missing = rows - ids.len().min(rows);
    if missing == 0 {
        return Ok(());
    }
    let allowed = match architecture.family {
        Family::Qwen2 | Family::Qwen3 => QWEN_PADDING,
        Family::Llama | Family::Mistral | Family::NemotronH => PADDING,
    };
    if missing < allowed && rows.is_multiple_of(64) && missing.saturating_mul(64) <= rows {
        return Ok(());
    }
    Err(format!(
        "the tokenizer has {} entries, expected {rows}, the rows of the embedding (padding is taken for what it \
         is below {allowed} rows and a 64th of a vocabulary that is a multiple of 64)",
        ids.len()
    ))
}
