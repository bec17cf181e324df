//! What peers may send, one function per reader of it. Each panics where the code under test breaks
//! a promise.

use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use tombolo_port::stream::StreamPort;
use tombolo_port::vxlan::{Answer, answer_to};
use tombolo_ring::ivshmem::channel::{self, Channel, Shape};
use tombolo_ring::ivshmem::net::{Geometry, Receiver, Sections, Sender, initialise};
use tombolo_ring::ivshmem::region::{HEADER_BYTES, Header, Layout as LinkLayout};
use tombolo_ring::ivshmem::state::{Action, Machine, Offloads, TAKES_OFFLOADS};
use tombolo_ring::mem::{Foreign, ForeignMut};
use tombolo_ring::virtio::{DeviceQueue, Layout, QueueConfig, Region, RegionTable, features};
use tombolo_ring::vxlan;
use tombolo_rpc_proto::envelope;
use tombolo_switch::Nanos;
use tombolo_switch::drop::Drops;
use tombolo_switch::frame::{Batch, Checksum, MAX_FRAME_BYTES, Offload};
use tombolo_switch::gateway::{DhcpConfig, Gateway, GatewayConfig, Ipv6Config, LeaseStore, Member, Start};
use tombolo_switch::guard::Guard;
use tombolo_switch::mac::MacSettings;
use tombolo_switch::nat::{Address, Config, Forward, Nat, Protocol, Verdict};
use tombolo_switch::network::{Network, Plan};
use tombolo_switch::offload::{Transformer, Work};
use tombolo_switch::policy;
use tombolo_switch::port::{Caps, Port, Sent};
use tombolo_switch::vnet::VNET_HEADER_BYTES;
use tombolo_switch::wait::Token;
use tombolo_worker::reactor::Reactor;

use crate::{Behaviour, records};

const ROUTER_MAC: [u8; 6] = [2, 0, 0, 0, 0, 0xfe];
const GUEST_MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
const UPLINK_MAC: [u8; 6] = [2, 0, 0, 0, 0, 0xaa];
const OUTSIDE: Ipv4Addr = Ipv4Addr::new(192, 0, 0, 2);
const UPLINK: Ipv4Addr = Ipv4Addr::new(192, 0, 0, 1);

// --- an ivshmem link ---

/// Header page, state table, and two output sections of two pages.
const LINK_BYTES: usize = 0x6000;
/// What we send, and how the channel's sections are cut.
const SHAPE: Shape = Shape { slots: 4, record_bytes: 60, latest_bytes: 24 };

/// The flags of each record say what our end does. Before that its bytes are written over the
/// region at the place that its first two name, including our own section, as a v1 guest can. The
/// network's queues and the channel run over the same sections at once: neither relies on the
/// content of its own.
pub fn ivshmem(input: &[u8], behaviour: &mut Behaviour) {
    let mut bytes = vec![0u8; LINK_BYTES + 64];
    let skip = bytes.as_ptr().align_offset(64);
    let region = ForeignMut::from(&mut bytes[skip..skip + LINK_BYTES]);
    let Ok(layout) = LinkLayout::v1(LINK_BYTES as u64, 0, 2) else { panic!("six pages are a link") };
    let (Some(ours), Some(theirs)) = (layout.output(0), layout.output(1)) else { panic!("two peers") };
    let (Some(own), Some(peer)) = (region.slice(ours.start, ours.len()), region.slice(theirs.start, theirs.len()))
    else {
        panic!("the sections are inside")
    };
    let Ok(geometry) = Geometry::new(layout.output_bytes) else { panic!("two pages have room for rings") };
    let Ok(sections) = Sections::new(&geometry, own, peer.as_foreign()) else { panic!("sections of that length") };
    let Ok(channels) = channel::Sections::new(&SHAPE, own, peer.as_foreign()) else { panic!("the shape fits") };
    let mut machine = Machine::with_offloads(Offloads::Offered);
    let (mut sender, mut receiver) = (Sender::<16>::new(&geometry), Receiver::new(&geometry));
    let mut records_end = Channel::new(&SHAPE);
    let data = peer.as_mut_ptr() as usize + geometry.header_bytes() as usize;
    let data = data..peer.as_mut_ptr() as usize + peer.len();
    let mut to = [0; 64];
    for (step, write) in records(input) {
        if let Some((&place, bytes)) = write.split_first_chunk() {
            region.skip(usize::from(u16::from_be_bytes(place)) % LINK_BYTES).write_from(bytes);
        }
        let many = usize::from(step >> 4);
        match step & 15 {
            0..3 => {
                let word = region.as_foreign().load_u32(0x1004, Ordering::Acquire).unwrap_or(0);
                let action = machine.step(word);
                assert!(!machine.is_up() || word & !TAKES_OFFLOADS == 3, "up with a peer in {word}");
                assert!(!machine.is_up() || machine.uses_offloads() == (word & TAKES_OFFLOADS != 0), "{word:#x}");
                if action == Action::Initialise {
                    initialise(&geometry, own);
                    sender.restart();
                    receiver.restart();
                    records_end.restart();
                }
                behaviour.note((std::mem::discriminant(&action), machine.own().word(), machine.peer().word()));
            }
            3..6 => {
                let held = receiver.held();
                let mut total = 0;
                let got = receiver.receive(&sections, many, |view| {
                    let start = view.as_ptr() as usize;
                    assert!(data.contains(&start) && view.len() <= data.end - start, "{} bytes outside", view.len());
                    total += view.read_into(&mut to);
                });
                match got {
                    Ok(got) => {
                        assert!(got <= many && receiver.held() == held + got, "{got} of {many}");
                        behaviour.note(got);
                        behaviour.note_size(total);
                    }
                    Err(error) => {
                        behaviour.note(std::mem::discriminant(&error));
                        receiver.restart();
                    }
                }
            }
            6 => behaviour.note(receiver.release(&sections, many)),
            7 => behaviour.note(receiver.arm(&sections).map_err(|error| std::mem::discriminant(&error))),
            8 | 9 => {
                let place = sender.push(&sections, write.len());
                assert!(place.is_none_or(|place| place.len() == write.len()), "a place of another length");
                behaviour.note((place.is_some(), sender.publish(&sections)));
            }
            10 | 11 => {
                let got =
                    if step & 1 == 0 { sender.reclaim(&sections) } else { sender.arm(&sections).map(usize::from) };
                behaviour.note(got.as_ref().map_err(std::mem::discriminant));
                if got.is_err() {
                    sender.restart();
                }
            }
            12 => {
                // What is refused is named; what is taken has its sections inside, and is written
                // as it was read.
                let header = Header::read(region.as_foreign());
                behaviour.note(header.as_ref().map(|h| h.layout.max_peers).map_err(std::mem::discriminant));
                if let Ok(header) = header {
                    for peer in 0..header.layout.max_peers {
                        let inside = header.layout.output(peer).is_some_and(|section| section.end <= LINK_BYTES);
                        assert!(inside && header.layout.state(peer).is_some_and(|at| at + 4 <= LINK_BYTES), "{header}");
                    }
                    let mut again = [0xa5; HEADER_BYTES];
                    assert!(header.encode(&mut again).is_ok());
                    assert_eq!(Header::decode(&again, LINK_BYTES as u64), Ok(header));
                }
            }
            13 => {
                let sent = records_end.send(&channels, &write[..write.len().min(60)]);
                behaviour.note(sent.as_ref().map(|sent| *sent == channel::Sent::Full).map_err(std::mem::discriminant));
                if sent.is_err() {
                    records_end.restart();
                }
            }
            14 => {
                let got = records_end.recv(&channels, &mut to);
                behaviour.note(got.as_ref().map(|record| record.map(|r| r.len)).map_err(std::mem::discriminant));
                if got.is_err() {
                    records_end.restart();
                }
            }
            _ => {
                let got = records_end.get(&channels, &mut to);
                behaviour.note(got.as_ref().map(|record| record.map(|r| r.len)).map_err(std::mem::discriminant));
                let set = records_end.set(&channels, &write[..write.len().min(24)]);
                behaviour.note((set.is_ok(), records_end.check_peer(&channels).is_ok()));
            }
        }
        assert!(sender.outstanding() <= sender.depth(), "{} frames are out", sender.outstanding());
        assert!(sender.taken_bytes() <= geometry.data_bytes(), "{} bytes are taken", sender.taken_bytes());
        assert!(receiver.held() <= usize::from(geometry.num()), "{} frames are held", receiver.held());
        assert!(records_end.outstanding() <= 4, "{} records are out", records_end.outstanding());
    }
}

// --- the ring, device side ---

const RING_BASE: u64 = 0x1_0000;
const RING_BYTES: usize = 1 << 14;
const RING_SIZE: u16 = 16;
const MAX_CHAIN_BYTES: u32 = 4096;
const MAX_SEGMENTS: u16 = 8;

/// The first record is the ring's memory; of each other one, the flags' low bits say what the
/// device does, and the record is written over the memory before, at the place that its first two
/// bytes name: the driver never stops.
pub fn ring(input: &[u8], behaviour: &mut Behaviour) {
    let mut bytes = vec![0u8; RING_BYTES + 128];
    let skip = bytes.as_ptr().align_offset(128);
    let view = ForeignMut::from(&mut bytes[skip..skip + RING_BYTES]);
    let Ok(memory) = RegionTable::new([Region::new(RING_BASE, view)]) else { panic!("one region is a table") };
    let layout = Layout::new(RING_SIZE);
    let at = |offset: usize| RING_BASE + offset as u64;
    let mut steps = records(input);
    let Some((wishes, first)) = steps.next() else { return };
    view.write_from(first);
    let bits = [features::EVENT_IDX, features::INDIRECT_DESC, features::IN_ORDER];
    let wanted = bits.into_iter().enumerate().filter(|(n, _)| wishes & (1 << n) != 0).map(|(_, bit)| bit);
    let config = QueueConfig {
        size: RING_SIZE.into(),
        descriptors: at(layout.descriptors),
        available: at(layout.available),
        used: at(layout.used),
        features: features::VERSION_1 | wanted.sum::<u64>(),
        max_chain_bytes: MAX_CHAIN_BYTES,
        max_chain_segments: MAX_SEGMENTS,
    };
    let Ok(mut queue) = DeviceQueue::new(&config) else { panic!("a shape that is right was refused") };
    for (step, write) in steps {
        if let Some((&place, bytes)) = write.split_first_chunk() {
            view.skip(usize::from(u16::from_be_bytes(place)) % RING_BYTES).write_from(bytes);
        }
        let max = 1 + usize::from(step >> 4);
        let (mut chains, mut segments, mut length, mut total) = (0usize, 0u16, 0usize, 0usize);
        let mut sink = |len: usize, last: bool| {
            assert!((1..=RING_BYTES).contains(&len), "a segment of {len} bytes of {RING_BYTES}");
            segments += 1;
            length += len;
            total += len;
            assert!(
                length <= MAX_CHAIN_BYTES as usize && segments <= MAX_SEGMENTS,
                "{segments} segments, {length} bytes"
            );
            if last {
                (segments, length) = (0, 0);
                chains += 1;
            }
        };
        let result = match step & 7 {
            0 | 1 => queue.receive(&memory, max, |view, last| sink(view.len(), last)),
            2 | 3 => queue.take_writable(&memory, max, |view, last| {
                view.write_from(&[0x5a; 64]);
                sink(view.len(), last);
            }),
            4 => {
                let held = queue.held();
                queue.release(&memory, held).map(|()| held)
            }
            5 => {
                let held = queue.held();
                queue.complete(&memory, std::iter::repeat_n(64, held)).and_then(|n| queue.publish(&memory).map(|_| n))
            }
            6 => queue.arm(&memory).map(usize::from),
            _ => queue.needs_signal(&memory).map(usize::from),
        };
        match result {
            Ok(n) => {
                if step & 7 < 4 {
                    assert!(n <= max && chains >= n, "{chains} chains seen, {n} of {max} taken");
                }
                assert!(queue.held() <= usize::from(RING_SIZE), "{} chains are held", queue.held());
                behaviour.note((step & 7, n));
                behaviour.note_size(total);
            }
            Err(error) => {
                // A port drops its ring then.
                behaviour.note((step & 7, std::mem::discriminant(&error)));
                return;
            }
        }
    }
}

// --- the gateway: ARP, IPv4, DHCP, DNS over UDP and TCP ---

/// Each record is a frame, or, with flag 1, the host's answer to the oldest query. Flag 2 has the
/// sums verified, flags 4 and 8 let time pass.
pub fn gateway(input: &[u8], behaviour: &mut Behaviour) {
    let range = (Ipv4Addr::new(10, 9, 0, 16), Ipv4Addr::new(10, 9, 0, 19));
    let config = GatewayConfig {
        mac: ROUTER_MAC,
        address: Ipv4Addr::new(10, 9, 0, 1),
        prefix: 24,
        mtu: 1500,
        router: Some(Ipv4Addr::new(10, 9, 0, 2)),
        dns: Vec::new(),
        domain: "lab.internal".into(),
        name: "gateway".into(),
        forward: true,
        dhcp: Some(DhcpConfig { range, lease_secs: 3600, leases_per_port: None }),
        ipv6: Some(Ipv6Config::new(Ipv6Addr::new(0xfd00, 9, 0, 0, 0, 0, 0, 0))),
    };
    let start = Start { now: Nanos::SECOND, unix_secs: 1_800_000_000, entropy: [7; 16] };
    let mut gateway = match Gateway::new(config, &LeaseStore::default(), start) {
        Ok(gateway) => gateway,
        Err(error) => panic!("settings that are right were refused: {error}"),
    };
    let member = Member { name: "web".into(), mac: Some(GUEST_MAC), address: Some(Ipv4Addr::new(10, 9, 0, 9)) };
    assert!(gateway.set_member(member).is_ok());
    let (mut now, mut asked) = (start.now, Vec::new());
    for (flags, bytes) in records(input) {
        now = match flags & 12 {
            0 => now,
            4 => now.after(Nanos::MILLI.times(200)),
            8 => now.after(Nanos::SECOND.times(10)),
            _ => now.after(Nanos::SECOND.times(2000)),
        };
        if flags & 1 != 0 && !asked.is_empty() {
            gateway.answer(now, asked.remove(0), bytes.to_vec());
        } else {
            let checksum = if flags & 2 != 0 { Checksum::Unverified } else { Checksum::Valid };
            let port = Token(u32::from(flags >> 4) % 3);
            behaviour.note(gateway.input(now, bytes, checksum, Some(port)).map_err(|reason| reason.name()));
        }
        gateway.poll(now);
        asked.extend(gateway.take_queries().into_iter().map(|query| query.id));
        while let Some(frame) = gateway.output() {
            assert!((14..=1514).contains(&frame.len()), "a frame of {} bytes", frame.len());
            assert_eq!(frame[6..12], ROUTER_MAC, "it speaks as itself");
            assert_ne!(frame[..6], ROUTER_MAC, "it speaks to others");
            behaviour.note((frame[12], frame[13], frame.get(23), frame.get(34), frame.get(54)));
            behaviour.note_size(frame.len());
        }
        let leases = gateway.leases().leases;
        let four = leases.iter().filter(|lease| lease.address.is_ipv4()).count();
        assert!(four <= 5, "{four} leases of a range of 4, and a member");
        behaviour.note(leases.len());
    }
    // What it counted tells branches apart that send nothing.
    for (name, _, n) in gateway.counters().all() {
        behaviour.note(name);
        behaviour.note_size(n as usize);
    }
}

// --- address translation ---

/// Each record is a frame from the network, or, with flag 1, from the uplink. Flags 4 and 8 let
/// time pass, 2 restarts the uplink.
pub fn nat(input: &[u8], behaviour: &mut Behaviour) {
    let guest = Ipv4Addr::new(10, 9, 0, 9);
    let nat = Nat::new(Config {
        mac: ROUTER_MAC,
        router: Ipv4Addr::new(10, 9, 0, 2),
        subnet: Ipv4Addr::new(10, 9, 0, 0),
        prefix: 24,
        outside: OUTSIDE,
        peer: UPLINK,
        host: UPLINK,
        forwards: forwards(guest),
    });
    let mut hello = [&ROUTER_MAC[..], &UPLINK_MAC, &[8, 6, 0, 1, 8, 0, 6, 4, 0, 2], &UPLINK_MAC].concat();
    hello.extend([&UPLINK.octets()[..], &ROUTER_MAC, &OUTSIDE.octets()].concat());
    let family = Family {
        ethertype: [8, 0],
        hops_at: 22,
        protocol_at: 23,
        icmp: 1,
        upper_at: 34,
        source: 26..30,
        target: 30..34,
        outside: &OUTSIDE.octets(),
        host: None,
        inside: &[10, 9, 0],
        question: [8, 6],
        least_reply: 42,
    };
    translate(nat, &hello, &family, input, behaviour);
}

/// As [`nat`], for IPv6.
pub fn nat6(input: &[u8], behaviour: &mut Behaviour) {
    let prefix = Ipv6Addr::new(0xfd09, 0, 0, 0, 0, 0, 0, 0);
    let router = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0xff, 0xfe00, 0xfe);
    let outside = Ipv6Addr::new(0x64, 0xff9b, 1, 0, 0, 0, 0, 2);
    let peer = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);
    let nat = Nat::new(Config {
        mac: ROUTER_MAC,
        router,
        subnet: prefix,
        prefix: 64,
        outside,
        peer,
        host: Ipv6Addr::new(0x64, 0xff9b, 1, 0, 0, 0, 0, 1),
        forwards: forwards(Ipv6Addr::new(0xfd09, 0, 0, 0, 0, 0, 0, 9)),
    });
    // An advertisement of the uplink (RFC 4861 §4.4).
    let mut body = [&[136, 0, 0, 0, 0x60, 0, 0, 0][..], &peer.octets(), &[2, 1], &UPLINK_MAC].concat();
    let covered = [&peer.octets()[..], &router.octets(), &[0, 58, 0, body.len() as u8], &body].concat();
    body[2..4].copy_from_slice(&(!tombolo_ring::checksum::sum(&covered)).to_be_bytes());
    let header = [&[0x60, 0, 0, 0, 0, body.len() as u8, 58, 255][..], &peer.octets(), &router.octets()].concat();
    let hello = [&ROUTER_MAC[..], &UPLINK_MAC, &[0x86, 0xdd], &header, &body].concat();
    let family = Family {
        ethertype: [0x86, 0xdd],
        hops_at: 21,
        protocol_at: 20,
        icmp: 58,
        upper_at: 54,
        source: 22..38,
        target: 38..54,
        outside: &outside.octets(),
        host: Some((&router.octets(), &peer.octets())),
        inside: &prefix.octets()[..8],
        question: [0x86, 0xdd],
        least_reply: 62,
    };
    translate(nat, &hello, &family, input, behaviour);
}

fn forwards<A: Copy>(guest: A) -> Vec<Forward<A>> {
    vec![
        Forward { protocol: Protocol::Tcp, port: 1, to: (guest, 80) },
        Forward { protocol: Protocol::Udp, port: 2, to: (guest, 53) },
    ]
}

/// Where a family's packets have what is checked, from the beginning of the frame.
struct Family<'a> {
    ethertype: [u8; 2],
    hops_at: usize,
    protocol_at: usize,
    /// Its number of ICMP.
    icmp: u8,
    upper_at: usize,
    source: Range<usize>,
    target: Range<usize>,
    /// The source of what leaves.
    outside: &'a [u8],
    /// Source and target of what leaves for the uplink's own host, where that source is another.
    host: Option<(&'a [u8], &'a [u8])>,
    /// The beginning of the target of all that comes in.
    inside: &'a [u8],
    /// The ethertype of questions for the uplink.
    question: [u8; 2],
    /// Bytes of the shortest answer.
    least_reply: usize,
}

fn translate<A: Address>(mut nat: Nat<A>, hello: &[u8], family: &Family<'_>, input: &[u8], behaviour: &mut Behaviour) {
    nat.inbound(Nanos(0), &mut hello.to_vec());
    assert!(nat.is_peer_known(), "the uplink has said where it is");
    let mut now = Nanos::SECOND;
    for (flags, bytes) in records(input).take(256) {
        now = match flags & 12 {
            0 => now,
            4 => now.after(Nanos::MILLI.times(600)),
            8 => now.after(Nanos::SECOND.times(15)),
            _ => now.after(Nanos::SECOND.times(300)),
        };
        if flags & 2 != 0 {
            nat.uplink_restarted();
            nat.inbound(now, &mut hello.to_vec());
        }
        let (mut frame, out) = (bytes.to_vec(), flags & 1 == 0);
        let verdict = match out {
            true => nat.outbound(now, Some(Token(u32::from(flags >> 6))), &mut frame),
            false => nat.inbound(now, &mut frame),
        };
        match verdict {
            Verdict::Pass => {
                assert_eq!(frame.len(), bytes.len(), "headers change, lengths do not");
                assert_eq!((&frame[6..12], &frame[12..14]), (&ROUTER_MAC[..], &family.ethertype[..]));
                assert_eq!(frame[family.hops_at] + 1, bytes[family.hops_at], "one hop less");
                match out {
                    true => {
                        assert_eq!(frame[..6], UPLINK_MAC);
                        // What answers the uplink's own host goes there, from where that knows the
                        // guest.
                        let (from, to) = (&frame[family.source.clone()], &frame[family.target.clone()]);
                        assert!(from == family.outside || Some((from, to)) == family.host, "from {from:x?} to {to:x?}");
                    }
                    false => assert!(frame[family.target.clone()].starts_with(family.inside), "{frame:x?}"),
                }
                // The protocol; of ICMP the type, too.
                let protocol = frame[family.protocol_at];
                behaviour.note((protocol, (protocol == family.icmp).then(|| frame.get(family.upper_at))));
            }
            Verdict::Reply => assert!(frame.len() >= family.least_reply, "an answer names who asked, or is an echo"),
            Verdict::Drop(reason) => behaviour.note(reason.name()),
            Verdict::Taken => {}
        }
        behaviour.note(std::mem::discriminant(&verdict));
        nat.poll(now);
        while let Some(frame) = nat.next_for_network() {
            assert_eq!(frame[6..12], ROUTER_MAC);
            behaviour.note((frame[13], frame.get(34)));
        }
        while let Some(frame) = nat.next_for_uplink() {
            assert_eq!(frame[12..14], family.question, "it asks for the uplink, and says nothing else");
        }
        behaviour.note_size(nat.flows());
    }
}

// --- offloads in software ---

/// Each record is a virtio-net header and a frame; the flags say what the destination takes.
pub fn offload(input: &[u8], behaviour: &mut Behaviour) {
    let mut transformer = Transformer::default();
    let mut network = Network::new(MacSettings::default(), 1);
    let ssh = policy::Rule {
        ports: vec![22..=22],
        from: vec![policy::Who::Prefix([10, 0, 0, 0].into(), 8)],
        ..Default::default()
    };
    let rules = vec![policy::Rule { action: policy::Action::Deny, ..ssh }];
    network.set_policy(policy::Settings { rules, ..policy::Settings::default() });
    let mut plan = Plan::default();
    for port in 0..2 {
        network.join(port, None);
        network.set_link(port, true);
        plan.add_port(port, 8);
    }
    for (flags, bytes) in records(input).take(32) {
        let Some((header, frame)) = bytes.split_first_chunk::<VNET_HEADER_BYTES>() else { continue };
        if frame.len() < 14 {
            continue;
        }
        let offload = match Offload::from_vnet(header, frame.len()) {
            Ok(offload) => offload,
            Err(reason) => {
                behaviour.note(reason.name());
                continue;
            }
        };
        let mut batch = Batch::with_capacity(1);
        // In two pieces, as a guest's may be.
        let (a, b) = frame.split_at(usize::from(flags >> 4).min(frame.len()));
        batch.push_pieces([Foreign::from(a), Foreign::from(b)], offload);
        let mut drops = Drops::default();
        network.decide(Nanos::SECOND, 0, &Guard::default(), &mut batch, &mut plan, &mut drops);
        let passes = plan.frames_to(1) == [0];
        plan.clear();
        drops.drain(|reason, _| behaviour.note(reason.name()));
        if !passes {
            continue;
        }
        let caps = Caps {
            checksum: flags & 1 != 0,
            tso4: flags & 3 == 3,
            tso6: flags & 5 == 5,
            ecn: flags & 8 != 0,
            uso: flags & 9 == 9,
            ..Caps::plain(1500)
        };
        let mut work = Work::default();
        let result = transformer.transmit(&batch, &[0], caps, &mut drops, &mut work, |made, which, _| {
            let mut sent = Sent::default();
            for index in which {
                let frame = &made.frames()[usize::from(*index)];
                let whole = frame.offload.segmentation.is_some();
                assert!(whole || frame.len() <= caps.max_frame_bytes as usize, "{} bytes", frame.len());
                assert!(!whole || caps.tso4 || caps.tso6 || caps.uso, "it cannot cut that");
                assert!(caps.checksum || !matches!(frame.offload.checksum, Checksum::Partial { .. }));
                let mut bytes = Vec::new();
                made.append_to(frame, &mut bytes);
                assert_eq!(bytes.len(), frame.len());
                sent.frames += 1;
                sent.bytes += frame.len() as u64;
            }
            Ok(sent)
        });
        let Ok(sent) = result else { panic!("nothing here faults") };
        assert_eq!(sent.frames + drops.total(), 1 + work.segments - work.segmented, "each frame is accounted for");
        drops.drain(|reason, _| behaviour.note(reason.name()));
        behaviour.note((work.checksums.min(2), work.segmented));
        behaviour.note_size(work.segments as usize);
    }
}

// --- the framing of streams ---

/// What a peer writes into a stream, in pieces that the records are; beside a reader that is too
/// simple to be wrong.
pub fn stream(input: &[u8], behaviour: &mut Behaviour) {
    // One reactor per thread: a port's registration is all that it is here for.
    thread_local! { static REACTOR: Reactor = Reactor::new().expect("a reactor"); }
    let registration = REACTOR.with(|reactor| reactor.registrar().registration(Token(1)));
    let (mut port, feed) = StreamPort::given(1500, registration);
    let (ours, mut theirs) = UnixStream::pair().expect("a pair of sockets");
    assert!(feed.give(ours.into()).is_ok() && port.service(Nanos(0)).is_ok());
    let (mut written, mut got) = (Vec::new(), Vec::new());
    let (mut runts, mut faulted) = (0, false);
    for (flags, piece) in records(input) {
        // No more than a socket holds, since the port does not read meanwhile.
        theirs.write_all(piece).expect("the port reads after each piece");
        written.extend_from_slice(piece);
        let budget = 1 + usize::from(flags);
        loop {
            let (mut batch, mut drops) = (Batch::with_capacity(budget), Drops::default());
            let result = port.receive(budget, &mut batch, &mut drops);
            for frame in batch.frames() {
                let mut bytes = Vec::new();
                batch.append_to(frame, &mut bytes);
                got.push(bytes);
            }
            drop(batch);
            runts += drops.total();
            match result {
                Ok(used) => {
                    assert!(used <= budget);
                    assert!(port.release().is_ok());
                    if used < budget {
                        break;
                    }
                }
                Err(fault) => {
                    port.reset(&fault);
                    faulted = true;
                    break;
                }
            }
        }
        if faulted {
            break;
        }
    }
    let (mut wanted, mut wanted_runts, mut rest, mut bad) = (Vec::new(), 0, &written[..], false);
    while let Some((length, behind)) = rest.split_first_chunk() {
        let length = u32::from_be_bytes(*length) as usize;
        bad = !(1..=MAX_FRAME_BYTES).contains(&length);
        let Some((frame, next)) = behind.split_at_checked(length).filter(|_| !bad) else { break };
        if length < 14 {
            wanted_runts += 1
        } else {
            wanted.push(frame.to_vec())
        }
        rest = next;
    }
    assert_eq!((&got, runts, faulted), (&wanted, wanted_runts, bad));
    behaviour.note((got.len(), runts, faulted));
    got.iter().for_each(|frame| behaviour.note_size(frame.len()));
}

// --- typed calls ---

/// A client's request for a method: what is understood of it is all of its bytes, at their places.
pub fn typed(input: &[u8], behaviour: &mut Behaviour) {
    match envelope::parse(input) {
        Ok((service, method, message)) => {
            let rest = [service.as_bytes(), b"/", method.as_bytes(), message].concat();
            assert_eq!(rest, input[4..]);
            behaviour.note_size(service.len());
            behaviour.note_size(message.len());
        }
        Err(status) => behaviour.note(status.message()),
    }
}

/// The header of a packet that comes through a VXLAN tunnel; and a frame of a guest that may ask
/// for a member behind it.
pub fn vxlan(input: &[u8], behaviour: &mut Behaviour) {
    let parsed = vxlan::parse(input);
    behaviour.note(parsed);
    if let Ok(vni) = parsed {
        // The same network as in the header that we would send; reserved bits apart.
        assert_eq!(vxlan::header(vni)[4..7], input[4..7]);
        assert_eq!(vxlan::parse(&vxlan::header(vni)), Ok(vni));
    }
    let holder = [2, 0xa5, 0, 0, 0, 1];
    let mut asked = None;
    for checksum in [Checksum::Unverified, Checksum::Valid] {
        let target = std::cell::Cell::new(None);
        let find = |address| {
            target.set(Some(address));
            Some(holder)
        };
        let answer = answer_to(input, checksum, find);
        behaviour.note((answer.is_some(), target.get().is_some()));
        if let Some(answer) = answer {
            // To who asked alone, from the holder, and about what was asked.
            let bytes = answer.bytes();
            assert_eq!((&bytes[..6], &bytes[6..12]), (&input[6..12], &holder[..]));
            match (answer, target.get()) {
                (Answer::Arp(bytes), Some(IpAddr::V4(target))) => assert_eq!(bytes[28..32], target.octets()),
                (Answer::Neighbour(bytes), Some(IpAddr::V6(target))) => {
                    assert_eq!((&bytes[22..38], &bytes[62..78]), (&target.octets()[..], &target.octets()[..]));
                }
                other => panic!("{other:?}"),
            }
            asked = Some(answer);
        } else {
            assert!(asked.is_none(), "a right sum is as good as none that is looked at");
        }
    }
}
