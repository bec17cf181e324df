//! The network of a domain: all its vifs that the command line has addresses for, as the stack's
//! one device.
//!
//! Rings and messages are [`tombolo_ring::xen`]'s; [`super::front`] has one vif, [`super::queue`]
//! one pair of rings, and [`super::addresses`] decides which vif a frame belongs to.
//!
//! # Up and down
//!
//! A vif may come and go. The stack stays as it is, with its addresses and connections. While no
//! vif is there, no frame is taken from the stack. When a link comes up, the cell tells its
//! neighbours (gratuitous ARP).
//!
//! A restored domain (`xl restore`) finds new vifs in place of its old ones, and connects to them
//! in the same way.
//!
//! # A full ring
//!
//! The stack is given room for a frame while each vif has room. So its frames are paced and not
//! lost. Where there are several vifs, one whose backend has taken nothing for [`STUCK_NS`] does
//! not hold up the others: frames for it are dropped.
//!
//! Limits: [`MAX_VIFS`] vifs, packets of up to 60 KiB sent and 64 KiB received.

use super::Domain;
use super::addresses::{Addresses, flow, stamp};
use super::front::{DEFAULT_MTU, Front, Wanted};
use super::queue::{MAX_PARTS, PAGE};
use super::segments::Segments;
use super::vif::{Features, Vif};
use crate::config::{Config, MAX_VIFS};
use crate::device::capabilities;
use crate::machine::heap;
use crate::neighbor::{NeighborEvent, Watch};
use crate::virtio::net::DeviceStats;
use crate::virtio::offload;
use alloc::rc::Rc;
use alloc::vec::Vec;
use core::num::NonZeroU16;
use smoltcp::phy::{DeviceCapabilities, PacketMeta, TxToken};
use smoltcp::wire::{EthernetAddress, IpCidr};
use tombolo_ring::virtio::net::{DATA_VALID, GSO_NONE, GSO_TCPV4, NEEDS_CSUM, NetHeaderRepr};
use tombolo_ring::xen::{Checksum, Gso, GsoKind, RING_SLOTS};

const ETHERNET_HEADER_BYTES: usize = 14;
const TYPE_IPV6: [u8; 2] = [0x86, 0xdd];
/// The largest frame that is ever received.
const MAX_FRAME_BYTES: usize = 65535 + ETHERNET_HEADER_BYTES;
const MAX_SEGMENTED_BYTES: usize = MAX_PARTS * PAGE;
/// Pages for each direction of all queues of a vif together, as many as a ring has slots; fewer in
/// a cell with little heap, and no fewer for each queue than a ring needs to be of use.
const PAGES: usize = RING_SLOTS as usize;
const SMALL_HEAP_BYTES: usize = 12 << 20;
const SMALL_PAGES: usize = 64;
/// Frames between two looks at whether the backend wants to hear of what was added.
const PUBLISH_EVERY: usize = 32;
/// After so long without room a vif holds up no other.
const STUCK_NS: u64 = 50_000_000;
/// The tokens of the watches of backends.
const TOKENS: [&str; MAX_VIFS] = ["backend-0", "backend-1", "backend-2"];

/// The sending half, apart from the received frame since the stack holds both at a time.
pub(crate) struct Outgoing {
    domain: Rc<Domain>,
    fronts: Vec<Front>,
    addresses: Addresses,
    /// The frame that is being built.
    frame: Vec<u8>,
    /// Segments of TCP over IPv6 that wait for the next one, until the end of the turn.
    segments: Segments,
    stats: DeviceStats,
}

/// The network of a domain, with or without a device at the moment.
pub(crate) struct XenNet {
    outgoing: Outgoing,
    frame: Vec<u8>,
    frame_bytes: usize,
    /// The first vif's address, as the stack knows it.
    mac: EthernetAddress,
    /// All addresses of the cell.
    own: Vec<IpCidr>,
    /// Whether it is told of devices to come.
    watches_devices: bool,
    /// How often the domain had been restored when this was last looked at.
    restores: u32,
    /// The vif that is looked at first.
    first: usize,
    /// A link came up, and the stack was not told yet.
    came_up: bool,
    events: u64,
    saw_syn: bool,
    watch: Watch,
}

impl XenNet {
    /// Looks for the devices and begins the handshakes. `seed` makes an address for the time until
    /// there is a device.
    pub(crate) fn new(domain: &Rc<Domain>, config: &Config, seed: u64) -> XenNet {
        let pages = if heap::bytes() < SMALL_HEAP_BYTES { SMALL_PAGES } else { PAGES };
        let pages = (pages / config.queues).max(SMALL_PAGES);
        let others: Vec<u32> = config.vifs.iter().map(|vif| vif.number).collect();
        let wanted = core::iter::once(Wanted::FirstBut(others.clone())).chain(others.into_iter().map(Wanted::Number));
        let fronts =
            wanted.zip(TOKENS).map(|(wanted, token)| Front::new(wanted, token, config.queues, pages)).collect();
        let [a, b, c, d, e, ..] = seed.to_le_bytes();
        let mut device = XenNet {
            outgoing: Outgoing {
                domain: domain.clone(),
                fronts,
                addresses: Addresses(config.vifs.iter().map(|vif| vif.addresses()).collect()),
                frame: heap::buffer(MAX_SEGMENTED_BYTES),
                segments: Segments::new(heap::buffer(MAX_SEGMENTED_BYTES)),
                stats: DeviceStats::default(),
            },
            frame: heap::buffer(MAX_FRAME_BYTES),
            frame_bytes: 0,
            // Locally administered, random.
            mac: EthernetAddress([0x02, a, b, c, d, e]),
            own: Vec::new(),
            watches_devices: false,
            restores: domain.restores(),
            first: 0,
            came_up: false,
            events: 0,
            saw_syn: false,
            watch: Watch::default(),
        };
        device.find_devices();
        device
    }

    fn find_devices(&mut self) {
        // The watch's first event comes at once and finds the same.
        self.watch_devices(true);
        (0..self.outgoing.fronts.len()).for_each(|front| self.handshake(front));
        self.watch_devices_if_needed();
    }

    /// The first device's address.
    pub(crate) fn mac(&self) -> EthernetAddress {
        self.mac
    }

    /// The largest IP packet that all devices take, in bytes.
    pub(crate) fn mtu(&self) -> usize {
        self.outgoing.fronts.iter().map(|front| front.mtu).min().unwrap_or(DEFAULT_MTU)
    }

    /// How many queues the first device has.
    pub(crate) fn queues(&self) -> usize {
        self.outgoing.fronts[0].active()
    }

    fn page_count(&self) -> usize {
        self.outgoing.fronts.iter().map(Front::page_count).min().unwrap_or(0)
    }

    /// What all devices can do.
    fn features(&self) -> Features {
        let mut all = self.outgoing.fronts[0].features;
        for front in self.outgoing.fronts.iter().skip(1).filter(|front| front.has_device()) {
            all.tcpv4 &= front.features.tcpv4;
            all.tcpv6 &= front.features.tcpv6;
        }
        all
    }

    /// Payload bytes that fit into the transmit buffers.
    pub(crate) fn transmit_bytes(&self) -> usize {
        let page = if self.features().tcpv4 { PAGE } else { self.mtu().min(PAGE) };
        self.page_count() * page
    }

    /// Payload bytes that the receive rings take: in whole pages, as TCP comes from a sender that
    /// leaves the cutting to others.
    pub(crate) fn receive_bytes(&self) -> usize {
        self.page_count() * PAGE
    }

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

    /// The router advertisement that was received last, from its IPv6 header on.
    pub(crate) fn take_router_advert(&mut self) -> Option<Vec<u8>> {
        self.watch.take_router_advert()
    }

    /// Who sent the frame that was received last, where that is news.
    pub(crate) fn take_neighbor_event(&mut self) -> Option<NeighborEvent> {
        self.watch.take()
    }

    /// Whether a link came up since the last call.
    pub(crate) fn take_up(&mut self) -> bool {
        core::mem::take(&mut self.came_up)
    }

    /// Whether no frame can be sent now, since no link is up.
    pub(crate) fn is_blocked(&self) -> bool {
        self.outgoing.fronts.iter().all(|front| !front.is_up)
    }

    /// When a vif without room stops to hold up the others.
    pub(crate) fn poll_at(&self, now_ns: u64) -> Option<u64> {
        let fronts = &self.outgoing.fronts;
        if fronts.len() == 1 {
            return None;
        }
        let full = fronts.iter().filter(|front| front.is_up).filter_map(|front| front.full_since_ns);
        full.map(|since| since + STUCK_NS).filter(|at| *at > now_ns).min()
    }

    /// Takes the cell's own addresses; the backends let the multicast addresses pass that these
    /// need.
    pub(crate) fn set_addresses(&mut self, own: &[IpCidr]) {
        if self.own != own {
            self.own = own.to_vec();
            let Outgoing { fronts, addresses, .. } = &mut self.outgoing;
            for (at, front) in fronts.iter_mut().enumerate() {
                front.set_groups(addresses.groups(at, own));
            }
        }
    }

    /// The first step of each turn: events, and the handshakes where something happened to them.
    pub(crate) fn begin_turn(&mut self) {
        if self.restores != self.outgoing.domain.restores() {
            self.restores = self.outgoing.domain.restores();
            let Outgoing { fronts, stats, .. } = &mut self.outgoing;
            fronts.iter_mut().for_each(|front| front.restored(stats));
            // The watches were the old domain's.
            self.watches_devices = false;
            self.find_devices();
        }
        let Outgoing { domain, fronts, stats, .. } = &mut self.outgoing;
        for front in fronts.iter_mut() {
            self.events += front.queues().iter().map(|queue| queue.take_events(domain)).sum::<u64>();
            if let Some(fault) = front.fault() {
                front.give_up(domain, fault, stats);
            }
        }
        let have_changed = Vif::have_changed(domain);
        let mut has_news = false;
        for at in 0..self.outgoing.fronts.len() {
            let front = &self.outgoing.fronts[at];
            if front.has_news(&self.outgoing.domain) || have_changed && !front.has_device() {
                has_news = true;
                self.handshake(at);
            }
        }
        if has_news {
            self.watch_devices_if_needed();
        }
    }

    fn handshake(&mut self, at: usize) {
        let Outgoing { domain, fronts, stats, .. } = &mut self.outgoing;
        fronts[at].handshake(domain, stats, &mut self.came_up);
        if let (0, Some(mac)) = (at, fronts[at].mac) {
            self.mac = mac;
        }
    }

    fn watch_devices(&mut self, is_wanted: bool) {
        if self.watches_devices != is_wanted {
            self.watches_devices = is_wanted;
            Vif::watch_devices(&self.outgoing.domain, is_wanted);
        }
    }

    /// The nodes of devices change with each step of a handshake, so they are watched only while
    /// one is missing.
    fn watch_devices_if_needed(&mut self) {
        self.watch_devices(self.outgoing.fronts.iter().any(|front| !front.has_device()));
    }

    /// Copies the next frame that is sound into `self.frame`; false where there is none.
    pub(crate) fn next_frame(&mut self) -> bool {
        loop {
            let Outgoing { fronts, addresses, stats, .. } = &mut self.outgoing;
            let count = fronts.len();
            let mut received = None;
            for turn in 0..count {
                let at = (self.first + turn) % count;
                received = fronts[at].receive(&mut self.frame).map(|received| (at, received));
                if received.is_some() {
                    break;
                }
            }
            let Some((at, (bytes, received, fits))) = received else { return false };
            self.first = (at + 1) % count;
            self.frame_bytes = bytes;
            stats.rx_frames += 1;
            stats.rx_bytes += bytes as u64;
            if received.failed || !fits || bytes < ETHERNET_HEADER_BYTES {
                stats.rx_malformed += 1;
                continue;
            }
            let frame = &mut self.frame[..bytes];
            if addresses.is_astray(frame, at, &self.own) {
                stats.rx_other_link += 1;
                continue;
            }
            if at > 0 && fronts[at].mac.is_some_and(|mac| frame[..6] == mac.0) {
                frame[..6].copy_from_slice(&self.mac.0);
            }
            let flags = if received.checksum == Checksum::None { 0 } else { DATA_VALID };
            if !offload::is_sound(frame, &NetHeaderRepr { flags, ..NetHeaderRepr::PLAIN }) {
                stats.rx_bad_checksum += 1;
                continue;
            }
            let syn = offload::is_tcp_syn(frame);
            self.saw_syn |= syn;
            self.watch.note(frame, self.mac, syn);
            if at > 0 {
                // Only the first vif has addresses that the command line does not give.
                self.watch.take_router_advert();
            }
            return true;
        }
    }

    /// The frame of [`XenNet::next_frame`], and permission to answer it.
    pub(crate) fn received(&mut self) -> (&[u8], TransmitPermit<'_>) {
        let has_room = self.outgoing.prepare();
        (
            &self.frame[..self.frame_bytes],
            TransmitPermit { outgoing: &mut self.outgoing, has_room, segment_bytes: None },
        )
    }

    /// Permission to send a frame, where there is room for the largest.
    pub(crate) fn transmit(&mut self) -> Option<TransmitPermit<'_>> {
        self.outgoing.prepare().then_some(TransmitPermit {
            outgoing: &mut self.outgoing,
            has_room: true,
            segment_bytes: None,
        })
    }

    /// Shows the backends all that was added to the rings, and notifies them where they want that.
    pub(crate) fn flush(&mut self) {
        self.outgoing.send_segments();
        let Outgoing { fronts, stats, .. } = &mut self.outgoing;
        for queue in fronts.iter_mut().flat_map(Front::queues) {
            queue.flush(stats);
        }
    }

    /// As [`XenNet::flush`], where there is much to show.
    pub(crate) fn flush_if_much(&mut self) {
        let Outgoing { fronts, stats, .. } = &mut self.outgoing;
        for queue in fronts.iter_mut().flat_map(Front::queues).filter(|queue| queue.unpublished() >= PUBLISH_EVERY) {
            queue.flush(stats);
        }
    }

    /// Asks for an event when a frame comes, and, if a transmit ring is full, when it no longer is.
    /// Returns whether there is something to do already.
    pub(crate) fn arm(&mut self) -> bool {
        let Outgoing { fronts, stats, .. } = &mut self.outgoing;
        let queues = fronts.iter_mut().filter(|front| front.is_up).flat_map(Front::queues);
        queues.fold(false, |has_work, queue| has_work | queue.arm(stats))
    }

    /// What the stack is told of the devices. Where another may come later, it may take what this
    /// one cannot.
    pub(crate) fn capabilities(&self) -> DeviceCapabilities {
        let features = self.features();
        capabilities(self.mtu(), MAX_SEGMENTED_BYTES, features.tcpv4)
    }
}

impl Outgoing {
    /// Makes room for a frame, if that is possible.
    fn prepare(&mut self) -> bool {
        // Beside what is held.
        if let Some(front) = self.segments.front()
            && !self.fronts[front].prepare(2, &mut self.stats)
        {
            self.send_segments();
        }
        let Outgoing { domain, fronts, stats, .. } = self;
        let several = fronts.len() > 1;
        let (mut is_up, mut has_room) = (false, true);
        for front in fronts.iter_mut().filter(|front| front.is_up) {
            is_up = true;
            if front.prepare(1, stats) {
                front.full_since_ns = None;
            } else if several {
                let now_ns = domain.clock.now_ns();
                let since_ns = *front.full_since_ns.get_or_insert(now_ns);
                has_room &= now_ns >= since_ns + STUCK_NS;
            } else {
                has_room = false;
            }
        }
        is_up && has_room
    }

    /// Sends the frame of `len` bytes that was built in `self.frame`, or holds it, if its next
    /// segment may follow.
    fn send(&mut self, len: usize, segment_bytes: Option<NonZeroU16>) {
        let Outgoing { fronts, addresses, frame, segments, stats, .. } = self;
        let frame = &mut frame[..len];
        let at = addresses.outgoing(frame);
        let several = fronts.len() > 1;
        let front = &mut fronts[at];
        let is_ipv6 = frame.get(12..14) == Some(&TYPE_IPV6);
        // The stack is told once what is cut for it, by the first backend's features; a later one
        // may not.
        let features = front.features;
        let cuts = if is_ipv6 { features.tcpv6 } else { features.tcpv4 };
        if segment_bytes.is_some() && !cuts || several && !(front.is_up && front.prepare(1, stats)) {
            stats.tx_dropped += 1;
            return;
        }
        if let (1.., Some(mac)) = (at, front.mac) {
            stamp(frame, mac);
        }
        let may_wait = is_ipv6 && features.tcpv6 && segment_bytes.is_none();
        if may_wait && segments.add(at, frame) {
            return;
        }
        self.send_segments();
        let Outgoing { fronts, frame, segments, stats, .. } = self;
        let frame = &mut frame[..len];
        if !(may_wait && segments.add(at, frame)) {
            transmit(&mut fronts[at], frame, segment_bytes, stats);
        }
    }

    /// Sends what is held.
    fn send_segments(&mut self) {
        let Outgoing { fronts, segments, stats, .. } = self;
        let Some((at, packet, segment_bytes)) = segments.take() else { return };
        let front = &mut fronts[at];
        // The link may have gone down since there was room.
        if front.is_up && front.prepare(1, stats) {
            transmit(front, packet, segment_bytes, stats);
        } else {
            stats.tx_dropped += 1;
        }
    }
}

/// Sends a frame over a vif that has room for it.
fn transmit(front: &mut Front, frame: &mut [u8], segment_bytes: Option<NonZeroU16>, stats: &mut DeviceStats) {
    let is_ipv6 = frame.get(12..14) == Some(&TYPE_IPV6);
    let sums = if is_ipv6 { front.features.checksum6 } else { front.features.checksum };
    let header = offload::finish(frame, sums, segment_bytes);
    let checksum = if header.flags & NEEDS_CSUM != 0 { Checksum::Blank } else { Checksum::None };
    let gso = (header.gso_type != GSO_NONE).then_some(Gso {
        kind: if header.gso_type == GSO_TCPV4 { GsoKind::TcpV4 } else { GsoKind::TcpV6 },
        size: header.gso_size,
    });
    stats.tx_frames += 1;
    stats.tx_bytes += frame.len() as u64;
    let queues = front.queues();
    let queue = if queues.len() > 1 { flow(frame) % queues.len() } else { 0 };
    queues[queue].send(frame, checksum, gso);
}

/// Permission to send a frame; without room, to build one that is dropped.
pub(crate) struct TransmitPermit<'d> {
    outgoing: &'d mut Outgoing,
    has_room: bool,
    segment_bytes: Option<NonZeroU16>,
}

impl TxToken for TransmitPermit<'_> {
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
