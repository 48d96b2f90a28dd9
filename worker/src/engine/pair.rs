//! Two models measured in alternation, so that a machine that speeds up or slows down does both to both. Where there is no
//! room for the parent, or for both, the candidate is measured alone.

use espalier_proto::task::MeasuredPair;
use espalier_search::{Shortage, WholeParent, Workload};

use super::{Engine, Opened, Series, Subject, Surroundings};
use crate::Result;

/// A model's own latency may drift this far before it is measured longer: the parent's, or the candidate's where that is
/// alone.
pub const DRIFT_LIMIT: f64 = 0.05;
/// The standard error above which a pair is measured longer, of candidate to parent as a share.
const ERROR_LIMIT: f64 = 0.02;
/// How much longer at most.
const LONGEST: usize = 3;

/// What is measured.
#[derive(Debug, Clone, Copy)]
struct Both {
    parent: std::result::Result<Opened, Shortage>,
    candidate: Opened,
}

/// Measures parent and candidate, one run of each in turn, `repeats` times, and up to [`LONGEST`] times as often while the
/// candidate's times are not known against the parent's to [`ERROR_LIMIT`], or one model's own drift by more than
/// [`DRIFT_LIMIT`]; whoever asked judges by the drift that is told: a limit on memory needs no quiet machine. Of the
/// candidate `running` requests run together, all where there is no number; of the parent always all, as when it was profiled.
///
/// # Errors
/// What either model refuses, and when the attempt should stop.
pub fn measure_pair(
    engine: &mut dyn Engine,
    models: [Subject<'_>; 2],
    workload: &Workload,
    running: Option<usize>,
    repeats: usize,
    surroundings: &dyn Surroundings,
) -> Result<MeasuredPair> {
    let repeats = repeats.max(4);
    let running = running.unwrap_or(workload.concurrency);
    let both = open(engine, models, workload, running)?;
    let (mut of_parent, mut of_candidate) = (Series::new(workload), Series::new(workload));
    for round in 0..repeats * LONGEST {
        let known = round >= repeats && is_known(&of_parent, &of_candidate);
        if known {
            break;
        }
        // The order turns round each time, so that neither always follows the other.
        let candidate_first = round % 2 == 1;
        if candidate_first {
            of_candidate.push(engine.run(both.candidate)?);
        }
        if let Ok(parent) = both.parent {
            of_parent.push(engine.run(parent)?);
        }
        if !candidate_first {
            of_candidate.push(engine.run(both.candidate)?);
        }
        let wanted = if round < repeats {
            repeats
        } else {
            repeats * LONGEST
        };
        surroundings.progress(round + 1, wanted, "alternations", &String::new)?;
    }
    let (of_parent, of_candidate) = quiet_part(of_parent, of_candidate, repeats);
    Ok(told(engine, both, &of_parent, &of_candidate))
}

/// All turns; where one model's own time drifted over them, and not within one of the stretches of `repeats`, the quietest of
/// those: a pace that changed once spoils one of them.
fn quiet_part(of_parent: Series, of_candidate: Series, repeats: usize) -> (Series, Series) {
    if drift_of(&of_parent, &of_candidate) <= DRIFT_LIMIT {
        return (of_parent, of_candidate);
    }
    let stretches = (0..of_candidate.runs() / repeats).map(|stretch| {
        let runs = stretch * repeats..(stretch + 1) * repeats;
        (of_parent.part(runs.clone()), of_candidate.part(runs))
    });
    let drift = |(parent, candidate): &(Series, Series)| drift_of(parent, candidate);
    let quietest = stretches.min_by(|one, other| drift(one).total_cmp(&drift(other)));
    quietest
        .filter(|stretch| drift(stretch) <= DRIFT_LIMIT)
        .unwrap_or((of_parent, of_candidate))
}

/// The parent's, or the candidate's where that is alone.
fn drift_of(of_parent: &Series, of_candidate: &Series) -> f64 {
    match of_parent.runs() {
        0 => of_candidate.drift(),
        _ => of_parent.drift(),
    }
}

/// Whether more runs would add little.
fn is_known(of_parent: &Series, of_candidate: &Series) -> bool {
    let drift = drift_of(of_parent, of_candidate);
    let error = match of_parent.runs() {
        0 => of_candidate.error(),
        _ => of_candidate.error_against(of_parent),
    };
    let known = drift <= DRIFT_LIMIT && error <= ERROR_LIMIT;
    if !known {
        tracing::debug!(
            runs = of_candidate.runs(),
            drift,
            error,
            "the pair is measured longer"
        );
    }
    known
}

/// Opens both, or the candidate where that is all there is room for.
fn open(
    engine: &mut dyn Engine,
    [parent, candidate]: [Subject<'_>; 2],
    workload: &Workload,
    running: usize,
) -> Result<Both> {
    let all = workload.concurrency;
    let of_parent = engine.open_where_it_fits(&parent, workload, all)?;
    let Ok(first) = of_parent else {
        return Ok(Both {
            parent: of_parent,
            candidate: engine.open(&candidate, workload, running)?,
        });
    };
    if let Ok(candidate) = engine.open_where_it_fits(&candidate, workload, running)? {
        return Ok(Both {
            parent: of_parent,
            candidate,
        });
    }
    engine.release(first)?;
    let candidate = engine.open(&candidate, workload, running)?;
    Ok(Both {
        parent: Err(engine.shortage(&parent, workload, all)?),
        candidate,
    })
}

fn told(engine: &dyn Engine, both: Both, of_parent: &Series, of_candidate: &Series) -> MeasuredPair {
    let candidate = of_candidate.measurement(engine.memory_bytes(both.candidate));
    let disturbed = of_parent.disturbed().max(of_candidate.disturbed());
    let without_context = engine.without_context(both.candidate);
    let serving = engine.serving(both.candidate);
    let drift = drift_of(of_parent, of_candidate);
    match both.parent {
        Ok(parent) => MeasuredPair {
            parent: WholeParent::Measured(of_parent.measurement(engine.memory_bytes(parent))),
            candidate,
            drift,
            disturbed,
            without_context,
            serving,
        },
        Err(shortage) => MeasuredPair {
            parent: WholeParent::TooLarge(shortage),
            candidate,
            drift,
            disturbed,
            without_context,
            serving,
        },
    }
}

#[cfg(test)]
mod tests {
    #![allow(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::cast_precision_loss
    )]
    use std::path::Path;

    use espalier_proto::task::{Profile, Profiled, Serving};
    use espalier_search::CostKey;

    use super::*;
    use crate::Error;
    use crate::engine::Sample;

    /// A device of so many bytes, on which a directory of that name is a model of so many bytes and milliseconds.
    struct Device {
        bytes: u64,
        open: Vec<Option<u64>>,
        ran: Vec<u64>,
        /// By what share of its time each run is slower than it would be.
        slower_by: fn(usize) -> f64,
    }

    impl Device {
        fn of(bytes: u64) -> Self {
            Self {
                bytes,
                open: Vec::new(),
                ran: Vec::new(),
                slower_by: |_| 0.0,
            }
        }

        fn free(&self) -> u64 {
            self.bytes - self.open.iter().flatten().sum::<u64>()
        }

        fn pair(&mut self, parent: &str, candidate: &str) -> Result<MeasuredPair> {
            let workload = Workload {
                prompt_tokens: 1,
                output_tokens: 2,
                concurrency: 1,
            };
            let models = [parent, candidate].map(|name| Subject::Directory(Path::new(name)));
            measure_pair(self, models, &workload, None, 4, &Nobody)
        }
    }

    #[derive(Debug)]
    struct Nobody;

    impl Surroundings for Nobody {
        fn check_stopped(&self) -> Result<()> {
            Ok(())
        }

        fn beat(&self) {}

        fn progress(&self, _: usize, _: usize, _: &str, _: &dyn Fn() -> String) -> Result<()> {
            Ok(())
        }

        fn waits(&self, _: &dyn Fn() -> String) -> Result<()> {
            Ok(())
        }
    }

    fn bytes_of(model: &Subject<'_>) -> u64 {
        let Subject::Directory(name) = model else {
            panic!("another model")
        };
        name.to_str().unwrap().parse().unwrap()
    }

    impl Engine for Device {
        fn key(&self, _: usize) -> CostKey {
            panic!("nobody asks for it")
        }

        fn profile(&mut self, _: &Profile) -> Result<Profiled> {
            panic!("nobody asks for it")
        }

        fn open(&mut self, model: &Subject<'_>, workload: &Workload, running: usize) -> Result<Opened> {
            let Shortage {
                needed_bytes,
                free_bytes,
            } = self.shortage(model, workload, running)?;
            if needed_bytes > free_bytes {
                return Err(Error::NoRoom {
                    what: "it",
                    needed: needed_bytes,
                    free: free_bytes,
                });
            }
            self.open.push(Some(needed_bytes));
            Ok(Opened::place(self.open.len() - 1))
        }

        fn shortage(&self, model: &Subject<'_>, _: &Workload, _: usize) -> Result<Shortage> {
            Ok(Shortage {
                needed_bytes: bytes_of(model),
                free_bytes: self.free(),
            })
        }

        fn release(&mut self, model: Opened) -> Result<()> {
            self.open[model.index()] = None;
            Ok(())
        }

        fn run(&mut self, model: Opened) -> Result<Sample> {
            let bytes = self.open[model.index()].expect("it is open");
            let latency = bytes as f64 * (1.0 + (self.slower_by)(self.ran.len()));
            self.ran.push(bytes);
            Ok(Sample {
                first_token: 1.0,
                latency,
                throughput: 1.0 / latency,
                disturbed: false,
            })
        }

        fn memory_bytes(&self, model: Opened) -> u64 {
            self.open[model.index()].unwrap()
        }

        fn serving(&self, _: Opened) -> Option<Serving> {
            None
        }
    }

    #[test]
    fn both_are_run_in_turns_where_there_is_room_for_both() {
        let mut device = Device::of(30);
        let pair = device.pair("20", "10").unwrap();
        assert_eq!(device.ran, [20, 10, 10, 20, 20, 10, 10, 20]);
        assert_eq!(pair.parent.measured().unwrap().memory_bytes, 20);
        assert_eq!(pair.candidate.memory_bytes, 10);
    }

    #[test]
    fn the_candidate_is_measured_alone_where_there_is_no_room_for_the_parent_or_not_beside_it() {
        for (bytes, free) in [(15, 15), (25, 15)] {
            let mut device = Device::of(bytes);
            let pair = device.pair("20", "10").unwrap();
            assert_eq!(device.ran, [10; 4]);
            let shortage = pair.parent.shortage().unwrap();
            assert_eq!((shortage.needed_bytes, shortage.free_bytes), (20, free));
            assert_eq!(pair.candidate.memory_bytes, 10);
        }
    }

    #[test]
    fn a_candidate_without_room_is_an_error() {
        let refused = Device::of(8).pair("20", "10").unwrap_err();
        assert!(matches!(refused, Error::NoRoom { needed: 10, .. }), "{refused}");
    }

    #[test]
    fn drift_is_the_candidates_own_where_it_is_alone() {
        let mut device = Device::of(15);
        device.slower_by = |run| 0.05 * run as f64;
        let pair = device.pair("20", "10").unwrap();
        assert!(pair.drift > DRIFT_LIMIT, "{pair:?}");
        assert_eq!(device.ran.len(), 4 * LONGEST, "it is measured longer");
    }

    #[test]
    fn of_a_pace_that_changed_once_the_quietest_stretch_is_told() {
        let mut device = Device::of(15);
        device.slower_by = |run| if run < 6 { 0.0 } else { 0.5 };
        let pair = device.pair("20", "10").unwrap();
        assert!(pair.drift <= DRIFT_LIMIT, "{pair:?}");
        assert_eq!(pair.candidate.latency_ms.samples.len(), 4);
    }

    #[test]
    fn a_pair_is_measured_longer_until_the_one_is_known_against_the_other() {
        // Both are slower in turns, as one.
        let mut device = Device::of(30);
        device.slower_by = |run| if run / 2 % 2 == 0 { 0.3 } else { 0.0 };
        device.pair("20", "10").unwrap();
        assert_eq!(
            device.ran.len(),
            2 * 4,
            "what does both alike says nothing against the ratio"
        );
        // Every fourth run, so that one of them is slower than the other in every other round.
        let mut device = Device::of(30);
        device.slower_by = |run| if run % 4 == 0 { 0.3 } else { 0.0 };
        device.pair("20", "10").unwrap();
        assert_eq!(device.ran.len(), 2 * 4 * LONGEST);
    }
}
