//! Ranks that are threads of one process, over tensors in the host's memory: for tests of what is built on a gang.
//!
//! Stricter than the others, so that what works here works there: ranks whose calls do not fit together are told so,
//! and a send ends only once its receiver has asked for it.

mod flight;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};
use std::fmt::{self, Debug};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::{Communicator, Error, Formed, Gang, InFlight, expect_other, host, position, share_of};
use crate::{ElementType, Result, Tensor};
use flight::{CallFlight, ReceiveFlight, SendFlight};

/// Runs `work` as each rank of a gang of `size`, a thread each, and gives what they return, in the order of the
/// ranks. A rank that fails or panics aborts the gang, so that the others end. No wait takes longer than `deadline`.
///
/// # Errors
/// That of the lowest rank that failed by itself, or, where none did, of the lowest that failed.
///
/// # Panics
/// When `work` panics.
pub fn run<T: Send>(
    size: usize,
    deadline: Duration,
    work: impl Fn(Arc<LocalGang>) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let gang = LocalGang::all(size, deadline);
    let work = &work;
    let results: Vec<std::thread::Result<Result<T>>> = std::thread::scope(|scope| {
        let threads: Vec<_> = gang
            .into_iter()
            .map(|gang| {
                scope.spawn(move || {
                    let guard = AbortUnlessDone(gang.clone());
                    let result = work(gang);
                    if result.is_ok() {
                        std::mem::forget(guard);
                    }
                    result
                })
            })
            .collect();
        threads
            .into_iter()
            .map(std::thread::ScopedJoinHandle::join)
            .collect()
    });
    let mut values = Vec::with_capacity(size);
    let mut errors = Vec::new();
    for result in results {
        match result {
            Ok(Ok(value)) => values.push(value),
            Ok(Err(error)) => errors.push(error),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
    let is_consequence = |error: &crate::Error| matches!(error, crate::Error::Gang(Error::Aborted));
    let own = errors.iter().position(|error| !is_consequence(error));
    match errors.is_empty() {
        true => Ok(values),
        false => Err(errors.swap_remove(own.unwrap_or(0))),
    }
}

/// Aborts the gang when a rank's work ends otherwise than well.
struct AbortUnlessDone(Arc<LocalGang>);

impl Drop for AbortUnlessDone {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// One rank of a gang of threads.
#[derive(Debug)]
pub struct LocalGang {
    rank: usize,
    shared: Arc<Shared>,
    formed: Formed,
    /// Of all ranks, for [`Gang::exchange`].
    exchanges: Mutex<u64>,
}

impl LocalGang {
    /// The ranks of a gang of `size`, no wait of which takes longer than `deadline`.
    pub fn all(size: usize, deadline: Duration) -> Vec<Arc<Self>> {
        let shared = Arc::new(Shared {
            size,
            deadline,
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        (0..size)
            .map(|rank| {
                Arc::new(Self {
                    rank,
                    shared: shared.clone(),
                    formed: Formed::default(),
                    exchanges: Mutex::default(),
                })
            })
            .collect()
    }
}

impl Gang for LocalGang {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.shared.size
    }

    fn communicator(&self, ranks: &[usize]) -> Result<Arc<dyn Communicator>> {
        let rank = position(self.rank, self.shared.size, ranks)?;
        self.check()?;
        let group = (ranks.to_vec(), self.formed.number(ranks));
        Ok(Arc::new(Local {
            rank,
            size: ranks.len(),
            group: Arc::new(group),
            shared: self.shared.clone(),
            calls: Mutex::default(),
        }))
    }

    fn exchange(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let size = self.shared.size;
        let mut exchanges = self.exchanges.lock().unwrap_or_else(PoisonError::into_inner);
        let number = *exchanges;
        *exchanges += 1;
        drop(exchanges);
        let mut state = self.shared.state();
        let exchange = state
            .exchanges
            .entry(number)
            .or_insert_with(|| Exchange::new(size));
        if let Some(place) = exchange.given.get_mut(self.rank) {
            *place = Some(bytes.to_vec());
        }
        self.shared.changed.notify_all();
        self.shared.wait(state, "exchange", |state| {
            let exchange = state.exchanges.get_mut(&number)?;
            let all: Option<Vec<Vec<u8>>> = exchange.given.iter().cloned().collect();
            let all = all?;
            exchange.taken += 1;
            if exchange.taken == size {
                state.exchanges.remove(&number);
            }
            Some(Ok(all))
        })
    }

    fn check(&self) -> Result<()> {
        self.shared.check()
    }

    fn abort(&self) {
        self.shared.give_up(Error::Aborted);
    }
}

/// A communicator's ranks, and which of those that they formed it is.
type Group = (Vec<usize>, u64);

/// What all ranks share.
struct Shared {
    size: usize,
    deadline: Duration,
    state: Mutex<State>,
    changed: Condvar,
}

impl Debug for Shared {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Shared")
            .field("size", &self.size)
            .finish_non_exhaustive()
    }
}

#[derive(Default)]
struct State {
    calls: HashMap<(Arc<Group>, u64), Call>,
    /// By communicator, sender and receiver.
    messages: HashMap<(Arc<Group>, usize, usize), Messages>,
    exchanges: BTreeMap<u64, Exchange>,
    broken: Option<Error>,
}

struct Exchange {
    given: Vec<Option<Vec<u8>>>,
    taken: usize,
}

impl Exchange {
    fn new(size: usize) -> Self {
        Self {
            given: vec![None; size],
            taken: 0,
        }
    }
}

/// A collective call, and what each rank gave for it or gets from it.
struct Call {
    kind: Kind,
    rows: usize,
    columns: usize,
    given: Vec<Option<Tensor>>,
    results: Option<Vec<Option<Tensor>>>,
    taken: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    AllReduce,
    ReduceScatter,
    AllGather,
    Broadcast { root: usize },
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllGather => "all_gather",
            Self::Broadcast { .. } => "broadcast",
        }
    }
}

/// What was sent from one rank to another.
#[derive(Default)]
struct Messages {
    sent: u64,
    asked: u64,
    waiting: BTreeMap<u64, Tensor>,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check(&self) -> Result<()> {
        match &self.state().broken {
            Some(error) => Err(error.clone().into()),
            None => Ok(()),
        }
    }

    fn give_up(&self, error: Error) {
        self.state().broken.get_or_insert(error);
        self.changed.notify_all();
    }

    /// Waits until `ready` gives a result, the gang breaks or the deadline passes.
    fn wait<T>(
        &self,
        mut state: MutexGuard<'_, State>,
        operation: &'static str,
        mut ready: impl FnMut(&mut State) -> Option<Result<T>>,
    ) -> Result<T> {
        let begun = Instant::now();
        loop {
            if let Some(error) = &state.broken {
                return Err(error.clone().into());
            }
            if let Some(result) = ready(&mut state) {
                return result;
            }
            let waited = begun.elapsed();
            let Some(left) = self.deadline.checked_sub(waited).filter(|left| !left.is_zero()) else {
                return Err(Error::Deadline { operation, waited }.into());
            };
            state = self
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

/// Some ranks of a gang of threads.
#[derive(Debug)]
struct Local {
    rank: usize,
    size: usize,
    group: Arc<Group>,
    shared: Arc<Shared>,
    /// Collective calls that this rank has made.
    calls: Mutex<u64>,
}

impl Local {
    fn call(&self, kind: Kind, tensor: Tensor) -> Result<InFlight> {
        host::elements(kind.name(), &tensor)?;
        self.shared.check()?;
        let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (self.group.clone(), *calls);
        *calls += 1;
        let mut state = self.shared.state();
        let call = state.calls.entry(key.clone()).or_insert_with(|| Call {
            kind,
            rows: tensor.rows(),
            columns: tensor.columns(),
            given: vec![None; self.size],
            results: None,
            taken: 0,
        });
        if (call.kind, call.rows, call.columns) != (kind, tensor.rows(), tensor.columns()) {
            let error = Error::Mismatch {
                rank: self.rank,
                expected: format!("{:?} of {} x {}", call.kind, call.rows, call.columns),
                found: format!("{kind:?} of {} x {}", tensor.rows(), tensor.columns()),
            };
            drop(state);
            self.shared.give_up(error.clone());
            return Err(error.into());
        }
        if let Some(place) = call.given.get_mut(self.rank) {
            *place = Some(tensor);
        }
        if call.given.iter().all(Option::is_some) {
            let given: Vec<Tensor> = std::mem::take(&mut call.given).into_iter().flatten().collect();
            call.results = Some(combine(kind, &given)?.into_iter().map(Some).collect());
            self.shared.changed.notify_all();
        }
        Ok(InFlight(Box::new(CallFlight {
            key,
            kind,
            rank: self.rank,
            size: self.size,
            shared: self.shared.clone(),
            is_taken: false,
        })))
    }

    fn pair(&self, from: usize, to: usize) -> (Arc<Group>, usize, usize) {
        (self.group.clone(), from, to)
    }
}

/// Every rank's result, from every rank's operand.
fn combine(kind: Kind, given: &[Tensor]) -> Result<Vec<Tensor>> {
    let name = kind.name();
    let Some(first) = given.first() else {
        return Ok(Vec::new());
    };
    match kind {
        Kind::AllReduce => {
            let sum = sum(name, first, given)?;
            given.iter().map(|_| host::copy(name, &sum)).collect()
        }
        Kind::ReduceScatter => {
            let (sum, rows) = (sum(name, first, given)?, share_of(first, given.len())?);
            let share = |rank| host::copy(name, &sum.narrow_rows(rank * rows, rows)?);
            (0..given.len()).map(share).collect()
        }
        Kind::AllGather => {
            let mut all = Vec::with_capacity(first.len() * given.len());
            for tensor in given {
                all.extend_from_slice(host::elements(name, tensor)?);
            }
            let all = Tensor::from_vec(all, first.rows() * given.len(), first.columns())?;
            given.iter().map(|_| host::copy(name, &all)).collect()
        }
        Kind::Broadcast { root } => {
            let from = given.get(root).unwrap_or(first);
            given.iter().map(|_| host::copy(name, from)).collect()
        }
    }
}

fn sum(name: &'static str, first: &Tensor, given: &[Tensor]) -> Result<Tensor> {
    let mut sum = host::copy(name, first)?;
    for tensor in given.iter().skip(1) {
        host::add(sum.host_mut()?, host::elements(name, tensor)?);
    }
    Ok(sum)
}

impl Communicator for Local {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn all_reduce(&self, tensor: Tensor) -> Result<InFlight> {
        self.call(Kind::AllReduce, tensor)
    }

    fn reduce_scatter(&self, whole: Tensor) -> Result<InFlight> {
        share_of(&whole, self.size)?;
        self.call(Kind::ReduceScatter, whole)
    }

    fn all_gather(&self, part: Tensor) -> Result<InFlight> {
        self.call(Kind::AllGather, part)
    }

    fn broadcast(&self, tensor: Tensor, root: usize) -> Result<InFlight> {
        if root != self.rank {
            expect_other("broadcast", self.rank, self.size, root)?;
        }
        self.call(Kind::Broadcast { root }, tensor)
    }

    fn send(&self, tensor: Tensor, to: usize) -> Result<InFlight> {
        expect_other("send", self.rank, self.size, to)?;
        self.shared.check()?;
        let pair = self.pair(self.rank, to);
        let copy = host::copy("send", &tensor)?;
        let mut state = self.shared.state();
        let messages = state.messages.entry(pair.clone()).or_default();
        let number = messages.sent;
        messages.sent += 1;
        messages.waiting.insert(number, copy);
        self.shared.changed.notify_all();
        Ok(InFlight(Box::new(SendFlight {
            pair,
            number,
            tensor,
            shared: self.shared.clone(),
        })))
    }

    fn receive(
        &self,
        rows: usize,
        columns: usize,
        element_type: ElementType,
        from: usize,
    ) -> Result<InFlight> {
        expect_other("receive", self.rank, self.size, from)?;
        self.shared.check()?;
        if element_type != ElementType::F32 {
            return Err(crate::Error::ElementType { element_type });
        }
        let pair = self.pair(from, self.rank);
        let mut state = self.shared.state();
        let messages = state.messages.entry(pair.clone()).or_default();
        let number = messages.asked;
        messages.asked += 1;
        self.shared.changed.notify_all();
        Ok(InFlight(Box::new(ReceiveFlight {
            pair,
            number,
            rows,
            columns,
            shared: self.shared.clone(),
        })))
    }

    fn check(&self) -> Result<()> {
        self.shared.check()
    }

    fn abort(&self) {
        self.shared.give_up(Error::Aborted);
    }
}
