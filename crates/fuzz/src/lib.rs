//! Fuzz targets for everything that reads what a peer wrote, and a runner for them on stable Rust.
//!
//! A target is a function from bytes to a [`Behaviour`]: what the code under test did, in a few
//! words (verdicts, errors, counts), hashed. It panics where a promise is broken. [`run`] mutates
//! the inputs of `corpus/TARGET/` and keeps those that showed a new behaviour as parents of further
//! ones. That steers as coverage does, by what came out and not by which lines ran: nothing has to
//! be instrumented, and the cost is that a branch without any effect on the outcome is not aimed
//! at. The targets are plain functions, so a coverage-guided fuzzer can call the same ones.
//!
//! The targets are in [`targets`], and by what they read in [`calls`], [`merge`], [`span`] and
//! [`xen`].
//!
//! * Bounded: a run lasts as long as it is told (`TOMBOLO_FUZZ_SECONDS`, one second otherwise), and
//!   keeps at most [`MAX_KEPT`] inputs of at most [`MAX_INPUT_BYTES`].
//! * Repeatable: the seed is printed (`TOMBOLO_SEED` sets it). An input that panics, or takes
//!   longer than [`TOO_LONG`], is written to a file, and `TOMBOLO_FUZZ_INPUT=FILE` runs just that.
//! * `./x fuzz [TARGET] [SECONDS]` runs them from outside; without that they are unit tests of a
//!   second each.

pub mod calls;
pub mod merge;
pub mod span;
pub mod targets;
pub mod xen;

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tombolo_testing::Random;

/// Inputs that are kept in memory for their behaviour.
pub const MAX_KEPT: usize = 4096;
/// Inputs do not grow beyond this.
pub const MAX_INPUT_BYTES: usize = 16 << 10;
/// An input that takes longer, on a machine however busy, has found something that does not end
/// soon enough.
pub const TOO_LONG: Duration = Duration::from_secs(5);

/// What the code under test did with an input; equal behaviours are not worth a second look.
#[derive(Debug, Default)]
pub struct Behaviour(DefaultHasher);

impl Behaviour {
    /// Adds `what` to the behaviour. An input with a new behaviour is kept.
    pub fn note(&mut self, what: impl Hash) {
        what.hash(&mut self.0);
    }

    /// As [`Behaviour::note`], for a number of which only the size matters: its binary logarithm.
    pub fn note_size(&mut self, n: usize) {
        self.note(usize::BITS - n.leading_zeros());
    }
}

/// Cuts an input into records: a byte of flags, a length of two bytes (big-endian), and as many
/// bytes, or what is left. So one input is a sequence of frames or steps.
pub fn records(mut input: &[u8]) -> impl Iterator<Item = (u8, &[u8])> {
    std::iter::from_fn(move || {
        let (&[flags, high, low], rest) = input.split_first_chunk()?;
        let (record, behind) = rest.split_at(usize::from(u16::from_be_bytes([high, low])).min(rest.len()));
        input = behind;
        Some((flags, record))
    })
}

/// Values at which lengths, counts and offsets tend to go wrong.
const EDGES: [u8; 10] = [0, 1, 4, 5, 0x45, 0x7f, 0x80, 0xfe, 0xff, 20];

fn mutate(random: &mut Random, parents: &[Vec<u8>]) -> Vec<u8> {
    let mut input = parents[random.index(parents.len())].clone();
    for _ in 0..=random.index(6) {
        let len = input.len().max(1);
        let at = random.index(len).min(input.len());
        let span = 1 + random.index(len.min(64));
        let end = (at + span).min(input.len());
        match random.index(10) {
            0..3 if at < input.len() => input[at] ^= 1 << random.index(8),
            3 if at < input.len() => input[at] = random.next_u64() as u8,
            4 if at < input.len() => input[at] = EDGES[random.index(EDGES.len())],
            // A length or a port: two bytes at once, a little off.
            5 if at + 2 <= input.len() => {
                let word = u16::from_be_bytes([input[at], input[at + 1]]);
                let word = word.wrapping_add(random.index(9) as u16).wrapping_sub(4);
                input[at..at + 2].copy_from_slice(&word.to_be_bytes());
            }
            6 => drop(input.drain(at..end)),
            7 => {
                let piece = input[at..end].to_vec();
                input.splice(at..at, piece);
            }
            8 => {
                let other = &parents[random.index(parents.len())];
                let from = random.index(other.len().max(1)).min(other.len());
                let to = (from + 1 + random.index(256)).min(other.len());
                input.splice(at..end, other[from..to].iter().copied());
            }
            // Behind each other: what one left meets the other.
            _ => input.extend_from_slice(&parents[random.index(parents.len())]),
        }
        input.truncate(MAX_INPUT_BYTES);
    }
    input
}

fn corpus(name: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(name);
    let entries = std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.expect("a folder that can be read").path()).collect();
    files.sort();
    let seeds: Vec<_> = files.iter().map(|file| std::fs::read(file).expect("a seed that can be read")).collect();
    assert!(!seeds.is_empty(), "{}: no seed", folder.display());
    seeds
}

/// Runs one input; one that breaks a promise is written to a file first.
fn one(name: &str, input: &[u8], keep_at: &Path, target: &impl Fn(&[u8], &mut Behaviour)) -> u64 {
    let (start, mut behaviour) = (Instant::now(), Behaviour::default());
    let result = catch_unwind(AssertUnwindSafe(|| {
        target(input, &mut behaviour);
        assert!(start.elapsed() < TOO_LONG, "{} bytes took {:?}", input.len(), start.elapsed());
    }));
    if let Err(panic) = result {
        let mut hasher = DefaultHasher::new();
        input.hash(&mut hasher);
        let file = keep_at.join(format!("{name}-{:016x}", hasher.finish()));
        let _ = std::fs::create_dir_all(keep_at);
        std::fs::write(&file, input).expect("the input that broke it is kept");
        println!("to run it alone: TOMBOLO_FUZZ_INPUT={} ./x fuzz {name}", file.display());
        resume_unwind(panic);
    }
    behaviour.0.finish()
}

/// Runs `target` on its corpus and on what becomes of it, for as long as the environment says.
/// Inputs that break a promise are kept in `keep_at`.
///
/// # Panics
/// With the panic of the target.
pub fn run(name: &str, keep_at: &Path, target: impl Fn(&[u8], &mut Behaviour)) {
    if let Some(file) = std::env::var_os("TOMBOLO_FUZZ_INPUT") {
        let input = std::fs::read(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        one(name, &input, keep_at, &target);
        return;
    }
    let number = |key: &str| std::env::var(key).ok().and_then(|text| text.parse::<u64>().ok());
    let span = Duration::from_secs(number("TOMBOLO_FUZZ_SECONDS").unwrap_or(1));
    let (mut random, mut kept, mut seen) = (Random::seeded(), corpus(name), HashSet::new());
    let seeds = kept.len();
    for input in &kept {
        seen.insert(one(name, input, keep_at, &target));
    }
    assert!(seen.len() > 1, "the seeds of {name} all do the same: the target tells nothing apart");
    let (end, mut runs) = (Instant::now() + span, 0u64);
    while Instant::now() < end {
        let input = mutate(&mut random, &kept);
        runs += 1;
        if seen.insert(one(name, &input, keep_at, &target)) {
            if kept.len() < MAX_KEPT {
                kept.push(input);
            } else {
                // The seeds stay; of the others, one that is in everybody's history by now goes.
                let at = seeds + random.index(kept.len() - seeds);
                kept[at] = input;
            }
        }
    }
    println!("{name}: {runs} inputs in {span:?}, {} behaviours of which {seeds} seeds", seen.len());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_promise_that_one_rare_input_breaks_is_found_and_the_input_kept() {
        let folder = std::env::temp_dir().join(format!("tombolo-fuzz-{}", std::process::id()));
        // Three bytes in a row that have to be right: one of 16 million at random, a few thousand
        // tries step by step.
        let target = |input: &[u8], behaviour: &mut Behaviour| {
            let right = input.iter().zip(b"BUG").take_while(|(a, b)| a == b).count();
            behaviour.note(right);
            assert!(right < 3, "found");
        };
        let (mut random, mut kept, mut seen) = (Random(1), vec![b"seed".to_vec()], HashSet::new());
        let found = (0..500_000).any(|_| {
            let input = mutate(&mut random, &kept);
            match catch_unwind(AssertUnwindSafe(|| one("rare", &input, &folder, &target))) {
                Ok(behaviour) => {
                    if seen.insert(behaviour) {
                        kept.push(input);
                    }
                    false
                }
                Err(_) => true,
            }
        });
        assert!(found);
        let files: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert_eq!(files.len(), 1);
        assert!(std::fs::read(&files[0]).unwrap().starts_with(b"BUG"));
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn records_take_what_is_there() {
        let all: Vec<_> = records(&[1, 0, 2, 8, 9, 0, 0, 0, 7, 0xff, 0xff, 5]).collect();
        assert_eq!(all, [(1, &[8, 9][..]), (0, &[]), (7, &[5])]);
        assert_eq!(records(&[1, 0]).count(), 0);
    }
}
