//! The rows of a peer: the same work for each of them, a request of N bytes that comes back as it
//! is.
//!
//! | row | CPUs | |
//! | --- | --- | --- |
//! | `NAME_blocking` | two | 64 bytes, one call at a time |
//! | `NAME_one_cpu` | one | the same |
//! | `NAME_64k` | two | 64 KiB, copied in and out by the caller |
//! | `NAME_16` | two | 64 bytes, 16 calls under way |
//! | `NAME_loaded` | two | 64 bytes, a busy loop on each CPU, all of the peer as SCHED_FIFO, which none of them sets by itself |

use std::path::Path;

use crate::{Fallible, Other, burn, closed_loop, option, other_end, pin, rate, real_time};

/// One connection to a peer under test, as the benchmark loop uses it.
pub trait Caller {
    /// One call: sends these bytes, and copies what comes back.
    ///
    /// # Errors
    /// The peer's own.
    fn call(&mut self, bytes: &[u8], into: &mut [u8]) -> Fallible<()>;

    /// So many calls with these bytes, 16 of them under way at a time.
    ///
    /// # Errors
    /// The peer's own.
    fn sixteen(&mut self, bytes: &[u8], calls: usize) -> Fallible<()>;
}

/// A way to call.
#[derive(Clone, Copy, Debug)]
pub struct Variant {
    /// How its rows begin.
    pub name: &'static str,
    /// It never sleeps, so that two of it on one CPU, or beside busy loops, are of no use.
    pub polls: bool,
}

/// Whether the program is to measure this row: all of them, or that of `--only ROW`.
fn is_wanted(name: &str) -> bool {
    let args: Vec<String> = std::env::args().collect();
    let only = args.iter().position(|a| a == "--only").and_then(|at| args.get(at + 1));
    only.is_none_or(|only| only == name)
}

/// The `main` of a peer's program, with the options `--calls N` and `--only ROW`. `serve` makes its
/// end, calls [`crate::ready`], and serves until [`crate::ended`]; `connect` makes a caller. Both
/// are given the variant's name and a folder for sockets.
///
/// # Errors
/// Where a row cannot be measured.
pub fn run<C: Caller>(
    variants: &[Variant],
    serve: impl Fn(&str, &Path) -> Fallible<()>,
    connect: impl Fn(&str, &Path) -> Fallible<C> + Sync,
) -> Fallible<()> {
    if let Some(args) = other_end() {
        let [what, cpu, class, dir] = &args[..] else { return Err("expected: WHAT CPU CLASS FOLDER".into()) };
        pin(cpu.parse()?);
        if class == "fifo" {
            real_time();
        }
        if what == "busy" {
            burn();
            return Ok(());
        }
        return serve(what, Path::new(dir));
    }
    let calls = option("--calls", 20_000)?;
    for variant in variants {
        rows(variant, calls, &connect)?;
    }
    Ok(())
}

fn start(what: &str, cpu: usize, class: &str, dir: &Path) -> Fallible<Other> {
    Other::start(&[what, &cpu.to_string(), class, dir.to_str().ok_or("the folder's name is not UTF-8")?])
}

/// Both ends of one row, on these CPUs.
fn row<C: Caller>(
    variant: &Variant,
    cpus: (usize, usize),
    class: &str,
    connect: impl Fn(&str, &Path) -> Fallible<C>,
    measure: impl FnOnce(&mut C, &mut Other) -> Fallible<()>,
) -> Fallible<()> {
    let dir = tempfile::tempdir()?;
    pin(cpus.0);
    let mut other = start(variant.name, cpus.1, class, dir.path())?;
    let mut caller = connect(variant.name, dir.path())?;
    measure(&mut caller, &mut other)
}

fn rows<C: Caller>(
    variant: &Variant,
    calls: usize,
    connect: &(impl Fn(&str, &Path) -> Fallible<C> + Sync),
) -> Fallible<()> {
    let name = |row: &str| format!("{}_{row}", variant.name);
    let one = |row: &str, bytes: usize, calls: usize| {
        let name = name(row);
        move |caller: &mut C, other: &mut Other| {
            let payload = vec![7; bytes];
            let mut into = vec![0; bytes];
            closed_loop(&name, calls, Some(other), || caller.call(&payload, &mut into))
        }
    };
    let wanted = |row: &str| is_wanted(&name(row));
    if wanted("blocking") {
        row(variant, (0, 1), "other", connect, one("blocking", 64, calls))?;
    }
    if !variant.polls && wanted("one_cpu") {
        row(variant, (0, 0), "other", connect, one("one_cpu", 64, calls))?;
    }
    if wanted("64k") {
        row(variant, (0, 1), "other", connect, one("64k", 64 << 10, calls / 2))?;
    }
    if wanted("16") {
        let sixteen = name("16");
        row(variant, (0, 1), "other", connect, |caller, other| {
            rate(&sixteen, 4 * calls, Some(other), |calls| caller.sixteen(&[7; 64], calls))
        })?;
    }
    if !variant.polls && wanted("loaded") {
        let idle = tempfile::tempdir()?;
        let _busy = [start("busy", 0, "other", idle.path())?, start("busy", 1, "other", idle.path())?];
        // A thread of its own, which takes its class with it.
        let measured = std::thread::scope(|scope| {
            let loaded = || {
                let row_name = if real_time() { "loaded" } else { "loaded_without_rights" };
                row(variant, (0, 1), "fifo", connect, one(row_name, 64, calls)).map_err(|e| e.to_string())
            };
            scope.spawn(loaded).join()
        });
        measured.map_err(|_| "the caller panicked")??;
    }
    Ok(())
}
