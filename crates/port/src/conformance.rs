//! The suite that every attachment passes: what [`Port`] promises, checked from both sides.
//!
//! A kind of attachment gives a [`Fixture`]: a connected port, and a peer that can send and collect
//! frames, break the protocol, go and come back. [`conformance_suite!`](crate::conformance_suite)
//! then makes one `#[test]` of each check:
//!
//! ```ignore
//! mod conformance {
//!     tombolo_port::conformance_suite!(super::MyFixture);
//! }
//! ```
//!
//! The [`Rig`] plays the worker: it services, receives, releases, arms and sleeps as the switch's
//! poll loop does. Where it waits for the port it sleeps in the reactor until it is woken, so a
//! missed wake-up is a failed test and not a slow one. Random choices come from a seed that is
//! printed; `TOMBOLO_SEED` sets it.
//!
//! Skipped is not passed: a fixture that cannot run here ([`Fixture::missing`]) prints `skipped:
//! NAME: reason`, and fails where `CI` is `true`. A check that makes no sense for a kind prints
//! `not applicable: NAME: reason`.

pub mod checks;

use crate::pair::OwnedFrame;
use std::cell::RefCell;
use std::rc::Rc;
use std::time::{Duration, Instant};
use tombolo_ring::mem::Foreign;
use tombolo_switch::Nanos;
use tombolo_switch::drop::{Drops, Reason};
use tombolo_switch::frame::{Batch, Checksum, Offload, SegmentKind, Segmentation};
use tombolo_switch::port::{Carrier, Fault, FaultKind, Port};
use tombolo_switch::wait::{Token, Waiter};
use tombolo_switch::worker::SERVICE_INTERVAL;
use tombolo_testing::Random;
use tombolo_worker::reactor::{Reactor, Registration};

/// How long anything may take before a check fails.
pub const DEADLINE: Duration = Duration::from_secs(20);
/// The budget of the rig's turns.
const BUDGET: usize = 64;

/// What a kind of attachment can do, as far as checks differ.
#[derive(Clone, Copy, Debug)]
pub struct Abilities {
    /// Shortest and longest frame without segmentation that the peer can send and get.
    pub frame_bytes: (usize, usize),
    /// Offload state is carried: the peer can send it and sees it.
    pub offload: bool,
    /// The port notices that its peer does not read, and counts `no_buffer`. Otherwise what a peer
    /// does not read is lost behind the port, such as in the kernel.
    pub back_pressure: bool,
    /// Frames that may be on their way in one direction without any of them being lost.
    pub window: usize,
}

/// What the port makes of something that a peer should not do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Violation {
    /// The frame is dropped, and counted under this reason.
    Dropped(Reason),
    /// The port faults.
    Faulted(FaultKind),
    /// No peer of this kind can do that; the text says why.
    Impossible(&'static str),
}

/// A port of one kind with a peer that a test controls. Methods panic where the test's own tools
/// fail.
pub trait Fixture: Sized {
    /// The kind in the names of skipped checks.
    const KIND: &'static str;

    /// Why this kind cannot run here, if it cannot: a privilege, a device, a program.
    fn missing() -> Option<String> {
        None
    }

    /// A port, and its peer, which is connected or connects while the port is served.
    fn make(registration: Registration) -> (Box<dyn Port>, Self);

    /// What it can do.
    fn abilities(&self) -> Abilities;

    /// Whether the port is woken by nothing and looks by a timer instead. A timer that is due is a
    /// wake-up then.
    fn polled(&self) -> bool {
        false
    }

    /// The peer sends a frame; `false` where there is no room for it now.
    fn inject(&mut self, bytes: &[u8], offload: Offload) -> bool;

    /// The next frame that the peer got, if there is one now.
    fn collect(&mut self) -> Option<OwnedFrame>;

    /// The peer dies silently.
    fn disconnect(&mut self);

    /// A new peer comes in its place.
    fn connect(&mut self);

    /// The peer sends a frame of 13 bytes, and says what is to become of it.
    fn send_runt(&mut self) -> Violation;

    /// The peer sends a frame that is longer than any may be.
    fn send_over_long(&mut self) -> Violation;

    /// The peer sends a frame whose offload state does not fit it.
    fn send_bad_offload(&mut self) -> Violation;

    /// The peer breaks the protocol as badly as it can.
    fn break_protocol(&mut self) -> Violation;

    /// Whether a wake-up between port and peer can get lost: they share memory, and decide by words
    /// in it. The next three are asked only then.
    fn loses_wakeups(&self) -> bool {
        false
    }

    /// The peer sends a frame and does not wake the port.
    fn inject_silently(&mut self, _bytes: &[u8]) {
        unreachable!("this kind loses no wake-ups")
    }

    /// The peer's request for a signal at the next frame becomes visible; it does not look at the
    /// ring again.
    fn ask_for_signals(&mut self) {
        unreachable!("this kind loses no wake-ups")
    }

    /// Whether the peer was signalled since the last call.
    fn was_signalled(&mut self) -> bool {
        unreachable!("this kind loses no wake-ups")
    }

    /// The peer spoils what it gives the port for frames, so that [`Port::transmit`] of 64 frames
    /// comes on a fault after some of them.
    fn spoil_transmit(&mut self) -> Violation {
        Violation::Impossible("the peer gives the port nothing that could spoil a transmit")
    }
}

/// A frame of `len` bytes that carries `number` in its source address, and bytes that follow from
/// it. The type is one for local experiments, so a kernel takes no notice of it.
pub fn frame(number: u32, len: usize) -> Vec<u8> {
    let [a, b, c, d] = number.to_be_bytes();
    let mut bytes = vec![0x02, 0x54, 0x4d, 0, 0, 1, 0x06, a, b, c, d, 0x42, 0x88, 0xb5];
    let mut random = Random(number.into());
    while bytes.len() < len {
        bytes.extend_from_slice(&random.next_u64().to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// A frame of `len` bytes whose transport checksum field holds the pseudo-header's sum only,
/// numbered as [`frame`]: TCP over IPv4 or IPv6, or UDP over IPv4. If it represents several
/// segments, `segment` is their size in bytes.
pub fn partial_frame(number: u32, len: usize, kind: SegmentKind, segment: Option<u16>) -> OwnedFrame {
    let mut bytes = frame(number, len);
    let (ip_bytes, ethertype) = match kind {
        SegmentKind::Tcp4 | SegmentKind::Udp => (20, [0x08, 0x00]),
        SegmentKind::Tcp6 => (40, [0x86, 0xdd]),
    };
    let (protocol, header_bytes, offset) = if kind == SegmentKind::Udp { (17, 8, 6) } else { (6, 20, 16) };
    bytes[12..14].copy_from_slice(&ethertype);
    let transport_bytes = (len - 14 - ip_bytes) as u16;
    let ip = &mut bytes[14..14 + ip_bytes];
    ip.fill(0);
    if ip_bytes == 20 {
        ip[0] = 0x45;
        ip[2..4].copy_from_slice(&((ip_bytes as u16) + transport_bytes).to_be_bytes());
        (ip[8], ip[9]) = (64, protocol);
        ip[12..20].copy_from_slice(&[10, 77, 0, 1, 10, 77, 0, 2]);
        let sum = fold(words(ip));
        ip[10..12].copy_from_slice(&(!sum).to_be_bytes());
    } else {
        ip[0] = 0x60;
        ip[4..6].copy_from_slice(&transport_bytes.to_be_bytes());
        (ip[6], ip[7]) = (protocol, 64);
        (ip[8], ip[23], ip[24], ip[39]) = (0xfd, 1, 0xfd, 2);
    }
    let addresses = if ip_bytes == 20 { 12..20 } else { 8..40 };
    let pseudo = fold(words(&bytes[14..][addresses]) + u32::from(protocol) + u32::from(transport_bytes));
    let header = &mut bytes[14 + ip_bytes..][..header_bytes];
    header.fill(0);
    header[..4].copy_from_slice(&[0x30, 0x39, 0x00, 0x50]);
    if kind == SegmentKind::Udp {
        header[4..6].copy_from_slice(&transport_bytes.to_be_bytes());
    } else {
        (header[12], header[13]) = (0x50, 0x10);
    }
    header[offset..offset + 2].copy_from_slice(&pseudo.to_be_bytes());
    let start = (14 + ip_bytes) as u16;
    let checksum = Checksum::Partial { start, offset: offset as u16 };
    let header_bytes = start + header_bytes as u16;
    let segmentation = segment.map(|size| Segmentation { kind, ecn: false, size, header_bytes });
    OwnedFrame { bytes, offload: Offload { checksum, segmentation } }
}

fn words(bytes: &[u8]) -> u32 {
    bytes.chunks(2).map(|w| u32::from(w[0]) << 8 | u32::from(*w.get(1).unwrap_or(&0))).sum()
}

fn fold(sum: u32) -> u16 {
    let sum = (sum & 0xffff) + (sum >> 16);
    (sum + (sum >> 16)) as u16
}

/// The number of a frame that [`frame`] or [`partial_frame`] made; `None` for a stranger's.
pub fn number(bytes: &[u8]) -> Option<u32> {
    match bytes {
        [_, _, _, _, _, _, 0x06, a, b, c, d, 0x42, _, _, ..] => Some(u32::from_be_bytes([*a, *b, *c, *d])),
        _ => None,
    }
}

/// A worker with one port, and the port's peer.
pub struct Rig<F> {
    /// The attachment under test.
    pub port: Box<dyn Port>,
    /// The other end of that attachment, driven by the test.
    pub peer: F,
    /// Frames received from the peer, strangers' frames left out.
    pub received: Vec<OwnedFrame>,
    /// What was dropped on the way from the peer.
    pub rx_drops: Drops,
    /// What was dropped on the way to it.
    pub tx_drops: Drops,
    /// Faults that the port had; it was reset after each.
    pub faults: Vec<Fault>,
    /// The link as a worker knows it: as it was after the last service.
    pub seen: Option<Carrier>,
    /// Times that the reactor woke this port.
    pub wakeups: usize,
    reactor: Rc<RefCell<Reactor>>,
    token: Token,
    timer: Option<Nanos>,
    woken: bool,
    serviced_at: Nanos,
    cuts: Random,
}

impl<F: Fixture> Rig<F> {
    /// A rig whose link is up.
    pub fn up() -> Rig<F> {
        let reactor = Rc::new(RefCell::new(Reactor::new().unwrap()));
        Self::up_in(&reactor, Token(1))
    }

    /// A rig with its port in `reactor`.
    pub fn up_in(reactor: &Rc<RefCell<Reactor>>, token: Token) -> Rig<F> {
        let registration = reactor.borrow().registrar().registration(token);
        let (port, peer) = F::make(registration);
        let mut rig = Rig {
            port,
            peer,
            received: Vec::new(),
            rx_drops: Drops::default(),
            tx_drops: Drops::default(),
            faults: Vec::new(),
            seen: None,
            wakeups: 0,
            reactor: reactor.clone(),
            token,
            timer: None,
            woken: true,
            serviced_at: Nanos(0),
            cuts: Random(u64::from(token.0)),
        };
        rig.until("the link comes up", |rig| rig.seen == Some(Carrier::Up));
        rig
    }

    /// The registration of the rig's port, for another port in its place.
    pub fn port_registration(&self) -> Registration {
        self.reactor.borrow().registrar().registration(self.token)
    }

    fn now(&self) -> Nanos {
        self.reactor.borrow_mut().now()
    }

    fn note<T>(&mut self, result: Result<T, Fault>) -> Option<T> {
        result.map_err(|fault| self.fault(fault)).ok()
    }

    fn fault(&mut self, fault: Fault) {
        println!("fault: {}: {}", fault.kind.name(), fault.detail);
        assert!(!fault.detail.is_empty(), "a fault says what was expected and found");
        self.port.reset(&fault);
        self.seen = Some(self.port.link());
        self.faults.push(fault);
    }

    /// Calls [`Port::service`] as a worker does.
    pub fn service(&mut self) {
        let now = self.now();
        self.serviced_at = now;
        let result = self.port.service(now);
        self.timer = self.note(result).flatten();
        self.seen = Some(self.port.link());
    }

    /// Receives once with `budget` and does not release; returns how much of it was used.
    pub fn receive(&mut self, budget: usize) -> usize {
        let mut batch = Batch::with_capacity(budget);
        let before = self.rx_drops.total();
        let result = self.port.receive(budget, &mut batch, &mut self.rx_drops);
        for frame in batch.frames() {
            if number(frame.head()).is_some() {
                let mut bytes = Vec::new();
                batch.append_to(frame, &mut bytes);
                self.received.push(OwnedFrame { bytes, offload: frame.offload });
            }
        }
        let frames = batch.len();
        drop(batch);
        match result {
            Ok(used) => {
                assert!(used <= budget, "{used} of a budget of {budget}");
                let seen = frames + (self.rx_drops.total() - before) as usize;
                assert!(seen <= used.max(frames), "{seen} frames came or were dropped, {used} are said to");
                assert!(frames <= budget, "{frames} frames for a budget of {budget}");
                used
            }
            Err(fault) => {
                self.fault(fault);
                frames
            }
        }
    }

    /// Calls [`Port::release`].
    pub fn release(&mut self) {
        let result = self.port.release();
        self.note(result);
    }

    /// Calls [`Port::arm`]; a fault counts as work.
    pub fn arm(&mut self) -> bool {
        let result = self.port.arm();
        self.note(result).unwrap_or(true)
    }

    /// One turn: receive with `budget`, release; returns how much of it was used. As a worker does,
    /// it services the port before that only where it was woken, its timer is due, or it was not
    /// serviced for a while.
    pub fn turn(&mut self, budget: usize) -> usize {
        self.sleep(Duration::ZERO);
        let now = self.now();
        let overdue = now.since(self.serviced_at) >= SERVICE_INTERVAL || self.timer.is_some_and(|at| at <= now);
        if std::mem::take(&mut self.woken) || overdue {
            self.service();
        }
        self.port.disarm();
        let used = self.receive(budget);
        self.release();
        used
    }

    /// Sleeps until the port is woken or `timeout` has passed; `true` where it was woken.
    pub fn sleep(&mut self, timeout: Duration) -> bool {
        let due = self.timer.filter(|_| self.peer.polled()).map(|at| Duration::from_nanos(at.since(self.now()).0));
        match due {
            Some(due) if due <= timeout && !timeout.is_zero() => {
                self.woken |= true;
                self.wakeups += 1;
                self.wait(due);
                true
            }
            _ => self.wait(timeout),
        }
    }

    /// Sleeps as a worker does with nothing else to do: until the port is woken or its timer is
    /// due, at most [`DEADLINE`]; whether one of the two came. No frame is received before that, so
    /// what the next turn finds would have been found by a worker.
    pub fn sleeps_and_looks(&mut self) -> bool {
        let end = self.now().after(Nanos(DEADLINE.as_nanos() as u64));
        loop {
            let now = self.now();
            if now >= end {
                return false;
            }
            let until = self.timer.unwrap_or(end).min(end);
            if self.wait(Duration::from_nanos(until.since(now).0)) || self.timer.is_some_and(|at| at <= self.now()) {
                return true;
            }
        }
    }

    /// As [`Rig::sleep`], without its timer.
    fn wait(&mut self, timeout: Duration) -> bool {
        let mut ready = Vec::new();
        self.reactor.borrow_mut().wait(Some(Nanos(timeout.as_nanos() as u64)), &mut ready);
        let woken = ready.contains(&self.token);
        self.woken |= woken;
        self.wakeups += usize::from(woken);
        woken
    }

    /// Works as a poll loop does until `done`, sleeping at most `tick` at a time.
    fn work(&mut self, what: &str, tick: Duration, mut done: impl FnMut(&mut Self) -> bool) {
        let end = Instant::now() + DEADLINE;
        loop {
            let used = self.turn(BUDGET);
            // First the time, then the question: what is found only because the sleep ended was not
            // woken for.
            let left = end.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "{}: not within {DEADLINE:?}: {what}; {:?}", F::KIND, self.port.details());
            if done(self) {
                return;
            }
            if used < BUDGET && !self.arm() {
                let now = self.now();
                let timer = self.timer.map_or(left, |at| Duration::from_nanos(at.since(now).0));
                self.sleep(left.min(timer).min(tick));
            }
        }
    }

    /// Works until `done`, which is asked every few milliseconds at least: for what the peer sees.
    pub fn until(&mut self, what: &str, done: impl FnMut(&mut Self) -> bool) {
        self.work(what, Duration::from_millis(2), done);
    }

    /// Works until `done`, asleep until the port is woken: for what the port is told.
    pub fn until_woken(&mut self, what: &str, done: impl FnMut(&mut Self) -> bool) {
        self.work(what, DEADLINE, done);
    }

    /// Works until everything that came so far is received and the port may sleep.
    pub fn settle(&mut self) {
        let end = Instant::now() + DEADLINE;
        while self.turn(BUDGET) == BUDGET || self.arm() || self.wait(Duration::from_millis(5)) {
            assert!(Instant::now() < end, "{}: the port does not come to rest", F::KIND);
        }
    }

    /// Has the peer send `frames`, no more at a time than its window, and receives them all.
    pub fn receive_all(&mut self, frames: &[OwnedFrame]) {
        let window = self.peer.abilities().window;
        let mut wanted = self.received.len();
        for part in frames.chunks(window) {
            for frame in part {
                let end = Instant::now() + DEADLINE;
                while !self.peer.inject(&frame.bytes, frame.offload) {
                    self.turn(BUDGET);
                    assert!(Instant::now() < end, "{}: the peer gets no room to send", F::KIND);
                }
            }
            wanted += part.len();
            self.until_woken("the port receives what the peer sent", |rig| rig.received.len() >= wanted);
        }
        assert_eq!(self.received.len(), wanted);
    }

    /// Transmits `frames` in one turn, cut into pieces at random; returns how many the port took,
    /// and checks that the others were counted and that nothing took long.
    pub fn send(&mut self, frames: &[OwnedFrame]) -> usize {
        let taken = self.transmit(frames);
        let result = self.port.flush();
        self.note(result);
        taken
    }

    /// As [`Rig::send`], without the flush.
    pub fn transmit(&mut self, frames: &[OwnedFrame]) -> usize {
        let mut batch = Batch::with_capacity(frames.len());
        for frame in frames {
            let cut = self.cuts.within(0, frame.bytes.len());
            let (a, b) = frame.bytes.split_at(cut);
            match self.cuts.within(0, 1) {
                0 => batch.push(Foreign::from(&frame.bytes[..]), frame.offload),
                _ => batch.push_pieces([Foreign::from(a), Foreign::from(b)], frame.offload),
            }
        }
        let which: Vec<u16> = (0..frames.len() as u16).collect();
        let (before, resets_before) = (self.tx_drops.total(), self.tx_drops.of(Reason::Reset));
        let start = Instant::now();
        let result = self.port.transmit(&batch, &which, &mut self.tx_drops);
        assert!(start.elapsed() < Duration::from_secs(5), "transmit blocked for {:?}", start.elapsed());
        drop(batch);
        let dropped = (self.tx_drops.total() - before) as usize;
        let taken = frames.len().checked_sub(dropped).expect("no more frames are dropped than were there");
        match result {
            Ok(sent) => {
                assert_eq!(sent.frames as usize, taken, "what is not taken is counted as dropped");
                taken
            }
            Err(fault) => {
                // As a worker does: what is not counted yet went down with the port.
                let (reset, uncounted) = (self.tx_drops.of(Reason::Reset), taken as u64);
                assert_eq!(reset, resets_before, "a port leaves it to its caller to count what a fault took");
                self.tx_drops.count(Reason::Reset, uncounted);
                self.fault(fault);
                0
            }
        }
    }

    /// Collects `count` frames from the peer while the port is served; strangers' frames are left
    /// out.
    pub fn collect(&mut self, count: usize) -> Vec<OwnedFrame> {
        let mut got = Vec::new();
        self.until("the peer gets what the port took", |rig| {
            rig.drain(&mut got);
            got.len() >= count
        });
        assert_eq!(got.len(), count);
        got
    }

    /// Takes all that the peer has got by now.
    pub fn drain(&mut self, into: &mut Vec<OwnedFrame>) {
        while let Some(frame) = self.peer.collect() {
            if number(&frame.bytes).is_some() {
                into.push(frame);
            }
        }
    }

    /// Transmits `frames`, no more at a time than the window, and checks that the peer gets each as
    /// it was.
    pub fn deliver(&mut self, frames: &[OwnedFrame]) {
        let window = self.peer.abilities().window;
        for part in frames.chunks(window) {
            let taken = self.send(part);
            assert_eq!(taken, part.len(), "dropped: {:?}", self.tx_drops);
            let got = self.collect(part.len());
            same(part, &got);
        }
    }
}

/// Checks that two lists of frames are the same, and shows the first difference in a few words.
pub fn same(wanted: &[OwnedFrame], got: &[OwnedFrame]) {
    for (i, (w, g)) in wanted.iter().zip(got).enumerate() {
        assert_eq!((number(&w.bytes), w.bytes.len()), (number(&g.bytes), g.bytes.len()), "frame {i}: number, length");
        assert!(w.bytes == g.bytes, "frame {i}: its {} bytes differ", w.bytes.len());
        assert!(alike(w.offload, g.offload), "frame {i}: offload {:?} became {:?}", w.offload, g.offload);
    }
    assert_eq!(wanted.len(), got.len(), "number of frames");
}

/// Whether two states say the same. Valid and unverified are the same bytes, and whether somebody
/// vouched for them may change on the way; the length of the headers is a hint, for which a kernel
/// tells what lies in one piece.
fn alike(a: Offload, b: Offload) -> bool {
    let essence = |o: Offload| {
        let checksum = if o.checksum == Checksum::Valid { Checksum::Unverified } else { o.checksum };
        (checksum, o.segmentation.map(|s| Segmentation { header_bytes: 0, ..s }))
    };
    essence(a) == essence(b)
}

/// Frames without offload state, from number `first` on, of the lengths given.
pub fn plain(first: u32, lengths: impl IntoIterator<Item = usize>) -> Vec<OwnedFrame> {
    let numbered = (first..).zip(lengths);
    numbered.map(|(n, len)| OwnedFrame { bytes: frame(n, len), offload: Offload::NONE }).collect()
}

/// Runs a check, or says why not.
pub fn run<F: Fixture>(name: &str, check: impl FnOnce(&str)) {
    match F::missing() {
        None => check(name),
        Some(reason) => {
            tombolo_testing::skip(format!("{}: {name}: {reason}", F::KIND));
        }
    }
}

/// Runs `body` in a process of its own that runs only the test `name`: for what is counted per
/// process.
pub fn isolated(name: &str, body: impl FnOnce()) {
    const KEY: &str = "TOMBOLO_ISOLATED_TEST";
    if std::env::var(KEY).is_ok_and(|n| n == name) {
        return body();
    }
    // The harness knows a test by its path without the crate.
    let (_, path) = name.split_once("::").expect("a test's name has a module path");
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command.args([path, "--exact", "--nocapture", "--test-threads=1"]).env(KEY, name);
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let passed = output.status.success() && text.contains("1 passed");
    assert!(passed, "{path} in its own process:\n{text}\n{}", String::from_utf8_lossy(&output.stderr));
}

/// Makes a `#[test]` of each check for a [`Fixture`]; see [`checks`] for what they are.
#[macro_export]
macro_rules! conformance_suite {
    ($fixture:ty) => {
        $crate::conformance_suite! { @each $fixture:
            frames_arrive_intact_at_every_size
            frames_leave_intact_at_every_size
            order_is_kept_both_ways
            the_budget_is_obeyed
            buffers_come_back_after_release
            flush_publishes_without_another_call
            a_runt_is_counted_and_the_next_frame_arrives
            an_over_long_frame_does_no_harm
            a_frame_beyond_the_mtu_is_not_transmitted
            a_frame_with_lying_offload_is_counted
            a_peer_that_does_not_read_costs_only_its_own_frames
            a_frame_between_receive_and_arm_is_seen
            a_frame_after_arm_wakes
            a_lost_wake_up_is_found_by_one_more_look
            a_request_that_was_missed_is_found_by_one_more_look
            an_idle_port_sleeps
            a_partial_checksum_is_carried
            segmentation_is_carried
            the_link_follows_the_peer
            a_dead_peer_is_replaced
            a_broken_protocol_costs_only_that_port
            a_reset_in_the_midst_of_traffic_recovers
            a_fault_of_transmit_counts_each_frame_once
            sizes_mixed_at_random_both_ways
            no_descriptor_leaks_over_a_hundred_peers
            it_describes_itself
        }
    };
    (@each $fixture:ty: $($check:ident)+) => {
        $(
            #[test]
            fn $check() {
                let name = concat!(module_path!(), "::", stringify!($check));
                $crate::conformance::run::<$fixture>(name, $crate::conformance::checks::$check::<$fixture>);
            }
        )+
    };
}
