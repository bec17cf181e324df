//! The NAT of [`crate::nat`] as a port of the switch: a router with one foot in the
//! network and the other in an uplink that knows a single guest (passt, through a framed stream).
//!
//! ```text
//! switch -> transmit -> Nat::outbound -+-> uplink.transmit
//!                                      +-> own queue (ARP, discovery, echo) -> receive -> switch
//! switch <- receive <- Nat::inbound <- uplink.receive
//! ```
//!
//! There is a table for IPv4, and with [`NatPort::with_ipv6`] one for IPv6; a frame's ethertype
//! says which one it is for. Without the second one IPv6 goes nowhere, as any other protocol. An
//! uplink that has no IPv6 outside is silent when the router looks for it (passt is);
//! [`Away::has_ipv6`] tells whether it has answered.
//!
//! The uplink's port is inside this one and has no slot of its own; its wake-ups are registered
//! under this port's token. Frames are copied once more than elsewhere, since their headers change:
//! the path ends in passt's sockets anyway. A fault of the uplink is this port's fault; what the
//! table knew is forgotten then, with the connections behind it.

use super::repeats::Repeats;
use super::{Config, Nat, Verdict};
use crate::Nanos;
use crate::detail::Details;
use crate::drop::{Drops, Reason};
use crate::frame::{Batch, Offload};
use crate::port::{Caps, Carrier, Fault, HandOver, Port, Sent};
use std::collections::VecDeque;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use tombolo_ring::mem::Foreign;

pub use super::repeats::STORM_REPEATS;

/// Frames of the router's own that may wait to be received by the switch.
pub const QUEUE_FRAMES: usize = 1024;
/// Frames handed to the uplink at once.
const CHUNK: usize = 64;

/// In the length of IPv4's table in a stored state: IPv6's follows it. No table is nearly so long.
const HAS_IPV6: u32 = 1 << 31;

/// Whether a router that was handed over had a table of IPv6.
pub fn had_ipv6(handed: &HandOver) -> bool {
    handed.state.first_chunk().is_some_and(|length| u32::from_le_bytes(*length) & HAS_IPV6 != 0)
}

fn ends_early() -> String {
    "the stored state of the router ends early".to_string()
}

fn is_ipv6(frame: &[u8]) -> bool {
    frame.get(12..14) == Some(&[0x86, 0xdd])
}

fn earlier(a: Option<Nanos>, b: Option<Nanos>) -> Option<Nanos> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

/// Tells a router which guests are away; see [`Nat::set_away`]. The port looks before it takes
/// frames from its uplink, and when it is serviced, as it is twice a second while frames are held.
#[derive(Clone, Debug, Default)]
pub struct Away(Arc<AwayList>);

#[derive(Debug, Default)]
struct AwayList {
    pulse: Pulse,
    changed: AtomicBool,
    guests: Mutex<Vec<IpAddr>>,
    has_ipv6: AtomicBool,
}

impl Away {
    /// Names the guests that are away by all their addresses, instead of those named before.
    pub fn set(&self, guests: Vec<IpAddr>) {
        *self.0.guests.lock().unwrap_or_else(PoisonError::into_inner) = guests;
        // R0, with A0: who sees this sees the list; the lock orders them already for who then takes
        // it.
        self.0.changed.store(true, Ordering::Release);
    }

    /// Has the router ask the uplink whether it lives, when its port is served next; see
    /// [`Away::beat`].
    pub fn ask(&self) {
        // Relaxed: a flag that says nothing of other memory; so are the counters of the pulse.
        self.0.pulse.wanted.store(true, Ordering::Relaxed);
    }

    /// Whether the uplink has said where it is by IPv6, since it was last started.
    pub fn has_ipv6(&self) -> bool {
        // Relaxed: a flag that says nothing of other memory. The port writes it.
        self.0.has_ipv6.load(Ordering::Relaxed)
    }

    /// The uplink's signs of life so far.
    pub fn beat(&self) -> Beat {
        let read = |cell: &AtomicU64| cell.load(Ordering::Relaxed);
        let Pulse { asked, answers, frames, repeats, taken, refused, .. } = &self.0.pulse;
        Beat {
            asked: read(asked),
            answers: read(answers),
            frames: read(frames),
            repeats: read(repeats),
            taken: read(taken),
            refused: read(refused),
        }
    }

    fn take(&self) -> Option<Vec<IpAddr>> {
        // Looked at for every turn: written only where there is news. A0, with R0.
        if !self.0.changed.load(Ordering::Acquire) || !self.0.changed.swap(false, Ordering::Acquire) {
            return None;
        }
        Some(self.0.guests.lock().unwrap_or_else(PoisonError::into_inner).clone())
    }
}

/// Signs of life of the uplink. The watcher writes `wanted`, the port the rest.
#[derive(Debug, Default)]
struct Pulse {
    wanted: AtomicBool,
    asked: AtomicU64,
    answers: AtomicU64,
    frames: AtomicU64,
    repeats: AtomicU64,
    taken: AtomicU64,
    refused: AtomicU64,
}

/// What [`Away::beat`] tells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Beat {
    /// Questions that were sent.
    pub asked: u64,
    /// Replies of the uplink to them.
    pub answers: u64,
    /// Frames received.
    pub frames: u64,
    /// How often the uplink has repeated one frame that nothing provoked, in the last storm. It
    /// changes while the storm goes on and stays as it is afterwards.
    pub repeats: u64,
    /// Frames that the uplink took.
    pub taken: u64,
    /// Frames that it did not take, as its queue was full.
    pub refused: u64,
}

/// A router before an uplink.
pub struct NatPort {
    nat: Nat,
    six: Option<Nat<Ipv6Addr>>,
    away: Away,
    uplink: Box<dyn Port>,
    mtu: u32,
    now: Nanos,
    /// Answers and translated frames for the network, oldest first.
    queue: VecDeque<Vec<u8>>,
    /// What the current turn's batch looks into.
    sending: Vec<Vec<u8>>,
    /// Losses of frames of the router's own and of frames that waited too long, until the next turn
    /// counts them: none of them is a frame that the switch handed over.
    lost: Drops,
    /// When the worker was told to come back.
    promised: Option<Nanos>,
    repeats: Repeats,
}

impl NatPort {
    /// A router with `config` before `uplink`; `mtu` of the network, in bytes.
    pub fn new(config: Config, uplink: Box<dyn Port>, mtu: u32) -> NatPort {
        Self::in_place_of(Away::default(), config, uplink, mtu)
    }

    /// As [`NatPort::new`], in the place of a router whose `away` it takes over, with the guests
    /// that it names.
    pub fn in_place_of(away: Away, config: Config, uplink: Box<dyn Port>, mtu: u32) -> NatPort {
        // Named to the one before, and so not yet to this one.
        away.0.changed.store(true, Ordering::Release);
        NatPort {
            nat: Nat::new(config),
            six: None,
            away,
            uplink,
            mtu,
            now: Nanos(0),
            queue: VecDeque::new(),
            sending: Vec::new(),
            lost: Drops::default(),
            promised: None,
            repeats: Repeats::default(),
        }
    }

    /// The same router, which translates IPv6 as well; one without a table of it.
    #[must_use]
    pub fn with_ipv6(mut self, config: Config<Ipv6Addr>) -> NatPort {
        self.six = Some(Nat::new(config));
        self
    }

    /// A router that continues where another process's router stopped, before an uplink that takes
    /// up the rest of `handed` with `attach`. Where only one of the two knows IPv6, that table
    /// starts empty or is left.
    ///
    /// # Errors
    /// Why that cannot be, in words.
    pub fn take_up(
        config: Config,
        ipv6: Option<Config<Ipv6Addr>>,
        mut handed: HandOver,
        mtu: u32,
        attach: impl FnOnce(HandOver) -> Result<Box<dyn Port>, String>,
    ) -> Result<NatPort, String> {
        let (length, rest) = handed.state.split_first_chunk().ok_or_else(ends_early)?;
        let length = u32::from_le_bytes(*length);
        let (table, mut rest) = rest.split_at_checked((length & !HAS_IPV6) as usize).ok_or_else(ends_early)?;
        let nat = Nat::take_up(config.clone(), table)?;
        let mut table6 = None;
        if length & HAS_IPV6 != 0 {
            let (length, behind) = rest.split_first_chunk().ok_or_else(ends_early)?;
            let (table, behind) =
                behind.split_at_checked(u32::from_le_bytes(*length) as usize).ok_or_else(ends_early)?;
            (table6, rest) = (Some(table), behind);
        }
        let six = match (ipv6, table6) {
            (Some(config), Some(table)) => Some(Nat::take_up(config, table)?),
            (Some(config), None) => Some(Nat::new(config)),
            (None, _) => None,
        };
        handed.state = rest.to_vec();
        let mut port = Self::new(config, attach(handed)?, mtu);
        (port.nat, port.six) = (nat, six);
        port.tell_of_ipv6();
        Ok(port)
    }

    /// The handle that names the guests that are away.
    pub fn away(&self) -> Away {
        self.away.clone()
    }

    /// Leaves a frame for the switch; whether there was room.
    fn answer(&mut self, frame: Vec<u8>) -> bool {
        let room = self.queue.len() < QUEUE_FRAMES;
        if room {
            self.queue.push_back(frame);
        }
        room
    }

    /// Writes down whether the uplink has IPv6, where that has changed.
    fn tell_of_ipv6(&self) {
        let has_ipv6 = self.six.as_ref().is_some_and(Nat::is_peer_known);
        if self.away.has_ipv6() != has_ipv6 {
            self.away.0.has_ipv6.store(has_ipv6, Ordering::Relaxed);
        }
    }

    /// The uplink is a new one: what the tables knew is forgotten.
    fn uplink_restarted(&mut self) {
        self.nat.uplink_restarted();
        if let Some(six) = &mut self.six {
            six.uplink_restarted();
        }
        self.tell_of_ipv6();
    }

    /// Leaves what the router has for the network by itself.
    fn answer_own(&mut self) {
        while let Some(frame) =
            self.nat.next_for_network().or_else(|| self.six.as_mut().and_then(Nat::next_for_network))
        {
            if !self.answer(frame) {
                self.lost.count(Reason::GatewayFull, 1);
            }
        }
    }

    /// Gives frames to the uplink's port; what it does not send is in `drops`.
    fn send_out(&mut self, frames: &[Vec<u8>], drops: &mut Drops) -> Result<Sent, Fault> {
        let (mut sent, before) = (Sent::default(), drops.total());
        for chunk in frames.chunks(CHUNK) {
            if self.uplink.link() == Carrier::Down {
                drops.count(Reason::LinkDown, chunk.len() as u64);
                continue;
            }
            let mut batch = Batch::with_capacity(chunk.len());
            for frame in chunk {
                self.repeats.sent(frame);
                batch.push(Foreign::from(&frame[..]), Offload::NONE);
            }
            let all: Vec<u16> = (0..chunk.len() as u16).collect();
            match self.uplink.transmit(&batch, &all, drops) {
                Ok(done) => {
                    let pulse = &self.away.0.pulse;
                    pulse.taken.fetch_add(done.frames, Ordering::Relaxed);
                    pulse.refused.fetch_add(chunk.len() as u64 - done.frames, Ordering::Relaxed);
                    sent.add(done);
                }
                Err(fault) => {
                    // This is the caller of `Port::transmit` here: what is neither sent nor counted
                    // is lost with the uplink.
                    let rest = (frames.len() as u64 - sent.frames).saturating_sub(drops.total() - before);
                    drops.count(Reason::Reset, rest);
                    return Err(fault);
                }
            }
        }
        Ok(sent)
    }

    /// The router's own questions for the uplink. One that is lost is asked again with a frame that
    /// needs the answer.
    fn ask_out(&mut self) -> Result<(), Fault> {
        if self.uplink.link() == Carrier::Down {
            return Ok(());
        }
        let mut own: Vec<_> = std::iter::from_fn(|| self.nat.next_for_uplink()).collect();
        if let Some(six) = &mut self.six {
            own.extend(std::iter::from_fn(|| six.next_for_uplink()));
        }
        if !own.is_empty() {
            let mut lost = Drops::default();
            let sent = self.send_out(&own, &mut lost);
            lost.drain(|reason, n| self.lost.count(reason, n));
            sent?;
            self.uplink.flush()?;
        }
        Ok(())
    }

    fn look_who_is_away(&mut self) {
        if let Some(guests) = self.away.take() {
            let four = guests.iter().filter_map(|guest| if let IpAddr::V4(ip) = guest { Some(*ip) } else { None });
            self.nat.set_away(four.collect());
            if let Some(six) = &mut self.six {
                let ips = guests.iter().filter_map(|guest| if let IpAddr::V6(ip) = guest { Some(*ip) } else { None });
                six.set_away(ips.collect());
            }
        }
    }

    /// Translates what the uplink has, up to `budget` frames, into `sending`; returns how many it
    /// took.
    fn take_in(&mut self, budget: usize, drops: &mut Drops) -> Result<usize, Fault> {
        self.look_who_is_away();
        let mut inner = Batch::with_capacity(budget);
        let result = self.uplink.receive(budget, &mut inner, drops);
        let copy = |frame| {
            let mut bytes = Vec::new();
            inner.append_to(frame, &mut bytes);
            bytes
        };
        let taken: Vec<_> = inner.frames().iter().map(copy).collect();
        drop(inner);
        let released = self.uplink.release();
        let mut back = Vec::new();
        let pulse = &self.away.0.pulse;
        pulse.frames.fetch_add(taken.len() as u64, Ordering::Relaxed);
        let (now, repeats) = (self.now, &mut self.repeats);
        let mut surplus = 0;
        let taken = taken.into_iter().filter(|frame| {
            // An ARP answer (RFC 826).
            if frame.get(12..14) == Some(&[8, 6]) && frame.get(20..22) == Some(&[0, 2]) {
                pulse.answers.fetch_add(1, Ordering::Relaxed);
            }
            let seen = repeats.see(now, frame);
            if let Some(count) = seen.storm {
                pulse.repeats.store(count, Ordering::Relaxed);
            }
            surplus += u64::from(seen.surplus);
            !seen.surplus
        });
        for mut frame in taken {
            let verdict = match &mut self.six {
                Some(six) if is_ipv6(&frame) => six.inbound(self.now, &mut frame),
                _ => self.nat.inbound(self.now, &mut frame),
            };
            match verdict {
                Verdict::Pass => self.sending.push(frame),
                Verdict::Reply => back.push(frame),
                Verdict::Taken => {}
                Verdict::Drop(reason) => drops.count(reason, 1),
            }
        }
        drops.count(Reason::UplinkRepeat, surplus);
        self.tell_of_ipv6();
        let used = result?;
        released?;
        if !back.is_empty() {
            self.send_out(&back, drops)?;
            self.uplink.flush()?;
        }
        Ok(used)
    }

    /// Whether the router has to be looked after before the worker was told to come back.
    fn is_early(&self) -> bool {
        let due = earlier(self.nat.deadline(), self.six.as_ref().and_then(Nat::deadline));
        due.is_some_and(|due| self.promised.is_none_or(|promised| due < promised))
    }
}

impl Port for NatPort {
    fn kind(&self) -> &'static str {
        "uplink"
    }

    fn link(&self) -> Carrier {
        self.uplink.link()
    }

    /// Frames as on a wire: their headers are rewritten, and the stream behind has no place for
    /// offloads.
    fn caps(&self) -> Caps {
        Caps::plain(self.mtu)
    }

    fn service(&mut self, now: Nanos) -> Result<Option<Nanos>, Fault> {
        self.now = now;
        let was = self.uplink.link();
        let next = self.uplink.service(now)?;
        self.look_who_is_away();
        if was == Carrier::Down && self.uplink.link() == Carrier::Up {
            self.uplink_restarted();
            self.repeats = Repeats::default();
        }
        let pulse = &self.away.0.pulse;
        if pulse.wanted.load(Ordering::Relaxed) && self.uplink.link() == Carrier::Up {
            pulse.wanted.store(false, Ordering::Relaxed);
            pulse.asked.fetch_add(1, Ordering::Relaxed);
            self.nat.ask_for_life();
            if let Some(six) = &mut self.six {
                six.ask_for_life();
            }
        }
        let (mut lost, mut again) = self.nat.poll(now);
        let mut displaced = self.nat.take_displaced();
        if let Some(six) = &mut self.six {
            let (more, then) = six.poll(now);
            (lost, again) = (lost + more, earlier(again, then));
            displaced += six.take_displaced();
        }
        self.lost.count(Reason::NoDestination, lost);
        self.lost.count(Reason::GatewayFull, displaced);
        self.answer_own();
        self.ask_out()?;
        self.promised = earlier(next, again);
        Ok(self.promised)
    }

    fn receive<'m>(&'m mut self, budget: usize, batch: &mut Batch<'m>, drops: &mut Drops) -> Result<usize, Fault> {
        self.lost.drain(|reason, n| drops.count(reason, n));
        self.sending.clear();
        let own = self.queue.len().min(budget);
        self.sending.extend(self.queue.drain(..own));
        let result = if own < budget { self.take_in(budget - own, drops) } else { Ok(0) };
        self.answer_own();
        // What came before a fault of the uplink is delivered.
        for frame in &self.sending {
            batch.push(Foreign::from(&frame[..]), Offload::NONE);
        }
        Ok(own + result?)
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
            let verdict = match &mut self.six {
                Some(six) if is_ipv6(&bytes) => six.outbound(self.now, batch.ingress(), &mut bytes),
                _ => self.nat.outbound(self.now, batch.ingress(), &mut bytes),
            };
            match verdict {
                Verdict::Pass => {
                    out.push(bytes);
                    continue;
                }
                Verdict::Reply if !self.answer(bytes) => {
                    drops.count(Reason::GatewayFull, 1);
                    continue;
                }
                Verdict::Reply | Verdict::Taken => {}
                Verdict::Drop(reason) => {
                    drops.count(reason, 1);
                    continue;
                }
            }
            sent.frames += 1;
            sent.bytes += len;
        }
        self.answer_own();
        // What the uplink's port loses was not sent.
        sent.add(self.send_out(&out, drops)?);
        self.ask_out()?;
        Ok(sent)
    }

    fn flush(&mut self) -> Result<(), Fault> {
        self.uplink.flush()
    }

    fn answers(&self) -> bool {
        !self.queue.is_empty() || self.is_early()
    }

    fn arm(&mut self) -> Result<bool, Fault> {
        Ok(self.uplink.arm()? || self.answers())
    }

    fn disarm(&mut self) {
        self.uplink.disarm();
    }

    fn reset(&mut self, fault: &Fault) {
        self.queue.clear();
        self.sending.clear();
        self.uplink.reset(fault);
        self.uplink_restarted();
    }

    fn hand_over(&self) -> Option<HandOver> {
        let mut handed = self.uplink.hand_over()?;
        let table = self.nat.hand_over();
        let flag = if self.six.is_some() { HAS_IPV6 } else { 0 };
        let mut state = (table.len() as u32 | flag).to_le_bytes().to_vec();
        state.extend(table);
        if let Some(six) = &self.six {
            let table = six.hand_over();
            state.extend((table.len() as u32).to_le_bytes());
            state.extend(table);
        }
        state.extend(&handed.state);
        handed.state = state;
        Some(handed)
    }

    fn details(&self) -> Details {
        let mut out = vec![("flows", self.nat.flows().into()), ("over", self.uplink.kind().into())];
        if let Some(six) = &self.six {
            out.push(("flows6", six.flows().into()));
            out.push(("ipv6", if six.is_peer_known() { "yes" } else { "the uplink has none" }.into()));
        }
        out.extend(self.uplink.details());
        out
    }
}
