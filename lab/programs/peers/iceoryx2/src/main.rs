//! iceoryx2: its request-response ports, with an event service each way for what sleeps, by a
//! listener's blocking wait and by a WaitSet; and polled. That is what its users put together: it
//! has no blocking call of its own.

use std::path::Path;
use std::time::Duration;

use iceoryx2::active_request::ActiveRequest;
use iceoryx2::pending_response::PendingResponse;
use iceoryx2::port::client::Client;
use iceoryx2::port::listener::Listener;
use iceoryx2::port::notifier::Notifier;
use iceoryx2::prelude::*;
use iceoryx2::service::port_factory::request_response::PortFactory;
use tombolo_bench::peer::{self, Caller, Variant};
use tombolo_bench::{Fallible, ended, ready};

type Ipc = ipc::Service;
type Pending = PendingResponse<Ipc, [u8], (), [u8], ()>;

const LARGEST: usize = 64 << 10;
/// How often a server looks whether it is to end.
const LOOK: Duration = Duration::from_millis(100);

/// Wakes the other end, and is woken.
struct Wake {
    how: String,
    waitset: WaitSet<Ipc>,
    listener: Listener<Ipc>,
    notifier: Notifier<Ipc>,
}

impl Wake {
    fn new(node: &Node<Ipc>, name: &str, how: &str, hears: &str, rings: &str) -> Fallible<Wake> {
        let event = |which: &str| -> Fallible<_> {
            Ok(node.service_builder(&format!("{name}/{which}").as_str().try_into()?).event().open_or_create()?)
        };
        Ok(Wake {
            how: how.into(),
            waitset: WaitSetBuilder::new().signal_handling_mode(SignalHandlingMode::Disabled).create::<Ipc>()?,
            listener: event(hears)?.listener_builder().create()?,
            notifier: event(rings)?.notifier_builder().create()?,
        })
    }

    fn ring(&self) -> Fallible<()> {
        if self.how != "iceoryx2_polled" {
            self.notifier.notify()?;
        }
        Ok(())
    }

    /// Returns when the other end may have rung.
    fn wait(&self) -> Fallible<()> {
        match &self.how[..] {
            "iceoryx2_polled" => std::hint::spin_loop(),
            "iceoryx2_waitset" => {
                // The attachment would be kept by a program with more to wait for; here it borrows
                // what it waits on.
                let _guard = self.waitset.attach_notification(&self.listener)?;
                let heard = |_| {
                    let _ = self.listener.try_wait(|_| ());
                    CallbackProgression::Continue
                };
                self.waitset.wait_and_process_once_with_timeout(heard, LOOK)?;
            }
            _ => {
                self.listener.timed_wait(|_| (), LOOK)?;
            }
        }
        Ok(())
    }
}

/// A folder's name makes that of the services, so that what others run is not met.
fn services(dir: &Path) -> String {
    format!("tombolo-bench{}", dir.display())
}

fn calls(node: &Node<Ipc>, name: &str) -> Fallible<PortFactory<Ipc, [u8], (), [u8], ()>> {
    let builder = node.service_builder(&name.try_into()?).request_response::<[u8], [u8]>();
    Ok(builder.max_active_requests_per_client(16).max_loaned_requests(16).open_or_create()?)
}

fn answer(request: &ActiveRequest<Ipc, [u8], (), [u8], ()>) -> Fallible<()> {
    let bytes = request.payload();
    request.loan_slice_uninit(bytes.len())?.write_from_slice(bytes).send()?;
    Ok(())
}

fn serve(how: &str, dir: &Path) -> Fallible<()> {
    let node = NodeBuilder::new().signal_handling_mode(SignalHandlingMode::Disabled).create::<Ipc>()?;
    let name = services(dir);
    let server = calls(&node, &name)?.server_builder().initial_max_slice_len(LARGEST).create()?;
    let wake = Wake::new(&node, &name, how, "there", "back")?;
    ready();
    while !ended() {
        let mut any = false;
        while let Some(request) = server.receive()? {
            answer(&request)?;
            any = true;
        }
        if any {
            wake.ring()?;
        }
        wake.wait()?;
    }
    Ok(())
}

struct Connection {
    client: Client<Ipc, [u8], (), [u8], ()>,
    wake: Wake,
    // Ports live no longer than their node.
    _node: Node<Ipc>,
}

fn connect(how: &str, dir: &Path) -> Fallible<Connection> {
    let node = NodeBuilder::new().signal_handling_mode(SignalHandlingMode::Disabled).create::<Ipc>()?;
    let name = services(dir);
    let client = calls(&node, &name)?.client_builder().initial_max_slice_len(LARGEST).create()?;
    Ok(Connection { client, wake: Wake::new(&node, &name, how, "back", "there")?, _node: node })
}

impl Connection {
    fn send(&self, bytes: &[u8]) -> Fallible<Pending> {
        Ok(self.client.loan_slice_uninit(bytes.len())?.write_from_slice(bytes).send()?)
    }
}

impl Caller for Connection {
    fn call(&mut self, bytes: &[u8], into: &mut [u8]) -> Fallible<()> {
        let pending = self.send(bytes)?;
        self.wake.ring()?;
        loop {
            if let Some(response) = pending.receive()? {
                into.copy_from_slice(response.payload());
                return Ok(());
            }
            self.wake.wait()?;
        }
    }

    fn sixteen(&mut self, bytes: &[u8], calls: usize) -> Fallible<()> {
        let (mut sent, mut done) = (0, 0);
        let mut under_way: Vec<Pending> = Vec::new();
        while done < calls {
            let before = sent;
            while under_way.len() < 16 && sent < calls {
                under_way.push(self.send(bytes)?);
                sent += 1;
            }
            if sent > before {
                self.wake.ring()?;
            }
            let mut any = false;
            let mut waits = Vec::with_capacity(16);
            for pending in under_way.drain(..) {
                if pending.receive()?.is_some() {
                    any = true;
                    done += 1;
                } else {
                    waits.push(pending);
                }
            }
            under_way = waits;
            if !any {
                self.wake.wait()?;
            }
        }
        Ok(())
    }
}

fn main() -> Fallible<()> {
    set_log_level(LogLevel::Error);
    let variants = [("iceoryx2", false), ("iceoryx2_waitset", false), ("iceoryx2_polled", true)];
    peer::run(&variants.map(|(name, polls)| Variant { name, polls }), serve, connect)
}
