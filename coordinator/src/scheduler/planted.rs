//! Bugs on purpose: the simulation has to find each of them. Built only with the feature `planted-bugs`,
//! and switched on for the thread that asks.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::sync::Arc;

use super::{AttemptId, Event, Gang, Now, Payload, State, TaskId, TaskPhase};

/// A way to be wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bug {
    /// The completion of an attempt that was handed on is taken, once.
    PromoteOneStaleAttempt,
    /// What failed before a restart is forgotten.
    ForgetTheRetryCounter,
    /// A gang begins when half of its ranks are ready.
    ReleaseHalfAGang,
}

thread_local! {
    static PLANTED: Cell<Option<Bug>> = const { Cell::new(None) };
    static PROMOTED: Cell<bool> = const { Cell::new(false) };
    static LOST: RefCell<BTreeMap<AttemptId, TaskId>> = const { RefCell::new(BTreeMap::new()) };
}

/// Plants a bug in this thread's state machines, or none.
pub fn plant(bug: Option<Bug>) {
    PLANTED.set(bug);
    PROMOTED.set(false);
    LOST.with_borrow_mut(BTreeMap::clear);
}

/// The bug that this thread has.
pub fn planted() -> Option<Bug> {
    PLANTED.get()
}

/// Remembers whose attempt was lost, as no state does.
pub(super) fn remember_lost(attempt: AttemptId, task: TaskId) {
    if planted() == Some(Bug::PromoteOneStaleAttempt) {
        LOST.with_borrow_mut(|lost| lost.insert(attempt, task));
    }
}

/// The promotion of an attempt that was handed on.
pub(super) fn stale_promotion(
    state: &State,
    attempt: AttemptId,
    output: &Payload,
    now: Now,
) -> Option<Vec<Event>> {
    if planted() != Some(Bug::PromoteOneStaleAttempt) || PROMOTED.get() || state.attempt(attempt).is_some() {
        return None;
    }
    let task = LOST.with_borrow(|lost| lost.get(&attempt).copied())?;
    state.task(task)?;
    PROMOTED.set(true);
    Some(vec![Event::AttemptCompleted {
        attempt,
        task,
        output: output.clone(),
        at: now.unix_ms,
    }])
}

/// Takes the completion of an attempt that holds nothing.
pub(super) fn promote_stale(state: &mut State, event: &Event) {
    let Event::AttemptCompleted {
        attempt,
        task,
        output,
        ..
    } = event
    else {
        return;
    };
    if planted() != Some(Bug::PromoteOneStaleAttempt) || state.attempts.contains_key(attempt) {
        return;
    }
    let Some(task) = state.tasks.get_mut(task) else {
        return;
    };
    Arc::make_mut(task).phase = TaskPhase::Done {
        attempt: *attempt,
        output: output.clone(),
    };
    state.reindex();
}

/// Forgets what failed, as a server does that keeps its counters in memory.
pub(super) fn forget_counters(state: &mut State) {
    if planted() != Some(Bug::ForgetTheRetryCounter) {
        return;
    }
    for task in state.tasks.values_mut() {
        Arc::make_mut(task).trouble = None;
    }
}

/// Whether a gang with so many ranks missing begins all the same.
pub(super) fn releases_half(gang: &Gang, missing: usize) -> bool {
    let ready = gang.ranks.len().saturating_sub(missing).saturating_add(1);
    planted() == Some(Bug::ReleaseHalfAGang) && !gang.released && ready.saturating_mul(2) >= gang.ranks.len()
}
