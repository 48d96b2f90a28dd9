#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::Duration;

use espalier_artifact::ArtifactStore;
use proptest::prelude::*;

use super::authority::{Authority, Predecessor, Standing};
use super::claims::{Claim, Claimant, Claims, Plan, plan};

const LEASE: Duration = Duration::from_secs(10);

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

#[test]
fn authority_begins_with_a_look_and_ends_a_lease_after_the_last_one_began() {
    let mut authority = Authority::new(3, LEASE, seconds(5), Predecessor::Gone);
    assert_eq!(authority.standing(seconds(5)), Standing::Waits);
    authority.looked(seconds(6), Some(3));
    assert_eq!(authority.standing(seconds(6)), Standing::Holds);
    assert_eq!(authority.standing(seconds(15)), Standing::Holds);
    assert_eq!(authority.standing(seconds(16)), Standing::Waits);
    // An answer that comes late counts from when it was asked for, and never shortens.
    authority.looked(seconds(10), Some(3));
    authority.looked(seconds(8), Some(3));
    assert_eq!(authority.standing(seconds(19)), Standing::Holds);
    assert_eq!(authority.standing(seconds(20)), Standing::Waits);
}

#[test]
fn a_successor_on_another_disk_waits_more_than_a_lease_though_it_has_looked() {
    let mut authority = Authority::new(4, LEASE, seconds(5), Predecessor::MayServe);
    authority.looked(seconds(6), Some(4));
    authority.looked(seconds(14), Some(4));
    assert_eq!(authority.standing(seconds(15)), Standing::Waits);
    assert_eq!(authority.standing(seconds(16)), Standing::Holds);
}

#[test]
fn a_higher_term_ends_authority_for_good() {
    let mut authority = Authority::new(3, LEASE, seconds(0), Predecessor::Gone);
    authority.looked(seconds(1), Some(3));
    authority.looked(seconds(2), Some(5));
    assert_eq!(authority.standing(seconds(2)), Standing::Superseded { by: 5 });
    authority.looked(seconds(3), Some(3));
    assert_eq!(authority.standing(seconds(3)), Standing::Superseded { by: 5 });
}

#[test]
fn a_store_that_lost_our_own_claim_proves_nothing() {
    let mut authority = Authority::new(3, LEASE, seconds(0), Predecessor::Gone);
    authority.looked(seconds(1), None);
    authority.looked(seconds(2), Some(2));
    assert_eq!(authority.standing(seconds(3)), Standing::Waits);
}

fn claimant(name: &str, restored: bool) -> Claimant {
    Claimant {
        host: format!("host of {name}"),
        claimant: name.to_owned(),
        start: "first".to_owned(),
        restored,
    }
}

fn claim_of(name: &str, term: u64) -> Claim {
    Claim {
        term,
        host: format!("host of {name}"),
        from_sequence: 9,
        claimant: name.to_owned(),
        start: "first".to_owned(),
    }
}

#[test]
fn the_same_disk_goes_on_at_once_an_empty_one_waits_and_an_old_one_is_refused() {
    let (ours, theirs) = (claim_of("pear", 4), claim_of("plum", 4));
    let pear = claimant("pear", false);
    assert_eq!(plan(&pear, 0, 1, None), Plan::Claim(1, Predecessor::Gone));
    assert_eq!(plan(&pear, 4, 50, Some(&ours)), Plan::Claim(5, Predecessor::Gone));
    // Claimed, then stopped before the journal said so.
    assert_eq!(plan(&pear, 3, 50, Some(&ours)), Plan::Claim(5, Predecessor::Gone));
    assert_eq!(
        plan(&pear, 0, 1, Some(&theirs)),
        Plan::Claim(5, Predecessor::MayServe)
    );
    let restored = claimant("pear", true);
    assert_eq!(
        plan(&restored, 4, 50, Some(&theirs)),
        Plan::Claim(5, Predecessor::MayServe)
    );
    assert_eq!(plan(&pear, 3, 50, Some(&theirs)), Plan::Refuse);
    assert_eq!(plan(&pear, 7, 50, Some(&theirs)), Plan::Refuse);
}

#[tokio::test(flavor = "multi_thread")]
async fn of_many_claims_at_once_every_one_gets_a_term_of_its_own() {
    let directory = tempfile::tempdir().unwrap();
    let store = ArtifactStore::open(directory.path().to_str().unwrap()).unwrap();
    let claims = Claims::new(store.area("coordinator/grove"), "grove");
    let running: Vec<_> = (0..4)
        .map(|number| {
            let claims = claims.clone();
            tokio::spawn(async move {
                let claimant = claimant(&number.to_string(), false);
                claims.claim(&claimant, 0, 1).await.unwrap().0.term
            })
        })
        .collect();
    let mut terms = Vec::new();
    for claim in running {
        terms.push(claim.await.unwrap());
    }
    terms.sort_unstable();
    assert_eq!(terms, [1, 2, 3, 4]);
    assert_eq!(claims.all().await.unwrap().len(), 4);
}

#[tokio::test]
async fn a_coordinator_whose_cluster_went_on_is_told_who_holds_it_and_what_to_do() {
    let directory = tempfile::tempdir().unwrap();
    let store = ArtifactStore::open(directory.path().to_str().unwrap()).unwrap();
    let claims = Claims::new(store.area("coordinator/grove"), "grove");
    claims.claim(&claimant("old", false), 0, 1).await.unwrap();
    let (taken, _) = claims.claim(&claimant("new", true), 1, 7).await.unwrap();
    assert_eq!((taken.term, taken.from_sequence), (2, 7));
    let error = claims
        .claim(&claimant("old", false), 1, 30)
        .await
        .unwrap_err()
        .to_string();
    for part in [
        "\"grove\"",
        "host of new",
        "term 2",
        "frame 7",
        "empty data directory",
    ] {
        assert!(error.contains(part), "{error}");
    }
}

/// What happens at one moment to two coordinators, of which the second takes over.
#[derive(Debug, Clone)]
struct Moment {
    /// Milliseconds since the one before.
    after: u64,
    /// Which of them looks, and how long its answer takes; a look may also never be answered.
    looks: Option<(bool, Option<u64>)>,
}

fn moments() -> impl Strategy<Value = Vec<Moment>> {
    let look = prop::option::of((any::<bool>(), prop::option::weighted(0.9, 0_u64..25_000)));
    let moment = (1_u64..4_000, look).prop_map(|(after, looks)| Moment { after, looks });
    prop::collection::vec(moment, 1..80)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever the store's delays: looks are answered late or never, and what they say is as old as they are.
    #[test]
    fn never_do_two_hold_authority_at_once(
        moments in moments(),
        claim_asked in 0_u64..60_000,
        claim_took in 0_u64..20_000,
        offset in 0_u64..1_000_000,
    ) {
        let milliseconds = Duration::from_millis;
        let lease = LEASE;
        let mut older = Authority::new(1, lease, milliseconds(0), Predecessor::Gone);
        // The two clocks have nothing in common.
        let own = |now: u64| milliseconds(now + offset);
        let claimed = claim_asked + claim_took;
        let mut newer = Authority::new(2, lease, own(claimed), Predecessor::MayServe);
        let mut pending: Vec<(u64, bool, u64, Option<u64>)> = Vec::new();
        let mut now = 0;
        for moment in moments {
            now += moment.after;
            if let Some((is_newer, Some(delay))) = moment.looks
                && (!is_newer || now >= claimed)
            {
                // The claim is in the store at the latest when it is answered; the list may be read at any time
                // between question and answer, so the older may just miss it.
                let seen = if now >= claimed { 2 } else { 1 };
                pending.push((now + delay, is_newer, now, Some(seen)));
            }
            pending.retain(|(due, is_newer, begun, seen)| {
                if *due > now { return true; }
                if *is_newer { newer.looked(own(*begun), *seen); } else { older.looked(milliseconds(*begun), *seen); }
                false
            });
            let both = older.standing(milliseconds(now)) == Standing::Holds
                && now >= claimed
                && newer.standing(own(now)) == Standing::Holds;
            prop_assert!(!both, "both hold authority at {now} ms");
        }
    }
}
