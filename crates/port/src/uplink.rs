//! The NAT of [`tombolo_switch::nat`] as a port of the switch: a router with one foot in the network and the other in
//! an uplink that knows a single guest (passt, through a framed stream).
//!
//! ```text
//! switch -> transmit -> Nat::outbound -+-> uplink.transmit
//!                                      +-> own queue (ARP and echo answers) -> receive -> switch
//! switch <- receive <- Nat::inbound <- uplink.receive
//! ```
//!
//! The uplink's port is inside this one and has no slot of its own; its wake-ups are registered under this port's token.
//! Frames are copied once more than elsewhere, since their headers change: the path ends in passt's sockets anyway.
//! A fault of the uplink is this port's fault; what the table knew is forgotten then, with the connections behind it.

use std::collections::VecDeque;

use tombolo_ring::mem::Foreign;
use tombolo_switch::Nanos;
use tombolo_switch::drop::{Drops, Reason};
use tombolo_switch::frame::{Batch, Offload};
use tombolo_switch::nat::{Config, Nat, Verdict};
use tombolo_switch::port::{Caps, Fault, Link, Port, Sent};

/// Frames of the router's own that may wait to be received by the switch.
const QUEUE_FRAMES: usize = 1024;
/// Frames handed to the uplink at once.
const CHUNK: usize = 64;

/// A router before an uplink.
pub struct NatPort {
    nat: Nat,
    uplink: Box<dyn Port>,
    mtu: u32,
    now: Nanos,
    /// Answers and translated frames for the network, oldest first.
    queue: VecDeque<Vec<u8>>,
    /// What the current turn's batch looks into.
    sending: Vec<Vec<u8>>,
    /// Frames that waited too long for their guest, until the next turn counts them.
    lost: u64,
}

impl NatPort {
    /// A router with `config` before `uplink`; `mtu` of the network, in bytes.
    pub fn new(config: Config, uplink: Box<dyn Port>, mtu: u32) -> NatPort {
        NatPort {
            nat: Nat::new(config),
            uplink,
            mtu,
            now: Nanos(0),
            queue: VecDeque::new(),
            sending: Vec::new(),
            lost: 0,
        }
    }

    fn answer(&mut self, frame: Vec<u8>, drops: &mut Drops) {
        if self.queue.len() < QUEUE_FRAMES {
            self.queue.push_back(frame);
        } else {
            drops.count(Reason::GatewayFull, 1);
        }
    }

    /// Gives frames to the uplink's port.
    fn send_out(&mut self, frames: &[Vec<u8>], drops: &mut Drops) -> Result<(), Fault> {
        for chunk in frames.chunks(CHUNK) {
            if self.uplink.link() == Link::Down {
                drops.count(Reason::LinkDown, chunk.len() as u64);
                continue;
            }
            let mut batch = Batch::with_capacity(chunk.len());
            for frame in chunk {
                batch.push(Foreign::from(&frame[..]), Offload::NONE);
            }
            let all: Vec<u16> = (0..chunk.len() as u16).collect();
            self.uplink.transmit(&batch, &all, drops)?;
        }
        Ok(())
    }

    /// The router's own questions for the uplink.
    fn ask_out(&mut self, drops: &mut Drops) -> Result<(), Fault> {
        if self.uplink.link() == Link::Down {
            return Ok(());
        }
        let own: Vec<_> = std::iter::from_fn(|| self.nat.next_for_uplink()).collect();
        if !own.is_empty() {
            self.send_out(&own, drops)?;
            self.uplink.flush()?;
        }
        Ok(())
    }
}

impl Port for NatPort {
    fn kind(&self) -> &'static str {
        "uplink"
    }

    fn link(&self) -> Link {
        self.uplink.link()
    }

    /// Frames as on a wire: their headers are rewritten, and the stream behind has no place for offloads.
    fn caps(&self) -> Caps {
        Caps::plain(self.mtu)
    }

    fn service(&mut self, now: Nanos) -> Result<Option<Nanos>, Fault> {
        self.now = now;
        let was = self.uplink.link();
        let next = self.uplink.service(now)?;
        if was == Link::Down && self.uplink.link() == Link::Up {
            self.nat.uplink_restarted();
        }
        let (lost, again) = self.nat.poll(now);
        self.lost += lost;
        while let Some(frame) = self.nat.next_for_network() {
            self.answer(frame, &mut Drops::default());
        }
        // Questions that are lost are asked again with the next frame that needs the answer.
        self.ask_out(&mut Drops::default())?;
        Ok(match (next, again) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        })
    }

    fn receive<'m>(&'m mut self, budget: usize, batch: &mut Batch<'m>, drops: &mut Drops) -> Result<usize, Fault> {
        drops.count(Reason::NoDestination, std::mem::take(&mut self.lost));
        self.sending.clear();
        let own = self.queue.len().min(budget);
        self.sending.extend(self.queue.drain(..own));
        let mut taken = Vec::new();
        let mut result = Ok(0);
        if own < budget {
            let mut inner = Batch::with_capacity(budget - own);
            result = self.uplink.receive(budget - own, &mut inner, drops);
            taken.extend(inner.frames().iter().map(|frame| {
                let mut bytes = Vec::with_capacity(frame.len());
                inner.append_to(frame, &mut bytes);
                bytes
            }));
            drop(inner);
            self.uplink.release()?;
        }
        let mut back = Vec::new();
        for mut frame in taken {
            match self.nat.inbound(self.now, &mut frame) {
                Verdict::Pass => self.sending.push(frame),
                Verdict::Reply => back.push(frame),
                Verdict::Taken => {}
                Verdict::Drop(reason) => drops.count(reason, 1),
            }
        }
        self.send_out(&back, drops)?;
        if !back.is_empty() {
            self.uplink.flush()?;
        }
        while let Some(frame) = self.nat.next_for_network() {
            self.answer(frame, drops);
        }
        // A fault of the uplink shows with the next call; what came before it is delivered.
        let used = own + result?;
        for frame in &self.sending {
            batch.push(Foreign::from(&frame[..]), Offload::NONE);
        }
        Ok(used)
    }

    fn release(&mut self) -> Result<(), Fault> {
        self.sending.clear();
        Ok(())
    }

    fn transmit(&mut self, batch: &Batch<'_>, which: &[u16], drops: &mut Drops) -> Result<Sent, Fault> {
        let mut sent = Sent::default();
        let mut out = Vec::new();
        for index in which {
            let frame = &batch.frames()[usize::from(*index)];
            let mut bytes = Vec::with_capacity(frame.len());
            batch.append_to(frame, &mut bytes);
            let len = bytes.len() as u64;
            match self.nat.outbound(self.now, &mut bytes) {
                Verdict::Pass => out.push(bytes),
                Verdict::Reply => self.answer(bytes, drops),
                Verdict::Taken => {}
                Verdict::Drop(reason) => {
                    drops.count(reason, 1);
                    continue;
                }
            }
            sent.frames += 1;
            sent.bytes += len;
        }
        while let Some(frame) = self.nat.next_for_network() {
            self.answer(frame, drops);
        }
        // Frames that the uplink's port loses were not taken.
        let mut lost = Drops::default();
        self.send_out(&out, &mut lost)?;
        sent.frames = sent.frames.saturating_sub(lost.total());
        lost.drain(|reason, n| drops.count(reason, n));
        self.ask_out(drops)?;
        Ok(sent)
    }

    fn flush(&mut self) -> Result<(), Fault> {
        self.uplink.flush()
    }

    fn answers(&self) -> bool {
        !self.queue.is_empty()
    }

    fn arm(&mut self) -> Result<bool, Fault> {
        Ok(self.uplink.arm()? || !self.queue.is_empty())
    }

    fn disarm(&mut self) {
        self.uplink.disarm();
    }

    fn reset(&mut self, fault: &Fault) {
        self.queue.clear();
        self.sending.clear();
        self.uplink.reset(fault);
        self.nat.uplink_restarted();
    }

    fn details(&self) -> Vec<(&'static str, String)> {
        let mut out = vec![("flows", self.nat.flows().to_string()), ("over", self.uplink.kind().to_string())];
        out.extend(self.uplink.details());
        out
    }
}
