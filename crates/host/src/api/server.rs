//! The API: HTTP/1.1 with JSON on a Unix socket, for the fabric's [`Request`]s.
//!
//! Purpose: a process that may open the socket asks the fabric and gets [`super::report`]'s schema.
//! This module is not the fabric: it holds no state except its connections, and every answer comes
//! from the fabric's task.
//!
//! # Invariants
//! - The peer's credentials decide. They are taken from the kernel when it connects. Root and the
//!   daemon's own user may do everything; others get 403 for every request. The socket's mode
//!   (0600) and its folder's (0700) say the same.
//! - The server never waits for a client. [`super::connections`] bounds connections and their time,
//!   and there are at most [`MAX_STREAMS`] endless answers (503). So a `status` or `down` gets
//!   through beside half-sent requests and forgotten captures. Places are shared fairly between
//!   processes ([`Limits::process`]).
//! - A client that hangs up ends what was started for it: its capture's receiver is dropped with
//!   the answer's body.
//!
//! # Limits
//! A body of sections may have [`MAX_BODY_BYTES`]. Typed console input is copied as it comes and
//! has no limit, so it counts as an endless answer.

use std::convert::Infallible;
use std::io;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use axum::extract::{DefaultBodyLimit, FromRequest, Path as InPath, Request as HttpRequest, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, delete, get, patch, post, put};
use axum::{Extension, Json, Router};
use http_body_util::BodyExt;
use hyper::body::Frame;
use rustix::fs::OFlags;
use rustix::net::{AddressFamily, SocketFlags, SocketType, listen, socket_with};
use serde::Deserialize;
use tokio::io::AsyncWriteExt;
use tokio::net::UnixListener;
use tokio::net::unix::pipe;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tombolo_shm::listener::bind_private;
use tombolo_switch::filter::{Filter, FilterError};

use super::apply::ApplyQuery;
use super::connections::{self, Busy, Limits, Line, OpenConnection};
use super::query::{Asked, Keys, wrong};
use super::report::{Fault, Machines, Ports, ProblemReport, SCHEMA, TablesQuery};
use super::{CaptureOf, Refusal, Reply, Request, Requests, config, events, metrics, services, span};
use crate::blocking;
use crate::console;

/// Captures, consoles, attached keyboards and followers of events at one time, all clients
/// together.
pub const MAX_STREAMS: usize = 64;
/// Bytes of a request's body of sections.
pub const MAX_BODY_BYTES: usize = 1 << 20;
/// Connections that may wait to be accepted.
const BACKLOG: i32 = 4096;
/// How often a followed console's file is looked at.
const CONSOLE_LOOK: Duration = Duration::from_millis(50);
/// Looks at a silent console between two questions whether its machine still runs.
const LOOKS_PER_QUESTION: u32 = 10;
/// How long a machine that runs may take to hold its console's pipe; one that does not run is not
/// waited for.
const CONSOLE_APPEARS: Duration = Duration::from_secs(30);
/// Bytes read from a console at once.
const CONSOLE_CHUNK: usize = 16 << 10;

/// The document that describes the API, served at `/v1/openapi.json`.
pub const OPENAPI: &str = include_str!("openapi.json");

/// Why the API cannot be served.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message names what each field holds")]
pub enum ServerError {
    /// The socket was refused.
    #[error("{what} the API socket {}: {source}; expected a folder of our own with room for it", path.display())]
    Socket { what: &'static str, path: PathBuf, source: io::Error },
}

/// A bound API socket. It is there from now on, so that a client that comes early waits instead of
/// failing.
#[derive(Debug)]
pub struct Server {
    listener: std::os::unix::net::UnixListener,
    limits: Limits,
}

impl Server {
    /// Binds the socket, mode 0600. The caller holds the fabric's lock, so a socket that is there
    /// already is what a killed daemon left, and is replaced.
    pub fn bind(path: &Path) -> Result<Server, ServerError> {
        let fail = |what| move |source| ServerError::Socket { what, path: path.into(), source };
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(fail("removing what a killed daemon left as")(error));
            }
            _ => {}
        }
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None);
        let socket = socket.map_err(|e| fail("making")(e.into()))?;
        bind_private(&socket, path).map_err(|e| fail("binding")(e.into()))?;
        listen(&socket, BACKLOG).map_err(|e| fail("listening on")(e.into()))?;
        let listener = std::os::unix::net::UnixListener::from(socket);
        listener.set_nonblocking(true).map_err(fail("setting up"))?;
        Ok(Server { listener, limits: Limits::default() })
    }

    /// Other limits than the usual ones.
    #[must_use]
    pub fn with_limits(self, limits: Limits) -> Server {
        Server { limits, ..self }
    }

    /// Answers until `ended` is done, then lets answers under way reach their clients for two
    /// seconds.
    ///
    /// # Errors
    /// If called outside a tokio runtime with input and output.
    pub async fn serve(self, requests: Requests, ended: impl Future<Output = ()> + Send + 'static) -> io::Result<()> {
        let listener = UnixListener::from_std(self.listener)?;
        let owner = rustix::process::geteuid().as_raw();
        let streams = Arc::new(Semaphore::new(MAX_STREAMS));
        let app = App { requests, owner, streams, body_time: self.limits.body };
        connections::serve(listener, owner, self.limits, router(app), ended).await;
        Ok(())
    }
}

#[derive(Clone)]
pub(super) struct App {
    pub(super) requests: Requests,
    owner: u32,
    streams: Arc<Semaphore>,
    body_time: Duration,
}

/// Every way through the API: method, path, handler. The OpenAPI document is tested to name exactly
/// these.
fn routes() -> Vec<(&'static str, &'static str, MethodRouter<App>)> {
    vec![
        ("get", "/v1/status", get(status)),
        ("get", "/v1/ports", get(ports)),
        ("post", "/v1/ports", post(add_ports)),
        ("get", "/v1/ports/{name}", get(port)),
        ("patch", "/v1/ports/{name}", patch(change_port)),
        ("delete", "/v1/ports/{name}", delete(remove_port)),
        ("get", "/v1/ports/{name}/capture", get(capture)),
        ("get", "/v1/networks/{name}/capture", get(capture_network)),
        ("get", "/v1/tables", get(tables)),
        ("get", "/v1/networks/{name}/remotes", get(span::remotes)),
        ("put", "/v1/networks/{name}/remotes/{machine}", span::long(put(span::put_remotes))),
        ("delete", "/v1/networks/{name}/remotes/{machine}", delete(span::delete_remotes)),
        ("put", "/v1/networks/{name}/lost", put(span::put_lost)),
        ("get", "/v1/span", get(span::report)),
        ("put", "/v1/span", put(span::put_report)),
        ("get", "/v1/machines", get(machines)),
        ("post", "/v1/machines", post(run_machine)),
        ("delete", "/v1/machines/{name}", delete(stop_machine)),
        ("get", "/v1/machines/{name}", get(machine)),
        ("post", "/v1/machines/{name}/restart", post(restart_machine)),
        ("get", "/v1/machines/{name}/console", get(console)),
        ("post", "/v1/machines/{name}/console", post(type_to_console)),
        ("post", "/v1/apply", post(apply)),
        ("get", "/v1/config", get(config::get)),
        ("patch", "/v1/config", patch(config::patch)),
        ("get", "/v1/events", get(events::events)),
        ("post", "/v1/down", post(down)),
        ("get", "/v1/openapi.json", get(openapi)),
        ("get", "/metrics", get(metrics_text)),
    ]
}

fn router(app: App) -> Router {
    let mut router = Router::new();
    for (_, path, handler) in routes() {
        router = router.route(path, handler);
    }
    router
        .fallback(async |request: HttpRequest| {
            let error = format!("nothing is at {}", request.uri().path());
            Answer::new(StatusCode::NOT_FOUND, error).hint("GET /v1/openapi.json lists what exists")
        })
        .method_not_allowed_fallback(async |request: HttpRequest| {
            let error = format!("{} is not for {}", request.uri().path(), request.method());
            Answer::new(StatusCode::METHOD_NOT_ALLOWED, error).hint("GET /v1/openapi.json lists what exists")
        })
        .layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
        .layer(from_fn_with_state(app.clone(), check_peer))
        .with_state(app)
}

/// An answer that is not what was asked for.
#[derive(Debug)]
pub(super) struct Answer {
    status: StatusCode,
    body: Fault,
    /// Nothing was done, and the request may be sent again.
    is_busy: bool,
}

impl Answer {
    pub(super) fn new(status: StatusCode, error: impl Into<String>) -> Self {
        Answer { status, body: Fault { error: error.into(), hint: None, problems: vec![] }, is_busy: false }
    }

    pub(super) fn problem(mut self, problem: ProblemReport) -> Self {
        self.body.problems.push(problem);
        self
    }

    pub(super) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.body.hint = Some(hint.into());
        self
    }
}

impl IntoResponse for Answer {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body)).into_response();
        if self.is_busy {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}

impl From<Refusal> for Answer {
    fn from(refusal: Refusal) -> Self {
        let status = match &refusal {
            Refusal::NotFound(_) => StatusCode::NOT_FOUND,
            Refusal::Invalid(_) | Refusal::Faulty { .. } => StatusCode::BAD_REQUEST,
            Refusal::Unfit(_) => StatusCode::UNPROCESSABLE_ENTITY,
            Refusal::Conflict(_) => StatusCode::CONFLICT,
            Refusal::Busy(_) => StatusCode::SERVICE_UNAVAILABLE,
            Refusal::Failed(_) => StatusCode::INTERNAL_SERVER_ERROR,
        };
        let mut answer = Answer::new(status, refusal.to_string());
        answer.is_busy = matches!(refusal, Refusal::Busy(_));
        if let Refusal::Faulty { problems, .. } = refusal {
            answer.body.problems = problems;
        }
        answer
    }
}

async fn check_peer(
    State(app): State<App>,
    Extension(slot): Extension<Arc<OpenConnection>>,
    request: HttpRequest,
    next: Next,
) -> Response {
    if slot.trusted {
        if let Err(why) = slot.works(line_of(&request)).await {
            return busy(&slot, why);
        }
        let response = next.run(request).await;
        if response.extensions().get::<Endless>().is_some() {
            slot.is_endless();
        } else {
            slot.waits();
        }
        return response;
    }
    let fault = connections::forbidden(slot.uid, slot.member, app.owner);
    let mut response = Answer { status: StatusCode::FORBIDDEN, body: fault, is_busy: false }.into_response();
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    response
}

/// `status` and `down` are short, and wait for nothing that may be slow.
fn line_of(request: &HttpRequest) -> Line {
    match (request.method(), request.uri().path()) {
        (&Method::GET, "/v1/status") => Line::Status,
        (&Method::POST, "/v1/down") => Line::Down,
        _ => Line::Common,
    }
}

/// The answer to a request that was not handled, because others are. It may be sent again.
fn busy(slot: &OpenConnection, why: Busy) -> Response {
    let Limits { process, working, turn, .. } = slot.limits;
    let (who, waited) = (&slot.process, turn.as_secs_f32());
    let error = match why {
        Busy::Process => {
            format!("{who}: {process} requests are under way, and this one waited {waited} s for its turn")
        }
        Busy::All => {
            format!("{working} requests of all processes are under way, and this one waited {waited} s for its turn")
        }
        Busy::Replaced => "all connections are taken, and a process with fewer needed that of this request".into(),
    };
    let mut answer = Answer::new(StatusCode::SERVICE_UNAVAILABLE, error).hint("read the answers to the others first");
    answer.is_busy = true;
    answer.into_response()
}

pub(super) async fn ask<T>(requests: &Requests, request: impl FnOnce(Reply<T>) -> Request) -> Result<T, Answer> {
    let ending = || Answer::new(StatusCode::SERVICE_UNAVAILABLE, "the fabric is ending and accepts no more requests");
    let (reply, answer) = oneshot::channel();
    requests.send(request(reply)).await.map_err(|_| ending())?;
    Ok(answer.await.map_err(|_| ending())??)
}

async fn status(State(app): State<App>) -> Result<Response, Answer> {
    Ok(Json(ask(&app.requests, Request::Status).await?).into_response())
}

async fn ports(State(app): State<App>) -> Result<Json<Ports>, Answer> {
    Ok(Json(Ports { schema: SCHEMA, ports: ask(&app.requests, Request::Status).await?.ports }))
}

async fn machines(State(app): State<App>) -> Result<Json<Machines>, Answer> {
    Ok(Json(Machines { schema: SCHEMA, machines: ask(&app.requests, Request::Status).await?.machines }))
}

async fn port(State(app): State<App>, InPath(name): InPath<String>) -> Result<Response, Answer> {
    let status = ask(&app.requests, Request::Status).await?;
    match status.ports.iter().find(|p| p.name == name) {
        Some(port) => Ok(Json(port).into_response()),
        None => {
            let known: Vec<_> = status.ports.iter().map(|p| p.name.as_str()).collect();
            Err(Refusal::NotFound(format!("no port \"{name}\"; there are: {}", known.join(", "))).into())
        }
    }
}

async fn machine(State(app): State<App>, InPath(name): InPath<String>) -> Result<Response, Answer> {
    let status = ask(&app.requests, Request::Status).await?;
    match status.machines.iter().find(|m| m.name == name) {
        Some(machine) => Ok(Json(machine).into_response()),
        None => {
            let known: Vec<_> = status.machines.iter().map(|m| m.name.as_str()).collect();
            Err(Refusal::NotFound(format!("no machine \"{name}\"; there are: {}", known.join(", "))).into())
        }
    }
}

async fn add_ports(State(app): State<App>, Sections(sections): Sections) -> Result<Response, Answer> {
    let ports = ask(&app.requests, |reply| Request::AddPorts { sections, reply }).await?;
    Ok((StatusCode::CREATED, Json(Ports { schema: SCHEMA, ports })).into_response())
}

async fn change_port(
    State(app): State<App>,
    InPath(name): InPath<String>,
    Sections(change): Sections,
) -> Result<Response, Answer> {
    Ok(Json(ask(&app.requests, |reply| Request::ChangePort { name, change, reply }).await?).into_response())
}

async fn remove_port(State(app): State<App>, InPath(name): InPath<String>) -> Result<StatusCode, Answer> {
    ask(&app.requests, |reply| Request::RemovePort { name, reply }).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn run_machine(State(app): State<App>, Sections(sections): Sections) -> Result<Response, Answer> {
    let machines = ask(&app.requests, |reply| Request::RunMachine { sections, reply }).await?;
    Ok((StatusCode::CREATED, Json(Machines { schema: SCHEMA, machines })).into_response())
}

async fn stop_machine(State(app): State<App>, InPath(name): InPath<String>) -> Result<Response, Answer> {
    Ok(Json(ask(&app.requests, |reply| Request::StopMachine { name, reply }).await?).into_response())
}

async fn apply(
    State(app): State<App>,
    Asked(query): Asked<ApplyQuery>,
    Sections(text): Sections,
) -> Result<Response, Answer> {
    if let Some(file) = query.file.as_ref().filter(|file| !file.is_absolute()) {
        let found = format!("{:?}", file.display().to_string());
        return Err(wrong("file", "an absolute path", found).hint("the daemon runs in another folder"));
    }
    Ok(Json(ask(&app.requests, |reply| Request::Apply { text, query, reply }).await?).into_response())
}

async fn restart_machine(State(app): State<App>, InPath(name): InPath<String>) -> Result<Response, Answer> {
    Ok(Json(ask(&app.requests, |reply| Request::RestartMachine { name, reply }).await?).into_response())
}

async fn down(State(app): State<App>) -> Result<StatusCode, Answer> {
    ask(&app.requests, Request::Down).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn openapi() -> Response {
    ([(header::CONTENT_TYPE, "application/json")], OPENAPI).into_response()
}

async fn metrics_text(State(app): State<App>) -> Result<Response, Answer> {
    let status = ask(&app.requests, Request::Status).await?;
    // Services are other processes: asking them may wait, which this thread must not.
    let services = blocking::spawn(services::collect).await.unwrap_or_default();
    let page = metrics::render(&status) + &services::render(&services);
    Ok(([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], page).into_response())
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CaptureQuery {
    snaplen: Option<u32>,
    filter: Option<String>,
}

impl Keys for CaptureQuery {
    const KEYS: &'static [(&'static str, &'static str)] =
        &[("snaplen", "a number of bytes"), ("filter", "a filter expression")];
}

async fn capture(
    State(app): State<App>,
    InPath(port): InPath<String>,
    Extension(slot): Extension<Arc<OpenConnection>>,
    Asked(query): Asked<CaptureQuery>,
) -> Result<Response, Answer> {
    captured(&app, &slot, CaptureOf::Port(port), query).await
}

async fn capture_network(
    State(app): State<App>,
    InPath(network): InPath<String>,
    Extension(slot): Extension<Arc<OpenConnection>>,
    Asked(query): Asked<CaptureQuery>,
) -> Result<Response, Answer> {
    captured(&app, &slot, CaptureOf::Network(network), query).await
}

async fn captured(app: &App, slot: &OpenConnection, of: CaptureOf, query: CaptureQuery) -> Result<Response, Answer> {
    let CaptureQuery { snaplen, filter } = query;
    let wrong = |e: FilterError| Answer::new(StatusCode::BAD_REQUEST, e.to_string());
    let filter = filter.map(|text| Filter::parse(&text)).transpose().map_err(wrong)?;
    let permit = stream_permit(app, slot)?;
    let pieces = ask(&app.requests, |reply| Request::Capture { of, snaplen, filter, reply }).await?;
    Ok(endless("application/x-pcapng", pieces, permit))
}

impl Keys for TablesQuery {
    const KEYS: &'static [(&'static str, &'static str)] = &[("homes", "the homes_revision of an earlier answer")];
}

async fn tables(State(app): State<App>, Asked(query): Asked<TablesQuery>) -> Result<Response, Answer> {
    let TablesQuery { homes } = query;
    Ok(Json(ask(&app.requests, |reply| Request::Tables { homes, reply }).await?).into_response())
}

/// Marks an answer that goes on for as long as the client wants it.
#[derive(Clone, Copy)]
struct Endless;

pub(super) fn endless(kind: &'static str, pieces: mpsc::Receiver<Vec<u8>>, permit: StreamPermit) -> Response {
    let body = Body::new(Pieces { pieces, _permit: permit });
    (Extension(Endless), [(header::CONTENT_TYPE, kind)], body).into_response()
}

/// The place of an endless answer: one of its process's, and one of all.
pub(super) struct StreamPermit {
    _own: OwnedSemaphorePermit,
    _all: OwnedSemaphorePermit,
}

pub(super) fn stream_permit(app: &App, slot: &OpenConnection) -> Result<StreamPermit, Answer> {
    let full = |error: String| move |_| Answer::new(StatusCode::SERVICE_UNAVAILABLE, error).hint("end one of them");
    let most = slot.limits.process;
    let own = format!("{}: {most} captures, consoles and followers are open, the limit for one process", slot.process);
    let all = format!("{MAX_STREAMS} captures, consoles and followers are open, and no more are allowed");
    Ok(StreamPermit {
        _own: slot.process.streams.clone().try_acquire_owned().map_err(full(own))?,
        _all: app.streams.clone().try_acquire_owned().map_err(full(all))?,
    })
}

/// A body that goes on until its sender is dropped, and whose sender learns when the client has
/// gone.
struct Pieces {
    pieces: mpsc::Receiver<Vec<u8>>,
    _permit: StreamPermit,
}

impl hyper::body::Body for Pieces {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.pieces.poll_recv(cx).map(|piece| piece.map(|p| Ok(Frame::data(p.into()))))
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ConsoleQuery {
    follow: Option<u8>,
}

impl Keys for ConsoleQuery {
    const KEYS: &'static [(&'static str, &'static str)] = &[("follow", "0 or 1")];
}

async fn console(
    State(app): State<App>,
    InPath(name): InPath<String>,
    Extension(slot): Extension<Arc<OpenConnection>>,
    Asked(ConsoleQuery { follow }): Asked<ConsoleQuery>,
) -> Result<Response, Answer> {
    let console = {
        let name = name.clone();
        ask(&app.requests, |reply| Request::Console { name, reply }).await?
    };
    let permit = stream_permit(&app, &slot)?;
    let (sender, pieces) = mpsc::channel(4);
    let follow = follow.unwrap_or(0) != 0;
    tokio::spawn(tail(console.log, follow.then_some((app.requests, name)), sender));
    Ok(endless("application/octet-stream", pieces, permit))
}

/// Sends a console's file, and what is added to it for as long as the machine to follow runs and
/// the client stays.
async fn tail(log: PathBuf, follow: Option<(Requests, String)>, sender: mpsc::Sender<Vec<u8>>) {
    use std::os::unix::fs::FileExt;
    let mut offset = 0;
    let mut silent = 0;
    let mut ended = follow.is_none();
    loop {
        let mut buffer = vec![0; CONSOLE_CHUNK];
        // Opened again each time: a restarted machine may have a new file, from the start.
        let read = std::fs::File::open(&log).and_then(|file| {
            if file.metadata()?.len() < offset {
                offset = 0;
            }
            // What has been cut off meanwhile cannot be told any more.
            offset = offset.max(console::start(&file));
            file.read_at(&mut buffer, offset)
        });
        match read {
            Ok(n) if n > 0 => {
                buffer.truncate(n);
                offset += n as u64;
                silent = 0;
                if sender.send(buffer).await.is_err() {
                    return;
                }
                continue;
            }
            // Nothing more, and there will be nothing more.
            _ if ended => return,
            _ => {}
        }
        silent += 1;
        if let Some((requests, name)) = &follow
            && silent % LOOKS_PER_QUESTION == 0
        {
            // What it printed before it ended is read in one more turn.
            ended = !runs(requests, name).await;
            continue;
        }
        tokio::select! {
            () = sender.closed() => return,
            () = tokio::time::sleep(CONSOLE_LOOK) => {}
        }
    }
}

/// Whether a machine runs, or is about to.
async fn runs(requests: &Requests, name: &str) -> bool {
    ask(requests, Request::Status).await.is_ok_and(|status| {
        status.machines.iter().any(|m| m.name == name && matches!(m.state.as_str(), "running" | "starting"))
    })
}

/// Opens what takes a console's input, so that writing waits in the async runtime: a named pipe, or
/// a terminal, which must not become the daemon's own.
fn open_console(input: &Path) -> io::Result<pipe::Sender> {
    if !std::fs::metadata(input)?.file_type().is_char_device() {
        return pipe::OpenOptions::new().open_sender(input);
    }
    let flags = OFlags::NOCTTY | OFlags::NONBLOCK;
    let file = std::fs::OpenOptions::new().write(true).custom_flags(flags.bits() as i32).open(input)?;
    pipe::Sender::from_file_unchecked(file)
}

/// Copies the body to the machine's console as it comes; answers when all of it is there, for the
/// guest to read.
async fn type_to_console(
    State(app): State<App>,
    InPath(name): InPath<String>,
    Extension(slot): Extension<Arc<OpenConnection>>,
    request: HttpRequest,
) -> Result<StatusCode, Answer> {
    let _permit = stream_permit(&app, &slot)?;
    // Typing goes on for as long as the client wants, and keeps no other request of its process
    // waiting.
    slot.is_endless();
    let known = name.clone();
    let console = ask(&app.requests, |reply| Request::Console { name: known, reply }).await?;
    let Some(input) = console.input else {
        return Err(
            Refusal::Conflict(format!("the console of \"{name}\" accepts no input: it is kept, not attached")).into()
        );
    };
    let failed = |what: &'static str| {
        let input = input.display().to_string();
        move |e: io::Error| {
            Answer::from(Refusal::Failed(format!("{what} the console's pipe {input}: {e}; does the machine run?")))
        }
    };
    // A machine that is about to start has no pipe yet, or does not hold it yet.
    let early = |e: &io::Error| {
        e.kind() == io::ErrorKind::NotFound || e.raw_os_error() == Some(rustix::io::Errno::NXIO.raw_os_error())
    };
    let deadline = Instant::now() + CONSOLE_APPEARS;
    let mut pipe = loop {
        match open_console(&input) {
            Err(e) if early(&e) && Instant::now() < deadline && runs(&app.requests, &name).await => {
                tokio::time::sleep(CONSOLE_LOOK).await;
            }
            result => break result.map_err(failed("opening"))?,
        }
    };
    let mut body = request.into_body();
    // A client that hung up has typed what came until then.
    while let Some(Ok(frame)) = body.frame().await {
        if let Ok(data) = frame.into_data() {
            pipe.write_all(&data).await.map_err(failed("typing into"))?;
        }
    }
    Ok(StatusCode::NO_CONTENT)
}

/// The body of a request, once all of it is there.
pub(super) async fn whole_body(request: HttpRequest, app: &App) -> Result<Bytes, Response> {
    let slot = request.extensions().get::<Arc<OpenConnection>>().cloned();
    // Until the body is there it is the client's turn.
    if let Some(slot) = &slot {
        slot.waits();
    }
    let bytes = tokio::time::timeout(app.body_time, Bytes::from_request(request, app)).await;
    let late = |_| {
        let error = format!("the body did not arrive within {} seconds", app.body_time.as_secs_f32());
        Answer::new(StatusCode::REQUEST_TIMEOUT, error).hint("send as many bytes as Content-Length says")
    };
    let bytes = bytes.map_err(|e| late(e).into_response())?;
    let bytes = bytes.map_err(|e| Answer::new(e.status(), e.body_text()).into_response())?;
    if let Some(slot) = &slot {
        slot.works(Line::Common).await.map_err(|why| busy(slot, why))?;
    }
    Ok(bytes)
}

/// A piece of a fabric file: the body as it is, or `{"toml": …}` of JSON.
struct Sections(String);

impl FromRequest<App> for Sections {
    type Rejection = Response;

    async fn from_request(request: HttpRequest, app: &App) -> Result<Self, Response> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Wrapped {
            toml: String,
        }
        let json = is_json(request.headers());
        let bytes = whole_body(request, app).await?;
        let wrong = |error: String| Answer::new(StatusCode::BAD_REQUEST, error).into_response();
        if json {
            let form = |e| wrong(format!("expected {{\"toml\": \"…\"}}, found other JSON: {e}"));
            return serde_json::from_slice(&bytes).map(|w: Wrapped| Sections(w.toml)).map_err(form);
        }
        let text = |e| wrong(format!("expected sections of a fabric file as UTF-8 text: {e}"));
        String::from_utf8(bytes.into()).map(Sections).map_err(text)
    }
}

fn is_json(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or("");
    kind.split(';').next().is_some_and(|k| k.trim().eq_ignore_ascii_case("application/json"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_document_names_exactly_the_ways_through() {
        let document: serde_json::Value = serde_json::from_str(OPENAPI).unwrap();
        let mut said = Vec::new();
        for (path, methods) in document["paths"].as_object().unwrap() {
            for (method, operation) in methods.as_object().unwrap() {
                if method == "parameters" {
                    continue;
                }
                said.push(format!("{method} {path}"));
                let named = path.matches('{').count();
                let parameters = methods["parameters"].as_array().map_or(0, Vec::len);
                assert_eq!(named, parameters, "{path}: parameters of the path");
                assert!(operation["summary"].as_str().is_some_and(|s| !s.is_empty()), "{method} {path}");
                assert!(operation["responses"]["403"].is_object(), "{method} {path}");
                // Whatever has a body that is read as a whole may be sent too much of it, and too
                // slowly.
                let kinds = &operation["requestBody"]["content"];
                let has_body = kinds.as_object().is_some_and(|kinds| !kinds.contains_key("application/octet-stream"));
                for status in ["408", "413"] {
                    assert_eq!(operation["responses"][status].is_object(), has_body, "{status} of {method} {path}");
                }
                let may_fail = matches!(path.as_str(), "/v1/apply" | "/v1/config") && method != "get";
                assert!(!may_fail || operation["responses"]["500"].is_object(), "{method} {path}");
            }
        }
        said.sort();
        let mut are: Vec<_> = routes().iter().map(|(method, path, _)| format!("{method} {path}")).collect();
        are.sort();
        assert_eq!(said, are);
    }
}
