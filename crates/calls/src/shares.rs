//! Shares: which client comes next where several ask, so that none takes the time of the others by
//! short deadlines or by many requests.
//!
//! # Rule
//! Each user whose clients ask has an equal share of the workers' time, and each of its clients an
//! equal part of that. A client has a *debt instant*: the time by which its share would have paid
//! for all that it was served. A service of length `s` moves it on by `s * n` from the later of
//! itself and the service's beginning, where `1 / n` is the client's share; a user has one too. The
//! next client is the one with the earliest of
//!
//! ```text
//! max(deadline of its first request, its debt instant, its user's debt instant)
//! ```
//!
//! So a client within its share is served by its deadlines alone, and so is each client where there
//! is time for all. A client beyond its share is served like one whose deadlines are as late as its
//! debt instant. What is never used is not saved up, and who asks alone has no debt. Debts up to an
//! allowance of a few services do not count, so that equals are served as they come.
//!
//! # What holds
//! A request of a client within its share that comes `d` before its deadline is served in time if
//! its client's work up to that deadline is not more than its share of `d`, less what a service
//! takes (none is interrupted) and the allowance: other clients are ahead of it only with what
//! their own shares of `d` hold.
//!
//! # Cost
//! A request is in a queue of its client's besides that of all, which costs as a second queue of
//! that client's length does (`order_10k` of `rpc_bench`, with shares and without). Nothing is
//! looked for while the request that is due first belongs to a client without such a debt. Else all
//! clients that wait are looked at: a few ns each.
//!
//! Best effort comes after all deadlines, also across clients: a share is of what deadlines ask
//! for.
//!
//! Time is charged when a service begins, as measured before, and corrected when it ends: many
//! workers do not serve one client all at once.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use crate::queue::{Handle, Queue};

/// Services after which a measure is believed.
const ENOUGH: u32 = 8;
/// Users that are remembered without clients, for their debts.
const REMEMBERED: usize = 256;

/// How long services take: a mean that follows the last ones, and the mean deviation from it, as
/// TCP does for round trips (RFC 6298).
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Estimate {
    mean_ns: u64,
    deviation_ns: u64,
    seen: u32,
}

impl Estimate {
    pub(crate) fn learn(&mut self, took_ns: u64) {
        if self.seen == 0 {
            self.mean_ns = took_ns;
        } else {
            let off = self.mean_ns.abs_diff(took_ns);
            self.deviation_ns = self.deviation_ns - self.deviation_ns / 4 + off / 4;
            self.mean_ns = self.mean_ns - self.mean_ns / 8 + took_ns / 8;
        }
        self.seen = self.seen.saturating_add(1);
    }

    /// Mean and deviation, once enough was seen.
    pub(crate) fn known(&self) -> Option<(u64, u64)> {
        (self.seen >= ENOUGH).then_some((self.mean_ns, self.deviation_ns))
    }
}

#[derive(Debug)]
struct Client {
    user: u32,
    /// What waits, in the client's own order; each names its place in the queue of all.
    queue: Queue<Handle>,
    /// Work that waits, ns.
    work_ns: u64,
    /// Services under way.
    running: u32,
    debt_ns: u64,
    service: Estimate,
}

impl Client {
    fn new(user: u32) -> Client {
        let queue = Queue::new(false);
        Client { user, queue, work_ns: 0, running: 0, debt_ns: 0, service: Estimate::default() }
    }

    fn asks(&self) -> bool {
        self.running > 0 || !self.queue.is_empty()
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct User {
    clients: u32,
    /// Its clients that wait or are served.
    asking: u32,
    debt_ns: u64,
}

/// See the module's head.
#[derive(Debug)]
pub(crate) struct Shares {
    on: bool,
    workers: u64,
    clients: Vec<Option<Client>>,
    users: BTreeMap<u32, User>,
    /// Users of whose clients some wait or are served.
    asking: u64,
}

impl Shares {
    pub(crate) fn new(on: bool, workers: u32) -> Shares {
        let workers = workers.max(1).into();
        Shares { on, workers, clients: Vec::new(), users: BTreeMap::new(), asking: 0 }
    }

    pub(crate) fn join(&mut self, client: u32, user: u32) {
        let at = client as usize;
        if self.clients.len() <= at {
            self.clients.resize_with(at + 1, || None);
        }
        self.clients[at] = Some(Client::new(user));
        self.users.entry(user).or_default().clients += 1;
    }

    /// A client goes. Its user.
    pub(crate) fn leave(&mut self, client: u32) -> Option<u32> {
        let gone = self.clients.get_mut(client as usize).and_then(Option::take)?;
        if gone.asks() {
            self.asks_no_more(gone.user);
        }
        if let Some(user) = self.users.get_mut(&gone.user) {
            user.clients -= 1;
        }
        if self.users.len() > REMEMBERED {
            self.users.retain(|_, user| user.clients > 0);
        }
        Some(gone.user)
    }

    fn client(&mut self, client: u32) -> Option<&mut Client> {
        self.clients.get_mut(client as usize).and_then(Option::as_mut)
    }

    /// How long services for this client take.
    pub(crate) fn service(&self, client: u32) -> Option<Estimate> {
        self.clients.get(client as usize).and_then(Option::as_ref).map(|client| client.service)
    }

    fn begins_to_ask(&mut self, user: u32) {
        let user = self.users.entry(user).or_default();
        user.asking += 1;
        self.asking += u64::from(user.asking == 1);
    }

    fn asks_no_more(&mut self, user: u32) {
        let user = self.users.entry(user).or_default();
        user.asking = user.asking.saturating_sub(1);
        self.asking -= u64::from(user.asking == 0);
    }

    /// A request waits. Its handle in the client's own queue.
    pub(crate) fn waits(&mut self, client: u32, rank: u64, work_ns: u64, handle: Handle) -> Handle {
        if self.client(client).is_none() {
            self.join(client, client);
        }
        if !self.on {
            return 0;
        }
        let Some(one) = self.client(client) else { return 0 };
        let (asked, user) = (one.asks(), one.user);
        one.work_ns = one.work_ns.saturating_add(work_ns);
        let own = one.queue.insert(rank, u64::MAX, work_ns, handle);
        if !asked {
            self.begins_to_ask(user);
        }
        own
    }

    pub(crate) fn waits_no_more(&mut self, client: u32, own: Handle) {
        if !self.on {
            return;
        }
        let Some(one) = self.client(client) else { return };
        if let Some((_, work_ns)) = one.queue.remove_with_work(own) {
            one.work_ns = one.work_ns.saturating_sub(work_ns);
            let user = one.user;
            if !one.asks() {
                self.asks_no_more(user);
            }
        }
    }

    pub(crate) fn postpone(&mut self, client: u32, own: Handle, rank: u64) {
        if self.on
            && let Some(one) = self.client(client)
        {
            one.queue.postpone(own, rank);
        }
    }

    /// The debt instant that counts for a client.
    fn debt_of(&self, client: &Client) -> u64 {
        client.debt_ns.max(self.users.get(&client.user).map_or(0, |user| user.debt_ns))
    }

    /// Which request is served first, where that is another one than the first of all, which is
    /// this client's and due at `deadline_ns`.
    pub(crate) fn first(&self, now: u64, allowance_ns: u64, client: u32, deadline_ns: u64) -> Option<Handle> {
        let first = self.clients.get(client as usize)?.as_ref()?;
        // What counts of a debt: that which is still to come, beyond the allowance.
        let debt = |client: &Client| match self.debt_of(client).saturating_sub(allowance_ns) {
            past if past <= now => 0,
            debt => debt,
        };
        if !self.on || debt(first) <= if deadline_ns == u64::MAX { 0 } else { deadline_ns } {
            return None;
        }
        let waiting = self.clients.iter().flatten().filter_map(|client| {
            let own = client.queue.first()?;
            let (rank, arrival) = client.queue.key(own)?;
            let handle = *client.queue.get(own)?;
            let debt = debt(client);
            Some(((rank.max(debt), debt, rank, arrival), handle))
        });
        waiting.min_by_key(|(key, _)| *key).map(|(_, handle)| handle)
    }

    /// One part of how many a client's share is, and its user's.
    fn parts(&self, client: &Client) -> (u64, u64) {
        let users = self.asking.max(1);
        let clients = self.users.get(&client.user).map_or(1, |user| u64::from(user.asking)).max(1);
        (users.saturating_mul(clients), users)
    }

    /// Whether a client within its share has the time for one more request by its share alone.
    pub(crate) fn leaves_time(&self, client: u32, now: u64, start: u64, work_ns: u64, deadline_ns: u64) -> bool {
        let Some(Some(client)) = self.clients.get(client as usize) else { return false };
        let (parts, users) = self.parts(client);
        // One that begins to ask now adds itself.
        let parts = if client.asks() { parts } else { parts.saturating_add(users) };
        let own = client.work_ns.saturating_add(work_ns).saturating_mul(parts);
        self.on && parts > 1 && self.debt_of(client) <= now && start.saturating_add(own) <= deadline_ns
    }

    /// A service begins, and is taken to last for so long.
    pub(crate) fn begins(&mut self, client: u32, now: u64, work_ns: u64) {
        if !self.on {
            return;
        }
        let Some(one) = self.client(client) else { return };
        let (asked, user) = (one.asks(), one.user);
        one.running += 1;
        if !asked {
            self.begins_to_ask(user);
        }
        let Some(Some(one)) = self.clients.get(client as usize) else { return };
        let (parts, users) = self.parts(one);
        let work_ns = work_ns / self.workers;
        let after = |debt: u64, parts: u64| match parts {
            // Alone: there is none to owe it to.
            1 => 0,
            parts => debt.max(now).saturating_add(work_ns.saturating_mul(parts)),
        };
        if let Some(user) = self.users.get_mut(&user) {
            user.debt_ns = after(user.debt_ns, users);
        }
        if let Some(one) = self.client(client) {
            one.debt_ns = after(one.debt_ns, parts);
        }
    }

    /// It has ended, after so long.
    pub(crate) fn ends(&mut self, client: u32, work_ns: u64, took_ns: u64, measured: bool) {
        if let Some(one) = self.client(client).filter(|_| measured) {
            one.service.learn(took_ns);
        }
        if !self.on {
            return;
        }
        let Some(Some(one)) = self.clients.get(client as usize) else { return };
        let (parts, users) = self.parts(one);
        let user = one.user;
        let (work_ns, took_ns) = (work_ns / self.workers, took_ns / self.workers);
        if let Some(user) = self.users.get_mut(&user) {
            user.debt_ns = corrected(user.debt_ns, users, work_ns, took_ns);
        }
        let Some(one) = self.client(client) else { return };
        one.debt_ns = corrected(one.debt_ns, parts, work_ns, took_ns);
        one.running = one.running.saturating_sub(1);
        if !one.asks() {
            self.asks_no_more(user);
        }
    }

    /// The same for a service whose client has gone meanwhile: the user's next client inherits what
    /// it took.
    pub(crate) fn ends_for_user(&mut self, user: u32, work_ns: u64, took_ns: u64) {
        let Some(known) = self.users.get_mut(&user).filter(|_| self.on) else { return };
        // One that asks for nothing now counts itself, as when the service began.
        let users = (self.asking + u64::from(known.asking == 0)).max(1);
        known.debt_ns = corrected(known.debt_ns, users, work_ns / self.workers, took_ns / self.workers);
    }
}

/// A debt that was charged for a service of `work_ns`, corrected now that it took `took_ns`.
fn corrected(debt_ns: u64, parts: u64, work_ns: u64, took_ns: u64) -> u64 {
    match (debt_ns, took_ns >= work_ns) {
        (0, _) => 0,
        (debt_ns, true) => debt_ns.saturating_add((took_ns - work_ns).saturating_mul(parts)),
        (debt_ns, false) => debt_ns.saturating_sub((work_ns - took_ns).saturating_mul(parts)),
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::*;
    use crate::schedule::{Late, Next, Order, Rules, Schedule};

    const US: u64 = 1_000;
    const MS: u64 = 1_000_000;
    const WORK: u64 = 500 * US;

    fn rules(shares: bool, admission: bool) -> Rules {
        Rules {
            pending: 10_000,
            order: Order::Edf,
            late: Late::Refuse,
            admission,
            budget_ns: WORK,
            shares,
            workers: 1,
            ttl_ns: u64::MAX,
        }
    }

    /// A source of requests: which client of which user, how many it keeps under way, or how often
    /// it asks, and their deadlines.
    #[derive(Clone, Copy)]
    struct Requester {
        user: u32,
        under_way: u32,
        every_ns: u64,
        within_ns: u64,
        work_ns: u64,
    }

    const HONEST: Requester = Requester { user: 1, under_way: 0, every_ns: 10 * MS, within_ns: 8 * MS, work_ns: WORK };
    const GREEDY: Requester = Requester { user: 2, under_way: 16, every_ns: 0, within_ns: 4 * MS, work_ns: WORK };

    /// What came of a source's requests: how many there were, how many were in time, how many were
    /// served.
    #[derive(Clone, Copy, Debug, Default)]
    struct Came {
        asked: u32,
        in_time: u32,
        served: u32,
    }

    /// Runs them for a virtual second and a half.
    fn run(rules: Rules, sources: &[Requester]) -> Vec<Came> {
        let mut schedule = Schedule::new(rules);
        for (client, source) in sources.iter().enumerate() {
            schedule.join(client as u32, source.user);
        }
        let mut state: Vec<(u64, u32)> = vec![(0, 0); sources.len()];
        let mut counts = vec![Came::default(); sources.len()];
        let mut now = 0;
        while now < 1500 * MS {
            for (client, source) in sources.iter().enumerate() {
                let (next, under_way) = &mut state[client];
                let mut ask = |at: u64| {
                    counts[client].asked += 1;
                    schedule.offer(at, client as u32, at + source.within_ns, 0, (client, at + source.within_ns)).is_ok()
                };
                if source.every_ns > 0 {
                    while *next <= now {
                        ask(*next);
                        *next += source.every_ns;
                    }
                } else {
                    // One that is refused asks again when it next gets an answer.
                    while *under_way < source.under_way && ask(now) {
                        *under_way += 1;
                    }
                }
            }
            match schedule.next(now) {
                Some(Next::Serve { item: (client, due), .. }) => {
                    let began = now;
                    now += sources[client].work_ns;
                    schedule.done(client as u32, began, Some(now));
                    counts[client].in_time += u32::from(now <= due);
                    counts[client].served += 1;
                    state[client].1 = state[client].1.saturating_sub(1);
                }
                Some(Next::Answer { item: (client, _), .. }) => state[client].1 = state[client].1.saturating_sub(1),
                None => now += 100 * US,
            }
        }
        counts
    }

    #[test]
    fn a_greedy_client_makes_no_honest_call_late() {
        for admission in [false, true] {
            let without = run(rules(false, admission), &[HONEST, GREEDY]);
            let with = run(rules(true, admission), &[HONEST, GREEDY]);
            assert_eq!((with[0].asked, with[0].in_time), (150, 150), "admission {admission}: {with:?}");
            // Admission that knows exactly how long each service takes does the same, at the price
            // of refusals.
            assert!(admission || without[0].in_time < 120, "the same without shares: {without:?}");
            // What is left is the greedy one's.
            assert!(with[1].served > 2500, "{with:?}");
        }
    }

    #[test]
    fn many_clients_of_one_user_have_that_users_share() {
        let mut sources = vec![Requester { within_ns: 6 * MS, ..HONEST }];
        sources.extend([GREEDY; 32]);
        let counts = run(rules(true, false), &sources);
        assert_eq!((counts[0].asked, counts[0].in_time), (150, 150), "{counts:?}");
        // Clients of the same user are apart from each other as well.
        let mut sources = vec![Requester { user: 2, every_ns: 40 * MS, within_ns: 30 * MS, ..HONEST }];
        sources.extend([GREEDY; 16]);
        let counts = run(rules(true, false), &sources);
        assert_eq!(counts[0].asked, counts[0].in_time, "{counts:?}");
    }

    #[test]
    fn clients_that_ask_for_all_there_is_get_equal_parts_whatever_their_deadlines_and_lengths() {
        let long = Requester { user: 3, work_ns: 4 * WORK, within_ns: 120 * MS, ..GREEDY };
        let counts = run(rules(true, false), &[GREEDY, long, Requester { user: 4, within_ns: 40 * MS, ..GREEDY }]);
        let time: Vec<u64> = [WORK, 4 * WORK, WORK].iter().zip(&counts).map(|(w, c)| w * u64::from(c.served)).collect();
        assert!(time.iter().all(|t| (350 * MS..650 * MS).contains(t)), "{time:?}");
    }

    #[test]
    fn who_hangs_up_in_the_middle_of_a_service_pays_for_all_of_it() {
        let mut schedule = Schedule::new(rules(true, false));
        let (mut now, mut times) = (0, [0; 2]);
        let mut waits = [None; 2];
        schedule.join(0, 1);
        schedule.join(1, 2);
        while now < 1500 * MS {
            for client in 0..2 {
                // The second one's deadlines are always the nearer ones.
                let due = now + 100 * MS - 50 * MS * u64::from(client);
                if waits[client as usize].is_none() {
                    waits[client as usize] = schedule.offer(now, client, due, 0, client).ok();
                }
            }
            let Some(Next::Serve { item: client, .. }) = schedule.next(now) else { panic!("both wait") };
            waits[client as usize] = None;
            let (began, work) = (now, if client == 0 { WORK } else { 20 * WORK });
            if client == 1 {
                schedule.leave(1);
            }
            now += work;
            schedule.done(client, began, Some(now));
            if client == 1 {
                schedule.join(1, 2);
            }
            times[client as usize] += work;
        }
        assert!(times[1] < 900 * MS, "user 2 had {} ms of 1500", times[1] / MS);
    }

    #[test]
    fn where_there_is_time_for_all_the_order_is_that_of_deadlines() {
        // The first has more than half of the time, with short deadlines; both together have less
        // than all.
        let short = Requester { user: 1, under_way: 0, every_ns: MS, within_ns: 900 * US, work_ns: WORK };
        let long = Requester { user: 2, under_way: 0, every_ns: 5 * MS, within_ns: 100 * MS, work_ns: WORK };
        let counts = run(rules(true, false), &[Requester { every_ns: 800 * US, within_ns: 1600 * US, ..short }, long]);
        assert!(counts.iter().all(|c| c.asked - c.in_time <= 1), "{counts:?}");
    }

    #[test]
    fn a_client_within_its_share_is_admitted_whatever_others_have_queued() {
        let mut schedule = Schedule::new(rules(true, true));
        schedule.join(0, 7);
        schedule.join(1, 8);
        // All that the next 100 ms hold is asked for and accepted.
        let accepted = (1..=400).filter(|n| schedule.offer(0, 1, n * WORK.min(100 * MS), 0, *n).is_ok()).count();
        assert!(accepted >= 200, "{accepted}");
        assert!(schedule.offer(0, 0, 4 * MS, 0, 0).is_ok());
        assert!(schedule.offer(0, 0, MS / 2, 0, 0).is_err(), "its own share does not leave the time");
    }

    #[test]
    fn services_are_measured() {
        let mut estimate = Estimate::default();
        (0..ENOUGH - 1).for_each(|_| estimate.learn(100));
        assert_eq!(estimate.known(), None);
        estimate.learn(100);
        assert_eq!(estimate.known(), Some((100, 0)));
        (0..100).for_each(|n| estimate.learn(if n % 2 == 0 { 8_000 } else { 12_000 }));
        let (mean, deviation) = estimate.known().unwrap();
        assert!((9_000..11_000).contains(&mean) && (1_500..2_500).contains(&deviation), "{mean} {deviation}");
    }
}
