//! Times with their errors by where these come from, and straight lines between them.

/// Where an error comes from. Errors of one source are the same error again and add up; different sources are
/// independent, and add in quadrature.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    /// The spread of this subject's rows.
    Rows(usize),
    /// The line drawn between this subject's loads.
    Loads(usize),
    /// The line drawn between these shapes.
    Shapes(usize),
    /// What a check of a whole model was off.
    Check,
}

/// A time in milliseconds.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Sampled {
    pub(super) value: f64,
    /// Standard error by source, each source once. Of either sign where a check has told some of it: see `checked`.
    pub(super) errors: Vec<(Source, f64)>,
}

/// Why there is no time: what was asked for lies outside of what was measured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Outside {
    /// Which of two axes.
    pub(super) axis: usize,
    pub(super) asked: usize,
    pub(super) least: usize,
    pub(super) most: usize,
}

impl Sampled {
    pub(super) fn new(value: f64, source: Source, error: f64) -> Self {
        Self {
            value,
            errors: vec![(source, error)],
        }
    }

    /// Adds `factor` times `other`.
    pub(super) fn add(&mut self, other: &Self, factor: f64) {
        self.value += other.value * factor;
        for (source, error) in &other.errors {
            self.add_error(*source, error * factor.abs());
        }
    }

    pub(super) fn add_error(&mut self, source: Source, error: f64) {
        match self.errors.iter_mut().find(|(known, _)| *known == source) {
            Some((_, sum)) => *sum += error,
            None => self.errors.push((source, error)),
        }
    }

    pub(super) fn times(&self, factor: f64) -> Self {
        let mut scaled = Self::default();
        scaled.add(self, factor);
        scaled
    }

    /// Standard error of the whole.
    pub(super) fn error(&self) -> f64 {
        let squares = self.errors.iter().map(|(_, error)| error * error);
        squares.sum::<f64>().sqrt()
    }
}

/// The time at `x` on straight lines between points in rising order, each `x` once.
///
/// The error of a line: how far measured points lie off the line between their neighbours at the most (each left out
/// once); with no point to leave out, a time between two others is anywhere between them. Beyond the ends there is no
/// line unless `extrapolate`, and then all that was added is in doubt.
pub(super) fn between(
    points: &[(usize, Sampled)],
    x: usize,
    source: Source,
    extrapolate: bool,
) -> Result<Sampled, Outside> {
    let above = points.partition_point(|(at, _)| *at < x);
    if let Some((at, exact)) = points.get(above)
        && *at == x
    {
        return Ok(exact.clone());
    }
    let inside = above > 0 && above < points.len();
    let upper = above.clamp(1, points.len().saturating_sub(1).max(1));
    let (Some((low_at, low)), Some((high_at, high))) = (points.get(upper - 1), points.get(upper)) else {
        return Err(outside(points, x));
    };
    if !inside && !extrapolate {
        return Err(outside(points, x));
    }
    let share = share(*low_at, *high_at, x);
    let mut found = low.times(1.0 - share);
    found.add(high, share);
    let step = (high.value - low.value).abs();
    let doubt = if inside {
        left_out(points).unwrap_or_else(|| step * share.min(1.0 - share))
    } else {
        step * (share - share.clamp(0.0, 1.0)).abs()
    };
    found.value = found.value.max(0.0);
    found.add_error(source, doubt);
    Ok(found)
}

/// Of the ways to `y`, each with a time or none at its own other axis, the one at `y` itself or on the lines between.
pub(super) fn across(
    ways: Vec<(usize, Result<Sampled, Outside>)>,
    y: usize,
    source: Source,
    extrapolate: bool,
) -> Result<Sampled, Outside> {
    let mut points = Vec::with_capacity(ways.len());
    let mut first_wrong = None;
    for (at, time) in ways {
        match time {
            Ok(time) if at == y => return Ok(time),
            Ok(time) => points.push((at, time)),
            Err(wrong) => {
                if at == y || first_wrong.is_none() {
                    first_wrong = Some(wrong);
                }
            }
        }
    }
    between(&points, y, source, extrapolate).map_err(|outside| match first_wrong {
        Some(wrong) => wrong,
        None => Outside { axis: 1, ..outside },
    })
}

fn outside(points: &[(usize, Sampled)], asked: usize) -> Outside {
    Outside {
        axis: 0,
        asked,
        least: points.first().map_or(0, |(at, _)| *at),
        most: points.last().map_or(0, |(at, _)| *at),
    }
}

/// How far along from `low` to `high` `x` lies: below 0 or above 1 beyond them.
#[allow(clippy::cast_precision_loss)] // sizes are far below 2^53
pub(super) fn share(low: usize, high: usize, x: usize) -> f64 {
    (x as f64 - low as f64) / (high as f64 - low as f64)
}

/// The farthest that a point lies off the line between its neighbours; none where no point has two.
fn left_out(points: &[(usize, Sampled)]) -> Option<f64> {
    let residuals = points.windows(3).filter_map(|window| match window {
        [(low_at, low), (at, time), (high_at, high)] => {
            let share = share(*low_at, *high_at, *at);
            Some((time.value - low.value * (1.0 - share) - high.value * share).abs())
        }
        _ => None,
    });
    residuals.reduce(f64::max)
}
