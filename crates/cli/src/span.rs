//! `tombolo span`: the other machines of a fabric's networks.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use tombolo_host::api::client::{Client, ClientError};
use tombolo_host::api::report::{Span as Answer, SpanState};
use tombolo_host::file::{self, Fabric, Which};
use tombolo_host::qemu::probe::which;

use crate::exit::{Exit, Failure};
use crate::out::{self, Table, Tone, counted, span, toned};
use crate::select::{DEFAULT_FILE, OfMachine, Select};

/// Older reports are those of a program that may have ended. It sends one every second or so.
const OLD_S: f64 = 10.0;

#[derive(Subcommand, Debug)]
pub(crate) enum Span {
    /// Show the other machines, the networks that they share, and addresses that two of them have
    Status(StatusArgs),
    /// Print the settings of this machine's tombolo-span, as [span] and [machine.NAME] of the
    /// fabric file say them, or with --fabric those of a fabric that runs
    Settings(OfMachine),
}

#[derive(Args, Debug)]
pub(crate) struct StatusArgs {
    /// Print the report as JSON
    #[arg(long)]
    json: bool,
}

impl Span {
    pub(crate) fn run(&self, select: &Select) -> Result<Exit, Failure> {
        let json = match self {
            Span::Status(StatusArgs { json }) => json,
            Span::Settings(of) => return settings(select, of),
        };
        let client = select.client()?;
        let answer = match client.span() {
            Err(ClientError::Refused { status: 404, .. }) => {
                return Err(Failure::failed(format!("tombolo-span does not run for this fabric: {}", todo(&client))));
            }
            answer => answer?,
        };
        if *json {
            out::json(&answer)?;
        } else {
            let todo = if answer.age_s > OLD_S { todo(&client) } else { String::new() };
            out::print(&render(&answer, &todo, out::colour()))?;
        }
        Ok(Exit::Done)
    }
}

/// Prints what tombolo-span takes with `--config`: as the file says it, or as the named fabric
/// runs.
fn settings(select: &Select, of: &OfMachine) -> Result<Exit, Failure> {
    let (spec, path) = match (&select.file, &select.fabric) {
        (None, Some(_)) => running(select, of)?,
        (file, _) => {
            let path = file.as_deref().unwrap_or(Path::new(DEFAULT_FILE));
            (file::load_on(path, of.which())?, path.to_path_buf())
        }
    };
    let text = file::span_settings(&spec).ok_or_else(|| {
        let found = format!("{}: expected a section [span] beside sections [machine.NAME], found none", path.display());
        Failure::misused(format!("{found} (docs/span.md)"))
    })?;
    out::print(&text)?;
    Ok(Exit::Done)
}

/// The configuration that runs, with what commands and requests have changed, and its file.
fn running(select: &Select, of: &OfMachine) -> Result<(Fabric, PathBuf), Failure> {
    let report = select.client_on(of)?.config()?;
    let base = report.config.get("name").and_then(|name| name.as_str()).unwrap_or_default();
    let machine = report.fabric.strip_prefix(base).and_then(|rest| rest.strip_prefix('-'));
    Ok((file::parse_on(&report.toml, &report.file, Which::of(machine))?, report.file))
}

/// What to do where it does not run.
fn todo(client: &Client) -> String {
    let file = client.status().map(|status| status.file).unwrap_or_default();
    advice(which("tombolo-span").is_some(), rustix::process::geteuid().is_root(), Path::new(&file))
}

/// The same, by whether the program is there, whose fabric it is, and the fabric's file.
fn advice(is_there: bool, is_root: bool, file: &Path) -> String {
    // Units have the name of the fabric's file, where that is in the folder that they look in.
    let is_units = file.parent().and_then(Path::file_name).is_some_and(|folder| folder == "tombolo");
    let stem = file.file_stem().and_then(|stem| stem.to_str()).filter(|_| is_units);
    let (systemctl, folder) = if is_root { ("systemctl", "/etc") } else { ("systemctl --user", "~/.config") };
    let unit = format!("tombolo-span@{}", stem.unwrap_or("NAME"));
    let settings = format!("{folder}/tombolo/{}.span.toml", stem.unwrap_or("NAME"));
    if is_there {
        format!(
            "`{systemctl} status {unit}` says why, `{systemctl} enable --now {unit}` starts it with {settings} (docs/span.md)"
        )
    } else {
        format!(
            "it is not installed: install the package tombolo-span (Debian: apt install tombolo-span), write {settings}, \
             and run `{systemctl} enable --now {unit}` (docs/span.md)"
        )
    }
}

fn dash(words: &[String]) -> String {
    if words.is_empty() { "-".into() } else { words.join(" ") }
}

/// The report for people; `todo` is for a program that may have ended.
fn render(answer: &Answer, todo: &str, colour: bool) -> String {
    let report = &answer.report;
    let mut out = format!(
        "{}  of site {}, tombolo-span up {}, process {}\n",
        toned(&report.machine, Tone::Bold, colour),
        report.site,
        span(report.uptime_s),
        report.pid
    );
    if answer.age_s > OLD_S {
        let old = format!("! last report {} ago: tombolo-span may have ended: {todo}", span(answer.age_s));
        out.push_str(&format!("{}\n", toned(&old, Tone::Bad, colour)));
    }
    let conflicts = report.conflicts.len();
    if conflicts > 0 {
        let text = format!("! {}", counted(conflicts, "conflict"));
        out.push_str(&format!("{}\n", toned(&text, Tone::Bad, colour)));
    }
    for table in [machines(answer), networks(answer), conflicting(answer)] {
        let text = table.render(colour);
        if text.lines().count() > 1 {
            out.push('\n');
            out.push_str(&text);
        }
    }
    out
}

fn machines(answer: &Answer) -> Table {
    let mut table = Table::new(&["MACHINE", "STATE", ">RTT", ">HEARD", ">MEMBERS", "NETWORKS", "ADDRESSES"]);
    for m in &answer.report.machines {
        // What the report says is as old as the report.
        let heard = match m.state {
            SpanState::Unheard => "never".into(),
            _ => span(m.heard_s + answer.age_s),
        };
        let rtt = m.rtt_us.map_or_else(|| "-".into(), |us| format!("{:.2} ms", us as f64 / 1000.0));
        let addresses: Vec<_> = m.addresses.iter().map(ToString::to_string).collect();
        let (members, networks) = (m.members.to_string(), dash(&m.networks));
        let notes = table.row(&[&m.name, m.state.word(), &rtt, &heard, &members, &networks, &dash(&addresses)]);
        match m.state {
            SpanState::Gone => notes.push("what it said is forgotten".into()),
            SpanState::Unheard => {
                notes.push("it was never heard: does its tombolo-span run, with this machine as a peer?".into())
            }
            SpanState::Up | SpanState::Stale => {}
        }
    }
    table
}

fn networks(answer: &Answer) -> Table {
    let mut table = Table::new(&["NETWORK", ">LOCAL", ">REMOTE"]);
    for n in &answer.report.networks {
        table.row(&[&n.name, &n.local.to_string(), &n.remote.to_string()]);
    }
    table
}

fn conflicting(answer: &Answer) -> Table {
    let mut table = Table::new(&["NETWORK", "CONFLICT", "MACHINES", "WINNER"]);
    for c in &answer.report.conflicts {
        table.row(&[&c.network, &c.what, &dash(&c.machines), &c.winner]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use tombolo_host::api::report::{SpanConflict, SpanMachine, SpanNetwork, SpanReport};

    fn answer() -> Answer {
        let machine = |name: &str, state, rtt_us| SpanMachine {
            name: name.into(),
            state,
            rtt_us,
            heard_s: 0.4,
            members: 12,
            networks: vec!["lan".into()],
            addresses: vec!["192.0.2.2".parse().unwrap()],
        };
        Answer {
            schema: 1,
            age_s: 1.0,
            report: SpanReport {
                machine: "node-1".into(),
                pid: 123,
                uptime_s: 61.0,
                site: "demo".into(),
                machines: vec![
                    machine("node-2", SpanState::Up, Some(210)),
                    machine("node-3", SpanState::Gone, None),
                    machine("node-4", SpanState::Unheard, None),
                ],
                networks: vec![SpanNetwork { name: "lan".into(), local: 3, remote: 12 }],
                conflicts: vec![SpanConflict {
                    network: "lan".into(),
                    what: "10.87.0.12".into(),
                    machines: vec!["node-1".into(), "node-2".into()],
                    winner: "node-1".into(),
                }],
                counters: std::collections::BTreeMap::new(),
            },
        }
    }

    #[test]
    fn machines_networks_and_conflicts_are_tables() {
        let text = render(&answer(), "", false);
        let words = |start: &str| {
            let line = text.lines().find(|line| line.starts_with(start)).unwrap_or_else(|| panic!("{start}: {text}"));
            line.split_whitespace().map(String::from).collect::<Vec<_>>()
        };
        assert_eq!(text.lines().next(), Some("node-1  of site demo, tombolo-span up 1 min 1 s, process 123"));
        assert_eq!(words("node-2"), ["node-2", "up", "0.21", "ms", "1", "s", "12", "lan", "192.0.2.2"]);
        assert_eq!(words("node-3")[..3], ["node-3", "gone", "-"]);
        assert_eq!(words("node-4")[..4], ["node-4", "unheard", "-", "never"]);
        assert_eq!(words("lan  "), ["lan", "3", "12"]);
        assert!(text.contains("10.87.0.12") && text.contains("node-1 node-2"), "{text}");
        assert!(text.contains("! 1 conflict\n") && !text.contains("may have ended"), "{text}");
    }

    #[test]
    fn what_to_do_names_the_package_the_unit_and_its_settings() {
        let text = advice(false, true, Path::new("/etc/tombolo/home.toml"));
        for part in
            ["apt install tombolo-span", "/etc/tombolo/home.span.toml", "`systemctl enable --now tombolo-span@home`"]
        {
            assert!(text.contains(part), "{text}: no {part}");
        }
        let text = advice(true, false, Path::new("/srv/me/.config/tombolo/home.toml"));
        assert!(text.starts_with("`systemctl --user status tombolo-span@home` says why"), "{text}");
        assert!(text.contains("~/.config/tombolo/home.span.toml") && !text.contains("apt"), "{text}");
        // A file elsewhere is no unit's.
        assert!(advice(true, true, Path::new("/srv/lab/demo.toml")).contains("tombolo-span@NAME"));
    }

    #[test]
    fn an_old_report_says_so_and_empty_tables_are_left_out() {
        let report = SpanReport { machines: vec![], networks: vec![], conflicts: vec![], ..answer().report };
        let text = render(&Answer { age_s: 12.0, report, ..answer() }, "look", false);
        assert_eq!(text.lines().nth(1), Some("! last report 12 s ago: tombolo-span may have ended: look"));
        assert_eq!(text.lines().count(), 2, "{text}");
    }
}
