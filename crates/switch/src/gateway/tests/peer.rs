//! A whole client, smoltcp's, at the gateway's port: DHCP, DNS over UDP and TCP, ping, under one
//! virtual clock.

use super::*;
use crate::drop::Drops;
use crate::frame::{Batch, Offload};
use crate::port::Port;
use smoltcp::iface::{Config, Interface, SocketHandle, SocketSet};
use smoltcp::phy::{ChecksumCapabilities, Device, DeviceCapabilities, Medium, RxToken, TxToken};
use smoltcp::socket::{dhcpv4, dns, icmp, tcp};
use smoltcp::time::Instant;
use smoltcp::wire::{DnsQueryType, HardwareAddress, Icmpv4Packet, Icmpv4Repr, IpAddress, IpCidr, Ipv4Cidr};

/// The client's card: frames that came for it, and frames that it wants to send.
#[derive(Default)]
struct Card {
    input: VecDeque<Vec<u8>>,
    output: VecDeque<Vec<u8>>,
}

struct Frame(Vec<u8>);
struct Sending<'a>(&'a mut VecDeque<Vec<u8>>);

impl RxToken for Frame {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, f: F) -> R {
        f(&self.0)
    }
}

impl TxToken for Sending<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, f: F) -> R {
        let mut frame = vec![0; len];
        let result = f(&mut frame);
        self.0.push_back(frame);
        result
    }
}

impl Device for Card {
    type RxToken<'a> = Frame;
    type TxToken<'a> = Sending<'a>;

    fn receive(&mut self, _: Instant) -> Option<(Frame, Sending<'_>)> {
        self.input.pop_front().map(|frame| (Frame(frame), Sending(&mut self.output)))
    }

    fn transmit(&mut self, _: Instant) -> Option<Sending<'_>> {
        Some(Sending(&mut self.output))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut caps = DeviceCapabilities::default();
        caps.medium = Medium::Ethernet;
        caps.max_transmission_unit = 1514;
        caps
    }
}

struct Client {
    card: Card,
    interface: Interface,
    sockets: SocketSet<'static>,
    n: u8,
}

/// A gateway's port and clients at it.
struct Net {
    port: GatewayPort,
    handle: GatewayHandle,
    now: Nanos,
    drops: Drops,
}

fn instant(now: Nanos) -> Instant {
    Instant::from_micros((now.0 / 1000) as i64)
}

impl Client {
    fn new(n: u8, now: Nanos) -> Client {
        let mut card = Card::default();
        let mut config = Config::new(HardwareAddress::Ethernet(EthernetAddress(mac(n))));
        config.random_seed = n.into();
        let interface = Interface::new(config, &mut card, instant(now));
        Client { card, interface, sockets: SocketSet::new(Vec::new()), n }
    }

    fn set_address(&mut self, address: Ipv4Cidr) {
        self.interface.update_ip_addrs(|list| {
            list.clear();
            list.push(IpCidr::Ipv4(address)).unwrap();
        });
    }
}

impl Net {
    fn new(config: GatewayConfig) -> Net {
        let now = Nanos::SECOND.times(1000);
        let start = Start { now, unix_secs: UNIX, entropy: [7; 16] };
        let gateway = Gateway::new(config, &LeaseStore::default(), start).unwrap();
        let (port, handle) = GatewayPort::new(gateway);
        Net { port, handle, now, drops: Drops::default() }
    }

    /// One turn of a worker: what the client sends goes to the port, what the port sends to the
    /// client.
    fn turn(&mut self, client: &mut Client) {
        client.interface.poll(instant(self.now), &mut client.card, &mut client.sockets);
        self.port.service(self.now).unwrap();
        let frames: Vec<Vec<u8>> = client.card.output.drain(..).collect();
        let mut batch = Batch::default();
        for frame in &frames {
            batch.push(frame[..].into(), Offload::NONE);
        }
        batch.set_ingress(Token(client.n.into()));
        let which: Vec<u16> = (0..batch.len() as u16).collect();
        let sent = self.port.transmit(&batch, &which, &mut self.drops).unwrap();
        assert_eq!(sent.frames + self.drops.total(), frames.len() as u64);
        self.port.flush().unwrap();
        let mut batch = Batch::default();
        self.port.receive(64, &mut batch, &mut self.drops).unwrap();
        for frame in batch.frames() {
            let mut bytes = Vec::new();
            batch.append_to(frame, &mut bytes);
            assert!(bytes.len() <= 1514);
            if bytes[..6] == mac(client.n) || bytes[..6] == [0xff; 6] {
                client.card.input.push_back(bytes);
            }
        }
        drop(batch);
        self.port.release().unwrap();
    }

    /// Turns, a millisecond each, until `done` says something.
    fn until<T>(&mut self, client: &mut Client, what: &str, mut done: impl FnMut(&mut Client) -> Option<T>) -> T {
        let end = self.now.after(Nanos::SECOND.times(60));
        while self.now < end {
            self.turn(client);
            if let Some(result) = done(client) {
                return result;
            }
            self.now = self.now.after(Nanos::MILLI);
        }
        panic!("{what} did not come to an end in 60 s of virtual time");
    }

    fn lease(&mut self, client: &mut Client) -> dhcpv4::Config<'static> {
        let handle = client.sockets.add(dhcpv4::Socket::new());
        let got =
            self.until(client, "DHCP", |client| match client.sockets.get_mut::<dhcpv4::Socket<'_>>(handle).poll()? {
                dhcpv4::Event::Configured(c) => {
                    let (server, address, router, dns_servers) = (c.server, c.address, c.router, c.dns_servers);
                    Some(dhcpv4::Config { server, address, router, dns_servers, packet: None })
                }
                dhcpv4::Event::Deconfigured => None,
            });
        client.set_address(got.address);
        got
    }

    fn resolve(&mut self, client: &mut Client, name: &str) -> Option<IpAddress> {
        let servers = [IpAddress::Ipv4(GATEWAY)];
        let handle = client.sockets.add(dns::Socket::new(&servers, vec![None]));
        let socket = client.sockets.get_mut::<dns::Socket<'_>>(handle);
        let query = socket.start_query(client.interface.context(), name, DnsQueryType::A).unwrap();
        self.until(client, "DNS", |client| {
            match client.sockets.get_mut::<dns::Socket<'_>>(handle).get_query_result(query) {
                Ok(addresses) => Some(Some(addresses[0])),
                Err(dns::GetQueryResultError::Pending) => None,
                Err(dns::GetQueryResultError::Failed) => Some(None),
            }
        })
    }

    fn connect(&mut self, client: &mut Client, local_port: u16) -> SocketHandle {
        let buffer = || tcp::SocketBuffer::new(vec![0; 70_000]);
        let handle = client.sockets.add(tcp::Socket::new(buffer(), buffer()));
        let socket = client.sockets.get_mut::<tcp::Socket<'_>>(handle);
        socket.connect(client.interface.context(), (GATEWAY, 53), local_port).unwrap();
        handle
    }

    fn connected(&mut self, client: &mut Client, handle: SocketHandle) {
        self.until(client, "TCP", |c| c.sockets.get::<tcp::Socket<'_>>(handle).may_send().then_some(()));
    }

    /// Sends `bytes` in pieces and reads one message with its length.
    fn ask_stream(&mut self, client: &mut Client, handle: SocketHandle, bytes: &[u8]) -> Vec<u8> {
        for piece in bytes.chunks(5) {
            client.sockets.get_mut::<tcp::Socket<'_>>(handle).send_slice(piece).unwrap();
            self.turn(client);
        }
        let mut got = Vec::new();
        self.until(client, "an answer over TCP", |client| {
            let socket = client.sockets.get_mut::<tcp::Socket<'_>>(handle);
            let want = |got: &[u8]| match got {
                [high, low, ..] => 2 + usize::from(u16::from_be_bytes([*high, *low])),
                _ => 2,
            };
            while socket.can_recv() && got.len() < want(&got) {
                let room = want(&got) - got.len();
                let taken = socket.recv(|bytes| {
                    let n = bytes.len().min(room);
                    got.extend_from_slice(&bytes[..n]);
                    (n, ())
                });
                taken.unwrap();
            }
            let whole = got.len() > 2 && got.len() == want(&got);
            whole.then(|| got.split_off(2))
        })
    }
}

#[test]
fn a_client_gets_an_address_resolves_names_and_pings() {
    let mut net = Net::new(config());
    net.handle.set_member(Member { name: "db".into(), mac: None, address: Some(ip(100)) }).unwrap();
    let mut client = Client::new(1, net.now);
    let config = net.lease(&mut client);
    assert_eq!((config.router, &config.dns_servers[..]), (Some(ROUTER), &[GATEWAY][..]));
    assert_eq!(config.address.prefix_len(), 24);
    let changes = net.handle.take_lease_changes();
    let kept = matches!(&changes[..], [LeaseChange::Bound(record)]
        if (record.mac, record.address) == (mac(1), IpAddr::from(config.address.address())));
    assert!(kept, "{changes:?}");
    assert_eq!(net.handle.take_lease_changes(), []);

    assert_eq!(net.resolve(&mut client, "db.lab.internal"), Some(IpAddress::Ipv4(ip(100))));
    assert_eq!(net.resolve(&mut client, "nobody.lab.internal"), None);

    let buffer = || icmp::PacketBuffer::new(vec![icmp::PacketMetadata::EMPTY; 4], vec![0; 4096]);
    let handle = client.sockets.add(icmp::Socket::new(buffer(), buffer()));
    let socket = client.sockets.get_mut::<icmp::Socket<'_>>(handle);
    socket.bind(icmp::Endpoint::Ident(0x22)).unwrap();
    let request = Icmpv4Repr::EchoRequest { ident: 0x22, seq_no: 1, data: b"tombolo" };
    let to = socket.send(request.buffer_len(), IpAddress::Ipv4(GATEWAY)).unwrap();
    request.emit(&mut Icmpv4Packet::new_unchecked(to), &ChecksumCapabilities::default());
    net.until(&mut client, "ping", |client| {
        let (bytes, from) = client.sockets.get_mut::<icmp::Socket<'_>>(handle).recv().ok()?;
        let packet = Icmpv4Packet::new_checked(bytes).unwrap();
        let reply = Icmpv4Repr::parse(&packet, &ChecksumCapabilities::default()).unwrap();
        assert_eq!(reply, Icmpv4Repr::EchoReply { ident: 0x22, seq_no: 1, data: b"tombolo" });
        assert_eq!(from, IpAddress::Ipv4(GATEWAY));
        Some(())
    });
    assert_eq!(net.drops.total(), 0);
}

#[test]
fn the_client_keeps_its_address_by_renewing() {
    let mut net = Net::new(config());
    let mut client = Client::new(1, net.now);
    let first = net.lease(&mut client);
    // Three lease times, in steps of 10 s.
    for _ in 0..1080 {
        net.now = net.now.after(Nanos::SECOND.times(10));
        for _ in 0..3 {
            net.turn(&mut client);
        }
    }
    let leases = net.handle.leases();
    assert_eq!((leases.leases.len(), leases.leases[0].address), (1, IpAddr::from(first.address.address())));
    assert!(leases.leases[0].expires_unix_secs > UNIX + 3 * 3600);
}

#[test]
fn names_of_elsewhere_are_resolved_through_the_handle() {
    let mut net = Net::new(config());
    let mut client = Client::new(1, net.now);
    net.lease(&mut client);
    let servers = [IpAddress::Ipv4(GATEWAY)];
    let handle = client.sockets.add(dns::Socket::new(&servers, vec![None]));
    let socket = client.sockets.get_mut::<dns::Socket<'_>>(handle);
    let query = socket.start_query(client.interface.context(), "example.org", DnsQueryType::A).unwrap();
    let host = net.handle.clone();
    let address = net.until(&mut client, "DNS", |client| {
        for asked in host.take_queries() {
            let mut answer = asked.bytes;
            (answer[2], answer[3], answer[7]) = (0x81, 0x80, 1);
            answer.extend_from_slice(b"\xc0\x0c\x00\x01\x00\x01\x00\x00\x01\x2c\x00\x04\x5d\xb8\xd7\x0e");
            host.answer(asked.id, answer);
        }
        client.sockets.get_mut::<dns::Socket<'_>>(handle).get_query_result(query).ok()
    });
    assert_eq!(address[0], IpAddress::v4(0x5d, 0xb8, 0xd7, 0x0e));
}

fn framed(query: &[u8]) -> Vec<u8> {
    [&(query.len() as u16).to_be_bytes()[..], query].concat()
}

const QUERY_GATEWAY: &[u8] = b"\x43\x21\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x07gateway\x00\x00\x01\x00\x01";
const QUERY_OUTSIDE: &[u8] = b"\x43\x22\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x03big\x03org\x00\x00\x01\x00\x01";

#[test]
fn dns_over_tcp_answers_query_after_query_and_carries_what_udp_cannot() {
    let mut net = Net::new(config());
    let mut client = Client::new(1, net.now);
    client.set_address(Ipv4Cidr::new(ip(50), 24));
    let stream = net.connect(&mut client, 5000);
    net.connected(&mut client, stream);
    // Two at once: the second waits for the first.
    let two = [framed(QUERY_GATEWAY), framed(QUERY_GATEWAY)].concat();
    for bytes in [&two[..], &[]] {
        let answer = net.ask_stream(&mut client, stream, bytes);
        assert_eq!((&answer[..2], &answer[answer.len() - 4..]), (&b"\x43\x21"[..], &GATEWAY.octets()[..]));
    }
    let socket = client.sockets.get_mut::<tcp::Socket<'_>>(stream);
    socket.send_slice(&framed(QUERY_OUTSIDE)).unwrap();
    let host = net.handle.clone();
    let asked = net.until(&mut client, "a query", |_| host.take_queries().pop());
    let mut long = asked.bytes;
    long[2] |= 0x80;
    long.resize(60_000, 0x77);
    net.handle.answer(asked.id, long.clone());
    let answer = net.ask_stream(&mut client, stream, &[]);
    assert_eq!((answer.len(), &answer[..2], &answer[2..]), (60_000, &b"\x43\x22"[..], &long[2..]));
    // The client closes, the gateway too, and the place is free again.
    client.sockets.get_mut::<tcp::Socket<'_>>(stream).close();
    net.until(&mut client, "the end of the stream", |client| {
        let state = client.sockets.get::<tcp::Socket<'_>>(stream).state();
        matches!(state, tcp::State::TimeWait | tcp::State::Closed).then_some(())
    });
    assert_eq!(net.handle.counters().tcp_refused.get(), 0);
}

#[test]
fn one_source_has_its_share_of_streams_and_silence_ends_them() {
    let mut net = Net::new(config());
    let mut client = Client::new(1, net.now);
    client.set_address(Ipv4Cidr::new(ip(50), 24));
    let streams: Vec<_> = (0..6).map(|i| net.connect(&mut client, 6000 + i)).collect();
    for stream in &streams[..4] {
        net.connected(&mut client, *stream);
    }
    for _ in 0..100 {
        net.turn(&mut client);
        net.now = net.now.after(Nanos::MILLI);
    }
    let open = |c: &Client, s: &SocketHandle| c.sockets.get::<tcp::Socket<'_>>(*s).may_send();
    assert_eq!(streams.iter().filter(|s| open(&client, s)).count(), 4);
    assert!(net.handle.counters().tcp_refused.get() >= 2);
    // Another source has its own.
    let mut other = Client::new(2, net.now);
    other.set_address(Ipv4Cidr::new(ip(51), 24));
    let stream = net.connect(&mut other, 7000);
    net.connected(&mut other, stream);
    // After ten seconds of silence the first four are reset, and the others, still trying, get in.
    net.until(&mut client, "the refused ones", |c| streams[4..].iter().all(|s| open(c, s)).then_some(()));
    assert!(!streams[..4].iter().any(|s| open(&client, s)));
}

#[test]
fn a_closed_port_refuses_at_once() {
    let mut net = Net::new(config());
    let mut client = Client::new(1, net.now);
    client.set_address(Ipv4Cidr::new(ip(50), 24));
    let began = net.now;
    let handle = net.connect(&mut client, 5000);
    let socket = client.sockets.get_mut::<tcp::Socket<'_>>(handle);
    socket.abort();
    socket.connect(client.interface.context(), (GATEWAY, 80), 5001).unwrap();
    net.until(&mut client, "the refusal", |client| {
        (client.sockets.get::<tcp::Socket<'_>>(handle).state() == tcp::State::Closed).then_some(())
    });
    assert!(net.now.since(began) < Nanos::MILLI.times(100));
    assert_eq!(net.handle.counters().tcp_strays.get(), 1);
}

#[test]
fn the_port_says_when_it_has_to_be_looked_at() {
    use std::sync::atomic::{AtomicUsize, Ordering};
    let mut net = Net::new(config());
    let wakes = Arc::new(AtomicUsize::new(0));
    let counter = wakes.clone();
    net.handle.set_port_waker(Arc::new(move || {
        counter.fetch_add(1, Ordering::Relaxed);
    }));
    assert_eq!(wakes.load(Ordering::Relaxed), 1, "for what was left before");
    assert!(!net.port.arm().unwrap() && !net.port.answers());
    assert_eq!(net.port.service(net.now).unwrap(), None);
    let ping = super::link::echo(&route(1, ip(20)), b"x");
    let mut batch = Batch::default();
    batch.push(ping[..].into(), Offload::NONE);
    let query = packet::udp(&route(1, ip(20)), 999, 53, QUERY_OUTSIDE);
    batch.push(query[..].into(), Offload::NONE);
    let sent = |net: &mut Net, which: &[u16]| {
        net.port.transmit(&batch, which, &mut net.drops).unwrap();
        net.port.flush().unwrap();
        net.port.answers()
    };
    assert!(sent(&mut net, &[0, 0]));
    for left in [true, false] {
        let mut out = Batch::default();
        assert_eq!(net.port.receive(1, &mut out, &mut net.drops).unwrap(), 1);
        drop(out);
        net.port.release().unwrap();
        assert_eq!(net.port.arm().unwrap(), left);
    }
    // No frame to receive, but a timer that the worker does not know of.
    assert!(sent(&mut net, &[1]) && net.port.arm().unwrap());
    assert_eq!(net.port.service(net.now).unwrap(), Some(net.now.after(Nanos::MILLI.times(4500))));
    assert!(!net.port.arm().unwrap());
    net.handle.set_forward(false);
    assert_eq!(wakes.load(Ordering::Relaxed), 2);
    assert!(net.port.arm().unwrap(), "mail");
    net.port.service(net.now).unwrap();
    assert!(!net.port.arm().unwrap());
}

#[test]
fn a_stream_of_what_is_no_query_is_reset() {
    let mut net = Net::new(config());
    let mut client = Client::new(1, net.now);
    client.set_address(Ipv4Cidr::new(ip(50), 24));
    for (port, length) in [(5100, 0u16), (5101, 11), (5102, 4097)] {
        let stream = net.connect(&mut client, port);
        net.connected(&mut client, stream);
        let bytes = [&length.to_be_bytes()[..], &[0; 1400]].concat();
        client.sockets.get_mut::<tcp::Socket<'_>>(stream).send_slice(&bytes).unwrap();
        net.until(&mut client, "a reset", |c| (!c.sockets.get::<tcp::Socket<'_>>(stream).is_open()).then_some(()));
    }
    assert_eq!(net.handle.counters().dns_malformed.get(), 0, "none was read as a query");
}

#[test]
fn a_segment_full_of_queries_is_answered_over_some_turns() {
    let mut net = Net::new(config());
    let mut client = Client::new(1, net.now);
    client.set_address(Ipv4Cidr::new(ip(50), 24));
    let stream = net.connect(&mut client, 5200);
    net.connected(&mut client, stream);
    let many = framed(QUERY_GATEWAY).repeat(40);
    client.sockets.get_mut::<tcp::Socket<'_>>(stream).send_slice(&many).unwrap();
    let answered = |net: &Net| net.handle.counters().dns_local_answers.get();
    let mut most = 0;
    while answered(&net) < 40 {
        let before = answered(&net);
        // One frame in, one poll: twice the rounds of one go.
        net.turn(&mut client);
        most = most.max(answered(&net) - before);
        net.now = net.now.after(Nanos::MILLI);
        assert!(net.now < Nanos::SECOND.times(1005), "{} answered", answered(&net));
    }
    assert!((1..=2 * STREAM_ROUNDS as u64).contains(&most), "{most} in one turn");
}

#[test]
fn four_sources_do_not_have_all_streams() {
    let mut net = Net::new(config());
    let mut kept = Vec::new();
    for n in 1..=4 {
        let mut client = Client::new(n, net.now);
        client.set_address(Ipv4Cidr::new(ip(50 + n), 24));
        (0..4).for_each(|i| {
            net.connect(&mut client, 6000 + i);
        });
        for _ in 0..50 {
            net.turn(&mut client);
            net.now = net.now.after(Nanos::MILLI);
        }
        kept.push(client);
    }
    let mut other = Client::new(9, net.now);
    other.set_address(Ipv4Cidr::new(ip(60), 24));
    let (stream, began) = (net.connect(&mut other, 7000), net.now);
    net.connected(&mut other, stream);
    assert!(net.now.since(began) < Nanos::SECOND.times(5), "it need not wait for the others' end");
}

#[test]
fn queries_that_nobody_takes_do_not_pile_up() {
    let mut net = Net::new(config());
    let mut frames = 0;
    for n in 0..2000u16 {
        // Each runs out before the next, so the forwarder has room all the time.
        net.now = net.now.after(Nanos::SECOND.times(5));
        net.port.service(net.now).unwrap();
        let mut query = QUERY_OUTSIDE.to_vec();
        query[..2].copy_from_slice(&n.to_be_bytes());
        let frame = packet::udp(&route(1, ip(50)), 6000, 53, &query);
        let mut batch = Batch::default();
        batch.push(frame[..].into(), Offload::NONE);
        net.port.transmit(&batch, &[0], &mut net.drops).unwrap();
        net.port.flush().unwrap();
        frames += 1;
        drop(batch);
        let mut batch = Batch::default();
        net.port.receive(64, &mut batch, &mut net.drops).unwrap();
        drop(batch);
        net.port.release().unwrap();
    }
    assert_eq!((frames, net.handle.take_queries().len()), (2000, 256));
}
