#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use super::*;

const SOON: Duration = Duration::from_millis(200);
/// Nothing waits it out.
const LATE: Duration = Duration::from_secs(600);

fn row(values: &[f32]) -> Tensor {
    Tensor::from_vec(values.to_vec(), 1, values.len()).unwrap()
}

fn whole(gang: &LocalGang) -> Arc<dyn Communicator> {
    let ranks: Vec<usize> = (0..gang.size()).collect();
    gang.communicator(&ranks).unwrap()
}

#[test]
fn every_rank_gets_the_sum_in_rank_order_and_its_share_of_it() {
    // Each order of these gives another sum.
    let parts = [1.0e8_f32, 1.25, -1.0e8, 0.3];
    let expected = ((parts[0] + parts[1]) + parts[2]) + parts[3];
    let results = run(4, LATE, |gang| {
        let all = whole(&gang);
        let own = parts[gang.rank()];
        std::thread::sleep(Duration::from_millis(5 * (4 - gang.rank() as u64)));
        let sum = all.all_reduce(row(&[own, own]))?;
        let share = all.reduce_scatter(Tensor::from_vec(vec![own; 8], 4, 2)?)?;
        let gathered = all.all_gather(row(&[own]))?.wait()?;
        let rooted = all.broadcast(row(&[own]), 2)?.wait()?;
        let (sum, share) = (sum.wait()?, share.wait()?);
        assert_eq!(gathered.rows(), 4);
        assert_eq!(gathered.host()?, parts);
        assert_eq!(rooted.host()?, [parts[2]]);
        assert_eq!((share.rows(), share.columns()), (1, 2));
        Ok([sum.host()?, share.host()?].concat())
    })
    .unwrap();
    assert_eq!(results, vec![vec![expected; 4]; 4]);
}

#[test]
fn messages_arrive_in_order_and_a_send_ends_with_its_receive() {
    let gangs = LocalGang::all(2, SOON);
    let (first, second) = (whole(&gangs[0]), whole(&gangs[1]));
    let one = first.send(row(&[1.0]), 1).unwrap();
    let two = first.send(row(&[2.0]), 1).unwrap();
    let got = second.receive(1, 1, ElementType::F32, 0).unwrap();
    assert_eq!(one.wait().unwrap().host().unwrap(), [1.0]);
    let late = two.wait().unwrap_err();
    assert!(
        matches!(
            late,
            crate::Error::Gang(Error::Deadline {
                operation: "send",
                ..
            })
        ),
        "{late}"
    );
    assert_eq!(got.wait().unwrap().host().unwrap(), [1.0]);
}

#[test]
fn subsets_keep_apart_and_bytes_reach_every_rank() {
    let results = run(4, LATE, |gang| {
        let pair: Vec<usize> = (0..4).filter(|rank| rank % 2 == gang.rank() % 2).collect();
        let halves = gang.communicator(&pair)?;
        let again = gang.communicator(&pair)?;
        let one = again.all_reduce(row(&[gang.rank() as f32 + 10.0]))?;
        let two = halves.all_reduce(row(&[gang.rank() as f32]))?.wait()?;
        gang.barrier()?;
        let names = gang.exchange(gang.rank().to_string().as_bytes())?;
        assert_eq!(names.concat(), b"0123");
        Ok((two.host()?[0], one.wait()?.host()?[0]))
    })
    .unwrap();
    assert_eq!(results, [(2.0, 22.0), (4.0, 24.0), (2.0, 22.0), (4.0, 24.0)]);
    let refused = LocalGang::all(2, SOON)[0].communicator(&[1]).unwrap_err();
    assert!(refused.to_string().contains("among them"), "{refused}");
}

#[test]
fn calls_that_do_not_fit_together_are_named_on_every_rank() {
    let error = run(2, LATE, |gang| {
        let all = whole(&gang);
        if gang.rank() == 0 {
            all.all_reduce(row(&[1.0]))?.wait()
        } else {
            all.all_reduce(row(&[1.0, 2.0]))?.wait()
        }
    })
    .unwrap_err();
    assert!(
        error.to_string().contains("AllReduce of 1 x 2") || error.to_string().contains("AllReduce of 1 x 1"),
        "{error}"
    );
}

#[test]
fn a_rank_that_fails_or_never_comes_ends_every_wait() {
    let begun = Instant::now();
    let error = run(3, LATE, |gang| {
        if gang.rank() == 1 {
            return Err(crate::Error::NotFinite {
                what: "a loss".to_owned(),
            });
        }
        gang.communicator(&[0, 1, 2])?
            .all_reduce(row(&[1.0]))?
            .wait()
            .map(drop)
    })
    .unwrap_err();
    assert!(matches!(error, crate::Error::NotFinite { .. }), "{error}");
    assert!(begun.elapsed() < LATE / 2);
    let gangs = LocalGang::all(2, SOON);
    let late = whole(&gangs[0]).all_reduce(row(&[1.0])).unwrap().wait();
    let late = late.unwrap_err();
    assert!(
        matches!(late, crate::Error::Gang(Error::Deadline { waited, .. }) if waited >= SOON),
        "{late}"
    );
}

#[test]
fn a_result_that_nobody_waits_for_is_forgotten() {
    let gangs = LocalGang::all(2, SOON);
    let both = [whole(&gangs[0]), whole(&gangs[1])];
    let flights = both.each_ref().map(|one| one.all_reduce(row(&[1.0])).unwrap());
    drop(flights);
    assert!(gangs[0].shared.state().calls.is_empty());
}
