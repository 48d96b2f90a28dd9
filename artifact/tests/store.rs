//! What a user of a store in a directory relies on.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod suite;

use std::fs;

use espalier_artifact::{ArtifactStore, BlockingStore, Error, Name};

fn store() -> (tempfile::TempDir, BlockingStore) {
    let directory = tempfile::tempdir().unwrap();
    let store = BlockingStore::open(directory.path().join("artifacts").to_str().unwrap()).unwrap();
    (directory, store)
}

#[test]
fn bytes_come_back_under_the_name_of_their_content() {
    let (_directory, store) = store();
    let name = store.put_bytes(b"pear".to_vec()).unwrap();
    assert_eq!(name.as_str(), blake3::hash(b"pear").to_hex().as_str());
    assert_eq!(store.get_bytes(name.as_str()).unwrap().as_ref(), b"pear");
    assert_eq!(store.put_bytes(b"pear".to_vec()).unwrap(), name);
}

#[test]
fn a_file_is_moved_in_and_read_where_it_lies() {
    let (directory, store) = store();
    let path = directory.path().join("checkpoint");
    fs::write(&path, vec![7_u8; 3_000_000]).unwrap();
    let name = store.put_file(&path).unwrap();
    assert!(!path.exists());
    let stored = store.get_file(name.as_str()).unwrap();
    assert_eq!(fs::read(stored).unwrap(), vec![7_u8; 3_000_000]);
    assert_eq!(name, Name::of(&vec![7_u8; 3_000_000]));
}

#[test]
fn a_damaged_artifact_is_refused_by_bytes_and_by_file() {
    let (_directory, store) = store();
    let name = store.put_bytes(b"apricot".to_vec()).unwrap();
    let path = store.get_file(name.as_str()).unwrap();
    fs::write(&path, b"apricoT").unwrap();
    assert!(matches!(
        store.get_bytes(name.as_str()),
        Err(Error::Damaged { .. })
    ));
    assert!(matches!(
        store.get_file(name.as_str()),
        Err(Error::Damaged { .. })
    ));
}

#[test]
fn a_file_that_cannot_be_looked_at_is_not_said_to_be_absent() {
    let (_directory, store) = store();
    let name = store.put_bytes(b"medlar".to_vec()).unwrap();
    let path = store.get_file(name.as_str()).unwrap();
    fs::remove_file(&path).unwrap();
    // As of a directory that may not be read, which an administrator is not refused: a link to itself.
    std::os::unix::fs::symlink(&path, &path).unwrap();
    let refused = store.get_file(name.as_str()).unwrap_err();
    assert!(matches!(refused, Error::Io { .. }), "{refused}");
}

#[test]
fn an_absent_or_malformed_name_is_one_clear_error() {
    let (_directory, store) = store();
    let absent = Name::of(b"never stored");
    assert!(matches!(
        store.get_bytes(absent.as_str()),
        Err(Error::NotFound { .. })
    ));
    assert!(matches!(
        store.get_file(absent.as_str()),
        Err(Error::NotFound { .. })
    ));
    assert!(matches!(
        store.get_file("../../etc/passwd"),
        Err(Error::Name { .. })
    ));
    assert!(matches!(
        BlockingStore::open("ftp://orchard"),
        Err(Error::Location { .. })
    ));
}

#[test]
fn a_file_that_cannot_be_read_leaves_nothing_behind() {
    let (directory, store) = store();
    assert!(matches!(
        store.put_file(&directory.path().join("absent")),
        Err(Error::Io { .. })
    ));
    assert_eq!(fs::read_dir(store.location()).unwrap().count(), 0);
}

async fn with_a_store(case: impl AsyncFn(&ArtifactStore)) {
    let directory = tempfile::tempdir().unwrap();
    let location = format!("file://{}", directory.path().join("artifacts").display());
    let store = ArtifactStore::open(&location).unwrap();
    store.check().await.unwrap();
    case(&store).await;
}

#[tokio::test]
async fn bytes_and_files_come_back_in_a_directory() {
    with_a_store(suite::bytes_come_back_under_the_name_of_their_content).await;
    with_a_store(suite::a_file_is_taken_in_whole_and_read_back).await;
}

#[tokio::test]
async fn damage_is_refused_in_a_directory() {
    with_a_store(async |store| {
        let root = std::path::PathBuf::from(store.location());
        suite::damage_is_refused(store, async |key, bytes| {
            fs::write(root.join(key), bytes).unwrap()
        })
        .await;
    })
    .await;
}

#[tokio::test]
async fn records_and_areas_keep_what_is_put_in_a_directory() {
    with_a_store(suite::every_attempt_has_a_record_of_its_own).await;
    with_a_store(suite::an_area_keeps_what_its_owner_puts_and_lists_it_in_order).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn of_sixteen_claims_at_once_exactly_one_wins_in_a_directory() {
    with_a_store(suite::of_sixteen_claims_at_once_exactly_one_wins).await;
}

#[tokio::test]
async fn an_interrupted_upload_leaves_nothing_visible_in_a_directory() {
    with_a_store(suite::an_interrupted_upload_leaves_nothing_visible).await;
}

#[tokio::test]
async fn leftovers_of_yesterday_go_and_artifacts_and_fresh_files_stay() {
    with_a_store(async |store| {
        let name = store.put_bytes(b"kept".to_vec()).await.unwrap();
        let artifact = store.get_file(name.as_str()).await.unwrap();
        let (old, new) = (store.scratch_path().unwrap(), store.scratch_path().unwrap());
        let staged = artifact.with_file_name("half-copied");
        for path in [&old, &new, &staged] {
            fs::write(path, b"unfinished").unwrap();
        }
        let yesterday = std::time::SystemTime::now() - std::time::Duration::from_secs(48 * 3600);
        for path in [&old, &staged, &artifact] {
            let file = fs::File::options().append(true).open(path).unwrap();
            file.set_modified(yesterday).unwrap();
        }
        assert_eq!(store.remove_leftovers().await.unwrap(), 2);
        assert!(artifact.exists() && new.exists() && !old.exists() && !staged.exists());
    })
    .await;
}

#[tokio::test]
async fn what_was_staged_and_never_promoted_goes_from_records_and_areas_too() {
    with_a_store(async |store| {
        let about = Name::of(b"a question");
        store.set_record(&about, 7, b"kept").await.unwrap();
        store
            .area("coordinator/orchard")
            .put("terms/1", b"kept")
            .await
            .unwrap();
        store.id_or_new().await.unwrap();
        let root = std::path::PathBuf::from(store.location());
        let yesterday = std::time::SystemTime::now() - std::time::Duration::from_secs(48 * 3600);
        let kept = [
            format!("records/{about}/7"),
            "coordinator/orchard/terms/1".to_owned(),
            "STORE-ID".to_owned(),
        ];
        for key in &kept {
            fs::write(root.join(format!("{key}#1")), b"half").unwrap();
            fs::write(root.join(format!("{key}#2")), b"half, and fresh").unwrap();
            for name in [key.clone(), format!("{key}#1")] {
                let file = fs::File::options().append(true).open(root.join(name)).unwrap();
                file.set_modified(yesterday).unwrap();
            }
        }
        assert_eq!(store.remove_leftovers().await.unwrap(), 3);
        for key in &kept {
            let there = ["", "#1", "#2"].map(|end| root.join(format!("{key}{end}")).exists());
            assert_eq!(there, [true, false, true], "{key}");
        }
        assert_eq!(store.records(&about).await.unwrap().len(), 1);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_gets_one_id_however_many_ask_for_it_first() {
    with_a_store(suite::a_store_has_one_id_for_good).await;
}

#[test]
fn a_directory_that_is_not_mounted_is_refused_and_not_made() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("mount/point");
    for location in [path.display().to_string(), format!("file://{}", path.display())] {
        let refused = BlockingStore::open_existing(&location).unwrap_err();
        assert!(matches!(refused, Error::Away { .. }), "{refused:?}");
        let said = refused.to_string();
        assert!(said.contains(&path.display().to_string()), "{said}");
        assert!(said.contains("mount the coordinator's directory there"), "{said}");
    }
    assert!(!directory.path().join("mount").exists());
}

#[test]
fn an_empty_directory_or_another_store_is_refused_where_an_id_is_expected() {
    let (_directory, store) = store();
    let mount_point = tempfile::tempdir().unwrap();
    let empty = BlockingStore::open_existing(mount_point.path().to_str().unwrap()).unwrap();
    let said = empty.require("0123").unwrap_err().to_string();
    assert!(said.contains("it has no STORE-ID, expected 0123"), "{said}");
    assert_eq!(fs::read_dir(mount_point.path()).unwrap().count(), 0);

    fs::create_dir_all(store.location()).unwrap();
    let own = tokio::runtime::Runtime::new()
        .unwrap()
        .block_on(ArtifactStore::open(&store.location()).unwrap().id_or_new())
        .unwrap();
    store.require(&own).unwrap();
    let said = store.require("0123").unwrap_err().to_string();
    assert!(
        said.contains(&format!("its STORE-ID is {own}, expected 0123")),
        "{said}"
    );
}

#[test]
fn a_store_that_has_gone_is_not_made_anew_by_what_is_written_nor_taken_for_an_empty_one() {
    let directory = tempfile::tempdir().unwrap();
    let (place, elsewhere) = (directory.path().join("store"), directory.path().join("elsewhere"));
    let store = BlockingStore::open(place.to_str().unwrap()).unwrap();
    let own = ArtifactStore::open(&store.location()).unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let id = runtime.block_on(own.id_or_new()).unwrap();
    store.require(&id).unwrap();
    let about = Name::of(b"a question");
    let name = store.put_bytes(b"kept".to_vec()).unwrap();
    store.set_record(&about, 1, b"kept").unwrap();
    let outside = directory.path().join("file");
    fs::write(&outside, b"new").unwrap();

    let refused = |store: &BlockingStore| {
        let area = own.area("coordinator/a");
        [
            store.put_bytes(b"new".to_vec()).map(drop),
            store.put_file(&outside).map(drop),
            store.scratch_path().map(drop),
            store.set_record(&about, 2, b"new"),
            runtime.block_on(area.put("b", b"new")),
            store.get_bytes(name.as_str()).map(drop),
            store.get_file(name.as_str()).map(drop),
            store.records(&about).map(drop),
            store
                .again()
                .and_then(|store| store.put_bytes(b"new".to_vec()))
                .map(drop),
        ]
        .map(|answer| answer.unwrap_err())
    };
    fs::rename(&place, &elsewhere).unwrap();
    for error in refused(&store) {
        assert!(
            error.may_pass() && matches!(error, Error::Away { .. }),
            "{error:?}"
        );
    }
    assert!(!place.exists(), "a directory was made where the store had been");
    // Where it was mounted there is an empty directory.
    fs::create_dir(&place).unwrap();
    for error in refused(&store) {
        assert!(matches!(error, Error::Away { .. }), "{error:?}");
    }
    assert_eq!(fs::read_dir(&place).unwrap().count(), 0);
    // And another store is not written to.
    let other = ArtifactStore::open(place.to_str().unwrap()).unwrap();
    runtime.block_on(other.id_or_new()).unwrap();
    for error in refused(&store) {
        assert!(
            !error.may_pass() && matches!(error, Error::Foreign { .. }),
            "{error:?}"
        );
    }
    fs::remove_dir_all(&place).unwrap();
    fs::rename(&elsewhere, &place).unwrap();
    assert_eq!(store.put_file(&outside).unwrap(), Name::of(b"new"));
    assert_eq!(store.records(&about).unwrap().len(), 1);
}
