//! `tombolo service`: the services that run, and what they do.

use std::collections::BTreeMap;
use std::io::{self, IsTerminal};
use std::time::Duration;

use clap::{Args, Subcommand};
use tombolo_host::api::services;
use tombolo_host::file::nearest;
use tombolo_rpc::client::{self, ConnectError, ConnectOptions};
use tombolo_rpc::folder;
use tombolo_rpc::histogram::Summary;
use tombolo_rpc::provider::Report;
use tombolo_rpc::schedule::Late;

use crate::bridge::Bridge;
use crate::exit::{Exit, Failure};
use crate::machines::{ExportCommand, ImportCommand, Keys};
use crate::number;
use crate::out::{self, Table, counted, scaled};
use crate::select::Select;
use crate::terminal::Screen;

/// How long a service may take to report.
const TIMEOUT: Duration = Duration::from_secs(2);

#[derive(Subcommand, Debug)]
pub(crate) enum Service {
    /// List the services that run
    Ls(Ls),
    /// Print what a service has done: answers, times, workers' classes, slow calls
    Stats(Stats),
    /// Print the last calls that took longer than the service's threshold
    Slow(Slow),
    /// Print rates of a service, updated every interval
    Watch(Watch),
    /// Pass calls between a cell or guest and the services of this machine
    Bridge(Bridge),
    /// Make the keys by which machines know each other
    Keys(Keys),
    /// Offer services of this machine to other machines
    Export(ExportCommand),
    /// Make a service of another machine one of this machine
    Import(ImportCommand),
}

#[derive(Args, Debug)]
pub(crate) struct Ls {
    /// Print the services' reports as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct Stats {
    /// Name of the service
    name: String,
    /// Print the report as JSON
    #[arg(long)]
    json: bool,
    /// Print the report as Prometheus text, as a fabric's API does for all services
    #[arg(long, conflicts_with = "json")]
    metrics: bool,
}

#[derive(Args, Debug)]
pub(crate) struct Slow {
    /// Name of the service
    name: String,
    /// Print the calls as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct Watch {
    /// Name of the service
    name: String,
    /// Seconds between two updates
    #[arg(short, long, value_name = "S", value_parser = number::seconds, allow_hyphen_values = true, default_value = "1")]
    interval: Duration,
    /// Stop after this many updates
    #[arg(long, value_name = "N", value_parser = number::count, allow_hyphen_values = true)]
    count: Option<u64>,
    /// Print a report as JSON at each update, one per line
    #[arg(long)]
    json: bool,
}

fn report(name: &str) -> Result<Report, ConnectError> {
    client::report(name, &ConnectOptions { timeout: TIMEOUT, ..ConnectOptions::default() })
}

/// A time for people.
pub(crate) fn time(ns: u64) -> String {
    let ns = ns as f64;
    match ns {
        ns if ns < 1e3 => format!("{ns:.0} ns"),
        ns if ns < 1e6 => format!("{:.1} us", ns / 1e3),
        ns if ns < 1e9 => format!("{:.2} ms", ns / 1e6),
        ns => format!("{:.2} s", ns / 1e9),
    }
}

fn refused(report: &Report) -> u64 {
    let a = &report.answers;
    a.refused_queue_full + a.refused_admission + a.refused_memory + a.refused_reply_memory + a.refused_stopping
}

fn table(rows: &[(String, Result<Report, ConnectError>)]) -> String {
    let mut table = Table::new(&[
        "SERVICE",
        "MACHINE",
        ">PID",
        ">CLIENTS",
        ">PENDING",
        ">SERVED",
        ">LATE",
        ">REFUSED",
        ">QUEUED P99",
        ">SERVICE P99",
    ]);
    for (name, report) in rows {
        match report {
            Ok(r) => {
                table.row(&[
                    name,
                    &if r.is_imported() { r.machines.join(",") } else { "-".to_string() },
                    &r.pid.to_string(),
                    &r.clients.to_string(),
                    &r.pending.to_string(),
                    &r.answers.served.to_string(),
                    &r.answers.late.to_string(),
                    &refused(r).to_string(),
                    &time(r.queued.p99_ns),
                    &time(r.service.p99_ns),
                ]);
            }
            Err(error) => table.row(&[name, "-", "-", "-", "-", "-", "-", "-", "-", "-"]).push(error.to_string()),
        }
    }
    table.render(out::colour())
}

fn summary(name: &str, s: &Summary) -> String {
    let figures = [("p50", s.p50_ns), ("p99", s.p99_ns), ("p99.9", s.p999_ns), ("max", s.max_ns)];
    let figures: Vec<String> = figures.iter().map(|(what, ns)| format!("{what} {}", time(*ns))).collect();
    format!("{name:10} {}\n", figures.join(", "))
}

fn text(r: &Report) -> String {
    let a = &r.answers;
    let late = match r.late_policy {
        Late::Refuse => "refused",
        Late::BestEffort => "served as best effort",
    };
    let mut out = format!(
        "{}: process {}, up {:.0} s, {} clients\nworkers    {}\nrules      budget {}, at most {} waiting, the late are {late}, admission {}\n",
        r.name,
        r.pid,
        r.uptime_s,
        r.clients,
        classes(&r.workers),
        time(r.budget_ns),
        r.queue_bound,
        if r.admission { "on" } else { "off" },
    );
    if r.is_imported() {
        out.push_str(&format!("served by  {}\n", r.machines.join(", ")));
    }
    out.push_str(&format!(
        "calls      {} pending, {} served ({} of them after their deadline), {} late, {} cancelled, {} expired, {} failed, {} abandoned by clients\n",
        r.pending, a.served, a.overran, a.late, a.cancelled, a.expired, a.failed, a.abandoned,
    ));
    out.push_str(&format!(
        "refused    {} queue full, {} admission, {} memory, {} reply memory, {} stopping\n",
        a.refused_queue_full, a.refused_admission, a.refused_memory, a.refused_reply_memory, a.refused_stopping,
    ));
    let reasons: Vec<String> = r.broken_by.iter().map(|(reason, n)| format!("{reason} {n}")).collect();
    let reasons = if reasons.is_empty() { String::new() } else { format!(" ({})", reasons.join(", ")) };
    out.push_str(&format!(
        "clients    {} disconnected{}, {} connections refused; {} replies reclaimed; {} sleeps, {} polls gained\n",
        r.broken_clients, reasons, r.refused_connections, r.reclaimed_replies, r.sleeps, r.polls_gained,
    ));
    out.push_str(&summary("queued", &r.queued));
    out.push_str(&summary("service", &r.service));
    out.push_str(&slow(r));
    out
}

/// The slow calls, youngest last.
fn slow(r: &Report) -> String {
    let mut out = format!("slow       {} took longer than {}", counted(r.slow as usize, "call"), time(r.slow_ns));
    if r.slow_calls.is_empty() {
        out.push('\n');
        return out;
    }
    out.push_str(&format!("; the last {}:\n", r.slow_calls.len()));
    let mut table = Table::new(&["SLOW CALL OF", "END", ">AGO", ">TRACE", ">BYTES", ">QUEUED", ">SERVICE", ">LATE BY"]);
    let now_ns = (r.uptime_s * 1e9) as u64;
    for c in &r.slow_calls {
        table.row(&[
            &format!("process {}", c.pid),
            &c.end,
            &time(now_ns.saturating_sub(c.at_ns)),
            &c.trace.to_string(),
            &c.request_bytes.to_string(),
            &time(c.queued_ns),
            &time(c.service_ns),
            &time(c.late_by_ns),
        ]);
    }
    out.push_str(&table.render(out::colour()));
    out
}

/// Each class in force once, with the number of workers that run in it.
fn classes(workers: &[String]) -> String {
    let mut counts = BTreeMap::<&str, usize>::new();
    workers.iter().for_each(|class| *counts.entry(class).or_default() += 1);
    let words: Vec<String> = counts.iter().map(|(class, n)| format!("{n} {class}")).collect();
    words.join(", ")
}

fn rates(before: &Report, now: &Report) -> String {
    let seconds = (now.uptime_s - before.uptime_s).max(1e-3);
    let rate = |now: u64, before: u64| scaled((now.saturating_sub(before) as f64 / seconds).round(), "/s");
    let (a, b) = (&now.answers, &before.answers);
    let mut table = Table::new(&[
        "SERVICE",
        ">PENDING",
        ">SERVED",
        ">LATE",
        ">REFUSED",
        ">CANCELLED",
        ">EXPIRED",
        ">QUEUED P99",
        ">SERVICE P99",
    ]);
    table.row(&[
        &now.name,
        &now.pending.to_string(),
        &rate(a.served, b.served),
        &rate(a.late, b.late),
        &rate(refused(now), refused(before)),
        &rate(a.cancelled, b.cancelled),
        &rate(a.expired, b.expired),
        &time(now.queued.p99_ns),
        &time(now.service.p99_ns),
    ]);
    table.render(out::colour())
}

impl From<ConnectError> for Failure {
    fn from(error: ConnectError) -> Self {
        match error {
            ConnectError::Folder(error @ folder::FolderError::Name(_)) => Failure::misused(error.to_string()),
            ConnectError::NoService { ref name, ref path } => {
                let there = path.parent().map(folder::list).unwrap_or_default();
                let near = nearest(name, there.iter().map(String::as_str));
                let near = near.map_or(String::new(), |near| format!("; did you mean \"{near}\"?"));
                Failure::failed(format!("{error}{near}"))
            }
            error => Failure::failed(error.to_string()),
        }
    }
}

impl From<folder::FolderError> for Failure {
    fn from(error: folder::FolderError) -> Self {
        Failure::failed(error.to_string())
    }
}

impl Service {
    pub(crate) fn run(&self, select: &Select) -> Result<Exit, Failure> {
        match self {
            Service::Bridge(bridge) => bridge.run(select),
            Service::Keys(keys) => keys.run(),
            Service::Export(export) => export.run(),
            Service::Import(import) => import.run(),
            Service::Ls(ls) => ls.run(),
            Service::Stats(stats) => stats.run(),
            Service::Slow(slow) => slow.run(),
            Service::Watch(watch) => watch.run(),
        }
    }
}

impl Ls {
    fn run(&self) -> Result<Exit, Failure> {
        let folder = folder::services()?;
        let names = folder::list(&folder);
        let rows: Vec<_> = names.into_iter().map(|name| (name.clone(), report(&name))).collect();
        let silent = rows.iter().filter(|(_, r)| r.is_err()).count();
        if self.json {
            let reports: Vec<_> = rows.iter().filter_map(|(_, r)| r.as_ref().ok()).collect();
            out::json(&serde_json::json!({ "services": reports }))?;
            for (name, error) in rows.iter().filter_map(|(name, r)| r.as_ref().err().map(|error| (name, error))) {
                out::tell!("tombolo: {name}: {error}");
            }
        } else {
            if rows.is_empty() {
                // Beside the table: who reads that sees headings alone.
                out::tell!("tombolo: no service runs (looked in {}; another user's are elsewhere)", folder.display());
            }
            out::print(&table(&rows))?;
        }
        Ok(match silent {
            0 => Exit::Done,
            n if n == rows.len() => Exit::Failed,
            _ => Exit::Partly,
        })
    }
}

impl Stats {
    fn run(&self) -> Result<Exit, Failure> {
        let report = report(&self.name)?;
        if self.json {
            out::json(&report)?
        } else if self.metrics {
            out::print(&services::render(&BTreeMap::from([(self.name.clone(), Some(report))])))?
        } else {
            out::print(&text(&report))?
        }
        Ok(Exit::Done)
    }
}

impl Slow {
    fn run(&self) -> Result<Exit, Failure> {
        let report = report(&self.name)?;
        if self.json {
            let Report { slow, slow_ns, slow_calls, .. } = report;
            out::json(&serde_json::json!({ "slow": slow, "slow_ns": slow_ns, "slow_calls": slow_calls }))?;
        } else {
            out::print(&self::slow(&report))?;
        }
        Ok(Exit::Done)
    }
}

impl Watch {
    fn run(&self) -> Result<Exit, Failure> {
        let mut before = report(&self.name)?;
        let screen = (io::stdout().is_terminal() && !self.json).then(Screen::new).transpose()?;
        let mut looks = 0;
        while self.count.is_none_or(|count| looks < count) {
            looks += 1;
            std::thread::sleep(self.interval);
            let now = match report(&self.name) {
                Err(ConnectError::NoService { .. } | ConnectError::Gone) => {
                    drop(screen);
                    out::tell!("tombolo: the service {} has ended", self.name);
                    return Ok(Exit::Done);
                }
                now => now?,
            };
            if self.json {
                let line = serde_json::to_string(&now).map_err(|e| Failure::failed(e.to_string()))?;
                out::print(&format!("{line}\n"))?;
            } else {
                match &screen {
                    Some(screen) => screen.show(&rates(&before, &now))?,
                    None => out::print(&rates(&before, &now))?,
                }
            }
            before = now;
        }
        Ok(Exit::Done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_are_counted_by_class() {
        let workers = ["normal", "normal", "fifo 5", "normal"].map(String::from);
        assert_eq!(classes(&workers), "1 fifo 5, 3 normal");
    }

    #[test]
    fn times_are_for_people() {
        for (ns, want) in
            [(0, "0 ns"), (999, "999 ns"), (1500, "1.5 us"), (2_340_000, "2.34 ms"), (61_000_000_000, "61.00 s")]
        {
            assert_eq!(time(ns), want);
        }
    }
}
