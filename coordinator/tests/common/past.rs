//! A data directory with a past: jobs that ran to their end without workers, written through the journal,
//! snapshots and archives as a coordinator writes them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, dead_code)]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use espalier_coordinator::archive::{Archive, Archives};
use espalier_coordinator::journal::disk::Disk;
use espalier_coordinator::journal::{Journal, Options};
use espalier_coordinator::scheduler::{
    Command, DeviceInfo, Epoch, Event, Introduction, JobId, Lease, Needs, Now, StagePlan, State, TaskPlan,
    WorkerId, apply, decide,
};

/// Devices of the one worker.
const DEVICES: usize = 64;

/// Tasks of a stage: a plan is one frame of the journal.
const STAGE: usize = 50_000;

/// What tells the story.
pub struct Past {
    pub state: State,
    pub archives: Archives,
    /// Whether `told` grows.
    pub keeps_events: bool,
    /// Every event since this was opened, with its frame.
    pub told: Vec<(u64, Event)>,
    journal: Journal,
    frames: u64,
    unix_ms: i64,
}

impl Past {
    /// Begins, or goes on, in this data directory.
    pub fn open(disk: &Arc<dyn Disk>, data_dir: &Path, options: Options) -> Self {
        let mut state = State::default();
        let journal =
            Journal::open(Arc::clone(disk), &data_dir.join("journal"), options, &mut state).unwrap();
        let mut past = Self {
            state,
            archives: Archives::new(Arc::clone(disk), data_dir),
            keeps_events: true,
            told: Vec::new(),
            frames: journal.last(),
            journal,
            unix_ms: 1_700_000_000_000,
        };
        past.tell(Command::BeginTerm);
        let device = |index| DeviceInfo {
            id: format!("cpu-{index}").into(),
            kind: "cpu".into(),
            name: "test".into(),
            memory_bytes: 1 << 30,
            threads: 1,
            engines: Vec::new(),
        };
        let epoch = Epoch(past.state.term().0);
        past.tell(Command::Introduce(Introduction {
            name: "worker-a".to_owned(),
            epoch,
            host: "host-a".to_owned(),
            devices: (0..DEVICES).map(device).collect(),
        }));
        past.commit();
        past
    }

    /// Decides and applies, without making anything durable.
    pub fn tell(&mut self, command: Command) {
        self.unix_ms += 1;
        let now = Now {
            unix_ms: self.unix_ms,
        };
        let events = decide(&self.state, command, now).unwrap();
        if events.is_empty() {
            return;
        }
        self.journal.append(&events).unwrap();
        self.frames += 1;
        for event in events {
            apply(&mut self.state, &event);
            if self.keeps_events {
                self.told.push((self.frames, event));
            }
        }
    }

    /// Makes it durable, and takes a snapshot when one is due.
    pub fn commit(&mut self) {
        self.journal.commit().unwrap();
        if let Some(due) = self.journal.snapshot_due() {
            self.journal.snapshot_ended(due.take(&self.state));
        }
    }

    /// The last durable frame.
    pub fn last_frame(&self) -> u64 {
        self.journal.last()
    }

    /// Submits a job with a stage of tasks, or several, and runs so many of them.
    pub fn job(&mut self, tasks: usize, done: usize) -> JobId {
        let job = self.state.last_job().next();
        self.tell(Command::Submit {
            request_id: Some(format!("request-{}", job.0)),
            spec: "{\"parent\":\"/models/parent\"}".into(),
            parent: "/models/parent".to_owned(),
            output: format!("/out/{}", job.0),
            device_kind: "cpu".to_owned(),
            priority: 0,
        });
        let (mut planned, mut left) = (0, done);
        while planned < tasks {
            let size = STAGE.min(tasks - planned);
            let revision = self.state.job(job).unwrap().results;
            self.tell(Command::StagesPlanned {
                job,
                revision,
                stages: vec![stage(planned, size)],
            });
            self.commit();
            planned += size;
            // The next stage is planned when this one is done.
            let here = left.min(size);
            left -= here;
            self.run(here);
        }
        job
    }

    /// Starts nothing more of a job.
    pub fn pause(&mut self, job: JobId) {
        let reason = "later".to_owned();
        self.tell(Command::Pause { job, reason });
        self.commit();
    }

    /// Lets a paused job go on.
    pub fn resume(&mut self, job: JobId) {
        self.tell(Command::Resume { job });
        self.commit();
    }

    /// Runs so many tasks of jobs that go on.
    pub fn run(&mut self, mut tasks: usize) {
        while tasks > 0 {
            tasks -= self.round(tasks);
        }
    }

    /// Hands out what there is room for, and completes at most so many.
    fn round(&mut self, most: usize) -> usize {
        self.tell(Command::Dispatch {
            absent: BTreeSet::new(),
            resting: BTreeSet::new(),
        });
        self.commit();
        let running: Vec<(WorkerId, Lease)> = self
            .state
            .attempts()
            .take(most)
            .map(|attempt| (attempt.worker, attempt.lease))
            .collect();
        assert!(!running.is_empty(), "nothing was handed out");
        for (worker, lease) in &running {
            self.tell(Command::Complete {
                worker: *worker,
                lease: *lease,
                output: output(lease.attempt.0).into(),
            });
        }
        self.commit();
        running.len()
    }

    /// Ends a job whose tasks are done.
    pub fn end(&mut self, job: JobId) {
        let revision = self.state.job(job).unwrap().results;
        self.tell(Command::OutcomeReached {
            job,
            revision,
            outcome: "{\"story\":\"told\"}".into(),
        });
        self.tell(Command::OutcomeWritten { job });
        self.commit();
    }

    /// Archives a job that has ended.
    pub fn archive(&mut self, job: JobId) {
        let archive = Archive::of(&self.state, job).unwrap();
        self.archives.write(job, &archive).unwrap();
        self.tell(Command::Archived { job });
        self.commit();
    }
}

fn stage(first: usize, tasks: usize) -> StagePlan {
    let task = |index| TaskPlan {
        name: format!("block {index}"),
        payload: format!(
            "{{\"kind\":\"score\",\"block\":{index},\"variants\":[\"skip\"],\"shard\":{{\"artifact\":\"\
             3f1d0c7a9be24561f0c2\",\"sequences\":16,\"sequence_tokens\":512}}}}"
        )
        .into(),
        exclusive: false,
        needs: Needs::default(),
    };
    StagePlan {
        name: if first == 0 {
            "score".to_owned()
        } else {
            format!("score-{first}")
        },
        kind: "score".to_owned(),
        decision: Some("{\"candidates\":[1,2,3]}".into()),
        note: "three candidates".to_owned(),
        in_output: false,
        tasks: (0..tasks).map(task).collect(),
    }
}

fn output(attempt: u64) -> String {
    format!(
        "{{\"kind\":\"score\",\"scores\":[{{\"block\":{},\"variant\":\"skip\",\"divergence\":0.25,\
         \"standard_error\":0.01,\"tokens\":8192}}]}}",
        attempt % 64
    )
}

/// Copies a directory with everything in it.
pub fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target: PathBuf = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), &target).unwrap();
        }
    }
}
