//! What the kernel says of a process: its processor time and its memory.

use std::time::Duration;

use anyhow::{Context, Result};

/// Processor time of all its threads so far, in user and kernel mode.
pub fn processor_time(pid: u32) -> Result<Duration> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The name in the second field may contain anything, blanks and brackets included.
    let (_, after_name) = stat.rsplit_once(')').context("no name in /proc/PID/stat")?;
    let fields: Vec<&str> = after_name.split_whitespace().collect();
    let ticks = |index: usize| -> Result<u64> {
        Ok(fields
            .get(index)
            .context("too few fields in /proc/PID/stat")?
            .parse()?)
    };
    // Fields 14 and 15 of the file, two of which are cut off above.
    let ticks = ticks(11)?.saturating_add(ticks(12)?);
    // SAFETY: sysconf only reads a constant of the system.
    let per_second = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
    let per_second = u64::try_from(per_second)
        .ok()
        .filter(|rate| *rate > 0)
        .unwrap_or(100);
    Ok(Duration::from_millis(ticks.saturating_mul(1000) / per_second))
}

/// Keeps this process, and those it starts, on so many of the processors it may use: what was measured on two
/// is then the same on a larger machine.
pub fn keep_to(processors: usize) -> Result<()> {
    let size = std::mem::size_of::<libc::cpu_set_t>();
    // SAFETY: an all-zero set is the empty one; the calls get its size.
    let (mut allowed, mut kept) = unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
    let got = unsafe { libc::sched_getaffinity(0, size, &mut allowed) };
    anyhow::ensure!(got == 0, "no affinity: {}", std::io::Error::last_os_error());
    let all = 0..usize::try_from(libc::CPU_SETSIZE)?;
    // SAFETY: every number is below the set's size.
    for processor in all
        .filter(|number| unsafe { libc::CPU_ISSET(*number, &allowed) })
        .take(processors)
    {
        unsafe { libc::CPU_SET(processor, &mut kept) };
    }
    // SAFETY: as above.
    let set = unsafe { libc::sched_setaffinity(0, size, &kept) };
    anyhow::ensure!(
        set == 0,
        "cannot keep to {processors} processors: {}",
        std::io::Error::last_os_error()
    );
    Ok(())
}

/// The most memory it ever had resident, MiB.
pub fn peak_mib(pid: u32) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib: u64 = line
        .and_then(|line| line.trim().strip_suffix("kB"))
        .context("no VmHWM in /proc/PID/status")?
        .trim()
        .parse()?;
    Ok(kib.div_ceil(1024))
}

/// Processor time of all processes of the machine since it started.
pub fn machine_time() -> Result<Duration> {
    let stat = std::fs::read_to_string("/proc/stat")?;
    let line = stat.lines().next().context("/proc/stat is empty")?;
    let fields: Vec<u64> = line
        .split_whitespace()
        .skip(1)
        .filter_map(|field| field.parse().ok())
        .collect();
    // user, nice, system, irq, softirq, steal; what is left out is idle and waiting.
    let busy: u64 = [0, 1, 2, 5, 6, 7]
        .iter()
        .filter_map(|index| fields.get(*index))
        .sum();
    Ok(Duration::from_millis(busy.saturating_mul(10)))
}
