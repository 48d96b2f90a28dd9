//! One connection: what is queued for it, and the two threads that read and write it.

use std::collections::{HashMap, VecDeque};
use std::io::{BufReader, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::WINDOW;
use super::frame::{self, Frame, Kind, Unreadable};
use super::shared::Shared;
use crate::collective::{Error, Loss};

/// How long one write may block before its thread looks whether the mesh is broken.
const LOOK: Duration = Duration::from_millis(100);
/// How long a broken mesh may take to say so to a rank that does not read.
const LAST_WORDS: Duration = Duration::from_millis(500);
/// Payloads below this go out in one piece with their header.
const SMALL: usize = 4096;

/// One other rank, as this one knows it.
pub(super) struct Peer {
    pub(super) address: String,
    pub(super) stream: TcpStream,
    /// When bytes last came, in milliseconds from the mesh's beginning.
    pub(super) heard: AtomicU64,
    outbox: Mutex<Outbox>,
    changed: Condvar,
}

/// What is to go out.
#[derive(Default)]
struct Outbox {
    queue: VecDeque<Frame>,
    /// Frames that may still be sent on each lane on which any was.
    credits: HashMap<u64, u32>,
    end: End,
}

/// How a connection is to end.
#[derive(Default)]
enum End {
    /// Not yet.
    #[default]
    Open,
    /// After what is queued, and this.
    After(Option<Frame>),
    /// Now, with this.
    Now(Frame),
    /// The writer has ended it.
    Over,
}

/// What the writer does next.
enum Next {
    Write(Frame),
    Beat,
    Last(Option<Frame>),
}

impl Peer {
    pub(super) fn new(address: String, stream: TcpStream) -> Self {
        Self {
            address,
            stream,
            heard: AtomicU64::new(0),
            outbox: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    fn outbox(&self) -> MutexGuard<'_, Outbox> {
        self.outbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a frame that needs no credit.
    pub(super) fn queue(&self, frame: Frame) {
        self.outbox().queue.push_back(frame);
        self.changed.notify_all();
    }

    /// Whether a frame may go on `lane` before `until`; it is then paid for.
    pub(super) fn wait_for_credit(&self, lane: u64, until: Instant) -> bool {
        let mut outbox = self.outbox();
        loop {
            let credit = outbox.credits.entry(lane).or_insert(WINDOW);
            if let Some(left) = credit.checked_sub(1) {
                *credit = left;
                return true;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || !matches!(outbox.end, End::Open) {
                return false;
            }
            outbox = self
                .changed
                .wait_timeout(outbox, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    pub(super) fn queue_data(&self, lane: u64, payload: Vec<u8>) {
        self.queue(Frame {
            kind: Kind::Data,
            lane,
            payload,
        });
    }

    /// More frames may go on `lane`: not more than ever could.
    fn credit(&self, lane: u64, frames: u32) -> Result<(), String> {
        let mut outbox = self.outbox();
        let credit = outbox.credits.get_mut(&lane);
        let more = credit
            .as_ref()
            .and_then(|credit| credit.checked_add(frames))
            .filter(|&more| more <= WINDOW);
        let (Some(credit), Some(more)) = (credit, more) else {
            return Err(format!("it gives credit for {frames} frames that it did not get"));
        };
        *credit = more;
        self.changed.notify_all();
        Ok(())
    }

    /// Ends the connection after what is queued, and `last`.
    pub(super) fn close(&self, last: Option<Frame>) {
        let mut outbox = self.outbox();
        if matches!(outbox.end, End::Open) {
            outbox.end = End::After(last);
        }
        self.changed.notify_all();
    }

    /// Ends the connection with `last`, whatever is queued.
    pub(super) fn end_with(&self, last: Frame) {
        let mut outbox = self.outbox();
        if !matches!(outbox.end, End::Over) {
            outbox.queue.clear();
            outbox.end = End::Now(last);
        }
        self.changed.notify_all();
    }

    /// Lets whoever waits look again.
    pub(super) fn wake(&self) {
        drop(self.outbox());
        self.changed.notify_all();
    }

    /// What the writer does next, after at most `beat`.
    fn next(&self, beat: Duration) -> Next {
        let mut outbox = self.outbox();
        let until = Instant::now() + beat;
        loop {
            if let Some(frame) = outbox.queue.pop_front() {
                return Next::Write(frame);
            }
            if !matches!(outbox.end, End::Open) {
                return match std::mem::replace(&mut outbox.end, End::Over) {
                    End::After(last) => Next::Last(last),
                    End::Now(last) => Next::Last(Some(last)),
                    End::Open | End::Over => Next::Last(None),
                };
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Next::Beat;
            }
            outbox = self
                .changed
                .wait_timeout(outbox, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

/// Writes to rank `to` until the connection ends. Runs in a thread of its own.
pub(super) fn write(shared: &Shared, to: usize) {
    let Some(peer) = shared.peer(to) else {
        return;
    };
    let beat = shared.options.silence / 5;
    let mut sequence = 0;
    let mut send = |frame: &Frame| -> std::io::Result<()> {
        let header = frame.header(sequence, shared.generation);
        sequence += 1;
        if frame.payload.len() < SMALL {
            return write_all(shared, peer, &[header.as_slice(), &frame.payload].concat());
        }
        write_all(shared, peer, &header)?;
        write_all(shared, peer, &frame.payload)
    };
    if let Err(error) = peer.stream.set_write_timeout(Some(LOOK)) {
        tracing::warn!(%error, "a connection's patience cannot be set");
    }
    let result = loop {
        let written = match peer.next(beat) {
            Next::Write(frame) => send(&frame),
            Next::Beat => send(&Frame::bare(Kind::Beat)),
            Next::Last(last) => break last.as_ref().map_or(Ok(()), &mut send),
        };
        if written.is_err() {
            break written;
        }
    };
    let Err(error) = result else {
        // The other side reads to the end, and then ends its own.
        let _ = peer.stream.shutdown(Shutdown::Write);
        return;
    };
    // What came before may say whose fault it is: the reader gets to the end of that, and says what it was.
    tracing::debug!(rank = to, %error, "a connection cannot be written any more");
    let _ = peer.stream.shutdown(Shutdown::Both);
}

/// Writes all of `bytes`; gives up when the mesh has been ending for a while.
fn write_all(shared: &Shared, peer: &Peer, mut bytes: &[u8]) -> std::io::Result<()> {
    let mut ending: Option<Instant> = None;
    while !bytes.is_empty() {
        match (&peer.stream).write(bytes) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(count) => bytes = bytes.get(count..).unwrap_or_default(),
            Err(error) => match error.kind() {
                ErrorKind::Interrupted | ErrorKind::WouldBlock | ErrorKind::TimedOut => {}
                _ => return Err(error),
            },
        }
        if shared.is_ending() && ending.get_or_insert_with(Instant::now).elapsed() > LAST_WORDS {
            return Err(ErrorKind::TimedOut.into());
        }
    }
    Ok(())
}

/// Notes when bytes come.
struct Heard<'a> {
    shared: &'a Shared,
    peer: &'a Peer,
}

impl Read for Heard<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        loop {
            match (&self.peer.stream).read(buffer) {
                // A rank that is silent is the watch's affair.
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                result => {
                    self.peer.heard.store(self.shared.now(), Ordering::Release);
                    return result;
                }
            }
        }
    }
}

/// Reads what rank `from` sends until the connection ends. Runs in a thread of its own.
pub(super) fn read(shared: &Shared, from: usize) {
    let Some(peer) = shared.peer(from) else {
        return;
    };
    if let Err(error) = peer.stream.set_read_timeout(None) {
        tracing::warn!(%error, "a connection's patience cannot be set");
    }
    let mut source = BufReader::with_capacity(64 << 10, Heard { shared, peer });
    let mut sequence = 0;
    let how = loop {
        let frame = match frame::read(&mut source, sequence, shared.generation) {
            Ok(Some(frame)) => frame,
            Ok(None) => {
                break Loss::Disconnected {
                    reason: "it was closed at the other end".to_owned(),
                };
            }
            Err(Unreadable::Broken(reason)) => break Loss::Disconnected { reason },
            Err(Unreadable::Damaged(reason)) => break Loss::Damaged { reason },
        };
        sequence += 1;
        if let Err(reason) = take_in(shared, peer, from, frame) {
            break Loss::Damaged { reason };
        }
    };
    shared.connection_lost(from, how);
}

/// Does what a frame says.
fn take_in(shared: &Shared, peer: &Peer, from: usize, frame: Frame) -> Result<(), String> {
    match frame.kind {
        Kind::Beat => Ok(()),
        Kind::Data => shared.came(from, frame.lane, frame.payload),
        Kind::Credit => {
            let frames = frame.credited().ok_or("credit for no number of frames")?;
            peer.credit(frame.lane, frames)
        }
        Kind::Close => {
            shared.leaves(from);
            Ok(())
        }
        Kind::Broken => {
            let (rank, how) = frame.loss().ok_or("a loss that cannot be read")?;
            if rank >= shared.size() {
                return Err(format!("it lost rank {rank}, which there is not"));
            }
            shared.give_up(if rank == shared.rank {
                Error::GivenUp { how }
            } else {
                shared.lost(rank, how)
            });
            Ok(())
        }
    }
}
