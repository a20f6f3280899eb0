//! The sanitizer around what is there: hooks of an IOMMU, memory, a device.

use std::fmt;

use dmaspan::dma::{
    BouncePool, Device, DmaMemory, Mapping, NoPool, Piece, Refused, Translation, UnmapFailed,
    Unmapped, Via,
};
use dmaspan::iommu::{HardwareError, Invalidation, IommuOps, Tables};
use dmaspan::{Coherency, Direction, Iova, IovaRange, PhysAddr, lg2};

use super::Sanitizer;
use super::event::Outcome;

/// An IOMMU driver whose invalidations, syncs of mappings and detach a [`Sanitizer`] sees.
///
/// What is mapped and unmapped it does not see: whoever does that says so.
///
/// ```
/// use dmaspan::io_pgtable::{ArmLpaeS1, ArmLpaeS1Config, PageTable};
/// use dmaspan::iommu::{Domain, HardwareError, Invalidation, IommuOps};
/// use dmaspan::{Iova, IovaRange, PhysAddr, Prot, Span, SpanBuf};
/// use dmaspan_sim::Arena;
/// use dmaspan_sim::sanitizer::{Sanitized, Sanitizer};
///
/// /// A driver, of hardware without caches.
/// struct Driver;
///
/// // SAFETY: there is no hardware that could use anything.
/// unsafe impl IommuOps for Driver {
///     fn invalidate(&self, _what: &Invalidation<'_>) -> Result<(), HardwareError> {
///         Ok(())
///     }
///
///     fn detach(&self) -> Result<(), HardwareError> {
///         Ok(())
///     }
///
///     fn max_ranges(&self) -> usize {
///         8
///     }
/// }
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let sanitizer = Sanitizer::default();
/// let format = ArmLpaeS1::<12>::new(ArmLpaeS1Config::new(48, 48))?;
/// let table = PageTable::new(format, Arena::new(PhysAddr::new(0x4000_0000), 1 << 20))?;
/// let domain = Domain::new(table, Sanitized::new(Driver, &sanitizer))?;
///
/// let range = IovaRange::from_len(Iova::new(0x1000), 0x1000)?;
/// let memory = Span::new(PhysAddr::new(0x8000_0000), 0x1000)?;
/// // SAFETY: one thread maps, and no device reads the memory.
/// unsafe { domain.map_spans(range.start(), &[memory], Prot::READ) }.map_err(|f| f.error)?;
/// sanitizer.on_map(range, &[memory], Prot::READ);
///
/// let mut room = SpanBuf::room::<8>();
/// // SAFETY: one thread unmaps.
/// let unsynced = unsafe { domain.unmap(range, &mut SpanBuf::new(&mut room)) }?;
/// let (gather, _rest) = unsynced.into_gather();
/// let what = gather.invalidation();
/// sanitizer.on_unmap_leaves(range, what.tables, what.leaf_sizes);
///
/// // Left out, the next line is a late flush.
/// // SAFETY: the gather is this domain's.
/// let _synced = unsafe { domain.sync(gather) }.map_err(|f| f.error)?;
/// sanitizer.on_free(memory);
/// drop(domain);
/// assert!(sanitizer.findings().is_empty());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Sanitized<O> {
    inner: O,
    sanitizer: Sanitizer,
}

impl<O> Sanitized<O> {
    /// `inner`, seen by `sanitizer`.
    pub fn new(inner: O, sanitizer: &Sanitizer) -> Self {
        Self { inner, sanitizer: sanitizer.clone() }
    }

    /// What is wrapped.
    pub fn inner(&self) -> &O {
        &self.inner
    }

    /// Who sees it.
    pub fn sanitizer(&self) -> &Sanitizer {
        &self.sanitizer
    }
}

#[expect(unsafe_code, reason = "everything but the events is the inner driver's")]
// SAFETY: every hook calls the inner driver's with the same arguments and answers what it answered.
unsafe impl<O: IommuOps> IommuOps for Sanitized<O> {
    #[track_caller]
    fn invalidate(&self, what: &Invalidation<'_>) -> Result<(), HardwareError> {
        let begun = self.sanitizer.on_invalidate_begin(what);
        let answer = self.inner.invalidate(what);
        let outcome = if answer.is_ok() { Outcome::Done } else { Outcome::Failed };
        self.sanitizer.on_invalidate_end(begun, outcome);
        answer
    }

    #[track_caller]
    fn sync_map(&self, range: IovaRange) -> Result<(), HardwareError> {
        let answer = self.inner.sync_map(range);
        if answer.is_ok() {
            self.sanitizer.on_sync_map(range);
        }
        answer
    }

    fn root_changed(&self, current: &dyn Fn() -> (PhysAddr, u32)) -> Result<(), HardwareError> {
        self.inner.root_changed(current)
    }

    #[track_caller]
    fn detach(&self) -> Result<(), HardwareError> {
        let answer = self.inner.detach();
        if answer.is_ok() {
            self.sanitizer.on_detach();
        }
        answer
    }

    fn max_ranges(&self) -> usize {
        self.inner.max_ranges()
    }
}

/// Memory whose end a [`Sanitizer`] sees: whoever drops it, a flush queue too, releases it.
///
/// [`Sanitizer::on_free`] hears of it just before the inner value is dropped.
pub struct Tracked<H: DmaMemory> {
    inner: H,
    sanitizer: Sanitizer,
}

impl<H: DmaMemory> Tracked<H> {
    /// `inner`, seen by `sanitizer`.
    pub fn new(inner: H, sanitizer: &Sanitizer) -> Self {
        Self { inner, sanitizer: sanitizer.clone() }
    }

    /// What is wrapped.
    pub fn inner(&self) -> &H {
        &self.inner
    }
}

impl<H: DmaMemory> Drop for Tracked<H> {
    fn drop(&mut self) {
        for piece in self.inner.pieces().iter().filter(|piece| piece.via != Via::Bus) {
            self.sanitizer.on_free(piece.span);
        }
    }
}

#[expect(unsafe_code, reason = "the memory is the inner value's")]
// SAFETY: the pieces are the inner value's, which lives as long as this.
unsafe impl<H: DmaMemory> DmaMemory for Tracked<H> {
    fn pieces(&self) -> &[Piece] {
        self.inner.pieces()
    }
}

impl<H: DmaMemory + fmt::Debug> fmt::Debug for Tracked<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Tracked").field(&self.inner).finish()
    }
}

/// A [`Device`] whose mappings a [`Sanitizer`] sees.
///
/// The domain behind it has [`Sanitized`] hooks and [`Tracked`] memory; then every unmap, flush and
/// release is seen, whoever makes it.
///
/// The mapping is told of when it is made, and its end before it is taken from the tables: an
/// invalidation by another thread that begins right in between counts as one after the unmap.
pub struct SanitizedDevice<T: Translation, B: BouncePool = NoPool> {
    inner: Device<T, B>,
    sanitizer: Sanitizer,
    granule_lg2: u32,
    /// What tells its mappings from those of others.
    number: u64,
}

/// A [`Mapping`] that a [`Sanitizer`] knows. Dropped, it is a leak, which is found.
#[derive(Debug)]
#[must_use = "a mapping that is dropped is never unmapped, and its memory leaks"]
pub struct SanitizedMapping<T: Translation, B: BouncePool = NoPool> {
    inner: Mapping<T, B>,
    /// The whole granules; `None` where nothing is translated.
    iovas: Option<IovaRange>,
    device: u64,
}

impl<T: Translation, B: BouncePool> SanitizedMapping<T, B> {
    /// What is wrapped.
    pub fn inner(&self) -> &Mapping<T, B> {
        &self.inner
    }

    /// The IOVAs that are mapped, in whole granules; `None` where nothing is translated.
    pub fn iovas(&self) -> Option<IovaRange> {
        self.iovas
    }
}

impl<T: Translation, B: BouncePool> SanitizedDevice<T, B> {
    /// `inner`, whose domain maps granules of `2^granule_lg2` bytes, seen by `sanitizer`.
    pub fn new(inner: Device<T, B>, granule_lg2: u32, sanitizer: &Sanitizer) -> Self {
        let sanitizer = sanitizer.clone();
        let number = sanitizer.unique();
        Self { inner, sanitizer, granule_lg2, number }
    }

    /// What is wrapped.
    pub fn inner(&self) -> &Device<T, B> {
        &self.inner
    }

    /// Who sees it.
    pub fn sanitizer(&self) -> &Sanitizer {
        &self.sanitizer
    }

    /// [`Device::map_single`].
    ///
    /// # Errors
    ///
    /// As there.
    #[track_caller]
    pub fn map_single(
        &self,
        memory: T::Memory,
        direction: Direction,
    ) -> Result<SanitizedMapping<T, B>, Refused<T::Memory>> {
        let piece = memory.pieces().first().copied();
        let before = self.sanitizer.now();
        let inner = self.inner.map_single(memory, direction)?;
        let translated = piece.filter(|piece| piece.via != Via::Bus);
        let iovas = translated.and_then(|_| self.granules(inner.addr().get(), inner.len()));
        if let Some(iovas) = iovas {
            let whole = |piece: Piece| {
                let paddr = lg2::align_down(piece.span.paddr().get(), self.granule_lg2);
                dmaspan::Span::new(PhysAddr::new(paddr), iovas.checked_len()?).ok()
            };
            // Where a slot is, nobody says.
            let span = piece.filter(|_| !inner.is_bounced()).and_then(whole);
            let prot = direction.prot(Coherency::Coherent);
            self.sanitizer.on_map_since(before, iovas, span.as_slice(), prot);
        }
        Ok(SanitizedMapping { inner, iovas, device: self.number })
    }

    /// [`Device::unmap`].
    ///
    /// # Errors
    ///
    /// As there.
    #[track_caller]
    pub fn unmap(
        &self,
        mapping: SanitizedMapping<T, B>,
    ) -> Result<Unmapped<T::Memory>, UnmapFailed<T, B>> {
        // A mapping of another device is refused and stays mapped.
        if let Some(iovas) = mapping.iovas.filter(|_| mapping.device == self.number) {
            self.sanitizer.on_unmap(iovas, Tables::Kept);
        }
        self.inner.unmap(mapping.inner)
    }

    /// The whole granules around an address and a length.
    fn granules(&self, addr: u64, len: u64) -> Option<IovaRange> {
        let last = addr.checked_add(len.checked_sub(1)?)? | lg2::mask(self.granule_lg2);
        let start = lg2::align_down(addr, self.granule_lg2);
        IovaRange::new(Iova::new(start), Iova::new(last))
    }
}

impl<T: Translation, B: BouncePool> fmt::Debug for SanitizedDevice<T, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SanitizedDevice").field("inner", &self.inner).finish_non_exhaustive()
    }
}
