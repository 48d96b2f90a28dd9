//! How a coordinator runs.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use crate::collect::COLLECT_AFTER;
use crate::cost_tables;
use crate::journal;
use crate::shipping::SHIP_INTERVAL;
use crate::term::TERM_LEASE;

/// How a coordinator runs.
#[derive(Debug, Clone)]
pub struct CoordinatorOptions {
    /// Where it listens; port 0 takes a free one. Default: `127.0.0.1:7474`.
    pub listen: SocketAddr,
    /// Where its journal lies; made when missing.
    pub data_dir: PathBuf,
    /// Where artifacts lie: a directory or a URL that workers can reach too. Default: `artifacts` in `data_dir`.
    pub store: Option<String>,
    /// Where cost tables are kept for later jobs. Default: `cost-tables` in `data_dir`.
    pub cost_tables: Option<PathBuf>,
    /// Names the coordinators that follow one another on one store. Only with a `store`: that is where the journal
    /// is shipped and terms are claimed. Default: `espalier`.
    pub cluster: String,
    /// How often the journal is shipped to the store: what losing the disk can cost. Default: 5 s.
    pub ship_interval: Duration,
    /// How long a coordinator may promote after it last saw that no other had taken over. The same for all of a
    /// cluster. Default: 10 s.
    pub term_lease: Duration,
    /// A segment of the journal that has grown larger is closed, and a snapshot of the state may be taken.
    /// Default: 16 MiB.
    pub segment_bytes: u64,
    /// Artifacts that nobody needs stay at least this long after they were last put. Default: 24 h.
    pub collect_after: Duration,
    /// Workers are asked for a heartbeat this often. Default: 2 s.
    pub heartbeat_interval: Duration,
    /// Silence after which a worker's tasks are handed on. Default: 30 s.
    pub worker_lost: Duration,
    /// How long a worker out of touch goes on working. Default: 30 min.
    pub orphan_grace: Duration,
}

impl CoordinatorOptions {
    /// The defaults, with the journal in this directory.
    pub fn new(data_dir: impl Into<PathBuf>) -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 7474)),
            data_dir: data_dir.into(),
            store: None,
            cost_tables: None,
            cluster: "espalier".to_owned(),
            ship_interval: SHIP_INTERVAL,
            term_lease: TERM_LEASE,
            segment_bytes: journal::Options::default().segment_bytes,
            collect_after: COLLECT_AFTER,
            heartbeat_interval: Duration::from_secs(2),
            worker_lost: Duration::from_secs(30),
            orphan_grace: Duration::from_secs(30 * 60),
        }
    }

    /// Where cost tables are kept.
    pub(crate) fn cost_tables(&self) -> PathBuf {
        let own = || self.data_dir.join(cost_tables::DIRECTORY);
        self.cost_tables.clone().unwrap_or_else(own)
    }
}
