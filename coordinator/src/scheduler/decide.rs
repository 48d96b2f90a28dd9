//! The rules: what follows from a command in a state.

mod attempt;
mod job;
mod worker;

use super::{Command, Event, Now, Rejection, State, placement};

type Decision = Result<Vec<Event>, Rejection>;

/// Says what a command leads to. No events and no rejection: it changes nothing, or nothing any more.
///
/// # Errors
/// When the command cannot be followed; nothing has changed.
pub fn decide(state: &State, command: Command, now: Now) -> Decision {
    match command {
        Command::BeginTerm => Ok(vec![Event::TermBegan {
            term: state.term.next(),
        }]),
        Command::BeginTermAt { term } if term > state.term => Ok(vec![Event::TermBegan { term }]),
        Command::BeginTermAt { term } => Err(Rejection::Invalid(format!(
            "term {} cannot begin after term {}",
            term.0, state.term.0
        ))),
        command @ (Command::Submit { .. }
        | Command::Cancel { .. }
        | Command::Pause { .. }
        | Command::Resume { .. }
        | Command::Retry { .. }
        | Command::Archived { .. }
        | Command::StagesPlanned { .. }
        | Command::OutcomeReached { .. }
        | Command::OutcomeWritten { .. }
        | Command::JobBroken { .. }
        | Command::PartialRemoved { .. }) => job::decide(state, command, now),
        command @ (Command::Introduce(_)
        | Command::Leave { .. }
        | Command::Cordon { .. }
        | Command::Uncordon { .. }
        | Command::Drain { .. }
        | Command::RestartWorker { .. }
        | Command::WorkerSilent { .. }
        | Command::Forget { .. }) => worker::decide(state, command, now),
        Command::Complete {
            worker,
            lease,
            output,
        } => attempt::complete(state, worker, lease, output, now),
        Command::Fail {
            worker,
            lease,
            failure,
        } => attempt::fail(state, worker, lease, failure, now),
        Command::Stopped { worker, lease } => attempt::stopped(state, worker, lease, now),
        Command::Prepared {
            worker,
            lease,
            address,
            token,
        } => attempt::prepared(state, worker, lease, (address, token), now),
        Command::WentOn { worker, lease, done } => attempt::went_on(state, worker, lease, done, now),
        Command::LetGo { attempt } => Ok(attempt::let_go(state, attempt, now)),
        Command::GangLate { task, generation } => Ok(attempt::gang_late(state, task, generation, now)),
        Command::Dispatch { absent, resting } => Ok(placement::place(state, &absent, &resting, now)),
    }
}
