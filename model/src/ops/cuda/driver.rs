//! The driver's functions behind safe ones: versions, devices, the context, raw memory, streams, events.
//!
//! Only this file, `library.rs`, `cache.rs`, `transfer.rs`, `launch.rs`, `graph.rs`, `nvrtc.rs`, `cublas.rs` and
//! `nccl.rs` hold `unsafe`. Nothing here waits for the device; what waits is in `stream.rs`, and has a deadline.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::result;
use cudarc::driver::sys::{self, CUdevice_attribute_enum as Attribute, CUresult};

use super::error::{Error, Result, Version};

/// An address in a device's memory.
pub(super) type Address = u64;

/// The answer of a call as a result.
pub(super) fn check(call: &'static str, code: CUresult) -> Result<()> {
    match code {
        CUresult::CUDA_SUCCESS => Ok(()),
        code => Err(Error::Driver {
            call,
            code: format!("{code:?}"),
        }),
    }
}

fn checked<T>(call: &'static str, answer: std::result::Result<T, result::DriverError>) -> Result<T> {
    answer.map_err(|error| Error::Driver {
        call,
        code: format!("{:?}", error.0),
    })
}

/// The CUDA version that the driver supports. The library must have been found before.
pub(super) fn version() -> Result<Version> {
    let mut packed = 0;
    // SAFETY: the pointer is to a live integer, which is all that the function asks for.
    check("cuDriverGetVersion", unsafe {
        sys::cuDriverGetVersion(&raw mut packed)
    })?;
    let packed = u32::try_from(packed).unwrap_or(0);
    Ok(Version {
        major: packed / 1000,
        minor: packed % 1000 / 10,
    })
}

/// Devices that the driver shows to this process.
pub(super) fn count() -> Result<u32> {
    match result::init() {
        Ok(()) => {}
        Err(error) if error.0 == CUresult::CUDA_ERROR_NO_DEVICE => return Ok(0),
        Err(error) => checked("cuInit", Err(error))?,
    }
    let count = checked("cuDeviceGetCount", result::device::get_count())?;
    Ok(u32::try_from(count).unwrap_or(0))
}

/// One device, without a context on it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Device {
    handle: sys::CUdevice,
}

impl Device {
    /// The `index`th; there must be as many.
    pub(super) fn get(index: u32) -> Result<Self> {
        let index = i32::try_from(index).unwrap_or(i32::MAX);
        checked("cuDeviceGet", result::device::get(index)).map(|handle| Self { handle })
    }

    pub(super) fn name(self) -> Result<String> {
        checked("cuDeviceGetName", result::device::get_name(self.handle))
    }

    fn attribute(self, attribute: Attribute) -> Result<u32> {
        // SAFETY: the handle is the driver's own.
        let value = unsafe { result::device::get_attribute(self.handle, attribute) };
        checked("cuDeviceGetAttribute", value).map(|value| u32::try_from(value).unwrap_or(0))
    }

    pub(super) fn capability(self) -> Result<Version> {
        Ok(Version {
            major: self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            minor: self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        })
    }

    pub(super) fn multiprocessors(self) -> Result<u32> {
        self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
    }

    pub(super) fn cache(self) -> Result<u64> {
        self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)
            .map(u64::from)
    }

    pub(super) fn total_memory(self) -> Result<u64> {
        // SAFETY: the handle is the driver's own.
        let bytes = unsafe { result::device::total_mem(self.handle) };
        checked("cuDeviceTotalMem", bytes).map(|bytes| bytes as u64)
    }
}

/// The primary context of one device.
#[derive(Debug)]
pub(super) struct Context {
    device: Device,
    handle: sys::CUcontext,
    lost: AtomicBool,
}

// SAFETY: a context may be current in any number of threads at once; the driver locks what it needs to.
unsafe impl Send for Context {}
// SAFETY: as above; the only state of our own is atomic.
unsafe impl Sync for Context {}

impl Context {
    /// Makes the device's context. `Ok(None)` when the device has no room for one.
    pub(super) fn new(device: Device) -> Result<Option<Arc<Self>>> {
        // SAFETY: the handle is the driver's own.
        let handle = match unsafe { result::primary_ctx::retain(device.handle) } {
            Err(error) if error.0 == CUresult::CUDA_ERROR_OUT_OF_MEMORY => return Ok(None),
            handle => checked("cuDevicePrimaryCtxRetain", handle)?,
        };
        let context = Self {
            device,
            handle,
            lost: AtomicBool::new(false),
        };
        context.bind()?;
        Ok(Some(Arc::new(context)))
    }

    /// Makes this context the calling thread's.
    ///
    /// # Errors
    /// When the device was given up.
    pub(super) fn bind(&self) -> Result<()> {
        if self.is_lost() {
            return Err(Error::Lost);
        }
        // SAFETY: the context is retained for as long as `self` lives.
        checked("cuCtxSetCurrent", unsafe {
            result::ctx::set_current(self.handle)
        })
    }

    /// Gives the device up: work may still be writing, so nothing that it could touch is freed any more.
    pub(super) fn give_up(&self) {
        self.lost.store(true, Ordering::Release);
    }

    pub(super) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    /// Which instructions the device has.
    pub(super) fn capability(&self) -> Result<Version> {
        self.device.capability()
    }

    /// Bytes free and in all.
    pub(super) fn memory(&self) -> Result<(u64, u64)> {
        self.bind()?;
        checked("cuMemGetInfo", result::mem_get_info()).map(|(free, total)| (free as u64, total as u64))
    }

    /// Device memory, or none where there is not enough.
    pub(super) fn allocate(&self, bytes: usize) -> Result<Option<Address>> {
        self.bind()?;
        // SAFETY: what comes back is an address that only device work dereferences.
        match unsafe { result::malloc_sync(bytes) } {
            Err(error) if error.0 == CUresult::CUDA_ERROR_OUT_OF_MEMORY => Ok(None),
            address => checked("cuMemAlloc", address).map(Some),
        }
    }

    /// Gives back what [`Context::allocate`] gave; work that uses it must have ended.
    pub(super) fn free(&self, address: Address) {
        if self.bind().is_err() {
            return;
        }
        // SAFETY: the caller owns the address and no work uses it.
        if let Err(error) = unsafe { result::free_sync(address) } {
            tracing::warn!(code = ?error.0, "device memory could not be given back");
        }
    }

    /// Sets `bytes` bytes from `address` to `value`, on `stream`.
    pub(super) fn fill(&self, address: Address, value: u8, bytes: usize, stream: &RawStream) -> Result<()> {
        self.bind()?;
        // SAFETY: callers pass a range of a buffer that is kept until the stream is past this.
        checked("cuMemsetD8Async", unsafe {
            result::memset_d8_async(address, value, bytes, stream.handle)
        })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // A lost device may never answer; the process's end releases it.
        if self.is_lost() {
            return;
        }
        // SAFETY: retained once in `new`.
        if let Err(error) = unsafe { result::primary_ctx::release(self.device.handle) } {
            tracing::warn!(code = ?error.0, "a device's context could not be released");
        }
    }
}

/// A queue of work, ordered within itself and with no other.
#[derive(Debug)]
pub(super) struct RawStream {
    context: Arc<Context>,
    handle: sys::CUstream,
}

// SAFETY: the driver allows any thread to put work on a stream.
unsafe impl Send for RawStream {}
// SAFETY: as above.
unsafe impl Sync for RawStream {}

impl RawStream {
    pub(super) fn new(context: &Arc<Context>) -> Result<Self> {
        context.bind()?;
        let handle = checked(
            "cuStreamCreate",
            result::stream::create(result::stream::StreamKind::NonBlocking),
        )?;
        Ok(Self {
            context: context.clone(),
            handle,
        })
    }

    /// As [`RawStream::new`], of the highest priority.
    pub(super) fn urgent(context: &Arc<Context>) -> Result<Self> {
        context.bind()?;
        let (_, highest) = checked(
            "cuCtxGetStreamPriorityRange",
            result::stream::get_priority_range(),
        )?;
        let handle = checked(
            "cuStreamCreateWithPriority",
            result::stream::create_with_priority(result::stream::StreamKind::NonBlocking, highest),
        )?;
        Ok(Self {
            context: context.clone(),
            handle,
        })
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(super) fn handle(&self) -> sys::CUstream {
        self.handle
    }

    /// Whether what is put on it is recorded in place of being queued.
    pub(super) fn is_capturing(&self) -> Result<bool> {
        self.context.bind()?;
        // SAFETY: the handle lives as long as `self`.
        let status = unsafe { result::stream::is_capturing(self.handle) };
        let status = checked("cuStreamIsCapturing", status)?;
        Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    /// Lets later work of this stream wait, on the device, for what `event` marks.
    pub(super) fn wait_for(&self, event: &RawEvent) -> Result<()> {
        self.context.bind()?;
        // SAFETY: both handles live as long as their owners.
        checked("cuStreamWaitEvent", unsafe {
            result::stream::wait_event(
                self.handle,
                event.handle,
                sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT,
            )
        })
    }
}

impl Drop for RawStream {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: created in `new`; the driver lets queued work end first.
            let _ = unsafe { result::stream::destroy(self.handle) };
        }
    }
}

/// A mark in a stream.
#[derive(Debug)]
pub(super) struct RawEvent {
    context: Arc<Context>,
    handle: sys::CUevent,
}

// SAFETY: events are handles that any thread may use.
unsafe impl Send for RawEvent {}
// SAFETY: as above.
unsafe impl Sync for RawEvent {}

impl RawEvent {
    /// `timed` ones can be subtracted from each other.
    pub(super) fn new(context: &Arc<Context>, timed: bool) -> Result<Self> {
        context.bind()?;
        let flags = if timed {
            sys::CUevent_flags::CU_EVENT_DEFAULT
        } else {
            sys::CUevent_flags::CU_EVENT_DISABLE_TIMING
        };
        let handle = checked("cuEventCreate", result::event::create(flags))?;
        Ok(Self {
            context: context.clone(),
            handle,
        })
    }

    pub(super) fn record(&self, stream: &RawStream) -> Result<()> {
        self.context.bind()?;
        // SAFETY: both handles live as long as their owners.
        checked("cuEventRecord", unsafe {
            result::event::record(self.handle, stream.handle)
        })
    }

    /// Whether the work before the mark has ended; an error of that work comes out here.
    pub(super) fn is_complete(&self) -> Result<bool> {
        self.context.bind()?;
        // SAFETY: the handle lives as long as `self`.
        match unsafe { result::event::query(self.handle) } {
            Err(error) if error.0 == CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            answer => checked("a kernel or copy", answer).map(|()| true),
        }
    }

    /// Milliseconds from this mark to `end`; both must be timed and complete.
    pub(super) fn milliseconds_to(&self, end: &Self) -> Result<f32> {
        self.context.bind()?;
        // SAFETY: both handles live as long as their owners.
        checked("cuEventElapsedTime", unsafe {
            result::event::elapsed(self.handle, end.handle)
        })
    }
}

impl Drop for RawEvent {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: created in `new`; the driver allows it before completion.
            let _ = unsafe { result::event::destroy(self.handle) };
        }
    }
}

/// Page-locked host memory, which copies reach without the driver's waiting.
#[derive(Debug)]
pub(super) struct HostMemory {
    context: Arc<Context>,
    start: *mut c_void,
    bytes: usize,
}

// SAFETY: plain memory; who writes when is decided by `transfer.rs`, which locks it.
unsafe impl Send for HostMemory {}

impl HostMemory {
    pub(super) fn new(context: &Arc<Context>, bytes: usize) -> Result<Self> {
        context.bind()?;
        // SAFETY: every byte is written before it is read; see `transfer.rs`.
        let start = checked("cuMemHostAlloc", unsafe { result::malloc_host(bytes, 0) })?;
        Ok(Self {
            context: context.clone(),
            start,
            bytes,
        })
    }

    pub(super) fn start(&self) -> *mut u8 {
        self.start.cast()
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // When the device is lost a copy may still be under way: the memory is left to it.
        if self.context.bind().is_ok() {
            // SAFETY: made in `new`, and `transfer.rs` waited for every copy.
            let _ = unsafe { result::free_host(self.start) };
        }
    }
}
