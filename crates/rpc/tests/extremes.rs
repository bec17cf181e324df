//! Values at their ends, names that several want, folders that go, thousands of cancelled calls:
//! each call has one end, and all resources come back.

mod support;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Barrier, Mutex};
use std::time::Duration;

use tombolo_rpc::client::{CallError, CallOptions, Client, ConnectError, ConnectOptions};
use tombolo_rpc::clock::now_ns;
use tombolo_rpc::deadline::Deadline;
use tombolo_rpc::folder::{self, FolderError};
use tombolo_rpc::provider::{Options, RegisterError, Reply, Request, Service};
use tombolo_rpc::schedule::{Late, Order};
use tombolo_rpc::shared::SharedBuffer;
use tombolo_testing::{Random, TIMEOUT, until};

use support::{connect, connect_options, options};

fn echo(request: &Request<'_>, reply: &mut Reply<'_>) {
    let _ = reply.write_view(request.payload());
}

/// A handler that says when it has begun, and goes on when it is let.
fn gate() -> (impl Fn(&Request<'_>, &mut Reply<'_>) + Send + Sync, mpsc::Sender<()>, mpsc::Receiver<()>) {
    let (go, open) = mpsc::channel();
    let (entered, began) = mpsc::channel();
    let open = Mutex::new(open);
    let handler = move |request: &Request<'_>, reply: &mut Reply<'_>| {
        let _ = entered.send(());
        open.lock().unwrap().recv_timeout(TIMEOUT).unwrap();
        echo(request, reply);
    };
    (handler, go, began)
}

#[test]
fn deadlines_at_the_ends_of_the_clock() {
    let dir = tempfile::tempdir().unwrap();
    let tell = |request: &Request<'_>, reply: &mut Reply<'_>| {
        let _ = reply.write(&request.deadline_ns().unwrap_or(7).to_le_bytes());
    };
    for (late, order, admission) in [
        (Late::Refuse, Order::Edf, false),
        (Late::Refuse, Order::Fifo, true),
        (Late::BestEffort, Order::Edf, true),
        (Late::BestEffort, Order::DeadlineMonotonic, false),
    ] {
        let _service = Service::register("s", Options { late, order, admission, ..options(dir.path()) }, tell).unwrap();
        let client = connect(dir.path());
        let told = |deadline| {
            let wait = CallOptions { deadline, wait_late: Duration::MAX, ..CallOptions::default() };
            let reply = client.call(b"", &wait)?;
            Ok::<_, CallError>(u64::from_le_bytes(reply.to_vec()?.try_into().unwrap()))
        };
        for passed in [Deadline::At(0), Deadline::At(1), Deadline::At(now_ns() - 1)] {
            // Who serves it all the same knows what it was.
            match (late, told(passed)) {
                (Late::Refuse, Err(CallError::Late)) => {}
                (Late::BestEffort, Ok(known)) if Deadline::At(known) == passed => {}
                (_, other) => panic!("{late:?} {passed:?}: {other:?}"),
            }
        }
        assert_eq!(told(Deadline::At(u64::MAX)).unwrap(), 7, "that is best effort");
        assert_eq!(told(Deadline::In(Duration::MAX)).unwrap(), 7);
        assert_eq!(told(Deadline::At(u64::MAX - 1)).unwrap(), u64::MAX - 1);
        assert_eq!(told(Deadline::At(1 << 63)).unwrap(), 1 << 63);
    }
}

#[test]
fn patience_and_times_to_live_at_their_ends() {
    let dir = tempfile::tempdir().unwrap();
    let (handler, go, began) = gate();
    let endless = Options { ttl: Duration::MAX, reply_ttl: Duration::MAX, slow: Duration::MAX, ..options(dir.path()) };
    let service = Service::register("s", endless, handler).unwrap();
    let client = connect(dir.path());
    let call = |timeout, ttl| client.call(b"x", &CallOptions { timeout, ttl, ..CallOptions::default() });
    let held = client.submit(b"held", &CallOptions::default()).unwrap();
    began.recv_timeout(TIMEOUT).unwrap();
    assert!(matches!(call(Duration::ZERO, None), Err(CallError::Timeout)));
    // The shortest that there is: 1 ms.
    assert!(matches!(call(Duration::MAX, Some(Duration::ZERO)), Err(CallError::Expired)));
    go.send(()).unwrap();
    assert!(client.wait(held, Duration::MAX).is_ok());
    for ttl in [None, Some(Duration::MAX)] {
        go.send(()).unwrap();
        assert!(call(Duration::MAX, ttl).is_ok());
    }
    assert_eq!(service.report().slow, 0);
}

#[test]
fn budgets_without_end_are_admitted_to_nobody_and_harm_nobody() {
    let dir = tempfile::tempdir().unwrap();
    let (handler, go, began) = gate();
    let endless =
        Options { workers: 3, admission: true, budget: Duration::MAX, period: Duration::MAX, ..options(dir.path()) };
    let _service = Service::register("s", endless, handler).unwrap();
    let client = connect(dir.path());
    let tokens: Vec<_> = (0..4).map(|_| client.submit(b"x", &CallOptions::default()).unwrap()).collect();
    (0..3).for_each(|_| began.recv_timeout(TIMEOUT).unwrap());
    for deadline in [Deadline::In(Duration::from_secs(3600)), Deadline::At(u64::MAX - 1)] {
        let refused = client.call(b"y", &CallOptions { deadline, ..CallOptions::default() });
        assert!(matches!(refused, Err(CallError::Refused(_))), "{refused:?}");
    }
    (0..4).for_each(|_| go.send(()).unwrap());
    assert!(client.wait_all(&tokens, TIMEOUT).iter().all(Result::is_ok));
}

#[test]
fn payloads_at_the_ends_of_their_memory() {
    let dir = tempfile::tempdir().unwrap();
    const ARENA: usize = 1 << 13;
    let small = Options { reply_arena_bytes: ARENA as u64, ..options(dir.path()) };
    let _service = Service::register("s", small, echo).unwrap();
    let client =
        Client::connect_with("s", &ConnectOptions { arena_bytes: ARENA as u64, ..connect_options(dir.path()) })
            .unwrap();
    let call = CallOptions::default();
    for round in 0..3 {
        for len in [0, 1, 199, 200, 201, 4095, 4096, 4097, ARENA - 1, ARENA] {
            let bytes: Vec<u8> = (0..len).map(|i| (i + len + round) as u8).collect();
            let reply = client.call(&bytes, &call).unwrap_or_else(|e| panic!("{len} bytes: {e}"));
            assert!(reply.to_vec().unwrap() == bytes, "{len} bytes");
            drop(reply);
            if let Some(loan) = client.loan(len as u64) {
                loan.view().write_from(&bytes);
                let reply = client.wait(client.submit_loan(loan, &call).unwrap(), TIMEOUT).unwrap();
                assert!(reply.to_vec().unwrap() == bytes, "{len} bytes in place");
            }
        }
        // A request that is longer has memory of its own; its reply has none.
        let refused = client.call(&[1; ARENA + 1], &call);
        assert!(matches!(refused, Err(CallError::Refused(_))), "{refused:?}");
        assert!(client.loan(ARENA as u64 + 1).is_none() && client.loan(u64::MAX).is_none());
        assert_eq!((client.under_way(), client.arena_used()), (0, 0), "round {round}");
    }
    let buffer = SharedBuffer::new(4096, false).unwrap();
    for (offset, len, fits) in [(0, 0, true), (4096, 0, true), (4095, 1, true), (4096, 1, false), (u64::MAX, 2, false)]
    {
        match client.call_shared(&buffer, offset, len, &call) {
            Ok(reply) => assert!(fits && reply.len() as u64 == len, "{offset} {len}"),
            Err(error) => assert!(!fits && matches!(error, CallError::Range { .. }), "{offset} {len}: {error}"),
        }
    }
    let buffers: Vec<_> = (0..65).map(|_| SharedBuffer::new(4096, false).unwrap()).collect();
    let mut ends = buffers.iter().map(|buffer| client.call_shared(buffer, 0, 1, &call));
    assert!(ends.by_ref().take(63).all(|end| end.is_ok()), "one is there already");
    let error = ends.next().unwrap().unwrap_err();
    assert!(matches!(error, CallError::Share { .. }) && error.to_string().contains("64 memories"), "{error}");
    for bytes in [0, u64::MAX, 1 << 62] {
        assert!(SharedBuffer::new(bytes, false).is_err(), "{bytes}");
    }
}

#[test]
fn thousands_that_wait_are_cancelled_and_each_has_one_end() {
    let dir = tempfile::tempdir().unwrap();
    let (handler, go, began) = gate();
    let bounds = Options { max_entries: 4096, max_entries_per_uid: 3 * 4096, ..options(dir.path()) };
    let many = Options { queue_bound: 10_000, ..bounds };
    let service = Service::register("s", many, handler).unwrap();
    let clients: Vec<_> = (0..3)
        .map(|_| Client::connect_with("s", &ConnectOptions { entries: 4096, ..connect_options(dir.path()) }).unwrap())
        .collect();
    let mut random = Random::seeded();
    let held = clients[0].submit(b"held", &CallOptions::default()).unwrap();
    began.recv_timeout(TIMEOUT).unwrap();
    for round in 0..3 {
        let mut tokens = Vec::new();
        for (which, client) in clients.iter().enumerate() {
            for n in 0..3000u64 {
                let deadline = Deadline::In(Duration::from_secs(1000 + random.below(1000)));
                let options = CallOptions { deadline, trace: n, ..CallOptions::default() };
                let bytes = [n as u8; 300];
                let bytes = if n % 5 == 0 { &bytes[..] } else { b"x" };
                tokens.push((which, client.submit(bytes, &options).unwrap()));
            }
        }
        until("all wait", || service.report().pending == 9000);
        // In no order, and some twice.
        for n in (1..tokens.len()).rev() {
            tokens.swap(n, random.index(n + 1));
        }
        for (which, token) in tokens.iter().chain(&tokens[..1000]) {
            until("there is room for a cancellation", || {
                clients[*which].cancel(*token)
                    || clients[*which].poll(*token).is_some_and(|end| {
                        assert!(matches!(end, Err(CallError::Cancelled | CallError::Unknown)), "{end:?}");
                        true
                    })
            });
        }
        for (which, token) in tokens {
            let end = clients[which].wait(token, TIMEOUT);
            assert!(matches!(end, Err(CallError::Cancelled | CallError::Unknown)), "{end:?}");
        }
        let answers = service.report().answers;
        assert_eq!((answers.cancelled, service.report().pending), (9000 * (round + 1), 0));
    }
    go.send(()).unwrap();
    assert!(clients[0].wait(held, TIMEOUT).is_ok());
    go.send(()).unwrap();
    assert!(clients[1].call(b"x", &CallOptions::default()).is_ok());
    assert!(clients.iter().all(|client| (client.under_way(), client.arena_used()) == (0, 0)));
    assert_eq!(service.report().broken_clients, 0);
}

#[test]
fn calls_whose_patience_ends_are_not_served_also_where_the_ring_is_full() {
    let dir = tempfile::tempdir().unwrap();
    let (handler, go, began) = gate();
    let service = Service::register("s", options(dir.path()), handler).unwrap();
    let client = Client::connect_with("s", &ConnectOptions { entries: 4, ..connect_options(dir.path()) }).unwrap();
    let held = client.submit(b"held", &CallOptions::default()).unwrap();
    began.recv_timeout(TIMEOUT).unwrap();
    for _ in 0..3 {
        let tokens: Vec<_> = (0..3).map(|_| client.submit(b"x", &CallOptions::default()).unwrap()).collect();
        for token in tokens {
            assert!(matches!(client.wait(token, Duration::ZERO), Err(CallError::Timeout)));
        }
        until("their slots come back", || client.under_way() == 1);
    }
    go.send(()).unwrap();
    assert!(client.wait(held, TIMEOUT).is_ok());
    let answers = service.report().answers;
    assert_eq!((answers.served, answers.cancelled), (1, 9));
}

#[test]
fn a_service_whose_folder_goes_serves_on_and_takes_nobodys_name_with_it() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("services");
    let service = Service::register("s", options(&folder), echo).unwrap();
    let client = connect(&folder);
    std::fs::remove_dir_all(&folder).unwrap();
    assert!(client.call(b"x", &CallOptions::default()).is_ok());
    let error = Client::connect_with("s", &connect_options(&folder)).unwrap_err();
    assert!(matches!(error, ConnectError::NoService { .. }), "{error}");
    assert_eq!(folder::list(&folder), [""; 0]);
    // The name is free, in a re-created folder.
    let _next = Service::register("s", options(&folder), echo).unwrap();
    drop(service);
    assert!(matches!(client.call(b"x", &CallOptions::default()), Err(CallError::ProviderGone)));
    assert_eq!(folder::list(&folder), ["s"]);
    assert!(connect(&folder).call(b"x", &CallOptions::default()).is_ok());
}

#[test]
fn of_many_that_want_one_name_one_has_it() {
    let dir = tempfile::tempdir().unwrap();
    const RACERS: usize = 4;
    let (start, end) = (Arc::new(Barrier::new(RACERS)), Arc::new(Barrier::new(RACERS)));
    let won = Arc::new(AtomicU64::new(0));
    std::thread::scope(|scope| {
        for _ in 0..RACERS {
            let (start, end, won, dir) = (start.clone(), end.clone(), won.clone(), dir.path());
            scope.spawn(move || {
                for round in 0..40 {
                    start.wait();
                    // Some list the services meanwhile, which removes stale ones.
                    let mine = Service::register("s", options(dir), echo);
                    folder::list(dir);
                    match &mine {
                        Ok(_) => {
                            won.fetch_add(1, Ordering::SeqCst);
                        }
                        Err(RegisterError::Folder(FolderError::Running(_))) => {}
                        Err(error) => panic!("{error}"),
                    }
                    end.wait();
                    assert_eq!(won.load(Ordering::SeqCst), round + 1);
                    assert!(connect(dir).call(b"x", &CallOptions::default()).is_ok());
                    end.wait();
                    drop(mine);
                }
            });
        }
    });
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left");
}
