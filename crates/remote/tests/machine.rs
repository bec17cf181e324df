//! Services that one machine exports and another imports. A machine is a folder of services and an
//! identity here; the network is the loopback interface, or a relay that delays what goes through.
//! tests/span_calls.py has machines that are namespaces.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tombolo_calls::hello;
use tombolo_remote::RemoteError;
use tombolo_remote::machine::keys::{self, Identity, KeyError, KeyFiles};
use tombolo_remote::machine::{
    Export, ExportEvent, Exporter, HANDSHAKE, HANDSHAKES_PER_ADDRESS, Import, ImportEvent, Importer, Offer, Pick,
    Remote, Tcp,
};
use tombolo_rpc::client::{self, CallError, CallOptions, Client, ConnectError, ConnectOptions};
use tombolo_rpc::provider::{Access, Options, Reply, Request, Service};
use tombolo_testing::{found, until};

const SOON: Duration = Duration::from_secs(20);

/// Keys of machines `a`, `b` and `c`.
struct Keys(tempfile::TempDir);

impl Keys {
    fn new() -> Keys {
        let folder = tempfile::tempdir().unwrap();
        keys::make(folder.path(), &["a", "b", "c"].map(String::from)).unwrap();
        Keys(folder)
    }

    fn of(&self, machine: &str) -> Option<Identity> {
        Some(Identity::load(&KeyFiles::of(self.0.path(), machine)).unwrap())
    }
}

fn listener() -> TcpListener {
    TcpListener::bind("127.0.0.1:0").unwrap()
}

fn export(folder: &Path, services: &[&str], allow: &[&str]) -> Export {
    let owned = |names: &[&str]| names.iter().map(|name| name.to_string()).collect::<Vec<_>>();
    let offer = |service: String| Offer { service, allow: owned(allow) };
    let offers = owned(services).into_iter().map(offer).collect();
    Export { offers, folder: Some(folder.into()), ..Export::default() }
}

/// An export, and where it listens.
struct OverTcp(Exporter, SocketAddr);

impl std::ops::Deref for OverTcp {
    type Target = Exporter;

    fn deref(&self) -> &Exporter {
        &self.0
    }
}

impl OverTcp {
    fn address(&self) -> SocketAddr {
        self.1
    }
}

trait StartOverTcp {
    /// Starts it at the listener, with what it tells.
    fn over_tcp(
        self,
        listener: TcpListener,
        identity: Option<Identity>,
        tell: impl Fn(ExportEvent) + Send + Sync + 'static,
    ) -> Result<OverTcp, RemoteError>;
}

impl StartOverTcp for Export {
    fn over_tcp(
        self,
        listener: TcpListener,
        identity: Option<Identity>,
        tell: impl Fn(ExportEvent) + Send + Sync + 'static,
    ) -> Result<OverTcp, RemoteError> {
        let address = listener.local_addr().unwrap();
        Ok(OverTcp(self.start(&Tcp::at(listener), identity, tell)?, address))
    }
}

fn import(folder: &Path, service: &str, remotes: &[(&str, SocketAddr)]) -> Import {
    let remote =
        |(machine, address): &(&str, SocketAddr)| Remote { machine: machine.to_string(), address: address.to_string() };
    Import {
        service: service.into(),
        name: service.into(),
        remotes: remotes.iter().map(remote).collect(),
        pick: Pick::default(),
        workers: 16,
        access: Access::default(),
        folder: Some(folder.into()),
    }
}

/// Starts it, with what it tells.
fn begin(import: Import, identity: Option<Identity>) -> (Importer, mpsc::Receiver<ImportEvent>) {
    let (tell, told) = mpsc::channel();
    (import.start(Arc::new(Tcp::default()), identity, move |event| _ = tell.send(event)).unwrap(), told)
}

/// A service that answers with `mark` and what it was asked.
fn echo(folder: &Path, name: &str, mark: &'static str) -> Service {
    let options = Options { folder: Some(folder.into()), workers: 4, ..Options::default() };
    Service::register(name, options, move |request: &Request<'_>, reply: &mut Reply<'_>| {
        reply.set_code(7);
        let _ = reply.write(&[mark.as_bytes(), &request.to_vec()].concat());
    })
    .unwrap()
}

fn options(folder: &Path) -> ConnectOptions {
    ConnectOptions { folder: Some(folder.into()), ..ConnectOptions::default() }
}

fn connect(folder: &Path, name: &str) -> Client {
    found("the service", || Client::connect_with(name, &options(folder)).ok())
}

fn within(left: Duration) -> CallOptions {
    CallOptions { timeout: SOON, ..CallOptions::within(left) }
}

/// The answer, once there is one: a client whose service has gone connects again.
fn ask(folder: &Path, name: &str) -> String {
    found("an answer", || {
        let client = Client::connect_with(name, &options(folder)).ok()?;
        let reply = client.call(b"", &within(SOON)).ok()?;
        String::from_utf8(reply.to_vec().ok()?).ok()
    })
}

/// As [`relay`] without a delay; once it holds, it goes on taking what comes and passes nothing on.
fn holding_relay(to: SocketAddr) -> (SocketAddr, Arc<AtomicBool>) {
    let (listener, holds) = (listener(), Arc::new(AtomicBool::new(false)));
    let (address, held) = (listener.local_addr().unwrap(), holds.clone());
    std::thread::spawn(move || {
        for one in listener.incoming() {
            let Ok(one) = one else { return };
            let Ok(other) = TcpStream::connect(to) else { continue };
            let ways = [(one.try_clone().unwrap(), other.try_clone().unwrap()), (other, one)];
            for (mut from, mut to) in ways {
                let held = held.clone();
                to.set_nodelay(true).unwrap();
                std::thread::spawn(move || {
                    let mut bytes = [0; 65536];
                    while let Ok(n @ 1..) = from.read(&mut bytes) {
                        if !held.load(Ordering::SeqCst) && to.write_all(&bytes[..n]).is_err() {
                            return;
                        }
                    }
                    let _ = to.shutdown(std::net::Shutdown::Both);
                });
            }
        }
    });
    (address, holds)
}

/// What comes in at the address goes to `to`, and back, each byte `delay` later.
fn relay(to: SocketAddr, delay: Duration) -> SocketAddr {
    relay_by(to, Arc::new(AtomicU64::new(delay.as_millis() as u64)))
}

/// As [`relay`], with a delay in ms that changes.
fn relay_by(to: SocketAddr, delay_ms: Arc<AtomicU64>) -> SocketAddr {
    let listener = listener();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for one in listener.incoming() {
            let Ok(one) = one else { return };
            let Ok(other) = TcpStream::connect(to) else { continue };
            for (mut from, mut to) in
                [(one.try_clone().unwrap(), other.try_clone().unwrap()), (other.try_clone().unwrap(), one)]
            {
                to.set_nodelay(true).unwrap();
                let (later, due) = mpsc::channel::<(Instant, Vec<u8>)>();
                let delay_ms = delay_ms.clone();
                std::thread::spawn(move || {
                    let mut bytes = [0; 65536];
                    while let Ok(n @ 1..) = from.read(&mut bytes) {
                        let delay = Duration::from_millis(delay_ms.load(Ordering::SeqCst));
                        let _ = later.send((Instant::now() + delay, bytes[..n].to_vec()));
                    }
                });
                std::thread::spawn(move || {
                    for (at, bytes) in due {
                        std::thread::sleep(at.saturating_duration_since(Instant::now()));
                        if to.write_all(&bytes).is_err() {
                            return;
                        }
                    }
                    let _ = to.shutdown(std::net::Shutdown::Both);
                });
            }
        }
    });
    address
}

#[test]
fn a_folder_of_keys_is_made_once_and_grows() {
    let Keys(folder) = &Keys::new();
    let folder = folder.path();
    let mode = |name: &str| std::os::unix::fs::MetadataExt::mode(&folder.join(name).metadata().unwrap()) & 0o777;
    assert_eq!((mode("ca.key"), mode("a.key")), (0o600, 0o600));
    let names = |machine: &str| Identity::load(&KeyFiles::of(folder, machine)).unwrap().name().to_string();
    assert_eq!((names("a"), names("c")), ("a".to_string(), "c".to_string()));
    assert!(matches!(keys::make(folder, &["b".into()]), Err(KeyError::Exists { .. })));
    for bad in ["", "A", "a b", "-a", "a-", "a.b", "ca/x", &"a".repeat(64)] {
        assert!(matches!(keys::make(folder, &["d".into(), bad.into()]), Err(KeyError::Name(_))), "{bad}");
    }
    assert!(!folder.join("d.pem").exists(), "nothing is made of a list with a bad name");
    keys::make(folder, &["late-comer".into()]).unwrap();
    assert_eq!(names("late-comer"), "late-comer");
    let mixed = KeyFiles { key: folder.join("b.key"), ..KeyFiles::of(folder, "a") };
    assert!(matches!(Identity::load(&mixed), Err(KeyError::Pair { .. })));
    let swapped = KeyFiles { certificate: folder.join("a.key"), ..KeyFiles::of(folder, "a") };
    assert!(matches!(Identity::load(&swapped), Err(KeyError::Content { .. })));
    let absent = KeyFiles::of(folder, "nobody");
    assert!(Identity::load(&absent).unwrap_err().to_string().contains("nobody.pem"));
    std::fs::remove_file(folder.join("ca.key")).unwrap();
    assert!(matches!(keys::make(folder, &["e".into()]), Err(KeyError::Half { .. })));
}

#[test]
fn a_client_calls_a_service_of_another_machine_by_its_name() {
    for with_tls in [true, false] {
        let keys = Keys::new();
        let of = |machine| if with_tls { keys.of(machine) } else { None };
        let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let service = echo(there.path(), "calc", "there:");
        let (tell, told) = mpsc::channel();
        let start = |listener| {
            let tell = tell.clone();
            let allow: &[&str] = if with_tls { &["a"] } else { &[] };
            export(there.path(), &["calc"], allow)
                .over_tcp(listener, of("b"), move |event| _ = tell.send(event))
                .unwrap()
        };
        let exporter = start(listener());
        let address = exporter.address();
        let (importer, events) = begin(import(here.path(), "calc", &[("b", address)]), of("a"));
        let client = connect(here.path(), "calc");
        let machine = match told.recv_timeout(SOON).unwrap() {
            ExportEvent::Connected { machine, service } if service == "calc" => machine,
            other => panic!("{other:?}"),
        };
        assert!(if with_tls { machine == "a" } else { machine.starts_with("127.0.0.1:") }, "{machine}");
        assert!(matches!(events.recv_timeout(SOON).unwrap(), ImportEvent::Up { machine, .. } if machine == "b"));
        assert_eq!(events.recv_timeout(SOON).unwrap(), ImportEvent::Registered);
        assert_eq!(client::report("calc", &options(here.path())).unwrap().machines, ["b"]);
        // Payloads of all sizes from several threads: more than the sockets hold at a time.
        std::thread::scope(|scope| {
            for n in 0..4u8 {
                let client = &client;
                scope.spawn(move || {
                    for i in 0..40 {
                        let bytes: Vec<u8> =
                            (0..i * 3000).map(|at| (at as u8).wrapping_mul(31).wrapping_add(n)).collect();
                        let reply = client.call(&bytes, &within(SOON)).unwrap();
                        assert_eq!(reply.code(), 7);
                        let answer = reply.to_vec().unwrap();
                        assert!(answer.strip_prefix(b"there:") == Some(&bytes[..]), "{n} {i}: {} bytes", answer.len());
                    }
                });
            }
        });
        assert_eq!(exporter.stats().accepted, 1);
        // The service goes: calls fail by name, and the connection stays. It comes back.
        drop(service);
        assert!(matches!(client.call(b"", &within(SOON)), Err(CallError::Failed)));
        let _service = echo(there.path(), "calc", "again:");
        until("the service is back", || {
            client.call(b"", &within(SOON)).is_ok_and(|r| r.to_vec().unwrap() == b"again:")
        });
        // The machine goes: the name goes, and comes back with it.
        drop(exporter);
        let gone =
            || matches!(Client::connect_with("calc", &options(here.path())), Err(ConnectError::NoService { .. }));
        until("the name goes", gone);
        assert!(matches!(client.call(b"", &within(SOON)), Err(CallError::ProviderGone)));
        let back = TcpListener::bind(address).unwrap();
        let _exporter = start(back);
        assert_eq!(ask(here.path(), "calc"), "again:");
        drop(importer);
        assert!(gone());
    }
}

#[test]
fn only_who_proves_an_allowed_name_gets_a_service() {
    let (keys, foreign) = (Keys::new(), Keys::new());
    let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let _service = echo(there.path(), "calc", "");
    let _other = echo(there.path(), "private", "");
    let exporter =
        export(there.path(), &["calc", "absent"], &["a"]).over_tcp(listener(), keys.of("b"), |_| ()).unwrap();
    let plain = export(there.path(), &["calc"], &[]).over_tcp(listener(), None, |_| ()).unwrap();
    let why = |service: &str, machine: &str, to: &OverTcp, identity: Option<Identity>| {
        let (_importer, events) = begin(import(here.path(), service, &[(machine, to.address())]), identity);
        match events.recv_timeout(SOON).unwrap() {
            ImportEvent::Failed { why, .. } => why,
            other => panic!("{other:?}"),
        }
    };
    for (service, machine, to, identity, expected) in [
        ("calc", "b", &exporter, keys.of("c"), "not offered to this machine"),
        ("private", "b", &exporter, keys.of("a"), "not offered to this machine"),
        ("absent", "b", &exporter, keys.of("a"), "no service of that name runs there"),
        // An authority of its own, on either side: neither trusts the other.
        ("calc", "b", &exporter, foreign.of("a"), "the TLS handshake"),
        // Another machine than was wanted answers.
        ("calc", "c", &exporter, keys.of("a"), "the TLS handshake"),
        ("calc", "b", &exporter, None, "hello"),
        ("calc", "b", &plain, keys.of("a"), "the TLS handshake"),
    ] {
        let why = why(service, machine, to, identity);
        assert!(why.contains(expected), "{service} of {machine}: {why}");
    }
    until("the connections end", || exporter.stats().open == 0);
    assert_eq!(exporter.stats().accepted, 0);
}

#[test]
fn what_is_imported_is_not_exported() {
    let folders: Vec<_> = (0..3).map(|_| tempfile::tempdir().unwrap()).collect();
    let _service = echo(folders[0].path(), "calc", "");
    let first = export(folders[0].path(), &["calc"], &[]).over_tcp(listener(), None, |_| ()).unwrap();
    let _import = begin(import(folders[1].path(), "calc", &[("first", first.address())]), None);
    assert_eq!(ask(folders[1].path(), "calc"), "");
    let second = export(folders[1].path(), &["calc"], &[]).over_tcp(listener(), None, |_| ()).unwrap();
    let (_importer, events) = begin(import(folders[2].path(), "calc", &[("second", second.address())]), None);
    let event = events.recv_timeout(SOON).unwrap();
    assert!(matches!(&event, ImportEvent::Failed { why, .. } if why.contains("third machine")), "{event:?}");
}

#[test]
fn a_connection_that_was_accepted_is_not_moved_to_an_import() {
    let folders: Vec<_> = (0..3).map(|_| tempfile::tempdir().unwrap()).collect();
    let _service = echo(folders[0].path(), "calc", "");
    let first = export(folders[0].path(), &["calc"], &[]).over_tcp(listener(), None, |_| ()).unwrap();
    let own = echo(folders[1].path(), "calc", "own");
    let second = export(folders[1].path(), &["calc"], &[]).over_tcp(listener(), None, |_| ()).unwrap();
    let _importer = begin(import(folders[2].path(), "calc", &[("second", second.address())]), None);
    assert_eq!(ask(folders[2].path(), "calc"), "own");
    // The exported service ends, and an import takes its name.
    drop(own);
    let _import = begin(import(folders[1].path(), "calc", &[("first", first.address())]), None);
    assert_eq!(ask(folders[1].path(), "calc"), "");
    let client = connect(folders[2].path(), "calc");
    assert!(matches!(client.call(b"", &within(SOON)), Err(CallError::Failed)));
    // Nor where the import is too busy to say that it is one: it takes one more client of this
    // user, and not two.
    let mut others: Vec<_> =
        (0..128).map_while(|_| Client::connect_with("calc", &options(folders[1].path())).ok()).collect();
    assert!(others.len() >= 127, "{} clients", others.len());
    others.truncate(127);
    assert!(matches!(client.call(b"", &within(SOON)), Err(CallError::Failed)));
}

#[test]
fn a_deadline_is_not_later_there_than_here() {
    let keys = Keys::new();
    let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let lefts = Arc::new(Mutex::new(Vec::new()));
    let seen = lefts.clone();
    let serve = Options { folder: Some(there.path().into()), ..Options::default() };
    let _service = Service::register("calc", serve, move |request: &Request<'_>, _: &mut Reply<'_>| {
        seen.lock().unwrap().push(request.left_ns());
    })
    .unwrap();
    let exporter = export(there.path(), &["calc"], &[]).over_tcp(listener(), keys.of("b"), |_| ()).unwrap();
    let (one_way, deadline) = (Duration::from_millis(100), Duration::from_secs(5));
    let (_importer, _) = begin(import(here.path(), "calc", &[("b", relay(exporter.address(), one_way))]), keys.of("a"));
    let client = connect(here.path(), "calc");
    for _ in 0..2 {
        client.call(b"", &within(deadline)).unwrap();
    }
    client.call(b"", &CallOptions { timeout: SOON, ..CallOptions::default() }).unwrap();
    let lefts: Vec<Option<Duration>> =
        lefts.lock().unwrap().iter().map(|left| left.map(Duration::from_nanos)).collect();
    let [Some(first), Some(second), None] = lefts[..] else { panic!("{lefts:?}") };
    // The way is measured before the first call. Half of the shortest round trip is the way if both
    // ways are equally long.
    for left in [first, second] {
        assert!(left <= deadline - one_way, "{left:?}");
        assert!(left > deadline - one_way - SOON / 10, "{left:?}");
    }
}

#[test]
fn a_call_that_is_cancelled_here_is_cancelled_there() {
    let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (tell, told) = mpsc::channel();
    let tell = Mutex::new(tell);
    let serve = Options { folder: Some(there.path().into()), ..Options::default() };
    let _service = Service::register("calc", serve, move |request: &Request<'_>, reply: &mut Reply<'_>| {
        let tell = tell.lock().unwrap().clone();
        tell.send("began").unwrap();
        let (gone, is_gone) = mpsc::channel();
        request.on_cancelled(move || _ = gone.send(()));
        is_gone.recv_timeout(SOON).unwrap();
        tell.send("cancelled").unwrap();
        let _ = reply.write(b"too late");
    })
    .unwrap();
    let exporter = export(there.path(), &["calc"], &[]).over_tcp(listener(), None, |_| ()).unwrap();
    let _importer = begin(import(here.path(), "calc", &[("b", exporter.address())]), None);
    let client = connect(here.path(), "calc");
    let token = client.submit(b"", &within(SOON)).unwrap();
    assert_eq!(told.recv_timeout(SOON).unwrap(), "began");
    assert!(client.cancel(token));
    assert_eq!(told.recv_timeout(SOON).unwrap(), "cancelled");
}

#[test]
fn a_call_goes_to_the_machine_that_the_rule_names_and_to_another_when_it_goes() {
    let near = tempfile::tempdir().unwrap();
    let far = tempfile::tempdir().unwrap();
    let _near_service = echo(near.path(), "calc", "near");
    let _far_service = echo(far.path(), "calc", "far");
    let far_export = export(far.path(), &["calc"], &[]).over_tcp(listener(), None, |_| ()).unwrap();
    let far_address = relay(far_export.address(), Duration::from_millis(30));
    for (pick, first) in [(Pick::Nearest, "near"), (Pick::Sticky, "far")] {
        let here = tempfile::tempdir().unwrap();
        let near_export = export(near.path(), &["calc"], &[]).over_tcp(listener(), None, |_| ()).unwrap();
        let near_address = near_export.address();
        let remotes = [("far", far_address), ("near", near_address)];
        let (_importer, events) = begin(Import { pick, ..import(here.path(), "calc", &remotes) }, None);
        let mut up = 0;
        while up < 2 {
            up += u32::from(matches!(events.recv_timeout(SOON).unwrap(), ImportEvent::Up { .. }));
        }
        // The way may have been measured while the test's machine was busy; that corrects itself.
        until("the machine that the rule names is called", || ask(here.path(), "calc") == first);
        for _ in 0..5 {
            assert_eq!(ask(here.path(), "calc"), first, "{pick:?}");
        }
        drop(near_export);
        until("calls go to the other one", || ask(here.path(), "calc") == "far");
        // It comes back. The nearest is preferred again; who is sticky stays.
        let _near_export = export(near.path(), &["calc"], &[])
            .over_tcp(TcpListener::bind(near_address).unwrap(), None, |_| ())
            .unwrap();
        while !matches!(events.recv_timeout(SOON).unwrap(), ImportEvent::Up { machine, .. } if machine == "near") {}
        match pick {
            Pick::Nearest => until("the nearest is called again", || ask(here.path(), "calc") == first),
            _ => assert_eq!(ask(here.path(), "calc"), first, "{pick:?}"),
        }
    }
}

#[test]
fn a_machine_that_was_slow_at_first_is_the_nearest_once_it_is_not() {
    let [near, far, here] = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let seen = Arc::new(AtomicU32::new(0));
    let count = seen.clone();
    let options = Options { folder: Some(near.path().into()), ..Options::default() };
    let _near_service = Service::register("calc", options, move |_: &Request<'_>, reply: &mut Reply<'_>| {
        count.fetch_add(1, Ordering::SeqCst);
        let _ = reply.write(b"near");
    })
    .unwrap();
    let _far_service = echo(far.path(), "calc", "far");
    let near_export = export(near.path(), &["calc"], &[]).over_tcp(listener(), None, |_| ()).unwrap();
    let far_export = export(far.path(), &["calc"], &[]).over_tcp(listener(), None, |_| ()).unwrap();
    let far_address = relay(far_export.address(), Duration::from_millis(100));
    // Long enough for the hello, and for what is measured first.
    let delay = Arc::new(AtomicU64::new(300));
    let near_address = relay_by(near_export.address(), delay.clone());
    let remotes = [("far", far_address), ("near", near_address)];
    let (_importer, events) = begin(import(here.path(), "calc", &remotes), None);
    let mut up = Vec::new();
    while up.len() < 2 {
        if let ImportEvent::Up { machine, round_trip } = events.recv_timeout(SOON).unwrap() {
            up.push((machine, round_trip));
        }
    }
    up.sort();
    assert!(up[0].1 >= Duration::from_millis(200) && up[1].1 >= Duration::from_millis(600), "{up:?}");
    assert_eq!((ask(here.path(), "calc").as_str(), seen.load(Ordering::SeqCst)), ("far", 0));
    delay.store(0, Ordering::SeqCst);
    until("the nearest is called", || ask(here.path(), "calc") == "near");
    assert_eq!(seen.load(Ordering::SeqCst), 1, "what measures is no call of a service");
}

#[test]
fn a_machine_whose_service_has_gone_is_asked_after_the_others() {
    let [near, far, here] = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let near_service = echo(near.path(), "calc", "near");
    let _far_service = echo(far.path(), "calc", "far");
    let near_export = export(near.path(), &["calc"], &[]).over_tcp(listener(), None, |_| ()).unwrap();
    let far_export = export(far.path(), &["calc"], &[]).over_tcp(listener(), None, |_| ()).unwrap();
    let far_address = relay(far_export.address(), Duration::from_millis(30));
    let remotes = [("far", far_address), ("near", near_export.address())];
    let (_importer, events) = begin(import(here.path(), "calc", &remotes), None);
    let mut up = 0;
    while up < 2 {
        up += u32::from(matches!(events.recv_timeout(SOON).unwrap(), ImportEvent::Up { .. }));
    }
    until("the nearest is called", || ask(here.path(), "calc") == "near");
    let client = connect(here.path(), "calc");
    drop(near_service);
    let ends: Vec<_> = (0..5).map(|_| client.call(b"", &within(SOON)).and_then(|reply| reply.to_vec())).collect();
    assert!(ends[0].is_err(), "it was sent there, and is not sent twice: {ends:?}");
    assert!(ends[2..].iter().all(|end| end.as_deref() == Ok(b"far")), "{ends:?}");
}

#[test]
fn a_machine_that_is_there_and_answers_nothing_keeps_no_calls_from_the_others() {
    let (here, near, far) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let _near_service = echo(near.path(), "calc", "near");
    let _far_service = echo(far.path(), "calc", "far");
    let near_export = export(near.path(), &["calc"], &[]).over_tcp(listener(), None, |_| ()).unwrap();
    let far_export = export(far.path(), &["calc"], &[]).over_tcp(listener(), None, |_| ()).unwrap();
    let far_address = relay(far_export.address(), Duration::from_millis(30));
    let (near_address, holds) = holding_relay(near_export.address());
    let remotes = [("far", far_address), ("near", near_address)];
    let (_importer, events) = begin(Import { workers: 2, ..import(here.path(), "calc", &remotes) }, None);
    let mut up = 0;
    while up < 2 {
        up += u32::from(matches!(events.recv_timeout(SOON).unwrap(), ImportEvent::Up { .. }));
    }
    assert_eq!(ask(here.path(), "calc"), "near");
    // As an export that was stopped: its connection stays, and nothing comes through it.
    holds.store(true, Ordering::SeqCst);
    let began = Instant::now();
    let client = connect(here.path(), "calc");
    let short = within(Duration::from_millis(50));
    assert!(matches!(client.call(b"", &short), Err(CallError::DeadlineExceeded)));
    until("calls go to the machine that answers", || {
        client
            .call(b"", &within(Duration::from_millis(500)))
            .is_ok_and(|reply| reply.to_vec().is_ok_and(|b| b == b"far"))
    });
    assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
}

#[test]
fn the_least_loaded_machine_is_the_one_with_the_fewest_calls_under_way() {
    let here = tempfile::tempdir().unwrap();
    let gate = Arc::new(Mutex::new(()));
    let held = gate.lock().unwrap();
    let (tell, told) = mpsc::channel();
    let machines: Vec<_> = ["b", "c"]
        .map(|machine| {
            let folder = tempfile::tempdir().unwrap();
            let (tell, gate) = (Mutex::new(tell.clone()), gate.clone());
            let serve = Options { folder: Some(folder.path().into()), workers: 8, ..Options::default() };
            let service = Service::register("calc", serve, move |_: &Request<'_>, _: &mut Reply<'_>| {
                tell.lock().unwrap().send(machine).unwrap();
                drop(gate.lock().unwrap());
            })
            .unwrap();
            let exporter = export(folder.path(), &["calc"], &[]).over_tcp(listener(), None, |_| ()).unwrap();
            (folder, service, exporter)
        })
        .into();
    let remotes = [("b", machines[0].2.address()), ("c", machines[1].2.address())];
    let pick = Pick::LeastLoaded;
    let (_importer, events) = begin(Import { pick, ..import(here.path(), "calc", &remotes) }, None);
    let mut up = 0;
    while up < 2 {
        up += u32::from(matches!(events.recv_timeout(SOON).unwrap(), ImportEvent::Up { .. }));
    }
    let client = connect(here.path(), "calc");
    let tokens: Vec<_> = (0..8)
        .map(|_| {
            let token = client.submit(b"", &within(SOON)).unwrap();
            // One at a time, so that the next one is picked with this one under way.
            (token, told.recv_timeout(SOON).unwrap())
        })
        .collect();
    assert_eq!(tokens.iter().filter(|(_, machine)| *machine == "b").count(), 4);
    drop(held);
    for (token, _) in tokens {
        client.wait(token, SOON).unwrap();
    }
}

#[test]
fn a_peer_that_says_nothing_or_little_is_cut_off_and_keeps_no_one_else_out() {
    let keys = Keys::new();
    let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let _service = echo(there.path(), "calc", "");
    let exporter = export(there.path(), &["calc"], &[]).over_tcp(listener(), keys.of("b"), |_| ()).unwrap();
    let began = Instant::now();
    let mut slow: Vec<_> =
        (0..HANDSHAKES_PER_ADDRESS).map(|_| TcpStream::connect(exporter.address()).unwrap()).collect();
    until("they are accepted", || exporter.stats().open == HANDSHAKES_PER_ADDRESS as u64);
    // One more of this address is closed at once; one of another address is served.
    let mut one_more = TcpStream::connect(exporter.address()).unwrap();
    one_more.set_read_timeout(Some(HANDSHAKE / 2)).unwrap();
    assert!(matches!(one_more.read(&mut [0]), Ok(0) | Err(_)), "it is closed");
    assert!(began.elapsed() < HANDSHAKE / 2, "at once");
    let other = relay_from("127.0.0.2", exporter.address());
    let _importer = begin(import(here.path(), "calc", &[("b", other)]), keys.of("a"));
    assert_eq!(ask(here.path(), "calc"), "");
    // A byte now and then prolongs nothing: the first bytes of a TLS record.
    for byte in [0x16u8, 3, 1, 2, 0, 1] {
        let _ = slow[0].write_all(&[byte]);
        std::thread::sleep(HANDSHAKE / 8);
    }
    until("they are cut off", || exporter.stats().open == 1);
    assert!(began.elapsed() < 2 * HANDSHAKE, "{:?}", began.elapsed());
    assert!(exporter.stats().refused > HANDSHAKES_PER_ADDRESS as u64);
}

/// As [`relay`], without delay and from another address.
fn relay_from(source: &str, to: SocketAddr) -> SocketAddr {
    use rustix::net::{AddressFamily, SocketType, bind, connect, socket};
    let listener = listener();
    let address = listener.local_addr().unwrap();
    let source: SocketAddr = format!("{source}:0").parse().unwrap();
    std::thread::spawn(move || {
        for one in listener.incoming() {
            let Ok(one) = one else { return };
            let other = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
            bind(&other, &source).unwrap();
            connect(&other, &to).unwrap();
            let other = TcpStream::from(other);
            let ways = [(one.try_clone().unwrap(), other.try_clone().unwrap()), (other, one)];
            for (mut from, mut to) in ways {
                std::thread::spawn(move || std::io::copy(&mut from, &mut to));
            }
        }
    });
    address
}

#[test]
fn bytes_that_are_no_hello_end_their_connection_only() {
    let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let _service = echo(there.path(), "calc", "");
    let (tell, told) = mpsc::channel();
    let exporter =
        export(there.path(), &["calc"], &[]).over_tcp(listener(), None, move |event| _ = tell.send(event)).unwrap();
    let welcome = hello::hello("calc").unwrap();
    for (bytes, expected) in [
        (&b"GET / HTTP/1.1\r\n\r\n"[..], "other bytes"),
        (b"TMBLSVC\x01\x00", "names no service"),
        (b"TMBLSVC\x01\x05../ca", "names no service"),
        (&welcome[..], "the calls protocol"),
    ] {
        let mut stream = TcpStream::connect(exporter.address()).unwrap();
        stream.write_all(bytes).unwrap();
        // After a welcome: what is no greeting of calls.
        let _ = stream.write_all(&[0xa5; 64]);
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
        let event = told.recv_timeout(SOON).unwrap();
        assert!(matches!(&event, ExportEvent::Refused { why, .. } if why.contains(expected)), "{event:?}");
    }
    let _importer = begin(import(here.path(), "calc", &[("b", exporter.address())]), None);
    assert_eq!(ask(here.path(), "calc"), "");
}
