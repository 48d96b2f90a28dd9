#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod starting;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use espalier_artifact::{ArtifactStore, ObjectArea};

use super::chain::{Piece, Snapshot, Step, after, reach, sound};
use super::{Options, Progress, Shipper, restore};
use crate::archive::{Archive, Archives};
use crate::journal::disk::SystemDisk;
use crate::journal::{self, Fold, Journal};
use crate::scheduler::{Event, JobId, State, Term, apply};
use crate::term::{Claim, Claims};

fn claim(term: u64, from_sequence: u64) -> Claim {
    Claim {
        term,
        from_sequence,
        host: String::new(),
        claimant: String::new(),
        start: String::new(),
        lease_ms: 0,
    }
}

fn piece(term: u64, first: u64, last: u64) -> Piece {
    Piece::parse(&Piece::key(term, first, last)).unwrap()
}

fn taken(steps: &[Step]) -> Vec<(u64, u64, u64)> {
    steps
        .iter()
        .map(|step| (Piece::parse(&step.key).unwrap().term, step.first, step.last))
        .collect()
}

#[test]
fn frames_of_a_term_are_void_from_where_its_successor_begins() {
    let claims = [claim(1, 1), claim(2, 31), claim(3, 50)];
    let pieces = [
        piece(1, 1, 20),
        piece(1, 21, 45),
        piece(2, 31, 60),
        piece(3, 50, 70),
    ];
    assert_eq!(
        taken(&after(&claims, &pieces, 0)),
        [(1, 1, 20), (1, 21, 30), (2, 31, 49), (3, 50, 70)]
    );
    assert_eq!(taken(&after(&claims, &pieces, 65)), [(3, 66, 70)]);
}

#[test]
fn a_gap_ends_the_chain_and_overlapping_pieces_do_not() {
    let claims = [claim(1, 1)];
    let pieces = [piece(1, 1, 5), piece(1, 3, 9), piece(1, 4, 4), piece(1, 12, 20)];
    assert_eq!(taken(&after(&claims, &pieces, 0)), [(1, 1, 5), (1, 6, 9)]);
    assert_eq!(taken(&after(&claims, &pieces, 20)), []);
    let snapshots = [Snapshot::parse(&Snapshot::key(1, 11)).unwrap()];
    assert_eq!(reach(&claims, &pieces, &snapshots), 20);
}

#[test]
fn a_snapshot_of_void_frames_is_left_out() {
    let claims = [claim(1, 1), claim(2, 31)];
    let snapshots = [(1, 30), (1, 40), (2, 35)]
        .map(|(term, sequence)| Snapshot::parse(&Snapshot::key(term, sequence)).unwrap());
    let sequences: Vec<_> = sound(&claims, &snapshots)
        .iter()
        .map(|snapshot| (snapshot.term, snapshot.sequence))
        .collect();
    assert_eq!(sequences, [(2, 35), (1, 30)]);
}

/// Events that are numbers.
#[derive(Default, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
struct Numbers(Vec<u64>);

impl Fold for Numbers {
    type Event = u64;

    fn restore(&mut self, json: &[u8]) -> Result<(), String> {
        *self = serde_json::from_slice(json).map_err(|error| error.to_string())?;
        Ok(())
    }

    fn event(&mut self, _: u64, event: u64) {
        self.0.push(event);
    }
}

fn journal(directory: &Path) -> (Journal, Numbers) {
    let mut numbers = Numbers::default();
    let options = journal::Options::default();
    let opened = Journal::open(Arc::new(SystemDisk), directory, options, &mut numbers).unwrap();
    (opened, numbers)
}

fn commit(journal: &mut Journal, numbers: std::ops::RangeInclusive<u64>) {
    for number in numbers {
        journal.append(&[number]).unwrap();
    }
    journal.commit().unwrap();
}

fn area(directory: &Path) -> ObjectArea {
    let store = ArtifactStore::open(directory.join("store").to_str().unwrap()).unwrap();
    store.area("coordinator/grove")
}

fn shipper(area: &ObjectArea, data_dir: &Path, term: u64, progress: &Progress) -> Shipper {
    let options = Options {
        data_dir: data_dir.to_owned(),
        cluster: "grove".to_owned(),
        interval: Duration::from_secs(5),
        lease: Duration::from_secs(10),
    };
    Shipper::new(area.clone(), &options, term, progress.clone())
}

/// Sets these claims in the store.
async fn claimed(area: &ObjectArea, claims: &[Claim]) -> Claims {
    for claim in claims {
        let json = serde_json::to_vec(claim).unwrap();
        area.put(&format!("terms/{}", claim.term), &json).await.unwrap();
    }
    Claims::new(area.clone(), "grove")
}

#[tokio::test]
async fn what_was_shipped_is_read_on_another_disk_and_what_was_not_durable_is_not() {
    let directory = tempfile::tempdir().unwrap();
    let (old, new) = (directory.path().join("old"), directory.path().join("new"));
    let area = area(directory.path());
    let (mut written, _) = journal(&old.join("journal"));
    let progress = Progress::default();
    let mut shipper = shipper(&area, &old, 1, &progress);
    commit(&mut written, 1..=10);
    progress.durable(written.last());
    shipper.ship().await.unwrap();
    commit(&mut written, 11..=20);
    progress.durable(15);
    shipper.ship().await.unwrap();

    let claims = claimed(&area, &[claim(1, 1)]).await;
    let restored = restore(&area, &claims, &new).await.unwrap();
    assert_eq!((restored.snapshot, restored.last), (0, 15));
    let (mut going_on, numbers) = journal(&new.join("journal"));
    assert_eq!(numbers.0, (1..=15).collect::<Vec<_>>());

    // The successor goes on with frames of its own; what the old one still ships counts for nothing.
    let claims = claimed(&area, &[claim(2, 16)]).await;
    progress.durable(20);
    shipper.ship().await.unwrap();
    commit(&mut going_on, 116..=118);
    let follower = Progress::default();
    follower.durable(going_on.last());
    self::shipper(&area, &new, 2, &follower).ship().await.unwrap();
    let third = directory.path().join("third");
    assert_eq!(restore(&area, &claims, &third).await.unwrap().last, 18);
    let (_, numbers) = journal(&third.join("journal"));
    assert_eq!(numbers.0, (1..=15).chain(116..=118).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_damaged_piece_is_refused_by_name() {
    let directory = tempfile::tempdir().unwrap();
    let area = area(directory.path());
    let old = directory.path().join("old");
    let (mut written, _) = journal(&old.join("journal"));
    commit(&mut written, 1..=10);
    let progress = Progress::default();
    progress.durable(10);
    shipper(&area, &old, 1, &progress).ship().await.unwrap();
    let key = Piece::key(1, 1, 10);
    area.put(&key, b"other bytes").await.unwrap();
    let claims = claimed(&area, &[claim(1, 1)]).await;
    let refused = restore(&area, &claims, &directory.path().join("new")).await;
    assert!(refused.unwrap_err().to_string().contains(&key));
}

/// A journal that closes a segment with each commit, so that a snapshot is due.
fn busy_journal(directory: &Path) -> Journal {
    let options = journal::Options { segment_bytes: 1 };
    let mut numbers = Numbers::default();
    Journal::open(
        Arc::new(SystemDisk),
        &directory.join("journal"),
        options,
        &mut numbers,
    )
    .unwrap()
}

/// Commits a number and takes the snapshot that is due then.
fn picture(journal: &mut Journal, number: u64) {
    commit(journal, number..=number);
    let due = journal.snapshot_due().unwrap();
    journal.snapshot_ended(due.take(&Numbers((1..=number).collect())));
}

/// A sound archive of a job, unlike one of another year.
fn archive(disk: &Path, job: u64, year: u64) -> Vec<u8> {
    let mut state = State::default();
    apply(&mut state, &Event::TermBegan { term: Term(year) });
    let archive = Archive {
        state,
        attempts: Vec::new(),
        events: Vec::new(),
    };
    let archives = Archives::new(Arc::new(SystemDisk), disk);
    archives.write(JobId(job), &archive).unwrap();
    std::fs::read(archives.path(JobId(job))).unwrap()
}

fn keys(listed: Vec<espalier_artifact::StoredObject>) -> Vec<String> {
    listed.into_iter().map(|object| object.key).collect()
}

#[tokio::test]
async fn an_archive_that_cannot_be_read_stops_neither_the_others_nor_the_journal() {
    let directory = tempfile::tempdir().unwrap();
    let (area, old) = (area(directory.path()), directory.path().join("old"));
    let (mut written, _) = journal(&old.join("journal"));
    commit(&mut written, 1..=10);
    std::fs::create_dir_all(old.join("archive/job-1.archive")).unwrap();
    archive(&old, 2, 1);
    let progress = Progress::default();
    progress.durable(10);
    let refused = shipper(&area, &old, 1, &progress).ship().await.unwrap_err();
    assert!(refused.to_string().contains("job-1.archive"), "{refused}");
    assert_eq!(area.list("archive").await.unwrap().len(), 1);
    let claims = claimed(&area, &[claim(1, 1)]).await;
    let restored = restore(&area, &claims, &directory.path().join("new"))
        .await
        .unwrap();
    assert_eq!((restored.last, restored.archives), (10, 1));
}

#[tokio::test]
async fn what_the_store_has_is_not_shipped_again_after_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let (area, old) = (area(directory.path()), directory.path().join("old"));
    let mut written = busy_journal(&old);
    picture(&mut written, 1);
    archive(&old, 1, 1);
    let progress = Progress::default();
    progress.durable(1);
    claimed(&area, &[claim(1, 1)]).await;
    shipper(&area, &old, 1, &progress).ship().await.unwrap();
    let before = keys(area.list("").await.unwrap());
    assert_eq!(before.len(), 4, "{before:?}");
    // Started again, with a term of its own.
    claimed(&area, &[claim(2, 2)]).await;
    shipper(&area, &old, 2, &progress).ship().await.unwrap();
    let after = keys(area.list("").await.unwrap());
    assert_eq!(after.len(), 5, "only the claim is new: {after:?}");
    // An archive that is another's is shipped, whoever has shipped one of the same name.
    archive(&old, 1, 2);
    shipper(&area, &old, 2, &progress).ship().await.unwrap();
    assert_eq!(area.list("archive/2").await.unwrap().len(), 1);
}

#[tokio::test]
async fn the_archive_of_a_coordinator_that_was_superseded_does_not_take_the_place_of_its_successors() {
    let directory = tempfile::tempdir().unwrap();
    let area = area(directory.path());
    let claims = claimed(&area, &[claim(1, 1), claim(2, 5)]).await;
    let (old, successor) = (directory.path().join("old"), directory.path().join("successor"));
    for disk in [&successor, &old] {
        journal(&disk.join("journal"));
    }
    let of_the_job_that_is = archive(&successor, 5, 1);
    archive(&old, 5, 2);
    let progress = Progress::default();
    shipper(&area, &successor, 2, &progress).ship().await.unwrap();
    // It wakes up, and does not know yet.
    shipper(&area, &old, 1, &progress).ship().await.unwrap();
    let third = directory.path().join("third");
    restore(&area, &claims, &third).await.unwrap();
    let taken = std::fs::read(third.join("archive/job-5.archive")).unwrap();
    assert_eq!(taken, of_the_job_that_is);
}

#[tokio::test]
async fn what_is_damaged_on_the_disk_takes_the_place_of_nothing_in_the_store() {
    let directory = tempfile::tempdir().unwrap();
    let (area, old) = (area(directory.path()), directory.path().join("old"));
    let claims = claimed(&area, &[claim(1, 1)]).await;
    let mut written = busy_journal(&old);
    let progress = Progress::default();
    let sound = archive(&old, 1, 1);
    picture(&mut written, 1);
    progress.durable(1);
    shipper(&area, &old, 1, &progress).ship().await.unwrap();
    picture(&mut written, 2);
    progress.durable(2);
    std::fs::write(old.join("archive/job-1.archive"), "nothing sound").unwrap();
    let snapshot = old.join("journal").join(journal::snapshot::name(2));
    std::fs::write(snapshot, "nothing sound").unwrap();
    claimed(&area, &[claim(2, 3)]).await;
    shipper(&area, &old, 2, &progress).ship().await.unwrap();
    let new = directory.path().join("new");
    let restored = restore(&area, &claims, &new).await.unwrap();
    assert_eq!((restored.snapshot, restored.last), (1, 2));
    assert_eq!(std::fs::read(new.join("archive/job-1.archive")).unwrap(), sound);
    // Nor is one that got there all the same a start's only snapshot.
    area.put(&Snapshot::key(2, 2), b"nothing sound").await.unwrap();
    let restored = restore(&area, &claims, &directory.path().join("third"))
        .await
        .unwrap();
    assert_eq!((restored.snapshot, restored.last), (1, 2));
}

#[tokio::test]
async fn frames_before_the_older_of_two_snapshots_go_beside_shipping() {
    let directory = tempfile::tempdir().unwrap();
    let (area, old) = (area(directory.path()), directory.path().join("old"));
    let claims = claimed(&area, &[claim(1, 1)]).await;
    let mut written = busy_journal(&old);
    let progress = Progress::default();
    let mut shipper = shipper(&area, &old, 1, &progress);
    for number in 1..=4 {
        picture(&mut written, number);
        progress.durable(number);
        shipper.ship().await.unwrap();
    }
    assert_eq!(
        area.list("journal").await.unwrap().len(),
        4,
        "shipping waits for none of it"
    );
    super::prune::Pruner::new(area.clone(), claims.clone(), 1)
        .prune()
        .await
        .unwrap();
    assert_eq!(keys(area.list("journal").await.unwrap()), [Piece::key(1, 4, 4)]);
    assert_eq!(
        keys(area.list("snapshots").await.unwrap()),
        [Snapshot::key(1, 3), Snapshot::key(1, 4)]
    );
    // One that was superseded removes nothing.
    claimed(&area, &[claim(2, 5)]).await;
    assert!(
        super::prune::Pruner::new(area.clone(), claims.clone(), 1)
            .prune()
            .await
            .is_err()
    );
    let restored = restore(&area, &claims, &directory.path().join("new"))
        .await
        .unwrap();
    assert_eq!((restored.snapshot, restored.last, restored.term), (4, 4, 2));
}
