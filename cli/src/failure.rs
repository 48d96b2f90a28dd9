//! Errors as one line on standard error and an exit code.

use std::fmt;
use std::process::ExitCode;

use espalier_coordinator::Error;

use crate::output;

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
    let message = format!("{error:#}");
    let line = message.split_whitespace().collect::<Vec<_>>().join(" ");
    output::say(&format!("error: {line}"));
    ExitCode::from(code(error))
}

/// Whether nobody answered, as while a coordinator is restarted.
pub(crate) fn is_away(error: &anyhow::Error) -> bool {
    matches!(
        error.downcast_ref::<Error>(),
        Some(Error::Unreachable { .. } | Error::Timeout { .. })
    )
}

/// Whether the user ended it.
pub(crate) fn is_interrupted(error: &anyhow::Error) -> bool {
    code(error) == code(&interrupted())
}

fn code(error: &anyhow::Error) -> u8 {
    if let Some(failure) = error.downcast_ref::<Failure>() {
        return failure.code;
    }
    match error.downcast_ref::<Error>() {
        Some(Error::Invalid(_) | Error::Endpoint { .. }) => 2,
        Some(Error::NotFound(_)) => 3,
        Some(Error::Unreachable { .. } | Error::Timeout { .. }) => 4,
        Some(Error::Denied(_)) => 5,
        Some(Error::Conflict(_) | Error::InUse { .. }) => 6,
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_error_has_the_exit_code_that_is_documented() {
        let cases = [
            (job("x"), 1),
            (usage("x"), 2),
            (Error::Invalid(String::new()).into(), 2),
            (Error::NotFound(String::new()).into(), 3),
            (Error::Timeout { call: "get" }.into(), 4),
            (timed_out("x"), 4),
            (Error::Denied(String::new()).into(), 5),
            (Error::Conflict(String::new()).into(), 6),
            (conflict("x"), 6),
            (interrupted(), 130),
            (Error::Exhausted(String::new()).into(), 1),
        ];
        for (error, expected) in cases {
            assert_eq!(code(&error), expected, "{error:?}");
        }
    }
}
