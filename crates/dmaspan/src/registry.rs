//! Things that are found again by a number that was given away: by the address that a driver keeps.
//!
//! Hash tables, each with a lock of its own, so that CPUs seldom meet. Taking out never allocates.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::fmt;

use lock_api::Mutex;

use crate::platform::{Apart, Platform};

/// Values by key; a key is there at most once.
pub(crate) struct Registry<P: Platform, T> {
    shards: Box<[Shard<P, T>]>,
}

type Shard<P, T> = Apart<Mutex<<P as Platform>::Lock, Table<T>>>;

/// Open addressing with linear probing, and no marks of what was taken out: what stood behind moves
/// up (Knuth, The Art of Computer Programming, volume 3, section 6.4, algorithm R).
struct Table<T> {
    /// A power of two, or none.
    slots: Vec<Option<(u64, T)>>,
    len: usize,
}

impl<P: Platform, T> Registry<P, T> {
    /// An empty one for so many CPUs, or `None` where there is no memory.
    pub(crate) fn new(cpus: usize) -> Option<Self> {
        let count = cpus.clamp(1, 64).next_power_of_two();
        let mut shards = Vec::new();
        shards.try_reserve_exact(count).ok()?;
        shards.extend((0..count).map(|_| Apart(Mutex::new(Table { slots: Vec::new(), len: 0 }))));
        Some(Self { shards: shards.into_boxed_slice() })
    }

    /// Keeps `value` under `key`.
    ///
    /// # Errors
    ///
    /// The value, where there is no memory or one under that key.
    pub(crate) fn insert(&self, key: u64, value: T) -> Result<(), T> {
        self.shard(key).lock().insert(key, value)
    }

    /// Takes out what is kept under `key` if `check` agrees; `None` where there is nothing. What
    /// `check` refuses stays.
    pub(crate) fn remove_if<E>(
        &self,
        key: u64,
        check: impl FnOnce(&T) -> Result<(), E>,
    ) -> Option<Result<T, E>> {
        self.shard(key).lock().remove_if(key, check)
    }

    fn shard(&self, key: u64) -> &Shard<P, T> {
        // Not the bits that slots go by, or a shard would use a part of its slots.
        let index = (hash(key) & 0xffff_ffff) >> 26;
        &self.shards[index as usize & (self.shards.len() - 1)]
    }
}

impl<P: Platform, T> fmt::Debug for Registry<P, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registry").finish_non_exhaustive()
    }
}

/// Mixes all bits into all: keys are multiples of large powers of two.
fn hash(key: u64) -> u64 {
    let key = (key ^ key >> 32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    key ^ key >> 32
}

impl<T> Table<T> {
    fn home(&self, key: u64) -> usize {
        let lg2 = self.slots.len().trailing_zeros();
        let home = hash(key) & crate::lg2::mask(lg2.min(26));
        usize::try_from(home).unwrap_or(0)
    }

    fn after(&self, at: usize) -> usize {
        (at + 1) & (self.slots.len() - 1)
    }

    /// Where `key` is, or the empty slot where it would be; there is one.
    fn find(&self, key: u64) -> usize {
        let mut at = self.home(key);
        while self.slots[at].as_ref().is_some_and(|(found, _)| *found != key) {
            at = self.after(at);
        }
        at
    }

    fn insert(&mut self, key: u64, value: T) -> Result<(), T> {
        // A quarter stays empty, so that runs are short.
        if (self.len + 1).saturating_mul(4) > self.slots.len().saturating_mul(3) && !self.grow() {
            return Err(value);
        }
        let at = self.find(key);
        if self.slots[at].is_some() {
            return Err(value);
        }
        self.slots[at] = Some((key, value));
        self.len += 1;
        Ok(())
    }

    /// Whether there was memory for it.
    fn grow(&mut self) -> bool {
        let count = self.slots.len().saturating_mul(2).max(16);
        let mut slots = Vec::new();
        if slots.try_reserve_exact(count).is_err() {
            return false;
        }
        slots.resize_with(count, || None);
        let old = core::mem::replace(&mut self.slots, slots);
        for (key, value) in old.into_iter().flatten() {
            let at = self.find(key);
            self.slots[at] = Some((key, value));
        }
        true
    }

    fn remove_if<E>(
        &mut self,
        key: u64,
        check: impl FnOnce(&T) -> Result<(), E>,
    ) -> Option<Result<T, E>> {
        if self.slots.is_empty() {
            return None;
        }
        let at = self.find(key);
        if let Err(error) = check(&self.slots[at].as_ref()?.1) {
            return Some(Err(error));
        }
        let (_, value) = self.slots[at].take()?;
        self.len -= 1;
        self.close(at);
        Some(Ok(value))
    }

    /// Moves up what cannot be found any more across an empty slot.
    fn close(&mut self, mut hole: usize) {
        let mask = self.slots.len() - 1;
        let mut at = self.after(hole);
        while let Some((key, _)) = &self.slots[at] {
            let from_home = at.wrapping_sub(self.home(*key)) & mask;
            let from_hole = at.wrapping_sub(hole) & mask;
            if from_home >= from_hole {
                self.slots.swap(hole, at);
                hole = at;
            }
            at = self.after(at);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use alloc::collections::BTreeMap;

    use super::*;

    /// A table does as a map does, with keys that meet and runs that go around the end.
    #[test]
    fn a_table_is_a_map() {
        let mut table = Table { slots: Vec::new(), len: 0 };
        let mut map = BTreeMap::new();
        let mut random = 1u64;
        for step in 0..20_000u64 {
            random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            let key = (random >> 40) % 97 * 0x1000;
            if random >> 63 == 0 {
                let is_new = !map.contains_key(&key);
                assert_eq!(table.insert(key, step).is_ok(), is_new);
                map.entry(key).or_insert(step);
            } else if random >> 62 == 2 {
                let refused = table.remove_if(key, |value| Err::<(), _>(*value));
                assert_eq!(refused, map.get(&key).map(|value| Err(*value)));
            } else {
                let removed = table.remove_if(key, |_| Ok::<_, ()>(()));
                assert_eq!(removed, map.remove(&key).map(Ok));
            }
            assert_eq!(table.len, map.len());
        }
        assert!(map.len() > 20);
    }
}
