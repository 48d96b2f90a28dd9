//! What is asked of measurements that are there already, and of those that are kept.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use espalier_search::{Limits, Workload};

use super::Run;
use super::remote::Remote;
use super::values::{limits, workload};

#[derive(Debug, Args)]
pub(crate) struct Plan {
    /// The outcome directory or report.json of a finished job, or the id of one on a coordinator, finished or not. With
    /// --shapes and --table a model's config.json or its directory will do.
    pub source: String,
    /// Other limits than the job's, as `latency=75%,memory=3GiB`; `latency=750ms at 90%` asks for a confidence. Given more
    /// than once, each is a plan of its own.
    #[arg(long, value_parser = limits, value_name = "LIMITS")]
    pub limits: Vec<Limits>,
    /// Another workload than the job's: PROMPTxOUTPUT or PROMPTxOUTPUTxCONCURRENCY. Given more than once, each is a plan of
    /// its own.
    #[arg(long, value_parser = workload, value_name = "TOKENS")]
    pub workload: Vec<Workload>,
    /// A cost table of another device, instead of the job's own. Given more than once, each is a plan of its own.
    #[arg(long, value_name = "FILE")]
    pub table: Vec<PathBuf>,
    /// Points of each front; 0 leaves it out.
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u16).range(0..=200), value_name = "POINTS")]
    pub front: u16,
    /// Draw lines on beyond the sizes and loads that were measured; predictions say how much they are in doubt.
    #[arg(long)]
    pub extrapolate: bool,
    /// Write the fronts as a page too.
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// Instead of plans: how far apart the latencies of models with equally many parameters lie, and the parameters of
    /// models with equal latency, each keeping at least half of the blocks of each kind.
    #[arg(long, conflicts_with_all = ["limits", "front", "html"])]
    pub shapes: bool,
    #[command(flatten)]
    pub remote: Remote,
}

/// Where cost tables are kept: by a coordinator, or in a directory.
#[derive(Debug, Args)]
pub(crate) struct Tables {
    /// A directory of cost tables, as `espalier run --cost-tables` keeps them, instead of a coordinator's.
    #[arg(long, env = "ESPALIER_COST_TABLES", value_name = "DIR")]
    pub cost_tables: Option<PathBuf>,
    #[command(flatten)]
    pub remote: Remote,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ProfileCommand {
    /// Measure what a spec's search needs of its target, on this machine, and nothing else; leaves cost-table.json in the
    /// output, and with --cost-tables adds it to those that are kept.
    Run(Box<Run>),
    #[command(flatten)]
    Tables(TablesCommand),
}

#[derive(Debug, Subcommand)]
pub(crate) enum TablesCommand {
    /// List the cost tables that are kept.
    List {
        #[command(flatten)]
        tables: Tables,
    },
    /// Show the rows of one table.
    Show {
        /// Its id, or as many digits of it as tell it from others.
        key: String,
        #[command(flatten)]
        tables: Tables,
    },
    /// Write a table to a file, for another machine or for `target.cost_table`.
    Export {
        /// Its id, or as many digits of it as tell it from others.
        key: String,
        /// The file; it must not exist.
        file: PathBuf,
        #[command(flatten)]
        tables: Tables,
    },
    /// Remove a table: its target is measured anew.
    Remove {
        /// Its id, or as many digits of it as tell it from others.
        key: String,
        /// Do not ask on a terminal.
        #[arg(short, long)]
        yes: bool,
        #[command(flatten)]
        tables: Tables,
    },
    /// Take what a file says into the tables that are kept: an exported table, or a job's cost-table.json.
    Import {
        /// The file.
        file: PathBuf,
        #[command(flatten)]
        tables: Tables,
    },
}
