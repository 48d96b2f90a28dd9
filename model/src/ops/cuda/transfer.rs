//! Copies between host and device through page-locked memory, a piece at a time, each wait with a deadline.

use std::marker::PhantomData;
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

/// Where the next upload into a piece may begin: kernels read no wider.
const UPLOAD_ALIGNMENT: usize = 64;
/// Bytes of one [`Landing`]: at most, and what it has room for at least.
const LANDING: usize = 64 << 10;
const SMALL_LANDING: usize = 64;

/// The page-locked memory that copies pass through.
#[derive(Debug)]
pub(super) struct Staging {
    context: Arc<Context>,
    stream: Arc<Stream>,
    deadline: Duration,
    pieces: Mutex<Option<Pieces>>,
    /// Memory of landings that were read.
    landed: Arc<Mutex<Vec<HostMemory>>>,
}

/// Two pieces that are filled in turn. Small uploads lie one after the other in a piece, so that none waits for
/// the device before both are full.
#[derive(Debug)]
struct Pieces {
    both: [Piece; 2],
    current: usize,
}

#[derive(Debug)]
struct Piece {
    memory: HostMemory,
    /// Of the last copy out of this piece to the device.
    read: Option<Mark>,
    /// Bytes from the start that such copies may still read.
    filled: usize,
}

impl Piece {
    /// Waits until no copy reads it any more.
    fn emptied(&mut self, deadline: Duration) -> Result<()> {
        if let Some(mark) = self.read.take() {
            mark.wait(deadline, "a copy to the device")?;
        }
        self.filled = 0;
        Ok(())
    }
}

impl Pieces {
    /// A piece with room for `bytes`, at most [`PIECE`].
    fn with_room(&mut self, bytes: usize, deadline: Duration) -> Result<&mut Piece> {
        if self.both[self.current].filled + bytes > PIECE {
            self.current = 1 - self.current;
            self.both[self.current].emptied(deadline)?;
        }
        Ok(&mut self.both[self.current])
    }
}

/// Numbers on their way to the host.
#[derive(Debug)]
pub(super) struct Landing<T> {
    memory: Option<HostMemory>,
    count: usize,
    mark: Mark,
    deadline: Duration,
    landed: Arc<Mutex<Vec<HostMemory>>>,
    element: PhantomData<T>,
}

impl<T: Plain> Landing<T> {
    /// Whether they are there, or never will be.
    pub(super) fn is_there(&self) -> bool {
        self.mark.is_reached().unwrap_or(true)
    }

    /// Waits for them.
    ///
    /// # Errors
    /// When the work before fails or does not end in time.
    pub(super) fn read(&self) -> Result<Vec<T>> {
        self.mark.wait(self.deadline, "the end of a step")?;
        let mut numbers = vec![T::default(); self.count];
        if let Some(memory) = &self.memory {
            let bytes = size_of_val(numbers.as_slice());
            debug_assert!(bytes <= memory.bytes());
            // SAFETY: the copy into the memory has ended, it was made for that many numbers, and any bits are one.
            unsafe {
                std::ptr::copy_nonoverlapping(memory.start(), numbers.as_mut_ptr().cast::<u8>(), bytes);
            }
        }
        Ok(numbers)
    }
}

impl<T> Drop for Landing<T> {
    fn drop(&mut self) {
        let ended = self.mark.wait(self.deadline, "the end of a step").is_ok();
        let mut landed = self.landed.lock().unwrap_or_else(PoisonError::into_inner);
        match self.memory.take() {
            Some(memory) if ended => landed.push(memory),
            // The copy may still be under way: the device was given up, and then nothing is freed.
            memory => drop(memory),
        }
    }
}

impl Staging {
    pub(super) fn new(context: &Arc<Context>, stream: &Arc<Stream>, deadline: Duration) -> Self {
        Self {
            context: context.clone(),
            stream: stream.clone(),
            deadline,
            pieces: Mutex::default(),
            landed: Arc::default(),
        }
    }

    fn with_pieces<T>(&self, work: impl FnOnce(&mut Pieces) -> Result<T>) -> Result<T> {
        let mut guard = self.pieces.lock().unwrap_or_else(PoisonError::into_inner);
        let piece = || {
            HostMemory::new(&self.context, PIECE).map(|memory| Piece {
                memory,
                read: None,
                filled: 0,
            })
        };
        let mut pieces = match guard.take() {
            Some(pieces) => pieces,
            None => Pieces {
                both: [piece()?, piece()?],
                current: 0,
            },
        };
        // After a failure nobody knows which copies are still under way: no piece may be used or freed again.
        let result = work(&mut pieces).inspect_err(|_| self.context.give_up());
        *guard = Some(pieces);
        result
    }

    /// Begins to bring `count` numbers, 64 KiB at most, from `address` to the host, after everything queued so far and
    /// before what is queued later. Does not wait.
    ///
    /// # Errors
    /// When the driver refuses.
    pub(super) fn land<T: Plain>(&self, address: Address, count: usize) -> Result<Landing<T>> {
        let bytes = count.saturating_mul(size_of::<T>());
        if bytes > LANDING {
            return Err(Error::Operand {
                operation: "land",
                expected: format!("at most {LANDING} bytes"),
                found: bytes.to_string(),
            });
        }
        let mut landed = self.landed.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = landed.iter().position(|memory| memory.bytes() >= bytes);
        let kept = kept.map(|index| landed.swap_remove(index));
        drop(landed);
        let memory = match kept {
            Some(memory) => memory,
            None => HostMemory::new(&self.context, bytes.max(SMALL_LANDING))?,
        };
        self.context.bind()?;
        // SAFETY: the caller's buffer holds `count` numbers, the memory has room for them, and nobody touches it
        // before the mark below is reached. When the driver refuses, nothing was queued.
        check("cuMemcpyDtoHAsync", unsafe {
            sys::cuMemcpyDtoHAsync_v2(memory.start().cast(), address, bytes, self.stream.raw().handle())
        })?;
        let mark = self.stream.mark().inspect_err(|_| self.context.give_up())?;
        Ok(Landing {
            memory: Some(memory),
            count,
            mark,
            deadline: self.deadline,
            landed: self.landed.clone(),
            element: PhantomData,
        })
    }

    /// Copies `data` to `address` on the compute stream. Returns once `data` was read; later work sees it.
    ///
    /// # Errors
    /// When an earlier copy does not end or the driver refuses.
    pub(super) fn upload<T: Plain>(&self, data: &[T], address: Address) -> Result<()> {
        self.with_pieces(|pieces| {
            let elements = PIECE / size_of::<T>();
            let mut to = address;
            for chunk in data.chunks(elements) {
                let bytes = size_of_val(chunk);
                let piece = pieces.with_room(bytes, self.deadline)?;
                debug_assert!(piece.filled + bytes <= piece.memory.bytes());
                // SAFETY: `with_room` left that many bytes after `filled`, all within the piece.
                let start = unsafe { piece.memory.start().add(piece.filled) };
                // SAFETY: no copy uses the piece from `filled` on: it was waited for when it was last emptied, and
                // what is queued since reads what lies before. The two do not overlap.
                unsafe { std::ptr::copy_nonoverlapping(chunk.as_ptr().cast::<u8>(), start, bytes) };
                self.context.bind()?;
                // SAFETY: the caller's buffer holds `data`'s bytes from `address` on and outlives the stream's
                // work; this part of the piece is not written before the mark below is reached.
                check("cuMemcpyHtoDAsync", unsafe {
                    sys::cuMemcpyHtoDAsync_v2(to, start.cast(), bytes, self.stream.raw().handle())
                })?;
                piece.read = Some(self.stream.mark()?);
                piece.filled = (piece.filled + bytes).next_multiple_of(UPLOAD_ALIGNMENT);
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
                let piece = &mut pieces.both[index % 2];
                piece.emptied(self.deadline)?;
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
