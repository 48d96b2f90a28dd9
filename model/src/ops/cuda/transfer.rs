//! Copies between host and device through page-locked memory, a piece at a time, each wait with a deadline.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cudarc::driver::sys;

use super::driver::{Address, Context, HostMemory, check};
use super::error::{Error, Result};
use super::stream::{Mark, Stream};

/// Bytes of one piece; two are under way at a time.
const PIECE: usize = 8 << 20;

/// Host elements that may be copied to a device as they lie in memory: no padding, any bits are valid.
pub(super) trait Plain: Copy + Default + 'static {}
impl Plain for f32 {}
impl Plain for f64 {}
impl Plain for i32 {}
impl Plain for u16 {}
impl Plain for u8 {}

/// The page-locked memory that copies pass through.
#[derive(Debug)]
pub(super) struct Staging {
    context: Arc<Context>,
    stream: Arc<Stream>,
    deadline: Duration,
    pieces: Mutex<Option<[Piece; 2]>>,
}

#[derive(Debug)]
struct Piece {
    memory: HostMemory,
    /// Of the last copy out of this piece to the device.
    read: Option<Mark>,
}

impl Staging {
    pub(super) fn new(context: &Arc<Context>, stream: &Arc<Stream>, deadline: Duration) -> Self {
        Self {
            context: context.clone(),
            stream: stream.clone(),
            deadline,
            pieces: Mutex::default(),
        }
    }

    fn with_pieces<T>(&self, work: impl FnOnce(&mut [Piece; 2]) -> Result<T>) -> Result<T> {
        let mut guard = self.pieces.lock().unwrap_or_else(PoisonError::into_inner);
        let piece = || HostMemory::new(&self.context, PIECE).map(|memory| Piece { memory, read: None });
        let mut pieces = match guard.take() {
            Some(pieces) => pieces,
            None => [piece()?, piece()?],
        };
        // After a failure nobody knows which copies are still under way: no piece may be used or freed again.
        let result = work(&mut pieces).inspect_err(|_| self.context.give_up());
        *guard = Some(pieces);
        result
    }

    /// Copies `data` to `address` on the compute stream. Returns once `data` was read; later work sees it.
    ///
    /// # Errors
    /// When an earlier copy does not end or the driver refuses.
    pub(super) fn upload<T: Plain>(&self, data: &[T], address: Address) -> Result<()> {
        self.with_pieces(|pieces| {
            let elements = PIECE / size_of::<T>();
            let mut to = address;
            for (index, chunk) in data.chunks(elements).enumerate() {
                let piece = &mut pieces[index % 2];
                if let Some(mark) = piece.read.take() {
                    mark.wait(self.deadline, "a copy to the device")?;
                }
                let bytes = size_of_val(chunk);
                let start = piece.memory.start();
                debug_assert!(bytes <= piece.memory.bytes());
                // SAFETY: a chunk is at most PIECE bytes, the piece's length; no copy uses the piece, which was
                // waited for, and the two do not overlap.
                unsafe { std::ptr::copy_nonoverlapping(chunk.as_ptr().cast::<u8>(), start, bytes) };
                self.context.bind()?;
                // SAFETY: the caller's buffer holds `data`'s bytes from `address` on and outlives the stream's
                // work; the piece is not written before the mark below is reached.
                check("cuMemcpyHtoDAsync", unsafe {
                    sys::cuMemcpyHtoDAsync_v2(to, start.cast(), bytes, self.stream.raw().handle())
                })?;
                piece.read = Some(self.stream.mark()?);
                to += bytes as u64;
            }
            Ok(())
        })
    }

    /// The `count` elements from `address` on, after everything queued so far.
    ///
    /// # Errors
    /// When that work fails or does not end.
    pub(super) fn download<T: Plain>(&self, address: Address, count: usize) -> Result<Vec<T>> {
        let too_many = || Error::Operand {
            operation: "download",
            expected: "a size that fits the address space".to_owned(),
            found: format!("{count} elements"),
        };
        count.checked_mul(size_of::<T>()).ok_or_else(too_many)?;
        let mut result = vec![T::default(); count];
        self.with_pieces(|pieces| {
            let elements = PIECE / size_of::<T>();
            let mut from = address;
            let mut before: Option<(Mark, *mut u8, &mut [T])> = None;
            for (index, chunk) in result.chunks_mut(elements).enumerate() {
                let piece = &mut pieces[index % 2];
                if let Some(mark) = piece.read.take() {
                    mark.wait(self.deadline, "a copy to the device")?;
                }
                let bytes = size_of_val(chunk);
                let start = piece.memory.start();
                self.context.bind()?;
                // SAFETY: the caller's buffer holds that many bytes; the piece has room for them, and is not
                // touched until the mark is reached.
                check("cuMemcpyDtoHAsync", unsafe {
                    sys::cuMemcpyDtoHAsync_v2(start.cast(), from, bytes, self.stream.raw().handle())
                })?;
                let mark = self.stream.mark()?;
                from += bytes as u64;
                if let Some(copied) = before.replace((mark, start, chunk)) {
                    self.take_in(copied)?;
                }
            }
            before.map_or(Ok(()), |copied| self.take_in(copied))
        })?;
        Ok(result)
    }

    fn take_in<T: Plain>(&self, (mark, start, chunk): (Mark, *mut u8, &mut [T])) -> Result<()> {
        mark.wait(self.deadline, "a copy from the device")?;
        // SAFETY: the copy into the piece has ended, it is as long as the chunk, and any bits are a T.
        unsafe { std::ptr::copy_nonoverlapping(start, chunk.as_mut_ptr().cast::<u8>(), size_of_val(chunk)) };
        Ok(())
    }
}
