//! The report's pictures as inline SVG: limits, blocks, the front, loss curves.

use std::fmt::Write as _;

use espalier_arch::{BlockKind, Variant};
use espalier_search::Metric;
use espalier_search::heterogeneous::FrontPoint;

use super::format::{escape, metric};
use crate::pipeline::outcome::{BlockReport, LimitReport, Outcome, StrategyReport};
use crate::spec::Strategy;

/// Colours of the second strategy differ from the first one's.
pub(super) fn class(strategy: Strategy) -> &'static str {
    match strategy {
        Strategy::Heterogeneous => "",
        Strategy::Uniform => " other",
    }
}

/// Each limit as a line with what was predicted, checked and measured as shares of it.
pub(super) fn limits(limits: &[LimitReport]) -> String {
    const LEFT: f64 = 130.0;
    const WIDTH: f64 = 820.0;
    const ROW: f64 = 64.0;
    let shares = limits.iter().flat_map(|limit| {
        let (verified, checked) = (limit.verified, limit.checked);
        [
            ratio(limit.parent_measured().unwrap_or(0.0), verified.limit),
            ratio(verified.value, verified.limit),
            ratio(checked.value, checked.limit),
            ratio(verified.predicted, verified.limit),
        ]
    });
    let most = shares.fold(1.1_f64, f64::max).min(4.0) * 1.04;
    let x = |share: f64| LEFT + (share / most).clamp(0.0, 1.0) * (WIDTH - LEFT - 20.0);
    let height = ROW * count(limits.len()) + 26.0;
    let mut svg = open(
        WIDTH,
        height,
        "each limit with what was predicted, checked and measured",
    );
    for (index, limit) in limits.iter().enumerate() {
        let middle = ROW * count(index) + 38.0;
        limit_row(&mut svg, limit, middle, &x, WIDTH - 20.0);
    }
    let _ = write!(
        svg,
        "<line class=\"frame\" x1=\"{0:.1}\" x2=\"{0:.1}\" y1=\"12\" y2=\"{1:.1}\"/>\
         <text class=\"frame-text\" text-anchor=\"middle\" x=\"{0:.1}\" y=\"8\">limit</text></svg>",
        x(1.0),
        height - 12.0
    );
    svg
}

fn limit_row(svg: &mut String, limit: &LimitReport, middle: f64, x: &impl Fn(f64) -> f64, right: f64) {
    let (verified, checked) = (limit.verified, limit.checked);
    let share = |value: f64| x(ratio(value, verified.limit));
    let _ = write!(
        svg,
        "<text class=\"strong\" x=\"0\" y=\"{:.1}\">{}</text>\
         <line class=\"axis\" x1=\"{:.1}\" x2=\"{right:.1}\" y1=\"{middle:.1}\" y2=\"{middle:.1}\"/>",
        middle + 4.0,
        metric(limit.metric),
        x(0.0),
    );
    if let Some(measured) = limit.parent_measured() {
        let parent = share(measured);
        let _ = write!(
            svg,
            "<rect class=\"parent-mark\" x=\"{:.1}\" y=\"{:.1}\" width=\"3\" height=\"16\"><title>parent {}</title>\
             </rect><text text-anchor=\"middle\" x=\"{parent:.1}\" y=\"{:.1}\">parent</text>",
            parent - 1.5,
            middle - 8.0,
            escape(&limit.metric.display(measured)),
            middle - 13.0,
        );
    }
    let _ = write!(
        svg,
        "<circle class=\"hollow\" cx=\"{:.1}\" cy=\"{middle:.1}\" r=\"7\"><title>predicted {}</title></circle>",
        share(verified.predicted),
        escape(&limit.metric.display(verified.predicted)),
    );
    let check_x = x(ratio(checked.value, checked.limit));
    let _ = write!(
        svg,
        "<path class=\"dot\" opacity=\".45\" d=\"M{check_x:.1} {:.1}l6 6l-6 6l-6 -6z\"><title>checked {}</title></path>",
        middle - 6.0,
        escape(&limit.metric.display(checked.value)),
    );
    let _ = write!(
        svg,
        "<line class=\"spread\" x1=\"{:.1}\" x2=\"{:.1}\" y1=\"{middle:.1}\" y2=\"{middle:.1}\"/>\
         <circle class=\"dot\" cx=\"{2:.1}\" cy=\"{middle:.1}\" r=\"4.5\"><title>measured {3}</title></circle>\
         <text class=\"strong\" text-anchor=\"middle\" x=\"{2:.1}\" y=\"{4:.1}\">{3}</text>",
        share(verified.value - verified.spread),
        share(verified.value + verified.spread),
        share(verified.value),
        escape(&limit.metric.display(verified.value)),
        middle + 23.0,
    );
}

/// The model as an espalier: layers are tiers on a trunk, attention groups reach left, MLP channels right;
/// what was cut is a ghost, a skipped block a dashed outline.
pub(super) fn blocks(strategy: &StrategyReport) -> String {
    const WIDTH: f64 = 460.0;
    const TRUNK: f64 = 190.0;
    let layers = strategy
        .blocks
        .iter()
        .map(|block| block.layer + 1)
        .max()
        .unwrap_or(0);
    let tier = if layers > 48 { 10.0 } else { 15.0 };
    let height = tier * count(layers) + 34.0;
    let mut svg = open(
        WIDTH,
        height,
        "the chosen size of each block, the first layer at the bottom",
    );
    let _ = write!(
        svg,
        "<text text-anchor=\"end\" x=\"{:.1}\" y=\"12\">attention groups</text>\
         <text x=\"{:.1}\" y=\"12\">MLP channels</text>\
         <line class=\"trunk\" x1=\"{TRUNK}\" x2=\"{TRUNK}\" y1=\"22\" y2=\"{height:.1}\"/>",
        TRUNK - 14.0,
        TRUNK + 14.0,
    );
    for layer in 0..layers {
        let top = 22.0 + tier * count(layers - 1 - layer);
        let shown = if layers > 48 { layer % 5 == 0 } else { true };
        if shown {
            let _ = write!(
                svg,
                "<text class=\"small\" text-anchor=\"end\" x=\"18\" y=\"{:.1}\">{layer}</text>",
                top + tier * 0.72
            );
        }
    }
    for block in &strategy.blocks {
        let top = 22.0 + tier * count(layers - 1 - block.layer) + 1.5;
        block_bar(&mut svg, block, TRUNK, top, tier - 3.0);
    }
    svg.push_str("</svg>");
    svg
}

fn block_bar(svg: &mut String, block: &BlockReport, trunk: f64, top: f64, height: f64) {
    const LEFT_REACH: f64 = 150.0;
    const RIGHT_REACH: f64 = 250.0;
    let leftward = matches!(block.kind, BlockKind::Attention | BlockKind::Mamba2);
    let reach = if leftward { LEFT_REACH } else { RIGHT_REACH };
    let cells = if leftward && (1..=16).contains(&block.whole) {
        block.whole
    } else {
        1
    };
    let skipped = block.variant == Variant::Skip;
    let kept = if skipped {
        0.0
    } else if block.whole == 0 {
        1.0
    } else {
        count(block.size) / count(block.whole)
    };
    let title = if skipped {
        format!("layer {}: skipped", block.layer)
    } else {
        format!("layer {}: {} of {}", block.layer, block.size, block.whole)
    };
    let _ = write!(svg, "<g><title>{title}</title>");
    let step = reach / count(cells);
    for cell in 0..cells {
        let offset = 6.0 + step * count(cell);
        let width = step - if cells > 1 { 2.0 } else { 0.0 };
        let left = if leftward {
            trunk - offset - width
        } else {
            trunk + offset
        };
        let class = if skipped { "skip" } else { "ghost" };
        rectangle(svg, class, left, top, width, height);
        // Each cell holds an equal share of the whole; what is kept fills them from the trunk.
        let filled = ((kept - count(cell) / count(cells)) * count(cells)).clamp(0.0, 1.0) * width;
        if filled > 0.0 {
            let left = if leftward { trunk - offset - filled } else { left };
            rectangle(svg, "leaf", left, top, filled, height);
        }
    }
    svg.push_str("</g>");
}

fn rectangle(svg: &mut String, class: &str, x: f64, y: f64, width: f64, height: f64) {
    let _ = write!(
        svg,
        "<rect class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" rx=\"1.5\"/>"
    );
}

/// The least sum of scores at each value of the first limit, with the chosen model on it.
pub(super) fn front(outcome: &Outcome) -> Option<String> {
    let chosen = outcome.strategies.iter().find_map(|strategy| {
        let value = strategy.prediction.figures.get(outcome.front_metric)?;
        Some((value, strategy.solved?.score))
    });
    let limit = outcome
        .limits
        .iter()
        .find(|limit| limit.metric == outcome.front_metric);
    plot_front(
        outcome.front_metric,
        &outcome.front,
        limit.map(|limit| limit.limit),
        chosen,
    )
}

/// Quality against one metric, with a limit on it and a choice, each (value, score) where there is one.
pub(super) fn plot_front(
    over: Metric,
    front: &[FrontPoint],
    limit: Option<f64>,
    chosen: Option<(f64, f64)>,
) -> Option<String> {
    let points: Vec<(f64, f64)> = front.iter().map(|point| (point.value, point.score)).collect();
    if points.len() < 2 {
        return None;
    }
    let all: Vec<(f64, f64)> = points.iter().copied().chain(chosen).collect();
    let plot = Plot::around(&all, 560.0, 300.0);
    let mut svg = open(560.0, 300.0, "quality lost at each value of the limit");
    let show = |value: f64| over.display(value);
    plot.axes(
        &mut svg,
        metric(over),
        "sum of scores, nats a token",
        &show,
        &|value| format!("{value:.2}"),
    );
    plot.curve(&mut svg, "curve", &points);
    if let Some(limit) = limit {
        let x = plot.x(limit);
        let _ = write!(
            svg,
            "<line class=\"frame\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"14\" y2=\"256\"/>\
             <text class=\"frame-text\" text-anchor=\"middle\" x=\"{x:.1}\" y=\"10\">limit</text>"
        );
    }
    if let Some((value, score)) = chosen {
        let (x, y) = (plot.x(value), plot.y(score));
        let _ = write!(
            svg,
            "<circle class=\"dot\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"5.5\"/>\
             <text class=\"strong\" x=\"{:.1}\" y=\"{:.1}\">chosen</text>",
            x + 10.0,
            y - 8.0
        );
    }
    svg.push_str("</svg>");
    Some(svg)
}

/// Loss of each recovery over its steps.
pub(super) fn losses(strategies: &[StrategyReport]) -> Option<String> {
    let curves: Vec<(Strategy, Vec<(f64, f64)>)> = strategies
        .iter()
        .filter(|strategy| strategy.losses.len() > 1)
        .map(|strategy| {
            let points = strategy.losses.iter().enumerate();
            let each = count(usize::try_from(strategy.steps_per_loss).unwrap_or(1));
            let finite = points.map(|(index, loss)| (each * count(index + 1), f64::from(*loss)));
            (
                strategy.strategy,
                finite.filter(|(_, loss)| loss.is_finite()).collect(),
            )
        })
        .collect();
    let all: Vec<(f64, f64)> = curves
        .iter()
        .flat_map(|(_, points)| points.iter().copied())
        .collect();
    if all.len() < 2 {
        return None;
    }
    let plot = Plot::around(&all, 560.0, 300.0);
    let mut svg = open(560.0, 300.0, "loss of recovery by step");
    plot.axes(
        &mut svg,
        "step",
        "KL to the parent, nats a token",
        &|step| format!("{step:.0}"),
        &|loss| format!("{loss:.2}"),
    );
    for (strategy, points) in &curves {
        plot.curve(&mut svg, &format!("curve{}", class(*strategy)), points);
    }
    svg.push_str("</svg>");
    Some(svg)
}

/// A plot's frame: where values land on the picture.
struct Plot {
    low: (f64, f64),
    high: (f64, f64),
    width: f64,
    height: f64,
}

impl Plot {
    const LEFT: f64 = 50.0;
    const BOTTOM: f64 = 44.0;

    fn around(points: &[(f64, f64)], width: f64, height: f64) -> Self {
        let mut low = (f64::INFINITY, f64::INFINITY);
        let mut high = (f64::NEG_INFINITY, f64::NEG_INFINITY);
        for (x, y) in points {
            low = (low.0.min(*x), low.1.min(*y));
            high = (high.0.max(*x), high.1.max(*y));
        }
        low.1 = low.1.min(0.0);
        Self {
            low,
            high,
            width,
            height,
        }
    }

    fn x(&self, value: f64) -> f64 {
        let share = ratio(value - self.low.0, self.high.0 - self.low.0).clamp(0.0, 1.0);
        Self::LEFT + share * (self.width - Self::LEFT - 24.0)
    }

    fn y(&self, value: f64) -> f64 {
        let share = ratio(value - self.low.1, self.high.1 - self.low.1).clamp(0.0, 1.0);
        self.height - Self::BOTTOM - share * (self.height - Self::BOTTOM - 22.0)
    }

    fn axes(
        &self,
        svg: &mut String,
        x_name: &str,
        y_name: &str,
        show_x: &impl Fn(f64) -> String,
        show_y: &impl Fn(f64) -> String,
    ) {
        let right = self.width - 24.0;
        for tick in 0..=4_u8 {
            let value = self.low.1 + (self.high.1 - self.low.1) * f64::from(tick) / 4.0;
            let y = self.y(value);
            let _ = write!(
                svg,
                "<line class=\"axis\" x1=\"{}\" x2=\"{right:.1}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>\
                 <text text-anchor=\"end\" x=\"{}\" y=\"{:.1}\">{}</text>",
                Self::LEFT,
                Self::LEFT - 8.0,
                y + 4.0,
                show_y(value)
            );
            if tick % 2 == 0 {
                let value = self.low.0 + (self.high.0 - self.low.0) * f64::from(tick) / 4.0;
                let anchor = ["start", "", "middle", "", "end"]
                    .get(usize::from(tick))
                    .copied()
                    .unwrap_or("middle");
                let _ = write!(
                    svg,
                    "<text text-anchor=\"{anchor}\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
                    self.x(value),
                    self.height - Self::BOTTOM + 18.0,
                    escape(&show_x(value))
                );
            }
        }
        let _ = write!(
            svg,
            "<text x=\"0\" y=\"10\">{}</text><text text-anchor=\"end\" x=\"{right:.1}\" y=\"{:.1}\">{}</text>",
            escape(y_name),
            self.height - 6.0,
            escape(x_name)
        );
    }

    fn curve(&self, svg: &mut String, class: &str, points: &[(f64, f64)]) {
        let _ = write!(svg, "<path class=\"{class}\" d=\"");
        for (index, (x, y)) in points.iter().enumerate() {
            let command = if index == 0 { 'M' } else { 'L' };
            let _ = write!(svg, "{command}{:.1} {:.1}", self.x(*x), self.y(*y));
        }
        svg.push_str("\"/>");
    }
}

fn open(width: f64, height: f64, label: &str) -> String {
    format!(
        "<svg viewBox=\"0 0 {width:.0} {height:.0}\" role=\"img\" aria-label=\"{}\">",
        escape(label)
    )
}

/// 0 where it is not defined, so that a picture never holds NaN.
fn ratio(value: f64, whole: f64) -> f64 {
    let ratio = value / whole;
    if ratio.is_finite() { ratio } else { 0.0 }
}

#[allow(
    clippy::cast_precision_loss,
    reason = "layers, blocks and steps are far below 2^52"
)]
fn count(value: usize) -> f64 {
    value as f64
}
