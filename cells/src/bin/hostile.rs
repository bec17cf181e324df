//! A Xen network frontend that breaks every rule on purpose, for tests of backends. It is built by `./x xen` only, with the
//! feature `hostile`, and needs `net=none`.
//!
//! | word | meaning |
//! | --- | --- |
//! | `attacks=NAME,…` | these attacks one after the other, each over a connection of its own; all, where the word is missing |
//! | `die=STATE` | leaves the domain in this state of the handshake: `initialising`, `published`, `connecting`, `connected`, `traffic`, `closing`, `closed` |
//! | `stubborn` | breaks the protocol, and never closes when its backend does |
//!
//! After an attack the backend either closes the device or goes on to take a well-formed frame, as the protocol
//! demands. One line reports this for each attack, and a last line for all of them.
#![no_std]
#![no_main]

extern crate alloc;

use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::sync::atomic::Ordering;
use tombolo_cell::hostile::Hostile;
use tombolo_cell::{ExitCode, ForeignMut, Net, exit, println};

tombolo_cell::app!(hostile);

const DEVICE: &str = "device/vif/0";
const TIMEOUT_NS: u64 = 30_000_000_000;
const LOOK_NS: u64 = 10_000_000;
const RING_SLOTS: u32 = 256;
const SLOTS_AT: usize = 64;
const TX_SLOT_BYTES: usize = 12;
const RX_SLOT_BYTES: usize = 8;
const REQ_PROD: usize = 0;
const REQ_EVENT: usize = 4;
const RSP_PROD: usize = 8;
const RSP_EVENT: usize = 12;
const FRAME_BYTES: u16 = 60;
const BLANK: u16 = 1;
const MORE: u16 = 4;
const EXTRA: u16 = 8;
const INIT_WAIT: u32 = 2;
const CONNECTED: u32 = 4;
const CLOSING: u32 = 5;
const CLOSED: u32 = 6;
/// Events of a storm.
const STORM: u32 = 20_000;
/// Requests that change while the backend may be reading them.
const FLICKERS: u32 = 200;

/// What a backend has to do about an attack.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Due {
    Close,
    GoOn,
}

/// What to write to the transmit ring.
enum Slot {
    /// Grant, offset, flags, size.
    Request(u32, u16, u16, u16),
    /// Type, flags, and six further bytes.
    Extra(u8, u8, [u8; 6]),
}

use Slot::{Extra as Info, Request};

/// The rings of one connection.
struct Rings {
    transmit: ForeignMut<'static>,
    receive: ForeignMut<'static>,
    references: [u32; 2],
    channel: u32,
    /// A page with a frame, and its grant.
    page: ForeignMut<'static>,
    gref: u32,
    produced: u32,
}

struct Foe {
    net: Net,
    xen: Hostile,
    backend: String,
    domain: u16,
    mac: [u8; 6],
}

fn fail(why: core::fmt::Arguments<'_>) -> ! {
    println!("hostile: FAILED: {why}");
    exit(ExitCode::Failure)
}

impl Rings {
    /// Writes a slot at the producer's index, without publishing it.
    fn push(&mut self, slot: &Slot) {
        let mut bytes = [0; TX_SLOT_BYTES];
        match *slot {
            Request(gref, offset, flags, size) => {
                bytes[..4].copy_from_slice(&gref.to_le_bytes());
                for (at, half) in [(4, offset), (6, flags), (8, self.produced as u16), (10, size)] {
                    bytes[at..at + 2].copy_from_slice(&half.to_le_bytes());
                }
            }
            Info(kind, flags, rest) => {
                bytes[..2].copy_from_slice(&[kind, flags]);
                bytes[2..8].copy_from_slice(&rest);
            }
        }
        let at = SLOTS_AT + TX_SLOT_BYTES * (self.produced % RING_SLOTS) as usize;
        let _ = self.transmit.write_array(at, bytes);
        self.produced = self.produced.wrapping_add(1);
    }

    fn publish(&self) {
        let _ = self.transmit.store_u32(REQ_PROD, self.produced, Ordering::Release);
    }

    /// How many responses there are on the transmit ring.
    fn answered(&self) -> u32 {
        self.transmit.as_foreign().load_u32(RSP_PROD, Ordering::Acquire).unwrap_or(0)
    }

    /// The status of the response at an index.
    fn status(&self, index: u32) -> i16 {
        let at = SLOTS_AT + TX_SLOT_BYTES * (index % RING_SLOTS) as usize + 2;
        self.transmit.as_foreign().load_u16(at, Ordering::Acquire).unwrap_or(0x7fff) as i16
    }

    /// A frame of one slot, as it should be.
    fn sound(&self) -> Slot {
        Request(self.gref, 0, 0, FRAME_BYTES)
    }
}

impl Foe {
    async fn pause(&self) {
        self.net.sleep_until(self.net.now_ns() + LOOK_NS).await;
    }

    fn state(&self) -> u32 {
        self.xen.read(&format!("{}/state", self.backend)).and_then(|text| text.parse().ok()).unwrap_or(0)
    }

    fn set_state(&self, state: u32) {
        self.xen.write(&format!("{DEVICE}/state"), &state.to_string());
    }

    /// Waits until the backend is in one of these states; which, or what it was at the end.
    async fn wait(&self, states: &[u32]) -> u32 {
        let until_ns = self.net.now_ns() + TIMEOUT_NS;
        loop {
            let state = self.state();
            if states.contains(&state) || self.net.now_ns() > until_ns {
                return state;
            }
            self.pause().await;
        }
    }

    /// Makes rings, with all receive buffers posted; `lie` changes the nodes before they are written.
    fn publish(&self, lie: impl Fn(&mut Vec<(String, String)>)) -> Option<Rings> {
        let (transmit, receive, page) = (self.xen.page(), self.xen.page(), self.xen.page());
        let references = [self.xen.grant(self.domain, transmit, false)?, self.xen.grant(self.domain, receive, false)?];
        let gref = self.xen.grant(self.domain, page, false)?;
        let channel = self.xen.channel(self.domain)?;
        let mut frame = [0; FRAME_BYTES as usize];
        frame[..6].copy_from_slice(&[0xff; 6]);
        frame[6..12].copy_from_slice(&self.mac);
        // Of local experiments (IEEE 802).
        frame[12..14].copy_from_slice(&[0x88, 0xb5]);
        page.write_from(&frame);
        for ring in [transmit, receive] {
            ring.store_u32(REQ_EVENT, 1, Ordering::Relaxed)?;
            ring.store_u32(RSP_EVENT, 1, Ordering::Relaxed)?;
        }
        let rings = Rings { transmit, receive, references, channel, page, gref, produced: 0 };
        self.post(&rings, RING_SLOTS, self.xen.grant(self.domain, self.xen.page(), false)?);
        let mut nodes: Vec<(String, String)> = [
            ("tx-ring-ref", references[0]),
            ("rx-ring-ref", references[1]),
            ("event-channel", channel),
            ("request-rx-copy", 1),
            ("feature-rx-notify", 1),
            ("feature-sg", 1),
            ("feature-gso-tcpv4", 1),
            ("feature-gso-tcpv6", 1),
            ("feature-ipv6-csum-offload", 1),
            ("multi-queue-num-queues", 1),
        ]
        .map(|(name, value): (&str, u32)| (name.to_string(), value.to_string()))
        .into();
        lie(&mut nodes);
        nodes.iter().all(|(name, value)| self.xen.write(&format!("{DEVICE}/{name}"), value)).then_some(rings)
    }

    /// Posts receive buffers up to an index, all of them the same page.
    fn post(&self, rings: &Rings, up_to: u32, gref: u32) {
        for index in 0..up_to.min(RING_SLOTS) {
            let mut bytes = [0; RX_SLOT_BYTES];
            bytes[..2].copy_from_slice(&(index as u16).to_le_bytes());
            bytes[4..].copy_from_slice(&gref.to_le_bytes());
            let _ = rings.receive.write_array(SLOTS_AT + RX_SLOT_BYTES * index as usize, bytes);
        }
        let _ = rings.receive.store_u32(REQ_PROD, up_to, Ordering::Release);
    }

    /// From wherever the two ends are to a connection.
    async fn connect(&self) -> Rings {
        self.start().await;
        let Some(rings) = self.publish(|_| ()) else {
            fail(format_args!("Xen or XenStore refuses what every domain may do"))
        };
        self.set_state(CONNECTED);
        match self.wait(&[CONNECTED]).await {
            CONNECTED => rings,
            state => fail(format_args!("the backend does not connect: state {state}")),
        }
    }

    /// To the point where the backend waits for the rings.
    async fn start(&self) {
        self.set_state(1);
        match self.wait(&[INIT_WAIT]).await {
            INIT_WAIT => {}
            state => fail(format_args!("the backend does not wait for this end: state {state}")),
        }
    }

    /// Closes, and reclaims what the backend no longer has.
    async fn disconnect(&self, rings: Option<Rings>) {
        self.set_state(CLOSING);
        self.wait(&[CLOSING, CLOSED]).await;
        self.set_state(CLOSED);
        match self.wait(&[CLOSED]).await {
            CLOSED => {}
            state => fail(format_args!("the backend does not close: state {state}")),
        }
        let Some(rings) = rings else { return };
        self.xen.close(rings.channel);
        for reference in rings.references {
            if !self.xen.revoke(reference) {
                fail(format_args!("the backend is closed, and still has the ring with grant {reference}"));
            }
        }
    }

    /// Whether the backend takes a sound frame.
    async fn goes_on(&self, rings: &mut Rings) -> bool {
        let index = rings.produced;
        rings.push(&rings.sound());
        rings.publish();
        let until_ns = self.net.now_ns() + TIMEOUT_NS;
        while rings.answered() != rings.produced {
            self.xen.notify(rings.channel);
            if self.net.now_ns() > until_ns || self.state() != CONNECTED {
                return false;
            }
            self.pause().await;
        }
        rings.status(index) == 0
    }

    /// One attack over a connection of its own.
    async fn attack(&self, name: &str) -> bool {
        let lies: Option<(&str, &str)> = match name {
            "ring-not-granted" => Some(("tx-ring-ref", "400")),
            "ring-of-another" => Some(("rx-ring-ref", "1")),
            "no-channel" => Some(("event-channel", "4000")),
            "no-number" => Some(("event-channel", "-1")),
            "too-many-queues" => Some(("multi-queue-num-queues", "4000000000")),
            "missing-queues" => Some(("multi-queue-num-queues", "2")),
            "no-copy" => Some(("request-rx-copy", "0")),
            // Nodes as they should be; the ring is not.
            "receive-index-jump" => Some(("", "")),
            _ => None,
        };
        if let Some((node, value)) = lies {
            self.start().await;
            let rings = self.publish(|nodes| {
                for had in nodes.iter_mut().filter(|had| had.0 == node) {
                    had.1 = value.to_string();
                }
            });
            if let (Some(rings), "receive-index-jump") = (&rings, name) {
                let _ = rings.receive.store_u32(REQ_PROD, 0x8000_0000, Ordering::Release);
            }
            self.set_state(CONNECTED);
            if name == "ring-of-another" {
                // The backend may map it, as it is granted to it for XenStore. What is at its head may be an index that cannot be, or a right one.
                let state = self.wait(&[CLOSING, CLOSED, CONNECTED]).await;
                self.disconnect(rings).await;
                return state == CLOSING || state == CONNECTED;
            }
            let is_closed = self.wait(&[CLOSING, CLOSED]).await == CLOSING;
            self.disconnect(rings).await;
            return is_closed;
        }
        let mut rings = self.connect().await;
        if !self.goes_on(&mut rings).await {
            fail(format_args!("{name}: a sound frame is not taken before the attack"));
        }
        let due = self.strike(name, &mut rings).await;
        self.xen.notify(rings.channel);
        let is_as_due = match due {
            Due::Close => matches!(self.wait(&[CLOSING, CLOSED]).await, CLOSING | CLOSED),
            Due::GoOn => self.goes_on(&mut rings).await,
        };
        self.disconnect(Some(rings)).await;
        is_as_due
    }

    /// Breaks a rule; what the backend has to do about it.
    async fn strike(&self, name: &str, rings: &mut Rings) -> Due {
        let gref = rings.gref;
        let chain = |slots: u16, size: u16, piece: u16| -> Vec<Slot> {
            (0..slots)
                .map(|at| Request(gref, 0, if at + 1 < slots { MORE } else { 0 }, if at == 0 { size } else { piece }))
                .collect()
        };
        let gso = |kind: u8, size: u16| {
            let [low, high] = size.to_le_bytes();
            Info(1, 0, [low, high, kind, 0, 0, 0])
        };
        let (slots, due) = match name {
            "index-jump" => {
                rings.produced = rings.produced.wrapping_add(0x8000_0000);
                (Vec::new(), Due::Close)
            }
            "index-back" => {
                rings.produced = rings.produced.wrapping_sub(1);
                (Vec::new(), Due::Close)
            }
            "index-beyond-the-ring" => {
                rings.produced = rings.produced.wrapping_add(RING_SLOTS + 1);
                (Vec::new(), Due::Close)
            }
            "chain-without-end" => (Vec::from([Request(gref, 0, MORE, 4000)]), Due::Close),
            "chain-of-21" => (chain(21, 4000, 60), Due::Close),
            "chain-of-19" => (chain(19, 4000, 60), Due::GoOn),
            "buffer-beyond-its-page" => (Vec::from([Request(gref, 4090, 0, 60)]), Due::Close),
            "piece-beyond-its-page" => {
                (Vec::from([Request(gref, 0, MORE, 400), Request(gref, 65535, 0, 200)]), Due::Close)
            }
            "empty" => (Vec::from([Request(gref, 0, 0, 0)]), Due::GoOn),
            "runt" => (Vec::from([Request(gref, 0, 0, 13)]), Due::GoOn),
            "empty-piece" => (chain(3, 400, 0), Due::GoOn),
            "pieces-longer-than-the-whole" => (chain(3, 100, 90), Due::GoOn),
            "whole-longer-than-a-page" => (Vec::from([Request(gref, 0, 0, 65535)]), Due::Close),
            "grant-of-nothing" => (Vec::from([Request(450, 0, 0, 60)]), Due::GoOn),
            "grant-beyond-the-table" => (Vec::from([Request(u32::MAX, 0, 0, 60)]), Due::GoOn),
            "grant-of-nothing-in-a-chain" => {
                (Vec::from([Request(gref, 0, MORE, 400), Request(450, 0, 0, 100)]), Due::GoOn)
            }
            "extra-of-no-type" => (Vec::from([Request(gref, 0, EXTRA, 60), Info(0, 0, [0; 6])]), Due::Close),
            "extra-of-unknown-type" => (Vec::from([Request(gref, 0, EXTRA, 60), Info(99, 0, [0; 6])]), Due::Close),
            "extra-without-end" => {
                let mut slots = Vec::from([Request(gref, 0, EXTRA | BLANK, 60)]);
                slots.extend((0..6).map(|_| Info(1, 1, [200, 0, 1, 0, 0, 0])));
                (slots, Due::Close)
            }
            "extra-that-does-not-come" => (Vec::from([Request(gref, 0, EXTRA, 60)]), Due::Close),
            "segments-of-no-bytes" => (Vec::from([Request(gref, 0, EXTRA | BLANK, 60), gso(1, 0)]), Due::Close),
            "segments-of-unknown-kind" => (Vec::from([Request(gref, 0, EXTRA | BLANK, 60), gso(7, 100)]), Due::Close),
            "segments-with-a-sum" => (Vec::from([Request(gref, 0, EXTRA, 60), gso(1, 100)]), Due::GoOn),
            "segments-of-no-tcp" => (Vec::from([Request(gref, 0, EXTRA | BLANK, 60), gso(1, 1)]), Due::GoOn),
            "multicast-flood" => {
                let groups = (0..60u8).flat_map(|at| [Request(0, 0, EXTRA, 0), Info(2, 0, [1, 0, 0x5e, 0, 0, at])]);
                (groups.collect(), Due::GoOn)
            }
            "event-words" => {
                for ring in [rings.transmit, rings.receive] {
                    let _ = ring.store_u32(REQ_EVENT, 0x1234_5678, Ordering::Release);
                    let _ = ring.store_u32(RSP_EVENT, 0xffff_0000, Ordering::Release);
                }
                (Vec::new(), Due::GoOn)
            }
            "response-words" => {
                // The backend's own count is what counts.
                let had = rings.answered();
                let _ = rings.transmit.store_u32(RSP_PROD, 0xdead_0000, Ordering::Release);
                self.xen.notify(rings.channel);
                self.pause().await;
                let _ = rings.transmit.store_u32(RSP_PROD, had, Ordering::Release);
                (Vec::new(), Due::GoOn)
            }
            "receive-read-only" => {
                // Frames to this guest cannot be copied; they are lost, and nothing else is.
                if let Some(gref) = self.xen.grant(self.domain, self.xen.page(), true) {
                    for index in 0..RING_SLOTS as usize {
                        let _ = rings.receive.store_u32(SLOTS_AT + RX_SLOT_BYTES * index + 4, gref, Ordering::Relaxed);
                    }
                }
                (Vec::new(), Due::GoOn)
            }
            "revoked-grant" => {
                for _ in 0..20 {
                    let page = self.xen.page();
                    let Some(gref) = self.xen.grant(self.domain, page, true) else { break };
                    rings.push(&Request(gref, 0, 0, 60));
                    rings.publish();
                    self.xen.notify(rings.channel);
                    // While it is being copied Xen refuses this.
                    while !self.xen.revoke(gref) {}
                }
                (Vec::new(), Due::GoOn)
            }
            "double-fetch" => {
                // Each request is sound and unsound by turns while the backend may be reading it. Whichever it sees, it must
                // use what it has checked: the frame goes, or the device closes.
                for _ in 0..FLICKERS {
                    if self.state() != CONNECTED {
                        break;
                    }
                    let at = rings.produced;
                    rings.push(&rings.sound());
                    rings.publish();
                    self.xen.notify(rings.channel);
                    for bad in [Request(gref, 4090, 0, 4000), Request(450, 0, MORE, 65535), Request(gref, 0, EXTRA, 13)]
                    {
                        for slot in [&bad, &rings.sound()] {
                            rings.produced = at;
                            rings.push(slot);
                        }
                        let _ = rings.page.write_array(0, [at as u8; 12]);
                    }
                    while rings.answered() != rings.produced && self.state() == CONNECTED {
                        self.net.pause().await;
                    }
                }
                let due = if self.state() == CONNECTED { Due::GoOn } else { Due::Close };
                (Vec::new(), due)
            }
            "event-storm" => {
                for _ in 0..STORM {
                    self.xen.notify(rings.channel);
                }
                (Vec::new(), Due::GoOn)
            }
            other => fail(format_args!("no attack is called {other}")),
        };
        for slot in &slots {
            rings.push(slot);
        }
        rings.publish();
        due
    }
}

const ATTACKS: [&str; 42] = [
    "index-jump",
    "index-back",
    "index-beyond-the-ring",
    "receive-index-jump",
    "chain-without-end",
    "chain-of-21",
    "chain-of-19",
    "buffer-beyond-its-page",
    "piece-beyond-its-page",
    "empty",
    "runt",
    "empty-piece",
    "pieces-longer-than-the-whole",
    "whole-longer-than-a-page",
    "grant-of-nothing",
    "grant-beyond-the-table",
    "grant-of-nothing-in-a-chain",
    "extra-of-no-type",
    "extra-of-unknown-type",
    "extra-without-end",
    "extra-that-does-not-come",
    "segments-of-no-bytes",
    "segments-of-unknown-kind",
    "segments-with-a-sum",
    "segments-of-no-tcp",
    "multicast-flood",
    "event-words",
    "response-words",
    "receive-read-only",
    "revoked-grant",
    "double-fetch",
    "event-storm",
    "ring-not-granted",
    "ring-of-another",
    "no-channel",
    "no-number",
    "too-many-queues",
    "missing-queues",
    "no-copy",
    // Again, after all the others.
    "index-jump",
    "runt",
    "chain-of-21",
];

/// Leaves the domain in a state of the handshake.
async fn die(foe: &Foe, state: &str) -> ! {
    match state {
        "initialising" => {}
        "published" => {
            foe.start().await;
            let _ = foe.publish(|_| ());
        }
        "connecting" => {
            foe.start().await;
            let _ = foe.publish(|_| ());
            foe.set_state(CONNECTED);
        }
        "connected" => {
            foe.connect().await;
        }
        "traffic" => {
            let mut rings = foe.connect().await;
            for _ in 0..100 {
                rings.push(&rings.sound());
            }
            rings.publish();
            foe.xen.notify(rings.channel);
        }
        "closing" => {
            foe.connect().await;
            foe.set_state(CLOSING);
        }
        "closed" => {
            let rings = foe.connect().await;
            foe.disconnect(Some(rings)).await;
        }
        other => fail(format_args!("die={other}: no such state")),
    }
    println!("hostile: dies {state}");
    exit(ExitCode::Success)
}

async fn hostile(net: Net) {
    let Some(xen) = Hostile::new(&net) else { fail(format_args!("this is not a Xen domain")) };
    let node = |name: &str| xen.read(&format!("{DEVICE}/{name}")).unwrap_or_default();
    let (backend, domain, mac) = (node("backend"), node("backend-id").parse(), node("mac"));
    let (false, Ok(domain)) = (backend.is_empty(), domain) else { fail(format_args!("there is no vif 0")) };
    let mut octets = [0; 6];
    for (octet, text) in octets.iter_mut().zip(mac.split(':')) {
        *octet = u8::from_str_radix(text, 16).unwrap_or(0);
    }
    let foe = Foe { net: net.clone(), xen, backend, domain, mac: octets };
    let config = net.config();
    if let Some(state) = config.get("die") {
        die(&foe, state).await;
    }
    if config.has("stubborn") {
        let mut rings = foe.connect().await;
        rings.produced = rings.produced.wrapping_add(0x8000_0000);
        rings.publish();
        foe.xen.notify(rings.channel);
        let state = foe.wait(&[CLOSING, CLOSED]).await;
        println!("hostile: stubborn: the backend is in state {state}");
        return;
    }
    let named = config.get("attacks");
    let attacks: Vec<&str> = named.map_or(ATTACKS.to_vec(), |names| names.split(',').collect());
    let mut failed = 0;
    for name in &attacks {
        let start_ns = foe.net.now_ns();
        let is_as_due = foe.attack(name).await;
        failed += u32::from(!is_as_due);
        let verdict = if is_as_due { "ok" } else { "FAILED" };
        println!("hostile: {name}: {verdict}, {} ms", (foe.net.now_ns() - start_ns) / 1_000_000);
    }
    println!("hostile: {} attacks, {failed} not met as they should be", attacks.len());
}
