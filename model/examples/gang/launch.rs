//! Starts a gang's ranks as processes and listens to them.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::Result;
use crate::plan::{Line, Plan};

/// What a gang may take in all.
const PATIENCE: Duration = Duration::from_secs(300);

/// A gang at work.
pub(crate) struct Running {
    children: Vec<Child>,
    readers: Vec<JoinHandle<()>>,
    lines: Receiver<(usize, Line)>,
}

/// What a gang has said.
#[derive(Debug, Default, Clone)]
pub(crate) struct Told {
    /// Of each step: every rank reads the same.
    pub(crate) losses: Vec<(u32, f64)>,
    /// Seconds of each step, on the first rank.
    pub(crate) seconds: Vec<f64>,
    /// The records of its checkpoints.
    pub(crate) records: Vec<std::path::PathBuf>,
    /// Bytes on each rank's device: in tensors, and taken.
    pub(crate) memory: Vec<(u64, u64)>,
    /// Which ranks failed, and how.
    pub(crate) failures: Vec<(usize, String)>,
    /// When a rank fell.
    pub(crate) fell: Option<Instant>,
}

impl Running {
    pub(crate) fn start(plan: &Plan) -> Result<Self> {
        let program = std::env::current_exe()?;
        let text = serde_json::to_string(plan)?;
        let (sender, lines) = mpsc::sync_channel(1024);
        let mut running = Self {
            children: Vec::new(),
            readers: Vec::new(),
            lines,
        };
        let mut inputs = Vec::new();
        for number in 0..plan.ranks() {
            let mut child = Command::new(&program)
                .args(["rank", &text, &number.to_string()])
                // Each rank has lanes enough for replicas and stages.
                .env("CUDA_DEVICE_MAX_CONNECTIONS", "32")
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()?;
            inputs.push(child.stdin.take());
            let output = child.stdout.take().ok_or("a rank without an output")?;
            let sender = sender.clone();
            running.readers.push(std::thread::spawn(move || {
                for line in BufReader::new(output).lines().map_while(std::result::Result::ok) {
                    // NCCL writes there too, where NCCL_DEBUG is set.
                    let Ok(said) = serde_json::from_str(&line) else {
                        eprintln!("rank {number}: {line}");
                        continue;
                    };
                    if sender.send((number, said)).is_err() {
                        break;
                    }
                }
            }));
            running.children.push(child);
        }
        drop(sender);
        if plan.ranks() > 1 {
            let mut addresses = vec![String::new(); plan.ranks()];
            for _ in 0..plan.ranks() {
                match running.lines.recv_timeout(PATIENCE)? {
                    (number, Line::Listening(address)) => addresses[number] = address,
                    (number, other) => return Err(format!("rank {number}: {other:?}").into()),
                }
            }
            let addresses = serde_json::to_string(&addresses)?;
            for input in inputs.iter_mut().flatten() {
                writeln!(input, "{addresses}")?;
            }
        }
        Ok(running)
    }

    /// Listens until every rank has ended, or `enough`.
    pub(crate) fn listen(&mut self, mut enough: impl FnMut(&Told) -> bool) -> Result<Told> {
        let mut told = Told::default();
        let begun = Instant::now();
        while !enough(&told) {
            let left = PATIENCE.saturating_sub(begun.elapsed());
            let (number, line) = match self.lines.recv_timeout(left) {
                Ok(said) => said,
                Err(mpsc::RecvTimeoutError::Disconnected) => break,
                Err(mpsc::RecvTimeoutError::Timeout) => return Err("a gang took too long".into()),
            };
            match line {
                Line::Listening(_) => {}
                Line::Step { step, loss, seconds } => {
                    match told.losses.iter().find(|(known, _)| *known == step) {
                        None => told.losses.push((step, loss)),
                        Some((_, known)) if known.to_bits() == loss.to_bits() => {}
                        Some((_, known)) => {
                            let how = format!("it read {loss} in step {step}, another {known}");
                            told.failures.push((number, how));
                        }
                    }
                    if number == 0 {
                        told.seconds.push(seconds);
                    }
                }
                Line::Saved(record) => told.records.push(record),
                Line::Falls => told.fell = Some(Instant::now()),
                Line::Done { in_use, held } => told.memory.push((in_use, held)),
                Line::Failed(how) => told.failures.push((number, how)),
            }
        }
        Ok(told)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        for child in &mut self.children {
            // It may have ended by itself.
            let _ = child.kill();
            let _ = child.wait();
        }
        for reader in self.readers.drain(..) {
            let _ = reader.join();
        }
    }
}

/// A gang from its start to its end, none of whose ranks fails.
pub(crate) fn whole(plan: &Plan) -> Result<Told> {
    let told = Running::start(plan)?.listen(|_| false)?;
    if let Some((number, how)) = told.failures.first() {
        return Err(format!("rank {number} failed: {how}").into());
    }
    if told.memory.len() != plan.ranks() {
        return Err(format!("{} of {} ranks ended well", told.memory.len(), plan.ranks()).into());
    }
    Ok(told)
}

/// The largest relative difference between losses of the same steps, and where; none where a step is missing.
pub(crate) fn apart(found: &[(u32, f64)], expected: &[(u32, f64)]) -> Option<(f64, u32)> {
    let mut worst = (0.0, 0);
    for (step, loss) in expected {
        let (_, other) = found.iter().find(|(found, _)| found == step)?;
        let difference = (other / loss - 1.0).abs();
        if difference.is_nan() || difference > worst.0 {
            worst = (difference, *step);
        }
    }
    Some(worst)
}
