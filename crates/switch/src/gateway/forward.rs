//! Queries that the gateway hands to the shell, which asks the host's name servers, until their
//! answers come.
//!
//! Limits: [`MAX_OUTSTANDING`] at a time, [`MAX_PER_SOURCE`] of one source and no more than are
//! left for the others, [`ANSWER_SPAN`] each. A query over a limit is answered with SERVFAIL at
//! once. A query that runs out is answered with SERVFAIL then. A query that a client repeats while
//! the first is outstanding is not asked twice.

use super::dns;
use super::tcp::Stream;
use crate::Nanos;
use crate::frame::Mac;
use crate::limit::ChargedTo;
use std::collections::{BTreeMap, HashMap};
use std::net::{Ipv4Addr, Ipv6Addr};

/// Most queries outstanding.
pub(super) const MAX_OUTSTANDING: usize = 256;
/// Most of them from one source: a port of the switch, or a MAC address where the port is not
/// known.
pub(super) const MAX_PER_SOURCE: usize = 64;
/// How long an answer is waited for; shorter than the 5 s after which resolvers ask again.
pub(super) const ANSWER_SPAN: Nanos = Nanos::MILLI.times(4500);

/// A query for the shell to ask the host's name servers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UpstreamQuery {
    /// Names it to [`super::GatewayHandle::answer`].
    pub id: u64,
    /// The DNS message, with an identification of its own that cannot be guessed.
    pub bytes: Vec<u8>,
}

impl UpstreamQuery {
    /// Whether `answer` is one to this query: its identification, its question, and that it is an
    /// answer at all.
    pub fn is_answered_by(&self, answer: &[u8]) -> bool {
        let read = dns::read(&self.bytes);
        read.is_ok_and(|query| dns::answers(answer, query.id, query.question))
    }
}

/// Where the answer goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Client {
    Udp {
        mac: Mac,
        address: Ipv4Addr,
        port: u16,
    },
    /// Over IPv6; `own` is the address that it asked.
    Udp6 {
        mac: Mac,
        address: Ipv6Addr,
        port: u16,
        own: Ipv6Addr,
    },
    Tcp(Stream),
}

#[derive(Debug)]
struct Pending {
    client: Client,
    client_id: u16,
    id: u16,
    question: Vec<u8>,
    source: ChargedTo,
    room: usize,
    deadline: Nanos,
}

/// An answer on its way to a client.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Delivery {
    pub(super) client: Client,
    pub(super) bytes: Vec<u8>,
}

/// Why a query is not forwarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NotForwarded {
    /// It is on its way already.
    Repeated,
    /// There are too many.
    Full,
}

#[derive(Debug, Default)]
pub(super) struct Forwarder {
    next: u64,
    /// By id, which grows with time, so that the first is the oldest.
    pending: BTreeMap<u64, Pending>,
    asked: HashMap<(Client, u16), u64>,
    per_source: HashMap<ChargedTo, usize>,
}

impl Forwarder {
    /// As new, with ids that none of the `epoch` forwarders before it gave out: an answer to a
    /// query of one of those then matches no query.
    pub(super) fn of_epoch(epoch: u64) -> Forwarder {
        Forwarder { next: epoch << 40, ..Forwarder::default() }
    }

    pub(super) fn outstanding(&self) -> usize {
        self.pending.len()
    }

    /// Takes `query`, the whole message being `bytes`, for `client`; `id` is its identification
    /// from now on. An answer longer than `room` is cut for it.
    #[allow(clippy::too_many_arguments)] // each is one fact of the query, and there is one caller
    pub(super) fn ask(
        &mut self,
        client: Client,
        source: ChargedTo,
        query: &dns::Query<'_>,
        bytes: &[u8],
        room: usize,
        id: u16,
        now: Nanos,
    ) -> Result<UpstreamQuery, NotForwarded> {
        if self.asked.contains_key(&(client, query.id)) {
            return Err(NotForwarded::Repeated);
        }
        let held = self.per_source.get(&source).copied().unwrap_or(0);
        // No more than are left either, so that a few sources cannot have all of them: each further
        // one finds its half.
        let left = MAX_OUTSTANDING - self.pending.len();
        if held >= MAX_PER_SOURCE.min(left) {
            return Err(NotForwarded::Full);
        }
        self.next += 1;
        let mut bytes = bytes.to_vec();
        bytes[..2].copy_from_slice(&id.to_be_bytes());
        let pending = Pending {
            client,
            client_id: query.id,
            id,
            question: query.question.to_vec(),
            source,
            room,
            deadline: now.after(ANSWER_SPAN),
        };
        self.pending.insert(self.next, pending);
        self.asked.insert((client, query.id), self.next);
        *self.per_source.entry(source).or_default() += 1;
        Ok(UpstreamQuery { id: self.next, bytes })
    }

    fn take(&mut self, id: u64) -> Option<Pending> {
        let pending = self.pending.remove(&id)?;
        self.asked.remove(&(pending.client, pending.client_id));
        if let Some(held) = self.per_source.get_mut(&pending.source) {
            *held -= 1;
            if *held == 0 {
                self.per_source.remove(&pending.source);
            }
        }
        Some(pending)
    }

    /// The shell's answer to query `id`; `None` where no client waits for it or it answers
    /// something else. An empty one says that no name server answered.
    pub(super) fn answer(&mut self, id: u64, mut answer: Vec<u8>) -> Option<Delivery> {
        let pending = self.pending.get(&id)?;
        if answer.is_empty() {
            return self.take(id).map(Pending::failure);
        }
        if !dns::answers(&answer, pending.id, &pending.question) {
            return None;
        }
        let pending = self.take(id)?;
        answer[..2].copy_from_slice(&pending.client_id.to_be_bytes());
        let bytes = if answer.len() > pending.room { dns::truncated(&answer, pending.question.len()) } else { answer };
        Some(Delivery { client: pending.client, bytes })
    }

    /// Whether something has run out; then [`Forwarder::expired`] gives it.
    pub(super) fn deadline(&self) -> Option<Nanos> {
        self.pending.values().next().map(|p| p.deadline)
    }

    /// A failure for a query that ran out of time, if one did.
    pub(super) fn expired(&mut self, now: Nanos) -> Option<Delivery> {
        let (id, pending) = self.pending.first_key_value()?;
        if pending.deadline > now {
            return None;
        }
        let id = *id;
        self.take(id).map(Pending::failure)
    }
}

impl Pending {
    fn failure(self) -> Delivery {
        let mut bytes = dns::bare(self.client_id, 0x0100, dns::Code::ServerFailure, true);
        bytes[5] = 1;
        bytes.extend_from_slice(&self.question);
        Delivery { client: self.client, bytes }
    }
}
