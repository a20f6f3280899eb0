//! These wrappers put the sanitizer around the hooks of an IOMMU, memory, or a device.

use std::fmt;
use std::panic::Location;

use dmaspan::dma::{DmaMemory, Piece, Via};
use dmaspan::io_pgtable::{Fresh, NoTables, TableAddr, TableMemory, TableRoot, TableShape, Word};
use dmaspan::iommu::{DriverOps, Event, HardwareError, Invalidation, IommuOps};
use dmaspan::{Coherency, IovaRange, PhysAddr, Promise, Span, lg2};

use super::Sanitizer;
use super::event::Outcome;

/// An IOMMU driver of which a [`Sanitizer`] sees everything: invalidations, and through
/// [`IommuOps::observe`] what its [`Domain`](dmaspan::iommu::Domain) maps and unmaps, whoever asked
/// for it: single mappings, lists, reservations, a flush queue.
///
/// The code that maps memory says by [`Tracked`] or [`Sanitizer::on_free`] when its owner has it
/// back, and the code that plays the device says what it does by [`Sanitizer::on_dma`].
///
/// ```
/// use dmaspan::io_pgtable::{Arena, ArmLpaeS1, ArmLpaeS1Config, PageTable};
/// use dmaspan::iommu::{Domain, HardwareError, Invalidation, IommuOps};
/// use dmaspan::{Iova, IovaRange, PhysAddr, Prot, Span, SpanBuf};
/// use dmaspan_sim::sanitizer::{Hardware, Sanitizer};
///
/// /// A driver, of hardware without caches.
/// struct Driver;
///
/// // SAFETY: there is no hardware that could use anything.
/// unsafe impl IommuOps for Driver {
///     type Address = PhysAddr;
///
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
/// fn main() -> Result<(), Box<dyn std::error::Error>> {
///     let sanitizer = Sanitizer::default();
///     let format = ArmLpaeS1::<12>::new(ArmLpaeS1Config::new(48, 48))?;
///     let table = PageTable::new(format, Arena::new(PhysAddr::new(0x4000_0000), 1 << 20))?;
///     let domain = Domain::new(table, Driver.sanitized(&sanitizer))?;
///
///     let range = IovaRange::from_len(Iova::new(0x1000), 0x1000)?;
///     let memory = Span::new(PhysAddr::new(0x8000_0000), 0x1000)?;
///     // SAFETY: one thread maps, and no device reads the memory.
///     unsafe { domain.map_spans(range.start(), &[memory], Prot::READ) }?;
///
///     let mut room = SpanBuf::room::<8>();
///     // SAFETY: one thread unmaps.
///     let unsynced = unsafe { domain.unmap(range, &mut SpanBuf::new(&mut room)) }?;
///     // Freed before the next line, the memory would be a late flush.
///     let _synced = unsynced.sync()?;
///     sanitizer.on_free(memory);
///     drop(domain);
///     assert_eq!(sanitizer.errors(), []);
///     Ok(())
/// }
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

    /// Returns what is wrapped.
    pub fn inner(&self) -> &O {
        &self.inner
    }

    /// The sanitizer that sees it.
    pub fn sanitizer(&self) -> &Sanitizer {
        &self.sanitizer
    }
}

/// Hooks of an IOMMU driver, any driver's, which one call lets a sanitizer see.
///
/// ```
/// use dmaspan::iommu::{Domain, IommuOps};
/// use dmaspan_sim::sanitizer::{Hardware, Sanitized, Sanitizer};
///
/// /// What was `Domain::new(table, hooks)`.
/// fn hooks<O: IommuOps>(hooks: O, sanitizer: &Sanitizer) -> Sanitized<O> {
///     hooks.sanitized(sanitizer)
/// }
/// ```
///
/// A domain with such hooks can be attached to whatever the driver's own can be attached to: the
/// streams of `dmaspan-drivers` and a [`SimPort`](crate::port::SimPort) take both
/// ([`DriverOps`]).
pub trait Hardware: IommuOps + Sized {
    /// These hooks, seen by `sanitizer`.
    fn sanitized(self, sanitizer: &Sanitizer) -> Sanitized<Self> {
        Sanitized::new(self, sanitizer)
    }
}

impl<O: IommuOps> Hardware for O {}

#[expect(unsafe_code, reason = "everything but the events is the inner driver's")]
// SAFETY: every hook asks the inner one's, and answers what it answered.
unsafe impl<O: DriverOps> DriverOps for Sanitized<O> {
    type Driver = O::Driver;

    fn driver(&self) -> &O::Driver {
        self.inner.driver()
    }
}

#[expect(unsafe_code, reason = "everything but the events is the inner driver's")]
// SAFETY: every hook calls the inner driver's with the same arguments and answers what it answered.
unsafe impl<O: IommuOps> IommuOps for Sanitized<O> {
    type Address = O::Address;

    fn begin(&self, promise: Promise<'_>, root: &TableRoot) -> Result<(), HardwareError> {
        self.inner.begin(promise, root)
    }

    fn invalidate(&self, what: &Invalidation<'_>) -> Result<(), HardwareError> {
        let begun = self.sanitizer.on_invalidate_begin(what);
        let answer = self.inner.invalidate(what);
        let outcome = if answer.is_ok() { Outcome::Done } else { Outcome::Failed };
        self.sanitizer.on_invalidate_end(begun, outcome);
        answer
    }

    fn sync_map(&self, range: IovaRange) -> Result<(), HardwareError> {
        let answer = self.inner.sync_map(range);
        if answer.is_ok() {
            self.sanitizer.on_sync_map(range);
        }
        answer
    }

    fn detach(&self) -> Result<(), HardwareError> {
        let answer = self.inner.detach();
        if answer.is_ok() {
            self.sanitizer.on_detach();
        }
        answer
    }

    fn observe(&self, event: &Event<'_>) {
        self.sanitizer.on_event(event);
        self.inner.observe(event);
    }

    forward! { inner:
        fn root_changed(
            &self, promise: Promise<'_>, current: &dyn Fn() -> (PhysAddr, u32)
        ) -> Result<(), HardwareError>;
        fn max_ranges(&self) -> usize;
    }
}

/// Memory whose end a [`Sanitizer`] sees: dropping it, also by a flush queue, releases it.
///
/// [`Sanitizer::on_free`] hears of it just before the inner value is dropped.
pub struct Tracked<H: DmaMemory> {
    inner: H,
    sanitizer: Sanitizer,
    made: &'static Location<'static>,
}

impl<H: DmaMemory> Tracked<H> {
    /// `inner`, seen by `sanitizer`. Histories name the place of this call.
    #[track_caller]
    pub fn new(inner: H, sanitizer: &Sanitizer) -> Self {
        Self { inner, sanitizer: sanitizer.clone(), made: Location::caller() }
    }

    /// Returns what is wrapped.
    pub fn inner(&self) -> &H {
        &self.inner
    }
}

impl<H: DmaMemory> Drop for Tracked<H> {
    fn drop(&mut self) {
        for piece in self.inner.pieces().iter().filter(|piece| piece.via != Via::Bus) {
            self.sanitizer.on_drop(piece.span, self.made);
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

/// Page-table memory of which a [`Sanitizer`] sees what is detached and what is freed: a table that
/// is freed while hardware may still walk into it is a late flush.
///
/// For a domain whose hooks are [`Sanitized`].
#[derive(Clone, Debug)]
pub struct SanitizedTables<M> {
    inner: M,
    sanitizer: Sanitizer,
}

impl<M> SanitizedTables<M> {
    /// `inner`, seen by `sanitizer`.
    pub fn new(inner: M, sanitizer: &Sanitizer) -> Self {
        Self { inner, sanitizer: sanitizer.clone() }
    }

    /// Returns what is wrapped.
    pub fn inner(&self) -> &M {
        &self.inner
    }
}

/// Tables of a [`SanitizedTables`]: those of the inner memory, and which of them were detached.
#[derive(Debug, Default)]
pub struct SanitizedList<L> {
    inner: L,
    detached: Vec<Span>,
}

#[expect(unsafe_code, reason = "everything but the events is the inner memory's")]
// SAFETY: every table is the inner memory's, and so is all that is done with it.
unsafe impl<W: Word, M: TableMemory<W>> TableMemory<W> for SanitizedTables<M> {
    type List = SanitizedList<M::List>;

    fn reserve(&self, shape: TableShape, count: usize) -> Result<Self::List, NoTables> {
        let inner = self.inner.reserve(shape, count)?;
        Ok(SanitizedList { inner, detached: Vec::new() })
    }

    fn take(
        &self,
        promise: Promise<'_>,
        shape: TableShape,
        list: &mut Self::List,
    ) -> Option<Fresh<'_, W>> {
        self.inner.take(promise, shape, &mut list.inner)
    }

    forward! { inner:
        fn coherency(&self) -> Coherency;
        fn publish(&self, fresh: Fresh<'_, W>);
        fn entries(&self, table: &TableAddr) -> &[W::Atomic];
        fn written(&self, promise: Promise<'_>, entries: &[W::Atomic]);
    }

    fn retire(&self, list: &mut Self::List, table: TableAddr) {
        if let Ok(span) = Span::new(table.paddr(), lg2::size(table.lg2_size())) {
            self.sanitizer.on_retire_table(span);
            list.detached.push(span);
        }
        self.inner.retire(&mut list.inner, table);
    }

    fn append(&self, promise: Promise<'_>, list: &mut Self::List, other: Self::List) {
        list.detached.extend(other.detached);
        self.inner.append(promise, &mut list.inner, other.inner);
    }

    fn free(&self, promise: Promise<'_>, shape: TableShape, list: Self::List) {
        list.detached.iter().for_each(|&table| self.sanitizer.on_free_table(table));
        self.inner.free(promise, shape, list.inner);
    }
}
