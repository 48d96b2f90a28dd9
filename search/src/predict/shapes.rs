//! Every subject of a table, and the lines between block shapes that differ in size alone.

use std::collections::HashMap;

use espalier_arch::{Attention, BlockShape, Mlp};

use super::rows::{Load, Measured, block_key, key};
use super::sampled::{Outside, Sampled, Source, across, between};
use crate::{CostTable, Error, Result, Subject};

/// Every subject's times.
#[derive(Debug)]
pub(super) struct Times {
    subjects: Vec<Measured>,
    by_name: HashMap<String, usize>,
    lines: HashMap<String, Line>,
    extrapolate: bool,
}

/// Shapes that differ in size alone: MLPs by channels, attention by queries a group and by groups.
#[derive(Debug)]
struct Line {
    index: usize,
    /// (first axis, second axis, subject), sorted by the second axis, then the first.
    members: Vec<(usize, usize, usize)>,
    axes: [&'static str; 2],
}

impl Times {
    /// # Errors
    /// When a row holds what is no time.
    pub(super) fn new(table: &CostTable) -> Result<Self> {
        let mut times = Self {
            subjects: Vec::new(),
            by_name: HashMap::new(),
            lines: HashMap::new(),
            extrapolate: false,
        };
        for row in &table.rows {
            let name = key(&row.subject);
            let index = match times.by_name.get(&name) {
                Some(index) => *index,
                None => {
                    let index = times.subjects.len();
                    times.subjects.push(Measured::new(index));
                    times.by_name.insert(name, index);
                    if let Subject::Block(shape) = &row.subject {
                        times.insert_shape(shape, index);
                    }
                    index
                }
            };
            if let Some(subject) = times.subjects.get_mut(index) {
                subject.insert(row)?;
            }
        }
        Ok(times)
    }

    /// Lets times be drawn on beyond what was measured.
    pub(super) fn extrapolating(&mut self) {
        self.extrapolate = true;
    }

    fn insert_shape(&mut self, shape: &BlockShape, subject: usize) {
        let Some((name, [x, y], axes)) = place(shape) else {
            return;
        };
        let next = self.lines.len();
        let line = self.lines.entry(name).or_insert(Line {
            index: next,
            members: Vec::new(),
            axes,
        });
        let at = line.members.partition_point(|(a, b, _)| (*b, *a) < (y, x));
        line.members.insert(at, (x, y, subject));
    }

    /// A subject's time; none where the table does not have the subject, or nothing of it under loads of this kind.
    pub(super) fn subject(&self, subject: &Subject, load: Load) -> Result<Option<Sampled>> {
        let name = key(subject);
        let Some(measured) = self.measured(&name).filter(|measured| measured.has(load)) else {
            return Ok(None);
        };
        let outside = |outside: Outside| beyond(subject.to_string(), load.axis(outside.axis), outside);
        measured.at(load, self.extrapolate).map(Some).map_err(outside)
    }

    /// Whether there is anything of a subject.
    pub(super) fn knows(&self, subject: &Subject) -> bool {
        self.by_name.contains_key(&key(subject))
    }

    fn measured(&self, name: &str) -> Option<&Measured> {
        self.subjects.get(*self.by_name.get(name)?)
    }

    /// A block's time: its own, or on the lines between its neighbours in size where it was not measured under such a
    /// load.
    pub(super) fn block(&self, shape: &BlockShape, load: Load) -> Result<Sampled> {
        // Whole, with everything that tells it from others, it would be a line of its own.
        let shown = || Subject::Block(shape.clone()).to_string();
        let measured = self.measured(&block_key(shape));
        match measured.filter(|measured| measured.has(load)) {
            None => self.on_lines(shape, load, shown),
            Some(measured) => measured.at(load, self.extrapolate).or_else(|outside| {
                let own = beyond(shown(), load.axis(outside.axis), outside);
                // Its neighbours may have been measured where it was not; what it has itself says more if they were not.
                self.on_lines(shape, load, shown).map_err(|_| own)
            }),
        }
    }

    /// A block's time on the lines between its neighbours in size.
    fn on_lines(&self, shape: &BlockShape, load: Load, shown: impl Fn() -> String) -> Result<Sampled> {
        let missing = || Error::MissingRow {
            subject: shown(),
            point: load.point(),
        };
        let (line_name, [x, y], _) = place(shape).ok_or_else(missing)?;
        let line = self.lines.get(&line_name).ok_or_else(missing)?;
        let source = Source::Shapes(line.index);
        let ways = line
            .members
            .chunk_by(|one, other| one.1 == other.1)
            .map(|members| {
                let points = members.iter().filter_map(|(x, _, subject)| {
                    let time = self.subjects.get(*subject)?.at(load, self.extrapolate).ok()?;
                    Some((*x, time))
                });
                let points: Vec<_> = points.collect();
                let at = members.first().map_or(0, |member| member.1);
                (at, between(&points, x, source, self.extrapolate))
            });
        across(ways.collect(), y, source, self.extrapolate).map_err(|outside| {
            if outside.most == 0 {
                return missing();
            }
            let axis = line.axes.get(outside.axis).copied().unwrap_or("sizes");
            beyond(shown(), axis, outside)
        })
    }
}

fn beyond(subject: String, axis: &'static str, outside: Outside) -> Error {
    Error::Extrapolation {
        subject,
        axis,
        asked: outside.asked,
        least: outside.least,
        most: outside.most,
    }
}

/// The line that a shape lies on, where on it, and what its axes are called.
fn place(shape: &BlockShape) -> Option<(String, [usize; 2], [&'static str; 2])> {
    match shape {
        BlockShape::Mlp(mlp) => {
            let line = BlockShape::Mlp(Mlp {
                channels: 0,
                ..mlp.clone()
            });
            Some((block_key(&line), [mlp.channels, 0], ["channels", "channels"]))
        }
        BlockShape::Attention(attention) => {
            let line = BlockShape::Attention(Attention {
                kv_groups: 0,
                queries_per_group: 0,
                ..attention.clone()
            });
            let at = [attention.queries_per_group, attention.kv_groups];
            Some((block_key(&line), at, ["queries a group", "key/value groups"]))
        }
        BlockShape::Mamba2(_) | BlockShape::Moe(_) => None,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::Point;
    use crate::fixtures::{mlp, table};

    #[test]
    fn a_shape_that_lacks_a_load_lies_on_the_line_as_one_without_any_time_does() {
        let row = |channels, tokens, median| {
            let point = Point::Prefill { tokens, sequences: 1 };
            (Subject::Block(mlp(channels)), point, median, 0.0)
        };
        let wanted = Load::Prefill {
            tokens: 8,
            sequences: 1,
        };
        let mut rows = vec![
            row(64, 4, 1.0),
            row(64, 8, 2.0),
            row(96, 4, 9.0),
            row(128, 4, 3.0),
        ];
        // Without a line, what it has itself says what is missing.
        let alone = Times::new(&table(&rows)).unwrap();
        let message = alone.block(&mlp(96), wanted).unwrap_err().to_string();
        assert!(message.contains("prompts of tokens 4 to 4, but 8"), "{message}");
        rows.push(row(128, 8, 4.0));
        let times = Times::new(&table(&rows)).unwrap();
        assert_eq!(times.block(&mlp(96), wanted).unwrap().value, 3.0);
        let measured = Load::Prefill {
            tokens: 4,
            sequences: 1,
        };
        assert_eq!(times.block(&mlp(96), measured).unwrap().value, 9.0);
    }
}
