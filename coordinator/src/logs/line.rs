//! One line of a log: its time, and its text made harmless.

use std::fmt::Write;

/// Characters of a line that are kept, at the most.
const LONGEST: usize = 4 << 10;

/// Appends a line with its time (UTC) to a file's text. What could move a cursor, end the line or forge a
/// mark is written as `\u{1b}`.
pub fn write(text: &mut String, unix_ms: i64, line: &str) {
    let _ = write!(text, "{} ", time(unix_ms));
    for character in line.trim_end_matches(['\n', '\r']).chars().take(LONGEST) {
        match character {
            '\t' => text.push('\t'),
            _ if character.is_control() || is_invisible(character) => text.extend(character.escape_unicode()),
            _ => text.push(character),
        }
    }
    text.push('\n');
}

/// Characters that reorder or hide text.
fn is_invisible(character: char) -> bool {
    matches!(character, '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2028}' | '\u{2029}'
        | '\u{2066}'..='\u{2069}' | '\u{feff}')
}

/// `2026-03-01T12:00:00.250Z`.
pub fn time(unix_ms: i64) -> String {
    let (days, in_day) = (unix_ms.div_euclid(86_400_000), unix_ms.rem_euclid(86_400_000));
    let (year, month, day) = date(days);
    let (hour, minute) = (in_day / 3_600_000, in_day / 60_000 % 60);
    let (second, milliseconds) = (in_day / 1000 % 60, in_day % 1000);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{milliseconds:03}Z")
}

/// The date of a day counted from 1970, in years that begin in March: a leap day is then the last of its year.
fn date(days: i64) -> (i64, i64, i64) {
    let days = days + 719_468;
    let (era, in_era) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year_of_era = (in_era - in_era / 1460 + in_era / 36_524 - in_era / 146_096) / 365;
    let in_year = in_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * in_year + 2) / 153;
    let day = in_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 {
        from_march + 3
    } else {
        from_march - 9
    };
    let year = era * 400 + year_of_era + i64::from(month <= 2);
    (year, month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_dates() {
        assert_eq!(time(0), "1970-01-01T00:00:00.000Z");
        assert_eq!(time(951_782_400_250), "2000-02-29T00:00:00.250Z");
        assert_eq!(time(1_772_366_399_999), "2026-03-01T11:59:59.999Z");
        assert_eq!(time(-1), "1969-12-31T23:59:59.999Z");
    }

    #[test]
    fn control_characters_are_made_harmless() {
        let mut text = String::new();
        write(&mut text, 0, "\u{1b}[2Jred\tand\rforged\n2026 line\u{202e}\n");
        assert_eq!(
            text,
            "1970-01-01T00:00:00.000Z \\u{1b}[2Jred\tand\\u{d}forged\\u{a}2026 line\\u{202e}\n"
        );
    }

    #[test]
    fn an_endless_line_is_cut() {
        let mut text = String::new();
        write(&mut text, 0, &"x".repeat(1 << 20));
        assert!(text.len() < LONGEST + 32);
    }
}
