//! Memory from config files alone against published figures: `make check-estimate`.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    missing_docs
)]
#![allow(clippy::cast_precision_loss)]

use std::path::Path;

use espalier_arch::{Architecture, Storage};
use espalier_search::Workload;
use espalier_search::estimate::{Assumptions, Estimate, estimate};

const GIB: f64 = 1024.0 * 1024.0 * 1024.0;
const MIB: f64 = 1024.0 * 1024.0;

fn architecture(name: &str) -> Architecture {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../arch/tests/configs")
        .join(format!("{name}.json"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    Architecture::from_config(&serde_json::from_str(&text).unwrap()).unwrap()
}

fn served(name: &str, precision: &str, context: usize, concurrency: usize, block_tokens: usize) -> Estimate {
    let assumptions = Assumptions {
        storage: precision.parse::<Storage>().unwrap(),
        workload: Workload {
            prompt_tokens: context,
            output_tokens: 0,
            concurrency,
        },
        block_tokens,
        spare_blocks: usize::from(block_tokens > 1),
        ranks: 1,
        step_tokens: 2048,
        overhead_bytes: 0,
    };
    estimate(&architecture(name), &assumptions).unwrap()
}

/// The published total, and a reading that gives it: precision, context and concurrency are not published with it.
struct Case {
    model: &'static str,
    published: f64,
    unit: (&'static str, f64),
    precision: &'static str,
    context: usize,
    concurrency: usize,
}

const CASES: [Case; 3] = [
    Case {
        model: "nemotron-nano-12b-v2",
        published: 8.76,
        unit: ("GiB", GIB),
        precision: "nvfp4",
        context: 8192,
        concurrency: 1,
    },
    Case {
        model: "nemotron-3-nano-30b-a3b",
        published: 23.67,
        unit: ("GiB", GIB),
        precision: "nvfp4",
        context: 8192,
        concurrency: 64,
    },
    Case {
        model: "nemotron-3-super-120b-a12b",
        published: 280.0,
        unit: ("GB", 1e9),
        precision: "bf16",
        context: 131_072,
        concurrency: 32,
    },
];

#[test]
fn published_totals_follow_as_sums_of_components_under_a_stated_reading() {
    let mut worst: f64 = 0.0;
    for case in CASES {
        let found = served(case.model, case.precision, case.context, case.concurrency, 16);
        let (name, unit) = case.unit;
        println!(
            "{}: {}, {} sequences of {} tokens (a reading of ours: none of it is published)",
            case.model, found.assumptions.storage, case.concurrency, case.context
        );
        for component in &found.weights {
            let label = format!("weights, {}", component.component.name());
            println!("  {label:<22} {:>9.3} {name}", component.bytes as f64 / unit);
        }
        for (label, bytes) in [
            ("keys and values", found.kv_bytes),
            ("recurrent state", found.state_bytes),
            ("activations", found.activation_bytes),
        ] {
            println!("  {label:<22} {:>9.3} {name}", bytes as f64 / unit);
        }
        let sum = found.total_bytes as f64 / unit;
        let error = sum / case.published - 1.0;
        println!(
            "  {:<22} {sum:>9.3} {name}, published {}: {:+.2}%",
            "sum",
            case.published,
            100.0 * error
        );
        worst = worst.max(error.abs());
    }
    println!("{} memory cases within {:.2}%", CASES.len(), 100.0 * worst);
    assert!(worst <= 0.02, "{worst}");
}

#[test]
fn published_workloads_come_out_to_the_mebibyte() {
    let rows = [
        ("qwen3-8b", 15_622.59, 110_592.0),
        ("llama-3.1-8b", 15_316.5, 98_304.0),
    ];
    for (model, weights, kv) in rows {
        let found = served(model, "bf16", 8192, 96, 1);
        assert!(
            (found.weight_bytes as f64 / MIB - weights).abs() < 0.06,
            "{model}: {}",
            found.weight_bytes
        );
        assert_eq!(found.kv_bytes as f64 / MIB, kv, "{model}");
    }
}

#[test]
fn an_expert_without_a_width_of_its_own_gives_as_much_as_the_stream_holds() {
    let found = served("nemotron-3-nano-30b-a3b", "bf16", 8192, 1, 16);
    // Six of 128 experts of 1,856 channels, a shared one of 3,712, logits of the router in f32, the stream and its norm.
    let numbers = 6 * (2 * 1856 + 2688) + 2 * 3712 + 2 * 128 + 2 * 2688;
    assert_eq!(found.activation_bytes, 2048 * numbers * 2);
}

#[test]
fn what_no_precision_quantises_is_counted_plain() {
    let found = |precision| served("nemotron-3-nano-30b-a3b", precision, 1024, 1, 16);
    let plain = |found: &Estimate| {
        let found = found.weights.iter();
        let rows = found.filter(|part| matches!(part.component.name(), "tables" | "plain"));
        rows.map(|part| part.bytes).sum::<u64>()
    };
    let (nvfp4, fp8, bf16) = (found("nvfp4"), found("fp8"), found("bf16"));
    assert_eq!(plain(&nvfp4), plain(&bf16));
    assert_eq!(plain(&fp8), plain(&bf16));
    assert!(plain(&bf16) >= 2 * 2 * 131_072 * 2688, "both tables");
    let quantised = bf16.weight_bytes - plain(&bf16);
    let share = (nvfp4.weight_bytes - plain(&nvfp4)) as f64 / quantised as f64;
    assert!(
        (share - 4.5 / 16.0).abs() < 1e-4,
        "four bits and a scale of eight for sixteen: {share}"
    );
}
