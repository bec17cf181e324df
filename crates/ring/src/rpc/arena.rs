//! Which part of an arena is in use: a buddy allocator whose books are private to the arena's
//! writer.
//!
//! A block is a power of two of [`GRAIN_BYTES`] units. What was given back last is handed out first
//! (its lines are warm), and free neighbours grow together again, so that many small payloads never
//! keep a large one out for good. The books are a slice that the caller provides, one [`Unit`] for
//! each [`GRAIN_BYTES`] of arena: nothing is allocated here.

/// Smallest block.
pub const GRAIN_BYTES: u64 = 512;
const ORDERS: usize = 40;
const NONE: u32 = u32::MAX;

/// The book of one grain.
#[derive(Clone, Copy, Debug)]
pub struct Unit {
    next: u32,
    previous: u32,
    order: u8,
    state: UnitState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum UnitState {
    /// Not the first grain of a block.
    Inside,
    Free,
    Used,
}

impl Default for Unit {
    fn default() -> Self {
        Unit { next: NONE, previous: NONE, order: 0, state: UnitState::Inside }
    }
}

/// The books of an arena.
#[derive(Debug)]
pub struct Arena<B> {
    units: B,
    /// First free block of each order.
    free: [u32; ORDERS],
    used_bytes: u64,
    top: u8,
}

/// How many units an arena of so many bytes needs.
pub const fn units(arena_bytes: u64) -> usize {
    (arena_bytes / GRAIN_BYTES) as usize
}

const fn order_of(bytes: u64) -> u8 {
    let grains = if bytes <= GRAIN_BYTES { 1 } else { bytes.div_ceil(GRAIN_BYTES) };
    grains.next_power_of_two().trailing_zeros() as u8
}

impl<B: AsRef<[Unit]> + AsMut<[Unit]>> Arena<B> {
    /// The books of an arena of as many grains as there are units, a power of two or none.
    ///
    /// # Panics
    /// Where the number of units is neither, or above 2^31.
    pub fn new(mut units: B) -> Arena<B> {
        let count = units.as_ref().len();
        assert!((count == 0 || count.is_power_of_two()) && count <= 1 << 31, "{count} units");
        units.as_mut().fill(Unit::default());
        let top = count.checked_ilog2().unwrap_or(0) as u8;
        let mut arena = Arena { units, free: [NONE; ORDERS], used_bytes: 0, top };
        if count > 0 {
            arena.push(0, top);
        }
        arena
    }

    /// Bytes in use, with what rounding up to a power of two adds.
    pub fn used_bytes(&self) -> u64 {
        self.used_bytes
    }

    fn unit(&mut self, index: u32) -> &mut Unit {
        &mut self.units.as_mut()[index as usize]
    }

    fn push(&mut self, index: u32, order: u8) {
        let first = core::mem::replace(&mut self.free[usize::from(order)], index);
        *self.unit(index) = Unit { next: first, previous: NONE, order, state: UnitState::Free };
        if first != NONE {
            self.unit(first).previous = index;
        }
    }

    fn unlink(&mut self, index: u32) {
        let Unit { next, previous, order, .. } = *self.unit(index);
        match previous {
            NONE => self.free[usize::from(order)] = next,
            previous => self.unit(previous).next = next,
        }
        if next != NONE {
            self.unit(next).previous = previous;
        }
        self.unit(index).state = UnitState::Inside;
    }

    /// A block of at least so many bytes: its offset. `None` where no free block is large enough.
    pub fn take(&mut self, bytes: u64) -> Option<u64> {
        if bytes > units_bytes(self.units.as_ref().len()) {
            return None;
        }
        let order = order_of(bytes);
        let mut found = (order..=self.top).find(|o| self.free[usize::from(*o)] != NONE)?;
        let index = self.free[usize::from(found)];
        self.unlink(index);
        while found > order {
            found -= 1;
            self.push(index + (1 << found), found);
        }
        *self.unit(index) = Unit { next: NONE, previous: NONE, order, state: UnitState::Used };
        self.used_bytes += GRAIN_BYTES << order;
        Some(u64::from(index) * GRAIN_BYTES)
    }

    /// Gives back the block at `offset`. False, and nothing done, where no block in use begins
    /// there.
    pub fn give(&mut self, offset: u64) -> bool {
        let index = offset / GRAIN_BYTES;
        let book = usize::try_from(index).ok().and_then(|i| self.units.as_ref().get(i));
        let Some(&Unit { order, state: UnitState::Used, .. }) = book else { return false };
        if !offset.is_multiple_of(GRAIN_BYTES) {
            return false;
        }
        let (mut index, mut order) = (index as u32, order);
        self.used_bytes -= GRAIN_BYTES << order;
        self.unit(index).state = UnitState::Inside;
        while order < self.top {
            let buddy = index ^ (1 << order);
            let Unit { order: its, state, .. } = *self.unit(buddy);
            if state != UnitState::Free || its != order {
                break;
            }
            self.unlink(buddy);
            index = index.min(buddy);
            order += 1;
        }
        self.push(index, order);
        true
    }
}

const fn units_bytes(units: usize) -> u64 {
    units as u64 * GRAIN_BYTES
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::vec::Vec;

    #[test]
    fn the_last_block_given_back_is_the_first_handed_out() {
        let mut arena = Arena::new([Unit::default(); 64]);
        let (a, b) = (arena.take(1000).unwrap(), arena.take(1000).unwrap());
        assert_ne!(a, b);
        assert!(arena.give(b));
        assert_eq!(arena.take(700), Some(b));
    }

    #[test]
    fn all_of_it_can_be_had_at_once_and_nothing_more() {
        let mut arena = Arena::new([Unit::default(); 64]);
        assert_eq!(arena.take(64 * GRAIN_BYTES), Some(0));
        assert_eq!(arena.take(1), None);
        assert!(arena.give(0));
        assert!(!arena.give(0), "it was given back already");
        assert_eq!(arena.take(64 * GRAIN_BYTES + 1), None);
        assert_eq!(arena.take(u64::MAX), None);
        assert_eq!(Arena::new(std::vec![]).take(1), None);
    }

    proptest! {
        /// Beside a simple book: a list of the ranges in use.
        #[test]
        fn blocks_never_overlap_and_all_comes_back(steps in prop::collection::vec((any::<bool>(), 1u64..20_000, any::<prop::sample::Index>()), 1..400)) {
            let mut arena = Arena::new([Unit::default(); 128]);
            let bytes = 128 * GRAIN_BYTES;
            let mut used: Vec<(u64, u64)> = Vec::new();
            for (take, len, which) in steps {
                if take {
                    if let Some(at) = arena.take(len) {
                        prop_assert!(at + len <= bytes);
                        prop_assert!(used.iter().all(|(o, l)| at + len <= *o || o + l <= at), "{at}+{len} overlaps {used:?}");
                        used.push((at, len));
                    }
                } else if !used.is_empty() {
                    let (at, _) = used.swap_remove(which.index(used.len()));
                    prop_assert!(arena.give(at));
                }
                prop_assert!(!arena.give(bytes) && !arena.give(1));
            }
            for (at, _) in used {
                prop_assert!(arena.give(at));
            }
            prop_assert_eq!(arena.used_bytes(), 0);
            prop_assert_eq!(arena.take(bytes), Some(0));
        }
    }
}
