//! A Xen network frontend that breaks every rule on purpose, for tests of backends. It is built by
//! `./x xen` only, with the feature `hostile`, and needs `net=none`.
//!
//! | word | meaning |
//! | --- | --- |
//! | `attacks=NAME,…` | these attacks one after the other, each over a connection of its own |
//! | `die=STATE` | leaves the domain in this state of the handshake (`STATES` of `tests/xen_hostile.py`) |
//! | `crash=STATE` | crashes in this state |
//! | `stay=STATE` | stays in this state for good |
//!
//! Without any of these it takes attacks from XenStore: `N NAME` in its node `data/attack`. It
//! answers `N ok` or `N FAILED` in `data/met`, and keeps the connection as the attack left it until
//! the next attack, or `N end`.
//!
//! After an attack the backend either closes the device or goes on to take a well-formed frame, as
//! the protocol demands. In the end each page's grant can be revoked, so the backend holds none of
//! them.
#![no_std]
#![no_main]

extern crate alloc;

mod attacks;
mod rings;

use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use attacks::Outcome;
use core::sync::atomic::Ordering;
use rings::{FRAME_BYTES, REQ_EVENT, RING_SLOTS, RSP_EVENT, Rings};
use tombolo_cell::hostile::Hostile;
use tombolo_cell::{ExitCode, ForeignMut, Net, exit, println};

tombolo_cell::app!(hostile);

const DEVICE: &str = "device/vif/0";
const TIMEOUT_NS: u64 = 30_000_000_000;
const LOOK_NS: u64 = 10_000_000;
const INIT_WAIT: u32 = 2;
const CONNECTED: u32 = 4;
const CLOSING: u32 = 5;
const CLOSED: u32 = 6;
/// A backend looks at a frontend that comes again and again once a second, until it has been calm
/// for two.
const CLOSED_AT_A_TIME: u32 = 4;
const REST_NS: u64 = 2_200_000_000;
/// Pages of a connection: two rings, a frame, a receive buffer, two more rings.
const PAGES: usize = 6;

struct Foe {
    net: Net,
    xen: Hostile,
    backend: String,
    domain: u16,
    mac: [u8; 6],
    /// Used by one connection after the other.
    pages: [ForeignMut<'static>; PAGES],
}

fn fail(why: core::fmt::Arguments<'_>) -> ! {
    println!("hostile: FAILED: {why}");
    exit(ExitCode::Failure)
}

impl Foe {
    async fn pause(&self) {
        self.net.sleep_until(self.net.now_ns() + LOOK_NS).await;
    }

    fn state(&self) -> u32 {
        self.xen.read(&format!("{}/state", self.backend)).and_then(|text| text.parse().ok()).unwrap_or(0)
    }

    fn write(&self, name: &str, value: &str) -> bool {
        self.xen.write(&format!("{DEVICE}/{name}"), value)
    }

    fn set_state(&self, state: u32) {
        self.write("state", &state.to_string());
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

    /// Waits until `done`; whether it came to that.
    async fn wait_for(&self, done: impl Fn() -> bool) -> bool {
        let until_ns = self.net.now_ns() + TIMEOUT_NS;
        while !done() {
            if self.net.now_ns() > until_ns {
                return false;
            }
            self.pause().await;
        }
        true
    }

    /// Makes rings, with all receive buffers posted; `lie` changes the rings, and the nodes before
    /// they are written.
    fn publish(&self, lie: impl FnOnce(&mut Vec<(String, String)>, &mut Rings)) -> Option<Rings> {
        let [transmit, receive, page, buffer, ..] = self.pages;
        for page in self.pages {
            page.write_from(&[0; 4096]);
        }
        let mut grants = Vec::new();
        for page in [transmit, receive, page, buffer] {
            grants.push(self.xen.grant(self.domain, page, false)?);
        }
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
        let (references, gref, posted) = ([grants[0], grants[1]], grants[2], grants[3]);
        let channels = Vec::from([channel]);
        let mut rings = Rings { transmit, receive, references, channel, page, gref, produced: 0, grants, channels };
        rings.fill_receive(posted);
        rings.post(RING_SLOTS);
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
        // What an earlier connection may have written.
        let others = ["event-channel-tx", "event-channel-rx", "ctrl-ring-ref", "event-channel-ctrl"];
        nodes.extend(others.map(|name| (name.to_string(), String::new())));
        lie(&mut nodes, &mut rings);
        nodes.iter().all(|(name, value)| self.write(name, value)).then_some(rings)
    }

    /// From wherever the two ends are to a connection.
    async fn connect(&self) -> Rings {
        self.connect_with(|_, _| ()).await
    }

    async fn connect_with(&self, lie: impl FnOnce(&mut Vec<(String, String)>, &mut Rings)) -> Rings {
        self.start().await;
        let Some(rings) = self.publish(lie) else {
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
        for channel in rings.channels {
            self.xen.close(channel);
        }
        for reference in rings.grants {
            if !self.xen.revoke(reference) {
                fail(format_args!("the backend is closed, and still has the page of grant {reference}"));
            }
        }
    }

    /// Whether the backend takes a sound frame.
    async fn goes_on(&self, rings: &mut Rings) -> bool {
        self.answer(rings).await == Some(0)
    }

    /// The status with which the backend answers a sound frame; `None` where it does not, or
    /// closes.
    async fn answer(&self, rings: &mut Rings) -> Option<i16> {
        let index = rings.produced;
        rings.push(rings.sound());
        rings.publish();
        let until_ns = self.net.now_ns() + TIMEOUT_NS;
        while rings.answered() != rings.produced {
            self.xen.notify(rings.channel);
            if self.net.now_ns() > until_ns || self.state() != CONNECTED {
                return None;
            }
            self.pause().await;
        }
        Some(rings.status(index))
    }
}

/// Brings the device into a state of the handshake.
async fn enter(foe: &Foe, state: &str) {
    match state {
        "initialising" => {}
        "published" => {
            foe.start().await;
            let _ = foe.publish(|_, _| ());
        }
        "connecting" => {
            foe.start().await;
            let _ = foe.publish(|_, _| ());
            foe.set_state(CONNECTED);
        }
        "connected" => {
            foe.connect().await;
        }
        "two-queues" => {
            let mut rings = foe.connect_with(|nodes, rings| foe.two_queues(nodes, rings)).await;
            if !foe.goes_on(&mut rings).await {
                fail(format_args!("two queues: a sound frame is not taken"));
            }
        }
        "traffic" => {
            let mut rings = foe.connect().await;
            for _ in 0..100 {
                rings.push(rings.sound());
            }
            rings.publish();
            foe.xen.notify(rings.channel);
        }
        "receiving" => {
            let rings = foe.connect().await;
            foe.wait_for(|| rings.received() > 0).await;
        }
        // The backend has closed the device, and this end does not.
        "refused" => {
            let mut rings = foe.connect().await;
            rings.produced = rings.produced.wrapping_add(0x8000_0000);
            rings.publish();
            foe.xen.notify(rings.channel);
            let state = foe.wait(&[CLOSING, CLOSED]).await;
            println!("hostile: the backend is in state {state}");
        }
        "closing" => {
            foe.connect().await;
            foe.set_state(CLOSING);
        }
        "closed" => {
            let rings = foe.connect().await;
            foe.disconnect(Some(rings)).await;
        }
        other => fail(format_args!("{other}: no such state")),
    }
}

/// Makes attacks one after the other. What the last one left stays until the next.
#[derive(Default)]
struct Series {
    left: Option<Outcome>,
    closed: u32,
}

impl Series {
    async fn strike(&mut self, foe: &Foe, name: &str) -> &'static str {
        let sound = match self.left.take() {
            Some(left) if left.is_sound && name != "end" => left.rings,
            Some(left) => {
                foe.disconnect(left.rings).await;
                self.closed += 1;
                if self.closed.is_multiple_of(CLOSED_AT_A_TIME) {
                    foe.net.sleep_until(foe.net.now_ns() + REST_NS).await;
                }
                None
            }
            None => None,
        };
        let start_ns = foe.net.now_ns();
        let mut verdict = "ok";
        if name != "end" {
            let outcome = foe.attack(name, sound).await;
            verdict = if outcome.is_as_due { "ok" } else { "FAILED" };
            self.left = Some(outcome);
        }
        println!("hostile: {name}: {verdict}, {} ms", (foe.net.now_ns() - start_ns) / 1_000_000);
        verdict
    }
}

/// Takes attacks from XenStore.
async fn take_attacks(foe: &Foe) {
    let (mut last, mut series) = (String::new(), Series::default());
    loop {
        let asked = foe.xen.read("data/attack").unwrap_or_default();
        let Some((number, name)) = asked.split_once(' ').filter(|(number, _)| *number != last) else {
            foe.pause().await;
            continue;
        };
        last = number.to_string();
        let verdict = series.strike(foe, name).await;
        foe.xen.write("data/met", &format!("{number} {verdict}"));
        if name == "end" {
            return;
        }
    }
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
    let pages = [(); PAGES].map(|()| xen.page());
    let foe = Foe { net: net.clone(), xen, backend, domain, mac: octets, pages };
    let config = net.config();
    if let Some(names) = config.get("attacks") {
        let mut series = Series::default();
        for name in names.split(',').chain(["end"]) {
            series.strike(&foe, name).await;
        }
    } else if let Some(state) = config.get("die") {
        enter(&foe, state).await;
        println!("hostile: dies {state}");
        exit(ExitCode::Success);
    } else if let Some(state) = config.get("crash") {
        enter(&foe, state).await;
        panic!("hostile: crashes {state}");
    } else if let Some(state) = config.get("stay") {
        enter(&foe, state).await;
        println!("hostile: stays {state}");
    } else {
        take_attacks(&foe).await;
    }
}
