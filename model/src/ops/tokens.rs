//! The tokens of one batch where the backend wants them, made once and used by every operation of the batch.
//!
//! Whoever makes a [`TokenBatch`] pays for bringing it to the device; afterwards no operation needs the host.

use super::check;
use super::cuda::{DeviceTokens, Matrix};
use crate::{Error, Result};

/// Tokens of one batch, and what its head should predict, from [`super::Operations::tokens`].
#[derive(Debug)]
pub struct TokenBatch {
    storage: Storage,
    ids: usize,
    targets: Option<usize>,
    largest_id: Option<u32>,
    largest_target: Option<u32>,
}

/// A variant for each backend.
#[derive(Debug)]
enum Storage {
    Cpu(HostTokens),
    Cuda(CudaTokens),
}

/// A batch on a CUDA device.
#[derive(Debug)]
pub(crate) struct CudaTokens {
    /// The tokens, and their rows sorted by token.
    pub(crate) ids: DeviceTokens,
    /// What each row should predict, an i32 each, below 0 for none; as long as the targets given.
    pub(crate) targets: Matrix,
}

/// What every backend makes its batch of.
#[derive(Debug)]
pub(crate) struct HostTokens {
    /// The token of each row.
    pub(crate) ids: Vec<u32>,
    /// What each row should predict: empty when the batch has no targets; none leaves a row out.
    pub(crate) targets: Vec<Option<u32>>,
    /// The rows by their token, for whoever adds up what they give to a table.
    pub(crate) by_token: RowsByToken,
}

/// Rows sorted by token; equal tokens in the order of their rows, so that sums have one order.
#[derive(Debug)]
pub(crate) struct RowsByToken {
    /// Every token there is, rising.
    pub(crate) tokens: Vec<u32>,
    /// Where each token's rows begin in `rows`, and where the last one's end.
    pub(crate) starts: Vec<u32>,
    /// All rows.
    pub(crate) rows: Vec<u32>,
}

impl HostTokens {
    /// `targets` has an entry for each row of the head's input, which need not be the rows of `ids`.
    ///
    /// # Errors
    /// When there are more tokens than a `u32` counts.
    pub(crate) fn new(ids: &[u32], targets: Option<&[Option<u32>]>) -> Result<Self> {
        Ok(Self {
            ids: ids.to_vec(),
            targets: targets.unwrap_or_default().to_vec(),
            by_token: RowsByToken::of(ids)?,
        })
    }
}

impl RowsByToken {
    fn of(ids: &[u32]) -> Result<Self> {
        let end = u32::try_from(ids.len()).map_err(|_| Error::OutOfRange {
            what: "tokens of a batch",
            value: ids.len(),
            expected: format!("at most {}", u32::MAX),
        })?;
        let mut pairs: Vec<(u32, u32)> = ids.iter().copied().zip(0..end).collect();
        pairs.sort_unstable();
        let (mut tokens, mut starts) = (Vec::new(), Vec::new());
        for ((token, _), place) in pairs.iter().zip(0..end) {
            if tokens.last() != Some(token) {
                tokens.push(*token);
                starts.push(place);
            }
        }
        starts.push(end);
        Ok(Self {
            tokens,
            starts,
            rows: pairs.into_iter().map(|(_, row)| row).collect(),
        })
    }
}

impl TokenBatch {
    /// A batch in the host's memory.
    pub(crate) fn on_host(tokens: HostTokens, has_targets: bool) -> Self {
        Self {
            ids: tokens.ids.len(),
            targets: has_targets.then_some(tokens.targets.len()),
            largest_id: tokens.by_token.tokens.last().copied(),
            largest_target: tokens.targets.iter().copied().flatten().max(),
            storage: Storage::Cpu(tokens),
        }
    }

    /// A batch that was brought to a CUDA device.
    pub(crate) fn on_cuda(tokens: CudaTokens, ids: &[u32], targets: Option<&[Option<u32>]>) -> Self {
        Self {
            ids: ids.len(),
            targets: targets.map(<[_]>::len),
            largest_id: ids.iter().copied().max(),
            largest_target: targets.unwrap_or_default().iter().copied().flatten().max(),
            storage: Storage::Cuda(tokens),
        }
    }

    /// Rows that have a token.
    pub fn rows(&self) -> usize {
        self.ids
    }

    /// The batch in the host's memory.
    ///
    /// # Errors
    /// When it is elsewhere.
    pub(crate) fn host(&self) -> Result<&HostTokens> {
        match &self.storage {
            Storage::Cpu(tokens) => Ok(tokens),
            Storage::Cuda(_) => Err(Error::Shape {
                operation: "tokens",
                expected: "a batch in the host's memory".to_owned(),
                found: "one on a CUDA device".to_owned(),
            }),
        }
    }

    /// The batch on its CUDA device.
    ///
    /// # Errors
    /// When it is elsewhere.
    pub(crate) fn cuda(&self) -> Result<&CudaTokens> {
        match &self.storage {
            Storage::Cuda(tokens) => Ok(tokens),
            Storage::Cpu(_) => Err(Error::NotOnDevice),
        }
    }

    /// An error unless every token is a row of a table of `vocabulary` rows.
    pub(crate) fn expect_ids(&self, operation: &'static str, vocabulary: usize) -> Result<()> {
        expect_below(operation, self.largest_id, vocabulary)
    }

    /// An error unless there is a target, or none, for each of `rows` rows, all below `vocabulary`.
    pub(crate) fn expect_targets(
        &self,
        operation: &'static str,
        rows: usize,
        vocabulary: usize,
    ) -> Result<()> {
        check::expect(
            operation,
            self.targets == Some(rows),
            || format!("a batch with {rows} targets"),
            || {
                self.targets
                    .map_or_else(|| "none".to_owned(), |count| count.to_string())
            },
        )?;
        expect_below(operation, self.largest_target, vocabulary)
    }
}

fn expect_below(operation: &'static str, largest: Option<u32>, vocabulary: usize) -> Result<()> {
    let Some(largest) = largest else { return Ok(()) };
    check::expect(
        operation,
        usize::try_from(largest).is_ok_and(|token| token < vocabulary),
        || format!("tokens below {vocabulary}, the vocabulary"),
        || format!("token {largest}"),
    )
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use super::*;

    #[test]
    fn rows_of_one_token_lie_together_in_their_order() {
        let sorted = RowsByToken::of(&[7, 3, 7, 0, 3, 7]).unwrap();
        assert_eq!(sorted.tokens, [0, 3, 7]);
        assert_eq!(sorted.starts, [0, 1, 3, 6]);
        assert_eq!(sorted.rows, [3, 1, 4, 0, 2, 5]);
        assert_eq!(RowsByToken::of(&[]).unwrap().starts, [0]);
    }

    #[test]
    fn targets_are_asked_for_by_rows_and_vocabulary() {
        let batch = |targets: Option<&[Option<u32>]>| {
            TokenBatch::on_host(HostTokens::new(&[1, 2], targets).unwrap(), targets.is_some())
        };
        let none = batch(None).expect_targets("loss", 2, 9).unwrap_err().to_string();
        assert_eq!(none, "loss: expected a batch with 2 targets, found none");
        let targets = [Some(8), None];
        batch(Some(&targets)).expect_targets("loss", 2, 9).unwrap();
        assert!(batch(Some(&targets)).expect_targets("loss", 2, 8).is_err());
        assert!(batch(Some(&targets)).expect_targets("loss", 3, 9).is_err());
        assert!(batch(None).expect_ids("embedding", 2).is_err());
    }
}
