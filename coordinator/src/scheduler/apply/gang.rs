//! What happens to the ranks of a task that run together.

use espalier_proto::task::FailureKind;

use super::attempt::{count_done, mark_started, release, seize};
use super::job::{line_up, step_out};
use crate::scheduler::{
    AttemptId, Gang, GangPlace, Payload, Rank, RankPhase, RankRecord, State, TaskId, TaskPhase, Token,
};

pub fn formed(state: &mut State, id: TaskId, generation: u64, records: &[RankRecord], at: i64) {
    if !state.tasks.contains_key(&id) {
        return;
    }
    step_out(state, id);
    let ranks = u32::try_from(records.len()).unwrap_or(u32::MAX);
    let rank = |record: &RankRecord| Rank {
        attempt: record.attempt,
        phase: RankPhase::Preparing,
        address: String::new(),
    };
    if let Some(task) = state.task_mut(id) {
        task.generation = generation;
        task.formed_ranks = ranks;
        task.phase = TaskPhase::Gang(Box::new(Gang {
            generation,
            ranks: records.iter().map(rank).collect(),
            released: false,
            token: Token::default(),
            ending: false,
            output: None,
        }));
    }
    mark_started(state, id, at);
    for (rank, record) in (0..).zip(records) {
        let place = GangPlace {
            generation,
            rank,
            ranks,
        };
        seize(
            state,
            record.attempt,
            id,
            record.worker,
            &record.device,
            Some(place),
            at,
        );
    }
}

fn gang_mut(state: &mut State, task: TaskId) -> Option<&mut Gang> {
    match &mut state.task_mut(task)?.phase {
        TaskPhase::Gang(gang) => Some(gang),
        _ => None,
    }
}

pub fn prepared(state: &mut State, attempt: AttemptId, task: TaskId, address: &str) {
    let Some(rank) = gang_mut(state, task).and_then(|gang| gang.rank_mut(attempt)) else {
        return;
    };
    if rank.phase == RankPhase::Preparing {
        rank.phase = RankPhase::Prepared;
        address.clone_into(&mut rank.address);
    }
}

pub fn released(state: &mut State, task: TaskId, token: &Token) {
    if let Some(gang) = gang_mut(state, task) {
        gang.released = true;
        gang.token = token.clone();
    }
}

/// Counts a hang against the task and ends the generation.
pub fn late(state: &mut State, id: TaskId, retry: bool) {
    let Some(gang) = gang_mut(state, id) else {
        return;
    };
    let ranks = gang.ranks.len();
    let is_late = |rank: &&Rank| rank.phase == RankPhase::Preparing;
    let late = gang.ranks.iter().filter(is_late).count();
    let first = gang.ranks.iter().find(is_late).map(|rank| rank.attempt);
    let worker = first
        .and_then(|attempt| state.attempts.get(&attempt))
        .map(|held| held.worker);
    if let Some(task) = state.task_mut(id) {
        let trouble = task.trouble_mut();
        trouble.failures.count(FailureKind::Hung);
        trouble.last_failure = Some(format!("{late} of {ranks} ranks were not ready in time"));
        trouble.failed_on = worker.or(trouble.failed_on);
    }
    break_up(state, id, retry);
}

pub fn rank_completed(state: &mut State, attempt: AttemptId, task: TaskId, output: &Payload) {
    let Some(ended) = release(state, attempt) else {
        return;
    };
    if let Some(worker) = state.workers.get_mut(&ended.worker) {
        worker.failed_in_a_row.clear();
    }
    let Some(gang) = gang_mut(state, task) else {
        return;
    };
    let is_first = gang.ranks.first().is_some_and(|first| first.attempt == attempt);
    if is_first {
        gang.output = Some(output.clone());
    }
    if let Some(rank) = gang.rank_mut(attempt) {
        rank.phase = RankPhase::Completed;
        state.index.completed.insert(attempt, task);
    }
}

/// A rank ended otherwise than well.
pub fn rank_ended(state: &mut State, attempt: AttemptId, task: TaskId) {
    if let Some(rank) = gang_mut(state, task).and_then(|gang| gang.rank_mut(attempt)) {
        rank.phase = RankPhase::Ended;
    }
}

/// A rank that its gang does not wait for any more.
pub fn let_go(state: &mut State, attempt: AttemptId, task: TaskId) {
    if let Some(held) = state.attempts.get_mut(&attempt) {
        held.let_go = true;
    }
    rank_ended(state, attempt, task);
}

/// Ends a generation: every other rank is to stop. Without `retry` the task has failed for good.
pub fn break_up(state: &mut State, id: TaskId, retry: bool) {
    let Some(gang) = gang_mut(state, id) else {
        return;
    };
    gang.ending = true;
    let live: Vec<AttemptId> = gang.live().collect();
    if let Some(task) = state.tasks.get(&id) {
        state.index.remove_completed(task);
    }
    if let Some(gang) = gang_mut(state, id) {
        for rank in &mut gang.ranks {
            if rank.phase == RankPhase::Completed {
                rank.phase = RankPhase::Ended;
            }
        }
        gang.output = None;
    }
    for attempt in live {
        if let Some(attempt) = state.attempts.get_mut(&attempt) {
            attempt.cancelled = true;
        }
    }
    if !retry && let Some(task) = state.task_mut(id) {
        task.phase = TaskPhase::Failed;
    }
}

pub fn ended(state: &mut State, id: TaskId, completed: bool, at: i64) {
    let Some(gang) = gang_mut(state, id) else {
        return;
    };
    if !completed {
        if let Some(task) = state.task_mut(id) {
            task.phase = TaskPhase::Waiting;
        }
        line_up(state, id);
        return;
    }
    let (Some(output), Some(first)) = (gang.output.take(), gang.ranks.first()) else {
        return;
    };
    let attempt = first.attempt;
    if let Some(task) = state.task_mut(id) {
        task.phase = TaskPhase::Done { attempt, output };
    }
    count_done(state, id, at);
}
