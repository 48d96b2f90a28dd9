//! A device child that runs errands: it speaks the real child's protocol and writes down what it does.

use std::io::{BufRead, Write};
use std::os::unix::process::parent_id;
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use espalier_chaos::errand::{Ending, Errand};
use espalier_chaos::ledger::{What, note};
use espalier_worker::child::protocol::{Reply, Request};

/// How long it goes on without its agent at the most.
const STUBBORN: Duration = Duration::from_secs(60);

fn main() -> Result<()> {
    let (sender, requests) = sync_channel(4);
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines() {
            let Ok(line) = line else { return };
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    while let Ok(line) = requests.recv() {
        match understood(&line)? {
            Request::Run(order) => run(order.attempt, &Errand::from_spec(&order.spec)?, &requests)?,
            Request::Shutdown => return Ok(()),
            // Of an errand that is over by the time this is read.
            _ => {}
        }
    }
    Ok(())
}

fn understood(line: &str) -> Result<Request> {
    serde_json::from_str(line).context("the agent's request is not understood")
}

/// Keeps every processor busy for a while.
fn spin(span: Duration) {
    let end = Instant::now() + span;
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| while Instant::now() < end {});
        }
    });
}

/// Waits for a while; whether the attempt was told to stop meanwhile.
fn is_stopped_within(span: Duration, attempt: u64, requests: &Receiver<String>) -> Result<bool> {
    let end = Instant::now() + span;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        match requests.recv_timeout(left) {
            Ok(line) => match understood(&line)? {
                Request::Cancel { attempt: of, .. } if of == attempt => return Ok(true),
                _ => {}
            },
            Err(RecvTimeoutError::Timeout) => return Ok(false),
            Err(RecvTimeoutError::Disconnected) => {
                // Its agent is gone: a stubborn child, but none that outlives the tests for long.
                sleep(left.min(STUBBORN));
                return Ok(false);
            }
        }
    }
}

fn run(attempt: u64, errand: &Errand, requests: &Receiver<String>) -> Result<()> {
    let name = errand.name.clone();
    note(parent_id(), attempt, What::Began { errand: name.clone() })?;
    if errand.brings_process {
        // Nobody here waits for it: it is in this child's process group.
        Command::new("sleep")
            .arg("120")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("cannot start a process")?;
    }
    let span = Duration::from_millis(errand.millis);
    if errand.busy {
        spin(span);
    } else if is_stopped_within(span, attempt, requests)? {
        return say(&Reply::Stopped { attempt });
    }
    if errand.ending == Ending::Crash {
        std::process::abort();
    }
    note(parent_id(), attempt, What::Ended { errand: name })?;
    say(&Reply::Output {
        attempt,
        output: Box::new(errand.output()),
    })
}

fn say(reply: &Reply) -> Result<()> {
    let mut line = serde_json::to_vec(reply)?;
    line.push(b'\n');
    let mut output = std::io::stdout().lock();
    output.write_all(&line)?;
    Ok(output.flush()?)
}
