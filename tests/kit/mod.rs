//! Processes of the program, for tests that need several of them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, dead_code)]

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Longer than anything takes here on a busy machine; only a failure waits for it.
pub const DEADLINE: Duration = Duration::from_secs(300);

/// A process that does not outlive the test.
pub struct Process {
    pub child: Child,
    pub log: PathBuf,
}

impl Process {
    /// Starts the program.
    pub fn start(arguments: &[&str], log: PathBuf) -> Self {
        Self::printing(arguments, Stdio::null(), log)
    }

    /// The same, with what it prints in `output`.
    pub fn printing(arguments: &[&str], output: impl Into<Stdio>, log: PathBuf) -> Self {
        Self::spawn(espalier(arguments).stdout(output), log)
    }

    /// Starts a command with its standard error in `log`.
    pub fn spawn(command: &mut Command, log: PathBuf) -> Self {
        let child = command
            .stdin(Stdio::null())
            .stderr(File::create(&log).unwrap())
            .spawn()
            .unwrap();
        Self { child, log }
    }

    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap()
    }

    /// Sends SIGTERM and waits for the end.
    pub fn terminate(&mut self) -> ExitStatus {
        let id = libc::pid_t::try_from(self.child.id()).unwrap();
        // SAFETY: kill touches no memory; the child has not been waited for, so the id is its own.
        assert_eq!(unsafe { libc::kill(id, libc::SIGTERM) }, 0);
        self.child.wait().unwrap()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Asks until there is an answer.
pub fn wait_for<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(start.elapsed() < DEADLINE, "{what}: not within {DEADLINE:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The program with these arguments.
pub fn espalier(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_espalier"));
    command.args(arguments);
    command
}

/// Where a coordinator listens that was told to take any port.
pub fn endpoint_of(coordinator: &Process) -> String {
    wait_for("the coordinator's address", || {
        let log = coordinator.log();
        let digits = log.split_once("127.0.0.1:")?.1;
        let end = digits.find(|character: char| !character.is_ascii_digit())?;
        Some(format!("http://127.0.0.1:{}", &digits[..end]))
    })
}
