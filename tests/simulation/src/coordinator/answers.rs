//! What comes of a turn: answers, messages to workers and slow work set out when the disk has answered.

use std::time::Duration;

use tokio::sync::oneshot;
use tonic::Status;

use super::{SlowWork, Waiting};
use crate::user::Answer;
use crate::wire::{Downward, StreamId};
use crate::world::{Event, World};

impl World {
    /// Answers set out.
    pub(super) fn take_answers(&mut self, machine: usize, fsync: Duration) -> Result<(), String> {
        let process = self
            .coordinators
            .get_mut(machine)
            .and_then(|known| known.process.as_mut());
        let Some(process) = process else { return Ok(()) };
        for waiting in std::mem::take(&mut process.waiting) {
            self.take_answer(machine, fsync, waiting)?;
        }
        Ok(())
    }

    fn take_answer(&mut self, machine: usize, fsync: Duration, waiting: Waiting) -> Result<(), String> {
        match waiting {
            Waiting::Greeting { stream, mut answer } => match answer.try_recv() {
                Ok(answer) => self.greeted(stream, fsync, answer),
                Err(oneshot::error::TryRecvError::Empty) => {
                    self.expect(machine, Waiting::Greeting { stream, answer });
                }
                Err(oneshot::error::TryRecvError::Closed) => {
                    self.greeted(stream, fsync, Err(Status::unavailable("the loop has no answer")));
                }
            },
            Waiting::Heartbeat { mut call, mut answer } => match answer.try_recv() {
                Ok(answer) => {
                    call.answer = Some(answer);
                    self.answer_heartbeat(*call, fsync);
                }
                Err(oneshot::error::TryRecvError::Empty) => {
                    self.expect(machine, Waiting::Heartbeat { call, answer });
                }
                Err(oneshot::error::TryRecvError::Closed) => {}
            },
            Waiting::Credit { mut call, mut answer } => match answer.try_recv() {
                Ok(Ok(said)) if said.superseded.is_empty() && said.term == call.request.term => {}
                Ok(answer) => {
                    call.answer = Some(answer);
                    self.answer_heartbeat(*call, fsync);
                }
                Err(oneshot::error::TryRecvError::Empty) => {
                    self.expect(machine, Waiting::Credit { call, answer });
                }
                Err(oneshot::error::TryRecvError::Closed) => {}
            },
            Waiting::Submission { errand, mut answer } => match answer.try_recv() {
                Ok(answer) => self.submission_answered(machine, errand, fsync, answer),
                Err(oneshot::error::TryRecvError::Empty) => {
                    self.expect(machine, Waiting::Submission { errand, answer });
                }
                Err(oneshot::error::TryRecvError::Closed) => {}
            },
            Waiting::Worker { errand, mut answer } => match answer.try_recv() {
                Ok(answer) => self.answer_user(machine, errand, fsync, answer.map(|_| Answer::Done)),
                Err(oneshot::error::TryRecvError::Empty) => {
                    self.expect(machine, Waiting::Worker { errand, answer });
                }
                Err(oneshot::error::TryRecvError::Closed) => {}
            },
            Waiting::Job { errand, mut answer } => match answer.try_recv() {
                Ok(answer) => self.job_answered(machine, errand, fsync, answer),
                Err(oneshot::error::TryRecvError::Empty) => {
                    self.expect(machine, Waiting::Job { errand, answer })
                }
                Err(oneshot::error::TryRecvError::Closed) => {}
            },
        }
        Ok(())
    }

    /// Messages to workers set out; streams that the loop let go of end.
    pub(super) fn take_messages(&mut self, machine: usize, fsync: Duration) -> Result<(), String> {
        let life = self.coordinators.get(machine).map(|known| known.life);
        let held: Vec<StreamId> = self
            .streams
            .iter()
            .filter(|(_, stream)| {
                stream.machine == machine
                    && Some(stream.coordinator_life) == life
                    && stream.coordinator_end.is_some()
            })
            .map(|(id, _)| *id)
            .collect();
        for id in held {
            loop {
                let end = self
                    .streams
                    .get_mut(&id)
                    .and_then(|stream| stream.coordinator_end.as_mut());
                let Some(end) = end else { break };
                match end.outbox.try_recv() {
                    Ok(Ok(message)) => {
                        self.oracle.sent(machine, &message)?;
                        self.send_down(id, fsync, Downward::Message(Box::new(message)));
                    }
                    Ok(Err(_)) => {}
                    Err(_) if end.stop.is_cancelled() => {
                        if let Some(stream) = self.streams.get_mut(&id) {
                            stream.coordinator_end = None;
                        }
                        self.send_down(id, fsync, Downward::End);
                        break;
                    }
                    Err(_) => break,
                }
            }
        }
        Ok(())
    }

    /// Slow work begins.
    pub(super) fn take_work(&mut self, machine: usize, fsync: Duration) {
        let Some(known) = self.coordinators.get_mut(machine) else {
            return;
        };
        let life = known.life;
        let Some(process) = known.process.as_mut() else {
            return;
        };
        for work in process.beside.take() {
            process.next_work += 1;
            let id = process.next_work;
            process.work.insert(id, SlowWork(work));
            let takes = self.dice.scale(Duration::from_millis(5), Duration::from_secs(5));
            self.queue.after(
                fsync + takes,
                Event::BesideDone {
                    machine,
                    life,
                    work: id,
                },
            );
        }
    }

    /// Slow work is done: the loop gets its answer.
    pub fn beside_done(&mut self, machine: usize, life: u64, work: u64) {
        let Some(known) = self.coordinators.get_mut(machine) else {
            return;
        };
        if known.life != life {
            return;
        }
        let Some(done) = known
            .process
            .as_mut()
            .and_then(|process| process.work.remove(&work))
        else {
            return;
        };
        let answer = done.0();
        self.ask(machine, answer);
    }
}
