//! A connection between two machines, within TLS or without. Before calls begin it is used with a
//! time limit ([`Timed`]); then it does not block.

use std::io::{self, ErrorKind, Read, Write};
use std::time::{Duration, Instant};

use rustls::Connection;
use tombolo_calls::frames::Frames;
use tombolo_calls::transport::Stream;

use super::engine::Socket;

const READ_BYTES: usize = 64 << 10;
/// A machine that answers nothing for so long is taken for dead: it lost its power or its network.
/// The engine counts from when it was last heard, or, once something is sent that is not
/// acknowledged, from then: up to twice as long.
pub const DEAD_AFTER: Duration = Duration::from_secs(4);

/// A connection, and what its bytes go through.
#[derive(Debug)]
pub(crate) struct StreamEnd {
    socket: Socket,
    tls: Option<Box<Connection>>,
    /// What is read at a time.
    bytes: Box<[u8]>,
    /// The frames did not want all that has come.
    has_more: bool,
}

fn is_later(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
}

/// What TLS says of the other side's bytes, as an error of reading.
fn violation(error: rustls::Error) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, error)
}

fn buffer() -> Box<[u8]> {
    vec![0; READ_BYTES].into()
}

impl StreamEnd {
    pub(crate) fn plain(socket: Socket) -> StreamEnd {
        StreamEnd { socket, tls: None, bytes: buffer(), has_more: false }
    }

    pub(super) fn within(socket: Socket, tls: Connection) -> StreamEnd {
        StreamEnd { socket, tls: Some(Box::new(tls)), bytes: buffer(), has_more: false }
    }

    pub(crate) fn socket(&self) -> &Socket {
        &self.socket
    }

    /// Reads plain bytes; 0 where the other side has ended. `Interrupted` where it is to be tried
    /// again.
    fn read_some(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let StreamEnd { socket, tls, .. } = self;
        let Some(tls) = tls else { return socket.read(bytes) };
        match tls.reader().read(bytes) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            // Without its goodbye: the connection was cut, which is an end as well, since calls
            // mark their own.
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(0),
            end => return end,
        }
        if tls.read_tls(socket)? == 0 {
            return Ok(0);
        }
        if let Err(error) = tls.process_new_packets() {
            // The alert that says why is the last that the other side hears.
            let _ = tls.write_tls(socket);
            return Err(violation(error));
        }
        // One system call each time, so that a time limit holds for a record that comes in pieces.
        Err(ErrorKind::Interrupted.into())
    }

    /// Sends what TLS holds.
    fn flush_tls(&mut self) -> io::Result<()> {
        let StreamEnd { socket, tls, .. } = self;
        let Some(tls) = tls else { return Ok(()) };
        while tls.wants_write() {
            if tls.write_tls(socket)? == 0 {
                return Err(ErrorKind::WriteZero.into());
            }
        }
        Ok(())
    }

    /// Reads by these bytes what the frames want. False where the other side has ended.
    fn read_into(&mut self, frames: &mut Frames, bytes: &mut [u8]) -> bool {
        loop {
            let wanted = frames.wanted().min(bytes.len());
            self.has_more = wanted == 0;
            if wanted == 0 {
                return true;
            }
            match self.read_some(&mut bytes[..wanted]) {
                Ok(0) => return false,
                Ok(n) => {
                    frames.feed(&bytes[..n]);
                    // The socket had no more. What comes from now on is reported.
                    if self.tls.is_none() && n < wanted {
                        return true;
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return true,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return false,
            }
        }
    }

    /// Writes some of the bytes; it flushes what TLS holds of earlier ones before.
    fn write_some(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.flush_tls()?;
        match &mut self.tls {
            None => self.socket.write(bytes),
            Some(tls) => tls.writer().write(bytes),
        }
    }
}

impl Stream for StreamEnd {
    fn read(&mut self, frames: &mut Frames) -> bool {
        let mut bytes = std::mem::take(&mut self.bytes);
        let goes_on = self.read_into(frames, &mut bytes);
        self.bytes = bytes;
        goes_on
    }

    fn write(&mut self, frames: &mut Frames) -> bool {
        loop {
            let done = if frames.output().is_empty() {
                match self.flush_tls() {
                    Ok(()) => return true,
                    Err(error) => Err(error),
                }
            } else {
                self.write_some(frames.output())
            };
            match done {
                Ok(n) => frames.sent(n),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return true,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return false,
            }
        }
    }

    fn close(&mut self) {
        self.socket.end();
    }

    fn has_more(&self) -> bool {
        self.has_more
    }
}

/// A connection that still blocks, each use until one instant at the latest: a peer that sends a
/// byte now and then does not prolong it.
pub(crate) struct Timed<'a> {
    pub(crate) end: &'a mut StreamEnd,
    pub(crate) until: Instant,
}

impl Timed<'_> {
    /// Prepares for the next system call.
    fn limit(&self) -> io::Result<()> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        // The system's shortest is one microsecond.
        self.end.socket.limit(left.max(Duration::from_micros(1)))
    }

    fn again<T>(&mut self, mut work: impl FnMut(&mut StreamEnd) -> io::Result<T>) -> io::Result<T> {
        loop {
            self.limit()?;
            match work(self.end) {
                Err(error) if error.kind() == ErrorKind::Interrupted || is_later(&error) => {}
                end => return end,
            }
        }
    }

    /// Some bytes; 0 where the other side has ended.
    pub(crate) fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.again(|end| end.read_some(bytes))
    }

    pub(crate) fn write_all(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let n = self.again(|end| end.write_some(bytes))?;
            bytes = &bytes[n..];
        }
        self.again(StreamEnd::flush_tls)
    }

    /// TLS's handshake; nothing without TLS.
    pub(super) fn handshake(&mut self) -> io::Result<()> {
        while let Some(tls) = &self.end.tls
            && (tls.is_handshaking() || tls.wants_write())
        {
            self.again(|end| {
                end.flush_tls()?;
                let StreamEnd { socket, tls: Some(tls), .. } = end else { return Ok(()) };
                if !tls.is_handshaking() {
                    return Ok(());
                }
                if tls.read_tls(socket)? == 0 {
                    return Err(ErrorKind::UnexpectedEof.into());
                }
                let processed = tls.process_new_packets().map(|_| ()).map_err(violation);
                if processed.is_err() {
                    let _ = tls.write_tls(socket);
                }
                processed
            })?;
        }
        Ok(())
    }

    /// The names of the machine at the other side, proven by its certificate; `None` without TLS.
    pub(super) fn machines(&self) -> Option<Vec<String>> {
        let chain = self.end.tls.as_ref()?.peer_certificates()?;
        chain.first().map(super::keys::names)
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustls::{ClientConnection, ServerConnection};
    use tombolo_calls::carrier::{Carrier, Message};
    use tombolo_calls::frames::PAYLOAD_BYTES;
    use tombolo_ring::rpc::entry::{Ask, BEST_EFFORT, Call, Payload, Token};

    use super::*;
    use crate::machine::keys::{self, Identity, KeyFiles};

    const SOON: Duration = Duration::from_secs(20);

    /// Both ends of a connection within TLS, after its handshake.
    fn pair() -> (StreamEnd, StreamEnd) {
        let folder = tempfile::tempdir().unwrap();
        keys::make(folder.path(), &["a".into(), "b".into()]).unwrap();
        let [a, b] = ["a", "b"].map(|name| Identity::load(&KeyFiles::of(folder.path(), name)).unwrap());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let here = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let there = listener.accept().unwrap().0;
        let client = ClientConnection::new(a.client.clone(), keys::server_name("b").unwrap()).unwrap();
        let server = ServerConnection::new(b.server.clone()).unwrap();
        let mut ends = [
            StreamEnd::within(Socket::Tcp(here), Connection::Client(client)),
            StreamEnd::within(Socket::Tcp(there), Connection::Server(server)),
        ];
        std::thread::scope(|scope| {
            for end in &mut ends {
                scope.spawn(|| Timed { end, until: Instant::now() + SOON }.handshake().unwrap());
            }
        });
        let [here, there] = ends;
        (here, there)
    }

    /// Frames of one side, once both have greeted.
    fn greeted() -> (Frames, Frames) {
        let (mut a, mut b) = (Frames::default(), Frames::default());
        let greetings = (a.output().to_vec(), b.output().to_vec());
        b.feed(&greetings.0);
        a.feed(&greetings.1);
        a.sent(greetings.0.len());
        b.sent(greetings.1.len());
        assert!(a.greeted().unwrap().is_some() && b.greeted().unwrap().is_some());
        (a, b)
    }

    fn ask(frames: &mut Frames, slot: u32, bytes: &[u8]) {
        let call = Call {
            token: Token::new(slot, 1),
            deadline_ns: BEST_EFFORT,
            time_left: true,
            trace: 0,
            ttl_ms: 0,
            payload: Payload::EMPTY,
        };
        assert!(frames.ask(Ask::Call(call), bytes).unwrap());
    }

    #[test]
    fn what_tls_has_decrypted_and_the_frames_did_not_want_is_not_forgotten() {
        let ((mut here, mut there), (mut sent, mut got)) = (pair(), greeted());
        // The longest message fills the frames; the short one behind it has to wait.
        ask(&mut sent, 0, &vec![7; PAYLOAD_BYTES as usize]);
        ask(&mut sent, 1, b"short");
        there.socket.set_nonblocking(true).unwrap();
        here.socket.set_nonblocking(true).unwrap();
        let until = Instant::now() + SOON;
        while !(sent.output().is_empty() && got.wanted() == 0) {
            assert!(here.write(&mut sent) && there.read(&mut got) && Instant::now() < until);
        }
        assert!(there.has_more());
        let Some(Message::Call(_, bytes)) = got.take().unwrap() else { panic!("no call") };
        assert_eq!(bytes.len(), PAYLOAD_BYTES as usize);
        // The kernel has given all it had, and would wake no thread for the rest.
        let mut fds = [PollFd::new(&there.socket, PollFlags::IN)];
        assert_eq!(poll(&mut fds, Some(&Timespec::default())).unwrap(), 0);
        assert!(there.read(&mut got) && !there.has_more());
        let Some(Message::Call(_, bytes)) = got.take().unwrap() else { panic!("no second call") };
        assert_eq!(bytes, b"short");
    }

    #[test]
    fn a_record_that_comes_byte_by_byte_prolongs_no_time_limit() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut here = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (_, there) = pair();
        let mut end = StreamEnd { socket: Socket::Tcp(listener.accept().unwrap().0), ..there };
        let began = Instant::now();
        let limit = Duration::from_millis(300);
        let slow = std::thread::spawn(move || {
            for byte in [0x17u8, 3, 3, 0x40].into_iter().chain(std::iter::repeat_n(0, 40)) {
                std::thread::sleep(limit / 6);
                if here.write_all(&[byte]).is_err() {
                    return;
                }
            }
        });
        let error = Timed { end: &mut end, until: began + limit }.read(&mut [0]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        assert!(began.elapsed() < 3 * limit, "{:?}", began.elapsed());
        drop(end);
        slow.join().unwrap();
    }
}
