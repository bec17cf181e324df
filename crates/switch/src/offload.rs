//! Offloads done in software, for a destination that cannot do them.
//!
//! A frame that the destination takes as it is goes there as it is, straight from its source. Any
//! other frame is first copied into the worker's own memory, so that its source cannot change it
//! any more. It is segmented or summed there, and the results are sent as a separate batch. The
//! order of frames is kept.
//!
//! | frame | destination | becomes |
//! | --- | --- | --- |
//! | no state, not longer than the destination's longest | any | as it is |
//! | no segmentation, longer | any | dropped, `too_long` |
//! | partial checksum | takes these | as it is |
//! | partial checksum | does not | summed from `start` to the end (VirtIO 1.3 §5.1.6.2) |
//! | segmentation, headers are not what it says | any | dropped, `bad_offload` |
//! | segmentation, a segment would be longer than the destination's longest | any | dropped, `too_long` |
//! | segmentation | takes it | as it is |
//! | segmentation | does not | cut, each segment summed |
//! | either, behind a VLAN tag | takes it of frames without a tag only | as where it takes none |
//! | … with an IP fragment, a routing header still under way, unknown extension headers, more than 2048 segments | does not | dropped, `not_transformable` |
//!
//! Segments follow Linux's `tcp_gso_segment`: the IPv4 identification counts up, sequence numbers
//! advance, PSH and FIN stay on the last segment only, CWR on the first only, all other header
//! bytes are repeated. Datagrams of a UDP flow are cut as its `__udp_gso_segment` does.
//!
//! Limits: two VLAN tags, IPv4 options, IPv6 hop-by-hop, destination and completed routing headers.

use crate::drop::{Drops, Reason};
use crate::frame::{Batch, Checksum, ETHERNET_HEADER_BYTES, Frame, Offload, SegmentKind, Segmentation};
use crate::port::{Caps, Fault, Sent};
use tombolo_ring::checksum;
use tombolo_ring::mem::{Foreign, ForeignMut};

const ETHERTYPE_VLAN: u16 = 0x8100;
const ETHERTYPE_QINQ: u16 = 0x88a8;
const ETHERTYPE_IPV4: u16 = 0x0800;
const ETHERTYPE_IPV6: u16 = 0x86dd;
const PROTOCOL_TCP: u8 = 6;
const PROTOCOL_UDP: u8 = 17;
const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const DESTINATION: u8 = 60;
const TCP_FIN: u8 = 0x01;
const TCP_PSH: u8 = 0x08;
const TCP_CWR: u8 = 0x80;

/// Made frames are handed on when they exceed this many bytes, which bounds the scratch memory to
/// this and one frame's segments.
const HAND_ON_BYTES: usize = 128 << 10;
/// And when they are this many.
const HAND_ON_FRAMES: usize = 512;
/// Segments that one frame may become: 64 KiB by 48 bytes, the least that Linux's TCP uses, are
/// 1,366. Without a bound a guest could have 65,000 frames made of one.
const MAX_SEGMENTS: usize = 2048;
/// Extension headers that are looked through.
const MAX_EXTENSIONS: usize = 8;
const TCP_HEADER_BYTES: usize = 20;
const UDP_HEADER_BYTES: usize = 8;

/// What was done in software.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Frames whose checksum was completed.
    pub checksums: u64,
    /// Frames that were cut.
    pub segmented: u64,
    /// Segments that they became.
    pub segments: u64,
}

/// Scratch memory, reused from turn to turn.
#[derive(Debug, Default)]
pub struct Transformer {
    /// Frames of the source's batch that go as they are, not handed on yet.
    direct: Vec<u16>,
    /// Made frames, not handed on yet; never at the same time as `direct`.
    made: Made,
    /// 0, 1, 2, …
    all: Vec<u16>,
    batch: Batch<'static>,
}

/// Frames that lie one behind the other.
#[derive(Debug, Default)]
struct Made {
    /// Only grows, so that nothing is cleared that will be written over.
    bytes: Vec<u8>,
    /// Where each frame ends.
    ends: Vec<usize>,
}

impl Made {
    fn clear(&mut self) {
        self.ends.clear();
    }

    /// Bytes of all frames.
    fn len(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Room for one more frame of so many bytes, with what an earlier one left there.
    /// [`Made::add`] makes it a frame.
    fn room(&mut self, bytes: usize) -> &mut [u8] {
        let first = self.len();
        if self.bytes.len() < first + bytes {
            self.bytes.resize(first + bytes, 0);
        }
        &mut self.bytes[first..first + bytes]
    }

    fn add(&mut self, bytes: usize) {
        self.ends.push(self.len() + bytes);
    }
}

/// Where the headers of a TCP or UDP packet are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Headers {
    /// First byte of the IP header.
    ip: usize,
    /// First byte of the TCP or UDP header.
    transport: usize,
    /// First byte behind it.
    payload: usize,
    /// First byte behind the packet; padding may follow.
    end: usize,
}

impl Transformer {
    /// Hands the frames `which` of `batch` to `send` in such a form that a destination with `caps`
    /// takes them. Those that it cannot take are counted in `drops`.
    ///
    /// # Errors
    /// What `send` returns.
    pub fn transmit(
        &mut self,
        batch: &Batch<'_>,
        which: &[u16],
        caps: Caps,
        drops: &mut Drops,
        work: &mut Work,
        mut send: impl FnMut(&Batch<'_>, &[u16], &mut Drops) -> Result<Sent, Fault>,
    ) -> Result<Sent, Fault> {
        let mut sent = Sent::default();
        // A fault or a panic may have left something.
        self.direct.clear();
        self.made.clear();
        for index in which {
            let frame = &batch.frames()[*index as usize];
            let made_before = self.made.ends.len();
            match self.transform(batch, frame, caps, work) {
                Err(reason) => drops.count(reason, 1),
                Ok(false) => {
                    sent.add(self.hand_on_made(batch, drops, &mut send)?);
                    self.direct.push(*index);
                }
                Ok(true) => {
                    if made_before == 0 && !self.direct.is_empty() {
                        sent.add(send(batch, &self.direct, drops)?);
                        self.direct.clear();
                    }
                    if self.made.len() > HAND_ON_BYTES || self.made.ends.len() > HAND_ON_FRAMES {
                        sent.add(self.hand_on_made(batch, drops, &mut send)?);
                    }
                }
            }
        }
        sent.add(self.hand_on_made(batch, drops, &mut send)?);
        if !self.direct.is_empty() {
            sent.add(send(batch, &self.direct, drops)?);
            self.direct.clear();
        }
        Ok(sent)
    }

    /// Appends to the made frames what `frame` becomes; `false` where it can go as it is.
    fn transform(&mut self, batch: &Batch<'_>, frame: &Frame, caps: Caps, work: &mut Work) -> Result<bool, Reason> {
        let longest = caps.max_frame_bytes as usize;
        let takes_checksum = caps.checksum && (caps.tagged || !is_tagged(frame.head()));
        let Some(cut) = frame.offload.segmentation else {
            if frame.len() > longest {
                return Err(Reason::TooLong);
            }
            return match frame.offload.checksum {
                Checksum::Partial { start, offset } if !takes_checksum => {
                    let room = self.made.room(frame.len());
                    let copied = batch.copy(frame, ForeignMut::from(&mut *room));
                    debug_assert_eq!(copied, frame.len());
                    // Of an earlier frame there, if the lengths in this one disagreed.
                    room[copied..].fill(0);
                    complete(room, start, offset)?;
                    self.made.add(frame.len());
                    work.checksums += 1;
                    Ok(true)
                }
                _ => Ok(false),
            };
        };
        let headers = parse(frame.head(), frame.len(), cut.kind)?;
        if headers.payload + cut.size as usize > longest && frame.len() > longest {
            return Err(Reason::TooLong);
        }
        if takes_checksum && caps.takes(cut.kind) && (caps.ecn || !cut.ecn) {
            return Ok(false);
        }
        if headers.end - headers.payload > MAX_SEGMENTS * cut.size as usize {
            return Err(Reason::NotTransformable);
        }
        let segments = cut_into(batch, frame, headers, cut, &mut self.made);
        work.segmented += 1;
        work.segments += segments;
        work.checksums += segments;
        Ok(true)
    }

    fn hand_on_made(
        &mut self,
        source: &Batch<'_>,
        drops: &mut Drops,
        send: &mut impl FnMut(&Batch<'_>, &[u16], &mut Drops) -> Result<Sent, Fault>,
    ) -> Result<Sent, Fault> {
        let Made { bytes, ends } = &self.made;
        if ends.is_empty() {
            return Ok(Sent::default());
        }
        let mut batch: Batch<'_> = std::mem::take(&mut self.batch);
        if let Some(port) = source.ingress() {
            batch.set_ingress(port);
            batch.set_marking(source.marking());
        }
        let mut start = 0;
        for end in ends {
            batch.push(bytes[start..*end].into(), Offload::NONE);
            start = *end;
        }
        let known = self.all.len();
        self.all.extend(known as u16..(ends.len().max(known)) as u16);
        let sent = send(&batch, &self.all[..ends.len()], drops);
        self.batch = batch.recycle();
        self.made.clear();
        sent
    }
}

impl Sent {
    /// Adds what another call took.
    pub fn add(&mut self, other: Sent) {
        self.frames += other.frames;
        self.bytes += other.bytes;
    }
}

/// Whether a frame that starts with `head` has a VLAN tag, of either kind.
fn is_tagged(head: &[u8]) -> bool {
    word(head, ETHERNET_HEADER_BYTES - 2).is_some_and(|kind| matches!(kind, ETHERTYPE_VLAN | ETHERTYPE_QINQ))
}

/// Completes a partial checksum in place.
fn complete(bytes: &mut [u8], start: u16, offset: u16) -> Result<(), Reason> {
    let (start, field) = (start as usize, start as usize + offset as usize);
    // The code that pushed the frame has checked that; a mistake there must not become a panic
    // here.
    if start < ETHERNET_HEADER_BYTES || field + 2 > bytes.len() {
        return Err(Reason::BadOffload);
    }
    let sum = !checksum::sum(&bytes[start..]);
    // Zero means "no checksum" in UDP, and its other form is as good in every protocol that sums
    // this way.
    let sum = if sum == 0 { 0xffff } else { sum };
    bytes[field..field + 2].copy_from_slice(&sum.to_be_bytes());
    Ok(())
}

/// Whether a partial checksum is that of the TCP or UDP header behind the IP headers of the frame
/// that starts with `head`. Completing any other would write a sum of the sender's choosing over
/// bytes that were checked already, such as the source address that a guard let pass. It makes no
/// difference who completes it: we, a kernel, or the guest that gets it.
pub(crate) fn is_of_transport(head: &[u8], start: u16, offset: u16) -> bool {
    transport(head) == Some((start as usize, offset))
}

/// Where the TCP or UDP header of a packet starts, and where in it the checksum is.
fn transport(head: &[u8]) -> Option<(usize, u16)> {
    let mut ip = ETHERNET_HEADER_BYTES;
    let mut ethertype = word(head, ip - 2)?;
    for _ in 0..2 {
        if matches!(ethertype, ETHERTYPE_VLAN | ETHERTYPE_QINQ) {
            ip += 4;
            ethertype = word(head, ip - 2)?;
        }
    }
    let first = *head.get(ip)?;
    let (next, end) = match (ethertype, first >> 4) {
        (ETHERTYPE_IPV4, 4) if first & 15 >= 5 => (*head.get(ip + 9)?, ip + (first & 15) as usize * 4),
        (ETHERTYPE_IPV6, 6) => {
            let (mut next, mut at) = (*head.get(ip + 6)?, ip + 40);
            for _ in 0..MAX_EXTENSIONS {
                if !matches!(next, HOP_BY_HOP | ROUTING | DESTINATION) {
                    break;
                }
                next = *head.get(at)?;
                at += 8 + *head.get(at + 1)? as usize * 8;
            }
            (next, at)
        }
        _ => return None,
    };
    match next {
        PROTOCOL_TCP => Some((end, 16)),
        PROTOCOL_UDP => Some((end, 6)),
        _ => None,
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes([*bytes.get(at)?, *bytes.get(at + 1)?]))
}

/// Finds the headers of a packet that claims to be of `kind`; `head` is the start of a frame of
/// `len` bytes.
///
/// # Errors
/// [`Reason::BadOffload`] where it is something else, [`Reason::NotTransformable`] where it is a
/// packet that cannot be cut, or whose headers are longer than `head`.
fn parse(head: &[u8], len: usize, kind: SegmentKind) -> Result<Headers, Reason> {
    // A header that ends beyond the head is a lie of a short frame, and beyond us in a long one.
    let short = if head.len() == len { Reason::BadOffload } else { Reason::NotTransformable };
    let mut ip = ETHERNET_HEADER_BYTES;
    let mut ethertype = word(head, ip - 2).ok_or(short)?;
    for _ in 0..2 {
        if matches!(ethertype, ETHERTYPE_VLAN | ETHERTYPE_QINQ) {
            ip += 4;
            ethertype = word(head, ip - 2).ok_or(short)?;
        }
    }
    let (protocol, _) = kind.transport();
    let (ip_header, ip_bytes) = match (kind, ethertype) {
        (_, ETHERTYPE_VLAN | ETHERTYPE_QINQ) => return Err(Reason::NotTransformable),
        (SegmentKind::Tcp4 | SegmentKind::Udp, ETHERTYPE_IPV4) => {
            parse_ipv4(head.get(ip..).ok_or(short)?, protocol, short)?
        }
        (SegmentKind::Tcp6 | SegmentKind::Udp, ETHERTYPE_IPV6) => {
            parse_ipv6(head.get(ip..).ok_or(short)?, protocol, short)?
        }
        _ => return Err(Reason::BadOffload),
    };
    let transport = ip + ip_header;
    let header_bytes = match kind {
        SegmentKind::Udp => UDP_HEADER_BYTES,
        SegmentKind::Tcp4 | SegmentKind::Tcp6 => (*head.get(transport + 12).ok_or(short)? >> 4) as usize * 4,
    };
    let payload = transport + header_bytes;
    // A length of 0 is what a stack writes that leaves the length to the device.
    let end = if ip_bytes == 0 { len } else { ip + ip_bytes };
    let least = if kind == SegmentKind::Udp { UDP_HEADER_BYTES } else { TCP_HEADER_BYTES };
    if header_bytes < least || payload > end || end > len || end - ip > u16::MAX as usize {
        return Err(Reason::BadOffload);
    }
    if payload > head.len() {
        return Err(short);
    }
    Ok(Headers { ip, transport, payload, end })
}

/// Bytes of the header, and of the packet.
fn parse_ipv4(packet: &[u8], protocol: u8, short: Reason) -> Result<(usize, usize), Reason> {
    let fixed: &[u8; 20] = packet.first_chunk().ok_or(short)?;
    let header = (fixed[0] & 15) as usize * 4;
    if fixed[0] >> 4 != 4 || header < 20 || fixed[9] != protocol {
        return Err(Reason::BadOffload);
    }
    // More-fragments or an offset: only whole packets can be cut.
    if (fixed[6] & 0x3f) | fixed[7] != 0 {
        return Err(Reason::NotTransformable);
    }
    Ok((header, u16::from_be_bytes([fixed[2], fixed[3]]) as usize))
}

/// Bytes of the headers before TCP's or UDP's, and of the packet.
fn parse_ipv6(packet: &[u8], protocol: u8, short: Reason) -> Result<(usize, usize), Reason> {
    let fixed: &[u8; 40] = packet.first_chunk().ok_or(short)?;
    if fixed[0] >> 4 != 6 {
        return Err(Reason::BadOffload);
    }
    let packet_bytes = match u16::from_be_bytes([fixed[4], fixed[5]]) as usize {
        0 => 0,
        payload => 40 + payload,
    };
    let (mut next, mut at) = (fixed[6], 40);
    for _ in 0..MAX_EXTENSIONS {
        match next {
            found if found == protocol => return Ok((at, packet_bytes)),
            HOP_BY_HOP | ROUTING | DESTINATION => {
                let extension: &[u8; 4] = packet.get(at..).and_then(<[u8]>::first_chunk).ok_or(short)?;
                if next == ROUTING && extension[3] != 0 {
                    // The checksum is over the last destination, which is not in the header yet.
                    return Err(Reason::NotTransformable);
                }
                next = extension[0];
                at += 8 + extension[1] as usize * 8;
            }
            _ => return Err(Reason::NotTransformable),
        }
    }
    Err(Reason::NotTransformable)
}

/// What is left of a frame whose bytes are taken from front to back.
struct Rest<'a, 'm> {
    piece: Foreign<'a>,
    pieces: std::slice::Iter<'a, Foreign<'m>>,
}

impl<'a, 'm> Rest<'a, 'm> {
    /// Of `frame`, a frame of `batch`, behind the first `skip` bytes, which are within its head.
    fn of(batch: &'a Batch<'m>, frame: &'a Frame, skip: usize) -> Rest<'a, 'm> {
        Rest { piece: Foreign::from(&frame.head()[skip..]), pieces: batch.tail(frame).iter() }
    }

    /// Fills `to`; the frame has that many bytes left.
    fn take(&mut self, mut to: &mut [u8]) {
        while !to.is_empty() {
            let taken = self.piece.read_into(to);
            (self.piece, to) = (self.piece.skip(taken), &mut to[taken..]);
            if !to.is_empty() {
                let Some(next) = self.pieces.next() else { break };
                self.piece = *next;
            }
        }
        debug_assert!(to.is_empty());
        // Of an earlier frame there, if the lengths in this one disagreed.
        to.fill(0);
    }
}

/// Appends the segments of `frame`, a frame of `batch`, to `made`; returns how many.
fn cut_into(batch: &Batch<'_>, frame: &Frame, headers: Headers, cut: Segmentation, made: &mut Made) -> u64 {
    let Headers { ip, transport, payload, end } = headers;
    let (size, bytes, head) = (cut.size as usize, end - payload, &frame.head()[..payload]);
    let mut rest = Rest::of(batch, frame, payload);
    let identification = u16::from_be_bytes([head[ip + 4], head[ip + 5]]);
    // A packet without payload is one segment.
    let count = bytes.div_ceil(size).max(1);
    for n in 0..count {
        let len = payload + size.min(bytes - n * size);
        let segment = made.room(len);
        segment[..payload].copy_from_slice(head);
        rest.take(&mut segment[payload..]);
        let transport_bytes = (len - transport) as u16;
        let header = &mut segment[ip..transport];
        if header[0] >> 4 == 4 {
            header[4..6].copy_from_slice(&identification.wrapping_add(n as u16).to_be_bytes());
        }
        set_length(header, transport_bytes);
        let pseudo = pseudo_sum(header, cut.kind, transport_bytes);
        let header = &mut segment[transport..];
        match cut.kind {
            SegmentKind::Udp => header[4..6].copy_from_slice(&transport_bytes.to_be_bytes()),
            SegmentKind::Tcp4 | SegmentKind::Tcp6 => {
                number_segment(header, n as u32 * cut.size as u32, n == 0, n + 1 == count);
            }
        }
        let (_, field) = cut.kind.transport();
        header[field..field + 2].fill(0);
        let sum = !checksum::add(pseudo, checksum::sum(header));
        // Zero would say that a datagram has no checksum.
        let sum = if sum == 0 && cut.kind == SegmentKind::Udp { 0xffff } else { sum };
        header[field..field + 2].copy_from_slice(&sum.to_be_bytes());
        made.add(len);
    }
    count as u64
}

/// Makes an IP header, with its options and extensions, that of a packet with so many bytes behind
/// it.
pub(crate) fn set_length(header: &mut [u8], transport_bytes: u16) {
    if header[0] >> 4 == 4 {
        let total = transport_bytes + header.len() as u16;
        header[2..4].copy_from_slice(&total.to_be_bytes());
        header[10..12].fill(0);
        let sum = !checksum::sum(header);
        header[10..12].copy_from_slice(&sum.to_be_bytes());
    } else {
        let payload_bytes = transport_bytes + (header.len() - 40) as u16;
        header[4..6].copy_from_slice(&payload_bytes.to_be_bytes());
    }
}

/// The sum of the pseudo-header that a packet with this IP header has.
pub(crate) fn pseudo_sum(header: &[u8], kind: SegmentKind, transport_bytes: u16) -> u16 {
    let addresses = checksum::sum(if header[0] >> 4 == 4 { &header[12..20] } else { &header[8..40] });
    checksum::add(checksum::add(addresses, kind.transport().0.into()), transport_bytes)
}

/// Makes a TCP header that of the segment which begins `offset` bytes behind the first one.
fn number_segment(header: &mut [u8], offset: u32, is_first: bool, is_last: bool) {
    let sequence = u32::from_be_bytes([header[4], header[5], header[6], header[7]]).wrapping_add(offset);
    header[4..8].copy_from_slice(&sequence.to_be_bytes());
    if !is_first {
        header[13] &= !TCP_CWR;
    }
    if !is_last {
        header[13] &= !(TCP_FIN | TCP_PSH);
    }
}

#[cfg(test)]
#[path = "offload_tests.rs"]
mod tests;
