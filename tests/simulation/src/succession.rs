//! One coordinator after another: looks at the store, shipping, and taking over on another machine.
//!
//! Shipping is stood in for by what it leads to: of each file of the journal, so many first bytes as were
//! durable at most an interval ago.

use std::time::Duration;

use espalier_coordinator::term::TERM_LEASE;

use crate::clock::Time;
use crate::faults::Kind;
use crate::network::Place;
use crate::store::{SHIPPING, Shipped};
use crate::world::{Event, World};

impl World {
    /// A coordinator will look at the terms when its authority wants it.
    pub fn look_later(&mut self, machine: usize, life: u64) {
        let now = self.now();
        let known = self.coordinators.get(machine).filter(|known| known.life == life);
        let Some(process) = known.and_then(|known| known.process.as_ref()) else {
            return;
        };
        if !self.plan.fenced {
            return;
        }
        // A store that does not answer is asked again soon, but not at once.
        let at = process.fence.look_again_at().max(now + TERM_LEASE / 20);
        self.queue.at(at, Event::Looks { machine, life });
    }

    /// A coordinator looks at the terms. What it sees is as old as its question.
    pub fn look(&mut self, machine: usize, life: u64) {
        let now = self.now();
        let Some(known) = self.coordinators.get(machine).filter(|known| known.life == life) else {
            return;
        };
        if known.process.is_none() {
            return;
        }
        if known.paused || !self.store.reaches(machine) {
            self.queue.after(TERM_LEASE / 20, Event::Looks { machine, life });
            return;
        }
        let highest = self.store.highest_term();
        let slowest = if self.dice.chance(0.02) { 15_000 } else { 300 };
        let takes = self
            .dice
            .scale(Duration::from_millis(2), Duration::from_millis(slowest));
        self.queue.after(
            takes,
            Event::Looked {
                machine,
                life,
                begun_at: now,
                highest,
            },
        );
    }

    /// A look was answered.
    pub fn looked(&mut self, machine: usize, life: u64, begun_at: Time, highest: Option<u64>) {
        let known = self.coordinators.get(machine).filter(|known| known.life == life);
        if let Some(process) = known.and_then(|known| known.process.as_ref()) {
            process.fence.looked(begun_at, highest);
            self.look_later(machine, life);
            self.ask_again(machine);
        }
    }

    /// A journal is shipped.
    pub fn ship(&mut self, machine: usize, life: u64) {
        let now = self.now();
        let Some(known) = self.coordinators.get(machine).filter(|known| known.life == life) else {
            return;
        };
        if known.process.is_none() || self.plan.machines == 1 {
            return;
        }
        if self.store.reaches(machine) && !known.paused {
            let copied = known.disk.copied();
            self.store.ship(machine, Shipped { at: now, copied });
            self.oracle.shipped(machine);
        }
        self.queue.after(SHIPPING, Event::Ships { machine, life });
    }

    /// A machine is gone, disk and all.
    pub(crate) fn lose_machine(&mut self, machine: usize) -> Result<(), String> {
        self.kill_coordinator(machine, "its machine is gone", true)?;
        if let Some(known) = self.coordinators.get_mut(machine) {
            known.supervised = false;
        }
        Ok(())
    }

    /// A coordinator is cut off from the store, from users, and from some workers.
    pub(crate) fn isolate(&mut self, machine: usize, workers: &[usize]) {
        self.store.cut_off(machine);
        let there = Place::Coordinator(machine);
        for (from, to) in [(there, Place::User), (Place::User, there)] {
            self.network.cut(from, to);
        }
        for worker in workers {
            let here = Place::Worker(*worker);
            self.network.cut(here, there);
            self.network.cut(there, here);
            self.was_cut(*worker, machine);
            self.ask_for_wake(*worker);
        }
    }

    /// Half-way through a succession the new one starts.
    pub(crate) fn take_over_in(&mut self, fault: usize) -> Result<(), String> {
        match self.faults.get(fault).map(|fault| fault.kind.clone()) {
            Some(Kind::Succession { to, .. }) => self.take_over(to),
            _ => Ok(()),
        }
    }

    /// A coordinator starts on another machine from what was shipped; the service's name leads there.
    pub(crate) fn take_over(&mut self, to: usize) -> Result<(), String> {
        let from = self.address;
        let shipped = self.store.shipped(from);
        let (Some(old), Some(new)) = (self.coordinators.get(from), self.coordinators.get(to)) else {
            return Ok(());
        };
        let now = self.now();
        new.clock.set(now);
        old.disk.copy(&shipped.copied, &new.disk);
        // It lies there whoever goes on from it.
        let copied = new.disk.copied();
        self.store.ship(to, Shipped { copied, ..shipped });
        self.store.restored(to);
        self.trace.step(now, "takes over", from as u64, to as u64, || {
            format!("machine {to} takes over from {from} as of {}", shipped.at)
        });
        self.oracle.takes_over(from, to)?;
        self.address = to;
        self.start_coordinator(to)
    }

    /// The old coordinator is back among the others.
    pub(crate) fn rejoin(&mut self, to: usize, workers: &[usize]) {
        // The machine before, unless faults overtook each other.
        let machine = to.saturating_sub(1);
        self.store.let_in(machine);
        let there = Place::Coordinator(machine);
        for (from, to) in [(there, Place::User), (Place::User, there)] {
            self.network.heal(from, to);
        }
        for worker in workers {
            let here = Place::Worker(*worker);
            self.network.heal(here, there);
            self.network.heal(there, here);
            self.go_on(*worker, machine);
            self.ask_for_wake(*worker);
        }
    }

    /// What waited for authority is taken up again.
    fn ask_again(&mut self, machine: usize) {
        let now = self.now();
        let Some(known) = self.coordinators.get_mut(machine) else {
            return;
        };
        let (life, paused) = (known.life, known.paused);
        let Some(process) = known.process.as_mut() else {
            return;
        };
        if process.inbox.is_empty() || process.turn_asked || paused {
            return;
        }
        process.turn_asked = true;
        let at = process.busy_until.max(now);
        self.queue.at(at, Event::Turn { machine, life });
    }
}
