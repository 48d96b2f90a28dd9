//! Large buffers, kept for the next tensor of the same size: page faults cost more than most operations.
//!
//! Here lives the owner of a tensor's elements and where they go when it is dropped. No shapes, no arithmetic.

use std::collections::VecDeque;
use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, PoisonError};

/// Below this many elements the allocator is quick enough (and the tests want every buffer poisoned).
const SMALLEST: usize = if cfg!(test) { 1 } else { 16 * 1024 };
/// Bytes that idle buffers may hold together.
const CAPACITY_BYTES: usize = 256 << 20;
/// From this many bytes on, huge pages are asked for.
const HUGE_PAGE_BYTES: usize = 4 << 20;

static IDLE: Mutex<Idle> = Mutex::new(Idle {
    buffers: VecDeque::new(),
    bytes: 0,
});

/// Idle buffers, the longest unused first.
struct Idle {
    buffers: VecDeque<Vec<f32>>,
    bytes: usize,
}

/// The elements of a tensor; handed to the pool when dropped.
#[derive(Debug)]
pub(crate) struct Buffer(Vec<f32>);

impl Buffer {
    /// `len` elements of any value: what an earlier tensor left, or zeros.
    pub(crate) fn unspecified(len: usize) -> Self {
        if let Some(buffer) = take(len) {
            return Self(buffer);
        }
        if cfg!(test) {
            Self(vec![f32::NAN; len])
        } else {
            Self(fresh(len))
        }
    }

    /// `len` zeros.
    pub(crate) fn zeros(len: usize) -> Self {
        let Some(mut buffer) = take(len) else {
            return Self(fresh(len));
        };
        buffer.fill(0.0);
        Self(buffer)
    }
}

impl From<Vec<f32>> for Buffer {
    fn from(elements: Vec<f32>) -> Self {
        Self(elements)
    }
}

impl Deref for Buffer {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.0
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.0
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        give(std::mem::take(&mut self.0));
    }
}

fn take(len: usize) -> Option<Vec<f32>> {
    if len < SMALLEST {
        return None;
    }
    let mut idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner);
    let position = idle.buffers.iter().rposition(|buffer| buffer.len() == len)?;
    let buffer = idle.buffers.remove(position)?;
    idle.bytes -= bytes_of(&buffer);
    Some(buffer)
}

fn give(buffer: Vec<f32>) {
    let bytes = bytes_of(&buffer);
    if buffer.len() < SMALLEST
        || bytes > CAPACITY_BYTES
        || buffer.capacity() > buffer.len() + buffer.len() / 4
    {
        return;
    }
    // Freed only after the lock is released.
    let mut evicted = Vec::new();
    {
        let mut idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner);
        while idle.bytes + bytes > CAPACITY_BYTES {
            let Some(oldest) = idle.buffers.pop_front() else {
                break;
            };
            idle.bytes -= bytes_of(&oldest);
            evicted.push(oldest);
        }
        idle.bytes += bytes;
        idle.buffers.push_back(buffer);
    }
    drop(evicted);
}

fn bytes_of(buffer: &[f32]) -> usize {
    size_of_val(buffer)
}

/// Zeros that the system has not touched yet, in huge pages where they are worth it.
pub(crate) fn fresh<T: Clone + Default>(len: usize) -> Vec<T> {
    let buffer = vec![T::default(); len];
    if size_of_val(buffer.as_slice()) >= HUGE_PAGE_BYTES {
        advise_huge_pages(&buffer);
    }
    buffer
}

#[cfg(target_os = "linux")]
fn advise_huge_pages<T>(buffer: &[T]) {
    const PAGE: usize = 4096;
    let start = (buffer.as_ptr() as usize).next_multiple_of(PAGE);
    let end = (buffer.as_ptr() as usize + size_of_val(buffer)) / PAGE * PAGE;
    if end > start {
        // SAFETY: whole pages inside an allocation that this buffer owns; the advice changes no content.
        // A refusal costs speed only.
        unsafe { libc::madvise(start as *mut libc::c_void, end - start, libc::MADV_HUGEPAGE) };
    }
}

#[cfg(not(target_os = "linux"))]
fn advise_huge_pages<T>(_buffer: &[T]) {}
