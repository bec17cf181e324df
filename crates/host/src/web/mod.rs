//! The page that shows a fabric in a browser: a small HTTP server on a loopback address, in a
//! process of its own.
//!
//! Purpose: a user looks at a fabric, types into consoles and takes captures. The page is not part
//! of the daemon: this is a client of its API like every other, and passes on only the requests
//! that `route` lists. What happens to this process does not touch the fabric.
//!
//! # Invariants
//! - Everybody on the machine can connect to the socket, also through a browser that shows a
//!   hostile page. So a request has to name this server as its host (no DNS rebinding). It has to
//!   come from its own page, if it says where it comes from (no forged requests); one that changes
//!   something has to say it. All but the empty page needs a session (`session`).
//! - Answers allow scripts and styles of this server only, and no other host, frame or form
//!   (`POLICY`).
//! - The default address is a random one of 127.0.0.0/8: browsers give cookies to all ports of a
//!   host, and so this host is shared with no other server.
//! - The daemon is asked for its status at most every [`FRESH`], however many pages look.
//!
//! # Limits
//! [`CONNECTIONS`] connections; [`STREAMS`] consoles and captures and [`REQUESTS`] other requests
//! at one time, fewer than the API gives one process; [`HEAD`] for a head, [`BODY`] for a body of
//! at most [`TYPED_BYTES`], [`ANSWER`] for an answer of the fabric, [`STALLED`] for a client that
//! does not read.

mod assets;
mod session;
mod stalled;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Body, Bytes, Frame, Incoming};
use hyper::header::{self, HeaderMap, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc};

use crate::api::blocks::Blocks;
use crate::api::client::quoted;
use crate::api::report::Fault;
use crate::api::services;
use crate::blocking;
use session::Sessions;
use stalled::Stalled;

/// Connections at one time; further ones are closed at once.
pub const CONNECTIONS: usize = 64;
/// Followed consoles and captures at one time.
pub const STREAMS: usize = 16;
/// Other requests that the fabric works on for pages at one time.
pub const REQUESTS: usize = 8;
/// Time for a request's head, and between two requests.
pub const HEAD: Duration = Duration::from_secs(10);
/// Time for a request's body.
pub const BODY: Duration = Duration::from_secs(5);
/// Time for an answer of the fabric, or for a guest to take what was typed.
pub const ANSWER: Duration = Duration::from_secs(10);
/// Time in which a client has to read some of its answer.
pub const STALLED: Duration = Duration::from_secs(30);
/// Bytes of typed text in one request.
pub const TYPED_BYTES: usize = 64 << 10;
/// Bytes of a token in a request, with room to spare.
const TOKEN_BYTES: usize = 256;
/// How old a status may be that is given to another page.
pub const FRESH: Duration = Duration::from_millis(400);
/// Bytes of a request's head, and of an answer that hyper buffers.
const HEAD_BYTES: usize = 32 << 10;
/// Largest answer of the fabric that is not endless.
const ANSWER_BYTES: usize = 16 << 20;
/// Longest capture, and its largest file.
const CAPTURE_SECONDS: u64 = 3600;
const CAPTURE_BYTES: u64 = 1 << 30;
/// Time in which a browser has to begin the download of a capture.
const PICKED_UP: Duration = Duration::from_secs(10);
/// Pause after a connection could not be accepted because no descriptor was free for it.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The name of the session's cookie.
const COOKIE: &str = "tombolo-session";

/// What a browser may do with answers. Styles with the nonce are those that xterm.js makes.
fn policy(nonce: &str) -> String {
    format!(
        "default-src 'none'; script-src 'self'; style-src 'self' 'nonce-{nonce}'; connect-src 'self'; img-src 'self'; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; \
         trusted-types 'none'"
    )
}

/// Why there is no page.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message names what each field holds")]
pub enum WebError {
    /// Not a loopback address.
    #[error(
        "{address} is not a loopback address (127.0.0.0/8): the page is only for this machine; from another one, use ssh -L"
    )]
    NotLoopback { address: Ipv4Addr },
    /// The socket was refused.
    #[error("listening on {address}: {source}{}", hint(source))]
    Listen { address: SocketAddrV4, source: io::Error },
    /// What every program needs.
    #[error("setting up the server: {0}")]
    System(#[from] io::Error),
}

fn hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrInUse => "; choose another --port, or leave it out",
        io::ErrorKind::PermissionDenied => "; ports below 1024 need root",
        _ => "",
    }
}

type Outgoing = UnsyncBoxBody<Bytes, Box<dyn std::error::Error + Send + Sync>>;

/// A server that listens, and has shown no token yet.
pub struct Server {
    listener: std::net::TcpListener,
    shared: Arc<WebState>,
}

struct WebState {
    fabric: String,
    socket: PathBuf,
    /// As browsers send it: `127.1.2.3:4567`.
    host: String,
    sessions: Mutex<Sessions>,
    streams: Arc<Semaphore>,
    requests: Semaphore,
    status: tokio::sync::Mutex<Option<Kept>>,
    tables: tokio::sync::Mutex<Option<Kept>>,
    services: tokio::sync::Mutex<Option<Kept>>,
    captures: Mutex<BTreeMap<String, Arc<Running>>>,
}

/// An answer, and when it was one.
type Kept = (Instant, StatusCode, Bytes);

/// A capture that is being downloaded.
struct Running {
    of: String,
    since: Instant,
    /// Frames and bytes so far.
    done: Mutex<(u64, u64)>,
    stop: Notify,
    /// What was captured, until the browser downloads it.
    pieces: Mutex<Option<mpsc::Receiver<Bytes>>>,
    /// Told when the browser has begun the download.
    taken: Notify,
}

impl Running {
    /// A capture that begins, and where it writes what was captured.
    fn new(of: &str) -> (Arc<Running>, mpsc::Sender<Bytes>) {
        let (sender, pieces) = mpsc::channel(4);
        let running = Running {
            of: of.into(),
            since: Instant::now(),
            done: Mutex::default(),
            stop: Notify::new(),
            pieces: Mutex::new(Some(pieces)),
            taken: Notify::new(),
        };
        (Arc::new(running), sender)
    }

    /// What was captured, for one browser.
    fn take(&self) -> Option<mpsc::Receiver<Bytes>> {
        let pieces = locked(&self.pieces).take();
        self.taken.notify_one();
        pieces
    }

    /// Ends when a browser has begun the download. What none downloads within [`PICKED_UP`] is
    /// dropped, and the capture ends by that.
    async fn picked_up(&self) {
        if tokio::time::timeout(PICKED_UP, self.taken.notified()).await.is_err() {
            self.take();
        }
    }
}

fn locked<T>(what: &Mutex<T>) -> MutexGuard<'_, T> {
    what.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A random address of 127.0.0.0/8, without those that others use by custom.
fn random_loopback() -> io::Result<Ipv4Addr> {
    let mut bytes = [0u8; 3];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    Ok(Ipv4Addr::new(127, bytes[0] | 64, bytes[1], bytes[2].clamp(2, 250)))
}

impl Server {
    /// Listens for browsers, for the fabric whose API is at `socket`. Port 0 is one that is free.
    ///
    /// # Errors
    /// If the address is not of this machine's loopback, or is taken.
    pub fn bind(fabric: &str, socket: &Path, address: Option<Ipv4Addr>, port: u16) -> Result<Server, WebError> {
        let address = address.map_or_else(random_loopback, Ok)?;
        if !address.is_loopback() {
            return Err(WebError::NotLoopback { address });
        }
        let address = SocketAddrV4::new(address, port);
        let listener = std::net::TcpListener::bind(address).map_err(|source| WebError::Listen { address, source })?;
        listener.set_nonblocking(true)?;
        let host = listener.local_addr()?.to_string();
        let shared = WebState {
            fabric: fabric.into(),
            socket: socket.into(),
            host,
            sessions: Mutex::default(),
            streams: Arc::new(Semaphore::new(STREAMS)),
            requests: Semaphore::new(REQUESTS),
            status: tokio::sync::Mutex::default(),
            tables: tokio::sync::Mutex::default(),
            services: tokio::sync::Mutex::default(),
            captures: Mutex::default(),
        };
        Ok(Server { listener, shared: Arc::new(shared) })
    }

    /// What makes links for browsers, also while the server runs.
    pub fn links(&self) -> Links {
        Links(self.shared.clone())
    }

    /// Serves until SIGINT or SIGTERM.
    ///
    /// # Errors
    /// If the system has no runtime for it.
    pub fn run(self) -> Result<(), WebError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            use tokio::signal::unix::{SignalKind, signal};
            let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
            let listener = TcpListener::from_std(self.listener)?;
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
                () = serve(listener, self.shared) => {}
            }
            Ok::<(), io::Error>(())
        })?;
        // A service that is asked for its report at this moment is not waited for.
        runtime.shutdown_background();
        Ok(())
    }
}

/// Makes links for browsers.
pub struct Links(Arc<WebState>);

impl Links {
    /// A link with a new token. The token is in the fragment, which browsers send to no server: the
    /// page does.
    ///
    /// # Errors
    /// If the kernel gives no random numbers.
    pub fn fresh(&self) -> io::Result<String> {
        let token = locked(&self.0.sessions).token(Instant::now())?;
        Ok(format!("http://{}/#token={token}", self.0.host))
    }
}

async fn serve(listener: TcpListener, shared: Arc<WebState>) {
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(ACCEPT_PAUSE).await;
            continue;
        };
        // Without a place it is closed at once.
        let Ok(place) = places.clone().try_acquire_owned() else { continue };
        tokio::spawn(connection(stream, shared.clone(), place));
    }
}

async fn connection(stream: TcpStream, shared: Arc<WebState>, _place: OwnedSemaphorePermit) {
    // Keys are to arrive one by one.
    let _ = stream.set_nodelay(true);
    let mut http = hyper::server::conn::http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEAD).max_buf_size(HEAD_BYTES);
    let answer = hyper::service::service_fn(move |request| {
        let shared = shared.clone();
        async move { Ok::<_, Infallible>(shared.answer(request).await) }
    });
    // A client that broke the protocol, or was too slow, has lost its connection; nothing is left
    // to be said.
    let _ = http.serve_connection(TokioIo::new(Stalled::new(stream, STALLED)), answer).await;
}

/// An answer that is not what was asked for.
fn fault(status: StatusCode, error: impl Into<String>) -> Response<Outgoing> {
    let body = Fault { error: error.into(), hint: None, problems: vec![] };
    json(status, serde_json::to_vec(&body).unwrap_or_default().into())
}

fn all_streams() -> Response<Outgoing> {
    let error = format!("{STREAMS} consoles and captures are open already; close one");
    fault(StatusCode::SERVICE_UNAVAILABLE, error)
}

fn full(bytes: Bytes) -> Outgoing {
    Full::new(bytes).map_err(|never| match never {}).boxed_unsync()
}

fn json(status: StatusCode, body: Bytes) -> Response<Outgoing> {
    let mut response = Response::new(full(body));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

fn nothing() -> Response<Outgoing> {
    let mut response = Response::new(full(Bytes::new()));
    *response.status_mut() = StatusCode::NO_CONTENT;
    response
}

/// The value of a header that is there once, as text.
fn only<'h>(headers: &'h HeaderMap, name: &str) -> Option<&'h str> {
    let mut values = headers.get_all(name).iter();
    values.next().filter(|_| values.next().is_none()).and_then(|value| value.to_str().ok())
}

/// Why a request is not of this server's page; `None` if it is.
fn foreign(request: &Request<impl Body>, host: &str) -> Option<&'static str> {
    let headers = request.headers();
    let named = request.uri().authority().is_none_or(|authority| authority.as_str() == host);
    if only(headers, "host") != Some(host) || !named {
        return Some("this server has another name: use the link that `tombolo web` printed");
    }
    let changes = request.method() != Method::GET && request.method() != Method::HEAD;
    let origin = headers.contains_key(header::ORIGIN).then(|| only(headers, "origin").unwrap_or(""));
    let own = |origin: &str| origin.strip_prefix("http://") == Some(host);
    if origin.map_or(changes, |origin| !own(origin)) {
        return Some("requests of other pages are refused");
    }
    // A link to the empty page may be on another page.
    let site = headers.contains_key("sec-fetch-site").then(|| only(headers, "sec-fetch-site").unwrap_or(""));
    if request.uri().path() != "/" && site.is_some_and(|site| site != "same-origin" && site != "none") {
        return Some("requests of other pages are refused");
    }
    None
}

/// The session that a request brings.
fn session_of(headers: &HeaderMap) -> Option<&str> {
    let cookies = headers.get_all(header::COOKIE).iter().filter_map(|value| value.to_str().ok());
    let mut pairs = cookies.flat_map(|line| line.split(';')).filter_map(|pair| pair.trim().split_once('='));
    pairs.find(|(name, _)| *name == COOKIE).map(|(_, value)| value)
}

/// What a path of the page's interface is for.
#[derive(Debug, PartialEq, Eq)]
enum Route {
    Status,
    Tables,
    Services,
    Captures,
    /// Events after that number.
    Events(Option<u64>),
    Console(String),
    Type(String),
    StartCapture(Wanted),
    Download(String),
    StopCapture(String),
    CloseSession,
}

/// A capture that a page asks for.
#[derive(Debug, Default, PartialEq, Eq)]
struct Wanted {
    /// Chosen by the page, to stop it.
    id: String,
    /// "ports" or "networks".
    kind: String,
    name: String,
    filter: String,
    seconds: u64,
}

/// A path's or query's text: %XX and + are undone. `None` if that is no text.
fn unquoted(text: &str) -> Option<String> {
    let mut bytes = text.bytes();
    let mut out = Vec::with_capacity(text.len());
    while let Some(byte) = bytes.next() {
        out.push(match byte {
            b'%' => {
                let (high, low) = (char::from(bytes.next()?).to_digit(16)?, char::from(bytes.next()?).to_digit(16)?);
                u8::try_from(high * 16 + low).ok()?
            }
            b'+' => b' ',
            other => other,
        });
    }
    String::from_utf8(out).ok()
}

/// What is asked for; all that is not listed here does not exist.
fn route(method: &Method, path: &str, query: &str) -> Option<Route> {
    let words: Option<BTreeMap<&str, String>> = query
        .split('&')
        .filter(|pair| !pair.is_empty())
        .map(|pair| pair.split_once('=').and_then(|(key, value)| Some((key, unquoted(value)?))))
        .collect();
    let mut words = words?;
    let mut take = |key: &str| words.remove(key).unwrap_or_default();
    let found = match (method, path) {
        (&Method::GET, "/api/status") => Route::Status,
        (&Method::GET, "/api/tables") => Route::Tables,
        (&Method::GET, "/api/services") => Route::Services,
        (&Method::GET, "/api/captures") => Route::Captures,
        (&Method::GET, "/api/events") => match take("after").as_str() {
            "" => Route::Events(None),
            after => Route::Events(Some(after.parse().ok()?)),
        },
        (&Method::GET, "/api/capture") => Route::Download(take("id")),
        (&Method::POST, "/api/capture") => {
            let seconds = take("seconds").parse().ok().filter(|s| (1..=CAPTURE_SECONDS).contains(s))?;
            let (id, kind) = (take("id"), take("kind"));
            let plain = (8..=64).contains(&id.len()) && id.bytes().all(|b| b.is_ascii_alphanumeric());
            if !plain || !matches!(kind.as_str(), "ports" | "networks") {
                return None;
            }
            Route::StartCapture(Wanted { id, kind, name: take("name"), filter: take("filter"), seconds })
        }
        (&Method::GET, "/api/console") => Route::Console(take("machine")),
        (&Method::POST, "/api/console") => Route::Type(take("machine")),
        (&Method::POST, "/api/capture/stop") => Route::StopCapture(take("id")),
        (&Method::POST, "/session/close") => Route::CloseSession,
        _ => return None,
    };
    words.is_empty().then_some(found)
}

impl WebState {
    /// The answer to one request, with the headers that each answer has.
    async fn answer(self: Arc<Self>, request: Request<Incoming>) -> Response<Outgoing> {
        let mut nonce = [0u8; 16];
        // Without it no style has the nonce that an empty one would allow.
        let _ = rustix::rand::getrandom(&mut nonce, rustix::rand::GetRandomFlags::empty());
        let nonce: String = nonce.iter().map(|byte| format!("{byte:02x}")).collect();
        let mut response = match foreign(&request, &self.host) {
            Some(why) => fault(StatusCode::FORBIDDEN, why),
            None => match assets::find(request.uri().path(), &nonce) {
                Some((kind, body)) if matches!(*request.method(), Method::GET | Method::HEAD) => {
                    let mut response = Response::new(full(body));
                    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
                    response
                }
                Some(_) => fault(StatusCode::METHOD_NOT_ALLOWED, "this can only be read"),
                None => self.clone().act(request).await,
            },
        };
        let headers = response.headers_mut();
        if let Ok(policy) = HeaderValue::from_str(&policy(&nonce)) {
            headers.insert(header::CONTENT_SECURITY_POLICY, policy);
        }
        for (name, value) in [
            ("x-content-type-options", "nosniff"),
            ("x-frame-options", "DENY"),
            ("referrer-policy", "no-referrer"),
            ("cache-control", "no-store"),
            ("cross-origin-opener-policy", "same-origin"),
            ("cross-origin-resource-policy", "same-origin"),
            ("permissions-policy", "clipboard-read=(), camera=(), microphone=(), geolocation=()"),
        ] {
            headers.insert(name, HeaderValue::from_static(value));
        }
        response
    }

    async fn act(self: Arc<Self>, request: Request<Incoming>) -> Response<Outgoing> {
        let (parts, body) = request.into_parts();
        if parts.method == Method::POST && parts.uri.path() == "/session" {
            return self.open(body).await;
        }
        let session = session_of(&parts.headers).unwrap_or_default();
        if !locked(&self.sessions).knows(session, Instant::now()) {
            let error = "no session: open the link that `tombolo web` printed; Enter in its terminal prints another";
            return fault(StatusCode::UNAUTHORIZED, error);
        }
        let Some(route) = route(&parts.method, parts.uri.path(), parts.uri.query().unwrap_or_default()) else {
            return fault(StatusCode::NOT_FOUND, "the page has no such request");
        };
        match route {
            Route::Status => self.kept(&self.status, "/v1/status").await,
            Route::Tables => self.kept(&self.tables, "/v1/tables").await,
            Route::Services => self.services().await,
            Route::Captures => self.captures(),
            Route::Events(after) => {
                let after = after.map_or_else(|| "?limit=500".into(), |n| format!("?limit=500&after={n}"));
                self.asked(&format!("/v1/events{after}")).await
            }
            Route::Console(machine) => self.console(&machine).await,
            Route::Type(machine) => self.type_to(&machine, body).await,
            Route::StartCapture(wanted) => self.capture(wanted).await,
            Route::Download(id) => self.download(&id),
            Route::StopCapture(id) => match locked(&self.captures).get(&id) {
                Some(capture) => {
                    capture.stop.notify_one();
                    nothing()
                }
                None => fault(StatusCode::NOT_FOUND, "that capture has ended"),
            },
            Route::CloseSession => {
                locked(&self.sessions).close(session);
                nothing()
            }
        }
    }

    /// Gives a session for a token.
    async fn open(&self, body: Incoming) -> Response<Outgoing> {
        let token = match collected(body, TOKEN_BYTES).await {
            Ok(token) => token,
            Err(refused) => return refused,
        };
        let token = String::from_utf8_lossy(&token);
        match locked(&self.sessions).open(token.trim(), Instant::now()) {
            Ok(Some(session)) => {
                let cookie = format!("{COOKIE}={session}; HttpOnly; SameSite=Strict; Path=/");
                let mut response = nothing();
                if let Ok(cookie) = HeaderValue::from_str(&cookie) {
                    response.headers_mut().insert(header::SET_COOKIE, cookie);
                }
                response
            }
            Ok(None) => fault(StatusCode::FORBIDDEN, "that token is wrong, too old or was used already"),
            Err(error) => fault(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
        }
    }

    /// Sends a request to the fabric; gives the answer once its head is there.
    async fn ask(&self, method: Method, path: &str, body: Bytes) -> Result<Response<Incoming>, Response<Outgoing>> {
        let gone = |what: String| fault(StatusCode::BAD_GATEWAY, format!("the fabric {} {what}", self.fabric));
        let talk = async {
            let stream = UnixStream::connect(&self.socket).await.map_err(|e| gone(format!("does not run ({e})")))?;
            let broken = |e: hyper::Error| gone(format!("gave no answer ({e})"));
            let (mut sender, connection) =
                hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(broken)?;
            tokio::spawn(connection);
            let request = Request::builder()
                .method(method)
                .uri(path)
                .header(header::HOST, "tombolo")
                .body(Full::new(body))
                .map_err(|e| gone(format!("cannot be asked that ({e})")))?;
            sender.send_request(request).await.map_err(broken)
        };
        let late = |_| fault(StatusCode::GATEWAY_TIMEOUT, "the fabric did not answer in time");
        tokio::time::timeout(ANSWER, talk).await.map_err(late)?
    }

    /// A whole answer of the fabric.
    async fn whole(&self, path: &str) -> Result<(StatusCode, Bytes), Response<Outgoing>> {
        let Ok(_turn) = self.requests.acquire().await else {
            return Err(fault(StatusCode::SERVICE_UNAVAILABLE, "this server is ending"));
        };
        let answer = self.ask(Method::GET, path, Bytes::new()).await?;
        let status = answer.status();
        let body = Limited::new(answer.into_body(), ANSWER_BYTES).collect();
        match tokio::time::timeout(ANSWER, body).await {
            Ok(Ok(body)) => Ok((status, body.to_bytes())),
            _ => Err(fault(StatusCode::BAD_GATEWAY, "the fabric's answer did not come to its end")),
        }
    }

    async fn asked(&self, path: &str) -> Response<Outgoing> {
        self.whole(path).await.map_or_else(|refused| refused, |(status, body)| json(status, body))
    }

    /// The same, asked for only if the last answer is too old. Pages that ask meanwhile get the
    /// same answer.
    async fn kept(&self, place: &tokio::sync::Mutex<Option<Kept>>, path: &str) -> Response<Outgoing> {
        let mut place = place.lock().await;
        if let Some((at, status, body)) = &*place
            && at.elapsed() < FRESH
        {
            return json(*status, body.clone());
        }
        match self.whole(path).await {
            Ok((status, body)) => {
                *place = Some((Instant::now(), status, body.clone()));
                json(status, body)
            }
            Err(refused) => refused,
        }
    }

    /// The services of this user's folder, each with its report or null.
    async fn services(&self) -> Response<Outgoing> {
        let mut place = self.services.lock().await;
        if let Some((at, status, body)) = &*place
            && at.elapsed() < 2 * FRESH
        {
            return json(*status, body.clone());
        }
        let found = blocking::spawn(services::collect).await;
        let body = found.ok().and_then(|found| serde_json::to_vec(&found).ok()).map(Bytes::from);
        let Some(body) = body else {
            return fault(StatusCode::INTERNAL_SERVER_ERROR, "the services could not be asked");
        };
        *place = Some((Instant::now(), StatusCode::OK, body.clone()));
        json(StatusCode::OK, body)
    }

    /// The captures under way.
    fn captures(&self) -> Response<Outgoing> {
        let list: Vec<_> = locked(&self.captures)
            .iter()
            .map(|(id, capture)| {
                let (frames, bytes) = *locked(&capture.done);
                serde_json::json!({"id": id, "of": capture.of, "frames": frames, "bytes": bytes,
                    "seconds": capture.since.elapsed().as_secs_f64()})
            })
            .collect();
        json(StatusCode::OK, serde_json::to_vec(&list).unwrap_or_default().into())
    }

    fn stream_place(&self) -> Option<OwnedSemaphorePermit> {
        self.streams.clone().try_acquire_owned().ok()
    }

    /// Opens an endless answer of the fabric.
    async fn opened(&self, path: &str) -> Result<Incoming, Response<Outgoing>> {
        let answer = self.ask(Method::GET, path, Bytes::new()).await?;
        let status = answer.status();
        if status.is_success() {
            return Ok(answer.into_body());
        }
        let body = Limited::new(answer.into_body(), ANSWER_BYTES).collect().await;
        Err(json(status, body.map(|body| body.to_bytes()).unwrap_or_default()))
    }

    async fn console(&self, machine: &str) -> Response<Outgoing> {
        let opened = async {
            let place = self.stream_place().ok_or_else(all_streams)?;
            let body = self.opened(&format!("/v1/machines/{}/console?follow=1", quoted(machine))).await?;
            Ok(endless(Piped { body, _place: place }.boxed_unsync(), None))
        };
        opened.await.unwrap_or_else(|refused| refused)
    }

    /// Types a body into a console.
    async fn type_to(&self, machine: &str, body: Incoming) -> Response<Outgoing> {
        let typed = async {
            let text = collected(body, TYPED_BYTES).await?;
            let Ok(_turn) = self.requests.acquire().await else {
                return Err(fault(StatusCode::SERVICE_UNAVAILABLE, "this server is ending"));
            };
            let path = format!("/v1/machines/{}/console", quoted(machine));
            let answer = self.ask(Method::POST, &path, text).await?;
            let status = answer.status();
            if status.is_success() {
                return Ok(nothing());
            }
            let body = Limited::new(answer.into_body(), ANSWER_BYTES).collect().await;
            Ok(json(status, body.map(|body| body.to_bytes()).unwrap_or_default()))
        };
        typed.await.unwrap_or_else(|refused| refused)
    }

    /// Starts a capture, whose file the page then downloads.
    async fn capture(self: Arc<Self>, wanted: Wanted) -> Response<Outgoing> {
        let started = async {
            let place = self.stream_place().ok_or_else(all_streams)?;
            let filter = Some(quoted(&wanted.filter)).filter(|f| !f.is_empty()).map(|f| format!("?filter={f}"));
            let path = format!("/v1/{}/{}/capture{}", wanted.kind, quoted(&wanted.name), filter.unwrap_or_default());
            let body = self.opened(&path).await?;
            let (running, sender) = Running::new(&wanted.name);
            {
                let mut captures = locked(&self.captures);
                if captures.contains_key(&wanted.id) {
                    return Err(fault(StatusCode::CONFLICT, "a capture has that identifier already"));
                }
                captures.insert(wanted.id.clone(), running.clone());
            }
            let shared = self.clone();
            tokio::spawn(async move {
                let _place = place;
                let limit = Duration::from_secs(wanted.seconds);
                // A capture that is over keeps its place until its file is picked up, and no
                // longer.
                tokio::join!(record(body, &running, limit, sender), running.picked_up());
                locked(&shared.captures).remove(&wanted.id);
            });
            Ok(nothing())
        };
        started.await.unwrap_or_else(|refused| refused)
    }

    /// The file of a capture that was started, which ends by itself, or by `StopCapture`.
    fn download(&self, id: &str) -> Response<Outgoing> {
        let found = locked(&self.captures).get(id).cloned();
        let pieces = found.as_ref().and_then(|running| running.take());
        let (Some(running), Some(pieces)) = (found, pieces) else {
            return fault(StatusCode::NOT_FOUND, "no capture with that identifier waits to be downloaded");
        };
        // Names have letters, digits and hyphens; anything else does not come into a file's name.
        let name: String = running.of.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '-').collect();
        endless(Channel(pieces).boxed_unsync(), Some(format!("attachment; filename=\"{name}.pcapng\"")))
    }
}

/// Passes whole blocks on until the capture is stopped, its time is over, it is too large, or
/// either side ends. None of these waits for a browser that reads slowly.
async fn record(
    mut body: impl Body<Data = Bytes> + Unpin,
    running: &Running,
    limit: Duration,
    sender: mpsc::Sender<Bytes>,
) {
    let mut blocks = Blocks::default();
    let mut until = std::pin::pin!(tokio::time::sleep(limit));
    let mut total = 0u64;
    while total < CAPTURE_BYTES {
        let frame = tokio::select! {
            () = running.stop.notified() => return,
            () = &mut until => return,
            () = sender.closed() => return,
            frame = body.frame() => frame,
        };
        let Some(Ok(frame)) = frame else { return };
        let Ok(piece) = frame.into_data() else { continue };
        let mut whole = Vec::with_capacity(piece.len());
        let Ok(ControlFlow::Continue(())) = blocks.feed(&piece, None, &mut whole) else { return };
        total += whole.len() as u64;
        *locked(&running.done) = (blocks.frames(), total);
        if whole.is_empty() {
            continue;
        }
        tokio::select! {
            () = running.stop.notified() => return,
            () = &mut until => return,
            sent = sender.send(whole.into()) => if sent.is_err() { return },
        }
    }
}

/// An endless answer.
fn endless(body: Outgoing, disposition: Option<String>) -> Response<Outgoing> {
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    if let Some(disposition) = disposition.and_then(|text| HeaderValue::from_str(&text).ok()) {
        headers.insert(header::CONTENT_DISPOSITION, disposition);
    }
    response
}

/// A whole body of a client, of at most so many bytes.
async fn collected(body: Incoming, limit: usize) -> Result<Bytes, Response<Outgoing>> {
    match tokio::time::timeout(BODY, Limited::new(body, limit).collect()).await {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(_)) => Err(fault(StatusCode::PAYLOAD_TOO_LARGE, format!("at most {limit} bytes at once"))),
        Err(_) => Err(fault(StatusCode::REQUEST_TIMEOUT, "the body did not arrive in time")),
    }
}

/// An endless answer of the fabric, which keeps its place.
struct Piped {
    body: Incoming,
    _place: OwnedSemaphorePermit,
}

impl Body for Piped {
    type Data = Bytes;
    type Error = Box<dyn std::error::Error + Send + Sync>;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx).map_err(Into::into)
    }
}

struct Channel(mpsc::Receiver<Bytes>);

impl Body for Channel {
    type Data = Bytes;
    type Error = Box<dyn std::error::Error + Send + Sync>;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        self.0.poll_recv(cx).map(|piece| piece.map(|piece| Ok(Frame::data(piece))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOST: &str = "127.1.2.3:4567";

    fn request(method: &str, path: &str, headers: &[(&str, &str)]) -> Request<Full<Bytes>> {
        let start = Request::builder().method(method).uri(path);
        let all = headers.iter().fold(start, |request, (name, value)| request.header(*name, *value));
        all.body(Full::default()).unwrap()
    }

    #[tokio::test]
    async fn a_capture_ends_when_it_is_stopped_or_its_time_is_over_though_its_browser_does_not_read() {
        // A frame block without content, over and over, for a browser that takes none.
        let block: Bytes = [6u32, 12, 12].iter().flat_map(|word| word.to_le_bytes()).collect();
        for limit in [Duration::from_millis(20), Duration::from_secs(3600)] {
            let (sender, _pieces) = mpsc::channel(1);
            let (feed, source) = mpsc::channel(8);
            for _ in 0..4 {
                feed.try_send(block.clone()).unwrap();
            }
            let (running, _) = Running::new("web");
            let recorded = record(Channel(source), &running, limit, sender);
            let stopped = async {
                if limit < Duration::from_secs(1) {
                    return;
                }
                // The first is in the channel, the second waits for room there.
                while locked(&running.done).0 < 2 {
                    tokio::task::yield_now().await;
                }
                running.stop.notify_one();
            };
            let both = async { tokio::join!(recorded, stopped) };
            assert!(tokio::time::timeout(Duration::from_secs(20), both).await.is_ok(), "it waits for its browser");
        }
    }

    #[test]
    fn only_its_own_page_reaches_the_server() {
        let own = format!("http://{HOST}");
        let host = ("host", HOST);
        for (method, path, headers) in [
            ("GET", "/", vec![host]),
            ("GET", "/api/status", vec![host, ("sec-fetch-site", "same-origin")]),
            ("GET", "/api/status", vec![host, ("origin", &own)]),
            ("POST", "/session", vec![host, ("origin", &own), ("sec-fetch-site", "same-origin")]),
            ("GET", "/", vec![host, ("sec-fetch-site", "cross-site")]),
        ] {
            assert_eq!(foreign(&request(method, path, &headers), HOST), None, "{method} {path} {headers:?}");
        }
        for (method, path, headers) in [
            ("GET", "/", vec![]),
            ("GET", "/", vec![("host", "evil.example:4567")]),
            ("GET", "/", vec![("host", "127.1.2.3")]),
            ("GET", "/", vec![host, ("host", "evil.example")]),
            ("GET", "http://evil.example/", vec![host]),
            ("POST", "/session", vec![host]),
            ("POST", "/session", vec![host, ("origin", "null")]),
            ("POST", "/session", vec![host, ("origin", "http://127.1.2.3:4568")]),
            ("POST", "/session", vec![host, ("origin", &own), ("origin", "http://evil.example")]),
            ("GET", "/api/status", vec![host, ("origin", "https://127.1.2.3:4567")]),
            ("GET", "/api/status", vec![host, ("sec-fetch-site", "same-site")]),
            ("GET", "/app.js", vec![host, ("sec-fetch-site", "cross-site")]),
        ] {
            assert!(foreign(&request(method, path, &headers), HOST).is_some(), "{method} {path} {headers:?}");
        }
    }

    #[test]
    fn only_what_the_page_needs_is_passed_on() {
        let get = |path: &str, query: &str| route(&Method::GET, path, query);
        assert_eq!(get("/api/events", "after=7"), Some(Route::Events(Some(7))));
        assert_eq!(get("/api/console", "machine=..%2Fdown"), Some(Route::Console("../down".into())));
        let wanted = Wanted {
            id: "12345678".into(),
            kind: "ports".into(),
            name: "web".into(),
            filter: "tcp port 80".into(),
            seconds: 5,
        };
        let post = |query: &str| route(&Method::POST, "/api/capture", query);
        let query = "id=12345678&kind=ports&name=web&filter=tcp+port%2080&seconds=5";
        assert_eq!(post(query), Some(Route::StartCapture(wanted)));
        assert_eq!(get("/api/capture", "id=12345678"), Some(Route::Download("12345678".into())));
        for query in [
            "id=12345678&kind=ports&name=web&seconds=0",
            "id=12345678&kind=ports&name=web&seconds=3601",
            "id=12345678&kind=ports&name=web",
            "id=1&kind=ports&name=web&seconds=1",
            "id=12345678&kind=../down&name=web&seconds=1",
        ] {
            assert_eq!(post(query), None, "{query}");
        }
        for (path, query) in [
            ("/v1/status", ""),
            ("/api/down", ""),
            ("/api/../v1/down", ""),
            ("/api/status", "x=1"),
            ("/api/status", "x"),
            ("/api/events", "after=-1"),
            ("/api/console", "machine=%f"),
            ("/api/console", "machine=%ff"),
        ] {
            assert_eq!(get(path, query), None, "{path}?{query}");
        }
        assert_eq!(route(&Method::DELETE, "/api/status", ""), None);
        assert_eq!(route(&Method::POST, "/api/status", ""), None);
    }

    #[test]
    fn the_session_is_found_among_other_cookies() {
        let of = |lines: &[&str]| {
            let headers = lines.iter().map(|line| (header::COOKIE, HeaderValue::from_str(line).unwrap())).collect();
            session_of(&headers).map(String::from)
        };
        assert_eq!(of(&["a=1; tombolo-session=abc; b=2"]), Some("abc".into()));
        assert_eq!(of(&["a=1", "tombolo-session=abc"]), Some("abc".into()));
        assert_eq!(of(&["xtombolo-session=abc", "tombolo-session"]), None);
    }

    #[test]
    fn it_listens_on_loopback_only() {
        let socket = Path::new("/nonexistent");
        let refused = Server::bind("demo", socket, Some(Ipv4Addr::UNSPECIFIED), 0).err().unwrap().to_string();
        assert!(refused.contains("not a loopback address"), "{refused}");
        let server = Server::bind("demo", socket, None, 0).unwrap();
        let std::net::SocketAddr::V4(address) = server.listener.local_addr().unwrap() else { panic!() };
        assert!(address.ip().is_loopback() && *address.ip() != Ipv4Addr::LOCALHOST);
        let link = server.links().fresh().unwrap();
        assert!(link.starts_with(&format!("http://{address}/#token=")), "{link}");
        let taken = Server::bind("demo", socket, Some(*address.ip()), address.port()).err().unwrap().to_string();
        assert!(taken.contains("choose another --port"), "{taken}");
    }
}
