//! Handles: numbers that stand for what C holds.
//!
//! A number is made of a kind, a generation and a slot. The slot's generation moves on when its
//! handle is closed, so a number that was closed names nothing, until the slot was used 2^36 times
//! again.
//!
//! A fork finds a table unlocked and whole ([`fork::keep`]): what the parent had open a child can
//! close, for itself.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{PoisonError, RwLock};

use tombolo_shm::fork;

use crate::status::{Failure, Status};

const SLOT_BITS: u32 = 24;
const GENERATION_BITS: u32 = 36;

#[derive(Debug)]
struct Entry<T> {
    generation: u64,
    value: Option<T>,
}

#[derive(Debug)]
struct Entries<T> {
    entries: Vec<Entry<T>>,
    free: Vec<u32>,
}

/// All handles of one kind.
#[derive(Debug)]
pub(crate) struct Table<T> {
    kind: u64,
    name: &'static str,
    entries: RwLock<Entries<T>>,
    /// Forks take the lock.
    is_kept: AtomicBool,
}

impl<T: Send + Sync + 'static> Table<T> {
    /// `kind` is 1 to 15, one for each table.
    pub(crate) const fn new(kind: u64, name: &'static str) -> Table<T> {
        let entries = RwLock::new(Entries { entries: Vec::new(), free: Vec::new() });
        Table { kind, name, entries, is_kept: AtomicBool::new(false) }
    }

    fn lock(&'static self) -> &'static RwLock<Entries<T>> {
        // Acquire, partner below: a fork that comes after it takes the lock.
        if !self.is_kept.load(Ordering::Acquire) {
            fork::keep(&self.entries);
            self.is_kept.store(true, Ordering::Release);
        }
        &self.entries
    }

    fn unknown(&self, id: u64) -> Failure {
        let text = format!("{id:#x} is not an open {}: it was closed already, or is something else", self.name);
        Failure::new(Status::UnknownHandle, text)
    }

    /// The slot of a number, and its generation, if it may be one of this table.
    fn parse(&self, id: u64) -> Option<(usize, u64)> {
        let generation = (id >> SLOT_BITS) & ((1 << GENERATION_BITS) - 1);
        let slot = (id & ((1 << SLOT_BITS) - 1)) as usize;
        (id >> (SLOT_BITS + GENERATION_BITS) == self.kind).then_some((slot, generation))
    }

    /// Gives out a number for `value`.
    pub(crate) fn add(&'static self, value: T) -> Result<u64, Failure> {
        let mut inner = self.lock().write().unwrap_or_else(PoisonError::into_inner);
        let Entries { entries, free } = &mut *inner;
        let slot = match free.pop() {
            Some(slot) => slot,
            None if entries.len() >> SLOT_BITS == 0 => {
                entries.push(Entry { generation: 0, value: None });
                (entries.len() - 1) as u32
            }
            None => return Err(Failure::new(Status::Memory, format!("too many handles of {} are open", self.name))),
        };
        let entry = &mut entries[slot as usize];
        entry.value = Some(value);
        Ok(self.kind << (SLOT_BITS + GENERATION_BITS) | entry.generation << SLOT_BITS | u64::from(slot))
    }

    /// Closes a handle, and returns the object behind it.
    pub(crate) fn take(&'static self, id: u64) -> Result<T, Failure> {
        let parsed = self.parse(id);
        let mut inner = self.lock().write().unwrap_or_else(PoisonError::into_inner);
        let taken = parsed.and_then(|(slot, generation)| {
            let entry = inner.entries.get_mut(slot).filter(|entry| entry.generation == generation)?;
            let value = entry.value.take()?;
            entry.generation = (entry.generation + 1) & ((1 << GENERATION_BITS) - 1);
            inner.free.push(slot as u32);
            Some(value)
        });
        taken.ok_or_else(|| self.unknown(id))
    }

    /// What a handle refers to.
    pub(crate) fn get(&'static self, id: u64) -> Result<T, Failure>
    where
        T: Clone,
    {
        let inner = self.lock().read().unwrap_or_else(PoisonError::into_inner);
        let found = self.parse(id).and_then(|(slot, generation)| {
            inner.entries.get(slot).filter(|entry| entry.generation == generation)?.value.clone()
        });
        found.ok_or_else(|| self.unknown(id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_closed_or_foreign_number_names_nothing() {
        static ONE: Table<char> = Table::new(1, "one");
        static OTHER: Table<char> = Table::new(2, "other");
        let (one, other) = (&ONE, &OTHER);
        let a = one.add('a').unwrap();
        let b = one.add('b').unwrap();
        assert_eq!((one.get(a).unwrap(), one.get(b).unwrap()), ('a', 'b'));
        let foreign = other.add('x').unwrap();
        for id in [0, 1, u64::MAX, foreign, a + (1 << SLOT_BITS), b + 1] {
            assert_eq!(one.get(id).unwrap_err().status, Status::UnknownHandle, "{id:#x}");
            assert_eq!(one.take(id).unwrap_err().status, Status::UnknownHandle, "{id:#x}");
        }
        assert_eq!(one.take(a).unwrap(), 'a');
        assert!(one.get(a).is_err() && one.take(a).is_err());
        let c = one.add('c').unwrap();
        assert_ne!(a, c, "its slot is used again, its number is not");
        assert!(one.get(a).is_err());
        assert_eq!(one.get(c).unwrap(), 'c');
    }
}
