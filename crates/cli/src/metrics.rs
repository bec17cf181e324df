//! `tombolo metrics`: the fabric's metrics, printed once or served to Prometheus.
//!
//! The API is a Unix socket through which a fabric can be changed, and Prometheus reads over TCP.
//! What listens here gives the metrics and nothing else. It is not a general HTTP server: it reads
//! one request per connection, answers and hangs up.
//!
//! Limits: 8 connections at a time (further ones are closed at once), 5 s and 8 KiB for a request,
//! 5 s for a client that does not read. A fabric that does not answer is a 503, so its alert is
//! raised; the next request asks it again.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use clap::Args;
use tombolo_host::api::client::Client;
use tombolo_host::rundir;

use crate::exit::{Exit, Failure};
use crate::out;
use crate::select::Select;

const EXAMPLES: &str = "\
Anyone who reaches the address may read the metrics: names, addresses of forwards, counters. Nothing can be changed there.
docs/metrics.md has the settings of Prometheus, alert rules and a dashboard for Grafana.

Examples:
  tombolo metrics | grep dropped
  tombolo metrics --fabric demo --listen 127.0.0.1:9464     serves http://127.0.0.1:9464/metrics";

const CONNECTIONS: usize = 8;
const PATIENCE: Duration = Duration::from_secs(5);
const REQUEST_LIMIT_BYTES: u64 = 8 << 10;

#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Metrics {
    /// Serve the metrics at this address, for Prometheus, instead of printing them
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Option<SocketAddr>,
}

impl Metrics {
    pub(crate) fn run(&self, select: &Select) -> Result<Exit, Failure> {
        let Some(address) = self.listen else {
            out::print(&select.client()?.text("/metrics")?)?;
            return Ok(Exit::Done);
        };
        // The fabric may come later, but not its name.
        let root = rundir::runtime_root()?;
        let name = select.name(&root)?;
        let listener = TcpListener::bind(address).map_err(|e| Failure::failed(format!("--listen {address}: {e}")))?;
        out::tell!("tombolo: metrics of {name} at http://{}/metrics", listener.local_addr()?);
        let socket = rundir::api_socket(&root, &name);
        serve(&listener, move || {
            let client = Client::new(&name, &socket).map_err(|e| e.to_string())?;
            client.text("/metrics").map_err(|e| e.to_string())
        });
        Ok(Exit::Done)
    }
}

/// Answers connections until the process ends.
fn serve(listener: &TcpListener, page: impl Fn() -> Result<String, String> + Send + Sync + 'static) {
    let (page, open) = (Arc::new(page), Arc::new(AtomicUsize::new(0)));
    for stream in listener.incoming() {
        let Ok(stream) = stream else {
            // Out of descriptors, say: it may pass.
            std::thread::sleep(Duration::from_millis(100));
            continue;
        };
        let (page, open) = (page.clone(), open.clone());
        // Only a count: nothing else is published by it.
        if open.fetch_add(1, Ordering::Relaxed) >= CONNECTIONS {
            open.fetch_sub(1, Ordering::Relaxed);
            continue;
        }
        let counted = open.clone();
        let work = move || {
            // A client that goes away or is too slow has no answer.
            let _ = answer(stream, &*page);
            counted.fetch_sub(1, Ordering::Relaxed);
        };
        if std::thread::Builder::new().spawn(work).is_err() {
            open.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

fn answer(mut stream: TcpStream, page: &dyn Fn() -> Result<String, String>) -> io::Result<()> {
    stream.set_write_timeout(Some(PATIENCE))?;
    let head = head(&mut stream)?;
    let line = head.lines().next().unwrap_or_default();
    let (method, path) = line.split_once(' ').map_or(("", ""), |(m, rest)| (m, rest.split(' ').next().unwrap_or("")));
    let kind = "text/plain; version=0.0.4; charset=utf-8";
    let (status, body) = match (method, path.split('?').next().unwrap_or_default()) {
        ("GET" | "HEAD", "/metrics") => match page() {
            Ok(text) => ("200 OK", text),
            Err(why) => ("503 Service Unavailable", why + "\n"),
        },
        ("GET" | "HEAD", _) => ("404 Not Found", "the metrics are at /metrics\n".into()),
        ("", _) => ("400 Bad Request", "expected an HTTP request\n".into()),
        _ => ("405 Method Not Allowed", "only GET and HEAD\n".into()),
    };
    let length = body.len();
    let text =
        format!("HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n");
    stream.write_all(text.as_bytes())?;
    if method != "HEAD" {
        stream.write_all(body.as_bytes())?;
    }
    stream.shutdown(std::net::Shutdown::Write)?;
    // What the client still sends would reset the connection before it has read all; but it is not
    // read for long.
    stream.set_read_timeout(Some(Duration::from_millis(200)))?;
    io::copy(&mut stream.take(REQUEST_LIMIT_BYTES), &mut io::sink()).map(drop)
}

/// The head of a request, up to its empty line.
fn head(stream: &mut TcpStream) -> io::Result<String> {
    let until = Instant::now() + PATIENCE;
    let mut bytes = Vec::new();
    let mut piece = [0; 1024];
    while !bytes.windows(4).any(|w| w == b"\r\n\r\n") {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() || bytes.len() as u64 >= REQUEST_LIMIT_BYTES {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut piece)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            n => bytes.extend_from_slice(&piece[..n]),
        }
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    fn server(page: impl Fn() -> Result<String, String> + Send + Sync + 'static) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || serve(&listener, page));
        address
    }

    fn ask(address: SocketAddr, request: &str) -> String {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer);
        answer
    }

    #[test]
    fn the_page_is_given_and_nothing_else() {
        let address = server(|| Ok("x_total 1\n".into()));
        let page = ask(address, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
        assert!(page.starts_with("HTTP/1.1 200 OK\r\n") && page.ends_with("\r\n\r\nx_total 1\n"), "{page}");
        assert!(page.contains("version=0.0.4") && page.contains("Content-Length: 10\r\n"), "{page}");
        let page = ask(address, "HEAD /metrics?x=1 HTTP/1.1\r\n\r\n");
        assert!(page.starts_with("HTTP/1.1 200") && page.ends_with("\r\n\r\n"), "{page}");
        for (request, status) in [
            ("GET /v1/status HTTP/1.1\r\n\r\n", "404"),
            ("POST /metrics HTTP/1.1\r\n\r\n", "405"),
            ("POST /v1/down HTTP/1.1\r\n\r\n", "405"),
            ("\r\n\r\n", "400"),
            ("GET\r\n\r\n", "400"),
        ] {
            let answer = ask(address, request);
            assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{request:?}: {answer}");
        }
    }

    #[test]
    fn a_fabric_without_an_answer_is_a_503() {
        let address = server(|| Err("no fabric runs".into()));
        let page = ask(address, "GET /metrics HTTP/1.1\r\n\r\n");
        assert!(page.starts_with("HTTP/1.1 503") && page.ends_with("no fabric runs\n"), "{page}");
    }

    #[test]
    fn long_requests_and_many_connections_are_cut_off() {
        let (tell, asked) = mpsc::channel();
        let tell = std::sync::Mutex::new(tell);
        let address = server(move || {
            tell.lock().unwrap().send(()).unwrap();
            Ok(String::new())
        });
        let mut long = TcpStream::connect(address).unwrap();
        let sent = long.write_all(&vec![b'x'; 2 * REQUEST_LIMIT_BYTES as usize]);
        let mut answer = Vec::new();
        // Closed without an answer, with or without a reset.
        let read = long.read_to_end(&mut answer);
        assert!(answer.is_empty(), "{sent:?} {read:?} {answer:?}");
        // Those that say nothing take all places; one more is closed at once.
        let silent: Vec<_> = (0..CONNECTIONS).map(|_| TcpStream::connect(address).unwrap()).collect();
        let mut more = TcpStream::connect(address).unwrap();
        more.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        assert!(matches!(more.read(&mut [0]), Ok(0) | Err(_)), "it is closed");
        drop(silent);
        // They have their places back as soon as they have gone.
        let until = Instant::now() + Duration::from_secs(60);
        while !ask(address, "GET /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 200") {
            assert!(Instant::now() < until, "the places are free again");
        }
        asked.recv().unwrap();
    }
}
