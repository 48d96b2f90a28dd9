//! Which waiting task goes to which free device.
//!
//! Tasks are handed out in their turn: the higher priority first, then the older job, then the older task.
//! A device whose child already holds the same job and executor is preferred, then one that holds the job.
//! A task that measures time gets its host for itself: while one waits and no host is quiet, the host with
//! the fewest attempts takes nothing new, so that it becomes quiet. A gang is placed whole or not at all;
//! the first that waits keeps what is free of its kind from those behind it, so that it is served in the
//! end. Holds last for one decision and go by turn, so no two tasks can wait for each other.
//!
//! Tasks that ask for the same stand in one line: where one finds no place, the line is done. So a decision
//! costs what is free and what is placed, however many wait.
//!
//! A gang takes as many devices as it asks for, or as many as the cluster has where that is fewer: workers that
//! are away for a moment count as there, those that were lost do not, nor devices whose rank was let go.

mod room;

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, btree_set};

use room::{Room, Slot};

use super::index::{Class, Turn};
use super::{AttemptId, Event, Now, RankRecord, State, Task, TaskId, WorkerId};

/// Hands waiting tasks to free devices.
pub fn place(state: &State, absent: &BTreeSet<WorkerId>, resting: &BTreeSet<TaskId>, now: Now) -> Vec<Event> {
    if state.index.free.is_empty() || state.index.waiting.is_empty() {
        return Vec::new();
    }
    let mut lines = Lines::new(state, resting);
    let mut room = Room::new(state, absent);
    let mut hand = Hand {
        next: state.last_attempt.next(),
        at: now.unix_ms,
        events: Vec::new(),
    };
    while let Some((line, class, task)) = lines.first(state) {
        let slots = if class.is_gang() {
            room.find_gang(class, task)
        } else {
            room.find(class, task).map(|slot| vec![slot])
        };
        match slots {
            Some(slots) => {
                slots.iter().for_each(|slot| room.take(*slot, class));
                hand.out(state, task, class, &slots);
                lines.advance(line);
            }
            None => {
                if class.is_gang() {
                    room.hold_for_gang(class);
                } else if class.exclusive {
                    room.hold_a_host(class);
                }
                lines.close();
            }
        }
    }
    hand.events
}

/// Who comes next, over all lines.
struct Lines<'a> {
    classes: Vec<(&'a Class, btree_set::Iter<'a, Turn>)>,
    heads: BinaryHeap<Reverse<(Turn, usize)>>,
    resting: &'a BTreeSet<TaskId>,
}

impl<'a> Lines<'a> {
    fn new(state: &'a State, resting: &'a BTreeSet<TaskId>) -> Self {
        let classes: Vec<_> = state
            .index
            .waiting
            .iter()
            .filter(|(class, _)| state.index.free.contains_key(&class.device_kind))
            .map(|(class, queue)| (class, queue.iter()))
            .collect();
        let mut lines = Self {
            heads: BinaryHeap::with_capacity(classes.len()),
            classes,
            resting,
        };
        for line in 0..lines.classes.len() {
            lines.enter(line);
        }
        lines
    }

    /// Lets the next of a line stand with the heads.
    fn enter(&mut self, line: usize) {
        let resting = self.resting;
        let Some((_, queue)) = self.classes.get_mut(line) else {
            return;
        };
        if let Some(turn) = queue.find(|turn| !resting.contains(&turn.task)) {
            self.heads.push(Reverse((*turn, line)));
        }
    }

    fn first(&self, state: &'a State) -> Option<(usize, &'a Class, &'a Task)> {
        let Reverse((turn, line)) = self.heads.peek()?;
        let (class, _) = self.classes.get(*line)?;
        Some((*line, class, state.task(turn.task)?))
    }

    /// The head has been served.
    fn advance(&mut self, line: usize) {
        self.heads.pop();
        self.enter(line);
    }

    /// The head cannot be served, and so nobody behind it.
    fn close(&mut self) {
        self.heads.pop();
    }
}

/// Gives out attempts.
struct Hand {
    next: AttemptId,
    at: i64,
    events: Vec<Event>,
}

impl Hand {
    fn out(&mut self, state: &State, task: &Task, class: &Class, slots: &[Slot]) {
        let mut records = Vec::with_capacity(slots.len());
        for slot in slots {
            let Some(device) = room::device_at(state, *slot) else {
                return;
            };
            records.push(RankRecord {
                attempt: self.next,
                worker: slot.0,
                device: device.info.id.clone(),
            });
            self.next = self.next.next();
        }
        if class.is_gang() {
            self.events.push(Event::GangFormed {
                task: task.id,
                generation: task.generation.saturating_add(1),
                ranks: records,
                at: self.at,
            });
            return;
        }
        for record in records {
            self.events.push(Event::AttemptStarted {
                attempt: record.attempt,
                task: task.id,
                worker: record.worker,
                device: record.device,
                at: self.at,
            });
        }
    }
}
