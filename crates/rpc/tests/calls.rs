//! A service and its clients in one process: what a call brings back, in every way it can end.

use std::future::Future;
use std::path::Path;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Mutex, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use tombolo_ring::rpc::entry::Refusal;
use tombolo_rpc::client::{CallError, CallFuture, CallOptions, Client, ConnectError, ConnectOptions, report};
use tombolo_rpc::clock::now_ns;
use tombolo_rpc::deadline::Deadline;
use tombolo_rpc::poll::Polling;
use tombolo_rpc::provider::{Options, Reply, Request, Service, WorkerClass};
use tombolo_rpc::schedule::Late;
use tombolo_rpc::shared::{AdoptError, SharedBuffer};
use tombolo_testing::{TIMEOUT, until};

fn options(folder: &Path) -> Options {
    Options { folder: Some(folder.into()), ..Options::default() }
}

fn connect(folder: &Path) -> Client {
    connect_with(folder, ConnectOptions::default())
}

fn connect_with(folder: &Path, options: ConnectOptions) -> Client {
    Client::connect_with("s", &ConnectOptions { folder: Some(folder.into()), ..options }).unwrap()
}

fn echo(request: &Request<'_>, reply: &mut Reply<'_>) {
    let _ = reply.write(&request.to_vec());
}

/// A handler that holds each request until it is let go, and notes the order of service by the
/// first byte.
struct Gate {
    open: Mutex<mpsc::Receiver<()>>,
    entered: mpsc::Sender<u8>,
}

fn gate() -> (impl Fn(&Request<'_>, &mut Reply<'_>) + Send + Sync, mpsc::Sender<()>, mpsc::Receiver<u8>) {
    let (go, open) = mpsc::channel();
    let (entered, order) = mpsc::channel();
    let gate = Gate { open: Mutex::new(open), entered };
    let handler = move |request: &Request<'_>, reply: &mut Reply<'_>| {
        let name = request.to_vec().first().copied().unwrap_or(0);
        gate.entered.send(name).unwrap();
        gate.open.lock().unwrap().recv_timeout(TIMEOUT).unwrap();
        let _ = reply.write(&[name]);
    };
    (handler, go, order)
}

#[test]
fn payloads_of_every_size_come_back_as_they_went() {
    let dir = tempfile::tempdir().unwrap();
    let _service = Service::register("s", options(dir.path()), echo).unwrap();
    let client = connect(dir.path());
    for len in [0, 1, 64, 191, 192, 193, 512, 4096, 65_536, 1 << 20] {
        let bytes: Vec<u8> = (0..len).map(|i| (i * 7 + len) as u8).collect();
        let reply = client.call(&bytes, &CallOptions::default()).unwrap_or_else(|e| panic!("{len} bytes: {e}"));
        assert_eq!(reply.to_vec().unwrap(), bytes, "{len} bytes");
        assert_eq!(reply.code(), 0);
    }
    assert_eq!((client.under_way(), client.arena_used()), (0, 0), "slots and memory came back");
}

#[test]
fn all_ways_of_waiting_give_the_same_answers() {
    for polling in [Polling::Adaptive, Polling::Never, Polling::Always] {
        let dir = tempfile::tempdir().unwrap();
        let _service = Service::register("s", Options { polling, workers: 2, ..options(dir.path()) }, echo).unwrap();
        let client = connect_with(dir.path(), ConnectOptions { polling, ..ConnectOptions::default() });
        for n in 0..2000u32 {
            let reply = client.call(&n.to_le_bytes(), &CallOptions::default()).unwrap();
            assert_eq!(reply.to_vec().unwrap(), n.to_le_bytes(), "{polling:?}");
        }
    }
}

#[test]
fn threads_share_a_client_and_each_gets_its_own_answer() {
    let dir = tempfile::tempdir().unwrap();
    let _service = Service::register("s", Options { workers: 3, ..options(dir.path()) }, echo).unwrap();
    let client = connect(dir.path());
    std::thread::scope(|scope| {
        for thread in 0..6u32 {
            let client = client.clone();
            scope.spawn(move || {
                for n in 0..500u32 {
                    let bytes = (thread << 16 | n).to_le_bytes();
                    // Some of them larger than an entry.
                    let bytes = bytes.repeat(if n % 3 == 0 { 200 } else { 1 });
                    let reply = client.call(&bytes, &CallOptions::default()).unwrap();
                    assert_eq!(reply.to_vec().unwrap(), bytes);
                }
            });
        }
    });
    assert_eq!((client.under_way(), client.arena_used()), (0, 0));
}

#[test]
fn many_clients_are_served_at_a_time() {
    let dir = tempfile::tempdir().unwrap();
    let service = Service::register("s", Options { workers: 2, ..options(dir.path()) }, echo).unwrap();
    let start = Barrier::new(12);
    std::thread::scope(|scope| {
        for thread in 0..12u64 {
            let (dir, start) = (&dir, &start);
            scope.spawn(move || {
                let client = connect(dir.path());
                start.wait();
                let calls: Vec<u64> = (0..300).map(|n| thread << 32 | n).collect();
                for chunk in calls.chunks(16) {
                    let tokens: Vec<_> = chunk
                        .iter()
                        .map(|n| client.submit(&n.to_le_bytes(), &CallOptions::default()).unwrap())
                        .collect();
                    for (n, reply) in chunk.iter().zip(client.wait_all(&tokens, TIMEOUT)) {
                        assert_eq!(reply.unwrap().to_vec().unwrap(), n.to_le_bytes());
                    }
                }
            });
        }
    });
    assert_eq!(service.report().answers.served, 3600);
    until("all clients are forgotten", || service.report().clients == 0);
}

#[test]
fn the_earliest_deadline_is_served_first_and_best_effort_last() {
    let dir = tempfile::tempdir().unwrap();
    let (handler, go, order) = gate();
    let service = Service::register(
        "s",
        Options {
            // Services here take as long as the test does: no debt is to count.
            budget: Duration::from_secs(1000),
            ..options(dir.path())
        },
        handler,
    )
    .unwrap();
    let (a, b) = (connect(dir.path()), connect(dir.path()));
    let first = a.submit(b"0", &CallOptions::default()).unwrap();
    assert_eq!(order.recv_timeout(TIMEOUT), Ok(b'0'));
    // While it is served the others queue, from two clients.
    let soon = now_ns() + 5_000_000_000;
    let at = |ns| CallOptions { deadline: Deadline::At(soon + ns), ..CallOptions::default() };
    let mut tokens = vec![(&a, first)];
    for (client, name, options) in [
        (&a, b"x", CallOptions::default()),
        (&b, b"c", at(300)),
        (&a, b"a", at(100)),
        (&b, b"b", at(200)),
        (&a, b"d", at(300)),
        (&b, b"y", CallOptions::default()),
    ] {
        tokens.push((client, client.submit(name, &options).unwrap()));
        // So that the order of arrival is this one, for equals of two clients.
        until("its place in the queue", || service.report().pending == tokens.len() as u64 - 1);
    }
    for _ in 0..7 {
        go.send(()).unwrap();
    }
    let served: Vec<u8> = (0..6).map(|_| order.recv_timeout(TIMEOUT).unwrap()).collect();
    assert_eq!(String::from_utf8(served).unwrap(), "abcdxy");
    for (client, token) in tokens {
        client.wait(token, TIMEOUT).unwrap();
    }
}

#[test]
fn a_late_request_is_answered_as_late_or_served_as_the_service_chose() {
    for late in [Late::Refuse, Late::BestEffort] {
        let dir = tempfile::tempdir().unwrap();
        let service = Service::register("s", Options { late, ..options(dir.path()) }, echo).unwrap();
        let client = connect(dir.path());
        assert_eq!(client.facts().late_is_best_effort, late == Late::BestEffort);
        let past = CallOptions { deadline: Deadline::At(1), wait_late: Duration::MAX, ..CallOptions::default() };
        match (late, client.call(b"x", &past)) {
            (Late::Refuse, Err(CallError::Late)) => assert_eq!(service.report().answers.late, 1),
            (Late::BestEffort, Ok(reply)) => {
                assert_eq!(reply.to_vec().unwrap(), b"x");
                assert!(reply.is_late());
                assert_eq!(service.report().answers.overran, 1);
            }
            (_, other) => panic!("{late:?}: {other:?}"),
        }
    }
}

#[test]
fn what_becomes_late_while_it_waits_is_told_before_a_worker_is_free() {
    let dir = tempfile::tempdir().unwrap();
    let (handler, go, order) = gate();
    let service = Service::register("s", options(dir.path()), handler).unwrap();
    let client = connect(dir.path());
    let served = client.submit(b"0", &CallOptions::default()).unwrap();
    assert_eq!(order.recv_timeout(TIMEOUT), Ok(b'0'));
    // In time when it is taken, and not when the worker would be free.
    let soon = CallOptions { wait_late: TIMEOUT, ..CallOptions::within(Duration::from_millis(200)) };
    assert!(matches!(client.call(b"l", &soon), Err(CallError::Late)));
    go.send(()).unwrap();
    assert!(client.wait(served, TIMEOUT).is_ok());
    assert_eq!((service.report().answers.served, service.report().answers.late), (1, 1));
}

#[test]
fn while_all_workers_are_busy_requests_are_still_judged() {
    let dir = tempfile::tempdir().unwrap();
    let (handler, go, order) = gate();
    let rules = Options { admission: true, budget: Duration::from_secs(1000), queue_bound: 2, ..options(dir.path()) };
    let service = Service::register("s", rules, handler).unwrap();
    let client = connect(dir.path());
    let served = client.submit(b"0", &CallOptions::default()).unwrap();
    assert_eq!(order.recv_timeout(TIMEOUT), Ok(b'0'));
    // Late, refused by admission, expired, cancelled, queue full: none of them waits for the
    // worker.
    let past = CallOptions { deadline: Deadline::At(1), wait_late: Duration::MAX, ..CallOptions::default() };
    assert!(matches!(client.call(b"l", &past), Err(CallError::Late)));
    let soon = CallOptions::within(Duration::from_secs(500));
    assert!(matches!(client.call(b"r", &soon), Err(CallError::Refused(Refusal::Admission))));
    let short = CallOptions { ttl: Some(Duration::from_millis(30)), ..CallOptions::default() };
    assert!(matches!(client.call(b"e", &short), Err(CallError::Expired)));
    let cancelled = client.submit(b"c", &CallOptions::default()).unwrap();
    assert!(client.cancel(cancelled));
    assert!(matches!(client.wait(cancelled, TIMEOUT), Err(CallError::Cancelled)));
    let queued: Vec<_> = (0..2).map(|_| client.submit(b"q", &CallOptions::default()).unwrap()).collect();
    assert!(matches!(client.call(b"f", &CallOptions::default()), Err(CallError::Refused(Refusal::QueueFull))));
    assert_eq!(service.report().pending, 2);
    for _ in 0..3 {
        go.send(()).unwrap();
    }
    assert!(client.wait(served, TIMEOUT).is_ok());
    assert!(client.wait_all(&queued, TIMEOUT).iter().all(Result::is_ok));
    let answers = service.report().answers;
    assert_eq!((answers.served, answers.late, answers.expired, answers.cancelled), (3, 1, 1, 1));
    assert_eq!((answers.refused_admission, answers.refused_queue_full), (1, 1));
    assert_eq!(client.under_way(), 0);
}

#[test]
fn a_call_ends_at_its_deadline_or_waits_longer_as_its_caller_says() {
    let dir = tempfile::tempdir().unwrap();
    let (handler, go, order) = gate();
    let service = Service::register("s", options(dir.path()), handler).unwrap();
    let client = connect(dir.path());
    let soon = CallOptions::within(Duration::from_millis(20));
    let began = std::time::Instant::now();
    // It is being served, and would be for ever.
    let error = client.call(&[b'0'; 3000], &soon).unwrap_err();
    assert!(matches!(error, CallError::DeadlineExceeded), "{error}");
    assert_eq!(order.recv_timeout(TIMEOUT), Ok(b'0'));
    let token = client.submit(b"1", &soon).unwrap();
    assert_eq!(client.wait_any(&[token], TIMEOUT), Some(0), "its end is there to be fetched");
    assert!(matches!(client.poll(token), Some(Err(CallError::DeadlineExceeded))));
    assert!(matches!(client.poll(token), Some(Err(CallError::Unknown))));
    let futures = [client.call_async(b"2", &soon), client.call_async(b"3", &CallOptions::within(TIMEOUT))];
    let [second, third] = futures;
    let (mut second, (woken, wakes)) = (Box::pin(second), mpsc::channel());
    let waker = Waker::from(Arc::new(Flag(woken)));
    let second = loop {
        match second.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(end) => break end,
            Poll::Pending => wakes.recv_timeout(TIMEOUT).expect("a future is woken at its deadline"),
        }
    };
    assert!(matches!(second, Err(CallError::DeadlineExceeded)), "{second:?}");
    drop(third);
    assert!(began.elapsed() < TIMEOUT, "all at their deadlines");
    // What timed out is not what exceeded its deadline.
    let impatient = CallOptions { timeout: Duration::from_millis(1), ..CallOptions::within(TIMEOUT) };
    assert!(matches!(client.call(b"4", &impatient), Err(CallError::Timeout)));
    go.send(()).unwrap();
    until("all slots and memory come back", || client.under_way() == 0 && client.arena_used() == 0);
    // The same with a caller that waits for what is late: the reply says that it is.
    let patient = CallOptions { wait_late: TIMEOUT, ..soon };
    let token = client.submit(b"5", &patient).unwrap();
    assert_eq!(order.recv_timeout(TIMEOUT), Ok(b'5'));
    std::thread::sleep(Duration::from_millis(25));
    go.send(()).unwrap();
    let late = client.wait(token, TIMEOUT).unwrap();
    assert!(late.is_late() && late.late_by_ns() > 0);
    go.send(()).unwrap();
    let reply = client.call(b"6", &CallOptions::within(TIMEOUT)).unwrap();
    assert!(!reply.is_late() && reply.late_by_ns() == 0);
    assert_eq!(service.report().answers.overran, 2, "the service counts both that it ended after their deadlines");
}

/// How many of 50 calls an honest client gets answered in time, while a greedy one of the same user
/// has 200 under way at each instant, with deadlines that are always a little earlier.
fn honest_calls_in_time(shares: bool) -> usize {
    let dir = tempfile::tempdir().unwrap();
    // A service that takes time and no CPU, so that a busy machine changes little.
    let nap = |_: &Request<'_>, reply: &mut Reply<'_>| {
        std::thread::sleep(Duration::from_millis(1));
        let _ = reply.write(b"done");
    };
    let service = Service::register("s", Options { shares, ..options(dir.path()) }, nap).unwrap();
    let honest = connect(dir.path());
    let many = ConnectOptions { entries: 256, folder: Some(dir.path().into()), ..ConnectOptions::default() };
    let greedy = Client::connect_with("s", &many).unwrap();
    let enough = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let soon = CallOptions::within(Duration::from_millis(50));
            let mut tokens = Vec::new();
            while !enough.load(Ordering::Relaxed) {
                while tokens.len() < 200
                    && let Ok(token) = greedy.submit(b"g", &soon)
                {
                    tokens.push(token);
                }
                greedy.wait_any(&tokens, Duration::from_millis(1));
                tokens.retain(|token| greedy.poll(*token).is_none());
            }
        });
        until("the greedy one fills the queue", || service.report().pending > 100);
        let in_time = |_: &usize| honest.call(b"h", &CallOptions::within(Duration::from_millis(60))).is_ok();
        let in_time = (0..50).filter(in_time).count();
        enough.store(true, Ordering::Relaxed);
        in_time
    })
}

#[test]
fn a_greedy_client_with_short_deadlines_makes_no_honest_call_late() {
    let (with, without) = (honest_calls_in_time(true), honest_calls_in_time(false));
    println!("in time of 50: {with} with shares, {without} without");
    assert!(with >= 45 && with > without, "in time of 50: {with} with shares, {without} without");
}

#[test]
fn a_caller_whose_patience_ends_gets_its_slot_and_memory_back_with_the_answer() {
    let dir = tempfile::tempdir().unwrap();
    let (handler, go, order) = gate();
    let _service = Service::register("s", options(dir.path()), handler).unwrap();
    let client = connect(dir.path());
    let options = CallOptions { timeout: Duration::from_millis(20), ..CallOptions::default() };
    // The answer does not come before `go`: who would wait for it waits for ever.
    assert!(matches!(client.call(&[b'0'; 3000], &options), Err(CallError::Timeout)));
    assert_eq!(order.recv_timeout(TIMEOUT), Ok(b'0'));
    assert_eq!(client.under_way(), 1);
    assert!(client.arena_used() > 0);
    go.send(()).unwrap();
    until("the slot comes back", || client.under_way() == 0);
    assert_eq!(client.arena_used(), 0);
}

#[test]
fn tokens_are_polled_waited_for_and_used_up() {
    let dir = tempfile::tempdir().unwrap();
    let (handler, go, order) = gate();
    let _service = Service::register("s", options(dir.path()), handler).unwrap();
    let client = connect(dir.path());
    let (a, b) =
        (client.submit(b"a", &CallOptions::default()).unwrap(), client.submit(b"b", &CallOptions::default()).unwrap());
    assert_eq!(order.recv_timeout(TIMEOUT), Ok(b'a'));
    assert!(client.poll(a).is_none() && client.poll(b).is_none());
    assert_eq!(client.wait_any(&[a, b], Duration::from_millis(5)), None);
    go.send(()).unwrap();
    assert_eq!(client.wait_any(&[b, a], TIMEOUT), Some(1));
    assert_eq!(client.poll(a).unwrap().unwrap().to_vec().unwrap(), b"a");
    assert!(matches!(client.poll(a), Some(Err(CallError::Unknown))));
    assert!(matches!(client.wait(a, TIMEOUT), Err(CallError::Unknown)));
    assert!(!client.cancel(a));
    go.send(()).unwrap();
    assert!(client.wait(b, TIMEOUT).is_ok());
    assert_eq!(client.wait_any(&[], Duration::from_millis(1)), None);
}

#[test]
fn a_connection_holds_as_many_calls_as_it_has_slots() {
    let dir = tempfile::tempdir().unwrap();
    let (handler, go, _order) = gate();
    let _service = Service::register("s", options(dir.path()), handler).unwrap();
    let client = connect_with(dir.path(), ConnectOptions { entries: 4, ..ConnectOptions::default() });
    let tokens: Vec<_> = (0..4).map(|_| client.submit(b"x", &CallOptions::default()).unwrap()).collect();
    assert!(matches!(client.submit(b"x", &CallOptions::default()), Err(CallError::Busy(4))));
    (0..4).for_each(|_| go.send(()).unwrap());
    assert!(client.wait_all(&tokens, TIMEOUT).iter().all(Result::is_ok));
    go.send(()).unwrap();
    assert!(client.call(b"x", &CallOptions::default()).is_ok());
}

#[test]
fn a_handler_that_panics_fails_its_request_only() {
    let dir = tempfile::tempdir().unwrap();
    let handler = |request: &Request<'_>, reply: &mut Reply<'_>| {
        reply.loan(4000).unwrap();
        assert_ne!(request.to_vec(), b"boom");
        echo(request, reply);
    };
    let service = Service::register("s", options(dir.path()), handler).unwrap();
    let client = connect(dir.path());
    for _ in 0..300 {
        assert!(matches!(client.call(b"boom", &CallOptions::default()), Err(CallError::Failed)));
    }
    assert_eq!(client.call(b"fine", &CallOptions::default()).unwrap().to_vec().unwrap(), b"fine");
    assert_eq!(service.report().answers.failed, 300);
}

#[test]
fn replies_that_are_held_fill_the_reply_memory_and_come_back_when_dropped() {
    let dir = tempfile::tempdir().unwrap();
    let small = Options { reply_arena_bytes: 1 << 16, ..options(dir.path()) };
    let service = Service::register("s", small, echo).unwrap();
    let client = connect(dir.path());
    let bytes = vec![7; 16 << 10];
    let held: Vec<_> = (0..4).map(|_| client.call(&bytes, &CallOptions::default()).unwrap()).collect();
    let refused = client.call(&bytes, &CallOptions::default());
    assert!(matches!(refused, Err(CallError::Refused(Refusal::ReplyMemory))), "{refused:?}");
    assert!(client.call(b"inline", &CallOptions::default()).is_ok(), "small ones need none");
    assert!(held.iter().all(|r| r.to_vec().unwrap() == bytes));
    drop(held);
    for _ in 0..20 {
        assert_eq!(client.call(&bytes, &CallOptions::default()).unwrap().to_vec().unwrap(), bytes);
    }
    assert_eq!(service.report().answers.refused_reply_memory, 1);
}

#[test]
fn a_reply_that_is_held_too_long_is_reclaimed_and_said_so() {
    let dir = tempfile::tempdir().unwrap();
    let short = Options { reply_ttl: Duration::from_millis(1), ..options(dir.path()) };
    let service = Service::register("s", short, echo).unwrap();
    let client = connect(dir.path());
    let reply = client.call(&[1; 5000], &CallOptions::default()).unwrap();
    until("it is reclaimed while calls are served", || {
        client.call(b"x", &CallOptions::default()).unwrap();
        service.report().reclaimed_replies == 1
    });
    assert!(!reply.is_current());
    let second = client.call(&[1; 5000], &CallOptions::default()).unwrap();
    until("it is reclaimed while nothing is served", || service.report().reclaimed_replies == 2);
    assert!(!second.is_current());
    assert!(matches!(reply.to_vec(), Err(CallError::Reclaimed)));
}

#[test]
fn loans_and_shared_memory_are_written_in_place_and_read_in_place() {
    let dir = tempfile::tempdir().unwrap();
    let answer = SharedBuffer::new(1 << 20, false).unwrap();
    answer.view().write_array(1000, *b"shared answer").unwrap();
    let handler = move |request: &Request<'_>, reply: &mut Reply<'_>| {
        let word = request.payload().read_array::<5>(request.len() - 5).unwrap();
        match &word {
            b"loan!" => {
                let to = reply.loan(9000).unwrap();
                to.write_array(8990, *b"from place").unwrap();
            }
            _ => reply.share(&answer, 1000, 13).unwrap(),
        }
    };
    let _service = Service::register("s", options(dir.path()), handler).unwrap();
    let client = connect(dir.path());
    let loan = client.loan(3000).unwrap();
    loan.view().write_array(2995, *b"loan!").unwrap();
    let token = client.submit_loan(loan, &CallOptions::default()).unwrap();
    let reply = client.wait(token, TIMEOUT).unwrap();
    assert_eq!(reply.view().read_array(8990), Some(*b"from place"));
    drop(client.loan(3000));
    assert_eq!(client.arena_used(), 0);

    // 1 GiB, of which only the pages that are written exist.
    let buffer = SharedBuffer::new(1 << 30, false).unwrap();
    buffer.view().write_array((1 << 30) - 5, *b"last5").unwrap();
    for _ in 0..3 {
        let reply = client.call_shared(&buffer, 0, 1 << 30, &CallOptions::default()).unwrap();
        assert_eq!(reply.to_vec().unwrap(), b"shared answer");
    }
    assert!(matches!(client.submit_shared(&buffer, 1, 1 << 30, &CallOptions::default()), Err(CallError::Range { .. })));
    // More memories than a connection holds at a time: those that are gone are reclaimed.
    for n in 0..200u32 {
        let buffer = SharedBuffer::new(4096, false).unwrap();
        buffer.view().write_array(0, n.to_le_bytes()).unwrap();
        assert_eq!(client.call_shared(&buffer, 0, 4096, &CallOptions::default()).unwrap().len(), 13, "{n}");
    }
}

#[test]
fn a_memfd_that_is_there_already_is_handed_over_whole() {
    let dir = tempfile::tempdir().unwrap();
    let _service = Service::register("s", options(dir.path()), echo).unwrap();
    let client = connect(dir.path());
    let memfd = || {
        let fd = memfd_create("theirs", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&fd, 300_000).unwrap();
        rustix::io::pwrite(&fd, b"there already", 299_987).unwrap();
        fd
    };
    let unsealed = SharedBuffer::of_memfd(memfd()).unwrap_err();
    assert!(unsealed.to_string().contains("expected seals SHRINK and GROW"), "{unsealed}");
    let file = SharedBuffer::of_memfd(std::fs::File::open("/proc/self/exe").unwrap().into()).unwrap_err();
    assert!(matches!(file, AdoptError::NoMemfd { .. } | AdoptError::Unsealed { .. }), "{file}");
    for seals in [SealFlags::empty(), SealFlags::WRITE] {
        let fd = memfd();
        fcntl_add_seals(&fd, seals | SealFlags::SHRINK | SealFlags::GROW).unwrap();
        let buffer = SharedBuffer::of_memfd(fd).unwrap();
        assert_eq!((buffer.len(), buffer.read().read_array(299_987)), (300_000, Some(*b"there already")));
        assert_eq!(buffer.view().is_empty(), seals == SealFlags::WRITE, "what may not be written is for reading only");
        assert_eq!(buffer.is_writable(), seals != SealFlags::WRITE);
        let reply = client.call_shared(&buffer, 299_980, 20, &CallOptions::default()).unwrap();
        assert_eq!(reply.to_vec().unwrap(), [&[0; 7][..], b"there already"].concat());
    }
}

#[test]
fn memory_that_the_service_does_not_allow_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let small = Options { max_shared_bytes: 1 << 20, ..options(dir.path()) };
    let _service = Service::register("s", small, echo).unwrap();
    let client = connect(dir.path());
    let large = SharedBuffer::new(2 << 20, false).unwrap();
    let refused = client.call_shared(&large, 0, 10, &CallOptions::default());
    assert!(matches!(refused, Err(CallError::Refused(Refusal::Memory))), "{refused:?}");
    let fits = SharedBuffer::new(1 << 20, false).unwrap();
    assert!(client.call_shared(&fits, 0, 10, &CallOptions::default()).is_ok());
    // What did not fit beside it does when it has gone, by the same name.
    let waits = SharedBuffer::new(4096, false).unwrap();
    let refused = client.call_shared(&waits, 0, 10, &CallOptions::default());
    assert!(matches!(refused, Err(CallError::Refused(Refusal::Memory))), "{refused:?}");
    drop(fits);
    assert!(client.call_shared(&waits, 0, 10, &CallOptions::default()).is_ok());
}

#[test]
fn a_nested_call_inherits_what_is_left() {
    let dir = tempfile::tempdir().unwrap();
    let seen = Arc::new(AtomicU64::new(0));
    let inner = {
        let seen = seen.clone();
        move |request: &Request<'_>, _: &mut Reply<'_>| {
            seen.store(request.deadline_ns().unwrap_or(u64::MAX), Ordering::SeqCst)
        }
    };
    let _inner = Service::register("s", options(dir.path()), inner).unwrap();
    let client = Mutex::new(connect(dir.path()));
    let outer = move |_: &Request<'_>, _: &mut Reply<'_>| {
        let options = CallOptions::within(Duration::from_secs(1000));
        client.lock().unwrap().call(b"", &options).unwrap();
    };
    let _outer = Service::register("outer", options(dir.path()), outer).unwrap();
    let client =
        Client::connect_with("outer", &ConnectOptions { folder: Some(dir.path().into()), ..ConnectOptions::default() })
            .unwrap();
    let deadline = now_ns() + 20_000_000_000;
    client.call(b"", &CallOptions { deadline: Deadline::At(deadline), ..CallOptions::default() }).unwrap();
    assert_eq!(seen.load(Ordering::SeqCst), deadline);
}

struct Flag(mpsc::Sender<()>);

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        let _ = self.0.send(());
    }
}

#[test]
fn a_call_is_a_future_for_any_executor() {
    let dir = tempfile::tempdir().unwrap();
    let (handler, go, order) = gate();
    let service = Service::register("s", options(dir.path()), handler).unwrap();
    let client = connect(dir.path());
    let (woken, wakes) = mpsc::channel();
    let waker = Waker::from(Arc::new(Flag(woken)));
    let mut context = Context::from_waker(&waker);
    let mut calls: Vec<_> =
        [b"a", b"b"].map(|name| Box::pin(client.call_async(name, &CallOptions::default()))).into_iter().collect();
    for call in &mut calls {
        assert!(call.as_mut().poll(&mut context).is_pending());
    }
    for (name, call) in b"ab".iter().zip(&mut calls) {
        assert_eq!(order.recv_timeout(TIMEOUT), Ok(*name));
        go.send(()).unwrap();
        let reply = loop {
            match call.as_mut().poll(&mut context) {
                Poll::Ready(reply) => break reply.unwrap(),
                Poll::Pending => wakes.recv_timeout(TIMEOUT).unwrap(),
            }
        };
        assert_eq!(reply.to_vec().unwrap(), [*name]);
    }
    // One that is dropped is cancelled; one that waits when the service ends is woken.
    let mut first = Box::pin(client.call_async(b"c", &CallOptions::default()));
    assert!(first.as_mut().poll(&mut context).is_pending());
    assert_eq!(order.recv_timeout(TIMEOUT), Ok(b'c'));
    drop(client.call_async(b"d", &CallOptions::default()));
    until("it is cancelled", || service.report().answers.cancelled == 1);
    go.send(()).unwrap();
    drop(service);
    loop {
        match first.as_mut().poll(&mut context) {
            Poll::Ready(done) => {
                assert_eq!(done.unwrap().to_vec().unwrap(), b"c", "it was served before the service ended");
                break;
            }
            Poll::Pending => wakes.recv_timeout(TIMEOUT).unwrap(),
        }
    }
    let mut last = Box::pin(client.call_async(b"e", &CallOptions::default()));
    let ended = loop {
        match last.as_mut().poll(&mut context) {
            Poll::Ready(done) => break done,
            Poll::Pending => wakes.recv_timeout(TIMEOUT).unwrap(),
        }
    };
    assert!(matches!(ended, Err(CallError::ProviderGone)), "{ended:?}");
}

#[test]
fn a_nearer_deadline_that_comes_while_the_client_falls_asleep_is_met() {
    let dir = tempfile::tempdir().unwrap();
    let (handler, go, order) = gate();
    let _service = Service::register("s", options(dir.path()), handler).unwrap();
    let (woken, wakes) = mpsc::channel();
    let waker = Waker::from(Arc::new(Flag(woken)));
    let mut context = Context::from_waker(&waker);
    let far = CallOptions::within(TIMEOUT * 4);
    // The first future has the client's thread go to sleep until the far deadline. The second one
    // comes at each instant of that.
    for n in 0..300 {
        let client = connect(dir.path());
        let mut late = Box::pin(client.call_async(b"l", &far));
        assert!(late.as_mut().poll(&mut context).is_pending());
        let instant = std::time::Instant::now();
        while instant.elapsed() < Duration::from_micros(n) {
            std::hint::spin_loop();
        }
        let mut soon = Box::pin(client.call_async(b"s", &CallOptions::within(Duration::from_millis(2))));
        let ended = loop {
            match soon.as_mut().poll(&mut context) {
                Poll::Ready(done) => break done,
                Poll::Pending => wakes.recv_timeout(TIMEOUT).expect("a future is woken at its deadline"),
            }
        };
        assert!(matches!(ended, Err(CallError::DeadlineExceeded)), "{ended:?}");
        drop((soon, late));
    }
    drop(go);
    drop(order);
}

/// A task of an executor that runs or drops it wherever it is woken: in its waker. Drops all tasks
/// but the first.
struct Task {
    futures: Mutex<Vec<CallFuture>>,
    ended: mpsc::Sender<Vec<u8>>,
}

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        let mut futures = self.futures.lock().unwrap();
        futures.truncate(1);
        let Some(mut future) = futures.pop() else { return };
        drop(futures);
        match Pin::new(&mut future).poll(&mut Context::from_waker(&Waker::from(self.clone()))) {
            Poll::Ready(done) => self.ended.send(done.unwrap().to_vec().unwrap()).unwrap(),
            Poll::Pending => self.futures.lock().unwrap().push(future),
        }
    }
}

#[test]
fn a_waker_may_poll_and_drop_futures_then_and_there() {
    let dir = tempfile::tempdir().unwrap();
    let (handler, go, order) = gate();
    let service = Service::register("s", options(dir.path()), handler).unwrap();
    let client = connect(dir.path());
    // By the thread that waits for futures, and by one that waits for another call.
    for blocks in [false, true] {
        let (ended, ends) = mpsc::channel();
        let task = Arc::new(Task { futures: Mutex::default(), ended });
        for name in [b"a", b"b", b"c"] {
            let mut future = client.call_async(name, &CallOptions::default());
            let waker = Waker::from(task.clone());
            assert!(Pin::new(&mut future).poll(&mut Context::from_waker(&waker)).is_pending());
            task.futures.lock().unwrap().push(future);
        }
        assert_eq!(order.recv_timeout(TIMEOUT), Ok(b'a'));
        let cancelled = service.report().answers.cancelled;
        let waits = blocks.then(|| {
            let client = client.clone();
            std::thread::spawn(move || client.call(b"d", &CallOptions::default()).map(|reply| reply.to_vec().unwrap()))
        });
        until("the blocking call waits too", || service.report().pending == 2 + u64::from(blocks));
        go.send(()).unwrap();
        assert_eq!(ends.recv_timeout(TIMEOUT).as_deref(), Ok(&b"a"[..]));
        // The two others were dropped by the waker: one may be served by now.
        until("they are cancelled", || {
            if order.try_recv().is_ok() {
                go.send(()).unwrap();
            }
            service.report().answers.cancelled > cancelled && client.under_way() == 0
        });
        if let Some(waits) = waits {
            assert_eq!(waits.join().unwrap().unwrap(), b"d");
        }
    }
}

#[test]
fn a_service_that_ends_answers_all_that_wait() {
    let dir = tempfile::tempdir().unwrap();
    let (handler, go, order) = gate();
    let service = Service::register("s", options(dir.path()), handler).unwrap();
    let client = connect(dir.path());
    let served = client.submit(b"a", &CallOptions::default()).unwrap();
    assert_eq!(order.recv_timeout(TIMEOUT), Ok(b'a'));
    let queued = client.submit(b"b", &CallOptions::default()).unwrap();
    std::thread::scope(|scope| {
        let (tell, told) = mpsc::channel();
        scope.spawn(move || {
            tell.send(rustix::thread::gettid()).unwrap();
            drop(service);
        });
        // It has been asked to end once who asked sleeps: until the call that is served is over
        // there is nothing to do.
        let thread = told.recv_timeout(TIMEOUT).unwrap().as_raw_nonzero();
        let stat = || std::fs::read_to_string(format!("/proc/self/task/{thread}/stat")).unwrap();
        until("the service to be asked to end", || stat().rsplit_once(") ").unwrap().1.starts_with('S'));
        go.send(()).unwrap();
    });
    assert_eq!(client.wait(served, TIMEOUT).unwrap().to_vec().unwrap(), b"a");
    assert!(matches!(client.wait(queued, TIMEOUT), Err(CallError::Refused(Refusal::Stopping))));
    assert!(matches!(client.call(b"c", &CallOptions::default()), Err(CallError::ProviderGone)));
    let absent =
        Client::connect_with("s", &ConnectOptions { folder: Some(dir.path().into()), ..ConnectOptions::default() });
    assert!(matches!(absent, Err(ConnectError::NoService { .. })));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left");
}

/// How long a call takes that is to stand out.
const SLOW: Duration = Duration::from_millis(50);

#[test]
fn a_service_reports_what_it_did() {
    let dir = tempfile::tempdir().unwrap();
    let watched = Options { slow: SLOW / 2, class: WorkerClass::Fifo(5), ..options(dir.path()) };
    let handler = |request: &Request<'_>, reply: &mut Reply<'_>| {
        if request.len() == 3 {
            std::thread::sleep(SLOW);
        }
        reply.set_code(17);
    };
    let _service = Service::register("s", watched, handler).unwrap();
    let client = connect(dir.path());
    for n in 0..10 {
        let options = CallOptions { trace: 1000 + n as u64, ..CallOptions::default() };
        let reply = client.call(&vec![0; n], &options).unwrap();
        assert_eq!(reply.code(), 17);
        // One of the others may be slow on a machine that has much else to do.
        assert!(n != 3 || u128::from(reply.service_ns()) >= SLOW.as_nanos());
    }
    let options = ConnectOptions { folder: Some(dir.path().into()), ..ConnectOptions::default() };
    let report = report("s", &options).unwrap();
    assert_eq!((report.name.as_str(), report.pid, report.clients), ("s", std::process::id(), 1));
    assert_eq!((report.answers.served, report.service.count, report.queued.count), (10, 10, 10));
    let (max_ns, p50_ns) = (u128::from(report.service.max_ns), u128::from(report.service.p50_ns));
    assert!(p50_ns < SLOW.as_nanos() && SLOW.as_nanos() <= max_ns, "{:?}", report.service);
    let slow: Vec<_> = report.slow_calls.iter().filter(|c| c.trace == 1003).collect();
    assert_eq!((slow.len(), slow[0].pid, slow[0].request_bytes), (1, std::process::id(), 3));
    assert!(
        u128::from(slow[0].service_ns) >= SLOW.as_nanos() && slow[0].end == "served" && slow[0].late_by_ns == 0,
        "{slow:?}"
    );
    assert_eq!((u128::from(report.slow_ns), report.slow), ((SLOW / 2).as_nanos(), report.slow_calls.len() as u64));
    let class = &report.workers[0];
    assert!(class == "fifo 5" || class.starts_with("normal (asked for fifo 5: "), "{class}");
}

#[test]
fn slow_calls_are_told_with_what_they_waited_for_and_how_they_ended() {
    let dir = tempfile::tempdir().unwrap();
    let (handler, go, entered) = gate();
    let slow = Options { slow: Duration::from_millis(20), ..options(dir.path()) };
    let service = Service::register("s", slow, handler).unwrap();
    let client = connect(dir.path());
    let submit = |trace, ttl: Option<u64>| {
        let options = CallOptions { trace, ttl: ttl.map(Duration::from_millis), ..CallOptions::default() };
        client.submit(&[trace as u8], &options).unwrap()
    };
    let served = submit(1, None);
    assert_eq!(entered.recv_timeout(TIMEOUT).unwrap(), 1);
    let (waited, expired) = (submit(2, None), submit(3, Some(40)));
    assert!(matches!(client.wait(expired, TIMEOUT), Err(CallError::Expired)));
    go.send(()).unwrap();
    client.wait(served, TIMEOUT).unwrap();
    go.send(()).unwrap();
    client.wait(waited, TIMEOUT).unwrap();
    // At once.
    go.send(()).unwrap();
    client.wait(submit(4, None), TIMEOUT).unwrap();
    let report = service.report();
    assert_eq!((report.slow, report.slow_ns), (report.slow_calls.len() as u64, 20_000_000));
    // The fourth is among them only if this machine held it up.
    let all_slow = report.slow_calls.iter().all(|c| c.queued_ns + c.service_ns > 20_000_000);
    assert!(all_slow && report.slow <= 4, "{:?}", report.slow_calls);
    let found = |trace| report.slow_calls.iter().find(|c| c.trace == trace).unwrap();
    // Each waited or was served for the 40 ms at least that the third waited.
    assert!(found(1).end == "served" && found(1).service_ns >= 20_000_000, "{:?}", found(1));
    assert!(found(2).end == "served" && found(2).queued_ns >= 20_000_000, "{:?}", found(2));
    let third = found(3);
    assert!(third.end == "expired" && third.queued_ns >= 40_000_000 && third.service_ns == 0, "{third:?}");
    assert!(found(1).at_ns >= third.at_ns);
}

#[test]
fn a_handler_is_told_that_nobody_waits_for_its_answer_any_more() {
    let dir = tempfile::tempdir().unwrap();
    let (tell, told) = mpsc::channel();
    let (go, open) = mpsc::channel::<()>();
    let (tell, open) = (Mutex::new(tell), Mutex::new(open));
    let handler = move |request: &Request<'_>, reply: &mut Reply<'_>| {
        let (name, tell) = (request.to_vec(), tell.lock().unwrap().clone());
        assert!(!request.is_cancelled());
        tell.send((name.clone(), "begun")).unwrap();
        request.on_cancelled(move || tell.send((name, "cancelled")).unwrap());
        open.lock().unwrap().recv_timeout(TIMEOUT).unwrap();
        reply.set_code(u32::from(request.is_cancelled()));
    };
    let _service = Service::register("s", options(dir.path()), handler).unwrap();
    let hears = |name: &[u8], what| assert_eq!(told.recv_timeout(TIMEOUT).unwrap(), (name.to_vec(), what));
    let client = connect(dir.path());
    let a = client.submit(b"a", &CallOptions::default()).unwrap();
    hears(b"a", "begun");
    assert!(client.cancel(a));
    hears(b"a", "cancelled");
    go.send(()).unwrap();
    assert_eq!(client.wait(a, TIMEOUT).unwrap().code(), 1, "it was served, since that had begun");
    // The same slot's next turn: the earlier cancellation has no effect any more.
    let b = client.submit(b"b", &CallOptions::default()).unwrap();
    hears(b"b", "begun");
    go.send(()).unwrap();
    assert_eq!(client.wait(b, TIMEOUT).unwrap().code(), 0);
    assert!(!client.cancel(b));
    // A caller that goes.
    client.submit(b"c", &CallOptions::default()).unwrap();
    hears(b"c", "begun");
    drop(client);
    hears(b"c", "cancelled");
    go.send(()).unwrap();
    assert!(told.try_recv().is_err());
}

#[test]
fn a_hook_that_panics_costs_the_service_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (go, open) = mpsc::channel::<()>();
    let open = Mutex::new(open);
    let (begun, begins) = mpsc::channel();
    let hooked = Arc::new(AtomicU64::new(0));
    let handler = {
        let hooked = hooked.clone();
        move |request: &Request<'_>, _: &mut Reply<'_>| {
            if !request.is_empty() {
                let hooked = hooked.clone();
                request.on_cancelled(move || {
                    hooked.fetch_add(1, Ordering::SeqCst);
                    panic!("as meant");
                });
                begun.send(()).unwrap();
                open.lock().unwrap().recv_timeout(TIMEOUT).unwrap();
            }
        }
    };
    let _service = Service::register("s", options(dir.path()), handler).unwrap();
    let client = connect(dir.path());
    // By the control thread, as the only worker is busy; then by the thread that sees the client
    // go.
    let token = client.submit(b"x", &CallOptions::default()).unwrap();
    begins.recv_timeout(TIMEOUT).unwrap();
    assert!(client.cancel(token));
    until("its hook is called", || hooked.load(Ordering::SeqCst) == 1);
    go.send(()).unwrap();
    assert!(client.wait(token, TIMEOUT).is_ok());
    let other = connect(dir.path());
    client.submit(b"x", &CallOptions::default()).unwrap();
    begins.recv_timeout(TIMEOUT).unwrap();
    drop(client);
    until("its hook is called again", || hooked.load(Ordering::SeqCst) == 2);
    go.send(()).unwrap();
    assert!(other.call(b"", &CallOptions::default()).is_ok(), "the worker is still there");
    assert!(connect(dir.path()).call(b"", &CallOptions::default()).is_ok(), "and who lets clients in");
}

#[test]
fn options_that_make_no_sense_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    for wrong in [
        Options { workers: 0, ..options(dir.path()) },
        Options { max_entries: 5000, ..options(dir.path()) },
        Options { reply_arena_bytes: 5000, ..options(dir.path()) },
        Options { reply_arena_bytes: 128 << 20, ..options(dir.path()) },
        Options { class: WorkerClass::Fifo(100), ..options(dir.path()) },
        Options { queue_bound: 0, ..options(dir.path()) },
    ] {
        assert!(Service::register("s", wrong, echo).is_err());
    }
    let class = WorkerClass::Deadline;
    for budget in [Duration::from_nanos(1000), Duration::from_millis(11)] {
        let error = Service::register("s", Options { class, budget, ..options(dir.path()) }, echo).unwrap_err();
        assert!(error.to_string().contains("to the period"), "{error}");
    }
    let _service = Service::register("s", Options { max_clients: 1, ..options(dir.path()) }, echo).unwrap();
    assert!(Service::register("s", options(dir.path()), echo).is_err(), "the name is taken");
    let connect_options = ConnectOptions { folder: Some(dir.path().into()), ..ConnectOptions::default() };
    let wrong = ConnectOptions { entries: 3, ..connect_options.clone() };
    assert!(matches!(Client::connect_with("s", &wrong), Err(ConnectError::Geometry { .. })));
    let large = ConnectOptions { entries: 4096, ..connect_options.clone() };
    let refused = Client::connect_with("s", &large);
    assert!(matches!(&refused, Err(ConnectError::Refused(why)) if why.contains("4096 entries")), "{refused:?}");
    let _client = connect(dir.path());
    let second = Client::connect_with("s", &connect_options);
    assert!(matches!(&second, Err(ConnectError::Refused(why)) if why.contains("allows no more")), "{second:?}");
}
