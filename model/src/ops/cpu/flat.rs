//! Many tensors as one, element after element, and back to zero.

use rayon::prelude::*;

use super::rows::expect;
use crate::{Result, Tensor};

pub(super) fn flatten(parts: &[(usize, &Tensor)], rows: usize, columns: usize) -> Result<Tensor> {
    let mut flat = Tensor::zeros(rows, columns)?;
    let mut pairs = Vec::with_capacity(parts.len());
    let mut rest = flat.host_mut()?;
    let mut end = 0;
    for (start, part) in parts {
        let gap = start.checked_sub(end).filter(|_| part.is_contiguous());
        let place = gap.and_then(|gap| rest.split_at_mut_checked(gap));
        let place = place.and_then(|(_, place)| place.split_at_mut_checked(part.len()));
        let fits = place.is_some();
        expect(
            "flatten",
            fits,
            || format!("tensors without gaps, one after the other within {rows} x {columns}"),
            || format!("{} elements at {start}, after {end}", part.len()),
        )?;
        let Some((place, after)) = place else { break };
        pairs.push((place, part.host()?));
        (rest, end) = (after, start + part.len());
    }
    pairs
        .into_par_iter()
        .for_each(|(place, part)| place.copy_from_slice(part));
    Ok(flat)
}

pub(super) fn clear(tensors: &mut [&mut Tensor]) -> Result<()> {
    for tensor in tensors {
        expect(
            "clear",
            tensor.is_contiguous(),
            || "a tensor without gaps".to_owned(),
            || format!("{} elements from row to row", tensor.leading_dimension()),
        )?;
        tensor
            .host_mut()?
            .par_chunks_mut(1 << 16)
            .for_each(|piece| piece.fill(0.0));
    }
    Ok(())
}
