//! The helper as a process: started in a group of its own, spoken to in lines, killed with its group.
//!
//! Three threads pass what is written and read, so that a helper that reads nothing, says nothing or floods its output
//! holds nobody up: each queue and each line is bounded.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{ChildStderr, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::Error;
use super::environment::{SAFE_PATH, expect_program};
use super::group::Group;
use super::protocol::{Answer, LINE_BYTES};
use super::room::Room;
use crate::agent::process::out_of_memory_kills;

/// What it writes of its own goes to the task's log; answers come on descriptor 3, a pipe that the shell moves there.
const START: &str = r#"exec "$0" "$@" 3>&1 1>&2"#;
/// Answers that wait to be read, each as long as a line may be.
const ANSWERS: usize = 4;
/// A line of the log is cut after this many bytes.
const LOG_LINE_BYTES: u64 = 4096;
/// Last lines kept to tell why it ended.
const LAST_LINES: usize = 20;
/// How long it may take to be gone once it has closed its answers, and its threads once it is gone.
const END_PATIENCE: Duration = Duration::from_secs(5);
const LOOK: Duration = Duration::from_millis(10);

/// What came of waiting for an answer.
#[derive(Debug)]
pub(super) enum Heard {
    Answer(Answer),
    /// What is no answer, as it begins.
    Garbage(String),
    /// No more will come.
    Closed,
    /// Nothing, in the time given.
    Nothing,
}

/// A running helper; killed with its group when dropped.
#[derive(Debug)]
pub(super) struct Process {
    group: Group,
    requests: Option<SyncSender<Vec<u8>>>,
    answers: Receiver<Heard>,
    last: Arc<Mutex<VecDeque<String>>>,
    threads: Vec<JoinHandle<()>>,
    /// Of the system, for want of memory, before it was started.
    kills_before: u64,
    killed: bool,
    killed_for_memory: bool,
    /// Given back once the group is gone.
    room: Option<Room>,
}

impl Process {
    /// Starts `python` with `arguments` and further variables in its environment, in a room of its own.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start(
        python: &Path,
        arguments: &[&str],
        variables: &[(String, String)],
        room: Option<Room>,
    ) -> Result<Self, Error> {
        let failed = |reason: String| Error::NoPython {
            python: python.to_owned(),
            reason,
        };
        expect_program(python).map_err(failed)?;
        let mut command = Command::new("/bin/sh");
        command
            .args(["-c", START])
            .arg(python)
            .args(arguments)
            .env(SAFE_PATH.0, SAFE_PATH.1)
            .envs(room.iter().flat_map(Room::variables))
            .envs(variables.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        // SAFETY: prctl is safe between fork and exec. The thread that starts it is the one that attempts run on, which
        // lives as long as this process: when that is killed, the kernel kills the helper.
        unsafe {
            command.pre_exec(|| {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                Ok(())
            });
        }
        let kills_before = out_of_memory_kills();
        let mut group =
            Group::spawn(&mut command).map_err(|error| failed(format!("cannot be started: {error}")))?;
        let child = group.child();
        let (input, output, errors) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let (Some(input), Some(output), Some(errors)) = (input, output, errors) else {
            return Err(failed("its pipes are missing".to_owned()));
        };
        let (requests, to_write) = sync_channel(1);
        let (heard, answers) = sync_channel(ANSWERS);
        let last = Arc::new(Mutex::new(VecDeque::new()));
        let kept = Arc::clone(&last);
        let mut process = Self {
            group,
            requests: Some(requests),
            answers,
            last,
            threads: Vec::new(),
            kills_before,
            killed: false,
            killed_for_memory: false,
            room,
        };
        process.spawn("vllm-requests", move || write_requests(input, &to_write))?;
        process.spawn("vllm-answers", move || read_answers(output, &heard))?;
        process.spawn("vllm-log", move || read_log(errors, &kept))?;
        Ok(process)
    }

    fn spawn(&mut self, name: &str, work: impl FnOnce() + Send + 'static) -> Result<(), Error> {
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(work)
            .map_err(|error| Error::Engine {
                reason: format!("cannot start a thread to speak with its process: {error}"),
            })?;
        self.threads.push(thread);
        Ok(())
    }

    /// Has a line written; not where one before it is not even read. Whether this one is shows in the answers, as does
    /// that it has ended.
    pub fn send(&self, line: Vec<u8>) -> bool {
        let sent = self.requests.as_ref().map(|requests| requests.try_send(line));
        !matches!(sent, Some(Err(TrySendError::Full(_))))
    }

    /// Whether it lives, and says nothing that it was not asked.
    pub fn is_idle(&self) -> bool {
        !self.group.has_ended() && matches!(self.answers.try_recv(), Err(TryRecvError::Empty))
    }

    /// What it says next, within `patience`.
    pub fn hear(&self, patience: Duration) -> Heard {
        match self.answers.recv_timeout(patience) {
            Ok(heard) => heard,
            Err(RecvTimeoutError::Timeout) => Heard::Nothing,
            Err(RecvTimeoutError::Disconnected) => Heard::Closed,
        }
    }

    /// The last line of what it wrote of its own.
    pub fn last_line(&self) -> String {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.back().cloned().unwrap_or_default()
    }

    /// All the last lines.
    pub fn last_lines(&self) -> Vec<String> {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.iter().cloned().collect()
    }

    /// Waits a moment for its end and says how it ended; kills what is left.
    pub fn end(&mut self) -> String {
        let is_over = self.group.is_over();
        let ended = self.group.ends_within(END_PATIENCE);
        let Some(status) = self.kill().filter(|_| ended) else {
            return "its answers, not itself,".to_owned();
        };
        self.killed = status.signal() == Some(libc::SIGKILL) && !is_over;
        self.killed_for_memory = self.killed && out_of_memory_kills() > self.kills_before;
        described(status)
    }

    /// Whether somebody else ended it by a signal that none survives.
    pub fn was_killed(&self) -> bool {
        self.killed
    }

    /// Whether that was the system for want of memory, as far as that can be told.
    pub fn was_killed_for_memory(&self) -> bool {
        self.killed_for_memory
    }

    /// Kills its group and waits for it; gives how it ended.
    pub fn kill(&mut self) -> Option<ExitStatus> {
        let status = self.group.kill();
        self.requests = None;
        // Whoever waits to pass an answer on is told that nobody takes it.
        (_, self.answers) = sync_channel(0);
        let deadline = Instant::now() + END_PATIENCE;
        for thread in self.threads.drain(..) {
            // What somebody outside of the group holds open is not waited for.
            while !thread.is_finished() && Instant::now() < deadline {
                std::thread::sleep(LOOK);
            }
            if thread.is_finished() {
                let _ = thread.join();
            }
        }
        self.room = None;
        status
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

fn described(status: ExitStatus) -> String {
    match (status.signal(), status.code()) {
        (Some(signal), _) => format!("of signal {signal}"),
        (None, Some(code)) => format!("with code {code}"),
        (None, None) => "in an unknown way".to_owned(),
    }
}

fn write_requests(mut input: ChildStdin, lines: &Receiver<Vec<u8>>) {
    while let Ok(line) = lines.recv() {
        if input.write_all(&line).and_then(|()| input.flush()).is_err() {
            return;
        }
    }
}

fn read_answers(output: ChildStdout, heard: &SyncSender<Heard>) {
    let mut reader = BufReader::new(output);
    let mut line = Vec::new();
    loop {
        line.clear();
        let read = (&mut reader).take(LINE_BYTES).read_until(b'\n', &mut line);
        if !matches!(read, Ok(length) if length > 0) {
            let _ = heard.send(Heard::Closed);
            return;
        }
        let said = match serde_json::from_slice(&line) {
            Ok(answer) => Heard::Answer(answer),
            Err(_) => Heard::Garbage(String::from_utf8_lossy(&line).chars().take(80).collect()),
        };
        if heard.send(said).is_err() {
            return;
        }
    }
}

fn read_log(errors: ChildStderr, kept: &Mutex<VecDeque<String>>) {
    let mut reader = BufReader::new(errors);
    let mut bytes = Vec::new();
    loop {
        bytes.clear();
        let read = (&mut reader).take(LOG_LINE_BYTES).read_until(b'\n', &mut bytes);
        if !matches!(read, Ok(length) if length > 0) {
            return;
        }
        let line = String::from_utf8_lossy(&bytes).trim_end().to_owned();
        if line.is_empty() {
            continue;
        }
        tracing::info!(target: "vllm", "{line}");
        let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() == LAST_LINES {
            kept.pop_front();
        }
        kept.push_back(line);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn started(script: &str) -> Process {
        Process::start(Path::new("/bin/sh"), &["-c", script], &[], None).unwrap()
    }

    /// Whether it is so soon, on a machine that others use too.
    fn soon(mut is_so: impl FnMut() -> bool) -> bool {
        (0..1200).any(|_| {
            std::thread::sleep(Duration::from_millis(50));
            is_so()
        })
    }

    #[test]
    fn what_one_does_not_read_is_not_waited_for() {
        let deaf = started("sleep 600");
        let line = || vec![b'x'; 1 << 20];
        assert!(deaf.send(line()));
        assert!(soon(|| deaf.send(line())), "one is being written, one waits");
        assert!(!deaf.send(line()));
    }

    #[test]
    fn one_that_says_more_than_anybody_hears_ends_at_once_when_it_is_killed() {
        let is_prompt = || {
            let mut process = started("yes '{\"id\": 1}' >&3");
            assert!(soon(|| !process.is_idle()), "it says what it was not asked");
            let began = Instant::now();
            process.kill();
            let took = began.elapsed();
            assert!(!process.is_idle());
            assert!(matches!(process.hear(LOOK), Heard::Closed));
            took < END_PATIENCE
        };
        // The machine may stand still meanwhile, but not each time.
        assert!((0..10).any(|_| is_prompt()));
    }
}
