//! Rotary positions, half-split: entry `i` of a head is paired with entry `i + head_dim / 2`.

use super::rows::{Rows, expect, expect_shape, for_each_row};
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

/// A rotation, forward or back, of every head of tensors with one layout.
pub(super) struct Turn<'a> {
    operation: &'static str,
    head_dim: usize,
    table: &'a RopeTable,
    layout: Layout,
    first_position: usize,
    sign: f32,
}

impl<'a> Turn<'a> {
    pub(super) fn forward(
        head_dim: usize,
        table: &'a RopeTable,
        layout: Layout,
        first_position: usize,
    ) -> Result<Self> {
        Self {
            operation: "rope",
            head_dim,
            table,
            layout,
            first_position,
            sign: 1.0,
        }
        .checked()
    }

    pub(super) fn backward(head_dim: usize, table: &'a RopeTable, layout: Layout) -> Result<Self> {
        Self {
            operation: "rope_backward",
            head_dim,
            table,
            layout,
            first_position: 0,
            sign: -1.0,
        }
        .checked()
    }

    fn checked(self) -> Result<Self> {
        let (positions, half) = (self.table.cosine.rows(), self.head_dim / 2);
        expect_shape(
            self.operation,
            "table.cosine",
            &self.table.cosine,
            positions,
            half,
        )?;
        expect_shape(self.operation, "table.sine", &self.table.sine, positions, half)?;
        expect(
            self.operation,
            self.first_position
                .checked_add(self.layout.tokens)
                .is_some_and(|end| end <= positions),
            || format!("positions below {positions}, the rows of the table"),
            || {
                format!(
                    "{} tokens from position {}",
                    self.layout.tokens, self.first_position
                )
            },
        )?;
        Ok(self)
    }

    pub(super) fn rotate(&self, x: &mut Tensor) -> Result<()> {
        expect(
            self.operation,
            self.head_dim > 0 && self.head_dim.is_multiple_of(2) && x.columns().is_multiple_of(self.head_dim),
            || format!("an even head_dim that divides {} columns", x.columns()),
            || self.head_dim.to_string(),
        )?;
        expect_shape(self.operation, "x", x, self.layout.rows(), x.columns())?;
        let (cosine, sine) = (Rows::of(&self.table.cosine)?, Rows::of(&self.table.sine)?);
        for_each_row(x, |index, x| {
            let position = self.first_position + index % self.layout.tokens;
            rotate_row(
                x,
                self.head_dim / 2,
                cosine.row(position),
                sine.row(position),
                self.sign,
            );
        })
    }
}
