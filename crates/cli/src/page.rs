//! A page of docs/ as a manual page: the Markdown that these pages use in, roff out (groff_man(7)).
//!
//! What it knows: headings, paragraphs, lists of one level, fenced blocks, tables, and within a
//! line code, bold and links. A table becomes a list of terms, since the tables of keys are too
//! wide for a terminal. What it does not know stays as it is.

/// A page, `NAME(SECTION)`; `about` is its line in whatis(1), and `see` ends it.
pub(crate) fn manual(markdown: &str, name: &str, section: u8, about: &str, see: &[&str]) -> String {
    let version = env!("CARGO_PKG_VERSION");
    let mut out =
        format!(".TH {name} {section} \"\" \"tombolo {version}\" \"Tombolo\"\n.SH NAME\n{name} \\- {about}\n");
    out.push_str(".SH DESCRIPTION\n");
    let lines: Vec<&str> = markdown.lines().collect();
    let mut at = 0;
    // The title of the page is in its head.
    while let Some(line) = lines.get(at) {
        let text = line.trim();
        at += 1;
        if text.is_empty() || line.starts_with("# ") {
            continue;
        }
        let indented = |l: &&str| l.starts_with("  ") && !l.trim().is_empty();
        if let Some(title) = line.strip_prefix("## ") {
            out.push_str(&format!(".SH {}\n", inline(&title.to_uppercase())));
        } else if let Some(title) = line.strip_prefix("### ") {
            out.push_str(&format!(".SS {}\n", inline(title)));
        } else if text.starts_with("```") {
            let block: Vec<_> = lines[at..].iter().take_while(|l| !l.trim().starts_with("```")).collect();
            at += block.len() + 1;
            out.push_str(".PP\n.RS 4\n.EX\n");
            block.iter().for_each(|l| out.push_str(&guarded(&escaped(l, true))));
            out.push_str(".EE\n.RE\n");
        } else if let Some(first) = text.strip_prefix("- ") {
            let rest: Vec<_> = lines[at..].iter().take_while(|l| indented(l) && !l.trim().starts_with("- ")).collect();
            at += rest.len();
            let words: Vec<_> = std::iter::once(first).chain(rest.iter().map(|l| l.trim())).collect();
            out.push_str(&format!(".IP \\(bu 2\n{}", guarded(&inline(&words.join(" ")))));
        } else if text.starts_with('|') {
            let rows: Vec<_> = lines[at..].iter().take_while(|l| l.trim().starts_with('|')).collect();
            at += rows.len();
            let head = cells(text);
            // The first of them is the line below the head.
            rows.iter().skip(1).for_each(|row| out.push_str(&term(&head, &cells(row.trim()))));
        } else {
            let ends = |l: &&str| {
                let l = l.trim();
                l.is_empty() || ["#", "```", "- ", "|"].iter().any(|mark| l.starts_with(mark))
            };
            let rest: Vec<_> = lines[at..].iter().take_while(|l| !ends(l)).map(|l| l.trim()).collect();
            at += rest.len();
            let words: Vec<_> = std::iter::once(text).chain(rest).collect();
            out.push_str(&format!(".PP\n{}", guarded(&inline(&words.join(" ")))));
        }
    }
    let see: Vec<_> = see.iter().map(|page| page.split_once('(').map_or(page.to_string(), bold_name)).collect();
    out + &format!(".SH SEE ALSO\n{}\n", see.join(", "))
}

fn bold_name((name, rest): (&str, &str)) -> String {
    format!("\\fB{}\\fR({rest}", escaped(name, true))
}

/// The cells of a row of a table.
fn cells(row: &str) -> Vec<&str> {
    row.trim_matches('|').split(" | ").map(str::trim).collect()
}

/// A row as a term with its text. Columns beyond the second have their names before them.
fn term(head: &[&str], row: &[&str]) -> String {
    let first = row.first().copied().unwrap_or_default();
    let mut text = String::new();
    for (i, cell) in row.iter().enumerate().skip(1) {
        let name = head.get(i).copied().unwrap_or_default();
        // The last column of a table of keys is a sentence of its own.
        let named = if i == 1 || i + 1 == row.len() { String::new() } else { format!("{name}: ") };
        text.push_str(&format!("{}{named}{cell}", if i > 1 { ". " } else { "" }));
    }
    format!(".TP\n{}{}", guarded(&inline(first)), guarded(&inline(&text)))
}

/// A line of text that roff does not take for a request, with its end.
fn guarded(text: &str) -> String {
    let guard = if text.starts_with(['.', '\'']) { "\\&" } else { "" };
    format!("{guard}{text}\n")
}

/// Text for roff. In code a hyphen is a minus, which can be copied into a shell.
fn escaped(text: &str, is_code: bool) -> String {
    let mut out = String::new();
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\e"),
            '-' if is_code => out.push_str("\\-"),
            '~' => out.push_str("\\(ti"),
            '^' => out.push_str("\\(ha"),
            '\'' if is_code => out.push_str("\\(aq"),
            '`' => out.push_str("\\(ga"),
            c if c.is_ascii() => out.push(c),
            c => out.push_str(&format!("\\[u{:04X}]", u32::from(c))),
        }
    }
    out
}

/// A line with code, bold and links. Of a link to another page of docs/ its text is left.
fn inline(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    let mut is_bold = false;
    while let Some(at) = rest.find(['`', '*', '[']) {
        out.push_str(&escaped(&rest[..at], false));
        let (mark, after) = rest[at..].split_at(1);
        if let Some((code, end)) = after.split_once('`').filter(|_| mark == "`") {
            out.push_str(&format!("\\fB{}\\fR", escaped(code, true)));
            if is_bold {
                out.push_str("\\fB");
            }
            rest = end;
        } else if let Some(end) = after.strip_prefix('*').filter(|_| mark == "*") {
            is_bold = !is_bold;
            out.push_str(if is_bold { "\\fB" } else { "\\fR" });
            rest = end;
        } else if let Some(((label, target), end)) = after
            .split_once("](")
            .and_then(|(label, more)| Some(((label, more.split_once(')')?.0), more.split_once(')')?.1)))
            .filter(|((label, _), _)| mark == "[" && !label.contains(['[', ']']))
        {
            out.push_str(&inline(label));
            if target.starts_with("http") {
                out.push_str(&format!(" ({})", escaped(target, true)));
            }
            rest = end;
        } else {
            out.push_str(&escaped(mark, false));
            rest = after;
        }
    }
    out + &escaped(rest, false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_become_fonts_and_requests_stay_text() {
        let cases = [
            ("use `--dry-run` now", "use \\fB\\-\\-dry\\-run\\fR now"),
            ("**bold** and *", "\\fBbold\\fR and *"),
            ("see [policy](policy.md) and [it](https://x.y)", "see policy and it (https://x.y)"),
            ("a [list] of `[x]`", "a [list] of \\fB[x]\\fR"),
            ("10 × 2 → \\n", "10 \\[u00D7] 2 \\[u2192] \\en"),
            ("`a", "\\(gaa"),
        ];
        for (text, expected) in cases {
            assert_eq!(inline(text), expected);
        }
        assert_eq!(guarded(".5 of it"), "\\&.5 of it\n");
        assert_eq!(guarded(&inline("'quoted'")), "\\&'quoted'\n");
    }

    #[test]
    fn each_part_of_a_page_has_its_request() {
        let page = "# Title\n\nFirst\nline.\n\n## Part one\n- a\n  b\n- c\n\n```toml\n.x = 1\n```\n### `[a]`\n\n\
                    | key | value | if left out | what |\n| --- | --- | --- | --- |\n| `k` | a size | 1 | does |\nEnd.\n";
        let text = manual(page, "x", 5, "a test", &["man(1)"]);
        for part in [
            ".TH x 5 ",
            ".SH NAME\nx \\- a test\n.SH DESCRIPTION\n.PP\nFirst line.\n",
            ".SH PART ONE\n.IP \\(bu 2\na b\n.IP \\(bu 2\nc\n",
            ".EX\n\\&.x = 1\n.EE\n",
            ".SS \\fB[a]\\fR\n.TP\n\\fBk\\fR\na size. if left out: 1. does\n.PP\nEnd.\n",
            ".SH SEE ALSO\n\\fBman\\fR(1)\n",
        ] {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
        assert!(text.is_ascii());
    }
}
