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
