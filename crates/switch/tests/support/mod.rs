//! A worker under a virtual clock, and ports whose peers are the test. Time moves only when the
//! worker sleeps or the test says so. Nothing here waits in real time.
#![allow(dead_code, missing_docs, unreachable_pub)] // each test file uses its own part

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};
use tombolo_ring::checksum;
use tombolo_ring::mem::{Foreign, ForeignMut};
use tombolo_switch::Nanos;
use tombolo_switch::control::{NetworkId, PortSettings, WorkerHandle, WorkerSettings};
use tombolo_switch::counters::PortCounters;
use tombolo_switch::drop::{Drops, Reason};
use tombolo_switch::frame::{Batch, Checksum, Frame, Mac, Offload, SegmentKind, Segmentation};
use tombolo_switch::limit::Storm;
use tombolo_switch::mac::MacSettings;
use tombolo_switch::port::{Caps, Carrier, Fault, FaultKind, Port, Rechecked, Sent};
use tombolo_switch::wait::{CONTROL, Token, Waiter};
use tombolo_switch::worker::{Restart, Worker};

#[derive(Default)]
pub struct Clock {
    pub now: Nanos,
    pub ready: Vec<Token>,
    /// Sleeps that would have lasted for ever.
    pub endless_sleeps: u64,
    /// Sleeps with a timeout that ran out.
    pub timeouts: u64,
    /// Questions without sleeping.
    pub polls: u64,
}

#[derive(Clone, Default)]
pub struct TestWaiter(pub Arc<Mutex<Clock>>);

impl TestWaiter {
    pub fn lock(&self) -> MutexGuard<'_, Clock> {
        self.0.lock().unwrap()
    }

    pub fn wake(&self, token: Token) {
        self.lock().ready.push(token);
    }

    /// Timeouts and polls so far.
    pub fn quiet(&self) -> (u64, u64) {
        let clock = self.lock();
        (clock.timeouts, clock.polls)
    }

    pub fn advance(&self, by: Nanos) {
        let mut clock = self.lock();
        clock.now = clock.now.after(by);
    }
}

impl Waiter for TestWaiter {
    fn wait(&mut self, timeout: Option<Nanos>, ready: &mut Vec<Token>) {
        let mut clock = self.lock();
        if !clock.ready.is_empty() {
            ready.append(&mut clock.ready);
            return;
        }
        match timeout {
            None => clock.endless_sleeps += 1,
            Some(Nanos(0)) => clock.polls += 1,
            Some(span) => {
                clock.now = clock.now.after(span);
                clock.timeouts += 1;
            }
        }
    }

    fn now(&mut self) -> Nanos {
        self.lock().now
    }
}

/// Where a port misbehaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum At {
    Service,
    Receive,
    Release,
    Transmit,
    Flush,
    Arm,
    Recheck,
    Disarm,
    Reset,
    Details,
    Restart,
}

#[derive(Clone, Debug)]
pub struct Delivered {
    pub bytes: Vec<u8>,
    pub offload: Offload,
}

pub struct PeerState {
    pub to_switch: VecDeque<(Vec<u8>, Offload)>,
    pub from_switch: Vec<Delivered>,
    /// Room for frames from the switch; more are dropped because there is no buffer.
    pub room: usize,
    /// Frames without room are refused, so that they wait for some.
    pub refuses: bool,
    /// It says that segments of one stream are worth looking for.
    pub may_merge: bool,
    /// Rings that it spreads frames over, by the last byte of their senders' addresses; zero is
    /// one.
    pub rings: u8,
    /// One of them is full: its frames are refused.
    pub full_ring: Option<u8>,
    pub armed: bool,
    pub link: Carrier,
    pub caps: Caps,
    pub fault: Option<At>,
    pub panic: Option<At>,
    pub panic_once: Option<At>,
    /// Comes in after the last look and before wake-ups are on: the window that `arm` closes.
    pub in_the_window: Option<Vec<u8>>,
    /// The next deadline that `service` returns.
    pub deadline: Option<Nanos>,
    /// Answers each frame that it gets within `transmit`, as the gateway does.
    pub echoes: bool,
    /// Frames that the next `transmit` takes without accounting for them.
    pub forgets: usize,
    pub services: u64,
    pub resets: u64,
    pub flushes: u64,
    pub unflushed: usize,
    /// Wants one more look after each sleep and each unsent signal, as a port whose peer shares
    /// memory.
    pub rechecks: bool,
    pub wants_recheck: bool,
    /// Rechecks that the worker made.
    pub looks: u64,
}

/// The test's end of a port.
#[derive(Clone)]
pub struct Peer {
    pub state: Arc<Mutex<PeerState>>,
    waiter: TestWaiter,
    pub token: Token,
    pub counters: Arc<PortCounters>,
}

impl Peer {
    pub fn lock(&self) -> MutexGuard<'_, PeerState> {
        self.state.lock().unwrap()
    }

    pub fn send(&self, bytes: Vec<u8>) {
        self.send_with(bytes, Offload::NONE);
    }

    pub fn send_with(&self, bytes: Vec<u8>, offload: Offload) {
        let mut state = self.lock();
        state.to_switch.push_back((bytes, offload));
        if std::mem::take(&mut state.armed) {
            self.waiter.wake(self.token);
        }
    }

    /// Sends a frame whose wake-up gets lost.
    pub fn send_silently(&self, bytes: Vec<u8>) {
        self.lock().to_switch.push_back((bytes, Offload::NONE));
    }

    pub fn wake(&self) {
        self.waiter.wake(self.token);
    }

    pub fn take(&self) -> Vec<Delivered> {
        std::mem::take(&mut self.lock().from_switch)
    }

    pub fn take_bytes(&self) -> Vec<Vec<u8>> {
        self.take().into_iter().map(|d| d.bytes).collect()
    }

    pub fn tx_drops(&self, reason: Reason) -> u64 {
        self.counters.tx_drops[reason as usize].get()
    }

    pub fn rx_drops(&self, reason: Reason) -> u64 {
        self.counters.rx_drops[reason as usize].get()
    }
}

/// The switch's end.
pub struct TestPort {
    state: Arc<Mutex<PeerState>>,
    held: Vec<(Vec<u8>, Offload)>,
}

impl TestPort {
    fn step(&self, at: At) -> Result<MutexGuard<'_, PeerState>, Fault> {
        let mut state = self.state.lock().unwrap();
        if state.panic == Some(at) || state.panic_once == Some(at) {
            state.panic_once = None;
            drop(state);
            panic!("injected in {at:?}");
        }
        if state.fault == Some(at) {
            state.fault = None;
            return Err(Fault { kind: FaultKind::Ring, detail: format!("injected in {at:?}") });
        }
        Ok(state)
    }
}

fn ring_of(state: &PeerState, frame: &Frame) -> u8 {
    frame.head()[11] % state.rings.max(1)
}

impl Port for TestPort {
    fn kind(&self) -> &'static str {
        "test"
    }

    fn link(&self) -> Carrier {
        self.state.lock().unwrap().link
    }

    fn caps(&self) -> Caps {
        self.state.lock().unwrap().caps
    }

    fn service(&mut self, _: Nanos) -> Result<Option<Nanos>, Fault> {
        let mut state = self.step(At::Service)?;
        state.services += 1;
        Ok(state.deadline)
    }

    fn receive<'m>(&'m mut self, budget: usize, batch: &mut Batch<'m>, drops: &mut Drops) -> Result<usize, Fault> {
        let mut state = self.step(At::Receive)?;
        let n = budget.min(state.to_switch.len());
        if state.may_merge {
            batch.set_may_merge();
        }
        let taken: Vec<_> = state.to_switch.drain(..n).collect();
        drop(state);
        self.held = taken;
        for (bytes, offload) in &self.held {
            if bytes.is_empty() {
                drops.count(Reason::Runt, 1);
            } else {
                batch.push(Foreign::from(&bytes[..]), *offload);
            }
        }
        Ok(n)
    }

    fn release(&mut self) -> Result<(), Fault> {
        self.held.clear();
        self.step(At::Release).map(drop)
    }

    fn transmit(&mut self, batch: &Batch<'_>, which: &[u16], drops: &mut Drops) -> Result<Sent, Fault> {
        let mut state = self.step(At::Transmit)?;
        let mut sent = Sent::default();
        for (at, index) in which.iter().enumerate() {
            let frame = &batch.frames()[*index as usize];
            if state.forgets > 0 {
                state.forgets -= 1;
                continue;
            }
            if state.link == Carrier::Down {
                drops.count(Reason::LinkDown, 1);
                continue;
            }
            if state.full_ring == Some(ring_of(&state, frame)) {
                drops.refuse(&[*index]);
                continue;
            }
            if state.from_switch.len() >= state.room && state.refuses {
                drops.refuse(&which[at..]);
                break;
            }
            if state.from_switch.len() >= state.room {
                drops.count(Reason::NoBuffer, 1);
                continue;
            }
            let mut bytes = vec![0; frame.len()];
            assert_eq!(batch.copy(frame, ForeignMut::from(&mut bytes[..])), frame.len());
            sent.frames += 1;
            sent.bytes += bytes.len() as u64;
            if state.echoes {
                let mut answer = bytes.clone();
                answer[..6].copy_from_slice(&bytes[6..12]);
                answer[6..12].copy_from_slice(&[2, 0xee, 0, 0, 0, 0xee]);
                state.to_switch.push_back((answer, Offload::NONE));
            }
            state.from_switch.push(Delivered { bytes, offload: frame.offload });
            state.unflushed += 1;
        }
        Ok(sent)
    }

    fn ring_of(&self, frame: &Frame) -> u8 {
        ring_of(&self.state.lock().unwrap(), frame)
    }

    fn flush(&mut self) -> Result<(), Fault> {
        let mut state = self.step(At::Flush)?;
        state.flushes += 1;
        state.wants_recheck |= state.rechecks;
        state.unflushed = 0;
        Ok(())
    }

    fn answers(&self) -> bool {
        let state = self.state.lock().unwrap();
        state.echoes && !state.to_switch.is_empty()
    }

    fn arm(&mut self) -> Result<bool, Fault> {
        let mut state = self.step(At::Arm)?;
        if let Some(bytes) = state.in_the_window.take() {
            // Wake-ups are off, so this wakes no port.
            state.to_switch.push_back((bytes, Offload::NONE));
        }
        state.armed = true;
        state.wants_recheck |= state.rechecks;
        Ok(!state.to_switch.is_empty())
    }

    fn take_recheck(&mut self) -> bool {
        std::mem::take(&mut self.state.lock().unwrap().wants_recheck)
    }

    fn recheck(&mut self) -> Result<Rechecked, Fault> {
        let mut state = self.step(At::Recheck)?;
        state.looks += 1;
        Ok(Rechecked { work: !state.to_switch.is_empty(), signalled: false })
    }

    fn disarm(&mut self) {
        if let Ok(mut state) = self.step(At::Disarm) {
            state.armed = false;
        }
    }

    fn reset(&mut self, _: &Fault) {
        if let Ok(mut state) = self.step(At::Reset) {
            state.resets += 1;
        }
    }

    fn details(&self) -> tombolo_switch::detail::Details {
        let state = self.step(At::Details).unwrap();
        vec![("room", state.room.into())]
    }
}

pub struct Bench {
    pub worker: Worker,
    pub handle: WorkerHandle,
    pub waiter: TestWaiter,
}

impl Bench {
    pub fn new(settings: WorkerSettings) -> Bench {
        let waiter = TestWaiter::default();
        let waker = waiter.clone();
        let (worker, handle) = Worker::new(settings, 1, move || waker.wake(CONTROL));
        Bench { worker, handle, waiter }
    }

    /// Has another thread ask the worker while this one lets it run.
    pub fn ask<T: Send>(&mut self, question: impl FnOnce(&WorkerHandle) -> T + Send) -> T {
        let handle = self.handle.clone();
        std::thread::scope(|scope| {
            let asking = scope.spawn(move || question(&handle));
            while !asking.is_finished() {
                // Only for its commands: a thread that starts late changes no count of turns.
                if self.waiter.lock().ready.contains(&CONTROL) {
                    self.worker.step(&mut self.waiter);
                }
                std::thread::yield_now();
            }
            asking.join().unwrap()
        })
    }

    pub fn network(&mut self, macs: MacSettings) -> NetworkId {
        self.ask(|handle| handle.add_network("net", macs)).unwrap()
    }

    pub fn port(&mut self, network: NetworkId, settings: PortSettings) -> Peer {
        self.add(network, settings, false)
    }

    /// A port that is restarted after a panic; its state is in its peer, and outlives it.
    pub fn lasting_port(&mut self, network: NetworkId, settings: PortSettings) -> Peer {
        self.add(network, settings, true)
    }

    fn add(&mut self, network: NetworkId, settings: PortSettings, lasting: bool) -> Peer {
        let state = PeerState {
            to_switch: VecDeque::new(),
            from_switch: Vec::new(),
            room: usize::MAX,
            refuses: false,
            may_merge: false,
            rings: 0,
            full_ring: None,
            armed: false,
            link: Carrier::Up,
            caps: Caps::full(1500),
            fault: None,
            panic: None,
            panic_once: None,
            in_the_window: None,
            deadline: None,
            echoes: false,
            forgets: 0,
            services: 0,
            resets: 0,
            flushes: 0,
            unflushed: 0,
            rechecks: false,
            wants_recheck: false,
            looks: 0,
        };
        let state = Arc::new(Mutex::new(state));
        let reserved = self.handle.reserve().unwrap();
        let token = reserved.token();
        let port = Box::new(TestPort { state: state.clone(), held: Vec::new() });
        let again = state.clone();
        let restart: Restart = Box::new(move |_| {
            if again.lock().unwrap().panic == Some(At::Restart) {
                panic!("injected in Restart");
            }
            Ok(Box::new(TestPort { state: again.clone(), held: Vec::new() }))
        });
        let name = format!("port{}", token.0);
        let add = |handle: &WorkerHandle| match lasting {
            true => handle.add_lasting_port(reserved, network, &name, port, restart, settings),
            false => handle.add_port(reserved, network, &name, port, settings),
        };
        let counters = self.ask(add).unwrap();
        let peer = Peer { state, waiter: self.waiter.clone(), token, counters };
        self.settle();
        peer
    }

    /// Ports without storm control.
    pub fn ports<const N: usize>(&mut self, network: NetworkId) -> [Peer; N] {
        std::array::from_fn(|_| self.port(network, PortSettings { storm: Storm::OFF, ..PortSettings::default() }))
    }

    /// Runs until the worker would sleep for ever. Panics where it never does.
    pub fn settle(&mut self) {
        let before = self.waiter.lock().endless_sleeps;
        for _ in 0..100_000 {
            self.worker.step(&mut self.waiter);
            if self.waiter.lock().endless_sleeps > before {
                return;
            }
        }
        panic!("the worker never came to rest");
    }
}

pub fn mac(n: u64) -> Mac {
    let [a, b, c, d, ..] = n.to_le_bytes();
    [2, 0, d, c, b, a]
}

pub const BROADCAST: Mac = [0xff; 6];

/// A frame of `len` bytes whose payload tells it from others.
pub fn frame(to: Mac, from: Mac, len: usize, tag: u32) -> Vec<u8> {
    let mut bytes = [&to[..], &from, &[0x88, 0xb5], &tag.to_be_bytes()].concat();
    bytes.resize(len.max(bytes.len()), tag as u8);
    bytes
}

/// A TCP packet of `payload` bytes that is to be cut into segments of `size`, with the offload
/// state of a guest's driver.
pub fn large(to: [u8; 6], from: [u8; 6], payload: usize, size: u16) -> (Vec<u8>, Offload) {
    let mut f = [&to[..], &from, &[8, 0, 0x45, 0]].concat();
    f.extend_from_slice(&((40 + payload) as u16).to_be_bytes());
    f.extend_from_slice(&[0, 1, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    f.extend_from_slice(&[0, 7, 0, 9, 0, 0, 0, 1, 0, 0, 0, 2, 0x50, 0x18, 1, 0, 0, 0, 0, 0]);
    f.resize(54 + payload, 7);
    let cut = Segmentation { kind: SegmentKind::Tcp4, ecn: false, size, header_bytes: 54 };
    (f, Offload { checksum: Checksum::Partial { start: 34, offset: 16 }, segmentation: Some(cut) })
}

/// The frames that [`large`] is cut into, without PSH: `count` segments of `size` bytes.
pub fn segments(to: [u8; 6], from: [u8; 6], count: usize, size: u16) -> Vec<Vec<u8>> {
    let segment = |n: usize| {
        let (mut bytes, _) = large(to, from, size.into(), size);
        bytes[19] += n as u8;
        bytes[38..42].copy_from_slice(&(1 + n as u32 * u32::from(size)).to_be_bytes());
        bytes[47] = 0x10;
        let sum = !checksum::sum(&bytes[14..34]);
        bytes[24..26].copy_from_slice(&sum.to_be_bytes());
        let pseudo = checksum::add(checksum::add(checksum::sum(&bytes[26..34]), 6), 20 + size);
        let sum = !checksum::add(pseudo, checksum::sum(&bytes[34..]));
        bytes[50..52].copy_from_slice(&sum.to_be_bytes());
        bytes
    };
    (0..count).map(segment).collect()
}
