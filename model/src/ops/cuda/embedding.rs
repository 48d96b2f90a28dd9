//! The embedding's lookup and its gradient. Formulas: `kernels/embedding.cu`.

use super::device::CudaDevice;
use super::error::{Error, Result};
use super::launch::{Arguments, Grid};
use super::matrix::{Element, Matrix};
use super::source::Specialisation;
use super::vector_width;

/// A batch's tokens on the device: as they stand, and their rows sorted by token.
///
/// Every part is as long as the batch could need, so that one set of buffers serves every batch of its length.
#[derive(Debug)]
pub struct DeviceTokens {
    /// A token a row.
    ids: Matrix,
    /// The tokens that occur, ascending; as many as `count` says.
    unique: Matrix,
    /// Where in `rows` each one's rows begin; one more than `unique`.
    starts: Matrix,
    /// The batch's rows, by token, then as they stand.
    rows: Matrix,
    count: Matrix,
    /// What every token is below.
    bound: usize,
}

/// The host's part of [`DeviceTokens`].
#[derive(Debug, PartialEq, Eq)]
struct Sorted {
    unique: Vec<i32>,
    starts: Vec<i32>,
    rows: Vec<i32>,
    count: i32,
}

/// Sorts rows by token, stably; parts that the batch does not fill are padded.
fn sort(ids: &[i32]) -> Sorted {
    let length = i32::try_from(ids.len()).unwrap_or(i32::MAX);
    let mut rows: Vec<i32> = (0..length).collect();
    let id = |row: i32| {
        usize::try_from(row)
            .ok()
            .and_then(|row| ids.get(row))
            .copied()
            .unwrap_or(0)
    };
    rows.sort_by_key(|&row| id(row));
    let (mut unique, mut starts) = (Vec::with_capacity(ids.len()), Vec::with_capacity(ids.len() + 1));
    for (at, &row) in (0_i32..).zip(&rows) {
        if unique.last() != Some(&id(row)) {
            unique.push(id(row));
            starts.push(at);
        }
    }
    let count = i32::try_from(unique.len()).unwrap_or(i32::MAX);
    unique.resize(ids.len(), 0);
    starts.resize(ids.len() + 1, length);
    Sorted {
        unique,
        starts,
        rows,
        count,
    }
}

impl DeviceTokens {
    /// Tokens, a row each.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// A row of i32, a token each, as [`CudaDevice::embedding`] reads them.
    pub(super) fn ids(&self) -> &Matrix {
        &self.ids
    }
}

impl CudaDevice {
    /// Brings a batch's tokens to the device.
    ///
    /// # Errors
    /// When one is not below `bound`, or there is no memory.
    pub fn tokens(&self, tokens: &[u32], bound: usize) -> Result<DeviceTokens> {
        self.tokens_with(tokens, bound, &[]).map(|(tokens, _)| tokens)
    }

    /// As [`CudaDevice::tokens`], and a row of i32 beside them, in one copy.
    pub(super) fn tokens_with(
        &self,
        tokens: &[u32],
        bound: usize,
        beside: &[i32],
    ) -> Result<(DeviceTokens, Matrix)> {
        let ids = checked_ids(tokens, bound)?;
        let sorted = sort(&ids);
        let parts = [
            ids.as_slice(),
            &sorted.unique,
            &sorted.starts,
            &sorted.rows,
            &[sorted.count],
            beside,
        ];
        let all = self.upload_i32(&parts.concat())?;
        let mut at = 0;
        let mut next = |part: &[i32]| {
            let row = all.narrow_columns(at, part.len());
            at += part.len();
            row
        };
        let [ids, unique, starts, rows, count, beside] = parts.map(&mut next);
        let tokens = DeviceTokens {
            ids: ids?,
            unique: unique?,
            starts: starts?,
            rows: rows?,
            count: count?,
            bound,
        };
        Ok((tokens, beside?))
    }

    /// Overwrites `tokens` with another batch of the same length, in the order of the compute stream.
    ///
    /// # Errors
    /// When the length differs or a token is not below the bound.
    pub fn replace_tokens(&self, tokens: &DeviceTokens, with: &[u32]) -> Result<()> {
        let ids = checked_ids(with, tokens.bound)?;
        let sorted = sort(&ids);
        self.overwrite(&tokens.ids, &ids)?;
        self.overwrite(&tokens.unique, &sorted.unique)?;
        self.overwrite(&tokens.starts, &sorted.starts)?;
        self.overwrite(&tokens.rows, &sorted.rows)?;
        self.overwrite(&tokens.count, &[sorted.count])
    }

    /// As [`CudaDevice::replace_tokens`], for the lookup alone: the gradient's rows stay those of the batch before.
    pub(super) fn replace_ids(&self, tokens: &DeviceTokens, with: &[u32]) -> Result<()> {
        self.overwrite(&tokens.ids, &checked_ids(with, tokens.bound)?)
    }

    /// `output[row] = table[tokens[row]]`: table bf16 `(vocabulary, hidden)`, output bf16 `(tokens, hidden)`.
    ///
    /// # Errors
    /// When an operand does not fit, or the driver refuses.
    pub fn embedding(&self, table: &Matrix, tokens: &DeviceTokens, output: &Matrix) -> Result<()> {
        const NAME: &str = "embedding";
        let hidden = output.columns();
        self.expect_table(NAME, table, tokens, (Element::Bf16, hidden))?;
        self.expect(NAME, "output", output, Element::Bf16, (tokens.len(), hidden))?;
        let vector = vector_width(&[Some(table), Some(output)]);
        let arguments = Arguments::new()
            .matrix(table)
            .start(&tokens.ids)
            .matrix(output)
            .int(hidden);
        let kernel = Specialisation::new("embedding.cu", [("VECTOR", vector.into())]);
        let grid = Grid::line(tokens.len(), 128);
        self.kernels
            .get(kernel)?
            .launch("embedding_forward", grid, self.compute(), arguments)
    }

    /// Adds each row of `grad_output`, bf16 `(tokens, hidden)`, to the row of `grad_table`, f32 `(vocabulary,
    /// hidden)`, that its token names; rows of one token in the batch's order.
    ///
    /// # Errors
    /// When an operand does not fit, or the driver refuses.
    pub fn embedding_backward(
        &self,
        grad_output: &Matrix,
        tokens: &DeviceTokens,
        grad_table: &Matrix,
    ) -> Result<()> {
        const NAME: &str = "embedding_backward";
        let hidden = grad_output.columns();
        self.expect(
            NAME,
            "grad_output",
            grad_output,
            Element::Bf16,
            (tokens.len(), hidden),
        )?;
        self.expect_table(NAME, grad_table, tokens, (Element::F32, hidden))?;
        let vector = vector_width(&[Some(grad_output), Some(grad_table)]);
        let arguments = Arguments::new()
            .matrix(grad_output)
            .start(&tokens.unique)
            .start(&tokens.starts)
            .start(&tokens.rows)
            .start(&tokens.count)
            .matrix(grad_table)
            .int(hidden);
        let kernel = Specialisation::new("embedding.cu", [("VECTOR", vector.into())]);
        let grid = Grid::line(tokens.len(), 128);
        self.kernels
            .get(kernel)?
            .launch("embedding_backward", grid, self.compute(), arguments)
    }

    /// A table with a row for every token there may be.
    fn expect_table(
        &self,
        name: &'static str,
        table: &Matrix,
        tokens: &DeviceTokens,
        (element, hidden): (Element, usize),
    ) -> Result<()> {
        if table.rows() < tokens.bound {
            let expected = format!("at least {} rows", tokens.bound);
            return Err(self.wrong(name, "the table", &expected, table));
        }
        self.expect_row(name, "tokens", &tokens.ids, Element::I32, tokens.len())?;
        self.expect(name, "the table", table, element, (table.rows(), hidden))
    }
}

fn checked_ids(tokens: &[u32], bound: usize) -> Result<Vec<i32>> {
    let check = |(row, &token): (usize, &u32)| {
        let known = usize::try_from(token).is_ok_and(|token| token < bound);
        i32::try_from(token)
            .ok()
            .filter(|_| known)
            .ok_or_else(|| Error::Operand {
                operation: "tokens",
                expected: format!("tokens below {bound}"),
                found: format!("{token} in row {row}"),
            })
    };
    tokens.iter().enumerate().map(check).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use super::*;

    #[test]
    fn rows_are_sorted_by_token_and_keep_their_order_within_one() {
        let expected = Sorted {
            unique: vec![2, 5, 9, 0, 0],
            starts: vec![0, 1, 4, 5, 5, 5],
            rows: vec![2, 0, 1, 4, 3],
            count: 3,
        };
        assert_eq!(sort(&[5, 5, 2, 9, 5]), expected);
        assert_eq!(sort(&[]).starts, [0]);
    }

    #[test]
    fn a_token_beyond_the_vocabulary_is_refused_by_row() {
        let error = checked_ids(&[1, 7, 2], 7).unwrap_err().to_string();
        assert_eq!(error, "tokens: expected tokens below 7, found 7 in row 1");
    }
}
