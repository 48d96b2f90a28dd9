#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod random;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicI64, Ordering};

use espalier_artifact::StoredArtifact;

use super::*;
use crate::archive::{Archive, Archives};
use crate::journal::disk::SystemDisk;
use crate::journal::{Journal, Options as JournalOptions};
use crate::scheduler::{
    Command, DeviceInfo, Epoch, Introduction, JobId, Needs, Now, StagePlan, State, TaskPlan, Term, apply,
    decide,
};
use crate::term::OwnDirectory;

const HOUR: i64 = 3_600_000;

/// A wall clock that stands where it was set.
#[derive(Default)]
struct Frozen(AtomicI64);

impl Clock for Frozen {
    fn elapsed(&self) -> Duration {
        Duration::ZERO
    }

    fn unix_ms(&self) -> i64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A fence of a coordinator that was succeeded.
#[derive(Debug)]
struct Fallen;

impl Fence for Fallen {
    fn claim(&self, own: Term, _next: u64) -> Result<Term> {
        Ok(own.next())
    }

    fn standing(&self, _now: Duration) -> Standing {
        Standing::Superseded { by: 9 }
    }
}

/// A store, and a coordinator's data directory that a test writes as the loop would.
struct Orchard {
    directory: tempfile::TempDir,
    store: ArtifactStore,
    clock: Arc<Frozen>,
    fence: Arc<dyn Fence>,
    metrics: Metrics,
    journal: Journal,
    state: State,
}

impl Orchard {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let store = ArtifactStore::open(directory.path().join("store").to_str().unwrap()).unwrap();
        let mut state = State::default();
        let at = directory.path().join("data/journal");
        let journal = Journal::open(Arc::new(SystemDisk), &at, JournalOptions::default(), &mut state);
        let mut orchard = Self {
            directory,
            store,
            clock: Arc::default(),
            fence: Arc::new(OwnDirectory),
            metrics: Metrics::default(),
            journal: journal.unwrap(),
            state,
        };
        orchard.tell(Command::BeginTerm, 0);
        orchard
    }

    fn data_dir(&self) -> PathBuf {
        self.directory.path().join("data")
    }

    fn tell(&mut self, command: Command, at: i64) {
        let events = decide(&self.state, command, Now { unix_ms: at }).unwrap();
        events.iter().for_each(|event| apply(&mut self.state, event));
        self.journal.append(&events).unwrap();
    }

    fn submit(&mut self, spec: &str, at: i64) -> JobId {
        let number = self.state.last_job().0;
        let submit = Command::Submit {
            request_id: None,
            spec: spec.into(),
            parent: "parent".to_owned(),
            output: format!("out-{number}"),
            device_kind: "cpu".into(),
            priority: 0,
        };
        self.tell(submit, at);
        self.state.last_job()
    }

    /// The job's only stage of one task, whose payload this is.
    fn plan(&mut self, job: JobId, payload: &str, at: i64) {
        let task = TaskPlan {
            name: "task".to_owned(),
            payload: payload.into(),
            exclusive: false,
            needs: Needs::default(),
        };
        let stage = StagePlan {
            name: "stage".to_owned(),
            kind: "sort".to_owned(),
            decision: None,
            note: String::new(),
            in_output: false,
            tasks: vec![task],
        };
        let revision = self.state.job(job).unwrap().results;
        let stages = vec![stage];
        self.tell(
            Command::StagesPlanned {
                job,
                revision,
                stages,
            },
            at,
        );
    }

    /// Hands what waits to a worker of one device.
    fn hand_out(&mut self, at: i64) {
        if self.state.worker_named("ann").is_none() {
            let device = DeviceInfo {
                id: "cpu".into(),
                kind: "cpu".into(),
                name: "test".into(),
                memory_bytes: 1,
                threads: 1,
                engines: Vec::new(),
            };
            let introduction = Introduction {
                name: "ann".to_owned(),
                epoch: Epoch(1),
                host: "host".to_owned(),
                devices: vec![device],
            };
            self.tell(Command::Introduce(introduction), at);
        }
        let (absent, resting) = (BTreeSet::new(), BTreeSet::new());
        self.tell(Command::Dispatch { absent, resting }, at);
        assert_eq!(self.state.attempts().count(), 1);
    }

    fn complete(&mut self, output: &str, at: i64) {
        let attempt = self.state.attempts().next().unwrap();
        let (worker, lease, output) = (attempt.worker, attempt.lease, output.into());
        self.tell(
            Command::Complete {
                worker,
                lease,
                output,
            },
            at,
        );
    }

    fn succeed(&mut self, job: JobId, outcome: &str, at: i64) {
        let (revision, outcome) = (self.state.job(job).unwrap().results, outcome.into());
        let reached = Command::OutcomeReached {
            job,
            revision,
            outcome,
        };
        self.tell(reached, at);
        self.tell(Command::OutcomeWritten { job }, at);
    }

    fn archive(&mut self, job: JobId, at: i64) {
        let archive = Archive::of(&self.state, job).unwrap();
        let archives = Archives::new(Arc::new(SystemDisk), &self.data_dir());
        archives.write(job, &archive).unwrap();
        self.tell(Command::Archived { job }, at);
    }

    /// An artifact that was last put then.
    async fn put(&self, content: &str, at: i64) -> Name {
        let name = self.store.put_bytes(content.as_bytes().to_vec()).await.unwrap();
        let fan = name.as_str().get(..2).unwrap();
        self.date(&format!("{fan}/{name}"), at);
        name
    }

    fn date(&self, key: &str, at: i64) {
        let path = self.directory.path().join("store").join(key);
        let file = std::fs::File::options().append(true).open(path).unwrap();
        let at = std::time::UNIX_EPOCH + Duration::from_millis(u64::try_from(at).unwrap());
        file.set_modified(at).unwrap();
    }

    async fn has(&self, name: &Name) -> bool {
        self.store.contains(name.as_str()).await.unwrap()
    }

    async fn collect(&mut self, now: i64) -> Result<Ended> {
        self.journal.commit().unwrap();
        self.clock.0.store(now, Ordering::Relaxed);
        let options = Options {
            data_dir: self.data_dir(),
            cluster: Some("grove".to_owned()),
            collect_after: COLLECT_AFTER,
        };
        let clock = Arc::clone(&self.clock) as Arc<dyn Clock>;
        let (fence, metrics) = (Arc::clone(&self.fence), self.metrics.clone());
        let collector = Collector::new(self.store.clone(), options, fence, clock, metrics);
        collector.collect(&CancellationToken::new()).await
    }

    /// How many artifacts a collection takes.
    async fn taken(&mut self, now: i64) -> u64 {
        match self.collect(now).await.unwrap() {
            Ended::Done(collected) => collected.artifacts,
            Ended::Shared => panic!("nobody else is here"),
        }
    }
}

#[tokio::test]
async fn what_a_job_or_a_record_names_stays_and_old_garbage_goes_and_is_counted() {
    let mut orchard = Orchard::new();
    let garbage = orchard.put("first", HOUR).await;
    let named = orchard.put("named by a job", HOUR).await;
    let recorded = orchard.put("named by a record", HOUR).await;
    let about = Name::of(b"a question");
    let record = format!("{{\"trainer\":\"{recorded}\"}}");
    orchard
        .store
        .set_record(&about, 1, record.as_bytes())
        .await
        .unwrap();
    orchard.date(&format!("records/{about}/1"), HOUR);
    let job = orchard.submit(&format!("{{\"weights\":\"{named}\"}}"), HOUR);
    let expected = Collected {
        artifacts: 1,
        bytes: 5,
        ..Collected::default()
    };
    assert_eq!(orchard.collect(31 * HOUR).await.unwrap(), Ended::Done(expected));
    assert!(!orchard.has(&garbage).await && orchard.has(&named).await && orchard.has(&recorded).await);
    let page = orchard.metrics.text();
    assert!(page.contains("espalier_collected_artifacts_total 1"), "{page}");
    assert!(page.contains("espalier_collected_bytes_total 5"), "{page}");

    // Nobody is left to go on from the record: it goes, and after it what it named.
    let reason = String::new();
    orchard.tell(Command::Cancel { job, reason }, 32 * HOUR);
    let Ended::Done(collected) = orchard.collect(33 * HOUR).await.unwrap() else {
        panic!("nobody else is here")
    };
    assert_eq!((collected.artifacts, collected.records), (0, 1));
    assert_eq!(orchard.taken(34 * HOUR).await, 1);
    assert!(orchard.has(&named).await && !orchard.has(&recorded).await);
}

#[tokio::test]
async fn what_is_young_or_was_put_while_an_attempt_is_open_stays() {
    let mut orchard = Orchard::new();
    let job = orchard.submit("{}", HOUR);
    orchard.plan(job, "{}", HOUR);
    let (before, meanwhile) = (
        orchard.put("before", HOUR).await,
        orchard.put("meanwhile", 10 * HOUR).await,
    );
    assert_eq!(orchard.taken(25 * HOUR).await, 0, "a day is not over");
    orchard.hand_out(4 * HOUR);
    assert_eq!(orchard.taken(1000 * HOUR).await, 1);
    assert!(!orchard.has(&before).await, "the attempt had not begun");
    assert!(
        orchard.has(&meanwhile).await,
        "the attempt may be about to report it"
    );
    orchard.complete("{}", 1001 * HOUR);
    assert_eq!(orchard.taken(1002 * HOUR).await, 1, "it has not");
}

/// An orchard with one archived job, which ended at the first hour and names an artifact put then.
async fn with_archived_job() -> (Orchard, Name) {
    let mut orchard = Orchard::new();
    let output = orchard.put("output", HOUR).await;
    let job = orchard.submit("{}", HOUR);
    orchard.plan(job, "{}", HOUR);
    orchard.hand_out(HOUR);
    orchard.complete(&format!("{{\"permutation\":\"{output}\"}}"), HOUR);
    orchard.succeed(job, "{}", HOUR);
    orchard.archive(job, HOUR);
    assert!(orchard.state.job(job).is_none());
    (orchard, output)
}

#[tokio::test]
async fn an_archived_job_keeps_what_it_names_and_while_it_cannot_be_read_all_that_was_put_before_it_ended() {
    let (mut orchard, output) = with_archived_job().await;
    assert_eq!(orchard.taken(100 * HOUR).await, 0);
    let before = orchard.put("it may name this", HOUR).await;
    let archive = orchard.data_dir().join("archive/job-1.archive");
    for (damage, content) in [(Some(b"nothing sound".as_slice()), "after"), (None, "later")] {
        match damage {
            Some(damage) => std::fs::write(&archive, damage).unwrap(),
            None => std::fs::remove_file(&archive).unwrap(),
        }
        orchard.put(content, 9 * HOUR).await;
        assert_eq!(orchard.taken(100 * HOUR).await, 1, "what was put since goes");
        assert_eq!(orchard.metrics.unreadable_archives(), 1);
    }
    assert!(orchard.has(&output).await && orchard.has(&before).await);
    // Of a job that was never archived nobody asks what it names.
    let void = orchard.submit("{}", 2 * HOUR);
    std::fs::write(orchard.data_dir().join(format!("archive/{void}.archive")), "void").unwrap();
    orchard.collect(100 * HOUR).await.unwrap();
    assert_eq!(orchard.metrics.unreadable_archives(), 1);
}

#[tokio::test]
async fn a_damaged_archive_that_was_shipped_is_fetched_again() {
    let (mut orchard, output) = with_archived_job().await;
    let before = orchard.put("nobody names this", HOUR).await;
    let archive = orchard.data_dir().join("archive/job-1.archive");
    let sound = std::fs::read(&archive).unwrap();
    let area = orchard.store.area("coordinator/grove");
    area.put("archive/1/job-1-0123456789abcdef", &sound)
        .await
        .unwrap();
    std::fs::write(&archive, "nothing sound").unwrap();
    assert_eq!(orchard.taken(100 * HOUR).await, 1);
    assert!(orchard.has(&output).await && !orchard.has(&before).await);
    assert_eq!(std::fs::read(&archive).unwrap(), sound);
    assert_eq!(orchard.metrics.unreadable_archives(), 0);
}

#[tokio::test]
async fn nothing_goes_from_a_store_of_another_cluster_or_once_authority_is_lost() {
    let mut orchard = Orchard::new();
    let garbage = orchard.put("garbage", HOUR).await;
    orchard.fence = Arc::new(Fallen);
    let refused = orchard.collect(100 * HOUR).await.unwrap_err().to_string();
    assert!(refused.contains("authority does not hold"), "{refused}");
    orchard.fence = Arc::new(OwnDirectory);
    let store = orchard.store.clone();
    let claims = |cluster: &str| store.area(&format!("coordinator/{cluster}"));
    claims("grove").put("terms/1", b"{}").await.unwrap();
    claims("orchard").put("terms/1", b"{}").await.unwrap();
    assert_eq!(orchard.collect(100 * HOUR).await.unwrap(), Ended::Shared);
    assert!(orchard.has(&garbage).await);
    claims("orchard").delete("terms/1").await.unwrap();
    assert_eq!(orchard.taken(100 * HOUR).await, 1);
}

#[tokio::test]
async fn a_collector_that_is_told_to_stop_stops_before_it_removes_anything() {
    let orchard = Orchard::new();
    let garbage = orchard.put("garbage", HOUR).await;
    let options = Options {
        data_dir: orchard.data_dir(),
        cluster: None,
        collect_after: Duration::ZERO,
    };
    let clock = Arc::clone(&orchard.clock) as Arc<dyn Clock>;
    let fence = Arc::clone(&orchard.fence);
    let collector = Collector::new(orchard.store.clone(), options, fence, clock, Metrics::default());
    let stop = CancellationToken::new();
    stop.cancel();
    let stopped = collector.collect(&stop).await;
    assert!(matches!(stopped, Err(Error::Stopping)), "{stopped:?}");
    collector.run(stop).await;
    assert!(orchard.has(&garbage).await);
}
