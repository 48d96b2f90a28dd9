#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::mpsc::channel;

use proptest::prelude::*;

use super::frame::{Frame, Kind};
use super::*;

/// Long enough that a busy machine never takes a living rank for a lost one; nothing here waits it out.
const PATIENT: Duration = Duration::from_secs(600);

pub(in crate::collective) fn patient() -> Options {
    Options {
        forming: PATIENT,
        silence: PATIENT,
        call: PATIENT,
    }
}

/// A listener for each rank, and where it is.
fn listeners(size: usize, host: &str) -> (Vec<TcpListener>, Vec<String>) {
    let listeners: Vec<TcpListener> = (0..size).map(|_| TcpListener::bind((host, 0)).unwrap()).collect();
    let addresses = listeners
        .iter()
        .map(|listener| listener.local_addr().unwrap().to_string())
        .collect();
    (listeners, addresses)
}

fn place(rank: usize, listener: TcpListener, addresses: &[String]) -> Place {
    Place {
        rank,
        listener,
        addresses: addresses.to_vec(),
        token: "secret".to_owned(),
        generation: 4,
    }
}

fn identity(rank: usize, addresses: &[String]) -> Identity {
    Identity {
        rank,
        addresses: addresses.to_vec(),
        generation: 4,
        key: *blake3::hash(b"secret").as_bytes(),
    }
}

/// A mesh of `size` ranks in this process.
pub(in crate::collective) fn meshes(size: usize, options: &Options) -> Vec<Mesh> {
    let (listeners, addresses) = listeners(size, "127.0.0.1");
    std::thread::scope(|scope| {
        let threads: Vec<_> = listeners
            .into_iter()
            .enumerate()
            .map(|(rank, listener)| {
                let place = place(rank, listener, &addresses);
                let options = options.clone();
                scope.spawn(move || Mesh::form(place, options).unwrap())
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Rank 0 as a mesh, and the bare connection of a rank 1 that keeps to no rules but the hello's.
fn beside_a_puppet(options: &Options) -> (Mesh, TcpStream) {
    let (mut both, addresses) = listeners(2, "127.0.0.1");
    let (second, first) = (both.pop().unwrap(), both.pop().unwrap());
    std::thread::scope(|scope| {
        let mesh = scope.spawn(|| Mesh::form(place(0, first, &addresses), options.clone()).unwrap());
        let mut streams = hello::form(&identity(1, &addresses), &second, PATIENT).unwrap();
        (mesh.join().unwrap(), streams.remove(0).unwrap())
    })
}

fn put(stream: &mut TcpStream, frame: &Frame, sequence: u64, generation: u64) {
    let bytes = [frame.header(sequence, generation).as_slice(), &frame.payload].concat();
    stream.write_all(&bytes).unwrap();
}

/// The error with which a mesh is broken.
fn broken(mesh: &Mesh) -> Error {
    let (sender, receiver) = channel();
    mesh.on_break(move |error| sender.send(error.clone()).unwrap());
    receiver.recv_timeout(PATIENT / 2).expect("the mesh is whole")
}

/// Why a rank does not find the others, once it has had time enough to hear all of `reasons`; each try waits its time
/// out, and on a busy machine a short one ends before anybody answered.
fn not_formed(reasons: &[&str], form: impl Fn(Duration) -> Error) -> String {
    let mut patience = Duration::from_millis(300);
    loop {
        let error = form(patience).to_string();
        if reasons.iter().all(|reason| error.contains(reason)) {
            return error;
        }
        assert!(patience < PATIENT / 10, "{error}");
        patience *= 10;
    }
}

#[test]
fn ranks_that_come_in_any_order_and_late_find_each_other_by_either_protocol() {
    for host in ["127.0.0.1", "::1"] {
        let Ok(probe) = TcpListener::bind((host, 0)) else {
            eprintln!("{host} is not there: left out");
            continue;
        };
        drop(probe);
        let (listeners, addresses) = listeners(4, host);
        let said: Vec<Vec<Vec<u8>>> = std::thread::scope(|scope| {
            let threads: Vec<_> = listeners
                .into_iter()
                .enumerate()
                .map(|(rank, listener)| {
                    let place = place(rank, listener, &addresses);
                    scope.spawn(move || {
                        std::thread::sleep(Duration::from_millis([60, 0, 150, 20][rank]));
                        let mesh = Mesh::form(place, patient()).unwrap();
                        let said = mesh.exchange(&vec![rank as u8; rank * 1000]).unwrap();
                        mesh.close().unwrap();
                        said
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        for all in said {
            let lengths: Vec<usize> = all.iter().map(Vec::len).collect();
            assert_eq!(lengths, [0, 1000, 2000, 3000]);
            assert!(
                all.iter()
                    .enumerate()
                    .all(|(rank, bytes)| bytes.iter().all(|&byte| byte == rank as u8))
            );
        }
    }
}

#[test]
fn a_gang_of_one_needs_nobody_and_a_rank_outside_its_gang_is_refused() {
    let (mut one, addresses) = listeners(1, "127.0.0.1");
    let mesh = Mesh::form(place(0, one.pop().unwrap(), &addresses), patient()).unwrap();
    assert_eq!(mesh.exchange(b"x").unwrap(), [b"x"]);
    let too_long = mesh.exchange(&vec![0; EXCHANGED + 1]).unwrap_err();
    assert!(matches!(too_long, Error::TooLong { .. }), "{too_long}");
    mesh.close().unwrap();
    assert!(matches!(mesh.exchange(b"x").map(drop), Ok(())));
    assert!(matches!(mesh.check(), Err(Error::Closed)));
    let (mut one, addresses) = listeners(1, "127.0.0.1");
    let refused = Mesh::form(place(1, one.pop().unwrap(), &addresses), patient()).unwrap_err();
    assert!(refused.to_string().contains("rank 1"), "{refused}");
}

#[test]
fn ranks_that_never_come_are_named_in_one_error() {
    let (all, mut addresses) = listeners(4, "127.0.0.1");
    // Nobody listens at rank 0's, which is one end of a connection, so that no test beside this one gets it; somebody
    // does at the others', and never comes.
    let held = TcpStream::connect(&addresses[0]).unwrap();
    addresses[0] = held.local_addr().unwrap().to_string();
    let begun = Instant::now();
    let error = not_formed(&["refused", "has not come"], |forming| {
        let own = place(1, all[1].try_clone().unwrap(), &addresses);
        let options = Options { forming, ..patient() };
        Mesh::form(own, options).unwrap_err()
    });
    assert!(begun.elapsed() < PATIENT / 2);
    for (rank, address) in addresses.iter().enumerate().filter(|&(rank, _)| rank != 1) {
        assert!(error.contains(&format!("rank {rank} at {address}")), "{error}");
    }
}

#[test]
fn strangers_stale_ranks_and_those_without_the_token_are_turned_away_without_harm() {
    let (mut both, addresses) = listeners(2, "127.0.0.1");
    let (second, first) = (both.pop().unwrap(), both.pop().unwrap());
    let at = addresses[0].clone();
    std::thread::scope(|scope| {
        let mesh = scope.spawn(|| Mesh::form(place(0, first, &addresses), patient()).unwrap());
        // One that says nothing, one that speaks otherwise, and one that leaves at once.
        let mut silent = TcpStream::connect(&at).unwrap();
        let mut other = TcpStream::connect(&at).unwrap();
        other.write_all(&[b'G'; 300]).unwrap();
        drop(TcpStream::connect(&at).unwrap());
        let elsewhere = TcpListener::bind("127.0.0.1:0").unwrap();
        let wrong = [
            (
                Identity {
                    generation: 3,
                    ..identity(1, &addresses)
                },
                "generation 4",
            ),
            (
                Identity {
                    key: [0; 32],
                    ..identity(1, &addresses)
                },
                "turned this rank away",
            ),
            (
                Identity {
                    addresses: [addresses.clone(), addresses.clone()].concat(),
                    ..identity(1, &addresses)
                },
                "of 2",
            ),
        ];
        for (identity, reason) in wrong {
            not_formed(&[reason], |patience| {
                hello::form(&identity, &elsewhere, patience).unwrap_err()
            });
        }
        let right = Mesh::form(place(1, second, &addresses), patient()).unwrap();
        let mesh = mesh.join().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| right.exchange(b"right").unwrap());
            assert_eq!(mesh.exchange(b"").unwrap()[1], b"right");
        });
        // What strangers were told is how a connection begins, and then that it ended.
        let mut told = Vec::new();
        silent.read_to_end(&mut told).unwrap_or_default();
        assert!(told.len() <= 100);
    });
}

#[test]
fn a_rank_whose_process_ends_is_lost_to_all_and_every_wait_ends() {
    let mut all = meshes(3, &patient());
    let puppet = all.remove(1);
    std::thread::scope(|scope| {
        let waits: Vec<_> = all
            .iter()
            .map(|mesh| scope.spawn(|| mesh.exchange(b"").unwrap_err()))
            .collect();
        // As the system does for a process that is killed.
        puppet.shared.end();
        for wait in waits {
            let error = wait.join().unwrap();
            assert!(
                matches!(
                    &error,
                    Error::RankLost {
                        rank: 1,
                        how: Loss::Disconnected { .. },
                        ..
                    }
                ),
                "{error}"
            );
        }
    });
    assert!(all[0].send(2, 9, vec![1], Instant::now() + PATIENT).is_err());
}

#[test]
fn an_exchange_waits_for_a_rank_that_works_alone_for_longer_than_a_call_may_take_and_for_none_that_is_gone() {
    let call = Duration::from_millis(50);
    let mut all = meshes(2, &Options { call, ..patient() });
    let later = all.remove(1);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| all[0].exchange(b"early"));
        while !all[0].is_waiting() {
            std::thread::sleep(call);
        }
        std::thread::sleep(call * 12);
        assert!(all[0].is_waiting() && !later.is_waiting());
        assert_eq!(later.exchange(b"late").unwrap(), [b"early".as_slice(), b"late"]);
        assert_eq!(waiting.join().unwrap().unwrap()[1], b"late");
    });
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| all[0].exchange(b"").unwrap_err());
        std::thread::sleep(call);
        later.shared.end();
        let error = waiting.join().unwrap();
        assert!(matches!(error, Error::RankLost { rank: 1, .. }), "{error}");
    });
}

#[test]
fn a_piece_of_nothing_in_an_exchange_ends_the_mesh() {
    let (mesh, mut puppet) = beside_a_puppet(&patient());
    let on_lane = |payload: Vec<u8>| Frame {
        kind: Kind::Data,
        lane: EXCHANGE,
        payload,
    };
    put(&mut puppet, &on_lane(2_u64.to_le_bytes().to_vec()), 0, 4);
    put(&mut puppet, &on_lane(vec![7]), 1, 4);
    put(&mut puppet, &on_lane(Vec::new()), 2, 4);
    let error = mesh.exchange(b"ab").unwrap_err();
    assert!(error.to_string().contains("a piece of nothing"), "{error}");
    assert_eq!(broken(&mesh).to_string(), error.to_string());
}

#[test]
fn a_rank_that_gives_up_is_named_with_its_reason() {
    let all = meshes(3, &patient());
    all[2].give_up(Error::Deadline {
        operation: "all_reduce",
        waited: PATIENT,
    });
    for mesh in &all[..2] {
        let error = broken(mesh);
        assert!(
            matches!(&error, Error::RankLost { rank: 2, how: Loss::Aborted { reason }, .. } if reason.contains("all_reduce")),
            "{error}"
        );
    }
    assert!(matches!(broken(&all[2]), Error::Deadline { .. }));
}

#[test]
fn a_rank_that_is_silent_is_lost_and_told_so() {
    let silence = Duration::from_millis(1500);
    // A mesh whose own process stood still for as long blames nobody.
    let (took, error, mut puppet) = (0..20)
        .find_map(|_| {
            let (mesh, puppet) = beside_a_puppet(&Options { silence, ..patient() });
            let begun = Instant::now();
            let error = broken(&mesh);
            (!matches!(error, Error::Away { .. })).then(|| (begun.elapsed(), error, puppet))
        })
        .expect("a silent rank is never lost");
    assert!(took > silence / 2);
    assert!(
        matches!(
            &error,
            Error::RankLost {
                rank: 1,
                how: Loss::Silent { .. },
                ..
            }
        ),
        "{error}"
    );
    // The puppet's bytes: beats, and last that it was given up itself.
    puppet.set_read_timeout(Some(PATIENT)).unwrap();
    let (mut sequence, mut last) = (0, None);
    while let Ok(Some(frame)) = frame::read(&mut puppet, sequence, 4) {
        sequence += 1;
        last = Some(frame);
    }
    let last = last.unwrap();
    assert!(matches!(last.loss(), Some((1, Loss::Silent { .. }))), "{last:?}");
    assert!(sequence > 1);
}

#[test]
fn a_rank_that_beats_is_never_silent() {
    let silence = Duration::from_millis(1500);
    // A busy machine may let a beat come late once, and one after the other.
    let stayed = (0..20).any(|_| {
        let all = meshes(2, &Options { silence, ..patient() });
        std::thread::sleep(silence * 3 / 2);
        all.iter().all(|mesh| mesh.check().is_ok())
    });
    assert!(stayed);
}

#[test]
fn a_rank_that_was_given_up_does_not_blame_those_that_went_on() {
    let (mesh, mut puppet) = beside_a_puppet(&patient());
    let how = Loss::Silent { silence: PATIENT };
    put(&mut puppet, &Frame::broken(0, &how), 0, 4);
    drop(puppet);
    let error = broken(&mesh);
    assert!(
        matches!(&error, Error::GivenUp { how: said } if *said == how),
        "{error}"
    );
}

#[test]
fn a_rank_that_stood_still_says_so() {
    let options = Options {
        silence: Duration::from_millis(200),
        ..patient()
    };
    // The watch comes first after the pause, or a connection that broke meanwhile does.
    let watched = Shared::new(0, 4, options.clone(), vec![None, None]);
    std::thread::sleep(Duration::from_millis(300));
    watched.look();
    assert!(matches!(watched.check(), Err(Error::Away { absence }) if absence >= options.silence));
    let cut = Shared::new(0, 4, options, vec![None, None]);
    std::thread::sleep(Duration::from_millis(150));
    cut.connection_lost(
        1,
        Loss::Disconnected {
            reason: String::new(),
        },
    );
    assert!(matches!(cut.check(), Err(Error::Away { .. })));
    let awake = Shared::new(0, 4, patient(), vec![None, None]);
    awake.look();
    awake.connection_lost(
        1,
        Loss::Disconnected {
            reason: String::new(),
        },
    );
    assert!(matches!(awake.check(), Err(Error::RankLost { rank: 1, .. })));
}

#[test]
fn a_rank_that_leaves_after_its_work_breaks_nothing() {
    let mut all = meshes(3, &patient());
    let leaver = all.remove(2);
    leaver
        .send(0, 7, b"last words".to_vec(), Instant::now() + PATIENT)
        .unwrap();
    leaver.close().unwrap();
    drop(leaver);
    let deadline = Instant::now() + PATIENT;
    assert_eq!(all[0].receive(2, 7, "receive", deadline).unwrap(), b"last words");
    let wanted = all[0].receive(2, 7, "receive", deadline).unwrap_err();
    assert!(
        matches!(
            &wanted,
            Error::RankLost {
                rank: 2,
                how: Loss::Left,
                ..
            }
        ),
        "{wanted}"
    );
    all[0].send(1, 7, b"still here".to_vec(), deadline).unwrap();
    assert_eq!(all[1].receive(0, 7, "receive", deadline).unwrap(), b"still here");
    for mesh in &all {
        mesh.check().unwrap();
    }
}

#[test]
fn a_mesh_that_is_dropped_without_leaving_breaks_the_others_and_never_hangs() {
    let mut all = meshes(2, &patient());
    let begun = Instant::now();
    drop(all.remove(0));
    let error = broken(&all[0]);
    assert!(
        matches!(
            &error,
            Error::RankLost {
                rank: 0,
                how: Loss::Aborted { .. },
                ..
            }
        ),
        "{error}"
    );
    drop(all);
    // Also beside one that neither reads nor leaves, with its buffers full.
    let (mesh, puppet) = beside_a_puppet(&patient());
    for lane in 0..200 {
        for _ in 0..WINDOW {
            mesh.send(1, lane, vec![0; PIECE], Instant::now() + PATIENT)
                .unwrap();
        }
    }
    drop(mesh);
    assert!(begun.elapsed() < PATIENT / 2);
    drop(puppet);
}

#[test]
fn a_full_lane_makes_its_sender_wait_and_no_other() {
    let all = meshes(2, &patient());
    let deadline = Instant::now() + PATIENT;
    let soon = || Instant::now() + Duration::from_millis(50);
    for number in 0..WINDOW {
        all[0].send(1, 5, vec![number as u8], deadline).unwrap();
    }
    assert!(matches!(
        all[0].send(1, 5, vec![99], soon()),
        Err(Error::Deadline { .. })
    ));
    all[0].send(1, 6, vec![42], deadline).unwrap();
    assert_eq!(all[1].receive(0, 6, "receive", deadline).unwrap(), [42]);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in WINDOW..200 {
                all[0].send(1, 5, vec![number as u8], deadline).unwrap();
            }
        });
        for number in 0..200 {
            assert_eq!(all[1].receive(0, 5, "receive", deadline).unwrap(), [number]);
        }
    });
}

#[test]
fn frames_that_are_cut_damaged_stale_or_out_of_turn_end_the_mesh() {
    let data = Frame {
        kind: Kind::Data,
        lane: 3,
        payload: b"payload".to_vec(),
    };
    type Spoil = fn(&mut TcpStream, &Frame);
    let cases: [(&str, Spoil); 6] = [
        ("generation 3", |stream, frame| put(stream, frame, 0, 3)),
        ("frame 5", |stream, frame| put(stream, frame, 5, 4)),
        ("checksum", |stream, frame| {
            let mut bytes = frame.header(0, 4).to_vec();
            bytes.extend(b"pAyload");
            stream.write_all(&bytes).unwrap();
        }),
        ("within a frame", |stream, frame| {
            stream.write_all(&frame.header(0, 4)).unwrap();
            stream.shutdown(Shutdown::Write).unwrap();
        }),
        ("credit", |stream, _| put(stream, &Frame::credit(3, 1), 0, 4)),
        ("lost rank 9", |stream, _| {
            put(stream, &Frame::broken(9, &Loss::Left), 0, 4)
        }),
    ];
    for (word, spoil) in cases {
        let (mesh, mut puppet) = beside_a_puppet(&patient());
        spoil(&mut puppet, &data);
        let error = broken(&mesh);
        assert!(matches!(&error, Error::RankLost { rank: 1, .. }), "{error}");
        assert!(error.to_string().contains(word), "{word}: {error}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    #[test]
    fn whoever_dies_in_whatever_order_every_wait_ends(
        size in 2..5_usize,
        deaths in prop::collection::vec((any::<prop::sample::Index>(), 0..3_u8, 0..15_u64), 1..4),
    ) {
        let all: Vec<Mesh> = meshes(size, &patient());
        let dying: Vec<(usize, u8, u64)> = deaths.iter().map(|(who, how, when)| (who.index(size), *how, *when)).collect();
        let begun = Instant::now();
        std::thread::scope(|scope| {
            for mesh in &all {
                scope.spawn(move || while mesh.exchange(&[1; 100]).is_ok() {});
            }
            for (who, how, when) in dying {
                let mesh = &all[who];
                scope.spawn(move || {
                    std::thread::sleep(Duration::from_millis(when));
                    match how {
                        0 => mesh.shared.end(),
                        1 => mesh.abort(),
                        _ => drop(mesh.close()),
                    }
                });
            }
        });
        prop_assert!(begun.elapsed() < PATIENT / 2);
        drop(all);
        prop_assert!(begun.elapsed() < PATIENT / 2);
    }
}
