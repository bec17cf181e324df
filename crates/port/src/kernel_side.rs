//! For tests: a network namespace with an interface in it, and a packet socket that plays the peer there.

use crate::conformance::{DEADLINE, number};
use crate::link::{Interface, Netns};
use crate::pair::OwnedFrame;
use crate::sys::{self, Headers, Piece, Received, Slots};
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::process::Command;
use std::time::Instant;
use tombolo_switch::frame::{MAX_FRAME_BYTES, Offload};

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

/// Waits until the interface has a carrier that the kernel has caught up with; before, it drops what is sent.
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
