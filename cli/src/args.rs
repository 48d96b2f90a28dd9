//! What can be asked on the command line. Flags come before the environment (`ESPALIER_…`), that before defaults.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};

/// Fits a language model to a measured limit: prunes it, distils it, and proves the result by measuring.
#[derive(Debug, Parser)]
#[command(name = "espalier", version, arg_required_else_help = true, after_help = EXIT_CODES)]
pub(crate) struct Arguments {
    /// What to log on standard error: error, warn, info, debug, or a filter such as `espalier_worker=debug`.
    #[arg(long, global = true, env = "ESPALIER_LOG", value_name = "FILTER")]
    pub log: Option<String>,
    /// How to write the log.
    #[arg(long, global = true, env = "ESPALIER_LOG_FORMAT", value_enum, default_value_t)]
    pub log_format: LogFormat,
    #[command(subcommand)]
    pub command: Command,
}

const EXIT_CODES: &str = "Exit codes: 0 ok, 1 the job failed, 2 usage, 3 not found, 4 unreachable or timed out, \
    6 conflict, 130 interrupted.";

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run one job on this machine, with a coordinator and workers of its own.
    Run(Run),
    /// Run a coordinator until it is told to stop.
    Coordinator(Coordinator),
    /// Run workers.
    #[command(subcommand)]
    Worker(WorkerCommand),
    /// Submit and follow jobs on a coordinator.
    #[command(subcommand)]
    Job(JobCommand),
    /// Print the JSON schema of the job spec.
    Schema,
    /// One device's process; the worker starts it.
    #[command(hide = true)]
    DeviceChild,
}

#[derive(Debug, Args)]
pub(crate) struct Run {
    /// The job spec, YAML.
    pub spec: PathBuf,
    /// Directory to write the outcome to, instead of the spec's `output`; it must not exist.
    #[arg(long, env = "ESPALIER_OUTPUT", value_name = "DIR")]
    pub output: Option<PathBuf>,
    /// Keep the journal, artifacts and worker logs, and say where they are.
    #[arg(long)]
    pub keep_state: bool,
    /// Worker processes to start.
    #[arg(long, env = "ESPALIER_WORKERS", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub workers: u16,
    /// Threads of each worker; 0 shares the machine's processors among them.
    #[arg(long, env = "ESPALIER_THREADS", default_value_t = 0, value_parser = threads)]
    pub threads: usize,
    /// How to print the result.
    #[arg(short = 'o', long = "format", value_enum, default_value_t)]
    pub format: Format,
}

#[derive(Debug, Args)]
pub(crate) struct Coordinator {
    /// Address to listen on; there is no authentication, so stay on loopback or a private network.
    #[arg(long, env = "ESPALIER_LISTEN", default_value = "127.0.0.1:7474")]
    pub listen: SocketAddr,
    /// Directory of the journal.
    #[arg(long, env = "ESPALIER_DATA_DIR", value_name = "DIR")]
    pub data_dir: PathBuf,
    /// Artifact store that every worker can reach: a directory or a URL. Default: `artifacts` in the data directory.
    #[arg(long, env = "ESPALIER_STORE")]
    pub store: Option<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum WorkerCommand {
    /// Run a worker on this machine until it is told to stop.
    Run(Worker),
}

#[derive(Debug, Args)]
pub(crate) struct Worker {
    /// The coordinator's address.
    #[arg(long, env = "ESPALIER_COORDINATOR", default_value = "http://127.0.0.1:7474")]
    pub coordinator: String,
    /// Names the worker: letters, digits, `-`, `_`, `.`. Default: the host's name.
    #[arg(long, env = "ESPALIER_WORKER_NAME")]
    pub name: Option<String>,
    /// Threads of its device; 0 means one for each processor.
    #[arg(long, env = "ESPALIER_THREADS", default_value_t = 0, value_parser = threads)]
    pub threads: usize,
    /// On shutdown, how long running attempts may take to end.
    #[arg(long, env = "ESPALIER_DRAIN_TIMEOUT", default_value = "60s", value_parser = duration)]
    pub drain_timeout: Duration,
    /// End when the process that started this one ends.
    #[arg(long, hide = true)]
    pub with_parent: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum JobCommand {
    /// Submit a job; prints its id.
    Submit(Submit),
    /// List jobs, the newest first.
    List(List),
    /// Show one job and its stages.
    Get(One),
    /// Print a line whenever a job's stage changes, until it has ended.
    Watch(One),
    /// Wait until a job has ended; exits 1 when it failed.
    Wait(Wait),
    /// End a job.
    Cancel(Cancel),
}

/// How to reach the coordinator and how to print.
#[derive(Debug, Args)]
pub(crate) struct Remote {
    /// The coordinator's address.
    #[arg(long, env = "ESPALIER_COORDINATOR", default_value = "http://127.0.0.1:7474")]
    pub coordinator: String,
    /// Deadline of each call.
    #[arg(long, env = "ESPALIER_TIMEOUT", default_value = "30s", value_parser = duration)]
    pub call_timeout: Duration,
    /// How to print.
    #[arg(short = 'o', long = "output", value_enum, default_value_t)]
    pub format: Format,
}

#[derive(Debug, Args)]
pub(crate) struct Submit {
    /// The job spec, YAML.
    pub spec: PathBuf,
    /// Directory to write the outcome to, instead of the spec's `output`; it must not exist.
    #[arg(long, env = "ESPALIER_OUTPUT", value_name = "DIR")]
    pub output_dir: Option<PathBuf>,
    /// The same id with the same spec gives the same job, so that a submission sent twice runs once.
    #[arg(long, default_value = "")]
    pub request_id: String,
    #[command(flatten)]
    pub remote: Remote,
}

#[derive(Debug, Args)]
pub(crate) struct List {
    /// At most this many.
    #[arg(long, default_value_t = 50)]
    pub limit: u32,
    #[command(flatten)]
    pub remote: Remote,
}

#[derive(Debug, Args)]
pub(crate) struct One {
    /// For example `job-1`.
    pub job: String,
    #[command(flatten)]
    pub remote: Remote,
}

#[derive(Debug, Args)]
pub(crate) struct Wait {
    /// For example `job-1`.
    pub job: String,
    /// Give up after this long, with exit code 4. Default: never.
    #[arg(long, value_parser = duration)]
    pub timeout: Option<Duration>,
    #[command(flatten)]
    pub remote: Remote,
}

#[derive(Debug, Args)]
pub(crate) struct Cancel {
    /// For example `job-1`.
    pub job: String,
    /// One line for the record.
    #[arg(long, default_value = "")]
    pub reason: String,
    #[command(flatten)]
    pub remote: Remote,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    /// Lines for people.
    #[default]
    Text,
    /// A JSON object on each line.
    Json,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// For people.
    #[default]
    Table,
    /// For programs.
    Json,
}

/// A number of threads: more than there are processors would only have them wait for each other.
fn threads(text: &str) -> Result<usize, String> {
    let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    match text.parse() {
        Ok(threads) if threads <= processors => Ok(threads),
        _ => Err(format!(
            "expected 0 to {processors}, the processors of this machine"
        )),
    }
}

/// `250ms`, `30s`, `5m`, `2h`.
fn duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("`{text}` is no duration; write it as 250ms, 30s, 5m or 2h");
    let split = text
        .find(|character: char| !character.is_ascii_digit())
        .ok_or_else(wrong)?;
    let (digits, unit) = text.split_at(split);
    let amount: u64 = digits.parse().map_err(|_| wrong())?;
    let milliseconds = match unit {
        "ms" => 1,
        "s" => 1000,
        "m" => 60_000,
        "h" => 3_600_000,
        _ => return Err(wrong()),
    };
    amount
        .checked_mul(milliseconds)
        .map(Duration::from_millis)
        .ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn durations_carry_their_unit() {
        assert_eq!(duration("30s").unwrap(), Duration::from_secs(30));
        assert_eq!(duration("250ms").unwrap(), Duration::from_millis(250));
        assert!(duration("30").unwrap_err().contains("30s, 5m"));
        assert!(duration("99999999999999999999h").is_err());
    }
}
