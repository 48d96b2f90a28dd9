//! The last lines of an attempt's log, kept so that a stream that breaks takes none of them with it.

use std::collections::VecDeque;

use espalier_proto::v1::{Lease, Log};

/// Bytes kept for each attempt.
const KEPT_BYTES: usize = 256 << 10;
/// Lines in one message.
const LINES_TOGETHER: usize = 100;

/// Lines of one attempt, the oldest first.
#[derive(Debug)]
pub(super) struct LogTail {
    lines: VecDeque<String>,
    bytes: usize,
    /// The number of the first line kept.
    first: u64,
}

impl Default for LogTail {
    fn default() -> Self {
        Self {
            lines: VecDeque::new(),
            bytes: 0,
            first: 1,
        }
    }
}

impl LogTail {
    /// Takes lines in; gives the message that tells them.
    pub(super) fn push(&mut self, lease: Lease, lines: Vec<String>) -> Log {
        let message = Log {
            lease: Some(lease),
            lines: lines.clone(),
            first_line: self.first + self.lines.len() as u64,
        };
        for line in lines {
            self.bytes += line.len();
            self.lines.push_back(line);
        }
        while self.bytes > KEPT_BYTES
            && let Some(line) = self.lines.pop_front()
        {
            self.bytes -= line.len();
            self.first += 1;
        }
        message
    }

    /// Messages that tell everything kept.
    pub(super) fn messages(&self, lease: Lease) -> Vec<Log> {
        let mut messages = Vec::new();
        let mut lines = self.lines.iter().cloned();
        let mut first_line = self.first;
        loop {
            let together: Vec<String> = lines.by_ref().take(LINES_TOGETHER).collect();
            if together.is_empty() {
                return messages;
            }
            let count = together.len() as u64;
            messages.push(Log {
                lease: Some(lease),
                lines: together,
                first_line,
            });
            first_line += count;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tail_is_bounded_and_its_lines_keep_their_numbers() {
        let lease = Lease {
            term: 1,
            epoch: 1,
            attempt: 1,
        };
        let mut tail = LogTail::default();
        for number in 1..=1000_u64 {
            let message = tail.push(lease, vec![format!("{number:01024}")]);
            assert_eq!(message.first_line, number);
        }
        let kept = tail.messages(lease);
        let lines: usize = kept.iter().map(|message| message.lines.len()).sum();
        assert_eq!(lines, 256);
        assert_eq!(kept.first().map(|message| message.first_line), Some(1001 - 256));
        assert!(kept.iter().all(|message| message.lines.len() <= 100));
        for message in kept {
            assert_eq!(
                message.lines.first().and_then(|line| line.parse().ok()),
                Some(message.first_line)
            );
        }
    }
}
