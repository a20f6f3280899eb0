//! Page tables that no hardware walks: for measuring and checking the tables alone.
//!
//! Detached tables wait for a sync because hardware may be walking them. Here nothing can: the
//! tables' addresses are made up, and the arena that alone turns them into memory is given to
//! nobody. So a [`Region`] frees what it retired at once.

mod dma;

use dmaspan::io_pgtable::{Arena, ArenaList, Error, Format, Owned, PageTable, Retired};
use dmaspan::{IovaRange, PhysAddr, lg2};

pub(crate) use dma::{
    ADDRESS_BITS, Caller, List, MAX_RANGES, MappedBy, Mapper, Single, Told, Untold, UnwalkedDma,
    told,
};

/// The leaves of a format that are one entry each, bit n for 2^n bytes.
pub(crate) fn entry_sizes<F: Format>(format: &F) -> u64 {
    let geometry = format.geometry();
    let sizes = (0..=geometry.top_level).map(F::shift).filter(|&lg2| lg2 < 64);
    sizes.map(lg2::size).sum::<u64>() & geometry.page_sizes
}

/// A page table with an arena of its own and without hardware.
#[derive(Debug)]
pub(crate) struct Unwalked<F: Format> {
    table: PageTable<F, Arena>,
}

impl<F: Format> Unwalked<F> {
    /// An empty table, with room for tables of `bytes` bytes together from `base` on (see
    /// [`Arena::new`]).
    ///
    /// # Errors
    ///
    /// [`Error::NoTables`] where the root has no room, or would lie where the format cannot reach.
    pub(crate) fn new(format: F, base: PhysAddr, bytes: u64) -> Result<Self, Error> {
        Ok(Self { table: PageTable::new(format, Arena::new(base, bytes))? })
    }

    /// How many tables there are, the root included.
    pub(crate) fn tables(&self) -> usize {
        self.table.memory().tables()
    }

    /// All that the table translates, as one region.
    pub(crate) fn whole(&mut self) -> Region<'_, F> {
        self.claim(self.table.geometry().aperture)
    }

    /// Regions of `bytes` bytes, one behind the other from the first IOVA on, as many as there is
    /// place for: none of 0 bytes. Each can go to a thread of its own.
    pub(crate) fn regions(&mut self, bytes: u64) -> impl Iterator<Item = Region<'_, F>> {
        let this = &*self;
        let aperture = this.table.geometry().aperture;
        let mut next = (bytes > 0).then_some(aperture.start());
        std::iter::from_fn(move || {
            let range = IovaRange::from_len(next?, bytes).ok()?;
            if !aperture.covers(range) {
                return None;
            }
            // Past the last address there is no further region.
            next = range.last().checked_add(1);
            Some(this.claim(range))
        })
    }

    /// A range that nobody else has: callers take `&mut self` and give out disjoint ranges, or hold
    /// the range as IOVAs, which no other one gets meanwhile.
    #[expect(unsafe_code, reason = "callers divide the table into disjoint ranges")]
    #[inline]
    fn claim(&self, range: IovaRange) -> Region<'_, F> {
        // SAFETY: the callers either borrow this exclusively for as long as any of their regions
        // lives, and the ranges that one borrow is divided into are disjoint; or a space of IOVAs
        // divides all of it among them.
        let owned = unsafe { self.table.claim(range) };
        Region { owned, table: &self.table }
    }
}

/// A range of an [`Unwalked`] table that the holder alone works on.
#[derive(Debug)]
pub(crate) struct Region<'t, F: Format> {
    owned: Owned<'t, F, Arena>,
    table: &'t PageTable<F, Arena>,
}

impl<'t, F: Format> Region<'t, F> {
    /// What maps, unmaps and looks up.
    #[inline]
    pub(crate) fn owned(&self) -> &Owned<'t, F, Arena> {
        &self.owned
    }

    /// Frees the tables that were detached. Those of another table are leaked.
    #[expect(unsafe_code, reason = "nothing walks these tables")]
    #[inline]
    pub(crate) fn free(&self, retired: Retired<ArenaList>) {
        // SAFETY: 1. Nothing walks this table: its arena is made by `Unwalked::new` and given to
        // nobody, and without it no address of a table leads to memory. 2. Tables of another arena
        // stay where they are: an arena takes no other one's list; and no other tree lies in this
        // one.
        unsafe { self.table.free(retired) }
    }

    /// Frees the tables of the region that have no leaves any more, and returns how many leaves are
    /// left in it.
    ///
    /// # Errors
    ///
    /// [`Error::OutsideAperture`] never: a region lies in the aperture.
    pub(crate) fn clean_up(&self) -> Result<u64, Error> {
        let range = self.owned.range();
        self.free(self.owned.reclaim(range)?);
        Ok(self.owned.census(range).total())
    }
}

#[cfg(test)]
mod tests {
    use dmaspan::io_pgtable::{ArmLpaeS1, ArmLpaeS1Config};
    use dmaspan::{Iova, Prot};

    use super::*;

    fn table(input_bits: u32) -> Unwalked<ArmLpaeS1<12>> {
        let format = ArmLpaeS1::new(ArmLpaeS1Config::new(input_bits, 48)).unwrap();
        Unwalked::new(format, PhysAddr::new(1 << 30), 1 << 20).unwrap()
    }

    #[test]
    fn regions_are_disjoint_and_within_the_aperture() {
        let mut table = table(32);
        let starts = |table: &mut Unwalked<_>, bytes| -> Vec<u64> {
            table.regions(bytes).map(|region| region.owned().range().start().get()).collect()
        };
        assert_eq!(starts(&mut table, 1 << 30), [0, 1 << 30, 2 << 30, 3 << 30]);
        assert_eq!(starts(&mut table, 3 << 30), [0]);
        assert_eq!(starts(&mut table, 1 << 32), [0]);
        assert_eq!(starts(&mut table, (1 << 32) + 1), [0; 0]);
        assert_eq!(starts(&mut table, 0), [0; 0]);
    }

    #[test]
    fn every_thread_maps_in_a_region_of_its_own() {
        let mut table = table(32);
        std::thread::scope(|scope| {
            for region in table.regions(1 << 30) {
                scope.spawn(move || {
                    let (iova, memory) = (region.owned().range().start(), PhysAddr::new(0x5000));
                    let mapped = region.owned().map_pages(iova, memory, 4096, 1, Prot::READ);
                    assert_eq!(mapped.0, 4096);
                });
            }
        });
        assert_eq!(table.regions(1 << 30).count(), 4);
        let third = table.whole().owned().iova_to_phys(Iova::new(2 << 30));
        assert_eq!(third, Some(PhysAddr::new(0x5000)));
    }

    #[test]
    fn a_region_refuses_its_neighbours_addresses() {
        let mut table = table(32);
        let region = table.regions(1 << 30).next().unwrap();
        let beyond = Iova::new(1 << 30);
        let (bytes, result) =
            region.owned().map_pages(beyond, PhysAddr::new(0), 4096, 1, Prot::READ);
        assert_eq!(bytes, 0);
        assert!(matches!(result, Err(Error::NotOwned { .. })), "{result:?}");
    }

    #[test]
    fn what_is_unmapped_is_freed_at_once_and_the_rest_by_cleaning_up() {
        let mut table = table(48);
        let region = table.regions(4 << 20).next().unwrap();
        let map = |iova, pages| {
            let paddr = PhysAddr::new(0);
            let (_, result) = region.owned().map_pages(iova, paddr, 4096, pages, Prot::READ);
            result.unwrap();
        };
        map(Iova::new(0), 512);
        map(Iova::new(2 << 20), 2);
        assert_eq!(region.table.memory().tables(), 5);
        region.free(region.owned().unmap_pages(Iova::new(0), 4096, 512).retired);
        assert_eq!(region.table.memory().tables(), 4);
        region.free(region.owned().unmap_pages(Iova::new(2 << 20), 4096, 1).retired);
        assert_eq!(region.clean_up(), Ok(1));
        region.free(region.owned().unmap_pages(Iova::new(0x20_1000), 4096, 1).retired);
        assert_eq!(region.clean_up(), Ok(0));
        let whole = table.whole();
        assert_eq!(whole.clean_up(), Ok(0));
        assert_eq!(table.tables(), 1);
    }
}
