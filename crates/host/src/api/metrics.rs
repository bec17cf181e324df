//! The fabric's report as Prometheus text (exposition format 0.0.4): every counter of the report,
//! units in the names.
//!
//! Counters restart from zero with the daemon, as Prometheus expects of a process.

use super::report::{
    BypassInterfaceReport, BypassReport, CounterReport, DescriptorReport, ForwardReport, LinkReport, SpanSummary,
    Status,
};
use std::fmt::{Display, Write};

/// The format's content type.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// A page that grows.
#[derive(Default)]
pub(super) struct Page {
    text: String,
}

impl Page {
    pub(super) fn text(self) -> String {
        self.text
    }

    /// Opens a family: its name, type ("counter", "gauge") and what it counts.
    pub(super) fn family(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    pub(super) fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: impl Display) {
        self.text.push_str(name);
        for (i, (label, text)) in labels.iter().enumerate() {
            let escaped = text.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n");
            let _ = write!(self.text, "{}{label}=\"{escaped}\"", if i == 0 { '{' } else { ',' });
        }
        let _ = writeln!(self.text, "{} {value}", if labels.is_empty() { "" } else { "}" });
    }
}

type PortCounter = (&'static str, &'static str, fn(&CounterReport) -> u64);

const PORT_COUNTERS: &[PortCounter] = &[
    ("rx_frames_total", "Frames from the peer.", |c| c.rx_frames),
    ("rx_bytes_total", "Bytes of frames from the peer.", |c| c.rx_bytes),
    ("tx_frames_total", "Frames to the peer.", |c| c.tx_frames),
    ("tx_bytes_total", "Bytes of frames to the peer.", |c| c.tx_bytes),
    (
        "queued_frames_total",
        "Frames that waited for a buffer of the peer or for the rate limit before they were given to it or dropped.",
        |c| c.queued_frames,
    ),
    ("wakeups_total", "Times the port was found ready after it had slept.", |c| c.wakeups),
    ("late_wakeups_total", "Times frames were waiting without a wake-up, found by the check after a sleep.", |c| {
        c.late_wakeups
    }),
    ("late_signals_total", "Times the peer was signalled only by that check.", |c| c.late_signals),
    ("turns_total", "Turns in which the port was polled for frames.", |c| c.turns),
    ("exhausted_budgets_total", "Turns that used up the budget.", |c| c.exhausted_budgets),
    ("faults_total", "Times the peer broke the rules and the port was reset.", |c| c.faults),
    ("restarts_total", "Times the port was restarted after a panic in its code.", |c| c.restarts),
    ("software_checksums_total", "Checksums completed in software for the port.", |c| c.software_checksums),
    ("software_segments_total", "Segments cut in software for the port.", |c| c.software_segments),
    ("software_merged_total", "Segments and datagrams that became parts of longer frames to the port.", |c| {
        c.software_merged
    }),
    ("captured_frames_total", "Frames copied to captures.", |c| c.captured),
    ("capture_lost_frames_total", "Frames that captures could not keep up with.", |c| c.capture_lost),
];

pub(super) fn seconds(ns: u64) -> String {
    format!("{}.{:09}", ns / 1_000_000_000, ns % 1_000_000_000)
}

/// Writes all metrics in Prometheus's text format.
pub fn render(status: &Status) -> String {
    let mut page = Page { text: String::with_capacity(16 << 10) };
    let p = &mut page;
    p.family("tombolo_info", "gauge", "Version of the program and name of the fabric; always 1.");
    p.sample("tombolo_info", &[("version", &status.version), ("fabric", &status.name)], 1);
    p.family("tombolo_uptime_seconds", "gauge", "Seconds since the fabric came up.");
    p.sample("tombolo_uptime_seconds", &[], status.uptime_s);
    p.family("tombolo_warnings", "gauge", "Number of warnings in status: what does not work as the file asks.");
    p.sample("tombolo_warnings", &[], status.warnings.len());
    networks(p, status);
    bypasses(p, status.networks.iter().filter_map(|n| Some((n.name.as_str(), n.bypass.as_ref()?))));
    ports(p, status);
    machines(p, status);
    links(p, status);
    workers(p, status);
    descriptors(p, &status.descriptors);
    if let Some(summary) = &status.span {
        span(p, summary);
    }
    page.text
}

fn span(p: &mut Page, summary: &SpanSummary) {
    let name = "tombolo_span_machines";
    p.family(name, "gauge", "Other machines in the last report of tombolo-span, by state.");
    for (state, count) in &summary.machines {
        p.sample(name, &[("state", state)], count);
    }
    let name = "tombolo_span_members";
    p.family(name, "gauge", "Members of the network on other machines that this one knows.");
    for (network, count) in &summary.members {
        p.sample(name, &[("network", network)], count);
    }
    p.family("tombolo_span_conflicts", "gauge", "Addresses and names that more than one machine has, as reported.");
    p.sample("tombolo_span_conflicts", &[], summary.conflicts);
    let name = "tombolo_span_refused_total";
    let help = "What was refused: lists of tombolo-span by this daemon, messages of other machines by tombolo-span.";
    p.family(name, "counter", help);
    for (what, count) in [("list", summary.lists_refused), ("message", summary.messages_refused)] {
        p.sample(name, &[("what", what)], count);
    }
    if let Some(age) = summary.age_s {
        let name = "tombolo_span_report_age_seconds";
        p.family(name, "gauge", "Seconds since the last report of tombolo-span.");
        p.sample(name, &[], age);
    }
}

fn descriptors(p: &mut Page, d: &DescriptorReport) {
    let name = "tombolo_unusual_signals_total";
    p.family(
        name,
        "counter",
        "Signals to peers while the system's asynchronous I/O was used up, by what became of them.",
    );
    for (way, count) in
        [("io_uring", d.signals_by_io_uring), ("helper", d.signals_by_helper), ("dropped", d.signals_dropped)]
    {
        p.sample(name, &[("way", way)], count);
    }
    p.family(
        "tombolo_held_descriptors",
        "gauge",
        "Descriptors of peers whose closing waits for a file system of theirs.",
    );
    p.sample("tombolo_held_descriptors", &[], d.held);
}

fn networks(p: &mut Page, status: &Status) {
    p.family("tombolo_network_macs", "gauge", "MAC addresses known to the network's switch.");
    for n in &status.networks {
        p.sample("tombolo_network_macs", &[("network", &n.name)], n.macs);
    }
    p.family("tombolo_network_leases", "gauge", "DHCP leases in force, static ones included.");
    for n in &status.networks {
        p.sample("tombolo_network_leases", &[("network", &n.name)], n.leases.len());
    }
    p.family("tombolo_network_uplink_up", "gauge", "Whether the uplink works; networks without one are left out.");
    for n in status.networks.iter().filter(|n| n.uplink != "none") {
        let labels = [("network", n.name.as_str()), ("uplink", &n.uplink)];
        p.sample("tombolo_network_uplink_up", &labels, u8::from(n.uplink_fault.is_none()));
    }
    let name = "tombolo_network_flooded_unknown_frames_total";
    p.family(name, "counter", "Frames flooded because no port was known to have the address.");
    for n in &status.networks {
        p.sample(name, &[("network", &n.name)], n.flooded_unknown);
    }
    let name = "tombolo_network_events_total";
    p.family(name, "counter", "What the gateway and the user uplink did, by name.");
    for n in &status.networks {
        for (event, count) in &n.counters {
            p.sample(name, &[("network", &n.name), ("event", event)], count);
        }
    }
}

/// The page of a bypass that belongs to no fabric: the families and labels of a fabric's page,
/// under the name of a network.
pub fn render_bypass(network: &str, bypass: &BypassReport) -> String {
    let mut page = Page::default();
    bypasses(&mut page, std::iter::once((network, bypass)));
    page.text
}

fn bypasses<'a>(p: &mut Page, all: impl Iterator<Item = (&'a str, &'a BypassReport)> + Clone) {
    type Number = (&'static str, &'static str, fn(&BypassInterfaceReport) -> u64);
    const NUMBERS: &[Number] = &[
        ("taken_frames_total", "Frames that came in here and skipped the kernel's forwarding.", |i| i.taken_frames),
        ("taken_bytes_total", "Bytes of frames that skipped the kernel's forwarding.", |i| i.taken_bytes),
        ("passed_frames_total", "Frames that took the kernel's path.", |i| i.passed_frames),
    ];
    let interfaces = || all.clone().flat_map(|(n, b)| b.interfaces.iter().map(move |i| (n, i)));
    p.family("tombolo_bypass_up", "gauge", "Whether the bypass works; networks that ask for none are left out.");
    for (network, bypass) in all.clone() {
        p.sample("tombolo_bypass_up", &[("network", network)], u8::from(bypass.fault.is_none()));
    }
    p.family("tombolo_bypass_mode", "gauge", "Which program takes the interface's frames, as a label; always 1.");
    for (network, i) in interfaces() {
        p.sample("tombolo_bypass_mode", &[("network", network), ("interface", &i.name), ("mode", &i.mode)], 1);
    }
    for (name, help, value) in NUMBERS {
        let name = format!("tombolo_bypass_{name}");
        p.family(&name, "counter", help);
        for (network, i) in interfaces() {
            p.sample(&name, &[("network", network), ("interface", &i.name)], value(i));
        }
    }
    let name = "tombolo_bypass_frames_total";
    p.family(name, "counter", "Frames by path and reason, as `tombolo bypass status` and `trace` name them.");
    for (network, i) in interfaces() {
        for (path, count) in &i.by_reason {
            p.sample(name, &[("network", network), ("interface", &i.name), ("path", path)], count);
        }
    }
}

fn ports(p: &mut Page, status: &Status) {
    p.family("tombolo_port_up", "gauge", "Whether frames flow.");
    for port in &status.ports {
        let labels = [("port", port.name.as_str()), ("network", &port.network), ("kind", &port.kind)];
        p.sample("tombolo_port_up", &labels, u8::from(port.up));
    }
    p.family("tombolo_port_macs", "gauge", "MAC addresses learned behind the port.");
    for port in &status.ports {
        p.sample("tombolo_port_macs", &[("port", &port.name), ("network", &port.network)], port.macs);
    }
    for (name, help, value) in PORT_COUNTERS {
        let name = format!("tombolo_port_{name}");
        p.family(&name, "counter", help);
        for port in &status.ports {
            p.sample(&name, &[("port", &port.name), ("network", &port.network)], value(&port.counters));
        }
    }
    let name = "tombolo_port_dropped_frames_total";
    p.family(name, "counter", "Frames dropped, by direction (rx is from the peer) and reason.");
    for port in &status.ports {
        for (direction, drops) in [("rx", &port.counters.rx_drops), ("tx", &port.counters.tx_drops)] {
            for (reason, count) in drops {
                let labels = [("port", port.name.as_str()), ("network", &port.network), ("direction", direction)];
                p.sample(name, &[labels.as_slice(), &[("reason", reason)]].concat(), count);
            }
        }
    }
    let name = "tombolo_port_turns_by_frames_total";
    p.family(name, "counter", "Turns by the least number of frames that they gave: 0, 1, 2, 4, and so on in doubles.");
    for port in &status.ports {
        for (i, count) in port.counters.frames_per_turn.iter().enumerate() {
            let least = if i == 0 { 0 } else { 1u64 << (i - 1) }.to_string();
            p.sample(name, &[("port", &port.name), ("network", &port.network), ("least", &least)], count);
        }
    }
}

fn machines(p: &mut Page, status: &Status) {
    p.family("tombolo_machine_up", "gauge", "Whether the cell or VM runs.");
    for m in &status.machines {
        let labels = [("machine", m.name.as_str()), ("kind", &m.kind), ("accel", &m.accel)];
        p.sample("tombolo_machine_up", &labels, u8::from(m.state == "running"));
    }
    p.family("tombolo_machine_uptime_seconds", "gauge", "Seconds since its start, while it runs.");
    for m in &status.machines {
        if let Some(uptime) = m.uptime_s {
            p.sample("tombolo_machine_uptime_seconds", &[("machine", &m.name)], uptime);
        }
    }
    p.family("tombolo_machine_restarts_total", "counter", "Times it was started again after it had failed.");
    for m in &status.machines {
        p.sample("tombolo_machine_restarts_total", &[("machine", &m.name)], m.restarts);
    }
    p.family("tombolo_machine_restart_seconds", "gauge", "Seconds until a machine that failed is started again.");
    for m in &status.machines {
        if let Some(wait) = m.restart_in_s {
            p.sample("tombolo_machine_restart_seconds", &[("machine", &m.name)], wait);
        }
    }
    p.family("tombolo_forward_up", "gauge", "Whether the port forward works.");
    for f in &status.forwards {
        let listen = f.listen.to_string();
        let labels = [("proto", f.proto.as_str()), ("listen", &listen), ("to", &f.to)];
        p.sample("tombolo_forward_up", &labels, u8::from(f.fault.is_none()));
    }
    type ForwardNumber = (&'static str, &'static str, &'static str, fn(&ForwardReport) -> Option<u64>);
    const NUMBERS: &[ForwardNumber] = &[
        ("open", "gauge", "Connections, or UDP peers, that the daemon passes on for the forward.", |f| f.open),
        (
            "refused_total",
            "counter",
            "Connections that were reset, or datagrams that were dropped, since the forward was full.",
            |f| f.refused,
        ),
    ];
    for (name, kind, help, number) in NUMBERS {
        let name = format!("tombolo_forward_{name}");
        p.family(&name, kind, help);
        for f in &status.forwards {
            let listen = f.listen.to_string();
            if let Some(n) = number(f) {
                p.sample(&name, &[("proto", f.proto.as_str()), ("listen", &listen), ("to", &f.to)], n);
            }
        }
    }
}

fn links(p: &mut Page, status: &Status) {
    type LinkNumber = (&'static str, &'static str, &'static str, fn(&LinkReport) -> Option<u64>);
    const NUMBERS: &[LinkNumber] = &[
        ("region_bytes", "gauge", "Size of the link's shared memory.", |l| Some(l.region_bytes)),
        ("peers", "gauge", "Peers that are on the link.", |l| Some(l.peers.len() as u64)),
        ("kept", "gauge", "Whether the fd store has the link, so that it survives a restart of the daemon.", |l| {
            Some(l.kept.into())
        }),
        ("joins_total", "counter", "Peers that joined.", |l| Some(l.joins)),
        ("leaves_total", "counter", "Peers that left.", |l| Some(l.leaves)),
        ("cut_slow_total", "counter", "Clients cut off because they took nothing from the server.", |l| {
            Some(l.cut_slow)
        }),
        ("cut_talking_total", "counter", "Clients cut off because they spoke to the server.", |l| Some(l.cut_talking)),
        ("refused_total", "counter", "Connections for which no peer ID was free.", |l| Some(l.refused)),
        ("frames_out", "gauge", "Frames on their way to the peer.", |l| l.rings.as_ref().map(|r| r.frames_out)),
        ("frames_out_max", "gauge", "Frames that can be on their way.", |l| l.rings.as_ref().map(|r| r.frames_out_max)),
        ("bytes_out", "gauge", "Bytes that frames on their way take.", |l| l.rings.as_ref().map(|r| r.bytes_out)),
        ("bytes_out_max", "gauge", "Bytes that they can take.", |l| l.rings.as_ref().map(|r| r.bytes_out_max)),
        ("frames_waiting", "gauge", "Frames of the peer that wait.", |l| l.rings.as_ref().map(|r| r.frames_waiting)),
        ("frames_waiting_max", "gauge", "Entries of the peer's ring.", |l| {
            l.rings.as_ref().map(|r| r.frames_waiting_max)
        }),
    ];
    for (name, kind, help, value) in NUMBERS {
        let name = format!("tombolo_link_{name}");
        p.family(&name, kind, help);
        for link in &status.links {
            if let Some(value) = value(link) {
                p.sample(&name, &[("link", &link.name), ("kind", &link.kind)], value);
            }
        }
    }
    p.family("tombolo_link_peer_state", "gauge", "State of a peer: 0 RESET, 1 INIT, 2 READY, 3 RUN.");
    for (link, peer) in status.links.iter().flat_map(|l| l.peers.iter().map(move |p| (l, p))) {
        let id = peer.id.to_string();
        p.sample(
            "tombolo_link_peer_state",
            &[("link", &link.name), ("kind", &link.kind), ("peer", &id)],
            peer.state_word,
        );
    }
    p.family("tombolo_link_peer_waiting_messages", "gauge", "Messages of the server that the peer has not taken.");
    for (link, peer) in status.links.iter().flat_map(|l| l.peers.iter().map(move |p| (l, p))) {
        let id = peer.id.to_string();
        let labels = [("link", link.name.as_str()), ("kind", &link.kind), ("peer", &id)];
        p.sample("tombolo_link_peer_waiting_messages", &labels, peer.waiting_messages);
    }
}

fn workers(p: &mut Page, status: &Status) {
    type WorkerCounter = (&'static str, &'static str, fn(&super::report::WorkerReport) -> String);
    const COUNTERS: &[WorkerCounter] = &[
        ("tombolo_worker_sleeps_total", "Times the worker slept.", |w| w.sleeps.to_string()),
        ("tombolo_worker_slept_seconds_total", "Seconds slept.", |w| seconds(w.slept_ns)),
        ("tombolo_worker_lifetime_seconds_total", "Seconds since its start.", |w| seconds(w.lifetime_ns)),
    ];
    for (name, help, value) in COUNTERS {
        p.family(name, "counter", help);
        for w in &status.workers {
            p.sample(name, &[("worker", &w.name)], value(w));
        }
    }
}

/// A strict reader of the format, for tests: what is not exactly as it must be is said.
#[cfg(test)]
pub(crate) mod check {
    use std::collections::{BTreeMap, BTreeSet};

    fn name(text: &str) -> bool {
        let first = text.bytes().next().is_some_and(|b| b.is_ascii_alphabetic() || b == b'_');
        first && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
    }

    type Labels = Vec<(String, String)>;

    /// Reads `{a="b",…}` at the start of `text`; gives the labels and what is behind them.
    fn labels(text: &str) -> Result<(Labels, &str), String> {
        let Some(mut rest) = text.strip_prefix('{') else { return Ok((vec![], text)) };
        let mut out = Labels::new();
        loop {
            let (label, after) = rest.split_once("=\"").ok_or("a label without =\"")?;
            if !name(label) || out.iter().any(|(l, _)| l == label) {
                return Err(format!("label {label:?} is not a name, or is repeated"));
            }
            let mut value = String::new();
            let mut chars = after.char_indices();
            let end = loop {
                match chars.next().ok_or("an open label value")? {
                    (i, '"') => break i,
                    (_, '\\') => match chars.next() {
                        Some((_, c @ ('\\' | '"'))) => value.push(c),
                        Some((_, 'n')) => value.push('\n'),
                        other => return Err(format!("escape {other:?}")),
                    },
                    (_, c) => value.push(c),
                }
            };
            out.push((label.into(), value));
            rest = &after[end + 1..];
            if let Some(more) = rest.strip_prefix(',') {
                rest = more;
            } else {
                return Ok((out, rest.strip_prefix('}').ok_or("labels without }")?));
            }
        }
    }

    /// Every sample as (family, labels, value).
    pub(crate) type Samples = Vec<(String, BTreeMap<String, String>, f64)>;

    pub(crate) fn read(text: &str) -> Result<Samples, String> {
        let mut out = Samples::new();
        let mut families = BTreeSet::new();
        let mut open: Option<(String, String)> = None;
        let mut helped: Option<String> = None;
        let mut seen = BTreeSet::new();
        if !text.ends_with('\n') {
            return Err("the last line has no end".into());
        }
        for line in text.lines() {
            let fail = |why: &str| Err(format!("{why}: {line}"));
            if let Some(rest) = line.strip_prefix("# HELP ") {
                let Some((family, help)) = rest.split_once(' ') else { return fail("no help") };
                if help.trim().is_empty() || !families.insert(family.to_string()) {
                    return fail("empty help, or a family twice");
                }
                helped = Some(family.into());
            } else if let Some(rest) = line.strip_prefix("# TYPE ") {
                let Some((family, kind)) = rest.split_once(' ') else { return fail("no type") };
                if helped.take().as_deref() != Some(family) || !["counter", "gauge"].contains(&kind) {
                    return fail("type without help, or unknown");
                }
                if (kind == "counter") != family.ends_with("_total") {
                    return fail("counters end in _total, gauges do not");
                }
                open = Some((family.into(), kind.into()));
            } else {
                let at = line.find(['{', ' ']).unwrap_or(line.len());
                let family = &line[..at];
                if !name(family) || open.as_ref().is_none_or(|(f, _)| f != family) {
                    return fail("a sample outside its family");
                }
                let (labels, rest) = labels(&line[at..]).map_err(|e| format!("{e}: {line}"))?;
                let Some(value) = rest.strip_prefix(' ').and_then(|v| v.parse::<f64>().ok()) else {
                    return fail("no value");
                };
                let labels: BTreeMap<_, _> = labels.into_iter().collect();
                if !seen.insert(format!("{family} {labels:?}")) {
                    return fail("the same sample twice");
                }
                if !value.is_finite() || value < 0.0 {
                    return fail("not a count");
                }
                out.push((family.into(), labels, value));
            }
        }
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::samples;

    /// Numbers that are settings or identities and not metrics.
    const NO_METRIC: &[&str] = &[
        "schema",
        "pid",
        "mtu",
        "budget",
        "busy_poll_us",
        "cpu",
        "expires_s",
        "given_s",
        "version",
        "protocol",
        "vectors",
        "max_peers",
        "id",
    ];

    fn numbers(key: &str, value: &serde_json::Value, out: &mut Vec<(String, f64)>) {
        match value {
            serde_json::Value::Number(n) if !NO_METRIC.contains(&key) => out.push((key.into(), n.as_f64().unwrap())),
            serde_json::Value::Array(items) => items.iter().for_each(|v| numbers(key, v, out)),
            serde_json::Value::Object(map) => map.iter().for_each(|(k, v)| numbers(k, v, out)),
            _ => {}
        }
    }

    #[test]
    fn every_number_of_the_report_is_on_the_page() {
        let status = samples::status();
        let page = check::read(&render(&status)).unwrap();
        let mut expected = Vec::new();
        numbers("", &serde_json::to_value(&status).unwrap(), &mut expected);
        assert!(expected.len() > 25);
        for (key, value) in expected {
            let value = if key.ends_with("_ns") { value / 1e9 } else { value };
            assert!(page.iter().any(|(_, _, v)| (v - value).abs() < 1e-6), "{key} = {value} is in no metric");
        }
    }

    #[test]
    fn drops_carry_their_reason_and_units_are_in_the_names() {
        let status = samples::status();
        let page = check::read(&render(&status)).unwrap();
        let drop = page.iter().find(|(_, l, _)| l.get("reason").is_some_and(|r| r == "guard-source")).unwrap();
        assert_eq!(drop.0, "tombolo_port_dropped_frames_total");
        assert_eq!((drop.1["port"].as_str(), drop.1["direction"].as_str()), ("web", "rx"));
        assert_eq!(drop.2, status.ports[0].counters.rx_drops["guard-source"] as f64);
        let slept = page.iter().find(|(f, _, _)| f == "tombolo_worker_slept_seconds_total").unwrap();
        assert_eq!(slept.2, 2.5);
        let four = page.iter().find(|(_, l, _)| l.get("least").is_some_and(|v| v == "2")).unwrap();
        assert_eq!(four.2, status.ports[0].counters.frames_per_turn[2] as f64);
    }

    #[test]
    fn a_bypass_of_no_fabric_has_the_very_lines_of_a_fabrics_page() {
        let status = samples::status();
        let network = &status.networks[0];
        let alone = render_bypass(&network.name, network.bypass.as_ref().unwrap());
        assert!(check::read(&alone).unwrap().len() >= 6);
        assert!(render(&status).contains(&alone), "{alone}");
    }

    #[test]
    fn names_that_would_break_the_format_are_escaped() {
        let mut status = samples::status();
        status.name = "a\\b\"c\nd".into();
        let page = check::read(&render(&status)).unwrap();
        assert_eq!(page[0].1["fabric"], "a\\b\"c\nd");
    }

    #[test]
    fn the_checker_refuses_what_is_wrong() {
        let good = "# HELP a_total x\n# TYPE a_total counter\na_total{b=\"c\"} 1\n";
        assert_eq!(check::read(good).unwrap().len(), 1);
        for (from, to) in [
            ("a_total{", "b_total{"),
            ("counter", "gauge"),
            ("counter", "thing"),
            ("} 1", "} x"),
            ("} 1", "} -1"),
            ("} 1", "}1"),
            ("\"c\"", "\"c"),
            ("\"c\"", "\"\\c\""),
            ("b=", "1b="),
            ("# HELP a_total x\n", ""),
            (" x\n", " \n"),
            ("1\n", "1\na_total{b=\"c\"} 2\n"),
        ] {
            assert!(good.contains(from));
            let bad = good.replacen(from, to, 1);
            assert!(check::read(&bad).is_err(), "{bad}");
        }
    }
}
