//! The bridge between a service of this machine and a peer, both ways: what calls end with on the
//! way, and when the peer goes.

mod place;

use std::net::TcpListener;
use std::path::Path;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tombolo_remote::bridge::{Bridge, BridgeError};
use tombolo_remote::{CallOptions, Calls, Response, ServeOptions, Status};
use tombolo_ring::ivshmem::protocol;
use tombolo_rpc::client::{self, CallError, Client, ConnectOptions};
use tombolo_rpc::provider::{Options, Reply, Request, Service};
use tombolo_testing::{found, until};

use place::Place;

const SOON: Duration = Duration::from_secs(20);
/// The time to live of what is to expire.
const WAITS: Duration = Duration::from_millis(800);

fn connect(folder: &Path, name: &str) -> Client {
    let options = ConnectOptions { folder: Some(folder.into()), ..ConnectOptions::default() };
    found("the service", || Client::connect_with(name, &options).ok())
}

/// A bridge that runs.
fn start(folder: &Path, calls: impl FnOnce(&ServeOptions) -> Calls + Send + 'static) -> JoinHandle<BridgeError> {
    let folder = folder.to_owned();
    std::thread::spawn(move || {
        let calls = calls(&ServeOptions { workers: 4, ..ServeOptions::default() });
        let bridge = Bridge {
            service: Some("cell".into()),
            target: Some("host".into()),
            workers: 4,
            folder: Some(folder),
            ..Bridge::default()
        };
        bridge.run(&calls, |_| ())
    })
}

/// A peer, as a cell would be one, and a bridge to it that runs.
fn bridged(folder: &Path) -> (Calls, JoinHandle<BridgeError>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = listener.local_addr().unwrap();
    let bridge = start(folder, move |options| Calls::connect(to, SOON, options).unwrap());
    let peer = Calls::over(listener.accept().unwrap().0, SOON, &ServeOptions::default()).unwrap();
    (peer, bridge)
}

/// A test with such a pair over TCP, and with one over a link.
fn with_both(test: impl Fn(&Path, Calls)) {
    let folder = tempfile::tempdir().unwrap();
    let (peer, bridge) = bridged(folder.path());
    test(folder.path(), peer);
    assert!(matches!(bridge.join().unwrap(), BridgeError::Over));
    let place = Place::new(protocol::CALLS, 2);
    let socket = place.socket();
    let bridge = start(folder.path(), move |options| Calls::join(socket, SOON, options).unwrap());
    let peer = place.join(&ServeOptions::default());
    assert!(peer.wait_up(SOON));
    test(folder.path(), peer);
    drop(place);
    assert!(matches!(bridge.join().unwrap(), BridgeError::ServerGone));
}

fn within(left: Duration) -> client::CallOptions {
    client::CallOptions { timeout: SOON, ..client::CallOptions::within(left) }
}

#[test]
fn a_client_of_this_machine_calls_the_peer_and_is_told_what_became_of_it() {
    let folder = tempfile::tempdir().unwrap();
    let (peer, bridge) = bridged(folder.path());
    let (go, gate) = std::sync::mpsc::channel();
    let gate = std::sync::Mutex::new(gate);
    let server = peer
        .serve(move |request| match request.bytes.as_slice() {
            b"hang" => {
                gate.lock().unwrap().recv_timeout(SOON).unwrap();
                Response::new("")
            }
            b"left" => Response::new(format!("{:?}", request.left_ns(tombolo_rpc::clock::now_ns()))),
            b"late" => Response::end(Status::Late),
            bytes => Response::new([bytes, b"!"].concat()).with_code(9),
        })
        .unwrap();
    let client = connect(folder.path(), "cell");
    let call = |bytes: &[u8]| client.call(bytes, &within(Duration::from_secs(10)));
    let hanging = client.call(b"hang", &within(Duration::from_millis(20)));
    assert!(matches!(hanging, Err(client::CallError::DeadlineExceeded)), "{hanging:?}");
    go.send(()).unwrap();
    let patient = client::CallOptions { wait_late: SOON, ..within(Duration::from_millis(20)) };
    let token = client.submit(b"hang", &patient).unwrap();
    std::thread::sleep(Duration::from_millis(25));
    go.send(()).unwrap();
    assert!(client.wait(token, SOON).unwrap().is_late());
    let reply = call(b"hello").unwrap();
    assert_eq!((reply.to_vec().unwrap(), reply.code()), (b"hello!".to_vec(), 9));
    let large = vec![5; 50_000];
    assert_eq!(call(&large).unwrap().len(), 50_001);
    let left = String::from_utf8(call(b"left").unwrap().to_vec().unwrap()).unwrap();
    let left: u64 = left.trim_start_matches("Some(").trim_end_matches(')').parse().unwrap();
    assert!((1..10_000_000_000).contains(&left), "{left}");
    assert!(matches!(call(b"late"), Err(CallError::DeadlineExceeded)), "its caller does not wait beyond the deadline");
    assert!(matches!(call(&vec![0; 1 << 20]), Err(CallError::Refused(_))), "longer than the way carries");
    drop(server);
    drop(peer);
    assert!(matches!(bridge.join().unwrap(), BridgeError::Over));
    assert!(!folder.path().join("cell").exists(), "a name that nobody serves");
}

#[test]
fn what_a_client_cancels_is_cancelled_at_the_peer() {
    with_both(|folder, peer| {
        assert!(peer.next(Duration::ZERO).is_none());
        let client = connect(folder, "cell");
        // In the peer's queue.
        let waits = client.submit(b"waits", &within(SOON)).unwrap();
        until("the request", || peer.pending() == 1);
        assert!(client.cancel(waits));
        let end = found("the end", || {
            // No other thread looks at the link for the peer.
            peer.is_up();
            client.poll(waits)
        });
        assert!(matches!(end, Err(CallError::Cancelled)), "{end:?}");
        assert!(peer.next(Duration::ZERO).is_none(), "it was cancelled");
        // Being served there.
        let served = client.submit(b"served", &within(SOON)).unwrap();
        let request = peer.next(SOON).unwrap();
        let (tell, told) = std::sync::mpsc::channel();
        peer.on_cancelled(&request, move || tell.send(()).unwrap());
        assert!(client.cancel(served));
        found("the cancellation", || {
            peer.is_up();
            told.try_recv().ok()
        });
        peer.respond(&request, Response::new(b"done all the same"));
        assert_eq!(client.wait(served, SOON).unwrap().to_vec().unwrap(), b"done all the same");
        // A client that goes cancels what it had asked.
        client.submit(b"gone", &within(SOON)).unwrap();
        until("the request", || peer.pending() == 1);
        drop(client);
        until("its end", || peer.pending() == 0);
    });
}

#[test]
fn what_the_peer_cancels_is_cancelled_at_the_service() {
    with_both(|folder, peer| {
        let (tell, told) = std::sync::mpsc::channel();
        let tell = std::sync::Mutex::new(tell);
        let handler = move |request: &Request<'_>, reply: &mut Reply<'_>| {
            let tell = tell.lock().unwrap();
            tell.send((request.to_vec(), request.ttl_left())).unwrap();
            // Until its caller has taken it back.
            until("the cancellation", || request.is_cancelled());
            reply.end(Status::Cancelled);
        };
        let options = Options { folder: Some(folder.into()), ..Options::default() };
        let _service = Service::register("host", options, handler).unwrap();
        let lives = |ttl| CallOptions { timeout: SOON, ttl: Some(ttl), ..CallOptions::default() };
        let served = peer.submit(b"served", &lives(Duration::from_secs(5))).unwrap();
        let (name, ttl) = told.recv_timeout(SOON).unwrap();
        assert_eq!(name, b"served");
        assert!(ttl.is_some_and(|ttl| ttl > Duration::ZERO && ttl <= Duration::from_secs(5)), "{ttl:?}");
        let (waits, expires) =
            (peer.submit(b"waits", &lives(3 * SOON)).unwrap(), peer.submit(b"expires", &lives(WAITS)).unwrap());
        assert_eq!(peer.wait_for(expires, SOON), Some(Err(tombolo_remote::CallError::Expired)));
        for token in [waits, served] {
            assert!(peer.cancel(token));
            assert_eq!(peer.wait_for(token, SOON), Some(Err(tombolo_remote::CallError::Cancelled)));
        }
        assert!(told.try_recv().is_err(), "neither was served");
    });
}

#[test]
fn times_to_live_hold_on_both_sides_of_the_way() {
    with_both(|folder, peer| {
        assert!(peer.next(Duration::ZERO).is_none());
        let client = connect(folder, "cell");
        let lives = |ttl| client::CallOptions { ttl: Some(ttl), ..within(SOON) };
        let _held = client.submit(b"held", &lives(3 * SOON)).unwrap();
        let request = peer.next(SOON).unwrap();
        assert!(request.ttl_left().is_some_and(|ttl| ttl > Duration::from_secs(50)), "{:?}", request.ttl_left());
        let (expires, asked) = (client.submit(b"expires", &lives(WAITS)).unwrap(), Instant::now());
        until("the request to have waited for too long", || peer.pending() == 1 && asked.elapsed() > 2 * WAITS);
        // The peer says so when it looks for something to serve.
        let end = found("the end", || {
            assert!(peer.next(Duration::ZERO).is_none());
            client.poll(expires)
        });
        assert!(matches!(end, Err(CallError::Expired)), "{end:?}");
        peer.respond(&request, Response::new(b"x"));
    });
}

#[test]
fn the_peer_calls_a_service_of_this_machine_also_after_that_was_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let (peer, bridge) = bridged(folder.path());
    let call = |bytes: &[u8]| peer.call(bytes, &CallOptions { timeout: SOON, ..CallOptions::within(SOON) });
    assert_eq!(call(b"x"), Err(tombolo_remote::CallError::Failed), "it is not running");
    for round in 0..3u8 {
        let options = Options { folder: Some(folder.path().into()), ..Options::default() };
        let service = Service::register("host", options, move |request: &Request<'_>, reply: &mut Reply<'_>| {
            assert!(request.left_ns().is_some_and(|left| left > 0 && left < 20_000_000_000));
            reply.write(&[&request.to_vec()[..], &[round]].concat()).unwrap();
        });
        let service = service.unwrap();
        // The first call may find the connection to the service before this one.
        let reply = found("a reply", || call(b"round").ok());
        assert_eq!(reply.bytes, [&b"round"[..], &[round]].concat());
        drop(service);
    }
    drop(peer);
    assert!(matches!(bridge.join().unwrap(), BridgeError::Over));
}

/// The peer goes while a client waits for it; how long it took to tell the client.
fn time_to_error() -> Duration {
    let folder = tempfile::tempdir().unwrap();
    let (peer, bridge) = bridged(folder.path());
    assert!(peer.next(Duration::ZERO).is_none());
    let client = connect(folder.path(), "cell");
    let waits = std::thread::spawn(move || {
        let end = client.call(b"never", &within(SOON)).err();
        (end, Instant::now())
    });
    assert_eq!(peer.next(SOON).unwrap().bytes, b"never");
    let gone = Instant::now();
    drop(peer);
    let (end, told) = waits.join().unwrap();
    assert!(matches!(end, Some(CallError::ProviderGone)), "{end:?}");
    bridge.join().unwrap();
    told.saturating_duration_since(gone)
}

#[test]
fn clients_whose_requests_a_peer_had_that_goes_get_provider_gone() {
    // The machine may be busy with other things: of some tries one shows what ours costs.
    let mut tries = (0..20).map(|_| time_to_error()).inspect(|took| println!("told after {took:?}"));
    assert!(tries.any(|took| took < Duration::from_millis(100)), "never within 100 ms");
}
