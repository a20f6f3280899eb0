//! Registers, and frames that the kernel's own drivers share with devices.

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::ptr::{NonNull, with_exposed_provenance_mut};
use core::sync::atomic::AtomicU64;

use dmaspan::dma::{AnyMemory, Device, DmaMemory, Piece};
use dmaspan::io_pgtable::FrameWords;
use dmaspan::regbuf::{Buffer, Keep, Segments};
use dmaspan::{DmaAddr, PhysAddr, Prot, Span, UserAddr, UserRange};
use dmaspan_drivers::MmioRegion;

use crate::Result;
use crate::glue::{Frames, Tables};

/// Where registers are: one to one, as memory is.
pub(crate) fn registers(at: u64, len: u64) -> MmioRegion {
    let start = NonNull::new(with_exposed_provenance_mut(at as usize));
    // SAFETY: the address map has registers there as device memory, for ever.
    unsafe { MmioRegion::new(start.expect("no registers are at 0"), len) }
}

/// Frames, as words: CPUs and devices use them at the same time. A clone is the same ones.
#[derive(Clone)]
pub(crate) struct Shared {
    words: Arc<FrameWords<Frames>>,
    piece: Piece,
}

impl Shared {
    /// `2^lg2_size` bytes, zeroed.
    pub(crate) fn new(tables: &Tables, lg2_size: u32) -> Result<Self> {
        let words = tables.words(lg2_size, PhysAddr::new(u64::MAX)).ok_or("out of memory")?;
        let piece = Piece::memory(Span::new(words.paddr(), 1 << lg2_size)?);
        Ok(Self { words: Arc::new(words), piece })
    }

    pub(crate) fn words(&self) -> &[AtomicU64] {
        self.words.words()
    }

    pub(crate) fn span(&self) -> Span {
        self.piece.span
    }

    /// The first bytes, for a mapping.
    pub(crate) fn head(&self, bytes: u64) -> Result<AnyMemory> {
        let piece = Piece::memory(Span::new(self.span().paddr(), bytes.min(self.span().len()))?);
        Ok(AnyMemory::new(Self { piece, ..self.clone() }))
    }

    /// All of it, for a mapping.
    pub(crate) fn memory(&self) -> AnyMemory {
        AnyMemory::new(self.clone())
    }

    /// Maps it for as long as what this returns exists.
    pub(crate) fn register(&self, device: &Device) -> Result<Arc<Buffer<DmaAddr>>> {
        let user =
            UserRange::from_len(UserAddr::new(self.span().paddr().get()), self.span().len())?;
        let (segments, keep) = (Segments::one(self.span()), Box::new(self.clone()));
        // SAFETY: `keep` has the frames, and all access to them is atomic.
        let buffer = unsafe { Buffer::new(segments, user, Prot::READ_WRITE, keep) }?;
        Ok(Arc::new(device.map_buffer(Arc::new(buffer), Prot::READ_WRITE)?))
    }
}

impl Keep<PhysAddr> for Shared {
    fn end(&mut self, _segments: &Segments<PhysAddr>) {}
}

// SAFETY: 1. The words are the value's and its clones', as long as it exists. 2. All access to them
// is atomic.
unsafe impl DmaMemory for Shared {
    fn pieces(&self) -> &[Piece] {
        core::slice::from_ref(&self.piece)
    }
}
