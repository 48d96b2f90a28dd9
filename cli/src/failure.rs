//! Errors as one line on standard error and an exit code.

use std::fmt;
use std::io::ErrorKind;
use std::process::ExitCode;

use espalier_coordinator::Error;

use crate::output;

/// No room, a file that cannot be used, damage, or anything else that says nothing of a job.
const MACHINE: u8 = 7;

/// An error that carries its own exit code.
#[derive(Debug)]
pub(crate) struct Failure {
    code: u8,
    message: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.message)
    }
}

impl std::error::Error for Failure {}

/// The job failed or was cancelled.
pub(crate) fn job(message: impl Into<String>) -> anyhow::Error {
    Failure {
        code: 1,
        message: message.into(),
    }
    .into()
}

/// What was asked is wrong.
pub(crate) fn usage(message: impl Into<String>) -> anyhow::Error {
    Failure {
        code: 2,
        message: message.into(),
    }
    .into()
}

/// There is no such thing.
pub(crate) fn not_found(message: impl Into<String>) -> anyhow::Error {
    Failure {
        code: 3,
        message: message.into(),
    }
    .into()
}

/// It took too long.
pub(crate) fn timed_out(message: impl Into<String>) -> anyhow::Error {
    Failure {
        code: 4,
        message: message.into(),
    }
    .into()
}

/// It stands in the way of something else.
pub(crate) fn conflict(message: impl Into<String>) -> anyhow::Error {
    Failure {
        code: 6,
        message: message.into(),
    }
    .into()
}

/// The machine or the coordinator failed, whatever becomes of a job.
pub(crate) fn machine(message: impl Into<String>) -> anyhow::Error {
    Failure {
        code: MACHINE,
        message: message.into(),
    }
    .into()
}

/// The user stopped it.
pub(crate) fn interrupted() -> anyhow::Error {
    Failure {
        code: 130,
        message: "interrupted".to_owned(),
    }
    .into()
}

/// The user was asked and did not say yes.
pub(crate) fn declined() -> anyhow::Error {
    Failure {
        code: 130,
        message: "not confirmed: nothing was done".to_owned(),
    }
    .into()
}

/// Prints the error on one line and gives its exit code.
pub(crate) fn report(error: &anyhow::Error) -> ExitCode {
    let message = message(error);
    let line = message.split_whitespace().collect::<Vec<_>>().join(" ");
    output::say(&format!("error: {line}"));
    ExitCode::from(code(error))
}

/// An error and its causes, each said once: many say their cause themselves.
fn message(error: &anyhow::Error) -> String {
    let mut message = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !message.contains(&cause) {
            message.push_str(": ");
            message.push_str(&cause);
        }
    }
    message
}

/// Whether nobody answered, as while a coordinator is restarted.
pub(crate) fn is_away(error: &anyhow::Error) -> bool {
    error.downcast_ref::<Error>().is_some_and(Error::is_away)
}

/// Whether the user ended it.
pub(crate) fn is_interrupted(error: &anyhow::Error) -> bool {
    code(error) == code(&interrupted())
}

fn code(error: &anyhow::Error) -> u8 {
    if let Some(failure) = error.downcast_ref::<Failure>() {
        return failure.code;
    }
    if let Some(error) = error.downcast_ref::<Error>() {
        return code_of_coordinator(error);
    }
    match error.downcast_ref::<espalier_worker::Error>() {
        Some(espalier_worker::Error::Invalid { .. }) => 2,
        Some(espalier_worker::Error::Coordinator { .. }) => 6,
        _ => MACHINE,
    }
}

fn code_of_coordinator(error: &Error) -> u8 {
    match error {
        Error::Invalid(_) | Error::Endpoint { .. } => 2,
        Error::NotFound(_) => 3,
        Error::Unreachable { .. } | Error::Timeout { .. } | Error::Stopping => 4,
        Error::Denied(_) => 5,
        Error::Conflict(_) | Error::InUse { .. } | Error::Succeeded { .. } => 6,
        Error::Listen { source, .. } => match source.kind() {
            ErrorKind::AddrInUse => 6,
            ErrorKind::PermissionDenied => 5,
            _ => 2,
        },
        Error::Exhausted(_)
        | Error::File { .. }
        | Error::StoreId { .. }
        | Error::StoreFull(_)
        | Error::Journal(_)
        | Error::Internal(_) => MACHINE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listen(kind: ErrorKind) -> anyhow::Error {
        let address = std::net::SocketAddr::from(([127, 0, 0, 1], 7474));
        let source = kind.into();
        Error::Listen { address, source }.into()
    }

    fn worker_error(reason: &str) -> anyhow::Error {
        let reason = reason.to_owned();
        espalier_worker::Error::Invalid { reason }.into()
    }

    fn refused_worker() -> anyhow::Error {
        let (address, reason) = (String::new(), String::new());
        espalier_worker::Error::Coordinator { address, reason }.into()
    }

    #[test]
    fn a_cause_is_said_once() {
        let said = message(&listen(ErrorKind::AddrInUse));
        assert_eq!(said.matches("address in use").count(), 1, "{said}");
        let outer = anyhow::anyhow!("no such file").context("the spec cannot be read");
        assert_eq!(message(&outer), "the spec cannot be read: no such file");
    }

    #[test]
    fn every_kind_of_error_has_the_exit_code_that_is_documented() {
        let cases = [
            (job("x"), 1),
            (usage("x"), 2),
            (Error::Invalid(String::new()).into(), 2),
            (Error::NotFound(String::new()).into(), 3),
            (not_found("x"), 3),
            (Error::Timeout { call: "get" }.into(), 4),
            (timed_out("x"), 4),
            (Error::Denied(String::new()).into(), 5),
            (Error::Conflict(String::new()).into(), 6),
            (conflict("x"), 6),
            (interrupted(), 130),
            (Error::Stopping.into(), 4),
            (listen(ErrorKind::AddrInUse), 6),
            (listen(ErrorKind::PermissionDenied), 5),
            (listen(ErrorKind::AddrNotAvailable), 2),
            (Error::Succeeded { own: 1, term: 2 }.into(), 6),
            // A script must be able to tell these from a job that failed.
            (Error::Exhausted(String::new()).into(), 7),
            (Error::Internal(String::new()).into(), 7),
            (machine("x"), 7),
            (anyhow::anyhow!("anything"), 7),
            (worker_error("name"), 2),
            (refused_worker(), 6),
        ];
        for (error, expected) in cases {
            assert_eq!(code(&error), expected, "{error:?}");
        }
    }
}
