//! What a service manager is told, by sd_notify(3): that the fabric is up, and which process the
//! daemon is.
//!
//! `MAINPID=` goes out twice. The first time is when this daemon has taken a fabric over, since the
//! previous one ends at that moment. The second is with `READY=1`. A daemon that fails in between
//! is then a main process that failed, which the manager sees and may start again. Otherwise the
//! manager would see a main process that ended well. Without `NOTIFY_SOCKET` nothing happens.
//!
//! # Watchdog
//! Where the manager asks for it (`WatchdogSec=`), the daemon says twice per period that its
//! control plane and its workers turn. systemd tells the period only to the process of
//! `ExecStart=`. So a reload passes it on to the daemon that it starts.

use std::io::{self, PipeReader};
use std::os::fd::AsFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use rustix::process::Pid;
use tombolo_shm::environment::variable;
use tombolo_shm::passing;

/// How long a manager that is busy is waited for.
const TIMEOUT: Duration = Duration::from_secs(1);
/// The variable with the watchdog's period in microseconds.
const PERIOD: &str = "WATCHDOG_USEC";

/// The fabric is up, and this process is its daemon.
pub fn stands() {
    tell(&format!("READY=1\nMAINPID={}\n", std::process::id()));
}

/// This process is the daemon now.
pub(crate) fn took_over() {
    tell(&format!("MAINPID={}\n", std::process::id()));
}

/// The control plane and the workers turn.
pub(crate) fn works() {
    tell("WATCHDOG=1\n");
}

/// How often the manager expects [`works`], as sd_watchdog_enabled(3) finds it; `None` if it does
/// not.
pub(crate) fn watchdog_period() -> Option<Duration> {
    let [period, pid] = [PERIOD, "WATCHDOG_PID"].map(|name| std::env::var(name).ok());
    period_for(period.as_deref(), pid.as_deref(), std::process::id())
}

/// The period for the process `me` by the two variables.
fn period_for(period: Option<&str>, pid: Option<&str>, me: u32) -> Option<Duration> {
    let micros = period?.parse().ok().filter(|micros| *micros > 0)?;
    // It may be for a process that started us.
    pid.is_none_or(|pid| pid.parse() == Ok(me)).then(|| Duration::from_micros(micros))
}

/// The variable with the watchdog's period for a daemon that a reload starts: that of the main
/// process, which the manager names to a reload in `MAINPID`.
pub fn watchdog_for_daemon() -> Option<(&'static str, String)> {
    variable("NOTIFY_SOCKET")?;
    let main = std::env::var("MAINPID").ok()?.parse().ok().and_then(Pid::from_raw)?;
    let environment = std::fs::read(format!("/proc/{}/environ", main.as_raw_nonzero())).ok()?;
    Some((PERIOD, value_of(PERIOD, &environment)?))
}

/// A variable of an environment as proc(5) shows it.
fn value_of(name: &str, environment: &[u8]) -> Option<String> {
    let mut all = environment.split(|byte| *byte == 0).filter_map(|one| std::str::from_utf8(one).ok());
    all.find_map(|one| one.strip_prefix(name)?.strip_prefix('=').map(str::to_string))
}

/// Waits until the manager has read what it was told, for a process that is about to end: it hears
/// nothing of one that has.
pub(crate) fn settle() {
    let Some(socket) = socket() else { return };
    // The manager closes its end once it has read everything before.
    let sent = socket.and_then(|socket| -> io::Result<PipeReader> {
        let (reader, writer) = io::pipe()?;
        passing::send(&socket, b"BARRIER=1", &[writer.as_fd()], true)?;
        Ok(reader)
    });
    match sent {
        Ok(reader) => {
            let _ = crate::process::ends_within(&reader, TIMEOUT);
        }
        Err(error) => eprintln!("tombolo: waiting for the service manager: {error}"),
    }
}

fn tell(text: &str) {
    let Some(socket) = socket() else { return };
    if let Err(error) = socket.and_then(|socket| socket.send(text.as_bytes())) {
        eprintln!("tombolo: telling the service manager: {error}");
    }
}

/// Where the manager listens, if there is one.
fn socket() -> Option<io::Result<UnixDatagram>> {
    let place = variable("NOTIFY_SOCKET")?;
    let address = match place.as_encoded_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
        _ => SocketAddr::from_pathname(&place),
    };
    Some(address.and_then(|address| {
        let socket = UnixDatagram::unbound()?;
        socket.connect_addr(&address)?;
        socket.set_write_timeout(Some(TIMEOUT))?;
        Ok(socket)
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_watchdog_is_for_the_process_that_is_named() {
        let second = Some(Duration::from_secs(1));
        assert_eq!(period_for(Some("1000000"), Some("7"), 7), second);
        assert_eq!(period_for(Some("1000000"), None, 7), second);
        assert_eq!(period_for(Some("1000000"), Some("8"), 7), None);
        for none in [None, Some("0"), Some(""), Some("-1"), Some("1s")] {
            assert_eq!(period_for(none, Some("7"), 7), None, "{none:?}");
        }
    }

    #[test]
    fn a_variable_is_found_by_its_whole_name() {
        let environment = b"A=1\0XWATCHDOG_USEC=2\0WATCHDOG_USEC_X=3\0WATCHDOG_USEC=4\0";
        assert_eq!(value_of(PERIOD, environment).as_deref(), Some("4"));
        assert_eq!(value_of(PERIOD, b"A=WATCHDOG_USEC=4\0"), None);
        assert_eq!(value_of(PERIOD, b""), None);
    }
}
