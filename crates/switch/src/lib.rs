//! The Ethernet switch, without I/O: bytes and instants in, bytes and decisions out.
//!
//! * [`frame`]: a batch of frames whose headers were copied once and whose payload still lies with
//!   its source; the offload state that travels with each.
//! * [`nat`]: many guests behind the one address that an uplink knows, and the router that is a port.
//! * [`policy`]: which members may exchange what: isolation, rules with memory of connections,
//!   mirrors.
//! * [`port`]: the trait that every attachment implements, and what each method owes.
//! * [`vnet`]: offload state to and from the virtio-net header, which taps, packet sockets and
//!   guests share.
//! * [`mod@drop`]: why a frame was lost. There is no other way to lose one.
//! * [`mac`], [`guard`], [`network`]: where frames go, and which may.
//! * [`vlan`]: which VLANs a port belongs to. [`class`], [`limit`]: which frames go first, and how
//!   many may.
//! * [`offload`]: segments and checksums in software, where a destination lacks them.
//! * [`merge`]: segments of one stream as one frame, where a source cannot give it and a
//!   destination takes it.
//! * [`worker`], [`control`]: the poll loop of one thread, and what other threads may ask of it.
//! * [`recheck`]: which ports are looked at once more, since a wake-up may have been lost.
//! * [`capture`], [`filter`], [`pcapng`]: a port's frames, or some of them, as a file for Wireshark
//!   and its like.
//! * [`wait`]: how a worker sleeps.
//! * [`gateway`]: the inner port that serves a network: ARP, ICMP echo, DHCP and DNS.
//! * [`detail`]: facts of a port's kind, for status.
//! * [`counters`]: what is counted per port; one writer, any number of readers.
//!
//! Files, threads, epoll and time are the business of the crates above; time comes in as [`Nanos`].
//!
//! ```
//! use tombolo_switch::filter::Filter;
//!
//! // A frame of DNS: Ethernet, IPv4, UDP from port 1024 to 53.
//! let mut frame = [0; 42];
//! (frame[12], frame[14], frame[23]) = (0x08, 0x45, 17);
//! frame[34..38].copy_from_slice(&[4, 0, 0, 53]);
//! assert!(Filter::parse("udp dst port 53")?.matches(&frame, frame.len()));
//! assert!(!Filter::parse("tcp or ip6")?.matches(&frame, frame.len()));
//! # Ok::<(), tombolo_switch::filter::FilterError>(())
//! ```
#![warn(unreachable_pub)]

pub mod capture;
pub mod class;
pub mod control;
pub mod counters;
pub mod detail;
pub mod drop;
pub mod filter;
pub mod frame;
pub mod gateway;
pub mod guard;
pub mod limit;
pub mod mac;
pub mod merge;
pub mod nat;
pub mod network;
pub mod offload;
mod overflow;
pub mod pcapng;
mod plain;
pub mod policy;
pub mod port;
pub mod recheck;
pub mod vlan;
pub mod vnet;
pub mod wait;
pub mod worker;

/// An instant or a span, in nanoseconds of one monotonic clock that the caller chose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nanos(pub u64);

impl Nanos {
    /// 1,000 ns.
    pub const MICRO: Nanos = Nanos(1_000);
    /// 1,000,000 ns.
    pub const MILLI: Nanos = Nanos(1_000_000);
    /// 1,000,000,000 ns.
    pub const SECOND: Nanos = Nanos(1_000_000_000);

    /// `self + span`, at most the end of time.
    #[must_use]
    pub const fn after(self, span: Nanos) -> Nanos {
        Nanos(self.0.saturating_add(span.0))
    }

    /// The span from `earlier` to `self`; zero where `earlier` is later.
    #[must_use]
    pub const fn since(self, earlier: Nanos) -> Nanos {
        Nanos(self.0.saturating_sub(earlier.0))
    }

    /// `n` times this span.
    #[must_use]
    pub const fn times(self, n: u64) -> Nanos {
        Nanos(self.0.saturating_mul(n))
    }
}
