//! Builders that let a test read as a story.

use std::collections::{BTreeMap, BTreeSet};

use espalier_proto::task::{Failure, FailureKind};

use crate::scheduler::{
    Command, DeviceInfo, Effect, Epoch, Event, Failures, Introduction, JobId, JobPhase, Lease, Needs, Now,
    Rejection, StagePlan, State, Task, TaskId, TaskPlan, WorkerId, apply, check, check_touched, decide,
    effects,
};

/// A worker and the right it has.
pub type Work = (WorkerId, Lease);

/// A state with a pen: commands go through `decide` and `apply`, and every state is checked. Beside it a
/// ledger that knows only events: who was promoted, and what every budget has come to.
#[derive(Default)]
pub struct World {
    pub state: State,
    pub journal: Vec<Event>,
    pub effects: Vec<Effect>,
    pub absent: BTreeSet<WorkerId>,
    pub resting: BTreeSet<TaskId>,
    done: BTreeSet<TaskId>,
    budgets: BTreeMap<TaskId, (u32, Failures)>,
    pub clock: i64,
}

impl World {
    pub fn new() -> Self {
        let mut world = Self::default();
        world.run(Command::BeginTerm).unwrap();
        world
    }

    pub fn run(&mut self, command: Command) -> Result<Vec<Event>, Rejection> {
        self.clock += 1;
        let events = decide(&self.state, command, Now { unix_ms: self.clock })?;
        for event in &events {
            apply(&mut self.state, event);
            check_touched(&self.state, event).unwrap();
            self.note(event);
            self.effects.extend(effects(&self.state, event));
            self.journal.push(event.clone());
        }
        check(&self.state).unwrap();
        Ok(events)
    }

    fn note(&mut self, event: &Event) {
        match event {
            Event::AttemptCompleted { task, .. }
            | Event::GangEnded {
                task,
                completed: true,
                ..
            } => {
                assert!(self.done.insert(*task), "task {task} was promoted twice");
            }
            Event::AttemptStarted { task, .. } | Event::GangFormed { task, .. } => {
                assert!(!self.done.contains(task), "task {task} runs again");
            }
            _ => {}
        }
        for task in self.state.tasks() {
            let now = (task.era(), task.failures());
            let before = self.budgets.insert(task.id, now).unwrap_or_default();
            let monotonic = now.0 > before.0 || (now.0 == before.0 && now.1.covers(&before.1));
            assert!(monotonic, "task {}: {before:?} became {now:?}", task.id);
        }
    }

    /// The state that a restarted coordinator would have, before its new term: from a snapshot taken in the
    /// middle and the events since, which has to be what all events give.
    pub fn replayed(&self) -> State {
        let mut whole = State::default();
        let mut state = State::default();
        for (number, event) in self.journal.iter().enumerate() {
            let text = serde_json::to_string(event).unwrap();
            let event: Event = serde_json::from_str(&text).unwrap();
            apply(&mut whole, &event);
            apply(&mut state, &event);
            if number == self.journal.len() / 2 {
                let snapshot = serde_json::to_string(&state).unwrap();
                state = serde_json::from_str(&snapshot).unwrap();
                assert_eq!(state, whole, "a snapshot reads as another state");
            }
        }
        assert_eq!(state, whole, "what follows a snapshot gives another state");
        state
    }

    pub fn submit(&mut self, output: &str) -> JobId {
        let events = self.run(submission(None, output)).unwrap();
        match events.as_slice() {
            [Event::JobSubmitted { job, .. }] => *job,
            other => panic!("{other:?}"),
        }
    }

    pub fn plan(&mut self, job: JobId, stages: Vec<StagePlan>) {
        let revision = self.state.job(job).unwrap().results;
        self.run(Command::StagesPlanned {
            job,
            revision,
            stages,
        })
        .unwrap();
    }

    /// Plans a stage of one task and completes it.
    pub fn passes(&mut self, job: JobId, stage: StagePlan) {
        self.plan(job, vec![stage]);
        let work = self.dispatch()[0];
        self.complete(work).unwrap();
    }

    /// The planner gives a job up, whose half-written output is removed.
    pub fn give_up(&mut self, job: JobId) {
        let message = "too noisy".to_owned();
        self.run(Command::JobBroken { job, message }).unwrap();
        self.run(Command::PartialRemoved { job }).unwrap();
    }

    /// The names of a job's stages.
    pub fn stages(&self, job: JobId) -> Vec<&str> {
        let stages = self.state.job(job).unwrap().stages.iter();
        stages.map(|stage| stage.name.as_str()).collect()
    }

    pub fn join(&mut self, name: &str, epoch: u64, devices: usize) -> WorkerId {
        self.run(Command::Introduce(introduction(name, epoch, name, devices)))
            .unwrap();
        self.state.worker_named(name).unwrap().id
    }

    /// Hands out work; gives the leases that were made, with the worker of each.
    pub fn dispatch(&mut self) -> Vec<Work> {
        let events = self
            .run(Command::Dispatch {
                absent: self.absent.clone(),
                resting: self.resting.clone(),
            })
            .unwrap();
        let mut started = Vec::new();
        for event in &events {
            match event {
                Event::AttemptStarted { attempt, .. } => started.push(*attempt),
                Event::GangFormed { ranks, .. } => started.extend(ranks.iter().map(|rank| rank.attempt)),
                _ => {}
            }
        }
        let held = started.iter().filter_map(|attempt| self.state.attempt(*attempt));
        held.map(|attempt| (attempt.worker, attempt.lease)).collect()
    }

    /// Says that a rank can be reached; gives whether its gang was released by it.
    pub fn prepare(&mut self, (worker, lease): Work) -> bool {
        let address = format!("host-{worker}:{}", lease.attempt);
        let token = u128::from(lease.attempt.0).into();
        let prepared = Command::Prepared {
            worker,
            lease,
            address,
            token,
        };
        let events = self.run(prepared).unwrap();
        events
            .iter()
            .any(|event| matches!(event, Event::GangReleased { .. }))
    }

    pub fn stop(&mut self, (worker, lease): Work) {
        self.run(Command::Stopped { worker, lease }).unwrap();
    }

    pub fn pause(&mut self, job: JobId) {
        let reason = "lunch".to_owned();
        self.run(Command::Pause { job, reason }).unwrap();
    }

    pub fn task_of(&self, work: Work) -> &Task {
        self.state
            .task(self.state.task_of(work.1.attempt).unwrap())
            .unwrap()
    }

    /// The only task of a job that has one.
    pub fn only_task(&self, job: JobId) -> &Task {
        let mut tasks = self.state.tasks().filter(|task| task.job == job);
        let task = tasks.next().unwrap();
        assert!(tasks.next().is_none());
        task
    }

    pub fn message(&self, job: JobId) -> String {
        match &self.state.job(job).unwrap().phase {
            JobPhase::Failed { message, .. } => message.clone(),
            other => panic!("{other:?}"),
        }
    }

    pub fn why(&self, job: JobId) -> String {
        let why = self.state.why_waiting_beside(job, &self.absent, &self.resting);
        why.unwrap_or_default()
    }

    pub fn complete(&mut self, (worker, lease): Work) -> Result<usize, Rejection> {
        let output = "{}".into();
        self.run(Command::Complete {
            worker,
            lease,
            output,
        })
        .map(|events| events.len())
    }

    pub fn fail(&mut self, (worker, lease): Work, kind: FailureKind) {
        let failure = Failure {
            kind,
            message: "the disk caught fire".to_owned(),
        };
        self.run(Command::Fail {
            worker,
            lease,
            failure,
        })
        .unwrap();
    }

    pub fn submit_at(&mut self, output: &str, urgency: i32) -> JobId {
        let Command::Submit {
            spec,
            parent,
            output,
            device_kind,
            ..
        } = submission(None, output)
        else {
            panic!("not a submission");
        };
        self.run(Command::Submit {
            request_id: None,
            spec,
            parent,
            output,
            device_kind,
            priority: urgency,
        })
        .unwrap();
        self.state.last_job()
    }

    pub fn lose(&mut self, worker: WorkerId) {
        let epoch = self.state.worker(worker).unwrap().epoch;
        self.run(Command::WorkerSilent { worker, epoch }).unwrap();
    }
}

pub fn submission(request_id: Option<&str>, output: &str) -> Command {
    Command::Submit {
        request_id: request_id.map(str::to_owned),
        spec: format!("{{\"output\":\"{output}\"}}").into(),
        parent: "parent".to_owned(),
        output: output.to_owned(),
        device_kind: "cpu".into(),
        priority: 0,
    }
}

pub fn introduction(name: &str, epoch: u64, host: &str, devices: usize) -> Introduction {
    let device = |index| DeviceInfo {
        id: format!("cpu-{index}").into(),
        kind: "cpu".into(),
        name: "test".into(),
        memory_bytes: 1 << 30,
        threads: 1,
        engines: Vec::new(),
    };
    Introduction {
        name: name.to_owned(),
        epoch: Epoch(epoch),
        host: host.to_owned(),
        devices: (0..devices).map(device).collect(),
    }
}

/// A stage of `tasks` tasks.
pub fn stage(name: &str, tasks: usize) -> StagePlan {
    let task = |index| TaskPlan {
        name: format!("task {index}"),
        payload: "{}".into(),
        exclusive: false,
        needs: Needs::default(),
    };
    StagePlan {
        name: name.to_owned(),
        kind: name.to_owned(),
        decision: None,
        note: String::new(),
        in_output: false,
        tasks: (0..tasks).map(task).collect(),
    }
}

/// A stage of one task that measures time.
pub fn measurement(name: &str) -> StagePlan {
    let mut measured = stage(name, 1);
    measured.tasks.iter_mut().for_each(|task| task.exclusive = true);
    measured
}

/// A stage of one task that decides whether its job goes on as planned.
pub fn check_of(name: &str) -> StagePlan {
    StagePlan {
        kind: "check".to_owned(),
        ..measurement(name)
    }
}

/// A stage of one task that `ranks` devices run together, and no fewer.
pub fn gang(name: &str, ranks: u32) -> StagePlan {
    pliable_gang(name, ranks, ranks)
}

/// A stage of one task that `ranks` devices run together, or fewer in a multiple.
pub fn pliable_gang(name: &str, ranks: u32, rank_multiple: u32) -> StagePlan {
    let mut gang = stage(name, 1);
    for task in &mut gang.tasks {
        (task.needs.ranks, task.needs.rank_multiple) = (ranks, rank_multiple);
    }
    gang
}

/// A worker with devices of another kind and memory.
pub fn gpus(name: &str, devices: usize, memory_bytes: u64) -> Introduction {
    let mut introduction = introduction(name, 1, name, devices);
    for device in &mut introduction.devices {
        device.kind = "cuda".into();
        device.memory_bytes = memory_bytes;
    }
    introduction
}
