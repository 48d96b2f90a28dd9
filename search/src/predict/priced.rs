//! Which variants a table has times for.

use espalier_arch::{Architecture, Variant};

use super::Prices;
use crate::{CostModel, Error, Result};

/// The variants of each block that have a price with as many sequences together as `model` runs, and how many have none.
/// The whole block has to have one.
///
/// # Errors
/// When a whole block has no price, or a variant does not fit its block.
pub(crate) fn priced(
    parent: &Architecture,
    variants: &[Vec<Variant>],
    model: &CostModel,
) -> Result<(Vec<Vec<Variant>>, usize)> {
    let mut unpriced = 0;
    let mut prices = Prices::new(model);
    let mut priced = Vec::with_capacity(variants.len());
    for (block, variants) in parent.blocks.iter().zip(variants) {
        let mut left = Vec::with_capacity(variants.len());
        for variant in variants {
            let shape = block.shape.with_variant(variant).map_err(Error::Shape)?;
            match prices.of(shape.as_ref()) {
                Ok(_) => left.push(variant.clone()),
                Err(Error::MissingRow { .. } | Error::Extrapolation { .. } | Error::Shape(_))
                    if *variant != Variant::Whole =>
                {
                    unpriced += 1;
                }
                Err(error) => return Err(error),
            }
        }
        priced.push(left);
    }
    Ok((priced, unpriced))
}
