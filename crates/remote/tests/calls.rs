//! Calls between two sides in one process: over a link with its real server, with doorbells and
//! without, and over TCP.

mod place;

use std::net::{TcpListener, TcpStream};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tombolo_ivshmem::client::Joined;
use tombolo_ivshmem::raw::Clear;
use tombolo_remote::{CallError, CallOptions, Calls, RemoteError, Response, ServeOptions, Status};
use tombolo_ring::ivshmem::protocol;
use tombolo_ring::ivshmem::region::Layout;
use tombolo_testing::{found, until};

use place::{BYTES, Place};

const SOON: Duration = Duration::from_secs(20);
/// Between two looks of a peer that has no doorbell.
const LOOK: Duration = Duration::from_millis(20);

/// Two sides, and what is to be kept for them.
fn pairs(options: &ServeOptions) -> Vec<(Calls, Calls, Option<Place>)> {
    let mut pairs = Vec::new();
    for vectors in [2, 1, 0] {
        let place = Place::new(protocol::CALLS, vectors);
        pairs.push((place.join(options), place.join(options), Some(place)));
    }
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = listener.local_addr().unwrap();
    let (a, b) = std::thread::scope(|scope| {
        let a = scope.spawn(|| Calls::connect(to, SOON, options).unwrap());
        let b = Calls::over(listener.accept().unwrap().0, SOON, options).unwrap();
        (a.join().unwrap(), b)
    });
    pairs.push((a, b, None));
    pairs
}

fn within(ms: u64) -> CallOptions {
    CallOptions { timeout: SOON, ..CallOptions::within(Duration::from_millis(ms)) }
}

fn backwards(bytes: &[u8]) -> Vec<u8> {
    bytes.iter().rev().copied().collect()
}

#[test]
fn calls_go_both_ways_at_a_time_from_many_threads() {
    let options = ServeOptions { workers: 2, ..ServeOptions::default() };
    for (a, b, _place) in pairs(&options) {
        let serve = |calls: &Calls| calls.serve(|r| Response::new(backwards(&r.bytes)).with_code(7)).unwrap();
        let (_serves_a, _serves_b) = (serve(&a), serve(&b));
        assert!(a.wait_up(SOON) && b.wait_up(SOON));
        std::thread::scope(|scope| {
            for n in 0..6 {
                let calls = if n % 2 == 0 { &a } else { &b };
                scope.spawn(move || {
                    for i in 0..100usize {
                        let bytes = vec![(n * 31 + i) as u8; (i * 37) % 5000].into_iter().enumerate();
                        let bytes: Vec<u8> = bytes.map(|(at, byte)| byte.wrapping_add(at as u8)).collect();
                        let reply = calls.call(&bytes, &within(10_000)).unwrap();
                        assert_eq!((reply.code, reply.bytes), (7, backwards(&bytes)));
                    }
                });
            }
        });
        assert_eq!((a.stats().replied, b.stats().replied), (300, 300));
        assert_eq!((a.stats().served, b.stats().served), (300, 300));
        assert_eq!((a.under_way(), b.under_way()), (0, 0));
    }
}

#[test]
fn who_waits_for_room_has_it_as_soon_as_another_call_was_fetched() {
    let (a, b, _) = pairs(&ServeOptions::default()).pop().unwrap();
    assert!(b.next(Duration::from_millis(1)).is_none(), "from now on requests wait");
    let tokens: Vec<_> = std::iter::from_fn(|| a.submit(b"all places", &within(60_000)).ok()).collect();
    assert!(tokens.len() > 8);
    let requests: Vec<_> = tokens.iter().map(|_| b.next(SOON).unwrap()).collect();
    std::thread::scope(|scope| {
        // This one sleeps on the connection.
        let leads = scope.spawn(|| a.wait_for(tokens[0], SOON));
        let ways: [&dyn Fn(usize); 2] =
            [&|n| drop(a.wait_for(tokens[n], SOON)), &|n| while a.poll(tokens[n]).is_none() {}];
        for (n, fetch) in (1..).zip(ways) {
            while a.submit(b"the place of the one before", &within(60_000)).is_ok() {
                b.next(SOON).unwrap();
            }
            let waits = scope.spawn(|| a.call_in_turn(b"next", &within(60_000), |_| ()));
            std::thread::sleep(Duration::from_millis(50));
            b.respond(&requests[n], Response::new(vec![]));
            // Its place is taken until its end is fetched.
            std::thread::sleep(Duration::from_millis(50));
            assert_eq!(b.pending(), 0);
            fetch(n);
            let next = b.next(Duration::from_secs(5)).expect("it is sent at once");
            b.respond(&next, Response::new(vec![]));
            waits.join().unwrap().unwrap();
        }
        b.respond(&requests[0], Response::new(vec![]));
        leads.join().unwrap().unwrap().unwrap();
    });
}

#[test]
fn what_waits_as_the_connection_ends_ends_with_it() {
    let options = ServeOptions { workers: 8, ..ServeOptions::default() };
    for _ in 0..20 {
        let (a, b, _) = pairs(&options).pop().unwrap();
        let serves = a.serve(|request| Response::new(request.bytes.clone())).unwrap();
        std::thread::scope(|scope| {
            let began = Instant::now();
            // A call that nobody answers, threads that wait for requests, and some that wait for
            // the end.
            b.next(Duration::from_millis(1));
            let call = scope.spawn(|| a.call(b"1", &within(10_000)).unwrap_err());
            let ends: Vec<_> = (0..3).map(|_| scope.spawn(|| a.wait_down(SOON))).collect();
            until("the call is under way", || b.pending() == 1);
            b.hang_up();
            assert_eq!(call.join().unwrap(), CallError::ProviderGone);
            assert!(ends.into_iter().all(|end| end.join().unwrap()));
            drop(serves);
            assert!(began.elapsed() < SOON / 2, "{:?}", began.elapsed());
        });
    }
}

#[test]
fn who_waits_for_room_has_it_by_deadline_and_small_calls_do_not_overtake() {
    let (a, b, _) = pairs(&ServeOptions::default()).pop().unwrap();
    assert!(a.wait_up(SOON) && b.wait_up(SOON));
    assert!(b.next(Duration::from_millis(1)).is_none(), "from now on requests wait");
    // Of the 128 KiB that may be under way a large call leaves room for a small one only.
    let large = vec![1; 100 << 10];
    let first = a.submit(&large, &within(10_000)).unwrap();
    std::thread::scope(|scope| {
        let urgent = scope.spawn(|| a.call_in_turn(&large, &within(15_000), |_| ()));
        std::thread::sleep(Duration::from_millis(300));
        let small = scope.spawn(|| a.call_in_turn(&[2; 10 << 10], &within(18_000), |_| ()));
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!(b.pending(), 1, "a small call has overtaken the one with the earlier deadline");
        let mut seen = Vec::new();
        for _ in 0..3 {
            let request = b.next(SOON).unwrap();
            seen.push(request.bytes.len() >> 10);
            b.respond(&request, Response::new(vec![]));
        }
        assert_eq!(seen, [100, 100, 10]);
        assert!(a.wait_for(first, SOON).unwrap().is_ok());
        assert!(urgent.join().unwrap().is_ok() && small.join().unwrap().is_ok());
    });
}

#[test]
fn deadlines_cross_and_what_is_late_timed_out_or_cancelled_is_told_so() {
    for (a, b, _place) in pairs(&ServeOptions::default()) {
        assert!(std::thread::scope(|scope| {
            let other = scope.spawn(|| b.wait_up(SOON));
            a.wait_up(SOON) && other.join().unwrap()
        }));
        let unserved = a.submit(b"x", &within(5)).unwrap();
        let failed = found("an answer of one that looks, and serves nothing", || {
            assert!(b.is_up());
            a.poll(unserved)
        });
        assert_eq!(failed, Err(CallError::Failed));
        assert!(b.next(Duration::ZERO).is_none(), "from now on it serves");
        // A call without timeout; it holds its slot until its answer.
        let short = CallOptions { timeout: Duration::from_millis(1), ..CallOptions::default() };
        assert_eq!(a.call(b"impatient", &short), Err(CallError::Timeout));
        assert_eq!(a.call(b"past its deadline", &within(1)), Err(CallError::DeadlineExceeded));
        let exceeded = a.submit(b"the same", &within(1)).unwrap();
        assert_eq!(a.wait_for(exceeded, SOON), Some(Err(CallError::DeadlineExceeded)));
        assert_eq!(a.poll(exceeded), Some(Err(CallError::Unknown)));
        let late = a.submit(b"late", &CallOptions { wait_late: SOON, ..within(1) }).unwrap();
        let back = a.submit(b"back", &within(5_000)).unwrap();
        let urgent = a.submit(b"urgent", &within(4_000)).unwrap();
        assert!(a.cancel(back));
        // From when it looks, the deadlines run on its clock.
        assert!(b.is_up());
        std::thread::sleep(Duration::from_millis(2));
        let request = b.next(SOON).unwrap();
        assert_eq!(request.bytes, b"urgent");
        let left = request.left_ns(tombolo_rpc::clock::now_ns()).unwrap();
        assert!((1..4_000_000_000).contains(&left), "{left}");
        b.respond(&request, Response::new("done"));
        let reply = a.wait_for(urgent, SOON).unwrap().unwrap();
        assert_eq!((&reply.bytes[..], reply.late_by_ns), (&b"done"[..], 0));
        assert_eq!(a.wait_for(late, SOON), Some(Err(CallError::Late)));
        assert_eq!(a.wait_for(back, SOON), Some(Err(CallError::Cancelled)));
    }
}

/// The peer `b` goes while `a` waits for it, and another takes its place if there is one; how long
/// it took to tell `a`.
fn time_to_error(a: &Calls, b: Calls, place: Option<&Place>, options: &ServeOptions) -> Duration {
    assert!(std::thread::scope(|scope| {
        let other = scope.spawn(|| b.wait_up(SOON));
        a.wait_up(SOON) && other.join().unwrap()
    }));
    let waits = std::thread::spawn({
        let a = a.clone();
        move || {
            let result = a.call(b"never answered", &CallOptions { timeout: SOON, ..CallOptions::default() });
            (result, Instant::now())
        }
    });
    let taken = b.next(SOON).unwrap();
    assert_eq!(taken.bytes, b"never answered");
    let gone = Instant::now();
    drop(b);
    let (result, told) = waits.join().unwrap();
    assert_eq!(result, Err(CallError::ProviderGone));
    assert_eq!(a.under_way(), 0);
    assert_eq!(a.call(b"x", &within(5)), Err(CallError::ProviderGone), "nobody is there");
    if let Some(place) = place {
        let b = place.join(options);
        let _server = b.serve(|request| Response::new(request.bytes.clone())).unwrap();
        assert!(a.wait_up(SOON));
        assert_eq!(a.call(b"back again", &within(10_000)).unwrap().bytes, b"back again");
    } else {
        assert!(a.is_over() && !a.wait_up(SOON));
    }
    told.saturating_duration_since(gone)
}

#[test]
fn who_waits_for_a_peer_that_goes_is_told_within_10_ms_and_the_next_peer_serves() {
    let options = ServeOptions::default();
    let mut best = vec![];
    // The machine may be busy with other things: of some tries one shows what ours costs.
    for _ in 0..20 {
        let pairs = pairs(&options);
        best.resize(pairs.len(), Duration::MAX);
        for (best, (a, b, place)) in best.iter_mut().zip(pairs) {
            *best = time_to_error(&a, b, place.as_ref(), &options).min(*best);
        }
        if best.iter().all(|took| *took < Duration::from_millis(10)) {
            return;
        }
    }
    panic!("the quickest tries took {best:?}");
}

#[test]
fn a_handler_that_panics_costs_its_request_alone() {
    for (a, b, _place) in pairs(&ServeOptions::default()).into_iter().take(1) {
        let _server = b
            .serve(|request| match request.bytes.as_slice() {
                b"panic" => std::panic::resume_unwind(Box::new("on purpose")),
                b"pass" => Response::end(Status::Expired),
                _ => Response::new(vec![1; 1 << 20]),
            })
            .unwrap();
        assert!(a.wait_up(SOON));
        assert_eq!(a.call(b"panic", &within(10_000)), Err(CallError::Failed));
        assert_eq!(a.call(b"pass", &within(10_000)), Err(CallError::Expired));
        let refused = a.call(b"large", &within(10_000)).unwrap_err();
        assert!(matches!(refused, CallError::Refused(_)), "{refused}");
    }
}

#[test]
fn a_peer_that_lies_loses_its_link_and_may_begin_anew() {
    // The liar takes the seat by hand, and keeps its own books.
    let place = Place::new(protocol::CALLS, 2);
    let a = place.join(&ServeOptions::default());
    let _server = a.serve(|request| Response::new(request.bytes.clone())).unwrap();
    /// Of the provider half; it is looked at once in each epoch.
    const HEADER: usize = 0x3f000;
    let lies: [(usize, u32); 4] = [
        // Client half: more requests than the ring holds; a request of no kind.
        (128, 1000),
        (128, 1),
        // Provider half: answers to nothing that was asked; a header of another kind.
        (0x3f000 + 128, 1),
        (HEADER, 0xdead),
    ];
    for (at, word) in lies {
        let plan = tombolo_calls::sections::Plan::new(Layout::v1(BYTES, 0, 2).unwrap().output_bytes).unwrap();
        let clear: Clear = Box::new(move |own| {
            plan.clear(own);
            if at == HEADER {
                own.store_u32(at, word, Ordering::Release).unwrap();
            }
        });
        let joined = Joined::connect(place.socket(), SOON).unwrap();
        let peer = 1 - joined.id();
        let mut liar = joined.raw(peer, protocol::CALLS, "calls", clear).unwrap();
        until("the link to come up", || liar.wait(LOOK).unwrap());
        assert!(at == HEADER || a.wait_up(SOON));
        let epoch = liar.peer().epoch();
        let (own, _) = liar.peer().sections().unwrap();
        own.store_u32(at, word, Ordering::Release).unwrap();
        liar.peer().ring();
        let asked = Instant::now();
        let call = std::thread::spawn({
            let a = a.clone();
            move || a.call(b"to a liar", &CallOptions { timeout: SOON, ..CallOptions::default() })
        });
        let result = call.join().unwrap();
        let lost = matches!(result, Err(CallError::Broken(_) | CallError::ProviderGone));
        assert!(lost, "{at:#x}: {result:?}");
        // Whichever thread finds the lie tells those that wait.
        assert!(asked.elapsed() < SOON / 2, "{at:#x}: the caller was told after {:?}", asked.elapsed());
        until("the liar's link to be reset", || {
            liar.wait(LOOK).unwrap();
            liar.peer().epoch() != epoch
        });
    }
    // An honest one is served as if nothing had been.
    let b = place.join(&ServeOptions::default());
    assert!(b.wait_up(SOON));
    assert_eq!(b.call(b"honest", &within(10_000)).unwrap().bytes, b"honest");
}

#[test]
fn links_and_connections_that_are_for_something_else_are_told_apart() {
    let options = ServeOptions::default();
    let place = Place::new(protocol::CHANNEL, 2);
    let error = Calls::join(place.socket(), SOON, &options).unwrap_err();
    assert!(error.to_string().contains("0x4002"), "{error}");
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = listener.local_addr().unwrap();
    for (greeting, said) in [(&b"HTTP/1.1 400 Bad Request\r\n\r\n"[..], "greets otherwise"), (b"", "closed")] {
        let error = std::thread::scope(|scope| {
            let calls = scope.spawn(|| Calls::connect(to, SOON, &options).unwrap_err());
            let (mut other, _): (TcpStream, _) = listener.accept().unwrap();
            std::io::Write::write_all(&mut other, greeting).unwrap();
            // Its greeting is read, so that the end is no reset.
            std::io::Read::read_exact(&mut other, &mut [0; 16]).unwrap();
            drop(other);
            calls.join().unwrap()
        });
        assert!(matches!(error, RemoteError::Greeting(_)) && error.to_string().contains(said), "{error}");
    }
}
