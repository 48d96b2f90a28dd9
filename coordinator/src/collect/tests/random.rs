//! Whatever the store and the journal hold, what is reachable is never removed.

use proptest::prelude::*;

use super::*;

/// Where an artifact is named.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Named {
    Spec,
    Payload,
    Output,
    Outcome,
    Archive,
    Record,
    Nowhere,
}

fn named() -> impl Strategy<Value = Named> {
    prop_oneof![
        Just(Named::Spec),
        Just(Named::Payload),
        Just(Named::Output),
        Just(Named::Outcome),
        Just(Named::Archive),
        Just(Named::Record),
        Just(Named::Nowhere),
        Just(Named::Nowhere),
    ]
}

/// A text that names these, each within other text, quoted so many times.
fn text(names: &[&Name], around: &str, deep: usize) -> String {
    let joined: String = names
        .iter()
        .map(|name| format!("{around}{name}{around}"))
        .collect();
    (0..=deep).fold(joined, |text, _| serde_json::to_string(&text).unwrap())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_is_reachable_is_never_removed_and_what_is_not_goes(
        artifacts in prop::collection::vec((named(), 1_i64..60), 1..12),
        around in "\\PC{0,12}",
        deep in 0_usize..3,
        attempt_began in prop::option::of(1_i64..60),
        now in 20_i64..120,
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut orchard = Orchard::new();
            let mut put = Vec::new();
            for (number, (named, at)) in artifacts.iter().enumerate() {
                put.push((orchard.put(&number.to_string(), at * HOUR).await, *named, *at));
            }
            let names = |whose: Named| -> Vec<&Name> {
                put.iter().filter(|(_, named, _)| *named == whose).map(|(name, ..)| name).collect()
            };
            let say = |whose: Named| text(&names(whose), &around, deep);
            // One job that ended and was archived, one that ended, and one that runs.
            for (output, outcome, is_archived) in
                [(Named::Archive, Named::Archive, true), (Named::Output, Named::Outcome, false)]
            {
                let job = orchard.submit("{}", HOUR);
                orchard.plan(job, "{}", HOUR);
                orchard.hand_out(HOUR);
                orchard.complete(&say(output), HOUR);
                orchard.succeed(job, &say(outcome), HOUR);
                if is_archived {
                    orchard.archive(job, HOUR);
                }
            }
            let job = orchard.submit(&say(Named::Spec), HOUR);
            orchard.plan(job, &say(Named::Payload), HOUR);
            if let Some(at) = attempt_began {
                orchard.hand_out(at * HOUR);
            }
            let about = Name::of(b"a question");
            orchard.store.set_record(&about, 1, say(Named::Record).as_bytes()).await.unwrap();

            orchard.collect(now * HOUR).await.unwrap();
            for (name, named, at) in &put {
                let young = now - at <= 24 || attempt_began.is_some_and(|began| *at >= began - 1);
                let stays = *named != Named::Nowhere || young;
                assert_eq!(orchard.has(name).await, stays, "{named:?} put at hour {at}");
            }
        });
    }

    /// An artifact that is too young, or put since the oldest open attempt began, never goes.
    #[test]
    fn what_is_young_never_goes(put in 0_i64..100, now in 0_i64..200, began in prop::option::of(0_i64..100)) {
        let artifact = StoredArtifact { name: Name::of(b"x"), bytes: 1, modified_unix_ms: put * HOUR };
        let mut state = State::default();
        if let Some(began) = began {
            let mut orchard = Orchard::new();
            let job = orchard.submit("{}", began * HOUR);
            orchard.plan(job, "{}", began * HOUR);
            orchard.hand_out(began * HOUR);
            state = orchard.state;
        }
        let needed = Needed::of(&state).unwrap();
        let spared = needed.lets_go(&artifact, COLLECT_AFTER, now * HOUR);
        let young = now - put <= 24 || began.is_some_and(|began| put >= began - 1);
        prop_assert_eq!(spared, !young);
    }
}
