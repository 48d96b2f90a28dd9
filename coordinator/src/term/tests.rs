#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use espalier_artifact::ArtifactStore;
use proptest::prelude::*;

use super::Fence;
use super::authority::{Authority, Predecessor, Standing};
use super::claims::{Claim, Claimant, Claims, Plan, plan};
use crate::journal::tests::faulty::FaultyDisk;
use crate::scheduler::Term;
use crate::service::owner::Owner;
use crate::service::surroundings::{Beside, Surroundings, SystemClock, SystemSecrets, Work};
use crate::service::{CoordinatorOptions, PipelinePlanner};
use crate::tables::Tables;

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
    let mut authority = Authority::new(4, LEASE, seconds(5), Predecessor::MayServe { lease: LEASE });
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

fn claimant(name: &str, restored: Option<u64>) -> Claimant {
    Claimant {
        host: format!("host of {name}"),
        claimant: name.to_owned(),
        start: "first".to_owned(),
        lease: LEASE,
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
        lease_ms: 10_000,
    }
}

#[test]
fn the_same_disk_goes_on_at_once_a_restored_one_waits_and_any_other_is_refused() {
    let (ours, theirs) = ([claim_of("pear", 4)], [claim_of("plum", 4)]);
    let pear = claimant("pear", None);
    let at_once = |term| Plan::Claim(term, Predecessor::Gone);
    assert_eq!(plan(&pear, 0, 1, &[], 0), at_once(1));
    assert_eq!(plan(&pear, 4, 50, &ours, 0), at_once(5));
    // Claimed, then stopped before the journal said so.
    assert_eq!(plan(&pear, 3, 50, &ours, 0), at_once(5));
    let restored = claimant("pear", Some(4));
    let waits = Plan::Claim(5, Predecessor::MayServe { lease: LEASE });
    assert_eq!(plan(&restored, 4, 50, &theirs, 49), waits);
    assert_eq!(plan(&restored, 4, 50, &ours, 49), at_once(5));
    assert_eq!(plan(&pear, 3, 50, &theirs, 0), Plan::Refuse);
    assert_eq!(plan(&pear, 7, 50, &theirs, 0), Plan::Refuse);
}

#[test]
fn a_journal_without_a_frame_that_was_not_restored_does_not_make_the_history_of_the_cluster_void() {
    let theirs = [claim_of("plum", 4)];
    assert_eq!(plan(&claimant("pear", None), 0, 1, &theirs, 49), Plan::Refuse);
}

#[test]
fn what_was_restored_before_another_claimed_is_restored_again() {
    let claims = [claim_of("plum", 4), claim_of("fig", 5)];
    assert_eq!(plan(&claimant("pear", Some(4)), 4, 50, &claims, 49), Plan::Again);
}

#[test]
fn a_disk_that_lost_frames_which_the_store_has_claims_nothing() {
    let pear = claimant("pear", None);
    for claims in [vec![claim_of("pear", 4)], Vec::new()] {
        assert_eq!(plan(&pear, 4, 50, &claims, 50), Plan::Behind);
        assert_eq!(plan(&pear, 4, 50, &claims, 49), Plan::Claim(5, Predecessor::Gone));
    }
}

#[test]
fn the_longest_lease_of_those_before_is_waited_out() {
    let mut patient = claim_of("plum", 3);
    patient.lease_ms = 60_000;
    let claims = [patient, claim_of("fig", 4)];
    let Plan::Claim(5, predecessor) = plan(&claimant("pear", Some(4)), 4, 50, &claims, 49) else {
        panic!("nobody has claimed meanwhile")
    };
    let mut authority = Authority::new(5, LEASE, seconds(0), predecessor);
    authority.looked(seconds(60), Some(5));
    assert_eq!(authority.standing(seconds(65)), Standing::Waits);
    assert_eq!(authority.standing(seconds(66)), Standing::Holds);
}

#[tokio::test(flavor = "multi_thread")]
async fn of_many_claims_at_once_on_a_new_store_one_is_made_and_the_others_start_again() {
    let directory = tempfile::tempdir().unwrap();
    let store = ArtifactStore::open(directory.path().to_str().unwrap()).unwrap();
    let claims = Claims::new(store.area("coordinator/grove"), "grove");
    let running: Vec<_> = (0..4)
        .map(|number| {
            let claims = claims.clone();
            tokio::spawn(async move {
                let claimant = claimant(&number.to_string(), None);
                claims.claim(&claimant, 0, 1).await
            })
        })
        .collect();
    let mut terms = Vec::new();
    for claim in running {
        match claim.await.unwrap() {
            Ok((claim, _)) => terms.push(claim.term),
            Err(error) => assert!(error.to_string().contains("empty data directory"), "{error}"),
        }
    }
    assert_eq!(terms, [1]);
    assert_eq!(claims.all().await.unwrap().len(), 1);
}

#[tokio::test]
async fn a_coordinator_whose_cluster_went_on_is_told_who_holds_it_and_what_to_do() {
    let directory = tempfile::tempdir().unwrap();
    let store = ArtifactStore::open(directory.path().to_str().unwrap()).unwrap();
    let claims = Claims::new(store.area("coordinator/grove"), "grove");
    claims.claim(&claimant("old", None), 0, 1).await.unwrap();
    let (taken, _) = claims.claim(&claimant("new", Some(1)), 1, 7).await.unwrap();
    assert_eq!((taken.term, taken.from_sequence), (2, 7));
    let error = claims
        .claim(&claimant("old", None), 1, 30)
        .await
        .unwrap_err()
        .to_string();
    for part in [
        "\"grove\"",
        directory.path().to_str().unwrap(),
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
        let mut newer = Authority::new(2, lease, own(claimed), Predecessor::MayServe { lease: LEASE });
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

/// A fence that only counts.
#[derive(Debug, Default)]
struct Counting(AtomicU64);

impl Fence for Counting {
    fn claim(&self, own: Term, _next: u64) -> crate::Result<Term> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Ok(own.next())
    }

    fn standing(&self, _now: Duration) -> Standing {
        Standing::Holds
    }
}

struct Idle;

impl Beside for Idle {
    fn spawn(&self, _work: Work) {}
}

#[test]
fn no_term_is_claimed_before_the_disk_is_known_to_have_room() {
    let (disk, fence) = (FaultyDisk::default(), Arc::new(Counting::default()));
    let open = || {
        let surroundings = Surroundings {
            clock: Arc::new(SystemClock::default()),
            beside: Arc::new(Idle),
            disk: Arc::new(disk.clone()),
            secrets: Arc::new(SystemSecrets::new().unwrap()),
            tables: Tables::default(),
            store: String::new(),
            store_id: String::new(),
            witness: None,
        };
        let options = CoordinatorOptions::new("data");
        let planner = Arc::new(PipelinePlanner::default());
        Owner::open_fenced(
            options,
            planner,
            surroundings,
            Arc::clone(&fence) as Arc<dyn Fence>,
        )
    };
    disk.set_room(Some(30));
    assert!(open().unwrap_err().to_string().contains("no room"));
    assert_eq!(fence.0.load(Ordering::Relaxed), 0);
    disk.set_room(None);
    open().unwrap();
    assert_eq!(fence.0.load(Ordering::Relaxed), 1);
}
