//! Shapes: a row for each pair of models.

use espalier_arch::BlockKind;
use espalier_search::Metric;
use espalier_search::shapes::{Pair, Shape, Shapes};

use super::Listing;

/// Pairs of models that are equal in one thing.
pub(crate) fn shapes(found: &[Shapes]) -> Listing {
    let rows = found.iter().flat_map(|shapes| {
        let sized = shapes.equal_parameters.iter().map(|pair| {
            row(
                parameters(&pair.less),
                latency(&pair.less),
                latency(&pair.more),
                pair,
            )
        });
        // By the device's sums: what is predicted of the two may differ a little.
        let timed = shapes.equal_latency.iter().map(|pair| {
            row(
                format!("{}, {}", latency(&pair.less), latency(&pair.more)),
                parameters(&pair.less),
                parameters(&pair.more),
                pair,
            )
        });
        sized.chain(timed)
    });
    Listing {
        heads: vec![
            "EQUAL",
            "LESS",
            "MORE",
            "RATIO",
            "BLOCKS OF LESS",
            "BLOCKS OF MORE",
        ],
        narrow: 6,
        rows: rows.collect(),
        values: found
            .iter()
            .map(|shapes| serde_json::to_value(shapes).unwrap_or_default())
            .collect(),
        below: None,
    }
}

fn row(equal: String, less: String, more: String, pair: &Pair) -> Vec<String> {
    vec![
        equal,
        less,
        more,
        format!("{:.2}", pair.ratio),
        blocks(&pair.less),
        blocks(&pair.more),
    ]
}

fn latency(shape: &Shape) -> String {
    let of = |figures: espalier_search::Figures| figures.get(Metric::Latency).unwrap_or(0.0);
    super::plan::with_error(
        Metric::Latency,
        of(shape.prediction.figures),
        of(shape.prediction.errors),
    )
}

fn parameters(shape: &Shape) -> String {
    format!("{} parameters", shape.parameters)
}

fn blocks(shape: &Shape) -> String {
    let count = |kind: BlockKind| shape.blocks.iter().filter(|block| block.kind() == kind).count();
    format!(
        "{} attention, {} mlp",
        count(BlockKind::Attention),
        count(BlockKind::Mlp)
    )
}
