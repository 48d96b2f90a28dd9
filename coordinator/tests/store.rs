//! Which artifact store a coordinator takes, and what it tells its workers of it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::path::Path;
use std::sync::Arc;

use common::{DEADLINE, FakeWorker, Place, Story};
use espalier_artifact::ArtifactStore;
use espalier_coordinator::{Coordinator, CoordinatorOptions, Error, Handle};

/// A coordinator on a disk of this name, with a store of this name.
async fn coordinator(place: &Place, disk: &str, store: &Path) -> Result<Handle, Error> {
    let options = CoordinatorOptions {
        data_dir: place.directory.path().join(disk),
        store: Some(store.display().to_string()),
        cluster: disk.to_owned(),
        ..place.options()
    };
    Coordinator::start_with(options, Arc::new(Story)).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_coordinator_of_a_store_tells_its_workers_the_same_id_and_that_is_what_lies_there() {
    let place = Place::new();
    let store = place.directory.path().join("store");
    let mut told = Vec::new();
    for disk in ["first", "first", "second"] {
        let running = coordinator(&place, disk, &store).await.unwrap();
        let worker = FakeWorker::connect(&running, "a", 1, Vec::new()).await;
        told.push(worker.welcome.artifact_store_id.clone());
        running.shutdown(DEADLINE).await.unwrap();
    }
    let own = ArtifactStore::open_existing(store.to_str().unwrap()).unwrap();
    let lies_there = own.id().await.unwrap().unwrap();
    assert_eq!(told, [lies_there.clone(), lies_there.clone(), lies_there]);
}

#[tokio::test]
async fn a_store_in_the_data_directory_is_refused_unless_it_is_the_place_for_it() {
    let place = Place::new();
    let data_dir = place.directory.path().join("disk");
    std::fs::create_dir(&data_dir).unwrap();
    let linked = place.directory.path().join("linked");
    std::os::unix::fs::symlink(&data_dir, &linked).unwrap();
    for wrong in [
        data_dir.clone(),
        data_dir.join("store"),
        linked,
        data_dir.join("artifacts/more"),
    ] {
        let refused = coordinator(&place, "disk", &wrong).await.unwrap_err();
        assert!(matches!(refused, Error::Invalid(_)), "{wrong:?}: {refused:?}");
        let said = refused.to_string();
        assert!(said.contains("lies in the data directory"), "{said}");
        assert!(said.contains("can be moved as a whole"), "{said}");
        assert!(
            !data_dir.join("claimant").exists(),
            "something was begun in {wrong:?}"
        );
    }
    let beside = place.directory.path().join("disk-of-artifacts");
    for right in [beside, data_dir.join("artifacts")] {
        let running = coordinator(&place, "disk", &right).await.unwrap();
        running.shutdown(DEADLINE).await.unwrap();
        std::fs::remove_dir_all(&data_dir).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_is_not_mounted_is_refused_and_not_made_anew() {
    let place = Place::new();
    let store = place.directory.path().join("store");
    let first = coordinator(&place, "disk", &store).await.unwrap();
    first.shutdown(DEADLINE).await.unwrap();

    let elsewhere = place.directory.path().join("elsewhere");
    std::fs::rename(&store, &elsewhere).unwrap();
    let absent = coordinator(&place, "disk", &store).await.unwrap_err();
    assert!(matches!(absent, Error::Invalid(_)), "{absent:?}");
    let said = absent.to_string();
    assert!(said.contains("there is no such directory"), "{said}");
    assert!(said.contains(&store.display().to_string()), "{said}");
    assert!(!store.exists());

    std::fs::create_dir(&store).unwrap();
    let empty = coordinator(&place, "disk", &store).await.unwrap_err().to_string();
    assert!(empty.contains("it has no STORE-ID"), "{empty}");
    assert!(empty.contains("disk/store-id"), "the remedy is said: {empty}");

    // Where it is mounted does not matter, only which it is.
    let mounted = coordinator(&place, "disk", &elsewhere).await.unwrap();
    mounted.shutdown(DEADLINE).await.unwrap();
    // Replaced on purpose.
    std::fs::remove_file(place.directory.path().join("disk/store-id")).unwrap();
    let replaced = coordinator(&place, "disk", &store).await;
    replaced.unwrap().shutdown(DEADLINE).await.unwrap();
}
