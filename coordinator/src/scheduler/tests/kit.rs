//! Builders that let a test read as a story.

use std::collections::BTreeSet;

use espalier_proto::task::{Failure, FailureKind};

use crate::scheduler::{
    Command, DeviceInfo, Effect, Epoch, Event, Introduction, JobId, Lease, Needs, Now, Rejection, StagePlan,
    State, TaskPlan, WorkerId, apply, check, check_touched, decide, effects,
};

/// A state with a pen: commands go through `decide` and `apply`, and every state is checked.
#[derive(Default)]
pub struct World {
    pub state: State,
    pub journal: Vec<Event>,
    pub effects: Vec<Effect>,
    clock: i64,
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
            self.effects.extend(effects(&self.state, event));
            self.journal.push(event.clone());
        }
        check(&self.state).unwrap();
        Ok(events)
    }

    /// The state that a restarted coordinator would have, before its new term.
    pub fn replayed(&self) -> State {
        let mut state = State::default();
        for event in &self.journal {
            let text = serde_json::to_string(event).unwrap();
            apply(&mut state, &serde_json::from_str(&text).unwrap());
        }
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

    pub fn join(&mut self, name: &str, epoch: u64, devices: usize) -> WorkerId {
        self.run(Command::Introduce(introduction(name, epoch, name, devices)))
            .unwrap();
        self.state.worker_named(name).unwrap().id
    }

    /// Hands out work; gives the leases that were made, with the worker of each.
    pub fn dispatch(&mut self) -> Vec<(WorkerId, Lease)> {
        let events = self
            .run(Command::Dispatch {
                absent: BTreeSet::new(),
                resting: BTreeSet::new(),
            })
            .unwrap();
        let started = events.iter().filter_map(|event| match event {
            Event::AttemptStarted { attempt, .. } => self.state.attempt(*attempt),
            _ => None,
        });
        started.map(|attempt| (attempt.worker, attempt.lease)).collect()
    }

    pub fn complete(&mut self, (worker, lease): (WorkerId, Lease)) -> Result<usize, Rejection> {
        let output = "{}".into();
        self.run(Command::Complete {
            worker,
            lease,
            output,
        })
        .map(|events| events.len())
    }

    pub fn fail(&mut self, (worker, lease): (WorkerId, Lease), kind: FailureKind) {
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
