//! A calculator that serves calls with a deadline, and makes them: over an ivshmem link, without
//! IP, or over TCP.
//!
//! It serves the peer at the other end ("6 * 7" is answered by "42"): a Linux process
//! ([`tombolo_remote`] or `tombolo call` over a bridge), or another cell. With `role=client` it
//! also calls the other end and checks each reply. At the end it prints, as one line of JSON, how
//! the calls ended and how long they took, and leaves with an exit code.
//!
//! [`tombolo_remote`]: https://github.com/tombolo-fabric/tombolo
//!
//! | word | meaning | default |
//! | --- | --- | --- |
//! | `role=provider`, `role=client` | only serves; calls too | provider |
//! | `link=NAME` | the link | `calls` |
//! | `tcp=PORT`, `tcp=ADDR:PORT` | no link: listens on the port, for up to 16 connections; connects | |
//! | `service_us=N` | how long a calculation takes | 0 |
//! | `count=N` | calls | 1000 |
//! | `deadline_us=N` | the deadline of each; 0: best effort | 100000 |
//! | `timeout_ms=N` | how long a call is waited for | 1000 |
//! | `wait=tasks`, `wait=sleep`, `wait=spin` | while a call is waited for: the network and other tasks have their turns; nothing else runs; nor does the processor sleep | tasks |
//! | `max_missed=N` | calls without a reply that are still a success | 0 |
//! | `patience_s=N` | how long to wait for the other end | 60 |
#![no_std]
#![no_main]

extern crate alloc;

use alloc::format;
use core::fmt::Arguments;
use core::time::Duration;
use tombolo_cell::{
    CallError, CallOptions, Calls, ExitCode, IpAddress, IpEndpoint, Net, Reply, Request, Response, ServeOptions,
    TcpOptions, TcpStream, exit, println,
};
use tombolo_cells::calc;
use tombolo_cells::latency::Latencies;

tombolo_cell::app!(calculator);

const SECOND_NS: u64 = 1_000_000_000;
/// Between two attempts to connect.
const AGAIN_NS: u64 = SECOND_NS / 4;

fn fail(why: Arguments<'_>) -> ! {
    println!("calc: {why}");
    exit(ExitCode::Failure)
}

fn number(net: &Net, key: &str, default: u64) -> u64 {
    let config = net.config();
    match (config.get(key), config.number(key)) {
        (None, _) => default,
        (_, Some(value)) => value,
        (Some(text), None) => fail(format_args!("{key}={text}: expected a number")),
    }
}

async fn calculator(net: Net) {
    let is_client = match net.config().get("role").unwrap_or("provider") {
        "provider" => false,
        "client" => true,
        other => fail(format_args!("role={other}: expected provider or client")),
    };
    match net.config().get("tcp") {
        None => {
            let name = net.config().get("link").unwrap_or("calls");
            match net.calls(name, &options(&net)) {
                Ok(calls) => run(&net, calls, is_client).await,
                Err(error) => fail(format_args!("{error}")),
            }
        }
        Some(tcp) => over_tcp(&net, tcp, is_client).await,
    }
}

fn options(net: &Net) -> ServeOptions {
    ServeOptions { budget: Duration::from_micros(number(net, "service_us", 0).max(10)), ..ServeOptions::default() }
}

async fn over_tcp(net: &Net, tcp: &str, is_client: bool) {
    let wrong = || -> ! { fail(format_args!("tcp={tcp}: expected a port, or an address with a port")) };
    net.up().await;
    if let Some((address, port)) = tcp.rsplit_once(':') {
        let (Ok(address), Ok(port)) = (address.parse::<IpAddress>(), port.parse()) else { wrong() };
        let until_ns = net.now_ns() + number(net, "patience_s", 60) * SECOND_NS;
        loop {
            match net.connect(IpEndpoint::new(address, port), TcpOptions::default()).await {
                Ok(stream) => over(net.clone(), stream, is_client).await,
                Err(error) if net.now_ns() > until_ns => fail(format_args!("{tcp}: {error}")),
                Err(_) => {}
            }
            net.sleep_until(net.now_ns() + AGAIN_NS).await;
        }
    }
    let Ok(port) = tcp.parse() else { wrong() };
    let clock = net.clone();
    net.serve(port, TcpOptions { limit: 16, ..TcpOptions::default() }, move |stream| {
        over(clock.clone(), stream, is_client)
    });
}

/// One connection, until it ends.
async fn over(net: Net, stream: TcpStream, is_client: bool) {
    match net.calls_over(stream, &options(&net)).await {
        Ok(calls) => run(&net, calls, is_client).await,
        Err(error) => println!("calc: {error}"),
    }
}

/// Serves, and calls where that is the role, until the other end is gone for good.
async fn run(net: &Net, calls: Calls, is_client: bool) {
    let service_ns = number(net, "service_us", 0) * 1000;
    let clock = net.clone();
    calls.serve(1, async move |request: &Request| {
        if service_ns > 0 {
            clock.sleep_until(clock.now_ns() + service_ns).await;
        }
        let (text, code) = calc::answer(&request.bytes);
        Response::new(text).with_code(code)
    });
    if is_client {
        client(net, &calls).await;
    }
    loop {
        if !calls.up().await {
            return;
        }
        println!("calc: the other end is there");
        calls.down().await;
        println!("calc: the peer has disconnected");
    }
}

/// What calls ended with.
#[derive(Default)]
struct Ends {
    replied: u64,
    wrong: u64,
    late: u64,
    timeout: u64,
    gone: u64,
    other: u64,
}

impl Ends {
    fn count(&mut self, end: &Result<Reply, CallError>, want: &str) {
        *match end {
            Ok(reply) if reply.bytes == want.as_bytes() => &mut self.replied,
            Ok(_) => &mut self.wrong,
            Err(CallError::DeadlineExceeded | CallError::Late) => &mut self.late,
            Err(CallError::Timeout) => &mut self.timeout,
            Err(CallError::ProviderGone) => &mut self.gone,
            Err(error) => {
                if self.other == 0 {
                    println!("calc: a call ended otherwise, the first with: {error}");
                }
                &mut self.other
            }
        } += 1;
    }
}

async fn client(net: &Net, calls: &Calls) {
    let count = number(net, "count", 1000).min(1 << 20);
    let deadline_us = number(net, "deadline_us", 100_000);
    let options = CallOptions {
        deadline: (deadline_us > 0).then(|| Duration::from_micros(deadline_us)).into(),
        timeout: Duration::from_millis(number(net, "timeout_ms", 1000)),
        ..CallOptions::default()
    };
    let wait = net.config().get("wait").unwrap_or("tasks");
    if !["tasks", "sleep", "spin"].contains(&wait) {
        fail(format_args!("wait={wait}: expected tasks, sleep or spin"));
    }
    let patience_s = number(net, "patience_s", 60);
    if net.within(patience_s * SECOND_NS, calls.up()).await != Some(true) {
        fail(format_args!("no peer connected within {patience_s} s"));
    }
    let (mut trips, mut ends) = (Latencies::with_capacity(count as usize), Ends::default());
    let mut way = Latencies::with_capacity(count as usize);
    for n in 0..count {
        let (request, want) = (format!("{n} + 1"), format!("{}", n + 1));
        let began_ns = net.now_ns();
        let end = match wait {
            "tasks" => calls.call(request.as_bytes(), &options).await,
            wait => calls.call_alone(request.as_bytes(), &options, wait == "spin"),
        };
        let trip_ns = net.now_ns() - began_ns;
        ends.count(&end, &want);
        if let Ok(reply) = &end {
            trips.push(trip_ns);
            way.push(trip_ns.saturating_sub(reply.queued_ns + reply.service_ns));
        }
        let is_last = n + 1 == count;
        if matches!(end, Err(CallError::ProviderGone))
            && !is_last
            && net.within(patience_s * SECOND_NS, calls.up()).await.is_none()
        {
            fail(format_args!("the peer disconnected after {n} calls and did not connect again"));
        }
    }
    let Ends { replied, wrong, late, timeout, gone, other } = ends;
    let (trip, way) = (trips.summary(), way.summary());
    println!(
        "{{\"app\":\"calc\",\"wait\":\"{wait}\",\"calls\":{count},\"replied\":{replied},\"wrong\":{wrong},\"late\":{late},\"timeout\":{timeout},\
         \"gone\":{gone},\"other\":{other},\"rtt_us\":{trip},\"way_us\":{way}}}"
    );
    let missed = count - replied;
    exit(if missed <= number(net, "max_missed", 0) { ExitCode::Success } else { ExitCode::Failure })
}
