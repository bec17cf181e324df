//! A section of a fabric file, written from flags, and what is said of its faults.

use std::path::Path;

use tombolo_host::api::client::ClientError;
use tombolo_host::api::report::ProblemReport;

use crate::exit::Failure;

/// Where the sections of a request came from.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Origin<'a> {
    /// They were written from flags.
    Flags,
    /// All of it was written from this flag.
    Flag(&'static str),
    /// An entry of a list of the configuration, such as `rule[2]`, was written from flags and these
    /// arguments: their keys, and what stands for them in the usage.
    Entry(&'a str, &'a [(&'static str, &'static str)]),
    /// From this file.
    File(&'a Path),
}

/// What ends a hint that a section lacks a key, behind its name.
const ADDED_TO: &str = " = … to this section";

/// Sections come from a file where one is given.
pub(crate) fn origin(sections: Option<&Path>) -> Origin<'_> {
    sections.map_or(Origin::Flags, Origin::File)
}

/// A refusal of sections, told by what the user gave: faults of flags have the flag's name, those
/// of a file its path, and not places in a text that the user has not seen.
pub(crate) fn told(error: ClientError, origin: Origin<'_>) -> Failure {
    let ClientError::Refused { fault, .. } = &error else { return error.into() };
    if fault.problems.is_empty() {
        return error.into();
    }
    let line = |p: &ProblemReport| {
        // What is to be added to a section of a file is another flag here.
        let adds = |hint: &str| {
            hint.strip_prefix("add ")?.strip_suffix(ADDED_TO).map(|key| format!("; add --{}", key.replace('_', "-")))
        };
        let in_file = matches!(origin, Origin::File(_));
        let told = |hint: &String| adds(hint).filter(|_| !in_file).unwrap_or_else(|| format!("; {hint}"));
        let hint = p.hint.as_ref().map_or_else(String::new, told);
        let what = format!("expected {}, found {}{hint}", p.expected, p.found);
        match origin {
            // Of `cell.NAME.memory` the flag is the last word; a section's own fault is that of its
            // name. The name itself is not a flag of every command.
            Origin::Flags => match p.key.splitn(3, '.').nth(2) {
                // The first argument of `cell run`, which has no flag.
                Some("app") => format!("APP: {what}"),
                Some(key) => format!("--{}: {what}", key.replace('_', "-")),
                None => format!("the name: {what}"),
            },
            Origin::Flag(flag) => format!("--{flag}: {what}"),
            Origin::Entry(entry, arguments) => {
                let key = p.key.strip_prefix(entry).and_then(|rest| rest.strip_prefix('.'));
                match key.map(|key| key.split('[').next().unwrap_or(key)) {
                    None => match numbered(&p.key) {
                        _ if p.key.is_empty() => what,
                        Some(which) => format!("{which}: {what}"),
                        None => format!("{}: {what}", p.key),
                    },
                    Some(key) => match arguments.iter().find(|(of, _)| *of == key) {
                        Some((_, argument)) => format!("{argument}: {what}"),
                        None => format!("--{}: {what}", key.replace('_', "-")),
                    },
                }
            }
            Origin::File(path) => {
                let key = if p.key.is_empty() { String::new() } else { format!("{}: ", p.key) };
                format!("{}:{}:{}: {key}{what}", path.display(), p.line, p.column)
            }
        }
    };
    let lines: Vec<_> = fault.problems.iter().map(line).collect();
    match origin {
        // What this machine does not have is no fault of the flags.
        Origin::Entry(..) if !error.is_misuse() => Failure::failed(lines.join("\n")),
        _ => Failure::misused(lines.join("\n")),
    }
}

/// An entry of a list that was there before, as people count: "rule 2 (`tombolo rule ls`), from"
/// for `rule[1].from`.
fn numbered(key: &str) -> Option<String> {
    let (word, rest) = key.split_once('[')?;
    let (index, rest) = rest.split_once(']')?;
    let listed = if word == "rule" { " (`tombolo rule ls`)" } else { "" };
    Some(format!("{word} {}{listed}{}", index.parse::<usize>().ok()? + 1, rest.replacen('.', ", ", 1)))
}

/// One section under way.
#[derive(Debug)]
pub(crate) struct Section(String);

/// A basic string of TOML. It is the same as a JSON string, except for DEL, which serde_json leaves
/// as it is.
pub(crate) fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}

impl Section {
    pub(crate) fn new(kind: &str, name: &str) -> Section {
        Section(format!("[{kind}.{}]\n", quoted(name)))
    }

    pub(crate) fn text(mut self, key: &str, value: Option<&str>) -> Self {
        if let Some(value) = value {
            self.0.push_str(&format!("{key} = {}\n", quoted(value)));
        }
        self
    }

    pub(crate) fn number(mut self, key: &str, value: Option<u32>) -> Self {
        if let Some(value) = value {
            self.0.push_str(&format!("{key} = {value}\n"));
        }
        self
    }

    pub(crate) fn flag(mut self, key: &str, value: bool) -> Self {
        if value {
            self.0.push_str(&format!("{key} = true\n"));
        }
        self
    }

    pub(crate) fn list(mut self, key: &str, values: &[String]) -> Self {
        if !values.is_empty() {
            let values: Vec<_> = values.iter().map(|v| quoted(v)).collect();
            self.0.push_str(&format!("{key} = [{}]\n", values.join(", ")));
        }
        self
    }

    pub(crate) fn finish(self) -> String {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tombolo_host::file;

    #[test]
    fn faults_are_told_by_the_flag_or_the_file() {
        use tombolo_host::api::report::Fault;
        let problem = |key: &str| ProblemReport {
            of: "file".into(),
            line: 2,
            column: 7,
            key: key.into(),
            expected: "a size".into(),
            found: "\"4\"".into(),
            hint: None,
        };
        let problems = vec![problem("cell.web.memory"), problem("cell.Web_1")];
        let fault = Fault { error: "request:2:7: …".into(), hint: None, problems };
        let refused = || ClientError::Refused { status: 400, fault: fault.clone() };
        let text = |origin| match told(refused(), origin) {
            Failure::Said(crate::exit::Exit::Misused, text) => text,
            other => panic!("{other:?}"),
        };
        assert_eq!(
            text(Origin::Flags),
            "--memory: expected a size, found \"4\"\nthe name: expected a size, found \"4\""
        );
        assert!(text(Origin::File(Path::new("a.toml"))).starts_with("a.toml:2:7: cell.web.memory: expected a size"));
    }

    #[test]
    fn a_flag_that_is_missing_is_asked_for_as_a_flag() {
        use tombolo_host::api::report::Fault;
        let problem = |key: &str, hint: &str| ProblemReport {
            of: "file".into(),
            line: 1,
            column: 1,
            key: key.into(),
            expected: "a value".into(),
            found: "nothing".into(),
            hint: Some(hint.into()),
        };
        let text = |problem: ProblemReport, origin| {
            let fault = Fault { error: String::new(), hint: None, problems: vec![problem] };
            match told(ClientError::Refused { status: 400, fault }, origin) {
                Failure::Said(_, text) => text,
                other => panic!("{other:?}"),
            }
        };
        let lacks = problem("tap.t.udp_port", "add udp_port = … to this section");
        assert_eq!(text(lacks.clone(), Origin::Flags), "--udp-port: expected a value, found nothing; add --udp-port");
        let of_file = text(lacks, Origin::File(Path::new("a.toml")));
        assert!(of_file.ends_with("; add udp_port = … to this section"), "{of_file}");
        let entry = Origin::Entry("rule[2]", &[("action", "ACTION"), ("ports", "--port")]);
        for (key, told) in [("action", "ACTION"), ("ports[1]", "--port"), ("from", "--from")] {
            let found = text(problem(&format!("rule[2].{key}"), "look"), entry);
            assert_eq!(found, format!("{told}: expected a value, found nothing; look"));
        }
        let other = text(problem("rule[1].from", "look"), entry);
        assert_eq!(other, "rule 2 (`tombolo rule ls`), from: expected a value, found nothing; look");
        let of_rate = text(problem("rate", "did you mean \"send\"?"), Origin::Flag("rate"));
        assert_eq!(of_rate, "--rate: expected a value, found nothing; did you mean \"send\"?");
    }

    #[test]
    fn values_are_data_and_never_sections() {
        let base = file::parse("[network.lan]\n", std::path::Path::new("x.toml")).unwrap();
        let text = Section::new("port", "p")
            .text("kind", Some("vhost-user"))
            .text("socket", Some("a \"b\"\n\u{7f}"))
            .number("queues", Some(2))
            .text("mac", None)
            .flag("connect", false)
            .finish();
        let fabric = file::add(&text, std::path::Path::new("request"), &base).unwrap();
        let file::PortKind::VhostUser { socket, queues, connect: false } = &fabric.ports[0].kind else {
            panic!("{text}")
        };
        assert_eq!(*queues, 2);
        assert!(socket.as_ref().unwrap().ends_with("a \"b\"\n\u{7f}"));
        let injected = Section::new("port", "p]\n[tap.q").finish();
        assert!(file::add(&injected, std::path::Path::new("request"), &base).is_err());
    }
}
