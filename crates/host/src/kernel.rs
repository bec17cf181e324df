//! The kernel uplink's part in the host: one nftables table named by the fabric, and forwarding.
//!
//! The tap itself is a port and goes with the process. The table and the sysctl stay when the
//! process is killed. They are in the owner record, and the next `up` or `down` of any fabric
//! undoes them, except for forwarding that a running fabric needs. Fabrics look at each other's
//! records and change forwarding in turns ([`crate::rundir::shared_turn`]).
//!
//! # Theory of operation
//! Guests route through the tap's address. Outwards they are masqueraded. A forward is a DNAT at
//! `prerouting` for connections from elsewhere and at `output` for those of the host itself. A
//! connection from 127.0.0.1 can leave through the tap only with `route_localnet` on it, and its
//! source must become the tap's address. `route_localnet` would also let a guest reach the host's
//! loopback services (CVE-2020-8558 elsewhere). So the table drops what comes from a tap for 127/8,
//! before any other rule looks at it.
//!
//! Guests need `ip_forward`, which makes the host forward between all of its networks. The chain
//! `forward` accepts only what the fabric needs: packets of a network's subnet outwards, answers to
//! them, and connections of its forwards. It drops everything else from or to one of the fabric's
//! taps. If the host did not forward IPv4 before, it also drops traffic from and to other
//! interfaces, except for taps of other fabrics, which have chains of their own. The chain exists
//! before `ip_forward` is set, and is removed after `ip_forward` is restored.
//!
//! # IPv6
//! The tap has ::2 of the network's prefix. With `uplink6 = "masquerade"` all is as for IPv4. With
//! "routed" members keep their addresses, and with a prefix theirs is exchanged for that one and
//! back: both let connections from outside in, since the members' addresses are known there.
//! Whatever translates keeps states: nftables has no stateless NPTv6.
//!
//! Where connections from outside are let in, those to addresses that no member has shown to be its
//! own are bounded: the host would ask the whole network for each address that a scan tries.
//!
//! Linux does not take the answers to a connection from ::1 that was translated: IPv6 has no
//! `route_localnet`. Nor can it translate between the families. [`crate::relay`] does both.
//!
//! A host that begins to forward IPv6 ignores router advertisements and drops the default routes
//! that it learned from them (`accept_ra`, ip-sysctl.rst), unless `accept_ra` is 2. So it becomes 2
//! first, wherever it was 1, and 1 again last.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::file::{self, Proto, Uplink, Uplink6};
use crate::plan::KernelUplink;
use crate::qemu::probe::which;
use crate::routes;
use crate::run::{LIMIT, run};
use crate::rundir::Sysctl;

/// Why the host's part could not be set up.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message names what each field holds")]
pub enum KernelError {
    #[error(
        "the kernel uplink needs nft, which is not in PATH; install it (Debian: apt install nftables), or use uplink = \"user\""
    )]
    NoNft,
    /// `nft` refused the rules.
    #[error(
        "nft {what}: {said}; the kernel uplink needs CAP_NET_ADMIN (run as root) and nf_tables in the kernel, or use uplink = \"user\""
    )]
    Nft { what: &'static str, said: String },
    /// A sysctl could not be read or written.
    #[error("sysctl {key}: {source}; run as root, or use uplink = \"user\"")]
    Sysctl { key: String, source: std::io::Error },
}

/// The name of a fabric's table. Fabric names have no underscore, so two of them never meet.
pub fn table(fabric: &str) -> String {
    format!("tombolo_{}", fabric.replace('-', "_"))
}

/// The chain of a table with the forwards of connections from outside.
const FORWARDS: &str = "forwards";

/// First packets of connections from outside to addresses of a network that no member has shown to
/// be its own: so many in a second, and so many at once. Each may have the host send three
/// neighbour solicitations to all members.
const SILENT_RATE: u32 = 50;
const SILENT_BURST: u32 = 100;
/// How long a member is known after it has answered, and how many are.
const KNOWN_MINUTES: u32 = 10;
const MOST_KNOWN: u32 = 4096;

/// The IPv6 addresses that the file gives to members, by networks.
pub type Fixed6 = BTreeMap<String, BTreeSet<Ipv6Addr>>;

/// How the names of all taps of kernel uplinks begin ([`crate::plan::kernel_device`]).
const DEVICES: &str = "tb-*";

/// The rules of all kernel uplinks of a fabric, as input for `nft -f -`. They replace the table, in
/// one transaction. `fixed` has the addresses that the file gives to members. `forwarding` tells
/// whether the host forwarded IPv4, and IPv6, before there were fabrics.
pub fn rules(fabric: &str, uplinks: &[KernelUplink], fixed: &Fixed6, forwarding: [bool; 2]) -> String {
    let table = table(fabric);
    let (mut inwards, mut outwards) = (String::new(), String::new());
    let (mut sets, mut neighbours) = (String::new(), String::new());
    let mut early = String::new();
    let mut dnat = String::new();
    let mut bounds = String::new();
    let mut source = String::new();
    for (i, uplink) in uplinks.iter().enumerate() {
        let (device, subnet) = (&uplink.device, uplink.network.subnet);
        let _ = writeln!(early, "    iifname \"{device}\" ip daddr 127.0.0.0/8 counter drop");
        // No host outside has an address of the network: one that uses such means to pass for a member
        // or for the gateway.
        let _ = writeln!(inwards, "    iifname != \"{device}\" oifname \"{device}\" ip saddr {subnet} counter drop");
        let _ = writeln!(source, "    ip saddr {subnet} oifname != \"{device}\" counter masquerade");
        // A member that comes by a forward to a member of its own network: the answer has to come
        // back through the host.
        let _ = writeln!(source, "    ip saddr {subnet} oifname \"{device}\" ct status dnat counter masquerade");
        let _ = writeln!(source, "    ip saddr 127.0.0.0/8 oifname \"{device}\" counter masquerade");
        if uplink.network.router6().is_some()
            && let Some(base) = uplink.network.ipv6
        {
            if bounded(&uplink.network).is_some() {
                let name = &uplink.network.name;
                let fixed = fixed.get(name).into_iter().flatten();
                let (members, known) = (members_of(name), (fixed_of(name), elements_of(fixed)));
                silent(i, (&members, known), device, base, [&mut sets, &mut neighbours, &mut outwards, &mut bounds]);
            }
            six(uplink, base, [&mut inwards, &mut outwards, &mut dnat, &mut source]);
        }
        // Answers and forwards come in, nothing else; what leaves has an address of the network.
        let _ = writeln!(inwards, "    oifname \"{device}\" ip daddr {subnet} ct state established,related accept");
        let _ = writeln!(inwards, "    oifname \"{device}\" ip daddr {subnet} ct status dnat accept");
        let _ = writeln!(inwards, "    oifname \"{device}\" counter drop");
        let _ = writeln!(outwards, "    iifname \"{device}\" ip saddr {subnet} accept");
        let _ = writeln!(outwards, "    iifname \"{device}\" counter drop");
        for f in &uplink.forwards {
            let (ip, port) = (f.listen.ip(), f.listen.port());
            let (host, to) = match (ip, f.ip) {
                (IpAddr::V4(ip), IpAddr::V4(_)) if ip.is_unspecified() => {
                    ("meta nfproto ipv4 fib daddr type local".into(), "ip")
                }
                (IpAddr::V4(ip), IpAddr::V4(_)) => (format!("ip daddr {ip}"), "ip"),
                (IpAddr::V6(ip), IpAddr::V6(_)) if ip.is_unspecified() => {
                    ("ip6 daddr != ::1 fib daddr type local".into(), "ip6")
                }
                (IpAddr::V6(ip), IpAddr::V6(_)) if !ip.is_loopback() => (format!("ip6 daddr {ip}"), "ip6"),
                // The relay's.
                _ => continue,
            };
            let target = std::net::SocketAddr::new(f.ip, f.port);
            let _ = writeln!(dnat, "    {host} {} dport {port} counter dnat {to} to {target}", f.proto.word());
        }
    }
    let routes6 = uplinks.iter().any(|uplink| uplink.network.router6().is_some());
    let newly = [("ipv4", !forwarding[0]), ("ipv6", !forwarding[1] && routes6)];
    let mut rest = String::new();
    for (family, _) in newly.into_iter().filter(|(_, newly)| *newly) {
        let _ = writeln!(rest, "    meta nfproto {family} iifname \"{DEVICES}\" accept");
        let _ = writeln!(rest, "    meta nfproto {family} oifname \"{DEVICES}\" accept");
        let _ = writeln!(rest, "    meta nfproto {family} counter drop");
    }
    format!(
        "table inet {table} {{}}\ndelete table inet {table}\ntable inet {table} {{\n{sets}  \
         chain early {{\n    type filter hook prerouting priority raw; policy accept;\n{early}  }}\n  \
         chain forward {{\n    type filter hook forward priority filter; policy accept;\n{inwards}{outwards}{rest}  }}\n  \
         chain {FORWARDS} {{\n    type nat hook prerouting priority dstnat; policy accept;\n{dnat}  }}\n  \
         chain own {{\n    type nat hook output priority -100; policy accept;\n{dnat}  }}\n  \
         chain source {{\n    type nat hook postrouting priority srcnat; policy accept;\n{bounds}{source}  }}\n  \
         chain neighbours {{\n    type filter hook input priority filter; policy accept;\n{neighbours}  }}\n}}\n"
    )
}

/// Bounds the solicitations that packets from outside cause. Behind a prefix of 2^64 addresses
/// nearly all are unused: the host asks all members of the network for each address that a scan
/// tries, and its table of neighbours fills up. Members that answer are known for a while, and
/// packets to them are not bounded. The limit is where addresses are translated, which sees the
/// first packets of connections only: in a filter it would judge each frame, so that the bypass
/// could take none that it may concern.
///
/// A member is known by its neighbour discovery with the host, and by connections that it opens:
/// not every system answers the host's link-local address from an address of the prefix. Addresses
/// that the file gives to members are in a set of their own, which no member can fill.
fn silent(
    i: usize,
    (members, (fixed, elements)): (&str, (String, Option<String>)),
    device: &str,
    base: Ipv6Addr,
    [sets, neighbours, outwards, bounds]: [&mut String; 4],
) {
    let elements = elements.map(|elements| format!("elements = {{ {elements} }}; ")).unwrap_or_default();
    let _ = writeln!(
        sets,
        "  set {members} {{ type ipv6_addr; flags dynamic,timeout; timeout {KNOWN_MINUTES}m; size {MOST_KNOWN}; }}\n  \
         set {fixed} {{ type ipv6_addr; {elements}}}\n  \
         counter silent_{i} {{ }}"
    );
    let _ = writeln!(
        neighbours,
        "    iifname \"{device}\" ip6 saddr {base}/64 icmpv6 type {{ nd-neighbor-advert, nd-neighbor-solicit }} \
         update @{members} {{ ip6 saddr }}"
    );
    let _ = writeln!(
        outwards,
        "    iifname \"{device}\" ip6 saddr {base}/64 ct state new update @{members} {{ ip6 saddr }}"
    );
    let _ = writeln!(
        bounds,
        "    oifname \"{device}\" ip6 daddr {base}/64 fib saddr type != local ip6 daddr != @{fixed} ip6 daddr != @{members} \
         limit rate over {SILENT_RATE}/second burst {SILENT_BURST} packets counter name \"silent_{i}\" drop"
    );
}

/// The rules for IPv6 of one uplink, whose network has the prefix `base`: those of the chains
/// `forward` inwards and outwards, `forwards` and `source`.
fn six(uplink: &KernelUplink, base: Ipv6Addr, [inwards, outwards, dnat, source]: [&mut String; 4]) {
    let (device, own) = (&uplink.device, format!("{base}/64"));
    let known = match uplink.network.uplink6 {
        Uplink6::Routed | Uplink6::Prefix(_) => "",
        Uplink6::Masquerade | Uplink6::Off => " ct state established,related",
    };
    let _ = writeln!(inwards, "    iifname != \"{device}\" oifname \"{device}\" ip6 saddr {own} counter drop");
    let _ = writeln!(inwards, "    oifname \"{device}\" ip6 daddr {own}{known} accept");
    let _ = writeln!(inwards, "    oifname \"{device}\" ip6 daddr {own} ct status dnat accept");
    let _ = writeln!(outwards, "    iifname \"{device}\" ip6 saddr {own} accept");
    let _ = writeln!(source, "    ip6 saddr {own} oifname \"{device}\" ct status dnat counter masquerade");
    match uplink.network.uplink6 {
        Uplink6::Masquerade => {
            let _ = writeln!(source, "    ip6 saddr {own} oifname != \"{device}\" counter masquerade");
        }
        Uplink6::Prefix(other) => {
            let other = format!("{other}/64");
            let _ = writeln!(
                source,
                "    ip6 saddr {own} oifname != \"{device}\" counter snat ip6 prefix to ip6 saddr map {{ {own} : {other} }}"
            );
            let _ =
                writeln!(dnat, "    ip6 daddr {other} counter dnat ip6 prefix to ip6 daddr map {{ {other} : {own} }}");
        }
        Uplink6::Routed | Uplink6::Off => {}
    }
}

fn nft(what: &'static str, text: &str) -> Result<(), KernelError> {
    let program = which("nft").ok_or(KernelError::NoNft)?;
    let failed = |said: String| KernelError::Nft { what, said };
    let mut command = Command::new(program);
    let output = run(command.args(["-f", "-"]), text.as_bytes(), LIMIT).map_err(|e| failed(e.to_string()))?;
    if output.status.success() {
        return Ok(());
    }
    Err(failed(String::from_utf8_lossy(&output.stderr).lines().next().unwrap_or("no word").to_string()))
}

/// Whether this network namespace has such a table.
pub fn has_table(table: &str) -> Result<bool, KernelError> {
    let program = which("nft").ok_or(KernelError::NoNft)?;
    let mut command = Command::new(program);
    let output = run(command.args(["list", "tables", "inet"]), b"", LIMIT);
    let output = output.map_err(|e| KernelError::Nft { what: "list tables inet", said: e.to_string() })?;
    Ok(String::from_utf8_lossy(&output.stdout).lines().any(|line| line.trim() == format!("table inet {table}")))
}

/// Listeners that the rules of other fabrics have in this network namespace, each with the fabric's
/// name. No socket shows them. Without nft, or the right to ask it, none are known.
pub(crate) fn listeners_of_others(fabric: &str) -> Vec<(String, Proto, SocketAddr)> {
    let Some(program) = which("nft") else { return vec![] };
    let nft = |words: &[&str]| {
        let output = run(Command::new(&program).args(words), b"", LIMIT).ok().filter(|output| output.status.success());
        output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default()
    };
    let own = table(fabric);
    let mut out = Vec::new();
    for table in nft(&["list", "tables", "inet"]).lines().filter_map(|line| line.trim().strip_prefix("table inet ")) {
        let Some(other) = table.strip_prefix("tombolo_").filter(|_| table != own) else { continue };
        let listeners = listeners(&nft(&["-j", "list", "chain", "inet", table, FORWARDS]));
        out.extend(listeners.into_iter().map(|(proto, at)| (other.replace('_', "-"), proto, at)));
    }
    out
}

/// The listeners of a chain of forwards as [`rules`] makes it, from nft's JSON
/// (libnftables-json(5)). What is not understood is left out.
fn listeners(json: &str) -> Vec<(Proto, SocketAddr)> {
    let Ok(value) = serde_json::from_str::<serde_json::Value>(json) else { return vec![] };
    let rules =
        value["nftables"].as_array().into_iter().flatten().filter_map(|object| object["rule"]["expr"].as_array());
    let of_rule = |all: &Vec<serde_json::Value>| {
        let to = all.iter().find_map(|e| e.get("dnat"))?;
        let matches = || all.iter().filter_map(|e| e.get("match"));
        let payload = |protocol: &str, field: &str| {
            let is_it = |m: &&serde_json::Value| {
                m["op"] == "=="
                    && m["left"]["payload"]["protocol"] == protocol
                    && m["left"]["payload"]["field"] == field
            };
            matches().find(is_it).map(|m| &m["right"])
        };
        let port = |proto: Proto| Some((proto, payload(proto.word(), "dport")?.as_u64()?));
        let (proto, port) = port(Proto::Tcp).or_else(|| port(Proto::Udp))?;
        let (family, any) = match to["family"].as_str()? {
            "ip" => ("ip", IpAddr::V4(Ipv4Addr::UNSPECIFIED)),
            "ip6" => ("ip6", IpAddr::V6(Ipv6Addr::UNSPECIFIED)),
            _ => return None,
        };
        let ip = payload(family, "daddr").map_or(Some(any), |ip| ip.as_str()?.parse().ok())?;
        Some((proto, SocketAddr::new(ip, u16::try_from(port).ok()?)))
    };
    rules.filter_map(of_rule).collect()
}

/// The set of a network's members that have shown an address to be theirs. Names of networks have
/// no underscore.
fn members_of(network: &str) -> String {
    format!("members_{}", network.replace('-', "_"))
}

/// The set of the addresses that the file gives to a network's members.
fn fixed_of(network: &str) -> String {
    format!("fixed_{}", network.replace('-', "_"))
}

/// Addresses as elements of a set; `None` for none, for which nft has no word.
fn elements_of<'a>(addresses: impl IntoIterator<Item = &'a Ipv6Addr>) -> Option<String> {
    let all: Vec<_> = addresses.into_iter().map(Ipv6Addr::to_string).collect();
    (!all.is_empty()).then(|| all.join(", "))
}

/// The prefix of a network for which packets from outside to addresses that no member has are
/// bounded.
pub fn bounded(network: &file::Network) -> Option<Ipv6Addr> {
    let base = network.router6().and(network.ipv6)?;
    network.uplink6.lets_in().then_some(base)
}

/// Puts other addresses of a network's members into the rules that are in force.
pub fn set_fixed6(fabric: &str, network: &str, addresses: &BTreeSet<Ipv6Addr>) -> Result<(), KernelError> {
    let (table, set) = (table(fabric), fixed_of(network));
    let mut text = format!("flush set inet {table} {set}\n");
    if let Some(all) = elements_of(addresses) {
        let _ = writeln!(text, "add element inet {table} {set} {{ {all} }}");
    }
    nft("-f - (addresses of members)", &text)
}

/// Puts the rules in force. Members that are known stay known: the table is another one, and an
/// idle member says nothing before it is asked.
pub fn apply(fabric: &str, uplinks: &[KernelUplink], fixed: &Fixed6, forwarding: [bool; 2]) -> Result<(), KernelError> {
    let mut text = rules(fabric, uplinks, fixed, forwarding);
    let table = table(fabric);
    for uplink in uplinks.iter().filter(|uplink| uplink.network.uplink6.lets_in()) {
        let (set, Some(base)) = (members_of(&uplink.network.name), uplink.network.ipv6) else { continue };
        let line = format!("  set {set} {{");
        if !text.contains(&line) {
            continue;
        }
        let known = known(&table, &set).into_iter().filter(|ip| ip.segments()[..4] == base.segments()[..4]);
        let known: Vec<_> = known.map(|ip| ip.to_string()).collect();
        if !known.is_empty() {
            let _ = writeln!(text, "add element inet {table} {set} {{ {} }}", known.join(", "));
        }
    }
    nft("-f - (making the table)", &text)
}

/// The addresses in a set of the table that is in force; none where there is no such set.
fn known(table: &str, set: &str) -> Vec<Ipv6Addr> {
    let Some(program) = which("nft") else { return vec![] };
    let output = run(Command::new(program).args(["-j", "list", "set", "inet", table, set]), b"", LIMIT);
    let said = output.ok().filter(|output| output.status.success()).map(|output| output.stdout).unwrap_or_default();
    elements(&String::from_utf8_lossy(&said))
}

/// The elements of a set of addresses, from nft's JSON: each is the address, or has it beside its
/// timeout.
fn elements(json: &str) -> Vec<Ipv6Addr> {
    let Ok(value) = serde_json::from_str::<serde_json::Value>(json) else { return vec![] };
    let sets = value["nftables"].as_array().into_iter().flatten().filter_map(|object| object["set"]["elem"].as_array());
    let address = |element: &serde_json::Value| {
        element["elem"]["val"].as_str().or(element.as_str()).and_then(|text| text.parse().ok())
    };
    sets.flatten().filter_map(address).collect()
}

/// Removes a table; one that is not there is no error.
pub fn remove(table: &str) -> Result<(), KernelError> {
    nft("-f - (removing the table)", &format!("table inet {table} {{}}\ndelete table inet {table}\n"))
}

/// How the host looks for guests on its tap (arp(7)): a connection to one that is gone is refused
/// within about a second if it was silent before, and within four if it was just spoken to; with
/// the kernel's defaults that takes up to a minute. The neighbours of a guest on the same machine
/// answer within milliseconds. The settings go with the tap.
pub const NEIGHBOURS: [(&str, &str); 3] =
    [("base_reachable_time_ms", "1000"), ("delay_first_probe_time", "1"), ("retrans_time_ms", "250")];

/// Whether this machine forwards IPv4.
pub const IP_FORWARD: &str = "net/ipv4/ip_forward";

/// The sysctls that setting and restoring [`IP_FORWARD`] changes, with their values, itself first.
/// The kernel's own changes (ip-sysctl.rst, "ip_forward"; `inet_forward_change` of
/// net/ipv4/devinet.c): each interface's `forwarding` follows it, and `accept_redirects` of all
/// becomes its opposite. A machine that forwards already is left as it is.
pub fn forwarding() -> Result<Vec<Sysctl>, KernelError> {
    let own = get(IP_FORWARD)?;
    if own.before == "1" {
        return Ok(vec![own]);
    }
    let mut all = vec![own, get("net/ipv4/conf/all/accept_redirects")?];
    let interfaces = std::fs::read_dir(sysctl_path("net/ipv4/conf"));
    let names = interfaces.into_iter().flatten().flatten().filter_map(|entry| entry.file_name().into_string().ok());
    // An interface may go meanwhile.
    let each =
        names.filter(|name| name != "all").filter_map(|name| get(&format!("net/ipv4/conf/{name}/forwarding")).ok());
    all.extend(each.filter(|sysctl| sysctl.before == "1"));
    Ok(all)
}

/// Whether this machine forwards IPv6; all its interfaces follow it.
pub const FORWARD6: &str = "net/ipv6/conf/all/forwarding";

/// Whether this machine has IPv6 at all.
pub fn has_ipv6() -> bool {
    sysctl_path(FORWARD6).exists()
}

/// As [`forwarding`], for [`FORWARD6`]: each interface's `forwarding` follows it. An interface that
/// takes router advertisements has to be told that it goes on with that; `accept_ra` is last, so
/// that it is restored when the rest is.
pub fn forwarding6() -> Result<Vec<Sysctl>, KernelError> {
    let own = get(FORWARD6)?;
    if own.before == "1" {
        return Ok(vec![own]);
    }
    let interfaces = std::fs::read_dir(sysctl_path("net/ipv6/conf"));
    let names = interfaces.into_iter().flatten().flatten().filter_map(|entry| entry.file_name().into_string().ok());
    let names: Vec<String> = names.filter(|name| name != "all").collect();
    // An interface may go meanwhile.
    let with = |key: &str| {
        let key = key.to_string();
        let each = names.iter().filter_map(move |name| get(&format!("net/ipv6/conf/{name}/{key}")).ok());
        each.filter(|sysctl| sysctl.before == "1").collect::<Vec<_>>()
    };
    let all = [vec![own], with("forwarding"), with("accept_ra")].concat();
    Ok(all)
}

/// Has this machine forward IPv6, and go on with router advertisements where it took them: `before`
/// is from [`forwarding6`].
pub fn forward6(before: &[Sysctl]) -> Result<(), KernelError> {
    for sysctl in before.iter().filter(|s| s.key.ends_with("/accept_ra")) {
        match set(&sysctl.key, "2") {
            Err(KernelError::Sysctl { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {}
            other => other?,
        }
    }
    set(FORWARD6, "1")
}

/// Whether [`leads_out6`] of a network follows from the host's routes, which have to be looked at
/// again and again.
pub fn follows_routes6(network: &crate::file::Network) -> bool {
    network.uplink == Uplink::Kernel
        && network.router6().is_some()
        && matches!(network.uplink6, Uplink6::Masquerade | Uplink6::Prefix(_))
}

/// Whether members of the uplink's network get anywhere with IPv6.
pub fn leads_out6(network: &crate::file::Network) -> bool {
    match network.uplink6 {
        Uplink6::Off => false,
        Uplink6::Routed => has_ipv6(),
        Uplink6::Masquerade | Uplink6::Prefix(_) => routes::host_has_default6(),
    }
}

/// Whether a device has an address that it still looks for duplicates of, from the text of
/// /proc/net/if_inet6.
fn is_tentative(table: &str, device: &str) -> bool {
    routes::addresses6(table).any(|address| address.device == device && address.is_tentative)
}

/// Switches IPv6 on at the tap of an uplink; with `reset` it loses the addresses that it had. Its
/// link-local address follows from a MAC address that the switch keeps for it, so it does not look
/// for duplicates: as long as it does, for a second or two, the kernel asks for no neighbours, and
/// what is forwarded to members is refused.
pub fn open_ipv6(device: &str, reset: bool) -> Result<(), KernelError> {
    let key = format!("net/ipv6/conf/{device}/disable_ipv6");
    if !Path::new(&sysctl_path(&key)).exists() {
        return Ok(());
    }
    set(&format!("net/ipv6/conf/{device}/accept_dad"), "0")?;
    if reset || is_tentative(&std::fs::read_to_string("/proc/net/if_inet6").unwrap_or_default(), device) {
        set(&key, "1")?;
    }
    set(&key, "0")
}

/// Puts sysctls back, in order. One that was not changed is left alone, and one of an interface
/// that is gone is forgotten.
pub fn restore(sysctls: &[Sysctl]) -> Result<(), KernelError> {
    for sysctl in sysctls {
        match get(&sysctl.key) {
            Ok(now) if now.before == sysctl.before => {}
            Ok(_) => set(&sysctl.key, &sysctl.before)?,
            Err(KernelError::Sysctl { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn sysctl_path(key: &str) -> PathBuf {
    PathBuf::from("/proc/sys").join(key)
}

/// The value of a sysctl, which is to be recorded before [`set`] changes it.
pub fn get(key: &str) -> Result<Sysctl, KernelError> {
    let read = std::fs::read_to_string(sysctl_path(key));
    let before = read.map_err(|source| KernelError::Sysctl { key: key.into(), source })?.trim().to_string();
    Ok(Sysctl { key: key.into(), before })
}

/// Sets a sysctl.
pub fn set(key: &str, value: &str) -> Result<(), KernelError> {
    std::fs::write(sysctl_path(key), value).map_err(|source| KernelError::Sysctl { key: key.into(), source })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file;
    use std::io::Write as _;
    use std::path::Path;
    use std::process::Stdio;

    const SIX: &str = "ipv6 = \"fd00:1:2:3::/64\"\n";

    fn uplinks(six: &str) -> Vec<KernelUplink> {
        let text = format!(
            "name = \"a-b\"\n[network.lan]\nuplink = \"kernel\"\n{six}\
            [[forward]]\nlisten = \"127.0.0.1:8080\"\nto = \"10.87.0.9:80\"\n\
            [[forward]]\nproto = \"udp\"\nlisten = \"0.0.0.0:53\"\nto = \"10.87.0.9:5353\"\n"
        );
        let fabric = file::parse(&text, Path::new("t.toml")).unwrap();
        fabric.networks.iter().filter_map(|n| crate::plan::uplink(&fabric, n).1).collect()
    }

    #[test]
    fn listeners_of_another_fabric_are_read_from_what_nft_says() {
        // nft 1.0.6, of rules as above.
        let json = r#"{"nftables": [{"metainfo": {"version": "1.0.6", "json_schema_version": 1}},
            {"chain": {"family": "inet", "table": "tombolo_a", "name": "forwards", "handle": 1, "hook": "prerouting"}},
            {"rule": {"expr": [{"match": {"op": "==", "left": {"meta": {"key": "nfproto"}}, "right": "ipv4"}},
                {"match": {"op": "==", "left": {"fib": {"result": "type", "flags": ["daddr"]}}, "right": "local"}},
                {"match": {"op": "==", "left": {"payload": {"protocol": "tcp", "field": "dport"}}, "right": 8080}},
                {"counter": {"packets": 0, "bytes": 0}}, {"dnat": {"family": "ip", "addr": "10.1.2.3", "port": 80}}]}},
            {"rule": {"expr": [{"match": {"op": "==", "left": {"payload": {"protocol": "ip6", "field": "daddr"}}, "right": "fd00::1"}},
                {"match": {"op": "==", "left": {"payload": {"protocol": "udp", "field": "dport"}}, "right": 53}},
                {"dnat": {"family": "ip6", "addr": "fd01::2", "port": 53}}]}},
            {"rule": {"expr": [{"match": {"op": "==", "left": {"payload": {"protocol": "ip6", "field": "daddr"}}, "right": "fd00::"}},
                {"dnat": {"family": "ip6", "addr": "fd01::2"}}]}},
            {"rule": {"expr": 7}}, {"rule": {"expr": [{"dnat": {"family": "ip", "addr": "10.1.2.3"}}]}}]}"#;
        let expected = [(Proto::Tcp, "0.0.0.0:8080".parse().unwrap()), (Proto::Udp, "[fd00::1]:53".parse().unwrap())];
        assert_eq!(listeners(json), expected);
        for other in ["", "{}", "[]", r#"{"nftables":[7,{"rule":{}}]}"#, r#"{"nftables":{}}"#] {
            assert!(listeners(other).is_empty(), "{other}");
        }
    }

    #[test]
    fn known_members_are_read_from_what_nft_says() {
        // nft 1.0.6.
        let json = r#"{"nftables": [{"metainfo": {"json_schema_version": 1}}, {"set": {"family": "inet", "name": "members_lan",
            "table": "tombolo_a", "type": "ipv6_addr", "handle": 2, "size": 4096, "flags": ["timeout", "dynamic"], "timeout": 600,
            "elem": [{"elem": {"val": "fd00::5", "timeout": 600, "expires": 597}}, "fd00::6", 7, {"elem": {}}]}}]}"#;
        assert_eq!(elements(json), ["fd00::5", "fd00::6"].map(|ip| ip.parse::<Ipv6Addr>().unwrap()));
        for other in ["", "{}", r#"{"nftables":[{"set":{}},{"set":{"elem":3}}]}"#] {
            assert!(elements(other).is_empty(), "{other}");
        }
    }

    #[test]
    fn the_table_says_what_the_file_says() {
        let text = rules("a-b", &uplinks(SIX), &Fixed6::new(), [false; 2]);
        assert!(text.starts_with("table inet tombolo_a_b {}\ndelete table inet tombolo_a_b\n"));
        for line in [
            "iifname \"tb-a-b-lan\" ip daddr 127.0.0.0/8 counter drop",
            "ip daddr 127.0.0.1 tcp dport 8080 counter dnat ip to 10.87.0.9:80",
            "meta nfproto ipv4 fib daddr type local udp dport 53 counter dnat ip to 10.87.0.9:5353",
            "ip6 saddr fd00:1:2:3::/64 oifname != \"tb-a-b-lan\" counter masquerade",
            "oifname \"tb-a-b-lan\" ip6 daddr fd00:1:2:3::/64 ct state established,related accept",
            "meta nfproto ipv6 counter drop",
            "ip saddr 10.87.0.0/24 oifname != \"tb-a-b-lan\" counter masquerade",
            "iifname \"tb-a-b-lan\" ip saddr 10.87.0.0/24 accept",
            "iifname \"tb-a-b-lan\" counter drop",
            "oifname \"tb-a-b-lan\" counter drop",
            "meta nfproto ipv4 counter drop",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
        let text = rules("a-b", &uplinks(SIX), &Fixed6::new(), [true, false]);
        assert!(!text.contains("meta nfproto ipv4 counter drop"), "a host that forwarded before goes on\n{text}");
        assert!(text.contains("meta nfproto ipv6 counter drop"), "{text}");
        let text = rules("a-b", &uplinks("ipv6 = \"off\"\n"), &Fixed6::new(), [false; 2]);
        assert!(!text.contains("ip6") && !text.contains("ipv6"), "IPv6 is left alone\n{text}");
    }

    #[test]
    fn the_ways_out_for_ipv6_differ_in_what_they_translate_and_let_in() {
        let fixed =
            Fixed6::from([("lan".into(), ["fd00:1:2:3::7", "fd00:1:2:3::8"].map(|ip| ip.parse().unwrap()).into())]);
        let of = |way: &str| rules("a-b", &uplinks(&format!("{SIX}uplink6 = {way}\n")), &fixed, [false; 2]);
        let routed = of("\"routed\"");
        assert!(routed.contains("oifname \"tb-a-b-lan\" ip6 daddr fd00:1:2:3::/64 accept"), "{routed}");
        assert!(!routed.contains("ip6 saddr fd00:1:2:3::/64 oifname !="), "{routed}");
        let bounded = "ip6 daddr != @fixed_lan ip6 daddr != @members_lan limit rate over 50/second burst 100 packets counter name \"silent_0\" drop";
        // Before all that translates and so ends the chain.
        let nat = routed.split("type nat hook postrouting").nth(1).unwrap();
        assert!(nat.lines().nth(1).unwrap().contains(bounded), "{routed}");
        let set = "set fixed_lan { type ipv6_addr; elements = { fd00:1:2:3::7, fd00:1:2:3::8 }; }\n";
        assert!(routed.contains(set), "{routed}");
        let without = rules("a-b", &uplinks(&format!("{SIX}uplink6 = \"routed\"\n")), &Fixed6::new(), [false; 2]);
        assert!(without.contains("set fixed_lan { type ipv6_addr; }\n"), "{without}");
        let masquerade = of("\"masquerade\"");
        assert!(!masquerade.contains("silent") && !masquerade.contains("fixed_"), "only answers come in");
        let prefix = of("{ prefix = \"2001:db8:5:6::/64\" }");
        for line in [
            "snat ip6 prefix to ip6 saddr map { fd00:1:2:3::/64 : 2001:db8:5:6::/64 }",
            "dnat ip6 prefix to ip6 daddr map { 2001:db8:5:6::/64 : fd00:1:2:3::/64 }",
        ] {
            assert!(prefix.contains(line), "{prefix}");
        }
    }

    #[test]
    fn routes_are_looked_at_only_for_networks_that_depend_on_them() {
        let follows = |lines: &str| {
            let text = format!("name = \"a\"\n[network.lan]\n{lines}");
            follows_routes6(&file::parse(&text, Path::new("t.toml")).unwrap().networks[0])
        };
        for (lines, expected) in [
            (String::new(), false),
            ("uplink = \"user\"\n".into(), false),
            ("uplink = \"kernel\"\n".into(), true),
            ("uplink = \"kernel\"\nipv6 = \"off\"\n".into(), false),
            (format!("uplink = \"kernel\"\n{SIX}uplink6 = \"off\"\n"), false),
            (format!("uplink = \"kernel\"\n{SIX}uplink6 = \"routed\"\n"), false),
            (format!("uplink = \"kernel\"\n{SIX}uplink6 = {{ prefix = \"2001:db8:5:6::/64\" }}\n"), true),
        ] {
            assert_eq!(follows(&lines), expected, "{lines}");
        }
    }

    #[test]
    fn an_address_is_tentative_by_its_flag() {
        let table = "fe800000000000000000000000000001 02 40 20 80 eth0\nfe800000000000000000000000000002 03 40 20 c0 tb-a-lan\n";
        assert!(is_tentative(table, "tb-a-lan") && !is_tentative(table, "eth0") && !is_tentative("x", "eth0"));
    }

    #[test]
    fn nft_takes_the_rules() {
        let Some(nft) = which("nft") else {
            return tombolo_testing::skip("nft is not installed");
        };
        // In a namespace of its own, checked without being put in force.
        let mut child = match Command::new("unshare")
            .args(["-rn", &nft.display().to_string(), "-c", "-f", "-"])
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
        {
            Ok(child) => child,
            Err(error) => return tombolo_testing::skip(format!("unshare: {error}")),
        };
        let prefix = format!(
            "{SIX}uplink6 = {{ prefix = \"2001:db8:5:6::/64\" }}\n[[forward]]\nlisten = \"[::]:80\"\nto = \"[fd00:1:2:3::9]:80\"\n"
        );
        let fixed = Fixed6::from([("lan".into(), ["fd00:1:2:3::7".parse().unwrap()].into())]);
        let all = [
            rules("a-b", &uplinks(SIX), &Fixed6::new(), [false; 2]),
            rules("a-c", &uplinks(&prefix), &fixed, [false; 2]),
        ]
        .concat();
        assert!(
            all.contains("ip6 daddr != ::1 fib daddr type local tcp dport 80 counter dnat ip6 to [fd00:1:2:3::9]:80")
        );
        child.stdin.take().unwrap().write_all(all.as_bytes()).unwrap();
        let out = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        if said.contains("unshare failed") || said.contains("Operation not permitted") {
            return tombolo_testing::skip(said.trim().replace('\n', "; "));
        }
        assert!(out.status.success(), "{said}");
    }
}
