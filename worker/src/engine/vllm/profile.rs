//! Profile in vLLM: every stack at every point, in turns, until the scatter is known.
//!
//! As many engines are open at once as fit the memory; where they do not, they are timed group by group, each round
//! over all engines of a group in turn.

use std::ops::Range;

use espalier_proto::task::{Profile, Profiled};
use espalier_search::statistics::{median, standard_error};
use espalier_search::{CostRow, Point, Subject};

use super::beside::Beside;
use super::contention::What;
use super::host::{Host, Step};
use super::models::{Load, config};
use super::protocol::{DeviceSource, Model, Steps};
use super::stacks::{Dictionary, Stack, row};
use super::{Error, InVllm};
use crate::Result;
use crate::engine::lossless;
use crate::engine::stacks::last_level_cache_bytes;

/// Rounds at the least, and how many times as many at the most while times scatter.
pub(super) const LEAST_ROUNDS: usize = 3;
pub(super) const LONGER: usize = 3;
/// The standard error of a time, as a share of it, with which it is known: by the clock, and a GPU's own.
const KNOWN: f64 = 0.02;
const KNOWN_OF_DEVICE: f64 = 0.005;
/// Steps timed together.
const PREFILL_STEPS: usize = 3;
/// Odd, so that the one in the middle finds just the point's context in the cache.
const DECODE_STEPS: usize = 9;
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
    /// Whether times by the clock were disturbed, which they only are beside a GPU's own.
    disturbed: bool,
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

    /// Of times that others disturbed a GPU's own counts, and the clock's until there is a better one.
    fn insert(&mut self, steps: &Steps, undisturbed: bool) {
        self.device.extend(steps.device_ms.as_deref().map(median));
        self.source = steps.device_source;
        if undisturbed && self.disturbed {
            self.wall.clear();
            self.disturbed = false;
        }
        if undisturbed || (self.source.is_some() && (self.disturbed || self.wall.is_empty())) {
            self.wall.push(median(&steps.wall_ms));
            self.disturbed = !undisturbed;
        }
    }

    fn taken(&self) -> usize {
        self.wall.len().max(self.device.len())
    }
}

/// `[point][stack]`.
type Times = Vec<Vec<Timed>>;

pub(super) fn run(engine: &mut InVllm<'_>, task: &Profile) -> Result<Profiled> {
    let rounds = task.rounds.max(LEAST_ROUNDS);
    let cache_bytes = engine.helper.hello.cache_bytes;
    let cache_bytes = cache_bytes.unwrap_or_else(last_level_cache_bytes);
    let mut dictionary = Dictionary::of(task, engine.precision, cache_bytes)?;
    let load = load_of(task, engine.helper.hello.steps_under_way());
    let mut times: Times = vec![vec![Timed::default(); dictionary.stacks.len()]; task.points.len()];
    tell(engine, &times, rounds, &|| {
        format!(
            "{} models tell what {} shapes cost",
            dictionary.stacks.len(),
            task.shapes.len()
        )
    })?;
    let mut parent = Beside::open(engine, task)?;
    if !parent.had_room() {
        dictionary.leave_parent_out();
        times
            .iter_mut()
            .for_each(|stacks| stacks.truncate(dictionary.stacks.len()));
    }
    let mut together = dictionary.stacks.len();
    let mut first = 0;
    while first < dictionary.stacks.len() {
        let fitting = fitting(engine, dictionary.stacks.get(first..).unwrap_or_default(), load);
        let group = first..first + fitting.min(together).max(1).min(dictionary.stacks.len() - first);
        let timed = open_group(engine, &dictionary, group.clone(), load, &times, rounds)
            .and_then(|()| time_group(engine, task, group.clone(), &mut parent, &mut times));
        match timed {
            Ok(()) => {
                first = group.end;
                if first < dictionary.stacks.len() {
                    close_group(engine, group)?;
                }
            }
            Err(error) if group.len() > 1 && is_for_want_of_memory(&error, engine) => {
                tracing::warn!(
                    engines = group.len(),
                    %error,
                    "there is no room for so many engines at once"
                );
                together = group.len() / 2;
                forget(&mut times, group);
                engine.begin_anew()?;
            }
            Err(error) if parent.is_open() && is_for_want_of_memory(&error, engine) => {
                tracing::warn!(%error, "there is no room for one engine beside the parent");
                forget(&mut times, group);
                engine.begin_anew()?;
                parent.leave(engine, rounds)?;
            }
            Err(error) => return Err(error),
        }
    }
    let disturbed = times.iter().flatten().any(|times| times.disturbed);
    if disturbed {
        tracing::warn!("others used the processors whenever some of the host's times were taken");
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
        memory: parent.memory,
        parent: parent.told(),
        reused_rows: 0,
        disturbed,
    })
}

/// Whether fewer engines at a time may do. The system's way to say that there is no memory is to kill the process, and
/// not everywhere does it count whom.
fn is_for_want_of_memory(error: &crate::Error, engine: &InVllm<'_>) -> bool {
    match error {
        crate::Error::Vllm(Error::OutOfMemory { .. }) => true,
        crate::Error::Vllm(Error::Ended { .. }) => engine.helper.was_killed(),
        _ => false,
    }
}

/// Rounds over the parent and all engines of a group, until their times are known or as often as is worth it.
///
/// # Errors
/// Those of timing; [`crate::Error::TooNoisy`] where others leave too few times undisturbed.
fn time_group(
    engine: &mut InVllm<'_>,
    task: &Profile,
    group: Range<usize>,
    parent: &mut Beside,
    times: &mut Times,
) -> Result<()> {
    let rounds = task.rounds.max(LEAST_ROUNDS);
    let mut round = 0;
    while round < rounds
        || (round < rounds * LONGER && (parent.is_unknown() || !is_known(times, group.clone(), rounds)))
    {
        parent.run(engine)?;
        time_round(engine, task, group.clone(), round, times)?;
        round += 1;
        if round >= LEAST_ROUNDS {
            let points = task.points.iter().map(|point| What::Steps(*point));
            for what in points.chain([What::Workload]) {
                engine.contention.expect_quiet(what)?;
            }
        }
    }
    for (point, stacks) in task.points.iter().zip(times) {
        let mut group = stacks.get(group.clone()).unwrap_or_default().iter();
        if group.any(|timed| timed.taken() < LEAST_ROUNDS) {
            return Err(engine.contention.too_noisy(What::Steps(*point)));
        }
    }
    if parent.is_unknown() {
        return Err(engine.contention.too_noisy(What::Workload));
    }
    Ok(())
}

/// Says how many times were taken, and of how many as far as is known: those of the rounds asked for, and one more
/// where a time is not known by then.
fn tell(engine: &InVllm<'_>, times: &Times, rounds: usize, note: &dyn Fn() -> String) -> Result<()> {
    let all = || times.iter().flatten();
    let due = |timed: &Timed| match timed.is_known(rounds) {
        true => timed.taken(),
        false => rounds.max(timed.taken() + 1).min(rounds * LONGER),
    };
    let (done, total) = (all().map(Timed::taken).sum(), all().map(due).sum());
    engine.surroundings.progress(done, total, "times", note)
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
fn load_of(task: &Profile, steps: usize) -> Load {
    let mut load = Load {
        context: 1,
        sequences: 1,
        prompt: 1,
        steps,
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
    let room = engine.room_bytes() / 2;
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

fn name(stack: usize) -> String {
    format!("stack-{stack}")
}

fn open_group(
    engine: &mut InVllm<'_>,
    dictionary: &Dictionary,
    group: Range<usize>,
    load: Load,
    times: &Times,
    rounds: usize,
) -> Result<()> {
    for index in group {
        let Some(stack) = dictionary.stacks.get(index) else {
            continue;
        };
        let all = dictionary.stacks.len();
        tell(engine, times, rounds, &|| {
            format!("opening model {} of {all}", index + 1)
        })?;
        let model = Model::Config(config(&stack.architecture, engine.precision, load.context)?);
        engine.open_model(&name(index), model, &stack.architecture, load)?;
    }
    Ok(())
}

/// Closes those of the group that are open. What they told stands, whatever comes of that.
fn close_group(engine: &mut InVllm<'_>, group: Range<usize>) -> Result<()> {
    for index in group {
        engine.close_engine(&name(index))?;
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
    for (place, point) in task.points.iter().enumerate() {
        let forth: Vec<usize> = group.clone().collect();
        let order: Vec<usize> = if round.is_multiple_of(2) {
            forth
        } else {
            forth.into_iter().rev().collect()
        };
        for stack in order {
            let timed = times.get_mut(place).and_then(|stacks| stacks.get_mut(stack));
            let Some(timed) = timed.filter(|timed| !timed.is_known(rounds)) else {
                continue;
            };
            let (steps, undisturbed) = time_steps(engine, &name(stack), *point)?;
            timed.insert(&steps, undisturbed);
            tell(engine, times, rounds, &|| {
                format!(
                    "round {} over models {} to {}, {rounds} to {} rounds",
                    round + 1,
                    group.start + 1,
                    group.end,
                    rounds * LONGER
                )
            })?;
        }
    }
    Ok(())
}

/// Several steps at a point, and whether others let them be. Where a GPU tells its own time others are not waited for.
fn time_steps(engine: &mut InVllm<'_>, name: &str, point: Point) -> Result<(Steps, bool)> {
    let what = What::Steps(point);
    let repeats = match point {
        Point::Prefill { .. } => PREFILL_STEPS,
        // The context grows to the point's in the middle of the repeats, from one token at the least.
        Point::Decode { context, .. } if context <= 3 => 1,
        Point::Decode { context, .. } => DECODE_STEPS.min(2 * (context - 3) + 1),
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
        if steps.device_ms.is_some() {
            let undisturbed = engine.contention.is_quiet(steps.busy);
            return Ok((steps, undisturbed));
        }
        if let Some(undisturbed) = engine.judge(what, steps.busy)? {
            return Ok((steps, undisturbed));
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
