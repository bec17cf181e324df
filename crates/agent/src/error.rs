//! What can go wrong in the agent.

use std::path::PathBuf;
use tombolo_port::tap::TapError;
use tombolo_shm::memory::MemoryError;
use tombolo_switch::control::ControlError;
use tombolo_worker::thread::WorkerError;

/// Why the agent could not do what it was asked. Its text is for the guest's administrator.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AgentError {
    #[error("{what} {}: {source}; the agent has to run as root in a guest with /sys mounted", path.display())]
    Sysfs { what: &'static str, path: PathBuf, source: std::io::Error },
    /// There is no ivshmem device at all.
    #[error(
        "this guest has no ivshmem device (1af4:1110); set `attach = \"ivshmem\"` in the fabric's file, or start its \
         QEMU with -device ivshmem-doorbell"
    )]
    NoDevice,
    /// The device asked for is not there.
    #[error("no ivshmem device {address}; found: {there}")]
    NoSuchDevice { address: String, there: String },
    /// There are several network links, and none was chosen.
    #[error("several devices are network links: {there}; choose one with --device")]
    Several { there: String },
    /// No device's memory begins with a header that the agent understands.
    #[error("no ivshmem device here is a network link of a fabric: {found}")]
    NoNetwork { found: String },
    /// The header of a device.
    #[error("{address}: {problem}; expected the memory of a network link, as a fabric's server lays it out")]
    Header { address: String, problem: String },
    /// Interrupts were demanded and cannot be had.
    #[error("{address}: no wake-ups: {reason}; --wakeups poll does without them")]
    NoWakeups { address: String, reason: String },
    /// Memory of the device.
    #[error("{address}: mapping {what}: {source}")]
    Map { address: String, what: &'static str, source: MemoryError },
    #[error(transparent)]
    Tap(#[from] TapError),
    /// The loop's thread.
    #[error(transparent)]
    Worker(#[from] WorkerError),
    /// The loop.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// The operating system.
    #[error("{what}: {source}")]
    System { what: &'static str, source: std::io::Error },
}
