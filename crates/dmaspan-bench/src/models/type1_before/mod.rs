//! The VFIO container as Linux 6.14 had it: what [`Container`](dmaspan::Container) is measured
//! against.
//!
//! It follows `drivers/vfio/vfio_iommu_type1.c` as it was before two series: the one that counts
//! and unpins by large folio, and the one that follows a pfnmap by the size of its leaf. Per page
//! it does what that did per page:
//!
//! - mapping memory: an entry of an array of 512, whether the frame is reserved, for which the 64
//!   bytes are read that Linux keeps of each page, whether it goes on the run, and whether the
//!   owner's limit has room;
//! - mapping a pfnmap: a walk of the CPU's tables besides, and no array;
//! - unmapping: a walk of the IOMMU's tables to find where runs end, whether the frame is reserved,
//!   and an atomic operation on its folio.
//!
//! For each contiguous run it maps and unmaps by one call, with the fewest leaves, and it syncs
//! once for 512 runs. One lock is held throughout.
//!
//! It is honest, so no slower than it must be. It runs over the same tables and memory as what it
//! is measured against, and leaves out the search for pages that others pinned, the pin that Linux
//! tries before it follows a pfnmap, and the wait for hardware. What Linux does for each run is
//! here too: a lock around the owner's count, an allocation for a run that waits for a sync, and a
//! second look-up of the page that ends a run.

mod pin;
#[cfg(test)]
mod tests;
mod unmap;

use std::collections::BTreeMap;
use std::sync::Arc;

use dmaspan::io_pgtable::{self, Format, LeafCensus};
use dmaspan::pin::Dirty;
use dmaspan::{Iova, IovaRange, PhysAddr, Prot, RangeError, Span, UserAddr, UserRange};
use parking_lot::Mutex;

use crate::models::unwalked::Unwalked;
use dmaspan_sim::memory::{SimMemory, SimSpace};
use dmaspan_sim::walker::Access;
use pin::{Frames, Known, Pages};
use unmap::Regions;

/// log2 of the pages that all is counted in.
const PAGE_LG2: u32 = 12;
const PAGE: u64 = 1 << PAGE_LG2;

/// How many pages an array has (`VFIO_BATCH_MAX_CAPACITY`: a page of pointers).
const ARRAY_PAGES: usize = 512;

/// How many runs are unmapped before a sync at most (`VFIO_IOMMU_TLB_SYNC_MAX`).
const SYNC_RUNS: usize = 512;

/// Why a mapping was refused, or an unmap. Nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum Type1Error {
    /// The range wraps, or an end of it is within a page.
    #[error("{iova} and {user} do not begin and end with pages of 4 KiB")]
    Misaligned {
        /// Where it would begin.
        iova: Iova,
        /// The user's memory.
        user: UserRange,
    },
    /// IOVAs are no range.
    #[error(transparent)]
    Range(#[from] RangeError),
    /// Part of the range is mapped.
    #[error("{range} overlaps the mapping {existing}")]
    Exists {
        /// What was to be mapped.
        range: IovaRange,
        /// What is.
        existing: IovaRange,
    },
    /// An unmap would cut a mapping.
    #[error("unmapping {range} would cut the mapping {mapping}")]
    Bisects {
        /// What was to be unmapped.
        range: IovaRange,
        /// What would be cut.
        mapping: IovaRange,
    },
    /// The user has nothing there, or may not access it so.
    #[error("nothing can be pinned at {at}")]
    Fault {
        /// The first such address.
        at: UserAddr,
    },
    /// The owner may pin no more.
    #[error("more than {limit} bytes would be pinned")]
    OverLimit {
        /// The bytes that may be.
        limit: u64,
    },
    /// The tables refused.
    #[error(transparent)]
    Table(#[from] io_pgtable::Error),
}

impl Type1Error {
    /// As the errno of Linux.
    #[cfg(test)]
    pub(crate) fn errno(&self) -> dmaspan::Errno {
        use dmaspan::Errno;
        match self {
            Self::Misaligned { .. } | Self::Bisects { .. } => Errno::EINVAL,
            Self::Range(_) => Errno::EOVERFLOW,
            Self::Exists { .. } => Errno::EEXIST,
            Self::Fault { .. } => Errno::EFAULT,
            Self::OverLimit { .. } => Errno::ENOMEM,
            Self::Table(error) => error.errno(),
        }
    }
}

/// How often tables were asked where something is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Lookups {
    /// Leaves of the CPU's tables, each as often as a call met it.
    pub(crate) cpu: u64,
    /// Walks of the IOMMU's tables.
    pub(crate) iommu: u64,
}

/// A container that goes page by page, over page tables without hardware.
#[derive(Debug)]
pub(crate) struct Type1Before<F: Format> {
    memory: Known,
    state: Mutex<State<F>>,
}

#[derive(Debug)]
struct State<F: Format> {
    table: Unwalked<F>,
    /// By the first IOVA (`dma_list`).
    mappings: BTreeMap<Iova, Dma>,
    owner: Mutex<Owner>,
    pages: Pages,
    regions: Regions,
    lookups: Lookups,
}

/// A mapping (`struct vfio_dma`).
#[derive(Clone, Copy, Debug)]
struct Dma {
    last: Iova,
    prot: Prot,
}

/// What the owner has pinned, in pages (`locked_vm`).
#[derive(Clone, Copy, Debug)]
struct Owner {
    locked: u64,
    limit: u64,
}

impl Dma {
    fn range(self, start: Iova) -> IovaRange {
        IovaRange::new(start, self.last).unwrap_or(IovaRange::point(start))
    }
}

impl<F: Format> Type1Before<F> {
    /// An empty container, with tables of this format, which have room for `table_bytes` from
    /// `tables_at` on, over this memory with the large folios that it has now. Its owner may pin
    /// `limit` bytes.
    ///
    /// # Errors
    ///
    /// [`io_pgtable::Error`] where the root has no room.
    pub(crate) fn new(
        format: F,
        tables_at: PhysAddr,
        table_bytes: u64,
        memory: Arc<SimMemory>,
        limit: u64,
    ) -> Result<Self, io_pgtable::Error> {
        let state = State {
            table: Unwalked::new(format, tables_at, table_bytes)?,
            mappings: BTreeMap::new(),
            owner: Mutex::new(Owner { locked: 0, limit: limit >> PAGE_LG2 }),
            pages: Pages::new(),
            regions: Regions::new(),
            lookups: Lookups::default(),
        };
        Ok(Self { memory: Known::new(memory), state: Mutex::new(state) })
    }

    /// Pins `user` of `space` and maps it at `iova` (`vfio_dma_do_map`, `vfio_pin_map_dma`).
    ///
    /// # Errors
    ///
    /// [`Type1Error`], with nothing mapped, pinned or charged.
    pub(crate) fn map(
        &self,
        space: &SimSpace,
        user: UserRange,
        iova: Iova,
        prot: Prot,
    ) -> Result<(), Type1Error> {
        let bytes = user.checked_len().unwrap_or(u64::MAX);
        let range = IovaRange::from_len(iova, bytes)?;
        if (iova.get() | user.start().get() | bytes) & (PAGE - 1) != 0 {
            return Err(Type1Error::Misaligned { iova, user });
        }
        let mut state = self.state.lock();
        if let Some(existing) = state.overlapping(range).next() {
            return Err(Type1Error::Exists { range, existing });
        }
        state.mappings.insert(iova, Dma { last: range.last(), prot });
        let mut mapped = 0;
        let result = state.map_runs(&self.memory, space, (user, bytes), iova, prot, &mut mapped);
        state.pages.unpin_rest(&self.memory);
        if result.is_err() {
            if let Ok(done) = IovaRange::from_len(iova, mapped) {
                state.unmap_unpin(&self.memory, done, Dirty::Clean)?;
            }
            state.mappings.remove(&iova);
        }
        result
    }

    /// Unmaps all mappings in `range`, and returns their bytes (`vfio_dma_do_unmap`, version 2).
    ///
    /// # Errors
    ///
    /// [`Type1Error::Bisects`], with nothing changed.
    pub(crate) fn unmap(&self, range: IovaRange) -> Result<u64, Type1Error> {
        let mut state = self.state.lock();
        if let Some(mapping) = state.overlapping(range).find(|mapping| !range.covers(*mapping)) {
            return Err(Type1Error::Bisects { range, mapping });
        }
        let mut bytes = 0u64;
        while let Some((&start, &dma)) = state.mappings.range(range.start()..=range.last()).next() {
            let mapping = dma.range(start);
            state.unmap_unpin(&self.memory, mapping, Dirty::after(dma.prot))?;
            state.mappings.remove(&start);
            bytes = bytes.wrapping_add(mapping.len_less_one()).wrapping_add(1);
        }
        Ok(bytes)
    }

    /// How often tables were asked so far.
    pub(crate) fn lookups(&self) -> Lookups {
        self.state.lock().lookups
    }

    /// How many mappings there are.
    pub(crate) fn mappings(&self) -> usize {
        self.state.lock().mappings.len()
    }

    /// Bytes that the owner has pinned.
    #[cfg(test)]
    pub(crate) fn locked_bytes(&self) -> u64 {
        self.state.lock().owner.lock().locked << PAGE_LG2
    }

    /// Where an IOVA leads.
    #[cfg(test)]
    pub(crate) fn iova_to_phys(&self, iova: Iova) -> Option<PhysAddr> {
        self.state.lock().table.whole().owned().iova_to_phys(iova)
    }

    /// The leaves of all mappings.
    pub(crate) fn census(&self) -> LeafCensus {
        let mut state = self.state.lock();
        let whole = state.table.whole();
        whole.owned().census(whole.owned().range())
    }
}

impl<F: Format> State<F> {
    /// The mappings that have an address of `range`.
    fn overlapping(&self, range: IovaRange) -> impl Iterator<Item = IovaRange> + '_ {
        let before = self.mappings.range(..range.start()).next_back();
        let inside = self.mappings.range(range.start()..=range.last());
        let all = before.into_iter().chain(inside).map(|(&start, dma)| dma.range(start));
        all.filter(move |mapping| mapping.intersection(range).is_some())
    }

    /// Pins run by run and maps each; `mapped` says how far that came.
    fn map_runs(
        &mut self,
        memory: &Known,
        space: &SimSpace,
        (user, bytes): (UserRange, u64),
        iova: Iova,
        prot: Prot,
        mapped: &mut u64,
    ) -> Result<(), Type1Error> {
        let access = if prot.contains(Prot::WRITE) { Access::Write } else { Access::Read };
        let mut frames = Frames {
            memory,
            space,
            access,
            user,
            pages: &mut self.pages,
            lookups: &mut self.lookups.cpu,
        };
        let region = self.table.whole();
        while *mapped < bytes {
            let run = frames.pin_run(*mapped, bytes - *mapped, *self.owner.lock())?;
            let spans = [Span::new(run.paddr, run.pages << PAGE_LG2)?];
            let at = iova.wrapping_add(*mapped);
            if let Err(failed) = region.owned().map_spans(at, &spans, prot) {
                region.free(failed.retired);
                frames.unpin(run);
                return Err(failed.error.into());
            }
            self.owner.lock().locked += run.charged;
            *mapped += run.pages << PAGE_LG2;
        }
        Ok(())
    }
}
