//! The losses of a training, however long, in so few numbers that they fit a message and every checkpoint's record.

use serde::{Deserialize, Serialize};

/// Numbers at the most; even. About 45 kB of JSON.
const MOST: usize = 4096;

/// Mean losses of stretches of equally many steps, the last of which may not be full. Where there would be more of them than
/// [`MOST`] every two become one. What is read again goes on to the same bits.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Written", into = "Written")]
pub(super) struct Losses {
    means: Vec<f32>,
    each: usize,
    steps: usize,
}

/// As records have them: one a step, as all had them once, or of stretches.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Written {
    Steps(Vec<f32>),
    Stretches {
        means: Vec<f32>,
        each: usize,
        steps: usize,
    },
}

impl Default for Losses {
    fn default() -> Self {
        Self {
            means: Vec::new(),
            each: 1,
            steps: 0,
        }
    }
}

impl Losses {
    /// Adds that of the next step.
    pub fn push(&mut self, loss: f32) {
        let before = self.steps % self.each;
        match self.means.last_mut().filter(|_| before > 0) {
            Some(mean) => *mean = mean_of((*mean, before), (loss, 1)),
            None => self.means.push(loss),
        }
        self.steps += 1;
        self.shorten();
    }

    /// Of how many steps they are.
    pub fn steps(&self) -> usize {
        self.steps
    }

    /// The means, and of how many steps each is.
    pub fn into_means(self) -> (Vec<f32>, usize) {
        (self.means, self.each)
    }

    fn shorten(&mut self) {
        while self.means.len() > MOST {
            let whole = self.steps / self.each;
            let weight = |place: usize| match place < whole {
                true => self.each,
                false => self.steps % self.each,
            };
            let pairs = self.means.chunks(2).enumerate();
            let means = pairs.filter_map(|(pair, means)| match means {
                [first, second] => Some(mean_of(
                    (*first, weight(2 * pair)),
                    (*second, weight(2 * pair + 1)),
                )),
                [alone] => Some(*alone),
                _ => None,
            });
            self.means = means.collect();
            self.each *= 2;
        }
    }
}

/// Of two means, each with of how many.
#[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation)] // losses to look at
fn mean_of((first, of_first): (f32, usize), (second, of_second): (f32, usize)) -> f32 {
    let (of_first, of_second) = (of_first as f64, of_second as f64);
    ((f64::from(first) * of_first + f64::from(second) * of_second) / (of_first + of_second)) as f32
}

impl From<Losses> for Written {
    fn from(losses: Losses) -> Self {
        let Losses { means, each, steps } = losses;
        match each {
            1 => Self::Steps(means),
            _ => Self::Stretches { means, each, steps },
        }
    }
}

impl TryFrom<Written> for Losses {
    type Error = String;

    fn try_from(written: Written) -> Result<Self, String> {
        let (means, each, steps) = match written {
            Written::Steps(means) => {
                let steps = means.len();
                (means, 1, steps)
            }
            Written::Stretches { means, each, steps } => (means, each, steps),
        };
        if each == 0 || steps.div_ceil(each) != means.len() {
            let found = means.len();
            return Err(format!(
                "{found} losses, each of {each} steps, are not those of {steps} steps"
            ));
        }
        let mut losses = Self { means, each, steps };
        losses.shorten();
        Ok(losses)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use espalier_proto::task::{ArtifactId, Recovered, TaskOutput};

    use super::*;

    /// Of so many steps, each less than the one before by the same.
    fn of(steps: usize, all: usize) -> Losses {
        let mut losses = Losses::default();
        for step in 0..steps {
            losses.push(4.0 - 4.0 * step as f32 / all as f32);
        }
        losses
    }

    #[test]
    fn the_losses_of_a_million_steps_fit_a_message_and_say_of_how_many_steps_each_is() {
        let steps = 1_000_000;
        let losses = of(steps, steps);
        assert_eq!(losses.steps(), steps);
        let (means, each) = losses.into_means();
        assert_eq!((means.len(), each), (steps.div_ceil(256), 256));
        // A stretch's mean is its middle's: 4 - 4 * (256 * 1000 + 127.5) / 1e6.
        assert!((means[1000] - 2.97549).abs() < 1e-5, "{}", means[1000]);
        assert!((means[0] - 3.99949).abs() < 1e-5, "{}", means[0]);
        let output = TaskOutput::Recover(Recovered {
            weights: ArtifactId("0".repeat(64)),
            losses: means,
            steps_per_loss: each as u64,
            tokens: 1,
            kept_untrained: false,
            seconds: 1.0,
        });
        let bytes = serde_json::to_vec(&output).unwrap().len();
        assert!(bytes < 100_000, "{bytes}");
    }

    #[test]
    fn few_steps_have_one_each_and_are_written_as_ever() {
        let losses = of(3, 4);
        let json = serde_json::to_string(&losses).unwrap();
        assert_eq!(json, "[4.0,3.0,2.0]");
        assert_eq!(serde_json::from_str::<Losses>(&json).unwrap(), losses);
        assert_eq!(losses.into_means(), (vec![4.0, 3.0, 2.0], 1));
    }

    #[test]
    fn what_is_read_again_anywhere_goes_on_to_the_same_bits() {
        let whole = of(20_000, 7);
        for steps in [0, 1, 4095, 4096, 4097, 8193, 12_345, 19_999] {
            let json = serde_json::to_string(&of(steps, 7)).unwrap();
            let mut read: Losses = serde_json::from_str(&json).unwrap();
            assert_eq!(read.steps(), steps);
            for step in steps..20_000 {
                read.push(4.0 - 4.0 * step as f32 / 7.0);
            }
            assert_eq!(read, whole, "from step {steps}");
        }
    }

    #[test]
    fn a_record_of_every_step_of_a_long_training_is_read_and_one_that_contradicts_itself_is_not() {
        let every: Vec<f32> = (0..10_001).map(|step| (step % 2) as f32).collect();
        let read: Losses = serde_json::from_str(&serde_json::to_string(&every).unwrap()).unwrap();
        assert_eq!(read.steps(), 10_001);
        let (means, each) = read.into_means();
        assert_eq!((means.len(), each), (2501, 4));
        assert_eq!((means[0], means[2499], means[2500]), (0.5, 0.5, 0.0));
        for wrong in [
            r#"{"means":[1.0],"each":0,"steps":1}"#,
            r#"{"means":[1.0],"each":2,"steps":3}"#,
        ] {
            let error = serde_json::from_str::<Losses>(wrong).unwrap_err().to_string();
            assert!(error.contains("are not those of"), "{error}");
        }
    }
}
