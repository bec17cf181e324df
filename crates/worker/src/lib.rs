//! A worker of the switch on Linux. `tombolo_switch::worker` is its poll loop, which is pure; here is
//! what it needs of the kernel.
//!
//! * [`thread`]: a worker on a thread of its own, with its name and its CPUs.
//! * [`reactor`]: the epoll instance in which a worker waits for all of its ports.
//!
//! The ports themselves are in `tombolo_port`.
//!
//! ```
//! use tombolo_switch::mac::MacSettings;
//! use tombolo_worker::thread::{WorkerConfig, WorkerThread};
//!
//! let worker = WorkerThread::start(&WorkerConfig { name: "lan".into(), ..WorkerConfig::default() })?;
//! worker.handle().add_network("lan", MacSettings::default())?;
//! // With `reserve`, `registration` and `add_port` it gets ports. It sleeps until one has work.
//! assert_eq!(worker.handle().status()?.networks.len(), 1);
//! worker.stop()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![warn(unreachable_pub)]

pub mod reactor;
pub mod thread;
