//! [`PoolStats`] say how full a pool is.

use super::growth::Grown;
use super::memory::PoolMemory;
use super::pool::Pool;
use crate::platform::Platform;

/// Says how full a pool is, in bytes of whole slots, from [`Pool::stats`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct PoolStats {
    /// What there is, without memory of single requests.
    pub bytes: u64,
    /// What is held: leases and what is in quarantine included.
    pub used: u64,
    /// The most that was ever held: exact with one area of a pool that did not grow, and otherwise
    /// the sum of what each area held at most, which is never less than the truth.
    pub high_water: u64,
    /// What was added and not given back.
    pub grown: u64,
    /// Memory that was obtained for single requests, which hold it; part of `used`.
    pub single: u64,
    /// What is never used again, because hardware was not seen to forget it.
    pub quarantined: u64,
    /// What was lost because the host did not do as it was asked.
    pub leaked: u64,
}

/// Says how full one area of a pool is, in bytes of whole slots, from [`Pool::area_stats`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AreaStats {
    /// Of which of the spans of the pool's memory.
    pub span: usize,
    /// Which of its areas, counted from 0.
    pub area: u32,
    /// What there is.
    pub bytes: u64,
    /// What is held: leases and what is in quarantine included.
    pub used: u64,
    /// The most that was ever held at once.
    pub high_water: u64,
}

impl PoolStats {
    /// Returns what is free.
    pub const fn free_bytes(&self) -> u64 {
        (self.bytes + self.single).saturating_sub(self.used)
    }
}

impl<M: PoolMemory, P: Platform> Pool<M, P> {
    /// Returns how full the pool is. Areas are read one after the other without their locks: while
    /// slots are taken and released the sums are of no single moment.
    pub fn stats(&self) -> PoolStats {
        self.count(&self.grown.lock())
    }

    /// Returns how full each area is of what the pool began with: whether CPUs share the load, and
    /// whether areas are too small for it. Read as [`stats`](Self::stats) is; the counters are the
    /// areas' own, on their cache lines, so that they cost nothing where slots are taken.
    pub fn area_stats(&self) -> impl Iterator<Item = AreaStats> {
        self.base().iter().enumerate().flat_map(move |(span, chunk)| {
            (0..).zip(chunk.by_area()).map(move |(area, slots)| {
                let [bytes, used, high_water] =
                    slots.map(|slots| u64::from(slots) << self.slot_lg2);
                AreaStats { span, area, bytes, used, high_water }
            })
        })
    }

    pub(super) fn count(&self, grown: &Grown<P::Lock>) -> PoolStats {
        let mut stats = PoolStats::default();
        for chunk in self.base() {
            stats.bytes += chunk.span().len();
            stats.used += u64::from(chunk.used()) << self.slot_lg2;
            stats.high_water += u64::from(chunk.high()) << self.slot_lg2;
        }
        let [bytes, used, single, leaked] = grown.count(self.slot_lg2);
        stats.bytes += bytes;
        stats.used += used + single;
        stats.high_water += grown.high(self.slot_lg2);
        PoolStats { grown: bytes, single, leaked, quarantined: grown.quarantined, ..stats }
    }

    /// Begins a new high-water mark, at what is held now (writing 0 to `io_tlb_used_hiwater`).
    pub fn reset_high_water(&self) {
        self.base().iter().for_each(|chunk| chunk.reset_high());
        self.grown.lock().reset_high();
    }
}
