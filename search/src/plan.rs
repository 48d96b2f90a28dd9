//! Answers to other questions from what was measured once: other limits, workloads and devices, each with the front of
//! quality against the limit, the limit that binds, and what relaxing it would buy.

#[cfg(test)]
mod tests;

use espalier_arch::{Architecture, Candidate, Variant};
use serde::{Deserialize, Serialize};

use crate::heterogeneous::{Choice, Fitted, FrontPoint, Library, Question, Reachable, choose};
use crate::predict::priced;
use crate::running::batches;
use crate::solver::Options;
use crate::{
    AbsoluteLimit, Bound, Corrections, CostKey, CostModel, CostTable, Error, Figures, Limits, MemoryModel,
    Metric, Prediction, Result, Score, Whole, Workload,
};

/// A limit is relaxed by this share to see what that buys.
const RELAXED: f64 = 0.05;
const MIB: f64 = 1024.0 * 1024.0;
const GIB: f64 = 1024.0 * MIB;

/// What was found out about one parent.
#[derive(Debug, Clone)]
pub struct Known {
    /// The model that is compressed.
    pub parent: Architecture,
    /// The variants of each block that were scored, whole first.
    pub variants: Vec<Vec<Variant>>,
    /// What each loses.
    pub scores: Vec<Score>,
}

impl Known {
    /// Of everything that was scored.
    pub fn new(parent: Architecture, scores: Vec<Score>) -> Self {
        let mut variants = vec![vec![Variant::Whole]; parent.blocks.len()];
        for score in &scores {
            if let Some(block) = variants.get_mut(score.block)
                && !block.contains(&score.variant)
            {
                block.push(score.variant.clone());
            }
        }
        Self {
            parent,
            variants,
            scores,
        }
    }
}

/// What a model is to be fitted to.
#[derive(Debug, Clone)]
pub struct Target<'a> {
    /// What blocks cost there.
    pub table: &'a CostTable,
    /// How weights and state are stored there.
    pub memory: MemoryModel,
    /// The parent measured whole there.
    pub whole: Option<Whole<'a>>,
    /// What is asked of the served model.
    pub workload: Workload,
    /// What it must stay inside.
    pub limits: &'a Limits,
    /// Whether lines are drawn on beyond what was measured.
    pub extrapolate: bool,
    /// What checks of candidates that were chosen by the table taught.
    pub corrections: Corrections,
    /// Whether others used the machine while the table was measured.
    pub disturbed: bool,
}

impl Target<'_> {
    /// What should be known of every answer for it.
    fn notes(&self) -> Vec<String> {
        let corrected = (!self.corrections.are_none()).then(|| self.corrected());
        let disturbed = self.disturbed.then(|| {
            "others kept using the machine while the table's blocks were timed: predictions may be too high".to_owned()
        });
        corrected.into_iter().chain(disturbed).collect()
    }

    fn corrected(&self) -> String {
        let Corrections {
            first_token,
            decode,
            turnover,
            memory_bytes,
            ..
        } = self.corrections;
        // Elsewhere the throughput follows from the other two.
        let turnover = if self.table.key.batches_continuously() {
            format!(", throughput / {turnover:.3}")
        } else {
            String::new()
        };
        format!(
            "predictions are corrected by what the job's checks measured under its own workload: time to the first token \
             × {first_token:.3}, decode steps × {decode:.3}{turnover}, memory {:+.1} MiB",
            memory_bytes / MIB
        )
    }
}

/// How one limit stands.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Standing {
    /// The limit.
    pub limit: AbsoluteLimit,
    /// What the choice is predicted to have.
    pub value: f64,
    /// Its standard error.
    pub error: f64,
    /// Share of the limit that is used; 1 is all of it.
    pub used: f64,
    /// Whether relaxing it, and no other, buys the most quality for its share.
    pub binding: bool,
    /// What relaxing it would buy.
    pub price: Option<Price>,
}

/// What relaxing a limit buys: the difference to a choice at the relaxed one.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Price {
    /// The relaxed limit.
    pub relaxed: f64,
    /// Sum of scores there, nats a token.
    pub score: f64,
    /// Nats a token for each unit: a millisecond, a GiB, a token a second, a million parameters.
    pub per_unit: f64,
}

/// A choice, and how it stands.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Chosen {
    /// One variant for each block.
    pub candidate: Candidate,
    /// Sum of its variants' scores, nats a token.
    pub score: f64,
    /// Standard error of the sum.
    pub score_error: f64,
    /// No candidate inside the limits has a lower sum, of the variants that have a price.
    pub score_bound: f64,
    /// What it will cost, with standard errors.
    pub prediction: Prediction,
    /// The largest share of a timed limit that was left as margin.
    pub margin: f64,
    /// Sequences that run together.
    pub running: usize,
    /// Parameters in all.
    pub parameters: u64,
    /// Each limit.
    pub limits: Vec<Standing>,
    /// Which metric the front runs over: the binding limit's.
    pub front_metric: Metric,
    /// Quality against it, the other limits kept.
    pub front: Vec<FrontPoint>,
}

/// The answer for one target.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Answer {
    /// What the times are true for.
    pub target: CostKey,
    /// What was asked of the served model.
    pub workload: Workload,
    /// The limits in their units.
    pub limits: Vec<AbsoluteLimit>,
    /// The parent there: measured where it was under this workload, predicted otherwise.
    pub parent: Figures,
    /// Whether `parent` was measured.
    pub parent_measured: bool,
    /// The choice; none where no candidate is inside.
    pub chosen: Option<Chosen>,
    /// Where there is none, what can be reached.
    pub reachable: Vec<Reachable>,
    /// What should be known of the choice, or of there being none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// Scored variants that the table has no time for, at the most sequences together that it has the parent's for; they are
    /// left out.
    pub unpriced: usize,
}

/// Answers for one target, with a front of `front` points.
///
/// # Errors
/// When the table does not hold what is asked for, the parent has no positions for it, or a limit is a share of what is not
/// known.
pub fn answer(known: &Known, target: &Target<'_>, front: usize, options: &Options) -> Result<Answer> {
    target.workload.has_positions(&known.parent)?;
    let mut model = CostModel::new(
        target.table,
        &target.workload,
        &known.parent,
        target.memory,
        target.whole,
    )?;
    if target.extrapolate {
        model = model.extrapolating()?;
    }
    let (parent, parent_measured) = parent(known, target, &mut model)?;
    // Checks correct what is predicted of smaller models. The parent stands as it was measured, or as sums have it.
    model = model.corrected(&target.corrections, &known.parent)?;
    let (_, unpriced) = priced(&known.parent, &known.variants, &model)?;
    let limits = target.limits.resolve(&parent)?;
    let mut asking = Asking {
        known,
        model,
        options,
    };
    let (chosen, reachable, mut notes) = match asking.fit(&limits)? {
        Fitted::Impossible(impossible) => {
            let notes = impossible.notes();
            (None, impossible.limits, notes)
        }
        Fitted::Found(choices) => match choices.into_iter().next() {
            Some(choice) => {
                let mut notes = choice.notes();
                notes.extend(waiting(choice.running, target.workload.concurrency));
                (Some(asking.chosen(choice, &limits, front)?), Vec::new(), notes)
            }
            None => (None, Vec::new(), Vec::new()),
        },
    };
    notes.extend(target.notes());
    Ok(Answer {
        target: target.table.key.clone(),
        workload: target.workload,
        limits,
        parent,
        parent_measured,
        chosen,
        reachable,
        notes,
        unpriced,
    })
}

/// What to say of requests that wait.
fn waiting(running: usize, concurrency: usize) -> Option<String> {
    (running < concurrency).then(|| {
        format!(
            "{running} of {concurrency} sequences run together and the others wait: --max-num-seqs {running}"
        )
    })
}

/// What the parent itself has there, and whether that was measured. What it was measured to have under another workload
/// says nothing of its times. `model` is left at the most sequences together that the table has a price for.
fn parent(known: &Known, target: &Target<'_>, model: &mut CostModel) -> Result<(Figures, bool)> {
    let measured = target
        .whole
        .filter(|whole| *whole.workload == target.workload)
        .map(|whole| {
            let parameters = known.parent.parameters().in_blocks();
            Figures::measured(whole.measurement, parameters)
        });
    // A share is of the parent under the whole load, not of one that runs fewer together.
    let is_absolute = |limit: crate::Limit| matches!(limit.bound, Bound::Absolute(_));
    let may_be_fewer = measured.is_some() || target.limits.iter().all(is_absolute);
    let mut unmeasured = None;
    for batch in batches(model, target.limits.iter().map(|limit| limit.metric)) {
        let predicted = model
            .run_together(batch)
            .and_then(|()| model.predict(&known.parent));
        match predicted {
            Ok(predicted) => {
                let is_measured = measured.is_some();
                return Ok((measured.unwrap_or(predicted.figures), is_measured));
            }
            Err(error @ (Error::MissingRow { .. } | Error::Extrapolation { .. })) if may_be_fewer => {
                unmeasured.get_or_insert(error);
            }
            Err(error) => return Err(error),
        }
    }
    Err(unmeasured.unwrap_or(Error::NoLimit))
}

struct Asking<'a> {
    known: &'a Known,
    model: CostModel,
    options: &'a Options,
}

impl Asking<'_> {
    fn fit(&mut self, limits: &[AbsoluteLimit]) -> Result<Fitted> {
        let question = Question {
            parent: &self.known.parent,
            variants: &self.known.variants,
            scores: Some(&self.known.scores),
            limits,
            count: 1,
            distance: 1,
        };
        choose(&question, &mut self.model, self.options)
    }

    fn chosen(&mut self, choice: Choice, limits: &[AbsoluteLimit], front: usize) -> Result<Chosen> {
        let mut standings = Vec::with_capacity(limits.len());
        for (place, limit) in limits.iter().enumerate() {
            let value = choice.prediction.figures.get(limit.metric).unwrap_or(0.0);
            standings.push(Standing {
                limit: *limit,
                value,
                error: choice.prediction.errors.get(limit.metric).unwrap_or(0.0),
                used: limit.use_of(value),
                binding: false,
                price: self.price(&choice, limits, place)?,
            });
        }
        // The same share of each: what buys the most of it binds. Where none buys anything, the fullest does.
        let gain = |standing: &Standing| standing.price.map_or(0.0, |price| choice.score - price.score);
        let binding = standings.iter_mut().max_by(|one, other| {
            (gain(one), one.used)
                .partial_cmp(&(gain(other), other.used))
                .unwrap_or(std::cmp::Ordering::Equal)
        });
        let front_metric = binding.map_or(Metric::Latency, |standing| {
            standing.binding = true;
            standing.limit.metric
        });
        self.model.run_together(choice.running)?;
        let others: Vec<AbsoluteLimit> = limits
            .iter()
            .filter(|limit| limit.metric != front_metric)
            .copied()
            .collect();
        let architecture = self.known.parent.with_candidate(&choice.candidate)?;
        Ok(Chosen {
            score: choice.score,
            score_error: self.score_error(&choice.candidate),
            score_bound: choice.score_bound,
            prediction: choice.prediction,
            margin: choice.margin,
            running: choice.running,
            parameters: architecture.parameters().total,
            limits: standings,
            front_metric,
            front: self.front(front_metric, &others, front)?,
            candidate: choice.candidate,
        })
    }

    fn front(&self, metric: Metric, others: &[AbsoluteLimit], points: usize) -> Result<Vec<FrontPoint>> {
        if points == 0 {
            return Ok(Vec::new());
        }
        let known = self.known;
        let library = Library::new(&known.parent, &known.variants, &known.scores, &self.model)?;
        let coarse = Options {
            relative_gap: self.options.relative_gap.max(1e-3),
            ..*self.options
        };
        library.front(metric, others, points, &coarse)
    }

    /// Solves again with one limit relaxed.
    fn price(&mut self, choice: &Choice, limits: &[AbsoluteLimit], place: usize) -> Result<Option<Price>> {
        let mut relaxed = limits.to_vec();
        let Some(limit) = relaxed.get_mut(place) else {
            return Ok(None);
        };
        let before = limit.value;
        limit.value *= if limit.metric.more_is_better() {
            1.0 - RELAXED
        } else {
            1.0 + RELAXED
        };
        let (metric, value) = (limit.metric, limit.value);
        let Fitted::Found(choices) = self.fit(&relaxed)? else {
            return Ok(None);
        };
        let Some(better) = choices.first() else {
            return Ok(None);
        };
        let unit = match metric {
            Metric::Memory => GIB,
            Metric::BlockParameters => 1e6,
            _ => 1.0,
        };
        // Margins follow errors, which differ from choice to choice: what is allowed to be more costs nothing.
        let score = better.score.min(choice.score);
        Ok(Some(Price {
            relaxed: value,
            score,
            per_unit: (choice.score - score) / ((value - before).abs() / unit),
        }))
    }

    /// Scores of different blocks were measured on the same text, but their errors are taken as independent.
    fn score_error(&self, candidate: &Candidate) -> f64 {
        let each = candidate
            .variants
            .iter()
            .enumerate()
            .filter_map(|(block, variant)| {
                let mut scores = self.known.scores.iter();
                scores.find(|score| score.block == block && score.variant == *variant)
            });
        each.map(|score| score.standard_error.powi(2)).sum::<f64>().sqrt()
    }
}
