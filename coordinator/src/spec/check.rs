//! Values that no job can be run with, each refused by one line that says what would be right.

use std::collections::BTreeSet;
use std::path::Path;

use espalier_search::Metric;

use super::{CostTableSource, Engine, JobSpec, KvGroups, Recovery, SpecError, cost_table, word};

/// A workload beyond this is a mistake of units rather than a wish.
const MOST_TOKENS: usize = 16 << 20;

impl JobSpec {
    /// Refuses impossible values and combinations; looks at nothing outside the spec.
    ///
    /// # Errors
    /// The first field at fault.
    pub fn check(&self) -> Result<(), SpecError> {
        if self.parent.trim().is_empty() {
            return Err(SpecError::new(
                "parent",
                "empty; give a directory, a GGUF file or hf://org/name",
            ));
        }
        if let Some(name) = self.parent.strip_prefix("hf://")
            && name.split('/').filter(|part| !part.is_empty()).count() != 2
        {
            let message = format!("found `{}`, expected hf://org/name", self.parent);
            return Err(SpecError::new("parent", message));
        }
        self.check_data()?;
        self.check_target()?;
        self.check_search()?;
        self.check_budget()?;
        self.recovery.check()?;
        if self.evaluate.examples == 0 {
            return Err(SpecError::new(
                "evaluate.examples",
                "found 0, expected at least 1",
            ));
        }
        Ok(())
    }

    /// Refuses files that are not there, so that a mistyped name costs no more than the submission.
    ///
    /// # Errors
    /// The first path that does not exist or is not a file.
    pub fn check_files(&self) -> Result<(), SpecError> {
        if !self.parent.starts_with("hf://") && !Path::new(&self.parent).exists() {
            let message = format!(
                "{} does not exist; give a Hugging Face directory, a GGUF file or hf://org/name",
                self.parent
            );
            return Err(SpecError::new("parent", message));
        }
        let lists = [
            ("data.train", &self.data.train),
            ("data.validation", &self.data.validation),
            ("evaluate.benchmarks", &self.evaluate.benchmarks),
        ];
        for (field, files) in lists {
            for (index, file) in files.iter().enumerate() {
                check_file(&format!("{field}[{index}]"), Path::new(file))?;
            }
        }
        if let Some(CostTableSource::File(file)) = &self.target.cost_table {
            check_file("target.cost_table", Path::new(file))?;
        }
        Ok(())
    }

    fn check_data(&self) -> Result<(), SpecError> {
        if self.data.train.is_empty() {
            return Err(SpecError::new(
                "data.train",
                "no files; give at least one file of text or JSON lines",
            ));
        }
        let mut seen = BTreeSet::new();
        let files =
            named("data.train", &self.data.train).chain(named("data.validation", &self.data.validation));
        for (path, file) in files {
            if !seen.insert(file) {
                let message = format!("{file} is listed twice; held-out text must not be trained on");
                return Err(SpecError::new(path, message));
            }
        }
        Ok(())
    }

    fn check_target(&self) -> Result<(), SpecError> {
        let workload = &self.target.workload;
        let fields = [
            ("prompt_tokens", workload.prompt_tokens),
            ("output_tokens", workload.output_tokens),
            ("concurrency", workload.concurrency),
        ];
        for (name, value) in fields {
            if value == 0 || value > MOST_TOKENS {
                let message = format!("found {value}, expected 1 to {MOST_TOKENS}");
                return Err(SpecError::new(format!("target.workload.{name}"), message));
            }
        }
        if workload.output_tokens == 1 && self.target.limits.get(Metric::PerToken).is_some() {
            let message =
                "found 1, expected at least 2 where per_token is limited: it is the time between two tokens";
            return Err(SpecError::new("target.workload.output_tokens", message));
        }
        let (found, computed) = (self.target.precision(), self.target.device.precision());
        if self.target.engine == Engine::Builtin && found != computed {
            let (device, found, expected) = (word(&self.target.device), word(&found), word(&computed));
            let message = format!(
                "found {found}, expected {expected}, in which the built-in engine computes on {device}"
            );
            return Err(SpecError::new("target.precision", message));
        }
        if self.target.measure_anew && self.target.cost_table.is_some() {
            let message =
                "found true, expected false beside target.cost_table, in whose place nothing is measured";
            return Err(SpecError::new("target.measure_anew", message));
        }
        if self.profile_only && self.target.cost_table.is_some() {
            let message = "found one, expected none in a job that only measures its target: in its place nothing is measured";
            return Err(SpecError::new("target.cost_table", message));
        }
        if let Some(CostTableSource::Table(table)) = &self.target.cost_table {
            cost_table::fits(table, &self.target)?;
        }
        Ok(())
    }

    fn check_search(&self) -> Result<(), SpecError> {
        if self.search.mlp_grid == Some(0) {
            return Err(SpecError::new("search.mlp_grid", "found 0, expected at least 1"));
        }
        let strategies: BTreeSet<_> = self.search.strategies.iter().collect();
        if strategies.is_empty() {
            let message = "no strategy; give heterogeneous, uniform or both";
            return Err(SpecError::new("search.strategies", message));
        }
        if strategies.len() != self.search.strategies.len() {
            return Err(SpecError::new(
                "search.strategies",
                "a strategy is listed twice; list each once",
            ));
        }
        let KvGroups::Counts(counts) = &self.search.kv_groups else {
            return Ok(());
        };
        let distinct: BTreeSet<_> = counts.iter().collect();
        if counts.is_empty() || counts.contains(&0) || distinct.len() != counts.len() {
            let message = format!(
                "found {counts:?}, expected distinct counts of at least 1, or auto (skip: true allows no attention)"
            );
            return Err(SpecError::new("search.kv_groups", message));
        }
        Ok(())
    }

    fn check_budget(&self) -> Result<(), SpecError> {
        let budget = &self.budget;
        if budget.sequence_tokens < 2 || budget.sequence_tokens > MOST_TOKENS {
            let message = format!("found {}, expected 2 to {MOST_TOKENS}", budget.sequence_tokens);
            return Err(SpecError::new("budget.sequence_tokens", message));
        }
        let sequence = budget.sequence_tokens as u64;
        let fields = [
            ("calibration_tokens", budget.calibration_tokens),
            ("scoring_tokens", budget.scoring_tokens),
            ("depth_tokens", budget.depth_tokens),
            ("validation_tokens", budget.validation_tokens),
        ];
        for (name, tokens) in fields {
            if tokens < sequence {
                let message = format!("found {tokens}, expected at least one sequence ({sequence} tokens)");
                return Err(SpecError::new(format!("budget.{name}"), message));
            }
        }
        let step = sequence.saturating_mul(self.recovery.batch_sequences as u64);
        if budget.recovery_tokens != 0 && budget.recovery_tokens < step {
            let message = format!(
                "found {}, expected 0 or at least one step of recovery.batch_sequences sequences ({step} tokens)",
                budget.recovery_tokens
            );
            return Err(SpecError::new("budget.recovery_tokens", message));
        }
        Ok(())
    }
}

impl Recovery {
    fn check(&self) -> Result<(), SpecError> {
        let (first, second) = self.betas;
        let ranges = [
            ("learning_rate", self.learning_rate, 0.0, 1.0),
            ("warmup", self.warmup, 0.0, 1.0),
            ("final_share", self.final_share, 0.0, 1.0),
            ("clip", self.clip, f64::MIN_POSITIVE, f64::MAX),
            ("betas[0]", first, 0.0, 1.0 - f64::EPSILON),
            ("betas[1]", second, 0.0, 1.0 - f64::EPSILON),
            ("weight_decay", self.weight_decay, 0.0, 1.0),
        ];
        for (name, value, low, high) in ranges {
            if !(low..=high).contains(&value) {
                let expected = match name {
                    "clip" => "more than 0".to_owned(),
                    "betas[0]" | "betas[1]" => "at least 0 and less than 1".to_owned(),
                    _ => format!("{low} to {high}"),
                };
                let message = format!("found {value}, expected {expected}");
                return Err(SpecError::new(format!("recovery.{name}"), message));
            }
        }
        for (name, value) in [
            ("batch_sequences", self.batch_sequences as u64),
            ("checkpoint_steps", self.checkpoint_steps),
            ("ranks", u64::from(self.ranks)),
            ("pipeline_stages", u64::from(self.pipeline_stages)),
        ] {
            if value == 0 {
                return Err(SpecError::new(
                    format!("recovery.{name}"),
                    "found 0, expected at least 1",
                ));
            }
        }
        self.check_ranks()
    }

    fn check_ranks(&self) -> Result<(), SpecError> {
        if !self.ranks.is_multiple_of(self.pipeline_stages) {
            let message = format!(
                "found {}, expected a multiple of recovery.pipeline_stages ({stages}): each stage is a rank's; for one replica \
                 set recovery.ranks to {stages}",
                self.ranks,
                stages = self.pipeline_stages
            );
            return Err(SpecError::new("recovery.ranks", message));
        }
        let replicas = u64::from(self.ranks / self.pipeline_stages);
        if (self.batch_sequences as u64) < replicas {
            let message = format!(
                "found {}, expected at least one sequence for each of {replicas} replicas (recovery.ranks over \
                 recovery.pipeline_stages)",
                self.batch_sequences
            );
            return Err(SpecError::new("recovery.batch_sequences", message));
        }
        Ok(())
    }
}

fn named<'a>(field: &'a str, files: &'a [String]) -> impl Iterator<Item = (String, &'a String)> {
    files
        .iter()
        .enumerate()
        .map(move |(index, file)| (format!("{field}[{index}]"), file))
}

fn check_file(field: &str, file: &Path) -> Result<(), SpecError> {
    let shown = file.display();
    let metadata = std::fs::metadata(file).map_err(|error| {
        let message = match error.kind() {
            std::io::ErrorKind::NotFound => format!("{shown} does not exist; give a file that does"),
            _ => format!("{shown} cannot be read: {error}"),
        };
        SpecError::new(field, message)
    })?;
    if !metadata.is_file() {
        return Err(SpecError::new(
            field,
            format!("{shown} is not a file; give a file of text or JSON lines"),
        ));
    }
    if metadata.len() == 0 {
        return Err(SpecError::new(
            field,
            format!("{shown} is empty; give a file with text in it"),
        ));
    }
    Ok(())
}
