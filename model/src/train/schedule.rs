//! The learning rate over a run: linear warm-up, then half a cosine down to a share of the peak.

use std::f64::consts::PI;

/// The learning rate as a pure function of the step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Schedule {
    /// Steps of the whole run.
    pub steps: u64,
    /// The highest rate.
    pub peak: f64,
    /// Share of the steps, 0 to 1, in which the rate rises from zero.
    pub warmup: f64,
    /// Share of the peak, 0 to 1, at which the cosine ends.
    pub final_share: f64,
}

impl Schedule {
    /// The rate of step `step`, counted from 0. The first step's rate is above zero and the step that ends
    /// the warm-up has the peak; the last step, and any after it, have the final share.
    pub fn learning_rate(&self, step: u64) -> f64 {
        let steps = self.steps as f64;
        let warmup = (self.warmup * steps).round();
        let done = (step + 1) as f64;
        if done <= warmup {
            return self.peak * done / warmup;
        }
        let share = ((done - warmup) / (steps - warmup).max(1.0)).min(1.0);
        let cosine = 0.5 * (1.0 + (PI * share).cos());
        self.peak * (self.final_share + (1.0 - self.final_share) * cosine)
    }
}

#[cfg(test)]
mod tests {
    use super::Schedule;

    const SCHEDULE: Schedule = Schedule {
        steps: 100,
        peak: 2.0,
        warmup: 0.1,
        final_share: 0.1,
    };

    #[test]
    fn the_rate_rises_in_a_line_to_the_peak_and_ends_at_the_final_share() {
        assert!((SCHEDULE.learning_rate(0) - 0.2).abs() < 1e-12);
        assert!((SCHEDULE.learning_rate(9) - 2.0).abs() < 1e-12);
        assert!((SCHEDULE.learning_rate(54) - 2.0 * 0.55).abs() < 1e-12);
        assert!((SCHEDULE.learning_rate(99) - 0.2).abs() < 1e-12);
        assert!((SCHEDULE.learning_rate(1_000) - 0.2).abs() < 1e-12);
    }

    #[test]
    fn a_run_without_warm_up_has_no_division_by_zero() {
        let schedule = Schedule {
            steps: 1,
            warmup: 0.0,
            ..SCHEDULE
        };
        assert!((schedule.learning_rate(0) - 0.2).abs() < 1e-12);
        assert!(Schedule { steps: 0, ..schedule }.learning_rate(0).is_finite());
    }
}
