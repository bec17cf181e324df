//! Routes of the host that a network's subnet would meet: the host itself is on a network with a
//! kernel uplink, or with a tap that has an address, so it gets a route to the subnet there.
//!
//! Two routes to one subnet leave it to chance who gets the packets; that is refused before
//! anything is made. A wider route (a VPN's 10.0.0.0/8) loses a part of its addresses, which is
//! said. The default route meets everything and does not count.

use std::net::{Ipv4Addr, Ipv6Addr};

use crate::file::{Fabric, Network, Subnet, Uplink};
use crate::plan::kernel_device;

/// One route of the main table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Route {
    /// Where it leads to.
    pub subnet: Subnet,
    /// Name of the interface that the route leads to.
    pub device: String,
}

/// How a network's subnet and a route of the host get on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Clash {
    /// The route leads to the same addresses or a part of them.
    Taken(Route),
    /// The route leads to more than the subnet, and loses that.
    Shadowed(Route),
}

/// The routes of /proc/net/route (its columns: Linux, net/ipv4/fib_trie.c), without the default
/// route.
pub fn parse(table: &str) -> Vec<Route> {
    let address = |word: &str| u32::from_str_radix(word, 16).ok().map(|n| Ipv4Addr::from(n.to_ne_bytes()));
    let row = |line: &str| {
        let words: Vec<_> = line.split_ascii_whitespace().collect();
        let (base, mask) = (address(words.get(1)?)?, address(words.get(7)?)?);
        let prefix = u32::from(mask).count_ones() as u8;
        (prefix > 0).then(|| Route { subnet: Subnet { base, prefix }, device: words[0].to_string() })
    };
    table.lines().skip(1).filter_map(row).collect()
}

/// The routes of this process's network namespace; none where the system does not tell.
pub fn host() -> Vec<Route> {
    std::fs::read_to_string("/proc/net/route").map(|t| parse(&t)).unwrap_or_default()
}

/// A route for IPv6.
struct Route6<'t> {
    to: Ipv6Addr,
    bits: u8,
    flags: u32,
    device: &'t str,
}

/// The routes in the text of /proc/net/ipv6_route (its columns: Linux, net/ipv6/route.c).
fn routes6(table: &str) -> impl Iterator<Item = Route6<'_>> {
    table.lines().filter_map(|line| {
        let words: Vec<_> = line.split_ascii_whitespace().collect();
        let [to, bits, .., flags, device] = words[..] else { return None };
        let to = Ipv6Addr::from_bits(u128::from_str_radix(to, 16).ok()?);
        let (bits, flags) = (u8::from_str_radix(bits, 16).ok()?, u32::from_str_radix(flags, 16).ok()?);
        Some(Route6 { to, bits, flags, device })
    })
}

/// A route to a part of `prefix`, a /64, in the text of /proc/net/ipv6_route, as prefix and device.
/// Routes to single hosts do not count.
pub fn taken6(table: &str, prefix: Ipv6Addr, own: &str) -> Option<(String, String)> {
    routes6(table).find_map(|Route6 { to, bits, device, .. }| {
        let inside = (64..128).contains(&bits) && (to.to_bits() ^ prefix.to_bits()) >> 64 == 0;
        (inside && device != own).then(|| (format!("{to}/{bits}"), device.to_string()))
    })
}

/// Whether there is a default route in the text of /proc/net/ipv6_route. One that rejects packets,
/// as that of the loopback device, is none.
pub fn has_default6(table: &str) -> bool {
    const RTF_REJECT: u32 = 0x0200;
    routes6(table).any(|r| r.bits == 0 && r.to.is_unspecified() && r.flags & RTF_REJECT == 0 && r.device != "lo")
}

/// Whether this process's network namespace has a default route for IPv6.
pub fn host_has_default6() -> bool {
    std::fs::read_to_string("/proc/net/ipv6_route").is_ok_and(|table| has_default6(&table))
}

/// An IPv6 address of this machine.
pub struct Address6<'t> {
    /// The address.
    pub ip: Ipv6Addr,
    /// Whether the kernel still looks whether another machine has it.
    pub is_tentative: bool,
    /// The interface.
    pub device: &'t str,
}

/// The addresses in the text of /proc/net/if_inet6 (address, index, prefix length, scope, flags,
/// name).
pub fn addresses6(table: &str) -> impl Iterator<Item = Address6<'_>> {
    const TENTATIVE: u32 = 0x40;
    table.lines().filter_map(|line| {
        let words: Vec<_> = line.split_ascii_whitespace().collect();
        let [ip, _, _, _, flags, device] = words[..] else { return None };
        let ip = Ipv6Addr::from_bits(u128::from_str_radix(ip, 16).ok()?);
        let flags = u32::from_str_radix(flags, 16).ok()?;
        Some(Address6 { ip, is_tentative: flags & TENTATIVE != 0, device })
    })
}

/// The interfaces of the default routes in a table of that form, each once.
pub fn default_devices(table: &str) -> Vec<String> {
    let mut out: Vec<String> = Vec::new();
    for line in table.lines().skip(1) {
        let words: Vec<_> = line.split_ascii_whitespace().collect();
        if let [device, base, ..] = words[..]
            && words.get(7).is_some_and(|mask| [base, mask] == ["00000000"; 2])
            && !out.iter().any(|known| known == device)
        {
            out.push(device.into());
        }
    }
    out
}

/// The interfaces through which this process's network namespace reaches everything else.
pub fn host_default_devices() -> Vec<String> {
    std::fs::read_to_string("/proc/net/route").map(|t| default_devices(&t)).unwrap_or_default()
}

/// What the networks that the host is on meet: (network, clash).
pub fn clashes<'f>(fabric: &'f Fabric, routes: &[Route]) -> Vec<(&'f Network, Clash)> {
    let taps: Vec<_> = fabric.taps.iter().filter(|t| t.netns.is_none()).collect();
    let on = |n: &&Network| n.uplink == Uplink::Kernel || taps.iter().any(|t| t.network == n.name && t.ip.is_some());
    let mut out = Vec::new();
    for network in fabric.networks.iter().filter(on) {
        let device = kernel_device(&fabric.name, &network.name);
        let own =
            |r: &&Route| r.device == device || taps.iter().any(|t| t.network == network.name && t.device == r.device);
        for route in routes.iter().filter(|r| !own(r) && r.subnet.overlaps(network.subnet)) {
            let inside = route.subnet.prefix >= network.subnet.prefix;
            let clash = if inside { Clash::Taken(route.clone()) } else { Clash::Shadowed(route.clone()) };
            out.push((network, clash));
        }
    }
    out
}

/// A subnet that meets no route and no network of the fabric.
pub fn free(fabric: &Fabric, routes: &[Route]) -> Option<Subnet> {
    let all = (0..=255).map(|n| Subnet { base: Ipv4Addr::new(10, 87, n, 0), prefix: 24 });
    let taken = fabric.networks.iter().map(|n| n.subnet).chain(routes.iter().map(|r| r.subnet));
    let taken: Vec<_> = taken.collect();
    all.into_iter().find(|s| !taken.iter().any(|t| t.overlaps(*s)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file;
    use std::path::Path;

    /// As Linux prints it: a default route, a wide one, one of another fabric, one to a single
    /// host.
    const TABLE: &str = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n\
        eth0\t00000000\t0101A8C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n\
        vpn0\t0000000A\t00000000\t0001\t0\t0\t0\t000000FF\t0\t0\t0\n\
        tb-a-lan\t0000570A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n\
        wg0\t0701580A\t00000000\t0005\t0\t0\t0\tFFFFFFFF\t0\t0\t0\n";

    fn fabric(text: &str) -> Fabric {
        file::parse(&format!("name = \"b\"\n{text}"), Path::new("t.toml")).unwrap()
    }

    fn told(text: &str) -> Vec<String> {
        let fabric = fabric(text);
        let word = |(n, c): (&Network, Clash)| match c {
            Clash::Taken(r) => format!("{} taken by {}", n.name, r.device),
            Clash::Shadowed(r) => format!("{} shadows {}", n.name, r.device),
        };
        clashes(&fabric, &parse(TABLE)).into_iter().map(word).collect()
    }

    #[test]
    fn a_default_route_that_rejects_is_none() {
        let zero = "0".repeat(32);
        let route = |flags: &str, device: &str, bits: &str| {
            format!(
                "{zero} {bits} {zero} 00 fe800000000000000000000000000001 00000400 00000001 00000000 {flags} {device}\n"
            )
        };
        assert!(has_default6(&route("00000003", "eth0", "00")));
        let others = [
            route("00200200", "lo", "00"),
            route("00000203", "eth0", "00"),
            route("00000003", "eth0", "40"),
            "x\n".into(),
        ];
        assert!(!has_default6(&others.concat()));
    }

    #[test]
    fn a_route_to_the_prefix_of_another_interface_is_found() {
        let row = |to: &str, bits: &str, device: &str| {
            format!("{to} {bits} {z} 00 {z} 00000100 00000001 00000000 00000001 {device}\n", z = "0".repeat(32))
        };
        let prefix = "2001:db8:1:2::".parse().unwrap();
        let net = "20010db8000100020000000000000000";
        let table =
            [row(&"0".repeat(32), "00", "eth0"), row(net, "30", "eth0"), row(net, "80", "lo"), "x\n".into()].concat();
        assert_eq!(taken6(&table, prefix, "tb-a-lan"), None, "wider ones and those to one host");
        let table = table + &row(net, "40", "eth0");
        assert_eq!(taken6(&table, prefix, "tb-a-lan"), Some(("2001:db8:1:2::/64".into(), "eth0".into())));
        assert_eq!(taken6(&table, prefix, "eth0"), None);
    }

    #[test]
    fn a_subnet_that_a_route_leads_to_already_is_found() {
        let routes = parse(TABLE);
        let seen: Vec<_> = routes.iter().map(|r| format!("{} {}", r.subnet, r.device)).collect();
        assert_eq!(seen, ["10.0.0.0/8 vpn0", "10.87.0.0/24 tb-a-lan", "10.88.1.7/32 wg0"]);
        assert_eq!(default_devices(TABLE), ["eth0"]);
        assert_eq!(told("[network.lan]\nuplink = \"kernel\"\n"), ["lan shadows vpn0", "lan taken by tb-a-lan"]);
        assert_eq!(told("[network.lan]\nuplink = \"user\"\n"), [""; 0], "the host is not on it");
        assert_eq!(told("[network.lan]\n[tap.t]\nip = \"10.87.0.9\"\n").len(), 2);
        assert_eq!(told("[network.lan]\n[tap.t]\n"), [""; 0]);
        assert_eq!(told("[network.lan]\n[tap.t]\nip = \"10.87.0.9\"\nnetns = \"x\"\n"), [""; 0]);
        let adopted = "[network.lan]\n[tap.tb-a-lan]\nadopt = true\nip = \"10.87.0.9\"\n";
        assert_eq!(told(adopted), ["lan shadows vpn0"], "its own device's");
        let wide = "[network.lan]\nuplink = \"kernel\"\nsubnet = \"10.88.0.0/16\"\n";
        assert_eq!(told(wide), ["lan shadows vpn0", "lan taken by wg0"]);
    }

    #[test]
    fn another_subnet_is_offered() {
        let fabric = fabric("[network.lan]\nuplink = \"kernel\"\n");
        let routes: Vec<_> = parse(TABLE).into_iter().filter(|r| r.device != "vpn0").collect();
        assert_eq!(free(&fabric, &routes).unwrap().to_string(), "10.87.1.0/24");
        assert_eq!(free(&fabric, &parse(TABLE)), None);
    }
}
