//! Forwards all frames between two vhost-user ports, to measure what the ports themselves cost.
//!
//! ```text
//! cargo run --release -p tombolo-port --example forward -- SOCKET0 SOCKET1 [CPU [SECONDS]]
//! ```
//!
//! It listens at both sockets (or connects to one written `connect:PATH`). With a CPU it pins
//! itself there, polls, and prints once a second, while frames flow, the rate and the cycles a
//! frame: time of turns that moved frames, over the frames, times the rate of the time stamp
//! counter. Without one it sleeps when there is nothing to do. No address is looked at; this is to
//! testpmd's io mode what `tombolo up` is to a learning switch.

use std::error::Error;
use std::time::{Duration, Instant};

use tombolo_port::vhost_user::{Socket, VhostUserConfig, VhostUserPort};
use tombolo_switch::Nanos;
use tombolo_switch::drop::Drops;
use tombolo_switch::frame::Batch;
use tombolo_switch::port::{Fault, Port};
use tombolo_switch::wait::{Token, Waiter};
use tombolo_worker::reactor::Reactor;

/// Frames per turn, as testpmd's burst.
const BUDGET: usize = 32;
/// Turns between two looks at the control side.
const SERVICE_TURNS: u32 = 1024;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [first, second, rest @ ..] = &arguments[..] else {
        return Err("usage: forward SOCKET0 SOCKET1 [CPU [SECONDS]]".into());
    };
    if let Some(cpu) = rest.first() {
        let mut set = rustix::thread::CpuSet::new();
        set.set(cpu.parse()?);
        rustix::thread::sched_setaffinity(None, &set)?;
    }
    let seconds: u64 = rest.get(1).map_or(Ok(3600), |s| s.parse())?;
    let mut reactor = Reactor::new()?;
    let polls = !rest.is_empty();
    let open = |token, path: &String| {
        let socket = match path.strip_prefix("connect:") {
            Some(path) => Socket::Connect(path.into()),
            None => Socket::Listen(path.into()),
        };
        let config = VhostUserConfig { socket, queue_pairs: 1, mtu: 1500 };
        VhostUserPort::open(config, reactor.registrar().registration(Token(token)))
    };
    let (mut a, mut b) = (open(0, first)?, open(1, second)?);
    let mut meter = Meter::new(polls)?;
    let end = Instant::now() + Duration::from_secs(seconds);
    let mut batch = Batch::with_capacity(BUDGET);
    let mut turn = 0u32;
    let mut running = true;
    let mut woken = Vec::new();
    while running {
        turn = turn.wrapping_add(1);
        if turn.is_multiple_of(SERVICE_TURNS) || !polls {
            for port in [&mut a, &mut b] {
                if let Err(fault) = port.service(Nanos(0)) {
                    reset(port, &fault);
                }
            }
            running = meter.last < end;
        }
        let moved;
        (moved, batch) = forward(&mut a, &mut b, batch, &mut meter);
        let back;
        (back, batch) = forward(&mut b, &mut a, batch, &mut meter);
        meter.turn(moved + back);
        if moved + back == 0 && !polls {
            let mut more = false;
            for port in [&mut a, &mut b] {
                more |= port.arm().unwrap_or_else(|fault| {
                    reset(port, &fault);
                    true
                });
            }
            if !more {
                woken.clear();
                reactor.wait(Some(Nanos::SECOND), &mut woken);
            }
            a.disarm();
            b.disarm();
        }
    }
    Ok(())
}

fn reset(port: &mut VhostUserPort, fault: &Fault) {
    eprintln!("{}: {}", fault.kind.name(), fault.detail);
    port.reset(fault);
}

/// One turn in one direction; returns frames taken, and the batch for the next turn.
fn forward(
    from: &mut VhostUserPort,
    to: &mut VhostUserPort,
    batch: Batch<'static>,
    meter: &mut Meter,
) -> (usize, Batch<'static>) {
    const ALL: [u16; BUDGET] = {
        let mut all = [0; BUDGET];
        let mut i = 0;
        while i < BUDGET {
            all[i] = i as u16;
            i += 1;
        }
        all
    };
    let mut batch = batch.recycle();
    let mut drops = Drops::default();
    let received = from.receive(BUDGET, &mut batch, &mut drops);
    let mut result = Ok(());
    if !batch.is_empty() {
        result = to.transmit(&batch, &ALL[..batch.len()], &mut drops).and_then(|sent| {
            meter.frames += sent.frames;
            to.flush()
        });
    }
    meter.dropped += drops.total();
    let batch = batch.recycle();
    if let Err(fault) = result {
        reset(to, &fault);
    }
    match received.and_then(|taken| from.release().map(|()| taken)) {
        Ok(taken) => (taken, batch),
        Err(fault) => {
            reset(from, &fault);
            (0, batch)
        }
    }
}

struct Meter {
    reports: bool,
    frames: u64,
    dropped: u64,
    busy: Duration,
    turns: u64,
    last: Instant,
    reported: Instant,
    cycles_per_ns: f64,
}

impl Meter {
    fn new(reports: bool) -> Result<Meter, Box<dyn Error>> {
        // The kernel's measure of the time stamp counter is in no file everywhere; "cpu MHz" is
        // close where it is fixed.
        let info = std::fs::read_to_string("/proc/cpuinfo")?;
        let mhz = info.lines().find_map(|line| line.strip_prefix("cpu MHz")?.split(':').nth(1)?.trim().parse().ok());
        let now = Instant::now();
        Ok(Meter {
            reports,
            frames: 0,
            dropped: 0,
            busy: Duration::ZERO,
            turns: 0,
            last: now,
            reported: now,
            cycles_per_ns: mhz.unwrap_or(1000.0) / 1000.0,
        })
    }

    fn turn(&mut self, frames: usize) {
        let now = Instant::now();
        if frames != 0 {
            self.busy += now - self.last;
            self.turns += 1;
        }
        self.last = now;
        if now - self.reported >= Duration::from_secs(1) {
            if self.reports && self.frames + self.dropped != 0 {
                let per_frame = self.busy.as_nanos() as f64 * self.cycles_per_ns / self.frames.max(1) as f64;
                eprintln!(
                    "{:.2} Mframes/s, {per_frame:.0} cycles a frame, {:.1} frames a turn, {} dropped, {:.0} % busy",
                    self.frames as f64 / (now - self.reported).as_secs_f64() / 1e6,
                    self.frames as f64 / self.turns.max(1) as f64,
                    self.dropped,
                    self.busy.as_secs_f64() / (now - self.reported).as_secs_f64() * 100.0,
                );
            }
            (self.frames, self.dropped, self.busy, self.turns, self.reported) = (0, 0, Duration::ZERO, 0, now);
        }
    }
}
