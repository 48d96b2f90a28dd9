//! Recordings: work that is queued once for the device to keep, and then again and again at the cost of one launch.
//!
//! What a thread queues while it records goes to a stream of its own and runs only when it is replayed. Memory that
//! it asks for meanwhile is the recording's: the same at every replay, and nobody else's while the recording lives.
//! Copies from and to the host, and waits, are refused meanwhile, since a replay would not do them again.

use std::cell::RefCell;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use cudarc::driver::sys;

use super::device::CudaDevice;
use super::driver::{Context, check};
use super::error::{Error, Result};
use super::memory::Reserve;
use super::stream::Stream;

thread_local! {
    /// Of which recorder this thread's work is being recorded, and where its memory comes from.
    static RECORDING: RefCell<Option<(u64, Arc<Reserve>)>> = const { RefCell::new(None) };
}

/// Where the work of one device goes: its compute stream, or a recording.
#[derive(Debug)]
pub(super) struct Recorder {
    /// Which device's this is, among all of the process.
    id: u64,
    context: Arc<Context>,
    compute: Arc<Stream>,
    recording: OnceLock<Stream>,
    /// Held by who records.
    busy: Mutex<()>,
}

/// A thread's recording, and the capture of the stream it goes to: both end whatever happens.
struct Recording<'a> {
    stream: &'a Stream,
    has_ended: bool,
}

impl<'a> Recording<'a> {
    fn begin(recorder: &Recorder, stream: &'a Stream, reserve: Arc<Reserve>) -> Result<Self> {
        // SAFETY: the stream is live, and only this thread uses it until the capture ends.
        check("cuStreamBeginCapture", unsafe {
            sys::cuStreamBeginCapture_v2(
                stream.raw().handle(),
                // Memory may be taken from the device meanwhile, by this thread and others.
                sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED,
            )
        })?;
        RECORDING.set(Some((recorder.id, reserve)));
        Ok(Self {
            stream,
            has_ended: false,
        })
    }

    fn end(mut self) -> Result<Captured> {
        self.has_ended = true;
        end_capture(self.stream)
    }
}

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        RECORDING.set(None);
        if !self.has_ended {
            // Its work has panicked, and whatever was captured goes.
            let _ = end_capture(self.stream);
        }
    }
}

/// Of a stream that captures.
fn end_capture(stream: &Stream) -> Result<Captured> {
    let mut graph = ptr::null_mut();
    // SAFETY: the capture was begun by this thread; the driver writes the graph's handle, or null when it is void.
    let ended = check("cuStreamEndCapture", unsafe {
        sys::cuStreamEndCapture(stream.raw().handle(), &raw mut graph)
    });
    let graph = Captured(graph);
    ended.map(|()| graph)
}

impl Recorder {
    pub(super) fn new(context: &Arc<Context>, compute: &Arc<Stream>) -> Self {
        static IDS: AtomicU64 = AtomicU64::new(0);
        Self {
            id: IDS.fetch_add(1, Ordering::Relaxed),
            context: context.clone(),
            compute: compute.clone(),
            recording: OnceLock::new(),
            busy: Mutex::default(),
        }
    }

    /// The compute stream, whoever records.
    pub(super) fn compute(&self) -> &Arc<Stream> {
        &self.compute
    }

    /// Where this thread's work goes.
    pub(super) fn stream(&self) -> &Stream {
        match self.recording.get() {
            Some(stream) if self.is_recording() => stream,
            _ => &self.compute,
        }
    }

    /// Whether this thread records.
    pub(super) fn is_recording(&self) -> bool {
        RECORDING.with_borrow(|recording| matches!(recording, Some((id, _)) if *id == self.id))
    }

    /// Where this thread's memory comes from while it records.
    pub(super) fn reserve(&self) -> Option<Arc<Reserve>> {
        RECORDING.with_borrow(|recording| match recording {
            Some((id, reserve)) if *id == self.id => Some(reserve.clone()),
            _ => None,
        })
    }

    /// An error while this thread records.
    pub(super) fn expect_none(&self, operation: &'static str) -> Result<()> {
        if self.is_recording() {
            return Err(Error::Recording { operation });
        }
        Ok(())
    }

    fn stream_to_record(&self) -> Result<&Stream> {
        if let Some(stream) = self.recording.get() {
            return Ok(stream);
        }
        let fresh = Stream::new(&self.context, self.compute.deadline())?;
        Ok(self.recording.get_or_init(|| fresh))
    }
}

/// Recorded work and the memory that it keeps.
#[derive(Debug)]
pub struct Graph {
    context: Arc<Context>,
    executable: sys::CUgraphExec,
    /// Free again, for what is queued later, when this and every matrix that the work made are gone.
    _reserve: Arc<Reserve>,
}

// SAFETY: a handle that any thread may use; launches go through one stream, which orders them.
unsafe impl Send for Graph {}
// SAFETY: as above; nothing of it changes.
unsafe impl Sync for Graph {}

impl CudaDevice {
    /// Records what `work` queues, without running it, and gives what it gave: matrices that hold something once the
    /// recording was replayed. Everything that `work` reads and writes must be there as long as it is replayed.
    ///
    /// # Errors
    /// Those of `work`; also when it waits, copies from or to the host, or records; or when the driver refuses.
    pub fn record<T, E: From<Error>>(
        &self,
        work: impl FnOnce() -> std::result::Result<T, E>,
    ) -> std::result::Result<(Graph, T), E> {
        let recorder = self.recorder();
        recorder.expect_none("a recording")?;
        let _alone = recorder.busy.lock().unwrap_or_else(PoisonError::into_inner);
        let stream = recorder.stream_to_record()?;
        let reserve = Arc::new(Reserve::new(self.pool()));
        recorder.context.bind()?;
        let recording = Recording::begin(recorder, stream, reserve.clone())?;
        let result = work();
        let graph = recording.end();
        let (result, graph) = (result?, graph?);
        Ok((self.instantiate(&graph, reserve)?, result))
    }

    fn instantiate(&self, graph: &Captured, reserve: Arc<Reserve>) -> Result<Graph> {
        let mut executable = ptr::null_mut();
        // SAFETY: a graph that was just captured; the driver writes the handle of its executable form.
        check("cuGraphInstantiate", unsafe {
            sys::cuGraphInstantiateWithFlags(&raw mut executable, graph.0, 0)
        })?;
        Ok(Graph {
            context: self.recorder().context.clone(),
            executable,
            _reserve: reserve,
        })
    }

    /// Queues `graph`'s work once more on the compute stream.
    ///
    /// # Errors
    /// While this thread records, or when the driver refuses.
    pub fn replay(&self, graph: &Graph) -> Result<()> {
        self.recorder().expect_none("a replay")?;
        let stream = self.recorder().compute();
        graph.context.bind()?;
        stream.make_room()?;
        // SAFETY: the executable is live, and what it reads and writes is kept by its reserve and its owner.
        check("cuGraphLaunch", unsafe {
            sys::cuGraphLaunch(graph.executable, stream.raw().handle())
        })
    }
}

/// A graph that is not yet executable.
struct Captured(sys::CUgraph);

impl Drop for Captured {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: made by the capture, and its executable form does not need it.
            let _ = unsafe { sys::cuGraphDestroy(self.0) };
        }
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: made in `instantiate`; the driver lets a launch that is under way end first.
            let _ = unsafe { sys::cuGraphExecDestroy(self.executable) };
        }
    }
}
