//! The port against a frontend, a hypervisor and a XenStore of the test's own.

mod world;

use super::{XenConfig, XenPort};
use crate::conformance::{Abilities, Fixture, Rig, Violation, frame, partial_frame, plain, same};
use crate::pair::OwnedFrame;
use tombolo_ring::xen::PacketHash;
use tombolo_ring::xen::netif::Extra;
use tombolo_switch::Nanos;
use tombolo_switch::detail::Detail;
use tombolo_switch::drop::{Drops, Reason};
use tombolo_switch::frame::{Batch, Offload, SegmentKind};
use tombolo_switch::port::{Caps, Carrier, Fault, FaultKind, Port, Sent};
use tombolo_worker::reactor::Registration;
use world::{Frontend, Machine, World};

/// A frontend in a domain named "guest" that is made with its domain.
struct XenFixture {
    world: World,
    frontend: Frontend,
}

fn config(max_queues: u32) -> XenConfig {
    XenConfig { domain: "guest".into(), device: 0, mac: None, max_queues, mtu: 1500 }
}

fn port(world: &World, max_queues: u32, registration: Registration) -> Box<dyn Port> {
    Box::new(XenPort::open_on(Box::new(Machine(world.clone())), config(max_queues), registration).unwrap())
}

impl Fixture for XenFixture {
    const KIND: &'static str = "xen";

    fn make(registration: Registration) -> (Box<dyn Port>, Self) {
        let world = World::new();
        let mut frontend = Frontend::new(world.clone(), 1, true);
        frontend.start(1);
        (port(&world, 4, registration), XenFixture { world, frontend })
    }

    fn abilities(&self) -> Abilities {
        // Frames of 64 KiB take 18 of the guest's 256 pages each.
        Abilities { frame_bytes: (14, 1518), offload: true, back_pressure: true, window: 7 }
    }

    fn inject(&mut self, bytes: &[u8], offload: Offload) -> bool {
        self.frontend.send(0, bytes, offload, true)
    }

    fn collect(&mut self) -> Option<OwnedFrame> {
        self.frontend.receive(0)
    }

    fn disconnect(&mut self) {
        self.frontend.vanish();
    }

    fn connect(&mut self) {
        self.frontend.start(1);
    }

    fn send_runt(&mut self) -> Violation {
        assert!(self.frontend.send(0, &frame(0, 14)[..13], Offload::NONE, true));
        Violation::Dropped(Reason::Runt)
    }

    fn send_over_long(&mut self) -> Violation {
        Violation::Impossible("a packet's length has 16 bits in its request")
    }

    fn send_bad_offload(&mut self) -> Violation {
        let offload = partial_frame(0, 200, SegmentKind::Tcp4, None).offload;
        self.frontend.send_as_is(0, &frame(0, 200), offload);
        Violation::Dropped(Reason::BadOffload)
    }

    fn break_protocol(&mut self) -> Violation {
        self.frontend.jump(0);
        Violation::Faulted(FaultKind::Ring)
    }

    fn loses_wakeups(&self) -> bool {
        true
    }

    fn inject_silently(&mut self, bytes: &[u8]) {
        assert!(self.frontend.send(0, bytes, Offload::NONE, false));
    }

    fn ask_for_signals(&mut self) {
        self.frontend.arm(0);
    }

    fn was_signalled(&mut self) -> bool {
        self.frontend.was_notified(0)
    }
}

crate::conformance_suite!(XenFixture);

/// As the suite's rig, with a frontend that is made by the test.
fn rig(queues: u32, split: bool) -> Rig<XenFixture> {
    let mut rig = Rig::<XenFixture>::up();
    let registration = rig.port_registration();
    rig.peer.frontend.vanish();
    drop(std::mem::replace(&mut rig.port, Box::new(NoPort)));
    let world = World::new();
    rig.port = port(&world, 4, registration);
    let mut frontend = Frontend::new(world.clone(), queues, split);
    frontend.start(1);
    rig.peer = XenFixture { world, frontend };
    rig.until_woken("the link comes up", |rig| rig.seen == Some(Carrier::Up));
    rig
}

/// Takes the place of a port while another one is made.
struct NoPort;

impl Port for NoPort {
    fn kind(&self) -> &'static str {
        "none"
    }
    fn link(&self) -> Carrier {
        Carrier::Down
    }
    fn caps(&self) -> Caps {
        Caps::plain(1500)
    }
    fn service(&mut self, _: Nanos) -> Result<Option<Nanos>, Fault> {
        Ok(None)
    }
    fn receive<'m>(&'m mut self, _: usize, _: &mut Batch<'m>, _: &mut Drops) -> Result<usize, Fault> {
        Ok(0)
    }
    fn release(&mut self) -> Result<(), Fault> {
        Ok(())
    }
    fn transmit(&mut self, _: &Batch<'_>, _: &[u16], _: &mut Drops) -> Result<Sent, Fault> {
        Ok(Sent::default())
    }
    fn flush(&mut self) -> Result<(), Fault> {
        Ok(())
    }
    fn arm(&mut self) -> Result<bool, Fault> {
        Ok(false)
    }
    fn disarm(&mut self) {}
    fn reset(&mut self, _: &Fault) {}
}

/// A frontend that was told to close does so, and is served when it restarts.
fn closes_and_comes_again(rig: &mut Rig<XenFixture>) {
    rig.peer.frontend.set_state("6");
    rig.until("closed", |rig| rig.peer.frontend.back("state").as_deref() == Some("6"));
    rig.peer.frontend.set_state("1");
    rig.until("again", |rig| rig.peer.frontend.back("state").as_deref() == Some("2"));
    rig.peer.frontend.publish();
    rig.until_woken("the link comes up", |rig| rig.seen == Some(Carrier::Up));
    both_ways(rig);
}

fn both_ways(rig: &mut Rig<XenFixture>) {
    let frames: Vec<_> =
        plain(0, [60, 1514]).into_iter().chain([partial_frame(5, 30_000, SegmentKind::Tcp4, Some(1448))]).collect();
    rig.received.clear();
    rig.receive_all(&frames);
    same(&frames, &rig.received);
    rig.deliver(&frames);
}

#[test]
fn the_handshake_goes_step_by_step_and_ends_without_a_trace() {
    let mut rig = Rig::<XenFixture>::up();
    let world = rig.peer.world.clone();
    rig.peer.frontend.vanish();
    rig.until_woken("the link goes down", |rig| rig.seen == Some(Carrier::Down));
    rig.until("all is let go of", |_| (world.mapped(), world.bound()) == (0, 0));
    // As xl makes a vif: the frontend has not started yet.
    rig.peer.frontend.make(1);
    let state = |rig: &mut Rig<XenFixture>, wanted: &str| {
        let what = format!("the backend's state {wanted}");
        rig.until(&what, |rig| rig.peer.frontend.back("state").as_deref() == Some(wanted));
    };
    state(&mut rig, "2");
    for (name, value) in [
        ("feature-sg", "1"),
        ("feature-gso-tcpv4", "1"),
        ("feature-gso-tcpv6", "1"),
        ("feature-ipv6-csum-offload", "1"),
        ("feature-rx-copy", "1"),
        ("feature-multicast-control", "1"),
        ("feature-split-event-channels", "1"),
        ("multi-queue-max-queues", "4"),
        ("mtu", "1500"),
    ] {
        assert_eq!(rig.peer.frontend.back(name).as_deref(), Some(value), "{name}");
    }
    assert_eq!(rig.seen, Some(Carrier::Down));
    rig.peer.frontend.publish();
    rig.until_woken("the link comes up", |rig| rig.seen == Some(Carrier::Up));
    state(&mut rig, "4");
    assert_eq!((world.mapped(), world.bound()), (2, 2));
    both_ways(&mut rig);
    // The guest reboots its driver.
    rig.peer.frontend.set_state("5");
    state(&mut rig, "5");
    assert_eq!((world.mapped(), world.bound()), (0, 0));
    rig.peer.frontend.set_state("6");
    state(&mut rig, "6");
    rig.peer.frontend.set_state("1");
    state(&mut rig, "2");
    rig.peer.frontend.publish();
    state(&mut rig, "4");
    rig.until_woken("the link comes up", |rig| rig.seen == Some(Carrier::Up));
    both_ways(&mut rig);
    // As xl network-detach does it.
    rig.peer.frontend.write_back("online", "0");
    rig.peer.frontend.write_back("state", "5");
    rig.peer.frontend.set_state("6");
    state(&mut rig, "6");
    assert_eq!((world.mapped(), world.bound()), (0, 0));
    rig.peer.frontend.vanish();
    rig.until_woken("the link is down", |rig| rig.seen == Some(Carrier::Down));
    rig.settle();
    assert_eq!(world.nodes_below("/local/domain/0/backend/vif/"), 0);
}

/// Frames pass a moment before the port says so in XenStore.
fn until_connected(rig: &mut Rig<XenFixture>) {
    rig.until("the state is written", |rig| rig.peer.frontend.back("state").as_deref() == Some("4"));
}

#[test]
fn a_port_that_takes_over_goes_on_where_the_rings_stand() {
    let mut rig = rig(1, true);
    both_ways(&mut rig);
    let world = rig.peer.world.clone();
    for round in 0..20 {
        let registration = rig.port_registration();
        // A turn that is cut short after frames were taken: the content of their slots is no
        // request now.
        let taken = partial_frame(50 + round, 9000, SegmentKind::Tcp4, Some(1448));
        rig.received.clear();
        assert!(rig.peer.inject(&taken.bytes, taken.offload));
        assert_eq!((rig.receive(64), rig.received.len()), (1, 1));
        rig.transmit(&[taken]);
        until_connected(&mut rig);
        // What the guest sent and no port took is taken by the next.
        let frames = plain(100 + round, [60]);
        assert!(rig.peer.inject(&frames[0].bytes, Offload::NONE));
        drop(std::mem::replace(&mut rig.port, Box::new(NoPort)));
        assert_eq!((world.mapped(), world.bound(), rig.peer.frontend.back("state").as_deref()), (0, 0, Some("4")));
        rig.port = port(&world, 4, registration);
        rig.received.clear();
        rig.until_woken("the frame comes", |rig| rig.received.len() == 1);
        same(&frames, &rig.received);
        assert_eq!((rig.rx_drops.total(), rig.faults.len()), (0, 0), "{:?}", rig.faults);
        assert!(rig.peer.collect().is_some(), "the frame that was not flushed");
        both_ways(&mut rig);
    }
    assert_eq!((world.mapped(), world.bound()), (2, 2));
}

/// A frame to an address that a guest may ask for, that address, and a frame to another one.
fn multicast_frames() -> ([u8; 6], Vec<OwnedFrame>) {
    let address = [0x33, 0x33, 0xff, 0, 0, 2];
    let mut frames = plain(0, [60, 60]);
    frames[0].bytes[..6].copy_from_slice(&address);
    frames[1].bytes[..6].copy_from_slice(&[0x33, 0x33, 0, 0, 0, 9]);
    (address, frames)
}

#[test]
fn a_port_that_takes_over_keeps_multicast_and_as_many_queues_as_there_are() {
    let mut rig = Rig::<XenFixture>::up();
    rig.peer.frontend.vanish();
    let world = rig.peer.world.clone();
    rig.peer.frontend = Frontend::new(world.clone(), 4, true);
    rig.peer.frontend.make(20);
    rig.peer.frontend.publish_with(&[("request-multicast-control", "1")]);
    rig.until("the link comes up", |rig| rig.port.details().contains(&("domain_id", 20u64.into())));
    let (address, frames) = multicast_frames();
    rig.peer.frontend.subscribe(Extra::MulticastAdd(address));
    rig.settle();
    assert_eq!((rig.send(&frames), rig.tx_drops.of(Reason::Unsubscribed)), (1, 1));
    until_connected(&mut rig);
    // The next one is told to offer fewer, which counts for the next guest.
    let registration = rig.port_registration();
    drop(std::mem::replace(&mut rig.port, Box::new(NoPort)));
    // Its first writes of the state come to nothing; it is the one that took over all the same.
    world.conflict(70);
    rig.port = port(&world, 2, registration);
    rig.until("the state is written", |_| world.conflicts() == 0);
    until_connected(&mut rig);
    rig.until_woken("the port has them", |rig| rig.port.link() == Carrier::Up);
    assert!(rig.port.details().contains(&("queues", 4u64.into())), "{:?}", rig.port.details());
    assert_eq!(rig.send(&frames), 2, "what was asked for is not known, so all of it");
    // It closes and comes again, as a guest that was started again: it asks again, and gets what is
    // offered.
    rig.peer.frontend.set_state("5");
    rig.until("closing", |rig| rig.peer.frontend.back("state").as_deref() == Some("5"));
    rig.peer.frontend.set_state("6");
    rig.until("closed", |rig| rig.peer.frontend.back("state").as_deref() == Some("6"));
    rig.peer.frontend.set_state("1");
    rig.until("again", |rig| rig.peer.frontend.back("multi-queue-max-queues").as_deref() == Some("2"));
    rig.peer.frontend.publish_with(&[("request-multicast-control", "1")]);
    let says = |rig: &Rig<XenFixture>| {
        rig.port.details().iter().any(|(_, says)| says.text().contains("at most 2 are offered"))
    };
    rig.until("it is refused", |rig| says(rig));
    assert!(rig.faults.is_empty(), "{:?}", rig.faults);
}

#[test]
fn what_this_system_refuses_is_not_blamed_on_the_guest() {
    let mut rig = rig(1, true);
    until_connected(&mut rig);
    let world = rig.peer.world.clone();
    for round in 0..3 {
        let frames = plain(round, [60, 61, 62]);
        let faults = rig.faults.len();
        rig.received.clear();
        world.refuse_copies(true);
        if round == 1 {
            assert_eq!(rig.send(&frames), 0);
        } else {
            for frame in &frames {
                assert!(rig.peer.inject(&frame.bytes, Offload::NONE));
            }
        }
        rig.until_woken("the fault is seen", |rig| rig.faults.len() > faults);
        world.refuse_copies(false);
        rig.until_woken("it goes on", |rig| rig.port.link() == Carrier::Up);
        until_connected(&mut rig);
        if round != 1 {
            rig.until_woken("what the guest sent comes later", |rig| rig.received.len() == frames.len());
            same(&frames, &rig.received);
        }
        both_ways(&mut rig);
        assert_eq!((world.mapped(), world.bound()), (2, 2));
    }
    assert!(rig.faults.iter().all(|fault| fault.kind == FaultKind::System), "{:?}", rig.faults);
    assert_eq!((rig.rx_drops.total(), rig.peer.frontend.failed_pieces(), rig.peer.frontend.failed_pages()), (0, 0, 0));
}

#[test]
fn a_port_waits_for_event_channels_that_the_one_before_it_still_holds() {
    // The second: the one before was killed when it had bound them, and had not said so yet.
    for state in ["4", "2"] {
        let mut rig = rig(1, true);
        until_connected(&mut rig);
        let world = rig.peer.world.clone();
        let registration = rig.port_registration();
        let before = std::mem::replace(&mut rig.port, Box::new(NoPort));
        rig.peer.frontend.write_back("state", state);
        let watches = world.watched().len();
        rig.port = port(&world, 4, registration);
        rig.until("it has found the vif", |_| world.watched().len() == watches + 2);
        rig.settle();
        assert_eq!(rig.port.link(), Carrier::Down);
        assert_eq!(rig.peer.frontend.back("state").as_deref(), Some(state), "the guest is told nothing");
        drop(before);
        rig.until_woken("the port has them", |rig| rig.port.link() == Carrier::Up);
        both_ways(&mut rig);
        until_connected(&mut rig);
        assert_eq!((world.mapped(), world.bound()), (2, 2));
    }
}

#[test]
fn in_a_driver_domain_the_vif_is_found_by_its_mac() {
    let mut rig = rig(1, true);
    let world = rig.peer.world.clone();
    rig.peer.frontend.vanish();
    world.hide_names();
    rig.peer.frontend.make(1);
    rig.peer.frontend.write_back("mac", "00:16:3E:00:00:0a");
    rig.peer.frontend.publish();
    let says = |rig: &Rig<XenFixture>| {
        rig.port.details().iter().find(|(key, _)| *key == "state").unwrap().1.text().to_string()
    };
    rig.until("it says what it needs", |rig| says(rig).contains("the port needs the `mac`"));
    for (last, expected) in [(0x0b, Carrier::Down), (0x0a, Carrier::Up)] {
        let registration = rig.port_registration();
        drop(std::mem::replace(&mut rig.port, Box::new(NoPort)));
        let config = XenConfig { mac: Some([0, 0x16, 0x3e, 0, 0, last]), ..config(1) };
        rig.port = Box::new(XenPort::open_on(Box::new(Machine(world.clone())), config, registration).unwrap());
        if expected == Carrier::Up {
            rig.until_woken("the link comes up", |rig| rig.port.link() == Carrier::Up);
        } else {
            rig.until("it has looked", |rig| says(rig) == "waiting for the domain");
        }
        assert_eq!(rig.port.link(), expected);
    }
    both_ways(&mut rig);
}

#[test]
fn a_domain_that_dies_in_any_state_leaves_nothing() {
    let mut rig = Rig::<XenFixture>::up();
    let world = rig.peer.world.clone();
    for state in ["1", "4", "5", "6", "3", "7", "x", ""] {
        rig.peer.frontend.vanish();
        rig.peer.frontend.make(1);
        if state == "4" {
            rig.peer.frontend.publish();
        } else {
            rig.peer.frontend.set_state(state);
        }
        rig.until("it was seen", |rig| {
            rig.peer.frontend.back("state").as_deref() != Some("1") || state == "3" || state == "7"
        });
        rig.settle();
        rig.peer.frontend.vanish();
        rig.until("the port lets go", |rig| {
            let details = rig.port.details();
            details.contains(&("state", "waiting for the domain".into()))
        });
        assert_eq!((world.mapped(), world.bound()), (0, 0), "{state}");
        assert_eq!(world.watched(), ["backend/vif"], "{state}");
        assert_eq!(world.nodes_below("/local/domain/0/backend/vif/"), 0, "{state}");
    }
    assert!(rig.faults.is_empty(), "{:?}", rig.faults);
    drop(std::mem::replace(&mut rig.port, Box::new(NoPort)));
    rig.until("the port's connection ends", |_| world.watched().is_empty());
}

#[test]
fn a_port_that_has_its_vif_hears_of_no_other() {
    let mut rig = rig(1, true);
    until_connected(&mut rig);
    let world = rig.peer.world.clone();
    let own = ["backend/vif/1/0", "/local/domain/1/device/vif/0"];
    rig.until("it watches what is its own", |_| world.watched() == own);
    // Until the last step's own write has come back.
    rig.settle();
    let quiet = |rig: &mut Rig<XenFixture>| {
        rig.until("no event is on its way", |_| {
            let before = world.requests();
            std::thread::sleep(std::time::Duration::from_millis(50));
            world.requests() == before
        });
        world.requests()
    };
    let before = quiet(&mut rig);
    for state in ["4", "1", "5", "6"].repeat(50) {
        world.write(&[("/local/domain/0/backend/vif/77/0/state".into(), state.into())]);
    }
    assert_eq!(quiet(&mut rig), before, "questions to XenStore about another guest's vif");
    // Without a vif of its own it looks at all that come.
    rig.peer.frontend.vanish();
    rig.until("it watches the folder", |_| world.watched() == ["backend/vif"]);
    rig.peer.frontend.start(2);
    rig.until_woken("the link comes up", |rig| rig.port.link() == Carrier::Up);
    both_ways(&mut rig);
}

#[test]
fn a_guest_that_flips_its_state_for_ever_is_looked_at_once_a_second() {
    let mut rig = rig(1, true);
    until_connected(&mut rig);
    let world = rig.peer.world.clone();
    let (begun, before) = (std::time::Instant::now(), world.requests());
    let mut flips = 0;
    // As fast as XenStore takes it, with a connection each time.
    while begun.elapsed() < std::time::Duration::from_secs(4) {
        rig.peer.frontend.set_state(["1", "4", "5", "6"][flips % 4]);
        std::thread::sleep(std::time::Duration::from_millis(1));
        rig.turn(16);
        flips += 1;
    }
    // The free looks with about ten questions each, and those with the pauses that grow.
    let asked = world.requests() - before;
    assert!(flips > 500 && asked < 3000, "{asked} questions to XenStore for {flips} changes");
    // It is served as soon as it has come to rest.
    rig.peer.frontend.vanish();
    rig.peer.frontend.start(1);
    rig.until_woken("the link comes up", |rig| rig.port.link() == Carrier::Up);
    both_ways(&mut rig);
}

#[test]
fn several_queues_and_one_event_channel_for_both_rings() {
    for (queues, split) in [(4, true), (2, false), (1, false)] {
        let mut rig = rig(queues, split);
        assert!(rig.port.details().contains(&("queues", queues.into())), "{:?}", rig.port.details());
        for queue in 0..queues as usize {
            let frames = plain(queue as u32, [60]);
            assert!(rig.peer.frontend.send(queue, &frames[0].bytes, Offload::NONE, true));
            rig.received.clear();
            rig.until_woken("the frame comes", |rig| rig.received.len() == 1);
            same(&frames, &rig.received);
        }
        let frames = plain(0, std::iter::repeat_n(200, 40));
        assert_eq!(rig.send(&frames), 40);
        let mut counts = vec![0; queues as usize];
        for (queue, count) in counts.iter_mut().enumerate() {
            while rig.peer.frontend.receive(queue).is_some() {
                *count += 1;
            }
        }
        assert_eq!(counts.iter().sum::<usize>(), 40);
        assert!(counts.iter().all(|count| *count > 0), "{counts:?}");
    }
}

#[test]
fn frontends_that_cannot_be_served_are_told_to_close_and_may_try_again() {
    let mut rig = Rig::<XenFixture>::up();
    for (name, value, why) in [
        ("request-rx-copy", "0", "request-rx-copy"),
        ("feature-rx-notify", "", "feature-rx-notify"),
        ("multi-queue-num-queues", "5", "at most 4 are offered"),
        ("tx-ring-ref", "77777", "mapping the transmit ring"),
        ("rx-ring-ref", "-1", "rx-ring-ref"),
        ("event-channel-rx", "4000", "binding event channel 4000"),
    ] {
        rig.peer.frontend.vanish();
        rig.until("the link goes down", |rig| rig.seen == Some(Carrier::Down));
        rig.peer.frontend.make(1);
        rig.peer.frontend.publish_with(&[(name, value)]);
        rig.until(why, |rig| rig.peer.frontend.back("state").as_deref() == Some("5"));
        let says = |(name, state): (&str, Detail)| name == "state" && state.text().contains(why);
        rig.until("the port says why", |rig| rig.port.details().into_iter().any(says));
        assert_eq!((rig.peer.world.mapped(), rig.peer.world.bound()), (0, 0), "{why}");
        closes_and_comes_again(&mut rig);
    }
}

#[test]
fn a_busy_xenstore_delays_the_handshake_and_does_not_end_it() {
    let mut rig = Rig::<XenFixture>::up();
    rig.peer.frontend.vanish();
    rig.until("the link goes down", |rig| rig.seen == Some(Carrier::Down));
    // More than one write tries by itself, for each of the states that are to be written.
    rig.peer.world.conflict(60);
    rig.peer.frontend.make(1);
    rig.until("the backend waits", |rig| rig.peer.frontend.back("state").as_deref() == Some("2"));
    rig.peer.world.conflict(120);
    rig.peer.frontend.publish();
    rig.until("both are connected", |rig| rig.peer.frontend.back("state").as_deref() == Some("4"));
    assert_eq!((rig.peer.world.mapped(), rig.peer.world.bound()), (2, 2));
}

#[test]
fn a_refusal_of_xenstore_is_told_and_asked_again_without_an_event() {
    let says = |rig: &Rig<XenFixture>, words: &str| {
        rig.port.details().iter().any(|(name, state)| *name == "state" && state.text().contains(words))
    };
    for (errno, words) in [("ENOSPC", "`xenstore-control quota"), ("EACCES", "`backend`"), ("EIO", "reports an error")]
    {
        let mut rig = Rig::<XenFixture>::up();
        let world = rig.peer.world.clone();
        rig.peer.frontend.vanish();
        rig.until_woken("the link goes down", |rig| rig.seen == Some(Carrier::Down));
        rig.until("the port waits", |rig| says(rig, "waiting for the domain"));
        world.deny(Some(errno));
        rig.peer.frontend.make(1);
        rig.until(errno, |rig| says(rig, words) && says(rig, "asks again every second"));
        assert_eq!(rig.peer.frontend.back("state").as_deref(), Some("1"), "{errno}");
        // Nothing in XenStore changes from here on, so no event comes.
        world.deny(None);
        rig.until("the port answers", |rig| rig.peer.frontend.back("state").as_deref() == Some("2"));
        rig.peer.frontend.publish();
        rig.until_woken("the link comes up", |rig| rig.port.link() == Carrier::Up);
        both_ways(&mut rig);
        // And where a new port may not watch anything from the first.
        let registration = rig.port_registration();
        world.deny(Some(errno));
        drop(std::mem::replace(&mut rig.port, Box::new(NoPort)));
        rig.port = port(&world, 4, registration);
        rig.until(errno, |rig| says(rig, words) && says(rig, "asks again every second"));
        world.deny(None);
        rig.until_woken("the link comes up again", |rig| rig.port.link() == Carrier::Up);
        both_ways(&mut rig);
    }
}

#[test]
fn a_frontend_that_broke_the_protocol_is_told_to_close() {
    let mut rig = rig(1, true);
    rig.peer.frontend.jump(0);
    rig.until("it is told", |rig| rig.peer.frontend.back("state").as_deref() == Some("5"));
    assert_eq!((rig.peer.world.mapped(), rig.peer.world.bound(), rig.faults.len()), (0, 0, 1));
    let says = |(name, state): (&str, Detail)| name == "state" && state.text().contains("the peer's producer index is");
    rig.until("the port says what was broken", |rig| rig.port.details().into_iter().any(says));
    // It stays closed as long as the frontend says that it is connected.
    rig.settle();
    assert_eq!(rig.peer.frontend.back("state").as_deref(), Some("5"));
    closes_and_comes_again(&mut rig);
}

#[test]
fn requests_of_any_content_cost_their_packets_or_the_connection() {
    let mut random = tombolo_testing::Random::seeded();
    let mut rig = rig(1, true);
    let (mut kept, mut lost) = (0, 0);
    for _ in 0..300 {
        let (wild, jumps) = (random.chance(2), random.chance(20));
        let count = if jumps { 300 } else { 1 + random.below(40) as u32 };
        rig.peer.frontend.scribble(0, &mut random, count, wild);
        rig.settle();
        assert!(rig.peer.world.mapped() <= 2 && rig.peer.world.bound() <= 2);
        if rig.port.link() == Carrier::Up {
            kept += 1;
            continue;
        }
        lost += 1;
        rig.until("it is told", |rig| rig.peer.frontend.back("state").as_deref() == Some("5"));
        assert_eq!((rig.peer.world.mapped(), rig.peer.world.bound()), (0, 0));
        // Another domain: one that comes again and again is served late.
        rig.peer.frontend.vanish();
        rig.peer.frontend.start(1);
        rig.until_woken("the link comes up", |rig| rig.seen == Some(Carrier::Up));
        both_ways(&mut rig);
    }
    assert!(kept > 30 && lost > 3, "{kept} rounds were survived and {lost} were not: one kind is not tried");
    assert_eq!(rig.faults.len(), lost);
}

#[test]
fn a_frontend_that_never_finishes_closing_holds_nothing_and_is_gone_with_its_domain() {
    let mut rig = rig(1, true);
    rig.peer.frontend.jump(0);
    rig.until("it is told", |rig| rig.peer.frontend.back("state").as_deref() == Some("5"));
    let mut random = tombolo_testing::Random::seeded();
    for _ in 0..200 {
        rig.peer.frontend.set_state(["4", "5", "3", "2", "7", "8", "9", "-1"][random.index(8)]);
    }
    rig.settle();
    assert_eq!((rig.peer.world.mapped(), rig.peer.world.bound()), (0, 0));
    // Closed where the frontend's last state but one was none that is known, which counts as gone.
    let state = rig.peer.frontend.back("state");
    assert!(matches!(state.as_deref(), Some("5" | "6")), "{state:?}");
    rig.peer.frontend.vanish();
    rig.until("the port waits", |rig| rig.port.details().contains(&("state", "waiting for the domain".into())));
    assert_eq!(rig.peer.world.nodes_below("/local/domain/0/backend/vif/"), 0);
    assert_eq!(rig.peer.world.watched(), ["backend/vif"]);
    rig.peer.frontend.start(1);
    rig.until_woken("the link comes up", |rig| rig.port.link() == Carrier::Up);
    both_ways(&mut rig);
}

#[test]
fn events_about_nothing_cost_the_port_no_frame() {
    let mut rig = rig(1, true);
    for round in 0..500 {
        rig.peer.frontend.notify_of_nothing(0);
        if round % 50 == 0 {
            both_ways(&mut rig);
        }
    }
    rig.settle();
    assert!(rig.faults.is_empty() && rig.rx_drops.total() == 0);
}

#[test]
fn grants_that_were_revoked_cost_their_own_frames() {
    let mut rig = rig(1, true);
    let frames = plain(0, [60, 60, 60]);
    rig.peer.world.revoke(true);
    for frame in &frames {
        assert!(rig.peer.inject(&frame.bytes, Offload::NONE));
    }
    rig.until_woken("they are counted", |rig| rig.rx_drops.of(Reason::BadGrant) == 3);
    assert_eq!(rig.send(&frames), 0);
    assert_eq!(rig.tx_drops.of(Reason::BadGrant), 3);
    rig.peer.world.revoke(false);
    assert!(rig.peer.frontend.failed_pages() >= 3 && rig.peer.frontend.failed_pieces() >= 3);
    both_ways(&mut rig);
    assert!(rig.faults.is_empty());
}

#[test]
fn a_frontend_asks_for_other_multicast_frames_while_it_is_connected() {
    let mut rig = rig(1, true);
    until_connected(&mut rig);
    let (address, frames) = multicast_frames();
    // The list may be made before it is to count.
    rig.peer.frontend.subscribe(Extra::MulticastAdd(address));
    rig.settle();
    rig.deliver(&frames);
    for round in 1..=3 {
        rig.peer.frontend.ask("request-multicast-control", "1");
        rig.until_woken("it counts", |rig| has(rig, "multicast", "what the guest asks for"));
        assert_eq!((rig.send(&frames), rig.tx_drops.of(Reason::Unsubscribed)), (1, round));
        same(&frames[..1], &rig.collect(1));
        rig.peer.frontend.ask("request-multicast-control", "0");
        rig.until_woken("all pass", |rig| has(rig, "multicast", "all"));
        rig.deliver(&frames);
    }
    assert_eq!(rig.peer.frontend.back("state").as_deref(), Some("4"));
}

#[test]
fn a_guest_says_by_its_control_ring_how_its_frames_are_spread() {
    use tombolo_ring::xen::ctrl::*;
    let mut rig = rig(4, true);
    let world = rig.peer.world.clone();
    rig.peer.frontend.vanish();
    rig.until("the link goes down", |rig| rig.seen == Some(Carrier::Down));
    rig.peer.frontend.make(1);
    rig.until("offered", |rig| rig.peer.frontend.back("feature-ctrl-ring").as_deref() == Some("1"));
    rig.peer.frontend.publish_control();
    rig.until_woken("the link comes up", |rig| rig.seen == Some(Carrier::Up));
    until_connected(&mut rig);
    assert_eq!((world.mapped(), world.bound()), (9, 9));
    let frame = || vec![partial_frame(9, 1400, SegmentKind::Tcp4, None)];
    let queue_of = |rig: &mut Rig<XenFixture>| -> usize {
        assert_eq!(rig.send(&frame()), 1);
        let came: Vec<_> = (0..4).filter(|queue| rig.peer.frontend.receive(*queue).is_some()).collect();
        assert_eq!(came.len(), 1);
        came[0]
    };
    let ours = queue_of(&mut rig);
    let ask = |rig: &mut Rig<XenFixture>, kind, data| {
        rig.peer.frontend.request(kind, data);
        let mut answer = None;
        rig.until_woken("an answer", |rig| {
            answer = rig.peer.frontend.answered();
            answer.is_some()
        });
        answer.unwrap()
    };
    assert_eq!(ask(&mut rig, GET_HASH_FLAGS, [0; 3]), (GET_HASH_FLAGS, STATUS_NOT_SUPPORTED, 0));
    assert_eq!(ask(&mut rig, SET_HASH_ALGORITHM, [1, 0, 0]), (SET_HASH_ALGORITHM, STATUS_SUCCESS, 0));
    assert_eq!(ask(&mut rig, GET_HASH_FLAGS, [0; 3]), (GET_HASH_FLAGS, STATUS_SUCCESS, 15));
    assert_eq!(ask(&mut rig, GET_HASH_MAPPING_SIZE, [0; 3]), (GET_HASH_MAPPING_SIZE, STATUS_SUCCESS, 128));
    let gref = rig.peer.frontend.granted(&[0x6d; 40]);
    assert_eq!(ask(&mut rig, SET_HASH_KEY, [gref, 40, 0]), (SET_HASH_KEY, STATUS_SUCCESS, 0));
    assert_eq!(ask(&mut rig, SET_HASH_KEY, [5000, 40, 0]), (SET_HASH_KEY, STATUS_INVALID_PARAMETER, 0), "no grant");
    assert_eq!(ask(&mut rig, SET_HASH_FLAGS, [15, 0, 0]), (SET_HASH_FLAGS, STATUS_SUCCESS, 0));
    assert_eq!(ask(&mut rig, SET_HASH_MAPPING_SIZE, [128, 0, 0]), (SET_HASH_MAPPING_SIZE, STATUS_SUCCESS, 0));
    for queue in [3, 1, 2, 0] {
        let gref = rig.peer.frontend.granted(&[queue as u8, 0, 0, 0].repeat(128));
        assert_eq!(ask(&mut rig, SET_HASH_MAPPING, [gref, 128, 0]), (SET_HASH_MAPPING, STATUS_SUCCESS, 0));
        assert_eq!(queue_of(&mut rig), queue);
        assert_eq!(usize::from(rig.port.ring_of(&rig_frame(&frame()[0]))), queue);
    }
    assert_eq!(queue_of(&mut rig), 0);
    let bytes = frame()[0].bytes.clone();
    let value = toeplitz(&[0x6d; 40], &bytes[26..38]);
    assert_eq!(rig.peer.frontend.taken_hash(), Some(PacketHash { kind: 1, algorithm: 1, value }));
    // Each remainder its own queue, so that the hash decides.
    let table: Vec<u8> = (0..128u32).flat_map(|at| ((at / 3 + at / 50) % 4).to_le_bytes()).collect();
    let gref = rig.peer.frontend.granted(&table);
    assert_eq!(ask(&mut rig, SET_HASH_MAPPING, [gref, 128, 0]), (SET_HASH_MAPPING, STATUS_SUCCESS, 0));
    assert_eq!(queue_of(&mut rig), usize::from(table[4 * (value as usize % 128)]));
    // Another daemon knows nothing of it, and takes requests where the ring stands.
    let registration = rig.port_registration();
    drop(std::mem::replace(&mut rig.port, Box::new(NoPort)));
    assert_eq!((world.mapped(), world.bound()), (0, 0));
    rig.peer.frontend.request(GET_HASH_MAPPING_SIZE, [0; 3]);
    rig.port = port(&world, 4, registration);
    rig.until_woken("an answer", |rig| rig.peer.frontend.answered().is_some());
    assert_eq!((queue_of(&mut rig), rig.peer.frontend.taken_hash()), (ours, None));
    until_connected(&mut rig);
    // What is not a request closes the device.
    rig.peer.frontend.jump_control();
    rig.until_woken("the fault is seen", |rig| !rig.faults.is_empty());
    assert!(rig.faults[0].detail.contains("control ring"), "{:?}", rig.faults);
    rig.until("closing", |rig| rig.peer.frontend.back("state").as_deref() == Some("5"));
    rig.until("all is let go of", |_| (world.mapped(), world.bound()) == (0, 0));
}

fn rig_frame(frame: &OwnedFrame) -> tombolo_switch::frame::Frame {
    let mut batch = Batch::with_capacity(1);
    batch.push(tombolo_ring::mem::Foreign::from(&frame.bytes[..]), frame.offload);
    batch.frames()[0].clone()
}

fn has(rig: &Rig<XenFixture>, key: &'static str, value: impl Into<Detail>) -> bool {
    rig.port.details().contains(&(key, value.into()))
}

#[test]
fn a_frontend_with_an_xdp_program_has_room_before_its_frames() {
    let mut rig = rig(1, true);
    until_connected(&mut rig);
    both_ways(&mut rig);
    let world = rig.peer.world.clone();
    let before = rig.port.caps();
    // As Linux's does it: it says what it wants, waits until that was read, and goes on.
    let reconfigure = |rig: &mut Rig<XenFixture>, headroom: &str| {
        rig.peer.frontend.set_state("7");
        rig.peer.frontend.ask("xdp-headroom", headroom);
        rig.until("it was read", |rig| rig.peer.frontend.back("state").as_deref() == Some("8"));
        assert!(has(rig, "headroom", headroom.parse::<u64>().unwrap().min(2048)), "before it is answered");
    };
    for (round, (asked, got)) in [("256", 256u16), ("32767", 2048), ("256", 256)].into_iter().enumerate() {
        reconfigure(&mut rig, asked);
        // A daemon that was killed here leaves a guest that waits for ever, if the next one does
        // not answer.
        if asked != "256" {
            let registration = rig.port_registration();
            drop(std::mem::replace(&mut rig.port, Box::new(NoPort)));
            rig.peer.frontend.write_back("state", "4");
            rig.port = port(&world, 4, registration);
            rig.until("it is answered", |rig| rig.peer.frontend.back("state").as_deref() == Some("8"));
            assert!(has(&rig, "headroom", got));
        }
        assert_eq!(rig.port.caps(), Caps { tso4: false, tso6: false, ..before });
        rig.peer.frontend.set_state("4");
        until_connected(&mut rig);
        let frames: Vec<_> =
            plain(7, [60, 1514]).into_iter().chain([partial_frame(9, 1400, SegmentKind::Tcp4, None)]).collect();
        rig.deliver(&frames);
        assert_eq!(rig.peer.frontend.taken_offset(), got, "where the last one began");
        let long = plain(3, [1519]);
        assert_eq!(rig.send(&long), 0);
        assert_eq!(rig.tx_drops.of(Reason::TooLong), round as u64 + 1);
    }
    reconfigure(&mut rig, "0");
    rig.peer.frontend.set_state("4");
    until_connected(&mut rig);
    assert_eq!(rig.port.caps(), before);
    both_ways(&mut rig);
    assert_eq!((rig.peer.frontend.taken_offset(), rig.faults.len()), (0, 0));
}

#[test]
fn only_the_multicast_frames_that_were_asked_for_arrive() {
    let mut rig = Rig::<XenFixture>::up();
    rig.peer.frontend.vanish();
    rig.until("the link goes down", |rig| rig.seen == Some(Carrier::Down));
    rig.peer.frontend.make(1);
    rig.peer.frontend.publish_with(&[("request-multicast-control", "1")]);
    rig.until("the link comes up", |rig| rig.seen == Some(Carrier::Up));
    let address = [1, 0, 0x5e, 0, 0, 0xfb];
    let mut frames = plain(0, [60, 60]);
    frames[0].bytes[..6].copy_from_slice(&address);
    frames[1].bytes[..6].copy_from_slice(&[0xff; 6]);
    assert_eq!((rig.send(&frames), rig.tx_drops.of(Reason::Unsubscribed)), (1, 1));
    same(&frames[1..], &rig.collect(1));
    rig.peer.frontend.subscribe(Extra::MulticastAdd(address));
    rig.settle();
    rig.deliver(&frames);
    rig.peer.frontend.subscribe(Extra::MulticastDel(address));
    rig.settle();
    assert_eq!(rig.send(&frames), 1);
    // More addresses than there is room for.
    for n in 0..80 {
        rig.peer.frontend.subscribe(Extra::MulticastAdd([1, 0, 0x5e, 0, 1, n]));
        rig.settle();
    }
    assert!(rig.faults.is_empty());
}
