//! A child with a process group of its own, which ends with all that it started.

use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

/// How long it may take to be gone once it is killed.
const PATIENCE: Duration = Duration::from_secs(5);
const LOOK: Duration = Duration::from_millis(10);

/// A child that leads a process group; killed with its group when dropped.
#[derive(Debug)]
pub(super) struct Group {
    child: Child,
    /// Its number, as long as no other process can have it.
    number: Option<i32>,
    status: Option<ExitStatus>,
}

impl Group {
    /// Starts it.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn spawn(command: &mut Command) -> std::io::Result<Self> {
        let child = command.process_group(0).spawn()?;
        let number = i32::try_from(child.id()).ok();
        Ok(Self {
            child,
            number,
            status: None,
        })
    }

    /// The child, for its pipes.
    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// Whether it was killed here.
    pub fn is_over(&self) -> bool {
        self.number.is_none()
    }

    /// Whether the child has ended, whatever it started. It is not reaped, so that its group's number stays its own
    /// until the rest of the group is killed.
    pub fn has_ended(&self) -> bool {
        let Some(number) = self.number.and_then(|number| libc::id_t::try_from(number).ok()) else {
            return true;
        };
        // SAFETY: all zeros are a value of this plain structure, which the call then writes, and nothing else. The
        // number is that of a child of this process that was not reaped.
        let (answer, who) = unsafe {
            let mut found: libc::siginfo_t = std::mem::zeroed();
            let how = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
            let answer = libc::waitid(libc::P_PID, number, &raw mut found, how);
            (answer, found.si_pid())
        };
        answer != 0 || who != 0
    }

    /// Waits for its end, no longer than that; whether it has ended.
    pub fn ends_within(&self, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        while !self.has_ended() {
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(LOOK);
        }
        true
    }

    /// Kills all of the group and gives how the child ended; none where the system cannot end it.
    pub fn kill(&mut self) -> Option<ExitStatus> {
        if let Some(number) = self.number.take() {
            // SAFETY: a plain system call; the group is the one that was made for the child, whose number no other has
            // before the child is reaped.
            unsafe { libc::kill(-number, libc::SIGKILL) };
            let deadline = Instant::now() + PATIENCE;
            self.status = loop {
                match self.child.try_wait() {
                    Ok(Some(status)) => break Some(status),
                    Ok(None) if Instant::now() < deadline => std::thread::sleep(LOOK),
                    _ => break None,
                }
            };
        }
        self.status
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.kill();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::io::Read;
    use std::process::Stdio;

    use super::*;

    #[test]
    fn a_child_that_has_ended_takes_what_it_started_with_it() {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", "sleep 600 & exit 3"]).stdout(Stdio::piped());
        let mut group = Group::spawn(&mut command).unwrap();
        let mut output = group.child().stdout.take().unwrap();
        assert!(group.ends_within(Duration::from_secs(30)));
        assert!(group.has_ended(), "it can be asked again");
        assert_eq!(group.kill().and_then(|status| status.code()), Some(3));
        // Only once the sleep is gone is this the end of the pipe.
        assert_eq!(output.read_to_end(&mut Vec::new()).unwrap(), 0);
        assert_eq!(group.kill().and_then(|status| status.code()), Some(3));
    }

    #[test]
    fn a_child_that_goes_on_is_killed() {
        let mut group = Group::spawn(Command::new("sleep").arg("600")).unwrap();
        assert!(!group.ends_within(Duration::from_millis(20)));
        assert!(group.kill().is_some_and(|status| status.code().is_none()));
        assert!(group.has_ended());
    }
}
