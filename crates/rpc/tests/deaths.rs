//! Processes killed at each step, by SIGKILL: who waits is told at once, what was held comes back,
//! the rest goes on.
//!
//! The children are this test program again: `child` runs only where the environment says what it
//! is to be.

mod support;

use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{
    Pid, PidfdFlags, PidfdGetfdFlags, Resource, Rlimit, Signal, kill_process, pidfd_getfd, pidfd_open, setrlimit,
};
use tombolo_rpc::client::{CallError, CallOptions, Client, ConnectError};
use tombolo_rpc::folder;
use tombolo_rpc::provider::{Options, Reply, Request, Service};
use tombolo_rpc::shared::SharedBuffer;
use tombolo_testing::{TIMEOUT, until};

use support::{connect, connect_options, options};

/// What the documentation promises to those who wait.
const AT_ONCE: Duration = Duration::from_millis(10);
const ROLE: &str = "TOMBOLO_RPC_TEST_ROLE";
const FOLDER: &str = "TOMBOLO_RPC_TEST_FOLDER";

/// One test at a time: they count this process's descriptors and mappings.
static ONE: std::sync::Mutex<()> = std::sync::Mutex::new(());

struct Killed {
    child: Child,
    out: BufReader<ChildStdout>,
}

impl Killed {
    fn start(role: &str, dir: &Path) -> Killed {
        Killed::start_by(&mut Command::new(std::env::current_exe().unwrap()), role, dir)
    }

    fn apart() -> Command {
        let mut unshare = Command::new("unshare");
        if !rustix::process::geteuid().is_root() {
            unshare.args(["--user", "--map-root-user"]);
        }
        unshare.args(["--pid", "--fork", "--kill-child"]);
        unshare
    }

    fn can_start_apart() -> bool {
        Killed::apart().arg("true").status().is_ok_and(|status| status.success())
    }

    /// The same in a PID namespace of its own, whose processes have no number in another one that
    /// is not above it.
    fn start_apart(role: &str, dir: &Path) -> Killed {
        Killed::start_by(Killed::apart().arg(std::env::current_exe().unwrap()), role, dir)
    }

    fn start_by(command: &mut Command, role: &str, dir: &Path) -> Killed {
        let mut child = command
            .args(["child", "--exact", "--nocapture", "--ignored"])
            .env(ROLE, role)
            .env(FOLDER, dir)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        Killed { child, out }
    }

    /// Waits until the child says so.
    fn says(&mut self, word: &str) {
        let mut line = String::new();
        while !line.ends_with(&format!("{word}\n")) {
            line.clear();
            assert_ne!(self.out.read_line(&mut line).unwrap(), 0, "the child ended before it said {word}");
        }
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
    }
}

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn say(word: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{word}").unwrap();
    out.flush().unwrap();
}

fn sleep_for_ever() -> ! {
    loop {
        std::thread::sleep(TIMEOUT);
    }
}

fn serve(request: &Request<'_>, reply: &mut Reply<'_>) {
    match request.payload().read_array::<1>(0) {
        Some([b'h']) => {
            say("serving");
            sleep_for_ever();
        }
        // Killed between writing a reply and sending it.
        Some([b'l']) => {
            reply.loan(100_000).unwrap().write_from(&[1; 100_000]);
            say("writing");
            sleep_for_ever();
        }
        _ => {
            let _ = reply.write(&request.to_vec());
        }
    }
}

/// What the children do; no test of its own.
#[test]
#[ignore = "is run by the other tests"]
fn child() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let dir = std::env::var(FOLDER).unwrap();
    let dir = Path::new(&dir);
    if role == "provider" {
        let _service = Service::register("s", options(dir), serve).unwrap();
        say("ready");
        sleep_for_ever();
    }
    if role == "provider with few descriptors" {
        let few = Rlimit { current: Some(32), maximum: Some(32) };
        setrlimit(Resource::Nofile, few).unwrap();
        let _service = Service::register("s", options(dir), serve).unwrap();
        say("ready");
        sleep_for_ever();
    }
    let client = connect(dir);
    let call = CallOptions::default();
    let (large, buffer) = (vec![5; 50_000], SharedBuffer::new(1 << 20, false).unwrap());
    match role.as_str() {
        "connected" => {}
        "calls until its provider goes" => {
            assert_eq!(client.call(b"abc", &call).unwrap().to_vec().unwrap(), b"abc");
            say("called");
            while !matches!(client.call(b"x", &call), Err(CallError::ProviderGone)) {}
            say("provider gone");
        }
        "loan" => {
            let loan = client.loan(100_000).unwrap();
            loan.view().write_from(&[1; 50_000]);
            std::mem::forget(loan);
        }
        "queued" => {
            for n in 0..8 {
                // The first are held by the handlers of both workers.
                client.submit(if n < 2 { b"wait" } else { &large }, &call).unwrap();
            }
        }
        "served" => {
            client.submit(b"wait", &call).unwrap();
        }
        "replied" => {
            // Replies that are never fetched, and some that are and are held.
            for _ in 0..4 {
                std::mem::forget(client.call(&large, &call).unwrap());
                client.submit(&large, &call).unwrap();
            }
        }
        "shared" => {
            std::mem::forget(client.call_shared(&buffer, 0, 1 << 20, &call).unwrap());
        }
        "busy" => {
            say("ready");
            for n in 0.. {
                let tokens = [client.submit(b"x", &call).unwrap(), client.submit(&large, &call).unwrap()];
                client.call_shared(&buffer, n % 1000, 1000, &call).unwrap();
                client.cancel(tokens[1]);
                let _ = client.wait_all(&tokens, TIMEOUT);
            }
        }
        other => panic!("no role {other}"),
    }
    say("ready");
    sleep_for_ever();
}

#[test]
fn calls_to_a_stopped_provider_end_at_their_deadlines() {
    let _one = ONE.lock().unwrap_or_else(|e| e.into_inner());
    let dir = tempfile::tempdir().unwrap();
    let mut provider = Killed::start("provider", dir.path());
    provider.says("ready");
    let client = connect(dir.path());
    client.call(b"x", &CallOptions::default()).unwrap();
    let pid = Pid::from_raw(provider.child.id() as i32).unwrap();
    kill_process(pid, Signal::STOP).unwrap();
    // Each thread stops by itself.
    let state = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("stat")).unwrap();
    let is_stopped = |stat: String| stat.rsplit_once(')').unwrap().1.starts_with(" T");
    let tasks = || std::fs::read_dir(format!("/proc/{}/task", provider.child.id())).unwrap();
    until("all of it to stop", || tasks().all(|task| is_stopped(state(task.unwrap()))));
    let within = |ms| CallOptions::within(Duration::from_millis(ms));
    let began = Instant::now();
    let waited = client.submit(b"x", &within(30)).unwrap();
    let all = [client.submit(b"x", &within(60)).unwrap(), client.submit(b"x", &within(90)).unwrap()];
    for end in [client.call(b"x", &within(30)), client.wait(waited, TIMEOUT)] {
        assert!(matches!(end, Err(CallError::DeadlineExceeded)), "{:?}", end.map(|_| ()));
    }
    assert!(began.elapsed() >= Duration::from_millis(30), "not before it");
    assert_eq!(client.wait_any(&all, TIMEOUT), Some(0));
    for end in client.wait_all(&all, TIMEOUT) {
        assert!(matches!(end, Err(CallError::DeadlineExceeded)), "{:?}", end.map(|_| ()));
    }
    let took = began.elapsed();
    assert!(took < Duration::from_secs(10), "{took:?}: far from the 30 s of a caller's own timeout");
    kill_process(pid, Signal::CONT).unwrap();
    until("the slots come back", || client.under_way() == 0);
    assert!(client.call(b"x", &CallOptions::default()).is_ok());
}

#[test]
fn a_service_and_a_client_in_other_pid_namespaces_call_and_are_missed() {
    let _one = ONE.lock().unwrap_or_else(|e| e.into_inner());
    if !Killed::can_start_apart() {
        return tombolo_testing::skip("PID namespaces (unshare --pid) are not to be had here");
    }
    let dir = tempfile::tempdir().unwrap();
    // Neither sees a number of the other: both namespaces are beside each other.
    let mut provider = Killed::start_apart("provider", dir.path());
    provider.says("ready");
    let mut client = Killed::start_apart("calls until its provider goes", dir.path());
    client.says("called");
    // Its name is not stale, although the process behind it has no number there.
    assert_eq!(folder::list(dir.path()), ["s"]);
    // One that is above them sees both.
    assert!(connect(dir.path()).call(b"x", &CallOptions::default()).is_ok());
    provider.kill();
    client.says("provider gone");
}

/// All descriptors of a process, as a child that it forks has them: open for as long as these are.
fn inherited(pid: u32) -> Vec<OwnedFd> {
    let process = pidfd_open(Pid::from_raw(pid as i32).unwrap(), PidfdFlags::empty()).unwrap();
    let numbers = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let numbers = numbers.map(|entry| entry.unwrap().file_name().to_str().unwrap().parse().unwrap());
    // The descriptor by which our own folder is read is closed by now.
    numbers.filter_map(|number| pidfd_getfd(&process, number, PidfdGetfdFlags::empty()).ok()).collect()
}

/// Who connects and says nothing.
fn stranger(dir: &Path) -> OwnedFd {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    rustix::net::connect(&socket, &SocketAddrUnix::new(dir.join("s")).unwrap()).unwrap();
    socket
}

/// Clock ticks for which the thread of that name has run.
fn ticks(name: &str) -> u64 {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let stats = tasks.filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("stat")).ok());
    let ticks = stats.filter(|stat| stat.contains(&format!("({name})"))).map(|stat| {
        let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
    });
    ticks.sum()
}

/// The thread of that name sleeps, or nearly so: of 30 ticks it runs for 10 at most.
fn assert_rests(name: &str) {
    let before = ticks(name);
    std::thread::sleep(Duration::from_millis(300));
    let ran = ticks(name) - before;
    assert!(ran <= 10, "{name} ran for {ran} of 30 ticks");
}

/// Whether nothing is held that was not held before.
fn is_given_back(before: (usize, usize)) -> bool {
    let (fds, mappings) = held();
    fds <= before.0 && mappings <= before.1
}

/// Descriptors and shared mappings of this process.
fn held() -> (usize, usize) {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    (std::fs::read_dir("/proc/self/fd").unwrap().count(), maps.lines().filter(|l| l.contains("tombolo-rpc")).count())
}

#[test]
fn a_killed_client_leaves_nothing_behind_and_others_are_served_on() {
    let _one = ONE.lock().unwrap_or_else(|e| e.into_inner());
    let dir = tempfile::tempdir().unwrap();
    let open = Arc::new(AtomicBool::new(false));
    let handler = {
        let open = open.clone();
        move |request: &Request<'_>, reply: &mut Reply<'_>| {
            if request.payload().read_array::<4>(0) == Some(*b"wait") {
                until("it is let go", || open.load(Ordering::SeqCst));
            }
            serve(request, reply);
        }
    };
    let service = Service::register("s", Options { workers: 2, ..options(dir.path()) }, handler).unwrap();
    let other = connect(dir.path());
    assert!(other.call(b"x", &CallOptions::default()).is_ok());
    let before = held();
    for role in ["connected", "loan", "queued", "served", "replied", "shared"] {
        open.store(false, Ordering::SeqCst);
        let mut child = Killed::start(role, dir.path());
        child.says("ready");
        until("the client is there", || service.report().clients == 2);
        if role == "queued" {
            until("its calls wait", || service.report().pending == 6);
        }
        child.kill();
        // Others are served before, while and after it is noticed, unless it holds all workers.
        for _ in 0..if role == "queued" { 0 } else { 50 } {
            assert!(other.call(&[7; 3000], &CallOptions::default()).is_ok(), "{role}");
        }
        until("the client is forgotten", || service.report().clients == 1 && service.report().pending == 0);
        open.store(true, Ordering::SeqCst);
        assert!(other.call(&[7; 3000], &CallOptions::default()).is_ok(), "{role}");
        drop(child);
        until(&format!("{role}: all is given back"), || is_given_back(before));
    }
    let report = service.report();
    assert_eq!((report.broken_clients, report.answers.failed), (0, 0));
    // Two served and six queued of one, one served of the other.
    assert_eq!(report.answers.abandoned, 9, "{:?}", report.answers);
}

#[test]
fn clients_killed_at_any_instant_do_no_harm() {
    let _one = ONE.lock().unwrap_or_else(|e| e.into_inner());
    let dir = tempfile::tempdir().unwrap();
    let service = Service::register("s", Options { workers: 2, ..options(dir.path()) }, serve).unwrap();
    let other = connect(dir.path());
    assert!(other.call(b"x", &CallOptions::default()).is_ok());
    let before = held();
    for round in 0..25u64 {
        let mut child = Killed::start("busy", dir.path());
        child.says("ready");
        // The instant at which it dies, not a wait for anything.
        std::thread::sleep(Duration::from_micros(round * round * 13 % 4000));
        child.kill();
        assert!(other.call(&[7; 3000], &CallOptions::default()).is_ok());
    }
    until("all clients are forgotten", || service.report().clients == 1 && service.report().pending == 0);
    until("all is given back", || is_given_back(before));
    assert_eq!(service.report().broken_clients, 0, "a client that is killed breaks no rule");
}

/// Kills the provider while `step` waits; how long that took to return.
fn time_to_error(step: &str) -> Duration {
    let dir = tempfile::tempdir().unwrap();
    let mut provider = Killed::start("provider", dir.path());
    provider.says("ready");
    let client = connect(dir.path());
    let call = CallOptions { timeout: TIMEOUT, ..CallOptions::default() };
    let ended = std::thread::scope(|scope| {
        let (client, call) = (&client, &call);
        let first: &[u8] = if step == "writing the reply" { b"l" } else { b"h" };
        if step == "queued" {
            client.submit(first, call).unwrap();
        }
        // Several threads: one sleeps, the others wait for it.
        let threads = if step == "several threads" { 4 } else { 1 };
        let bytes = if step == "queued" { &[b'x'; 5000] } else { first };
        let wait = move || {
            let ended = client.call(bytes, call);
            (ended.map(drop), Instant::now())
        };
        let waiters: Vec<_> = (0..threads).map(|_| scope.spawn(wait)).collect();
        provider.says(if step == "writing the reply" { "writing" } else { "serving" });
        // Long enough that they sleep by then, which nothing tells of; one that does not yet is
        // told all the same.
        std::thread::sleep(Duration::from_millis(5));
        let killed = Instant::now();
        provider.kill();
        let ends = waiters.into_iter().map(|waiter| waiter.join().unwrap());
        let told = ends.map(|(error, at)| {
            assert!(matches!(error, Err(CallError::ProviderGone)), "{step}: {error:?}");
            at - killed
        });
        told.max().unwrap()
    });
    assert!(matches!(client.call(b"x", &call), Err(CallError::ProviderGone)));
    drop(provider);
    // The dead provider's socket does not block a new service.
    assert!(matches!(Client::connect_with("s", &connect_options(dir.path())), Err(ConnectError::NoService { .. })));
    let _next = Service::register("s", options(dir.path()), serve).unwrap();
    assert!(connect(dir.path()).call(b"x", &call).is_ok());
    ended
}

#[test]
fn who_waits_for_a_killed_provider_is_told_at_once() {
    let _one = ONE.lock().unwrap_or_else(|e| e.into_inner());
    for step in ["served", "writing the reply", "queued", "several threads"] {
        // The kernel takes a process apart before it closes its sockets, and the machine may be
        // busy with other things: of some tries one shows what ours costs.
        let mut tries = (0..20).map(|_| time_to_error(step)).inspect(|t| println!("{step}: {t:?}"));
        assert!(tries.any(|took| took < AT_ONCE), "{step}: never within {AT_ONCE:?}");
    }
}

#[test]
fn a_provider_killed_at_any_instant_is_followed_by_the_next() {
    let _one = ONE.lock().unwrap_or_else(|e| e.into_inner());
    let dir = tempfile::tempdir().unwrap();
    {
        // What a process makes once, with its first client, is there before it is counted.
        let _service = Service::register("first", options(dir.path()), serve).unwrap();
        drop(Client::connect_with("first", &connect_options(dir.path())).unwrap());
    }
    let (stop, served, gone) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    let before = held();
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let call = CallOptions { timeout: TIMEOUT, ..CallOptions::default() };
                while !stop.load(Ordering::SeqCst) {
                    let client = match Client::connect_with("s", &connect_options(dir.path())) {
                        Ok(client) => client,
                        Err(ConnectError::NoService { .. } | ConnectError::Gone | ConnectError::Refused(_)) => {
                            std::thread::sleep(Duration::from_millis(1));
                            continue;
                        }
                        Err(error) => panic!("{error}"),
                    };
                    loop {
                        match client.call(&[9; 700], &call) {
                            Ok(reply) => {
                                assert_eq!(reply.len(), 700);
                                served.fetch_add(1, Ordering::SeqCst);
                            }
                            Err(CallError::ProviderGone) => {
                                gone.fetch_add(1, Ordering::SeqCst);
                                break;
                            }
                            Err(error) => panic!("{error}"),
                        }
                        if stop.load(Ordering::SeqCst) {
                            return;
                        }
                    }
                }
            });
        }
        for round in 0..12u64 {
            let mut provider = Killed::start("provider", dir.path());
            provider.says("ready");
            let (had, left) = (served.load(Ordering::SeqCst), Duration::from_micros(round * 777 % 5000));
            until("calls are served", || served.load(Ordering::SeqCst) > had + 10);
            // The instant at which it dies, not a wait for anything.
            std::thread::sleep(left);
            let told = gone.load(Ordering::SeqCst);
            provider.kill();
            until("a caller is told", || gone.load(Ordering::SeqCst) > told);
        }
        stop.store(true, Ordering::SeqCst);
    });
    assert!(gone.load(Ordering::SeqCst) >= 12, "{gone:?}");
    assert_eq!(folder::list(dir.path()), [""; 0]);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left");
    until("all is given back", || is_given_back(before));
}

#[test]
fn a_killed_provider_is_told_of_and_followed_also_while_a_child_of_its_keeps_its_sockets() {
    let _one = ONE.lock().unwrap_or_else(|e| e.into_inner());
    let dir = tempfile::tempdir().unwrap();
    let mut provider = Killed::start("provider", dir.path());
    provider.says("ready");
    let client = connect(dir.path());
    let call = CallOptions { timeout: TIMEOUT, ..CallOptions::default() };
    let token = client.submit(b"h", &call).unwrap();
    provider.says("serving");
    let kept = inherited(provider.child.id());
    assert!(kept.len() > 5, "{kept:?}");
    let killed = Instant::now();
    provider.kill();
    assert!(matches!(client.wait(token, TIMEOUT), Err(CallError::ProviderGone)));
    assert!(killed.elapsed() < TIMEOUT / 10, "told at once: {:?}", killed.elapsed());
    // Also before the dead process has been waited for.
    let error = Client::connect_with("s", &connect_options(dir.path())).unwrap_err();
    assert!(matches!(error, ConnectError::NoService { .. }), "{error}");
    assert_eq!(folder::list(dir.path()), [""; 0]);
    drop(provider);
    let _next = Service::register("s", options(dir.path()), serve).unwrap();
    assert!(connect(dir.path()).call(b"x", &call).is_ok());
    assert_rests("tombolo-rpc-lif");
    drop(kept);
}

#[test]
fn a_killed_client_is_forgotten_also_while_a_child_of_its_keeps_its_sockets() {
    let _one = ONE.lock().unwrap_or_else(|e| e.into_inner());
    let dir = tempfile::tempdir().unwrap();
    let service = Service::register("s", options(dir.path()), serve).unwrap();
    let before = held();
    for role in ["connected", "replied", "shared"] {
        let mut child = Killed::start(role, dir.path());
        child.says("ready");
        let kept = inherited(child.child.id());
        child.kill();
        until("the client is forgotten", || service.report().clients == 0);
        drop((child, kept));
        until(&format!("{role}: all is given back"), || is_given_back(before));
    }
}

#[test]
fn connections_that_end_while_a_forked_child_has_them_too_keep_no_thread_busy() {
    let _one = ONE.lock().unwrap_or_else(|e| e.into_inner());
    let dir = tempfile::tempdir().unwrap();
    let service = Service::register("s", options(dir.path()), serve).unwrap();
    // Both ends are in this process, and so would both be in its child.
    let client = connect(dir.path());
    assert!(client.call(b"x", &CallOptions::default()).is_ok());
    let kept = inherited(std::process::id());
    drop(client);
    until("the client is forgotten", || service.report().clients == 0);
    assert_rests("tombolo-rpc-lif");
    assert_rests("s-control");
    assert!(connect(dir.path()).call(b"x", &CallOptions::default()).is_ok());
    drop(kept);
}

#[test]
fn a_service_without_descriptors_says_so_and_goes_on() {
    let _one = ONE.lock().unwrap_or_else(|e| e.into_inner());
    let dir = tempfile::tempdir().unwrap();
    let mut provider = Killed::start("provider with few descriptors", dir.path());
    provider.says("ready");
    let call = CallOptions::default();
    let mut clients = vec![connect(dir.path())];
    let refused = loop {
        match Client::connect_with("s", &connect_options(dir.path())) {
            Ok(client) => clients.push(client),
            Err(error) => break error,
        }
        assert!(clients.len() < 32);
    };
    assert!(matches!(refused, ConnectError::Refused(_)), "{refused}");
    // Strangers, who say nothing, take a descriptor each: in the end there is none to accept one
    // with.
    let strangers: Vec<_> = (0..8).map(|_| stranger(dir.path())).collect();
    for _ in 0..8 {
        let error = Client::connect_with("s", &connect_options(dir.path())).unwrap_err().to_string();
        assert!(error.contains("as many files open as it may"), "{error}");
    }
    assert!(clients[0].call(b"x", &call).is_ok(), "who is there is served");
    drop(strangers);
    clients.truncate(1);
    until("places come back", || Client::connect_with("s", &connect_options(dir.path())).is_ok());
    assert!(clients[0].call(b"x", &call).is_ok());
}
