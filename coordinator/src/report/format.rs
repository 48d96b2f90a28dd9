//! Figures and text as the report shows them.

use espalier_search::{Bound, Metric};

/// Text that is safe between tags and within quoted attributes.
pub(crate) fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            other => escaped.push(other),
        }
    }
    escaped
}

/// Whole numbers in groups of three, with a thin space.
pub(super) fn grouped(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::with_capacity(digits.len() * 2);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push('\u{202f}');
        }
        text.push(digit);
    }
    text
}

/// Seconds as people say them.
pub(crate) fn duration(seconds: f64) -> String {
    match seconds {
        s if !s.is_finite() || s < 0.0 => "–".to_owned(),
        s if s < 10.0 => format!("{s:.1} s"),
        s if s < 90.0 => format!("{s:.0} s"),
        s if s < 5400.0 => format!("{:.0} min {:02.0} s", (s / 60.0).floor(), s % 60.0),
        s => format!("{:.0} h {:02.0} min", (s / 3600.0).floor(), s % 3600.0 / 60.0),
    }
}

/// A share with its sign: `+3.1%`, `−25.0%`.
pub(super) fn signed_percent(share: f64) -> String {
    let sign = if share < 0.0 { "−" } else { "+" };
    format!("{sign}{:.1}%", share.abs() * 100.0)
}

/// A metric's name for people.
pub(super) fn metric(metric: Metric) -> &'static str {
    match metric {
        Metric::Latency => "Latency",
        Metric::FirstToken => "First token",
        Metric::PerToken => "Time per token",
        Metric::Throughput => "Throughput",
        Metric::Memory => "Memory",
        Metric::BlockParameters => "Block parameters",
    }
}

/// A limit as it was asked.
pub(super) fn bound(metric: Metric, bound: Bound) -> String {
    match bound {
        Bound::ShareOfParent(share) => {
            let percent = format!("{:.1}", share * 100.0);
            format!(
                "{}% of the parent",
                percent.trim_end_matches('0').trim_end_matches('.')
            )
        }
        Bound::Absolute(value) => metric.display(value),
    }
}

/// A count in thousands, millions or billions.
pub(super) fn short(value: u64) -> String {
    #[allow(clippy::cast_precision_loss, reason = "three digits are shown")]
    let value = value as f64;
    match value {
        v if v >= 1e9 => format!("{:.2} B", v / 1e9),
        v if v >= 1e6 => format!("{:.1} M", v / 1e6),
        v if v >= 1e4 => format!("{:.1} k", v / 1e3),
        v => format!("{v:.0}"),
    }
}
