//! Copies of tensors, and what is asked of them seldom enough to be worked out on the host.

use super::CudaOperations;
use crate::ops::cpu::CpuOperations;
use crate::ops::cuda::matrix::{Element, Matrix};
use crate::ops::{Axis, Operations};
use crate::{ElementType, Error, Result, Tensor};

/// Rows whose squares are added up in f32, at least this many times fewer than all, before f64 takes over.
const PARTS: usize = 64;

impl CudaOperations {
    /// A new tensor with the rows of each, in their order.
    pub(super) fn one_below_the_other<'a>(
        &self,
        tensors: impl Iterator<Item = &'a Tensor>,
    ) -> Result<Tensor> {
        let parts = tensors.map(Tensor::cuda).collect::<Result<Vec<_>>>()?;
        let first = parts.first().ok_or_else(|| Error::Shape {
            operation: "concatenate",
            expected: "at least one tensor".to_owned(),
            found: "none".to_owned(),
        })?;
        let rows = parts.iter().map(Matrix::rows).sum();
        let whole = self.device.matrix(first.element(), rows, first.columns())?;
        let mut at = 0;
        for part in &parts {
            // Refuses a part of another width or device.
            self.device.cast(&whole.narrow_rows(at, part.rows())?, part)?;
            at += part.rows();
        }
        self.tensor(whole)
    }

    /// Matrices of one width and type, one below the other; others as they are.
    pub(super) fn stacked(&self, tensors: Vec<Tensor>) -> Result<Vec<Tensor>> {
        let parts = tensors.iter().map(Tensor::cuda).collect::<Result<Vec<_>>>()?;
        let Some(first) = parts.first() else {
            return Ok(tensors);
        };
        let alike = parts
            .iter()
            .all(|part| part.columns() == first.columns() && part.element() == first.element());
        if parts.len() == 1 || !alike || Matrix::over_rows(&parts).is_some() {
            return Ok(tensors);
        }
        let whole = self.one_below_the_other(tensors.iter())?;
        let mut at = 0;
        let mut part = |rows: usize| {
            let view = whole.narrow_rows(at, rows);
            at += rows;
            view
        };
        parts.iter().map(|matrix| part(matrix.rows())).collect()
    }

    /// A copy for each part, and zeros into the gaps alone.
    pub(super) fn flattened(
        &self,
        parts: &[(usize, &Tensor)],
        rows: usize,
        columns: usize,
        element_type: ElementType,
    ) -> Result<Tensor> {
        let whole = self.device.matrix(element_type.into(), rows, columns)?;
        let flat = whole.reshape(1, whole.len())?;
        let mut end = 0;
        let gap = |from: usize, to: usize| match to.checked_sub(from) {
            Some(0) => Ok(()),
            Some(gap) => self.device.clear(&flat.narrow_columns(from, gap)?),
            None => Err(super::super::Error::Operand {
                operation: "flatten",
                expected: format!("places from {from} on"),
                found: to.to_string(),
            }),
        };
        for (start, part) in parts {
            gap(end, *start)?;
            let source = part.cuda()?;
            let source = source.reshape(1, source.len())?;
            self.device
                .cast(&flat.narrow_columns(*start, source.len())?, &source)?;
            end = start + source.len();
        }
        gap(end, flat.len())?;
        self.tensor(whole)
    }

    /// Rows of a bf16 tensor on the device, as an embedding's; everything else, which no batch asks for, by way of
    /// the host.
    pub(super) fn gathered(&self, tensor: &Tensor, indices: &[usize], axis: Axis) -> Result<Tensor> {
        let source = tensor.cuda()?;
        if axis == Axis::Rows && source.element() == Element::Bf16 && !indices.is_empty() {
            let known = |&index: &usize| u32::try_from(index).ok().filter(|_| index < source.rows());
            let rows: Option<Vec<u32>> = indices.iter().map(known).collect();
            let rows = rows.ok_or_else(|| Error::Shape {
                operation: "gather",
                expected: format!("rows below {}", source.rows()),
                found: "one that is not".to_owned(),
            })?;
            let rows = self.device.tokens(&rows, source.rows())?;
            let output = self.bf16(indices.len(), source.columns())?;
            self.device.embedding(&source, &rows, &output)?;
            return self.tensor(output);
        }
        let cpu = CpuOperations::new();
        let gathered = cpu.gather(&self.to_host(tensor)?, indices, axis)?;
        let (data, rows, columns) = (cpu.download(&gathered)?, gathered.rows(), gathered.columns());
        let uploaded = self.upload(&data, rows, columns)?;
        if uploaded.element_type() == tensor.element_type() {
            return Ok(uploaded);
        }
        self.copy_as(&uploaded, tensor.element_type())
    }

    pub(super) fn squares_of_columns(&self, x: &Tensor) -> Result<Vec<f64>> {
        let x = x.cuda()?;
        let (mut parts, columns) = (1, x.columns());
        while parts < PARTS && x.rows().is_multiple_of(2 * parts) {
            parts *= 2;
        }
        let (magnitudes, squares) = (self.f32(parts, columns)?, self.f32(parts, columns)?);
        self.device.column_magnitudes(&x, parts, &magnitudes, &squares)?;
        let mut sums = vec![0.0; columns];
        for part in self.device.download(&squares)?.chunks(columns.max(1)) {
            for (sum, square) in sums.iter_mut().zip(part) {
                *sum += f64::from(*square);
            }
        }
        Ok(sums)
    }

    /// On the host: once a block in a job.
    pub(super) fn products_of_tiles(&self, a: &Tensor, b: &Tensor, tile: usize) -> Result<Vec<f64>> {
        CpuOperations::new().tile_products(&self.to_host(a)?, &self.to_host(b)?, tile)
    }

    fn to_host(&self, tensor: &Tensor) -> Result<Tensor> {
        Tensor::from_vec(self.download(tensor)?, tensor.rows(), tensor.columns())
    }
}
