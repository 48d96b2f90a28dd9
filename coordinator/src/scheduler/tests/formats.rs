//! Journals of builds before: what they hold still reads, and gives a state that can go on.

use crate::scheduler::{Event, JobId, Needs, State, TaskPhase, apply, check};

/// A journal as the first build wrote it: no priorities, no needs, no task beside an attempt.
const FIRST_BUILD: &str = r#"[
    {"event":"term_began","term":1},
    {"event":"worker_joined","worker":1,"name":"a","epoch":1,"host":"a",
     "devices":[{"id":"cpu","kind":"cpu","name":"x","memory_bytes":1,"threads":1}]},
    {"event":"job_submitted","job":1,"request_id":null,"spec":"{}","parent":"p","output":"/out",
     "device_kind":"cpu","at":1},
    {"event":"stages_planned","job":1,"revision":1,"stages":[{"name":"score","kind":"score","decision":null,
     "note":"","tasks":[{"id":1,"name":"one","payload":"{}","exclusive":false},
     {"id":2,"name":"two","payload":"{}","exclusive":true}]}]},
    {"event":"attempt_started","attempt":1,"task":1,"worker":1,"device":"cpu","at":2},
    {"event":"attempt_failed","attempt":1,"failure":{"kind":"crashed","message":"m"},"retry":true,"at":3},
    {"event":"attempt_started","attempt":2,"task":1,"worker":1,"device":"cpu","at":4},
    {"event":"attempt_lost","attempt":2,"retry":true,"at":5},
    {"event":"worker_lost","worker":1},
    {"event":"worker_returned","worker":1},
    {"event":"worker_leaving","worker":1},
    {"event":"worker_returned","worker":1},
    {"event":"attempt_started","attempt":3,"task":1,"worker":1,"device":"cpu","at":6},
    {"event":"attempt_completed","attempt":3,"output":"{}","at":7},
    {"event":"job_cancelled","job":1,"reason":"r","at":8},
    {"event":"partial_removed","job":1}
]"#;

#[test]
fn a_journal_of_the_first_build_still_reads() {
    let events: Vec<Event> = serde_json::from_str(FIRST_BUILD).unwrap();
    let mut state = State::default();
    for event in &events {
        apply(&mut state, event);
        check(&state).unwrap();
    }
    let tasks: Vec<_> = state.tasks().collect();
    assert!(matches!(tasks[0].phase, TaskPhase::Done { .. }));
    let failures = tasks[0].failures();
    assert_eq!((failures.crashed, failures.worker_lost), (1, 1));
    assert_eq!(tasks[1].phase, TaskPhase::Abandoned);
    assert_eq!(tasks[1].needs, Needs::default());
    let job = state.job(JobId(1)).unwrap();
    assert_eq!((job.priority, state.is_archivable(job)), (0, true));
}

#[test]
fn a_retry_of_a_build_before_keeps_the_checks_that_it_kept() {
    let mut state = State::default();
    for event in [
        r#"{"event":"job_submitted","job":1,"request_id":null,"spec":"{}","parent":"p","output":"/out",
            "device_kind":"cpu","at":1}"#,
        r#"{"event":"stages_planned","job":1,"revision":1,"stages":[{"name":"check-uniform-1","kind":"check",
            "decision":null,"note":"","tasks":[{"id":1,"name":"one","payload":"{}","exclusive":true}]}]}"#,
        r#"{"event":"job_failed","job":1,"message":"too noisy","at":2}"#,
        r#"{"event":"job_retried","job":1,"request_id":null,"at":3}"#,
    ] {
        apply(&mut state, &serde_json::from_str::<Event>(event).unwrap());
        check(&state).unwrap();
    }
    assert_eq!(state.job(JobId(1)).unwrap().stages.len(), 1);
    assert_eq!(state.tasks().count(), 1);
}

#[test]
fn a_snapshot_without_what_was_added_since_still_reads() {
    let state: State = serde_json::from_str(r#"{"term":3}"#).unwrap();
    assert_eq!(state.term().0, 3);
    assert_eq!(state.jobs().count(), 0);
}
