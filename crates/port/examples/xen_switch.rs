//! A learning switch between a tap of this domain and guests of Xen, in a dom0 or driver domain.
//!
//! ```text
//! cargo run --release -p tombolo-port --example xen_switch -- TAP DOMAIN[/DEVICE][=MAC]...
//! ```
//!
//! The tap is made. A guest with a MAC sends from that one only. A guest is named as in its `xl`
//! configuration, whose line for the vif is `vif = ["script=/bin/true"]`; it may come and go, and
//! so may this program. For each line on standard input it prints the state of all ports, and `end
//! of` with the line; it ends with the input.

use std::error::Error;
use std::io::BufRead;

use tombolo_port::tap::{TapConfig, TapPort};
use tombolo_port::xen::{XenConfig, XenPort};
use tombolo_switch::control::PortSettings;
use tombolo_switch::drop::Reason;
use tombolo_switch::guard::Guard;
use tombolo_switch::mac::MacSettings;
use tombolo_switch::port::Port;
use tombolo_worker::thread::{WorkerConfig, WorkerThread};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [tap, guests @ ..] = &arguments[..] else {
        return Err("usage: xen_switch TAP DOMAIN[/DEVICE][=MAC]...".into());
    };
    let thread = WorkerThread::start(&WorkerConfig { name: "xen-switch".into(), ..WorkerConfig::default() })?;
    let network = thread.handle().add_network("net", MacSettings::default())?;
    let mut counters = Vec::new();
    for (n, argument) in arguments.iter().enumerate() {
        let (name, mac) = argument.split_once('=').map_or((argument.as_str(), None), |(name, mac)| (name, Some(mac)));
        let mut settings = PortSettings::default();
        if let Some(mac) = mac {
            let octets: Vec<u8> =
                mac.split(':').map(|octet| u8::from_str_radix(octet, 16)).collect::<Result<_, _>>()?;
            settings.guard = Guard::new(&[octets.try_into().map_err(|_| "a MAC has six octets")?], &[]).pinned();
        }
        let reserved = thread.handle().reserve()?;
        let registration = thread.registration(&reserved);
        let port: Box<dyn Port> = if n == 0 {
            Box::new(TapPort::open(&TapConfig { mtu: Some(1500), ..TapConfig::new(tap) }, registration)?)
        } else {
            let (domain, device) = name.split_once('/').unwrap_or((name, "0"));
            let (domain, device) = (domain.into(), device.parse()?);
            let config = XenConfig { domain, device, mac: None, max_queues: 4, mtu: 1500 };
            Box::new(XenPort::open(config, registration)?)
        };
        counters.push((name, thread.handle().add_port(reserved, network, name, port, settings)?));
    }
    println!("{tap} and {} guests", guests.len());
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        for port in thread.handle().status()?.ports {
            println!("{}: {:?} {:?}", port.name, port.link, port.details);
        }
        for (name, counters) in &counters {
            let (rx, tx) = (counters.rx_frames.get(), counters.tx_frames.get());
            let bytes = (counters.rx_bytes.get(), counters.tx_bytes.get());
            println!(
                "{name}: frames {rx} in, {tx} out; bytes {} in, {} out; faults {}",
                bytes.0,
                bytes.1,
                counters.faults.get()
            );
            for (way, drops) in [("in", &counters.rx_drops), ("out", &counters.tx_drops)] {
                for (reason, count) in Reason::ALL.iter().zip(drops).filter(|(_, count)| count.get() != 0) {
                    println!("{name}: dropped on the way {way}: {} {}", count.get(), reason.name());
                }
            }
        }
        println!("end of {line}");
    }
    thread.stop()?;
    Ok(())
}
