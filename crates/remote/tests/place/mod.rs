//! A link with its real server, for the tests of this folder.
#![allow(dead_code, unreachable_pub)]

use std::path::PathBuf;
use std::time::Duration;

use tombolo_ivshmem::links::{Config, Door, Links};
use tombolo_ivshmem::server::{Dialect, Seat, Shape};
use tombolo_remote::{Calls, ServeOptions};
use tombolo_ring::ivshmem::region::{Header, Layout, Name};

const SOON: Duration = Duration::from_secs(20);
pub const BYTES: u64 = 1 << 20;

/// A direct link for two, with its server.
pub struct Place {
    folder: tempfile::TempDir,
    _links: Links,
}

impl Place {
    pub fn new(protocol: u32, vectors: u32) -> Place {
        let folder = tempfile::tempdir().unwrap();
        let links = Links::start("calls", None, Box::new(|text| panic!("{text}"))).unwrap();
        let layout = Layout::v1(BYTES, 0, 2).unwrap();
        let header = Header { protocol, layout, ..Header::network(Name::new("calls").unwrap(), vectors) };
        links
            .open(Config {
                name: "calls".into(),
                shape: Shape { dialect: Dialect::V1, max_peers: 2, vectors },
                layout,
                region_bytes: BYTES,
                header: Some(header),
                host: None,
                helper: None,
                doors: vec![Door { path: folder.path().join("s"), seat: Seat::Any }],
            })
            .unwrap();
        links.serve("calls", None).unwrap();
        Place { folder, _links: links }
    }

    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("s")
    }

    pub fn join(&self, options: &ServeOptions) -> Calls {
        Calls::join(self.socket(), SOON, options).unwrap()
    }
}
