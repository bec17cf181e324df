//! Commands in a guest, by the QEMU guest agent (QEMU's "Guest Agent Protocol Reference").
//!
//! # Purpose
//! A machine with `agent = true` has a virtio-serial port that the agent of all distributions
//! (qemu-guest-agent) answers. QEMU gives it a Unix socket in the fabric's runtime directory. A
//! client speaks there itself; the daemon has no part in it.
//!
//! # Several clients
//! The socket has one client at a time. A client therefore speaks in turns. A turn has a lock
//! beside the socket, a connection of its own, and begins with a sync. It ends after `HOLD`, also
//! while the command runs, so that others get theirs. The kernel releases the lock of a client that
//! is killed. The byte 0xff before a sync ends what an earlier client left half-written.
//!
//! # Ending a command
//! The protocol cannot end a command. A client that is to stop has the guest's shell send SIGTERM
//! to the command's process and its descendants, and SIGKILL if it has not ended after `GRACE`.
//!
//! # Trust
//! The guest may answer anything. An answer has at most `ANSWER_BYTES` and `ANSWER_TOTAL`, its
//! JSON and base64 are checked, and what came before the answer to our own sync is ignored.

use std::fs::{File, OpenOptions};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::log;

/// The name of the port, where the agent looks for it.
pub const PORT: &str = "org.qemu.guest_agent.0";
/// What a command can be given as its standard input, in bytes.
pub const INPUT_BYTES: usize = 4 << 20;

/// How long the agent may be silent.
const SILENCE: Duration = Duration::from_secs(10);
/// How long a whole answer may take.
const ANSWER_TOTAL: Duration = Duration::from_secs(120);
/// The agent keeps 16 MiB of each of two streams, and base64 makes four bytes of three.
const ANSWER_BYTES: usize = 48 << 20;
/// Bytes that are read at once.
const CHUNK: usize = 64 << 10;
/// How long others' turns are waited for.
const LOCK_WAIT: Duration = Duration::from_secs(130);
/// Between two looks at the lock; shorter than the pause between two turns.
const LOCK_LOOK: Duration = Duration::from_millis(5);
/// How long a turn lasts while a command runs.
const HOLD: Duration = Duration::from_millis(300);
/// Pauses between two questions whether the command has ended.
const PAUSES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(500));
/// How often it is looked whether the caller wants to stop.
const STOP_LOOK: Duration = Duration::from_millis(100);
/// How long a command has to end after SIGTERM, and after SIGKILL.
const GRACE: Duration = Duration::from_secs(2);
/// How long it may take in all to end a command.
const END_TOTAL: Duration = Duration::from_secs(10);
/// Sends a signal to a process and all that descend from it, the parents first: a shell does not go
/// on with its next command.
const SIGNAL_TREE: &str = "t() { set -- \"$1\" $(cat \"/proc/$1/task/$1/children\" 2>/dev/null); kill -s \"$signal\" \"$1\"; shift; \
                           for child; do t \"$child\"; done; }; signal=$1; t \"$2\"";
/// Characters of the guest's own words that a message shows.
const SHOWN: usize = 300;

/// Where a machine's agent is reached.
pub fn socket_path(runtime: &Path, machine: &str) -> PathBuf {
    runtime.join(format!("{machine}.qga"))
}

/// Why a command did not come to its end.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// QEMU is not there, or the socket cannot be reached.
    #[error("QEMU's socket for the agent cannot be reached: {0}")]
    Unreachable(io::Error),
    /// Another client has its turn.
    #[error("another client has held the agent for {0:?}; is a `tombolo exec` stopped?")]
    Busy(Duration),
    /// Nothing answers.
    #[error(
        "the agent in the guest does not answer. Is qemu-guest-agent installed and running there (systemctl status \
         qemu-guest-agent), and has the guest booted? No other program may hold its socket"
    )]
    Silent,
    /// The guest does not follow the protocol.
    #[error("the agent in the guest breaks the protocol: {0}")]
    Odd(String),
    /// The agent may not run commands.
    #[error(
        "the agent in the guest may not run commands ({0}). Allow guest-exec and guest-exec-status there: \
         /etc/qemu/qemu-ga.conf or /etc/sysconfig/qemu-ga (blacklist, block-rpcs, allow-rpcs)"
    )]
    Disabled(String),
    /// It could not start the command.
    #[error("the guest could not start it: {0}")]
    NotStarted(String),
    /// The time is over.
    #[error("the time is over{}", match pid { Some(pid) => format!("; the command runs on in the guest as process {pid}"), None => String::new() })]
    TimedOut {
        /// The command's process in the guest, once it was started.
        pid: Option<i64>,
    },
    /// The caller wanted to stop.
    #[error("interrupted{}", match pid {
        Some(pid) => format!("; the command may run on in the guest as process {pid}: {why}"),
        None => why.clone(),
    })]
    Stopped {
        /// The command's process in the guest, if it may run on.
        pid: Option<i64>,
        /// What became of it.
        why: String,
    },
}

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// By itself.
    Code(i64),
    /// By a signal.
    Signal(i64),
}

/// What came of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finished {
    /// How it ended.
    pub end: End,
    /// What it wrote to its standard output.
    pub stdout: Vec<u8>,
    /// What it wrote to its standard error.
    pub stderr: Vec<u8>,
    /// The agent kept only the first part of one of them.
    pub truncated: bool,
}

#[derive(Deserialize)]
struct Answer<T> {
    #[serde(rename = "return")]
    given: Option<T>,
    error: Option<Refusal>,
}

#[derive(Deserialize)]
struct Refusal {
    #[serde(default)]
    class: String,
    #[serde(default)]
    desc: String,
}

#[derive(Deserialize)]
struct Started {
    pid: i64,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Status {
    exited: bool,
    exitcode: Option<i64>,
    signal: Option<i64>,
    #[serde(default)]
    out_data: String,
    #[serde(default)]
    err_data: String,
    #[serde(default)]
    out_truncated: bool,
    #[serde(default)]
    err_truncated: bool,
}

/// Runs a command in the guest whose agent is at `socket`, and waits for its end, at most until
/// `deadline`. When `stop` becomes true, the command is ended in the guest.
///
/// # Errors
/// See [`AgentError`]; after one the next call works as if there had been none.
pub fn execute(
    socket: &Path,
    command: &[String],
    input: &[u8],
    deadline: Option<Instant>,
    stop: &AtomicBool,
) -> Result<Finished, AgentError> {
    let mut pid = None;
    let done = run(socket, command, input, Until { deadline, stop }, &mut pid);
    match (done, pid) {
        (Err(AgentError::Stopped { .. }), Some(pid)) => Err(match end(socket, pid) {
            Ok(true) => AgentError::Stopped { pid: None, why: "; the command was ended in the guest".into() },
            Ok(false) => AgentError::Stopped { pid: Some(pid), why: "it does not end by SIGKILL".into() },
            Err(error) => AgentError::Stopped { pid: Some(pid), why: error.to_string() },
        }),
        (done, _) => done,
    }
}

/// As [`execute`]; `started` is the command's process from when it is known. One that is stopped
/// runs on.
fn run(
    socket: &Path,
    command: &[String],
    input: &[u8],
    until: Until,
    started: &mut Option<i64>,
) -> Result<Finished, AgentError> {
    let mut turn = Turn::begin(socket, until)?;
    let (path, words) = command.split_first().map_or(("", command), |(path, words)| (path.as_str(), words));
    let mut arguments = json!({ "path": path, "arg": words, "capture-output": true });
    if !input.is_empty() {
        arguments["input-data"] = Value::from(encode(input));
    }
    // A caller that stops here would not know which command to end.
    turn.grace = GRACE;
    let Started { pid } = turn.ask("guest-exec", arguments)?;
    turn.grace = Duration::ZERO;
    *started = Some(pid);
    let late = |error| match error {
        AgentError::TimedOut { .. } => AgentError::TimedOut { pid: Some(pid) },
        other => other,
    };
    let (mut pause, longest) = PAUSES;
    loop {
        let release = Instant::now() + HOLD;
        while Instant::now() < release {
            let status: Status = turn.ask("guest-exec-status", json!({ "pid": pid })).map_err(late)?;
            if status.exited {
                return finished(status);
            }
            if until.deadline.is_some_and(|end| Instant::now() + pause >= end) {
                return Err(AgentError::TimedOut { pid: Some(pid) });
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(longest);
        }
        drop(turn);
        std::thread::sleep(pause);
        turn = Turn::begin(socket, until).map_err(late)?;
    }
}

/// Ends a command; whether it has ended.
fn end(socket: &Path, pid: i64) -> Result<bool, AgentError> {
    let until = Until { deadline: Some(Instant::now() + END_TOTAL), stop: &NEVER };
    for signal in ["TERM", "KILL"] {
        // What the client before has not read is passed over by the sync.
        let mut turn = Turn::begin(socket, until)?;
        let words = ["-c", SIGNAL_TREE, "sh", signal, &pid.to_string()];
        let Started { pid: _ } = turn.ask("guest-exec", json!({ "path": "/bin/sh", "arg": words }))?;
        let last = Instant::now() + GRACE;
        while Instant::now() < last {
            let status: Status = turn.ask("guest-exec-status", json!({ "pid": pid }))?;
            if status.exited {
                return Ok(true);
            }
            std::thread::sleep(PAUSES.0);
        }
    }
    Ok(false)
}

/// The stop of a caller that does not want to.
static NEVER: AtomicBool = AtomicBool::new(false);

/// For how long something is waited for.
#[derive(Clone, Copy)]
struct Until<'s> {
    deadline: Option<Instant>,
    stop: &'s AtomicBool,
}

impl Until<'_> {
    /// How long the next wait may be, of at most `longest`.
    ///
    /// # Errors
    /// If the time is over, or the caller wants to stop.
    fn wait(self, longest: Duration) -> Result<Duration, AgentError> {
        // Relaxed: nothing else is read that was written before it.
        if self.stop.load(Ordering::Relaxed) {
            return Err(AgentError::Stopped {
                pid: None,
                why: "; the guest had not said yet that it started the command".into(),
            });
        }
        let left = self.deadline.map_or(longest, |deadline| deadline.saturating_duration_since(Instant::now()));
        match left.is_zero() {
            true => Err(AgentError::TimedOut { pid: None }),
            false => Ok(left.min(longest).min(STOP_LOOK)),
        }
    }
}

fn finished(status: Status) -> Result<Finished, AgentError> {
    let odd = |what: &str| AgentError::Odd(what.into());
    let bytes = |text: &str| decode(text).ok_or_else(|| odd("output that is not base64"));
    let end = match (status.exitcode, status.signal) {
        (Some(code), None) => End::Code(code),
        (None, Some(signal)) if (1..=64).contains(&signal) => End::Signal(signal),
        _ => return Err(odd("an end without an exit code or a signal")),
    };
    let truncated = status.out_truncated || status.err_truncated;
    Ok(Finished { end, stdout: bytes(&status.out_data)?, stderr: bytes(&status.err_data)?, truncated })
}

/// A client's turn.
struct Turn<'s> {
    stream: UnixStream,
    /// What was read; the lines before `start` were given out.
    read: Vec<u8>,
    start: usize,
    chunk: Vec<u8>,
    until: Until<'s>,
    /// How long an answer is waited for although the caller wants to stop, and since when it does.
    grace: Duration,
    stopped: Option<Instant>,
    /// Closed last: others connect once this connection is gone.
    _lock: File,
}

impl<'s> Turn<'s> {
    fn begin(socket: &Path, until: Until<'s>) -> Result<Turn<'s>, AgentError> {
        let lock = lock(socket, until)?;
        let stream = connect(socket.to_path_buf(), until)?;
        let mut turn = Turn {
            stream,
            read: vec![],
            start: 0,
            chunk: vec![0; CHUNK],
            until,
            grace: Duration::ZERO,
            stopped: None,
            _lock: lock,
        };
        turn.sync()?;
        Ok(turn)
    }

    /// Makes sure that what is read next answers what is asked next.
    fn sync(&mut self) -> Result<(), AgentError> {
        // The agent takes numbers up to i64's largest.
        let id = (RandomState::new().build_hasher().finish() >> 2) as i64;
        let text = json!({ "execute": "guest-sync-delimited", "arguments": { "id": id } });
        let mut message = vec![0xff];
        message.extend(text.to_string().bytes().chain([b'\n']));
        let end = Instant::now() + ANSWER_TOTAL;
        self.write(&message, end)?;
        let mut skipped = 0;
        // A late answer to an earlier client may be as long as any.
        while skipped <= ANSWER_BYTES {
            let line = self.line(end)?;
            skipped += line.len() + 1;
            let Some(start) = line.iter().rposition(|byte| *byte == 0xff) else { continue };
            let answer = serde_json::from_slice::<Answer<i64>>(&line[start + 1..]);
            if answer.is_ok_and(|answer| answer.given == Some(id)) {
                return Ok(());
            }
        }
        Err(AgentError::Odd(format!("no answer to a sync within {ANSWER_BYTES} bytes")))
    }

    fn ask<T: DeserializeOwned>(&mut self, command: &str, arguments: Value) -> Result<T, AgentError> {
        let end = Instant::now() + ANSWER_TOTAL;
        let message = json!({ "execute": command, "arguments": arguments }).to_string() + "\n";
        self.write(message.as_bytes(), end)?;
        let line = self.line(end)?;
        let answer: Answer<T> =
            serde_json::from_slice(&line).map_err(|error| AgentError::Odd(log::shown(&error.to_string(), SHOWN)))?;
        match (answer.given, answer.error) {
            (Some(given), None) => Ok(given),
            (_, Some(refusal)) => {
                let text = log::shown(&refusal.desc, SHOWN);
                Err(match refusal.class.as_str() {
                    "CommandNotFound" => AgentError::Disabled(text),
                    _ if text.contains("has been disabled") => AgentError::Disabled(text),
                    _ => AgentError::NotStarted(text),
                })
            }
            (None, None) => Err(AgentError::Odd("an answer without content".into())),
        }
    }

    /// How long the next read or write may wait, for an answer that has to be whole at `end` from
    /// an agent that was last heard at `heard`.
    fn patience(&mut self, end: Instant, heard: Instant) -> Result<Duration, AgentError> {
        let now = Instant::now();
        if now >= end {
            return Err(AgentError::Odd(format!("an answer that takes longer than {ANSWER_TOTAL:?}")));
        }
        let silent = SILENCE.saturating_sub(now - heard);
        let mut until = self.until;
        if until.stop.load(Ordering::Relaxed) && *self.stopped.get_or_insert(now) + self.grace > now {
            until.stop = &NEVER;
        }
        let wait = until.wait(silent.max(Duration::from_millis(1)).min(end - now))?;
        if silent.is_zero() { Err(AgentError::Silent) } else { Ok(wait) }
    }

    fn write(&mut self, mut bytes: &[u8], end: Instant) -> Result<(), AgentError> {
        let mut heard = Instant::now();
        while !bytes.is_empty() {
            let patience = self.patience(end, heard)?;
            self.stream.set_write_timeout(Some(patience)).map_err(AgentError::Unreachable)?;
            match self.stream.write(bytes) {
                Ok(n) => (bytes, heard) = (&bytes[n..], Instant::now()),
                Err(error) if has_waited(&error) => {}
                Err(error) => return Err(AgentError::Unreachable(error)),
            }
        }
        Ok(())
    }

    /// The next line, without its end. Each byte is looked at and moved a fixed number of times,
    /// however short the lines are.
    fn line(&mut self, end: Instant) -> Result<Vec<u8>, AgentError> {
        let mut heard = Instant::now();
        let mut looked = self.start;
        loop {
            if let Some(at) = self.read[looked..].iter().position(|byte| *byte == b'\n') {
                let line = self.read[self.start..looked + at].to_vec();
                self.start = looked + at + 1;
                return Ok(line);
            }
            // Less than a line is left, which is moved once.
            self.read.drain(..std::mem::take(&mut self.start));
            looked = self.read.len();
            if looked > ANSWER_BYTES {
                return Err(AgentError::Odd(format!("an answer of more than {ANSWER_BYTES} bytes")));
            }
            let patience = self.patience(end, heard)?;
            self.stream.set_read_timeout(Some(patience)).map_err(AgentError::Unreachable)?;
            match self.stream.read(&mut self.chunk) {
                Ok(0) => return Err(AgentError::Unreachable(io::ErrorKind::UnexpectedEof.into())),
                Ok(n) => {
                    self.read.extend_from_slice(&self.chunk[..n]);
                    heard = Instant::now();
                }
                Err(error) if has_waited(&error) => {}
                Err(error) => return Err(AgentError::Unreachable(error)),
            }
        }
    }
}

/// Whether a read or write has come to the end of its wait, or a signal ended it.
fn has_waited(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted)
}

fn lock(socket: &Path, until: Until) -> Result<File, AgentError> {
    let path = socket.with_extension("qga-lock");
    let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path);
    let file = file.map_err(AgentError::Unreachable)?;
    let begun = Instant::now();
    while flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
        let wait = until.wait(LOCK_LOOK)?;
        if begun.elapsed() >= LOCK_WAIT {
            return Err(AgentError::Busy(LOCK_WAIT));
        }
        std::thread::sleep(wait);
    }
    Ok(file)
}

/// Connects in a thread: `connect` blocks while another program holds the socket and the queue
/// before it is full.
fn connect(socket: PathBuf, until: Until) -> Result<UnixStream, AgentError> {
    let (tell, told) = mpsc::channel();
    let connect = move || tell.send(UnixStream::connect(socket));
    std::thread::Builder::new().spawn(connect).map_err(AgentError::Unreachable)?;
    let begun = Instant::now();
    loop {
        let Some(left) = SILENCE.checked_sub(begun.elapsed()) else { return Err(AgentError::Silent) };
        match told.recv_timeout(until.wait(left.max(Duration::from_millis(1)))?) {
            Ok(stream) => return stream.map_err(AgentError::Unreachable),
            Err(mpsc::RecvTimeoutError::Timeout) => {}
            Err(mpsc::RecvTimeoutError::Disconnected) => return Err(AgentError::Silent),
        }
    }
}

const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// Base64 (RFC 4648 §4).
pub fn encode(bytes: &[u8]) -> String {
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for part in bytes.chunks(3) {
        let n = part.iter().fold(0, |n, byte| n << 8 | u32::from(*byte)) << (8 * (3 - part.len()));
        for i in 0..4 {
            let digit = ALPHABET[(n >> (18 - 6 * i) & 63) as usize];
            out.push(if i <= part.len() { char::from(digit) } else { '=' });
        }
    }
    out
}

/// The bytes of base64 with its padding; `None` for anything else.
fn decode(text: &str) -> Option<Vec<u8>> {
    let text = text.as_bytes();
    let mut out = Vec::with_capacity(text.len() / 4 * 3);
    let groups = text.len().div_ceil(4);
    for (i, group) in text.chunks(4).enumerate() {
        let padding = group.iter().rev().take_while(|byte| **byte == b'=').count();
        if group.len() != 4 || padding > 2 || (padding > 0 && i + 1 != groups) {
            return None;
        }
        let mut n = 0;
        for byte in &group[..4 - padding] {
            let digit = match byte {
                b'A'..=b'Z' => byte - b'A',
                b'a'..=b'z' => byte - b'a' + 26,
                b'0'..=b'9' => byte - b'0' + 52,
                b'+' => 62,
                b'/' => 63,
                _ => return None,
            };
            n = n << 6 | u32::from(digit);
        }
        n <<= 6 * padding;
        out.extend_from_slice(&n.to_be_bytes()[1..4 - padding]);
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader};
    use std::os::unix::net::UnixListener;

    /// An agent that answers each request of one connection as told: the sync's answer, then the
    /// others.
    fn against(answers: &[Vec<u8>], late: &[u8]) -> Result<Finished, AgentError> {
        let dir = tempfile::tempdir().unwrap();
        let socket = socket_path(dir.path(), "v");
        let listener = UnixListener::bind(&socket).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (mut peer, _) = listener.accept().unwrap();
                let mut lines = BufReader::new(peer.try_clone().unwrap());
                let mut line = Vec::new();
                lines.read_until(b'\n', &mut line).unwrap();
                assert_eq!(line[0], 0xff);
                let sync: Value = serde_json::from_slice(&line[1..]).unwrap();
                let answer = format!("{{\"return\": {}}}\n", sync["arguments"]["id"]);
                peer.write_all(&[late, b"\xff", answer.as_bytes()].concat()).unwrap();
                for answer in answers {
                    if lines.read_until(b'\n', &mut line).unwrap_or(0) == 0 {
                        return;
                    }
                    // The other side hangs up in the middle of what is too long.
                    let _ = peer.write_all(answer);
                }
            });
            let deadline = Some(Instant::now() + Duration::from_secs(60));
            execute(&socket, &["true".into()], b"", deadline, &AtomicBool::new(false))
        })
    }

    fn line(text: &str) -> Vec<u8> {
        format!("{text}\n").into_bytes()
    }

    #[test]
    fn late_answers_are_passed_over_and_a_command_comes_to_its_end() {
        let late = b"{\"return\":{\"pid\":1}}\n\xff{\"return\":5}\n{\"return\":{\"exited\":true,\"exitcode\":9}}\n";
        let answers = [
            line(r#"{"return":{"pid":7}}"#),
            line(r#"{"return":{"exited":false}}"#),
            line(r#"{"return":{"exited":true,"exitcode":3,"out-data":"aGk=","err-data":"AP8A","out-truncated":true}}"#),
        ];
        let done = against(&answers, late).unwrap();
        let stdout = b"hi".to_vec();
        assert_eq!(done, Finished { end: End::Code(3), stdout, stderr: vec![0, 255, 0], truncated: true });
        let killed = [answers[0].clone(), line(r#"{"return":{"exited":true,"signal":9}}"#)];
        assert_eq!(against(&killed, b"").unwrap().end, End::Signal(9));
    }

    #[test]
    fn lies_are_errors() {
        let started = line(r#"{"return":{"pid":7}}"#);
        let ends = [
            r#"{"return":{"exited":true}}"#,
            r#"{"return":{"exited":true,"signal":900}}"#,
            r#"{"return":{"exited":true,"exitcode":0,"out-data":"a=b="}}"#,
            r#"{"return":7}"#,
            "{}",
            "garbage",
        ];
        for end in ends {
            let error = against(&[started.clone(), line(end)], b"").unwrap_err();
            assert!(matches!(error, AgentError::Odd(_)), "{end}: {error}");
        }
        let endless = vec![b'['; ANSWER_BYTES + (1 << 20)];
        assert!(matches!(against(&[endless], b""), Err(AgentError::Odd(_))));
        let error = r#"{"error":{"class":"CommandNotFound","desc":"guest-exec has been disabled\u001b[2J"}}"#;
        let text = against(&[line(error)], b"").unwrap_err().to_string();
        assert!(text.contains("allow-rpcs") && !text.contains('\u{1b}'), "{text}");
        let error = r#"{"error":{"class":"GenericError","desc":"No such file or directory"}}"#;
        assert!(matches!(against(&[line(error)], b""), Err(AgentError::NotStarted(_))));
        // It hangs up.
        assert!(matches!(against(&[], b""), Err(AgentError::Unreachable(_))));
    }

    #[test]
    fn silence_ends_with_the_time_that_was_given() {
        let dir = tempfile::tempdir().unwrap();
        let socket = socket_path(dir.path(), "v");
        let soon = || {
            let deadline = Some(Instant::now() + Duration::from_millis(200));
            execute(&socket, &[], b"", deadline, &AtomicBool::new(false))
        };
        assert!(matches!(soon(), Err(AgentError::Unreachable(_))));
        let _listener = UnixListener::bind(&socket).unwrap();
        assert!(matches!(soon(), Err(AgentError::TimedOut { pid: None })));
        let held = lock(&socket, Until { deadline: None, stop: &AtomicBool::new(false) }).unwrap();
        assert!(matches!(soon(), Err(AgentError::TimedOut { pid: None })));
        drop(held);
    }

    #[test]
    fn empty_lines_without_end_cost_no_more_than_their_bytes() {
        let begun = Instant::now();
        let done = against(
            &[line(r#"{"return":{"pid":7}}"#), line(r#"{"return":{"exited":true,"exitcode":0}}"#)],
            &vec![b'\n'; 16 << 20],
        );
        assert_eq!(done.unwrap().end, End::Code(0));
        // With a buffer for each line it takes minutes.
        assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    }

    /// An agent for any number of connections, whose command ends when it gets one of `deadly`.
    /// Gives the signals that it got.
    fn stopped(deadly: Option<&str>) -> (AgentError, Vec<String>) {
        let dir = tempfile::tempdir().unwrap();
        let socket = socket_path(dir.path(), "v");
        let listener = UnixListener::bind(&socket).unwrap();
        let stop = AtomicBool::new(false);
        let signals = std::sync::Mutex::new(Vec::new());
        let serve = |mut peer: UnixStream| {
            let lines = BufReader::new(peer.try_clone().unwrap()).split(b'\n');
            for text in lines.map_while(Result::ok) {
                let asked: Value = serde_json::from_slice(text.strip_prefix(b"\xff").unwrap_or(&text)).unwrap();
                let arguments = &asked["arguments"];
                let word = |at: usize| arguments["arg"][at].as_str().unwrap_or_default().to_string();
                let dead =
                    signals.lock().unwrap().iter().any(|signal| Some(signal) == deadly.map(String::from).as_ref());
                let answer = match asked["execute"].as_str().unwrap() {
                    "guest-sync-delimited" => json!({ "return": arguments["id"] }),
                    "guest-exec" if word(0) == "-c" => {
                        assert_eq!((arguments["path"].as_str(), word(4).as_str()), (Some("/bin/sh"), "7"));
                        signals.lock().unwrap().push(word(3));
                        json!({ "return": { "pid": 8 } })
                    }
                    "guest-exec" => {
                        stop.store(true, Ordering::Relaxed);
                        json!({ "return": { "pid": 7 } })
                    }
                    _ if dead => json!({ "return": { "exited": true, "signal": 15 } }),
                    _ => json!({ "return": { "exited": false } }),
                };
                let mark: &[u8] = if answer["return"].is_i64() { b"\xff" } else { b"" };
                let _ = peer.write_all(&[mark, answer.to_string().as_bytes(), b"\n"].concat());
            }
        };
        let error = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !signals.lock().unwrap().iter().any(|signal| signal == "done") {
                    serve(listener.accept().unwrap().0);
                }
            });
            let error = execute(&socket, &["sleep".into()], b"", None, &stop).unwrap_err();
            signals.lock().unwrap().push("done".into());
            drop(UnixStream::connect(&socket));
            error
        });
        (error, signals.into_inner().unwrap())
    }

    #[test]
    fn a_client_that_is_to_stop_ends_its_command() {
        let (error, signals) = stopped(Some("TERM"));
        assert!(
            matches!(error, AgentError::Stopped { pid: None, .. }) && error.to_string().contains("was ended"),
            "{error}"
        );
        assert_eq!(signals, ["TERM", "done"]);
        let (error, signals) = stopped(Some("KILL"));
        assert!(matches!(error, AgentError::Stopped { pid: None, .. }), "{error}");
        assert_eq!(signals, ["TERM", "KILL", "done"]);
        let (error, _) = stopped(None);
        assert!(matches!(error, AgentError::Stopped { pid: Some(7), .. }), "{error}");
        // Before anything was asked.
        let dir = tempfile::tempdir().unwrap();
        let socket = socket_path(dir.path(), "v");
        let _silent = UnixListener::bind(&socket).unwrap();
        let begun = Instant::now();
        let error = execute(&socket, &[], b"", None, &AtomicBool::new(true)).unwrap_err();
        assert!(matches!(error, AgentError::Stopped { pid: None, .. }) && begun.elapsed() < SILENCE, "{error}");
    }

    #[test]
    fn a_guest_that_never_says_that_it_started_the_command_holds_no_stop_for_long() {
        let dir = tempfile::tempdir().unwrap();
        let socket = socket_path(dir.path(), "v");
        let listener = UnixListener::bind(&socket).unwrap();
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (mut peer, _) = listener.accept().unwrap();
                let mut lines = BufReader::new(peer.try_clone().unwrap());
                let mut text = Vec::new();
                lines.read_until(b'\n', &mut text).unwrap();
                let sync: Value = serde_json::from_slice(&text[1..]).unwrap();
                peer.write_all(
                    &[b"\xff", format!("{{\"return\": {}}}\n", sync["arguments"]["id"]).as_bytes()].concat(),
                )
                .unwrap();
                lines.read_until(b'\n', &mut text).unwrap();
                stop.store(true, Ordering::Relaxed);
                // Until the client hangs up.
                let _ = lines.read_until(b'\n', &mut text);
            });
            let begun = Instant::now();
            let error = execute(&socket, &["true".into()], b"", None, &stop).unwrap_err();
            assert!(matches!(error, AgentError::Stopped { pid: None, .. }), "{error}");
            assert!(error.to_string().contains("had not said yet") && begun.elapsed() < SILENCE, "{error}");
        });
    }

    #[test]
    fn a_signal_reaches_all_that_descend_from_a_process() {
        use std::process::Command;
        let dir = tempfile::tempdir().unwrap();
        let after = dir.path().join("after");
        // A shell that would go on with its next command once the one before has ended.
        let script = format!("sh -c 'sleep 600; :'; : >{}", after.display());
        let mut tree = Command::new("sh").args(["-c", &script]).spawn().unwrap();
        let children =
            |pid: u32| std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
        let child = || children(tree.id()).trim().parse::<u32>().ok();
        let grandchild = || children(child()?).trim().parse::<u32>().ok();
        tombolo_testing::until("the tree", || grandchild().is_some());
        let last = grandchild().unwrap();
        let ticks = crate::process::start_ticks(last);
        let words = ["-c", SIGNAL_TREE, "sh", "TERM", &tree.id().to_string()];
        assert!(Command::new("/bin/sh").args(words).status().unwrap().success());
        tree.wait().unwrap();
        tombolo_testing::until("its end", || crate::process::has_gone(last, ticks));
        assert!(!after.exists());
    }

    #[test]
    fn base64_goes_both_ways() {
        for (bytes, text) in
            [(&b""[..], ""), (b"f", "Zg=="), (b"fo", "Zm8="), (b"foo", "Zm9v"), (b"foobar", "Zm9vYmFy")]
        {
            assert_eq!((encode(bytes).as_str(), decode(text).as_deref()), (text, Some(bytes)));
        }
        let all: Vec<u8> = (0..=255).collect();
        assert_eq!(decode(&encode(&all)), Some(all));
        for wrong in ["Z", "Zg=", "Zg==Zg==", "Z===", "====", "Zm9\n", "Zmé="] {
            assert_eq!(decode(wrong), None, "{wrong}");
        }
    }
}
