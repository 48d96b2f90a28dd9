//! The sequences of a recovery's shards, and which comes when.

use std::cell::RefCell;

use espalier_proto::task::{ArtifactId, Recover};
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

use crate::data::shard::{self, Sequences};
use crate::executor::Context;
use crate::executor::caches::Sequence;
use crate::{Error, Result};

/// Every sequence of every shard, addressed in order.
pub(super) struct Corpus<'a> {
    shards: Vec<(&'a ArtifactId, Sequences)>,
    places: Vec<(usize, usize)>,
    /// Tokens of each.
    pub(super) sequence_tokens: usize,
}

impl<'a> Corpus<'a> {
    pub(super) fn read(context: &Context<'_>, task: &'a Recover, vocab_size: usize) -> Result<Self> {
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

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.places.len()
    }

    pub(super) fn sequence(&self, place: usize) -> Result<Sequence<'_>> {
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
pub(super) struct Order {
    sequences: usize,
    seed: u64,
    epochs: RefCell<(usize, Vec<usize>)>,
}

impl Order {
    pub(super) fn new(sequences: usize, seed: u64) -> Self {
        Self {
            sequences,
            seed,
            epochs: RefCell::new((usize::MAX, Vec::new())),
        }
    }

    pub(super) fn at(&self, place: usize) -> usize {
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
    use super::Order;

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
