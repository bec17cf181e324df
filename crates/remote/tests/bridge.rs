//! The bridge between a service of this machine and a peer, both ways: what calls end with on the way, and when the peer goes.

use std::net::TcpListener;
use std::path::Path;
use std::time::{Duration, Instant};

use tombolo_remote::bridge::{Bridge, BridgeError};
use tombolo_remote::{CallOptions, Calls, Response, ServeOptions, Status};
use tombolo_rpc::client::{self, CallError, Client, ConnectOptions};
use tombolo_rpc::provider::{Options, Reply, Request, Service};
use tombolo_testing::found;

const SOON: Duration = Duration::from_secs(20);

fn connect(folder: &Path, name: &str) -> Client {
    let options = ConnectOptions { folder: Some(folder.into()), ..ConnectOptions::default() };
    found("the service", || Client::connect_with(name, &options).ok())
}

/// A peer, as a cell would be one, and a bridge to it that runs.
fn bridged(folder: &Path) -> (Calls, std::thread::JoinHandle<BridgeError>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = listener.local_addr().unwrap();
    let folder = folder.to_owned();
    let bridge = std::thread::spawn(move || {
        let calls = Calls::connect(to, SOON, &ServeOptions { workers: 4, ..ServeOptions::default() }).unwrap();
        let bridge = Bridge {
            service: Some("cell".into()),
            target: Some("host".into()),
            workers: 4,
            folder: Some(folder),
            ..Bridge::default()
        };
        bridge.run(&calls, |_| ())
    });
    let peer = Calls::over(listener.accept().unwrap().0, SOON, &ServeOptions::default()).unwrap();
    (peer, bridge)
}

fn within(left: Duration) -> client::CallOptions {
    client::CallOptions { timeout: SOON, ..client::CallOptions::within(left) }
}

#[test]
fn a_client_of_this_machine_calls_the_peer_and_is_told_what_became_of_it() {
    let folder = tempfile::tempdir().unwrap();
    let (peer, bridge) = bridged(folder.path());
    let server = peer
        .serve(|request| match request.bytes.as_slice() {
            b"left" => Response::new(format!("{:?}", request.left_ns(tombolo_rpc::clock::now_ns()))),
            b"late" => Response::end(Status::Late),
            bytes => Response::new([bytes, b"!"].concat()).with_code(9),
        })
        .unwrap();
    let client = connect(folder.path(), "cell");
    let call = |bytes: &[u8]| client.call(bytes, &within(Duration::from_secs(10)));
    let reply = call(b"hello").unwrap();
    assert_eq!((reply.to_vec().unwrap(), reply.code()), (b"hello!".to_vec(), 9));
    let large = vec![5; 50_000];
    assert_eq!(call(&large).unwrap().len(), 50_001);
    let left = String::from_utf8(call(b"left").unwrap().to_vec().unwrap()).unwrap();
    let left: u64 = left.trim_start_matches("Some(").trim_end_matches(')').parse().unwrap();
    assert!((1..10_000_000_000).contains(&left), "{left}");
    assert!(matches!(call(b"late"), Err(CallError::Late)));
    assert!(matches!(call(&vec![0; 1 << 20]), Err(CallError::Refused(_))), "longer than the way carries");
    drop(server);
    drop(peer);
    assert!(matches!(bridge.join().unwrap(), BridgeError::Over));
    assert!(!folder.path().join("cell").exists(), "a name that nobody serves");
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
