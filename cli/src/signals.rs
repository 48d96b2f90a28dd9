//! What asks this process to end.
//!
//! The streams are made once and held: the first one made takes a signal's default away for good, and a signal that
//! comes while nobody has a stream would be lost.

use tokio::signal::unix::{Signal, SignalKind, signal};

/// Interrupt (Ctrl-C), termination and hang-up. One that came before it was waited for is not lost.
pub(crate) struct Signals {
    interrupt: Signal,
    terminate: Signal,
    hang_up: Signal,
}

impl Signals {
    pub(crate) fn new() -> anyhow::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hang_up: signal(SignalKind::hangup())?,
        })
    }

    /// Waits until the process is asked to end, for the first time or once more.
    pub(crate) async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
            _ = self.hang_up.recv() => {}
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::time::Duration;

    use super::*;

    fn hang_up() {
        // SAFETY: raise touches no memory; a stream has taken the signal's default away.
        unsafe { libc::raise(libc::SIGHUP) };
    }

    #[tokio::test]
    async fn a_signal_that_comes_while_nobody_waits_is_not_lost() {
        let mut signals = Signals::new().unwrap();
        hang_up();
        tokio::time::sleep(Duration::from_millis(50)).await;
        let next = tokio::time::timeout(Duration::from_secs(60), signals.next());
        next.await.unwrap();
        let again = tokio::time::timeout(Duration::from_millis(50), signals.next());
        assert!(again.await.is_err(), "one signal asks once");
        hang_up();
        signals.next().await;
    }
}
