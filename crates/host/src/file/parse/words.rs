//! Texts of a fabric file as values: names, sizes, addresses.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;

use crate::file::model::Target;

/// A name usable in files, devices and DNS: 1 to 24 of a-z, 0-9 and `-`, not at an end.
pub(in crate::file) fn clean_name(name: &str) -> Option<String> {
    let ok = (1..=24).contains(&name.len())
        && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
        && !name.starts_with('-')
        && !name.ends_with('-');
    ok.then(|| name.to_string())
}

/// The name that was probably meant by one that is none, as a hint: `web-1` for `Web_1`.
pub(super) fn near_name(name: &str) -> Option<String> {
    let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' };
    let text: String = name.chars().map(plain).take(24).collect();
    // Of runs of other characters one hyphen is left.
    let words: Vec<_> = text.split('-').filter(|word| !word.is_empty()).collect();
    clean_name(&words.join("-")).map(|name| format!("did you mean \"{name}\"?"))
}

/// A fabric's name is that of a folder beside the one in which services listen
/// (`tombolo_rpc::folder`).
pub(super) fn fabric_name(name: &str) -> Option<String> {
    clean_name(name).filter(|name| name != "services")
}

pub(super) fn interface_name(name: &str) -> Option<String> {
    let ok = (1..=15).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_graphic() && b != b'/' && b != b':');
    (ok && name != "." && name != "..").then(|| name.to_string())
}

/// What identifies an attachment of CNI: network, container and interface.
pub(super) fn container_id(text: &str) -> Option<String> {
    let ok = (1..=400).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_./".contains(&b));
    ok.then(|| text.to_string())
}

/// A name that `xl` gives a domain.
pub(super) fn domain_of_xen(name: &str) -> Option<String> {
    let ok = (1..=64).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_graphic() && b != b'/');
    ok.then(|| name.to_string())
}

/// QEMU's word for the format that a disk's name tells.
pub(super) fn format_of(path: &Path) -> String {
    if path.extension().is_some_and(|e| e == "qcow2") { "qcow2" } else { "raw" }.to_string()
}

pub(super) fn size_mib(text: &str) -> Option<u32> {
    let (digits, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit())?);
    let factor = match unit {
        "M" | "MiB" => 1,
        "G" | "GiB" => 1024,
        _ => return None,
    };
    digits.parse::<u32>().ok()?.checked_mul(factor).filter(|m| (1..=1 << 20).contains(m))
}

/// A size in bytes: "64K", "1M", "0".
pub(super) fn size_bytes(text: &str) -> Option<u64> {
    if text == "0" {
        return Some(0);
    }
    let (digits, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit())?);
    let shift = match unit {
        "K" | "KiB" => 10,
        "M" | "MiB" => 20,
        "G" | "GiB" => 30,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

pub(super) fn server(text: &str) -> Option<SocketAddr> {
    let address = text.parse::<IpAddr>().map(|ip| SocketAddr::new(ip, 53));
    address.or_else(|_| text.parse::<SocketAddr>()).ok()
}

/// Where a forward listens: no group, no link-local address, and no IPv4 address in IPv6's clothes.
pub(in crate::file) fn listener(text: &str) -> Option<SocketAddr> {
    let at: SocketAddr = text.parse().ok()?;
    let usable = match at.ip() {
        IpAddr::V4(ip) => !ip.is_multicast() && !ip.is_broadcast(),
        IpAddr::V6(ip) => !ip.is_multicast() && !ip.is_unicast_link_local() && ip.to_ipv4_mapped().is_none(),
    };
    (usable && at.port() != 0).then_some(at)
}

/// What a listener that is none may have meant.
pub(in crate::file) fn near_listener(text: &str) -> Option<String> {
    if let Ok(at) = text.parse::<SocketAddr>() {
        return match at.ip() {
            _ if at.port() == 0 => Some("the port is a number from 1 to 65535".into()),
            IpAddr::V6(ip) if ip.is_unicast_link_local() => {
                Some("a link-local address belongs to one interface; give another address of it, or [::]".into())
            }
            IpAddr::V6(ip) => {
                ip.to_ipv4_mapped().map(|ip| format!("did you mean \"{}\"?", SocketAddr::new(ip.into(), at.port())))
            }
            IpAddr::V4(_) => None,
        };
    }
    if let Some((_, meant)) = bracketed(text) {
        return Some(meant);
    }
    let (host, port) = text.rsplit_once(':').unwrap_or(("", text));
    let port: u16 = port.parse().ok().filter(|port| *port != 0)?;
    match host {
        "*" => Some(format!("all addresses are \"0.0.0.0:{port}\", those of IPv6 \"[::]:{port}\"")),
        "" | "localhost" => Some(format!("did you mean \"127.0.0.1:{port}\", or \"[::1]:{port}\" for IPv6?")),
        _ => None,
    }
}

/// An IPv6 address and a port without brackets around the address: what was meant, and how to say
/// it.
pub(super) fn bracketed(text: &str) -> Option<(SocketAddr, String)> {
    let (address, port) = text.rsplit_once(':')?;
    let ip: Ipv6Addr = address.parse().ok().filter(|_| !address.starts_with('['))?;
    let meant = SocketAddr::new(ip.into(), port.parse().ok().filter(|port| *port != 0)?);
    Some((meant, format!("an IPv6 address stands in brackets: did you mean \"{meant}\"?")))
}

pub(super) fn forward_target(text: &str) -> Option<(Target, u16)> {
    let (who, port) = text.rsplit_once(':')?;
    let port = port.parse().ok().filter(|&p: &u16| p != 0)?;
    if let Some(inner) = who.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        return Some((Target::Ip(inner.parse::<Ipv6Addr>().ok()?.into()), port));
    }
    let target = who.parse::<Ipv4Addr>().map(|ip| Target::Ip(ip.into()));
    Some((target.ok().or_else(|| clean_name(who).map(Target::Name))?, port))
}

pub(super) fn domain_name(text: &str) -> Option<String> {
    let label = |l: &str| (1..=63).contains(&l.len()) && l.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
    (text.len() <= 200 && text.split('.').all(label)).then(|| text.to_ascii_lowercase())
}
