//! The fabric, asked over its API: its networks, the ports of containers, free addresses.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tombolo_host::api::client::{Client, ClientError};
use tombolo_host::api::report::{Fault, NetworkReport, PortReport, ProblemReport, RangeReport, Status};
use tombolo_host::file::Mac;
use tombolo_host::rundir;

use crate::error::CniError;
use crate::request::Config;

/// Times that another address is tried where one was taken meanwhile.
const TRIES: usize = 32;

/// How long the turn of an attachment is waited for, and how often is looked.
const TURN: Duration = Duration::from_secs(60);
const LOOK: Duration = Duration::from_millis(10);

/// A running fabric.
pub(crate) struct Fabric<'c> {
    client: Client,
    config: &'c Config,
    /// Its folder of sockets.
    folder: PathBuf,
}

/// The container's port.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    pub(crate) name: String,
    pub(crate) container: String,
    pub(crate) up: bool,
}

/// What a container was given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) ip: Ipv4Addr,
    pub(crate) prefix: u8,
    pub(crate) router: Option<Ipv4Addr>,
    pub(crate) nameserver: Option<Ipv4Addr>,
    pub(crate) domain: String,
    pub(crate) mtu: u32,
    /// Where the network has an IPv6 prefix, and the namespace IPv6.
    pub(crate) six: Option<Place6>,
}

/// The IPv6 part of what a container was given. Its prefix length is 64.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place6 {
    pub(crate) ip: Ipv6Addr,
    pub(crate) router: Option<Ipv6Addr>,
    pub(crate) nameserver: Option<Ipv6Addr>,
}

impl From<ClientError> for CniError {
    fn from(error: ClientError) -> CniError {
        let text = error.to_string();
        match error {
            // The runtime tries again later.
            error if error.is_absent() => CniError::Away(text),
            ClientError::Refused { .. } | ClientError::Broken { .. } => CniError::Refused(text),
            ClientError::Denied { .. } | ClientError::Sink(_) | ClientError::System(_) => CniError::System(text),
            ClientError::Busy { .. } => CniError::Busy(text),
            _ => CniError::Again(text),
        }
    }
}

fn said(p: &ProblemReport) -> String {
    let hint = p.hint.as_ref().map_or_else(String::new, |hint| format!("; {hint}"));
    format!("expected {}, found {}{hint}", p.expected, p.found)
}

/// What is wrong with the addresses that the runtime asked for, if the fabric refused them and
/// nothing else.
fn fault_of_addresses(fault: &Fault, config: &Config) -> Option<String> {
    let is_asked = |p: &ProblemReport| match p.key.rsplit('.').next() {
        Some("ip") => config.ip.is_some(),
        Some("ip6") => config.ip6.is_some(),
        _ => false,
    };
    let is_so = !fault.problems.is_empty() && fault.problems.iter().all(is_asked);
    let texts = || fault.problems.iter().map(said).collect::<Vec<_>>().join("; ");
    is_so.then(|| format!("the address that the runtime asked for (ips): {}", texts()))
}

/// What is wrong with the port mappings, if the fabric refused them. It names them as the runtime
/// gave them, not as the fabric has them.
fn fault_of_mappings(fault: &Fault) -> Option<String> {
    let is_of_forward = |p: &&ProblemReport| p.key.starts_with("forward[");
    let problems: Vec<_> = fault.problems.iter().filter(is_of_forward).map(said).collect();
    let text = match &fault.error {
        _ if !problems.is_empty() => problems.join("; "),
        error if error.starts_with("the forward of ") => error.clone(),
        _ => return None,
    };
    Some(format!("runtimeConfig.portMappings: {text}"))
}

/// The address of a container's interface: it follows from what the runtime calls it.
pub(crate) fn mac_of(config: &Config, identity: &str) -> Mac {
    Mac::derived(&["cni", &config.fabric, identity])
}

/// The name of a member for which nothing better is known.
pub(crate) fn plain_name(mac: Mac) -> String {
    let digits: String = mac.0.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("c-{digits}")
}

/// A name of 1 to 24 of a-z, 0-9 and `-`, as members have, or `None`.
pub(crate) fn member_name(text: &str) -> Option<String> {
    let ok = (1..=24).contains(&text.len())
        && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
        && !text.starts_with('-')
        && !text.ends_with('-');
    ok.then(|| text.to_string())
}

/// The first free address from a place on that follows from `seed`, so that parallel calls seldom
/// want the same one. Where the network spans machines, only `own` are this one's to give.
fn free_address(
    subnet: (Ipv4Addr, u8),
    own: Option<RangeReport>,
    used: &BTreeSet<Ipv4Addr>,
    seed: u32,
) -> Option<Ipv4Addr> {
    let (base, prefix) = subnet;
    let size = 1u32.checked_shl(32u32.checked_sub(prefix.into())?)?;
    let hosts = size.checked_sub(2).filter(|n| *n > 0)?;
    let first = (u32::from(base) & !(size - 1)) + 1;
    let (first, count) = match own {
        None => (first, hosts),
        Some(RangeReport { from, to }) => (from.into(), u32::from(to).checked_sub(from.into())?.checked_add(1)?),
    };
    (0..count).map(|n| Ipv4Addr::from(first + seed.wrapping_add(n) % count)).find(|ip| !used.contains(ip))
}

fn subnet_of(network: &NetworkReport) -> Option<(Ipv4Addr, u8)> {
    let (base, prefix) = network.subnet.split_once('/')?;
    Some((base.parse().ok()?, prefix.parse().ok().filter(|p| (1..=30).contains(p))?))
}

/// The container's address in the network's IPv6 prefix: the one of the configuration, or the
/// prefix with its IPv4 address as the last 32 bits. The gateway would lease it the same one, and
/// no two containers have one IPv4 address.
///
/// # Errors
/// The one of the configuration is not one that a container of the network can have.
fn address6(network: &NetworkReport, wanted: Option<Ipv6Addr>, ip: Ipv4Addr) -> Result<Option<Ipv6Addr>, CniError> {
    let wrong = |expected: String, found: &dyn std::fmt::Display| {
        Err(CniError::Config(format!("runtimeConfig.ips: expected {expected}, found {found}")))
    };
    let prefix = network.prefix6.as_deref().and_then(|text| text.strip_suffix("/64"));
    let Some(prefix) = prefix.and_then(|text| text.parse::<Ipv6Addr>().ok()) else {
        return match wanted {
            Some(ip6) => wrong(format!("no IPv6 address, since network \"{}\" has no IPv6 prefix", network.name), &ip6),
            None => Ok(None),
        };
    };
    let Some(ip6) = wanted else {
        return Ok(Some(Ipv6Addr::from_bits(prefix.to_bits() | u128::from(ip.to_bits()))));
    };
    if ip6 == prefix || (ip6.to_bits() ^ prefix.to_bits()) >> 64 != 0 {
        return wrong(format!("an address within {prefix}/64 of network \"{}\"", network.name), &ip6);
    }
    if network.gateway6 == Some(ip6) || network.router6 == Some(ip6) {
        return wrong("an address that the gateway and the router do not have".into(), &ip6);
    }
    Ok(Some(ip6))
}

/// The address that a host with this MAC address gives itself in the /64 of `ip6` (RFC 4291,
/// appendix A).
fn slaac_address(ip6: Ipv6Addr, mac: Mac) -> Ipv6Addr {
    let [a, b, c, d, e, f] = mac.0;
    let suffix = u64::from_be_bytes([a ^ 2, b, c, 0xff, 0xfe, d, e, f]);
    Ipv6Addr::from_bits(ip6.to_bits() >> 64 << 64 | u128::from(suffix))
}

impl<'c> Fabric<'c> {
    /// Nothing is connected yet.
    pub(crate) fn new(config: &'c Config) -> Result<Fabric<'c>, CniError> {
        let root = match &config.runtime {
            Some(root) => root.clone(),
            None => rundir::runtime_root().map_err(|e| CniError::System(e.to_string()))?,
        };
        let folder = root.join(&config.fabric);
        let client = Client::new(&config.fabric, &folder.join("api.sock"))?;
        Ok(Fabric { client, config, folder })
    }

    /// The turn of an attachment: calls for it come one after the other, as a runtime may have
    /// given up on an ADD that still runs when it calls DEL. It ends with the returned file. There
    /// is none without the fabric's folder, and so without a daemon.
    ///
    /// # Errors
    /// The turn does not come: the call that has it is stopped, or waits for the daemon.
    pub(crate) fn turn(&self, mac: Mac) -> Result<Option<File>, CniError> {
        // Attachments share 256 files, so that there is nothing to clean up.
        let path = self.folder.join(format!("cni-{:02x}.lock", mac.0[5]));
        let file = match OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path) {
            Ok(file) => file,
            // Another user has no turn: what it asks for, the daemon refuses.
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::PermissionDenied) => return Ok(None),
            Err(error) => return Err(CniError::System(format!("{}: {error}", path.display()))),
        };
        let begun = Instant::now();
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Some(file)),
                Err(TryLockError::WouldBlock) if begun.elapsed() < TURN => std::thread::sleep(LOOK),
                Err(TryLockError::WouldBlock) => {
                    let text = format!("another call of the plugin has {} for {} s", path.display(), TURN.as_secs());
                    return Err(CniError::Again(format!("{text}; try again")));
                }
                Err(TryLockError::Error(error)) => {
                    return Err(CniError::System(format!("{}: {error}", path.display())));
                }
            }
        }
    }

    /// The vhost-user socket of a virtual machine. No two have the same MAC address.
    pub(crate) fn socket(&self, mac: Mac) -> PathBuf {
        self.folder.join(format!("{}.sock", plain_name(mac)))
    }

    /// The fabric's folder of sockets.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    pub(crate) fn status(&self) -> Result<Status, CniError> {
        Ok(self.client.status()?)
    }

    /// The network of the configuration, or the fabric's only one.
    pub(crate) fn network<'s>(&self, status: &'s Status) -> Result<&'s NetworkReport, CniError> {
        let names = || status.networks.iter().map(|n| &n.name[..]).collect::<Vec<_>>().join(", ");
        let fabric = &self.config.fabric;
        match (&self.config.network, &status.networks[..]) {
            (Some(name), all) => all.iter().find(|n| n.name == *name).ok_or_else(|| {
                let what = format!("network: expected one of fabric \"{fabric}\" ({}), found {name:?}", names());
                CniError::Config(what)
            }),
            (None, [only]) => Ok(only),
            (None, _) => {
                let what = format!("network: expected a name, since fabric \"{fabric}\" has {}", names());
                Err(CniError::Config(what))
            }
        }
    }

    /// All ports of containers that this configuration made.
    pub(crate) fn containers(&self, status: &Status) -> Vec<Found> {
        let own = format!("{}/", self.config.name);
        let found = |port: &PortReport| {
            let container = port.details.get("container")?.as_str().filter(|id| id.starts_with(&own))?.to_string();
            Some(Found { name: port.name.clone(), container, up: port.up })
        };
        status.ports.iter().filter_map(found).collect()
    }

    /// Removes a port; one that is gone meanwhile is fine.
    pub(crate) fn remove(&self, name: &str) -> Result<(), CniError> {
        match self.client.remove_port(name) {
            Err(ClientError::Refused { status: 404, .. }) => Ok(()),
            other => Ok(other?),
        }
    }

    /// Adds the port of a device that is there, and finds an address for it.
    pub(crate) fn join(&self, device: &Device<'_>, wanted: &[String]) -> Result<(String, Place), CniError> {
        let seed = u32::from_be_bytes([device.mac.0[2], device.mac.0[3], device.mac.0[4], device.mac.0[5]]);
        let mac = device.mac.to_string();
        let mut taken = BTreeSet::new();
        let mut last = None;
        // How many of the wanted names cannot be had.
        let mut names_lost = 0;
        for _ in 0..TRIES {
            let status = self.status()?;
            let network = self.network(&status)?;
            let (base, prefix) = subnet_of(network).ok_or_else(|| {
                let what = format!("network \"{}\" has no addresses for containers: {}", network.name, network.subnet);
                CniError::Config(what)
            })?;
            let leased = network.leases.iter().filter_map(|lease| match lease.ip {
                IpAddr::V4(ip) => Some(ip),
                IpAddr::V6(_) => None,
            });
            let mut used: BTreeSet<Ipv4Addr> = leased.collect();
            used.extend(network.gateway.into_iter().chain(network.router));
            used.extend(&taken);
            let ip = match self.config.ip {
                Some(ip) => ip,
                None => free_address((base, prefix), network.own_range, &used, seed).ok_or_else(|| {
                    let (of, larger) = match network.own_range {
                        Some(RangeReport { from, to }) => {
                            (format!("{from} to {to}, this machine's part of it"), "larger subnet or `dhcp` range")
                        }
                        None => (network.subnet.clone(), "larger subnet"),
                    };
                    let text = format!("network \"{}\" has no free address left in {of}", network.name);
                    CniError::Refused(format!("{text}; give it a {larger}"))
                })?,
            };
            let is_free = |name: &&String| !status.ports.iter().any(|p| p.name == **name);
            let name =
                wanted.iter().skip(names_lost.min(wanted.len() - 1)).find(is_free).unwrap_or(&wanted[wanted.len() - 1]);
            let ip6 = match device.has_ipv6 {
                true => address6(network, self.config.ip6, ip)?,
                false => None,
            };
            // The gateway's leases are no part of the file, which the fabric checks.
            let leased = |ip6| network.leases.iter().any(|l| l.ip == IpAddr::V6(ip6) && !l.fixed && l.mac != mac);
            if let Some(ip6) = ip6.filter(|ip6| leased(*ip6)) {
                if self.config.ip6.is_some() {
                    let text = format!("runtimeConfig.ips: {ip6} is leased to another member of network");
                    return Err(CniError::Refused(format!("{text} \"{}\"; choose another address", network.name)));
                }
                if self.config.ip.is_none() {
                    taken.insert(ip);
                    continue;
                }
            }
            let by_ipv6 = ip6.is_some() && network.router6.is_some();
            match self.client.add_ports(&device.section(name, &network.name, (ip, ip6, by_ipv6), self.config)) {
                Ok(_) => {
                    let place = Place {
                        ip,
                        prefix,
                        router: network.router.filter(|_| self.config.default_route),
                        nameserver: network.gateway,
                        domain: network.domain.clone(),
                        mtu: network.mtu,
                        six: ip6.map(|ip| Place6 {
                            ip,
                            router: network.router6.filter(|_| self.config.default_route),
                            nameserver: network.gateway6,
                        }),
                    };
                    return Ok((name.clone(), place));
                }
                // Another call was faster, or a member that is no port has the name or address.
                Err(ClientError::Refused { status: status @ (400 | 409), fault }) => {
                    // With another address a port of the host is no more free.
                    let named = fault_of_mappings(&fault).or_else(|| fault_of_addresses(&fault, self.config));
                    if let Some(what) = named {
                        return Err(CniError::Refused(what));
                    }
                    let error = ClientError::Refused { status, fault };
                    let text = error.to_string();
                    let fixed =
                        self.config.ip.is_some() || self.config.ip6.is_some_and(|ip6| text.contains(&ip6.to_string()));
                    // A name is given up only where it is what was lost.
                    let of_address =
                        text.contains(&ip.to_string()) || ip6.is_some_and(|ip6| text.contains(&ip6.to_string()));
                    if !of_address {
                        names_lost += 1;
                    }
                    if fixed && (of_address || names_lost >= wanted.len()) {
                        return Err(error.into());
                    }
                    taken.insert(ip);
                    last = Some(error);
                }
                Err(error) => return Err(error.into()),
            }
        }
        Err(last.map_or_else(|| CniError::Refused("no address was found".into()), CniError::from))
    }
}

/// What a port attaches to.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Form<'a> {
    /// A tap of this name in the namespace, and whether a monitor opens it.
    Tap { interface: &'a str, monitor: bool },
    /// A vhost-user socket, and whether the monitor listens there and the fabric connects.
    VhostUser { socket: &'a str, connect: bool },
}

/// The interface that a port is for.
#[derive(Clone, Debug)]
pub(crate) struct Device<'a> {
    pub(crate) identity: &'a str,
    pub(crate) netns: &'a str,
    pub(crate) mac: Mac,
    pub(crate) form: Form<'a>,
    /// Whether it can have an IPv6 address.
    pub(crate) has_ipv6: bool,
}

impl Device<'_> {
    /// Its section of a fabric file, with its addresses, and whether mappings lead to it from IPv6
    /// addresses. All values were checked to be free of quotes and line ends.
    fn section(
        &self,
        name: &str,
        network: &str,
        (ip, ip6, by_ipv6): (Ipv4Addr, Option<Ipv6Addr>, bool),
        config: &Config,
    ) -> String {
        let Device { identity, netns, mac, form, .. } = self;
        let mut text = match form {
            Form::Tap { interface, monitor } => {
                let monitor = if *monitor { "monitor = true\n" } else { "" };
                format!("[tap.{name}]\ndevice = \"{interface}\"\nadopt = true\n{monitor}")
            }
            Form::VhostUser { socket, connect } => {
                format!("[port.{name}]\nkind = \"vhost-user\"\nsocket = \"{socket}\"\nconnect = {connect}\n")
            }
        };
        text.push_str(&format!(
            "network = \"{network}\"\nnetns = \"{netns}\"\nmac = \"{mac}\"\nip = \"{ip}\"\nguard = \"ip\"\n\
             container = \"{identity}\"\n"
        ));
        // The kernel of a virtual machine also takes an address from router advertisements, and
        // uses it as source. So the port learns its addresses, unless the runtime chose one, which
        // then is reserved.
        let listed = match form {
            Form::Tap { .. } => ip6.map(|ip6| vec![ip6]),
            Form::VhostUser { .. } => config.ip6.map(|ip6| vec![ip6, slaac_address(ip6, *mac)]),
        };
        if let Some(listed) = listed {
            let listed: Vec<_> = listed.iter().map(|ip6| format!("\"{ip6}\"")).collect();
            text.push_str(&format!("ip6 = [{}]\n", listed.join(", ")));
        }
        // The container's ingress is what it receives.
        let limits = &config.bandwidth;
        let rates =
            [("send", limits.egress_rate, limits.egress_burst), ("receive", limits.ingress_rate, limits.ingress_burst)];
        let of_way = |(key, rate, burst): (&str, Option<u64>, Option<u64>)| {
            let rate = rate.filter(|rate| *rate != 0)?;
            // 0 is none in the reference plugin. The fabric takes other numbers from 1000 to 10^12;
            // any frame passes a full bucket.
            let burst = burst.filter(|burst| *burst != 0).map(|burst| burst.clamp(1_000, 1_000_000_000_000));
            let burst = burst.map(|burst| format!(", {key}_burst = {burst}")).unwrap_or_default();
            Some(format!("{key} = {rate}{burst}"))
        };
        let rates: Vec<String> = rates.into_iter().filter_map(of_way).collect();
        if !rates.is_empty() {
            text.push_str(&format!("rate = {{ {} }}\n", rates.join(", ")));
        }
        for (protocol, listen, port) in config.listeners(by_ipv6) {
            text.push_str(&format!(
                "[[forward]]\nproto = \"{protocol}\"\nlisten = \"{listen}\"\nto = \"{name}:{port}\"\nnetwork = \"{network}\"\n"
            ));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_found_until_all_are_used() {
        let subnet = (Ipv4Addr::new(10, 1, 2, 0), 29);
        let mut used = BTreeSet::new();
        for _ in 0..6 {
            let ip = free_address(subnet, None, &used, 77).unwrap();
            assert!((1..=6).contains(&ip.octets()[3]) && used.insert(ip), "{ip}");
        }
        assert_eq!(free_address(subnet, None, &used, 77), None);
        assert_eq!(free_address((Ipv4Addr::UNSPECIFIED, 32), None, &BTreeSet::new(), 0), None);
    }

    #[test]
    fn addresses_are_those_of_the_own_machine_where_others_have_some_of_the_subnet() {
        let subnet = (Ipv4Addr::new(10, 87, 0, 0), 24);
        let own = Some(RangeReport { from: [10, 87, 0, 75].into(), to: [10, 87, 0, 134].into() });
        let mut used = BTreeSet::new();
        for n in 0..60u32 {
            let ip = free_address(subnet, own, &used, n.wrapping_mul(0x9e37_79b9)).unwrap();
            assert!((75..=134).contains(&ip.octets()[3]) && used.insert(ip), "{ip}");
        }
        assert_eq!(free_address(subnet, own, &used, 5), None);
    }

    #[test]
    fn a_section_is_one_that_the_fabric_reads() {
        let input = r#"{"cniVersion":"1.0.0","name":"pods","fabric":"demo","runtimeConfig":{"bandwidth":{"egressRate":5000,"egressBurst":7,"ingressRate":6000,"ingressBurst":70000}}}"#;
        let config = crate::request::parse(crate::request::Command::Add, input.as_bytes()).unwrap();
        let identity = config.identity("abc", "eth0");
        let mac = mac_of(&config, &identity);
        let form = Form::Tap { interface: "eth0", monitor: false };
        let device = Device { identity: &identity, netns: "/run/netns/x", mac, form, has_ipv6: true };
        let (ip, ip6) = (Ipv4Addr::new(10, 87, 0, 9), "fd00:1:2:3::a57:9".parse().ok());
        let section = device.section(&plain_name(mac), "lan", (ip, ip6, false), &config);
        let text =
            format!("name = \"demo\"\n[network.lan]\nsubnet = \"10.87.0.0/24\"\nipv6 = \"fd00:1:2:3::/64\"\n{section}");
        let fabric = tombolo_host::file::parse(&text, std::path::Path::new("/x/demo.toml")).unwrap();
        let tap = &fabric.taps[0];
        assert_eq!(tap.container.as_deref(), Some("pods/abc/eth0"));
        assert_eq!(fabric.addresses6("lan")[0].2, Vec::from_iter(ip6));
        let rates = tap.traffic.rates;
        assert_eq!((rates.send.bits, rates.send.burst), (Some(5000), Some(1000)));
        assert_eq!((rates.receive.bits, rates.receive.burst), (Some(6000), Some(70_000)));
        assert!(member_name(&tap.name).is_some());
    }

    #[test]
    fn the_section_of_a_vhost_user_socket_is_one_that_the_fabric_reads() {
        let input = r#"{"cniVersion":"1.1.0","name":"pods","fabric":"demo","vm":"vhost-user"}"#;
        let config = crate::request::parse(crate::request::Command::Add, input.as_bytes()).unwrap();
        let identity = config.identity("abc", "eth0");
        let mac = mac_of(&config, &identity);
        for connect in [false, true] {
            let form = Form::VhostUser { socket: "/run/tombolo/demo/x.sock", connect };
            let device = Device { identity: &identity, netns: "/run/netns/x", mac, form, has_ipv6: true };
            let (ip, ip6) = (Ipv4Addr::new(10, 87, 0, 9), "fd00:1:2:3::a57:9".parse().ok());
            let section = device.section("web", "lan", (ip, ip6, false), &config);
            let text = format!(
                "name = \"demo\"\n[network.lan]\nsubnet = \"10.87.0.0/24\"\nipv6 = \"fd00:1:2:3::/64\"\n{section}"
            );
            let fabric = tombolo_host::file::parse(&text, std::path::Path::new("/x/demo.toml")).unwrap();
            let member = fabric.contained().next().unwrap();
            assert_eq!((member.word, member.name, member.netns), ("port", "web", "/run/netns/x"));
            assert_eq!(member.container, "pods/abc/eth0");
            let socket = Some(PathBuf::from("/run/tombolo/demo/x.sock"));
            assert_eq!(fabric.ports[0].kind, tombolo_host::file::PortKind::VhostUser { socket, queues: 1, connect });
            assert_eq!((fabric.ports[0].mac, fabric.ports[0].ip), (Some(mac), Some(ip)));
            assert_eq!(fabric.addresses6("lan")[0].2, Vec::<Ipv6Addr>::new(), "it learns its addresses");
        }
        // One that the runtime chose is its own, beside that of its MAC address.
        let chosen = Config { ip6: "fd00:1:2:3::77".parse().ok(), ..config };
        let form = Form::VhostUser { socket: "/run/x.sock", connect: false };
        let device = Device { identity: &identity, netns: "/x", mac: Mac([2, 0, 0, 0, 0, 1]), form, has_ipv6: true };
        let section = device.section("web", "lan", (Ipv4Addr::new(10, 87, 0, 9), chosen.ip6, false), &chosen);
        assert!(section.contains("ip6 = [\"fd00:1:2:3::77\", \"fd00:1:2:3:0:ff:fe00:1\"]\n"), "{section}");
    }

    #[test]
    fn names_of_pods_are_used_where_a_member_can_have_them() {
        assert_eq!(member_name("web-7d9c5b8f6-abcde").as_deref(), Some("web-7d9c5b8f6-abcde"));
        for other in ["", "-a", "a-", "A", "a.b", "a-name-that-is-longer-than-24"] {
            assert_eq!(member_name(other), None, "{other}");
        }
    }
}
