//! One device child as a process: started in a process group of its own, spoken to in lines, killed with
//! its whole group, and its end told apart.

use std::collections::VecDeque;
use std::os::unix::process::ExitStatusExt;
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use espalier_proto::task::{Failure, FailureKind};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::memory::control_group_file;
use super::options::{ChildOptions, DeviceOptions};
use crate::child::protocol::{Reply, Request};
use crate::{Error, Result};

/// Log lines waiting to be passed on; more are dropped.
const LOG_LINES: usize = 256;
/// A log line is cut after this many bytes.
const LINE_BYTES: usize = 4096;
/// Last lines kept to tell why a child ended.
const TAIL_LINES: usize = 20;

/// How long a child without work may take to end when it is told to: it may have something left to send.
const END_PATIENCE: Duration = Duration::from_secs(1);
/// How long a child may take to be gone after it was killed.
const KILL_PATIENCE: Duration = Duration::from_secs(5);
/// How long a line that was written before an end may take to come after it.
const LAST_LINES_PATIENCE: Duration = Duration::from_millis(2);

/// Log lines passed on together.
const LINES_TOGETHER: usize = 100;

/// What a child says.
#[derive(Debug)]
pub enum FromChild {
    /// On its standard output.
    Reply(Reply),
    /// On its standard output, and not understood: whatever it was, it will not be said again.
    Garbled(String),
    /// On its standard error.
    Log(Vec<String>),
}

/// A running child.
#[derive(Debug)]
pub struct Process {
    child: Child,
    group: Option<i32>,
    requests: ChildStdin,
    replies: Lines<BufReader<ChildStdout>>,
    log: mpsc::Receiver<String>,
    tail: Arc<Mutex<VecDeque<String>>>,
    log_reader: JoinHandle<()>,
    out_of_memory_kills: u64,
}

impl Process {
    /// Starts a child for a device.
    ///
    /// # Errors
    /// When the program cannot be started.
    pub fn start(options: &ChildOptions, device: &DeviceOptions) -> Result<Self> {
        let failed = |what: &str, error: std::io::Error| Error::Child {
            reason: format!("{what}: {error}"),
        };
        let program = match &options.program {
            Some(program) => program.clone(),
            None => std::env::current_exe().map_err(|error| failed("cannot find this program", error))?,
        };
        let mut command = Command::new(&program);
        command
            .args(&options.arguments)
            .env("RAYON_NUM_THREADS", device.threads.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .kill_on_drop(true);
        let mut child = command
            .spawn()
            .map_err(|error| failed(&format!("cannot start {}", program.display()), error))?;
        let missing = || Error::Child {
            reason: "its pipes are missing".to_owned(),
        };
        let requests = child.stdin.take().ok_or_else(missing)?;
        let replies = BufReader::new(child.stdout.take().ok_or_else(missing)?).lines();
        let errors = child.stderr.take().ok_or_else(missing)?;
        let group = child.id().and_then(|id| i32::try_from(id).ok());
        let (sender, log) = mpsc::channel(LOG_LINES);
        let tail = Arc::new(Mutex::new(VecDeque::new()));
        let log_reader = tokio::spawn(read_log(errors, sender, Arc::clone(&tail)));
        let out_of_memory_kills = out_of_memory_kills();
        Ok(Self {
            child,
            group,
            requests,
            replies,
            log,
            tail,
            log_reader,
            out_of_memory_kills,
        })
    }

    /// Sends a request.
    ///
    /// # Errors
    /// When the child no longer reads.
    pub async fn send(&mut self, request: &Request) -> Result<()> {
        let failed = |reason: String| Error::Child { reason };
        let mut line = serde_json::to_vec(request).map_err(|error| failed(error.to_string()))?;
        line.push(b'\n');
        self.requests
            .write_all(&line)
            .await
            .map_err(|error| failed(format!("cannot be spoken to: {error}")))?;
        self.requests
            .flush()
            .await
            .map_err(|error| failed(format!("cannot be spoken to: {error}")))
    }

    /// The next reply or lines of the log; none when the child has closed its output. Safe to drop and call
    /// again.
    pub async fn next(&mut self) -> Option<FromChild> {
        tokio::select! {
            line = self.replies.next_line() => match line {
                Ok(Some(line)) => Some(match serde_json::from_str(&line) {
                    Ok(reply) => FromChild::Reply(reply),
                    Err(error) => FromChild::Garbled(error.to_string()),
                }),
                Ok(None) | Err(_) => None,
            },
            Some(first) = self.log.recv() => {
                let mut lines = vec![first];
                while lines.len() < LINES_TOGETHER && let Ok(line) = self.log.try_recv() {
                    lines.push(line);
                }
                Some(FromChild::Log(lines))
            }
        }
    }

    /// The child's process group.
    pub fn group(&self) -> Option<i32> {
        self.group
    }

    /// Lines of the log that were written before what was said last and have not been passed on.
    pub async fn last_lines(&mut self) -> Vec<String> {
        let mut lines = Vec::new();
        while lines.len() < LOG_LINES
            && let Ok(Some(line)) = tokio::time::timeout(LAST_LINES_PATIENCE, self.log.recv()).await
        {
            lines.push(line);
        }
        lines
    }

    /// Tells a child without work to end, and kills its process group when it does not.
    pub async fn end(mut self) {
        let ends = async {
            if self.send(&Request::Shutdown).await.is_ok() {
                let _ = self.child.wait().await;
            }
        };
        let _ = tokio::time::timeout(END_PATIENCE, ends).await;
        self.kill().await;
    }

    /// Kills the child's process group and waits for the child itself. One that the system cannot end is
    /// left to whoever looks whether the device is free.
    pub async fn kill(mut self) {
        self.kill_group();
        let _ = tokio::time::timeout(KILL_PATIENCE, self.child.wait()).await;
        self.log_reader.abort();
        let _ = self.log_reader.await;
    }

    /// Waits for a child that closed its output, kills what is left of its group, and says why it ended and
    /// what it wrote last.
    pub async fn autopsy(mut self) -> (Failure, Vec<String>) {
        let waited = tokio::time::timeout(KILL_PATIENCE, self.child.wait()).await;
        // The group may hold grandchildren even when the child itself is gone.
        self.kill_group();
        let status = match waited {
            Ok(status) => Some(status),
            Err(_) => tokio::time::timeout(KILL_PATIENCE, self.child.wait()).await.ok(),
        };
        if tokio::time::timeout(Duration::from_secs(1), &mut self.log_reader)
            .await
            .is_err()
        {
            self.log_reader.abort();
        }
        let mut lines = Vec::new();
        while let Ok(line) = self.log.try_recv() {
            lines.push(line);
        }
        let tail: Vec<String> = self
            .tail
            .lock()
            .map(|tail| tail.iter().cloned().collect())
            .unwrap_or_default();
        let killed_for_memory = out_of_memory_kills() > self.out_of_memory_kills;
        let gone = |message: String| Failure {
            kind: FailureKind::Crashed,
            message,
        };
        let failure = match status {
            Some(Ok(status)) => classify(status, &tail, killed_for_memory),
            Some(Err(error)) => gone(format!("the device child is gone: {error}")),
            None => gone("the device child closed its output and cannot be killed".to_owned()),
        };
        (failure, lines)
    }

    fn kill_group(&self) {
        if let Some(group) = self.group {
            // SAFETY: a plain system call; the group is the one this process made for the child.
            unsafe { libc::kill(-group, libc::SIGKILL) };
        }
    }
}

/// Whether a line is what an allocator says at its end: Rust's for the host, or CUDA's for a device.
fn tells_of_no_memory(line: &str) -> bool {
    line.contains("memory allocation of")
        || line.contains("CUDA_ERROR_OUT_OF_MEMORY")
        || line.contains("cudaErrorMemoryAllocation")
        || (line.contains("CUDA") && line.contains("out of memory"))
}

/// Tells a crash from running out of memory: by an allocator's last words, or by the kernel's count of
/// processes it killed for memory when the child died of SIGKILL.
fn classify(status: ExitStatus, tail: &[String], killed_for_memory: bool) -> Failure {
    let allocator = tail.iter().any(|line| tells_of_no_memory(line));
    let by_kernel = status.signal() == Some(libc::SIGKILL) && killed_for_memory;
    let last = tail
        .last()
        .map(|line| format!("; its last line: {line}"))
        .unwrap_or_default();
    if allocator || by_kernel {
        let who = if by_kernel {
            "the kernel killed it"
        } else {
            "an allocation failed"
        };
        let message = format!("the device child ran out of memory ({who}){last}");
        return Failure {
            kind: FailureKind::OutOfMemory,
            message,
        };
    }
    let how = match (status.signal(), status.code()) {
        (Some(signal), _) => format!("of signal {signal}"),
        (None, Some(code)) => format!("with code {code}"),
        (None, None) => "in an unknown way".to_owned(),
    };
    Failure {
        kind: FailureKind::Crashed,
        message: format!("the device child ended {how}{last}"),
    }
}

/// How many processes of our control group the kernel has killed for memory, or of the whole system where
/// there is no such count.
fn out_of_memory_kills() -> u64 {
    let count = |text: &str| {
        text.lines()
            .find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
    };
    control_group_file("memory.events")
        .as_deref()
        .and_then(count)
        .or_else(|| count(&std::fs::read_to_string("/proc/vmstat").ok()?))
        .unwrap_or(0)
}

async fn read_log(
    errors: tokio::process::ChildStderr,
    sender: mpsc::Sender<String>,
    tail: Arc<Mutex<VecDeque<String>>>,
) {
    let mut reader = BufReader::new(errors);
    let mut bytes = Vec::new();
    loop {
        bytes.clear();
        // A line without an end must not fill the memory: it is passed on in pieces.
        let mut limited = (&mut reader).take(LINE_BYTES as u64);
        match limited.read_until(b'\n', &mut bytes).await {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        let line = String::from_utf8_lossy(&bytes).trim_end().to_owned();
        if line.is_empty() {
            continue;
        }
        if let Ok(mut tail) = tail.lock() {
            if tail.len() == TAIL_LINES {
                tail.pop_front();
            }
            tail.push_back(line.clone());
        }
        // Lossy by design: a log never holds a child up.
        let _ = sender.try_send(line);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn running_out_of_memory_is_told_from_a_crash() {
        let killed = ExitStatus::from_raw(libc::SIGKILL);
        let aborted = ExitStatus::from_raw(libc::SIGABRT);
        let line = |text: &str| vec![text.to_owned()];
        assert_eq!(classify(killed, &[], true).kind, FailureKind::OutOfMemory);
        assert_eq!(classify(killed, &[], false).kind, FailureKind::Crashed);
        assert_eq!(classify(aborted, &[], true).kind, FailureKind::Crashed);
        for words in [
            "memory allocation of 1099511627776 bytes failed",
            "CUDA_ERROR_OUT_OF_MEMORY: out of memory",
            "RuntimeError: CUDA error: out of memory",
        ] {
            assert_eq!(
                classify(aborted, &line(words), false).kind,
                FailureKind::OutOfMemory,
                "{words}"
            );
        }
        assert_eq!(
            classify(aborted, &line("the budget ran out"), false).kind,
            FailureKind::Crashed
        );
    }
}
