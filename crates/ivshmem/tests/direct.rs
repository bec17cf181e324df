//! A direct link with its server and two processes that join as QEMU does. A network of links is
//! tested in `crates/port/tests/ivshmem_links.rs`.

use std::time::{Duration, Instant};

use tombolo_ivshmem::client::Joined;
use tombolo_ivshmem::links::{Config, Door, Links};
use tombolo_ivshmem::server::{Dialect, Seat, Shape};
use tombolo_ring::ivshmem::region::{Header, Layout, Name};
use tombolo_ring::ivshmem::{channel as records, protocol};

const TIMEOUT: Duration = Duration::from_secs(30);
const BYTES: u64 = 1 << 20;

#[test]
fn a_direct_link_carries_records_between_two_processes() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("control.sock");
    let links = Links::start("direct", None, Box::new(|text| panic!("{text}"))).unwrap();
    let header = Header { protocol: protocol::CHANNEL, ..Header::network(Name::new("control").unwrap(), 2) };
    let config = Config {
        name: "control".into(),
        shape: Shape { dialect: Dialect::V1, max_peers: 2, vectors: 2 },
        layout: Layout::v1(BYTES, 0, 2).unwrap(),
        region_bytes: BYTES,
        header: Some(header),
        host: None,
        helper: None,
        doors: vec![Door { path: socket.clone(), seat: Seat::Any }],
    };
    links.open(config).unwrap();
    links.serve("control", None).unwrap();
    let shape = records::Shape { slots: 64, record_bytes: 56, latest_bytes: 0 };
    let join = |id: u32| {
        let joined = Joined::connect(&socket, TIMEOUT).unwrap();
        assert_eq!(joined.id(), id, "the lowest free seat");
        joined.channel(1 - id, shape).unwrap()
    };
    let mut ours = join(0);
    for _ in 0..3 {
        let mut theirs = join(1);
        let echo = std::thread::spawn(move || {
            let (mut to, mut answered, end) = ([0; 56], 0, Instant::now() + TIMEOUT);
            while answered < 200 {
                match theirs.peer().recv(&mut to) {
                    Ok(Some(record)) => {
                        theirs.peer().send(&to[..record.len]).unwrap();
                        answered += 1;
                    }
                    _ => drop(theirs.wait(Duration::from_millis(100)).unwrap()),
                }
                assert!(Instant::now() < end, "{answered} records came");
            }
            // The other reads the last before this one goes.
            while theirs.step().unwrap() {
                theirs.wait(Duration::from_millis(10)).unwrap();
                assert!(Instant::now() < end, "the other does not end");
            }
        });
        let end = Instant::now() + TIMEOUT;
        while !ours.step().unwrap() {
            ours.wait(Duration::from_millis(100)).unwrap();
            assert!(Instant::now() < end, "the link does not come up");
        }
        let mut to = [0; 56];
        for number in 0..200u64 {
            ours.peer().send(&number.to_le_bytes()).unwrap();
            while ours.peer().recv(&mut to).unwrap().is_none() {
                ours.wait(Duration::from_millis(100)).unwrap();
                assert!(Instant::now() < end, "record {number} is not answered");
            }
            assert_eq!(to[..8], number.to_le_bytes());
        }
        // The first seat's process goes and comes: its seat is the lowest free one again.
        drop(ours);
        echo.join().unwrap();
        ours = join(0);
    }
}
