//! The API's client, for programs that block: one call, one answer.
//!
//! Each request has a connection of its own. A daemon that is replaced ends its connections, and
//! one with many clients may have no place for another. So a request that ended without an answer
//! is sent again until 10 s have passed, if nothing of it was sent or doing it twice is doing it
//! once (GET, and `down`). So is one that the fabric did not begin, since it was busy with others
//! or is being changed. Endless answers (a capture, a followed console) are given piece by piece to
//! a closure and end when it says so, at a deadline, at the fabric's end, or at SIGINT or SIGTERM.

use std::cell::RefCell;
use std::io::{self, Read};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use http_body_util::{BodyExt, Full, combinators::UnsyncBoxBody};
use hyper::body::{Body, Bytes, Frame, Incoming};
use hyper::{Method, Request, Response, StatusCode, header};
use hyper_util::rt::TokioIo;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;
use tokio::runtime::Runtime;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::blocking;
use crate::rundir;

use super::CaptureOf;
use super::apply::{ApplyQuery, ApplyReport};
use super::config::{ConfigQuery, ConfigReport};
use super::report::{Events, Fault, MachineReport, Machines, PortReport, Ports, Span, Status, Tables};

/// How long a question may take; what starts or stops machines takes as long as it takes.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// How long adding or removing a port may take. A worker that hangs is noticed earlier; a kernel
/// that makes and removes many devices may need some of it.
const PORT_LIMIT: Duration = Duration::from_secs(60);

/// How long the socket of a daemon that runs is waited for, and how often it is looked for.
const COMES_BACK: Duration = Duration::from_secs(3);
const LOOK_AGAIN: Duration = Duration::from_millis(100);
/// The pause before a request is sent again, which doubles from the first to the last.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LAST_PAUSE: Duration = Duration::from_millis(200);
/// How long a connection may wait at once for room in the daemon's queue.
const QUEUED: Duration = Duration::from_millis(500);

/// Why a request has no answer, or not the one asked for.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message names what each field holds")]
pub enum ClientError {
    /// No socket.
    #[error("no fabric named \"{fabric}\" runs: no socket at {}; start it with `tombolo up`{}", socket.display(), others(running))]
    NotRunning {
        fabric: String,
        /// Where its socket was expected.
        socket: PathBuf,
        /// The fabrics that do run beside that place.
        running: Vec<String>,
    },
    /// A socket without a listener.
    #[error(
        "the fabric \"{fabric}\" has no daemon at the moment: no process answers at {}. It was killed, or has left the \
         fabric to the next one: `tombolo up` with its file starts that, which keeps guests and containers; `tombolo down \
         --fabric {fabric}` ends them",
        socket.display()
    )]
    Stale { fabric: String, socket: PathBuf },
    /// A daemon that runs and cannot be asked.
    #[error(
        "the fabric \"{fabric}\" runs (process {pid}), but nothing answers at {}: it is just starting or ending, or \
         its runtime files were deleted and cannot be created again; `tombolo down --fabric {fabric}` ends it",
        socket.display()
    )]
    Unreachable { fabric: String, socket: PathBuf, pid: u32 },
    /// The socket may not be opened.
    #[error("no permission for {}: the fabric \"{fabric}\" belongs to another user; run this as its owner, or with sudo", socket.display())]
    Denied { fabric: String, socket: PathBuf },
    /// The fabric said no.
    #[error("{}", with_hint(.fault))]
    Refused { status: u16, fault: Fault },
    /// Silence.
    #[error("the fabric \"{fabric}\" accepted the request but did not answer within {} s; the log in its runtime \
        directory may say why", limit.as_secs())]
    Timeout {
        fabric: String,
        /// How long was waited.
        limit: Duration,
    },
    /// The connection ended before an answer, each time.
    #[error("the fabric \"{fabric}\" gives no answer at {}: {what}", socket.display())]
    Unanswered {
        fabric: String,
        socket: PathBuf,
        /// How it ended the last time.
        what: String,
        /// Whether the request may have been carried out.
        sent: bool,
    },
    /// The fabric has too many other requests, or is being changed, each time.
    #[error("{}", with_hint(.fault))]
    Busy { fault: Fault },
    /// The answer is not one of this API.
    #[error("talking to the fabric \"{fabric}\" at {}: {what}", socket.display())]
    Broken { fabric: String, socket: PathBuf, what: String },
    /// The receiving side on this end failed, such as a full disk or a closed pipe.
    #[error(transparent)]
    Sink(io::Error),
    /// The system refused what every program needs.
    #[error("setting up the client: {0}")]
    System(io::Error),
}

fn with_hint(fault: &Fault) -> String {
    match &fault.hint {
        Some(hint) => format!("{}; {hint}", fault.error),
        None => fault.error.clone(),
    }
}

/// The fabrics that may have been meant instead.
fn others(running: &[String]) -> String {
    let Some(first) = running.first() else { return String::new() };
    format!(", or name another; running: {} (--fabric {first})", running.join(", "))
}

impl ClientError {
    /// There is no socket of a fabric, which would be in its folder beside those of the others.
    pub fn not_running(fabric: String, socket: PathBuf) -> ClientError {
        let root = socket.parent().and_then(Path::parent);
        let running = root.map(rundir::running).unwrap_or_default();
        ClientError::NotRunning { fabric, socket, running }
    }

    /// Whether the request was wrong in itself (exit code 2), as opposed to having failed.
    pub fn is_misuse(&self) -> bool {
        matches!(self, ClientError::Refused { status: 400, .. })
    }

    /// Whether its daemon runs and does not answer.
    pub fn is_unanswered(&self) -> bool {
        use ClientError::{Busy, Timeout, Unanswered, Unreachable};
        matches!(self, Unreachable { .. } | Timeout { .. } | Unanswered { .. } | Busy { .. })
    }

    /// Whether the same request may have an answer if it is sent again; `repeats` if doing it twice
    /// is doing it once.
    fn may_go_better(&self, repeats: bool) -> bool {
        match self {
            ClientError::Unanswered { sent, .. } => repeats || !sent,
            // Nothing of it was carried out.
            ClientError::Busy { .. } => true,
            _ => false,
        }
    }

    /// Whether there is no such fabric any more, or not yet.
    pub fn is_absent(&self) -> bool {
        matches!(self, ClientError::NotRunning { .. } | ClientError::Stale { .. })
    }
}

/// How an endless answer came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The fabric ended it: the port or the machine is gone.
    Fabric,
    /// The closure had enough.
    Enough,
    /// The time limit that the caller set was reached.
    Deadline,
    /// SIGINT or SIGTERM came.
    Interrupted,
}

/// A client of one fabric.
#[derive(Debug)]
pub struct Client {
    fabric: String,
    socket: PathBuf,
    runtime: Runtime,
    /// The connections of the call under way.
    links: RefCell<JoinSet<Result<(), hyper::Error>>>,
    stop: Option<Stop>,
}

/// SIGINT and SIGTERM, from the moment that an endless answer was first asked for.
#[derive(Debug)]
struct Stop {
    interrupt: Signal,
    terminate: Signal,
}

impl Stop {
    fn new() -> io::Result<Stop> {
        Ok(Stop { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? })
    }

    async fn came(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}

type Outgoing = UnsyncBoxBody<Bytes, std::convert::Infallible>;

impl Client {
    /// A client for the fabric of that name, whose socket is at `socket`. Nothing is connected yet.
    pub fn new(fabric: &str, socket: &Path) -> Result<Client, ClientError> {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(ClientError::System)?;
        Ok(Client { fabric: fabric.into(), socket: socket.into(), runtime, links: RefCell::default(), stop: None })
    }

    /// The name that this client was opened with.
    pub fn fabric(&self) -> &str {
        &self.fabric
    }

    /// Everything about the fabric at this instant.
    pub fn status(&self) -> Result<Status, ClientError> {
        self.get("/v1/status")
    }

    /// `GET /v1/ports/NAME`.
    pub fn port(&self, name: &str) -> Result<PortReport, ClientError> {
        self.get(&format!("/v1/ports/{}", quoted(name)))
    }

    /// Adds ports from sections of a fabric file.
    pub fn add_ports(&self, sections: &str) -> Result<Ports, ClientError> {
        self.json(Method::POST, "/v1/ports", sections, Some(PORT_LIMIT))
    }

    /// Changes a running port: the key `rate`, as TOML text.
    pub fn change_port(&self, name: &str, change: &str) -> Result<PortReport, ClientError> {
        self.json(Method::PATCH, &format!("/v1/ports/{}", quoted(name)), change, None)
    }

    /// `DELETE /v1/ports/NAME`. Fails for ports of machines, which go with their machine.
    pub fn remove_port(&self, name: &str) -> Result<(), ClientError> {
        let path = format!("/v1/ports/{}", quoted(name));
        let talk = self.repeated(false, async || self.nothing(Method::DELETE, &path).await);
        self.call(self.limited(PORT_LIMIT, talk))
    }

    /// Starts machines from sections of a fabric file, or a known machine by its name.
    pub fn run_machine(&self, sections: &str) -> Result<Machines, ClientError> {
        self.json(Method::POST, "/v1/machines", sections, None)
    }

    /// Changes the fabric to what the text of a fabric file says, or tells what that would do.
    pub fn apply(&self, text: &str, query: &ApplyQuery) -> Result<ApplyReport, ClientError> {
        let file = query.file.as_ref().map(|f| format!("&file={}", quoted(&f.to_string_lossy()))).unwrap_or_default();
        self.json(Method::POST, &format!("/v1/apply?dry_run={}{file}", query.dry_run), text, None)
    }

    /// `GET /v1/config`: the configuration that runs.
    pub fn config(&self) -> Result<ConfigReport, ClientError> {
        self.get("/v1/config")
    }

    /// `PATCH /v1/config`: changes the configuration that runs, or tells what that would do.
    pub fn change_config(&self, patch: &serde_json::Value, query: &ConfigQuery) -> Result<ApplyReport, ClientError> {
        let revision = query.revision.as_ref().map(|r| format!("&revision={}", quoted(r))).unwrap_or_default();
        let path = format!("/v1/config?dry_run={}{revision}", query.dry_run);
        self.json(Method::PATCH, &path, &patch.to_string(), None)
    }

    /// `DELETE /v1/machines/NAME`. Returns once the machine has ended.
    pub fn stop_machine(&self, name: &str) -> Result<MachineReport, ClientError> {
        self.json(Method::DELETE, &format!("/v1/machines/{}", quoted(name)), "", None)
    }

    /// `POST /v1/machines/NAME/restart`. Returns once the machine was started again.
    pub fn restart_machine(&self, name: &str) -> Result<MachineReport, ClientError> {
        self.json(Method::POST, &format!("/v1/machines/{}/restart", quoted(name)), "", None)
    }

    /// `GET /v1/machines/NAME`.
    pub fn machine(&self, name: &str) -> Result<MachineReport, ClientError> {
        self.get(&format!("/v1/machines/{}", quoted(name)))
    }

    /// `POST /v1/down`: ends the fabric and its machines.
    pub fn down(&self) -> Result<(), ClientError> {
        self.call(self.repeated(true, async || self.nothing(Method::POST, "/v1/down").await))
    }

    /// The text of a page such as `/metrics`.
    pub fn text(&self, path: &str) -> Result<String, ClientError> {
        self.call(self.limited(
            ANSWER_LIMIT,
            self.repeated(true, async || {
                let response = self.send(Method::GET, path, full("")).await?;
                let bytes = self.collect(response).await?;
                String::from_utf8(bytes.into()).map_err(|e| self.broken(e))
            }),
        ))
    }

    /// `GET /v1/events`: what happened after event number `after`, or since the oldest that is
    /// kept.
    pub fn events(&self, after: Option<u64>) -> Result<Events, ClientError> {
        self.get(&format!("/v1/events{}", after.map_or_else(String::new, |n| format!("?after={n}"))))
    }

    /// Follows events after number `after`; `sink` gets pieces of lines of JSON, until the fabric
    /// ends.
    pub fn follow_events(
        &mut self,
        after: u64,
        sink: impl FnMut(&[u8]) -> io::Result<ControlFlow<()>>,
    ) -> Result<Ending, ClientError> {
        self.stream(&format!("/v1/events?follow=1&after={after}"), None, sink)
    }

    /// `GET /v1/tables`: which addresses are where.
    pub fn tables(&self) -> Result<Tables, ClientError> {
        self.get("/v1/tables")
    }

    /// `GET /v1/span`: the last report of the control plane. Refused with 404 where none ever came.
    pub fn span(&self) -> Result<Span, ClientError> {
        self.get("/v1/span")
    }

    /// Captures a port or network; `sink` gets the pieces of a pcapng file.
    pub fn capture(
        &mut self,
        of: &CaptureOf,
        snaplen: Option<u32>,
        filter: Option<&str>,
        deadline: Option<Instant>,
        sink: impl FnMut(&[u8]) -> io::Result<ControlFlow<()>>,
    ) -> Result<Ending, ClientError> {
        let (kind, name) = match of {
            CaptureOf::Port(name) => ("ports", name),
            CaptureOf::Network(name) => ("networks", name),
        };
        let words = [snaplen.map(|n| format!("snaplen={n}")), filter.map(|text| format!("filter={}", quoted(text)))];
        let query = words.into_iter().flatten().collect::<Vec<_>>().join("&");
        self.stream(&format!("/v1/{kind}/{}/capture?{query}", quoted(name)), deadline, sink)
    }

    /// Reads a machine's console: all that it printed, and with `follow` what it prints until it
    /// ends.
    pub fn console(
        &mut self,
        machine: &str,
        follow: bool,
        sink: impl FnMut(&[u8]) -> io::Result<ControlFlow<()>>,
    ) -> Result<Ending, ClientError> {
        let path = format!("/v1/machines/{}/console?follow={}", quoted(machine), u8::from(follow));
        self.stream(&path, None, sink)
    }

    /// Joins a machine's console: follows what it prints, and types what `source` gives, until the
    /// source ends. The source is read on a thread of its own, which may outlive this call if it is
    /// blocked then.
    pub fn attach(
        &mut self,
        machine: &str,
        source: impl Read + Send + 'static,
        mut sink: impl FnMut(&[u8]) -> io::Result<ControlFlow<()>>,
    ) -> Result<Ending, ClientError> {
        self.watch_signals()?;
        let mut stop = self.stop.take().expect("set the line before");
        let path = format!("/v1/machines/{}/console", quoted(machine));
        let result = self.call(async {
            let output = self.opened(&format!("{path}?follow=1")).await?;
            let typing = self.send(Method::POST, &path, typed(source));
            let typing = async {
                let response = typing.await?;
                self.check(response).await
            };
            let mut typing = std::pin::pin!(typing);
            let mut reading = std::pin::pin!(self.pieces(output, None, &mut stop, &mut sink));
            tokio::select! {
                end = &mut reading => end,
                done = &mut typing => done.map(|_| Ending::Enough),
            }
        });
        self.stop = Some(stop);
        result
    }

    /// Sleeps, but not past SIGINT or SIGTERM; `true` if one of them came.
    pub fn sleep(&mut self, duration: Duration) -> Result<bool, ClientError> {
        self.watch_signals()?;
        let mut stop = self.stop.take().expect("set the line before");
        let came = self.call(async {
            tokio::select! {
                () = stop.came() => true,
                () = tokio::time::sleep(duration) => false,
            }
        });
        self.stop = Some(stop);
        Ok(came)
    }

    /// From now on SIGINT and SIGTERM end endless answers and sleeps, and not the process.
    pub fn watch_signals(&mut self) -> Result<(), ClientError> {
        if self.stop.is_none() {
            let _inside = self.runtime.enter();
            self.stop = Some(Stop::new().map_err(ClientError::System)?);
        }
        Ok(())
    }

    /// Runs one call to its end, and hangs up: what the fabric does for it is not to outlive it.
    fn call<T>(&self, talk: impl Future<Output = T>) -> T {
        self.runtime.block_on(async {
            let out = talk.await;
            let mut links = self.links.take();
            links.shutdown().await;
            out
        })
    }

    fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.json(Method::GET, path, "", Some(ANSWER_LIMIT))
    }

    fn json<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: &str,
        limit: Option<Duration>,
    ) -> Result<T, ClientError> {
        let repeats = method == Method::GET;
        let talk = self.repeated(repeats, async || {
            let response = self.send(method.clone(), path, full(body)).await?;
            let bytes = self.collect(response).await?;
            serde_json::from_slice(&bytes).map_err(|e| self.broken(format!("an answer of another schema ({e})")))
        });
        self.call(async {
            match limit {
                Some(limit) => self.limited(limit, talk).await,
                None => talk.await,
            }
        })
    }

    async fn nothing(&self, method: Method, path: &str) -> Result<(), ClientError> {
        let response = self.send(method, path, full("")).await?;
        self.check(response).await.map(|_| ())
    }

    /// The body of an endless answer.
    async fn opened(&self, path: &str) -> Result<Incoming, ClientError> {
        let open = async || {
            let response = self.send(Method::GET, path, full("")).await?;
            self.check(response).await
        };
        self.repeated(true, open).await
    }

    /// Does it again for as long as it ends without an answer; `repeats` if doing it twice is doing
    /// it once.
    async fn repeated<T>(
        &self,
        repeats: bool,
        ask: impl AsyncFn() -> Result<T, ClientError>,
    ) -> Result<T, ClientError> {
        let until = Instant::now() + ANSWER_LIMIT;
        let mut pause = FIRST_PAUSE;
        loop {
            match ask().await {
                Err(error) if error.may_go_better(repeats) && Instant::now() + pause < until => {
                    tokio::time::sleep(pause).await;
                    pause = LAST_PAUSE.min(2 * pause);
                }
                result => return result,
            }
        }
    }

    async fn limited<T>(
        &self,
        limit: Duration,
        talk: impl Future<Output = Result<T, ClientError>>,
    ) -> Result<T, ClientError> {
        let late = |_| ClientError::Timeout { fabric: self.fabric.clone(), limit };
        tokio::time::timeout(limit, talk).await.map_err(late)?
    }

    fn stream(
        &mut self,
        path: &str,
        deadline: Option<Instant>,
        mut sink: impl FnMut(&[u8]) -> io::Result<ControlFlow<()>>,
    ) -> Result<Ending, ClientError> {
        self.watch_signals()?;
        let mut stop = self.stop.take().expect("set the line before");
        let result = self.call(async {
            let body = self.opened(path).await?;
            self.pieces(body, deadline, &mut stop, &mut sink).await
        });
        self.stop = Some(stop);
        result
    }

    async fn pieces(
        &self,
        mut body: Incoming,
        deadline: Option<Instant>,
        stop: &mut Stop,
        sink: &mut impl FnMut(&[u8]) -> io::Result<ControlFlow<()>>,
    ) -> Result<Ending, ClientError> {
        let until = async {
            match deadline {
                Some(at) => tokio::time::sleep_until(at.into()).await,
                None => std::future::pending().await,
            }
        };
        let mut until = std::pin::pin!(until);
        loop {
            let frame = tokio::select! {
                biased;
                () = stop.came() => return Ok(Ending::Interrupted),
                frame = body.frame() => frame,
                () = &mut until => return Ok(Ending::Deadline),
            };
            let Some(frame) = frame else { return Ok(Ending::Fabric) };
            if let Ok(data) = frame.map_err(|e| self.broken(e))?.into_data()
                && sink(&data).map_err(ClientError::Sink)?.is_break()
            {
                return Ok(Ending::Enough);
            }
        }
    }

    fn broken(&self, what: impl std::fmt::Display) -> ClientError {
        ClientError::Broken { fabric: self.fabric.clone(), socket: self.socket.clone(), what: what.to_string() }
    }

    fn unanswered(&self, what: impl std::fmt::Display, sent: bool) -> ClientError {
        let (fabric, socket) = (self.fabric.clone(), self.socket.clone());
        ClientError::Unanswered { fabric, socket, what: what.to_string(), sent }
    }

    /// A connection that waits for room in the daemon's queue where that is full.
    async fn queued(&self) -> io::Result<UnixStream> {
        match UnixStream::connect(&self.socket).await {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            done => return done,
        }
        let socket = self.socket.clone();
        // Among others that try again and again only one that waits in the kernel gets its turn.
        let wait = move || -> io::Result<std::os::unix::net::UnixStream> {
            let stream = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
            set_socket_timeout(&stream, Timeout::Send, Some(QUEUED))?;
            connect(&stream, &SocketAddrUnix::new(&socket)?)?;
            let stream = std::os::unix::net::UnixStream::from(stream);
            stream.set_nonblocking(true)?;
            Ok(stream)
        };
        UnixStream::from_std(blocking::spawn(wait).await??)
    }

    /// What an error of `connect` says.
    fn not_connected(&self, error: io::Error) -> ClientError {
        let (fabric, socket) = (self.fabric.clone(), self.socket.clone());
        match error.kind() {
            io::ErrorKind::NotFound => ClientError::not_running(fabric, socket),
            io::ErrorKind::ConnectionRefused => ClientError::Stale { fabric, socket },
            io::ErrorKind::PermissionDenied => ClientError::Denied { fabric, socket },
            io::ErrorKind::WouldBlock => self.unanswered("its queue of connections is full", false),
            // The daemon closed its listener, for another one or for good, before it took this
            // connection from the queue.
            io::ErrorKind::ConnectionReset => self.unanswered(error, false),
            _ => self.broken(error),
        }
    }

    /// Connects. If the socket is missing or has no listener, this waits while its daemon holds its
    /// lock: the daemon starts, or makes the deleted socket again.
    async fn connect(&self) -> Result<UnixStream, ClientError> {
        let timeout = Instant::now() + COMES_BACK;
        loop {
            let error = match self.queued().await {
                Ok(stream) => return Ok(stream),
                Err(error) => error,
            };
            let error = self.not_connected(error);
            if !error.is_absent() {
                return Err(error);
            }
            match self.socket.parent().and_then(rundir::daemon_of) {
                Some(pid) if Instant::now() >= timeout => {
                    let (fabric, socket) = (self.fabric.clone(), self.socket.clone());
                    return Err(ClientError::Unreachable { fabric, socket, pid });
                }
                Some(_) => {}
                None => return Err(error),
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }

    async fn send(&self, method: Method, path: &str, body: Outgoing) -> Result<Response<Incoming>, ClientError> {
        let stream = self.connect().await?;
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(|e| self.unanswered(e, false))?;
        self.links.borrow_mut().spawn(connection);
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::HOST, "tombolo")
            .header(header::CONTENT_TYPE, "application/toml")
            .body(body)
            .map_err(|e| self.broken(e))?;
        // A request that was cancelled has not left this process.
        sender.send_request(request).await.map_err(|e| self.unanswered(told(&e), !e.is_canceled()))
    }

    async fn check(&self, response: Response<Incoming>) -> Result<Incoming, ClientError> {
        let status = response.status();
        if status.is_success() {
            return Ok(response.into_body());
        }
        let is_busy = status == StatusCode::SERVICE_UNAVAILABLE && response.headers().contains_key(header::RETRY_AFTER);
        let bytes = response.into_body().collect().await.map_err(|e| self.unanswered(told(&e), true))?.to_bytes();
        let unknown = |_| Fault {
            error: format!("HTTP {status}: {}", String::from_utf8_lossy(&bytes)),
            hint: None,
            problems: vec![],
        };
        let fault = serde_json::from_slice(&bytes).unwrap_or_else(unknown);
        if status == StatusCode::FORBIDDEN {
            let (fabric, socket) = (self.fabric.clone(), self.socket.clone());
            return Err(ClientError::Denied { fabric, socket });
        }
        if is_busy {
            return Err(ClientError::Busy { fault });
        }
        Err(ClientError::Refused { status: status.as_u16(), fault })
    }

    async fn collect(&self, response: Response<Incoming>) -> Result<Bytes, ClientError> {
        let body = self.check(response).await?;
        Ok(body.collect().await.map_err(|e| self.unanswered(told(&e), true))?.to_bytes())
    }
}

/// An error of a connection, with its cause.
fn told(error: &hyper::Error) -> String {
    let cause = std::error::Error::source(error);
    cause.map_or_else(|| error.to_string(), |cause| format!("{error} ({cause})"))
}

fn full(body: &str) -> Outgoing {
    Full::new(Bytes::copy_from_slice(body.as_bytes())).boxed_unsync()
}

struct Typed(mpsc::Receiver<Bytes>);

impl Body for Typed {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        self.0.poll_recv(cx).map(|piece| piece.map(|p| Ok(Frame::data(p))))
    }
}

/// A body that is read from `source` on a thread of its own.
fn typed(mut source: impl Read + Send + 'static) -> Outgoing {
    let (sender, receiver) = mpsc::channel(4);
    let read = move || {
        let mut buffer = [0; 1024];
        while let Ok(n @ 1..) = source.read(&mut buffer) {
            if sender.blocking_send(Bytes::copy_from_slice(&buffer[..n])).is_err() {
                break;
            }
        }
    };
    // Without a thread there is nothing to send, and the body is at its end.
    let _ = std::thread::Builder::new().spawn(read);
    Typed(receiver).boxed_unsync()
}

/// A name as a piece of a path: everything but letters, digits, `-`, `.` and `_` as %XX.
pub(crate) fn quoted(name: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_');
    name.bytes().map(|b| if plain(b) { char::from(b).to_string() } else { format!("%{b:02X}") }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_that_ends_in_the_queue_is_tried_again_whatever_is_asked() {
        let client = Client::new("lab", Path::new("/run/lab/api.sock")).unwrap();
        let reset = client.not_connected(io::Error::from(io::ErrorKind::ConnectionReset));
        assert!(reset.may_go_better(false) && !reset.is_absent(), "{reset}");
        let other = client.not_connected(io::Error::from(io::ErrorKind::AddrNotAvailable));
        assert!(!other.may_go_better(true), "{other}");
    }

    #[test]
    fn a_name_cannot_leave_its_place_in_the_path() {
        assert_eq!(quoted("uplink-lan"), "uplink-lan");
        assert_eq!(quoted("../down?x=1 ü"), "..%2Fdown%3Fx%3D1%20%C3%BC");
    }
}
