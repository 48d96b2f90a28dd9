//! Ranks with a CPU each: tensors in the host's memory go over the connections of a [`Mesh`](super::mesh::Mesh).
//!
//! Everything goes straight from its owner to whoever needs it. A sum is made by the rank that owns that share of it,
//! in the order of the ranks, and its bits are what everybody gets, whatever the timing. Tensors go in pieces, of which
//! a few are under way at a time: beside operand and result, a call takes little memory. Collective calls of a
//! communicator run one after the other in a thread of its own, and so do messages of each direction to each rank.

mod call;
#[cfg(test)]
mod tests;
mod worker;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::members::Members;
use super::{Communicator, InFlight, expect_other, host, share_of};
use crate::{ElementType, Result, Tensor};
use call::Call;
use worker::Worker;

/// Joins ranks of a mesh.
///
/// # Errors
/// When no thread can be started.
pub(super) fn join(members: Members) -> Result<Arc<dyn Communicator>> {
    Ok(Arc::new(Tcp::new(Arc::new(members))?))
}

/// Some ranks of a gang of CPUs.
#[derive(Debug)]
struct Tcp {
    members: Arc<Members>,
    collective: Worker,
    /// By rank, and whether they go out.
    messages: Mutex<HashMap<(usize, bool), Worker>>,
}

impl Tcp {
    fn new(members: Arc<Members>) -> Result<Self> {
        Ok(Self {
            collective: Worker::start(members.clone())?,
            members,
            messages: Mutex::default(),
        })
    }

    fn call(
        &self,
        name: &'static str,
        tensor: Tensor,
        call: impl FnOnce(Tensor) -> Call,
    ) -> Result<InFlight> {
        host::elements(name, &tensor)?;
        self.check()?;
        self.collective.queue(call(tensor))
    }

    fn message(&self, other: usize, call: Call) -> Result<InFlight> {
        self.check()?;
        let mut messages = self.messages.lock().unwrap_or_else(PoisonError::into_inner);
        let direction = (other, matches!(call, Call::Send { .. }));
        if let Some(worker) = messages.get(&direction) {
            return worker.queue(call);
        }
        let worker = Worker::start(self.members.clone())?;
        let flight = worker.queue(call);
        messages.insert(direction, worker);
        flight
    }
}

impl Communicator for Tcp {
    fn rank(&self) -> usize {
        self.members.rank
    }

    fn size(&self) -> usize {
        self.members.size()
    }

    fn all_reduce(&self, tensor: Tensor) -> Result<InFlight> {
        self.call("all_reduce", tensor, Call::AllReduce)
    }

    fn reduce_scatter(&self, whole: Tensor) -> Result<InFlight> {
        share_of(&whole, self.size())?;
        self.call("reduce_scatter", whole, Call::ReduceScatter)
    }

    fn all_gather(&self, part: Tensor) -> Result<InFlight> {
        self.call("all_gather", part, Call::AllGather)
    }

    fn broadcast(&self, tensor: Tensor, root: usize) -> Result<InFlight> {
        if root != self.rank() {
            expect_other("broadcast", self.rank(), self.size(), root)?;
        }
        self.call("broadcast", tensor, |tensor| Call::Broadcast { tensor, root })
    }

    fn send(&self, tensor: Tensor, to: usize) -> Result<InFlight> {
        expect_other("send", self.rank(), self.size(), to)?;
        host::elements("send", &tensor)?;
        self.message(to, Call::Send { tensor, to })
    }

    fn receive(
        &self,
        rows: usize,
        columns: usize,
        element_type: ElementType,
        from: usize,
    ) -> Result<InFlight> {
        expect_other("receive", self.rank(), self.size(), from)?;
        if element_type != ElementType::F32 {
            return Err(crate::Error::ElementType { element_type });
        }
        self.message(from, Call::Receive { rows, columns, from })
    }

    fn check(&self) -> Result<()> {
        Ok(self.members.mesh.check()?)
    }

    fn abort(&self) {
        self.members.mesh.abort();
    }
}
