//! The loop on a disk that fills up: no runtime, no threads, a clock that stands where the test puts it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::Crowd;
use espalier_coordinator::CoordinatorOptions;
use espalier_coordinator::journal::disk::{Disk, DiskFile, SystemDisk};
use espalier_coordinator::scheduler::{DeviceInfo, Epoch, Introduction, JobId, Lease, Term};
use espalier_coordinator::service::owner::{
    Greeting, Owner, Query, Report, Request, Submission, WorkerHandle,
};
use espalier_coordinator::service::surroundings::{Beside, Clock, Surroundings, Work};
use espalier_proto::v1::coordinator_message::Message;
use espalier_proto::v1::{self, CoordinatorMessage};
use tokio::sync::{mpsc, oneshot};
use tonic::{Code, Status};

#[derive(Debug, Clone, Default)]
struct Filling {
    full: Arc<AtomicBool>,
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
struct World {
    milliseconds: Arc<AtomicU64>,
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

struct Bench {
    _directory: tempfile::TempDir,
    world: World,
    disk: Filling,
    owner: Owner,
}

impl Bench {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let (world, disk) = (World::default(), Filling::default());
        let surroundings = Surroundings {
            clock: Arc::new(world.clone()),
            beside: Arc::new(world.clone()),
            disk: Arc::new(disk.clone()),
            tables: espalier_coordinator::tables::Tables::default(),
            store: "file:///nowhere".to_owned(),
            witness: None,
        };
        let options = CoordinatorOptions::new(directory.path());
        let owner = Owner::open(options, Arc::new(Crowd(2)), surroundings).unwrap();
        Self {
            _directory: directory,
            world,
            disk,
            owner,
        }
    }

    /// A turn with these requests, and one for the answers of all slow work.
    fn turn(&mut self, requests: Vec<Request>) {
        let mut batch = requests;
        self.owner.turn(&mut batch).unwrap();
        let work = std::mem::take(&mut *self.world.work.lock().unwrap());
        let mut answers: Vec<Request> = work.into_iter().map(|work| work()).collect();
        self.owner.turn(&mut answers).unwrap();
    }

    fn ask<T>(
        &mut self,
        request: impl FnOnce(oneshot::Sender<Result<T, Status>>) -> Request,
    ) -> Result<T, Status> {
        let (reply, mut answer) = oneshot::channel();
        self.turn(vec![request(reply)]);
        answer.try_recv().unwrap()
    }

    fn submit(&mut self, output: &str) -> Result<(v1::Job, bool), Status> {
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

    fn greet(
        &mut self,
        attempts: Vec<Lease>,
    ) -> (WorkerHandle, mpsc::Receiver<Result<CoordinatorMessage, Status>>) {
        let (outbox, inbox) = mpsc::channel(16);
        let device = DeviceInfo {
            id: "cpu".into(),
            kind: "cpu".into(),
            name: "cpu".into(),
            memory_bytes: 1,
            threads: 1,
        };
        let greeting = Box::new(Greeting {
            introduction: Introduction {
                name: "worker".to_owned(),
                epoch: Epoch(1),
                host: "host".to_owned(),
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

    fn done(&mut self, job: u64) -> u32 {
        let job = JobId(job);
        let shown = self
            .ask(|reply| Request::Query(Query::Job { job, reply }))
            .unwrap();
        shown.stages.iter().map(|stage| stage.tasks_done).sum()
    }
}

fn messages(inbox: &mut mpsc::Receiver<Result<CoordinatorMessage, Status>>) -> Vec<Message> {
    std::iter::from_fn(|| inbox.try_recv().ok())
        .map(|message| message.unwrap().message.unwrap())
        .collect()
}

fn assigned(messages: &[Message]) -> Option<Lease> {
    messages.iter().find_map(|message| match message {
        Message::Assign(assign) => assign.lease.as_ref().map(|lease| Lease {
            term: Term(lease.term),
            epoch: Epoch(lease.epoch),
            attempt: espalier_coordinator::scheduler::AttemptId(lease.attempt),
        }),
        _ => None,
    })
}

#[test]
fn a_full_disk_stops_admission_and_nothing_accepted_is_lost() {
    let mut bench = Bench::new();
    bench.submit("/accepted").unwrap();
    let (worker, mut inbox) = bench.greet(Vec::new());
    bench.turn(vec![Request::Tick]);
    let lease = assigned(&messages(&mut inbox)).expect("the worker got a task");

    bench.disk.full.store(true, Ordering::Relaxed);
    let refused = bench.submit("/refused").unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
    assert!(bench.owner.is_full());
    assert!(messages(&mut inbox).is_empty());
    assert!(
        inbox.is_closed(),
        "the worker is told to come back and say all again"
    );

    let (worker_again, mut inbox) = bench.greet(vec![lease]);
    assert_ne!(worker_again.link, worker.link);
    let completed = |from| Request::Report {
        from,
        lease,
        report: Report::Completed("{}".into()),
    };
    bench.world.milliseconds.fetch_add(10_000, Ordering::Relaxed);
    bench.turn(vec![completed(worker_again)]);
    let acknowledged = |messages: &[Message]| {
        let is_one = |message: &Message| matches!(message, Message::Acknowledged(_));
        messages.iter().any(is_one)
    };
    assert!(
        !acknowledged(&messages(&mut inbox)),
        "a result that is not on the disk was acknowledged"
    );
    assert_eq!(bench.done(1), 0);

    bench.disk.full.store(false, Ordering::Relaxed);
    bench.world.milliseconds.fetch_add(10_000, Ordering::Relaxed);
    bench.turn(vec![Request::Tick]);
    assert!(!bench.owner.is_full());
    let (worker, mut inbox) = bench.greet(vec![lease]);
    bench.turn(vec![completed(worker)]);
    assert!(acknowledged(&messages(&mut inbox)), "work in flight was lost");
    assert_eq!(bench.done(1), 1);
    let (job, existed) = bench.submit("/refused").unwrap();
    assert_eq!(
        (job.id.as_str(), existed),
        ("job-2", false),
        "what was refused left no trace"
    );
}
