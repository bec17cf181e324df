//! The driver at a device that is played here, on the device side of the same rings.

use super::*;
use crate::machine::Interrupt;
use crate::machine::dma::HostMemory;
use core::cell::{Cell, RefCell};
use std::rc::Rc;
use std::vec::Vec;
use tombolo_ring::virtio::net::{GSO_TCPV4, NEEDS_CSUM, NUM_BUFFERS_OFFSET};
use tombolo_ring::virtio::{DeviceQueue, QueueConfig};

const QUEUE: u16 = 64;
const NOW: Instant = Instant::ZERO;
const EVERYTHING: u64 = VERSION_1
    | EVENT_IDX
    | MAC
    | MTU
    | STATUS
    | MRG_RXBUF
    | CSUM
    | GUEST_CSUM
    | GUEST_TSO4
    | GUEST_TSO6
    | HOST_TSO4
    | HOST_TSO6;

/// The registers of a device.
struct Registers {
    offered: u64,
    legacy: bool,
    agreed: Cell<u64>,
    status: Cell<u8>,
    rings: RefCell<[Option<(u16, u64)>; 2]>,
    notified: RefCell<Vec<u16>>,
}

struct Played(Rc<Registers>);

impl Transport for Played {
    fn name(&self) -> &'static str {
        "played"
    }
    fn features(&self) -> u64 {
        self.0.offered
    }
    fn set_features(&self, features: u64) {
        assert_eq!(features & !self.0.offered, 0, "the driver takes only what is offered");
        self.0.agreed.set(features);
    }
    fn is_legacy(&self) -> bool {
        self.0.legacy
    }
    fn status(&self) -> u8 {
        self.0.status.get()
    }
    fn set_status(&self, status: u8) {
        self.0.status.set(status);
    }
    fn queue_max(&self, queue: u16) -> u16 {
        if queue < 2 { QUEUE } else { 0 }
    }
    fn set_queue(&self, queue: u16, size: u16, address: u64) {
        self.0.rings.borrow_mut()[usize::from(queue)] = Some((size, address));
    }
    fn notify(&self, queue: u16) {
        self.0.notified.borrow_mut().push(queue);
    }
    fn config(&self, offset: usize) -> u8 {
        // MAC, link up, no queue pairs, MTU 9000.
        [2, 0, 0, 0, 0, 9, 1, 0, 0, 0, 0x28, 0x23][offset]
    }
    fn acknowledge(&self) {}
    fn interrupt(&self) -> Option<Interrupt> {
        None
    }
}

/// The device: both queues from its side.
struct Peer {
    registers: Rc<Registers>,
    receive: DeviceQueue,
    transmit: DeviceQueue,
}

fn pair(offered: u64, legacy: bool) -> (VirtioNet, Peer) {
    let registers = Rc::new(Registers {
        offered,
        legacy,
        agreed: Cell::new(0),
        status: Cell::new(0xff),
        rings: RefCell::default(),
        notified: RefCell::default(),
    });
    let driver = VirtioNet::new(Box::new(Played(registers.clone())), 0x1234, 1).expect("the features fit");
    let queue = |index: usize| {
        let (size, address) = registers.rings.borrow()[index].expect("the driver has set up its queues");
        let layout = Layout::new(size);
        let at = |offset: usize| address + offset as u64;
        DeviceQueue::new(&QueueConfig {
            size: u32::from(size),
            descriptors: at(layout.descriptors),
            available: at(layout.available),
            used: at(layout.used),
            features: registers.agreed.get(),
            max_chain_bytes: 1 << 17,
            max_chain_segments: 64,
        })
        .expect("the rings are laid out rightly")
    };
    let (receive, transmit) = (queue(0), queue(1));
    (driver, Peer { registers, receive, transmit })
}

impl Peer {
    /// Writes `frame` behind `header` into as many buffers as it takes, and says that they were
    /// `told`.
    fn deliver(&mut self, mut header: NetHeaderRepr, frame: &[u8], told: Option<u16>) {
        header.num_buffers = 0;
        let long = self.registers.agreed.get() & (VERSION_1 | MRG_RXBUF) != 0;
        let mut bytes = header.emit()[..if long { HEADER_BYTES } else { SHORT_HEADER_BYTES }].to_vec();
        bytes.extend_from_slice(frame);
        let (mut at, mut lens, mut first) = (0, Vec::new(), None);
        while at < bytes.len() {
            let taken = self.receive.take_writable(&HostMemory, 1, |view, _| {
                first.get_or_insert(view);
                let n = view.write_from(&bytes[at..]);
                at += n;
                lens.push(n as u32);
            });
            assert_eq!(taken, Ok(1), "the driver has given too few buffers");
        }
        if long {
            let count = told.unwrap_or(lens.len() as u16);
            first
                .expect("a frame has a first buffer")
                .write_array(NUM_BUFFERS_OFFSET, count.to_le_bytes())
                .expect("fits");
        }
        self.receive.complete(&HostMemory, lens).expect("the ring is whole");
        self.receive.publish(&HostMemory).expect("the ring is whole");
    }

    /// Takes up to `max` frames that were sent, without giving them back.
    fn take(&mut self, max: usize) -> Vec<Vec<u8>> {
        let mut frames = std::vec![Vec::new()];
        self.transmit
            .receive(&HostMemory, max, |view, last| {
                let at = frames.len() - 1;
                let len = frames[at].len();
                frames[at].resize(len + view.len(), 0);
                view.read_into(&mut frames[at][len..]);
                if last {
                    frames.push(Vec::new());
                }
            })
            .expect("the ring is whole");
        frames.pop();
        frames
    }
}

/// An Ethernet frame of no protocol that anybody knows.
fn frame(len: usize) -> Vec<u8> {
    (0..len).map(|i| if i == 12 || i == 13 { 0x99 } else { (i * 7 % 253) as u8 }).collect()
}

fn receive(driver: &mut VirtioNet) -> Option<Vec<u8>> {
    driver.receive(NOW).map(|(rx, _)| rx.consume(|bytes| bytes.to_vec()))
}

fn send(driver: &mut VirtioNet, bytes: &[u8]) -> bool {
    driver.transmit(NOW).map(|permit| permit.consume(bytes.len(), |to| to.copy_from_slice(bytes))).is_some()
}

#[test]
fn features_follow_from_what_is_offered() {
    let (driver, peer) = pair(EVERYTHING | 1 << 40, false);
    assert_eq!(driver.features(), EVERYTHING);
    assert_eq!(peer.registers.status.get(), 15);
    assert_eq!((driver.mtu(), driver.link_is_up()), (9000, true));
    assert_eq!(driver.mac(), EthernetAddress([2, 0, 0, 0, 0, 9]));
    // Frames that were not cut need buffers that merge, and partial checksums.
    let (driver, _) = pair(EVERYTHING & !MRG_RXBUF & !CSUM, false);
    assert_eq!(driver.features() & (GUEST_TSO4 | GUEST_TSO6 | HOST_TSO4 | HOST_TSO6), 0);
    assert_eq!(driver.mtu(), DEFAULT_MTU);
    let refused = Registers {
        offered: EVERYTHING & !VERSION_1,
        legacy: false,
        agreed: Cell::new(0),
        status: Cell::new(0),
        rings: RefCell::default(),
        notified: RefCell::default(),
    };
    assert!(VirtioNet::new(Box::new(Played(Rc::new(refused))), 1, 1).is_none());
}

#[test]
fn frames_arrive_whole_over_one_buffer_and_over_many() {
    for (offered, legacy) in [(EVERYTHING, false), (EVERYTHING & !VERSION_1, true)] {
        let (mut driver, mut peer) = pair(offered, legacy);
        // Far more than the ring holds: buffers have to come back.
        for round in 0..40 {
            for len in [60, 1514, 4084, 4085, 20_000, MAX_FRAME_BYTES] {
                peer.deliver(NetHeaderRepr::PLAIN, &frame(len), None);
                assert_eq!(receive(&mut driver), Some(frame(len)), "{len} bytes in round {round}");
                driver.flush();
            }
        }
        assert_eq!(receive(&mut driver), None);
        assert_eq!(driver.stats().rx_malformed, 0);
    }
}

#[test]
fn without_merging_each_buffer_holds_a_frame() {
    for (offered, legacy) in [(VERSION_1, false), (0, true)] {
        let (mut driver, mut peer) = pair(offered, legacy);
        for len in [60, 1514] {
            peer.deliver(NetHeaderRepr::PLAIN, &frame(len), None);
            assert_eq!(receive(&mut driver), Some(frame(len)));
        }
    }
}

#[test]
fn what_is_wrong_is_dropped_and_counted() {
    let (mut driver, mut peer) = pair(EVERYTHING, false);
    // Spread over three buffers, of which one came.
    peer.deliver(NetHeaderRepr::PLAIN, &frame(100), Some(3));
    assert_eq!(receive(&mut driver), None);
    // Shorter than an Ethernet header.
    peer.deliver(NetHeaderRepr::PLAIN, &frame(13), None);
    assert_eq!(receive(&mut driver), None);
    assert_eq!(driver.stats().rx_malformed, 2);
    // UDP over IPv4 with a checksum that is wrong.
    let mut udp = frame(60);
    udp[12..14].copy_from_slice(&[8, 0]);
    udp[14] = 0x45;
    udp[16..18].copy_from_slice(&46u16.to_be_bytes());
    udp[20..22].fill(0);
    udp[23] = 17;
    peer.deliver(NetHeaderRepr::PLAIN, &udp, None);
    assert_eq!((receive(&mut driver), driver.stats().rx_bad_checksum), (None, 1));
    // The same from a sender on this host, which leaves it to the receiver.
    peer.deliver(NetHeaderRepr { flags: NEEDS_CSUM, ..NetHeaderRepr::PLAIN }, &udp, None);
    assert_eq!(receive(&mut driver), Some(udp));
}

#[test]
fn frames_are_sent_whole_and_their_pages_come_back() {
    let (mut driver, mut peer) = pair(EVERYTHING, false);
    for round in 0..40 {
        for len in [60, PAGE - HEADER_BYTES, PAGE - HEADER_BYTES + 1, MAX_SEGMENTED_BYTES] {
            assert!(send(&mut driver, &frame(len)), "{len} bytes in round {round}");
            driver.flush();
            let sent = peer.take(10);
            assert_eq!(sent.len(), 1);
            assert_eq!(sent[0][HEADER_BYTES..], frame(len));
            peer.transmit.release(&HostMemory, 1).expect("the ring is whole");
        }
    }
    assert_eq!((driver.stats().tx_frames, driver.stats().tx_dropped), (160, 0));
}

#[test]
fn a_segment_to_be_cut_says_how() {
    let (mut driver, mut peer) = pair(EVERYTHING, false);
    let mut tcp = frame(14 + 20 + 20 + 5000);
    tcp[12..14].copy_from_slice(&[8, 0]);
    tcp[14] = 0x45;
    tcp[16..18].copy_from_slice(&5040u16.to_be_bytes());
    tcp[20..22].fill(0);
    tcp[23] = 6;
    tcp[46] = 0x50;
    let mut permit = driver.transmit(NOW).expect("the ring is empty");
    let mut meta = PacketMeta::default();
    meta.segmentation_offload_size = NonZeroU16::new(1460);
    permit.set_meta(meta);
    permit.consume(tcp.len(), |to| to.copy_from_slice(&tcp));
    driver.flush();
    let sent = peer.take(1);
    let header = NetHeaderRepr::parse(&sent[0][..HEADER_BYTES]).expect("whole");
    assert_eq!((header.flags, header.gso_type, header.gso_size, header.hdr_len), (NEEDS_CSUM, GSO_TCPV4, 1460, 54));
    assert_eq!((header.csum_start, header.csum_offset, header.num_buffers), (34, 16, 0));
}

#[test]
fn a_full_ring_takes_nothing_more_and_goes_on_when_there_is_room() {
    let (mut driver, mut peer) = pair(EVERYTHING, false);
    let mut sent = 0;
    while send(&mut driver, &frame(60)) {
        sent += 1;
        assert!(sent <= usize::from(QUEUE));
    }
    driver.flush();
    // What must be answered at once is built and dropped.
    peer.deliver(NetHeaderRepr::PLAIN, &frame(60), None);
    let (_, permit) = driver.receive(NOW).expect("a frame is there");
    permit.consume(60, |to| to.fill(0));
    assert_eq!(driver.stats().tx_dropped, 1);
    assert!(!driver.arm(), "nothing has come back");
    assert_eq!(peer.take(usize::from(QUEUE)).len(), sent);
    peer.transmit.release(&HostMemory, sent).expect("the ring is whole");
    assert_eq!(peer.transmit.needs_signal(&HostMemory), Ok(true), "the driver waits for room");
    assert!(driver.arm() || send(&mut driver, &frame(60)));
    assert!(send(&mut driver, &frame(60)));
}

#[test]
fn a_sleeping_driver_is_woken_and_sees_what_came_before() {
    let (mut driver, mut peer) = pair(EVERYTHING, false);
    driver.begin_turn();
    assert!(!driver.arm());
    peer.deliver(NetHeaderRepr::PLAIN, &frame(60), None);
    assert_eq!(peer.receive.needs_signal(&HostMemory), Ok(true));
    assert!(driver.arm(), "it looks again after it has armed");
    assert_eq!(receive(&mut driver), Some(frame(60)));
}

#[test]
fn syns_are_seen_once() {
    let (mut driver, mut peer) = pair(EVERYTHING, false);
    let mut syn = frame(60);
    syn[12..14].copy_from_slice(&[8, 0]);
    syn[14] = 0x45;
    syn[16..18].copy_from_slice(&46u16.to_be_bytes());
    syn[20..22].fill(0);
    syn[23] = 6;
    syn[47] = 2;
    peer.deliver(NetHeaderRepr { flags: NEEDS_CSUM, ..NetHeaderRepr::PLAIN }, &syn, None);
    assert!(receive(&mut driver).is_some());
    assert!(driver.take_syn() && !driver.take_syn());
}
