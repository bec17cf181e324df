//! What machines send each other, and its bytes.
//!
//! A message is one byte, [`VERSION`], and then the fields in the encoding of
//! [postcard](https://postcard.jamesmunns.com). A machine ignores messages of other versions. The
//! carrier says who sent a message, so none holds the name of its sender.

use std::net::IpAddr;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::member::{MAX_MEMBERS, MAX_NETWORKS, Mac, Member, MemberError, is_name, is_unicast};

/// The first byte of each message.
pub const VERSION: u8 = 1;
/// Bytes of the longest [`Known`].
pub const MAX_QUESTION_BYTES: usize = 64;
/// Bytes of the longest [`Change`]. [`Control`](crate::Control) divides longer ones.
pub const MAX_CHANGE_BYTES: usize = 64 << 10;
/// Bytes of the longest [`KnownAnswer`].
pub const MAX_STATE_BYTES: usize = 2 << 20;
/// Claims that came and went in one [`Change`], together.
pub const MAX_CHANGES: usize = 128;

/// Counts what a machine announced. A program that starts again begins a new epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Number {
    /// Of this run of the machine's program.
    pub epoch: u64,
    /// Changes that it has told since then.
    pub count: u64,
}

/// One member that a machine says it has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claim {
    /// The member.
    pub member: Member,
    /// Higher than that of the machine where the member was before.
    pub version: u64,
    /// Whether the member is there. Otherwise its addresses are only kept for it, such as by a
    /// lease.
    pub placed: bool,
}

/// A network of a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Network {
    /// Its name, the same on all machines.
    pub name: String,
    /// Where the machine receives the network's tunnel; `None` where it has none.
    pub end: Option<IpAddr>,
    /// Members that came or changed; in a [`KnownAnswer`], all.
    pub came: Vec<Claim>,
    /// Members that went.
    pub went: Vec<Mac>,
}

/// What changed on a machine, for all others.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    /// The number of this change. A receiver that does not know the one before asks.
    pub number: Number,
    /// The networks with changes.
    pub networks: Vec<Network>,
}

/// The question to a machine: what is there beyond this?
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Known {
    /// The last change that the asking machine has; `None` if it knows nothing of the other one.
    pub number: Option<Number>,
}

/// The answer to [`Known`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum KnownAnswer {
    /// Nothing.
    Same,
    /// All that the machine has.
    All(Change),
}

/// Why bytes are no message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MessageError {
    /// Another version of this protocol.
    #[error("a message of version {0}: expected {VERSION}")]
    Version(u8),
    /// No bytes.
    #[error("an empty message")]
    Empty,
    /// Longer than any.
    #[error("a message of {found} bytes: expected at most {limit}")]
    Long {
        /// Its length.
        found: usize,
        /// The most.
        limit: usize,
    },
    /// Not this encoding.
    #[error("a message that cannot be decoded: {0}")]
    Encoding(postcard::Error),
    /// Bytes after the end.
    #[error("a message with {0} bytes too many")]
    Trailing(usize),
    /// Too much of something.
    #[error("a message with {found} {what}: expected at most {limit}")]
    Many {
        /// Of what.
        what: &'static str,
        /// How many.
        found: usize,
        /// The most.
        limit: usize,
    },
    /// Not the name of a network.
    #[error("a network named \"{0}\": expected 1 to 63 of a-z, 0-9 and -")]
    Network(String),
    /// A network or member twice.
    #[error("the same {0} twice in one message")]
    Twice(&'static str),
    /// Not the end of a tunnel.
    #[error("a tunnel that ends at {0}: expected the address of one machine")]
    End(IpAddr),
    /// A bad member.
    #[error(transparent)]
    Member(#[from] MemberError),
}

fn encode<T: Serialize>(message: &T) -> Vec<u8> {
    let mut bytes = vec![VERSION];
    // Into memory, and of types that postcard knows: it cannot fail.
    bytes.extend(postcard::to_allocvec(message).unwrap_or_default());
    bytes
}

fn decode<T: DeserializeOwned>(bytes: &[u8], limit: usize) -> Result<T, MessageError> {
    if bytes.len() > limit {
        return Err(MessageError::Long { found: bytes.len(), limit });
    }
    let (version, rest) = bytes.split_first().ok_or(MessageError::Empty)?;
    if *version != VERSION {
        return Err(MessageError::Version(*version));
    }
    let (message, rest) = postcard::take_from_bytes(rest).map_err(MessageError::Encoding)?;
    if rest.is_empty() { Ok(message) } else { Err(MessageError::Trailing(rest.len())) }
}

fn few(what: &'static str, found: usize, limit: usize) -> Result<(), MessageError> {
    if found > limit { Err(MessageError::Many { what, found, limit }) } else { Ok(()) }
}

impl Change {
    fn check(&self, most: usize) -> Result<(), MessageError> {
        few("networks", self.networks.len(), MAX_NETWORKS)?;
        few("members", self.networks.iter().map(|network| network.came.len() + network.went.len()).sum(), most)?;
        for (at, network) in self.networks.iter().enumerate() {
            if !is_name(&network.name) {
                return Err(MessageError::Network(network.name.clone()));
            }
            if self.networks[..at].iter().any(|other| other.name == network.name) {
                return Err(MessageError::Twice("network"));
            }
            if let Some(end) = network.end.filter(|end| !is_unicast(*end)) {
                return Err(MessageError::End(end));
            }
            network.came.iter().try_for_each(|claim| claim.member.check())?;
            let mut macs: Vec<Mac> = network.came.iter().map(|claim| claim.member.mac).collect();
            macs.extend(&network.went);
            macs.sort_unstable();
            if macs.windows(2).any(|two| two[0] == two[1]) {
                return Err(MessageError::Twice("member"));
            }
        }
        Ok(())
    }

    /// Its bytes.
    pub fn encode(&self) -> Vec<u8> {
        encode(self)
    }

    /// From a peer's bytes, checked.
    ///
    /// # Errors
    /// [`MessageError`].
    pub fn decode(bytes: &[u8]) -> Result<Change, MessageError> {
        let change: Change = decode(bytes, MAX_CHANGE_BYTES)?;
        change.check(MAX_CHANGES)?;
        Ok(change)
    }
}

impl Known {
    /// Its bytes.
    pub fn encode(&self) -> Vec<u8> {
        encode(self)
    }

    /// From a peer's bytes.
    ///
    /// # Errors
    /// [`MessageError`].
    pub fn decode(bytes: &[u8]) -> Result<Known, MessageError> {
        decode(bytes, MAX_QUESTION_BYTES)
    }
}

impl KnownAnswer {
    /// Its bytes.
    pub fn encode(&self) -> Vec<u8> {
        encode(self)
    }

    /// From a peer's bytes, checked.
    ///
    /// # Errors
    /// [`MessageError`].
    pub fn decode(bytes: &[u8]) -> Result<KnownAnswer, MessageError> {
        let state: KnownAnswer = decode(bytes, MAX_STATE_BYTES)?;
        if let KnownAnswer::All(all) = &state {
            all.check(MAX_MEMBERS)?;
        }
        Ok(state)
    }
}

#[cfg(test)]
mod tests {
    use tombolo_testing::hex;

    use super::*;
    use crate::member::Address;

    fn member(n: u8) -> Member {
        let addresses = vec![Address { ip: [10, 87, 0, n].into(), fixed: n.is_multiple_of(2) }];
        Member { mac: [2, 0, 0, 0, 0, n], name: Some(format!("web-{n}")), addresses }
    }

    fn change() -> Change {
        let came = vec![Claim { member: member(1), version: 300, placed: true }];
        let end = Some("192.0.2.1".parse().unwrap());
        let network = Network { name: "lan".into(), end, came, went: vec![[2, 0, 0, 0, 0, 9]] };
        Change { number: Number { epoch: 7, count: 1 }, networks: vec![network] }
    }

    /// What [`change`] is after its version. Written out by the wire format of postcard: numbers
    /// are varints, a list or text begins with its length, an option or a choice with its number.
    const CHANGE: &str = "
        07 # epoch
        01 # count
        01 # one network
          03 6c616e # lan
          01 00 c0000201 # its end: some, of version 4
          01 # one that came
            020000000001 # address
            01 05 7765622d31 # name: some, web-1
            01 00 0a570001 00 # one address: of version 4, not fixed
            ac02 # version: 300
            01 # placed
          01 # one that went
            020000000009";

    /// A network without an end, and one whose end and member have addresses of version 6.
    fn sparse() -> Change {
        let address = Address { ip: "fd00::9".parse().unwrap(), fixed: true };
        let member = Member { mac: [2, 0, 0, 0, 0, 9], name: None, addresses: vec![address] };
        let claim = Claim { member, version: u64::MAX, placed: false };
        let empty = Network { name: "a".into(), end: None, came: vec![], went: vec![] };
        let end = Some("fd00::1".parse().unwrap());
        let other = Network { name: "b".into(), end, came: vec![claim], went: vec![] };
        Change { number: Number { epoch: 128, count: 0 }, networks: vec![empty, other] }
    }

    const SPARSE: &str = "
        8001 # epoch
        00 # count
        02
          01 61 # a
          00 00 00 # no end, none that came or went
          01 62 # b
          01 01 fd000000000000000000000000000001 # its end: some, of version 6
          01
            020000000009
            00 # no name
            01 01 fd000000000000000000000000000009 01 # one address: of version 6, fixed
            ffffffffffffffffff01 # version: 2^64 - 1
            00 # not placed
          00";

    #[test]
    fn the_bytes_of_each_message_are_these() {
        for (message, text) in [(change(), CHANGE), (sparse(), SPARSE)] {
            let bytes = [vec![VERSION], hex(text)].concat();
            assert_eq!(message.encode(), bytes);
            assert_eq!(Change::decode(&bytes).unwrap(), message);
            // All that the machine has: the choice 1.
            let bytes = [vec![VERSION, 1], hex(text)].concat();
            let state = KnownAnswer::All(message);
            assert_eq!(state.encode(), bytes);
            assert_eq!(KnownAnswer::decode(&bytes).unwrap(), state);
        }
        let number = Some(Number { epoch: 7, count: 1 });
        for (known, bytes) in [(Known { number }, &[VERSION, 1, 7, 1][..]), (Known { number: None }, &[VERSION, 0])] {
            assert_eq!(known.encode(), bytes);
            assert_eq!(Known::decode(bytes), Ok(known));
        }
        assert_eq!(KnownAnswer::Same.encode(), [VERSION, 0]);
        assert_eq!(KnownAnswer::decode(&[VERSION, 0]), Ok(KnownAnswer::Same));
    }

    #[test]
    fn what_is_cut_short_or_goes_on_is_refused() {
        let short = |len| match len {
            0 => MessageError::Empty,
            _ => MessageError::Encoding(postcard::Error::DeserializeUnexpectedEnd),
        };
        for message in [change(), sparse()] {
            let (change, state) = (message.encode(), KnownAnswer::All(message).encode());
            for len in 0..change.len() {
                assert_eq!(Change::decode(&change[..len]), Err(short(len)), "{len} bytes");
            }
            for len in 0..state.len() {
                assert_eq!(KnownAnswer::decode(&state[..len]), Err(short(len)), "{len} bytes");
            }
        }
        let known = Known { number: Some(Number { epoch: 7, count: 300 }) }.encode();
        for len in 0..known.len() {
            assert_eq!(Known::decode(&known[..len]), Err(short(len)), "{len} bytes");
        }
        assert_eq!(Known::decode(&[&known[..], &[0]].concat()), Err(MessageError::Trailing(1)));
        let change = change().encode();
        assert_eq!(Change::decode(&[&change[..], &[0]].concat()), Err(MessageError::Trailing(1)));
        assert_eq!(Change::decode(&[2, 0]), Err(MessageError::Version(2)));
        let long = vec![VERSION; MAX_CHANGE_BYTES + 1];
        assert!(matches!(Change::decode(&long), Err(MessageError::Long { .. })));
    }

    #[test]
    fn a_length_that_promises_more_than_there_is_allocates_nothing_for_it() {
        // Epoch, count, and then 2^63 networks.
        let bytes = [&[VERSION, 7, 1][..], &[0xff; 8], &[0x7f]].concat();
        assert!(matches!(Change::decode(&bytes), Err(MessageError::Encoding(_))));
    }

    #[test]
    fn what_no_machine_may_say_is_refused_by_name() {
        let refused = |edit: &dyn Fn(&mut Network)| {
            let mut change = change();
            edit(&mut change.networks[0]);
            Change::decode(&change.encode()).unwrap_err().to_string()
        };
        let first = |n: &mut Network, edit: &dyn Fn(&mut Member)| edit(&mut n.came[0].member);
        for (edit, word) in [
            (&(|n: &mut Network| n.name = "LAN".into()) as &dyn Fn(&mut Network), "\"LAN\""),
            (&|n| n.end = Some("224.0.0.1".parse().unwrap()), "224.0.0.1"),
            (&|n| first(n, &|m| m.mac[0] = 1), "a group's"),
            (&|n| first(n, &|m| m.mac = [0; 6]), "zero"),
            (&|n| first(n, &|m| m.name = Some("-".into())), "\"-\""),
            (&|n| first(n, &|m| m.addresses[0].ip = [255; 4].into()), "255.255.255.255"),
            (&|n| first(n, &|m| m.addresses.push(m.addresses[0].clone())), "twice"),
            (&|n| first(n, &|m| m.addresses = vec![m.addresses[0].clone(); 17]), "at most 16"),
            (&|n| n.went.push(n.came[0].member.mac), "member twice"),
            (&|n| n.went = (0..129u8).map(|i| [2, 1, 0, 0, 0, i]).collect(), "at most 128"),
        ] {
            let text = refused(edit);
            assert!(text.contains(word), "{text}: no {word}");
        }
        let mut twice = change();
        twice.networks.push(twice.networks[0].clone());
        assert_eq!(Change::decode(&twice.encode()), Err(MessageError::Twice("network")));
    }
}
