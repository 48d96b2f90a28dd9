//! A matrix on a device: shape, leading dimension, element type, and a share of a buffer.
//!
//! Slices along rows and columns are views that share the buffer. What operations read and write is up to them:
//! a handle does not own its elements alone, and gradients often lie over what they are gradients of.

use std::sync::Arc;

use super::driver::Address;
use super::error::{Error, Result};
use super::memory::{Buffer, Pool};
use crate::ElementType;

/// What a matrix's elements are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Element {
    /// bf16: activations, and weights as products read them.
    Bf16,
    /// f32: master weights, moments, gradients of weights, statistics.
    F32,
    /// i32: tokens and indices.
    I32,
    /// f64: sums over whole models.
    F64,
}

impl Element {
    /// Bytes of one.
    pub fn bytes(self) -> u64 {
        match self {
            Self::Bf16 => 2,
            Self::F32 | Self::I32 => 4,
            Self::F64 => 8,
        }
    }

    /// What the kernels call it.
    pub(super) fn kernel_name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::F32 => "float",
            Self::I32 => "int",
            Self::F64 => "double",
        }
    }
}

/// A `(rows, columns)` matrix on a device, or a view of one; row `r` begins `r * leading()` elements from the
/// first.
#[derive(Debug, Clone)]
pub struct Matrix {
    buffer: Arc<Buffer>,
    element: Element,
    offset: usize,
    rows: usize,
    columns: usize,
    leading: usize,
}

/// Bytes of `rows` rows, `leading` elements each; none when no address space holds them.
pub(super) fn bytes_of(element: Element, rows: usize, leading: usize) -> Option<u64> {
    let elements = rows.checked_mul(leading)?;
    u64::try_from(elements).ok()?.checked_mul(element.bytes())
}

impl From<ElementType> for Element {
    fn from(element_type: ElementType) -> Self {
        match element_type {
            ElementType::F32 => Self::F32,
            ElementType::Bf16 => Self::Bf16,
        }
    }
}

impl Matrix {
    /// Over the whole of `buffer`, which must be large enough.
    pub(super) fn new(
        buffer: Buffer,
        element: Element,
        rows: usize,
        columns: usize,
        leading: usize,
    ) -> Result<Self> {
        let fits = columns <= leading
            && bytes_of(element, rows, leading).is_some_and(|bytes| bytes <= buffer.bytes());
        if !fits {
            return Err(Error::Operand {
                operation: "a device matrix",
                expected: format!("at most {} bytes", buffer.bytes()),
                found: format!("{rows} x {columns} of {element:?}, {leading} from row to row"),
            });
        }
        Ok(Self {
            buffer: Arc::new(buffer),
            element,
            offset: 0,
            rows,
            columns,
            leading,
        })
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
    pub fn leading(&self) -> usize {
        self.leading
    }

    /// What the elements are.
    pub fn element(&self) -> Element {
        self.element
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

    /// Where the first element lies.
    pub(super) fn address(&self) -> Address {
        self.buffer.address() + self.offset as u64 * self.element.bytes()
    }

    /// Whether kernels may read and write 8 elements, and 16 bytes, at a time.
    pub(super) fn allows_vectors(&self) -> bool {
        self.columns.is_multiple_of(8)
            && self.address().is_multiple_of(16)
            && (self.rows <= 1 || self.leading.is_multiple_of(8))
    }

    /// Whether it lies in `pool`'s memory.
    pub(super) fn is_of(&self, pool: &Arc<Pool>) -> bool {
        self.buffer.is_of(pool)
    }

    /// Whether both lie in one buffer, so that a write to one can be seen through the other.
    pub fn shares_buffer(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.buffer, &other.buffer)
    }

    /// Rows `start..start + rows`, as a view.
    ///
    /// # Errors
    /// When there are fewer.
    pub fn narrow_rows(&self, start: usize, rows: usize) -> Result<Self> {
        if start.checked_add(rows).is_none_or(|end| end > self.rows) {
            return Err(self.outside("rows", self.rows, start, rows));
        }
        Ok(Self {
            offset: self.offset + start * self.leading,
            rows,
            ..self.clone()
        })
    }

    /// Columns `start..start + columns`, as a view.
    ///
    /// # Errors
    /// When there are fewer.
    pub fn narrow_columns(&self, start: usize, columns: usize) -> Result<Self> {
        if start.checked_add(columns).is_none_or(|end| end > self.columns) {
            return Err(self.outside("columns", self.columns, start, columns));
        }
        Ok(Self {
            offset: self.offset + start,
            columns,
            ..self.clone()
        })
    }

    /// The same elements in rows of another length.
    ///
    /// # Errors
    /// When they have gaps or are not as many.
    pub fn reshape(&self, rows: usize, columns: usize) -> Result<Self> {
        if !self.is_contiguous() || rows.checked_mul(columns) != Some(self.len()) {
            return Err(Error::Operand {
                operation: "reshape",
                expected: format!("{rows} x {columns} elements without gaps"),
                found: self.to_string(),
            });
        }
        Ok(Self {
            rows,
            columns,
            leading: columns,
            ..self.clone()
        })
    }

    /// Rows of another form in the same buffer: the first begins `start` elements after this matrix's first, each
    /// later one `leading` elements after the one before.
    ///
    /// # Errors
    /// When the buffer ends before they do.
    pub(crate) fn window(&self, start: usize, rows: usize, columns: usize, leading: usize) -> Result<Self> {
        let span = match rows.checked_sub(1) {
            None => Some(0),
            Some(before) => before
                .checked_mul(leading)
                .and_then(|gaps| gaps.checked_add(columns)),
        };
        let offset = self.offset.checked_add(start);
        let end = offset
            .zip(span)
            .and_then(|(offset, span)| offset.checked_add(span));
        let bytes = end.and_then(|end| bytes_of(self.element, 1, end));
        match (offset, bytes) {
            (Some(offset), Some(bytes)) if bytes <= self.buffer.bytes() => Ok(Self {
                offset,
                rows,
                columns,
                leading,
                ..self.clone()
            }),
            _ => Err(Error::Operand {
                operation: "a view of a device matrix",
                expected: format!("at most {} bytes", self.buffer.bytes()),
                found: format!("{rows} x {columns}, {leading} from row to row, from element {start}"),
            }),
        }
    }

    /// The matrix whose rows are those of all `parts`, where they lie one right after the other.
    pub(super) fn over_rows(parts: &[Self]) -> Option<Self> {
        let first = parts.first()?;
        let mut whole = first.clone();
        for part in parts.iter().skip(1) {
            let follows = part.shares_buffer(first)
                && part.element == first.element
                && part.columns == first.columns
                && part.leading == first.leading
                && part.offset == whole.offset + whole.rows * whole.leading;
            if !follows {
                return None;
            }
            whole.rows += part.rows;
        }
        Some(whole)
    }

    /// The matrix whose columns are those of all `parts`, where they lie side by side.
    pub(super) fn over_columns(parts: &[Self]) -> Option<Self> {
        let first = parts.first()?;
        let mut whole = first.clone();
        for part in parts.iter().skip(1) {
            let follows = part.shares_buffer(first)
                && part.element == first.element
                && part.rows == first.rows
                && part.leading == first.leading
                && part.offset == whole.offset + whole.columns;
            whole.columns += part.columns;
            if !follows || whole.columns > whole.leading {
                return None;
            }
        }
        Some(whole)
    }

    fn outside(&self, what: &str, there: usize, start: usize, count: usize) -> Error {
        Error::Operand {
            operation: "narrow",
            expected: format!("at most {there} {what}"),
            found: format!("{what} {start} to {start} + {count}"),
        }
    }
}

impl std::fmt::Display for Matrix {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            formatter,
            "{} x {} {}",
            self.rows,
            self.columns,
            self.element.kernel_name()
        )?;
        if self.is_contiguous() {
            return Ok(());
        }
        write!(formatter, " ({} from row to row)", self.leading)
    }
}
