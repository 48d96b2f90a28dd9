//! The one table renderer.

/// Text for a terminal: what would move the cursor, hide or reorder text, or break a line where a line is expected, is
/// shown instead of done. What a worker or a user wrote is never let do that.
pub(crate) fn plain(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}' => {
                shown.extend(character.escape_unicode());
            }
            _ if character.is_control() => shown.extend(character.escape_default()),
            _ => shown.push(character),
        }
    }
    shown
}

/// Columns as wide as they need, two spaces between them, nothing after the last.
pub(super) fn table(heads: &[&str], rows: Vec<Vec<String>>) -> String {
    let head = heads.iter().map(|head| (*head).to_owned()).collect::<Vec<_>>();
    let mut rows: Vec<Vec<String>> = std::iter::once(head).chain(rows).collect();
    for cell in rows.iter_mut().flatten() {
        *cell = plain(cell);
    }
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..heads.len()).map(width).collect();
    let mut text = String::new();
    for row in &rows {
        let cells = row
            .iter()
            .zip(&widths)
            .map(|(cell, width)| format!("{cell:width$}"));
        text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_worker_wrote_neither_breaks_a_row_nor_reaches_the_terminal_as_a_command() {
        let rows = vec![vec![
            "node-7".into(),
            "lost:\n\u{1b}[2Jgone\r\u{9b}A\tü\u{202e}".into(),
            "x".into(),
        ]];
        let text = table(&["WORKER", "MESSAGE", "M"], rows);
        assert_eq!(text.lines().count(), 2, "{text}");
        assert!(
            text.contains("lost:\\n\\u{1b}[2Jgone\\r\\u{9b}A\\tü\\u{202e}  x"),
            "{text}"
        );
        assert!(!text.replace('\n', "").contains(char::is_control), "{text:?}");
    }

    #[test]
    fn columns_line_up_and_lines_end_without_spaces() {
        let rows = vec![
            vec!["job-1".into(), "running".into(), String::new()],
            vec!["job-10".into(), "é".into(), "x".into()],
        ];
        assert_eq!(
            table(&["JOB", "STATE", "M"], rows),
            "JOB     STATE    M\njob-1   running\njob-10  é        x\n"
        );
    }
}
