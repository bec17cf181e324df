//! What must not work, tried when the command line asks for it; and what nothing but a cell can try
//! of the cell.
#![allow(unsafe_code)]

use crate::{Config, ExitCode, exit, println};
use alloc::vec::Vec;
use core::hint::black_box;

/// Uses all of the stack.
#[inline(never)]
fn overflow(depth: u64) -> u64 {
    let frame = black_box([depth; 64]);
    if depth == u64::MAX { frame[0] } else { overflow(depth + 1) + frame[(depth % 64) as usize] }
}

/// Compares machine/mem.s, through the operations of slices that call it, with loops over single
/// bytes: every length to 200, every shift of an overlapping move to 70 either way.
fn memory() -> bool {
    const ROOM: usize = 400;
    let pattern: Vec<u8> = (0..ROOM).map(|i| black_box((i * 167 % 251) as u8)).collect();
    let by_bytes = |from: usize, to: usize, len: usize| {
        let mut want: Vec<u8> = pattern.iter().copied().map(black_box).collect();
        (0..len).for_each(|i| want[to + i] = black_box(pattern[from + i]));
        want
    };
    // Not by `==`, which is among what is tested.
    let same = |a: &[u8], b: &[u8]| a.len() == b.len() && a.iter().zip(b).all(|(a, b)| black_box(*a) == *b);
    (0..=200).all(|len| {
        let mut filled = pattern.clone();
        filled[5..5 + black_box(len)].fill(black_box(0xa5));
        let fills =
            filled.iter().enumerate().all(|(i, b)| *b == if (5..5 + len).contains(&i) { 0xa5 } else { pattern[i] });
        let compares = (0..len).all(|at| {
            let mut other = pattern.clone();
            other[at] = other[at].wrapping_add(1);
            let (a, b) = (&pattern[..black_box(len)], &other[..len]);
            a != b && a.cmp(b) == pattern[at].cmp(&other[at])
        });
        let moves = (30..=170).all(|to| {
            let mut moved = pattern.clone();
            moved.copy_within(100..100 + black_box(len), to);
            same(&moved, &by_bytes(100, to, len))
        });
        let mut copied = pattern.clone();
        copied[3..3 + len].copy_from_slice(&pattern[150..150 + black_box(len)]);
        fills && compares && moves && same(&copied, &by_bytes(150, 3, len))
    })
}

/// Breaks the rule that `selftest=` names, so that a test sees it enforced; `memory` ends the cell
/// with success if it is in order.
pub(crate) fn run(config: &Config) {
    static CONSTANT: [u8; 16] = [1; 16];
    // `ret`: would return at once if data could be executed.
    static mut CODE: [u8; 1] = [0xc3];
    match config.get("selftest") {
        Some("memory") if memory() => {
            println!("selftest: memcpy and its family are in order");
            exit(ExitCode::Success)
        }
        Some("panic") => panic!("selftest=panic"),
        Some("stack") => {
            black_box(overflow(black_box(0)));
        }
        // SAFETY: none of these three accesses can take effect, since the pages do not allow it; if
        // one did, the panic below says so.
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
    panic!("selftest: the machine allowed what must not work, or failed at what must");
}
