//! A hash table that finds things again by a number that was given away, as the address that a
//! driver keeps.
//!
//! It is several hash tables, each with a lock of its own, so that CPUs seldom meet. Taking out
//! never allocates.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::fmt;

use lock_api::Mutex;

use crate::platform::{Apart, Platform};

/// Values by key; several may have the same.
pub(crate) struct ShardedMap<P: Platform, T> {
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

impl<P: Platform, T> ShardedMap<P, T> {
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
    /// The value, where there is no memory.
    pub(crate) fn insert(&self, key: u64, value: T) -> Result<(), T> {
        self.shard(key).lock().insert(key, value)
    }

    /// Takes out what is kept under `key` and `check` agrees to; what `check` says of the last
    /// where it refuses all, and `None` where there is nothing. What `check` refuses stays.
    pub(crate) fn remove_if<E>(
        &self,
        key: u64,
        check: impl Fn(&T) -> Result<(), E>,
    ) -> Option<Result<T, E>> {
        self.shard(key).lock().remove_if(key, check)
    }

    /// Looks at what [`remove_if`](Self::remove_if) would take out, which stays meanwhile: `look`
    /// runs under the lock of the shard, whose other keys wait for it.
    pub(crate) fn look_if<E, R>(
        &self,
        key: u64,
        check: impl Fn(&T) -> Result<(), E>,
        look: impl FnOnce(&T) -> R,
    ) -> Option<Result<R, E>> {
        let table = self.shard(key).lock();
        match table.find(key, check)? {
            Ok(at) => table.slots[at].as_ref().map(|(_, value)| Ok(look(value))),
            Err(error) => Some(Err(error)),
        }
    }

    fn shard(&self, key: u64) -> &Shard<P, T> {
        // Not the bits that slots go by, or a shard would use a part of its slots.
        let index = (hash(key) & 0xffff_ffff) >> 26;
        &self.shards[index as usize & (self.shards.len() - 1)]
    }
}

impl<P: Platform, T> fmt::Debug for ShardedMap<P, T> {
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

    /// Where something under `key` is that `check` agrees to.
    fn find<E>(&self, key: u64, check: impl Fn(&T) -> Result<(), E>) -> Option<Result<usize, E>> {
        if self.slots.is_empty() {
            return None;
        }
        let (mut at, mut refused) = (self.home(key), None);
        while let Some((found, value)) = &self.slots[at] {
            if *found == key {
                match check(value) {
                    Ok(()) => return Some(Ok(at)),
                    Err(error) => refused = Some(Err(error)),
                }
            }
            at = self.after(at);
        }
        refused
    }

    /// The empty slot for another value under `key`; there is one.
    fn vacant(&self, key: u64) -> usize {
        let mut at = self.home(key);
        while self.slots[at].is_some() {
            at = self.after(at);
        }
        at
    }

    fn insert(&mut self, key: u64, value: T) -> Result<(), T> {
        // A quarter stays empty, so that runs are short.
        if (self.len + 1).saturating_mul(4) > self.slots.len().saturating_mul(3) && !self.grow() {
            return Err(value);
        }
        let at = self.vacant(key);
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
            let at = self.vacant(key);
            self.slots[at] = Some((key, value));
        }
        true
    }

    fn remove_if<E>(
        &mut self,
        key: u64,
        check: impl Fn(&T) -> Result<(), E>,
    ) -> Option<Result<T, E>> {
        let at = match self.find(key, check)? {
            Ok(at) => at,
            Err(error) => return Some(Err(error)),
        };
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

    /// A table does as a map of lists does, with keys that meet, runs that go around the end, and
    /// several values under a key.
    #[test]
    fn a_table_is_a_map_of_lists() {
        let mut table = Table { slots: Vec::new(), len: 0 };
        let mut map = BTreeMap::<u64, Vec<u64>>::new();
        let (mut random, mut removed, mut refused) = (1u64, 0, 0);
        let steps = if cfg!(miri) { 400 } else { 20_000 };
        for step in 0..steps {
            random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            let key = (random >> 40) % 97 * 0x1000;
            let values = map.entry(key).or_default();
            if random >> 63 == 0 && values.len() < 4 {
                assert_eq!(table.insert(key, step), Ok(()));
                values.push(step);
                continue;
            }
            // One of them, or none.
            let wanted = values.get((random >> 32) as usize % 5).copied();
            let check = |value: &u64| if Some(*value) == wanted { Ok(()) } else { Err(*value) };
            match (table.remove_if(key, check), wanted) {
                (Some(Ok(value)), Some(wanted)) => {
                    assert_eq!(value, wanted);
                    values.retain(|value| *value != wanted);
                    removed += 1;
                }
                (Some(Err(value)), None) => {
                    assert!(values.contains(&value));
                    refused += 1;
                }
                (found, wanted) => {
                    assert!(found.is_none() && wanted.is_none() && values.is_empty())
                }
            }
            assert_eq!(table.len, map.values().map(Vec::len).sum::<usize>());
        }
        assert!(removed > steps / 20 && refused > steps / 20);
    }
}
