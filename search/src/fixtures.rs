//! Small shapes that the tests of several modules share.

use espalier_arch::{
    Activation, Architecture, Attention, Block, BlockShape, Family, Mlp, Storage, WeightFormat,
};

use crate::{CostKey, CostRow, CostTable, MemoryModel, Mode, Point, Subject, Workload};

pub(crate) fn attention(kv_groups: usize) -> BlockShape {
    BlockShape::Attention(Attention {
        kv_groups,
        queries_per_group: 2,
        head_dim: 8,
        qkv_bias: false,
        output_bias: false,
        qk_norm: false,
        rope: None,
        sliding_window: None,
    })
}

pub(crate) fn mlp(channels: usize) -> BlockShape {
    BlockShape::Mlp(Mlp {
        channels,
        activation: Activation::SwiGlu,
        bias: false,
    })
}

/// The built-in engine's memory on a processor.
pub(crate) fn f32() -> MemoryModel {
    MemoryModel::unpaged(Storage::all(WeightFormat::F32))
}

/// Three layers of two KV groups and 64 channels.
pub(crate) fn small() -> Architecture {
    let blocks = (0..3)
        .flat_map(|layer| [attention(2), mlp(64)].map(|shape| Block { layer, shape }))
        .collect();
    Architecture {
        family: Family::Llama,
        vocab_size: 100,
        hidden: 32,
        layers: 3,
        blocks,
        tied_embedding: true,
        norm_epsilon: 1e-5,
        max_positions: 256,
    }
}

/// A cost table for [`small`]'s hidden width: every row of four repeats.
pub(crate) fn table(rows: &[(Subject, Point, f64, f64)]) -> CostTable {
    let rows = rows.iter().map(|(subject, point, median_ms, spread_ms)| CostRow {
        subject: subject.clone(),
        point: *point,
        median_ms: *median_ms,
        spread_ms: *spread_ms,
        repeats: 4,
    });
    CostTable {
        key: CostKey {
            device: "test".to_owned(),
            engine: "builtin".to_owned(),
            engine_version: "0".to_owned(),
            precision: "f32".to_owned(),
            hidden: 32,
            parallelism: 1,
            mode: Mode::Eager,
            environment: std::collections::BTreeMap::new(),
        },
        rows: rows.collect(),
        memory: None,
    }
}

/// A workload of prompts only, and the times of all of [`small`]'s shapes under it: 31 ms for the whole.
pub(crate) fn prompts() -> (Workload, CostTable) {
    let workload = Workload {
        prompt_tokens: 4,
        output_tokens: 1,
        concurrency: 1,
    };
    let point = Point::Prefill {
        tokens: 4,
        sequences: 1,
    };
    let rows = [
        (Subject::Base { vocab_size: 100 }, 1.0),
        (Subject::Block(attention(2)), 4.0),
        (Subject::Block(attention(1)), 2.0),
        (Subject::Block(mlp(64)), 6.0),
        (Subject::Block(mlp(32)), 3.0),
    ];
    let rows = rows.map(|(subject, median)| (subject, point, median, 0.0));
    (workload, table(&rows))
}
