//! The rules: what follows from a command in a state.

use std::collections::HashSet;

use super::{
    Attempt, AttemptId, Budget, Command, Event, Introduction, JobId, JobPhase, Lease, Now, Payload,
    Rejection, StagePlan, StageRecord, Standing, State, TaskId, TaskPhase, TaskRecord, WorkerId, placement,
};

type Decision = Result<Vec<Event>, Rejection>;

/// Says what a command leads to. No events and no rejection: it changes nothing, or nothing any more.
pub fn decide(state: &State, command: Command, now: Now) -> Decision {
    match command {
        Command::BeginTerm => Ok(vec![Event::TermBegan {
            term: state.term.next(),
        }]),
        Command::Submit {
            request_id,
            spec,
            parent,
            output,
            device_kind,
        } => {
            admit(state, request_id.as_deref(), &spec, &output)?;
            let job = state.jobs.keys().next_back().copied().unwrap_or_default().next();
            let at = now.unix_ms;
            Ok(vec![Event::JobSubmitted {
                job,
                request_id,
                spec,
                parent,
                output,
                device_kind,
                at,
            }])
        }
        Command::Cancel { job, reason } => cancel(state, job, reason, now),
        Command::StagesPlanned {
            job,
            revision,
            stages,
        } => planned(state, job, revision, stages, now),
        Command::OutcomeReached {
            job,
            revision,
            outcome,
        } => Ok(outcome_reached(state, job, revision, outcome)),
        Command::OutcomeWritten { job } => Ok(match phase_of(state, job)? {
            JobPhase::Finishing { .. } => vec![Event::JobSucceeded { job, at: now.unix_ms }],
            _ => Vec::new(),
        }),
        Command::JobBroken { job, message } => Ok(if phase_of(state, job)?.is_terminal() {
            Vec::new()
        } else {
            vec![Event::JobFailed {
                job,
                message,
                at: now.unix_ms,
            }]
        }),
        Command::PartialRemoved { job } => Ok(match state.job(job) {
            Some(ended) if ended.wants_removal() => vec![Event::PartialRemoved { job }],
            _ => Vec::new(),
        }),
        Command::Introduce(introduction) => introduce(state, introduction, now),
        Command::Leave { worker, epoch } => {
            let standing = current(state, worker, epoch.0)?;
            Ok(match standing {
                Standing::Present => vec![Event::WorkerLeaving { worker }],
                Standing::Leaving | Standing::Lost => Vec::new(),
            })
        }
        Command::WorkerSilent { worker, epoch } => {
            let standing = current(state, worker, epoch.0)?;
            Ok(match standing {
                Standing::Present | Standing::Leaving => lose(state, worker, now),
                Standing::Lost => Vec::new(),
            })
        }
        Command::Complete {
            worker,
            lease,
            output,
        } => complete(state, worker, lease, output, now),
        Command::Fail {
            worker,
            lease,
            failure,
        } => {
            let Some(attempt) = held(state, worker, lease)? else {
                return Ok(Vec::new());
            };
            if attempt.cancelled {
                return Ok(vec![Event::AttemptStopped {
                    attempt: lease.attempt,
                }]);
            }
            Ok(fail(state, attempt, failure, now))
        }
        Command::Stopped { worker, lease } => {
            let Some(attempt) = held(state, worker, lease)? else {
                return Ok(Vec::new());
            };
            Ok(if attempt.cancelled {
                vec![Event::AttemptStopped {
                    attempt: lease.attempt,
                }]
            } else {
                // The worker gave it up by itself, as when it drains: nobody's fault.
                give_back(state, attempt, now)
            })
        }
        Command::Dispatch { absent } => Ok(placement::place(state, &absent, now)),
    }
}

fn admit(state: &State, request_id: Option<&str>, spec: &Payload, output: &str) -> Result<(), Rejection> {
    if let Some(request_id) = request_id
        && let Some(job) = state.request_ids.get(request_id)
    {
        let same = state.job(*job).is_some_and(|earlier| earlier.spec == *spec);
        return Err(if same {
            Rejection::SubmittedBefore(*job)
        } else {
            Rejection::RequestIdTaken {
                request_id: request_id.to_owned(),
                job: *job,
            }
        });
    }
    let rival = state
        .jobs()
        .rev()
        .find(|job| job.output == output && (!job.phase.is_terminal() || job.wants_removal()));
    match rival {
        Some(rival) => Err(Rejection::OutputTaken {
            output: output.to_owned(),
            job: rival.id,
        }),
        None => Ok(()),
    }
}

fn phase_of(state: &State, job: JobId) -> Result<&JobPhase, Rejection> {
    state
        .job(job)
        .map(|job| &job.phase)
        .ok_or(Rejection::NoSuchJob(job))
}

fn cancel(state: &State, job: JobId, reason: String, now: Now) -> Decision {
    match phase_of(state, job)? {
        JobPhase::Active => Ok(vec![Event::JobCancelled {
            job,
            reason,
            at: now.unix_ms,
        }]),
        JobPhase::Cancelled { .. } => Ok(Vec::new()),
        phase => Err(Rejection::JobEnded {
            job,
            phase: phase.name(),
        }),
    }
}

fn planned(state: &State, job: JobId, revision: u64, stages: Vec<StagePlan>, now: Now) -> Decision {
    let known = state.job(job).ok_or(Rejection::NoSuchJob(job))?;
    if !matches!(known.phase, JobPhase::Active) || revision <= known.planned {
        return Ok(Vec::new());
    }
    let mut names: HashSet<&str> = known.stages.iter().map(|stage| stage.name.as_str()).collect();
    let mut next = state.tasks.keys().next_back().copied().unwrap_or_default();
    let mut records = Vec::new();
    for stage in &stages {
        if !names.insert(&stage.name) {
            continue;
        }
        if stage.tasks.is_empty() {
            let message = format!("stage {} was planned without tasks", stage.name);
            return Ok(vec![Event::JobFailed {
                job,
                message,
                at: now.unix_ms,
            }]);
        }
        let tasks = stage.tasks.iter().map(|task| {
            next = next.next();
            TaskRecord {
                id: next,
                name: task.name.clone(),
                payload: task.payload.clone(),
                exclusive: task.exclusive,
            }
        });
        records.push(StageRecord {
            name: stage.name.clone(),
            kind: stage.kind.clone(),
            decision: stage.decision.clone(),
            note: stage.note.clone(),
            tasks: tasks.collect(),
        });
    }
    let all_done = known.stages.iter().all(|stage| stage.done == stage.tasks.len());
    if records.is_empty() && all_done && known.results == revision {
        let message = "the planner named neither a stage nor an outcome".to_owned();
        return Ok(vec![Event::JobFailed {
            job,
            message,
            at: now.unix_ms,
        }]);
    }
    Ok(vec![Event::StagesPlanned {
        job,
        revision,
        stages: records,
    }])
}

fn outcome_reached(state: &State, job: JobId, revision: u64, outcome: Payload) -> Vec<Event> {
    let Some(known) = state.job(job) else {
        return Vec::new();
    };
    if !matches!(known.phase, JobPhase::Active) || revision <= known.planned {
        return Vec::new();
    }
    vec![Event::OutcomeReached { job, outcome }]
}

fn introduce(state: &State, introduction: Introduction, now: Now) -> Decision {
    let mut ids = HashSet::new();
    if introduction.devices.is_empty() {
        return Err(Rejection::Invalid(format!(
            "worker `{}` has no device",
            introduction.name
        )));
    }
    if let Some(twice) = introduction.devices.iter().find(|device| !ids.insert(&device.id)) {
        return Err(Rejection::Invalid(format!(
            "device id `{}` is used twice",
            twice.id
        )));
    }
    let known = state.worker_named(&introduction.name);
    let mut events = Vec::new();
    let worker = match known {
        Some(known) if introduction.epoch < known.epoch => {
            return Err(Rejection::Stale(format!(
                "worker `{}` has been started anew since (epoch {} after {}): stop the older one, \
                 or give it another name",
                known.name, known.epoch, introduction.epoch
            )));
        }
        Some(known) if introduction.epoch == known.epoch => {
            return Ok(match known.standing {
                Standing::Present => Vec::new(),
                Standing::Leaving | Standing::Lost => {
                    vec![Event::WorkerReturned { worker: known.id }]
                }
            });
        }
        Some(known) => {
            events = lose(state, known.id, now);
            known.id
        }
        None => state
            .workers
            .keys()
            .next_back()
            .copied()
            .unwrap_or_default()
            .next(),
    };
    let Introduction {
        name,
        epoch,
        host,
        devices,
    } = introduction;
    events.push(Event::WorkerJoined {
        worker,
        name,
        epoch,
        host,
        devices,
    });
    Ok(events)
}

fn current(state: &State, worker: WorkerId, epoch: u64) -> Result<Standing, Rejection> {
    let known = state
        .worker(worker)
        .ok_or_else(|| Rejection::Stale(format!("worker {worker} is unknown: introduce it")))?;
    if known.epoch.0 != epoch {
        return Err(Rejection::Stale(format!(
            "worker `{}` is at epoch {}, not {epoch}",
            known.name, known.epoch
        )));
    }
    Ok(known.standing)
}

/// Gives up a worker and what it ran.
fn lose(state: &State, worker: WorkerId, now: Now) -> Vec<Event> {
    let mut events = Vec::new();
    let mut broken: HashSet<JobId> = HashSet::new();
    for attempt in state.attempts().filter(|attempt| attempt.worker == worker) {
        if attempt.cancelled || broken.contains(&attempt.job) {
            events.push(Event::AttemptStopped {
                attempt: attempt.lease.attempt,
            });
            continue;
        }
        let lost = give_back(state, attempt, now);
        if lost.iter().any(|event| matches!(event, Event::JobFailed { .. })) {
            broken.insert(attempt.job);
        }
        events.extend(lost);
    }
    let given_up = state
        .worker(worker)
        .is_some_and(|known| known.standing != Standing::Lost);
    if given_up {
        events.push(Event::WorkerLost { worker });
    }
    events
}

fn give_back(state: &State, attempt: &Attempt, now: Now) -> Vec<Event> {
    let Some(task) = state.task(attempt.task) else {
        return Vec::new();
    };
    let (id, at) = (attempt.lease.attempt, now.unix_ms);
    let retry = Budget::allows_loss(&task.failures);
    let mut events = vec![Event::AttemptLost {
        attempt: id,
        retry,
        at,
    }];
    if !retry {
        let losses = task.failures.worker_lost.saturating_add(1);
        let what = format!("its worker was lost {losses} times");
        events.push(job_failed(state, attempt.task, &what, now));
    }
    events
}

fn fail(state: &State, attempt: &Attempt, failure: espalier_proto::task::Failure, now: Now) -> Vec<Event> {
    let Some(task) = state.task(attempt.task) else {
        return Vec::new();
    };
    let (id, at) = (attempt.lease.attempt, now.unix_ms);
    let retry = Budget::allows(&task.failures, failure.kind);
    let what = match task.failures.own() {
        0 => failure.message.clone(),
        earlier => format!("{} (after {earlier} earlier failures)", failure.message),
    };
    let mut events = vec![Event::AttemptFailed {
        attempt: id,
        failure,
        retry,
        at,
    }];
    if !retry {
        events.push(job_failed(state, attempt.task, &what, now));
    }
    events
}

fn job_failed(state: &State, task: TaskId, what: &str, now: Now) -> Event {
    let task = state.task(task);
    let job = task.map(|task| task.job).unwrap_or_default();
    let stage = task
        .and_then(|task| state.job(task.job)?.stages.get(task.stage))
        .map_or("", |stage| stage.name.as_str());
    let name = task.map_or("", |task| task.name.as_str());
    let place = if name.is_empty() || name == stage {
        stage.to_owned()
    } else {
        format!("{stage}, {name}")
    };
    Event::JobFailed {
        job,
        message: format!("{place}: {what}"),
        at: now.unix_ms,
    }
}

fn complete(state: &State, worker: WorkerId, lease: Lease, output: Payload, now: Now) -> Decision {
    let Some(attempt) = held(state, worker, lease)? else {
        return Ok(Vec::new());
    };
    let id: AttemptId = attempt.lease.attempt;
    Ok(vec![if attempt.cancelled {
        Event::AttemptStopped { attempt: id }
    } else {
        Event::AttemptCompleted {
            attempt: id,
            output,
            at: now.unix_ms,
        }
    }])
}

/// The attempt that a lease stands for; none when its completion was taken before.
fn held(state: &State, worker: WorkerId, lease: Lease) -> Result<Option<&Attempt>, Rejection> {
    if lease.term > state.term {
        return Err(Rejection::Stale(format!(
            "term {} is above this coordinator's {}: another one has taken over",
            lease.term, state.term
        )));
    }
    if let Some(attempt) = state.attempt(lease.attempt) {
        if attempt.lease == lease && attempt.worker == worker {
            return Ok(Some(attempt));
        }
        return Err(Rejection::Stale(format!(
            "attempt {} is another's",
            lease.attempt
        )));
    }
    let done_by = state
        .task_of(lease.attempt)
        .and_then(|task| match state.task(task)?.phase {
            TaskPhase::Done { attempt, .. } => Some(attempt),
            _ => None,
        });
    if done_by == Some(lease.attempt) {
        return Ok(None);
    }
    Err(Rejection::Stale(format!("attempt {} has ended", lease.attempt)))
}
