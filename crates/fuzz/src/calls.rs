//! Calls with deadlines between two machines: one side, over the sections of a link and over a
//! stream. What the peer writes ends its link at most; the side's own books stay right.

use tombolo_calls::carrier::Carrier;
use tombolo_calls::frames::{self, Frames};
use tombolo_calls::hello;
use tombolo_calls::sections::{Plan, Rings};
use tombolo_calls::session::{ServeOptions, Session};
use tombolo_calls::{CallError, CallOptions, Request, Response};
use tombolo_ring::mem::ForeignMut;
use tombolo_ring::rpc::Broken;
use tombolo_ring::rpc::entry::{Status, Token};

use crate::{Behaviour, records};

/// An output section: six pages, the fewest that hold calls. Ours first, then the peer's.
const OUTPUT_BYTES: usize = 0x6000;

/// One side and what it holds.
struct Side {
    session: Session,
    tokens: Vec<Token>,
    requests: Vec<Request>,
    entries: u32,
    now: u64,
}

impl Side {
    fn new(entries: u32) -> Side {
        let mut session = Session::new(entries, &ServeOptions { admission: true, ..ServeOptions::default() });
        session.serve();
        Side { session, tokens: Vec::new(), requests: Vec::new(), entries, now: 0 }
    }

    /// What the low bits of `step` say, over `way`.
    fn step(&mut self, step: u8, bytes: &[u8], way: &mut dyn Carrier, behaviour: &mut Behaviour) -> Result<(), Broken> {
        self.now += u64::from(step >> 4) * 1_000_000;
        match step & 15 {
            0..5 => behaviour.note(self.session.drain(way, self.now)?),
            5..8 => {
                let next = self.session.next(way, self.now)?;
                if let Some(request) = &next {
                    assert!(request.bytes.len() <= way.most().max(200), "{} bytes", request.bytes.len());
                    behaviour.note_size(request.bytes.len());
                }
                self.requests.extend(next);
            }
            8 | 9 => {
                if let Some(request) = self.requests.pop() {
                    let reply = Response::new(bytes.repeat(1 + usize::from(step >> 5))).with_code(1);
                    let response = if step & 1 == 0 { reply } else { Response::end(Status::Failed) };
                    self.session.respond(way, &request, self.now, response)?;
                }
            }
            10..13 => {
                let options = CallOptions::default();
                let sent = self.session.submit(way, &options, &bytes.repeat(1 + usize::from(step >> 6)), self.now);
                behaviour.note(sent.as_ref().map_err(std::mem::discriminant).map(|_| ()));
                match sent {
                    Ok(token) => self.tokens.push(token),
                    Err(CallError::Broken(broken)) => return Err(broken),
                    Err(_) => {}
                }
            }
            13 => {
                if let Some(token) = self.tokens.last() {
                    behaviour.note(self.session.cancel(way, *token)?);
                }
            }
            14 => {
                if let Some(token) = self.tokens.pop() {
                    self.session.abandon(token);
                }
            }
            _ => behaviour.note(way.arm()?),
        }
        self.fetch(behaviour);
        let session = &self.session;
        let (pending, under_way) = (session.pending(), session.under_way());
        assert!(pending + self.requests.len() <= self.entries as usize * 2 && under_way <= self.entries as usize);
        Ok(())
    }

    /// Takes what has ended; each call does, once.
    fn fetch(&mut self, behaviour: &mut Behaviour) {
        let session = &mut self.session;
        self.tokens.retain(|token| match session.fetch(*token, None) {
            None => true,
            Some(end) => {
                behaviour.note(end.as_ref().map(|reply| reply.code).map_err(std::mem::discriminant));
                assert!(end != Err(CallError::Unknown), "a call that ended twice");
                false
            }
        });
    }

    /// The link restarts: each call that is under way ends.
    fn lost(&mut self, broken: Broken, behaviour: &mut Behaviour) {
        behaviour.note(std::mem::discriminant(&broken));
        // What was answered before the peer was found out has its own end.
        self.fetch(behaviour);
        self.session.lost(CallError::Broken(broken));
        for token in self.tokens.drain(..) {
            assert_eq!(self.session.fetch(token, None), Some(Err(CallError::Broken(broken))));
        }
        for request in self.requests.drain(..) {
            self.session.forget(&request);
        }
        assert_eq!((self.session.under_way(), self.session.pending()), (0, 0));
    }
}

/// The flags of each record say what our side does; before that its bytes are written over both
/// output sections at the place that its first two name, our own included, as a v1 guest can.
pub fn calls_link(input: &[u8], behaviour: &mut Behaviour) {
    let mut bytes = vec![0u8; 2 * OUTPUT_BYTES + 4096];
    let skip = bytes.as_ptr().align_offset(4096);
    let region = ForeignMut::from(&mut bytes[skip..skip + 2 * OUTPUT_BYTES]);
    let (Some(own), Some(peer)) = (region.slice(0, OUTPUT_BYTES), region.slice(OUTPUT_BYTES, OUTPUT_BYTES)) else {
        panic!("two sections")
    };
    let Some(plan) = Plan::new(OUTPUT_BYTES as u64) else { panic!("six pages hold calls") };
    plan.clear(own);
    plan.clear(peer);
    let mut side = Side::new(plan.entries());
    let mut rings = Rings::new(plan);
    for (step, write) in records(input) {
        let mut payload = write;
        if let Some((&place, bytes)) = write.split_first_chunk() {
            region.skip(usize::from(u16::from_be_bytes(place)) % region.len()).write_from(bytes);
            payload = bytes;
        }
        let done = rings.on(own, peer.as_foreign()).and_then(|mut wire| {
            behaviour.note(wire.check_peer().is_ok());
            side.step(step, payload, &mut wire, behaviour)
        });
        behaviour.note(rings.take_ring());
        if let Err(broken) = done {
            side.lost(broken, behaviour);
            plan.clear(own);
            plan.clear(peer);
            rings = Rings::new(plan);
        }
    }
}

/// The bytes of each record come from the peer, as many at a time as are wanted; its flags say what
/// our side does then, and how much of what it has to say is sent. A peer that is found out is
/// followed by the next one.
pub fn calls_stream(input: &[u8], behaviour: &mut Behaviour) {
    let mut side = Side::new(frames::ENTRIES);
    let mut frames = Frames::default();
    for (step, mut bytes) in records(input) {
        let payload = bytes;
        loop {
            let n = frames.feed(bytes);
            bytes = &bytes[n..];
            let done = frames.greeted().and_then(|greeted| {
                behaviour.note(greeted);
                if greeted.is_some() { side.step(step, payload, &mut frames, behaviour) } else { Ok(()) }
            });
            if let Err(broken) = done {
                side.lost(broken, behaviour);
                frames = Frames::default();
                break;
            }
            behaviour.note_size(frames.output().len());
            frames.sent(frames.output().len() * usize::from(step >> 6) / 3);
            if n == 0 || bytes.is_empty() {
                break;
            }
        }
    }
}

/// What two machines say before calls, as either side reads it: byte by byte, as it may arrive.
pub fn calls_hello(input: &[u8], behaviour: &mut Behaviour) {
    let mut named = None;
    for n in 0..=input.len().min(hello::MAX_HELLO_BYTES + 1) {
        let read = hello::parse_hello(&input[..n]);
        behaviour.note(read.as_ref().map(|name| name.as_ref().map(String::len)).map_err(std::mem::discriminant));
        if let Ok(Some(name)) = &read {
            // It is the same hello again, and nothing shorter was one.
            assert_eq!(hello::hello(name).as_deref(), Ok(&input[..n]));
            assert!(named.replace(n).is_none(), "read twice");
        }
        if read.is_err() {
            break;
        }
    }
    let verdict = hello::parse_verdict(input);
    behaviour.note(verdict);
    if let Ok(Some(verdict)) = verdict {
        assert_eq!(hello::verdict(verdict), input[..hello::VERDICT_BYTES]);
    }
}
