//! Our side of `make check-cpu-speed`: a model of random weights that does on request what it is timed for.
//!
//! `espalier-bench CONFIG` reads one request a line (`forward SEQUENCES TOKENS`, `train SEQUENCES TOKENS`,
//! `adamw`) and answers each with the seconds it took. What is compared, how often and with whom is the
//! affair of `peer/compare.py`.

use std::io::{BufRead, Write};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use espalier_arch::Architecture;
use espalier_model::Model;
use espalier_model::ops::cpu::CpuOperations;
use espalier_model::ops::{Head, Layout, Operations};
use espalier_model::runner::Runner;
use espalier_model::train::{Hyperparameters, MicroBatch, Objective, Trainer};

/// Rows whose logits exist at once.
const LOGIT_ROWS: usize = 128;

struct Bench {
    operations: Arc<dyn Operations>,
    runner: Runner,
    trainer: Trainer,
    vocabulary: usize,
}

impl Bench {
    fn new(config: &str) -> Result<Self> {
        let text = std::fs::read_to_string(config).with_context(|| config.to_owned())?;
        let architecture = Architecture::from_config(&serde_json::from_str(&text)?)?;
        let operations: Arc<dyn Operations> = Arc::new(CpuOperations::new());
        let model = Model::random(&architecture, 1, operations.as_ref())?;
        let trainer = Trainer::new(Arc::clone(&operations), &model, usize::MAX)?;
        let runner = Runner::new(Arc::clone(&operations), Arc::new(model));
        Ok(Self {
            operations,
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

    fn answer(&mut self, request: &str) -> Result<f64> {
        let words: Vec<&str> = request.split_whitespace().collect();
        match words.as_slice() {
            ["forward", sequences, tokens] => self.forward(Layout {
                sequences: sequences.parse()?,
                tokens: tokens.parse()?,
            }),
            ["train", sequences, tokens] => self.train(Layout {
                sequences: sequences.parse()?,
                tokens: tokens.parse()?,
            }),
            ["adamw"] => self.adamw(),
            _ => bail!("unknown request {request:?}, expected forward, train or adamw"),
        }
    }
}

fn main() -> Result<()> {
    let config = std::env::args().nth(1).context("usage: espalier-bench CONFIG")?;
    let mut bench = Bench::new(&config)?;
    let mut output = std::io::stdout().lock();
    for request in std::io::stdin().lock().lines() {
        writeln!(output, "{}", bench.answer(&request?)?)?;
        output.flush()?;
    }
    Ok(())
}
