//! The conformance suite with the kernel's vxlan device at the other end, over IPv4 and IPv6; and
//! what a tunnel refuses.

use std::net::UdpSocket;
use std::os::fd::{AsFd, AsRawFd};

use tombolo_ring::vxlan::HEADER_BYTES;
use tombolo_switch::detail::Detail;
use tombolo_switch::frame::{Offload, SegmentKind};
use tombolo_switch::wait::Waiter;

use super::*;
use crate::conformance::{Abilities, Fixture, Rig, Violation, frame, number, partial_frame, plain, same};
use crate::kernel_side::{self, KernelSide};
use crate::pair::OwnedFrame;

const VNI: u32 = 0x12_3456;
const PORT: u16 = 4789;

/// The addresses of both ends, and of a third one on the kernel's side that is no remote.
trait Family {
    const KIND: &'static str;
    const OURS: &'static str;
    const THEIRS: &'static str;
    const STRANGER: &'static str;
    const PREFIX: u8;
}

struct Four;
struct Six;

impl Family for Four {
    const KIND: &'static str = "vxlan";
    const OURS: &'static str = "192.0.2.1";
    const THEIRS: &'static str = "192.0.2.2";
    const STRANGER: &'static str = "192.0.2.3";
    const PREFIX: u8 = 24;
}

impl Family for Six {
    const KIND: &'static str = "vxlan over IPv6";
    const OURS: &'static str = "2001:db8::1";
    const THEIRS: &'static str = "2001:db8::2";
    const STRANGER: &'static str = "2001:db8::3";
    const PREFIX: u8 = 64;
}

fn address(text: &str) -> SocketAddr {
    SocketAddr::new(text.parse().unwrap(), PORT)
}

/// A tunnel in this namespace.
fn tunnel(local: SocketAddr, remotes: Vec<SocketAddr>) -> VxlanConfig {
    let (vni, directory) = (Vni::new(VNI).unwrap(), Directory::default());
    VxlanConfig { vni, local, remotes, mtu: 1500, learning: true, directory, storm: Storm::OFF, netns: None }
}

/// Two namespaces with a cable between them: the port's, and the one with the kernel's end of the
/// tunnel.
struct Tunnel<F> {
    ours: Netns,
    theirs: Netns,
    side: KernelSide,
    family: std::marker::PhantomData<F>,
}

impl<F: Family> Tunnel<F> {
    fn cable(ours: &Netns, theirs: &Netns) {
        let own = format!("/proc/{}/fd/{}", std::process::id(), theirs.as_fd().as_raw_fd());
        kernel_side::run(ours, &format!("ip link add va mtu 1600 type veth peer name vb mtu 1600 netns {own}"));
        for (netns, name, addresses) in [(ours, "va", &[F::OURS][..]), (theirs, "vb", &[F::THEIRS, F::STRANGER])] {
            for address in addresses {
                let nodad = if address.contains(':') { "nodad" } else { "" };
                kernel_side::run(netns, &format!("ip address add {address}/{} dev {name} {nodad}", F::PREFIX));
            }
            kernel_side::run(netns, &format!("ip link set {name} up"));
        }
        let (ip, remote) = (F::THEIRS, F::OURS);
        let device = format!("ip link add vx mtu 1500 type vxlan id {VNI} dstport {PORT} local {ip} remote {remote}");
        kernel_side::run(theirs, &device);
        // Only what the test itself sends: IPv6 would announce itself.
        let quiet = || std::fs::write("/proc/sys/net/ipv6/conf/vx/disable_ipv6", "1").unwrap();
        theirs.run(quiet).unwrap();
        kernel_side::run(theirs, "ip link set vx up");
        kernel_side::await_carrier(ours, "va");
        kernel_side::await_carrier(theirs, "vx");
        // Neighbour discovery is done when this is answered: a queue for it holds few packets.
        kernel_side::run(theirs, &format!("ping -q -c 1 -W 10 {}", F::OURS));
        kernel_side::run(ours, &format!("ping -q -c 1 -W 10 {}", F::THEIRS));
    }

    /// A datagram from the kernel's namespace.
    fn datagram(&self, from: &str, bytes: &[u8]) {
        let socket = self.theirs.run(|| UdpSocket::bind((from, 0)).unwrap()).unwrap();
        socket.send_to(bytes, address(F::OURS)).unwrap();
    }
}

/// A namespace whose interfaces have IPv6, but say nothing by it.
fn namespace() -> Netns {
    let netns = Netns::anonymous().unwrap();
    let quiet = || {
        for (key, value) in [("router_solicitations", "0"), ("accept_dad", "0"), ("accept_ra", "0")] {
            std::fs::write(format!("/proc/sys/net/ipv6/conf/default/{key}"), value).unwrap();
        }
    };
    netns.run(quiet).unwrap();
    netns
}

impl<F: Family> Fixture for Tunnel<F> {
    const KIND: &'static str = F::KIND;

    fn missing() -> Option<String> {
        kernel_side::missing()
    }

    fn make(registration: Registration) -> (Box<dyn Port>, Self) {
        let (ours, theirs) = (namespace(), namespace());
        Self::cable(&ours, &theirs);
        let config = VxlanConfig { netns: Some(ours.clone()), ..tunnel(address(F::OURS), vec![address(F::THEIRS)]) };
        let port = VxlanPort::open(&config, registration, None).unwrap();
        let side = KernelSide::open(&theirs, "vx");
        (Box::new(port), Tunnel { ours, theirs, side, family: std::marker::PhantomData })
    }

    fn abilities(&self) -> Abilities {
        Abilities { frame_bytes: (14, 1514), offload: false, back_pressure: false, window: 32 }
    }

    fn inject(&mut self, bytes: &[u8], offload: Offload) -> bool {
        self.side.inject(bytes, offload)
    }

    fn collect(&mut self) -> Option<OwnedFrame> {
        self.side.collect()
    }

    fn disconnect(&mut self) {
        kernel_side::run(&self.theirs, "ip link del vx");
        kernel_side::run(&self.ours, "ip link del va");
    }

    fn connect(&mut self) {
        Self::cable(&self.ours, &self.theirs);
        self.side = KernelSide::open(&self.theirs, "vx");
    }

    fn send_runt(&mut self) -> Violation {
        let header = vxlan::header(Vni::new(VNI).unwrap());
        self.datagram(F::THEIRS, &[&header[..], &[2; 13]].concat());
        Violation::Dropped(Reason::Runt)
    }

    fn send_over_long(&mut self) -> Violation {
        Violation::Impossible("a UDP datagram cannot be longer than the longest frame")
    }

    fn send_bad_offload(&mut self) -> Violation {
        Violation::Impossible("no offload state travels in a tunnel")
    }

    fn break_protocol(&mut self) -> Violation {
        Violation::Impossible("each datagram is judged by itself")
    }
}

mod conformance {
    crate::conformance_suite!(super::Tunnel<super::Four>);
}

mod conformance6 {
    crate::conformance_suite!(super::Tunnel<super::Six>);
}

/// Runs a test with the real tunnel, or says why not.
fn with_tunnel(name: &str, test: impl Fn(Rig<Tunnel<Four>>)) {
    crate::conformance::run::<Tunnel<Four>>(name, |_| test(Rig::up()));
}

#[test]
fn only_packets_of_the_network_from_its_remotes_come_in() {
    with_tunnel("only_packets_of_the_network", |mut rig| {
        let inner = frame(7, 60);
        let good = [&vxlan::header(Vni::new(VNI).unwrap())[..], &inner].concat();
        let mut flags = good.clone();
        flags[0] = 0;
        let mut other = good.clone();
        other[6] ^= 1;
        for (from, bytes, reason) in [
            (Four::STRANGER, &good[..], Reason::UnknownRemote),
            (Four::THEIRS, &flags, Reason::BadTunnel),
            (Four::THEIRS, &good[..HEADER_BYTES - 1], Reason::BadTunnel),
            (Four::THEIRS, &[], Reason::BadTunnel),
            (Four::THEIRS, &other, Reason::WrongVni),
            (Four::THEIRS, &good[..HEADER_BYTES], Reason::Runt),
        ] {
            let before = rig.rx_drops.of(reason);
            rig.peer.datagram(from, bytes);
            rig.until_woken(reason.name(), |rig| rig.rx_drops.of(reason) == before + 1);
        }
        assert_eq!(rig.rx_drops.total(), 6);
        assert!(rig.received.is_empty() && rig.faults.is_empty());
        rig.peer.datagram(Four::THEIRS, &good);
        rig.until_woken("the good one", |rig| rig.received.len() == 1);
        assert_eq!(rig.received[0].bytes, inner);
    });
}

#[test]
fn an_address_that_was_heard_from_a_remote_is_sent_to_that_remote_alone() {
    let here = |n: u8| format!("127.77.{n}.1").parse::<std::net::IpAddr>().unwrap();
    let remotes: Vec<UdpSocket> = (1..=3)
        .map(|n| {
            let socket = UdpSocket::bind((here(n), PORT)).unwrap();
            socket.set_nonblocking(true).unwrap();
            socket
        })
        .collect();
    for learning in [true, false] {
        let ends = remotes.iter().map(|socket| socket.local_addr().unwrap()).collect();
        let config = VxlanConfig { learning, ..tunnel(SocketAddr::new(here(0), PORT), ends) };
        let mut reactor = tombolo_worker::reactor::Reactor::new().unwrap();
        let registration = reactor.registrar().registration(tombolo_switch::wait::Token(1));
        let mut port = VxlanPort::open(&config, registration, None).unwrap();
        let mut drops = Drops::default();
        let mut send = |port: &mut VxlanPort, frames: &[OwnedFrame]| {
            let mut batch = Batch::with_capacity(frames.len());
            frames.iter().for_each(|frame| batch.push(Foreign::from(&frame.bytes[..]), frame.offload));
            let which: Vec<u16> = (0..frames.len() as u16).collect();
            let sent = port.transmit(&batch, &which, &mut drops).unwrap();
            assert_eq!((sent.frames as usize, drops.total()), (frames.len(), 0), "{drops:?}");
            remotes
                .iter()
                .map(|remote| std::iter::from_fn(|| remote.recv(&mut [0; 2000]).ok()).count())
                .collect::<Vec<_>>()
        };
        port.service(Nanos(1)).unwrap();
        // Nothing is known: each frame goes to all. Many equal ones are cut by the kernel.
        assert_eq!(send(&mut port, &plain(0, vec![100; 60])), [60; 3]);
        let mut heard = frame(9, 60);
        remotes[1].send_to(&[&vxlan::header(config.vni)[..], &heard].concat(), config.local).unwrap();
        let mut batch = Batch::with_capacity(8);
        reactor.wait(Some(Nanos(5_000_000_000)), &mut Vec::new());
        assert_eq!(port.receive(8, &mut batch, &mut Drops::default()), Ok(1));
        drop(batch);
        // Its answer, with the addresses exchanged.
        let (to, from) = heard.split_at_mut(6);
        to.swap_with_slice(&mut from[..6]);
        let answers = vec![OwnedFrame { bytes: heard, offload: Offload::NONE }; 3];
        assert_eq!(send(&mut port, &answers), if learning { [0, 3, 0] } else { [3; 3] });
        port.service(Nanos(1 + AGE.0)).unwrap();
        assert_eq!(send(&mut port, &answers), [3; 3], "a silent one is forgotten");
        drop(port);
    }
}

#[test]
fn a_hostile_remote_takes_no_room_from_the_others_and_is_named() {
    let here = |n: u8| format!("127.83.{n}.1").parse::<IpAddr>().unwrap();
    let remotes = [1, 2].map(|n| UdpSocket::bind((here(n), PORT)).unwrap());
    let ends = remotes.iter().map(|socket| socket.local_addr().unwrap()).collect();
    let config =
        VxlanConfig { storm: Storm::default(), learning: false, ..tunnel(SocketAddr::new(here(0), PORT), ends) };
    let reactor = tombolo_worker::reactor::Reactor::new().unwrap();
    let registration = reactor.registrar().registration(tombolo_switch::wait::Token(1));
    let mut port = VxlanPort::open(&config, registration, None).unwrap();
    port.service(Nanos(1)).unwrap();
    let mut drops = Drops::default();
    // Sends frames and takes them in at once, so that no buffer overflows; gives how many came.
    let mut through = |port: &mut VxlanPort, remote: usize, frames: &mut dyn Iterator<Item = Vec<u8>>| {
        let mut came = 0;
        loop {
            let sent = (&mut *frames).take(SLOTS / 2).inspect(|frame| {
                remotes[remote].send_to(&[&vxlan::header(config.vni)[..], frame].concat(), config.local).unwrap();
            });
            if sent.count() == 0 {
                return came;
            }
            // Loopback delivers before `send_to` returns.
            let mut batch = Batch::with_capacity(SLOTS);
            port.receive(SLOTS, &mut batch, &mut drops).unwrap();
            came += batch.frames().len();
            drop(batch);
            port.release().unwrap();
        }
    };
    let made = |destination: [u8; 6], n: u32| {
        let mut bytes = frame(1, 60);
        bytes[..6].copy_from_slice(&destination);
        bytes[6..12].copy_from_slice(&[2, 1, (n >> 24) as u8, (n >> 16) as u8, (n >> 8) as u8, n as u8]);
        bytes
    };
    let one = [2, 0, 0, 0, 0, 9];
    let count = MAX_ENTRIES + 500;
    assert_eq!(through(&mut port, 1, &mut (0..1).map(|n| made(one, 1 << 24 | n))), 1);
    assert_eq!(through(&mut port, 0, &mut (0..count as u32).map(|n| made(one, n))), MAX_ENTRIES - 1);
    assert_eq!(through(&mut port, 1, &mut (0..100).map(|n| made(one, 1 << 24 | n))), 100, "the other has its places");
    assert_eq!(through(&mut port, 0, &mut (0..2000).map(|_| made([0xff; 6], 1))), 750, "its share, and the pool");
    assert_eq!(through(&mut port, 1, &mut (0..200).map(|_| made([0xff; 6], 1 << 24))), 200);
    assert_eq!(through(&mut port, 0, &mut (0..100).map(|_| made(one, 1))), 100, "its other frames pass");
    let named = port.details().into_iter().find(|(key, _)| *key == "limited_remotes").unwrap().1;
    assert_eq!(named, Detail::Texts(vec!["127.83.1.1 (1250 frames to groups, 501 from further addresses)".into()]));
    // Another limit holds from the next turn on.
    config.directory.set_storm(Storm::OFF);
    port.service(Nanos(2)).unwrap();
    assert_eq!(through(&mut port, 0, &mut (0..2000).map(|_| made([0xff; 6], 1))), 2000);
    assert_eq!((drops.of(Reason::RemoteAddresses), drops.of(Reason::RemoteStorm)), (501, 1250), "{drops:?}");
}

#[test]
fn what_is_too_long_for_the_path_is_counted_and_nothing_is_sent_in_fragments() {
    with_tunnel("what_is_too_long_for_the_path", |mut rig| {
        kernel_side::run(&rig.peer.ours, "ip link set va mtu 1400");
        rig.settle();
        let frames = plain(0, [60, 1514, 1514, 60]);
        assert_eq!(rig.send(&frames), 2);
        assert_eq!(rig.tx_drops.of(Reason::TunnelTooLong), 2, "{:?}", rig.tx_drops);
        let got = rig.collect(2);
        same(&[frames[0].clone(), frames[3].clone()], &got);
        // 1350 with the inner header of 14 is what fits.
        rig.deliver(&plain(10, [1364, 1364]));
        assert_eq!(rig.send(&plain(20, [1365])), 0);
    });
}

#[test]
fn an_address_that_leaves_its_interface_takes_the_link_down_until_it_is_back() {
    with_tunnel("an_address_that_leaves_its_interface", |mut rig| {
        kernel_side::run(&rig.peer.ours, &format!("ip address del {}/24 dev va", Four::OURS));
        rig.until("the link goes down", |rig| rig.port.link() == Carrier::Down);
        kernel_side::run(&rig.peer.ours, &format!("ip address add {}/24 dev va", Four::OURS));
        rig.until("the link comes up", |rig| rig.port.link() == Carrier::Up);
        let frames = plain(0, [60]);
        rig.deliver(&frames);
    });
}

#[test]
fn flows_have_their_own_source_ports_and_keep_their_order() {
    let mut seen = [0; FLOWS];
    for n in 0..200u8 {
        let mut bytes = partial_frame(1, 80, SegmentKind::Tcp4, None).bytes;
        bytes[35] = n;
        let mut other = bytes.clone();
        (other[19], other[70]) = (0x5a, 0x5a);
        let mut batch = Batch::with_capacity(2);
        batch.push(Foreign::from(&bytes[..]), Offload::NONE);
        // Another packet of the flow: its payload and identification differ.
        batch.push(Foreign::from(&other[..]), Offload::NONE);
        let [a, b] = batch.frames() else { panic!("two frames") };
        assert_eq!(flow_of(a), flow_of(b));
        seen[flow_of(a)] += 1;
    }
    assert!(seen.iter().all(|n| *n > 20), "{seen:?}");
    assert_eq!(number(&frame(1, 60)), Some(1));
}

#[test]
fn remotes_that_make_no_tunnel_are_refused() {
    let reactor = tombolo_worker::reactor::Reactor::new().unwrap();
    let open = |local: &str, remotes: &[&str]| {
        let remotes = remotes.iter().map(|remote| remote.parse().unwrap()).collect();
        let config = tunnel(local.parse().unwrap(), remotes);
        let registration = reactor.registrar().registration(tombolo_switch::wait::Token(1));
        VxlanPort::open(&config, registration, None).map(|_| ()).unwrap_err().to_string()
    };
    assert!(open("127.0.0.1:4790", &[]).contains("1 to 128 remotes"));
    for remote in ["127.0.0.1:4790", "[::1]:4790", "0.0.0.0:4790", "224.0.0.1:4790", "127.0.0.2:0"] {
        assert!(open("127.0.0.1:4790", &[remote]).contains(remote), "{remote}");
    }
    assert!(open("127.0.0.1:4790", &["127.0.0.2:1", "127.0.0.2:2"]).contains("127.0.0.2:2"));
    assert!(open("0.0.0.0:4790", &["127.0.0.2:1"]).contains("0.0.0.0:4790"));
    assert!(open("192.0.2.77:4790", &["127.0.0.2:1"]).contains("receiving at 192.0.2.77:4790"));
}

#[test]
fn a_port_that_takes_over_receives_what_came_meanwhile() {
    let reactor = tombolo_worker::reactor::Reactor::new().unwrap();
    let registration = || reactor.registrar().registration(tombolo_switch::wait::Token(1));
    let remote = UdpSocket::bind("127.78.0.2:4789").unwrap();
    let config = tunnel("127.78.0.1:4789".parse().unwrap(), vec![remote.local_addr().unwrap()]);
    let first = VxlanPort::open(&config, registration(), None).unwrap();
    let in_use = VxlanPort::open(&config, registration(), None).map(|_| ()).unwrap_err();
    assert!(in_use.to_string().contains("in use"), "{in_use}");
    let handed = first.hand_over();
    remote.send_to(&[&vxlan::header(config.vni)[..], &frame(1, 60)].concat(), config.local).unwrap();
    let mut second = VxlanPort::open(&config, registration(), handed).unwrap();
    drop(first);
    let mut batch = Batch::with_capacity(8);
    assert_eq!(second.receive(8, &mut batch, &mut Drops::default()), Ok(1));
    drop(batch);
    // The socket of another address, or of another kind of port, is not used.
    let elsewhere = VxlanConfig { local: "127.78.0.3:4789".parse().unwrap(), ..config.clone() };
    let third = VxlanPort::open(&elsewhere, registration(), second.hand_over()).unwrap();
    assert_eq!(third.receiver.local_addr().unwrap(), elsewhere.local);
    let strange = HandOver { state: vec![1], fds: second.hand_over().unwrap().fds };
    assert!(VxlanPort::open(&config, registration(), Some(strange)).is_err(), "the port is in use");
}

/// A tunnel with ends that the test reads itself, and a directory.
struct Ends {
    reactor: tombolo_worker::reactor::Reactor,
    port: VxlanPort,
    remotes: Vec<UdpSocket>,
    directory: Directory,
    drops: Drops,
}

impl Ends {
    fn open(net: u8, learning: bool) -> Ends {
        let here = |n: u8| std::net::IpAddr::from([127, net, n, 1]);
        let remotes: Vec<UdpSocket> = (1..=2).map(|n| UdpSocket::bind((here(n), PORT)).unwrap()).collect();
        remotes.iter().for_each(|socket| socket.set_nonblocking(true).unwrap());
        let ends = remotes.iter().map(|socket| socket.local_addr().unwrap()).collect();
        let config = VxlanConfig { learning, ..tunnel(SocketAddr::new(here(0), PORT), ends) };
        let reactor = tombolo_worker::reactor::Reactor::new().unwrap();
        let registration = reactor.registrar().registration(tombolo_switch::wait::Token(1));
        let directory = config.directory.clone();
        let mut port = VxlanPort::open(&config, registration, None).unwrap();
        port.service(Nanos(1)).unwrap();
        Ends { reactor, port, remotes, directory, drops: Drops::default() }
    }

    fn end(&self, n: usize) -> std::net::IpAddr {
        self.remotes[n].local_addr().unwrap().ip()
    }

    /// Sends frames; how many came to each remote.
    fn send(&mut self, frames: &[&[u8]]) -> Vec<usize> {
        let mut batch = Batch::with_capacity(frames.len());
        frames.iter().for_each(|frame| batch.push(Foreign::from(*frame), Offload::NONE));
        let which: Vec<u16> = (0..frames.len() as u16).collect();
        let sent = self.port.transmit(&batch, &which, &mut self.drops).unwrap();
        assert_eq!((sent.frames as usize, self.drops.total()), (frames.len(), 0), "{:?}", self.drops);
        let came = |remote: &UdpSocket| std::iter::from_fn(|| remote.recv(&mut [0; 2000]).ok()).count();
        self.remotes.iter().map(came).collect()
    }

    /// What the worker gets, in one turn of `budget` frames, and how much of that was used.
    fn receive(&mut self, budget: usize) -> (Vec<Vec<u8>>, usize) {
        let mut batch = Batch::with_capacity(budget);
        let used = self.port.receive(budget, &mut batch, &mut self.drops).unwrap();
        let frames = batch.frames().iter().map(|frame| frame.head().to_vec()).collect();
        drop(batch);
        self.port.release().unwrap();
        (frames, used)
    }

    fn detail(&self, name: &str) -> Detail {
        self.port.details().into_iter().find(|(key, _)| *key == name).unwrap().1
    }
}

const ASKER: Mac = [2, 0, 0, 0, 0, 7];
const HOLDER: Mac = [2, 0, 0, 0, 0, 1];

fn request(target: [u8; 4]) -> Vec<u8> {
    [&[0xff; 6][..], &ASKER, &[8, 6, 0, 1, 8, 0, 6, 4, 0, 1], &ASKER, &[10, 87, 0, 9], &[0; 6], &target].concat()
}

#[test]
fn a_place_of_the_control_plane_is_used_before_what_was_heard_and_without_learning_too() {
    for (net, learning) in [(79, true), (80, false)] {
        let mut ends = Ends::open(net, learning);
        let frame = [&HOLDER[..], &ASKER, &[8, 0], &[0; 46]].concat();
        assert_eq!(ends.send(&[&frame]), [1, 1]);
        // It is heard from the second one.
        let heard = [&ASKER[..], &HOLDER, &[8, 0], &[0; 46]].concat();
        let to = ends.port.config.local;
        ends.remotes[1].send_to(&[&ends.port.header[..], &heard].concat(), to).unwrap();
        ends.reactor.wait(Some(Nanos(5_000_000_000)), &mut Vec::new());
        assert_eq!(ends.receive(8), (vec![heard], 1));
        assert_eq!(ends.send(&[&frame]), if learning { [0, 1] } else { [1, 1] });
        let mut places = Places::default();
        places.place(HOLDER, ends.end(0));
        ends.directory.set(places.clone());
        ends.port.service(Nanos(2)).unwrap();
        assert_eq!(ends.send(&[&frame]), [1, 0]);
        // At a machine that is no remote: as if nothing were said.
        places.place(HOLDER, std::net::IpAddr::from([127, net, 9, 1]));
        ends.directory.set(places);
        ends.port.service(Nanos(3)).unwrap();
        assert_eq!(ends.send(&[&frame]), if learning { [0, 1] } else { [1, 1] });
        ends.directory.set(Places::default());
        ends.port.service(Nanos(4)).unwrap();
        assert_eq!(ends.send(&[&frame]), if learning { [0, 1] } else { [1, 1] });
    }
}

#[test]
fn a_question_for_a_known_address_is_answered_here_and_others_go_to_all_remotes() {
    let mut ends = Ends::open(81, true);
    let (known, unknown) = (request([10, 87, 0, 12]), request([10, 87, 0, 13]));
    assert_eq!(ends.send(&[&known]), [1, 1], "nothing is known yet");
    let mut places = Places::default();
    places.place(HOLDER, ends.end(0));
    places.answer_for([10, 87, 0, 12].into(), HOLDER);
    ends.directory.set(places);
    ends.port.service(Nanos(2)).unwrap();
    // Both kinds in one turn.
    let tagged = [&known[..12], &[0x81, 0, 0, 5], &known[12..]].concat();
    assert_eq!(ends.send(&[&known, &unknown, &tagged]), [2, 2]);
    assert!(ends.port.answers() && ends.port.arm().unwrap());
    let (frames, used) = ends.receive(8);
    assert_eq!((frames.len(), used), (1, 1));
    assert_eq!(
        (&frames[0][..6], &frames[0][6..12], &frames[0][28..32]),
        (&ASKER[..], &HOLDER[..], &[10, 87, 0, 12][..])
    );
    assert!(!ends.port.answers() && !ends.port.arm().unwrap());
    assert_eq!((ends.detail("arp_answers"), ends.detail("nd_answers")), (1u64.into(), 0u64.into()));
    assert_eq!((ends.detail("places"), ends.detail("answered_addresses")), (1u64.into(), 1u64.into()));
}

#[test]
fn answers_that_wait_are_bounded_and_leave_half_of_a_turn_to_the_remotes() {
    let mut ends = Ends::open(82, true);
    let mut places = Places::default();
    places.answer_for([10, 87, 0, 12].into(), HOLDER);
    ends.directory.set(places);
    ends.port.service(Nanos(2)).unwrap();
    let known = request([10, 87, 0, 12]);
    let many = vec![&known[..]; 60];
    let mut flooded = 0;
    for _ in 0..5 {
        flooded += ends.send(&many)[0];
    }
    assert_eq!(flooded, 300 - MAX_WAITING, "what has no room goes its usual way");
    let heard = [&ASKER[..], &HOLDER, &[8, 0], &[0; 46]].concat();
    for _ in 0..4 {
        ends.remotes[1].send_to(&[&ends.port.header[..], &heard].concat(), ends.port.config.local).unwrap();
    }
    ends.reactor.wait(Some(Nanos(5_000_000_000)), &mut Vec::new());
    let (frames, used) = ends.receive(8);
    assert_eq!((frames.iter().filter(|frame| **frame == heard).count(), frames.len(), used), (4, 8, 8));
    assert_eq!((ends.receive(1), ends.receive(64).1), ((vec![frames[0].clone()], 1), 32));
    ends.port.reset(&Fault { kind: FaultKind::System, detail: "test".into() });
    assert!(!ends.port.answers());
}

#[test]
fn frames_that_the_kernel_has_joined_come_in_order_over_several_turns() {
    let mut ends = Ends::open(83, true);
    // Five datagrams of one length, and a shorter one, which may be the last of a message.
    let frames: Vec<Vec<u8>> =
        (0..6).map(|n| [&ASKER[..], &HOLDER, &[8, 0], &vec![n; if n == 5 { 50 } else { 70 }]].concat()).collect();
    let bytes: Vec<u8> = frames.iter().flat_map(|frame| [&ends.port.header[..], frame].concat()).collect();
    let (pieces, segment) = ([Piece::from(&bytes[..])], (HEADER_BYTES + frames[0].len()) as u16);
    let messages = [Message { to: ends.port.config.local, end: 1, segment }];
    assert_eq!(Outbox::default().send(&ends.remotes[1], &pieces, 0, &messages), Ok(1));
    ends.reactor.wait(Some(Nanos(5_000_000_000)), &mut Vec::new());
    assert_eq!(ends.receive(2), (frames[..2].to_vec(), 2));
    assert!(ends.port.joins && ends.port.arm().unwrap(), "more waits, of which the kernel knows nothing");
    assert_eq!(ends.receive(3), (frames[2..5].to_vec(), 3));
    assert_eq!(ends.receive(8), (frames[5..].to_vec(), 1));
    assert!(!ends.port.arm().unwrap());
    assert_eq!((ends.receive(8), ends.detail("joined_by_kernel")), ((vec![], 0), true.into()));
    // What waits goes with a reset.
    assert_eq!(Outbox::default().send(&ends.remotes[1], &pieces, 0, &messages), Ok(1));
    ends.reactor.wait(Some(Nanos(5_000_000_000)), &mut Vec::new());
    assert_eq!(ends.receive(1).1, 1);
    ends.port.reset(&Fault { kind: FaultKind::System, detail: "test".into() });
    assert_eq!(ends.receive(8), (vec![], 0));
}

#[test]
fn what_the_kernel_has_joined_is_not_cut_by_the_end_of_a_turn_that_has_frames_already() {
    let mut ends = Ends::open(84, true);
    let frame = [&ASKER[..], &HOLDER, &[8, 0], &[7; 70]].concat();
    let bytes = [&ends.port.header[..], &frame].concat().repeat(5);
    let (pieces, segment) = ([Piece::from(&bytes[..])], (HEADER_BYTES + frame.len()) as u16);
    let message = [Message { to: ends.port.config.local, end: 1, segment }];
    let mut flood = |count| {
        (0..count).for_each(|_| assert_eq!(Outbox::default().send(&ends.remotes[1], &pieces, 0, &message), Ok(1)));
        ends.reactor.wait(Some(Nanos(5_000_000_000)), &mut Vec::new());
    };
    flood(3);
    let mut taken = Vec::new();
    while taken.iter().sum::<usize>() < 15 {
        let (frames, used) = ends.receive(8);
        // The last one ends with the last message, so less than the budget is used.
        assert_eq!(used, if taken.len() < 2 { 8 } else { 5 });
        taken.push(frames.len());
    }
    assert_eq!(taken, [5, 5, 5]);
}
