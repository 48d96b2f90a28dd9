//! NCCL's functions behind safe ones: ids, communicators, and calls that it queues on a stream. No call here waits:
//! whoever makes one looks at [`Link::is_ready`] until it has gone through. Deadlines are `collective/nccl.rs`'s.
//!
//! The library is opened when it is first asked for, and its functions are taken from what was opened, by the types of
//! its header (2.17 and later).

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::OnceLock;

use super::beside::Beside;
use super::driver::Address;
use super::error::{Error, Result};
use super::library;
use super::matrix::{Element, Matrix};
use super::stream::Stream;

/// A communicator of the library's.
type Handle = *mut c_void;
type Answer = c_int;

const SUCCESS: Answer = 0;
const IN_PROGRESS: Answer = 7;
const SUM: c_int = 0;
/// What the library takes for "not set".
const UNSET: c_int = c_int::MIN;

/// `ncclUniqueId`: what the ranks of one communicator share.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Id(pub(crate) [u8; 128]);

/// `ncclConfig_t` of version 2.17, which later ones take too.
#[repr(C)]
struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cluster_size: c_int,
    least_blocks: c_int,
    most_blocks: c_int,
    network: *const c_char,
    share: c_int,
    /// Later versions have a number here, which this one does not give.
    unset: c_int,
}

library::functions! {
    /// What is used of the library.
    Functions without sys {
        ncclGetVersion(*mut c_int) -> Answer;
        ncclGetUniqueId(*mut Id) -> Answer;
        ncclCommInitRankConfig(*mut Handle, c_int, Id, c_int, *mut Config) -> Answer;
        ncclCommGetAsyncError(Handle, *mut Answer) -> Answer;
        ncclCommFinalize(Handle) -> Answer;
        ncclCommDestroy(Handle) -> Answer;
        ncclCommAbort(Handle) -> Answer;
        ncclGetErrorString(Answer) -> *const c_char;
        ncclGetLastError(Handle) -> *const c_char;
        ncclAllReduce(*const c_void, *mut c_void, usize, c_int, c_int, Handle, *mut c_void) -> Answer;
        ncclReduceScatter(*const c_void, *mut c_void, usize, c_int, c_int, Handle, *mut c_void) -> Answer;
        ncclAllGather(*const c_void, *mut c_void, usize, c_int, Handle, *mut c_void) -> Answer;
        ncclBroadcast(*const c_void, *mut c_void, usize, c_int, c_int, Handle, *mut c_void) -> Answer;
        ncclSend(*const c_void, usize, c_int, c_int, Handle, *mut c_void) -> Answer;
        ncclRecv(*mut c_void, usize, c_int, c_int, Handle, *mut c_void) -> Answer;
    }
}

/// The library, opened when it is first asked for.
///
/// # Errors
/// When it is not there or too old.
fn functions() -> Result<&'static Functions> {
    static FOUND: OnceLock<Functions> = OnceLock::new();
    if let Some(functions) = FOUND.get() {
        return Ok(functions);
    }
    let library = "libnccl.so.2";
    let found = library::find(library, "moves tensors between GPUs")?;
    let functions = Functions::of(library, found)?;
    Ok(FOUND.get_or_init(|| functions))
}

/// The library's version, as it writes it: 22809 is 2.28.9.
///
/// # Errors
/// When it is not there.
pub fn nccl_version() -> Result<u32> {
    let mut version = 0;
    // SAFETY: the pointer is to a live integer.
    let answer = unsafe { (functions()?.ncclGetVersion)(&raw mut version) };
    check("ncclGetVersion", answer, ptr::null_mut())?;
    Ok(u32::try_from(version).unwrap_or(0))
}

fn check(call: &'static str, answer: Answer, link: Handle) -> Result<()> {
    if answer == SUCCESS || answer == IN_PROGRESS {
        return Ok(());
    }
    let text = |text: *const c_char| {
        if text.is_null() {
            return String::new();
        }
        // SAFETY: the library's strings end with a zero, and live at least until its next call in this thread.
        let text = unsafe { CStr::from_ptr(text) };
        text.to_string_lossy().trim().to_owned()
    };
    let functions = functions()?;
    // SAFETY: any number may be asked for; the handle is the library's or null.
    let (name, last) = unsafe {
        (
            (functions.ncclGetErrorString)(answer),
            (functions.ncclGetLastError)(link),
        )
    };
    Err(Error::Nccl {
        call,
        reason: format!("{} ({answer}) {}", text(name), text(last))
            .trim_end()
            .to_owned(),
    })
}

impl Id {
    /// A new one, for all ranks of a communicator.
    ///
    /// # Errors
    /// When the library is not there or finds no way to be reached.
    pub(crate) fn new() -> Result<Self> {
        let mut id = Self([0; 128]);
        // SAFETY: the pointer is to a live id.
        check(
            "ncclGetUniqueId",
            unsafe { (functions()?.ncclGetUniqueId)(&raw mut id) },
            ptr::null_mut(),
        )?;
        Ok(id)
    }
}

/// One rank's end of a communicator. All calls on it are made by one thread.
#[derive(Debug)]
pub(crate) struct Link {
    handle: Handle,
    size: usize,
    beside: Beside,
}

// SAFETY: the library's communicators may be used by any thread, one at a time, and `Link` is not shared.
unsafe impl Send for Link {}

impl Link {
    /// Begins to join rank `rank` of `size` with the others that have the same id; goes on until
    /// [`Link::is_ready`]. At most `most_blocks` multiprocessors work on a call, if given.
    ///
    /// # Errors
    /// When the library is not there or refuses.
    pub(crate) fn begin(
        beside: &Beside,
        id: Id,
        rank: usize,
        size: usize,
        most_blocks: Option<i32>,
    ) -> Result<Self> {
        let number = |value: usize| c_int::try_from(value).unwrap_or(c_int::MAX);
        let mut config = Config {
            size: size_of::<Config>(),
            magic: 0xcafe_beef,
            version: 21_700,
            blocking: 0,
            cluster_size: UNSET,
            least_blocks: UNSET,
            most_blocks: most_blocks.unwrap_or(UNSET),
            network: ptr::null(),
            share: UNSET,
            unset: UNSET,
        };
        beside.bind()?;
        let mut link = Self {
            handle: ptr::null_mut(),
            size,
            beside: beside.clone(),
        };
        // SAFETY: both pointers are to live values, which the library reads and writes before it returns; the
        // device's context is current.
        let answer = unsafe {
            (functions()?.ncclCommInitRankConfig)(
                &raw mut link.handle,
                number(size),
                id,
                number(rank),
                &raw mut config,
            )
        };
        check("ncclCommInitRankConfig", answer, link.handle)?;
        Ok(link)
    }

    /// Whether everything asked so far has gone through: the ranks are joined, calls are on their streams.
    ///
    /// # Errors
    /// When something of it failed, here or at another rank.
    pub(crate) fn is_ready(&self) -> Result<bool> {
        let mut state = SUCCESS;
        // SAFETY: the handle is live; the pointer is to a live number.
        let answer = unsafe { (functions()?.ncclCommGetAsyncError)(self.handle, &raw mut state) };
        check("ncclCommGetAsyncError", answer, self.handle)?;
        check("a communicator", state, self.handle)?;
        Ok(state == SUCCESS)
    }

    /// `to` becomes the sum of every rank's `from`, which may be the same.
    ///
    /// # Errors
    /// When they do not fit, or the library refuses.
    pub(crate) fn all_reduce(&self, from: &Matrix, to: &Matrix, stream: &Stream) -> Result<()> {
        self.expect("all_reduce", from, to, from.len() == to.len())?;
        let (functions, count, kind) = self.call(from, from.len())?;
        // SAFETY: both hold as many elements of that kind, and are kept until the stream is past the call.
        let answer = unsafe {
            (functions.ncclAllReduce)(read(from), write(to), count, kind, SUM, self.handle, raw(stream))
        };
        check("ncclAllReduce", answer, self.handle)
    }

    /// `to` becomes this rank's share of the sum of every rank's `from`.
    ///
    /// # Errors
    /// As [`Link::all_reduce`].
    pub(crate) fn reduce_scatter(&self, from: &Matrix, to: &Matrix, stream: &Stream) -> Result<()> {
        self.expect("reduce_scatter", from, to, self.is_all_of(from, to))?;
        let (functions, count, kind) = self.call(to, to.len())?;
        // SAFETY: `from` holds `size` times as many elements as `to`; see `all_reduce`.
        let answer = unsafe {
            (functions.ncclReduceScatter)(read(from), write(to), count, kind, SUM, self.handle, raw(stream))
        };
        check("ncclReduceScatter", answer, self.handle)
    }

    /// `to` becomes every rank's `from`, one after the other.
    ///
    /// # Errors
    /// As [`Link::all_reduce`].
    pub(crate) fn all_gather(&self, from: &Matrix, to: &Matrix, stream: &Stream) -> Result<()> {
        self.expect("all_gather", from, to, self.is_all_of(to, from))?;
        let (functions, count, kind) = self.call(from, from.len())?;
        // SAFETY: `to` holds `size` times as many elements as `from`; see `all_reduce`.
        let answer = unsafe {
            (functions.ncclAllGather)(read(from), write(to), count, kind, self.handle, raw(stream))
        };
        check("ncclAllGather", answer, self.handle)
    }

    /// `both` becomes what it is at rank `root`.
    ///
    /// # Errors
    /// As [`Link::all_reduce`].
    pub(crate) fn broadcast(&self, both: &Matrix, root: usize, stream: &Stream) -> Result<()> {
        let root = self.other("broadcast", both, root)?;
        let (functions, count, kind) = self.call(both, both.len())?;
        // SAFETY: see `all_reduce`.
        let answer = unsafe {
            (functions.ncclBroadcast)(
                read(both),
                write(both),
                count,
                kind,
                root,
                self.handle,
                raw(stream),
            )
        };
        check("ncclBroadcast", answer, self.handle)
    }

    /// Sends `from` to rank `to`.
    ///
    /// # Errors
    /// As [`Link::all_reduce`].
    pub(crate) fn send(&self, from: &Matrix, to: usize, stream: &Stream) -> Result<()> {
        let to = self.other("send", from, to)?;
        let (functions, count, kind) = self.call(from, from.len())?;
        // SAFETY: see `all_reduce`.
        let answer = unsafe { (functions.ncclSend)(read(from), count, kind, to, self.handle, raw(stream)) };
        check("ncclSend", answer, self.handle)
    }

    /// `to` becomes what rank `from` sends.
    ///
    /// # Errors
    /// As [`Link::all_reduce`].
    pub(crate) fn receive(&self, to: &Matrix, from: usize, stream: &Stream) -> Result<()> {
        let from = self.other("receive", to, from)?;
        let (functions, count, kind) = self.call(to, to.len())?;
        // SAFETY: see `all_reduce`.
        let answer = unsafe { (functions.ncclRecv)(write(to), count, kind, from, self.handle, raw(stream)) };
        check("ncclRecv", answer, self.handle)
    }

    /// Begins to take the ranks apart, once what was called has ended everywhere; goes on until [`Link::is_ready`].
    ///
    /// # Errors
    /// When the library refuses.
    pub(crate) fn finish(&self) -> Result<()> {
        self.beside.bind()?;
        // SAFETY: the handle is live.
        let answer = unsafe { (functions()?.ncclCommFinalize)(self.handle) };
        check("ncclCommFinalize", answer, self.handle)
    }

    /// Frees what is left after [`Link::finish`].
    pub(crate) fn destroy(mut self) {
        self.end(|functions| functions.ncclCommDestroy);
    }

    fn end(&mut self, which: impl FnOnce(&Functions) -> unsafe extern "C" fn(Handle) -> Answer) {
        let handle = std::mem::replace(&mut self.handle, ptr::null_mut());
        if handle.is_null() || self.beside.bind().is_err() {
            return;
        }
        if let Ok(functions) = functions() {
            // SAFETY: the handle was live, and is used no more.
            let answer = unsafe { which(functions)(handle) };
            if answer != SUCCESS && answer != IN_PROGRESS {
                tracing::warn!(answer, "a communicator could not be given back");
            }
        }
    }

    fn is_all_of(&self, whole: &Matrix, part: &Matrix) -> bool {
        part.len().checked_mul(self.size) == Some(whole.len())
    }

    fn expect(&self, operation: &'static str, from: &Matrix, to: &Matrix, fits: bool) -> Result<()> {
        let same = from.element() == to.element() && from.is_contiguous() && to.is_contiguous();
        if same && fits {
            return Ok(());
        }
        Err(Error::Operand {
            operation,
            expected: format!(
                "elements of one kind without gaps, shared out among {}",
                self.size
            ),
            found: format!("{from} and {to}"),
        })
    }

    fn other(&self, operation: &'static str, operand: &Matrix, rank: usize) -> Result<c_int> {
        self.expect(operation, operand, operand, rank < self.size)?;
        Ok(c_int::try_from(rank).unwrap_or(c_int::MAX))
    }

    /// What every call needs: the functions, so many elements, and what they are.
    fn call(&self, operand: &Matrix, count: usize) -> Result<(&'static Functions, usize, c_int)> {
        self.beside.bind()?;
        let kind = match operand.element() {
            Element::I32 => 2,
            Element::F32 => 7,
            Element::F64 => 8,
            Element::Bf16 => 9,
        };
        Ok((functions()?, count, kind))
    }
}

impl Drop for Link {
    /// Aborts: kernels of calls under way end, whatever the other ranks do, and leave anything in their buffers.
    fn drop(&mut self) {
        self.end(|functions| functions.ncclCommAbort);
    }
}

fn read(matrix: &Matrix) -> *const c_void {
    pointer(matrix.address())
}

fn write(matrix: &Matrix) -> *mut c_void {
    pointer(matrix.address())
}

/// An address in the device's memory as the library takes it; nobody follows it on the host.
fn pointer(address: Address) -> *mut c_void {
    ptr::without_provenance_mut(usize::try_from(address).unwrap_or(0))
}

fn raw(stream: &Stream) -> *mut c_void {
    stream.raw().handle().cast()
}
