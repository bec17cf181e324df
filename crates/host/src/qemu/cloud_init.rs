//! The disk by which cloud-init in a guest is given its user-data: the NoCloud source.
//!
//! A small FAT volume with the label that cloud-init looks for ("cidata", in either case), the file
//! `user-data` as it is, and a `meta-data` with the machine's name. It is written when the machine
//! starts, into the runtime directory. The instance ID depends on the user-data, so that a guest
//! does again what belongs to a new instance when that has changed.

use std::fs;
use std::io::{self, Cursor, Write};
use std::path::{Path, PathBuf};

use fatfs::{FileSystem, FormatVolumeOptions, FsOptions, format_volume};

use crate::rundir::private_file;

/// The volume's label, padded as FAT has it.
const LABEL: [u8; 11] = *b"CIDATA     ";
/// The size of a volume is a multiple of this.
const STEP_BYTES: usize = 1 << 20;
/// Room for the tables, the directory and `meta-data`.
const OWN_BYTES: usize = 256 << 10;
/// No user-data is so long: cloud sources allow some 16 KiB.
const MAX_BYTES: u64 = 8 << 20;

/// Where a machine's volume is.
pub fn path(runtime: &Path, machine: &str) -> PathBuf {
    runtime.join(format!("{machine}.seed"))
}

/// Writes the volume of a machine from its file of user-data.
///
/// # Errors
/// The system's; a file of more than 8 MiB.
pub fn write(place: &Path, machine: &str, user_data: &Path) -> io::Result<()> {
    let length = fs::metadata(user_data)?.len();
    if length > MAX_BYTES {
        let text = format!("{}: expected at most 8 MiB of user-data, found {length} bytes", user_data.display());
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, text));
    }
    let volume = volume(machine, &fs::read(user_data)?)?;
    private_file(place)?.write_all(&volume)
}

/// The bytes of a volume with this user-data.
fn volume(machine: &str, user_data: &[u8]) -> io::Result<Vec<u8>> {
    let bytes = (user_data.len() + OWN_BYTES).next_multiple_of(STEP_BYTES);
    let mut disk = Cursor::new(vec![0; bytes]);
    // The same content gives the same bytes.
    format_volume(&mut disk, FormatVolumeOptions::new().volume_label(LABEL).volume_id(0x746d_626f))?;
    let meta_data = format!("instance-id: {machine}-{:016x}\nlocal-hostname: {machine}\n", hash(user_data));
    {
        let volume = FileSystem::new(&mut disk, FsOptions::new())?;
        let root = volume.root_dir();
        for (name, content) in [("user-data", user_data), ("meta-data", meta_data.as_bytes())] {
            root.create_file(name)?.write_all(content)?;
        }
    }
    Ok(disk.into_inner())
}

/// FNV-1a of 64 bits.
fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::process::Command;

    #[test]
    fn a_volume_has_both_files_and_depends_on_the_content_alone() {
        let user_data = b"#cloud-config\nhostname: x\n".repeat(50_000);
        let bytes = volume("web", &user_data).unwrap();
        assert_eq!(bytes, volume("web", &user_data).unwrap());
        let mut disk = Cursor::new(bytes);
        let volume = FileSystem::new(&mut disk, FsOptions::new()).unwrap();
        let read = |name: &str| {
            let mut content = Vec::new();
            volume.root_dir().open_file(name).unwrap().read_to_end(&mut content).unwrap();
            content
        };
        assert_eq!(read("user-data"), user_data);
        let meta_data = String::from_utf8(read("meta-data")).unwrap();
        assert!(
            meta_data.starts_with("instance-id: web-") && meta_data.ends_with("\nlocal-hostname: web\n"),
            "{meta_data}"
        );
    }

    #[test]
    fn a_volume_is_found_by_its_label_as_cloud_init_does_it() {
        let dir = tempfile::tempdir().unwrap();
        let (source, place) = (dir.path().join("user-data"), path(dir.path(), "web"));
        fs::write(&source, "#cloud-config\n").unwrap();
        write(&place, "web", &source).unwrap();
        let found = match Command::new("blkid")
            .args(["-p", "-s", "LABEL", "-s", "TYPE", "-o", "export"])
            .arg(&place)
            .output()
        {
            Ok(found) => String::from_utf8_lossy(&found.stdout).into_owned(),
            Err(error) => return eprintln!("SKIPPED: blkid: {error}"),
        };
        assert!(found.lines().any(|l| l == "LABEL=CIDATA") && found.lines().any(|l| l == "TYPE=vfat"), "{found}");
        assert!(write(&place, "web", &dir.path().join("absent")).is_err());
    }
}
