//! The file by which Kata Containers learns of a sandbox's network devices ("directly attachable
//! network", DAN).
//!
//! Kata's runtime in Rust reads `FOLDER/SANDBOX.json` when it starts the virtual machine of a
//! sandbox, whose ID is CNI_CONTAINERID. With such a file it looks at no interface of the
//! namespace. The file lists devices, each with what the guest's interface is to have:
//! `crates/resource/src/network/dan.rs` of that runtime, as of August 2026. Its `vhost-user` device
//! is a socket at which the monitor listens.
//!
//! # Invariants
//! - A file holds the devices of all networks of the sandbox. Entries of other plugins stay as they
//!   are, and a file goes with its last entry.
//! - A file is replaced as a whole, so Kata never reads half of one. The next one is `ID.json.next`
//!   until then. What a call that was killed has left of that goes with the next call for the
//!   sandbox, or with GC. A runtime makes one call at a time per container (CNI 1.1), so there is
//!   no lock.
//! - Kata acts on these files as root. So the folder has to be this user's, and no other user may
//!   write in it.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};
use tombolo_host::file::Mac;

use crate::error::CniError;
use crate::fabric::Place;

/// Longest file that is read: a device has about 500 bytes.
const MAX_BYTES: u64 = 1 << 20;
/// Longest time that writing a file may take.
const WRITTEN: Duration = Duration::from_secs(60);
/// Descriptors of each of the guest's rings; also what Kata has where a file says nothing.
const QUEUE_SIZE: u16 = 256;

/// The file of a sandbox.
pub(crate) fn path(folder: &Path, container: &str) -> PathBuf {
    folder.join(format!("{container}.json"))
}

/// The entry of an interface behind a vhost-user socket. Its one queue pair is what the fabric's
/// port has.
pub(crate) fn device(interface: &str, mac: Mac, socket: &str, place: &Place) -> Value {
    let mut addresses = vec![format!("{}/{}", place.ip, place.prefix)];
    addresses.extend(place.six.map(|six| format!("{}/64", six.ip)));
    let routers = place.router.map(|ip| ip.to_string());
    let routers = routers.into_iter().chain(place.six.and_then(|six| six.router).map(|ip| ip.to_string()));
    // No destination is the default route; the gateway tells its family.
    let routes: Vec<Value> = routers.map(|gateway| json!({ "dest": "", "gateway": gateway })).collect();
    json!({
        "name": interface,
        "guest_mac": mac.to_string(),
        "device": { "type": "vhost-user", "path": socket, "queue_num": 1, "queue_size": QUEUE_SIZE },
        "network_info": {
            "interface": { "ip_addresses": addresses, "mtu": place.mtu },
            "routes": routes,
            "neighbors": [],
        },
    })
}

/// The socket of an entry, if it has one.
pub(crate) fn socket_of(device: &Value) -> Option<&str> {
    device.get("device")?.get("path")?.as_str()
}

fn is_named(device: &Value, interface: &str) -> bool {
    device.get("name").and_then(Value::as_str) == Some(interface)
}

fn system(path: &Path, error: &std::io::Error) -> CniError {
    CniError::System(format!("{}: {error}", path.display()))
}

/// Makes the folder if it is not there.
///
/// # Errors
/// It cannot be made, belongs to another user, or others may write in it.
fn sound_folder(folder: &Path) -> Result<(), CniError> {
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder);
    made.map_err(|error| system(folder, &error))?;
    let found = std::fs::metadata(folder).map_err(|error| system(folder, &error))?;
    let user = rustix::process::geteuid().as_raw();
    if found.uid() == user && found.mode() & 0o022 == 0 {
        return Ok(());
    }
    Err(CniError::System(format!(
        "{}: expected a folder of user {user} in which no other user can write, found user {} and mode {:o}; Kata acts on its files",
        folder.display(),
        found.uid(),
        found.mode() & 0o7777
    )))
}

/// What the file has; `None` if there is none.
///
/// # Errors
/// It cannot be read, or is not of this form.
fn read(path: &Path) -> Result<Option<Value>, CniError> {
    let options = rustix::fs::OFlags::NOFOLLOW.bits() | rustix::fs::OFlags::NONBLOCK.bits();
    let file = std::fs::File::options().read(true).custom_flags(options.cast_signed()).open(path);
    let file = match file {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        other => other.map_err(|error| system(path, &error))?,
    };
    let mut bytes = Vec::new();
    file.take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(|error| system(path, &error))?;
    let value = serde_json::from_slice::<Value>(&bytes).ok().filter(|_| bytes.len() as u64 <= MAX_BYTES);
    let value = value.filter(|value| value.get("devices").is_some_and(Value::is_array));
    let expected = "expected JSON with a list \"devices\", as Kata reads it; remove the file";
    value.map(Some).ok_or_else(|| CniError::System(format!("{}: {expected}", path.display())))
}

/// The devices of what [`read`] gave.
fn devices(value: &mut Value) -> Option<&mut Vec<Value>> {
    value.get_mut("devices").and_then(Value::as_array_mut)
}

/// Where a file is written before it takes its place.
fn next_of(path: &Path) -> PathBuf {
    path.with_extension("json.next")
}

/// Removes a file; one that is not there is fine.
fn remove(path: &Path) -> std::io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Replaces the file.
fn write(path: &Path, value: &Value) -> Result<(), CniError> {
    let next = next_of(path);
    let written = (|| {
        // What a call that was killed has left.
        remove(&next)?;
        let mut file = std::fs::File::options().write(true).create_new(true).mode(0o600).open(&next)?;
        file.write_all(value.to_string().as_bytes())?;
        std::fs::rename(&next, path)
    })();
    written.map_err(|error| {
        let _ = std::fs::remove_file(&next);
        system(path, &error)
    })
}

/// Writes an entry into the file of a sandbox, in place of one of the same name.
pub(crate) fn put(folder: &Path, container: &str, device: Value) -> Result<(), CniError> {
    sound_folder(folder)?;
    let path = path(folder, container);
    let mut value = read(&path)?.unwrap_or_else(|| json!({ "devices": [] }));
    if let (Some(all), Some(name)) = (devices(&mut value), device.get("name").and_then(Value::as_str)) {
        all.retain(|other| !is_named(other, name));
        all.push(device);
    }
    write(&path, &value)
}

/// Removes an entry; one that is not there is fine. A file that is not of this form is left: it is
/// another's.
pub(crate) fn take(folder: &Path, container: &str, interface: &str) -> Result<(), CniError> {
    let path = path(folder, container);
    // What a call that was killed has left.
    let next = next_of(&path);
    remove(&next).map_err(|error| system(&next, &error))?;
    let Ok(Some(mut value)) = read(&path) else { return Ok(()) };
    let Some(all) = devices(&mut value) else { return Ok(()) };
    let before = all.len();
    all.retain(|device| !is_named(device, interface));
    match all.len() {
        0 => std::fs::remove_file(&path).map_err(|error| system(&path, &error)),
        after if after < before => write(&path, &value),
        _ => Ok(()),
    }
}

/// The entry of an interface.
pub(crate) fn find(folder: &Path, container: &str, interface: &str) -> Result<Option<Value>, CniError> {
    let value = read(&path(folder, container))?;
    let all = value.as_ref().and_then(|value| value.get("devices")?.as_array());
    Ok(all.and_then(|all| all.iter().find(|device| is_named(device, interface))).cloned())
}

/// Removes what killed calls have left for sandboxes that no further call is for. Such a file does
/// not tell whose it is, and one that is young may be one that another call is writing.
///
/// # Errors
/// The system's, the last one; the rest is removed all the same.
pub(crate) fn sweep(folder: &Path) -> Result<(), CniError> {
    let mut failed = None;
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        let is_next = path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.ends_with(".json.next"));
        let written = || entry.metadata().and_then(|found| found.modified()).ok();
        if is_next && written().and_then(|at| at.elapsed().ok()).is_some_and(|age| age >= WRITTEN) {
            failed = remove(&path).map_err(|error| system(&path, &error)).err().or(failed);
        }
    }
    failed.map_or(Ok(()), Err)
}

/// Container, interface and socket of all entries whose socket is in the folder `sockets`.
pub(crate) fn all_in(folder: &Path, sockets: &Path) -> Vec<(String, String, PathBuf)> {
    let mut out = Vec::new();
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        let Some(container) = path.file_stem().and_then(|stem| stem.to_str()) else { continue };
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        let Ok(Some(mut value)) = read(&path) else { continue };
        for device in devices(&mut value).into_iter().flatten() {
            let socket = socket_of(device).map(PathBuf::from).filter(|path| path.parent() == Some(sockets));
            if let (Some(socket), Some(name)) = (socket, device.get("name").and_then(Value::as_str)) {
                out.push((container.to_string(), name.to_string(), socket));
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::fabric::Place6;

    fn place() -> Place {
        Place {
            ip: Ipv4Addr::new(10, 87, 0, 9),
            prefix: 24,
            router: Some(Ipv4Addr::new(10, 87, 0, 254)),
            nameserver: None,
            domain: "demo.internal".into(),
            mtu: 1400,
            six: Some(Place6 { ip: "fd00::9".parse().unwrap(), router: "fd00::2".parse().ok(), nameserver: None }),
        }
    }

    fn entry(name: &str) -> Value {
        device(name, Mac([2, 0, 0, 0, 0, 1]), "/run/tombolo/demo/c.sock", &place())
    }

    #[test]
    fn an_entry_is_of_the_form_that_kata_reads() {
        let expected = r#"{
            "name": "eth0",
            "guest_mac": "02:00:00:00:00:01",
            "device": { "type": "vhost-user", "path": "/run/tombolo/demo/c.sock", "queue_num": 1, "queue_size": 256 },
            "network_info": {
                "interface": { "ip_addresses": ["10.87.0.9/24", "fd00::9/64"], "mtu": 1400 },
                "routes": [{ "dest": "", "gateway": "10.87.0.254" }, { "dest": "", "gateway": "fd00::2" }],
                "neighbors": []
            }
        }"#;
        assert_eq!(entry("eth0"), serde_json::from_str::<Value>(expected).unwrap());
    }

    #[test]
    fn entries_come_and_go_and_those_of_others_stay() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("kata/dans");
        put(&folder, "c1", entry("eth0")).unwrap();
        assert_eq!(std::fs::metadata(&folder).unwrap().mode() & 0o777, 0o700);
        assert_eq!(std::fs::metadata(path(&folder, "c1")).unwrap().mode() & 0o777, 0o600);
        // Another plugin's, of a form that this one does not know.
        let other = json!({ "netns": "/x", "devices": [{ "name": "net1", "device": { "type": "vfio" } }] });
        std::fs::write(path(&folder, "c2"), other.to_string()).unwrap();
        for _ in 0..2 {
            put(&folder, "c2", entry("eth0")).unwrap();
        }
        let both = read(&path(&folder, "c2")).unwrap().unwrap();
        assert_eq!((both["devices"].as_array().unwrap().len(), &both["netns"]), (2, &json!("/x")));
        assert_eq!(find(&folder, "c2", "eth0").unwrap(), Some(entry("eth0")));
        let mut all = all_in(&folder, Path::new("/run/tombolo/demo"));
        all.sort();
        let names: Vec<_> = all.iter().map(|(container, interface, _)| (&container[..], &interface[..])).collect();
        assert_eq!(names, [("c1", "eth0"), ("c2", "eth0")]);
        assert!(all.iter().all(|(_, _, socket)| socket.starts_with("/run/tombolo/demo")));
        assert!(all_in(&folder, Path::new("/run/tombolo/other")).is_empty());
        for _ in 0..2 {
            take(&folder, "c2", "eth0").unwrap();
            take(&folder, "c1", "eth0").unwrap();
        }
        assert_eq!(read(&path(&folder, "c2")).unwrap(), Some(other));
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1, "the file goes with its last entry");
        take(&folder.join("absent"), "c1", "eth0").unwrap();
    }

    #[test]
    fn what_a_killed_call_left_goes_with_the_sandbox_and_with_gc() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
        let folder = dir.path().join("dans");
        put(&folder, "c1", entry("eth0")).unwrap();
        // A kill before the first file was there, and one before a second entry.
        let left = |container: &str| next_of(&path(&folder, container));
        for container in ["c1", "c2", "c3", "c4"] {
            std::fs::write(left(container), "{").unwrap();
        }
        take(&folder, "c2", "eth0").unwrap();
        assert!(!left("c2").exists() && left("c3").exists());
        let age = |container: &str| {
            let file = std::fs::File::options().write(true).open(left(container)).unwrap();
            file.set_modified(std::time::SystemTime::now() - WRITTEN).unwrap();
        };
        age("c1");
        age("c3");
        sweep(&folder).unwrap();
        assert!(!left("c1").exists() && !left("c3").exists() && left("c4").exists(), "one that is written now stays");
        assert!(find(&folder, "c1", "eth0").unwrap().is_some());
        put(&folder, "c4", entry("eth0")).unwrap();
        for container in ["c1", "c4"] {
            std::fs::write(left(container), "{").unwrap();
            take(&folder, container, "eth0").unwrap();
        }
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
        sweep(&folder.join("absent")).unwrap();
    }

    #[test]
    fn a_folder_or_file_that_cannot_be_right_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
        let refused = |container: &str| put(dir.path(), container, entry("eth0")).unwrap_err();
        assert!(refused("c1").to_string().contains("mode 777"), "{}", refused("c1"));
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
        for text in ["", "[]", "{", r#"{"devices":{}}"#, &"[".repeat(2000), &" ".repeat(MAX_BYTES as usize + 1)] {
            std::fs::write(path(dir.path(), "c1"), text).unwrap();
            assert!(refused("c1").to_string().contains("devices"), "{text:.20}");
            take(dir.path(), "c1", "eth0").unwrap();
            assert_eq!(std::fs::read_to_string(path(dir.path(), "c1")).unwrap(), *text, "it is left");
        }
        // Nothing is read or written through a link, nor waited for at a pipe.
        let kept = dir.path().join("kept");
        std::fs::write(&kept, r#"{"devices":[]}"#).unwrap();
        std::os::unix::fs::symlink(&kept, path(dir.path(), "c2")).unwrap();
        assert_eq!(refused("c2").code(), 5);
        assert_eq!(std::fs::read_to_string(&kept).unwrap(), r#"{"devices":[]}"#);
    }
}
