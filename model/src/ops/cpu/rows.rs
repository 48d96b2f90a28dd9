//! Rows of tensors shared out between threads. Here lives who works on which rows; what is done with a row
//! is the caller's.

use rayon::prelude::*;

pub(super) use crate::ops::check::{expect, expect_shape};
use crate::{Result, Tensor};

/// Elements below which waking another thread costs more than it saves.
const SERIAL_ELEMENTS: usize = 16 * 1024;

/// The rows of a tensor in the host's memory.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    pub(super) data: &'a [f32],
    pub(super) leading: usize,
    columns: usize,
}

impl<'a> Rows<'a> {
    pub(super) fn of(tensor: &'a Tensor) -> Result<Self> {
        Ok(Self {
            data: tensor.host()?,
            leading: tensor.leading_dimension(),
            columns: tensor.columns(),
        })
    }

    /// Row `index`; empty when there is no such row.
    #[inline]
    pub(super) fn row(self, index: usize) -> &'a [f32] {
        let start = index * self.leading;
        self.data.get(start..start + self.columns).unwrap_or_default()
    }
}

/// Runs `work(row, elements)` over every row of `target`, on all threads when that pays.
pub(super) fn for_each_row(target: &mut Tensor, work: impl Fn(usize, &mut [f32]) + Sync) -> Result<()> {
    let (columns, leading, elements) = (target.columns(), target.leading_dimension(), target.len());
    if elements == 0 {
        return Ok(());
    }
    let data = target.host_mut()?;
    if elements < SERIAL_ELEMENTS {
        data.chunks_mut(leading)
            .enumerate()
            .for_each(|(index, row)| work(index, &mut row[..columns]));
        return Ok(());
    }
    data.par_chunks_mut(leading)
        .with_min_len((SERIAL_ELEMENTS / 2 / columns).max(1))
        .enumerate()
        .for_each(|(index, row)| work(index, &mut row[..columns]));
    Ok(())
}

/// As [`for_each_row`], over two tensors with as many rows.
pub(super) fn for_each_row_pair(
    first: &mut Tensor,
    second: &mut Tensor,
    work: impl Fn(usize, &mut [f32], &mut [f32]) + Sync,
) -> Result<()> {
    let (columns, leading, elements) = (first.columns(), first.leading_dimension(), first.len());
    let (second_columns, second_leading) = (second.columns(), second.leading_dimension());
    if elements == 0 || second_columns == 0 {
        return Ok(());
    }
    let first = first.host_mut()?;
    let second = second.host_mut()?;
    let run = |(index, (a, b)): (usize, (&mut [f32], &mut [f32]))| {
        work(index, &mut a[..columns], &mut b[..second_columns]);
    };
    if elements < SERIAL_ELEMENTS {
        first
            .chunks_mut(leading)
            .zip(second.chunks_mut(second_leading))
            .enumerate()
            .for_each(run);
        return Ok(());
    }
    first
        .par_chunks_mut(leading)
        .zip(second.par_chunks_mut(second_leading))
        .with_min_len((SERIAL_ELEMENTS / 2 / columns).max(1))
        .enumerate()
        .for_each(run);
    Ok(())
}

/// A buffer whose parts are written by several threads, each its own.
#[derive(Clone, Copy)]
pub(super) struct Shared<'a> {
    data: *mut f32,
    len: usize,
    owner: std::marker::PhantomData<&'a mut [f32]>,
}

// SAFETY: the only access is `slice`, whose caller promises that no two threads ask for overlapping parts.
unsafe impl Send for Shared<'_> {}
// SAFETY: as above.
unsafe impl Sync for Shared<'_> {}

impl<'a> Shared<'a> {
    /// The whole of `data`, to be divided.
    pub(super) fn new(data: &'a mut [f32]) -> Self {
        Self {
            data: data.as_mut_ptr(),
            len: data.len(),
            owner: std::marker::PhantomData,
        }
    }

    /// `len` elements from `start`; empty when they are not all inside.
    ///
    /// # Safety
    /// No part of them may be in use elsewhere while the slice lives.
    #[allow(clippy::mut_from_ref)] // the point of the type; see Safety
    pub(super) unsafe fn slice(&self, start: usize, len: usize) -> &mut [f32] {
        if start.checked_add(len).is_none_or(|end| end > self.len) {
            return &mut [];
        }
        // SAFETY: inside the buffer, checked above; not aliased, as the caller promises.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(start), len) }
    }
}
