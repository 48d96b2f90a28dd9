//! The watch over one running attempt: passes on what its child says, and notices when it ends, hangs, or
//! does not stop when told to.

use std::time::Duration;

use espalier_proto::task::{Failure, FailureKind, Progress};
use espalier_proto::v1::Lease;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};

use super::Command;
use crate::agent::core::{DeviceEvent, Ended};
use crate::agent::options::ChildOptions;
use crate::agent::process::{FromChild, NumberedLine, Process};
use crate::child::protocol::{Reply, Request};

/// A timer that fires this much too late tells that this process itself was stopped meanwhile.
const STALL: Duration = Duration::from_secs(2);

/// A rank that is told to stop has nothing to save: the others wait for its device.
const RANK_STOP_TIMEOUT: Duration = Duration::from_secs(1);

/// A larger output would not fit the coordinator's messages.
const OUTPUT_BYTES: usize = espalier_proto::PAYLOAD_LIMIT_BYTES;

/// How a watch ended.
pub(super) enum Outcome {
    Ended(Ended),
    Failed(Failure),
    Garbled(String),
    Crashed,
    Hung,
    Killed,
    AgentGone,
}

/// A watch over one attempt.
pub(super) struct Watch<'a> {
    lease: Lease,
    options: &'a ChildOptions,
    events: &'a mpsc::Sender<DeviceEvent>,
    hang: Instant,
    /// When a child that was told to stop is killed.
    stop: Option<Instant>,
    stopping: bool,
    stop_timeout: Duration,
    /// A rank that waits for the others of its gang makes no progress, and should not.
    waits_for_release: bool,
    /// Lines of the child's log that belong to attempts before.
    lines_before: u64,
}

impl<'a> Watch<'a> {
    pub(super) fn new(
        lease: Lease,
        is_rank: bool,
        lines_before: u64,
        options: &'a ChildOptions,
        events: &'a mpsc::Sender<DeviceEvent>,
    ) -> Self {
        Self {
            lease,
            options,
            events,
            hang: Instant::now() + options.hang_timeout,
            stop: None,
            stopping: false,
            stop_timeout: match is_rank {
                true => options.stop_timeout.min(RANK_STOP_TIMEOUT),
                false => options.stop_timeout,
            },
            waits_for_release: is_rank,
            lines_before,
        }
    }

    pub(super) async fn until_it_ends(
        mut self,
        process: &mut Process,
        commands: &mut mpsc::Receiver<Command>,
    ) -> Outcome {
        loop {
            let deadline = match self.stop {
                Some(stop) => stop.min(self.hang),
                None => self.hang,
            };
            let outcome = tokio::select! {
                // A child that never stops talking must not drown a command; and what it has said counts before
                // any timer, for this process may have been stopped meanwhile.
                biased;
                command = commands.recv() => match command {
                    None => Some(Outcome::AgentGone),
                    Some(command) => self.obey(command, process),
                },
                said = process.next() => self.take(said),
                () = sleep_until(deadline) => self.expire(deadline),
            };
            if let Some(outcome) = outcome {
                if matches!(outcome, Outcome::Ended(_) | Outcome::Failed(_)) {
                    self.pass_last_lines(process).await;
                }
                return outcome;
            }
        }
    }

    async fn pass_last_lines(&self, process: &mut Process) {
        let lines = process.last_lines().await;
        pass_log(self.lease, self.lines_before, lines, self.events);
        let (passed, written) = (process.lines_passed(), process.lines_written());
        if written > passed {
            // The last ones found no room: nothing that follows would tell.
            let first_line = written.saturating_sub(self.lines_before) + 1;
            let lease = self.lease;
            let _ = self.events.try_send(DeviceEvent::Log {
                lease,
                first_line,
                lines: Vec::new(),
            });
        }
    }

    fn take(&mut self, said: Option<FromChild>) -> Option<Outcome> {
        match said {
            None | Some(FromChild::Garbled(_)) if self.stopping => Some(Outcome::Killed),
            None => Some(Outcome::Crashed),
            Some(FromChild::Garbled(reason)) => Some(Outcome::Garbled(reason)),
            Some(FromChild::Log(lines)) => {
                pass_log(self.lease, self.lines_before, lines, self.events);
                None
            }
            Some(FromChild::Reply(reply)) => {
                self.hang = Instant::now() + self.options.hang_timeout;
                self.take_reply(reply)
            }
        }
    }

    fn take_reply(&self, reply: Reply) -> Option<Outcome> {
        let lease = self.lease;
        match reply {
            Reply::Progress { attempt, progress } if attempt == lease.attempt => {
                pass_progress(lease, &progress, self.events);
                None
            }
            // Its coming is all it says.
            Reply::Alive { attempt } if attempt == lease.attempt => None,
            Reply::Prepared { attempt, address } if attempt == lease.attempt => {
                let prepared = DeviceEvent::Prepared { lease, address };
                // An agent that is too busy for this one would never release its gang.
                match self.events.try_send(prepared) {
                    Ok(()) => None,
                    Err(_) => Some(Outcome::Failed(Failure {
                        kind: FailureKind::Error,
                        message: "the agent has no room for news of its devices".to_owned(),
                    })),
                }
            }
            Reply::Output { attempt, output } if attempt == lease.attempt => {
                Some(match serde_json::to_vec(&output) {
                    Ok(json) if json.len() > OUTPUT_BYTES => Outcome::Failed(Failure {
                        kind: FailureKind::Invalid,
                        message: format!(
                            "the task's output is {} bytes of JSON, expected at most {OUTPUT_BYTES}: ask less of it",
                            json.len()
                        ),
                    }),
                    Ok(json) => Outcome::Ended(Ended::Output(json)),
                    Err(error) => Outcome::Failed(Failure {
                        kind: FailureKind::Error,
                        message: format!("the output cannot be written as JSON: {error}"),
                    }),
                })
            }
            Reply::Failure { attempt, failure } if attempt == lease.attempt => Some(Outcome::Failed(failure)),
            Reply::Stopped { attempt } if attempt == lease.attempt => Some(Outcome::Ended(Ended::Stopped)),
            stale => {
                tracing::warn!(?stale, "a reply about another attempt is left out");
                None
            }
        }
    }

    fn obey(&mut self, command: Command, process: &mut Process) -> Option<Outcome> {
        let attempt = self.lease.attempt;
        let request = match command {
            Command::Stop { lease, checkpoint } if lease == self.lease => {
                self.stopping = true;
                // One that writes a checkpoint takes its time: the agent's drain timeout bounds it.
                if !checkpoint {
                    self.stop = Some(Instant::now() + self.stop_timeout);
                }
                Request::Cancel { attempt, checkpoint }
            }
            Command::Release {
                lease,
                communicator,
                addresses,
            } if lease == self.lease => {
                self.waits_for_release = false;
                self.hang = Instant::now() + self.options.hang_timeout;
                Request::Release {
                    attempt,
                    communicator,
                    addresses,
                }
            }
            Command::Run(run) => {
                tracing::error!(attempt = run.lease.attempt, "a busy device was given an attempt");
                return None;
            }
            Command::Stop { .. } | Command::Release { .. } | Command::Replace => return None,
        };
        match process.send(&request) {
            Ok(()) => None,
            Err(_) if self.stopping => Some(Outcome::Killed),
            Err(_) => Some(Outcome::Crashed),
        }
    }

    /// What a timer means that was set for `deadline`.
    fn expire(&mut self, deadline: Instant) -> Option<Outcome> {
        let now = Instant::now();
        if self.stop.is_some_and(|stop| stop <= now) {
            return Some(Outcome::Killed);
        }
        if self.waits_for_release || now.duration_since(deadline) > STALL {
            self.hang = now + self.options.hang_timeout;
            return None;
        }
        Some(Outcome::Hung)
    }
}

/// Passes lines of a log on, with their numbers within the attempt: those of the child less the `before` of
/// attempts before.
pub(super) fn pass_log(
    lease: Lease,
    before: u64,
    lines: Vec<NumberedLine>,
    events: &mpsc::Sender<DeviceEvent>,
) {
    let mut rest = lines.into_iter().peekable();
    while let Some((number, line)) = rest.next() {
        let mut lines = vec![line];
        while let Some((_, line)) = rest.next_if(|(next, _)| *next == number + lines.len() as u64) {
            lines.push(line);
        }
        let first_line = number.saturating_sub(before);
        // Lossy by design: a log never holds work up.
        let _ = events.try_send(DeviceEvent::Log {
            lease,
            first_line,
            lines,
        });
    }
}

fn pass_progress(lease: Lease, progress: &Progress, events: &mpsc::Sender<DeviceEvent>) {
    if let Ok(progress_json) = serde_json::to_vec(progress) {
        // Lossy by design: the next one says more.
        let _ = events.try_send(DeviceEvent::Progress { lease, progress_json });
    }
}
