//! Cost tables, one a row, and the rows of one.

use espalier_arch::BlockShape;
use espalier_coordinator::cost_tables::{KeptTable, Summary};
use espalier_search::{CostRow, Subject};

use super::Listing;

/// Tables, one a row.
pub(crate) fn tables(tables: &[Summary]) -> Listing {
    let row = |table: &Summary| {
        let key = &table.key;
        let environment = key
            .environment
            .iter()
            .map(|(name, value)| format!("{name}={value}"));
        vec![
            table.id.clone(),
            key.device.clone(),
            format!("{} {}", key.engine, key.engine_version),
            key.precision.clone(),
            key.hidden.to_string(),
            table.rows.to_string(),
            key.mode.to_string(),
            key.parallelism.to_string(),
            table.parents.to_string(),
            environment.collect::<Vec<_>>().join(", "),
        ]
    };
    Listing {
        heads: vec![
            "KEY",
            "DEVICE",
            "ENGINE",
            "PRECISION",
            "HIDDEN",
            "ROWS",
            "MODE",
            "RANKS",
            "PARENTS",
            "ENVIRONMENT",
        ],
        narrow: 7,
        rows: tables.iter().map(row).collect(),
        values: tables
            .iter()
            .map(|table| serde_json::to_value(table).unwrap_or_default())
            .collect(),
        below: None,
    }
}

/// The rows of one table.
pub(crate) fn table_rows(table: &KeptTable) -> Listing {
    let row = |row: &CostRow| {
        vec![
            subject(&row.subject),
            row.point.to_string(),
            format!("{:.4} ms", row.median_ms),
            format!("{:.4} ms", row.spread_ms),
            row.repeats.to_string(),
        ]
    };
    Listing {
        heads: vec!["SUBJECT", "POINT", "MEDIAN", "SPREAD", "REPEATS"],
        narrow: 5,
        rows: table.rows.iter().map(row).collect(),
        values: vec![serde_json::to_value(table).unwrap_or_default()],
        below: None,
    }
}

fn subject(subject: &Subject) -> String {
    match subject {
        Subject::Base { vocab_size } => format!("base of {vocab_size} entries"),
        Subject::HostFloor | Subject::HostBlock | Subject::HostAlone => subject.to_string(),
        Subject::Block(BlockShape::Attention(attention)) => format!(
            "attention {}/{} × {}",
            attention.query_heads(),
            attention.kv_groups,
            attention.head_dim
        ),
        Subject::Block(BlockShape::Mlp(mlp)) => format!("mlp {}", mlp.channels),
        Subject::Block(BlockShape::Mamba2(mamba)) => format!("mamba {} × {}", mamba.heads, mamba.head_dim),
        Subject::Block(BlockShape::Moe(moe)) => format!("moe {} × {}", moe.experts, moe.expert_channels),
    }
}
