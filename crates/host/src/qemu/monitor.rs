//! What a machine's monitor (QMP) is for: pressing the guest's power button, and telling which
//! process QEMU is.
//!
//! The socket has one client at a time. A second one waits for its greeting, here not longer than
//! `ANSWER`. An attacker who broke out of a guest may answer anything: what is read is bounded, and
//! its meaning is yes or no.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;

/// How long each answer may take.
const ANSWER: Duration = Duration::from_secs(1);
/// Bytes of a whole talk that are read at most: greeting, answers, events between them.
const TALK_BYTES: u64 = 64 << 10;

/// The process that listens at `socket`, as the kernel has it (SO_PEERCRED, unix(7)). Nothing is
/// said or waited for.
pub fn listener(socket: &Path) -> Option<u32> {
    let stream = UnixStream::connect(socket).ok()?;
    let pid = tombolo_shm::credentials::peer(&stream).ok()?.pid_or_zero();
    (pid != 0).then_some(pid)
}

/// Presses the power button of the machine whose monitor listens at `socket`. What the guest makes
/// of it is its own matter.
///
/// # Errors
/// If there is no QEMU, or it does not answer as it should.
pub fn power_button(socket: &Path) -> io::Result<()> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(ANSWER))?;
    stream.set_write_timeout(Some(ANSWER))?;
    let mut lines = BufReader::new(stream.try_clone()?.take(TALK_BYTES));
    next(&mut lines, "QMP")?;
    for command in ["qmp_capabilities", "system_powerdown"] {
        stream.write_all(format!("{{\"execute\":\"{command}\"}}\n").as_bytes())?;
        next(&mut lines, "return")?;
    }
    Ok(())
}

/// Reads up to the next message that is no event; it has to have `key`.
fn next(lines: &mut impl BufRead, key: &str) -> io::Result<()> {
    let odd = |what: String| io::Error::new(io::ErrorKind::InvalidData, format!("the monitor: {what}"));
    loop {
        let mut line = String::new();
        if lines.read_line(&mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let message: Value = serde_json::from_str(&line).map_err(|e| odd(e.to_string()))?;
        if message.get(key).is_some() {
            return Ok(());
        }
        if message.get("event").is_none() {
            return Err(odd(format!("expected {key}, found {}", line.trim())));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;
    use std::process::{Command, Stdio};
    use std::time::Instant;

    /// A guest of one sector that obeys its power button: it turns the button's event on (ICH9's
    /// PM1 block is where SeaBIOS puts it, at 0x600; ACPI 6.5 §4.8.3), says `R` on the serial port,
    /// waits for the event, and turns the machine off (SLP_EN with the type of S5, which is 0 in
    /// QEMU).
    const GUEST: &[u8] = &[
        0xfa, // cli
        0xba, 0x02, 0x06, // mov dx, 0x602  PM1_EN
        0xb8, 0x00, 0x01, // mov ax, 0x100  PWRBTN_EN
        0xef, // out dx, ax
        0xba, 0xf8, 0x03, // mov dx, 0x3f8  COM1
        0xb0, b'R', // mov al, 'R'
        0xee, // out dx, al
        0xba, 0x00, 0x06, // mov dx, 0x600  PM1_STS
        0xed, // wait: in ax, dx
        0xf6, 0xc4, 0x01, // test ah, 1     PWRBTN_STS
        0x74, 0xfa, // jz wait
        0xba, 0x04, 0x06, // mov dx, 0x604  PM1_CNT
        0xb8, 0x00, 0x20, // mov ax, 0x2000 SLP_EN
        0xef, // out dx, ax
        0xf4, // hlt
    ];

    #[test]
    fn a_guest_that_obeys_its_power_button_turns_itself_off() {
        let Ok(qemu) = crate::qemu::probe::find() else {
            return tombolo_testing::skip("no qemu-system-x86_64");
        };
        let dir = tempfile::tempdir().unwrap();
        let (disk, console, socket) = (dir.path().join("disk"), dir.path().join("c"), dir.path().join("vm.qmp"));
        // SeaBIOS boots no disk of a single sector.
        let mut sectors = vec![0; 1 << 20];
        sectors[..GUEST.len()].copy_from_slice(GUEST);
        sectors[510..512].copy_from_slice(&[0x55, 0xaa]);
        std::fs::write(&disk, sectors).unwrap();
        let mut child = Command::new(&qemu.path)
            .args(["-nodefaults", "-no-user-config", "-display", "none", "-M", "q35,accel=tcg", "-m", "16M"])
            .args(["-drive", &format!("if=none,id=disk,format=raw,file={}", disk.display())])
            .args(["-device", "virtio-blk-pci,drive=disk"])
            .args(["-serial", &format!("file:{}", console.display())])
            .args(["-qmp", &format!("unix:{},server=on,wait=off", socket.display())])
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        let process = crate::process::Process::open(child.id()).unwrap();
        // The wait for QEMU's end is the pause between two looks.
        while !std::fs::read(&console).unwrap_or_default().ends_with(b"R") {
            let ended = process.wait(Duration::from_millis(20));
            if ended || Instant::now() > deadline {
                let _ = (child.kill(), child.wait());
                panic!("the guest did not boot (QEMU ended: {ended})");
            }
        }
        let listens = listener(&socket);
        let pressed = power_button(&socket);
        let off = process.wait(Duration::from_secs(20));
        let _ = child.kill();
        let status = child.wait().unwrap();
        pressed.unwrap();
        assert_eq!((listens, listener(&socket)), (Some(child.id()), None));
        assert!(off && status.success(), "off: {off}, {status}");
    }

    #[test]
    fn a_monitor_that_talks_nonsense_or_nothing_is_left_soon() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("vm.qmp");
        assert_eq!(power_button(&socket).unwrap_err().kind(), io::ErrorKind::NotFound);
        let listener = UnixListener::bind(&socket).unwrap();
        let begun = Instant::now();
        assert_eq!(power_button(&socket).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        assert!(begun.elapsed() < Duration::from_secs(10));
        drop(listener.accept().unwrap());
        for said in ["garbage\n".to_string(), "{\"error\":{}}\n".into(), "x".repeat(100_000)] {
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let (mut peer, _) = listener.accept().unwrap();
                    // The other side may hang up before all of it is said.
                    let _ = peer.write_all(said.as_bytes());
                });
                assert_eq!(power_button(&socket).unwrap_err().kind(), io::ErrorKind::InvalidData);
            });
        }
    }
}
