//! Processes to kill, stop and let go on. None outlives the value that stands for it.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// A running process; killed when dropped.
#[derive(Debug)]
pub struct Process {
    child: Child,
    name: String,
}

impl Process {
    /// Starts a command with its standard error in `log`.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start(command: &mut Command, log: &Path) -> Result<Self> {
        let name = command.get_program().to_string_lossy().into_owned();
        let log = File::options().create(true).append(true).open(log)?;
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .with_context(|| format!("cannot start {name}"))?;
        Ok(Self { child, name })
    }

    /// Its id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Ids of the processes that it has started and that have not ended.
    ///
    /// # Errors
    /// When processes cannot be listed.
    pub fn children(&self) -> Result<Vec<i32>> {
        let own = i32::try_from(self.child.id())?;
        let mut children = Vec::new();
        for entry in std::fs::read_dir("/proc")? {
            let Some(id) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else {
                continue;
            };
            // Gone meanwhile is no child.
            let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
            // After the name, which may have anything in it: the state and the parent.
            let mut fields = stat
                .rsplit_once(')')
                .map_or("", |(_, rest)| rest)
                .split_whitespace();
            let runs = fields.next().is_some_and(|state| state != "Z");
            let parent = fields.next().and_then(|parent| parent.parse::<i32>().ok());
            if runs && parent == Some(own) {
                children.push(id);
            }
        }
        Ok(children)
    }

    /// Ends it without a warning, and waits until it is gone.
    ///
    /// # Errors
    /// When it cannot be waited for.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// Sends a signal.
    ///
    /// # Errors
    /// When it is gone.
    pub fn signal(&self, signal: i32) -> Result<()> {
        let id = libc::pid_t::try_from(self.child.id())?;
        // SAFETY: kill touches no memory; the child has not been waited for, so the id is its own.
        if unsafe { libc::kill(id, signal) } == 0 {
            Ok(())
        } else {
            bail!("{} is gone: {}", self.name, std::io::Error::last_os_error())
        }
    }

    /// How it ended, if it has.
    ///
    /// # Errors
    /// When it cannot be waited for.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        Ok(self.child.try_wait()?)
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// When it still runs after `limit`.
    pub fn wait(&mut self, limit: Duration) -> Result<ExitStatus> {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            if start.elapsed() > limit {
                bail!("{} still runs after {limit:?}", self.name);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A program built beside this one: a test lies one directory deeper than the programs do.
///
/// # Errors
/// When it has not been built.
pub fn program(name: &str) -> Result<PathBuf> {
    let own = std::env::current_exe()?;
    let beside = own
        .ancestors()
        .skip(1)
        .take(2)
        .map(|directory| directory.join(name));
    let mut there = beside.filter(|path| path.is_file());
    there.next().with_context(|| {
        format!(
            "{name} is not built beside {}: cargo build --workspace --bins",
            own.display()
        )
    })
}
