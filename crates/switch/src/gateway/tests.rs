//! The gateway under a virtual clock: frames in, frames out.

mod boot;
mod dhcp;
mod dns;
mod elsewhere;
mod hostile;
mod link;
mod peer;

use super::packet::Route;
use super::*;
use smoltcp::wire::{DhcpMessageType, DhcpOption, DhcpPacket, DhcpRepr, EthernetAddress, EthernetFrame};
use smoltcp::wire::{Ipv4Packet, UdpPacket};

const GATEWAY_MAC: Mac = [2, 0, 0, 0, 0, 0xfe];
const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 1);
const ROUTER: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 2);
const UNIX: u64 = 1_800_000_000;

fn ip(last: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 9, 0, last)
}

fn mac(last: u8) -> Mac {
    [2, 0, 0, 0, 1, last]
}

fn config() -> GatewayConfig {
    GatewayConfig {
        mac: GATEWAY_MAC,
        address: GATEWAY,
        prefix: 24,
        mtu: 1500,
        router: Some(ROUTER),
        dns: Vec::new(),
        domain: "lab.internal".into(),
        name: "gateway".into(),
        forward: true,
        dhcp: Some(DhcpConfig { range: (ip(16), ip(23)), lease_secs: 3600, leases_per_port: None }),
        ipv6: None,
    }
}

/// A gateway and its clock.
struct World {
    gateway: Gateway,
    now: Nanos,
    /// The port that frames come in by.
    port: Option<Token>,
}

impl World {
    fn new() -> World {
        World::with(config(), &LeaseStore::default())
    }

    fn with(config: GatewayConfig, stored: &LeaseStore) -> World {
        let now = Nanos::SECOND.times(1000);
        let start = Start { now, unix_secs: UNIX, entropy: [7; 16] };
        World { gateway: Gateway::new(config, stored, start).unwrap(), now, port: None }
    }

    /// The same gateway after a restart `seconds` later, with another monotonic clock.
    fn restart(&mut self, seconds: u64) -> World {
        let stored = self.gateway.leases();
        let text = serde_json::to_string(&stored).unwrap();
        let stored: LeaseStore = serde_json::from_str(&text).unwrap();
        let now = Nanos::SECOND.times(5);
        let lived = self.now.since(self.gateway.start.now).0 / Nanos::SECOND.0;
        let start = Start { now, unix_secs: self.gateway.start.unix_secs + lived + seconds, entropy: [9; 16] };
        World { gateway: Gateway::new(config(), &stored, start).unwrap(), now, port: None }
    }

    fn pass(&mut self, seconds: u64) {
        self.now = self.now.after(Nanos::SECOND.times(seconds));
        self.gateway.poll(self.now);
    }

    fn put(&mut self, frame: &[u8]) -> Result<Vec<Vec<u8>>, Reason> {
        self.gateway.input(self.now, frame, Checksum::Unverified, self.port)?;
        Ok(self.sent())
    }

    fn sent(&mut self) -> Vec<Vec<u8>> {
        std::iter::from_fn(|| self.gateway.output()).collect()
    }

    fn count(&self, name: &str) -> u64 {
        let all = self.gateway.counters().all();
        all.iter().find(|(n, _, _)| *n == name).unwrap_or_else(|| panic!("no counter {name}")).2
    }
}

/// The way from client `n` at `source` to the gateway.
fn route(n: u8, source: Ipv4Addr) -> Route {
    Route { source_mac: mac(n), destination_mac: GATEWAY_MAC, source, destination: GATEWAY }
}

/// What a DHCP client asks.
#[derive(Clone, Copy)]
struct Ask<'a> {
    n: u8,
    kind: DhcpMessageType,
    client: Ipv4Addr,
    requested: Option<Ipv4Addr>,
    server: Option<Ipv4Addr>,
    name: Option<&'a str>,
    broadcast: bool,
}

impl<'a> Ask<'a> {
    fn new(n: u8, kind: DhcpMessageType) -> Ask<'a> {
        let client = Ipv4Addr::UNSPECIFIED;
        Ask { n, kind, client, requested: None, server: None, name: None, broadcast: false }
    }

    fn message(&self) -> Vec<u8> {
        let name = self.name.map(|name| [DhcpOption { kind: 12, data: name.as_bytes() }]);
        let repr = DhcpRepr {
            message_type: self.kind,
            transaction_id: 0x1020_3040,
            secs: 0,
            client_hardware_address: EthernetAddress(mac(self.n)),
            client_ip: self.client,
            your_ip: Ipv4Addr::UNSPECIFIED,
            server_ip: Ipv4Addr::UNSPECIFIED,
            router: None,
            subnet_mask: None,
            relay_agent_ip: Ipv4Addr::UNSPECIFIED,
            broadcast: self.broadcast,
            requested_ip: self.requested,
            client_identifier: Some(EthernetAddress(mac(self.n))),
            server_identifier: self.server,
            parameter_request_list: Some(&[1, 3, 6, 15, 26]),
            dns_servers: None,
            max_size: None,
            lease_duration: None,
            renew_duration: None,
            rebind_duration: None,
            additional_options: name.as_ref().map_or(&[], |n| &n[..]),
        };
        let mut bytes = vec![0; repr.buffer_len()];
        repr.emit(&mut DhcpPacket::new_unchecked(&mut bytes[..])).unwrap();
        bytes
    }

    fn frame(&self) -> Vec<u8> {
        let broadcast = Route {
            source_mac: mac(self.n),
            destination_mac: [0xff; 6],
            source: Ipv4Addr::UNSPECIFIED,
            destination: Ipv4Addr::BROADCAST,
        };
        let to = if self.client.is_unspecified() { broadcast } else { route(self.n, self.client) };
        packet::udp(&to, 68, 67, &self.message())
    }
}

/// What a DHCP answer says.
#[derive(Debug)]
struct Said {
    kind: DhcpMessageType,
    address: Ipv4Addr,
    to_mac: Mac,
    to: Ipv4Addr,
    options: Vec<(u8, Vec<u8>)>,
}

impl Said {
    fn option(&self, code: u8) -> Option<&[u8]> {
        self.options.iter().find(|(c, _)| *c == code).map(|(_, data)| &data[..])
    }
}

/// The UDP payload of `frame`, its sums checked, with the ports.
fn udp_of(frame: &[u8]) -> (Route, u16, u16, Vec<u8>) {
    let ethernet = EthernetFrame::new_checked(frame).unwrap();
    let ipv4 = Ipv4Packet::new_checked(&frame[14..]).unwrap();
    assert!(ipv4.verify_checksum());
    let route = Route {
        source_mac: ethernet.src_addr().0,
        destination_mac: ethernet.dst_addr().0,
        source: ipv4.src_addr(),
        destination: ipv4.dst_addr(),
    };
    let udp = UdpPacket::new_checked(ipv4.payload()).unwrap();
    assert!(udp.verify_checksum(&route.source.into(), &route.destination.into()));
    (route, udp.src_port(), udp.dst_port(), udp.payload().to_vec())
}

impl World {
    fn ask(&mut self, ask: Ask<'_>) -> Option<Said> {
        let mut frames = self.put(&ask.frame()).unwrap();
        assert!(frames.len() <= 1);
        let frame = frames.pop()?;
        let (route, from, to, bytes) = udp_of(&frame);
        assert_eq!((route.source_mac, route.source, from, to), (GATEWAY_MAC, GATEWAY, 67, 68));
        let packet = DhcpPacket::new_checked(&bytes[..]).unwrap();
        assert_eq!(packet.transaction_id(), 0x1020_3040);
        assert_eq!(packet.client_hardware_address().0, mac(ask.n));
        let options: Vec<_> = packet.options().map(|o| (o.kind, o.data.to_vec())).collect();
        let kind = options.iter().find(|(code, _)| *code == 53).unwrap().1[0].into();
        Some(Said { kind, address: packet.your_ip(), to_mac: route.destination_mac, to: route.destination, options })
    }

    fn discover(&mut self, n: u8, name: Option<&str>) -> Option<Said> {
        self.ask(Ask { name, ..Ask::new(n, DhcpMessageType::Discover) })
    }

    fn select(&mut self, n: u8, name: Option<&str>, address: Ipv4Addr) -> Option<Said> {
        let (requested, server) = (Some(address), Some(GATEWAY));
        self.ask(Ask { name, requested, server, ..Ask::new(n, DhcpMessageType::Request) })
    }

    /// A lease for client `n`, by the usual exchange.
    fn lease(&mut self, n: u8, name: Option<&str>) -> Ipv4Addr {
        let offer = self.discover(n, name).expect("an offer");
        let ack = self.select(n, name, offer.address).expect("an ack");
        assert_eq!((ack.kind, ack.address), (DhcpMessageType::Ack, offer.address));
        ack.address
    }
}
