//! Measures attachments roughly: two ports joined by a loop that gives each frame of one to the
//! other, no switch.
//!
//! ```text
//! cargo run --release -p tombolo-port --example exchange -- KIND [SECONDS]
//!   tap, packet   two network namespaces with an interface each, iperf 2 between their kernels (root)
//!   stream        64 and 1514-byte frames from one socketpair to another, ends in threads
//! ```
//! Prints a JSON object per run: what was moved, frames per turn, processor time of the loop per
//! frame. It asserts nothing, and ends by itself.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tombolo_port::link::{Interface, Netns};
use tombolo_port::packet::{PacketConfig, PacketPort};
use tombolo_port::stream::StreamPort;
use tombolo_port::tap::{TapConfig, TapPort};
use tombolo_switch::drop::Drops;
use tombolo_switch::frame::Batch;
use tombolo_switch::port::Port;
use tombolo_switch::wait::{Token, Waiter};
use tombolo_worker::reactor::Reactor;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;
const BUDGET: usize = 64;

/// What the loop did.
#[derive(Default)]
struct Tally {
    frames: u64,
    bytes: u64,
    turns: u64,
    sleeps: u64,
    drops: Drops,
    cpu: Duration,
}

fn thread_cpu() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// Gives each frame of one port to the other until `stop`.
fn exchange<'p>(
    a: &mut (dyn Port + 'p),
    b: &mut (dyn Port + 'p),
    reactor: &mut Reactor,
    stop: &AtomicBool,
) -> Result<Tally> {
    let mut tally = Tally::default();
    let start = thread_cpu();
    let mut spare = Batch::with_capacity(BUDGET);
    let mut ready = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let now = reactor.now();
        let mut exhausted = false;
        for turn in 0..2 {
            let (from, to) = if turn == 0 { (&mut *a, &mut *b) } else { (&mut *b, &mut *a) };
            from.service(now).map_err(|f| f.detail)?;
            let mut batch = spare.recycle();
            let used = from.receive(BUDGET, &mut batch, &mut tally.drops).map_err(|f| f.detail)?;
            if !batch.is_empty() {
                let which: Vec<u16> = (0..batch.len() as u16).collect();
                let sent = to.transmit(&batch, &which, &mut tally.drops).map_err(|f| f.detail)?;
                to.flush().map_err(|f| f.detail)?;
                tally.frames += sent.frames;
                tally.bytes += sent.bytes;
                tally.turns += 1;
            }
            spare = batch.recycle();
            from.release().map_err(|f| f.detail)?;
            exhausted |= used == BUDGET;
        }
        let armed = |fault: tombolo_switch::port::Fault| fault.detail;
        if !exhausted && !a.arm().map_err(armed)? && !b.arm().map_err(armed)? {
            tally.sleeps += 1;
            ready.clear();
            reactor.wait(Some(tombolo_switch::Nanos::MILLI.times(100)), &mut ready);
        }
    }
    tally.cpu = thread_cpu() - start;
    Ok(tally)
}

fn report(name: &str, seconds: f64, tally: &Tally, extra: &str) {
    let per_frame = tally.cpu.as_nanos() as f64 / tally.frames.max(1) as f64;
    println!(
        "{{\"run\":\"{name}\",\"seconds\":{seconds:.2},\"frames\":{},\"mpps\":{:.3},\"gbit_s\":{:.2},\"bytes_per_frame\":{:.0},\
         \"frames_per_turn\":{:.1},\"sleeps\":{},\"cpu_ns_per_frame\":{per_frame:.0},\"cpu_pct\":{:.0},\"dropped\":{}{extra}}}",
        tally.frames,
        tally.frames as f64 / seconds / 1e6,
        tally.bytes as f64 * 8.0 / seconds / 1e9,
        tally.bytes as f64 / tally.frames.max(1) as f64,
        tally.frames as f64 / tally.turns.max(1) as f64,
        tally.sleeps,
        tally.cpu.as_secs_f64() / seconds * 100.0,
        tally.drops.total(),
    );
}

/// The last figure that iperf prints with `unit` behind it.
fn figure(text: &str, unit: &str) -> String {
    let words: Vec<_> = text.split_whitespace().collect();
    let at = words.iter().rposition(|word| *word == unit);
    at.filter(|i| *i > 0).map_or("null".into(), |i| words[i - 1].to_owned())
}

fn iperf(left: &Netns, right: &Netns, arguments: &[&str], seconds: u64) -> Result<String> {
    let udp = arguments.contains(&"-u");
    let mut server = Command::new("iperf");
    server.arg("-s").args(udp.then_some("-u")).stdout(Stdio::null()).stderr(Stdio::null());
    let mut server = right.run(|| server.spawn())??;
    // The server is there once its port is in use.
    let table = if udp { "/proc/thread-self/net/udp" } else { "/proc/thread-self/net/tcp" };
    let end = Instant::now() + Duration::from_secs(5);
    let listens = || std::fs::read_to_string(table).is_ok_and(|t| t.contains(":1389 "));
    while !right.run(listens)? && Instant::now() < end {
        std::thread::yield_now();
    }
    let mut client = Command::new("iperf");
    client.args(["-c", "10.99.0.2", "-f", "m", "-t", &seconds.to_string()]).args(arguments);
    let output = left.run(|| client.output())??;
    server.kill()?;
    server.wait()?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn kernels(kind: &str, seconds: u64) -> Result<()> {
    let sides = [Netns::anonymous()?, Netns::anonymous()?];
    let mut reactor = Reactor::new()?;
    let mut ports: Vec<Box<dyn Port>> = Vec::new();
    let mut keep = Vec::new();
    for (i, netns) in sides.iter().enumerate() {
        let registration = reactor.registrar().registration(Token(i as u32));
        let name = if kind == "tap" {
            let config = TapConfig { netns: Some(netns.clone()), ..TapConfig::new("t0") };
            ports.push(Box::new(TapPort::open(&config, registration)?));
            "t0"
        } else {
            // The port is in a namespace of its own, so that only what is behind the veth answers.
            let outer = Netns::anonymous()?;
            let process = format!(
                "/proc/{}/fd/{}",
                std::process::id(),
                std::os::fd::AsRawFd::as_raw_fd(&rustix::fd::AsFd::as_fd(netns))
            );
            let add = ["link", "add", "outer", "type", "veth", "peer", "name", "inner", "netns", &process];
            let made = outer.run(|| Command::new("ip").args(add).status())??;
            if !made.success() {
                return Err("ip link add failed".into());
            }
            Interface::open(Some(&outer), "outer")?.set_up(true)?;
            let config = PacketConfig { netns: Some(outer.clone()), ..PacketConfig::new("outer") };
            ports.push(Box::new(PacketPort::open(&config, registration)?));
            keep.push(outer);
            "inner"
        };
        let interface = Interface::open(Some(netns), name)?;
        interface.set_up(true)?;
        interface.add_address(format!("10.99.0.{}", i + 1).parse()?, 24)?;
    }
    let stop = AtomicBool::new(false);
    let runs: [(&str, &[&str]); 3] = [
        ("tcp", &[]),
        ("udp_64_byte_frames", &["-u", "-b", "1000M", "-l", "22"]),
        ("udp_1500_byte_packets", &["-u", "-b", "4000M", "-l", "1472"]),
    ];
    for (name, arguments) in runs {
        let [a, b] = &mut ports[..] else { unreachable!("two sides") };
        stop.store(false, Ordering::Relaxed);
        let (tally, text, took) = std::thread::scope(|scope| -> Result<_> {
            let driver = scope.spawn(|| {
                let start = Instant::now();
                let text = iperf(&sides[0], &sides[1], arguments, seconds);
                stop.store(true, Ordering::Relaxed);
                (text, start.elapsed().as_secs_f64())
            });
            let tally = exchange(&mut **a, &mut **b, &mut reactor, &stop)?;
            let (text, took) = driver.join().map_err(|_| "the driver panicked")?;
            Ok((tally, text?, took))
        })?;
        let extra = format!(",\"iperf_mbit_s\":{}", figure(&text, "Mbits/sec"));
        report(&format!("{kind}_{name}"), took, &tally, &extra);
    }
    Ok(())
}

fn streams(seconds: u64) -> Result<()> {
    for bytes in [64usize, 1514] {
        let mut reactor = Reactor::new()?;
        let (mut a, feed_a) = StreamPort::given(1500, reactor.registrar().registration(Token(0)));
        let (mut b, feed_b) = StreamPort::given(1500, reactor.registrar().registration(Token(1)));
        let (mut source, near) = UnixStream::pair()?;
        let (mut sink, far) = UnixStream::pair()?;
        feed_a.give(near.into())?;
        feed_b.give(far.into())?;
        let stop = AtomicBool::new(false);
        let delivered = Arc::new(AtomicU64::new(0));
        let end = Instant::now() + Duration::from_secs(seconds);
        let tally = std::thread::scope(|scope| -> Result<_> {
            scope.spawn(move || {
                let mut frame = vec![0x02; bytes];
                frame[12..14].copy_from_slice(&[0x88, 0xb5]);
                let chunk = [&(bytes as u32).to_be_bytes()[..], &frame].concat().repeat(64);
                while Instant::now() < end && source.write_all(&chunk).is_ok() {}
                // Dropping the socket ends the stream.
            });
            let count = delivered.clone();
            scope.spawn(move || {
                let mut room = vec![0; 256 * 1024];
                while let Ok(n) = sink.read(&mut room)
                    && n > 0
                {
                    count.fetch_add(n as u64, Ordering::Relaxed);
                }
            });
            scope.spawn(|| {
                std::thread::sleep(end.saturating_duration_since(Instant::now()));
                stop.store(true, Ordering::Relaxed);
            });
            let tally = exchange(&mut a, &mut b, &mut reactor, &stop);
            // The ports go, and with them the sink's other end.
            drop((a, b));
            tally
        })?;
        let got = delivered.load(Ordering::Relaxed) / (bytes as u64 + 4);
        report(&format!("stream_{bytes}"), seconds as f64, &tally, &format!(",\"delivered\":{got}"));
    }
    Ok(())
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let seconds = arguments.get(1).map_or(Ok(3), |s| s.parse())?;
    match arguments.first().map(String::as_str) {
        Some(kind @ ("tap" | "packet")) => kernels(kind, seconds),
        Some("stream") => streams(seconds),
        _ => Err("which kind: tap, packet or stream; see the head of this file".into()),
    }
}
