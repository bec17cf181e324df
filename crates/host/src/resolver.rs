//! Asks the host's name servers what guests want to know of elsewhere.
//!
//! A query goes to the servers one after the other, over UDP from a socket of its own (a port that
//! the kernel chooses, connected, so that only that server's answers are heard), and again over TCP
//! where the answer was cut. A server that refuses, fails or stays silent is passed over. Nothing
//! is cached: that is the servers' business.
//!
//! Limits: [`Timing`]; three servers of resolv.conf, as in libc. The number of queries at a time is
//! the gateway's limit. Failure: without any answer the caller gets `None`, and the guest SERVFAIL.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout, timeout_at};
use tombolo_switch::gateway::{GatewayHandle, UpstreamQuery};

/// The port of name servers.
const PORT: u16 = 53;
/// Servers taken from a resolv.conf (glibc's MAXNS).
const MAX_SERVERS: usize = 3;
/// Response codes after which another server may know better (RFC 1035 §4.1.1): server failure, not
/// implemented, refused.
const PASS_ON: [u8; 3] = [2, 4, 5];

/// How long servers are waited for.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// One server, over UDP or TCP.
    pub server: Duration,
    /// All of them; below what the gateway waits.
    pub total: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Timing { server: Duration::from_millis(1400), total: Duration::from_millis(4300) }
    }
}

/// Which name servers are asked.
#[derive(Debug)]
pub enum Servers {
    /// Servers that the fabric file names.
    Fixed(Vec<SocketAddr>),
    /// Those that a resolv.conf names, read again whenever it changes.
    File(ResolvConf),
}

impl Servers {
    /// `servers`, or those of `/etc/resolv.conf` where there are none.
    pub fn or_host(servers: Vec<SocketAddr>) -> Servers {
        if servers.is_empty() { Servers::File(ResolvConf::new("/etc/resolv.conf")) } else { Servers::Fixed(servers) }
    }

    /// The servers to ask now; reads resolv.conf again if it changed.
    pub fn now(&mut self) -> Vec<SocketAddr> {
        match self {
            Servers::Fixed(servers) => servers.clone(),
            Servers::File(file) => file.servers(),
        }
    }
}

/// A resolv.conf and what it said last.
#[derive(Debug)]
pub struct ResolvConf {
    path: PathBuf,
    modified: Option<SystemTime>,
    servers: Vec<SocketAddr>,
}

impl ResolvConf {
    /// The file at `path`, which need not exist yet.
    pub fn new(path: impl Into<PathBuf>) -> ResolvConf {
        ResolvConf { path: path.into(), modified: None, servers: Vec::new() }
    }

    fn servers(&mut self) -> Vec<SocketAddr> {
        let modified = modified(&self.path);
        if modified != self.modified || modified.is_none() {
            self.servers = parse_resolv_conf(&std::fs::read_to_string(&self.path).unwrap_or_default());
            self.modified = modified;
        }
        self.servers.clone()
    }
}

fn modified(path: &Path) -> Option<SystemTime> {
    std::fs::metadata(path).and_then(|meta| meta.modified()).ok()
}

/// The servers that the text of a resolv.conf names. Without any, libc asks the local one; so does
/// this.
pub fn parse_resolv_conf(text: &str) -> Vec<SocketAddr> {
    let servers = text.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        let address = words.next().filter(|word| *word == "nameserver").and(words.next())?;
        // An address with a zone (fe80::1%eth0) cannot be asked without its interface's number:
        // left out.
        Some(SocketAddr::new(address.parse::<IpAddr>().ok()?, PORT))
    });
    let servers: Vec<_> = servers.take(MAX_SERVERS).collect();
    if servers.is_empty() { vec![SocketAddr::new(Ipv4Addr::LOCALHOST.into(), PORT)] } else { servers }
}

/// Asks for the queries of one gateway. Dropping it ends those that are on their way.
#[derive(Debug)]
pub struct Resolver {
    servers: Servers,
    timing: Timing,
    queries: JoinSet<()>,
}

impl Resolver {
    /// A resolver that asks `servers`.
    pub fn new(servers: Servers, timing: Timing) -> Resolver {
        Resolver { servers, timing, queries: JoinSet::new() }
    }

    /// Sends the queries that `gateway` has left on their way; to be called when its event waker
    /// rang, within a tokio runtime. Each is answered through the handle when the servers have
    /// answered or failed.
    pub fn serve(&mut self, gateway: &GatewayHandle) {
        while self.queries.try_join_next().is_some() {}
        for query in gateway.take_queries() {
            let (gateway, servers, timing) = (gateway.clone(), self.servers.now(), self.timing);
            self.queries.spawn(async move {
                let answer = resolve(&query, &servers, timing).await;
                // An empty answer says that there is none.
                gateway.answer(query.id, answer.unwrap_or_default());
            });
        }
    }
}

/// The answer of the first of `servers` that has one; a failure of theirs where all failed; `None`
/// where none spoke.
pub async fn resolve(query: &UpstreamQuery, servers: &[SocketAddr], timing: Timing) -> Option<Vec<u8>> {
    let end = Instant::now() + timing.total;
    let mut failure = None;
    // Twice, since a datagram may get lost.
    for server in servers.iter().chain(servers) {
        let asked = timeout(timing.server, ask(query, *server, timing));
        match timeout_at(end, asked).await {
            Ok(Ok(Ok(answer))) => {
                if !answer.get(3).is_some_and(|flags| PASS_ON.contains(&(flags & 15))) {
                    return Some(answer);
                }
                failure = Some(answer);
            }
            // No server there, or no answer: the next.
            Ok(Ok(Err(_)) | Err(_)) => {}
            Err(_) => break,
        }
    }
    failure
}

async fn ask(query: &UpstreamQuery, server: SocketAddr, timing: Timing) -> std::io::Result<Vec<u8>> {
    let any = if server.is_ipv4() { IpAddr::V4(Ipv4Addr::UNSPECIFIED) } else { IpAddr::V6(Ipv6Addr::UNSPECIFIED) };
    let socket = UdpSocket::bind((any, 0)).await?;
    socket.connect(server).await?;
    socket.send(&query.bytes).await?;
    let mut buffer = vec![0; 65_535];
    loop {
        let n = socket.recv(&mut buffer).await?;
        // What is no answer to this very question is somebody's attempt: go on listening.
        if query.is_answered_by(&buffer[..n]) {
            buffer.truncate(n);
            break;
        }
    }
    let cut = buffer[2] & 0x02 != 0;
    if cut && let Ok(Ok(whole)) = timeout(timing.server / 2, ask_stream(query, server)).await {
        return Ok(whole);
    }
    Ok(buffer)
}

async fn ask_stream(query: &UpstreamQuery, server: SocketAddr) -> std::io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect(server).await?;
    // The gateway's queries are at most 4096 bytes.
    let mut message = (query.bytes.len() as u16).to_be_bytes().to_vec();
    message.extend_from_slice(&query.bytes);
    stream.write_all(&message).await?;
    let length = stream.read_u16().await?;
    let mut answer = vec![0; length.into()];
    stream.read_exact(&mut answer).await?;
    if query.is_answered_by(&answer) { Ok(answer) } else { Err(std::io::ErrorKind::InvalidData.into()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::SocketAddrV4;
    use tokio::net::TcpListener;

    const QUERY: &[u8] = b"\x43\x21\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x03big\x03org\x00\x00\x01\x00\x01";
    const QUICK: Timing = Timing { server: Duration::from_millis(300), total: Duration::from_millis(2000) };

    fn query() -> UpstreamQuery {
        UpstreamQuery { id: 1, bytes: QUERY.to_vec() }
    }

    /// An answer to [`QUERY`] with these flags and `extra` at its end.
    fn answer(flags: [u8; 2], extra: &[u8]) -> Vec<u8> {
        let mut bytes = [QUERY, extra].concat();
        bytes[2..4].copy_from_slice(&flags);
        bytes
    }

    /// A server that sends `answers` to the first datagram that it gets.
    async fn server(answers: Vec<Vec<u8>>) -> SocketAddr {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let address = socket.local_addr().unwrap();
        tokio::spawn(async move {
            let mut buffer = [0; 1024];
            while let Ok((n, from)) = socket.recv_from(&mut buffer).await {
                assert_eq!(&buffer[..n], QUERY);
                for answer in &answers {
                    socket.send_to(answer, from).await.unwrap();
                }
            }
        });
        address
    }

    /// An address without a listener.
    async fn nobody() -> SocketAddr {
        UdpSocket::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap()
    }

    #[tokio::test]
    async fn servers_that_fail_or_are_silent_are_passed_over() {
        let good = answer([0x81, 0x80], b"good");
        let servers = [
            nobody().await,
            server(vec![]).await,
            server(vec![answer([0x81, 0x82], b"")]).await,
            server(vec![good.clone()]).await,
        ];
        assert_eq!(resolve(&query(), &servers, QUICK).await, Some(good));
        // With nothing better, the failure is passed on; with nothing at all, nothing.
        assert_eq!(resolve(&query(), &servers[..3], QUICK).await, Some(answer([0x81, 0x82], b"")));
        assert_eq!(resolve(&query(), &servers[..2], QUICK).await, None);
        assert_eq!(resolve(&query(), &[], QUICK).await, None);
        // A name that is not there is an answer.
        let unknown = answer([0x81, 0x83], b"");
        let servers = [server(vec![unknown.clone()]).await, servers[3]];
        assert_eq!(resolve(&query(), &servers, QUICK).await, Some(unknown));
    }

    #[tokio::test]
    async fn what_answers_another_question_is_not_heard() {
        let good = answer([0x81, 0x80], b"good");
        let (mut other_id, mut other_name) = (good.clone(), good.clone());
        other_id[0] ^= 1;
        other_name[13] ^= 1;
        let server = server(vec![other_id, other_name, QUERY.to_vec(), vec![], good.clone()]).await;
        assert_eq!(resolve(&query(), &[server], QUICK).await, Some(good));
    }

    #[tokio::test]
    async fn a_cut_answer_is_asked_for_again_over_tcp() {
        let whole = answer([0x81, 0x80], &[7; 3000]);
        let cut = answer([0x83, 0x80], b"");
        let address = server(vec![cut.clone()]).await;
        // There is no listener for TCP: the truncated answer is better than none.
        assert_eq!(resolve(&query(), &[address], QUICK).await, Some(cut));
        let listener = TcpListener::bind(address).await.unwrap();
        let to_send = whole.clone();
        tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let length = stream.read_u16().await.unwrap();
            let mut asked = vec![0; length.into()];
            stream.read_exact(&mut asked).await.unwrap();
            assert_eq!(asked, QUERY);
            stream.write_u16(to_send.len() as u16).await.unwrap();
            stream.write_all(&to_send).await.unwrap();
        });
        assert_eq!(resolve(&query(), &[address], QUICK).await, Some(whole));
    }

    #[test]
    fn a_resolv_conf_names_up_to_three_servers() {
        let text = "# a comment\nsearch lan\nnameserver 192.0.2.1 \n nameserver\t2001:db8::1\n#nameserver 192.0.2.9\n\
            nameserver fe80::1%eth0\nnameserver nonsense\noptions edns0\nnameserver 192.0.2.2\nnameserver 192.0.2.3\n";
        let at = |ip: &str| SocketAddr::new(ip.parse().unwrap(), 53);
        assert_eq!(parse_resolv_conf(text), [at("192.0.2.1"), at("2001:db8::1"), at("192.0.2.2")]);
        let local = SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::LOCALHOST, 53));
        assert_eq!(parse_resolv_conf("search lan\n"), [local]);
    }

    #[test]
    fn a_changed_resolv_conf_is_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("resolv.conf");
        let mut servers = Servers::File(ResolvConf::new(&path));
        assert_eq!(servers.now(), ["127.0.0.1:53".parse().unwrap()]);
        for (number, address) in ["192.0.2.1", "192.0.2.2"].into_iter().enumerate() {
            std::fs::write(&path, format!("nameserver {address}\n")).unwrap();
            let file = std::fs::File::open(&path).unwrap();
            file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(1000 + number as u64)).unwrap();
            assert_eq!(servers.now(), [format!("{address}:53").parse().unwrap()]);
        }
        let fixed: SocketAddr = "192.0.2.7:5353".parse().unwrap();
        assert_eq!(Servers::or_host(vec![fixed]).now(), [fixed]);
    }
}
