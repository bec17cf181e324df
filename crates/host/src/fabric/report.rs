//! What a running fabric says of itself: the API's documents, filled from the workers' counters.

use std::collections::BTreeMap;

use tombolo_switch::control::{PortStatus, WorkerStatus};
use tombolo_switch::counters::Counter;
use tombolo_switch::drop::Reason;
use tombolo_switch::port::Link;

use super::{FabricError, Running};
use crate::api::model::{self, SCHEMA};
use crate::file::Mac;
use crate::plan::Attachment;

/// The program's version.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

fn drops(counters: &[Counter; Reason::COUNT]) -> BTreeMap<String, u64> {
    let named = Reason::ALL.iter().map(|r| (r.name().to_string(), counters[*r as usize].get()));
    named.filter(|(_, n)| *n != 0).collect()
}

impl Running {
    /// Everything at one instant.
    ///
    /// # Errors
    /// If a worker has ended.
    pub fn status(&mut self) -> Result<model::Status, FabricError> {
        let statuses: Vec<WorkerStatus> =
            self.workers.iter().map(|w| w.handle.status()).collect::<Result<_, _>>()?;
        let mut networks = Vec::new();
        let mut ports = Vec::new();
        for (worker, status) in self.workers.iter().zip(&statuses) {
            for n in &status.networks {
                let Some(spec) = self.spec.network(&n.name) else { continue };
                let leases = self.networks.get(&spec.name).map(|net| net.gateway.leases()).unwrap_or_default();
                let leases = leases.leases.iter().map(|l| model::Lease {
                    mac: Mac(l.mac).to_string(),
                    ip: l.address.to_string(),
                    name: l.name.clone(),
                    expires_unix_s: l.expires_unix_secs,
                });
                networks.push(model::Network {
                    name: spec.name.clone(),
                    subnet: spec.subnet.to_string(),
                    gateway: spec.gateway.to_string(),
                    router: spec.router.map(|r| r.to_string()),
                    uplink: spec.uplink.word().into(),
                    domain: spec.domain.clone(),
                    mtu: spec.mtu,
                    worker: worker.spec.name.clone(),
                    macs: n.macs,
                    copies: n.copies,
                    flooded_unknown: n.flooded_unknown,
                    flooded_group: n.flooded_group,
                    leases: leases.collect(),
                });
            }
            ports.extend(status.ports.iter().map(|p| self.port(status, p)));
        }
        ports.sort_by(|a: &model::Port, b| (&a.network, &a.name).cmp(&(&b.network, &b.name)));
        let workers = self.workers.iter().zip(&statuses).map(|(w, s)| model::Worker {
            name: w.spec.name.clone(),
            cpu: w.spec.cpu,
            budget: s.settings.budget,
            busy_poll_us: s.settings.busy_poll.0 / 1000,
            rounds: s.counters.rounds.get(),
            sleeps: s.counters.sleeps.get(),
            polls: s.counters.polls.get(),
            slept_ns: s.counters.slept_ns.get(),
        });
        let workers = workers.collect();
        let forwards = self.spec.forwards.iter().map(|f| model::Forward {
            proto: f.proto.word().into(),
            listen: f.listen.to_string(),
            to: format!("{}:{}", f.ip, f.port),
            network: f.network.clone(),
        });
        let forwards = forwards.collect();
        Ok(model::Status {
            schema: SCHEMA,
            fabric: self.spec.name.clone(),
            version: VERSION.into(),
            pid: std::process::id(),
            file: self.file.display().to_string(),
            runtime: self.dir().path().display().to_string(),
            uptime_s: self.started.elapsed().as_secs_f64(),
            workers,
            networks,
            ports,
            machines: self.machines(),
            forwards,
        })
    }

    /// The machines.
    pub fn machines(&self) -> Vec<model::Machine> {
        let one = |m: &crate::file::Machine| {
            let running = self.machines.get(&m.name)?;
            let state = match (running.pid, running.stopped, &running.ended) {
                (Some(_), ..) => "running",
                (None, true, _) => "stopped",
                (None, false, Some(end)) if end.well => "ended",
                (None, false, _) => "failed",
            };
            Some(model::Machine {
                name: m.name.clone(),
                kind: m.kind.word().into(),
                state: state.into(),
                pid: running.pid,
                accel: if running.plan.kvm { "kvm" } else { "tcg" }.into(),
                adopted: running.adopted,
                restarts: running.restarts,
                exit: running.ended.as_ref().map(|e| model::Exit { how: e.how.clone(), last_lines: e.last_lines.clone() }),
                nics: m
                    .nics
                    .iter()
                    .map(|n| model::Nic {
                        network: n.network.clone(),
                        mac: n.mac.to_string(),
                        ip: n.ip.map(|ip| ip.to_string()),
                    })
                    .collect(),
                console: running.console.display().to_string(),
            })
        };
        self.spec.machines.iter().filter_map(one).collect()
    }

    fn port(&self, worker: &WorkerStatus, p: &PortStatus) -> model::Port {
        let known = self.ports.get(&*p.name);
        let network = worker.networks.iter().find(|n| n.id == p.network);
        let c = &p.counters;
        let socket = known.and_then(|k| match &k.plan.attachment {
            Attachment::VhostUser { socket, .. } | Attachment::Stream { socket, .. } => Some(socket.display().to_string()),
            _ => None,
        });
        model::Port {
            name: p.name.to_string(),
            network: network.map(|n| n.name.to_string()).unwrap_or_default(),
            kind: p.kind.into(),
            link: if p.link == Link::Up { "up" } else { "down" }.into(),
            machine: known.and_then(|k| k.plan.machine.clone()),
            socket,
            guard: p.guard.sources().iter().map(|a| Mac(a.mac()).to_string()).collect(),
            macs: p.macs,
            rx_frames: c.rx_frames.get(),
            rx_bytes: c.rx_bytes.get(),
            tx_frames: c.tx_frames.get(),
            tx_bytes: c.tx_bytes.get(),
            rx_drops: drops(&c.rx_drops),
            tx_drops: drops(&c.tx_drops),
            wakeups: c.wakeups.get(),
            turns: c.turns.get(),
            exhausted_budgets: c.exhausted_budgets.get(),
            frames_per_turn: c.frames_per_turn.iter().map(Counter::get).collect(),
            faults: c.faults.get(),
            last_fault: p.last_fault.as_ref().map(|f| model::Fault {
                kind: f.fault.kind.name().into(),
                detail: f.fault.detail.clone(),
                age_s: worker.now.since(f.at).0 as f64 / 1e9,
            }),
            panic: p.panic.clone(),
            software_checksums: c.software_checksums.get(),
            software_segments: c.software_segments.get(),
            captured: c.captured.get(),
            capture_lost: c.capture_lost.get(),
            details: p.details.iter().map(|(k, v)| (k.to_string(), v.clone())).collect(),
        }
    }
}

/// The status as Prometheus text (exposition format 0.0.4).
pub fn metrics(status: &model::Status) -> String {
    let mut out = Metrics::default();
    let fabric = ("fabric", status.fabric.as_str());
    out.family("tombolo_info", "gauge", "The program that runs the fabric.");
    out.sample("tombolo_info", &[fabric, ("version", &status.version)], 1.0);
    out.family("tombolo_uptime_seconds", "gauge", "Time since the daemon started.");
    out.sample("tombolo_uptime_seconds", &[fabric], status.uptime_s);
    type Get = fn(&model::Port) -> f64;
    let per_port: [(&str, &str, &str, Get); 15] = [
        ("link_up", "gauge", "Whether frames flow.", |p| f64::from(u8::from(p.link == "up"))),
        ("macs", "gauge", "MAC addresses learned behind the port.", |p| p.macs.into()),
        ("rx_frames_total", "counter", "Frames from the peer.", |p| p.rx_frames as f64),
        ("rx_bytes_total", "counter", "Bytes from the peer.", |p| p.rx_bytes as f64),
        ("tx_frames_total", "counter", "Frames to the peer.", |p| p.tx_frames as f64),
        ("tx_bytes_total", "counter", "Bytes to the peer.", |p| p.tx_bytes as f64),
        ("wakeups_total", "counter", "Times that the port was found ready after it had slept.", |p| p.wakeups as f64),
        ("turns_total", "counter", "Turns in which the port was asked for frames.", |p| p.turns as f64),
        ("exhausted_budgets_total", "counter", "Turns that used the whole budget.", |p| p.exhausted_budgets as f64),
        ("faults_total", "counter", "Times that the peer broke its protocol.", |p| p.faults as f64),
        ("software_checksums_total", "counter", "Checksums completed in software.", |p| p.software_checksums as f64),
        ("software_segments_total", "counter", "Segments cut in software.", |p| p.software_segments as f64),
        ("captured_frames_total", "counter", "Frames copied to captures.", |p| p.captured as f64),
        ("capture_lost_frames_total", "counter", "Frames that captures lost.", |p| p.capture_lost as f64),
        ("out_of_service", "gauge", "Whether a bug of ours took the port out of service.", |p| {
            f64::from(u8::from(p.panic.is_some()))
        }),
    ];
    for (name, kind, help, get) in per_port {
        let name = format!("tombolo_port_{name}");
        out.family(&name, kind, help);
        for p in &status.ports {
            out.sample(&name, &[fabric, ("network", &p.network), ("port", &p.name), ("kind", &p.kind)], get(p));
        }
    }
    out.family("tombolo_port_drops_total", "counter", "Frames dropped, by direction and reason.");
    for p in &status.ports {
        for (direction, drops) in [("rx", &p.rx_drops), ("tx", &p.tx_drops)] {
            for (reason, n) in drops {
                let labels =
                    [fabric, ("network", &p.network), ("port", &p.name), ("direction", direction), ("reason", reason)];
                out.sample("tombolo_port_drops_total", &labels, *n as f64);
            }
        }
    }
    out.family("tombolo_port_frames_per_turn", "histogram", "Frames that a turn gave.");
    for p in &status.ports {
        let labels = [fabric, ("network", p.network.as_str()), ("port", p.name.as_str())];
        let mut sum = 0;
        for (i, n) in p.frames_per_turn.iter().enumerate() {
            sum += n;
            let last = i + 1 == p.frames_per_turn.len();
            let bound = if last { "+Inf".to_string() } else { ((1_u64 << i) - 1).to_string() };
            out.sample("tombolo_port_frames_per_turn_bucket", &[&labels[..], &[("le", &bound)]].concat(), sum as f64);
        }
        out.sample("tombolo_port_frames_per_turn_sum", &labels, p.rx_frames as f64);
        out.sample("tombolo_port_frames_per_turn_count", &labels, sum as f64);
    }
    for w in &status.workers {
        let labels = [fabric, ("worker", w.name.as_str())];
        for (name, help, value) in [
            ("rounds_total", "Rounds in which a port had a turn.", w.rounds as f64),
            ("sleeps_total", "Times that the worker slept.", w.sleeps as f64),
            ("polls_total", "Times that it asked for wake-ups without sleeping.", w.polls as f64),
            ("slept_seconds_total", "Time slept.", w.slept_ns as f64 / 1e9),
        ] {
            let name = format!("tombolo_worker_{name}");
            out.family(&name, "counter", help);
            out.sample(&name, &labels, value);
        }
    }
    out.family("tombolo_network_macs", "gauge", "MAC addresses known.");
    for n in &status.networks {
        out.sample("tombolo_network_macs", &[fabric, ("network", &n.name)], n.macs as f64);
    }
    out.family("tombolo_network_leases", "gauge", "Leases held.");
    for n in &status.networks {
        out.sample("tombolo_network_leases", &[fabric, ("network", &n.name)], n.leases.len() as f64);
    }
    out.family("tombolo_machine_running", "gauge", "Whether the cell or VM runs.");
    for m in &status.machines {
        let running = f64::from(u8::from(m.state == "running"));
        out.sample("tombolo_machine_running", &[fabric, ("machine", &m.name), ("kind", &m.kind)], running);
    }
    out.family("tombolo_machine_restarts_total", "counter", "Times that it was started again after a failure.");
    for m in &status.machines {
        out.sample("tombolo_machine_restarts_total", &[fabric, ("machine", &m.name)], m.restarts.into());
    }
    out.text
}

#[derive(Default)]
struct Metrics {
    text: String,
    families: std::collections::HashSet<String>,
}

impl Metrics {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        if self.families.insert(name.to_string()) {
            self.text.push_str(&format!("# HELP {name} {help}\n# TYPE {name} {kind}\n"));
        }
    }

    fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: f64) {
        let escape = |v: &str| v.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
        let labels: Vec<String> = labels.iter().map(|(k, v)| format!("{k}=\"{}\"", escape(v))).collect();
        self.text.push_str(&format!("{name}{{{}}} {value}\n", labels.join(",")));
    }
}
