//! The artifact store as coordinators use it between themselves: claims of terms, made by conditional create,
//! and what was shipped of each journal. The rules of claims and of authority are the real ones.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use espalier_coordinator::scheduler::Term;
use espalier_coordinator::service::surroundings::Clock;
use espalier_coordinator::term::authority::Predecessor;
use espalier_coordinator::term::claims::{Claim, Claimant, Plan, plan};
use espalier_coordinator::term::{Authority, Fence, Standing, TERM_LEASE};
use espalier_coordinator::{Error, Result};

use crate::clock::{MachineClock, Time};
use crate::disk::Copied;

/// Journals are shipped this often.
pub const SHIPPING: Duration = Duration::from_secs(5);

/// The store; clones are the same one.
#[derive(Debug, Clone, Default)]
pub struct VirtualStore(Arc<Mutex<Shelf>>);

#[derive(Debug, Default)]
struct Shelf {
    claims: BTreeMap<u64, Claim>,
    /// Machines that cannot reach it, and how many faults say so.
    cut_off: BTreeMap<usize, u32>,
    shipped: BTreeMap<usize, Shipped>,
    /// Machines whose journal was built from what was shipped and has no term of its own yet, with the highest
    /// term as it was built.
    restored: BTreeMap<usize, u64>,
}

/// What was shipped from a machine.
#[derive(Debug, Clone, Default)]
pub struct Shipped {
    /// When.
    pub at: Time,
    /// So many first bytes of each file.
    pub copied: Copied,
}

impl VirtualStore {
    fn shelf(&self) -> MutexGuard<'_, Shelf> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A machine no longer reaches it, until it has been let in as often.
    pub fn cut_off(&self, machine: usize) {
        *self.shelf().cut_off.entry(machine).or_default() += 1;
    }

    /// Takes one cut back.
    pub fn let_in(&self, machine: usize) {
        let mut shelf = self.shelf();
        let cuts = shelf.cut_off.entry(machine).or_default();
        *cuts = cuts.saturating_sub(1);
    }

    /// Whether a machine reaches it.
    pub fn reaches(&self, machine: usize) -> bool {
        self.shelf().cut_off.get(&machine).is_none_or(|cuts| *cuts == 0)
    }

    /// The highest term claimed.
    pub fn highest_term(&self) -> Option<u64> {
        self.shelf().claims.keys().next_back().copied()
    }

    /// A machine's journal as it is durable now is there from now on.
    pub fn ship(&self, machine: usize, shipped: Shipped) {
        self.shelf().shipped.insert(machine, shipped);
    }

    /// What is there of a machine's journal.
    pub fn shipped(&self, machine: usize) -> Shipped {
        self.shelf().shipped.get(&machine).cloned().unwrap_or_default()
    }

    /// A machine's journal was built from what was shipped.
    pub fn restored(&self, machine: usize) {
        let highest = self.highest_term().unwrap_or(0);
        self.shelf().restored.insert(machine, highest);
    }

    /// A machine's journal says which term it claimed: from here on it goes on by itself, and once another has
    /// taken over from it, it has to stop.
    pub fn settled(&self, machine: usize) {
        self.shelf().restored.remove(&machine);
    }

    fn claim(&self, machine: usize, start: u64, own: Term, next: u64) -> Result<(Claim, Predecessor)> {
        let mut shelf = self.shelf();
        let claimant = Claimant {
            host: format!("machine-{machine}"),
            claimant: format!("disk-{machine}"),
            start: start.to_string(),
            lease: TERM_LEASE,
            restored: shelf.restored.get(&machine).copied(),
        };
        let claims: Vec<Claim> = shelf.claims.values().cloned().collect();
        // What was shipped is stood in for by whole files: how far it reaches is not known here.
        match plan(&claimant, own.0, next, &claims, 0) {
            Plan::Refuse | Plan::Again | Plan::Behind => {
                Err(Error::Conflict("another coordinator has taken over".to_owned()))
            }
            Plan::Claim(term, predecessor) => {
                let claim = Claim {
                    term,
                    host: claimant.host,
                    from_sequence: next,
                    claimant: claimant.claimant,
                    start: claimant.start,
                    lease_ms: u64::try_from(TERM_LEASE.as_millis()).unwrap_or(u64::MAX),
                };
                shelf.claims.insert(term, claim.clone());
                Ok((claim, predecessor))
            }
        }
    }
}

/// A machine's hold on its term.
#[derive(Debug)]
pub struct VirtualFence {
    store: VirtualStore,
    machine: usize,
    start: u64,
    clock: Arc<MachineClock>,
    authority: Mutex<Option<Authority>>,
}

impl VirtualFence {
    /// That of one start, without a term yet.
    pub fn new(store: VirtualStore, machine: usize, start: u64, clock: Arc<MachineClock>) -> Self {
        Self {
            store,
            machine,
            start,
            clock,
            authority: Mutex::default(),
        }
    }

    fn with<T>(&self, what: impl FnOnce(&mut Authority) -> T) -> Option<T> {
        let mut authority = self.authority.lock().unwrap_or_else(PoisonError::into_inner);
        authority.as_mut().map(what)
    }

    /// A look that began then has been answered.
    pub fn looked(&self, begun_at: Time, highest: Option<u64>) {
        self.with(|authority| authority.looked(begun_at.elapsed(), highest));
    }

    /// When it looks again.
    pub fn look_again_at(&self) -> Time {
        let at = self.with(|authority| authority.look_again_at());
        Time::default() + at.unwrap_or_default()
    }
}

impl Fence for VirtualFence {
    fn claim(&self, own: Term, next: u64) -> Result<Term> {
        if !self.store.reaches(self.machine) {
            return Err(Error::Invalid("store: it cannot be reached".to_owned()));
        }
        let (claim, predecessor) = self.store.claim(self.machine, self.start, own, next)?;
        let now = self.clock.elapsed();
        let mut authority = Authority::new(claim.term, TERM_LEASE, now, predecessor);
        authority.looked(now, self.store.highest_term());
        *self.authority.lock().unwrap_or_else(PoisonError::into_inner) = Some(authority);
        Ok(Term(claim.term))
    }

    fn standing(&self, now: Duration) -> Standing {
        self.with(|authority| authority.standing(now))
            .unwrap_or(Standing::Waits)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_machine_that_took_over_once_does_not_take_over_again_from_its_successor() {
        let store = VirtualStore::default();
        store.claim(0, 1, Term(0), 1).unwrap();
        store.restored(1);
        store.claim(1, 1, Term(1), 7).unwrap();
        store.settled(1);
        store.restored(2);
        store.claim(2, 1, Term(2), 9).unwrap();
        store.settled(2);
        assert!(store.claim(1, 2, Term(2), 12).is_err() && store.claim(0, 2, Term(1), 8).is_err());
        let (claim, predecessor) = store.claim(2, 2, Term(3), 11).unwrap();
        assert_eq!((claim.term, predecessor), (4, Predecessor::Gone));
    }
}
