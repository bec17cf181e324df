//! Clients and providers that send arbitrary data, driven by hand: they hurt only themselves.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{MemfdFlags, SealFlags, ftruncate, memfd_create};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::*;
use tombolo_ring::mem::ForeignMut;
use tombolo_ring::rpc::entry::{Answer, Ask, BEST_EFFORT, Call, Payload, Refusal, Status, Token};
use tombolo_ring::rpc::ring::{Consumer, Producer};
use tombolo_ring::rpc::wake::lag;
use tombolo_ring::rpc::{Broken, Ends, Geometry, INLINE_BYTES, PUBLISHED, Role, VERSION, WAKE, initialise};
use tombolo_rpc::client::{CallError, CallOptions, Client, ConnectError, ConnectOptions};
use tombolo_rpc::poll::Polling;
use tombolo_rpc::provider::{Access, Options, Reply, Request, Service};
use tombolo_rpc::shared::SharedBuffer;
use tombolo_shm::memory::Mapping;
use tombolo_shm::section;
use tombolo_testing::{TIMEOUT, until};

const GEOMETRY: Geometry = Geometry::new(8, 4096).unwrap();

fn u32s(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn send(socket: &OwnedFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    }
    // The other side may have closed.
    let _ = sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL);
}

/// A packet with its descriptors; no bytes where the other side has closed.
fn receive(socket: &OwnedFd) -> (Vec<u8>, Vec<OwnedFd>) {
    let mut bytes = vec![0; 1 << 16];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut got = recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC);
    if matches!(got, Err(rustix::io::Errno::CONNRESET)) {
        got = recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC);
    }
    let len = match got {
        Ok(got) => got.bytes,
        Err(rustix::io::Errno::AGAIN) => panic!("nothing came"),
        Err(_) => 0,
    };
    let fds = control.drain().filter_map(|m| match m {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds.collect::<Vec<_>>()),
        _ => None,
    });
    let fds = fds.flatten().collect();
    bytes.truncate(len);
    (bytes, fds)
}

fn dial(dir: &Path) -> OwnedFd {
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    set_socket_timeout(&socket, Timeout::Recv, Some(TIMEOUT)).unwrap();
    connect(&socket, &SocketAddrUnix::new(dir.join("s")).unwrap()).unwrap();
    socket
}

fn hello(entries: u32, arena_bytes: u64) -> Vec<u8> {
    let mut bytes = u32s(&[1, VERSION]);
    bytes.extend_from_slice(b"TMBLRPC\x02");
    bytes.extend(u32s(&[entries, 0]));
    bytes.extend_from_slice(&arena_bytes.to_le_bytes());
    bytes
}

/// A client that keeps no rules.
struct Raw {
    socket: OwnedFd,
    own: Mapping,
    peer: Mapping,
    peer_geometry: Geometry,
    doorbell: OwnedFd,
    asks: Producer<Ask>,
    answers: Consumer<Answer>,
}

impl Raw {
    fn connect(dir: &Path) -> Raw {
        let (fd, own) = section::make("hostile", GEOMETRY.section_bytes(), false).unwrap();
        initialise(own.view_mut().unwrap(), GEOMETRY, Role::Client);
        let socket = dial(dir);
        send(&socket, &hello(8, 4096), &[fd.as_fd()]);
        let (welcome, fds) = receive(&socket);
        assert_eq!(&welcome[..8], &u32s(&[17, VERSION])[..], "{}", String::from_utf8_lossy(&welcome));
        let arena = u64::from_le_bytes(welcome[8..16].try_into().unwrap());
        let peer_geometry = Geometry::new(8, arena).unwrap();
        let [section_fd, doorbell] = <[OwnedFd; 2]>::try_from(fds).unwrap();
        let peer = section::adopt(&section_fd, peer_geometry.section_bytes(), false).unwrap();
        Raw { socket, own, peer, peer_geometry, doorbell, asks: Producer::default(), answers: Consumer::default() }
    }

    fn own(&self) -> ForeignMut<'_> {
        self.own.view_mut().unwrap()
    }

    fn ring(&self) {
        rustix::io::write(&self.doorbell, &1u64.to_ne_bytes()).unwrap();
    }

    fn ask(&mut self, slot: u32, payload: Payload) {
        self.ask_bytes(slot, payload, &[]);
    }

    fn ask_bytes(&mut self, slot: u32, payload: Payload, inline: &[u8]) {
        let token = Token::new(slot, 1);
        let call = Call { token, deadline_ns: BEST_EFFORT, time_left: false, trace: 0, ttl_ms: 0, payload };
        let ends = Ends::new(self.own.view_mut().unwrap(), GEOMETRY, self.peer.view(), self.peer_geometry).unwrap();
        self.asks.push(ends, &Ask::Call(call), inline);
        let _ = self.asks.publish(ends);
        self.ring();
    }

    /// After the first answer, which was taken: requests for as many as the ring of answers holds,
    /// for as many as a client may be late to say that it took, and for one more.
    fn ask_for_more_than_fits(&mut self) {
        for n in 0..8 + lag(8) {
            self.ask(n % 8, Payload::EMPTY);
            until("its answer, or the end", || {
                let mut fds = [PollFd::new(&self.socket, PollFlags::IN)];
                let ended = poll(&mut fds, Some(&Timespec::default())).is_ok_and(|n| n > 0);
                ended || self.peer.view().load_u32(PUBLISHED, Ordering::Acquire) == Some(n + 2)
            });
        }
        self.ask(0, Payload::EMPTY);
    }

    fn answer(&mut self) -> Answer {
        let mut answer = None;
        until("an answer comes", || {
            let ends = Ends::new(self.own.view_mut().unwrap(), GEOMETRY, self.peer.view(), self.peer_geometry).unwrap();
            answer = self.answers.take(ends, &mut [0; INLINE_BYTES]).unwrap();
            self.answers.took(ends);
            answer.is_some()
        });
        answer.unwrap()
    }

    fn is_closed(&self) -> bool {
        receive(&self.socket).0.is_empty()
    }
}

fn sum(request: &Request<'_>, reply: &mut Reply<'_>) {
    let sum: u64 = request.to_vec().iter().map(|b| u64::from(*b)).sum();
    let _ = reply.write(&sum.to_le_bytes());
}

fn service(dir: &Path) -> Service {
    Service::register("s", Options { folder: Some(dir.into()), ..Options::default() }, sum).unwrap()
}

fn good(dir: &Path) -> Client {
    Client::connect_with("s", &ConnectOptions { folder: Some(dir.into()), ..ConnectOptions::default() }).unwrap()
}

fn works(client: &Client) {
    let reply = client.call(&[2; 1000], &CallOptions::default()).unwrap();
    assert_eq!(reply.to_vec().unwrap(), 2000u64.to_le_bytes());
}

#[test]
fn handshakes_that_are_wrong_are_refused_and_the_service_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let _service = service(dir.path());
    let client = good(dir.path());
    let (fine, own) = section::make("hostile", GEOMETRY.section_bytes(), false).unwrap();
    let (empty, _mapping) = section::make("hostile", GEOMETRY.section_bytes(), false).unwrap();
    initialise(own.view_mut().unwrap(), GEOMETRY, Role::Client);
    let (small, _small) = section::make("hostile", 4096, false).unwrap();
    let unsealed = memfd_create("hostile", MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&unsealed, GEOMETRY.section_bytes()).unwrap();
    let (pipe, _writer) = rustix::pipe::pipe().unwrap();
    let fine_hello = hello(8, 4096);
    let mut version = fine_hello.clone();
    version[4] = 9;
    let mut magic = fine_hello.clone();
    magic[8] = 0;
    let one = |fd: &'static str| fd;
    let cases: Vec<(&str, Vec<u8>, Vec<BorrowedFd<'_>>, &str)> = vec![
        (one("no section"), fine_hello.clone(), vec![], "0 descriptors"),
        ("two sections", fine_hello.clone(), vec![fine.as_fd(), fine.as_fd()], "2 descriptors"),
        ("a header of zeros", fine_hello.clone(), vec![empty.as_fd()], "header"),
        ("a small section", fine_hello.clone(), vec![small.as_fd()], "4096 bytes"),
        ("an unsealed section", fine_hello.clone(), vec![unsealed.as_fd()], "seal"),
        ("a pipe", fine_hello.clone(), vec![pipe.as_fd()], "memfd"),
        ("another version", version, vec![fine.as_fd()], "version 9"),
        ("another magic", magic, vec![fine.as_fd()], "invalid message"),
        ("no entries", hello(0, 4096), vec![fine.as_fd()], "powers of two"),
        ("too many entries", hello(1 << 30, 4096), vec![fine.as_fd()], "allows"),
        ("a huge arena", hello(8, 1 << 60), vec![fine.as_fd()], "allows"),
        ("a cut message", fine_hello[..20].to_vec(), vec![fine.as_fd()], "invalid message"),
        ("nonsense", vec![0xff; 60_000], vec![], "invalid message"),
    ];
    for (what, bytes, fds, why) in cases {
        let socket = dial(dir.path());
        send(&socket, &bytes, &fds);
        let (answer, _) = receive(&socket);
        let text = String::from_utf8_lossy(answer.get(4..).unwrap_or(&[])).into_owned();
        assert_eq!(answer.first(), Some(&18), "{what}: {text}");
        assert!(text.contains(why), "{what}: {text}");
        works(&client);
    }
    // Clients that only connect, or send what a provider sends, disturb no other client.
    let _silent: Vec<_> = (0..20).map(|_| dial(dir.path())).collect();
    let socket = dial(dir.path());
    send(&socket, &u32s(&[18]), &[]);
    assert!(receive(&socket).0.is_empty());
    works(&client);
}

/// Pages of a memfd that are there, in bytes.
fn pages_there(fd: impl AsFd) -> u64 {
    rustix::fs::fstat(fd).unwrap().st_blocks as u64 * 512
}

#[test]
fn a_client_s_sparse_memory_stays_sparse_whatever_becomes_of_its_hello() {
    let dir = tempfile::tempdir().unwrap();
    // One client takes most of what a user may have in use: one more of that size is refused after
    // all checks of its own.
    let options = Options { max_bytes_per_uid: 100 << 20, folder: Some(dir.path().into()), ..Options::default() };
    let _service = Service::register("s", options, sum).unwrap();
    let geometry = Geometry::new(8, 64 << 20).unwrap();
    let sparse = || section::make("hostile", geometry.section_bytes(), false).unwrap();
    let say_hello = |fd: &OwnedFd| {
        let socket = dial(dir.path());
        send(&socket, &hello(8, 64 << 20), &[fd.as_fd()]);
        let answer = receive(&socket).0;
        (socket, answer.first().copied())
    };
    let (refused, welcome) = (Some(18), Some(17));
    let (fd, _zeros) = sparse();
    assert_eq!(say_hello(&fd).1, refused, "its header is zeros");
    assert_eq!(pages_there(&fd), 0, "the header was read without making its page");
    let (fd, own) = sparse();
    initialise(own.view_mut().unwrap(), geometry, Role::Client);
    let before = pages_there(&fd);
    let first = say_hello(&fd);
    assert_eq!(first.1, welcome);
    assert!(pages_there(&fd) <= before + geometry.arena() as u64, "{} bytes", pages_there(&fd));
    let (fd, own) = sparse();
    initialise(own.view_mut().unwrap(), geometry, Role::Client);
    assert_eq!(say_hello(&fd).1, refused, "it is beyond the user's share");
    assert_eq!(pages_there(&fd), before);
    // What is refused is not charged: with the first gone there is room.
    drop(first);
    until("room", || say_hello(&fd).1 == welcome);
}

#[test]
fn a_client_that_breaks_the_protocol_is_disconnected_and_counted() {
    let dir = tempfile::tempdir().unwrap();
    let service = service(dir.path());
    let client = good(dir.path());
    let inline = Payload::EMPTY;
    let first_entry = GEOMETRY.arena() - 8 * 256;
    type Break = fn(&mut Raw, usize);
    let cases: Vec<(&str, Break)> = vec![
        ("an index that jumps", |raw, _| {
            raw.own().store_u32(PUBLISHED, 1000, Ordering::Release).unwrap();
            raw.ring();
        }),
        ("an entry of no kind", |raw, _| {
            raw.own().store_u32(PUBLISHED, 1, Ordering::Release).unwrap();
            raw.ring();
        }),
        ("a slot that does not exist", |raw, _| raw.ask(8, Payload::EMPTY)),
        ("a payload outside the arena", |raw, _| {
            raw.ask(0, Payload::Arena { offset: 4090, len: 7, block: 0, generation: 0 })
        }),
        ("a payload of u64::MAX bytes", |raw, _| {
            raw.ask(0, Payload::Arena { offset: 1, len: u64::MAX, block: 0, generation: 0 })
        }),
        ("an inline payload that is too long", |raw, first| {
            raw.own().write_array(first + 32, 193u64.to_le_bytes()).unwrap();
            raw.own().write_array(first + 48, [1, 0]).unwrap();
            raw.own().store_u32(PUBLISHED, 1, Ordering::Release).unwrap();
            raw.ring();
        }),
        ("answers that are never taken", |raw, _| {
            // Slots are used again although their answers were not taken.
            raw.ask_for_more_than_fits();
        }),
        ("answers taken that never came", |raw, _| {
            raw.own().store_u32(WAKE, 1000 << 1, Ordering::Release).unwrap();
            raw.ask_for_more_than_fits();
        }),
        ("a message that is none", |raw, _| send(&raw.socket, b"nonsense", &[])),
    ];
    let mut broken = 0;
    for (what, step) in cases {
        let mut raw = Raw::connect(dir.path());
        raw.ask(0, inline);
        assert_eq!(raw.answer().status, Status::Served, "{what}: it works at first");
        // The entry that is written next.
        step(&mut raw, first_entry + 256);
        if what.contains("no kind") || what.contains("too long") {
            // These were written behind the first entry, whose index is 1 now.
            raw.own().store_u32(PUBLISHED, 2, Ordering::Release).unwrap();
            raw.ring();
        }
        assert!(raw.is_closed(), "{what}");
        broken += u64::from(!what.contains("message"));
        works(&client);
        until(what, || service.report().broken_clients >= broken && service.report().clients == 1);
    }
    assert_eq!(service.report().broken_clients, broken);
}

#[test]
fn what_a_client_may_do_wrong_by_mistake_is_answered() {
    let dir = tempfile::tempdir().unwrap();
    let _service = service(dir.path());
    let mut raw = Raw::connect(dir.path());
    // Memory that was never handed over, that is not sealed, or that is too short.
    raw.ask(0, Payload::Shared { memory: 5, offset: 0, len: 1 });
    assert_eq!(raw.answer().status, Status::Refused(Refusal::Memory));
    let share = |number: u32, bytes: u64| {
        let mut message = u32s(&[3, number]);
        message.extend_from_slice(&bytes.to_le_bytes());
        message
    };
    let unsealed = memfd_create("hostile", MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&unsealed, 4096).unwrap();
    send(&raw.socket, &share(6, 4096), &[unsealed.as_fd()]);
    raw.ask(1, Payload::Shared { memory: 6, offset: 0, len: 1 });
    assert_eq!(raw.answer().status, Status::Refused(Refusal::Memory));
    let (sealed, _mapping) = section::make("hostile", 4096, false).unwrap();
    // More bytes than it has are announced.
    send(&raw.socket, &share(7, 8192), &[sealed.as_fd()]);
    raw.ask(2, Payload::Shared { memory: 7, offset: 0, len: 8192 });
    assert_eq!(raw.answer().status, Status::Refused(Refusal::Memory));
    send(&raw.socket, &share(8, 4096), &[sealed.as_fd()]);
    raw.ask(3, Payload::Shared { memory: 8, offset: 1, len: 4096 });
    assert_eq!(raw.answer().status, Status::Refused(Refusal::Memory));
    raw.ask(4, Payload::Shared { memory: 8, offset: 0, len: 4096 });
    assert_eq!(raw.answer().status, Status::Served);
    // More memories than a connection holds: the service takes no more, and goes on.
    for number in 100..200 {
        send(&raw.socket, &share(number, 4096), &[sealed.as_fd()]);
        if number % 8 == 0 {
            raw.ask(number % 8, Payload::EMPTY);
            assert_eq!(raw.answer().status, Status::Served);
        }
    }
}

#[test]
fn storms_and_payloads_that_change_affect_no_one_else() {
    let dir = tempfile::tempdir().unwrap();
    let _service = service(dir.path());
    let client = good(dir.path());
    let mut raw = Raw::connect(dir.path());
    let end = Instant::now() + Duration::from_millis(300);
    let mut n = 0u32;
    while Instant::now() < end {
        n += 1;
        let ends = Ends::new(raw.own.view_mut().unwrap(), GEOMETRY, raw.peer.view(), raw.peer_geometry).unwrap();
        let _ = raw.answers.take(ends, &mut [0; INLINE_BYTES]);
        raw.answers.took(ends);
        // Cancellations of nothing, and requests whose bytes change while they are read.
        if raw.asks.has_room(ends) == Ok(true) {
            raw.asks.push(ends, &Ask::Cancel(Token::new(n % 8, n)), &[]);
            let _ = raw.asks.publish(ends);
            raw.ring();
        }
        ends.own_payload(0, 4096).unwrap().write_from(&[n as u8; 4096]);
        if n.is_multiple_of(64) {
            works(&client);
        }
    }
    drop(raw);
    works(&client);
}

/// A provider that keeps no rules: accepts one client and does as the test says.
fn hostile_provider(dir: &Path, act: impl FnOnce(OwnedFd) + Send + 'static) -> std::thread::JoinHandle<()> {
    let path = dir.join("s");
    let _ = std::fs::remove_file(&path);
    let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    listen(&listener, 4).unwrap();
    std::thread::spawn(move || {
        let socket = accept(&listener).unwrap();
        set_socket_timeout(&socket, Timeout::Recv, Some(TIMEOUT)).unwrap();
        act(socket)
    })
}

fn welcome(arena_bytes: u64) -> Vec<u8> {
    let mut bytes = u32s(&[17, VERSION]);
    for value in [arena_bytes, 0, 1 << 30] {
        bytes.extend_from_slice(&value.to_le_bytes());
    }
    bytes.extend(u32s(&[0]));
    bytes
}

/// As [`GEOMETRY`].
fn small(dir: &Path, timeout: Duration) -> ConnectOptions {
    ConnectOptions { folder: Some(dir.into()), entries: 8, arena_bytes: 4096, timeout, ..ConnectOptions::default() }
}

fn try_connect(dir: &Path, timeout: Duration) -> Result<Client, ConnectError> {
    Client::connect_with("s", &small(dir, timeout))
}

#[test]
fn providers_that_answer_the_handshake_wrongly_are_left() {
    let dir = tempfile::tempdir().unwrap();
    type Act = fn(OwnedFd);
    let cases: Vec<(&str, Act)> = vec![
        ("closes", |_| ()),
        ("says nothing", |socket| while !receive(&socket).0.is_empty() {}),
        ("sends nonsense", |socket| send(&socket, &[7; 100], &[])),
        ("sends no section", |socket| send(&socket, &welcome(4096), &[])),
        ("asks for a huge arena", |socket| {
            let (fd, _own) = section::make("hostile", 4096, false).unwrap();
            send(&socket, &welcome(1 << 50), &[fd.as_fd(), fd.as_fd()]);
        }),
        ("makes the client fault in a huge arena", |socket| {
            // As large as it says, and without a page of its own.
            let geometry = Geometry::new(8, 1 << 40).unwrap();
            let (fd, own) = section::make("hostile", geometry.section_bytes(), false).unwrap();
            initialise(own.view_mut().unwrap(), geometry, Role::Provider);
            let doorbell = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
            send(&socket, &welcome(1 << 40), &[fd.as_fd(), doorbell.as_fd()]);
        }),
        ("sends a short section", |socket| {
            let (fd, _own) = section::make("hostile", 4096, false).unwrap();
            let doorbell = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
            send(&socket, &welcome(4096), &[fd.as_fd(), doorbell.as_fd()]);
        }),
        ("sends an unsealed section", |socket| {
            let fd = memfd_create("hostile", MemfdFlags::ALLOW_SEALING).unwrap();
            ftruncate(&fd, GEOMETRY.section_bytes()).unwrap();
            let doorbell = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
            send(&socket, &welcome(4096), &[fd.as_fd(), doorbell.as_fd()]);
        }),
        ("sends a section without a header", |socket| {
            let (fd, _own) = section::make("hostile", GEOMETRY.section_bytes(), false).unwrap();
            let doorbell = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
            send(&socket, &welcome(4096), &[fd.as_fd(), doorbell.as_fd()]);
        }),
        ("sends a pipe for a doorbell", |socket| {
            let (fd, own) = section::make("hostile", GEOMETRY.section_bytes(), false).unwrap();
            initialise(own.view_mut().unwrap(), GEOMETRY, Role::Provider);
            let (_reader, doorbell) = rustix::pipe::pipe().unwrap();
            send(&socket, &welcome(4096), &[fd.as_fd(), doorbell.as_fd()]);
        }),
    ];
    for (what, act) in cases {
        let provider = hostile_provider(dir.path(), act);
        let begun = Instant::now();
        let error = try_connect(dir.path(), Duration::from_millis(100)).expect_err(what);
        assert!(begun.elapsed() < Duration::from_secs(5), "{what}");
        match what {
            "closes" => assert!(matches!(error, ConnectError::Gone), "{what}: {error}"),
            "says nothing" => assert!(matches!(error, ConnectError::Silent(_)), "{what}: {error}"),
            "makes the client fault in a huge arena" => {
                assert!(matches!(error, ConnectError::Protocol(_)), "{what}: {error}")
            }
            _ => {}
        }
        provider.join().unwrap();
    }
}

/// Welcomes the client properly and then answers its first request as the test says.
fn answering(dir: &Path, act: impl FnOnce(Ends<'_>, Token, &OwnedFd) + Send + 'static) -> std::thread::JoinHandle<()> {
    let mut act = Some(act);
    answering_all(dir, 1, move |ends, token, socket| act.take().expect("one request")(ends, token, socket))
}

/// As [`answering`], for so many requests.
fn answering_all(
    dir: &Path,
    requests: usize,
    mut act: impl FnMut(Ends<'_>, Token, &OwnedFd) + Send + 'static,
) -> std::thread::JoinHandle<()> {
    hostile_provider(dir, move |socket| {
        let (hello, fds) = receive(&socket);
        assert_eq!(hello[0], 1);
        let peer = section::adopt(&fds[0], GEOMETRY.section_bytes(), false).unwrap();
        let (fd, own) = section::make("hostile", GEOMETRY.section_bytes(), false).unwrap();
        initialise(own.view_mut().unwrap(), GEOMETRY, Role::Provider);
        let doorbell = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        send(&socket, &welcome(4096), &[fd.as_fd(), doorbell.as_fd()]);
        let ends = Ends::new(own.view_mut().unwrap(), GEOMETRY, peer.view(), GEOMETRY).unwrap();
        let mut asks = Consumer::<Ask>::default();
        for _ in 0..requests {
            let mut token = None;
            until("a request comes", || {
                if let Ok(Some(Ask::Call(call))) = asks.take(ends, &mut [0; INLINE_BYTES]) {
                    token = Some(call.token);
                }
                token.is_some()
            });
            asks.took(ends);
            act(ends, token.unwrap(), &socket);
            tombolo_shm::futex::wake(own.view(), PUBLISHED);
        }
        // Until the client leaves.
        while !receive(&socket).0.is_empty() {}
    })
}

/// Says that the first request of a connection is served.
fn answer(ends: Ends<'_>, token: Token, payload: Payload) {
    answer_next(&mut Producer::default(), ends, token, payload);
}

/// Says that a request is served.
fn answer_next(answers: &mut Producer<Answer>, ends: Ends<'_>, token: Token, payload: Payload) {
    answers.push(ends, &Answer { token, status: Status::Served, code: 0, queued_ns: 0, service_ns: 0, payload }, &[]);
    let _ = answers.publish(ends);
}

#[test]
fn a_provider_that_answers_nonsense_gets_an_error_and_never_a_crash() {
    let dir = tempfile::tempdir().unwrap();
    type Act = fn(Ends<'_>, Token, &OwnedFd);
    type Check = fn(&CallError) -> bool;
    let cases: Vec<(&str, Act, Check)> = vec![
        ("says nothing", |_, _, _| (), |e| matches!(e, CallError::Timeout)),
        (
            "another token",
            |e, t, _| answer(e, Token::new(t.slot(), t.turn() + 1), Payload::EMPTY),
            |e| matches!(e, CallError::Broken(Broken::Token)),
        ),
        (
            "another slot",
            |e, t, _| answer(e, Token::new(t.slot() ^ 1, t.turn()), Payload::EMPTY),
            |e| matches!(e, CallError::Broken(Broken::Token)),
        ),
        (
            "no such slot",
            |e, _, _| answer(e, Token::new(8, 1), Payload::EMPTY),
            |e| matches!(e, CallError::Broken(Broken::Slot)),
        ),
        (
            "outside the arena",
            |e, t, _| answer(e, t, Payload::Arena { offset: 4096, len: 1, block: 0, generation: 1 }),
            |e| matches!(e, CallError::Broken(Broken::Arena)),
        ),
        (
            "no such block",
            |e, t, _| answer(e, t, Payload::Arena { offset: 0, len: 1, block: 8, generation: 1 }),
            |e| matches!(e, CallError::Broken(Broken::Slot)),
        ),
        (
            "memory never handed over",
            |e, t, _| answer(e, t, Payload::Shared { memory: 3, offset: 0, len: 1 }),
            |e| matches!(e, CallError::ReplyMemory),
        ),
        (
            "memory that is not sealed",
            |e, t, socket| {
                let fd = memfd_create("hostile", MemfdFlags::ALLOW_SEALING).unwrap();
                ftruncate(&fd, 4096).unwrap();
                let mut share = u32s(&[3, 3]);
                share.extend_from_slice(&4096u64.to_le_bytes());
                send(socket, &share, &[fd.as_fd()]);
                answer(e, t, Payload::Shared { memory: 3, offset: 0, len: 1 });
            },
            |e| matches!(e, CallError::ReplyMemory),
        ),
        (
            "closes the socket",
            |_, _, socket| {
                let _ = shutdown(socket, Shutdown::Both);
            },
            |e| matches!(e, CallError::ProviderGone),
        ),
    ];
    for (what, act, check) in cases {
        let provider = answering(dir.path(), act);
        let client = try_connect(dir.path(), TIMEOUT).unwrap();
        let timeout = if what == "says nothing" { Duration::from_millis(200) } else { TIMEOUT };
        let error = client.call(b"x", &CallOptions { timeout, ..CallOptions::default() }).expect_err(what);
        assert!(check(&error), "{what}: {error:?}");
        drop(client);
        provider.join().unwrap();
    }
}

/// Hands over memory of that size, without a page of its own.
fn share_sparse(socket: &OwnedFd, number: u32, bytes: u64) {
    let fd = memfd_create("hostile-sparse", MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&fd, bytes).unwrap();
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW).unwrap();
    let mut share = u32s(&[3, number]);
    share.extend_from_slice(&bytes.to_le_bytes());
    send(socket, &share, &[fd.as_fd()]);
}

#[test]
fn a_reply_longer_than_all_memory_is_no_crash() {
    let dir = tempfile::tempdir().unwrap();
    const BYTES: u64 = 1 << 44;
    let provider = answering(dir.path(), |ends, token, socket| {
        share_sparse(socket, 3, BYTES);
        answer(ends, token, Payload::Shared { memory: 3, offset: 0, len: BYTES });
    });
    let options = ConnectOptions { max_shared_bytes: u64::MAX, ..small(dir.path(), TIMEOUT) };
    let client = Client::connect_with("s", &options).unwrap();
    let reply = client.call(b"x", &CallOptions::default()).unwrap();
    assert_eq!(reply.len() as u64, BYTES);
    let error = reply.to_vec().unwrap_err();
    assert!(matches!(error, CallError::Memory(_)), "{error}");
    assert_eq!(reply.copy_to(&mut [1; 10]).unwrap(), 10, "a part of it can be read");
    drop((reply, client));
    provider.join().unwrap();
}

/// Bytes of the memories of [`share_sparse`] from `least` bytes on that this process has mapped.
fn mapped_sparse(least: u64) -> u64 {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let sizes = maps.lines().filter(|line| line.contains("memfd:hostile-sparse")).map(|line| {
        let (from, to) = line.split_whitespace().next().unwrap().split_once('-').unwrap();
        u64::from_str_radix(to, 16).unwrap() - u64::from_str_radix(from, 16).unwrap()
    });
    sizes.filter(|size| (least..1 << 40).contains(size)).sum()
}

#[test]
fn a_provider_that_hands_over_memory_without_end_is_mapped_up_to_the_bound() {
    const EACH: u64 = 1 << 30;
    const BOUND: u64 = 4 * EACH;
    let dir = tempfile::tempdir().unwrap();
    let mut answers = Producer::default();
    let mut number = 0;
    // Each reply is in memory of its own, which the provider says it has reclaimed at once: a
    // client that holds its replies holds it.
    let provider = answering_all(dir.path(), 21, move |ends, token, socket| {
        number += 1;
        share_sparse(socket, number, EACH);
        answer_next(&mut answers, ends, token, Payload::Shared { memory: number, offset: 0, len: EACH });
        if number > 1 {
            send(socket, &u32s(&[4, number - 1]), &[]);
        }
    });
    assert_eq!(ConnectOptions::default().max_shared_bytes, BOUND);
    let client = try_connect(dir.path(), TIMEOUT).unwrap();
    let mut held = Vec::new();
    for n in 0..20 {
        match client.call(b"x", &CallOptions::default()) {
            Ok(reply) => {
                assert_eq!((reply.len() as u64, reply.copy_to(&mut [1; 10]).unwrap()), (EACH, 10));
                held.push(reply);
            }
            Err(error) => {
                assert!(
                    matches!(error, CallError::ReplyTooLarge { bytes: EACH, in_use: BOUND, max: BOUND }),
                    "{n}: {error:?}"
                );
                let text = error.to_string();
                assert!(text.contains("larger max_shared_bytes"), "{text}");
            }
        }
        assert_eq!(mapped_sparse(EACH), EACH * held.len() as u64);
    }
    assert_eq!(held.len(), 4);
    // Those held are still there; without them the next is taken.
    assert_eq!(held[3].copy_to(&mut [1; 10]).unwrap(), 10);
    drop(held);
    let reply = client.call(b"x", &CallOptions::default()).unwrap();
    assert_eq!(reply.copy_to(&mut [1; 10]).unwrap(), 10);
    drop((reply, client));
    provider.join().unwrap();
    assert_eq!(mapped_sparse(EACH), 0, "all is given back");
}

#[test]
fn an_index_that_never_rests_does_not_hold_a_client_beyond_its_patience() {
    let dir = tempfile::tempdir().unwrap();
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let provider = hostile_provider(dir.path(), move |socket| {
        let (_, fds) = receive(&socket);
        let peer = section::adopt(&fds[0], GEOMETRY.section_bytes(), false).unwrap();
        let (fd, own) = section::make("hostile", GEOMETRY.section_bytes(), false).unwrap();
        initialise(own.view_mut().unwrap(), GEOMETRY, Role::Provider);
        let doorbell = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        send(&socket, &welcome(4096), &[fd.as_fd(), doorbell.as_fd()]);
        let _peer = peer;
        let mut n = 0;
        while stopped.try_recv() == Err(std::sync::mpsc::TryRecvError::Empty) {
            n += 1;
            // Published, and withdrawn, all the time.
            own.view_mut().unwrap().store_u32(PUBLISHED, n & 1, Ordering::Release).unwrap();
            tombolo_shm::futex::wake(own.view(), PUBLISHED);
        }
    });
    let client = try_connect(dir.path(), TIMEOUT).unwrap();
    let begun = Instant::now();
    let options = CallOptions { timeout: Duration::from_millis(100), ..CallOptions::default() };
    let error = client.call(b"x", &options).unwrap_err();
    assert!(matches!(error, CallError::Broken(_) | CallError::Timeout), "{error:?}");
    assert!(begun.elapsed() < Duration::from_secs(5));
    stop.send(()).unwrap();
    provider.join().unwrap();
}

#[test]
fn a_client_that_wakes_the_service_for_nothing_is_sent_away() {
    // By its doorbell, to a worker that sleeps; by an index that comes and goes, to one that polls.
    type Disturb = fn(&Raw);
    let ring: Disturb = |raw| raw.ring();
    let flicker: Disturb = |raw| {
        raw.own().store_u32(PUBLISHED, 1, Ordering::Release);
        raw.own().store_u32(PUBLISHED, 0, Ordering::Release);
        raw.ring();
    };
    for (disturb, polling) in [(ring, Polling::Never), (flicker, Polling::Always)] {
        let dir = tempfile::tempdir().unwrap();
        let options = Options { folder: Some(dir.path().into()), polling, ..Options::default() };
        let service = Service::register("s", options, sum).unwrap();
        let client = good(dir.path());
        let raw = Raw::connect(dir.path());
        let begun = Instant::now();
        while service.report().broken_clients == 0 {
            assert!(begun.elapsed() < TIMEOUT, "it is still there");
            for _ in 0..10 {
                disturb(&raw);
                std::thread::yield_now();
            }
        }
        assert!(raw.is_closed());
        let report = service.report();
        let [(reason, 1)] = &report.broken_by.iter().map(|(k, v)| (&k[..], *v)).collect::<Vec<_>>()[..] else {
            panic!("{:?}", report.broken_by)
        };
        // An index that flickers may be caught at an entry that is none.
        assert!(*reason == "noise" || (polling == Polling::Always && *reason == "kind"), "{reason}");
        works(&client);
    }
}

#[test]
fn one_user_does_not_take_all_connections_all_memory_and_all_of_the_queue() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |error: ConnectError, word: &str| {
        let ConnectError::Refused(why) = &error else { panic!("{error}") };
        assert!(why.contains(word), "{why}");
    };
    let options = Options { folder: Some(dir.path().into()), max_clients_per_uid: 2, ..Options::default() };
    let service = Service::register("s", options.clone(), sum).unwrap();
    let clients = [good(dir.path()), good(dir.path())];
    refused(try_connect(dir.path(), TIMEOUT).unwrap_err(), "clients of user");
    drop(clients);
    until("places come back", || try_connect(dir.path(), TIMEOUT).is_ok());
    assert!(service.report().refused_connections > 0);
    drop(service);

    // One connection, and half a MiB that it hands over.
    let geometry = Geometry::new(64, 1 << 20).unwrap();
    let options =
        Options { max_clients_per_uid: 128, max_bytes_per_uid: 2 * geometry.section_bytes() + (512 << 10), ..options };
    let service = Service::register("s", options, sum).unwrap();
    let client = good(dir.path());
    refused(try_connect(dir.path(), TIMEOUT).unwrap_err(), "bytes");
    let call = |bytes: u64| {
        let buffer = SharedBuffer::new(bytes, false).unwrap();
        client.call_shared(&buffer, 0, bytes, &CallOptions::default()).map(|_| ())
    };
    assert!(matches!(call(768 << 10), Err(CallError::Refused(Refusal::Memory))));
    call(512 << 10).unwrap();
    // That memory has gone, and comes back with the next that is handed over.
    call(512 << 10).unwrap();
    drop(client);
    until("its memory comes back", || try_connect(dir.path(), TIMEOUT).is_ok());
    drop(service);

    // Two connections of 64 entries each.
    let options = Options { folder: Some(dir.path().into()), max_entries_per_uid: 128, ..Options::default() };
    let _service = Service::register("s", options, sum).unwrap();
    let clients = [good(dir.path()), good(dir.path())];
    refused(try_connect(dir.path(), TIMEOUT).unwrap_err(), "8 entries");
    drop(clients);
    until("its entries come back", || try_connect(dir.path(), TIMEOUT).is_ok());
}

#[test]
fn the_groups_of_which_a_caller_is_a_member_count() {
    if !rustix::process::geteuid().is_root() {
        return tombolo_testing::skip("it takes root to be another user");
    }
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let access = Access { gids: vec![4242], ..Access::default() };
    let options = Options { folder: Some(dir.path().into()), access, ..Options::default() };
    let _service = Service::register("s", options, sum).unwrap();
    // Asks for the report, and prints the kind of the answer: 19 is the report, 18 a refusal.
    let ask = "import socket, struct, sys\n\
        s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.connect(sys.argv[1])\n\
        try: s.send(struct.pack('<II', 2, 2) + b'TMBLRPC\\x02')\n\
        except OSError: pass\n\
        while True:\n\
        \x20try: answer = s.recv(65536)\n\
        \x20except ConnectionResetError: continue\n\
        \x20break\n\
        print(struct.unpack('<I', answer[:4])[0])";
    for (groups, kind) in [("4242", "19"), ("7,4242,9", "19"), ("7", "18")] {
        let done = std::process::Command::new("setpriv")
            .env("PATH", "/usr/bin:/bin")
            .args(["--reuid", "65534", "--regid", "65534", "--groups", groups, "python3", "-c", ask])
            .arg(dir.path().join("s"))
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&done.stdout);
        assert_eq!(said.trim(), kind, "{groups}: {}", String::from_utf8_lossy(&done.stderr));
    }
}
