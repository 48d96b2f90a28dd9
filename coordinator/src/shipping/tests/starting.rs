//! Starts from the store.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use espalier_artifact::ArtifactStore;

use super::{area, busy_journal, claim, claimed, commit, journal, picture, piece, shipper};
use crate::journal::disk::Disk;
use crate::journal::tests::faulty::FaultyDisk;
use crate::service::surroundings::SystemClock;
use crate::shipping::chain::Snapshot;
use crate::shipping::listing::Listed;
use crate::shipping::prune::Pruner;
use crate::shipping::restore::Building;
use crate::shipping::start::{RESTORING_FILE, mark, unmark};
use crate::shipping::{Options, Progress, prepare, restore};

#[tokio::test]
async fn what_is_shipped_while_the_journal_is_built_is_taken_and_what_goes_meanwhile_begins_it_anew() {
    let directory = tempfile::tempdir().unwrap();
    let (area, old) = (area(directory.path()), directory.path().join("old"));
    let claims = claimed(&area, &[claim(1, 1)]).await;
    let known = claims.all().await.unwrap();
    let (mut written, _) = journal(&old.join("journal"));
    let progress = Progress::default();
    let mut shipper = shipper(&area, &old, 1, &progress);
    for last in [10, 20] {
        commit(&mut written, last - 9..=last);
        progress.durable(last);
        shipper.ship().await.unwrap();
    }
    // What was listed before the second shipping.
    let listed = |last| Listed {
        pieces: vec![piece(1, 1, last)],
        snapshots: Vec::new(),
    };
    let new = directory.path().join("new");
    let mut building = Building::begin(&area, &known, &new).await.unwrap();
    assert!(building.follow(&claims, listed(10)).await.unwrap());
    assert_eq!(building.finish().await.unwrap().last, 20);
    assert_eq!(journal(&new.join("journal")).1.0, (1..=20).collect::<Vec<_>>());
    // A piece that was listed and is gone.
    let mut building = Building::begin(&area, &known, &new).await.unwrap();
    assert!(!building.follow(&claims, listed(9)).await.unwrap());
    // A term that was claimed meanwhile.
    claimed(&area, &[claim(2, 11)]).await;
    let mut building = Building::begin(&area, &known, &new).await.unwrap();
    assert!(!building.follow(&claims, listed(10)).await.unwrap());
}

#[tokio::test]
async fn frames_that_only_a_damaged_snapshot_leads_to_are_not_given_up() {
    let directory = tempfile::tempdir().unwrap();
    let (area, old) = (area(directory.path()), directory.path().join("old"));
    let claims = claimed(&area, &[claim(1, 1)]).await;
    let mut written = busy_journal(&old);
    let progress = Progress::default();
    let mut shipper = shipper(&area, &old, 1, &progress);
    for number in 1..=3 {
        picture(&mut written, number);
        progress.durable(number);
        shipper.ship().await.unwrap();
    }
    Pruner::new(area.clone(), claims.clone(), 1)
        .prune()
        .await
        .unwrap();
    for sequence in [2, 3] {
        let path = directory
            .path()
            .join("store/coordinator/grove")
            .join(Snapshot::key(1, sequence));
        std::fs::write(path, "nothing sound").unwrap();
    }
    let refused = restore(&area, &claims, &directory.path().join("new"))
        .await
        .unwrap_err();
    let refused = refused.to_string();
    assert!(refused.contains("frames 1 to 3 cannot be reached"), "{refused}");
    assert!(refused.contains(&Snapshot::key(1, 3)), "{refused}");
}

#[tokio::test]
async fn the_last_start_from_the_store_is_marked_until_its_term_is_claimed() {
    let directory = tempfile::tempdir().unwrap();
    let location = directory.path().join("store");
    let store = ArtifactStore::open(location.to_str().unwrap()).unwrap();
    let area = store.area("coordinator/grove");
    claimed(&area, &[claim(1, 1)]).await;
    let (old, new) = (directory.path().join("old"), directory.path().join("new"));
    let (mut written, _) = journal(&old.join("journal"));
    commit(&mut written, 1..=10);
    let progress = Progress::default();
    progress.durable(10);
    let mut shipper = shipper(&area, &old, 1, &progress);
    shipper.ship().await.unwrap();
    let begin = async || {
        let options = Options {
            data_dir: new.clone(),
            cluster: "grove".to_owned(),
            interval: Duration::from_secs(5),
            lease: Duration::from_secs(10),
        };
        prepare(&store, options, Arc::new(SystemClock::default()))
            .await
            .unwrap()
    };
    std::fs::create_dir_all(&new).unwrap();
    begin().await;
    assert!(new.join("restoring").exists());
    // Its claim failed; by the next start the store has more.
    commit(&mut written, 11..=12);
    progress.durable(12);
    shipper.ship().await.unwrap();
    let prepared = begin().await;
    assert_eq!(journal(&new.join("journal")).1.0.len(), 12);
    prepared.settled().unwrap();
    commit(&mut written, 13..=14);
    progress.durable(14);
    shipper.ship().await.unwrap();
    begin().await;
    assert_eq!(
        journal(&new.join("journal")).1.0.len(),
        12,
        "it goes on by itself"
    );
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
