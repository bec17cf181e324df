//! `tombolo ls`: all fabrics of this user.

use std::path::Path;
use std::thread::Builder;

use clap::Args;
use serde::Serialize;
use tombolo_host::api::client::Client;
use tombolo_host::api::report::{SCHEMA, Status};
use tombolo_host::blocking::on_threads;
use tombolo_host::rundir;

use crate::exit::{Exit, Failure};
use crate::out::{self, Table, span};

const EXAMPLES: &str = "\
States: up; warns (up, and `tombolo status` has warnings); silent (it starts, ends, or does not answer); killed (its
daemon ended without clearing up: `tombolo up` takes over what is left, `tombolo down` ends it).

Examples:
  tombolo ls
  tombolo ls --json | jq -r '.fabrics[] | select(.state == \"killed\") | .file'";

#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Ls {
    /// Print the fabrics as JSON
    #[arg(long)]
    json: bool,
}

/// One fabric.
#[derive(Debug, Serialize)]
struct FabricLine {
    name: String,
    state: &'static str,
    /// What it was started from.
    file: Option<String>,
    pid: Option<u32>,
    uptime_s: Option<f64>,
    networks: Option<usize>,
    machines: Option<usize>,
    /// Machines that run.
    running: Option<usize>,
    ports: Option<usize>,
    warnings: Option<usize>,
}

#[derive(Debug, Serialize)]
struct Fabrics {
    schema: u32,
    fabrics: Vec<FabricLine>,
}

/// The name of every fabric with a runtime folder, and whether its daemon runs.
pub(crate) fn names(root: &Path) -> Vec<(String, bool)> {
    let running = rundir::running(root);
    let entries = std::fs::read_dir(root).into_iter().flatten().flatten();
    let left =
        entries.filter(|e| e.path().join("owner.json").exists()).filter_map(|e| e.file_name().into_string().ok());
    let mut all: Vec<_> = left.filter(|name| !running.contains(name)).map(|name| (name, false)).collect();
    all.extend(running.into_iter().map(|name| (name, true)));
    all.sort();
    all
}

fn line(root: &Path, name: String, runs: bool) -> FabricLine {
    let owner = rundir::read_owner(&root.join(&name));
    let socket = rundir::api_socket(root, &name);
    let status = if runs { Client::new(&name, &socket).ok().and_then(|c| c.status().ok()) } else { None };
    told(name, runs, status, owner.as_ref().map(|o| (o.file.display().to_string(), o.pid)))
}

fn told(name: String, runs: bool, status: Option<Status>, owner: Option<(String, u32)>) -> FabricLine {
    let state = match &status {
        Some(status) if status.warnings.is_empty() => "up",
        Some(_) => "warns",
        None if runs => "silent",
        None => "killed",
    };
    let (file, pid) = owner.unzip();
    let s = status.as_ref();
    FabricLine {
        name,
        state,
        file: s.map(|s| s.file.clone()).or(file),
        pid: s.map(|s| s.pid).or(pid.filter(|_| runs)),
        uptime_s: s.map(|s| s.uptime_s),
        networks: s.map(|s| s.networks.len()),
        machines: s.map(|s| s.machines.len()),
        running: s.map(|s| s.machines.iter().filter(|m| m.pid.is_some()).count()),
        ports: s.map(|s| s.ports.len()),
        warnings: s.map(|s| s.warnings.len()),
    }
}

fn table(fabrics: &[FabricLine]) -> Table {
    let mut table = Table::new(&["FABRIC", "STATE", ">UPTIME", ">NETWORKS", ">MACHINES", ">PORTS", "FILE"]);
    for f in fabrics {
        let count = |n: Option<usize>| n.map_or_else(|| "-".into(), |n| n.to_string());
        let machines = match (f.running, f.machines) {
            (Some(running), Some(all)) if running < all => format!("{running} of {all}"),
            (_, all) => count(all),
        };
        let uptime = f.uptime_s.map_or_else(|| "-".into(), span);
        let file = f.file.as_deref().unwrap_or("-");
        table.row(&[&f.name, f.state, &uptime, &count(f.networks), &machines, &count(f.ports), file]);
    }
    table
}

impl Ls {
    pub(crate) fn run(&self) -> Result<Exit, Failure> {
        let root = rundir::runtime_root()?;
        // Side by side: one that hangs is waited for once.
        let names = names(&root);
        let all: Vec<&(String, bool)> = names.iter().collect();
        let ask = |(name, runs): &(String, bool)| line(&root, name.clone(), *runs);
        // The work does not panic.
        let fabrics: Vec<_> = on_threads(Builder::new, &all, ask).into_iter().filter_map(|(_, line)| line).collect();
        if self.json {
            out::json(&Fabrics { schema: SCHEMA, fabrics })?;
        } else if fabrics.is_empty() {
            out::tell!("no fabric runs (looked in {}); `tombolo up FILE` starts one", root.display());
        } else {
            out::print(&table(&fabrics).render(out::colour()))?;
        }
        Ok(Exit::Done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_threads_fabrics_are_asked_one_after_the_other() {
        let here = std::thread::current().id();
        let work = |n: u32| (n * 2, std::thread::current().id() == here);
        let all = [0, 1, 2];
        let done =
            |all: Vec<(u32, Option<(u32, bool)>)>| all.into_iter().filter_map(|(_, done)| done).collect::<Vec<_>>();
        assert_eq!(done(on_threads(Builder::new, &all, work)), [(0, false), (2, false), (4, false)]);
        // No address space has room for such a stack.
        let refused = || Builder::new().stack_size(1 << 60);
        assert_eq!(done(on_threads(refused, &all, work)), [(0, true), (2, true), (4, true)]);
    }

    #[test]
    fn a_killed_fabric_and_a_silent_one_are_told_apart() {
        let owner = || Some(("/srv/a.toml".to_string(), 7));
        let up = Status { name: "a".into(), file: "/srv/b.toml".into(), pid: 8, uptime_s: 200.0, ..Status::default() };
        let warns = Status { warnings: vec!["!".into()], ..up.clone() };
        let lines = [
            told("a".into(), true, Some(up), owner()),
            told("b".into(), true, Some(warns), owner()),
            told("c".into(), true, None, owner()),
            told("d".into(), false, None, owner()),
        ];
        assert_eq!(lines.each_ref().map(|l| l.state), ["up", "warns", "silent", "killed"]);
        assert_eq!(lines.each_ref().map(|l| l.pid), [Some(8), Some(8), Some(7), None]);
        let text = table(&lines).render(false);
        let rows: Vec<Vec<&str>> = text.lines().map(|l| l.split_whitespace().collect()).collect();
        assert_eq!(rows[1], ["a", "up", "3", "min", "20", "s", "0", "0", "0", "/srv/b.toml"]);
        assert_eq!(rows[4], ["d", "killed", "-", "-", "-", "-", "/srv/a.toml"]);
    }

    #[test]
    fn folders_without_a_record_are_no_fabrics() {
        let root = tempfile::tempdir().unwrap();
        for name in ["left", "services"] {
            std::fs::create_dir(root.path().join(name)).unwrap();
        }
        std::fs::write(root.path().join("left/owner.json"), "{}").unwrap();
        assert_eq!(names(root.path()), [("left".to_string(), false)]);
    }
}
