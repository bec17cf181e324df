//! The frontend at a backend that is played here, on the other end of the same rings.

use super::super::grants::Access;
use super::super::queue::{Granted, Queue};
use super::*;
use tombolo_ring::mem::ForeignMut;
use tombolo_ring::xen::bus::BusState;
use tombolo_ring::xen::netif::Extra;
use tombolo_ring::xen::netif::{RSP_DROPPED, RSP_OKAY, RxRequest};
use tombolo_ring::xen::{Packet, RxBack, RxContent, TxBack};

const BACKEND: u16 = 7;
const EVERYTHING: Features = Features {
    scatter_gather: true,
    tcpv4: true,
    tcpv6: true,
    checksum: true,
    checksum6: true,
    split_channels: true,
    multicast_control: false,
    max_queues: 1,
};

struct Backend {
    transmit: TxBack,
    receive: RxBack,
}

/// A frontend for this command line, whose vifs' backends are connected; their queues, vif by vif.
fn connected_by(line: &str, features: Features) -> (XenNet, Vec<Vec<Backend>>) {
    let mut device = XenNet::new(&Rc::new(Domain::played()), &Config::parse(line).unwrap(), 1);
    assert!(device.is_blocked() && device.transmit().is_none() && !device.next_frame());
    let backends = (0..device.outgoing.fronts.len()).map(|at| connect(&mut device, at, features)).collect();
    (device, backends)
}

/// Connects a vif to a backend.
fn connect(device: &mut XenNet, at: usize, features: Features) -> Vec<Backend> {
    let Outgoing { domain, fronts, .. } = &mut device.outgoing;
    let front = &mut fronts[at];
    assert!(front.open(domain, BACKEND, features).is_some());
    front.mac = Some(EthernetAddress([0, 0x16, 0x3e, 0, 0, at as u8]));
    front.state = BusState::Connected;
    front.is_up = true;
    let attach = |queue: &mut Queue| Backend {
        transmit: TxBack::attach(&queue.transmit_page).unwrap(),
        receive: RxBack::attach(&queue.receive_page).unwrap(),
    };
    front.queues().iter_mut().map(attach).collect()
}

/// A frontend with one vif of one queue, whose backend is connected.
fn connected(features: Features) -> (XenNet, Backend) {
    let (device, mut backends) = connected_by("", features);
    (device, backends.remove(0).remove(0))
}

fn queue(device: &XenNet) -> &Queue {
    &device.outgoing.fronts[0].queues[0]
}

fn page_of(pool: &Granted, reference: u32) -> ForeignMut<'static> {
    pool.pages[pool.references.iter().position(|had| *had == reference).expect("a page that was granted")]
}

/// The backend gives the frontend a packet.
fn give(queue: &Queue, backend: &mut Backend, bytes: &[u8], checksum: Checksum, gso: Option<Gso>, failed: bool) {
    let what = RxContent { len: bytes.len(), checksum, gso, ..RxContent::default() };
    let mut requests = std::vec![RxRequest::default(); what.slots()];
    assert!(backend.receive.reserve(&queue.receive_page, &mut requests).unwrap());
    let pages = requests.iter().enumerate().filter(|(at, _)| gso.is_none() || *at != 1);
    for (part, (_, request)) in bytes.chunks(PAGE).zip(pages) {
        page_of(&queue.receive_pool, request.gref).write_from(part);
    }
    backend.receive.respond(&queue.receive_page, &requests, &what, failed).unwrap();
    backend.receive.publish(&queue.receive_page);
}

/// A frame of a protocol that has no sums.
fn plain(len: usize, seed: usize) -> Vec<u8> {
    let mut frame: Vec<u8> = (0..len).map(|i| (i * 31 + seed) as u8).collect();
    frame[12..14].copy_from_slice(&[0x88, 0xb5]);
    frame
}

/// What the backend takes from the transmit ring, put together; and the packet.
fn take(queue: &Queue, backend: &mut Backend) -> Option<(Vec<u8>, Packet)> {
    let mut packet = Packet::new();
    if !backend.transmit.take(&queue.transmit_page, &mut packet).unwrap() {
        return None;
    }
    assert_eq!(packet.refusal, None);
    let mut bytes = Vec::new();
    for piece in packet.pieces() {
        let mut part = std::vec![0; piece.len.into()];
        page_of(&queue.transmit_pool, piece.gref).skip(piece.offset.into()).as_foreign().read_into(&mut part);
        bytes.extend(part);
    }
    Some((bytes, packet))
}

fn send(device: &mut XenNet, frame: &[u8], segment_bytes: Option<u16>) -> bool {
    let Some(mut permit) = device.transmit() else { return false };
    let mut meta = PacketMeta::default();
    meta.segmentation_offload_size = segment_bytes.and_then(NonZeroU16::new);
    permit.set_meta(meta);
    permit.consume(frame.len(), |to| to.copy_from_slice(frame));
    true
}

/// An IPv4 packet with a TCP header whose sum is missing.
fn tcp(payload: usize) -> Vec<u8> {
    let mut frame = std::vec![0; 54 + payload];
    frame[12..15].copy_from_slice(&[8, 0, 0x45]);
    frame[16..18].copy_from_slice(&((40 + payload) as u16).to_be_bytes());
    frame[23] = 6;
    frame[46] = 0x50;
    frame
}

#[test]
fn frames_arrive_whole_and_their_pages_are_posted_again() {
    let (mut device, mut backend) = connected(EVERYTHING);
    let rounds = 3 * PAGES;
    for round in 0..rounds {
        let len = [60, 1514, PAGE, PAGE + 1, 60_000][round % 5];
        let frame = plain(len, round);
        let gso = (len > PAGE).then_some(Gso { kind: GsoKind::TcpV4, size: 1448 });
        give(queue(&device), &mut backend, &frame, Checksum::Blank, gso, false);
        assert!(device.arm() && device.next_frame());
        assert_eq!(device.received().0, &frame[..], "round {round}");
        assert!(!device.next_frame());
        device.flush();
    }
    assert_eq!(device.stats().rx_frames, rounds as u64);
}

#[test]
fn what_is_wrong_is_dropped_and_counted() {
    let (mut device, mut backend) = connected(EVERYTHING);
    give(queue(&device), &mut backend, &plain(60, 0), Checksum::None, None, true);
    give(queue(&device), &mut backend, &plain(14, 0)[..13], Checksum::None, None, false);
    let unsummed = tcp(100);
    give(queue(&device), &mut backend, &unsummed, Checksum::None, None, false);
    give(queue(&device), &mut backend, &unsummed, Checksum::Blank, None, false);
    assert!(device.next_frame());
    assert_eq!(device.received().0, &unsummed[..]);
    assert!(!device.next_frame());
    let stats = device.stats();
    assert_eq!((stats.rx_frames, stats.rx_malformed, stats.rx_bad_checksum), (4, 2, 1));
}

#[test]
fn frames_are_sent_whole_with_what_is_left_to_the_backend() {
    let (mut device, mut backend) = connected(EVERYTHING);
    for (frame, segment) in
        [(plain(60, 1), None), (plain(PAGE + 5, 2), None), (tcp(9), None), (tcp(50_000), Some(1448))]
    {
        assert!(send(&mut device, &frame, segment));
        device.flush();
        let (bytes, packet) = take(queue(&device), &mut backend).unwrap();
        let is_tcp = frame[23] == 6;
        assert_eq!(packet.checksum, if is_tcp { Checksum::Blank } else { Checksum::None });
        assert_eq!(packet.gso, segment.map(|size| Gso { kind: GsoKind::TcpV4, size }));
        // Except for the sum of the pseudo header.
        assert!(bytes.len() == frame.len() && bytes[..50] == frame[..50] && bytes[52..] == frame[52..]);
        backend.transmit.answer(&queue(&device).transmit_page, &packet, RSP_OKAY).unwrap();
        backend.transmit.publish(&queue(&device).transmit_page);
    }
    assert_eq!(device.stats().tx_dropped, 0);
}

#[test]
fn segments_of_tcp_over_ipv6_leave_in_one_packet_at_the_end_of_the_turn() {
    let segment = |at: usize| {
        let mut frame = std::vec![at as u8; 74 + 1000];
        frame[..74].fill(0);
        frame[12..15].copy_from_slice(&[0x86, 0xdd, 0x60]);
        frame[18..20].copy_from_slice(&1020u16.to_be_bytes());
        frame[20] = 6;
        frame[58..62].copy_from_slice(&(1000 * at as u32).to_be_bytes());
        frame[66..68].copy_from_slice(&[0x50, 0x10]);
        frame
    };
    let (mut device, mut backend) = connected(EVERYTHING);
    let mut sent = 0;
    // Until there is no room for a frame, for which no packet may be lost.
    while send(&mut device, &segment(sent), None) {
        sent += 1;
    }
    device.flush();
    let (mut got, mut packets) = (0, 0);
    while let Some((bytes, packet)) = take(queue(&device), &mut backend) {
        assert!(packet.gso.is_none_or(|gso| gso == Gso { kind: GsoKind::TcpV6, size: 1000 }));
        assert_eq!(packet.checksum, Checksum::Blank);
        bytes[74..].chunks(1000).for_each(|payload| {
            assert!(payload.len() == 1000 && payload.iter().all(|byte| *byte == got as u8), "segment {got}");
            got += 1;
        });
        packets += 1;
    }
    assert_eq!((got, device.stats().tx_dropped), (sent, 0));
    // 61 in each while there is room for more than one packet.
    assert!(packets <= sent / 61 + 2 * MAX_PARTS && sent > 10 * packets, "{sent} segments in {packets} packets");
    // Order is kept: what is held goes before any other frame.
    let (mut device, mut backend) = connected(EVERYTHING);
    assert!(send(&mut device, &segment(0), None) && send(&mut device, &segment(1), None));
    assert!(send(&mut device, &plain(60, 1), None));
    let lengths = [0, 1].map(|_| take(queue(&device), &mut backend));
    assert!(lengths.iter().all(Option::is_none), "nothing is published before the flush");
    device.flush();
    let lengths = [0, 1].map(|_| take(queue(&device), &mut backend).unwrap().0.len());
    assert_eq!(lengths, [2074, 60]);
    // A backend that cannot cut them gets them one by one.
    let (mut device, mut backend) = connected(Features { tcpv6: false, ..EVERYTHING });
    assert!(send(&mut device, &segment(0), None) && send(&mut device, &segment(1), None));
    device.flush();
    let lengths = [0, 1].map(|_| take(queue(&device), &mut backend).unwrap().0.len());
    assert_eq!(lengths, [1074, 1074]);
}

#[test]
fn without_offloads_sums_are_made_here_and_nothing_is_left_to_be_cut() {
    let (mut device, mut backend) = connected(Features::default());
    assert!(send(&mut device, &tcp(9), None));
    assert!(send(&mut device, &tcp(5000), Some(1448)));
    device.flush();
    let (bytes, packet) = take(queue(&device), &mut backend).unwrap();
    assert_eq!((packet.checksum, packet.gso), (Checksum::None, None));
    assert!(offload::is_sound(&bytes, &NetHeaderRepr::PLAIN));
    assert!(take(queue(&device), &mut backend).is_none());
    assert_eq!(device.stats().tx_dropped, 1);
}

#[test]
fn a_full_ring_takes_nothing_more_and_goes_on_when_there_is_room() {
    let (mut device, mut backend) = connected(EVERYTHING);
    let frame = plain(60, 3);
    let mut sent = 0;
    while send(&mut device, &frame, None) {
        sent += 1;
    }
    assert!(sent > queue(&device).transmit_pool.pages.len() - MAX_PARTS - 1 && !device.arm());
    device.flush();
    let mut taken = 0;
    while let Some((_, packet)) = take(queue(&device), &mut backend) {
        backend
            .transmit
            .answer(&queue(&device).transmit_page, &packet, if taken == 0 { RSP_DROPPED } else { RSP_OKAY })
            .unwrap();
        taken += 1;
    }
    assert!(backend.transmit.publish(&queue(&device).transmit_page), "the frontend asked to hear of room");
    assert_eq!(taken, sent);
    assert!(send(&mut device, &frame, None));
    assert_eq!(device.stats().tx_dropped, 1);
}

#[test]
fn a_backend_that_breaks_a_ring_loses_the_device_and_may_come_back() {
    for is_transmit in [false, true] {
        let (mut device, _) = connected(EVERYTHING);
        let page = queue(&device).rings.pages[usize::from(!is_transmit)];
        // rsp_prod: answers to what was never asked.
        page.store_u32(8, 0x8000_0000, core::sync::atomic::Ordering::Release).unwrap();
        assert!(!device.next_frame());
        while send(&mut device, &plain(60, 4), None) {}
        assert!(device.arm(), "a fault is something to do");
        device.begin_turn();
        assert!(device.is_blocked() && !device.next_frame() && !device.arm());
        assert_eq!((device.stats().link_faults, device.stats().link_resets), (1, 1));
        device.flush();

        // The same grants serve the next connection.
        let before = queue(&device).receive_pool.references.clone();
        let mut backend = connect(&mut device, 0, EVERYTHING).remove(0);
        assert_eq!(queue(&device).receive_pool.references, before);
        let frame = plain(900, 5);
        give(queue(&device), &mut backend, &frame, Checksum::Valid, None, false);
        assert!(device.next_frame() && device.received().0 == &frame[..]);
    }
}

/// An IPv4 packet of no sums' protocol, between these addresses.
fn ipv4(from: [u8; 4], to: [u8; 4], seed: u8) -> Vec<u8> {
    let mut frame = plain(80, seed.into());
    frame[..6].copy_from_slice(&[0, 0x16, 0x3e, 0, 0, 1]);
    frame[12..14].copy_from_slice(&[8, 0]);
    frame[14] = 0x45;
    frame[23] = 99;
    frame[26..30].copy_from_slice(&from);
    frame[30..34].copy_from_slice(&to);
    frame
}

#[test]
fn as_many_queues_as_both_ends_have_each_flow_in_one_of_them() {
    for (line, offered, agreed) in [("queues=4", 9, 4), ("queues=4", 2, 2), ("queues=4", 1, 1), ("", 9, 1)] {
        let features = Features { max_queues: offered, ..EVERYTHING };
        let (mut device, mut backends) = connected_by(line, features);
        let backends = &mut backends[0];
        assert_eq!((backends.len(), device.queues()), (agreed, agreed), "{line} {offered}");
        let mut used = std::vec![0; agreed];
        for flow in 0..20u8 {
            let mut queue_of_flow = None;
            for _ in 0..3 {
                assert!(send(&mut device, &ipv4([10, 0, 0, 2], [10, 0, 0, flow], flow), None));
                device.flush();
                let fronts = &device.outgoing.fronts[0];
                let mut found = Vec::new();
                for (at, backend) in backends.iter_mut().enumerate() {
                    let Some((_, packet)) = take(&fronts.queues[at], backend) else { continue };
                    backend.transmit.answer(&fronts.queues[at].transmit_page, &packet, RSP_OKAY).unwrap();
                    backend.transmit.publish(&fronts.queues[at].transmit_page);
                    found.push(at);
                }
                assert_eq!(found.len(), 1);
                assert_eq!(*queue_of_flow.get_or_insert(found[0]), found[0]);
                used[found[0]] += 1;
            }
        }
        assert!(used.iter().all(|count| *count > 0), "{used:?}");
        // What comes over any queue is taken, in turns.
        for (at, backend) in backends.iter_mut().enumerate() {
            for n in 0..2 {
                give(&device.outgoing.fronts[0].queues[at], backend, &plain(60, at + n), Checksum::None, None, false);
            }
        }
        assert!(device.arm());
        let taken = core::iter::from_fn(|| device.next_frame().then(|| device.received().0.to_vec())).count();
        assert_eq!(taken, 2 * agreed);
    }
}

#[test]
fn one_full_queue_paces_the_stack() {
    let (mut device, mut backends) = connected_by("queues=2", Features { max_queues: 2, ..EVERYTHING });
    let frame = ipv4([10, 0, 0, 2], [10, 0, 0, 9], 1);
    while send(&mut device, &frame, None) {}
    assert!(!device.arm() && device.poll_at(0).is_none());
    device.flush();
    let busy = flow(&frame) % 2;
    let queue = &device.outgoing.fronts[0].queues[busy];
    let (_, packet) = take(queue, &mut backends[0][busy]).unwrap();
    backends[0][busy].transmit.answer(&queue.transmit_page, &packet, RSP_OKAY).unwrap();
    backends[0][busy].transmit.publish(&queue.transmit_page);
    assert!(send(&mut device, &frame, None));
    assert_eq!(device.stats().tx_dropped, 0);
}

#[test]
fn each_vif_carries_its_own_addresses_and_a_stuck_one_stops_no_other() {
    let (mut device, mut backends) = connected_by("ip.1=10.8.0.2/24", EVERYTHING);
    device.mac = EthernetAddress([0, 0x16, 0x3e, 0, 0, 0]);
    device.set_addresses(&["10.9.0.2/24".parse().unwrap(), "10.8.0.2/24".parse().unwrap()]);
    let (first, second) = ([10, 9, 0, 2], [10, 8, 0, 2]);
    for (at, from) in [first, second].into_iter().enumerate() {
        assert!(send(&mut device, &ipv4(from, [10, 7, 0, 1], 1), None));
        device.flush();
        let fronts = &device.outgoing.fronts;
        let (bytes, _) = take(&fronts[at].queues[0], &mut backends[at][0]).unwrap();
        assert!(take(&fronts[1 - at].queues[0], &mut backends[1 - at][0]).is_none());
        // The stack's own source address was some other one.
        assert!(at == 0 || bytes[6..12] == [0, 0x16, 0x3e, 0, 0, 1]);
    }
    // To the second vif's card; the stack sees the first one's address. What is for the other vif's
    // address is not taken.
    for (at, to) in [(1, second), (1, first), (0, second)] {
        let frame = ipv4([10, 7, 0, 1], to, 2);
        give(&device.outgoing.fronts[at].queues[0], &mut backends[at][0], &frame, Checksum::None, None, false);
    }
    assert!(device.next_frame());
    assert_eq!(device.received().0[..6], [0, 0x16, 0x3e, 0, 0, 0]);
    assert!(!device.next_frame());
    assert_eq!(device.stats().rx_other_link, 2);

    // The second vif's backend takes nothing any more.
    while send(&mut device, &ipv4(second, [10, 7, 0, 1], 3), None) {}
    assert!(device.transmit().is_none() && device.poll_at(0).is_some());
    device.outgoing.fronts[1].full_since_ns = Some(0);
    while device.outgoing.domain.clock.now_ns() < STUCK_NS {}
    let dropped = device.stats().tx_dropped;
    assert!(send(&mut device, &ipv4(first, [10, 7, 0, 1], 4), None));
    assert!(send(&mut device, &ipv4(second, [10, 7, 0, 1], 4), None));
    assert_eq!(device.stats().tx_dropped, dropped + 1);
    device.flush();
    assert!(take(&device.outgoing.fronts[0].queues[0], &mut backends[0][0]).is_some());
    assert!(device.poll_at(device.outgoing.domain.clock.now_ns()).is_none());
}

#[test]
fn the_backend_is_asked_for_the_multicast_that_the_addresses_need() {
    let (mut device, mut backend) = connected(Features { multicast_control: true, ..EVERYTHING });
    let mut asked = |device: &mut XenNet, own: &[&str]| {
        device.set_addresses(&own.iter().map(|own| own.parse().unwrap()).collect::<Vec<_>>());
        device.flush();
        let mut asked = Vec::new();
        while let Some((_, packet)) = take(queue(device), &mut backend) {
            asked.push(packet.multicast.unwrap());
            backend.transmit.answer(&queue(device).transmit_page, &packet, RSP_OKAY).unwrap();
            backend.transmit.publish(&queue(device).transmit_page);
        }
        asked
    };
    let group = |last| [0x33, 0x33, 0xff, 0, 0, last];
    let add = Extra::MulticastAdd;
    let first = asked(&mut device, &["fd09::2/64"]);
    assert_eq!(first, [add([1, 0, 0x5e, 0, 0, 1]), add([0x33, 0x33, 0, 0, 0, 1]), add(group(2))]);
    assert_eq!(asked(&mut device, &["fd09::2/64"]), []);
    assert_eq!(asked(&mut device, &["fd09::3/64"]), [Extra::MulticastDel(group(2)), add(group(3))]);
}

#[test]
fn another_backend_has_grants_of_its_own_and_leaves_what_the_old_one_uses() {
    let domain = Domain::played();
    let mut pool = Granted::new(4, Access::ReadWrite);
    assert!(pool.grant(&domain, 1));
    let (pages, references) = (pool.pages.clone(), pool.references.clone());
    // The old backend is writing to the second page: Xen says so in its entry.
    domain.grants.borrow().played_use(references[1]);
    assert!(pool.grant(&domain, 2));
    let same = |at: usize| pool.pages[at].as_mut_ptr() == pages[at].as_mut_ptr();
    assert_eq!([same(0), same(1), same(2), same(3)], [true, false, true, true]);
    assert!(!pool.references.contains(&references[1]));
    assert!(!domain.end_grant(references[1]) && domain.end_grant(pool.references[0]));
}

#[test]
fn a_backend_without_multicast_control_is_asked_for_nothing() {
    let (mut device, mut backend) = connected(EVERYTHING);
    device.set_addresses(&["fd09::2/64".parse().unwrap()]);
    device.flush();
    assert!(take(queue(&device), &mut backend).is_none());
}

#[test]
fn a_restored_domain_grants_its_pages_anew_and_connects_again() {
    let (mut device, _) = connected(EVERYTHING);
    assert!(send(&mut device, &plain(60, 1), None));
    device.outgoing.domain.grants.borrow_mut().restored();
    device.outgoing.domain.restores.set(1);
    device.begin_turn();
    assert!(device.is_blocked() && !device.next_frame() && !device.arm());
    assert!(queue(&device).receive_pool.references.is_empty());
    assert_eq!((device.stats().link_faults, device.stats().link_resets), (0, 1));
    let mut backend = connect(&mut device, 0, EVERYTHING).remove(0);
    // Each page has a grant of its own, of the new table.
    let queue_of = queue(&device);
    let mut references =
        [&queue_of.rings, &queue_of.transmit_pool, &queue_of.receive_pool].map(|pool| &pool.references[..]).concat();
    references.sort_unstable();
    references.dedup();
    assert_eq!(references.len(), 2 + 2 * queue_of.transmit_pool.pages.len());
    let frame = plain(900, 5);
    give(queue(&device), &mut backend, &frame, Checksum::Valid, None, false);
    assert!(device.next_frame() && device.received().0 == &frame[..]);
}
