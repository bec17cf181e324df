//! Disks that cannot be had: two machines of the file want one, or a program of this machine has it
//! already.
//!
//! # Purpose
//! QEMU locks the disks that it opens, so the second machine of a disk dies at its start. What is
//! told here is told before any machine starts, with the place in the file.
//!
//! # Limits
//! Locks are read from /proc/locks, which names files by device and inode. On file systems that
//! give their files another device there (btrfs, some overlays) a lock is not seen, and QEMU tells
//! it.

use std::cell::LazyCell;
use std::collections::HashSet;
use std::os::linux::fs::MetadataExt;
use std::path::Path;
use std::{fs, iter};

use rustix::fs::{major, minor};

use super::{Look, holding, section_of};
use crate::file::Boot;
use crate::{process, rundir};

/// Bytes of an image by whose locks QEMU tells that it writes, and that it lets no one else write
/// (block/file-posix.c: `RAW_LOCK_PERM_BASE` and `RAW_LOCK_SHARED_BASE`, plus the bit of
/// `BLK_PERM_WRITE`).
const WRITE_BYTES: [u64; 2] = [101, 201];

/// A file of this machine, whatever its path: the device's numbers and the inode.
type Ident = (u32, u32, u64);

fn ident(path: &Path) -> Option<Ident> {
    let meta = fs::metadata(path).ok()?;
    Some((major(meta.st_dev()), minor(meta.st_dev()), meta.st_ino()))
}

/// The keys that give a VM's disks, in their order. Without `disk` the first is of `disks` too,
/// which its place in the file says.
pub(super) fn keys() -> impl Iterator<Item = &'static str> {
    iter::once("disk").chain(iter::repeat("disks"))
}

impl Look<'_> {
    /// Each disk belongs to one machine, and to no other program.
    pub(super) fn disks(&mut self) {
        let mut had: Vec<(Ident, &str)> = Vec::new();
        let locks = fs::read_to_string("/proc/locks").unwrap_or_default();
        let fabric = self.fabric;
        let own = LazyCell::new(|| own_disks(&fabric.name));
        for m in &fabric.machines {
            let at = section_of(m);
            let Boot::Vm { disks, .. } = &m.boot else { continue };
            // Its own arguments may have QEMU share the disk, or not write it.
            if !m.qemu.is_empty() {
                continue;
            }
            for ((path, _), key) in disks.iter().zip(keys()) {
                let Some(ident) = ident(path) else { continue };
                let expected = "a disk that nothing else writes";
                if let Some((_, other)) = had.iter().find(|(had, _)| *had == ident) {
                    let whose = if *other == m.name { "the machine".into() } else { format!("\"{other}\"") };
                    let hint = Some("give each machine an image of its own".into());
                    self.say((&at, key), expected, format!("{}, which {whose} has already", path.display()), hint);
                } else if is_locked(&locks, ident) && !own.contains(&ident) {
                    let real = fs::canonicalize(path).unwrap_or_else(|_| path.clone());
                    let who =
                        holding(&real).map_or_else(String::new, |(pid, name)| format!(" (process {pid}, {name})"));
                    let found = format!("{}, which another program has{who}", path.display());
                    let hint = "end it, or give the machine an image of its own";
                    self.say_passing((&at, key), expected, found, Some(hint.into()));
                }
                had.push((ident, &m.name));
            }
        }
    }
}

/// The disks with which machines of the fabric run, also those that a killed daemon left.
fn own_disks(fabric: &str) -> HashSet<Ident> {
    let Ok(root) = rundir::runtime_root() else { return HashSet::new() };
    let of_word = |word: &String| ident(Path::new(&word.split_once("file=")?.1.replace(",,", ",")));
    let machines = process::machines(fabric, &root.join(fabric));
    machines.iter().flat_map(|(.., words)| words.iter().filter_map(of_word)).collect()
}

/// Whether a table of locks (proc_locks(5)) has one by which QEMU keeps others from writing the
/// file.
fn is_locked(table: &str, (major, minor, inode): Ident) -> bool {
    table.lines().any(|line| {
        // `1: OFDLCK ADVISORY READ -1 fe:00:4711 201 201`; `->` in front of those that wait.
        let words: Vec<_> = line.split_ascii_whitespace().collect();
        let [_, "OFDLCK" | "POSIX", _, _, _, file, start, end] = words[..] else { return false };
        let parts: Vec<_> = file.split(':').collect();
        let [a, b, c] = parts[..] else { return false };
        let hex = |text| u32::from_str_radix(text, 16);
        let Ok(start) = start.parse::<u64>() else { return false };
        let end = end.parse().unwrap_or(u64::MAX);
        hex(a) == Ok(major)
            && hex(b) == Ok(minor)
            && c.parse() == Ok(inode)
            && WRITE_BYTES.iter().any(|byte| (start..=end).contains(byte))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    /// Whether /proc/locks has a file of this file system by the device that stat(2) gives. It has
    /// not on btrfs.
    fn names_locked_files(path: &Path) -> bool {
        let file = fs::File::options().read(true).write(true).open(path).unwrap();
        rustix::fs::fcntl_lock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive).unwrap();
        let (major, minor, inode) = ident(path).unwrap();
        let name = format!("{major:02x}:{minor:02x}:{inode}");
        fs::read_to_string("/proc/locks").unwrap().split_ascii_whitespace().any(|word| word == name)
    }

    fn found(text: &str) -> Vec<(String, &'static str, String)> {
        let text = format!("name = \"disks\"\n[network.lan]\nsubnet = \"10.213.0.0/24\"\n{text}");
        let fabric = crate::file::parse(&text, Path::new("t.toml")).unwrap();
        super::super::faults(&fabric, None).into_iter().map(|f| (f.section, f.key, f.found)).collect()
    }

    #[test]
    fn a_disk_of_two_machines_is_told_whatever_its_path() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name).display().to_string();
        for name in ["a.raw", "b.raw"] {
            fs::write(at(name), "x").unwrap();
        }
        std::os::unix::fs::symlink(at("a.raw"), at("link.raw")).unwrap();
        let alone = format!("[vm.v]\ndisk = \"{}\"\n", at("a.raw"));
        assert_eq!(found(&format!("{alone}[vm.w]\ndisk = \"{}\"\n", at("b.raw"))), []);
        let both = found(&format!("{alone}[vm.w]\nkernel = \"Cargo.toml\"\ndisks = \"{}\"\n", at("link.raw")));
        assert_eq!(both, [("vm.w".into(), "disk", format!("{}, which \"v\" has already", at("link.raw")))]);
        let twice = found(&format!("{alone}disks = [\"{}\", \"{}\"]\n", at("b.raw"), at("a.raw")));
        assert_eq!(twice, [("vm.v".into(), "disks", format!("{}, which the machine has already", at("a.raw")))]);
    }

    #[test]
    fn a_table_of_locks_is_read() {
        let table = "1: OFDLCK ADVISORY  READ -1 fe:01:4711 201 201\n1: -> POSIX ADVISORY WRITE 7 fe:01:4712 0 EOF\n\
                     2: POSIX  ADVISORY  WRITE 7 fe:01:4713 0 EOF\n3: FLOCK  ADVISORY  WRITE 7 fe:01:4714 0 EOF\n\
                     4: OFDLCK ADVISORY  READ -1 fe:01:4715 100 100\n";
        let locked = |inode| is_locked(table, (0xfe, 1, inode));
        assert_eq!([4711, 4712, 4713, 4714, 4715].map(locked), [true, false, true, false, false]);
        assert!(!is_locked(table, (0xfe, 0, 4711)));
    }

    #[test]
    fn a_disk_that_qemu_has_is_told_with_its_process() {
        let Some(qemu) = super::super::which("qemu-system-x86_64") else {
            return tombolo_testing::skip("no qemu-system-x86_64");
        };
        let dir = tempfile::tempdir().unwrap();
        let disk = dir.path().join("a.raw");
        fs::write(&disk, vec![0; 4096]).unwrap();
        if !names_locked_files(&disk) {
            return tombolo_testing::skip("/proc/locks names files of this file system by another device");
        }
        let text = format!("[vm.v]\ndisk = \"{}\"\n", disk.display());
        assert_eq!(found(&text), []);
        let drive = format!("if=none,id=d,format=raw,file={}", disk.display());
        let mut command = Command::new(qemu);
        command.args(["-machine", "q35", "-S", "-nodefaults", "-display", "none", "-device", "virtio-blk-pci,drive=d"]);
        let mut child = command.args(["-drive", &drive]).stdin(Stdio::null()).spawn().unwrap();
        let told = || found(&text).first().cloned();
        tombolo_testing::until("the lock", || told().is_some());
        let (section, key, told) = told().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!((section.as_str(), key), ("vm.v", "disk"));
        assert!(told.contains(&format!("another program has (process {}, qemu-system-x86_64)", child.id())), "{told}");
        assert_eq!(found(&text), []);
    }
}
