//! `tombolo call`: calls a service by hand, once or often.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use tombolo_rpc::client::{CallError, CallOptions, Client, ConnectError, ConnectOptions};
use tombolo_rpc::clock;
use tombolo_rpc::deadline::Deadline;

use crate::exit::{Exit, Failure};
use crate::number;
use crate::out;
use crate::service::time;

/// Longest reply, in bytes, that is repeated in a message.
const MOST_WORDS: usize = 200;
/// How long a service may take to let us in, however short the call is to be: on a busy machine a
/// good one needs a while.
const LEAST_TIMEOUT: Duration = Duration::from_millis(100);
/// Between two looks for a service that is waited for.
const LOOK: Duration = Duration::from_millis(20);

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Form {
    /// As received, with a newline if it lacks one
    Text,
    /// In hexadecimal digits
    Hex,
    /// As received, byte for byte
    Raw,
}

#[derive(Args, Debug)]
pub(crate) struct Call {
    /// Name of the service
    name: String,
    /// Text to send; put `--` before it if it begins with a dash [default: nothing]
    #[arg(conflicts_with_all = ["hex", "file"])]
    data: Option<String>,
    /// Bytes to send, in hexadecimal digits
    #[arg(long, value_name = "DIGITS", conflicts_with = "file")]
    hex: Option<String>,
    /// Send the contents of this file; - is standard input
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Deadline, counted from the call: 200us, 5ms, 1s [default: best effort]
    #[arg(long, value_name = "TIME", value_parser = number::duration, allow_hyphen_values = true)]
    deadline: Option<Duration>,
    /// Time to wait for a late reply after the deadline [default: the call ends at its deadline]
    #[arg(long, value_name = "TIME", value_parser = number::duration, allow_hyphen_values = true, requires = "deadline")]
    wait_late: Option<Duration>,
    /// Longest time to wait for the answer
    #[arg(long, value_name = "TIME", value_parser = number::duration, allow_hyphen_values = true, default_value = "30s")]
    timeout: Duration,
    /// Longest time that the request may wait to be served [default: the service's choice]
    #[arg(long, value_name = "TIME", value_parser = number::duration, allow_hyphen_values = true)]
    ttl: Option<Duration>,
    /// Time to wait for a service that is not there yet
    #[arg(long, value_name = "TIME", value_parser = number::duration, allow_hyphen_values = true)]
    wait: Option<Duration>,
    /// Call this many times and report ends, times and late replies, without printing replies
    #[arg(long, value_name = "N", value_parser = number::count, allow_hyphen_values = true)]
    repeat: Option<u64>,
    /// Time between two repeated calls
    #[arg(long, value_name = "TIME", value_parser = number::duration, allow_hyphen_values = true, requires = "repeat")]
    interval: Option<Duration>,
    /// How the reply is printed
    #[arg(long, value_enum, default_value = "text", conflicts_with_all = ["json", "repeat"])]
    output: Form,
    /// Print the report of repeated calls, or the reply and its times, as JSON
    #[arg(long)]
    json: bool,
}

fn bytes_of(digits: &str) -> Result<Vec<u8>, Failure> {
    let digits: Vec<char> = digits.chars().filter(|c| !c.is_whitespace() && *c != ':').collect();
    let wrong = || Failure::misused("--hex: expected an even number of digits 0-9 a-f, between them blanks or colons");
    if !digits.len().is_multiple_of(2) {
        return Err(wrong());
    }
    let byte = |pair: &[char]| u8::from_str_radix(&pair.iter().collect::<String>(), 16).map_err(|_| wrong());
    digits.chunks(2).map(byte).collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// How a call ended, in one or two words.
fn outcome(result: &Result<u32, CallError>) -> String {
    match result {
        Ok(0) => "served",
        Ok(code) => return format!("code {code}"),
        Err(CallError::Refused(why)) => return format!("refused ({})", why.name()),
        Err(CallError::DeadlineExceeded) => "deadline exceeded",
        Err(CallError::Late) => "late",
        Err(CallError::Cancelled) => "cancelled",
        Err(CallError::Expired) => "expired",
        Err(CallError::Failed) => "failed",
        Err(CallError::ProviderGone) => "provider gone",
        Err(CallError::Timeout) => "timed out",
        Err(CallError::Broken(_)) => "protocol broken",
        Err(CallError::Busy(_)) => "busy",
        Err(CallError::Memory(_) | CallError::Share { .. } | CallError::Range { .. }) => "no memory",
        Err(CallError::TooLong { .. }) => "too long",
        Err(CallError::Reclaimed) => "reply reclaimed",
        Err(CallError::ReplyMemory) => "reply's memory missing",
        Err(CallError::ReplyTooLarge { .. }) => "reply too large",
        Err(CallError::Unknown) => "unknown call",
    }
    .into()
}

/// The application's code in a message: with the reply, where that is a few words.
fn code(code: u32, reply: &[u8]) -> String {
    let words = std::str::from_utf8(reply).ok().map(str::trim);
    let words = words.filter(|w| (1..=MOST_WORDS).contains(&w.len()) && !w.contains(char::is_control));
    let words = words.map_or(String::new(), |words| format!(": {words}"));
    format!("code {code}, the application's own{words}")
}

impl Call {
    fn bytes(&self) -> Result<Vec<u8>, Failure> {
        if let Some(digits) = &self.hex {
            return bytes_of(digits);
        }
        let Some(file) = &self.file else {
            return Ok(self.data.clone().unwrap_or_default().into_bytes());
        };
        let mut bytes = Vec::new();
        let read = if file.as_os_str() == "-" {
            std::io::stdin().lock().read_to_end(&mut bytes)
        } else {
            std::fs::File::open(file).and_then(|mut f| f.read_to_end(&mut bytes))
        };
        read.map_err(|e| Failure::failed(format!("reading {}: {e}", file.display())))?;
        Ok(bytes)
    }

    fn options(&self) -> CallOptions {
        let deadline = Deadline::from(self.deadline);
        let wait_late = self.wait_late.unwrap_or_default();
        CallOptions { deadline, wait_late, timeout: self.timeout, ttl: self.ttl, ..CallOptions::default() }
    }

    /// A connection to the service, which may be waited for. To be let in takes no longer than the
    /// call may.
    fn connect(&self) -> Result<Client, ConnectError> {
        let until = Instant::now() + self.wait.unwrap_or_default();
        let mut options = ConnectOptions::default();
        let limit = self.deadline.map_or(self.timeout, |deadline| deadline.min(self.timeout));
        options.timeout = options.timeout.min(limit.max(LEAST_TIMEOUT));
        loop {
            match Client::connect_with(&self.name, &options) {
                Err(ConnectError::NoService { .. }) if Instant::now() < until => std::thread::sleep(LOOK),
                connected => return connected,
            }
        }
    }

    pub(crate) fn run(&self) -> Result<Exit, Failure> {
        let bytes = self.bytes()?;
        let begun = Instant::now();
        let client = match self.connect() {
            Err(ConnectError::Silent(waited)) if self.deadline.is_some_and(|limit| waited >= limit) => {
                return self.ended_before(&CallError::DeadlineExceeded, begun);
            }
            Err(ConnectError::Silent(waited)) if waited >= self.timeout => {
                return self.ended_before(&CallError::Timeout, begun);
            }
            connected => connected?,
        };
        match self.repeat {
            None => self.once(&client, &bytes),
            Some(count) => self.often(&client, &bytes, count),
        }
    }

    /// The call was over before the service let us in.
    fn ended_before(&self, error: &CallError, begun: Instant) -> Result<Exit, Failure> {
        if self.json && self.repeat.is_none() {
            let end = if matches!(error, CallError::Timeout) { "timed out" } else { "deadline exceeded" };
            out::json(&serde_json::json!({ "end": end, "elapsed_ns": clock::ns(begun.elapsed()) }))?;
            return Ok(Exit::Failed);
        }
        let name = &self.name;
        Err(Failure::failed(format!(
            "{name}: {error}: the service accepted the connection but does not answer. It may be stopped or hang; \
             `tombolo service ls` shows its process"
        )))
    }

    fn once(&self, client: &Client, bytes: &[u8]) -> Result<Exit, Failure> {
        let begun = Instant::now();
        let failed = |e: CallError| Failure::failed(format!("{}: {e}", self.name));
        let reply = match client.call(bytes, &self.options()) {
            Err(error) if self.json => {
                let end = outcome(&Err(error));
                out::json(&serde_json::json!({ "end": end, "elapsed_ns": clock::ns(begun.elapsed()) }))?;
                return Ok(Exit::Failed);
            }
            reply => reply.map_err(failed)?,
        };
        let elapsed_ns = clock::ns(begun.elapsed());
        let bytes = reply.to_vec().map_err(failed)?;
        if self.json {
            out::json(&serde_json::json!({
                "end": outcome(&Ok(reply.code())),
                "code": reply.code(),
                "bytes": bytes.len(),
                "hex": hex(&bytes),
                "text": std::str::from_utf8(&bytes).ok(),
                "elapsed_ns": elapsed_ns,
                "queued_ns": reply.queued_ns(),
                "service_ns": reply.service_ns(),
                "late_by_ns": reply.late_by_ns(),
            }))?;
        } else {
            if reply.is_late() {
                crate::out::tell!("{}: the reply came {} after its deadline", self.name, time(reply.late_by_ns()));
            }
            match self.output {
                Form::Hex => out::print(&format!("{}\n", hex(&bytes)))?,
                form => {
                    let mut stdout = std::io::stdout().lock();
                    stdout.write_all(&bytes)?;
                    if form == Form::Text && !bytes.ends_with(b"\n") {
                        stdout.write_all(b"\n")?;
                    }
                    stdout.flush()?;
                }
            }
        }
        if reply.code() != 0 {
            return Err(Failure::failed(format!("{} answered with {}", self.name, code(reply.code(), &bytes))));
        }
        Ok(Exit::Done)
    }

    fn often(&self, client: &Client, bytes: &[u8], count: u64) -> Result<Exit, Failure> {
        let mut times = Vec::new();
        let mut overran = 0;
        let mut outcomes = BTreeMap::<String, u64>::new();
        for n in 0..count {
            if n > 0
                && let Some(interval) = self.interval
            {
                std::thread::sleep(interval);
            }
            let begun = Instant::now();
            let result = client.call(bytes, &self.options()).map(|reply| reply.code());
            let ns = clock::ns(begun.elapsed());
            if result.is_ok() {
                times.push(ns);
                overran += u64::from(self.deadline.is_some_and(|deadline| ns > clock::ns(deadline)));
            }
            *outcomes.entry(outcome(&result)).or_default() += 1;
            if let Err(error @ (CallError::ProviderGone | CallError::Broken(_))) = result {
                return Err(Failure::failed(format!("{}: {error}, after {} of {count} calls", self.name, n + 1)));
            }
        }
        times.sort_unstable();
        let at =
            |part: f64| times.get(((times.len() as f64 * part) as usize).min(times.len().saturating_sub(1))).copied();
        let mean = (!times.is_empty()).then(|| times.iter().sum::<u64>() / times.len() as u64);
        let figures = [
            ("min", at(0.0)),
            ("mean", mean),
            ("p50", at(0.5)),
            ("p99", at(0.99)),
            ("p99.9", at(0.999)),
            ("max", at(1.0)),
        ];
        if self.json {
            let times: BTreeMap<String, u64> = figures
                .iter()
                .filter_map(|(name, ns)| ns.map(|ns| (format!("{}_ns", name.replace('.', "")), ns)))
                .collect();
            let mut report =
                serde_json::json!({ "calls": count, "bytes": bytes.len(), "outcomes": outcomes, "times": times });
            if self.deadline.is_some() {
                report["after_deadline"] = overran.into();
            }
            out::json(&report)?;
        } else {
            let words: Vec<String> = outcomes.iter().map(|(what, n)| format!("{n} {what}")).collect();
            let mut text = format!("{count} calls of {} bytes: {}", bytes.len(), words.join(", "));
            if self.deadline.is_some() {
                text.push_str(&format!("; {overran} of the replies came after the deadline"));
            }
            text.push('\n');
            for (name, ns) in figures {
                if let Some(ns) = ns {
                    text.push_str(&format!("{name:6} {}\n", time(ns)));
                }
            }
            out::print(&text)?;
        }
        Ok(match outcomes.get("served") {
            Some(n) if *n == count => Exit::Done,
            Some(_) => Exit::Partly,
            None => Exit::Failed,
        })
    }
}

#[cfg(test)]
mod tests {
    use tombolo_remote::Refusal;

    use super::*;

    #[test]
    fn codes_are_told_with_the_words_that_came_with_them() {
        assert_eq!(code(2, b"division by zero\n"), "code 2, the application's own: division by zero");
        for reply in [&b""[..], b"\xff\0", b"two\nlines", &[b'x'; 300]] {
            assert_eq!(code(7, reply), "code 7, the application's own");
        }
        assert_eq!(outcome(&Ok(2)), "code 2");
        assert_eq!(outcome(&Err(CallError::Refused(Refusal::Admission))), "refused (admission)");
    }

    #[test]
    fn hexadecimal_is_read_and_written() {
        assert_eq!(bytes_of("00:ff 1a").unwrap(), [0, 255, 26]);
        assert_eq!(hex(&[0, 255, 26]), "00ff1a");
        for wrong in ["0", "0g", "é0"] {
            assert!(bytes_of(wrong).is_err(), "{wrong}");
        }
    }
}
