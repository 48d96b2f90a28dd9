//! Our side of `make check-cpu-speed`, `make check-gpu-train` and `make check-gpu-forward`: a model that does on
//! request what it is timed for.
//!
//! `espalier-bench CONFIG [DEVICE [PARENT]]` (cpu unless given) reads one request a line and answers with a line of
//! numbers, seconds unless it says otherwise. CONFIG is a file, and then weights are random, or the directory of a
//! checkpoint; PARENT is such a directory. What is compared, how often and with whom is the affair of `peer/`.
//!
//! - `forward SEQUENCES TOKENS`: a forward with every position's logits.
//! - `train SEQUENCES TOKENS`: forward and backward. `adamw`: the update.
//! - `step SEQUENCES TOKENS STEPS`: one of so many whole steps, each queued before the last was read; and what
//!   queueing the first took. `distil ..`: the same, taught by the parent, whose forward is part of the step.
//! - `score SEQUENCES TOKENS TIMES`: one of so many forwards with a loss for every token, brought to the host.
//! - `decode SEQUENCES CACHED STEPS`: one of so many steps of a token of each sequence, the first after CACHED.
//! - `first SEQUENCES TOKENS` and `first-distil ..`: mean loss and gradient norm before the next update, which
//!   changes nothing.
//! - `memory`: bytes of tensors at most, and bytes taken from the device at most, since it was last asked (0 on the
//!   host).

mod teaching;

use std::io::{BufRead, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use espalier_arch::Architecture;
use espalier_model::checkpoint::Parent;
use espalier_model::decode::Session;
use espalier_model::ops::cpu::CpuOperations;
use espalier_model::ops::cuda::{CudaOperations, Options};
use espalier_model::ops::{Head, Layout, Operations};
use espalier_model::runner::Runner;
use espalier_model::train::{Hyperparameters, Step, Trainer};
use espalier_model::{Device, Model};

use teaching::{Kind, Lesson};

/// Rows whose logits exist at once.
const LOGIT_ROWS: usize = 128;

struct Bench {
    operations: Arc<dyn Operations>,
    cuda: Option<Arc<CudaOperations>>,
    runner: Runner,
    /// Made when it is first asked for: decoding needs none of its memory.
    trainer: Option<Trainer>,
    /// Where the parent lies, and the parent once it was asked for.
    parent: (Option<String>, Option<Runner>),
    /// The last one that decoded, with its sequences and the tokens that each began with.
    session: Option<(Session, usize, usize)>,
    vocabulary: usize,
}

/// The model of a config's shape with random weights, or the one in a directory.
fn model(operations: &dyn Operations, config: &str) -> Result<Model> {
    if Path::new(config).is_dir() {
        return Ok(Parent::open(config)?.load(operations)?);
    }
    let text = std::fs::read_to_string(config).with_context(|| config.to_owned())?;
    let architecture = Architecture::from_config(&serde_json::from_str(&text)?)?;
    Ok(Model::random(&architecture, 1, operations)?)
}

impl Bench {
    fn new(config: &str, device: Device, parent: Option<String>) -> Result<Self> {
        let cuda = match device {
            Device::Cpu => None,
            Device::Cuda(index) => {
                // Shapes are few and each is met thousands of times.
                let options = Options {
                    tune: true,
                    ..Options::default()
                };
                Some(Arc::new(CudaOperations::open(index, options)?))
            }
        };
        let operations: Arc<dyn Operations> = match &cuda {
            Some(cuda) => cuda.clone(),
            None => Arc::new(CpuOperations::new()),
        };
        let model = model(operations.as_ref(), config)?;
        operations.prepare(&model.architecture)?;
        let vocabulary = model.architecture.vocab_size;
        Ok(Self {
            runner: Runner::new(Arc::clone(&operations), Arc::new(model)),
            operations,
            cuda,
            trainer: None,
            parent: (parent, None),
            session: None,
            vocabulary,
        })
    }

    /// Any tokens do: time does not depend on them.
    fn tokens(&self, count: usize) -> Result<Vec<u32>> {
        (0..count)
            .map(|index| Ok(u32::try_from((index * 7919 + 13) % self.vocabulary)?))
            .collect()
    }

    /// The trainer, and what it is taught.
    fn lesson(&mut self, layout: Layout, kind: Kind) -> Result<(&mut Trainer, Lesson<'_>)> {
        let tokens = self.tokens(layout.rows())?;
        let parent = match (kind, &mut self.parent) {
            (Kind::NextToken, _) => None,
            (Kind::Distil, (None, _)) => bail!("no parent was given"),
            (Kind::Distil, (Some(directory), loaded)) => {
                if loaded.is_none() {
                    let parent = model(self.operations.as_ref(), directory)?;
                    *loaded = Some(Runner::new(Arc::clone(&self.operations), Arc::new(parent)));
                }
                loaded.as_ref()
            }
        };
        let trainer = match &mut self.trainer {
            Some(trainer) => trainer,
            none => {
                let student = self.runner.model();
                none.insert(Trainer::new(Arc::clone(&self.operations), student, usize::MAX)?)
            }
        };
        Ok((trainer, Lesson::new(tokens, layout, parent)))
    }

    /// Seconds of one forward, the logits of every position included.
    fn forward(&self, layout: Layout) -> Result<f64> {
        let tokens = self.tokens(layout.rows())?;
        let start = Instant::now();
        let normed = self.runner.hidden_states(&tokens, layout)?;
        for first in (0..normed.rows()).step_by(LOGIT_ROWS) {
            let hidden = normed.narrow_rows(first, LOGIT_ROWS.min(normed.rows() - first))?;
            let weight = self.runner.model().head();
            std::hint::black_box(self.operations.logits(Head {
                hidden: &hidden,
                weight,
            })?);
        }
        Ok(start.elapsed().as_secs_f64())
    }

    /// Seconds of one forward and backward with cross-entropy over every parameter.
    fn train(&mut self, layout: Layout) -> Result<f64> {
        let (trainer, lesson) = self.lesson(layout, Kind::NextToken)?;
        let start = Instant::now();
        lesson.accumulate(trainer)?;
        std::hint::black_box(trainer.summed_loss()?);
        Ok(start.elapsed().as_secs_f64())
    }

    /// Seconds of one AdamW step over every parameter, the gradient's norm included.
    fn adamw(&mut self) -> Result<f64> {
        let trainer = self.trainer.as_mut().context("adamw before train")?;
        let start = Instant::now();
        trainer.update(&Hyperparameters::default(), 1)?.read()?;
        Ok(start.elapsed().as_secs_f64())
    }

    /// Seconds of one of `steps` whole steps, one after the other, each read when the next is on its way; and those
    /// until the first was queued, the host's own part of a step.
    fn steps(&mut self, layout: Layout, steps: u32, kind: Kind) -> Result<[f64; 2]> {
        let (trainer, lesson) = self.lesson(layout, kind)?;
        let start = Instant::now();
        let mut before: Option<Step> = None;
        let mut queued = 0.0;
        for index in 0..steps {
            lesson.accumulate(trainer)?;
            let step = trainer.update(&Hyperparameters::default(), lesson.predictions())?;
            if index == 0 {
                queued = start.elapsed().as_secs_f64();
            }
            if let Some(before) = before.replace(step) {
                before.read()?;
            }
        }
        before.map(Step::read).transpose()?;
        Ok([start.elapsed().as_secs_f64() / f64::from(steps.max(1)), queued])
    }

    /// Seconds of one of `times` forwards with the loss of every token.
    fn score(&self, layout: Layout, times: u32) -> Result<f64> {
        let tokens = self.tokens(layout.rows())?;
        let start = Instant::now();
        for _ in 0..times {
            std::hint::black_box(self.runner.next_token_losses(&tokens, layout)?);
        }
        Ok(start.elapsed().as_secs_f64() / f64::from(times.max(1)))
    }

    /// Seconds of one of `steps` steps that take the likeliest token of each sequence, `cached` tokens before.
    fn decode(&mut self, sequences: usize, cached: usize, steps: usize) -> Result<f64> {
        if !matches!(self.session, Some((_, of, after)) if (of, after) == (sequences, cached)) {
            self.session = None;
            let (operations, model) = (Arc::clone(&self.operations), Arc::clone(self.runner.model()));
            let session = Session::new(operations, model, sequences, cached + steps)?;
            self.session = Some((session, sequences, cached));
        }
        let prompt = self.tokens(sequences * cached)?;
        let (session, ..) = self.session.as_mut().context("the session made above")?;
        session.clear();
        let logits = session.prefill(&prompt)?;
        let next = session.likeliest(&logits)?;
        drop(logits);
        let start = Instant::now();
        session.go_on(&next, steps, |_| false)?;
        Ok(start.elapsed().as_secs_f64() / steps.max(1) as f64)
    }

    /// The mean loss of the weights as they are, and the norm of its gradient.
    fn first(&mut self, layout: Layout, kind: Kind) -> Result<[f64; 2]> {
        let (trainer, lesson) = self.lesson(layout, kind)?;
        let still = Hyperparameters {
            learning_rate: 0.0,
            ..Hyperparameters::default()
        };
        lesson.accumulate(trainer)?;
        let report = trainer.update(&still, lesson.predictions())?.read()?;
        Ok([report.loss, report.gradient_norm])
    }

    /// Bytes at most since this was last asked: of tensors, and taken from the device.
    fn memory(&self) -> Result<[f64; 2]> {
        let Some(cuda) = &self.cuda else {
            return Ok([0.0; 2]);
        };
        let usage = cuda.device().usage();
        cuda.device().trim()?;
        cuda.device().reset_peaks();
        Ok([usage.in_use_peak as f64, usage.held_peak as f64])
    }

    fn answer(&mut self, request: &str) -> Result<Vec<f64>> {
        let words: Vec<&str> = request.split_whitespace().collect();
        let layout = |sequences: &str, tokens: &str| -> Result<Layout> {
            Ok(Layout {
                sequences: sequences.parse()?,
                tokens: tokens.parse()?,
            })
        };
        Ok(match words.as_slice() {
            ["forward", sequences, tokens] => vec![self.forward(layout(sequences, tokens)?)?],
            ["train", sequences, tokens] => vec![self.train(layout(sequences, tokens)?)?],
            ["adamw"] => vec![self.adamw()?],
            [kind @ ("step" | "distil"), sequences, tokens, steps] => {
                let layout = layout(sequences, tokens)?;
                self.steps(layout, steps.parse()?, Kind::of(kind))?.to_vec()
            }
            ["score", sequences, tokens, times] => {
                vec![self.score(layout(sequences, tokens)?, times.parse()?)?]
            }
            ["decode", sequences, cached, steps] => {
                vec![self.decode(sequences.parse()?, cached.parse()?, steps.parse()?)?]
            }
            [kind @ ("first" | "first-distil"), sequences, tokens] => {
                self.first(layout(sequences, tokens)?, Kind::of(kind))?.to_vec()
            }
            ["memory"] => self.memory()?.to_vec(),
            _ => {
                bail!("unknown request {request:?}, expected one of those that the source's first lines list")
            }
        })
    }
}

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let config = arguments
        .next()
        .context("usage: espalier-bench CONFIG [DEVICE [PARENT]]")?;
    let device = arguments
        .next()
        .map_or(Ok(Device::Cpu), |device| device.parse())?;
    let mut bench = Bench::new(&config, device, arguments.next())?;
    let mut output = std::io::stdout().lock();
    for request in std::io::stdin().lock().lines() {
        let numbers = bench.answer(&request?)?;
        let numbers: Vec<String> = numbers.iter().map(f64::to_string).collect();
        writeln!(output, "{}", numbers.join(" "))?;
        output.flush()?;
    }
    Ok(())
}
