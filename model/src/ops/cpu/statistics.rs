//! Sums over a whole tensor that people or the host want to know, in f64 and in the order of the rows.

use rayon::prelude::*;

use super::rows::{Rows, expect, expect_shape};
use super::simd;
use crate::{Error, Result, Tensor};

/// Rows are added up in blocks of a fixed number, and the blocks in order.
pub(super) fn sum_of_squares(tensor: &Tensor) -> Result<f64> {
    const BLOCK_ELEMENTS: usize = 64 * 1024;
    if tensor.is_empty() {
        return Ok(0.0);
    }
    let rows = Rows::of(tensor)?;
    let block_rows = (BLOCK_ELEMENTS / tensor.columns()).max(1);
    let blocks: Vec<f64> = (0..tensor.rows().div_ceil(block_rows))
        .into_par_iter()
        .map(|block| {
            let first = block * block_rows;
            let range = first..tensor.rows().min(first + block_rows);
            range.map(|index| simd::sum_of_squares(rows.row(index))).sum()
        })
        .collect();
    Ok(blocks.iter().sum())
}

/// Sum of the elements.
pub(super) fn sum(tensor: &Tensor) -> Result<f64> {
    let rows = Rows::of(tensor)?;
    let elements = (0..tensor.rows()).flat_map(|index| rows.row(index));
    Ok(elements.map(|value| f64::from(*value)).sum())
}

pub(super) fn column_squares(x: &Tensor) -> Result<Vec<f64>> {
    let rows = Rows::of(x)?;
    let mut squares = vec![0.0; x.columns()];
    for index in 0..x.rows() {
        for (sum, value) in squares.iter_mut().zip(rows.row(index)) {
            *sum += f64::from(*value).powi(2);
        }
    }
    Ok(squares)
}

pub(super) fn tile_products(a: &Tensor, b: &Tensor, tile: usize) -> Result<Vec<f64>> {
    const OPERATION: &str = "tile_products";
    expect_shape(OPERATION, "b", b, a.rows(), a.columns())?;
    expect(
        OPERATION,
        tile > 0 && a.rows().is_multiple_of(tile) && a.columns().is_multiple_of(tile),
        || format!("a tile that divides {} x {}", a.rows(), a.columns()),
        || tile.to_string(),
    )?;
    let across = a.columns() / tile;
    let mut sums = vec![0.0; a.rows() / tile * across];
    let (a_rows, b_rows) = (Rows::of(a)?, Rows::of(b)?);
    for index in 0..a.rows() {
        let first = index / tile * across;
        let parts = a_rows.row(index).chunks(tile).zip(b_rows.row(index).chunks(tile));
        for (sum, (a, b)) in sums.iter_mut().skip(first).zip(parts) {
            for (a, b) in a.iter().zip(b) {
                *sum += f64::from(*a) * f64::from(*b);
            }
        }
    }
    Ok(sums)
}

pub(super) fn likeliest(logits: &Tensor) -> Result<Vec<u32>> {
    let columns = u32::try_from(logits.columns()).map_err(|_| Error::OutOfRange {
        what: "the vocabulary",
        value: logits.columns(),
        expected: format!("at most {}", u32::MAX),
    })?;
    let rows = Rows::of(logits)?;
    let best_of = |index: usize| {
        let mut best = (0, f32::NEG_INFINITY);
        for (token, value) in (0..columns).zip(rows.row(index)) {
            if *value > best.1 {
                best = (token, *value);
            }
        }
        best.0
    };
    Ok((0..logits.rows()).into_par_iter().map(best_of).collect())
}
