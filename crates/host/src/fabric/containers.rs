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
//! - The device is persistent, and is the container's. It is not deleted here: it ends with its
//!   namespace, or the plugin deletes it. So a container keeps it while the daemon is away.
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
use tombolo_port::link::{Interface, Netns};
use tombolo_switch::gateway::{LeaseRecord, is_reserved};

use super::{FabricError, Running, Say};
use crate::file::{Contained, Fabric, Mac, Tap, Target};
use crate::rundir::RunDir;

/// How often the namespaces are looked at.
const LOOK: Duration = Duration::from_secs(1);

/// A namespace: device and inode of its file.
type Inode = (u64, u64);

/// Namespaces of containers, by the name of the port.
pub(crate) type Namespaces = BTreeMap<String, Inode>;

/// The file of a namespace that is called so, as [`Netns::open`] finds it.
fn path_of(netns: &str) -> PathBuf {
    if netns.contains('/') { netns.into() } else { Path::new("/run/netns").join(netns) }
}

fn inode(path: &Path) -> Option<Inode> {
    std::fs::metadata(path).ok().map(|m| (m.dev(), m.ino()))
}

/// Whether the tap's device can be taken up: it is there, and has the address that it was given.
fn is_there(tap: &Tap) -> bool {
    let interface = || {
        let netns = tap.netns.as_deref().map(Netns::open).transpose().ok()?;
        Interface::open(netns.as_ref(), &tap.device).ok()?.mac().ok()
    };
    // Where a monitor opens it, the address is its guest's.
    interface().is_some_and(|mac| tap.monitor || mac == tap.mac.0)
}

/// Forgets the ports of containers that ended while no daemon ran.
pub(super) fn without_gone(mut spec: Fabric, dir: &mut RunDir, say: &Say) -> Fabric {
    let taps = spec.taps.iter().filter(|t| t.container.is_some() && !is_there(t)).map(|t| t.name.clone());
    let is_gone = |member: &Contained<'_>| member.word == "port" && inode(&path_of(member.netns)).is_none();
    let ports = spec.contained().filter(is_gone).map(|member| member.name.to_string());
    let gone: BTreeSet<String> = taps.chain(ports).collect();
    if gone.is_empty() {
        return spec;
    }
    spec.taps.retain(|t| !gone.contains(&t.name));
    spec.ports.retain(|p| !gone.contains(&p.name));
    spec.forwards.retain(|f| !matches!(&f.target, Target::Name(name) if gone.contains(name)));
    dir.record(|o| {
        for addition in &mut o.additions {
            addition.names.retain(|name| !gone.contains(name));
        }
        o.additions.retain(|a| !a.names.is_empty());
        o.rates.retain(|name, _| !gone.contains(name));
    });
    for name in gone {
        say(&format!("port {name}: its container has ended meanwhile; it is forgotten"));
    }
    spec
}

impl Running {
    /// Notes which namespaces the ports of containers are for.
    pub(super) fn note_namespaces(&mut self) {
        let mut now = Namespaces::new();
        for member in self.spec.contained() {
            let known = self.namespaces.get(member.name).copied();
            // One that is gone already has none, which the next look finds.
            let found = || inode(&path_of(member.netns));
            now.insert(member.name.to_string(), known.or_else(found).unwrap_or_default());
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
        let of = |m: Contained<'_>| Some((m.name.to_string(), path_of(m.netns), *self.namespaces.get(m.name)?));
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
            if running.applying || running.namespaces.get(&name) != Some(&was) {
                continue;
            }
            match running.remove(&name) {
                Ok(()) => (running.say)(&format!("port {name}: its container has ended")),
                Err(error) => (running.say)(&format!("port {name}: its container has ended: {error}")),
            }
            running.note_namespaces();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
