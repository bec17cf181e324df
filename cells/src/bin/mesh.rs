//! Finds out whether all cells of a network reach each other. It pings each address of a range
//! until that address has answered once, and answers pings itself. Then it prints nothing any more.
//!
//! | word of the command line | meaning | default |
//! | --- | --- | --- |
//! | `peers=FIRST-LAST` | the addresses, both ends included; the cell's own is passed over | |
//! | `at_once=N` | how many are asked at a time | 8 |
//!
//! Lines for programs: `@mesh 12 of 63` every three seconds, `@mesh all 63 of 63 in 812 ms` at the
//! end (milliseconds since the cell has its address).
#![no_std]
#![no_main]

extern crate alloc;

use alloc::collections::VecDeque;
use alloc::rc::Rc;
use core::cell::{Cell, RefCell};
use tombolo_cell::{ExitCode, IpAddress, Ipv4Address, Net, exit, println};
use tombolo_cells::range::{MOST, range};

tombolo_cell::app!(mesh);

/// How long an answer is waited for before another address has its turn.
const TIMEOUT_NS: u64 = 1_000_000_000;
const REPORT_NS: u64 = 3_000_000_000;

struct MeshState {
    /// Those that have not answered, and are not being asked.
    waiting: RefCell<VecDeque<Ipv4Address>>,
    answered: Cell<usize>,
    total: usize,
    start_ns: u64,
}

async fn mesh(net: Net) {
    let config = net.config();
    let text = config.get("peers").unwrap_or_default();
    let Some(peers) = range(text) else {
        println!("mesh: peers={text}: expected FIRST-LAST, at most {MOST} IPv4 addresses");
        exit(ExitCode::Failure)
    };
    let at_once = config.number("at_once").unwrap_or(8).clamp(1, 64) as usize;
    net.up().await;
    let own = net.addresses();
    let is_own = |peer: &Ipv4Address| own.iter().any(|cidr| cidr.address() == IpAddress::Ipv4(*peer));
    let waiting: VecDeque<_> = peers.filter(|peer| !is_own(peer)).collect();
    let total = waiting.len();
    let state =
        Rc::new(MeshState { waiting: RefCell::new(waiting), answered: Cell::new(0), total, start_ns: net.now_ns() });
    for _ in 0..at_once.min(total) {
        net.spawn(ask(net.clone(), state.clone()));
    }
    if total == 0 {
        done(&net, &state);
    }
    while state.answered.get() < total {
        net.sleep_until(net.now_ns() + REPORT_NS).await;
        let answered = state.answered.get();
        if answered < total {
            println!("@mesh {answered} of {total}");
        }
    }
}

/// Asks one after the other until no address waits for a ping.
async fn ask(net: Net, state: Rc<MeshState>) {
    let mut pinger = net.pinger();
    loop {
        // Not in the loop's condition: that would hold the queue during the ping.
        let Some(peer) = state.waiting.borrow_mut().pop_front() else { return };
        let next_ns = net.now_ns() + TIMEOUT_NS;
        if pinger.ping(peer, TIMEOUT_NS).await.is_some() {
            state.answered.set(state.answered.get() + 1);
            if state.answered.get() == state.total {
                done(&net, &state);
            }
        } else {
            // At once where nothing could be sent; no one is asked more often than once in this
            // time.
            net.sleep_until(next_ns).await;
            state.waiting.borrow_mut().push_back(peer);
        }
    }
}

fn done(net: &Net, state: &MeshState) {
    let (total, ms) = (state.total, (net.now_ns() - state.start_ns) / 1_000_000);
    println!("@mesh all {total} of {total} in {ms} ms");
}
