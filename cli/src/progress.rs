//! How far a job has come, on standard error: bars with time left on a terminal, sparse lines elsewhere.

use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

use espalier_proto::json;
use espalier_proto::v1::{Job, Stage, StageState};
use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::output;

/// Off a terminal, a running stage says how far it is this often.
const SPARSE: Duration = Duration::from_secs(30);

/// Share of a job's time by executor: the prior for stages that have not begun. Estimates, not measurements; they
/// count for less as stages end and show what they took.
const WEIGHTS: [(&str, f64); 12] = [
    ("ingest", 1.0),
    ("profile", 12.0),
    ("calibrate", 5.0),
    ("sort", 1.0),
    ("score", 16.0),
    ("depth_order", 6.0),
    ("rank", 5.0),
    ("check", 6.0),
    ("recover", 36.0),
    ("evaluate", 8.0),
    ("export", 1.0),
    ("verify", 3.0),
];

/// Shows snapshots of a job.
pub(crate) enum Progress {
    /// On a terminal.
    Bars(Bars),
    /// Elsewhere.
    Lines { changes: Changes, last: Instant },
}

impl Progress {
    pub(crate) fn new() -> Self {
        if std::io::stderr().is_terminal() {
            return Self::Bars(Bars::new());
        }
        Self::Lines {
            changes: Changes::default(),
            last: Instant::now(),
        }
    }

    pub(crate) fn show(&mut self, job: &Job) {
        match self {
            Self::Bars(bars) => bars.show(job),
            Self::Lines { changes, last } => {
                let mut lines = changes.lines(job);
                if lines.is_empty() && last.elapsed() >= SPARSE {
                    lines.extend(job.stages.iter().filter(|stage| is_running(stage)).map(describe));
                }
                for line in &lines {
                    output::say(line);
                    *last = Instant::now();
                }
            }
        }
    }

    /// Takes the bars away, so that what follows stands alone.
    pub(crate) fn finish(self) {
        if let Self::Bars(bars) = self {
            let _ = bars.all.clear();
        }
    }
}

/// A line for each attempt that failed in another way than its task's last one.
#[derive(Default)]
struct Failures {
    seen: BTreeMap<u64, String>,
}

impl Failures {
    fn lines(&mut self, job: &Job) -> Vec<String> {
        let mut lines = Vec::new();
        for stage in job.stages.iter().filter(|stage| is_running(stage)) {
            for task in stage.active.iter().filter(|task| !task.last_failure.is_empty()) {
                let before = self.seen.insert(task.id, task.last_failure.clone());
                if before.as_ref() != Some(&task.last_failure) {
                    lines.push(format!(
                        "{}: an attempt failed: {}",
                        stage.name, task.last_failure
                    ));
                }
            }
        }
        lines
    }
}

/// A line for each stage whose state changed since the snapshot before, and for what failed on the way.
#[derive(Default)]
pub(crate) struct Changes {
    seen: BTreeMap<String, i32>,
    state: i32,
    failures: Failures,
}

impl Changes {
    pub(crate) fn lines(&mut self, job: &Job) -> Vec<String> {
        let mut lines = Vec::new();
        for stage in &job.stages {
            let before = self.seen.insert(stage.name.clone(), stage.state);
            if before == Some(stage.state) || stage.state() == StageState::Waiting {
                continue;
            }
            lines.push(match stage.state() {
                StageState::Running if !stage.decision.is_empty() => {
                    format!("{} running: {}", stage.name, stage.decision)
                }
                StageState::Done => format!("{} done in {}", stage.name, clock(stage.elapsed_ms / 1000)),
                state => format!("{} {}", stage.name, json::stage_state(state)),
            });
        }
        lines.extend(self.failures.lines(job));
        if self.state != job.state && output::has_ended(job) {
            lines.push(format!("{} {}", job.id, json::job_state(job.state())));
        }
        self.state = job.state;
        lines
    }
}

/// One bar for each running stage and one for the whole.
pub(crate) struct Bars {
    all: MultiProgress,
    whole: ProgressBar,
    stages: BTreeMap<String, ProgressBar>,
    failures: Failures,
}

impl Bars {
    const STEPS: u64 = 1000;

    fn new() -> Self {
        let all = MultiProgress::with_draw_target(ProgressDrawTarget::stderr_with_hz(5));
        let whole = all.add(bar("all stages"));
        Self {
            all,
            whole,
            stages: BTreeMap::new(),
            failures: Failures::default(),
        }
    }

    fn show(&mut self, job: &Job) {
        for line in self.failures.lines(job) {
            let _ = self.all.println(line);
        }
        for stage in &job.stages {
            if is_running(stage) {
                let (all, whole) = (&self.all, &self.whole);
                let bar = self
                    .stages
                    .entry(stage.name.clone())
                    .or_insert_with(|| all.insert_before(whole, bar(&stage.name)));
                bar.set_position(steps(fraction(stage)));
                bar.set_message(format!("{}{}", left_text(left_seconds(stage)), note(stage)));
                continue;
            }
            if let Some(bar) = self.stages.remove(&stage.name) {
                bar.finish_and_clear();
                self.all.remove(&bar);
                let _ = self.all.println(format!(
                    "{:<26} {} in {}",
                    stage.name,
                    json::stage_state(stage.state()),
                    clock(stage.elapsed_ms / 1000)
                ));
            }
        }
        let (done, left) = whole(job);
        self.whole.set_position(steps(done));
        self.whole.set_message(left_text(left));
    }
}

fn bar(name: &str) -> ProgressBar {
    let template = "{prefix:<26} {bar:24} {elapsed:>4} {msg}";
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(Bars::STEPS)
        .with_style(style.progress_chars("━╸─"))
        .with_prefix(name.to_owned())
}

fn is_running(stage: &Stage) -> bool {
    stage.state() == StageState::Running
}

/// Tasks done and the progress of those that run, 0 to 1.
fn fraction(stage: &Stage) -> f64 {
    if stage.tasks == 0 {
        return 0.0;
    }
    let active = stage
        .active
        .iter()
        .filter(|task| task.total > 0)
        .map(|task| ratio(task.done, task.total));
    ((f64::from(stage.tasks_done) + active.sum::<f64>()) / f64::from(stage.tasks)).clamp(0.0, 1.0)
}

fn left_seconds(stage: &Stage) -> Option<f64> {
    let done = fraction(stage);
    let elapsed = ratio(stage.elapsed_ms, 1000);
    (done > 0.02).then(|| elapsed * (1.0 - done) / done)
}

/// How much of the job is done, and seconds left: stages that run tell their own, stages to come are priced by
/// their usual share of the time that the others took.
fn whole(job: &Job) -> (f64, Option<f64>) {
    let mut done = 0.0;
    let mut spent = 0.0;
    let mut running_left = 0.0;
    let mut running_weight_left = 0.0;
    let mut seen = std::collections::BTreeSet::new();
    for stage in &job.stages {
        let weight = weight(&stage.kind);
        let fraction = if stage.state() == StageState::Done {
            1.0
        } else {
            fraction(stage)
        };
        // A second round of a measurement is no new share of the whole.
        if seen.insert(stage.kind.as_str()) {
            done += weight * fraction;
            running_weight_left += weight * (1.0 - fraction);
        }
        if stage.state() != StageState::Done {
            running_left += left_seconds(stage).unwrap_or(0.0);
        }
        spent += ratio(stage.elapsed_ms, 1000);
    }
    // By an imported cost table nothing is profiled: that stage is named with the second or not at all.
    let profiles = seen.len() < 2 || seen.contains("profile");
    let to_come = |(kind, _): &&(&str, f64)| *kind != "profile" || profiles;
    let total: f64 = WEIGHTS.iter().filter(to_come).map(|(_, weight)| weight).sum();
    let left_to_come = (total - done - running_weight_left).max(0.0);
    let left = (done >= 5.0).then(|| running_left + left_to_come * spent / done);
    ((done / total).clamp(0.0, 1.0), left)
}

fn weight(kind: &str) -> f64 {
    WEIGHTS
        .iter()
        .find(|(name, _)| *name == kind)
        .map_or(1.0, |(_, weight)| *weight)
}

fn left_text(left: Option<f64>) -> String {
    match left {
        Some(seconds) if seconds.is_finite() => {
            #[allow(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "finite, not negative, shown only"
            )]
            let seconds = seconds.clamp(0.0, 1e9) as u64;
            format!("about {} left", clock(seconds))
        }
        _ => String::new(),
    }
}

/// What a task says of itself; of one that rests after a failure, that.
fn note(stage: &Stage) -> String {
    let notes = stage
        .active
        .iter()
        .map(|task| task.note.as_str())
        .find(|note| !note.is_empty());
    if let Some(note) = notes {
        return format!(", {note}");
    }
    let mut resting = stage.active.iter().filter(|task| task.attempt == 0);
    match resting.find(|task| !task.last_failure.is_empty()) {
        Some(task) => format!(", to be tried again after: {}", task.last_failure),
        None => String::new(),
    }
}

fn describe(stage: &Stage) -> String {
    let left = left_text(left_seconds(stage));
    let left = if left.is_empty() {
        left
    } else {
        format!(", {left}")
    };
    format!(
        "{} {:.0}%{left}{}",
        stage.name,
        fraction(stage) * 100.0,
        note(stage)
    )
}

fn clock(seconds: u64) -> String {
    match seconds {
        0..=89 => format!("{seconds} s"),
        90..=5399 => format!("{} min {:02} s", seconds / 60, seconds % 60),
        _ => format!("{} h {:02} min", seconds / 3600, seconds % 3600 / 60),
    }
}

fn steps(fraction: f64) -> u64 {
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "between 0 and 1000"
    )]
    let steps = (fraction.clamp(0.0, 1.0) * 1000.0) as u64;
    steps
}

#[allow(clippy::cast_precision_loss, reason = "shown only")]
fn ratio(value: u64, whole: u64) -> f64 {
    if whole == 0 {
        0.0
    } else {
        value as f64 / whole as f64
    }
}

#[cfg(test)]
mod tests {
    use espalier_proto::v1::Task;

    use super::*;

    fn stage(name: &str, state: StageState, done: u32, tasks: u32) -> Stage {
        Stage {
            name: name.to_owned(),
            kind: name.to_owned(),
            state: state.into(),
            tasks,
            tasks_done: done,
            elapsed_ms: 10_000,
            ..Stage::default()
        }
    }

    #[test]
    fn a_stage_counts_its_running_tasks_by_their_progress() {
        let mut score = stage("score", StageState::Running, 1, 4);
        score.active = vec![Task {
            done: 5,
            total: 10,
            ..Task::default()
        }];
        assert!((fraction(&score) - 0.375).abs() < 1e-9);
        assert_eq!(left_text(left_seconds(&score)), "about 16 s left");
    }

    #[test]
    fn each_change_of_a_stage_is_one_line() {
        let mut changes = Changes::default();
        let mut job = Job {
            stages: vec![stage("ingest", StageState::Running, 0, 1)],
            ..Job::default()
        };
        assert_eq!(changes.lines(&job), ["ingest running"]);
        assert!(changes.lines(&job).is_empty());
        job.stages = vec![
            stage("ingest", StageState::Done, 1, 1),
            stage("profile", StageState::Waiting, 0, 1),
        ];
        assert_eq!(changes.lines(&job), ["ingest done in 10 s"]);
    }

    #[test]
    fn a_task_that_fails_says_why_once_for_each_reason_and_while_it_rests() {
        let mut changes = Changes::default();
        let mut job = Job {
            stages: vec![stage("recover", StageState::Running, 0, 1)],
            ..Job::default()
        };
        assert_eq!(changes.lines(&job), ["recover running"]);
        job.stages[0].active = vec![Task {
            id: 7,
            failures: 1,
            last_failure: "no space left".to_owned(),
            ..Task::default()
        }];
        assert_eq!(changes.lines(&job), ["recover: an attempt failed: no space left"]);
        assert!(changes.lines(&job).is_empty());
        assert_eq!(
            describe(&job.stages[0]),
            "recover 0%, to be tried again after: no space left"
        );
        job.stages[0].active[0].last_failure = "the worker is gone".to_owned();
        assert_eq!(
            changes.lines(&job),
            ["recover: an attempt failed: the worker is gone"]
        );
    }

    #[test]
    fn without_a_profile_the_whole_still_comes_to_its_end() {
        let stages = WEIGHTS
            .iter()
            .filter(|(name, _)| *name != "profile")
            .map(|(name, _)| stage(name, StageState::Done, 1, 1));
        let (done, _) = whole(&Job {
            stages: stages.collect(),
            ..Job::default()
        });
        assert!((done - 1.0).abs() < 1e-9, "{done}");
    }

    #[test]
    fn the_whole_never_passes_its_end() {
        let stages = WEIGHTS
            .iter()
            .map(|(name, _)| stage(name, StageState::Done, 1, 1))
            .collect();
        let (done, left) = whole(&Job {
            stages,
            ..Job::default()
        });
        assert!((done - 1.0).abs() < 1e-9 && left.is_some_and(|left| left.abs() < 1e-9));
    }
}
