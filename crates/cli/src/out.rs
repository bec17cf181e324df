//! What is printed: aligned tables, numbers for people, colour only where it is wanted.

use std::io::{self, IsTerminal, Write};

use tombolo_host::environment::variable;

use crate::exit::Failure;

/// Writes a line to standard error. Unlike `eprintln!` it does not panic where that is full or
/// closed: a daemon whose log is on a full disk lives on.
macro_rules! tell {
    ($($arg:tt)*) => {{
        use std::io::Write as _;
        // There is no other place to complain.
        let _ = writeln!(std::io::stderr(), $($arg)*);
    }};
}
pub(crate) use tell;

/// Says on standard error what happens.
pub(crate) fn teller() -> tombolo_host::fabric::Say {
    std::sync::Arc::new(|line: &str| tell!("tombolo: {line}"))
}

/// Prints text to standard output.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()?;
    Ok(())
}

/// Prints a report as JSON, indented for those who read it as it is.
pub(crate) fn json(value: &impl serde::Serialize) -> Result<(), Failure> {
    let text = serde_json::to_string_pretty(value).map_err(|e| Failure::failed(e.to_string()))?;
    print(&format!("{text}\n"))
}

/// Whether colour may be used on standard output: a terminal, and no NO_COLOR (no-color.org).
pub(crate) fn colour() -> bool {
    let unwanted = variable("NO_COLOR").is_some();
    let dumb = std::env::var_os("TERM").is_some_and(|t| t == "dumb");
    io::stdout().is_terminal() && !unwanted && !dumb
}

/// How a piece of text is highlighted, if there is colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tone {
    /// Headings.
    Bold,
    /// What is as it should be.
    Good,
    /// What is not.
    Bad,
}

pub(crate) fn toned(text: &str, tone: Tone, colour: bool) -> String {
    let code = match tone {
        Tone::Bold => "1",
        Tone::Good => "32",
        Tone::Bad => "31",
    };
    if colour { format!("\x1b[{code}m{text}\x1b[0m") } else { text.into() }
}

/// A table: headings, rows, and below a row lines of its own. A heading that starts with `>` is of
/// a column of numbers, aligned to the right.
#[derive(Debug, Default)]
pub(crate) struct Table {
    heads: Vec<&'static str>,
    rows: Vec<(Vec<String>, Vec<String>)>,
}

impl Table {
    pub(crate) fn new(heads: &[&'static str]) -> Table {
        Table { heads: heads.to_vec(), rows: vec![] }
    }

    pub(crate) fn row(&mut self, cells: &[&str]) -> &mut Vec<String> {
        self.rows.push((cells.iter().map(|c| c.to_string()).collect(), vec![]));
        &mut self.rows.last_mut().expect("pushed the line before").1
    }

    pub(crate) fn render(&self, colour: bool) -> String {
        let names: Vec<&str> = self.heads.iter().map(|h| h.trim_start_matches('>')).collect();
        let width = |i: usize| {
            let cells = self.rows.iter().map(|(cells, _)| cells[i].chars().count());
            cells.chain([names[i].chars().count()]).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..names.len()).map(width).collect();
        let line = |cells: &[&str]| {
            let mut out = String::new();
            for (i, cell) in cells.iter().enumerate() {
                let pad = " ".repeat(widths[i] - cell.chars().count());
                let right = self.heads[i].starts_with('>');
                out.push_str(if i > 0 { "  " } else { "" });
                out.push_str(&if right { format!("{pad}{cell}") } else { format!("{cell}{pad}") });
            }
            out.trim_end().to_string()
        };
        let mut out = toned(&line(&names), Tone::Bold, colour) + "\n";
        for (cells, notes) in &self.rows {
            let cells: Vec<&str> = cells.iter().map(String::as_str).collect();
            out.push_str(&line(&cells));
            out.push('\n');
            for note in notes {
                out.push_str(&format!("    {}\n", toned(note, Tone::Bad, colour)));
            }
        }
        out
    }
}

/// A number with a unit prefix of thousands and three or four digits: "0", "999", "1.50 k", "12.3
/// M".
pub(crate) fn scaled(value: f64, unit: &str) -> String {
    let mut value = value;
    let mut prefix = "";
    for next in ["k", "M", "G", "T", "P"] {
        // What would round up to a thousand belongs to the next prefix.
        if value < 999.5 {
            break;
        }
        value /= 1000.0;
        prefix = next;
    }
    let digits = match value {
        _ if prefix.is_empty() && value.fract() == 0.0 => 0,
        v if v < 9.995 => 2,
        v if v < 99.95 => 1,
        _ => 0,
    };
    let space = if prefix.is_empty() && unit.is_empty() { "" } else { " " };
    format!("{value:.digits$}{space}{prefix}{unit}")
}

/// A span of time: "850 ms", "12 s", "3 min 20 s", "2 h 5 min", "4 d 1 h".
pub(crate) fn span(seconds: f64) -> String {
    if seconds < 1.0 {
        return format!("{:.0} ms", seconds * 1000.0);
    }
    let s = seconds as u64;
    match s {
        0..60 => format!("{s} s"),
        60..3600 => format!("{} min {} s", s / 60, s % 60),
        3600..86400 => format!("{} h {} min", s / 3600, s / 60 % 60),
        _ => format!("{} d {} h", s / 86400, s / 3600 % 24),
    }
}

/// `1 port`, `2 ports`.
pub(crate) fn counted(n: usize, noun: &str) -> String {
    format!("{n} {noun}{}", if n == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short_and_never_a_thousand() {
        let cases = [
            (0.0, "0"),
            (7.0, "7"),
            (0.25, "0.25"),
            (999.0, "999"),
            (999.7, "1.00 k"),
            (1500.0, "1.50 k"),
            (12_345_678.0, "12.3 M"),
            (999_600.0, "1.00 M"),
            (123e9, "123 G"),
        ];
        for (value, text) in cases {
            assert_eq!(scaled(value, ""), text, "{value}");
        }
        assert_eq!((scaled(0.0, "B"), scaled(1e6, "bit/s")), ("0 B".into(), "1.00 Mbit/s".into()));
    }

    #[test]
    fn spans_are_told_in_two_units() {
        let cases =
            [(0.0421, "42 ms"), (59.9, "59 s"), (200.0, "3 min 20 s"), (7500.0, "2 h 5 min"), (349_300.0, "4 d 1 h")];
        for (value, text) in cases {
            assert_eq!(span(value), text);
        }
    }

    #[test]
    fn a_table_is_aligned_and_plain_without_colour() {
        let mut table = Table::new(&["NAME", ">N"]);
        table.row(&["a", "1"]).push("dropped".into());
        table.row(&["länger", "1000"]);
        assert_eq!(table.render(false), "NAME       N\na          1\n    dropped\nlänger  1000\n");
        assert!(table.render(true).starts_with("\x1b[1mNAME"));
    }
}
