//! What a running fabric says of itself: the API's reports, filled from the workers' counters.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};
use tombolo_switch::class::Marking;
use tombolo_switch::control::{PortStatus, WorkerStatus};
use tombolo_switch::counters::Counter;
use tombolo_switch::detail::Detail;
use tombolo_switch::drop::Reason;
use tombolo_switch::gateway::Ipv6Config;
use tombolo_switch::guard::{Guard, link_local};
use tombolo_switch::limit::{Limit, Rate, Storm};
use tombolo_switch::port::{Caps, Carrier, FaultKind};

use super::{FabricError, Running};
use crate::api::report::{
    CounterReport, DescriptorReport, ForwardReport, LeaseReport, LinkReport, MachineReport, NetworkReport, PortReport,
    RangeReport, RingReport, SCHEMA, Status, WorkerReport,
};
use crate::file::{self, Mac, Uplink, class_word};
use crate::kernel;
use crate::plan::{self, Attachment};

fn drops(counters: &[Counter; Reason::COUNT]) -> BTreeMap<String, u64> {
    let named = Reason::ALL.iter().map(|r| (r.name().to_string(), counters[*r as usize].get()));
    named.filter(|(_, n)| *n != 0).collect()
}

fn offloads(caps: &Caps) -> Vec<String> {
    let all =
        [("checksum", caps.checksum), ("tso4", caps.tso4), ("tso6", caps.tso6), ("ecn", caps.ecn), ("uso", caps.uso)];
    all.into_iter().filter(|(_, has)| *has).map(|(name, _)| name.to_string()).collect()
}

/// The addresses that a guard lets pass.
fn guarded(guard: &Guard) -> Vec<String> {
    let mut out: Vec<_> = guard.sources().iter().map(|a| Mac(a.bytes()).to_string()).collect();
    out.extend(guard.ipv4().map(|ip| ip.to_string()));
    if let Some(learn) = guard.learns() {
        out.push(format!("{} of {}/64 and fe80::/64", learn.limit, learn.prefix));
    }
    if let Some(ipv6) = guard.ipv6() {
        out.push("fe80::/64 by MAC".into());
        out.extend(ipv6.map(|(ip, bits)| if bits == 128 { ip.to_string() } else { format!("{ip}/{bits}") }));
    }
    out
}

/// A fact of a port's kind as JSON.
fn detail(value: &Detail) -> Value {
    match value {
        Detail::Number(number) => (*number).into(),
        Detail::Flag(flag) => (*flag).into(),
        Detail::Text(text) => text.as_str().into(),
        Detail::Numbers(numbers) => numbers.as_slice().into(),
        Detail::Texts(texts) => texts.as_slice().into(),
    }
}

/// A limit of [`tombolo_switch::limit::Rate`] as JSON; `None` for one that is off.
fn rate_detail(rate: Rate) -> Option<Value> {
    let keys = [("bits", rate.bits), ("burst_bits", rate.burst), ("frames", rate.frames)];
    let keys: Map<String, Value> = keys.into_iter().filter_map(|(key, n)| Some((key.into(), n?.into()))).collect();
    (!keys.is_empty()).then_some(keys.into())
}

/// What a port may do beyond the default, and what limits it, by the keys of the file.
fn conduct(p: &PortStatus) -> impl Iterator<Item = (&'static str, Value)> {
    let roles = p.guard.roles();
    let words = [
        (roles.router, "router-advertisements"),
        (roles.dhcp_server, "dhcp-server"),
        (roles.gateway, "gateway-addresses"),
    ];
    let allow: Vec<_> = words.into_iter().filter(|(has, _)| *has).map(|(_, word)| word).collect();
    let each = |limit: Option<Limit>| limit.map(|limit| limit.per_second);
    let Storm { broadcast, multicast, unknown, .. } = p.storm;
    let storm = json!({"broadcast": each(broadcast), "multicast": each(multicast), "unknown": each(unknown)});
    let rates: Map<String, Value> =
        p.rates.named().filter_map(|(name, rate)| Some((name, rate_detail(rate)?))).collect();
    let told = [
        ("allow", (!allow.is_empty()).then(|| allow.into())),
        ("storm", (p.storm != Storm::default()).then_some(storm)),
        ("rate", (!rates.is_empty()).then(|| rates.into())),
        ("class", (p.marking != Marking::default()).then(|| class_word(p.marking).into())),
    ];
    told.into_iter().filter_map(|(key, text)| Some((key, text?)))
}

/// What is to be said of a port whose last fault was this.
fn port_warning(p: &PortStatus, fault: &str) -> Option<String> {
    if p.panic.is_some() {
        let way = if p.lasting { "it restarts in a moment" } else { "`tombolo down` and `tombolo up` bring it back" };
        return Some(format!("port {}: {fault}; {way}", p.name));
    }
    let restarts = p.counters.restarts.get();
    if restarts > 0 {
        return Some(format!("port {}: restarted {restarts} time(s) after a panic in its code, last: {fault}", p.name));
    }
    let faults = p.counters.faults.get();
    (faults > 0).then(|| format!("port {} {}, last: {fault}", p.name, reset_words(p, faults)))
}

/// That a port had so many faults, and whether the last one was its peer's.
pub(super) fn reset_words(p: &PortStatus, times: u64) -> String {
    let is_peers = p.last_fault.as_ref().is_some_and(|record| record.fault.kind != FaultKind::System);
    match (is_peers, times) {
        (true, 1) => "was reset: its peer broke the rules".into(),
        (true, _) => format!("was reset {times} times, the last time because its peer broke the rules"),
        (false, 1) => "had a fault".into(),
        (false, _) => format!("had {times} faults"),
    }
}

/// What is to be said of a link.
fn link_warning(link: &LinkReport) -> Option<String> {
    let cut = link.cut_slow + link.cut_talking;
    (cut > 0).then(|| {
        let (slow, talking) = (link.cut_slow, link.cut_talking);
        format!(
            "link {}: {cut} client(s) cut off ({slow} read nothing from the server, {talking} sent to it); `tombolo \
             cell stop` and `tombolo cell run` reconnect a machine",
            link.name
        )
    })
}

/// A port's last fault in words.
pub(super) fn last_fault(worker: &WorkerStatus, p: &PortStatus) -> Option<String> {
    let fault = p.last_fault.as_ref().map(|f| {
        let ago = worker.now.since(f.at).0 / 1_000_000_000;
        format!("{}: {} ({ago} s ago)", f.fault.kind.name(), f.fault.detail)
    });
    p.panic.as_ref().map(|text| format!("out of service after a panic in its code: {text}")).or(fault)
}

fn network_warnings(network: &NetworkReport) -> impl Iterator<Item = String> {
    let bypass = network.bypass.as_ref().and_then(|bypass| bypass.fault.as_ref());
    let warnings = network.bypass.iter().flat_map(|bypass| &bypass.warnings);
    [("uplink", network.uplink_fault.as_ref()), ("bypass", bypass)]
        .into_iter()
        .filter_map(|(what, fault)| Some(format!("the {what} of {} does not work: {}", network.name, fault?)))
        .chain(warnings.map(|warning| format!("the bypass of {}: {warning}", network.name)))
}

impl Running {
    /// Whether every worker runs; waits for the answer of each.
    pub(crate) fn workers_answer(&self) -> bool {
        self.workers.iter().all(|worker| worker.thread.handle().status().is_ok())
    }

    /// Everything at one instant.
    ///
    /// # Errors
    /// If a worker has ended.
    pub fn status(&self) -> Result<Status, FabricError> {
        let statuses: Vec<WorkerStatus> =
            self.workers.iter().map(|w| w.thread.handle().status()).collect::<Result<_, _>>()?;
        let mut networks = Vec::new();
        for spec in &self.spec.networks {
            networks.extend(self.network(spec, &statuses));
        }
        let mut ports: Vec<_> =
            statuses.iter().flat_map(|s| s.ports.iter().map(move |p| (self.port(s, p), p))).collect();
        ports.sort_by(|(a, _), (b, _)| (&a.network, &a.name).cmp(&(&b.network, &b.name)));
        let mut warnings = self.notes.clone();
        warnings.extend(self.dir.as_ref().and_then(|dir| dir.unwritten()).map(|why| {
            format!("the owner record is not up to date, so that after a crash machines may be started again: {why}")
        }));
        warnings.extend(self.deleted.faults.iter().cloned());
        warnings.extend(self.machine_warnings());
        warnings.extend(self.bridge_warnings());
        warnings.extend(self.span_warnings());
        warnings.extend(networks.iter().flat_map(network_warnings));
        warnings.extend(ports.iter().filter_map(|(report, p)| port_warning(p, report.last_fault.as_deref()?)));
        let deleted = self.deleted_taps(statuses.iter()).into_iter();
        warnings.extend(deleted.map(|name| format!("port {name}: `tombolo apply` makes its deleted tap again")));
        let ports: Vec<PortReport> = ports.into_iter().map(|(report, _)| report).collect();
        let hint = |port: &PortReport| Some(format!("port {}: {}", port.name, port.details.get("hint")?.as_str()?));
        warnings.extend(ports.iter().filter_map(hint));
        let links = self.link_reports(&ports);
        warnings.extend(links.iter().filter_map(link_warning));
        let workers = self.workers.iter().zip(&statuses).map(|(w, s)| WorkerReport {
            name: w.spec.name.clone(),
            cpu: w.spec.cpu.and_then(|c| u32::try_from(c).ok()),
            budget: s.settings.budget as u32,
            busy_poll_us: s.settings.busy_poll.0 / 1000,
            sleeps: s.counters.sleeps.get(),
            slept_ns: s.counters.slept_ns.get(),
            lifetime_ns: w.started.elapsed().as_nanos() as u64,
        });
        let forwards = self.spec.forwards.iter().map(|f| {
            let uplink = self.ports.get(&plan::uplink_name(&f.network));
            let used = self.relay_use(f);
            ForwardReport {
                proto: f.proto.word().into(),
                listen: f.listen,
                to: f.target.with_port(f.port),
                address: f.ip,
                fault: uplink
                    .and_then(|uplink| uplink.fault_of(f.listen))
                    .or_else(|| self.resting_fault(f))
                    .or_else(|| self.relay_fault(f)),
                open: used.map(|used| used.open),
                refused: used.map(|used| used.refused),
            }
        });
        let (forwards, workers) = (forwards.collect(), workers.collect());
        Ok(Status {
            schema: SCHEMA,
            version: env!("CARGO_PKG_VERSION").into(),
            name: self.spec.name.clone(),
            file: self.file.display().to_string(),
            pid: std::process::id(),
            uptime_s: self.started.elapsed().as_secs_f64(),
            networks,
            machines: self.machine_reports(),
            ports,
            forwards,
            links,
            workers,
            descriptors: descriptors(),
            span: self.span_summary(),
            warnings,
            takeover: self.before.told.clone(),
        })
    }

    fn machine_warnings(&self) -> Vec<String> {
        let mut out = Vec::new();
        for (name, machine) in &self.machines {
            if let (None, false, Some(end)) = (machine.pid, machine.stopped, &machine.ended)
                && !end.well
            {
                out.push(format!("{name} failed: {}", end.how));
            }
        }
        out
    }

    fn network(&self, spec: &file::Network, statuses: &[WorkerStatus]) -> Option<NetworkReport> {
        let net = self.networks.get(&spec.name)?;
        let n = statuses.iter().flat_map(|s| &s.networks).find(|n| *n.name == spec.name)?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
        let fixed: Vec<_> = self.spec.addresses().into_iter().filter(|(network, ..)| *network == spec.name).collect();
        let stored = net.gateway.as_ref().map(|g| g.leases()).unwrap_or_default();
        // By address: with thousands of each, a search per lease would keep the control plane busy
        // for seconds.
        let by_address: BTreeMap<_, _> = stored.leases.iter().map(|lease| (lease.address, lease)).collect();
        let fixed6 = self.spec.addresses6(&spec.name);
        let fixed6 = fixed6.iter().flat_map(|(name, mac, all)| all.iter().map(move |ip| (*mac, *ip, &name[..])));
        let fixed6 =
            fixed6.map(|(mac, ip, name)| (mac, IpAddr::from(ip), name)).filter(|(_, ip, _)| spec.has_host(*ip));
        let fixed = fixed.iter().map(|(_, mac, ip, name)| (*mac, IpAddr::from(*ip), *name)).chain(fixed6);
        let mut fixed_addresses = BTreeSet::new();
        let mut leases: Vec<LeaseReport> = Vec::new();
        for (mac, ip, name) in fixed {
            fixed_addresses.insert(ip);
            leases.push(LeaseReport {
                mac: mac.map(|m| m.to_string()).unwrap_or_default(),
                ip,
                name: Some(name.to_string()),
                fixed: true,
                expires_s: by_address.get(&ip).map(|l| l.expires_unix_secs.saturating_sub(now)),
                given_s: net.given.age_s(ip),
            });
        }
        for lease in stored.leases.iter().filter(|l| !fixed_addresses.contains(&l.address)) {
            leases.push(LeaseReport {
                mac: Mac(lease.mac).to_string(),
                ip: lease.address,
                name: lease.name.clone(),
                fixed: false,
                expires_s: Some(lease.expires_unix_secs.saturating_sub(now)),
                given_s: net.given.age_s(lease.address),
            });
        }
        leases.sort_by_key(|l| l.ip);
        let uplink = match &spec.uplink {
            Uplink::Bridge { device } => format!("bridge {device}"),
            other => other.word().into(),
        };
        Some(NetworkReport {
            name: spec.name.clone(),
            subnet: spec.subnet.to_string(),
            gateway: spec.gateway,
            router: spec.router,
            own_range: {
                let own = self.spec.elsewhere.own.iter().find(|(network, ..)| *network == spec.name);
                own.map(|(_, from, to)| RangeReport { from: *from, to: *to })
            },
            prefix6: spec.ipv6.map(|prefix| format!("{prefix}/64")),
            gateway6: spec.ipv6.map(|prefix| Ipv6Config::new(prefix).address()),
            router6: spec.router6().filter(|_| kernel::has_ipv6()).or_else(|| {
                let leads_out = self.ports.get(&plan::uplink_name(&spec.name)).is_some_and(|port| port.leads_out6());
                leads_out.then(|| link_local(&file::Mac::derived(&[&self.spec.name, &spec.name, "router"]).0))
            }),
            uplink,
            uplink_fault: self.ports.get(&plan::uplink_name(&spec.name)).and_then(super::ports::RunningPort::fault),
            domain: spec.domain.clone(),
            mtu: spec.mtu.into(),
            worker: spec.worker.clone(),
            macs: n.macs as u64,
            flooded_unknown: n.flooded_unknown,
            leases,
            counters: {
                let uplink = self.ports.get(&plan::uplink_name(&spec.name));
                let passt = uplink.map(super::ports::RunningPort::passt_counters).unwrap_or_default();
                let told = !n.policy.is_empty();
                let rules = n.policy_counts.rules.iter().enumerate().map(|(i, n)| (format!("rule_{i}"), *n));
                let policy = rules.chain([
                    ("rule_none".into(), n.policy_counts.otherwise),
                    ("rule_connections".into(), n.policy_counts.connections as u64),
                ]);
                net.counters().into_iter().chain(passt).chain(policy.filter(|_| told)).collect()
            },
            bypass: self.bypass_report(spec),
        })
    }

    /// One row per machine of the file, running or not.
    pub fn machine_reports(&self) -> Vec<MachineReport> {
        let one = |m: &file::Machine| {
            let running = self.machines.get(&m.name)?;
            let state = match (running.pid, running.stopped, &running.ended) {
                (None, ..) if running.waits => "starting",
                (Some(_), ..) => "running",
                (None, true, _) => "stopped",
                (None, false, Some(end)) if end.well => "stopped",
                (None, false, _) => "failed",
            };
            let last_end = running.ended.as_ref().filter(|_| !running.stopped).map(|end| {
                let lines: String = end.last_lines.iter().map(|l| format!("\n    | {l}")).collect();
                format!("{}{lines}", end.how)
            });
            Some(MachineReport {
                name: m.name.clone(),
                kind: m.kind.word().into(),
                state: state.into(),
                pid: running.pid,
                accel: running.plan.accel().into(),
                machine: if running.plan.domain.is_some() { "pvh" } else { m.machine.word() }.into(),
                addresses: m.nics.iter().filter_map(|n| Some((n.network.clone(), n.ip?))).collect(),
                uptime_s: running.pid.map(|_| running.since.elapsed().as_secs_f64()),
                last_end,
                restarts: running.restarts,
                restart_in_s: running
                    .pid
                    .is_none()
                    .then_some(running.again_at)
                    .flatten()
                    .filter(|_| !running.stopped)
                    .map(|at| at.saturating_duration_since(Instant::now()).as_secs_f64()),
                adopted: running.adopted,
                domain: self.domain_report(&running.plan, running.pid.is_some(), running.is_gone),
            })
        };
        self.spec.machines.iter().filter_map(one).collect()
    }

    fn port(&self, worker: &WorkerStatus, p: &PortStatus) -> PortReport {
        let known = self.ports.get(&*p.name);
        let network = worker.networks.iter().find(|n| n.id == p.network);
        let c = &p.counters;
        let mut details: BTreeMap<String, Value> = p.details.iter().map(|(k, v)| (k.to_string(), detail(v))).collect();
        if let Some(Attachment::VhostUser { socket, .. } | Attachment::Stream { socket, .. }) =
            known.map(|k| &k.plan.attachment)
        {
            details.insert("socket".into(), socket.display().to_string().into());
        }
        if let Some(Attachment::Ivshmem { link }) = known.map(|k| &k.plan.attachment)
            && let Some(door) = link.doors.first()
        {
            details.insert("socket".into(), door.path.display().to_string().into());
        }
        details.extend(conduct(p).map(|(key, value)| (key.to_string(), value)));
        if let Some(machine) = known.and_then(|k| k.plan.machine.clone()) {
            details.insert("machine".into(), machine.into());
        }
        if let Some(member) = self.spec.contained().find(|member| *member.name == *p.name) {
            details.insert("container".into(), member.container.into());
            details.insert("netns".into(), member.netns.into());
        }
        PortReport {
            name: p.name.to_string(),
            network: network.map(|n| n.name.to_string()).unwrap_or_default(),
            kind: p.kind.into(),
            up: p.link == Carrier::Up,
            offloads: p.caps.as_ref().map(offloads).unwrap_or_default(),
            guard: guarded(&p.guard),
            details,
            rings: p.fill.map(|fill| RingReport {
                frames_out: fill.frames_out,
                frames_out_max: fill.frames_out_max,
                bytes_out: fill.bytes_out,
                bytes_out_max: fill.bytes_out_max,
                frames_waiting: fill.frames_waiting,
                frames_waiting_max: fill.frames_waiting_max,
            }),
            macs: p.macs.into(),
            counters: CounterReport {
                rx_frames: c.rx_frames.get(),
                rx_bytes: c.rx_bytes.get(),
                tx_frames: c.tx_frames.get(),
                tx_bytes: c.tx_bytes.get(),
                rx_drops: drops(&c.rx_drops),
                tx_drops: drops(&c.tx_drops),
                queued_frames: c.queued_frames.get(),
                wakeups: c.wakeups.get(),
                late_wakeups: c.late_wakeups.get(),
                late_signals: c.late_signals.get(),
                turns: c.turns.get(),
                exhausted_budgets: c.exhausted_budgets.get(),
                frames_per_turn: c.frames_per_turn.iter().map(Counter::get).collect(),
                faults: c.faults.get(),
                restarts: c.restarts.get(),
                software_checksums: c.software_checksums.get(),
                software_segments: c.software_segments.get(),
                software_merged: c.software_merged.get(),
                captured: c.captured.get(),
                capture_lost: c.capture_lost.get(),
            },
            last_fault: last_fault(worker, p),
        }
    }
}

fn descriptors() -> DescriptorReport {
    let signals = tombolo_shm::signal::counters();
    DescriptorReport {
        signals_by_io_uring: signals.by_io_uring,
        signals_by_helper: signals.by_helper,
        signals_dropped: signals.dropped,
        held: tombolo_shm::foreign::held() as u64,
    }
}

#[cfg(test)]
mod tests {
    use super::super::injected::{Injected, InjectedPort};
    use super::*;
    use std::time::{Duration, Instant};
    use tombolo_switch::control::PortSettings;
    use tombolo_switch::mac::MacSettings;
    use tombolo_worker::thread::{WorkerConfig, WorkerThread};

    fn bad(shows: Injected) -> Box<InjectedPort> {
        Box::new(InjectedPort { kind: "gateway", link: Carrier::Up, shows, _holds: None })
    }

    #[test]
    fn a_guard_is_told_as_what_it_lets_pass() {
        let guard = tombolo_switch::guard::Guard::new(&[[2, 0, 0, 0, 0, 7]], &[[10, 87, 0, 9].into()]);
        assert_eq!(guarded(&guard), ["02:00:00:00:00:07", "10.87.0.9"]);
        let entries = [("fd00::7".parse().unwrap(), 128), ("2001:db8::".parse().unwrap(), 64)];
        let more = ["fe80::/64 by MAC", "2001:db8::/64", "fd00::7"];
        assert_eq!(guarded(&guard.with_ipv6(&entries))[2..], more);
        assert_eq!(guarded(&Guard::default()), [""; 0]);
    }

    #[test]
    fn a_bug_of_ours_is_told_apart_from_a_peer_that_broke_the_rules() {
        let thread = WorkerThread::start(&WorkerConfig { name: "warn".into(), ..WorkerConfig::default() }).unwrap();
        let handle = thread.handle();
        let network = handle.add_network("lan", MacSettings::default()).unwrap();
        let mut tokens = Vec::new();
        for (name, shows) in
            [("gateway-lan", Injected::Bug("table is empty")), ("peer", Injected::Fault("no such word"))]
        {
            let reserved = handle.reserve().unwrap();
            let registration = thread.registration(&reserved);
            tokens.push(reserved.token());
            handle.add_port(reserved, network, name, bad(shows), PortSettings::default()).unwrap();
            registration.wake();
        }
        let reserved = handle.reserve().unwrap();
        // Its replacement has a peer that breaks the rules; the report still says that it was our
        // bug.
        let port = bad(Injected::Bug("table is empty"));
        let again = Box::new(|_| Ok(bad(Injected::Fault("no such word")) as _));
        let counters =
            handle.add_lasting_port(reserved, network, "lasting", port, again, PortSettings::default()).unwrap();
        let deadline = Instant::now() + Duration::from_secs(10);
        let status = loop {
            let status = handle.status().unwrap();
            if status.ports.iter().all(|p| p.counters.faults.get() > 0) && counters.restarts.get() > 0 {
                // This one may have been requested before the port was restarted.
                break handle.status().unwrap();
            }
            assert!(Instant::now() < deadline, "{status:?}");
            std::thread::yield_now();
        };
        let say = |name: &str| {
            let port = status.ports.iter().find(|p| *p.name == *name).unwrap();
            port_warning(port, &last_fault(&status, port).unwrap()).unwrap()
        };
        let bug = "port gateway-lan: out of service after a panic in its code: table is empty; \
                   `tombolo down` and `tombolo up` bring it back";
        assert_eq!(say("gateway-lan"), bug);
        let peer = say("peer");
        assert!(peer.starts_with("port peer was reset") && peer.contains("its peer broke the rules"), "{peer}");
        assert!(peer.contains("last: protocol: no such word ("), "{peer}");
        let lasting = say("lasting");
        assert!(
            lasting.starts_with("port lasting: restarted 1 time(s) after a panic in its code, last: "),
            "{lasting}"
        );
        // What `settle` waits for: a port that is out of service is not up.
        let up = |token| {
            let (tell, told) = std::sync::mpsc::channel();
            handle.when_up(token, move || tell.send(()).unwrap()).map(|()| told.try_recv().is_ok())
        };
        assert_eq!([up(tokens[0]), up(tokens[1])], [Ok(false), Ok(true)]);
        assert!(up(tombolo_switch::wait::Token(99)).is_err());
        thread.stop().unwrap();
    }
}
