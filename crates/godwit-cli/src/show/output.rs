//! Results of commands on standard output: tables and facts for people, JSON for programs.

use std::io::{self, IsTerminal as _, Write as _};

use serde::Serialize;

use crate::failure::Failure;

/// The form of results.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Output {
    /// True for JSON instead of text.
    pub json: bool,
}

impl Output {
    /// Prints a result: the value itself as JSON, or the text from `text`.
    pub(crate) fn print<T: Serialize + ?Sized>(
        self,
        value: &T,
        text: impl FnOnce(&T) -> String,
    ) -> Result<(), Failure> {
        if self.json {
            print_text(&to_json(value)?)
        } else {
            print_text(&text(value))
        }
    }

    /// Returns true if messages beside the result are suppressed: a program that asked for JSON finds nothing but an
    /// error on standard error, as JSON.
    pub(crate) fn is_quiet(self) -> bool {
        self.json && !io::stderr().is_terminal()
    }

    /// Prints a message beside the result.
    pub(crate) fn say(self, text: &str) {
        if !self.is_quiet() {
            eprintln!("{text}");
        }
    }

    /// Prints one result of a series as a line of JSON; prints nothing in text mode.
    pub(crate) fn print_json_line<T: Serialize>(self, value: &T) -> Result<(), Failure> {
        if !self.json {
            return Ok(());
        }
        let line = serde_json::to_string(value).map_err(|error| unwritable(&error))?;
        print_text(&line)
    }
}

fn to_json<T: Serialize + ?Sized>(value: &T) -> Result<String, Failure> {
    serde_json::to_string_pretty(value).map_err(|error| unwritable(&error))
}

fn unwritable(error: &dyn std::error::Error) -> Failure {
    Failure::caused("cannot write the result as JSON", error)
}

/// Prints text and a line end.
pub(crate) fn print_text(text: &str) -> Result<(), Failure> {
    if text.is_empty() {
        return Ok(());
    }
    let mut stdout = io::stdout().lock();
    let mut text = text.trim_end().to_owned();
    text.push('\n');
    match stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush())
    {
        // A closed pipe, as in `godwit disk list | head -1`, is not a failure.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written.map_err(|error| Failure::caused("cannot print the result", &error)),
    }
}

/// Aligns rows under their headings, two spaces apart. Returns `empty` if there are no rows.
pub(crate) fn table<const N: usize>(
    headings: [&str; N],
    rows: impl IntoIterator<Item = [String; N]>,
    empty: &str,
) -> String {
    let mut lines = vec![headings.map(str::to_owned)];
    lines.extend(rows);
    if lines.len() == 1 {
        return empty.to_owned();
    }
    let width = |column: usize| lines.iter().map(|row| row[column].chars().count()).max();
    let widths: [usize; N] = std::array::from_fn(|column| width(column).unwrap_or(0));
    let mut text = String::new();
    for row in &lines {
        let cells = row
            .iter()
            .zip(widths)
            .map(|(cell, width)| format!("{cell:width$}"));
        text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
        text.push('\n');
    }
    text
}

/// Formats one fact per line, after its name. Facts without a value are left out.
pub(crate) fn facts<const N: usize>(facts: [(&str, Option<String>); N]) -> String {
    let width = facts.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    let mut text = String::new();
    for (name, value) in facts {
        if let Some(value) = value {
            text.push_str(&format!("{name:width$}  {value}\n"));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell_and_lines_end_without_spaces() {
        let rows = [["a", "1"], ["longer", ""]].map(|row| row.map(str::to_owned));
        assert_eq!(
            table(["NAME", "N"], rows, "none"),
            "NAME    N\na       1\nlonger\n"
        );
        assert_eq!(table(["NAME"], [], "none"), "none");
    }

    #[test]
    fn facts_without_a_value_are_left_out() {
        let shown = facts([
            ("a", Some("1".to_owned())),
            ("bb", None),
            ("ccc", Some("3".into())),
        ]);
        assert_eq!(shown, "a    1\nccc  3\n");
    }
}
