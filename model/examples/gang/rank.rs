//! One rank: it finds the others, trains its share and says how it goes.

use std::io::{BufRead, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use espalier_arch::Architecture;
use espalier_model::StageWeights;
use espalier_model::collective::Gang;
use espalier_model::collective::mesh::{self, Mesh};
use espalier_model::ops::Operations;
use espalier_model::ops::cpu::CpuOperations;
use espalier_model::ops::cuda::{self, CudaOperations};
use espalier_model::train::{
    Checkpoint, Grid, Hyperparameters, MicroBatch, Objective, SavedFile, Step, Trainer, Writing, split,
};

use crate::plan::{Kind, Line, Plan};
use crate::{Result, weights};

/// No call is waited for longer.
const CALL: Duration = Duration::from_secs(120);

fn say(line: &Line) -> Result<()> {
    println!("{}", serde_json::to_string(line)?);
    Ok(std::io::stdout().flush()?)
}

/// Works as rank `number` of `plan`, and says what came of it.
pub(crate) fn run(plan: &str, number: &str) -> Result<()> {
    let (plan, number): (Plan, usize) = (serde_json::from_str(plan)?, number.parse()?);
    let worked = work(&plan, number);
    match &worked {
        Ok(done) => say(done),
        Err(failure) => say(&Line::Failed(failure.to_string())),
    }
}

fn work(plan: &Plan, number: usize) -> Result<Line> {
    let mesh = match plan.ranks() {
        1 => None,
        _ => Some(Arc::new(find_others(plan, number)?)),
    };
    let (operations, device): (Arc<dyn Operations>, Option<Arc<CudaOperations>>) = match plan.kind {
        Kind::Cpu => (Arc::new(CpuOperations::new()), None),
        Kind::Cuda => {
            let options = cuda::Options {
                deadline: CALL + CALL,
                ..cuda::Options::default()
            };
            // All on one GPU, slowly, where NCCL is told that it may be so (2.30 and later).
            let index = match std::env::var("GANG_DEVICE") {
                Ok(index) => index.parse()?,
                Err(_) => u32::try_from(number)?,
            };
            let device = Arc::new(CudaOperations::open(index, options)?);
            (device.clone(), Some(device))
        }
    };
    let gang = mesh.as_ref().map(|mesh| operations.gang(mesh.clone()));
    let gang = gang.transpose()?;
    Rank {
        plan,
        number,
        operations,
        gang: gang.as_deref(),
    }
    .train()?;
    let usage = device.map(|device| device.device().usage());
    drop(gang);
    mesh.map_or(Ok(()), |mesh| mesh.close())?;
    Ok(Line::Done {
        in_use: usage.map_or(0, |usage| usage.in_use_peak),
        held: usage.map_or(0, |usage| usage.held_peak),
    })
}

/// Says where this rank listens, hears where all do, and connects to each.
fn find_others(plan: &Plan, number: usize) -> Result<Mesh> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    say(&Line::Listening(listener.local_addr()?.to_string()))?;
    let mut answer = String::new();
    std::io::stdin().lock().read_line(&mut answer)?;
    let place = mesh::Place {
        rank: number,
        listener,
        addresses: serde_json::from_str(&answer)?,
        token: "of this check".to_owned(),
        generation: plan.generation,
    };
    let options = mesh::Options {
        forming: CALL,
        silence: Duration::from_millis(plan.silence_ms),
        call: CALL,
    };
    Ok(Mesh::form(place, options)?)
}

struct Rank<'a> {
    plan: &'a Plan,
    number: usize,
    operations: Arc<dyn Operations>,
    gang: Option<&'a dyn Gang>,
}

impl Rank<'_> {
    fn train(&self) -> Result<()> {
        let plan = self.plan;
        let (mut trainer, vocabulary) = self.trainer()?;
        let replica = self.number % plan.replicas;
        let mut saving: Option<(PathBuf, u32, Writing)> = None;
        let mut unread: Option<(u32, Step)> = None;
        let mut last = Instant::now();
        for step in trainer.steps()..plan.steps {
            let texts: Vec<Vec<u32>> = (0..plan.micro_batches)
                .map(|index| plan.text(step, index, vocabulary))
                .collect();
            let objective = match plan.parent {
                Some(_) => Objective::FromParent,
                None => Objective::NextToken,
            };
            let batch = |index: usize| MicroBatch {
                tokens: texts.get(index).map_or(&[], Vec::as_slice),
                layout: plan.layout(),
                objective,
            };
            let predictions = (0..plan.micro_batches)
                .map(|index| batch(index).predictions())
                .sum();
            let own: Vec<MicroBatch<'_>> = plan.share(step, replica).into_iter().map(batch).collect();
            trainer.accumulate_all(&own, predictions)?;
            self.fall(step)?;
            let hyperparameters = Hyperparameters {
                learning_rate: plan.learning_rate,
                weight_decay: 0.1,
                ..Hyperparameters::default()
            };
            let updated = trainer.update(&hyperparameters, predictions)?;
            // Read when the next one is on its way.
            if let Some((step, before)) = unread.replace((step, updated)) {
                report(step, before, &mut last)?;
            }
            if let Some(saving) = saving.take() {
                self.record(saving)?;
            }
            if let Some((home, every)) = &plan.home
                && (step + 1).is_multiple_of(*every)
            {
                if let Some((step, before)) = unread.take() {
                    report(step, before, &mut last)?;
                }
                let directory = home.join(format!("step-{}", step + 1));
                std::fs::create_dir_all(&directory)?;
                let writing = trainer.save_beside(directory.join(format!("rank-{}", self.number)))?;
                saving = Some((directory, step + 1, writing));
            }
        }
        if let Some((step, before)) = unread {
            report(step, before, &mut last)?;
        }
        saving.map_or(Ok(()), |saving| self.record(saving))
    }

    /// Ends or stops this process, if the plan says so of this rank and step.
    fn fall(&self, step: u32) -> Result<()> {
        let Some(fall) = &self.plan.fall else {
            return Ok(());
        };
        if (fall.rank, fall.step) != (self.number, step) {
            return Ok(());
        }
        say(&Line::Falls)?;
        let own = std::process::id().to_string();
        let sent = Command::new("kill")
            .args([format!("-{}", fall.signal), own])
            .status()?;
        Err(format!("it sent itself {} ({sent}) and goes on", fall.signal).into())
    }

    /// A trainer of fresh weights or of a checkpoint's, and the size of the vocabulary.
    fn trainer(&self) -> Result<(Trainer, usize)> {
        let plan = self.plan;
        let grid = self
            .gang
            .map(|gang| Grid::form(gang, plan.layers()))
            .transpose()?;
        let stage = grid.as_ref().map_or(0, Grid::stage);
        let (student, parent) = plan.architectures()?;
        let blocks = |architecture: &Architecture| -> Result<std::ops::Range<usize>> {
            let stages = split::cut(architecture, plan.stages, plan.tokens)?;
            Ok(stages.into_iter().nth(stage).ok_or("no such stage")?)
        };
        let make = |architecture: &Architecture, seed| -> Result<StageWeights> {
            let deviation = if plan.kind == Kind::Cpu { 0.1 } else { 0.02 };
            let operations = self.operations.as_ref();
            Ok(weights::random(
                operations,
                architecture,
                blocks(architecture)?,
                seed,
                deviation,
            )?)
        };
        let operations = Arc::clone(&self.operations);
        let trainer = match (&plan.resume, grid) {
            (Some(record), grid) => {
                let parts = Checkpoint::open(record)?;
                let range = blocks(parts.architecture())?;
                Trainer::resume(operations, &parts, range, grid, usize::MAX)?
            }
            (None, Some(grid)) => Trainer::join(operations, &make(&student, 1)?, grid, usize::MAX)?,
            (None, None) => Trainer::new(operations, &make(&student, 1)?.into_model()?, usize::MAX)?,
        };
        let trainer = match &parent {
            Some(parent) => trainer.with_parent(make(parent, 2)?)?,
            None => trainer,
        };
        Ok((trainer, student.vocab_size))
    }

    /// Once every rank's file is there, the first writes the record that names them.
    fn record(&self, (directory, steps, writing): (PathBuf, u32, Writing)) -> Result<()> {
        let own = SavedFile::of(&writing.finish()?)?;
        let files: Vec<SavedFile> = match self.gang {
            None => vec![own],
            Some(gang) => {
                let all = gang.exchange(&serde_json::to_vec(&own)?)?;
                let read = |bytes: &Vec<u8>| serde_json::from_slice(bytes);
                all.iter().map(read).collect::<std::result::Result<_, _>>()?
            }
        };
        if self.number == 0 {
            let record = directory.join("checkpoint.json");
            Checkpoint { steps, files }.write(Path::new(&record))?;
            say(&Line::Saved(record))?;
        }
        Ok(())
    }
}

fn report(step: u32, before: Step, last: &mut Instant) -> Result<()> {
    let loss = before.read()?.loss;
    let seconds = last.elapsed().as_secs_f64();
    *last = Instant::now();
    say(&Line::Step { step, loss, seconds })
}
