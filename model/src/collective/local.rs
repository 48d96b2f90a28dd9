//! Ranks that are threads of one process, over tensors in the host's memory: for tests of what is built on a gang.
//!
//! Stricter than the others, so that what works here works there: ranks whose calls do not fit together are told so,
//! and a send ends only once its receiver has asked for it.

use std::collections::{BTreeMap, HashMap};
use std::fmt::{self, Debug};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::{Communicator, Error, Flight, Formed, Gang, InFlight, expect_other, host, position, share_of};
use crate::{ElementType, Result, Tensor};

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

#[derive(Debug)]
struct CallFlight {
    key: (Arc<Group>, u64),
    kind: Kind,
    rank: usize,
    size: usize,
    shared: Arc<Shared>,
    is_taken: bool,
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
struct SendFlight {
    pair: (Arc<Group>, usize, usize),
    number: u64,
    tensor: Tensor,
    shared: Arc<Shared>,
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
struct ReceiveFlight {
    pair: (Arc<Group>, usize, usize),
    number: u64,
    rows: usize,
    columns: usize,
    shared: Arc<Shared>,
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use super::*;

    const SOON: Duration = Duration::from_millis(200);
    const LATE: Duration = Duration::from_secs(30);

    fn row(values: &[f32]) -> Tensor {
        Tensor::from_vec(values.to_vec(), 1, values.len()).unwrap()
    }

    fn whole(gang: &LocalGang) -> Arc<dyn Communicator> {
        let ranks: Vec<usize> = (0..gang.size()).collect();
        gang.communicator(&ranks).unwrap()
    }

    #[test]
    fn every_rank_gets_the_sum_in_rank_order_and_its_share_of_it() {
        // Each order of these gives another sum.
        let parts = [1.0e8_f32, 1.25, -1.0e8, 0.3];
        let expected = ((parts[0] + parts[1]) + parts[2]) + parts[3];
        let results = run(4, LATE, |gang| {
            let all = whole(&gang);
            let own = parts[gang.rank()];
            std::thread::sleep(Duration::from_millis(5 * (4 - gang.rank() as u64)));
            let sum = all.all_reduce(row(&[own, own]))?;
            let share = all.reduce_scatter(Tensor::from_vec(vec![own; 8], 4, 2)?)?;
            let gathered = all.all_gather(row(&[own]))?.wait()?;
            let rooted = all.broadcast(row(&[own]), 2)?.wait()?;
            let (sum, share) = (sum.wait()?, share.wait()?);
            assert_eq!(gathered.rows(), 4);
            assert_eq!(gathered.host()?, parts);
            assert_eq!(rooted.host()?, [parts[2]]);
            assert_eq!((share.rows(), share.columns()), (1, 2));
            Ok([sum.host()?, share.host()?].concat())
        })
        .unwrap();
        assert_eq!(results, vec![vec![expected; 4]; 4]);
    }

    #[test]
    fn messages_arrive_in_order_and_a_send_ends_with_its_receive() {
        let gangs = LocalGang::all(2, SOON);
        let (first, second) = (whole(&gangs[0]), whole(&gangs[1]));
        let one = first.send(row(&[1.0]), 1).unwrap();
        let two = first.send(row(&[2.0]), 1).unwrap();
        let got = second.receive(1, 1, ElementType::F32, 0).unwrap();
        assert_eq!(one.wait().unwrap().host().unwrap(), [1.0]);
        let late = two.wait().unwrap_err();
        assert!(
            matches!(
                late,
                crate::Error::Gang(Error::Deadline {
                    operation: "send",
                    ..
                })
            ),
            "{late}"
        );
        assert_eq!(got.wait().unwrap().host().unwrap(), [1.0]);
    }

    #[test]
    fn subsets_keep_apart_and_bytes_reach_every_rank() {
        let results = run(4, LATE, |gang| {
            let pair: Vec<usize> = (0..4).filter(|rank| rank % 2 == gang.rank() % 2).collect();
            let halves = gang.communicator(&pair)?;
            let again = gang.communicator(&pair)?;
            let one = again.all_reduce(row(&[gang.rank() as f32 + 10.0]))?;
            let two = halves.all_reduce(row(&[gang.rank() as f32]))?.wait()?;
            gang.barrier()?;
            let names = gang.exchange(gang.rank().to_string().as_bytes())?;
            assert_eq!(names.concat(), b"0123");
            Ok((two.host()?[0], one.wait()?.host()?[0]))
        })
        .unwrap();
        assert_eq!(results, [(2.0, 22.0), (4.0, 24.0), (2.0, 22.0), (4.0, 24.0)]);
        let refused = LocalGang::all(2, SOON)[0].communicator(&[1]).unwrap_err();
        assert!(refused.to_string().contains("among them"), "{refused}");
    }

    #[test]
    fn calls_that_do_not_fit_together_are_named_on_every_rank() {
        let error = run(2, LATE, |gang| {
            let all = whole(&gang);
            if gang.rank() == 0 {
                all.all_reduce(row(&[1.0]))?.wait()
            } else {
                all.all_reduce(row(&[1.0, 2.0]))?.wait()
            }
        })
        .unwrap_err();
        assert!(
            error.to_string().contains("AllReduce of 1 x 2")
                || error.to_string().contains("AllReduce of 1 x 1"),
            "{error}"
        );
    }

    #[test]
    fn a_rank_that_fails_or_never_comes_ends_every_wait() {
        let begun = Instant::now();
        let error = run(3, LATE, |gang| {
            if gang.rank() == 1 {
                return Err(crate::Error::NotFinite {
                    what: "a loss".to_owned(),
                });
            }
            gang.communicator(&[0, 1, 2])?
                .all_reduce(row(&[1.0]))?
                .wait()
                .map(drop)
        })
        .unwrap_err();
        assert!(matches!(error, crate::Error::NotFinite { .. }), "{error}");
        assert!(begun.elapsed() < LATE / 2);
        let gangs = LocalGang::all(2, SOON);
        let late = whole(&gangs[0]).all_reduce(row(&[1.0])).unwrap().wait();
        let late = late.unwrap_err();
        assert!(
            matches!(late, crate::Error::Gang(Error::Deadline { waited, .. }) if waited >= SOON),
            "{late}"
        );
    }

    #[test]
    fn a_result_that_nobody_waits_for_is_forgotten() {
        let gangs = LocalGang::all(2, SOON);
        let both = [whole(&gangs[0]), whole(&gangs[1])];
        let flights = both.each_ref().map(|one| one.all_reduce(row(&[1.0])).unwrap());
        drop(flights);
        assert!(gangs[0].shared.state().calls.is_empty());
    }
}
