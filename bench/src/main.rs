//! Our side of `make check-cpu-speed` and `make check-gpu-train`: a model of random weights that does on request what
//! it is timed for.
//!
//! `espalier-bench CONFIG [DEVICE]` (cpu unless given) reads one request a line and answers with a line of numbers,
//! seconds but for the last two. What is compared, how often and with whom is the affair of `peer/compare.py` and
//! `peer/compare_gpu.py`.
//!
//! - `forward SEQUENCES TOKENS`: a forward with every position's logits.
//! - `train SEQUENCES TOKENS`: forward and backward. `adamw`: the update.
//! - `step SEQUENCES TOKENS STEPS`: one of so many whole steps, each queued before the last was read; and what
//!   queueing the first took.
//! - `score SEQUENCES TOKENS TIMES`: one of so many forwards with a loss for every token, brought to the host.
//! - `first SEQUENCES TOKENS`: mean loss and gradient norm before the next update, which changes nothing.
//! - `memory`: bytes of tensors at most, and bytes taken from the device at most (0 on the host).

use std::io::{BufRead, Write};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use espalier_arch::Architecture;
use espalier_model::ops::cpu::CpuOperations;
use espalier_model::ops::cuda::{CudaOperations, Options};
use espalier_model::ops::{Head, Layout, Operations};
use espalier_model::runner::Runner;
use espalier_model::train::{Hyperparameters, MicroBatch, Objective, Step, Trainer};
use espalier_model::{Device, Model};

/// Rows whose logits exist at once.
const LOGIT_ROWS: usize = 128;

struct Bench {
    operations: Arc<dyn Operations>,
    cuda: Option<Arc<CudaOperations>>,
    runner: Runner,
    trainer: Trainer,
    vocabulary: usize,
}

impl Bench {
    fn new(config: &str, device: Device) -> Result<Self> {
        let text = std::fs::read_to_string(config).with_context(|| config.to_owned())?;
        let architecture = Architecture::from_config(&serde_json::from_str(&text)?)?;
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
        let model = Model::random(&architecture, 1, operations.as_ref())?;
        let trainer = Trainer::new(Arc::clone(&operations), &model, usize::MAX)?;
        let runner = Runner::new(Arc::clone(&operations), Arc::new(model));
        Ok(Self {
            operations,
            cuda,
            runner,
            trainer,
            vocabulary: architecture.vocab_size,
        })
    }

    /// Any tokens do: time does not depend on them.
    fn tokens(&self, count: usize) -> Result<Vec<u32>> {
        (0..count)
            .map(|index| Ok(u32::try_from((index * 7919 + 13) % self.vocabulary)?))
            .collect()
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
        let tokens = self.tokens(layout.rows())?;
        let batch = MicroBatch {
            tokens: &tokens,
            layout,
            objective: Objective::NextToken,
        };
        let start = Instant::now();
        self.trainer.accumulate(&batch, batch.predictions())?;
        std::hint::black_box(self.trainer.summed_loss()?);
        Ok(start.elapsed().as_secs_f64())
    }

    /// Seconds of one AdamW step over every parameter, the gradient's norm included.
    fn adamw(&mut self) -> Result<f64> {
        let start = Instant::now();
        self.trainer.update(&Hyperparameters::default(), 1)?.read()?;
        Ok(start.elapsed().as_secs_f64())
    }

    /// Seconds of one of `steps` whole steps, one after the other, each read when the next is on its way; and those
    /// until the first was queued, the host's own part of a step.
    fn steps(&mut self, layout: Layout, steps: u32) -> Result<[f64; 2]> {
        let tokens = self.tokens(layout.rows())?;
        let batch = MicroBatch {
            tokens: &tokens,
            layout,
            objective: Objective::NextToken,
        };
        let start = Instant::now();
        let mut before: Option<Step> = None;
        let mut queued = 0.0;
        for index in 0..steps {
            self.trainer.accumulate(&batch, batch.predictions())?;
            let step = self
                .trainer
                .update(&Hyperparameters::default(), batch.predictions())?;
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

    /// The mean loss of the weights as they are, and the norm of its gradient.
    fn first(&mut self, layout: Layout) -> Result<[f64; 2]> {
        let tokens = self.tokens(layout.rows())?;
        let batch = MicroBatch {
            tokens: &tokens,
            layout,
            objective: Objective::NextToken,
        };
        let still = Hyperparameters {
            learning_rate: 0.0,
            ..Hyperparameters::default()
        };
        let report = self.trainer.step(&[batch], &still)?;
        Ok([report.loss, report.gradient_norm])
    }

    fn memory(&self) -> [f64; 2] {
        let usage = self.cuda.as_ref().map(|cuda| cuda.device().usage());
        usage.map_or([0.0; 2], |usage| {
            [usage.in_use_peak as f64, usage.held_peak as f64]
        })
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
            ["step", sequences, tokens, steps] => {
                self.steps(layout(sequences, tokens)?, steps.parse()?)?.to_vec()
            }
            ["score", sequences, tokens, times] => {
                vec![self.score(layout(sequences, tokens)?, times.parse()?)?]
            }
            ["first", sequences, tokens] => self.first(layout(sequences, tokens)?)?.to_vec(),
            ["memory"] => self.memory().to_vec(),
            _ => bail!(
                "unknown request {request:?}, expected forward, train, adamw, step, score, first or memory"
            ),
        })
    }
}

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let config = arguments
        .next()
        .context("usage: espalier-bench CONFIG [DEVICE]")?;
    let device = arguments
        .next()
        .map_or(Ok(Device::Cpu), |device| device.parse())?;
    let mut bench = Bench::new(&config, device)?;
    let mut output = std::io::stdout().lock();
    for request in std::io::stdin().lock().lines() {
        let numbers = bench.answer(&request?)?;
        let numbers: Vec<String> = numbers.iter().map(f64::to_string).collect();
        writeln!(output, "{}", numbers.join(" "))?;
        output.flush()?;
    }
    Ok(())
}
