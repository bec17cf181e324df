//! Descriptors whose `close` blocks, in a process of their own: while they are held, others of the
//! user are not taken.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use tombolo_shm::foreign::{MAX_CLOSERS, MAX_HELD_PER_USER, close, held};
use tombolo_shm::passing;

/// A socket whose `close` waits for a peer that does not read, for a minute; and the peer.
fn lingering() -> (OwnedFd, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let slow = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let peer = listener.accept().unwrap().0;
    slow.set_nonblocking(true).unwrap();
    while (&slow).write(&[0; 1 << 16]).is_ok() {}
    slow.set_nonblocking(false).unwrap();
    rustix::net::sockopt::set_socket_linger(&slow, Some(Duration::from_secs(60))).unwrap();
    (slow.into(), peer)
}

/// A peer sends descriptors whose `close` blocks: no thread of this process waits for them, and no
/// more than the limit get in.
#[test]
fn closing_holds_up_nobody_and_is_limited() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let all: Vec<_> = (0..MAX_CLOSERS).map(|_| lingering()).collect();
    let (slow, peers): (Vec<_>, Vec<_>) = all.into_iter().unzip();
    let begun = Instant::now();
    for fd in slow {
        passing::send(&theirs, b"x", &[fd.as_fd()], false).unwrap();
        // Ours is the last copy now.
        close(fd);
        drop(passing::receive(&ours, &mut [0; 8], false).unwrap());
    }
    // All threads are held up; everything else that comes from this user waits.
    tombolo_testing::until("what holds up nobody is closed", || held() <= 2 * MAX_CLOSERS);
    let file = std::fs::File::open("/proc/self/stat").unwrap();
    let mut came = 0;
    for _ in 0..2 * MAX_HELD_PER_USER {
        passing::send(&theirs, b"x", &[file.as_fd()], false).unwrap();
        let got = passing::receive(&ours, &mut [0; 8], false).unwrap();
        assert_eq!(got.bytes, 1);
        came += got.fds.len();
        assert_eq!(got.truncated, got.fds.is_empty());
        if got.truncated {
            break;
        }
    }
    assert!((1..=MAX_HELD_PER_USER).contains(&came), "{came}");
    assert!(begun.elapsed() < Duration::from_secs(30), "nothing waited for a close");
    drop(peers);
    tombolo_testing::until("all is closed once the peers are gone", || held() == 0);
    let got = passing::receive(&ours, &mut [0; 8], false);
    assert!(got.is_err());
    passing::send(&theirs, b"x", &[file.as_fd()], false).unwrap();
    assert_eq!(passing::receive(&ours, &mut [0; 8], false).unwrap().fds.len(), 1);
}
