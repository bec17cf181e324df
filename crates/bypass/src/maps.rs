//! The maps, pinned and opened again.

use crate::attachment::monotonic_ns;
use crate::layout::{
    COUNTERS_BYTES, Counters, FLOW_BYTES, FLOW6_BYTES, Flow, KEY4_BYTES, KEY6_BYTES, MAX_PORTS, PORT_BYTES, Port,
    SET_ACCOUNT, SET_CAPTURE, SET_EPOCH, SET_LEASE_NS, SET_OBSERVED_NS, SET_RETRACK, SET_TICK_NS, SET_TRACE, Tuple,
    USAGE_BYTES, Usage, WANTED_BYTES,
};
use crate::neighbours::Mac;
use crate::object::chain;
use crate::place::Place;
use crate::rules::JUDGES_BYTES;
use aya::Ebpf;
use aya::maps::{Array, HashMap, Map, MapData, MapError, PerCpuArray, PerCpuValues, PerfEventArray, RingBuf};
use std::collections::HashSet;
use std::time::Duration;

/// All maps of the object, by their names there.
const NAMES: [&str; 18] = [
    "settings", "kept", "beats", "ports", "counters", "flows4", "flows6", "pending", "sights", "wishes", "wished",
    "events", "lost", "usages", "guarded", "judges", "captures", "wanted",
];

/// How long an idle TCP connection is remembered: as long as conntrack does by default.
const GUARDED: Duration = Duration::from_secs(432_000);
/// The map that only programs for kernels without typed pointers have.
const OLD_ONLY: &str = "snapshot";

/// A flow's key as it is in its map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FlowKey {
    /// Of `flows4`.
    V4([u8; KEY4_BYTES]),
    /// Of `flows6`.
    V6([u8; KEY6_BYTES]),
}

/// A map that does not do what it should.
#[derive(Debug, thiserror::Error)]
#[error("the map {name}: {cause}; if this goes on, detach and attach again")]
pub struct MapsError {
    name: &'static str,
    cause: String,
}

fn wrong(name: &'static str) -> impl Fn(MapError) -> MapsError {
    move |e| MapsError { name, cause: chain(&e) }
}

/// The open maps.
pub struct Maps {
    settings: Array<MapData, u64>,
    kept: Array<MapData, u64>,
    judges: Array<MapData, [u8; JUDGES_BYTES]>,
    ports: HashMap<MapData, u32, [u8; PORT_BYTES]>,
    counters: PerCpuArray<MapData, [u8; COUNTERS_BYTES]>,
    flows4: HashMap<MapData, [u8; KEY4_BYTES], [u8; FLOW_BYTES]>,
    flows6: HashMap<MapData, [u8; KEY6_BYTES], [u8; FLOW6_BYTES]>,
}

fn data(place: &Place, name: &'static str) -> Result<MapData, MapsError> {
    MapData::from_pin(place.pin(&format!("map_{name}"))).map_err(wrong(name))
}

/// Pins all maps of a loaded object.
pub(crate) fn pin(loaded: &Ebpf, place: &Place) -> Result<(), MapsError> {
    for name in NAMES {
        let map = loaded.map(name).ok_or(MapsError { name, cause: "it is not in the object".into() })?;
        map.pin(place.pin(&format!("map_{name}"))).map_err(|e| MapsError { name, cause: chain(&e) })?;
    }
    if let Some(map) = loaded.map(OLD_ONLY) {
        let path = place.pin(&format!("map_{OLD_ONLY}"));
        map.pin(path).map_err(|e| MapsError { name: OLD_ONLY, cause: chain(&e) })?;
    }
    Ok(())
}

/// Whether the programs are those for kernels that give no typed pointers.
pub(crate) fn are_of_old(loaded: &Ebpf) -> bool {
    loaded.map(OLD_ONLY).is_some()
}

/// The same of a place's programs.
pub(crate) fn are_of_old_in(place: &Place) -> bool {
    place.pin(&format!("map_{OLD_ONLY}")).exists()
}

/// The ring that names the connections that must be tracked liberally.
pub(crate) fn wishes(place: &Place) -> Result<RingBuf<MapData>, MapsError> {
    RingBuf::try_from(Map::RingBuf(data(place, "wishes")?)).map_err(wrong("wishes"))
}

/// The ring of trace events.
pub(crate) fn events(place: &Place) -> Result<RingBuf<MapData>, MapsError> {
    RingBuf::try_from(Map::RingBuf(data(place, "events")?)).map_err(wrong("events"))
}

/// Where the programs look for buffers of captured frames, one for each CPU.
pub(crate) fn captures(place: &Place) -> Result<PerfEventArray<MapData>, MapsError> {
    PerfEventArray::try_from(Map::PerfEventArray(data(place, "captures")?)).map_err(wrong("captures"))
}

/// Says which frames are to be captured.
pub(crate) fn set_wanted(place: &Place, wanted: [u8; WANTED_BYTES]) -> Result<(), MapsError> {
    let map: Array<MapData, [u8; WANTED_BYTES]> =
        Array::try_from(Map::Array(data(place, "wanted")?)).map_err(wrong("wanted"))?;
    let mut map = map;
    map.set(0, wanted, 0).map_err(wrong("wanted"))
}

/// Events that found no room in the ring, since all was attached.
pub(crate) struct Lost(PerCpuArray<MapData, u64>);

impl Lost {
    /// Opens the pinned map.
    pub(crate) fn open(place: &Place) -> Result<Lost, MapsError> {
        PerCpuArray::try_from(Map::PerCpuArray(data(place, "lost")?)).map(Lost).map_err(wrong("lost"))
    }

    pub(crate) fn read(&self) -> Result<u64, MapsError> {
        Ok(self.0.get(&0, 0).map_err(wrong("lost"))?.iter().sum())
    }
}

/// When the controller was at work last: each of its threads says so at each turn.
pub(crate) struct Beats(Array<MapData, u64>);

impl Beats {
    /// Opens the pinned map.
    pub(crate) fn open(place: &Place) -> Result<Beats, MapsError> {
        Array::try_from(Map::Array(data(place, "beats")?)).map(Beats).map_err(wrong("beats"))
    }

    /// A thread is at work, at this time of the monotonic clock.
    pub(crate) fn set(&mut self, thread: u32, now_ns: u64) -> Result<(), MapsError> {
        self.0.set(thread, now_ns, 0).map_err(wrong("beats"))
    }

    /// All of them are, or are to be given time for it.
    pub(crate) fn set_all(&mut self, now_ns: u64) -> Result<(), MapsError> {
        (0..self.0.len()).try_for_each(|thread| self.set(thread, now_ns))
    }

    /// When the one that was at work longest ago was.
    pub(crate) fn oldest(&self) -> Result<u64, MapsError> {
        let mut oldest = u64::MAX;
        for thread in 0..self.0.len() {
            oldest = oldest.min(self.0.get(&thread, 0).map_err(wrong("beats"))?);
        }
        Ok(oldest)
    }
}

/// What was counted by flow.
pub(crate) struct Usages(HashMap<MapData, [u8; KEY6_BYTES], [u8; USAGE_BYTES]>);

impl Usages {
    /// Opens the pinned map.
    pub(crate) fn open(place: &Place) -> Result<Usages, MapsError> {
        HashMap::try_from(Map::LruHashMap(data(place, "usages")?)).map(Usages).map_err(wrong("usages"))
    }

    /// All of them now. An entry that the kernel evicts meanwhile ends the iteration early, or
    /// repeats a part of it.
    pub(crate) fn read(&self) -> std::collections::HashMap<[u8; KEY6_BYTES], Usage> {
        self.0.iter().flatten().take(1 << 17).map(|(key, bytes)| (key, Usage::from_bytes(&bytes))).collect()
    }
}

impl Maps {
    /// Opens the pinned maps.
    pub fn open(place: &Place) -> Result<Maps, MapsError> {
        Ok(Maps {
            settings: Array::try_from(Map::Array(data(place, "settings")?)).map_err(wrong("settings"))?,
            kept: Array::try_from(Map::Array(data(place, "kept")?)).map_err(wrong("kept"))?,
            judges: Array::try_from(Map::Array(data(place, "judges")?)).map_err(wrong("judges"))?,
            ports: HashMap::try_from(Map::HashMap(data(place, "ports")?)).map_err(wrong("ports"))?,
            counters: PerCpuArray::try_from(Map::PerCpuArray(data(place, "counters")?)).map_err(wrong("counters"))?,
            flows4: HashMap::try_from(Map::LruHashMap(data(place, "flows4")?)).map_err(wrong("flows4"))?,
            flows6: HashMap::try_from(Map::LruHashMap(data(place, "flows6")?)).map_err(wrong("flows6"))?,
        })
    }

    fn setting(&self, which: u32) -> Result<u64, MapsError> {
        self.settings.get(&which, 0).map_err(wrong("settings"))
    }

    fn set(&mut self, which: u32, value: u64) -> Result<(), MapsError> {
        self.settings.set(which, value, 0).map_err(wrong("settings"))
    }

    /// The epoch that flows are learned in now.
    pub fn epoch(&self) -> Result<u32, MapsError> {
        Ok(self.setting(SET_EPOCH)? as u32)
    }

    /// How long a flow holds before the kernel is asked again, in ns; 0 before anything was
    /// attached.
    pub fn lease_ns(&self) -> Result<u64, MapsError> {
        self.setting(SET_LEASE_NS)
    }

    /// Sets that, and the length of the kernel's tick, in ns.
    pub fn set_lease(&mut self, lease_ns: u64, tick_ns: u64) -> Result<(), MapsError> {
        self.set(SET_TICK_NS, tick_ns)?;
        self.set(SET_LEASE_NS, lease_ns)
    }

    /// Events are wanted up to this second of the monotonic clock; 0: not at all.
    pub fn trace_until(&mut self, second: u64) -> Result<(), MapsError> {
        self.observe_until(SET_TRACE, second)
    }

    /// Frames are counted by flow up to this second of the monotonic clock, or longer where another
    /// command wants that.
    pub fn account_until(&mut self, second: u64) -> Result<(), MapsError> {
        let second = self.setting(SET_ACCOUNT)?.max(second);
        self.observe_until(SET_ACCOUNT, second)
    }

    /// Frames are captured up to this second of the monotonic clock; 0: not at all.
    pub fn capture_until(&mut self, second: u64) -> Result<(), MapsError> {
        self.observe_until(SET_CAPTURE, second)
    }

    /// Programs look first at the last moment at which anything may be wanted. Two commands that
    /// raise it at the same time may undo each other's; each does so again within a tenth of a
    /// second.
    fn observe_until(&mut self, which: u32, second: u64) -> Result<(), MapsError> {
        self.set(which, second)?;
        let until_ns = if second == 0 { 0 } else { (second + 1) * 1_000_000_000 };
        if self.setting(SET_OBSERVED_NS)? < until_ns { self.set(SET_OBSERVED_NS, until_ns) } else { Ok(()) }
    }

    /// Frames are taken up to that time of the monotonic clock, in ns, and not longer unless this
    /// is called again; 0: for ever.
    pub fn keep_until(&mut self, until_ns: u64) -> Result<(), MapsError> {
        self.kept.set(0, until_ns, 0).map_err(wrong("kept"))
    }

    /// The flows that rules judge frame by frame, as `rules` wrote them.
    pub(crate) fn judges(&self) -> Result<[u8; JUDGES_BYTES], MapsError> {
        self.judges.get(&0, 0).map_err(wrong("judges"))
    }

    pub(crate) fn set_judges(&mut self, judges: &[u8; JUDGES_BYTES]) -> Result<(), MapsError> {
        self.judges.set(0, judges, 0).map_err(wrong("judges"))
    }

    /// The nonce of frames that `detach` injects; 0: there are none.
    pub(crate) fn set_retrack(&mut self, nonce: u64) -> Result<(), MapsError> {
        self.set(SET_RETRACK, nonce)
    }

    /// From here on no flow holds until the kernel has forwarded a frame of it again.
    pub fn forget_flows(&mut self) -> Result<(), MapsError> {
        // By the clock, so that two that do so at the same time do not write the same one: what was
        // learned under the first would hold under the second.
        let now = (monotonic_ns() >> 10) as u32;
        let epoch = if now == self.epoch()? { now.wrapping_add(1) } else { now };
        self.set(SET_EPOCH, epoch.into())
    }

    /// Interface index and entry of each attached interface.
    pub fn ports(&self) -> Result<Vec<(u32, Port)>, MapsError> {
        self.ports
            .iter()
            .map(|entry| entry.map(|(i, b)| (i, Port::from_bytes(&b))))
            .collect::<Result<_, _>>()
            .map_err(wrong("ports"))
    }

    /// The entry of one interface. `None`: it is not attached.
    pub fn port(&self, index: u32) -> Result<Option<Port>, MapsError> {
        match self.ports.get(&index, 0) {
            Ok(bytes) => Ok(Some(Port::from_bytes(&bytes))),
            Err(MapError::KeyNotFound) => Ok(None),
            Err(e) => Err(wrong("ports")(e)),
        }
    }

    /// Adds or changes an interface.
    pub fn set_port(&mut self, index: u32, port: Port) -> Result<(), MapsError> {
        self.ports.insert(index, port.to_bytes(), 0).map_err(wrong("ports"))
    }

    /// Takes an interface out, if it is in.
    pub fn remove_port(&mut self, index: u32) -> Result<(), MapsError> {
        match self.port(index)? {
            Some(_) => self.ports.remove(&index).map_err(wrong("ports")),
            None => Ok(()),
        }
    }

    /// A slot of the counters that no interface has, set to zero.
    pub fn free_slot(&mut self) -> Result<u32, MapsError> {
        let used: Vec<u32> = self.ports()?.iter().map(|p| p.1.slot).collect();
        let full =
            || MapsError { name: "ports", cause: format!("{MAX_PORTS} interfaces are attached, which is the most") };
        let slot = (0..MAX_PORTS).find(|s| !used.contains(s)).ok_or_else(full)?;
        let cpus = aya::util::nr_cpus().map_err(|e| MapsError { name: "counters", cause: e.1.to_string() })?;
        let zeroes = PerCpuValues::try_from(vec![[0; COUNTERS_BYTES]; cpus])
            .map_err(|e| MapsError { name: "counters", cause: e.to_string() })?;
        self.counters.set(slot, zeroes, 0).map_err(wrong("counters"))?;
        Ok(slot)
    }

    /// The counters in `slot`, summed over all CPUs.
    pub fn counters(&self, slot: u32) -> Result<Counters, MapsError> {
        let mut sum = Counters::default();
        for cpu in self.counters.get(&slot, 0).map_err(wrong("counters"))?.iter() {
            sum.add(cpu);
        }
        Ok(sum)
    }

    /// All flows in the table, also those that no longer hold.
    pub fn flows(&self) -> Result<Vec<(Tuple, Flow)>, MapsError> {
        Ok(self.keyed_flows().into_iter().map(|(_, tuple, flow)| (tuple, flow)).collect())
    }

    /// The same with their keys.
    pub(crate) fn keyed_flows(&self) -> Vec<(FlowKey, Tuple, Flow)> {
        let (mut flows, now_ns) = (vec![], monotonic_ns());
        // An entry that the kernel evicts meanwhile ends an iteration early, or repeats it: it is
        // bounded, and a count of now.
        for (key, flow) in self.flows4.iter().flatten().take(1 << 17) {
            flows.push((FlowKey::V4(key), Tuple::from_key4(&key), Flow::from_bytes(&flow, now_ns)));
        }
        for (key, flow) in self.flows6.iter().flatten().take(1 << 17) {
            flows.push((FlowKey::V6(key), Tuple::from_key6(&key, false), Flow::from_bytes(&flow, now_ns)));
        }
        flows
    }

    pub(crate) fn remove_flows<'a>(&mut self, keys: impl Iterator<Item = &'a FlowKey>) {
        let (mut keys4, mut keys6) = (vec![], vec![]);
        for key in keys {
            match key {
                FlowKey::V4(key) => keys4.push(*key),
                FlowKey::V6(key) => keys6.push(*key),
            }
        }
        self.remove(&keys4, &keys6);
    }

    /// One flow, if it is still there.
    pub(crate) fn flow(&self, key: &FlowKey) -> Option<Flow> {
        match key {
            FlowKey::V4(key) => self.flows4.get(key, 0).ok().map(|bytes| Flow::from_bytes(&bytes, 0)),
            FlowKey::V6(key) => self.flows6.get(key, 0).ok().map(|bytes| Flow::from_bytes(&bytes, 0)),
        }
    }

    /// Removes flows that go out of these interfaces to these Ethernet addresses.
    pub(crate) fn remove_flows_to(&mut self, gone: &HashSet<(u32, Mac)>) {
        let is_to = |bytes: &[u8]| {
            let flow = Flow::from_bytes(bytes, 0);
            gone.contains(&(flow.output, flow.to))
        };
        let old4: Vec<_> = self.flows4.iter().flatten().take(1 << 17).filter(|e| is_to(&e.1)).map(|e| e.0).collect();
        let old6: Vec<_> = self.flows6.iter().flatten().take(1 << 17).filter(|e| is_to(&e.1)).map(|e| e.0).collect();
        self.remove(&old4, &old6);
    }

    /// One that the kernel evicted meanwhile is gone as well.
    fn remove(&mut self, keys4: &[[u8; KEY4_BYTES]], keys6: &[[u8; KEY6_BYTES]]) {
        keys4.iter().for_each(|key| drop(self.flows4.remove(key)));
        keys6.iter().for_each(|key| drop(self.flows6.remove(key)));
    }

    /// Removes flows that were used last before this moment, and those of other epochs; says how
    /// many. TCP through conntrack stays until it ends, or until the table is full: its sequence
    /// numbers are what a FIN or RST is judged by.
    pub fn reap(&mut self, before_ns: u64) -> Result<usize, MapsError> {
        let (epoch, now_ns) = (self.epoch()?, monotonic_ns());
        let stale = |bytes: &[u8]| {
            let flow = Flow::from_bytes(bytes, now_ns);
            if flow.progress.is_some_and(|p| !p.is_ending) && flow.used_ns + GUARDED.as_nanos() as u64 > now_ns {
                return false;
            }
            flow.used_ns < before_ns || (flow.epoch != epoch && flow.until_ns < before_ns)
        };
        let old4: Vec<_> = self.flows4.iter().flatten().take(1 << 17).filter(|e| stale(&e.1)).map(|e| e.0).collect();
        let old6: Vec<_> = self.flows6.iter().flatten().take(1 << 17).filter(|e| stale(&e.1)).map(|e| e.0).collect();
        self.remove(&old4, &old6);
        Ok(old4.len() + old6.len())
    }
}
