//! Segments of one TCP stream, and datagrams of one UDP flow, put together for a destination that
//! takes them as one frame.
//!
//! A port whose frames come from a network gets no segmented frames from its peer. For the
//! destination each segment then costs as much as a frame of 64 KiB: a tap takes one frame a system
//! call, a guest handles one descriptor and answers every two segments with an acknowledgement.
//! Such a port says so ([`Batch::set_may_merge`]), and the worker hands its frames to a destination
//! in the form that a sender with segmentation offload would have given them, if the destination
//! takes that.
//!
//! # What is merged
//! Only what [`crate::offload`] would cut into the same frames again. Frames of one turn are one
//! frame if
//! - their addresses and ports are the same;
//! - all are as long as the first one, the last excepted, which may be shorter;
//! - type of service, hop limit, fragment flags, flow label and 802.1p priority are the same;
//! - the IPv4 identification counts up, or "don't fragment" is set, where it has no meaning (RFC
//!   6864 §4);
//! - with TCP: each starts where the one before ends; acknowledgement, window and options are the
//!   same; of the flags only ACK is set, and PSH in the last one;
//! - the checksums of all of them are right. A frame with a wrong one goes on as it came, for its
//!   receiver to drop. A datagram without a checksum goes on as it came too.
//!
//! What the destination gets has the checksum of the pseudo-header only, as any segmented frame
//! has.
//!
//! # Order
//! A merged frame is where its first segment was. Frames of one flow keep their order; a segment
//! may overtake frames of other flows of its turn.
//!
//! Limits: IPv4 without options, IPv6 without extension headers, no VLAN tag, [`MAX_OPEN`] flows at
//! one time, [`MAX_COUNT`] segments.

use crate::drop::Drops;
use crate::frame::{Batch, Checksum, ETHERNET_HEADER_BYTES, Frame, Offload, SegmentKind, Segmentation};
use crate::offload;
use crate::port::{Caps, Fault, Sent};
use std::ops::Range;
use tombolo_ring::checksum;
use tombolo_ring::mem::ForeignMut;

/// Flows among which the place of a segment is looked for; one more closes the first of them.
pub const MAX_OPEN: usize = 8;
/// Segments that become one frame. Linux takes no more datagrams at once (`UDP_MAX_SEGMENTS`,
/// before 6.9).
pub const MAX_COUNT: u16 = 64;
/// The longest IP packet.
const MAX_PACKET_BYTES: usize = 65_535;
const IP: usize = ETHERNET_HEADER_BYTES;
const IPV4_BYTES: usize = 20;
const IPV6_BYTES: usize = 40;
const UDP_BYTES: usize = 8;
const PROTOCOL_TCP: u8 = 6;
const PROTOCOL_UDP: u8 = 17;
const PROTOCOL_ICMPV6: u8 = 58;
const DONT_FRAGMENT: u8 = 0x40;
const TCP_PSH: u8 = 0x08;
const TCP_ACK: u8 = 0x10;
/// Ends the list of a flow's segments.
const END: u16 = u16::MAX;

/// Scratch memory, reused from turn to turn.
#[derive(Debug, Default)]
pub struct Merger {
    flows: Vec<Flow>,
    /// For each frame of the turn the next one of its flow, or [`END`].
    next: Vec<u16>,
    /// For each frame of the turn what it is.
    roles: Vec<Role>,
    /// A whole frame, to be summed.
    whole: Vec<u8>,
    /// 0, 1, 2, …
    all: Vec<u16>,
    batch: Batch<'static>,
}

/// What a frame of the turn is.
#[derive(Clone, Copy, Debug)]
enum Role {
    Alone,
    /// The first segment of this flow.
    First(u16),
    /// It becomes a part of a frame before it.
    Joined,
}

/// The segments of the turn that become one frame.
#[derive(Clone, Copy, Debug)]
struct Flow {
    segment: Segment,
    first: u16,
    last: u16,
    count: u16,
    /// Payload bytes of all.
    bytes: usize,
    /// Whether the checksums of the first one were looked at, and are right.
    is_checked: bool,
    is_closed: bool,
    /// PSH of the last one.
    is_pushed: bool,
}

/// A TCP or UDP packet.
#[derive(Clone, Copy, Debug)]
struct Segment {
    kind: SegmentKind,
    is_v6: bool,
    /// First byte of the TCP or UDP header, and the first one behind it.
    transport: usize,
    payload: usize,
    /// Payload bytes.
    bytes: usize,
    /// Of TCP; else 0.
    sequence: u32,
    is_pushed: bool,
    /// Whether it can be one of several: among others, it is all of its frame.
    can_join: bool,
}

/// What a frame is to the flows of its turn.
enum Seen {
    /// Of none.
    Other,
    /// Perhaps of one; which, is not looked for.
    Unclear,
    Segment(Segment),
}

impl Merger {
    /// Hands the frames `which` of `batch` to `send`, those together that can be one frame for a
    /// destination with `caps`, which takes each of them as it is. Adds the frames that became
    /// parts of others to `merged`.
    ///
    /// # Errors
    /// What `send` returns.
    pub fn transmit(
        &mut self,
        batch: &Batch<'_>,
        which: &[u16],
        caps: Caps,
        drops: &mut Drops,
        merged: &mut u64,
        mut send: impl FnMut(&Batch<'_>, &[u16], &mut Drops) -> Result<Sent, Fault>,
    ) -> Result<Sent, Fault> {
        let joined = self.find(batch, which, caps);
        if joined == 0 {
            return send(batch, which, drops);
        }
        let mut made: Batch<'_> = std::mem::take(&mut self.batch);
        if let Some(port) = batch.ingress() {
            made.set_ingress(port);
            made.set_marking(batch.marking());
        }
        for (index, role) in which.iter().zip(&self.roles) {
            let frame = &batch.frames()[*index as usize];
            match role {
                Role::Joined => {}
                Role::Alone => made.push_frame(batch, frame),
                Role::First(flow) => {
                    made.push_frame(batch, frame);
                    let flow = &self.flows[*flow as usize];
                    let mut at = self.next[flow.first as usize];
                    while at != END {
                        let frame = &batch.frames()[which[at as usize] as usize];
                        made.append_to_last(batch, frame, flow.segment.payload);
                        at = self.next[at as usize];
                    }
                    if flow.count > 1
                        && let Some(frame) = made.frames_mut().last_mut()
                    {
                        flow.finish(frame);
                    }
                }
            }
        }
        let known = self.all.len();
        self.all.extend(known as u16..made.len().max(known) as u16);
        *merged += joined;
        let sent = send(&made, &self.all[..made.len()], drops);
        self.batch = made.recycle();
        sent
    }

    /// Finds what can be merged; returns how many frames become parts of others.
    fn find(&mut self, batch: &Batch<'_>, which: &[u16], caps: Caps) -> u64 {
        self.flows.clear();
        self.roles.clear();
        self.next.clear();
        self.next.resize(which.len(), END);
        let mut joined = 0;
        for (place, index) in which.iter().enumerate() {
            let role = match see(&batch.frames()[*index as usize]) {
                Seen::Other => Role::Alone,
                Seen::Unclear => {
                    self.open().for_each(|flow| flow.is_closed = true);
                    Role::Alone
                }
                Seen::Segment(segment) => self.place(batch, which, place as u16, segment, caps),
            };
            joined += u64::from(matches!(role, Role::Joined));
            self.roles.push(role);
        }
        joined
    }

    /// The flows that a frame may belong to, with closed ones among them.
    fn open(&mut self) -> impl Iterator<Item = &mut Flow> {
        let before = self.flows.len().saturating_sub(MAX_OPEN);
        self.flows[before..].iter_mut()
    }

    /// Gives a segment its place: in a flow that it continues, or as the first of one.
    fn place(&mut self, batch: &Batch<'_>, which: &[u16], place: u16, segment: Segment, caps: Caps) -> Role {
        let frame_at = |place: u16| &batch.frames()[which[place as usize] as usize];
        let frame = frame_at(place);
        let mut whole = std::mem::take(&mut self.whole);
        let mut before = None;
        for flow in self.open().filter(|flow| !flow.is_closed) {
            let first = frame_at(flow.first);
            if !flow.has(first, frame, segment) {
                continue;
            }
            let is_joined = flow.continues_with(first, frame, segment) && {
                flow.is_checked = flow.is_checked || is_sound(batch, first, flow.segment, &mut whole);
                flow.is_checked && is_sound(batch, frame, segment, &mut whole)
            };
            // Whatever does not continue it ends it, so that the flow's frames keep their order.
            flow.is_closed = !is_joined || segment.is_pushed || segment.bytes < flow.segment.bytes;
            if is_joined {
                before = Some(std::mem::replace(&mut flow.last, place));
                flow.count += 1;
                flow.bytes += segment.bytes;
                flow.is_pushed = segment.is_pushed;
            }
            break;
        }
        self.whole = whole;
        if let Some(before) = before {
            self.next[before as usize] = place;
            return Role::Joined;
        }
        if !caps.takes(segment.kind) || !segment.can_join || segment.is_pushed {
            return Role::Alone;
        }
        self.flows.push(Flow {
            segment,
            first: place,
            last: place,
            count: 1,
            bytes: segment.bytes,
            is_checked: false,
            is_closed: false,
            is_pushed: false,
        });
        Role::First((self.flows.len() - 1) as u16)
    }
}

impl Flow {
    /// Whether `frame` is of this flow: its addresses, protocol and ports are those of `first`.
    fn has(&self, first: &Frame, frame: &Frame, segment: Segment) -> bool {
        // Both are of one kind and family, so all of this is within both heads.
        let (a, b, ports) = (first.head(), frame.head(), segment.transport..segment.transport + 4);
        let addresses = if segment.is_v6 { IP + 8..IP + IPV6_BYTES } else { IP + 12..IP + IPV4_BYTES };
        segment.kind == self.segment.kind
            && segment.is_v6 == self.segment.is_v6
            && a[ports.clone()] == b[ports]
            && a[addresses.clone()] == b[addresses]
            && a[..IP] == b[..IP]
    }

    /// Whether `frame`, of this flow, continues it in such a way that [`crate::offload`] would cut
    /// it off again.
    fn continues_with(&self, first: &Frame, frame: &Frame, segment: Segment) -> bool {
        let (a, b, at, payload) = (first.head(), frame.head(), segment.transport, segment.payload);
        let same = |range: Range<usize>| a[range.clone()] == b[range];
        let same_ip = if segment.is_v6 {
            // Traffic class and flow label; hop limit.
            same(IP..IP + 4) && same(IP + 7..IP + 8)
        } else {
            let identification = |head: &[u8]| u16::from_be_bytes([head[IP + 4], head[IP + 5]]);
            let counts_up = identification(b) == identification(a).wrapping_add(self.count);
            // Type of service; fragment flags and hop limit.
            same(IP + 1..IP + 2) && same(IP + 6..IP + 9) && (counts_up || a[IP + 6] & DONT_FRAGMENT != 0)
        };
        let same_transport = || match segment.kind {
            SegmentKind::Udp => true,
            SegmentKind::Tcp4 | SegmentKind::Tcp6 => {
                segment.sequence == self.segment.sequence.wrapping_add(self.bytes as u32)
                    // Acknowledgement and header length; window; urgent pointer and options. The
                    // flags are those of every segment that can join.
                    && same(at + 8..at + 13)
                    && same(at + 14..at + 16)
                    && same(at + 18..payload)
            }
        };
        segment.can_join
            && frame.priority() == first.priority()
            && payload == self.segment.payload
            && segment.bytes <= self.segment.bytes
            && self.count < MAX_COUNT
            && payload - IP + self.bytes + segment.bytes <= MAX_PACKET_BYTES
            && same_ip
            && same_transport()
    }

    /// Makes the headers of the first segment, at the beginning of `frame`, those of the whole.
    fn finish(&self, frame: &mut Frame) {
        let Segment { kind, transport, payload, bytes, .. } = self.segment;
        let transport_bytes = (payload - transport + self.bytes) as u16;
        let head = frame.head_mut();
        offload::set_length(&mut head[IP..transport], transport_bytes);
        let pseudo = offload::pseudo_sum(&head[IP..transport], kind, transport_bytes);
        let header = &mut head[transport..payload];
        let (_, offset) = kind.transport();
        if kind == SegmentKind::Udp {
            header[4..6].copy_from_slice(&transport_bytes.to_be_bytes());
        } else if self.is_pushed {
            header[13] |= TCP_PSH;
        }
        header[offset..offset + 2].copy_from_slice(&pseudo.to_be_bytes());
        frame.offload = Offload {
            checksum: Checksum::Partial { start: transport as u16, offset: offset as u16 },
            segmentation: Some(Segmentation { kind, ecn: false, size: bytes as u16, header_bytes: payload as u16 }),
        };
    }
}

/// Looks at the headers of a frame.
fn see(frame: &Frame) -> Seen {
    let head = frame.head();
    let Some((ethernet, packet)) = head.split_first_chunk::<IP>() else { return Seen::Other };
    let (is_v6, protocol, transport, packet_bytes) = match (&ethernet[12..], packet) {
        ([0x08, 0x00], [0x45, ..]) if packet.len() >= IPV4_BYTES => {
            // A fragment has no ports, or is only a part of its packet.
            if packet[6] & 0x3f != 0 || packet[7] != 0 {
                return Seen::Unclear;
            }
            let bytes = u16::from_be_bytes([packet[2], packet[3]]);
            (false, packet[9], IP + IPV4_BYTES, bytes as usize)
        }
        ([0x86, 0xdd], [first, ..]) if packet.len() >= IPV6_BYTES && first >> 4 == 6 => {
            let bytes = u16::from_be_bytes([packet[4], packet[5]]);
            (true, packet[6], IP + IPV6_BYTES, IPV6_BYTES + bytes as usize)
        }
        ([0x08, 0x06], _) => return Seen::Other,
        _ => return Seen::Unclear,
    };
    // Where the frame ends with its packet.
    let is_whole = IP + packet_bytes == frame.len();
    let header = &head[transport.min(head.len())..];
    let segment = match (protocol, header) {
        (PROTOCOL_TCP, [_, _, _, _, a, b, c, d, _, _, _, _, words, flags, ..]) if header.len() >= 20 => {
            let payload = transport + (words >> 4) as usize * 4;
            if payload < transport + 20 || payload > head.len() {
                return Seen::Unclear;
            }
            Segment {
                kind: if is_v6 { SegmentKind::Tcp6 } else { SegmentKind::Tcp4 },
                is_v6,
                transport,
                payload,
                bytes: frame.len() - payload,
                sequence: u32::from_be_bytes([*a, *b, *c, *d]),
                is_pushed: flags & TCP_PSH != 0,
                can_join: flags & !TCP_PSH == TCP_ACK && words & 0x0f == 0,
            }
        }
        (PROTOCOL_UDP, [_, _, _, _, high, low, sum @ ..]) if header.len() >= UDP_BYTES => {
            let payload = transport + UDP_BYTES;
            let is_all = u16::from_be_bytes([*high, *low]) as usize == frame.len() - transport;
            Segment {
                kind: SegmentKind::Udp,
                is_v6,
                transport,
                payload,
                bytes: frame.len() - payload,
                sequence: 0,
                is_pushed: false,
                can_join: is_all && sum[..2] != [0, 0],
            }
        }
        (PROTOCOL_TCP | PROTOCOL_UDP, _) => return Seen::Unclear,
        (PROTOCOL_ICMPV6, _) if is_v6 => return Seen::Other,
        // Extension headers, before those of TCP or UDP.
        _ if is_v6 => return Seen::Unclear,
        _ => return Seen::Other,
    };
    let can_join = segment.can_join && is_whole && segment.bytes != 0 && frame.offload.segmentation.is_none();
    Seen::Segment(Segment { can_join, ..segment })
}

/// Whether the checksums of a segment are right. `whole` is scratch.
fn is_sound(batch: &Batch<'_>, frame: &Frame, segment: Segment, whole: &mut Vec<u8>) -> bool {
    let Segment { kind, is_v6, transport, .. } = segment;
    let header = &frame.head()[IP..transport];
    if !is_v6 && checksum::sum(header) != 0xffff {
        return false;
    }
    match frame.offload.checksum {
        Checksum::Valid => return true,
        Checksum::Partial { .. } => return false,
        Checksum::Unverified => {}
    }
    if whole.len() < frame.len() {
        whole.resize(frame.len(), 0);
    }
    let copied = batch.copy(frame, ForeignMut::from(&mut whole[..frame.len()]));
    let pseudo = offload::pseudo_sum(header, kind, (frame.len() - transport) as u16);
    copied == frame.len() && checksum::add(pseudo, checksum::sum(&whole[transport..copied])) == 0xffff
}

#[cfg(test)]
#[path = "merge_tests.rs"]
mod tests;
