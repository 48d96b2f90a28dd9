//! Gangs in trouble: a rank that is slow, a store that fails or is changed under their hands, training that diverges.

use std::net::TcpListener;
use std::str::FromStr;
use std::sync::Mutex;

use espalier_artifact::Name;
use espalier_model::collective::{Communicator, mesh};
use espalier_proto::task::Progress;

use super::*;

/// A gang that calls `after` with what this rank and what all ranks gave, after each exchange.
struct Meddled<F> {
    gang: Arc<dyn Gang>,
    after: F,
}

impl<F> std::fmt::Debug for Meddled<F> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.gang.fmt(formatter)
    }
}

impl<F: Fn(&[u8], &[Vec<u8>]) + Send + Sync> Gang for Meddled<F> {
    fn rank(&self) -> usize {
        self.gang.rank()
    }

    fn size(&self) -> usize {
        self.gang.size()
    }

    fn communicator(&self, ranks: &[usize]) -> espalier_model::Result<Arc<dyn Communicator>> {
        self.gang.communicator(ranks)
    }

    fn exchange(&self, bytes: &[u8]) -> espalier_model::Result<Vec<Vec<u8>>> {
        let all = self.gang.exchange(bytes)?;
        (self.after)(bytes, &all);
        Ok(all)
    }

    fn check(&self) -> espalier_model::Result<()> {
        self.gang.check()
    }

    fn abort(&self) {
        self.gang.abort();
    }
}

type Told = Arc<dyn Fn(usize, &Progress) + Send + Sync>;

/// An attempt of two ranks, which tell `told` how far they are; what each gives.
fn two_ranks(
    store: &Path,
    gangs: [Arc<dyn Gang>; 2],
    number: u64,
    task: &TaskSpec,
    told: &Told,
) -> [Result<TaskOutput>; 2] {
    // A rank that lets go of its gang breaks it, unless it says goodbye, which is its child's affair.
    let _kept = gangs.clone();
    let run = |gang: Arc<dyn Gang>| {
        let (told, rank) = (Arc::clone(told), gang.rank());
        move || {
            let store = BlockingStore::open(store.to_str().unwrap())?;
            let backend = Backend::open(Device::Cpu, None)?;
            let progress = Box::new(move |progress| told(rank, &progress));
            let context = Context::new(&backend, &store, progress, Box::new(|| None))
                .with_attempt(number)
                .with_gang(Some(gang));
            execute(&context, &mut Caches::default(), task)
        }
    };
    std::thread::scope(|scope| {
        gangs
            .map(|gang| scope.spawn(run(gang)))
            .map(|rank| rank.join().unwrap())
    })
}

fn nobody() -> Told {
    Arc::new(|_, _| ())
}

fn two_threads() -> [Arc<dyn Gang>; 2] {
    let gangs = local::LocalGang::all(2, DEADLINE);
    [gangs[0].clone(), gangs[1].clone()]
}

/// The file of an artifact.
fn file_of(store: &Path, artifact: &str) -> PathBuf {
    let store = BlockingStore::open(store.to_str().unwrap()).unwrap();
    store.get_file(artifact).unwrap()
}

/// The only checkpoint recorded by an attempt: where its record lies, its shares, and of which step it is.
fn recorded(store: &Path, attempt: u64) -> (PathBuf, Vec<String>, usize) {
    let about = std::fs::read_dir(store.join("records")).unwrap().next().unwrap();
    let about = about.unwrap().path();
    let name = Name::from_str(about.file_name().unwrap().to_str().unwrap()).unwrap();
    let records = BlockingStore::open(store.to_str().unwrap())
        .unwrap()
        .records(&name)
        .unwrap();
    let (_, record) = records.iter().find(|(number, _)| *number == attempt).unwrap();
    let record: serde_json::Value = serde_json::from_slice(record).unwrap();
    let shares = record["shares"].as_array().unwrap().iter();
    let shares = shares.map(|share| share.as_str().unwrap().to_owned()).collect();
    let steps = record["losses"].as_array().unwrap().len();
    (about.join(attempt.to_string()), shares, steps)
}

/// A gang as two processes have it, whose calls may take no longer than `call`.
fn over_sockets(call: Duration) -> [Arc<dyn Gang>; 2] {
    let listeners = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    let addresses = listeners
        .each_ref()
        .map(|listener| listener.local_addr().unwrap().to_string());
    let join = |(rank, listener)| {
        let place = mesh::Place {
            rank,
            listener,
            addresses: addresses.to_vec(),
            token: "two".to_owned(),
            generation: 1,
        };
        let options = mesh::Options {
            call,
            silence: DEADLINE,
            ..mesh::Options::default()
        };
        std::thread::spawn(move || {
            let mesh = Arc::new(mesh::Mesh::form(place, options).unwrap());
            let backend = Backend::open(Device::Cpu, None).unwrap();
            backend.operations().gang(mesh).unwrap()
        })
    };
    let [first, second] = listeners;
    [(0, first), (1, second)]
        .map(join)
        .map(|rank| rank.join().unwrap())
}

#[test]
fn ranks_wait_for_one_that_works_alone_for_longer_than_their_calls_may_take() {
    let directory = tempfile::tempdir().unwrap();
    let ingested = ingest(directory.path());
    let alone = tempfile::tempdir().unwrap();
    let whole = recover(&ingest(alone.path()), 1, 5);
    let expected = recovered(attempt(alone.path(), None, 1, &whole, usize::MAX));
    let task = recover(&ingested, 1, 5);
    let call = Duration::from_secs(2);
    let told: Told = Arc::new(move |rank, progress| {
        // The first comes late to the meeting at the end.
        if rank == 0 && progress.unit == "tokens" && progress.done == progress.total {
            std::thread::sleep(call * 2);
        }
    });
    let [first, second] = over_sockets(call);
    // And the second to whatever follows the first, as one does that has more to load.
    let met = AtomicUsize::new(0);
    let after = move |_: &[u8], _: &[Vec<u8>]| {
        if met.fetch_add(1, Ordering::SeqCst) == 0 {
            std::thread::sleep(call * 2);
        }
    };
    let second = Arc::new(Meddled { gang: second, after });
    for rank in two_ranks(directory.path(), [first, second], 1, &task, &told) {
        assert_equal(&recovered(rank), &expected, "two replicas");
    }
}

#[test]
fn a_share_that_cannot_be_read_ends_the_attempt_and_not_what_was_trained() {
    let directory = tempfile::tempdir().unwrap();
    let ingested = ingest(directory.path());
    let task = recover(&ingested, 2, 6);
    for stopped in gang(directory.path(), 2, 1, &task, 3) {
        assert!(matches!(stopped, Err(Error::Cancelled)), "{stopped:?}");
    }
    let (_, shares, steps) = recorded(directory.path(), 2);
    let files: Vec<PathBuf> = shares
        .iter()
        .map(|share| file_of(directory.path(), share))
        .collect();
    let aside = directory.path().join("aside");
    for file in &files {
        std::fs::rename(file, aside.with_extension(file.file_name().unwrap())).unwrap();
        // As of a disk that fails: it opens, and each read is an error.
        std::os::unix::fs::symlink("/proc/self/mem", file).unwrap();
    }
    for failed in two_ranks(directory.path(), two_threads(), 3, &task, &nobody()) {
        let failed = failed.unwrap_err().failure();
        let may_pass = matches!(failed.kind, FailureKind::Error | FailureKind::RankLost);
        assert!(may_pass, "{failed:?}");
    }
    for file in &files {
        std::fs::rename(aside.with_extension(file.file_name().unwrap()), file).unwrap();
    }
    assert_goes_on(directory.path(), two_threads(), &task, steps);
}

/// An attempt that goes on after `steps`.
fn assert_goes_on(store: &Path, gangs: [Arc<dyn Gang>; 2], task: &TaskSpec, steps: usize) {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let told = Arc::clone(&seen);
    let told: Told = Arc::new(move |_, progress| {
        if progress.unit == "tokens" {
            told.lock()
                .unwrap()
                .push(progress.went_on_from * STEPS as u64 / progress.total);
        }
    });
    for rank in two_ranks(store, gangs, 20, task, &told) {
        assert_eq!(recovered(rank).losses.len(), STEPS);
    }
    let seen = seen.lock().unwrap();
    assert!(!seen.is_empty());
    assert!(
        seen.iter().all(|from| *from == steps as u64),
        "{seen:?} and not {steps}"
    );
}

#[test]
fn a_checkpoint_that_another_attempt_replaces_meanwhile_is_looked_for_again() {
    let directory = tempfile::tempdir().unwrap();
    let ingested = ingest(directory.path());
    let task = recover(&ingested, 2, 6);
    for (number, stop_after) in [(1, 3), (9, 6)] {
        for stopped in gang(directory.path(), 2, number, &task, stop_after) {
            assert!(matches!(stopped, Err(Error::Cancelled)), "{stopped:?}");
        }
    }
    // The first attempt has it still and the other one has recorded nothing yet; then it has, and removes the shares.
    let (_, shares, earlier) = recorded(directory.path(), 2);
    let (record, _, later) = recorded(directory.path(), 10);
    assert!(earlier < later);
    let aside = directory.path().join("aside");
    std::fs::rename(&record, &aside).unwrap();
    for share in shares {
        std::fs::remove_file(file_of(directory.path(), &share)).unwrap();
    }
    let [first, second] = two_threads();
    let after = move |said: &[u8], _: &[Vec<u8>]| {
        if said == b"true" && aside.exists() {
            std::fs::rename(&aside, &record).unwrap();
        }
    };
    let meddled = Arc::new(Meddled { gang: first, after });
    assert_goes_on(directory.path(), [meddled, second], &task, later);
}

#[test]
fn a_student_that_is_stored_stays_though_what_it_was_made_of_cannot_be_removed() {
    let directory = tempfile::tempdir().unwrap();
    let ingested = ingest(directory.path());
    let task = recover(&ingested, 2, 5);
    let [first, second] = two_threads();
    let store = directory.path().to_owned();
    // An artifact's name as JSON.
    let is_name = |bytes: &[u8]| bytes.len() == 66;
    let own: Mutex<Option<PathBuf>> = Mutex::new(None);
    let after = move |said: &[u8], all: &[Vec<u8>]| {
        let mut own = own.lock().unwrap();
        if is_name(said) {
            *own = Some(file_of(&store, serde_json::from_slice(said).unwrap()));
        } else if said.is_empty()
            && is_name(&all[0])
            && let Some(share) = own.take()
        {
            // The first says what the student is called: this rank removes its share next, and cannot.
            std::fs::remove_file(&share).unwrap();
            std::fs::create_dir_all(share.join("in the way")).unwrap();
        }
    };
    let meddled = Arc::new(Meddled { gang: second, after });
    let ranks = two_ranks(directory.path(), [first, meddled], 1, &task, &nobody()).map(recovered);
    assert_eq!(ranks[0].weights, ranks[1].weights);
    assert!(file_of(directory.path(), &ranks[0].weights.0).is_file());
}

#[test]
fn ranks_whose_last_step_diverges_keep_the_untrained_student() {
    let [alone, both] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let ingested = ingest(alone.path());
    ingest(both.path());
    let diverging = |stages| {
        changed(recover(&ingested, stages, 5), |task| {
            task.recipe.tokens = 5 * 64;
            task.recipe.learning_rate = 1e15;
        })
    };
    let expected = recovered(attempt(alone.path(), None, 1, &diverging(1), usize::MAX));
    assert!(expected.kept_untrained);
    for stages in [1, 2] {
        for rank in two_ranks(both.path(), two_threads(), 1, &diverging(stages), &nobody()) {
            let rank = recovered(rank);
            assert!(rank.kept_untrained, "{stages} stages");
            assert_eq!(rank.weights, expected.weights, "{stages} stages");
        }
    }
}
