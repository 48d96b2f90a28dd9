//! Having a process look for GPUs, and hearing what it says. A driver may hang, and whoever hangs in it does not end, not
//! even when it is killed: nobody waits for it for longer than a minute.

use std::io::{self, Read};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};

use super::{COMMAND, Machine};
use crate::{Error, Result};

/// How long looking may take: a driver that has to load itself first needs seconds.
const PATIENCE: Duration = Duration::from_secs(60);
const LOOK: Duration = Duration::from_millis(5);
/// How long a process that was killed may take to end, and what one that has ended complained of to come.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// Bytes of what it says that are heard.
const MOST_HEARD: u64 = 1 << 20;

/// Has `program` (this very one by default) look at every GPU. Waits for it: not for a thread that serves others.
///
/// # Errors
/// When it cannot be started, takes too long, or answers something else.
pub fn find(program: Option<&Path>) -> Result<Machine> {
    ask(program, &[])
}

/// The same of one GPU: the others get no context, and so lose no memory to who looks.
///
/// # Errors
/// As [`find`].
pub(super) fn find_one(program: Option<&Path>, index: u32) -> Result<Machine> {
    ask(program, &["--device", &index.to_string()])
}

fn ask(program: Option<&Path>, about: &[&str]) -> Result<Machine> {
    let failed = |reason: String| Error::Child {
        reason: format!("cannot look for GPUs: {reason}"),
    };
    let own = || std::env::current_exe().map_err(|error| failed(error.to_string()));
    let program = program.map_or_else(own, |program| Ok(program.to_owned()))?;
    let mut child = Command::new(&program)
        .arg(COMMAND)
        .args(about)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| failed(format!("{}: {error}", program.display())))?;
    let (output, complaints) = (child.stdout.take(), child.stderr.take());
    let heard = hear(output).and_then(|output| Ok((output, hear(complaints)?)));
    let (text, complaints) = match heard {
        Ok(heard) => heard,
        Err(error) => {
            // Its pipes are closed and nobody hears it; it must not keep its contexts on the GPUs.
            let _ = child.kill();
            let _ = ended_within(child, LAST_WORDS);
            return Err(failed(error.to_string()));
        }
    };
    let status = ended_within(child, PATIENCE).map_err(failed)?;
    let text = text.recv_timeout(PATIENCE).unwrap_or_default();
    // A driver may print what it likes beside the answer.
    let answer = text
        .lines()
        .rev()
        .find_map(|line| serde_json::from_str::<Machine>(line).ok());
    answer.filter(|_| status.success()).ok_or_else(|| {
        let complaints = complaints.recv_timeout(LAST_WORDS).unwrap_or_default();
        let why = complaints.lines().rev().map(str::trim).find(|line| says_why(line));
        let why = why.map(|why| format!(" ({why})")).unwrap_or_default();
        failed(format!(
            "the process that asks the NVIDIA driver ended without an answer, of {status}{why}: the driver is damaged or \
             does not fit this machine; see nvidia-smi, or use the cpu device"
        ))
    })
}

/// A process, as far as its end goes.
trait Process: Send + 'static {
    fn end_of(&mut self) -> io::Result<Option<ExitStatus>>;
    fn kill(&mut self);
    fn wait(self);
}

impl Process for Child {
    fn end_of(&mut self) -> io::Result<Option<ExitStatus>> {
        self.try_wait()
    }

    fn kill(&mut self) {
        // One that has ended meanwhile is no matter.
        let _ = Child::kill(self);
    }

    fn wait(mut self) {
        let _ = Child::wait(&mut self);
    }
}

/// How the process ended by itself. One that does not in time is killed; that it really ends is not waited for.
fn ended_within(mut process: impl Process, patience: Duration) -> std::result::Result<ExitStatus, String> {
    let why = match look_for_the_end(&mut process, patience) {
        Ok(Some(status)) => return Ok(status),
        Ok(None) => format!(
            "the driver does not answer within {} s; see nvidia-smi",
            patience.as_secs()
        ),
        Err(error) => error.to_string(),
    };
    process.kill();
    if !matches!(look_for_the_end(&mut process, LAST_WORDS), Ok(Some(_))) {
        // It hangs in the driver, where no signal reaches it. Nobody can join this thread before the driver lets go.
        let reaper = std::thread::Builder::new().name("device look".to_owned());
        if let Err(error) = reaper.spawn(move || process.wait()) {
            tracing::debug!(%error, "a process that hangs in the driver will not be reaped");
        }
    }
    Err(why)
}

fn look_for_the_end(process: &mut impl Process, patience: Duration) -> io::Result<Option<ExitStatus>> {
    let deadline = Instant::now() + patience;
    loop {
        match process.end_of()? {
            None if Instant::now() < deadline => std::thread::sleep(LOOK),
            ended => return Ok(ended),
        }
    }
}

/// Reads to the end beside whoever waits for the process.
fn hear(source: Option<impl Read + Send + 'static>) -> io::Result<Receiver<String>> {
    let (sender, heard) = sync_channel(1);
    std::thread::Builder::new()
        .name("device look".to_owned())
        .spawn(move || {
            let mut bytes = Vec::new();
            if let Some(source) = source {
                let _ = source.take(MOST_HEARD).read_to_end(&mut bytes);
            }
            let _ = sender.send(String::from_utf8_lossy(&bytes).into_owned());
        })?;
    Ok(heard)
}

/// Not where it happened, nor how to see more of that.
fn says_why(line: &str) -> bool {
    !(line.is_empty() || line.starts_with("note:") || (line.starts_with("thread ") && line.ends_with(':')))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use std::sync::mpsc::{Sender, channel};

    use super::*;

    /// A process that hangs in the driver: it does not end though it is killed. Says so, and when it is waited for.
    struct Hanging(Sender<&'static str>, Receiver<()>);

    impl Process for Hanging {
        fn end_of(&mut self) -> io::Result<Option<ExitStatus>> {
            Ok(None)
        }

        fn kill(&mut self) {
            self.0.send("killed").unwrap();
        }

        fn wait(self) {
            self.0.send("waited for").unwrap();
            let _ = self.1.recv();
        }
    }

    #[test]
    fn a_process_that_hangs_in_the_driver_is_killed_and_not_waited_for() {
        let (said, sayings) = channel();
        let (end, ends) = channel();
        let error = ended_within(Hanging(said, ends), Duration::from_millis(20)).unwrap_err();
        assert!(error.contains("the driver does not answer within 0 s"), "{error}");
        assert_eq!(sayings.recv(), Ok("killed"));
        // By somebody else, who is not done before it ends.
        assert_eq!(sayings.recv(), Ok("waited for"));
        assert!(sayings.recv_timeout(Duration::from_millis(20)).is_err());
        drop(end);
        assert!(sayings.recv().is_err());
    }

    #[test]
    fn a_process_that_does_not_answer_is_killed_and_reaped() {
        let child = Command::new("sleep").arg("1000").spawn().unwrap();
        let process = child.id();
        ended_within(child, Duration::from_millis(20)).unwrap_err();
        let path = format!("/proc/{process}");
        // By somebody else, where that takes a moment.
        let deadline = Instant::now() + Duration::from_secs(60);
        while Path::new(&path).exists() {
            assert!(Instant::now() < deadline, "{path} is still there");
            std::thread::sleep(LOOK);
        }
    }

    #[test]
    fn a_look_at_one_gpu_names_it() {
        let script =
            r#"test "$2 $3" = "--device 3" && echo "{\"cuda\":\"$1\",\"gpus\":[],\"no_driver\":false}""#;
        assert_eq!(found_by(script).unwrap().cuda.as_deref(), Some(COMMAND));
    }

    #[test]
    fn a_process_that_looks_and_ends_badly_is_an_error() {
        let error = find(Some(Path::new("/bin/false"))).unwrap_err().to_string();
        assert!(error.contains("cannot look for GPUs"), "{error}");
        let error = find(Some(Path::new("/bin/true"))).unwrap_err().to_string();
        assert!(error.contains("cannot look for GPUs"), "{error}");
    }

    /// What is found by a process that does this.
    fn found_by(script: &str) -> Result<Machine> {
        let directory = tempfile::tempdir().unwrap();
        let program = directory.path().join("looks");
        std::fs::write(directory.path().join("text"), format!("#!/bin/sh\n{script}\n")).unwrap();
        // Copied by another process: one that this one had open for writing another test's child might hold yet.
        let copied = Command::new("sh")
            .args(["-c", "cp text looks && chmod +x looks"])
            .current_dir(directory.path())
            .status();
        assert!(copied.unwrap().success());
        find_one(Some(&program), 3)
    }

    #[test]
    fn what_a_driver_prints_beside_the_answer_does_not_spoil_it() {
        let machine = Machine {
            cuda: Some("13.0".to_owned()),
            ..Machine::default()
        };
        let answer = serde_json::to_string(&machine).unwrap();
        let found = found_by(&format!("echo 'NVRM: hello'; echo '{answer}'; echo bye")).unwrap();
        assert_eq!(found, machine);
    }

    #[test]
    fn a_process_that_panics_while_it_looks_says_why_and_what_to_do() {
        let script = "echo \"thread 'main' panicked at lib.rs:1:2:\" >&2; echo 'no cuInit' >&2; \
                      echo 'note: run with' >&2; exit 101";
        let error = found_by(script).unwrap_err().to_string();
        assert!(
            error.contains("101 (no cuInit): the driver is damaged"),
            "{error}"
        );
    }
}
