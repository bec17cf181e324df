//! `tombolo wait`: until something is as a script needs it.

use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use tombolo_host::api::report::{LeaseReport, MachineReport, PortReport, Status};
use tombolo_rpc::folder;

use crate::exit::{Exit, Failure};
use crate::number;
use crate::out;
use crate::select::Select;
use crate::up::missing;

/// How often is looked.
const LOOK: Duration = Duration::from_millis(100);

const EXAMPLES: &str = "\
Exit codes: 0 it is so; 1 it did not come to that in time, or cannot any more (a machine failed for good); with
--for exit: 0 it ended well or was stopped, 1 it failed. With several names, 0 says that it is so of all.

Examples:
  tombolo wait --timeout 60              every machine is on the network
  tombolo wait --for lease web db        both have their addresses
  tombolo wait --for exit job && echo ok";

#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Wait {
    /// The machines, ports or services; waits for all of them [default: all machines, for `up`]
    #[arg(value_name = "NAME", required_if_eq_any([("what", "lease"), ("what", "port"), ("what", "service"), ("what", "exit")]))]
    names: Vec<String>,
    /// What to wait for
    #[arg(long = "for", value_name = "WHAT", value_enum, default_value = "up", id = "what")]
    what: What,
    /// Give up after this time
    #[arg(long, value_name = "S", value_parser = number::seconds, allow_hyphen_values = true, default_value = "60")]
    timeout: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum What {
    /// The machine runs and all of its ports are up; without NAME, so are all
    Up,
    /// The machine has its address by DHCP
    Lease,
    /// Frames flow through the port
    Port,
    /// The service runs
    Service,
    /// The machine has ended, and is not about to be started again
    Exit,
}

/// How it stands.
#[derive(Debug, PartialEq, Eq)]
enum WaitState {
    Met(Exit),
    /// Not yet; how it is.
    NotYet(String),
    /// Nor will it be.
    Never(String),
}

fn machine<'s>(status: &'s Status, name: &str) -> Result<&'s MachineReport, WaitState> {
    let there = || status.machines.iter().map(|m| m.name.as_str()).collect::<Vec<_>>().join(", ");
    let none = || WaitState::Never(format!("there is no machine \"{name}\"; there are: {}", there()));
    status.machines.iter().find(|m| m.name == name).ok_or_else(none)
}

/// Whether a machine has ended for good.
fn is_over(m: &MachineReport) -> bool {
    m.pid.is_none() && m.restart_in_s.is_none() && matches!(m.state.as_str(), "failed" | "stopped")
}

/// Whether one of the machines that are `late`, as [`missing`] has them, will never be on the
/// network.
pub(crate) fn is_hopeless(status: &Status, late: &[(String, String)]) -> bool {
    status.machines.iter().any(|m| is_over(m) && late.iter().any(|(name, _)| *name == m.name))
}

fn how(m: &MachineReport) -> String {
    // That of an earlier run says nothing of one that runs.
    let end = m.last_end.as_ref().filter(|_| m.pid.is_none()).map_or_else(String::new, |end| format!(": {end}"));
    format!("{} is {}{end}", m.name, m.state)
}

fn up(status: &Status, name: Option<&str>) -> WaitState {
    if let Some(name) = name
        && let Err(never) = machine(status, name)
    {
        return never;
    }
    let late: Vec<_> = missing(status).into_iter().filter(|(n, _)| name.is_none_or(|name| name == n)).collect();
    let Some((first, state)) = late.first() else { return WaitState::Met(Exit::Done) };
    let text = format!("{first} is not on the network: {state}");
    match is_hopeless(status, &late) {
        true => WaitState::Never(text),
        false => WaitState::NotYet(text),
    }
}

fn lease(status: &Status, name: &str) -> WaitState {
    let m = match machine(status, name) {
        Ok(m) => m,
        Err(never) => return never,
    };
    let mut leases = status.networks.iter().flat_map(|n| &n.leases).filter(|l| l.name.as_deref() == Some(name));
    match leases.any(|l| l.expires_s.is_some() && is_of_this_run(m, l)) {
        true => WaitState::Met(Exit::Done),
        false if is_over(m) => WaitState::Never(how(m)),
        false => {
            // The networks that it has a device on: a machine's ports have its name, or begin with
            // it and a dot.
            let is_its = |port: &&PortReport| port.name == name || port.name.starts_with(&format!("{name}."));
            let full = status.ports.iter().filter(is_its).find_map(|port| {
                let network = status.networks.iter().find(|network| network.name == port.network)?;
                let refused = network.counters.get("dhcp_exhausted").filter(|count| **count != 0)?;
                Some((&network.name, refused))
            });
            WaitState::NotYet(match full {
                Some((network, refused)) => format!(
                    "{name} has no address yet: network {network} had none left {refused} times when one was asked for; it is {}",
                    m.state
                ),
                None => format!("{name} has not asked for its address yet; it is {}", m.state),
            })
        }
    }
}

/// Leases outlive machines: one of an earlier run says nothing of this one. Of a machine that runs
/// on from before this daemon it is not known when it asked.
fn is_of_this_run(machine: &MachineReport, lease: &LeaseReport) -> bool {
    match (lease.given_s, machine.uptime_s) {
        (Some(given), Some(uptime)) => given <= uptime,
        (None, Some(_)) => machine.adopted,
        (_, None) => false,
    }
}

fn port(status: &Status, name: &str) -> WaitState {
    match status.ports.iter().find(|p| p.name == name) {
        Some(port) if port.up => WaitState::Met(Exit::Done),
        Some(_) => WaitState::NotYet(format!("port {name} is down")),
        None => WaitState::NotYet(format!("there is no port \"{name}\"")),
    }
}

fn exit(status: &Status, name: &str) -> WaitState {
    match machine(status, name) {
        Ok(m) if is_over(m) && m.state == "stopped" => WaitState::Met(Exit::Done),
        Ok(m) if is_over(m) => WaitState::Met(Exit::Failed),
        Ok(m) => WaitState::NotYet(how(m)),
        // One that was added and stopped is gone.
        Err(never) => never,
    }
}

fn service(name: &str) -> WaitState {
    let there = folder::services().map(|folder| folder::list(&folder)).unwrap_or_default();
    match there.iter().any(|service| service == name) {
        true => WaitState::Met(Exit::Done),
        false => WaitState::NotYet(format!("the service \"{name}\" does not run")),
    }
}

/// How it stands with all of them: what will never be, before what is not yet, and the worst end.
fn of_all(states: impl Iterator<Item = WaitState>) -> WaitState {
    let mut all = WaitState::Met(Exit::Done);
    for state in states {
        all = match (all, state) {
            (never @ WaitState::Never(_), _) | (_, never @ WaitState::Never(_)) => never,
            (late @ WaitState::NotYet(_), _) | (_, late @ WaitState::NotYet(_)) => late,
            (WaitState::Met(Exit::Done), met) => met,
            (met, WaitState::Met(_)) => met,
        };
    }
    all
}

impl Wait {
    /// How it stands with one of the names; without one, with all machines.
    fn state(&self, status: &Status, name: Option<&str>) -> WaitState {
        match (self.what, name) {
            (What::Lease, Some(name)) => lease(status, name),
            (What::Port, Some(name)) => port(status, name),
            (What::Exit, Some(name)) => exit(status, name),
            (_, name) => up(status, name),
        }
    }

    pub(crate) fn run(&self, select: &Select) -> Result<Exit, Failure> {
        let end = Instant::now() + self.timeout;
        let mut client = if self.what == What::Service { None } else { Some(select.client()?) };
        loop {
            let state = match client.as_ref().map(|client| client.status()) {
                None => of_all(self.names.iter().map(|name| service(name))),
                // It may be about to start.
                Some(Err(error)) if error.is_absent() || error.is_unanswered() => WaitState::NotYet(error.to_string()),
                Some(status) => {
                    let status = status?;
                    match self.names.is_empty() {
                        true => self.state(&status, None),
                        false => of_all(self.names.iter().map(|name| self.state(&status, Some(name)))),
                    }
                }
            };
            match state {
                WaitState::Met(exit) => return Ok(exit),
                WaitState::Never(text) => return Err(Failure::failed(text)),
                WaitState::NotYet(text) if Instant::now() >= end => {
                    let waited = out::span(self.timeout.as_secs_f64());
                    return Err(Failure::failed(format!("{text} (waited {waited})")));
                }
                WaitState::NotYet(_) => {}
            }
            match &mut client {
                Some(client) => {
                    if client.sleep(LOOK)? {
                        return Ok(Exit::Failed);
                    }
                }
                None => std::thread::sleep(LOOK),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        wait: Wait,
    }

    fn parse(line: &str) -> Result<Wait, clap::Error> {
        Line::try_parse_from(["wait"].into_iter().chain(line.split_whitespace())).map(|l| l.wait)
    }

    fn status(state: &str, restart_in_s: Option<f64>, up: bool) -> Status {
        let text = format!(
            r#"{{"schema":1,"version":"","name":"t","file":"","pid":1,"uptime_s":0,"networks":[],"forwards":[],"workers":[],"warnings":[],
            "machines":[{{"name":"web","kind":"cell","state":"{state}","pid":null,"accel":"tcg","machine":"microvm","addresses":{{}},"uptime_s":1,"last_end":"signal 9","restarts":0,"adopted":false}}],
            "ports":[{{"name":"web","network":"lan","kind":"tap","up":{up},"offloads":[],"guard":[],"details":{{}},"macs":0,"last_fault":null,"counters":null}}]}}"#
        );
        let text = text.replace("\"counters\":null", &format!("\"counters\":{}", counters()));
        let mut status: Status = serde_json::from_str(&text).unwrap();
        status.machines[0].restart_in_s = restart_in_s;
        status.machines[0].pid = (state == "running").then_some(7);
        status
    }

    fn counters() -> String {
        serde_json::to_string(&tombolo_host::api::report::CounterReport::default()).unwrap()
    }

    #[test]
    fn flags() {
        assert_eq!(parse("").unwrap().what, What::Up);
        assert_eq!(parse("--for exit job --timeout 5").unwrap().timeout, Duration::from_secs(5));
        assert!(parse("--for lease").is_err() && parse("--for rain web").is_err() && parse("--timeout 0").is_err());
    }

    #[test]
    fn what_can_still_come_is_waited_for_and_what_cannot_is_not() {
        let runs = status("running", None, true);
        assert_eq!(up(&runs, None), WaitState::Met(Exit::Done));
        assert!(matches!(up(&status("running", None, false), Some("web")), WaitState::NotYet(_)));
        assert!(
            matches!(up(&status("failed", None, false), None), WaitState::Never(text) if text.contains("signal 9"))
        );
        assert!(matches!(up(&status("failed", Some(2.0), false), None), WaitState::NotYet(_)));
        assert!(matches!(up(&runs, Some("wbe")), WaitState::Never(text) if text.contains("there are: web")));
        assert_eq!(port(&runs, "web"), WaitState::Met(Exit::Done));
        assert!(matches!(port(&runs, "other"), WaitState::NotYet(_)));
        assert!(matches!(exit(&runs, "web"), WaitState::NotYet(_)));
        assert_eq!(exit(&status("stopped", None, false), "web"), WaitState::Met(Exit::Done));
        assert_eq!(exit(&status("failed", None, false), "web"), WaitState::Met(Exit::Failed));
        assert!(matches!(exit(&status("failed", Some(1.0), false), "web"), WaitState::NotYet(_)));
        assert!(matches!(lease(&runs, "web"), WaitState::NotYet(text) if text.contains("has not asked")));
    }

    #[test]
    fn of_several_names_the_worst_is_told() {
        let (met, late) = (|| WaitState::Met(Exit::Done), || WaitState::NotYet("late".into()));
        let never = || WaitState::Never("never".into());
        let all = |states: Vec<WaitState>| of_all(states.into_iter());
        assert_eq!(all(vec![met(), met()]), met());
        assert_eq!(all(vec![met(), late(), met()]), late());
        assert_eq!(all(vec![late(), never(), met()]), never());
        assert_eq!(all(vec![met(), WaitState::Met(Exit::Failed), met()]), WaitState::Met(Exit::Failed));
        assert_eq!(parse("--for lease web db").unwrap().names, ["web", "db"]);
    }

    #[test]
    fn what_is_said_of_a_machine_is_of_its_present_run() {
        assert_eq!(exit(&status("running", None, true), "web"), WaitState::NotYet("web is running".into()));
        let again = exit(&status("failed", Some(1.0), false), "web");
        assert_eq!(again, WaitState::NotYet("web is failed: signal 9".into()));
    }

    #[test]
    fn a_network_without_addresses_is_named() {
        let mut full = status("running", None, true);
        full.networks = vec![
            serde_json::from_str(
                r#"{"name":"lan","subnet":"10.87.0.0/29","gateway":null,"router":null,"uplink":"none","uplink_fault":null,
                "domain":"t.internal","mtu":1500,"worker":"main","macs":0,"flooded_unknown":0,"leases":[],
                "counters":{"dhcp_exhausted":3}}"#,
            )
            .unwrap(),
        ];
        assert!(
            matches!(lease(&full, "web"), WaitState::NotYet(text) if text.contains("network lan had none left 3 times"))
        );
    }

    #[test]
    fn a_lease_of_an_earlier_run_is_none_of_this_one() {
        let mut machine = status("running", None, true).machines.remove(0);
        let mut of_this_run = |uptime: Option<f64>, given: Option<f64>, adopted: bool| {
            (machine.uptime_s, machine.adopted) = (uptime, adopted);
            let lease = LeaseReport {
                mac: "02:00:00:00:00:01".into(),
                ip: std::net::Ipv4Addr::LOCALHOST.into(),
                name: Some("web".into()),
                fixed: false,
                expires_s: Some(3000),
                given_s: given,
            };
            is_of_this_run(&machine, &lease)
        };
        assert!(of_this_run(Some(5.0), Some(4.0), false));
        assert!(!of_this_run(Some(5.0), Some(6.0), false), "it started again");
        assert!(!of_this_run(Some(5.0), None, false), "so did the daemon");
        assert!(of_this_run(Some(5.0), None, true), "it runs on from before the daemon");
        assert!(!of_this_run(None, Some(6.0), false), "it does not run");
    }
}
