//! What can be asked on the command line. Flags come before the environment (`ESPALIER_…`), that before defaults.
//!
//! Here are the program and what runs for long; [`remote`] has what is asked of a coordinator, [`estimate`] what is
//! asked of a config, [`values`] how values are read.

mod estimate;
mod plan;
mod remote;
mod values;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};

use espalier_worker::agent::options::HANG_TIMEOUT;
use espalier_worker::discovery::Wanted;
use espalier_worker::engine::vllm::Environment;

pub(crate) use estimate::*;
pub(crate) use plan::*;
pub(crate) use remote::*;
use values::{bytes, duration, interval, threads};

/// Fits a language model to a measured limit: prunes it, distils it, and proves the result by measuring.
#[derive(Debug, Parser)]
#[command(name = "espalier", version, arg_required_else_help = true, after_help = EXIT_CODES)]
pub(crate) struct Arguments {
    #[command(flatten)]
    pub logging: Logging,
    #[command(subcommand)]
    pub command: Command,
}

/// What every process of the program logs, and how.
#[derive(Debug, Clone, Args)]
pub(crate) struct Logging {
    /// What to log on standard error: error, warn, info, debug, or a filter such as `espalier_worker=debug`.
    #[arg(long, global = true, env = "ESPALIER_LOG", value_name = "FILTER")]
    pub log: Option<String>,
    /// How to write the log.
    #[arg(long, global = true, env = "ESPALIER_LOG_FORMAT", value_enum, default_value_t)]
    pub log_format: LogFormat,
}

impl Logging {
    /// The same for a process that this one starts.
    pub(crate) fn arguments(&self) -> Vec<String> {
        let format = match self.log_format {
            LogFormat::Text => "text",
            LogFormat::Json => "json",
        };
        let mut arguments = vec!["--log-format".to_owned(), format.to_owned()];
        if let Some(filter) = &self.log {
            arguments.extend(["--log".to_owned(), filter.clone()]);
        }
        arguments
    }
}

const EXIT_CODES: &str = "Exit codes: 0 ok, 1 the job failed, 2 usage, 3 not found, 4 unreachable, stopping or \
    timed out, 5 denied, 6 conflict or refused, 7 no room or another failure of the machine, 130 interrupted.";

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run one job on this machine, with a coordinator and workers of its own.
    Run(Run),
    /// Run a coordinator until it is told to stop.
    Coordinator(Coordinator),
    /// Run workers, and look after those of a coordinator.
    #[command(subcommand)]
    Worker(WorkerCommand),
    /// Submit and follow jobs on a coordinator.
    #[command(subcommand)]
    Job(JobCommand),
    /// Look into the tasks of jobs on a coordinator.
    #[command(subcommand)]
    Task(TaskCommand),
    /// Say what serving a model will need, from its config alone: parameters, and memory by component.
    Estimate(Box<Estimate>),
    /// Answer other limits, workloads and devices from what a job measured: the choice, what binds, what relaxing buys.
    Plan(Box<Plan>),
    /// Look after the cost tables that are kept across jobs.
    #[command(subcommand)]
    Profile(ProfileCommand),
    /// Look at the devices of this machine.
    #[command(subcommand)]
    Device(DeviceCommand),
    /// Look after a coordinator's data directory while no coordinator runs on it.
    #[command(subcommand)]
    Doctor(DoctorCommand),
    /// Print a shell's completion script.
    Completion {
        /// The shell.
        shell: clap_complete::Shell,
    },
    /// Print the JSON schema of the job spec.
    Schema,
    /// One device's process; the worker starts it.
    #[command(hide = true)]
    DeviceChild {
        /// The device.
        #[arg(long, default_value = "cpu")]
        device: espalier_model::Device,
        /// Bytes of a GPU that tensors may take; of the processor's memory, that a parent's weights may.
        #[arg(long)]
        memory_limit: Option<u64>,
        /// After how long without a sign of life an attempt is killed.
        #[arg(long, env = HANG_TIMEOUT, default_value = "10m", value_parser = interval)]
        hang_timeout: Duration,
        #[command(flatten)]
        vllm: InVllm,
    },
    /// Looks for GPUs and prints them as JSON; a process that ends at once, for those that must have no context.
    #[command(hide = true, name = espalier_worker::discovery::COMMAND)]
    DeviceLook {
        /// Only this one.
        #[arg(long)]
        device: Option<u32>,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum DeviceCommand {
    /// List the processor and every GPU: memory, what of it is in use, and why one cannot be used.
    List {
        #[command(flatten)]
        how: How,
    },
}

/// What is taken of a device.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct GpuShare {
    /// Most that tensors may take of each GPU, such as 20GiB. Default: what is free when its process opens it, less 1
    /// GiB. Of a processor's memory, most that a parent's weights may take. Default: all.
    #[arg(long, env = "ESPALIER_DEVICE_MEMORY", value_parser = bytes, value_name = "BYTES")]
    pub device_memory: Option<u64>,
}

/// vLLM, for jobs whose `target.engine` it is.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct InVllm {
    /// Measure in the vLLM of this Python's environment, which has Espalier's plugin too.
    #[arg(long, env = "ESPALIER_VLLM_PYTHON", value_name = "PYTHON")]
    pub vllm_python: Option<PathBuf>,
    /// Versions of vLLM to go on with though they were not tested, such as 0.33; several with commas.
    #[arg(
        long,
        env = "ESPALIER_VLLM_TRUST",
        value_delimiter = ',',
        value_name = "VERSION"
    )]
    pub vllm_trust: Vec<String>,
}

impl InVllm {
    /// Where it is; none where no Python was named.
    pub(crate) fn environment(&self) -> Option<Environment> {
        let python = self.vllm_python.clone()?;
        let trusted = self.vllm_trust.clone();
        Some(Environment { python, trusted })
    }
}

#[derive(Debug, Args)]
pub(crate) struct Run {
    /// The job spec, YAML.
    pub spec: PathBuf,
    /// Directory to write the outcome to, instead of the spec's `output`; it must not exist.
    #[arg(long, env = "ESPALIER_OUTPUT_DIR", value_name = "DIR")]
    pub output_dir: Option<PathBuf>,
    /// Keep the journal, artifacts and worker logs, and say where they are.
    #[arg(long)]
    pub keep_state: bool,
    /// Directory of cost tables kept across runs: what it has of this device is not measured again, and what is measured is
    /// added. Default: none is kept.
    #[arg(long, env = "ESPALIER_COST_TABLES", value_name = "DIR")]
    pub cost_tables: Option<PathBuf>,
    /// Measure what blocks cost anew, whatever the cost tables have; as the spec's `target.measure_anew`.
    #[arg(long)]
    pub anew: bool,
    /// Worker processes to start.
    #[arg(long, env = "ESPALIER_WORKERS", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub workers: u16,
    /// Where the job runs and what its result is fitted to, instead of the spec's `target.device`: cpu, cuda for every
    /// GPU, or cuda:0, cuda:1 and so on; several with commas. auto leaves it to the spec.
    #[arg(
        long = "device",
        env = "ESPALIER_DEVICES",
        value_delimiter = ',',
        default_value = "auto",
        value_name = "DEVICE"
    )]
    pub devices: Vec<Wanted>,
    #[command(flatten)]
    pub share: GpuShare,
    #[command(flatten)]
    pub vllm: InVllm,
    /// Threads of each worker; 0 shares the machine's processors among them.
    #[arg(long, env = "ESPALIER_THREADS", default_value_t = 0, value_parser = threads)]
    pub threads: usize,
    /// How to print the result.
    #[arg(
        short = 'o',
        long = "output",
        value_enum,
        default_value_t,
        value_name = "FORMAT"
    )]
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
    #[arg(long, env = "ESPALIER_STORE", value_name = "URL")]
    pub store: Option<String>,
    /// Directory in which cost tables are kept for later jobs. Default: `cost-tables` in the data directory.
    #[arg(long, env = "ESPALIER_COST_TABLES", value_name = "DIR")]
    pub cost_tables: Option<PathBuf>,
    /// Names the coordinators that follow one another on one store; where they ship the journal and claim terms.
    #[arg(
        long,
        env = "ESPALIER_CLUSTER",
        default_value = "espalier",
        value_name = "NAME"
    )]
    pub cluster: String,
    /// The journal is shipped to the store this often: the most that losing this machine's disk can cost.
    #[arg(long, env = "ESPALIER_SHIP_INTERVAL", default_value = "5s", value_parser = interval)]
    pub ship_interval: Duration,
    /// How long a coordinator may go on promoting after it last saw that no other had taken over; the same in all
    /// of a cluster.
    #[arg(long, env = "ESPALIER_TERM_LEASE", default_value = "10s", value_parser = interval)]
    pub term_lease: Duration,
    /// Artifacts that no job needs any more stay this long after they were last put.
    #[arg(long, env = "ESPALIER_COLLECT_AFTER", default_value = "24h", value_parser = duration)]
    pub collect_after: Duration,
    /// Workers are asked for a sign of life this often.
    #[arg(long, env = "ESPALIER_HEARTBEAT", default_value = "2s", value_parser = interval)]
    pub heartbeat_interval: Duration,
    /// Silence after which a worker is given up and its tasks are handed on.
    #[arg(long, env = "ESPALIER_WORKER_LOST", default_value = "30s", value_parser = interval)]
    pub worker_lost: Duration,
    /// How long workers out of touch go on working, to report when the coordinator is back.
    #[arg(long, env = "ESPALIER_ORPHAN_GRACE", default_value = "30m", value_parser = duration)]
    pub orphan_grace: Duration,
}

#[derive(Debug, Subcommand)]
pub(crate) enum WorkerCommand {
    /// Run a worker on this machine until it is told to stop.
    Run(Worker),
    /// List workers.
    List(Listed),
    /// Show one worker and its devices.
    Get(NamedWorker),
    /// Give a worker nothing more; what it runs is let end.
    Cordon(KeepWorker),
    /// Give a worker work again.
    Uncordon(NamedWorker),
    /// Have a worker checkpoint and hand back what it runs, and leave.
    Drain(DrainWorker),
    /// Replace the processes of a worker's devices.
    Restart(KeepWorker),
}

#[derive(Debug, Args)]
pub(crate) struct Worker {
    /// The coordinator's address.
    #[arg(long, env = "ESPALIER_COORDINATOR", default_value = "http://127.0.0.1:7474")]
    pub coordinator: String,
    /// Names the worker: letters, digits, `-`, `_`, `.`. Default: the host's name.
    #[arg(long, env = "ESPALIER_WORKER_NAME")]
    pub name: Option<String>,
    /// Which devices to take: auto for every GPU that can be used, or the processor where there is none; cpu; cuda for
    /// every GPU; cuda:0, cuda:1 and so on. Several with commas. `espalier device list` shows them.
    #[arg(
        long = "device",
        env = "ESPALIER_DEVICES",
        value_delimiter = ',',
        default_value = "auto",
        value_name = "DEVICE"
    )]
    pub devices: Vec<Wanted>,
    #[command(flatten)]
    pub share: GpuShare,
    #[command(flatten)]
    pub vllm: InVllm,
    /// Threads of its devices together; 0 means one for each processor.
    #[arg(long, env = "ESPALIER_THREADS", default_value_t = 0, value_parser = threads)]
    pub threads: usize,
    /// On shutdown, how long running attempts may take to end.
    #[arg(long, env = "ESPALIER_DRAIN_TIMEOUT", default_value = "60s", value_parser = duration)]
    pub drain_timeout: Duration,
    /// An attempt that computes nothing, moves no bytes and tells no progress for this long is killed as hung and
    /// tried again; at least 10s.
    #[arg(long, env = HANG_TIMEOUT, default_value = "10m", value_parser = interval)]
    pub hang_timeout: Duration,
    /// End when the process that started this one ends.
    #[arg(long, hide = true)]
    pub with_parent: bool,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    /// Lines for people.
    #[default]
    Text,
    /// A JSON object on each line.
    Json,
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
    fn every_command_that_needs_no_more_than_its_subject_is_taken_with_its_defaults() {
        for words in [
            &["estimate", "config.json"][..],
            &["plan", "out"],
            &["profile", "list"],
            &["profile", "list", "--cost-tables", "tables"],
            &["profile", "remove", "0a1b"],
            &["profile", "run", "job.yaml"],
        ] {
            let words = [&["espalier"], words].concat();
            let taken = Arguments::try_parse_from(&words);
            assert!(taken.is_ok(), "{words:?}: {:?}", taken.err());
        }
    }

    #[test]
    fn a_process_that_is_started_logs_as_its_starter_was_told_to() {
        for given in [
            &["--log-format", "json", "--log", "espalier_worker=debug"][..],
            &["--log", "warn"],
            &[],
        ] {
            let logging = |options: &[&str], command: &[&str]| {
                let words = [&["espalier"], options, command].concat();
                Arguments::try_parse_from(words).unwrap().logging
            };
            let own = logging(given, &["schema"]);
            let passed = own.arguments();
            let passed: Vec<&str> = passed.iter().map(String::as_str).collect();
            let child = logging(&passed, &["device-child"]);
            assert_eq!(child.log, own.log, "{given:?}");
            assert_eq!(child.log_format, own.log_format, "{given:?}");
        }
    }
}
