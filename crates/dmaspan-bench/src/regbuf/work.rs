//! Using a registered buffer, one way or the other.

use std::hint::black_box;
use std::num::NonZeroU32;

use crate::models::regbuf_before::{
    BufferBefore, BusBefore, EntryBefore, ImportBefore, LimitsBefore, map_direct, map_sg, prps, sgl,
};
use dmaspan::regbuf::descriptors::{
    self, ListPage, MemoryPageSize, ScatterEntry, SegmentLimits, Sgl, SglDescriptor,
};
use dmaspan::regbuf::{Import, Node};
use dmaspan::{Direction, DmaAddr, PhysAddr};

use super::plan::{Io, PAGE};
use crate::failed::Failed;

/// Data goes from the device to memory: a read.
const DIRECTION: Direction = Direction::FromDevice;
/// Where the device finds lists.
const LISTS_AT: u64 = 1 << 40;
/// How many PRPs a page of a list has.
const LIST_PRPS: usize = 512;

/// Which way it was that refused.
const BY_PAGE: &str = "by page";
pub(super) const BY_SEGMENT: &str = "by segment";

/// As Linux keeps buffers.
pub(crate) struct ByPage<'a> {
    buffer: &'a BufferBefore,
    pub(super) entries: Vec<EntryBefore>,
    pub(super) sgl: Vec<[u64; 2]>,
    pub(super) prps: Vec<u64>,
}

impl<'a> ByPage<'a> {
    /// For I/Os that need so many entries at most.
    pub(crate) fn new(buffer: &'a BufferBefore, entries: usize) -> Self {
        Self {
            buffer,
            entries: vec![EntryBefore::default(); entries],
            sgl: vec![[0; 2]; entries],
            prps: vec![0; entries],
        }
    }

    #[inline(always)]
    pub(super) fn pieces(&self, io: Io) -> Result<ImportBefore<'a>, Failed> {
        self.buffer.import(io.offset, io.len, DIRECTION).map_err(Failed::at(BY_PAGE))
    }

    /// The entries that the driver gets, with the device's addresses.
    #[inline(always)]
    fn mapped(&mut self, io: Io) -> Result<usize, Failed> {
        let import = self.pieces(io)?;
        let used = map_sg(import, LimitsBefore::NVME, &mut self.entries);
        let used = used.map_err(Failed::at(BY_PAGE))?;
        map_direct(&mut self.entries[..used], BusBefore::WHOLE).map_err(Failed::at(BY_PAGE))?;
        Ok(used)
    }

    /// Finds the first piece of an import, and returns where it is.
    #[inline(always)]
    pub(super) fn import(&self, io: Io) -> Result<u64, Failed> {
        Ok(self.pieces(io)?.next().map_or(0, |piece| piece.addr))
    }

    /// Makes scatter-gather entries of an import, and returns how many.
    #[inline(always)]
    pub(super) fn scatter(&mut self, io: Io) -> Result<usize, Failed> {
        let used = self.mapped(io)?;
        black_box(&mut *self.entries);
        Ok(used)
    }

    /// Makes an NVMe scatter-gather list.
    #[inline(always)]
    pub(super) fn sgl(&mut self, io: Io) -> Result<(), Failed> {
        let used = self.mapped(io)?;
        sgl(&self.entries[..used], &mut self.sgl).map_err(Failed::at(BY_PAGE))?;
        black_box(&mut *self.sgl);
        Ok(())
    }

    /// Makes an NVMe PRP list.
    #[inline(always)]
    pub(super) fn prp(&mut self, io: Io) -> Result<(), Failed> {
        let used = self.mapped(io)?;
        prps(&self.entries[..used], &mut self.prps).map_err(Failed::at(BY_PAGE))?;
        black_box(&mut *self.prps);
        Ok(())
    }
}

/// Memory for lists.
pub(crate) struct Lists {
    sgl: Vec<SglDescriptor>,
    prps: Vec<u64>,
}

impl Lists {
    /// For so many entries.
    pub(crate) fn new(entries: usize) -> Self {
        // A pointer to the next page for each page.
        let prps = (entries + entries / (LIST_PRPS - 1) + 1).next_multiple_of(LIST_PRPS);
        Self { sgl: vec![SglDescriptor::default(); entries], prps: vec![0; prps] }
    }
}

/// What a device with the limits of NVMe's takes: the same as by page.
pub(super) fn limits() -> Result<SegmentLimits, descriptors::Error> {
    let LimitsBefore { boundary_mask, .. } = LimitsBefore::NVME;
    SegmentLimits::new(NonZeroU32::MAX).with_boundary(boundary_mask + 1)
}

/// As dmaspan keeps them.
pub(crate) struct BySegment<'a> {
    node: &'a Node<PhysAddr>,
    limits: SegmentLimits,
    page: MemoryPageSize,
    pub(super) entries: Vec<ScatterEntry>,
    pub(super) sgl: [ListPage<'a, SglDescriptor>; 1],
    pub(super) prps: Vec<ListPage<'a, u64>>,
}

impl<'a> BySegment<'a> {
    /// For I/Os that need so many entries at most.
    pub(crate) fn new(
        node: &'a Node<PhysAddr>,
        entries: usize,
        lists: &'a mut Lists,
    ) -> Result<Self, Failed> {
        let pages =
            (LISTS_AT..).step_by(4096).map(DmaAddr::new).zip(lists.prps.chunks_mut(LIST_PRPS));
        Ok(Self {
            node,
            limits: limits()?,
            page: MemoryPageSize::new(PAGE.ilog2() - 12)?,
            entries: vec![ScatterEntry::default(); entries],
            sgl: [ListPage { addr: DmaAddr::new(LISTS_AT), entries: &mut lists.sgl }],
            prps: pages.map(|(addr, entries)| ListPage { addr, entries }).collect(),
        })
    }

    #[inline(always)]
    pub(super) fn pieces(&self, io: Io) -> Result<Import<'a, PhysAddr>, Failed> {
        self.node.import(io.offset, io.len, DIRECTION).map_err(Failed::at(BY_SEGMENT))
    }

    /// The list as the command has it.
    #[inline(always)]
    pub(super) fn write_sgl(&mut self, io: Io) -> Result<Sgl, Failed> {
        let import = self.pieces(io)?;
        Sgl::write(self.limits, import, &mut self.sgl).map_err(Failed::at(BY_SEGMENT))
    }

    /// The same with PRPs.
    #[inline(always)]
    pub(super) fn write_prps(&mut self, io: Io) -> Result<descriptors::Prps, Failed> {
        let import = self.pieces(io)?;
        self.page.write(import, &mut self.prps).map_err(Failed::at(BY_SEGMENT))
    }

    /// Finds the first piece of an import, and returns where it is.
    #[inline(always)]
    pub(super) fn import(&self, io: Io) -> Result<u64, Failed> {
        Ok(self.pieces(io)?.next().map_or(0, |piece| piece.start().get()))
    }

    /// Makes scatter-gather entries of an import, and returns how many.
    #[inline(always)]
    pub(super) fn scatter(&mut self, io: Io) -> Result<usize, Failed> {
        let import = self.pieces(io)?;
        let used = self.limits.write(import, &mut self.entries);
        let used = used.map_err(Failed::at(BY_SEGMENT))?;
        black_box(&mut *self.entries);
        Ok(used)
    }

    /// Makes an NVMe scatter-gather list.
    #[inline(always)]
    pub(super) fn sgl(&mut self, io: Io) -> Result<(), Failed> {
        black_box(self.write_sgl(io)?);
        black_box(&mut self.sgl);
        Ok(())
    }

    /// Makes an NVMe PRP list.
    #[inline(always)]
    pub(super) fn prp(&mut self, io: Io) -> Result<(), Failed> {
        black_box(self.write_prps(io)?);
        black_box(&mut *self.prps);
        Ok(())
    }
}

/// Writes as many addresses as an I/O has pages, and does nothing else.
#[inline(always)]
pub(crate) fn store(io: Io, places: &mut [u64]) {
    let pages = usize::try_from(((io.offset % PAGE) + io.len).div_ceil(PAGE)).unwrap_or(0);
    let mut addr = io.offset;
    for place in places.iter_mut().take(pages) {
        *place = addr.to_le();
        addr = addr.wrapping_add(PAGE);
    }
    black_box(places);
}
