//! What all threads of a mesh know: whether it is broken, what has come in on each lane, who has left, and when the
//! watch last looked.

use std::collections::{HashMap, VecDeque};
use std::net::Shutdown;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::frame::Frame;
use super::peer::Peer;
use super::{Options, WINDOW};
use crate::collective::{Error, Loss};

/// Lanes that one peer may open.
const MOST_LANES: usize = 4096;
/// The longest wait without a look at the deadline.
const LOOK: Duration = Duration::from_millis(500);

/// Told when the mesh breaks.
pub(super) type Hook = Box<dyn FnOnce(&Error) + Send>;

/// How long a wait may take.
#[derive(Debug, Clone, Copy)]
pub(super) enum Patience {
    Until(Instant),
    /// As long as the mesh is whole.
    WhileWhole,
}

impl Patience {
    /// When whoever waits looks next.
    fn look(self) -> Instant {
        let next = Instant::now() + LOOK;
        match self {
            Self::Until(deadline) => deadline.min(next),
            Self::WhileWhole => next,
        }
    }

    fn is_over(self) -> bool {
        matches!(self, Self::Until(deadline) if Instant::now() >= deadline)
    }
}

/// What all threads of a mesh know.
pub(super) struct Shared {
    pub(super) rank: usize,
    pub(super) generation: u64,
    pub(super) options: Options,
    /// By rank; none at this rank's own place.
    peers: Vec<Option<Peer>>,
    begun: Instant,
    /// When the watch last looked, in milliseconds from the beginning.
    looked: AtomicU64,
    /// When the watch last found that this process had stood still for long; 0: never.
    stood_still: AtomicU64,
    is_broken: AtomicBool,
    /// Whether what has not gone out yet need not go out any more.
    is_cut: AtomicBool,
    /// How many calls of this rank wait for others.
    pub(super) waiting: AtomicUsize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    broken: Option<Error>,
    hooks: Vec<Hook>,
    inboxes: HashMap<(usize, u64), Inbox>,
    is_closed: bool,
    /// Ranks that left, and of those whose connection has ended.
    left: Vec<usize>,
    ended: Vec<usize>,
}

#[derive(Default)]
struct Inbox {
    frames: VecDeque<Vec<u8>>,
    /// Frames taken out since the sender was last told.
    taken: u32,
}

impl State {
    fn check(&self) -> Result<(), Error> {
        match &self.broken {
            Some(error) => Err(error.clone()),
            None if self.is_closed => Err(Error::Closed),
            None => Ok(()),
        }
    }
}

impl Shared {
    pub(super) fn new(rank: usize, generation: u64, options: Options, peers: Vec<Option<Peer>>) -> Self {
        Self {
            rank,
            generation,
            options,
            peers,
            begun: Instant::now(),
            looked: AtomicU64::new(0),
            stood_still: AtomicU64::new(0),
            is_broken: AtomicBool::new(false),
            is_cut: AtomicBool::new(false),
            waiting: AtomicUsize::new(0),
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    pub(super) fn size(&self) -> usize {
        self.peers.len()
    }

    pub(super) fn peer(&self, rank: usize) -> Option<&Peer> {
        self.peers.get(rank)?.as_ref()
    }

    fn others(&self) -> impl Iterator<Item = (usize, &Peer)> {
        let peers = self.peers.iter().enumerate();
        peers.filter_map(|(rank, peer)| Some((rank, peer.as_ref()?)))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it is held but on a lack of memory.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Milliseconds since the mesh was formed.
    pub(super) fn now(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    pub(super) fn is_broken(&self) -> bool {
        self.is_broken.load(Ordering::Acquire)
    }

    /// Whether a write that does not get on is to be given up soon.
    pub(super) fn is_ending(&self) -> bool {
        self.is_broken() || self.is_cut.load(Ordering::Acquire)
    }

    pub(super) fn is_closed(&self) -> bool {
        self.state().is_closed
    }

    pub(super) fn has_left(&self, rank: usize) -> bool {
        self.state().left.contains(&rank)
    }

    pub(super) fn check(&self) -> Result<(), Error> {
        self.state().check()
    }

    pub(super) fn on_break(&self, hook: Hook) {
        let mut state = self.state();
        let Some(error) = state.broken.clone() else {
            state.hooks.push(hook);
            return;
        };
        drop(state);
        hook(&error);
    }

    /// The error for a rank that is gone.
    pub(super) fn lost(&self, rank: usize, how: Loss) -> Error {
        let address = self.peer(rank).map_or("", |peer| peer.address.as_str());
        Error::RankLost {
            rank,
            address: address.to_owned(),
            how,
        }
    }

    /// Breaks the mesh, unless it is broken: the first reason stands.
    pub(super) fn give_up(&self, error: Error) {
        let mut state = self.state();
        if state.broken.is_some() || state.is_closed {
            return;
        }
        tracing::warn!(rank = self.rank, %error, "the gang is broken");
        state.broken = Some(error.clone());
        let hooks = std::mem::take(&mut state.hooks);
        drop(state);
        let (rank, how) = match &error {
            Error::RankLost { rank, how, .. } => (*rank, how.clone()),
            own => (
                self.rank,
                Loss::Aborted {
                    reason: own.to_string(),
                },
            ),
        };
        let farewell = Frame::broken(rank, &how);
        for (_, peer) in self.others() {
            peer.end_with(farewell.clone());
        }
        self.is_broken.store(true, Ordering::Release);
        self.changed.notify_all();
        for (_, peer) in self.others() {
            peer.wake();
        }
        for hook in hooks {
            hook(&error);
        }
    }

    /// A connection that ended or broke, or on which nonsense came.
    pub(super) fn connection_lost(&self, rank: usize, how: Loss) {
        let mut state = self.state();
        state.ended.push(rank);
        self.changed.notify_all();
        if state.is_closed || state.left.contains(&rank) {
            return;
        }
        drop(state);
        self.give_up(self.absence().unwrap_or_else(|| self.lost(rank, how)));
    }

    /// That this process stood still, if it did: then it was given up, and a broken connection is no peer's fault.
    fn absence(&self) -> Option<Error> {
        let silence = u64::try_from(self.options.silence.as_millis()).unwrap_or(u64::MAX);
        let now = self.now();
        let since = now.saturating_sub(self.looked.load(Ordering::Acquire));
        let before = self.stood_still.load(Ordering::Acquire);
        let just_before = before > 0 && now.saturating_sub(before) < 2 * silence;
        (since > silence / 2 || just_before).then(|| Error::Away {
            absence: Duration::from_millis(since.max(silence / 2)),
        })
    }

    /// Looks for silent ranks; called again and again, at least ten times in [`Options::silence`].
    pub(super) fn look(&self) {
        let silence = u64::try_from(self.options.silence.as_millis()).unwrap_or(u64::MAX);
        let now = self.now();
        let gap = now.saturating_sub(self.looked.load(Ordering::Acquire));
        if gap > silence {
            self.give_up(Error::Away {
                absence: Duration::from_millis(gap),
            });
        }
        if gap > silence / 2 {
            // What came meanwhile has not been read yet: nobody was silent.
            self.stood_still.store(now.max(1), Ordering::Release);
            for (_, peer) in self.others() {
                peer.heard.store(now, Ordering::Release);
            }
        }
        self.looked.store(now, Ordering::Release);
        let state = self.state();
        let silent = self.others().find_map(|(rank, peer)| {
            let heard = now.saturating_sub(peer.heard.load(Ordering::Acquire));
            (heard > silence && !state.left.contains(&rank)).then_some((rank, heard))
        });
        drop(state);
        if let Some((rank, heard)) = silent {
            let silence = Duration::from_millis(heard);
            self.give_up(self.lost(rank, Loss::Silent { silence }));
        }
    }

    /// A rank that says that it leaves.
    pub(super) fn leaves(&self, rank: usize) {
        self.state().left.push(rank);
        self.changed.notify_all();
        if let Some(peer) = self.peer(rank) {
            peer.close(None);
        }
    }

    /// What `from` sent on a lane.
    pub(super) fn came(&self, from: usize, lane: u64, bytes: Vec<u8>) -> Result<(), String> {
        let mut state = self.state();
        let is_known = state.inboxes.contains_key(&(from, lane));
        if !is_known && state.inboxes.keys().filter(|key| key.0 == from).count() >= MOST_LANES {
            return Err(format!("it opens more than {MOST_LANES} lanes"));
        }
        let inbox = state.inboxes.entry((from, lane)).or_default();
        if inbox.frames.len() >= WINDOW as usize {
            return Err(format!("more than {WINDOW} frames wait on a lane"));
        }
        inbox.frames.push_back(bytes);
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    pub(super) fn send(&self, to: usize, lane: u64, bytes: Vec<u8>, patience: Patience) -> Result<(), Error> {
        let begun = Instant::now();
        loop {
            let is_left = {
                let state = self.state();
                state.check()?;
                state.left.contains(&to)
            };
            let Some(peer) = self.peer(to).filter(|_| !is_left) else {
                return Err(self.lost(to, Loss::Left));
            };
            if peer.wait_for_credit(lane, patience.look()) {
                peer.queue_data(lane, bytes);
                return Ok(());
            }
            if patience.is_over() {
                return Err(Error::Deadline {
                    operation: "send",
                    waited: begun.elapsed(),
                });
            }
        }
    }

    pub(super) fn receive(
        &self,
        from: usize,
        lane: u64,
        operation: &'static str,
        patience: Patience,
    ) -> Result<Vec<u8>, Error> {
        let begun = Instant::now();
        let mut state = self.state();
        loop {
            state.check()?;
            if let Some(inbox) = state.inboxes.get_mut(&(from, lane))
                && let Some(bytes) = inbox.frames.pop_front()
            {
                inbox.taken += 1;
                let credit = (inbox.taken >= WINDOW / 4).then(|| std::mem::take(&mut inbox.taken));
                drop(state);
                if let (Some(credit), Some(peer)) = (credit, self.peer(from)) {
                    peer.queue(Frame::credit(lane, credit));
                }
                return Ok(bytes);
            }
            if state.left.contains(&from) {
                return Err(self.lost(from, Loss::Left));
            }
            if patience.is_over() {
                return Err(Error::Deadline {
                    operation,
                    waited: begun.elapsed(),
                });
            }
            let pause = patience.look().saturating_duration_since(Instant::now());
            state = self
                .changed
                .wait_timeout(state, pause)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Says goodbye to every other rank and waits until each connection has ended.
    pub(super) fn close(&self) -> Result<(), Error> {
        let mut state = self.state();
        if state.is_closed {
            return Ok(());
        }
        if let Some(error) = &state.broken {
            return Err(error.clone());
        }
        state.is_closed = true;
        for (_, peer) in self.others() {
            peer.close(Some(Frame::bare(super::frame::Kind::Close)));
        }
        let deadline = Instant::now() + self.options.silence;
        while self.others().any(|(rank, _)| !state.ended.contains(&rank)) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state = self
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        Ok(())
    }

    /// Lets the writers end, in whatever state the other ranks are.
    pub(super) fn cut(&self) {
        self.is_cut.store(true, Ordering::Release);
        for (_, peer) in self.others() {
            peer.close(None);
        }
    }

    /// Ends every connection.
    pub(super) fn end(&self) {
        for (_, peer) in self.others() {
            let _ = peer.stream.shutdown(Shutdown::Both);
        }
    }
}
