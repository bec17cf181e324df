//! A web server: `/` is a page with the cell's counters, `/bytes/N` any number of bytes up to 1
//! GiB.
//!
//! Byte `i` of `/bytes/N` is `i` modulo 251, so a client can check what it gets: the first
//! 100,000,000 bytes have the SHA-256 that `python3 -c 'import sys;
//! sys.stdout.buffer.write((bytes(range(251))*398407)[:100000000])' | sha256sum` prints.
//!
//! A connection may stay open. One that sends nothing for 30 s, or takes nothing for 30 s, is
//! closed.
#![no_std]
#![no_main]

extern crate alloc;

use alloc::format;
use alloc::rc::Rc;
use alloc::string::String;
use alloc::vec::Vec;
use core::cell::{Cell, OnceCell};
use core::fmt::Write;
use tombolo_cell::{Net, TcpError, TcpOptions, TcpStream};
use tombolo_cells::http::{
    MAX_HEAD_BYTES, PATTERN, Parsed, Refusal, Request, Status, Target, parse, pattern, response_head,
};

tombolo_cell::app!(httpd);

const PORT: u16 = 80;
const RECEIVE_BYTES: usize = 8 << 10;
/// What a connection may have written and not yet acknowledged, on average where there are as many
/// as may be: less where there is little memory.
const SEND_BYTES: core::ops::RangeInclusive<usize> = 8 << 10..=128 << 10;
/// The same of one connection where there are few.
const MOST_SEND_BYTES: usize = 256 << 10;
/// Half of the memory is for connections: so many at least, as long as each gets the smallest
/// buffers, and so many at most.
const CONNECTIONS: core::ops::RangeInclusive<usize> = 256..=1024;
const TIMEOUT_NS: u64 = 30_000_000_000;

/// What all connections share.
struct Server {
    net: Net,
    /// How many bytes of the pattern one write takes at most.
    piece_bytes: usize,
    /// Made when it is first asked for.
    pattern: OnceCell<Vec<u8>>,
    requests: Cell<u64>,
    refused: Cell<u64>,
    body_bytes: Cell<u64>,
    open: Cell<u64>,
}

async fn httpd(net: Net) {
    let memory = net.memory_bytes() / 2;
    let fair = (memory / CONNECTIONS.start()).saturating_sub(RECEIVE_BYTES);
    let send_bytes = fair.clamp(*SEND_BYTES.start(), *SEND_BYTES.end());
    let limit = (memory / (RECEIVE_BYTES + send_bytes)).clamp(4, *CONNECTIONS.end());
    let options = TcpOptions {
        receive_bytes: RECEIVE_BYTES,
        send_bytes: MOST_SEND_BYTES,
        send_all_bytes: limit * send_bytes,
        limit,
    };
    let server = Rc::new(Server {
        net: net.clone(),
        piece_bytes: send_bytes,
        pattern: OnceCell::new(),
        requests: Cell::new(0),
        refused: Cell::new(0),
        body_bytes: Cell::new(0),
        open: Cell::new(0),
    });
    net.serve(PORT, options, move |mut stream: TcpStream| {
        let server = server.clone();
        async move {
            server.open.set(server.open.get() + 1);
            // An error means that the client has gone, so it cannot be reported.
            let _ = server.serve(&mut stream).await;
            server.open.set(server.open.get() - 1);
        }
    });
}

impl Server {
    async fn serve(&self, stream: &mut TcpStream) -> Result<(), TcpError> {
        let mut input: Vec<u8> = Vec::with_capacity(512);
        loop {
            let Parsed::Head { bytes, request } = parse(&input) else {
                if !self.read_more(stream, &mut input).await? {
                    return Ok(());
                }
                continue;
            };
            input.drain(..bytes);
            let keep_alive = match request {
                Ok(request) => {
                    self.requests.set(self.requests.get() + 1);
                    self.answer(stream, request).await?;
                    request.keep_alive
                }
                Err(refusal) => {
                    self.refuse(stream, refusal).await?;
                    refusal.keep_alive
                }
            };
            if !keep_alive {
                stream.finish().await;
                return Ok(());
            }
        }
    }

    /// Reads what there is; false where the client has ended, or was told that it is too slow.
    async fn read_more(&self, stream: &mut TcpStream, input: &mut Vec<u8>) -> Result<bool, TcpError> {
        let read = stream.read_with(|bytes| {
            // One byte more than a head may have shows that it is too long.
            let n = bytes.len().min(MAX_HEAD_BYTES + 1 - input.len().min(MAX_HEAD_BYTES));
            input.extend_from_slice(&bytes[..n]);
            (n, ())
        });
        match self.net.within(TIMEOUT_NS, read).await {
            Some(read) => Ok(read?.is_some()),
            None => {
                self.refuse(stream, Refusal { status: Status::Timeout, keep_alive: false }).await?;
                Ok(false)
            }
        }
    }

    async fn write(&self, stream: &mut TcpStream, bytes: &[u8]) -> Result<(), TcpError> {
        self.net.within(TIMEOUT_NS, stream.write_all(bytes)).await.unwrap_or(Err(TcpError::Closed))
    }

    async fn refuse(&self, stream: &mut TcpStream, refusal: Refusal) -> Result<(), TcpError> {
        self.refused.set(self.refused.get() + 1);
        let body = format!("{} {}\n", refusal.status as u16, refusal.status.reason());
        let mut whole = response_head(refusal.status, "text/plain", body.len() as u64, refusal.keep_alive);
        whole.push_str(&body);
        self.write(stream, whole.as_bytes()).await
    }

    async fn answer(&self, stream: &mut TcpStream, request: Request) -> Result<(), TcpError> {
        match request.target {
            Target::Page => {
                let page = self.page();
                let mut whole =
                    response_head(Status::Ok, "text/html; charset=utf-8", page.len() as u64, request.keep_alive);
                if !request.head_only {
                    whole.push_str(&page);
                    self.body_bytes.set(self.body_bytes.get() + page.len() as u64);
                }
                self.write(stream, whole.as_bytes()).await
            }
            Target::Bytes(n) => {
                let head = response_head(Status::Ok, "application/octet-stream", n, request.keep_alive);
                self.write(stream, head.as_bytes()).await?;
                if request.head_only { Ok(()) } else { self.stream_pattern(stream, n).await }
            }
        }
    }

    async fn stream_pattern(&self, stream: &mut TcpStream, n: u64) -> Result<(), TcpError> {
        let pattern = self.pattern.get_or_init(|| pattern(self.piece_bytes));
        let mut sent = 0u64;
        while sent < n {
            let write = stream.write_with(|room| {
                let len = usize::try_from(n - sent).unwrap_or(usize::MAX).min(room.len()).min(pattern.len() - PATTERN);
                let at = (sent % PATTERN as u64) as usize;
                room[..len].copy_from_slice(&pattern[at..at + len]);
                (len, len as u64)
            });
            let written = self.net.within(TIMEOUT_NS, write).await.unwrap_or(Err(TcpError::Closed))?;
            sent += written;
            self.body_bytes.set(self.body_bytes.get() + written);
        }
        Ok(())
    }

    fn page(&self) -> String {
        let stats = self.net.stats();
        let device = stats.device;
        let mut rows = String::new();
        for (name, value) in [
            ("uptime_ms", self.net.now_ns() / 1_000_000),
            ("requests", self.requests.get()),
            ("refused_requests", self.refused.get()),
            ("body_bytes", self.body_bytes.get()),
            ("open_connections", self.open.get()),
            ("accepted_connections", stats.accepted),
            ("refused_connections", stats.refused),
            ("tcp_losses", stats.tcp_losses),
            ("rx_frames", device.rx_frames),
            ("rx_bytes", device.rx_bytes),
            ("tx_frames", device.tx_frames),
            ("tx_bytes", device.tx_bytes),
            ("rx_bad_checksum", device.rx_bad_checksum),
            ("rx_malformed", device.rx_malformed),
            ("tx_dropped", device.tx_dropped),
            ("notifications", device.notifications),
            ("interrupts", stats.interrupts),
            ("turns", stats.turns),
            ("exhausted_budgets", stats.exhausted_budgets),
            ("sleeps", stats.sleeps),
            ("memory_bytes", self.net.memory_bytes() as u64),
        ] {
            // Writing to a string cannot fail.
            let _ = writeln!(rows, "<tr><td>{name}</td><td>{value}</td></tr>");
        }
        let addresses: Vec<String> = self.net.addresses().iter().map(|a| format!("{a}")).collect();
        format!(
            "<!doctype html>\n<title>tombolo cell</title>\n<h1>A tombolo cell</h1>\n<p>{}</p>\n<table>\n{rows}</table>\n\
             <p><a href=\"/bytes/1000000\">/bytes/1000000</a></p>\n",
            addresses.join(", ")
        )
    }
}
