//! What an agent that was killed left behind on a device. A child ends itself when its agent is gone, but not in no
//! time, and what it started may not: the next agent of the worker waits for all of it, and kills what stays.
//!
//! Children are found by variables of their environment, which what they start inherits: no file has to be kept
//! right, and none is stale.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::memory::{processes, processes_of_group, stat};

/// Names the device, for whoever comes after.
const DEVICE: &str = "ESPALIER_DEVICE";
/// The agent: its process id and when it started.
const AGENT: &str = "ESPALIER_AGENT";

/// How long what was left may take to end by itself.
const PATIENCE: Duration = Duration::from_secs(2);
const LOOK: Duration = Duration::from_millis(20);

/// What the children of one device are known by.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mark {
    device: String,
    agent: String,
}

impl Mark {
    /// For a device of a worker of a cluster, as this process starts children on it.
    pub fn new(coordinator: &str, worker: &str, device: &str) -> Self {
        Self {
            device: format!("{worker}/{device}@{coordinator}"),
            agent: life(std::process::id()).unwrap_or_default(),
        }
    }

    /// What a child gets into its environment.
    pub fn variables(&self) -> [(&'static str, &str); 2] {
        [(DEVICE, &self.device), (AGENT, &self.agent)]
    }

    /// Process groups on the device whose agent is gone, or is this very one, which begins anew.
    fn groups(&self) -> Vec<i32> {
        let mut groups: Vec<i32> = processes()
            .filter_map(|process| {
                let environment = std::fs::read(format!("/proc/{process}/environ")).ok()?;
                let of = |name: &str| variable(&environment, name);
                let agent = of(AGENT)?;
                let is_left = agent == self.agent || !is_alive(&agent);
                (of(DEVICE)? == self.device && is_left).then(|| stat(process))?
            })
            .map(|stat| stat.group)
            .collect();
        groups.sort_unstable();
        groups.dedup();
        groups
    }

    /// Waits a moment until nothing is left on the device, and kills what stays. Gives the groups, whose memory
    /// may not be back yet.
    pub async fn clear(&self) -> Vec<i32> {
        let mark = self.clone();
        let found = tokio::task::spawn_blocking(move || mark.groups()).await;
        let groups = found.unwrap_or_default();
        if groups.is_empty() {
            return groups;
        }
        tracing::warn!(
            ?groups,
            device = self.device,
            "an earlier agent has left processes on the device"
        );
        let patience = Instant::now() + PATIENCE;
        while Instant::now() < patience && groups.iter().any(|group| !processes_of_group(*group).is_empty()) {
            sleep(LOOK).await;
        }
        for group in &groups {
            if !processes_of_group(*group).is_empty() {
                // SAFETY: a plain system call; the group holds processes of a child of this worker, just looked at.
                unsafe { libc::kill(-group, libc::SIGKILL) };
            }
        }
        groups
    }
}

/// A variable out of a process's environment.
fn variable(environment: &[u8], name: &str) -> Option<String> {
    environment.split(|byte| *byte == 0).find_map(|entry| {
        let value = entry.strip_prefix(name.as_bytes())?.strip_prefix(b"=")?;
        String::from_utf8(value.to_vec()).ok()
    })
}

/// A process id and when it started: ids come again.
fn life(process: u32) -> Option<String> {
    let started = stat(i32::try_from(process).ok()?)?.started;
    Some(format!("{process}:{started}"))
}

fn is_alive(agent: &str) -> bool {
    let process = agent
        .split_once(':')
        .and_then(|(process, _)| process.parse().ok());
    process.and_then(life).is_some_and(|now| now == agent)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::os::unix::process::CommandExt;
    use std::process::Command;

    use super::*;

    /// A process that ends only when it is killed, marked as the child of an agent.
    fn left(device: &Mark, agent: &str) -> std::process::Child {
        Command::new("sleep")
            .arg("3600")
            .envs(device.variables())
            .env(AGENT, agent)
            .process_group(0)
            .spawn()
            .unwrap()
    }

    #[tokio::test]
    async fn what_a_killed_agent_left_is_ended_and_what_a_living_one_runs_is_not() {
        // The agent of one is the process that started the tests.
        let Some(living) = life(std::os::unix::process::parent_id()) else {
            // That cannot be seen from in here.
            return;
        };
        let own = std::process::id();
        let mark = Mark::new("http://127.0.0.1:1", &format!("worker-{own}"), "cpu");
        // No process has that number.
        let gone = format!("{}:0", u32::MAX);
        let mut orphan = left(&mark, &gone);
        let other = Mark::new("http://127.0.0.1:1", &format!("other-{own}"), "cpu");
        let mut others = left(&other, &gone);
        let mut served = left(&mark, &living);
        let groups = mark.clear().await;
        assert_eq!(groups, [i32::try_from(orphan.id()).unwrap()]);
        orphan.wait().unwrap();
        for child in [&mut others, &mut served] {
            assert!(
                child.try_wait().unwrap().is_none(),
                "it is not this device's, or not left behind"
            );
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
}
