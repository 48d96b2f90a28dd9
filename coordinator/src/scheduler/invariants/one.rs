//! The rules for one job, task, attempt, worker or host.

use crate::scheduler::{Attempt, AttemptId, Gang, Job, Name, RankPhase, State, Task, TaskPhase, Worker};

/// A job's counts, and what an ended one may still have.
pub fn job(state: &State, job: &Job) -> Result<(), String> {
    for stage in &job.stages {
        if stage.done > stage.tasks.len() {
            return Err(format!(
                "{}, {}: more tasks done than there are",
                job.id, stage.name
            ));
        }
    }
    if job.planned > job.results {
        return Err(format!("{} was planned beyond its results", job.id));
    }
    let running = state.attempts_of(job.id).find(|attempt| !attempt.cancelled);
    match running {
        Some(attempt) if job.phase.is_terminal() => Err(format!(
            "{} has ended but attempt {} was not told",
            job.id, attempt.lease.attempt
        )),
        _ => Ok(()),
    }
}

/// A task, its attempts and its place in line agree.
pub fn task(state: &State, task: &Task) -> Result<(), String> {
    let Some(job) = state.job(task.job) else {
        return Err(format!("task {} has no job", task.id));
    };
    if job
        .stages
        .get(task.stage)
        .is_none_or(|stage| stage.kind != task.kind)
    {
        return Err(format!("task {} is of no stage of its kind", task.id));
    }
    in_line(state, task)?;
    let open = matches!(
        task.phase,
        TaskPhase::Waiting | TaskPhase::Running { .. } | TaskPhase::Gang(_)
    );
    if open && job.phase.is_terminal() {
        return Err(format!("task {} is open in an ended {}", task.id, job.id));
    }
    match &task.phase {
        TaskPhase::Running { attempt } => running(state, task, *attempt),
        TaskPhase::Gang(gang) => whole(state, task, gang),
        TaskPhase::Waiting | TaskPhase::Done { .. } | TaskPhase::Failed | TaskPhase::Abandoned => {
            // Attempts are few: a task that is over has none that was not told to stop.
            let live = state.attempts_of(task.job);
            let mut live = live.filter(|attempt| attempt.task == task.id && !attempt.cancelled);
            match live.next() {
                Some(attempt) => Err(format!(
                    "task {} is {} while attempt {} runs it",
                    task.id,
                    word(&task.phase),
                    attempt.lease.attempt
                )),
                None => Ok(()),
            }
        }
    }
}

fn word(phase: &TaskPhase) -> &'static str {
    match phase {
        TaskPhase::Waiting => "waiting",
        TaskPhase::Running { .. } => "running",
        TaskPhase::Gang(_) => "a gang",
        TaskPhase::Done { .. } => "done",
        TaskPhase::Failed => "failed",
        TaskPhase::Abandoned => "abandoned",
    }
}

/// A task stands in exactly one line while it waits, and in none otherwise.
fn in_line(state: &State, task: &Task) -> Result<(), String> {
    let Some((class, turn)) = state.turn(task) else {
        return Err(format!("task {} has no turn", task.id));
    };
    let lined_up = state
        .index
        .waiting
        .get(&class)
        .is_some_and(|queue| queue.contains(&turn));
    let held = state
        .index
        .held
        .get(&task.job)
        .is_some_and(|held| held.contains(&task.id));
    let waits = matches!(task.phase, TaskPhase::Waiting);
    let paused = state.is_held(task.job);
    if (lined_up, held) == (waits && !paused, waits && paused) {
        return Ok(());
    }
    Err(format!(
        "task {} is {} but in line: {lined_up}, held: {held}",
        task.id,
        word(&task.phase)
    ))
}

fn running(state: &State, task: &Task, attempt: AttemptId) -> Result<(), String> {
    if task.needs.ranks > 1 {
        return Err(format!(
            "task {} needs a gang but attempt {attempt} runs it alone",
            task.id
        ));
    }
    match state.attempt(attempt) {
        Some(held) if held.task == task.id && !held.cancelled => Ok(()),
        _ => Err(format!(
            "task {} runs by attempt {attempt}, which does not",
            task.id
        )),
    }
}

/// A gang is whole: each rank holds a device or completed, and it was released only when all were
/// prepared. One that is ending has no rank that was not told to stop.
fn whole(state: &State, task: &Task, gang: &Gang) -> Result<(), String> {
    let broken = |what: String| {
        Err(format!(
            "task {}, generation {}: {what}",
            task.id, gang.generation
        ))
    };
    let (ranks, most) = (gang.ranks.len(), task.needs.ranks);
    let formed = u32::try_from(ranks).ok();
    let fits =
        |ranks: u32| (1..=most).contains(&ranks) && ranks.is_multiple_of(task.needs.rank_multiple.max(1));
    if !formed.is_some_and(fits) || formed != Some(task.formed_ranks) {
        return broken(format!(
            "{ranks} ranks of {most}, formed with {}",
            task.formed_ranks
        ));
    }
    for rank in &gang.ranks {
        let held = state.attempt(rank.attempt).filter(|held| !held.let_go);
        let live = matches!(rank.phase, RankPhase::Preparing | RankPhase::Prepared);
        if live != held.is_some() {
            return broken(format!(
                "attempt {} is {:?} but holds: {}",
                rank.attempt, rank.phase, !live
            ));
        }
        let told = held.is_some_and(|held| held.cancelled);
        if live && told != gang.ending {
            return broken(format!(
                "ending: {}, attempt {} told: {told}",
                gang.ending, rank.attempt
            ));
        }
        let absent = rank.phase == RankPhase::Ended;
        if absent && !gang.ending {
            return broken(format!("attempt {} is gone and the others go on", rank.attempt));
        }
        if gang.released && !gang.ending && rank.address.is_empty() {
            return broken(format!(
                "released while attempt {} was not prepared",
                rank.attempt
            ));
        }
    }
    Ok(())
}

/// An attempt's worker lives and its device is its own.
pub fn attempt(state: &State, attempt: &Attempt) -> Result<(), String> {
    let id = attempt.lease.attempt;
    let Some(worker) = state.worker(attempt.worker) else {
        return Err(format!("attempt {id} has no worker"));
    };
    if worker.epoch != attempt.lease.epoch {
        return Err(format!("attempt {id} outlives its worker's incarnation"));
    }
    let device = worker
        .devices
        .iter()
        .find(|device| device.info.id == attempt.device);
    if device.is_none_or(|device| device.attempt != Some(id)) {
        return Err(format!("attempt {id} does not hold its device"));
    }
    let of_job = state.index.of_job.get(&attempt.job);
    let of_worker = state.index.of_worker.get(&attempt.worker);
    let known = [of_job, of_worker]
        .iter()
        .all(|set| set.is_some_and(|set| set.contains(&id)));
    if !known {
        return Err(format!("attempt {id} is missing from an index"));
    }
    Ok(())
}

/// A worker's devices are held by attempts that exist, and on offer exactly when they are free.
pub fn worker(state: &State, worker: &Worker) -> Result<(), String> {
    let running = state.attempts_on(worker.id).next();
    if let Some(attempt) = running
        && worker.standing.is_gone()
    {
        return Err(format!(
            "attempt {} outlives worker {}",
            attempt.lease.attempt, worker.name
        ));
    }
    for (place, device) in worker.devices.iter().enumerate() {
        let offered = state.index.free.get(&device.info.kind);
        let offered = offered.is_some_and(|free| free.contains(&(worker.id, place)));
        if offered != (worker.is_usable() && device.attempt.is_none()) {
            return Err(format!(
                "device {} of {} is on offer: {offered}",
                device.info.id, worker.name
            ));
        }
        if let Some(attempt) = device.attempt
            && state.attempt(attempt).is_none()
        {
            return Err(format!("a device of {} is held by ended {attempt}", worker.name));
        }
    }
    Ok(())
}

/// Nothing runs beside a task that measures time.
pub fn host(state: &State, host: &Name) -> Result<(), String> {
    let Some(used) = state.index.hosts.get(host) else {
        return Ok(());
    };
    if used.exclusive == 0 {
        return Ok(());
    }
    let on_host = state.attempts().filter(|attempt| {
        state
            .worker(attempt.worker)
            .is_some_and(|worker| worker.host == *host)
    });
    let mut tasks: Vec<_> = on_host.map(|attempt| attempt.task).collect();
    tasks.dedup();
    if tasks.len() > 1 {
        return Err(format!("host {host} measures while something else runs"));
    }
    Ok(())
}
