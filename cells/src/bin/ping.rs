//! Pings a host and ends: `host=NAME` (or an address), `count=N` (3), `interval_ms=N` (200).
#![no_std]
#![no_main]

extern crate alloc;

use alloc::vec::Vec;
use tombolo_cell::{ExitCode, Net, exit, println};

tombolo_cell::app!(ping);

/// Between two requests.
const INTERVAL_MS: u64 = 200;
/// The longest wait for a reply.
const TIMEOUT_NS: u64 = 2_000_000_000;

async fn ping(net: Net) {
    net.up().await;
    let host = net.config().get("host").unwrap_or("gateway");
    let address = match net.resolve(host).await {
        Ok(address) => address,
        Err(error) => return fail(format_args!("{host}: {error}")),
    };
    let count = net.config().number("count").unwrap_or(3).max(1);
    let interval_ns = net.config().number("interval_ms").unwrap_or(INTERVAL_MS).saturating_mul(1_000_000);
    let mut pinger = net.pinger();
    let mut times_us = Vec::new();
    for _ in 0..count {
        let next = net.now_ns().saturating_add(interval_ns);
        if let Some(ns) = pinger.ping(address, TIMEOUT_NS).await {
            times_us.push(ns / 1000);
        }
        net.sleep_until(next).await;
    }
    times_us.sort_unstable();
    let received = times_us.len() as u64;
    let average_us = times_us.iter().sum::<u64>() / received.max(1);
    let median_us = times_us.get(times_us.len() / 2).copied().unwrap_or(0);
    println!(
        "ping {host} ({address}): {count} sent, {received} received, average {average_us} us, median {median_us} us"
    );
    exit(if received == count { ExitCode::Success } else { ExitCode::Failure })
}

fn fail(why: core::fmt::Arguments<'_>) {
    println!("ping: {why}");
    exit(ExitCode::Failure)
}
