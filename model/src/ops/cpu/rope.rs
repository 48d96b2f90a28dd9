//! Rotary positions, half-split: entry `i` of a head is paired with entry `i + head_dim / 2`.

use super::rows::{expect, expect_shape, for_each_row, row};
use super::simd::{multiply_add, vectorised};
use crate::ops::{Layout, RopeTable};
use crate::{Result, Tensor};

vectorised! {
    /// Rotates each head of `x` by the angles' cosines and sines; `sign` −1 turns back.
    fn rotate_row(x: &mut [f32], half: usize, cosine: &[f32], sine: &[f32], sign: f32) {
        for head in x.chunks_exact_mut(2 * half) {
            let (low, high) = head.split_at_mut(half);
            for (((low, high), cosine), sine) in low.iter_mut().zip(high).zip(cosine).zip(sine) {
                let sine = sine * sign;
                let turned = multiply_add::<FMA>(*low, *cosine, -(*high * sine));
                *high = multiply_add::<FMA>(*high, *cosine, *low * sine);
                *low = turned;
            }
        }
    }
}

/// Which way to turn.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    Forward,
    Backward,
}

pub(super) fn rotate(
    x: &mut Tensor,
    head_dim: usize,
    table: &RopeTable,
    layout: Layout,
    first_position: usize,
    direction: Direction,
) -> Result<()> {
    let operation = if direction == Direction::Forward {
        "rope"
    } else {
        "rope_backward"
    };
    expect(
        operation,
        head_dim > 0 && head_dim.is_multiple_of(2) && x.columns().is_multiple_of(head_dim),
        || format!("an even head_dim that divides {} columns", x.columns()),
        || head_dim.to_string(),
    )?;
    expect_shape(operation, "x", x, layout.rows(), x.columns())?;
    let positions = table.cosine.rows();
    expect_shape(operation, "table.cosine", &table.cosine, positions, head_dim / 2)?;
    expect_shape(operation, "table.sine", &table.sine, positions, head_dim / 2)?;
    expect(
        operation,
        first_position
            .checked_add(layout.tokens)
            .is_some_and(|end| end <= positions),
        || format!("positions below {positions}, the rows of the table"),
        || format!("{} tokens from position {first_position}", layout.tokens),
    )?;
    let sign = if direction == Direction::Forward {
        1.0
    } else {
        -1.0
    };
    for_each_row(x, |index, x| {
        let position = first_position + index % layout.tokens;
        rotate_row(
            x,
            head_dim / 2,
            row(&table.cosine, position),
            row(&table.sine, position),
            sign,
        );
    })
}
