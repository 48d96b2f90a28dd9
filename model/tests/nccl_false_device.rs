//! Ranks with a GPU each, where there is no GPU: what NCCL is told and when, and what comes of its failures.
//!
//! `false_device/` builds the libraries; ranks are threads of one process, and a device is the host's memory.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod false_device;

use std::net::TcpListener;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use espalier_model::collective::mesh::{Mesh, Options, Place};
use espalier_model::collective::{Error, Gang, Loss, local};
use espalier_model::ops::cpu::CpuOperations;
use espalier_model::ops::{Operations, cuda};
use espalier_model::{ElementType, Result, Tensor};
use false_device::{build, build_device, passes_with};

const NCCL: &str = include_str!("false_device/nccl.c");
/// Long enough that a busy machine never takes a living rank for a lost one; nothing here waits it out.
const PATIENT: Duration = Duration::from_secs(600);

/// That `case` below passes on false devices; gives how many communicators it aborted.
fn aborts_of(case: &str, settings: &[(&str, &str)]) -> Option<usize> {
    let directory = tempfile::tempdir().unwrap();
    let log = directory.path().join("log");
    if !build_device(directory.path()) || !build(directory.path(), "libnccl.so.2", NCCL, &["-pthread"]) {
        return None;
    }
    let mut settings = settings.to_vec();
    settings.push(("FALSE_NCCL_LOG", log.to_str().unwrap()));
    passes_with(case, directory.path(), &settings);
    Some(count_lines(&log))
}

fn count_lines(file: &Path) -> usize {
    std::fs::read_to_string(file).map_or(0, |text| text.lines().count())
}

fn patient() -> Options {
    Options {
        forming: PATIENT,
        silence: PATIENT,
        call: PATIENT,
    }
}

/// A rank with its device.
struct Rank {
    mesh: Arc<Mesh>,
    operations: Box<dyn Operations>,
    gang: Arc<dyn Gang>,
}

impl Rank {
    fn tensor(&self, elements: &[f32], rows: usize) -> Result<Tensor> {
        self.operations.upload(elements, rows, elements.len() / rows)
    }
}

/// Runs `work` as each rank of a gang of GPUs.
fn run<T: Send>(size: usize, options: &Options, work: impl Fn(&Rank) -> Result<T> + Sync) -> Vec<Result<T>> {
    let listeners: Vec<TcpListener> = (0..size)
        .map(|_| TcpListener::bind("127.0.0.1:0").unwrap())
        .collect();
    let address = |listener: &TcpListener| listener.local_addr().unwrap().to_string();
    let addresses: Vec<String> = listeners.iter().map(address).collect();
    let (work, addresses) = (&work, &addresses);
    std::thread::scope(|scope| {
        let threads: Vec<_> = listeners
            .into_iter()
            .enumerate()
            .map(|(rank, listener)| {
                let place = Place {
                    rank,
                    listener,
                    addresses: addresses.clone(),
                    token: "token".to_owned(),
                    generation: 1,
                };
                scope.spawn(move || {
                    let mesh = Arc::new(Mesh::form(place, options.clone())?);
                    let settings = cuda::Options {
                        memory_limit: Some(256 << 20),
                        cache: None,
                        ..cuda::Options::default()
                    };
                    let operations = Box::new(cuda::CudaOperations::open(0, settings)?);
                    let gang = operations.gang(mesh.clone())?;
                    let result = work(&Rank {
                        mesh: mesh.clone(),
                        operations,
                        gang,
                    })?;
                    mesh.close()?;
                    Ok(result)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Numbers whose sum depends on the order.
fn numbers(rank: usize, count: usize) -> Vec<f32> {
    let value = |index: usize| {
        let mixed = (index + 1) * (rank + 3) * 2_654_435_761 % 100_003;
        (mixed as f32 - 50_000.0) * 10_f32.powi(mixed as i32 % 7 - 3)
    };
    (0..count).map(value).collect()
}

/// One of each call, all under way at a time, and messages in both directions between all ranks.
fn play(operations: &dyn Operations, gang: &dyn Gang) -> Result<Vec<Vec<f32>>> {
    let (rank, size) = (gang.rank(), gang.size());
    let ranks: Vec<usize> = (0..size).collect();
    let all = gang.communicator(&ranks)?;
    let own = |count: usize, rows: usize| operations.upload(&numbers(rank, count), rows, count / rows);
    let mut flights = vec![
        all.all_reduce(own(35, 5)?)?,
        all.reduce_scatter(own(6 * size, 2 * size)?)?,
        all.all_gather(own(8, 2)?)?,
        all.broadcast(own(9, 1)?, size - 1)?,
    ];
    let others = || (0..size).filter(|&other| other != rank);
    for other in others() {
        drop(all.send(own(10 + other, 1)?, other)?);
        drop(all.send(own(3, 3)?, other)?);
    }
    for other in others() {
        flights.push(all.receive(1, 10 + rank, ElementType::F32, other)?);
        flights.push(all.receive(3, 1, ElementType::F32, other)?);
    }
    let mut results = Vec::new();
    for flight in flights.into_iter().rev() {
        results.push(operations.download(&flight.wait()?)?);
    }
    gang.barrier()?;
    gang.check()?;
    Ok(results)
}

#[test]
fn gpus_move_what_threads_of_one_process_do_and_part_in_peace() {
    assert!(matches!(aborts_of("calls", &[]), None | Some(0)));
}

#[test]
#[ignore = "runs in a process of its own, started by the others"]
fn calls() {
    for size in [1, 2, 3] {
        let expected = local::run(size, PATIENT, |gang| play(&CpuOperations::new(), &*gang)).unwrap();
        let found: Vec<_> = run(size, &patient(), |rank| play(&*rank.operations, &*rank.gang))
            .into_iter()
            .map(Result::unwrap)
            .collect();
        assert_eq!(found, expected);
    }
}

#[test]
fn a_lost_rank_aborts_every_communicator_of_the_others() {
    assert!(matches!(aborts_of("lost", &[]), None | Some(2 | 3)));
}

#[test]
#[ignore = "runs in a process of its own, started by the others"]
fn lost() {
    let begun = Instant::now();
    let results = run(3, &patient(), |rank| {
        let all = rank.gang.communicator(&[0, 1, 2])?;
        all.all_reduce(rank.tensor(&[1.0], 1)?)?.wait()?;
        if rank.gang.rank() == 2 {
            rank.mesh.abort();
        }
        all.all_reduce(rank.tensor(&[1.0], 1)?)?.wait()?;
        all.check()
    });
    assert!(begun.elapsed() < PATIENT / 2);
    for (rank, result) in results.into_iter().enumerate() {
        let error = result.unwrap_err();
        let is_named = matches!(
            &error,
            espalier_model::Error::Gang(Error::RankLost {
                rank: 2,
                how: Loss::Aborted { .. },
                ..
            })
        );
        let is_own = matches!(&error, espalier_model::Error::Gang(Error::Aborted));
        assert!(if rank == 2 { is_own } else { is_named }, "rank {rank}: {error}");
    }
}

#[test]
fn what_nccl_says_of_a_failure_reaches_every_rank() {
    assert!(matches!(
        aborts_of("failing", &[("FALSE_NCCL_FAIL_FROM", "3")]),
        None | Some(2)
    ));
}

#[test]
#[ignore = "runs in a process of its own, started by the others"]
fn failing() {
    let results = run(2, &patient(), |rank| {
        let all = rank.gang.communicator(&[0, 1])?;
        all.all_reduce(rank.tensor(&[1.0], 1)?)?.wait()?;
        let second = all.all_reduce(rank.tensor(&[2.0], 1)?)?;
        let third = all.all_reduce(rank.tensor(&[3.0], 1)?)?;
        second.wait()?;
        third.wait().map(drop)
    });
    for result in results {
        let error = result.unwrap_err().to_string();
        assert!(
            error.contains("ncclAllReduce failed: a false error (6) said last"),
            "{error}"
        );
    }
}

#[test]
fn a_call_that_another_rank_never_makes_ends_at_its_deadline() {
    assert!(matches!(aborts_of("alone", &[]), None | Some(2)));
}

#[test]
#[ignore = "runs in a process of its own, started by the others"]
fn alone() {
    let options = Options {
        call: Duration::from_secs(3),
        ..patient()
    };
    let begun = Instant::now();
    let results = run(2, &options, |rank| {
        let all = rank.gang.communicator(&[0, 1])?;
        all.all_reduce(rank.tensor(&[1.0], 1)?)?.wait()?;
        if rank.gang.rank() == 0 {
            let call = all.all_reduce(rank.tensor(&[1.0], 1)?)?;
            while !rank.mesh.is_waiting() {
                rank.mesh.check()?;
                std::thread::sleep(Duration::from_millis(1));
            }
            call.wait()?;
        }
        while begun.elapsed() < PATIENT / 2 {
            all.check()?;
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    });
    let errors: Vec<_> = results.into_iter().map(Result::unwrap_err).collect();
    assert!(
        matches!(
            &errors[0],
            espalier_model::Error::Gang(Error::Deadline {
                operation: "all_reduce",
                ..
            })
        ),
        "{}",
        errors[0]
    );
    assert!(
        matches!(
            &errors[1],
            espalier_model::Error::Gang(Error::RankLost { rank: 0, .. })
        ),
        "{}",
        errors[1]
    );
}

#[test]
fn a_call_that_needs_a_rank_which_has_left_ends_soon() {
    assert!(matches!(aborts_of("left", &[]), None | Some(1 | 2)));
}

#[test]
#[ignore = "runs in a process of its own, started by the others"]
fn left() {
    let options = Options {
        silence: Duration::from_secs(6),
        ..patient()
    };
    let begun = Instant::now();
    let results = run(2, &options, |rank| {
        let all = rank.gang.communicator(&[0, 1])?;
        all.all_reduce(rank.tensor(&[1.0], 1)?)?.wait()?;
        match rank.gang.rank() {
            0 => all.all_reduce(rank.tensor(&[1.0], 1)?)?.wait().map(drop),
            _ => Ok(()),
        }
    });
    assert!(begun.elapsed() < PATIENT / 2);
    let error = results.into_iter().next().unwrap().unwrap_err();
    assert!(
        matches!(
            &error,
            espalier_model::Error::Gang(Error::RankLost { rank: 1, .. })
        ),
        "{error}"
    );
}

#[test]
fn a_machine_without_nccl_is_told_what_to_install() {
    let directory = tempfile::tempdir().unwrap();
    if build_device(directory.path()) {
        passes_with("without_nccl", directory.path(), &[]);
    }
}

#[test]
#[ignore = "runs in a process of its own, started by the others"]
fn without_nccl() {
    let error = run(1, &patient(), |_| Ok(())).remove(0).unwrap_err();
    let text = error.to_string();
    // Unless the machine has one.
    assert!(
        text.contains("libnccl.so.2") && text.contains("nvidia-nccl-cu13"),
        "{text}"
    );
}
