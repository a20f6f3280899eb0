//! Using a registered buffer, one way or the other.

use std::hint::black_box;
use std::num::NonZeroU32;

use crate::models::regbuf_before::{
    BufferBefore, BusBefore, EntryBefore, ImportBefore, LimitsBefore, RegbufBeforeError,
    map_direct, map_sg, prps, sgl,
};
use dmaspan::regbuf::descriptors::{
    self, ListPage, MemoryPageSize, ScatterEntry, SegmentLimits, Sgl, SglDescriptor,
};
use dmaspan::regbuf::{Import, ImportError, Node};
use dmaspan::{Direction, DmaAddr, PhysAddr};

use super::check::Difference;
use super::ground::GroundError;
use super::plan::{Io, PAGE};

/// Data goes from the device to memory: a read.
const DIRECTION: Direction = Direction::FromDevice;
/// Where the device finds lists.
const LISTS_AT: u64 = 1 << 40;
/// How many PRPs a page of a list has.
const LIST_PRPS: usize = 512;

/// Why a case could not be measured.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RegbufBenchError {
    /// There is no memory.
    #[error(transparent)]
    Ground(#[from] GroundError),
    /// By page something was refused.
    #[error("by page: {0}")]
    ByPage(#[from] RegbufBeforeError),
    /// The registry refused.
    #[error("by segment: {0}")]
    Registry(String),
    /// An import was refused.
    #[error("by segment: {0}")]
    Import(#[from] ImportError),
    /// Descriptors were.
    #[error("by segment: {0}")]
    Descriptors(#[from] descriptors::Error),
    /// The ways do not lead to the same bytes.
    #[error(transparent)]
    Differ(#[from] Difference),
}

/// A way to make descriptors.
pub(crate) trait Way {
    /// Finds the first piece of an import, and returns where it is.
    fn import(&self, io: Io) -> Result<u64, RegbufBenchError>;

    /// Makes scatter-gather entries of an import, and returns how many.
    fn scatter(&mut self, io: Io) -> Result<usize, RegbufBenchError>;

    /// Makes an NVMe scatter-gather list.
    fn sgl(&mut self, io: Io) -> Result<(), RegbufBenchError>;

    /// Makes an NVMe PRP list.
    fn prp(&mut self, io: Io) -> Result<(), RegbufBenchError>;
}

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
    pub(super) fn pieces(&self, io: Io) -> Result<ImportBefore<'a>, RegbufBenchError> {
        Ok(self.buffer.import(io.offset, io.len, DIRECTION)?)
    }

    /// The entries that the driver gets, with the device's addresses.
    #[inline(always)]
    fn mapped(&mut self, io: Io) -> Result<usize, RegbufBenchError> {
        let import = self.pieces(io)?;
        let used = map_sg(import, LimitsBefore::NVME, &mut self.entries)?;
        map_direct(&mut self.entries[..used], BusBefore::WHOLE)?;
        Ok(used)
    }
}

impl Way for ByPage<'_> {
    #[inline(always)]
    fn import(&self, io: Io) -> Result<u64, RegbufBenchError> {
        Ok(self.pieces(io)?.next().map_or(0, |piece| piece.addr))
    }

    #[inline(always)]
    fn scatter(&mut self, io: Io) -> Result<usize, RegbufBenchError> {
        let used = self.mapped(io)?;
        black_box(&mut *self.entries);
        Ok(used)
    }

    #[inline(always)]
    fn sgl(&mut self, io: Io) -> Result<(), RegbufBenchError> {
        let used = self.mapped(io)?;
        sgl(&self.entries[..used], &mut self.sgl)?;
        black_box(&mut *self.sgl);
        Ok(())
    }

    #[inline(always)]
    fn prp(&mut self, io: Io) -> Result<(), RegbufBenchError> {
        let used = self.mapped(io)?;
        prps(&self.entries[..used], &mut self.prps)?;
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
    ) -> Result<Self, RegbufBenchError> {
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
    pub(super) fn pieces(&self, io: Io) -> Result<Import<'a, PhysAddr>, RegbufBenchError> {
        Ok(self.node.import(io.offset, io.len, DIRECTION)?)
    }

    /// The list as the command has it.
    #[inline(always)]
    pub(super) fn write_sgl(&mut self, io: Io) -> Result<Sgl, RegbufBenchError> {
        let import = self.pieces(io)?;
        Ok(Sgl::write(self.limits, import, &mut self.sgl)?)
    }

    /// The same with PRPs.
    #[inline(always)]
    pub(super) fn write_prps(&mut self, io: Io) -> Result<descriptors::Prps, RegbufBenchError> {
        let import = self.pieces(io)?;
        Ok(self.page.write(import, &mut self.prps)?)
    }
}

impl Way for BySegment<'_> {
    #[inline(always)]
    fn import(&self, io: Io) -> Result<u64, RegbufBenchError> {
        Ok(self.pieces(io)?.next().map_or(0, |piece| piece.start().get()))
    }

    #[inline(always)]
    fn scatter(&mut self, io: Io) -> Result<usize, RegbufBenchError> {
        let import = self.pieces(io)?;
        let used = self.limits.write(import, &mut self.entries)?;
        black_box(&mut *self.entries);
        Ok(used)
    }

    #[inline(always)]
    fn sgl(&mut self, io: Io) -> Result<(), RegbufBenchError> {
        black_box(self.write_sgl(io)?);
        black_box(&mut self.sgl);
        Ok(())
    }

    #[inline(always)]
    fn prp(&mut self, io: Io) -> Result<(), RegbufBenchError> {
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
