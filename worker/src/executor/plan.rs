//! How much executors do at a time on a device, and keep there.
//!
//! The host's figures are fixed, so that the same job gives the same bits on every machine. A GPU's follow from the
//! memory that is free when a task begins: batches large enough to fill it where there is room, smaller ones where
//! there is not, and what does not fit at all is said before anything is begun. Where rows are taken apart changes
//! nothing but rounding.

use espalier_arch::Architecture;
use espalier_model::block::saved_bytes;
use espalier_model::ops::Accelerator;
use espalier_model::train::Layers;

use crate::{Error, Result};

/// Rows that run through a model together on the host.
const HOST_ROWS: usize = 2048;
/// Rows of a micro-batch on the host.
const HOST_TRAINING_ROWS: usize = 512;
/// Activations inside blocks that are kept for the backward on the host.
const HOST_ACTIVATION_BYTES: usize = 640 << 20;
/// Of the parent's block inputs on the host.
const HOST_INPUT_BYTES: usize = 1 << 30;
/// Of states that go through streamed blocks together on the host.
const HOST_STREAM_BYTES: usize = 1 << 30;
/// Of the parent's final hidden states on the host.
const HOST_STATE_BYTES: usize = 512 << 20;
/// Rows of logits that are held at once on the host.
const HOST_LOGIT_ROWS: usize = 64;

/// Rows that run together on a GPU where they fit; more gain nothing.
const MOST_ROWS: usize = 8192;
/// Rows that run together on a GPU however little is free.
const LEAST_ROWS: usize = 256;
/// Down to as many rows smaller micro-batches are better than computing activations twice.
const FEW_ROWS: usize = 2048;
/// Rows of logits that are held at once on a GPU.
const LOGIT_ROWS: usize = 1024;
/// Bytes of an entry of an activation on a GPU.
const ENTRY: usize = 2;
/// Bytes of a trained parameter on a GPU: its gradient in f32, and what the blocks read.
const TRAINED: usize = 4 + ENTRY;
/// What only the optimiser reads: value and two moments in f32.
const OPTIMISED: usize = 3 * 4;
/// Bytes of a row's logits for each vocabulary entry: the student's and the parent's in f32, and their gradient.
const LOGIT: usize = 4 + 4 + ENTRY;
/// The backend takes logits in chunks of this many bytes in f32, or of as many rows when that is more.
const LOGIT_CHUNK: (usize, usize) = (256 << 20, 128);
/// Workspaces of matrix products, tables of the update, and small tensors.
const SMALL_THINGS: usize = 192 << 20;

/// How much is done at a time, and kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Plan {
    /// Bytes that further tensors may take; none on the host.
    free: Option<usize>,
    /// Bytes that a parent's weights may take on the host, where there is a limit.
    host_limit: Option<usize>,
}

/// How a student is trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Training {
    /// Rows of a micro-batch; a step is the mean over its micro-batches.
    pub rows: usize,
    /// Activations inside blocks that are kept for the backward.
    pub activation_bytes: usize,
    /// Final hidden states of the parent that are kept for when their sequences come again.
    pub state_bytes: usize,
    /// Rows of the parent that run together for them; the host takes a sequence at a time.
    pub parent_rows: usize,
}

impl Plan {
    /// For the device as it is now; none is the host.
    pub fn of(accelerator: Option<&Accelerator>) -> Self {
        let free = accelerator.map(|device| usize::try_from(device.memory_free()).unwrap_or(usize::MAX));
        Self {
            free,
            host_limit: None,
        }
    }

    /// The same, where weights on the host may take so many bytes.
    pub fn with_host_limit(self, bytes: Option<u64>) -> Self {
        Self {
            host_limit: bytes.map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX)),
            ..self
        }
    }

    /// Whether weights of so many bytes can be loaded.
    ///
    /// # Errors
    /// When they take more than is free.
    pub fn expect_room(self, what: &'static str, bytes: usize) -> Result<()> {
        match self.free.or(self.host_limit) {
            Some(free) if free < bytes => Err(Error::NoRoom {
                what,
                needed: bytes as u64,
                free: free as u64,
            }),
            _ => Ok(()),
        }
    }

    /// Bytes that weights may take; as many as there are on a host that is not limited.
    pub fn free_bytes(self) -> u64 {
        self.free
            .or(self.host_limit)
            .map_or(u64::MAX, |bytes| bytes as u64)
    }

    /// What is free, where the weights of `model`, which take so many bytes, and a few rows that run through them do not
    /// fit; none where they do.
    pub fn too_little_for(self, model: &Architecture, bytes: usize) -> Option<usize> {
        let passing = || passing_bytes(model, LEAST_ROWS).saturating_add(SMALL_THINGS);
        match (self.free, self.host_limit) {
            (Some(free), _) => (free < bytes.saturating_add(passing())).then_some(free),
            (None, limit) => limit.filter(|limit| *limit < bytes),
        }
    }

    /// Rows of `model` that run together when nothing is trained.
    pub fn rows(self, model: &Architecture) -> usize {
        let Some(free) = self.free else {
            return HOST_ROWS;
        };
        let fits = |rows: &usize| passing_bytes(model, *rows) <= free / 4;
        halves(MOST_ROWS, LEAST_ROWS).find(fits).unwrap_or(LEAST_ROWS)
    }

    /// Rows whose logits are held at once.
    pub fn logit_rows(self) -> usize {
        self.free.map_or(HOST_LOGIT_ROWS, |_| LOGIT_ROWS)
    }

    /// The parent's block inputs are kept when they fit in this many bytes; else they are computed again for each
    /// block.
    pub fn input_bytes(self) -> usize {
        self.free
            .map_or_else(|| self.on_the_host(HOST_INPUT_BYTES), |free| free / 2)
    }

    /// Bytes of states on the host, where weights are limited no more than those.
    fn on_the_host(self, most: usize) -> usize {
        self.host_limit.map_or(most, |limit| limit.min(most))
    }

    /// Hidden states that go through streamed blocks together take at most so many bytes: each further group of them has
    /// every weight read again.
    pub fn stream_bytes(self) -> usize {
        self.free
            .map_or_else(|| self.on_the_host(HOST_STREAM_BYTES), |free| free / 2)
    }

    /// The same, where so many bytes more can be given up.
    pub fn with_more(self, bytes: usize) -> Self {
        let free = self.free.map(|free| free.saturating_add(bytes));
        Self { free, ..self }
    }

    /// The same, where so many bytes are taken besides.
    pub fn with_less(self, bytes: usize) -> Self {
        let free = self.free.map(|free| free.saturating_sub(bytes));
        Self { free, ..self }
    }

    /// For training a student on sequences of `tokens` tokens, at most `sequences` of them together, as one of the ranks
    /// of `layers`.
    ///
    /// # Errors
    /// When the device has no room for a single sequence.
    pub fn training(
        self,
        parent: &Architecture,
        student: &Architecture,
        tokens: usize,
        sequences: usize,
        layers: Layers,
    ) -> Result<Training> {
        let Some(free) = self.free else {
            return Ok(Training {
                rows: HOST_TRAINING_ROWS,
                activation_bytes: HOST_ACTIVATION_BYTES,
                state_bytes: HOST_STATE_BYTES,
                parent_rows: tokens,
            });
        };
        let whole = tokens.saturating_mul(sequences.max(1));
        let largest = MOST_ROWS.min(whole).max(tokens);
        let need = |rows: usize| training_bytes(parent, student, rows, layers);
        let inside = |rows: usize| all_saved_bytes(student, rows);
        let keeps_all = |rows: &usize| need(*rows).saturating_add(inside(*rows)) <= free;
        let rows = halves(largest, FEW_ROWS.max(tokens))
            .find(keeps_all)
            .or_else(|| halves(largest.min(FEW_ROWS), tokens).find(|rows| need(*rows) <= free));
        let Some(rows) = rows else {
            return Err(Error::NoRoom {
                what: "recovery",
                needed: need(tokens) as u64,
                free: free as u64,
            });
        };
        let left = free.saturating_sub(need(rows));
        let activation_bytes = left.min(inside(rows));
        Ok(Training {
            rows,
            activation_bytes,
            state_bytes: (left - activation_bytes) / 2,
            parent_rows: rows,
        })
    }
}

/// `most`, half of it and so on, down to the last that is not below `least`; `least` itself when there is none.
fn halves(most: usize, least: usize) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(most.max(least)), move |rows| {
        let half = rows / 2;
        match half >= least {
            true => Some(half),
            false if *rows > least => Some(least),
            false => None,
        }
    })
}

/// What rows hold while they run through a model, nothing kept: what the widest block holds inside, a few hidden
/// states, and a chunk of logits.
fn passing_bytes(model: &Architecture, rows: usize) -> usize {
    let inside = |block: &espalier_arch::Block| saved_bytes(&block.shape, model.hidden, rows, ENTRY);
    let widest = model.blocks.iter().map(inside).max().unwrap_or(0);
    let hidden = rows.saturating_mul(model.hidden).saturating_mul(ENTRY);
    let f32_row = model.vocab_size.saturating_mul(4).max(1);
    let chunk = rows.min((LOGIT_CHUNK.0 / f32_row).max(LOGIT_CHUNK.1));
    let logits = chunk.saturating_mul(model.vocab_size).saturating_mul(LOGIT);
    widest
        .saturating_add(hidden.saturating_mul(8))
        .saturating_add(logits)
}

/// What training holds with micro-batches of so many rows and nothing kept inside blocks, a tenth more for the gaps
/// between. A stage has a share of the parameters, with the embedding or the head at the ends, but as many
/// micro-batches alive as there are stages; replicas share out what only the optimiser reads.
fn training_bytes(parent: &Architecture, student: &Architecture, rows: usize, layers: Layers) -> usize {
    let total = usize::try_from(student.parameters().total).unwrap_or(usize::MAX);
    let parameters = match layers.stages {
        0 | 1 => total,
        stages => total
            .div_ceil(stages)
            .saturating_add(student.vocab_size.saturating_mul(student.hidden)),
    };
    let trained = TRAINED + OPTIMISED.div_ceil(layers.replicas.max(1));
    let inputs = rows
        .saturating_mul(student.hidden.saturating_mul(student.blocks.len()))
        .saturating_mul(ENTRY);
    let states = rows.saturating_mul(parent.hidden).saturating_mul(2 * ENTRY);
    // Forward, its gradients beside it, and what products need in between.
    let passing = passing_bytes(student, rows)
        .saturating_mul(2)
        .max(passing_bytes(parent, rows));
    let sum = parameters
        .saturating_mul(trained)
        .saturating_add(inputs)
        .saturating_add(states)
        .saturating_add(passing)
        .saturating_add(SMALL_THINGS);
    sum.saturating_add(sum / 10)
}

/// Everything inside all blocks.
fn all_saved_bytes(model: &Architecture, rows: usize) -> usize {
    let inside = |block: &espalier_arch::Block| saved_bytes(&block.shape, model.hidden, rows, ENTRY);
    model.blocks.iter().map(inside).fold(0, usize::saturating_add)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use std::path::Path;

    use super::*;

    const ALONE: Layers = Layers {
        stages: 1,
        replicas: 1,
    };

    fn smollm2() -> Architecture {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../arch/tests/configs/smollm2-135m.json");
        let text = std::fs::read_to_string(path).unwrap();
        Architecture::from_config(&serde_json::from_str(&text).unwrap()).unwrap()
    }

    fn with_free(free: u64) -> Plan {
        Plan::of(Some(&Accelerator {
            device: espalier_model::Device::Cuda(0),
            name: "GPU".to_owned(),
            cache_bytes: 0,
            memory_limit: free + 5,
            memory_in_use: 5,
        }))
    }

    fn trained(free: u64) -> Result<Training> {
        let model = smollm2();
        with_free(free).training(&model, &model, 512, 64, ALONE)
    }

    #[test]
    fn a_gpu_with_room_takes_large_batches_and_keeps_everything() {
        let plan = trained(139 << 30).unwrap();
        assert_eq!(plan.rows, 8192);
        assert_eq!(plan.activation_bytes, all_saved_bytes(&smollm2(), 8192));
        assert!(
            plan.state_bytes > 20 << 30,
            "6M tokens of 576 entries are 7 GB: {plan:?}"
        );
        // 7.42 GiB were taken for 8 x 1024 with everything kept, and the parent is a little more.
        let needed = training_bytes(&smollm2(), &smollm2(), 8192, ALONE) + plan.activation_bytes;
        assert!((7 << 30..12 << 30).contains(&needed), "{needed}");
        assert_eq!(with_free(139 << 30).rows(&smollm2()), 8192);
    }

    #[test]
    fn less_room_gives_smaller_micro_batches_then_fewer_activations_then_one_error() {
        let mut before = usize::MAX;
        let mut kept_before = usize::MAX;
        let mut sizes = Vec::new();
        for mebibytes in (0..16_000).rev().step_by(50) {
            let free = mebibytes << 20;
            let Ok(plan) = trained(free) else { break };
            assert!(plan.rows <= before, "{plan:?}");
            if plan.rows < before {
                sizes.push(plan.rows);
                kept_before = usize::MAX;
            }
            assert!(plan.activation_bytes <= kept_before, "{plan:?}");
            (before, kept_before) = (plan.rows, plan.activation_bytes);
            let all = training_bytes(&smollm2(), &smollm2(), plan.rows, ALONE)
                + plan.activation_bytes
                + plan.state_bytes;
            assert!(all as u64 <= free, "{plan:?} in {mebibytes} MiB");
            assert!(plan.rows <= 2048 || plan.activation_bytes == all_saved_bytes(&smollm2(), plan.rows));
        }
        assert_eq!(sizes, [8192, 4096, 2048, 1024, 512]);
        let refused = trained(1 << 30).unwrap_err();
        let kind = refused.failure().kind;
        assert_eq!(kind, espalier_proto::task::FailureKind::OutOfMemory);
        let said = refused.to_string();
        assert!(
            said.starts_with("recovery needs ") && said.contains("1024 MiB are free"),
            "{said}"
        );
    }

    #[test]
    fn the_hosts_figures_depend_on_nothing() {
        let plan = Plan::of(None);
        let model = smollm2();
        assert_eq!((plan.rows(&model), plan.logit_rows()), (2048, 64));
        let training = plan.training(&model, &model, 64, 8, ALONE).unwrap();
        assert_eq!((training.rows, training.parent_rows), (512, 64));
    }

    #[test]
    fn a_parent_that_leaves_no_room_for_rows_does_not_fit() {
        let model = smollm2();
        let bytes = 269 << 20;
        let fits = |free: usize| with_free(free as u64).too_little_for(&model, bytes).is_none();
        let workspace = passing_bytes(&model, LEAST_ROWS) + SMALL_THINGS;
        assert!(fits(bytes + workspace) && !fits(bytes + workspace - 1));
        assert_eq!(with_free(1 << 20).too_little_for(&model, bytes), Some(1 << 20));
        assert_eq!(with_free(100).with_less(30).stream_bytes(), 35);
        // Of the host only the weights are counted, and only where it is limited.
        let host = Plan::of(None);
        assert_eq!(host.too_little_for(&model, usize::MAX), None);
        let limited = host.with_host_limit(Some(bytes as u64));
        assert_eq!(limited.too_little_for(&model, bytes), None);
        assert_eq!(limited.too_little_for(&model, bytes + 1), Some(bytes));
        assert_eq!(
            (host.stream_bytes(), limited.stream_bytes()),
            (HOST_STREAM_BYTES, bytes)
        );
    }

    #[test]
    fn halves_end_at_the_least() {
        assert_eq!(halves(8192, 2048).collect::<Vec<_>>(), [8192, 4096, 2048]);
        assert_eq!(halves(5000, 2048).collect::<Vec<_>>(), [5000, 2500, 2048]);
        assert_eq!(halves(100, 512).collect::<Vec<_>>(), [512]);
    }

    #[test]
    fn ranks_share_out_what_a_student_takes() {
        let model = smollm2();
        let bytes = |stages, replicas| training_bytes(&model, &model, 512, Layers { stages, replicas });
        let parameters = usize::try_from(model.parameters().total).unwrap();
        let saved = bytes(1, 1) - bytes(1, 4);
        assert_eq!(saved, (parameters * 9) * 11 / 10);
        assert!(bytes(2, 1) < bytes(1, 1) && bytes(2, 2) < bytes(2, 1));
    }
}
