//! The frontend at a backend that is played here, on the other end of the same rings.

use super::*;
use tombolo_ring::xen::back::rx_slots;
use tombolo_ring::xen::netif::{RSP_DROPPED, RSP_OKAY, RxRequest};
use tombolo_ring::xen::{Packet, RxBack, TxBack};

const BACKEND: u16 = 7;
const EVERYTHING: Features =
    Features { scatter_gather: true, tcpv4: true, tcpv6: true, checksum: true, checksum6: true, split_channels: true };

struct Backend {
    transmit: TxBack,
    receive: RxBack,
}

/// A frontend whose backend is connected.
fn connected(features: Features) -> (XenNet, Backend) {
    let mut device = XenNet::new(&Rc::new(Domain::played()), 1);
    assert!(device.is_blocked() && device.transmit().is_none() && !device.next_frame());
    assert!(device.open(BACKEND, features).is_some());
    device.state = BusState::Connected;
    device.outgoing.is_up = true;
    let transmit = TxBack::attach(&device.outgoing.page).unwrap();
    let receive = RxBack::attach(&device.receive_page).unwrap();
    (device, Backend { transmit, receive })
}

fn page_of(pool: &Granted, reference: u32) -> ForeignMut<'static> {
    pool.pages[pool.references.iter().position(|had| *had == reference).expect("a page that was granted")]
}

/// The backend gives the frontend a packet.
fn give(device: &XenNet, backend: &mut Backend, bytes: &[u8], checksum: Checksum, gso: Option<Gso>, failed: bool) {
    let mut requests = std::vec![RxRequest::default(); rx_slots(bytes.len(), gso.is_some())];
    assert!(backend.receive.reserve(&device.receive_page, &mut requests).unwrap());
    let pages = requests.iter().enumerate().filter(|(at, _)| gso.is_none() || *at != 1);
    for (part, (_, request)) in bytes.chunks(PAGE).zip(pages) {
        page_of(&device.pool, request.gref).write_from(part);
    }
    let what = (bytes.len(), checksum, gso);
    backend.receive.respond(&device.receive_page, &requests, what, failed).unwrap();
    backend.receive.publish(&device.receive_page);
}

/// A frame of a protocol that has no sums.
fn plain(len: usize, seed: usize) -> Vec<u8> {
    let mut frame: Vec<u8> = (0..len).map(|i| (i * 31 + seed) as u8).collect();
    frame[12..14].copy_from_slice(&[0x88, 0xb5]);
    frame
}

/// What the backend takes from the transmit ring, put together; and the packet.
fn take(device: &XenNet, backend: &mut Backend) -> Option<(Vec<u8>, Packet)> {
    let mut packet = Packet::new();
    if !backend.transmit.take(&device.outgoing.page, &mut packet).unwrap() {
        return None;
    }
    assert_eq!(packet.refusal, None);
    let mut bytes = Vec::new();
    for piece in packet.pieces() {
        let mut part = std::vec![0; piece.len.into()];
        page_of(&device.outgoing.pool, piece.gref).skip(piece.offset.into()).as_foreign().read_into(&mut part);
        bytes.extend(part);
    }
    Some((bytes, packet))
}

fn send(device: &mut XenNet, frame: &[u8], segment_bytes: Option<u16>) -> bool {
    let Some(mut leave) = device.transmit() else { return false };
    let mut meta = PacketMeta::default();
    meta.segmentation_offload_size = segment_bytes.and_then(NonZeroU16::new);
    leave.set_meta(meta);
    leave.consume(frame.len(), |to| to.copy_from_slice(frame));
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
        give(&device, &mut backend, &frame, Checksum::Blank, gso, false);
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
    give(&device, &mut backend, &plain(60, 0), Checksum::None, None, true);
    give(&device, &mut backend, &plain(14, 0)[..13], Checksum::None, None, false);
    let unsummed = tcp(100);
    give(&device, &mut backend, &unsummed, Checksum::None, None, false);
    give(&device, &mut backend, &unsummed, Checksum::Blank, None, false);
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
        let (bytes, packet) = take(&device, &mut backend).unwrap();
        let is_tcp = frame[23] == 6;
        assert_eq!(packet.checksum, if is_tcp { Checksum::Blank } else { Checksum::None });
        assert_eq!(packet.gso, segment.map(|size| Gso { kind: GsoKind::TcpV4, size }));
        // But for the sum of the pseudo header.
        assert!(bytes.len() == frame.len() && bytes[..50] == frame[..50] && bytes[52..] == frame[52..]);
        backend.transmit.answer(&device.outgoing.page, &packet, RSP_OKAY).unwrap();
        backend.transmit.publish(&device.outgoing.page);
    }
    assert_eq!(device.stats().tx_dropped, 0);
}

#[test]
fn without_offloads_sums_are_made_here_and_nothing_is_left_to_be_cut() {
    let (mut device, mut backend) = connected(Features::default());
    assert!(send(&mut device, &tcp(9), None));
    assert!(send(&mut device, &tcp(5000), Some(1448)));
    device.flush();
    let (bytes, packet) = take(&device, &mut backend).unwrap();
    assert_eq!((packet.checksum, packet.gso), (Checksum::None, None));
    assert!(offload::is_sound(&bytes, &NetHeaderRepr::PLAIN));
    assert!(take(&device, &mut backend).is_none());
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
    assert!(sent > device.outgoing.pool.pages.len() - MAX_PARTS - 1 && !device.arm());
    device.flush();
    let mut taken = 0;
    while let Some((_, packet)) = take(&device, &mut backend) {
        backend
            .transmit
            .answer(&device.outgoing.page, &packet, if taken == 0 { RSP_DROPPED } else { RSP_OKAY })
            .unwrap();
        taken += 1;
    }
    assert!(backend.transmit.publish(&device.outgoing.page), "the frontend asked to hear of room");
    assert_eq!(taken, sent);
    assert!(send(&mut device, &frame, None));
    assert_eq!(device.stats().tx_dropped, 1);
}

#[test]
fn a_backend_that_breaks_a_ring_loses_the_device_and_may_come_back() {
    for is_transmit in [false, true] {
        let (mut device, _) = connected(EVERYTHING);
        let page = device.rings.pages[usize::from(!is_transmit)];
        // rsp_prod: answers to what was never asked.
        page.store_u32(8, 0x8000_0000, core::sync::atomic::Ordering::Release).unwrap();
        assert!(!device.next_frame());
        while send(&mut device, &plain(60, 4), None) {}
        assert!(device.arm(), "a fault is something to do");
        device.begin_turn();
        assert!(device.is_blocked() && device.link.is_none() && !device.next_frame() && !device.arm());
        assert_eq!((device.stats().link_faults, device.stats().link_resets), (1, 1));
        device.flush();

        // The same grants serve the next connection.
        let before = device.pool.references.clone();
        assert!(device.open(BACKEND, EVERYTHING).is_some());
        device.outgoing.is_up = true;
        assert_eq!(device.pool.references, before);
        let receive = RxBack::attach(&device.receive_page).unwrap();
        let mut backend = Backend { transmit: TxBack::attach(&device.outgoing.page).unwrap(), receive };
        let frame = plain(900, 5);
        give(&device, &mut backend, &frame, Checksum::Valid, None, false);
        assert!(device.next_frame() && device.received().0 == &frame[..]);
    }
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
