//! `tombolo apply`: the running fabric becomes what its edited file says; what did not change runs
//! on.

use std::path::PathBuf;

use clap::Args;
use tombolo_host::api::apply::{ApplyQuery, ApplyReport, ChangeReport, KeyReport};
use tombolo_host::api::client::Client;
use tombolo_host::{file, preflight, rundir};

use crate::exit::{Exit, Failure};
use crate::out;
use crate::select::{OfMachine, Select};

#[derive(Args, Debug)]
pub(crate) struct Apply {
    /// Fabric file [default: that of --file, else tombolo.toml, else that of the running fabric]
    #[arg(value_name = "FILE", conflicts_with = "file")]
    path: Option<PathBuf>,
    #[command(flatten)]
    of: OfMachine,
    /// Only print what would be done
    #[arg(long)]
    dry_run: bool,
    /// Print what was done, or would be, as JSON
    #[arg(long)]
    json: bool,
}

impl Apply {
    pub(crate) fn run(&self, select: &Select) -> Result<Exit, Failure> {
        let path = std::path::absolute(select.fabric_file(self.path.as_ref())?)?;
        // The rest of the file is for the daemon to judge, which may know other folders of images.
        let name = file::name_of(&path, self.of.which())?;
        if let Some(other) = select.fabric.as_ref().filter(|other| **other != name) {
            return Err(Failure::misused(format!(
                "--fabric: expected \"{other}\", but {} is of the fabric \"{name}\"",
                path.display()
            )));
        }
        let text = file::text_of(&path)?;
        let root = rundir::runtime_root()?;
        let client = Client::new(&name, &rundir::api_socket(&root, &name))?;
        let query = ApplyQuery { dry_run: self.dry_run, file: Some(path.clone()) };
        let report = match client.apply(&text, &query) {
            // A faulty file may be why another fabric was looked for.
            Err(error) if error.is_absent() => {
                preflight::load(&path, self.of.which())?;
                return Err(error.into());
            }
            answer => answer?,
        };
        tell(&report, self.json)
    }
}

/// Prints the report of a change, and gives its exit code.
pub(crate) fn tell(report: &ApplyReport, json: bool) -> Result<Exit, Failure> {
    if json {
        out::json(report)?;
    } else {
        out::print(&render(report, out::colour()))?;
    }
    Ok(match report.outcome.as_str() {
        "refused" => Exit::Failed,
        "partly" => Exit::Partly,
        _ => Exit::Done,
    })
}

/// The report for people: a line for each change, then what came of it.
fn render(report: &ApplyReport, colour: bool) -> String {
    let width = report.changes.iter().map(|c| section(c).len()).max().unwrap_or(0);
    let mut text = String::new();
    for change in &report.changes {
        let (sign, tone) = match (change.outcome.as_str(), change.action.as_str()) {
            ("failed" | "refused", _) => ('x', out::Tone::Bad),
            (_, "add") => ('+', out::Tone::Good),
            (_, "remove") => ('-', out::Tone::Bad),
            (_, "restart") => ('!', out::Tone::Bold),
            _ => ('~', out::Tone::Bold),
        };
        let line = format!("{sign} {:width$}  {}", section(change), said(change, report.outcome == "refused"));
        text.push_str(&out::toned(line.trim_end(), tone, colour));
        text.push('\n');
    }
    for name in &report.kept {
        text.push_str(&format!("  {name} was added while the fabric ran, and stays\n"));
    }
    for key in &report.reverted {
        let verb = if report.outcome == "planned" { "would be" } else { "is" };
        text.push_str(&format!("  {key} was changed while the fabric ran, and {verb} as in the file from now on\n"));
    }
    let count = |action: &str| report.changes.iter().filter(|c| c.action == action && c.outcome != "failed").count();
    let counts = format!(
        "{} added, {} removed, {} changed, {} restarted, {} unchanged",
        count("add"),
        count("remove"),
        count("change"),
        count("restart"),
        report.unchanged
    );
    let failed = report.changes.iter().filter(|c| c.outcome == "failed").count();
    text.push_str(&match report.outcome.as_str() {
        "planned" => format!("{}: would be: {counts}\n", report.fabric),
        "refused" => format!("{}: refused, and nothing was changed\n", report.fabric),
        "partly" => format!("{}: done in part: {counts}; {failed} failed\n", report.fabric),
        _ => format!("{}: {counts}\n", report.fabric),
    });
    text
}

/// What a change is about, for people.
fn section(change: &ChangeReport) -> &str {
    match change.section.as_str() {
        "policy" => "rules and mirrors",
        section => section,
    }
}

/// What a line says of a change behind its section; `undone`: nothing comes of it, since another
/// one is refused.
fn said(change: &ChangeReport, undone: bool) -> String {
    let done = match change.action.as_str() {
        "add" => "added",
        "remove" => "removed",
        "restart" => "restarted",
        _ => "changed",
    };
    let word = match change.outcome.as_str() {
        "failed" => format!("{} failed: {}", change.action, change.error.as_deref().unwrap_or_default()),
        "refused" => "refused".into(),
        _ if undone => format!("would be {done}"),
        _ => done.into(),
    };
    let keys: Vec<String> = change.keys.iter().map(value).collect();
    let keys = if keys.is_empty() { String::new() } else { format!(": {}", keys.join(", ")) };
    let reason = if change.reason.is_empty() { String::new() } else { format!("; {}", change.reason) };
    format!("{word}{keys}{reason}")
}

fn value(key: &KeyReport) -> String {
    let word = |value: &Option<String>| value.clone().unwrap_or_else(|| "none".into());
    format!("{} {} → {}", key.key, word(&key.before), word(&key.after))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(section: &str, action: &str, outcome: &str) -> ChangeReport {
        ChangeReport {
            section: section.into(),
            action: action.into(),
            outcome: outcome.into(),
            ..ChangeReport::default()
        }
    }

    #[test]
    fn each_change_has_a_line_and_the_rest_is_counted() {
        let key = KeyReport { key: "memory".into(), before: Some("32M".into()), after: Some("64M".into()) };
        let restart = ChangeReport {
            keys: vec![key],
            reason: "`memory`: read when it starts".into(),
            ..change("cell.web", "restart", "done")
        };
        let failed = ChangeReport { error: Some("no such device".into()), ..change("tap.t", "add", "failed") };
        let report = ApplyReport {
            fabric: "demo".into(),
            outcome: "partly".into(),
            changes: vec![restart, change("port.p", "remove", "done"), failed],
            unchanged: 4,
            kept: vec!["extra".into()],
            reverted: vec!["port.web.rate".into()],
            ..ApplyReport::default()
        };
        let expected = "\
! cell.web  restarted: memory 32M → 64M; `memory`: read when it starts
- port.p    removed
x tap.t     add failed: no such device
  extra was added while the fabric ran, and stays
  port.web.rate was changed while the fabric ran, and is as in the file from now on
demo: done in part: 0 added, 1 removed, 0 changed, 1 restarted, 4 unchanged; 1 failed
";
        assert_eq!(render(&report, false), expected);
    }

    #[test]
    fn beside_a_refused_change_the_others_are_told_as_what_would_be() {
        let report = ApplyReport {
            fabric: "demo".into(),
            outcome: "refused".into(),
            changes: vec![change("cell.web", "restart", "planned"), change("network.lan", "refuse", "refused")],
            ..ApplyReport::default()
        };
        let expected = "\
! cell.web     would be restarted
x network.lan  refused
demo: refused, and nothing was changed
";
        assert_eq!(render(&report, false), expected);
    }

    #[test]
    fn a_file_without_changes_has_one_line() {
        let report = ApplyReport { fabric: "d".into(), outcome: "done".into(), unchanged: 2, ..ApplyReport::default() };
        assert_eq!(render(&report, false), "d: 0 added, 0 removed, 0 changed, 0 restarted, 2 unchanged\n");
    }
}
