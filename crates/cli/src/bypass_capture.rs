//! `tombolo bypass capture`: frames of one flow, or of a filter, as a pcapng file.

use std::io::{self, IsTerminal, Write};
use std::net::{IpAddr, Ipv6Addr};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use clap::Args;
use tombolo_bypass::attachment::monotonic_ns;
use tombolo_bypass::capture::{self, CaptureLock, End, Frame, MOST_KEPT, Wanted};
use tombolo_bypass::layout::Point;
use tombolo_bypass::netlink::Routes;
use tombolo_host::pcapng::{self, Direction, Packet};

use crate::bypass::{Space, end_of, links_of_attached, stop_flag};
use crate::capture::Destination;
use crate::exit::{Exit, Failure};
use crate::number;
use crate::out::{self, counted, scaled};

#[derive(Args, Debug)]
pub(crate) struct Capture {
    /// Only frames that come in or go out at this interface [default: all attached ones]
    #[arg(value_name = "INTERFACE")]
    interface: Option<String>,
    /// File to write; - is standard output, which is the default in a pipe
    #[arg(short, long, value_name = "FILE")]
    write: Option<PathBuf>,
    /// Only frames from or to this end: `10.1.0.2`, `10.1.0.0/24`, `:53`, `10.1.0.2:53`,
    /// `[fd01::2]:53`. Given twice: between the two, in both directions
    #[arg(long, value_name = "ADDRESS:PORT", value_parser = typed_end)]
    end: Vec<TypedEnd>,
    /// Only this protocol: tcp, udp, icmp (of both families), or its number
    #[arg(long, value_name = "PROTOCOL", value_parser = protocol)]
    protocol: Option<u8>,
    /// Stop after this many frames
    #[arg(long, value_name = "N", value_parser = number::count, allow_hyphen_values = true)]
    count: Option<u64>,
    /// Stop after this time
    #[arg(long, value_name = "S", value_parser = number::seconds, allow_hyphen_values = true)]
    seconds: Option<std::time::Duration>,
    /// Bytes to keep of each frame, 65000 at most [default: 65000]
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u32).range(1..=65_000))]
    snaplen: Option<u32>,
    #[command(flatten)]
    space: Space,
}

/// An address, with how many of its bits count.
fn address(text: &str) -> Option<(IpAddr, u8)> {
    let (address, prefix) = match text.split_once('/') {
        Some((address, prefix)) => (address, Some(prefix.parse::<u8>().ok()?)),
        None => (text, None),
    };
    let address: IpAddr = address.parse().ok()?;
    let bits = if address.is_ipv4() { 32 } else { 128 };
    Some((address, prefix.unwrap_or(bits))).filter(|a| a.1 <= bits)
}

fn end(text: &str) -> Result<End, String> {
    let port = |text: &str| text.parse::<u16>().ok().filter(|port| *port != 0);
    let parsed = || {
        if let Some(address) = address(text) {
            return Some(End { address: Some(address), port: None });
        }
        let (host, port_text) = text.rsplit_once(':')?;
        let host = host.strip_prefix('[').map_or(Some(host), |inner| inner.strip_suffix(']'))?;
        let address = if host.is_empty() { None } else { Some(address(host)?) };
        Some(End { address, port: Some(port(port_text)?) })
    };
    parsed()
        .ok_or_else(|| "expected an address, a port or both, such as 10.1.0.2, :53, 10.1.0.0/24 or [fd01::2]:53".into())
}

fn protocol(text: &str) -> Result<u8, String> {
    match text {
        "tcp" => Ok(6),
        "udp" => Ok(17),
        "icmp" => Ok(1),
        number => number
            .parse()
            .ok()
            .filter(|n| *n > 0)
            .ok_or_else(|| "expected tcp, udp, icmp or a number from 1 to 255".into()),
    }
}

/// The file while it is written.
struct Output {
    file: Box<dyn Write>,
    /// Numbers of interfaces, in the order of their blocks.
    interfaces: Vec<u32>,
    names: Vec<(u32, String)>,
    snap: u32,
    /// Time since 1970 when the monotonic clock was zero.
    clock_start_ns: u64,
    frames: u64,
    bytes: u64,
    last_ns: u64,
}

impl Output {
    fn write(&mut self, block: &[u8]) -> io::Result<()> {
        self.bytes += block.len() as u64;
        self.file.write_all(block)
    }

    fn name(&mut self, index: u32) -> String {
        if !self.names.iter().any(|(n, _)| *n == index)
            && let Ok(links) = Routes::open().and_then(|routes| routes.links())
        {
            self.names = links.into_iter().map(|l| (l.index, l.name)).collect();
        }
        let known = self.names.iter().find(|(n, _)| *n == index);
        known.map_or_else(|| format!("interface {index}"), |(_, name)| name.clone())
    }

    /// The number of an interface's block, which is written where there is none yet.
    fn interface(&mut self, index: u32) -> io::Result<u32> {
        let known = self.interfaces.iter().position(|n| *n == index);
        if let Some(at) = known {
            return Ok(at as u32);
        }
        let mut block = vec![];
        pcapng::interface(&mut block, &self.name(index), self.snap);
        self.write(&block)?;
        self.interfaces.push(index);
        Ok(self.interfaces.len() as u32 - 1)
    }

    fn frame(&mut self, frame: &Frame) -> io::Result<()> {
        let captured = &frame.captured;
        let interface = self.interface(captured.interface)?;
        self.last_ns = self.clock_start_ns + captured.at_ns;
        let comment = self.comment(frame);
        let packet = Packet {
            interface,
            time_ns: self.last_ns,
            direction: if captured.point == Point::In { Direction::Received } else { Direction::Transmitted },
            bytes: &frame.bytes,
            original_bytes: captured.length,
            comment: &comment,
        };
        let mut block = vec![];
        pcapng::packet(&mut block, &packet);
        self.frames += 1;
        self.write(&block)
    }

    /// Which way a frame went and why, and what its bytes do not say.
    fn comment(&mut self, frame: &Frame) -> String {
        let captured = &frame.captured;
        let other = (captured.other != 0).then(|| self.name(captured.other));
        let mut text = match (captured.what, other) {
            (Some((key, meaning)), None) => format!("{key}: {meaning}"),
            (Some((key, meaning)), Some(other)) => {
                let word = if captured.point == Point::In { "to" } else { "from" };
                format!("{key}: {meaning}, {word} {other}")
            }
            (None, Some(other)) => format!("kernel: forwarded, from {other}"),
            (None, None) => "kernel: sent by this host".into(),
        };
        if let Some(segment) = captured.segment {
            text.push_str(&format!("; a segmentation frame, of packets with {segment} bytes of payload each"));
        }
        if let Some(tag) = captured.tag {
            text.push_str(&format!("; VLAN {}, priority {}", tag & 0xfff, tag >> 13));
        }
        text
    }
}

/// Whether an IPv6 address that was given without brackets also reads as a shorter address and a
/// port.
fn is_ambiguous(text: &str) -> bool {
    let shorter = text.rsplit_once(':').filter(|(_, port)| port.parse::<u16>().is_ok());
    shorter.is_some_and(|(host, _)| host.parse::<Ipv6Addr>().is_ok()) && text.parse::<Ipv6Addr>().is_ok()
}

#[derive(Clone, Debug)]
struct TypedEnd {
    end: End,
    /// The address that it was taken for, where an address and a port may be meant.
    doubt: Option<String>,
}

fn typed_end(text: &str) -> Result<TypedEnd, String> {
    Ok(TypedEnd { end: end(text)?, doubt: is_ambiguous(text).then(|| text.into()) })
}

impl Capture {
    fn ends(&self) -> impl Iterator<Item = End> {
        self.end.iter().map(|typed| typed.end)
    }

    /// What is wrong with the filter in itself.
    fn check(&self) -> Result<(), Failure> {
        let families: Vec<bool> = self.ends().filter_map(|e| e.address).map(|a| a.0.is_ipv4()).collect();
        if self.end.len() > 2 {
            return Err(Failure::misused("a flow has two ends: --end can be given twice"));
        }
        if families.len() == 2 && families[0] != families[1] {
            return Err(Failure::misused("no frame goes from an IPv4 to an IPv6 address"));
        }
        let has_port = self.ends().any(|e| e.port.is_some());
        if has_port && self.protocol.is_some_and(|p| p != 6 && p != 17) {
            return Err(Failure::misused("only TCP and UDP have ports"));
        }
        Ok(())
    }

    pub(crate) fn run(&self) -> Result<Exit, Failure> {
        self.check()?;
        let place = self.space.enter()?;
        let links = links_of_attached(&place, self.interface.as_deref())?;
        let names: Vec<_> = links.into_iter().map(|l| (l.index, l.name)).collect();
        let index = self.interface.as_ref().and_then(|name| names.iter().find(|n| n.1 == *name)).map(|n| n.0);
        let path = Destination::path_of(self.write.as_deref())?;
        for text in self.end.iter().filter_map(|typed| typed.doubt.as_ref()) {
            let (address, port) = text.rsplit_once(':').unwrap_or((text, ""));
            out::tell!("tombolo: --end {text} is an address without a port; with one it is [{address}]:{port}");
        }
        // Before the file, which may be that of the capture that runs.
        let slot = CaptureLock::take(&place)?;
        let file: Box<dyn Write> = Box::new(io::BufWriter::new(Destination::create(path)?));
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos() as u64);
        let snap = self.snaplen.unwrap_or(MOST_KEPT);
        let clock_start_ns = now.saturating_sub(monotonic_ns());
        let mut output =
            Output { file, interfaces: vec![], names, snap, clock_start_ns, frames: 0, bytes: 0, last_ns: now };
        let mut head = vec![];
        pcapng::section(&mut head, concat!("tombolo ", env!("CARGO_PKG_VERSION")));
        output.write(&head)?;
        if let Some(index) = index {
            output.interface(index)?;
        }
        output.file.flush()?;
        if path.is_some() && io::stderr().is_terminal() && self.seconds.is_none() && self.count.is_none() {
            out::tell!("capturing; Ctrl-C ends it and does not change the bypass");
        }
        let (deadline, stop) = (self.seconds.map(|s| Instant::now() + s), stop_flag()?);
        let mut ends = [End::default(); 2];
        ends.iter_mut().zip(self.ends()).for_each(|(to, from)| *to = from);
        let wanted = Wanted { interface: index, protocol: self.protocol, ends, snap };
        let totals = capture::capture(&place, &slot, wanted, |frame| {
            let Some(frame) = frame else {
                output.file.flush()?;
                let is_over = stop.load(Ordering::Relaxed) || deadline.is_some_and(|end| Instant::now() >= end);
                return Ok::<_, Failure>(if is_over { ControlFlow::Break(()) } else { ControlFlow::Continue(()) });
            };
            output.frame(frame)?;
            let is_full = self.count.is_some_and(|count| output.frames >= count);
            Ok(if is_full { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
        })?;
        let mut tail = vec![];
        for (number, index) in output.interfaces.iter().enumerate() {
            let (frames, lost) = totals.interfaces.iter().find(|i| i.0 == *index).map_or((0, 0), |i| (i.1, i.2));
            pcapng::statistics(&mut tail, number as u32, output.last_ns, frames, lost);
        }
        output.write(&tail)?;
        output.file.flush()?;
        if path.is_some() {
            let frames = counted(usize::try_from(output.frames).unwrap_or(usize::MAX), "frame");
            out::tell!(
                "{frames}, {} in {}",
                scaled(output.bytes as f64, "B"),
                path.unwrap_or(Path::new("-")).display()
            );
        }
        if totals.lost() > 0 {
            out::tell!(
                "tombolo: {} more frames came faster than they could be written, and are not in the file",
                totals.lost()
            );
        }
        Ok(end_of(totals.detached))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use tombolo_bypass::layout::{Captured, VERDICTS};

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        capture: Capture,
    }

    fn parse(line: &str) -> Result<Capture, clap::Error> {
        Line::try_parse_from(["capture"].into_iter().chain(line.split(' '))).map(|l| l.capture)
    }

    #[test]
    fn an_end_is_an_address_a_port_or_both() {
        let is = |text: &str, host: Option<(&str, u8)>, port| {
            let address = host.map(|(host, prefix)| (host.parse().unwrap(), prefix));
            assert_eq!(end(text), Ok(End { address, port }), "{text}");
        };
        is("10.1.0.2", Some(("10.1.0.2", 32)), None);
        is("10.1.0.0/24", Some(("10.1.0.0", 24)), None);
        is(":53", None, Some(53));
        is("10.1.0.2:53", Some(("10.1.0.2", 32)), Some(53));
        is("10.1.0.0/24:53", Some(("10.1.0.0", 24)), Some(53));
        is("fd01::2", Some(("fd01::2", 128)), None);
        is("fd01::/64", Some(("fd01::", 64)), None);
        is("[fd01::2]:53", Some(("fd01::2", 128)), Some(53));
        for wrong in ["", ":", "x", "10.1.0.2/33", "fd01::/129", "10.1.0.2:0", "10.1.0.2:99999", "[fd01::2", "53"] {
            assert!(end(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn an_address_that_may_be_meant_as_one_with_a_port_is_doubted() {
        for (text, is_doubted) in
            [("fd01::2:53", true), ("fd01::2", false), ("[fd01::2]:53", false), ("10.1.0.2:53", false)]
        {
            assert_eq!(typed_end(text).unwrap().doubt.is_some(), is_doubted, "{text}");
        }
        assert!(typed_end("fd01::2:").is_err());
    }

    #[test]
    fn filters_that_no_frame_can_meet_are_refused() {
        for (line, is_right) in [
            ("ta --end 10.1.0.2:1 --end 10.2.0.2:2 --protocol udp --count 3 --seconds 0.5 --snaplen 96 -w x", true),
            ("--protocol 47 --end 10.1.0.2", true),
            ("--end :1 --end :2 --end :3", false),
            ("--end 10.1.0.2 --end fd01::2", false),
            ("--end :1 --protocol icmp", false),
        ] {
            assert_eq!(parse(line).unwrap().check().is_ok(), is_right, "{line}");
        }
        for wrong in ["--protocol tls", "--protocol 0", "--end x", "--count 0", "--snaplen 0", "--snaplen 65001"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_comment_says_which_way_a_frame_went() {
        let mut output = Output {
            file: Box::new(io::sink()),
            interfaces: vec![],
            names: vec![(3, "ta".into()), (4, "tb".into())],
            snap: 96,
            clock_start_ns: 0,
            frames: 0,
            bytes: 0,
            last_ns: 0,
        };
        let mut comment = |point, what: Option<usize>, other, segment, tag| {
            let what = what.map(|code| VERDICTS[code]);
            let captured = Captured { at_ns: 1, interface: 3, other, length: 60, kept: 0, segment, tag, point, what };
            output.comment(&Frame { captured, bytes: vec![] })
        };
        assert_eq!(
            comment(Point::In, Some(2), 4, None, None),
            "taken_xdp: redirected before there was an sk_buff, to tb"
        );
        assert_eq!(comment(Point::Out, Some(0), 4, None, None), "taken_tcx: redirected to the output's queue, from tb");
        assert_eq!(comment(Point::In, Some(6), 0, None, Some(0x2005)), "up_vlan: a VLAN tag; VLAN 5, priority 1");
        assert_eq!(comment(Point::Kernel, None, 4, None, None), "kernel: forwarded, from tb");
        let large = "kernel: sent by this host; a segmentation frame, of packets with 1448 bytes of payload each";
        assert_eq!(comment(Point::Kernel, None, 0, Some(1448), None), large);
    }
}
