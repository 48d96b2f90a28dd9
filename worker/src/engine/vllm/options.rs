//! What a device child is told of vLLM: where it is, what it runs on, and how long it may take.

use std::path::PathBuf;
use std::time::Duration;

use espalier_model::Device;

use super::Environment;

/// Which GPUs a process may see, and in which order it numbers them.
const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";

/// How long the helper may come no further before it is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deadlines {
    /// While it imports vLLM.
    pub hello: Duration,
    /// While it opens an engine.
    pub open: Duration,
    /// While it times, at the least.
    pub work: Duration,
    /// While it does nothing at all, whatever it was asked.
    pub idle: Duration,
}

impl Default for Deadlines {
    fn default() -> Self {
        Self {
            hello: Duration::from_secs(300),
            open: Duration::from_secs(600),
            work: Duration::from_secs(60),
            idle: Duration::from_secs(480),
        }
    }
}

impl Deadlines {
    /// The same where an attempt without a sign of life is killed after `hang_timeout`: a helper that does nothing is
    /// given up before, so that what it wrote last is told.
    #[must_use]
    pub fn within(self, hang_timeout: Duration) -> Self {
        Self {
            idle: self.idle.min(hang_timeout.mul_f64(0.8)),
            ..self
        }
    }

    /// While it opens an engine with so many bytes of weights, which may lie on a disk far away.
    pub(super) fn opening(self, weight_bytes: u64) -> Duration {
        /// Bytes a second that any disk gives.
        const LEAST_SPEED: u64 = 25 << 20;
        self.open
            .saturating_add(Duration::from_secs(weight_bytes / LEAST_SPEED))
    }

    /// While it times, where it took `longest` at the most to get further so far, and a single step may take `step`. One
    /// step may compute every prompt of a workload, and nothing is heard of it meanwhile: before the first has ended
    /// nobody knows how long that takes.
    pub(super) fn timing(self, longest: Option<Duration>, step: Duration) -> Duration {
        /// Times that it may take longer than ever before.
        const LONGER: u32 = 50;
        let known = match longest {
            None => self.open.max(self.work),
            Some(longest) => self.work.saturating_add(longest.saturating_mul(LONGER)),
        };
        known.max(step)
    }
}

/// How long a processor that others use too may take to compute so many tokens of a model of so many parameters.
pub(super) fn computing(parameters: u64, tokens: usize) -> Duration {
    /// Operations a second, a twentieth of what two processors have to themselves. A parameter takes two a token.
    const LEAST_SPEED: u64 = 5_000_000_000;
    let operations = parameters.saturating_mul(2).saturating_mul(tokens as u64);
    Duration::from_secs(operations / LEAST_SPEED)
}

/// vLLM as a device child is told of it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VllmOptions {
    /// Where it is; none on a worker that measures in no vLLM.
    pub environment: Option<Environment>,
    /// How long its process may come no further.
    pub deadlines: Deadlines,
    /// For the environment of its process.
    pub variables: Vec<(String, String)>,
    /// What it has to run on, `cpu` or `cuda`; none where no device is known yet.
    pub platform: Option<&'static str>,
    /// Where the device's processes keep what they compile; none for vLLM's own places, which all of a user share.
    pub rooms: Option<PathBuf>,
    /// How long to wait, at first, before what was timed while others used the processors is timed again.
    pub pause: Pause,
}

/// How long to wait for others to leave the processors: at first, and from then on twice as long each time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pause(pub Duration);

impl Default for Pause {
    fn default() -> Self {
        Self(Duration::from_secs(1))
    }
}

impl VllmOptions {
    /// The same on a device, with the threads that this process has.
    #[must_use]
    pub fn on(mut self, device: Device) -> Self {
        let mut set = |name: &str, value: String| self.variables.push((name.to_owned(), value));
        set("OMP_NUM_THREADS", rayon::current_num_threads().to_string());
        self.platform = match device {
            Device::Cpu => {
                // An ordinary vLLM would take a GPU that it sees.
                set(VISIBLE, String::new());
                Some("cpu")
            }
            Device::Cuda(index) => {
                let seen = std::env::var(VISIBLE).unwrap_or_default();
                set(VISIBLE, visible(index, &seen));
                Some("cuda")
            }
        };
        let name = device.to_string().replace(':', "-");
        let cache = espalier_artifact::Options::from_env().map(|options| options.cache_dir);
        self.rooms = cache.ok().map(|cache| cache.join("vllm").join(name));
        self
    }
}

/// The GPU that this process numbers so, as another has to be told.
fn visible(index: u32, seen: &str) -> String {
    let place = usize::try_from(index).unwrap_or(usize::MAX);
    let named = seen
        .split(',')
        .map(str::trim)
        .filter(|name| !name.is_empty())
        .nth(place);
    named.map_or_else(|| index.to_string(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_first_step_has_as_long_as_an_engine_to_open_and_later_ones_follow_the_longest() {
        let patient = Deadlines::default();
        let short = Duration::from_secs(1);
        assert_eq!(patient.timing(None, short), Duration::from_secs(600));
        let longest = Some(Duration::from_secs(88));
        assert_eq!(patient.timing(longest, short), Duration::from_secs(60 + 50 * 88));
    }

    #[test]
    fn a_step_that_is_legal_is_waited_for_however_large_the_model() {
        // All prompts of a workload in one step, by a model of 8 billion: an hour and a half of two processors alone.
        let step = computing(8_000_000_000, 32_768);
        assert!(step > Duration::from_secs(2 * 3600), "{step:?}");
        assert_eq!(Deadlines::default().timing(None, step), step);
        assert_eq!(
            Deadlines::default().opening(16 << 30),
            Duration::from_secs(600 + 655)
        );
    }

    #[test]
    fn one_that_does_nothing_is_given_up_before_its_attempt_is() {
        let minute = Duration::from_secs(60);
        assert_eq!(Deadlines::default().within(minute).idle, Duration::from_secs(48));
        assert_eq!(Deadlines::default().within(600 * minute), Deadlines::default());
        assert!(Deadlines::default().idle < crate::agent::options::ChildOptions::default().hang_timeout);
    }

    #[test]
    fn its_process_sees_the_gpu_of_its_child_alone() {
        assert_eq!(visible(1, ""), "1");
        assert_eq!(visible(1, "4, 6"), "6");
        assert_eq!(visible(0, "GPU-1f"), "GPU-1f");
    }
}
