//! The DMA API without type parameters: a plain [`Device`] is one whose translation, pool and
//! memory are of any type.
//!
//! A map and an unmap take one indirect call each; the rest of what they do is compiled for the
//! translation that is behind it, as it is where the type is known.

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::any::{Any, TypeId};
use core::fmt;
use core::mem::{self, ManuallyDrop};

use super::bounce::{BouncePool, NoPool};
use super::coherent::{Coherent, CoherentFrames, CoherentRequest, NoCoherent};
use super::device::{Device, DeviceConfig};
use super::domain::translation::{Known, Sealed};
use super::domain::{Flush, Translation};
use super::error::Error;
use super::memory::{DmaMemory, FromRegistered, Piece, RawMemory, Registered};
use super::queued::QueuedMemory;
use super::reach::Indirect;
use super::single::Unmapped;
use crate::addr::{Iova, PhysAddr};
use crate::iommu::Event;
use crate::iommu::iova::{Iovas, Request};
use crate::promise::Promise;
use crate::prot::Prot;
use crate::range::IovaRange;
use crate::span::Span;
use crate::swiotlb::{Original, SlotRequest, To};

/// Memory of any kind, for devices and domains that do not name one.
///
/// A [`RawMemory`] and a [`Registered`] are in it as they are, without an allocation, and the
/// content of an [`Arc`] or a [`Box`] stays there: all by `into`. [`new`](Self::new) puts anything
/// else into a box. An unmap gives it back, and [`downcast`](Self::downcast) what is in it.
///
/// ```
/// use dmaspan::dma::{AnyMemory, DmaMemory, Piece};
///
/// struct Packet([Piece; 1], u32);
///
/// // SAFETY: it owns its piece, and nothing refers to that.
/// unsafe impl DmaMemory for Packet {
///     fn pieces(&self) -> &[Piece] {
///         &self.0
///     }
/// }
///
/// fn number(released: AnyMemory) -> Option<u32> {
///     released.downcast::<Packet>().ok().map(|packet| packet.1)
/// }
/// ```
///
/// What is in it is `Sync`, so that errors which give it back go to other threads, too, as an
/// `anyhow::Error` has to.
pub struct AnyMemory(ManuallyDrop<Kind>);

enum Kind {
    Raw(RawMemory),
    Registered(Registered),
    Boxed(Box<dyn Content>),
    Shared(Arc<dyn Content>),
    /// It was taken out.
    Nothing,
}

impl Kind {
    /// Apart from those of most mappings, which are in it as they are.
    #[cold]
    #[inline(never)]
    fn pieces(&self) -> &[Piece] {
        match self {
            Self::Raw(raw) => raw.pieces(),
            Self::Registered(registered) => registered.pieces(),
            Self::Boxed(content) => content.pieces(),
            Self::Shared(content) => content.pieces(),
            Self::Nothing => &[],
        }
    }
}

impl Drop for AnyMemory {
    /// There is no code but a comparison where most memory is dropped, which is in it as it is.
    #[inline(always)]
    fn drop(&mut self) {
        const { assert!(!mem::needs_drop::<RawMemory>()) };
        if !matches!(*self.0, Kind::Raw(_)) {
            self.drop_content();
        }
    }
}

/// What is behind a pointer.
trait Content: DmaMemory + Any + Sync {
    fn boxed_any(self: Box<Self>) -> Box<dyn Any>;
    fn shared_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync>;
}

impl<M: DmaMemory + Sync> Content for M {
    fn boxed_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }

    fn shared_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }
}

impl AnyMemory {
    /// Memory of any kind, in a box.
    pub fn new<M: DmaMemory + Sync>(memory: M) -> Self {
        Self::of(Kind::Boxed(Box::new(memory)))
    }

    #[inline(always)]
    const fn of(kind: Kind) -> Self {
        Self(ManuallyDrop::new(kind))
    }

    fn into_kind(mut self) -> Kind {
        mem::replace(&mut *self.0, Kind::Nothing)
    }

    #[cold]
    #[inline(never)]
    fn drop_content(&mut self) {
        drop(mem::replace(&mut *self.0, Kind::Nothing));
    }

    /// What is in it, if that is an `M` that was not made of an `Arc`.
    ///
    /// # Errors
    ///
    /// The memory, if it is of another type.
    ///
    /// # Context
    ///
    /// Allocates where it was made of a [`RawMemory`]: [`into_raw`](Self::into_raw) does not.
    pub fn downcast<M: DmaMemory>(self) -> Result<M, Self> {
        let content: Box<dyn Content> = match self.into_kind() {
            Kind::Raw(raw) => Box::new(raw),
            Kind::Registered(registered) => Box::new(registered),
            Kind::Boxed(content) => content,
            other => return Err(Self::of(other)),
        };
        if (*content).type_id() != TypeId::of::<M>() {
            return Err(Self::of(Kind::Boxed(content)));
        }
        // It is one.
        content.boxed_any().downcast().map(|memory| *memory).map_err(|_| Self::of(Kind::Nothing))
    }

    /// The `Arc` that it was made of, if that is of an `M`.
    ///
    /// # Errors
    ///
    /// The memory, if it was made of something else.
    pub fn downcast_arc<M: DmaMemory + Sync>(self) -> Result<Arc<M>, Self> {
        match self.into_kind() {
            Kind::Shared(content) if (*content).type_id() == TypeId::of::<M>() => {
                content.shared_any().downcast().map_err(|_| Self::of(Kind::Nothing))
            }
            other => Err(Self::of(other)),
        }
    }

    /// The [`RawMemory`] that it was made of.
    ///
    /// # Errors
    ///
    /// The memory, if it was made of something else.
    pub fn into_raw(self) -> Result<RawMemory, Self> {
        match self.into_kind() {
            Kind::Raw(raw) => Ok(raw),
            other => Err(Self::of(other)),
        }
    }
}

impl From<RawMemory> for AnyMemory {
    #[inline(always)]
    fn from(raw: RawMemory) -> Self {
        Self::of(Kind::Raw(raw))
    }
}

impl From<Registered> for AnyMemory {
    fn from(registered: Registered) -> Self {
        Self::of(Kind::Registered(registered))
    }
}

impl From<Coherent> for AnyMemory {
    fn from(coherent: Coherent) -> Self {
        Self::new(coherent)
    }
}

impl<M: DmaMemory + Sync> From<Box<M>> for AnyMemory {
    fn from(memory: Box<M>) -> Self {
        Self::of(Kind::Boxed(memory))
    }
}

impl<M: DmaMemory + Sync> From<Arc<M>> for AnyMemory {
    fn from(memory: Arc<M>) -> Self {
        Self::of(Kind::Shared(memory))
    }
}

#[expect(unsafe_code, reason = "the content promises")]
// SAFETY: what is in it promised, stays in it while it exists, and is dropped with it.
unsafe impl DmaMemory for AnyMemory {
    #[inline(always)]
    fn pieces(&self) -> &[Piece] {
        match &*self.0 {
            Kind::Raw(raw) => raw.pieces(),
            other => other.pieces(),
        }
    }
}

#[expect(unsafe_code, reason = "it is kept")]
// SAFETY: it is in it, and dropped with it.
unsafe impl FromRegistered for AnyMemory {
    fn from_registered(registered: Registered) -> Self {
        registered.into()
    }
}

impl fmt::Debug for AnyMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("AnyMemory").field(&self.pieces()).finish()
    }
}

/// What translates the addresses of a [plain](Device::erased) device, or lets them through: a
/// [`DmaDomain`](super::DmaDomain) or a [`Direct`](super::Direct) of [`AnyMemory`].
pub struct AnyTranslation {
    inner: Arc<dyn Sealed<Memory = AnyMemory>>,
    direct_memory: Option<Span>,
    granule_lg2: u32,
    last_paddr: PhysAddr,
    flush_mode: Flush,
}

impl AnyTranslation {
    fn new(inner: Arc<dyn Sealed<Memory = AnyMemory>>) -> Self {
        let (direct_memory, granule_lg2) = (inner.direct_memory(), inner.granule_lg2());
        let (last_paddr, flush_mode) = (inner.last_paddr(), inner.flush_mode());
        Self { inner, direct_memory, granule_lg2, last_paddr, flush_mode }
    }
}

impl Sealed for AnyTranslation {
    type Memory = AnyMemory;
    type Pool = AnyPool;
    type Reach<B: BouncePool> = Indirect<B>;

    fn write_back(&self, span: Span) {
        self.inner.write_back(span);
    }

    fn invalidate(&self, span: Span) {
        self.inner.invalidate(span);
    }

    #[inline(always)]
    fn direct_memory(&self) -> Option<Span> {
        self.direct_memory
    }

    #[inline(always)]
    fn granule_lg2(&self) -> u32 {
        self.granule_lg2
    }

    #[inline(always)]
    fn last_paddr(&self) -> PhysAddr {
        self.last_paddr
    }

    fn aperture(&self) -> IovaRange {
        self.inner.aperture()
    }

    #[inline(always)]
    fn flush_mode(&self) -> Flush {
        self.flush_mode
    }

    fn alloc(&self, request: Request) -> Result<Iovas, Error> {
        self.inner.alloc(request)
    }

    fn free(&self, promise: Promise<'_>, iovas: Iovas) {
        self.inner.free(promise, iovas);
    }

    fn map(
        &self,
        promise: Promise<'_>,
        iova: Iova,
        spans: &[Span],
        prot: Prot,
    ) -> Result<(), Error> {
        self.inner.map(promise, iova, spans, prot)
    }

    fn announce(&self, promise: Promise<'_>, range: IovaRange) -> Result<(), Error> {
        self.inner.announce(promise, range)
    }

    fn unmap(
        &self,
        promise: Promise<'_>,
        iovas: Iovas,
        memory: AnyMemory,
        flush: Flush,
    ) -> Result<Unmapped<AnyMemory>, Error> {
        self.inner.unmap(promise, iovas, memory, flush)
    }

    fn unmap_linked(
        &self,
        promise: Promise<'_>,
        iovas: Iovas,
        memory: QueuedMemory<AnyMemory>,
    ) -> Result<(), Error> {
        self.inner.unmap_linked(promise, iovas, memory)
    }

    fn unlink(&self, promise: Promise<'_>, range: IovaRange) -> Result<(), Error> {
        self.inner.unlink(promise, range)
    }

    fn hold(&self, promise: Promise<'_>, iovas: Iovas, memory: AnyMemory) {
        self.inner.hold(promise, iovas, memory);
    }

    fn keep_torn(&self) {
        self.inner.keep_torn();
    }

    fn settle(&self) -> Result<(), Error> {
        self.inner.settle()
    }

    fn observe(&self, event: &Event<'_>) {
        self.inner.observe(event);
    }
}

impl fmt::Debug for AnyTranslation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AnyTranslation")
            .field("direct_memory", &self.direct_memory)
            .field("granule_lg2", &self.granule_lg2)
            .finish_non_exhaustive()
    }
}

impl Device {
    /// A device of the plain type `Device`, which a field of a driver has and a function takes
    /// without type parameters; so are what it maps, a [`Mapping`](super::Mapping), and the errors
    /// of that.
    ///
    /// The translation is one of [`AnyMemory`]. The pool is [`NoPool`], or any pool in an [`Arc`].
    /// A map and an unmap take one indirect call each.
    ///
    /// ```
    /// use std::sync::Arc;
    ///
    /// use dmaspan::dma::{Device, DeviceConfig, Direct, Error, NoPool, Piece, RawMemory};
    /// use dmaspan::{Direction, PhysAddr, Platform, Span};
    ///
    /// struct Driver {
    ///     device: Arc<Device>,
    /// }
    ///
    /// impl Driver {
    ///     fn send(&self, packet: Span) -> Result<(), Error> {
    ///         // SAFETY: the packet is the driver's, and nobody touches it.
    ///         let memory = unsafe { RawMemory::new(Piece::memory(packet)) };
    ///         let mapping = self.device.map_single(memory.into(), Direction::ToDevice)?;
    ///         let _for_the_device = mapping.addr();
    ///         let _released = self.device.unmap(mapping)?;
    ///         Ok(())
    ///     }
    /// }
    ///
    /// fn driver<P: Platform + 'static>(ram: Span, platform: P) -> Result<Driver, Error> {
    ///     let direct = Arc::new(Direct::new(ram, platform));
    ///     let device = Device::erased(direct, NoPool, DeviceConfig::bits(32))?;
    ///     Ok(Driver { device: Arc::new(device) })
    /// }
    /// ```
    ///
    /// # Errors
    ///
    /// As of [`new`](Self::new).
    pub fn erased<D>(
        translation: Arc<D>,
        pool: impl Into<AnyPool>,
        config: DeviceConfig,
    ) -> Result<Self, Error>
    where
        D: Translation + Known<Memory = AnyMemory> + 'static,
    {
        let reach = Indirect::new(Arc::clone(&translation)).ok_or(Error::NoRecords)?;
        let translation = Arc::new(AnyTranslation::new(translation));
        Self::reaching(translation, reach, pool.into(), config)
    }
}

/// A pool of any kind, or none: of a device that does not name one.
///
/// A [slot](BouncePool::Slot) of it is in boxes, since slots of any type have to be: taking one
/// allocates, and is refused where there is no memory.
#[derive(Clone)]
pub struct AnyPool(Option<Arc<dyn ErasedPool>>);

impl From<NoPool> for AnyPool {
    fn from(_: NoPool) -> Self {
        Self(None)
    }
}

impl<B: BouncePool<Slot: Sync + 'static> + 'static> From<Arc<B>> for AnyPool {
    fn from(pool: Arc<B>) -> Self {
        Self(Some(Arc::new(pool)))
    }
}

/// A slot of an [`AnyPool`].
///
/// In two boxes, so that it is one word: all mappings have room for two, and those without are
/// copied.
#[derive(Debug)]
pub struct AnySlot(Box<[Box<dyn SlotContent>; 1]>);

trait SlotContent: Any + Send + Sync + fmt::Debug {
    fn boxed_any(self: Box<Self>) -> Box<dyn Any>;
}

/// An array of one, as a vector becomes it whose allocation may fail.
impl<S: Send + Sync + fmt::Debug + 'static> SlotContent for [S; 1] {
    fn boxed_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

impl AnySlot {
    /// What `take` takes, if there is memory for it.
    fn take_with<S: Send + Sync + fmt::Debug + 'static>(
        take: impl FnOnce() -> Option<S>,
    ) -> Option<Self> {
        let (mut outer, mut inner) = (Vec::new(), Vec::new());
        outer.try_reserve_exact(1).ok()?;
        inner.try_reserve_exact(1).ok()?;
        inner.push(take()?);
        let inner: Box<[S; 1]> = inner.into_boxed_slice().try_into().ok()?;
        outer.push(inner as Box<dyn SlotContent>);
        outer.into_boxed_slice().try_into().ok().map(Self)
    }

    fn get<S: 'static>(&self) -> Option<&S> {
        let [content] = &*self.0;
        let any: &dyn Any = &**content;
        any.downcast_ref::<[S; 1]>().map(|[slot]| slot)
    }

    fn take<S: 'static>(self) -> Option<S> {
        let [content] = *self.0;
        content.boxed_any().downcast::<[S; 1]>().ok().map(|one| {
            let [slot] = *one;
            slot
        })
    }
}

trait ErasedPool: Send + Sync {
    fn take(&self, original: Original, request: &SlotRequest) -> Option<AnySlot>;
    fn release(&self, slot: AnySlot);
    fn quarantine(&self, slot: AnySlot);
    fn span(&self, slot: &AnySlot) -> Option<Span>;
    fn copy(&self, slot: &AnySlot, offset: u64, len: u64, to: To);
    fn reach(&self) -> Option<Span>;
    fn owns(&self, span: Span) -> bool;
    fn max_len(&self, request: &SlotRequest) -> u64;
    fn granules(&self, granule: u64) -> u64;
    fn coherent(&self, request: &CoherentRequest) -> Result<CoherentFrames, NoCoherent>;
}

/// A slot of another type is of another pool, and none of those comes here: a device has one pool,
/// and ends no mapping of another device.
impl<B: BouncePool<Slot: Sync + 'static> + 'static> ErasedPool for Arc<B> {
    fn take(&self, original: Original, request: &SlotRequest) -> Option<AnySlot> {
        AnySlot::take_with(|| BouncePool::take(self, original, request))
    }

    fn release(&self, slot: AnySlot) {
        if let Some(slot) = slot.take() {
            BouncePool::release(self, slot);
        }
    }

    fn quarantine(&self, slot: AnySlot) {
        if let Some(slot) = slot.take() {
            BouncePool::quarantine(self, slot);
        }
    }

    fn span(&self, slot: &AnySlot) -> Option<Span> {
        slot.get().map(|slot| BouncePool::span(self, slot))
    }

    fn copy(&self, slot: &AnySlot, offset: u64, len: u64, to: To) {
        if let Some(slot) = slot.get() {
            BouncePool::copy(self, slot, offset, len, to);
        }
    }

    fn reach(&self) -> Option<Span> {
        BouncePool::reach(self)
    }

    fn owns(&self, span: Span) -> bool {
        BouncePool::owns(self, span)
    }

    fn max_len(&self, request: &SlotRequest) -> u64 {
        BouncePool::max_len(self, request)
    }

    fn granules(&self, granule: u64) -> u64 {
        BouncePool::granules(self, granule)
    }

    fn coherent(&self, request: &CoherentRequest) -> Result<CoherentFrames, NoCoherent> {
        BouncePool::coherent(self, request)
    }
}

#[expect(unsafe_code, reason = "the pool promises")]
// SAFETY: everything is done by the pool, which promised, and there are no slots without one.
unsafe impl BouncePool for AnyPool {
    type Slot = AnySlot;

    fn take(&self, original: Original, request: &SlotRequest) -> Option<AnySlot> {
        self.0.as_ref()?.take(original, request)
    }

    fn release(&self, slot: AnySlot) {
        if let Some(pool) = &self.0 {
            pool.release(slot);
        }
    }

    fn quarantine(&self, slot: AnySlot) {
        if let Some(pool) = &self.0 {
            pool.quarantine(slot);
        }
    }

    fn span(&self, slot: &AnySlot) -> Span {
        let span = self.0.as_ref().and_then(|pool| pool.span(slot));
        // One of another type of pool has no bytes here.
        span.unwrap_or(Span::covering(PhysAddr::new(0), 0))
    }

    fn copy(&self, slot: &AnySlot, offset: u64, len: u64, to: To) {
        if let Some(pool) = &self.0 {
            pool.copy(slot, offset, len, to);
        }
    }

    fn reach(&self) -> Option<Span> {
        self.0.as_ref()?.reach()
    }

    fn owns(&self, span: Span) -> bool {
        self.0.as_ref().is_some_and(|pool| pool.owns(span))
    }

    fn max_len(&self, request: &SlotRequest) -> u64 {
        self.0.as_ref().map_or(0, |pool| pool.max_len(request))
    }

    fn granules(&self, granule: u64) -> u64 {
        self.0.as_ref().map_or(0, |pool| pool.granules(granule))
    }

    fn coherent(&self, request: &CoherentRequest) -> Result<CoherentFrames, NoCoherent> {
        let none = NoCoherent { why: "the device has no pool" };
        self.0.as_ref().ok_or(none)?.coherent(request)
    }
}

impl fmt::Debug for AnyPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AnyPool").field("reach", &self.reach()).finish()
    }
}
