//! The coordinator's node is gone, disk and all: another takes over from the artifact store.
//!
//! What must hold: the job goes on and ends well; of what had been acknowledged only the last shipping interval
//! is done again; the coordinator that was, coming back or waking up, stops by itself. One that wakes up may
//! acknowledge until its lease is over or it sees its successor, who waits that out: what it does so is not shipped
//! any more, and counts to that interval.

use std::collections::BTreeMap;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use espalier_proto::v1::JobState;

use crate::kill::REST;
use crate::ledger::{Entry, What};
use crate::rig::Rig;
use crate::story::Story;

/// What a coordinator ships by default, and what losing its disk may therefore cost.
const SHIPPING_INTERVAL: Duration = Duration::from_secs(5);
/// What a busy machine may add to it: the upload, and the time to its first byte.
const SLACK: Duration = Duration::from_secs(2);
const WORK: Duration = Duration::from_secs(12);
const STOP: Duration = Duration::from_secs(60);
const END: Duration = Duration::from_secs(300);

/// What the coordinator that was may have had under way to its workers when it was stopped.
const UNDER_WAY: Duration = Duration::from_millis(500);

/// What a lost disk has cost.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Report {
    /// Results acknowledged before the loss.
    pub acknowledged: usize,
    /// Of those, done again.
    pub again: usize,
    /// From the acknowledgement of the earliest of those to the loss, or to the latest of those after it, seconds.
    pub reach_seconds: f64,
    /// Results acknowledged once only the successor served, and done again all the same: two have both promoted.
    pub late: usize,
    /// Errands of which two ends were acknowledged after that: the same.
    pub twice: usize,
    /// Errands of the job without an acknowledged good end.
    pub missing: usize,
}

impl Report {
    /// Whether no more than the shipping interval was lost, and nothing after it.
    pub fn holds(&self) -> bool {
        let bound = SHIPPING_INTERVAL + SLACK;
        let only_one_promoted = self.late == 0 && self.twice == 0;
        let in_bounds = self.reach_seconds <= bound.as_secs_f64();
        self.acknowledged > 0 && self.missing == 0 && in_bounds && only_one_promoted
    }
}

/// Loses the node of a working coordinator. With `asleep` the coordinator is not killed but stands still, and wakes
/// up when its successor serves: then two run at once.
///
/// # Errors
/// When the job does not end well, or the coordinator that was does not stop.
pub async fn run(asleep: bool) -> Result<Report> {
    let story = Story {
        stages: 2,
        errands: 400,
        millis: 200,
        busy: false,
        brings_process: false,
        doomed: "-doomed".to_owned(),
    };
    let mut rig = Rig::start(story.clone(), 4, Duration::from_secs(30), true)?;
    let lost = lose(&mut rig, &story, asleep).await;
    match lost {
        Ok(report) if report.holds() => Ok(report),
        Ok(report) => {
            eprintln!("the run's files are kept in {}", rig.keep().display());
            Ok(report)
        }
        Err(error) => Err(error.context(format!("the run's files are kept in {}", rig.keep().display()))),
    }
}

async fn lose(rig: &mut Rig, story: &Story, asleep: bool) -> Result<Report> {
    let id = rig.submit("job0").await?;
    tokio::time::sleep(WORK).await;
    let old = rig.move_on()?.context("there was no coordinator")?;
    let lost_at = now()?;
    old.signal(if asleep { libc::SIGSTOP } else { libc::SIGKILL })?;
    rig.start_coordinator()?;
    rig.client().await?;
    let mut old = if asleep {
        old.signal(libc::SIGCONT)?;
        old
    } else {
        drop(old);
        rig.start_old_coordinator(0)?
    };
    let status = old.wait(STOP).context("the coordinator that was does not stop")?;
    ensure!(
        !status.success(),
        "the coordinator that was ended as if all were well"
    );
    let served_until = if asleep { now()? } else { lost_at };
    let ended = rig.end_of(&id, END).await?;
    ensure!(
        ended.state() == JobState::Succeeded,
        "the job has not succeeded: {}",
        ended.message
    );
    let settles = Instant::now();
    loop {
        tokio::time::sleep(REST).await;
        let report = judge(&rig.ledger()?, story, lost_at, served_until)?;
        // A worker that gets no processor is at rest too: while an acknowledgement is missing it is waited for.
        if report.missing == 0 || settles.elapsed() >= END {
            return Ok(report);
        }
    }
}

fn now() -> Result<u64> {
    Ok(u64::try_from(
        SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos(),
    )?)
}

/// What the attempt with a number was at, as of its last beginning.
struct Begun<'a> {
    errand: &'a str,
    /// Counts beginnings: numbers of attempts of the last interval may be given again by the successor.
    beginning: usize,
    ended: bool,
    acknowledged: bool,
}

/// What the ledger tells: the node was lost at `lost_at`, and the coordinator that was ended at `served_until`.
fn judge(ledger: &[Entry], story: &Story, lost_at: u64, served_until: u64) -> Result<Report> {
    let successor_from = served_until.saturating_add(u64::try_from(UNDER_WAY.as_nanos())?);
    let mut begun: BTreeMap<(u32, u64), Begun<'_>> = BTreeMap::new();
    let mut good: BTreeMap<&str, (u64, usize)> = BTreeMap::new();
    let mut report = Report::default();
    let (mut earliest, mut latest) = (lost_at, lost_at);
    for (beginning, entry) in ledger.iter().enumerate() {
        match &entry.what {
            What::Began { errand } => {
                let now = Begun {
                    errand,
                    beginning,
                    ended: false,
                    acknowledged: false,
                };
                begun.insert((entry.worker, entry.attempt), now);
                match good.remove(errand.as_str()) {
                    Some((at, _)) if at >= successor_from => report.late += 1,
                    Some((at, _)) => {
                        report.again += 1;
                        earliest = earliest.min(at);
                        latest = latest.max(at);
                    }
                    None => {}
                }
            }
            What::Ended { .. } => {
                if let Some(attempt) = begun.get_mut(&(entry.worker, entry.attempt)) {
                    attempt.ended = true;
                }
            }
            What::Acknowledged => {
                let attempt = begun.get_mut(&(entry.worker, entry.attempt));
                // What is said of it after that is no result: it is the same end on a new stream, or that a worker
                // hands back what a successor assigned it again, not knowing of the end.
                let Some(attempt) = attempt.filter(|attempt| attempt.ended && !attempt.acknowledged) else {
                    continue;
                };
                attempt.acknowledged = true;
                report.acknowledged += usize::from(entry.at < lost_at);
                let before = good.insert(attempt.errand, (entry.at, attempt.beginning));
                let another = before.is_some_and(|(_, beginning)| beginning != attempt.beginning);
                report.twice += usize::from(another && entry.at >= successor_from);
            }
        }
    }
    let wanted = story.stages * story.errands;
    ensure!(good.len() <= wanted, "more errands than were planned");
    report.reach_seconds = Duration::from_nanos(latest.saturating_sub(earliest)).as_secs_f64();
    report.missing = wanted - good.len();
    Ok(report)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
    use super::*;

    const SECOND: u64 = 1_000_000_000;
    const LOST_AT: u64 = 100 * SECOND;

    fn story() -> Story {
        Story {
            stages: 1,
            errands: 2,
            millis: 1,
            busy: false,
            brings_process: false,
            doomed: "-doomed".to_owned(),
        }
    }

    /// Seconds, attempt and what happened: `+x` began errand x, `-x` ended it, empty acknowledged.
    fn judged(entries: &[(u64, u64, &str)]) -> Report {
        judged_until(LOST_AT, entries)
    }

    /// The same, where the coordinator that was served until then.
    fn judged_until(served_until: u64, entries: &[(u64, u64, &str)]) -> Report {
        let entry = |&(seconds, attempt, what): &(u64, u64, &str)| Entry {
            at: seconds * SECOND,
            worker: 1,
            attempt,
            what: match what.split_at_checked(1) {
                Some(("+", errand)) => What::Began {
                    errand: errand.to_owned(),
                },
                Some(("-", errand)) => What::Ended {
                    errand: errand.to_owned(),
                },
                _ => What::Acknowledged,
            },
        };
        let entries: Vec<Entry> = entries.iter().map(entry).collect();
        judge(&entries, &story(), LOST_AT, served_until).unwrap()
    }

    /// Errand `a` is done and acknowledged long before.
    const BEFORE: [(u64, u64, &str); 3] = [(1, 1, "+a"), (2, 1, "-a"), (3, 1, "")];

    #[test]
    fn what_the_last_interval_lost_may_be_done_again_and_nothing_older() {
        let last = [(97, 2, "+b"), (97, 2, "-b"), (98, 2, "")];
        let again = [(110, 2, "+b"), (111, 2, "-b"), (112, 2, "")];
        let report = judged(&[&BEFORE[..], &last, &again].concat());
        assert!(report.holds(), "{report:?}");
        assert_eq!((report.again, report.reach_seconds), (1, 2.0));
        let older = [(110, 3, "+a"), (111, 3, "-a"), (112, 3, "")];
        let report = judged(&[&BEFORE[..], &last, &again, &older].concat());
        assert!(!report.holds(), "{report:?}");
    }

    #[test]
    fn an_attempt_that_is_handed_back_as_it_was_over_already_is_no_result() {
        let last = [(97, 2, "+b"), (97, 2, "-b"), (98, 2, "")];
        let handed_back_and_on = [(110, 2, ""), (110, 3, "+b"), (111, 3, "-b"), (112, 3, "")];
        let report = judged(&[&BEFORE[..], &last, &handed_back_and_on].concat());
        assert!(report.holds(), "{report:?}");
        assert_eq!(report.again, 1);
        // Entries of two workers may come in either order.
        let other_order = [(110, 3, "+b"), (110, 2, ""), (111, 3, "-b"), (112, 3, "")];
        let report = judged(&[&BEFORE[..], &last, &other_order].concat());
        assert!(report.holds(), "{report:?}");
    }

    #[test]
    fn a_result_acknowledged_by_a_coordinator_that_woke_up_and_done_again_by_its_successor_does_not_hold() {
        let woken = [(99, 2, "+b"), (105, 2, "-b"), (106, 2, "")];
        let successor = [(107, 2, "+b"), (108, 2, "-b"), (109, 2, "")];
        let report = judged(&[&BEFORE[..], &woken].concat());
        assert!(report.holds(), "{report:?}");
        let report = judged(&[&BEFORE[..], &woken, &successor].concat());
        assert_eq!(report.late, 1);
        assert!(!report.holds(), "{report:?}");
    }

    #[test]
    fn what_a_coordinator_that_woke_up_acknowledged_until_it_stopped_is_of_the_last_interval() {
        let last = [(97, 2, "+b"), (97, 2, "-b"), (98, 2, "")];
        let woken = [(99, 3, "+a"), (101, 3, "-a"), (102, 3, "")];
        let successor = [
            (110, 3, "+a"),
            (111, 3, "-a"),
            (112, 3, ""),
            (112, 2, "+b"),
            (113, 2, "-b"),
            (114, 2, ""),
        ];
        let entries = [&last[..], &woken, &successor].concat();
        let report = judged_until(103 * SECOND, &entries);
        assert_eq!((report.again, report.reach_seconds, report.late), (2, 4.0, 0));
        assert!(report.holds(), "{report:?}");
        let report = judged_until(101 * SECOND, &entries);
        assert_eq!(report.late, 1, "it had ended before");
        assert!(!report.holds(), "{report:?}");
    }

    #[test]
    fn two_ends_of_one_errand_acknowledged_after_the_loss_do_not_hold() {
        let both = [
            (99, 2, "+b"),
            (104, 3, "+b"),
            (105, 2, "-b"),
            (106, 2, ""),
            (107, 3, "-b"),
            (108, 3, ""),
        ];
        let report = judged(&[&BEFORE[..], &both].concat());
        assert_eq!(report.twice, 1);
        assert!(!report.holds(), "{report:?}");
        let said_again = [(99, 2, "+b"), (105, 2, "-b"), (106, 2, ""), (108, 2, "")];
        let report = judged(&[&BEFORE[..], &said_again].concat());
        assert!(report.holds(), "{report:?}");
    }
}
