//! The last lines of an attempt's log, kept so that a stream that breaks or is full takes none of them with it.

use std::collections::VecDeque;

use espalier_proto::v1::{Lease, Log};

/// Bytes kept for each attempt.
const KEPT_BYTES: usize = 256 << 10;
/// Lines in one message.
const LINES_TOGETHER: usize = 100;

/// Lines of one attempt, the oldest first, each with its number: those that nobody could keep up with are missing.
#[derive(Debug)]
pub(super) struct LogTail {
    lines: VecDeque<(u64, String)>,
    bytes: usize,
    /// The number after the last line that was written, as far as is known.
    next: u64,
    /// The number of the first line that no stream has taken.
    unsaid: u64,
}

impl Default for LogTail {
    fn default() -> Self {
        Self {
            lines: VecDeque::new(),
            bytes: 0,
            next: 1,
            unsaid: 1,
        }
    }
}

impl LogTail {
    /// Takes lines in. Without lines it only says that so many were written.
    pub(super) fn push(&mut self, first_line: u64, lines: Vec<String>) {
        let mut number = first_line.max(self.next);
        for line in lines {
            self.bytes += line.len();
            self.lines.push_back((number, line));
            number += 1;
        }
        self.next = number;
        while self.bytes > KEPT_BYTES
            && let Some((_, line)) = self.lines.pop_front()
        {
            self.bytes -= line.len();
        }
    }

    /// A stream did not take the lines from this number on, or has ended and may have lost them.
    pub(super) fn unsay(&mut self, first_line: u64) {
        self.unsaid = self.unsaid.min(first_line);
    }

    /// Messages that tell what no stream has taken yet, and the end of what was written when its last lines are
    /// missing. Each is as long as it can be without a line missing in it.
    pub(super) fn say(&mut self, lease: Lease) -> Vec<Log> {
        let mut messages: Vec<Log> = Vec::new();
        for (number, line) in self.lines.iter().filter(|(number, _)| *number >= self.unsaid) {
            let last = messages.last_mut().filter(|message| {
                message.lines.len() < LINES_TOGETHER
                    && message.first_line + message.lines.len() as u64 == *number
            });
            match last {
                Some(message) => message.lines.push(line.clone()),
                None => messages.push(Log {
                    lease: Some(lease),
                    lines: vec![line.clone()],
                    first_line: *number,
                }),
            }
        }
        let is_last_kept = self
            .lines
            .back()
            .is_none_or(|(number, _)| number + 1 == self.next);
        if !is_last_kept && self.unsaid < self.next {
            messages.push(Log {
                lease: Some(lease),
                lines: Vec::new(),
                first_line: self.next,
            });
        }
        self.unsaid = self.next;
        messages
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Lease = Lease {
        term: 1,
        epoch: 1,
        attempt: 1,
    };

    fn told(tail: &mut LogTail) -> Vec<(u64, usize)> {
        let messages = tail.say(LEASE).into_iter();
        messages
            .map(|message| (message.first_line, message.lines.len()))
            .collect()
    }

    #[test]
    fn the_tail_is_bounded_and_its_lines_keep_their_numbers() {
        let mut tail = LogTail::default();
        for number in 1..=1000_u64 {
            tail.push(number, vec![format!("{number:01024}")]);
            assert_eq!(told(&mut tail), [(number, 1)]);
        }
        tail.unsay(1);
        let kept = tail.say(LEASE);
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

    #[test]
    fn missing_lines_show_by_the_numbers_and_so_do_missing_last_ones() {
        let mut tail = LogTail::default();
        tail.push(1, vec!["1".to_owned(), "2".to_owned()]);
        tail.push(5, vec!["5".to_owned()]);
        assert_eq!(told(&mut tail), [(1, 2), (5, 1)]);
        assert_eq!(told(&mut tail), [], "all is said");
        tail.push(9, Vec::new());
        assert_eq!(told(&mut tail), [(9, 0)], "6 to 8 were written and are missing");
        tail.unsay(5);
        assert_eq!(told(&mut tail), [(5, 1), (9, 0)]);
    }
}
