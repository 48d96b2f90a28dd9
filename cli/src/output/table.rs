//! The one table renderer.

/// Columns as wide as they need, two spaces between them, nothing after the last.
pub(super) fn table(heads: &[&str], rows: Vec<Vec<String>>) -> String {
    let head = heads.iter().map(|head| (*head).to_owned()).collect::<Vec<_>>();
    let rows: Vec<Vec<String>> = std::iter::once(head).chain(rows).collect();
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
