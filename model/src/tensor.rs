//! The one tensor handle that crosses the operation set: shape, leading dimension, element type, device.
//!
//! A handle is two-dimensional and row-major. Prefix slices along either axis are views: they share the
//! storage and keep the leading dimension, so a variant of a block copies nothing.

mod pool;

use std::sync::Arc;

use crate::{Error, Result};

pub(crate) use pool::Buffer;

/// Where a tensor's elements live.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Device {
    /// The host's memory.
    Cpu,
}

/// The elements, shared between views.
#[derive(Debug, Clone)]
enum Storage {
    Cpu(Arc<Buffer>),
}

/// A `(rows, columns)` matrix of f32, or a view of one.
#[derive(Debug, Clone)]
pub struct Tensor {
    storage: Storage,
    offset: usize,
    rows: usize,
    columns: usize,
    leading: usize,
}

impl Tensor {
    /// A contiguous tensor in host memory.
    ///
    /// # Errors
    /// When `data` does not hold `rows * columns` elements.
    pub fn from_vec(data: Vec<f32>, rows: usize, columns: usize) -> Result<Self> {
        if rows.checked_mul(columns) != Some(data.len()) {
            return Err(Error::Shape {
                operation: "from_vec",
                expected: format!("{rows} x {columns} elements"),
                found: format!("{} elements", data.len()),
            });
        }
        Ok(Self::from_buffer(Buffer::from(data), rows, columns))
    }

    /// A contiguous tensor whose elements nobody has written yet; the caller overwrites every one.
    pub(crate) fn unspecified(rows: usize, columns: usize) -> Result<Self> {
        let len = element_count(rows, columns)?;
        Ok(Self::from_buffer(Buffer::unspecified(len), rows, columns))
    }

    /// A contiguous tensor of zeros in host memory.
    pub(crate) fn zeros(rows: usize, columns: usize) -> Result<Self> {
        let len = element_count(rows, columns)?;
        Ok(Self::from_buffer(Buffer::zeros(len), rows, columns))
    }

    fn from_buffer(buffer: Buffer, rows: usize, columns: usize) -> Self {
        Self {
            storage: Storage::Cpu(Arc::new(buffer)),
            offset: 0,
            rows,
            columns,
            leading: columns,
        }
    }

    /// Where the elements live.
    pub fn device(&self) -> Device {
        match self.storage {
            Storage::Cpu(_) => Device::Cpu,
        }
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Elements from one row to the next.
    pub fn leading_dimension(&self) -> usize {
        self.leading
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.rows * self.columns
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether rows follow each other without a gap.
    pub fn is_contiguous(&self) -> bool {
        self.leading == self.columns || self.rows <= 1
    }

    /// The first `rows` rows, as a view.
    ///
    /// # Errors
    /// When there are fewer.
    pub fn first_rows(&self, rows: usize) -> Result<Self> {
        self.narrow_rows(0, rows)
    }

    /// Rows `start..start + rows`, as a view.
    ///
    /// # Errors
    /// When there are fewer.
    pub fn narrow_rows(&self, start: usize, rows: usize) -> Result<Self> {
        if start.checked_add(rows).is_none_or(|end| end > self.rows) {
            return Err(Error::Shape {
                operation: "narrow_rows",
                expected: format!("at most {} rows", self.rows),
                found: format!("rows {start} to {start} + {rows}"),
            });
        }
        Ok(Self {
            offset: self.offset + start * self.leading,
            rows,
            ..self.clone()
        })
    }

    /// The first `columns` columns, as a view.
    ///
    /// # Errors
    /// When there are fewer.
    pub fn first_columns(&self, columns: usize) -> Result<Self> {
        if columns > self.columns {
            return Err(Error::Shape {
                operation: "first_columns",
                expected: format!("at most {} columns", self.columns),
                found: format!("{columns} columns"),
            });
        }
        Ok(Self {
            columns,
            ..self.clone()
        })
    }

    /// The elements from the first to the last, gaps between rows included; row `r` begins at
    /// `r * leading_dimension()`.
    pub fn host(&self) -> &[f32] {
        let Storage::Cpu(data) = &self.storage;
        &data[self.offset..self.offset + self.span()]
    }

    /// As [`Tensor::host`], to write.
    ///
    /// # Errors
    /// When another handle shares the storage.
    pub fn host_mut(&mut self) -> Result<&mut [f32]> {
        let span = self.span();
        let Storage::Cpu(data) = &mut self.storage;
        let data = Arc::get_mut(data).ok_or(Error::SharedTensor)?;
        Ok(&mut data[self.offset..self.offset + span])
    }

    fn span(&self) -> usize {
        if self.is_empty() {
            0
        } else {
            (self.rows - 1) * self.leading + self.columns
        }
    }
}

/// Elements of a `(rows, columns)` tensor, refused when no memory could hold them.
fn element_count(rows: usize, columns: usize) -> Result<usize> {
    rows.checked_mul(columns)
        .filter(|&len| len <= isize::MAX as usize / size_of::<f32>())
        .ok_or_else(|| Error::Shape {
            operation: "allocate",
            expected: "a size that fits the address space".to_owned(),
            found: format!("{rows} x {columns}"),
        })
}
