//! A process as a peer of an ivshmem link, by its server's socket (`tombolo status` shows it).
//!
//! ```console
//! $ ivshmem_peer SOCKET echo                     # a direct link: answers each record with the same
//! $ ivshmem_peer SOCKET ping 1000                # a direct link: sends records, prints the distribution of round trips
//! $ ivshmem_peer SOCKET arp 10.0.0.77 10.0.0.1 100   # a network link: asks who has an address, again and again
//! ```
//!
//! Without a fabric, `serve` makes a direct link and serves its socket:
//!
//! ```console
//! $ ivshmem_peer SOCKET serve & ivshmem_peer SOCKET echo & ivshmem_peer SOCKET ping 1000
//! ```
//!
//! `echo` and `ping` sit on the two seats of one link. `arp` is the whole of a protocol stack in
//! thirty lines: it shows frames going both ways through the fabric's switch.

use std::error::Error;
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use tombolo_ivshmem::channel::{ChannelPeer, Error as ChannelError};
use tombolo_ivshmem::client::{Joined, JoinedLink};
use tombolo_ivshmem::links::{Config, Door, Links};
use tombolo_ivshmem::peer::NetPeer;
use tombolo_ivshmem::server::{Dialect, Seat, Shape as LinkShape};
use tombolo_ring::ivshmem::channel::Shape;
use tombolo_ring::ivshmem::protocol;
use tombolo_ring::ivshmem::region::{Header, Layout, Name};

const USAGE: &str = "usage: ivshmem_peer SOCKET echo | ping COUNT | arp OWN-ADDRESS ADDRESS COUNT | serve";
const RECORD_BYTES: u32 = 56;
/// How long anything may take.
const TIMEOUT: Duration = Duration::from_secs(10);
/// After so long without an answer a request is repeated.
const REPEAT: Duration = Duration::from_millis(100);
/// Between two requests.
const PAUSE: Duration = Duration::from_millis(1);
const BROADCAST: [u8; 6] = [0xff; 6];
const ARP: [u8; 2] = [0x08, 0x06];

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words[..] {
        [socket, "serve"] => serve(socket),
        [socket, "echo"] => echo(channel(socket)?),
        [socket, "ping", count] => ping(channel(socket)?, count.parse()?),
        [socket, "arp", own, target, count] => arp(network(socket)?, own.parse()?, target.parse()?, count.parse()?),
        _ => Err(USAGE.into()),
    }
}

fn serve(socket: &str) -> Result<(), Box<dyn Error>> {
    const BYTES: u64 = 1 << 20;
    let layout = Layout::v1(BYTES, 0, 2)?;
    let name = Name::new("example").ok_or("a name of eight bytes fits")?;
    let header = Header { protocol: protocol::CHANNEL, ..Header::network(name, 2) };
    let links = Links::start("example", None, Box::new(|text| eprintln!("{text}")))?;
    links.open(Config {
        name: "example".into(),
        shape: LinkShape { dialect: Dialect::V1, max_peers: 2, vectors: 2 },
        layout,
        region_bytes: BYTES,
        header: Some(header),
        host: None,
        helper: None,
        doors: vec![Door { path: socket.into(), seat: Seat::Any }],
    })?;
    links.serve("example", None)?;
    println!("serving {header} at {socket} until the end of input");
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink())?;
    Ok(())
}

fn join(socket: &str) -> Result<Joined, Box<dyn Error>> {
    let joined = Joined::connect(socket, TIMEOUT)?;
    println!("peer {} of {}", joined.id(), joined.header());
    Ok(joined)
}

fn channel(socket: &str) -> Result<JoinedLink<ChannelPeer>, Box<dyn Error>> {
    let joined = join(socket)?;
    let shape = Shape::largest(joined.header().layout.output_bytes, RECORD_BYTES, 0).ok_or("no room for records")?;
    let other = u32::from(joined.id() == 0);
    Ok(joined.channel(other, shape)?)
}

fn network(socket: &str) -> Result<JoinedLink<NetPeer>, Box<dyn Error>> {
    Ok(join(socket)?.network()?)
}

fn echo(mut link: JoinedLink<ChannelPeer>) -> Result<(), Box<dyn Error>> {
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
            Ok(None) | Err(ChannelError::Down { .. }) => {
                link.wait(TIMEOUT)?;
            }
            Err(error) => return Err(error.into()),
        }
    }
}

fn ping(mut link: JoinedLink<ChannelPeer>, count: usize) -> Result<(), Box<dyn Error>> {
    let end = Instant::now() + TIMEOUT;
    while !link.step()? {
        link.wait(Duration::from_millis(100))?;
        if Instant::now() > end {
            return Err("the other peer is not connected".into());
        }
    }
    let mut to = [0; RECORD_BYTES as usize];
    let mut trips = Vec::with_capacity(count);
    for number in 0..count as u64 {
        let start = Instant::now();
        link.peer().send(&number.to_le_bytes())?;
        while link.peer().recv(&mut to)?.is_none() {
            link.wait(TIMEOUT)?;
            if start.elapsed() > TIMEOUT {
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

fn arp(mut link: JoinedLink<NetPeer>, own: Ipv4Addr, target: Ipv4Addr, count: usize) -> Result<(), Box<dyn Error>> {
    let mac = match link.header().mac {
        [0, 0, 0, 0, 0, 0] => [0x02, 0, 0, 0, 0, 0x77],
        given => given,
    };
    let end = Instant::now() + TIMEOUT;
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
    let (mut buffer, mut trips, mut who, mut repeated) = (Vec::new(), Vec::new(), [0; 6], 0);
    for number in 0..count {
        let begin = Instant::now();
        let mut start = begin;
        loop {
            // While the link is down, such as while the fabric restarts, the frame is refused, and
            // asked again.
            start = if link.peer().send(&request).is_ok() { Instant::now() } else { start };
            link.peer().flush();
            let got = loop {
                let got = link.peer().receive(&mut buffer, |frame| answer(frame, target)).flatten();
                if got.is_some() || start.elapsed() > REPEAT || !link.wait(REPEAT)? {
                    break got;
                }
            };
            if let Some(mac) = got {
                who = mac;
                break;
            }
            if begin.elapsed() > TIMEOUT {
                return Err(format!("request {number}: no answer for {target}").into());
            }
            repeated += 1;
        }
        trips.push(start.elapsed());
        std::thread::sleep(PAUSE);
    }
    let who: Vec<String> = who.iter().map(|byte| format!("{byte:02x}")).collect();
    println!("{target} is at {}; {repeated} requests were repeated", who.join(":"));
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
