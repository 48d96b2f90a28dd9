//! Losses over the vocabulary, a chunk of rows at a time: logits, loss and gradient of one chunk before the next.
//!
//! With a gradient, cross-entropy's logits are bf16 and become the gradient where they lie. Losses that are only
//! read, and the KL, whose terms nearly cancel, come from f32 logits.

use super::CudaOperations;
use crate::ops::check::expect;
use crate::ops::cuda::loss::LogitGradient;
use crate::ops::cuda::matmul::Onto;
use crate::ops::cuda::matrix::{Element, Matrix};
use crate::ops::{Head, HeadGradient, Losses};
use crate::{Result, Tensor};

/// Bytes that a chunk's logits take at most, for each head: enough for products that fill a device.
const CHUNK_BYTES: usize = 256 << 20;
/// Chunks are multiples of this, but for the last.
const CHUNK_STEP: usize = 128;

/// A head's operands on the device.
struct Parts {
    hidden: Matrix,
    weight: Matrix,
}

impl Parts {
    fn of(head: Head<'_>) -> Result<Self> {
        Ok(Self {
            hidden: head.hidden.cuda()?,
            weight: head.weight.cuda()?,
        })
    }
}

/// An error unless student and parent have a row for each other's.
fn expect_rows(operation: &'static str, student: &Parts, parent: &Parts) -> Result<()> {
    let (own, theirs) = (student.hidden.rows(), parent.hidden.rows());
    expect(
        operation,
        own == theirs,
        || format!("the parent's {theirs} rows of the student"),
        || own.to_string(),
    )
}

/// Where the gradients of one loss go.
struct Gradient {
    /// f32 `(vocabulary, hidden)`, added to.
    weight: Matrix,
    /// bf16 `(tokens, hidden)`, written.
    hidden: Matrix,
    scale: f32,
}

/// Rows of one chunk.
fn chunk_rows(rows: usize, vocabulary: usize, element: Element) -> usize {
    let row = vocabulary.saturating_mul(if element == Element::F32 { 4 } else { 2 });
    let steps = CHUNK_BYTES / row.saturating_mul(CHUNK_STEP).max(1);
    rows.min(CHUNK_STEP * steps.max(1))
}

impl CudaOperations {
    /// `(rows, vocabulary)` whose rows begin where vectors may.
    fn logits_buffer(&self, element: Element, rows: usize, vocabulary: usize) -> Result<Matrix> {
        let leading = vocabulary.next_multiple_of(8);
        Ok(self.device.padded_matrix(element, rows, vocabulary, leading)?)
    }

    pub(super) fn write_logits(&self, hidden: &Matrix, weight: &Matrix, logits: &Matrix) -> Result<()> {
        Ok(self.device.linear(hidden, weight, None, Onto::Nothing, logits)?)
    }

    fn gradient(&self, head: &Parts, wanted: Option<HeadGradient<'_>>) -> Result<Option<Gradient>> {
        let Some(HeadGradient { weight, scale }) = wanted else {
            return Ok(None);
        };
        Ok(Some(Gradient {
            weight: weight.cuda()?,
            hidden: self.bf16(head.hidden.rows(), head.hidden.columns())?,
            scale,
        }))
    }

    /// From the gradient of a chunk's logits to those of hidden states and weight.
    fn through_head(
        &self,
        logits: &Matrix,
        hidden: &Matrix,
        weight: &Matrix,
        gradient: &Gradient,
        start: usize,
    ) -> Result<()> {
        let target = gradient.hidden.narrow_rows(start, hidden.rows())?;
        self.device
            .linear_backward_input(logits, weight, Onto::Nothing, &target)?;
        Ok(self
            .device
            .linear_backward_weight(logits, hidden, &gradient.weight)?)
    }

    fn losses(&self, rows: Matrix, gradient: Option<Gradient>) -> Result<Losses> {
        Ok(Losses {
            rows: self.tensor(rows)?,
            hidden_gradient: gradient
                .map(|gradient| self.tensor(gradient.hidden))
                .transpose()?,
        })
    }

    pub(super) fn cross_entropy_of(
        &self,
        head: Head<'_>,
        targets: &Matrix,
        gradient: Option<HeadGradient<'_>>,
    ) -> Result<Losses> {
        let head = Parts::of(head)?;
        let gradient = self.gradient(&head, gradient)?;
        let (all, vocabulary) = (head.hidden.rows(), head.weight.rows());
        let element = match gradient {
            Some(_) => Element::Bf16,
            None => Element::F32,
        };
        let chunk = chunk_rows(all, vocabulary, element);
        let buffer = self.logits_buffer(element, chunk, vocabulary)?;
        let losses = self.f32(all, 1)?;
        for start in (0..all).step_by(chunk.max(1)) {
            let rows = chunk.min(all - start);
            let (hidden, logits) = (
                head.hidden.narrow_rows(start, rows)?,
                buffer.narrow_rows(0, rows)?,
            );
            self.write_logits(&hidden, &head.weight, &logits)?;
            let wanted = gradient.as_ref().map(|gradient| LogitGradient {
                target: &logits,
                scale: gradient.scale,
            });
            self.device.cross_entropy(
                &logits,
                &targets.narrow_columns(start, rows)?,
                &losses.narrow_rows(start, rows)?,
                wanted,
            )?;
            if let Some(gradient) = &gradient {
                self.through_head(&logits, &hidden, &head.weight, gradient, start)?;
            }
        }
        self.losses(losses, gradient)
    }

    pub(super) fn distillation_of(
        &self,
        student: Head<'_>,
        parent: Head<'_>,
        gradient: Option<HeadGradient<'_>>,
    ) -> Result<Losses> {
        let (student, parent) = (Parts::of(student)?, Parts::of(parent)?);
        expect_rows("distillation", &student, &parent)?;
        let gradient = self.gradient(&student, gradient)?;
        let (all, vocabulary) = (student.hidden.rows(), student.weight.rows());
        let chunk = chunk_rows(all, vocabulary, Element::F32);
        let own = self.logits_buffer(Element::F32, chunk, vocabulary)?;
        let theirs = self.logits_buffer(Element::F32, chunk, parent.weight.rows())?;
        let to_logits = match gradient {
            Some(_) => Some(self.logits_buffer(Element::Bf16, chunk, vocabulary)?),
            None => None,
        };
        let losses = self.f32(all, 1)?;
        for start in (0..all).step_by(chunk.max(1)) {
            let rows = chunk.min(all - start);
            let hidden = student.hidden.narrow_rows(start, rows)?;
            let (own, theirs) = (own.narrow_rows(0, rows)?, theirs.narrow_rows(0, rows)?);
            self.write_logits(&hidden, &student.weight, &own)?;
            self.write_logits(&parent.hidden.narrow_rows(start, rows)?, &parent.weight, &theirs)?;
            let target = to_logits
                .as_ref()
                .map(|target| target.narrow_rows(0, rows))
                .transpose()?;
            let both = gradient.as_ref().zip(target.as_ref());
            let wanted = both.map(|(gradient, target)| LogitGradient {
                target,
                scale: gradient.scale,
            });
            self.device
                .distillation(&own, &theirs, &losses.narrow_rows(start, rows)?, wanted)?;
            if let Some((gradient, target)) = both {
                self.through_head(target, &hidden, &student.weight, gradient, start)?;
            }
        }
        self.losses(losses, gradient)
    }

    pub(super) fn distillation_of_many(
        &self,
        students: &[Head<'_>],
        parent: Head<'_>,
    ) -> Result<Vec<Tensor>> {
        let students = students
            .iter()
            .map(|head| Parts::of(*head))
            .collect::<Result<Vec<_>>>()?;
        let parent = Parts::of(parent)?;
        for student in &students {
            expect_rows("distillation_many", student, &parent)?;
        }
        let (all, vocabulary) = (parent.hidden.rows(), parent.weight.rows());
        let chunk = chunk_rows(all, vocabulary, Element::F32);
        let own = self.logits_buffer(Element::F32, chunk, vocabulary)?;
        let theirs = self.logits_buffer(Element::F32, chunk, vocabulary)?;
        let losses = students
            .iter()
            .map(|_| self.f32(all, 1))
            .collect::<Result<Vec<_>>>()?;
        for start in (0..all).step_by(chunk.max(1)) {
            let rows = chunk.min(all - start);
            let (own, theirs) = (own.narrow_rows(0, rows)?, theirs.narrow_rows(0, rows)?);
            self.write_logits(&parent.hidden.narrow_rows(start, rows)?, &parent.weight, &theirs)?;
            for (student, losses) in students.iter().zip(&losses) {
                let hidden = student.hidden.narrow_rows(start, rows)?;
                self.write_logits(&hidden, &student.weight, &own)?;
                self.device
                    .distillation(&own, &theirs, &losses.narrow_rows(start, rows)?, None)?;
            }
        }
        losses.into_iter().map(|losses| self.tensor(losses)).collect()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use super::*;

    #[test]
    fn a_chunk_is_as_large_as_its_bytes_allow_and_never_empty() {
        assert_eq!(chunk_rows(8192, 49_152, Element::Bf16), 2688);
        assert_eq!(chunk_rows(8192, 49_152, Element::F32), 1280);
        assert_eq!(chunk_rows(100, 49_152, Element::F32), 100);
        assert_eq!(chunk_rows(8192, usize::MAX, Element::F32), 128);
    }
}
