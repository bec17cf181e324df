use super::*;
use std::collections::HashMap;

fn address(n: u64) -> Address {
    let [a, b, c, d, ..] = n.to_le_bytes();
    Address::from([2, 0, d, c, b, a])
}

const TICK: Nanos = Nanos(1 << 28);

fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mix(*state)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Known {
    port: u16,
    seen: u32,
    /// When it was put in front of its port's list.
    order: u64,
    pinned: bool,
}

/// The simple table: the rules of the module's head, each time by looking at everything.
struct Model {
    known: HashMap<Address, Known>,
    limits: Vec<Option<u32>>,
    settings: MacSettings,
    order: u64,
    stats: MacStats,
}

impl Model {
    fn behind(&self, port: u16) -> u32 {
        self.known.values().filter(|k| k.port == port && !k.pinned).count() as u32
    }

    fn oldest(&self, port: u16) -> Option<Address> {
        let mine = self.known.iter().filter(|(_, k)| k.port == port && !k.pinned);
        mine.min_by_key(|(_, k)| k.order).map(|(a, _)| *a)
    }

    fn learn(&mut self, now: u32, address: Address, port: u16) -> Learned {
        self.order += 1;
        let limit = self.limits[port as usize].unwrap();
        let old = self.known.get(&address).copied();
        if let Some(old) = old {
            if old.port == port {
                if old.seen != now && !old.pinned {
                    self.known.insert(address, Known { seen: now, order: self.order, ..old });
                }
                return Learned::Known;
            }
            if old.pinned {
                return Learned::Pinned;
            }
        }
        if limit == 0 {
            self.stats.refused += 1;
            return Learned::Refused;
        }
        self.known.remove(&address);
        let learned = self.known.values().filter(|k| !k.pinned).count() as u32;
        if self.behind(port) >= limit {
            let victim = self.oldest(port).unwrap();
            self.known.remove(&victim);
            self.stats.evicted_own += 1;
        } else if learned >= self.settings.capacity {
            let present = self.limits.iter().flatten().count() as u32;
            let share = self.settings.capacity / present;
            let own = self.behind(port);
            let victim = if own > 0 && own >= share {
                self.stats.evicted_own += 1;
                self.oldest(port)
            } else {
                self.stats.evicted_other += 1;
                let most = (0..self.limits.len() as u16).max_by_key(|p| self.behind(*p)).unwrap();
                self.oldest(most)
            };
            self.known.remove(&victim.unwrap());
        }
        self.known.insert(address, Known { port, seen: now, order: self.order, pinned: false });
        *(if old.is_some() { &mut self.stats.moved } else { &mut self.stats.learned }) += 1;
        Learned::Changed
    }

    fn expire(&mut self, now: u32, age_ticks: u32) {
        let before = self.known.len();
        self.known.retain(|_, k| k.pinned || now.saturating_sub(k.seen) <= age_ticks);
        self.stats.expired += (before - self.known.len()) as u64;
    }
}

fn check(table: &MacTable, model: &Model, what: &str) {
    assert_eq!(table.stats(), model.stats, "{what}");
    assert_eq!(table.len(), model.known.len(), "{what}");
    let mut listed = 0;
    for entry in table.entries(Nanos(0)) {
        let known = model.known.get(&entry.address).unwrap_or_else(|| panic!("{what}: {entry:?} is not known"));
        assert_eq!((entry.port, entry.age.is_none()), (known.port, known.pinned), "{what}");
        listed += 1;
    }
    assert_eq!(listed, model.known.len(), "{what}");
    for (address, known) in &model.known {
        assert_eq!(table.find(*address), Some(known.port), "{what}: {address:?}");
    }
    for port in 0..model.limits.len() as u16 {
        assert_eq!(table.behind(port), model.behind(port), "{what}");
        // The port's list is the model's order.
        let mut order: Vec<_> = model.known.iter().filter(|(_, k)| k.port == port && !k.pinned).collect();
        order.sort_unstable_by_key(|(_, k)| k.order);
        let mut at = table.ports.get(port as usize).map_or(NIL, |list| list.oldest);
        for (address, known) in order {
            assert_eq!(table.slots[at as usize] & Address::MASK, address.0, "{what}");
            assert_eq!(table.seen[at as usize], known.seen, "{what}");
            at = table.links[at as usize].newer;
        }
        assert_eq!(at, NIL, "{what}");
    }
}

#[test]
fn it_does_what_the_dull_table_does() {
    for seed in 0..60u64 {
        let mut state = seed;
        let capacity = [16, 24, 64, 200][seed as usize % 4];
        let settings = MacSettings { capacity, per_port: capacity / 2 + 3, age: TICK.times(5) };
        let mut table = MacTable::new(settings, seed);
        let mut model =
            Model { known: HashMap::new(), limits: vec![None; 8], settings, order: 0, stats: MacStats::default() };
        let mut now = 10;
        for port in 0..4 {
            table.add_port(port, None);
            model.limits[port as usize] = Some(settings.per_port);
        }
        for step in 0..3000 {
            let what = format!("seed {seed} step {step}");
            let port = (random(&mut state) % 8) as u16;
            let address = address(random(&mut state) % (capacity as u64 * 2));
            let present = model.limits[port as usize].is_some();
            match random(&mut state) % 40 {
                0 if !present => {
                    let limit = [None, Some(5), Some(0)][(random(&mut state) % 3) as usize];
                    table.add_port(port, limit);
                    model.limits[port as usize] = Some(limit.unwrap_or(settings.per_port));
                }
                0 if model.limits.iter().flatten().count() > 2 => {
                    table.remove_port(port);
                    model.known.retain(|_, k| k.port != port);
                    model.limits[port as usize] = None;
                }
                1 if present => {
                    let taken = model.known.get(&address).is_some_and(|k| k.pinned && k.port != port);
                    let pins = model.known.values().filter(|k| k.pinned).count();
                    let again = model.known.get(&address).is_some_and(|k| k.pinned && k.port == port);
                    if pins < 4 || taken || again {
                        assert_eq!(table.pin(address, port), !taken, "{what}");
                        if !taken {
                            let known = Known { port, seen: Tick::PINNED.0, order: 0, pinned: true };
                            model.known.insert(address, known);
                        }
                    }
                }
                2 => {
                    table.unpin_port(port);
                    model.known.retain(|_, k| !(k.pinned && k.port == port));
                }
                3 => {
                    now += (random(&mut state) % 4) as u32;
                    while table.expire(Tick(now)) {}
                    model.expire(now, table.age_ticks);
                }
                _ if present => {
                    assert_eq!(table.learn(Tick(now), address, port), model.learn(now, address, port), "{what}");
                }
                _ => assert_eq!(table.find(address), model.known.get(&address).map(|k| k.port), "{what}"),
            }
            if step % 16 == 0 {
                check(&table, &model, &what);
            }
        }
        check(&table, &model, &format!("seed {seed}, the end"));
    }
}

#[test]
fn ten_thousand_addresses_behind_one_port_are_ordinary() {
    let mut table = MacTable::new(MacSettings::default(), 3);
    for port in 0..64 {
        table.add_port(port, None);
    }
    for n in 0..10_000 {
        assert_eq!(table.learn(Tick(1), address(n), 7), Learned::Changed);
    }
    assert!((0..10_000).all(|n| table.find(address(n)) == Some(7)));
    assert_eq!(table.stats(), MacStats { learned: 10_000, ..MacStats::default() });
}

#[test]
fn a_flood_from_some_ports_leaves_the_others_their_addresses() {
    let mut table = MacTable::new(MacSettings::default(), 4);
    for port in 0..64 {
        table.add_port(port, None);
    }
    for port in 2..64u64 {
        for n in 0..100 {
            table.learn(Tick(1), address(port << 20 | n), port as u16);
        }
    }
    let mut state = 1;
    for _ in 0..200_000 {
        let port = (random(&mut state) & 1) as u16;
        table.learn(Tick(2), address(1 << 31 | random(&mut state) & 0x3fff_ffff), port);
    }
    assert_eq!(table.len(), 16_384);
    for port in 2..64u64 {
        assert!((0..100).all(|n| table.find(address(port << 20 | n)) == Some(port as u16)), "port {port}");
    }
    // A quiet port learns in spite of the full table.
    assert_eq!(table.learn(Tick(3), address(999_999_999), 9), Learned::Changed);
    assert_eq!(table.find(address(999_999_999)), Some(9));
}

#[test]
fn an_address_is_forgotten_after_its_age_and_not_before() {
    let settings = MacSettings { age: Nanos::SECOND.times(300), ..MacSettings::default() };
    let mut table = MacTable::new(settings, 5);
    table.add_port(0, None);
    let start = Nanos::SECOND.times(1000);
    for n in 0..1000 {
        table.learn(Tick::of(start), address(n), 0);
    }
    table.expire(Tick::of(start.after(settings.age)));
    assert_eq!(table.len(), 1000);
    table.learn(Tick::of(start.after(Nanos::SECOND)), address(5), 0);
    let late = Tick::of(start.after(settings.age).after(TICK.times(2)));
    assert!(table.expire(late), "more than one call's bound");
    assert_eq!(table.len(), 1000 - EXPIRE_AT_ONCE);
    while table.expire(late) {}
    assert_eq!(table.len(), 1);
    let left: Vec<_> = table.entries(start.after(settings.age)).collect();
    assert_eq!((left[0].address, left[0].port), (address(5), 0));
    assert!(left[0].age.unwrap().since(Nanos::SECOND.times(299)) <= TICK);
}

#[test]
fn numbers_and_bytes_of_an_address_agree() {
    let bytes = [0x02, 0x11, 0x22, 0x33, 0x44, 0x55];
    assert_eq!(Address::from(bytes).bytes(), bytes);
    assert!(Address::from([0x01, 0, 0x5e, 0, 0, 1]).is_group());
    assert!(Address::BROADCAST.is_group() && !Address::BROADCAST.is_station());
    assert!(!Address::ZERO.is_station() && Address::from(bytes).is_station());
}
