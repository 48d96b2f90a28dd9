//! Prefill and decoding with a key/value cache, for a batch of sequences of equal length.
//!
//! Logits are computed for the last position of each sequence only.

use std::sync::Arc;

use espalier_arch::{Attention, BlockShape};

use crate::block::{self, Context, RopeTables, attention};
use crate::ops::{Head, KvCache, Layout, Operations};
use crate::runner::block_parts;
use crate::{BlockWeights, Error, Model, Result, Tensor};

/// A batch of sequences being decoded together.
#[derive(Debug)]
pub struct Session {
    operations: Arc<dyn Operations>,
    model: Arc<Model>,
    rope: RopeTables,
    sequences: usize,
    capacity: usize,
    length: usize,
    /// One for each block; none where the block keeps no state.
    caches: Vec<Option<KvCache>>,
}

impl Session {
    /// An empty session with room for `capacity` tokens of each of `sequences` sequences.
    ///
    /// # Errors
    /// When the caches do not fit the backend's memory.
    pub fn new(
        operations: Arc<dyn Operations>,
        model: Arc<Model>,
        sequences: usize,
        capacity: usize,
    ) -> Result<Self> {
        let mut caches = Vec::with_capacity(model.architecture.blocks.len());
        for block in &model.architecture.blocks {
            caches.push(match &block.shape {
                BlockShape::Attention(shape) => {
                    Some(empty_cache(operations.as_ref(), shape, sequences, capacity)?)
                }
                _ => None,
            });
        }
        Ok(Self {
            operations,
            model,
            rope: RopeTables::default(),
            sequences,
            capacity,
            length: 0,
            caches,
        })
    }

    /// Bytes of keys and values that a session of this size holds.
    pub fn cache_bytes(&self) -> usize {
        self.caches
            .iter()
            .flatten()
            .map(|cache| cache.keys.bytes() + cache.values.bytes())
            .sum()
    }

    /// Tokens of each sequence seen so far.
    pub fn length(&self) -> usize {
        self.length
    }

    /// Forgets every token; the caches stay allocated.
    pub fn clear(&mut self) {
        self.length = 0;
        self.caches
            .iter_mut()
            .flatten()
            .for_each(|cache| cache.length = 0);
    }

    /// Takes the next tokens of each sequence, sequence after sequence, and gives the logits that follow the
    /// last of each, `(sequences, vocabulary)`. May be called again to go on with a longer prompt.
    ///
    /// # Errors
    /// When the tokens do not divide among the sequences, do not fit the capacity or are outside the vocabulary.
    pub fn prefill(&mut self, tokens: &[u32]) -> Result<Tensor> {
        let layout = self.layout_of(tokens)?;
        let positions = self.length + layout.tokens;
        let operations = Arc::clone(&self.operations);
        let model = Arc::clone(&self.model);
        let batch = operations.tokens(tokens, None)?;
        let mut hidden = operations.embedding(&model.embedding, &batch)?;
        for index in 0..model.blocks.len() {
            let (shape, weights) = block_parts(&model, index)?;
            let table = self.rope.get(operations.as_ref(), shape, positions)?;
            let context = Context {
                operations: operations.as_ref(),
                layout,
                epsilon: model.architecture.norm_epsilon,
                rope: table.as_deref(),
            };
            let cache = self.caches.get_mut(index).and_then(Option::as_mut);
            hidden = match (shape, weights, cache) {
                (BlockShape::Attention(shape), BlockWeights::Attention(weights), Some(cache)) => {
                    attention::forward_cached(context, shape, weights, &hidden, cache, self.length)?
                }
                _ => block::forward(context, shape, weights, &hidden)?,
            };
        }
        self.length = positions;
        self.last_logits(&hidden, layout)
    }

    /// Takes one token of each sequence and gives the logits that follow, `(sequences, vocabulary)`.
    ///
    /// # Errors
    /// As [`Session::prefill`].
    pub fn decode(&mut self, tokens: &[u32]) -> Result<Tensor> {
        if tokens.len() != self.sequences {
            return Err(Error::Shape {
                operation: "decode",
                expected: format!("{} tokens, one a sequence", self.sequences),
                found: format!("{} tokens", tokens.len()),
            });
        }
        self.prefill(tokens)
    }

    /// Prefills `prompt` (sequence after sequence) and then takes the likeliest token `count` times. Gives
    /// the new tokens of each sequence, which ends early at a token of `stop` (not included).
    ///
    /// # Errors
    /// As [`Session::prefill`].
    pub fn generate_greedy(&mut self, prompt: &[u32], count: usize, stop: &[u32]) -> Result<Vec<Vec<u32>>> {
        let mut generated = vec![Vec::with_capacity(count); self.sequences];
        let mut ended = vec![false; self.sequences];
        let mut logits = self.prefill(prompt)?;
        for step in 0..count {
            let next = self.likeliest(&logits)?;
            for ((sequence, token), ended) in generated.iter_mut().zip(&next).zip(&mut ended) {
                *ended |= stop.contains(token);
                if !*ended {
                    sequence.push(*token);
                }
            }
            if step + 1 == count || ended.iter().all(|ended| *ended) {
                break;
            }
            logits = self.decode(&next)?;
        }
        Ok(generated)
    }

    /// The likeliest token of each row of `logits`; the first of equals.
    ///
    /// # Errors
    /// When the logits cannot be brought to the host.
    pub fn likeliest(&self, logits: &Tensor) -> Result<Vec<u32>> {
        self.operations.likeliest(logits)
    }

    fn layout_of(&self, tokens: &[u32]) -> Result<Layout> {
        let each = tokens.len() / self.sequences.max(1);
        if each == 0 || each * self.sequences != tokens.len() {
            return Err(Error::Shape {
                operation: "prefill",
                expected: format!(
                    "the same number of tokens for each of {} sequences",
                    self.sequences
                ),
                found: format!("{} tokens", tokens.len()),
            });
        }
        if self.length + each > self.capacity {
            return Err(Error::OutOfRange {
                what: "tokens in the session",
                value: self.length + each,
                expected: format!("at most its capacity of {}", self.capacity),
            });
        }
        Ok(Layout {
            sequences: self.sequences,
            tokens: each,
        })
    }

    fn last_logits(&self, hidden: &Tensor, layout: Layout) -> Result<Tensor> {
        let last = hidden.strided_rows(layout.tokens - 1, layout.tokens)?;
        let epsilon = self.model.architecture.norm_epsilon;
        let (normed, _) = self.operations.rms_norm(&last, &self.model.final_norm, epsilon)?;
        self.operations.logits(Head {
            hidden: &normed,
            weight: self.model.head(),
        })
    }
}

fn empty_cache(
    operations: &dyn Operations,
    shape: &Attention,
    sequences: usize,
    capacity: usize,
) -> Result<KvCache> {
    let (rows, element_type) = (sequences.saturating_mul(capacity), operations.activation_type());
    Ok(KvCache {
        keys: operations.zeros(rows, shape.kv_width(), element_type)?,
        values: operations.zeros(rows, shape.kv_width(), element_type)?,
        capacity,
        length: 0,
    })
}
