//! What a service manager is told, by sd_notify(3): that this machine listens, that the loop turns,
//! and how it stands.
//!
//! `READY=1` goes out as soon as this machine listens. It does not wait for the fabric: that may
//! start later, or be replaced at any time, and a unit that waited would fail at boot for want of
//! it. `STATUS=` says which of the two it is. Where the manager asks for it (`WatchdogSec=`), the
//! main loop says four times per period that it turns. Without `NOTIFY_SOCKET` nothing happens.
//! Nothing here waits for the manager.

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::{Duration, Instant};

use crate::say;

/// The service manager, if there is one.
#[derive(Debug, Default)]
pub struct Manager {
    socket: Option<UnixDatagram>,
    /// How often it expects a sign of life.
    period: Option<Duration>,
    /// The last one that it got.
    alive: Option<Instant>,
    status: String,
}

/// The watchdog's period for the process `me`, as sd_watchdog_enabled(3) finds it.
fn period_for(period: Option<&str>, pid: Option<&str>, me: u32) -> Option<Duration> {
    let micros = period?.parse().ok().filter(|micros| *micros > 0)?;
    pid.is_none_or(|pid| pid.parse() == Ok(me)).then(|| Duration::from_micros(micros))
}

fn connected(place: &std::ffi::OsStr) -> io::Result<UnixDatagram> {
    let address = match place.as_encoded_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
        _ => SocketAddr::from_pathname(place),
    }?;
    let socket = UnixDatagram::unbound()?;
    socket.connect_addr(&address)?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

impl Manager {
    /// The one that the environment names.
    pub fn of_environment() -> Manager {
        let socket = std::env::var_os("NOTIFY_SOCKET").and_then(|place| {
            connected(&place).inspect_err(|error| say(&format!("reaching the service manager: {error}"))).ok()
        });
        let [period, pid] = ["WATCHDOG_USEC", "WATCHDOG_PID"].map(|name| std::env::var(name).ok());
        let period = period_for(period.as_deref(), pid.as_deref(), std::process::id());
        Manager { socket, period, alive: None, status: String::new() }
    }

    /// Whether it was told, or there is none.
    fn tell(&self, text: &str) -> bool {
        self.socket.as_ref().is_none_or(|socket| socket.send(text.as_bytes()).is_ok())
    }

    /// This machine listens.
    pub fn ready(&self) {
        if !self.tell("READY=1\n") {
            say("the service manager does not take that this machine listens");
        }
    }

    /// The main loop turns. To be called at least four times per second.
    pub fn works(&mut self) {
        let Some(period) = self.period else { return };
        let is_due = self.alive.is_none_or(|alive| alive.elapsed() >= period / 4);
        // One that was not taken is repeated at the next turn.
        if is_due && self.tell("WATCHDOG=1\n") {
            self.alive = Some(Instant::now());
        }
    }

    /// How it stands, for `systemctl status`.
    pub fn stands(&mut self, status: String) {
        if status != self.status && self.tell(&format!("STATUS={status}\n")) {
            self.status = status;
        }
    }

    /// The program ends as it was asked to.
    pub fn ends(&self) {
        self.tell("STOPPING=1\n");
    }
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
            assert_eq!(period_for(none, None, 7), None);
        }
    }

    #[test]
    fn a_status_is_told_once_and_a_sign_of_life_four_times_per_period() {
        let (ours, theirs) = UnixDatagram::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        theirs.set_nonblocking(true).unwrap();
        let mut manager = Manager { socket: Some(ours), period: Some(Duration::from_secs(3600)), ..Manager::default() };
        let heard = || {
            let mut text = [0; 64];
            theirs.recv(&mut text).ok().map(|size| String::from_utf8_lossy(&text[..size]).into_owned())
        };
        manager.ready();
        assert_eq!(heard().as_deref(), Some("READY=1\n"));
        manager.works();
        manager.works();
        assert_eq!((heard().as_deref(), heard()), (Some("WATCHDOG=1\n"), None));
        manager.alive = Instant::now().checked_sub(Duration::from_secs(900));
        manager.works();
        assert_eq!(heard().as_deref(), Some("WATCHDOG=1\n"));
        manager.stands("fine".into());
        manager.stands("fine".into());
        assert_eq!((heard().as_deref(), heard()), (Some("STATUS=fine\n"), None));
        // Without one nothing is told.
        Manager::default().ready();
    }
}
