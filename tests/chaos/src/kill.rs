//! The coordinator killed at random, again and again, while workers finish short tasks.
//!
//! What must hold, by the ledger that the processes themselves keep:
//! - an errand whose good end was acknowledged is never begun again: nothing acknowledged was lost;
//! - every job ends well, and each of its errands has one acknowledged good end;
//! - a task that always crashes is tried as often as its budget says, however many coordinators that takes.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use espalier_proto::v1::JobState;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::ledger::{Entry, What};
use crate::rig::Rig;
use crate::story::Story;

/// Tries that a task has which always crashes: one, and two retries.
const CRASH_TRIES: usize = 3;
/// Jobs under way at a time.
const JOBS: usize = 3;
/// Every so many jobs one is doomed.
const DOOMED_EVERY: usize = 4;
/// A kill in so many comes as the coordinator starts.
const EARLY_ONE_IN: u32 = 10;
/// With so many kills some must have.
const EARLY_FROM: usize = 100;
const END: Duration = Duration::from_secs(300);
/// Workers that write nothing down for so long are at rest.
pub(crate) const REST: Duration = Duration::from_secs(3);

/// What a run is to do.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// Kills.
    pub kills: usize,
    /// Seeds the moments.
    pub seed: u64,
}

/// What a run has shown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// Kills.
    pub kills: usize,
    /// Of those, how many came before the coordinator had started: in its replay, or as it claimed its term.
    pub early: usize,
    /// Jobs that ended as they should.
    pub jobs: usize,
    /// Good ends that were acknowledged.
    pub acknowledged: usize,
    /// Of those, errands that were begun again afterwards.
    pub again: usize,
    /// Errands of jobs that succeeded without an acknowledged good end.
    pub missing: usize,
    /// Tasks that always crash, with how often each was tried.
    pub doomed_tries: Vec<usize>,
}

impl Report {
    /// Whether nothing was lost and nothing done twice.
    pub fn holds(&self) -> bool {
        let budget = self
            .doomed_tries
            .iter()
            .all(|tries| *tries >= 2 && *tries <= CRASH_TRIES);
        // Of a few kills perhaps none comes early.
        let early = self.early > 0 || self.kills < EARLY_FROM;
        self.again == 0 && self.missing == 0 && self.acknowledged > 0 && budget && early
    }
}

impl fmt::Display for Report {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fewest = self.doomed_tries.iter().min().copied().unwrap_or(0);
        let most = self.doomed_tries.iter().max().copied().unwrap_or(0);
        write!(
            formatter,
            "{} kills ({} before the start was over), {} jobs, {} results acknowledged: {} lost, {} executed again; {} tasks that always crash were \
             tried {fewest} to {most} times (at most {CRASH_TRIES})",
            self.kills,
            self.early,
            self.jobs,
            self.acknowledged,
            self.missing,
            self.again,
            self.doomed_tries.len(),
        )
    }
}

/// Kills the coordinator as planned and looks at what is left.
///
/// # Errors
/// When something breaks that is no finding: a process that cannot be started, a job that never ends.
pub async fn run(plan: Plan, progress: impl Fn(usize)) -> Result<Report> {
    let story = Story {
        stages: 3,
        errands: 60,
        millis: 60,
        busy: false,
        brings_process: false,
        doomed: "-doomed".to_owned(),
    };
    let mut rig = Rig::start(story.clone(), 4, Duration::from_secs(30), false)?;
    match kill(&mut rig, &story, plan, progress).await {
        Ok(report) if report.holds() => Ok(report),
        Ok(report) => {
            eprintln!("the run's files are kept in {}", rig.keep().display());
            Ok(report)
        }
        Err(error) => Err(error.context(format!("the run's files are kept in {}", rig.keep().display()))),
    }
}

async fn kill(rig: &mut Rig, story: &Story, plan: Plan, progress: impl Fn(usize)) -> Result<Report> {
    let mut random = ChaCha8Rng::seed_from_u64(plan.seed);
    let mut jobs: BTreeMap<String, String> = BTreeMap::new();
    let mut open: BTreeSet<String> = BTreeSet::new();
    let mut early = false;
    for kill in 0..plan.kills {
        // Whoever asks waits until the start is over.
        if !early && open.len() < JOBS {
            let doomed = if jobs.len() % DOOMED_EVERY == 1 {
                &story.doomed
            } else {
                ""
            };
            let name = format!("job{}{doomed}", jobs.len());
            let id = rig.submit(&name).await?;
            jobs.insert(id.clone(), name);
            open.insert(id);
        }
        // Mostly in the middle of the work.
        let wait = if early { 0..60 } else { 100..900 };
        tokio::time::sleep(Duration::from_millis(random.random_range(wait))).await;
        rig.kill_coordinator()?;
        rig.start_coordinator()?;
        progress(kill + 1);
        early = random.random_ratio(1, EARLY_ONE_IN);
        if early {
            continue;
        }
        for id in open.clone() {
            let state = rig.job(&id).await?.state();
            if matches!(
                state,
                JobState::Succeeded | JobState::Failed | JobState::Cancelled
            ) {
                open.remove(&id);
            }
        }
    }
    for (id, name) in &jobs {
        let ended = rig.end_of(id, END).await?;
        let wanted = if name.ends_with(&story.doomed) {
            JobState::Failed
        } else {
            JobState::Succeeded
        };
        ensure!(
            ended.state() == wanted,
            "{name} should be {wanted:?} and is {:?}: {}",
            ended.state(),
            ended.message
        );
    }
    let report = settle(rig, &jobs, story, plan).await?;
    let early = rig.unfinished_starts()?;
    Ok(Report { early, ..report })
}

/// Waits until the workers have said and heard everything, and judges what they have written down. A worker that gets
/// no processor is at rest too: while an acknowledgement is missing it is waited for.
async fn settle(rig: &Rig, jobs: &BTreeMap<String, String>, story: &Story, plan: Plan) -> Result<Report> {
    let start = Instant::now();
    let mut before = 0;
    loop {
        let ledger = rig.ledger()?;
        let is_over = start.elapsed() >= END;
        if ledger.len() == before {
            let report = judge(&ledger, jobs, story, plan)?;
            if report.missing == 0 || is_over {
                return Ok(report);
            }
        }
        ensure!(!is_over, "the workers do not come to rest");
        before = ledger.len();
        tokio::time::sleep(REST).await;
    }
}

fn judge(ledger: &[Entry], jobs: &BTreeMap<String, String>, story: &Story, plan: Plan) -> Result<Report> {
    let mut errand_of: BTreeMap<u64, &str> = BTreeMap::new();
    let mut begun: BTreeMap<&str, Vec<(u64, u64)>> = BTreeMap::new();
    let mut ended: BTreeSet<u64> = BTreeSet::new();
    let mut acknowledged: BTreeMap<u64, u64> = BTreeMap::new();
    for entry in ledger {
        match &entry.what {
            What::Began { errand } => {
                errand_of.insert(entry.attempt, errand);
                begun.entry(errand).or_default().push((entry.at, entry.attempt));
            }
            What::Ended { .. } => {
                ended.insert(entry.attempt);
            }
            What::Acknowledged => {
                acknowledged.entry(entry.attempt).or_insert(entry.at);
            }
        }
    }
    let good: Vec<(&str, u64, u64)> = acknowledged
        .iter()
        .filter(|(attempt, _)| ended.contains(attempt))
        .filter_map(|(attempt, at)| Some((*errand_of.get(attempt)?, *attempt, *at)))
        .collect();
    let again = good.iter().filter(|(errand, attempt, at)| {
        let others = begun.get(errand).into_iter().flatten();
        others
            .into_iter()
            .any(|(began, other)| other != attempt && began > at)
    });
    let again = again.count();
    let with_good_end: BTreeSet<&str> = good.iter().map(|(errand, _, _)| *errand).collect();
    let mut missing = 0;
    let mut doomed_tries = Vec::new();
    for name in jobs.values() {
        if name.ends_with(&story.doomed) {
            let doomed = format!("{name}/doomed");
            let tries = begun.get(doomed.as_str()).map_or(0, Vec::len);
            doomed_tries.push(tries);
            continue;
        }
        for stage in 0..story.stages {
            for errand in 0..story.errands {
                let wanted = format!("{name}/{stage}/{errand}");
                missing += usize::from(!with_good_end.contains(wanted.as_str()));
            }
        }
    }
    let jobs = jobs.len();
    ensure!(jobs > 0, "no job was submitted");
    let acknowledged = good.len();
    Ok(Report {
        kills: plan.kills,
        early: 0,
        jobs,
        acknowledged,
        again,
        missing,
        doomed_tries,
    })
}

/// Runs a plan from a program without an asynchronous runtime of its own.
///
/// # Errors
/// As [`run`].
pub fn run_blocking(plan: Plan, progress: impl Fn(usize)) -> Result<Report> {
    tokio::runtime::Runtime::new()
        .context("no runtime can be started")?
        .block_on(run(plan, progress))
}
