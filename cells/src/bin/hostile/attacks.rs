//! The attacks. What the backend counts or says about each is in `tests/xen_hostile.py`.

use crate::rings::{
    BLANK, EXTRA, FRAME_BYTES, MORE, REQ_EVENT, REQ_PROD, RING_SLOTS, RSP_EVENT, RSP_PROD,
    RingSlot::{self, Info, Request},
    Rings,
};
use crate::{CLOSED, CLOSING, CONNECTED, Foe, fail};
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::sync::atomic::Ordering;

/// Events of a storm.
const STORM: u32 = 20_000;
/// Writes to XenStore of a storm.
const NODES: u32 = 1000;
/// States of a frontend that does not wait for its backend.
const FLIPS: u32 = 60;
/// Requests that change while the backend may be reading them.
const FLICKERS: u32 = 200;
/// Looks at what comes of an attack that may end in either way, or in nothing.
const LOOKS: u32 = 100;
/// A grant that this domain never makes.
const NO_GRANT: u32 = 450;
/// Frames where no domain of this size has memory, and of the local APIC.
const NO_MEMORY: u64 = 0xfff_ffff;
const APIC: u64 = 0xfee00;
/// A domain that is not there.
const NO_DOMAIN: u16 = 0x7000;
/// The page of the domain's console, which is no ring of a network.
const CONSOLE_GRANT: &str = "0";
/// The event channel of XenStore: of this domain and dom0, but not of a vif.
const STORE_CHANNEL: &str = "1";

/// Of a connection's pages the one that is a control ring in attacks by it.
const CONTROL_PAGE: usize = 4;
/// Requests on the control ring (xen/include/public/io/netif.h): kind, data, and the status that is
/// due. The key and the table come from a page with a frame, which names no queue.
const CONTROL_REQUESTS: [(u16, [u32; 3], u32); 14] = [
    // No algorithm was chosen.
    (1, [0, 0, 0], 1),
    (2, [15, 0, 0], 2),
    (7, [99, 0, 0], 2),
    (7, [1, 0, 0], 0),
    (2, [0xffff_ffff, 0, 0], 2),
    (5, [0xffff_ffff, 0, 0], 2),
    (5, [128, 0, 0], 0),
    // A part behind the table's end, also where the sum has more than 32 bits, or four times the
    // number has (advisory 270).
    (6, [GOOD, 2, 127], 2),
    (6, [GOOD, 2, 0xffff_ffff], 2),
    (6, [GOOD, 0x4000_0001, 0], 2),
    (6, [NO_GRANT, 128, 0], 2),
    (6, [GOOD, 128, 0], 2),
    (3, [GOOD, 0xffff_ffff, 0], 3),
    (0xffff, [0xffff_ffff; 3], 1),
];
/// Stands for the grant of the page with a frame.
const GOOD: u32 = 0xffff_0000;

/// What a backend has to do about an attack.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Due {
    Close,
    GoOn,
    /// Close or go on.
    Either,
    /// Nothing that this end could see.
    Nothing,
    /// It did what it must not do.
    Failed,
}

/// What an attack left behind.
pub(crate) struct Outcome {
    pub(crate) is_as_due: bool,
    pub(crate) rings: Option<Rings>,
    /// The next attack may use this connection.
    pub(crate) is_sound: bool,
}

/// Whether the rings or their nodes are such that the backend must not connect.
fn is_refused(name: &str) -> bool {
    matches!(
        name,
        "ring-not-granted"
            | "ring-read-only"
            | "ring-of-no-memory"
            | "ring-of-the-console"
            | "no-ring"
            | "number-too-large"
            | "number-of-2000-digits"
            | "no-channel"
            | "no-number"
            | "channel-of-xenstore"
            | "channel-twice"
            | "too-many-queues"
            | "no-queues"
            | "missing-queues"
            | "two-queues-one-channel"
            | "no-copy"
            | "no-notify"
            | "receive-index-jump"
            | "control-ring-twice"
            | "control-ring-without-channel"
            | "connected-at-once"
    )
}

/// Whether the attack needs a connection of its own, made by [`Foe::lie`].
fn has_own_rings(name: &str) -> bool {
    matches!(
        name,
        "ring-twice"
            | "two-queues-one-ring"
            | "control-ring-requests"
            | "control-ring-jump"
            | "receive-nothing"
            | "receive-index-jump-later"
            | "receive-index-back"
            | "receive-into-the-ring"
            | "receive-into-the-transmit-ring"
    )
}

fn set(nodes: &mut Vec<(String, String)>, name: &str, value: &str) {
    nodes.retain(|had| had.0 != name);
    nodes.push((name.to_string(), value.to_string()));
}

/// A frame of TCP over IPv4 with a header and `payload` bytes of zeros.
fn tcp_frame(mac: [u8; 6], payload: u16) -> [u8; 54] {
    let mut frame = [0; 54];
    frame[..6].copy_from_slice(&[0xff; 6]);
    frame[6..12].copy_from_slice(&mac);
    frame[12..16].copy_from_slice(&[8, 0, 0x45, 0]);
    frame[16..18].copy_from_slice(&(40 + payload).to_be_bytes());
    frame[22..24].copy_from_slice(&[64, 6]);
    // TEST-NET-1, so that nothing is at either end (RFC 5737).
    frame[26..34].copy_from_slice(&[192, 0, 2, 1, 192, 0, 2, 2]);
    frame[46] = 0x50;
    frame
}

/// A well-formed chain of `slots` with `size` bytes in all, of which each slot behind the first has
/// `piece`.
fn chain(gref: u32, slots: u16, size: u16, piece: u16) -> Vec<RingSlot> {
    (0..slots)
        .map(|at| Request(gref, 0, if at + 1 < slots { MORE } else { 0 }, if at == 0 { size } else { piece }))
        .collect()
}

fn gso(kind: u8, size: u16) -> RingSlot {
    let [low, high] = size.to_le_bytes();
    Info(1, 0, [low, high, kind, 0, 0, 0])
}

impl Foe {
    /// Adds a second queue.
    pub(crate) fn two_queues(&self, nodes: &mut Vec<(String, String)>, rings: &mut Rings) {
        let [.., transmit, receive] = self.pages;
        for page in [transmit, receive] {
            let _ = page.store_u32(REQ_EVENT, 1, Ordering::Relaxed);
            let _ = page.store_u32(RSP_EVENT, 1, Ordering::Relaxed);
        }
        let second = [transmit, receive].map(|page| self.xen.grant(self.domain, page, false).unwrap_or(NO_GRANT));
        let channel = self.xen.channel(self.domain).unwrap_or(rings.channel);
        rings.grants.extend(second);
        rings.channels.push(channel);
        set(nodes, "multi-queue-num-queues", "2");
        for (queue, [tx, rx], channel) in [(0, rings.references, rings.channel), (1, second, channel)] {
            for (name, value) in [("tx-ring-ref", tx), ("rx-ring-ref", rx), ("event-channel", channel)] {
                set(nodes, &format!("queue-{queue}/{name}"), &value.to_string());
            }
        }
    }

    /// Adds a control ring.
    fn control_ring(&self, nodes: &mut Vec<(String, String)>, rings: &mut Rings) {
        let page = self.pages[CONTROL_PAGE];
        let _ = page.store_u32(REQ_EVENT, 1, Ordering::Relaxed);
        let _ = page.store_u32(RSP_EVENT, 1, Ordering::Relaxed);
        let grant = self.xen.grant(self.domain, page, false).unwrap_or(NO_GRANT);
        let channel = self.xen.channel(self.domain).unwrap_or(rings.channel);
        rings.grants.push(grant);
        rings.channels.push(channel);
        set(nodes, "ctrl-ring-ref", &grant.to_string());
        set(nodes, "event-channel-ctrl", &channel.to_string());
    }

    fn notify_all(&self, rings: &Rings) {
        rings.channels.iter().for_each(|channel| self.xen.notify(*channel));
    }

    /// Asks for what may not be; whether each request is answered as it should be.
    async fn ask_control(&self, rings: &Rings) -> Due {
        let page = self.pages[CONTROL_PAGE];
        for (n, (kind, mut data, _)) in CONTROL_REQUESTS.into_iter().enumerate() {
            if data[0] == GOOD {
                data[0] = rings.gref;
            }
            let mut slot = [0; 16];
            slot[..2].copy_from_slice(&(n as u16).to_le_bytes());
            slot[2..4].copy_from_slice(&kind.to_le_bytes());
            for (at, value) in data.into_iter().enumerate() {
                slot[4 + 4 * at..8 + 4 * at].copy_from_slice(&value.to_le_bytes());
            }
            let _ = page.write_array(64 + 16 * n, slot);
        }
        let _ = page.store_u32(REQ_PROD, CONTROL_REQUESTS.len() as u32, Ordering::Release);
        self.notify_all(rings);
        let answered =
            || page.as_foreign().load_u32(RSP_PROD, Ordering::Acquire) == Some(CONTROL_REQUESTS.len() as u32);
        if !self.wait_for(answered).await {
            return Due::Failed;
        }
        let status = |n: usize| page.as_foreign().load_u32(64 + 16 * n + 4, Ordering::Acquire);
        let is_as_due = CONTROL_REQUESTS.iter().enumerate().all(|(n, (.., due))| status(n) == Some(*due));
        if is_as_due { Due::GoOn } else { Due::Failed }
    }

    /// Changes the rings, or the nodes about them, before the backend knows of them.
    fn lie(&self, name: &str, nodes: &mut Vec<(String, String)>, rings: &mut Rings) {
        let (tx, channel) = (rings.references[0].to_string(), rings.channel.to_string());
        // The transmit ring by another grant.
        let regrant = |rings: &mut Rings, grant: Option<u32>| -> String {
            let Some(grant) = grant else { fail(format_args!("{name}: the grant table is full")) };
            rings.grants.push(grant);
            grant.to_string()
        };
        match name {
            "ring-not-granted" => set(nodes, "tx-ring-ref", "400"),
            "ring-read-only" => {
                let grant = regrant(rings, self.xen.grant(self.domain, rings.transmit, true));
                set(nodes, "tx-ring-ref", &grant);
            }
            "ring-of-no-memory" => {
                let grant = regrant(rings, self.xen.grant_frame(self.domain, NO_MEMORY));
                set(nodes, "tx-ring-ref", &grant);
            }
            "no-ring" => set(nodes, "tx-ring-ref", ""),
            "number-too-large" => set(nodes, "tx-ring-ref", "4294967296"),
            "number-of-2000-digits" => set(nodes, "rx-ring-ref", &"9".repeat(2000)),
            "no-channel" => set(nodes, "event-channel", "4000"),
            "no-number" => set(nodes, "event-channel", "-1"),
            "channel-of-xenstore" => set(nodes, "event-channel", STORE_CHANNEL),
            "channel-twice" => {
                set(nodes, "event-channel-tx", &channel);
                set(nodes, "event-channel-rx", &channel);
            }
            "too-many-queues" => set(nodes, "multi-queue-num-queues", "4000000000"),
            "no-queues" => set(nodes, "multi-queue-num-queues", "0"),
            "missing-queues" => {
                set(nodes, "multi-queue-num-queues", "2");
                set(nodes, "queue-0/tx-ring-ref", "");
            }
            "two-queues-one-channel" => {
                self.two_queues(nodes, rings);
                set(nodes, "queue-1/event-channel", &channel);
            }
            "two-queues-one-ring" => {
                self.two_queues(nodes, rings);
                set(nodes, "queue-1/tx-ring-ref", &tx);
                set(nodes, "queue-1/rx-ring-ref", &rings.references[1].to_string());
            }
            "no-copy" => set(nodes, "request-rx-copy", "0"),
            "no-notify" => set(nodes, "feature-rx-notify", "0"),
            "ring-twice" => set(nodes, "rx-ring-ref", &tx),
            "ring-of-the-console" => set(nodes, "rx-ring-ref", CONSOLE_GRANT),
            "control-ring-twice" => {
                set(nodes, "ctrl-ring-ref", &tx);
                set(nodes, "event-channel-ctrl", &channel);
            }
            "control-ring-without-channel" => set(nodes, "ctrl-ring-ref", &tx),
            "control-ring-requests" | "control-ring-jump" => self.control_ring(nodes, rings),
            "receive-index-jump" => rings.post(0x8000_0000),
            "receive-nothing" => rings.post(0),
            "receive-index-jump-later" | "receive-index-back" => rings.post(2),
            "receive-into-the-ring" | "receive-into-the-transmit-ring" => {
                rings.fill_receive(rings.references[usize::from(name == "receive-into-the-ring")]);
                rings.post(2);
            }
            _ => {}
        }
    }

    /// One attack, over a sound connection if there is one and it can be used.
    pub(crate) async fn attack(&self, name: &str, sound: Option<Rings>) -> Outcome {
        if is_refused(name) {
            self.close_sound(sound).await;
            let mut rings = None;
            if name != "connected-at-once" {
                self.start().await;
                rings = self.publish(|nodes, rings| self.lie(name, nodes, rings));
            }
            self.set_state(CONNECTED);
            let is_as_due = self.wait(&[CLOSING, CONNECTED]).await == CLOSING;
            return Outcome { is_as_due, rings, is_sound: false };
        }
        let mut rings = if has_own_rings(name) {
            self.close_sound(sound).await;
            self.connect_with(|nodes, rings| self.lie(name, nodes, rings)).await
        } else {
            let mut rings = match sound {
                Some(rings) => rings,
                None => self.connect().await,
            };
            if !self.goes_on(&mut rings).await {
                fail(format_args!("{name}: a sound frame is not taken before the attack"));
            }
            rings
        };
        let due = self.strike(name, &mut rings).await;
        self.xen.notify(rings.channel);
        let is_as_due = match due {
            Due::Close => matches!(self.wait(&[CLOSING, CLOSED]).await, CLOSING | CLOSED),
            Due::GoOn => self.goes_on(&mut rings).await,
            Due::Either => {
                self.linger().await;
                let is_up = self.state() == CONNECTED;
                // Where both rings are one, what is received may be written over the request.
                let is_due = |status| status == 0 || name == "ring-twice";
                !is_up || self.answer(&mut rings).await.is_some_and(is_due) || self.state() != CONNECTED
            }
            Due::Nothing => true,
            Due::Failed => false,
        };
        let is_sound = due == Due::GoOn && is_as_due && !has_own_rings(name) && !name.starts_with("receive-");
        Outcome { is_as_due, rings: Some(rings), is_sound }
    }

    async fn close_sound(&self, sound: Option<Rings>) {
        if sound.is_some() {
            self.disconnect(sound).await;
        }
    }

    /// Some time, in which frames come.
    async fn linger(&self) {
        for _ in 0..LOOKS {
            self.pause().await;
        }
    }

    /// Posts a grant in all receive buffers, and waits until the backend has used it.
    async fn receive_into(&self, rings: &Rings, gref: u32) -> Due {
        rings.fill_receive(gref);
        let had = rings.received();
        let is_used = self.wait_for(|| rings.received().wrapping_sub(had) >= 3).await;
        if is_used { Due::GoOn } else { Due::Failed }
    }

    /// Breaks a rule; what the backend has to do about it.
    async fn strike(&self, name: &str, rings: &mut Rings) -> Due {
        let gref = rings.gref;
        let frame = |flags| Request(gref, 0, flags, FRAME_BYTES);
        let (slots, due) = match name {
            // Indices.
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
            "receive-index-jump-later" | "receive-index-back" => {
                // Both are used before the index is read again.
                if !self.wait_for(|| rings.received() == 2).await {
                    return Due::Failed;
                }
                rings.post(if name == "receive-index-back" { 1 } else { 0x8000_0002 });
                (Vec::new(), Due::Close)
            }
            // Chains of slots.
            "chain-without-end" => (Vec::from([Request(gref, 0, MORE, 4000)]), Due::Close),
            "chain-of-255" => (chain(gref, 255, 4000, 10), Due::Close),
            "chain-of-21" => (chain(gref, 21, 4000, 60), Due::Close),
            "chain-of-19" => (chain(gref, 19, 4000, 60), Due::GoOn),
            "chain-of-18" => (chain(gref, 18, 4000, 60), Due::GoOn),
            "headers-in-18-pieces" => {
                let mut slots = Vec::from([Request(gref, 0, MORE, FRAME_BYTES)]);
                slots.extend((1..17).map(|at| Request(gref, at, MORE, 1)));
                slots.push(Request(gref, 17, 0, FRAME_BYTES - 17));
                (slots, Due::GoOn)
            }
            "buffer-beyond-its-page" => (Vec::from([Request(gref, 4090, 0, 60)]), Due::Close),
            "piece-beyond-its-page" => {
                (Vec::from([Request(gref, 0, MORE, 400), Request(gref, 65535, 0, 200)]), Due::Close)
            }
            "empty" => (Vec::from([Request(gref, 0, 0, 0)]), Due::GoOn),
            "runt" => (Vec::from([Request(gref, 0, 0, 13)]), Due::GoOn),
            "first-piece-empty" => (chain(gref, 2, 200, 200), Due::GoOn),
            "empty-pieces" => (chain(gref, 3, 400, 0), Due::GoOn),
            "last-piece-empty" => (
                Vec::from([Request(gref, 0, MORE, 400), Request(gref, 0, MORE, 100), Request(gref, 0, 0, 0)]),
                Due::GoOn,
            ),
            "pieces-longer-than-the-whole" => (chain(gref, 3, 100, 90), Due::GoOn),
            "whole-longer-than-a-page" => (Vec::from([Request(gref, 0, 0, 65535)]), Due::Close),
            "longest-without-segmentation" => (chain(gref, 16, 65535, 4096), Due::GoOn),
            // Grants.
            "grant-of-nothing" => (Vec::from([Request(NO_GRANT, 0, 0, 60)]), Due::GoOn),
            "grant-beyond-the-table" => (Vec::from([Request(u32::MAX, 0, 0, 60)]), Due::GoOn),
            "grant-of-nothing-in-a-chain" => {
                (Vec::from([Request(gref, 0, MORE, 400), Request(NO_GRANT, 0, 0, 100)]), Due::GoOn)
            }
            "grant-for-another-domain" | "grant-of-no-memory" | "grant-of-a-device" => {
                let grant = match name {
                    "grant-for-another-domain" => self.xen.grant(NO_DOMAIN, rings.page, false),
                    "grant-of-no-memory" => self.xen.grant_frame(self.domain, NO_MEMORY),
                    _ => self.xen.grant_frame(self.domain, APIC),
                };
                let Some(grant) = grant else { return Due::Failed };
                rings.grants.push(grant);
                (Vec::from([Request(grant, 0, 0, 60)]), Due::GoOn)
            }
            "frame-in-the-ring" => (Vec::from([Request(rings.references[0], 0, 0, 60)]), Due::GoOn),
            "revoked-grant" => {
                for _ in 0..20 {
                    let page = self.xen.page();
                    let Some(gref) = self.xen.grant(self.domain, page, true) else { break };
                    rings.push(Request(gref, 0, 0, 60));
                    rings.publish();
                    self.xen.notify(rings.channel);
                    // While it is being copied Xen refuses this.
                    while !self.xen.revoke(gref) {}
                }
                (Vec::new(), Due::GoOn)
            }
            "ring-revoked" => {
                // Xen refuses it as long as the backend has the rings mapped.
                let is_held = rings.references.iter().all(|reference| !self.xen.revoke(*reference));
                (Vec::new(), if is_held { Due::GoOn } else { Due::Failed })
            }
            // Extra infos.
            "extra-of-no-type" => (Vec::from([frame(EXTRA), Info(0, 0, [0; 6])]), Due::Close),
            "extra-of-unknown-type" => (Vec::from([frame(EXTRA), Info(99, 0, [0; 6])]), Due::Close),
            "extra-without-end" => {
                let mut slots = Vec::from([frame(EXTRA | BLANK)]);
                slots.extend((0..6).map(|_| Info(1, 1, [200, 0, 1, 0, 0, 0])));
                (slots, Due::Close)
            }
            "extra-that-does-not-come" => (Vec::from([frame(EXTRA)]), Due::Close),
            "extra-on-a-later-piece" => {
                (Vec::from([Request(gref, 0, MORE, 400), Request(gref, 0, EXTRA, 100)]), Due::GoOn)
            }
            "segments-of-no-bytes" => (Vec::from([frame(EXTRA | BLANK), gso(1, 0)]), Due::Close),
            "segments-of-unknown-kind" => (Vec::from([frame(EXTRA | BLANK), gso(7, 100)]), Due::Close),
            "segments-with-a-sum" => (Vec::from([frame(EXTRA), gso(1, 100)]), Due::GoOn),
            "segments-of-no-tcp" => (Vec::from([frame(EXTRA | BLANK), gso(1, 1)]), Due::GoOn),
            "segments-twice" => {
                (Vec::from([frame(EXTRA | BLANK), Info(1, 1, [200, 0, 1, 0, 0, 0]), gso(2, 100)]), Due::GoOn)
            }
            "segments-of-the-wrong-version" | "segments-of-no-payload" | "segments-of-one-byte" => {
                let (kind, slots, size) = match name {
                    "segments-of-the-wrong-version" => (2, 1, 154),
                    "segments-of-no-payload" => (1, 1, 54),
                    _ => (1, 15, 54 + 60_000),
                };
                let page = self.xen.page();
                page.write_from(&tcp_frame(self.mac, size - 54));
                let Some(grant) = self.xen.grant(self.domain, page, true) else { return Due::Failed };
                rings.grants.push(grant);
                let mut all = chain(grant, slots, size, 4096);
                if let Request(_, _, flags, _) = &mut all[0] {
                    *flags |= EXTRA | BLANK;
                }
                all.insert(1, gso(kind, if name == "segments-of-one-byte" { 1 } else { 100 }));
                (all, Due::GoOn)
            }
            "multicast-flood" => {
                let groups = (0..60u8).flat_map(|at| [Request(0, 0, EXTRA, 0), Info(2, 0, [1, 0, 0x5e, 0, 0, at])]);
                (groups.collect(), Due::GoOn)
            }
            "multicast-request-with-segments" => {
                let add = Info(2, 0, [1, 0, 0x5e, 0, 0, 1]);
                (Vec::from([Request(0, 0, EXTRA | MORE, 0), Info(1, 1, [200, 0, 1, 0, 0, 0]), add]), Due::GoOn)
            }
            // What is not to be written, and what is not to be read twice.
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
            "double-fetch" => {
                // Each request is sound and unsound by turns while the backend may be reading it.
                // Whichever it sees, it must use what it has checked: the frame goes, or the device
                // closes.
                for _ in 0..FLICKERS {
                    if self.state() != CONNECTED {
                        break;
                    }
                    let at = rings.produced;
                    rings.push(rings.sound());
                    rings.publish();
                    self.xen.notify(rings.channel);
                    for bad in
                        [Request(gref, 4090, 0, 4000), Request(NO_GRANT, 0, MORE, 65535), Request(gref, 0, EXTRA, 13)]
                    {
                        for slot in [bad, rings.sound()] {
                            rings.produced = at;
                            rings.push(slot);
                        }
                        let _ = rings.page.write_array(0, [at as u8; 12]);
                    }
                    while rings.answered() != rings.produced && self.state() == CONNECTED {
                        self.net.pause().await;
                    }
                }
                (Vec::new(), Due::Either)
            }
            "bytes-of-responses" => {
                // A response is shorter than its request. What is behind it must still be the
                // request's.
                let index = rings.produced;
                rings.push(rings.sound());
                let asked = rings.slot(index);
                rings.publish();
                self.xen.notify(rings.channel);
                let is_answered = self.wait_for(|| rings.answered() == rings.produced).await;
                let answer = rings.slot(index);
                let is_clean = answer[..2] == asked[8..10] && answer[4..] == asked[4..];
                (Vec::new(), if is_answered && is_clean { Due::GoOn } else { Due::Failed })
            }
            // The receive ring.
            "receive-read-only" => {
                let Some(grant) = self.xen.grant(self.domain, self.xen.page(), true) else { return Due::Failed };
                rings.grants.push(grant);
                (Vec::new(), self.receive_into(rings, grant).await)
            }
            "receive-grant-of-nothing" => (Vec::new(), self.receive_into(rings, NO_GRANT).await),
            "receive-grant-beyond-the-table" => (Vec::new(), self.receive_into(rings, u32::MAX).await),
            "receive-revoked" => {
                let Some(posted) = rings.grants.pop() else { return Due::Failed };
                while !self.xen.revoke(posted) {}
                (Vec::new(), self.receive_into(rings, posted).await)
            }
            "receive-double-fetch" => {
                let (posted, had) = (rings.grants[3], rings.received());
                while rings.received().wrapping_sub(had) < 10 {
                    for gref in [NO_GRANT, posted, u32::MAX, posted] {
                        rings.fill_receive(gref);
                    }
                    self.net.pause().await;
                }
                (Vec::new(), Due::GoOn)
            }
            "receive-into-the-ring" | "receive-into-the-transmit-ring" => {
                // What comes is written over the indices.
                self.wait_for(|| {
                    self.xen.notify(rings.channel);
                    self.state() != CONNECTED
                })
                .await;
                (Vec::new(), Due::Close)
            }
            "receive-nothing" => {
                self.linger().await;
                (Vec::new(), Due::GoOn)
            }
            // Events and XenStore.
            "event-storm" => {
                for _ in 0..STORM {
                    self.xen.notify(rings.channel);
                }
                (Vec::new(), Due::GoOn)
            }
            "channel-closed" => {
                rings.channels.clear();
                self.xen.close(rings.channel);
                (Vec::from([rings.sound()]), Due::Nothing)
            }
            "node-storm" => {
                for _ in 0..NODES {
                    self.write("state", "4");
                }
                (Vec::new(), Due::GoOn)
            }
            "state-flips" => {
                for state in [5, 4, 6, 1, 4, 3, 4, 1, 7, 4].iter().cycle().take(FLIPS as usize) {
                    self.set_state(*state);
                }
                (Vec::new(), Due::Either)
            }
            "unknown-states" => {
                for text in ["3", "7", "8", "9", "-1", "44", "4 ", ""] {
                    self.write("state", text);
                    self.pause().await;
                }
                (Vec::new(), Due::Either)
            }
            "state-removed" => {
                self.xen.remove(&format!("{}/state", crate::DEVICE));
                (Vec::new(), Due::Either)
            }
            "ring-twice" | "two-queues-one-ring" => (Vec::from([rings.sound()]), Due::Either),
            "control-ring-jump" => {
                let _ = self.pages[CONTROL_PAGE].store_u32(REQ_PROD, 0x8000_0000, Ordering::Release);
                self.notify_all(rings);
                (Vec::new(), Due::Close)
            }
            "control-ring-requests" => (Vec::new(), self.ask_control(rings).await),
            other => fail(format_args!("no attack is called {other}")),
        };
        for slot in slots {
            rings.push(slot);
        }
        rings.publish();
        due
    }
}
