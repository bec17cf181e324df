//! The router's part of ICMP (RFC 792). It answers pings. It translates errors together with the packet that they quote
//! (RFC 5508 §4). It sends one error itself, for a packet whose hops are used up.
//!
//! An error quotes the header of the packet that caused it and at least 8 bytes behind it. The quote shows the packet
//! as it was where it was lost: behind the translation. The packet's sender knows it as it was before, so the quoted
//! addresses, ports and sums are put back as well. The error's own sum covers all of it and is updated by what changed.
//! The quoted sums need not be right, nor be quoted at all.

use std::net::Ipv4Addr;

use super::Verdict;
use super::flow::Protocol;
use super::packet::{IP_AT, Ipv4, update, word, words};
use crate::drop::Reason;
use crate::frame::Mac;
use tombolo_ring::checksum;

/// Types: destination unreachable ("fragmentation needed" among them), time exceeded, parameter problem. Source quench is
/// out of use (RFC 6633), and a redirect tells of another network's routers.
const UNREACHABLE: u8 = 3;
const TIME_EXCEEDED: u8 = 11;
const PARAMETER_PROBLEM: u8 = 12;
/// Header of an error, before the quoted packet.
const HEADER_BYTES: usize = 8;
/// Bytes behind the quoted header that every error has (RFC 792), and that carry the ports.
const LEAST_QUOTED: usize = 8;
/// Longest error that is sent: RFC 1812 §4.3.2.3.
const LONGEST_BYTES: usize = 576;

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
pub(super) struct Quote {
    /// Where the error's ICMP header starts.
    at: usize,
    /// End of the error's packet in the frame.
    end: usize,
    /// Where the quoted IP header starts, and the transport behind it.
    ip_at: usize,
    transport_at: usize,
    pub(super) protocol: Protocol,
    pub(super) from: Ipv4Addr,
    pub(super) to: Ipv4Addr,
    /// Ports of the quoted packet; both the identifier where it is an echo.
    pub(super) from_port: u16,
    pub(super) to_port: u16,
}

impl Quote {
    /// Reads the error in `frame`, whose header is `outer`; `None` where the packet is no ICMP error.
    ///
    /// # Errors
    /// [`Reason::NotTransformable`] for an error that quotes too little, or something that is not translated.
    pub(super) fn of(frame: &[u8], outer: &Ipv4) -> Result<Option<Quote>, Reason> {
        let at = IP_AT + outer.header_bytes;
        if outer.protocol != 1 || outer.fragment || at + HEADER_BYTES > outer.end {
            return Ok(None);
        }
        if !matches!(frame[at], UNREACHABLE | TIME_EXCEEDED | PARAMETER_PROBLEM) {
            return Ok(None);
        }
        let ip_at = at + HEADER_BYTES;
        let Some(header) = frame[ip_at..outer.end].first_chunk::<20>() else { return Err(Reason::NotTransformable) };
        let transport_at = ip_at + usize::from(header[0] & 15) * 4;
        // Only the first fragment has ports.
        let later_fragment = u16::from_be_bytes([header[6], header[7]]) & 0x1fff != 0;
        let refused = header[0] >> 4 != 4 || transport_at < ip_at + 20 || later_fragment;
        if refused || transport_at + LEAST_QUOTED > outer.end {
            return Err(Reason::NotTransformable);
        }
        let protocol = Protocol::of(header[9]).ok_or(Reason::NotTransformable)?;
        let (from_port, to_port) = match protocol {
            // No error is sent about an error, so what is quoted is an echo (RFC 1122 §3.2.2).
            Protocol::Echo if !matches!(frame[transport_at], 0 | 8) => return Err(Reason::NotTransformable),
            Protocol::Echo => (word(frame, transport_at + 4), word(frame, transport_at + 4)),
            _ => (word(frame, transport_at), word(frame, transport_at + 2)),
        };
        Ok(Some(Quote {
            at,
            end: outer.end,
            ip_at,
            transport_at,
            protocol,
            from: Ipv4Addr::new(header[12], header[13], header[14], header[15]),
            to: Ipv4Addr::new(header[16], header[17], header[18], header[19]),
            from_port,
            to_port,
        }))
    }

    /// Writes address and port of one end of the quoted packet, with all sums that cover them.
    pub(super) fn rewrite(&self, frame: &mut [u8], end: End, address: Ipv4Addr, port: u16) {
        let (address_at, old_address, port_at) = match end {
            End::Source => (self.ip_at + 12, self.from, self.transport_at),
            End::Destination => (self.ip_at + 16, self.to, self.transport_at + 2),
        };
        let (port_at, sum_at) = match self.protocol {
            Protocol::Tcp => (port_at, self.transport_at + 16),
            Protocol::Udp => (port_at, self.transport_at + 6),
            Protocol::Echo => (self.transport_at + 4, self.transport_at + 2),
        };
        let old_port = word(frame, port_at);
        // What the error's own sum covers, as it was.
        let changed = [address_at, address_at + 2, self.ip_at + 10, port_at];
        let before = changed.map(|at| word(frame, at));
        frame[address_at..address_at + 4].copy_from_slice(&address.octets());
        update(frame, self.ip_at + 10, &words(old_address), &words(address));
        frame[port_at..port_at + 2].copy_from_slice(&port.to_be_bytes());
        let after = changed.map(|at| word(frame, at));
        update(frame, self.at + 2, &before, &after);
        // The quoted transport's sum is within the 8 bytes that are always there, except TCP's. Zero is UDP's "none".
        let has_sum = sum_at + 2 <= self.end && !(self.protocol == Protocol::Udp && word(frame, sum_at) == 0);
        if has_sum {
            let old_sum = word(frame, sum_at);
            update(frame, sum_at, &[old_port], &[port]);
            if self.protocol != Protocol::Echo {
                update(frame, sum_at, &words(old_address), &words(address));
            }
            if self.protocol == Protocol::Udp && word(frame, sum_at) == 0 {
                frame[sum_at..sum_at + 2].copy_from_slice(&[0xff, 0xff]);
            }
            let new_sum = word(frame, sum_at);
            update(frame, self.at + 2, &[old_sum], &[new_sum]);
        }
    }
}

/// The answer of the router at `router` to a packet whose hops are used up: a frame for the packet's sender. `None`
/// where no error may be sent (RFC 1812 §4.3.2.7): about another error, a fragment that is not the first, or a packet
/// whose source or destination is not one particular host.
pub(super) fn time_exceeded(frame: &[u8], ip: &Ipv4, mac: Mac, router: Ipv4Addr) -> Option<Vec<u8>> {
    let station = frame.get(6..12).filter(|from| from[0] & 1 == 0)?;
    let transport_at = IP_AT + ip.header_bytes;
    let later_fragment = word(frame, IP_AT + 6) & 0x1fff != 0;
    let is_error = ip.protocol == 1 && frame[transport_at..ip.end].first().is_none_or(|kind| !matches!(kind, 0 | 8));
    if later_fragment || is_error || ip.from.is_unspecified() || ip.from.is_broadcast() || ip.from.is_multicast() {
        return None;
    }
    let quoted = &frame[IP_AT..ip.end.min(IP_AT + LONGEST_BYTES - 20 - HEADER_BYTES)];
    let total = (20 + HEADER_BYTES + quoted.len()) as u16;
    let mut out = [station, &mac[..], &[8, 0]].concat();
    // Precedence "internetwork control" (RFC 1812 §4.3.2.5), and as many hops as there are.
    out.extend_from_slice(&[0x45, 0xc0, (total >> 8) as u8, total as u8, 0, 0, 0, 0, 64, 1, 0, 0]);
    out.extend_from_slice(&router.octets());
    out.extend_from_slice(&ip.from.octets());
    let sum = !checksum::sum(&out[IP_AT..]);
    out[IP_AT + 10..IP_AT + 12].copy_from_slice(&sum.to_be_bytes());
    let at = out.len();
    out.extend_from_slice(&[TIME_EXCEEDED, 0, 0, 0, 0, 0, 0, 0]);
    out.extend_from_slice(quoted);
    let sum = !checksum::sum(&out[at..]);
    out[at + 2..at + 4].copy_from_slice(&sum.to_be_bytes());
    Some(out)
}

/// Turns an echo request to the router itself into its answer; anything else for the router's address is not served.
pub(super) fn echo_reply(ip: &Ipv4, frame: &mut [u8]) -> Verdict {
    match ip.transport(frame) {
        Ok(t) if t.protocol == Protocol::Echo && t.is_echo_request(frame) => {
            let (to, from) = frame.split_at_mut(6);
            to.swap_with_slice(&mut from[..6]);
            let (from, to) = frame[IP_AT + 12..IP_AT + 20].split_at_mut(4);
            from.swap_with_slice(to);
            frame[t.at] = 0;
            update(frame, t.at + 2, &[0x0800], &[0]);
            Verdict::Reply
        }
        Ok(_) => Verdict::Drop(Reason::NoDestination),
        Err(reason) => Verdict::Drop(reason),
    }
}
