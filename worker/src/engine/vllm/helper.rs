//! The helper as one asks it: each request answered or refused in time, else its process is killed.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use espalier_arch::Architecture;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::environment::Environment;
use super::options::computing;
use super::process::{Heard, Process};
use super::protocol::{
    Answer, Hello, Memory, Numbered, Open, Opened, Progress, Refusal, Request, Served, Steps, VERSION,
};
use super::room::Room;
use super::{Deadlines, Error, VllmOptions};
use crate::engine::Surroundings;

/// How often it is looked whether the attempt should stop while an answer is waited for.
const LOOK: Duration = Duration::from_millis(50);
/// Processor time that tells work from a process that only says that it lives.
const WORKED_SECONDS: f64 = 0.05;
/// The module that the helper is.
const MODULE: &str = "espalier_vllm.helper";

/// A helper that has said hello.
#[derive(Debug)]
pub(super) struct Helper {
    process: Process,
    python: PathBuf,
    /// What it found itself in.
    pub hello: Hello,
    deadlines: Deadlines,
    last_id: u64,
    /// Engines that are open, by name.
    engines: BTreeSet<String>,
    /// Whether a model was opened, or was to be, that is not open any more.
    had_others: bool,
    /// The longest time that passed, while something was timed, until it was further.
    longest: Option<Duration>,
    /// What the process takes of a GPU beside its allocator, once a model has served where that could be told from what
    /// others have.
    pub outside_bytes: Option<u64>,
    /// The most that a GPU's model has kept of the allocator's beside weights, keys and values.
    pub kept_bytes: u64,
    /// What a single step of the largest engine may take.
    step: Duration,
}

/// What is heard while an answer is waited for.
struct Watch<'a> {
    surroundings: &'a dyn Surroundings,
    /// Without getting any further.
    patience: Duration,
    moved: Instant,
    /// The longest that it took to get further.
    longest: Duration,
    /// Without doing anything.
    idle_patience: Duration,
    worked: Instant,
    last: Option<Progress>,
    worked_at: f64,
}

impl Watch<'_> {
    /// Takes a sign of life; what repeats the last one says nothing, unless the process has worked.
    fn take(&mut self, progress: Progress) {
        let is_further = self
            .last
            .as_ref()
            .is_none_or(|last| last.stage != progress.stage || last.done != progress.done);
        if is_further {
            self.moves();
        }
        if is_further || progress.cpu_seconds - self.worked_at >= WORKED_SECONDS {
            self.worked_at = progress.cpu_seconds;
            self.worked = Instant::now();
            self.surroundings.beat();
        }
        self.last = Some(progress);
    }

    /// It is further than before.
    fn moves(&mut self) {
        self.longest = self.longest.max(self.moved.elapsed());
        self.moved = Instant::now();
    }

    /// How long it was waited for, once that is too long.
    fn too_long(&self) -> Option<Duration> {
        if self.moved.elapsed() >= self.patience {
            Some(self.patience)
        } else {
            (self.worked.elapsed() >= self.idle_patience).then_some(self.idle_patience)
        }
    }
}

impl Helper {
    /// Starts a helper and lets it import vLLM.
    ///
    /// # Errors
    /// When the environment lacks something, or its vLLM is not trusted.
    pub fn start(
        environment: &Environment,
        options: &VllmOptions,
        surroundings: &dyn Surroundings,
    ) -> crate::Result<Self> {
        let python = || environment.python.clone();
        let deadlines = options.deadlines;
        let room = options.rooms.as_deref().map(Room::take).transpose();
        let room = room.unwrap_or_else(|error| {
            tracing::warn!(%error, rooms = ?options.rooms, "vLLM keeps what it compiles where it does by itself");
            None
        });
        let process = Process::start(&environment.python, &["-m", MODULE], &options.variables, room)?;
        let nothing = Hello {
            protocol: VERSION,
            block_tokens: super::protocol::BlockTokens { multiple: 1 },
            ..Hello::default()
        };
        let mut helper = Self {
            process,
            python: environment.python.clone(),
            hello: nothing,
            deadlines,
            last_id: 0,
            engines: BTreeSet::new(),
            had_others: false,
            longest: None,
            outside_bytes: None,
            kept_bytes: 0,
            step: Duration::ZERO,
        };
        let request = Request::Hello {
            protocol: VERSION,
            trusted_versions: environment.trusted.clone(),
        };
        let hello = helper.ask(&request, deadlines.hello, surroundings);
        let hello: Hello = hello.map_err(|error| match error {
            crate::Error::Vllm(Error::Ended { last, .. }) if helper.says_no_plugin() => {
                tracing::debug!(last, "the helper could not begin");
                Error::NoPlugin { python: python() }.into()
            }
            // `exec` of a shell that does not find or may not run it.
            crate::Error::Vllm(Error::Ended { how, last, .. })
                if how.ends_with(" 127") || how.ends_with(" 126") =>
            {
                let reason = format!("cannot be started: {last}");
                Error::NoPython {
                    python: python(),
                    reason,
                }
                .into()
            }
            other => other,
        })?;
        if hello.protocol != VERSION {
            return Err(helper.broken(format!(
                "it speaks version {}, expected {VERSION}: install the plugin of this version of Espalier",
                hello.protocol
            )));
        }
        tracing::info!(
            vllm = hello.vllm,
            plugin = hello.plugin,
            device = hello.device,
            "vLLM is there"
        );
        helper.hello = hello;
        Ok(helper)
    }

    fn says_no_plugin(&self) -> bool {
        let last = self.process.last_lines();
        last.iter()
            .any(|line| line.contains("No module named") && line.contains("espalier_vllm"))
    }

    /// Whether it lives, and says nothing unasked.
    pub fn is_idle(&mut self) -> bool {
        self.process.is_idle()
    }

    /// Ends it.
    pub fn end(&mut self) {
        self.process.kill();
    }

    /// Whether somebody else killed it: the system for want of memory, as far as that can be told.
    pub fn was_killed(&self) -> bool {
        self.process.was_killed()
    }

    /// Whether a model was opened, or was to be, that is not open any more.
    pub fn had_others(&self) -> bool {
        self.had_others
    }

    /// Its environment is not as it has to be.
    pub fn unfit(&self, reason: String) -> Error {
        Error::NoVllm {
            python: self.python.clone(),
            reason,
        }
    }

    /// Opens an engine of a model of this shape.
    ///
    /// # Errors
    /// When vLLM refuses the model, or there is no room for it.
    pub fn open(
        &mut self,
        open: Open,
        architecture: &Architecture,
        surroundings: &dyn Surroundings,
    ) -> crate::Result<Opened> {
        let parameters = architecture.parameters().total;
        // Of a GPU this is no bound worth waiting for: it has as long as an engine takes to open.
        if self.hello.platform == "cpu" {
            self.step = self.step.max(computing(parameters, open.max_tokens));
        }
        let patience = self.deadlines.opening(parameters.saturating_mul(4));
        let engine = open.engine.clone();
        let opened = self.ask(&Request::Open(open), patience, surroundings);
        match opened {
            Ok(_) => _ = self.engines.insert(engine),
            Err(_) => self.had_others = true,
        }
        opened
    }

    /// Times single steps of an engine: so many, after as many to warm up as that.
    ///
    /// # Errors
    /// When the engine cannot do them.
    pub fn steps(
        &mut self,
        engine: &str,
        point: espalier_search::Point,
        repeats: usize,
        surroundings: &dyn Surroundings,
    ) -> crate::Result<Steps> {
        let request = Request::Steps {
            engine: engine.to_owned(),
            point,
            repeats,
            warm_ups: usize::from(repeats > 1),
        };
        let steps: Steps = self.time(&request, surroundings)?;
        let all = steps.wall_ms.iter().chain(steps.device_ms.iter().flatten());
        if steps.wall_ms.len() != repeats || all.copied().any(|time| !is_time(time)) {
            return Err(self.broken(format!("it gave {:?} for {repeats} steps", steps.wall_ms)));
        }
        Ok(steps)
    }

    /// Serves so many requests of a workload, as many together as its concurrency.
    ///
    /// # Errors
    /// When the engine cannot serve it.
    pub fn serve(
        &mut self,
        engine: &str,
        workload: &espalier_search::Workload,
        requests: usize,
        surroundings: &dyn Surroundings,
    ) -> crate::Result<Served> {
        let request = Request::Serve {
            engine: engine.to_owned(),
            workload: *workload,
            requests,
        };
        let served: Served = self.time(&request, surroundings)?;
        let lists = [&served.first_token_ms, &served.end_to_end_ms];
        let is_whole = lists
            .iter()
            .all(|list| list.len() == requests && list.iter().copied().all(is_time));
        if !is_whole || !is_time(served.output_tokens_per_second) {
            let reason = format!("it gave {lists:?} for {requests} requests");
            return Err(self.broken(reason));
        }
        Ok(served)
    }

    /// What its process holds.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn memory(&mut self, surroundings: &dyn Surroundings) -> crate::Result<Memory> {
        self.ask(&Request::Memory {}, self.deadlines.work, surroundings)
    }

    /// Closes an engine, if it is open.
    ///
    /// # Errors
    /// When it cannot be closed: then the process is of no more use.
    pub fn close(&mut self, engine: &str, surroundings: &dyn Surroundings) -> crate::Result<()> {
        if !self.engines.remove(engine) {
            return Ok(());
        }
        self.had_others = true;
        let engine = engine.to_owned();
        let closed: crate::Result<Value> =
            self.ask(&Request::Close { engine }, self.deadlines.open, surroundings);
        match closed {
            // vLLM gave it up after an error.
            Ok(_) | Err(crate::Error::Vllm(Error::NotOpen { .. })) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Closes whatever is open.
    ///
    /// # Errors
    /// As [`Helper::close`].
    pub fn close_all(&mut self, surroundings: &dyn Surroundings) -> crate::Result<()> {
        while let Some(engine) = self.engines.first().cloned() {
            self.close(&engine, surroundings)?;
        }
        if self.is_idle() {
            return Ok(());
        }
        let (verb, last) = ("close its engines", self.process.last_line());
        let how = self.process.end();
        Err(Error::Ended { how, verb, last }.into())
    }

    /// Asks for something to be timed, and remembers how long one had to wait for it to get further.
    fn time<T: DeserializeOwned>(
        &mut self,
        request: &Request,
        surroundings: &dyn Surroundings,
    ) -> crate::Result<T> {
        let patience = self.deadlines.timing(self.longest, self.step);
        let mut watch = self.watch(patience, surroundings);
        let answer = self.ask_while(request, &mut watch)?;
        self.longest = self.longest.max(Some(watch.longest));
        Ok(answer)
    }

    fn watch<'a>(&self, patience: Duration, surroundings: &'a dyn Surroundings) -> Watch<'a> {
        Watch {
            surroundings,
            patience,
            moved: Instant::now(),
            longest: Duration::ZERO,
            idle_patience: self.deadlines.idle,
            worked: Instant::now(),
            last: None,
            worked_at: 0.0,
        }
    }

    /// Asks, and waits for the answer as long as the helper gets further within `patience`.
    fn ask<T: DeserializeOwned>(
        &mut self,
        request: &Request,
        patience: Duration,
        surroundings: &dyn Surroundings,
    ) -> crate::Result<T> {
        let mut watch = self.watch(patience, surroundings);
        self.ask_while(request, &mut watch)
    }

    fn ask_while<T: DeserializeOwned>(
        &mut self,
        request: &Request,
        watch: &mut Watch<'_>,
    ) -> crate::Result<T> {
        self.last_id += 1;
        let id = self.last_id;
        let numbered = Numbered { id, request };
        let mut line = serde_json::to_vec(&numbered).map_err(|error| Error::Protocol {
            reason: format!("a request cannot be written: {error}"),
        })?;
        line.push(b'\n');
        if !self.process.send(line) {
            return Err(self.broken("it answers and does not read what it is asked".to_owned()));
        }
        loop {
            let answer = match self.process.hear(LOOK) {
                Heard::Answer(answer) => answer,
                Heard::Nothing => {
                    self.look(watch, request)?;
                    continue;
                }
                Heard::Garbage(begins) => {
                    return Err(self.broken(format!("{begins:?} came where an answer was expected")));
                }
                Heard::Closed => {
                    let how = self.process.end();
                    if self.process.was_killed_for_memory() {
                        let reason = format!("the system killed its process, {how}, for want of memory");
                        return Err(Error::OutOfMemory { reason }.into());
                    }
                    let (verb, last) = (request.verb(), self.process.last_line());
                    return Err(Error::Ended { how, verb, last }.into());
                }
            };
            if let Some(done) = self.heard(id, answer, watch)? {
                watch.moves();
                return serde_json::from_value(done).map_err(|error| {
                    self.broken(format!("its answer to {} is none: {error}", request.verb()))
                });
            }
            self.look(watch, request)?;
        }
    }

    /// Whether the attempt should stop, or the helper has got no further for too long.
    fn look(&mut self, watch: &Watch<'_>, request: &Request) -> crate::Result<()> {
        if let Err(stop) = watch.surroundings.check_stopped() {
            self.process.kill();
            return Err(stop);
        }
        let Some(waited) = watch.too_long() else {
            return Ok(());
        };
        self.process.kill();
        let (verb, last) = (request.verb(), self.process.last_line());
        Err(Error::Silent { verb, waited, last }.into())
    }

    /// What the answer is, once it is the last.
    fn heard(&mut self, id: u64, answer: Answer, watch: &mut Watch<'_>) -> crate::Result<Option<Value>> {
        // A line that it did not understand at all bears no number.
        let is_of_none = answer.id.is_none() && answer.error.is_some();
        if answer.id != Some(id) && !is_of_none {
            return Err(self.broken(format!("it answered request {:?}, expected {id}", answer.id)));
        }
        match (answer.progress, answer.done, answer.error) {
            (Some(progress), None, None) => {
                watch.take(progress);
                Ok(None)
            }
            (None, Some(done), None) => Ok(Some(done)),
            (None, None, Some(refusal)) => Err(self.refused(refusal).into()),
            _ => Err(self.broken("an answer is neither progress, done nor error".to_owned())),
        }
    }

    fn refused(&mut self, refusal: Refusal) -> Error {
        let Refusal { kind, says, fatal } = refusal;
        if fatal {
            self.process.kill();
        }
        let reason = says;
        match kind.as_str() {
            "unsupported" | "invalid" => Error::Refused { reason },
            "out_of_memory" => Error::OutOfMemory { reason },
            "busy" => Error::Busy { reason },
            "no_vllm" | "version" => self.unfit(reason),
            "unknown_engine" => Error::NotOpen { reason },
            "protocol" => Error::Protocol { reason },
            _ => Error::Engine { reason },
        }
    }

    /// It cannot be trusted any more.
    fn broken(&mut self, reason: String) -> crate::Error {
        self.process.kill();
        Error::Protocol { reason }.into()
    }
}

fn is_time(milliseconds: f64) -> bool {
    milliseconds.is_finite() && milliseconds >= 0.0
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::tests::Whoever;
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(900);
    const IDLE_PATIENCE: Duration = Duration::from_secs(600);

    #[test]
    fn one_that_gets_further_is_waited_for_and_one_that_only_works_or_only_lives_is_not() {
        let long_ago = Instant::now().checked_sub(2 * PATIENCE).unwrap();
        let whoever = Whoever::default();
        let sign = |done, cpu_seconds| Progress {
            stage: "open".to_owned(),
            done,
            cpu_seconds,
        };
        let after = |next: Progress| {
            let mut watch = Watch {
                surroundings: &whoever,
                patience: PATIENCE,
                moved: long_ago,
                longest: Duration::ZERO,
                idle_patience: IDLE_PATIENCE,
                worked: long_ago,
                last: Some(sign(3, 7.0)),
                worked_at: 7.0,
            };
            watch.take(next);
            // What was waited for too long is told by what it was waited for; the time without work alone once it moved.
            let too_long = watch.too_long();
            watch.moved = Instant::now();
            (too_long, watch.too_long())
        };
        assert_eq!(after(sign(4, 7.0)), (None, None), "it gets further");
        assert_eq!(after(sign(3, 8.0)), (Some(PATIENCE), None), "it works");
        assert_eq!(
            after(sign(3, 7.0)),
            (Some(PATIENCE), Some(IDLE_PATIENCE)),
            "it only says that it lives"
        );
    }
}
