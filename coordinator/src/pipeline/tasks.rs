//! Which stages are ready, and what their tasks are asked.

use espalier_arch::{Architecture, Variant};
use espalier_proto::task::{
    BlockVariants, Calibrate, DepthOrder, Ingest, Ingested, ParentRef, Profile, Profiled, ScoreBlocks, Sort,
    TaskOutput, TaskSpec,
};
use espalier_search::heterogeneous::{Fitted, Impossible, Question, Reachable, choose};
use espalier_search::running::roomiest;
use espalier_search::solver::Options;
use espalier_search::{
    AbsoluteLimit, Bound, Figures, MemoryModel, Metric, Windows, Workload, points, running_points,
};

use super::context::{Context, block_parameters};
use super::servable::refuse_unservable;
use super::{
    Plan, PlanError, PlannedStage, PlannedTask, ProfileOutcome, Results, Stage, finish, fit, import,
};
use crate::spec::{Engine, JobSpec, Strategy};

/// Rounds of the profile over all shapes, interleaved.
const PROFILE_ROUNDS: usize = 7;
/// Blocks that are scored by one task where the parent is read for each of them: so many fewer times it is read, and a lost
/// task costs so much.
const BLOCKS_TOGETHER: usize = 8;

pub(super) fn plan(spec: &JobSpec, results: &Results) -> Result<Plan, PlanError> {
    let context = Context { spec, results };
    let mut plan = Plan::default();
    let Some(ingested) = context.ingested()? else {
        offer(&mut plan, results, Stage::Ingest, || {
            Ok(vec![task("ingest", TaskSpec::Ingest(ingest(spec)))])
        })?;
        return Ok(plan);
    };
    let spec = &*import::settled(spec, &ingested.architecture);
    let context = Context { spec, results };
    if !results.planned(Stage::Calibrate) {
        refuse_unservable(&context, &ingested.architecture)?;
        finish::refuse_stages(spec, "the parent", ingested.architecture.blocks.len())?;
        refuse_uncountable(&context, &ingested.architecture)?;
    }
    match context.imported()? {
        Some(table) if !results.planned(Stage::Calibrate) => {
            import::refuse_uncovered(&context, &ingested.architecture, table)?;
        }
        Some(_) => {}
        None => offer(&mut plan, results, Stage::Profile, || profile(&context, ingested))?,
    }
    if spec.profile_only {
        if let Some(profiled) = context.profiled()? {
            let cost_table = import::exported(&context, &ingested.architecture, profiled);
            plan.profiled = Some(Box::new(ProfileOutcome { cost_table }));
        }
        return Ok(plan);
    }
    // What cannot be reached is refused before anything is spent on it.
    let profiled = context.profiled()?;
    if let Some(profiled) = profiled
        && !results.planned(Stage::Recover)
    {
        refuse_unreachable(&context, &ingested.architecture, profiled)?;
    }
    offer(&mut plan, results, Stage::Calibrate, || calibrate(ingested))?;
    let importance = context.each(Stage::Calibrate, |output| match output {
        TaskOutput::Calibrate { importance, .. } => Some(importance.clone()),
        _ => None,
    })?;
    if let Some(importance) = importance {
        let sort = Sort {
            parent: ingested.parent.clone(),
            importance,
        };
        offer(&mut plan, results, Stage::Sort, || {
            Ok(vec![task("sort", TaskSpec::Sort(sort))])
        })?;
    }
    if let Some(parent) = context.sorted()? {
        if context.strategies().contains(&Strategy::Heterogeneous) {
            offer(&mut plan, results, Stage::Score, || {
                score(&context, ingested, &parent)
            })?;
        }
        if let Some(profiled) = profiled {
            if context.strategies().contains(&Strategy::Uniform) && spec.search.skip {
                offer(&mut plan, results, Stage::DepthOrder, || {
                    depth_order(&context, ingested, profiled, &parent)
                })?;
            }
            let fitted = fit::advance(&context, ingested, profiled, &parent, &mut plan)?;
            if let Some(fitted) = fitted {
                finish::advance(&context, ingested, profiled, &parent, &fitted, &mut plan)?;
            }
        }
    }
    Ok(plan)
}

/// Adds a stage that no earlier plan named.
pub(super) fn offer(
    plan: &mut Plan,
    results: &Results,
    stage: Stage,
    tasks: impl FnOnce() -> Result<Vec<PlannedTask>, PlanError>,
) -> Result<(), PlanError> {
    if !results.planned(stage) {
        plan.stages.push(PlannedStage {
            stage,
            tasks: tasks()?,
            decision: None,
            reason: None,
        });
    }
    Ok(())
}

pub(super) fn task(name: impl Into<String>, spec: TaskSpec) -> PlannedTask {
    PlannedTask {
        name: name.into(),
        spec,
    }
}

fn ingest(spec: &JobSpec) -> Ingest {
    Ingest {
        parent: spec.parent.clone(),
        train: spec.data.train.clone(),
        validation: spec.data.validation.clone(),
        sequence_tokens: spec.budget.sequence_tokens,
        calibration_tokens: spec.budget.calibration_tokens,
        scoring_tokens: spec.budget.scoring_tokens.max(spec.budget.depth_tokens),
        recovery_tokens: spec.budget.recovery_tokens,
        validation_tokens: spec.budget.validation_tokens,
        seed: spec.seed,
    }
}

fn profile(context: &Context<'_>, ingested: &Ingested) -> Result<Vec<PlannedTask>, PlanError> {
    let workload = context.workload();
    let mut points = points(&workload)?;
    if batches_continuously(context) {
        points.extend(running_points(&workload)?);
    }
    let profile = Profile {
        architecture: ingested.architecture.clone(),
        shapes: context.space().shapes(&ingested.architecture)?,
        points,
        rounds: PROFILE_ROUNDS,
        workload,
        engine: context.spec.target.task_engine(),
        kept: Vec::new(),
    };
    Ok(vec![task("profile", TaskSpec::Profile(profile))])
}

/// Whether a throughput is limited in an engine that takes a new sequence in as soon as one has ended.
fn batches_continuously(context: &Context<'_>) -> bool {
    let target = &context.spec.target;
    target.engine != Engine::Builtin && target.limits.get(Metric::Throughput).is_some()
}

fn calibrate(ingested: &Ingested) -> Result<Vec<PlannedTask>, PlanError> {
    if ingested.calibration.is_empty() {
        let message =
            "data.train: no text is left for calibration, expected at least one sequence; give more text";
        return Err(PlanError::Invalid(message.to_owned()));
    }
    let shards = ingested.calibration.iter().enumerate();
    Ok(shards
        .map(|(index, shard)| {
            let spec = Calibrate {
                parent: ingested.parent.clone(),
                shard: shard.clone(),
            };
            task(format!("shard-{index:02}"), TaskSpec::Calibrate(spec))
        })
        .collect())
}

fn score(
    context: &Context<'_>,
    ingested: &Ingested,
    parent: &ParentRef,
) -> Result<Vec<PlannedTask>, PlanError> {
    let mut scored = Vec::new();
    let all = context.space().all_variants(&ingested.architecture)?;
    for (block, mut variants) in all.into_iter().enumerate() {
        variants.retain(|variant| *variant != Variant::Whole);
        if !variants.is_empty() {
            scored.push(BlockVariants { block, variants });
        }
    }
    if scored.is_empty() {
        let message =
            "search: no block has a smaller variant; allow skip, fewer kv_groups or a finer mlp_grid";
        return Err(PlanError::Invalid(message.to_owned()));
    }
    let together = if context.is_streamed()? {
        BLOCKS_TOGETHER
    } else {
        1
    };
    let mut tasks = Vec::new();
    for blocks in scored.chunks(together) {
        let Some((first, further)) = blocks.split_first() else {
            continue;
        };
        let name = match further.last() {
            Some(last) => format!("blocks-{:03}-{:03}", first.block, last.block),
            None => format!("block-{:03}", first.block),
        };
        let spec = ScoreBlocks {
            parent: parent.clone(),
            block: first.block,
            variants: first.variants.clone(),
            further: further.to_vec(),
            shard: ingested.scoring.clone(),
        };
        tasks.push(task(name, TaskSpec::Score(spec)));
    }
    Ok(tasks)
}

fn depth_order(
    context: &Context<'_>,
    ingested: &Ingested,
    profiled: &Profiled,
    parent: &ParentRef,
) -> Result<Vec<PlannedTask>, PlanError> {
    let spec = DepthOrder {
        parent: parent.clone(),
        remove: layers_to_remove(context, &ingested.architecture, profiled)?,
        shard: ingested.scoring.clone(),
        sequences: sequences_of(context.spec.budget.depth_tokens, ingested),
    };
    Ok(vec![task("depth_order", TaskSpec::DepthOrder(spec))])
}

/// Sequences that hold so many tokens: at least one, at most those of the scoring shard.
fn sequences_of(tokens: u64, ingested: &Ingested) -> usize {
    let each = u64::try_from(ingested.scoring.sequence_tokens.max(1)).unwrap_or(u64::MAX);
    let wanted = usize::try_from(tokens.div_ceil(each)).unwrap_or(usize::MAX);
    wanted.clamp(1, ingested.scoring.sequences.max(1))
}

/// As few whole layers as would meet the limits alone: no point of the uniform grid needs more. At most all
/// but one.
fn layers_to_remove(
    context: &Context<'_>,
    parent: &Architecture,
    profiled: &Profiled,
) -> Result<usize, PlanError> {
    let mut model = context.cost_model(parent, profiled, &espalier_search::Corrections::default())?;
    let limits = context.limits(parent, profiled)?;
    let mut layers: Vec<usize> = parent.blocks.iter().map(|block| block.layer).collect();
    layers.dedup();
    let most = layers.len().saturating_sub(1);
    for count in 1..=most {
        let mut smaller = parent.clone();
        let dropped = layers.get(layers.len() - count..).unwrap_or_default();
        smaller.blocks.retain(|block| !dropped.contains(&block.layer));
        if roomiest(&mut model, &smaller, &limits)?.is_some() {
            // One more, for the margin.
            return Ok((count + 1).min(most));
        }
    }
    Ok(most)
}

/// Refuses limits on memory and parameters that even the smallest variants exceed, before anything is measured.
fn refuse_uncountable(context: &Context<'_>, parent: &Architecture) -> Result<(), PlanError> {
    // Where a throughput is wanted, as few may run together as there is room for.
    let workload = if batches_continuously(context) {
        Workload {
            concurrency: 1,
            ..context.workload()
        }
    } else {
        context.workload()
    };
    // vLLM gives up what lies behind a window. Its pages are not known yet, and can only add.
    let memory = match context.spec.target.engine {
        Engine::Builtin => context.memory(),
        Engine::Vllm => MemoryModel {
            windows: Windows::Prompts { steps_under_way: 1 },
            ..context.memory()
        },
    };
    let counted = |architecture: &Architecture| Figures {
        #[allow(clippy::cast_precision_loss)] // far below 2^53
        block_parameters: Some(block_parameters(architecture) as f64),
        #[allow(clippy::cast_precision_loss)]
        memory_bytes: Some(memory.counted_bytes(architecture, &workload) as f64),
        ..Figures::default()
    };
    let mut smallest = parent.clone();
    smallest.blocks.clear();
    for (block, variants) in parent.blocks.iter().zip(context.space().all_variants(parent)?) {
        // Skip comes last where it is allowed, and the smallest size where it is not.
        let left = variants.last().map(|variant| block.shape.with_variant(variant));
        if let Some(Ok(Some(shape))) = left {
            smallest.blocks.push(espalier_arch::Block {
                layer: block.layer,
                shape,
            });
        }
    }
    let (whole, smallest) = (counted(parent), counted(&smallest));
    for limit in context
        .spec
        .target
        .limits
        .iter()
        .filter(|limit| !limit.metric.is_timed())
    {
        // A share of memory is of what the parent measures, which is more than what can be counted.
        if limit.metric == Metric::Memory && matches!(limit.bound, Bound::ShareOfParent(_)) {
            continue;
        }
        let absolute = limit.resolve(&whole)?;
        let least = smallest.get(limit.metric).unwrap_or(0.0);
        if !absolute.admits(least) {
            let reach = Reachable {
                limit: absolute,
                alone: least,
                together: least,
            };
            return Err(PlanError::Impossible(Box::new(Impossible::of(vec![reach]))));
        }
    }
    Ok(())
}

/// Refuses limits that no candidate is predicted to meet, as soon as the profile is there.
fn refuse_unreachable(
    context: &Context<'_>,
    parent: &Architecture,
    profiled: &Profiled,
) -> Result<(), PlanError> {
    let limits: Vec<AbsoluteLimit> = context.limits(parent, profiled)?;
    let mut model = context.cost_model(parent, profiled, &espalier_search::Corrections::default())?;
    let question = Question {
        parent,
        variants: &context.space().all_variants(parent)?,
        scores: None,
        limits: &limits,
        count: 1,
        distance: 1,
    };
    let any = Options {
        relative_gap: 1.0,
        ..Options::default()
    };
    match choose(&question, &mut model, &any)? {
        Fitted::Found(_) => Ok(()),
        // What is not proven impossible may turn out to be possible once scores say where to look.
        Fitted::Impossible(impossible) if !impossible.proven => Ok(()),
        Fitted::Impossible(impossible) => Err(PlanError::Impossible(Box::new(impossible))),
    }
}
