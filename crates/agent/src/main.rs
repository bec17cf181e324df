//! Puts a Linux guest on a fabric's network through an ivshmem device, without a kernel driver of
//! our own.
//!
//! The agent is a switch of two ports on one thread: the ivshmem link, and a tap, which is the
//! guest's network device. It finds the device ([`pci`]), opens it with interrupts or without
//! ([`access`]), reads what link it is ([`link`]), and runs until a signal. The tap ends with the
//! agent, in every case. All state is in the link's memory and in the kernel. So the next agent can
//! follow a killed one without further steps.
#![forbid(unsafe_code)]

mod access;
mod error;
mod link;
mod pci;
mod run;
mod vfio;

use access::Wakeups;
use clap::Parser;
use error::AgentError;
use std::path::Path;
use std::process::ExitCode;

/// Joins this Linux guest to its network through an ivshmem device.
///
/// The guest gets a tap device with the address that the fabric gave it; a DHCP client on it does
/// the rest. Runs until it gets SIGTERM or SIGINT. Exit codes: 0 ended by a signal, 1 it failed, 2
/// used wrongly.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    /// PCI address of the device, such as 00:03.0; needed only if several are network links
    #[arg(long, value_name = "ADDRESS")]
    device: Option<String>,
    /// Name of the tap device to create
    #[arg(long, value_name = "NAME", default_value = "tmb0")]
    tap: String,
    /// How to be woken: by interrupts through vfio, by polling, or by the one that this guest has
    #[arg(long, value_enum, default_value_t = Wakeups::Auto)]
    wakeups: Wakeups,
    /// List the ivshmem devices of this guest with their kind, and exit
    #[arg(long)]
    list: bool,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match agent(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("tombolo-agent: {error}");
            ExitCode::FAILURE
        }
    }
}

fn agent(arguments: &Arguments) -> Result<(), AgentError> {
    let devices = pci::find(Path::new(pci::DEVICES))?;
    if arguments.list {
        for device in &devices {
            match link::header(device) {
                Ok(header) => println!("{device}: {header}"),
                Err(error) => println!("{error}"),
            }
            let interrupts = vfio::obstacle(device).map_or("by vfio".into(), |reason| format!("none: {reason}"));
            println!("  wake-ups: {interrupts}");
        }
        return if devices.is_empty() { Err(AgentError::NoDevice) } else { Ok(()) };
    }
    let device = link::choose(&devices, arguments.device.as_deref())?;
    run::until_signal(link::open(device, arguments.wakeups)?, &arguments.tap)
}
