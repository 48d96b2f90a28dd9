//! A device child that runs errands: it speaks the real child's protocol and writes down what it does.

use std::io::{BufRead, Write};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use espalier_chaos::errand::{Ending, Errand};
use espalier_chaos::ledger::{What, note};
use espalier_worker::child::protocol::{Reply, Request};

fn main() -> Result<()> {
    for line in std::io::stdin().lock().lines() {
        let request: Request =
            serde_json::from_str(&line?).context("the agent's request is not understood")?;
        match request {
            Request::Run(order) => run(order.attempt, &Errand::from_spec(&order.spec)?)?,
            Request::Shutdown => return Ok(()),
            // An errand is short, and is over by the time this is read.
            _ => {}
        }
    }
    Ok(())
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

fn run(attempt: u64, errand: &Errand) -> Result<()> {
    let name = errand.name.clone();
    note(attempt, What::Began { errand: name.clone() })?;
    let span = Duration::from_millis(errand.millis);
    if errand.busy {
        spin(span);
    } else {
        sleep(span);
    }
    if errand.ending == Ending::Crash {
        std::process::abort();
    }
    note(attempt, What::Ended { errand: name })?;
    let reply = Reply::Output {
        attempt,
        output: Box::new(errand.output()),
    };
    let mut line = serde_json::to_vec(&reply)?;
    line.push(b'\n');
    let mut output = std::io::stdout().lock();
    output.write_all(&line)?;
    Ok(output.flush()?)
}
