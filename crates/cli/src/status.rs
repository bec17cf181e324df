//! `tombolo status`.

use clap::Args;
use serde_json::Value;
use std::collections::BTreeMap;
use tombolo_host::api::report::{ForwardReport, MachineReport, PortReport, Status};

use crate::exit::{Exit, Failure};
use crate::out::{self, Table, Tone, counted, scaled, span, toned};
use crate::select::Select;

#[derive(Args, Debug)]
pub(crate) struct StatusArgs {
    /// Print the report as JSON
    #[arg(long)]
    json: bool,
}

impl StatusArgs {
    pub(crate) fn run(&self, select: &Select) -> Result<Exit, Failure> {
        let status = select.client()?.status()?;
        if self.json {
            out::json(&status)?;
        } else {
            out::print(&render(&status, out::colour()))?;
        }
        Ok(Exit::Done)
    }
}

fn dash(text: impl ToString) -> String {
    let text = text.to_string();
    if text.is_empty() { "-".into() } else { text }
}

/// The report for people.
fn render(status: &Status, colour: bool) -> String {
    let mut out = format!(
        "{}  up {}, process {}, tombolo {}, {}\n",
        toned(&status.name, Tone::Bold, colour),
        span(status.uptime_s),
        status.pid,
        status.version,
        status.file
    );
    for warning in &status.warnings {
        out.push_str(&format!("{}\n", toned(&format!("! {warning}"), Tone::Bad, colour)));
    }
    let mut section = |text: String| {
        if text.lines().count() > 1 {
            out.push('\n');
            out.push_str(&text);
        }
    };
    section(networks(status).render(colour));
    section(machines(&status.machines).render(colour));
    section(ports(&status.ports).render(colour));
    section(links(status).render(colour));
    section(forwards(&status.forwards).render(colour));
    section(leases(status).render(colour));
    section(workers(status).render(colour));
    out
}

fn networks(status: &Status) -> Table {
    let mut table =
        Table::new(&["NETWORK", "SUBNET", "GATEWAY", "ROUTER", "UPLINK", "DOMAIN", ">MTU", ">MACS", ">FLOODED"]);
    for n in &status.networks {
        let router = n.router.map(|r| r.to_string()).unwrap_or_default();
        let notes = table.row(&[
            &n.name,
            &n.subnet,
            &dash(n.gateway.map(|g| g.to_string()).unwrap_or_default()),
            &dash(router),
            &n.uplink,
            &n.domain,
            &n.mtu.to_string(),
            &n.macs.to_string(),
            &scaled(n.flooded_unknown as f64, ""),
        ]);
        notes.extend(n.uplink_fault.iter().map(|f| format!("the uplink does not work: {f}")));
        if let Some(bypass) = &n.bypass {
            notes.extend(bypass.fault.iter().map(|f| format!("the bypass does not work: {f}")));
            notes.extend(bypass.interfaces.iter().map(|i| {
                let (taken, passed) = (scaled(i.taken_frames as f64, ""), scaled(i.passed_frames as f64, ""));
                format!("bypass {} {}: {taken} taken, {passed} passed; {}", i.name, i.mode, i.why)
            }));
        }
    }
    table
}

/// Cells and VMs, as `status` and `cell ls` show them.
pub(crate) fn machines(machines: &[MachineReport]) -> Table {
    let mut table = Table::new(&["MACHINE", "KIND", "STATE", "UP", "ADDRESS", "RUNS ON", ">PROCESS", ">RESTARTS"]);
    for m in machines {
        let addresses: Vec<_> = m.addresses.values().map(ToString::to_string).collect();
        let notes = table.row(&[
            &m.name,
            &m.kind,
            &m.restart_in_s.map_or(m.state.clone(), |s| format!("{}, again in {}", m.state, span(s))),
            &dash(m.uptime_s.map(span).unwrap_or_default()),
            &dash(addresses.join(" ")),
            &format!("{} {}", m.machine, m.accel),
            &dash(m.pid.map(|p| p.to_string()).unwrap_or_default()),
            &m.restarts.to_string(),
        ]);
        if let Some(domain) = m.domain.as_ref().filter(|_| m.state == "running") {
            let id = domain.id.map_or_else(|| "being created".into(), |id| format!("number {id}"));
            let suspended = if domain.suspended { "; it is suspended, by itself or to be saved" } else { "" };
            notes.push(format!("Xen domain {}, {id}{suspended}", domain.name));
        }
        // Of a machine that runs again, the end before that is history.
        if m.state != "running" {
            notes.extend(m.last_end.iter().flat_map(|end| end.lines()).map(String::from));
        }
    }
    table
}

fn reasons(drops: &BTreeMap<String, u64>) -> String {
    let each: Vec<_> = drops.iter().filter(|(_, n)| **n > 0).map(|(r, n)| format!("{n} {r}")).collect();
    each.join(", ")
}

/// Ports, as `status` and `port ls` show them.
pub(crate) fn ports(ports: &[PortReport]) -> Table {
    let heads =
        ["PORT", "NETWORK", "KIND", "LINK", ">RX FRAMES", ">RX BYTES", ">TX FRAMES", ">TX BYTES", ">DROPS", ">FAULTS"];
    let mut table = Table::new(&heads);
    for p in ports {
        let c = &p.counters;
        let drops: u64 = c.rx_drops.values().chain(c.tx_drops.values()).sum();
        let notes = table.row(&[
            &p.name,
            &p.network,
            &p.kind,
            if p.up { "up" } else { "down" },
            &scaled(c.rx_frames as f64, ""),
            &scaled(c.rx_bytes as f64, "B"),
            &scaled(c.tx_frames as f64, ""),
            &scaled(c.tx_bytes as f64, "B"),
            &scaled(drops as f64, ""),
            &c.faults.to_string(),
        ]);
        for (drops, whence) in [(&c.rx_drops, "dropped, from it"), (&c.tx_drops, "dropped, to it")] {
            let reasons = reasons(drops);
            if !reasons.is_empty() {
                notes.push(format!("{whence}: {reasons}"));
            }
        }
        notes.extend(p.last_fault.iter().map(|f| format!("last fault: {f}")));
    }
    table
}

/// Links of shared memory: one row for each, and a note for each peer.
fn links(status: &Status) -> Table {
    let mut table =
        Table::new(&["SHARED MEMORY", "KIND", "VERSION", ">BYTES", ">BELLS", ">PEERS", ">OUT", ">IN", "KEPT"]);
    for l in &status.links {
        let (out, waiting) = l.rings.as_ref().map_or((String::new(), String::new()), |r| {
            (format!("{}/{}", r.frames_out, r.frames_out_max), format!("{}/{}", r.frames_waiting, r.frames_waiting_max))
        });
        let notes = table.row(&[
            &l.name,
            &l.kind,
            &format!("{}{}", l.version, if l.plain { " plain" } else { "" }),
            &scaled(l.region_bytes as f64, "B"),
            &l.vectors.to_string(),
            &format!("{}/{}", l.peers.len(), l.max_peers),
            &dash(out),
            &dash(waiting),
            if l.kept { "yes" } else { "no" },
        ]);
        notes.extend(l.peers.iter().map(|p| {
            let who = p.name.clone().unwrap_or_else(|| "a process".into());
            let pid = p.pid.map(|pid| format!(", process {pid}")).unwrap_or_default();
            format!("{}: {who}{pid}, {}", p.id, p.state)
        }));
    }
    table
}

pub(crate) fn forwards(forwards: &[ForwardReport]) -> Table {
    let mut table = Table::new(&["FORWARD", "LISTEN", "TO", "ADDRESS"]);
    for f in forwards {
        let notes = table.row(&[&f.proto, &f.listen.to_string(), &f.to, &f.address.to_string()]);
        notes.extend(f.fault.iter().map(|f| format!("does not work: {f}")));
    }
    table
}

fn leases(status: &Status) -> Table {
    let mut table = Table::new(&["LEASE", "MAC", "NAME", "NETWORK", "ENDS"]);
    for (n, l) in status.networks.iter().flat_map(|n| n.leases.iter().map(move |l| (n, l))) {
        let ends = match (l.expires_s, l.fixed) {
            (Some(s), _) => format!("in {}", span(s as f64)),
            (None, true) => "fixed".into(),
            (None, false) => "never".into(),
        };
        table.row(&[&l.ip.to_string(), &l.mac, &dash(l.name.clone().unwrap_or_default()), &n.name, &ends]);
    }
    table
}

fn workers(status: &Status) -> Table {
    let mut table = Table::new(&["WORKER", "CPU", ">BUDGET", ">POLL", ">SLEEPS", ">ASLEEP"]);
    for w in &status.workers {
        let asleep = 100.0 * w.slept_ns as f64 / (w.lifetime_ns.max(1)) as f64;
        table.row(&[
            &w.name,
            &w.cpu.map_or_else(|| "any".into(), |c| c.to_string()),
            &w.budget.to_string(),
            &format!("{} µs", w.busy_poll_us),
            &scaled(w.sleeps as f64, ""),
            &format!("{:.1} %", asleep.min(100.0)),
        ]);
    }
    table
}

/// All that is known of one port, a line each.
pub(crate) fn port(p: &PortReport) -> String {
    let c = &p.counters;
    let mut lines: Vec<(String, String)> = vec![
        ("port".into(), p.name.clone()),
        ("network".into(), p.network.clone()),
        ("kind".into(), p.kind.clone()),
        ("link".into(), if p.up { "up" } else { "down" }.into()),
        ("offloads".into(), dash(p.offloads.join(" "))),
        ("guard".into(), if p.guard.is_empty() { "off".into() } else { p.guard.join(" ") }),
        ("macs".into(), p.macs.to_string()),
    ];
    lines.extend(p.details.iter().map(|(k, v)| (k.clone(), detail(v))));
    lines.extend(p.rings.iter().flat_map(|r| {
        [
            ("frames_out".into(), format!("{} of {}", r.frames_out, r.frames_out_max)),
            ("bytes_out".into(), format!("{} of {}", r.bytes_out, r.bytes_out_max)),
            ("frames_waiting".into(), format!("{} of {}", r.frames_waiting, r.frames_waiting_max)),
        ]
    }));
    let plain = [
        ("rx frames", c.rx_frames),
        ("rx bytes", c.rx_bytes),
        ("tx frames", c.tx_frames),
        ("tx bytes", c.tx_bytes),
        ("waited for a buffer or the rate limit", c.queued_frames),
        ("wake-ups", c.wakeups),
        ("late wake-ups", c.late_wakeups),
        ("late signals", c.late_signals),
        ("turns", c.turns),
        ("exhausted budgets", c.exhausted_budgets),
        ("software checksums", c.software_checksums),
        ("software segments", c.software_segments),
        ("merged segments", c.software_merged),
        ("captured", c.captured),
        ("lost by captures", c.capture_lost),
        ("faults", c.faults),
        ("restarts", c.restarts),
    ];
    lines.extend(plain.map(|(k, v)| (k.into(), v.to_string())));
    lines.extend(c.rx_drops.iter().map(|(r, n)| (format!("rx drops, {r}"), n.to_string())));
    lines.extend(c.tx_drops.iter().map(|(r, n)| (format!("tx drops, {r}"), n.to_string())));
    lines.extend(c.frames_per_turn.iter().enumerate().filter(|(_, n)| **n > 0).map(|(i, n)| {
        let turns = match i {
            0 => "turns with no frame".into(),
            1 => "turns with 1 frame".into(),
            _ => format!("turns with {} to {} frames", 1u64 << (i - 1), (1u64 << i) - 1),
        };
        (turns, n.to_string())
    }));
    lines.extend(p.last_fault.iter().map(|f| ("last fault".into(), f.clone())));
    let width = lines.iter().map(|(k, _)| k.chars().count()).max().unwrap_or(0);
    lines.iter().map(|(k, v)| format!("{k}{}  {v}\n", " ".repeat(width - k.chars().count()))).collect()
}

/// `2 ports added: a, b`.
pub(crate) fn done<'n>(what: &str, verb: &str, names: impl Iterator<Item = &'n str>) -> String {
    let names: Vec<_> = names.collect();
    format!("{} {verb}: {}\n", counted(names.len(), what), names.join(", "))
}

/// A fact of a port, for people.
pub(crate) fn detail(value: &Value) -> String {
    let limit = |(name, limit): (&String, &Value)| match limit {
        // A rate: bits and frames per second.
        Value::Object(keys) => {
            let burst = keys.get("burst_bits").map_or_else(String::new, |n| format!(" (burst {n} bit)"));
            let bits = keys.get("bits").map(|n| format!("{name} {n} bit/s{burst}"));
            let frames = keys.get("frames").map(|n| format!("{name} {n} frames/s"));
            bits.into_iter().chain(frames).collect::<Vec<_>>().join(", ")
        }
        Value::Null => format!("{name} off"),
        value => format!("{name} {}", detail(value)),
    };
    match value {
        Value::String(text) => text.clone(),
        Value::Array(list) => list.iter().map(detail).collect::<Vec<_>>().join(" "),
        Value::Object(limits) => limits.iter().map(limit).collect::<Vec<_>>().join(", "),
        value => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: StatusArgs,
    }

    #[test]
    fn details_are_told_in_words() {
        let value = |text: &str| detail(&serde_json::from_str(text).unwrap());
        assert_eq!(value("1500") + &value("true") + &value("\"up\""), "1500trueup");
        assert_eq!(value("[256, 128]"), "256 128");
        assert_eq!(value(r#"{"broadcast":100,"unknown":null}"#), "broadcast 100, unknown off");
        let rate = r#"{"receive":{"frames":7},"send":{"bits":1000,"burst_bits":64,"frames":9}}"#;
        assert_eq!(value(rate), "receive 7 frames/s, send 1000 bit/s (burst 64 bit), send 9 frames/s");
    }

    #[test]
    fn json_is_asked_for() {
        assert!(Line::try_parse_from(["status", "--json"]).unwrap().args.json);
        assert!(!Line::try_parse_from(["status"]).unwrap().args.json);
    }

    const REPORT: &str = r#"{"schema":1,"version":"0.1.0","name":"demo","file":"/t.toml","pid":7,"uptime_s":75.0,
        "networks":[{"name":"lan","subnet":"10.87.0.0/24","gateway":"10.87.0.1","router":null,"uplink":"user","uplink_fault":"no passt","domain":"d","mtu":1500,
            "worker":"main","macs":2,"flooded_unknown":1500,"counters":{},
            "leases":[{"mac":"02:00:00:00:00:01","ip":"10.87.0.10","name":"web","fixed":true,"expires_s":null}]}],
        "machines":[{"name":"web","kind":"cell","state":"failed","pid":null,"accel":"tcg","machine":"microvm","addresses":{"lan":"10.87.0.10"},
            "uptime_s":null,"last_end":"exit code 3\npanicked at x","restarts":2,"adopted":false}],
        "ports":[{"name":"web","network":"lan","kind":"vhost-user","up":false,"offloads":["checksum"],"guard":[],"details":{"socket":"/s"},"macs":1,
            "last_fault":"ring: bad index","counters":{"rx_frames":12345,"rx_bytes":1000000,"tx_frames":0,"tx_bytes":0,"rx_drops":{"guard":3},"tx_drops":{},
            "wakeups":1,"turns":2,"exhausted_budgets":0,"frames_per_turn":[1,0,4],"faults":1,"software_checksums":0,"software_segments":0,"captured":0,"capture_lost":0}}],
        "forwards":[],"workers":[{"name":"main","cpu":null,"budget":64,"busy_poll_us":0,"sleeps":9,"slept_ns":500,"lifetime_ns":1000}],"warnings":["mind"]}"#;

    #[test]
    fn the_fill_of_rings_is_numbers_in_the_report_and_text_for_people() {
        let mut status: Status = serde_json::from_str(REPORT).unwrap();
        assert!(!port(&status.ports[0]).contains(" of "), "a kind without rings of its own");
        let rings = serde_json::json!({ "frames_out": 3, "frames_out_max": 290, "bytes_out": 4608, "bytes_out_max": 466_816,
            "frames_waiting": 0, "frames_waiting_max": 2048 });
        status.ports[0].rings = serde_json::from_value(rings.clone()).unwrap();
        assert_eq!(serde_json::to_value(&status).unwrap()["ports"][0]["rings"], rings);
        let text = port(&status.ports[0]);
        for part in ["3 of 290", "4608 of 466816", "0 of 2048"] {
            assert!(text.contains(part), "{part:?} in\n{text}");
        }
    }

    #[test]
    fn the_report_tells_what_is_wrong_beside_what_it_is_about() {
        let status: Status = serde_json::from_str(REPORT).unwrap();
        let text = render(&status, false);
        for part in [
            "demo  up 1 min 15 s",
            "! mind\n",
            "    the uplink does not work: no passt\n",
            "    exit code 3\n    panicked at x\n",
            "    dropped, from it: 3 guard\n    last fault: ring: bad index\n",
            "12.3 k",
            "1.00 MB",
            "fixed",
            "50.0 %",
        ] {
            assert!(text.contains(part), "{part:?} in\n{text}");
        }
        assert!(!text.contains('\x1b') && !text.contains("FORWARD"), "{text}");
        assert!(render(&status, true).contains("\x1b[31m! mind"));
    }

    #[test]
    fn a_port_is_told_in_full() {
        let status: Status = serde_json::from_str(REPORT).unwrap();
        let text = port(&status.ports[0]);
        for part in [
            "rx frames             12345",
            "socket",
            "rx drops, guard",
            "turns with 2 to 3 frames  4",
            "guard",
            "ring: bad index",
        ] {
            let squeezed: String = text.split_whitespace().collect::<Vec<_>>().join(" ");
            let wanted: String = part.split_whitespace().collect::<Vec<_>>().join(" ");
            assert!(squeezed.contains(&wanted), "{part} in\n{text}");
        }
    }
}
