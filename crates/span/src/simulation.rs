//! Many machines on a virtual clock, with the real [`Control`]. Messages take time, and can be
//! lost; machines can be cut off, stop, and start again. Nothing depends on the clock of this
//! machine, so a seed repeats a run.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::net::IpAddr;
use std::time::Duration;

use crate::control::{Action, Control, Local, Settings};
use crate::member::{Mac, Member};

/// The only network of a simulation.
pub const NETWORK: &str = "lan";
/// How often a machine looks at its own members.
const LOOK: Duration = Duration::from_secs(1);
/// How often a machine looks at the time.
const TICK: Duration = Duration::from_millis(250);

/// How messages travel.
#[derive(Clone, Copy, Debug)]
pub struct Network {
    /// The shortest and the longest time that a message takes.
    pub delay: (Duration, Duration),
    /// The part that is lost, 0 to 1.
    pub loss: f64,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Look(usize),
    Tick(usize),
    Heard { from: usize, to: usize, bytes: Vec<u8> },
    Question { from: usize, to: usize, bytes: Vec<u8> },
    Answer { from: usize, to: usize, bytes: Vec<u8> },
}

/// A member of a machine, and when it last sent a frame.
#[derive(Clone, Debug)]
pub struct Here {
    /// The member.
    pub member: Member,
    /// The time of its last frame.
    pub sent: Duration,
    /// Whether it sends all the time.
    pub sends: bool,
}

/// One machine.
pub struct Machine {
    /// Its name.
    pub name: String,
    /// Its control plane; `None` while it is off.
    pub control: Option<Control>,
    /// What it has.
    pub here: BTreeMap<Mac, Here>,
    /// What its daemon was told: the members by machine.
    pub tables: BTreeMap<String, Vec<Member>>,
    /// The addresses that its daemon was told to give up.
    pub lost: Vec<IpAddr>,
    /// What it said to its operator.
    pub events: Vec<String>,
    /// Machines of equal parts reach each other.
    pub part: u32,
    epoch: u64,
}

/// All machines.
pub struct World {
    /// The machines; their names sort in this order.
    pub machines: Vec<Machine>,
    /// How messages travel.
    pub network: Network,
    /// The time.
    pub now: Duration,
    /// Messages that were sent.
    pub messages: u64,
    /// Their bytes.
    pub bytes: u64,
    settings: Settings,
    queue: BinaryHeap<Reverse<(Duration, u64, Event)>>,
    count: u64,
    random: u64,
}

/// A MAC address by number.
pub fn mac(number: u32) -> Mac {
    let [a, b, c, d] = number.to_be_bytes();
    [2, 0, a, b, c, d]
}

impl World {
    /// `machines` machines that are off.
    pub fn new(machines: usize, network: Network, settings: Settings, seed: u64) -> World {
        let machine = |at: usize| Machine {
            name: format!("node-{at:03}"),
            control: None,
            here: BTreeMap::new(),
            tables: BTreeMap::new(),
            lost: Vec::new(),
            events: Vec::new(),
            part: 0,
            epoch: 0,
        };
        World {
            machines: (0..machines).map(machine).collect(),
            network,
            now: Duration::ZERO,
            messages: 0,
            bytes: 0,
            settings,
            queue: BinaryHeap::new(),
            count: 0,
            random: seed,
        }
    }

    /// A number from 0 to 1 (SplitMix64).
    fn random(&mut self) -> f64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }

    fn at(&mut self, time: Duration, event: Event) {
        self.count += 1;
        self.queue.push(Reverse((time, self.count, event)));
    }

    fn send(&mut self, from: usize, to: usize, bytes: usize, event: Event) {
        self.messages += 1;
        self.bytes += bytes as u64;
        let is_cut = self.machines[from].part != self.machines[to].part;
        if is_cut || self.random() < self.network.loss {
            return;
        }
        let (least, most) = self.network.delay;
        let delay = least + (most - least).mul_f64(self.random());
        self.at(self.now + delay, event);
    }

    /// Starts a machine, or starts it again.
    pub fn start(&mut self, at: usize) {
        let names: Vec<String> = self.machines.iter().map(|machine| machine.name.clone()).collect();
        let machine = &mut self.machines[at];
        machine.epoch += 1;
        let settings = Settings { machine: machine.name.clone(), ..self.settings.clone() };
        let mut control = Control::new(settings, machine.epoch);
        names.iter().for_each(|name| control.expect(name));
        machine.control = Some(control);
        // Each begins at its own time, as machines do.
        let phase = self.random();
        self.at(self.now, Event::Look(at));
        self.at(self.now + TICK.mul_f64(phase), Event::Tick(at));
    }

    /// Ends a machine's program at once. The daemon keeps its tables.
    pub fn kill(&mut self, at: usize) {
        self.machines[at].control = None;
    }

    /// Gives a machine a member.
    pub fn add(&mut self, at: usize, member: Member) {
        let here = Here { member, sent: self.now, sends: true };
        self.machines[at].here.insert(here.member.mac, here);
        self.look(at);
    }

    /// Takes a member from a machine.
    pub fn remove(&mut self, at: usize, mac: Mac) -> Option<Member> {
        let here = self.machines[at].here.remove(&mac);
        self.look(at);
        here.map(|here| here.member)
    }

    /// The machine looks at its members now.
    pub fn look(&mut self, at: usize) {
        let now = self.now;
        let machine = &mut self.machines[at];
        let Some(control) = &mut machine.control else { return };
        let local = machine.here.values_mut().map(|here| {
            here.sent = if here.sends { now } else { here.sent };
            Local { member: here.member.clone(), placed: true, silent_for: Some(now - here.sent) }
        });
        let end = [192, 0, (at / 250) as u8 + 2, (at % 250) as u8 + 1].into();
        control.local(NETWORK, Some(IpAddr::V4(end)), local.collect(), now);
        self.act(at);
    }

    fn act(&mut self, at: usize) {
        let Some(control) = &mut self.machines[at].control else { return };
        for action in control.actions() {
            match action {
                Action::Tell(bytes) => {
                    for to in (0..self.machines.len()).filter(|to| *to != at) {
                        self.send(at, to, bytes.len(), Event::Heard { from: at, to, bytes: bytes.clone() });
                    }
                }
                Action::Ask(name) => {
                    let Some(to) = self.machines.iter().position(|machine| machine.name == name) else { continue };
                    let Some(bytes) = self.machines[at].control.as_ref().map(|control| control.question(&name)) else {
                        continue;
                    };
                    self.send(at, to, bytes.len(), Event::Question { from: at, to, bytes });
                }
                Action::Table { machine, members, .. } => {
                    self.machines[at].tables.insert(machine, members);
                }
                Action::Forget { machine, .. } => {
                    self.machines[at].tables.remove(&machine);
                }
                Action::Lost { addresses, .. } => self.machines[at].lost = addresses,
                Action::Event(text) => self.machines[at].events.push(text),
            }
        }
    }

    fn deal(&mut self, event: Event) {
        let now = self.now;
        match event {
            Event::Look(at) => {
                self.look(at);
                if self.machines[at].control.is_some() {
                    self.at(now + LOOK, Event::Look(at));
                }
            }
            Event::Tick(at) => {
                let Some(control) = &mut self.machines[at].control else { return };
                control.tick(now);
                self.act(at);
                self.at(now + TICK, Event::Tick(at));
            }
            Event::Heard { from, to, bytes } => {
                let name = self.machines[from].name.clone();
                if let Some(control) = &mut self.machines[to].control {
                    // What is refused is counted there.
                    let _ = control.heard(&name, &bytes, now);
                    self.act(to);
                }
            }
            Event::Question { from, to, bytes } => {
                let answer = self.machines[to].control.as_ref().and_then(|control| control.answer(&bytes).ok());
                if let Some(bytes) = answer {
                    self.send(to, from, bytes.len(), Event::Answer { from: to, to: from, bytes });
                }
            }
            Event::Answer { from, to, bytes } => {
                let name = self.machines[from].name.clone();
                if let Some(control) = &mut self.machines[to].control {
                    let _ = control.answered(&name, &bytes, now);
                    self.act(to);
                }
            }
        }
    }

    /// Lets time pass until `done` or `end`. Returns whether it was done; then [`World::now`] is
    /// when.
    pub fn until(&mut self, end: Duration, mut done: impl FnMut(&World) -> bool) -> bool {
        loop {
            if done(self) {
                return true;
            }
            let Some(Reverse((time, ..))) = self.queue.peek() else { break };
            if *time > end {
                break;
            }
            let Some(Reverse((time, _, event))) = self.queue.pop() else { break };
            self.now = time;
            self.deal(event);
        }
        self.now = end;
        done(self)
    }

    /// Lets time pass.
    pub fn pass(&mut self, time: Duration) {
        self.until(self.now + time, |_| false);
    }

    /// The machine that has a member, as `at` was told.
    pub fn place(&self, at: usize, mac: Mac) -> Option<&str> {
        let has = |members: &Vec<Member>| members.iter().any(|member| member.mac == mac);
        self.machines[at].tables.iter().find(|(_, members)| has(members)).map(|(machine, _)| machine.as_str())
    }

    /// Whether all machines that run and that reach `at` know that it has this member.
    pub fn all_know(&self, at: usize, mac: Mac) -> bool {
        let Machine { name, part, .. } = &self.machines[at];
        let reach =
            |(other, machine): &(usize, &Machine)| *other != at && machine.part == *part && machine.control.is_some();
        self.machines.iter().enumerate().filter(reach).all(|(_, machine)| {
            machine.tables.get(name).is_some_and(|members| members.iter().any(|member| member.mac == mac))
        })
    }

    /// Whether all machines that run know all members of all others that they reach, and no others:
    /// each where it is, each address once.
    pub fn is_settled(&self) -> bool {
        let runs = |machine: &&Machine| machine.control.is_some();
        self.machines.iter().filter(runs).all(|machine| {
            let reached = |other: &&Machine| other.part == machine.part && other.name != machine.name && runs(other);
            let others = self.machines.iter().filter(reached);
            let count = others.clone().count();
            count == machine.tables.len()
                && others.clone().all(|other| {
                    machine.tables.get(&other.name).is_some_and(|members| {
                        members.len() == other.here.len()
                            && members
                                .iter()
                                .all(|member| other.here.get(&member.mac).is_some_and(|here| here.member == *member))
                    })
                })
        })
    }
}
