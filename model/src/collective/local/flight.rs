//! What is under way between threads of one process.

use std::sync::Arc;

use super::{Group, Kind, Shared, State};
use crate::collective::{Error, Flight};
use crate::{Result, Tensor};

#[derive(Debug)]
pub(super) struct CallFlight {
    pub(super) key: (Arc<Group>, u64),
    pub(super) kind: Kind,
    pub(super) rank: usize,
    pub(super) size: usize,
    pub(super) shared: Arc<Shared>,
    pub(super) is_taken: bool,
}

impl CallFlight {
    /// This rank's result, if it is there; the call is forgotten with the last.
    fn take(&mut self, state: &mut State) -> Option<Tensor> {
        let call = state.calls.get_mut(&self.key)?;
        let result = call.results.as_mut()?.get_mut(self.rank)?.take();
        self.is_taken = true;
        call.taken += 1;
        if call.taken == self.size {
            state.calls.remove(&self.key);
        }
        result
    }
}

impl Flight for CallFlight {
    fn wait(mut self: Box<Self>) -> Result<Tensor> {
        let shared = self.shared.clone();
        shared.wait(shared.state(), self.kind.name(), |state| self.take(state).map(Ok))
    }
}

impl Drop for CallFlight {
    fn drop(&mut self) {
        if !self.is_taken {
            let shared = self.shared.clone();
            self.take(&mut shared.state());
        }
    }
}

#[derive(Debug)]
pub(super) struct SendFlight {
    pub(super) pair: (Arc<Group>, usize, usize),
    pub(super) number: u64,
    pub(super) tensor: Tensor,
    pub(super) shared: Arc<Shared>,
}

impl Flight for SendFlight {
    fn wait(self: Box<Self>) -> Result<Tensor> {
        self.shared.wait(self.shared.state(), "send", |state| {
            let messages = state.messages.get(&self.pair)?;
            (messages.asked > self.number).then_some(Ok(()))
        })?;
        Ok(self.tensor)
    }
}

#[derive(Debug)]
pub(super) struct ReceiveFlight {
    pub(super) pair: (Arc<Group>, usize, usize),
    pub(super) number: u64,
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) shared: Arc<Shared>,
}

impl Flight for ReceiveFlight {
    fn wait(self: Box<Self>) -> Result<Tensor> {
        let tensor = self.shared.wait(self.shared.state(), "receive", |state| {
            let messages = state.messages.get_mut(&self.pair)?;
            messages.waiting.remove(&self.number).map(Ok)
        })?;
        if (tensor.rows(), tensor.columns()) == (self.rows, self.columns) {
            return Ok(tensor);
        }
        let error = Error::Mismatch {
            rank: self.pair.2,
            expected: format!("send of {} x {}", tensor.rows(), tensor.columns()),
            found: format!("receive of {} x {}", self.rows, self.columns),
        };
        self.shared.give_up(error.clone());
        Err(error.into())
    }
}
