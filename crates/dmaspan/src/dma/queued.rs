//! The entries of a [`DmaDomain`]'s flush queue: IOVAs and memory that wait for a sync.

use alloc::vec::Vec;
use core::mem::ManuallyDrop;

use super::domain::DmaDomain;
use super::links::Link;
use super::memory::{DmaMemory, Piece};
use crate::io_pgtable::{Format, Retired, TableMemory};
use crate::iommu::flush_queue::Flusher;
use crate::iommu::iova::{self, Iovas};
use crate::iommu::{Gather, IommuOps, SyncFailed};
use crate::leak::{self, Held};
use crate::log;
use crate::platform::Platform;
use crate::range::IovaRange;

/// IOVAs and the memory that was mapped there. Dropped, both leak: a device may still use them.
#[derive(Debug)]
#[expect(unreachable_pub, reason = "a type of a trait that a public type implements")]
pub struct QueuedMapping<H> {
    pub(super) iovas: iova::Raw,
    memory: ManuallyDrop<QueuedMemory<H>>,
}

/// Memory that was mapped in one range of IOVAs.
#[derive(Debug)]
pub enum QueuedMemory<H> {
    /// By one mapping.
    Once(H),
    /// Piece by piece, in a reservation.
    Linked(Vec<Link<H>>),
}

impl<H> QueuedMapping<H> {
    #[inline(always)]
    pub(super) fn new(iovas: Iovas, memory: QueuedMemory<H>) -> Self {
        Self { iovas: iovas.into_raw(), memory: ManuallyDrop::new(memory) }
    }

    /// The memory, which no device uses any more.
    #[inline(always)]
    pub(super) fn into_parts(self) -> (iova::Raw, QueuedMemory<H>) {
        (self.iovas, ManuallyDrop::into_inner(self.memory))
    }
}

impl<H: DmaMemory> QueuedMapping<H> {
    /// How much memory it is.
    pub(super) fn bytes(&self) -> u64 {
        let len = |piece: &Piece| piece.span.len();
        match &*self.memory {
            QueuedMemory::Once(memory) => {
                memory.pieces().iter().map(len).fold(0, u64::saturating_add)
            }
            QueuedMemory::Linked(links) => links.iter().map(Link::len).fold(0, u64::saturating_add),
        }
    }
}

impl<F, M, O, P, H> Flusher for DmaDomain<F, M, O, P, H>
where
    F: Format,
    M: TableMemory<F::Word>,
    O: IommuOps,
    P: Platform,
    H: DmaMemory,
{
    type List = M::List;
    type QueuedMapping = QueuedMapping<H>;

    #[inline(always)]
    fn gather(&self) -> Gather<M::List> {
        self.domain().gather()
    }

    #[inline(always)]
    fn add(&self, gather: &mut Gather<M::List>, retired: Retired<M::List>) {
        self.domain().add_own(gather, retired);
    }

    fn merge(&self, gather: &mut Gather<M::List>, more: Gather<M::List>) {
        self.domain().merge_own(gather, more);
    }

    fn sync(&self, gather: Gather<M::List>) -> Result<(), SyncFailed<M::List>> {
        self.domain().sync_own(gather).map(|_| ())
    }

    #[inline(always)]
    fn sync_one(&self, retired: Retired<M::List>) -> Result<(), SyncFailed<M::List>> {
        self.domain().sync_retired(retired)
    }

    #[inline(always)]
    fn release(&self, held: impl Iterator<Item = QueuedMapping<H>>) {
        let mut freed = self.iovas().free_many();
        for held in held {
            let (iovas, memory) = held.into_parts();
            // Of this space: nobody else makes what is held.
            freed.push(iovas);
            drop(memory);
        }
    }

    fn range(&self, held: &QueuedMapping<H>) -> IovaRange {
        held.iovas.range
    }

    #[cold]
    fn leak(&self, held: QueuedMapping<H>) {
        // Never dropped: where a logger panics, too.
        let held = ManuallyDrop::new(held);
        let range = held.iovas.range;
        let memory_bytes = held.bytes();
        leak::count(Held { iovas: Some(range), memory: memory_bytes, slots: 0 });
        log::warn!(
            "{range} and the {memory_bytes:#x} bytes that were mapped there leak, because hardware \
             did not confirm that it forgot them: reset the device and its IOMMU"
        );
    }
}
