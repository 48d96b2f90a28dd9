//! Says that an attempt is alive while it tells no progress: its pulse beats, or the process moves bytes of files
//! (weights are read, a checkpoint is written), or it waits for other ranks, which may be slower; that they live,
//! and that its wait ends, is their gang's affair. Which of it does not matter; a child that does none of it is hung.

use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::executor::Pulse;
use crate::{Error, Result};

/// How often it looks, and so says so at most.
pub(super) const INTERVAL: Duration = Duration::from_secs(1);
/// Bytes that count as a sign of life. Those that whoever watches over a measurement reads of `/proc` come to
/// less within the shortest time after which an attempt is taken for hung.
const MOVED_BYTES: u64 = 8 << 20;

/// A thread that looks and says; ends with this value.
#[derive(Debug)]
pub(super) struct Alive {
    over: Option<SyncSender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Alive {
    /// Begins to look, every `interval`.
    ///
    /// # Errors
    /// When no thread can be started.
    pub(super) fn watch(
        pulse: Pulse,
        waits: impl Fn() -> bool + Send + 'static,
        interval: Duration,
        say: impl Fn() + Send + 'static,
    ) -> Result<Self> {
        Self::over(interval, move || pulse.beats(), moved_bytes, waits, say)
    }

    fn over(
        interval: Duration,
        beats: impl Fn() -> u64 + Send + 'static,
        moved: impl Fn() -> u64 + Send + 'static,
        waits: impl Fn() -> bool + Send + 'static,
        say: impl Fn() + Send + 'static,
    ) -> Result<Self> {
        let (over, ended) = sync_channel::<()>(1);
        let look = move || {
            let mut before = (beats(), moved());
            while ended.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
                let now = (beats(), moved());
                if now.0 != before.0 || now.1.saturating_sub(before.1) >= MOVED_BYTES || waits() {
                    before = now;
                    say();
                }
            }
        };
        let thread = std::thread::Builder::new()
            .name("alive".to_owned())
            .spawn(look)
            .map_err(|error| Error::Child {
                reason: format!("cannot start the thread that tells it is alive: {error}"),
            })?;
        Ok(Self {
            over: Some(over),
            thread: Some(thread),
        })
    }
}

impl Drop for Alive {
    fn drop(&mut self) {
        drop(self.over.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Bytes that this process has read and written by `read` and `write`, which sockets' `recv` and `send` are not; always 0
/// where the system keeps no such account.
fn moved_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/io").unwrap_or_default();
    let of = |field: &str| {
        text.lines()
            .find_map(|line| line.strip_prefix(field)?.trim().parse::<u64>().ok())
            .unwrap_or(0)
    };
    of("rchar:").saturating_add(of("wchar:"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::io::Write;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    use std::sync::mpsc::channel;

    use super::*;

    const SOON: Duration = Duration::from_millis(5);
    const PATIENCE: Duration = Duration::from_secs(60);

    #[test]
    fn an_attempt_that_computes_moves_bytes_or_waits_for_ranks_is_said_to_be_alive_and_no_other() {
        let (beats, moved) = (Arc::new(AtomicU64::new(7)), Arc::new(AtomicU64::new(7)));
        let waits = Arc::new(AtomicBool::new(false));
        let (looked, looks) = channel();
        let (said, sayings) = channel();
        let (seen, counted, asked) = (Arc::clone(&beats), Arc::clone(&moved), Arc::clone(&waits));
        let alive = Alive::over(
            SOON,
            move || {
                let _ = looked.send(());
                seen.load(Ordering::SeqCst)
            },
            move || counted.load(Ordering::SeqCst),
            move || asked.load(Ordering::SeqCst),
            move || said.send(()).unwrap(),
        )
        .unwrap();
        for _ in 0..5 {
            looks.recv_timeout(PATIENCE).unwrap();
        }
        assert!(
            sayings.try_recv().is_err(),
            "it looked five times and nothing was done"
        );
        beats.fetch_add(1, Ordering::SeqCst);
        sayings.recv_timeout(PATIENCE).unwrap();
        moved.fetch_add(MOVED_BYTES, Ordering::SeqCst);
        sayings.recv_timeout(PATIENCE).unwrap();
        waits.store(true, Ordering::SeqCst);
        for _ in 0..3 {
            sayings.recv_timeout(PATIENCE).unwrap();
        }
        drop(alive);
        assert!(sayings.recv().is_err(), "it ends with its attempt");
    }

    #[test]
    fn what_a_process_writes_is_counted() {
        if std::fs::read_to_string("/proc/self/io").is_err() {
            // The system keeps no such account.
            return;
        }
        let before = moved_bytes();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&vec![1; 1 << 20]).unwrap();
        assert!(moved_bytes() >= before + (1 << 20));
    }
}
