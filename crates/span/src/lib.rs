//! The control plane of networks across machines: which member is on which machine. Besides, the
//! rules of connections that carry calls between machines without a direct path ([`stream`]).
//!
//! Each machine tells all others what it has: MAC addresses, with names and IP addresses. From what
//! the others tell, it makes tables for its own daemon: where to send frames, and what to answer to
//! ARP, neighbour discovery and DNS. This crate decides; it neither reads clocks nor sends
//! anything. The program `tombolo-span` gives it messages and instants, and carries out its
//! [`Action`]s.
//!
//! [`control`] has the state of one machine, [`claims`] who wins, `moves` where a member is that two
//! machines claim, [`member`] what can be claimed, [`message`] the bytes, [`report`] what is said of
//! other machines, and [`simulation`] many machines on a virtual clock.
//!
//! # Messages
//! - A [`Change`](message::Change) goes to all: what came and what went, with a number. A receiver
//!   that missed a number asks for the whole.
//! - A [`Known`](message::Known) asks one machine: "I know you up to this number". The answer, a
//!   [`KnownAnswer`](message::KnownAnswer), is "that is all" or everything. Each machine is asked
//!   every [`Settings::beat`], so a lost change is repaired then at the latest, and the answer shows
//!   that the machine lives.
//!
//! So a change costs one small message to each machine, and the steady state one question and one
//! answer between each two machines per beat. Nothing grows with the square of the members.
//!
//! # Who wins
//! Two machines can claim the same thing: a member moves, or a network was cut in two and each part
//! gave the same address to a member of its own. Each machine decides alone, and all decide the
//! same:
//! - A MAC address belongs to the claim with the highest version, and among equal ones to the
//!   machine whose name sorts first. A machine raises the version when the member sends frames
//!   there although another machine claims it. So the version follows a member that moves.
//! - A member that was taken from a machine, and that sends there again, is kept by that machine:
//!   for ten minutes no version takes it, as long as the machine claims that it is there. It claims
//!   so until the member is silent there for 5 s or more. So a member can be taken from its machine
//!   for a moment, and only once. If a file has the member at one of the two machines, it is this one
//!   that keeps it.
//! - An IP address or a name that a file for several machines gives to one of them
//!   ([`Control::homes`]) belongs to a member that this machine has it for, wherever the member is.
//!   While it has the address for none, it belongs to a member with a lease of it.
//! - Any other IP address belongs to the member whose file fixes it, else to the machine whose name
//!   sorts first. The others are told to end their lease ([`Action::Lost`]).
//! - Any other name belongs to the machine whose name sorts first.
//!
//! # Death
//! A machine that was not heard for [`Settings::lease`] is forgotten, with all that it claimed, if
//! another one was heard at least two beats later. If none was, then this machine is probably cut
//! off, or the messages' carrier has ended. What is known is then kept for [`Settings::alone`].
//!
//! # A hostile machine
//! A machine can claim any member, since any may move there; see above for how long it has it. It
//! cannot claim more than [`MAX_MEMBERS`](member::MAX_MEMBERS), speak for another machine (the
//! carrier authenticates), keep the others busy
//! ([`MAX_CHANGES_PER_S`](control::MAX_CHANGES_PER_S)), or make a version jump by more than
//! [`MAX_JUMP`](control::MAX_JUMP). What it tried is counted by machine.
//!
//! ```
//! use std::time::Duration;
//! use tombolo_span::{Action, Control, Local, Member, Settings};
//!
//! let mut a = Control::new(Settings::new("a"), 1);
//! let mut b = Control::new(Settings::new("b"), 1);
//! let web = Member { mac: [2, 0, 0, 0, 0, 1], name: Some("web".into()), addresses: vec![] };
//! let here = vec![Local { member: web.clone(), placed: true, silent_for: None }];
//! a.local("lan", Some("192.0.2.1".parse()?), here, Duration::ZERO);
//!
//! // b asks a for all that it has, and gets a table for its daemon.
//! let answer = a.answer(&b.question("a"))?;
//! b.answered("a", &answer, Duration::ZERO)?;
//! let table = b.actions().into_iter().find_map(|action| match action {
//!     Action::Table { machine, members, .. } => Some((machine, members)),
//!     _ => None,
//! });
//! assert_eq!(table, Some(("a".to_string(), vec![web])));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod claims;
pub mod control;
pub mod member;
pub mod message;
mod moves;
pub mod report;
pub mod simulation;
pub mod stream;

pub use control::{Action, Control, Home, Local, Settings};
pub use member::{Address, Mac, Member};
pub use report::{Conflict, Peer, PeerState};
