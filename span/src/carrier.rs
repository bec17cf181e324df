//! Messages between machines, over zenoh.
//!
//! # Keys
//! Machine `M` of site `S` publishes its changes at `tombolo/S/M/change`, answers questions at
//! `tombolo/S/M/state`, and shows by the liveliness token `tombolo/S/M/here` that it is there. So
//! one rule for each machine, "writes only below `tombolo/S/M`", keeps machines from speaking for
//! others. With TLS, zenoh's access control enforces it by the common name of the certificate of a
//! connection; machines that are not peers may do nothing at all.
//!
//! What one machine says to another in calls goes to that one only: a third one that subscribed it,
//! and did not read, would hold it up. And no machine passes on what another one says: zenoh's
//! peers do so for its clients, and with one thread ([`RUNTIMES`]) such a message may wait for room
//! that only that thread makes.
//!
//! # Threads
//! zenoh has runtimes of its own, and cannot be used from a single-threaded one. So the session is
//! on a thread that takes [`Order`]s. What comes is put into a bounded channel by zenoh's threads;
//! if that is full, it is dropped. A lost change is repaired by the next question. Answers are sent
//! by a second thread, since zenoh lets the one that asks decide whether they wait for room.
//!
//! zenoh-link-tls 1.10.2 keeps the state of a TLS connection in a cell that one task reads with and
//! another one writes with, each behind a lock of its own. On two threads that is a data race,
//! which cost connections under load. So all of zenoh's reading and writing is on one thread
//! ([`RUNTIMES`]).
//!
//! # Who connects
//! Of two machines, the one whose name sorts first connects to the other one. If both did, they
//! would have two connections, and when one end gives up both and connects again while the other
//! end still has one, zenoh 1.10.2 adds the new connection to what that end has: it expects messages
//! with the old numbers, drops those with new ones, and shows nothing of its own again. The two did
//! not hear each other for as long as they had before. With one connection for each two machines,
//! the end that still has it refuses the new one until it has noticed too.
//!
//! # Routers
//! With a router of zenoh the session is its client: everything goes through it, and this machine
//! listens nowhere. Then the router has the rules that keep machines from speaking for others,
//! since it is the only one that sees their certificates.
//!
//! # Loss
//! Changes are sent with `CongestionControl::Drop`, so that a machine that takes nothing does not
//! hold up the others.

use std::io::Read;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak, mpsc as orders};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;
use tombolo_span::message::{MAX_CHANGE_BYTES, MAX_QUESTION_BYTES, MAX_STATE_BYTES};
use zenoh::Wait;
use zenoh::config::Config;
use zenoh::key_expr::KeyExpr;
use zenoh::qos::{CongestionControl, Priority};
use zenoh::query::{ConsolidationMode, Query, QueryTarget};
use zenoh::sample::SampleKind;

use crate::say;
use crate::streams::Streams;

/// Things that came and were not looked at yet.
const WAITING: usize = 4096;
/// How long a question waits for its answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
/// A connection over which nothing came for so long has ended, in milliseconds. zenoh sends
/// something four times in that time.
const LEASE_MS: u32 = 4000;
/// A link that takes nothing for so long is closed, in microseconds. Less than what ends streams
/// and links, since zenoh's only thread may wait for it, and with it all others.
const BLOCKED_US: u32 = 2_000_000;
/// Questions that were not answered yet.
const QUESTIONS: usize = 256;
/// Orders that were not carried out yet. Those beyond are dropped, as what is lost on the way.
const ORDERS: usize = 1024;

/// The variable in which zenoh expects how its threads are shared.
pub const RUNTIMES_VARIABLE: &str = "ZENOH_RUNTIME";
/// What is read is read by the only thread that writes. span/.cargo/config.toml has the same for
/// tests.
pub const RUNTIMES: &str = "(tx: (worker_threads: 1), rx: (handover: tx))";
/// Messages by which a machine asks others, as zenoh's access control calls them.
const ASKS: [&str; 4] = ["query", "declare_subscriber", "declare_liveliness_subscriber", "liveliness_query"];
/// Those by which it speaks.
const SAYS: [&str; 4] = ["put", "declare_queryable", "liveliness_token", "reply"];
/// Between two attempts to reach a router for the first time.
const RETRY: Duration = Duration::from_secs(1);

/// Another machine, or a router.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its name, which is the common name of its certificate.
    pub name: String,
    /// Where it listens; `None` for a machine that is reached by way of a router.
    pub address: Option<SocketAddr>,
}

impl std::fmt::Display for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.address {
            Some(address) => write!(f, "{}={address}", self.name),
            None => f.write_str(&self.name),
        }
    }
}

/// How this machine connects to the others.
pub struct Carriage<'a> {
    /// What all machines of one site have in common.
    pub site: &'a str,
    /// This machine's name.
    pub machine: &'a str,
    /// Where it listens; `None` where it is a client of routers.
    pub listen: Option<SocketAddr>,
    /// The other machines. It connects to those whose names sort after its own.
    pub peers: &'a [Peer],
    /// Routers of zenoh, of which one that is there is used. Without, all machines connect to each
    /// other.
    pub routers: &'a [Peer],
    /// A folder with `ca.pem`, `NAME.pem` and `NAME.key`; without, nothing is encrypted, and no
    /// machine proves who it is.
    pub keys: Option<&'a Path>,
}

/// What comes from other machines.
#[derive(Debug)]
pub enum Heard {
    /// A machine told a change.
    Change {
        /// The machine.
        from: String,
        /// The change.
        bytes: Vec<u8>,
    },
    /// A machine asks.
    Question {
        /// What the answer goes to.
        question: Question,
        /// What it asks.
        bytes: Vec<u8>,
    },
    /// A machine answered.
    Answer {
        /// The machine.
        from: String,
        /// The answer.
        bytes: Vec<u8>,
        /// From the question to the answer.
        round_trip: Duration,
    },
    /// A machine has connected.
    There(String),
}

/// What is to be sent.
pub enum Order {
    /// A change, to all.
    Tell(Vec<u8>),
    /// A question, to one machine.
    Ask {
        /// The machine.
        machine: String,
        /// The question.
        bytes: Vec<u8>,
    },
}

/// Why there is no carrier.
#[derive(Debug, thiserror::Error)]
pub enum CarrierError {
    /// zenoh refused.
    #[error("{what}: {source}")]
    Zenoh {
        /// What was tried.
        what: String,
        /// zenoh's words.
        source: zenoh::Error,
    },
    /// A key file.
    #[error("{}: {source}; `tombolo service keys` makes keys", path.display())]
    Key {
        /// The file.
        path: std::path::PathBuf,
        /// The system's words.
        source: std::io::Error,
    },
    /// What a key file has in it.
    #[error("{}: expected {expected} in PEM; `tombolo service keys` makes keys", path.display())]
    Content {
        /// The file.
        path: std::path::PathBuf,
        /// What it should have.
        expected: &'static str,
    },
    /// Who may use the private key.
    #[error(
        "{}: expected a private key that no other user can read and only its owner can write, found mode {mode:04o}; \
         run chmod 600 on it", path.display()
    )]
    Open {
        /// The file.
        path: std::path::PathBuf,
        /// Its permissions.
        mode: u32,
    },
    /// The thread ended before it was ready.
    #[error("the thread of the carrier ended: {0}")]
    Thread(String),
}

fn failed(what: impl Into<String>) -> impl FnOnce(zenoh::Error) -> CarrierError {
    let what = what.into();
    move |source| CarrierError::Zenoh { what, source }
}

/// A question's end: with its answer, or without.
type End = (Box<Query>, Option<Vec<u8>>);

/// A question of another machine. zenoh sends something at its end, answered or not, and waits
/// where that machine does not read. So a thread of its own ends all of them.
pub struct Question {
    query: Option<Box<Query>>,
    ends: orders::Sender<End>,
}

impl std::fmt::Debug for Question {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Question").field("query", &self.query).finish_non_exhaustive()
    }
}

impl Question {
    /// Answers it.
    pub fn answer(mut self, bytes: Vec<u8>) {
        self.end(Some(bytes));
    }

    fn end(&mut self, answer: Option<Vec<u8>>) {
        if let Some(query) = self.query.take() {
            // The thread ends with the last sender.
            let _ = self.ends.send((query, answer));
        }
    }
}

impl Drop for Question {
    fn drop(&mut self) {
        self.end(None);
    }
}

/// A connection to the other machines, and its threads.
pub struct Carrier {
    /// `None` once it ends.
    orders: Option<orders::SyncSender<Order>>,
    thread: Option<JoinHandle<()>>,
}

/// The kind of a private key in PEM, the last words of all kinds of them.
const PRIVATE: &str = "PRIVATE KEY";
/// Permissions that a private key must not give: anything to other users, and writing to a group.
const TOO_OPEN: u32 = 0o027;

/// The path of a key file, which can be read and has a block of that kind in it. zenoh says less of
/// one that has not.
fn key_file(path: std::path::PathBuf, kind: &'static str) -> Result<String, CarrierError> {
    let read = || -> std::io::Result<(u32, String)> {
        let mut file = std::fs::File::open(&path)?;
        let mode = file.metadata()?.permissions().mode() & 0o7777;
        let mut text = Vec::new();
        file.read_to_end(&mut text)?;
        Ok((mode, String::from_utf8_lossy(&text).into_owned()))
    };
    match read() {
        Err(source) => Err(CarrierError::Key { path, source }),
        Ok((mode, _)) if kind == PRIVATE && mode & TOO_OPEN != 0 => Err(CarrierError::Open { path, mode }),
        Ok((_, text)) if !text.contains(&format!("{kind}-----")) => {
            let expected = if kind == PRIVATE { "a private key" } else { "a certificate" };
            Err(CarrierError::Content { path, expected })
        }
        Ok(_) => Ok(path.display().to_string()),
    }
}

impl Carriage<'_> {
    /// Whether the keys are there, and zenoh takes the settings. Connects to nothing.
    ///
    /// # Errors
    /// [`CarrierError`].
    pub fn check(&self) -> Result<(), CarrierError> {
        self.config().map(drop)
    }

    /// What all keys of the site begin with.
    pub fn base(&self) -> String {
        format!("tombolo/{}", self.site)
    }

    fn endpoint(&self, address: SocketAddr) -> String {
        format!("{}/{address}", if self.keys.is_some() { "tls" } else { "tcp" })
    }

    /// zenoh's settings. See `DEFAULT_CONFIG.json5` of zenoh for each.
    fn config(&self) -> Result<Config, CarrierError> {
        let mut config = Config::default();
        let mut set = |key: &str, value: serde_json::Value| {
            config.insert_json5(key, &value.to_string()).map_err(failed(format!("zenoh's setting {key}")))
        };
        let is_client = !self.routers.is_empty();
        set("mode", if is_client { "client" } else { "peer" }.into())?;
        let listen: Vec<String> = self.listen.iter().map(|address| self.endpoint(*address)).collect();
        set("listen/endpoints", listen.into())?;
        let others = if is_client { self.routers } else { self.peers };
        let connects = |other: &&Peer| is_client || *self.machine < *other.name;
        let addresses = others.iter().filter(connects).filter_map(|peer| peer.address);
        let endpoints: Vec<String> = addresses.map(|address| self.endpoint(address)).collect();
        set("connect/endpoints", endpoints.into())?;
        if is_client {
            // Each router once; then this program tries again. A connection that breaks later is
            // zenoh's to make again.
            set("connect/timeout_ms", 0.into())?;
            set("connect/exit_on_failure", true.into())?;
        }
        let retry = serde_json::json!({ "period_init_ms": 250, "period_max_ms": 4000, "period_increase_factor": 2 });
        set("connect/retry", retry)?;
        set("scouting/multicast/enabled", false.into())?;
        set("scouting/gossip/enabled", false.into())?;
        set("transport/link/tx/lease", LEASE_MS.into())?;
        set("transport/link/tx/queue/congestion_control/block/wait_before_close", BLOCKED_US.into())?;
        set("transport/link/rx/max_message_size", MAX_STATE_BYTES.into())?;
        set("transport/unicast/max_sessions", (self.peers.len() + 8).into())?;
        let Some(keys) = self.keys else { return Ok(config) };
        let pem = |name: &str, kind| key_file(keys.join(name), kind);
        let certificate = pem(&format!("{}.pem", self.machine), "CERTIFICATE")?;
        let key = pem(&format!("{}.key", self.machine), PRIVATE)?;
        let tls = serde_json::json!({
            "root_ca_certificate": pem("ca.pem", "CERTIFICATE")?,
            "listen_certificate": certificate, "listen_private_key": key,
            "connect_certificate": certificate, "connect_private_key": key,
            "enable_mtls": true,
            // Endpoints are addresses, which certificates do not name. That a machine speaks for
            // itself only is ensured by the rules below, on each connection.
            "verify_name_on_connect": false,
        });
        set("transport/link/tls", tls)?;
        set("transport/link/protocols", vec!["tls"].into())?;
        set("access_control", self.rules())?;
        Ok(config)
    }

    /// What each machine may do. A router passes on what all may, and is believed.
    fn rules(&self) -> serde_json::Value {
        if self.routers.is_empty() {
            return self.rules_for(self.machine, self.peers.iter().map(|peer| peer.name.as_str()));
        }
        let names: Vec<&str> = self.routers.iter().map(|router| router.name.as_str()).collect();
        let every = [ASKS, SAYS].concat();
        let all = &["**".to_string()];
        let rules = [self.rule("to", "egress", &every, all), self.rule("pass", "ingress", &every, all)];
        serde_json::json!({
            "enabled": true, "default_permission": "deny", "rules": rules,
            "subjects": [{ "id": "routers", "cert_common_names": names }],
            "policies": [{ "rules": ["to", "pass"], "subjects": ["routers"] }],
        })
    }

    fn rule(&self, id: &str, flow: &str, messages: &[&str], keys: &[String]) -> serde_json::Value {
        let keys: Vec<_> = keys.iter().map(|key| format!("{}/{key}", self.base())).collect();
        serde_json::json!({ "id": id, "permission": "allow", "flows": [flow], "messages": messages, "key_exprs": keys })
    }

    /// Rules where these machines connect to `own`, which is a machine, or "*" for a router. A
    /// machine speaks only for itself, and passes nothing on for others: neither may they have it
    /// do so.
    fn rules_for<'b>(&self, own: &str, machines: impl Iterator<Item = &'b str>) -> serde_json::Value {
        let says = |a: &str, b: &str| {
            [format!("{a}/change"), format!("{a}/state"), format!("{a}/here"), format!("{a}/calls/{b}")]
        };
        let asks =
            |a: &str, b: &str| ["*/change".into(), "*/here".into(), format!("{b}/state"), format!("*/calls/{a}")];
        let (mut rules, mut subjects, mut policies) = (Vec::new(), Vec::new(), Vec::new());
        for name in machines {
            let ids = ["says", "asks", "is told", "is asked"].map(|what| format!("{name} {what}"));
            rules.push(self.rule(&ids[0], "ingress", &SAYS, &says(name, own)));
            rules.push(self.rule(&ids[1], "ingress", &ASKS, &asks(name, own)));
            rules.push(self.rule(&ids[2], "egress", &SAYS, &says(own, name)));
            rules.push(self.rule(&ids[3], "egress", &ASKS, &asks(own, if own == "*" { own } else { name })));
            subjects.push(serde_json::json!({ "id": name, "cert_common_names": [name] }));
            policies.push(serde_json::json!({ "rules": ids, "subjects": [name] }));
        }
        serde_json::json!({
            "enabled": !subjects.is_empty(), "default_permission": "deny",
            "rules": rules, "subjects": subjects, "policies": policies,
        })
    }

    /// The settings of the first router, for zenohd: it keeps all machines of the site from
    /// speaking for others.
    pub fn router(&self) -> Option<serde_json::Value> {
        let Peer { name, address } = self.routers.first()?;
        let endpoint = self.endpoint((*address)?);
        let blocked = serde_json::json!({ "congestion_control": { "block": { "wait_before_close": BLOCKED_US } } });
        let mut settings = serde_json::json!({
            "mode": "router",
            "listen": { "endpoints": [endpoint] },
            "scouting": { "multicast": { "enabled": false }, "gossip": { "enabled": false } },
            "transport": {
                "link": { "tx": { "lease": LEASE_MS, "queue": blocked }, "rx": { "max_message_size": MAX_STATE_BYTES } },
                "unicast": { "max_sessions": self.peers.len() + 9 },
            },
        });
        if let Some(keys) = self.keys {
            let pem = |name: &str| keys.join(name).display().to_string();
            settings["transport"]["link"]["protocols"] = vec!["tls"].into();
            settings["transport"]["link"]["tls"] = serde_json::json!({
                "root_ca_certificate": pem("ca.pem"), "enable_mtls": true,
                "listen_certificate": pem(&format!("{name}.pem")), "listen_private_key": pem(&format!("{name}.key")),
            });
            let machines = self.peers.iter().map(|peer| peer.name.as_str());
            settings["access_control"] = self.rules_for("*", machines.chain([self.machine]));
        }
        Some(settings)
    }
}

/// The machine that a key is of.
fn machine_of(key: &KeyExpr<'_>) -> Option<String> {
    key.as_str().split('/').nth(2).map(str::to_string)
}

/// A message's bytes, where it is not longer than any of its kind.
fn bytes_of(payload: &zenoh::bytes::ZBytes, most: usize) -> Option<Vec<u8>> {
    (payload.len() <= most).then(|| payload.to_bytes().into_owned())
}

impl Carrier {
    /// Connects, and goes on connecting to machines that are not there. Returns when this machine
    /// listens; with a router at once. `streams` gets the session.
    ///
    /// # Errors
    /// [`CarrierError`]: bad keys, or an address that cannot be had.
    pub fn start(
        carriage: &Carriage<'_>,
        streams: &Arc<Streams>,
    ) -> Result<(Carrier, mpsc::Receiver<Heard>), CarrierError> {
        let config = carriage.config()?;
        let (sender, heard) = mpsc::channel(WAITING);
        let (orders, taken) = orders::sync_channel(ORDERS);
        let (ready, is_ready) = orders::sync_channel(1);
        let (ends, ended) = orders::channel::<End>();
        let asked = Arc::new(AtomicUsize::new(0));
        let open = asked.clone();
        // It ends with the last sender, or when zenoh has given up the last answer. A machine that
        // asks and does not read can hold up its answers, and those of others, but nothing else.
        std::thread::Builder::new()
            .name("answers".into())
            .spawn(move || {
                while let Ok((query, answer)) = ended.recv() {
                    if let Some(bytes) = answer {
                        // One that cannot be sent is asked for again.
                        let _ = query.reply(query.key_expr().clone(), bytes).wait();
                    }
                    drop(query);
                    open.fetch_sub(1, Ordering::Relaxed);
                }
            })
            .map_err(|error| CarrierError::Thread(error.to_string()))?;
        let world = World {
            config,
            base: carriage.base(),
            machine: carriage.machine.into(),
            listen: carriage.listen,
            heard: sender,
            ends,
            asked,
            streams: Arc::downgrade(streams),
        };
        let thread = std::thread::Builder::new()
            .name("zenoh".into())
            .spawn(move || world.run(&taken, &ready))
            .map_err(|error| CarrierError::Thread(error.to_string()))?;
        match is_ready.recv() {
            Ok(Ok(())) => Ok((Carrier { orders: Some(orders), thread: Some(thread) }, heard)),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(CarrierError::Thread("it said nothing".into())),
        }
    }

    /// Has something sent.
    pub fn order(&self, order: Order) {
        // One that is dropped is repaired by a question, as what is lost on the way.
        let _ = self.orders.as_ref().map(|orders| orders.try_send(order));
    }
}

impl Drop for Carrier {
    /// Closes the session, so that the others hear of it at once.
    fn drop(&mut self) {
        self.orders = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

type Ready = orders::SyncSender<Result<(), CarrierError>>;

/// What the thread of the session works with.
struct World {
    config: Config,
    /// `tombolo/SITE`.
    base: String,
    machine: String,
    listen: Option<SocketAddr>,
    heard: mpsc::Sender<Heard>,
    /// Of questions; and how many have none yet.
    ends: orders::Sender<End>,
    asked: Arc<AtomicUsize>,
    streams: Weak<Streams>,
}

impl World {
    fn run(&self, taken: &orders::Receiver<Order>, ready: &Ready) {
        let session = if self.listen.is_some() {
            let opened = self.open();
            let (session, opened) = match opened {
                Ok(session) => (Some(session), Ok(())),
                Err(error) => (None, Err(error)),
            };
            let is_told = ready.send(opened).is_ok();
            session.filter(|_| is_told)
        } else {
            // No router may be there for long.
            ready.send(Ok(())).ok().and_then(|()| self.reach(taken))
        };
        let Some(session) = session else { return };
        while let Ok(order) = taken.recv() {
            self.carry_out(&session, order);
        }
        let _ = session.close().wait();
    }

    /// Tries to reach a router until it is there, or the program ends. Orders have no addressee
    /// meanwhile.
    fn reach(&self, taken: &orders::Receiver<Order>) -> Option<zenoh::Session> {
        let mut is_said = false;
        loop {
            let error = match self.open() {
                Ok(session) => {
                    say("the router is reached");
                    return Some(session);
                }
                Err(error) => error,
            };
            if !is_said {
                say(&format!("{error}; it is tried again"));
                is_said = true;
            }
            let next = Instant::now() + RETRY;
            loop {
                let left = next.saturating_duration_since(Instant::now());
                match taken.recv_timeout(left) {
                    Err(orders::RecvTimeoutError::Disconnected) => return None,
                    Err(orders::RecvTimeoutError::Timeout) => break,
                    Ok(_) => {}
                }
            }
        }
    }

    fn carry_out(&self, session: &zenoh::Session, order: Order) {
        let Self { base, machine, heard, .. } = self;
        // What cannot be sent is repaired by a question, as what is lost on the way.
        let _ = match order {
            Order::Tell(bytes) => {
                let change = format!("{base}/{machine}/change");
                let put = session.put(change, bytes).congestion_control(CongestionControl::Drop);
                // zenoh sends what is urgent first, without end. Calls that fill a link would keep
                // machines from being heard.
                put.priority(Priority::RealTime).wait()
            }
            Order::Ask { machine, bytes } => {
                let (sender, begin) = (heard.clone(), Instant::now());
                let key = format!("{base}/{machine}/state");
                // A machine answers once.
                let is_answered = AtomicBool::new(false);
                let answered = move |reply: zenoh::query::Reply| {
                    let Ok(sample) = reply.result() else { return };
                    if is_answered.swap(true, Ordering::Relaxed) {
                        return;
                    }
                    // The machine that was asked, and no other.
                    let from = machine_of(sample.key_expr()).filter(|from| *from == machine);
                    if let (Some(from), Some(bytes)) = (from, bytes_of(sample.payload(), MAX_STATE_BYTES)) {
                        let _ = sender.try_send(Heard::Answer { from, bytes, round_trip: begin.elapsed() });
                    }
                };
                let get = session.get(&key).payload(bytes).target(QueryTarget::All);
                let get = get.congestion_control(CongestionControl::Drop).priority(Priority::RealTime);
                get.consolidation(ConsolidationMode::None).timeout(ANSWER_TIMEOUT).callback(answered).wait()
            }
        };
    }

    fn open(&self) -> Result<zenoh::Session, CarrierError> {
        let Self { config, base, machine, listen, heard, ends, asked, streams } = self;
        let what = listen.map_or("connecting to the router".into(), |listen| format!("listening at {listen}"));
        let session = zenoh::open(config.clone()).wait().map_err(failed(what))?;
        let (sender, ends, asked) = (heard.clone(), ends.clone(), asked.clone());
        let questions =
            session.declare_queryable(format!("{base}/{machine}/state")).complete(true).callback(move |query| {
                let bytes =
                    query.payload().and_then(|payload| bytes_of(payload, MAX_QUESTION_BYTES)).unwrap_or_default();
                // One that is not taken is asked again.
                if asked.fetch_add(1, Ordering::Relaxed) >= QUESTIONS {
                    asked.fetch_sub(1, Ordering::Relaxed);
                    return;
                }
                let question = Question { query: Some(Box::new(query)), ends: ends.clone() };
                let _ = sender.try_send(Heard::Question { question, bytes });
            });
        questions.background().wait().map_err(failed("answering questions"))?;
        let sender = heard.clone();
        let changes = session.declare_subscriber(format!("{base}/*/change")).callback(move |sample| {
            if let (Some(from), Some(bytes)) =
                (machine_of(sample.key_expr()), bytes_of(sample.payload(), MAX_CHANGE_BYTES))
            {
                let _ = sender.try_send(Heard::Change { from, bytes });
            }
        });
        changes.background().wait().map_err(failed("hearing changes"))?;
        if let Some(all) = streams.upgrade() {
            let streams = streams.clone();
            let calls = session.declare_subscriber(all.heard_key()).callback(move |sample| {
                if let (Some(from), Some(streams)) = (machine_of(sample.key_expr()), streams.upgrade()) {
                    streams.hear(&from, &sample.payload().to_bytes());
                }
            });
            calls.background().wait().map_err(failed("hearing calls"))?;
        }
        let (sender, streams) = (heard.clone(), streams.clone());
        let there =
            session.liveliness().declare_subscriber(format!("{base}/*/here")).history(true).callback(move |sample| {
                let Some(name) = machine_of(sample.key_expr()) else { return };
                match sample.kind() {
                    SampleKind::Put => _ = sender.try_send(Heard::There(name)),
                    SampleKind::Delete => _ = streams.upgrade().inspect(|streams| streams.gone(&name)),
                }
            });
        there.background().wait().map_err(failed("hearing of machines"))?;
        if let Some(streams) = self.streams.upgrade() {
            streams.on(session.clone());
        }
        // Dropped with the session, not before. It is the last, so that who sees it is heard.
        let token = session.liveliness().declare_token(format!("{base}/{machine}/here")).wait();
        std::mem::forget(token.map_err(failed("showing that this machine is there"))?);
        Ok(session)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_may_write_below_its_own_key_only() {
        let peers = ["b", "c"].map(|name| Peer { name: name.into(), address: Some(([192, 0, 2, 2], 7447).into()) });
        let listen = Some(([192, 0, 2, 1], 7447).into());
        let carriage = Carriage { site: "s", machine: "a", listen, peers: &peers, routers: &[], keys: None };
        let rules = carriage.rules();
        let of = |id: &str| rules["rules"].as_array().unwrap().iter().find(|rule| rule["id"] == id).unwrap().clone();
        let keys = |id: &str, at: usize| of(id)["key_exprs"][at].as_str().unwrap().to_string();
        let all = |id: &str| -> Vec<String> {
            of(id)["key_exprs"].as_array().unwrap().iter().map(|key| key.as_str().unwrap().into()).collect()
        };
        assert!(all("b says").iter().all(|key| key.starts_with("tombolo/s/b/")));
        assert!(all("b is told").iter().all(|key| key.starts_with("tombolo/s/a/")), "nothing is passed on");
        assert_eq!(of("b says")["flows"], serde_json::json!(["ingress"]));
        // No other machine hears what is said to it in calls.
        assert_eq!([keys("b asks", 3), keys("b is told", 3)], ["tombolo/s/*/calls/b", "tombolo/s/a/calls/b"]);
        assert!(
            of("b asks")["messages"].as_array().unwrap().iter().all(|message| message != "put" && message != "reply")
        );
        assert_eq!(rules["default_permission"], "deny");
        // Through a router nothing is taken from the others themselves: they are its to judge.
        let routers = [Peer { name: "hub".into(), address: Some(([192, 0, 2, 9], 7447).into()) }];
        let by_router = || Carriage { listen: None, routers: &routers, keys: Some(Path::new("keys")), ..carriage };
        let rules = by_router().rules();
        assert_eq!(rules["subjects"], serde_json::json!([{ "id": "routers", "cert_common_names": ["hub"] }]));
        assert_eq!(rules["policies"], serde_json::json!([{ "rules": ["to", "pass"], "subjects": ["routers"] }]));
        let of_router = by_router().router().unwrap();
        assert_eq!(of_router["listen"]["endpoints"], serde_json::json!(["tls/192.0.2.9:7447"]));
        let policies = of_router["access_control"]["policies"].as_array().unwrap();
        let subjects: Vec<_> = policies.iter().map(|policy| policy["subjects"][0].as_str().unwrap()).collect();
        assert_eq!(subjects, ["b", "c", "a"]);
    }

    #[test]
    fn of_two_machines_one_connects_and_every_machine_connects_to_its_router() {
        let peers = |names: [&str; 2]| {
            names.map(|name| Peer { name: name.into(), address: Some(([192, 0, 2, name.as_bytes()[0]], 7447).into()) })
        };
        let listen = Some(([192, 0, 2, 1], 7447).into());
        let connects = |machine, others: [&str; 2], routers: &[Peer]| {
            let peers = peers(others);
            let listen = listen.filter(|_| routers.is_empty());
            let config = Carriage { site: "s", machine, listen, peers: &peers, routers, keys: None }.config().unwrap();
            let text = config.get_json("connect/endpoints").unwrap();
            serde_json::from_str::<Vec<String>>(&text).unwrap()
        };
        let at = |name: u8| format!("tcp/192.0.2.{name}:7447");
        assert_eq!(connects("a", ["b", "c"], &[]), [at(b'b'), at(b'c')]);
        assert_eq!(connects("b", ["a", "c"], &[]), [at(b'c')]);
        assert_eq!(connects("c", ["a", "b"], &[]), [""; 0]);
        assert_eq!(connects("c", ["a", "b"], &peers(["a", "d"])), [at(b'a'), at(b'd')]);
    }

    #[test]
    fn a_private_key_that_others_can_read_is_refused_and_so_is_a_file_that_is_no_key() {
        let folder = std::env::temp_dir().join(format!("tombolo-span-keys-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let write = |name: &str, mode, text: &str| {
            let path = folder.join(name);
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        let peers = [Peer { name: "b".into(), address: Some(([192, 0, 2, 2], 7447).into()) }];
        let listen = Some(([192, 0, 2, 1], 7447).into());
        let carriage = Carriage { site: "s", machine: "a", listen, peers: &peers, routers: &[], keys: Some(&folder) };
        let said = || carriage.check().map_err(|error| error.to_string());
        assert!(said().unwrap_err().contains("a.pem: No such file"), "{:?}", said());
        write("ca.pem", 0o644, "-----BEGIN CERTIFICATE-----");
        write("a.pem", 0o644, "-----BEGIN CERTIFICATE-----");
        for (mode, is_fine) in
            [(0o600, true), (0o640, true), (0o400, true), (0o644, false), (0o660, false), (0o604, false)]
        {
            write("a.key", mode, "-----BEGIN EC PRIVATE KEY-----");
            assert_eq!(said().is_ok(), is_fine, "{mode:o}: {:?}", said());
        }
        assert!(said().unwrap_err().contains("found mode 0604; run chmod 600"), "{:?}", said());
        write("a.key", 0o600, "-----BEGIN CERTIFICATE-----");
        assert!(said().unwrap_err().contains("a.key: expected a private key in PEM"), "{:?}", said());
        write("ca.pem", 0o644, "");
        write("a.key", 0o600, "-----BEGIN PRIVATE KEY-----");
        assert!(said().unwrap_err().contains("ca.pem: expected a certificate in PEM"), "{:?}", said());
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn the_machine_of_a_key_is_its_third_piece() {
        let key = KeyExpr::try_from("tombolo/s/node-1/change").unwrap();
        assert_eq!(machine_of(&key).as_deref(), Some("node-1"));
        assert_eq!(machine_of(&KeyExpr::try_from("tombolo/s").unwrap()), None);
    }
}
