//! The loop's turns, and the ticks that ask for them.

use std::time::Duration;

use espalier_coordinator::service::owner::{BATCH, Request};

use super::{Doom, Waiting};
use crate::world::{Event, World};

/// A coordinator that has nothing to do is told the time this often; the service does so ten times a second.
const IDLE_TICK: Duration = Duration::from_secs(5);
/// After something happened it is told soon.
const BUSY_TICK: Duration = Duration::from_millis(500);

impl World {
    /// Registers an answer that will come of the next turn.
    pub fn expect(&mut self, machine: usize, waiting: Waiting) {
        if let Some(process) = self
            .coordinators
            .get_mut(machine)
            .and_then(|known| known.process.as_mut())
        {
            process.waiting.push(waiting);
        }
    }

    /// The loop takes what waits for it.
    ///
    /// # Errors
    /// What no run may show.
    pub fn turn(&mut self, machine: usize, life: u64) -> Result<(), String> {
        let now = self.now();
        let Some(known) = self.coordinators.get_mut(machine) else {
            return Ok(());
        };
        if known.life != life || known.paused {
            return Ok(());
        }
        let doom = known.doom.take();
        let Some(process) = known.process.as_mut() else {
            return Ok(());
        };
        process.turn_asked = false;
        let count = process.inbox.len().min(BATCH);
        let mut batch: Vec<Request> = process.inbox.drain(..count).collect();
        known.clock.set(now);
        let durable = process.owner.durable();
        let turned = process.owner.turn(&mut batch);
        // A full disk undoes a turn.
        let undone = process.owner.durable() == durable;
        // What its disk took.
        let fsync = known.clock.now() - now;
        // Without authority requests stay where they are.
        for request in batch.into_iter().rev() {
            process.inbox.push_front(request);
        }
        self.trace.step(now, "turn", machine as u64, count as u64, || {
            format!("coordinator {machine} takes {count} requests")
        });
        self.oracle.witnessed(machine)?;
        if let Err(error) = turned {
            return self.turn_failed(machine, &error.to_string());
        }
        if doom == Some(Doom::BeforeAnswers) {
            return self.kill_coordinator(machine, "after its fsync, before its answers", false);
        }
        if undone {
            self.oracle.undone(machine);
        } else {
            self.oracle.committed(machine)?;
        }
        self.take_answers(machine, fsync)?;
        self.take_messages(machine, fsync)?;
        self.take_work(machine, fsync);
        self.ask_for_time(machine, fsync);
        Ok(())
    }

    /// The next turn comes when the disk is free, and the next tick soon.
    fn ask_for_time(&mut self, machine: usize, fsync: Duration) {
        let now = self.now();
        let Some(known) = self.coordinators.get_mut(machine) else {
            return;
        };
        let life = known.life;
        let Some(process) = known.process.as_mut() else {
            return;
        };
        process.busy_until = now + fsync;
        // Without authority they wait until it has looked again.
        let may = process.owner.holds();
        if may && !process.inbox.is_empty() && !process.turn_asked {
            process.turn_asked = true;
            self.queue.at(process.busy_until, Event::Turn { machine, life });
        }
        if process.tick_at <= now {
            process.tick_at = now + BUSY_TICK;
            self.queue
                .at(process.tick_at, Event::CoordinatorTick { machine, life });
        }
    }

    /// The coordinator is told that time has passed.
    pub fn tick_coordinator(&mut self, machine: usize, life: u64) {
        let now = self.now();
        let Some(known) = self.coordinators.get_mut(machine) else {
            return;
        };
        if known.life != life {
            return;
        }
        let Some(process) = known.process.as_mut() else {
            return;
        };
        if process.tick_at > now {
            return;
        }
        process.tick_at = now + IDLE_TICK;
        self.queue
            .at(process.tick_at, Event::CoordinatorTick { machine, life });
        self.ask(machine, Request::Tick);
    }

    /// A turn failed, so that nothing may be promised any more: the process ends.
    fn turn_failed(&mut self, machine: usize, error: &str) -> Result<(), String> {
        let power = self
            .coordinators
            .get(machine)
            .is_some_and(|known| known.disk.is_off());
        self.kill_coordinator(machine, error, power)
    }
}
