//! The command line: `key=value` words, separated by spaces. Pure.

use crate::ivshmem::poll_interval::Pauses;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt;
use core::str::FromStr;
use smoltcp::wire::{EthernetAddress, IpAddress, IpCidr, Ipv4Address, Ipv4Cidr, Ipv6Address, Ipv6Cidr};

/// Frames taken from the network in one turn, unless `budget=` says otherwise.
const DEFAULT_BUDGET: usize = 64;
/// The largest and the smallest budget.
const BUDGET: core::ops::RangeInclusive<usize> = 1..=4096;
/// Network devices that are taken, each with an interface of its own.
pub(crate) const MAX_NICS: usize = 8;
/// Vifs of a domain of Xen, and queues of each.
pub(crate) const MAX_VIFS: usize = 3;
const QUEUES: core::ops::RangeInclusive<usize> = 1..=8;
/// A name of a host: RFC 1123 §2.1, one label.
const MAX_HOSTNAME_BYTES: usize = 63;

/// How the cell gets its IPv4 address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ipv4Config {
    Dhcp,
    Static(Ipv4Cidr),
    None,
}

/// The addresses of one network device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NicConfig {
    pub(crate) ipv4: Ipv4Config,
    pub(crate) gateway: Option<Ipv4Address>,
    pub(crate) ipv6: Option<Ipv6Cidr>,
    pub(crate) gateway6: Option<Ipv6Address>,
    /// Whether addresses of announced prefixes are taken.
    pub(crate) slaac: bool,
}

impl NicConfig {
    /// What the command line says of the device with these keys.
    fn parse(line: &str, keys: &NicKeys) -> Result<NicConfig, ConfigError> {
        let ipv4 = match value(line, keys.ipv4) {
            None | Some("dhcp") => Ipv4Config::Dhcp,
            Some("none") => Ipv4Config::None,
            Some(_) => match typed(line, keys.ipv4, "dhcp, none, or ADDRESS/PREFIX, for example 10.0.0.5/24")? {
                Some(IpCidr::Ipv4(cidr)) => Ipv4Config::Static(cidr),
                _ => {
                    let value = value(line, keys.ipv4).unwrap_or_default().to_string();
                    return Err(ConfigError { key: keys.ipv4, value, expected: "an IPv4 address; IPv6 goes to ip6=" });
                }
            },
        };
        let slaac = value(line, keys.ipv6) != Some("none");
        let ipv6 = if slaac {
            typed(line, keys.ipv6, "none, or an IPv6 ADDRESS/PREFIX, for example fd00::5/64")?
        } else {
            None
        };
        let gateway = typed(line, keys.gateway, "an IPv4 address")?;
        let gateway6 = typed(line, keys.gateway6, "an IPv6 address")?;
        Ok(NicConfig { ipv4, gateway, ipv6, gateway6, slaac })
    }

    /// The addresses that the command line gives.
    pub(crate) fn addresses(&self) -> Vec<IpCidr> {
        let ipv4 = if let Ipv4Config::Static(cidr) = self.ipv4 { Some(IpCidr::Ipv4(cidr)) } else { None };
        ipv4.into_iter().chain(self.ipv6.map(IpCidr::Ipv6)).collect()
    }
}

/// The keys of one network device.
struct NicKeys {
    ipv4: &'static str,
    gateway: &'static str,
    ipv6: &'static str,
    gateway6: &'static str,
}

const NIC_KEYS: [NicKeys; MAX_NICS] = [
    NicKeys { ipv4: "ip", gateway: "gw", ipv6: "ip6", gateway6: "gw6" },
    NicKeys { ipv4: "ip.1", gateway: "gw.1", ipv6: "ip6.1", gateway6: "gw6.1" },
    NicKeys { ipv4: "ip.2", gateway: "gw.2", ipv6: "ip6.2", gateway6: "gw6.2" },
    NicKeys { ipv4: "ip.3", gateway: "gw.3", ipv6: "ip6.3", gateway6: "gw6.3" },
    NicKeys { ipv4: "ip.4", gateway: "gw.4", ipv6: "ip6.4", gateway6: "gw6.4" },
    NicKeys { ipv4: "ip.5", gateway: "gw.5", ipv6: "ip6.5", gateway6: "gw6.5" },
    NicKeys { ipv4: "ip.6", gateway: "gw.6", ipv6: "ip6.6", gateway6: "gw6.6" },
    NicKeys { ipv4: "ip.7", gateway: "gw.7", ipv6: "ip6.7", gateway6: "gw6.7" },
];

/// A vif of Xen after the first, and its addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct VifConfig {
    /// Its number in the domain's configuration.
    pub(crate) number: u32,
    addresses: Vec<IpCidr>,
}

impl VifConfig {
    pub(crate) fn addresses(&self) -> Vec<IpCidr> {
        self.addresses.clone()
    }
}

/// Which device is the network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NetChoice {
    /// The first virtio device, else the first network link over shared memory.
    Any,
    /// A virtio device only.
    Virtio,
    /// The link over shared memory of this name.
    Link(String),
    /// No network.
    None,
}

/// What the command line says; the table in the crate's documentation lists the keys.
#[derive(Clone, Debug)]
pub struct Config {
    line: String,
    /// The first device, and those after it.
    pub(crate) nics: [NicConfig; MAX_NICS],
    /// In which order the devices are, by their Ethernet addresses; those that are not named come
    /// last.
    pub(crate) order: Vec<EthernetAddress>,
    pub(crate) dns: Vec<IpAddress>,
    pub(crate) hostname: String,
    pub(crate) budget: usize,
    /// How long the cell goes on looking at the network before it sleeps.
    pub(crate) busy_poll_ns: u64,
    /// How often a link without doorbell is looked at.
    pub(crate) pauses: Pauses,
    pub(crate) net: NetChoice,
    /// Whether a network link carries offloads, where the fabric offers them.
    pub(crate) offloads: bool,
    /// Most queues of a vif of Xen.
    pub(crate) queues: usize,
    /// Vifs of Xen after the first: those with an address.
    pub(crate) vifs: Vec<VifConfig>,
    pub(crate) verbose: bool,
}

/// A word of the command line has a key that is known and a value that is not possible.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    key: &'static str,
    value: String,
    expected: &'static str,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "command line: {}={}: expected {}", self.key, self.value, self.expected)
    }
}

/// The value of the last word `key=value` of `line`. Never inlined: the start looks for a dozen
/// keys, and an emulator translates each copy of this loop before it runs it once.
#[inline(never)]
pub(crate) fn value<'l>(line: &'l str, key: &str) -> Option<&'l str> {
    line.split_ascii_whitespace().filter_map(|word| word.split_once('=')).rfind(|(k, _)| *k == key).map(|p| p.1)
}

/// A number of the command line, decimal or hexadecimal with `0x`; `None` where it is absent or not
/// a number.
pub(crate) fn number(line: &str, key: &str) -> Option<u64> {
    parse_number(value(line, key)?)
}

fn parse_number(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

fn typed<T: FromStr>(line: &str, key: &'static str, expected: &'static str) -> Result<Option<T>, ConfigError> {
    let Some(text) = value(line, key) else { return Ok(None) };
    text.parse().map(Some).map_err(|_| ConfigError { key, value: text.to_string(), expected })
}

impl Config {
    /// Parses the command line.
    pub fn parse(line: &str) -> Result<Config, ConfigError> {
        let [k0, k1, k2, k3, k4, k5, k6, k7] = &NIC_KEYS;
        let nic = |keys| NicConfig::parse(line, keys);
        let nics = [nic(k0)?, nic(k1)?, nic(k2)?, nic(k3)?, nic(k4)?, nic(k5)?, nic(k6)?, nic(k7)?];
        let order = match value(line, "macs") {
            None => Vec::new(),
            Some(list) => list
                .split(',')
                .map(|one| {
                    let value = one.to_string();
                    let expected = "Ethernet addresses, separated by commas";
                    one.parse().map_err(|_| ConfigError { key: "macs", value, expected })
                })
                .collect::<Result<_, _>>()?,
        };
        let dns = match value(line, "dns") {
            None => Vec::new(),
            Some(list) => list
                .split(',')
                .map(|one| {
                    let value = one.to_string();
                    one.parse().map_err(|_| ConfigError {
                        key: "dns",
                        value,
                        expected: "addresses, separated by commas",
                    })
                })
                .collect::<Result<_, _>>()?,
        };
        let hostname = value(line, "hostname").unwrap_or("cell").to_string();
        let label = |b: u8| b.is_ascii_alphanumeric() || b == b'-';
        if hostname.is_empty() || hostname.len() > MAX_HOSTNAME_BYTES || !hostname.bytes().all(label) {
            return Err(ConfigError {
                key: "hostname",
                value: hostname,
                expected: "1 to 63 letters, digits and dashes",
            });
        }
        let budget = match value(line, "budget") {
            None => DEFAULT_BUDGET,
            Some(text) => text.parse().ok().filter(|n| BUDGET.contains(n)).ok_or_else(|| ConfigError {
                key: "budget",
                value: text.to_string(),
                expected: "a number of frames from 1 to 4096",
            })?,
        };
        let microseconds = |key: &'static str, range: core::ops::RangeInclusive<u64>, expected, default_ns: u64| {
            match value(line, key) {
                None => Ok(default_ns),
                Some(text) => match text.parse().ok().filter(|n| range.contains(n)) {
                    Some(number) => Ok(number * 1000),
                    None => Err(ConfigError { key, value: text.to_string(), expected }),
                },
            }
        };
        let default = Pauses::POLLED;
        let pauses = Pauses {
            shortest_ns: microseconds(
                "poll_min_us",
                1..=1_000_000,
                "microseconds from 1 to 1000000",
                default.shortest_ns,
            )?,
            longest_ns: microseconds(
                "poll_max_us",
                1..=1_000_000,
                "microseconds from 1 to 1000000",
                default.longest_ns,
            )?,
        };
        let pauses = Pauses { longest_ns: pauses.longest_ns.max(pauses.shortest_ns), ..pauses };
        let busy_poll_ns = microseconds("busy_poll_us", 0..=1_000_000, "microseconds from 0 to 1000000", 0)?;
        let net = match value(line, "net") {
            None => NetChoice::Any,
            Some("none") => NetChoice::None,
            Some("virtio") => NetChoice::Virtio,
            Some(name) => NetChoice::Link(name.to_string()),
        };
        let queues = match value(line, "queues") {
            None => 1,
            Some(text) => text.parse().ok().filter(|n| QUEUES.contains(n)).ok_or_else(|| ConfigError {
                key: "queues",
                value: text.to_string(),
                expected: "a number of queues from 1 to 8",
            })?,
        };
        let vifs = (1..MAX_VIFS)
            .map(|number| VifConfig { number: number as u32, addresses: nics[number].addresses() })
            .filter(|vif| !vif.addresses.is_empty())
            .collect();
        let offloads = match value(line, "offloads") {
            None | Some("carried") => true,
            Some("none") => false,
            Some(text) => {
                return Err(ConfigError { key: "offloads", value: text.to_string(), expected: "carried or none" });
            }
        };
        Ok(Config {
            offloads,
            busy_poll_ns,
            pauses,
            net,
            queues,
            vifs,
            nics,
            order,
            dns,
            hostname,
            budget,
            verbose: line.split_ascii_whitespace().any(|word| word == "verbose"),
            line: line.to_string(),
        })
    }

    /// The value of a key of the app's own; the last one counts.
    pub fn get(&self, key: &str) -> Option<&str> {
        value(&self.line, key)
    }

    /// Whether the command line has `word`, alone or with a value.
    pub fn has(&self, word: &str) -> bool {
        self.line.split_ascii_whitespace().any(|w| w == word || w.split_once('=').is_some_and(|(key, _)| key == word))
    }

    /// A number under a key of the app's own: decimal, or hexadecimal with `0x`. `None` where it is
    /// absent or no number.
    pub fn number(&self, key: &str) -> Option<u64> {
        number(&self.line, key)
    }
}

/// A virtio-mmio device of the command line, as QEMU's microvm and Firecracker write it:
/// `virtio_mmio.device=512@0xfeb00e00:12` (size, address, interrupt).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MmioDevice {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) gsi: u32,
}

/// All virtio-mmio devices of the command line; words that make no sense are left out.
pub(crate) fn mmio_devices(line: &str) -> Vec<MmioDevice> {
    line.split_ascii_whitespace()
        .filter_map(|word| word.strip_prefix("virtio_mmio.device="))
        .filter_map(|text| {
            let (size, rest) = text.split_once('@')?;
            let mut parts = rest.split(':');
            let address = parse_number(parts.next()?)?;
            let gsi = parts.next()?.parse().ok()?;
            let digits = size.trim_end_matches(['K', 'k', 'M']);
            let unit = match &size[digits.len()..] {
                "" => 1,
                "K" | "k" => 1 << 10,
                "M" => 1 << 20,
                _ => return None,
            };
            let bytes = parse_number(digits)?.checked_mul(unit)?;
            Some(MmioDevice { address, bytes, gsi })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::format;

    #[test]
    fn an_empty_line_means_dhcp_and_defaults() {
        let config = Config::parse("").unwrap();
        assert!(config.nics.iter().all(|nic| nic.ipv4 == Ipv4Config::Dhcp && nic.slaac));
        assert_eq!((config.hostname.as_str(), config.budget, config.verbose), ("cell", 64, false));
    }

    #[test]
    fn addresses_names_and_numbers_are_taken() {
        let line =
            "ip=10.0.0.5/24 gw=10.0.0.1 dns=10.0.0.1,fd00::1 ip6=fd00::5/64 hostname=web-1 budget=16 verbose app=x";
        let config = Config::parse(line).unwrap();
        assert_eq!(config.nics[0].ipv4, Ipv4Config::Static(Ipv4Cidr::new(Ipv4Address::new(10, 0, 0, 5), 24)));
        assert_eq!(config.nics[0].gateway, Some(Ipv4Address::new(10, 0, 0, 1)));
        assert_eq!(config.dns.len(), 2);
        assert_eq!(config.nics[0].ipv6.unwrap().prefix_len(), 64);
        assert_eq!((config.hostname.as_str(), config.budget, config.verbose), ("web-1", 16, true));
        assert_eq!(config.get("app"), Some("x"));
        assert!(config.has("verbose") && config.has("app") && !config.has("ap"));
    }

    #[test]
    fn an_impossible_value_names_key_value_and_what_was_expected() {
        for (line, key) in [
            ("ip=10.0.0.5", "ip"),
            ("ip=fd00::1/64", "ip"),
            ("gw=10.0.0", "gw"),
            ("ip6=10.0.0.1/8 x", "ip6"),
            ("dns=1.1.1.1,", "dns"),
            ("hostname=a_b", "hostname"),
            ("hostname=", "hostname"),
            ("budget=0", "budget"),
            ("queues=9", "queues"),
            ("ip.1=10.0.0.5", "ip.1"),
            ("ip.7=fd00::1/64", "ip.7"),
            ("gw.3=x", "gw.3"),
            ("macs=02:00:00:00:00", "macs"),
            ("ip6.2=10.0.0.1/8", "ip6.2"),
            ("busy_poll_us=1000001", "busy_poll_us"),
            ("offloads=some", "offloads"),
            ("poll_min_us=0", "poll_min_us"),
            ("poll_max_us=x", "poll_max_us"),
        ] {
            let error = Config::parse(line).expect_err(line);
            assert!(format!("{error}").starts_with(&format!("command line: {key}=")), "{error}");
        }
    }

    #[test]
    fn the_network_is_chosen_and_its_polling_bounded() {
        let config = Config::parse("").unwrap();
        assert_eq!((config.net, config.busy_poll_ns, config.pauses), (NetChoice::Any, 0, Pauses::POLLED));
        let config = Config::parse("net=lan busy_poll_us=50 poll_min_us=10 poll_max_us=5").unwrap();
        assert_eq!((config.net, config.busy_poll_ns), (NetChoice::Link("lan".to_string()), 50_000));
        assert_eq!(config.pauses, Pauses { shortest_ns: 10_000, longest_ns: 10_000 });
        assert_eq!(Config::parse("net=none").unwrap().net, NetChoice::None);
        assert_eq!(Config::parse("net=virtio").unwrap().net, NetChoice::Virtio);
    }

    #[test]
    fn vifs_after_the_first_are_those_with_an_address() {
        let config = Config::parse("ip=none ip.1=10.1.0.5/24 ip6.1=fd01::5/64 ip6.2=fd02::5/64 queues=4").unwrap();
        assert_eq!(config.queues, 4);
        let numbers: Vec<_> = config.vifs.iter().map(|vif| (vif.number, vif.addresses().len())).collect();
        assert_eq!(numbers, [(1, 2), (2, 1)]);
        let config = Config::parse("").unwrap();
        assert_eq!((config.queues, config.vifs.len()), (1, 0));
    }

    #[test]
    fn each_device_has_its_own_addresses() {
        let line = "ip=10.0.0.5/24 ip.1=none ip6.1=none ip.2=10.2.0.5/24 gw.2=10.2.0.1 macs=02:00:00:00:00:02,02:00:00:00:00:01";
        let config = Config::parse(line).unwrap();
        assert_eq!((config.nics[1].ipv4, config.nics[1].slaac), (Ipv4Config::None, false));
        assert_eq!(config.nics[2].gateway, Some(Ipv4Address::new(10, 2, 0, 1)));
        assert_eq!((config.nics[3].ipv4, config.nics[3].slaac), (Ipv4Config::Dhcp, true));
        assert_eq!(config.order.iter().map(|mac| mac.0[5]).collect::<Vec<_>>(), [2, 1]);
    }

    #[test]
    fn mmio_devices_of_qemu_and_firecracker() {
        let line = "a virtio_mmio.device=512@0xfeb00e00:12 virtio_mmio.device=4K@0xd0000000:5 virtio_mmio.device=x@1:2";
        assert_eq!(
            mmio_devices(line),
            [
                MmioDevice { address: 0xfeb0_0e00, bytes: 512, gsi: 12 },
                MmioDevice { address: 0xd000_0000, bytes: 4096, gsi: 5 }
            ]
        );
    }
}
