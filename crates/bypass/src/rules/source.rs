//! The ruleset, asked of the kernel over netlink (`NFNL_SUBSYS_NFTABLES`).

use super::ruleset::{GETCHAIN, GETGEN, GETRULE, GETSET, GETSETELEM, GETTABLE, Ruleset, Table};
use crate::netlink::{Message, NLM_F_ACK, NLM_F_DUMP, NetlinkError, Socket, attributes};
use rustix::io::Errno;
use rustix::net::netlink::NETFILTER;
use rustix::net::{RecvFlags, recv};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

/// NFNL_SUBSYS_NFTABLES, in a message's high byte.
const SUBSYSTEM: u16 = 10 << 8;
/// NFNL_SUBSYS_IPSET; `IPSET_CMD_LIST` and its attributes: the protocol, here 7, since which sets
/// are listed with their indices, and that their entries are not wanted
/// (linux/netfilter/ipset/ip_set.h).
const SUBSYSTEM_IPSET: u16 = 6 << 8;
const IPSET_LIST: u16 = 7;
const IPSET_PROTOCOL: u16 = 1;
const IPSET_FLAGS: u16 = 6;
const IPSET_LIST_HEADER: u32 = 1 << 2;
/// NFNLGRP_NFTABLES as a bit of the address.
const GROUP_NFTABLES: u32 = 1 << (7 - 1);
/// How often a ruleset that changes while it is read is read again, and the pause before that.
const ATTEMPTS: u32 = 20;
const PAUSE: Duration = Duration::from_millis(2);

/// Questions about the ruleset of the network namespace of the thread that opened it.
#[derive(Debug)]
pub(crate) struct Nftables(Option<Socket>);

/// Whether the kernel says that it has no nftables.
fn is_absent(cause: Errno) -> bool {
    matches!(cause, Errno::PROTONOSUPPORT | Errno::AFNOSUPPORT | Errno::INVAL | Errno::OPNOTSUPP | Errno::NOENT)
}

fn failed(cause: Errno) -> NetlinkError {
    NetlinkError::Call { what: "nftables ruleset", cause }
}

impl Nftables {
    /// Opens the socket. A kernel without netfilter's netlink has no ruleset.
    pub(crate) fn open() -> Result<Nftables, NetlinkError> {
        match Socket::open(Some(NETFILTER), 0) {
            Ok(socket) => Ok(Nftables(Some(socket))),
            Err(cause) if is_absent(cause) => Ok(Nftables(None)),
            Err(cause) => Err(failed(cause)),
        }
    }

    /// The number of the ruleset's present form, which every change raises; 0 without nftables.
    pub(crate) fn generation(&self) -> Result<u32, NetlinkError> {
        let Some(socket) = &self.0 else { return Ok(0) };
        let mut generation = 0;
        let request = Message::new(SUBSYSTEM | u16::from(GETGEN), NLM_F_ACK, &[0; 4]).finish();
        let each = |_, body: &[u8]| {
            let id = body.get(4..).and_then(|b| attributes(b).find(|a| a.0 == 1)).and_then(|a| a.1.try_into().ok());
            generation = id.map_or(0, u32::from_be_bytes);
        };
        match socket.ask(&request, each) {
            Ok(()) => Ok(generation),
            Err(cause) if is_absent(cause) => Ok(0),
            Err(cause) => Err(failed(cause)),
        }
    }

    /// The ruleset and its generation, read as often as it takes to find it unchanged.
    ///
    /// # Errors
    /// `EAGAIN` where it changes all the time.
    pub(crate) fn read(&self) -> Result<(Ruleset, u32), NetlinkError> {
        for _ in 0..ATTEMPTS {
            let before = self.generation()?;
            let ruleset = match self.dump() {
                Ok(ruleset) => ruleset,
                // A table or set went meanwhile.
                Err(Errno::NOENT | Errno::INTR) => continue,
                Err(cause) => return Err(failed(cause)),
            };
            // In what was asked last there may be more to read than was read.
            if Nftables::open()?.generation()? == before {
                return Ok((ruleset, before));
            }
            std::thread::sleep(PAUSE);
        }
        Err(failed(Errno::AGAIN))
    }

    fn dump(&self) -> Result<Ruleset, Errno> {
        let mut ruleset = Ruleset::default();
        let Some(socket) = &self.0 else { return Ok(ruleset) };
        for kind in [GETTABLE, GETCHAIN, GETRULE, GETSET] {
            let request = Message::new(SUBSYSTEM | u16::from(kind), NLM_F_DUMP, &[0; 4]).finish();
            let each = |kind: u16, body: &[u8]| ruleset.add(kind as u8, body);
            match socket.ask_while(&request, each) {
                Err(cause) if kind == GETTABLE && is_absent(cause) => return Ok(ruleset),
                // Of the rest of a ruleset that is too large nothing is asked.
                Ok(()) if ruleset.is_too_large => return Ok(ruleset),
                other => other?,
            }
        }
        let of_interest = |t: &Table| {
            let (family, table) = (t.family, t.name.clone());
            let sets = t.sets.iter().filter(|(_, set)| set.is_of_interest());
            sets.map(move |(name, _)| (family, table.clone(), name.clone())).collect::<Vec<_>>()
        };
        let sets: Vec<_> = ruleset.tables.iter().flat_map(of_interest).collect();
        if ruleset.asks_ipset() {
            let mut request = Message::new(SUBSYSTEM_IPSET | IPSET_LIST, NLM_F_DUMP, &[0; 4]);
            request.put(IPSET_PROTOCOL, &[7]).put(IPSET_FLAGS, &IPSET_LIST_HEADER.to_be_bytes());
            socket.ask(&request.finish(), |_, body| ruleset.add_ipset(body))?;
            ruleset.finish_ipset();
        }
        for (family, table, name) in sets {
            let mut request = Message::new(SUBSYSTEM | u16::from(GETSETELEM), NLM_F_DUMP, &[family, 0, 0, 0]);
            let text = |name: String| [name.into_bytes(), vec![0]].concat();
            request.put(1, &text(table)).put(2, &text(name));
            socket.ask_while(&request.finish(), |kind, body| ruleset.add(kind as u8, body))?;
            if ruleset.is_too_large {
                break;
            }
        }
        Ok(ruleset)
    }
}

/// Tells of changes of the ruleset.
#[derive(Debug)]
pub struct RulesMonitor(Socket);

impl RulesMonitor {
    /// Opens the socket; nothing where the kernel has no nftables.
    pub fn open() -> Option<RulesMonitor> {
        Socket::open(Some(NETFILTER), GROUP_NFTABLES).map(RulesMonitor).ok()
    }

    /// Whether anything changed since the last question; does not wait.
    ///
    /// # Errors
    /// What the kernel answers to a read. If it lost messages, that is a change and no error.
    pub fn changed(&self) -> Result<bool, NetlinkError> {
        let mut changed = false;
        let mut buffer = vec![0; 64 << 10];
        loop {
            match recv(&self.0.fd, &mut buffer[..], RecvFlags::DONTWAIT) {
                Ok(_) | Err(Errno::NOBUFS) => changed = true,
                Err(Errno::AGAIN) => return Ok(changed),
                Err(Errno::INTR) => {}
                Err(cause) => return Err(failed(cause)),
            }
        }
    }
}

impl AsFd for RulesMonitor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_gives_a_ruleset_that_is_understood() {
        if !rustix::process::geteuid().is_root() {
            return tombolo_testing::skip("the ruleset is root's");
        }
        let (ruleset, _) = Nftables::open().unwrap().read().unwrap();
        assert_eq!(ruleset.broken, 0);
    }
}
