//! The state of one machine's control plane. See the head of the crate for how it works.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use crate::claims::{Claims, Homes, Machine};
use crate::member::{Address, MAX_ADDRESSES, MAX_MEMBERS, MAX_NETWORKS, Mac, Member, mac_text};
use crate::message::{Change, Claim, Known, KnownAnswer, MAX_CHANGE_BYTES, MAX_CHANGES, MessageError, Network, Number};
use crate::moves::{Moves, Verdict};
use crate::report::{Conflict, Peer, PeerState};

/// Machines of one site: this one, and as many as a tunnel has remotes.
pub const MAX_MACHINES: usize = 129;
/// Changes by one machine that are looked at in a second, on average; as many may come at once.
/// Those beyond are left out, and asked for later.
pub const MAX_CHANGES_PER_S: u32 = 200;
/// How far a version may lie above the highest that is known for the same MAC address.
pub const MAX_JUMP: u64 = 1000;
/// How long one machine's refused messages are only counted, after an event said why.
const BETWEEN_WARNINGS: Duration = Duration::from_secs(60);

/// How a machine takes part.
#[derive(Clone, Debug)]
pub struct Settings {
    /// This machine's name.
    pub machine: String,
    /// How often each machine is asked.
    pub beat: Duration,
    /// A machine that was not heard for so long is forgotten.
    pub lease: Duration,
    /// As `lease`, where no machine is heard at all.
    pub alone: Duration,
}

impl Settings {
    /// A beat each 3 s, a lease of 15 s, and an hour alone.
    pub fn new(machine: &str) -> Settings {
        let [beat, lease, alone] = [3, 15, 3600].map(Duration::from_secs);
        Settings { machine: machine.into(), beat, lease, alone }
    }
}

/// A member that this machine has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Local {
    /// The member.
    pub member: Member,
    /// Whether it is behind a port of this machine. Otherwise this machine only keeps addresses for
    /// it.
    pub placed: bool,
    /// How long ago it sent its last frame; `None` if that is not known.
    pub silent_for: Option<Duration>,
}

/// What belongs to one machine, as a file for several machines says it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Home {
    /// The machine.
    pub machine: String,
    /// A member's name.
    pub name: Option<String>,
    /// The first and the last address; of a member both are the same.
    pub addresses: Option<(IpAddr, IpAddr)>,
    /// A member's MAC address.
    pub mac: Option<Mac>,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Send these bytes to all machines, for [`Control::heard`].
    Tell(Vec<u8>),
    /// Ask a machine [`Control::question`], and give its answer to [`Control::answered`].
    Ask(String),
    /// What a machine has in a network, in place of what it had.
    Table {
        /// The network.
        network: String,
        /// The machine.
        machine: String,
        /// Where the machine receives the network's tunnel; `None` where it has none.
        end: Option<IpAddr>,
        /// Its members that no other machine has, without addresses and names that others have.
        members: Vec<Member>,
    },
    /// A machine has left a network.
    Forget {
        /// The network.
        network: String,
        /// The machine.
        machine: String,
    },
    /// All addresses of this machine's leases that belong to members of other machines.
    Lost {
        /// The network.
        network: String,
        /// The addresses, in order.
        addresses: Vec<IpAddr>,
    },
    /// Something that an operator may want to know.
    Event(String),
}

#[derive(Clone, Debug, Default)]
struct Joined {
    end: Option<IpAddr>,
    macs: BTreeSet<Mac>,
}

#[derive(Clone, Debug, Default)]
struct Other {
    number: Option<Number>,
    heard: Option<Duration>,
    asked: Option<Duration>,
    /// Something was missed: it is asked as soon as it may be.
    behind: bool,
    is_gone: bool,
    networks: BTreeMap<String, Joined>,
    /// Changes that may still come now, and since when.
    tokens: f64,
    filled: Duration,
    refused: u64,
    warned: Option<Duration>,
}

impl Other {
    fn members(&self) -> usize {
        self.networks.values().map(|joined| joined.macs.len()).sum()
    }
}

/// The control plane of one machine.
#[derive(Clone, Debug)]
pub struct Control {
    settings: Settings,
    /// All machines that were ever named, this one among them, in order. A new one in the middle
    /// renumbers them; that happens once for each machine.
    names: Vec<String>,
    me: Machine,
    number: Number,
    own: BTreeMap<String, Joined>,
    others: BTreeMap<Machine, Other>,
    claims: BTreeMap<String, Claims>,
    moves: Moves,
    homes: BTreeMap<String, Vec<Home>>,
    /// How many members of a network were not announced.
    left_out: BTreeMap<String, usize>,
    /// Tables to be made again.
    dirty: BTreeSet<(String, Machine)>,
    lost: BTreeMap<String, Vec<IpAddr>>,
    actions: Vec<Action>,
    sent: u64,
}

impl Control {
    /// Without any other machine yet. `epoch` must be higher at each start of the machine's
    /// program, such as the time of its clock; if it is not, the others notice one beat later.
    pub fn new(settings: Settings, epoch: u64) -> Control {
        Control {
            names: vec![settings.machine.clone()],
            settings,
            me: 0,
            number: Number { epoch, count: 0 },
            own: BTreeMap::new(),
            others: BTreeMap::new(),
            claims: BTreeMap::new(),
            moves: Moves::default(),
            homes: BTreeMap::new(),
            left_out: BTreeMap::new(),
            dirty: BTreeSet::new(),
            lost: BTreeMap::new(),
            actions: Vec::new(),
            sent: 0,
        }
    }

    /// The number of a machine that is known, or becomes known now.
    fn machine(&mut self, name: &str) -> Option<Machine> {
        let at = match self.names.binary_search_by(|known| known.as_str().cmp(name)) {
            Ok(at) => return Some(at as Machine),
            Err(at) => at,
        };
        if self.names.len() >= MAX_MACHINES {
            return None;
        }
        self.names.insert(at, name.into());
        let at = at as Machine;
        let shift = |machine: Machine| if machine >= at { machine + 1 } else { machine };
        self.me = shift(self.me);
        self.others = std::mem::take(&mut self.others).into_iter().map(|(m, other)| (shift(m), other)).collect();
        self.dirty = std::mem::take(&mut self.dirty).into_iter().map(|(net, m)| (net, shift(m))).collect();
        for claims in self.claims.values_mut() {
            claims.renumber(shift);
        }
        self.moves.renumber(shift);
        self.others.insert(at, Other { tokens: f64::from(MAX_CHANGES_PER_S), ..Other::default() });
        let has_home = |homes: &[Home]| homes.iter().any(|home| home.machine == name);
        let at_home: Vec<String> =
            self.homes.iter().filter(|(_, homes)| has_home(homes)).map(|(network, _)| network.clone()).collect();
        at_home.iter().for_each(|network| self.set_homes(network));
        Some(at)
    }

    fn known(&self, name: &str) -> Option<Machine> {
        self.names.binary_search_by(|known| known.as_str().cmp(name)).ok().map(|at| at as Machine)
    }

    /// What belongs to which machine in each network, in place of what did in all networks. A
    /// machine that becomes known later has its things from then on.
    pub fn homes(&mut self, mut all: BTreeMap<String, Vec<Home>>) {
        all.retain(|_, homes| !homes.is_empty());
        let before = std::mem::replace(&mut self.homes, all);
        let networks: BTreeSet<&String> = before.keys().chain(self.homes.keys()).collect();
        let is_new = |network: &&String| before.get(*network) != self.homes.get(*network);
        let changed: Vec<String> = networks.into_iter().filter(is_new).cloned().collect();
        changed.iter().for_each(|network| self.set_homes(network));
    }

    /// Has a network's claims follow what belongs to the machines that are known.
    fn set_homes(&mut self, network: &str) {
        let mut all = Homes::default();
        for home in self.homes.get(network).into_iter().flatten() {
            let Some(machine) = self.known(&home.machine) else { continue };
            if let Some(name) = &home.name {
                all.names.insert(name.clone(), machine);
            }
            if let Some(mac) = home.mac {
                all.macs.insert(mac, machine);
            }
            match home.addresses {
                Some((first, last)) if first == last => drop(all.addresses.insert(first, machine)),
                Some((first, last)) => drop(all.parts.insert(first, (last, machine))),
                None => {}
            }
        }
        let mut touched = BTreeSet::new();
        let claims = self.claims.entry(network.into()).or_default();
        claims.set_homes(all, &mut touched);
        if claims.is_empty() {
            self.claims.remove(network);
        }
        self.dirty.extend(touched.into_iter().map(|machine| (network.to_string(), machine)));
    }

    /// Replaces what a machine claims of a MAC address.
    fn claim(&mut self, network: &str, machine: Machine, mac: Mac, claim: Option<Claim>, now: Duration) {
        let mut touched = BTreeSet::new();
        let claims = self.claims.entry(network.into()).or_default();
        let before = claims.winner(mac);
        let version = claim.as_ref().map_or(0, |claim| claim.version);
        claims.set(machine, mac, claim, &mut touched);
        // Among equal versions, names decide, and nothing was taken.
        let lower = |claim: &Claim| claim.placed && claim.version < version;
        let from = before.filter(|from| claims.of(*from, mac).is_some_and(lower));
        if let Some(from) = from.filter(|from| *from != machine && claims.winner(mac) == Some(machine)) {
            self.takes(network, mac, (from, machine), now);
        }
        if self.claims.get(network).is_some_and(Claims::is_empty) {
            self.claims.remove(network);
        }
        self.dirty.extend(touched.into_iter().map(|machine| (network.to_string(), machine)));
    }

    /// A machine takes a member from another one that still claims it ([`Moves::takes`]).
    fn takes(&mut self, network: &str, mac: Mac, (from, to): (Machine, Machine), now: Duration) {
        let home = self.claims.get(network).and_then(|claims| claims.home(mac));
        let keeper = self.moves.takes((network.to_string(), mac), (from, to), home, now);
        let Some(keeper) = keeper else { return };
        let (claims, keeps) = (if keeper == from { to } else { from }, &self.names[keeper as usize]);
        let what = mac_text(mac);
        let why = format!(
            "two machines have a member with the MAC address {what} in {network}: it came back to {keeps}, which keeps it"
        );
        self.refuse(claims, &why, now);
        self.keep(network, mac, Some(keeper));
    }

    fn keep(&mut self, network: &str, mac: Mac, keeper: Option<Machine>) {
        let mut touched = BTreeSet::new();
        if let Some(claims) = self.claims.get_mut(network) {
            claims.keep(mac, keeper, &mut touched);
        }
        self.dirty.extend(touched.into_iter().map(|machine| (network.to_string(), machine)));
    }

    /// Ends what was remembered of members that were taken long ago.
    fn forget_taken(&mut self, now: Duration) {
        for key in self.moves.taken_long_ago(now) {
            let (network, mac) = &key;
            // A member that two machines still claim stays where it is.
            let claims = self.claims.get(network);
            let placed = |claims: &Claims| claims.all_of(*mac).filter(|claim| claim.placed).count();
            if claims.is_some_and(|claims| claims.keeper(*mac).is_some() && placed(claims) > 1) {
                continue;
            }
            self.keep(network, *mac, None);
            self.moves.forget_taken(&key);
        }
    }

    /// Whether a member that this machine has, and that another one claims, is silent for so long
    /// that it has moved there.
    fn gives_up(&self, network: &str, mac: Mac, silent: Option<Duration>, now: Duration) -> bool {
        let Some(claims) = self.claims.get(network) else { return false };
        let Some(own) = claims.of(self.me, mac) else { return false };
        if claims.rival_placed(self.me, mac).is_none_or(|rival| rival <= own.version) {
            return false;
        }
        let keeps = claims.keeper(mac) == Some(self.me);
        self.moves.has_moved_away(&(network.to_string(), mac), keeps, silent, now)
    }

    /// What this machine has in a network now, in place of what it had, and where it receives the
    /// network's tunnel. Members beyond [`MAX_MEMBERS`], and wrong ones, are left out, which an
    /// event says. An empty list without an end leaves the network.
    pub fn local(&mut self, network: &str, end: Option<IpAddr>, members: Vec<Local>, now: Duration) {
        let others: usize = self.own.iter().filter(|(name, _)| *name != network).map(|(_, j)| j.macs.len()).sum();
        let room = MAX_MEMBERS.saturating_sub(others);
        let mut wanted: BTreeMap<Mac, Local> = BTreeMap::new();
        let mut left_out = 0;
        for local in members {
            if local.member.check().is_err() || wanted.len() >= room {
                left_out += 1;
            } else {
                wanted.insert(local.member.mac, local);
            }
        }
        let before = self.own.remove(network).unwrap_or_default();
        let is_new_end = before.end != end;
        let mut came = Vec::new();
        for (mac, local) in &wanted {
            let old = self.claims.get(network).and_then(|claims| claims.of(self.me, *mac)).cloned();
            let rival = self.claims.get(network).and_then(|claims| claims.rival(self.me, *mac));
            // One that was here, and that no other machine has, is only silent.
            let placed = local.placed || (rival.is_none() && old.as_ref().is_some_and(|old| old.placed));
            // One that another machine claims, and that sends nothing here, has moved.
            let placed = placed && !(local.silent_for.is_some() && self.gives_up(network, *mac, local.silent_for, now));
            let silent_for = local.silent_for.filter(|_| local.placed);
            let version = self.version(network, *mac, (old.as_ref(), rival), silent_for, now);
            let claim = Claim { member: local.member.clone(), version, placed };
            if old.as_ref() != Some(&claim) {
                self.claim(network, self.me, *mac, Some(claim.clone()), now);
                came.push(claim);
            }
        }
        // One that came here, while another machine keeps addresses for it, is only silent too: the
        // switch forgets it sooner than that machine its lease.
        let claims = self.claims.get(network);
        let is_kept = |mac: &Mac| {
            let kept = |claims: &Claims| claims.winner(*mac) == Some(self.me) && claims.rival(self.me, *mac).is_some();
            end.is_some() && claims.is_some_and(kept)
        };
        let missing = before.macs.iter().filter(|mac| !wanted.contains_key(*mac));
        let (kept, went): (Vec<Mac>, Vec<Mac>) = missing.copied().partition(is_kept);
        for mac in &went {
            self.claim(network, self.me, *mac, None, now);
            self.moves.leaves(&(network.to_string(), *mac));
        }
        let were_left_out = match left_out {
            0 => self.left_out.remove(network),
            _ => self.left_out.insert(network.into(), left_out),
        };
        if left_out > 0 && were_left_out != Some(left_out) {
            let why = format!("{left_out} members of {network} are not announced: too many, or not valid");
            self.actions.push(Action::Event(why));
        }
        let joined = Joined { end, macs: wanted.into_keys().chain(kept).collect() };
        if end.is_some() || !joined.macs.is_empty() {
            self.own.insert(network.into(), joined);
        }
        if is_new_end || !came.is_empty() || !went.is_empty() {
            self.tell(network, end, came, went);
        }
    }

    /// The version of this machine's claim to a member that it has.
    fn version(
        &mut self,
        network: &str,
        mac: Mac,
        (old, rival): (Option<&Claim>, Option<u64>),
        silent: Option<Duration>,
        now: Duration,
    ) -> u64 {
        let key = (network.to_string(), mac);
        // With no other claim, versions begin again. So they stay small.
        let Some(rival) = rival else {
            self.moves.is_alone(&key);
            return 1;
        };
        let mine = old.map_or(1, |claim| claim.version);
        if rival < mine {
            return mine;
        }
        match self.moves.meets(key, (old.map(|claim| claim.version), rival), silent, now) {
            Verdict::Won => return rival.saturating_add(1),
            Verdict::Two => {
                let what = format!("{}: two machines have a member with this MAC address in {network}", mac_text(mac));
                self.actions.push(Action::Event(what));
            }
            Verdict::Unchanged => {}
        }
        mine
    }

    /// Tells all machines, in as many messages as it takes.
    fn tell(&mut self, network: &str, end: Option<IpAddr>, mut came: Vec<Claim>, mut went: Vec<Mac>) {
        loop {
            let now_went: Vec<Mac> = went.drain(..went.len().min(MAX_CHANGES)).collect();
            let room = MAX_CHANGES - now_went.len();
            let now_came: Vec<Claim> = came.drain(..came.len().min(room)).collect();
            self.number.count += 1;
            let networks = vec![Network { name: network.into(), end, came: now_came, went: now_went }];
            let bytes = Change { number: self.number, networks }.encode();
            debug_assert!(bytes.len() <= MAX_CHANGE_BYTES, "128 members are at most 53 KB");
            self.sent += 1;
            self.actions.push(Action::Tell(bytes));
            if came.is_empty() && went.is_empty() {
                return;
            }
        }
    }

    /// The question for a machine.
    pub fn question(&self, machine: &str) -> Vec<u8> {
        let number = self.known(machine).and_then(|m| self.others.get(&m)).and_then(|other| other.number);
        Known { number }.encode()
    }

    /// The answer to another machine's question.
    ///
    /// # Errors
    /// [`MessageError`]: what came is no question.
    pub fn answer(&self, question: &[u8]) -> Result<Vec<u8>, MessageError> {
        if Known::decode(question)?.number == Some(self.number) {
            return Ok(KnownAnswer::Same.encode());
        }
        let networks = self.own.iter().map(|(name, joined)| {
            let of = |mac: &Mac| self.claims.get(name).and_then(|claims| claims.of(self.me, *mac)).cloned();
            let came = joined.macs.iter().filter_map(of).collect();
            Network { name: name.clone(), end: joined.end, came, went: Vec::new() }
        });
        Ok(KnownAnswer::All(Change { number: self.number, networks: networks.collect() }).encode())
    }

    /// A machine may be there: it is asked from now on.
    pub fn expect(&mut self, machine: &str) {
        self.machine(machine);
    }

    /// A machine is there, whatever it says.
    pub fn seen(&mut self, machine: &str, now: Duration) {
        let Some(machine) = self.machine(machine).filter(|machine| *machine != self.me) else { return };
        self.alive(machine, now);
    }

    fn alive(&mut self, machine: Machine, now: Duration) {
        let Some(other) = self.others.get_mut(&machine) else { return };
        let is_new = other.heard.is_none() || other.is_gone;
        (other.heard, other.is_gone) = (Some(now), false);
        if is_new {
            other.behind = true;
            let name = &self.names[machine as usize];
            self.actions.push(Action::Event(format!("machine {name} is there")));
        }
    }

    /// Whether so much of a machine may be looked at now.
    fn has_tokens(&mut self, machine: Machine, tokens: f64, now: Duration) -> bool {
        let Some(other) = self.others.get_mut(&machine) else { return false };
        let rate = f64::from(MAX_CHANGES_PER_S);
        let filled = other.tokens + now.saturating_sub(other.filled).as_secs_f64() * rate;
        (other.tokens, other.filled) = (filled.min(rate), now);
        let has = other.tokens >= tokens;
        if has {
            other.tokens -= tokens;
        } else {
            other.behind = true;
            self.refuse(machine, "it sends more changes than are looked at", now);
        }
        has
    }

    fn refuse(&mut self, machine: Machine, why: &str, now: Duration) {
        let Some(other) = self.others.get_mut(&machine) else { return };
        other.refused += 1;
        if other.warned.is_none_or(|warned| now.saturating_sub(warned) > BETWEEN_WARNINGS) {
            other.warned = Some(now);
            let name = &self.names[machine as usize];
            self.actions.push(Action::Event(format!("machine {name}: {why}")));
        }
    }

    /// Counts a message that is none.
    fn sound<T>(&mut self, from: Machine, message: Result<T, MessageError>, now: Duration) -> Result<T, MessageError> {
        message.inspect_err(|error| self.refuse(from, &error.to_string(), now))
    }

    /// Takes a [`Action::Tell`] of another machine.
    ///
    /// # Errors
    /// [`MessageError`]: the message was ignored. It is counted.
    pub fn heard(&mut self, machine: &str, message: &[u8], now: Duration) -> Result<(), MessageError> {
        let Some(from) = self.machine(machine).filter(|machine| *machine != self.me) else { return Ok(()) };
        self.alive(from, now);
        if !self.has_tokens(from, 1.0, now) {
            return Ok(());
        }
        let change = self.sound(from, Change::decode(message), now)?;
        let follows = Number { epoch: change.number.epoch, count: change.number.count.wrapping_sub(1) };
        let Some(other) = self.others.get_mut(&from) else { return Ok(()) };
        match other.number {
            Some(number) if number == follows => {}
            // Of before the answer that is known already.
            Some(number) if number.epoch == follows.epoch && change.number.count <= number.count => return Ok(()),
            _ => {
                other.behind = true;
                return Ok(());
            }
        }
        for network in &change.networks {
            network.went.iter().for_each(|mac| self.went(from, &network.name, *mac, now));
        }
        self.take(from, change, now);
        Ok(())
    }

    /// Takes what came on a machine; what went was removed before, which makes room. Where
    /// something is refused, all is asked for again, at the next beat.
    fn take(&mut self, machine: Machine, change: Change, now: Duration) {
        let mut all_taken = true;
        for network in change.networks {
            if network.end.is_some() || !network.came.is_empty() || self.is_in(machine, &network.name) {
                all_taken &= self.joined(machine, &network.name, network.end, now);
            }
            for claim in network.came {
                all_taken &= self.came(machine, &network.name, claim, now);
            }
            self.maybe_leaves(machine, &network.name, now);
        }
        if let Some(other) = self.others.get_mut(&machine) {
            other.number = all_taken.then_some(change.number);
        }
    }

    fn is_in(&self, machine: Machine, network: &str) -> bool {
        self.others.get(&machine).is_some_and(|other| other.networks.contains_key(network))
    }

    /// Takes a machine's answer to [`Control::question`].
    ///
    /// # Errors
    /// [`MessageError`]: the answer was ignored. It is counted.
    pub fn answered(&mut self, machine: &str, answer: &[u8], now: Duration) -> Result<(), MessageError> {
        let Some(from) = self.machine(machine).filter(|machine| *machine != self.me) else { return Ok(()) };
        self.alive(from, now);
        let state = self.sound(from, KnownAnswer::decode(answer), now)?;
        let Some(other) = self.others.get_mut(&from) else { return Ok(()) };
        other.behind = false;
        let KnownAnswer::All(all) = state else { return Ok(()) };
        if other.number.is_some_and(|n| n.epoch == all.number.epoch && n.count > all.number.count) {
            // A change that was told after the answer came before it.
            return Ok(());
        }
        let before: BTreeMap<String, BTreeSet<Mac>> =
            other.networks.iter().map(|(name, joined)| (name.clone(), joined.macs.clone())).collect();
        // A whole answer is as much as so many changes.
        let members: usize = all.networks.iter().map(|network| network.came.len()).sum();
        if !self.has_tokens(from, 1.0 + (members / MAX_CHANGES) as f64, now) {
            return Ok(());
        }
        let stays: BTreeMap<&str, BTreeSet<Mac>> =
            all.networks.iter().map(|n| (n.name.as_str(), n.came.iter().map(|c| c.member.mac).collect())).collect();
        for (name, macs) in &before {
            match stays.get(name.as_str()) {
                Some(stay) => macs.difference(stay).for_each(|mac| self.went(from, name, *mac, now)),
                None => self.leaves(from, name, now),
            }
        }
        self.take(from, all, now);
        Ok(())
    }

    /// Returns whether it may be in the network.
    fn joined(&mut self, machine: Machine, network: &str, end: Option<IpAddr>, now: Duration) -> bool {
        let Some(other) = self.others.get_mut(&machine) else { return false };
        if !other.networks.contains_key(network) && other.networks.len() >= MAX_NETWORKS {
            self.refuse(machine, "it is in more networks than it may", now);
            return false;
        }
        let joined = other.networks.entry(network.into()).or_default();
        if joined.end != end {
            joined.end = end;
            self.dirty.insert((network.into(), machine));
        }
        true
    }

    /// Returns whether the claim is taken.
    fn came(&mut self, machine: Machine, network: &str, claim: Claim, now: Duration) -> bool {
        let mac = claim.member.mac;
        let rival = self.claims.get(network).and_then(|claims| claims.rival(machine, mac));
        let rival = rival.unwrap_or_default();
        if claim.version > rival.saturating_add(MAX_JUMP) {
            let why = format!("its claim to {} has version {} after {rival}", mac_text(mac), claim.version);
            self.refuse(machine, &why, now);
            return false;
        }
        let Some(other) = self.others.get_mut(&machine) else { return false };
        let is_full = other.members() >= MAX_MEMBERS;
        let Some(joined) = other.networks.get_mut(network) else { return false };
        if is_full && !joined.macs.contains(&mac) {
            self.refuse(machine, "it claims more members than it may", now);
            return false;
        }
        joined.macs.insert(mac);
        if self.own.get(network).is_some_and(|own| own.macs.contains(&mac)) {
            let mine = self.claims.get(network).and_then(|claims| claims.of(self.me, mac)).map_or(0, |own| own.version);
            self.moves.rival_claims((network.into(), mac), (mine, claim.version), now);
        }
        self.claim(network, machine, mac, Some(claim), now);
        true
    }

    fn went(&mut self, machine: Machine, network: &str, mac: Mac, now: Duration) {
        let joined = self.others.get_mut(&machine).and_then(|other| other.networks.get_mut(network));
        if joined.is_some_and(|joined| joined.macs.remove(&mac)) {
            self.claim(network, machine, mac, None, now);
        }
    }

    /// Removes a network in which a machine has neither members nor an end.
    fn maybe_leaves(&mut self, machine: Machine, network: &str, now: Duration) {
        let joined = self.others.get(&machine).and_then(|other| other.networks.get(network));
        if joined.is_some_and(|joined| joined.end.is_none() && joined.macs.is_empty()) {
            self.leaves(machine, network, now);
        }
    }

    fn leaves(&mut self, machine: Machine, network: &str, now: Duration) {
        let joined = self.others.get_mut(&machine).and_then(|other| other.networks.remove(network));
        let Some(joined) = joined else { return };
        for mac in joined.macs {
            self.claim(network, machine, mac, None, now);
        }
        self.dirty.remove(&(network.to_string(), machine));
        let machine = self.names[machine as usize].clone();
        self.actions.push(Action::Forget { network: network.into(), machine });
    }

    /// Does what time demands: forgets machines, and asks those that are to be asked. To be called
    /// several times in a beat.
    pub fn tick(&mut self, now: Duration) {
        self.forget_taken(now);
        // That another machine was heard well after this one shows that it is not this end that is
        // cut off.
        let latest = self.others.values().filter_map(|other| other.heard).max().unwrap_or_default();
        let lease = |heard: Duration| match latest.saturating_sub(heard) >= 2 * self.settings.beat {
            true => self.settings.lease,
            false => self.settings.alone,
        };
        let dead = |other: &Other| match other.heard {
            Some(heard) if !other.is_gone => now.saturating_sub(heard) >= lease(heard),
            _ => false,
        };
        let gone: Vec<Machine> = self.others.iter().filter(|(_, other)| dead(other)).map(|(m, _)| *m).collect();
        for machine in gone {
            let silent = self.others[&machine].heard.map_or(0, |heard| now.saturating_sub(heard).as_secs());
            let networks = match self.others.get_mut(&machine) {
                Some(other) => {
                    (other.is_gone, other.number) = (true, None);
                    other.networks.keys().cloned().collect()
                }
                None => Vec::new(),
            };
            for network in networks {
                self.leaves(machine, &network, now);
            }
            let name = &self.names[machine as usize];
            self.actions.push(Action::Event(format!("machine {name} was not heard for {silent} s: forgotten")));
        }
        for (machine, other) in &mut self.others {
            let wait = if other.behind { self.settings.beat / 8 } else { self.settings.beat };
            if other.asked.is_none_or(|asked| now.saturating_sub(asked) >= wait) {
                other.asked = Some(now);
                self.sent += 1;
                self.actions.push(Action::Ask(self.names[*machine as usize].clone()));
            }
        }
    }

    /// What is to be done since the last call, in order.
    pub fn actions(&mut self) -> Vec<Action> {
        for (network, machine) in std::mem::take(&mut self.dirty) {
            if machine == self.me {
                self.find_lost(&network);
                continue;
            }
            let Some(joined) = self.others.get(&machine).and_then(|other| other.networks.get(&network)) else {
                continue;
            };
            let members = joined.macs.iter().filter_map(|mac| self.won(&network, machine, *mac)).collect();
            let (end, machine) = (joined.end, self.names[machine as usize].clone());
            self.actions.push(Action::Table { network, machine, end, members });
        }
        std::mem::take(&mut self.actions)
    }

    /// The member with this MAC address, if this machine has it, with what no other member has.
    fn won(&self, network: &str, machine: Machine, mac: Mac) -> Option<Member> {
        let claims = self.claims.get(network)?;
        let own = claims.of(machine, mac).filter(|_| claims.winner(mac) == Some(machine))?;
        let here = Some((machine, mac));
        // Where it is now, and where it has its lease.
        let all = || std::iter::once(own).chain(claims.all_of(mac));
        let name = all().filter_map(|claim| claim.member.name.clone()).find(|name| claims.named(name) == here);
        let mut addresses: Vec<Address> = all().flat_map(|claim| claim.member.addresses.iter().cloned()).collect();
        addresses.retain(|address| claims.holder(address.ip) == here);
        addresses.sort();
        addresses.dedup_by_key(|address| address.ip);
        addresses.truncate(MAX_ADDRESSES);
        Some(Member { mac, name, addresses })
    }

    fn find_lost(&mut self, network: &str) {
        let mut lost = BTreeSet::new();
        if let (Some(claims), Some(own)) = (self.claims.get(network), self.own.get(network)) {
            for claim in own.macs.iter().filter_map(|mac| claims.of(self.me, *mac)) {
                let leases = claim.member.addresses.iter().filter(|Address { fixed, .. }| !fixed);
                // To another member; one that moved takes its lease along.
                let mac = claim.member.mac;
                let is_other = |ip: &IpAddr| claims.holder(*ip).is_some_and(|(_, holder)| holder != mac);
                lost.extend(leases.map(|address| address.ip).filter(is_other));
            }
        }
        let lost: Vec<IpAddr> = lost.into_iter().collect();
        if self.lost.get(network).map_or(&[][..], Vec::as_slice) != lost {
            self.actions.push(Action::Lost { network: network.into(), addresses: lost.clone() });
            match lost.is_empty() {
                true => self.lost.remove(network),
                false => self.lost.insert(network.into(), lost),
            };
        }
    }

    /// The other machines, in the order of their names.
    pub fn peers(&self, now: Duration) -> Vec<Peer> {
        let of = |(machine, other): (&Machine, &Other)| Peer {
            name: self.names[*machine as usize].clone(),
            state: match other.heard {
                None => PeerState::Unheard,
                Some(_) if other.is_gone => PeerState::Gone,
                Some(heard) if now.saturating_sub(heard) <= 2 * self.settings.beat => PeerState::Up,
                Some(_) => PeerState::Stale,
            },
            heard: other.heard,
            members: other.members(),
            networks: other.networks.iter().map(|(name, joined)| (name.clone(), joined.end)).collect(),
            refused: other.refused,
        };
        self.others.iter().map(of).collect()
    }

    /// This machine's networks: name, its members, and those of all others.
    pub fn networks(&self) -> Vec<(String, usize, usize)> {
        let of = |(name, joined): (&String, &Joined)| {
            let others = self.others.values().filter_map(|other| other.networks.get(name));
            (name.clone(), joined.macs.len(), others.map(|joined| joined.macs.len()).sum())
        };
        self.own.iter().map(of).collect()
    }

    /// What members of several machines claim, in order. O(all claims).
    pub fn conflicts(&self) -> Vec<Conflict> {
        let name = |machine: &Machine| self.names[*machine as usize].clone();
        let mut all = Vec::new();
        for (network, claims) in &self.claims {
            for (what, machines, winner) in claims.conflicts() {
                let machines = machines.iter().map(name).collect();
                all.push(Conflict { network: network.clone(), what, machines, winner: name(&winner) });
            }
        }
        for (network, mac) in self.moves.contested() {
            let Some(claims) = self.claims.get(network).filter(|claims| claims.rival(self.me, *mac).is_some()) else {
                continue;
            };
            let Some(winner) = claims.winner(*mac) else { continue };
            let machines = claims.claimants(*mac).iter().map(name).collect();
            all.push(Conflict { network: network.clone(), what: mac_text(*mac), machines, winner: name(&winner) });
        }
        all.sort();
        all.dedup();
        all
    }

    /// Messages and questions that were sent.
    pub fn sent(&self) -> u64 {
        self.sent
    }
}
