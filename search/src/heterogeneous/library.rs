//! What is known of one parent on one target, as the solver's problem.

use std::collections::HashMap;
use std::rc::Rc;

use espalier_arch::{Architecture, BlockShape, Candidate, Variant};

use super::margin::{doubt, margin};
use super::reachable::Impossible;
use super::settle::{Learnt, Settled, Wanted};
use super::sums::Sum;
use super::{Choice, Fitted, FrontPoint};
use crate::predict::{Priced, Prices, priced};
use crate::solver::{Options, Solution};
use crate::uniform::aim;
use crate::{AbsoluteLimit, CostModel, Error, Metric, Result, Score};

/// What is known of one parent on one target.
#[derive(Debug)]
pub struct Library<'a> {
    parent: &'a Architecture,
    pub(super) variants: Vec<Vec<Variant>>,
    /// Variants that were left out.
    pub(super) unpriced: usize,
    /// None where only what can be reached is asked.
    pub(super) scores: Option<Vec<Vec<f64>>>,
    prices: Vec<Vec<Rc<Priced>>>,
    base: Priced,
    pub(super) model: &'a CostModel,
}

impl<'a> Library<'a> {
    /// `variants` are those of each block, whole first; the whole block scores 0 unless it was scored. Variants that have no
    /// price with as many sequences together as `model` runs are left out.
    ///
    /// # Errors
    /// When a variant has no score, or a whole block no cost.
    pub fn new(
        parent: &'a Architecture,
        variants: &[Vec<Variant>],
        scores: &[Score],
        model: &'a CostModel,
    ) -> Result<Self> {
        let known: HashMap<(usize, &Variant), f64> = scores
            .iter()
            .map(|score| ((score.block, &score.variant), score.divergence))
            .collect();
        let library = Self::unscored(parent, variants, model)?;
        let mut rows = Vec::with_capacity(library.variants.len());
        for (block, variants) in library.variants.iter().enumerate() {
            let each = variants.iter().map(|variant| score_of(&known, block, variant));
            rows.push(each.collect::<Result<Vec<f64>>>()?);
        }
        Ok(Self {
            scores: Some(rows),
            ..library
        })
    }

    /// The same without scores: only for asking what can be reached.
    ///
    /// # Errors
    /// When a whole block has no cost.
    pub fn unscored(
        parent: &'a Architecture,
        variants: &[Vec<Variant>],
        model: &'a CostModel,
    ) -> Result<Self> {
        let (variants, unpriced) = priced(parent, variants, model)?;
        let mut known = Prices::new(model);
        let mut prices = Vec::with_capacity(variants.len());
        for (block, variants) in parent.blocks.iter().zip(&variants) {
            let each = variants.iter().map(|variant| {
                let left = block.shape.with_variant(variant).map_err(Error::Shape)?;
                known.of(left.as_ref())
            });
            prices.push(each.collect::<Result<Vec<_>>>()?);
        }
        Ok(Self {
            parent,
            variants,
            unpriced,
            scores: None,
            prices,
            base: model.base_price(parent)?,
            model,
        })
    }

    /// Up to `count` candidates that differ from each other in at least `distance` blocks, the best first.
    ///
    /// A timed limit that asks for a confidence is kept with that. The others are aimed at with a margin: two standard
    /// errors of the prediction, but at least [`super::LEAST_MARGIN`] and at most [`super::MOST_MARGIN`] of the limit;
    /// where only the bare limit can be met, it is aimed at without margin, and the check decides.
    ///
    /// # Errors
    /// When the problem is not well formed.
    pub fn fit(
        &self,
        limits: &[AbsoluteLimit],
        count: usize,
        distance: usize,
        options: &Options,
    ) -> Result<Fitted> {
        let coarse = Options {
            relative_gap: options.relative_gap.max(1e-3),
            ..*options
        };
        let bare = self.sums(limits, 0.0);
        let mut learnt = Learnt::new(&bare, &self.whole());
        let first = match self.settle(&bare, &mut learnt, Wanted::ONE, &coarse)? {
            Settled::Found(solutions) => self.choices(solutions, limits, 0.0, &learnt)?,
            Settled::Nothing { closest, proven } => {
                let weigh = |choice: &[usize]| bare.iter().map(|sum| sum.share(choice)).fold(0.0, f64::max);
                return Ok(Fitted::Impossible(Impossible {
                    limits: self.reachable(limits, &self.with_attention(closest, weigh)),
                    proven,
                    attention: learnt.attention,
                    unmeasured: None,
                }));
            }
        };
        let spare = first
            .first()
            .map_or(0.0, |choice| margin(&choice.prediction, limits));
        let spares = match spare {
            _ if self.scores.is_none() => &[][..],
            0.0 => &[0.0],
            _ => &[spare, 0.0],
        };
        for &spare in spares {
            let sums = self.sums(limits, spare);
            let settled = self.settle(&sums, &mut learnt, Wanted { count, distance }, options)?;
            if let Settled::Found(solutions) = settled {
                return Ok(Fitted::Found(self.choices(solutions, limits, spare, &learnt)?));
            }
        }
        Ok(Fitted::Found(first))
    }

    /// The least score inside `others` at `count` values of one metric, evenly from the best that can be reached to the
    /// parent's own (of one point, at that); points no better than a cheaper one are left out.
    ///
    /// # Errors
    /// When the problem is not well formed.
    #[allow(clippy::cast_precision_loss)] // a handful of points
    pub fn front(
        &self,
        metric: Metric,
        others: &[AbsoluteLimit],
        count: usize,
        options: &Options,
    ) -> Result<Vec<FrontPoint>> {
        let whole = self.model.predict(self.parent)?.figures.get(metric);
        let whole = AbsoluteLimit::new(metric, whole.unwrap_or(0.0));
        let own = self.model.sum_limit(&whole);
        let alone = self.reachable(&[whole], &self.whole());
        let least = alone
            .iter()
            .map(|reach| self.model.figure(metric, reach.alone))
            .sum::<f64>();
        let mut learnt = Learnt::new(&self.sums(others, 0.0), &self.whole());
        let mut front: Vec<FrontPoint> = Vec::with_capacity(count);
        for step in 0..count {
            let share = if count > 1 {
                step as f64 / (count as f64 - 1.0)
            } else {
                1.0
            };
            let limit = AbsoluteLimit::new(metric, self.model.figure(metric, least + (own - least) * share));
            let limits = [others, &[limit]].concat();
            let sums = self.sums(&limits, 0.0);
            let Settled::Found(solutions) = self.settle(&sums, &mut learnt, Wanted::ONE, options)? else {
                continue;
            };
            for choice in self.choices(solutions, &limits, 0.0, &learnt)? {
                if front.last().is_none_or(|last| choice.score < last.score) {
                    front.push(FrontPoint {
                        value: choice.prediction.figures.get(metric).unwrap_or(limit.value),
                        error: choice.prediction.errors.get(metric).unwrap_or(0.0),
                        score: choice.score,
                    });
                }
            }
        }
        Ok(front)
    }

    /// Every combination that has to hold, with `spare` of the timed limits that ask for no confidence left.
    pub(super) fn sums(&self, limits: &[AbsoluteLimit], spare: f64) -> Vec<Sum> {
        let cones = limits
            .iter()
            .flat_map(|limit| self.model.cones(&aim(limit, spare)));
        cones
            .map(|cone| Sum::new(&cone, &self.base, &self.prices))
            .collect()
    }

    /// The choice of the first variant everywhere.
    fn whole(&self) -> Vec<usize> {
        vec![0; self.variants.len()]
    }

    /// Whether the block keeps attention as this variant.
    pub(super) fn keeps_attention(&self, block: usize, variant: usize) -> bool {
        let shape = self.parent.blocks.get(block).map(|block| &block.shape);
        let variant = self
            .variants
            .get(block)
            .and_then(|variants| variants.get(variant));
        matches!(shape, Some(BlockShape::Attention(_))) && variant != Some(&Variant::Skip)
    }

    /// Whether the engine needs attention, and the choice has none.
    pub(super) fn lacks_attention(&self, chosen: &[usize]) -> bool {
        let mut each = chosen.iter().enumerate();
        self.model.needs_attention() && !each.any(|(block, &variant)| self.keeps_attention(block, variant))
    }

    fn choices(
        &self,
        solutions: Vec<Solution>,
        limits: &[AbsoluteLimit],
        spare: f64,
        learnt: &Learnt,
    ) -> Result<Vec<Choice>> {
        let each = solutions.into_iter().map(|solution| {
            let candidate = self.candidate(&solution.chosen);
            let prediction = self.model.predict(&self.parent.with_candidate(&candidate)?)?;
            Ok(Choice {
                candidate,
                score: solution.cost,
                score_bound: solution.lower_bound,
                gap: solution.gap,
                margin: spare.max(doubt(&prediction, limits)),
                prediction,
                running: self.model.running(),
                attention_kept: learnt.attention,
                unmeasured: None,
            })
        });
        each.collect()
    }

    fn candidate(&self, chosen: &[usize]) -> Candidate {
        let variants = self.variants.iter().zip(chosen);
        Candidate {
            variants: variants
                .map(|(block, &index)| block.get(index).cloned().unwrap_or(Variant::Whole))
                .collect(),
        }
    }
}

fn score_of(known: &HashMap<(usize, &Variant), f64>, block: usize, variant: &Variant) -> Result<f64> {
    match known.get(&(block, variant)) {
        Some(score) => Ok(*score),
        None if *variant == Variant::Whole => Ok(0.0),
        None => Err(Error::MissingScore {
            block,
            variant: variant.to_string(),
        }),
    }
}
