//! What a service tells of itself: counters, times, classes in force, slow calls.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};
use tombolo_ring::rpc::Broken;
use tombolo_ring::rpc::entry::{Refusal, Status};

use crate::histogram::{Histogram, Summary, bump};
use crate::schedule::Late;
use crate::sync::lock;

/// How many slow calls are remembered.
const SLOW_CALLS: usize = 32;

/// A call that took longer than the service's threshold, or waited for longer and was not served.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlowCall {
    /// Process ID of the client that sent it.
    pub pid: u32,
    /// What the caller put in to find it again.
    pub trace: u64,
    /// Payload length of the request.
    pub request_bytes: u64,
    /// How long it waited.
    pub queued_ns: u64,
    /// How long it was served.
    pub service_ns: u64,
    /// How much after its deadline it was done; 0 if before it.
    pub late_by_ns: u64,
    /// How it ended: served, late, refused, cancelled, expired or failed.
    #[serde(default)]
    pub end: String,
    /// When that was, ns after the service began.
    #[serde(default)]
    pub at_ns: u64,
}

/// Counters of answers, all since the service began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answers {
    /// Requests whose handler returned an answer.
    pub served: u64,
    /// Of these: done after their deadline.
    pub overran: u64,
    /// Not served since their deadline had passed.
    pub late: u64,
    /// Refused since the queue was full.
    pub refused_queue_full: u64,
    /// Refused since the deadline could not be met.
    pub refused_admission: u64,
    /// Refused since the payload's memory was not as it should be.
    pub refused_memory: u64,
    /// Refused since there was no room for the reply.
    pub refused_reply_memory: u64,
    /// Refused since the service was ending.
    pub refused_stopping: u64,
    /// Cancelled by the client.
    pub cancelled: u64,
    /// Waited for longer than their time to live.
    pub expired: u64,
    /// The handler panicked.
    pub failed: u64,
    /// Whose client had gone, or was disconnected, before the answer.
    pub abandoned: u64,
}

/// State and counters of one service.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Name under which the service is registered.
    pub name: String,
    /// Process ID of the provider.
    pub pid: u32,
    /// The machines that serve its calls, where it passes them on; none: this process does.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub machines: Vec<String>,
    /// Seconds since it began.
    pub uptime_s: f64,
    /// The class in force of each worker, and why it is not the one that was asked for.
    pub workers: Vec<String>,
    /// Its execution budget, ns.
    pub budget_ns: u64,
    /// Most requests that wait.
    pub queue_bound: u64,
    /// What happens to the late.
    pub late_policy: Late,
    /// Whether what cannot be met is refused at once.
    pub admission: bool,
    /// Clients that are connected now.
    pub clients: u64,
    /// Clients disconnected because they broke the protocol.
    pub broken_clients: u64,
    /// Of these, how many for which reason, by the reason's name (`tombolo_ring::rpc::Broken`);
    /// those that are none are left out.
    #[serde(default)]
    pub broken_by: BTreeMap<String, u64>,
    /// Connections that were refused, for any reason.
    pub refused_connections: u64,
    /// Requests that wait for a worker now.
    pub pending: u64,
    /// Requests by how they were answered.
    pub answers: Answers,
    /// Replies that were held for too long and reclaimed.
    pub reclaimed_replies: u64,
    /// How often a worker slept.
    pub sleeps: u64,
    /// How often polling saved a sleep.
    pub polls_gained: u64,
    /// From when a request was seen to when its service began.
    pub queued: Summary,
    /// How long requests were served.
    pub service: Summary,
    /// What a call takes longer than that is in the list below, waiting and service together, ns.
    #[serde(default)]
    pub slow_ns: u64,
    /// How many took longer.
    #[serde(default)]
    pub slow: u64,
    /// The last of them, oldest first.
    pub slow_calls: Vec<SlowCall>,
}

impl Report {
    /// Whether other machines serve its calls.
    pub fn is_imported(&self) -> bool {
        !self.machines.is_empty()
    }
}

/// Counters of one worker. No other thread writes them, so a call costs no locked instruction for
/// them.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Tally {
    served: AtomicU64,
    overran: AtomicU64,
    /// Services that ended, however.
    calls: AtomicU64,
    pub(crate) sleeps: AtomicU64,
    pub(crate) polls_gained: AtomicU64,
    queued: Histogram,
    service: Histogram,
}

impl Tally {
    /// A service ended.
    #[inline]
    pub(crate) fn call(&self, queued_ns: u64, service_ns: u64) {
        bump(&self.calls);
        self.queued.record_alone(queued_ns);
        self.service.record_alone(service_ns);
    }

    /// What was served is answered.
    #[inline]
    pub(crate) fn served(&self, overran: bool) {
        bump(&self.served);
        if overran {
            bump(&self.overran);
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) workers: Vec<Tally>,
    late: AtomicU64,
    refused: [AtomicU64; Refusal::ALL.len()],
    cancelled: AtomicU64,
    expired: AtomicU64,
    failed: AtomicU64,
    pub(crate) abandoned: AtomicU64,
    pub(crate) broken_clients: AtomicU64,
    broken: [AtomicU64; Broken::ALL.len()],
    pub(crate) refused_connections: AtomicU64,
    pub(crate) reclaimed: AtomicU64,
    pub(crate) slow: AtomicU64,
    slow_calls: Mutex<VecDeque<SlowCall>>,
}

pub(crate) fn add(counter: &AtomicU64, n: u64) {
    // Relaxed: a counter that nothing else depends on.
    counter.fetch_add(n, Ordering::Relaxed);
}

pub(crate) fn get(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

impl Counters {
    pub(crate) fn new(workers: usize) -> Counters {
        Counters { workers: (0..workers).map(|_| Tally::default()).collect(), ..Counters::default() }
    }

    fn sum(&self, of: impl Fn(&Tally) -> &AtomicU64) -> u64 {
        self.workers.iter().map(|tally| get(of(tally))).sum()
    }

    /// Services that ended, however.
    pub(crate) fn calls(&self) -> u64 {
        self.sum(|tally| &tally.calls)
    }

    /// How often a worker slept.
    pub(crate) fn sleeps(&self) -> u64 {
        self.sum(|tally| &tally.sleeps)
    }

    /// How often polling saved a sleep.
    pub(crate) fn polls_gained(&self) -> u64 {
        self.sum(|tally| &tally.polls_gained)
    }

    /// How long requests waited.
    pub(crate) fn queued(&self) -> Summary {
        Histogram::summary_of(self.workers.iter().map(|tally| &tally.queued))
    }

    /// How long they were served.
    pub(crate) fn service(&self) -> Summary {
        Histogram::summary_of(self.workers.iter().map(|tally| &tally.service))
    }

    /// Counts an answer that was sent, of what was not served; what was is in the worker's tally.
    pub(crate) fn answered(&self, status: Status) {
        let counter = match status {
            Status::Served => return,
            Status::Late => &self.late,
            Status::Refused(reason) => {
                let index = Refusal::ALL.iter().position(|r| *r == reason).unwrap_or(0);
                &self.refused[index]
            }
            Status::Cancelled => &self.cancelled,
            Status::Expired => &self.expired,
            Status::Failed => &self.failed,
        };
        add(counter, 1);
    }

    /// Counts a client that was disconnected.
    pub(crate) fn sent_away(&self, broken: Broken) {
        add(&self.broken_clients, 1);
        if let Some(index) = Broken::ALL.iter().position(|b| *b == broken) {
            add(&self.broken[index], 1);
        }
    }

    pub(crate) fn broken_by(&self) -> BTreeMap<String, u64> {
        let counts = Broken::ALL.iter().zip(&self.broken).map(|(broken, n)| (broken.name().to_string(), get(n)));
        counts.filter(|(_, n)| *n > 0).collect()
    }

    pub(crate) fn slow(&self, call: SlowCall) {
        add(&self.slow, 1);
        let mut slow = lock(&self.slow_calls);
        if slow.len() == SLOW_CALLS {
            slow.pop_front();
        }
        slow.push_back(call);
    }

    pub(crate) fn slow_calls(&self) -> Vec<SlowCall> {
        lock(&self.slow_calls).iter().cloned().collect()
    }

    pub(crate) fn answers(&self) -> Answers {
        let refused = |reason| Refusal::ALL.iter().position(|r| *r == reason).map_or(0, |i| get(&self.refused[i]));
        Answers {
            served: self.sum(|tally| &tally.served),
            overran: self.sum(|tally| &tally.overran),
            late: get(&self.late),
            refused_queue_full: refused(Refusal::QueueFull),
            refused_admission: refused(Refusal::Admission),
            refused_memory: refused(Refusal::Memory),
            refused_reply_memory: refused(Refusal::ReplyMemory),
            refused_stopping: refused(Refusal::Stopping),
            cancelled: get(&self.cancelled),
            expired: get(&self.expired),
            failed: get(&self.failed),
            abandoned: get(&self.abandoned),
        }
    }
}
