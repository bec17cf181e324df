//! iperf 2: a server for stock clients, TCP and UDP, with `-r` and `-d` both, with `-R` and
//! `--full-duplex` over TCP; and a client.
//!
//! | word of the command line | meaning | default |
//! | --- | --- | --- |
//! | `iperf=client` | sends to `host` once the network is up; the server runs as well | `server` |
//! | `host=NAME` | name or address of the server | |
//! | `port=N` | its port, and the one this cell listens on | 5001 |
//! | `time=N` | seconds to send for | 10 |
//! | `num=N[kmgKMG]` | bytes to send, instead | |
//! | `udp` | datagrams instead of a stream | |
//! | `rate=N[kmgKMG]` | bits per second of datagrams, payload only | 1m |
//! | `len=N` | payload of a datagram | 1470 |
//! | `exit` | the client ends the cell when it is done: code 0, or 1 if it failed | |
#![no_std]
#![no_main]

extern crate alloc;

use alloc::collections::BTreeMap;
use alloc::format;
use alloc::rc::Rc;
use alloc::string::ToString;
use alloc::vec::Vec;
use core::cell::Cell;
use tombolo_cell::{ExitCode, IpEndpoint, Net, TcpError, TcpOptions, TcpStream, UdpSocket, exit, println};
use tombolo_cells::iperf::{
    Amount, CLIENT_HEADER_BYTES, ClientHeader, DATAGRAM_BYTES, Datagram, EXTENDED_HEADER_BYTES, Mode, PORT,
    REPORT_BYTES, Receiver, Report, UDP_HEADER_BYTES, line, quantity, udp_line,
};

tombolo_cell::app!(iperf);

const STREAM_BYTES: core::ops::RangeInclusive<usize> = 16 << 10..=256 << 10;
/// What a stream may have on the way where there are few.
const MOST_SEND_BYTES: usize = 512 << 10;
const STREAMS: usize = 32;
const UDP_BYTES: usize = 1 << 20;
const DEFAULT_UDP_RATE: u64 = 1_000_000;
const DEFAULT_TIME_NS: u64 = 10_000_000_000;
/// Datagrams that are sent before the others have their turn.
const UDP_BURST: u64 = 32;
/// How often, and for how long each time, the report of a server is waited for.
const FIN_TRIES: u32 = 10;
const FIN_WAIT_NS: u64 = 250_000_000;
/// A sender that has been silent for so long has gone without a notice.
const SESSION_IDLE_US: u64 = 10_000_000;
const MAX_SESSIONS: usize = 64;

async fn iperf(net: Net) {
    let port = net.config().number("port").and_then(|n| u16::try_from(n).ok()).unwrap_or(PORT);
    let sends_back = Back::default();
    serve_tcp(&net, port, sends_back.clone());
    net.spawn(serve_udp(net.clone(), port, sends_back));
    if net.config().get("iperf") == Some("client") {
        net.up().await;
        let done = client(&net, port).await;
        if let Err(error) = &done {
            println!("iperf: {error}");
        }
        if net.config().has("exit") {
            exit(if done.is_ok() { ExitCode::Success } else { ExitCode::Failure });
        }
    }
}

/// A connection's buffers, smaller where there is little memory, of which half is for them.
fn stream_options(net: &Net) -> TcpOptions {
    let bytes = (net.memory_bytes() / 2 / STREAMS / 2).clamp(*STREAM_BYTES.start(), *STREAM_BYTES.end());
    let limit = (net.memory_bytes() / 2 / (2 * bytes)).clamp(4, STREAMS);
    TcpOptions { receive_bytes: bytes, send_bytes: MOST_SEND_BYTES, send_all_bytes: limit * bytes, limit }
}

/// The same for a socket of datagrams.
fn udp_bytes(net: &Net) -> usize {
    UDP_BYTES.min(net.memory_bytes() / 16)
}

// --- the client ---

async fn client(net: &Net, port: u16) -> Result<(), alloc::string::String> {
    let config = net.config();
    let host = config.get("host").ok_or("iperf=client needs host=NAME on the command line")?;
    let size = |key| match config.get(key) {
        None => Ok(None),
        Some(text) => {
            quantity(text).map(Some).ok_or(format!("{key}={text}: expected a number, with k, m, g, K, M or G"))
        }
    };
    let amount = match size("num")? {
        Some(bytes) => Amount::Bytes(bytes),
        None => Amount::Nanoseconds(config.number("time").map_or(DEFAULT_TIME_NS, |s| s.saturating_mul(1_000_000_000))),
    };
    let address = net.resolve(host).await.map_err(|error| format!("{host}: {error}"))?;
    let to = IpEndpoint::new(address, port);
    if config.has("udp") {
        let rate = size("rate")?.unwrap_or(DEFAULT_UDP_RATE);
        let len = config.number("len").map_or(DATAGRAM_BYTES, |n| n as usize);
        let mut socket = net.udp_with(0, udp_bytes(net)).map_err(|error| error.to_string())?;
        return send_datagrams(net, &mut socket, to, amount, rate, len).await;
    }
    let mut stream = net.connect(to, stream_options(net)).await.map_err(|error| format!("{to}: {error}"))?;
    stream.write_all(&[0; CLIENT_HEADER_BYTES]).await.map_err(|error| format!("{to}: {error}"))?;
    send_stream(net, &mut stream, amount, 0).await.map_err(|error| format!("{to}: {error}"))
}

/// Sends on a connection, and says how much it was.
async fn send_stream(net: &Net, stream: &mut TcpStream, amount: Amount, rate: u64) -> Result<(), TcpError> {
    let peer = stream.peer();
    let start = net.now_ns();
    let mut sent = 0u64;
    loop {
        let left = match amount {
            Amount::Bytes(bytes) => bytes - sent,
            Amount::Nanoseconds(ns) if net.now_ns() - start < ns => u64::MAX,
            Amount::Nanoseconds(_) => 0,
        };
        if left == 0 {
            break;
        }
        // Any content of the buffer will do.
        let fill = |room: &mut [u8]| {
            let n = usize::try_from(left).unwrap_or(usize::MAX).min(room.len());
            (n, n as u64)
        };
        sent += stream.write_with(fill).await?;
        if let Some(due_ns) = (sent.saturating_mul(8_000_000_000)).checked_div(rate) {
            net.sleep_until(start + due_ns).await;
        }
    }
    stream.finish().await;
    let us = (net.now_ns() - start) / 1000;
    if let Some(peer) = peer {
        println!("{}", line(&format!("TCP to {peer}"), sent, us));
    }
    Ok(())
}

/// Sends datagrams, ends with those that ask for the report, and prints both views.
async fn send_datagrams(
    net: &Net,
    socket: &mut UdpSocket,
    to: IpEndpoint,
    amount: Amount,
    rate: u64,
    len: usize,
) -> Result<(), alloc::string::String> {
    let len = len.clamp(UDP_HEADER_BYTES + CLIENT_HEADER_BYTES, 65507);
    let start = net.now_ns();
    let mut sent = 0u64;
    let send = async |socket: &mut UdpSocket, id: i64| {
        let datagram = Datagram { id, sent_us: net.now_ns() / 1000 };
        socket.send_with(len, to, |bytes| datagram.emit(bytes)).await.map_err(|error| format!("{to}: {error}"))
    };
    loop {
        let over = match amount {
            Amount::Bytes(bytes) => sent * len as u64 >= bytes,
            Amount::Nanoseconds(ns) => net.now_ns() - start >= ns,
        };
        if over {
            break;
        }
        let due_ns = (sent * len as u64 * 8).saturating_mul(1_000_000_000).checked_div(rate).unwrap_or(0);
        if start + due_ns > net.now_ns() {
            net.sleep_until(start + due_ns).await;
        } else if sent.is_multiple_of(UDP_BURST) {
            net.pause().await;
        }
        sent += 1;
        send(socket, sent as i64).await?;
    }
    let us = (net.now_ns() - start) / 1000;
    println!("{}", line(&format!("UDP to {to}"), sent * len as u64, us));
    for _ in 0..FIN_TRIES {
        send(socket, -(sent as i64 + 1)).await?;
        let answer = async {
            loop {
                if let Some(report) = socket.receive_with(|bytes, _| Report::parse(bytes)).await {
                    return report;
                }
            }
        };
        if let Some(report) = net.within(FIN_WAIT_NS, answer).await {
            println!("{}", udp_line(&format!("UDP to {to}, the server's report"), &report));
            return Ok(());
        }
    }
    Err(format!("{to}: no report after {FIN_TRIES} requests"))
}

// --- the server ---

fn serve_tcp(net: &Net, port: u16, back: Back) {
    let net2 = net.clone();
    net.serve(port, stream_options(net), move |mut stream: TcpStream| {
        let (net, back) = (net2.clone(), back.clone());
        async move {
            // An error means that the client has gone; what came before was reported.
            let _ = serve_stream(&net, &mut stream, &back).await;
        }
    });
}

/// How many clients are sent back to, on connections or by datagrams that the cell begins. A client
/// may be gone by then, so neither the listener's limit nor that of sessions bounds them.
#[derive(Clone, Default)]
struct Back(Rc<Cell<usize>>);

/// One of them.
struct Sending(Back);

impl Back {
    /// `None` where there are as many as may be.
    fn begin(&self, to: IpEndpoint) -> Option<Sending> {
        if self.0.get() >= STREAMS {
            println!("iperf: {to}: nothing is sent back, since {STREAMS} others are sent back to");
            return None;
        }
        self.0.set(self.0.get() + 1);
        Some(Sending(self.clone()))
    }
}

impl Drop for Sending {
    fn drop(&mut self) {
        let Sending(Back(count)) = self;
        count.set(count.get() - 1);
    }
}

async fn serve_stream(net: &Net, stream: &mut TcpStream, sends_back: &Back) -> Result<(), TcpError> {
    let Some(peer) = stream.peer() else { return Ok(()) };
    let start = net.now_ns();
    let mut head: Vec<u8> = Vec::new();
    let mut bytes = 0u64;
    let header = loop {
        if let Some(header) = ClientHeader::parse(&head) {
            break header;
        }
        let more = stream.read_with(|b| {
            let n = b.len().min(EXTENDED_HEADER_BYTES - head.len());
            head.extend_from_slice(&b[..n]);
            (n, n as u64)
        });
        match more.await? {
            Some(n) => bytes += n,
            None => return Ok(()),
        }
    };
    let back = IpEndpoint::new(peer.addr, header.port);
    match header.mode {
        Mode::Reverse => return send_stream(net, stream, header.amount, header.rate).await,
        Mode::Dual => stream_back(net, back, header, sends_back),
        Mode::FullDuplex => return full_duplex(net, stream, header).await,
        Mode::Receive | Mode::Tradeoff => {}
    }
    // An error ends the stream as its end does; what came is reported either way.
    while let Ok(Some(n)) = stream.read_with(|b| (b.len(), b.len() as u64)).await {
        bytes += n;
    }
    println!("{}", line(&format!("TCP from {peer}"), bytes, (net.now_ns() - start) / 1000));
    if header.mode == Mode::Tradeoff {
        stream_back(net, back, header, sends_back);
    }
    Ok(())
}

/// Connects to the port that a client has named, and sends.
fn stream_back(net: &Net, back: IpEndpoint, header: ClientHeader, sends_back: &Back) {
    let Some(sending) = sends_back.begin(back) else { return };
    let net2 = net.clone();
    net.spawn(async move {
        let _sending = sending;
        let mut stream = match net2.connect(back, stream_options(&net2)).await {
            Ok(stream) => stream,
            Err(error) => return println!("iperf: {back}: {error}"),
        };
        if stream.write_all(&[0; CLIENT_HEADER_BYTES]).await.is_ok() {
            // An error means that the client has gone.
            let _ = send_stream(&net2, &mut stream, header.amount, header.rate).await;
        }
    });
}

/// Both directions on one connection: what has arrived is taken whenever there is room to send, and
/// the rest at the end.
async fn full_duplex(net: &Net, stream: &mut TcpStream, header: ClientHeader) -> Result<(), TcpError> {
    let peer = stream.peer();
    let start = net.now_ns();
    let (mut received, mut sent) = (0u64, 0u64);
    loop {
        let left = match header.amount {
            Amount::Bytes(bytes) => bytes.saturating_sub(sent),
            Amount::Nanoseconds(ns) if net.now_ns() - start < ns => u64::MAX,
            Amount::Nanoseconds(_) => 0,
        };
        if left == 0 {
            break;
        }
        let (taken, filled) = stream
            .exchange(|bytes| bytes.len(), |room| usize::try_from(left).unwrap_or(usize::MAX).min(room.len()))
            .await?;
        received += taken as u64;
        sent += filled as u64;
    }
    stream.finish().await;
    while let Ok(Some(n)) = stream.read_with(|b| (b.len(), b.len() as u64)).await {
        received += n;
    }
    let us = (net.now_ns() - start) / 1000;
    if let Some(peer) = peer {
        println!("{}", line(&format!("TCP from {peer}"), received, us));
        println!("{}", line(&format!("TCP to {peer}"), sent, us));
    }
    Ok(())
}

/// A sender of datagrams, and what was seen of it.
struct Session {
    receiver: Receiver,
    /// The report that was given, when the sender had ended.
    report: Option<Report>,
    last_us: u64,
}

async fn serve_udp(net: Net, port: u16, sends_back: Back) {
    let mut socket = match net.udp_with(port, udp_bytes(&net)) {
        Ok(socket) => socket,
        Err(error) => {
            println!("iperf: UDP port {port}: {error}");
            return;
        }
    };
    let mut sessions: BTreeMap<IpEndpoint, Session> = BTreeMap::new();
    let mut answer: Vec<u8> = Vec::new();
    loop {
        let now_us = || net.now_ns() / 1000;
        let ended = socket
            .receive_with(|bytes, from| {
                let datagram = Datagram::parse(bytes)?;
                let now_us = now_us();
                if !sessions.contains_key(&from) {
                    sessions.retain(|_, s| now_us - s.last_us < SESSION_IDLE_US);
                    if sessions.len() >= MAX_SESSIONS {
                        return None;
                    }
                    // One that only ends has begun elsewhere, or is over and forgotten.
                    if datagram.id <= 0 {
                        return None;
                    }
                    let header = bytes.get(UDP_HEADER_BYTES..).and_then(ClientHeader::parse);
                    if let Some(header) = header.filter(|h| h.mode == Mode::Dual) {
                        datagrams_back(&net, IpEndpoint::new(from.addr, header.port), header, &sends_back);
                    }
                }
                let fresh = Session { receiver: Receiver::new(now_us), report: None, last_us: now_us };
                let session = sessions.entry(from).or_insert(fresh);
                session.last_us = now_us;
                if datagram.id > 0 {
                    if session.report.is_none() {
                        session.receiver.take(datagram, bytes.len(), now_us);
                    }
                    return None;
                }
                let first = session.report.is_none();
                if first {
                    session.receiver.take(datagram, bytes.len(), now_us);
                    session.report = Some(session.receiver.report());
                }
                answer.clear();
                answer.extend_from_slice(bytes);
                answer.resize(bytes.len().max(REPORT_BYTES), 0);
                let report = session.report?;
                report.emit(&mut answer);
                let header = bytes.get(UDP_HEADER_BYTES..).and_then(ClientHeader::parse);
                Some((from, first.then_some((report, header))))
            })
            .await;
        let Some((from, first)) = ended else { continue };
        let _ = socket.send(&answer, from).await;
        if let Some((report, header)) = first {
            println!("{}", udp_line(&format!("UDP from {from}"), &report));
            if let Some(header) = header.filter(|h| h.mode == Mode::Tradeoff) {
                datagrams_back(&net, IpEndpoint::new(from.addr, header.port), header, &sends_back);
            }
        }
    }
}

/// Sends datagrams to the port that a client has named.
fn datagrams_back(net: &Net, to: IpEndpoint, header: ClientHeader, sends_back: &Back) {
    let Some(sending) = sends_back.begin(to) else { return };
    let net2 = net.clone();
    net.spawn(async move {
        let _sending = sending;
        let rate = if header.rate == 0 { DEFAULT_UDP_RATE } else { header.rate };
        let done = match net2.udp_with(0, udp_bytes(&net2)) {
            Ok(mut socket) => send_datagrams(&net2, &mut socket, to, header.amount, rate, header.datagram_bytes).await,
            Err(error) => Err(error.to_string()),
        };
        if let Err(error) = done {
            println!("iperf: {error}");
        }
    });
}
