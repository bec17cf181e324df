//! One side of a link with a cell, by the library alone: calls it, or serves it. Try it with
//! `examples/calls.toml`, in which `seats = 1` and `protocol = 0x4002` stand in place of `service`,
//! since that takes the link's one seat for the fabric:
//!
//! ```text
//! cargo run --release -p tombolo-remote --example link_calls -- SOCKET call '6 * 7' 1000   # 1000 calls, one after the other
//! cargo run --release -p tombolo-remote --example link_calls -- SOCKET serve               # until it is ended
//! ```
//!
//! SOCKET is that of a link with a free seat (`/run/tombolo/calls/calls.link.sock`, where root runs
//! the fabric), or `tcp:ADDRESS:PORT` of a peer that listens. `call` prints a line of JSON: what
//! the calls ended with, how long they took, and the way alone: without the time at the provider.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use tombolo_remote::{CallError, CallOptions, Calls, Response, ServeOptions};
use tombolo_rpc::histogram::Histogram;

const TIMEOUT: Duration = Duration::from_secs(60);

fn summary(histogram: &Histogram) -> serde_json::Value {
    let s = histogram.summary();
    let us = |ns: u64| ns as f64 / 1e3;
    serde_json::json!({ "p50": us(s.p50_ns), "p99": us(s.p99_ns), "p99.9": us(s.p999_ns), "max": us(s.max_ns) })
}

fn call(calls: &Calls, bytes: &[u8], count: u64) -> Result<(), CallError> {
    // Best effort: what a call takes is measured, however long that is.
    let options = CallOptions::default();
    let (trips, way) = (Histogram::default(), Histogram::default());
    let (mut replied, mut reply) = (0u64, None);
    for _ in 0..count {
        let began = Instant::now();
        match calls.call(bytes, &options) {
            Ok(answer) => {
                let ns = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
                trips.record(ns);
                way.record(ns.saturating_sub(answer.queued_ns + answer.service_ns));
                replied += 1;
                reply = Some(String::from_utf8_lossy(&answer.bytes).into_owned());
            }
            Err(error) => return Err(error),
        }
    }
    let line = serde_json::json!({
        "calls": count, "replied": replied, "reply": reply, "rtt_us": summary(&trips), "way_us": summary(&way),
    });
    println!("{line}");
    Ok(())
}

fn run() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let usage = "expected: SOCKET call TEXT [COUNT] | SOCKET serve";
    let (socket, what) = (arguments.first().ok_or(usage)?, arguments.get(1).ok_or(usage)?);
    let calls = match socket.strip_prefix("tcp:") {
        Some(address) => Calls::connect(address.parse()?, TIMEOUT, &ServeOptions::default())?,
        None => Calls::join(socket, TIMEOUT, &ServeOptions::default())?,
    };
    match what.as_str() {
        "call" => {
            let count = arguments.get(3).map_or(Ok(1), |text| text.parse())?;
            if !calls.wait_up(TIMEOUT) {
                return Err("no peer joined the other end of the link".into());
            }
            call(&calls, arguments.get(2).ok_or(usage)?.as_bytes(), count)?;
        }
        "serve" => {
            // What a cell with role=client asks is "N + 1".
            let _server = calls.serve(|request| {
                let text = String::from_utf8_lossy(&request.bytes);
                let sum = text.split('+').map(|part| part.trim().parse::<f64>()).sum::<Result<f64, _>>();
                match sum {
                    Ok(sum) => Response::new(sum.to_string()),
                    Err(_) => Response::new("expected \"A + B\"").with_code(1),
                }
            })?;
            while !calls.server_is_gone() {
                calls.wait_down(TIMEOUT);
                calls.wait_up(TIMEOUT);
            }
        }
        _ => return Err(usage.into()),
    }
    Ok(())
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("link_calls: {error}");
            ExitCode::FAILURE
        }
    }
}
