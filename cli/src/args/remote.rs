//! What is asked of a coordinator, and of its data directory.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};

use super::values::duration;

/// Deadline of a call where none is given.
const CALL: Duration = Duration::from_secs(30);

#[derive(Debug, Subcommand)]
pub(crate) enum JobCommand {
    /// Submit a job; prints its id.
    Submit(Submit),
    /// List jobs, the newest first.
    List(ListJobs),
    /// Show one job and its stages.
    Get(OneJob),
    /// Print the logs of a job's tasks, each line under its task.
    Logs(JobLogs),
    /// Print what happened to a job; `-o json` is an array, with --follow an object on each line.
    Events(Events),
    /// Print a line whenever a job's stage changes, until it has ended.
    Watch(OneJob),
    /// Wait until a job has ended; exits 1 when it failed.
    Wait(OneJob),
    /// End a job.
    Cancel(EndJob),
    /// Start nothing more of a job; what runs is let end.
    Pause(HoldJob),
    /// Let a paused job go on.
    Resume(OneJob),
    /// Let a failed job go on from where it failed.
    Retry(RetryJob),
}

#[derive(Debug, Subcommand)]
pub(crate) enum TaskCommand {
    /// List the tasks of a job.
    List(ListTasks),
    /// Show one task and its attempts.
    Get(OneTask),
    /// Print the log of a task's newest attempt.
    Logs(TaskLogs),
}

#[derive(Debug, Subcommand)]
pub(crate) enum DoctorCommand {
    /// Say what is wrong with a data directory; changes nothing, exits 1 when a coordinator would not start.
    Check(DataDir),
    /// Mend a data directory; what is cut or replaced is copied first.
    Repair(DataDir),
    /// Write every event that can be read to standard output, a JSON object on each line.
    Export(DataDir),
}

/// How to reach the coordinator and how to print.
#[derive(Debug, Args)]
pub(crate) struct Remote {
    /// The coordinator's address.
    #[arg(
        long,
        env = "ESPALIER_COORDINATOR",
        default_value = "http://127.0.0.1:7474",
        value_name = "URL"
    )]
    pub coordinator: String,
    /// Give up after this long, with exit code 4. Default: 30s for what answers at once, never for what waits.
    #[arg(long, value_parser = duration)]
    pub timeout: Option<Duration>,
    #[command(flatten)]
    pub how: How,
}

impl Remote {
    /// Deadline of one call.
    pub(crate) fn call(&self) -> Duration {
        self.timeout.unwrap_or(CALL)
    }
}

/// How to print.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct How {
    /// How to print.
    #[arg(
        short = 'o',
        long = "output",
        value_enum,
        default_value_t,
        value_name = "FORMAT"
    )]
    pub format: Format,
    /// Print ids only, one a line.
    #[arg(short, long)]
    pub quiet: bool,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// For people.
    #[default]
    Table,
    /// For people with wide terminals: every column.
    Wide,
    /// For programs.
    Json,
    /// For programs that people read.
    Yaml,
}

#[derive(Debug, Args)]
pub(crate) struct Submit {
    /// The job spec, YAML.
    pub spec: PathBuf,
    /// Directory to write the outcome to, instead of the spec's `output`; it must not exist.
    #[arg(long, env = "ESPALIER_OUTPUT_DIR", value_name = "DIR")]
    pub output_dir: Option<PathBuf>,
    /// The same id with the same spec gives the same job, so that a submission sent twice runs once.
    #[arg(long, default_value = "", value_name = "ID")]
    pub request_id: String,
    /// Higher goes first.
    #[arg(long, default_value_t = 0, allow_negative_numbers = true, value_parser = clap::value_parser!(i32).range(-100..=100))]
    pub priority: i32,
    #[command(flatten)]
    pub remote: Remote,
}

/// A listing of everything.
#[derive(Debug, Args)]
pub(crate) struct Listed {
    /// Print again whenever it has changed, until interrupted.
    #[arg(long)]
    pub watch: bool,
    #[command(flatten)]
    pub remote: Remote,
}

#[derive(Debug, Args)]
pub(crate) struct ListJobs {
    /// At most this many.
    #[arg(long, default_value_t = 50)]
    pub limit: u32,
    /// Only jobs in this state; may be given more than once.
    #[arg(long, value_enum)]
    pub state: Vec<JobStateName>,
    #[command(flatten)]
    pub listed: Listed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum JobStateName {
    Queued,
    Running,
    Paused,
    Succeeded,
    Failed,
    Cancelled,
}

#[derive(Debug, Args)]
pub(crate) struct OneJob {
    /// For example `job-1`.
    pub job: String,
    #[command(flatten)]
    pub remote: Remote,
}

#[derive(Debug, Args)]
pub(crate) struct HoldJob {
    /// For example `job-1`.
    pub job: String,
    /// One line for the record.
    #[arg(long, default_value = "")]
    pub reason: String,
    #[command(flatten)]
    pub remote: Remote,
}

#[derive(Debug, Args)]
pub(crate) struct EndJob {
    #[command(flatten)]
    pub hold: HoldJob,
    /// Do not ask on a terminal.
    #[arg(short, long)]
    pub yes: bool,
}

#[derive(Debug, Args)]
pub(crate) struct RetryJob {
    /// For example `job-1`.
    pub job: String,
    /// A retry sent twice with the same id is one.
    #[arg(long, default_value = "", value_name = "ID")]
    pub request_id: String,
    #[command(flatten)]
    pub remote: Remote,
}

#[derive(Debug, Args)]
pub(crate) struct Events {
    /// For example `job-1`.
    pub job: String,
    /// Go on with what happens from now, until the job has ended.
    #[arg(short, long)]
    pub follow: bool,
    #[command(flatten)]
    pub remote: Remote,
}

#[derive(Debug, Args)]
pub(crate) struct JobLogs {
    /// For example `job-1`.
    pub job: String,
    /// Only tasks of this stage.
    #[arg(long, default_value = "")]
    pub stage: String,
    /// Only so many last lines of each task; 0 means all that are kept.
    #[arg(long, default_value_t = 0)]
    pub tail: u32,
    /// Go on with every attempt that runs or begins, until the job has ended.
    #[arg(short, long)]
    pub follow: bool,
    #[command(flatten)]
    pub remote: Remote,
}

#[derive(Debug, Args)]
pub(crate) struct ListTasks {
    /// Their job, for example `job-1`.
    pub job: String,
    /// Only tasks of this stage.
    #[arg(long, default_value = "")]
    pub stage: String,
    /// Only tasks in this state; may be given more than once.
    #[arg(long, value_enum)]
    pub state: Vec<TaskStateName>,
    #[command(flatten)]
    pub listed: Listed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum TaskStateName {
    Waiting,
    Running,
    Done,
    Failed,
    Abandoned,
}

#[derive(Debug, Args)]
pub(crate) struct OneTask {
    /// Its number, as `task list` shows it.
    pub task: u64,
    #[command(flatten)]
    pub remote: Remote,
}

#[derive(Debug, Args)]
pub(crate) struct TaskLogs {
    /// Its number, as `task list` shows it.
    pub task: u64,
    /// Another attempt than the newest.
    #[arg(long, default_value_t = 0, hide_default_value = true)]
    pub attempt: u64,
    /// Only so many last lines; 0 means all that are kept.
    #[arg(long, default_value_t = 0)]
    pub tail: u32,
    /// Go on until the task has ended, from one attempt to the next; with --attempt, until that one has.
    #[arg(short, long)]
    pub follow: bool,
    #[command(flatten)]
    pub remote: Remote,
}

#[derive(Debug, Args)]
pub(crate) struct NamedWorker {
    /// Its name.
    pub worker: String,
    #[command(flatten)]
    pub remote: Remote,
}

#[derive(Debug, Args)]
pub(crate) struct KeepWorker {
    /// Its name.
    pub worker: String,
    /// One line for the record.
    #[arg(long, default_value = "")]
    pub reason: String,
    #[command(flatten)]
    pub remote: Remote,
}

#[derive(Debug, Args)]
pub(crate) struct DrainWorker {
    #[command(flatten)]
    pub keep: KeepWorker,
    /// Do not ask on a terminal.
    #[arg(short, long)]
    pub yes: bool,
}

#[derive(Debug, Args)]
pub(crate) struct DataDir {
    /// The coordinator's data directory.
    #[arg(long, env = "ESPALIER_DATA_DIR", value_name = "DIR")]
    pub data_dir: PathBuf,
    /// How to print what was found.
    #[arg(
        short = 'o',
        long = "output",
        value_enum,
        default_value_t,
        value_name = "FORMAT"
    )]
    pub format: Format,
}
