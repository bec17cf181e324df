//! A network link: Ethernet frames over a device's memory, as the stack's device.
//!
//! The rings are [`tombolo_ring::ivshmem::net`]'s, the states [`tombolo_ring::ivshmem::state`]'s. A
//! frame is copied between local memory and the sections, once each way. So no reference points to
//! memory that a peer writes. Where the fabric offers offloads, frames follow virtio-net headers.
//! Then machines of one host exchange frames with unfinished checksums, and TCP is segmented only
//! by a receiver that needs segments. Otherwise frames are as on a wire, and checksums are computed
//! and verified here ([`offload`]).
//!
//! # Up and down
//!
//! Each turn begins with a look at the peer's state word. While the link is down, no frame is taken
//! from the stack. The stack's first frames (DHCP, an answer to be retried) wait. A peer that goes
//! to RESET, or restarts, takes the link down. The link comes up again when that peer is ready, and
//! addresses and connections stay as they are. A peer that breaks the rings loses the link for
//! [`FAULT_PAUSE_NS`], and this is counted.
//!
//! # Wake-ups
//!
//! With a doorbell, wake-ups use the event index, as the rings say. Without one, the link is
//! polled, often while frames come and seldom while they do not ([`PollInterval`]). A link with a
//! doorbell is polled too while it is down, since a peer that died does not ring.

use super::device::Device;
use super::first_ring::FirstRing;
use super::poll_interval::{Pauses, PollInterval};
use crate::config::Config;
use crate::device::capabilities;
use crate::neighbor::{NeighborEvent, Watch};
use crate::virtio::net::DeviceStats;
use crate::virtio::offload;
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::convert::Infallible;
use core::fmt;
use core::num::NonZeroU16;
use smoltcp::phy::{DeviceCapabilities, PacketMeta, TxToken};
use smoltcp::wire::EthernetAddress;
use tombolo_ring::ivshmem::net::{Geometry, NetError, OFFLOAD_HEADER_BYTES, Receiver, Sections, Sender, initialise};
use tombolo_ring::ivshmem::state::{Duty, Machine, Offloads};
use tombolo_ring::virtio::net::NetHeaderRepr;

const ETHERNET_HEADER_BYTES: usize = 14;
const MIN_MTU: u16 = 576;
/// The largest frame that the fabric is given to cut, and the largest that it may give.
const MAX_SEGMENTED_BYTES: usize = 60 << 10;
const MAX_FRAME_BYTES: usize = 65535 + ETHERNET_HEADER_BYTES;
/// Frames between two looks at whether the peer wants to hear of them.
const PUBLISH_EVERY: usize = 32;
/// How long a link stays down after its peer broke the rings.
const FAULT_PAUSE_NS: u64 = 10_000_000;

/// Why a device does not become the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    Peers(u32),
    Section(NetError),
    Mtu { got: u16, most: u32 },
    Address([u8; 6]),
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::Peers(got) => write!(f, "a network link for {got} peers, expected 2"),
            Refusal::Section(error) => write!(f, "{error}"),
            Refusal::Mtu { got, most } => write!(f, "an MTU of {got}, expected {MIN_MTU} to {most}"),
            Refusal::Address(mac) => {
                write!(f, "the address {}, expected a unicast address", EthernetAddress(*mac))
            }
        }
    }
}

/// What a network link's device says, checked. Pure.
fn check(max_peers: u32, section_bytes: u64, mtu: u16, mac: [u8; 6]) -> Result<Geometry, Refusal> {
    if max_peers != 2 {
        return Err(Refusal::Peers(max_peers));
    }
    let geometry = Geometry::new(section_bytes).map_err(Refusal::Section)?;
    let most = geometry.max_mtu();
    if mtu < MIN_MTU || u32::from(mtu) > most {
        return Err(Refusal::Mtu { got: mtu, most });
    }
    // The lowest bit of the first byte: IEEE 802-2014 §8.2.2.
    if mac[0] & 1 != 0 { Err(Refusal::Address(mac)) } else { Ok(geometry) }
}

/// The sending half, apart from the receiving one since the stack holds both at a time.
pub(crate) struct Outgoing {
    ring: Box<Sender>,
    sections: Sections<'static>,
    /// Bytes of the header before each frame; 0 without offloads.
    header_bytes: usize,
    /// Room for the largest frame behind its header, where the stack builds it.
    frame: Vec<u8>,
    is_up: bool,
    unpublished: usize,
    fault: Option<NetError>,
    stats: DeviceStats,
}

/// The link, as the stack's device.
pub(crate) struct IvshmemNet {
    device: Device,
    peer: u32,
    geometry: Geometry,
    machine: Machine,
    ring: Box<Receiver>,
    pub(crate) outgoing: Outgoing,
    /// What was received last: header and frame, and the length of both.
    frame: Vec<u8>,
    frame_bytes: usize,
    mac: EthernetAddress,
    mtu: usize,
    poll_interval: PollInterval,
    /// Frames moved since the last look at the poll_interval.
    is_busy: bool,
    /// Frames moved, or the link came up, since the last [`IvshmemNet::recheck`].
    has_moved: bool,
    /// Since the link came up.
    first_ring: FirstRing,
    /// When a link may come up again that broke.
    down_until_ns: u64,
    saw_syn: bool,
    watch: Watch,
}

impl IvshmemNet {
    /// Takes the device; its link comes up when the peer is ready. `seed` makes an address where
    /// the link names none.
    pub(crate) fn new(device: Device, config: &Config, seed: u64) -> Result<IvshmemNet, Refusal> {
        let own = device.own_output();
        let geometry = check(device.max_peers(), own.len() as u64, device.mtu(), device.mac())?;
        let peer = 1 - device.own_id().min(1);
        let other = device.output(peer).ok_or(Refusal::Peers(device.max_peers()))?;
        let sections = Sections::new(&geometry, own, other).map_err(Refusal::Section)?;
        let mac = if device.mac() == [0; 6] {
            // Locally administered, random.
            let [a, b, c, d, e, ..] = seed.to_le_bytes();
            EthernetAddress([0x02, a, b, c, d, e])
        } else {
            EthernetAddress(device.mac())
        };
        let mtu = usize::from(device.mtu());
        let offloads = if device.offloads() && config.offloads { Offloads::Taken } else { Offloads::None };
        let machine = Machine::with_offloads(offloads);
        let header_bytes = if machine.uses_offloads() { OFFLOAD_HEADER_BYTES } else { 0 };
        let (mut longest_out, mut longest_in) = (mtu + ETHERNET_HEADER_BYTES, mtu + ETHERNET_HEADER_BYTES);
        if machine.uses_offloads() && geometry.takes_segments() {
            (longest_out, longest_in) = (longest_out.max(MAX_SEGMENTED_BYTES), MAX_FRAME_BYTES);
        }
        // An earlier life of this machine may have left another word there.
        device.set_state(machine.own_word());
        let pauses = if device.rings().is_some() { Pauses::DOWN } else { config.pauses };
        Ok(IvshmemNet {
            peer,
            geometry,
            machine,
            ring: Box::new(Receiver::new(&geometry)),
            outgoing: Outgoing {
                ring: Box::new(Sender::new(&geometry)),
                sections,
                header_bytes,
                frame: alloc::vec![0; header_bytes + longest_out],
                is_up: false,
                unpublished: 0,
                fault: None,
                stats: DeviceStats::default(),
            },
            frame: alloc::vec![0; header_bytes + longest_in],
            frame_bytes: 0,
            mac,
            mtu,
            poll_interval: PollInterval::new(pauses),
            is_busy: false,
            has_moved: true,
            first_ring: FirstRing::default(),
            down_until_ns: 0,
            saw_syn: false,
            watch: Watch::default(),
            device,
        })
    }

    /// The cell's address on the link.
    pub(crate) fn mac(&self) -> EthernetAddress {
        self.mac
    }

    /// The largest IP packet, in bytes.
    pub(crate) fn mtu(&self) -> usize {
        self.mtu
    }

    pub(crate) fn name(&self) -> &str {
        self.device.name()
    }

    /// Payload bytes that fit into the ring.
    pub(crate) fn transmit_bytes(&self) -> usize {
        let place = self.mtu + ETHERNET_HEADER_BYTES + 64;
        let frames = (self.geometry.data_bytes() as usize / place).min(self.outgoing.ring.depth());
        frames * self.mtu
    }

    /// Payload bytes that may arrive before the cell has its turn: the peer's ring is as large, and
    /// what does not fit it is lost.
    pub(crate) fn receive_bytes(&self) -> usize {
        self.transmit_bytes()
    }

    pub(crate) fn stats(&self) -> DeviceStats {
        self.outgoing.stats
    }

    /// How often the peer has rung; `None` where it cannot.
    pub(crate) fn interrupts(&self) -> Option<u64> {
        self.device.rings()
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

    /// Looks at the peer's state, and follows it; the first step of each turn.
    pub(crate) fn begin_turn(&mut self, now_ns: u64) {
        if self.outgoing.fault.take().is_some() {
            self.outgoing.stats.link_faults += 1;
            self.machine.reset();
            self.outgoing.is_up = false;
            self.down_until_ns = now_ns + FAULT_PAUSE_NS;
            self.device.set_state(self.machine.own_word());
        }
        if now_ns < self.down_until_ns {
            return;
        }
        let IvshmemNet { device, peer, geometry, machine, ring, outgoing, is_busy, has_moved, .. } = self;
        let act = |duty| {
            match duty {
                Duty::Clear => {
                    initialise(geometry, device.own_output());
                    ring.restart();
                    outgoing.ring.restart();
                    outgoing.unpublished = 0;
                }
                Duty::Check => {}
                Duty::Forget(_) => outgoing.stats.link_resets += 1,
            }
            Ok::<(), Infallible>(())
        };
        let tell = |word| {
            device.set_state(word);
            (*is_busy, *has_moved) = (true, true);
        };
        let Ok(_) = machine.follow(|| device.state(*peer), tell, act);
        let was_up = self.outgoing.is_up;
        self.outgoing.is_up = self.machine.may_use_rings();
        if self.outgoing.is_up && !was_up {
            self.first_ring = FirstRing::awaited(self.device.rings().unwrap_or(0));
        }
        if !self.outgoing.is_up {
            self.device.assert_state(self.machine.own_word());
        }
    }

    /// Copies the next frame into `self.frame`; false where there is none.
    pub(crate) fn next_frame(&mut self) -> bool {
        while self.outgoing.is_up {
            let Outgoing { sections, stats, fault, header_bytes, .. } = &mut self.outgoing;
            let (frame, mut len) = (&mut self.frame, 0);
            // A frame longer than any of the link leaves `len` above what was copied.
            let received = self.ring.receive(sections, 1, |view| {
                len = view.len();
                view.read_into(frame);
            });
            match received {
                Ok(0) => return false,
                Ok(_) => {}
                Err(error) => {
                    *fault = Some(error);
                    self.outgoing.is_up = false;
                    return false;
                }
            }
            self.is_busy = true;
            stats.rx_frames += 1;
            let header_bytes = *header_bytes;
            stats.rx_bytes += len.saturating_sub(header_bytes) as u64;
            let is_whole = (header_bytes + ETHERNET_HEADER_BYTES..=self.frame.len()).contains(&len);
            let (header, frame) = self.frame[..if is_whole { len } else { header_bytes }].split_at(header_bytes);
            let header = if header_bytes == 0 { Some(NetHeaderRepr::PLAIN) } else { NetHeaderRepr::parse(header) };
            match header.filter(|_| is_whole) {
                None => stats.rx_malformed += 1,
                Some(header) if !offload::is_sound(frame, &header) => stats.rx_bad_checksum += 1,
                Some(_) => {
                    let syn = offload::is_tcp_syn(frame);
                    self.saw_syn |= syn;
                    self.watch.note(frame, self.mac, syn);
                    self.frame_bytes = len;
                    return true;
                }
            }
            self.flush_if_much();
        }
        false
    }

    /// The frame that was received last, and permission to answer it.
    pub(crate) fn received(&mut self) -> (&[u8], TransmitPermit<'_>) {
        let outgoing = &mut self.outgoing;
        let has_room = outgoing.prepare();
        (
            &self.frame[outgoing.header_bytes..self.frame_bytes],
            TransmitPermit { outgoing, has_room, segment_bytes: None },
        )
    }

    /// Permission to send a frame, where there is room for the largest.
    pub(crate) fn transmit(&mut self) -> Option<TransmitPermit<'_>> {
        let outgoing = &mut self.outgoing;
        outgoing.prepare().then_some(TransmitPermit { outgoing, has_room: true, segment_bytes: None })
    }

    /// Returns what was received, shows what is to be sent, and rings where the peer wants that.
    pub(crate) fn flush(&mut self) {
        if !self.outgoing.is_up {
            return;
        }
        let held = self.ring.held();
        let returned = held > 0 && self.ring.release(&self.outgoing.sections, held);
        let sent = self.outgoing.unpublished > 0 && self.outgoing.ring.publish(&self.outgoing.sections);
        self.is_busy |= self.outgoing.unpublished > 0;
        self.has_moved |= held > 0 || self.outgoing.unpublished > 0;
        self.outgoing.unpublished = 0;
        if returned || sent {
            self.outgoing.stats.notifications += 1;
            self.device.ring_traffic(self.peer);
        }
    }

    pub(crate) fn flush_if_much(&mut self) {
        if self.ring.held() >= PUBLISH_EVERY || self.outgoing.unpublished >= PUBLISH_EVERY {
            self.flush();
        }
    }

    /// Asks to be rung when a frame comes, and, where the ring is full, when it no longer is.
    /// Returns whether there is something to do already.
    pub(crate) fn arm(&mut self) -> bool {
        if !self.outgoing.is_up {
            return self.outgoing.fault.is_some();
        }
        let Outgoing { ring, sections, .. } = &mut self.outgoing;
        let arrived = match self.device.rings() {
            Some(_) => self.ring.arm(sections),
            None => self.ring.has_available(sections),
        };
        let space = if ring.has_room(self.mtu + ETHERNET_HEADER_BYTES) { Ok(false) } else { ring.arm(sections) };
        match (arrived, space) {
            (Ok(arrived), Ok(space)) => arrived || space,
            (Err(error), _) | (_, Err(error)) => {
                self.outgoing.fault = Some(error);
                true
            }
        }
    }

    /// Whether a sleep is to be followed by [`IvshmemNet::recheck`]: a wish that has been set since
    /// the last one was seen by now.
    pub(crate) fn wants_recheck(&self) -> bool {
        self.device.rings().is_some() && self.outgoing.is_up && self.has_moved
    }

    /// The look that follows a sleep once ([`tombolo_ring::virtio::notify`]): whether frames came
    /// without a ring. Rings the peer late where it wishes for that by now.
    pub(crate) fn recheck(&mut self) -> bool {
        self.has_moved = false;
        if !self.outgoing.is_up {
            return false;
        }
        let Outgoing { ring, sections, .. } = &mut self.outgoing;
        if ring.recheck_ring(sections) | self.ring.recheck_ring(sections) {
            self.outgoing.stats.notifications += 1;
            self.device.ring_traffic(self.peer);
        }
        let Outgoing { ring, sections, .. } = &mut self.outgoing;
        let space = if ring.has_room(self.mtu + ETHERNET_HEADER_BYTES) { Ok(0) } else { ring.reclaim(sections) };
        match (self.ring.has_available(sections), space) {
            (Ok(arrived), Ok(space)) => arrived || space != 0,
            (Err(error), _) | (_, Err(error)) => {
                self.outgoing.fault = Some(error);
                true
            }
        }
    }

    /// When the cell has to look by itself, at `now_ns` or later; `None` where the peer rings.
    pub(crate) fn poll_at(&mut self, now_ns: u64) -> Option<u64> {
        let is_busy = core::mem::take(&mut self.is_busy);
        if is_busy {
            self.poll_interval.busy(now_ns);
        }
        let Some(rings) = self.device.rings().filter(|_| self.outgoing.is_up) else {
            return Some(self.poll_interval.next(now_ns));
        };
        // A second look at a peer that was heard is `recheck`'s.
        if self.first_ring.has_come(rings) { None } else { self.first_ring.next_look(now_ns, false, is_busy) }
    }

    /// Whether nothing can be sent now: the stack's wish to send is no reason to stay awake.
    pub(crate) fn is_blocked(&self) -> bool {
        !self.outgoing.can_send()
    }

    pub(crate) fn capabilities(&self) -> DeviceCapabilities {
        let segments = self.machine.uses_offloads() && self.geometry.takes_segments();
        capabilities(self.mtu, MAX_SEGMENTED_BYTES, segments)
    }
}

impl Outgoing {
    /// Whether the largest frame finds room.
    fn can_send(&self) -> bool {
        self.is_up && self.ring.has_room(self.frame.len())
    }

    /// Makes room for a frame, if that is possible.
    pub(crate) fn prepare(&mut self) -> bool {
        if self.is_up
            && !self.can_send()
            && let Err(error) = self.ring.reclaim(&self.sections)
        {
            self.fault = Some(error);
            self.is_up = false;
        }
        self.can_send()
    }

    /// Sends the frame of `len` bytes that was built behind the header's place.
    fn send(&mut self, len: usize, segment_bytes: Option<NonZeroU16>) {
        let whole = self.header_bytes + len;
        let (header, frame) = self.frame[..whole].split_at_mut(self.header_bytes);
        let repr = offload::finish(frame, self.header_bytes != 0, segment_bytes);
        header.copy_from_slice(&repr.emit()[..self.header_bytes]);
        match self.ring.push(&self.sections, whole) {
            Some(place) => {
                place.write_from(&self.frame[..whole]);
                self.unpublished += 1;
                self.stats.tx_frames += 1;
                self.stats.tx_bytes += len as u64;
            }
            None => self.stats.tx_dropped += 1,
        }
    }
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
        let at = outgoing.header_bytes;
        let result = build(&mut outgoing.frame[at..at + len]);
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
mod tests {
    use super::*;

    #[test]
    fn what_a_link_says_is_checked() {
        let mac = [0x52, 0x54, 0, 0, 0, 1];
        let geometry = check(2, 0x7f000, 1500, mac).unwrap();
        assert_eq!((geometry.num(), geometry.header_bytes()), (2048, 53376));
        assert!(check(2, 0x7f000, 1500, [0; 6]).is_ok());
        for peers in [0, 1, 3, 64, u32::MAX] {
            assert_eq!(check(peers, 0x7f000, 1500, mac), Err(Refusal::Peers(peers)));
        }
        for mtu in [0, 1, 575] {
            assert_eq!(check(2, 0x7f000, mtu, mac), Err(Refusal::Mtu { got: mtu, most: 65535 }));
        }
        assert!(check(2, 0x3000, 1500, mac).is_ok());
        assert!(matches!(check(2, 0x1000, 1500, mac), Err(Refusal::Mtu { got: 1500, .. } | Refusal::Section(_))));
        assert!(matches!(check(2, 0, 1500, mac), Err(Refusal::Section(_))));
        assert!(matches!(check(2, 1 << 32, 1500, mac), Err(Refusal::Section(_))));
        for first in [0x01, 0x33, 0xff] {
            let mac = [first, 0, 0, 0, 0, 0];
            assert_eq!(check(2, 0x7f000, 1500, mac), Err(Refusal::Address(mac)));
        }
    }
}
