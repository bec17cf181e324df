//! Two sides over the sections of a link, and over a stream: what each call ends with, what is
//! lost, what a hostile peer can do.

use std::boxed::Box;
use std::time::Duration;
use std::vec;
use std::vec::Vec;

use proptest::prelude::*;
use tombolo_ring::mem::{Foreign, ForeignMut};
use tombolo_ring::rpc::Broken;
use tombolo_ring::rpc::entry::{Answer, Ask, Call, Payload, Refusal, Status, Token};

use crate::carrier::{Carrier, Message};
use crate::frames::Frames;
use crate::schedule::Late;
use crate::sections::{Plan, Rings, Wire};
use crate::session::{ServeOptions, Session};
use crate::{CallError, CallOptions, Deadline, Reply, Response};

const MS: u64 = 1_000_000;
/// Of a direct link of 1 MiB for two.
const OUTPUT_BYTES: usize = 0x7f000;

/// Zeroed memory, aligned as sections are. Tests end, so it is never given back.
fn region(bytes: usize) -> ForeignMut<'static> {
    let memory = Box::leak(vec![0u8; bytes + 4096].into_boxed_slice());
    let skip = memory.as_ptr().align_offset(4096);
    ForeignMut::from(&mut memory[skip..skip + bytes])
}

/// What takes messages to the other side. Both ways are tested by the same tests.
enum Transport {
    Link(Box<Rings>, ForeignMut<'static>, Foreign<'static>),
    Stream(Frames),
}

struct Side {
    session: Session,
    /// When it last took what had come.
    now: u64,
    transport: Transport,
}

impl Side {
    fn wire(&mut self) -> (&mut Session, Wire<'_>) {
        let Transport::Link(rings, own, peer) = &mut self.transport else { panic!("no link") };
        (&mut self.session, rings.on(*own, *peer).unwrap())
    }

    fn submit(&mut self, options: &CallOptions, bytes: &[u8]) -> Result<Token, CallError> {
        match &mut self.transport {
            Transport::Link(rings, own, peer) => {
                self.session.submit(&mut rings.on(*own, *peer).unwrap(), options, bytes, self.now)
            }
            Transport::Stream(frames) => self.session.submit(frames, options, bytes, self.now),
        }
    }

    fn cancel(&mut self, token: Token) -> bool {
        match &mut self.transport {
            Transport::Link(rings, own, peer) => self.session.cancel(&mut rings.on(*own, *peer).unwrap(), token),
            Transport::Stream(frames) => self.session.cancel(frames, token),
        }
        .unwrap()
    }

    fn drain(&mut self, now: u64) -> Result<bool, Broken> {
        self.now = now;
        match &mut self.transport {
            Transport::Link(rings, own, peer) => self.session.drain(&mut rings.on(*own, *peer)?, now),
            Transport::Stream(frames) => {
                frames.greeted()?;
                self.session.drain(frames, now)
            }
        }
    }

    fn next(&mut self, now: u64) -> Option<crate::Request> {
        match &mut self.transport {
            Transport::Link(rings, own, peer) => self.session.next(&mut rings.on(*own, *peer).unwrap(), now),
            Transport::Stream(frames) => self.session.next(frames, now),
        }
        .unwrap()
    }

    fn respond(&mut self, request: &crate::Request, now: u64, response: Response) {
        match &mut self.transport {
            Transport::Link(rings, own, peer) => {
                self.session.respond(&mut rings.on(*own, *peer).unwrap(), request, now, response)
            }
            Transport::Stream(frames) => self.session.respond(frames, request, now, response),
        }
        .unwrap()
    }

    /// Serves what waits by `with`; the requests in the order in which they were served.
    fn serve(&mut self, now: u64, with: impl Fn(&[u8]) -> Response) -> Vec<Vec<u8>> {
        let mut order = Vec::new();
        while let Some(request) = self.next(now) {
            self.respond(&request, now, with(&request.bytes));
            order.push(request.bytes);
        }
        order
    }
}

/// Two sides and what is between them.
struct Pair {
    a: Side,
    b: Side,
}

/// Moves bytes from one stream to the other.
fn carry(from: &mut Side, to: &mut Side) {
    if let (Transport::Stream(from), Transport::Stream(to)) = (&mut from.transport, &mut to.transport) {
        let n = to.feed(from.output());
        from.sent(n);
    }
}

impl Pair {
    fn link(options: &ServeOptions) -> Pair {
        let plan = Plan::new(OUTPUT_BYTES as u64).unwrap();
        let (own, peer) = (region(OUTPUT_BYTES), region(OUTPUT_BYTES));
        plan.clear(own);
        plan.clear(peer);
        let side = |own: ForeignMut<'static>, peer: ForeignMut<'static>| Side {
            now: 0,
            session: Session::new(plan.entries(), options),
            transport: Transport::Link(Box::new(Rings::new(plan)), own, peer.as_foreign()),
        };
        let mut pair = Pair { a: side(own, peer), b: side(peer, own) };
        pair.a.wire().1.check_peer().unwrap();
        pair.serve()
    }

    fn stream(options: &ServeOptions) -> Pair {
        let side = || Side {
            now: 0,
            session: Session::new(crate::frames::ENTRIES, options),
            transport: Transport::Stream(Frames::default()),
        };
        let mut pair = Pair { a: side(), b: side() };
        pair.turn(0);
        pair.serve()
    }

    fn serve(mut self) -> Pair {
        self.a.session.serve();
        self.b.session.serve();
        self
    }

    fn both(options: &ServeOptions) -> [Pair; 2] {
        [Pair::link(options), Pair::stream(options)]
    }

    /// Everything that was sent arrives.
    fn turn(&mut self, now: u64) {
        loop {
            carry(&mut self.a, &mut self.b);
            carry(&mut self.b, &mut self.a);
            let a = self.a.drain(now).unwrap();
            if !(self.b.drain(now).unwrap() | a) {
                break;
            }
        }
    }

    fn result(&mut self, token: Token) -> Option<Result<Reply, CallError>> {
        self.a.session.fetch(token, None)
    }
}

fn echo(bytes: &[u8]) -> Response {
    Response::new(bytes)
}

fn within(ms: u64) -> CallOptions {
    CallOptions::within(Duration::from_millis(ms))
}

#[test]
fn calls_go_both_ways_and_bytes_of_any_length_come_back() {
    for mut pair in Pair::both(&ServeOptions::default()) {
        for len in [0, 1, 192, 193, 4096, 100_000, 128 << 10] {
            let bytes: Vec<u8> = (0..len).map(|i| (i * 7) as u8).collect();
            let there = pair.a.submit(&within(5), &bytes).unwrap();
            let back = pair.b.submit(&CallOptions::default(), &bytes).unwrap();
            pair.turn(MS);
            assert!(pair.result(there).is_none());
            assert_eq!(pair.b.serve(MS, |b| echo(b).with_code(3)), [&bytes[..]]);
            assert_eq!(pair.a.serve(MS, echo).len(), 1);
            pair.turn(2 * MS);
            let reply = pair.result(there).unwrap().unwrap();
            assert_eq!((reply.bytes.len(), reply.code), (len, 3));
            assert!(reply.bytes == bytes);
            assert!(pair.b.session.fetch(back, None).unwrap().is_ok_and(|r| r.bytes == bytes));
            assert_eq!(pair.result(there), Some(Err(CallError::Unknown)), "an answer is fetched once");
        }
        let too_long = vec![0; (128 << 10) + 1];
        let refused = pair.a.submit(&within(5), &too_long);
        assert_eq!(refused, Err(CallError::TooLong { bytes: too_long.len(), most: 128 << 10 }));
        assert_eq!((pair.a.session.under_way(), pair.b.session.under_way()), (0, 0));
    }
}

#[test]
fn the_earliest_deadline_is_served_first_and_the_late_are_told() {
    for mut pair in Pair::both(&ServeOptions::default()) {
        let names: [(&[u8], CallOptions); 6] = [
            (b"any", CallOptions::default()),
            (b"c", within(30)),
            (b"a", within(10)),
            (b"b", within(20)),
            (b"lost", CallOptions { wait_late: Duration::MAX, ..within(1) }),
            (b"lost too", within(1)),
        ];
        let tokens = names.map(|(name, options)| pair.a.submit(&options, name).unwrap());
        pair.turn(1000 * MS);
        // Two milliseconds of somebody else's service later.
        assert_eq!(pair.b.serve(1002 * MS, echo), [&b"a"[..], b"b", b"c", b"any"]);
        pair.turn(1003 * MS);
        let results = tokens.map(|token| pair.result(token).unwrap());
        assert_eq!(results.iter().filter(|r| r.is_ok()).count(), 4);
        assert_eq!(results[4], Err(CallError::Late));
        assert_eq!(results[5], Err(CallError::DeadlineExceeded));
        assert_eq!(results[2].as_ref().unwrap().queued_ns, 2 * MS);
    }
}

#[test]
fn a_request_of_whose_deadline_nothing_is_left_is_answered_at_once() {
    for mut pair in Pair::both(&ServeOptions::default()) {
        let nothing = CallOptions { deadline: Deadline::At(0), wait_late: Duration::MAX, ..CallOptions::default() };
        let late = pair.a.submit(&nothing, b"late").unwrap();
        pair.turn(5 * MS);
        // The answer waits for no thread that serves, and none gets the request in the same instant.
        assert!(pair.b.next(5 * MS).is_none());
        assert_eq!((pair.result(late), pair.b.session.stats().late), (Some(Err(CallError::Late)), 1));
    }
    let options = ServeOptions { late: Late::BestEffort, ..ServeOptions::default() };
    for mut pair in Pair::both(&options) {
        pair.a.submit(&within(0), b"late").unwrap();
        pair.turn(5 * MS);
        assert_eq!(pair.b.serve(5 * MS, echo), [b"late"]);
    }
}

#[test]
fn the_deadline_crosses_as_time_left_whatever_the_clocks_say() {
    for mut pair in Pair::both(&ServeOptions::default()) {
        pair.a.submit(&within(10), b"x").unwrap();
        pair.turn(77_000 * MS);
        let request = pair.b.next(77_004 * MS).unwrap();
        assert_eq!(request.deadline_ns, 77_010 * MS);
        assert_eq!(request.left_ns(77_004 * MS), Some(6 * MS));
        let nested = CallOptions::inherit(&request, 77_004 * MS);
        assert_eq!(nested.deadline, Deadline::In(Duration::from_millis(6)));
        pair.a.submit(&CallOptions::default(), b"y").unwrap();
        pair.turn(77_005 * MS);
        assert_eq!(pair.b.next(77_005 * MS).unwrap().left_ns(0), None);
    }
}

#[test]
fn what_is_cancelled_while_it_is_served_is_known_and_what_is_left_to_live_too() {
    for mut pair in Pair::both(&ServeOptions::default()) {
        let lives = CallOptions { ttl: Some(Duration::from_millis(50)), ..CallOptions::default() };
        let (a, b) = (pair.a.submit(&lives, b"a").unwrap(), pair.a.submit(&CallOptions::default(), b"b").unwrap());
        pair.turn(0);
        let (first, second) = (pair.b.next(20 * MS).unwrap(), pair.b.next(20 * MS).unwrap());
        assert_eq!((first.ttl_left(), second.ttl_left()), (Some(Duration::from_millis(30)), None));
        assert!(pair.a.cancel(a));
        pair.turn(21 * MS);
        let cancelled = |pair: &Pair| [&first, &second].map(|r| pair.b.session.is_cancelled(r.id()));
        assert_eq!(cancelled(&pair), [true, false]);
        pair.b.respond(&first, 22 * MS, Response::end(Status::Cancelled));
        pair.turn(22 * MS);
        assert_eq!(pair.result(a), Some(Err(CallError::Cancelled)));
        // The slot's next turn has nothing of that.
        pair.a.submit(&CallOptions::default(), b"next").unwrap();
        pair.turn(23 * MS);
        let next = pair.b.next(23 * MS).unwrap();
        assert!(!pair.b.session.is_cancelled(next.id()));
        pair.b.session.lost(CallError::ProviderGone);
        assert!(pair.b.session.is_cancelled(next.id()) && pair.b.session.is_cancelled(second.id()), "nobody is there");
        assert!(pair.result(b).is_none());
    }
}

#[test]
fn admission_expiry_cancellation_and_failure_end_calls_each_by_its_name() {
    let options = ServeOptions { admission: true, budget: Duration::from_millis(10), ..ServeOptions::default() };
    for mut pair in Pair::both(&options) {
        let good = pair.a.submit(&within(15), b"good").unwrap();
        let hopeless = pair.a.submit(&within(15), b"hopeless").unwrap();
        let short = CallOptions { ttl: Some(Duration::from_millis(2)), ..CallOptions::default() };
        let expires = pair.a.submit(&short, b"expires").unwrap();
        let back = pair.a.submit(&CallOptions::default(), b"back").unwrap();
        pair.turn(0);
        assert!(pair.a.cancel(back) && !pair.a.cancel(back));
        pair.turn(MS);
        assert_eq!(pair.b.serve(5 * MS, |_| Response::end(Status::Failed)), [b"good"]);
        pair.turn(5 * MS);
        assert_eq!(pair.result(good), Some(Err(CallError::Failed)));
        assert_eq!(pair.result(hopeless), Some(Err(CallError::Refused(Refusal::Admission))));
        assert_eq!(pair.result(expires), Some(Err(CallError::Expired)));
        assert_eq!(pair.result(back), Some(Err(CallError::Cancelled)));
        assert_eq!(pair.a.session.under_way(), 0);
    }
    let options = ServeOptions { late: Late::BestEffort, ..ServeOptions::default() };
    for mut pair in Pair::both(&options) {
        let late = pair.a.submit(&within(1), b"late").unwrap();
        pair.turn(0);
        assert_eq!(pair.b.serve(5 * MS, echo).len(), 1);
        pair.turn(5 * MS);
        assert!(pair.result(late).unwrap().is_ok());
    }
}

#[test]
fn a_peer_that_serves_nothing_says_so() {
    for mut pair in Pair::both(&ServeOptions::default()) {
        pair.b.session = Session::new(64, &ServeOptions::default());
        let token = pair.a.submit(&within(5), b"x").unwrap();
        pair.turn(0);
        assert_eq!(pair.result(token), Some(Err(CallError::Failed)));
    }
}

#[test]
fn a_full_link_says_busy_and_what_is_given_up_comes_back() {
    for mut pair in Pair::both(&ServeOptions::default()) {
        let large = vec![1; 100_000];
        pair.a.submit(&within(5), &large).unwrap();
        assert_eq!(pair.a.submit(&within(5), &large), Err(CallError::Busy(1)), "the arena is full");
        let rest: Vec<Token> = (1..64).map(|_| pair.a.submit(&within(5), b"").unwrap()).collect();
        assert_eq!(pair.a.submit(&within(5), b""), Err(CallError::Busy(64)));
        for token in &rest {
            pair.a.session.abandon(*token);
        }
        pair.turn(0);
        assert_eq!(pair.b.session.pending(), 64);
        pair.b.serve(0, echo);
        pair.turn(0);
        assert_eq!(pair.a.session.under_way(), 1, "all but the one that is waited for");
        assert_eq!(pair.result(rest[0]), Some(Err(CallError::Unknown)));
    }
}

#[test]
fn who_waits_learns_at_once_that_the_peer_is_gone_and_slots_come_back() {
    for mut pair in Pair::both(&ServeOptions::default()) {
        let tokens: Vec<Token> = (0..10).map(|_| pair.a.submit(&within(5), &[0; 1000]).unwrap()).collect();
        pair.a.session.abandon(tokens[9]);
        pair.turn(0);
        let served = pair.b.next(0).unwrap();
        pair.a.session.lost(CallError::ProviderGone);
        pair.b.session.lost(CallError::ProviderGone);
        for token in &tokens[..9] {
            assert_eq!(pair.result(*token), Some(Err(CallError::ProviderGone)));
        }
        assert_eq!((pair.a.session.under_way(), pair.b.session.pending()), (0, 0));
        // The next life: an answer to what was being served in the last one goes nowhere.
        pair.b.respond(&served, 0, echo(b"old"));
        pair.turn(0);
        let token = pair.a.submit(&within(5), b"new").unwrap();
        pair.turn(0);
        assert_eq!(pair.b.serve(0, echo), [b"new"]);
        pair.turn(0);
        assert_eq!(pair.result(token).unwrap().unwrap().bytes, b"new");
        assert_eq!(pair.b.session.stats().abandoned, 10);
    }
}

#[test]
fn a_peer_is_rung_only_while_it_sleeps() {
    let mut pair = Pair::link(&ServeOptions::default());
    let rung = |side: &mut Side| match &mut side.transport {
        Transport::Link(rings, ..) => rings.take_ring(),
        Transport::Stream(_) => unreachable!(),
    };
    pair.a.submit(&within(5), b"1").unwrap();
    assert!(!rung(&mut pair.a), "it has not said that it sleeps");
    pair.b.drain(0).unwrap();
    assert!(pair.b.wire().1.arm().unwrap());
    pair.a.submit(&within(5), b"2").unwrap();
    assert!(rung(&mut pair.a));
    pair.a.submit(&within(5), b"3").unwrap();
    assert!(!rung(&mut pair.a), "it was rung for this sleep");
    assert!(!pair.b.wire().1.arm().unwrap(), "something waits: it must not sleep");
}

#[test]
fn plans_fill_sections_of_any_size_and_refuse_the_tiny() {
    for pages in 0..300u64 {
        let bytes = pages * 4096;
        let Some(plan) = Plan::new(bytes) else {
            assert!(pages < 6, "{pages} pages");
            continue;
        };
        let (own, peer) = (region(bytes as usize), region(bytes as usize));
        plan.clear(own);
        plan.clear(peer);
        let mut rings = Rings::new(plan);
        rings.on(own, peer.as_foreign()).unwrap().check_peer().unwrap();
        let shorter = peer.as_foreign().slice(0, bytes as usize - 4096).unwrap();
        if pages % 2 == 0 {
            assert_eq!(rings.on(own, shorter).map(|_| ()), Err(Broken::Short));
        }
    }
    assert_eq!(Plan::new(OUTPUT_BYTES as u64).unwrap().entries(), 64);
}

#[test]
fn the_greeting_and_a_frame_are_these_bytes() {
    let mut frames = Frames::default();
    assert_eq!(frames.output(), b"TMBLRPC\x02\x40\0\0\0\0\0\x02\0");
    frames.sent(16);
    let call = Call {
        token: Token::new(3, 1),
        deadline_ns: 0x0102,
        time_left: true,
        trace: 9,
        ttl_ms: 7,
        payload: Payload::EMPTY,
    };
    frames.ask(Ask::Call(call), b"hi").unwrap();
    let mut want = vec![0u8; 66];
    (want[0], want[4], want[8], want[12]) = (2, 1, 3, 1);
    (want[16], want[17], want[24], want[40], want[52], want[56], want[58]) = (2, 1, 9, 2, 7, 1, 1);
    want[64..].copy_from_slice(b"hi");
    assert_eq!(frames.output(), want);
    // Byte by byte, as a stream may deliver it.
    let mut other = Frames::default();
    for byte in b"TMBLRPC\x02\x08\0\0\0\0\x20\0\0".iter().chain(&want) {
        assert!(other.take().unwrap().is_none());
        assert_eq!(other.feed(&[*byte]), 1);
        other.greeted().unwrap();
    }
    assert_eq!((other.greeted(), other.most()), (Ok(Some(8)), 8192), "the smaller of both sides'");
    let Some(Message::Call(got, bytes)) = other.take().unwrap() else { panic!("no call") };
    assert_eq!((got.token, got.deadline_ns, got.time_left, bytes.as_slice()), (call.token, 0x0102, true, &b"hi"[..]));
}

#[test]
fn a_stream_that_speaks_something_else_is_refused() {
    for greeting in [
        &b"GET / HTTP/1.1\r\n"[..],
        b"TMBLRPC\x03\x40\0\0\0\0\0\x02\0",
        b"TMBLRPC\x02\x03\0\0\0\0\0\x02\0",
        b"TMBLRPC\x02\0\0\0\0\0\0\x02\0",
        b"TMBLRPC\x02\x40\0\0\0\x01\0\0\0",
    ] {
        let mut frames = Frames::default();
        frames.feed(greeting);
        assert_eq!(frames.greeted(), Err(Broken::Header));
    }
    let good = || {
        let mut frames = Frames::default();
        frames.feed(b"TMBLRPC\x02\x40\0\0\0\0\0\x02\0");
        frames.greeted().unwrap();
        frames
    };
    let frame = |edit: &dyn Fn(&mut Vec<u8>)| {
        let mut sender = good();
        let sent = sender.output().len();
        sender.sent(sent);
        sender.ask(Ask::Cancel(Token::new(1, 1)), &[]).unwrap();
        let mut bytes = sender.output().to_vec();
        edit(&mut bytes);
        let mut frames = good();
        frames.feed(&bytes);
        frames.take().map(|message| message.is_some())
    };
    assert_eq!(frame(&|_| {}), Ok(true));
    assert_eq!(frame(&|b| b[4] = 9), Err(Broken::Kind));
    assert_eq!(frame(&|b| b[3] = 1), Err(Broken::Arena));
    assert_eq!(frame(&|b| b[0] = 1), Err(Broken::Payload), "a cancellation has no bytes");
    assert_eq!(frame(&|b| b[8] = 64), Err(Broken::Slot));
}

#[test]
fn a_peer_that_takes_no_answers_is_not_read_for_ever() {
    let mut pair = Pair::stream(&ServeOptions::default());
    let mut taken = 0;
    for _ in 0..1000 {
        let Ok(token) = pair.a.submit(&within(5), b"x") else { break };
        carry(&mut pair.a, &mut pair.b);
        pair.b.drain(0).unwrap();
        // It answers with much; the asker forges that the answer came, and asks again, without
        // reading.
        taken += pair.b.serve(0, |_| Response::new(vec![0; 100_000])).len();
        pair.a.session.lost(CallError::ProviderGone);
        pair.a.session.fetch(token, None);
    }
    assert!((2..10).contains(&taken), "{taken} answers of 100 kB wait");
}

/// What a peer that writes entries of its own making is found out by.
fn hostile(ask: impl FnOnce(&mut Wire<'_>)) -> Result<bool, Broken> {
    let mut pair = Pair::link(&ServeOptions::default());
    let (_, mut wire) = pair.a.wire();
    ask(&mut wire);
    pair.b.drain(0)
}

#[test]
fn a_peer_that_lies_is_found_out() {
    let call = |slot, bytes: &[u8], wire: &mut Wire<'_>| {
        let token = Token::new(slot, 1);
        let call = Call { token, deadline_ns: 5, time_left: true, trace: 0, ttl_ms: 0, payload: Payload::EMPTY };
        assert_eq!(wire.ask(Ask::Call(call), bytes), Ok(true));
        call
    };
    assert_eq!(hostile(|w| _ = call(1, b"", w)), Ok(true));
    let twice = hostile(|w| {
        call(1, b"", w);
        call(1, b"", w);
    });
    assert_eq!(twice, Err(Broken::Token));
    let absolute = hostile(|w| {
        let honest = call(1, b"", w);
        let ask = Ask::Call(Call { token: Token::new(2, 1), time_left: false, ..honest });
        assert_eq!(w.ask(ask, b""), Ok(true));
    });
    assert_eq!(absolute, Err(Broken::Kind));
    let unasked = hostile(|w| {
        let token = Token::new(0, 1);
        let (queued_ns, service_ns) = (0, 0);
        let answer = Answer { token, status: Status::Served, code: 0, queued_ns, service_ns, payload: Payload::EMPTY };
        assert_eq!(w.answer(answer, b""), Ok(true));
    });
    assert_eq!(unasked, Err(Broken::Token));
    assert_eq!(hostile(|w| _ = w.ask(Ask::Cancel(Token::new(1, 1)), &[])), Ok(true), "too late is no lie");
}

proptest! {
    /// Random words all over the peer's output section: every look ends, none of them goes out of
    /// bounds, and the books stay right.
    #[test]
    fn no_words_in_the_peers_section_do_more_than_end_the_link(
        words in prop::collection::vec((0usize..0x7f000 / 4, any::<u32>()), 0..60),
        near in prop::collection::vec((0usize..200, 0u32..80), 0..60),
    ) {
        let mut pair = Pair::link(&ServeOptions::default());
        let token = pair.a.submit(&within(5), &[7; 300]).unwrap();
        let Transport::Link(_, theirs, _) = &pair.b.transport else { unreachable!() };
        let theirs = *theirs;
        let half = 0x3f000;
        for (at, word) in words {
            theirs.store_u32(at * 4, word, std::sync::atomic::Ordering::Relaxed);
        }
        // Near the indices, where small numbers are believed.
        for (at, word) in near {
            theirs.store_u32((at % 2) * half + 128 + at / 2 * 4, word, std::sync::atomic::Ordering::Relaxed);
        }
        if pair.a.drain(0).is_ok() {
            while let Some(request) = pair.a.next(0) {
                prop_assert!(request.bytes.len() <= 128 << 10);
                let (session, mut wire) = pair.a.wire();
                if session.respond(&mut wire, &request, 0, echo(&[1; 1000])).is_err() {
                    break;
                }
            }
        }
        pair.a.session.lost(CallError::ProviderGone);
        prop_assert!(pair.result(token).is_some());
        prop_assert_eq!((pair.a.session.under_way(), pair.a.session.pending()), (0, 0));
    }

    /// Random work beside the dull expectation that each call ends exactly once, and with its own
    /// bytes.
    #[test]
    fn every_call_ends_once(steps in prop::collection::vec((0u8..5, 0usize..3000, any::<bool>()), 1..300), stream in any::<bool>()) {
        let options = ServeOptions::default();
        let mut pair = if stream { Pair::stream(&options) } else { Pair::link(&options) };
        let mut open: Vec<(Token, Vec<u8>)> = Vec::new();
        let (mut asked, mut ended) = (0u32, 0u32);
        for (now, (step, len, deadline)) in steps.into_iter().enumerate() {
            let now = now as u64 * MS;
            match step {
                0 | 1 => {
                    let mut bytes = vec![step; len];
                    bytes.extend_from_slice(&asked.to_le_bytes());
                    let options = if deadline { within(3) } else { CallOptions::default() };
                    if let Ok(token) = pair.a.submit(&options, &bytes) {
                        asked += 1;
                        open.push((token, bytes));
                    }
                }
                2 => pair.turn(now),
                3 => _ = pair.b.serve(now, echo),
                _ => _ = open.get(len % open.len().max(1)).map(|(token, _)| pair.a.cancel(*token)),
            }
            open.retain(|(token, bytes)| match pair.a.session.fetch(*token, None) {
                None => true,
                Some(result) => {
                    ended += 1;
                    match result {
                        Ok(reply) => assert_eq!(&reply.bytes, bytes),
                        Err(CallError::DeadlineExceeded | CallError::Cancelled) => {}
                        Err(other) => panic!("{other}"),
                    }
                    false
                }
            });
        }
        pair.turn(u64::MAX / 2);
        pair.b.serve(u64::MAX / 2, echo);
        pair.turn(u64::MAX / 2);
        for (token, _) in open {
            prop_assert!(pair.result(token).is_some());
            ended += 1;
        }
        prop_assert_eq!(asked, ended);
        prop_assert_eq!(pair.a.session.under_way(), 0);
    }
}
