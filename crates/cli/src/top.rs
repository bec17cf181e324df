//! `tombolo top`: rates of ports and load of workers.

use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use clap::Args;
use tombolo_host::api::report::{CounterReport, PortReport, Status};

use crate::exit::{Exit, Failure};
use crate::number;
use crate::out::{self, Table, Tone, scaled, span, toned};
use crate::select::Select;
use crate::terminal::{Keys, Screen, columns};

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

/// What the rows are sorted by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Sort {
    #[default]
    Name,
    Received,
    Transmitted,
    Dropped,
}

impl Sort {
    fn next(self) -> Sort {
        match self {
            Sort::Name => Sort::Received,
            Sort::Received => Sort::Transmitted,
            Sort::Transmitted => Sort::Dropped,
            Sort::Dropped => Sort::Name,
        }
    }

    fn word(self) -> &'static str {
        match self {
            Sort::Name => "name",
            Sort::Received => "rx",
            Sort::Transmitted => "tx",
            Sort::Dropped => "drops",
        }
    }
}

/// What the user has chosen to see.
#[derive(Debug, Default, PartialEq, Eq)]
struct View {
    sort: Sort,
    /// Only ports and networks in whose names this is.
    filter: String,
    is_typing: bool,
}

impl View {
    /// Does what a key says; whether it ends the program.
    fn press(&mut self, key: u8) -> bool {
        match (self.is_typing, key) {
            (false, b'q') => return true,
            (false, b's') => self.sort = self.sort.next(),
            (false, b'/') => {
                self.is_typing = true;
                self.filter.clear();
            }
            // Escape clears the filter, Enter keeps it.
            (_, 0x1b) => {
                self.is_typing = false;
                self.filter.clear();
            }
            (true, b'\r' | b'\n') => self.is_typing = false,
            (true, 0x7f | 0x08) => drop(self.filter.pop()),
            (true, key @ 0x21..=0x7e) => self.filter.push(char::from(key)),
            _ => {}
        }
        false
    }

    fn wants(&self, port: &PortReport) -> bool {
        port.name.contains(&self.filter) || port.network.contains(&self.filter)
    }

    fn foot(&self) -> String {
        let filter = match (self.is_typing, self.filter.as_str()) {
            (true, text) => format!("filter: {text}_   Enter keeps it, Esc clears it"),
            (false, "") => "/ filter".into(),
            (false, text) => format!("/ filter: {text}, Esc clears it"),
        };
        format!("q quit   s sort: {}   {filter}", self.sort.word())
    }
}

/// How often keys are looked for.
const KEY_LOOK: Duration = Duration::from_millis(50);

impl Top {
    pub(crate) fn run(&self, select: &Select) -> Result<Exit, Failure> {
        let mut client = select.client()?;
        // Before the screen is taken, so that Ctrl-C gives it back.
        client.watch_signals()?;
        let mut before = client.status()?;
        let is_shown = io::stdout().is_terminal() && !self.once && !self.json;
        let screen = is_shown.then(Screen::new).transpose()?;
        let keys = (is_shown && io::stdin().is_terminal()).then(Keys::new).transpose()?;
        let mut view = View::default();
        if self.json {
            line(&before)?;
            if self.once {
                return Ok(Exit::Done);
            }
        }
        let mut shown: Option<(Status, Status)> = None;
        loop {
            let due = Instant::now() + self.interval;
            while let Some(left) = due.checked_duration_since(Instant::now()) {
                let slice = if keys.is_some() { left.min(KEY_LOOK) } else { left };
                if client.sleep(slice)? {
                    return Ok(Exit::Done);
                }
                let mut is_pressed = false;
                while let Some(key) = keys.as_ref().and_then(Keys::next) {
                    is_pressed = true;
                    if view.press(key) {
                        return Ok(Exit::Done);
                    }
                }
                // A key acts at once, on the figures that are shown.
                if let (true, Some(screen), Some((before, now))) = (is_pressed, &screen, &shown) {
                    screen.show(&page(before, now, &view))?;
                }
            }
            let now = match client.status() {
                // The fabric went down while we looked: this is not a failure.
                Err(error) if error.is_absent() => {
                    drop((keys, screen));
                    out::tell!("tombolo: {} is down", before.name);
                    return Ok(Exit::Done);
                }
                now => now?,
            };
            if self.json {
                line(&now)?;
            } else {
                match &screen {
                    Some(screen) => screen.show(&page(&before, &now, &view))?,
                    None => out::print(&format!("{}\n", render(&before, &now, out::colour(), &view, usize::MAX)))?,
                }
            }
            if self.once {
                return Ok(Exit::Done);
            }
            shown = Some((before, now.clone()));
            before = now;
        }
    }
}

/// What the screen shows.
fn page(before: &Status, now: &Status, view: &View) -> String {
    let text = render(before, now, out::colour(), view, columns());
    format!("{}\n{text}", view.foot())
}

fn line(status: &Status) -> Result<(), Failure> {
    let text = serde_json::to_string(status).map_err(|e| Failure::failed(e.to_string()))?;
    out::print(&format!("{text}\n"))
}

/// What came to a counter per second; nothing for one that was set back with a new daemon.
fn rate(before: u64, now: u64, seconds: f64) -> f64 {
    now.saturating_sub(before) as f64 / seconds
}

/// Bits that a frame takes on a wire besides its bytes are not counted: the rates are of what ports
/// carry.
const BITS: f64 = 8.0;

/// One row of the ports: what it is sorted by, and its cells.
struct Row {
    received: f64,
    transmitted: f64,
    dropped: f64,
    cells: [String; COLUMNS.len()],
}

/// The columns of the ports, and the order in which they go where a terminal is narrow: the highest
/// first, 0 never.
const COLUMNS: [(&str, u8); 9] = [
    ("PORT", 0),
    ("LINK", 1),
    (">RX FRAMES/s", 4),
    (">RX", 0),
    (">TX FRAMES/s", 3),
    (">TX", 0),
    (">DROPS/s", 2),
    (">FRAMES/TURN", 5),
    (">BUSY TURNS", 6),
];

/// The ports in a table of at most so many columns, if that is possible.
fn fitting(rows: &[Row], width: usize, colour: bool) -> String {
    let mut least = 7;
    loop {
        let kept: Vec<usize> = (0..COLUMNS.len()).filter(|i| COLUMNS[*i].1 < least).collect();
        let mut table = Table::new(&kept.iter().map(|i| COLUMNS[*i].0).collect::<Vec<_>>());
        for row in rows {
            table.row(&kept.iter().map(|i| row.cells[*i].as_str()).collect::<Vec<_>>());
        }
        let widest = table.render(false).lines().map(|line| line.chars().count()).max().unwrap_or(0);
        if widest <= width || least == 1 {
            return table.render(colour);
        }
        least -= 1;
    }
}

fn render(before: &Status, now: &Status, colour: bool, view: &View, width: usize) -> String {
    let seconds = (now.uptime_s - before.uptime_s).max(1e-3);
    let zero = CounterReport::default();
    let row = |p: &PortReport| {
        let c = &p.counters;
        let old = before.ports.iter().find(|o| o.name == p.name).map_or(&zero, |o| &o.counters);
        let per_s = |now: u64, before: u64| rate(before, now, seconds);
        let drops = |c: &CounterReport| c.rx_drops.values().chain(c.tx_drops.values()).sum::<u64>();
        let turns = c.turns.saturating_sub(old.turns).max(1) as f64;
        let given = c.rx_frames.saturating_sub(old.rx_frames) as f64 / turns;
        let full = 100.0 * c.exhausted_budgets.saturating_sub(old.exhausted_budgets) as f64 / turns;
        let (received, transmitted) = (per_s(c.rx_bytes, old.rx_bytes), per_s(c.tx_bytes, old.tx_bytes));
        let dropped = per_s(drops(c), drops(old));
        let cells = [
            p.name.clone(),
            if p.up { "up" } else { "down" }.into(),
            scaled(per_s(c.rx_frames, old.rx_frames).round(), ""),
            scaled((BITS * received).round(), "bit/s"),
            scaled(per_s(c.tx_frames, old.tx_frames).round(), ""),
            scaled((BITS * transmitted).round(), "bit/s"),
            scaled(dropped.round(), ""),
            format!("{given:.1}"),
            format!("{full:.0} %"),
        ];
        Row { received, transmitted, dropped, cells }
    };
    let mut rows: Vec<Row> = now.ports.iter().filter(|p| view.wants(p)).map(row).collect();
    let by = |row: &Row| match view.sort {
        Sort::Name => 0.0,
        Sort::Received => row.received,
        Sort::Transmitted => row.transmitted,
        Sort::Dropped => row.dropped,
    };
    // Stable: rows with the same figure stay in the order of their names.
    rows.sort_by(|a, b| by(b).total_cmp(&by(a)));
    let ports = fitting(&rows, width, colour);
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
    format!("{head}\n{warnings}\n{ports}\n{}", workers.render(colour))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use tombolo_host::api::report::WorkerReport;

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
            rings: None,
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
        let wide = |before, now| render(before, now, false, &View::default(), usize::MAX);
        let text = wide(&before, &now);
        let row: Vec<_> = text.lines().find(|l| l.starts_with("web")).unwrap().split_whitespace().collect();
        assert_eq!(row, ["web", "up", "2.00", "k", "1.00", "Mbit/s", "0", "0", "bit/s", "0", "40.0", "25", "%"]);
        assert!(text.lines().any(|l| l.starts_with("main") && l.contains("75.0 %")), "{text}");
        // A restarted daemon counts from zero.
        let text = wide(&now, &before);
        assert!(text.lines().find(|l| l.starts_with("web")).unwrap().contains("  0  "), "{text}");
    }

    #[test]
    fn keys_sort_filter_and_quit() {
        let mut view = View::default();
        for (keys, sort, filter) in
            [("s", "rx", ""), ("/wsq\x7f", "rx", "ws"), ("\rs", "tx", "ws"), ("\x1b", "tx", ""), ("ss", "name", "")]
        {
            assert!(keys.bytes().all(|key| !view.press(key)), "{keys:?}");
            assert_eq!((view.sort.word(), view.filter.as_str()), (sort, filter), "{keys:?}");
            assert!(view.foot().contains(filter) && view.foot().contains(sort));
        }
        assert!(view.press(b'q'));
    }

    #[test]
    fn a_narrow_terminal_shows_fewer_columns_and_the_busiest_port_comes_first() {
        let port = |name: &str, rx_bytes| PortReport {
            name: name.into(),
            network: "lan".into(),
            kind: "tap".into(),
            up: true,
            offloads: vec![],
            guard: vec![],
            details: Default::default(),
            rings: None,
            macs: 0,
            counters: CounterReport { rx_bytes, ..Default::default() },
            last_fault: None,
        };
        let status = |uptime_s, ports| Status { name: "t".into(), uptime_s, ports, ..Status::default() };
        let before = status(1.0, vec![port("a", 0), port("b", 0), port("uplink-lan", 0)]);
        let now = status(2.0, vec![port("a", 10), port("b", 1000), port("uplink-lan", 100)]);
        let names = |view: &View, width| {
            let text = render(&before, &now, false, view, width);
            let lines = text.lines().skip_while(|l| !l.starts_with("PORT")).take_while(|l| !l.is_empty());
            let lines: Vec<String> = lines.map(String::from).collect();
            let words = lines.iter().skip(1).filter_map(|l| l.split(' ').next()).map(String::from).collect::<Vec<_>>();
            (words, lines[0].clone())
        };
        let busiest = View { sort: Sort::Received, ..View::default() };
        assert_eq!(names(&busiest, usize::MAX).0, ["b", "uplink-lan", "a"]);
        assert_eq!(names(&View { filter: "up".into(), ..View::default() }, 80).0, ["uplink-lan"]);
        for width in [100, 80, 60, 40] {
            let (rows, head) = names(&View::default(), width);
            assert!(rows.len() == 3 && head.len() <= width && head.contains("TX"), "{width}: {head}");
        }
        assert!(
            names(&View::default(), 120).1.contains("BUSY TURNS") && !names(&View::default(), 80).1.contains("BUSY")
        );
    }
}
