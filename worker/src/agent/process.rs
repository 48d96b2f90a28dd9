//! One device child as a process: started in a process group of its own, spoken to in lines, killed with
//! its whole group, and its end told apart.

use std::collections::VecDeque;
use std::os::unix::process::ExitStatusExt;
use std::process::{ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use espalier_proto::task::{Failure, FailureKind};
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::leftover::Mark;
use super::memory::control_group_file;
use super::options::{ChildOptions, DeviceOptions, HANG_TIMEOUT};
use crate::child::protocol::{Reply, Request};
use crate::{Error, Result};

/// Requests waiting for the child to read them: more than one attempt has.
const REQUESTS: usize = 16;
/// Log lines waiting to be passed on; more are dropped, and their numbers with them.
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

/// How long what a child has said may take to come when it no longer reads.
const LAST_REPLY_PATIENCE: Duration = Duration::from_secs(1);

/// Log lines passed on together.
const LINES_TOGETHER: usize = 100;

/// A line of a child's log, with its number among all that the child wrote, from 1.
pub type NumberedLine = (u64, String);

/// What a child says.
#[derive(Debug)]
pub enum FromChild {
    /// On its standard output.
    Reply(Reply),
    /// On its standard output, and not understood: whatever it was, it will not be said again.
    Garbled(String),
    /// On its standard error.
    Log(Vec<NumberedLine>),
}

/// A running child. Dropped without an end, it is killed with its group.
#[derive(Debug)]
pub struct Process {
    child: Child,
    group: Option<i32>,
    requests: mpsc::Sender<Vec<u8>>,
    writer: JoinHandle<()>,
    replies: Lines<BufReader<ChildStdout>>,
    log: mpsc::Receiver<NumberedLine>,
    tail: Arc<Mutex<VecDeque<String>>>,
    /// Lines written so far, dropped ones too.
    written: Arc<AtomicU64>,
    /// The number of the last line that was given out.
    passed: u64,
    log_reader: JoinHandle<()>,
    out_of_memory_kills: u64,
}

impl Process {
    /// Starts a child for a device, under a mark that whoever comes after a killed agent finds it by.
    ///
    /// # Errors
    /// When the program cannot be started.
    pub fn start(options: &ChildOptions, device: &DeviceOptions, mark: &Mark) -> Result<Self> {
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
            .args(device.arguments())
            .env("RAYON_NUM_THREADS", device.threads.to_string())
            .env(HANG_TIMEOUT, format!("{}ms", options.hang_timeout.as_millis()))
            .envs(mark.variables())
            .envs(device.variables())
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
        let input = child.stdin.take().ok_or_else(missing)?;
        let replies = BufReader::new(child.stdout.take().ok_or_else(missing)?).lines();
        let errors = child.stderr.take().ok_or_else(missing)?;
        let group = child.id().and_then(|id| i32::try_from(id).ok());
        let (sender, log) = mpsc::channel(LOG_LINES);
        let tail = Arc::new(Mutex::new(VecDeque::new()));
        let written = Arc::new(AtomicU64::new(0));
        let reader = LogReader {
            sender,
            tail: Arc::clone(&tail),
            written: Arc::clone(&written),
        };
        let log_reader = tokio::spawn(reader.read(errors));
        let (requests, lines) = mpsc::channel(REQUESTS);
        let writer = tokio::spawn(write_requests(input, lines));
        let out_of_memory_kills = out_of_memory_kills();
        Ok(Self {
            child,
            group,
            requests,
            writer,
            replies,
            log,
            tail,
            written,
            passed: 0,
            log_reader,
            out_of_memory_kills,
        })
    }

    /// Has a request written as soon as the child reads. Never waits for that: a child may be stopped, or hang
    /// before it reads, and is watched meanwhile.
    ///
    /// # Errors
    /// When the child reads no longer, or not what it was sent before.
    pub fn send(&mut self, request: &Request) -> Result<()> {
        let failed = |reason: String| Error::Child { reason };
        if let (Request::Run(_), Ok(mut tail)) = (request, self.tail.lock()) {
            // What it wrote of earlier attempts says nothing of how this one ends.
            tail.clear();
        }
        let mut line = serde_json::to_vec(request).map_err(|error| failed(error.to_string()))?;
        line.push(b'\n');
        self.requests
            .try_send(line)
            .map_err(|error| failed(format!("it does not read what it is sent: {error}")))
    }

    /// The next reply or lines of the log; none when the child has closed its output or its input. Safe to drop
    /// and call again.
    pub async fn next(&mut self) -> Option<FromChild> {
        tokio::select! {
            biased;
            line = self.replies.next_line() => understood(line.ok().flatten()),
            Some(first) = self.log.recv() => {
                let mut lines = vec![first];
                while lines.len() < LINES_TOGETHER && let Ok(line) = self.log.try_recv() {
                    lines.push(line);
                }
                self.passed = lines.last().map_or(self.passed, |(number, _)| *number);
                Some(FromChild::Log(lines))
            }
            () = self.requests.closed() => {
                let said = tokio::time::timeout(LAST_REPLY_PATIENCE, self.replies.next_line()).await;
                understood(said.ok()?.ok().flatten())
            }
        }
    }

    /// Lines of the log written so far, those among them that found no room too.
    pub fn lines_written(&self) -> u64 {
        self.written.load(Ordering::SeqCst)
    }

    /// The child's process group.
    pub fn group(&self) -> Option<i32> {
        self.group
    }

    /// Lines of the log that were written before what was said last and have not been passed on.
    pub async fn last_lines(&mut self) -> Vec<NumberedLine> {
        let mut lines = Vec::new();
        while lines.len() < LOG_LINES
            && let Ok(Some(line)) = tokio::time::timeout(LAST_LINES_PATIENCE, self.log.recv()).await
        {
            lines.push(line);
        }
        self.passed = lines.last().map_or(self.passed, |(number, _)| *number);
        lines
    }

    /// The number of the last line that was given out.
    pub fn lines_passed(&self) -> u64 {
        self.passed
    }

    /// Tells a child without work to end, and kills its process group when it does not.
    pub async fn end(mut self) {
        let ends = async {
            if self.send(&Request::Shutdown).is_ok() {
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
        if tokio::time::timeout(KILL_PATIENCE, self.child.wait())
            .await
            .is_ok()
        {
            // Its number may be another's from here on.
            self.group = None;
        }
        for task in [&mut self.log_reader, &mut self.writer] {
            task.abort();
            let _ = task.await;
        }
    }

    /// Waits for a child that closed its output, kills what is left of its group, and says why it ended and
    /// what it wrote last.
    pub async fn autopsy(mut self) -> (Failure, Vec<NumberedLine>) {
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
        self.writer.abort();
        if status.is_some() {
            self.group = None;
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

impl Drop for Process {
    fn drop(&mut self) {
        self.kill_group();
    }
}

/// A line as the child's protocol has it; none when there is no more.
fn understood(line: Option<String>) -> Option<FromChild> {
    line.map(|line| match serde_json::from_str(&line) {
        Ok(reply) => FromChild::Reply(reply),
        Err(error) => FromChild::Garbled(error.to_string()),
    })
}

/// Writes requests until there are no more or the child has closed its input.
async fn write_requests(mut input: ChildStdin, mut lines: mpsc::Receiver<Vec<u8>>) {
    while let Some(line) = lines.recv().await {
        if input.write_all(&line).await.is_err() || input.flush().await.is_err() {
            return;
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

/// Whether a line of a child's log, text or JSON, tells only what it does, which says nothing of its end.
fn is_news(line: &str) -> bool {
    let level = line.split_whitespace().nth(1).unwrap_or_default();
    ["TRACE", "DEBUG", "INFO"].iter().any(|news| {
        level == *news || line.starts_with('{') && line.contains(&format!("\"level\":\"{news}\""))
    })
}

/// Tells a crash from running out of memory: by an allocator's last words, or by the kernel's count of
/// processes it killed for memory when the child died of SIGKILL.
fn classify(status: ExitStatus, tail: &[String], killed_for_memory: bool) -> Failure {
    let allocator = tail.iter().any(|line| tells_of_no_memory(line));
    let by_kernel = status.signal() == Some(libc::SIGKILL) && killed_for_memory;
    let last = tail
        .iter()
        .rfind(|line| !is_news(line))
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
pub(crate) fn out_of_memory_kills() -> u64 {
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

/// Reads and numbers a child's log.
struct LogReader {
    sender: mpsc::Sender<NumberedLine>,
    tail: Arc<Mutex<VecDeque<String>>>,
    written: Arc<AtomicU64>,
}

impl LogReader {
    async fn read(self, errors: impl AsyncRead + Unpin) {
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
            if let Ok(mut tail) = self.tail.lock() {
                if tail.len() == TAIL_LINES {
                    tail.pop_front();
                }
                tail.push_back(line.clone());
            }
            let number = self.written.fetch_add(1, Ordering::SeqCst) + 1;
            // Lossy by design: a log never holds a child up. Its number tells that a line is missing.
            let _ = self.sender.try_send((number, line));
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::time::Instant;

    use espalier_proto::task::{ParentRef, Sort, TaskSpec};

    use super::*;
    use crate::child::protocol::Order;

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

    #[tokio::test]
    async fn an_end_is_not_explained_by_what_was_written_of_an_earlier_attempt() {
        for (of_the_next, expected) in [("", None), ("echo of the next >&2;", Some("of the next"))] {
            let script = format!("echo of an earlier one >&2; read -r line; {of_the_next} kill -9 $$");
            let options = ChildOptions {
                program: Some("/bin/sh".into()),
                arguments: vec!["-c".to_owned(), script],
                ..ChildOptions::default()
            };
            let device = DeviceOptions::cpu(1);
            let mark = Mark::new("nowhere", "worker", &device.id);
            let mut process = Process::start(&options, &device, &mark).unwrap();
            let began = Instant::now();
            while process.tail.lock().unwrap().is_empty() {
                assert!(began.elapsed() < Duration::from_secs(60), "it writes nothing");
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            process.send(&Request::Run(Box::new(order()))).unwrap();
            let (failure, lines) = process.autopsy().await;
            assert!(!failure.message.contains("earlier"), "{}", failure.message);
            let last = failure
                .message
                .split_once("its last line: ")
                .map(|(_, line)| line);
            assert_eq!(last, expected, "{}", failure.message);
            assert!(
                lines.iter().any(|(_, line)| line.contains("earlier")),
                "its log is whole: {lines:?}"
            );
        }
    }

    #[test]
    fn what_a_child_did_before_it_was_killed_is_no_cause() {
        let killed = ExitStatus::from_raw(libc::SIGKILL);
        let tail = |last: &str| vec!["fell over".to_owned(), last.to_owned()];
        let message = |last: &str| classify(killed, &tail(last), false).message;
        for news in [
            "2026-12-01T14:56:44.518128Z  INFO attempt{task=87}: a rank stands ready",
            r#"{"timestamp":"2026-12-01T14:56:44Z","level":"INFO","fields":{}}"#,
        ] {
            assert_eq!(
                message(news),
                "the device child ended of signal 9; its last line: fell over"
            );
        }
        let error = "2026-12-01T14:56:44.518128Z ERROR the disk is gone";
        assert!(message(error).ends_with(error));
    }

    fn order() -> Order {
        let parent = ParentRef {
            source: String::new(),
            fingerprint: String::new(),
            permutation: None,
        };
        let importance = Vec::new();
        let spec = TaskSpec::Sort(Sort { parent, importance });
        Order {
            attempt: 2,
            job: String::new(),
            task: 1,
            traceparent: String::new(),
            artifact_store: String::new(),
            artifact_store_id: String::new(),
            spec,
            gang: None,
        }
    }

    #[tokio::test]
    async fn a_line_that_finds_no_room_takes_its_number_with_it() {
        let (sender, mut log) = mpsc::channel(2);
        let written = Arc::new(AtomicU64::new(0));
        let reader = LogReader {
            sender,
            tail: Arc::default(),
            written: Arc::clone(&written),
        };
        let text: &[u8] = b"one\ntwo\n\nthree\nfour\n";
        reader.read(text).await;
        assert_eq!(log.recv().await, Some((1, "one".to_owned())));
        assert_eq!(log.recv().await, Some((2, "two".to_owned())));
        assert_eq!(log.recv().await, None);
        assert_eq!(written.load(Ordering::SeqCst), 4);
    }
}
