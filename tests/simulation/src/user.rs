//! Who asks: users that submit, cancel, pause and retry jobs, and keepers that cordon and drain workers. Each
//! asks again until it is answered, with the same request id.

use std::time::Duration;

use espalier_coordinator::scheduler::JobId;
use espalier_coordinator::service::owner::{JobOrder, Request, Submission, WorkerOrder};
use espalier_proto::v1;
use tokio::sync::oneshot;
use tonic::{Code, Status};

use crate::coordinator::Waiting;
use crate::network::Place;
use crate::plan::{Errand, What};
use crate::planner::JobShape;
use crate::world::{Event, World};

/// How long somebody waits for an answer before asking again.
const PATIENCE: Duration = Duration::from_secs(10);

/// All who ask.
#[derive(Debug, Default)]
pub struct User {
    /// What is asked, as planned.
    errands: Vec<Errand>,
    /// What came of each.
    done: Vec<Option<Answer>>,
    answers: Vec<Answer>,
}

/// What came of an errand.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// The job it made or was about.
    Job(JobId),
    /// It was done.
    Done,
    /// Refused for good.
    Refused(String),
}

impl User {
    /// Everybody, before anything was asked.
    pub fn new(errands: Vec<Errand>) -> Self {
        Self {
            done: vec![None; errands.len()],
            answers: Vec::new(),
            errands,
        }
    }

    /// When each errand is first run.
    pub fn times(&self) -> impl Iterator<Item = crate::clock::Time> + '_ {
        self.errands.iter().map(|errand| errand.at)
    }

    /// The job that an errand made.
    pub fn job_of(&self, errand: usize) -> Option<JobId> {
        match self.done.get(errand)? {
            Some(Answer::Job(job)) => Some(*job),
            _ => None,
        }
    }

    /// Submissions that nobody has answered.
    pub fn unanswered(&self) -> Vec<usize> {
        let submits = |index: &usize| {
            matches!(
                self.errands.get(*index),
                Some(Errand {
                    what: What::Submit { .. },
                    ..
                })
            )
        };
        (0..self.errands.len())
            .filter(|index| submits(index) && self.done.get(*index).is_some_and(Option::is_none))
            .collect()
    }
}

fn whim() -> String {
    "a whim".to_owned()
}

/// The request id of an errand.
pub fn request_id(errand: usize) -> String {
    format!("request-{errand}")
}

impl World {
    /// An errand is run, or run again.
    pub fn user_acts(&mut self, errand: usize) {
        if self.user.done.get(errand).is_none_or(Option::is_some) {
            return;
        }
        let machine = self.address;
        for latency in self.call(Place::User, Place::Coordinator(machine)) {
            self.queue.after(latency, Event::UserAsks { machine, errand });
        }
        // Submitting twice is harmless: that is what the request id is for.
        let patience = self.dice.duration(PATIENCE / 10, PATIENCE);
        self.queue.after(patience, Event::UserActs { errand });
    }

    /// A request of a user arrives.
    pub fn user_asks(&mut self, machine: usize, errand: usize) {
        let runs = self
            .coordinators
            .get(machine)
            .is_some_and(|known| known.process.is_some());
        let Some(asked) = self.user.errands.get(errand).filter(|_| runs) else {
            return;
        };
        match asked.what.clone() {
            What::Submit { shape, priority } => self.submit(machine, errand, &shape, priority),
            What::Cancel(of) => self.keep_job(machine, errand, of, JobOrder::Cancel { reason: whim() }),
            What::Pause(of) => self.keep_job(machine, errand, of, JobOrder::Pause { reason: whim() }),
            What::Resume(of) => self.keep_job(machine, errand, of, JobOrder::Resume),
            What::Retry(of) => {
                let request_id = Some(request_id(errand));
                self.keep_job(machine, errand, of, JobOrder::Retry { request_id });
            }
            What::Cordon(of) => self.keep_worker(machine, errand, of, WorkerOrder::Cordon { reason: whim() }),
            What::Uncordon(of) => self.keep_worker(machine, errand, of, WorkerOrder::Uncordon),
            What::Drain(of) => self.keep_worker(machine, errand, of, WorkerOrder::Drain { reason: whim() }),
        }
    }

    fn keep_job(&mut self, machine: usize, errand: usize, of: usize, order: JobOrder) {
        let Some(job) = self.user.job_of(of) else {
            return self.settle(errand, Answer::Refused("there is no such job yet".to_owned()));
        };
        let (reply, answer) = oneshot::channel();
        self.expect(machine, Waiting::Job { errand, answer });
        self.ask(machine, Request::KeepJob { job, order, reply });
    }

    fn keep_worker(&mut self, machine: usize, errand: usize, of: usize, order: WorkerOrder) {
        let Some(name) = self.workers.get(of).map(|known| known.name.clone()) else {
            return;
        };
        let (reply, answer) = oneshot::channel();
        self.expect(machine, Waiting::Worker { errand, answer });
        self.ask(machine, Request::KeepWorker { name, order, reply });
    }

    fn submit(&mut self, machine: usize, errand: usize, shape: &JobShape, priority: i32) {
        let submission = Submission {
            spec: serde_json::to_string(shape).unwrap_or_default().into(),
            parent: "pretended".to_owned(),
            output: format!("/out/{errand}"),
            device_kind: "cuda".to_owned(),
            priority,
            free: Ok(()),
        };
        let (reply, answer) = oneshot::channel();
        self.expect(machine, Waiting::Submission { errand, answer });
        let request = Request::Submit {
            request_id: Some(request_id(errand)),
            submission: Box::new(submission),
            reply,
        };
        self.ask(machine, request);
    }

    /// A coordinator's answer to a submission sets out.
    pub fn submission_answered(
        &mut self,
        machine: usize,
        errand: usize,
        delay: Duration,
        answer: Result<(v1::Job, bool), Status>,
    ) {
        self.job_answered(machine, errand, delay, answer.map(|(job, _)| job));
    }

    /// A coordinator's answer about a job sets out.
    pub fn job_answered(
        &mut self,
        machine: usize,
        errand: usize,
        delay: Duration,
        answer: Result<v1::Job, Status>,
    ) {
        let answer = answer.map(|job| match job.id.parse() {
            Ok(job) => Answer::Job(job),
            Err(error) => Answer::Refused(error),
        });
        self.answer_user(machine, errand, delay, answer);
    }

    /// A coordinator's answer to a user sets out.
    pub fn answer_user(
        &mut self,
        machine: usize,
        errand: usize,
        delay: Duration,
        answer: Result<Answer, Status>,
    ) {
        let answer = match answer {
            Ok(answer) => answer,
            // Of those that may pass, it will ask again.
            Err(status) if passes(status.code()) => return,
            Err(status) => Answer::Refused(status.message().to_owned()),
        };
        let known = self.user.answers.len() as u64;
        self.user.answers.push(answer);
        for latency in self.call(Place::Coordinator(machine), Place::User) {
            self.queue.after(
                delay + latency,
                Event::UserHears {
                    errand,
                    answer: known,
                },
            );
        }
    }

    /// An answer to a user arrives.
    ///
    /// # Errors
    /// When it cannot be true.
    pub fn user_hears(&mut self, errand: usize, answer: u64) -> Result<(), String> {
        let answer = usize::try_from(answer)
            .ok()
            .and_then(|index| self.user.answers.get(index).cloned());
        let Some(answer) = answer else { return Ok(()) };
        let now = self.now();
        self.trace.step(now, "answer", errand as u64, 0, || {
            format!("errand {errand}: {answer:?}")
        });
        let submits = matches!(
            self.user.errands.get(errand),
            Some(Errand {
                what: What::Submit { .. },
                ..
            })
        );
        if submits && let Answer::Job(job) = &answer {
            self.oracle.accepted(&request_id(errand), *job)?;
        }
        self.settle(errand, answer);
        Ok(())
    }

    fn settle(&mut self, errand: usize, answer: Answer) {
        if let Some(done) = self.user.done.get_mut(errand) {
            *done = Some(answer);
        }
    }
}

/// Whether an error may pass by itself.
fn passes(code: Code) -> bool {
    matches!(
        code,
        Code::Unavailable | Code::ResourceExhausted | Code::DeadlineExceeded | Code::Internal
    )
}
