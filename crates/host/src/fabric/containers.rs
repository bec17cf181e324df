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
//! - A namespace is known by the device and inode of its path. A pid that is used again, or a name
//!   that is given again, is another namespace.
//! - The device is persistent. It ends with its namespace, with `down`, or the plugin deletes it. So a
//!   container keeps it while the daemon is away. `down` deletes only what it can tell for the device
//!   that it had: in the same namespace, with the same name and MAC address.
//! - A vhost-user port of a container's virtual machine has nothing in the namespace. The namespace
//!   only tells how long the container lives.
//! - A daemon that starts forgets the ports whose namespace or device is gone. They are no fault.
//!
//! - A container's name comes from who starts it: in Kubernetes, from whoever may create a pod. So it has no more rights than
//!   that of a DHCP client. The file's author may choose any name.
//!
//! # Limits
//! The namespace of a container that dies without DEL is there for up to two seconds.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Weak;
use std::time::Duration;

use tokio::sync::Mutex;
use tombolo_port::link::{Interface, LinkError, Netns};
use tombolo_switch::gateway::{LeaseRecord, is_reserved};

use super::{FabricError, Running, Say};
use crate::config::Document;
use crate::file::{Contained, Fabric, Mac, Tap, Target};
use crate::rundir::{ContainerPlace, RunDir};

/// How often the namespaces are looked at.
const LOOK: Duration = Duration::from_secs(1);

/// A namespace: device and inode of its file.
type Inode = (u64, u64);

/// Where the ports of containers lead, by their names.
pub(crate) type Containers = BTreeMap<String, ContainerPlace>;

/// How long `down` waits for the taps of containers to go. A path may lead to a file system that does not answer.
const DELETES: Duration = Duration::from_secs(60);

/// The file of a namespace that is called so, as [`Netns::open`] finds it.
fn path_of(netns: &str) -> PathBuf {
    if netns.contains('/') { netns.into() } else { Path::new("/run/netns").join(netns) }
}

fn inode(path: &Path) -> Option<Inode> {
    std::fs::metadata(path).ok().map(|m| (m.dev(), m.ino()))
}

/// Whether the tap's device can be taken up: it is there, and has the address that it was given.
fn is_there(tap: &Tap) -> bool {
    // Where a monitor opens it, the address is its guest's.
    mac_of(tap.netns.as_deref(), &tap.device).is_some_and(|mac| tap.monitor || mac == tap.mac.0)
}

/// Whether a container's namespace has ended, or is another one than the daemon before this one saw. `recorded` has what that was.
fn has_gone(member: &Contained<'_>, recorded: &Containers) -> bool {
    match (inode(&path_of(member.netns)), recorded.get(member.name)) {
        (None, _) => true,
        (Some(now), Some(was)) => now != was.inode,
        (Some(_), None) => false,
    }
}

/// The MAC address of an interface, if it is there. Without a namespace it is one of the host.
fn mac_of(netns: Option<&str>, device: &str) -> Option<[u8; 6]> {
    let netns = netns.map(Netns::open).transpose().ok()?;
    Interface::open(netns.as_ref(), device).ok()?.mac().ok()
}

/// Deletes the tap of a container, if it is still the one that the port had; what is wrong, if it stays.
fn delete_tap(place: &ContainerPlace) -> Result<(), LinkError> {
    let Some((device, mac)) = place.tap.as_ref().filter(|_| inode(&place.netns) == Some(place.inode)) else {
        return Ok(());
    };
    // Paths of namespaces are from text.
    let netns = Netns::open(&place.netns.to_string_lossy())?;
    Interface::delete_own(&netns, device, *mac).map(drop)
}

/// Forgets the ports of containers that ended while no daemon ran.
pub(super) fn without_gone(mut spec: Fabric, base: Option<&Document>, dir: &mut RunDir, say: &Say) -> Fabric {
    let taps = spec.taps.iter().filter(|t| t.container.is_some() && !is_there(t)).map(|t| t.name.clone());
    let recorded = dir.owner().containers.clone();
    let members = spec.contained().filter(|member| has_gone(member, &recorded)).map(|member| member.name.to_string());
    let gone: BTreeSet<String> = taps.chain(members).collect();
    if gone.is_empty() {
        return spec;
    }
    spec.taps.retain(|t| !gone.contains(&t.name));
    spec.ports.retain(|p| !gone.contains(&p.name));
    spec.forwards.retain(|f| !matches!(&f.target, Target::Name(name) if gone.contains(name)));
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
    spec
}

impl Running {
    /// Notes where the ports of containers lead, also for daemons that follow.
    pub(super) fn note_containers(&mut self) {
        let mut now = Containers::new();
        for member in self.spec.contained() {
            let noted = self.containers.get(member.name).cloned().unwrap_or_else(|| {
                let netns = path_of(member.netns);
                let tap = self.spec.taps.iter().find(|tap| member.word == "tap" && tap.name == member.name);
                let tap = tap.and_then(|tap| Some((tap.device.clone(), mac_of(Some(member.netns), &tap.device)?)));
                // One that is gone already has none, which the next look finds.
                ContainerPlace { inode: inode(&netns).unwrap_or_default(), netns, tap }
            });
            now.insert(member.name.to_string(), noted);
        }
        self.containers = now;
        self.record_containers();
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
        if tokio::time::timeout(DELETES, tokio::task::spawn_blocking(delete)).await.is_err() {
            (self.say)("down: the namespaces of containers do not answer; interfaces in them may stay");
        }
    }

    /// Whether the containers among the members `names` of `spec`, which are to be added, may have these names.
    ///
    /// # Errors
    /// One is a name that no client gets by asking for it, or that of a client with a lease.
    pub(super) fn can_be_called(&self, spec: &Fabric, names: &[String]) -> Result<(), FabricError> {
        for member in spec.contained().filter(|member| names.iter().any(|name| name == member.name)) {
            let (word, name) = (member.word, member.name);
            let refused = |why: String| Err(FabricError::State(format!("[{word}.{name}]: {why}; choose another name")));
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
    fn containers(&self) -> Vec<(String, PathBuf, Inode)> {
        let of = |m: Contained<'_>| Some((m.name.to_string(), path_of(m.netns), self.containers.get(m.name)?.inode));
        self.spec.contained().filter_map(of).collect()
    }
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
        // A path may lead to a file system that does not answer.
        let look = move || all.into_iter().filter(|(_, path, was)| inode(path) != Some(*was)).collect::<Vec<_>>();
        let Ok(gone) = tokio::task::spawn_blocking(look).await else { continue };
        for (name, _, was) in gone {
            let Some(running) = me.upgrade() else { return };
            let mut running = running.lock().await;
            // It may have been removed and added again meanwhile.
            if running.applying || running.containers.get(&name).map(|place| place.inode) != Some(was) {
                continue;
            }
            match running.remove(&name) {
                Ok(()) => (running.say)(&format!("port {name}: its container has ended")),
                Err(error) => (running.say)(&format!("port {name}: its container has ended: {error}")),
            }
            running.note_containers();
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
        let place = ContainerPlace { netns: path.clone(), inode: inode(&path).unwrap(), tap: None };
        let recorded = Containers::from([("vm".into(), place)]);
        assert!(!has_gone(&recorded));
        assert!(!has_gone(&Containers::new()), "a record of an earlier version has none");
        std::fs::rename(&path, dir.path().join("old")).unwrap();
        std::fs::write(&path, "").unwrap();
        assert!(has_gone(&recorded), "there is a namespace at the path, and it is not the container's");
        std::fs::remove_file(&path).unwrap();
        assert!(has_gone(&recorded) && has_gone(&Containers::new()));
    }

    #[test]
    fn a_namespace_is_found_by_name_and_by_path_and_is_known_by_its_inode() {
        assert_eq!(path_of("web"), Path::new("/run/netns/web"));
        assert_eq!(path_of("/proc/7/ns/net"), Path::new("/proc/7/ns/net"));
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ns");
        assert_eq!(inode(&path), None);
        std::fs::write(&path, "").unwrap();
        let first = inode(&path);
        std::fs::rename(&path, dir.path().join("old")).unwrap();
        std::fs::write(&path, "").unwrap();
        assert!(first.is_some() && inode(&path) != first);
    }
}
