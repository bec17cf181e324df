//! The port under the suite that all attachments pass.

use super::frontend::*;
use crate::conformance::{Abilities, Fixture, Violation};
use crate::pair::OwnedFrame;
use crate::vhost_user::{Socket, VhostUserConfig, VhostUserPort};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use tombolo_ring::virtio::features as ring;
use tombolo_switch::drop::Reason;
use tombolo_switch::frame::Offload;
use tombolo_switch::port::{FaultKind, Port};
use tombolo_worker::reactor::Registration;

/// The frontend speaks in a thread of its own, since the port answers only while it is served.
struct GuestFixture {
    path: PathBuf,
    attaching: Option<JoinHandle<(Guest, Frontend)>>,
    attached: Option<(Guest, Frontend)>,
    sent: usize,
}

impl GuestFixture {
    fn attach(path: PathBuf) -> JoinHandle<(Guest, Frontend)> {
        std::thread::spawn(move || {
            let guest = Guest::new(super::FULL | ring::IN_ORDER, 2048);
            let mut frontend = Frontend::connect(&path);
            guest.attach(&mut frontend, 0);
            (guest, frontend)
        })
    }

    /// The guest; the link is up, so the frontend has said all.
    fn guest(&mut self) -> &mut Guest {
        if let Some(thread) = self.attaching.take() {
            self.attached = Some(thread.join().unwrap());
        }
        &mut self.attached.as_mut().unwrap().0
    }
}

impl Drop for GuestFixture {
    fn drop(&mut self) {
        // The port may be gone already, and the frontend's last word unanswered.
        let _ = self.attaching.take().map(JoinHandle::join);
        let _ = std::fs::remove_dir(self.path.parent().unwrap());
    }
}

impl Fixture for GuestFixture {
    const KIND: &'static str = "vhost-user";

    fn make(registration: Registration) -> (Box<dyn Port>, Self) {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("tombolo-vu-{}-conformance{number}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("socket");
        let config = VhostUserConfig { socket: Socket::Listen(path.clone()), queue_pairs: 1, mtu: 1500 };
        let port = VhostUserPort::open(config, registration).unwrap();
        let attaching = Some(Self::attach(path.clone()));
        (Box::new(port), GuestFixture { path, attaching, attached: None, sent: 0 })
    }

    fn abilities(&self) -> Abilities {
        // Frames of 64 KiB take 32 of the guest's 256 buffers each.
        Abilities { frame_bytes: (14, 1518), offload: true, back_pressure: true, window: 7 }
    }

    fn inject(&mut self, bytes: &[u8], offload: Offload) -> bool {
        let mut header = PLAIN;
        header[..10].copy_from_slice(&offload.to_vnet());
        // In the pieces in which drivers send: all in one, header apart, headers and payload apart.
        let cuts = [&[][..], &[12], &[12, 14]][self.sent % 3];
        let cuts = if bytes.len() > 14 { cuts } else { &[] };
        let sent = self.guest().try_send(&header, bytes, cuts);
        self.sent += usize::from(sent);
        sent
    }

    fn collect(&mut self) -> Option<OwnedFrame> {
        let (header, bytes) = self.guest().receive_within(Duration::ZERO)?;
        let header: [u8; 10] = header[..10].try_into().unwrap();
        let offload = Offload::from_vnet(&header, bytes.len()).unwrap();
        Some(OwnedFrame { bytes, offload })
    }

    fn loses_wakeups(&self) -> bool {
        true
    }

    fn inject_silently(&mut self, bytes: &[u8]) {
        let guest = self.guest();
        assert!(guest.add_frame(&PLAIN, bytes, &[]));
        guest.rings[1].publish();
    }

    fn ask_for_signals(&mut self) {
        self.guest().rings[0].arm().unwrap();
    }

    fn was_signalled(&mut self) -> bool {
        self.guest().calls[0].take()
    }

    fn disconnect(&mut self) {
        self.guest();
        self.attached = None;
    }

    fn connect(&mut self) {
        self.attaching = Some(Self::attach(self.path.clone()));
    }

    fn send_runt(&mut self) -> Violation {
        self.guest().send(&PLAIN, &frame(13, 0), &[]);
        Violation::Dropped(Reason::Runt)
    }

    fn send_over_long(&mut self) -> Violation {
        self.guest().send(&PLAIN, &frame(70_000, 0), &[]);
        Violation::Dropped(Reason::TooLong)
    }

    fn send_bad_offload(&mut self) -> Violation {
        self.guest().send(&[1, 0, 0, 0, 0, 0, 90, 0, 16, 0, 0, 0], &frame(64, 0), &[]);
        Violation::Dropped(Reason::BadOffload)
    }

    fn break_protocol(&mut self) -> Violation {
        let guest = self.guest();
        let available = guest.view((1 << 16) + 16 * u64::from(RING_SIZE), 518);
        let index = available.as_foreign().load_u16(2, Ordering::Relaxed).unwrap();
        available.store_u16(2, index.wrapping_add(1000), Ordering::Release).unwrap();
        guest.kicks[1].ring();
        Violation::Faulted(FaultKind::Ring)
    }

    fn spoil_transmit(&mut self) -> Violation {
        // Behind as many good buffers as the port takes at a time: one that is no descriptor of the
        // ring.
        let available = self.guest().view(16 * u64::from(RING_SIZE), 518);
        available.store_u16(4 + 2 * 40, RING_SIZE, Ordering::Release).unwrap();
        Violation::Faulted(FaultKind::Ring)
    }
}

crate::conformance_suite!(GuestFixture);
