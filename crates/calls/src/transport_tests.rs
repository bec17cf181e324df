//! Two sides over a link whose state words and sections are in this process's memory, and over a
//! stream: coming, going, restarting, and breaking the protocol. The handshake is that of
//! [`tombolo_ring::ivshmem::state`].

use std::boxed::Box;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;
use std::vec;
use std::vec::Vec;

use tombolo_ring::ivshmem::state::{Duty, Machine, State};
use tombolo_ring::mem::{Foreign, ForeignMut};
use tombolo_ring::rpc::Broken;

use super::{Sections, Stream, Transport};
use crate::frames::{ENTRIES, Frames};
use crate::sections::Plan;
use crate::session::ServeOptions;
use crate::{CallError, CallOptions, Response};

const OUTPUT_BYTES: usize = 0x7f000;

/// Both state words and both output sections.
struct Region {
    words: [Cell<u32>; 2],
    outputs: [ForeignMut<'static>; 2],
}

/// Peer `id`'s end of the region.
struct End {
    region: Rc<Region>,
    id: usize,
    machine: Machine,
    epoch: u64,
    rings: u32,
}

impl End {
    fn new(region: &Rc<Region>, id: usize) -> End {
        let machine = Machine::new();
        region.words[id].set(machine.own().word());
        End { region: region.clone(), id, machine, epoch: 0, rings: 0 }
    }

    fn theirs(&self) -> u32 {
        self.region.words[1 - self.id].get()
    }
}

impl Sections for End {
    fn follow(&mut self, plan: &Plan) -> Result<bool, Broken> {
        let End { region, id, machine, epoch, .. } = self;
        machine.follow(
            || region.words[1 - *id].get(),
            |word| region.words[*id].set(word),
            |duty| {
                match duty {
                    Duty::Clear => {
                        plan.clear(region.outputs[*id]);
                        *epoch += 1;
                    }
                    Duty::Check => {}
                    Duty::Forget(_) => *epoch += 1,
                }
                Ok(())
            },
        )?;
        Ok(self.machine.may_use_rings())
    }

    fn epoch(&self) -> u64 {
        self.epoch
    }

    fn sections(&self) -> Option<(ForeignMut<'_>, Foreign<'_>)> {
        Some((self.region.outputs[self.id], self.region.outputs[1 - self.id].as_foreign()))
    }

    fn ring(&mut self) {
        self.rings += 1;
    }

    fn fault(&mut self) -> bool {
        self.machine.reset();
        self.region.words[self.id].set(self.machine.own().word());
        self.epoch += 1;
        self.theirs() == State::Reset.word()
    }
}

/// One direction's bytes, and whether its writer has ended.
type Pipe = Rc<RefCell<(Vec<u8>, bool)>>;

struct Pipes {
    from: Pipe,
    to: Pipe,
}

impl Stream for Pipes {
    fn read(&mut self, frames: &mut Frames) -> bool {
        let (bytes, ended) = &mut *self.from.borrow_mut();
        let n = frames.feed(bytes);
        bytes.drain(..n);
        !*ended
    }

    fn write(&mut self, frames: &mut Frames) -> bool {
        self.to.borrow_mut().0.extend_from_slice(frames.output());
        frames.sent(frames.output().len());
        !self.from.borrow().1
    }

    fn close(&mut self) {
        self.to.borrow_mut().1 = true;
    }
}

type Side = Transport<End, Pipes>;

fn region() -> Rc<Region> {
    let section = || {
        let memory = Box::leak(vec![0u8; OUTPUT_BYTES + 4096].into_boxed_slice());
        let skip = memory.as_ptr().align_offset(4096);
        ForeignMut::from(&mut memory[skip..skip + OUTPUT_BYTES])
    };
    Rc::new(Region { words: [Cell::new(0), Cell::new(0)], outputs: [section(), section()] })
}

fn on_link(region: &Rc<Region>, id: usize) -> Side {
    let plan = Plan::new(OUTPUT_BYTES as u64).unwrap();
    let mut side = Transport::on_link(End::new(region, id), plan, &ServeOptions::default());
    side.serve();
    side
}

fn links() -> (Rc<Region>, Side, Side) {
    let region = region();
    let (a, b) = (on_link(&region, 0), on_link(&region, 1));
    (region, a, b)
}

fn streams() -> (Side, Side) {
    let pipes: [Pipe; 2] = Default::default();
    let side = |from: usize| {
        let mut frames = Frames::default();
        let mut stream = Pipes { from: pipes[from].clone(), to: pipes[1 - from].clone() };
        assert!(stream.write(&mut frames));
        (stream, frames)
    };
    let greeted = |(mut stream, mut frames): (Pipes, Frames)| {
        assert!(stream.read(&mut frames));
        assert_eq!(frames.greeted(), Ok(Some(ENTRIES)));
        let mut side = Transport::on_stream(stream, frames, ENTRIES, &ServeOptions::default());
        side.serve();
        side
    };
    let (a, b) = (side(0), side(1));
    (greeted(a), greeted(b))
}

/// Both look until nothing changes, neither for the sessions nor in the states.
fn settle(a: &mut Side, b: &mut Side, now_ns: u64) {
    for _ in 0..20 {
        let words = |a: &Side, b: &Side| [a, b].map(|side| side.link().map(End::theirs));
        let before = words(a, b);
        if !(a.turn(now_ns) | b.turn(now_ns)) && before == words(a, b) {
            return;
        }
    }
    panic!("it never settles");
}

/// One call of `a`'s, served by `b`.
fn call(a: &mut Side, b: &mut Side) -> Result<Vec<u8>, CallError> {
    let token = a.submit(&CallOptions::default(), b"ping", 0)?;
    settle(a, b, 0);
    let request = b.next(0).expect("a request");
    b.respond(&request, Response::new([&request.bytes[..], b" pong"].concat()), 0);
    settle(a, b, 0);
    a.poll(token, 0).expect("an end").map(|reply| reply.bytes)
}

#[test]
fn calls_go_both_ways_over_a_link_and_over_a_stream() {
    let (_region, mut a, mut b) = links();
    assert_eq!(a.submit(&CallOptions::default(), b"", 0), Err(CallError::ProviderGone), "nobody is there yet");
    settle(&mut a, &mut b, 0);
    let (mut c, mut d) = streams();
    for (a, b) in [(&mut a, &mut b), (&mut c, &mut d)] {
        assert!(a.is_up() && b.is_up());
        assert_eq!(call(a, b).unwrap(), b"ping pong");
        assert_eq!(call(b, a).unwrap(), b"ping pong");
        assert!(!a.is_over() && a.arm());
    }
    let rings = |side: &Side| side.link().unwrap().rings;
    let before = rings(&b);
    assert!(a.arm());
    b.submit(&CallOptions::default(), b"", 0).unwrap();
    assert_eq!(rings(&b), before + 1, "a sleeping peer is rung");
    assert!(!a.arm(), "something waits");
}

#[test]
fn a_peer_that_stops_ends_calls_at_once_and_the_next_one_is_served() {
    let (region, mut a, mut b) = links();
    settle(&mut a, &mut b, 0);
    for _ in 0..3 {
        let token = a.submit(&CallOptions::default(), &[7; 5000], 0).unwrap();
        settle(&mut a, &mut b, 0);
        let asked = b.submit(&CallOptions::default(), b"mine", 0).unwrap();
        // It dies, and another one takes its place before anybody looks.
        b = on_link(&region, 1);
        assert_eq!(b.poll(asked, 0), Some(Err(CallError::Unknown)));
        settle(&mut a, &mut b, 0);
        assert_eq!(a.poll(token, 0), Some(Err(CallError::ProviderGone)));
        assert_eq!(a.session().under_way(), 0);
        assert!(a.is_up() && b.is_up());
        assert_eq!(call(&mut a, &mut b).unwrap(), b"ping pong");
        assert_eq!(call(&mut b, &mut a).unwrap(), b"ping pong");
    }
}

#[test]
fn a_peer_that_breaks_the_protocol_has_its_link_reset_and_may_come_again() {
    let (region, mut a, mut b) = links();
    settle(&mut a, &mut b, 0);
    let token = a.submit(&CallOptions::default(), b"x", 0).unwrap();
    // All of its section is nonsense, the headers too.
    region.outputs[1].write_from(&vec![0xa5; OUTPUT_BYTES]);
    assert!(!a.arm() && !a.is_up(), "its index is looked at before a sleep");
    let end = a.poll(token, 0);
    assert!(matches!(end, Some(Err(CallError::Broken(_)))), "{end:?}");
    assert!(!a.is_up() && !a.is_over());
    settle(&mut a, &mut b, 0);
    assert_eq!(call(&mut a, &mut b).unwrap(), b"ping pong");
    // What a peer leaves behind that has stopped is no violation.
    let token = a.submit(&CallOptions::default(), b"x", 0).unwrap();
    region.outputs[1].write_from(&vec![0xa5; OUTPUT_BYTES]);
    region.words[1].set(State::Reset.word());
    assert!(!a.arm() && !a.is_up());
    assert_eq!(a.poll(token, 0), Some(Err(CallError::ProviderGone)));
}

#[test]
fn a_header_of_another_kind_is_found_when_the_link_comes_up() {
    let (region, mut a, mut b) = links();
    // Each takes a step at a time, until b has cleared its section.
    while region.words[1].get() != State::Ready.word() {
        a.turn(0);
        b.turn(0);
    }
    region.outputs[1].write_from(&[0; 8]);
    b.turn(0);
    a.turn(0);
    assert!(!a.is_up());
    assert!(matches!(a.submit(&CallOptions::default(), b"", 0), Err(CallError::ProviderGone)));
    settle(&mut a, &mut b, 0);
    assert!(a.is_up() && b.is_up(), "both clear their sections again");
    assert_eq!(call(&mut a, &mut b).unwrap(), b"ping pong");
}

#[test]
fn a_stream_that_ends_is_over_and_one_that_lies_is_closed() {
    let (mut a, mut b) = streams();
    let (answered, lost) =
        (a.submit(&CallOptions::default(), b"1", 0).unwrap(), a.submit(&CallOptions::default(), b"2", 0).unwrap());
    settle(&mut a, &mut b, 0);
    let request = b.next(0).unwrap();
    b.respond(&request, Response::new(*b"one"), 0);
    b.stream_mut().unwrap().0.close();
    assert!(a.turn(0));
    assert_eq!(a.poll(answered, 0).unwrap().unwrap().bytes, b"one", "what came before the end is an answer");
    assert_eq!(a.poll(lost, 0), Some(Err(CallError::ProviderGone)));
    assert!(a.is_over() && !a.is_up() && !a.turn(0));

    let (mut a, b) = streams();
    let token = a.submit(&CallOptions::default(), b"1", 0).unwrap();
    b.stream().unwrap().0.to.borrow_mut().0.extend_from_slice(&[0xa5; 100]);
    a.turn(0);
    assert!(matches!(a.poll(token, 0), Some(Err(CallError::Broken(_)))));
    assert!(a.is_over() && b.stream().unwrap().0.from.borrow().1, "it was closed");
}

#[test]
fn a_call_ends_at_its_deadline_and_its_slot_comes_back_with_the_answer() {
    let (_region, mut a, mut b) = links();
    settle(&mut a, &mut b, 0);
    let token = a.submit(&CallOptions::within(Duration::from_nanos(100)), b"x", 0).unwrap();
    settle(&mut a, &mut b, 0);
    let request = b.next(0).unwrap();
    assert_eq!(a.poll(token, 99), None);
    assert_eq!(a.poll(token, 100), Some(Err(CallError::DeadlineExceeded)));
    assert_eq!((a.poll(token, 100), a.session().under_way()), (Some(Err(CallError::Unknown)), 1));
    settle(&mut a, &mut b, 101);
    assert!(b.session().is_cancelled(request.id()), "it was cancelled");
    b.respond(&request, Response::new(*b"late"), 101);
    settle(&mut a, &mut b, 102);
    assert_eq!(a.session().under_way(), 0);
}
