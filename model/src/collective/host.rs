//! What collective calls do with elements in the host's memory. Sums are made in the order of the ranks, element by
//! element, so that they do not depend on who came first.

use crate::{Error, Result, Tensor};

/// The elements of an operand: f32 in the host's memory, without gaps.
pub(super) fn elements<'a>(operation: &'static str, tensor: &'a Tensor) -> Result<&'a [f32]> {
    if !tensor.is_contiguous() {
        return Err(Error::Shape {
            operation,
            expected: "no gaps between rows".to_owned(),
            found: format!(
                "{} x {}, {} from row to row",
                tensor.rows(),
                tensor.columns(),
                tensor.leading_dimension()
            ),
        });
    }
    tensor.host()
}

/// A tensor of its own with the same elements.
pub(super) fn copy(operation: &'static str, tensor: &Tensor) -> Result<Tensor> {
    let mut own = Tensor::unspecified(tensor.rows(), tensor.columns())?;
    own.host_mut()?.copy_from_slice(elements(operation, tensor)?);
    Ok(own)
}

/// `sum += part`, element by element.
pub(super) fn add(sum: &mut [f32], part: &[f32]) {
    for (sum, part) in sum.iter_mut().zip(part) {
        *sum += part;
    }
}
