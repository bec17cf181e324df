//! Round trips by payload: from 1 byte to 1 MiB by copy, from 1 byte to 1 GiB in shared memory; one
//! JSON object for each size, with the time of every call.
//!
//! usage: rpc_sweep [--calls N] [--smallest LOG2] [--largest LOG2] [--only copy|shared]
//!
//! By copy, the caller's bytes are copied into the connection's memory, from there into the
//! reply's, and from there into the caller's buffer. In shared memory, request and reply are
//! memories of that size that were handed over before; the client writes the first 8 bytes (or
//! fewer), and the service answers with its own memory, in which it has written them: what is
//! measured is the call, not the touching of bytes. Both ends sleep while they wait, on two CPUs,
//! as SCHED_OTHER.

use std::path::Path;
use std::sync::Mutex;
use std::time::Instant;

use tombolo_bench::{Fallible, Other, option, other_end, pin, ready, until_ended};
use tombolo_rpc::client::{CallOptions, Client, ConnectOptions};
use tombolo_rpc::poll::Polling;
use tombolo_rpc::provider::{Options, Reply, Request, Service};
use tombolo_rpc::shared::SharedBuffer;

const LARGEST_COPY: u32 = 20;
/// The reply's and the request's arenas: a copy of the largest, and room beside it.
const ARENA_BYTES: u64 = 4 << 20;

fn serve(dir: &Path) -> Fallible<()> {
    pin(1);
    let options = Options {
        folder: Some(dir.into()),
        polling: Polling::Never,
        reply_arena_bytes: ARENA_BYTES,
        ..Options::default()
    };
    let shared: Mutex<Option<SharedBuffer>> = Mutex::new(None);
    let echo = move |request: &Request<'_>, reply: &mut Reply<'_>| {
        let len = request.len() as u64;
        // The trace says how the reply is wanted.
        if request.trace() == 0 {
            if let Ok(to) = reply.loan(len) {
                request.payload().copy_to(to);
            }
            return;
        }
        let mut shared = shared.lock().unwrap_or_else(|e| e.into_inner());
        if shared.as_ref().is_none_or(|buffer| buffer.len() != len) {
            *shared = SharedBuffer::new(len, false).ok();
        }
        if let Some(buffer) = shared.as_ref() {
            let word = len.min(8) as usize;
            let mut bytes = [0; 8];
            if let (Some(from), Some(to)) = (request.payload().slice(0, word), buffer.view().slice(0, word)) {
                from.read_into(&mut bytes[..word]);
                to.write_from(&bytes[..word]);
            }
            let _ = reply.share(buffer, 0, len);
        }
    };
    let _service = Service::register("sweep", options, echo)?;
    ready();
    until_ended();
    Ok(())
}

fn print(way: &str, bytes: u64, times: &[u64]) {
    let times: Vec<String> = times.iter().map(u64::to_string).collect();
    println!("{{\"way\":\"{way}\",\"bytes\":{bytes},\"ns\":[{}]}}", times.join(","));
}

/// Times of so many calls, after a tenth as many to warm up.
fn times(calls: usize, mut call: impl FnMut(u64) -> Fallible<()>) -> Fallible<Vec<u64>> {
    let mut times = Vec::with_capacity(calls);
    for n in 0..calls + calls / 10 {
        let start = Instant::now();
        call(n as u64)?;
        if n >= calls / 10 {
            times.push(start.elapsed().as_nanos() as u64);
        }
    }
    Ok(times)
}

fn main() -> Fallible<()> {
    if let Some(args) = other_end() {
        return serve(Path::new(&args[0]));
    }
    let (calls, smallest, largest) =
        (option("--calls", 1000)?, option("--smallest", 0)? as u32, option("--largest", 30)? as u32);
    let args: Vec<String> = std::env::args().collect();
    let only = args.iter().position(|a| a == "--only").and_then(|at| args.get(at + 1)).map(String::as_str);
    let runs = |way| only.is_none_or(|only| only == way);
    let dir = tempfile::tempdir()?;
    pin(0);
    let _other = Other::start(&[dir.path().to_str().ok_or("the folder's name is not UTF-8")?])?;
    let options = ConnectOptions {
        folder: Some(dir.path().into()),
        polling: Polling::Never,
        arena_bytes: ARENA_BYTES,
        ..ConnectOptions::default()
    };
    let client = Client::connect_with("sweep", &options)?;
    for bytes in (smallest..=LARGEST_COPY.min(largest)).filter(|_| runs("copy")).map(|log| 1usize << log) {
        let (payload, mut into) = (vec![7; bytes], vec![0; bytes]);
        let taken = times(calls, |_| {
            let reply = client.call(&payload, &CallOptions::default())?;
            reply.copy_to(&mut into)?;
            Ok(())
        })?;
        if into != payload {
            return Err(format!("{bytes} bytes came back as others").into());
        }
        print("copy", bytes as u64, &taken);
    }
    for bytes in (smallest..=largest).filter(|_| runs("shared")).map(|log| 1u64 << log) {
        let buffer = SharedBuffer::new(bytes, false)?;
        let word = bytes.min(8) as usize;
        let mut back = [0; 8];
        let taken = times(calls, |n| {
            let written = n.to_le_bytes();
            buffer.view().slice(0, word).ok_or("a buffer without room")?.write_from(&written[..word]);
            let reply = client.call_shared(&buffer, 0, bytes, &CallOptions { trace: 1, ..CallOptions::default() })?;
            reply.view().slice(0, word).ok_or("a short reply")?.read_into(&mut back[..word]);
            let right = reply.view().len() as u64 == bytes && back[..word] == written[..word];
            if right { Ok(()) } else { Err("another answer".into()) }
        })?;
        print("shared", bytes, &taken);
    }
    Ok(())
}
