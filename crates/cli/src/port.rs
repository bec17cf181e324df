//! `tombolo port`: ports of a running fabric.

use std::io::Read;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand, ValueEnum};
use serde_json::Value;
use tombolo_host::api::report::{Ports, SCHEMA};

use crate::exit::{Exit, Failure};
use crate::number;
use crate::out;
use crate::section::{Origin, Section, origin, quoted, told};
use crate::select::Select;
use crate::status;

#[derive(Subcommand, Debug)]
pub(crate) enum Port {
    /// Add a port or tap, from flags or from sections of a fabric file
    Add(Box<Add>),
    /// Change the rate limits of a running port
    Set(Set),
    /// Remove a port or tap; a machine's port goes with its machine
    Del(Del),
    /// List the ports
    Ls(Ls),
    /// Print all counters of a port
    Stats(Stats),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kind {
    /// A socket for a VMM's vhost-user network device
    VhostUser,
    /// A socket for QEMU's `-netdev stream`
    Stream,
    /// A server of an ivshmem link on a socket, for a VMM's ivshmem device
    Ivshmem,
    /// An interface of the host that joins the network
    Packet,
    /// The network device of a Xen guest
    Xen,
    /// A VXLAN tunnel to other machines
    Vxlan,
    /// A tap device
    Tap,
}

#[derive(Args, Debug)]
pub(crate) struct Add {
    /// Name of the new port
    #[arg(required_unless_present = "sections", conflicts_with = "sections")]
    name: Option<String>,
    /// Kind of attachment
    #[arg(long, value_enum, default_value = "vhost-user", conflicts_with = "sections")]
    kind: Kind,
    /// Network to join [default: the only one]
    #[arg(long, conflicts_with = "sections")]
    network: Option<String>,
    /// Path of its socket [default: NAME.sock in the runtime directory]
    #[arg(long, value_name = "PATH", conflicts_with = "sections")]
    socket: Option<PathBuf>,
    /// Connect to the socket instead of listening on it; the peer then listens (vhost-user, stream)
    #[arg(long, conflicts_with = "sections")]
    connect: bool,
    /// Queue pairs (vhost-user, xen)
    #[arg(long, value_name = "N", value_parser = number::whole, allow_hyphen_values = true, conflicts_with = "sections")]
    queues: Option<u32>,
    /// Name of the interface (packet) or of the device (tap)
    #[arg(long, value_name = "INTERFACE", conflicts_with = "sections")]
    device: Option<String>,
    /// Name of the guest (xen) [default: the port's name]
    #[arg(long, value_name = "DOMAIN", conflicts_with = "sections")]
    domain: Option<String>,
    /// Number of the guest's network device, from 0 (xen)
    #[arg(long, value_name = "N", value_parser = number::whole, allow_hyphen_values = true, conflicts_with = "sections")]
    vif: Option<u32>,
    /// Identifier of the network (vxlan)
    #[arg(long, value_name = "N", value_parser = number::whole, allow_hyphen_values = true, conflicts_with = "sections")]
    vni: Option<u32>,
    /// Address of this machine that the other ends send to (vxlan)
    #[arg(long, value_name = "ADDRESS", conflicts_with = "sections")]
    local: Option<String>,
    /// Address of another end; repeat it for more (vxlan)
    #[arg(long = "remote", value_name = "ADDRESS", conflicts_with = "sections")]
    remotes: Vec<String>,
    /// UDP port of all ends (vxlan) [default: 4789]
    #[arg(long, value_name = "PORT", conflicts_with = "sections")]
    udp_port: Option<u32>,
    /// Use an existing device, and keep it when the port is removed (tap)
    #[arg(long, conflicts_with = "sections")]
    adopt: bool,
    /// Network namespace that holds the device, by name or path (tap)
    #[arg(long, value_name = "NAMESPACE", conflicts_with = "sections")]
    netns: Option<String>,
    /// Ethernet address of the peer
    #[arg(long, conflicts_with = "sections")]
    mac: Option<String>,
    /// IPv4 address: leased to the peer, or set on the tap
    #[arg(long, conflicts_with = "sections")]
    ip: Option<String>,
    /// IPv6 address or prefix that the guard `ip` allows, besides the link-local one of its MAC;
    /// repeat it for more
    #[arg(long, value_name = "ADDRESS", conflicts_with = "sections")]
    ip6: Vec<String>,
    /// Source addresses that it may use. `ip`: its own MAC and IP addresses; `mac`: its own MAC;
    /// `off`: any
    #[arg(long, conflicts_with = "sections")]
    guard: Option<String>,
    /// Add all [port.NAME] and [tap.NAME] sections of this file, or none if one fails; - is
    /// standard input
    #[arg(long, value_name = "FILE")]
    sections: Option<PathBuf>,
    /// Print the new ports as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct Set {
    /// Name of the port
    name: String,
    /// Limits as in the file's key `rate`, such as send=100M,receive=1G,send_urgent=10M; a limit
    /// left out is off; `off` turns all off
    #[arg(long, value_name = "LIMITS")]
    rate: String,
    /// Print the port as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct Del {
    /// Name of the port
    name: String,
}

#[derive(Args, Debug)]
pub(crate) struct Ls {
    /// Print the ports as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct Stats {
    /// Name of the port
    name: String,
    /// Print the port as JSON
    #[arg(long)]
    json: bool,
}

/// The text of a file of sections, or of standard input for `-`.
pub(crate) fn read_sections(path: &Path) -> Result<String, Failure> {
    let text = if path == Path::new("-") {
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text).map(|_| text)
    } else {
        std::fs::read_to_string(path)
    };
    text.map_err(|e| Failure::misused(format!("reading sections from {}: {e}", path.display())))
}

/// A path as the daemon, which runs elsewhere, has to see it.
pub(crate) fn whole(path: &Path) -> Result<String, Failure> {
    Ok(std::path::absolute(path)?.display().to_string())
}

impl Add {
    fn text(&self) -> Result<String, Failure> {
        if let Some(path) = &self.sections {
            return read_sections(path);
        }
        let name = self.name.as_deref().unwrap_or_default();
        let socket = self.socket.as_deref().map(whole).transpose()?;
        let kind = self.kind.to_possible_value().map(|v| v.get_name().to_string());
        let section = match self.kind {
            Kind::Tap => Section::new("tap", name),
            _ => Section::new("port", name).text("kind", kind.as_deref()),
        };
        // A flag that is not for the kind is told by the fabric, as the same key in the file would
        // be.
        Ok(section
            .text("network", self.network.as_deref())
            .text("socket", socket.as_deref())
            .flag("connect", self.connect)
            .number("queues", self.queues)
            .text("device", self.device.as_deref())
            .text("domain", self.domain.as_deref())
            .number("vif", self.vif)
            .number("vni", self.vni)
            .text("local", self.local.as_deref())
            .list("remotes", &self.remotes)
            .number("udp_port", self.udp_port)
            .flag("adopt", self.adopt)
            .text("netns", self.netns.as_deref())
            .text("mac", self.mac.as_deref())
            .text("ip", self.ip.as_deref())
            .list("ip6", &self.ip6)
            .text("guard", self.guard.as_deref())
            .finish())
    }
}

impl Set {
    /// The change as text of a fabric file. What the names and values mean is for the fabric to
    /// say.
    fn text(&self) -> Result<String, Failure> {
        if self.rate == "off" {
            return Ok("rate = {}\n".into());
        }
        let mut names: Vec<_> = self.rate.split(',').filter_map(|limit| Some(limit.split_once('=')?.0)).collect();
        names.sort_unstable();
        if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(Failure::misused(format!(
                "--rate: expected each limit once, found {} more than once",
                twice[0]
            )));
        }
        let limits = self.rate.split(',').map(|limit| {
            let (name, value) = limit.split_once('=').filter(|(name, value)| !name.is_empty() && !value.is_empty())?;
            let value = if value.bytes().all(|b| b.is_ascii_digit()) { value.to_string() } else { quoted(value) };
            Some(format!("{} = {value}", quoted(name)))
        });
        let limits: Option<Vec<String>> = limits.collect();
        let limits = limits.ok_or_else(|| {
            let found = &self.rate;
            Failure::misused(format!(
                "--rate: expected NAME=VALUE,… or off, like send=100M,receive=1G, found {found:?}"
            ))
        })?;
        Ok(format!("rate = {{ {} }}\n", limits.join(", ")))
    }
}

impl Port {
    pub(crate) fn run(&self, select: &Select) -> Result<Exit, Failure> {
        let client = select.client()?;
        match self {
            Port::Add(add) => {
                let added = client.add_ports(&add.text()?).map_err(|e| told(e, origin(add.sections.as_deref())))?;
                if add.json {
                    out::json(&added)?;
                } else {
                    out::print(&status::done("port", "added", added.ports.iter().map(|p| p.name.as_str())))?;
                    for port in added.ports.iter().filter(|p| p.details.get("role").is_none_or(|r| r == "listen")) {
                        if let Some(socket) = port.details.get("socket").and_then(Value::as_str) {
                            out::print(&format!("{} listens at {socket}\n", port.name))?;
                        }
                    }
                }
            }
            Port::Set(set) => {
                let port = client.change_port(&set.name, &set.text()?).map_err(|e| told(e, Origin::Flag("rate")))?;
                if set.json {
                    out::json(&port)?;
                } else {
                    let rate = port.details.get("rate").map_or("no limits".into(), status::detail);
                    out::print(&format!("{}: {rate}\n", port.name))?;
                }
            }
            Port::Del(del) => {
                client.remove_port(&del.name)?;
                out::print(&status::done("port", "removed", [&del.name[..]].into_iter()))?;
            }
            Port::Ls(ls) => {
                let ports = client.status()?.ports;
                if ls.json {
                    out::json(&Ports { schema: SCHEMA, ports })?;
                } else {
                    out::print(&status::ports(&ports).render(out::colour()))?;
                }
            }
            Port::Stats(stats) => {
                let port = client.port(&stats.name)?;
                if stats.json {
                    out::json(&port)?;
                } else {
                    out::print(&status::port(&port))?;
                }
            }
        }
        Ok(Exit::Done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(subcommand)]
        port: Port,
    }

    fn parse(line: &str) -> Result<Port, clap::Error> {
        Line::try_parse_from(["port"].into_iter().chain(line.split(' '))).map(|l| l.port)
    }

    fn text(line: &str) -> String {
        let Port::Add(add) = parse(line).unwrap() else { panic!() };
        add.text().unwrap()
    }

    #[test]
    fn every_flag_of_add_becomes_its_key() {
        assert_eq!(text("add p"), "[port.\"p\"]\nkind = \"vhost-user\"\n");
        for (flag, key) in [
            ("--kind stream", "kind = \"stream\""),
            ("--kind ivshmem", "kind = \"ivshmem\""),
            ("--kind packet --device eth9", "device = \"eth9\""),
            ("--kind xen", "kind = \"xen\""),
            ("--kind xen --domain web", "domain = \"web\""),
            ("--kind xen --vif 1", "vif = 1"),
            ("--kind vxlan --vni 42", "vni = 42"),
            ("--kind vxlan --local 192.0.2.1", "local = \"192.0.2.1\""),
            ("--kind vxlan --remote 192.0.2.2 --remote 192.0.2.3", "remotes = [\"192.0.2.2\", \"192.0.2.3\"]"),
            ("--kind vxlan --udp-port 8472", "udp_port = 8472"),
            ("--network lan", "network = \"lan\""),
            ("--socket /run/x.sock", "socket = \"/run/x.sock\""),
            ("--connect", "connect = true"),
            ("--queues 2", "queues = 2"),
            ("--adopt", "adopt = true"),
            ("--netns red", "netns = \"red\""),
            ("--mac 02:00:00:00:00:01", "mac = \"02:00:00:00:00:01\""),
            ("--ip 10.87.0.9", "ip = \"10.87.0.9\""),
            ("--ip6 fd00::9", "ip6 = [\"fd00::9\"]"),
            ("--guard off", "guard = \"off\""),
        ] {
            assert!(text(&format!("add p {flag}")).lines().any(|l| l == key), "{flag}");
        }
        assert_eq!(text("add host --kind tap --ip 10.87.0.9"), "[tap.\"host\"]\nip = \"10.87.0.9\"\n");
        let relative = text("add p --socket x.sock");
        assert!(relative.contains("socket = \"/"), "the daemon runs elsewhere: {relative}");
    }

    #[test]
    fn sections_stand_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s.toml");
        std::fs::write(&path, "[port.a]\n").unwrap();
        assert_eq!(text(&format!("add --sections {}", path.display())), "[port.a]\n");
        assert!(parse("add").is_err() && parse("add p --sections x").is_err());
        assert!(parse("add --sections x --network lan").is_err());
    }

    #[test]
    fn limits_become_the_key_of_the_file() {
        let change = |limits: &str| {
            let Port::Set(set) = parse(&format!("set p --rate {limits}")).unwrap() else { panic!() };
            set.text()
        };
        assert_eq!(
            change("send=100M,receive_frames=7").unwrap(),
            "rate = { \"send\" = \"100M\", \"receive_frames\" = 7 }\n"
        );
        assert_eq!(change("off").unwrap(), "rate = {}\n");
        for wrong in ["fast", "send=", "=5", "send=1M,"] {
            assert!(change(wrong).is_err(), "{wrong}");
        }
        assert!(parse("set p").is_err() && parse("set --rate off").is_err());
    }

    #[test]
    fn all_that_reports_does_so_in_json() {
        assert!(matches!(parse("ls --json"), Ok(Port::Ls(Ls { json: true }))));
        assert!(matches!(parse("stats p --json"), Ok(Port::Stats(Stats { json: true, .. }))));
        assert!(matches!(parse("add p --json"), Ok(Port::Add(add)) if add.json));
        assert!(matches!(parse("del p"), Ok(Port::Del(Del { name })) if name == "p"));
        assert!(parse("del").is_err() && parse("stats").is_err());
    }
}
