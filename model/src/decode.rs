//! Prefill and decoding with a key/value cache, for a batch of sequences of equal length.
//!
//! Logits are computed for the last position of each sequence only. Where the backend keeps what a step of one token
//! queues ([`Decoding`]), such steps are its affair, and the host only says which tokens, or not even that.

use std::sync::Arc;

use espalier_arch::{Attention, BlockShape};

use crate::block::{self, Context, RopeTables, any_depends_on_length, attention, mlp};
use crate::ops::decoding::Decoding;
use crate::ops::{Head, KvCache, Layout, Operations, RopeTable};
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
    steps: Steps,
}

/// Steps after which a backend that records them replays: one is run, one recorded.
const STEPS_TO_SETTLE: usize = 2;

/// How steps of one token a sequence are run.
#[derive(Debug)]
enum Steps {
    /// Nobody asked for one yet.
    Unknown,
    /// As a prompt is.
    AsPrompt,
    /// By the backend, with a table of every position for each block.
    Kept(Box<dyn Decoding>, Vec<Option<Arc<RopeTable>>>),
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
            steps: Steps::Unknown,
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
        self.hold(0);
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
        let stepped = self.step(Some(tokens))?;
        match &self.steps {
            Steps::Kept(decoding, _) if stepped => decoding.last_logits(),
            _ => self.prefill(tokens),
        }
    }

    /// Prefills `prompt` (sequence after sequence) and then takes the likeliest token `count` times. Gives
    /// the new tokens of each sequence, which ends early at a token of `stop` (not included).
    ///
    /// # Errors
    /// As [`Session::prefill`].
    pub fn generate_greedy(&mut self, prompt: &[u32], count: usize, stop: &[u32]) -> Result<Vec<Vec<u32>>> {
        let mut generated = Generated::new(self.sequences, stop);
        let logits = self.prefill(prompt)?;
        let Some(steps) = count.checked_sub(1) else {
            return Ok(generated.sequences);
        };
        let first = self.likeliest(&logits)?;
        if !generated.take(&first) {
            self.go_on(&first, steps, |next| generated.take(next))?;
        }
        Ok(generated.sequences)
    }

    /// Takes `tokens`, one of each sequence, and then `steps - 1` times the likeliest ones; `each` is shown the
    /// likeliest after every step, in order, and ends it all by saying true. The session may by then have taken a step
    /// more, of the tokens shown last.
    ///
    /// # Errors
    /// As [`Session::prefill`].
    pub fn go_on(
        &mut self,
        tokens: &[u32],
        steps: usize,
        mut each: impl FnMut(&[u32]) -> bool,
    ) -> Result<()> {
        let mut next = tokens.to_vec();
        // What a step on its way will give, while the one after it is queued.
        let mut before = None;
        for index in 0..steps {
            let given = (index == 0).then_some(next.as_slice());
            if !self.step(given)? {
                let logits = self.prefill(&next)?;
                next = self.likeliest(&logits)?;
                if each(&next) {
                    return Ok(());
                }
                continue;
            }
            let Steps::Kept(decoding, _) = &self.steps else {
                continue;
            };
            if let Some(before) = before.replace(decoding.likeliest()?)
                && each(&before.read()?)
            {
                return Ok(());
            }
        }
        if let Some(last) = before {
            each(&last.read()?);
        }
        Ok(())
    }

    /// Makes the next step of one token a sequence like all later ones: where the backend records steps, the first are
    /// slower. What the session holds stays as it is; it must have room for one token more. Waits for the device.
    ///
    /// # Errors
    /// As [`Session::prefill`].
    pub fn settle(&mut self) -> Result<()> {
        let (held, tokens) = (self.length, vec![0; self.sequences]);
        for _ in 0..STEPS_TO_SETTLE {
            if !self.step(Some(&tokens))? {
                return Ok(());
            }
            self.hold(held);
        }
        if let Steps::Kept(decoding, _) = &self.steps {
            decoding.likeliest()?.read()?;
        }
        Ok(())
    }

    /// Holds `length` tokens of each sequence, all of which the caches have.
    fn hold(&mut self, length: usize) {
        self.length = length;
        for cache in self.caches.iter_mut().flatten() {
            cache.length = length;
        }
    }

    /// Takes one token of each sequence, the likeliest where none are given, by the backend's own steps; false where it
    /// has none.
    fn step(&mut self, tokens: Option<&[u32]>) -> Result<bool> {
        if matches!(self.steps, Steps::Unknown) {
            self.steps = self.new_steps()?;
        }
        if matches!(self.steps, Steps::AsPrompt) {
            return Ok(false);
        }
        self.expect_room(1)?;
        let held = self.length;
        let Self {
            operations,
            model,
            caches,
            steps: Steps::Kept(decoding, tables),
            sequences,
            ..
        } = self
        else {
            return Ok(false);
        };
        let layout = Layout {
            sequences: *sequences,
            tokens: 1,
        };
        let step =
            |decoding: &dyn Decoding| token(operations.as_ref(), model, caches, tables, layout, decoding);
        decoding.run(tokens, held, &step)?;
        self.hold(held + 1);
        Ok(true)
    }

    fn new_steps(&self) -> Result<Steps> {
        let architecture = &self.model.architecture;
        let shapes = || architecture.blocks.iter().map(|block| &block.shape);
        if any_depends_on_length(shapes(), self.capacity) {
            return Ok(Steps::AsPrompt);
        }
        let Some(decoding) = self.operations.decoding(self.sequences, architecture)? else {
            return Ok(Steps::AsPrompt);
        };
        let table = |shape| self.rope.get(self.operations.as_ref(), shape, self.capacity);
        Ok(Steps::Kept(decoding, shapes().map(table).collect::<Result<_>>()?))
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
        self.expect_room(each)?;
        Ok(Layout {
            sequences: self.sequences,
            tokens: each,
        })
    }

    fn expect_room(&self, tokens: usize) -> Result<()> {
        if self.length + tokens > self.capacity {
            return Err(Error::OutOfRange {
                what: "tokens in the session",
                value: self.length + tokens,
                expected: format!("at most its capacity of {}", self.capacity),
            });
        }
        Ok(())
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

/// One token of each sequence through the whole model.
fn token(
    operations: &dyn Operations,
    model: &Model,
    caches: &[Option<KvCache>],
    tables: &[Option<Arc<RopeTable>>],
    layout: Layout,
    decoding: &dyn Decoding,
) -> Result<Tensor> {
    let epsilon = model.architecture.norm_epsilon;
    let mut hidden = decoding.embedding(&model.embedding)?;
    for (index, (cache, table)) in caches.iter().zip(tables).enumerate() {
        let context = Context {
            operations,
            layout,
            epsilon,
            rope: table.as_deref(),
        };
        let (shape, weights) = block_parts(model, index)?;
        hidden = match (shape, weights, cache) {
            (BlockShape::Attention(shape), BlockWeights::Attention(weights), Some(cache)) => {
                attention::forward_step(context, decoding, shape, weights, &hidden, cache)?
            }
            (BlockShape::Mlp(_), BlockWeights::Mlp(weights), _) => {
                mlp::forward_step(context, decoding, weights, &hidden)?
            }
            _ => block::forward(context, shape, weights, &hidden)?,
        };
    }
    decoding.logits(&hidden, &model.final_norm, epsilon, model.head())
}

/// The tokens generated so far.
struct Generated<'a> {
    sequences: Vec<Vec<u32>>,
    ended: Vec<bool>,
    stop: &'a [u32],
}

impl<'a> Generated<'a> {
    fn new(sequences: usize, stop: &'a [u32]) -> Self {
        Self {
            sequences: vec![Vec::new(); sequences],
            ended: vec![false; sequences],
            stop,
        }
    }

    /// Takes the next token of each sequence that has not ended; whether all have.
    fn take(&mut self, next: &[u32]) -> bool {
        for ((sequence, token), ended) in self.sequences.iter_mut().zip(next).zip(&mut self.ended) {
            *ended |= self.stop.contains(token);
            if !*ended {
                sequence.push(*token);
            }
        }
        self.ended.iter().all(|ended| *ended)
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
