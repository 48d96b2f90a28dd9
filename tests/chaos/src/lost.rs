//! The coordinator's node is gone, disk and all: another takes over from the artifact store.
//!
//! What must hold: the job goes on and ends well; of what had been acknowledged only the last shipping interval
//! is done again; the coordinator that was, coming back or waking up, stops by itself.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use espalier_proto::v1::JobState;

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

/// What a lost disk has cost.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// Results acknowledged before the loss.
    pub acknowledged: usize,
    /// Of those, done again.
    pub again: usize,
    /// How long before the loss the earliest of those had been acknowledged, seconds.
    pub reach_seconds: f64,
    /// Errands of the job without an acknowledged good end.
    pub missing: usize,
}

impl Report {
    /// Whether no more than the shipping interval was lost.
    pub fn holds(&self) -> bool {
        let bound = SHIPPING_INTERVAL + SLACK;
        self.acknowledged > 0 && self.missing == 0 && self.reach_seconds <= bound.as_secs_f64()
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
    let lost_at = u64::try_from(SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos())?;
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
    let ended = rig.end_of(&id, END).await?;
    ensure!(
        ended.state() == JobState::Succeeded,
        "the job has not succeeded: {}",
        ended.message
    );
    tokio::time::sleep(Duration::from_secs(3)).await;
    judge(&rig.ledger()?, story, lost_at)
}

fn judge(ledger: &[Entry], story: &Story, lost_at: u64) -> Result<Report> {
    // Attempt numbers of the last interval may be given again by the successor: what counts is the order of
    // entries, each about the errand that the attempt's last beginning named.
    let mut errand_of: BTreeMap<u64, &str> = BTreeMap::new();
    let mut good: BTreeMap<&str, u64> = BTreeMap::new();
    let mut ended: BTreeSet<u64> = BTreeSet::new();
    let mut again = 0;
    let mut earliest = lost_at;
    let mut acknowledged = 0;
    for entry in ledger {
        match &entry.what {
            What::Began { errand } => {
                errand_of.insert(entry.attempt, errand);
                ended.remove(&entry.attempt);
                if let Some(at) = good.remove(errand.as_str()) {
                    again += 1;
                    earliest = earliest.min(at);
                }
            }
            What::Ended { .. } => {
                ended.insert(entry.attempt);
            }
            What::Acknowledged if ended.contains(&entry.attempt) => {
                if let Some(errand) = errand_of.get(&entry.attempt) {
                    good.insert(errand, entry.at);
                    acknowledged += usize::from(entry.at < lost_at);
                }
            }
            What::Acknowledged => {}
        }
    }
    let wanted = story.stages * story.errands;
    ensure!(good.len() <= wanted, "more errands than were planned");
    Ok(Report {
        acknowledged,
        again,
        reach_seconds: Duration::from_nanos(lost_at.saturating_sub(earliest)).as_secs_f64(),
        missing: wanted - good.len(),
    })
}
