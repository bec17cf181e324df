//! For tests: a network namespace with an interface in it, a packet socket that plays the peer
//! there, and what the fixtures of all attachments have in common whose peer is the kernel.

use crate::conformance::{Abilities, DEADLINE, Fixture, Violation, number};
use crate::link::{Interface, Netns};
use crate::pair::OwnedFrame;
use crate::sys::{self, Headers, Piece, Received, Slots};
use std::collections::VecDeque;
use std::marker::PhantomData;
use std::os::fd::OwnedFd;
use std::process::Command;
use std::time::Instant;
use tombolo_switch::frame::{MAX_FRAME_BYTES, Offload};
use tombolo_switch::port::Port;
use tombolo_worker::reactor::Registration;

/// Why a test that makes interfaces cannot run here.
pub(crate) fn missing() -> Option<String> {
    let tried = Netns::anonymous().map(drop);
    tried.err().map(|error| format!("{error}; run as root"))
}

/// A new namespace whose kernel says nothing by itself: no IPv6, so no router solicitations.
pub(crate) fn quiet_namespace() -> Netns {
    let netns = Netns::anonymous().unwrap();
    netns.run(|| std::fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1").unwrap()).unwrap();
    netns.run(|| std::fs::write("/proc/sys/net/ipv6/conf/all/disable_ipv6", "1").unwrap()).unwrap();
    netns
}

/// Runs a command line in the namespace.
pub(crate) fn run(netns: &Netns, line: &str) {
    let mut words = line.split_whitespace();
    let mut command = Command::new(words.next().unwrap());
    let output = netns.run(|| command.args(words).output()).unwrap().unwrap();
    assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Waits until the interface has a carrier that the kernel has caught up with; before, it drops
/// what is sent.
pub(crate) fn await_carrier(netns: &Netns, name: &str) {
    let interface = Interface::open(Some(netns), name).unwrap();
    let end = Instant::now() + DEADLINE;
    while !interface.state().unwrap().running {
        assert!(Instant::now() < end, "{name} gets no carrier");
        std::thread::yield_now();
    }
}

/// The peer: sends and collects on an interface, with offload state.
pub(crate) struct KernelSide {
    socket: OwnedFd,
    slots: Slots,
    headers: Headers,
    got: Vec<Received>,
    frames: VecDeque<OwnedFrame>,
}

impl KernelSide {
    pub(crate) fn open(netns: &Netns, name: &str) -> KernelSide {
        let interface = Interface::open(Some(netns), name).unwrap();
        let index = interface.index().unwrap();
        let socket = netns.run(|| sys::packet_socket(true, false)).unwrap().unwrap();
        sys::set_buffers(&socket, 32 << 20).unwrap();
        sys::bind_packet(&socket, index).unwrap();
        sys::join_promiscuous(&socket, index).unwrap();
        let slots = Slots::new(64, MAX_FRAME_BYTES + 64);
        KernelSide { socket, slots, headers: Headers::default(), got: Vec::new(), frames: VecDeque::new() }
    }

    pub(crate) fn inject(&mut self, bytes: &[u8], offload: Offload) -> bool {
        self.inject_raw(bytes, &offload.to_vnet()).map_err(|e| println!("inject: {e}")).is_ok()
    }

    pub(crate) fn inject_raw(&mut self, bytes: &[u8], header: &[u8]) -> Result<usize, rustix::io::Errno> {
        let pieces = [Piece::from(header), Piece::from(bytes)];
        sys::send_many(&self.socket, &pieces, &[2], &mut self.headers)
    }

    pub(crate) fn collect(&mut self) -> Option<OwnedFrame> {
        if self.frames.is_empty() && self.slots.receive(&self.socket, 64, 0, &mut self.got).is_ok() {
            for (slot, got) in self.slots.chunks_mut().zip(&self.got) {
                let (header, bytes) = slot[..got.bytes].split_first_chunk().unwrap();
                if number(bytes).is_some() {
                    let offload = Offload::from_vnet(header, bytes.len()).unwrap();
                    self.frames.push_back(OwnedFrame { bytes: bytes.to_vec(), offload });
                }
            }
        }
        self.frames.pop_front()
    }
}

/// A kind of attachment whose peer is the kernel: how its interfaces come, and where the peer is.
pub(crate) trait Attachment {
    const KIND: &'static str;
    /// The interface at which the peer sends and collects. With it the port loses its own.
    const PEER: &'static str;

    /// Why it cannot run here, besides what every test with interfaces needs.
    fn missing() -> Option<String> {
        None
    }

    /// The port, in a namespace without interfaces.
    fn open(netns: &Netns, registration: Registration) -> Box<dyn Port>;

    /// Makes the interfaces that went with [`Attachment::PEER`] once more.
    fn connect(netns: &Netns);
}

/// The peer of such a port.
pub(crate) struct KernelFixture<A> {
    pub(crate) netns: Netns,
    pub(crate) side: KernelSide,
    attachment: PhantomData<A>,
}

impl<A: Attachment> Fixture for KernelFixture<A> {
    const KIND: &'static str = A::KIND;

    fn missing() -> Option<String> {
        missing().or_else(A::missing)
    }

    fn make(registration: Registration) -> (Box<dyn Port>, Self) {
        let netns = quiet_namespace();
        let port = A::open(&netns, registration);
        let side = KernelSide::open(&netns, A::PEER);
        (port, KernelFixture { netns, side, attachment: PhantomData })
    }

    fn abilities(&self) -> Abilities {
        Abilities { frame_bytes: (14, 1514), offload: true, back_pressure: false, window: 32 }
    }

    fn inject(&mut self, bytes: &[u8], offload: Offload) -> bool {
        self.side.inject(bytes, offload)
    }

    fn collect(&mut self) -> Option<OwnedFrame> {
        self.side.collect()
    }

    fn disconnect(&mut self) {
        run(&self.netns, &format!("ip link del {}", A::PEER));
    }

    fn connect(&mut self) {
        A::connect(&self.netns);
        self.side = KernelSide::open(&self.netns, A::PEER);
    }

    fn send_runt(&mut self) -> Violation {
        assert!(self.side.inject_raw(&[0; 13], &[0; 10]).is_err());
        Violation::Impossible("the kernel passes on no frame without an Ethernet header")
    }

    fn send_over_long(&mut self) -> Violation {
        assert!(self.side.inject_raw(&[0; 1600], &[0; 10]).is_err());
        Violation::Impossible("the kernel sends no frame beyond the MTU")
    }

    fn send_bad_offload(&mut self) -> Violation {
        let past_the_end = [1, 0, 0, 0, 0, 0, 0, 1, 0, 1];
        assert!(self.side.inject_raw(&[0; 60], &past_the_end).is_err());
        Violation::Impossible("the kernel checks offload fields itself")
    }

    fn break_protocol(&mut self) -> Violation {
        Violation::Impossible("the peer is the kernel")
    }
}
