//! The router's part of ICMP (RFC 792, and RFC 4443 for IPv6). It answers pings. It translates
//! errors together with the packet that they quote (RFC 5508 §4). It sends one error itself, for a
//! packet whose hops are used up.
//!
//! An error quotes the header of the packet that caused it and at least 8 bytes behind it. The
//! quote shows the packet as it was where it was lost: behind the translation. The packet's sender
//! knows it as it was before, so the quoted addresses, ports and sums are put back as well. The
//! error's own sum covers all of it and is updated by what changed. The quoted sums need not be
//! right, nor be quoted at all.

use super::Verdict;
use super::family::Address;
use super::flow::Protocol;
use super::packet::{IP_AT, Ip, Readdressed, compose, ethernet, update, word};
use crate::drop::Reason;
use crate::frame::Mac;

/// Header of an error, before the quoted packet.
const HEADER_BYTES: usize = 8;
/// Bytes behind the quoted header that every error has (RFC 792), and that carry the ports.
const LEAST_QUOTED: usize = 8;

/// Which end of the quoted packet is rewritten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// Its sender's: the packet went out and the error comes in.
    Source,
    /// Its receiver's: the packet came in and the error goes out.
    Destination,
}

/// An ICMP error, with the quoted packet checked: header and ports are within the frame.
#[derive(Debug)]
pub(super) struct Quote<A> {
    /// Where the error's ICMP header starts.
    at: usize,
    /// End of the error's packet in the frame.
    end: usize,
    /// Where the quoted IP header starts, and the transport behind it.
    ip_at: usize,
    transport_at: usize,
    pub(super) protocol: Protocol,
    pub(super) from: A,
    pub(super) to: A,
    /// Ports of the quoted packet; both the identifier where it is an echo.
    pub(super) from_port: u16,
    pub(super) to_port: u16,
}

impl<A: Address> Quote<A> {
    /// Reads the error in `frame`, whose header is `outer`; `None` where the packet is no ICMP
    /// error.
    ///
    /// # Errors
    /// [`Reason::NotTransformable`] for an error that quotes too little, or something that is not
    /// translated.
    pub(super) fn of(frame: &[u8], outer: &Ip<A>) -> Result<Option<Quote<A>>, Reason> {
        let at = outer.transport_at;
        if outer.protocol != A::ICMP || outer.fragment || at + HEADER_BYTES > outer.end {
            return Ok(None);
        }
        if !A::ERRORS.contains(&frame[at]) {
            return Ok(None);
        }
        let ip_at = at + HEADER_BYTES;
        let header = A::header(&frame[ip_at..outer.end]).ok_or(Reason::NotTransformable)?;
        let transport_at = ip_at + header.bytes;
        if header.later_fragment || transport_at + LEAST_QUOTED > outer.end {
            return Err(Reason::NotTransformable);
        }
        let protocol = Protocol::of::<A>(header.protocol).ok_or(Reason::NotTransformable)?;
        let (from_port, to_port) = match protocol {
            // No error is sent about an error, so what is quoted is an echo (RFC 1122 §3.2.2, RFC
            // 4443 §2.4).
            Protocol::Echo if !A::ECHO.contains(&frame[transport_at]) => return Err(Reason::NotTransformable),
            Protocol::Echo => (word(frame, transport_at + 4), word(frame, transport_at + 4)),
            _ => (word(frame, transport_at), word(frame, transport_at + 2)),
        };
        let (from, to) = (header.from, header.to);
        Ok(Some(Quote { at, end: outer.end, ip_at, transport_at, protocol, from, to, from_port, to_port }))
    }

    /// Writes the addresses of the quoted packet and the port of one end, with all sums that cover
    /// them. `outer` is what changed in the addresses of the error itself.
    pub(super) fn rewrite(&self, frame: &mut [u8], (from, to): (A, A), end: End, port: u16, outer: Readdressed) {
        let port_at = self.transport_at + if end == End::Source { 0 } else { 2 };
        let (port_at, sum_at) = match self.protocol {
            Protocol::Tcp => (port_at, self.transport_at + 16),
            Protocol::Udp => (port_at, self.transport_at + 6),
            Protocol::Echo => (self.transport_at + 4, self.transport_at + 2),
        };
        let addresses = Readdressed::of(self.from, from).and(self.to, to);
        if A::ICMP_COVERS_ADDRESSES {
            update(frame, self.at + 2, &[outer.old], &[outer.new]);
        }
        let source_at = self.ip_at + A::SOURCE_AT;
        frame[source_at..source_at + A::BYTES].copy_from_slice(from.bytes().as_ref());
        frame[source_at + A::BYTES..source_at + 2 * A::BYTES].copy_from_slice(to.bytes().as_ref());
        update(frame, self.at + 2, &[addresses.old], &[addresses.new]);
        if let Some(at) = A::SUM_AT.map(|at| self.ip_at + at) {
            let before = word(frame, at);
            update(frame, at, &[addresses.old], &[addresses.new]);
            update(frame, self.at + 2, &[before], &[word(frame, at)]);
        }
        let old_port = word(frame, port_at);
        frame[port_at..port_at + 2].copy_from_slice(&port.to_be_bytes());
        update(frame, self.at + 2, &[old_port], &[port]);
        // The quoted transport's sum is within the 8 bytes that are always there, except TCP's.
        // Zero is UDP's "none".
        let has_sum = sum_at + 2 <= self.end && !(self.protocol == Protocol::Udp && word(frame, sum_at) == 0);
        if has_sum {
            let old_sum = word(frame, sum_at);
            update(frame, sum_at, &[old_port], &[port]);
            if self.protocol != Protocol::Echo || A::ICMP_COVERS_ADDRESSES {
                update(frame, sum_at, &[addresses.old], &[addresses.new]);
            }
            if self.protocol == Protocol::Udp && word(frame, sum_at) == 0 {
                frame[sum_at..sum_at + 2].copy_from_slice(&[0xff, 0xff]);
            }
            let new_sum = word(frame, sum_at);
            update(frame, self.at + 2, &[old_sum], &[new_sum]);
        }
    }
}

/// The answer of the router at `router` to a packet whose hops are used up: a frame for the
/// packet's sender. `None` where no error may be sent (RFC 1812 §4.3.2.7, RFC 4443 §2.4 (e)): about
/// another error, a fragment that is not the first, or a packet whose source is not one particular
/// host.
pub(super) fn time_exceeded<A: Address>(frame: &[u8], ip: &Ip<A>, mac: Mac, router: A) -> Option<Vec<u8>> {
    let station = frame.get(6..12)?.first_chunk().filter(|from| from[0] & 1 == 0)?;
    let kind = frame[ip.transport_at..ip.end].first();
    let is_error = ip.protocol == A::ICMP && kind.is_none_or(|kind| !A::ECHO.contains(kind));
    if ip.later_fragment || is_error || !ip.from.is_host() {
        return None;
    }
    let overhead = A::compose(A::ICMP, router, ip.from, 0).len() + HEADER_BYTES;
    let quoted = &frame[IP_AT..ip.end.min(IP_AT + A::LONGEST_ERROR_BYTES - overhead)];
    let error = [&[A::TIME_EXCEEDED, 0, 0, 0, 0, 0, 0, 0][..], quoted].concat();
    Some(ethernet::<A>(*station, mac, &compose(A::ICMP, router, ip.from, &error, 2)))
}

/// Turns an echo request to the router itself into its answer; anything else for the router's
/// address is not served.
pub(super) fn echo_reply<A: Address>(ip: &Ip<A>, frame: &mut [u8]) -> Verdict {
    match ip.transport(frame) {
        Ok(t) if t.protocol == Protocol::Echo && t.is_echo_request::<A>(frame) => {
            let (to, from) = frame.split_at_mut(6);
            to.swap_with_slice(&mut from[..6]);
            let source_at = IP_AT + A::SOURCE_AT;
            let (from, to) = frame[source_at..source_at + 2 * A::BYTES].split_at_mut(A::BYTES);
            from.swap_with_slice(to);
            frame[t.at] = A::ECHO[1];
            let [request, reply] = A::ECHO.map(|kind| u16::from_be_bytes([kind, 0]));
            update(frame, t.at + 2, &[request], &[reply]);
            Verdict::Reply
        }
        Ok(_) => Verdict::Drop(Reason::NoDestination),
        Err(reason) => Verdict::Drop(reason),
    }
}
