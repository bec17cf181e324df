//! What every engine owes to calls between machines: one suite, which each engine instantiates
//! ([`suite`]). It stands outside the engines, so that span/src/streams.rs has the same tests of
//! zenoh that engine.rs has of TCP.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use tombolo_remote::Refusal;
use tombolo_remote::machine::keys::{self, Identity, KeyFiles};
use tombolo_remote::machine::{
    DEAD_AFTER, Engine, Export, ExportEvent, Exporter, Import, ImportEvent, Importer, Offer, Pick, Remote, Socket,
};
use tombolo_rpc::client::{self, CallError, CallOptions, Client, ConnectOptions};
use tombolo_rpc::provider::{Access, Options, Reply, Request, Service};
use tombolo_testing::{found, until};

/// Longer than any call of a test takes.
const SOON: Duration = Duration::from_secs(30);
/// The longest payload of a connection.
const LONGEST: usize = 128 << 10;

/// Two machines, `a` and `b`, that an engine connects.
pub(crate) trait World: Send + Sync + Sized + 'static {
    /// Both machines, with these keys.
    fn new(keys: &Path) -> Self;
    /// The engine of a machine.
    fn engine(&self, machine: &str) -> Arc<dyn Engine>;
    /// How the other machine finds it.
    fn remote(&self, machine: &str) -> Remote;
    /// What is between them.
    fn relay(&self) -> &Relay;
    /// Ends the engine of a machine, with all of its connections, while exports and imports go on.
    fn kill(&self, machine: &str);
    /// Starts it again.
    fn start(&self, machine: &str);
}

/// What a relay lets pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Passing {
    All,
    /// Connections stay, and what comes is swallowed.
    Nothing,
    /// Connections are closed.
    #[allow(dead_code, reason = "one engine's tests have it")]
    Closed,
}

/// Passes bytes on to an address.
pub(crate) struct Relay {
    pub(crate) address: SocketAddr,
    state: Arc<(Mutex<Passing>, Mutex<Vec<TcpStream>>)>,
}

impl Relay {
    pub(crate) fn new(to: SocketAddr) -> Relay {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::new((Mutex::new(Passing::All), Mutex::new(Vec::new())));
        let own = state.clone();
        std::thread::spawn(move || {
            for one in listener.incoming() {
                let Ok(one) = one else { return };
                let is_open = *own.0.lock().unwrap() == Passing::All;
                let Some(other) = is_open.then(|| TcpStream::connect(to).ok()).flatten() else { continue };
                own.1.lock().unwrap().extend([one.try_clone().unwrap(), other.try_clone().unwrap()]);
                for (from, to) in [(one.try_clone().unwrap(), other.try_clone().unwrap()), (other, one)] {
                    let own = own.clone();
                    std::thread::spawn(move || Relay::carry(from, to, &own.0));
                }
            }
        });
        Relay { address, state }
    }

    fn carry(mut from: TcpStream, mut to: TcpStream, passing: &Mutex<Passing>) {
        to.set_nodelay(true).unwrap();
        let mut bytes = [0; 65536];
        while let Ok(n @ 1..) = from.read(&mut bytes) {
            if *passing.lock().unwrap() == Passing::All && to.write_all(&bytes[..n]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Both);
    }

    pub(crate) fn pass(&self, passing: Passing) {
        *self.state.0.lock().unwrap() = passing;
        if passing == Passing::Closed {
            let ended = std::mem::take(&mut *self.state.1.lock().unwrap());
            ended.iter().for_each(|tcp| _ = tcp.shutdown(Shutdown::Both));
        }
    }
}

/// A world with keys and a folder of services for each machine.
struct Machines<W> {
    world: W,
    keys: tempfile::TempDir,
    a: tempfile::TempDir,
    b: tempfile::TempDir,
}

impl<W: World> Machines<W> {
    fn new() -> Self {
        let [keys, a, b] = [(); 3].map(|()| tempfile::tempdir().unwrap());
        keys::make(keys.path(), &["a", "b", "c"].map(String::from)).unwrap();
        Machines { world: W::new(keys.path()), keys, a, b }
    }

    fn identity(&self, machine: &str) -> Option<Identity> {
        Some(Identity::load(&KeyFiles::of(self.keys.path(), machine)).unwrap())
    }

    /// `b` exports `calc` to `a`.
    fn export(&self) -> (Exporter, mpsc::Receiver<ExportEvent>) {
        let offers = vec![Offer { service: "calc".into(), allow: vec!["a".into()] }];
        let export = Export { offers, folder: Some(self.b.path().into()), ..Export::default() };
        let (tell, told) = mpsc::channel();
        let engine = self.world.engine("b");
        (export.start(&*engine, self.identity("b"), move |event| _ = tell.send(event)).unwrap(), told)
    }

    /// `a` imports it, as the machine that `identity` is of.
    fn import(&self, identity: &str) -> (Importer, mpsc::Receiver<ImportEvent>) {
        let import = Import {
            service: "calc".into(),
            name: "calc".into(),
            remotes: vec![self.world.remote("b")],
            pick: Pick::default(),
            workers: 64,
            access: Access::default(),
            folder: Some(self.a.path().into()),
        };
        let (tell, told) = mpsc::channel();
        let tell = move |event| _ = tell.send(event);
        (import.start(self.world.engine("a"), self.identity(identity), tell).unwrap(), told)
    }

    /// A service of `b`.
    fn serve(&self, workers: u32, serve: impl Fn(&Request<'_>, &mut Reply<'_>) + Send + Sync + 'static) -> Service {
        let options = Options { folder: Some(self.b.path().into()), workers, ..Options::default() };
        Service::register("calc", options, serve).unwrap()
    }

    /// Requests that wait in its queue.
    fn waiting(&self) -> u64 {
        let options = ConnectOptions { folder: Some(self.b.path().into()), ..ConnectOptions::default() };
        client::report("calc", &options).map_or(0, |report| report.pending)
    }

    /// A client of `a`.
    fn client(&self) -> Client {
        let options = ConnectOptions { folder: Some(self.a.path().into()), ..ConnectOptions::default() };
        found("the imported service", || Client::connect_with("calc", &options).ok())
    }
}

fn echo(request: &Request<'_>, reply: &mut Reply<'_>) {
    reply.set_code(7);
    let _ = reply.write(&request.to_vec());
}

fn within(left: Duration) -> CallOptions {
    CallOptions { timeout: SOON, ..CallOptions::within(left) }
}

fn patient() -> CallOptions {
    CallOptions { timeout: SOON, ..CallOptions::default() }
}

/// Different bytes for each length and number.
fn pattern(len: usize, number: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 31 + at / 251 + number * 7) as u8).collect()
}

fn ask(client: &Client, bytes: &[u8]) -> Result<Vec<u8>, CallError> {
    client.call(bytes, &patient()).map(|reply| reply.to_vec().unwrap())
}

pub(crate) fn bytes_of_any_length_arrive_as_they_were<W: World>() {
    let machines = Machines::<W>::new();
    let _service = machines.serve(2, echo);
    let _export = machines.export();
    let _import = machines.import("a");
    let client = machines.client();
    for (number, len) in [0, 1, 191, 192, 193, 4096, 32_767, 65_537, LONGEST].into_iter().enumerate() {
        let bytes = pattern(len, number);
        let reply = client.call(&bytes, &patient()).unwrap();
        assert!(reply.code() == 7 && reply.to_vec().unwrap() == bytes, "{len} bytes");
    }
    // What is too long ends by name, and the next call is served.
    assert!(ask(&client, &vec![0; LONGEST + 1]).is_err());
    assert_eq!(ask(&client, b"next").unwrap(), b"next");
}

pub(crate) fn many_long_calls_at_a_time_to_a_slow_service_lose_nothing<W: World>() {
    let machines = Machines::<W>::new();
    let served = Arc::new(AtomicU64::new(0));
    let count = served.clone();
    // Together many times what a connection holds, so that both directions are full.
    let _service = machines.serve(4, move |request, reply| {
        count.fetch_add(1, Ordering::SeqCst);
        std::thread::sleep(Duration::from_millis(1));
        echo(request, reply);
    });
    let _export = machines.export();
    let _import = machines.import("a");
    let client = machines.client();
    const THREADS: usize = 8;
    const EACH: usize = 20;
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let client = &client;
            scope.spawn(move || {
                for n in 0..EACH {
                    let bytes = pattern(LONGEST - 1000 * thread - n, thread * EACH + n);
                    assert!(ask(client, &bytes).unwrap() == bytes, "call {n} of thread {thread}");
                }
            });
        }
    });
    assert_eq!(served.load(Ordering::SeqCst), (THREADS * EACH) as u64, "each was sent once");
}

pub(crate) fn a_deadline_crosses_as_the_time_that_is_left<W: World>() {
    let machines = Machines::<W>::new();
    let (tell, told) = mpsc::channel();
    let tell = Mutex::new(tell);
    let _service = machines.serve(1, move |request, _| tell.lock().unwrap().send(request.left_ns()).unwrap());
    let _export = machines.export();
    // Half a round trip is subtracted, that of an earlier request; the first ones are the import's own.
    let began = Instant::now();
    let _import = machines.import("a");
    let client = machines.client();
    let deadline = Duration::from_secs(20);
    for _ in 0..3 {
        client.call(b"", &within(deadline)).unwrap();
        let took = began.elapsed();
        let left = Duration::from_nanos(told.recv().unwrap().unwrap());
        assert!(left <= deadline && left + took >= deadline, "{left:?} left of {deadline:?} after {took:?}");
    }
    client.call(b"", &patient()).unwrap();
    assert_eq!(told.recv().unwrap(), None, "no deadline is none");
}

pub(crate) fn the_provider_serves_the_earliest_deadline_first<W: World>() {
    let machines = Machines::<W>::new();
    let gate = Arc::new(Mutex::new(()));
    let held = gate.lock().unwrap();
    let (tell, told) = mpsc::channel();
    let (tell, inside) = (Mutex::new(tell), gate.clone());
    let _service = machines.serve(1, move |request, _| {
        tell.lock().unwrap().send(request.to_vec()).unwrap();
        drop(inside.lock().unwrap());
    });
    let _export = machines.export();
    let _import = machines.import("a");
    let client = machines.client();
    let mut tokens = vec![client.submit(b"first", &within(SOON)).unwrap()];
    assert_eq!(told.recv_timeout(SOON).unwrap(), b"first");
    for (name, seconds) in [(b"late", 25), (b"soon", 15), (b"then", 20)] {
        tokens.push(client.submit(name, &within(Duration::from_secs(seconds))).unwrap());
    }
    until("three wait in the provider's queue", || machines.waiting() == 3);
    drop(held);
    for token in tokens {
        client.wait(token, SOON).unwrap();
    }
    let order: Vec<Vec<u8>> = (0..3).map(|_| told.recv_timeout(SOON).unwrap()).collect();
    assert_eq!(order, [b"soon", b"then", b"late"]);
}

pub(crate) fn the_provider_refuses_by_name_what_it_cannot_meet<W: World>() {
    let machines = Machines::<W>::new();
    let options = Options {
        folder: Some(machines.b.path().into()),
        admission: true,
        budget: Duration::from_secs(5),
        ..Options::default()
    };
    let _service = Service::register("calc", options, echo).unwrap();
    let _export = machines.export();
    let _import = machines.import("a");
    let client = machines.client();
    let refused = client.call(b"", &within(Duration::from_secs(1)));
    assert!(matches!(refused, Err(CallError::Refused(Refusal::Admission))), "{refused:?}");
    client.call(b"", &within(SOON)).unwrap();
}

pub(crate) fn a_call_that_is_cancelled_here_is_cancelled_there<W: World>() {
    let machines = Machines::<W>::new();
    let (tell, told) = mpsc::channel();
    let tell = Mutex::new(tell);
    let _service = machines.serve(2, move |request, _| {
        let tell = tell.lock().unwrap().clone();
        tell.send("began").unwrap();
        let (gone, is_gone) = mpsc::channel();
        request.on_cancelled(move || _ = gone.send(()));
        is_gone.recv_timeout(SOON).unwrap();
        tell.send("cancelled").unwrap();
    });
    let _export = machines.export();
    let import = machines.import("a");
    let client = machines.client();
    let token = client.submit(b"", &within(SOON)).unwrap();
    assert_eq!(told.recv_timeout(SOON).unwrap(), "began");
    assert!(client.cancel(token));
    assert_eq!(told.recv_timeout(SOON).unwrap(), "cancelled");
    // So it is where the importing side ends.
    let _token = client.submit(b"", &within(SOON)).unwrap();
    assert_eq!(told.recv_timeout(SOON).unwrap(), "began");
    drop(import);
    assert_eq!(told.recv_timeout(SOON).unwrap(), "cancelled");
}

/// Calls under way when `end` is called have one named end each within `most`, and the service has
/// seen none twice.
fn calls_end_when<W: World>(machines: &Machines<W>, most: Duration, end: impl FnOnce() + Send) {
    const CALLS: usize = 12;
    let served = Arc::new(Mutex::new(Vec::new()));
    let (tell, told) = mpsc::channel();
    let (seen, tell) = (served.clone(), Mutex::new(tell));
    let gate = Arc::new(Mutex::new(()));
    let held = gate.lock().unwrap();
    let inside = gate.clone();
    let _service = machines.serve(16, move |request, _| {
        seen.lock().unwrap().push(request.to_vec());
        tell.lock().unwrap().send(()).unwrap();
        drop(inside.lock().unwrap());
    });
    let client = machines.client();
    let tokens: Vec<_> = (0..CALLS).map(|n| client.submit(&[n as u8], &patient()).unwrap()).collect();
    for _ in 0..EXPORTED {
        told.recv_timeout(SOON).unwrap();
    }
    let began = Instant::now();
    std::thread::scope(|scope| {
        // An export waits for what it has begun.
        scope.spawn(end);
        let ends: Vec<_> = tokens.into_iter().map(|token| client.wait(token, SOON).map(drop)).collect();
        let took = began.elapsed();
        drop(held);
        assert!(ends.iter().all(|end| matches!(end, Err(CallError::ProviderGone))), "{ends:?}");
        assert!(took < most, "{took:?}");
    });
    let mut served = served.lock().unwrap().clone();
    let count = served.len();
    served.sort();
    served.dedup();
    assert_eq!(served.len(), count, "none was sent twice");
}

/// Requests of one connection that an export serves at a time.
const EXPORTED: usize = 8;
/// What a busy machine may add.
const LATE: Duration = Duration::from_secs(6);

pub(crate) fn an_export_that_ends_ends_its_calls_at_once_and_is_found_again<W: World>() {
    let machines = Machines::<W>::new();
    let (export, _) = machines.export();
    let _import = machines.import("a");
    calls_end_when(&machines, LATE, || drop(export));
    let _export = machines.export();
    let _service = machines.serve(1, echo);
    until("calls are served again", || ask(&machines.client(), b"again").is_ok_and(|bytes| bytes == b"again"));
}

pub(crate) fn an_engine_that_is_killed_ends_its_calls_by_name_and_is_found_again<W: World>() {
    for machine in ["a", "b"] {
        let machines = Machines::<W>::new();
        let export = machines.export();
        let import = machines.import("a");
        calls_end_when(&machines, 2 * DEAD_AFTER + LATE, || machines.world.kill(machine));
        drop((export, import));
        machines.world.start(machine);
        let _export = machines.export();
        let _import = machines.import("a");
        let _service = machines.serve(1, echo);
        until("calls are served again", || ask(&machines.client(), b"again").is_ok_and(|bytes| bytes == b"again"));
    }
}

/// Not of TCP, whose kernel would have to be cut off: tests/span_calls.py does that.
#[allow(dead_code, reason = "one engine has it")]
pub(crate) fn a_way_that_is_cut_ends_its_calls_by_name<W: World>() {
    let machines = Machines::<W>::new();
    let _export = machines.export();
    let _import = machines.import("a");
    calls_end_when(&machines, 2 * DEAD_AFTER + LATE, || machines.world.relay().pass(Passing::Nothing));
}

pub(crate) fn only_machines_that_the_export_names_and_that_prove_it_are_served<W: World>() {
    let machines = Machines::<W>::new();
    let _service = machines.serve(1, echo);
    let (_export, told) = machines.export();
    // The certificate decides, whatever name the engine knows.
    let (import, events) = machines.import("c");
    let event = events.recv_timeout(SOON).unwrap();
    assert!(matches!(&event, ImportEvent::Failed { why, .. } if why.contains("not offered")), "{event:?}");
    assert!(matches!(told.recv_timeout(SOON).unwrap(), ExportEvent::Refused { .. }));
    drop(import);
    let _import = machines.import("a");
    assert_eq!(ask(&machines.client(), b"x").unwrap(), b"x");
    let machine = found("the machine", || match told.try_recv() {
        Ok(ExportEvent::Connected { machine, .. }) => Some(machine),
        _ => None,
    });
    assert_eq!(machine, "a");
}

pub(crate) fn who_speaks_something_else_or_does_not_read_harms_no_one_else<W: World>() {
    let machines = Machines::<W>::new();
    let _service = machines.serve(2, echo);
    let (_export, told) = machines.export();
    let _import = machines.import("a");
    let client = machines.client();
    assert_eq!(ask(&client, b"before").unwrap(), b"before");
    let engine = machines.world.engine("a");
    // No TLS.
    let mut garbage = engine.connect(&machines.world.remote("b")).unwrap();
    let _ = garbage.write_all(&[0xa5; 4096]);
    let mut rest = Vec::new();
    let _ = garbage.read_to_end(&mut rest);
    found("it is refused", || match told.try_recv() {
        Ok(ExportEvent::Refused { why, .. }) => why.contains("TLS").then_some(()),
        _ => None,
    });
    // Half a record, and then silence.
    let mut silent: Vec<Socket> = (0..4).map(|_| engine.connect(&machines.world.remote("b")).unwrap()).collect();
    silent.iter_mut().for_each(|socket| socket.write_all(&[0x16, 3, 1]).unwrap());
    for n in 0..20 {
        assert_eq!(ask(&client, &pattern(40_000, n)).unwrap(), pattern(40_000, n));
    }
    drop(silent);
}

/// Has the tests of the suite for a world, and those more that only it can pass.
macro_rules! each {
    ($world:ty $(: $($more:ident)+)?) => {
        $crate::suite::tests! {
            $world:
            bytes_of_any_length_arrive_as_they_were
            many_long_calls_at_a_time_to_a_slow_service_lose_nothing
            a_deadline_crosses_as_the_time_that_is_left
            the_provider_serves_the_earliest_deadline_first
            the_provider_refuses_by_name_what_it_cannot_meet
            a_call_that_is_cancelled_here_is_cancelled_there
            an_export_that_ends_ends_its_calls_at_once_and_is_found_again
            an_engine_that_is_killed_ends_its_calls_by_name_and_is_found_again
            only_machines_that_the_export_names_and_that_prove_it_are_served
            who_speaks_something_else_or_does_not_read_harms_no_one_else
            $($($more)+)?
        }
    };
}
pub(crate) use each;

macro_rules! tests {
    ($world:ty: $($name:ident)+) => {
        $(
            #[test]
            fn $name() {
                $crate::suite::$name::<$world>();
            }
        )+
    };
}
pub(crate) use tests;
