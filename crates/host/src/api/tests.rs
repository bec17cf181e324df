//! Server and client over a real socket, before a task that answers as the fabric's task does.

use super::apply::{ApplyQuery, ApplyReport, ChangeReport};
use super::client::{Client, ClientError, Ending};
use super::config::{ConfigQuery, ConfigReport};
use super::connections::Limits;
use super::report::{MachineReport, Status};
use super::server::{MAX_STREAMS, OPENAPI, Server};
use super::{CaptureOf, Console, Refusal, Reply, Request, samples};
use crate::console::{KEPT_BYTES, log_path, trim, tty_path};
use crate::fabric::events::{Events, Facts, KEPT, Kind};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use serde_json::Value;
use std::io::{BufRead, BufReader, Lines, Read, Write};
use std::ops::ControlFlow;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot};
use tombolo_testing::{TIMEOUT, until};

/// Requests that the fabric works on until the test answers them.
type Slow = Arc<Mutex<Vec<Reply<Vec<MachineReport>>>>>;

/// A task that keeps a status and answers, on a thread with its server.
struct Stand {
    socket: PathBuf,
    captures: Arc<AtomicUsize>,
    status: Arc<Mutex<Status>>,
    console: PathBuf,
    typed: Arc<Mutex<Vec<u8>>>,
    slow: Slow,
    events: Events,
    thread: Option<std::thread::JoinHandle<()>>,
    end: Option<oneshot::Sender<()>>,
    dir: tempfile::TempDir,
}

async fn answer(
    mut inbox: mpsc::Receiver<Request>,
    status: Arc<Mutex<Status>>,
    captures: Arc<AtomicUsize>,
    console: Console,
    slow: Slow,
    events: Events,
) {
    let mut span = None;
    while let Some(request) = inbox.recv().await {
        let mut status = status.lock().unwrap();
        match request {
            Request::Status(reply) => drop(reply.send(Ok(status.clone()))),
            Request::Events(reply) => drop(reply.send(Ok(events.clone()))),
            Request::AddPorts { sections, reply } => {
                let refused = || Refusal::Invalid(format!("request:1:1: expected a section, found {sections:?}"));
                let name = sections.strip_prefix("[port.").and_then(|s| s.split(']').next()).map(str::to_string);
                drop(reply.send(name.ok_or_else(refused).and_then(|name| {
                    if status.ports.iter().any(|p| p.name == name) {
                        return Err(Refusal::Conflict(format!("the name \"{name}\" is in use")));
                    }
                    let port = super::report::PortReport { name, ..status.ports[0].clone() };
                    status.ports.push(port.clone());
                    Ok(vec![port])
                })));
            }
            Request::HandOver { .. } | Request::Leave(_) => {}
            Request::ChangePort { name, change, reply } => {
                let missing = || Refusal::NotFound(format!("no port \"{name}\""));
                let port = status.ports.iter_mut().find(|p| p.name == name).map(|p| {
                    p.details.insert("rate".into(), change.into());
                    p.clone()
                });
                drop(reply.send(port.ok_or_else(missing)));
            }
            Request::RemovePort { name, reply } => {
                let before = status.ports.len();
                status.ports.retain(|p| p.name != name);
                let gone = status.ports.len() < before;
                let missing = || Refusal::NotFound(format!("no port \"{name}\""));
                drop(reply.send(gone.then_some(()).ok_or_else(missing)));
            }
            Request::RunMachine { sections, reply } if sections == "slow" => slow.lock().unwrap().push(reply),
            Request::RunMachine { sections, reply } => {
                let known = status.machines.iter_mut().find(|m| m.name == sections.trim());
                let machine = known.map(|m| {
                    m.state = "running".into();
                    vec![m.clone()]
                });
                drop(reply.send(machine.ok_or(Refusal::Failed("QEMU ended: no such image".into()))));
            }
            Request::Apply { text, query, reply } => {
                let refused = || Refusal::Invalid(format!("request:1:1: expected a fabric file, found {text:?}"));
                let file = query.file.map(|f| f.display().to_string()).unwrap_or_default();
                let change = ChangeReport { section: text.clone(), reason: file, ..ChangeReport::default() };
                let outcome = if query.dry_run { "planned" } else { "done" };
                let report = ApplyReport { outcome: outcome.into(), changes: vec![change], ..ApplyReport::default() };
                drop(reply.send(text.starts_with('[').then_some(report).ok_or_else(refused)));
            }
            Request::Config(reply) => {
                let config = serde_json::json!({"network": {"lan": {"mtu": 1400}}});
                let (revision, toml) = ("r1".into(), "[network.lan]\nmtu = 1400\n".into());
                let report = ConfigReport { schema: 1, revision, toml, config, ..ConfigReport::default() };
                drop(reply.send(Ok(report)));
            }
            Request::ChangeConfig { patch, query, reply } => {
                let conflict = || Refusal::Conflict("the configuration has changed".into());
                let change = ChangeReport { section: patch.to_string(), ..ChangeReport::default() };
                let outcome = if query.dry_run { "planned" } else { "done" };
                let report = ApplyReport { outcome: outcome.into(), changes: vec![change], ..ApplyReport::default() };
                let is_known = query.revision.is_none_or(|revision| revision == "r1");
                drop(reply.send(is_known.then_some(report).ok_or_else(conflict)));
            }
            Request::StopMachine { name, reply } => {
                let machine: Option<&mut MachineReport> = status.machines.iter_mut().find(|m| m.name == name);
                let machine = machine.map(|m| {
                    m.state = "stopped".into();
                    m.clone()
                });
                drop(reply.send(machine.ok_or(Refusal::NotFound(format!("no machine \"{name}\"")))));
            }
            Request::RestartMachine { name, reply } => {
                let machine = status.machines.iter().find(|m| m.name == name).cloned();
                drop(reply.send(machine.ok_or(Refusal::NotFound(format!("no machine \"{name}\"")))));
            }
            Request::Console { name, reply } => {
                let known = status.machines.iter().any(|m| m.name == name);
                let missing = || Refusal::NotFound(format!("no machine \"{name}\""));
                drop(reply.send(known.then(|| console.clone()).ok_or_else(missing)));
            }
            Request::Tables { reply, .. } => drop(reply.send(Ok(super::report::Tables::default()))),
            Request::PutRemotes { network, machine, body, reply } => {
                let member = |member: &super::report::RemoteMember| super::report::RemoteConflict {
                    member: member.name.clone(),
                    mac: member.mac.clone(),
                    ip: member.ips.first().and_then(|ip| ip.parse().ok()),
                    with: format!("{network} {machine} {}", body.address),
                };
                let conflicts = body.members.iter().map(member).collect();
                let unfit = || Refusal::Unfit("address: expected one of the remotes".into());
                let answer = super::report::RemoteConflicts { schema: 1, conflicts };
                drop(reply.send((body.address != "elsewhere").then_some(answer).ok_or_else(unfit)));
            }
            Request::DeleteRemotes { network, reply, .. } => {
                let missing = || Refusal::NotFound(format!("no network \"{network}\""));
                drop(reply.send((network == "lan").then_some(()).ok_or_else(missing)));
            }
            Request::Remotes { network, reply } => {
                let report = super::report::RemotesReport { schema: 1, network, ..Default::default() };
                drop(reply.send(Ok(report)));
            }
            Request::PutLost { body, reply, .. } => {
                let fixed = body.ips.iter().flat_map(|ip| ip.parse()).collect();
                drop(reply.send(Ok(super::report::LostAnswer { schema: 1, fixed })));
            }
            Request::PutSpan { report, reply } => {
                span = Some(super::report::Span { schema: 1, age_s: 0.5, report: *report });
                drop(reply.send(Ok(())));
            }
            Request::Span(reply) => drop(reply.send(Ok(span.clone()))),
            Request::Capture { of, snaplen, filter, reply } => {
                if ![CaptureOf::Port("web".into()), CaptureOf::Network("lan".into())].contains(&of) {
                    drop(reply.send(Err(Refusal::NotFound(format!("no {of:?}")))));
                    continue;
                }
                let filter = filter.map_or_else(String::new, |filter| format!(" {filter:?}"));
                let (sender, pieces) = mpsc::channel(4);
                captures.fetch_add(1, Ordering::SeqCst);
                let captures = captures.clone();
                tokio::spawn(async move {
                    let _ = sender.send(format!("snaplen {snaplen:?}{filter};").into_bytes()).await;
                    // A quiet port: nothing more ever comes, and only the client's end is to be
                    // noticed.
                    sender.closed().await;
                    captures.fetch_sub(1, Ordering::SeqCst);
                });
                drop(reply.send(Ok(pieces)));
            }
            Request::Down(reply) => {
                drop(reply.send(Ok(())));
                return;
            }
        }
    }
}

impl Stand {
    fn new() -> Stand {
        Stand::with(Limits::default())
    }

    fn with(limits: Limits) -> Stand {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("api.sock");
        // What a killed daemon leaves.
        drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
        let (mut tty, mut output) = crate::console::make(dir.path(), "web").unwrap();
        output.write_all(b"boot\n").unwrap();
        let console = log_path(dir.path(), "web");
        let input = tty_path(dir.path(), "web");
        let typed = Arc::new(Mutex::new(Vec::new()));
        let read = typed.clone();
        std::thread::spawn(move || {
            let mut piece = [0; 64];
            while let Ok(n) = tty.read(&mut piece) {
                read.lock().unwrap().extend(&piece[..n]);
            }
        });
        let server = Server::bind(&socket).unwrap().with_limits(limits);
        let captures = Arc::new(AtomicUsize::new(0));
        let status = Arc::new(Mutex::new(samples::status()));
        let (end, ended) = oneshot::channel();
        let files = Console { log: console.clone(), input: Some(input) };
        let slow = Slow::default();
        let events = Events::default();
        events.open(None, &(Arc::new(|_: &str| ()) as crate::fabric::Say));
        let (task_status, task_captures, task_slow) = (status.clone(), captures.clone(), slow.clone());
        let task_events = events.clone();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async move {
                let (requests, inbox) = mpsc::channel(16);
                let task = tokio::spawn(answer(inbox, task_status, task_captures, files, task_slow, task_events));
                let over = async move {
                    tokio::select! {
                        _ = ended => {}
                        _ = task => {}
                    }
                };
                server.serve(requests, over).await.unwrap();
            });
        });
        Stand { socket, captures, status, console, typed, slow, events, thread: Some(thread), end: Some(end), dir }
    }

    fn client(&self) -> Client {
        Client::new("demo", &self.socket).unwrap()
    }

    /// One request as it is, the connection closed afterwards; the answer's head and body.
    fn raw(&self, text: &str) -> String {
        let mut stream = UnixStream::connect(&self.socket).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        stream.write_all(text.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }
}

impl Drop for Stand {
    fn drop(&mut self) {
        drop(self.end.take());
        let ended = self.thread.take().unwrap().join();
        if !std::thread::panicking() {
            ended.unwrap();
        }
    }
}

#[test]
fn a_client_reads_and_changes_what_the_fabric_has() {
    let stand = Stand::new();
    let client = stand.client();
    assert_eq!(client.status().unwrap(), samples::status());
    assert_eq!(client.port("web").unwrap(), samples::status().ports[0]);
    let added = client.add_ports("[port.p1]\nkind = \"vhost-user\"\n").unwrap();
    assert_eq!(added.ports[0].name, "p1");
    assert_eq!(client.status().unwrap().ports.len(), 2);
    let again = client.add_ports("[port.p1]\n").unwrap_err();
    assert!(matches!(&again, ClientError::Refused { status: 409, .. }) && !again.is_misuse(), "{again}");
    let wrong = client.add_ports("[pork.p1]\n").unwrap_err();
    assert!(wrong.is_misuse() && wrong.to_string().contains("expected a section"), "{wrong}");
    client.remove_port("p1").unwrap();
    let missing = client.remove_port("p1").unwrap_err();
    assert!(matches!(missing, ClientError::Refused { status: 404, .. }));
    assert!(client.port("p1").unwrap_err().to_string().contains("there are: web"));
    assert_eq!(client.stop_machine("web").unwrap().state, "stopped");
    assert_eq!(client.run_machine("web").unwrap().machines[0].state, "running");
    assert_eq!(client.machine("web").unwrap().state, "running");
    assert!(client.machine("nobody").unwrap_err().to_string().contains("there are: web"));
    assert_eq!(client.restart_machine("web").unwrap().name, "web");
    let failed = client.run_machine("[cell.x]").unwrap_err();
    assert!(matches!(failed, ClientError::Refused { status: 500, .. }) && failed.to_string().contains("no such image"));
    let page = client.text("/metrics").unwrap();
    assert!(super::metrics::check::read(&page).unwrap().len() > 30);
    assert_eq!(client.text("/v1/openapi.json").unwrap(), OPENAPI);
}

#[test]
fn a_refused_body_costs_its_sender_neither_the_rest_of_it_nor_the_answer() {
    let stand = Stand::new();
    let head = |length| format!("POST /v1/ports HTTP/1.1\r\nHost: t\r\nContent-Length: {length}\r\n\r\n");
    let body = vec![b'x'; 8 << 20];
    // The client looks at the answer when it has sent all, long after it was refused.
    let mut stream = UnixStream::connect(&stand.socket).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream.write_all(head(body.len()).as_bytes()).unwrap();
    stream.write_all(&body).unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 413"), "{answer}");
    // One that sends no more and does not hang up is closed all the same.
    let mut stream = UnixStream::connect(&stand.socket).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream.write_all(head(body.len()).as_bytes()).unwrap();
    stream.write_all(&body[..super::server::MAX_BODY_BYTES + (64 << 10)]).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 413"), "{answer}");
    let until = Instant::now() + TIMEOUT;
    while stream.write_all(b"x").is_ok() {
        assert!(Instant::now() < until, "it is open {TIMEOUT:?} after its answer");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_changed_file_is_applied_or_only_compared() {
    let stand = Stand::new();
    let client = stand.client();
    let file = Some(PathBuf::from("/a folder/x&y.toml"));
    let dry = client.apply("[network.lan]", &ApplyQuery { dry_run: true, file }).unwrap();
    assert_eq!((dry.outcome.as_str(), dry.changes[0].reason.as_str()), ("planned", "/a folder/x&y.toml"));
    assert_eq!(client.apply("[network.lan]", &ApplyQuery::default()).unwrap().outcome, "done");
    assert!(client.apply("lan", &ApplyQuery::default()).unwrap_err().is_misuse());
    let relative = ApplyQuery { dry_run: true, file: Some("x.toml".into()) };
    assert!(client.apply("[network.lan]", &relative).unwrap_err().to_string().contains("an absolute path"));
    let wrong =
        stand.raw("POST /v1/apply?dryrun=1 HTTP/1.1\r\nHost: t\r\nConnection: close\r\nContent-Length: 0\r\n\r\n");
    assert!(wrong.starts_with("HTTP/1.1 400") && wrong.contains("dryrun"), "{wrong}");
}

#[test]
fn the_configuration_is_read_and_changed_by_a_merge_patch() {
    let stand = Stand::new();
    let client = stand.client();
    let read = client.config().unwrap();
    assert_eq!((read.revision.as_str(), &read.config["network"]["lan"]["mtu"]), ("r1", &Value::from(1400)));
    let text = stand.raw("GET /v1/config HTTP/1.1\r\nHost: t\r\nAccept: application/toml\r\nConnection: close\r\n\r\n");
    assert!(
        text.contains("content-type: application/toml") && text.ends_with("\r\n\r\n[network.lan]\nmtu = 1400\n"),
        "{text}"
    );
    let patch = serde_json::json!({"network": {"lan": {"mtu": null}}});
    let query = |dry_run, revision: &str| ConfigQuery { dry_run, revision: Some(revision.into()) };
    let dry = client.change_config(&patch, &query(true, "r1")).unwrap();
    assert_eq!((dry.outcome.as_str(), dry.changes[0].section.as_str()), ("planned", patch.to_string().as_str()));
    assert_eq!(client.change_config(&patch, &ConfigQuery::default()).unwrap().outcome, "done");
    let stale = client.change_config(&patch, &query(false, "r 0&")).unwrap_err();
    assert!(matches!(stale, ClientError::Refused { status: 409, .. }), "{stale}");
    for (query, body, says) in [("", "{", "expected JSON"), ("?dryrun=1", "{}", "dryrun")] {
        let answer = stand.raw(&format!(
            "PATCH /v1/config{query} HTTP/1.1\r\nHost: t\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        ));
        assert!(answer.starts_with("HTTP/1.1 400") && answer.contains(says), "{answer}");
    }
}

#[test]
fn sections_come_as_text_or_in_json() {
    let stand = Stand::new();
    let post = |kind: &str, body: &str| {
        let head = "POST /v1/ports HTTP/1.1\r\nHost: t\r\nConnection: close\r\n";
        stand.raw(&format!("{head}Content-Type: {kind}\r\nContent-Length: {}\r\n\r\n{body}", body.len()))
    };
    assert!(post("application/toml", "[port.a]\n").starts_with("HTTP/1.1 201"));
    assert!(post("application/json; charset=utf-8", "{\"toml\":\"[port.b]\\n\"}").starts_with("HTTP/1.1 201"));
    let other = post("application/json", "{\"tolm\":\"\"}");
    assert!(other.starts_with("HTTP/1.1 400") && other.contains("tolm"), "{other}");
    let large = post("application/toml", &"#".repeat(super::server::MAX_BODY_BYTES + 1));
    assert!(large.starts_with("HTTP/1.1 413"), "{large}");
    assert_eq!(stand.client().status().unwrap().ports.len(), 3);
}

#[test]
fn what_does_not_exist_is_said_in_json() {
    let stand = Stand::new();
    for (line, status) in [
        ("GET /v2/status", "404"),
        ("PUT /v1/status", "405"),
        ("GET /v1/ports/web/capture?snap=1", "400"),
        ("GET /v1/ports/nobody/capture", "404"),
        ("GET /v1/machines/nobody/console", "404"),
    ] {
        let answer = stand.raw(&format!("{line} HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n"));
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{line}: {answer}");
        let body = answer.split("\r\n\r\n").nth(1).unwrap();
        let fault: super::report::Fault = serde_json::from_str(body).unwrap();
        assert!(!fault.error.is_empty());
    }
}

#[test]
fn two_clients_and_a_silent_third_do_not_wait_for_each_other() {
    let stand = Stand::new();
    let silent = UnixStream::connect(&stand.socket).unwrap();
    let mut half = UnixStream::connect(&stand.socket).unwrap();
    half.write_all(b"POST /v1/ports HTTP/1.1\r\nContent-Le").unwrap();
    std::thread::scope(|scope| {
        for n in 0..2 {
            let client = stand.client();
            scope.spawn(move || {
                for i in 0..20 {
                    let name = format!("c{n}-{i}");
                    client.add_ports(&format!("[port.{name}]\n")).unwrap();
                    client.remove_port(&name).unwrap();
                }
            });
        }
    });
    assert_eq!(stand.client().status().unwrap(), samples::status());
    drop((silent, half));
}

/// What a client may leave unfinished.
const UNFINISHED: [&str; 5] = [
    "",
    "GET /v1/sta",
    "GET /v1/status HTTP/1.1\r\nHost: t\r\nX: ",
    "POST /v1/ports HTTP/1.1\r\nHost: t\r\nContent-Length: 100\r\n\r\n[port.",
    "GET /v1/status HTTP/1.1\r\nHost: t\r\nContent-Length: 100\r\n\r\n",
];

#[test]
fn half_sent_requests_do_not_lock_their_own_user_out() {
    let mut stand = Stand::with(Limits { head: 10 * TIMEOUT, body: 10 * TIMEOUT, ..Limits::default() });
    let held: Vec<_> = (0..2 * Limits::default().connections)
        .map(|n| {
            let mut stream = UnixStream::connect(&stand.socket).unwrap();
            // A connection that was replaced meanwhile is closed.
            let _ = stream.write_all(UNFINISHED[n % UNFINISHED.len()].as_bytes());
            stream
        })
        .collect();
    let begun = Instant::now();
    let client = stand.client();
    assert_eq!(client.status().unwrap(), samples::status());
    client.down().unwrap();
    assert!(begun.elapsed() < TIMEOUT, "no limit of time was waited for");
    stand.thread.take().unwrap().join().unwrap();
    stand.thread = Some(std::thread::spawn(|| ()));
    drop(held);
}

#[test]
fn a_request_that_does_not_go_on_is_ended() {
    let short = Duration::from_millis(100);
    let stand = Stand::with(Limits { head: short, body: short, stalled: short, ..Limits::default() });
    for unfinished in UNFINISHED {
        // The read ends when the server has closed the connection.
        let answer = stand.raw(unfinished);
        let status = if unfinished.starts_with("POST") { "HTTP/1.1 408" } else { "" };
        assert!(answer.starts_with(status), "{unfinished:?}: {answer}");
    }
    // Answers that are not read: more of them than a socket holds.
    let mut stream = UnixStream::connect(&stand.socket).unwrap();
    stream.set_write_timeout(Some(TIMEOUT)).unwrap();
    let asked = "GET /v1/openapi.json HTTP/1.1\r\nHost: t\r\n\r\n".repeat(1000);
    let ended = loop {
        match stream.write_all(asked.as_bytes()) {
            Ok(()) => {}
            Err(error) => break error,
        }
    };
    let closed = [std::io::ErrorKind::BrokenPipe, std::io::ErrorKind::ConnectionReset];
    assert!(closed.contains(&ended.kind()), "{ended}");
    // A capture whose reader pauses is no such answer.
    let mut stream = UnixStream::connect(&stand.socket).unwrap();
    stream.write_all(b"GET /v1/ports/web/capture HTTP/1.1\r\nHost: t\r\n\r\n").unwrap();
    until("the start of a capture", || stand.captures.load(Ordering::SeqCst) == 1);
    let begun = Instant::now();
    until("four limits to pass", || begun.elapsed() > 4 * short);
    assert_eq!(stand.captures.load(Ordering::SeqCst), 1);
}

#[test]
fn another_users_connections_take_none_of_the_owners() {
    if !rustix::process::geteuid().is_root() {
        return tombolo_testing::skip("it takes root to become another user");
    }
    let stand = Stand::with(Limits { head: 10 * TIMEOUT, ..Limits::default() });
    for path in [stand.dir.path(), &stand.socket] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o777)).unwrap();
    }
    let socket = stand.socket.clone();
    // On Linux a thread has a user of its own.
    let other = std::thread::spawn(move || {
        let nobody = rustix::process::Uid::from_raw(65534);
        rustix::thread::set_thread_res_uid(nobody, nobody, nobody).unwrap();
        let connect = |_| {
            let mut stream = UnixStream::connect(&socket).unwrap();
            // One too many is closed at once.
            let _ = stream.write_all(b"GET /v1/status HTT");
            stream
        };
        (0..300).map(connect).collect::<Vec<_>>()
    });
    let held = other.join().unwrap();
    // All of the owner's connections are there for it.
    let mine: Vec<_> =
        (0..Limits::default().connections - 1).map(|_| UnixStream::connect(&stand.socket).unwrap()).collect();
    assert_eq!(stand.client().status().unwrap().name, "demo");
    for mut stream in mine {
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        stream.write_all(b"GET /v1/nothing HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 404"), "{answer}");
    }
    drop(held);
}

/// What starts a machine and is not answered before the test does it.
const SLOW: &str = "POST /v1/machines HTTP/1.1\r\nHost: t\r\nContent-Length: 4\r\n\r\nslow";
const CAPTURE: &str = "GET /v1/ports/web/capture HTTP/1.1\r\nHost: t\r\n\r\n";
const FLOOD_SOCKET: &str = "FLOOD_SOCKET";
const FLOOD_TEXT: &str = "FLOOD_TEXT";
const FLOOD_CONNECTIONS: usize = 300;

/// A process of its own that holds many connections, sends the same on each, and reads nothing.
struct Flood(Child, Lines<BufReader<ChildStdout>>);

impl Flood {
    /// Returns when it has connected as often as it wants to. The server may not have accepted the
    /// last ones yet.
    fn start(stand: &Stand, text: &str) -> Flood {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["api::tests::a_process_that_floods", "--exact", "--nocapture", "--ignored"])
            .env(FLOOD_SOCKET, &stand.socket)
            .env(FLOOD_TEXT, text)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let connected = lines.by_ref().map(Result::unwrap).any(|line| line.ends_with("connected"));
        assert!(connected, "{:?}", child.wait());
        Flood(child, lines)
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        // It ends at the end of its input.
        drop(self.0.stdin.take());
        self.1.by_ref().for_each(drop);
        let ended = self.0.wait();
        assert!(std::thread::panicking() || ended.unwrap().success());
    }
}

#[test]
#[ignore = "the other process of the tests that start a Flood"]
fn a_process_that_floods() {
    let (socket, text) = (std::env::var_os(FLOOD_SOCKET).unwrap(), std::env::var(FLOOD_TEXT).unwrap());
    let connect = |_| {
        let mut stream = UnixStream::connect(&socket).unwrap();
        stream.set_nonblocking(true).unwrap();
        // What does not fit, or comes too late for a connection that was replaced, is not sent.
        let _ = stream.write(text.as_bytes());
        stream
    };
    let held: Vec<_> = (0..FLOOD_CONNECTIONS).map(connect).collect();
    println!("connected");
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
    drop(held);
}

/// The status line of the answer to a question on a connection that stays.
fn asked(stream: &mut UnixStream) -> String {
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    let mut line = String::new();
    let sent = stream.write_all(b"GET /v1/nothing HTTP/1.1\r\nHost: t\r\n\r\n");
    if sent.is_ok() {
        let _ = BufReader::new(stream).read_line(&mut line);
    }
    line
}

#[test]
fn one_process_takes_no_places_from_another() {
    let status = "GET /v1/status HTTP/1.1\r\nHost: t\r\n\r\n".repeat(500);
    for text in UNFINISHED.into_iter().chain([SLOW, CAPTURE, &status]) {
        let long = 10 * TIMEOUT;
        let stand = Stand::with(Limits { head: long, body: long, stalled: long, turn: long, ..Limits::default() });
        // Longer idle than any of the flood.
        let mut mine: Vec<_> = (0..8).map(|_| UnixStream::connect(&stand.socket).unwrap()).collect();
        mine.iter_mut().for_each(|stream| assert!(asked(stream).starts_with("HTTP/1.1 404")));
        let begun = Instant::now();
        let flood = Flood::start(&stand, text);
        for _ in 0..20 {
            assert_eq!(stand.client().status().unwrap().name, "demo", "{text:.50?}");
        }
        // Connections are accepted in turn, so all of the flood's were before these answers.
        for stream in &mut mine {
            assert!(asked(stream).starts_with("HTTP/1.1 404"), "{text:.50?}");
        }
        assert!(begun.elapsed() < TIMEOUT, "no limit of time was waited for");
        let process = Limits::default().process;
        match text {
            SLOW => until("requests of the flood", || stand.slow.lock().unwrap().len() == process),
            CAPTURE => {
                until("captures of the flood", || stand.captures.load(Ordering::SeqCst) == process);
                mine[0].write_all(CAPTURE.as_bytes()).unwrap();
                until("a capture beside it", || stand.captures.load(Ordering::SeqCst) == process + 1);
            }
            _ => {}
        }
        drop(flood);
        // While its connections close one after the other, those that waited may still get their
        // turn.
        assert!(stand.slow.lock().unwrap().iter().filter(|reply| !reply.is_closed()).count() <= process);
    }
}

#[test]
fn a_request_waits_for_its_turn_behind_others_of_its_process() {
    let send = |stand: &Stand| {
        let mut stream = UnixStream::connect(&stand.socket).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        stream.write_all(SLOW.as_bytes()).unwrap();
        stream
    };
    let status_of = |stream: &mut UnixStream| {
        let mut status = [0; 12];
        stream.read_exact(&mut status).unwrap();
        String::from_utf8(status.to_vec()).unwrap()
    };
    // It gets its turn when one of the others has ended.
    let stand = Stand::with(Limits { process: 2, turn: 10 * TIMEOUT, ..Limits::default() });
    let mut first: Vec<_> = (0..2).map(|_| send(&stand)).collect();
    until("two requests", || stand.slow.lock().unwrap().len() == 2);
    let mut third = send(&stand);
    let reply = stand.slow.lock().unwrap().remove(0);
    reply.send(Ok(vec![])).unwrap();
    assert_eq!(status_of(&mut first[0]), "HTTP/1.1 201");
    until("the third request", || stand.slow.lock().unwrap().len() == 2);
    for reply in stand.slow.lock().unwrap().drain(..) {
        reply.send(Ok(vec![])).unwrap();
    }
    assert_eq!(status_of(&mut first[1]), "HTTP/1.1 201");
    assert_eq!(status_of(&mut third), "HTTP/1.1 201");
    // And is told when none of them ends. Half-sent bodies and endless answers are none of them.
    let stand = Stand::with(Limits { process: 2, turn: Duration::from_millis(100), ..Limits::default() });
    let mut others: Vec<_> = (0..4).map(|_| UnixStream::connect(&stand.socket).unwrap()).collect();
    for (n, stream) in others.iter_mut().enumerate() {
        stream.write_all(if n < 2 { CAPTURE } else { UNFINISHED[3] }.as_bytes()).unwrap();
    }
    until("the captures", || stand.captures.load(Ordering::SeqCst) == 2);
    let held: Vec<_> = (0..2).map(|_| send(&stand)).collect();
    until("two requests", || stand.slow.lock().unwrap().len() == 2);
    let refused = stand.raw("GET /v1/ports HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n");
    assert!(refused.starts_with("HTTP/1.1 503") && refused.contains("retry-after: 1"), "{refused}");
    let expected = format!("process {}: 2 requests are under way", std::process::id());
    assert!(refused.contains(&expected), "{refused}");
    // What is short waits for none of them.
    assert_eq!(stand.client().status().unwrap().name, "demo");
    drop((held, others));
}

#[test]
fn many_processes_with_requests_under_way_lock_no_one_out() {
    let long = 10 * TIMEOUT;
    let status = "GET /v1/status HTTP/1.1\r\nHost: t\r\n\r\n".repeat(500);
    for text in [SLOW, &status] {
        let mut stand = Stand::with(Limits { head: long, body: long, stalled: long, turn: long, ..Limits::default() });
        // Four times 32 requests were all connections that there are.
        let floods: Vec<_> = (0..5).map(|_| Flood::start(&stand, text)).collect();
        if text == SLOW {
            let Limits { working, connections, .. } = Limits::default();
            until("all requests", || stand.slow.lock().unwrap().len() == working.min(connections));
        }
        let begun = Instant::now();
        let client = stand.client();
        for _ in 0..20 {
            assert_eq!(client.status().unwrap().name, "demo", "{text:.50?}");
        }
        client.down().unwrap();
        assert!(begun.elapsed() < TIMEOUT, "no limit of time was waited for");
        stand.slow.lock().unwrap().clear();
        stand.thread.take().unwrap().join().unwrap();
        stand.thread = Some(std::thread::spawn(|| ()));
        drop(floods);
    }
}

#[test]
fn who_finds_no_place_waits_for_one_and_is_told_if_there_is_none() {
    let slot = Duration::from_millis(200);
    let stand = Stand::with(Limits { connections: 1, slot, turn: 10 * TIMEOUT, ..Limits::default() });
    let mut first = UnixStream::connect(&stand.socket).unwrap();
    first.write_all(SLOW.as_bytes()).unwrap();
    until("a request", || stand.slow.lock().unwrap().len() == 1);
    let asks = "GET /v1/status HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n";
    let begun = Instant::now();
    let refused = stand.raw(asks);
    assert!(refused.starts_with("HTTP/1.1 503") && refused.contains("all connections are taken"), "{refused}");
    assert!(begun.elapsed() >= slot, "it waited for a place");
    // A client asks again until there is one.
    std::thread::scope(|scope| {
        let client = stand.client();
        let asked = scope.spawn(move || client.status());
        std::thread::sleep(2 * slot);
        assert!(!asked.is_finished());
        drop(first);
        assert_eq!(asked.join().unwrap().unwrap().name, "demo");
    });
}

#[test]
fn a_request_that_is_replaced_while_it_waits_for_its_turn_is_told() {
    let stand = Stand::with(Limits { connections: 2, process: 1, turn: 10 * TIMEOUT, ..Limits::default() });
    let mut first = UnixStream::connect(&stand.socket).unwrap();
    first.write_all(SLOW.as_bytes()).unwrap();
    until("a request", || stand.slow.lock().unwrap().len() == 1);
    let mut second = UnixStream::connect(&stand.socket).unwrap();
    second.write_all(SLOW.as_bytes()).unwrap();
    second.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    let mut answer = [0; 4096];
    let silent = second.read(&mut answer).unwrap_err();
    assert_eq!(silent.kind(), std::io::ErrorKind::WouldBlock, "it waits for its turn");
    assert_eq!(stand.client().status().unwrap().name, "demo");
    let mut told = String::new();
    second.set_read_timeout(Some(TIMEOUT)).unwrap();
    second.read_to_string(&mut told).unwrap();
    assert!(told.starts_with("HTTP/1.1 503") && told.contains("a process with fewer needed"), "{told}");
}

/// A daemon that ends each of the first connections in another way before it answers.
#[test]
fn a_question_is_asked_again_when_its_connection_ends_without_an_answer() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("api.sock");
    let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let heard = Arc::new(Mutex::new(Vec::new()));
    let hears = heard.clone();
    let daemon = std::thread::spawn(move || {
        let body = serde_json::to_string(&samples::status()).unwrap();
        let head = |length| format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n");
        let busy = "HTTP/1.1 503 Busy\r\nRetry-After: 1\r\nContent-Length: 2\r\n\r\n{}".to_string();
        let none = "HTTP/1.1 204 No Content\r\n\r\n".to_string();
        // For `status`, `down` and `port add`.
        let answers =
            [None, Some(String::new()), Some(head(body.len()) + "{"), Some(busy), Some(head(body.len()) + &body)];
        for answer in answers.into_iter().chain([Some(String::new()), Some(none), Some(String::new())]) {
            let (mut stream, _) = listener.accept().unwrap();
            let Some(answer) = answer else { continue };
            let mut request = [0; 4096];
            let n = stream.read(&mut request).unwrap();
            let request = String::from_utf8_lossy(&request[..n]).into_owned();
            hears.lock().unwrap().push(request.lines().next().unwrap_or_default().to_string());
            stream.write_all(answer.as_bytes()).unwrap();
        }
    });
    let client = Client::new("demo", &socket).unwrap();
    assert_eq!(client.status().unwrap(), samples::status());
    client.down().unwrap();
    // It may have been carried out.
    let error = client.add_ports("[port.p1]\n").unwrap_err();
    assert!(matches!(error, ClientError::Unanswered { sent: true, .. }) && error.is_unanswered(), "{error}");
    daemon.join().unwrap();
    let count = |line: &str| heard.lock().unwrap().iter().filter(|l| l.starts_with(line)).count();
    assert_eq!((count("GET /v1/status"), count("POST /v1/down"), count("POST /v1/ports")), (4, 2, 1));
}

#[test]
fn a_full_queue_of_connections_is_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("api.sock");
    let make = |flags| rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
    let name = SocketAddrUnix::new(&socket).unwrap();
    let listener = make(SocketFlags::CLOEXEC);
    rustix::net::bind(&listener, &name).unwrap();
    rustix::net::listen(&listener, 1).unwrap();
    let mut waiting = Vec::new();
    let full = loop {
        let stream = make(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK);
        if let Err(error) = rustix::net::connect(&stream, &name) {
            break error;
        }
        waiting.push(stream);
    };
    assert_eq!(full, rustix::io::Errno::AGAIN);
    let listener = std::os::unix::net::UnixListener::from(listener);
    std::thread::scope(|scope| {
        let client = Client::new("demo", &socket).unwrap();
        let asked = scope.spawn(move || client.status());
        std::thread::sleep(Duration::from_millis(700));
        assert!(!asked.is_finished());
        waiting.iter().for_each(|_| drop(listener.accept().unwrap()));
        let (mut stream, _) = listener.accept().unwrap();
        let _ = stream.read(&mut [0; 4096]).unwrap();
        let body = serde_json::to_string(&samples::status()).unwrap();
        write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len()).unwrap();
        assert_eq!(asked.join().unwrap().unwrap(), samples::status());
    });
}

/// Its answer is not read, and a member that ends could pass for another process.
#[test]
fn what_a_process_sent_that_has_ended_is_not_carried_out() {
    let stand = Stand::new();
    let program = "import socket, os, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.send(b'DELETE /v1/ports/web HTTP/1.1\\r\\nHost: t\\r\\n\\r\\n'); os._exit(0)";
    // The fabric's task is held up, and its thread with it.
    let held = stand.status.lock().unwrap();
    let mut asks = UnixStream::connect(&stand.socket).unwrap();
    asks.write_all(b"GET /v1/status HTTP/1.1\r\nHost: t\r\n\r\n").unwrap();
    std::thread::sleep(Duration::from_millis(200));
    let ended = Command::new("python3").args(["-c", program]).arg(&stand.socket).status().unwrap();
    assert!(ended.success());
    drop(held);
    assert_eq!(stand.client().status().unwrap().ports.len(), samples::status().ports.len());
}

#[test]
fn a_capture_ends_with_its_client() {
    let stand = Stand::new();
    let mut client = stand.client();
    let mut got = Vec::new();
    let end = client.capture(&CaptureOf::Port("web".into()), Some(96), None, None, |piece| {
        got.extend_from_slice(piece);
        Ok(ControlFlow::Break(()))
    });
    assert_eq!((end.unwrap(), got.as_slice()), (Ending::Enough, b"snaplen Some(96);".as_slice()));
    until("the end of the capture", || stand.captures.load(Ordering::SeqCst) == 0);
    // A client that only hangs up, while nothing is sent to it.
    let mut stream = UnixStream::connect(&stand.socket).unwrap();
    stream.write_all(b"GET /v1/ports/web/capture HTTP/1.1\r\nHost: t\r\n\r\n").unwrap();
    until("the start of a capture", || stand.captures.load(Ordering::SeqCst) == 1);
    drop(stream);
    until("the end of the silent capture", || stand.captures.load(Ordering::SeqCst) == 0);
    let at = Instant::now() + Duration::from_millis(50);
    assert_eq!(
        client
            .capture(&CaptureOf::Port("web".into()), None, None, Some(at), |_| Ok(ControlFlow::Continue(())))
            .unwrap(),
        Ending::Deadline
    );
    let full = || Err(std::io::Error::other("disk full"));
    assert!(matches!(
        client.capture(&CaptureOf::Port("web".into()), None, None, None, |_| full()),
        Err(ClientError::Sink(_))
    ));
}

#[test]
fn forgotten_captures_do_not_lock_others_out() {
    let stand = Stand::new();
    let process = Limits::default().process;
    let forgotten: Vec<_> = (0..process)
        .map(|_| {
            let mut stream = UnixStream::connect(&stand.socket).unwrap();
            stream.write_all(CAPTURE.as_bytes()).unwrap();
            stream
        })
        .collect();
    until("all captures of one process", || stand.captures.load(Ordering::SeqCst) == process);
    let mut client = stand.client();
    let mut refused = |why: &str| {
        let late = Some(Instant::now() + TIMEOUT);
        let refused = client
            .capture(&CaptureOf::Port("web".into()), None, None, late, |_| Ok(ControlFlow::Continue(())))
            .unwrap_err();
        assert!(matches!(refused, ClientError::Refused { status: 503, .. }), "{refused}");
        assert!(refused.to_string().contains(why), "{refused}");
        assert_eq!(client.status().unwrap().name, "demo");
    };
    refused("the limit for one process");
    let others: Vec<_> = (process..MAX_STREAMS).step_by(process).map(|_| Flood::start(&stand, CAPTURE)).collect();
    until("all captures", || stand.captures.load(Ordering::SeqCst) == MAX_STREAMS);
    drop(forgotten);
    until("captures of another process", || stand.captures.load(Ordering::SeqCst) == MAX_STREAMS - process);
    let third = Flood::start(&stand, CAPTURE);
    until("all captures", || stand.captures.load(Ordering::SeqCst) == MAX_STREAMS);
    refused("64 captures");
    drop((others, third));
    until("the end of all captures", || stand.captures.load(Ordering::SeqCst) == 0);
}

#[test]
fn a_console_is_read_followed_and_typed_into() {
    let stand = Stand::new();
    let mut client = stand.client();
    let mut got = Vec::new();
    let end = client.console("web", false, |piece| {
        got.extend_from_slice(piece);
        Ok(ControlFlow::Continue(()))
    });
    assert_eq!((end.unwrap(), got.as_slice()), (Ending::Fabric, b"boot\n".as_slice()));
    got.clear();
    let end = client.console("web", true, |piece| {
        got.extend_from_slice(piece);
        if got.ends_with(b"boot\n") {
            let mut log = std::fs::OpenOptions::new().append(true).open(&stand.console).unwrap();
            log.write_all(b"bye\n").unwrap();
            stand.status.lock().unwrap().machines[0].state = "failed".into();
        }
        Ok(ControlFlow::Continue(()))
    });
    assert_eq!((end.unwrap(), got.as_slice()), (Ending::Fabric, b"boot\nbye\n".as_slice()));
    stand.status.lock().unwrap().machines[0].state = "running".into();
    let end = client.attach("web", &b"echo $((1+2))\n"[..], |_| Ok(ControlFlow::Continue(()))).unwrap();
    assert_eq!(end, Ending::Enough);
    until("what was typed", || *stand.typed.lock().unwrap() == b"echo $((1+2))\n");
}

#[test]
fn a_console_that_no_machine_holds_yet_is_waited_for() {
    let stand = Stand::new();
    let path = tty_path(stand.dir.path(), "web");
    for there in [false, true] {
        // The pipe that the stand holds has no name any more.
        std::fs::remove_file(&path).unwrap();
        let make = || mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        if there {
            make();
        }
        std::thread::scope(|scope| {
            let typist =
                scope.spawn(|| stand.client().attach("web", &b"hello\n"[..], |_| Ok(ControlFlow::Continue(()))));
            // A span in which one that did not wait would be done.
            std::thread::sleep(Duration::from_millis(50));
            assert!(!typist.is_finished());
            if !there {
                make();
            }
            let mut held = std::fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
            assert_eq!(typist.join().unwrap().unwrap(), Ending::Enough);
            let mut typed = [0; 16];
            let n = held.read(&mut typed).unwrap();
            assert_eq!(&typed[..n], b"hello\n");
        });
    }
}

#[test]
fn who_follows_a_console_that_is_cut_goes_on_where_it_was() {
    let stand = Stand::new();
    let mut client = stand.client();
    let mut log = std::fs::OpenOptions::new().append(true).open(&stand.console).unwrap();
    log.write_all(&vec![b'x'; KEPT_BYTES as usize]).unwrap();
    let mut got = Vec::new();
    let mut cut = false;
    let end = client.console("web", true, |piece| {
        got.extend_from_slice(piece);
        if got.len() == "boot\n".len() + KEPT_BYTES as usize && !cut {
            trim(&stand.console).unwrap();
            cut = true;
            log.write_all(b"bye\n").unwrap();
            stand.status.lock().unwrap().machines[0].state = "failed".into();
        }
        Ok(ControlFlow::Continue(()))
    });
    assert_eq!(end.unwrap(), Ending::Fabric);
    assert!(cut && got.len() == "boot\nbye\n".len() + KEPT_BYTES as usize && got.ends_with(b"xbye\n"), "{}", got.len());
    let mut left = Vec::new();
    let end = client.console("web", false, |piece| {
        left.extend_from_slice(piece);
        Ok(ControlFlow::Continue(()))
    });
    assert_eq!(end.unwrap(), Ending::Fabric);
    assert!(left.starts_with(b"x") && left.ends_with(b"xbye\n") && left.len() < KEPT_BYTES as usize, "{}", left.len());
}

#[test]
fn down_is_answered_and_then_nobody_listens() {
    let mut stand = Stand::new();
    let mut client = stand.client();
    client.down().unwrap();
    stand.thread.take().unwrap().join().unwrap();
    let gone = client.status().unwrap_err();
    assert!(matches!(gone, ClientError::Stale { .. }) && gone.is_absent(), "{gone}");
    std::fs::remove_file(&stand.socket).unwrap();
    let gone = client
        .capture(&CaptureOf::Port("web".into()), None, None, None, |_| Ok(ControlFlow::Continue(())))
        .unwrap_err();
    assert!(matches!(gone, ClientError::NotRunning { .. }));
    assert!(gone.to_string().ends_with("api.sock; start it with `tombolo up`"), "{gone}");
    assert!(gone.to_string().starts_with("no fabric named \"demo\" runs"), "{gone}");
    stand.thread = Some(std::thread::spawn(|| ()));
}

#[test]
fn where_a_fabric_does_not_run_those_that_do_are_named() {
    let root = tempfile::tempdir().unwrap();
    let held = ["lab", "shop"].map(|name| {
        std::fs::create_dir(root.path().join(name)).unwrap();
        let lock = std::fs::File::create(root.path().join(name).join("lock")).unwrap();
        lock.lock().unwrap();
        lock
    });
    let said = || {
        let socket = crate::rundir::api_socket(root.path(), "demo");
        Client::new("demo", &socket).unwrap().status().unwrap_err().to_string()
    };
    let some = said();
    assert!(some.ends_with("`tombolo up`, or name another; running: lab, shop (--fabric lab)"), "{some}");
    drop(held);
    assert!(said().ends_with("api.sock; start it with `tombolo up`"));
}

#[test]
fn the_fabrics_end_ends_a_capture_that_nobody_ends() {
    let stand = Stand::new();
    let mut stream = UnixStream::connect(&stand.socket).unwrap();
    stream.write_all(b"GET /v1/ports/web/capture HTTP/1.1\r\nHost: t\r\n\r\n").unwrap();
    until("the start of a capture", || stand.captures.load(Ordering::SeqCst) == 1);
    let begun = Instant::now();
    drop(stand);
    assert!(begun.elapsed() < Duration::from_secs(10));
}

#[test]
fn another_user_is_refused() {
    if !rustix::process::geteuid().is_root() {
        return tombolo_testing::skip("it takes root to become another user");
    }
    let stand = Stand::new();
    let ask = || {
        let path = stand.socket.display().to_string();
        let curl = ["--clear-groups", "--reuid=65534", "--regid=65534", "curl", "-s", "-i", "--max-time", "10"];
        let mut out = Command::new("setpriv");
        out.args(curl).args(["--unix-socket", &path, "http://t/v1/down", "-X", "POST"]);
        out.stdin(Stdio::null()).output().unwrap()
    };
    assert_eq!(std::fs::metadata(&stand.socket).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(ask().status.code(), Some(7), "the socket's mode keeps others from connecting");
    // And if somebody opens the door: the peer's credentials still decide.
    for path in [stand.dir.path(), &stand.socket] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o777)).unwrap();
    }
    let answer = String::from_utf8(ask().stdout).unwrap();
    assert!(answer.starts_with("HTTP/1.1 403"), "{answer}");
    let fault: super::report::Fault = serde_json::from_str(answer.split("\r\n\r\n").nth(1).unwrap()).unwrap();
    assert!(fault.error.contains("user 65534") && fault.hint.is_some(), "{answer}");
    assert_eq!(stand.client().status().unwrap().name, "demo", "and it still stands");
}

/// Compares an example with a schema of the document: the same keys, and types that fit.
fn fits(value: &Value, schema: &Value, document: &Value, at: &str) {
    if let Some(name) = schema["$ref"].as_str() {
        let schema = document.pointer(&name[1..]).unwrap_or_else(|| panic!("{at}: {name}"));
        return fits(value, schema, document, at);
    }
    for key in ["allOf", "anyOf"] {
        if let Some(first) = schema[key].get(0) {
            return fits(value, first, document, at);
        }
    }
    let kind = schema["type"].as_str().or(schema["type"][0].as_str()).unwrap_or_else(|| panic!("{at}: no type"));
    match value {
        Value::Object(map) => {
            assert_eq!(kind, "object", "{at}");
            if let Some(each) = schema.get("additionalProperties") {
                return map.iter().for_each(|(k, v)| fits(v, each, document, &format!("{at}.{k}")));
            }
            let said = schema["properties"].as_object().unwrap();
            let mut required: Vec<_> = schema["required"].as_array().unwrap().iter().flat_map(Value::as_str).collect();
            required.sort_unstable();
            let keys: Vec<_> = map.keys().map(String::as_str).collect();
            let mut sorted = keys.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, required, "{at}: required");
            let mut properties: Vec<_> = said.keys().map(String::as_str).collect();
            properties.sort_unstable();
            assert_eq!(sorted, properties, "{at}: properties");
            for (k, v) in map {
                assert!(said[k]["description"].as_str().is_some_and(|d| d.len() > 3), "{at}.{k}: description");
                fits(v, &said[k], document, &format!("{at}.{k}"));
            }
        }
        Value::Array(items) => {
            assert_eq!(kind, "array", "{at}");
            assert!(!items.is_empty(), "{at}: the sample is to have one of each");
            items.iter().for_each(|v| fits(v, &schema["items"], document, at));
        }
        Value::String(_) => assert_eq!(kind, "string", "{at}"),
        Value::Bool(_) => assert_eq!(kind, "boolean", "{at}"),
        Value::Number(n) => {
            assert!(kind == "number" || (kind == "integer" && n.is_u64()), "{at}: {kind}, {n}")
        }
        Value::Null => panic!("{at}: the sample is to have every field set"),
    }
}

/// A report of a control plane in which no field is empty.
fn span_sample() -> super::report::Span {
    let text = r#"{"schema":1,"age_s":1.2,"report":{"machine":"node-1","pid":123,"uptime_s":7.5,"site":"demo",
        "machines":[{"name":"node-2","state":"stale","rtt_us":210,"heard_s":0.4,"members":12,"networks":["lan"],
            "addresses":["192.0.2.2"]}],
        "networks":[{"name":"lan","local":3,"remote":12}],
        "conflicts":[{"network":"lan","what":"10.87.0.12","machines":["node-1","node-2"],"winner":"node-1"}],
        "counters":{"messages_sent":17}}}"#;
    serde_json::from_str(text).unwrap()
}

#[test]
fn a_control_plane_says_what_other_machines_have_and_its_report_is_given_back() {
    let stand = Stand::new();
    let ask = |line: &str, body: &str| {
        let head = format!("{line} HTTP/1.1\r\nHost: t\r\nConnection: close\r\nContent-Length: {}\r\n\r\n", body.len());
        let answer = stand.raw(&format!("{head}{body}"));
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head[9..12].to_string(), body.to_string())
    };
    let none = stand.client().span().unwrap_err();
    assert!(matches!(&none, ClientError::Refused { status: 404, .. }) && !none.is_misuse(), "{none}");
    assert!(
        none.to_string().ends_with("by its unit tombolo-span@NAME, or `tombolo-span --config FILE` (docs/span.md)"),
        "{none}"
    );
    let sample = span_sample();
    let mut report = serde_json::to_value(&sample.report).unwrap();
    report["of a later version"] = 7.into();
    assert_eq!(ask("PUT /v1/span", &report.to_string()), ("204".into(), String::new()));
    assert_eq!(stand.client().span().unwrap().report, sample.report);
    let least = r#"{"machine":"a","pid":1,"uptime_s":1,"site":"s"}"#;
    assert_eq!(ask("PUT /v1/span", least).0, "204");
    assert!(stand.client().span().unwrap().report.machines.is_empty());
    let member = r#"{"name":null,"mac":"02:00:00:00:00:01","ips":["10.87.0.12"]}"#;
    let body = format!(r#"{{"address":"192.0.2.2","members":[{member}]}}"#);
    let way = "PUT /v1/networks/lan/remotes/node-2";
    let (status, answer) = ask(way, &body);
    let answer: super::report::RemoteConflicts = serde_json::from_str(&answer).unwrap();
    assert_eq!((status.as_str(), answer.conflicts[0].with.as_str()), ("200", "lan node-2 192.0.2.2"));
    // As long as the longest list there may be, and longer.
    let ip = "fd00:1111:2222:3333:4444:5555:6666:7777";
    let ips = vec![format!("\"{ip}\""); 16].join(",");
    let long = format!(r#"{{"name":"{}","mac":"02:00:00:00:00:01","ips":[{ips}]}}"#, "x".repeat(63));
    let list = |n: usize| format!(r#"{{"address":"192.0.2.2","members":[{}]}}"#, vec![long.as_str(); n].join(","));
    assert_eq!(ask(way, &list(4096)).0, "200");
    assert_eq!(ask(way, &list(6000)).0, "413");
    assert_eq!(
        ask("PUT /v1/networks/lan/lost", r#"{"ips":["10.87.0.12"]}"#).1,
        r#"{"schema":1,"fixed":["10.87.0.12"]}"#
    );
    for (line, body, status, text) in [
        (way, "", "400", "EOF"),
        (way, "{", "400", "EOF"),
        (way, r#"{"address":"192.0.2.2"}"#, "400", "members"),
        (way, r#"{"address":"192.0.2.2","members":[{"ips":[]}]}"#, "400", "mac"),
        (way, r#"{"address":"192.0.2.2","members":[],"x":1}"#, "400", "unknown field"),
        (way, r#"{"address":"elsewhere","members":[]}"#, "422", "one of the remotes"),
        ("PUT /v1/networks/lan/lost", r#"{"ips":7}"#, "400", "sequence"),
        ("PUT /v1/span", r#"{"machine":"a"}"#, "400", "pid"),
        ("PUT /v1/span", &"x".repeat(super::server::MAX_BODY_BYTES + 1), "413", "length limit"),
        ("DELETE /v1/networks/lan/remotes/node-2", "", "204", ""),
        ("DELETE /v1/networks/wan/remotes/node-2", "", "404", "wan"),
        ("GET /v1/networks/lan/remotes", "", "200", "\"network\":\"lan\""),
    ] {
        let answer = ask(line, body);
        assert!(answer.0 == status && answer.1.contains(text), "{line} {:.60}: {answer:?}", body);
    }
}

#[test]
fn the_document_describes_every_field_of_the_reports() {
    let document: Value = serde_json::from_str(OPENAPI).unwrap();
    let status = samples::status();
    let (ports, machines) = (status.ports.clone(), status.machines.clone());
    let fault = super::report::Fault {
        error: "e".into(),
        hint: Some("h".into()),
        problems: vec![super::report::ProblemReport {
            of: "file".into(),
            line: 2,
            column: 10,
            key: "cell.web.memory".into(),
            expected: "a size".into(),
            found: "4".into(),
            hint: Some("h".into()),
        }],
    };
    let check = |name: &str, value: Value| {
        let schema = serde_json::json!({ "$ref": format!("#/components/schemas/{name}") });
        fits(&value, &schema, &document, name);
    };
    check("Status", serde_json::to_value(status).unwrap());
    let key = super::apply::KeyReport { key: "rate".into(), before: Some("none".into()), after: Some("1M".into()) };
    let error = Some("its worker has ended".into());
    let change = ChangeReport { keys: vec![key], error, ..ChangeReport::default() };
    let (kept, reverted) = (vec!["extra".into()], vec!["port.web.rate".into()]);
    let applied = ApplyReport { changes: vec![change], kept, reverted, ..ApplyReport::default() };
    check("ApplyReport", serde_json::to_value(applied).unwrap());
    let empty = || serde_json::json!({});
    let config = ConfigReport { config: empty(), changes: empty(), ..ConfigReport::default() };
    check("ConfigReport", serde_json::to_value(config).unwrap());
    check("Ports", serde_json::to_value(super::report::Ports { schema: 1, ports }).unwrap());
    check("Machines", serde_json::to_value(super::report::Machines { schema: 1, machines }).unwrap());
    let event = super::report::EventReport {
        id: 1,
        time: "2026-11-21T21:43:05.123Z".into(),
        unix_ms: 1,
        kind: "death".into(),
        name: Some("web".into()),
        network: Some("lan".into()),
        pid: Some(7),
        cause: Some("signal 9".into()),
        text: "web failed".into(),
    };
    let events = super::report::Events { schema: 1, first: 1, last: 1, lost: 0, unwritten: 0, events: vec![event] };
    let tables = super::report::Tables {
        schema: 1,
        macs: vec![super::report::MacReport {
            network: "lan".into(),
            mac: "02:00:00:00:00:01".into(),
            port: "web".into(),
            age_ms: Some(1),
            vlan: Some(10),
        }],
        neighbours: vec![super::report::NeighbourReport {
            network: "lan".into(),
            ip: "10.0.0.1".parse().unwrap(),
            mac: Some("02:00:00:00:00:01".into()),
            port: Some("web".into()),
            name: Some("web".into()),
            source: "lease".into(),
            fixed: false,
        }],
        homes: Some(vec![super::report::HomeReport {
            network: "lan".into(),
            machine: "node-1".into(),
            name: Some("web".into()),
            from: Some("10.0.0.1".parse().unwrap()),
            to: Some("10.0.0.1".parse().unwrap()),
            mac: Some("02:00:00:00:00:01".into()),
        }]),
        homes_revision: "00c0ffee".into(),
    };
    check("Tables", serde_json::to_value(tables).unwrap());
    check("Span", serde_json::to_value(span_sample()).unwrap());
    let conflict = super::report::RemoteConflict {
        member: Some("web".into()),
        mac: "02:00:00:00:00:01".into(),
        ip: "10.87.0.12".parse().ok(),
        with: "the router of this machine has it".into(),
    };
    let conflicts = super::report::RemoteConflicts { schema: 1, conflicts: vec![conflict] };
    check("RemoteConflicts", serde_json::to_value(conflicts).unwrap());
    let member = super::report::RemoteMemberReport {
        name: Some("web".into()),
        mac: "02:00:00:00:00:01".into(),
        ips: vec!["10.87.0.12".parse().unwrap()],
        used: false,
        conflict: Some("the router of this machine has it".into()),
    };
    let machine = super::report::RemoteMachineReport {
        machine: "node-2".into(),
        address: "192.0.2.2".parse().unwrap(),
        age_s: 1.5,
        members: vec![member],
    };
    let lost = vec!["10.87.0.12".parse().unwrap()];
    let answer = super::report::LostAnswer { schema: 1, fixed: lost.clone() };
    check("LostAnswer", serde_json::to_value(answer).unwrap());
    let machines = vec![machine];
    let remotes = super::report::RemotesReport { schema: 1, network: "lan".into(), machines, lost };
    check("RemotesReport", serde_json::to_value(remotes).unwrap());
    check("Events", serde_json::to_value(events).unwrap());
    check("Fault", serde_json::to_value(fault).unwrap());
    // Every reference of the document leads somewhere.
    let text = document.to_string();
    for piece in text.split("\"$ref\":\"#").skip(1) {
        let path = piece.split('"').next().unwrap();
        assert!(document.pointer(path).is_some(), "{path}");
    }
}

#[test]
fn a_capture_has_a_filter_and_may_be_of_a_network() {
    let stand = Stand::new();
    let mut client = stand.client();
    let mut said = |of: CaptureOf, filter: &str| {
        let mut text = String::new();
        client
            .capture(&of, None, Some(filter), None, |piece| {
                text.push_str(std::str::from_utf8(piece).unwrap());
                Ok(ControlFlow::Break(()))
            })
            .map(|_| text)
    };
    let text = said(CaptureOf::Network("lan".into()), "tcp port 80 and not (arp)").unwrap();
    assert!(text.contains("Port(") && text.contains("80..=80"), "{text}");
    let wrong = said(CaptureOf::Port("web".into()), "tcp prot 80").unwrap_err();
    assert!(wrong.is_misuse() && wrong.to_string().contains("filter, at 2: expected `and`"), "{wrong}");
    let missing = said(CaptureOf::Network("web".into()), "tcp").unwrap_err();
    assert!(matches!(missing, ClientError::Refused { status: 404, .. }), "{missing}");
    assert_eq!(client.tables().unwrap(), super::report::Tables::default());
}

#[test]
fn events_are_asked_for_waited_for_and_followed() {
    let stand = Stand::new();
    let client = stand.client();
    let add = |text: &str| stand.events.add(Kind::Start, Facts::of("web").pid(7), text);
    assert_eq!((client.events(None).unwrap().events.len(), client.events(None).unwrap().last), (0, 0));
    add("one");
    let one = client.events(None).unwrap();
    assert_eq!((one.last, one.events[0].text.as_str(), one.events[0].pid), (1, "one", Some(7)));
    let body = |path: &str, more: &str| {
        let answer = stand.raw(&format!("GET {path} HTTP/1.1\r\nHost: t\r\n{more}Connection: close\r\n\r\n"));
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.split(' ').nth(1).unwrap().to_string(), body.to_string())
    };
    // A wait that nothing ends, and one that an event ends long before its time.
    let (status, silent) = body("/v1/events?after=1&wait=0.05", "");
    assert!(status == "200" && silent.contains("\"events\":[]"), "{silent}");
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| body("/v1/events?after=1&wait=60", ""));
        std::thread::sleep(Duration::from_millis(20));
        add("two");
        let (status, text) = waits.join().unwrap();
        assert!(status == "200" && text.contains("\"two\"") && !text.contains("\"one\""), "{text}");
    });
    for (wrong, expected, found) in [
        ("wait=61", "0 to 60 seconds", "61"),
        ("wait=-1", "0 to 60 seconds", "-1"),
        ("wait=NaN", "0 to 60 seconds", "NaN"),
        ("wait=soon", "0 to 60 seconds", "\"soon\""),
        ("limit=0", "at least 1", "0"),
        ("follow=0&after=%2Dx", "the number of an event", "\"-x\""),
        ("afer=1", "one of the keys after, wait, limit, follow", "an unknown key"),
        ("after=1&after=2", "it once", "it more than once"),
    ] {
        let (status, text) = body(&format!("/v1/events?{wrong}"), "");
        let fault: super::report::Fault = serde_json::from_str(&text).unwrap();
        let [problem] = &fault.problems[..] else { panic!("{wrong}: {text}") };
        let key = wrong.rsplit('&').next().unwrap().split('=').next().unwrap();
        assert_eq!((status.as_str(), problem.key.as_str()), ("400", key), "{text}");
        assert_eq!((problem.expected.as_str(), problem.found.as_str()), (expected, found), "{text}");
        assert_eq!(fault.error, format!("{key}: expected {expected}, found {found}"));
    }
    let mut seen = String::new();
    let ending = stand.client().follow_events(1, |piece| {
        seen.push_str(std::str::from_utf8(piece).unwrap());
        if seen.lines().count() == 1 {
            add("three");
        }
        Ok(if seen.lines().count() == 2 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    });
    assert_eq!(ending.unwrap(), Ending::Enough);
    let ids: Vec<_> = seen.lines().map(|l| serde_json::from_str::<super::report::EventReport>(l).unwrap().id).collect();
    assert_eq!(ids, [2, 3]);
}

#[test]
fn a_browser_and_a_follower_that_does_not_read_are_told_what_they_missed() {
    let stand = Stand::new();
    let ask = |more: &str| {
        let mut stream = UnixStream::connect(&stand.socket).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        let head = format!("GET /v1/events?follow=1 HTTP/1.1\r\nHost: t\r\n{more}\r\n");
        stream.write_all(head.as_bytes()).unwrap();
        BufReader::new(stream).lines().map(Result::unwrap)
    };
    let mut idle = ask("");
    assert!(idle.next().unwrap().contains("200"));
    let begun = Instant::now();
    for _ in 0..4 * KEPT {
        stand.events.add(Kind::Fault, Facts::of("web").cause(&"x".repeat(300)), "again");
    }
    assert!(begun.elapsed() < TIMEOUT, "the fabric does not wait for a reader");
    // What it has not read, and the kernel has no room for, is lost with its number.
    let lost = idle.find(|line| line.starts_with("{\"lost\":")).unwrap();
    let lost: Value = serde_json::from_str(&lost).unwrap();
    assert!(lost["lost"].as_u64().unwrap() > KEPT as u64, "{lost}");
    let last = 4 * KEPT as u64;
    let mut sent = ask(&format!("Accept: text/event-stream\r\nLast-Event-ID: {}\r\n", last - 1));
    assert!(sent.find(|line| line.starts_with("content-type")).unwrap().contains("text/event-stream"));
    assert!(sent.any(|line| line == format!("id: {last}")));
    assert!(sent.next().unwrap().starts_with("data: {\"id\":"));
}
