//! Ranks that work on one model together, and how tensors move between them.
//!
//! A [`Gang`] is every rank of a task; a [`Communicator`] joins some of them. Tensors that move are contiguous and
//! are *given away*: what is under way belongs to its [`InFlight`] until the wait, so nobody writes it meanwhile.
//! A [`MeshGang`] moves them over the connections of a [`mesh`], between CPUs (`tcp`), or between GPUs by NCCL (`nccl`);
//! [`local`] moves them within a process, for tests. [`Operations::gang`](crate::ops::Operations::gang) chooses.
//!
//! The rules for callers: every rank of a communicator makes the same collective calls in the same order, and
//! messages from one rank to another are received in the order in which they were sent. A message may not be gone
//! before its receiver has asked for it, so nobody waits for a send before asking for what the receiver sends;
//! messages of one direction never hold up those of another, nor collective calls.

mod error;
mod host;
pub mod local;
mod members;
pub mod mesh;
mod nccl;
mod over_mesh;
mod tcp;

use std::collections::HashMap;
use std::fmt::{self, Debug};
use std::sync::{Arc, Mutex, PoisonError};

pub use error::{Error, Loss};
pub(crate) use over_mesh::MeshGang;

use crate::{ElementType, Result, Tensor};

/// Every rank of one task, as seen by one of them.
pub trait Gang: Send + Sync + Debug {
    /// This one's number, from 0.
    fn rank(&self) -> usize;
    /// How many there are.
    fn size(&self) -> usize;
    /// Joins `ranks` (numbers of the gang, each once, in the order of their ranks in the communicator). Each of
    /// them must ask for the same; ranks that form several form them in the same order.
    ///
    /// # Errors
    /// When this rank is not among them, or the gang is broken.
    fn communicator(&self, ranks: &[usize]) -> Result<Arc<dyn Communicator>>;
    /// Every rank's bytes, in the order of the ranks. Every rank must call it; waits for all.
    ///
    /// # Errors
    /// When the gang is broken, or the deadline passes.
    fn exchange(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>>;
    /// Returns once every rank has called it.
    ///
    /// # Errors
    /// As [`Gang::exchange`].
    fn barrier(&self) -> Result<()> {
        self.exchange(&[]).map(drop)
    }
    /// An error once the gang is broken. On a device, a result that was read before this says that all is well
    /// is right; one that is read while the gang breaks may be anything.
    ///
    /// # Errors
    /// When it is broken: which rank was lost, or that this one has aborted.
    fn check(&self) -> Result<()>;
    /// Breaks the gang: every wait of every rank ends with an error.
    fn abort(&self);
}

/// Some ranks of a gang that move tensors among themselves; f32 and bf16 where the backend has them.
///
/// Calls return at once; [`InFlight::wait`] gives the result. Collective calls run in the order in which they
/// were made. Each says the shapes it takes and gives, `(rows, columns)`; those of every rank must agree.
pub trait Communicator: Send + Sync + Debug {
    /// This rank's number among them, from 0.
    fn rank(&self) -> usize;
    /// How many there are.
    fn size(&self) -> usize;
    /// The sum of every rank's tensor, the same bits on every rank: `(r, c)` to `(r, c)`, perhaps in the operand's
    /// storage. Between CPUs it is added up in the order of the ranks.
    ///
    /// # Errors
    /// When the tensor is elsewhere or has gaps, or the gang is broken. So for all others.
    fn all_reduce(&self, tensor: Tensor) -> Result<InFlight>;
    /// This rank's share of the sum: `(size * r, c)` to rows `rank * r ..` of it, `(r, c)`.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`]; also when the rows cannot be shared out evenly.
    fn reduce_scatter(&self, whole: Tensor) -> Result<InFlight>;
    /// Every rank's rows in the order of the ranks: `(r, c)` to `(size * r, c)`.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    fn all_gather(&self, part: Tensor) -> Result<InFlight>;
    /// What `root` gave: `(r, c)` to `(r, c)`, perhaps in the operand's storage. What the others give is lost.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`]; also when there is no rank `root`.
    fn broadcast(&self, tensor: Tensor, root: usize) -> Result<InFlight>;
    /// Sends to rank `to`, which receives. Waiting gives the tensor back.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`]; also when `to` is no other rank.
    fn send(&self, tensor: Tensor, to: usize) -> Result<InFlight>;
    /// The next tensor that rank `from` sends to this one.
    ///
    /// # Errors
    /// When `from` is no other rank, there is no memory, or the gang is broken.
    fn receive(
        &self,
        rows: usize,
        columns: usize,
        element_type: ElementType,
        from: usize,
    ) -> Result<InFlight>;
    /// As [`Gang::check`].
    ///
    /// # Errors
    /// When the gang is broken.
    fn check(&self) -> Result<()>;
    /// Ends every wait of this rank with an error, and so, in time, of every rank.
    fn abort(&self);
}

/// A tensor on its way. One that is dropped still gets there, as long as its communicator lives; after a send from a
/// GPU that is better than to wait, which holds up what is computed next until the receiver has come.
#[must_use = "what is under way is lost unless somebody waits for it"]
pub struct InFlight(Box<dyn Flight>);

/// What a backend knows of a tensor on its way.
trait Flight: Send + Debug {
    /// See [`InFlight::wait`].
    fn wait(self: Box<Self>) -> Result<Tensor>;
}

impl InFlight {
    /// The result: whatever the backend is told from now on sees it. On a GPU the host does not wait for it.
    ///
    /// # Errors
    /// When a rank was lost, this one aborted, the deadline passed, or the ranks' calls do not fit together.
    pub fn wait(self) -> Result<Tensor> {
        self.0.wait()
    }
}

impl Debug for InFlight {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("InFlight").field(&self.0).finish()
    }
}

/// How often a rank has formed each communicator, so that it can be told from earlier ones of the same ranks.
#[derive(Debug, Default)]
struct Formed(Mutex<HashMap<Vec<usize>, u64>>);

impl Formed {
    /// The number of the communicator of `ranks` that is formed now, from 0.
    fn number(&self, ranks: &[usize]) -> u64 {
        let mut formed = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let times = formed.entry(ranks.to_vec()).or_default();
        let number = *times;
        *times += 1;
        number
    }
}

/// Where this rank stands among `ranks` of a gang of `size`.
fn position(rank: usize, size: usize, ranks: &[usize]) -> Result<usize> {
    let distinct = ranks
        .iter()
        .enumerate()
        .all(|(index, one)| *one < size && !ranks.iter().skip(index + 1).any(|other| other == one));
    let own = ranks.iter().position(|&one| one == rank);
    own.filter(|_| distinct).ok_or_else(|| {
        Error::Ranks {
            rank,
            size,
            ranks: ranks.to_vec(),
        }
        .into()
    })
}

/// An error unless `other` is another rank of `size`.
fn expect_other(operation: &'static str, rank: usize, size: usize, other: usize) -> Result<()> {
    if other < size && other != rank {
        return Ok(());
    }
    Err(Error::NoSuchRank {
        operation,
        rank: other,
        size,
    }
    .into())
}

/// Rows of each rank's share of `whole`.
fn share_of(whole: &Tensor, size: usize) -> Result<usize> {
    if whole.rows().is_multiple_of(size) {
        return Ok(whole.rows() / size);
    }
    Err(crate::Error::Shape {
        operation: "reduce_scatter",
        expected: format!("rows that {size} ranks can share out evenly"),
        found: format!("{} rows", whole.rows()),
    })
}
