//! An [`Attachment`] attaches the stream of a device to a domain, and knows what the stream reaches
//! meanwhile.
//!
//! A [`Port`] is what the driver of an IOMMU does for one stream of accesses. An [`Attachment`]
//! knows what the stream reaches: nothing, all memory, or what a domain maps. It keeps the domain
//! alive for as long as hardware may use its tables.

use alloc::sync::Arc;
use core::fmt;
use core::mem::{self, ManuallyDrop};

use lock_api::{Mutex, MutexGuard, RawMutex};

use super::direct::DirectFailed;
use super::domain::Domain;
use super::fault::FaultHook;
use super::ops::{HardwareError, IommuOps};
use super::reserved::{Relaxable, ReservedRegion, ReservedRegions};
use crate::error::Errno;
use crate::io_pgtable::{Format, TableMemory};
use crate::log;

/// A type that has a [`Domain`], or is one.
///
/// Anybody may implement it, and nothing unsafe depends on what it answers: a [`Port`] is given the
/// domain itself, and looks at that one.
pub trait PagingDomain: Send + Sync {
    /// Of its table.
    type Format: Format;
    /// Where the table is.
    type Memory: TableMemory<<Self::Format as Format>::Word>;
    /// The hooks that tell hardware.
    type Ops: IommuOps;

    /// The domain.
    fn domain(&self) -> &DomainOf<Self>;
}

/// The [`Domain`] that a [`PagingDomain`] has.
pub type DomainOf<D> =
    Domain<<D as PagingDomain>::Format, <D as PagingDomain>::Memory, <D as PagingDomain>::Ops>;

impl<F, M, O> PagingDomain for Domain<F, M, O>
where
    F: Format,
    M: TableMemory<F::Word> + Send + Sync,
    O: IommuOps,
{
    type Format = F;
    type Memory = M;
    type Ops = O;

    fn domain(&self) -> &Self {
        self
    }
}

/// The lists of tables of a domain.
type ListOf<D> = <<D as PagingDomain>::Memory as TableMemory<
    <<D as PagingDomain>::Format as Format>::Word,
>>::List;

/// The reason why a stream cannot have a domain, whatever is mapped in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the stream cannot be attached to this domain: {what}")]
pub struct Incompatible {
    /// What does not fit, lower-case.
    pub what: &'static str,
}

/// What [`Port::translate`] says of a domain that [`Port::accepts`] refuses.
impl From<Incompatible> for HardwareError {
    fn from(Incompatible { what }: Incompatible) -> Self {
        Self { what, status: 0 }
    }
}

/// The work of an IOMMU's driver for one stream of accesses that its hardware tells apart: those of
/// a stream ID, of a requester ID, or of a group that cannot be told apart any further.
///
/// Where hardware can, `pass` and `translate` change from the old to the new at one moment, so that
/// an access sees one or the other; what both domains map goes on without a fault.
///
/// # Safety
///
/// Domains are dropped, and their tables freed, on the strength of these:
///
/// 1. When [`block`](Self::block) returns `Ok`, every access that was let through has completed,
///    and until the next call of `pass` or `translate` none is: the stream uses no tables and
///    nothing that was read from them.
/// 2. When [`pass`](Self::pass) or [`translate`](Self::translate) returns `Ok`, every access by
///    what the stream had before has completed, and only what was asked for is used from then on.
/// 3. A hook that fails leaves the stream with what it had, with what was asked for, or blocked.
///    Nothing but these hooks gives it anything, and dropping the port does not.
/// 4. From the begin of a `translate` until a later hook returns `Ok`, the promises of the domain's
///    [`IommuOps`] include this stream. Where they cannot, since the domain is one that
///    [`accepts`](Self::accepts) refuses, `translate` fails and changes nothing.
///
/// The hooks are safe to call: the owner of the port may call them, also beside an [`Attachment`],
/// in any order and from several threads at once. By the last promise a domain that ends takes its
/// tables away from the stream, or leaks them.
#[expect(unsafe_code, reason = "a contract about what devices reach; nothing here is unsafe")]
pub unsafe trait Port: Send + Sync {
    /// What it can be attached to. The hooks are given the domain in it.
    type Paging: PagingDomain;
    /// The lock around what the stream is attached to. Hardware is waited for under it.
    type Lock: RawMutex + Send + Sync;

    /// The regions that firmware and the IOMMU reserve for the stream.
    fn reserved_regions(&self) -> &ReservedRegions;

    /// Returns where faults of the stream are reported.
    fn faults(&self) -> &FaultHook<Self::Lock>;

    /// Whether the stream can have `domain` at all: its IOMMU walks such tables.
    ///
    /// # Errors
    ///
    /// [`Incompatible`] says what does not fit.
    fn accepts(&self, _domain: &DomainOf<Self::Paging>) -> Result<(), Incompatible> {
        Ok(())
    }

    /// Whether hardware can let accesses through as they are.
    fn passes(&self) -> bool {
        false
    }

    /// Lets no access through.
    ///
    /// # Errors
    ///
    /// [`HardwareError`] where completion was not seen in bounded time.
    fn block(&self) -> Result<(), HardwareError>;

    /// Lets all accesses through, each to the physical address that it names. The caller made the
    /// promise for that, whether it attaches the stream or calls this directly.
    ///
    /// # Errors
    ///
    /// [`HardwareError`] where completion was not seen in bounded time, or hardware cannot.
    fn pass(&self, _promise: AllMemory) -> Result<(), HardwareError> {
        Err(HardwareError { what: "the IOMMU cannot let accesses pass untranslated", status: 0 })
    }

    /// Translates accesses by the tables of `domain`.
    ///
    /// # Errors
    ///
    /// [`HardwareError`] where completion was not seen in bounded time, and for a domain that
    /// [`accepts`](Self::accepts) refuses.
    fn translate(&self, domain: &DomainOf<Self::Paging>) -> Result<(), HardwareError>;
}

/// The promise that a device may be let at all memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllMemory(());

impl AllMemory {
    /// Makes the promise.
    ///
    /// # Safety
    ///
    /// The device of each stream that is given this reads and writes only memory that it may,
    /// whatever physical addresses it could name: it is trusted, and whoever drives it keeps it
    /// from memory that the stream has no business with.
    #[expect(unsafe_code, reason = "lets a device at raw physical addresses")]
    pub const unsafe fn promise() -> Self {
        Self(())
    }
}

/// A domain that streams can be attached to, with the direct regions that are mapped in it.
pub struct Prepared<D> {
    domain: Arc<D>,
    direct: Arc<ReservedRegions>,
    relaxable: Relaxable,
}

impl<D: PagingDomain> Prepared<D> {
    /// A domain for streams that have no direct regions.
    pub fn new(domain: Arc<D>) -> Self {
        let direct = Arc::new(ReservedRegions::new());
        Self { domain, direct, relaxable: Relaxable::Keep }
    }

    /// Maps the direct regions of streams in their domain: see [`Domain::map_direct`]. Of several
    /// streams, `regions` has all of each. Where a domain hands out its own IOVAs, they are
    /// [reserved](ReservedRegions::reserve_in) there before.
    ///
    /// # Errors
    ///
    /// [`DirectFailed`], with nothing mapped.
    ///
    /// # Safety
    ///
    /// As for [`Domain::map_direct`].
    #[expect(unsafe_code, reason = "lets devices at raw physical addresses")]
    pub unsafe fn with_direct(
        domain: Arc<D>,
        regions: ReservedRegions,
        relaxable: Relaxable,
    ) -> Result<Self, DirectFailed<ListOf<D>>> {
        domain.domain().map_direct_own(&regions, relaxable)?;
        Ok(Self { domain, direct: Arc::new(regions), relaxable })
    }

    /// The domain.
    pub fn domain(&self) -> &Arc<D> {
        &self.domain
    }

    /// The first of `regions` that a stream needs and that is not mapped.
    fn lacks(&self, regions: &ReservedRegions) -> Option<ReservedRegion> {
        let granule_lg2 = <D::Format as Format>::GRANULE_LG2;
        let mut needed = regions.as_slice().iter().filter(|r| r.kind.is_direct(self.relaxable));
        needed.find(|region| !self.direct.grant(region, granule_lg2, self.relaxable)).copied()
    }
}

impl<D> Clone for Prepared<D> {
    fn clone(&self) -> Self {
        let (domain, direct) = (Arc::clone(&self.domain), Arc::clone(&self.direct));
        Self { domain, direct, relaxable: self.relaxable }
    }
}

impl<D> fmt::Debug for Prepared<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Prepared")
            .field("direct", &self.direct)
            .field("relaxable", &self.relaxable)
            .finish_non_exhaustive()
    }
}

/// Says what a stream is to reach.
#[derive(Debug)]
pub enum Target<D> {
    /// Nothing: every access is a fault.
    ///
    /// Linux keeps a device with direct regions from this state; here it is always possible.
    /// [`Attachment::replace`] changes from one domain to the other without it.
    Blocked,
    /// All memory, by physical addresses.
    Identity(AllMemory),
    /// What the domain maps.
    Paging(Prepared<D>),
}

impl<D> Target<D> {
    fn kind(&self) -> AttachedTo {
        match self {
            Self::Blocked => AttachedTo::Blocked,
            Self::Identity(_) => AttachedTo::Identity,
            Self::Paging(_) => AttachedTo::Paging,
        }
    }
}

/// Says what a stream reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AttachedTo {
    /// Nothing.
    Blocked,
    /// All memory.
    Identity,
    /// What a domain maps.
    Paging,
    /// What hardware had last, what it was to have, or nothing: it did not say. The domains of both
    /// are kept until [`Attachment::detach`] succeeds.
    Unknown,
}

/// The reason why a stream was not attached as asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AttachError {
    /// It is attached already: detach it, or replace what it has.
    #[error("the stream is attached already: {to:?}")]
    Attached {
        /// To what.
        to: AttachedTo,
    },
    /// Hardware did not answer lately: detach until it does.
    #[error("hardware did not answer, so what the stream reaches is unknown: detach it first")]
    Unknown,
    /// Accesses of this stream are always translated.
    #[error("the IOMMU cannot let the accesses of this stream pass untranslated")]
    NoIdentity,
    /// The domain does not fit.
    #[error(transparent)]
    Incompatible(#[from] Incompatible),
    /// The device goes on using a region that the domain was not [prepared](Prepared::with_direct)
    /// for.
    #[error(
        "the direct region {} of the stream is not mapped one to one with {:?} in the domain",
        region.range, region.prot
    )]
    Direct {
        /// The region.
        region: ReservedRegion,
    },
    /// Hardware did not do it.
    #[error("the stream was not switched and is {left:?} now: {source}")]
    Hardware {
        /// What it said.
        source: HardwareError,
        /// What the stream reaches: what it had, wherever hardware went back to that.
        left: AttachedTo,
    },
}

impl AttachError {
    /// Returns what a front end that looks like Linux answers.
    pub const fn errno(&self) -> Errno {
        match self {
            Self::Attached { .. } => Errno::EBUSY,
            Self::NoIdentity => Errno::EOPNOTSUPP,
            Self::Incompatible(_) | Self::Direct { .. } => Errno::EINVAL,
            Self::Unknown | Self::Hardware { .. } => Errno::EIO,
        }
    }
}

/// A stream that hardware did not block, so that what it reaches is unknown.
#[derive(Debug, thiserror::Error)]
#[error("the stream was not blocked: {error}")]
pub struct NotBlocked<P> {
    /// The stream.
    pub port: P,
    /// What hardware said.
    pub error: HardwareError,
}

/// What `?` makes of it. The port is dropped, and the stream stays as it is.
impl<P> From<NotBlocked<P>> for AttachError {
    fn from(failed: NotBlocked<P>) -> Self {
        Self::Hardware { source: failed.error, left: AttachedTo::Unknown }
    }
}

/// What hardware has.
struct State<D> {
    now: Target<D>,
    /// What it is to have, while it is told; where it did not answer, it may have either.
    next: Option<Target<D>>,
}

impl<D> State<D> {
    const BLOCKED: Self = Self { now: Target::Blocked, next: None };

    fn attached_to(&self) -> AttachedTo {
        if self.next.is_some() { AttachedTo::Unknown } else { self.now.kind() }
    }
}

/// A stream, and what it is attached to.
///
/// It keeps its domain: that lives while anything is attached to it. Dropped, it blocks the stream
/// first; where hardware does not answer, the domain is never dropped, and so its tables are never
/// freed.
///
/// # Context
///
/// Operations on one stream wait for each other, and for hardware, under the port's lock.
///
/// ```
/// use std::error::Error;
/// use std::sync::Arc;
///
/// use dmaspan::io_pgtable::{Arena, ArmLpaeS1, ArmLpaeS1Config, PageTable};
/// use dmaspan::iommu::soft::{SoftIommu, SoftStream};
/// use dmaspan::iommu::{Attachment, Domain, FaultAccess, Prepared, ReservedRegions, Target};
/// use dmaspan::{Iova, PhysAddr, Prot, Span};
///
/// fn main() -> Result<(), Box<dyn Error>> {
///     let tables = Arena::new(PhysAddr::new(0x4000_0000), 1 << 20);
///     let format = ArmLpaeS1::<12>::new(ArmLpaeS1Config::new(48, 48))?;
///     let table = PageTable::new(format, tables)?;
///     let iommu = SoftIommu::over(&table);
///     let domain = Arc::new(Domain::new(table, iommu)?);
///     let page = Span::new(PhysAddr::new(0x8000), 0x1000)?;
///     // SAFETY: nobody else maps there, and the device touches no memory.
///     unsafe { domain.map_spans(Iova::new(0), &[page], Prot::READ) }?;
///
///     let port = SoftStream::new(7, ReservedRegions::new());
///     let mut device = port.device();
///     let mut reads = || device.probe(Iova::new(0x10), FaultAccess::Read).ok();
///     let stream = Attachment::new(port)?;
///     assert_eq!(reads(), None);
///     stream.attach(Target::Paging(Prepared::new(domain)))?;
///     assert_eq!(reads(), Some(PhysAddr::new(0x8010)));
///     stream.detach()?;
///     assert_eq!(reads(), None);
///     Ok(())
/// }
/// ```
pub struct Attachment<P: Port> {
    state: Mutex<P::Lock, State<P::Paging>>,
    port: P,
}

impl<P: Port> Attachment<P> {
    /// Takes a stream and blocks it: its device loses the access that a former owner gave it.
    ///
    /// # Errors
    ///
    /// [`NotBlocked`] gives the stream back.
    pub fn new(port: P) -> Result<Self, NotBlocked<P>> {
        match port.block() {
            Ok(()) => Ok(Self { state: Mutex::new(State::BLOCKED), port }),
            Err(error) => Err(NotBlocked { port, error }),
        }
    }

    /// Returns what an IOMMU's driver does for it.
    pub fn port(&self) -> &P {
        &self.port
    }

    /// Returns what the stream reaches.
    pub fn attached_to(&self) -> AttachedTo {
        self.state.lock().attached_to()
    }

    /// The domain that it is attached to, if that is certain.
    pub fn domain(&self) -> Option<Arc<P::Paging>> {
        match &*self.state.lock() {
            State { now: Target::Paging(prepared), next: None } => {
                Some(Arc::clone(&prepared.domain))
            }
            _ => None,
        }
    }

    /// Attaches the stream, which is blocked, to `target`. It has no access before, and that of
    /// `target` when this returns.
    ///
    /// # Errors
    ///
    /// With nothing changed: [`AttachError::Attached`] for a stream that is not blocked,
    /// [`AttachError::Unknown`], [`AttachError::NoIdentity`], [`AttachError::Incompatible`],
    /// [`AttachError::Direct`]. [`AttachError::Hardware`] says what is left.
    pub fn attach(&self, target: Target<P::Paging>) -> Result<(), AttachError> {
        let state = self.state.lock();
        match state.attached_to() {
            AttachedTo::Blocked => self.switch(state, target),
            AttachedTo::Unknown => Err(AttachError::Unknown),
            to => Err(AttachError::Attached { to }),
        }
    }

    /// Attaches the stream to `target` in the place of what it has, at one moment if hardware can:
    /// each access sees the one or the other. When this returns nothing of the old one is used.
    ///
    /// # Errors
    ///
    /// As for [`attach`](Self::attach), but for `Attached`. Where hardware refuses the new one, it
    /// is told the old one again, and is blocked if it refuses that too.
    pub fn replace(&self, target: Target<P::Paging>) -> Result<(), AttachError> {
        let state = self.state.lock();
        match state.attached_to() {
            AttachedTo::Unknown => Err(AttachError::Unknown),
            _ => self.switch(state, target),
        }
    }

    /// Blocks the stream: when this returns, nothing of what it had is used.
    ///
    /// # Errors
    ///
    /// [`AttachError::Hardware`]: what the stream had, it has still, if hardware says so.
    pub fn detach(&self) -> Result<(), AttachError> {
        let mut state = self.state.lock();
        if state.next.is_none() {
            return self.switch(state, Target::Blocked);
        }
        let unknown = |source| AttachError::Hardware { source, left: AttachedTo::Unknown };
        self.port.block().map_err(unknown)?;
        let released = mem::replace(&mut *state, State::BLOCKED);
        drop(state);
        drop(released);
        Ok(())
    }

    /// Gives hardware `target`, or what it had, or nothing.
    fn switch(
        &self,
        mut state: MutexGuard<'_, P::Lock, State<P::Paging>>,
        target: Target<P::Paging>,
    ) -> Result<(), AttachError> {
        self.check(&target)?;
        // Also where a hook panics, both are kept.
        let result = self.program(state.next.insert(target));
        let released = match result {
            Ok(()) => {
                let now = state.next.take().unwrap_or(Target::Blocked);
                mem::replace(&mut *state, State { now, next: None })
            }
            Err(_) if self.program(&state.now).is_ok() => {
                State { now: Target::Blocked, next: state.next.take() }
            }
            Err(_) if self.port.block().is_ok() => mem::replace(&mut *state, State::BLOCKED),
            Err(_) => State::BLOCKED,
        };
        let left = state.attached_to();
        drop(state);
        match &result {
            Ok(()) => log::info!("a stream was switched: what it reaches is {left:?} now"),
            Err(error) => {
                log::warn!("a stream was not switched, and what it reaches is {left:?}: {error}");
            }
        }
        // The end of a domain takes its time: not under the lock.
        drop(released);
        result.map_err(|source| AttachError::Hardware { source, left })
    }

    fn check(&self, target: &Target<P::Paging>) -> Result<(), AttachError> {
        match target {
            Target::Blocked => Ok(()),
            Target::Identity(_) if self.port.passes() => Ok(()),
            Target::Identity(_) => Err(AttachError::NoIdentity),
            Target::Paging(prepared) => {
                self.port.accepts(prepared.domain.domain())?;
                match prepared.lacks(self.port.reserved_regions()) {
                    Some(region) => Err(AttachError::Direct { region }),
                    None => Ok(()),
                }
            }
        }
    }

    fn program(&self, target: &Target<P::Paging>) -> Result<(), HardwareError> {
        match target {
            Target::Blocked => self.port.block(),
            Target::Identity(promise) => self.port.pass(*promise),
            Target::Paging(prepared) => self.port.translate(prepared.domain.domain()),
        }
    }
}

impl<P: Port> Drop for Attachment<P> {
    fn drop(&mut self) {
        let state = mem::replace(self.state.get_mut(), State::BLOCKED);
        if state.attached_to() == AttachedTo::Blocked {
            return;
        }
        // Kept for ever unless hardware has let go, also where the hook panics.
        let state = ManuallyDrop::new(state);
        match self.port.block() {
            Ok(()) => drop(ManuallyDrop::into_inner(state)),
            Err(error) => log::warn!(
                "a stream that was dropped was not blocked, so that the tables of its domain leak: \
                 {error}; reset the device"
            ),
        }
    }
}

impl<P: Port + fmt::Debug> fmt::Debug for Attachment<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attachment")
            .field("port", &self.port)
            .field("attached_to", &self.attached_to())
            .finish()
    }
}
