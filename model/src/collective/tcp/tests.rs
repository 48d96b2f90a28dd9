#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::*;
use crate::collective::mesh::tests::{meshes, patient};
use crate::collective::mesh::{Mesh, Options};
use crate::collective::{Error, Gang, Loss, MeshGang, local};

/// Runs `work` as each rank of a gang over sockets.
fn run<T: Send>(
    size: usize,
    options: &Options,
    work: impl Fn(&MeshGang) -> Result<T> + Sync,
) -> Vec<Result<T>> {
    let work = &work;
    std::thread::scope(|scope| {
        let threads: Vec<_> = meshes(size, options)
            .into_iter()
            .map(|mesh| {
                scope.spawn(move || {
                    let mesh = Arc::new(mesh);
                    let gang = MeshGang::of_cpus(mesh.clone());
                    let result = work(&gang)?;
                    mesh.close()?;
                    Ok(result)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[derive(Debug, Clone, Copy)]
enum Step {
    AllReduce(usize, usize),
    ReduceScatter(usize, usize),
    AllGather(usize, usize),
    Broadcast(usize, usize, usize),
    /// Every rank sends to the next and receives from the one before.
    Shift(usize, usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step =
        (0..5_u8, 0..4_usize, 0..200_usize, 0..5_usize).prop_map(|(kind, rows, columns, root)| match kind {
            0 => Step::AllReduce(rows, columns * 3),
            1 => Step::ReduceScatter(rows, columns),
            2 => Step::AllGather(rows, columns),
            3 => Step::Broadcast(rows, columns * 3, root),
            _ => Step::Shift(rows, columns * 3),
        });
    prop::collection::vec(step, 1..7)
}

/// Numbers whose sum depends on the order.
fn tensor(rank: usize, step: usize, rows: usize, columns: usize) -> Tensor {
    let value = |index: usize| {
        let mixed = (index + 1) * (rank + 3) * (step + 7) * 2_654_435_761 % 100_003;
        (mixed as f32 - 50_000.0) * 10_f32.powi(mixed as i32 % 9 - 4)
    };
    Tensor::from_vec((0..rows * columns).map(value).collect(), rows, columns).unwrap()
}

/// What every step gives, as bits; waited for in another order than called.
fn play(gang: &dyn Gang, steps: &[Step], seed: u64) -> Result<Vec<Vec<u32>>> {
    let (rank, size) = (gang.rank(), gang.size());
    let ranks: Vec<usize> = (0..size).rev().collect();
    let all = gang.communicator(&ranks)?;
    let place = all.rank();
    let mut flights = Vec::new();
    for (index, step) in steps.iter().enumerate() {
        std::thread::sleep(Duration::from_micros(
            (seed ^ (rank as u64 * 37) ^ (index as u64 * 11)) % 300,
        ));
        match *step {
            Step::AllReduce(rows, columns) => {
                flights.push(all.all_reduce(tensor(rank, index, rows, columns))?)
            }
            Step::ReduceScatter(rows, columns) => {
                flights.push(all.reduce_scatter(tensor(rank, index, rows * size, columns))?);
            }
            Step::AllGather(rows, columns) => {
                flights.push(all.all_gather(tensor(rank, index, rows, columns))?)
            }
            Step::Broadcast(rows, columns, root) => {
                flights.push(all.broadcast(tensor(rank, index, rows, columns), root % size)?);
            }
            Step::Shift(..) if size == 1 => {}
            Step::Shift(rows, columns) => {
                flights.push(all.send(tensor(rank, index, rows, columns), (place + 1) % size)?);
                let from = (place + size - 1) % size;
                flights.push(all.receive(rows, columns, ElementType::F32, from)?);
            }
        }
    }
    // Receives before sends, and the last collective call first.
    let mut results: Vec<(usize, Vec<u32>)> = Vec::new();
    for (index, flight) in flights.into_iter().enumerate().rev() {
        let result = flight.wait()?;
        results.push((
            index,
            result.host()?.iter().map(|value| value.to_bits()).collect(),
        ));
    }
    results.sort();
    gang.barrier()?;
    Ok(results.into_iter().map(|(_, bits)| bits).collect())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn any_calls_give_the_bits_that_threads_of_one_process_give(
        size in 1..6_usize, steps in steps(), seed in any::<u64>(),
    ) {
        let expected = local::run(size, patient().call, |gang| play(&*gang, &steps, seed)).unwrap();
        let found: Vec<_> = run(size, &patient(), |gang| play(gang, &steps, seed))
            .into_iter()
            .map(Result::unwrap)
            .collect();
        prop_assert_eq!(found, expected);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    #[test]
    fn a_death_amid_calls_ends_every_wait_with_a_reason(
        size in 2..5_usize, who in any::<prop::sample::Index>(), when in 0..8_u64, leaves in any::<bool>(),
    ) {
        let who = who.index(size);
        let begun = Instant::now();
        let results = run(size, &patient(), |gang| {
            let ranks: Vec<usize> = (0..gang.size()).collect();
            let all = gang.communicator(&ranks)?;
            let mut calls = 0;
            loop {
                let sum = all.all_reduce(tensor(gang.rank(), calls, 30, 100))?;
                let next = (gang.rank() + 1) % size;
                let sent = all.send(tensor(0, calls, 3, 100), next)?;
                let got = all.receive(3, 100, ElementType::F32, (gang.rank() + size - 1) % size)?;
                if gang.rank() == who && begun.elapsed() > Duration::from_millis(when) {
                    if leaves {
                        return Ok(());
                    }
                    all.abort();
                }
                sum.wait()?;
                got.wait()?;
                sent.wait()?;
                calls += 1;
            }
        });
        prop_assert!(begun.elapsed() < patient().call / 2);
        for (rank, result) in results.into_iter().enumerate().filter(|&(rank, _)| rank != who) {
            let error = result.unwrap_err();
            prop_assert!(
                matches!(&error, crate::Error::Gang(Error::RankLost { rank: lost, .. }) if *lost == who),
                "rank {} says {}", rank, error
            );
        }
    }
}

#[test]
fn calls_that_do_not_fit_together_are_named_on_every_rank() {
    let results = run(2, &patient(), |gang| {
        let all = gang.communicator(&[0, 1])?;
        match gang.rank() {
            0 => all.all_reduce(tensor(0, 0, 2, 3))?.wait(),
            _ => all.all_gather(tensor(1, 0, 2, 3))?.wait(),
        }
    });
    for result in results {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("of 2 x 3"), "{error}");
    }
}

#[test]
fn a_rank_that_waits_for_another_is_known_to_and_one_that_computes_or_whose_gang_is_broken_is_not() {
    fn until(holds: impl Fn() -> bool) {
        let begun = Instant::now();
        while !holds() {
            assert!(begun.elapsed() < patient().call / 2);
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    let all: Vec<(Arc<Mesh>, MeshGang)> = meshes(2, &patient())
        .into_iter()
        .map(|mesh| {
            let mesh = Arc::new(mesh);
            (mesh.clone(), MeshGang::of_cpus(mesh))
        })
        .collect();
    let [(slow_mesh, slow), (quick_mesh, quick)] = &all[..] else {
        panic!("two ranks")
    };
    let sum = |gang: &MeshGang| gang.communicator(&[0, 1])?.all_reduce(tensor(0, 0, 2, 3))?.wait();
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| sum(quick).and_then(|_| quick.barrier()));
        until(|| quick_mesh.is_waiting());
        assert!(!slow_mesh.is_waiting());
        sum(slow).unwrap();
        until(|| quick_mesh.is_waiting());
        slow.barrier().unwrap();
        waits.join().unwrap().unwrap();
        assert!(!quick_mesh.is_waiting() && !slow_mesh.is_waiting());
        let waits = scope.spawn(|| quick.barrier());
        until(|| quick_mesh.is_waiting());
        slow.abort();
        until(|| !quick_mesh.is_waiting());
        waits.join().unwrap().unwrap_err();
    });
}

#[test]
fn a_call_that_another_rank_never_makes_ends_at_its_deadline_and_breaks_the_gang() {
    let options = Options {
        call: Duration::from_millis(200),
        ..patient()
    };
    let results = run(2, &options, |gang| {
        let all = gang.communicator(&[0, 1])?;
        if gang.rank() == 0 {
            return all.all_reduce(tensor(0, 0, 2, 3))?.wait().map(drop);
        }
        while gang.check().is_ok() {
            std::thread::sleep(Duration::from_millis(5));
        }
        gang.check()
    });
    let errors: Vec<_> = results.into_iter().map(Result::unwrap_err).collect();
    assert!(
        matches!(
            &errors[0],
            crate::Error::Gang(Error::Deadline {
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
            crate::Error::Gang(Error::RankLost {
                rank: 0,
                how: Loss::Aborted { .. },
                ..
            })
        ),
        "{}",
        errors[1]
    );
}

#[test]
fn subsets_of_a_gang_keep_apart() {
    let results = run(4, &patient(), |gang| {
        let rank = gang.rank();
        let pair: Vec<usize> = (0..4).filter(|other| other % 2 == rank % 2).collect();
        let halves = gang.communicator(&pair)?;
        let again = gang.communicator(&pair)?;
        let own = |value: f32| Tensor::from_vec(vec![value], 1, 1);
        let one = again.all_reduce(own(rank as f32 + 10.0)?)?;
        let two = halves.all_reduce(own(rank as f32)?)?.wait()?;
        Ok((two.host()?[0], one.wait()?.host()?[0]))
    });
    let results: Vec<_> = results.into_iter().map(Result::unwrap).collect();
    assert_eq!(results, [(2.0, 22.0), (4.0, 24.0), (2.0, 22.0), (4.0, 24.0)]);
}

#[test]
fn a_communicator_with_calls_under_way_is_dropped_in_time() {
    let options = Options {
        silence: Duration::from_secs(1),
        ..patient()
    };
    let begun = Instant::now();
    let results = run(2, &options, |gang| {
        let all = gang.communicator(&[0, 1])?;
        if gang.rank() == 0 {
            // Nobody ever receives it.
            drop(all.receive(4000, 100, ElementType::F32, 1)?);
        }
        drop(all);
        gang.check()?;
        gang.barrier()
    });
    assert!(begun.elapsed() < patient().call / 2);
    assert!(results.iter().all(Result::is_err));
}
