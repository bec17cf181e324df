//! Calls over the sections of a link: each peer's output section holds its client section and its
//! provider section, so that calls go both ways, and every byte has one writer.
//!
//! ```text
//!   output of peer a                         output of peer b
//!   0      client section: a's requests      0      client section: b's requests
//!   half   provider section: a's answers     half   provider section: b's answers
//! ```
//!
//! Each of the four is a section of [`tombolo_ring::rpc`], byte for byte. Nothing is agreed on: the
//! geometry follows from the length of the output sections ([`Plan`]), and the header of each
//! section has to say the same. Payloads that do not fit an entry are copied into the arena of
//! their writer and out of it; memory is never handed over.
//!
//! When the peers may look at the sections is for the link's states to say
//! (`tombolo_ring::ivshmem::state`): a peer clears its own ([`Plan::clear`]) while the other does
//! not look, and both start at zero. Doorbells are the caller's: [`Wire`] says when to ring.

use alloc::vec;
use alloc::vec::Vec;
use core::ops::Range;

use tombolo_ring::mem::{Foreign, ForeignMut};
use tombolo_ring::rpc::arena::{Arena, Unit, units};
use tombolo_ring::rpc::entry::{Answer, Ask, Call, Payload};
use tombolo_ring::rpc::ring::{Consumer, Producer};
use tombolo_ring::rpc::{Broken, Ends, Geometry, INLINE_BYTES, MIN_ARENA_BYTES, Role, initialise};

use crate::carrier::{Carrier, Message};

/// Calls that one peer may have under way on a link of common size.
const ENTRIES: u32 = 64;
/// On the smallest.
const FEWEST_ENTRIES: u32 = 8;
/// Halves begin where a page does.
const PAGE_BYTES: u64 = 4096;

/// How an output section is cut; the same on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    geometry: Geometry,
    half: usize,
}

impl Plan {
    /// For output sections of so many bytes: as many entries as fit, up to 64, and the largest
    /// arena beside them. `None` where they are too small for eight entries with an arena of 4 KiB
    /// in each direction (24 KiB).
    pub fn new(output_bytes: u64) -> Option<Plan> {
        let half = output_bytes / 2 / PAGE_BYTES * PAGE_BYTES;
        let fits = |entries, arena| Geometry::new(entries, arena).filter(|g| g.section_bytes() <= half);
        let mut entries = ENTRIES;
        while fits(entries, MIN_ARENA_BYTES).is_none() {
            entries /= 2;
            if entries < FEWEST_ENTRIES {
                return None;
            }
        }
        let mut arena = MIN_ARENA_BYTES;
        while let Some(larger) = fits(entries, arena * 2) {
            arena = larger.arena_bytes();
        }
        Some(Plan { geometry: fits(entries, arena)?, half: usize::try_from(half).ok()? })
    }

    /// Entries of each ring: calls that one peer may have under way.
    pub fn entries(&self) -> u32 {
        self.geometry.entries()
    }

    fn client(&self) -> Range<usize> {
        0..self.half
    }

    fn provider(&self) -> Range<usize> {
        self.half..2 * self.half
    }

    /// Where we ask and where we answer.
    fn ends<'a>(&self, own: ForeignMut<'a>, peer: Foreign<'a>) -> Result<[Ends<'a>; 2], Broken> {
        let ends = |ours: Range<usize>, theirs: Range<usize>| {
            let own = own.slice(ours.start, ours.len()).ok_or(Broken::Short)?;
            let peer = peer.slice(theirs.start, theirs.len()).ok_or(Broken::Short)?;
            Ends::new(own, self.geometry, peer, self.geometry)
        };
        Ok([ends(self.client(), self.provider())?, ends(self.provider(), self.client())?])
    }

    /// Checks the headers of the peer's sections, once in each epoch of the link.
    ///
    /// # Errors
    /// [`Broken::Header`], [`Broken::Short`].
    pub fn check_peer(&self, own: ForeignMut<'_>, peer: Foreign<'_>) -> Result<(), Broken> {
        let [client, provider] = self.ends(own, peer)?;
        client.check_peer(Role::Provider)?;
        provider.check_peer(Role::Client)
    }

    /// Makes the own output section fresh: control words and rings zero, headers written. The peer
    /// does not look at it.
    pub fn clear(&self, own: ForeignMut<'_>) {
        for (range, role) in [(self.client(), Role::Client), (self.provider(), Role::Provider)] {
            let Some(section) = own.slice(range.start, range.len()) else { continue };
            let mut at = 0;
            while at < self.geometry.arena() {
                at += section.skip(at).write_from(&[0; PAGE_BYTES as usize]);
            }
            initialise(section, self.geometry, role);
        }
    }
}

/// A block of the reply arena that the peer has not given back.
#[derive(Clone, Copy, Debug, Default)]
struct Held {
    offset: u64,
    generation: u32,
}

/// Where this side is in the four rings, and the books of its two arenas. It belongs to one life of
/// the link.
#[derive(Debug)]
pub struct Rings {
    plan: Plan,
    asks: Producer<Ask>,
    answers: Consumer<Answer>,
    requests: Consumer<Ask>,
    replies: Producer<Answer>,
    ask_arena: Arena<Vec<Unit>>,
    /// The request's block of each of our slots.
    asked: Vec<Option<u64>>,
    reply_arena: Arena<Vec<Unit>>,
    held: Vec<Held>,
    free: Vec<u32>,
    out: Vec<u32>,
    ring: bool,
}

impl Rings {
    /// Both ends at the start of cleared sections.
    pub fn new(plan: Plan) -> Rings {
        let entries = plan.entries();
        let arena = || Arena::new(vec![Unit::default(); units(plan.geometry.arena_bytes())]);
        Rings {
            plan,
            asks: Producer::default(),
            answers: Consumer::default(),
            requests: Consumer::default(),
            replies: Producer::default(),
            ask_arena: arena(),
            asked: vec![None; entries as usize],
            reply_arena: arena(),
            held: vec![Held::default(); entries as usize],
            free: (0..entries).rev().collect(),
            out: Vec::new(),
            ring: false,
        }
    }

    /// Whether the peer is to be rung for what was written since the last question.
    #[must_use = "a sleeping peer keeps sleeping if its doorbell is not rung"]
    pub fn take_ring(&mut self) -> bool {
        core::mem::take(&mut self.ring)
    }

    /// The rings in `own` and `peer`, the output sections of both.
    ///
    /// # Errors
    /// [`Broken::Short`] where a section is shorter than the plan.
    pub fn on<'a>(&'a mut self, own: ForeignMut<'a>, peer: Foreign<'a>) -> Result<Wire<'a>, Broken> {
        let [client, provider] = self.plan.ends(own, peer)?;
        Ok(Wire { rings: self, client, provider })
    }
}

/// [`Rings`] with their memory, for one operation.
#[derive(Debug)]
pub struct Wire<'a> {
    rings: &'a mut Rings,
    /// We ask.
    client: Ends<'a>,
    /// We answer.
    provider: Ends<'a>,
}

impl Wire<'_> {
    /// Checks the headers of the peer's sections, once in each life of the link.
    ///
    /// # Errors
    /// [`Broken::Header`].
    pub fn check_peer(&self) -> Result<(), Broken> {
        self.client.check_peer(Role::Provider)?;
        self.provider.check_peer(Role::Client)
    }

    /// Reclaims the blocks that the peer has marked as read.
    fn collect(&mut self) {
        let Rings { reply_arena, held, free, out, .. } = &mut *self.rings;
        out.retain(|id| {
            let Held { offset, generation } = held[*id as usize];
            let back = self.provider.peer_mark(*id) == generation;
            if back {
                reply_arena.give(offset);
                free.push(*id);
            }
            !back
        });
    }

    fn take_request(&mut self, inline: &mut [u8; INLINE_BYTES]) -> Result<Option<Message>, Broken> {
        let Some(ask) = self.rings.requests.take(self.provider, inline)? else { return Ok(None) };
        Ok(Some(match ask {
            Ask::Cancel(token) => Message::Cancel(token),
            Ask::Call(call) => Message::Call(call, copy(&call.payload, inline, self.provider)?),
        }))
    }

    fn take_answer(&mut self, inline: &mut [u8; INLINE_BYTES]) -> Result<Option<Message>, Broken> {
        let Some(answer) = self.rings.answers.take(self.client, inline)? else { return Ok(None) };
        let bytes = copy(&answer.payload, inline, self.client)?;
        if let Payload::Arena { block, generation, .. } = answer.payload {
            self.client.set_mark(block, generation);
        }
        if let Some(block) = self.rings.asked.get_mut(answer.token.slot() as usize).and_then(Option::take) {
            self.rings.ask_arena.give(block);
        }
        Ok(Some(Message::Answer(answer, bytes)))
    }
}

/// A payload's bytes. What the peer does to them after this has no effect.
fn copy(payload: &Payload, inline: &[u8; INLINE_BYTES], ends: Ends<'_>) -> Result<Vec<u8>, Broken> {
    match *payload {
        Payload::Inline { len } => Ok(inline.get(..len as usize).ok_or(Broken::Inline)?.to_vec()),
        Payload::Arena { offset, len, .. } => {
            let view = ends.peer_payload(offset, len).ok_or(Broken::Arena)?;
            let mut bytes = vec![0; view.len()];
            view.read_into(&mut bytes);
            Ok(bytes)
        }
        // No descriptor goes over a link.
        Payload::Shared { .. } => Err(Broken::Payload),
    }
}

impl Carrier for Wire<'_> {
    fn most(&self) -> usize {
        self.rings.plan.geometry.arena_bytes() as usize
    }

    fn ask(&mut self, ask: Ask, bytes: &[u8]) -> Result<bool, Broken> {
        if !self.rings.asks.has_room(self.client)? {
            return Ok(false);
        }
        let (ask, inline) = match ask {
            Ask::Call(call) if bytes.len() > INLINE_BYTES => {
                let Some(offset) = self.rings.ask_arena.take(bytes.len() as u64) else { return Ok(false) };
                let len = bytes.len() as u64;
                if let Some(to) = self.client.own_payload(offset, len) {
                    to.write_from(bytes);
                }
                if let Some(asked) = self.rings.asked.get_mut(call.token.slot() as usize) {
                    *asked = Some(offset);
                }
                (Ask::Call(Call { payload: Payload::Arena { offset, len, block: 0, generation: 0 }, ..call }), &[][..])
            }
            Ask::Call(call) => {
                (Ask::Call(Call { payload: Payload::Inline { len: bytes.len() as u32 }, ..call }), bytes)
            }
            cancel => (cancel, &[][..]),
        };
        self.rings.asks.push(self.client, &ask, inline);
        self.rings.ring |= self.rings.asks.publish(self.client);
        Ok(true)
    }

    fn answer(&mut self, answer: Answer, bytes: &[u8]) -> Result<bool, Broken> {
        if !self.rings.replies.has_room(self.provider)? {
            // It asked again before it took the answers to what it had asked.
            return Err(Broken::Token);
        }
        let (payload, inline) = if bytes.len() > INLINE_BYTES {
            self.collect();
            let len = bytes.len() as u64;
            let Some(block) = self.rings.free.last().copied() else { return Ok(false) };
            let Some(offset) = self.rings.reply_arena.take(len) else { return Ok(false) };
            self.rings.free.pop();
            self.rings.out.push(block);
            let held = &mut self.rings.held[block as usize];
            // No side ever writes the mark 0.
            held.generation = held.generation.wrapping_add(1).max(1);
            held.offset = offset;
            let generation = held.generation;
            self.provider.set_mark(block, generation);
            if let Some(to) = self.provider.own_payload(offset, len) {
                to.write_from(bytes);
            }
            (Payload::Arena { offset, len, block, generation }, &[][..])
        } else {
            (Payload::Inline { len: bytes.len() as u32 }, bytes)
        };
        self.rings.replies.push(self.provider, &Answer { payload, ..answer }, inline);
        self.rings.ring |= self.rings.replies.publish(self.provider);
        Ok(true)
    }

    fn take(&mut self) -> Result<Option<Message>, Broken> {
        let mut inline = [0; INLINE_BYTES];
        // Answers first: their callers have waited for longer.
        if let Some(answer) = self.take_answer(&mut inline)? {
            self.rings.answers.took(self.client);
            return Ok(Some(answer));
        }
        let request = self.take_request(&mut inline)?;
        if request.is_some() {
            self.rings.requests.took(self.provider);
        }
        Ok(request)
    }

    fn arm(&mut self) -> Result<bool, Broken> {
        let answers = self.rings.answers.arm(self.client)?;
        Ok(self.rings.requests.arm(self.provider)? && answers)
    }
}
