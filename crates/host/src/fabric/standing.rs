//! What a handover cannot change of a running fabric, and what a new daemon can refuse before the
//! old one gives anything up.
//!
//! # Purpose
//! A daemon that takes over continues with the taps, streams and addresses as they are. A changed
//! file may ask for something else. So the running daemon writes what is in use into its owner
//! record, and the next one compares before it asks for a handover. New parts of the file are
//! checked as by `up`: routes, listeners, interfaces and programs.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{FabricError, Running};
use crate::file::{self, Fabric, Proto, Uplink};
use crate::plan::{self, Attachment, Plan, PortPlan};
use crate::{preflight, rundir};

/// The part of a fabric that a handover leaves as it is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Standing {
    /// Settings by section of the file and key.
    sections: BTreeMap<String, BTreeMap<String, String>>,
    /// Networks to whose subnets the host has routes of the fabric's own.
    on_host: BTreeSet<String>,
    /// Where forwards of user uplinks, tunnels and exports listen: transport and address.
    listeners: BTreeSet<(String, SocketAddr)>,
}

/// The section of the file that a port is from.
fn section(fabric: &Fabric, port: &PortPlan) -> String {
    match fabric.taps.iter().any(|t| t.name == port.name) {
        true => format!("tap.{}", port.name),
        false if port.name == plan::uplink_name(&port.network) => format!("network.{}", port.network),
        false => format!("port.{}", port.name),
    }
}

/// What of a port is taken over as it is.
fn settings(port: &PortPlan) -> Vec<(&'static str, String)> {
    let or_none = |text: Option<String>| text.unwrap_or_else(|| "none".into());
    match &port.attachment {
        Attachment::Tap { device, adopt, netns, ip, mac, accept_ra } => vec![
            ("device", device.clone()),
            ("adopt", adopt.to_string()),
            ("netns", or_none(netns.clone())),
            ("ip", or_none(ip.map(|(ip, prefix)| format!("{ip}/{prefix}")))),
            ("mac", or_none(mac.map(|mac| mac.to_string()))),
            ("accept_ra", accept_ra.to_string()),
            ("mtu", port.mtu.to_string()),
        ],
        Attachment::Stream { socket, connect } => {
            vec![("socket", socket.display().to_string()), ("connect", connect.to_string())]
        }
        _ => vec![],
    }
}

fn listeners(plan: &PortPlan) -> impl Iterator<Item = (Proto, SocketAddr)> {
    let (user, tunnel) = match &plan.attachment {
        Attachment::User(user) => (Some(user), None),
        Attachment::Vxlan(tunnel) => (None, Some((Proto::Udp, SocketAddr::new(tunnel.local, tunnel.udp_port)))),
        _ => (None, None),
    };
    let forwards = user.into_iter().flat_map(|user| user.forwards.iter().map(|f| (f.proto, f.listen)));
    forwards.chain(tunnel)
}

impl Standing {
    /// What is in use in a fabric with these ports.
    pub(crate) fn of<'p>(fabric: &Fabric, ports: impl Iterator<Item = &'p PortPlan>) -> Standing {
        let mut out = Standing::default();
        for port in ports {
            let keys = out.sections.entry(section(fabric, port)).or_default();
            keys.extend(settings(port).into_iter().map(|(key, value)| (key.to_string(), value)));
            out.listeners.extend(listeners(port).map(|(proto, listen)| (proto.word().to_string(), listen)));
        }
        let exports = fabric.exports.iter().map(|export| (Proto::Tcp.word().to_string(), export.listen));
        out.listeners.extend(exports);
        for network in &fabric.networks {
            let keys = out.sections.entry(format!("network.{}", network.name)).or_default();
            keys.insert("subnet".into(), network.subnet.to_string());
            let has_tap = fabric.taps.iter().any(|t| t.network == network.name && t.netns.is_none() && t.ip.is_some());
            if network.uplink == Uplink::Kernel || has_tap {
                out.on_host.insert(network.name.clone());
            }
        }
        out
    }

    /// Nothing but TCP listeners.
    pub(crate) fn listening(addresses: Vec<SocketAddr>) -> Standing {
        let tcp = |listen| (Proto::Tcp.word().to_string(), listen);
        Standing { listeners: addresses.into_iter().map(tcp).collect(), ..Standing::default() }
    }

    /// Refuses what a handover to a daemon with the `next` file could not carry out.
    fn refuse_changes(&self, next: &Standing) -> Result<(), FabricError> {
        for (section, keys) in &self.sections {
            let Some(now) = next.sections.get(section) else { continue };
            for (key, before) in keys {
                if let Some(found) = now.get(key).filter(|found| *found != before) {
                    return Err(FabricError::State(format!(
                        "[{section}] expected {key} = {before}, as it runs, found {found}: a handover cannot change \
                         it, and the running daemon continues; `tombolo down` and `tombolo up` make the change"
                    )));
                }
            }
        }
        Ok(())
    }

    /// Whether what is in use has this value of a section's key.
    pub(crate) fn has(&self, section: &str, key: &str, value: &str) -> bool {
        self.sections.get(section).and_then(|keys| keys.get(key)).is_some_and(|found| found == value)
    }

    /// Whether a forward, a tunnel or an export of the fabric listens there. For TCP also one at an
    /// address that overlaps: it ends before another one of the fabric listens there.
    pub(crate) fn listens(&self, proto: Proto, listen: SocketAddr) -> bool {
        let is_it = |at: SocketAddr| if proto == Proto::Tcp { file::overlap(at, listen) } else { at == listen };
        self.listeners.iter().any(|(word, at)| word == proto.word() && is_it(*at))
    }

    /// Whether the host has a route of the fabric's own to the network.
    pub(crate) fn is_on_host(&self, network: &str) -> bool {
        self.on_host.contains(network)
    }

    /// Looks at everything that the file has and the running fabric has not, as `up` does before it
    /// makes anything.
    ///
    /// # Errors
    /// The first change that a handover cannot carry out, or all new things that could not be made.
    pub(crate) fn check(&self, fabric: &Fabric, plan: &Plan, file: &Path) -> Result<(), FabricError> {
        self.refuse_changes(&Standing::of(fabric, plan.ports.iter()))?;
        super::refuse_faults(preflight::faults(fabric, Some(self)), file, fabric.which())
    }
}

/// What the fabric of this runtime directory has in use; `None` where it does not run.
pub fn of_running(folder: &Path) -> Option<Standing> {
    rundir::daemon_of(folder)?;
    let text = std::fs::read(folder.join("owner.json")).ok()?;
    serde_json::from_slice::<rundir::Owner>(&text).ok()?.standing
}

impl Running {
    /// Writes what is in use into the owner record, for the daemon that takes over.
    pub(crate) fn record_standing(&mut self) {
        let standing = Standing::of(&self.spec, self.ports.values().map(|port| &port.plan));
        if self.dir.as_ref().is_some_and(|dir| dir.owner().standing.as_ref() != Some(&standing)) {
            self.dir().record(|owner| owner.standing = Some(standing));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fabric(text: &str) -> (Fabric, Plan) {
        let fabric = file::parse(&format!("name = \"s\"\n{text}"), Path::new("t.toml")).unwrap();
        let facts = super::super::facts(&fabric, std::env::temp_dir());
        let plan = plan::plan(&fabric, &facts).unwrap();
        (fabric, plan)
    }

    fn standing(text: &str) -> Standing {
        let (fabric, plan) = fabric(text);
        Standing::of(&fabric, plan.ports.iter())
    }

    const BEFORE: &str =
        "[network.lan]\nsubnet = \"10.1.0.0/24\"\n[tap.t]\nip = \"10.1.0.9\"\n[port.p]\nkind = \"stream\"\n";

    #[test]
    fn a_change_that_a_handover_cannot_carry_out_is_refused_by_section_and_key() {
        let before = standing(BEFORE);
        assert!(before.refuse_changes(&standing(BEFORE)).is_ok());
        for (from, to, told) in [
            ("10.1.0.9", "10.1.0.8", "[tap.t] expected ip = 10.1.0.9/24"),
            ("[tap.t]\n", "[tap.t]\nmac = \"02:00:00:00:00:99\"\n", "[tap.t] expected mac = "),
            ("[tap.t]\n", "[tap.t]\nnetns = \"x\"\n", "[tap.t] expected netns = none"),
            ("[tap.t]\n", "[tap.t]\naccept_ra = true\n", "[tap.t] expected accept_ra = false"),
            ("[tap.t]\n", "[tap.t]\ndevice = \"other\"\n", "[tap.t] expected device = "),
            ("/24\"\n", "/24\"\nmtu = 1400\n", "[tap.t] expected mtu = 1500"),
            ("10.1.0.0/24", "10.1.0.0/25", "[network.lan] expected subnet = 10.1.0.0/24"),
            ("\"stream\"\n", "\"stream\"\nsocket = \"/elsewhere/p\"\n", "[port.p] expected socket = "),
        ] {
            let after = BEFORE.replace(from, to);
            assert_ne!(after, BEFORE);
            let error = before.refuse_changes(&standing(&after)).unwrap_err().to_string();
            assert!(error.starts_with(told) && error.contains("`tombolo down`"), "{error}");
        }
        // What is new, and what is gone, is not a change.
        assert!(before.refuse_changes(&standing("[network.lan]\nsubnet = \"10.1.0.0/24\"\n")).is_ok());
        let more = format!("{BEFORE}[tap.u]\nip = \"10.1.0.7\"\n");
        assert!(before.refuse_changes(&standing(&more)).is_ok());
    }

    #[test]
    fn a_new_forward_whose_listener_is_taken_is_refused_and_one_that_listens_already_is_not() {
        let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let base = "[network.lan]\nsubnet = \"10.1.0.0/24\"\nuplink = \"user\"\n[port.p]\nkind = \"stream\"\nip = \"10.1.0.7\"\nmac = \"02:00:00:00:00:07\"\n";
        let text = format!("{base}[[forward]]\nlisten = \"{}\"\nto = \"p:80\"\n", taken.local_addr().unwrap());
        let (fabric, plan) = fabric(&text);
        let error = standing(base).check(&fabric, &plan, Path::new("t.toml")).unwrap_err().to_string();
        assert!(error.contains("another program listens there"), "{error}");
        let same = Standing::of(&fabric, plan.ports.iter());
        assert!(
            !same
                .check(&fabric, &plan, Path::new("t.toml"))
                .is_err_and(|error| error.to_string().contains("listens there"))
        );
    }

    #[test]
    fn a_new_port_whose_folder_or_interface_is_not_there_is_refused() {
        for (section, told) in [
            ("[port.q]\nkind = \"stream\"\nsocket = \"/proc/absent/q\"\n", "expected a folder for its socket"),
            ("[port.q]\nkind = \"packet\"\ndevice = \"tmbabsent0\"\n", "tmbabsent0"),
            ("[tap.q]\ndevice = \"tmbabsent0\"\nadopt = true\n", "tmbabsent0"),
            ("[tap.q]\ndevice = \"lo\"\n", "expected no interface lo"),
        ] {
            let (fabric, plan) = fabric(&format!("{BEFORE}{section}"));
            let error = standing(BEFORE).check(&fabric, &plan, Path::new("t.toml")).unwrap_err().to_string();
            assert!(error.contains(told), "{error}");
        }
    }
    #[test]
    fn a_fabric_whose_export_listens_can_have_it_at_an_overlapping_address_next() {
        let at = |text: &str| text.parse::<SocketAddr>().unwrap();
        let own = standing("[export.a]\nlisten = \"0.0.0.0:7000\"\ntls = false\n");
        assert!(own.listens(Proto::Tcp, at("0.0.0.0:7000")) && own.listens(Proto::Tcp, at("192.0.2.1:7000")));
        let own = Standing::listening(vec![at("192.0.2.1:7000")]);
        assert!(own.listens(Proto::Tcp, at("0.0.0.0:7000")));
        for (proto, other) in [
            (Proto::Tcp, "192.0.2.2:7000"),
            (Proto::Tcp, "192.0.2.1:7001"),
            (Proto::Tcp, "[::]:7000"),
            (Proto::Udp, "192.0.2.1:7000"),
        ] {
            assert!(!own.listens(proto, at(other)), "{other}");
        }
    }
}
