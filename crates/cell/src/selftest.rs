//! What must not work, tried when the command line asks for it.
#![allow(unsafe_code)]

use crate::Config;
use core::hint::black_box;

/// Uses all of the stack.
#[inline(never)]
fn overflow(depth: u64) -> u64 {
    let frame = black_box([depth; 64]);
    if depth == u64::MAX { frame[0] } else { overflow(depth + 1) + frame[(depth % 64) as usize] }
}

/// Breaks the rule that `selftest=` names, so that a test sees it enforced.
pub(crate) fn run(config: &Config) {
    static CONSTANT: [u8; 16] = [1; 16];
    // `ret`: would return at once if data could be executed.
    static mut CODE: [u8; 1] = [0xc3];
    match config.get("selftest") {
        Some("panic") => panic!("selftest=panic"),
        Some("stack") => {
            black_box(overflow(black_box(0)));
        }
        // SAFETY: none of these three accesses can take effect, since the pages do not allow it; if one did, the
        // panic below says so.
        Some("write") => unsafe { black_box((&raw const CONSTANT).cast_mut().cast::<u8>()).write_volatile(7) },
        Some("execute") => unsafe {
            // SAFETY: as above.
            let code: extern "C" fn() = core::mem::transmute(black_box(&raw mut CODE));
            code();
        },
        // SAFETY: as above.
        Some("null") => unsafe {
            black_box(core::ptr::null_mut::<u8>().wrapping_add(black_box(8))).write_volatile(1);
        },
        _ => return,
    }
    panic!("selftest: the machine allowed what must not work");
}
