//! Matrix products: the gemm crate for many rows, our own dot products for few.
//!
//! Here live strided views and the choice of kernel. Each output element is the work of one thread, in an
//! order that depends on shapes alone, so results do not depend on the number of threads.

use gemm::Parallelism;
use rayon::prelude::*;

use super::{rows, simd};
use crate::{Error, Result, Tensor};

/// Rows up to which reading the weights, not arithmetic, sets the time.
const FEW_ROWS: usize = 6;
/// Weight rows that stay in the first-level cache while every input row meets them.
const CACHED_ROWS: usize = 8;
/// Multiply-adds below which one thread is quicker than waking another.
const SERIAL_PRODUCT: usize = 64 * 1024;

/// A matrix somewhere in a slice, with any strides.
#[derive(Clone, Copy)]
pub(super) struct View<'a> {
    data: &'a [f32],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

/// A row-major matrix to write.
pub(super) struct ViewMut<'a> {
    data: &'a mut [f32],
    rows: usize,
    columns: usize,
    leading: usize,
}

fn span(rows: usize, columns: usize, leading: usize) -> Option<usize> {
    if rows == 0 || columns == 0 {
        return Some(0);
    }
    (rows - 1).checked_mul(leading)?.checked_add(columns)
}

fn outside(rows: usize, columns: usize, leading: usize, len: usize) -> Error {
    Error::Shape {
        operation: "matmul",
        expected: format!("{rows} x {columns} elements, {leading} from row to row"),
        found: format!("{len} elements"),
    }
}

impl<'a> View<'a> {
    /// Row-major elements of `data`.
    pub(super) fn new(data: &'a [f32], rows: usize, columns: usize, leading: usize) -> Result<Self> {
        if span(rows, columns, leading).is_none_or(|span| span > data.len()) {
            return Err(outside(rows, columns, leading, data.len()));
        }
        Ok(Self {
            data,
            rows,
            columns,
            row_stride: leading,
            column_stride: 1,
        })
    }

    /// A tensor as it is.
    pub(super) fn of(tensor: &'a Tensor) -> Result<Self> {
        Ok(Self {
            data: tensor.host()?,
            rows: tensor.rows(),
            columns: tensor.columns(),
            row_stride: tensor.leading_dimension(),
            column_stride: 1,
        })
    }

    /// Rows for columns.
    pub(super) fn transposed(self) -> Self {
        Self {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }
}

impl<'a> ViewMut<'a> {
    /// Row-major elements of `data`.
    pub(super) fn new(data: &'a mut [f32], rows: usize, columns: usize, leading: usize) -> Result<Self> {
        if span(rows, columns, leading).is_none_or(|span| span > data.len()) || leading < columns {
            return Err(outside(rows, columns, leading, data.len()));
        }
        Ok(Self {
            data,
            rows,
            columns,
            leading,
        })
    }

    /// A tensor as it is.
    pub(super) fn of(tensor: &'a mut Tensor) -> Result<Self> {
        let (rows, columns, leading) = (tensor.rows(), tensor.columns(), tensor.leading_dimension());
        Self::new(tensor.host_mut()?, rows, columns, leading)
    }
}

/// How many threads a product may use.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Threads {
    /// The caller's only: it is one of several already.
    One,
    /// All of them.
    All,
}

/// `out (+)= left · right`.
pub(super) fn multiply(
    out: ViewMut<'_>,
    left: View<'_>,
    right: View<'_>,
    accumulate: bool,
    threads: Threads,
) -> Result<()> {
    let agree = left.columns == right.rows && out.rows == left.rows && out.columns == right.columns;
    rows::expect(
        "matmul",
        agree,
        || {
            format!(
                "{} x {} into {} x {}",
                left.rows, left.columns, out.rows, out.columns
            )
        },
        || format!("{} x {} on the right", right.rows, right.columns),
    )?;
    if out.rows == 0 || out.columns == 0 {
        return Ok(());
    }
    let parallelism = match threads {
        Threads::One => Parallelism::None,
        Threads::All => Parallelism::Rayon(0),
    };
    // SAFETY: the constructors checked that every element the strides reach lies inside its slice, and the
    // output is borrowed mutably, so nothing aliases it. Strides of a slice fit isize.
    unsafe {
        gemm::gemm(
            out.rows,
            out.columns,
            left.columns,
            out.data.as_mut_ptr(),
            1,
            out.leading.cast_signed(),
            accumulate,
            left.data.as_ptr(),
            left.column_stride.cast_signed(),
            left.row_stride.cast_signed(),
            right.data.as_ptr(),
            right.column_stride.cast_signed(),
            right.row_stride.cast_signed(),
            1.0f32,
            1.0f32,
            false,
            false,
            false,
            parallelism,
        );
    }
    Ok(())
}

/// `out (+)= x · weightᵀ` for tensors.
pub(super) fn linear_into(out: &mut Tensor, x: &Tensor, weight: &Tensor, accumulate: bool) -> Result<()> {
    if x.rows() <= FEW_ROWS && out.is_contiguous() {
        return few_rows(out, x, weight, accumulate);
    }
    multiply(
        ViewMut::of(out)?,
        View::of(x)?,
        View::of(weight)?.transposed(),
        accumulate,
        Threads::All,
    )
}

/// `out (+)= x · weightᵀ`, weight rows divided between threads, each read once.
fn few_rows(out: &mut Tensor, x: &Tensor, weight: &Tensor, accumulate: bool) -> Result<()> {
    let outputs = weight.rows();
    if out.is_empty() {
        return Ok(());
    }
    let x_rows = rows::Rows::of(x)?;
    let inputs: Vec<&[f32]> = (0..x.rows()).map(|index| x_rows.row(index)).collect();
    let product = outputs * x.columns() * x.rows();
    let tasks = if product < SERIAL_PRODUCT {
        1
    } else {
        4 * rayon::current_num_threads()
    };
    let per_task = outputs.div_ceil(tasks).max(1);
    let shared = rows::Shared::new(out.host_mut()?);
    let (host, leading) = (weight.host()?, weight.leading_dimension());
    let run = |task: usize| {
        let first = (task * per_task).min(outputs);
        let end = (first + per_task).min(outputs);
        for tile in (first..end).step_by(CACHED_ROWS) {
            let count = CACHED_ROWS.min(end - tile);
            let weights = host.get(tile * leading..).unwrap_or_default();
            for (index, input) in inputs.iter().enumerate() {
                // SAFETY: each task has output columns of its own.
                let part = unsafe { shared.slice(index * outputs + tile, count) };
                if !accumulate {
                    part.fill(0.0);
                }
                simd::add_dots(part, input, weights, leading);
            }
        }
    };
    if tasks == 1 {
        run(0);
    } else {
        (0..tasks).into_par_iter().for_each(run);
    }
    Ok(())
}
