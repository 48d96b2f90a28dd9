//! Streams and waiting with deadlines: nothing in this program waits for a device without one.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::driver::{Context, RawEvent, RawStream};
use super::error::{Error, Result};

/// How long a wait looks again without sleeping: most of what is waited for ends sooner.
const SPIN: Duration = Duration::from_micros(200);
/// The longest sleep between two looks.
const LONGEST_SLEEP: Duration = Duration::from_millis(1);

/// Kernels between two marks of a stream's own, and such marks that the device may still have before it. The driver's
/// queue holds about 1024 kernels, and whoever finds it full waits there without a deadline.
const KERNELS_A_MARK: usize = 128;
const MARKS_AHEAD: usize = 6;

/// A queue of work on one device.
#[derive(Debug)]
pub struct Stream {
    raw: RawStream,
    /// How long a kernel waits for those queued long before it.
    deadline: Duration,
    ahead: Mutex<Ahead>,
}

/// What the device has before it.
#[derive(Debug, Default)]
struct Ahead {
    /// Since the last mark.
    kernels: usize,
    marks: VecDeque<Mark>,
}

impl Stream {
    pub(super) fn new(context: &Arc<Context>, deadline: Duration) -> Result<Self> {
        Ok(Self {
            raw: RawStream::new(context)?,
            deadline,
            ahead: Mutex::default(),
        })
    }

    /// As [`Stream::new`], with work that goes before that of others.
    pub(super) fn urgent(context: &Arc<Context>, deadline: Duration) -> Result<Self> {
        Ok(Self {
            raw: RawStream::urgent(context)?,
            deadline,
            ahead: Mutex::default(),
        })
    }

    /// Called before each kernel or replay: waits where the device is so far behind that the driver soon would, which
    /// has no deadline.
    ///
    /// # Errors
    /// When the kernels queued long before fail or do not end; the device is then given up.
    pub(super) fn make_room(&self) -> Result<()> {
        let mut ahead = self.ahead.lock().unwrap_or_else(PoisonError::into_inner);
        if ahead.kernels < KERNELS_A_MARK {
            ahead.kernels += 1;
            return Ok(());
        }
        // What is captured is not queued, and a captured mark is never reached.
        if self.raw.is_capturing()? {
            return Ok(());
        }
        ahead.marks.push_back(self.mark()?);
        ahead.kernels = 1;
        if ahead.marks.len() <= MARKS_AHEAD {
            return Ok(());
        }
        let Some(first) = ahead.marks.pop_front() else {
            return Ok(());
        };
        first.wait(self.deadline, "a kernel queued hundreds before")
    }

    /// How long a kernel waits for those queued long before it.
    pub(super) fn deadline(&self) -> Duration {
        self.deadline
    }

    pub(super) fn raw(&self) -> &RawStream {
        &self.raw
    }

    /// A mark after everything queued so far.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn mark(&self) -> Result<Mark> {
        self.marked(false)
    }

    /// As [`Stream::mark`], for [`Mark::milliseconds_until`].
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn timed_mark(&self) -> Result<Mark> {
        self.marked(true)
    }

    fn marked(&self, timed: bool) -> Result<Mark> {
        let event = RawEvent::new(self.raw.context(), timed)?;
        event.record(&self.raw)?;
        Ok(Mark {
            event,
            context: self.raw.context().clone(),
        })
    }

    /// Lets what is queued from now on begin only after `mark`; the host does not wait.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn after(&self, mark: &Mark) -> Result<()> {
        self.raw.wait_for(&mark.event)
    }

    /// Waits until everything queued so far has ended.
    ///
    /// # Errors
    /// When it fails, or takes longer than `deadline`; the device is then given up.
    pub fn wait(&self, deadline: Duration, operation: &'static str) -> Result<()> {
        self.mark()?.wait(deadline, operation)
    }
}

/// A point in a stream's work.
#[derive(Debug)]
pub struct Mark {
    event: RawEvent,
    context: Arc<Context>,
}

impl Mark {
    /// Whether everything before it has ended. Does not wait.
    ///
    /// # Errors
    /// When that work failed; the device is then given up.
    pub fn is_reached(&self) -> Result<bool> {
        self.event.is_complete().inspect_err(|_| self.context.give_up())
    }

    /// Waits until it is reached.
    ///
    /// # Errors
    /// When the work before it fails, or takes longer than `deadline`; the device is then given up.
    pub fn wait(&self, deadline: Duration, operation: &'static str) -> Result<()> {
        let begun = Instant::now();
        let mut sleep = Duration::from_micros(20);
        while !self.is_reached()? {
            let waited = begun.elapsed();
            if waited > deadline {
                self.context.give_up();
                return Err(Error::Deadline { operation, waited });
            }
            if waited < SPIN {
                std::hint::spin_loop();
            } else {
                std::thread::sleep(sleep);
                sleep = (sleep * 2).min(LONGEST_SLEEP);
            }
        }
        Ok(())
    }

    /// Milliseconds that the device spent between this mark and `end`, both timed and reached.
    ///
    /// # Errors
    /// When one of them is not.
    pub fn milliseconds_until(&self, end: &Self) -> Result<f32> {
        self.event.milliseconds_to(&end.event)
    }
}
