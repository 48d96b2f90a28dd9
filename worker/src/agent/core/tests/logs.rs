//! Logs of attempts on their way to the coordinator.

use super::*;

#[test]
fn lines_that_may_be_lost_with_a_stream_are_sent_again_with_their_numbers() {
    let mut world = World::welcomed();
    world.message(assign(1, "a"));
    world.device(line(1));
    world.lose();
    assert_eq!(world.device(line(2)), []);
    assert_eq!(lines(&world.reconnect()), [1, 2]);
}

fn line(number: u64) -> DeviceEvent {
    DeviceEvent::Log {
        lease: lease(1),
        first_line: number,
        lines: vec![number.to_string()],
    }
}

/// The numbers of the lines that were said.
fn lines(outputs: &[Output]) -> Vec<u64> {
    let logs = said(outputs).into_iter().filter_map(|message| match message {
        FromWorker::Log(log) => Some(log),
        _ => None,
    });
    logs.flat_map(|log| (log.first_line..).zip(&log.lines))
        .map(|(number, line)| {
            assert_eq!(*line, number.to_string());
            number
        })
        .collect()
}

#[test]
fn lines_that_found_no_room_are_said_again_before_those_that_follow() {
    let mut world = World::welcomed();
    world.message(assign(1, "a"));
    assert_eq!(lines(&world.device(line(1))), [1]);
    assert_eq!(lines(&world.device(line(2))), [2]);
    world.give(Input::LogHeldBack {
        lease: lease(1),
        first_line: 2,
    });
    assert_eq!(lines(&world.device(line(3))), [0_u64; 0], "there is no room yet");
    let connection = world.connection;
    let answer = HeartbeatResponse {
        term: 3,
        superseded: Vec::new(),
    };
    assert_eq!(
        lines(&world.give(Input::HeartbeatAnswer { connection, answer })),
        [2, 3]
    );
    assert_eq!(lines(&world.device(line(4))), [4]);
}

#[test]
fn the_rest_of_a_log_is_said_before_the_end() {
    let mut world = World::welcomed();
    world.message(assign(1, "a"));
    world.device(line(1));
    world.give(Input::LogHeldBack {
        lease: lease(1),
        first_line: 1,
    });
    let outputs = world.ended(1, output());
    assert!(
        matches!(said(&outputs)[..], [FromWorker::Log(_), FromWorker::Completed(_)]),
        "{outputs:?}"
    );
}
