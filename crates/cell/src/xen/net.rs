//! The network frontend: two rings shared with a backend in another domain, as the stack's device.
//!
//! Rings and messages are [`tombolo_ring::xen`]'s, and so is the table of the handshake ([`front_step`]); the nodes in XenStore
//! are [`super::vif`]'s.
//!
//! # Memory
//!
//! Frames are copied between local memory and pages that were granted to the backend once, so a frame costs no grant
//! operation, and no reference of Rust's leads to where the backend writes. A device that comes back, after its backend
//! died or `xl network-attach`, finds the same pages granted. For a backend in another domain they are granted again; a page that the old
//! backend still uses is replaced.
//!
//! # Up and down
//!
//! There may be no device yet, and the one that there is may go: the stack stays as it is, with its addresses and connections, and
//! no frame is taken from it meanwhile. When the link comes up the cell tells its neighbours (gratuitous ARP).
//!
//! # Failure
//!
//! The backend is not trusted. What it writes is checked by the rings; one that breaks them loses the device, counted
//! (`link_faults`): the frontend goes to Closing, and takes part again when the backend starts again. The domain goes on.
//!
//! Limits: the first device only, one queue, packets of up to 60 KiB sent and 64 KiB received.

use super::Domain;
use super::grants::Access;
use super::vif::{Features, Rings, Vif};
use crate::device::capabilities;
use crate::machine::{dma, heap, hypercall};
use crate::neighbor::{Sighting, Watch};
use crate::println;
use crate::virtio::net::DeviceStats;
use crate::virtio::offload;
use alloc::boxed::Box;
use alloc::rc::Rc;
use alloc::vec::Vec;
use core::num::NonZeroU16;
use smoltcp::phy::{DeviceCapabilities, PacketMeta, TxToken};
use smoltcp::wire::EthernetAddress;
use tombolo_ring::mem::ForeignMut;
use tombolo_ring::virtio::net::{DATA_VALID, GSO_NONE, GSO_TCPV4, NEEDS_CSUM, NetHeaderRepr};
use tombolo_ring::xen::bus::{BusState, FrontAction, front_step};
use tombolo_ring::xen::{Checksum, Gso, GsoKind, RING_SLOTS, RingPage, RxFront, TxFront, TxPart, XenError};

const PAGE: usize = 4096;
const ETHERNET_HEADER_BYTES: usize = 14;
const TYPE_IPV6: [u8; 2] = [0x86, 0xdd];
const DEFAULT_MTU: usize = 1500;
const MIN_MTU: usize = 576;
/// The largest frame that is ever received.
const MAX_FRAME_BYTES: usize = 65535 + ETHERNET_HEADER_BYTES;
/// The largest frame that the backend is given to cut: 15 pages.
const MAX_PARTS: usize = 15;
const MAX_SEGMENTED_BYTES: usize = MAX_PARTS * PAGE;
/// Slots that the largest frame takes: its pages, and how it is to be cut.
const MAX_SLOTS: u32 = MAX_PARTS as u32 + 1;
/// Pages for each direction, as many as the ring has slots; fewer in a cell with little heap.
const PAGES: usize = RING_SLOTS as usize;
const SMALL_HEAP_BYTES: usize = 12 << 20;
const SMALL_PAGES: usize = 64;
/// Frames between two looks at whether the backend wants to hear of what was added.
const PUBLISH_EVERY: usize = 32;
/// Handshake steps in one turn; a backend that changes its state faster than that waits for the next.
const STEPS: usize = 8;

/// Pages that stay granted for as long as the device lives.
struct Granted {
    pages: Vec<ForeignMut<'static>>,
    /// A reference for each page; empty before the first backend is known.
    references: Vec<u32>,
    to: u16,
    access: Access,
}

impl Granted {
    fn new(pages: usize, access: Access) -> Granted {
        let memory = dma::alloc_buffers(pages * PAGE);
        Granted {
            pages: (0..pages).map(|page| memory.skip(page * PAGE).take(PAGE)).collect(),
            references: Vec::new(),
            to: 0,
            access,
        }
    }

    /// Grants all pages to `backend`, if they are not already. False where the grant table is full.
    fn grant(&mut self, domain: &Domain, backend: u16) -> bool {
        if self.references.len() == self.pages.len() && self.to == backend {
            return true;
        }
        for (page, reference) in self.pages.iter_mut().zip(self.references.drain(..)) {
            if !domain.end_grant(reference) {
                // The other domain still has it: it keeps it.
                *page = dma::alloc_buffers(PAGE);
            }
        }
        self.to = backend;
        for page in &self.pages {
            let Some(reference) = domain.grant(backend, *page, self.access) else { return false };
            self.references.push(reference);
        }
        true
    }
}

/// Both rings while the backend may use them.
struct Link {
    receive: Box<RxFront>,
    /// Of the transmit and the receive ring; equal where there is one for both.
    channels: (u32, u32),
}

/// The sending half, apart from the receiving one since the stack holds both at a time.
pub(crate) struct Outgoing {
    ring: Box<TxFront>,
    page: RingPage<'static>,
    pool: Granted,
    /// Pages of the pool that are free.
    free_pages: Vec<u32>,
    features: Features,
    is_up: bool,
    unpublished: usize,
    fault: Option<XenError>,
    /// The frame that is being built.
    frame: Vec<u8>,
    stats: DeviceStats,
}

/// The network of a domain, with or without a device at the moment.
pub(crate) struct XenNet {
    domain: Rc<Domain>,
    vif: Option<Vif>,
    state: BusState,
    link: Option<Link>,
    /// The page of each ring: transmit, receive.
    rings: Granted,
    receive_page: RingPage<'static>,
    pool: Granted,
    outgoing: Outgoing,
    frame: Vec<u8>,
    frame_bytes: usize,
    /// Buffers of the frame that is being received, to be posted again.
    returned: Vec<u32>,
    posted: usize,
    mac: EthernetAddress,
    mtu: usize,
    /// The link came up, and the stack was not told yet.
    came_up: bool,
    events: u64,
    saw_syn: bool,
    watch: Watch,
}

impl XenNet {
    /// Looks for the first device and begins the handshake. `seed` makes an address for the time until there is a device.
    pub(crate) fn new(domain: &Rc<Domain>, seed: u64) -> XenNet {
        let pages = if heap::bytes() < SMALL_HEAP_BYTES { SMALL_PAGES } else { PAGES };
        let rings = Granted::new(2, Access::ReadWrite);
        let ring = |index: usize| RingPage::new(rings.pages[index]).expect("whole pages");
        let [a, b, c, d, e, ..] = seed.to_le_bytes();
        let mut device = XenNet {
            domain: domain.clone(),
            vif: None,
            state: BusState::Initialising,
            link: None,
            receive_page: ring(1),
            outgoing: Outgoing {
                ring: Box::default(),
                page: ring(0),
                pool: Granted::new(pages, Access::Read),
                free_pages: Vec::new(),
                features: Features::default(),
                is_up: false,
                unpublished: 0,
                fault: None,
                frame: heap::buffer(MAX_SEGMENTED_BYTES),
                stats: DeviceStats::default(),
            },
            rings,
            pool: Granted::new(pages, Access::ReadWrite),
            frame: heap::buffer(MAX_FRAME_BYTES),
            frame_bytes: 0,
            returned: Vec::new(),
            posted: 0,
            // Locally administered, random.
            mac: EthernetAddress([0x02, a, b, c, d, e]),
            mtu: DEFAULT_MTU,
            came_up: false,
            events: 0,
            saw_syn: false,
            watch: Watch::default(),
        };
        Vif::watch_devices(domain);
        // The watch's first event comes at once and finds the same.
        device.handshake();
        device
    }

    /// The device's address.
    pub(crate) fn mac(&self) -> EthernetAddress {
        self.mac
    }

    /// The largest IP packet, in bytes.
    pub(crate) fn mtu(&self) -> usize {
        self.mtu
    }

    /// Payload bytes that fit into the transmit buffers.
    pub(crate) fn transmit_bytes(&self) -> usize {
        let page = if self.outgoing.features.tcpv4 { PAGE } else { self.mtu.min(PAGE) };
        self.outgoing.pool.pages.len() * page
    }

    /// Payload bytes that the receive ring takes in full frames.
    pub(crate) fn receive_bytes(&self) -> usize {
        self.pool.pages.len() * self.mtu.min(PAGE)
    }

    /// The counters.
    pub(crate) fn stats(&self) -> DeviceStats {
        self.outgoing.stats
    }

    /// How many events came for the rings.
    pub(crate) fn interrupts(&self) -> u64 {
        self.events
    }

    /// Whether a frame since the last call asked for a TCP connection.
    pub(crate) fn take_syn(&mut self) -> bool {
        core::mem::take(&mut self.saw_syn)
    }

    /// Who sent the frame that was received last, where that is news.
    pub(crate) fn take_sighting(&mut self) -> Option<Sighting> {
        self.watch.take()
    }

    /// Whether the link came up since the last call.
    pub(crate) fn take_up(&mut self) -> bool {
        core::mem::take(&mut self.came_up)
    }

    /// Whether no frame can be sent now, since the link is down.
    pub(crate) fn is_blocked(&self) -> bool {
        !self.outgoing.is_up
    }

    /// The first step of each turn: events, and the handshake where something happened to it.
    pub(crate) fn begin_turn(&mut self) {
        if let Some(link) = &self.link {
            let (transmit, receive) = link.channels;
            self.events += u64::from(self.domain.has_fired(transmit));
            self.events += u64::from(self.domain.has_fired(receive));
        }
        if let Some(fault) = self.outgoing.fault.take() {
            self.give_up(fault);
        }
        if Vif::has_news(&self.domain) {
            self.handshake();
        }
    }

    /// Follows the table until neither end moves.
    fn handshake(&mut self) {
        for _ in 0..STEPS {
            if self.vif.is_none() {
                let Some(vif) = Vif::find(&self.domain) else { return };
                self.mac = vif.mac;
                let told = vif.mtu.map_or(DEFAULT_MTU, |mtu| mtu as usize);
                self.mtu = if (MIN_MTU..=65535).contains(&told) { told } else { DEFAULT_MTU };
                self.state = BusState::Initialising;
                self.vif = Some(vif);
            }
            let Some(vif) = self.vif.clone() else { return };
            let Some(back) = vif.look(&self.domain) else {
                self.disconnect();
                self.vif = None;
                println!("tombolo-cell: the network device is gone");
                vif.forget(&self.domain);
                continue;
            };
            let step = front_step(self.state, back);
            if step.disconnect {
                self.disconnect();
            }
            let mut next = step.next;
            match step.action {
                FrontAction::Wait => {}
                FrontAction::Publish if self.publish(&vif) => {}
                FrontAction::Publish => {
                    println!(
                        "tombolo-cell: the network device cannot be set up: no grants, no event channels, or no XenStore"
                    );
                    self.disconnect();
                    next = BusState::Closing;
                }
                FrontAction::Up if !self.outgoing.is_up && self.link.is_some() => {
                    self.outgoing.is_up = true;
                    self.came_up = true;
                }
                FrontAction::Up => {}
            }
            if next == self.state {
                return;
            }
            self.state = next;
            vif.set_state(&self.domain, next);
        }
    }

    /// Makes rings and event channels and writes them to XenStore. False where something is refused.
    fn publish(&mut self, vif: &Vif) -> bool {
        let features = vif.features(&self.domain);
        self.open(vif.backend_domain, features).is_some_and(|rings| vif.publish(&self.domain, &rings))
    }

    /// Makes rings and event channels for `backend`, with all buffers posted; `None` where Xen refuses something.
    fn open(&mut self, backend: u16, features: Features) -> Option<Rings> {
        let granted = self.rings.grant(&self.domain, backend)
            && self.pool.grant(&self.domain, backend)
            && self.outgoing.pool.grant(&self.domain, backend);
        if !granted {
            return None;
        }
        // Other pages than before where a backend has kept the old ones.
        self.outgoing.page = RingPage::new(self.rings.pages[0]).ok()?;
        self.receive_page = RingPage::new(self.rings.pages[1]).ok()?;
        self.outgoing.page.initialise();
        self.receive_page.initialise();
        let transmit = hypercall::alloc_unbound(backend).ok()?;
        let receive = if features.split_channels { hypercall::alloc_unbound(backend) } else { Ok(transmit) };
        let Ok(receive) = receive else {
            hypercall::close(transmit);
            return None;
        };
        *self.outgoing.ring = TxFront::new();
        self.outgoing.free_pages = (0..self.outgoing.pool.pages.len() as u32).rev().collect();
        self.outgoing.features = features;
        self.outgoing.unpublished = 0;
        self.outgoing.fault = None;
        self.link = Some(Link { receive: Box::new(RxFront::new()), channels: (transmit, receive) });
        self.domain.listen(transmit);
        self.domain.listen(receive);
        self.returned = (0..self.pool.pages.len() as u32).collect();
        self.post();
        // No notification is needed: the backend looks at the ring when it connects.
        self.link.as_mut()?.receive.publish(&self.receive_page);
        self.posted = 0;
        let references = &self.rings.references;
        Some(Rings { transmit: references[0], receive: references[1], channels: (transmit, receive) })
    }

    /// Lets go of the rings; what was under way is lost.
    fn disconnect(&mut self) {
        let Some(link) = self.link.take() else { return };
        hypercall::close(link.channels.0);
        if link.channels.1 != link.channels.0 {
            hypercall::close(link.channels.1);
        }
        if self.outgoing.is_up {
            self.outgoing.stats.link_resets += 1;
        }
        self.outgoing.is_up = false;
        self.came_up = false;
        self.outgoing.unpublished = 0;
        self.posted = 0;
    }

    /// The backend broke the rings: it loses the device.
    fn give_up(&mut self, fault: XenError) {
        self.outgoing.stats.link_faults += 1;
        println!("tombolo-cell: the network's backend broke its rings: {fault}");
        self.disconnect();
        if let Some(vif) = &self.vif {
            self.state = BusState::Closing;
            vif.set_state(&self.domain, self.state);
            // Its answer may be there already.
            self.handshake();
        }
    }

    /// Posts the buffers that came back.
    fn post(&mut self) {
        let Some(link) = &mut self.link else { return };
        for token in self.returned.drain(..) {
            let Some(reference) = self.pool.references.get(token as usize) else { continue };
            link.receive.post(&self.receive_page, *reference, token);
            self.posted += 1;
        }
    }

    /// Copies the next frame that is sound into `self.frame`; false where there is none.
    pub(crate) fn next_frame(&mut self) -> bool {
        loop {
            if self.outgoing.fault.is_some() || !self.outgoing.is_up {
                return false;
            }
            let Some(link) = &mut self.link else { return false };
            let (frame, pages, returned) = (&mut self.frame, &self.pool.pages, &mut self.returned);
            let mut bytes = 0;
            let mut fits = true;
            let received = link.receive.receive(&self.receive_page, |part| {
                let Some(page) = pages.get(part.token as usize) else { return };
                if let Some(to) = frame.get_mut(bytes..bytes + usize::from(part.len)) {
                    bytes += page.skip(part.offset.into()).take(part.len.into()).as_foreign().read_into(to);
                } else {
                    fits = false;
                }
                returned.push(part.token);
            });
            self.frame_bytes = bytes;
            let received = match received {
                Ok(Some(received)) => received,
                Ok(None) => return false,
                Err(fault) => {
                    self.outgoing.fault = Some(fault);
                    return false;
                }
            };
            self.post();
            let stats = &mut self.outgoing.stats;
            stats.rx_frames += 1;
            stats.rx_bytes += bytes as u64;
            if received.failed || !fits || bytes < ETHERNET_HEADER_BYTES {
                stats.rx_malformed += 1;
                continue;
            }
            let flags = if received.checksum == Checksum::None { 0 } else { DATA_VALID };
            let frame = &self.frame[..bytes];
            if !offload::is_sound(frame, &NetHeaderRepr { flags, ..NetHeaderRepr::PLAIN }) {
                stats.rx_bad_checksum += 1;
                continue;
            }
            let syn = offload::is_tcp_syn(frame);
            self.saw_syn |= syn;
            self.watch.note(frame, self.mac, syn);
            return true;
        }
    }

    /// The frame of [`XenNet::next_frame`], and leave to answer it.
    pub(crate) fn received(&mut self) -> (&[u8], Leave<'_>) {
        let has_room = self.outgoing.prepare();
        (&self.frame[..self.frame_bytes], Leave { outgoing: &mut self.outgoing, has_room, segment_bytes: None })
    }

    /// Leave to send a frame, where there is room for the largest.
    pub(crate) fn transmit(&mut self) -> Option<Leave<'_>> {
        self.outgoing.prepare().then_some(Leave { outgoing: &mut self.outgoing, has_room: true, segment_bytes: None })
    }

    /// Shows the backend all that was added to both rings, and notifies it where it wants that.
    pub(crate) fn flush(&mut self) {
        let Some(link) = &mut self.link else { return };
        if self.posted > 0 {
            self.posted = 0;
            if link.receive.publish(&self.receive_page) {
                self.outgoing.stats.notifications += 1;
                hypercall::send(link.channels.1);
            }
        }
        let outgoing = &mut self.outgoing;
        if outgoing.unpublished > 0 {
            outgoing.unpublished = 0;
            if outgoing.ring.publish(&outgoing.page) {
                outgoing.stats.notifications += 1;
                hypercall::send(link.channels.0);
            }
        }
    }

    /// As [`XenNet::flush`], where there is much to show.
    pub(crate) fn flush_if_much(&mut self) {
        if self.posted >= PUBLISH_EVERY || self.outgoing.unpublished >= PUBLISH_EVERY {
            self.flush();
        }
    }

    /// Asks for an event when a frame comes, and, if the transmit ring is full, when it no longer is. Returns whether there is
    /// something to do already.
    pub(crate) fn arm(&mut self) -> bool {
        let Some(link) = self.link.as_mut().filter(|_| self.outgoing.is_up) else {
            return self.outgoing.fault.is_some();
        };
        let arrived = match link.receive.arm(&self.receive_page) {
            Ok(may_sleep) => !may_sleep,
            Err(fault) => {
                self.outgoing.fault = Some(fault);
                true
            }
        };
        arrived | self.outgoing.arm()
    }

    /// What the stack is told of the device. Where a device may come later, it may take what this one cannot.
    pub(crate) fn capabilities(&self) -> DeviceCapabilities {
        let features = self.outgoing.features;
        capabilities(self.mtu, MAX_SEGMENTED_BYTES, features.tcpv4, features.tcpv6)
    }
}

impl Outgoing {
    /// Whether the largest frame would find pages and slots.
    fn has_room(&self) -> bool {
        self.free_pages.len() >= MAX_PARTS && self.ring.free() >= MAX_SLOTS
    }

    /// Frees the pages of what the backend has sent.
    fn reap(&mut self) {
        loop {
            match self.ring.complete(&self.page) {
                Ok(Some(completed)) => {
                    self.free_pages.push(completed.token);
                    self.stats.tx_dropped += u64::from(completed.status < 0);
                }
                Ok(None) => return,
                Err(fault) => {
                    self.fault = Some(fault);
                    return;
                }
            }
        }
    }

    /// Makes room for a frame, if that is possible.
    fn prepare(&mut self) -> bool {
        if !self.is_up {
            return false;
        }
        if !self.has_room() {
            self.reap();
        }
        self.has_room() && self.fault.is_none()
    }

    /// Asks for an event when a full ring has room again; whether it has already.
    fn arm(&mut self) -> bool {
        if !self.has_room() && self.fault.is_none() {
            self.reap();
            // Half of what is under way, so that one event makes room for more than one frame.
            let after = self.ring.ring().outstanding() / 2;
            match self.ring.arm(&self.page, after.max(1)) {
                Ok(may_sleep) => return !may_sleep || self.has_room(),
                Err(fault) => self.fault = Some(fault),
            }
        }
        self.fault.is_some()
    }

    /// Sends the frame of `len` bytes that was built in `self.frame`.
    fn send(&mut self, len: usize, segment_bytes: Option<NonZeroU16>) {
        let frame = &mut self.frame[..len];
        let is_ipv6 = frame.get(12..14) == Some(&TYPE_IPV6);
        // The stack is told once what is cut for it, by the first backend's features; a later one may not.
        let cuts = if is_ipv6 { self.features.tcpv6 } else { self.features.tcpv4 };
        if segment_bytes.is_some() && !cuts {
            self.stats.tx_dropped += 1;
            return;
        }
        let sums = if is_ipv6 { self.features.checksum6 } else { self.features.checksum };
        let header = offload::finish(frame, sums, segment_bytes);
        let checksum = if header.flags & NEEDS_CSUM != 0 { Checksum::Blank } else { Checksum::None };
        let gso = (header.gso_type != GSO_NONE).then_some(Gso {
            kind: if header.gso_type == GSO_TCPV4 { GsoKind::TcpV4 } else { GsoKind::TcpV6 },
            size: header.gso_size,
        });
        self.stats.tx_frames += 1;
        self.stats.tx_bytes += len as u64;
        let mut parts = [TxPart { gref: 0, offset: 0, len: 0, token: 0 }; MAX_PARTS];
        let mut count = 0;
        for (part, bytes) in parts.iter_mut().zip(self.frame[..len].chunks(PAGE)) {
            let page = self.free_pages.pop().expect("`prepare` found pages for the largest frame");
            self.pool.pages[page as usize].write_from(bytes);
            let gref = self.pool.references[page as usize];
            *part = TxPart { gref, offset: 0, len: bytes.len() as u16, token: page };
            count += 1;
        }
        match self.ring.push(&self.page, &parts[..count], checksum, gso) {
            Ok(was_pushed) => debug_assert!(was_pushed, "`prepare` found slots for the largest frame"),
            Err(fault) => self.fault = Some(fault),
        }
        self.unpublished += 1;
    }
}

/// Leave to send a frame; without room, to build one that is dropped.
pub(crate) struct Leave<'d> {
    outgoing: &'d mut Outgoing,
    has_room: bool,
    segment_bytes: Option<NonZeroU16>,
}

impl TxToken for Leave<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, build: F) -> R {
        let outgoing = self.outgoing;
        let result = build(&mut outgoing.frame[..len]);
        if self.has_room {
            outgoing.send(len, self.segment_bytes);
        } else {
            outgoing.stats.tx_dropped += 1;
        }
        result
    }

    fn set_meta(&mut self, meta: PacketMeta) {
        self.segment_bytes = meta.segmentation_offload_size;
    }
}

#[cfg(test)]
mod tests;
