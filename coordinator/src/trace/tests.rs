#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use super::*;
use crate::scheduler::{Command, Now, apply, decide};

fn submitted(output: &str) -> State {
    let command = Command::Submit {
        request_id: None,
        spec: "{}".into(),
        parent: "parent".to_owned(),
        output: output.to_owned(),
        device_kind: "cpu".into(),
        priority: 0,
    };
    let mut state = State::default();
    for event in decide(
        &state.clone(),
        command,
        Now {
            unix_ms: 1_700_000_000_000,
        },
    )
    .unwrap()
    {
        apply(&mut state, &event);
    }
    state
}

fn parts(traceparent: &str) -> Vec<&str> {
    traceparent.split('-').collect()
}

#[test]
fn a_traceparent_is_what_w3c_says() {
    let state = submitted("/out");
    let text = traceparent(state.jobs().next().unwrap(), AttemptId(7));
    let parts = parts(&text);
    assert_eq!(
        parts.iter().map(|part| part.len()).collect::<Vec<_>>(),
        [2, 32, 16, 2]
    );
    assert_eq!((parts[0], parts[3]), ("00", "01"));
    let is_lower_hex = |text: &str| text.chars().all(|digit| matches!(digit, '0'..='9' | 'a'..='f'));
    assert!(parts.iter().all(|part| is_lower_hex(part)));
    assert!(parts[1] != "0".repeat(32) && parts[2] != "0".repeat(16));
    assert_eq!(
        TraceId::from_hex(parts[1]).unwrap(),
        Trace::of(state.jobs().next().unwrap()).id
    );
}

#[test]
fn a_restarted_coordinator_goes_on_with_the_same_trace() {
    let (before, after) = (submitted("/out"), submitted("/out"));
    let of = |state: &State, attempt| traceparent(state.jobs().next().unwrap(), AttemptId(attempt));
    assert_eq!(of(&before, 1), of(&after, 1));
    assert_eq!(
        parts(&of(&before, 1))[1],
        parts(&of(&after, 2))[1],
        "one trace a job"
    );
    assert_ne!(
        of(&before, 1),
        of(&before, 2),
        "a span of its own for every attempt"
    );
    assert_ne!(
        parts(&of(&before, 1))[1],
        parts(&of(&submitted("/elsewhere"), 1))[1]
    );
}
