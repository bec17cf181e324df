//! The network device: two rings, buffers, and the stack's view of them.
//!
//! Receiving: the device writes into a pool of buffers. A frame may be spread over several of them
//! if the device merges. It is copied once into local memory, the buffers go back at once, and the
//! stack reads the copy. So no Rust reference points into memory that the other side can write, and
//! a burst finds all buffers free again after one turn.
//!
//! Sending: the stack writes a frame into local memory. The frame is completed ([`super::offload`])
//! and copied into pages of the pool, one descriptor each. A frame for which no page or descriptor
//! is free is not taken from the stack. An answer that the stack must give at once (an
//! acknowledgement, an echo) is dropped and counted.
//!
//! The ring checks what the device returns. A device that breaks the protocol ends the cell by a
//! panic, since a machine whose only network card is broken has nothing left to do.

use super::offload;
use super::{Transport, go, negotiate};
use crate::device::capabilities;
use crate::machine::{dma, heap};
use crate::neighbor::{NeighborEvent, Watch};
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::num::NonZeroU16;
use smoltcp::phy::{Device, DeviceCapabilities, PacketMeta, RxToken, TxToken};
use smoltcp::time::Instant;
use smoltcp::wire::EthernetAddress;
use tombolo_ring::mem::{Foreign, ForeignMut};
use tombolo_ring::virtio::features::{EVENT_IDX, VERSION_1};
use tombolo_ring::virtio::net::features::{
    CSUM, GUEST_CSUM, GUEST_TSO4, GUEST_TSO6, HOST_TSO4, HOST_TSO6, MAC, MRG_RXBUF, MTU, STATUS,
};
use tombolo_ring::virtio::net::{HEADER_BYTES, NetHeaderRepr, SHORT_HEADER_BYTES};
use tombolo_ring::virtio::{DriverQueue, Layout, Segment};

const RECEIVE: u16 = 0;
const TRANSMIT: u16 = 1;

const CONFIG_MAC: usize = 0;
const CONFIG_STATUS: usize = 6;
const CONFIG_MTU: usize = 10;
const LINK_UP: u8 = 1;

/// Descriptors of a queue: as many as the device has, up to this.
const MAX_QUEUE: u16 = 512;
/// A cell with less heap than this gets short queues.
const SMALL_HEAP_BYTES: usize = 12 << 20;
const SMALL_QUEUE: u16 = 64;

const PAGE: usize = 4096;
/// A receive buffer where the device merges them, and where each must hold a whole frame.
const MERGED_BUFFER_BYTES: usize = PAGE;
const WHOLE_BUFFER_BYTES: usize = 2048;

const ETHERNET_HEADER_BYTES: usize = 14;
const DEFAULT_MTU: usize = 1500;
const MIN_MTU: usize = 576;
/// The largest frame that is ever received: what merged buffers with segmentation can hold.
const MAX_FRAME_BYTES: usize = 65535 + ETHERNET_HEADER_BYTES;
/// The largest frame that the device is given to cut: 15 pages with its headers.
const MAX_SEGMENTED_BYTES: usize = 15 * PAGE - HEADER_BYTES;
const MAX_SEGMENTS: usize = 17;
/// Frames between two looks at whether the device wants to hear of what was added.
const PUBLISH_EVERY: usize = 32;

/// Counters of the device, all monotonic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceStats {
    /// Frames received.
    pub rx_frames: u64,
    /// Bytes of these frames, Ethernet header included.
    pub rx_bytes: u64,
    /// Frames sent.
    pub tx_frames: u64,
    /// Bytes of these frames.
    pub tx_bytes: u64,
    /// Received frames that were dropped for a wrong TCP or UDP checksum.
    pub rx_bad_checksum: u64,
    /// Received frames that were dropped since they were shorter than their header or spread over
    /// buffers that did not come.
    pub rx_malformed: u64,
    /// Received frames that were dropped since they were for the address of another vif than the
    /// one they came by.
    pub rx_other_link: u64,
    /// Frames that were dropped since the transmit queue was full or, with several vifs, the link
    /// down.
    pub tx_dropped: u64,
    /// How often the device was notified.
    pub notifications: u64,
    /// How often a link over shared memory went down since its peer did.
    pub link_resets: u64,
    /// How often it was taken down since its peer broke the rings.
    pub link_faults: u64,
}

impl DeviceStats {
    /// Adds those of another device.
    pub(crate) fn add(&mut self, other: &DeviceStats) {
        let DeviceStats { rx_frames, rx_bytes, tx_frames, tx_bytes, rx_bad_checksum, rx_malformed, .. } = other;
        self.rx_frames += rx_frames;
        self.rx_bytes += rx_bytes;
        self.tx_frames += tx_frames;
        self.tx_bytes += tx_bytes;
        self.rx_bad_checksum += rx_bad_checksum;
        self.rx_malformed += rx_malformed;
        let DeviceStats { rx_other_link, tx_dropped, notifications, link_resets, link_faults, .. } = other;
        self.rx_other_link += rx_other_link;
        self.tx_dropped += tx_dropped;
        self.notifications += notifications;
        self.link_resets += link_resets;
        self.link_faults += link_faults;
    }
}

/// The sending half, apart from the receiving one since the stack holds both at a time.
struct Sender {
    queue: Box<DriverQueue<'static, { MAX_QUEUE as usize }>>,
    pool: ForeignMut<'static>,
    /// Pages of the pool that are free.
    free_pages: Vec<u16>,
    /// The page after this one in its frame; `NO_PAGE` after the last.
    next_page: Vec<u16>,
    header_bytes: usize,
    checksum_offload: bool,
    /// The frame that is being built, behind its virtio header.
    frame: Vec<u8>,
    unpublished: usize,
    stats: DeviceStats,
}

const NO_PAGE: u16 = u16::MAX;

/// The network device, live.
pub(crate) struct VirtioNet {
    transport: Box<dyn Transport>,
    receive: Box<DriverQueue<'static, { MAX_QUEUE as usize }>>,
    pool: ForeignMut<'static>,
    buffer_bytes: usize,
    /// The frame that was received last, and its length.
    frame: Vec<u8>,
    frame_bytes: usize,
    returned: usize,
    sender: Sender,
    features: u64,
    mac: EthernetAddress,
    mtu: usize,
    saw_syn: bool,
    /// A ring moved since the last [`VirtioNet::recheck`].
    has_moved: bool,
    watch: Watch,
}

fn broken(what: &str, error: tombolo_ring::virtio::RingError) -> ! {
    panic!("the network device broke the {what} ring: {error}")
}

/// `devices`: how many share the memory for buffers.
fn ring(
    transport: &dyn Transport,
    queue: u16,
    features: u64,
    devices: usize,
) -> Box<DriverQueue<'static, { MAX_QUEUE as usize }>> {
    let share = MAX_QUEUE as usize / devices.next_power_of_two();
    let limit = if heap::bytes() < SMALL_HEAP_BYTES { SMALL_QUEUE } else { (share as u16).max(SMALL_QUEUE) };
    let offered = transport.queue_max(queue);
    assert!(
        offered.is_power_of_two(),
        "queue {queue} of the network device has {offered} descriptors, no power of two"
    );
    assert!(usize::from(offered) > MAX_SEGMENTS, "the network device offers queue {queue} with {offered} descriptors");
    let size = offered.min(limit);
    let memory = dma::alloc(Layout::new(size).bytes);
    let driver = match DriverQueue::new(memory, size, features) {
        Ok(driver) => Box::new(driver),
        Err(error) => broken("new", error),
    };
    transport.set_queue(queue, size, memory.as_mut_ptr().expose_provenance() as u64);
    driver
}

fn address(view: ForeignMut<'static>) -> u64 {
    view.as_mut_ptr().expose_provenance() as u64
}

impl VirtioNet {
    /// Brings the device up, one of `devices`; `None` where it refuses the features.
    pub(crate) fn new(transport: Box<dyn Transport>, seed: u64, devices: usize) -> Option<VirtioNet> {
        let with_segmentation = GUEST_TSO4 | GUEST_TSO6 | HOST_TSO4 | HOST_TSO6;
        let plain = VERSION_1 | EVENT_IDX | MAC | MTU | STATUS | MRG_RXBUF | CSUM | GUEST_CSUM;
        let offered = transport.features();
        // Frames that were not cut need merged buffers and partial checksums, either way.
        let mut wanted = plain;
        if offered & (MRG_RXBUF | GUEST_CSUM) == MRG_RXBUF | GUEST_CSUM {
            wanted |= with_segmentation & (GUEST_TSO4 | GUEST_TSO6);
        }
        if offered & CSUM != 0 {
            wanted |= with_segmentation & (HOST_TSO4 | HOST_TSO6);
        }
        let features = negotiate(&*transport, wanted)?;
        let long_header = features & (VERSION_1 | MRG_RXBUF) != 0;
        let header_bytes = if long_header { HEADER_BYTES } else { SHORT_HEADER_BYTES };
        let config = |at: usize| transport.config(at);
        let mac = if features & MAC != 0 {
            EthernetAddress(core::array::from_fn(|i| config(CONFIG_MAC + i)))
        } else {
            // Locally administered, random.
            let [a, b, c, d, e, ..] = seed.to_le_bytes();
            EthernetAddress([0x02, a, b, c, d, e])
        };
        let told = usize::from(u16::from_le_bytes([config(CONFIG_MTU), config(CONFIG_MTU + 1)]));
        let room =
            if features & MRG_RXBUF != 0 { 65535 } else { WHOLE_BUFFER_BYTES - HEADER_BYTES - ETHERNET_HEADER_BYTES };
        let mtu = if features & MTU != 0 && (MIN_MTU..=room).contains(&told) { told } else { DEFAULT_MTU };

        let receive = ring(&*transport, RECEIVE, features, devices);
        let transmit = ring(&*transport, TRANSMIT, features, devices);
        let buffer_bytes = if features & MRG_RXBUF != 0 { MERGED_BUFFER_BYTES } else { WHOLE_BUFFER_BYTES };
        let pool = dma::alloc_buffers(buffer_bytes * usize::from(receive.size()));
        let pages = transmit.size();
        let sender = Sender {
            pool: dma::alloc_buffers(PAGE * usize::from(pages)),
            free_pages: (0..pages).rev().collect(),
            next_page: alloc::vec![NO_PAGE; usize::from(pages)],
            queue: transmit,
            header_bytes,
            checksum_offload: features & CSUM != 0,
            frame: heap::buffer(HEADER_BYTES + MAX_SEGMENTED_BYTES),
            unpublished: 0,
            stats: DeviceStats::default(),
        };
        let mut device = VirtioNet {
            transport,
            receive,
            pool,
            buffer_bytes,
            frame: heap::buffer(MAX_FRAME_BYTES),
            frame_bytes: 0,
            returned: 0,
            sender,
            features,
            mac,
            mtu,
            saw_syn: false,
            has_moved: true,
            watch: Watch::default(),
        };
        for token in 0..device.receive.size() {
            device.give_back(u32::from(token));
        }
        device.receive.disarm();
        device.sender.queue.disarm();
        go(&*device.transport);
        device.flush();
        Some(device)
    }

    pub(crate) fn mac(&self) -> EthernetAddress {
        self.mac
    }

    /// What it is, for the log.
    pub(crate) fn name(&self) -> &'static str {
        self.transport.name()
    }

    /// The features agreed on.
    pub(crate) fn features(&self) -> u64 {
        self.features
    }

    /// The largest IP packet, in bytes.
    pub(crate) fn mtu(&self) -> usize {
        self.mtu
    }

    /// Whether the device says that it is connected.
    pub(crate) fn link_is_up(&self) -> bool {
        self.features & STATUS == 0 || self.transport.config(CONFIG_STATUS) & LINK_UP != 0
    }

    /// Payload bytes that fit into the transmit buffers: whole pages where the device cuts, a
    /// segment in each else.
    pub(crate) fn transmit_bytes(&self) -> usize {
        let page = if self.features & HOST_TSO4 != 0 { PAGE } else { self.mtu.min(PAGE) };
        self.sender.next_page.len() * page
    }

    /// Payload bytes that the receive ring takes in full frames: each has a buffer of its own at
    /// least, larger than it or not.
    pub(crate) fn receive_bytes(&self) -> usize {
        usize::from(self.receive.size()) * self.mtu.min(self.buffer_bytes)
    }

    pub(crate) fn stats(&self) -> DeviceStats {
        self.sender.stats
    }

    /// How often the device's interrupt came; `None` where it has none.
    pub(crate) fn interrupts(&self) -> Option<u64> {
        self.transport.interrupt().map(|interrupt| interrupt.count())
    }

    /// Whether a frame since the last call asked for a TCP connection.
    pub(crate) fn take_syn(&mut self) -> bool {
        core::mem::take(&mut self.saw_syn)
    }

    /// The router advertisement that was received last, from its IPv6 header on.
    pub(crate) fn take_router_advert(&mut self) -> Option<Vec<u8>> {
        self.watch.take_router_advert()
    }

    /// Who sent the frame that was received last, where that is news.
    pub(crate) fn take_neighbor_event(&mut self) -> Option<NeighborEvent> {
        self.watch.take()
    }

    /// Puts buffer `token` back into the receive ring.
    fn give_back(&mut self, token: u32) {
        let buffer = self.pool.skip(token as usize * self.buffer_bytes);
        let segment = Segment { address: address(buffer), len: self.buffer_bytes as u32, writable: true };
        let added = self.receive.add(&[segment], token);
        debug_assert!(added, "there are as many buffers as descriptors");
        self.returned += 1;
    }

    /// The next buffer that the device has filled: its token and the bytes in it.
    fn filled(&mut self) -> Option<(u32, usize)> {
        match self.receive.take_used() {
            Ok(used) => used.map(|used| (used.token, used.len as usize)),
            Err(error) => broken("receive", error),
        }
    }

    /// Copies the next frame into `self.frame`, returns its buffers, and gives its header.
    fn next_frame(&mut self) -> Option<NetHeaderRepr> {
        loop {
            let (token, len) = self.filled()?;
            let header_bytes = self.sender.header_bytes;
            let buffer = self.pool.skip(token as usize * self.buffer_bytes).take(len).as_foreign();
            let mut header = [0; HEADER_BYTES];
            buffer.read_into(&mut header[..header_bytes]);
            let mut parts = 1;
            self.frame_bytes = 0;
            let parsed = NetHeaderRepr::parse(&header[..header_bytes]).filter(|_| len >= header_bytes);
            if let Some(header) = &parsed {
                parts = if self.features & MRG_RXBUF != 0 { usize::from(header.num_buffers).max(1) } else { 1 };
                self.append(buffer.skip(header_bytes));
            }
            self.give_back(token);
            let mut whole = true;
            for _ in 1..parts {
                // A device publishes all buffers of a frame at once (VirtIO 1.3 §5.1.6.4).
                let Some((token, len)) = self.filled() else {
                    whole = false;
                    break;
                };
                let buffer = self.pool.skip(token as usize * self.buffer_bytes).take(len).as_foreign();
                whole &= self.append(buffer);
                self.give_back(token);
            }
            let stats = &mut self.sender.stats;
            stats.rx_frames += 1;
            stats.rx_bytes += self.frame_bytes as u64;
            let Some(header) = parsed.filter(|_| whole && self.frame_bytes >= ETHERNET_HEADER_BYTES) else {
                stats.rx_malformed += 1;
                continue;
            };
            let frame = &self.frame[..self.frame_bytes];
            if !offload::is_sound(frame, &header) {
                stats.rx_bad_checksum += 1;
                continue;
            }
            let syn = offload::is_tcp_syn(frame);
            self.saw_syn |= syn;
            self.watch.note(frame, self.mac, syn);
            return Some(header);
        }
    }

    /// Copies a part to the end of the frame; false where it would become longer than any can be.
    fn append(&mut self, part: Foreign<'_>) -> bool {
        let at = self.frame_bytes;
        let Some(to) = self.frame.get_mut(at..at + part.len()) else { return false };
        self.frame_bytes += part.read_into(to);
        true
    }

    /// Shows the device all that was added to both rings, and notifies it where it wants that.
    pub(crate) fn flush(&mut self) {
        self.has_moved |= self.returned > 0 || self.sender.unpublished > 0;
        if self.returned > 0 {
            self.returned = 0;
            if self.receive.publish() {
                self.sender.stats.notifications += 1;
                self.transport.notify(RECEIVE);
            }
        }
        if self.sender.unpublished > 0 {
            self.sender.unpublished = 0;
            if self.sender.queue.publish() {
                self.sender.stats.notifications += 1;
                self.transport.notify(TRANSMIT);
            }
        }
    }

    fn flush_if_much(&mut self) {
        if self.returned >= PUBLISH_EVERY || self.sender.unpublished >= PUBLISH_EVERY {
            self.flush();
        }
    }

    /// Acknowledges the interrupt and asks for no further ones; the first step of each turn.
    pub(crate) fn begin_turn(&mut self) {
        self.transport.acknowledge();
        self.receive.disarm();
        self.sender.queue.disarm();
    }

    /// Asks for an interrupt when a frame comes, and, if the transmit ring is full, when it no
    /// longer is. Returns whether there is something to do already.
    pub(crate) fn arm(&mut self) -> bool {
        let arrived = match self.receive.arm() {
            Ok(arrived) => arrived,
            Err(error) => broken("receive", error),
        };
        let mut space = false;
        if !self.sender.has_room() {
            self.sender.reap();
            space = match self.sender.queue.arm() {
                Ok(space) => space,
                Err(error) => broken("transmit", error),
            };
        }
        arrived || space
    }

    /// Whether a sleep is to be followed by [`VirtioNet::recheck`]: a wish that has been set since
    /// the last one was seen by now. Without event indices each turn withdraws the wish.
    pub(crate) fn wants_recheck(&self) -> bool {
        self.transport.interrupt().is_some() && (self.has_moved || self.features & EVENT_IDX == 0)
    }

    /// The look that follows a sleep once ([`tombolo_ring::virtio::notify`]): whether frames came
    /// without an interrupt. Notifies the device late where it wishes for that by now.
    pub(crate) fn recheck(&mut self) -> bool {
        self.has_moved = false;
        for (index, queue) in [(RECEIVE, &mut self.receive), (TRANSMIT, &mut self.sender.queue)] {
            if queue.recheck_notify() {
                self.sender.stats.notifications += 1;
                self.transport.notify(index);
            }
        }
        let arrived = match self.receive.has_used() {
            Ok(arrived) => arrived,
            Err(error) => broken("receive", error),
        };
        // Without room it waits for what it sent to come back.
        let space = !self.sender.has_room()
            && match self.sender.queue.has_used() {
                Ok(space) => space,
                Err(error) => broken("transmit", error),
            };
        arrived || space
    }

    /// Whether the cell has to look by itself, since no interrupt wakes it.
    pub(crate) fn needs_polling(&self) -> bool {
        self.transport.interrupt().is_none()
    }
}

impl Sender {
    /// Whether the largest frame would find pages and descriptors.
    fn has_room(&self) -> bool {
        self.free_pages.len() >= MAX_SEGMENTS && self.queue.free() >= MAX_SEGMENTS
    }

    /// Reclaims the pages of frames that the device has sent.
    fn reap(&mut self) {
        loop {
            match self.queue.take_used() {
                Ok(Some(used)) => {
                    let mut page = used.token as u16;
                    while page != NO_PAGE {
                        self.free_pages.push(page);
                        page = self.next_page[usize::from(page)];
                    }
                }
                Ok(None) => return,
                Err(error) => broken("transmit", error),
            }
        }
    }

    /// Makes room for a frame, if that is possible.
    fn prepare(&mut self) -> bool {
        if !self.has_room() {
            self.reap();
        }
        self.has_room()
    }

    /// Sends the frame of `len` bytes that was built in `self.frame`.
    fn send(&mut self, len: usize, segment_bytes: Option<NonZeroU16>) {
        let whole = self.header_bytes + len;
        let (header, frame) = self.frame[..whole].split_at_mut(self.header_bytes);
        let repr = offload::finish(frame, self.checksum_offload, segment_bytes);
        header.copy_from_slice(&repr.emit()[..self.header_bytes]);
        self.stats.tx_frames += 1;
        self.stats.tx_bytes += frame.len() as u64;

        let mut segments = [Segment { address: 0, len: 0, writable: false }; MAX_SEGMENTS];
        let mut count = 0;
        let (mut first, mut last) = (NO_PAGE, NO_PAGE);
        for part in self.frame[..whole].chunks(PAGE) {
            let page = self.free_pages.pop().expect("`prepare` found pages for the largest frame");
            let view = self.pool.skip(usize::from(page) * PAGE).take(PAGE);
            view.write_from(part);
            segments[count] = Segment { address: address(view), len: part.len() as u32, writable: false };
            count += 1;
            self.next_page[usize::from(page)] = NO_PAGE;
            match last {
                NO_PAGE => first = page,
                last => self.next_page[usize::from(last)] = page,
            }
            last = page;
        }
        let added = self.queue.add(&segments[..count], u32::from(first));
        debug_assert!(added, "`prepare` found descriptors for the largest frame");
        self.unpublished += 1;
    }
}

/// A received frame, in local memory.
pub(crate) struct Received<'d>(pub(crate) &'d [u8]);

impl RxToken for Received<'_> {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, read: F) -> R {
        read(self.0)
    }
}

/// Permission to send a frame; without a sender, to build one that is dropped.
pub(crate) struct TransmitPermit<'d> {
    sender: &'d mut Sender,
    has_room: bool,
    segment_bytes: Option<NonZeroU16>,
}

impl TxToken for TransmitPermit<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, build: F) -> R {
        let sender = self.sender;
        let at = sender.header_bytes;
        let result = build(&mut sender.frame[at..at + len]);
        if self.has_room {
            sender.send(len, self.segment_bytes);
        } else {
            sender.stats.tx_dropped += 1;
        }
        result
    }

    fn set_meta(&mut self, meta: PacketMeta) {
        self.segment_bytes = meta.segmentation_offload_size;
    }
}

impl Device for VirtioNet {
    type RxToken<'d> = Received<'d>;
    type TxToken<'d> = TransmitPermit<'d>;

    fn receive(&mut self, _now: Instant) -> Option<(Received<'_>, TransmitPermit<'_>)> {
        self.flush_if_much();
        self.next_frame()?;
        let has_room = self.sender.prepare();
        Some((
            Received(&self.frame[..self.frame_bytes]),
            TransmitPermit { sender: &mut self.sender, has_room, segment_bytes: None },
        ))
    }

    fn transmit(&mut self, _now: Instant) -> Option<TransmitPermit<'_>> {
        self.flush_if_much();
        self.sender.prepare().then_some(TransmitPermit {
            sender: &mut self.sender,
            has_room: true,
            segment_bytes: None,
        })
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let has = |feature| self.features & feature != 0;
        capabilities(self.mtu, MAX_SEGMENTED_BYTES, has(HOST_TSO4))
    }
}

#[cfg(test)]
mod tests;
