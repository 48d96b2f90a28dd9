//! The one tensor handle that crosses the operation set: shape, leading dimension, element type, device.
//!
//! A handle is two-dimensional and row-major. Slices along either axis are views: they share the storage
//! and keep the leading dimension, so a variant of a block copies nothing. Only a backend looks at elements;
//! everybody else asks it to download them.

mod elements;
mod pool;

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use crate::ops::cuda;
use crate::{Error, Result};

pub use elements::Elements;
pub(crate) use elements::{bf16_bits, to_bf16};
pub(crate) use pool::{Buffer, fresh};

/// Where a tensor's elements live.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Device {
    /// The host's memory.
    Cpu,
    /// The memory of a CUDA device, by its number.
    Cuda(u32),
}

impl fmt::Display for Device {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => formatter.write_str("cpu"),
            Self::Cuda(number) => write!(formatter, "cuda:{number}"),
        }
    }
}

impl FromStr for Device {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let number = match text.split_once(':') {
            None if text == "cpu" => return Ok(Self::Cpu),
            None if text == "cuda" => Some(0),
            Some(("cuda", number)) => number.parse().ok(),
            _ => None,
        };
        number.map(Self::Cuda).ok_or_else(|| Error::UnknownDevice {
            given: text.to_owned(),
        })
    }
}

/// What one element is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ElementType {
    /// IEEE single precision: all there is on the CPU; master weights, gradients, moments and losses anywhere.
    F32,
    /// The upper half of an f32: activations, and the matrices they meet, on a device that computes in it.
    Bf16,
}

impl ElementType {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }
}

impl fmt::Display for ElementType {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        })
    }
}

/// The elements, shared between views: a variant for each backend.
#[derive(Debug, Clone)]
enum Storage {
    Cpu(Arc<Buffer>),
    /// A handle that keeps the buffer alive, and the device's number.
    Cuda(cuda::Matrix, u32),
}

/// A `(rows, columns)` matrix, or a view of one.
#[derive(Debug, Clone)]
pub struct Tensor {
    storage: Storage,
    element_type: ElementType,
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
            element_type: ElementType::F32,
            offset: 0,
            rows,
            columns,
            leading: columns,
        }
    }

    /// A tensor over `matrix`'s elements on a CUDA device.
    ///
    /// # Errors
    /// When they are neither f32 nor bf16.
    pub(crate) fn on_cuda(matrix: cuda::Matrix, device: u32) -> Result<Self> {
        let element_type = match matrix.element() {
            cuda::Element::F32 => ElementType::F32,
            cuda::Element::Bf16 => ElementType::Bf16,
            cuda::Element::I32 | cuda::Element::F64 => {
                return Err(Error::Shape {
                    operation: "a tensor on the device",
                    expected: "f32 or bf16".to_owned(),
                    found: matrix.to_string(),
                });
            }
        };
        Ok(Self {
            element_type,
            offset: 0,
            rows: matrix.rows(),
            columns: matrix.columns(),
            leading: matrix.leading(),
            storage: Storage::Cuda(matrix, device),
        })
    }

    /// The elements on their CUDA device.
    ///
    /// # Errors
    /// When they are elsewhere.
    pub(crate) fn cuda(&self) -> Result<cuda::Matrix> {
        match &self.storage {
            Storage::Cuda(matrix, _) => {
                Ok(matrix.window(self.offset, self.rows, self.columns, self.leading)?)
            }
            Storage::Cpu(_) => Err(Error::NotOnDevice),
        }
    }

    /// Where the elements live.
    pub fn device(&self) -> Device {
        match self.storage {
            Storage::Cpu(_) => Device::Cpu,
            Storage::Cuda(_, number) => Device::Cuda(number),
        }
    }

    /// What one element is.
    pub fn element_type(&self) -> ElementType {
        self.element_type
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

    /// Bytes of the elements, gaps between rows not counted.
    pub fn bytes(&self) -> usize {
        self.len().saturating_mul(self.element_type.bytes())
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

    /// `rows x columns` elements of a tensor without gaps, from its `start`th on, as a view of that shape.
    ///
    /// # Errors
    /// When there are gaps or fewer elements.
    pub fn window(&self, start: usize, rows: usize, columns: usize) -> Result<Self> {
        let end = rows
            .checked_mul(columns)
            .and_then(|count| count.checked_add(start));
        if !self.is_contiguous() || end.is_none_or(|end| end > self.len()) {
            return Err(Error::Shape {
                operation: "window",
                expected: format!("{rows} x {columns} elements from {start} on, without gaps"),
                found: format!("{} x {}", self.rows, self.columns),
            });
        }
        Ok(Self {
            offset: self.offset + start,
            rows,
            columns,
            leading: columns,
            ..self.clone()
        })
    }

    /// Every `step`-th row from row `first` on, as a view.
    ///
    /// # Errors
    /// When `step` is 0 or there is no row `first`.
    pub fn strided_rows(&self, first: usize, step: usize) -> Result<Self> {
        if step == 0 || first >= self.rows {
            return Err(Error::Shape {
                operation: "strided_rows",
                expected: format!("a step of at least 1 from below {} rows", self.rows),
                found: format!("a step of {step} from row {first}"),
            });
        }
        Ok(Self {
            offset: self.offset + first * self.leading,
            rows: (self.rows - first).div_ceil(step),
            leading: self.leading * step,
            ..self.clone()
        })
    }

    /// The first `columns` columns, as a view.
    ///
    /// # Errors
    /// When there are fewer.
    pub fn first_columns(&self, columns: usize) -> Result<Self> {
        self.columns_from(0, columns)
    }

    /// Columns `start..start + columns`, as a view.
    ///
    /// # Errors
    /// When there are fewer.
    pub fn columns_from(&self, start: usize, columns: usize) -> Result<Self> {
        if start.checked_add(columns).is_none_or(|end| end > self.columns) {
            return Err(Error::Shape {
                operation: "columns_from",
                expected: format!("at most {} columns", self.columns),
                found: format!("columns {start} to {start} + {columns}"),
            });
        }
        Ok(Self {
            offset: self.offset + start,
            columns,
            ..self.clone()
        })
    }

    /// Whether both are views of the same storage.
    pub fn shares_storage_with(&self, other: &Self) -> bool {
        match (&self.storage, &other.storage) {
            (Storage::Cpu(own), Storage::Cpu(others)) => Arc::ptr_eq(own, others),
            (Storage::Cuda(own, _), Storage::Cuda(others, _)) => own.shares_buffer(others),
            (Storage::Cpu(_), Storage::Cuda(..)) | (Storage::Cuda(..), Storage::Cpu(_)) => false,
        }
    }

    /// The elements from the first to the last, gaps between rows included; row `r` begins at
    /// `r * leading_dimension()`.
    ///
    /// # Errors
    /// When they are not f32 in the host's memory.
    pub(crate) fn host(&self) -> Result<&[f32]> {
        let range = self.offset..self.offset + self.span();
        match (&self.storage, self.element_type) {
            (Storage::Cpu(data), ElementType::F32) => Ok(data.get(range).unwrap_or_default()),
            _ => Err(self.not_on_host()),
        }
    }

    /// As [`Tensor::host`], to write.
    ///
    /// # Errors
    /// As [`Tensor::host`]; also when another handle shares the storage.
    pub(crate) fn host_mut(&mut self) -> Result<&mut [f32]> {
        let range = self.offset..self.offset + self.span();
        let not_on_host = self.not_on_host();
        match (&mut self.storage, self.element_type) {
            (Storage::Cpu(data), ElementType::F32) => {
                let data = Arc::get_mut(data).ok_or(Error::SharedTensor)?;
                Ok(data.get_mut(range).unwrap_or_default())
            }
            _ => Err(not_on_host),
        }
    }

    fn not_on_host(&self) -> Error {
        Error::NotOnHost {
            device: self.device(),
            element_type: self.element_type,
        }
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use super::*;

    #[test]
    fn a_device_is_read_as_it_is_shown_and_others_are_refused_by_name() {
        for device in [Device::Cpu, Device::Cuda(0), Device::Cuda(7)] {
            assert_eq!(device.to_string().parse::<Device>().unwrap(), device);
        }
        assert_eq!("cuda".parse::<Device>().unwrap(), Device::Cuda(0));
        for wrong in ["", "gpu", "cuda:", "cuda:-1", "cpu:0"] {
            let error = wrong.parse::<Device>().unwrap_err().to_string();
            assert!(error.contains("cuda:0"), "{error}");
        }
    }
}
