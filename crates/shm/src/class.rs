//! The scheduling class of the calling thread.
//!
//! Setting a class costs about 2 µs and may need a privilege. A caller that sets one first asks
//! [`current`] what is in force. The kernel refuses `SCHED_DEADLINE` to a thread that may not run
//! on all CPUs of its domain. It also refuses it where the bandwidth of all such threads would pass
//! what the kernel grants.
//!
//! This module is on the list of modules that may use `unsafe` (ARCHITECTURE.md): the C library has
//! no wrapper.
#![allow(unsafe_code)]

use std::fmt;

use rustix::io::Errno;

const SCHED_FIFO: u32 = 1;
const SCHED_DEADLINE: u32 = 6;
/// The children of a thread of a real-time class are of the normal class.
const RESET_ON_FORK: u64 = 1;

/// A class, with its parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Class {
    /// `SCHED_OTHER`, nice 0.
    #[default]
    Normal,
    /// `SCHED_FIFO`.
    Fifo {
        /// 1 to 99; 99 is above all others.
        priority: u8,
    },
    /// `SCHED_DEADLINE`: `runtime_ns` in each `period_ns`.
    Deadline {
        /// What it may run in a period.
        runtime_ns: u64,
        /// From a period's start to when that must be done.
        deadline_ns: u64,
        /// Time from one activation to the next.
        period_ns: u64,
    },
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Class::Normal => write!(f, "normal"),
            Class::Fifo { priority } => write!(f, "fifo {priority}"),
            Class::Deadline { runtime_ns, deadline_ns, period_ns } => {
                write!(f, "deadline {runtime_ns}/{deadline_ns}/{period_ns} ns")
            }
        }
    }
}

/// `struct sched_attr`, first version.
#[repr(C)]
#[derive(Default)]
struct Attributes {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
}
const _: () = assert!(size_of::<Attributes>() == 48);

fn errno() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL)
}

/// Sets the calling thread's class.
///
/// # Errors
/// `EPERM` without the right to it, `EBUSY` where the bandwidth is gone, `EINVAL` for parameters
/// that make no sense.
pub fn set(class: Class) -> Result<(), Errno> {
    let mut attributes = Attributes { size: size_of::<Attributes>() as u32, ..Attributes::default() };
    match class {
        Class::Normal => {}
        Class::Fifo { priority } => {
            (attributes.policy, attributes.priority, attributes.flags) = (SCHED_FIFO, priority.into(), RESET_ON_FORK);
        }
        Class::Deadline { runtime_ns, deadline_ns, period_ns } => {
            (attributes.policy, attributes.flags) = (SCHED_DEADLINE, RESET_ON_FORK);
            (attributes.runtime, attributes.deadline, attributes.period) = (runtime_ns, deadline_ns, period_ns);
        }
    }
    // SAFETY: sched_setattr reads as many bytes as `size` says, which is the struct's; 0 is the
    // calling thread.
    let done = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0u32) };
    if done == 0 { Ok(()) } else { Err(errno()) }
}

/// The calling thread's class; other classes of the kernel (batch, idle, round robin) are given as
/// [`Class::Normal`].
///
/// # Errors
/// The kernel's.
pub fn current() -> Result<Class, Errno> {
    let mut attributes = Attributes::default();
    let size = size_of::<Attributes>() as u32;
    // SAFETY: sched_getattr writes at most `size` bytes, which the struct has.
    let done = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, size, 0u32) };
    if done != 0 {
        return Err(errno());
    }
    Ok(match attributes.policy {
        SCHED_FIFO => Class::Fifo { priority: attributes.priority.min(99) as u8 },
        SCHED_DEADLINE => Class::Deadline {
            runtime_ns: attributes.runtime,
            deadline_ns: attributes.deadline,
            period_ns: attributes.period,
        },
        _ => Class::Normal,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_set_is_in_force_or_was_refused() {
        std::thread::spawn(|| {
            assert_eq!(current(), Ok(Class::Normal));
            let fifo = Class::Fifo { priority: 3 };
            match set(fifo) {
                Ok(()) => {
                    assert_eq!(current(), Ok(fifo));
                    // It is not inherited: nothing runs in a class that it did not ask for.
                    assert_eq!(std::thread::spawn(current).join().unwrap(), Ok(Class::Normal));
                    assert_eq!(set(Class::Normal), Ok(()));
                }
                Err(error) => assert_eq!(error, Errno::PERM),
            }
            assert_eq!(current(), Ok(Class::Normal));
            assert!(set(Class::Fifo { priority: 0 }).is_err());
            assert!(set(Class::Deadline { runtime_ns: 2, deadline_ns: 1, period_ns: 1 }).is_err());
        })
        .join()
        .unwrap();
    }
}
