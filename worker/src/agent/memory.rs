//! Whether a device is really free: no process of the child before is left, and the memory it held has come
//! back. A device that does not come free is said to be so, with the evidence, and never silently used again.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};

/// How long memory may take to come back after its holder was killed.
pub const RECLAIM_TIMEOUT: Duration = Duration::from_secs(30);
const FIRST_LOOK: Duration = Duration::from_millis(2);
const LAST_LOOK: Duration = Duration::from_millis(250);
/// How long one look may take, however little patience is left: a look that begins late is no driver that hangs.
const LOOK_TIMEOUT: Duration = Duration::from_secs(5);

/// What is free on a device, seen from outside its child.
pub trait DeviceMemory: fmt::Debug + Send + Sync {
    /// Bytes that a fresh child could have now; none where the system does not tell. May take a second: it is
    /// asked on a thread that may wait.
    fn free_bytes(&self) -> Option<u64>;
}

/// The host's memory, for devices of kind `cpu`.
#[derive(Debug, Clone, Copy, Default)]
pub struct HostMemory;

impl DeviceMemory for HostMemory {
    fn free_bytes(&self) -> Option<u64> {
        let host = meminfo_bytes("MemAvailable:");
        [host, control_group_free_bytes()].into_iter().flatten().min()
    }
}

/// A field of `/proc/meminfo`.
pub(super) fn meminfo_bytes(field: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let value = text.lines().find_map(|line| line.strip_prefix(field))?;
    let kibibytes: u64 = value.split_whitespace().next()?.parse().ok()?;
    Some(kibibytes.saturating_mul(1024))
}

/// What the limit of our own control group leaves; none without a limit.
fn control_group_free_bytes() -> Option<u64> {
    let limit: u64 = control_group_file("memory.max")?.trim().parse().ok()?;
    let used: u64 = control_group_file("memory.current")?.trim().parse().ok()?;
    let statistics = control_group_file("memory.stat")?;
    Some(limit.saturating_sub(used.saturating_sub(droppable_bytes(&statistics))))
}

/// What a control group holds of files that can be dropped, which counts as free. Files of a tmpfs, and shared memory, are
/// counted among them and cannot.
fn droppable_bytes(statistics: &str) -> u64 {
    let of = |field: &str| {
        let mut lines = statistics.lines();
        let value = lines.find_map(|line| line.strip_prefix(field)?.trim().parse::<u64>().ok());
        value.unwrap_or(0)
    };
    of("file ").saturating_sub(of("shmem "))
}

/// A file of our own control group (version 2).
pub(super) fn control_group_file(name: &str) -> Option<String> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = groups.lines().find_map(|line| line.strip_prefix("0::"))?;
    let path = format!("/sys/fs/cgroup/{}/{name}", path.trim_matches('/'));
    std::fs::read_to_string(path).ok()
}

/// Every process of the system.
pub(super) fn processes() -> impl Iterator<Item = i32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok())
}

/// Living processes of a process group. One that has ended and waits for its parent holds nothing any more.
pub fn processes_of_group(group: i32) -> Vec<i32> {
    let is_of_it = |stat: Stat| stat.group == group && !matches!(stat.state, 'Z' | 'X');
    processes()
        .filter(|process| stat(*process).is_some_and(is_of_it))
        .collect()
}

/// Of a process, as `/proc/<process>/stat` has it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stat {
    state: char,
    pub(super) group: i32,
    /// In the system's ticks since it started.
    pub(super) started: u64,
}

pub(super) fn stat(process: i32) -> Option<Stat> {
    let text = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name before the last parenthesis may hold anything.
    let mut fields = text.rsplit_once(')')?.1.split_whitespace();
    Some(Stat {
        state: fields.next()?.chars().next()?,
        group: fields.nth(1)?.parse().ok()?,
        started: fields.nth(16)?.parse().ok()?,
    })
}

/// Memory that a fresh child wants.
#[derive(Debug, Clone, Copy)]
pub struct Room {
    /// Without which it cannot work.
    pub need_bytes: u64,
    /// That it would put to use.
    pub ample_bytes: u64,
}

/// Waits until no process of `groups` is left and the memory is free that a child would put to use; after `patience` what
/// it needs is enough, for somebody else may keep the rest.
///
/// # Errors
/// After `patience`: what is left, in one line.
pub async fn wait_until_free(
    memory: &Arc<dyn DeviceMemory>,
    groups: &[i32],
    room: Room,
    patience: Duration,
) -> std::result::Result<(), String> {
    let deadline = Instant::now() + patience;
    let mut pause = FIRST_LOOK;
    loop {
        let left = if groups.is_empty() {
            Vec::new()
        } else {
            let groups = groups.to_vec();
            // Reading /proc takes milliseconds on a busy host.
            let look = move || groups.into_iter().flat_map(processes_of_group).collect();
            tokio::task::spawn_blocking(look).await.unwrap_or_default()
        };
        let ample_bytes = room.need_bytes.max(room.ample_bytes);
        let free = match ample_bytes {
            0 => Free::Unknown,
            _ => free_now(memory, deadline.max(Instant::now() + LOOK_TIMEOUT)).await,
        };
        let has = |bytes: u64| match free {
            Free::Bytes(free) => free >= bytes,
            Free::Unknown => true,
            Free::Unanswered => false,
        };
        if left.is_empty() && has(ample_bytes) {
            return Ok(());
        }
        if Instant::now() >= deadline {
            if left.is_empty() && has(room.need_bytes) {
                tracing::info!(
                    ?free,
                    ?room,
                    "others use the device: its child begins with what is free"
                );
                return Ok(());
            }
            return Err(evidence(&left, free, room.need_bytes, patience));
        }
        sleep(pause).await;
        pause = (2 * pause).min(LAST_LOOK);
    }
}

/// What is known of a device's memory.
#[derive(Debug, Clone, Copy)]
enum Free {
    Bytes(u64),
    /// The system does not tell.
    Unknown,
    /// Nobody has answered in time, as where a driver hangs.
    Unanswered,
}

/// A look that hangs is left to its thread.
async fn free_now(memory: &Arc<dyn DeviceMemory>, deadline: Instant) -> Free {
    let memory = Arc::clone(memory);
    let look = tokio::task::spawn_blocking(move || memory.free_bytes());
    match tokio::time::timeout_at(deadline, look).await {
        Ok(looked) => looked.unwrap_or_default().map_or(Free::Unknown, Free::Bytes),
        Err(_) => Free::Unanswered,
    }
}

fn evidence(left: &[i32], free: Free, need_bytes: u64, patience: Duration) -> String {
    let seconds = patience.as_secs();
    let mut line = format!("the device is not free after {seconds} s");
    if !left.is_empty() {
        line.push_str(&format!("; processes {left:?} of its last child are left"));
    }
    match free {
        Free::Bytes(free) => line.push_str(&format!(
            "; {free} bytes of memory are free, and {need_bytes} are needed: end what else uses it"
        )),
        Free::Unanswered => {
            line.push_str("; what of its memory is free is not answered: does its driver hang?")
        }
        Free::Unknown => {}
    }
    line
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::{Mutex, mpsc};

    use super::*;

    #[derive(Debug)]
    struct Fixed(u64);

    impl DeviceMemory for Fixed {
        fn free_bytes(&self) -> Option<u64> {
            Some(self.0)
        }
    }

    fn needed(need_bytes: u64) -> Room {
        Room {
            need_bytes,
            ample_bytes: 0,
        }
    }

    #[tokio::test]
    async fn memory_that_does_not_come_back_is_told_with_its_evidence() {
        let patience = Duration::from_millis(20);
        let memory = |free| -> Arc<dyn DeviceMemory> { Arc::new(Fixed(free)) };
        let told = wait_until_free(&memory(10), &[], needed(11), patience)
            .await
            .unwrap_err();
        assert!(
            told.contains("10 bytes") && told.contains("11 are needed"),
            "{told}"
        );
        wait_until_free(&memory(11), &[], needed(11), patience)
            .await
            .unwrap();
    }

    #[tokio::test]
    async fn memory_that_somebody_else_keeps_is_waited_for_and_then_done_without() {
        let patience = Duration::from_millis(20);
        let memory: Arc<dyn DeviceMemory> = Arc::new(Fixed(10));
        let streamed = |need_bytes, ample_bytes| Room {
            need_bytes,
            ample_bytes,
        };
        let begun = Instant::now();
        wait_until_free(&memory, &[], streamed(10, 60), patience)
            .await
            .unwrap();
        assert!(begun.elapsed() >= patience, "it may come back");
        wait_until_free(&memory, &[], streamed(0, 60), patience)
            .await
            .unwrap();
        let told = wait_until_free(&memory, &[], streamed(11, 60), patience).await;
        assert!(told.unwrap_err().contains("11 are needed"));
        // SAFETY: asks for a number.
        let own = unsafe { libc::getpgrp() };
        let told = wait_until_free(&memory, &[own], streamed(10, 60), patience).await;
        assert!(told.unwrap_err().contains("of its last child are left"));
    }

    /// Answers once `until` has no sender any more.
    #[derive(Debug)]
    struct Hanging {
        until: Mutex<mpsc::Receiver<()>>,
    }

    impl DeviceMemory for Hanging {
        fn free_bytes(&self) -> Option<u64> {
            let until = self.until.lock().unwrap();
            until.recv().is_err().then_some(u64::MAX)
        }
    }

    #[tokio::test]
    async fn a_driver_that_hangs_is_not_waited_for() {
        let (hold, until) = mpsc::channel();
        let memory: Arc<dyn DeviceMemory> = Arc::new(Hanging {
            until: Mutex::new(until),
        });
        let patience = Duration::from_millis(20);
        let told = wait_until_free(&memory, &[], needed(11), patience)
            .await
            .unwrap_err();
        assert!(told.contains("does its driver hang?"), "{told}");
        drop(hold);
    }

    /// Answers later than the wait has patience, as a system that is busy does.
    #[derive(Debug)]
    struct Late;

    impl DeviceMemory for Late {
        fn free_bytes(&self) -> Option<u64> {
            std::thread::sleep(Duration::from_millis(100));
            Some(10)
        }
    }

    #[tokio::test]
    async fn an_answer_that_comes_late_is_heard() {
        let memory: Arc<dyn DeviceMemory> = Arc::new(Late);
        let patience = Duration::from_millis(1);
        let told = wait_until_free(&memory, &[], needed(11), patience)
            .await
            .unwrap_err();
        assert!(told.contains("10 bytes of memory are free"), "{told}");
        wait_until_free(&memory, &[], needed(10), patience).await.unwrap();
    }

    #[test]
    fn files_in_memory_are_no_memory_that_can_be_had() {
        let statistics = "anon 5\nfile 700\nshmem 600\nfile_mapped 9\n";
        assert_eq!(droppable_bytes(statistics), 100);
        assert_eq!(droppable_bytes("file 700\n"), 700);
        assert_eq!(droppable_bytes(""), 0);
    }

    #[test]
    fn this_process_is_found_in_its_group() {
        // SAFETY: asks for a number.
        let group = unsafe { libc::getpgrp() };
        let own = i32::try_from(std::process::id()).unwrap();
        assert!(processes_of_group(group).contains(&own));
        assert!(HostMemory.free_bytes().is_some_and(|free| free > 0));
    }
}
