//! Ports that belong to containers (`container` of a tap or vhost-user port): they go with the
//! container's namespace.
//!
//! # Purpose
//! A descriptor of a tap keeps the network namespace alive that the tap is in, with every device in
//! it. So a daemon that kept the tap of a dead container would keep its namespace for ever. The
//! container's runtime says that a container ends (CNI DEL), but it may be killed, or may find no
//! daemon. So the daemon looks once a second whether the namespace is still at its path, and
//! removes the port where it is not.
//!
//! # Invariants
//! - A namespace is known by the device and inode of its path, and by the kernel's cookie: the
//!   kernel gives an inode's number to the next namespace, and a cookie never again. A pid that is
//!   used again, or a name that is given again, is another namespace.
//! - The device is persistent. It ends with its namespace, with `down`, or the plugin deletes it.
//!   So a container keeps it while the daemon is away. `down` deletes only what it can tell for the
//!   device that it had: in the same namespace, with the same name and MAC address.
//! - A vhost-user port of a container's virtual machine has nothing in the namespace. The namespace
//!   only tells how long the container lives.
//! - A daemon that starts forgets the ports whose namespace or device is gone. They are no fault. A
//!   port whose device cannot be attached, or is another one than before, is parked
//!   ([`super::parked`]): a container never keeps its fabric from starting.
//! - A start that fails leaves the interfaces of the containers that an earlier daemon had.
//! - A container's name comes from the program that starts it: in Kubernetes, from each user who
//!   may create a pod. So it has no more rights than that of a DHCP client. The file's author may
//!   choose any name.
//!
//! - What looks at a namespace while the fabric runs does so on a thread of its own, without the
//!   lock of [`Running`]. An addition and a start open the namespace under the lock. Before that
//!   they see whether its path answers ([`super::namespaces`]).
//!
//! # Limits
//! The namespace of a container that dies without DEL is there for up to two seconds. If a path
//! leads to a file system that stops to answer later, the ends of all containers wait for it.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Weak;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use tokio::sync::Mutex;
use tombolo_port::link::{Interface, LinkError, Netns};
use tombolo_switch::gateway::{LeaseRecord, is_reserved};

use super::{FabricError, Running, Say};
use crate::blocking;
use crate::config::Document;
use crate::file::{Contained, Fabric, Mac, Tap, Target};
use crate::preflight::HostFault;
use crate::rundir::{ContainerPlace, RunDir};

/// What the names of the fabric's own ports begin with. The names of their networks follow.
const OWN: [&str; 3] = ["gateway-", "uplink-", "span-"];

/// How often the namespaces are looked at.
const LOOK: Duration = Duration::from_secs(1);

/// A namespace: device and inode of its file, and the kernel's cookie where it tells one.
#[derive(Clone, Copy, Debug)]
struct Identity {
    inode: (u64, u64),
    cookie: Option<u64>,
}

impl PartialEq for Identity {
    /// Without a cookie of both, the inodes decide.
    fn eq(&self, other: &Identity) -> bool {
        let cookies = self.cookie.zip(other.cookie);
        self.inode == other.inode && cookies.is_none_or(|(one, two)| one == two)
    }
}

impl Identity {
    /// That of a place; `None` where it was never seen.
    fn of(place: &ContainerPlace) -> Option<Identity> {
        (place.inode != (0, 0)).then_some(Identity { inode: place.inode, cookie: place.cookie })
    }

    /// Whether what is there now is another one than was seen before, if one was.
    fn is_other(self, was: Option<Identity>) -> bool {
        was.is_some_and(|was| was != self)
    }
}

/// Where the ports of containers lead, by their names.
pub(crate) type Containers = BTreeMap<String, ContainerPlace>;

/// How long `down` waits for the taps of containers to go. A path may lead to a file system that
/// does not answer.
const DELETES: Duration = Duration::from_secs(60);

/// The file of a namespace that is called so, as [`Netns::open`] finds it.
fn path_of(netns: &str) -> PathBuf {
    if netns.contains('/') { netns.into() } else { Path::new("/run/netns").join(netns) }
}

fn inode(path: &Path) -> io::Result<(u64, u64)> {
    std::fs::metadata(path).map(|m| (m.dev(), m.ino()))
}

/// The namespaces that are at these paths now. One is open at a time.
fn identities<'p>(paths: impl Iterator<Item = &'p Path> + Clone + Send) -> Vec<io::Result<Identity>> {
    let inodes: Vec<_> = paths.clone().map(inode).collect();
    let cookies = Netns::cookies(paths.map(|path| Netns::open(&path.to_string_lossy()).ok()));
    // Without a thread that could ask, the inodes decide.
    let cookies = cookies.unwrap_or_else(|_| vec![None; inodes.len()]);
    inodes.into_iter().zip(cookies).map(|(inode, cookie)| Ok(Identity { inode: inode?, cookie })).collect()
}

fn identity(path: &Path) -> io::Result<Identity> {
    identities([path].into_iter()).pop().expect("one for each path")
}

/// Whether an error says that what was looked for is not there. Another one, such as too few
/// descriptors or no right to look, says nothing of it: the container is kept, and its port is
/// tried again.
fn says_gone(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory)
}

/// Whether the tap's device is not there, or has another address than it was given.
fn tap_has_gone(tap: &Tap) -> bool {
    let mac = || {
        let netns = tap.netns.as_deref().map(Netns::open).transpose()?;
        Interface::open(netns.as_ref(), &tap.device)?.mac()
    };
    match mac() {
        // Where a monitor opens it, the address is its guest's.
        Ok(mac) => !tap.monitor && mac != tap.mac.0,
        Err(LinkError::Absent { .. } | LinkError::NotANamespace { .. }) => true,
        Err(LinkError::Namespace { source, .. }) => says_gone(&source),
        Err(LinkError::System { source, .. }) => source == Errno::NODEV,
        Err(_) => false,
    }
}

/// Whether a namespace has ended by what a look at its path has found: it is not there, or another
/// one is.
fn has_ended(was: Option<Identity>, now: &io::Result<Identity>) -> bool {
    match now {
        Ok(now) => now.is_other(was),
        Err(error) => says_gone(error),
    }
}

/// Whether a container's namespace has ended, or is another one than the daemon before this one
/// saw. `recorded` has what that was.
fn has_gone(member: &Contained<'_>, recorded: &Containers) -> bool {
    has_ended(recorded.get(member.name).and_then(Identity::of), &identity(&path_of(member.netns)))
}

/// Whether it is the namespace of this program.
fn is_here(netns: &str) -> bool {
    Netns::open(netns).and_then(|netns| netns.is_here()).unwrap_or(false)
}

/// The interface, if it is there. Without a namespace it is one of the host.
fn interface(netns: Option<&str>, device: &str) -> Option<Interface> {
    let netns = netns.map(Netns::open).transpose().ok()?;
    Interface::open(netns.as_ref(), device).ok()
}

/// Whether what is in a container's namespace now is what its port had, as far as it was noted. The
/// error says what is there instead. It may wait for the file system that the path leads to.
pub(super) fn check_place(place: &ContainerPlace) -> Result<(), String> {
    let now = identity(&place.netns).map_err(|error| format!("the namespace at {}: {error}", place.netns.display()))?;
    if now.is_other(Identity::of(place)) {
        return Err(format!("the namespace at {} is not that of its container any more", place.netns.display()));
    }
    let Some((index, (device, _))) = place.index.zip(place.tap.as_ref()) else { return Ok(()) };
    match interface(Some(&place.netns.to_string_lossy()), device).map(|link| link.index()) {
        Some(Ok(found)) if found == index => Ok(()),
        Some(Ok(found)) => Err(format!(
            "interface {device} of the container is another one than it was given: expected index {index}, found {found}; \
             delete the container's network and add it again"
        )),
        _ => Err(format!("the container has no interface {device}")),
    }
}

/// Deletes the tap of a container, if it is still the one that the port had; what is wrong, if it
/// stays.
fn delete_tap(place: &ContainerPlace) -> Result<(), LinkError> {
    let is_same = || identity(&place.netns).is_ok_and(|now| Identity::of(place) == Some(now));
    let Some((device, mac)) = place.tap.as_ref().filter(|_| is_same()) else { return Ok(()) };
    // Paths of namespaces are from text.
    let netns = Netns::open(&place.netns.to_string_lossy())?;
    if place.index.is_some() && Interface::open(Some(&netns), device).and_then(|link| link.index()).ok() != place.index
    {
        return Ok(());
    }
    Interface::delete_own(&netns, device, *mac).map(drop)
}

/// Forgets the ports of containers that ended while no daemon ran. Also returns what rules and
/// mirrors have lost by that, a sentence for each container. Those that are `silent` are kept.
pub(super) fn without_gone(
    mut spec: Fabric,
    base: Option<&Document>,
    silent: &BTreeMap<String, String>,
    dir: &mut RunDir,
    say: &Say,
) -> (Fabric, Vec<String>) {
    let is_contained = |tap: &&Tap| tap.container.is_some() && !silent.contains_key(&tap.name);
    let taps = spec.taps.iter().filter(is_contained).filter(|tap| tap_has_gone(tap)).map(|tap| tap.name.clone());
    let recorded = dir.owner().containers.clone();
    let answering = spec.contained().filter(|member| !silent.contains_key(member.name));
    let members = answering.filter(|member| has_gone(member, &recorded)).map(|member| member.name.to_string());
    let gone: BTreeSet<String> = taps.chain(members).collect();
    if gone.is_empty() {
        return (spec, vec![]);
    }
    let lost = super::config::lost_by_policies(base, &dir.owner().changes, gone.iter());
    spec.taps.retain(|t| !gone.contains(&t.name));
    spec.ports.retain(|p| !gone.contains(&p.name));
    spec.forwards.retain(|f| !matches!(&f.target, Target::Name(name) if gone.contains(name)));
    spec.forget_in_policies(gone.iter().map(String::as_str));
    dir.record(|o| {
        // A container is in no file: one that is in none of the additions was changed by a command.
        o.changes = super::config::changes_without(base, &o.changes, gone.iter());
        for addition in &mut o.additions {
            addition.names.retain(|name| !gone.contains(name));
        }
        o.additions.retain(|a| !a.names.is_empty());
        o.rates.retain(|name, _| !gone.contains(name));
        o.containers.retain(|name, _| !gone.contains(name));
    });
    for name in gone {
        say(&format!("port {name}: its container has ended meanwhile; it is forgotten"));
    }
    (spec, lost)
}

impl Running {
    /// Notes where the ports of containers lead, also for daemons that follow.
    pub(super) fn note_containers(&mut self) {
        let mut now = Containers::new();
        for member in self.spec.contained() {
            let known = self.containers.get(member.name).cloned();
            // What is in the namespace of a parked port is not what it is to have.
            let noted = match known {
                Some(known) if self.is_parked(member.name) || !self.lacks(&member, &known) => known,
                // More is noted once it answers.
                Some(known) if self.silent.contains_key(member.name) => known,
                _ => self.place_of(&member),
            };
            now.insert(member.name.to_string(), noted);
        }
        self.containers = now;
        self.record_containers();
    }

    /// The tap of a container's port, if it has one.
    fn tap_of(&self, member: &Contained<'_>) -> Option<&Tap> {
        self.spec.taps.iter().find(|tap| member.word == "tap" && tap.name == member.name)
    }

    /// Whether a note of an earlier version, or of a port that was parked then, lacks what can be
    /// known now.
    fn lacks(&self, member: &Contained<'_>, known: &ContainerPlace) -> bool {
        self.tap_of(member).is_some() && (known.tap.is_none() || known.index.is_none())
    }

    /// The fabric without the taps whose namespaces do not answer.
    pub(super) fn answering(&self) -> Cow<'_, Fabric> {
        if self.silent.is_empty() {
            return Cow::Borrowed(&self.spec);
        }
        let mut spec = self.spec.clone();
        spec.taps.retain(|tap| !self.silent.contains_key(&tap.name));
        Cow::Owned(spec)
    }

    fn place_of(&self, member: &Contained<'_>) -> ContainerPlace {
        let netns = path_of(member.netns);
        if self.silent.contains_key(member.name) {
            return ContainerPlace { netns, ..ContainerPlace::default() };
        }
        // One that cannot be seen has none, and the next look finds whether it is gone.
        let found = identity(&netns).unwrap_or(Identity { inode: (0, 0), cookie: None });
        let tap = self.tap_of(member).filter(|_| !self.is_parked(member.name));
        let link = tap.and_then(|tap| interface(Some(member.netns), &tap.device));
        let index = link.as_ref().and_then(|link| link.index().ok());
        let tap = link.and_then(|link| Some((link.name().to_string(), link.mac().ok()?)));
        ContainerPlace { netns, inode: found.inode, cookie: found.cookie, tap, index }
    }

    /// Whether a fault of this machine is about a container: its port is parked, or its forward
    /// takes the place of another.
    pub(super) fn is_of_container(&self, fault: &HostFault) -> bool {
        let section = &fault.section[..];
        let is_forward = |i: &str| {
            let forward = i.strip_suffix(']').and_then(|i| self.spec.forwards.get(i.parse::<usize>().ok()?));
            forward.is_some_and(|f| matches!(&f.target, Target::Name(name) if self.is_contained(name)))
        };
        match section.split_once('.') {
            Some(("tap" | "port", name)) => self.is_contained(name),
            _ => section.strip_prefix("forward[").is_some_and(is_forward),
        }
    }

    /// Another container may have the name next.
    pub(super) fn forget_container(&mut self, name: &str) {
        if self.containers.remove(name).is_some() {
            self.record_containers();
        }
    }

    fn record_containers(&mut self) {
        if let Some(dir) = self.dir.as_mut().filter(|dir| dir.owner().containers != self.containers) {
            dir.record(|o| o.containers.clone_from(&self.containers));
        }
    }

    /// Deletes the taps of containers, for `down`.
    pub(super) async fn delete_taps_of_containers(&mut self) {
        let all = std::mem::take(&mut self.containers);
        if all.is_empty() {
            return;
        }
        let say = self.say.clone();
        let delete = move || {
            for (name, place) in &all {
                if let Err(error) = delete_tap(place) {
                    say(&format!("down: port {name}: its container keeps the interface: {error}"));
                }
            }
        };
        // Not in line: a path may lead to a file system that never answers.
        let why = match tokio::time::timeout(DELETES, blocking::spawn(delete)).await {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no answer for {} s", DELETES.as_secs()),
        };
        (self.say)(&format!("down: the namespaces of containers: {why}; interfaces in them may stay"));
    }

    /// Whether the containers among the members `names` of `spec`, which are to be added, may have
    /// these names.
    ///
    /// # Errors
    /// One is a name that no client gets by asking for it, or that of a client with a lease.
    pub(super) fn can_be_called(&self, spec: &Fabric, names: &[String]) -> Result<(), FabricError> {
        for member in spec.contained().filter(|member| names.iter().any(|name| name == member.name)) {
            let (word, name) = (member.word, member.name);
            let refused = |why: String| Err(FabricError::State(format!("[{word}.{name}]: {why}; choose another name")));
            if OWN.iter().any(|prefix| name.starts_with(prefix)) {
                // Also where there is no such network yet: it may come with the next file.
                let text =
                    "the fabric gives such names to ports of its own: gateway-NETWORK, uplink-NETWORK and span-NETWORK";
                return refused(text.into());
            }
            if is_here(member.netns) {
                let text = format!("netns {:?} is the namespace of the fabric itself", member.netns);
                return Err(FabricError::State(format!("[{word}.{name}]: {text}, and no container's")));
            }
            if is_reserved(name) {
                return refused("programs look this name up by themselves, so no container has it".into());
            }
            let leases = self.networks.get(member.network).and_then(|net| net.gateway.as_ref()).map(|g| g.leases());
            let is_others = |lease: &&LeaseRecord| {
                lease.name.as_deref() == Some(name) && member.mac.is_none_or(|mac| mac.0 != lease.mac)
            };
            if let Some(lease) = leases.iter().flat_map(|store| &store.leases).find(is_others) {
                return refused(format!("a client with the MAC address {} has this name", Mac(lease.mac)));
            }
        }
        Ok(())
    }

    /// The ports of containers: name, the path of the namespace, and which that was.
    fn containers(&self) -> Vec<Watched> {
        let of = |m: Contained<'_>| {
            let was = Identity::of(self.containers.get(m.name)?);
            Some(Watched { name: m.name.to_string(), path: path_of(m.netns), was })
        };
        self.spec.contained().filter_map(of).collect()
    }

    /// Whether a port still has the container that was looked at: it may have been removed and
    /// added again meanwhile.
    fn has_still(&self, looked_at: &Watched) -> bool {
        let noted = self.containers.get(&looked_at.name);
        !self.applying && noted.is_some_and(|place| Identity::of(place) == looked_at.was)
    }

    /// Notes which namespace it is at whose path none was seen until now.
    fn note_seen(&mut self, looked_at: &Watched, now: Identity) {
        if let Some(place) = self.containers.get_mut(&looked_at.name) {
            (place.inode, place.cookie) = (now.inode, now.cookie);
            self.record_containers();
        }
    }
}

/// A container's port, for a look at its namespace.
struct Watched {
    name: String,
    path: PathBuf,
    /// Which namespace it was; `None` where none was seen.
    was: Option<Identity>,
}

/// Those whose namespaces have ended, and those of which none was seen before, with what is there
/// now.
fn look(all: Vec<Watched>) -> (Vec<Watched>, Vec<(Watched, Identity)>) {
    let (mut ended, mut seen) = (vec![], vec![]);
    let found = identities(all.iter().map(|one| one.path.as_path()));
    for (one, now) in all.into_iter().zip(found) {
        match now {
            now if has_ended(one.was, &now) => ended.push(one),
            Ok(now) if one.was.is_none() => seen.push((one, now)),
            _ => {}
        }
    }
    (ended, seen)
}

/// Removes the ports of containers whose namespaces have gone, until the fabric ends.
pub(super) async fn watch(me: Weak<Mutex<Running>>) {
    loop {
        tokio::time::sleep(LOOK).await;
        let Some(running) = me.upgrade() else { return };
        let all = running.lock().await.containers();
        drop(running);
        if all.is_empty() {
            continue;
        }
        // A path may lead to a file system that does not answer. Without a thread the next look
        // finds them.
        let Ok((ended, seen)) = blocking::spawn(move || look(all)).await else { continue };
        for (one, now) in seen {
            let Some(running) = me.upgrade() else { return };
            let mut running = running.lock().await;
            if running.has_still(&one) {
                running.note_seen(&one, now);
            }
        }
        for one in ended {
            let Some(running) = me.upgrade() else { return };
            let mut running = running.lock().await;
            if !running.has_still(&one) {
                continue;
            }
            let name = one.name;
            match running.remove(&name) {
                Ok(()) => (running.say)(&format!("port {name}: its container has ended")),
                Err(error) => (running.say)(&format!("port {name}: its container has ended: {error}")),
            }
            running.note_containers();
        }
        let Some(running) = me.upgrade() else { return };
        let due = running.lock().await.parked_that_are_due(Instant::now());
        drop(running);
        for (plan, place) in due {
            let noted = place.clone();
            let check = move || noted.as_ref().map_or(Ok(()), check_place);
            let Ok(checked) = blocking::spawn(check).await else { continue };
            let Some(running) = me.upgrade() else { return };
            running.lock().await.try_parked(&plan, place.as_ref(), checked, Instant::now());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_that_came_in_the_place_of_a_recorded_one_is_another() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ns");
        std::fs::write(&path, "").unwrap();
        let text = format!(
            "name = \"demo\"\n[network.lan]\n[port.vm]\nkind = \"vhost-user\"\nnetns = \"{}\"\ncontainer = \"pods/a/eth0\"\nmac = \"02:00:00:00:00:01\"\n",
            path.display()
        );
        let spec = crate::file::parse(&text, Path::new("/x/demo.toml")).unwrap();
        let has_gone = |recorded: &Containers| has_gone(&spec.contained().next().unwrap(), recorded);
        let place = ContainerPlace { netns: path.clone(), inode: inode(&path).unwrap(), ..ContainerPlace::default() };
        let recorded = Containers::from([("vm".into(), place)]);
        assert!(!has_gone(&recorded));
        assert!(!has_gone(&Containers::new()), "a record of an earlier version has none");
        assert_eq!(identity(&path).unwrap().cookie, None, "only a namespace has a cookie");
        std::fs::rename(&path, dir.path().join("old")).unwrap();
        std::fs::write(&path, "").unwrap();
        assert!(has_gone(&recorded), "there is a namespace at the path, and it is not the container's");
        std::fs::remove_file(&path).unwrap();
        assert!(has_gone(&recorded) && has_gone(&Containers::new()));
        // A path through itself: an error that does not say whether there is a namespace.
        std::os::unix::fs::symlink(&path, &path).unwrap();
        assert!(!has_gone(&recorded));
    }

    #[test]
    fn a_namespace_that_was_never_seen_is_noted_when_it_is_and_is_no_other_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ns");
        // As a daemon notes one that did not answer as it started.
        let unseen = ContainerPlace { netns: path.clone(), ..ContainerPlace::default() };
        let watched = || Watched { name: "vm".into(), path: path.clone(), was: Identity::of(&unseen) };
        std::fs::write(&path, "").unwrap();
        assert_eq!(check_place(&unseen), Ok(()));
        let (ended, seen) = look(vec![watched()]);
        assert!(ended.is_empty(), "its port was removed though its container lives");
        let [(_, now)] = &seen[..] else { panic!("{} were seen", seen.len()) };
        assert_eq!(now.inode, inode(&path).unwrap());
        let (ended, seen) = look(vec![Watched { was: Some(*now), ..watched() }]);
        assert!(ended.is_empty() && seen.is_empty());
        std::fs::remove_file(&path).unwrap();
        let (ended, seen) = look(vec![watched()]);
        assert!(ended.len() == 1 && seen.is_empty());
    }

    #[test]
    fn a_tap_has_gone_only_if_that_is_what_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let tap = |netns: &Path| {
            let text = format!(
                "name = \"demo\"\n[network.lan]\n[tap.t]\nadopt = true\nnetns = \"{}\"\ndevice = \"eth0\"\ncontainer = \"pods/a/eth0\"\n",
                netns.display()
            );
            crate::file::parse(&text, Path::new("/x/demo.toml")).unwrap().taps.remove(0)
        };
        let (absent, plain, itself) = (dir.path().join("absent"), dir.path().join("plain"), dir.path().join("itself"));
        std::fs::write(&plain, "").unwrap();
        std::os::unix::fs::symlink(&itself, &itself).unwrap();
        assert!(tap_has_gone(&tap(&absent)) && tap_has_gone(&tap(&plain)));
        assert!(!tap_has_gone(&tap(&itself)));
    }

    #[test]
    fn a_namespace_with_the_inode_of_one_before_it_is_another_by_its_cookie() {
        let path = Path::new("/proc/thread-self/ns/net");
        let now = identity(path).unwrap();
        let Some(cookie) = now.cookie else {
            return tombolo_testing::skip("no cookie: it takes root to enter a namespace, and Linux 5.14 or later");
        };
        let other = Identity { cookie: Some(cookie + 1), ..now };
        assert!(now == identity(path).unwrap() && now != other);
        assert!(now == Identity { cookie: None, ..now }, "a record of an earlier version");
    }

    #[test]
    fn a_namespace_is_found_by_name_and_by_path_and_is_known_by_its_inode() {
        assert_eq!(path_of("web"), Path::new("/run/netns/web"));
        assert_eq!(path_of("/proc/7/ns/net"), Path::new("/proc/7/ns/net"));
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ns");
        assert!(inode(&path).is_err());
        std::fs::write(&path, "").unwrap();
        let first = inode(&path).unwrap();
        std::fs::rename(&path, dir.path().join("old")).unwrap();
        std::fs::write(&path, "").unwrap();
        assert_ne!(inode(&path).unwrap(), first);
    }
}
