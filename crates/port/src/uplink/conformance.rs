//! The router's port under the suite that all attachments pass.
//!
//! The suite's frames are no IP, which a router does not pass. So they travel as datagrams.
//! [`Tunnel`] takes the place of a guest and wraps them, the peer behind the uplink unwraps them,
//! and the other way round. One frame is one datagram. So what the suite checks of frames, budgets,
//! drops and wake-ups it checks of the router's port.

use super::{GUEST, PASST, arp_answer, config, ipv4};
use crate::conformance::{Abilities, Fixture, Violation, frame};
use crate::pair::OwnedFrame;
use crate::stream::tests::Peer;
use crate::stream::{StreamFeed, StreamPort};
use std::os::unix::net::UnixStream;
use tombolo_ring::mem::Foreign;
use tombolo_switch::Nanos;
use tombolo_switch::detail::Details;
use tombolo_switch::drop::{Drops, Reason};
use tombolo_switch::frame::{Batch, MAX_FRAME_BYTES, Offload};
use tombolo_switch::nat::uplink::NatPort;
use tombolo_switch::nat::{Config, Forward, Protocol};
use tombolo_switch::port::{Caps, Carrier, Fault, FaultKind, Port, Sent};
use tombolo_switch::wait::Token;
use tombolo_worker::reactor::Registration;

/// Headers of a datagram's frame: Ethernet, IPv4, UDP.
const WRAPPING_BYTES: usize = 14 + 20 + 8;
/// Where the guest is, and the host behind the uplink.
const HERE: ([u8; 4], u16) = ([10, 9, 0, 9], 7);
const THERE: ([u8; 4], u16) = ([198, 51, 100, 7], 5000);
/// A port of the uplink's address that is forwarded to the guest.
const FORWARDED: ([u8; 4], u16) = ([192, 0, 0, 2], 2);

fn wrap(station: [u8; 6], from: ([u8; 4], u16), to: ([u8; 4], u16), frame: &[u8]) -> Vec<u8> {
    let length = (8 + frame.len()) as u16;
    let header = [from.1, to.1, length, 0].map(u16::to_be_bytes).concat();
    ipv4(station, 17, from.0, to.0, &[&header[..], frame].concat())
}

/// The frame in a datagram; `None` where it is something else, such as the router's questions.
fn unwrap(datagram: &[u8]) -> Option<&[u8]> {
    (datagram[12..14] == [8, 0] && datagram.get(23) == Some(&17)).then(|| &datagram[WRAPPING_BYTES..])
}

/// The router's port, seen through its guest.
struct Tunnel {
    port: NatPort,
    received: Vec<Vec<u8>>,
}

impl Tunnel {
    fn give(&mut self, frames: &[Vec<u8>], drops: &mut Drops) -> Result<Sent, Fault> {
        let mut batch = Batch::with_capacity(frames.len());
        batch.set_ingress(Token(7));
        for frame in frames {
            batch.push(Foreign::from(&frame[..]), Offload::NONE);
        }
        let all: Vec<u16> = (0..frames.len() as u16).collect();
        self.port.transmit(&batch, &all, drops)
    }
}

impl Port for Tunnel {
    fn kind(&self) -> &'static str {
        self.port.kind()
    }

    fn link(&self) -> Carrier {
        self.port.link()
    }

    fn caps(&self) -> Caps {
        let caps = self.port.caps();
        Caps { max_frame_bytes: caps.max_frame_bytes - WRAPPING_BYTES as u32, ..caps }
    }

    fn service(&mut self, now: Nanos) -> Result<Option<Nanos>, Fault> {
        self.port.service(now)
    }

    fn receive<'m>(&'m mut self, budget: usize, batch: &mut Batch<'m>, drops: &mut Drops) -> Result<usize, Fault> {
        let mut inner = Batch::with_capacity(budget);
        let result = self.port.receive(budget, &mut inner, drops);
        self.received.clear();
        for frame in inner.frames() {
            let mut bytes = Vec::new();
            inner.append_to(frame, &mut bytes);
            self.received.extend(unwrap(&bytes).map(<[u8]>::to_vec));
        }
        for frame in &self.received {
            batch.push(Foreign::from(&frame[..]), Offload::NONE);
        }
        result
    }

    fn release(&mut self) -> Result<(), Fault> {
        self.received.clear();
        self.port.release()
    }

    fn transmit(&mut self, batch: &Batch<'_>, which: &[u16], drops: &mut Drops) -> Result<Sent, Fault> {
        let wrapped = which.iter().map(|index| {
            let mut bytes = Vec::new();
            batch.append_to(&batch.frames()[usize::from(*index)], &mut bytes);
            wrap(GUEST, HERE, THERE, &bytes)
        });
        let wrapped: Vec<_> = wrapped.collect();
        let sent = self.give(&wrapped, drops)?;
        Ok(Sent { bytes: sent.bytes - sent.frames * WRAPPING_BYTES as u64, ..sent })
    }

    fn flush(&mut self) -> Result<(), Fault> {
        self.port.flush()
    }

    fn answers(&self) -> bool {
        self.port.answers()
    }

    fn arm(&mut self) -> Result<bool, Fault> {
        self.port.arm()
    }

    fn disarm(&mut self) {
        self.port.disarm();
    }

    fn reset(&mut self, fault: &Fault) {
        self.port.reset(fault);
    }

    fn details(&self) -> Details {
        self.port.details()
    }
}

/// The peer is what passt is to the router: the other end of a stream.
struct UplinkFixture {
    feed: StreamFeed,
    peer: Option<Peer<UnixStream>>,
}

impl UplinkFixture {
    fn peer(&mut self) -> &mut Peer<UnixStream> {
        self.peer.as_mut().expect("a peer that is connected")
    }
}

impl Fixture for UplinkFixture {
    const KIND: &'static str = "uplink";

    fn make(registration: Registration) -> (Box<dyn Port>, Self) {
        let mtu = 1500 + WRAPPING_BYTES as u32;
        let (stream, feed) = StreamPort::given(mtu, registration);
        let forward = Forward { protocol: Protocol::Udp, port: FORWARDED.1, to: (HERE.0.into(), HERE.1) };
        let port = NatPort::new(Config { forwards: vec![forward], ..config() }, Box::new(stream), mtu);
        let mut tunnel = Tunnel { port, received: Vec::new() };
        // The guest has said where it is.
        tunnel.give(&[arp_answer(GUEST, HERE.0)], &mut Drops::default()).unwrap();
        let mut fixture = UplinkFixture { feed, peer: None };
        fixture.connect();
        (Box::new(tunnel), fixture)
    }

    fn abilities(&self) -> Abilities {
        Abilities { frame_bytes: (14, 1518), offload: false, back_pressure: true, window: 32 }
    }

    fn inject(&mut self, bytes: &[u8], _: Offload) -> bool {
        self.peer().inject(&wrap(PASST, THERE, FORWARDED, bytes))
    }

    fn collect(&mut self) -> Option<OwnedFrame> {
        loop {
            let OwnedFrame { bytes, offload } = self.peer().collect()?;
            if let Some(frame) = unwrap(&bytes) {
                return Some(OwnedFrame { bytes: frame.to_vec(), offload });
            }
        }
    }

    fn disconnect(&mut self) {
        self.peer = None;
    }

    fn connect(&mut self) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut peer = Peer::new(theirs);
        assert!(peer.inject(&arp_answer(PASST, [192, 0, 0, 1])), "an empty socket has room");
        self.peer = Some(peer);
        self.feed.give(ours.into()).unwrap();
    }

    fn send_runt(&mut self) -> Violation {
        self.peer().inject(&frame(0, 13));
        Violation::Dropped(Reason::Runt)
    }

    fn send_over_long(&mut self) -> Violation {
        self.peer().inject(&frame(0, MAX_FRAME_BYTES + 1));
        Violation::Faulted(FaultKind::Protocol)
    }

    fn send_bad_offload(&mut self) -> Violation {
        Violation::Impossible("the framing of the uplink has no offload fields")
    }

    fn break_protocol(&mut self) -> Violation {
        self.peer().write(&[0, 0, 0, 0]);
        Violation::Faulted(FaultKind::Protocol)
    }
}

crate::conformance_suite!(UplinkFixture);
