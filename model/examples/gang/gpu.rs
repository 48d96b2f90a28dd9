//! `gang gpu`: two GPUs over NCCL against one: scaling of replicas, losses of stages, a model whose training state no
//! single one of them holds, a rank that is lost. With GANG_DEVICE=0 both ranks are on one GPU, where NCCL lets them:
//! times say nothing then, losses do.

use serde_json::{Value, json};

use crate::Result;
use crate::disturb::disturb;
use crate::launch::{Running, Told, apart, whole};
use crate::plan::{Fall, Kind, Plan};

/// How much faster two replicas must be than one rank.
const SCALING: f64 = 1.8;
/// How far losses may be from one rank's, relative.
const LOSS_BOUND: f64 = 1e-3;
/// Until a gang goes on after a rank was lost.
const REFORMED_SECONDS: f64 = 15.0;
/// How far the last loss may be from an undisturbed run's, relative.
const DISTURBED_BOUND: f64 = 1e-3;
/// Steps before times count.
const WARM_UP: usize = 10;

fn llama(
    hidden: usize,
    layers: usize,
    heads: usize,
    groups: usize,
    ffn: usize,
    vocabulary: usize,
    tied: bool,
) -> Value {
    json!({
        "model_type": "llama", "hidden_act": "silu", "hidden_size": hidden, "intermediate_size": ffn,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": groups,
        "vocab_size": vocabulary, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 1e5,
        "tie_word_embeddings": tied,
    })
}

fn plan(stages: usize, replicas: usize, student: Value, steps: u32) -> Plan {
    Plan {
        kind: Kind::Cuda,
        stages,
        replicas,
        student,
        parent: None,
        steps,
        learning_rate: 1e-4,
        micro_batches: replicas,
        sequences: 8,
        tokens: 1024,
        period: 4,
        home: None,
        resume: None,
        generation: 1,
        silence_ms: 20_000,
        fall: None,
    }
}

pub(crate) fn run(parts: &[&str]) -> Result<()> {
    let all = ["scaling", "stages", "replicas", "large", "disturbed"];
    if let Some(unknown) = parts.iter().find(|part| !all.contains(part)) {
        return Err(format!("no part {unknown:?}, expected some of {all:?}").into());
    }
    let wanted = |part: &str| parts.is_empty() || parts.contains(&part);
    let mut holds = true;
    for (part, check) in [
        ("scaling", scaling as fn() -> Result<bool>),
        ("stages", stages),
        ("replicas", replicas),
        ("large", large),
        ("disturbed", disturbed),
    ] {
        if wanted(part) {
            holds &= check().unwrap_or_else(|failure| {
                println!("FAIL {part}: {failure}");
                false
            });
        }
    }
    match holds {
        true => Ok(()),
        false => Err("gang gpu does not hold".into()),
    }
}

/// Milliseconds of a step, the median once warm.
fn median_ms(told: &Told) -> f64 {
    let mut seconds: Vec<f64> = told.seconds.iter().skip(WARM_UP).copied().collect();
    seconds.sort_by(f64::total_cmp);
    seconds
        .get(seconds.len() / 2)
        .map_or(f64::NAN, |seconds| seconds * 1e3)
}

fn verdict(holds: bool) -> &'static str {
    if holds { "ok  " } else { "FAIL" }
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}

/// SmolLM2-135M's shape, 8 x 1024 tokens on each rank.
fn scaling() -> Result<bool> {
    let shape = || llama(576, 30, 9, 3, 1536, 49_152, true);
    let (mut alone, mut both) = (f64::INFINITY, f64::INFINITY);
    for round in 0..2 {
        let one = whole(&plan(1, 1, shape(), 60))?;
        let two = whole(&plan(1, 2, shape(), 60))?;
        println!(
            "     round {round}: one {:.2} ms, {:.2} GiB; two {:.2} ms, {:.2} GiB each",
            median_ms(&one),
            one.memory.first().map_or(0.0, |memory| gib(memory.1)),
            median_ms(&two),
            two.memory.first().map_or(0.0, |memory| gib(memory.1)),
        );
        alone = alone.min(median_ms(&one));
        both = both.min(median_ms(&two));
    }
    let scaling = 2.0 * alone / both;
    let tokens = |ranks: f64, ms: f64| ranks * 8192.0 / ms * 1e3;
    let holds = scaling >= SCALING;
    println!(
        "{} two replicas, 135M, 8 x 1024 each: {scaling:.2} x one GPU ({:.0} and {:.0} tokens/s), at least {SCALING}",
        verdict(holds),
        tokens(2.0, both),
        tokens(1.0, alone)
    );
    Ok(holds)
}

/// Two stages beside one rank: a 1.2B Llama, 4 micro-batches of 1 x 2048 a step, whose head is its embedding, which
/// both stages hold; and the 135M shape with a head of its own, where nothing is added up in another order, from text
/// and from a parent that is cut into stages, too.
fn stages() -> Result<bool> {
    let large = llama(2048, 16, 32, 8, 8192, 128_256, true);
    let small = llama(576, 30, 9, 3, 1536, 49_152, false);
    let parent = llama(768, 20, 12, 4, 2048, 49_152, true);
    let layers = (2, 1);
    let mut holds = beside_one("1.2B, tied", &large, None, layers, 2048, 50)?;
    holds &= beside_one("135M, untied", &small, None, layers, 1024, 50)?;
    holds &= beside_one(
        "135M, untied, from a parent",
        &small,
        Some(&parent),
        layers,
        1024,
        50,
    )?;
    Ok(holds)
}

/// Replicas beside one rank that is given what both are.
fn replicas() -> Result<bool> {
    let small = llama(576, 30, 9, 3, 1536, 49_152, true);
    let parent = llama(768, 20, 12, 4, 2048, 49_152, true);
    let layers = (1, 2);
    let text = beside_one("135M, tied", &small, None, layers, 1024, 50)?;
    Ok(beside_one(
        "135M, tied, from a parent",
        &small,
        Some(&parent),
        layers,
        1024,
        50,
    )? && text)
}

/// `layers` of ranks beside one rank alone, every step with text of its own.
fn beside_one(
    what: &str,
    student: &Value,
    parent: Option<&Value>,
    (stages, replicas): (usize, usize),
    tokens: usize,
    steps: u32,
) -> Result<bool> {
    let of = |stages, replicas| Plan {
        micro_batches: 4,
        sequences: 1,
        tokens,
        period: steps,
        parent: parent.cloned(),
        ..plan(stages, replicas, student.clone(), steps)
    };
    let (one, all) = (whole(&of(1, 1))?, whole(&of(stages, replicas))?);
    let apart = apart(&all.losses, &one.losses);
    let holds = apart.is_some_and(|(apart, _)| apart <= LOSS_BOUND);
    let memory = |told: &Told| {
        let each: Vec<String> = told
            .memory
            .iter()
            .map(|memory| format!("{:.1}", gib(memory.1)))
            .collect();
        each.join(" and ")
    };
    let (apart, step) = apart.unwrap_or((f64::NAN, 0));
    println!(
        "{} {stages} stages x {replicas} replicas, {what}: losses of {steps} steps within {apart:.1e} of one GPU's \
         ({:.4} to {:.4}), at most {LOSS_BOUND} (worst in step {}); {:.1} and {:.1} ms a step; GiB taken {} and {}",
        verdict(holds),
        one.losses.first().map_or(f64::NAN, |loss| loss.1),
        one.losses.last().map_or(f64::NAN, |loss| loss.1),
        step + 1,
        median_ms(&one),
        median_ms(&all),
        memory(&one),
        memory(&all)
    );
    Ok(holds)
}

/// About 10.7B parameters, 18 bytes each of training state: more than one H200 has. Ranks that share a GPU train
/// half of its layers.
fn large() -> Result<bool> {
    let (layers, billions) = match std::env::var_os("GANG_DEVICE") {
        None => (48, 10.7),
        Some(_) => (24, 5.5),
    };
    let told = whole(&Plan {
        micro_batches: 4,
        sequences: 1,
        tokens: 2048,
        period: 1,
        ..plan(2, 1, llama(4096, layers, 32, 8, 14_336, 32_000, false), 10)
    })?;
    let (first, last) = (
        told.losses.first().map_or(f64::NAN, |loss| loss.1),
        told.losses.last().map_or(f64::NAN, |loss| loss.1),
    );
    let losses: Vec<String> = told.losses.iter().map(|(_, loss)| format!("{loss:.3}")).collect();
    let holds = told.losses.len() == 10 && last < first;
    let memory: Vec<String> = told
        .memory
        .iter()
        .map(|memory| format!("{:.1} ({:.1} of tensors)", gib(memory.1), gib(memory.0)))
        .collect();
    let mut seconds = told.seconds;
    seconds.sort_by(f64::total_cmp);
    println!(
        "{} a {billions}B Llama over two ranks: losses {}; {:.2} s a step; GiB taken on each: {}",
        verdict(holds),
        losses.join(" "),
        seconds.get(seconds.len() / 2).copied().unwrap_or(f64::NAN),
        memory.join(" and ")
    );
    Ok(holds)
}

/// Two replicas of the 135M shape, one of which is killed, or stopped, in the middle of a step: a gang of two again
/// goes on from the checkpoint.
fn disturbed() -> Result<bool> {
    const STEPS: u32 = 40;
    let shape = || llama(576, 30, 9, 3, 1536, 49_152, true);
    let undisturbed = whole(&plan(1, 2, shape(), STEPS))?;
    let end = undisturbed.losses.last().map_or(f64::NAN, |loss| loss.1);
    let mut holds = true;
    for signal in ["KILL", "STOP"] {
        let home = tempfile::tempdir()?;
        let plan = Plan {
            home: Some((home.path().to_path_buf(), 10)),
            silence_ms: 5000,
            ..plan(1, 2, shape(), STEPS)
        };
        let fall = Fall {
            rank: 1,
            step: 17,
            signal: signal.to_owned(),
        };
        let disturbed = disturb(&plan, fall)?;
        let mut again = Running::start(&Plan {
            resume: Some(disturbed.record.clone()),
            generation: 2,
            home: None,
            ..plan.clone()
        })?;
        let first = again.listen(|told| !told.losses.is_empty() || !told.failures.is_empty())?;
        let seconds = disturbed.at.elapsed().as_secs_f64();
        let rest = again.listen(|_| false)?;
        let resumed = first.losses.first().map_or(0, |(step, _)| *step);
        let found = rest.losses.last().map_or(f64::NAN, |loss| loss.1);
        let sound = disturbed.is_known(1, 2)
            && seconds < REFORMED_SECONDS
            && (found / end - 1.0).abs() < DISTURBED_BOUND;
        holds &= sound;
        println!(
            "{} SIG{signal} of a rank of two: noticed after {:.2} s ({}), the first step of the next gang, {}, after \
             {seconds:.2} s, at most {REFORMED_SECONDS}; last loss {found:.6}, undisturbed {end:.6}",
            verdict(sound),
            disturbed.seconds,
            disturbed.said.first().map_or("by nobody", String::as_str),
            resumed + 1,
        );
    }
    Ok(holds)
}
