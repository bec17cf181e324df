//! `tombolo top`: rates of ports and load of workers.

use std::io::{self, IsTerminal};
use std::time::Duration;

use clap::Args;
use tombolo_host::api::report::{CounterReport, Status};

use crate::exit::{Exit, Failure};
use crate::number;
use crate::out::{self, Table, Tone, scaled, span, toned};
use crate::select::Select;
use crate::terminal::Screen;

#[derive(Args, Debug)]
pub(crate) struct Top {
    /// Seconds between two updates
    #[arg(short, long, value_name = "S", value_parser = number::seconds, allow_hyphen_values = true, default_value = "1")]
    interval: Duration,
    /// Print the rates of one interval and exit
    #[arg(long)]
    once: bool,
    /// Print the report of `status` as JSON at each update, one per line
    #[arg(long)]
    json: bool,
}

impl Top {
    pub(crate) fn run(&self, select: &Select) -> Result<Exit, Failure> {
        let mut client = select.client()?;
        // Before the screen is taken, so that Ctrl-C gives it back.
        client.watch_signals()?;
        let mut before = client.status()?;
        let screen = (io::stdout().is_terminal() && !self.once && !self.json).then(Screen::new).transpose()?;
        if self.json {
            line(&before)?;
            if self.once {
                return Ok(Exit::Done);
            }
        }
        loop {
            if client.sleep(self.interval)? {
                return Ok(Exit::Done);
            }
            let now = match client.status() {
                // The fabric went down while we looked: this is not a failure.
                Err(error) if error.is_absent() => {
                    drop(screen);
                    out::tell!("tombolo: {} is down", before.name);
                    return Ok(Exit::Done);
                }
                now => now?,
            };
            if self.json {
                line(&now)?;
            } else {
                let text = render(&before, &now, out::colour());
                match &screen {
                    Some(screen) => screen.show(&text)?,
                    None => out::print(&format!("{text}\n"))?,
                }
            }
            if self.once {
                return Ok(Exit::Done);
            }
            before = now;
        }
    }
}

fn line(status: &Status) -> Result<(), Failure> {
    let text = serde_json::to_string(status).map_err(|e| Failure::failed(e.to_string()))?;
    out::print(&format!("{text}\n"))
}

/// What came to a counter per second; nothing for one that was set back with a new daemon.
fn rate(before: u64, now: u64, seconds: f64) -> f64 {
    now.saturating_sub(before) as f64 / seconds
}

/// Bits that a frame takes on a wire besides its bytes are not counted: the rates are of what ports carry.
const BITS: f64 = 8.0;

fn render(before: &Status, now: &Status, colour: bool) -> String {
    let seconds = (now.uptime_s - before.uptime_s).max(1e-3);
    let zero = CounterReport::default();
    let mut ports = Table::new(&[
        "PORT",
        "LINK",
        ">RX FRAMES/s",
        ">RX",
        ">TX FRAMES/s",
        ">TX",
        ">DROPS/s",
        ">FRAMES/TURN",
        ">BUSY TURNS",
    ]);
    for p in &now.ports {
        let c = &p.counters;
        let old = before.ports.iter().find(|o| o.name == p.name).map_or(&zero, |o| &o.counters);
        let per_s = |now: u64, before: u64| rate(before, now, seconds);
        let drops = |c: &CounterReport| c.rx_drops.values().chain(c.tx_drops.values()).sum::<u64>();
        let turns = c.turns.saturating_sub(old.turns).max(1) as f64;
        let given = c.rx_frames.saturating_sub(old.rx_frames) as f64 / turns;
        let full = 100.0 * c.exhausted_budgets.saturating_sub(old.exhausted_budgets) as f64 / turns;
        ports.row(&[
            &p.name,
            if p.up { "up" } else { "down" },
            &scaled(per_s(c.rx_frames, old.rx_frames).round(), ""),
            &scaled((BITS * per_s(c.rx_bytes, old.rx_bytes)).round(), "bit/s"),
            &scaled(per_s(c.tx_frames, old.tx_frames).round(), ""),
            &scaled((BITS * per_s(c.tx_bytes, old.tx_bytes)).round(), "bit/s"),
            &scaled(per_s(drops(c), drops(old)).round(), ""),
            &format!("{given:.1}"),
            &format!("{full:.0} %"),
        ]);
    }
    let mut workers = Table::new(&["WORKER", ">LOAD", ">SLEEPS/s"]);
    for w in &now.workers {
        let old = before.workers.iter().find(|o| o.name == w.name);
        let (slept, life, sleeps) = old.map_or((0, 0, 0), |o| (o.slept_ns, o.lifetime_ns, o.sleeps));
        let life = w.lifetime_ns.saturating_sub(life).max(1) as f64;
        let load = 100.0 * (1.0 - w.slept_ns.saturating_sub(slept) as f64 / life).clamp(0.0, 1.0);
        workers.row(&[&w.name, &format!("{load:.1} %"), &scaled(rate(sleeps, w.sleeps, seconds).round(), "")]);
    }
    let head = format!("{}  up {}", toned(&now.name, Tone::Bold, colour), span(now.uptime_s));
    let warnings: String =
        now.warnings.iter().map(|w| format!("{}\n", toned(&format!("! {w}"), Tone::Bad, colour))).collect();
    format!("{head}\n{warnings}\n{}\n{}", ports.render(colour), workers.render(colour))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use tombolo_host::api::report::{PortReport, WorkerReport};

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        top: Top,
    }

    fn parse(line: &str) -> Result<Top, clap::Error> {
        Line::try_parse_from(["top"].into_iter().chain(line.split_whitespace())).map(|l| l.top)
    }

    #[test]
    fn flags() {
        assert_eq!(parse("").unwrap().interval, Duration::from_secs(1));
        assert_eq!(parse("-i 0.2 --once").unwrap().interval, Duration::from_millis(200));
        assert!(parse("--once").unwrap().once && parse("--json").unwrap().json);
        assert!(parse("--interval 0").is_err());
    }

    #[test]
    fn rates_are_differences_over_the_daemons_own_time() {
        let port = |rx_frames, rx_bytes, turns, full| PortReport {
            name: "web".into(),
            network: "lan".into(),
            kind: "tap".into(),
            up: true,
            offloads: vec![],
            guard: vec![],
            details: Default::default(),
            macs: 0,
            counters: CounterReport { rx_frames, rx_bytes, turns, exhausted_budgets: full, ..Default::default() },
            last_fault: None,
        };
        let worker = |slept_ns, lifetime_ns| WorkerReport {
            name: "main".into(),
            cpu: None,
            budget: 64,
            busy_poll_us: 0,
            sleeps: 0,
            slept_ns,
            lifetime_ns,
        };
        let at = |uptime_s, port, worker| Status {
            name: "t".into(),
            uptime_s,
            ports: vec![port],
            workers: vec![worker],
            ..Status::default()
        };
        let before = at(10.0, port(1000, 50_000, 10, 0), worker(5_000, 10_000));
        let now = at(12.0, port(5000, 300_000, 110, 25), worker(5_500, 12_000));
        let text = render(&before, &now, false);
        let row: Vec<_> = text.lines().find(|l| l.starts_with("web")).unwrap().split_whitespace().collect();
        assert_eq!(row, ["web", "up", "2.00", "k", "1.00", "Mbit/s", "0", "0", "bit/s", "0", "40.0", "25", "%"]);
        assert!(text.lines().any(|l| l.starts_with("main") && l.contains("75.0 %")), "{text}");
        // A restarted daemon counts from zero.
        let text = render(&now, &before, false);
        assert!(text.lines().find(|l| l.starts_with("web")).unwrap().contains("  0  "), "{text}");
    }
}
