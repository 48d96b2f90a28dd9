//! The counters as OpenMetrics: names, help, base units.

use std::fmt::Error;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::exemplar::Exemplar;
use prometheus_client::registry::Unit;

use super::Counters;
use super::durations::Durations;
use super::labels::{Expiry, FAILURE_NAMES, KIND_NAMES, STATE_NAMES, WORKER_STATES};

type NoExemplar<'a> = Option<&'a Exemplar<NoLabelSet, f64>>;

/// Writes the counters.
#[derive(Debug)]
pub struct Report(pub Arc<Counters>);

impl Collector for Report {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), Error> {
        let counters = self.0.as_ref();
        tasks(&mut encoder, counters)?;
        leases(&mut encoder, counters)?;
        standings(&mut encoder, counters)?;
        journal(&mut encoder, counters)?;
        garbage(&mut encoder, counters)?;
        process(&mut encoder)
    }
}

fn tasks(encoder: &mut DescriptorEncoder<'_>, counters: &Counters) -> Result<(), Error> {
    let help = "Tries at tasks that reached this state";
    let mut family = encoder.encode_descriptor("espalier_tasks", help, None, MetricType::Counter)?;
    for (kind, states) in KIND_NAMES.iter().zip(&counters.tasks) {
        for (state, value) in STATE_NAMES.iter().zip(states) {
            let labels = [("state", *state), ("kind", *kind)];
            let mut metric = family.encode_family(&labels)?;
            metric.encode_counter(&read(value), NoExemplar::None)?;
        }
    }
    let help = "Attempts that failed, by why";
    let name = "espalier_attempts_failed";
    let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
    for (kind, failures) in KIND_NAMES.iter().zip(&counters.failed) {
        for (failure, value) in FAILURE_NAMES.iter().zip(failures) {
            let labels = [("failure", *failure), ("kind", *kind)];
            let mut metric = family.encode_family(&labels)?;
            metric.encode_counter(&read(value), NoExemplar::None)?;
        }
    }
    let help = "From the start to the end of attempts that ended well";
    let name = "espalier_task_duration";
    let mut family = encoder.encode_descriptor(name, help, Some(&Unit::Seconds), MetricType::Histogram)?;
    for (kind, durations) in KIND_NAMES.iter().zip(&counters.durations) {
        let (sum, number, buckets) = durations.read();
        if number == 0 {
            continue;
        }
        let labels = [("kind", *kind)];
        let mut metric = family.encode_family(&labels)?;
        metric.encode_histogram::<NoLabelSet>(sum, number, &buckets, None)?;
    }
    Ok(())
}

fn leases(encoder: &mut DescriptorEncoder<'_>, counters: &Counters) -> Result<(), Error> {
    let help = "Leases that ended without their worker's word";
    let name = "espalier_lease_expirations";
    let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
    for (reason, value) in Expiry::ALL.iter().zip(&counters.expirations) {
        let labels = [("reason", reason.name())];
        let mut metric = family.encode_family(&labels)?;
        metric.encode_counter(&read(value), NoExemplar::None)?;
    }
    let help = "Messages about leases that were no longer held";
    let name = "espalier_stale_messages";
    let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
    metric.encode_counter(&read(&counters.stale), NoExemplar::None)
}

fn standings(encoder: &mut DescriptorEncoder<'_>, counters: &Counters) -> Result<(), Error> {
    let help = "Tasks that wait for a device";
    gauge(
        encoder,
        "espalier_queue_depth",
        help,
        None,
        read(&counters.queue_depth),
    )?;
    let help = "Attempts that hold a device";
    gauge(
        encoder,
        "espalier_attempts_running",
        help,
        None,
        read(&counters.running),
    )?;
    let help = "Clients that follow a job";
    gauge(encoder, "espalier_watchers", help, None, read(&counters.watchers))?;
    let help = "Workers by where they stand";
    let mut family = encoder.encode_descriptor("espalier_workers", help, None, MetricType::Gauge)?;
    for (state, value) in WORKER_STATES.iter().zip(&counters.workers) {
        let labels = [("state", *state)];
        family.encode_family(&labels)?.encode_gauge(&read(value))?;
    }
    Ok(())
}

fn journal(encoder: &mut DescriptorEncoder<'_>, counters: &Counters) -> Result<(), Error> {
    let help = "How long it took to make a batch of the journal durable";
    let name = "espalier_journal_fsync";
    histogram(encoder, name, help, &counters.fsync)?;
    if let Some(directory) = counters.journal.get() {
        let help = "The journal's segments and snapshots on disk";
        let bytes = bytes_in(directory);
        gauge(encoder, "espalier_journal", help, Some(&Unit::Bytes), bytes)?;
    }
    let help = "Whether the journal's disk is full, so that nothing new is taken";
    gauge(
        encoder,
        "espalier_disk_full",
        help,
        None,
        read(&counters.disk_full),
    )?;
    let snapshot = read(&counters.snapshot_at);
    if snapshot > 0 {
        let help = "Since the journal's last snapshot";
        let age = unix_ms().saturating_sub(snapshot);
        gauge_seconds(encoder, "espalier_snapshot_age", help, age)?;
    }
    // As of now: shipping that hangs says nothing itself.
    if let Some(progress) = counters.shipping.get() {
        let help = "How far the artifact store is behind the journal";
        let lag = u64::try_from(progress.lag().as_millis()).unwrap_or(u64::MAX);
        gauge_seconds(encoder, "espalier_ship_lag", help, lag)?;
    }
    Ok(())
}

fn garbage(encoder: &mut DescriptorEncoder<'_>, counters: &Counters) -> Result<(), Error> {
    let help = "Artifacts that nobody needed and that were removed";
    let value = read(&counters.collected_artifacts);
    counter(encoder, "espalier_collected_artifacts", help, None, value)?;
    let help = "The bytes of those";
    let (unit, value) = (Some(&Unit::Bytes), read(&counters.collected_bytes));
    counter(encoder, "espalier_collected", help, unit, value)?;
    let help = "Collections of garbage that went wrong";
    let value = read(&counters.collections_failed);
    counter(encoder, "espalier_collections_failed", help, None, value)?;
    let help = "Archives of ended jobs that are damaged or missing";
    let value = read(&counters.archives_unreadable);
    gauge(encoder, "espalier_archives_unreadable", help, None, value)
}

fn process(encoder: &mut DescriptorEncoder<'_>) -> Result<(), Error> {
    let help = "The program that runs";
    let mut info = encoder.encode_descriptor("espalier_build", help, None, MetricType::Info)?;
    info.encode_info(&[("version", env!("CARGO_PKG_VERSION"))])?;
    if let Some(resident) = resident_bytes() {
        let help = "Memory of this process that is resident";
        gauge(
            encoder,
            "process_resident_memory",
            help,
            Some(&Unit::Bytes),
            resident,
        )?;
    }
    Ok(())
}

fn counter(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    unit: Option<&Unit>,
    value: u64,
) -> Result<(), Error> {
    let mut metric = encoder.encode_descriptor(name, help, unit, MetricType::Counter)?;
    metric.encode_counter(&value, NoExemplar::None)
}

fn gauge(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    unit: Option<&Unit>,
    value: u64,
) -> Result<(), Error> {
    let mut metric = encoder.encode_descriptor(name, help, unit, MetricType::Gauge)?;
    metric.encode_gauge(&value)
}

fn gauge_seconds(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    milliseconds: u64,
) -> Result<(), Error> {
    let seconds = std::time::Duration::from_millis(milliseconds).as_secs_f64();
    let mut metric = encoder.encode_descriptor(name, help, Some(&Unit::Seconds), MetricType::Gauge)?;
    metric.encode_gauge(&seconds)
}

fn histogram(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    durations: &Durations,
) -> Result<(), Error> {
    let (sum, number, buckets) = durations.read();
    let mut metric = encoder.encode_descriptor(name, help, Some(&Unit::Seconds), MetricType::Histogram)?;
    metric.encode_histogram::<NoLabelSet>(sum, number, &buckets, None)
}

fn read(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// What the files of a directory take together.
fn bytes_in(directory: &Path) -> u64 {
    let files = std::fs::read_dir(directory).into_iter().flatten();
    let sizes = files.filter_map(|file| file.ok()?.metadata().ok());
    sizes.map(|file| file.len()).fold(0, u64::saturating_add)
}

/// Memory of this process, where the system tells.
fn resident_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = text.split_whitespace().nth(1)?.parse().ok()?;
    // SAFETY: sysconf touches no memory.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    pages.checked_mul(u64::try_from(page).ok()?)
}
