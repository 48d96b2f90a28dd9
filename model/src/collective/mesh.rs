//! Connections between all ranks of a gang, and what makes a gang one: it lives or it breaks as a whole.
//!
//! A rank whose process ends, that stands still or is cut off, breaks the mesh within [`Options::silence`]: every wait
//! of every rank then ends with an error that names it, and whoever registered by [`Mesh::on_break`] is told. A rank
//! that has done its work leaves by [`Mesh::close`] and breaks nothing. A rank that itself stood still says so
//! ([`Error::Away`]) and does not blame those that went on without it.
//!
//! Bytes go on *lanes*, each in order and apart from the others. A lane holds a few frames that nobody has asked for
//! yet, then its sender waits: memory is bounded, and a reader never stands still, so that beats come through.
//!
//! Ranks that wait for each other in [`Mesh::exchange`] wait as long as the mesh is whole: one of them may work alone for
//! an hour, as where it stores what all have made. Such a wait ends all the same. A rank whose process ends or stands
//! still breaks the mesh. One whose process lives and does nothing is missed by whoever runs it, and is killed, which
//! breaks the mesh; those that wait for it count as alive meanwhile ([`Mesh::is_waiting`]) and mask nothing, for it has to
//! show by itself that it works. That all wait for each other cannot be: each sends before it waits, and what one
//! exchange sends finds room whether or not anybody receives. A rank that is elsewhere, in a call on another lane, is let
//! go by that call's deadline, and so is one whose own device hangs beside a call that waits.
//!
//! Rooms: [`frame`] is what goes over a connection, [`hello`] how ranks find each other, [`peer`] one connection and
//! its two threads, [`shared`] what all threads of a mesh know.

mod frame;
mod hello;
mod peer;
mod shared;
#[cfg(test)]
pub(super) mod tests;

use std::fmt::{self, Debug};
use std::net::TcpListener;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::{Error, Loss};
use hello::Identity;
use peer::Peer;
use shared::{Patience, Shared};

/// The most bytes of one frame on a lane.
pub(super) const PIECE: usize = frame::LARGEST;
/// Frames that may wait on a lane; what is exchanged must fit into half of it.
const WINDOW: u32 = 16;
/// The most bytes that [`Mesh::exchange`] takes from each rank.
pub const EXCHANGED: usize = PIECE * 4;
/// The lane of [`Mesh::exchange`].
const EXCHANGE: u64 = 0;

/// How patient a mesh is. The defaults suit a cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// How long the ranks may take to come together.
    pub forming: Duration,
    /// How long a rank may be silent before it counts as lost. Ranks that have nothing to say beat five times as
    /// often.
    pub silence: Duration,
    /// How long one call of a communicator may take, from the moment on which it could begin; it may have to wait for
    /// a slower rank. Longer than a rank may do nothing before whoever watches it ends it: that rank is to blame, and
    /// not those that wait for it.
    pub call: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            forming: Duration::from_secs(120),
            silence: Duration::from_secs(5),
            call: Duration::from_secs(900),
        }
    }
}

/// Which rank of which gang this is, as a release tells it.
#[derive(Debug)]
pub struct Place {
    /// This rank's number, from 0.
    pub rank: usize,
    /// Where the others reach this one.
    pub listener: TcpListener,
    /// Where each rank is reached, this one too: `host:port`.
    pub addresses: Vec<String>,
    /// What only this gang's ranks know.
    pub token: String,
    /// Counts the gangs of a task: ranks of another one are turned away.
    pub generation: u64,
}

/// One rank's connections to all others.
pub struct Mesh {
    shared: Arc<Shared>,
    threads: Mutex<Threads>,
    /// Held by the exchange under way.
    exchanging: Mutex<()>,
    /// Ends the watch when it is dropped.
    watch: Mutex<Option<SyncSender<()>>>,
}

/// A wait for other ranks.
pub(super) struct Waiting(Arc<Shared>);

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Debug for Waiting {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Waiting")
    }
}

#[derive(Default)]
struct Threads {
    watch: Vec<JoinHandle<()>>,
    readers: Vec<JoinHandle<()>>,
    writers: Vec<JoinHandle<()>>,
}

impl Mesh {
    /// Finds the other ranks. Returns once this one is connected to each.
    ///
    /// # Errors
    /// [`Error::NotFormed`] names those that did not come in time.
    pub fn form(place: Place, options: Options) -> Result<Self, Error> {
        let size = place.addresses.len();
        let rank = place.rank;
        if rank >= size {
            return Err(Error::Address { rank, size });
        }
        let identity = Identity {
            rank,
            addresses: place.addresses,
            generation: place.generation,
            key: *blake3::hash(place.token.as_bytes()).as_bytes(),
        };
        let streams = hello::form(&identity, &place.listener, options.forming)?;
        drop(place.listener);
        let peers = streams
            .into_iter()
            .zip(&identity.addresses)
            .map(|(stream, address)| stream.map(|stream| Peer::new(address.clone(), stream)))
            .collect();
        let shared = Arc::new(Shared::new(rank, identity.generation, options, peers));
        let (watch, end) = sync_channel(0);
        let mesh = Self {
            shared,
            threads: Mutex::default(),
            exchanging: Mutex::default(),
            watch: Mutex::new(Some(watch)),
        };
        mesh.start(end)?;
        Ok(mesh)
    }

    fn start(&self, end: Receiver<()>) -> Result<(), Error> {
        let mut threads = self.threads();
        let shared = self.shared.clone();
        threads.watch.push(spawn("mesh-watch", move || {
            while end.recv_timeout(shared.options.silence / 10) == Err(RecvTimeoutError::Timeout) {
                shared.look();
            }
        })?);
        for other in (0..self.size()).filter(|&other| other != self.rank()) {
            let shared = self.shared.clone();
            let reader = spawn("mesh-read", move || peer::read(&shared, other))?;
            threads.readers.push(reader);
            let shared = self.shared.clone();
            let writer = spawn("mesh-write", move || peer::write(&shared, other))?;
            threads.writers.push(writer);
        }
        Ok(())
    }

    fn threads(&self) -> MutexGuard<'_, Threads> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// This rank's number, from 0.
    pub fn rank(&self) -> usize {
        self.shared.rank
    }

    /// How many ranks there are.
    pub fn size(&self) -> usize {
        self.shared.size()
    }

    /// How patient this mesh is.
    pub fn options(&self) -> &Options {
        &self.shared.options
    }

    /// Whether this rank waits for what others do, which all live: it does nothing, and nothing is wrong with it. Why
    /// every such wait ends is said above.
    pub fn is_waiting(&self) -> bool {
        self.shared.waiting.load(Ordering::Acquire) > 0 && !self.shared.is_broken()
    }

    /// Counts a wait for others until it is dropped.
    pub(super) fn waiting(&self) -> Waiting {
        self.shared.waiting.fetch_add(1, Ordering::AcqRel);
        Waiting(self.shared.clone())
    }

    /// An error once the mesh is broken.
    ///
    /// # Errors
    /// What broke it.
    pub fn check(&self) -> Result<(), Error> {
        self.shared.check()
    }

    /// Breaks the mesh: every wait of every rank ends.
    pub fn abort(&self) {
        self.shared.give_up(Error::Aborted);
    }

    /// Breaks the mesh for a reason of this rank's own, which the others are told.
    pub(super) fn give_up(&self, error: Error) {
        self.shared.give_up(error);
    }

    /// Calls `hook` once when the mesh breaks, or now if it is broken. It must not wait, nor hold the mesh.
    pub fn on_break(&self, hook: impl FnOnce(&Error) + Send + 'static) {
        self.shared.on_break(Box::new(hook));
    }

    /// Every rank's bytes, in the order of the ranks; every rank must call it, and each waits for the last, however late
    /// that comes.
    ///
    /// # Errors
    /// When the mesh breaks or a rank has left, which breaks it for every rank; when the bytes are more than
    /// [`EXCHANGED`].
    pub fn exchange(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
        if bytes.len() > EXCHANGED {
            return Err(Error::TooLong {
                bytes: bytes.len(),
                most: EXCHANGED,
            });
        }
        let _exchanging = self.exchanging.lock().unwrap_or_else(PoisonError::into_inner);
        let _waiting = self.waiting();
        // A rank that goes without an answer does not do the next thing either: the others must not wait for it.
        self.exchanged(bytes)
            .inspect_err(|error| self.give_up(error.clone()))
    }

    fn exchanged(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
        let send = |to, bytes| self.shared.send(to, EXCHANGE, bytes, Patience::WhileWhole);
        let receive = |from| {
            self.shared
                .receive(from, EXCHANGE, "exchange", Patience::WhileWhole)
        };
        for other in (0..self.size()).filter(|&other| other != self.rank()) {
            send(other, (bytes.len() as u64).to_le_bytes().to_vec())?;
            for piece in bytes.chunks(PIECE) {
                send(other, piece.to_vec())?;
            }
        }
        let mut all = vec![Vec::new(); self.size()];
        for (other, place) in all.iter_mut().enumerate() {
            if other == self.rank() {
                *place = bytes.to_vec();
                continue;
            }
            let head = receive(other)?;
            let length = head.as_slice().try_into().map_or(u64::MAX, u64::from_le_bytes);
            if length > EXCHANGED as u64 {
                return Err(self.nonsense(other, format!("it exchanges {length} bytes")));
            }
            while (place.len() as u64) < length {
                let piece = receive(other)?;
                if piece.is_empty() {
                    // As many of them as it likes would hold this rank for ever.
                    return Err(self.nonsense(other, "a piece of nothing in an exchange".to_owned()));
                }
                place.extend(piece);
            }
            if place.len() as u64 > length {
                return Err(self.nonsense(other, format!("more than the {length} bytes that it exchanges")));
            }
        }
        Ok(all)
    }

    /// Puts a frame of at most [`PIECE`] bytes on a lane to rank `to`; waits while the lane is full.
    pub(super) fn send(&self, to: usize, lane: u64, bytes: Vec<u8>, deadline: Instant) -> Result<(), Error> {
        self.shared.send(to, lane, bytes, Patience::Until(deadline))
    }

    /// The next frame on a lane from rank `from`.
    pub(super) fn receive(
        &self,
        from: usize,
        lane: u64,
        operation: &'static str,
        deadline: Instant,
    ) -> Result<Vec<u8>, Error> {
        let patience = Patience::Until(deadline);
        self.shared.receive(from, lane, operation, patience)
    }

    /// An error if `rank` has left, for whoever still wants something of it.
    pub(super) fn expect_present(&self, rank: usize) -> Result<(), Error> {
        match self.shared.has_left(rank) {
            true => Err(self.shared.lost(rank, Loss::Left)),
            false => Ok(()),
        }
    }

    /// Breaks the mesh because of what `rank` sent.
    pub(super) fn nonsense(&self, rank: usize, reason: String) -> Error {
        let error = self.shared.lost(rank, Loss::Damaged { reason });
        self.shared.give_up(error.clone());
        error
    }

    /// Leaves: this rank's work is done, and nobody counts it as lost. Waits until what was sent has gone out, for
    /// no longer than a rank may be silent. Others that still want something of this rank get [`Loss::Left`].
    ///
    /// # Errors
    /// When the mesh is broken, or breaks meanwhile.
    pub fn close(&self) -> Result<(), Error> {
        let result = self.shared.close();
        self.end();
        result
    }

    /// Ends all threads: the writers by themselves, in at most a second, and then the readers.
    fn end(&self) {
        drop(self.watch.lock().unwrap_or_else(PoisonError::into_inner).take());
        self.shared.cut();
        let threads = std::mem::take(&mut *self.threads());
        join(threads.watch);
        join(threads.writers);
        self.shared.end();
        join(threads.readers);
    }
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, Error> {
    let spawned = std::thread::Builder::new().name(name.to_owned()).spawn(work);
    spawned.map_err(|error| Error::System {
        what: "a thread of the mesh",
        reason: error.to_string(),
    })
}

fn join(threads: Vec<JoinHandle<()>>) {
    for thread in threads {
        // A hook may have let go of the last handle, in one of these threads.
        if thread.thread().id() != std::thread::current().id() && thread.join().is_err() {
            tracing::error!("a thread of the mesh has panicked");
        }
    }
}

impl Drop for Mesh {
    fn drop(&mut self) {
        if !self.shared.is_closed() {
            self.shared.give_up(Error::Aborted);
        }
        self.end();
    }
}

impl Debug for Mesh {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Mesh")
            .field("rank", &self.rank())
            .field("size", &self.size())
            .field("broken", &self.shared.check().err())
            .finish_non_exhaustive()
    }
}
