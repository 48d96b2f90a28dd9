//! What every backend refuses before it begins: operands whose shapes disagree.

use crate::{Error, Result, Tensor};

/// An error unless `tensor` is `(rows, columns)`.
pub(crate) fn expect_shape(
    operation: &'static str,
    name: &str,
    tensor: &Tensor,
    rows: usize,
    columns: usize,
) -> Result<()> {
    if tensor.rows() == rows && tensor.columns() == columns {
        return Ok(());
    }
    Err(Error::Shape {
        operation,
        expected: format!("{name} of {rows} x {columns}"),
        found: format!("{} x {}", tensor.rows(), tensor.columns()),
    })
}

/// An error that says what was expected, unless `holds`.
pub(crate) fn expect(
    operation: &'static str,
    holds: bool,
    expected: impl FnOnce() -> String,
    found: impl FnOnce() -> String,
) -> Result<()> {
    if holds {
        Ok(())
    } else {
        Err(Error::Shape {
            operation,
            expected: expected(),
            found: found(),
        })
    }
}
