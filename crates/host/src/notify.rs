//! What a service manager is told, by sd_notify(3): that the fabric is up, and which process the
//! daemon is.
//!
//! `MAINPID=` goes out twice. The first time is when this daemon has taken a fabric over, since the
//! previous one ends at that moment. The second is with `READY=1`. A daemon that fails in between
//! is then a main process that failed, which the manager sees and may start again. Otherwise the
//! manager would see a main process that ended well. Without `NOTIFY_SOCKET` nothing happens.

use std::io::{self, PipeReader};
use std::os::fd::AsFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use tombolo_shm::passing;

/// How long a manager that is busy is waited for.
const TIMEOUT: Duration = Duration::from_secs(1);

/// The fabric is up, and this process is its daemon.
pub fn stands() {
    tell(&format!("READY=1\nMAINPID={}\n", std::process::id()));
}

/// This process is the daemon now.
pub(crate) fn took_over() {
    tell(&format!("MAINPID={}\n", std::process::id()));
}

/// Waits until the manager has read what it was told, for a process that is about to end: it hears nothing of one that has.
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
    let place = std::env::var_os("NOTIFY_SOCKET")?;
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
