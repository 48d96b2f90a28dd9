//! Profile in vLLM: every stack at every point, in turns, until the scatter is known.
//!
//! As many engines are open at once as fit the memory; where they do not, they are timed group by group, each round
//! over all engines of a group in turn.

use std::ops::Range;
use std::time::Instant;

use espalier_proto::task::{Profile, Profiled};
use espalier_search::{CostRow, Point, Subject};

use super::host::{Host, Step};
use super::models::{Load, config};
use super::protocol::{DeviceSource, Model, Steps};
use super::stacks::{Dictionary, Stack, row, standard_error};
use super::{Error, InVllm};
use crate::Result;
use crate::engine::stacks::last_level_cache_bytes;
use crate::engine::statistics::median;
use crate::engine::{Engine, Opened, Series, Subject as Measured, lossless};

/// Rounds at the least, and how many times as many at the most while times scatter.
const LEAST_ROUNDS: usize = 3;
const LONGER: usize = 3;
/// The standard error of a time, as a share of it, with which it is known: by the clock, and a GPU's own.
const KNOWN: f64 = 0.02;
const KNOWN_OF_DEVICE: f64 = 0.005;
/// Steps timed together.
const PREFILL_STEPS: usize = 3;
const DECODE_STEPS: usize = 8;
/// Steps that a GPU's own time and warming up take beside.
const DEVICE_STEPS: usize = 12;
/// What an engine takes beside its weights, keys and values: activations, and what vLLM keeps for each.
const ENGINE_BYTES: u64 = 64 << 20;

/// Times of one stack at one point, by round, milliseconds.
#[derive(Debug, Clone, Default)]
struct Timed {
    /// By the clock.
    wall: Vec<f64>,
    /// A GPU's own; none of a processor.
    device: Vec<f64>,
    source: Option<DeviceSource>,
}

impl Timed {
    /// Whether it is known well enough after so many rounds at the least. Where rows are the device's own time nobody
    /// waits for the clock's, which others disturb.
    fn is_known(&self, rounds: usize) -> bool {
        let (times, least, known) = if self.device.is_empty() {
            (&self.wall, rounds, KNOWN)
        } else {
            (&self.device, LEAST_ROUNDS, KNOWN_OF_DEVICE)
        };
        times.len() >= least && standard_error(times) <= known * median(times)
    }

    fn insert(&mut self, steps: &Steps) {
        self.wall.push(median(&steps.wall_ms));
        self.device.extend(steps.device_ms.as_deref().map(median));
        self.source = steps.device_source;
    }
}

/// `[point][stack]`.
type Times = Vec<Vec<Timed>>;

pub(super) fn run(engine: &mut InVllm<'_>, task: &Profile) -> Result<Profiled> {
    let rounds = task.rounds.max(LEAST_ROUNDS);
    let cache_bytes = engine.helper.hello.cache_bytes;
    let cache_bytes = cache_bytes.unwrap_or_else(last_level_cache_bytes);
    let dictionary = Dictionary::of(task, engine.precision, cache_bytes)?;
    let load = load_of(task);
    engine.surroundings.progress(0, rounds, "rounds", &|| {
        format!(
            "{} models tell what {} shapes cost",
            dictionary.stacks.len(),
            task.shapes.len()
        )
    })?;
    let parent = engine.open(&Measured::Shape(&task.architecture), &task.workload)?;
    let mut series = Series::new(&task.workload);
    let mut times: Times = vec![vec![Timed::default(); dictionary.stacks.len()]; task.points.len()];
    let mut together = dictionary.stacks.len();
    let mut first = 0;
    while first < dictionary.stacks.len() {
        let fitting = fitting(engine, dictionary.stacks.get(first..).unwrap_or_default(), load);
        let group = first..first + fitting.min(together).max(1).min(dictionary.stacks.len() - first);
        let timed = open_group(engine, &dictionary, group.clone(), load)
            .and_then(|()| time_group(engine, task, parent, group.clone(), &mut series, &mut times));
        match timed {
            Ok(()) => first = group.end,
            Err(crate::Error::Vllm(Error::OutOfMemory { reason })) if group.len() > 1 => {
                tracing::warn!(
                    engines = group.len(),
                    reason,
                    "there is no room for so many engines at once"
                );
                together = group.len() / 2;
                forget(&mut times, group.clone());
            }
            Err(error) => return Err(error),
        }
        close_group(engine, group)?;
    }
    // A table's rows are all of one clock.
    let by_device = times.iter().flatten().any(|times| times.source.is_some());
    let rows: Vec<Vec<CostRow>> = task
        .points
        .iter()
        .zip(&times)
        .map(|(point, times)| rows(&dictionary, *point, times, by_device))
        .collect::<std::result::Result<_, Error>>()?;
    Ok(Profiled {
        key: engine.cost_key(task.architecture.hidden),
        rows: rows.concat(),
        parent: series.measurement(engine.memory_bytes(parent)),
        memory: engine.memory_of(parent),
    })
}

/// Rounds over the parent and all engines of a group, until their times are known or as often as is worth it.
fn time_group(
    engine: &mut InVllm<'_>,
    task: &Profile,
    parent: Opened,
    group: Range<usize>,
    series: &mut Series,
    times: &mut Times,
) -> Result<()> {
    let rounds = task.rounds.max(LEAST_ROUNDS);
    let mut round = 0;
    let began = Instant::now();
    while round < rounds || (round < rounds * LONGER && !is_known(times, group.clone(), rounds)) {
        series.push(engine.run(parent)?);
        time_round(engine, task, group.clone(), round, times)?;
        round += 1;
        let each = began.elapsed().as_secs_f64() / lossless(round);
        engine
            .surroundings
            .progress(round, round.max(rounds), "rounds", &|| {
                format!(
                    "models {} to {}, {each:.0} s a round, at most {} rounds",
                    group.start + 1,
                    group.end,
                    rounds * LONGER
                )
            })?;
    }
    Ok(())
}

/// Forgets what was timed of a group that was too large.
fn forget(times: &mut Times, group: Range<usize>) {
    let stacks = times.iter_mut().flat_map(|stacks| stacks.get_mut(group.clone()));
    stacks.flatten().for_each(|timed| *timed = Timed::default());
}

/// What times at a point say. Where a device tells its own, rows are of that, and what the host needs stands beside them.
fn rows(
    dictionary: &Dictionary,
    point: Point,
    times: &[Timed],
    by_device: bool,
) -> std::result::Result<Vec<CostRow>, Error> {
    let of =
        |which: fn(&Timed) -> &Vec<f64>| times.iter().map(|times| which(times).clone()).collect::<Vec<_>>();
    if !by_device {
        return dictionary.rows(point, &of(|times| &times.wall));
    }
    let first = times.first().and_then(|times| times.source);
    if first.is_none() || times.iter().any(|times| times.source != first) {
        return Err(Error::Engine {
            reason: format!(
                "at {point} it replays a graph for some stacks and runs single kernels for others, whose times do not \
                 compare; give a batch that it captures"
            ),
        });
    }
    let mut rows = dictionary.rows(point, &of(|times| &times.device))?;
    let steps = dictionary.stacks.iter().zip(times).map(|(stack, times)| Step {
        blocks: lossless(stack.architecture.blocks.len()),
        device: median(&times.device),
        wall: median(&times.wall),
        error: standard_error(&times.wall),
    });
    let repeats = times.iter().map(|times| times.wall.len()).min().unwrap_or(0);
    if let Some(host) = Host::of(&steps.collect::<Vec<_>>()) {
        let parts = [
            (Subject::HostFloor, host.floor),
            (Subject::HostBlock, host.block),
            (Subject::HostAlone, host.alone),
        ];
        rows.extend(parts.map(|(subject, cost)| row(subject, point, cost, repeats)));
    }
    Ok(rows)
}

/// What every stack has to hold: all points, and the steps that decode on from them.
fn load_of(task: &Profile) -> Load {
    let mut load = Load {
        context: 1,
        sequences: 1,
        prompt: 1,
    };
    for point in &task.points {
        match *point {
            Point::Prefill { tokens, sequences } => {
                load.context = load.context.max(tokens + 1);
                load.prompt = load.prompt.max(tokens);
                load.sequences = load.sequences.max(sequences);
            }
            Point::Decode { context, sequences } => {
                load.context = load.context.max(context + DECODE_STEPS + DEVICE_STEPS);
                load.sequences = load.sequences.max(sequences);
            }
        }
    }
    load
}

/// How many of the first of these models fit half of the memory together.
fn fitting(engine: &InVllm<'_>, stacks: &[Stack], load: Load) -> usize {
    let block_tokens = engine.helper.hello.block_tokens.multiple;
    let hello = &engine.helper.hello;
    let free = match hello.platform.as_str() {
        "cpu" => available_bytes().unwrap_or(hello.memory_bytes),
        _ => hello.memory_bytes,
    };
    let room = free.min(hello.memory_bytes) / 2;
    let mut taken = 0_u64;
    let fits = stacks.iter().take_while(|stack| {
        let architecture = &stack.architecture;
        taken = taken
            .saturating_add(architecture.weight_bytes(engine.precision))
            .saturating_add(load.kv_bytes(architecture, engine.precision, block_tokens))
            .saturating_add(ENGINE_BYTES);
        taken <= room
    });
    fits.count()
}

/// What the system can give; none where it does not say.
fn available_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kibibytes: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kibibytes.saturating_mul(1024))
}

fn name(stack: usize) -> String {
    format!("stack-{stack}")
}

fn open_group(
    engine: &mut InVllm<'_>,
    dictionary: &Dictionary,
    group: Range<usize>,
    load: Load,
) -> Result<()> {
    for index in group {
        let Some(stack) = dictionary.stacks.get(index) else {
            continue;
        };
        let total = dictionary.stacks.len();
        engine
            .surroundings
            .progress(index, total, "models", &|| "opening".to_owned())?;
        let model = Model::Config(config(&stack.architecture, engine.precision, load.context)?);
        engine.open_model(&name(index), model, &stack.architecture, load)?;
    }
    Ok(())
}

/// Closes those of the group that are open.
fn close_group(engine: &mut InVllm<'_>, group: Range<usize>) -> Result<()> {
    for index in group {
        match engine.helper.close(&name(index), engine.surroundings) {
            Ok(()) | Err(crate::Error::Vllm(Error::NotOpen { .. })) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Every engine of the group at every point where its time is not known; every other round in the opposite order.
fn time_round(
    engine: &mut InVllm<'_>,
    task: &Profile,
    group: Range<usize>,
    round: usize,
    times: &mut Times,
) -> Result<()> {
    let rounds = task.rounds.max(LEAST_ROUNDS);
    for (point, times) in task.points.iter().zip(times) {
        let forth: Vec<usize> = group.clone().collect();
        let order: Vec<usize> = if round.is_multiple_of(2) {
            forth
        } else {
            forth.into_iter().rev().collect()
        };
        for stack in order {
            let Some(times) = times.get_mut(stack).filter(|times| !times.is_known(rounds)) else {
                continue;
            };
            times.insert(&time_steps(engine, &name(stack), *point)?);
        }
    }
    Ok(())
}

/// Several steps at a point, on a machine that is not busy where it is the host's processors that compute.
fn time_steps(engine: &mut InVllm<'_>, name: &str, point: Point) -> Result<Steps> {
    let repeats = match point {
        Point::Prefill { .. } => PREFILL_STEPS,
        // The context grows to the point's in the middle of the repeats, from one token at the least.
        Point::Decode { context, .. } if context <= 3 => 1,
        Point::Decode { context, .. } => DECODE_STEPS.min(2 * (context - 3)),
    };
    let point = match point {
        Point::Decode { context, sequences } => Point::Decode {
            context: context.max(2),
            sequences,
        },
        prefill => prefill,
    };
    loop {
        let steps = engine.helper.steps(name, point, repeats, engine.surroundings)?;
        if steps.device_ms.is_some() || !engine.retakes(steps.busy) {
            return Ok(steps);
        }
    }
}

/// Whether every time of the group's models is known well enough.
fn is_known(times: &Times, group: Range<usize>, rounds: usize) -> bool {
    let of_group = times
        .iter()
        .flat_map(|stacks| stacks.get(group.clone()).unwrap_or_default());
    of_group.into_iter().all(|times| times.is_known(rounds))
}
