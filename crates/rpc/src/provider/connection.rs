//! One client, as the provider sees it.
//!
//! What is taken from the client is under the service's one lock (`intake`). What is answered is
//! under the connection's own (`Replies`), so a worker that has served answers without waiting for
//! any other thread. Lock order: the service's, then a connection's.
//!
//! A slot is FREE, SERVING, or names the queued request by its handle. It is freed *before* the
//! answer is published, since the client may use it again at once.

use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use rustix::net::Shutdown;
use tombolo_ring::mem::ForeignMut;
use tombolo_ring::rpc::arena::{Arena, Unit, units};
use tombolo_ring::rpc::entry::{Answer, Payload, Token};
use tombolo_ring::rpc::ring::Producer;
use tombolo_ring::rpc::{Broken, Ends, Geometry, PUBLISHED};
use tombolo_shm::doorbell::Doorbell;
use tombolo_shm::futex;
use tombolo_shm::memory::Mapping;

use crate::cpu;
use crate::queue::Handle;
use crate::quota::Charge;
use crate::shared::{Given, Lent, SharedBuffer, Taken};
use crate::socket::{self, Received};
use crate::sync::lock;

/// Who a client is, as the kernel says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller {
    /// Process ID in the provider's PID namespace; 0 if it has none there.
    pub pid: u32,
    /// Effective user ID when it connected.
    pub uid: u32,
    /// Effective group ID when it connected.
    pub gid: u32,
}

const FREE: u32 = 0;
const SERVING: u32 = 1;
const QUEUED: u32 = 2;

/// The state of a slot of the client's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ClientSlot {
    Free,
    Serving,
    Queued(Handle),
}

/// A block of the reply arena.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Block {
    pub(crate) id: u32,
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Held {
    offset: u64,
    generation: u32,
    /// When it was sent; `None` while it is being written.
    sent_ns: Option<u64>,
}

/// What goes to the client.
#[derive(Debug)]
struct Replies {
    producer: Producer<Answer>,
    arena: Arena<Vec<Unit>>,
    free: Vec<u32>,
    held: Vec<Held>,
    /// Blocks that are not free.
    out: Vec<u32>,
    given: Given,
}

/// What is called when a request that is being served is cancelled.
#[derive(Default)]
struct Hooks(Vec<(Token, Box<dyn FnOnce() + Send>)>);

impl std::fmt::Debug for Hooks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.0.iter().map(|(token, _)| token)).finish()
    }
}

/// One client.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) caller: Caller,
    pub(crate) doorbell: Doorbell,
    pub(crate) socket: OwnedFd,
    own: Mapping,
    peer: Mapping,
    own_geometry: Geometry,
    peer_geometry: Geometry,
    slots: Vec<AtomicU32>,
    replies: Mutex<Replies>,
    taken: Mutex<Taken>,
    /// For both sections, and their entries.
    _charges: [Charge; 2],
    gone: AtomicBool,
    /// For each slot the turn whose request was last cancelled while it was served.
    cancelled: Vec<AtomicU32>,
    hooks: Mutex<Hooks>,
    /// Whether there may be any, for those who would look in vain.
    hooked: AtomicBool,
    /// The CPU that the client was told last.
    cpu: AtomicU32,
}

impl Connection {
    /// A connection over two sections that were checked against their geometries.
    pub(crate) fn new(
        caller: Caller,
        socket: OwnedFd,
        doorbell: Doorbell,
        own: (Mapping, Geometry),
        peer: (Mapping, Geometry),
        taken: Taken,
        charges: [Charge; 2],
    ) -> Connection {
        let entries = own.1.entries();
        let replies = Replies {
            producer: Producer::default(),
            arena: Arena::new(vec![Unit::default(); units(own.1.arena_bytes())]),
            free: (0..entries).rev().collect(),
            held: vec![Held::default(); entries as usize],
            out: Vec::new(),
            given: Given::default(),
        };
        Connection {
            caller,
            doorbell,
            socket,
            own: own.0,
            peer: peer.0,
            own_geometry: own.1,
            peer_geometry: peer.1,
            slots: (0..entries).map(|_| AtomicU32::new(FREE)).collect(),
            replies: Mutex::new(replies),
            taken: Mutex::new(taken),
            _charges: charges,
            gone: AtomicBool::new(false),
            cancelled: (0..entries).map(|_| AtomicU32::new(0)).collect(),
            hooks: Mutex::default(),
            hooked: AtomicBool::new(false),
            cpu: AtomicU32::new(u32::MAX),
        }
    }

    /// Both sections.
    #[inline]
    pub(crate) fn ends(&self) -> Ends<'_> {
        let own = self.own.view_mut().unwrap_or_else(|| ForeignMut::from(&mut [][..]));
        match Ends::new(own, self.own_geometry, self.peer.view(), self.peer_geometry) {
            Ok(ends) => ends,
            // The handshake mapped both with the sizes of their geometries, and neither can change.
            Err(_) => unreachable!("sections are as large as their geometries"),
        }
    }

    /// Tells the client where we run, where that has changed.
    #[inline]
    pub(crate) fn set_cpu(&self) {
        let cpu = cpu::current();
        // Relaxed: a hint.
        if self.cpu.swap(cpu, Ordering::Relaxed) != cpu {
            self.ends().set_cpu(cpu);
        }
    }

    pub(crate) fn slots(&self) -> u32 {
        self.own_geometry.entries()
    }

    /// The state of a slot below [`Connection::slots`].
    pub(crate) fn slot(&self, slot: u32) -> ClientSlot {
        // Acquire, partner in `set_slot`: what the last user of the slot did is done.
        match self.slots.get(slot as usize).map_or(SERVING, |s| s.load(Ordering::Acquire)) {
            FREE => ClientSlot::Free,
            SERVING => ClientSlot::Serving,
            queued => ClientSlot::Queued(queued - QUEUED),
        }
    }

    pub(crate) fn set_slot(&self, slot: u32, state: ClientSlot) {
        let bits = match state {
            ClientSlot::Free => FREE,
            ClientSlot::Serving => SERVING,
            ClientSlot::Queued(handle) => handle + QUEUED,
        };
        if let Some(slot) = self.slots.get(slot as usize) {
            // Release, partner in `slot`.
            slot.store(bits, Ordering::Release);
        }
    }

    /// Whether the client has gone, or was disconnected.
    pub(crate) fn is_gone(&self) -> bool {
        // Relaxed: a thread that misses it answers into memory that is never read.
        self.gone.load(Ordering::Relaxed)
    }

    /// Ends the connection; the client sees its socket close. True for the first who does.
    pub(crate) fn end(&self) -> bool {
        let first = !self.gone.swap(true, Ordering::Relaxed);
        if first {
            // The other side may have closed already.
            let _ = rustix::net::shutdown(&self.socket, Shutdown::Both);
        }
        first
    }

    /// The client cancels a request that is being served.
    pub(crate) fn note_cancelled(&self, token: Token) {
        if let Some(turn) = self.cancelled.get(token.slot() as usize) {
            // Relaxed: the hooks' lock orders it for who waits to hear; who only looks may miss it.
            turn.store(token.turn(), Ordering::Relaxed);
        }
        self.call_hooks(|of| of == token);
    }

    /// Whether the answer to a request that is being served is no longer awaited.
    pub(crate) fn is_cancelled(&self, token: Token) -> bool {
        let turn = self.cancelled.get(token.slot() as usize);
        self.is_gone() || turn.is_some_and(|turn| turn.load(Ordering::Relaxed) == token.turn())
    }

    /// Has `hook` called when that becomes so; at once where it is so.
    pub(crate) fn on_cancelled(&self, token: Token, hook: Box<dyn FnOnce() + Send>) {
        let mut hooks = lock(&self.hooks);
        if self.is_cancelled(token) {
            drop(hooks);
            return hook();
        }
        hooks.0.push((token, hook));
        self.hooked.store(true, Ordering::Relaxed);
    }

    /// The request is served: its hooks are not called any more.
    #[inline]
    pub(crate) fn served(&self, token: Token) {
        // Relaxed: who has set it for this request is this thread.
        if self.hooked.load(Ordering::Relaxed) {
            let mut hooks = lock(&self.hooks);
            hooks.0.retain(|(of, _)| *of != token);
            self.hooked.store(!hooks.0.is_empty(), Ordering::Relaxed);
        }
    }

    /// Calls hooks, without the lock. One that panics does so for itself: who calls it serves
    /// others.
    pub(crate) fn call_hooks(&self, which: impl Fn(Token) -> bool) {
        let called: Vec<_> = lock(&self.hooks).0.extract_if(.., |(token, _)| which(*token)).collect();
        for (_, hook) in called {
            let _ = catch_unwind(AssertUnwindSafe(hook));
        }
    }

    /// Publishes an answer and wakes the client if it waits.
    ///
    /// # Errors
    /// [`Broken`], where the client took answers that were not published, or uses slots without
    /// taking their answers.
    pub(crate) fn answer(&self, answer: &Answer, inline: &[u8], now: u64) -> Result<(), Broken> {
        let ends = self.ends();
        self.set_slot(answer.token.slot(), ClientSlot::Free);
        let mut replies = lock(&self.replies);
        if !replies.producer.may_answer(ends)? {
            return Err(Broken::Token);
        }
        if let Payload::Arena { block, generation, .. } = answer.payload {
            ends.set_mark(block, generation);
            if let Some(held) = replies.held.get_mut(block as usize) {
                held.sent_ns = Some(now);
            }
        }
        replies.producer.push(ends, answer, inline);
        let wake = replies.producer.publish(ends);
        drop(replies);
        if wake {
            futex::wake(self.own.view(), PUBLISHED);
        }
        Ok(())
    }

    /// A block of the reply arena, to be written and then sent by [`Connection::answer`] or given
    /// back. `None` where there is no room, also after blocks were collected that the client has
    /// given back.
    pub(crate) fn take_block(&self, len: u64) -> Option<Block> {
        let ends = self.ends();
        let mut replies = lock(&self.replies);
        replies.collect(&ends);
        let id = *replies.free.last()?;
        let offset = replies.arena.take(len)?;
        replies.free.pop();
        replies.out.push(id);
        let held = &mut replies.held[id as usize];
        // No side ever writes the mark 0.
        held.generation = held.generation.wrapping_add(1).max(1);
        (held.offset, held.sent_ns) = (offset, None);
        Some(Block { id, offset, len })
    }

    /// The generation with which a block is sent.
    pub(crate) fn generation(&self, block: &Block) -> u32 {
        lock(&self.replies).held[block.id as usize].generation
    }

    /// Where a block is written.
    pub(crate) fn block_view(&self, block: &Block) -> ForeignMut<'_> {
        self.ends().own_payload(block.offset, block.len).unwrap_or_else(|| ForeignMut::from(&mut [][..]))
    }

    /// Gives back a block that is not sent.
    pub(crate) fn give_block(&self, block: Block) {
        let mut replies = lock(&self.replies);
        replies.arena.give(block.offset);
        replies.out.retain(|id| *id != block.id);
        replies.free.push(block.id);
    }

    /// When the oldest reply was sent that the client holds.
    pub(crate) fn oldest_held(&self) -> Option<u64> {
        let ends = self.ends();
        let mut replies = lock(&self.replies);
        replies.collect(&ends);
        replies.out.iter().filter_map(|id| replies.held[*id as usize].sent_ns).min()
    }

    /// Reclaims what the client has held for longer than `ttl_ns`; returns how many blocks.
    pub(crate) fn reclaim(&self, now: u64, ttl_ns: u64) -> u64 {
        let ends = self.ends();
        let mut replies = lock(&self.replies);
        replies.collect(&ends);
        let mut reclaimed = 0;
        let Replies { arena, free, held, out, .. } = &mut *replies;
        out.retain(|id| {
            let held = &mut held[*id as usize];
            let old = held.sent_ns.is_some_and(|sent| now.saturating_sub(sent) > ttl_ns);
            if old {
                held.generation = held.generation.wrapping_add(1).max(1);
                // The client sees that what it copies from now on is not its own any more.
                ends.set_mark(*id, held.generation);
                arena.give(held.offset);
                free.push(*id);
                reclaimed += 1;
            }
            !old
        });
        reclaimed
    }

    /// Hands memory over to the client, once.
    pub(crate) fn give(&self, buffer: &SharedBuffer) -> Result<(), rustix::io::Errno> {
        lock(&self.replies).given.give(&self.socket, buffer)
    }

    /// Memory that the client has handed over. What it sent before the request that names it has
    /// been read by then.
    pub(crate) fn memory(&self, number: u32) -> Option<Arc<Lent>> {
        let mut taken = lock(&self.taken);
        if let Some(memory) = taken.get(number) {
            return Some(memory);
        }
        self.read(&mut taken);
        taken.get(number)
    }

    /// Reads what the client has sent. False where the connection is at its end.
    pub(crate) fn read_messages(&self) -> bool {
        let mut taken = lock(&self.taken);
        self.read(&mut taken)
    }

    fn read(&self, taken: &mut Taken) -> bool {
        // A client that sends without end must not keep us here.
        for _ in 0..2 * crate::shared::MAX_MEMORIES {
            match socket::receive(&self.socket, false) {
                Received::Nothing => return true,
                Received::Message(message, fds) if taken.message(&message, &fds) => {}
                Received::Message(..) | Received::Malformed(_) | Received::Gone => return false,
            }
        }
        true
    }

    /// The token's slot exists: entries are checked when they are read.
    pub(crate) fn is_free(&self, token: Token) -> bool {
        self.slot(token.slot()) == ClientSlot::Free
    }
}

impl Replies {
    /// Reclaims the blocks that the client has marked as read.
    fn collect(&mut self, ends: &Ends<'_>) {
        let Replies { arena, free, held, out, .. } = self;
        out.retain(|id| {
            let held = held[*id as usize];
            let back = held.sent_ns.is_some() && ends.peer_mark(*id) == held.generation;
            if back {
                arena.give(held.offset);
                free.push(*id);
            }
            !back
        });
    }
}
