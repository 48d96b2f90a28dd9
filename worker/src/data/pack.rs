//! Documents as sequences of fixed length: tokens run on over sequence ends, with one separator after each
//! document, so that no token of a document is thrown away but the rest of the last one.

use espalier_model::checkpoint::Parent;
use espalier_model::tokenizer::Tokenizer;
use rayon::prelude::*;

use super::shard::Sequences;
use crate::{Error, Result};

/// Documents tokenised together.
const BATCH: usize = 32;
/// What families call the token that stands between documents, the most specific first.
const SEPARATORS: &[&str] = &["<|endoftext|>", "<|end_of_text|>", "</s>"];

/// The token that stands between documents: the one the tokenizer has for it, else the end of text, else
/// its beginning, else token 0.
///
/// # Errors
/// When the parent has no tokenizer.
pub fn separator(parent: &Parent) -> Result<u32> {
    let tokenizer = parent.tokenizer()?;
    let special = parent
        .side_files()
        .special_tokens(&parent.config, &|text| tokenizer.token_to_id(text));
    let named = SEPARATORS.iter().find_map(|text| tokenizer.token_to_id(text));
    Ok(named
        .or_else(|| special.eos.first().copied())
        .or(special.bos)
        .unwrap_or(0))
}

/// Packs documents into sequences, one role after another: a document's tokens serve one role only.
pub struct Packer<'a, I> {
    tokenizer: &'a Tokenizer,
    separator: u32,
    documents: I,
    ready: std::collections::VecDeque<Vec<u32>>,
}

impl<'a, I: Iterator<Item = Result<String>>> Packer<'a, I> {
    /// A packer over `documents`, in their order.
    pub fn new(tokenizer: &'a Tokenizer, separator: u32, documents: I) -> Self {
        Self {
            tokenizer,
            separator,
            documents,
            ready: std::collections::VecDeque::new(),
        }
    }

    /// The next `sequences` sequences of `sequence_tokens` tokens, or as many as the documents give. What
    /// is left of the last document used is dropped, so that roles stay disjoint by document.
    ///
    /// # Errors
    /// When a document cannot be read or tokenised.
    pub fn take(&mut self, sequences: usize, sequence_tokens: usize) -> Result<Sequences> {
        let wanted = sequences.saturating_mul(sequence_tokens);
        let mut tokens: Vec<u32> = Vec::with_capacity(wanted.min(1 << 24));
        while tokens.len() < wanted {
            let Some(document) = self.next_document()? else {
                break;
            };
            tokens.extend(document);
            tokens.push(self.separator);
        }
        let whole = tokens.len().min(wanted) / sequence_tokens.max(1) * sequence_tokens;
        tokens.truncate(whole);
        Ok(Sequences {
            tokens,
            sequence_tokens,
        })
    }

    fn next_document(&mut self) -> Result<Option<Vec<u32>>> {
        if self.ready.is_empty() {
            let batch: Vec<String> = self.documents.by_ref().take(BATCH).collect::<Result<_>>()?;
            let encoded: Vec<Vec<u32>> = batch
                .par_iter()
                .map(|text| {
                    self.tokenizer
                        .encode_fast(text.as_str(), false)
                        .map(|encoding| encoding.get_ids().to_vec())
                        .map_err(|error| Error::Tokenizer {
                            reason: error.to_string(),
                        })
                })
                .collect::<Result<_>>()?;
            self.ready.extend(encoded);
        }
        Ok(self.ready.pop_front())
    }
}
