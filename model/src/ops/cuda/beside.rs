//! A device as work beside its compute stream needs it: collective calls, on streams of their own.

use std::sync::Arc;
use std::time::Duration;

use super::driver::Context;
use super::error::Result;
use super::matrix::{Element, Matrix, bytes_of};
use super::memory::Pool;
use super::stream::Stream;

/// A share of an open device: its memory and its compute stream.
#[derive(Debug, Clone)]
pub(crate) struct Beside {
    pub(super) pool: Arc<Pool>,
    pub(super) compute: Arc<Stream>,
    pub(super) context: Arc<Context>,
    pub(super) index: u32,
    pub(super) deadline: Duration,
}

impl Beside {
    /// Which device it is.
    pub(crate) fn index(&self) -> u32 {
        self.index
    }

    /// How long the host waits for the device before it gives it up.
    pub(crate) fn deadline(&self) -> Duration {
        self.deadline
    }

    /// The stream that operations are queued on.
    pub(crate) fn compute(&self) -> &Stream {
        &self.compute
    }

    /// A stream whose work goes before that of others where the device has room for one of them only.
    ///
    /// # Errors
    /// When the driver refuses.
    pub(crate) fn urgent_stream(&self) -> Result<Stream> {
        Stream::urgent(&self.context, self.deadline)
    }

    /// Whether `matrix` lies in this device's memory.
    pub(crate) fn holds(&self, matrix: &Matrix) -> bool {
        matrix.is_of(&self.pool)
    }

    /// A contiguous matrix that nobody has written yet; work beside the compute stream may write it once it has
    /// waited for a mark that was set later.
    ///
    /// # Errors
    /// When there is no memory.
    pub(crate) fn matrix(&self, element: Element, rows: usize, columns: usize) -> Result<Matrix> {
        let bytes = bytes_of(element, rows, columns).unwrap_or(u64::MAX);
        Matrix::new(self.pool.allocate(bytes)?, element, rows, columns, columns)
    }

    /// Makes the device's context the calling thread's.
    pub(super) fn bind(&self) -> Result<()> {
        self.context.bind()
    }
}
