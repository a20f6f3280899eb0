//! Emulated devices read and write memory by IOVAs here: bytes are copied through mappings.

use core::ops::Range;

use lock_api::RawMutex;

use super::error::Error;
use super::mapping::{Mapping, SlotState, overlapping};
use super::{Container, State};
use crate::addr::{Iova, UserAddr};
use crate::pin::{Dirty, Pinner};
use crate::prot::Prot;
use crate::range::IovaRange;

impl<P: Pinner, L: RawMutex, const BATCH: usize> Container<P, L, BATCH> {
    /// Reads what a device would read from `iova` on, as `vfio_iommu_type1_dma_rw` does. The bytes
    /// may lie anywhere in mappings that follow each other.
    ///
    /// What is read cannot be unmapped meanwhile.
    ///
    /// # Errors
    ///
    /// With nothing read: [`Error::Range`] for no bytes, [`Error::NotMapped`], [`Error::Denied`]
    /// where a mapping does not permit reading, [`Error::Quarantined`], and [`Error::Busy`] for a
    /// mapping under construction. [`Error::Copy`] where the user's memory is gone: what lies
    /// before was read.
    ///
    /// # Context
    ///
    /// Copies without the lock.
    pub fn read(&self, iova: Iova, bytes: &mut [u8]) -> Result<(), Error<P::Error>> {
        let range = IovaRange::from_len(iova, bytes.len() as u64)?;
        self.copy_user(range, Prot::READ, Dirty::Clean, |space, at, part| {
            self.pinner.read(space, at, &mut bytes[part])
        })
    }

    /// Writes what a device would write from `iova` on. The mappings must permit reading too, as
    /// for `vfio_iommu_type1_dma_rw`. What was written counts so when it is.
    ///
    /// What is written cannot be unmapped meanwhile.
    ///
    /// # Errors
    ///
    /// As for [`read`](Self::read), and [`Error::Denied`] also where a mapping does not permit
    /// writing.
    ///
    /// # Context
    ///
    /// Copies without the lock.
    pub fn write(&self, iova: Iova, bytes: &[u8]) -> Result<(), Error<P::Error>> {
        let range = IovaRange::from_len(iova, bytes.len() as u64)?;
        self.copy_user(range, Prot::READ_WRITE, Dirty::Written, |space, at, part| {
            self.pinner.write(space, at, &bytes[part])
        })
    }

    /// Copies what lies in each mapping: `each` is told where it is and which of the bytes it is.
    fn copy_user(
        &self,
        range: IovaRange,
        asked: Prot,
        dirty: Dirty,
        each: impl FnMut(&P::Space, UserAddr, Range<usize>) -> Result<(), P::Error>,
    ) -> Result<(), Error<P::Error>> {
        let domains = self.waiting(|| {
            let mut all = self.state.lock();
            all.check_vaddr()?;
            all.check_mapped(range, asked)?;
            let domains = self.begin(&mut all)?;
            all.each_mapped(range, |mapping| mapping.copies += 1);
            Ok(domains)
        })?;
        let copied = self.copy_parts(range, each);
        let mut all = self.state.lock();
        all.wrote(range, dirty);
        all.each_mapped(range, |mapping| mapping.copies -= 1);
        drop(domains);
        all.working -= 1;
        drop(all);
        self.wake();
        copied
    }

    /// Mappings stay meanwhile, since they are counted as being copied.
    fn copy_parts(
        &self,
        range: IovaRange,
        mut each: impl FnMut(&P::Space, UserAddr, Range<usize>) -> Result<(), P::Error>,
    ) -> Result<(), Error<P::Error>> {
        let mut done = 0;
        let mut rest = Some(range);
        while let Some(now) = rest {
            let all = self.state.lock();
            let found = overlapping(&all.tree, now).next();
            let mapping = found.and_then(|(_, slot)| slot.mapped());
            let part = mapping.and_then(|mapping| Some((&mapping.space, mapping.part(now)?)));
            let Some((space, (part, user))) = part else {
                return Err(Error::NotMapped { range, at: now.start() });
            };
            let space = space.clone();
            drop(all);
            // Not longer than the caller's bytes.
            let bytes = usize::try_from(part.len_less_one()).unwrap_or(usize::MAX - 1) + 1;
            let at = user.start();
            each(&space, at, done..done + bytes).map_err(|source| Error::Copy {
                user: at,
                bytes,
                source,
            })?;
            done += bytes;
            let behind = part.last().checked_add(1);
            rest = behind.and_then(|at| IovaRange::new(at, now.last()));
        }
        Ok(())
    }
}

impl<P: Pinner> State<P> {
    /// Refuses a range that is not mapped from end to end, or permits less than `asked`.
    pub(super) fn check_mapped(
        &self,
        range: IovaRange,
        asked: Prot,
    ) -> Result<(), Error<P::Error>> {
        let mut next = Some(range.start());
        for (mapped, slot) in overlapping(&self.tree, range) {
            match next {
                Some(at) if mapped.start() > at => return Err(Error::NotMapped { range, at }),
                _ => next = mapped.last().checked_add(1),
            }
            match &slot.state {
                SlotState::Busy | SlotState::Emptied | SlotState::Doomed(..) => {
                    return Err(Error::Busy { range, busy: mapped });
                }
                SlotState::Quarantined(_) => {
                    return Err(Error::Quarantined { range, quarantined: mapped });
                }
                SlotState::Mapped(mapping) if !mapping.prot.contains(asked) => {
                    let permits = mapping.prot;
                    return Err(Error::Denied { mapping: mapped, permits, asked });
                }
                SlotState::Mapped(_) => {}
            }
        }
        let hole = next.filter(|at| range.contains(*at));
        hole.map_or(Ok(()), |at| Err(Error::NotMapped { range, at }))
    }

    /// Notes that an emulated device wrote there, or may.
    pub(super) fn wrote(&mut self, range: IovaRange, dirty: Dirty) {
        if dirty == Dirty::Clean {
            return;
        }
        self.each_mapped(range, |mapping| {
            if let Some(part) = mapping.range.intersection(range) {
                mapping.mark_dirty(part);
            }
        });
    }

    /// Calls `each` with the mappings that have an address in `range` and are nobody's work.
    fn each_mapped(&mut self, range: IovaRange, mut each: impl FnMut(&mut Mapping<P>)) {
        let mut place = self.tree.reaching(range.start());
        while let Some((start, slot)) = self.tree.at_mut(place)
            && start <= range.last()
        {
            slot.mapped_mut().into_iter().for_each(&mut each);
            place = self.tree.next(place);
        }
    }
}
