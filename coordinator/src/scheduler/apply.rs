//! Folding events into the state. Total: an event that does not fit changes nothing it cannot change,
//! and never panics, because a journal may have been written by another build.

mod attempt;
mod gang;
mod job;
mod worker;

use super::{Event, JobPhase, State};

/// Folds one event into the state.
pub fn apply(state: &mut State, event: &Event) {
    match event {
        Event::TermBegan { term } => {
            state.term = *term;
            state.term_starts.insert(*term, state.last_attempt);
            #[cfg(feature = "planted-bugs")]
            super::planted::forget_counters(state);
        }
        Event::JobSubmitted { .. }
        | Event::JobPaused { .. }
        | Event::JobResumed { .. }
        | Event::JobRetried { .. }
        | Event::StagesPlanned { .. }
        | Event::OutcomeReached { .. }
        | Event::JobSucceeded { .. }
        | Event::JobFailed { .. }
        | Event::JobCancelled { .. }
        | Event::PartialRemoved { .. }
        | Event::JobArchived { .. } => apply_to_job(state, event),
        Event::WorkerJoined { .. }
        | Event::WorkerReturned { .. }
        | Event::WorkerLeaving { .. }
        | Event::WorkerLost { .. }
        | Event::WorkerLeft { .. }
        | Event::WorkerForgotten { .. }
        | Event::WorkerCordoned { .. }
        | Event::WorkerUncordoned { .. }
        | Event::WorkerRestartAsked { .. } => worker::apply(state, event),
        Event::AttemptStarted {
            attempt,
            task,
            worker,
            device,
            at,
        } => attempt::started(state, *attempt, *task, *worker, device, *at),
        Event::AttemptCompleted {
            attempt, output, at, ..
        } => {
            #[cfg(feature = "planted-bugs")]
            super::planted::promote_stale(state, event);
            attempt::completed(state, *attempt, output, *at);
        }
        Event::AttemptFailed {
            attempt,
            failure,
            retry,
            ..
        } => attempt::failed(state, *attempt, failure, *retry),
        Event::AttemptLost { attempt, retry, .. } => attempt::lost(state, *attempt, *retry),
        Event::AttemptHandedBack { attempt, .. } => attempt::handed_back(state, *attempt),
        Event::AttemptStopped { attempt, .. } => attempt::stopped(state, *attempt),
        Event::GangFormed {
            task,
            generation,
            ranks,
            at,
        } => gang::formed(state, *task, *generation, ranks, *at),
        Event::RankPrepared {
            attempt,
            task,
            address,
        } => gang::prepared(state, *attempt, *task, address),
        Event::GangReleased { task, token, .. } => gang::released(state, *task, token),
        Event::RankLetGo { attempt, task, .. } => gang::let_go(state, *attempt, *task),
        Event::TaskWentOn { task, done, .. } => attempt::went_on(state, *task, *done),
        Event::GangLate { task, retry, .. } => gang::late(state, *task, *retry),
        Event::RankCompleted {
            attempt,
            task,
            output,
            ..
        } => gang::rank_completed(state, *attempt, *task, output),
        Event::GangEnded {
            task, completed, at, ..
        } => gang::ended(state, *task, *completed, *at),
    }
}

fn apply_to_job(state: &mut State, event: &Event) {
    match event {
        Event::JobSubmitted { .. } => job::submitted(state, event),
        Event::JobPaused { job, reason, at } => job::paused(state, *job, reason, *at),
        Event::JobResumed { job, .. } => job::resumed(state, *job),
        Event::JobRetried {
            job,
            request_id,
            anew,
            at,
        } => job::retried(state, *job, request_id.as_ref(), anew, *at),
        Event::StagesPlanned {
            job,
            revision,
            stages,
            ..
        } => job::planned(state, *job, *revision, stages),
        Event::OutcomeReached { job, outcome, .. } => job::outcome_reached(state, *job, outcome),
        Event::JobSucceeded { job, at } => job::succeeded(state, *job, *at),
        Event::JobFailed { job, message, at } => {
            let phase = JobPhase::Failed {
                message: message.clone(),
                at: *at,
                removed: false,
            };
            job::end(state, *job, phase);
        }
        Event::JobCancelled { job, reason, at } => {
            let phase = JobPhase::Cancelled {
                reason: reason.clone(),
                at: *at,
                removed: false,
            };
            job::end(state, *job, phase);
        }
        Event::PartialRemoved { job } => job::partial_removed(state, *job),
        Event::JobArchived { job, .. } => job::archived(state, *job),
        _ => {}
    }
}
