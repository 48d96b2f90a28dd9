//! Counts from config files alone, against published and measured totals: `make check-counts`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

use std::path::Path;

use espalier_arch::{Architecture, BlockKind, Precision, Variant};

const MIB: f64 = 1024.0 * 1024.0;
/// Sequences and tokens of the workload whose memory is published.
const BATCH: u64 = 96;
const TOKENS: usize = 4096 + 4096;

fn architecture(name: &str) -> Architecture {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/configs")
        .join(format!("{name}.json"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    Architecture::from_config(&serde_json::from_str(&text).unwrap())
        .unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// A published count: an exact one, or billions rounded to so many digits.
enum Published {
    Exactly(u64),
    Billions(f64, i32),
}

impl Published {
    fn holds(&self, counted: u64) -> bool {
        match *self {
            Self::Exactly(count) => counted == count,
            Self::Billions(billions, digits) => {
                let scale = 10_f64.powi(digits);
                let rounded = (counted as f64 / 1e9 * scale).round() / scale;
                (rounded - billions).abs() < 1e-9
            }
        }
    }

    fn text(&self) -> String {
        match *self {
            Self::Exactly(count) => count.to_string(),
            Self::Billions(billions, digits) => format!("{billions:.*}B", usize::try_from(digits).unwrap()),
        }
    }
}

/// The table so far: a line a row, and how many hold.
#[derive(Default)]
struct Table {
    rows: usize,
    wrong: Vec<String>,
}

impl Table {
    fn row(&mut self, what: &str, counted: &str, published: &str, holds: bool) {
        let mark = if holds { "ok" } else { "WRONG" };
        let line = format!("{what:<48} {counted:>18} {published:>18}  {mark}");
        println!("{line}");
        self.rows += 1;
        if !holds {
            self.wrong.push(line);
        }
    }

    fn count(&mut self, what: &str, counted: u64, published: &Published) {
        self.row(
            what,
            &counted.to_string(),
            &published.text(),
            published.holds(counted),
        );
    }

    /// Within 0.1%.
    fn mebibytes(&mut self, what: &str, bytes: u64, published: f64) {
        let counted = bytes as f64 / MIB;
        let holds = (counted / published - 1.0).abs() <= 1e-3;
        self.row(what, &format!("{counted:.2}"), &format!("{published:.2}"), holds);
    }

    fn finish(self) {
        println!("{} of {} counts hold", self.rows - self.wrong.len(), self.rows);
        assert!(self.wrong.is_empty(), "{}", self.wrong.join("\n"));
    }
}

fn served(architecture: &Architecture) -> u64 {
    architecture.weight_bytes(Precision::Bf16) + BATCH * architecture.kv_bytes(Precision::Bf16, TOKENS)
}

fn parameters(table: &mut Table) {
    use Published::{Billions, Exactly};
    let rows = [
        ("smollm2-135m", Exactly(134_515_008), None),
        ("qwen3-8b", Exactly(8_190_735_360), None),
        ("llama-3.1-8b", Exactly(8_030_261_248), None),
        ("nemotron-h-8b", Billions(8.101, 3), None),
        ("nemotron-nano-4b", Billions(3.974, 3), None),
        ("nemotron-nano-9b-v2", Billions(8.888, 3), None),
        ("nemotron-nano-12b-v2", Billions(12.310, 3), None),
        (
            "nemotron-3-nano-30b-a3b",
            Billions(31.578, 3),
            Some(Billions(3.580, 3)),
        ),
        (
            "nemotron-3-super-120b-a12b",
            Billions(120.669, 3),
            Some(Billions(12.770, 3)),
        ),
        ("puzzle-75b", Billions(75.353, 3), Some(Billions(9.337, 3))),
        ("pruned-30b-to-22b", Billions(22.277, 3), Some(Billions(3.000, 3))),
        ("pruned-9b-to-7b", Billions(6.998, 3), None),
    ];
    for (name, total, active) in rows {
        let counted = architecture(name).parameters();
        table.count(&format!("{name}: parameters"), counted.total, &total);
        if let Some(active) = active {
            table.count(&format!("{name}: active parameters"), counted.active, &active);
        }
    }
    let mixture = architecture("nemotron-3-nano-30b-a3b").parameters();
    let without_input = mixture.active - mixture.embedding;
    table.count(
        "nemotron-3-nano-30b-a3b: active, no input table",
        without_input,
        &Billions(3.228, 3),
    );
}

fn memory(table: &mut Table) {
    let qwen = architecture("qwen3-8b");
    table.mebibytes(
        "qwen3-8b: weights, MiB",
        qwen.weight_bytes(Precision::Bf16),
        15_622.59,
    );
    table.mebibytes(
        "qwen3-8b: KV of 96 × 8192, MiB",
        BATCH * qwen.kv_bytes(Precision::Bf16, TOKENS),
        110_592.0,
    );
    table.mebibytes("qwen3-8b: both, MiB", served(&qwen), 126_215.0);
    let llama = architecture("llama-3.1-8b");
    table.mebibytes("llama-3.1-8b: both, MiB", served(&llama), 113_620.5);
    let mut candidate = llama.whole();
    let attention = llama.blocks.iter().zip(&mut candidate.variants);
    let attention = attention.filter(|(block, _)| block.shape.kind() == BlockKind::Attention);
    attention
        .take(12)
        .for_each(|(_, variant)| *variant = Variant::Skip);
    let pruned = llama.with_candidate(&candidate).unwrap();
    table.mebibytes(
        "llama-3.1-8b less 12 attention blocks: both, MiB",
        served(&pruned),
        75_796.41,
    );
    let rows = [
        ("nemotron-nano-9b-v2", 16_384, 136.9),
        ("nemotron-nano-12b-v2", 24_576, 142.0),
        ("nemotron-3-nano-30b-a3b", 6_144, 46.8),
        ("nemotron-3-super-120b-a12b", 8_192, 162.3),
    ];
    for (name, kv, state) in rows {
        let hybrid = architecture(name);
        let counted = hybrid.kv_bytes_per_token(Precision::Bf16);
        table.count(
            &format!("{name}: KV bytes a token"),
            counted,
            &Published::Exactly(kv),
        );
        table.mebibytes(
            &format!("{name}: state, MiB"),
            hybrid.state_bytes(Precision::Bf16),
            state,
        );
    }
}

#[test]
fn every_published_count_follows_from_its_config_alone() {
    let mut table = Table::default();
    println!("{:<48} {:>18} {:>18}", "what", "counted", "published");
    parameters(&mut table);
    memory(&mut table);
    table.finish();
}

#[test]
fn kinds_of_blocks_are_as_many_as_each_pattern_says() {
    let rows = [
        ("nemotron-h-8b", [24, 4, 24, 0]),
        ("nemotron-nano-4b", [21, 4, 17, 0]),
        ("nemotron-nano-9b-v2", [27, 4, 25, 0]),
        ("nemotron-nano-12b-v2", [28, 6, 28, 0]),
        ("nemotron-3-nano-30b-a3b", [23, 6, 0, 23]),
        ("nemotron-3-super-120b-a12b", [40, 8, 0, 40]),
        ("puzzle-75b", [40, 8, 0, 40]),
        ("pruned-9b-to-7b", [24, 4, 20, 0]),
    ];
    for (name, expected) in rows {
        let architecture = architecture(name);
        let kinds = [
            BlockKind::Mamba2,
            BlockKind::Attention,
            BlockKind::Mlp,
            BlockKind::Moe,
        ];
        let counted = kinds.map(|kind| {
            architecture
                .blocks
                .iter()
                .filter(|block| block.shape.kind() == kind)
                .count()
        });
        assert_eq!(counted, expected, "{name}");
    }
}
