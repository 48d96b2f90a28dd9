//! What a user relies on in any store: the same cases run against a directory and against a server.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use espalier_artifact::{ArtifactStore, Created, Error, Name};

/// More than one part of an upload, and not a whole number of them.
pub const LARGE_BYTES: usize = 37_000_001;

/// Bytes in which no two parts are alike.
pub fn large() -> Vec<u8> {
    (0..LARGE_BYTES as u64)
        .map(|place| (place.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u8)
        .collect()
}

pub async fn bytes_come_back_under_the_name_of_their_content(store: &ArtifactStore) {
    for content in [b"pear".to_vec(), Vec::new(), vec![7; 20_000_000]] {
        let name = store.put_bytes(content.clone()).await.unwrap();
        assert_eq!(name, Name::of(&content));
        assert_eq!(store.get_bytes(name.as_str()).await.unwrap(), content);
        assert_eq!(store.put_bytes(content).await.unwrap(), name);
    }
    let absent = Name::of(b"never stored");
    let missing = store.get_bytes(absent.as_str()).await;
    assert!(matches!(missing, Err(Error::NotFound { .. })), "{missing:?}");
    let missing = store.get_file(absent.as_str()).await;
    assert!(matches!(missing, Err(Error::NotFound { .. })), "{missing:?}");
    assert!(!store.contains(absent.as_str()).await.unwrap());
    store.remove(absent.as_str()).await.unwrap();
}

pub async fn a_file_is_taken_in_whole_and_read_back(store: &ArtifactStore) {
    for content in [large(), b"small".to_vec(), Vec::new()] {
        let path = store.scratch_path().unwrap();
        std::fs::write(&path, &content).unwrap();
        let name = store.put_file(&path).await.unwrap();
        assert_eq!(name, Name::of(&content));
        assert!(!path.exists());
        let stored = store.get_file(name.as_str()).await.unwrap();
        assert!(std::fs::read(stored).unwrap() == content);
        assert!(store.get_bytes(name.as_str()).await.unwrap() == content);
        let stat = store.stat(name.as_str()).await.unwrap().unwrap();
        assert_eq!(stat.bytes, content.len() as u64);
        let fan = u8::from_str_radix(name.as_str().get(..2).unwrap(), 16).unwrap();
        assert!(store.artifacts(fan).await.unwrap().contains(&stat));
        store.remove(name.as_str()).await.unwrap();
        assert!(!store.contains(name.as_str()).await.unwrap());
        assert_eq!(store.artifacts(fan).await.unwrap(), []);
    }
    let absent = store.put_file(Path::new("/no/such/file")).await;
    assert!(matches!(absent, Err(Error::Io { .. })));
}

pub async fn damage_is_refused(store: &ArtifactStore, damage: impl AsyncFn(&str, &[u8])) {
    let name = store.put_bytes(b"apricot".to_vec()).await.unwrap();
    let key = format!("{}/{name}", name.as_str().get(..2).unwrap());
    damage(&key, b"apricoT").await;
    let refused = store.get_bytes(name.as_str()).await;
    assert!(matches!(refused, Err(Error::Damaged { .. })), "{refused:?}");
    let refused = store.get_file(name.as_str()).await;
    assert!(matches!(refused, Err(Error::Damaged { .. })), "{refused:?}");
    // Putting it again mends it.
    store.put_bytes(b"apricot".to_vec()).await.unwrap();
    store.get_bytes(name.as_str()).await.unwrap();

    let about = Name::of(b"a question that was damaged");
    store.set_record(&about, 1, b"one").await.unwrap();
    store.set_record(&about, 2, b"two").await.unwrap();
    damage(&format!("records/{about}/2"), b"garbage").await;
    let records = store.records(&about).await.unwrap();
    assert_eq!(records, [(1, b"one".as_slice().into())]);

    let area = store.area("damaged/area");
    area.put("object", b"content").await.unwrap();
    damage("damaged/area/object", b"blake3 nonsense").await;
    let refused = area.get("object").await;
    assert!(matches!(refused, Err(Error::DamagedObject { .. })), "{refused:?}");
}

pub async fn every_attempt_has_a_record_of_its_own(store: &ArtifactStore) {
    let about = Name::of(b"a question");
    assert_eq!(store.records(&about).await.unwrap(), []);
    for attempt in [9, 10, 100] {
        let bytes = format!("left by {attempt}");
        store.set_record(&about, attempt, bytes.as_bytes()).await.unwrap();
    }
    store.set_record(&about, 9, b"left later by 9").await.unwrap();
    let records = store.records(&about).await.unwrap();
    let expected = [
        (9, b"left later by 9".as_slice().into()),
        (10, b"left by 10".as_slice().into()),
        (100, b"left by 100".as_slice().into()),
    ];
    assert_eq!(records, expected);
    let listed = store.all_records().await.unwrap();
    let ours = listed
        .iter()
        .filter(|(found, ..)| *found == about)
        .map(|(_, attempt, _)| *attempt);
    assert_eq!(ours.collect::<Vec<_>>(), [9, 10, 100]);
    store.remove_record(&about, 10).await.unwrap();
    assert_eq!(store.records(&about).await.unwrap().len(), 2);
}

pub async fn an_area_keeps_what_its_owner_puts_and_lists_it_in_order(store: &ArtifactStore) {
    let area = store.area("owner/of/objects");
    assert_eq!(area.list("").await.unwrap(), []);
    assert_eq!(area.get("a/1").await.unwrap(), None);
    for key in ["b/1", "a/2", "a/1"] {
        area.put(key, key.as_bytes()).await.unwrap();
    }
    area.put("a/2", b"again").await.unwrap();
    let keys = |listed: Vec<espalier_artifact::StoredObject>| {
        listed.into_iter().map(|object| object.key).collect::<Vec<_>>()
    };
    assert_eq!(keys(area.list("").await.unwrap()), ["a/1", "a/2", "b/1"]);
    assert_eq!(keys(area.list("a").await.unwrap()), ["a/1", "a/2"]);
    assert_eq!(
        area.get("a/2").await.unwrap().unwrap().as_ref(),
        b"again".as_slice()
    );
    area.delete("a/1").await.unwrap();
    area.delete("a/1").await.unwrap();
    assert_eq!(keys(area.list("a").await.unwrap()), ["a/2"]);
    let (neighbour, large) = (store.area("owner/of"), large());
    neighbour.put("large", &large).await.unwrap();
    assert!(neighbour.get("large").await.unwrap().unwrap() == large);
}

pub async fn of_sixteen_claims_at_once_exactly_one_wins(store: &ArtifactStore) {
    let area = Arc::new(store.area("claims"));
    for round in 0..8 {
        let claims: Vec<_> = (0..16)
            .map(|claimant| {
                let area = Arc::clone(&area);
                tokio::spawn(async move {
                    let (key, content) = (round.to_string(), format!("claimant {claimant}"));
                    let claim = area.put_if_absent(&key, content.as_bytes()).await;
                    (claim.unwrap(), content)
                })
            })
            .collect();
        let mut winners = Vec::new();
        for claim in claims {
            let (created, content) = claim.await.unwrap();
            if created == Created::Made {
                winners.push(content);
            }
        }
        assert_eq!(winners.len(), 1, "{winners:?} all won round {round}");
        let kept = area.get(&round.to_string()).await.unwrap().unwrap();
        assert_eq!(kept.as_ref(), winners.first().unwrap().as_bytes());
    }
}

pub async fn an_interrupted_upload_leaves_nothing_visible(store: &ArtifactStore) {
    let content = large();
    let name = Name::of(&content);
    let mut interrupted = 0;
    // The first is let go as soon as it waits for anything, however fast the machine or late this thread.
    for milliseconds in [0, 1, 20, 60, 100, 150] {
        let path = store.scratch_path().unwrap();
        std::fs::write(&path, &content).unwrap();
        let put = store.put_file(&path);
        let ended = tokio::time::timeout(Duration::from_millis(milliseconds), put).await;
        // It may have ended though nobody waited; then it is whole.
        if let Some(stat) = store.stat(name.as_str()).await.unwrap() {
            assert_eq!(stat.bytes, LARGE_BYTES as u64);
        }
        match ended {
            Ok(_) => assert!(store.get_bytes(name.as_str()).await.unwrap() == content),
            Err(_) => interrupted += 1,
        }
        store.remove(name.as_str()).await.unwrap();
    }
    assert!(interrupted > 0, "no upload was interrupted");
}

pub async fn a_store_has_one_id_for_good(store: &ArtifactStore) {
    assert_eq!(store.id().await.unwrap(), None);
    let asked: Vec<_> = (0..16)
        .map(|_| {
            let store = store.clone();
            tokio::spawn(async move { store.id_or_new().await.unwrap() })
        })
        .collect();
    let id = store.id_or_new().await.unwrap();
    assert_eq!(id.len(), 32, "{id}");
    for answer in asked {
        assert_eq!(answer.await.unwrap(), id);
    }
    store.require(&id).await.unwrap();
    let refused = store.require("another").await;
    assert!(matches!(refused, Err(Error::Foreign { .. })), "{refused:?}");
}
