//! Small blocks of coherent memory, all alike (Linux's `dma_pool`, mm/dmapool.c).

use alloc::vec::Vec;
use core::fmt;
use core::mem::ManuallyDrop;
use core::ptr::NonNull;

use super::frames::SharedBytes;
use super::{Coherent, accesses};
use crate::addr::DmaAddr;
use crate::bytes::Scalar;
use crate::dma::bounce::BouncePool;
use crate::dma::device::Device;
use crate::dma::domain::Translation;
use crate::dma::error::Error;
use crate::lg2;
use crate::platform::{Id, Identity};

/// How many bytes are asked of a device at once, at least.
const PAGE: u64 = 0x1000;

/// A pool of small blocks of a device's [coherent memory](Device::alloc): descriptors, completion
/// records, contexts. All have one size.
///
/// It has no lock: threads that share one put a lock around it. The blocks can be used by any.
/// Which blocks are free it knows by itself, so nothing that a device writes misleads it.
///
/// ```
/// use dmaspan::dma::{BouncePool, CoherentPool, Device, Error, Translation};
///
/// fn contexts<T: Translation, B: BouncePool>(device: &Device<T, B>) -> Result<(), Error> {
///     // 96 bytes each, at multiples of 32, none across a multiple of 4096.
///     let mut pool = CoherentPool::new(device, 96, 32, Some(4096))?;
///     let mut context = pool.alloc(device)?;
///     context.write(0, 0x8000_0001_u32)?;
///     let _for_the_device = context.addr();
///     // And when the device does not use it any more:
///     pool.free(context)?;
///     pool.destroy(device)
/// }
/// ```
///
/// A block goes back once, since it is moved:
///
/// ```compile_fail,E0382
/// use dmaspan::dma::{CoherentBlock, CoherentPool};
///
/// fn twice(pool: &mut CoherentPool, block: CoherentBlock) {
///     let _ = pool.free(block);
///     let _ = pool.free(block);
/// }
/// ```
///
/// Dropped, it leaks its memory: [`destroy`](Self::destroy) it.
pub struct CoherentPool {
    identity: Identity,
    device: Id,
    shape: Shape,
    pages: Vec<Page>,
    /// Blocks that are free, the one freed last at the end; room for all that there are.
    free: Vec<Free>,
}

/// How blocks lie in a page.
#[derive(Clone, Copy, Debug)]
struct Shape {
    /// The bytes of a block.
    len: u64,
    /// From one to the next: a multiple of the alignment.
    stride: u64,
    /// The alignment of a page.
    align: u64,
    page_bytes: u64,
    /// No block crosses a multiple of it, which divides a page.
    window: u64,
}

impl Shape {
    /// Where blocks begin in a page.
    fn places(self) -> impl DoubleEndedIterator<Item = u64> {
        let Self { stride, page_bytes, window, .. } = self;
        let in_window = move |n| (0..window / stride).map(move |k| n * window + k * stride);
        (0..page_bytes / window).flat_map(in_window)
    }
}

/// Memory that is divided into blocks.
struct Page {
    memory: Coherent,
    /// How many of its blocks are out.
    out: usize,
}

/// A block that is free.
struct Free {
    page: usize,
    addr: DmaAddr,
    bytes: SharedBytes,
}

/// A block of a [`CoherentPool`], zeroed when it was given out.
///
/// [`CoherentPool::free`] gives it back. Dropped, it leaks: the device may still use it.
#[must_use = "a block that is dropped is lost to its pool"]
pub struct CoherentBlock {
    pool: Id,
    page: usize,
    addr: DmaAddr,
    /// Never dropped but by the pool: a dropped part of a page frees it with the others.
    bytes: ManuallyDrop<SharedBytes>,
}

impl CoherentBlock {
    /// Returns what the device is given.
    #[inline(always)]
    pub fn addr(&self) -> DmaAddr {
        self.addr
    }

    accesses!();

    #[inline(always)]
    fn bytes(&self) -> &SharedBytes {
        &self.bytes
    }

    #[inline(always)]
    fn bytes_mut(&mut self) -> &mut SharedBytes {
        &mut self.bytes
    }
}

impl fmt::Debug for CoherentBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CoherentBlock")
            .field("addr", &self.addr)
            .field("len", &self.len())
            .finish_non_exhaustive()
    }
}

/// A block that was to be given back to a pool that it is not of.
#[derive(Debug, thiserror::Error)]
#[error("the block at {} belongs to another pool", block.addr)]
pub struct ForeignBlock {
    /// The block, as it was.
    pub block: CoherentBlock,
}

impl From<ForeignBlock> for Error {
    /// The block is dropped, and leaks.
    fn from(ForeignBlock { block }: ForeignBlock) -> Self {
        Self::Foreign { addr: block.addr }
    }
}

impl CoherentPool {
    /// A pool of blocks of `len` bytes, each at a multiple of `align`, none across a multiple of
    /// `boundary`, if there is one (`dma_pool_create`). There is no memory in it yet.
    ///
    /// From each block to the next there are as many bytes as make that one aligned. Memory is
    /// taken from the device by 4096 bytes, or by one block where that is longer.
    ///
    /// # Errors
    ///
    /// [`Error::Length`] and [`Error::Alignment`] for blocks that the device cannot have, and
    /// [`Error::Boundary`] for what is no power of two, or less than a block.
    pub fn new<T: Translation, B: BouncePool>(
        device: &Device<T, B>,
        len: u64,
        align: u64,
        boundary: Option<u64>,
    ) -> Result<Self, Error> {
        let whole = device.coherent_request(len, align)?.len;
        let stride = lg2::align_up(len, align.ilog2());
        let stride = stride.ok_or(Error::Length { len, limit: whole })?;
        let page_bytes = stride.max(PAGE);
        // Multiples of a boundary in a page are those of addresses then.
        let page_align = page_bytes.checked_next_power_of_two().unwrap_or(u64::MAX).max(align);
        device.coherent_request(page_bytes, page_align)?;
        let window = boundary.unwrap_or(u64::MAX).min(page_bytes);
        if let Some(boundary) = boundary
            && (!boundary.is_power_of_two() || boundary < stride)
        {
            return Err(Error::Boundary { len: stride, boundary });
        }
        let shape = Shape { len, stride, align: page_align, page_bytes, window };
        let (pages, free) = (Vec::new(), Vec::new());
        Ok(Self { identity: Identity::new(), device: device.id(), shape, pages, free })
    }

    /// A block, zeroed (`dma_pool_zalloc`): the one that was freed last, or one of a new page.
    ///
    /// # Errors
    ///
    /// [`Error::Foreign`] where this is not a pool of `device`, and what
    /// [`Device::alloc`] refuses, where a page is needed.
    ///
    /// # Context
    ///
    /// As [`Device::alloc`] where a page is needed; otherwise it allocates nothing and waits for
    /// nobody.
    #[track_caller]
    pub fn alloc<T: Translation, B: BouncePool>(
        &mut self,
        device: &Device<T, B>,
    ) -> Result<CoherentBlock, Error> {
        self.check(device)?;
        if self.free.is_empty() {
            self.add_page(device)?;
        }
        let pool = self.identity.id();
        // A page has a block at least.
        let Some(Free { page, addr, mut bytes }) = self.free.pop() else {
            return Err(Error::NoRoom { pieces: 1 });
        };
        bytes.zero();
        self.pages[page].out += 1;
        Ok(CoherentBlock { pool, page, addr, bytes: ManuallyDrop::new(bytes) })
    }

    /// Takes a block back that the device does not use any more (`dma_pool_free`).
    ///
    /// # Errors
    ///
    /// [`ForeignBlock`] with one of another pool.
    ///
    /// # Context
    ///
    /// Allocates nothing and waits for nobody.
    pub fn free(&mut self, block: CoherentBlock) -> Result<(), ForeignBlock> {
        if block.pool != self.identity.id() {
            return Err(ForeignBlock { block });
        }
        let CoherentBlock { page, addr, bytes, .. } = block;
        self.pages[page].out -= 1;
        // There is room for all.
        self.free.push(Free { page, addr, bytes: ManuallyDrop::into_inner(bytes) });
        Ok(())
    }

    /// Returns how many blocks are out, and how many there are.
    pub fn blocks(&self) -> (usize, usize) {
        let out = self.pages.iter().map(|page| page.out).sum();
        (out, out + self.free.len())
    }

    /// Ends the pool, and frees its memory (`dma_pool_destroy`).
    ///
    /// # Errors
    ///
    /// [`Error::Foreign`] where this is not a pool of `device`: all of it leaks.
    /// [`Error::BlocksOut`] where blocks were not given back: the pages that they are in leak,
    /// since the device may use them. [`Error::Quarantined`] as of [`Device::free`].
    ///
    /// # Context
    ///
    /// As [`Device::free`], for each page.
    #[track_caller]
    pub fn destroy<T: Translation, B: BouncePool>(
        mut self,
        device: &Device<T, B>,
    ) -> Result<(), Error> {
        self.check(device)?;
        let (blocks, _) = self.blocks();
        let mut ended = if blocks == 0 { Ok(()) } else { Err(Error::BlocksOut { blocks }) };
        // Of pages with blocks out these are parts that are not out: nothing is freed by them.
        self.free.clear();
        for Page { memory, out } in self.pages.drain(..) {
            if out == 0
                && let Err(failed) = device.free(memory)
            {
                ended = Err(failed.error);
            }
        }
        ended
    }

    fn check<T: Translation, B: BouncePool>(&self, device: &Device<T, B>) -> Result<(), Error> {
        if self.device == device.id() {
            return Ok(());
        }
        let addr = self.pages.first().map_or(DmaAddr::default(), |page| page.memory.addr());
        Err(Error::Foreign { addr })
    }

    /// Divides a new page into blocks.
    #[track_caller]
    fn add_page<T: Translation, B: BouncePool>(
        &mut self,
        device: &Device<T, B>,
    ) -> Result<(), Error> {
        let Shape { len, align, page_bytes, .. } = self.shape;
        let in_all = self.blocks().1 + self.shape.places().count();
        let no_room = |_| Error::NoRoom { pieces: in_all };
        self.free.try_reserve(in_all - self.free.len()).map_err(no_room)?;
        self.pages.try_reserve(1).map_err(no_room)?;
        let mut memory = device.alloc(page_bytes, align)?;
        let (page, first) = (self.pages.len(), memory.addr().get());
        // From the last to the first, so that the first is given out first.
        for at in self.shape.places().rev() {
            // There is a block, and nothing behind it is anybody's.
            let Some(mut bytes) = memory.bytes_mut().split_off(at) else { continue };
            bytes.truncate(len);
            self.free.push(Free { page, addr: DmaAddr::new(first + at), bytes });
        }
        self.pages.push(Page { memory, out: 0 });
        Ok(())
    }
}

impl Drop for CoherentPool {
    fn drop(&mut self) {
        // Blocks that are still out must never fit another pool.
        self.identity.keep();
    }
}

impl fmt::Debug for CoherentPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (out, all) = self.blocks();
        f.debug_struct("CoherentPool")
            .field("shape", &self.shape)
            .field("blocks", &all)
            .field("out", &out)
            .finish_non_exhaustive()
    }
}
