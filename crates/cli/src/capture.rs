//! `tombolo capture`: frames of a port or a network as a pcapng file.

use std::fs::{File, Permissions};
use std::io::{self, IsTerminal, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use tombolo_host::api::CaptureOf;
use tombolo_host::api::blocks::Blocks;
use tombolo_host::api::client::{Client, Ending};

use crate::exit::{Exit, Failure};
use crate::number;
use crate::out::{counted, scaled};
use crate::select::Select;

const EXAMPLES: &str = "\
A filter has words of pcap-filter(7): arp, ip, ip6, icmp, icmp6, tcp, udp, igmp, broadcast, multicast, vlan [N]; [src|dst] host
ADDRESS; [src|dst] net ADDRESS/BITS; [tcp|udp] [src|dst] port N or portrange N-M; ether [src|dst] MAC; ether proto N; less N;
greater N; with and, or, not and parentheses.

Examples:
  tombolo capture web -w web.pcapng --seconds 10
  tombolo capture web | wireshark -k -i -
  tombolo capture --network lan --filter 'arp or udp port 53' | tcpdump -n -r -";

#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Capture {
    /// Name of the port
    #[arg(required_unless_present = "network", conflicts_with = "network")]
    port: Option<String>,
    /// Capture a whole network instead: each frame once, where it enters
    #[arg(long, value_name = "NAME")]
    network: Option<String>,
    /// Only frames of which this is true, such as "tcp port 80"
    #[arg(long, value_name = "EXPRESSION")]
    filter: Option<String>,
    /// File to write; - is standard output, which is the default in a pipe
    #[arg(short, long, value_name = "FILE")]
    write: Option<PathBuf>,
    /// Stop after this many frames
    #[arg(long, value_name = "N", value_parser = number::count, allow_hyphen_values = true)]
    count: Option<u64>,
    /// Stop after this time
    #[arg(long, value_name = "S", value_parser = number::seconds, allow_hyphen_values = true)]
    seconds: Option<Duration>,
    /// Bytes to keep of each frame [default: all]
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u32).range(1..))]
    snaplen: Option<u32>,
}

/// A file for our own user only: it holds what others said to each other. What is no file, like a
/// pipe, stays as it is.
fn private(path: &Path) -> io::Result<File> {
    let file = File::options().write(true).create(true).truncate(true).mode(0o600).open(path)?;
    if file.metadata()?.is_file() {
        file.set_permissions(Permissions::from_mode(0o600))?;
    }
    Ok(file)
}

/// Where a capture is written: a file, or standard output. Its errors name the file.
pub(crate) struct Destination {
    path: Option<PathBuf>,
    out: Box<dyn Write>,
}

impl Destination {
    /// The file that `--write` names; `None` is standard output, which has to be a pipe or a file.
    pub(crate) fn path_of(write: Option<&Path>) -> Result<Option<&Path>, Failure> {
        let path = write.filter(|p| *p != Path::new("-"));
        if path.is_none() && io::stdout().is_terminal() {
            return Err(Failure::misused("a capture is binary data: write it with -w FILE, or pipe it"));
        }
        Ok(path)
    }

    pub(crate) fn create(path: Option<&Path>) -> Result<Destination, Failure> {
        let mut created = Destination { path: path.map(Path::to_owned), out: Box::new(io::stdout()) };
        if let Some(path) = path {
            created.out = Box::new(private(path).map_err(|error| created.named(&error))?);
        }
        Ok(created)
    }

    fn named(&self, error: &io::Error) -> io::Error {
        let name = self.path.as_ref().map_or_else(|| "standard output".into(), |p| p.display().to_string());
        io::Error::new(error.kind(), format!("writing {name}: {error}"))
    }
}

impl Write for Destination {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.out.write(bytes).map_err(|error| self.named(&error))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush().map_err(|error| self.named(&error))
    }
}

/// Frames that captures of it could not keep up with.
fn lost(client: &Client, of: &CaptureOf) -> Result<u64, Failure> {
    let network = match of {
        CaptureOf::Port(name) => return Ok(client.port(name)?.counters.capture_lost),
        CaptureOf::Network(network) => network,
    };
    let status = client.status()?;
    if !status.networks.iter().any(|n| n.name == *network) {
        let there: Vec<_> = status.networks.iter().map(|n| n.name.as_str()).collect();
        return Err(Failure::failed(format!("no network \"{network}\"; there are: {}", there.join(", "))));
    }
    Ok(status.ports.iter().filter(|p| p.network == *network).map(|p| p.counters.capture_lost).sum())
}

impl Capture {
    pub(crate) fn run(&self, select: &Select) -> Result<Exit, Failure> {
        let mut client = select.client()?;
        let path = Destination::path_of(self.write.as_deref())?;
        // Before the file is made: one of a port that is not there is of no use.
        let of = match (&self.network, &self.port) {
            (Some(network), _) => CaptureOf::Network(network.clone()),
            // One of the two is required.
            (None, port) => CaptureOf::Port(port.clone().unwrap_or_default()),
        };
        let (CaptureOf::Port(name) | CaptureOf::Network(name)) = &of;
        let lost_before = lost(&client, &of)?;
        let mut out = Destination::create(path)?;
        let deadline = self.seconds.map(|s| Instant::now() + s);
        let tty = path.is_some() && io::stderr().is_terminal();
        if tty && deadline.is_none() && self.count.is_none() {
            crate::out::tell!("capturing {name}; Ctrl-C ends it");
        }
        let mut blocks = Blocks::default();
        let mut bytes = 0u64;
        let end = client.capture(&of, self.snaplen, self.filter.as_deref(), deadline, |piece| {
            bytes += piece.len() as u64;
            blocks.feed(piece, self.count, &mut out)
        })?;
        let what = format!(
            "{}, {}",
            counted(usize::try_from(blocks.frames()).unwrap_or(usize::MAX), "frame"),
            scaled(bytes as f64, "B")
        );
        if path.is_some() {
            crate::out::tell!("{what}");
        }
        // A port that went away, or was restarted, has nothing more to say.
        let lost = lost(&client, &of).map_or(0, |lost| lost.saturating_sub(lost_before));
        if lost > 0 {
            crate::out::tell!(
                "tombolo: {lost} more frames passed faster than they could be written, and are not in it"
            );
        }
        if end == Ending::Fabric && (self.count.is_some() || deadline.is_some()) {
            crate::out::tell!("tombolo: {name} was removed before that");
            return Ok(Exit::Partly);
        }
        Ok(Exit::Done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        capture: Capture,
    }

    fn parse(line: &str) -> Result<Capture, clap::Error> {
        Line::try_parse_from(["capture"].into_iter().chain(line.split(' '))).map(|l| l.capture)
    }

    #[test]
    fn flags_have_units_and_bounds() {
        let capture = parse("web -w x.pcapng --count 3 --seconds 0.5 --snaplen 96").unwrap();
        assert_eq!((capture.port.as_deref(), capture.count, capture.snaplen), (Some("web"), Some(3), Some(96)));
        assert_eq!(parse("--network lan --filter arp").unwrap().filter.as_deref(), Some("arp"));
        assert_eq!(capture.seconds, Some(Duration::from_millis(500)));
        assert_eq!(capture.write.as_deref(), Some(Path::new("x.pcapng")));
        assert_eq!(parse("web --write -").unwrap().write.as_deref(), Some(Path::new("-")));
        for wrong in
            ["web --count 0", "web --seconds -1", "web --seconds x", "web --snaplen 0", "-w x", "web --network lan"]
        {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_file_that_cannot_be_written_is_named() {
        let text = |failure: Failure| match failure {
            Failure::Said(Exit::Failed, text) => text,
            other => panic!("{other:?}"),
        };
        let missing = Destination::create(Some(Path::new("/nonexistent/x.pcapng"))).map(drop).unwrap_err();
        assert!(text(missing).starts_with("writing /nonexistent/x.pcapng: No such file"));
        let mut full = Destination::create(Some(Path::new("/dev/full"))).unwrap();
        assert!(text(full.write_all(b"x").unwrap_err().into()).starts_with("writing /dev/full: No space left"));
        let gone = io::Error::from(io::ErrorKind::BrokenPipe);
        assert_eq!(full.named(&gone).kind(), io::ErrorKind::BrokenPipe);
    }
}
