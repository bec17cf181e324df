//! Connections between machines over zenoh: the second engine of calls, beside TCP ([`Engine`]).
//!
//! What a connection may do is decided in [`tombolo_span::stream`]. This module has its messages
//! published, and its bytes passed on to a pair of sockets, whose other end is the [`Socket`] of
//! the calls. TLS between the two machines is within these bytes, so neither zenoh nor a router on
//! the way can read or change calls.
//!
//! # Keys
//! Machine `M` publishes what it says to machine `N` at `tombolo/S/M/calls/N`.
//!
//! # Threads
//! zenoh's thread that delivers messages never waits: what the socket does not take at once is
//! queued, at most a window of each stream. Each stream has two threads. One reads the socket and
//! publishes; it waits while the other machine has no room, which holds up no other stream, or
//! while zenoh's queue of that link is full, which holds up all streams on the link. The other one
//! passes on what was queued, and says what is due. One thread more answers messages that belong to
//! no stream.
//!
//! # Limits
//! [`ACCEPTED`] streams that one machine has opened. More are refused by name.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::{ErrorKind, Read};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{SendFlags, send};
use tombolo_remote::RemoteError;
use tombolo_remote::machine::engine::{Accept, Engine, Listening, Origin, Socket};
use tombolo_remote::machine::{DEAD_AFTER, HANDSHAKE, MachineError, Remote};
use tombolo_span::stream::{
    BEAT, Content, Ending, MAX_DATA_BYTES, MAX_MESSAGE_BYTES, SILENCE, Side, Stream, StreamMessage,
};
use zenoh::qos::{CongestionControl, Priority};
use zenoh::{Session, Wait};

/// Streams that one machine may have opened at a time.
pub const ACCEPTED: usize = 64;
/// Answers to messages without a stream that were not sent yet. Those beyond are dropped: the other
/// side then ends by its silence.
const ANSWERS: usize = 64;
/// How long zenoh may take to say whether a machine is there.
const LOOK: Duration = Duration::from_secs(2);
/// How long a stream that has ended passes on what came before.
const REST: Duration = Duration::from_secs(1);

const _: () = assert!(SILENCE.as_millis() == DEAD_AFTER.as_millis(), "an engine owes that");

/// A stream among all of this machine.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct StreamKey {
    machine: String,
    number: u64,
    /// Which side this machine is.
    own: Side,
}

#[derive(Default)]
struct Table {
    streams: BTreeMap<StreamKey, Arc<Pump>>,
    /// The exports of this machine.
    accept: Option<Accept>,
    /// The program ends: no more are opened.
    is_over: bool,
}

/// All connections of this machine over one session of zenoh.
pub struct Streams {
    /// `tombolo/SITE`.
    base: String,
    machine: String,
    peers: BTreeSet<String>,
    /// The last one that was opened.
    session: RwLock<Option<Session>>,
    table: Mutex<Table>,
    /// A stream has left the table.
    left: Condvar,
    answers: SyncSender<(String, Vec<u8>)>,
    begin: Instant,
}

/// The engine.
#[derive(Clone)]
pub struct Zenoh(pub Arc<Streams>);

/// What both threads of a stream and zenoh's share.
struct PumpState {
    stream: Stream,
    /// Bytes that have come and the socket did not take yet.
    queue: VecDeque<u8>,
    /// The other side has accepted, or this one has.
    is_open: bool,
    ended: Option<Ending>,
    /// The other side does not know that it has ended.
    tells: bool,
}

struct Pump {
    streams: Weak<Streams>,
    key: StreamKey,
    socket: UnixStream,
    state: Mutex<PumpState>,
    changed: Condvar,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each change under these locks is whole.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A number that no other stream has.
fn random() -> std::io::Result<u64> {
    let mut bytes = [0; 8];
    let n = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    if n == bytes.len() { Ok(u64::from_le_bytes(bytes)) } else { Err(ErrorKind::UnexpectedEof.into()) }
}

impl Streams {
    /// Without a session yet: nothing is heard or said before [`Streams::on`].
    ///
    /// # Errors
    /// The system refused a thread.
    pub fn new(base: &str, machine: &str, peers: impl Iterator<Item = String>) -> std::io::Result<Arc<Streams>> {
        let (answers, waiting) = sync_channel::<(String, Vec<u8>)>(ANSWERS);
        let streams = Arc::new(Streams {
            base: base.into(),
            machine: machine.into(),
            peers: peers.collect(),
            session: RwLock::default(),
            table: Mutex::default(),
            left: Condvar::new(),
            answers,
            begin: Instant::now(),
        });
        let weak = Arc::downgrade(&streams);
        std::thread::Builder::new().name("stream-answers".into()).spawn(move || {
            while let (Ok((to, message)), Some(streams)) = (waiting.recv(), weak.upgrade()) {
                // A machine that does not read must not hold up a router's other work for an answer
                // that it can do without.
                streams.put(&to, message, CongestionControl::Drop);
            }
        })?;
        Ok(streams)
    }

    /// The key of what others say to this machine.
    pub fn heard_key(&self) -> String {
        format!("{}/*/calls/{}", self.base, self.machine)
    }

    /// From now on this session is used.
    pub fn on(&self, session: Session) {
        *self.session.write().unwrap_or_else(PoisonError::into_inner) = Some(session);
    }

    fn session(&self) -> Option<Session> {
        self.session.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn now(&self) -> Duration {
        self.begin.elapsed()
    }

    fn put(&self, to: &str, message: Vec<u8>, full: CongestionControl) -> bool {
        let Some(session) = self.session() else { return false };
        let put = session.put(format!("{}/{}/calls/{to}", self.base, self.machine), message);
        put.congestion_control(full).priority(Priority::InteractiveHigh).express(true).wait().is_ok()
    }

    fn say(&self, key: &StreamKey, content: Content<'_>) -> bool {
        let message = StreamMessage { number: key.number, from: key.own, content }.encode();
        // Never dropped for want of room: zenoh waits, and after 2 s it closes the link, which both
        // sides notice.
        self.put(&key.machine, message, CongestionControl::Block)
    }

    /// Has a message answered that belongs to no stream.
    fn answer(&self, key: &StreamKey, ending: Ending) {
        let message = StreamMessage { number: key.number, from: key.own, content: Content::End(ending) };
        let _ = self.answers.try_send((key.machine.clone(), message.encode()));
    }

    /// A machine says something. Called by zenoh, and never waits.
    pub fn hear(self: &Arc<Self>, machine: &str, message: &[u8]) {
        let is_known = self.peers.contains(machine) && message.len() <= MAX_MESSAGE_BYTES;
        let Some(StreamMessage { number, from, content }) = StreamMessage::parse(message).filter(|_| is_known) else {
            return;
        };
        let key = StreamKey { machine: machine.into(), number, own: from.other() };
        let found = locked(&self.table).streams.get(&key).cloned();
        match (found, content) {
            (Some(pump), content) => pump.hear(&content, self.now()),
            (None, Content::Open) => {
                if let Err(ending) = self.opened(&key) {
                    self.answer(&key, ending);
                }
            }
            (None, Content::End(_)) => {}
            (None, _) => self.answer(&key, Ending::Unknown),
        }
    }

    /// Another machine opens a stream.
    fn opened(self: &Arc<Self>, key: &StreamKey) -> Result<(), Ending> {
        let mut table = locked(&self.table);
        let accept = table.accept.clone().ok_or(Ending::Absent)?;
        let is_of = |other: &&StreamKey| other.own == Side::Acceptor && other.machine == key.machine;
        if table.streams.keys().filter(is_of).count() >= ACCEPTED {
            return Err(Ending::Full);
        }
        let (own, theirs) = UnixStream::pair().map_err(|_| Ending::Full)?;
        let pump = self.pump(key.clone(), own, true);
        table.streams.insert(key.clone(), pump.clone());
        pump.start().map_err(|_| {
            table.streams.remove(key);
            Ending::Full
        })?;
        // Under the lock, so that no connection comes after the exports have ended.
        accept(Socket::Local(theirs), Origin::Machine(key.machine.clone()));
        Ok(())
    }

    fn pump(self: &Arc<Self>, key: StreamKey, socket: UnixStream, is_open: bool) -> Arc<Pump> {
        let stream = Stream::new(self.now());
        let state = PumpState { stream, queue: VecDeque::new(), is_open, ended: None, tells: false };
        let streams = Arc::downgrade(self);
        Arc::new(Pump { streams, key, socket, state: Mutex::new(state), changed: Condvar::new() })
    }

    fn remove(&self, key: &StreamKey) {
        locked(&self.table).streams.remove(key);
        self.left.notify_all();
    }

    /// A machine has disconnected: its streams end.
    pub fn gone(&self, machine: &str) {
        let table = locked(&self.table);
        table
            .streams
            .values()
            .filter(|pump| pump.key.machine == machine)
            .for_each(|pump| pump.end(Ending::Gone, false));
    }

    /// No stream is opened any more. Those that wait to be accepted end.
    pub fn stop(&self) {
        let mut table = locked(&self.table);
        table.is_over = true;
        table.streams.values().for_each(|pump| {
            if !locked(&pump.state).is_open {
                pump.end(Ending::Closed, true);
            }
        });
    }

    /// Waits until all streams have said that they end, for a second at most.
    pub fn finish(&self) {
        let table = locked(&self.table);
        let _ = self.left.wait_timeout_while(table, REST, |table| !table.streams.is_empty());
    }

    /// Whether zenoh has the machine's token.
    fn is_there(&self, machine: &str) -> Result<bool, String> {
        let session = self.session().ok_or("zenoh is not connected yet")?;
        let token = format!("{}/{machine}/here", self.base);
        let tokens = session.liveliness().get(token).timeout(LOOK).wait().map_err(|error| error.to_string())?;
        Ok(tokens.recv().is_ok_and(|reply| reply.result().is_ok()))
    }
}

impl Pump {
    /// Has both threads work.
    fn start(self: &Arc<Self>) -> std::io::Result<()> {
        let (reader, writer) = (self.clone(), self.clone());
        std::thread::Builder::new().name("stream-out".into()).spawn(move || reader.read())?;
        let started = std::thread::Builder::new().name("stream-in".into()).spawn(move || writer.write());
        if started.is_err() {
            self.end(Ending::Closed, true);
        }
        started.map(drop)
    }

    /// Ends it, if it has not ended.
    fn end(&self, ending: Ending, tells: bool) {
        self.ended(&mut locked(&self.state), ending, tells);
    }

    fn ended(&self, state: &mut PumpState, ending: Ending, tells: bool) {
        if state.ended.is_none() {
            (state.ended, state.tells) = (Some(ending), tells);
            // The reader waits for it.
            let _ = self.socket.shutdown(Shutdown::Read);
            self.changed.notify_all();
        }
    }

    /// Something came from the other side.
    fn hear(&self, content: &Content<'_>, now: Duration) {
        let mut state = locked(&self.state);
        if state.ended.is_some() {
            return;
        }
        if let Err(ending) = state.stream.receive(content, now) {
            let tells = !matches!(content, Content::End(_));
            return self.ended(&mut state, ending, tells);
        }
        match content {
            Content::Data { bytes, .. } => {
                state.queue.extend(*bytes);
                self.pass_on(&mut state);
                // The other thread says what is due, and goes on where the socket is full.
                let is_due = state.stream.is_due(now);
                if is_due || !state.queue.is_empty() {
                    self.changed.notify_all();
                }
            }
            Content::Accept => {
                state.is_open = true;
                self.changed.notify_all();
            }
            _ => self.changed.notify_all(),
        }
    }

    /// Gives the socket what it takes now.
    fn pass_on(&self, state: &mut PumpState) {
        while !state.queue.is_empty() {
            let sent = send(&self.socket, state.queue.as_slices().0, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
            match sent {
                Ok(n) => {
                    state.queue.drain(..n);
                    state.stream.took(n);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => {
                    state.queue.clear();
                    return self.ended(state, Ending::Closed, true);
                }
            }
        }
    }

    /// From the socket to the other machine, until either ends.
    fn read(&self) {
        let mut bytes = [0; MAX_DATA_BYTES];
        while let Some(streams) = self.streams.upgrade() {
            let room = {
                let state = locked(&self.state);
                let waits =
                    |state: &mut PumpState| state.ended.is_none() && !(state.is_open && state.stream.room() > 0);
                let state = self.changed.wait_while(state, waits).unwrap_or_else(PoisonError::into_inner);
                if state.ended.is_some() { 0 } else { state.stream.room() }
            };
            if room == 0 {
                return;
            }
            let n = match (&self.socket).read(&mut bytes[..room]) {
                Ok(0) => return self.end(Ending::Closed, true),
                Ok(n) => n,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(_) => return self.end(Ending::Closed, true),
            };
            let position = {
                let mut state = locked(&self.state);
                if state.ended.is_some() {
                    return;
                }
                state.stream.send(n, streams.now())
            };
            if !streams.say(&self.key, Content::Data { position, bytes: &bytes[..n] }) {
                return self.end(Ending::Gone, false);
            }
        }
    }

    /// What was queued, to the socket; what is due, to the other machine. Ends with the stream.
    fn write(&self) {
        if self.key.own == Side::Acceptor
            && let Some(streams) = self.streams.upgrade()
            && !streams.say(&self.key, Content::Accept)
        {
            self.end(Ending::Gone, false);
        }
        let (ending, tells) = self.serve();
        let _ = self.socket.shutdown(Shutdown::Both);
        if let Some(streams) = self.streams.upgrade() {
            if tells {
                streams.say(&self.key, Content::End(ending));
            }
            streams.remove(&self.key);
        }
    }

    fn serve(&self) -> (Ending, bool) {
        let mut until = None;
        loop {
            let Some(streams) = self.streams.upgrade() else { return (Ending::Gone, false) };
            let mut state = locked(&self.state);
            self.pass_on(&mut state);
            if let Some(ending) = state.ended {
                // What came before the end is passed on, but not what a broken stream holds.
                let is_whole = matches!(ending, Ending::Closed | Ending::Gone);
                let until = *until.get_or_insert_with(|| Instant::now() + REST);
                if state.queue.is_empty() || !is_whole || Instant::now() >= until {
                    return (ending, state.tells);
                }
            } else {
                match state.stream.due(streams.now()) {
                    Err(ending) => self.ended(&mut state, ending, true),
                    Ok(None) => {}
                    Ok(Some(taken)) => {
                        drop(state);
                        if !streams.say(&self.key, Content::Taken(taken)) {
                            self.end(Ending::Gone, false);
                        }
                        continue;
                    }
                }
            }
            drop(streams);
            if state.queue.is_empty() {
                if state.ended.is_none() {
                    let _ = self.changed.wait_timeout(state, BEAT / 4);
                }
            } else {
                drop(state);
                let mut fds = [PollFd::new(&self.socket, PollFlags::OUT)];
                // An interrupted wait looks again.
                let _ = poll(&mut fds, Timespec::try_from(BEAT / 4).ok().as_ref());
            }
        }
    }
}

impl Engine for Zenoh {
    fn connect(&self, to: &Remote) -> Result<Socket, MachineError> {
        let unreachable = |why: String| MachineError::Unreachable { machine: to.machine.clone(), why };
        let failed = |error: std::io::Error| unreachable(error.to_string());
        let streams = &self.0;
        if !streams.is_there(&to.machine).map_err(unreachable)? {
            return Err(unreachable("zenoh does not reach its tombolo-span, or none runs there".into()));
        }
        let key = StreamKey { machine: to.machine.clone(), number: random().map_err(failed)?, own: Side::Opener };
        let (own, theirs) = UnixStream::pair().map_err(failed)?;
        let pump = streams.pump(key.clone(), own, false);
        {
            let mut table = locked(&streams.table);
            if table.is_over {
                return Err(unreachable("this program ends".into()));
            }
            table.streams.insert(key.clone(), pump.clone());
        }
        let ended = if streams.say(&key, Content::Open) {
            let state = locked(&pump.state);
            let waits = |state: &mut PumpState| !state.is_open && state.ended.is_none();
            let waited = pump.changed.wait_timeout_while(state, HANDSHAKE, waits);
            let (state, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
            state.ended.or(timeout.timed_out().then_some(Ending::Gone))
        } else {
            Some(Ending::Gone)
        };
        let started = match ended {
            Some(ending) => Err(unreachable(ending.to_string())),
            None => pump.start().map_err(failed),
        };
        if started.is_err() {
            streams.remove(&key);
        }
        started.map(|()| Socket::Local(theirs))
    }

    fn listen(&self, accept: Accept) -> Result<Box<dyn Listening>, RemoteError> {
        locked(&self.0.table).accept = Some(accept);
        Ok(Box::new(ZenohListening(self.0.clone())))
    }
}

struct ZenohListening(Arc<Streams>);

impl Listening for ZenohListening {}

impl Drop for ZenohListening {
    fn drop(&mut self) {
        locked(&self.0.table).accept = None;
    }
}

#[cfg(test)]
mod tests {
    use std::net::{SocketAddr, TcpListener};
    use std::path::{Path, PathBuf};

    use super::*;
    use crate::carrier::{Carriage, Carrier, Heard, Peer};
    use crate::suite::{self, Relay, World};

    /// An engine that runs, and what it hears besides.
    type Running = (Carrier, tokio::sync::mpsc::Receiver<Heard>, Arc<Streams>);

    /// `a` connects to `b` through a relay.
    struct OverZenoh {
        keys: PathBuf,
        addresses: [SocketAddr; 2],
        relay: Relay,
        running: Mutex<BTreeMap<String, Running>>,
    }

    /// An address that nothing listened at a moment ago.
    fn free() -> SocketAddr {
        TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
    }

    impl World for OverZenoh {
        fn new(keys: &Path) -> OverZenoh {
            let addresses = [free(), free()];
            let relay = Relay::new(addresses[1]);
            let world = OverZenoh { keys: keys.into(), addresses, relay, running: Mutex::default() };
            for machine in ["b", "a"] {
                world.start(machine);
            }
            world
        }

        fn engine(&self, machine: &str) -> Arc<dyn Engine> {
            Arc::new(Zenoh(locked(&self.running)[machine].2.clone()))
        }

        fn remote(&self, machine: &str) -> Remote {
            Remote { machine: machine.into(), address: machine.into() }
        }

        fn relay(&self) -> &Relay {
            &self.relay
        }

        fn kill(&self, machine: &str) {
            let ended = locked(&self.running).remove(machine);
            drop(ended);
        }

        fn start(&self, machine: &str) {
            // Nothing listens where b would connect to a.
            let (own, other, address) = match machine {
                "a" => (self.addresses[0], "b", self.relay.address),
                _ => (self.addresses[1], "a", free()),
            };
            let peers = [Peer { name: other.into(), address: Some(address) }];
            let carriage =
                Carriage { site: "s", machine, listen: Some(own), peers: &peers, routers: &[], keys: Some(&self.keys) };
            let streams = Streams::new(&carriage.base(), machine, [other.to_string()].into_iter()).unwrap();
            let (carrier, heard) = Carrier::start(&carriage, &streams).unwrap();
            locked(&self.running).insert(machine.into(), (carrier, heard, streams));
        }
    }

    suite::each!(OverZenoh: a_way_that_is_cut_ends_its_calls_by_name);
}
