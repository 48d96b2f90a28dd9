//! What a user of the store relies on.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs;

use espalier_artifact::{BlockingStore, Error, Name};

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
        BlockingStore::open("s3://bucket"),
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
