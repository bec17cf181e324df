//! Pings a host and ends: `host=NAME` (or an address), `count=N` (3).
#![no_std]
#![no_main]

use tombolo_cell::{ExitCode, IpAddress, Net, exit, println};

tombolo_cell::app!(ping);

/// Between two requests, and the longest wait for a reply.
const INTERVAL_NS: u64 = 200_000_000;
const TIMEOUT_NS: u64 = 2_000_000_000;

async fn ping(net: Net) {
    net.up().await;
    let host = net.config().get("host").unwrap_or("gateway");
    let address = match net.resolve(host).await {
        Ok(IpAddress::Ipv4(address)) => address,
        Ok(other) => return fail(format_args!("{host} is {other}, and only IPv4 is pinged")),
        Err(error) => return fail(format_args!("{host}: {error}")),
    };
    let count = net.config().number("count").unwrap_or(3).max(1);
    let mut pinger = net.pinger();
    let (mut received, mut total_ns) = (0, 0);
    for _ in 0..count {
        let next = net.now_ns() + INTERVAL_NS;
        if let Some(ns) = pinger.ping(address, TIMEOUT_NS).await {
            received += 1;
            total_ns += ns;
        }
        net.sleep_until(next).await;
    }
    let average_us = total_ns / received.max(1) / 1000;
    println!("ping {host} ({address}): {count} sent, {received} received, average {average_us} us");
    exit(if received == count { ExitCode::Success } else { ExitCode::Failure })
}

fn fail(why: core::fmt::Arguments<'_>) {
    println!("ping: {why}");
    exit(ExitCode::Failure)
}
