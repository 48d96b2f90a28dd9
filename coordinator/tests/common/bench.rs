//! The loop by itself: no runtime, no threads, a clock that stands where the test puts it, a disk that fills up
//! and an authority that comes and goes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, dead_code)]

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use espalier_coordinator::journal::disk::{Disk, DiskFile, SystemDisk};
use espalier_coordinator::scheduler::{AttemptId, DeviceInfo, Epoch, Introduction, JobId, Lease, Term};
use espalier_coordinator::service::Planner;
use espalier_coordinator::service::owner::{
    Greeting, JobOrder, Owner, Query, Report, Request, Submission, WorkerHandle,
};
use espalier_coordinator::service::surroundings::{Beside, Clock, Surroundings, SystemSecrets, Work};
use espalier_coordinator::tables::Tables;
use espalier_coordinator::term::{Fence, Standing};
use espalier_coordinator::{CoordinatorOptions, Result as OwnResult};
use espalier_proto::task::{Failure, FailureKind};
use espalier_proto::v1::coordinator_message::Message;
use espalier_proto::v1::{self, CoordinatorMessage};
use tokio::sync::{mpsc, oneshot};
use tonic::Status;

#[derive(Debug, Clone, Default)]
pub struct Filling {
    pub full: Arc<AtomicBool>,
}

#[derive(Debug)]
struct FillingFile {
    file: Box<dyn DiskFile>,
    full: Arc<AtomicBool>,
}

impl Filling {
    fn room(&self) -> io::Result<()> {
        room(&self.full)
    }

    fn wrap(&self, file: Box<dyn DiskFile>) -> Box<dyn DiskFile> {
        let full = Arc::clone(&self.full);
        Box::new(FillingFile { file, full })
    }
}

fn room(full: &AtomicBool) -> io::Result<()> {
    match full.load(Ordering::Relaxed) {
        true => Err(io::ErrorKind::StorageFull.into()),
        false => Ok(()),
    }
}

impl Disk for Filling {
    fn list(&self, directory: &Path) -> io::Result<Vec<PathBuf>> {
        SystemDisk.list(directory)
    }

    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        SystemDisk.read(path)
    }

    fn open(&self, path: &Path, length: u64) -> io::Result<Box<dyn DiskFile>> {
        Ok(self.wrap(SystemDisk.open(path, length)?))
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        self.room()?;
        Ok(self.wrap(SystemDisk.create(path)?))
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        SystemDisk.remove(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        SystemDisk.rename(from, to)
    }

    fn sync_directory(&self, directory: &Path) -> io::Result<()> {
        SystemDisk.sync_directory(directory)
    }

    fn create_directory(&self, directory: &Path) -> io::Result<()> {
        SystemDisk.create_directory(directory)
    }

    fn free_bytes(&self, _: &Path) -> io::Result<u64> {
        Ok(self.room().map_or(0, |()| u64::MAX))
    }
}

impl DiskFile for FillingFile {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        if let Err(full) = room(&self.full) {
            // As disks do: a part of it still fits.
            let half = bytes.get(..bytes.len() / 2).unwrap_or_default();
            self.file.append(half)?;
            return Err(full);
        }
        self.file.append(bytes)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.file.sync()
    }

    fn cut(&mut self, length: u64) -> io::Result<()> {
        self.file.cut(length)
    }
}

#[derive(Clone, Default)]
pub struct World {
    pub milliseconds: Arc<AtomicU64>,
    work: Arc<Mutex<Vec<Work>>>,
}

impl Clock for World {
    fn elapsed(&self) -> Duration {
        Duration::from_millis(self.milliseconds.load(Ordering::Relaxed))
    }

    fn unix_ms(&self) -> i64 {
        1
    }
}

impl Beside for World {
    fn spawn(&self, work: Work) {
        self.work.lock().unwrap().push(work);
    }
}

/// An authority that holds while the test lets it.
#[derive(Debug, Clone, Default)]
pub struct Gate {
    pub waits: Arc<AtomicBool>,
}

impl Fence for Gate {
    fn claim(&self, own: Term, _next: u64) -> OwnResult<Term> {
        Ok(own.next())
    }

    fn standing(&self, _now: Duration) -> Standing {
        match self.waits.load(Ordering::Relaxed) {
            true => Standing::Waits,
            false => Standing::Holds,
        }
    }
}

pub struct Bench {
    pub directory: tempfile::TempDir,
    pub world: World,
    pub disk: Filling,
    pub gate: Gate,
    pub tables: Tables,
    pub owner: Owner,
}

impl Bench {
    pub fn new(planner: impl Planner) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let (world, disk, gate) = (World::default(), Filling::default(), Gate::default());
        let tables = Tables::default();
        let surroundings = Surroundings {
            clock: Arc::new(world.clone()),
            beside: Arc::new(world.clone()),
            disk: Arc::new(disk.clone()),
            secrets: Arc::new(SystemSecrets::new().unwrap()),
            tables: tables.clone(),
            store: "file:///nowhere".to_owned(),
            store_id: String::new(),
            witness: None,
        };
        let options = CoordinatorOptions::new(directory.path());
        let fence = Arc::new(gate.clone());
        let owner = Owner::open_fenced(options, Arc::new(planner), surroundings, fence).unwrap();
        Self {
            directory,
            world,
            disk,
            gate,
            tables,
            owner,
        }
    }

    pub fn wait(&self, milliseconds: u64) {
        self.world.milliseconds.fetch_add(milliseconds, Ordering::Relaxed);
    }

    /// A turn with these requests, and one for the answers of all slow work.
    pub fn turn(&mut self, requests: Vec<Request>) {
        let mut batch = requests;
        self.owner.turn(&mut batch).unwrap();
        let work = std::mem::take(&mut *self.world.work.lock().unwrap());
        let mut answers: Vec<Request> = work.into_iter().map(|work| work()).collect();
        self.owner.turn(&mut answers).unwrap();
    }

    pub fn ask<T>(
        &mut self,
        request: impl FnOnce(oneshot::Sender<Result<T, Status>>) -> Request,
    ) -> Result<T, Status> {
        let (reply, mut answer) = oneshot::channel();
        self.turn(vec![request(reply)]);
        answer.try_recv().unwrap()
    }

    pub fn submit(&mut self, output: &str) -> Result<(v1::Job, bool), Status> {
        let submission = Box::new(Submission {
            spec: "{}".into(),
            parent: String::new(),
            output: output.to_owned(),
            device_kind: "cpu".to_owned(),
            priority: 0,
            free: Ok(()),
        });
        self.ask(|reply| Request::Submit {
            request_id: None,
            submission,
            reply,
        })
    }

    pub fn greet(&mut self, attempts: Vec<Lease>) -> (WorkerHandle, FromLoop) {
        self.greet_as("worker", 1, attempts)
    }

    pub fn greet_as(&mut self, name: &str, epoch: u64, attempts: Vec<Lease>) -> (WorkerHandle, FromLoop) {
        let (outbox, inbox) = mpsc::channel(16);
        let device = DeviceInfo {
            id: "cpu".into(),
            kind: "cpu".into(),
            name: "cpu".into(),
            memory_bytes: 1,
            threads: 1,
            engines: Vec::new(),
        };
        let greeting = Box::new(Greeting {
            introduction: Introduction {
                name: name.to_owned(),
                epoch: Epoch(epoch),
                host: name.to_owned(),
                devices: vec![device],
            },
            build: String::new(),
            version: espalier_proto::PROTOCOL_VERSION,
            highest_term: Term(1),
            attempts,
            outbox,
            stop: tokio_util::sync::CancellationToken::new(),
        });
        let handle = self.ask(|reply| Request::Greet { greeting, reply }).unwrap();
        (handle, inbox)
    }

    /// One that ends with this failure.
    pub fn fail(&mut self, from: WorkerHandle, lease: Lease, kind: FailureKind) {
        let message = "told to".to_owned();
        let report = Report::Failed(Failure { kind, message });
        self.turn(vec![Request::Report { from, lease, report }]);
    }

    pub fn order(&mut self, job: u64, order: JobOrder) -> Result<v1::Job, Status> {
        let job = JobId(job);
        self.ask(|reply| Request::KeepJob { job, order, reply })
    }

    pub fn task(&mut self, task: u64) -> Result<v1::TaskDetail, Status> {
        let task = espalier_coordinator::scheduler::TaskId(task);
        self.ask(|reply| Request::Query(Query::Task { task, reply }))
    }

    pub fn done(&mut self, job: u64) -> u32 {
        let job = JobId(job);
        let shown = self
            .ask(|reply| Request::Query(Query::Job { job, reply }))
            .unwrap();
        shown.stages.iter().map(|stage| stage.tasks_done).sum()
    }
}

/// What the loop sends to a worker.
pub type FromLoop = mpsc::Receiver<Result<CoordinatorMessage, Status>>;

pub fn messages(inbox: &mut FromLoop) -> Vec<Message> {
    std::iter::from_fn(|| inbox.try_recv().ok())
        .map(|message| message.unwrap().message.unwrap())
        .collect()
}

pub fn assigned(messages: &[Message]) -> Option<Lease> {
    messages.iter().find_map(|message| match message {
        Message::Assign(assign) => assign.lease.as_ref().map(|lease| Lease {
            term: Term(lease.term),
            epoch: Epoch(lease.epoch),
            attempt: AttemptId(lease.attempt),
        }),
        _ => None,
    })
}
