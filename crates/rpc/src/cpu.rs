//! Where a thread runs, for the choice between polling and sleeping.

use std::sync::atomic::{AtomicU8, Ordering};

/// The CPU on which this thread runs now.
#[inline]
pub(crate) fn current() -> u32 {
    rustix::thread::sched_getcpu() as u32
}

/// Whether this machine has more than one CPU; looked up once. On which of them a process may run
/// is no matter: two that are kept on one CPU each may poll for each other, unless it is the same
/// one, which [`current`] tells.
pub(crate) fn several() -> bool {
    // 0: not known yet. No lock for what is the same for each who looks it up: a child that is
    // forked meanwhile would wait for it.
    static SEVERAL: AtomicU8 = AtomicU8::new(0);
    // Relaxed: the word says nothing of other memory.
    match SEVERAL.load(Ordering::Relaxed) {
        0 => {
            let several = look_up();
            SEVERAL.store(1 + u8::from(several), Ordering::Relaxed);
            several
        }
        known => known == 2,
    }
}

#[cold]
fn look_up() -> bool {
    match std::fs::read_to_string("/sys/devices/system/cpu/online") {
        Ok(online) => is_several(&online),
        // Without that file, what this process may use.
        Err(_) => std::thread::available_parallelism().is_ok_and(|n| n.get() > 1),
    }
}

/// Whether a list as "0-3,5" has more than one.
fn is_several(list: &str) -> bool {
    list.contains(['-', ','])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_cpus_are_counted() {
        assert!(!is_several("0\n") && is_several("0-1\n") && is_several("0,2\n"));
    }

    #[test]
    fn who_is_kept_on_one_cpu_of_several_may_poll() {
        let online = std::fs::read_to_string("/sys/devices/system/cpu/online").unwrap();
        std::thread::spawn(move || {
            let mut one = rustix::thread::CpuSet::new();
            one.set(current() as usize);
            rustix::thread::sched_setaffinity(None, &one).unwrap();
            assert_eq!(several(), is_several(&online));
        })
        .join()
        .unwrap();
    }
}
