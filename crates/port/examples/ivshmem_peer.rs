//! A process as a peer of an ivshmem link, by its server's socket (`tombolo status` shows it).
//!
//! ```console
//! $ ivshmem_peer SOCKET echo                     # a direct link: answers each record with the same
//! $ ivshmem_peer SOCKET ping 1000                # a direct link: sends records, prints the distribution of round trips
//! $ ivshmem_peer SOCKET arp 10.0.0.77 10.0.0.1   # a network link: asks who has an address, a hundred times
//! ```
//!
//! `echo` and `ping` sit on the two seats of one link. `arp` is the whole of a protocol stack in thirty lines: it shows frames
//! going both ways through the fabric's switch.

use std::error::Error;
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use tombolo_port::ivshmem::channel::{ChannelPeer, Error as ChannelTrouble};
use tombolo_port::ivshmem::client::{Joined, Link};
use tombolo_port::ivshmem::peer::NetPeer;
use tombolo_ring::ivshmem::channel::Shape;

const USAGE: &str = "usage: ivshmem_peer SOCKET echo | ping COUNT | arp OWN-ADDRESS ADDRESS";
const RECORD_BYTES: u32 = 56;
/// How long anything may take.
const PATIENCE: Duration = Duration::from_secs(10);
const BROADCAST: [u8; 6] = [0xff; 6];
const ARP: [u8; 2] = [0x08, 0x06];

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words[..] {
        [socket, "echo"] => echo(channel(socket)?),
        [socket, "ping", count] => ping(channel(socket)?, count.parse()?),
        [socket, "arp", own, target] => arp(network(socket)?, own.parse()?, target.parse()?),
        _ => Err(USAGE.into()),
    }
}

fn join(socket: &str) -> Result<Joined, Box<dyn Error>> {
    let joined = Joined::connect(socket, PATIENCE)?;
    println!("peer {} of {}", joined.id(), joined.header());
    Ok(joined)
}

fn channel(socket: &str) -> Result<Link<ChannelPeer>, Box<dyn Error>> {
    let joined = join(socket)?;
    let shape = Shape::largest(joined.header().layout.output_bytes, RECORD_BYTES, 0).ok_or("no room for records")?;
    let other = u32::from(joined.id() == 0);
    Ok(joined.channel(other, shape)?)
}

fn network(socket: &str) -> Result<Link<NetPeer>, Box<dyn Error>> {
    Ok(join(socket)?.network()?)
}

fn echo(mut link: Link<ChannelPeer>) -> Result<(), Box<dyn Error>> {
    let mut to = [0; RECORD_BYTES as usize];
    let mut was_up = false;
    loop {
        let up = link.step()?;
        if up != was_up {
            println!("{}", if up { "the link is up" } else { "the link is down" });
            was_up = up;
        }
        match link.peer().recv(&mut to) {
            Ok(Some(record)) => link.peer().send(&to[..record.len])?,
            Ok(None) | Err(ChannelTrouble::Down { .. }) => {
                link.wait(PATIENCE)?;
            }
            Err(error) => return Err(error.into()),
        }
    }
}

fn ping(mut link: Link<ChannelPeer>, count: usize) -> Result<(), Box<dyn Error>> {
    let end = Instant::now() + PATIENCE;
    while !link.step()? {
        link.wait(Duration::from_millis(100))?;
        if Instant::now() > end {
            return Err("nobody sits on the other seat".into());
        }
    }
    let mut to = [0; RECORD_BYTES as usize];
    let mut trips = Vec::with_capacity(count);
    for number in 0..count as u64 {
        let start = Instant::now();
        link.peer().send(&number.to_le_bytes())?;
        while link.peer().recv(&mut to)?.is_none() {
            link.wait(PATIENCE)?;
            if start.elapsed() > PATIENCE {
                return Err(format!("record {number} was not answered").into());
            }
        }
        if to[..8] != number.to_le_bytes() {
            return Err(format!("record {number} was answered by another").into());
        }
        trips.push(start.elapsed());
    }
    report(trips);
    Ok(())
}

fn arp(mut link: Link<NetPeer>, own: Ipv4Addr, target: Ipv4Addr) -> Result<(), Box<dyn Error>> {
    let mac = match link.header().mac {
        [0, 0, 0, 0, 0, 0] => [0x02, 0, 0, 0, 0, 0x77],
        given => given,
    };
    let end = Instant::now() + PATIENCE;
    while !link.step()? {
        link.wait(Duration::from_millis(100))?;
        if Instant::now() > end {
            return Err("the other peer does not come up".into());
        }
    }
    let request = [
        &BROADCAST[..],
        &mac,
        &ARP,
        // Ethernet, IPv4, lengths of both addresses, request (RFC 826).
        &[0, 1, 8, 0, 6, 4, 0, 1],
        &mac,
        &own.octets(),
        &[0; 6],
        &target.octets(),
        &[0; 18],
    ]
    .concat();
    let (mut buffer, mut trips, mut who) = (Vec::new(), Vec::new(), [0; 6]);
    for number in 0..100 {
        let start = Instant::now();
        link.peer().send(&request)?;
        link.peer().flush();
        loop {
            let answer = link.peer().receive(&mut buffer, |frame| answer(frame, target)).flatten();
            if let Some(mac) = answer {
                who = mac;
                break;
            }
            if start.elapsed() > PATIENCE {
                return Err(format!("request {number}: nobody says that it has {target}").into());
            }
            if !link.peer().wait(Duration::from_millis(100)) {
                link.step()?;
            }
        }
        trips.push(start.elapsed());
    }
    let who: Vec<String> = who.iter().map(|byte| format!("{byte:02x}")).collect();
    println!("{target} is at {}", who.join(":"));
    report(trips);
    Ok(())
}

/// The sender's address in an ARP reply about `target`.
fn answer(frame: &[u8], target: Ipv4Addr) -> Option<[u8; 6]> {
    let reply = frame.get(12..14) == Some(&ARP) && frame.get(20..22) == Some(&[0, 2]);
    let about = frame.get(28..32) == Some(&target.octets());
    frame.get(22..28).filter(|_| reply && about)?.try_into().ok()
}

fn report(mut trips: Vec<Duration>) {
    trips.sort_unstable();
    if let (Some(least), Some(most)) = (trips.first(), trips.last()) {
        let at = |part: usize| trips[(trips.len() - 1) * part / 100];
        let count = trips.len();
        println!("{count} round trips: least {least:?}, p50 {:?}, p99 {:?}, most {most:?}", at(50), at(99));
    }
}
