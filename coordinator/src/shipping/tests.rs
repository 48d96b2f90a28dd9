#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use espalier_artifact::{ArtifactStore, ObjectArea};

use super::chain::{Piece, Snapshot, Step, after, reach, sound};
use super::{Options, Progress, RESTORING_FILE, Shipper, mark, restore, unmark};
use crate::journal::disk::{Disk, SystemDisk};
use crate::journal::tests::faulty::FaultyDisk;
use crate::journal::{self, Fold, Journal};
use crate::metrics::Metrics;
use crate::term::Claim;

fn claim(term: u64, from_sequence: u64) -> Claim {
    Claim {
        term,
        from_sequence,
        host: String::new(),
        claimant: String::new(),
        start: String::new(),
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
    Shipper::new(area.clone(), &options, term, progress.clone(), Metrics::default())
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
    assert_eq!(progress.frames_behind(), 0);

    let claims = [claim(1, 1)];
    let restored = restore(&area, &claims, &new).await.unwrap();
    assert_eq!((restored.snapshot, restored.last), (0, 15));
    let (mut going_on, numbers) = journal(&new.join("journal"));
    assert_eq!(numbers.0, (1..=15).collect::<Vec<_>>());

    // The successor goes on with frames of its own; what the old one still ships counts for nothing.
    let claims = [claim(1, 1), claim(2, 16)];
    for claim in &claims {
        let json = serde_json::to_vec(claim).unwrap();
        area.put(&format!("terms/{}", claim.term), &json).await.unwrap();
    }
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
    let refused = restore(&area, &[claim(1, 1)], &directory.path().join("new")).await;
    assert!(refused.unwrap_err().to_string().contains(&key));
}

#[test]
fn that_a_journal_is_being_built_survives_a_power_cut_and_so_does_that_it_was() {
    let data_dir = Path::new("/data");
    let marker = data_dir.join(RESTORING_FILE);
    let disk = FaultyDisk::default();
    mark(&disk, data_dir).unwrap();
    let disk = disk.after_power_cut(0, false);
    assert!(!disk.read(&marker).unwrap().is_empty());
    unmark(&disk, data_dir).unwrap();
    let disk = disk.after_power_cut(0, false);
    assert!(disk.read(&marker).is_err());
    unmark(&disk, data_dir).unwrap();
}
