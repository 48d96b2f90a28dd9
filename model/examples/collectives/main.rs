//! Ranks as processes, one a GPU, or on the CPU: every collective call against float64, how fast all-reduce is, and
//! what a rank that is killed or stopped costs the others. `make check-gpu-gang` runs it on two GPUs.
//!
//! `collectives [--device cuda|cuda:0|cpu] [--ranks N] [--silence MS] [--limit SECONDS] [--mib N]`: starts the ranks
//! itself, and tells them by their standard input which gang they are, as an agent would. With `cuda:0` all share that
//! GPU, which NCCL from 2.30 on does where NCCL_MULTI_RANK_GPU_ENABLE=1 (slowly: their kernels take turns); `--limit` is
//! how soon the others must know of a rank that is gone, unless it is 2 s of one that was killed and one and a half times
//! the silence of one that was stopped; `--mib` is for what all-reduce moves. Prints a line for what each rank found,
//! figures, and last whether all held; exit codes: 0 all of it, 1 not all, 2 a rank did not do what it was told.
#![allow(clippy::print_stdout)] // the figures are the point

mod checks;
mod rank;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, ExitCode, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// How long a rank may take for what it is told.
const PATIENCE: Duration = Duration::from_secs(180);

/// What went wrong, in words.
type Failure = Box<dyn std::error::Error + Send + Sync>;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [mode, number, device, silence] = arguments.as_slice()
        && mode == "rank"
    {
        return match rank::run(number, device, silence) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                println!("failed {error}");
                ExitCode::from(2)
            }
        };
    }
    match launch(&arguments) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            println!("collectives: failed: {error}");
            ExitCode::from(2)
        }
    }
}

/// How the ranks are started.
struct Settings {
    device: String,
    ranks: usize,
    silence: u64,
    limit: Option<u64>,
    mib: usize,
}

impl Settings {
    fn of(arguments: &[String]) -> Result<Self, Failure> {
        let mut settings = Self {
            device: "cuda".to_owned(),
            ranks: 2,
            silence: 5000,
            limit: None,
            mib: 256,
        };
        for pair in arguments.chunks(2) {
            match pair {
                [name, value] if name == "--device" => settings.device.clone_from(value),
                [name, value] if name == "--ranks" => settings.ranks = value.parse()?,
                [name, value] if name == "--silence" => settings.silence = value.parse()?,
                [name, value] if name == "--limit" => settings.limit = Some(value.parse()?),
                [name, value] if name == "--mib" => settings.mib = value.parse()?,
                other => return Err(format!("unknown arguments {other:?}").into()),
            }
        }
        Ok(settings)
    }
}

/// A rank's process, and what it has said.
struct Rank {
    number: usize,
    process: Child,
    input: Option<ChildStdin>,
    lines: Receiver<(Instant, String)>,
    address: String,
}

impl Rank {
    fn start(settings: &Settings, number: usize) -> Result<Self, Failure> {
        let mut process = Command::new(std::env::current_exe()?)
            .args([
                "rank",
                &number.to_string(),
                &settings.device,
                &settings.silence.to_string(),
            ])
            // A rank has more streams than the driver gives queues by default.
            .env("CUDA_DEVICE_MAX_CONNECTIONS", "32")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let output = process.stdout.take().ok_or("a rank without an output")?;
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if sender.send((Instant::now(), line)).is_err() {
                    return;
                }
            }
        });
        Ok(Self {
            number,
            input: process.stdin.take(),
            process,
            lines,
            address: String::new(),
        })
    }

    fn tell(&mut self, line: &str) -> Result<(), Failure> {
        let input = self.input.as_mut().ok_or("a rank without an input")?;
        Ok(writeln!(input, "{line}")?)
    }

    /// The next line that begins with `word`, without it, and when it came; others are shown.
    fn hear(&self, word: &str) -> Result<(Instant, String), Failure> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let (when, line) = self
                .lines
                .recv_timeout(left)
                .map_err(|_| format!("rank {} did not say {word:?}", self.number))?;
            if let Some(rest) = line.strip_prefix(word) {
                return Ok((when, rest.trim().to_owned()));
            }
            println!("rank {}: {line}", self.number);
        }
    }

    fn signal(&self, name: &str) -> Result<(), Failure> {
        let status = Command::new("kill")
            .args([name, &self.process.id().to_string()])
            .status()?;
        if status.success() {
            return Ok(());
        }
        Err(format!("kill {name} failed").into())
    }

    /// Waits for the process's end.
    fn end(&mut self) -> Result<(), Failure> {
        self.input = None;
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            if let Some(status) = self.process.try_wait()? {
                for (_, line) in self.lines.try_iter() {
                    println!("rank {}: {line}", self.number);
                }
                return status
                    .success()
                    .then_some(())
                    .ok_or_else(|| format!("rank {} ended with {status}", self.number).into());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Err(format!("rank {} does not end", self.number).into())
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Tells all ranks which gang they are; gives how long they took to come together.
fn release(ranks: &mut [Rank], generation: u64) -> Result<Duration, Failure> {
    for rank in ranks.iter_mut() {
        rank.address = rank.hear("address")?.1;
    }
    let addresses: Vec<String> = ranks.iter().map(|rank| rank.address.clone()).collect();
    let begun = Instant::now();
    for rank in ranks.iter_mut() {
        rank.tell(&format!("release {generation} {}", addresses.join(" ")))?;
    }
    for rank in ranks.iter() {
        rank.hear("formed")?;
    }
    Ok(begun.elapsed())
}

/// Lets all ranks do `work` and waits for what they say of it.
fn all_do(ranks: &mut [Rank], work: &str, word: &str) -> Result<Vec<String>, Failure> {
    for rank in ranks.iter_mut() {
        rank.tell(work)?;
    }
    ranks.iter().map(|rank| Ok(rank.hear(word)?.1)).collect()
}

fn launch(arguments: &[String]) -> Result<bool, Failure> {
    let settings = Settings::of(arguments)?;
    let last = settings
        .ranks
        .checked_sub(1)
        .filter(|&last| last > 0)
        .ok_or("at least 2 ranks")?;
    let mut ranks = (0..settings.ranks)
        .map(|number| Rank::start(&settings, number))
        .collect::<Result<Vec<_>, _>>()?;
    let took = release(&mut ranks, 1)?;
    println!(
        "{} ranks came together in {:.2} s",
        settings.ranks,
        took.as_secs_f64()
    );
    let mut holds = checked(&mut ranks, "check all")?;
    for line in all_do(&mut ranks, &format!("speed {}", settings.mib), "figures")?
        .first()
        .into_iter()
    {
        println!("{line}");
    }
    let silence = Duration::from_millis(settings.silence);
    let mut stopped = Vec::new();
    for (generation, how, limit) in [
        (2, "killed", Duration::from_secs(2)),
        (3, "stopped", silence + silence / 2),
    ] {
        let limit = settings.limit.map_or(limit, Duration::from_secs);
        all_do(&mut ranks, "loop", "looping")?;
        std::thread::sleep(Duration::from_millis(500));
        let gone = ranks.pop().ok_or("no rank is left")?;
        let begun = Instant::now();
        gone.signal(if how == "killed" { "-KILL" } else { "-STOP" })?;
        for rank in &ranks {
            let (when, error) = rank.hear("lost")?;
            let took = when.duration_since(begun);
            println!(
                "rank {last} {how}: rank {} knew after {:.2} s: {error}",
                rank.number,
                took.as_secs_f64()
            );
            holds &= took < limit && error.contains(&format!("rank {last} "));
        }
        ranks.push(Rank::start(&settings, last)?);
        release(&mut ranks, generation)?;
        holds &= checked(&mut ranks, "check some")?;
        println!(
            "rank {last} {how}: a gang with another in its place was at work {:.2} s later",
            begun.elapsed().as_secs_f64()
        );
        stopped.extend((how == "stopped").then_some(gone));
    }
    all_do(&mut ranks, "leave", "left")?;
    for rank in &mut ranks {
        rank.end()?;
    }
    for mut rank in stopped {
        rank.signal("-CONT")?;
        let (_, error) = rank.hear("lost")?;
        println!("rank {last} woke up: {error}");
        holds &= error.contains("this process stood still") || error.contains("given this one up");
        rank.end()?;
    }
    println!("collectives: {}", if holds { "all held" } else { "NOT all held" });
    Ok(holds)
}

/// Whether every rank found everything right.
fn checked(ranks: &mut [Rank], work: &str) -> Result<bool, Failure> {
    let said = all_do(ranks, work, "checked")?;
    for (rank, line) in said.iter().enumerate() {
        println!("rank {rank}: {line}");
    }
    Ok(said.iter().all(|line| line.ends_with(", 0 wrong")))
}
